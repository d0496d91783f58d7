"""Numbers that the host reads while later steps already run on the device."""

import time
from typing import NamedTuple

import cupy
import numpy as np

from cuda_backend.launch import Stream
from cuda_backend.memory import Memory

FEW = 1 << 14  # most numbers copied through pinned memory; the driver copies longer arrays in pieces


class Place(NamedTuple):
    """Pinned host memory for int32 `numbers` at `address`, and the event after which they are complete.

    on_device  device memory for as many numbers
    """

    numbers: np.ndarray
    address: int
    done: cupy.cuda.Event
    on_device: Memory


class Arrival:
    """Array of int32 numbers in a Place of pinned host memory, complete once the event `done` has happened.

    address    address of the numbers, for the host and for kernels
    on_device  address of device memory for as many numbers, which lives as long as this object
    """

    __slots__ = ("address", "done", "numbers", "on_device", "place", "to_host")

    def __init__(self, to_host: "ToHost", place: Place, count: int):
        self.to_host, self.place, self.address, self.done = to_host, place, place.address, place.done
        self.numbers, self.on_device = place.numbers[:count], place.on_device.address

    def __del__(self) -> None:
        self.to_host.give_back(self.place)

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

    A place is used again once its Arrival is gone, read or not: the stream runs a later copy after the earlier one.

    waited  seconds that the host has waited for numbers
    """

    def __init__(self, stream: Stream):
        self.stream, self.pool, self.waited = stream, cupy.cuda.PinnedMemoryPool(), 0.0
        self.places: dict[int, list[Place]] = {}  # that are free, by size, a power of 2

    def expect(self, count: int) -> Arrival:
        """Return memory for `count` int32 numbers that a kernel will write, which is faster than a copy."""
        size = 1 << max(count - 1, 0).bit_length()
        free = self.places.setdefault(size, [])
        return Arrival(self, free.pop() if free else self._new_place(size), count)

    def _new_place(self, size: int) -> Place:
        numbers = np.frombuffer(self.pool.malloc(4 * size), np.int32, size)
        memory = Memory(4 * size, self.stream)
        return Place(numbers, numbers.ctypes.data, cupy.cuda.Event(disable_timing=True), memory)

    def give_back(self, place: Place) -> None:
        """Take the place of an Arrival that is gone."""
        self.places[place.numbers.size].append(place)

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
