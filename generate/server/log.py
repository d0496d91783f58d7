"""The log: one line per request, without anything that a prompt, a reply or a key says."""

import json
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from common.terminal import printable
from generate.server.events import Usage

MOST_PATH = 200
PARTED = re.compile(r'[\s"]|^$')


class Log:
    """Writes lines to `stream` (stderr by default), as text or as JSON objects."""

    def __init__(self, as_json: bool = False, stream: TextIO | None = None):
        self._as_json, self._stream = as_json, stream

    def line(self, event: str, **values: Any) -> None:
        """Write one line: when, what, and `values` that are not None."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        given = {name: value for name, value in values.items() if value is not None}
        if self._as_json:
            text = json.dumps({"time": when, "event": event} | given, ensure_ascii=True)
        else:
            text = printable(" ".join([when, event, *(f"{name}={word(value)}" for name, value in given.items())]))
        print(text, file=self._stream or sys.stderr, flush=True)

    def request(self, scope: Mapping[str, Any], id: str, status: int, seconds: float, note: Mapping[str, Any]) -> None:
        """Write the line of an answered request. The query may hold a key, and is left out."""
        usage: Usage | None = note.get("usage")
        tokens = {} if usage is None else {"prompt": usage.prompt, "cached": usage.cached, "new": usage.completion}
        self.line(
            "request",
            id=id,
            method=scope["method"],
            path=scope["path"][:MOST_PATH],
            status=status,
            ms=round(1000 * seconds, 1),
            **tokens,
            error=note.get("error"),
            at=note.get("at"),
        )


def word(value: Any) -> str:
    """Text of a value as one word, in quotes where it has white space: a request's path must not forge an entry."""
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if PARTED.search(text) else text
