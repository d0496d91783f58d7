"""Keys and values in compressed formats beside exact rows, as NumpyOps stores them, and the calibration of keys."""

from typing import Any, NamedTuple

import numpy as np

from common.reference_rows import NumpyRows, NumpyWindow, VisibleRows, decoded, encoded
from common.step import Parts, Shape, Step
from common.storage import LEAST_USE, KVSpec


class Calibration(NamedTuple):
    """Mean and scale of each channel of the keys, float32 (K, D), or (T, K, D) if they differ by row.

    A code spreads its error evenly over all channels of a vector. With a deviation of keys d and a root mean square of
    queries r in a channel, the error of q·k is smallest where the scale is sqrt(d / r): the channel then is as large in
    equalised keys as in the queries that meet them.
    """

    mean: np.ndarray
    scale: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray) -> "Calibration":
        """Compute from keys and as many queries (n, 2 K, D); a constant channel has scale 1.

        If all queries are zero, the scale is the deviation. Sums are float64, in the order of the rows.
        """
        keys, queries = np.split(rows, 2, axis=1)
        mean = keys.mean(axis=0, dtype=np.float64)
        deviation = np.sqrt(np.square(keys - mean).mean(axis=0, dtype=np.float64))
        use = np.sqrt(np.square(queries, dtype=np.float64).mean(axis=0))
        most = use.max(axis=-1, keepdims=True)
        use = np.where(most > 0, np.maximum(use, most * LEAST_USE), 1)
        scale = np.where(most > 0, np.sqrt(deviation / use), deviation).astype(np.float32)
        return cls(mean.astype(np.float32), np.where(scale > 0, scale, np.float32(1)))

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> "Calibration":
        return cls(np.zeros(shape, np.float32), np.ones(shape, np.float32))

    def apply(self, keys: np.ndarray) -> np.ndarray:
        return (keys - self.mean) / self.scale

    def undo(self, keys: np.ndarray) -> np.ndarray:
        return keys * self.scale + self.mean


class NumpyPacked:
    """Keys and values in their formats, with exact copies of the first and the latest rows (`Packing`).

    A row reads the exact copy of a token that is among the first of the sequence or the latest before the row's own
    position, and the codes of all other tokens. This choice depends only on positions, not on the steps that wrote the
    tokens. Keys are calibrated along each row's own path, so that rows of a tree have the same bits as in a chain.
    """

    sinks = 0

    def __init__(self, spec: KVSpec):
        self.spec = spec
        self.codes, self.exact = NumpyRows(spec), NumpyWindow(spec.exact)
        self.calibration: Calibration | None = None  # of committed rows

    @property
    def past(self) -> int:
        return self.codes.past

    def append(self, step: Step, *rows: np.ndarray, q: np.ndarray | None = None) -> list[VisibleRows]:
        (k, v), past, packing, planes = rows, self.past, self.spec.packing, self.spec.planes
        keys_queries = _with_queries(step, k, q) if packing.calibration else k
        calibration = self._calibration(step, keys_queries)
        new = [encoded(calibration.apply(k), planes[0]), encoded(v, planes[1])]
        self.codes.put(new)
        first = min(packing.first, past)
        keys, values = (decoded(held[first:past], plane) for held, plane in zip(self.codes.planes, planes, strict=True))
        if self.calibration is not None:
            keys = self.calibration.undo(keys)
        own = [calibration.undo(decoded(new[0], planes[0])), decoded(new[1], planes[1])]
        coded = [np.concatenate(pair) for pair in zip((keys, values), own, strict=True)]
        (held,) = self.exact.append(step, keys_queries, v)
        exact = [held.rows[0][:, : k.shape[1]], held.rows[1]]
        return [VisibleRows(coded, np.arange(first, past), exact=False), VisibleRows(exact, held.positions, exact=True)]

    def _calibration(self, step: Step, keys_queries: np.ndarray) -> Calibration:
        """Return the calibration that encodes the step's keys; rows whose path is too short have none.

        keys_queries  the step's keys and queries, (T, 2 K, D)
        """
        n = self.spec.packing.calibration
        if self.calibration is not None:
            return self.calibration
        plane, known = self.spec.planes[0], self.exact.planes[0][:n]  # all committed rows
        none = Calibration.none((plane.heads, plane.dim))
        if not n or self.past + len(keys_queries) < n:
            return none
        if step.is_chain:
            return Calibration.of(np.concatenate([known, keys_queries])[:n])
        paths = [np.concatenate([known, keys_queries[seen]])[:n] for seen in step.visible]
        each = [Calibration.of(path) if len(path) == n else none for path in paths]
        return Calibration(*(np.stack(part) for part in zip(*each, strict=True)))

    def commit(self, path: np.ndarray) -> None:
        self.codes.commit(path)
        self.exact.commit(path)
        n = self.spec.packing.calibration
        if n and self.calibration is None and self.past >= n:
            self.calibration = Calibration.of(self.exact.planes[0][:n])

    def snapshot(self) -> Any:
        return self.codes.snapshot(), self.exact.snapshot(), self.calibration

    def restore(self, snapshot: Any) -> None:
        codes, exact, self.calibration = snapshot
        self.codes.restore(codes)
        self.exact.restore(exact)

    def row_shapes(self, tokens: int) -> list[Shape]:
        return self.codes.row_shapes(tokens)

    def point_shapes(self, length: int) -> list[Shape]:
        plane, n = self.spec.planes[0], self.spec.packing.calibration
        statistics: list[Shape] = [((plane.heads, plane.dim), np.dtype(np.float32))] * (2 if 0 < n <= length else 0)
        return [*self.exact.point_shapes(length), *statistics]

    def save_rows(self, first: int, last: int) -> list[np.ndarray]:
        return self.codes.save_rows(first, last)

    def save_point(self) -> list[np.ndarray]:
        return [*self.exact.save_point(), *(part.copy() for part in self.calibration or ())]

    def load(self, length: int, rows: list[Parts], point: list[np.ndarray]) -> None:
        self.codes.load(length, rows, [])
        n = len(self.spec.exact.planes)
        self.exact.load(length, [], point[:n])
        self.calibration = Calibration(*(part.copy() for part in point[n:])) if point[n:] else None

    @property
    def nbytes(self) -> int:
        calibration = sum(part.nbytes for part in self.calibration or ())
        return self.codes.nbytes + self.exact.nbytes + calibration


def _with_queries(step: Step, k: np.ndarray, q: np.ndarray | None) -> np.ndarray:
    """Concatenate k (T, K, D) with one query of each head's group (`ExactSpec`): (T, 2 K, D)."""
    T, K, D = k.shape
    if q is None:
        return np.concatenate([k, np.zeros_like(k)], axis=1)
    groups = q.reshape(T, K, -1, D)
    return np.concatenate([k, groups[np.arange(T), :, step.positions % groups.shape[2]]], axis=1)
