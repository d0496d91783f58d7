"""Numbers that the host reads while later steps already run on the device."""

import time

import cupy
import numpy as np

from cuda_backend.launch import Stream

FEW = 1 << 14  # most numbers copied through pinned memory; the driver copies longer arrays in pieces


class Arrival:
    """Array of int32 numbers in pinned host memory, complete once the event `done` has happened.

    address  address of the numbers, for the host and for kernels
    """

    __slots__ = ("address", "done", "memory", "numbers", "to_host")

    def __init__(self, to_host: "ToHost", memory: cupy.cuda.PinnedMemoryPointer, count: int):
        self.to_host, self.memory, self.done = to_host, memory, cupy.cuda.Event(disable_timing=True)
        self.numbers = np.frombuffer(memory, np.int32, count)
        self.address = self.numbers.ctypes.data

    def launched(self) -> None:
        """Note that the work that writes the numbers has been launched on the stream."""
        self.to_host.stream.record(self.done)

    def read(self) -> np.ndarray:
        """Wait for the numbers alone, not for later launches."""
        started = time.perf_counter()
        self.done.synchronize()
        self.to_host.waited += time.perf_counter() - started
        return self.numbers.copy()


class ToHost:
    """Copy numbers to the host in the order of one stream.

    The pool of pinned memory is this object's own: memory of an unread Arrival is reused by a later copy, which the
    stream runs after the earlier one.

    waited  seconds that the host has waited for numbers
    """

    def __init__(self, stream: Stream):
        self.stream, self.pool, self.waited = stream, cupy.cuda.PinnedMemoryPool(), 0.0

    def expect(self, count: int) -> Arrival:
        """Return memory for `count` int32 numbers that a kernel will write, which is faster than a copy."""
        return Arrival(self, self.pool.malloc(max(4 * count, 1)), count)

    def copy(self, address: int, count: int) -> Arrival:
        """Queue a copy of `count` int32 numbers at `address`."""
        arrival, runtime = self.expect(count), cupy.cuda.runtime
        if count:
            runtime.memcpyAsync(arrival.address, address, 4 * count, runtime.memcpyDeviceToHost, self.stream.ptr)
        arrival.launched()
        return arrival

    def read(self, address: int, count: int) -> np.ndarray:
        """Copy `count` int32 numbers at `address`, and wait for them and for all earlier launches."""
        if 0 < count <= FEW:
            return self.copy(address, count).read()
        out, runtime = np.empty(count, np.int32), cupy.cuda.runtime
        started = time.perf_counter()
        if count:
            runtime.memcpyAsync(out.ctypes.data, address, out.nbytes, runtime.memcpyDeviceToHost, self.stream.ptr)
        self.stream.synchronize()
        self.waited += time.perf_counter() - started
        return out
