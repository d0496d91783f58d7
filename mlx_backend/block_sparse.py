"""Attention that skips blocks of keys (common/block_sparse.py), by gathering the chosen blocks."""

import mlx.core as mx

from common import block_sparse as definition


def attend(q: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Compute causal attention of the last T of n rows: q (T, H, D), keys (1, K, n, D), values (1, K, n, Dv)."""
    (T, H, D), (_, K, n, _) = q.shape, keys.shape
    keys, values, size = keys.squeeze(0), values.squeeze(0), definition.BLOCK
    whole = n // size
    blocks = [x[:, : whole * size].reshape(K, whole, size, x.shape[2]) for x in (keys, values)]
    means = blocks[0].mean(axis=2).astype(mx.float32)
    rows, out = q.swapaxes(0, 1).reshape(K, H // K, T, D), []
    for first, end in definition.spans(n - T, n):
        own, at = first // size, first - (n - T)
        part = rows[:, :, at : at + end - first]
        late = own - definition.LATEST + 1  # later blocks are always seen
        if late <= definition.SINKS:
            seen = [keys[:, :end], values[:, :end]]
            mask: mx.array | str = "causal"
        else:
            query = scale * part.astype(mx.float32).mean(axis=2)
            best, kept = _chosen(query, means[:, :own], late)
            edge = definition.SINKS * size
            seen = [
                mx.concatenate([x[:, :edge], _gathered(b, best), x[:, late * size : end]], axis=1)
                for x, b in zip((keys, values), blocks, strict=True)
            ]
            mask = _mask(mx.repeat(kept, size, axis=1), edge, (first, end), late * size)
        pair = [x[:, None] for x in seen]
        out.append(mx.fast.scaled_dot_product_attention(part, *pair, scale=scale, mask=mask))
    return mx.concatenate(out, axis=2).reshape(H, T, -1).swapaxes(0, 1)


def _chosen(query: mx.array, means: mx.array, late: int) -> tuple[mx.array, mx.array]:
    """Choose blocks between the first ones and `late`, (K, m), largest shares first, and mark those that are seen.

    query  the scaled mean of a block's queries, (K, heads, D)
    means  means of the keys of each earlier block, (K, blocks, D)
    """
    sinks = definition.SINKS
    shares = mx.softmax(query @ means.swapaxes(1, 2), axis=-1).mean(axis=1)
    others = shares[:, sinks:late]
    best = mx.argsort(-others, axis=-1)[:, : definition.MOST]
    found = mx.take_along_axis(others, best, axis=-1)
    always = mx.concatenate([shares[:, :sinks], shares[:, late:]], axis=1).sum(axis=1, keepdims=True)
    return best + sinks, always + mx.cumsum(found, axis=-1) - found < definition.MASS


def _gathered(blocks: mx.array, best: mx.array) -> mx.array:
    """Return the rows of the blocks (K, m) of (K, blocks, size, D): (K, m * size, D)."""
    return blocks[mx.arange(len(best))[:, None], best].reshape(len(best), -1, blocks.shape[3])


def _mask(kept: mx.array, edge: int, span: tuple[int, int], late: int) -> mx.array:
    """Make the mask of the rows of `span`: `edge` rows, the chosen ones of `kept` (K, m), and those from `late` on."""
    (first, end), K = span, len(kept)
    causal = mx.arange(late, end) <= mx.arange(first, end)[:, None]
    parts = [mx.ones((K, end - first, edge), mx.bool_), kept[:, None], causal[None]]
    return mx.concatenate([mx.broadcast_to(x, (K, end - first, x.shape[2])) for x in parts], axis=2)[:, None]
