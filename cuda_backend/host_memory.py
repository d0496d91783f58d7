"""Pinned memory of the host, which the device copies from at full speed and reads in place."""

import ctypes
import weakref

import cupy
import numpy as np

from common.errors import BimetalError
from cuda_backend.launch import Stream

PORTABLE, MAPPED = 1, 2  # flags of cudaHostAlloc


class HostMemory:
    """Pinned memory that lives as long as this object; host and device read it at the same `address`.

    CuPy's pool would round its size up to a power of two. Raises BimetalError if the system cannot pin more.
    """

    def __init__(self, nbytes: int, what: str):
        try:
            self.address: int = cupy.cuda.runtime.hostAlloc(max(nbytes, 1), PORTABLE | MAPPED)
        except (cupy.cuda.runtime.CUDARuntimeError, MemoryError) as error:
            raise BimetalError(f"the host cannot pin {nbytes / 1e9:.2f} GB more for {what}: {error}") from None
        weakref.finalize(self, cupy.cuda.runtime.freeHost, self.address).atexit = False  # the system is faster
        self.nbytes = nbytes

    def rate(self, stream: Stream) -> float:
        """Measure the bytes per second of copies to the device."""
        runtime, device = cupy.cuda.runtime, cupy.cuda.alloc(self.nbytes)
        best = float("inf")
        for _ in range(5):
            begun, done = cupy.cuda.Event(), cupy.cuda.Event()
            stream.record(begun)
            runtime.memcpyAsync(device.ptr, self.address, self.nbytes, runtime.memcpyHostToDevice, stream.ptr)
            stream.record(done)
            done.synchronize()
            best = min(best, cupy.cuda.get_elapsed_time(begun, done) / 1e3)
        return self.nbytes / best

    def numbers(self) -> np.ndarray:
        """View the memory as int32, valid as long as this object lives."""
        return np.ctypeslib.as_array((ctypes.c_int32 * (self.nbytes // 4)).from_address(self.address))
