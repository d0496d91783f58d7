"""Parse a JSON object from outside: bounded in depth and number of values, without values that JSON cannot write."""

import json
import math
from typing import Any

from generate.server.errors import ApiError

MOST_BYTES = 32 << 20
MOST_DEPTH = 100
MOST_VALUES = 1 << 20


def parse_json(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`; raises ApiError for anything else."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    if not text.strip():
        raise ApiError(400, "the body is empty; it must be a JSON object")
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except ValueError as error:  # an integer of thousands of digits
        raise ApiError(400, f"the body is not supported JSON: {str(error)[:100]}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object")
    check_values(value)
    return value


def check_values(value: Any) -> None:
    """Refuse what is nested too deeply, has too many values, infinite numbers, or half a surrogate pair."""
    level, count = [value], 0
    for _ in range(MOST_DEPTH):
        below: list[Any] = []
        count += len(level)
        if count > MOST_VALUES:
            raise ApiError(413, f"the body has more than {MOST_VALUES} values, which is the most supported")
        for item in level:
            if isinstance(item, str):
                _check_text(item)
            elif isinstance(item, float):
                if not math.isfinite(item):
                    raise ApiError(400, "the body holds a number beyond the range of float64")
            elif isinstance(item, dict):
                for key in item:
                    _check_text(key)
                below += item.values()
            elif isinstance(item, list):
                below += item
        if not below:
            return
        level = below
    raise _too_deep()


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiError(400, "the body holds half a surrogate pair, which is no character") from None


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested deeper than {MOST_DEPTH} levels, which is the most supported")


def _refuse_constant(name: str) -> Any:
    raise ApiError(400, f"the body holds {name}, which is not JSON")
