"""Idle time of a GPU between two steps of decoding, for benchmarks."""

import cupy

from cuda_backend.launch import Stream


class Idle:
    """Add up the times from the end of each step whose tokens are copied to the host to the beginning of the next."""

    def __init__(self, stream: Stream):
        self.stream = stream
        self.gaps: list[tuple[cupy.cuda.Event, cupy.cuda.Event]] = []
        self._ended: cupy.cuda.Event | None = None

    def _now(self) -> cupy.cuda.Event:
        event = cupy.cuda.Event()
        self.stream.record(event)
        return event

    def begins(self) -> None:
        """Note that a step is about to be launched."""
        if self._ended is not None:
            self.gaps.append((self._ended, self._now()))
            self._ended = None

    def ends(self) -> None:
        """Note that a step's last launch has been made."""
        self._ended = self._now()

    def seconds(self) -> float:
        """Wait for the steps so far, and return the seconds between them."""
        self.stream.synchronize()
        return sum(cupy.cuda.get_elapsed_time(ended, begun) for ended, begun in self.gaps) / 1e3
