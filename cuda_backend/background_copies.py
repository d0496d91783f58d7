"""Copies from the device to the host in a separate thread, while the stream continues."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import cupy
import numpy as np

MANY = 256 << 20  # bytes of device memory that may always wait for their copies
CHUNK = 16 << 20  # bytes that are copied at a time


class BackgroundCopies:
    """Copies of memory that one stream has written, in order."""

    def __init__(self, stream: cupy.cuda.Stream):
        self.stream = stream
        self.waiting: deque[tuple[Future[None], np.ndarray]] = deque()  # copies, and the array that each fills
        self.worker: tuple[ThreadPoolExecutor, Staging] | None = None  # made by the first copy

    @property
    def waiting_bytes(self) -> int:
        """Count the bytes of device memory that wait to be copied."""
        self._forget_finished()
        return sum(out.nbytes for _, out in self.waiting)

    def limit(self, free: int) -> int:
        """Return how many bytes may wait: at least MANY, else a quarter of the waiting and the `free` device bytes."""
        return max(MANY, (free + self.waiting_bytes) // 4)

    def make_room(self, nbytes: int, free: int) -> None:
        """Block until there is room for a copy of `nbytes` in the queue; `free` as in `limit`."""
        most = self.limit(free)
        while self.waiting and nbytes + self.waiting_bytes > most:
            self._finish_first()

    def copy(self, memory: Any) -> np.ndarray:
        """Copy `memory`, which must not be written again; returns uint8, complete after `completion`."""
        self._forget_finished()
        if self.worker is None:
            self.worker = ThreadPoolExecutor(1, "bimetal copies to the host"), Staging(cupy.cuda.runtime.getDevice())
        thread, staging = self.worker
        out, written = np.empty(memory.nbytes, np.uint8), cupy.cuda.Event(disable_timing=True)
        written.record(self.stream)
        try:
            copied = thread.submit(staging.copy, memory, out, written)
        except RuntimeError:  # the interpreter is shutting down: threads accept no work
            staging.copy(memory, out, written)
            return out
        self.waiting.append((copied, out))
        return out

    def completion(self, arrays: Sequence[np.ndarray] | None = None) -> Callable[[], object]:
        """Return a function that waits until all copies are complete, or those of which `arrays` are parts.

        Any thread may call it.
        """
        owners = None if arrays is None else {id(array if array.base is None else array.base) for array in arrays}
        copies = [copied for copied, out in self.waiting if owners is None or id(out) in owners]
        return lambda: [copied.result() for copied in copies]

    def _forget_finished(self) -> None:
        while self.waiting and self.waiting[0][0].done():
            self._finish_first()

    def _finish_first(self) -> None:
        self.waiting.popleft()[0].result()


class Staging:
    """Pinned memory through which one thread copies, on a stream of its own.

    A copy directly to pageable memory holds locks of the driver, for which launches of other threads wait.
    """

    def __init__(self, device: int):
        self.device = cupy.cuda.Device(device)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.pool = cupy.cuda.PinnedMemoryPool()
        self.bytes = np.frombuffer(self.pool.malloc(CHUNK), np.uint8, CHUNK)

    def copy(self, memory: Any, out: np.ndarray, written: cupy.cuda.Event) -> None:
        runtime = cupy.cuda.runtime
        with self.device:
            self.stream.wait_event(written)
            for first in range(0, memory.nbytes, CHUNK):
                n, to = min(CHUNK, memory.nbytes - first), self.bytes.ctypes.data
                runtime.memcpyAsync(to, memory.address + first, n, runtime.memcpyDeviceToHost, self.stream.ptr)
                self.stream.synchronize()
                np.copyto(out[first : first + n], self.bytes[:n])
