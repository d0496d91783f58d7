"""Rows of attention that NumpyOps stores for a sequence: keys and values, or latent rows, in the formats of a cache."""

from typing import Any, NamedTuple

import numpy as np

from common.hadamard import rotate, unrotate
from common.kv_formats import FORMATS
from common.step import Parts, Shape, Step
from common.storage import NATIVE, Plane, RowSpec


class VisibleRows(NamedTuple):
    """Rows that a step may attend to: committed ones, then the step's own.

    rows       (n + T, K, D) float32 of each plane
    positions  (n,) of the committed rows
    exact      whether these are the float32 copies of a compressed cache's rows; None: the cache has no such copies
    """

    rows: list[np.ndarray]
    positions: np.ndarray
    exact: bool | None = None


class NumpyRows:
    """Rows of committed tokens, then the step's, in one array per plane: keys and values, or latent rows.

    An array is float32 (n, K, D), or bytes (n, K, bytes of a vector) of the plane's format.
    """

    sinks = 0  # first rows that no window hides

    def __init__(self, spec: RowSpec):
        self.spec = spec
        self.planes = [_empty(plane) for plane in spec.planes]
        self.past = 0  # committed rows

    @property
    def keys(self) -> np.ndarray:
        return decoded(self.planes[0], self.spec.planes[0])

    @property
    def values(self) -> np.ndarray:
        return decoded(self.planes[-1], self.spec.planes[-1])

    def write(self, *rows: np.ndarray) -> list[np.ndarray]:
        """Append the step's rows (T, K, D) to the past; return the rows of both, (n + T, K, D)."""
        end = self.put([encoded(new, plane) for new, plane in zip(rows, self.spec.planes, strict=True)])
        return [decoded(held[:end], plane) for held, plane in zip(self.planes, self.spec.planes, strict=True)]

    def put(self, rows: list[np.ndarray]) -> int:
        """Append the step's rows, in their formats, to the past; return their end."""
        end = self.past + len(rows[0])
        if end > len(self.planes[0]):
            self.planes = [_grown(held, grown_rows(end, len(held)), self.past) for held in self.planes]
        for held, new in zip(self.planes, rows, strict=True):
            held[self.past : end] = new
        return end

    def append(self, step: Step, *rows: np.ndarray, q: np.ndarray | None = None) -> list[VisibleRows]:
        """Append the step's rows to the past; return the rows that queries q may attend to, in parts."""
        return [VisibleRows(self.write(*rows), np.arange(self.past))]

    def commit(self, path: np.ndarray) -> None:
        rows = slice(self.past, self.past + len(path))
        for held in self.planes:
            held[rows] = held[self.past + path]
        self.past += len(path)

    def snapshot(self) -> Any:
        return self.past

    def restore(self, snapshot: Any) -> None:
        self.past = snapshot

    def row_shapes(self, tokens: int) -> list[Shape]:
        return [((held.shape[1], tokens, held.shape[2]), held.dtype) for held in self.planes]

    def point_shapes(self, length: int) -> list[Shape]:
        return []

    def save_rows(self, first: int, last: int) -> list[np.ndarray]:
        return [held[first:last].swapaxes(0, 1).copy() for held in self.planes]

    def save_point(self) -> list[np.ndarray]:
        return []

    def load(self, length: int, rows: list[Parts], point: list[np.ndarray]) -> None:
        self.planes = [np.concatenate([part.swapaxes(0, 1) for part in parts]) for parts in rows]
        self.past = length

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self.planes)


def _empty(plane: Plane) -> np.ndarray:
    if plane.format == NATIVE:
        return np.empty((0, plane.heads, plane.dim), np.float32)
    return np.empty((0, plane.heads, FORMATS[plane.format].row_bytes(plane.dim)), np.uint8)


def encoded(rows: np.ndarray, plane: Plane) -> np.ndarray:
    """Encode float32 rows (n, K, D) as the plane stores them."""
    if plane.format == NATIVE:
        return rows
    return FORMATS[plane.format].encode(rotate(rows) if plane.rotated else rows)


def decoded(rows: np.ndarray, plane: Plane) -> np.ndarray:
    """Return the inverse of `encoded`, up to what the format loses."""
    if plane.format == NATIVE:
        return rows
    values = FORMATS[plane.format].decode(rows, plane.dim)
    return unrotate(values) if plane.rotated else values


def grown_rows(needed: int, allocated: int) -> int:
    """Compute the rows of an array of `allocated` rows once it has grown to hold `needed` rows."""
    return allocated if needed <= allocated else max(2 * allocated, needed)


def rows_held(tokens: int, rows: int) -> int:
    """Compute the rows of NumpyRows' arrays after `tokens` tokens have been read in steps of `rows`."""
    allocated = 0
    for end in (*range(rows, tokens, rows), tokens):
        allocated = grown_rows(end, allocated)
    return allocated


def _grown(rows: np.ndarray, allocated: int, past: int) -> np.ndarray:
    grown = np.empty((allocated, *rows.shape[1:]), rows.dtype)
    grown[:past] = rows[:past]
    return grown


class NumpyWindow(NumpyRows):
    """Rows of the first `sinks` committed tokens and the last `window`, oldest first; the step's rows are separate."""

    def __init__(self, spec: RowSpec):
        super().__init__(spec)
        assert spec.window is not None
        self.window, self.sinks = spec.window, spec.sinks
        self.rows = self.planes  # the step's

    def write(self, *rows: np.ndarray) -> list[np.ndarray]:
        """Keep the step's rows until the commit; return the rows of the window and of the step."""
        self.rows = [encoded(new, plane) for new, plane in zip(rows, self.spec.planes, strict=True)]
        parts = zip(self.planes, self.rows, self.spec.planes, strict=True)
        return [decoded(np.concatenate([held, new]), plane) for held, new, plane in parts]

    def append(self, step: Step, *rows: np.ndarray, q: np.ndarray | None = None) -> list[VisibleRows]:
        first = min(self.sinks, self.past)
        rest = np.arange(self.past - (len(self.planes[0]) - first), self.past)
        return [VisibleRows(self.write(*rows), np.concatenate([np.arange(first), rest]))]

    def commit(self, path: np.ndarray) -> None:
        if len(path) and not len(self.rows[0]):  # a step may not write a layer's rows: blanks
            self.rows = [np.zeros((int(path.max()) + 1, *new.shape[1:]), new.dtype) for new in self.rows]
        leaves = len(self.planes[0]) + len(path) - self.window  # rows before it, but for the first `sinks`
        pairs = zip(self.planes, self.rows, strict=True)
        self.planes = [np.concatenate([held, new[path]]) for held, new in pairs]
        if leaves > self.sinks:
            self.planes = [np.delete(held, slice(self.sinks, leaves), axis=0) for held in self.planes]
        self.rows = [new[:0] for new in self.rows]
        self.past += len(path)

    def snapshot(self) -> Any:
        return self.planes, self.past  # commits replace the arrays, and never write into them

    def restore(self, snapshot: Any) -> None:
        self.planes, self.past = snapshot

    def row_shapes(self, tokens: int) -> list[Shape]:
        return []

    def point_shapes(self, length: int) -> list[Shape]:
        return super().row_shapes(self.spec.rows(length))

    def save_rows(self, first: int, last: int) -> list[np.ndarray]:
        return []

    def save_point(self) -> list[np.ndarray]:
        return super().save_rows(0, len(self.planes[0]))

    def load(self, length: int, rows: list[Parts], point: list[np.ndarray]) -> None:
        super().load(length, [[array] for array in point], [])
        self.rows = [held[:0] for held in self.planes]
