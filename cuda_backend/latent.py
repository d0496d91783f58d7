"""Latent attention (DeepSeek-V2): over latent rows as stored, or over the keys and values expanded from them."""

from dataclasses import replace
from typing import Any, NamedTuple

import cupy

from common.ops import LatentWeights
from common.step import MAX_DECODE_ROWS
from cuda_backend import gemm
from cuda_backend.arrays import Array
from cuda_backend.attention import (
    LOG2_E,
    Pieces,
    PiecesLaunch,
    attend_long,
    attend_stretch,
    combine,
    combined,
    sums_memory,
    windowed,
)
from cuda_backend.caches.formats import turn_back
from cuda_backend.caches.latent import Latent
from cuda_backend.caches.planes import TILE, Places, Plane, copy_rows, planes_at
from cuda_backend.context import Context
from cuda_backend.fuse import fused
from cuda_backend.launch import kernel
from cuda_backend.layout import (
    EXPANDED,
    LATENT_ROWS,
    latent_tiles,
    padded,
    piece_places,
    row_blocks,
    tail_places,
    tall_latent_tiles,
)
from cuda_backend.lazy import Target
from cuda_backend.mixture import head_linear
from cuda_backend.occupancy import Card
from cuda_backend.replay import DeviceStep
from cuda_backend.rows import before_rope
from cuda_backend.views import out_of, view


def latent_attention(
    context: Context, q_latent: Array, q_rope: Array, latent: Array, k_rope: Array, kv: Latent, step: Any, scale: float
) -> Array:
    T, H, R = q_latent.shape
    step, wide = context.step_of(step, kv.store), padded(R)
    q16 = context.arena.take(T * H * kv.width * 2)
    _gather(context, (q_latent, q_rope), (latent, k_rope), kv, step, Queries(q16, wide, kv.width, kv.rows.rotated))
    rows, most = min(T, MAX_DECODE_ROWS), step.past + T if step.prefill else kv.rows.places.capacity
    # compile the kernel for a long past together with the one that runs now, so that no reply waits for it later
    for each in (replace(step, long_past=True), step):
        launches = latent_launches(context.card, kv, each, H)
        runs = [kernel(x.name, x.name, x.defines, x.shared) for x in launches]
    shares = max(1, launches[0].ctas * context.card.sms // launches[0].blocks)
    tile, *_ = latent_tiles(context.card, kv.width)
    trunk = piece_places(most, tile, 0, 0, shares)
    count = trunk + tail_places(tile, rows)
    sums = sums_memory(context, (count, rows, H, wide), kv.rows.places.capacity, len(kv.store.lengths))
    stats = sums + count * rows * H * wide * 4
    out = 0 if rows == T else context.arena.take(T * H * R * 4)
    for first in range(0, T, MAX_DECODE_ROWS):
        n = min(rows, T - first)
        for run, launch in zip(runs, launches, strict=True):
            run(
                (launch.blocks, 1, shares),
                (launch.threads,),
                (
                    q16,
                    kv.rows.record,
                    kv.roped.record,
                    H,
                    step.address,
                    step.positions.address,
                    n,
                    first,
                    scale * LOG2_E,
                    trunk,
                    sums,
                    stats,
                ),
                shared_mem=launch.shared,
                stream=context.stream,
            )
        cut = tile.bit_length() - 1, 0, 0, shares, trunk
        pieces = Pieces(most, sums, stats, n, H, wide, first, *cut, turn_back(kv.rows))
        if out:
            combine(context, pieces, R, step, out_of(Target(dense=out), H * R))
    return Array((T, H, R), out) if out else combined(context, pieces, (T, H, R), step)


def latent_launches(card: Card, kv: Latent, step: DeviceStep, heads: int) -> list[PiecesLaunch]:
    """Choose the kernels that compute pieces."""
    (_, _, shared), rows = latent_tiles(card, kv.width), min(step.T, MAX_DECODE_ROWS)
    defines, blocks = _latent(card, kv, step.runs == 1), row_blocks(rows, step.runs, heads, LATENT_ROWS)
    whole = PiecesLaunch("latent", defines, shared, 256, blocks, card.shared // (shared + 2048))
    latent_dim, is_long = padded(kv.store.spec.latent_dim), step.long_past and not step.prefill
    groups = tall_latent_tiles(card, kv.width, latent_dim) if is_long and not kv.apart else None
    if groups is None:
        return [whole]
    defines, shared, threads, rows_of_block = groups
    blocks = row_blocks(rows, step.runs, heads, rows_of_block)
    committed = PiecesLaunch("tall_latent", defines, shared, threads, blocks, 1)
    return [committed, whole._replace(defines=(*whole.defines, "TAILS=1"))]


def expanded_attention(
    context: Context,
    q_nope: Array,
    q_rope: Array,
    latent: Array,
    k_rope: Array,
    w: LatentWeights,
    kv: Latent,
    step: Any,
    scale: float,
) -> Array:
    T, H, N = q_nope.shape
    step = context.step_of(step, kv.store)
    if not step.prefill:  # one form for few rows: it must not depend on their number
        o = latent_attention(context, head_linear(context, q_nope, w.k_up), q_rope, latent, k_rope, kv, step, scale)
        return head_linear(context, o, w.v_up)
    P, V = q_rope.shape[2], w.v_up.rows
    n, wide, arena = step.past + T, padded(max(N + P, V)), context.arena
    q16 = arena.take(T * H * wide * 2)
    _gather(context, (q_nope, q_rope), (latent, k_rope), kv, step, Queries(q16, N, wide))
    most = min(n, EXPANDED)
    heads = Plane(0, H, 2 * wide, wide, Places(-(-most // TILE) * TILE - TILE, TILE))
    size = 2 * heads.nbytes
    keys, values = planes_at(arena.take(size), (heads, heads))
    cupy.cuda.runtime.memsetAsync(keys.address, 0, size, context.stream.ptr)
    room = arena.take(2 * most * kv.width) if kv.apart or kv.rows.table else 0
    k_up, v_up = (gemm.head_matrices(up, arena, context.stream) for up in w)
    out = Array((T, H, V), arena.take(T * H * V * 4))
    held = arena.take(T * H * 32) if n > most else 0
    for first in range(0, n, most):
        count = min(most, n - first)
        rows = _whole_rows(context, kv, step.slot, first, count, room)
        gemm.expand_heads(w.k_up, k_up, False, rows, count, keys, context.stream)
        gemm.expand_heads(w.v_up, v_up, True, rows, count, values, context.stream)
        kernel("latent", "spread", _latent(context.card, kv))(
            (-(-count * (wide - N) // 256), H),
            (256,),
            (rows.record, count, N, P, wide, keys.record),
            stream=context.stream,
        )
        if n > most:
            attend_stretch(context, q16, (keys, values), out, step, scale, (first, first + count), held)
    return out if n > most else attend_long(context, q16, (keys, values), (T, H, V), step, scale)


class Queries(NamedTuple):
    """Float16 queries at an address.

    rope_start  first roped channel
    width       channels of a row
    rotated     whether the channels before `rope_start` are rotated like latents
    """

    address: int
    rope_start: int
    width: int
    rotated: bool = False


def _gather(
    context: Context,
    queries: tuple[Array, Array],
    rows: tuple[Array, Array],
    kv: Latent,
    step: DeviceStep,
    out: Queries,
) -> None:
    """Write queries (q, then roped q_rope) and the step's rows of the cache (latent, then roped k_rope) as float16."""
    (q, q_rope), (latent, k_rope), (q16, at, wide, rotated) = queries, rows, out
    T, H, main = q.shape
    (q_from, q_turn), (k_from, k_turn) = before_rope(q_rope), before_rope(k_rope)
    norm = fused("latent cache", latent)
    plain, weight, eps = (*norm.inputs, *norm.parameters) if norm else (latent, None, 0.0)
    kernel("latent", "gather", _latent(context.card, kv, step.runs == 1))(
        (T * (H + 1),),
        (-(-max(wide, kv.width) // 32) * 32,),
        (
            *(view(x) for x in (q, q_from, plain, k_from)),
            T,
            H,
            main,
            at,
            q_rope.shape[2],
            wide,
            q_turn,
            k_turn,
            norm is not None,
            weight.address if weight else 0,
            eps,
            latent.shape[1],
            step.address,
            q16,
            rotated,
            kv.rows.record,
            kv.roped.record,
        ),
        stream=context.stream,
    )


def _whole_rows(context: Context, kv: Latent, slot: int, first: int, n: int, room: int) -> Plane:
    """Return n rows of a sequence's cache from position `first` on, float16 in one block, not rotated.

    room  memory for them, if the cache stores them differently
    """
    if not kv.apart:
        own = kv.rows.of_slot(slot)
        if not own.table:
            return own.at(own.address + first * own.row_bytes)
        dense = own.at(room, Places(n - 1, 1))
        copy_rows((own,), first, (dense,), 0, n, context.stream)
        return dense
    rows = Plane(room, 1, 2 * kv.width, kv.width, kv.rows.places)
    jobs = n * -(-kv.rows.width // 128)
    kernel("latent", "whole_rows", _latent(context.card, kv))(
        (-(-jobs // 8),), (256,), (kv.rows.record, kv.roped.record, slot, first, n, rows.address), stream=context.stream
    )
    return rows


def _latent(card: Card, kv: Latent, alone: bool = False) -> tuple[str, ...]:
    """Return the definitions of kernels/latent.cu; `alone`: for a step of one sequence."""
    tile, buffers, _ = latent_tiles(card, kv.width)
    sizes = f"R={padded(kv.store.spec.latent_dim)}", f"W={kv.width}", f"TILE={tile}", f"BUFFERS={buffers}"
    formats = ("APART=1", f"KEYS={kv.rows.format.upper()}", f"TURN_KEYS={int(kv.rows.rotated)}") if kv.apart else ()
    return *sizes, windowed(0), f"ALONE={int(alone)}", *formats
