"""What NumpyOps stores for a sequence: rows of attention, convolution tails and delta matrices, all in float32."""

from typing import Any

import numpy as np

from common.step import LayerState
from common.storage import ConvSpec, DeltaSpec, RowSpec, Spec


class NumpyRows:
    """Rows (n, K, D) of committed tokens, then the step's, in one array per plane: keys and values, or latent rows."""

    keep = 0  # first rows that no window hides

    def __init__(self, spec: RowSpec):
        self.planes = [np.empty((0, plane.heads, plane.dim), np.float32) for plane in spec.planes]
        self.past = 0  # committed rows

    @property
    def keys(self) -> np.ndarray:
        return self.planes[0]

    @property
    def values(self) -> np.ndarray:
        return self.planes[-1]

    def write(self, *rows: np.ndarray) -> list[np.ndarray]:
        """Put the step's rows (T, K, D) behind the past; the rows of both, (n + T, K, D)."""
        end = self.past + len(rows[0])
        if end > len(self.planes[0]):
            self.planes = [_grown(plane, room_for(end, len(plane)), self.past) for plane in self.planes]
        for plane, new in zip(self.planes, rows, strict=True):
            plane[self.past : end] = new
        return [plane[:end] for plane in self.planes]

    def commit(self, path: np.ndarray) -> None:
        rows = slice(self.past, self.past + len(path))
        for plane in self.planes:
            plane[rows] = plane[self.past + path]
        self.past += len(path)

    def snapshot(self) -> Any:
        return self.past

    def restore(self, snapshot: Any) -> None:
        self.past = snapshot

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)


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
        self.rows = list(rows)
        return [np.concatenate(pair) for pair in zip(self.planes, rows, strict=True)]

    def commit(self, path: np.ndarray) -> None:
        kept = np.arange(len(self.planes[0]) + len(path))
        kept = kept[(kept < self.keep) | (kept >= len(kept) - self.window)]
        pairs = zip(self.planes, self.rows, strict=True)
        self.planes = [np.concatenate([plane, new[path]])[kept] for plane, new in pairs]
        self.rows = [new[:0] for new in self.rows]
        self.past += len(path)

    def snapshot(self) -> Any:
        return self.planes, self.past  # commits replace the arrays, and never write into them

    def restore(self, snapshot: Any) -> None:
        self.planes, self.past = snapshot


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
        return NumpyRows(s) if s.window is None else NumpyWindow(s)
    return {ConvSpec: NumpyConv, DeltaSpec: NumpyDelta}[type(s)](s)
