"""A compressed cache on MLX: rows in their formats, and exact copies of the first and the latest rows."""

from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from common.step import Parts, Shape, Step
from common.storage import LEAST_USE, KVSpec, Plane
from mlx_backend.kv_formats import encoded, rotate
from mlx_backend.kv_kernels import CODES, EXACT, CachePart, encode, encodes
from mlx_backend.rows import MlxRows
from mlx_backend.saved import from_host, to_host


class VisibleRows(NamedTuple):
    """Rows that a step may attend to: committed ones, then the step's.

    rows       keys and values (1, K, n + T, D)
    positions  (n,) of the committed rows
    exact      whether these are exact copies of rows, or else what their codes decode to
    """

    rows: list[mx.array]
    positions: np.ndarray
    exact: bool


class Calibration(NamedTuple):
    """Mean and scale of each channel of the keys, float32 (1, K, 1, D), or (1, K, T, D) if rows differ.

    `common.reference_packed.Calibration` defines it.
    """

    mean: mx.array
    scale: mx.array

    @classmethod
    def of(cls, rows: mx.array) -> "Calibration":
        """Compute from keys and as many queries (1, 2 K, n, D); a channel that never changes has scale 1."""
        keys, queries = mx.split(rows.astype(mx.float32), 2, axis=1)
        mean = keys.mean(axis=2, keepdims=True)
        deviation = mx.sqrt(mx.square(keys - mean).mean(axis=2, keepdims=True))
        use = mx.sqrt(mx.square(queries).mean(axis=2, keepdims=True))
        most = use.max(axis=-1, keepdims=True)
        use = mx.where(most > 0, mx.maximum(use, most * LEAST_USE), 1)
        scale = mx.where(most > 0, mx.sqrt(deviation / use), deviation)
        return cls(mean, mx.where(scale > 0, scale, 1))

    @classmethod
    def none(cls, keys: Plane) -> "Calibration":
        shape = (1, keys.heads, 1, keys.dim)
        return cls(mx.zeros(shape), mx.ones(shape))

    def apply(self, keys: mx.array) -> mx.array:
        return (keys.astype(mx.float32) - self.mean) / self.scale

    def undo(self, keys: mx.array) -> mx.array:
        return keys * self.scale + self.mean


class MlxPacked:
    """Packed keys and values; `common.reference_packed.NumpyPacked` defines which tokens are read exactly."""

    sinks = 0

    def __init__(self, spec: KVSpec, dtype: mx.Dtype):
        self.spec, self.dtype = spec, dtype
        self.codes, self.exact = MlxRows(spec, mx.float32), MlxRows(spec.exact, dtype)
        self.calibration: Calibration | None = None  # of committed rows

    @property
    def past(self) -> int:
        return self.codes.past

    def append(self, step: Step, k: mx.array, v: mx.array, q: mx.array | None = None) -> list[VisibleRows]:
        """Append the step's rows, (1, K, T, D), to the past; returns the decoded rows that the step may attend to.

        q  (T, H, D): the step's queries; None: the rows have none
        """
        past, T = self.past, len(step)
        keys_queries = self._with_queries(step, k, q)
        calibration = self._calibration(step, keys_queries)
        keys, values = self.codes.write(calibration.apply(k), v.astype(mx.float32))
        first = min(self.spec.packing.first, past)
        if self.calibration is not None:
            keys = self.calibration.undo(keys)
        elif self.spec.packing.calibration:  # only the step's rows may have one
            keys = mx.concatenate([keys[:, :, :past], calibration.undo(keys[:, :, past:])], axis=2)
        codes = [rows[:, :, first:].astype(self.dtype) for rows in (keys, values)]
        exact = self.exact.write(keys_queries, v)
        early = min(self.exact.sinks, past)
        late = np.arange(past - (exact[0].shape[2] - T - early), past)
        places = np.concatenate([np.arange(early), late])
        exact[0] = exact[0][:, : k.shape[1]]
        return [VisibleRows(codes, np.arange(first, past), False), VisibleRows(exact, places, True)]

    def parts(self, step: Step, rows: tuple[mx.array, mx.array, mx.array], scale: float) -> list[CachePart]:
        """Append the step's rows to the past; returns the parts that kv_attention reads.

        rows   queries (T, H, D), keys and values (1, K, T, D); of steps that `is_uniform`
        scale  of the queries
        """
        (queries, k, v), past, planes, T = rows, self.past, self.spec.planes, len(step)
        q = queries.astype(mx.float32) * scale
        repeats, bias = q.shape[1] // k.shape[1], mx.zeros(q.shape[:2])
        query = q
        if self.calibration is not None:
            mean, widths = (mx.repeat(part.squeeze((0, 2)), repeats, axis=0) for part in self.calibration)  # (H, D)
            query, bias = q * widths, (q * mean).sum(axis=-1)
        self.codes.put(self._encoded(k, v))
        exact = self.exact.write(self._with_queries(step, k, queries), v)
        exact[0] = exact[0][:, : k.shape[1]]
        native, early = self.spec.exact.planes, min(self.exact.sinks, past)
        rotated = rotate(query) if planes[0].rotated else query
        return [
            CachePart(rotated, bias, self.codes.buffers, planes, past, past, CODES),
            CachePart(q, mx.zeros(q.shape[:2]), exact, native, exact[0].shape[2] - T, early, EXACT),
        ]

    def _with_queries(self, step: Step, k: mx.array, q: mx.array | None) -> mx.array:
        """Return k (1, K, T, D); for calibration with one query of each group, (1, 2 K, T, D) (`storage.ExactSpec`)."""
        if not self.spec.packing.calibration:
            return k
        if q is None:
            return mx.concatenate([k, mx.zeros_like(k)], axis=1)
        _, K, T, D = k.shape
        groups = q.reshape(T, K, -1, D)
        turns = mx.array(step.positions % groups.shape[2])
        queries = mx.take_along_axis(groups, turns.reshape(T, 1, 1, 1), axis=2).squeeze(2)
        return mx.concatenate([k, queries.swapaxes(0, 1)[None].astype(k.dtype)], axis=1)

    def _encoded(self, k: mx.array, v: mx.array) -> list[mx.array]:
        planes, calibration = self.spec.planes, self.calibration
        if calibration is not None and all(map(encodes, planes)):
            return encode([k, v], planes, *calibration)
        keys = k.astype(mx.float32) if calibration is None else calibration.apply(k)
        return encoded(self.codes.coders, [keys, v.astype(mx.float32)])

    def is_uniform(self, step: Step) -> bool:
        """Test whether every calibration that the step's keys need is known."""
        n = self.spec.packing.calibration
        return not n or self.calibration is not None or self.past + len(step) < n

    def _calibration(self, step: Step, keys_queries: mx.array) -> Calibration:
        """Return the calibration that encodes the step's keys; none for rows whose path is too short.

        keys_queries  the step's keys, and queries beside them, (1, 2 K, T, D)
        """
        n, past = self.spec.packing.calibration, self.past
        if self.calibration is not None:
            return self.calibration
        none = Calibration.none(self.spec.planes[0])
        if not n or past + len(step) < n:
            return none
        known = self.exact.committed()[0][:, :, :n]
        if step.is_chain:
            return Calibration.of(mx.concatenate([known, keys_queries], axis=2)[:, :, :n])
        paths = [np.flatnonzero(seen)[: n - past] for seen in step.visible]
        each = [
            Calibration.of(mx.concatenate([known, keys_queries[:, :, mx.array(path)]], axis=2))
            if past + len(path) == n
            else none
            for path in paths
        ]
        return Calibration(*(mx.concatenate(list(part), axis=2) for part in zip(*each, strict=True)))

    def commit(self, path: np.ndarray) -> None:
        self.codes.commit(path)
        self.exact.commit(path)
        n = self.spec.packing.calibration
        if n and self.calibration is None and self.past >= n:
            self.calibration = Calibration.of(self.exact.committed()[0][:, :, :n])

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
        shape = (1, plane.heads, 1, plane.dim)
        statistics: list[Shape] = [(shape, np.dtype(np.float32))] * (2 if 0 < n <= length else 0)
        return [*self.exact.point_shapes(length), *statistics]

    def save_rows(self, first: int, last: int) -> list[np.ndarray]:
        return self.codes.save_rows(first, last)

    def save_point(self) -> list[np.ndarray]:
        return [*self.exact.save_point(), *(to_host(part) for part in self.calibration or ())]

    def load(self, length: int, rows: list[Parts], point: list[np.ndarray]) -> None:
        self.codes.load(length, rows, [])
        n = len(self.spec.exact.planes)
        self.exact.load(length, [], point[:n])
        statistics = [from_host(part, mx.float32) for part in point[n:]]
        self.calibration = Calibration(*statistics) if statistics else None

    @property
    def arrays(self) -> list[mx.array]:
        return [*self.codes.arrays, *self.exact.arrays, *(self.calibration or ())]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)
