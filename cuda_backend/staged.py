"""Copies from pageable memory to the device through pinned memory, which threads fill while the device reads."""

import itertools
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import cupy
import numpy as np

CHUNK, CHUNKS = 4 << 20, 8  # bytes of a buffer, and number of buffers
THREADS = min(4, os.cpu_count() or 1)
Buffer = tuple[np.ndarray, cupy.cuda.Event]  # and the event after which the device has read it


class StagedCopies:
    """Copy in the order of one stream; the first copy allocates CHUNKS * CHUNK bytes of pinned memory.

    The driver copies pageable memory on one thread, at a fifth of the speed of pinned memory.
    """

    def __init__(self, stream: cupy.cuda.Stream):
        self.stream = stream
        self.started: tuple[ThreadPoolExecutor, Iterator[Buffer]] | None = None

    def copy(self, address: int, array: np.ndarray) -> None:
        """Copy a contiguous array to device `address`; returns when the caller may overwrite the array."""
        threads, buffers = self.started = self.started or self._make()
        data, filling = array.reshape(-1).view(np.uint8), deque[tuple[Future[None], Buffer, int]]()
        try:
            for at in range(0, data.nbytes, CHUNK):
                if len(filling) == CHUNKS:
                    self._send(address, *filling.popleft())
                pinned, fetched = next(buffers)
                fetched.synchronize()
                piece = data[at : at + CHUNK]
                part = pinned[: piece.nbytes]
                filling.append((threads.submit(np.copyto, part, piece), (part, fetched), at))
            while filling:
                self._send(address, *filling.popleft())
        finally:
            wait([filled for filled, *_ in filling])  # if interrupted: the next copy fills the same buffers

    def _make(self) -> tuple[ThreadPoolExecutor, Iterator[Buffer]]:
        pool = cupy.cuda.PinnedMemoryPool()
        pinned = [np.frombuffer(pool.malloc(CHUNK), np.uint8, CHUNK) for _ in range(CHUNKS)]
        buffers = [(each, cupy.cuda.Event(disable_timing=True)) for each in pinned]
        return ThreadPoolExecutor(THREADS, "bimetal copies to the device"), itertools.cycle(buffers)

    def _send(self, address: int, filled: Future[None], buffer: Buffer, at: int) -> None:
        filled.result()
        pinned, fetched = buffer
        kind = cupy.cuda.runtime.memcpyHostToDevice
        cupy.cuda.runtime.memcpyAsync(address + at, pinned.ctypes.data, pinned.nbytes, kind, self.stream.ptr)
        fetched.record(self.stream)
