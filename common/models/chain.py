"""A target and a draft that drafts one token after another, each from the draft's own output at the token before."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np

from common.coupled import Coupling
from common.models import Model
from common.models.pair import Pair
from common.ops import Array
from common.step import State, Step
from common.storage import LayerSpec
from common.weights import Layout

DEEPEST = 5  # tokens that one chain has at most: each takes a pass of the head, and is accepted less often


@dataclass(frozen=True)
class ChainPair(Pair):
    """A pair whose draft is one more layer, and whose steps all write that layer's keys and values.

    tables  the draft's weights as its file names them
    """

    tables: Layout
    spec: ClassVar[str] = "chain"

    @abstractmethod
    def _first(self, step: Step) -> Array:
        """Any rows of a hidden state's width: of the first pass only row 0 counts, and that row reads the state."""

    @abstractmethod
    def _pass(self, state: State, step: Step, hidden: Array) -> Array:
        """The draft's hidden states (T, n) of the step's rows, of which each reads the row of `hidden` before it."""

    @abstractmethod
    def _head(self, hidden: Array) -> Array:
        """The draft's logits of rows that `_pass` returned."""

    @property
    def held(self) -> tuple[Layout, list[LayerSpec]]:
        return replace(self.layout, layers=[*self.layout.layers, *self.tables.layers]), self.sequence_spec

    @property
    def budgets(self) -> Sequence[int]:
        return range(DEEPEST + 1)

    @property
    def target(self) -> Model:
        """The pair itself: the draft's rows are written in each step, because no later one could catch up."""
        return self

    def drafted(
        self, state: State, token: int, k: int, depth: int, coupling: Coupling | None = None
    ) -> tuple[np.ndarray, ...]:
        tokens, ids, logp = [token], list[np.ndarray](), list[np.ndarray]()
        for at in range(min(depth, DEEPEST)):
            best, chances = self.candidates(self.propose(state, tokens), k, coupling, at)
            ids.append(best)
            logp.append(chances)
            tokens.append(int(ids[-1][0, 0]))
        return np.concatenate(ids), np.concatenate(logp)

    def propose(self, state: State, tokens: Sequence[int]) -> Array:
        """Logits (1, n) over the draft's vocabulary of the token after `tokens`, which follow the state.

        Commits nothing. Each token but the first was drafted, so that the draft's output at the one before stands for
        its hidden state.
        """
        step = Step.chain(np.array(tokens, np.int32), state.length)
        return self.ops.run(self._chains[len(tokens)], state, step)[:1]

    @cached_property
    def _chains(self) -> dict[int, Any]:
        """Functions that `propose` runs, by number of tokens: kept, so that a backend may capture them."""
        return {n: partial(self._chain_logits, n) for n in range(1, DEEPEST + 1)}

    def _chain_logits(self, n: int, state: State, step: Step) -> Array:
        """The logits (1, vocab) of row n - 1. After i passes the outputs of rows 0 to i - 1 are those of a chain."""
        one_pass, x = partial(self._pass, state, step), self._first(step)
        for _ in range(n):
            x = self.ops.scope(len(self.weights.layers), one_pass, x)
        return self._head(x[n - 1 : n])
