"""Reading a model's configuration: every key is required, defaulted or refused, and nothing is dropped silently.

One face for Hugging Face's config.json (nested objects, "rope_parameters.rope_theta") and GGUF metadata (flat keys).
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from common.errors import BimetalError

T = TypeVar("T")
REQUIRED: Any = object()


class Keys:
    """The keys of one configuration; `where` names it in messages.

    A GGUF file's keys start with its architecture, given as `prefix` ("qwen35."); they contain dots of their own.
    """

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "", nested: bool = True):
        self.values, self.where, self.prefix, self.nested = values, where, prefix, nested

    def get(self, key: str) -> Any:
        """Return the value at `key`, or None where the key is absent or null."""
        if not self.nested:
            return self.values.get(self.prefix + key)
        value: Any = self.values
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def flag(self, key: str) -> bool | None:
        """Return the value at `key`; None where the key is absent, for a default that depends on more."""
        return None if self.get(key) is None else self.read(key, bool)

    def read(self, key: str, kind: type[T], default: T = REQUIRED) -> T:
        """Return the value at `key` as `kind`; a missing key gives `default`, or an error where there is none."""
        value = self.get(key)
        if value is None:
            if default is REQUIRED:
                raise BimetalError(f"{self.where} lacks the required key {self.prefix}{key} ({kind.__name__})")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise BimetalError(f"{self.where}: {self.prefix}{key} is {_short(value)}, expected {kind.__name__}")
        return value

    def size(self, key: str, default: int = REQUIRED) -> int:
        """Return a dimension or a count: an integer above 0."""
        value = self.read(key, int, default)
        if not 0 < value < 2**31:
            raise BimetalError(f"{self.where}: {self.prefix}{key} is {value}, expected a number from 1 to 2^31 - 1")
        return value

    def positive(self, key: str, default: float = REQUIRED) -> float:
        """Return a finite float above 0."""
        value = self.read(key, float, default)
        if not 0 < value < float("inf"):
            raise BimetalError(f"{self.where}: {self.prefix}{key} is {value}, expected a finite number above 0")
        return value

    def expect(self, key: str, *supported: Any) -> None:
        """Refuse a present key whose value is none of `supported`."""
        value = self.get(key)
        if value is not None and value not in supported:
            allowed = " or ".join(str(s) for s in supported)
            raise BimetalError(f"{self.where}: {self.prefix}{key} is {_short(value)}; supported: {allowed}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
