"""Recurrent states that NumpyOps stores for a sequence: tails of convolutions and matrices of Gated DeltaNet."""

from typing import Any

import numpy as np

from common.step import NoRows, Parts, Shape
from common.storage import ConvSpec, DeltaSpec


class NumpyConv(NoRows):
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

    def point_shapes(self, length: int) -> list[Shape]:
        return [(self.tail.shape, self.tail.dtype)]

    def save_point(self) -> list[np.ndarray]:
        return [self.tail.copy()]

    def load(self, length: int, rows: list[Parts], point: list[np.ndarray]) -> None:
        self.tail = point[0].copy()
        self.rows = self.tail[:0]

    @property
    def nbytes(self) -> int:
        return self.tail.nbytes


class NumpyDelta(NoRows):
    """The recurrent matrix per head, (Hv, Dk, Dv), and its values after the step's rows."""

    def __init__(self, spec: DeltaSpec):
        self.spec = spec
        self.matrix = np.zeros((spec.heads, spec.key_dim, spec.value_dim), np.float32)
        self.rows: tuple[np.ndarray, ...] = ()  # k, v, exp(g), beta per row
        self.after: dict[int, np.ndarray] = {}  # matrix after a row: all rows of a tree, the last of a chain

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

    def point_shapes(self, length: int) -> list[Shape]:
        return [(self.matrix.shape, self.matrix.dtype)]

    def save_point(self) -> list[np.ndarray]:
        return [self.matrix.copy()]

    def load(self, length: int, rows: list[Parts], point: list[np.ndarray]) -> None:
        self.matrix, self.rows, self.after = point[0].copy(), (), {}

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes


def delta_rule(S: np.ndarray, k: np.ndarray, v: np.ndarray, decay: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """Apply one token of the gated delta rule: S (H, Dk, Dv), k (H, Dk), v (H, Dv), decay, beta (H,) -> the next S."""
    S = decay[:, None, None] * S
    correction = beta[:, None] * (v - np.einsum("hkv,hk->hv", S, k))
    return S + k[:, :, None] * correction[:, None, :]
