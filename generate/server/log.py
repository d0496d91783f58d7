"""The log: one line per request, without text of prompts and replies, and without keys."""

import json
import logging
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from common.terminal import printable
from generate.server.errors import ApiError
from generate.server.events import Usage

MOST_PATH = 200
LIBRARIES = ("uvicorn", "asyncio")
BROKEN_OFF = "ASGI callable returned without completing response."  # the request's line has the reason
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

    def request(self, scope: Mapping[str, Any], status: int, seconds: float, note: Mapping[str, Any]) -> None:
        """Write the line of an answered request. The query may hold a key, and is left out."""
        usage: Usage | None = note.get("usage")
        tokens = {} if usage is None else {"prompt": usage.prompt, "cached": usage.cached, "new": usage.completion}
        self.line(
            "request",
            id=note["id"],
            method=scope["method"],
            path=scope["path"][:MOST_PATH],
            status=status,
            ms=round(1000 * seconds, 1),
            **tokens,
            error=note.get("error"),
            at=note.get("at"),
        )


def word(value: Any) -> str:
    """Write a value as one word, quoted if it has white space: a request's path must not forge an entry."""
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if PARTED.search(text) else text


def place(error: BaseException) -> str:
    """Return where an error was raised, without its message, which may hold a prompt."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return f"{type(error).__name__} at " + " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames))


def fault_of(error: Exception, told: ApiError | None) -> dict[str, str]:
    """Return the entries of a request's line for an error: its code, or for a fault of the server its type and place.

    told  the refusal that the client gets; None: none
    """
    cause = (told and told.__cause__) or error
    if told is None or told.status == 500:
        return {"error": type(cause).__name__, "at": place(cause)}
    return {"error": told.code or told.param or type(cause).__name__}


class _Handler(logging.Handler):
    """Writes warnings and errors of libraries as lines of a log, without messages of exceptions."""

    def __init__(self, log: Log):
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage().partition("\n")[0][:MOST_PATH]
        if text == BROKEN_OFF:
            return
        at = None if error is None else place(error)
        self._log.line(record.levelname.lower(), source=record.name, message=text, at=at)


@contextmanager
def forwarding(log: Log) -> Iterator[None]:
    """Have the HTTP server and the event loop write their lines to `log`, in its form, for a block."""
    loggers, handler = [logging.getLogger(name) for name in LIBRARIES], _Handler(log)
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagates in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagates
