"""Save a state on the host, and load it, for caches of states."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from common.step import LongStep, Parts, Shape, State

MOVED = 1024  # tokens whose rows are moved to the host at a time


def saved_rows(state: State, first: int = 0) -> Iterator[list[np.ndarray]]:
    """Yield the rows of the tokens from `first` on, MOVED tokens at a time, because a copy takes device memory."""
    for at in range(first, max(state.length, first + 1), MOVED):
        yield state.save_rows(at, min(at + MOVED, state.length))


def load(
    state: State,
    tokens: np.ndarray,
    long_steps: Sequence[LongStep],
    rows: Sequence[Parts],
    point: Sequence[np.ndarray],
) -> None:
    """Load a saved state that holds `tokens`, whose arrays are complete; raises as State.load does."""
    state.finish_saving([*point, *(part for parts in rows for part in parts)])
    arrays: dict[str, np.ndarray | Parts] = {f"rows.{i}": parts for i, parts in enumerate(rows)}
    arrays |= {f"point.{i}": array for i, array in enumerate(point)}
    state.load(arrays, len(tokens), long_steps)


def may_save(state: State, reason: str, nbytes: int) -> bool:
    """Test whether `nbytes` of a state should be saved now, while other states are being saved.

    The end of a system prompt is always saved. A point of the grid must leave memory for the end of the turn, which is
    more useful.

    reason  a value of Reading.kept_cuts: "system", "turn", "grid"
    """
    waiting, most = state.saving
    if reason == "system" or most is None:
        return True
    if reason == "grid":
        return not waiting and nbytes <= most // 2
    return not waiting or waiting + nbytes <= most


def bytes_after(state: State, tokens: int) -> int:
    """Count the bytes to save of a state if the rows of its first `tokens` tokens are saved already."""
    return _bytes(state.row_shapes(state.length - tokens)) + _bytes(state.point_shapes(state.length))


def rows_after(parts: Parts, tokens: int) -> list[np.ndarray]:
    """Return the rows after the first `tokens` tokens, as views."""
    at, kept = 0, list[np.ndarray]()
    for part in parts:
        n = part.shape[1]
        if at + n > tokens:
            kept.append(part[:, max(tokens - at, 0) :])
        at += n
    return kept


def _bytes(shapes: Sequence[Shape]) -> int:
    return sum(int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize for shape, dtype in shapes)


def save_in_parts(state: State) -> dict[str, Any]:
    """Save as `State.save` does, one part after another, because little memory of the device is left."""
    rows = list[list[np.ndarray]]()
    for part in saved_rows(state):
        state.finish_saving(part)
        rows.append(part)
    point = state.save_point()
    state.finish_saving(point)
    saved: dict[str, Any] = {f"rows.{i}": parts for i, parts in enumerate(zip(*rows, strict=True))}
    return saved | {f"point.{i}": array for i, array in enumerate(point)}
