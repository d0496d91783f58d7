"""What NumpyOps stores for a sequence: rows of attention in their formats, convolution tails and delta matrices."""

from typing import Any, NamedTuple

import numpy as np

from common.hadamard import rotate, unrotate
from common.kv_formats import FORMATS
from common.step import LayerState, Shape, Step
from common.storage import LEAST_USE, NATIVE, ConvSpec, DeltaSpec, KVSpec, Plane, RowSpec, Spec


class Held(NamedTuple):
    """Rows that a step may attend to: committed ones, then the step's own.

    rows    (n + T, K, D) float32 of each plane
    places  (n,) positions of the committed ones
    exact   whether these are the copies in float32 beside a cache's formats; None: the cache has no such copies
    """

    rows: list[np.ndarray]
    places: np.ndarray
    exact: bool | None = None


class NumpyRows:
    """Rows of committed tokens, then the step's, in one array per plane: keys and values, or latent rows.

    An array is float32 (n, K, D), or bytes (n, K, bytes of a vector) of the plane's format.
    """

    keep = 0  # first rows that no window hides

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
        """Append the step's rows (T, K, D) to the past; the rows of both, (n + T, K, D)."""
        end = self.put([encoded(new, plane) for new, plane in zip(rows, self.spec.planes, strict=True)])
        return [decoded(held[:end], plane) for held, plane in zip(self.planes, self.spec.planes, strict=True)]

    def put(self, rows: list[np.ndarray]) -> int:
        """Append the step's rows, in their formats, to the past; where they end."""
        end = self.past + len(rows[0])
        if end > len(self.planes[0]):
            self.planes = [_grown(held, room_for(end, len(held)), self.past) for held in self.planes]
        for held, new in zip(self.planes, rows, strict=True):
            held[self.past : end] = new
        return end

    def hold(self, step: Step, *rows: np.ndarray, q: np.ndarray | None = None) -> list[Held]:
        """Append the step's rows to the past; what the step may attend to with queries q, in parts."""
        return [Held(self.write(*rows), np.arange(self.past))]

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

    def load(self, length: int, rows: list[np.ndarray], point: list[np.ndarray]) -> None:
        self.planes, self.past = [saved.swapaxes(0, 1).copy() for saved in rows], length

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self.planes)


def _empty(plane: Plane) -> np.ndarray:
    if plane.format == NATIVE:
        return np.empty((0, plane.heads, plane.dim), np.float32)
    return np.empty((0, plane.heads, FORMATS[plane.format].row_bytes(plane.dim)), np.uint8)


def encoded(rows: np.ndarray, plane: Plane) -> np.ndarray:
    """float32 (n, K, D) as the plane stores it."""
    if plane.format == NATIVE:
        return rows
    return FORMATS[plane.format].encode(rotate(rows) if plane.rotated else rows)


def decoded(rows: np.ndarray, plane: Plane) -> np.ndarray:
    """The inverse of `encoded`, up to what the format loses."""
    if plane.format == NATIVE:
        return rows
    values = FORMATS[plane.format].decode(rows, plane.dim)
    return unrotate(values) if plane.rotated else values


def room_for(end: int, room: int) -> int:
    """Rows of an array of `room` rows once `end` have to fit."""
    return room if end <= room else max(2 * room, end)


def rows_held(tokens: int, rows: int) -> int:
    """Rows of NumpyRows' arrays once `tokens` tokens have been read in steps of `rows`."""
    room = 0
    for end in (*range(rows, tokens, rows), tokens):
        room = room_for(end, room)
    return room


def _grown(rows: np.ndarray, room: int, past: int) -> np.ndarray:
    grown = np.empty((room, *rows.shape[1:]), rows.dtype)
    grown[:past] = rows[:past]
    return grown


class NumpyWindow(NumpyRows):
    """Rows of the first `keep` committed tokens and of the last `window`, oldest first; the step's rows lie apart."""

    def __init__(self, spec: RowSpec):
        super().__init__(spec)
        assert spec.window is not None
        self.window, self.keep = spec.window, spec.keep
        self.rows = self.planes  # the step's

    def write(self, *rows: np.ndarray) -> list[np.ndarray]:
        """Keep the step's rows until the commit; the rows of the window and of the step."""
        self.rows = [encoded(new, plane) for new, plane in zip(rows, self.spec.planes, strict=True)]
        parts = zip(self.planes, self.rows, self.spec.planes, strict=True)
        return [decoded(np.concatenate([held, new]), plane) for held, new, plane in parts]

    def hold(self, step: Step, *rows: np.ndarray, q: np.ndarray | None = None) -> list[Held]:
        first = min(self.keep, self.past)
        rest = np.arange(self.past - (len(self.planes[0]) - first), self.past)
        return [Held(self.write(*rows), np.concatenate([np.arange(first), rest]))]

    def commit(self, path: np.ndarray) -> None:
        if len(path) and not len(self.rows[0]):  # a step may leave a layer's rows unwritten: blanks
            self.rows = [np.zeros((int(path.max()) + 1, *new.shape[1:]), new.dtype) for new in self.rows]
        leaves = len(self.planes[0]) + len(path) - self.window  # rows before it, but for the first `keep`
        pairs = zip(self.planes, self.rows, strict=True)
        self.planes = [np.concatenate([held, new[path]]) for held, new in pairs]
        if leaves > self.keep:
            self.planes = [np.delete(held, slice(self.keep, leaves), axis=0) for held in self.planes]
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

    def load(self, length: int, rows: list[np.ndarray], point: list[np.ndarray]) -> None:
        super().load(length, point, [])
        self.rows = [held[:0] for held in self.planes]


class Calibration(NamedTuple):
    """Mean and scale of each channel of the keys, float32 (K, D), or (T, K, D) where rows differ.

    A code spreads its error over all channels of a vector alike. With a deviation of keys d and a root mean square of
    queries r in a channel, the error of q·k is smallest where the scale is sqrt(d / r): the channel then is as large in
    equalised keys as in the queries that meet them.
    """

    mean: np.ndarray
    scale: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray) -> "Calibration":
        """Compute from keys and as many queries (n, 2 K, D); a constant channel has scale 1.

        Without queries, all zeros, the scale is the deviation. Sums are float64, in the order of the rows.
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
    """Keys and values in their formats, beside exact copies of the first and the latest rows (`Packing`).

    A row reads a token exactly where the token is among the first of the sequence or the latest before the row's own
    position, and from its codes elsewhere: what a row reads depends on positions alone, not on the steps that wrote
    them. Keys are calibrated along each row's own path, so that rows of a tree agree with their paths read alone.
    """

    keep = 0

    def __init__(self, spec: KVSpec):
        self.spec = spec
        self.codes, self.exact = NumpyRows(spec), NumpyWindow(spec.exact)
        self.calibration: Calibration | None = None  # of committed rows

    @property
    def past(self) -> int:
        return self.codes.past

    def hold(self, step: Step, *rows: np.ndarray, q: np.ndarray | None = None) -> list[Held]:
        (k, v), past, packing, planes = rows, self.past, self.spec.packing, self.spec.planes
        kept = _with_queries(step, k, q) if packing.calibration else k
        calibration = self._calibration(step, kept)
        new = [encoded(calibration.apply(k), planes[0]), encoded(v, planes[1])]
        self.codes.put(new)
        first = min(packing.first, past)
        keys, values = (decoded(held[first:past], plane) for held, plane in zip(self.codes.planes, planes, strict=True))
        if self.calibration is not None:
            keys = self.calibration.undo(keys)
        own = [calibration.undo(decoded(new[0], planes[0])), decoded(new[1], planes[1])]
        coded = [np.concatenate(pair) for pair in zip((keys, values), own, strict=True)]
        (held,) = self.exact.hold(step, kept, v)
        exact = [held.rows[0][:, : k.shape[1]], held.rows[1]]
        return [Held(coded, np.arange(first, past), exact=False), Held(exact, held.places, exact=True)]

    def _calibration(self, step: Step, kept: np.ndarray) -> Calibration:
        """Return the calibration that encodes the step's keys; none for rows whose path is too short.

        kept  the step's keys, and queries beside them, (T, 2 K, D)
        """
        n = self.spec.packing.calibration
        if self.calibration is not None:
            return self.calibration
        plane, known = self.spec.planes[0], self.exact.planes[0][:n]  # all committed rows
        none = Calibration.none((plane.heads, plane.dim))
        if not n or self.past + len(kept) < n:
            return none
        if step.is_chain:
            return Calibration.of(np.concatenate([known, kept])[:n])
        paths = [np.concatenate([known, kept[seen]])[:n] for seen in step.visible]
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

    def load(self, length: int, rows: list[np.ndarray], point: list[np.ndarray]) -> None:
        self.codes.load(length, rows, [])
        n = len(self.spec.exact.planes)
        self.exact.load(length, [], point[:n])
        self.calibration = Calibration(*(part.copy() for part in point[n:])) if point[n:] else None

    @property
    def nbytes(self) -> int:
        calibration = sum(part.nbytes for part in self.calibration or ())
        return self.codes.nbytes + self.exact.nbytes + calibration


def _with_queries(step: Step, k: np.ndarray, q: np.ndarray | None) -> np.ndarray:
    """k (T, K, D), and beside each head one query of its group (`ExactSpec`): (T, 2 K, D)"""
    T, K, D = k.shape
    if q is None:
        return np.concatenate([k, np.zeros_like(k)], axis=1)
    groups = q.reshape(T, K, -1, D)
    return np.concatenate([k, groups[np.arange(T), :, step.positions % groups.shape[2]]], axis=1)


class NumpyConv:
    """The last taps - 1 committed inputs, oldest first; zeros before the first token."""

    def __init__(self, spec: ConvSpec):
        self.tail = np.zeros((spec.taps - 1, spec.channels), np.float32)
        self.rows = self.tail[:0]  # the step's inputs

    def commit(self, path: np.ndarray) -> None:
        n = len(self.tail)
        self.tail = np.concatenate([self.tail, self.rows[path]])[len(path) : len(path) + n]
        self.rows = self.rows[:0]

    def snapshot(self) -> Any:
        return self.tail.copy()

    def restore(self, snapshot: Any) -> None:
        self.tail = snapshot.copy()

    def row_shapes(self, tokens: int) -> list[Shape]:
        return []

    def point_shapes(self, length: int) -> list[Shape]:
        return [(self.tail.shape, self.tail.dtype)]

    def save_rows(self, first: int, last: int) -> list[np.ndarray]:
        return []

    def save_point(self) -> list[np.ndarray]:
        return [self.tail.copy()]

    def load(self, length: int, rows: list[np.ndarray], point: list[np.ndarray]) -> None:
        self.tail = point[0].copy()
        self.rows = self.tail[:0]

    @property
    def nbytes(self) -> int:
        return self.tail.nbytes


class NumpyDelta:
    """The recurrent matrix per head, (Hv, Dk, Dv), and what the step's rows would make of it."""

    def __init__(self, spec: DeltaSpec):
        self.matrix = np.zeros((spec.heads, spec.key_dim, spec.value_dim), np.float32)
        self.rows: tuple[np.ndarray, ...] = ()  # k, v, exp(g), beta per row
        self.after: dict[int, np.ndarray] = {}  # matrix after a row: of all rows of a tree, of the last of a chain

    def commit(self, path: np.ndarray) -> None:
        if len(path) and path[-1] in self.after:
            self.matrix = self.after[path[-1]]
        else:
            for t in path:
                self.matrix = delta_rule(self.matrix, *(x[t] for x in self.rows))
        self.rows, self.after = (), {}

    def snapshot(self) -> Any:
        return self.matrix.copy()

    def restore(self, snapshot: Any) -> None:
        self.matrix = snapshot.copy()

    def row_shapes(self, tokens: int) -> list[Shape]:
        return []

    def point_shapes(self, length: int) -> list[Shape]:
        return [(self.matrix.shape, self.matrix.dtype)]

    def save_rows(self, first: int, last: int) -> list[np.ndarray]:
        return []

    def save_point(self) -> list[np.ndarray]:
        return [self.matrix.copy()]

    def load(self, length: int, rows: list[np.ndarray], point: list[np.ndarray]) -> None:
        self.matrix, self.rows, self.after = point[0].copy(), (), {}

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes


def delta_rule(S: np.ndarray, k: np.ndarray, v: np.ndarray, decay: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """One token of the gated delta rule: S (H, Dk, Dv), k (H, Dk), v (H, Dv), decay and beta (H,) -> the next S."""
    S = decay[:, None, None] * S
    correction = beta[:, None] * (v - np.einsum("hkv,hk->hv", S, k))
    return S + k[:, :, None] * correction[:, None, :]


def layer_state(s: Spec) -> LayerState:
    """The empty state that `s` describes."""
    if isinstance(s, RowSpec):
        if isinstance(s, KVSpec) and s.packing.keeps_exact:
            return NumpyPacked(s)
        return NumpyRows(s) if s.window is None else NumpyWindow(s)
    return {ConvSpec: NumpyConv, DeltaSpec: NumpyDelta}[type(s)](s)
