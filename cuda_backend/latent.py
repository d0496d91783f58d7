"""Latent attention (DeepSeek-V2): over one latent and one roped key per position, or over keys and values of heads."""

from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from common.step import MAX_DECODE_ROWS
from cuda_backend import gemm
from cuda_backend.arrays import Array
from cuda_backend.attention import LOG2_E, Pieces, combine, combined, whole, windowed
from cuda_backend.caches.latent import Latent
from cuda_backend.caches.planes import TILE, Places, Plane, planes_at
from cuda_backend.launch import kernel
from cuda_backend.layout import LATENT_ROWS, UNPACKED, latent_tiles, padded, piece_places, run_count, tail_places
from cuda_backend.replay import DeviceStep
from cuda_backend.views import out_of, turned, view
from cuda_backend.weights import Weight

if TYPE_CHECKING:
    from cuda_backend.ops import CudaOps


def latent_attention(
    ops: "CudaOps", q_latent: Array, q_rope: Array, latent: Array, k_rope: Array, kv: Latent, step: Any, scale: float
) -> Array:
    T, H, R = q_latent.shape
    step, wide = ops.step_of(step, kv.store), padded(R)
    q16 = ops.arena.take(T * H * kv.rows.width * 2)
    _gather(ops, q_latent, q_rope, latent, k_rope, kv, step, wide, kv.rows.width, q16)
    rows, most = min(T, MAX_DECODE_ROWS), kv.store.past + T if step.prefill else kv.rows.places.capacity
    blocks, (tile, _, shared) = -(-rows * H // LATENT_ROWS), latent_tiles(ops.card, kv.rows.width)
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
                kv.rows.record,
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
            combine(ops, pieces, R, step, out_of(out, 0, 0, H * R, UNPACKED))
    return Array((T, H, R), out) if out else combined(ops, pieces, (T, H, R), step)


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
    heads = Plane(0, H, 2 * wide, wide, Places(-(-n // TILE) * TILE - TILE, TILE))
    size = 2 * heads.nbytes
    keys, values = planes_at(ops.arena.take(size), (heads, heads))
    cupy.cuda.runtime.memsetAsync(keys.address, 0, size, ops.stream.ptr)
    gemm.expand_heads(k_up, False, kv.rows, n, keys, ops.arena, ops.stream)
    gemm.expand_heads(v_up, True, kv.rows, n, values, ops.arena, ops.stream)
    kernel("latent", "spread", _latent(ops, kv))(
        (-(-n * (wide - N) // 256), H),
        (256,),
        (kv.rows.record, np.int32(n), np.int32(N), np.int32(P), np.int32(wide), keys.record),
        stream=ops.stream,
    )
    return whole(ops, q16, keys, values, (T, H, V), step, scale)


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
        (-(-max(wide, kv.rows.width) // 32) * 32,),
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
            kv.rows.record,
        ),
        stream=ops.stream,
    )


def _latent(ops: "CudaOps", kv: Latent) -> tuple[str, ...]:
    tile, buffers, _ = latent_tiles(ops.card, kv.rows.width)
    sizes = f"R={padded(kv.store.spec.latent_dim)}", f"W={kv.rows.width}", f"TILE={tile}", f"BUFFERS={buffers}"
    return *sizes, windowed(0)
