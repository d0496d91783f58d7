"""One step for several sequences: rows lie one sequence after another, and each sequence keeps its own state.

Ops that read or write a state run once per sequence, over its rows; all others take the rows of the step at once.
`expanded_attention` is for steps of prompts, which are never joined.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from common.models import Model
from common.ops import Array, DeltaInputs, DeltaWeights, GateWeights, Ops
from common.step import PAST, State, Step


@dataclass(eq=False)
class JoinedStep(Step):
    """The rows of `parts`, the steps of one sequence each; `runs`: the rows of each part."""

    parts: Sequence[Step]
    runs: Sequence[slice]

    @classmethod
    def of(cls, parts: Sequence[Step], tokens: Any, slots: Sequence[int] | None = None) -> "JoinedStep":
        """Join steps, all of them blocks or none; `tokens` are the tokens of all steps, in order.

        slots  of each; None: 0, 1, 2, ...
        """
        slots = range(len(parts)) if slots is None else slots
        positions = np.concatenate([part.positions for part in parts])
        if len(positions) == len(parts):
            return cls.of_single_rows(tokens, positions, slots, parts)
        places = _places(tuple([len(part) for part in parts]), tuple(slots))
        parents = None
        if parts[0].parents is not None:
            parents = np.concatenate([part.parents for part in parts])
            parents += places.firsts * (parents != PAST)
        return cls(tokens, positions, parents, places.slots, parts, places.runs)

    @classmethod
    def of_single_rows(
        cls, tokens: Any, positions: np.ndarray, slots: Sequence[int] | np.ndarray, parts: Sequence[Step] = ()
    ) -> "JoinedStep":
        """Join steps of one row each, which continues the past of its own sequence.

        parts  may be left out of a step of a pool
        """
        count = len(positions)
        return cls(tokens, positions, _no_parents(count), np.asarray(slots, np.int32), parts, _single_rows(count))

    @classmethod
    def of_equal_runs(
        cls, tokens: Any, starts: Sequence[int], rows: int, slots: Sequence[int], is_block: bool = False
    ) -> "JoinedStep":
        """Join steps of `rows` rows each from positions `starts`, all of them chains, or blocks, of slots of a pool."""
        count = len(starts)
        places = _places((rows,) * count, tuple(slots))
        positions = np.add.outer(np.array(starts, np.int32), np.arange(rows, dtype=np.int32)).reshape(-1)
        return cls(tokens, positions, None if is_block else _chains(count, rows), places.slots, (), places.runs)


class Places(NamedTuple):
    """The slot and the first row of each row's sequence, (T,) int32, and the rows of each sequence."""

    slots: np.ndarray
    firsts: np.ndarray
    runs: list[slice]


@lru_cache(64)  # drafts of several replies often keep their sizes from one step to the next
def _places(sizes: tuple[int, ...], slots: tuple[int, ...]) -> Places:
    """Place sequences with `sizes` rows each in one step; the arrays are read-only."""
    starts = [0, *accumulate(sizes)]
    arrays = [np.repeat(np.array(each, np.int32), sizes) for each in (slots, starts[:-1])]
    for array in arrays:
        array.flags.writeable = False
    return Places(arrays[0], arrays[1], [slice(a, b) for a, b in pairwise(starts)])


@cache
def _single_rows(count: int) -> list[slice]:
    """Return the rows of each of `count` sequences of one row."""
    return [slice(i, i + 1) for i in range(count)]


@cache
def _chains(count: int, rows: int) -> np.ndarray:
    """Return the parents of `count` chains of `rows` rows; read-only."""
    parents = np.arange(PAST, count * rows - 1, dtype=np.int32)
    parents[::rows] = PAST
    parents.flags.writeable = False
    return parents


@cache
def _no_parents(count: int) -> np.ndarray:
    """Return the parents of rows of which each continues the past of its own sequence; read-only."""
    parents = np.full(count, PAST, np.int32)
    parents.flags.writeable = False
    return parents


class JoinedState:
    """The states of several sequences: `joined[i].kv` holds the kv of each, in the order of a step's parts.

    layer_counts  for each state the number of its layers that a step computes; later layers, a draft's, do not change
    """

    length = 0  # unused: each sequence has its own, and steps of few rows are computed alike at any length

    def __init__(self, states: Sequence[State], layer_counts: Sequence[int]):
        self.states, self.layer_counts = states, layer_counts
        self._layers: dict[int, SimpleNamespace] = {}

    def __getitem__(self, layer: int) -> SimpleNamespace:
        if layer not in self._layers:
            names = vars(self.states[0][layer])
            held = {
                name: tuple(
                    getattr(state[layer], name) if layer < count else None
                    for state, count in zip(self.states, self.layer_counts, strict=True)
                )
                for name in names
            }
            self._layers[layer] = SimpleNamespace(**held)
        return self._layers[layer]


class Joined:
    """The ops of a backend over a JoinedStep and a JoinedState."""

    def __init__(self, ops: Ops):
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def _each(self, step: JoinedStep, op: Callable[[int, slice, Step], Array]) -> Array:
        runs = zip(step.runs, step.parts, strict=True)
        return self._ops.concatenate([op(i, rows, part) for i, (rows, part) in enumerate(runs)])

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        kv: Any,
        step: JoinedStep,
        scale: float,
        window: int | None = None,
        causal: bool = False,
        sink_logits: Array | None = None,
    ) -> Array:
        attend, seen = self._ops.attention, (window, causal, sink_logits)
        return self._each(step, lambda i, at, part: attend(q[at], k[at], v[at], kv[i], part, scale, *seen))

    def write_kv(self, k: Array, v: Array, kv: Any, step: JoinedStep) -> None:
        for own, at, part in zip(kv, step.runs, step.parts, strict=True):
            if own is not None:
                self._ops.write_kv(k[at], v[at], own, part)

    def latent_attention(
        self, q_latent: Array, q_rope: Array, latent: Array, k_rope: Array, kv: Any, step: JoinedStep, scale: float
    ) -> Array:
        attend = self._ops.latent_attention
        return self._each(
            step, lambda i, at, part: attend(q_latent[at], q_rope[at], latent[at], k_rope[at], kv[i], part, scale)
        )

    def short_conv(self, x: Array, taps: Array, conv: Any, step: JoinedStep) -> Array:
        return self._each(step, lambda i, at, part: self._ops.short_conv(x[at], taps, conv[i], part))

    def parent_rows(self, x: Array, last: Any, step: JoinedStep) -> Array:
        return self._each(step, lambda i, at, part: self._ops.parent_rows(x[at], last[i], part))

    def gated_delta(
        self, q: Array, k: Array, v: Array, a: Array, b: Array, w: GateWeights, delta: Any, step: JoinedStep
    ) -> Array:
        rule = self._ops.gated_delta
        return self._each(step, lambda i, at, part: rule(q[at], k[at], v[at], a[at], b[at], w, delta[i], part))

    def delta_mixer(
        self, x: DeltaInputs, w: DeltaWeights, key_heads: int, conv: Any, delta: Any, step: JoinedStep
    ) -> Array:
        ops: Any = self
        return Ops.delta_mixer(ops, x, w, key_heads, conv, delta, step)


def joined(model: Model) -> Model:
    """Return `model` with ops for a JoinedStep and a JoinedState; weights are shared."""
    ops: Any = Joined(model.ops)
    return replace(model, ops=ops)
