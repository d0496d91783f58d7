"""Products of a step's rows with matrices: dense, of experts that the rows choose, of heads; and rows of a table."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from common.step import MAX_DECODE_ROWS
from cuda_backend.arrays import Array
from cuda_backend.context import Context
from cuda_backend.fuse import unscaled, unscaled_dense
from cuda_backend.gemm import expand, gemm
from cuda_backend.launch import kernel
from cuda_backend.layout import (
    TOGETHER,
    UNITS,
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
from cuda_backend.lazy import Lazy, Target
from cuda_backend.occupancy import Card
from cuda_backend.prototypes import CHOICE, MATRIX, PARTIALS, ROWS
from cuda_backend.views import NOTHING, out_of, view
from cuda_backend.weights import Segment, Weight


class RowNorm(NamedTuple):
    """How a product finishes the norm of its rows: fuse.unscaled.

    squares  address of the rows' sums of squares of 128 columns each, `parts` of a row; 0: there is no norm to finish
    """

    squares: int = 0
    parts: int = 0
    columns: int = 0
    eps: float = 0.0


NONE = RowNorm()
EXPAND = 1 << 26  # elements of a quantized matrix that prefill expands to bf16 at a time


def linear(context: Context, x: Lazy, w: Weight) -> Array:
    """x (T, columns) times each segment's rows: (T, rows)"""
    T, N = x.T, w.rows
    if T > MAX_DECODE_ROWS:
        return _product(context, x, w)
    launches = _launches(w.segments)
    cuts = {s: cut for together in launches for s, cut in zip(together, _cut(together, context.card), strict=True)}
    partials = max((n for _, n in cuts.values()), default=1)
    counts = (cuts[s][1] if s in cuts else 1 for s in w.segments)
    needs = tuple(zip(itertools.accumulate(s.rows for s in w.segments), counts, strict=True))
    out = Array((T, N), context.arena.take(partials * T * N * 4), partials=partials, partial_stride=T * N, needs=needs)
    rows = itertools.accumulate((s.rows for s in w.segments), initial=0)
    at = {s: out.address + 4 * row for s, row in zip(w.segments, rows, strict=False)}
    for together in launches:
        how = packing(together[0].type, T)
        packed, squares = unscaled(x, how) if is_packed(w) else (x.as_packed(how), 0)
        matrices = [(s, at[s], cuts[s][0]) for s in together]
        _quantized(context, matrices, packed, _norm(squares, together[0], x), T, how, N, partials)
    for s in w.segments:
        if s not in cuts:
            x_dense, squares = (x.as_dense(), 0) if cuts else unscaled_dense(x)
            _dense(context, s, x_dense, at[s], T, N, partials=partials, norm=_norm(squares, s, x))
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
    context: Context, x: Lazy, w: Weight, g: Groups, share: int, last: Weight | None = None, known: bool = True
) -> Array:
    """Row p // share of x times matrix ids[p] of w, and of `last` behind them, for each pair p: (pairs, rows)

    known: the kernel before this one did not make g, and began when g was there.
    """
    card, stream = context.card, context.stream
    N, parts = w.rows, _packed(w)
    partials = _cuts(w, g.chosen, card) if g.chosen else 1
    out = Array(
        (g.pairs, N), context.arena.take(partials * g.pairs * N * 4), partials=partials, partial_stride=g.pairs * N
    )
    at = out.address
    for s, behind in zip(w.segments, last.segments if last else w.segments, strict=True):
        if s in parts:
            how = packing(s.type, 1)
            packed, squares = unscaled(x, how) if x.T <= MAX_DECODE_ROWS else (x.as_packed(how), 0)
            ctas, _, shared = expert_ring(card, s.type, g.cols)
            kernel("experts", "experts", expert_defines(card, s.type, g.cols), shared)(
                (min(ctas * card.sms, g.most * s.row_blocks * partials),),
                (288,),
                (
                    s.memory.address,
                    packed,
                    at,
                    s.rows,
                    s.row_blocks,
                    s.k_blocks,
                    partials,
                    _inverse(s.row_blocks),
                    _inverse(partials),
                    g.pairs * N,
                    N,
                    g.groups,
                    g.order,
                    s.expert_bytes,
                    s.experts,
                    behind.memory.address,
                    share,
                    known,
                    packed_size(s.columns, 1, how),
                    *_norm(squares, s, x),
                ),
                shared_mem=shared,
                stream=stream,
            )
        else:
            _dense(context, s, x.as_dense(), at, g.pairs, N, pairs=(g.ids, share))
        at += 4 * s.rows
    return out


def chosen_linear(context: Context, x: Lazy | Array, w: Weight, last: Weight | None, choice: np.ndarray) -> Array:
    """One row times each matrix that it chooses, and times `last` if there is one: (matrices, rows)

    x       the row, or gates and ups (matrices, 2 columns), whose SwiGLU is the row of each matrix
    choice  kernels/choose.cuh Choice
    """
    n, N = int(choice["k"]) + (last is not None), w.rows
    partials = _cuts(w, n, context.card)
    out = Array((n, N), context.arena.take(partials * n * N * 4), partials=partials, partial_stride=n * N)
    at = out.address
    for s, behind in zip(w.segments, (last or w).segments, strict=True):
        if isinstance(x, Array):
            row, norm = Row(array=x, made=SWIGLU), NONE
        else:
            packed, squares = unscaled(x, packing(s.type, 1))
            row, norm = Row(packed=packed), _norm(squares, s, x)
        _single(context, (s, behind), choice, row, out_of(Target(dense=at), N), Products(n, N, partials), norm)
        at += 4 * s.rows
    return out


def heads_of_one(context: Context, x: Lazy | Array, w: Weight, to: Target) -> None:
    """Heads of one row, (H, columns) or packed one after the other, by their matrices: floats, or one packed row"""
    (s,) = w.segments
    how = packing(s.type, 1)
    apart = packed_size(s.columns, 1, how)
    row = Row(array=x, made=SUM, apart=apart) if isinstance(x, Array) else Row(packed=x.as_packed(how), apart=apart)
    out = out_of(to, s.experts * s.rows)
    _single(context, (s, s), None, row, out, Products(s.experts, s.rows, 1), NONE)


SUM, SWIGLU = 1, 2  # kernels/single.cu MADE


class Row(NamedTuple):
    """What kernels/single.cu multiplies: rows packed at an address, `apart` bytes each, or `made` of an array."""

    packed: int = 0
    array: Array | None = None
    made: int = 0
    apart: int = 0


class Products(NamedTuple):
    """Matrices of one launch, how many floats the result of each takes, and the parts into which k is cut."""

    matrices: int
    row_stride: int
    parts: int


def _single(
    context: Context,
    stacks: tuple[Segment, Segment],
    choice: np.ndarray | None,
    x: Row,
    out: np.ndarray,
    of: Products,
    norm: RowNorm,
) -> None:
    """kernels/single.cu: one row times each matrix of the first stack that `choice` names, and times the second one."""
    card, (s, behind), (matrices, row_stride, parts) = context.card, stacks, of
    shared = ring(card, s.type, 1)[2]
    per = 1 if choice is None else -(-int(choice["E"]) // 32)
    chosen = f"CHOICE={int(choice is not None)}", f"MADE={x.made}", f"PACK={int(bool(out['packed']))}"
    kernel("single", "single", (*single_defines(card, s.type), f"PER={per}", *chosen), shared)(
        (parts, s.row_blocks, matrices),
        (288,),
        (
            s.memory.address,
            s.expert_bytes,
            behind.memory.address,
            np.zeros((), CHOICE) if choice is None else choice,
            x.packed,
            x.apart,
            view(x.array) if x.array else NOTHING,
            out,
            s.rows,
            s.columns,
            s.k_blocks,
            parts,
            _inverse(parts),
            matrices * row_stride,
            row_stride,
            *norm,
        ),
        shared_mem=shared,
        stream=context.stream,
    )


def _cuts(w: Weight, matrices: int, card: Card) -> int:
    """Parts of k in steps, each row of which takes `matrices`: as many for all segments, however many rows."""
    packed = _packed(w)
    parts = {parts_of(card, expert_ring(card, s.type, 8)[0], matrices, s.row_blocks, s.k_blocks) for s in packed}
    return parts.pop() if len(parts) == 1 and len(packed) == len(w.segments) else 1


def _norm(squares: int, s: Segment, x: Lazy) -> RowNorm:
    eps = x.parameters.eps if x.op.unscaled else 0.0
    return RowNorm(squares, s.columns // 128 if squares else 0, s.columns, eps)


def _inverse(divisor: int) -> int:
    """By which kernels divide: kernels/prelude.cuh `quotient`."""
    return 0xFFFFFFFF // divisor


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
    context: Context,
    matrices: list[tuple[Segment, int, int]],
    x: int,
    norm: RowNorm,
    T: int,
    how: Packing,
    row_stride: int,
    partials: int,
) -> None:
    """kernels/linear.cu for one or two matrices, each with the address of its result and its stripes."""
    squares, norm_parts, columns, eps = norm
    types = tuple(s.type for s, _, _ in matrices)
    stripes = sum(n for _, _, n in matrices)
    for first, cols in ((0, how.whole), (how.whole, how.cols)) if how.whole else ((0, how.cols),):
        launch = linear_launch(context.card, types, cols)  # the matrices are read once for each
        each = launch.stripes if stripes > context.card.sms else 1
        given, ctas = np.zeros(2, MATRIX), [-(-n // each) for _, _, n in matrices]
        for i, (s, out, n) in enumerate(matrices):
            to = out + first * row_stride * 4
            units = s.row_blocks * s.k_blocks
            given[i] = s.memory.address, to, s.rows, s.k_blocks, units, n, each, *map(_inverse, (s.k_blocks, units, n))
        packed = x + first * groups_of(matrices[0][0].columns) * row_bytes(how)
        of_rows = squares + 4 * first * norm_parts if squares else squares
        kernel("linear", "linear", launch.defines, launch.shared, launch.second)(
            (sum(ctas),),
            (launch.threads,),
            (
                given[0],
                given[1],
                ctas[0],
                np.array((packed, of_rows, min(T - first, cols), norm_parts, columns, eps), ROWS),
                np.array((T * row_stride, row_stride, partials), PARTIALS),
            ),
            shared_mem=launch.shared,
            stream=context.stream,
        )


def _dense(
    context: Context,
    s: Segment,
    x: int,
    out: int,
    T: int,
    row_stride: int,
    partials: int = 1,
    pairs: tuple[int, int] = (0, 1),
    norm: RowNorm = NONE,
) -> None:
    """kernels/dense.cu; `pairs`: address of the matrix of each pair, or 0, and how many pairs take a row of x."""
    ids, share = pairs
    rows = 1 if ids or T == 1 else 2
    kernel("dense", "dense", (s.type, f"ROWS={rows}", *(("EXPERTS",) if ids else ())))(
        (-(-T // rows), -(-s.rows // 8)),
        (256,),
        (
            s.memory.address,
            x,
            out,
            s.rows,
            s.columns,
            T,
            row_stride,
            partials,
            T * row_stride,
            ids,
            s.rows,
            share,
            *norm,
        ),
        stream=context.stream,
    )


def _product(context: Context, x: Lazy, w: Weight) -> Array:
    """More rows than `linear` takes: bf16 through cuBLAS, a slice of the matrix expanded at a time.

    A float32 matrix (a router, whose order decides) keeps its precision.
    """
    T, N, arena, stream = x.T, w.rows, context.arena, context.stream
    out = Array((T, N), arena.take(T * N * 4))
    at = out.address
    for s in w.segments:
        if s.type == "F32":
            _dense(context, s, x.as_dense(), at, T, N)
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
                gemm(x.as_bf16(), matrix, at + row * 4, T, n, s.columns, N, stream)
        at += 4 * s.rows
    return out


def embed(context: Context, table: Weight, tokens: int, T: int) -> Array:
    """Rows `tokens` (int32 on the device) of a table of one type: (T, columns)"""
    (s,) = table.segments
    stream, out = context.stream, Array((T, s.columns), context.arena.take(T * s.columns * 4))
    if s.type in UNITS:
        sizes = (s.rows, s.columns, s.k_blocks)
        args = (s.memory.address, *sizes, tokens, out.address)
        kernel("expand", "embed", tile_defines(s.type))((s.k_blocks, T), (32,), args, stream=stream)
    else:
        head = (s.memory.address, s.rows, s.columns, tokens)
        blocks = -(-s.columns // 256)
        kernel("dense", "embed", (s.type,))((blocks, T), (256,), (*head, out.address), stream=stream)
    return out
