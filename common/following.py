"""Rank 0 of a group orders each step, and the followers mirror its states.

A follower has the states of its part of the model. Each new pool or state on rank 0, and each `commit`, `snapshot` and
`restore` of a state, is sent to the followers as an order, like each step that rank 0 runs.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import count
from typing import Any, TypeVar

import numpy as np

from common.group import Group, Order
from common.saving import save_in_parts
from common.step import Parts, Pool, Shape, State, Step

# (model, states of several sequences, own layers of each, a step of each) -> (model, state, step) of one joined step
Join = Callable[[Any, Sequence[State], Sequence[int], Sequence[Step]], tuple[Any, Any, Step]]
T = TypeVar("T")
STEP_FUNCTIONS = 256  # that a follower keeps, since a backend may have captured their steps


class Mark:
    """A snapshot that followers keep under a number as long as this object exists."""

    def __init__(self, id: int):
        self.id = id


class Mirror:
    """Takes the place of a layer's state for the followers' parts of a state."""

    arrays: Sequence[Any] = ()
    nbytes = 0

    def __init__(self, leader: "Leader", id: int):
        self._leader, self.id = leader, id

    def commit(self, path: np.ndarray) -> None:
        self._leader.group.order("commit", state=self.id, path=path.tolist())

    def snapshot(self) -> Mark:
        return self._leader.new("snapshot", Mark, state=self.id)

    def restore(self, snapshot: Mark) -> None:
        self._leader.group.order("restore", state=self.id, mark=snapshot.id)

    def row_shapes(self, tokens: int) -> list[Shape]:
        return []

    def point_shapes(self, length: int) -> list[Shape]:
        return [((1,), np.int64)]

    def save_rows(self, first: int, last: int) -> list[np.ndarray]:
        return []

    def save_point(self) -> list[np.ndarray]:
        """Let followers save their parts of the state, and return the number of what they keep with this array."""
        return [self._leader.new("save", lambda number: np.array([number]), state=self.id)]

    def load(self, length: int, rows: list[Parts], point: list[np.ndarray]) -> None:
        self._leader.group.order("load", state=self.id, mark=int(point[0][0]))


class Leader:
    """Sends rank 0's orders, in which pools, states and snapshots have numbers."""

    def __init__(self, group: Group):
        self.group, self._numbers = group, count()
        self._dropped = deque[int]()

    def new(self, what: str, make: Callable[[int], T], **values: Any) -> T:
        """Order followers to make what `make` makes here: a pool, state or snapshot, whose number is its argument.

        Followers drop theirs when the result is deleted.
        """
        self._drop()
        number = next(self._numbers)
        made = make(number)
        weakref.finalize(made, self._dropped.append, number).atexit = False
        self.group.order(what, id=number, **values)
        return made

    def new_state(self, capacity: int, pool: int | None = None, slot: int = 0) -> Mirror:
        """Order a state, or with `pool`, the number of a pool, its slot `slot`; `new` describes the result."""
        return self.new("new", partial(Mirror, self), capacity=capacity, pool=pool, slot=slot)

    def step(self, fn: Any, step: Step, tokens: np.ndarray, state: Order) -> None:
        """Order a step.

        fn      a partial of a method of the model: integers as arguments, and `rows`, the slice of its output
        tokens  (T,) of all rows, on the host; zeros where followers have no use for them
        state   entries of the order that name the state: `pool`, the number of a pool; or `states`, the numbers of one
                or several states, and `own`: None for one state, of several the layers of which each has its own
        """
        self._drop()
        method, rows = fn.func, fn.keywords.get("rows")
        parts: Sequence[Step] = getattr(step, "parts", ()) if state.get("own") else [step]
        ends = np.cumsum([len(part) for part in parts])[:-1]
        self.group.order(
            "step",
            model=type(method.__self__).__name__,
            method=method.__name__,
            args=fn.args,
            rows=None if rows is None else (rows.start, rows.stop, rows.step),  # a model may test whether they are all
            parts=[
                [own.tolist(), *(None if x is None else x.tolist() for x in (part.positions, part.parents, part.slots))]
                for own, part in zip(np.split(tokens, ends), parts, strict=True)
            ],
            **{"pool": None, "states": (), "own": None} | state,
        )

    def _drop(self) -> None:
        while self._dropped:
            self.group.order("drop", id=self._dropped.popleft())


class Follower:
    """Runs the orders of rank 0 on this rank's part of the model.

    ops     `ops.run` runs a step, and `ops.answers` has a function without arguments for each question of rank 0
    models  the model; with a draft, the target alone and then the pair. Orders name a model by its class
    join    makes a step of several sequences
    """

    def __init__(self, ops: Any, models: Sequence[Any], join: Join):
        self.ops, self.model, self.join = ops, models[-1], join
        by_class = {type(model).__name__: model for model in models}
        self._pools, self._states, self._marks = dict[int, Pool](), dict[int, State](), dict[int, Any]()
        self._models = by_class
        self._function = lru_cache(STEP_FUNCTIONS)(lambda name, *rest: _function(by_class[name], *rest))

    def run(self, group: Group) -> None:
        """Run orders until rank 0 ends."""
        for order in group.orders():
            match order["do"]:
                case "pool":
                    self._pools[order["id"]] = self.model.new_pool(order["slots"], order["capacity"], order["tokens"])
                case "new":
                    self._new_state(order)
                case "drop":
                    for held in (self._pools, self._states, self._marks):
                        held.pop(order["id"], None)  # type: ignore[attr-defined]
                case "step":
                    self._step(order)
                case "commit":
                    self._states[order["state"]].commit(order["path"])
                case "snapshot":
                    self._marks[order["id"]] = self._states[order["state"]].snapshot()
                case "restore":
                    self._states[order["state"]].restore(self._marks[order["mark"]])
                case "save":
                    state = self._states[order["state"]]
                    self._marks[order["id"]] = save_in_parts(state), state.length, list(state.long_steps)
                    del state  # which a later order may drop
                case "load":
                    self._states[order["state"]].load(*self._marks[order["mark"]])
                case question:
                    group.answer(self.ops.answers[question]())

    def _new_state(self, order: Order) -> None:
        pool = None if order["pool"] is None else self._pools[order["pool"]]
        state = self.model.new_state(order["capacity"]) if pool is None else pool.new_state()
        if state.slot != order["slot"]:
            raise RuntimeError(f"a new state has slot {state.slot}, and on rank 0 {order['slot']}")
        self._states[order["id"]] = state

    def _step(self, order: Order) -> None:
        parts = [_step_of(part) for part in order["parts"]]
        what = order["method"], tuple(order["args"]), None if order["rows"] is None else tuple(order["rows"])
        if order["pool"] is not None:
            self.ops.run(self._function(order["model"], *what), self._pools[order["pool"]], parts[0])
            return
        states = [self._states[each] for each in order["states"]]
        if order["own"] is None:
            self.ops.run(self._function(order["model"], *what), states[0], parts[0])
        else:
            model, state, step = self.join(self._models[order["model"]], states, order["own"], parts)
            self.ops.run(_function(model, *what), state, step)


def _function(model: Any, method: str, args: tuple[int, ...], rows: tuple[int | None, ...] | None) -> Any:
    """Return the function of a step, as `Leader.step` describes it."""
    return partial(getattr(model, method), *args, **({} if rows is None else {"rows": slice(*rows)}))


def _step_of(part: Any) -> Step:
    """Return the step of one sequence, or of a pool."""
    tokens, positions, parents, slots = (None if x is None else np.array(x, np.int32) for x in part)
    assert positions is not None
    assert slots is not None
    return Step(tokens, positions, parents, slots)
