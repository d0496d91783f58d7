"""What ops of a group of processes share: rank 0 orders each step, and the followers mirror its states.

A follower has the parts of a state that lie with its part of the model: `commit`, `snapshot` and `restore` of a state
on rank 0 are orders too.
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
from common.step import Shape, State, Step
from common.storage import LayerSpec
from mlx_backend.group import Group, Order
from mlx_backend.ops import MlxOps
from mlx_backend.states import MlxState

MIB = 2**20


class Mirror:
    """Stands for the followers' parts of a state, in the place of a layer's state."""

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

    def load(self, length: int, rows: list[np.ndarray], point: list[np.ndarray]) -> None:
        raise AssertionError("a shared state cannot be saved")


class Mark:
    """A snapshot that followers keep under a number, as long as this object lives."""

    def __init__(self, id: int):
        self.id = id


class SharedState(MlxState):
    can_save = False  # the followers' parts are elsewhere


class GroupOps(MlxOps):
    """The op contract on this process's part of a model.

    sends_tokens  whether followers embed the tokens of a step
    """

    runs_ahead = joins = False
    sends_tokens = False

    def __init__(self, dtype: mx.Dtype, group: Group):
        super().__init__(dtype)
        self.group = group
        self._ids, self._marks = count(), count()
        self._dropped: list[Order] = []  # states and marks that nobody holds any more
        weakref.finalize(self, group.close)

    def gather_memory(self, memory: int, same: int) -> list[int]:
        """The bytes that each rank gives to the model, of which this one gives `memory`, in whole MiB.

        same  a number that is equal on all ranks if their models are

        Raises BimetalError where ranks differ in their model.
        """
        given = self.group.gather([memory // MIB, same])
        if len(set(given[:, 1].tolist())) > 1:
            raise BimetalError("the ranks of the group have different models or float types; give all of them the same")
        return [int(m) * MIB for m in given[:, 0]]

    def own_spec(self, spec: Sequence[LayerSpec]) -> Sequence[LayerSpec]:
        """List what this process stores of a sequence, by layer."""
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
        """fn(state, step); `fn` is a partial of a method of the model, of integers and of the `rows` of its output."""
        assert isinstance(fn, partial)
        if self.group.rank == 0:
            while self._dropped:
                self.group.order("drop", **self._dropped.pop())
            method: Any = fn.func
            rows = fn.keywords.get("rows")
            self.group.order(
                "step",
                state=state[-1].mirror.id,
                model=type(method.__self__).__name__,
                method=method.__name__,
                args=fn.args,
                tokens=np.asarray(step.tokens).tolist() if self.sends_tokens else None,
                positions=step.positions.tolist(),
                parents=None if step.parents is None else step.parents.tolist(),
                rows=None if rows is None else (rows.start, rows.stop, rows.step),  # a model may ask if they are all
            )
        return super().run(fn, state, step, kept)

    def follow(self, new_state: Callable[[int], State], models: Sequence[Any]) -> None:
        """Follow rank 0's orders until it ends: methods of `models` that run steps, on states that `new_state` makes.

        models  the model, and the target alone where a draft stands beside it: of different classes
        """
        by_class = {type(model).__name__: model for model in models}
        states: dict[int, tuple[State, dict[int, Any]]] = {}
        for order in self.group.orders():
            if order["do"] == "new":
                states[order["state"]] = new_state(order["capacity"]), {}
                continue
            state, marks = states.get(order["state"], (None, {}))
            match order["do"]:
                case "drop" if "mark" in order:
                    marks.pop(order["mark"], None)
                case "drop":
                    states.pop(order["state"], None)
                case "step":
                    assert state is not None
                    rows = {} if order["rows"] is None else {"rows": slice(*order["rows"])}
                    method = getattr(by_class[order["model"]], order["method"])
                    self.run(partial(method, *order["args"], **rows), state, _step_of(order))
                case "commit":
                    assert state is not None
                    state.commit(order["path"])
                case "snapshot":
                    assert state is not None
                    marks[order["mark"]] = state.snapshot()
                case "restore":
                    assert state is not None
                    state.restore(marks[order["mark"]])
            del state


def _step_of(order: Order) -> Step:
    """The step of an order; zeros stand for tokens that a follower has no use for."""
    positions = np.array(order["positions"], np.int32)
    parents = None if order["parents"] is None else np.array(order["parents"], np.int32)
    nothing = np.zeros(len(positions), np.int32)
    tokens = nothing if order["tokens"] is None else np.array(order["tokens"], np.int32)
    return Step(tokens, positions, parents, nothing)
