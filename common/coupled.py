"""Rank a draft's candidates by the random numbers that the target will draw its tokens with.

Sampling inverts the cumulative probabilities, in order of ids, with one random number per position, which is known
before the draft runs (common/sampling.py). The draft therefore proposes the tokens that the target will most probably
draw with these numbers, in place of its own most probable ones. This changes the speed, never the text.
"""

from typing import NamedTuple

import numpy as np

from common.sampling import Sampling

CANDIDATES = 32  # tokens of a position that are ranked; more gain little, and need more rounds of top-k on a GPU
UNLIKELY = 1e-9  # least probability of a candidate
LOGISTIC = 1.7  # scale of the logistic distribution that is nearest to the normal one


class Trust(NamedTuple):
    """Parameters by which a draft's distribution estimates the target's.

    flatter    factor on the target's temperature, because drafts are too sure of their tokens
    min_temperature  lower bound of the draft's temperature
    certainty  number of draws from the target that would be worth as much as the draft's distribution
    doubt      weight of the draft's own probabilities in the result, for targets that differ much from the draft
    """

    flatter: float
    min_temperature: float
    certainty: float
    doubt: float


ONE, SEVERAL = Trust(1.5, 1.0, 6.0, 0.0), Trust(1.75, 1.2, 2.0, 0.3)  # for the best token of a chain; for a tree


def considered(k: int, coupling: "Coupling | None", vocab: int) -> int:
    """Count the candidates among which the best `k` of a draft's `vocab` tokens are searched."""
    return k if coupling is None else min(max(k, CANDIDATES), vocab)


class Coupling(NamedTuple):
    """Random numbers with which the target will draw the tokens after the newest one.

    sampling  of the reply; its temperature is above 0
    numbers   (n,), 0 to 1, of the next n tokens
    """

    sampling: Sampling
    numbers: np.ndarray

    def ranked(self, ids: np.ndarray, logp: np.ndarray, k: int, position: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Choose the `k` candidates that the target most probably draws, best first, and their log-probabilities.

        ids, logp  (n, ..., m): candidates of n positions, most probable first, and their log-probabilities. The
                   first position uses random number `position`.

        The target's cumulative probability, where the draft's is c, is taken as a random quantity with mean c and
        variance c (1 - c) / (1 + certainty), as those of a Dirichlet distribution around the draft's; its distribution
        function is taken as a logistic one. A candidate's probability is that of the number lying in its share; with
        weight `doubt` the draft's own probability, which ignores the number, is mixed in.
        """
        trust = ONE if k == 1 else SEVERAL
        m, rows = ids.shape[-1], ids.reshape(-1, ids.shape[-1])
        number = np.repeat(self.numbers[position : position + len(ids)], len(rows) // len(ids))[:, None]
        first = np.arange(0, rows.size, m)[:, None]  # where a row begins among all candidates
        order = rows.argsort(axis=-1) + first
        shares = self._probabilities(logp.reshape(rows.shape), trust).take(order)
        below = shares.cumsum(axis=-1)[:, :-1].clip(UNLIKELY, 1 - UNLIKELY)
        passed = np.zeros((len(rows), m + 1))  # probabilities that the number lies beyond the first n candidates
        passed[:, 0] = 1
        deviations = (number - below) / np.sqrt(below * (1 - below) / (1 + trust.certainty))
        passed[:, 1:-1] = 0.5 + 0.5 * np.tanh(LOGISTIC / 2 * deviations)
        drawn = np.empty(rows.shape)
        drawn.put(order, (1 - trust.doubt) * (passed[:, :-1] - passed[:, 1:]) + trust.doubt * shares)
        best = drawn.argmax(axis=-1)[:, None] if k == 1 else (-drawn).argsort(axis=-1, kind="stable")[:, :k]
        best += first
        logs = np.log(drawn.take(best).clip(UNLIKELY)).astype(np.float32)
        shape = (*ids.shape[:-1], best.shape[-1])
        return rows.take(best).reshape(shape), logs.reshape(shape)

    def _probabilities(self, logp: np.ndarray, trust: Trust) -> np.ndarray:
        """Compute the draft's distribution over candidates (..., m), best first, truncated as the target's is."""
        s, m = self.sampling, logp.shape[-1]
        p = np.exp(
            (logp.astype(np.float64) - logp[..., :1]) / max(trust.min_temperature, trust.flatter * s.temperature)
        )
        if 0 < s.top_k < m:
            p[..., s.top_k :] = 0
        p /= p.sum(axis=-1, keepdims=True)
        if s.top_p < 1:
            p[p.cumsum(axis=-1) - p >= s.top_p] = 0
        if s.min_p:
            p[p < s.min_p * p[..., :1]] = 0
        return p / p.sum(axis=-1, keepdims=True)
