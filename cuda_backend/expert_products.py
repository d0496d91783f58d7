"""Products in which each row has its own matrix: an expert that it chose, or the matrix of its head."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from common.step import MAX_DECODE_ROWS
from cuda_backend.arrays import Array
from cuda_backend.context import Context
from cuda_backend.fuse import packed_for_product
from cuda_backend.launch import kernel
from cuda_backend.layout import expert_defines, expert_ring, packed_size, packing, parts_of, ring, single_defines
from cuda_backend.lazy import Lazy, Target
from cuda_backend.occupancy import Card
from cuda_backend.products import NONE, Result, RowNorm, dense_product, inverse, is_packed, packed_segments, row_norm
from cuda_backend.prototypes import CHOICE, CLAMP
from cuda_backend.views import NOTHING, out_of, view
from cuda_backend.weights import Segment, Weight


@dataclass(frozen=True)
class Groups:
    """Rows grouped by the matrix that multiplies them, on the device: kernels/experts.cu `groups` and `order`.

    ids         matrix of each pair, int32
    pairs       number of pairs of a row and a matrix
    max_groups  largest number of groups of `cols` rows
    chosen      matrices per row of a step, by which k is divided; 0: k is not divided
    """

    ids: int
    groups: int
    order: int
    pairs: int
    max_groups: int
    cols: int
    chosen: int
    owner: Any = None


def joins(stack: Weight, matrix: Weight) -> bool:
    """Test whether one launch of `grouped_linear` can read `matrix` as one more matrix of `stack`."""
    kinds = [[(s.type, s.rows, s.columns) for s in w.segments] for w in (stack, matrix)]
    return kinds[0] == kinds[1] and is_packed(stack)


def grouped_linear(
    context: Context,
    x: Lazy,
    w: Weight,
    g: Groups,
    pairs_per_row: int,
    shared_expert: Weight | None = None,
    groups_ready: bool = True,
) -> Array:
    """Multiply row p // pairs_per_row of x by matrix g.ids[p] of w, for each pair p: (pairs, rows).

    shared_expert  one more matrix, whose number follows those of w
    groups_ready   whether g was complete before the previous kernel began: this kernel need not wait for it
    """
    card, N, parts = context.card, w.rows, packed_segments(w)
    partials, size = _cuts(w, g.chosen, card) if g.chosen else 1, g.pairs * N
    out = Array((g.pairs, N), context.arena.take(partials * size * 4), partials=partials, partial_stride=size)
    at = out.address
    for s, behind in zip(w.segments, shared_expert.segments if shared_expert else w.segments, strict=True):
        if s in parts:
            how = packing(s.type, 1)
            packed, squares = packed_for_product(x, how) if x.T <= MAX_DECODE_ROWS else (x.as_packed(how), 0)
            ctas, _, shared = expert_ring(card, s.type, g.cols)
            cut = s.rows, s.row_blocks, s.k_blocks, partials, inverse(s.row_blocks), inverse(partials)
            # hot_experts.cu may have written the table shortly before
            known = groups_ready and not s.moved
            rows = pairs_per_row, known, packed_size(s.columns, 1, how), *row_norm(squares, s, x)
            kernel("experts", "experts", (*expert_defines(card, s.type, g.cols), *_moved(s)), shared)(
                (min(ctas * card.sms, g.max_groups * s.row_blocks * partials),),
                (288,),
                (s.matrices(behind.memory.address), packed, at, *cut, size, N, g.groups, g.order, *rows),
                shared_mem=shared,
                stream=context.stream,
            )
        else:
            dense_product(context, s, x.as_dense(), Result(at, N), g.pairs, pairs=(g.ids, pairs_per_row))
        at += 4 * s.rows
    return out


NO_CLAMP = np.zeros((), CLAMP)


def chosen_linear(
    context: Context,
    x: Lazy | Array,
    w: Weight,
    shared_expert: Weight | None,
    choice: np.ndarray,
    clamp: np.ndarray = NO_CLAMP,
) -> Array:
    """Multiply one row by each matrix that it chooses, and by `shared_expert` if there is one: (matrices, rows).

    x       the row, or gates and ups (matrices, 2 columns), whose SwiGLU gives a row for each matrix
    choice  struct Choice of kernels/choose.cuh
    clamp   struct Clamp of kernels/single.cu; the product with a row writes the experts' ids to it
    """
    n, N = int(choice["k"]) + (shared_expert is not None), w.rows
    partials = _cuts(w, n, context.card)
    out = Array((n, N), context.arena.take(partials * n * N * 4), partials=partials, partial_stride=n * N)
    at = out.address
    for s, behind in zip(w.segments, (shared_expert or w).segments, strict=True):
        if isinstance(x, Array):
            row, norm = Row(array=x, combined=SWIGLU, clamp=clamp), NONE
        else:
            packed, squares = packed_for_product(x, packing(s.type, 1))
            row, norm = Row(packed=packed, clamp=clamp), row_norm(squares, s, x)
        _single(context, (s, behind), choice, row, out_of(Target(dense=at), N), Products(n, N, partials), norm)
        at += 4 * s.rows
    return out


def heads_of_one(context: Context, x: Lazy | Array, w: Weight, target: Target) -> None:
    """Multiply heads of one row, (H, columns) or packed heads, by their matrices: floats, or a packed row."""
    (s,) = w.segments
    how = packing(s.type, 1)
    apart = packed_size(s.columns, 1, how)
    row = (
        Row(array=x, combined=SUM, stride=apart) if isinstance(x, Array) else Row(packed=x.as_packed(how), stride=apart)
    )
    out = out_of(target, s.experts * s.rows)
    _single(context, (s, s), None, row, out, Products(s.experts, s.rows, 1), NONE)


SUM, SWIGLU = 1, 2  # kernels/single.cu MADE


class Row(NamedTuple):
    """Rows that kernels/single.cu multiplies: packed at an address, or made from an array.

    combined  SUM or SWIGLU: how a row is made from `array`
    stride    bytes from one packed row to the next
    clamp     as in `chosen_linear`
    """

    packed: int = 0
    array: Array | None = None
    combined: int = 0
    stride: int = 0
    clamp: np.ndarray = NO_CLAMP


class Products(NamedTuple):
    """Matrices of one launch, floats of each result, and parts into which k is divided."""

    matrices: int
    row_stride: int
    parts: int


def _single(
    context: Context,
    stacks: tuple[Segment, Segment],
    choice: np.ndarray | None,
    x: Row,
    out: np.ndarray,
    products: Products,
    norm: RowNorm,
) -> None:
    """Launch kernels/single.cu: multiply one row by the matrices of the first stack in `choice`, and by the second."""
    card, (s, behind), (matrices, row_stride, parts) = context.card, stacks, products
    shared = ring(card, s.type, 1)[2]
    per = 1 if choice is None else -(-int(choice["E"]) // 32)
    chosen = f"CHOICE={int(choice is not None)}", f"MADE={x.combined}", f"PACK={int(bool(out['packed']))}"
    clamped = ("CLAMPED=1",) if x.clamp["ids"] else ()
    stack = s.matrices(behind.memory.address), np.zeros((), CHOICE) if choice is None else choice, x.clamp
    row = x.packed, x.stride, view(x.array) if x.array else NOTHING
    cut = s.rows, s.columns, s.k_blocks, parts, inverse(parts), matrices * row_stride, row_stride
    kernel("single", "single", (*single_defines(card, s.type), f"PER={per}", *chosen, *clamped, *_moved(s)), shared)(
        (parts, s.row_blocks, matrices),
        (288,),
        (*stack, *row, out, *cut, *norm),
        shared_mem=shared,
        stream=context.stream,
    )


def _moved(s: Segment) -> tuple[str, ...]:
    return ("MOVED=1",) if s.moved else ()


def _cuts(w: Weight, matrices: int, card: Card) -> int:
    """Return into how many parts k is divided if a row takes `matrices`: the same for any number of rows."""
    packed = packed_segments(w)
    parts = {parts_of(card, expert_ring(card, s.type, 8)[0], matrices, s.row_blocks, s.k_blocks) for s in packed}
    return parts.pop() if len(parts) == 1 and len(packed) == len(w.segments) else 1
