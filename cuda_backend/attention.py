"""Attention: keys and values into the cache, rows over pieces of the past, and the pieces added up."""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from common.step import MAX_DECODE_ROWS
from cuda_backend.arrays import Array
from cuda_backend.caches.kv import KV
from cuda_backend.caches.planes import Plane
from cuda_backend.caches.window import rolled, unrolled
from cuda_backend.launch import kernel
from cuda_backend.layout import SPLIT_TILE, Packing, padded, piece_places, run_count, split_tiles, tail_places
from cuda_backend.lazy import Node
from cuda_backend.replay import DeviceStep
from cuda_backend.views import COPY, NOTHING, in_fours, only, out_of, roping, turns, unroped, view

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
    K, wide = k.shape[1], kv.keys.width
    step = ops.step_of(step, kv.store)
    q16 = ops.arena.take(T * H * wide * 2)
    keep = kv.store.window[1]
    keys, values = kv.keys, kv.values
    if step.prefill and kv.store.is_ring:  # rows of a ring would overwrite one another
        keys, values = unrolled(kv, T, ops.arena, ops.stream)
    heads_to_cache(ops, q, k, v, step, q16, keys, values)
    if step.prefill:
        out = whole(ops, q16, keys, values, (T, H, D), step, scale, (window or 0, keep))
        if kv.store.is_ring:
            rolled(kv, T, (keys, values), ops.stream)
        return out
    rows = 16 if T * (H // K) <= 16 else 32  # of a block
    defines, shared, ctas = split_tiles(ops.card, wide, rows)
    blocks = -(-T * (H // K) // rows)
    shares = max(1, ctas * ops.card.sms // (K * blocks))
    trunk = piece_places(kv.store.most, SPLIT_TILE, window or 0, keep, shares)
    count = trunk + tail_places(SPLIT_TILE, T)
    sums, stats = ops.arena.take(count * T * H * wide * 4), ops.arena.take(count * T * H * 8)
    kernel("split", "split", (*defines, windowed(window or 0)), shared)(
        (blocks, K, shares),  # those that have work first: one to a multiprocessor
        (8 * rows,),
        (
            np.uint64(q16),
            keys.record,
            values.record,
            np.int32(H),
            np.int32(H // K),
            np.uint64(step.state),
            np.uint64(step.positions.address),
            np.int32(T),
            np.float32(scale * LOG2_E),
            np.int32(window or 0),
            np.int32(keep),
            np.int32(causal),
            np.int32(trunk),
            np.uint64(sums),
            np.uint64(stats),
        ),
        shared_mem=shared,
        stream=ops.stream,
    )
    runs = run_count(kv.store.most, window or 0, keep)
    pieces = Pieces(runs, sums, stats, T, H, wide, 0, SPLIT_TILE.bit_length() - 1, window or 0, keep, shares, trunk)
    return combined(ops, pieces, (T, H, D), step)


def write_kv(ops: "CudaOps", k: Array, v: Array, kv: KV, step: Any) -> None:
    step = ops.step_of(step, kv.store)
    if step.prefill and kv.store.is_ring:
        keys, values = unrolled(kv, len(k), ops.arena, ops.stream)
        heads_to_cache(ops, None, k, v, step, 0, keys, values)
        rolled(kv, len(k), (keys, values), ops.stream)
    else:
        heads_to_cache(ops, None, k, v, step, 0, kv.keys, kv.values)


def heads_to_cache(
    ops: "CudaOps", q: Array | None, k: Array, v: Array, step: DeviceStep, q16: int, keys: Plane, values: Plane
) -> None:
    """Float16 of q at `q16`, and rows of k and v in the cache; norm and rope happen in the same launch."""
    T, K, D = k.shape
    H = q.shape[1] if q else 0
    queries = q or k
    sources = unroped(queries), unroped(k), v
    (q_norm, q_weight, q_eps, q_rope), (k_norm, k_weight, k_eps, k_rope) = roping(queries), roping(k)
    alike = q_norm == k_norm and q_eps == k_eps and bytes(q_rope) == bytes(k_rope)
    if alike and D in (128, 256) and T <= MAX_DECODE_ROWS and in_fours(*sources, flat=False) and turns(q_rope):
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
                *(q_norm, q_weight, k_weight, q_eps, q_rope),
                np.uint64(q16),
                keys.record,
                values.record,
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
            np.int32(keys.width),
            np.uint64(step.state),
            np.int32(T),
            *roping(queries),
            *roping(k),
            np.uint64(q16),
            keys.record,
            values.record,
        ),
        shared_mem=32 * padded(D),
        stream=ops.stream,
    )


def whole(
    ops: "CudaOps",
    q16: int,
    keys: Plane,
    values: Plane,
    shape: tuple[int, int, int],
    step: DeviceStep,
    scale: float,
    seen: tuple[int, int] = (0, 0),
) -> Array:
    """Attention of a long step, (T, H, D) = `shape`, whose rows the planes hold.

    seen  positions of the window, 0: all; and those of the first ones that every row sees
    """
    T, H, D = shape
    K, wide = keys.heads, keys.width
    out = Array((T, H, D), ops.arena.take(T * H * D * 4))
    shared = 3 * 64 * (wide + 8) * 2
    kernel("attention", "whole", (f"D={wide}", f"DIM={D}"), shared)(
        (-(-T * (H // K) // 64), K),
        (128,),
        (
            np.uint64(q16),
            keys.record,
            values.record,
            np.int32(H),
            np.int32(K),
            np.uint64(step.state),
            np.uint64(step.positions.address),
            np.int32(T),
            np.float32(scale * LOG2_E),
            *(np.int32(n) for n in seen),
            np.uint64(out.address),
        ),
        shared_mem=shared,
        stream=ops.stream,
    )
    return out


def combined(ops: "CudaOps", pieces: Pieces, shape: tuple[int, int, int], step: DeviceStep) -> Array:
    """The pieces added up, when their consumer is known; it may multiply them by a gate."""
    T, H, D = shape

    def launch(dense: int, packed: int, bf16: int, packing: Packing, op: int = 0, gate: Array | None = None) -> None:
        out = out_of(dense, packed, bf16, H * D, packing)
        combine(ops, pieces, D, step, out, op, view(gate, wide=D) if gate else NOTHING)

    def emit(dense: int, packed: int, bf16: int, packing: Packing) -> None:
        if (packed and packing.joins(D)) or (bf16 and D % 32):
            ops.pointwise(COPY, flat := Array((T, H * D), node.as_dense()), flat).emit(0, packed, bf16, packing)
        else:
            launch(dense, packed, bf16, packing)

    node = Node(ops.arena, T, H * D, emit)
    node.pieces = launch
    return Array(shape, node=node)


def combine(
    ops: "CudaOps", pieces: Pieces, D: int, step: DeviceStep, out: np.ndarray, op: int = 0, gate: np.ndarray = NOTHING
) -> None:
    """The pieces added up, D columns of a head."""
    runs, sums, stats, T, H, wide, first, *cut = pieces
    blocks = H, T, -(-D // 128)
    room = 15 * ops.card.sms // math.prod(blocks)  # warps of a CTA, where all run at once and a product begins beside
    of_run = 2 if room >= 6 else 1
    warps = of_run * max(1, min(runs + bool(op), min(room, 12) // of_run))
    gated = int(op > 0 or pieces.window > 0)  # without it those with windows would spill
    built = f"WARPS={of_run}", f"GATED={gated}", windowed(pieces.window), *only(out)
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


def windowed(window: int) -> str:
    """The build of kernels/flash.cuh."""
    return f"WINDOWED={int(window > 0)}"
