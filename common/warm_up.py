"""Run steps whose results are dropped, so that later steps find kernels compiled and graphs captured."""

from typing import Any, NamedTuple

import numpy as np

from common.joined_step import JoinedStep
from common.models import Model
from common.slots import Slots
from common.step import MAX_DECODE_ROWS, Step

REPEATS = 2  # the first step of a size compiles kernels, the second is captured by a backend that replays steps


class Size(NamedTuple):
    """The size of a step: `rows` of one sequence, or if `is_joined`, one row of each of `rows` sequences."""

    rows: int
    is_joined: bool = False


def warm_sizes(model: Model, slots: Slots) -> list[Size]:
    """List the sizes of steps whose first runs are slow, in ascending order."""
    rows = [n for n in model.ops.warm_rows if n < slots.context]
    joined = {min(n, slots.parallel) for n in rows} if slots.pool is not None else set()
    return sorted([*map(Size, rows), *(Size(n, is_joined=True) for n in joined if n > 1)])


def warm_up(model: Model, slots: Slots, size: Size) -> None:
    """Run steps of a size in idle slots, if their states have room."""
    states = [slot.state for slot in slots.idle(size.rows if size.is_joined else 1)]
    own = 1 if size.is_joined else size.rows
    if any(state.length + own > state.capacity for state in states):
        return
    for _ in range(REPEATS):
        steps = [Step.chain(np.zeros(own, np.int32), state.length) for state in states]
        state: Any = slots.pool if size.is_joined else states[0]
        step = steps[0]
        if size.is_joined:
            step = JoinedStep.of(steps, np.zeros(size.rows, np.int32), [each.slot for each in states])
        model.ops.read(model.forward(state, step, slice(len(step) - 1, len(step))))
        if len(step) <= MAX_DECODE_ROWS:
            model.ops.read(model.greedy_tokens(state, step))
