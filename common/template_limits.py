"""Limits of one run of a chat template: time, the length of every value, and the length of all together."""

import re
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2.exceptions import SecurityError

SECONDS = 2.0  # maximum of the thread's CPU time in one run
LEAST, PER_CHARACTER = 1 << 18, 16  # limit of a value in characters, and its increase per character of the input
GROWTH = 64  # limits that one call may multiply arguments to, in characters made or compared
TOTAL = 256  # limits that all values of one run may have together
BITS = 4096  # of an integer; dividing long ones takes quadratic time

# Filters and methods whose result, or time, grows with the product of their arguments, numbers taken by value.
_MULTIPLIES = frozenset(
    ("batch", "center", "format", "indent", "join", "ljust", "replace", "rjust", "round", "slice", "tojson", "truncate")
) | {"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim", "zfill"}
_LISTS: Any = (list, tuple, type({}.keys()), type({}.values()), type({}.items()))


class LimitError(Exception):
    """A template exceeded a limit."""


class TemplateLimits:
    """The limits of one run of a template, and the amounts that are left.

    inputs   values that the template reads; it cannot change them, so that each is measured once
    seconds  of the thread's CPU time
    """

    def __init__(self, inputs: Any, seconds: float):
        self.now = datetime.now()
        self._deadline = time.thread_time() + seconds
        self._next_look = 0.0  # of time.monotonic(), which is cheaper to read
        self.known: dict[int, int] = {}
        self.limit = LEAST + PER_CHARACTER * self._measure(inputs)
        self.left = TOTAL * self.limit

    def _measure(self, value: Any) -> int:
        if isinstance(value, Mapping):
            size = 1 + sum(self._measure(key) + self._measure(item) for key, item in value.items())
        elif isinstance(value, list | tuple):
            size = 1 + sum(map(self._measure, value))
        else:
            return _characters(value)
        self.known[id(value)] = size
        return size

    def size(self, value: Any) -> int:
        """Count the characters of `value` and its contents, repeated ones repeatedly; above the limit, any number."""
        if isinstance(value, str):
            return len(value)
        todo, size = [value], 0
        while todo and size <= self.limit:
            value = todo.pop()
            if id(value) in self.known:
                size += self.known[id(value)]
            elif isinstance(value, Mapping):
                todo += [*value.keys(), *value.values()]
                size += 1
            elif isinstance(value, _LISTS):
                todo += value
                size += 1
            else:
                size += _characters(value)
        return size

    def tick(self) -> None:
        """Refuse to continue after the run's seconds. Time of other programs on a busy machine does not count."""
        if time.monotonic() > self._next_look:
            left = self._deadline - time.thread_time()
            if left < 0:
                raise LimitError(f"takes longer than {SECONDS:g} seconds")
            self._next_look = time.monotonic() + left  # the thread's own time passes no faster

    def check(self, value: Any) -> Any:
        """Check and return `value`, which the template has just made."""
        self.tick()
        if isinstance(value, int):
            self.check_bits(value.bit_length())
        size = self.size(value)
        self.left -= size
        if size > self.limit or self.left < 0:
            raise self.too_long()
        return value

    def check_growth(self, name: str, values: tuple[Any, ...], more: Mapping[str, Any]) -> None:
        """Refuse a call of filter or method `name` whose result or time could be much larger than its arguments."""
        self.tick()
        if name not in _MULTIPLIES or not values:
            return
        if name == "format":
            self.check_format(values[0])
        rest = [*values[2 if name == "replace" else 1 :], *more.values()]
        factor = 1 + sum(self.size(v) if name == "format" or not isinstance(v, int) else abs(v) for v in rest)
        if max(1, self.size(values[0])) * factor > GROWTH * self.limit:
            raise self.too_long()

    def check_bits(self, bits: int) -> None:
        if bits > BITS:
            raise LimitError(f"makes an integer of more than {BITS} bits")

    def check_format(self, form: Any) -> None:
        """Refuse a format with a large width, or with widths in its arguments."""
        text = form.decode("latin-1") if isinstance(form, bytes) else str(form)
        if sum(int(run[:9]) for run in re.findall("[0-9]+", text)) > GROWTH * self.limit:
            raise self.too_long()
        if re.search(r"\{[^{}]*\{|%[^a-zA-Z%]*\*", text.replace("{{", "")):
            raise SecurityError("a format takes its width from an argument")

    def too_long(self) -> LimitError:
        return LimitError(f"makes more than the {self.limit} characters that this conversation may take")


def _characters(value: Any) -> int:
    if isinstance(value, str | bytes):
        return 1 + len(value)
    return 1 + value.bit_length() // 3 if isinstance(value, int) else 1
