"""Planes: the layout of a cache's rows on the device, and the launch that copies rows from one cache to another."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import cupy
import numpy as np

from common import storage
from common.errors import BimetalError
from common.kv_formats import FORMATS
from common.step import MAX_DECODE_ROWS, Shape
from cuda_backend.launch import Stream, kernel
from cuda_backend.layout import group_count, padded, tail_places
from cuda_backend.memory import Memory, copy_in, free_and_total
from cuda_backend.prototypes import PLANE

HALF = "f16"  # the backend's own format of rows
TILE = 64  # positions that attention reads at a time
PAGE = 256  # positions of a page: kernels/plane.cuh
COPIED = 256 << 20  # bytes of the buffer through which rows of the host are written
MOST_PIECES = 512  # most pieces into which attention divides the past: kernels/pieces.cu combine


class Places(NamedTuple):
    """Places of positions in a head: the first `fixed` positions in order, then all others in a ring of `ring` rows."""

    fixed: int
    ring: int

    @property
    def capacity(self) -> int:
        return self.fixed + self.ring


@dataclass(frozen=True)
class Plane:
    """Rows of keys, values or latents in device memory (kernels/plane.cuh), in blocks [heads][places][row].

    A block holds a whole sequence, or, if the plane has a page table, the PAGE places of a page.

    address  address of the first row of block 0
    block    bytes from one block to the next; 0: there is one block
    table    address of the page numbers of each sequence, int32 [slots][pages]; 0: block i belongs to slot i
    pages    page numbers per sequence in the table
    width    values of a row; for float16 padded to a multiple of 16
    format   format of a row: a name of FORMATS
    rotated  whether vectors are rotated before they are stored: common/hadamard.py
    """

    address: int
    heads: int
    row_bytes: int
    width: int
    places: Places
    format: str = HALF
    rotated: bool = False
    block: int = 0
    table: int = 0
    pages: int = 0

    @property
    def block_places(self) -> int:
        return PAGE if self.table else self.places.capacity

    @property
    def head_bytes(self) -> int:
        return self.block_places * self.row_bytes

    @property
    def nbytes(self) -> int:
        """Count the bytes of a block."""
        return self.heads * self.head_bytes

    @property
    def record(self) -> np.ndarray:
        """Return the plane as kernels receive it."""
        rows = self.row_bytes, self.block_places
        return np.array((self.address, self.table, self.block, *rows, *self.places, self.pages), PLANE)

    def part(self, i: int, heads: int) -> "Plane":
        """Return the plane of layer `i`: heads i * heads to (i + 1) * heads - 1."""
        return replace(self, address=self.address + i * heads * self.head_bytes, heads=heads)

    def at(self, address: int, places: Places | None = None) -> "Plane":
        """Return a plane at another address for such rows of one sequence, in one block."""
        return replace(self, address=address, places=places or self.places, block=0, table=0, pages=0)

    def of_slot(self, slot: int) -> "Plane":
        """Return the planes of one sequence."""
        if self.table:
            return replace(self, table=self.table + 4 * slot * self.pages)
        return self.at(self.address + slot * self.block)


def plane_of(stored: storage.Plane, layers: int, places: Places) -> Plane:
    """Describe the plane of `layers` layers without an address; float16 rows are padded to a multiple of 16 values."""
    format_ = HALF if stored.format == storage.NATIVE else stored.format
    width = padded(stored.dim) if format_ == HALF else stored.dim
    if format_ != HALF and width % 32:
        raise BimetalError(f"heads of {width} in {format_} have no CUDA kernel; supported are multiples of 32")
    row_bytes = FORMATS[format_].row_bytes(width)
    return Plane(0, layers * stored.heads, row_bytes, width, places, format_, stored.rotated)


Planes = tuple[Plane, ...]  # keys and values, or latents alone


def planes_at(address: int, planes: Planes, places: Places | None = None) -> Planes:
    """Return the planes placed one after the other from `address` on."""
    out = []
    for plane in planes:
        out.append(plane.at(address, places))
        address += out[-1].nbytes
    return tuple(out)


def slots_at(address: int, planes: Planes) -> Planes:
    """Place planes of several sequences: all of one, then all of the next."""
    size = planes_bytes(planes)
    return tuple(replace(plane, block=size) for plane in planes_at(address, planes))


def pages_at(address: int, planes: Planes, table: int, pages: int) -> Planes:
    """Place planes of several sequences in pages, each of which has PAGE places of all planes."""
    out = []
    for plane in planes:
        out.append(replace(plane, address=address, table=table, pages=pages))
        address += out[-1].nbytes
    return tuple(replace(plane, block=page_bytes(planes)) for plane in out)


def of_slot(planes: Planes, slot: int) -> Planes:
    return tuple(plane.of_slot(slot) for plane in planes)


def planes_bytes(planes: Planes) -> int:
    return sum(plane.nbytes for plane in planes)


def page_bytes(planes: Planes) -> int:
    """Count the bytes of a page with places for all `planes`."""
    return PAGE * sum(plane.heads * plane.row_bytes for plane in planes)


def rows_held(capacity: int) -> int:
    """Count the rows of a cache of `capacity` tokens and the rows of a step, rounded up to whole tiles."""
    return -(-(capacity + MAX_DECODE_ROWS) // TILE) * TILE


def all_places(capacity: int) -> Places:
    """Return the places of a cache that keeps every position of `capacity` tokens."""
    return Places(rows_held(capacity) - TILE, TILE)


def check_capacity(capacity: int) -> None:
    if group_count(capacity + MAX_DECODE_ROWS) + tail_places(TILE // 2, MAX_DECODE_ROWS) > MOST_PIECES:
        raise BimetalError(f"a context of {capacity} tokens is more than the CUDA kernels take, about a million")


def move_path(planes: Planes, past: int, path: Sequence[int], stream: Stream) -> None:
    """Move rows past + path[j] of every plane to past + j, in place."""
    rows, n = np.array(path, np.int32), len(path)
    device = Memory(rows.nbytes, stream)
    cupy.cuda.runtime.memcpyAsync(device.address, rows.ctypes.data, rows.nbytes, 1, stream.ptr)
    if np.all(np.diff(rows) > 0):
        copy_rows(planes, past, planes, past, n, stream, device.address)
    else:  # copied out first: in place, a source could be overwritten before it is read
        dense = planes_at(0, planes, Places(n, 1))
        aside = Memory(planes_bytes(dense), stream)
        dense = planes_at(aside.address, planes, Places(n, 1))
        copy_rows(planes, past, dense, 0, n, stream, device.address)
        copy_rows(dense, 0, planes, past, n, stream)


def copy_rows(
    source: Planes, first: int, target: Planes, target_first: int, count: int, stream: Stream, path: int = 0
) -> None:
    """Copy rows of every head: position first + path[j] (or first + j) of `source` to target_first + j of `target`.

    path  address of int32 (count,) on the device; 0: none
    """
    unit = next(u for u in (16, 8, 4, 2) if all(plane.row_bytes % u == 0 for plane in source))
    heads = [plane.heads for plane in source]
    kernel("copy_rows", "copy_rows", (f"UNIT={unit}",))(
        (sum(heads), 1 if source == target else min(count, 64)),
        (max(plane.row_bytes for plane in source) // unit,),
        (
            source[0].record,
            source[-1].record,
            0,
            first,
            target[0].record,
            target[-1].record,
            0,
            target_first,
            heads[0],
            path,
            count,
        ),
        stream=stream,
    )


def zeros(nbytes: int, stream: Stream) -> Memory:
    memory = Memory(nbytes, stream)
    cupy.cuda.runtime.memsetAsync(memory.address, 0, memory.nbytes, stream.ptr)
    return memory


def copy(target: int, source: int, nbytes: int, stream: Stream) -> None:
    runtime = cupy.cuda.runtime
    runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDeviceToDevice, stream.ptr)


# -- rows on the host --------------------------------------------------------------------------------------------------


def shapes_of(planes: Planes, rows: int) -> list[Shape]:
    """Return the shapes of what `read_rows` returns for `rows` positions."""
    return [((plane.heads, rows, plane.row_bytes), np.dtype(np.uint8)) for plane in planes]


def read_rows(planes: Planes, stretches: Sequence[tuple[int, int]], stream: Stream) -> list[np.ndarray]:
    """Copy the ranges of positions (first, last + 1) of every plane: (heads, positions, bytes of a row).

    The arrays are complete after stream.copies.completion.
    """
    n = sum(last - first for first, last in stretches)
    if n == 0:
        return [np.empty(shape, dtype) for shape, dtype in shapes_of(planes, 0)]
    dense, at = planes_at(0, planes, Places(n - 1, 1)), 0
    stream.copies.make_room(planes_bytes(dense), free_and_total()[0])
    aside = Memory(planes_bytes(dense), stream)
    for first, last in stretches:
        if last > first:
            copy_rows(planes, first, planes_at(aside.address, dense), at, last - first, stream)
        at += last - first
    flat = stream.copies.copy(aside)
    ends = np.cumsum([plane.nbytes for plane in dense])[:-1]
    return [part.reshape(plane.heads, n, -1) for plane, part in zip(dense, np.split(flat, ends), strict=True)]


def write_rows(planes: Planes, first: int, rows: Sequence[np.ndarray], stream: Stream) -> None:
    """Write the result of `read_rows` to the positions from `first` on, through at most COPIED bytes at a time."""
    most = max(1, COPIED // sum(plane.heads * plane.row_bytes for plane in planes))
    for at in range(0, rows[0].shape[1], most):
        _write_some(planes, first + at, [array[:, at : at + most] for array in rows], stream)


def _write_some(planes: Planes, first: int, rows: Sequence[np.ndarray], stream: Stream) -> None:
    n = rows[0].shape[1]
    dense = planes_at(0, planes, Places(n - 1, 1))
    aside = Memory(planes_bytes(dense), stream)
    dense = planes_at(aside.address, dense)
    for plane, array in zip(dense, rows, strict=True):
        copy_in(plane.address, np.ascontiguousarray(array), stream)
    copy_rows(dense, 0, planes, first, n, stream)
