"""Products of a step's rows with matrices: dense, of experts that the rows choose, of heads; and rows of a table."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.step import MAX_DECODE_ROWS
from cuda_backend.arrays import Array
from cuda_backend.gemm import expand, gemm
from cuda_backend.launch import Stream, kernel
from cuda_backend.layout import (
    TOGETHER,
    UNITS,
    UNPACKED,
    Packing,
    expert_defines,
    expert_ring,
    groups_of,
    linear_launch,
    packed_size,
    packing,
    partition,
    parts_of,
    ring,
    row_bytes,
    shares,
    single_defines,
    tile_defines,
)
from cuda_backend.lazy import Node
from cuda_backend.memory import Arena
from cuda_backend.occupancy import Card
from cuda_backend.prototypes import CHOICE, MATRIX, PARTIALS, ROWS
from cuda_backend.views import NOTHING, out_of, view
from cuda_backend.weights import Segment, Weight

NO_NORM = np.uint64(0), np.int32(0), np.float32(0), np.float32(0)
EXPAND = 1 << 26  # elements of a quantized matrix that prefill expands to bf16 at a time


def linear(x: Array, w: Weight, card: Card, arena: Arena, stream: Stream, node: Node) -> Array:
    """x (T, columns), computed by `node` where anything still has to be, times each segment's rows."""
    T, N = x.shape[0], w.rows
    if T > MAX_DECODE_ROWS:
        return _product(T, w, arena, stream, node)
    launches = _launches(w.segments)
    cuts = {s: cut for together in launches for s, cut in zip(together, _cut(together, card), strict=True)}
    slots = max((n for _, n in cuts.values()), default=1)
    counts = (cuts[s][1] if s in cuts else 1 for s in w.segments)
    needs = tuple(zip(itertools.accumulate(s.rows for s in w.segments), counts, strict=True))
    out = Array((T, N), arena.take(slots * T * N * 4), slots=slots, slot=T * N, needs=needs)
    rows = itertools.accumulate((s.rows for s in w.segments), initial=0)
    at = {s: out.address + 4 * row for s, row in zip(w.segments, rows, strict=False)}
    for together in launches:
        how = packing(together[0].type, T)
        packed, squares = node.as_unscaled(how) if is_packed(w) else (node.as_packed(how), 0)
        norm = _norm(squares, together[0], node)
        _quantized([(s, at[s], cuts[s][0]) for s in together], packed, norm, T, how, N, slots, card, stream)
    for s in w.segments:
        if s not in cuts:
            x_dense, squares = (node.as_dense(), 0) if cuts else node.as_unscaled_dense()
            _dense(s, x_dense, at[s], T, N, stream, slots=slots, norm=_norm(squares, s, node))
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
    stream: Stream,
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
            packed, squares = x.as_unscaled(how) if x.T <= MAX_DECODE_ROWS else (x.as_packed(how), 0)
            ctas, _, shared = expert_ring(card, s.type, g.cols)
            kernel("experts", "experts", expert_defines(card, s.type, g.cols), shared)(
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
                    _inverse(s.row_blocks),
                    _inverse(slots),
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
    stream: Stream,
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


def heads_of_one(x: Node | Array, w: Weight, dense: int, packed: int, out: Packing, card: Card, stream: Stream) -> None:
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
    stream: Stream,
) -> None:
    """kernels/single.cu, whose rows are `made` of an array x, or lie packed at x."""
    shared = ring(card, s.type, 1)[2]
    per = 1 if choice is None else -(-int(choice["E"]) // 32)
    of = (int(choice is not None), made if isinstance(x, Array) else 0, int(bool(out["packed"])))
    chosen = tuple(f"{name}={value}" for name, value in zip(("CHOICE", "MADE", "PACK"), of, strict=True))
    kernel("single", "single", (*single_defines(card, s.type), f"PER={per}", *chosen), shared)(
        (parts, s.row_blocks, matrices),
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
            np.int32(s.k_blocks),
            np.int32(parts),
            _inverse(parts),
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


def _inverse(divisor: int) -> np.uint32:
    """By which kernels divide: kernels/prelude.cuh `quotient`."""
    return np.uint32(0xFFFFFFFF // divisor)


def _packed(w: Weight) -> list[Segment]:
    return [s for s in w.segments if s.type in UNITS]


def _launches(segments: Sequence[Segment]) -> list[tuple[Segment, ...]]:
    """Quantized segments by launch: one, or two of types that a kernel is built for."""
    launches: list[tuple[Segment, ...]] = []
    for s in segments:
        if s.type not in UNITS:
            continue
        if launches and tuple(sorted(t.type for t in (*launches[-1], s))) in TOGETHER:
            launches[-1] = tuple(sorted((*launches[-1], s), key=lambda t: t.type))
        else:
            launches.append((s,))
    return launches


def _cut(together: tuple[Segment, ...], card: Card) -> list[tuple[int, int]]:
    """Stripes and partial sums of the matrices of a launch."""
    counts = shares(card, tuple((s.type, s.row_blocks, s.k_blocks) for s in together))
    return [partition(n, s.row_blocks, s.k_blocks) for s, n in zip(together, counts, strict=True)]


def _quantized(
    matrices: list[tuple[Segment, int, int]],
    x: int,
    norm: tuple[Any, ...],
    T: int,
    how: Packing,
    row_stride: int,
    slots: int,
    card: Card,
    stream: Stream,
) -> None:
    """kernels/linear.cu for one or two matrices, each with the address of its result and its stripes."""
    squares, norm_parts, columns, eps = norm
    types = tuple(s.type for s, _, _ in matrices)
    stripes = sum(n for _, _, n in matrices)
    for first, cols in ((0, how.whole), (how.whole, how.cols)) if how.whole else ((0, how.cols),):
        launch = linear_launch(card, types, cols)  # the matrices are read once for each
        each = launch.stripes if stripes > card.sms else 1
        given, ctas = np.zeros(2, MATRIX), [-(-n // each) for _, _, n in matrices]
        for i, (s, out, n) in enumerate(matrices):
            to = out + first * row_stride * 4
            units = s.row_blocks * s.k_blocks
            given[i] = s.memory.address, to, s.rows, s.k_blocks, units, n, each, *map(_inverse, (s.k_blocks, units, n))
        packed = x + first * groups_of(matrices[0][0].columns) * row_bytes(how)
        of_rows = squares + np.uint64(4 * first * norm_parts) if squares else squares
        kernel("linear", "linear", launch.defines, launch.shared, launch.second)(
            (sum(ctas),),
            (launch.threads,),
            (
                given[0],
                given[1],
                np.int32(ctas[0]),
                np.array((packed, of_rows, min(T - first, cols), norm_parts, columns, eps), ROWS),
                np.array((T * row_stride, row_stride, slots), PARTIALS),
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
    stream: Stream,
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


def _product(T: int, w: Weight, arena: Arena, stream: Stream, node: Node) -> Array:
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
            scratch = 0 if s.type == "BF16" else arena.scratch(step * s.columns * 2, stream)
            for row in range(0, s.rows, step):
                n = min(step, s.rows - row)
                if s.type == "BF16":
                    matrix = s.memory.address + row * s.columns * 2
                else:
                    matrix = scratch
                    expand(s, row, n, matrix, stream)
                gemm(node.as_bf16(), matrix, at + row * 4, T, n, s.columns, N, stream)
        at += 4 * s.rows
    return out


def embed(table: Weight, tokens: int, T: int, arena: Arena, stream: Stream) -> Array:
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
