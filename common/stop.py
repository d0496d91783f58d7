"""Stop strings in a text that grows."""

from collections.abc import Sequence

from common.reply import overlap


class StopText:
    """Filter that holds text which may be the beginning of a stop string, and cuts at the first stop string."""

    def __init__(self, stop: Sequence[str]):
        self.stop = tuple(stop)
        self.held = ""
        self.stopped_by: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stopped_by is not None

    def push(self, text: str) -> str:
        """Add text, and return the text that is certainly not part of a stop string."""
        if not self.stop:
            return text
        self.held += text
        ends = [(at, s) for s in self.stop if (at := self.held.find(s)) >= 0]
        if ends:
            end, self.stopped_by = min(ends)
            out, self.held = self.held[:end], ""
            return out
        held = max(overlap(self.held, s) for s in self.stop)
        out, self.held = self.held[: len(self.held) - held], self.held[len(self.held) - held :]
        return out

    def flush(self) -> str:
        """Return the held text after the end of the text."""
        out, self.held = self.held, ""
        return out
