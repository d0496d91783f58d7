"""Base of the ops of a group of processes: rank 0 orders each step, and the followers mirror its states.

A follower has the states of its part of the model. Each `commit`, `snapshot` and `restore` of a state on rank 0 is sent
to the followers as an order.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import mlx.core as mx
import numpy as np

from common.errors import BimetalError
from common.ops import Array
from common.step import Parts, Shape, State, Step
from common.storage import LayerSpec
from mlx_backend.group import Group, Order
from mlx_backend.ops import MlxOps
from mlx_backend.states import MlxState

MIB = 2**20
# (model, states of several sequences, their layer counts, a step of each) -> what runs them as one step
Join = Callable[[Any, Sequence[State], Sequence[int], Sequence[Step]], tuple[Any, Any, Step]]


class Mirror:
    """Stands for the followers' parts of a state: sends each commit, snapshot and restore to the followers."""

    arrays: Sequence[mx.array] = ()
    nbytes = 0

    def __init__(self, group: Group, id: int, marks: "count[int]", dropped: list[Order]):
        self._group, self.id, self._marks, self._dropped = group, id, marks, dropped

    def commit(self, path: np.ndarray) -> None:
        self._group.order("commit", state=self.id, path=path.tolist())

    def snapshot(self) -> "Mark":
        mark = Mark(next(self._marks))
        weakref.finalize(mark, self._dropped.append, {"state": self.id, "mark": mark.id})
        self._group.order("snapshot", state=self.id, mark=mark.id)
        return mark

    def restore(self, snapshot: "Mark") -> None:
        self._group.order("restore", state=self.id, mark=snapshot.id)

    def row_shapes(self, tokens: int) -> list[Shape]:
        return []

    def point_shapes(self, length: int) -> list[Shape]:
        return []

    def save_rows(self, first: int, last: int) -> list[np.ndarray]:
        return []

    def save_point(self) -> list[np.ndarray]:
        return []

    def load(self, length: int, rows: list[Parts], point: list[np.ndarray]) -> None:
        raise AssertionError("a shared state cannot be saved")


class Mark:
    """A snapshot that followers keep under a number as long as this object exists."""

    def __init__(self, id: int):
        self.id = id


class SharedState(MlxState):
    can_save = False  # the followers' parts are elsewhere


class GroupOps(MlxOps):
    """The op contract on this process's part of a model.

    sends_tokens  whether followers embed the tokens of a step
    """

    runs_ahead = joins = divides = False
    sends_tokens = False

    def __init__(self, dtype: mx.Dtype, group: Group):
        super().__init__(dtype)
        self.group = group
        self._ids, self._marks = count(), count()
        self._dropped: list[Order] = []  # deleted states and marks
        weakref.finalize(self, group.close)

    def gather_memory(self, memory: int, fingerprint: int) -> list[int]:
        """Return the bytes that each rank gives to the model, in whole MiB; this rank gives `memory`.

        fingerprint  a number that is equal on all ranks if their models are equal

        Raises BimetalError if the ranks' models differ.
        """
        given = self.group.gather([memory // MIB, fingerprint])
        if len(set(given[:, 1].tolist())) > 1:
            raise BimetalError(
                "the ranks of the group have different models, float types or values of tensor_parallel; give all of "
                "them the same"
            )
        return [int(m) * MIB for m in given[:, 0]]

    def own_spec(self, spec: Sequence[LayerSpec]) -> Sequence[LayerSpec]:
        """List the states that this process stores for a sequence, by layer."""
        return spec

    def new_state(self, spec: Sequence[LayerSpec], capacity: int) -> State:
        state = super().new_state(self.own_spec(spec), capacity)
        if self.group.rank:
            return state
        mirror = Mirror(self.group, next(self._ids), self._marks, self._dropped)
        weakref.finalize(mirror, self._dropped.append, {"state": mirror.id})
        self.group.order("new", state=mirror.id, capacity=capacity)
        return SharedState([*map(vars, state.layers), {"mirror": mirror}], capacity)

    def run(self, fn: Callable[[State, Step], Array], state: State, step: Step, kept: slice | None = None) -> Array:
        """Run fn(state, step); `fn` is a partial of a method of the model, of integers and of its output's `rows`."""
        assert isinstance(fn, partial)
        if self.group.rank == 0:
            while self._dropped:
                self.group.order("drop", **self._dropped.pop())
            self.group.order("step", **_order_of(fn, state, step, self.sends_tokens))
            with self.group.whole_step():
                return self.finished(super().run(fn, state, step, kept))
        return self.finished(super().run(fn, state, step, kept))

    def finished(self, out: Array) -> Array:
        """Return the output of a step's method, once the ranks need no further exchange for it."""
        return out

    def follow(self, new_state: Callable[[int], State], models: Sequence[Any], join: Join) -> None:
        """Follow rank 0's orders until it ends: run methods of `models` on states that `new_state` makes.

        models  the model, and the target alone if there is a draft, which have different classes
        join    makes a step of several sequences
        """
        by_class = {type(model).__name__: model for model in models}
        states: dict[int, tuple[State, dict[int, Any]]] = {}
        for order in self.group.orders():
            match order["do"]:
                case "new":
                    states[order["state"]] = new_state(order["capacity"]), {}
                case "drop" if "mark" in order:
                    states[order["state"]][1].pop(order["mark"], None)
                case "drop":
                    states.pop(order["state"], None)
                case "step":
                    self._follow_step(
                        order, by_class[order["model"]], [states[each][0] for each in order["states"]], join
                    )
                case "commit":
                    states[order["state"]][0].commit(order["path"])
                case "snapshot":
                    state, marks = states[order["state"]]
                    marks[order["mark"]] = state.snapshot()
                case "restore":
                    state, marks = states[order["state"]]
                    state.restore(marks[order["mark"]])

    def _follow_step(self, order: Order, model: Any, states: list[State], join: Join) -> None:
        state: Any = states[0]
        parts = [_step_of(part) for part in order["parts"]]
        step = parts[0]
        if order["layer_counts"] is not None:
            model, state, step = join(model, states, order["layer_counts"], parts)
        rows = {} if order["rows"] is None else {"rows": slice(*order["rows"])}
        self.run(partial(getattr(model, order["method"]), *order["args"], **rows), state, step)


def _order_of(fn: "partial[Array]", state: Any, step: Any, sends_tokens: bool) -> Order:
    """Return the order to run a step, of one sequence or several."""
    method: Any = fn.func
    rows = fn.keywords.get("rows")
    mirrors, parts = state[-1].mirror, getattr(step, "parts", [step])
    is_joined = isinstance(mirrors, tuple)
    tokens = np.asarray(step.tokens) if sends_tokens else np.zeros(len(step), np.int32)
    ends = np.cumsum([len(part) for part in parts])[:-1]
    return {
        "states": [mirror.id for mirror in (mirrors if is_joined else [mirrors])],
        "layer_counts": list(state.layer_counts) if is_joined else None,
        "model": type(method.__self__).__name__,
        "method": method.__name__,
        "args": fn.args,
        "rows": None if rows is None else (rows.start, rows.stop, rows.step),  # a model may test whether they are all
        "parts": [
            (own.tolist(), part.positions.tolist(), None if part.parents is None else part.parents.tolist())
            for own, part in zip(np.split(tokens, ends), parts, strict=True)
        ],
    }


def _step_of(part: Any) -> Step:
    """Return the step of one sequence, with zeros as tokens if followers do not embed them."""
    tokens, positions, parents = part
    seen = None if parents is None else np.array(parents, np.int32)
    return Step(np.array(tokens, np.int32), np.array(positions, np.int32), seen, np.zeros(len(tokens), np.int32))
