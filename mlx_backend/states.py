"""One sequence's memory in MLX arrays: keys and values, convolution tails, delta matrices."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from common.step import LayerState, State
from common.storage import ConvSpec, DeltaSpec, LayerSpec, RowSpec, Spec, all_specs
from mlx_backend.recurrent import Rows, replay

PREFILL = 32  # rows of a commit from which it is a prompt's
ROOM = 256  # rows by which a buffer grows; a quarter of the rows it holds where that is more


class MlxRows:
    """Rows that attention reads: keys and values, or latent rows, in one buffer (1, K, room, D) each.

    A buffer holds the committed rows at start..end, then the step's rows, then room for more. With a window, start
    follows the end, and rows before it are dropped when the buffer grows; the first `keep` rows lie apart.
    """

    def __init__(self, spec: RowSpec, dtype: mx.Dtype):
        self.buffers = [mx.zeros((1, plane.heads, 0, plane.dim), dtype) for plane in spec.planes]
        self.window, self.keep = spec.window, spec.keep
        self.first = [buffer for buffer in self.buffers if self.keep]
        self.start = self.end = 0
        self.past = 0  # committed rows, dropped ones included

    @property
    def keys(self) -> mx.array:
        return self.buffers[0]

    @property
    def values(self) -> mx.array:
        return self.buffers[-1]

    def write(self, *rows: mx.array) -> list[mx.array]:
        """Put the step's rows, (1, K, T, D), behind the past; all kept rows and them, (1, K, n + T, D)."""
        T = rows[0].shape[2]
        if self.end + T > self.buffers[0].shape[2]:
            kept = self.end - self.start
            room = _room(kept, T)
            self.buffers = [_grown(buffer[:, :, self.start : self.end], room) for buffer in self.buffers]
            self.start, self.end = 0, kept
        for buffer, new in zip(self.buffers, rows, strict=True):
            buffer[:, :, self.end : self.end + T] = new
        held = [buffer[:, :, self.start : self.end + T] for buffer in self.buffers]
        return _joined(self.first, held) if self.first else held

    def commit(self, path: np.ndarray) -> None:
        end = self.end + len(path)
        if not np.array_equal(path, np.arange(len(path))):
            rows = mx.array(self.end + path)
            for buffer in self.buffers:
                buffer[:, :, self.end : end] = buffer[:, :, rows]
        self.end = end
        early = min(max(0, self.keep - self.past), len(path))
        if early:  # rows that are kept for good leave the buffer
            at = end - len(path)
            self.first = _joined(self.first, [buffer[:, :, at : at + early] for buffer in self.buffers])
            self.start += early
        self.past += len(path)
        if self.window is not None:
            self.start = max(self.start, end - self.window)

    def snapshot(self) -> Any:
        if self.window is None:
            return self.past
        return self.past, [buffer[:, :, self.start : self.end] for buffer in self.buffers], self.first

    def restore(self, snapshot: Any) -> None:
        if self.window is None:
            self.past = self.end = snapshot
        else:
            self.past, kept, self.first = snapshot
            self.buffers = list(kept)  # full, so that the next write copies them
            self.start, self.end = 0, kept[0].shape[2]

    @property
    def arrays(self) -> list[mx.array]:
        return self.buffers + self.first

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def _joined(rows: list[mx.array], more: list[mx.array]) -> list[mx.array]:
    return [mx.concatenate([a, b], axis=2) for a, b in zip(rows, more, strict=True)]


def _room(kept: int, T: int) -> int:
    """Rows that a buffer of `kept` rows gains when a step of T does not fit."""
    return T + max(ROOM, kept // 4)


def _grown(rows: mx.array, room: int) -> mx.array:
    B, K, _, D = rows.shape
    return mx.concatenate([rows, mx.zeros((B, K, room, D), rows.dtype)], axis=2)


class MlxConv:
    """The last taps - 1 committed inputs, oldest first; zeros before the first token. Never written in place."""

    def __init__(self, spec: ConvSpec, dtype: mx.Dtype):
        self.tail = mx.zeros((spec.taps - 1, spec.channels), dtype)
        self.stream = self.tail  # the tail, then the step's inputs

    def commit(self, path: np.ndarray) -> None:
        n, t = len(self.tail), len(path)
        if np.array_equal(path, np.arange(t)):
            self.tail = mx.contiguous(self.stream[t : t + n])  # a slice would keep the whole stream alive
        else:
            self.tail = self.stream[mx.array(np.concatenate([np.arange(n), n + path])[t:])]
        self.stream = self.tail

    def snapshot(self) -> Any:
        return self.tail

    def restore(self, snapshot: Any) -> None:
        self.tail = self.stream = snapshot

    @property
    def arrays(self) -> list[mx.array]:
        return [self.tail]

    @property
    def nbytes(self) -> int:
        return self.tail.nbytes


class MlxDelta:
    """The recurrent matrix per head as MLX lays it, (Hv, Dv, Dk) float32, and the step's rows for a replay."""

    def __init__(self, spec: DeltaSpec):
        self.matrix = mx.zeros((spec.heads, spec.value_dim, spec.key_dim), mx.float32)
        self.rows: Rows | None = None
        self.after: mx.array | None = None  # the matrix after all rows of a chain

    def commit(self, path: np.ndarray) -> None:
        if self.rows and len(path):
            kept = self.after if len(path) == len(self.rows[0]) else None
            self.matrix = replay(self.rows, self.matrix, path) if kept is None else kept
        self.rows = self.after = None

    def snapshot(self) -> Any:
        return self.matrix

    def restore(self, snapshot: Any) -> None:
        self.matrix = snapshot
        self.rows = self.after = None

    @property
    def arrays(self) -> list[mx.array]:
        return [self.matrix]

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes


def _layer_state(s: Spec, dtype: mx.Dtype) -> LayerState:
    if isinstance(s, RowSpec):
        return MlxRows(s, dtype)
    return MlxConv(s, dtype) if isinstance(s, ConvSpec) else MlxDelta(s)


def state_bytes(spec: Sequence[LayerSpec], tokens: int, rows: int, item: int) -> int:
    """What `MlxState.nbytes` will be once `tokens` tokens have been read in steps of `rows`; a number takes `item`."""
    total = 0
    for s in all_specs(spec):
        if isinstance(s, RowSpec):
            apart = min(tokens, s.keep)  # rows that are kept for good
            total += (rows_held(tokens, rows, s.window, s.keep) + apart) * s.row_bytes(item)
        else:
            total += s.bytes(tokens, item)
    return total


@cache
def rows_held(tokens: int, rows: int, window: int | None = None, keep: int = 0) -> int:
    """Rows of `MlxRows`' buffers after such a reading."""
    start = end = held = 0
    for at in range(0, tokens, rows):
        T = min(rows, tokens - at)
        if end + T > held:
            kept = end - start
            held = kept + _room(kept, T)
            start, end = 0, kept
        end += T
        start += min(max(0, keep - at), T)
        start = start if window is None else max(start, end - window)
    return held


class MlxState(State):
    def commit(self, path: Sequence[int] | np.ndarray) -> None:
        super().commit(path)
        if len(path) > PREFILL:  # else the graph of all chunks would be built before the first is computed
            mx.eval([array for state in self._all() for array in state.arrays])  # type: ignore[attr-defined]


def new_state(spec: Sequence[LayerSpec], capacity: int, dtype: mx.Dtype) -> MlxState:
    return MlxState([{name: _layer_state(s, dtype) for name, s in layer.items()} for layer in spec], capacity)
