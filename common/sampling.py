"""From a row of logits to a token, on the host: the definition of every sampling parameter.

Order: penalties, temperature, top-k, top-p, min-p, then one draw. One uniform number is consumed per token, so a seed
gives the same text whatever decoder asks, as long as it asks in the order of the text.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from common.errors import NotFiniteError, UsageError


@dataclass(frozen=True)
class Sampling:
    """What a caller asks for; the defaults are greedy decoding without penalties.

    temperature         0 is greedy
    top_p, min_p        shares of probability, (0, 1] and [0, 1); top_k tokens, 0 keeps all
    repetition_penalty  divides the logits of tokens seen in prompt or reply (Keskar et al., arXiv 1909.05858)
    frequency_penalty, presence_penalty   subtracted per occurrence, or once, for tokens of the reply (OpenAI's rule)
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, ok, rule in (
            ("temperature", 0 <= self.temperature < np.inf, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 and below 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < np.inf, "above 0"),
            ("frequency_penalty", abs(self.frequency_penalty) < np.inf, "finite"),
            ("presence_penalty", abs(self.presence_penalty) < np.inf, "finite"),
            ("seed", self.seed is None or self.seed >= 0, "at least 0"),
        ):
            if not ok:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be {rule}")


def log_softmax(row: np.ndarray) -> np.ndarray:
    """row (vocab,) float32 -> log-probabilities, summed in float64"""
    shifted = row.astype(np.float64) - row.max()
    return shifted - np.log(np.exp(shifted).sum())


def top_k(rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """rows (T, vocab) float32 -> ids (T, k) int32 and log-probabilities (T, k) float32, best first.

    Of equal logits the smaller id comes first; NaN logits are refused.
    """
    if np.isnan(rows).any():
        raise NotFiniteError(f"{np.isnan(rows).sum()} of {rows.size} logits are NaN")
    k = min(k, rows.shape[-1])
    ids = np.empty((len(rows), k), np.int32)
    for i, (row, least) in enumerate(zip(rows, np.partition(rows, -k, axis=-1)[:, -k], strict=True)):
        best = np.flatnonzero(row >= least)
        ids[i] = best[np.argsort(-row[best], kind="stable")][:k]
    shifted = rows - rows.max(axis=-1, keepdims=True)
    total = np.log(np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64))
    return ids, (np.take_along_axis(shifted, ids, axis=-1) - total).astype(np.float32)


class Sampler:
    """One reply's sampling: its random numbers and the tokens that penalties count."""

    def __init__(self, sampling: Sampling, prompt: Iterable[int] = ()):
        self.sampling = sampling
        self.reply: Counter[int] = Counter()
        self.seen = set(prompt) if sampling.repetition_penalty != 1 else set()
        self.random = np.random.Generator(np.random.Philox(sampling.seed))

    @property
    def penalizes(self) -> bool:
        s = self.sampling
        return s.repetition_penalty != 1 or s.frequency_penalty != 0 or s.presence_penalty != 0

    @property
    def is_argmax(self) -> bool:
        """May a backend take the largest logit and never show the row to the host?"""
        return self.sampling.temperature == 0 and not self.penalizes

    def accept(self, token: int) -> None:
        """Count a token of the reply."""
        self.reply[token] += 1
        if self.sampling.repetition_penalty != 1:
            self.seen.add(token)

    def pick(self, row: np.ndarray) -> int:
        """row (vocab,) float32 -> the next token; NaN logits are refused."""
        if np.isnan(row).any():
            raise NotFiniteError(f"{np.isnan(row).sum()} of {row.size} logits are NaN")
        if self.penalizes:
            row = self._penalized(row)
        s = self.sampling
        if s.temperature == 0:
            return int(row.argmax())
        order = np.argsort(-row, kind="stable")  # ties go to the smaller id, as argmax does
        if s.top_k:
            order = order[: s.top_k]
        scaled = row[order].astype(np.float64) / s.temperature
        p = np.exp(scaled - scaled[0])
        p /= p.sum()
        keep = len(p)
        if s.top_p < 1:
            keep = int(np.searchsorted(np.cumsum(p), s.top_p)) + 1  # the token that crosses top_p stays
        if s.min_p > 0:
            keep = min(keep, int(np.count_nonzero(p >= s.min_p * p[0])))
        p = p[:keep] / p[:keep].sum()
        draw = self.random.random()
        return int(order[min(int(np.searchsorted(np.cumsum(p), draw, side="right")), keep - 1)])

    def _penalized(self, row: np.ndarray) -> np.ndarray:
        s, row = self.sampling, row.astype(np.float32)
        if self.seen:
            ids = np.fromiter(self.seen, np.int64)
            row[ids] = np.where(row[ids] > 0, row[ids] / s.repetition_penalty, row[ids] * s.repetition_penalty)
        if self.reply:
            ids = np.fromiter(self.reply, np.int64)
            counts = np.fromiter(self.reply.values(), np.float32)
            row[ids] -= s.frequency_penalty * counts + s.presence_penalty
        return row
