"""A model whose layers are shared by the processes of a group: rows pass from rank to rank, and back to rank 0.

Rank 0 holds the embedding, the first layers, the last norm and the head; it alone knows tokens and chooses them. Each
follower holds the layers after those of the rank before it, and mirrors every state of rank 0 for them. One process
would compute the same numbers: what a layer computes does not depend on where it runs.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import mlx.core as mx
import numpy as np

from common.errors import BimetalError
from common.layer_shares import share_layers
from common.ops import Array, Weight
from common.step import Shape, State, Step
from common.storage import LayerSpec
from mlx_backend.group import Group, Order
from mlx_backend.ops import MlxOps
from mlx_backend.states import MlxState

MIB = 2**20


class PassedOnError(Exception):
    """A follower's part of a step is computed, and the next rank has it."""


class Mirror:
    """Stands for a state's layers on the followers, in the place of a layer's state."""

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


class PipelineOps(MlxOps):
    """The op contract on this process's layers.

    hidden  numbers of a row between two layers
    own     the first layer of this rank, and the one after its last
    layers  of the whole model
    """

    runs_ahead = joins = False

    def __init__(self, dtype: mx.Dtype, group: Group):
        super().__init__(dtype)
        self.group = group
        self.hidden = self.layers = 0
        self.own = range(0)
        self._rows = 0  # of the step's output
        self._ids, self._marks = count(), count()
        self._dropped: list[Order] = []  # states and marks that nobody holds any more
        weakref.finalize(self, group.close)

    def share(self, sizes: Sequence[int], hidden: int, memory: int, same: int) -> None:
        """Divide the layers by the memory of the ranks; call it before weights are loaded.

        sizes   bytes of each layer, what lies outside the layers counted to the first one
        memory  bytes that this rank gives to the model
        same    a number that is equal on all ranks if their models are

        Raises BimetalError where the layers do not fit, and where ranks differ in their model.
        """
        given = self.group.gather([memory // MIB, same])
        if len(set(given[:, 1].tolist())) > 1:
            raise BimetalError("the ranks of the group have different models or float types; give all of them the same")
        self.own = share_layers(sizes, [int(m) * MIB for m in given[:, 0]])[self.group.rank]
        self.hidden, self.layers = hidden, len(sizes)

    def keeps(self, layer: int | None) -> bool:
        return self.group.rank == 0 if layer is None else layer in self.own

    def weight_bytes(self, weight: Weight | None) -> int:
        return 0 if weight is None else super().weight_bytes(weight)

    def new_state(self, spec: Sequence[LayerSpec], capacity: int) -> State:
        if len(spec) != self.layers:
            raise BimetalError(f"a group of machines runs a model of {self.layers} layers without a draft")
        state = super().new_state([layer if i in self.own else {} for i, layer in enumerate(spec)], capacity)
        if self.group.rank:
            return state
        mirror = Mirror(self.group, next(self._ids), self._marks, self._dropped)
        weakref.finalize(mirror, self._dropped.append, {"state": mirror.id})
        self.group.order("new", state=mirror.id, capacity=capacity)
        return SharedState([*map(vars, state.layers), {"mirror": mirror}], capacity)

    # -- a step ------------------------------------------------------------------------------------------------------

    def run(self, fn: Callable[[State, Step], Array], state: State, step: Step, kept: slice | None = None) -> Array:
        """fn(state, step); `fn` is a partial of the model's forward with its `rows`."""
        assert isinstance(fn, partial)
        rows = range(len(step))[fn.keywords["rows"]]
        self._rows = len(rows)
        if self.group.rank == 0:
            while self._dropped:
                self.group.order("drop", **self._dropped.pop())
            parents = None if step.parents is None else step.parents.tolist()
            numbers = rows.start, rows.stop, rows.step
            self.group.order(
                "step", state=state[-1].mirror.id, positions=step.positions.tolist(), parents=parents, rows=numbers
            )
        return super().run(fn, state, step, kept)

    def embed(self, table: Weight, tokens: Array) -> Array:
        return super().embed(table, tokens) if self.group.rank == 0 else mx.zeros((len(tokens), 0))

    def scope(self, layer: int, block: Callable[[Array], Array], x: Array) -> Array:
        """block(x) where the layer is this rank's; at the edges of its layers rows come and go."""
        if layer in self.own:
            if self.group.rank and layer == self.own.start:
                x = self.group.receive((len(x), self.hidden), self.dtype)
            x = block(x)
            if layer == self.own.stop - 1 and self.group.size > 1:
                self.group.pass_on(x)
                if self.group.rank:
                    raise PassedOnError
        elif self.group.rank == 0 and layer == self.layers - 1:
            x = self.group.receive((self._rows, self.hidden), self.dtype)
        return x

    # -- followers ---------------------------------------------------------------------------------------------------

    def follow(self, new_state: Callable[[int], State], forward: Callable[[State, Step, slice], Any]) -> None:
        """Do what rank 0 orders until it ends: `forward` is the model's, on states that `new_state` makes."""
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
                    with suppress(PassedOnError):
                        forward(state, _step_of(order), slice(*order["rows"]))
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
    """The step whose tokens rank 0 alone knows."""
    positions = np.array(order["positions"], np.int32)
    parents = None if order["parents"] is None else np.array(order["parents"], np.int32)
    nothing = np.zeros(len(positions), np.int32)
    return Step(nothing, positions, parents, nothing)
