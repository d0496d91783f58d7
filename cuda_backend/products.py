"""Multiply all rows of a step by one matrix, and look up rows of a table."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from common.step import MAX_DECODE_ROWS
from cuda_backend.arrays import Array
from cuda_backend.context import Context
from cuda_backend.fuse import dense_for_product, packed_for_product
from cuda_backend.gemm import expand, gemm
from cuda_backend.launch import kernel
from cuda_backend.layout import (
    TOGETHER,
    UNITS,
    Packing,
    groups_of,
    linear_launch,
    packing,
    partition,
    row_bytes,
    shares,
    tile_defines,
)
from cuda_backend.lazy import Lazy
from cuda_backend.prototypes import MATRIX, PARTIALS, ROWS
from cuda_backend.weights import Segment, Weight


class RowNorm(NamedTuple):
    """Deferred norm of a product's input rows, whose factor 1 / rms the product applies: fuse.packed_for_product.

    squares  address of sums of squares of 128 columns each, `parts` per row; 0: no norm
    """

    squares: int = 0
    parts: int = 0
    columns: int = 0
    eps: float = 0.0


class Result(NamedTuple):
    """Memory for the product of T rows by one matrix: float32 [partials][T][row_stride], beginning at `address`.

    row_stride  values from one row to the next: at least the rows of the matrix
    partials    partial sums of each value, which the reader adds
    """

    address: int
    row_stride: int
    partials: int = 1


NONE = RowNorm()
EXPAND = 1 << 26  # most elements of a quantized matrix that a prefill step expands at a time


def row_norm(squares: int, s: Segment, x: Lazy) -> RowNorm:
    eps = x.parameters.eps if x.op.emit_deferred else 0.0
    return RowNorm(squares, s.columns // 128 if squares else 0, s.columns, eps)


def inverse(divisor: int) -> int:
    """Return the factor with which kernels divide by `divisor`: kernels/prelude.cuh `quotient`."""
    return 0xFFFFFFFF // divisor


def packed_segments(w: Weight) -> list[Segment]:
    """Return the segments whose products take int8 rows."""
    return [s for s in w.segments if s.type in UNITS]


def is_packed(w: Weight) -> bool:
    return len(packed_segments(w)) == len(w.segments)


def linear(context: Context, x: Lazy, w: Weight) -> Array:
    """Multiply x (T, columns) by each segment's rows: (T, rows)"""
    T, N = x.T, w.rows
    if T > MAX_DECODE_ROWS:
        return _product(context, x, w)
    launches = _launches(w.segments)
    cuts = {s: cut for together in launches for s, cut in zip(together, _cut(together, context), strict=True)}
    partials = max((n for _, n in cuts.values()), default=1)
    counts = (cuts[s][1] if s in cuts else 1 for s in w.segments)
    needs = tuple(zip(itertools.accumulate(s.rows for s in w.segments), counts, strict=True))
    out = Array((T, N), context.arena.take(partials * T * N * 4), partials=partials, partial_stride=T * N, needs=needs)
    rows = itertools.accumulate((s.rows for s in w.segments), initial=0)
    results = {s: Result(out.address + 4 * row, N, partials) for s, row in zip(w.segments, rows, strict=False)}
    for together in launches:
        how = packing(together[0].type, T)
        packed, squares = packed_for_product(x, how) if is_packed(w) else (x.as_packed(how), 0)
        matrices = [(s, results[s], cuts[s][0]) for s in together]
        _quantized(context, matrices, packed, row_norm(squares, together[0], x), T, how)
    for s in w.segments:
        if s not in cuts:
            x_dense, squares = (x.as_dense(), 0) if cuts else dense_for_product(x)
            dense_product(context, s, x_dense, results[s], T, norm=row_norm(squares, s, x))
    return out


def _launches(segments: Sequence[Segment]) -> list[tuple[Segment, ...]]:
    """Group quantized segments by launch: one, or two of types for which a kernel is built."""
    launches: list[tuple[Segment, ...]] = []
    for s in segments:
        if s.type not in UNITS:
            continue
        if launches and tuple(sorted(t.type for t in (*launches[-1], s))) in TOGETHER:
            launches[-1] = tuple(sorted((*launches[-1], s), key=lambda t: t.type))
        else:
            launches.append((s,))
    return launches


def _cut(together: tuple[Segment, ...], context: Context) -> list[tuple[int, int]]:
    """Return stripes and partial sums of the matrices of a launch."""
    counts = shares(context.card, tuple((s.type, s.row_blocks, s.k_blocks) for s in together), context.fills)
    return [partition(n, s.row_blocks, s.k_blocks) for s, n in zip(together, counts, strict=True)]


def _quantized(
    context: Context, matrices: list[tuple[Segment, Result, int]], x: int, norm: RowNorm, T: int, how: Packing
) -> None:
    """Launch kernels/linear.cu for one or two matrices, each with its result and its number of stripes.

    x    address of T rows, int8 and packed as `how` states
    """
    _, row_stride, partials = matrices[0][1]  # which all matrices of a launch share
    squares, norm_parts, columns, eps = norm
    types = tuple(s.type for s, _, _ in matrices)
    stripes = sum(n for _, _, n in matrices)
    for first, cols in ((0, how.whole), (how.whole, how.cols)) if how.whole else ((0, how.cols),):
        launch = linear_launch(context.card, types, cols)  # each launch reads the matrices once
        each = launch.stripes if stripes > context.card.sms else 1
        given, ctas = np.zeros(2, MATRIX), [-(-n // each) for _, _, n in matrices]
        for i, (s, result, n) in enumerate(matrices):
            out = result.address + first * row_stride * 4
            units = s.row_blocks * s.k_blocks
            given[i] = s.memory.address, out, s.rows, s.k_blocks, units, n, each, *map(inverse, (s.k_blocks, units, n))
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


def dense_product(
    context: Context, s: Segment, x: int, out: Result, T: int, pairs: tuple[int, int] = (0, 1), norm: RowNorm = NONE
) -> None:
    """Launch kernels/dense.cu.

    x      address of rows, float32 (T, s.columns), or of as many rows as T pairs read
    pairs  of a mixture: address of the number of each pair's matrix, int32 (T,), and pairs per row of x; 0: one matrix
    """
    ids, share = pairs
    rows = 1 if ids or T == 1 else 2
    strides = T, out.row_stride, out.partials, T * out.row_stride
    kernel("dense", "dense", (s.type, f"ROWS={rows}", *(("EXPERTS",) if ids else ())))(
        (-(-T // rows), -(-s.rows // 8)),
        (256,),
        (s.matrices(), x, out.address, s.rows, s.columns, *strides, ids, share, *norm),
        stream=context.stream,
    )


def _product(context: Context, x: Lazy, w: Weight) -> Array:
    """Multiply more rows than kernels/linear.cu takes, by cuBLAS in half precision, one expanded slice of w at a time.

    A float32 matrix keeps its precision: a rounded router would choose other experts.
    """
    T, N, arena, stream, half = x.T, w.rows, context.arena, context.stream, context.card.half
    out = Array((T, N), arena.take(T * N * 4))
    at = out.address
    for s in w.segments:
        if s.type == "F32":
            dense_product(context, s, x.as_dense(), Result(at, N), T)
        else:
            step = min(s.rows, max(128, EXPAND // s.columns // 128 * 128))
            scratch = 0 if s.type == half else arena.scratch(step * s.columns * 2, stream)
            for row in range(0, s.rows, step):
                n = min(step, s.rows - row)
                if s.type == half:
                    matrix = s.memory.address + row * s.columns * 2
                else:
                    matrix = scratch
                    expand(s, row, n, matrix, stream)
                gemm(x.as_product(), matrix, at + row * 4, T, n, s.columns, N, half, stream)
        at += 4 * s.rows
    return out


def embed(context: Context, table: Weight, tokens: int, T: int) -> Array:
    """Return rows `tokens` (int32 on the device) of a table of one type: (T, columns)"""
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
