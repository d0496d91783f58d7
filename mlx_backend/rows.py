"""Rows that attention reads, in MLX arrays: one buffer under every kind of cache."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from common.step import Parts, Shape
from common.storage import RowSpec
from mlx_backend.kv_formats import Coder, encoded
from mlx_backend.saved import from_host, shape_of, to_host

ROOM = 256  # rows by which a buffer grows, or a quarter of its rows if that is more


class MlxRows:
    """Rows that attention reads: keys and values, or latent rows, in one buffer (1, K, room, D) each.

    In a plane with a format, D counts the bytes of a vector.
    A buffer holds the committed rows at start..end, then the step's rows, then free space. With a window, start moves
    with the end, and rows before start are dropped when the buffer grows; the first `sinks` rows are kept separately.
    """

    def __init__(self, spec: RowSpec, dtype: mx.Dtype):
        self.spec = spec
        self.coders = [Coder(plane, dtype) for plane in spec.planes]
        self.buffers = [coder.empty() for coder in self.coders]
        self.window, self.sinks = spec.window, spec.sinks
        self.first = [buffer for buffer in self.buffers if self.sinks]
        self.start = self.end = 0
        self.past = 0  # committed rows, including dropped ones

    @property
    def keys(self) -> mx.array:
        return self.buffers[0]

    @property
    def values(self) -> mx.array:
        return self.buffers[-1]

    def write(self, *rows: mx.array) -> list[mx.array]:
        """Append the step's rows, (1, K, T, D), to the past; returns kept rows and the step's, (1, K, n + T, D)."""
        held = self.put(encoded(self.coders, rows))
        return [coder.decode(stored) for coder, stored in zip(self.coders, held, strict=True)]

    def put(self, rows: Sequence[mx.array]) -> list[mx.array]:
        """Append the step's rows to the past; returns kept rows and the step's, in their planes' formats."""
        T = rows[0].shape[2]
        self._make_room(T)
        for buffer, new in zip(self.buffers, rows, strict=True):
            buffer[:, :, self.end : self.end + T] = new
        held = [buffer[:, :, self.start : self.end + T] for buffer in self.buffers]
        return _joined(self.first, held) if self.first else held

    def _make_room(self, rows: int) -> None:
        if self.end + rows > self.buffers[0].shape[2]:
            kept = self.end - self.start
            room = _room(kept, rows)
            self.buffers = [_grown(buffer[:, :, self.start : self.end], room) for buffer in self.buffers]
            self.start, self.end = 0, kept

    def commit(self, path: np.ndarray) -> None:
        self._make_room(len(path))  # a step may leave a layer's rows unwritten: blanks
        end = self.end + len(path)
        if not np.array_equal(path, np.arange(len(path))):
            rows = mx.array(self.end + path)
            for buffer in self.buffers:
                buffer[:, :, self.end : end] = buffer[:, :, rows]
        self.end = end
        early = min(max(0, self.sinks - self.past), len(path))
        if early:  # the first rows are moved out of the buffer, and kept
            at = end - len(path)
            self.first = _joined(self.first, [buffer[:, :, at : at + early] for buffer in self.buffers])
            self.start += early
        self.past += len(path)
        if self.window is not None:
            self.start = max(self.start, end - self.window)

    def committed(self) -> list[mx.array]:
        """Return the committed rows that are held, (1, K, n, D), in their planes' formats."""
        held = [buffer[:, :, self.start : self.end] for buffer in self.buffers]
        return _joined(self.first, held) if self.first else held

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

    def row_shapes(self, tokens: int) -> list[Shape]:
        return self._shapes(tokens) if self.window is None else []

    def point_shapes(self, length: int) -> list[Shape]:
        return [] if self.window is None else self._shapes(self.spec.rows(length))

    def _shapes(self, rows: int) -> list[Shape]:
        return [((b.shape[1], rows, b.shape[3]), shape_of(b)[1]) for b in self.buffers]

    def save_rows(self, first: int, last: int) -> list[np.ndarray]:
        return [to_host(b[0, :, first:last]) for b in self.buffers] if self.window is None else []

    def save_point(self) -> list[np.ndarray]:
        return [] if self.window is None else [to_host(held[0]) for held in self.committed()]

    def load(self, length: int, rows: list[Parts], point: list[np.ndarray]) -> None:
        saved = [np.concatenate(parts, axis=1) for parts in rows] if self.window is None else point
        held = [from_host(array[None], b.dtype) for array, b in zip(saved, self.buffers, strict=True)]
        early = min(self.sinks, length)
        self.first = [array[:, :, :early] for array in held if self.sinks]
        self.buffers = [array[:, :, early:] for array in held]  # full, so that the next write copies them
        self.start, self.end, self.past = 0, self.buffers[0].shape[2], length

    @property
    def arrays(self) -> list[mx.array]:
        return self.buffers + self.first

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def _joined(rows: list[mx.array], more: list[mx.array]) -> list[mx.array]:
    return [mx.concatenate([a, b], axis=2) for a, b in zip(rows, more, strict=True)]


def _room(kept: int, T: int) -> int:
    """Compute the rows by which a buffer of `kept` rows grows when a step of T does not fit."""
    return T + max(ROOM, kept // 4)


def _grown(rows: mx.array, room: int) -> mx.array:
    B, K, _, D = rows.shape
    return mx.concatenate([rows, mx.zeros((B, K, room, D), rows.dtype)], axis=2)


@cache
def rows_held(tokens: int, rows: int, window: int | None = None, sinks: int = 0) -> int:
    """Compute the rows of `MlxRows`' buffers after `tokens` tokens read in steps of `rows`."""
    start = end = held = 0
    for at in range(0, tokens, rows):
        T = min(rows, tokens - at)
        if end + T > held:
            kept = end - start
            held = kept + _room(kept, T)
            start, end = 0, kept
        end += T
        start += min(max(0, sinks - at), T)
        start = start if window is None else max(start, end - window)
    return held
