"""Draw a token from a row of logits, on the host: the definition of every sampling parameter.

Order: penalties, logit bias, guide, temperature, top-k, top-p, min-p, reweigh, then one draw. A draw consumes one
random number per token, so that a seed gives the same text with every decoder that draws in the order of the text. The
weights of a draw are integers, because sums of integers do not depend on their order, and devices add in different
orders.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from common.errors import BimetalError, NotFiniteError, UsageError, shown
from common.options import Sampling

ONE = 1 << 40  # draw weight of the most probable token
NOT_A_TOKEN = -1  # choice of a backend for a row that holds NaN; reading it raises NotFiniteError
FEW = 1024  # tokens that top-p sorts first; if they do not reach its share, it sorts all


def log_softmax(row: np.ndarray) -> np.ndarray:
    """Convert row (vocab,) float32 to log-probabilities, with sums in float64."""
    shifted = row.astype(np.float64) - row.max()
    return shifted - np.log(np.exp(shifted).sum())


def top_k(rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the k best tokens of rows (T, vocab) float32: ids int32 and log-probabilities float32, (T, k), best first.

    Of equal logits the smaller id comes first; NaN logits are refused.
    """
    if np.isnan(rows).any():
        raise NotFiniteError(f"{np.isnan(rows).sum()} of {rows.size} logits are NaN")
    ids = np.empty((len(rows), min(k, rows.shape[-1])), np.int32)
    for out, row in zip(ids, rows, strict=True):
        out[:] = best_of(row, k)
    shifted = rows - rows.max(axis=-1, keepdims=True)
    total = np.log(np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64))
    return ids, (np.take_along_axis(shifted, ids, axis=-1) - total).astype(np.float32)


def argmax_entropy(rows: np.ndarray, excluded: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the best id (T,) int32 and entropy in nats (T,) float32 of rows (T, vocab) float32, without `excluded`.

    H = log(sum exp(x)) - sum(p x), in float64; of equal logits the smaller id is best; NaN logits are refused.
    """
    if np.isnan(rows).any():
        raise NotFiniteError(f"{np.isnan(rows).sum()} of {rows.size} logits are NaN")
    rows = rows.astype(np.float64)
    rows[:, excluded] = -np.inf
    weights = np.exp(rows - rows.max(axis=-1, keepdims=True))
    total = weights.sum(axis=-1, keepdims=True)
    shifted = np.where(weights > 0, rows - rows.max(axis=-1, keepdims=True), 0)
    entropy = np.log(total[:, 0]) - (weights * shifted).sum(axis=-1) / total[:, 0]
    return rows.argmax(axis=-1).astype(np.int32), entropy.astype(np.float32)


def best_of(row: np.ndarray, k: int) -> np.ndarray:
    """Return ids of the k largest logits of row (vocab,), or of all if fewer, best first; ties go to the smaller id."""
    ids = np.flatnonzero(row >= np.partition(row, -k)[-k]) if k < len(row) else np.arange(len(row))
    return ids[np.argsort(-row[ids], kind="stable")][:k]


def draw_weights(row: np.ndarray, s: Sampling) -> np.ndarray:
    """Compute each token's weight in a draw, (vocab,) uint64, 0 if excluded, from row (vocab,) float32 without NaN.

    Top-k and top-p keep the first tokens in descending order of logits; of equal logits the smaller id comes first. The
    token that crosses top-p is kept, and top-p is a share of the tokens that top-k kept. Weights below `min_p` times
    the best weight become 0.
    """
    top = row.max()
    with np.errstate(invalid="ignore", over="ignore"):  # infinite logits, tiny temperatures
        shifted = np.where(row == top, 0.0, (row.astype(np.float64) - top) / s.temperature)
    out = np.rint(np.exp(shifted) * ONE).astype(np.uint64)
    if s.top_k or s.top_p < 1:
        best = best_of(row, s.top_k or FEW)
        if s.top_p < 1:
            enough = max(1, math.ceil(s.top_p * float(out[best].sum() if s.top_k else out.sum())))
            if out[best].sum() < enough:
                best = best_of(row, len(row))
            best = best[: np.searchsorted(np.cumsum(out[best]), np.uint64(enough)) + 1]
        kept = np.zeros_like(out)
        kept[best] = out[best]
        out = kept
    out[out < np.uint64(math.ceil(s.min_p * ONE))] = 0
    return out


def check_weights(weights: Any, given: np.ndarray) -> np.ndarray:
    """Return `weights`, which a caller's `reweigh` made of the weights `given`; raises UsageError for unusable ones."""
    if not isinstance(weights, np.ndarray) or (weights.shape, weights.dtype) != (given.shape, given.dtype):
        raise UsageError(f"reweigh returned {_described(weights)}; it must return {_described(given)}")
    if not weights.any():
        raise UsageError("reweigh returned zeros alone; at least one token must have a weight")
    return weights


def _described(value: Any) -> str:
    """Describe what a caller's function returned, in one line."""
    return f"an array of {value.dtype}, {value.shape}" if isinstance(value, np.ndarray) else shown(value)


@contextmanager
def _calling(what: str) -> Iterator[None]:
    """Turn an exception of a caller's function, `what`, sys.exit included, into an error of its reply alone."""
    try:
        yield
    except BimetalError:
        raise
    except BaseException as error:
        raise BimetalError(f"the {what} of the reply failed: {type(error).__name__}: {error}") from error


class Sampler:
    """Sampler of one reply: its random numbers, and the tokens that penalties count.

    penalizes  whether the host changes logits before the choice, by penalties, a bias or a guide, or weights
    is_argmax  whether a backend may take the largest logit without copying the row to the host
    """

    def __init__(self, sampling: Sampling, prompt: Iterable[int] = ()):
        self.sampling = sampling
        self.reply: Counter[int] = Counter()
        self.seen = set(prompt) if sampling.repetition_penalty != 1 else set()
        self.guide = sampling.guide and sampling.guide()
        self.random = np.random.Generator(np.random.Philox(sampling.seed))
        self.peeked = np.empty(0)  # numbers of the next tokens that have been peeked at
        s = sampling
        penalties = s.repetition_penalty != 1 or s.frequency_penalty != 0 or s.presence_penalty != 0
        self.penalizes = penalties or bool(s.logit_bias) or self.guide is not None or s.reweigh is not None
        # with `reweigh`, a temperature of 0 takes the largest of the weights that it returns
        self.draw_options = s if s.temperature or s.reweigh is None else replace(s, temperature=1.0)
        self.is_argmax = s.temperature == 0 and not self.penalizes

    def numbers(self, rows: int) -> np.ndarray:
        """Take the random numbers, 0 to 1, of the next `rows` tokens."""
        if not self.peeked.size:
            return self.random.random(rows)
        out = self.peek(rows)
        self.peeked = self.peeked[rows:]
        return out

    def peek(self, rows: int) -> np.ndarray:
        """Return the random numbers of the next `rows` tokens without taking them."""
        if len(self.peeked) < rows:
            self.peeked = np.concatenate([self.peeked, self.random.random(rows - len(self.peeked))])
        return self.peeked[:rows]

    def accept(self, token: int) -> None:
        """Count a token of the reply."""
        self.reply[token] += 1
        if self.guide is not None:
            with _calling("guide"):
                self.guide.accept(token)
        if self.sampling.repetition_penalty != 1:
            self.seen.add(token)

    def pick(self, row: np.ndarray) -> int:
        """Choose the next token from row (vocab,) float32; NaN logits are refused."""
        if np.isnan(row).any():
            raise NotFiniteError(f"{np.isnan(row).sum()} of {row.size} logits are NaN")
        if self.penalizes:
            row = self._penalized(row)
        s = self.sampling
        if s.temperature == 0 and s.reweigh is None:
            return int(row.argmax())
        weights = draw_weights(row, self.draw_options)
        if s.reweigh is not None:
            with _calling("function reweigh"):
                weights = check_weights(s.reweigh(weights), weights)
            if s.temperature == 0:
                return int(weights.argmax())
        sums = np.cumsum(weights)
        at = min(int(self.numbers(1)[0] * float(sums[-1])), int(sums[-1]) - 1)
        return int(np.searchsorted(sums, np.uint64(at), side="right"))

    def _penalized(self, row: np.ndarray) -> np.ndarray:
        s, row = self.sampling, row.astype(np.float32)
        with np.errstate(all="ignore"):  # sums may exceed the range of float32
            if self.seen:
                ids = np.fromiter(self.seen, np.int64)
                row[ids] = np.where(row[ids] > 0, row[ids] / s.repetition_penalty, row[ids] * s.repetition_penalty)
            if self.reply:
                ids = np.fromiter(self.reply, np.int64)
                counts = np.fromiter(self.reply.values(), np.float32)
                row[ids] -= s.frequency_penalty * counts + s.presence_penalty
            if s.logit_bias:
                ids = np.fromiter(s.logit_bias, np.int64)
                row[ids] += np.fromiter(s.logit_bias.values(), np.float32)
        largest = np.finfo(np.float32).max
        row = row.clip(-largest, largest)
        if self.guide is None:
            return row
        with _calling("guide"):
            allowed = self.guide.allowed()
            if allowed is None:
                return row
            if not isinstance(allowed, np.ndarray) or (allowed.shape, allowed.dtype) != (row.shape, np.bool_):
                raise UsageError(
                    f"the guide allowed {_described(allowed)}; it must return an array of bool, {row.shape}"
                )
            if not allowed.any():
                raise BimetalError("the grammar of the reply allows no further token")
            return np.where(allowed, row, -np.inf)


class Ahead(Sampler):
    """A copy of `sampler` for rows at `depths` tokens after the end of the text.

    Each row is drawn with the random number of the token at its position; `sampler` does not advance.
    """

    def __init__(self, sampler: Sampler, depths: np.ndarray):
        self.__dict__ |= vars(sampler)
        self.random_numbers = sampler.peek(depths.max() + 1)[depths]

    def numbers(self, rows: int) -> np.ndarray:
        out, self.random_numbers = self.random_numbers[:rows], self.random_numbers[rows:]
        return out


GREEDY = Sampler(Sampling())


class Samplers:
    """The samplers of a step's rows, one sequence after another; none of them penalizes.

    of_sequences  (sampler, number of rows) of each sequence
    is_argmax     whether all rows take their largest logit
    prepared      place for a backend's form of the samplers, which may serve several steps
    """

    def __init__(self, of_sequences: Sequence[tuple[Sampler, int]]):
        self.of_sequences = of_sequences
        self.prepared: Any = None
        self.is_argmax = all([sampler.is_argmax for sampler, _ in of_sequences])

    @property
    def of_rows(self) -> list[Sampler]:
        """Return the sampler of each row."""
        return [sampler for sampler, rows in self.of_sequences for _ in range(rows)]

    def pick(self, rows: np.ndarray) -> np.ndarray:
        """Choose the next token of each of rows (T, vocab) float32: (T,) int32, NOT_A_TOKEN for a row with NaN."""
        return np.array([_picked(each, row) for each, row in zip(self.of_rows, rows, strict=True)], np.int32)


def _picked(sampler: Sampler, row: np.ndarray) -> int:
    try:
        return sampler.pick(row)
    except NotFiniteError:
        return NOT_A_TOKEN
