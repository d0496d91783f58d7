"""The DSpark draft (Cheng et al., arXiv 2607.05147): DFlash's block, and a bias by the previous token.

The bias of every token after token u is `markov_after` times row u of `markov_before`, a product of low rank. It is
added to the block's logits from left to right, so that each draft token depends on the one before. The confidence head
of such drafts is not read: the number of verified tokens is chosen by the measured time and acceptance of steps.
"""

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from common.coupled import Coupling, considered
from common.models.dflash import DflashPair
from common.models.pair import Pass
from common.ops import Array


@dataclass(frozen=True)
class DsparkPair(DflashPair):
    """A target and its DSpark draft."""

    @property
    def block_tokens(self) -> int:
        return 0

    def drafting(
        self, token: int, k: int, depth: int, coupling: Coupling | None = None
    ) -> Generator[Pass, Any, tuple[np.ndarray, ...]]:
        """Draft as Pair.drafting: row j of a position follows token j of the first row of the previous position."""
        logits: Array = yield Pass(token, min(depth, self.draft.tokens), 0)
        levels = list[tuple[Array, Array]]()
        before: Array = np.array([token], np.int32)
        last = len(self.weights.layers) + self.draft.layers - 1
        most = considered(k, coupling, logits.shape[-1])
        for at in range(logits.shape[0]):
            level = self.ops.scope(last, partial(self._after, before, most), logits[at : at + 1])
            if coupling is not None:  # the host decides which tokens are continued
                best, logs = self.ops.read_all(*level)
                best, logs = coupling.ranked(best[None], logs[None], k, at)
                level = best[0], logs[0]
            levels.append(level)
            before = level[0][0]
        read = levels if coupling is not None else [self.ops.read_all(*level) for level in levels]
        ids, logp = zip(*read, strict=True)
        return joined(ids), joined(logp), following(joined(ids))

    def _after(self, before: Array, k: int, logits: Array) -> tuple[Array, Array]:
        """Find the most probable tokens (n, k) after `before` (n,), and log-probabilities, by logits (1, vocab)."""
        ops, w = self.ops, self.draft_weights
        bias = ops.linear(ops.embed(w.markov_before, before), w.markov_after)
        return ops.top_k(ops.add(bias, logits), k)


def joined(levels: tuple[np.ndarray, ...]) -> np.ndarray:
    """Join levels (1, k), (k, k), (k, k), ... to one array (n, k, k), with the first level's row repeated."""
    return np.stack([np.broadcast_to(level, (level.shape[1], level.shape[1])) for level in levels])


def following(ids: np.ndarray) -> np.ndarray:
    """Map each of the candidates (n, k, k) to the next position's row: the index of its token in row 0, or -1.

    Candidates of the last position have no next row.
    """
    same = ids[:, :, :, None] == ids[:, None, None, 0, :]
    rows = np.where(same.any(-1), same.argmax(-1), -1)
    rows[-1] = -1
    return rows
