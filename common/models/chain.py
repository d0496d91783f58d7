"""Pairs whose draft proposes one token after another, each from its own output at the token before."""

from abc import abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np

from common.coupled import Coupling, considered
from common.fit import Blueprint
from common.models import Model
from common.models.pair import Pair, Pass
from common.ops import Array
from common.step import State, Step
from common.weights import Layout

DEEPEST = 5  # maximum tokens of a chain: each takes a pass of the head, and is accepted less often than the previous


@dataclass(frozen=True)
class ChainPair(Pair):
    """A pair whose draft is one additional layer; every step writes the keys and values of that layer.

    tables  the draft's weights, by the names in its file
    """

    tables: Layout
    spec: ClassVar[str] = "chain"

    @abstractmethod
    def _first(self, step: Step) -> Array:
        """Return any hidden states: in the first pass only row 0 is used, and takes its hidden state from `state`."""

    @abstractmethod
    def _pass(self, state: State, step: Step, hidden: Array) -> Array:
        """Compute the draft's hidden states (T, n) of the step's rows; each row reads the row of `hidden` before it."""

    @abstractmethod
    def _head(self, hidden: Array) -> Array:
        """Compute the draft's logits of rows that `_pass` returned."""

    @property
    def blueprint(self) -> Blueprint:
        layout = replace(self.layout, layers=[*self.layout.layers, *self.tables.layers])
        return Blueprint(self.config, layout, self.sequence_spec)

    @property
    def budgets(self) -> Sequence[int]:
        return range(DEEPEST + 1)

    @property
    def target(self) -> Model:
        """Return the pair itself: each step writes the draft's rows, because no later step could write them."""
        return self

    def drafting(
        self, token: int, k: int, depth: int, coupling: Coupling | None = None
    ) -> Generator[Pass, Any, tuple[np.ndarray, ...]]:
        tokens, ids, logp = [token], list[np.ndarray](), list[np.ndarray]()
        for at in range(min(depth, DEEPEST)):
            best, logs = yield Pass(tuple(tokens), 1, considered(k, coupling, self.config.vocab))
            best, logs = self.ranked(best, logs, k, coupling, at)
            ids.append(best)
            logp.append(logs)
            tokens.append(int(ids[-1][0, 0]))
        return np.concatenate(ids), np.concatenate(logp)

    def pass_step(self, inputs: Sequence[int], length: int) -> Step:
        return Step.chain(np.array(inputs, np.int32), length)

    def propose(self, state: State, inputs: Sequence[int]) -> Array:
        """Compute logits (1, n), in the draft's vocabulary, of the token after the state and the tokens `inputs`.

        Commits nothing. Each token but the first was drafted: its hidden state is the draft's output one token before.
        """
        return self.ops.run(self._chains[len(inputs)], state, self.pass_step(inputs, state.length))[:1]

    def run_pass(self, state: State, inputs: Sequence[int]) -> Array:
        return self.propose(state, inputs)

    def propose_each(self, state: Any, step: Step, rows: int) -> Array:
        return self.ops.run(self._joined_chains[rows], state, step)

    def rows_of_each(self, number: int, rows: int) -> slice:
        return slice(number, number + 1)

    @cached_property
    def _chains(self) -> dict[int, Any]:
        """Build the functions that `propose` runs, by number of tokens; kept, so that a backend can capture them."""
        return {n: partial(self._chain_logits, n) for n in range(1, DEEPEST + 1)}

    @cached_property
    def _joined_chains(self) -> dict[int, Any]:
        """Build functions like `_chains`, for steps of several sequences that have this number of tokens each."""
        return {n: partial(self._each_chain_logits, n) for n in range(1, DEEPEST + 1)}

    def _chain_logits(self, n: int, state: State, step: Step) -> Array:
        """Compute the logits (1, vocab) of row n - 1. After i passes rows 0 to i - 1 have the outputs of a chain."""
        return self._head(self._chain(n, state, step)[n - 1 : n])

    def _each_chain_logits(self, n: int, state: State, step: Step) -> Array:
        """Return the logits of the last of each n rows."""
        return self._head(self._chain(n, state, step)[n - 1 :: n])

    def _chain(self, n: int, state: State, step: Step) -> Array:
        one_pass, x = partial(self._pass, state, step), self._first(step)
        for _ in range(n):
            x = self.ops.scope(len(self.weights.layers), one_pass, x)
        return x
