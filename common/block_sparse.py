"""Attention over a long text that leaves out blocks of keys to which a block of queries attends little.

As in PFlash, a block of queries sees the first and the latest blocks of keys before it, and the blocks to which it
probably attends most, by the mean of its queries and the mean of a block's keys. The cost of a token is bounded.
"""

from collections.abc import Iterator

import numpy as np

BLOCK = 128  # rows of queries, and of keys, that are chosen together
SINKS, LATEST = 2, 4  # blocks of keys that are seen in any case: the first, and the last up to the queries' own
MASS = 0.9  # share of the predicted attention that the chosen blocks have at least
MOST = 16  # chosen blocks, beside those that are seen in any case


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> np.ndarray:
    """Attend causally with the last T of n rows: q (T, H, D), keys (n, K, D), values (n, K, Dv) -> (T, H, Dv)."""
    T, H, D = q.shape
    n, K, _ = keys.shape
    whole = n // BLOCK
    means = keys[: whole * BLOCK].reshape(whole, BLOCK, K, D).mean(axis=1)
    out = np.empty((T, H, values.shape[-1]), np.float32)
    grouped, of_heads = q.reshape(T, K, H // K, D), out.reshape(T, K, H // K, -1)
    for first, end in spans(n - T, n):
        rows = slice(first - (n - T), end - (n - T))
        for head in range(K):
            own = grouped[rows, head] * np.float32(scale)
            seen = _rows_of(_chosen(own, means[:, head], first // BLOCK), end)
            of_heads[rows, head] = _softmax(own, keys[seen, head], first, seen) @ values[seen, head]
    return out


def spans(first: int, end: int) -> Iterator[tuple[int, int]]:
    """Divide rows into the parts of blocks: (first, end) of each."""
    while first < end:
        last = min((first // BLOCK + 1) * BLOCK, end)
        yield first, last
        first = last


def _chosen(q: np.ndarray, means: np.ndarray, own: int) -> np.ndarray:
    """Choose, in order, the blocks that queries (rows, heads, D) of block `own` see, by means (blocks, D) of keys."""
    always = np.unique(np.r_[: min(SINKS, own + 1), max(own - LATEST + 1, 0) : own + 1])
    others = np.setdiff1d(np.arange(own), always)
    if not len(others):
        return always
    logits = q.mean(axis=0) @ means[:own].T  # the scale is in the queries
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares = (shares / shares.sum(axis=-1, keepdims=True)).mean(axis=0)
    best = others[np.argsort(-shares[others], kind="stable")][:MOST]
    before = shares[always[always < own]].sum() + np.cumsum(shares[best]) - shares[best]
    return np.sort(np.concatenate([always, best[before < MASS]]))


def _rows_of(blocks: np.ndarray, end: int) -> np.ndarray:
    """Return the rows of blocks, but for those from `end` on."""
    rows = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
    return rows[rows < end]


def _softmax(q: np.ndarray, keys: np.ndarray, first: int, mask: np.ndarray) -> np.ndarray:
    """Weigh keys (m, D) of the rows `mask` for q (rows, heads, D), rows from `first` on: (rows, heads, m)."""
    rows, heads, D = q.shape
    scores = (q.reshape(-1, D) @ keys.T).reshape(rows, heads, -1)
    late = np.searchsorted(mask, first)  # all rows see the keys before
    hidden = mask[late:] > np.arange(first, first + rows)[:, None]
    scores[..., late:][np.broadcast_to(hidden[:, None], scores[..., late:].shape)] = -np.inf
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return scores / scores.sum(axis=-1, keepdims=True)
