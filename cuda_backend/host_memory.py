"""Pinned memory of the host, which the device copies from at full speed and reads in place."""

import ctypes
import weakref

import cupy
import numpy as np

from common.errors import BimetalError

PORTABLE, MAPPED = 1, 2  # flags of cudaHostAlloc


class HostMemory:
    """Pinned memory that lives as long as this object; the device reads it at the same `address`.

    CuPy's pool would round it up to a power of two. Raises BimetalError where the system pins no more.
    """

    def __init__(self, nbytes: int, what: str):
        try:
            self.address: int = cupy.cuda.runtime.hostAlloc(max(nbytes, 1), PORTABLE | MAPPED)
        except (cupy.cuda.runtime.CUDARuntimeError, MemoryError) as error:
            raise BimetalError(f"the host cannot pin {nbytes / 1e9:.2f} GB more for {what}: {error}") from None
        weakref.finalize(self, cupy.cuda.runtime.freeHost, self.address)
        self.nbytes = nbytes

    def numbers(self) -> np.ndarray:
        """The memory as int32, for as long as this object lives."""
        return np.ctypeslib.as_array((ctypes.c_int32 * (self.nbytes // 4)).from_address(self.address))
