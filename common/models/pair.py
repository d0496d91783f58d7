"""A target and its draft as one model: the target's layers come first in a state, the draft's after them."""

from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from common.coupled import Coupling
from common.errors import BimetalError, UsageError
from common.kv_cache import check_pairs, packed
from common.models import Model
from common.models.blocks import head_product
from common.models.taps import tapped
from common.ops import Array
from common.step import State, Step
from common.storage import LayerSpec


class Pass(NamedTuple):
    """A pass of a draft over rows that follow the state of one sequence.

    inputs     argument of `Pair.run_pass`
    positions  number of positions after the newest token whose logits are used
    k          number of most probable tokens of each position that the host reads; 0: the result stays on the device
    """

    inputs: Any
    positions: int
    k: int


@dataclass(frozen=True)
class Pair(Model):
    """A target that also writes its draft's state, so that one commit advances both and the draft reads no prompt.

    draft          the draft's configuration
    draft_weights  the draft's weights, on the target's backend
    spec           the default speculative mode
    """

    repeats = False  # a draft's window is copied from a place that changes
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
        """List the depths of a chain among which a budget is chosen, ascending, from 0 to the deepest of `drafted`."""

    @property
    def taps(self) -> Sequence[int]:
        """List the layers of the target from whose outputs, beside the last layer's, the draft's rows are computed."""
        return ()

    @abstractmethod
    def last_layers(self, state: State, step: Step, rows: slice, layers: range, outputs: Mapping[int, Array]) -> Array:
        """Compute the target's `layers` to the last one, and write the draft's rows of the step to the state.

        Returns the logits (n, vocab) of `rows`. Earlier layers have computed step.hidden, and `outputs`: the output
        (T, hidden) of each tap among them, by layer.
        """

    def _first_layers(self, state: State, step: Step, layers: range) -> tuple[Array, ...]:
        """Compute `layers`, without the model's last; return x (T, hidden), and the outputs of taps among them."""
        x, taken = tapped(self, self.taps, state, step, slice(None), layers)
        return x, *taken.values()

    def _tapped_to_last(
        self, state: State, step: Step, rows: slice, layers: range, outputs: Mapping[int, Array]
    ) -> tuple[Array, list[Array]]:
        """Compute `layers` as `last_layers` does; return the logits of `rows` and the outputs of all taps, in order."""
        logits, taken = tapped(self, self.taps, state, step, rows, layers)
        return logits, [taken[i] if i in taken else outputs[i] for i in self.taps]

    def _logits(self, state: State, step: Step, rows: slice) -> Array:
        return self.last_layers(state, step, rows, range(len(self.weights.layers)), {})

    def forward_in_parts(self, state: State, step: Step, rows: slice) -> Generator[None, None, Array]:
        if not self.divides(len(step)):
            return self.forward(state, step, rows)
        ops, outputs = self.ops, dict[int, Array]()
        *first, last = self.layer_parts
        for layers in first:
            x, *taken = map(ops.computed, ops.run(partial(self._first_layers, layers=layers), state, step))
            outputs.update(zip([i for i in layers if i in self.taps], taken, strict=True))
            step = replace(step, hidden=x)
            yield
        return ops.run(partial(self.last_layers, rows=rows, layers=last, outputs=outputs), state, step)

    @abstractmethod
    def drafting(
        self, token: int, k: int, depth: int, coupling: Coupling | None = None
    ) -> Generator[Pass, Any, tuple[np.ndarray, ...]]:
        """Draft the tokens after `token`, which follows a state: yields passes, receives `found` of each.

        Returns ids and log-probabilities of the `k` best tokens of each position, (n, k) each, on the host; n is
        at most `depth` where each position costs time of its own. Where a position depends on the token before, they
        are (n, w, k), rows of candidates, of which row 0 of position 0 follows `token`; and a third array (n, w, k)
        has the row of the next position that follows each candidate, -1 for none.

        coupling  random numbers of the target for at least `depth` tokens, by which candidates are ranked
        """

    @abstractmethod
    def pass_step(self, inputs: Any, length: int) -> Step:
        """Return the step of a pass after `length` committed tokens."""

    @abstractmethod
    def propose(self, state: State, inputs: Any) -> Array:
        """Compute logits (n, vocab) of the draft's tokens after the newest token; commits nothing."""

    @abstractmethod
    def run_pass(self, state: State, inputs: Any) -> Any:
        """Compute a pass; more rows may follow those of draft tokens, and more arrays may come with the logits."""

    @property
    def shares_passes(self) -> bool:
        """Test whether a pass may have rows of several sequences."""
        return True

    @property
    def block_tokens(self) -> int:
        """Return the number of tokens that one pass gives, none of which depends on another; 0: there is no such pass.

        Their logits are in adjacent rows of `propose_each`.
        """
        return 0

    def draft_chains(self, state: Any, step: Step, rows: int, count: int) -> Array:
        """Draft `count` tokens after each sequence's newest one by a pass as `propose_each`: Ops.run_chains.

        Only drafts with `block_tokens` do.
        """
        raise NotImplementedError(f"{self.spec} drafts give no tokens by blocks")

    @abstractmethod
    def propose_each(self, state: Any, step: Step, rows: int) -> Array:
        """Compute a pass of several sequences with `rows` rows of `step` each; return the logits of all, (m, vocab)."""

    @abstractmethod
    def rows_of_each(self, number: int, rows: int) -> slice:
        """Return the slice of the result of `propose_each` that belongs to sequence `number`, counted from 0."""

    def found(self, passed: Any, request: Pass) -> Any:
        """Read the requested results of a pass: ids and log-probabilities, (n, k) each; or return its rows."""
        if request.k:
            return self.ops.read_all(*self.ops.top_k(passed[: request.positions], request.k))
        if isinstance(passed, tuple):
            return tuple(part[: request.positions] for part in passed)
        return passed[: request.positions]

    def drafted(
        self, state: State, token: int, k: int, depth: int, coupling: Coupling | None = None
    ) -> tuple[np.ndarray, ...]:
        """Draft for one sequence as `drafting` does; commits nothing."""
        drafting, found = self.drafting(token, k, depth, coupling), None
        while True:
            try:
                request = drafting.send(found)
            except StopIteration as done:
                answer: tuple[np.ndarray, ...] = done.value
                return answer
            found = self.found(self.run_pass(state, request.inputs), request)

    def ranked(
        self, ids: np.ndarray, logp: np.ndarray, k: int, coupling: Coupling | None, position: int = 0
    ) -> tuple[np.ndarray, ...]:
        """Return the `k` best of the tokens that `found` gave, as `drafting` returns them.

        position  position that row 0 predicts, counted from 0 at the first token after the newest
        """
        ids = self.of_target(ids)
        return (ids, logp) if coupling is None else coupling.ranked(ids, logp, k, position)

    def of_target(self, ids: np.ndarray) -> np.ndarray:
        """Return the target's ids of tokens of the draft's vocabulary."""
        return ids

    @cached_property
    def sequence_spec(self) -> list[LayerSpec]:
        """List the target's states, then the draft's; the draft's caches have the formats of the target's.

        Raises UsageError for formats that the backend lacks, and if the draft's heads cannot be stored in them.
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
        """Return the model for steps after which nothing is drafted, over the same state."""

    def head_logits(self, x: Any) -> Any:
        """Return the logits (n, vocab) of x (n, hidden), normed, by the target's head."""
        return head_product(self.ops, self.config, self.weights, x)
