"""The DFlash2 draft (z-lab and Inco AI, 2026): DFlash with convolutions along the block, and a selector of candidates.

Each position has candidates, the most probable by the block's logits. The selector scores each pair of candidates that
follow one another: the logit of the second, plus the sum over the ranks of row `first` of `selector_before`, row
`second` of `selector_after` and the hidden state of the second's position times `selector_hidden`. Their softmax, over
the candidates of a position, is the draft's distribution after each candidate of the position before.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.coupled import Coupling
from common.models.dflash import DflashPair
from common.models.pair import Pass
from common.ops import Array
from common.step import State


@dataclass(frozen=True)
class Dflash2Pair(DflashPair):
    """A target and its DFlash2 draft."""

    @property
    def block_tokens(self) -> int:
        return 0

    def drafting(
        self, token: int, k: int, depth: int, coupling: Coupling | None = None
    ) -> Generator[Pass, Any, tuple[np.ndarray, ...]]:
        """Draft as Pair.drafting does: row j of a position follows candidate j of the previous position."""
        ops, w, c = self.ops, self.draft_weights, self.draft
        n = min(depth, c.tokens)
        logits, scales = yield Pass(token, n, 0)
        ids, logp = ops.top_k(logits, c.candidates)
        after = ops.embed(w.selector_after, ids.reshape(-1))
        before = ops.embed(w.selector_before, ids.reshape(-1))
        first = ops.embed(w.selector_before, np.array([token], np.int32))
        best, logs = ops.read_all(ids, logp)
        known, *tables, scale = ops.read_all(first, before, after, scales)
        shape = (n, c.candidates, c.selector_rank)
        rows, own = (table.reshape(shape) for table in tables)
        rows = np.concatenate([np.broadcast_to(known, (1, *shape[1:])), rows[:-1]])
        return scored(best, logs, rows * scale[:, None], own, k, coupling)

    def propose(self, state: State, inputs: int) -> Array:
        return self.run_pass(state, inputs)[0][: self.draft.tokens]


def scored(
    ids: np.ndarray, logits: np.ndarray, before: np.ndarray, after: np.ndarray, k: int, coupling: Coupling | None
) -> tuple[np.ndarray, ...]:
    """Return the best k candidates after each of the position before, as Pair.drafting.

    ids, logits    (n, K): candidates of each position, and their logits up to a constant per position
    before, after  (n, K, rank): factors of the previous position's candidates, scaled, and of the position's own
    """
    logp = logits[:, None] + before @ after.swapaxes(1, 2)
    logp -= logp.max(-1, keepdims=True)
    logp -= np.log(np.exp(logp).sum(-1, keepdims=True))
    order = np.argsort(-logp, axis=-1, kind="stable")
    best, logp = np.take_along_axis(ids[:, None], order, -1), np.take_along_axis(logp, order, -1)
    best, logp = (best[..., :k], logp[..., :k]) if coupling is None else coupling.ranked(best, logp, k)
    following = (best[..., None] == ids[:, None, None]).argmax(-1)
    following[-1] = -1
    return best, logp, following
