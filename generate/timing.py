"""A stopwatch, and messages on stderr about long operations."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Measures the `seconds` that a `with` block took."""

    def __enter__(self) -> "Clock":
        self.started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self.started


@contextmanager
def announced(what: str, after: float = 10.0) -> Iterator[None]:
    """Print `what` on stderr if the block takes longer than `after` seconds, whether stderr is a terminal or not."""
    timer = threading.Timer(after, print, [f"{what}: not done after {after:.0f} s"], {"file": sys.stderr})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
