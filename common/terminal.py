"""Escape control characters on a terminal, where OSC 52 sets the clipboard, CSI hides text, bidi marks reorder it."""

import re
from typing import Any

# C0 without tab and line feed, DEL and C1; line and paragraph separators; what turns the direction of text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""Return `text` with every control character but tab and line feed written out, as \x1b or \u202e.

    Characters are independent, so that a text may come in pieces. A carriage return is written out too, because the
    text after it would overwrite the line.
    """
    return _CONTROL.sub(lambda match: _escape(match[0]), text)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


class Printable:
    """A text stream that writes every text to `stream` through `printable`."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
