"""Device memory: allocations that live as long as their object, and the arena for the outputs of a step."""

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import cupy
import numpy as np

from common.errors import BimetalError
from cuda_backend.launch import Stream

ALIGN = 256
LARGE = 1 << 20  # bytes from which several threads copy an array faster than the driver


def limit(nbytes: int, devices: Sequence[int] = ()) -> None:
    """Let this process take at most `nbytes` of the memory of each of `devices`, by default the current GPU.

    CUDA's context and libraries take memory in addition.
    """
    pool = cupy.get_default_memory_pool()
    for index in devices or (cupy.cuda.runtime.getDevice(),):
        with cupy.cuda.Device(index):
            pool.set_limit(size=nbytes)


def free_and_total() -> tuple[int, int]:
    """Return (bytes that this process may still allocate on the current GPU, bytes that it may allocate in all)."""
    free, total = cupy.cuda.runtime.memGetInfo()
    pool = cupy.get_default_memory_pool()
    most = pool.get_limit()
    return (min(free, max(0, most - pool.total_bytes())), min(total, most)) if most else (free, total)


def give_back() -> None:
    """Collect garbage, and return the unused memory of CuPy's pool to the driver."""
    gc.collect()
    give_back_blocks()


def give_back_blocks() -> None:
    """Return the unused memory of CuPy's pool to the driver."""
    cupy.get_default_memory_pool().free_all_blocks()


class Memory:
    """Device memory that lives as long as this object.

    stream  the only stream that uses the memory; kernels launched there may still read it after it is freed, since the
            pool reuses it for this stream alone
    """

    def __init__(self, nbytes: int, stream: Stream | None = None):
        self._memory = _allocate(max(nbytes, 1), stream)
        self.address: int = self._memory.ptr
        self.nbytes = nbytes


def _allocate(nbytes: int, stream: Stream | None) -> Any:
    for again in (True, False):
        try:
            with stream.cuda if stream else nullcontext():
                return cupy.cuda.alloc(nbytes)
        except cupy.cuda.memory.OutOfMemoryError:
            if again:  # memory that the pool keeps for other streams counts towards its limit
                give_back()
    (free, total), device = free_and_total(), cupy.cuda.runtime.getDevice()
    if cupy.get_default_memory_pool().get_limit() == total:
        has = f"the limit of {total / 1e9:.1f} GB on GPU {device} leaves {free / 1e9:.1f} GB"
    else:
        has = f"GPU {device} has {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    raise BimetalError(
        f"{has} and {nbytes / 1e9:.1f} GB more are needed; choose a smaller quantization or a shorter context"
    )


def upload(array: np.ndarray, stream: Stream) -> Memory:
    """Copy a contiguous array to new device memory; returns when the caller may overwrite the array."""
    memory = Memory(array.nbytes, stream)
    copy_in(memory.address, array, stream)
    return memory


def copy_in(address: int, array: np.ndarray, stream: Stream) -> None:
    """Copy a contiguous array from pageable memory; returns when it has been read."""
    if array.nbytes >= LARGE:
        stream.staged.copy(address, array)
        return
    cupy.cuda.runtime.memcpyAsync(
        address, array.ctypes.data, array.nbytes, cupy.cuda.runtime.memcpyHostToDevice, stream.ptr
    )


class Arena:
    """Memory for the outputs of one step, in two halves: `turn` frees the half that was used before the current one.

    A layer's output is valid until the end of the next layer. A third part holds arrays that must last until the end of
    the step, a fourth those that last until the end of a layer, which the next layer reuses. Memory that a captured
    graph uses is never freed.

    steps  number of steps so far that took memory here: those launched or captured, not the replayed ones
    """

    CHUNK = 32 << 20

    def __init__(self) -> None:
        self.parts: list[list[Memory]] = [[], [], [], []]
        self.passing = Memory(0)
        self.frozen = False  # while a graph is captured: its addresses must be of existing chunks
        self.steps = 0
        self.reset()

    def reset(self) -> None:
        """Begin a step."""
        self.steps += 1
        self.half, self.used = 0, [[0] * len(chunks) for chunks in self.parts]  # bytes of each chunk

    def turn(self) -> None:
        self.half = 1 - self.half
        for part in (self.half, 3):
            self.used[part] = [0] * len(self.parts[part])

    def take(self, nbytes: int, lasting: bool = False) -> int:
        """Allocate from the first chunk with enough space, so that a repeated step gets the same addresses."""
        return self._take(nbytes, 2 if lasting else self.half)

    def take_for_layer(self, nbytes: int, max_bytes: int) -> int:
        """Allocate memory until `turn` in one chunk for all steps, which may need up to `max_bytes` bytes."""
        return self._take(nbytes, 3, max_bytes)

    def _take(self, nbytes: int, part: int, max_bytes: int = 0) -> int:
        chunks, used = self.parts[part], self.used[part]
        at = next((i for i, chunk in enumerate(chunks) if used[i] + nbytes <= chunk.nbytes), len(chunks))
        if at == len(chunks):
            if self.frozen:
                raise RuntimeError("a captured step took more memory than the same step run before it")
            chunks.append(Memory(max(nbytes, max_bytes, self.CHUNK)))
            used.append(0)
        address = chunks[at].address + used[at]
        used[at] += -(-nbytes // ALIGN) * ALIGN
        return address

    def scratch(self, nbytes: int, stream: Any) -> int:
        """Return the address of at least `nbytes` bytes for launches on `stream` until the next call.

        Every call returns the same memory, which grows: a captured graph that uses it is valid until then.
        """
        if nbytes > self.passing.nbytes:
            if self.frozen:
                raise RuntimeError("a captured step took more scratch memory than the same step run before it")
            stream.synchronize()
            self.passing = Memory(0)  # frees the old memory before the new one is allocated
            self.passing = Memory(nbytes)
        return self.passing.address

    @property
    def nbytes(self) -> int:
        return self.passing.nbytes + sum(chunk.nbytes for part in self.parts for chunk in part)
