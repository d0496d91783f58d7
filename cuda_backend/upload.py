"""Upload weights to the device through pinned memory: threads fill some buffers while the device reads others.

One thread reads a memory-mapped file at a fifth of the speed at which a device receives bytes, and so does the driver
if memory is not pinned. NumPy copies without holding the interpreter's lock, but a thread that sleeps between pieces
wakes late. While a model is loaded, readers therefore get the next weight's pieces before they have finished the last
weight's.
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

    ahead    buffers that may still be filled when a weight is returned: more than 0 within `CudaOps.loading`
    filling  for each such buffer, its reads, and what follows once they are done
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

    def room(self, nbytes: int) -> int:
        """Return the address of device memory for the stream's next copy: one buffer for all calls, which grows."""
        if nbytes > self.memory.nbytes:
            self.finish()
            self.stream.synchronize()
            self.memory = Memory(nbytes)
        return self.memory.address

    def flag(self, parts: Sequence[Tensor]) -> int:
        """Return an address to which the device writes nonzero if a scale of `parts` is not finite; see `check`."""
        if len(self.unchecked) == FLAGS:
            self.check()
        self.flags = self.flags or Memory(4 * FLAGS)
        address = self.flags.address + 4 * len(self.unchecked)
        cupy.cuda.runtime.memsetAsync(address, 0, 4, self.stream.ptr)
        self.unchecked.append(parts)
        return address

    def check(self) -> None:
        """Wait for the device; raise BimetalError if a scale flagged since the last call is not finite."""
        self.finish()
        (unchecked, self.unchecked), (memory, self.flags) = (self.unchecked, []), (self.flags, None)
        flags, kind = np.zeros(len(unchecked), np.int32), cupy.cuda.runtime.memcpyDeviceToHost
        if memory:
            cupy.cuda.runtime.memcpyAsync(flags.ctypes.data, memory.address, flags.nbytes, kind, self.stream.ptr)
        self.stream.synchronize()
        for parts, refused in zip(unchecked, flags, strict=True):
            if refused:
                for part in parts:
                    check_scales(part)  # raises an error that says where
                raise BimetalError(f"tensor {parts[0].name!r} or one beside it changed while it was loaded")

    def copy(self, address: int, arrays: Sequence[np.ndarray]) -> None:
        """Copy arrays (n, bytes), one after the other, to device memory at `address`; the next `finish` sends them.

        The arrays must not change before. If they are views of a mapped file, its pages are released.
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

    def finish(self, most: int = 0) -> None:
        """Send all buffers but the last `most`, which may still be filled, after waiting for their reads."""
        while len(self.filling) > most:
            reads, follows = self.filling.popleft()
            try:
                for done in reads:
                    done.result()
            finally:
                wait(reads)  # even if interrupted: the next copy fills the same buffer from other arrays
            for follow in follows:
                follow()

    def drop(self) -> None:
        """Forget what was not sent: the memory that it would be sent to may have been freed."""
        wait([read for reads, _ in self.filling for read in reads])
        self.filling.clear()


def _filling(arrays: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Yield for each buffer the list of pieces that fill it, of whole rows: one or more pieces for each reader."""
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
