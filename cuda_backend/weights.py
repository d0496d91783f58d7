"""Matrices on the device: repacked block types and plain floats, and the products with them.

A `Weight` is a stack of segments by rows, one per stored type, so that parts of different types (a Q6_K value
projection beside Q4_K queries) still make one output.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np
from cupy.cuda import cublas

from common.quants import BLOCKS, check_scales, dequantize
from common.tensors import Tensor
from cuda_backend.launch import CHOICE, Arena, Array, Memory, Node, kernel
from cuda_backend.layout import (
    FLOATS,
    MOST_ROWS,
    UNITS,
    UNPACKED,
    Card,
    Packing,
    expert_ring,
    groups_of,
    linear_launch,
    packed_size,
    packing,
    partition,
    parts_of,
    ring,
    row_bytes,
    tile_defines,
)
from cuda_backend.upload import Uploader
from cuda_backend.views import NOTHING, out_of, view

UPLOAD = 64 << 20  # bytes of a file that are copied and repacked at a time
ONE, ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)  # cuBLAS reads its factors from the host
CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF = 0, 2, 14
CUBLAS_OP_N, CUBLAS_OP_T, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT = 0, 1, 68, -1
NO_NORM = np.uint64(0), np.int32(0), np.float32(0), np.float32(0)
EXPAND = 1 << 26  # elements of a quantized matrix that prefill expands to bf16 at a time


@dataclass(frozen=True)
class Segment:
    """Rows of one stored type; `columns` x `rows` per expert."""

    type: str
    rows: int
    columns: int
    experts: int
    memory: Memory

    @property
    def row_blocks(self) -> int:
        return -(-self.rows // 128)

    @property
    def k_blocks(self) -> int:
        return -(-self.columns // UNITS[self.type][0])

    @property
    def expert_bytes(self) -> int:
        return self.memory.nbytes // self.experts


@dataclass(frozen=True)
class Weight:
    """A matrix (rows, columns), or `experts` of them; `nbytes` as stored in the file."""

    segments: tuple[Segment, ...]
    nbytes: int

    @property
    def rows(self) -> int:
        return sum(s.rows for s in self.segments)

    @property
    def columns(self) -> int:
        return self.segments[0].columns


# -- loading -----------------------------------------------------------------------------------------------------------


Stage = Callable[[Tensor, list[np.ndarray], slice], int]  # a slice of stored rows -> where they lie on the device


def load(parts: Sequence[Tensor], uploader: Uploader, stage: Stage | None = None) -> tuple[Weight, list[str]]:
    """The parts stacked by rows, and the types that had to be expanded to float16.

    A scale that is not finite is refused here in what is expanded, else by `uploader.check`.
    """

    def upload_rows(tensor: Tensor, stored: list[np.ndarray], rows: slice) -> int:
        blocks = [piece.reshape(-1, BLOCKS[tensor.type].bytes) for piece in _rows_of(stored, rows)]
        address = uploader.room(sum(piece.nbytes for piece in blocks))
        uploader.copy(address, blocks)
        return address

    for part in parts:
        if part.type not in UNITS:
            check_scales(part)
    expanded = [p.type for p in parts if p.scales is not None or p.type not in UNITS.keys() | FLOATS.keys()]
    groups: list[list[Tensor]] = []
    for part in parts:  # neighbours of one type become one segment
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
    return Weight(tuple(_segment(group, uploader, stage or upload_rows) for group in groups), nbytes), expanded


def held_bytes(part: Tensor) -> int:
    """Device bytes of a tensor by itself; rows of a neighbour of the same type may fill what pads it to 128 rows."""
    experts, rows = (part.shape[0], part.shape[1]) if len(part.shape) == 3 else (1, part.shape[0])
    if part.scales is None and part.type in UNITS:
        k_size, tile = UNITS[part.type]
        return experts * -(-rows // 128) * -(-part.shape[-1] // k_size) * 8 * tile
    return experts * rows * part.shape[-1] * (2 if part.scales is not None else FLOATS.get(part.type, 2))


def _segment(parts: list[Tensor], uploader: Uploader, stage: Stage) -> Segment:
    first = parts[0]
    experts = first.shape[0] if len(first.shape) == 3 else 1
    rows, columns = sum(p.shape[-2] for p in parts), first.shape[-1]
    if first.scales is not None or first.type not in UNITS:
        return _float_segment(parts, rows, columns, experts, uploader)
    k_size, tile = UNITS[first.type]
    k_blocks, row_blocks = -(-columns // k_size), -(-rows // 128)
    unit_row = 8 * tile * k_blocks  # bytes of 128 rows
    memory, flag = Memory(experts * row_blocks * unit_row), uploader.flag(parts)
    row_bytes = first.data.shape[-1]
    data = [p.data if p.data.ndim == 3 else p.data.reshape(experts, -1, row_bytes) for p in parts]
    matrices = [[d[expert] for d in data] for expert in range(experts)]
    if rows % 128 == 0:  # then no padding comes between them
        matrices = [[data[0].reshape(-1, row_bytes)] if len(data) == 1 else list(itertools.chain(*matrices))]
    each, to = rows * experts // len(matrices), memory.address
    chunk = max(128, UPLOAD // row_bytes // 128 * 128)
    for stored in matrices:
        for at in range(0, each, chunk):
            n = min(chunk, each - at)
            staged = stage(first, stored, slice(at, at + n))
            tiles = -(-n // 128) * 8
            kernel("repack", "repack", tile_defines(first.type))(
                (-(-tiles * k_blocks // 8),),
                (256,),
                (
                    np.uint64(staged),
                    np.int64(row_bytes),
                    np.int32(n),
                    np.int32(columns),
                    np.int32(0),
                    np.int32(tiles),
                    np.int32(k_blocks),
                    np.uint64(to),
                    np.uint64(flag),
                ),
                stream=uploader.stream,
            )
            to += tiles // 8 * unit_row
    return Segment(first.type, rows, columns, experts, memory)


def _rows_of(arrays: list[np.ndarray], rows: slice) -> Iterator[np.ndarray]:
    """Rows of (n, bytes) arrays as if they were stacked."""
    at = 0
    for array in arrays:
        first, last = max(rows.start - at, 0), min(rows.stop - at, len(array))
        if first < last:
            yield array[first:last]
        at += len(array)


def _float_segment(parts: list[Tensor], rows: int, columns: int, experts: int, uploader: Uploader) -> Segment:
    first = parts[0]
    type_ = first.type if first.scales is None and first.type in FLOATS else "F16"
    size = FLOATS[type_]
    memory = Memory(experts * rows * columns * size)
    at = memory.address
    for part in parts:
        flat = part.data.reshape(-1, part.data.shape[-1])
        step = max(1, UPLOAD // (columns * 4))
        for row in range(0, len(flat), step):
            if first.scales is None and first.type in FLOATS:
                chunk = np.ascontiguousarray(flat[row : row + step])
            else:
                chunk = _decoded(part, row, step).astype("<f2").view(np.uint8)
            uploader.copy(at, [chunk.reshape(-1, size)])
            at += chunk.nbytes
    return Segment(type_, rows, columns, experts, memory)


def _decoded(part: Tensor, row: int, n: int) -> np.ndarray:
    """Rows of a tensor of any type, counted over all but the last axis, as float32."""
    flat = _flat(part)
    return dequantize(flat.take_rows(np.arange(row, min(row + n, flat.shape[0]))))


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


def upload(array: np.ndarray, stream: cupy.cuda.Stream) -> Memory:
    """A copy of a contiguous array on the device; returns when the host's may change."""
    memory = Memory(array.nbytes)
    copy_in(memory.address, array, stream)
    return memory


def copy_in(address: int, array: np.ndarray, stream: cupy.cuda.Stream) -> None:
    """Copy from pageable memory, which the driver has read when this returns."""
    cupy.cuda.runtime.memcpyAsync(
        address, array.ctypes.data, array.nbytes, cupy.cuda.runtime.memcpyHostToDevice, stream.ptr
    )


# -- products ----------------------------------------------------------------------------------------------------------


def linear(x: Array, w: Weight, card: Card, arena: Arena, stream: cupy.cuda.Stream, node: Node) -> Array:
    """x (T, columns), computed by `node` where anything still has to be, times each segment's rows."""
    T, N = x.shape[0], w.rows
    if T > MOST_ROWS:
        return _product(T, w, arena, stream, node)
    grids = {s: partition(ring(card, s.type, 1)[0] * card.sms, s.row_blocks, s.k_blocks) for s in _packed(w)}
    slots = max((n for _, n in grids.values()), default=1)
    counts = (grids[s][1] if s in grids else 1 for s in w.segments)
    needs = tuple(zip(itertools.accumulate(s.rows for s in w.segments), counts, strict=True))
    out = Array((T, N), arena.take(slots * T * N * 4), slots=slots, slot=T * N, needs=needs)
    at = out.address
    for s in w.segments:
        if s in grids:
            how = packing(s.type, T)
            packed, squares = node.as_unscaled(how) if is_packed(w) else (node.as_packed(how), 0)
            _quantized(s, packed, (squares, node.eps), at, T, how, N, grids[s][0], card, stream, slots=slots)
        else:
            x_dense, squares = (node.as_dense(), 0) if grids else node.as_unscaled_dense()
            _dense(s, x_dense, at, T, N, stream, slots=slots, norm=_norm(squares, s, node))
        at += 4 * s.rows
    return out


@dataclass(frozen=True)
class Groups:
    """Rows by the matrix that they take, on the device: kernels/experts.cu `groups` and `order`.

    ids      matrix of each pair, int32; most: groups that there can be, of `cols` rows
    chosen   matrices that a row of a step takes, so that k is cut; 0: it is not
    """

    ids: int
    groups: int
    order: int
    pairs: int
    most: int
    cols: int
    chosen: int
    owner: Any = None


def is_packed(w: Weight) -> bool:
    return len(_packed(w)) == len(w.segments)


def joins(stack: Weight, one: Weight) -> bool:
    """Can `one` be the matrix behind the last of `stack`, which `grouped_linear` reads from where it lies?"""
    kinds = [[(s.type, s.rows, s.columns) for s in w.segments] for w in (stack, one)]
    return kinds[0] == kinds[1] and is_packed(stack)


def grouped_linear(
    x: Node,
    w: Weight,
    g: Groups,
    share: int,
    card: Card,
    arena: Arena,
    stream: cupy.cuda.Stream,
    last: Weight | None = None,
    known: bool = False,
) -> Array:
    """Row p // share of x times matrix ids[p] of w, and of `last` behind them, for each pair p: (pairs, rows)

    known: the kernel before this one did not make g, and began when g was there.
    """
    N, parts = w.rows, _packed(w)
    slots = _cuts(w, g.chosen, card) if g.chosen else 1
    out = Array((g.pairs, N), arena.take(slots * g.pairs * N * 4), slots=slots, slot=g.pairs * N)
    at = out.address
    for s, behind in zip(w.segments, last.segments if last else w.segments, strict=True):
        if s in parts:
            how = packing(s.type, 1)
            packed, squares = x.as_unscaled(how) if x.T <= MOST_ROWS else (x.as_packed(how), 0)
            ctas, stages, shared = expert_ring(card, s.type, g.cols)
            defines = (*tile_defines(s.type), f"COLS={g.cols}", f"STAGES={stages}")
            kernel("experts", "experts", defines, shared)(
                (min(ctas * card.sms, g.most * s.row_blocks * slots),),
                (288,),
                (
                    np.uint64(s.memory.address),
                    np.uint64(packed),
                    np.uint64(at),
                    np.int32(s.rows),
                    np.int32(s.row_blocks),
                    np.int32(s.k_blocks),
                    np.int32(slots),
                    np.int64(g.pairs * N),
                    np.int64(N),
                    np.uint64(g.groups),
                    np.uint64(g.order),
                    np.int64(s.expert_bytes),
                    np.int32(s.experts),
                    np.uint64(behind.memory.address),
                    np.int32(share),
                    np.int32(known),
                    np.int64(packed_size(s.columns, 1, how)),
                    *_norm(squares, s, x),
                ),
                shared_mem=shared,
                stream=stream,
            )
        else:
            _dense(s, x.as_dense(), at, g.pairs, N, stream, ids=g.ids, share=share)
        at += 4 * s.rows
    return out


def chosen_linear(
    x: Node | Array,
    w: Weight,
    last: Weight | None,
    choice: np.ndarray,
    card: Card,
    arena: Arena,
    stream: cupy.cuda.Stream,
) -> Array:
    """One row times each matrix that it chooses, and times `last` if there is one: (matrices, rows)

    x       the row, or gates and ups (matrices, 2 columns), whose SwiGLU is the row of each matrix
    choice  kernels/choose.cuh Choice
    """
    n, N = int(choice["k"]) + (last is not None), w.rows
    slots = _cuts(w, n, card)
    out = Array((n, N), arena.take(slots * n * N * 4), slots=slots, slot=n * N)
    at = out.address
    for s, behind in zip(w.segments, (last or w).segments, strict=True):
        packed, squares = (0, 0) if isinstance(x, Array) else x.as_unscaled(packing(s.type, 1))
        norm = NO_NORM if isinstance(x, Array) else _norm(squares, s, x)
        source, to = x if isinstance(x, Array) else packed, out_of(at, 0, 0, N, UNPACKED)
        _single(s, behind, choice, source, 0, SWIGLU, to, n, N, slots, norm, card, stream)
        at += 4 * s.rows
    return out


def heads_of_one(
    x: Node | Array, w: Weight, dense: int, packed: int, out: Packing, card: Card, stream: cupy.cuda.Stream
) -> None:
    """Heads of one row, (H, columns) or packed one after the other, by their matrices: floats, or one packed row"""
    (s,) = w.segments
    how = packing(s.type, 1)
    source = x if isinstance(x, Array) else x.as_packed(how)
    x_bytes, to = packed_size(s.columns, 1, how), out_of(dense, packed, 0, s.experts * s.rows, out)
    _single(s, s, None, source, x_bytes, SUM, to, s.experts, s.rows, 1, NO_NORM, card, stream)


SUM, SWIGLU = 1, 2  # kernels/single.cu MADE


def _single(
    s: Segment,
    behind: Segment,
    choice: np.ndarray | None,
    x: Array | int,
    x_bytes: int,
    made: int,
    out: np.ndarray,
    matrices: int,
    row_stride: int,
    parts: int,
    norm: tuple[Any, ...],
    card: Card,
    stream: cupy.cuda.Stream,
) -> None:
    """kernels/single.cu, whose rows are `made` of an array x, or lie packed at x."""
    _, stages, shared = ring(card, s.type, 1)
    per = 1 if choice is None else -(-int(choice["E"]) // 32)
    of = (int(choice is not None), made if isinstance(x, Array) else 0, int(bool(out["packed"])))
    chosen = tuple(f"{name}={value}" for name, value in zip(("CHOICE", "MADE", "PACK"), of, strict=True))
    kernel("single", "single", (*tile_defines(s.type), "COLS=1", f"STAGES={stages}", f"PER={per}", *chosen), shared)(
        (matrices * s.row_blocks * parts,),
        (288,),
        (
            np.uint64(s.memory.address),
            np.int64(s.expert_bytes),
            np.uint64(behind.memory.address),
            np.zeros((), CHOICE) if choice is None else choice,
            np.uint64(0 if isinstance(x, Array) else x),
            np.int64(x_bytes),
            view(x) if isinstance(x, Array) else NOTHING,
            out,
            np.int32(s.rows),
            np.int32(s.columns),
            np.int32(s.row_blocks),
            np.int32(s.k_blocks),
            np.int32(parts),
            np.int64(matrices * row_stride),
            np.int64(row_stride),
            *norm,
        ),
        shared_mem=shared,
        stream=stream,
    )


def _cuts(w: Weight, matrices: int, card: Card) -> int:
    """Parts of k in steps, each row of which takes `matrices`: as many for all segments, however many rows."""
    packed = _packed(w)
    parts = {parts_of(card, expert_ring(card, s.type, 8)[0], matrices, s.row_blocks, s.k_blocks) for s in packed}
    return parts.pop() if len(parts) == 1 and len(packed) == len(w.segments) else 1


def _norm(squares: int, s: Segment, x: Node) -> tuple[Any, ...]:
    """What a product needs to finish a norm: Node.as_unscaled."""
    parts = s.columns // 128 if squares else 0
    return np.uint64(squares), np.int32(parts), np.float32(s.columns), np.float32(x.eps)


def _packed(w: Weight) -> list[Segment]:
    return [s for s in w.segments if s.type in UNITS]


def _quantized(
    s: Segment,
    x: int,
    norm: tuple[int, float],
    out: int,
    T: int,
    how: Packing,
    row_stride: int,
    stripes: int,
    card: Card,
    stream: cupy.cuda.Stream,
    slots: int = 1,
) -> None:
    parts = ((0, how.whole), (how.whole, how.cols)) if how.whole else ((0, how.cols),)
    for first, cols in parts:  # the matrix is read once for each
        launch = linear_launch(card, s.type, cols)
        kernel("linear", "linear", launch.defines, launch.shared)(
            (stripes if stripes <= card.sms else -(-stripes // launch.stripes),),
            (launch.threads,),
            (
                np.uint64(s.memory.address),
                np.uint64(x + first * groups_of(s.columns) * row_bytes(how)),
                np.uint64(out + first * row_stride * 4),
                np.int32(s.rows),
                np.int32(min(T - first, cols)),
                np.int32(s.row_blocks),
                np.int32(s.k_blocks),
                np.int32(stripes),
                np.int32(slots),
                np.int64(T * row_stride),
                np.int64(row_stride),
                np.uint64(norm[0] + 4 * first * (s.columns // 128) if norm[0] else 0),
                np.int32(s.columns // 128 if norm[0] else 0),
                np.float32(s.columns),
                np.float32(norm[1]),
            ),
            shared_mem=launch.shared,
            stream=stream,
        )


def _dense(
    s: Segment,
    x: int,
    out: int,
    T: int,
    row_stride: int,
    stream: cupy.cuda.Stream,
    slots: int = 1,
    ids: int = 0,
    share: int = 1,
    norm: tuple[Any, ...] = NO_NORM,
) -> None:
    rows = 1 if ids or T == 1 else 2
    kernel("dense", "dense", (s.type, f"ROWS={rows}", *(("EXPERTS",) if ids else ())))(
        (-(-T // rows), -(-s.rows // 8)),
        (256,),
        (
            np.uint64(s.memory.address),
            np.uint64(x),
            np.uint64(out),
            np.int32(s.rows),
            np.int32(s.columns),
            np.int32(T),
            np.int64(row_stride),
            np.int32(slots),
            np.int64(T * row_stride),
            np.uint64(ids),
            np.int64(s.rows),
            np.int32(share),
            *norm,
        ),
        stream=stream,
    )


def _product(T: int, w: Weight, arena: Arena, stream: cupy.cuda.Stream, node: Node) -> Array:
    """More rows than `linear` takes: bf16 through cuBLAS, a slice of the matrix expanded at a time.

    A float32 matrix (a router, whose order decides) keeps its precision.
    """
    N = w.rows
    out = Array((T, N), arena.take(T * N * 4))
    at = out.address
    for s in w.segments:
        if s.type == "F32":
            _dense(s, node.as_dense(), at, T, N, stream)
        else:
            step = min(s.rows, max(128, EXPAND // s.columns // 128 * 128))
            scratch = 0 if s.type == "BF16" else arena.take(step * s.columns * 2)
            for row in range(0, s.rows, step):
                n = min(step, s.rows - row)
                if s.type == "BF16":
                    matrix = s.memory.address + row * s.columns * 2
                else:
                    matrix = scratch
                    _expand(s, row, n, matrix, stream)
                _gemm(node.as_bf16(), matrix, at + row * 4, T, n, s.columns, N, stream)
        at += 4 * s.rows
    return out


def _expand(s: Segment, row: int, n: int, out: int, stream: cupy.cuda.Stream, dense: int = 0) -> None:
    """Rows row..row+n of a segment of one expert to bf16 at `out`, or to float32 at `dense`."""
    if s.type in UNITS:
        tiles = -(-n // 16)
        units = s.memory.address + row // 128 * s.k_blocks * 8 * UNITS[s.type][1]
        sizes = (np.int32(n), np.int32(s.columns), np.int32(s.k_blocks), np.int32(tiles))
        kernel("expand", "expand", tile_defines(s.type))(
            (-(-tiles * s.k_blocks // 8),),
            (256,),
            (np.uint64(units), *sizes, np.uint64(out), np.uint64(dense)),
            stream=stream,
        )
    else:
        source = s.memory.address + row * s.columns * FLOATS[s.type]
        args = (np.uint64(source), np.int64(n * s.columns), np.uint64(out))
        kernel("dense", "to_bf16_matrix", (s.type,))((2048,), (256,), args, stream=stream)


def _gemm(x: int, w: int, out: int, T: int, rows: int, columns: int, row_stride: int, stream: cupy.cuda.Stream) -> None:
    """out (T, rows) float32 = x (T, columns) w' (rows, columns), both bf16; in cuBLAS's column order w' x'."""
    with stream:  # CuPy hands its current stream to cuBLAS
        cublas.gemmEx(
            cupy.cuda.device.get_cublas_handle(),
            CUBLAS_OP_T,
            CUBLAS_OP_N,
            rows,
            T,
            columns,
            ONE.ctypes.data,
            w,
            CUDA_R_16BF,
            columns,
            x,
            CUDA_R_16BF,
            columns,
            ZERO.ctypes.data,
            out,
            CUDA_R_32F,
            row_stride,
            CUBLAS_COMPUTE_32F,
            CUBLAS_GEMM_DEFAULT,
        )


def expand_heads(
    w: Weight,
    transposed: bool,
    rows: int,
    width: int,
    n: int,
    out: int,
    plane: int,
    wide: int,
    arena: Arena,
    stream: cupy.cuda.Stream,
) -> None:
    """n rows of float16 latents (`width` apart) times the matrix of each head, float16: out [head][n][wide].

    plane  bytes of a head of out
    w      (H, columns of a latent, channels), or where it is `transposed` (H, channels, columns of a latent)
    """
    (s,) = w.segments
    size = s.rows * s.columns
    matrices = arena.take(s.experts * size * 2)
    if s.type in UNITS:
        padded_rows = s.experts * s.row_blocks * 128
        dense, stride, kind = arena.take(padded_rows * s.columns * 4), s.row_blocks * 128 * s.columns, 0
        _expand(s, 0, padded_rows, 0, stream, dense)
    else:
        dense, stride, kind = s.memory.address, size, ("F32", "F16", "BF16").index(s.type)
    kernel("latent", "halves", ("R=16", "W=16", "TILE=32", "BUFFERS=2"))(
        (min(-(-size // 256), 1024), s.experts),
        (256,),
        (np.uint64(dense), np.int32(kind), np.int64(stride), np.int64(size), np.uint64(matrices)),
        stream=stream,
    )
    channels, inner = (s.rows, s.columns) if transposed else (s.columns, s.rows)
    for h in range(s.experts):
        with stream:
            cublas.gemmEx(
                cupy.cuda.device.get_cublas_handle(),
                CUBLAS_OP_T if transposed else CUBLAS_OP_N,
                CUBLAS_OP_N,
                channels,
                n,
                inner,
                ONE.ctypes.data,
                matrices + h * size * 2,
                CUDA_R_16F,
                s.columns,
                rows,
                CUDA_R_16F,
                width,
                ZERO.ctypes.data,
                out + h * plane,
                CUDA_R_16F,
                wide,
                CUBLAS_COMPUTE_32F,
                CUBLAS_GEMM_DEFAULT,
            )


def embed(table: Weight, tokens: int, T: int, arena: Arena, stream: cupy.cuda.Stream) -> Array:
    """Rows `tokens` (int32 on the device) of a table of one type: (T, columns)"""
    (s,) = table.segments
    out = Array((T, s.columns), arena.take(T * s.columns * 4))
    if s.type in UNITS:
        sizes = (np.int32(s.rows), np.int32(s.columns), np.int32(s.k_blocks))
        args = (np.uint64(s.memory.address), *sizes, np.uint64(tokens), np.uint64(out.address))
        kernel("expand", "embed", tile_defines(s.type))((s.k_blocks, T), (32,), args, stream=stream)
    else:
        head = (np.uint64(s.memory.address), np.int32(s.rows), np.int32(s.columns), np.uint64(tokens))
        blocks = -(-s.columns // 256)
        kernel("dense", "embed", (s.type,))((blocks, T), (256,), (*head, np.uint64(out.address)), stream=stream)
    return out
