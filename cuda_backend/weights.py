"""Matrices on the device: repacked block types and plain floats.

A `Weight` stacks segments by rows, one segment per stored type, so that parts of different types (a Q6_K value
projection after Q4_K queries) still make one output.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from common.errors import BimetalError
from common.quants import BLOCKS, as_blocks, block_type, check_scales, dequantize
from common.tensors import Tensor
from cuda_backend.host_memory import HostMemory
from cuda_backend.launch import kernel
from cuda_backend.layout import FLOATS, UNITS, tile_defines
from cuda_backend.memory import Memory, upload
from cuda_backend.prototypes import MATRICES
from cuda_backend.upload import Uploader

UPLOAD = 64 << 20  # bytes of a file that are copied and repacked at a time


@dataclass(frozen=True)
class Segment:
    """Rows of one stored type; `columns` x `rows` per expert.

    memory  of the device, or pinned memory of the host
    places  of a stack of experts: addresses of their matrices, uint64 (experts,) on the device; None: one matrix
    moved   whether some experts lie outside of `memory`; kernels then find each of them by `places`
    """

    type: str
    rows: int
    columns: int
    experts: int
    memory: "AnyMemory"
    places: Memory | None = None
    moved: bool = False

    @property
    def row_blocks(self) -> int:
        return -(-self.rows // 128)

    @property
    def k_blocks(self) -> int:
        return -(-self.columns // UNITS[self.type][0])

    @property
    def expert_bytes(self) -> int:
        return self.memory.nbytes // self.experts

    def matrices(self, last: int = 0) -> np.ndarray:
        """Make the struct Matrices of kernels/matrices.cuh; `last`: address of the matrix after the experts."""
        table, apart = self.places.address if self.places else 0, 0 if self.moved else self.expert_bytes
        return np.array((self.memory.address, last, table, apart, self.experts), MATRICES)


@dataclass(frozen=True)
class Weight:
    """A matrix (rows, columns), or `experts` of them; `nbytes` as stored in the file.

    layer  layer of a mixture's experts
    """

    segments: tuple[Segment, ...]
    nbytes: int
    layer: int | None = None

    @property
    def rows(self) -> int:
        return sum(s.rows for s in self.segments)

    @property
    def columns(self) -> int:
        return self.segments[0].columns


AnyMemory = Memory | HostMemory
Stage = Callable[[Tensor, list[np.ndarray], slice], int]  # a slice of stored rows -> where they lie on the device


def load(
    parts: Sequence[Tensor], uploader: Uploader, half: str, stage: Stage | None = None
) -> tuple[Weight, list[str]]:
    """Load the parts stacked by rows; return also the types held as float16 instead: BF16 if `half` is F16.

    Scales that are not finite are refused here in expanded matrices, else by `uploader.check`. Later launches of the
    stream find all data, except the last `uploader.ahead` buffers.
    """

    def upload_rows(tensor: Tensor, stored: list[np.ndarray], rows: slice) -> int:
        blocks = [piece.reshape(-1, BLOCKS[tensor.type].bytes) for piece in _rows_of(stored, rows)]
        address = uploader.scratch(sum(piece.nbytes for piece in blocks))
        uploader.copy(address, blocks)
        return address

    parts = [as_blocks(part) for part in parts]
    for part in parts:
        if part.type not in UNITS:
            check_scales(part)
    expanded = [p.type for p in parts if not is_kept(p, half)]
    groups: list[list[Tensor]] = []
    for part in parts:  # adjacent parts of one type become one segment
        if (
            groups
            and groups[-1][0].type == part.type
            and part.scales is None
            and (len(part.shape) == 2 or part.type in UNITS)
        ):
            groups[-1].append(part)
        else:
            groups.append([part])
    nbytes = sum(part.nbytes for part in parts)
    try:
        segments = tuple(_segment(group, uploader, half, stage or upload_rows) for group in groups)
        uploader.finish(uploader.ahead)
    except BaseException:
        uploader.drop()
        raise
    return Weight(segments, nbytes), expanded


def is_kept(part: Tensor, half: str) -> bool:
    """Test whether a tensor is held in its stored type."""
    return part.scales is None and (part.type in UNITS or (part.type in FLOATS and part.type in ("F32", "F16", half)))


def held_bytes(part: Tensor) -> int:
    """Predict the device bytes of a tensor alone; rows of a neighbour of its type may fill its padding to 128 rows."""
    experts, rows = (part.shape[0], part.shape[1]) if len(part.shape) == 3 else (1, part.shape[0])
    if (type_ := block_type(part.type, part.bits) or part.type) in UNITS:
        k_size, tile = UNITS[type_]
        return experts * -(-rows // 128) * -(-part.shape[-1] // k_size) * 8 * tile
    return experts * rows * part.shape[-1] * (2 if part.scales is not None else FLOATS.get(part.type, 2))


def _segment(parts: list[Tensor], uploader: Uploader, half: str, stage: Stage) -> Segment:
    """Stack parts of one type by rows, and repack them on the device into the units that products read."""
    first = parts[0]
    experts = first.shape[0] if len(first.shape) == 3 else 1
    rows, columns = sum(p.shape[-2] for p in parts), first.shape[-1]
    if first.scales is not None or first.type not in UNITS:
        return _float_segment(parts, rows, columns, experts, uploader, half)
    k_size, tile = UNITS[first.type]
    k_blocks, row_blocks = -(-columns // k_size), -(-rows // 128)
    unit_row = 8 * tile * k_blocks  # bytes of 128 rows
    memory, flag = Memory(experts * row_blocks * unit_row), uploader.flag(parts)
    row_bytes = first.data.shape[-1]
    data = [p.data if p.data.ndim == 3 else p.data.reshape(experts, -1, row_bytes) for p in parts]
    matrices = [[d[expert] for d in data] for expert in range(experts)]
    if rows % 128 == 0:  # no padding lies between the experts
        matrices = [[data[0].reshape(-1, row_bytes)] if len(data) == 1 else list(itertools.chain(*matrices))]
    each, to = rows * experts // len(matrices), memory.address
    chunk = max(128, UPLOAD // row_bytes // 128 * 128)
    for stored in matrices:
        for at in range(0, each, chunk):
            n = min(chunk, each - at)
            staged = stage(first, stored, slice(at, at + n))
            tiles = -(-n // 128) * 8
            args = (staged, row_bytes, n, columns, 0, tiles, k_blocks, to, flag)
            repack, grid = kernel("repack", "repack", tile_defines(first.type)), (-(-tiles * k_blocks // 8),)
            uploader.then(partial(repack, grid, (256,), args, stream=uploader.stream))
            to += tiles // 8 * unit_row
    return Segment(first.type, rows, columns, experts, memory, _places(first, memory, uploader))


def _places(stack: Tensor, memory: Memory, uploader: Uploader) -> Memory | None:
    """List the addresses of the experts of a stack that are adjacent in memory."""
    if len(stack.shape) < 3:
        return None
    experts = stack.shape[0]
    return upload(memory.address + np.arange(experts, dtype=np.uint64) * (memory.nbytes // experts), uploader.stream)


def _rows_of(arrays: list[np.ndarray], rows: slice) -> Iterator[np.ndarray]:
    """Return rows of (n, bytes) arrays as if they were stacked."""
    at = 0
    for array in arrays:
        first, last = max(rows.start - at, 0), min(rows.stop - at, len(array))
        if first < last:
            yield array[first:last]
        at += len(array)


def _float_segment(
    parts: list[Tensor], rows: int, columns: int, experts: int, uploader: Uploader, half: str
) -> Segment:
    first = parts[0]
    type_ = first.type if is_kept(first, half) else "F16"
    size = FLOATS[type_]
    memory = Memory(experts * rows * columns * size)
    at = memory.address
    for part in parts:
        flat = part.data.reshape(-1, part.data.shape[-1])
        step = max(1, UPLOAD // (columns * 4))
        for row in range(0, len(flat), step):
            if is_kept(first, half):
                chunk = np.ascontiguousarray(flat[row : row + step])
            else:
                chunk = _float16(part, row, step).view(np.uint8)
            uploader.copy(at, [chunk.reshape(-1, size)])
            at += chunk.nbytes
    return Segment(type_, rows, columns, experts, memory, _places(first, memory, uploader))


def _float16(part: Tensor, row: int, n: int) -> np.ndarray:
    """Convert rows of a tensor of any type, over all axes but the last, to float16; BimetalError if too large."""
    flat = _flat(part)
    values = dequantize(flat.take_rows(np.arange(row, min(row + n, flat.shape[0]))))
    with np.errstate(over="ignore"):
        halves = values.astype("<f2")
    beyond = np.isinf(halves) & np.isfinite(values)
    if beyond.any():
        raise BimetalError(
            f"{part.name} holds {values[beyond][0]:g} as {part.type}, which this GPU holds as float16, up to 65504"
        )
    return halves


def _flat(part: Tensor) -> Tensor:
    def flatten(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        shape = (int(np.prod(t.shape[:-1])), t.shape[-1])
        return Tensor(
            t.name,
            t.type,
            shape,
            t.data.reshape(shape[0], -1),
            flatten(t.scales),
            flatten(t.biases),
            t.bits,
            t.group_size,
        )

    flat = flatten(part)
    assert flat
    return flat
