"""Attention over a KV cache of native rows, codes, or codes with exact copies of some rows; and over latent rows."""

from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from common.ops import LatentWeights
from common.step import Step
from common.storage import Packing
from common.visible import exact_rows, seen_rows
from mlx_backend import block_sparse
from mlx_backend.kv_formats import encoded, rotate
from mlx_backend.kv_kernels import EVERY, CachePart, attend, attends
from mlx_backend.packed import MlxPacked
from mlx_backend.products import by_head
from mlx_backend.rows import MlxRows


class Masks:
    """Cache of attention masks: each mask of a step is built once for all layers."""

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[Step, dict[tuple[Any, ...], mx.array]] = WeakKeyDictionary()

    def of(
        self, step: Step, shown: int, past: int, window: int | None = None, causal: bool = False, sinks: int = 0
    ) -> mx.array | str | None:
        """Make the mask of the step's rows over `shown` committed rows and each other; None if they see all.

        The committed rows are the first `sinks` (all, if fewer) and the last ones.
        """
        T, first = len(step), min(sinks, past)
        if window is None or int(step.positions.max()) < window:
            if T == 1 or (step.parents is None and not causal):
                return None
            if step.is_chain or step.parents is None:
                return "causal"
            window = None
        elif T == 1 and shown - first < window:
            return None
        masks = self._made.setdefault(step, {})
        key = shown, window, causal, sinks
        if key not in masks:
            places = np.concatenate([np.arange(first), np.arange(past - shown + first, past)])
            masks[key] = mx.array(seen_rows(step, places, window, sinks, causal))
        return masks[key]


def attention(
    masks: Masks,
    rows: tuple[mx.array, mx.array, mx.array],
    kv: MlxRows | MlxPacked,
    step: Step,
    scale: float,
    window: int | None,
    causal: bool,
    sink_logits: mx.array | None,
) -> mx.array:
    """Write the step's keys and values, and compute attention as `Ops.attention` does.

    rows         q (T, H, D), k and v (T, K, D)
    sink_logits  (H,) float32
    """
    q, k, v = rows[0], *by_heads(*rows[1:])
    kernels = window is None and not causal and attends(kv.spec.planes, step)
    if isinstance(kv, MlxPacked):
        if kernels and kv.is_uniform(step):
            past, parts = kv.past, kv.parts(step, (q, k, v), scale)
            return attend(parts, step, past, kv.spec.packing, q.dtype, sink_logits)
        return _attend_exactly((q, k, v), kv, step, scale, window, causal, sink_logits)
    if kv.spec.is_packed and kv.window is None and kernels:
        return _attend_codes((q, k, v), kv, step, scale, sink_logits)
    past, (keys, values) = kv.past, kv.write(k, v)
    if window is not None and not kv.sinks:  # the first row that any row of the step attends to
        first = past + len(step) - keys.shape[2]
        hidden = max(0, min(past, int(step.positions.min()) - window + 1) - first)
        keys, values = keys[:, :, hidden:], values[:, :, hidden:]
    mask = masks.of(step, keys.shape[2] - len(step), past, window, causal, kv.sinks)
    return _attend(q, keys, values, scale, mask, sink_logits)


def block_sparse_attention(
    rows: tuple[mx.array, mx.array, mx.array], kv: MlxRows | MlxPacked, scale: float
) -> mx.array | None:
    """Compute `Ops.block_sparse_attention`; for a cache of codes or of some rows write nothing and return None."""
    if isinstance(kv, MlxPacked) or kv.spec.is_packed or kv.window is not None:
        return None
    keys, values = kv.write(*by_heads(*rows[1:]))
    return block_sparse.attend(rows[0], keys, values, scale)


def by_heads(*rows: mx.array) -> list[mx.array]:
    """Transpose rows (T, K, D) to the layout of caches: (1, K, T, D) each."""
    return [x.swapaxes(0, 1)[None] for x in rows]


def _attend_codes(
    rows: tuple[mx.array, mx.array, mx.array], kv: MlxRows, step: Step, scale: float, sink_logits: mx.array | None
) -> mx.array:
    """Compute attention over a cache of codes without exact rows, in its stored formats."""
    q, k, v = rows
    past, planes, query = kv.past, kv.spec.planes, q.astype(mx.float32) * scale
    kv.put(encoded(kv.coders, [k, v]))
    query = rotate(query) if planes[0].rotated else query
    part = CachePart(query, mx.zeros(q.shape[:2]), kv.buffers, planes, past, past, EVERY)
    return attend([part], step, past, Packing(), q.dtype, sink_logits)


def _attend_exactly(
    rows: tuple[mx.array, mx.array, mx.array],
    kv: MlxPacked,
    step: Step,
    scale: float,
    window: int | None,
    causal: bool,
    sink_logits: mx.array | None,
) -> mx.array:
    """Compute attention over codes and exact rows; exact rows are additional keys of the same product."""
    q, k, v = rows
    parts, seen = kv.append(step, k, v, q), []
    for part in parts:
        exact = exact_rows(step, part.positions, kv.spec.packing)
        seen.append(seen_rows(step, part.positions, window, kv.sinks, causal) & (exact if part.exact else ~exact))
    keys, values = (mx.concatenate(list(rows), axis=2) for rows in zip(*(part.rows for part in parts), strict=True))
    return _attend(q, keys, values, scale, mx.array(np.concatenate(seen, axis=1)), sink_logits)


def _attend(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sink_logits: mx.array | None = None,
) -> mx.array:
    """Compute attention: q (T, H, D), keys (1, K, n, D), values (1, K, n, Dv) -> (T, H, Dv)."""
    sinks = None if sink_logits is None else sink_logits.astype(q.dtype)
    heads = q.swapaxes(0, 1)[None]
    out = mx.fast.scaled_dot_product_attention(heads, keys, values, scale=scale, mask=mask, sinks=sinks)
    return out.squeeze(0).swapaxes(0, 1)  # out[0] would be a gather


def latent_attention(
    masks: Masks,
    query: tuple[mx.array, mx.array],
    rows: tuple[mx.array, mx.array],
    kv: MlxRows,
    step: Step,
    scale: float,
) -> mx.array:
    """Write latent rows and compute attention over them, as `Ops.latent_attention` does.

    query  parts for latents (T, H, R) and for roped keys (T, H, P)
    rows   latents (T, R) and roped keys (T, P) of the step
    """
    past, R = kv.past, rows[0].shape[1]
    # composed: MLX has no fused attention for heads this wide, and its own fallback copies the values
    held = _latent_rows(kv, *rows).squeeze((0, 1))
    scores = (mx.concatenate(list(query), axis=-1) * scale) @ held.T  # (T, H, n)
    mask = masks.of(step, past, past)
    if isinstance(mask, str):
        mask = mx.arange(past + len(step)) <= past + mx.arange(len(step))[:, None]
    if mask is not None:
        scores = mx.where(mask[:, None], scores, -mx.inf)
    return (mx.softmax(scores, axis=-1, precise=True) @ held)[..., :R]


def expanded_attention(
    masks: Masks,
    query: tuple[mx.array, mx.array],
    rows: tuple[mx.array, mx.array],
    w: LatentWeights,
    kv: MlxRows,
    step: Step,
    scale: float,
) -> mx.array:
    """Write latent rows and compute attention over the keys and values of all, as `Ops.expanded_attention` does.

    query  parts without rope (T, H, N) and with rope (T, H, P)
    rows   latents (T, R) and roped keys (T, P) of the step
    """
    past, R = kv.past, rows[0].shape[1]
    held = _latent_rows(kv, *rows)
    k_nope, values = by_head(held[..., :R], w.k_up, transpose=False), by_head(held[..., :R], w.v_up)
    roped = mx.broadcast_to(held[..., R:], (*k_nope.shape[:3], rows[1].shape[1]))
    keys = mx.concatenate([k_nope, roped], axis=-1)
    mask = masks.of(step, keys.shape[2] - len(step), past)
    return _attend(mx.concatenate(list(query), axis=-1), keys, values, scale, mask)


def _latent_rows(kv: MlxRows, latent: mx.array, k_rope: mx.array) -> mx.array:
    """Append the step's latent rows to the past; return both: (1, 1, n, R + P)."""
    if len(kv.buffers) == 1:
        return kv.write(mx.concatenate([latent, k_rope], axis=-1)[None, None])[0]
    return mx.concatenate(kv.write(latent[None, None], k_rope[None, None]), axis=-1)
