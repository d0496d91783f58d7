"""Upload bytes of the host through pinned memory: threads fill some buffers while the device reads others.

One thread, or the driver with pageable memory, reads a memory-mapped file at a fifth of the device's speed. NumPy
copies without the interpreter lock, but a thread that sleeps between pieces wakes late: while loading, readers get the
next weight's pieces before those of the last one are complete.
"""

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import cupy
import numpy as np

from common.errors import BimetalError
from common.quants import check_scales
from common.tensors import Tensor, give_back
from cuda_backend.launch import Stream
from cuda_backend.memory import Memory

BUFFER, BUFFERS = 64 << 20, 4  # bytes of a buffer, and number of buffers
READERS = min(8, os.cpu_count() or 1)  # threads; more would wait for each other
LEAST = 1 << 20  # bytes below which one thread copies alone
FLAGS = 1 << 12  # most weights whose scales are checked together


class Uploader:
    """Copy to the device in the order of `stream`, through BUFFERS * BUFFER bytes of pinned memory, which it keeps.

    ahead    buffers that may still be filled when a weight is done: more than 0 within `CudaOps.loading`
    filling  of each such buffer its reads, and the calls after them
    """

    def __init__(self, stream: Stream):
        self.stream = stream
        self.memory = Memory(0)
        self.readers = ThreadPoolExecutor(READERS, "bimetal reader")
        buffers = [np.frombuffer(cupy.cuda.alloc_pinned_memory(BUFFER), np.uint8, BUFFER) for _ in range(BUFFERS)]
        self.buffers = itertools.cycle([(buffer, cupy.cuda.Event(disable_timing=True)) for buffer in buffers])
        self.ahead = 0
        self.filling: deque[tuple[list[Future[None]], list[Callable[[], None]]]] = deque()
        self.flags: Memory | None = None
        self.unchecked: list[Sequence[Tensor]] = []

    def scratch(self, nbytes: int) -> int:
        """Return device memory for the next copy of the stream: one buffer for all calls, grown if too small."""
        if nbytes > self.memory.nbytes:
            self.finish()
            self.stream.synchronize()
            self.memory = Memory(nbytes)
        return self.memory.address

    def flag(self, parts: Sequence[Tensor]) -> int:
        """Return the address to which the device writes a nonzero if one of these scales is not finite, for `check`."""
        if len(self.unchecked) == FLAGS:
            self.check()
        self.flags = self.flags or Memory(4 * FLAGS)
        address = self.flags.address + 4 * len(self.unchecked)
        cupy.cuda.runtime.memsetAsync(address, 0, 4, self.stream.ptr)
        self.unchecked.append(parts)
        return address

    def check(self) -> None:
        """Raise BimetalError for a scale that is not finite, loaded since the last call. Waits for the device."""
        self.finish()
        (unchecked, self.unchecked), (memory, self.flags) = (self.unchecked, []), (self.flags, None)
        flags, kind = np.zeros(len(unchecked), np.int32), cupy.cuda.runtime.memcpyDeviceToHost
        if memory:
            cupy.cuda.runtime.memcpyAsync(flags.ctypes.data, memory.address, flags.nbytes, kind, self.stream.ptr)
        self.stream.synchronize()
        for parts, refused in zip(unchecked, flags, strict=True):
            if refused:
                for part in parts:
                    check_scales(part)  # its error names the place
                raise BimetalError(f"tensor {parts[0].name!r} or one beside it changed while it was loaded")

    def copy(self, address: int, arrays: Sequence[np.ndarray]) -> None:
        """Copy arrays (n, bytes), one after the other, to device memory at `address`; the next `finish` sends them.

        The arrays must not change before that. Pages of mapped files are released.
        """

        def read(place: np.ndarray, piece: np.ndarray) -> None:
            np.copyto(place.reshape(piece.shape), piece)

        def send(buffer: np.ndarray, fetched: cupy.cuda.Event, at: int, nbytes: int) -> None:
            kind = cupy.cuda.runtime.memcpyHostToDevice
            cupy.cuda.runtime.memcpyAsync(at, buffer.ctypes.data, nbytes, kind, self.stream.ptr)
            self.stream.record(fetched)

        for pieces in _filling(arrays):
            self.finish(BUFFERS - 2)
            buffer, fetched = next(self.buffers)
            fetched.synchronize()
            ends = list(itertools.accumulate(piece.nbytes for piece in pieces))
            places = [buffer[end - piece.nbytes : end] for piece, end in zip(pieces, ends, strict=True)]
            reads = [self.readers.submit(read, place, piece) for place, piece in zip(places, pieces, strict=True)]
            self.filling.append((reads, [partial(send, buffer, fetched, address, ends[-1])]))
            address += ends[-1]
        for array in arrays:
            self.then(partial(give_back, array))

    def then(self, launch: Callable[[], None]) -> None:
        """Call `launch` after all copies queued so far."""
        if self.filling:
            self.filling[-1][1].append(launch)
        else:
            launch()

    def finish(self, unsent: int = 0) -> None:
        """Send all buffers but the last `unsent`, which may still be filled, after waiting for their reads."""
        while len(self.filling) > unsent:
            reads, follows = self.filling.popleft()
            try:
                for done in reads:
                    done.result()
            finally:
                wait(reads)  # also if interrupted: the next copy fills the buffer from other arrays
            for follow in follows:
                follow()

    def drop(self) -> None:
        """Drop data that were not sent, because their memory may be freed."""
        wait([read for reads, _ in self.filling for read in reads])
        self.filling.clear()


def _filling(arrays: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Divide the arrays into pieces of whole units, a list for each buffer they fill: one or more per reader."""
    pieces: list[np.ndarray] = []
    room = BUFFER
    for array in arrays:
        shares = READERS * -(-array.nbytes // BUFFER)
        step = max(-(-len(array) // shares), LEAST // array.shape[1])
        for at in range(0, len(array), step):
            piece = array[at : at + step]
            if piece.nbytes > room:
                yield pieces
                pieces, room = [], BUFFER
            pieces.append(piece)
            room -= piece.nbytes
    if pieces:
        yield pieces
