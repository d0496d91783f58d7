"""Rules for values from a caller: `Rule.accept` makes a plain Python type or refuses the value in one sentence."""

import math
import numbers
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.amounts import parse_size
from common.errors import UsageError, shown


@dataclass(frozen=True)
class Rule:
    """The values that an option may have.

    words    the values in words, after "it must be"
    convert  gives the value in plain types; raises TypeError, ValueError or OverflowError for any other
    """

    words: str
    convert: Callable[[Any], Any]

    def accept(self, name: str, value: Any) -> Any:
        """Return the value of option `name` in plain types; raises UsageError."""
        try:
            return self.convert(value)
        except (TypeError, ValueError, OverflowError):
            raise UsageError(f"{name} is {shown(value)}; it must be {self.words}") from None


def number(words: str, holds: Callable[[float], bool]) -> Rule:
    """Accept real numbers for which `holds`, but no text and no bool."""

    def convert(value: Any) -> float:
        return _check(float(_typed(value, numbers.Real)), holds)

    return Rule(words, convert)


def whole(minimum: int, maximum: int | None = None) -> Rule:
    """Accept integers from `minimum`, to `maximum` where given, NumPy's among them, but no bool."""

    def convert(value: Any) -> int:
        return _check(
            operator.index(_typed(value, numbers.Integral)),
            lambda x: x >= minimum and (maximum is None or x <= maximum),
        )

    words = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    return Rule(f"a whole number {words}", convert)


def none_or(minimum: int) -> Rule:
    """Accept 0 and integers from `minimum`."""
    some = whole(0)
    return Rule(
        f"0 or a whole number of at least {minimum}",
        lambda value: _check(some.convert(value), lambda x: x == 0 or x >= minimum),
    )


def one_of(*names: str) -> Rule:
    """Accept one of some texts."""
    return Rule(f"one of {', '.join(names)}", lambda value: _check(_typed(value, str), lambda x: x in names))


def name_of(*names: str) -> Rule:
    """Accept one of some names, in any case."""
    return Rule(f"one of {', '.join(names)}", lambda value: _check(_typed(value, str).lower(), lambda x: x in names))


def many(words: str, rule: Rule) -> Rule:
    """Accept a sequence of values that `rule` accepts, as a tuple."""
    return Rule(words, lambda value: tuple(rule.convert(item) for item in _typed(value, Sequence)))


def texts(words: str) -> Rule:
    """Accept one text or a sequence of texts, as a tuple; none may be empty."""

    def convert(value: Any) -> tuple[str, ...]:
        items = (value,) if isinstance(value, str) else tuple(_typed(value, Sequence))
        return tuple(_check(_typed(item, str), bool) for item in items)

    return Rule(words, convert)


def variables(*reserved: str) -> Rule:
    """Accept a mapping from names to values, without the `reserved` names."""

    def convert(value: Any) -> Mapping[str, Any]:
        names = set(_typed(value, Mapping))
        _check(names, lambda names: all(isinstance(name, str) for name in names) and not names & {*reserved})
        return dict(value)

    return Rule(f"a dict of values by name, without {', '.join(reserved)}", convert)


def _path(value: Any) -> str:
    return _check(_typed(os.fspath(value), str), bool)


def _amount(value: Any) -> int:
    return parse_size(value) if isinstance(value, str) else whole(1).convert(value)


def _typed(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError
    return value


def _check(value: Any, holds: Callable[[Any], bool]) -> Any:
    if not holds(value):
        raise ValueError
    return value


def _call(value: Any) -> Any:
    return _check(value, callable)


def _bias(value: Any) -> Mapping[int, float]:
    token = whole(0)
    return {token.convert(key): FINITE.convert(bias) for key, bias in _typed(value, Mapping).items()}


NO_AMOUNT = Rule(
    "0, bytes, or an amount of memory such as '8GB'",
    lambda value: 0 if value in (0, "0") and not isinstance(value, bool) else _amount(value),
)
AMOUNT = Rule("bytes, or an amount of memory such as '8GB' or '7.5GiB'", _amount)
TEXT = Rule("text", lambda value: _typed(value, str))
FLAG = Rule("True or False", lambda value: _typed(value, bool))
PATH = Rule("a name or a path", _path)
CALLBACK = Rule("a function", _call)
ITEMS = Rule("a list", lambda value: _check(_typed(value, Sequence), lambda x: not isinstance(x, str | bytes)))
AT_LEAST_0 = number("a finite number of at least 0", lambda x: 0 <= x < math.inf)
NOT_NEGATIVE = number("a number of at least 0", lambda x: x >= 0)
POSITIVE = number("a finite number above 0", lambda x: 0 < x < math.inf)
FINITE = number("a finite number", math.isfinite)
SHARE = number("a number above 0 and at most 1", lambda x: 0 < x <= 1)
BIAS = Rule("a dict of finite numbers by token id", _bias)
LEAST_SHARE = number("a number of at least 0 and below 1", lambda x: 0 <= x < 1)
