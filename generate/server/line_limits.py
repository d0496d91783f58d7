"""LineLimits: ends a reply at a line that leaves its block, or at the first end of a line after some time."""

import time


class LineLimits:
    """The part of a growing text that is shown, by llama.cpp's rules for editors.

    indent   least spaces and tabs at the beginning of each line but the first; the text ends where one has fewer
    seconds  after the first piece, from which the text ends with the next piece that has the end of a line; 0: none
    silent   no text is shown
    """

    def __init__(self, indent: int = 0, seconds: float = 0, silent: bool = False):
        self.indent, self.seconds, self.silent = indent, seconds, silent
        self.is_over = silent
        self._began: float | None = None
        self._blanks: int | None = None  # at the beginning of the line so far; None: the line has other characters

    def push(self, text: str) -> str:
        """Add text; return the part that is shown."""
        now = time.perf_counter()
        self._began = now if self._began is None else self._began
        if self.silent:
            return ""
        if self.seconds and "\n" in text and now - self._began > self.seconds:
            self.is_over = True
        if not self.indent:
            return text
        for at, character in enumerate(text):
            if self._blanks is not None and character in " \t":
                self._blanks += 1
            elif self._blanks is not None and self._blanks < self.indent:
                self.is_over = True
                return text[:at]
            else:
                self._blanks = 0 if character == "\n" else None
        return text
