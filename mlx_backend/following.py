"""Base of the ops of a group of processes on MLX: rank 0 orders each step, and the followers mirror its states."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from common.following import Follower, Join, Leader
from common.ops import Array
from common.step import State, Step
from common.storage import LayerSpec
from mlx_backend.group import Group
from mlx_backend.ops import MlxOps
from mlx_backend.states import MlxState


class SharedState(MlxState):
    can_save = False  # followers keep parts of the state


class GroupOps(MlxOps):
    """The op contract on this process's part of a model.

    sends_tokens  whether followers embed the tokens of a step
    """

    runs_ahead = joins = divides = False
    sends_tokens = False

    def __init__(self, dtype: mx.Dtype, group: Group):
        super().__init__(dtype)
        self.group, self._leader = group, Leader(group)
        self.answers: Mapping[str, Callable[[], Any]] = {}
        weakref.finalize(self, group.close)

    def own_spec(self, spec: Sequence[LayerSpec]) -> Sequence[LayerSpec]:
        """List the states that this process stores for a sequence, by layer."""
        return spec

    def new_state(self, spec: Sequence[LayerSpec], capacity: int) -> State:
        state = super().new_state(self.own_spec(spec), capacity)
        if self.group.rank:
            return state
        mirror = self._leader.new_state(capacity)
        return SharedState([*map(vars, state.layers), {"mirror": mirror}], capacity)

    def run(self, fn: Callable[[State, Step], Array], state: State, step: Step, needed: slice | None = None) -> Array:
        """Run fn(state, step); `fn` is a partial of a method of the model, of integers and of its output's `rows`."""
        assert isinstance(fn, partial)
        if self.group.rank == 0:
            self._order(fn, state, step)
            with self.group.whole_step():
                return self.finished(super().run(fn, state, step, needed))
        return self.finished(super().run(fn, state, step, needed))

    def finished(self, out: Array) -> Array:
        """Return the output of a step's method, once the ranks need no further exchange for it."""
        return out

    def follow(self, models: Sequence[Any], join: Join) -> None:
        """Follow rank 0's orders until it ends; arguments as in Follower."""
        Follower(self, models, join).run(self.group)

    def _order(self, fn: "partial[Array]", state: Any, step: Step) -> None:
        """Order a step of one sequence or several."""
        mirrors = state[-1].mirror
        is_joined = isinstance(mirrors, tuple)
        states = [mirror.id for mirror in (mirrors if is_joined else [mirrors])]
        tokens = np.asarray(step.tokens) if self.sends_tokens else np.zeros(len(step), np.int32)
        self._leader.step(fn, step, tokens, {"states": states, "own": list(state.layer_counts) if is_joined else None})
