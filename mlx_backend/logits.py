"""Find the best tokens of rows of logits on the device that holds the logits, and sample among them."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from common.sampling import NOT_A_TOKEN, Sampler, Samplers
from mlx_backend import kernels

SLICE = 512  # logits that one SIMD group holds, in top_k.metal
MOST = 128  # maximum number of best logits of a slice: each pass reduces a row to a quarter


def best_of_rows(logits: mx.array, k: int) -> tuple[mx.array, mx.array, mx.array]:
    """Find the k largest of each row of logits (T, vocab), best first; on Metal the smaller id of equal logits.

    -> ids (T, k) int32, log-probabilities (T, k) float32, log-sum-exp (T, 1) float32, NaN where a logit is NaN
    """
    k = min(k, logits.shape[-1])
    best, ids, total = _passes(logits, k) if kernels.on_metal() and k <= MOST else _sorted(logits, k)
    return ids, best - total, total


def _passes(logits: mx.array, k: int) -> tuple[mx.array, mx.array, mx.array]:
    best, ids, sums = _pass(logits, None, k)
    total = mx.logsumexp(sums, axis=-1, keepdims=True)
    while best.shape[1] > k:
        best, ids, _ = _pass(best, ids, k)
    return best, ids, total


def _pass(logits: mx.array, ids: mx.array | None, k: int) -> tuple[mx.array, mx.array, mx.array]:
    """Reduce each slice to its k best: values and ids (T, slices * k), log-sum-exps (T, slices)."""
    T, slices = len(logits), -(-logits.shape[1] // SLICE)
    kernel = kernels.make_kernel("top_k", inputs=("logits", "ids"), outputs=("best", "best_ids", "log_sums"))
    best, best_ids, sums = kernel(
        inputs=[logits, mx.zeros(1, mx.int32) if ids is None else ids],
        template=[("T", logits.dtype), ("K", k), ("GIVEN", ids is not None)],
        grid=(32, slices, T),
        threadgroup=(32, min(slices, 4), 1),
        output_shapes=[(T, slices * k), (T, slices * k), (T, slices)],
        output_dtypes=[mx.float32, mx.int32, mx.float32],
    )
    return best, best_ids, sums


def sampled(logits: mx.array, samplers: Sequence[Sampler]) -> mx.array:
    """Sample a token of each row of logits (T, vocab), by its own sampler: (T,) int32, NOT_A_TOKEN if a logit is NaN.

    On Metal the host reads only the best tokens of rows that need few; of all other rows it reads every logit.
    """
    counts = [1 if each.is_argmax else 0 if each.penalizes else each.sampling.top_k for each in samplers]
    few = [row for row, count in enumerate(counts) if kernels.on_metal() and 0 < count <= MOST]
    tokens, others = np.empty(len(samplers), np.int32), sorted({*range(len(samplers))} - {*few})
    if few:
        rows = logits[mx.array(few)]
        ids, _, total = best_of_rows(rows, max(counts[row] for row in few))
        ids = mx.where(mx.isnan(total), NOT_A_TOKEN, ids)
        best = np.array(mx.take_along_axis(rows, mx.maximum(ids, 0), axis=-1).astype(mx.float32))
        for row, *found in zip(few, np.array(ids), best, strict=True):
            tokens[row] = _picked(samplers[row], *(x[: counts[row]] for x in found))
    if others:
        host = np.array(logits[mx.array(others)].astype(mx.float32))
        tokens[others] = Samplers([(samplers[row], 1) for row in others]).pick(host)
    return mx.array(tokens)


def _picked(sampler: Sampler, ids: np.ndarray, logits: np.ndarray) -> int:
    """Return a token of `ids` (k,), the best of a row, by their logits (k,): ordered by id, as in the whole row."""
    if ids[0] == NOT_A_TOKEN:
        return NOT_A_TOKEN
    order = np.argsort(ids)
    return int(ids[order][sampler.pick(logits[order])])


def best_and_entropy(logits: mx.array, excluded: int) -> tuple[mx.array, mx.array]:
    """Find the best token but `excluded` of each row of logits (T, vocab), and the entropy in nats without it.

    -> ids (T,) int32, NOT_A_TOKEN where a logit is NaN; entropies (T,) float32
    """
    return _reduced(logits, excluded) if kernels.on_metal() else _composed(logits, excluded)


def _reduced(logits: mx.array, excluded: int) -> tuple[mx.array, mx.array]:
    T, empty = len(logits), mx.zeros(1)
    best, ids, totals, offs = logits, mx.zeros(1, mx.int32), empty, empty
    while True:
        slices = -(-best.shape[1] // SLICE)
        kernel = kernels.make_kernel(
            "entropy",
            inputs=("logits", "ids", "sums", "moments", "excluded"),
            outputs=("best", "best_ids", "totals", "offs"),
        )
        first, last = best is logits, slices == 1
        best, ids, totals, offs = kernel(
            inputs=[best, ids, totals, offs, mx.array([excluded], mx.int32)],
            template=[("T", best.dtype), ("GIVEN", not first), ("LAST", last)],
            grid=(32, slices, T),
            threadgroup=(32, min(slices, 4), 1),
            output_shapes=[(T, slices)] * 4,
            output_dtypes=[mx.float32, mx.int32, mx.float32, mx.float32],
        )
        if last:
            return ids.squeeze(1), offs.squeeze(1)


def _composed(logits: mx.array, excluded: int) -> tuple[mx.array, mx.array]:
    hidden = (mx.arange(logits.shape[-1]) == excluded) & ~mx.isnan(logits)
    x = mx.where(hidden, -mx.inf, logits.astype(mx.float32))
    shifted = x - x.max(axis=-1, keepdims=True)
    weights = mx.exp(shifted)
    total = weights.sum(axis=-1)
    entropy = mx.log(total) - (weights * mx.where(weights > 0, shifted, 0)).sum(axis=-1) / total
    return mx.where(mx.isnan(total), NOT_A_TOKEN, x.argmax(axis=-1).astype(mx.int32)), entropy


def _sorted(logits: mx.array, k: int) -> tuple[mx.array, mx.array, mx.array]:
    logits = logits.astype(mx.float32)
    ids = mx.argpartition(-logits, min(k, logits.shape[-1] - 1), axis=-1)[:, :k]
    best = mx.take_along_axis(logits, ids, axis=-1)
    order = mx.argsort(-best, axis=-1)
    ids, best = mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(best, order, axis=-1)
    return best, ids.astype(mx.int32), mx.logsumexp(logits, axis=-1, keepdims=True)
