"""Attention: keys and values into the cache, rows over pieces of the past, pieces added up; latent attention too."""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import cupy
import numpy as np

from common.step import MAX_DECODE_ROWS
from cuda_backend import gemm
from cuda_backend.arrays import Array
from cuda_backend.launch import kernel
from cuda_backend.layout import (
    LATENT_ROWS,
    SPLIT_TILE,
    UNPACKED,
    Packing,
    latent_tiles,
    padded,
    piece_places,
    run_count,
    split_tiles,
    tail_places,
)
from cuda_backend.lazy import Node
from cuda_backend.prototypes import PLACES
from cuda_backend.replay import DeviceStep
from cuda_backend.states import KV, TILE, Latent, move
from cuda_backend.views import COPY, NOTHING, in_fours, only, out_of, roping, turned, turns, unroped, view
from cuda_backend.weights import Weight

if TYPE_CHECKING:
    from cuda_backend.ops import CudaOps

LOG2_E = 1.4426950408889634  # exponentials are powers of 2


class Pieces(NamedTuple):
    """What kernels/split.cu left for pieces.cu: sums and stats, rows, heads and their width, and how it was cut.

    runs  the most that there may be, kernels/pieces.cu
    """

    runs: int
    sums: int
    stats: int
    T: int
    H: int
    R: int
    first: int
    tile_bits: int
    window: int
    keep: int
    shares: int
    trunk: int


def attention(
    ops: "CudaOps",
    q: Array,
    k: Array,
    v: Array,
    kv: KV,
    step: Any,
    scale: float,
    window: int | None = None,
    causal: bool = False,
) -> Array:
    T, H, D = q.shape
    K, wide = k.shape[1], padded(D)
    step = ops.step_of(step, kv.store)
    q16 = ops.arena.take(T * H * wide * 2)
    keep = kv.store.window[1]
    cache, values, capacity, places = kv.keys, kv.values, kv.capacity, kv.places
    if step.prefill and kv.store.is_ring:  # rows of a ring would overwrite one another
        cache, values, capacity, places = _unrolled(ops, kv, T)
    _heads_to_cache(ops, q, k, v, step, wide, q16, cache, values, capacity, places)
    head = (
        np.uint64(q16),
        np.uint64(cache),
        np.uint64(values),
        np.int64(capacity),
        places,
        np.int32(H),
    )
    at = (np.uint64(step.state), np.uint64(step.positions.address), np.int32(T))
    seen = (np.float32(scale * LOG2_E), np.int32(window or 0), np.int32(keep))
    if step.prefill:
        out = Array((T, H, D), ops.arena.take(T * H * D * 4))
        shared = 3 * 64 * (wide + 8) * 2
        kernel("attention", "whole", (f"D={wide}", f"DIM={D}"), shared)(
            (-(-T * (H // K) // 64), K),
            (128,),
            (*head, np.int32(K), *at, *seen, np.uint64(out.address)),
            shared_mem=shared,
            stream=ops.stream,
        )
        if kv.store.is_ring:
            _rolled(ops, kv, T, cache, capacity, places)
        return out
    rows = 16 if T * (H // K) <= 16 else 32  # of a block
    defines, shared, ctas = split_tiles(ops.card, wide, rows)
    blocks = -(-T * (H // K) // rows)
    shares = max(1, ctas * ops.card.sms // (K * blocks))
    trunk = piece_places(kv.store.most, SPLIT_TILE, window or 0, keep, shares)
    count = trunk + tail_places(SPLIT_TILE, T)
    sums, stats = ops.arena.take(count * T * H * wide * 4), ops.arena.take(count * T * H * 8)
    kernel("split", "split", (*defines, _windowed(window or 0)), shared)(
        (blocks, K, shares),  # those that have work first: one to a multiprocessor
        (8 * rows,),
        (*head, np.int32(H // K), *at, *seen, np.int32(causal), np.int32(trunk), np.uint64(sums), np.uint64(stats)),
        shared_mem=shared,
        stream=ops.stream,
    )
    runs = run_count(kv.store.most, window or 0, keep)
    pieces = Pieces(runs, sums, stats, T, H, wide, 0, SPLIT_TILE.bit_length() - 1, window or 0, keep, shares, trunk)
    return _combined(ops, pieces, (T, H, D), step)


def write_kv(ops: "CudaOps", k: Array, v: Array, kv: KV, step: Any) -> None:
    step = ops.step_of(step, kv.store)
    if step.prefill and kv.store.is_ring:
        cache, values, capacity, places = _unrolled(ops, kv, len(k))
        _heads_to_cache(ops, None, k, v, step, padded(k.shape[2]), 0, cache, values, capacity, places)
        _rolled(ops, kv, len(k), cache, capacity, places)
    else:
        _heads_to_cache(ops, None, k, v, step, padded(k.shape[2]), 0, kv.keys, kv.values, kv.capacity, kv.places)


def latent_attention(
    ops: "CudaOps", q_latent: Array, q_rope: Array, latent: Array, k_rope: Array, kv: Latent, step: Any, scale: float
) -> Array:
    T, H, R = q_latent.shape
    step, wide = ops.step_of(step, kv.store), padded(R)
    q16 = ops.arena.take(T * H * kv.width * 2)
    _gather(ops, q_latent, q_rope, latent, k_rope, kv, step, wide, kv.width, q16)
    rows, most = min(T, MAX_DECODE_ROWS), kv.store.past + T if step.prefill else kv.capacity
    blocks, (tile, _, shared) = -(-rows * H // LATENT_ROWS), latent_tiles(ops.card, kv.width)
    shares = max(1, ops.card.shared // (shared + 2048) * ops.card.sms // blocks)
    trunk = piece_places(most, tile, 0, 0, shares)
    count = trunk + tail_places(tile, rows)
    sums, stats = ops.arena.take(count * rows * H * wide * 4), ops.arena.take(count * rows * H * 8)
    out = 0 if rows == T else ops.arena.take(T * H * R * 4)
    for first in range(0, T, MAX_DECODE_ROWS):
        n = min(rows, T - first)
        kernel("latent", "split", _latent(ops, kv), shared)(
            (blocks, shares),
            (256,),
            (
                np.uint64(q16),
                np.uint64(kv.rows),
                np.int32(H),
                np.uint64(step.state),
                np.uint64(step.positions.address),
                np.int32(n),
                np.int32(first),
                np.float32(scale * LOG2_E),
                np.int32(trunk),
                np.uint64(sums),
                np.uint64(stats),
            ),
            shared_mem=shared,
            stream=ops.stream,
        )
        cut = tile.bit_length() - 1, 0, 0, shares, trunk
        pieces = Pieces(run_count(most, 0, 0), sums, stats, n, H, wide, first, *cut)
        if out:
            _combine(ops, pieces, R, step, out_of(out, 0, 0, H * R, UNPACKED))
    return Array((T, H, R), out) if out else _combined(ops, pieces, (T, H, R), step)


def expanded_attention(
    ops: "CudaOps",
    q_nope: Array,
    q_rope: Array,
    latent: Array,
    k_rope: Array,
    k_up: Weight,
    v_up: Weight,
    kv: Latent,
    step: Any,
    scale: float,
) -> Array:
    T, H, N = q_nope.shape
    step = ops.step_of(step, kv.store)
    if not step.prefill:  # one form for few rows, so that their number does not choose another
        o = latent_attention(ops, ops.head_linear(q_nope, k_up), q_rope, latent, k_rope, kv, step, scale)
        return ops.head_linear(o, v_up)
    P, V = q_rope.shape[2], v_up.rows
    n, wide = kv.store.past + T, padded(max(N + P, V))
    q16 = ops.arena.take(T * H * wide * 2)
    _gather(ops, q_nope, q_rope, latent, k_rope, kv, step, N, wide, q16)
    capacity = -(-n // TILE) * TILE
    plane = capacity * wide * 2
    keys = ops.arena.take(2 * H * plane)
    values = keys + H * plane
    cupy.cuda.runtime.memsetAsync(keys, 0, 2 * H * plane, ops.stream.ptr)
    gemm.expand_heads(k_up, False, kv.rows, kv.width, n, keys, plane, wide, ops.arena, ops.stream)
    gemm.expand_heads(v_up, True, kv.rows, kv.width, n, values, plane, wide, ops.arena, ops.stream)
    kernel("latent", "spread", _latent(ops, kv))(
        (-(-n * (wide - N) // 256), H),
        (256,),
        (
            np.uint64(kv.rows),
            np.int32(n),
            np.int32(N),
            np.int32(P),
            np.int32(wide),
            np.int64(capacity),
            np.uint64(keys),
        ),
        stream=ops.stream,
    )
    out = Array((T, H, V), ops.arena.take(T * H * V * 4))
    places = np.array((capacity, TILE), PLACES)
    shared = 3 * 64 * (wide + 8) * 2
    kernel("attention", "whole", (f"D={wide}", f"DIM={V}"), shared)(
        (-(-T // 64), H),
        (128,),
        (
            *(np.uint64(x) for x in (q16, keys, values)),
            np.int64(capacity),
            places,
            np.int32(H),
            np.int32(H),
            np.uint64(step.state),
            np.uint64(step.positions.address),
            np.int32(T),
            np.float32(scale * LOG2_E),
            np.int32(0),
            np.int32(0),
            np.uint64(out.address),
        ),
        shared_mem=shared,
        stream=ops.stream,
    )
    return out


def _heads_to_cache(
    ops: "CudaOps",
    q: Array | None,
    k: Array,
    v: Array,
    step: DeviceStep,
    wide: int,
    q16: int,
    keys: int,
    values: int,
    capacity: int,
    places: np.ndarray,
) -> None:
    """Float16 of q, and of k and v in the cache; norm and rope happen on the way."""
    T, K, D = k.shape
    H = q.shape[1] if q else 0
    queries = q or k
    sources = unroped(queries), unroped(k), v
    (q_norm, q_weight, q_eps, q_rope), (k_norm, k_weight, k_eps, k_rope) = roping(queries), roping(k)
    alike = q_norm == k_norm and q_eps == k_eps and bytes(q_rope) == bytes(k_rope)
    if alike and D in (128, 256) and T <= MAX_DECODE_ROWS and in_fours(*sources, flat=False) and turns(q_rope):
        norms = q_norm, q_weight, k_weight, q_eps, q_rope
        cache = np.uint64(keys), np.uint64(values), np.int64(capacity)
        ctas = sum(n if x.slots > 1024 // D else -(-n // 4) for x, n in zip(sources, (H, K, K), strict=True))
        kernel("to_cache", "to_cache", (f"D={D}",))(
            (T * ctas,),
            (128,),
            (
                *(view(x) for x in sources),
                np.int32(H),
                np.int32(K),
                np.uint64(step.state),
                np.int32(T),
                *norms,
                np.uint64(q16),
                *cache,
                np.int32(places["fixed"]),
                np.int32(places["ring"]),
            ),
            stream=ops.stream,
        )
        return
    kernel("rows", "heads_to_cache")(
        (-(-T * (H + 2 * K) // 8),),
        (256,),
        (
            *(view(x) for x in sources),
            np.int32(H),
            np.int32(K),
            np.int32(D),
            np.int32(wide),
            np.uint64(step.state),
            np.int32(T),
            *roping(queries),
            *roping(k),
            np.uint64(q16),
            np.uint64(keys),
            np.uint64(values),
            np.int64(capacity),
            np.int32(places["fixed"]),
            np.int32(places["ring"]),
        ),
        shared_mem=32 * padded(D),
        stream=ops.stream,
    )


def _unrolled(ops: "CudaOps", kv: KV, T: int) -> tuple[int, int, int, np.ndarray]:
    """A copy of a ring with room for T more rows: keys, values, capacity and places."""
    store, past = kv.store, kv.store.past
    window, keep = store.window
    K = store.spec.kv_heads
    places = np.array((kv.places["fixed"], -(-(T + window + TILE) // TILE) * TILE), PLACES)
    capacity = int(places["fixed"] + places["ring"])
    plane = K * capacity * store.width * 2
    keys = ops.arena.take(2 * plane)
    cupy.cuda.runtime.memsetAsync(keys, 0, 2 * plane, ops.stream.ptr)
    for first, end in ((0, min(keep, past)), (max(0, past - window), past)):
        if first < end:
            ring = kv.keys, kv.capacity, kv.places, first
            move(*ring, keys, capacity, places, first, 2 * K, store.width, end - first, ops.stream)
    return keys, keys + plane, capacity, places


def _rolled(ops: "CudaOps", kv: KV, T: int, keys: int, capacity: int, places: np.ndarray) -> None:
    """What the ring becomes where the T rows are committed."""
    store, end = kv.store, kv.store.past + T
    window, keep = store.window
    for first, last in ((0, min(keep, end)), (max(0, end - window), end)):
        if first < last:
            after = kv.after, kv.capacity, kv.places, first
            rows = 2 * store.spec.kv_heads, store.width, last - first
            move(keys, capacity, places, first, *after, *rows, ops.stream)


def _combined(ops: "CudaOps", pieces: Pieces, shape: tuple[int, int, int], step: DeviceStep) -> Array:
    """The pieces added up, when their consumer is known; a gate may come along."""
    T, H, D = shape

    def launch(dense: int, packed: int, bf16: int, packing: Packing, op: int = 0, gate: Array | None = None) -> None:
        out = out_of(dense, packed, bf16, H * D, packing)
        _combine(ops, pieces, D, step, out, op, view(gate, wide=D) if gate else NOTHING)

    def emit(dense: int, packed: int, bf16: int, packing: Packing) -> None:
        if (packed and packing.joins(D)) or (bf16 and D % 32):
            ops.pointwise(COPY, flat := Array((T, H * D), node.as_dense()), flat).emit(0, packed, bf16, packing)
        else:
            launch(dense, packed, bf16, packing)

    node = Node(ops.arena, T, H * D, emit)
    node.pieces = launch
    return Array(shape, node=node)


def _combine(
    ops: "CudaOps", pieces: Pieces, D: int, step: DeviceStep, out: np.ndarray, op: int = 0, gate: np.ndarray = NOTHING
) -> None:
    """The pieces added up, D columns of a head."""
    runs, sums, stats, T, H, wide, first, *cut = pieces
    blocks = H, T, -(-D // 128)
    room = 15 * ops.card.sms // math.prod(blocks)  # warps of a CTA, where all run at once and a product begins beside
    of_run = 2 if room >= 6 else 1
    warps = of_run * max(1, min(runs + bool(op), min(room, 12) // of_run))
    gated = int(op > 0 or pieces.window > 0)  # without it those with windows would spill
    built = f"WARPS={of_run}", f"GATED={gated}", _windowed(pieces.window), *only(out)
    kernel("pieces", "combine", built)(
        blocks,
        (32 * warps,),
        (
            np.uint64(sums),
            np.uint64(stats),
            np.int32(H),
            np.int32(wide),
            np.int32(D),
            np.uint64(step.state),
            np.uint64(step.positions.address),
            np.int32(T),
            np.int32(first),
            *(np.int32(x) for x in cut),
            np.int32(op),
            gate,
            out,
        ),
        shared_mem=runs * (32 * 16 + 8),
        stream=ops.stream,
    )


def _gather(
    ops: "CudaOps",
    q: Array,
    q_rope: Array,
    latent: Array,
    k_rope: Array,
    kv: Latent,
    step: DeviceStep,
    at: int,
    wide: int,
    q16: int,
) -> None:
    """q || roped q_rope as float16, the latter from channel `at`, and this step's rows of the cache."""
    T, H, main = q.shape
    (q_from, q_turn), (k_from, k_turn) = turned(q_rope), turned(k_rope)
    node = latent.whole_node()
    norm = node.norm if node and not node.dense else None
    plain, weight, eps = norm or (latent, None, 0.0)
    kernel("latent", "gather", _latent(ops, kv))(
        (T * (H + 1),),
        (-(-max(wide, kv.width) // 32) * 32,),
        (
            *(view(x) for x in (q, q_from, plain, k_from)),
            np.int32(T),
            np.int32(H),
            np.int32(main),
            np.int32(at),
            np.int32(q_rope.shape[2]),
            np.int32(wide),
            q_turn,
            k_turn,
            np.int32(norm is not None),
            np.uint64(weight.address if weight else 0),
            np.float32(eps),
            np.int32(latent.shape[1]),
            np.uint64(step.state),
            np.uint64(q16),
            np.uint64(kv.rows),
        ),
        stream=ops.stream,
    )


def _latent(ops: "CudaOps", kv: Latent) -> tuple[str, ...]:
    tile, buffers, _ = latent_tiles(ops.card, kv.width)
    sizes = f"R={padded(kv.store.spec.latent_dim)}", f"W={kv.width}", f"TILE={tile}", f"BUFFERS={buffers}"
    return *sizes, _windowed(0)


def _windowed(window: int) -> str:
    """The build of kernels/flash.cuh."""
    return f"WINDOWED={int(window > 0)}"
