"""Write keys and values to the cache, attend to pieces of the past, and add the pieces' results up."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from common.block_sparse import BLOCK
from common.errors import BimetalError
from common.step import MAX_DECODE_ROWS
from cuda_backend.arrays import Array
from cuda_backend.caches.formats import format_defines, packed_bytes, turn_back
from cuda_backend.caches.kv import KV, KVStore
from cuda_backend.caches.planes import HALF, Plane, Planes, of_slot
from cuda_backend.caches.window import rolled, unrolled
from cuda_backend.context import Context
from cuda_backend.exact import NO_EXACT, ExactStep, calibrated, close_exact, open_exact
from cuda_backend.launch import kernel
from cuda_backend.layout import (
    ONE_ROW_CODES,
    SPLIT_TILE,
    blocks_of_warp,
    most_sums_bytes,
    one_row_tiles,
    padded,
    piece_places,
    row_blocks,
    run_count,
    split_rows,
    split_tiles,
    sums_bytes,
    tail_places,
    takes_64_rows,
    warp_groups,
    whole_tiles,
)
from cuda_backend.lazy import Lazy, Op, Target
from cuda_backend.occupancy import Card
from cuda_backend.replay import DeviceStep, bucket
from cuda_backend.rows import before_bias, before_heads, emit_copy, norm_and_rope
from cuda_backend.views import NOTHING, float4_aligned, out_of, packed_only, turns, view

LOG2_E = 1.4426950408889634  # exponentials are powers of 2


class Pieces(NamedTuple):
    """Describe to pieces.cu the output of kernels/split.cu or one_row.cu: sums and stats, their shape, and the pieces.

    most       largest number of positions of a sequence
    turn_back  columns of the output that are rotated back together, 0: none
    folded     whether the sums of a piece may include those of earlier pieces
    logits     as in `Seen`; kept until the sums are added up
    """

    most: int
    sums: int
    stats: int
    T: int
    H: int
    R: int
    first: int
    tile_bits: int
    window: int
    sinks: int
    shares: int
    trunk: int
    turn_back: int = 0
    folded: bool = False
    logits: Array | None = None


class Seen(NamedTuple):
    """Places that the rows of a step attend to, and a score beside theirs.

    window  positions of the window; 0: all
    sinks   number of first positions that every row sees
    logits  sink logits (H,): one more score of each head, without a value; None: none
    """

    window: int = 0
    sinks: int = 0
    logits: Array | None = None

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Return window, sinks and the address of the sink logits, as kernels take them."""
        return self.window, self.sinks, self.logits.address if self.logits else 0

    @property
    def defines(self) -> tuple[str, ...]:
        return ("SINK_LOGITS=1",) if self.logits else ()


ALL = Seen()

Heads = tuple[Array | None, Array, Array]  # queries, keys and values of a step


def attention(
    context: Context,
    heads: Heads,
    kv: KV,
    step: Any,
    scale: float,
    window: int | None = None,
    causal: bool = False,
    sink_logits: Array | None = None,
) -> Array:
    q, k, _ = heads
    assert q
    T, H, D = q.shape
    K, wide = k.shape[1], kv.keys.width
    step = context.step_of(step, kv.store)
    if window and kv.exact:
        raise BimetalError(f"a window of {window} over a compressed cache that keeps every position is not supported")
    q16 = context.arena.take(T * H * wide * 2)
    seen = Seen(window or 0, kv.store.window[1], sink_logits)
    keys, values = kv.keys, kv.values
    if step.prefill and kv.store.is_ring:  # rows of the step would overwrite each other in the ring
        keys, values = unrolled(kv, step, context.arena, context.stream)
    exact = write_rows(context, heads, kv, step, q16, (keys, values))
    if step.prefill:
        out = attend_long(context, q16, (keys, values), (T, H, D), step, scale, seen, exact)
        if kv.store.is_ring:
            rolled(kv, step, (keys, values), context.stream)
        close_exact(context, kv, step, exact)
        return out
    formats = *format_defines(keys, values), *exact.defines
    ways = windowed(seen.window), f"ALONE={int(step.runs == 1)}"
    # compile the kernels for a long past together with those that run now, so that no reply waits for them later
    for each in (replace(step, long_past=True), step):
        launches = pieces_launches(context.card, kv, each, H // K, exact, seen.window)
        runs = [kernel(x.name, x.name, (*x.defines, *formats, *ways), x.shared) for x in launches]
    shares = max(1, launches[0].ctas * context.card.sms // (K * launches[0].blocks))
    if window and step.runs == 1:  # more CTAs would find nothing to do
        shares = min(shares, (seen.window + seen.sinks) // SPLIT_TILE + 4 + T)
    pieces = new_pieces(context, kv.store, (T, H), values, shares, seen)
    for run, launch in zip(runs, launches, strict=True):
        run(
            (launch.blocks, K, shares),  # CTAs that have work come first, so that each multiprocessor gets one
            (launch.threads,),
            (
                q16,
                keys.record,
                values.record,
                H,
                H // K,
                step.address,
                step.positions.address,
                T,
                scale * LOG2_E,
                seen.window,
                seen.sinks,
                causal,
                pieces.trunk,
                pieces.sums,
                pieces.stats,
                exact.record,
            ),
            shared_mem=launch.shared,
            stream=context.stream,
        )
    return combined(context, pieces._replace(folded=launches[0].folds), (T, H, D), step)


def new_pieces(
    context: Context,
    store: KVStore,
    shape: tuple[int, int],
    values: Plane,
    shares: int,
    seen: Seen,
) -> Pieces:
    """Allocate the sums of (rows, heads) = `shape`; `shares` CTAs divide the pieces among them."""
    (T, H), (window, sinks, logits), wide, most = shape, seen, values.width, store.max_rows
    trunk = piece_places(most, SPLIT_TILE, window, sinks, shares)
    count = trunk + tail_places(SPLIT_TILE, T)
    sums = sums_memory(context, (count, T, H, wide), most, len(store.lengths))
    cut = SPLIT_TILE.bit_length() - 1, window, sinks, shares, trunk
    stats = sums + count * T * H * wide * 4
    return Pieces(most, sums, stats, T, H, wide, 0, *cut, turn_back(values), logits=logits)


class PiecesLaunch(NamedTuple):
    """Build and launch of a kernel that computes pieces: macros of its sizes, shared memory in bytes, threads.

    blocks  largest number of blocks into which the rows of all sequences are cut
    ctas    CTAs per multiprocessor
    folds   whether the sums of a piece may include those of earlier pieces
    """

    name: str
    defines: tuple[str, ...]
    shared: int
    threads: int
    blocks: int
    ctas: int
    folds: bool = False


def pieces_launches(
    card: Card, kv: KV, step: DeviceStep, group: int, exact: ExactStep, window: int
) -> list[PiecesLaunch]:
    """Choose the kernels that compute pieces; `group` query heads share a head of keys."""
    keys, values, T = kv.keys, kv.values, step.T
    cache = packed_bytes(keys, values), bool(exact.defines)
    if (T == 1 or step.one_row_each) and one_row_reads(keys, values, group, window):
        defines, shared, ctas = one_row_tiles(card, keys.width, *cache)
        if ctas:
            return [PiecesLaunch("one_row", defines, shared, 128, T, ctas)]
    rows, of_run = split_rows(card, keys.width, T * group, *cache), T * group // step.runs
    is_long = step.long_past and not window
    if is_long and takes_64_rows(card, keys.width, of_run, *cache):
        rows = 64
    defines, shared, ctas = split_tiles(card, keys.width, rows, *cache)
    blocks = row_blocks(T, step.runs, group, rows)
    split = PiecesLaunch("split", defines, shared, 8 * rows // blocks_of_warp(rows), blocks, ctas)
    groups = warp_groups(card, keys.width, of_run, cache[0], keys.format) if is_long else None
    if groups is None:
        return [split]
    is_tall, defines, shared, threads, rows, ctas, folds = groups
    blocks = row_blocks(T, step.runs, group, rows)
    committed = PiecesLaunch("tall" if is_tall else "wide", defines, shared, threads, blocks, ctas, folds)
    return [committed, split._replace(defines=(*split.defines, "TAILS=1"))]


def one_row_reads(keys: Plane, values: Plane, group: int, window: int) -> bool:
    """Test whether kernels/one_row.cu has builds for the planes; `group` query heads share a head of keys."""
    formats = {keys.format, values.format}
    known = keys.width in (128, 256) and formats <= ONE_ROW_CODES and not window
    return group <= 8 and (known or (keys.width in (64, 128, 256) and formats == {HALF}))


def sums_memory(context: Context, shape: tuple[int, int, int, int], most: int, sequences: int) -> int:
    """Allocate (places, rows, heads, width) = `shape` sums, then stats; returns the address.

    The arena's chunk has room for one row of each of `sequences` sequences of up to `most` positions. Otherwise a pool
    whose slots fill would take a larger chunk for each bucket of rows.
    """
    room = most_sums_bytes(most, bucket(sequences), *shape[2:]) if sequences > 1 else 0
    return context.arena.take_for_layer(sums_bytes(*shape), room)


def write_kv(context: Context, k: Array, v: Array, kv: KV, step: Any) -> None:
    step = context.step_of(step, kv.store)
    if step.prefill and kv.store.is_ring:
        room = unrolled(kv, step, context.arena, context.stream)
        write_rows(context, (None, k, v), kv, step, 0, room)
        rolled(kv, step, room, context.stream)
    else:
        exact = write_rows(context, (None, k, v), kv, step, 0, (kv.keys, kv.values))
        close_exact(context, kv, step, exact)


def write_rows(context: Context, heads: Heads, kv: KV, step: DeviceStep, q16: int, room: Planes) -> ExactStep:
    """Write queries as float16 to `q16`, keys and values to `room` and to the rows that are read exactly."""
    q, k, _ = heads
    exact = open_exact(context, kv, len(k), q.shape[1] if q else 0, step)
    heads_to_cache(context, heads, step, q16, room, exact)
    again = calibrated(context, kv, step, exact)
    if again:
        heads_to_cache(context, heads, step, q16, room, again)
    return again or exact


def heads_to_cache(
    context: Context, heads: Heads, step: DeviceStep, q16: int, room: Planes, exact: ExactStep = NO_EXACT
) -> None:
    """Write q as float16 to `q16`, k and v to the cache; norm and rope are part of the same launch."""
    (q, k, v), (keys, values) = heads, room
    T, K, D = k.shape
    H = q.shape[1] if q else 0
    queries = q or k
    unbiased = [before_bias(x) for x in (before_heads(queries), before_heads(k), v)]
    sources, biases = [source for source, _ in unbiased], [bias for _, bias in unbiased]
    (q_norm, q_weight, q_eps, q_rope), (k_norm, k_weight, k_eps, k_rope) = norm_and_rope(queries), norm_and_rope(k)
    formats = *format_defines(keys, values), *exact.defines
    biased = ("BIASED=1",) if any(biases) else ()
    alike = q_norm == k_norm and q_eps == k_eps and bytes(q_rope) == bytes(k_rope)
    if alike and D in (128, 256) and T <= MAX_DECODE_ROWS and float4_aligned(*sources, flat=False) and turns(q_rope):
        ctas = sum(n if x.partials > 1024 // D else -(-n // 4) for x, n in zip(sources, (H, K, K), strict=True))
        kernel("to_cache", "to_cache", (f"D={D}", f"ALONE={int(T == 1)}", *formats, *biased))(
            (T * ctas,),
            (128,),
            (
                *(view(x) for x in sources),
                H,
                K,
                step.address,
                T,
                *(q_norm, q_weight, k_weight, q_eps, q_rope),
                q16,
                keys.record,
                values.record,
                exact.record,
                *biases,
            ),
            stream=context.stream,
        )
        return
    kernel("heads_to_cache", "heads_to_cache", (*((f"WIDTH={D}", *formats) if formats else ()), *biased))(
        (-(-T * (H + 2 * K) // 8),),
        (256,),
        (
            *(view(x) for x in sources),
            H,
            K,
            D,
            keys.width,
            step.address,
            T,
            *norm_and_rope(queries),
            *norm_and_rope(k),
            q16,
            keys.record,
            values.record,
            exact.record,
            *biases,
        ),
        shared_mem=32 * padded(D),
        stream=context.stream,
    )


class Sight(NamedTuple):
    """Address of the bits that kernels/choose_blocks.cu writes, and the number of words for a block of rows."""

    address: int
    words: int


def attend_long(
    context: Context,
    q16: int,
    room: Planes,
    shape: tuple[int, int, int],
    step: DeviceStep,
    scale: float,
    seen: Seen = ALL,
    exact: ExactStep = NO_EXACT,
    sight: Sight | None = None,
) -> Array:
    """Attend with the rows of a long step, (T, H, D) = `shape`, to `room`: the planes of all slots or of one.

    sight  blocks of keys that each block of rows sees; None: all
    """
    (T, H, D), (keys, values) = shape, room
    if packed_bytes(keys, values) or exact.defines or sight or not context.card.finds_slot:
        keys, values = of_slot(room, step.slot)
    K, wide = keys.heads, keys.width
    out = Array((T, H, D), context.arena.take(T * H * D * 4))
    tiles, shared = whole_tiles(context.card, wide)
    formats = *format_defines(keys, values), *exact.defines, *((f"SPARSE={BLOCK}",) if sight else ()), *seen.defines
    kernel("attention", "whole", (*tiles, f"DIM={D}", *formats), shared)(
        (-(-T * (H // K) // 64), K),
        (128,),
        (
            q16,
            keys.record,
            values.record,
            H,
            K,
            step.address,
            step.positions.address,
            T,
            scale * LOG2_E,
            *seen.numbers,
            out.address,
            exact.record,
            *(sight or (0, 0)),
        ),
        shared_mem=shared,
        stream=context.stream,
    )
    return out


def attend_stretch(
    context: Context,
    q16: int,
    room: Planes,
    out: Array,
    step: DeviceStep,
    scale: float,
    stretch: tuple[int, int],
    held: int,
) -> None:
    """Attend with a long step to positions first to last - 1 = `stretch`, which the planes hold from place 0 on.

    The caller makes one call per stretch, in order; `out` (T, H, D) is complete after the last one.

    held  memory for what each row carries from one stretch to the next, 32 bytes per head
    """
    (T, H, D), (keys, values) = out.shape, room
    tiles, shared = whole_tiles(context.card, keys.width)
    kernel("attention", "part", (*tiles, f"DIM={D}", "IN_PARTS=1"), shared)(
        (-(-T // 64), H),
        (128,),
        (
            q16,
            keys.record,
            values.record,
            H,
            step.address,
            step.positions.address,
            T,
            scale * LOG2_E,
            *stretch,
            out.address,
            held,
        ),
        shared_mem=shared,
        stream=context.stream,
    )


class Combined(NamedTuple):
    """Parameters of a lazy sum by kernels/pieces.cu: heads of `head` columns; `code`: a gate, as views.MUL_SIGMOID."""

    pieces: Pieces
    head: int
    step: DeviceStep
    code: int = 0
    gate: Array | None = None


def combined(context: Context, pieces: Pieces, shape: tuple[int, int, int], step: DeviceStep) -> Array:
    """Add up the pieces once their consumer is known; the consumer may multiply them by a gate."""
    T, H, D = shape
    return Array(shape, lazy=Lazy(context, ATTENTION, T, H * D, (), Combined(pieces, D, step)))


def _emit(lazy: Lazy, to: Target) -> None:
    pieces, D, step, code, gate = lazy.parameters
    if (to.packed and to.packing.joins(D)) or (to.product and D % 32):
        emit_copy(lazy, to)
    else:
        out = out_of(to, lazy.K)
        combine(lazy.context, pieces, D, step, out, code, view(gate, repeats=D) if gate else NOTHING)


ATTENTION = Op("attention", _emit)


def combine(
    context: Context, pieces: Pieces, D: int, step: DeviceStep, out: np.ndarray, op: int = 0, gate: np.ndarray = NOTHING
) -> None:
    """Add up the pieces, D columns of a head."""
    most, sums, stats, T, H, wide, first, *cut, turn_back, folded, logits = pieces
    runs, blocks = run_count(most, pieces.window, pieces.sinks), (H, T, -(-D // 128))
    # the most warps of a CTA with which all CTAs run at once and the next product can begin beside them
    room = 15 * context.card.sms // math.prod(blocks)
    is_one_run = 8 < most >> pieces.tile_bits <= 16  # two warps would read it at once, one warp in two halves
    of_run = 2 if room >= (3 if is_one_run else 6) else 1
    fewest = 3 if step.long_past and of_run == 1 else 1  # one warp would wait for many runs one after another
    warps = of_run * max(min(runs, fewest), min(runs + bool(op), min(room, 12) // of_run))
    gated = int(op > 0 or pieces.window > 0)  # builds for windows would spill registers without it
    form = f"WARPS={of_run}", f"ALONE={int(step.runs == 1)}", f"GATED={gated}"
    built = *form, windowed(pieces.window), *packed_only(out)
    built += (f"TURN_VALUES={turn_back}",) if turn_back else ()
    built += ("FOLDED=1",) if folded else ()
    built += ("SINK_LOGITS=1",) if logits else ()
    kernel("pieces", "combine", built)(
        blocks,
        (32 * warps,),
        (
            sums,
            stats,
            H,
            wide,
            D,
            step.address,
            step.positions.address,
            T,
            first,
            *cut,
            logits.address if logits else 0,
            op,
            gate,
            out,
        ),
        shared_mem=runs * (32 * 16 + 8),
        stream=context.stream,
    )


def windowed(window: int) -> str:
    """Return the definition by which kernels/flash.cuh is built."""
    return f"WINDOWED={int(window > 0)}"
