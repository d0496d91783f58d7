"""Idle time of a GPU between two steps of decoding, for benchmarks."""

import cupy

from cuda_backend.launch import Stream

EVERY = 8  # steps of which one is measured: recording an event takes the host microseconds, which a step may wait for


class Idle:
    """Measure the time from the end of a step whose tokens are copied to the host to the beginning of the next one."""

    def __init__(self, stream: Stream):
        self.stream, self.steps = stream, 0
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
        if self.steps % EVERY == 0:
            self._ended = self._now()
        self.steps += 1

    def seconds(self) -> float:
        """Wait for the steps so far, and return the mean seconds after one of them; 0 if none was measured."""
        self.stream.synchronize()
        measured = [cupy.cuda.get_elapsed_time(ended, begun) for ended, begun in self.gaps]
        return sum(measured) / 1e3 / max(len(measured), 1)
