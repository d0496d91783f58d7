"""A target and its draft as one model: the target's layers come first in a state, the draft's after them."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from common.coupled import Coupling, considered
from common.errors import BimetalError, UsageError
from common.kv_cache import check_pairs, packed
from common.models import Model
from common.ops import Array
from common.step import State
from common.storage import LayerSpec


@dataclass(frozen=True)
class Pair(Model):
    """A target that also fills its draft's state, so that one commit moves both and the draft reads no prompt.

    draft          the draft's configuration
    draft_weights  the draft's weights, on the target's backend
    spec           the speculative mode that is chosen where none is given
    """

    draft: Any
    draft_weights: SimpleNamespace
    spec: ClassVar[str]

    @property
    @abstractmethod
    def draft_spec(self) -> list[LayerSpec]:
        """List what each layer of the draft stores for a sequence."""

    @property
    @abstractmethod
    def budgets(self) -> Sequence[int]:
        """Depths of a chain among which a budget is chosen, ascending, from 0 to the deepest that `drafted` gives."""

    @abstractmethod
    def drafted(
        self, state: State, token: int, k: int, depth: int, coupling: Coupling | None = None
    ) -> tuple[np.ndarray, ...]:
        """Draft the tokens after `token`, which follows the state; commits nothing.

        Returns ids and log-probabilities of the `k` likeliest tokens of each position, (n, k) each, on the host; n is
        at most `depth` where each position costs time of its own. Where a position depends on the token before, they
        are (n, w, k), rows of candidates, of which row 0 of position 0 follows `token`; and a third array (n, w, k)
        has the row of the next position that follows each candidate, -1 for none.

        coupling  how the target will draw at least `depth` tokens: those that it most probably draws count as likeliest
        """

    def candidates(self, logits: Array, k: int, coupling: Coupling | None, at: int = 0) -> tuple[np.ndarray, ...]:
        """The `k` best tokens of each row of the draft's logits (n, vocab), as `drafted` returns them.

        at  position after the newest token that row 0 predicts, from 0
        """
        ids, logp = self.ops.read_all(*self.ops.top_k(logits, considered(k, coupling, logits.shape[-1])))
        ids = self.of_target(ids)
        return (ids, logp) if coupling is None else coupling.ranked(ids, logp, k, at)

    def of_target(self, ids: np.ndarray) -> np.ndarray:
        """The target's ids of tokens of the draft's vocabulary."""
        return ids

    @cached_property
    def sequence_spec(self) -> list[LayerSpec]:
        """List the target's states, then the draft's, whose caches take the formats that the target's have.

        Raises UsageError for formats that the backend lacks, and where the draft's heads cannot be stored in them.
        """
        draft = packed(self.draft_spec, replace(self.cache, boundary=0))
        try:
            check_pairs(draft, self.ops.name, self.ops.cache_pairs)
        except BimetalError as error:
            raise UsageError(f"the draft's cache takes the formats of the model's ({self.cache}): {error}") from error
        return [*self.state_spec, *draft]

    @property
    @abstractmethod
    def target(self) -> Model:
        """The model for steps after which nothing is drafted, over the same state."""

    def head_logits(self, x: Any) -> Any:
        """The logits (n, vocab) of x (n, hidden), normed, by the target's head."""
        return self.ops.linear(x, self.weights.embed if self.weights.head is None else self.weights.head)
