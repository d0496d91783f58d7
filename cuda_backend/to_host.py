"""Numbers that the host reads while later steps already run on the device."""

import cupy
import numpy as np

from cuda_backend.launch import Stream


class Arrival:
    """int32 numbers in pinned memory of the host, complete once `done` has happened."""

    __slots__ = ("done", "memory", "numbers")

    def __init__(self, memory: cupy.cuda.PinnedMemoryPointer, count: int, done: cupy.cuda.Event):
        self.memory, self.done = memory, done
        self.numbers = np.frombuffer(memory, np.int32, count)

    def read(self) -> np.ndarray:
        """Wait for the numbers alone, not for what was launched after them."""
        self.done.synchronize()
        return self.numbers.copy()


class ToHost:
    """Copies to the host in the order of one stream.

    The pool of pinned memory is this object's own: memory of an Arrival that nobody reads goes to a later copy, which
    the stream runs after the earlier one.
    """

    def __init__(self, stream: Stream):
        self.stream, self.pool = stream, cupy.cuda.PinnedMemoryPool()

    def copy(self, address: int, count: int) -> Arrival:
        """Queue a copy of `count` int32 numbers at `address`."""
        arrival = Arrival(self.pool.malloc(max(4 * count, 1)), count, cupy.cuda.Event(disable_timing=True))
        runtime, to = cupy.cuda.runtime, arrival.numbers.ctypes.data
        if count:
            runtime.memcpyAsync(to, address, 4 * count, runtime.memcpyDeviceToHost, self.stream.ptr)
        self.stream.record(arrival.done)
        return arrival
