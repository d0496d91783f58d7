"""Parse the values of flags: each function reads the typed text, or raises argparse.ArgumentTypeError in a sentence."""

import argparse
import json
import os
import re
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from common.options import MOST_DRAFTED, MOST_TOKENS

HOST, ORIGIN = re.compile(r"[\w.-]+", re.ASCII), re.compile(r"[a-z][a-z0-9+.-]*://[\w.:\[\]-]+", re.ASCII)
DIGITS = 30  # of a whole number; Python refuses to read thousands


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def count(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or (len(text) <= DIGITS and int(text) < least):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a whole number of at least {least}")
    if len(text) > DIGITS:
        raise argparse.ArgumentTypeError(f"{text:.{DIGITS}}... has {len(text)} digits; at most {DIGITS} are supported")
    return int(text)


def budget(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or len(text) > DIGITS or not 1 <= int(text) <= MOST_DRAFTED:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is neither auto nor a whole number from 1 to {MOST_DRAFTED}")
    return int(text)


def words(text: str) -> str:
    """Return the text as typed: where the locale is not UTF-8, Python decodes the command line in another way."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"is not UTF-8: {error.reason} at byte {error.start}") from None


def schema(text: str) -> dict[str, Any] | bool:
    """Return a JSON schema."""
    try:
        value = json.loads(words(text))
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not JSON: {error}") from None
    if not isinstance(value, dict | bool):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not an object, as JSON schemas are")
    return value


def source(text: str) -> str:
    """Return the name of a file to read once; "-" is stdin."""
    return "/dev/stdin" if text == "-" else text


def file(text: str) -> str:
    """Return the name of a file that cannot be stdin or stdout."""
    if text == "-":
        raise argparse.ArgumentTypeError("'-' is not supported; give the name of a file")
    return text


def folder(text: str) -> str:
    """Return the name of a folder, which cannot be stdout."""
    if text == "-":
        raise argparse.ArgumentTypeError("'-' is not supported; give the name of a folder")
    return text


def stop(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("a stop string is empty; each must have at least one character")
    return words(text)


def positive(text: str) -> int:
    return _whole(text, 1)


def limit(text: str) -> int | None:
    """Return a number of tokens; None is the context, which llama.cpp and Ollama name -1 and -2."""
    if text in ("-1", "-2"):
        return None
    try:
        return positive(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; -1 is no limit but the context") from None


def seed(text: str) -> int | None:
    """Return the seed of a reply; None is a new one, which llama.cpp names -1."""
    return None if text == "-1" else count(text)


def url(text: str) -> str:
    """Return a server's address, without its path."""
    try:
        parts = urlsplit(text)
        if parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port):
            return f"{parts.scheme}://{parts.netloc}"
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r:.80} must be a URL such as http://127.0.0.1:8080")


def base(text: str) -> str:
    """Return a server's address with the path before its routes, without /v1."""
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port)
        if good and not (parts.query or parts.fragment or parts.username or parts.password) and text.isascii():
            return text.rstrip("/").removesuffix("/v1").rstrip("/")
    except ValueError:
        pass
    raise argparse.ArgumentTypeError("it must be a URL such as http://127.0.0.1:8000/v1, without a name or a key")


def above_zero(text: str) -> float:
    if not 0 < (value := number(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def ratio(text: str) -> float:
    if not 0 < (value := number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0 and at most 1")
    return value


def curve(text: str) -> tuple[tuple[int, float], ...]:
    """Read points TOKENS:SHARE with rising tokens, such as 8000:0.3,32000:0.1."""
    points = []
    for part in text.split(","):
        tokens, _, share = part.partition(":")
        points.append((positive(tokens), ratio(share)))
    if any(after <= before for (before, _), (after, _) in pairwise(points)):
        raise argparse.ArgumentTypeError(f"{text!r} has tokens that do not rise from point to point")
    return tuple(points)


def counts(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def tokens(text: str) -> int:
    if positive(text) > MOST_TOKENS:
        raise argparse.ArgumentTypeError(f"{text} tokens are more than the {MOST_TOKENS} that a context can have")
    return int(text)


def context(text: str) -> int | None:
    """Return a context length in tokens; 0 is the model's own, None."""
    return None if count(text) == 0 else tokens(text)


def budgets(text: str) -> list[int]:
    numbers = counts(text)
    if too_many := next((number for number in numbers if number > MOST_DRAFTED), None):
        raise argparse.ArgumentTypeError(f"'{too_many}' is not a whole number from 1 to {MOST_DRAFTED}")
    return numbers


def indices(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def numbers(text: str) -> list[float]:
    return [number(part) for part in text.split(",")]


def port(text: str) -> int:
    if count(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port from 0 to 65535; 0 takes a free one")
    return int(text)


def key(text: str) -> str:
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError("a key must be printable ASCII without spaces, at least one character")
    return text


def host(text: str) -> str:
    """Return the name of a host, as a Host header has it before the port."""
    if not HOST.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r:.80} must be a name such as my.example, without scheme and port")
    return text


def origin(text: str) -> str:
    """Return an origin as browsers send it: in lower case, without a path."""
    found = text.lower().rstrip("/")
    if found not in ("*", "null") and not ORIGIN.fullmatch(found):
        raise argparse.ArgumentTypeError(f"{text!r:.80} must be *, null, or such as https://my.example, without a path")
    return found
