"""A tensor as a file stores it: bytes that stay memory-mapped until a backend reads them.

Every reader (`common/gguf.py`, `common/safetensors.py`) returns `Tensor`s, every loader fix maps a `Tensor` to a
`Tensor`, and each backend converts a `Tensor` to its own weight handle. Rows (the first axis) are never split, so that
taking rows decodes nothing.
"""

import math
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from common.errors import BimetalError
from common.files import hold


@dataclass(frozen=True)
class Tensor:
    """One stored tensor.

    type    "F32", "F16", "BF16", "I32", ... or a GGUF block type ("Q4_K") or an MLX mode ("affine", "mxfp4", ...)
    shape   logical shape, row-major; the last axis is contiguous (a GGUF file lists the same axes reversed)
    data    uint8, (*shape[:-1], bytes per row): the stored bytes, usually a view into a memory map
    scales, biases, bits, group_size    only for MLX modes: companion tensors along the same rows
    """

    name: str
    type: str
    shape: tuple[int, ...]
    data: np.ndarray
    scales: "Tensor | None" = None
    biases: "Tensor | None" = None
    bits: int = 0
    group_size: int = 0

    @property
    def nbytes(self) -> int:
        return sum(t.data.nbytes for t in (self, self.scales, self.biases) if t is not None)

    def read(self) -> "Tensor":
        """Return the tensor with its bytes: itself, unless they have to be made."""
        return self

    def take_rows(self, index: np.ndarray) -> "Tensor":
        """Return the rows `index` (int, (n,)) of the first axis, in that order; works for every type."""
        if len(self.shape) == 1:  # a vector's elements are its rows
            size = self.data.shape[-1] // self.shape[0]
            data = self.data.reshape(self.shape[0], size)[index].reshape(-1)
        else:
            data = self.data[index]
        return replace(
            self,
            shape=(len(index), *self.shape[1:]),
            data=data,
            scales=self.scales and self.scales.take_rows(index),
            biases=self.biases and self.biases.take_rows(index),
        )

    def reshape(self, shape: tuple[int, ...]) -> "Tensor":
        """Return the same elements under `shape`, which may differ from the stored one in axes of length 1 alone."""

        def reshaped(part: "Tensor", shape: tuple[int, ...]) -> "Tensor":
            return replace(part, shape=shape, data=part.data.reshape(*shape[:-1], -1))

        groups = (*shape[:-1], self.scales.shape[-1]) if self.scales else ()
        return replace(
            reshaped(self, shape),
            scales=self.scales and reshaped(self.scales, groups),
            biases=self.biases and reshaped(self.biases, groups),
        )


class Converted(Tensor):
    """A tensor that is made of other stored tensors when its bytes are first read.

    parts    the stored tensors
    convert  function that returns the bytes, uint8 (*shape[:-1], row_bytes)
    """

    parts: tuple[Tensor, ...]
    convert: Callable[[], np.ndarray]

    def __init__(
        self,
        name: str,
        type: str,
        shape: tuple[int, ...],
        row_bytes: int,
        parts: tuple[Tensor, ...],
        convert: Callable[[], np.ndarray],
    ):
        given = {"name": name, "type": type, "shape": shape, "row_bytes": row_bytes, "parts": parts, "convert": convert}
        self.__dict__.update(given)  # a frozen dataclass, whose `data` is left to the property

    @cached_property
    def data(self) -> np.ndarray:  # type: ignore[override]
        return self.convert()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * int(self.__dict__["row_bytes"])

    def read(self) -> Tensor:
        return Tensor(self.name, self.type, self.shape, self.data)

    def take_rows(self, index: np.ndarray) -> Tensor:
        return self.read().take_rows(index)

    def reshape(self, shape: tuple[int, ...]) -> Tensor:
        return self.read().reshape(shape)

    def release(self) -> None:
        """Drop the bytes; a later read makes them again."""
        self.__dict__.pop("data", None)
        for part in self.parts:
            release(part)


def same_axes(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Test whether the shapes differ only in axes of length 1, which writers may keep or drop."""
    return [n for n in one if n != 1] == [n for n in other if n != 1]


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """Stack equal tensors along a new first axis, named after the first: the experts of a layer. Copies."""
    tensors = [tensor.read() for tensor in tensors]
    first = tensors[0]
    for tensor in tensors:
        if (tensor.type, tensor.shape, tensor.bits, tensor.group_size) != (
            first.type,
            first.shape,
            first.bits,
            first.group_size,
        ):
            one, other = (f"{t.name} is {t.type} {t.shape}" for t in (tensor, first))
            raise BimetalError(f"{one} but {other}; the experts of a layer must be stored alike")
    scales = [t.scales for t in tensors if t.scales is not None]
    biases = [t.biases for t in tensors if t.biases is not None]
    return replace(
        first,
        shape=(len(tensors), *first.shape),
        data=np.stack([t.data for t in tensors]),
        scales=stack(scales) if scales else None,
        biases=stack(biases) if biases else None,
    )


class MappedFile(mmap.mmap):
    """A mapping with its file's path, and the state of the file when it was mapped."""

    path: Path
    stat: os.stat_result


def map_file(path: Path) -> np.ndarray:
    """Map the file's bytes as a read-only uint8 array, (size,), paged in on use; locked while mapped."""
    try:
        if path.stat().st_size == 0:
            raise BimetalError(f"{path} is empty")
        with path.open("rb") as file:
            hold(file)
            mapped = MappedFile(file.fileno(), 0, access=mmap.ACCESS_READ)
            mapped.path, mapped.stat = path, os.fstat(file.fileno())
            return np.frombuffer(mapped, np.uint8)
    except OSError as error:
        raise BimetalError(f"{path} cannot be read: {error.strerror}") from None


def release(tensor: Tensor) -> None:
    """Drop the tensor's pages from memory, once a copy of it exists; a later read loads them from the file again.

    Does nothing for bytes that are not a view into a mapped file, or if the system has no MADV_DONTNEED.
    """
    if isinstance(tensor, Converted):
        tensor.release()
        return
    for part in (tensor, tensor.scales, tensor.biases):
        if part is not None:
            give_back(part.data)


def give_back(data: np.ndarray) -> None:
    """Drop pages as `release` does, for an array of bytes."""
    found = stored_at(data)
    if found is not None and data.flags.c_contiguous and hasattr(mmap, "MADV_DONTNEED"):
        map_, start = found
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE  # neighbours share the pages at both ends
        length = (start + data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            map_.madvise(mmap.MADV_DONTNEED, first, length)


def stored_at(data: np.ndarray) -> tuple[MappedFile, int] | None:
    """Return the file that `data` is a view into, and where the view begins in it; None for bytes of no mapped file."""
    whole = data
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    map_ = whole.base.obj if isinstance(whole.base, memoryview) else None
    return (map_, data.ctypes.data - whole.ctypes.data) if isinstance(map_, MappedFile) else None
