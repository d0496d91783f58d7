"""One sequence's memory in MLX arrays: convolution tails, delta matrices; rows.py and packed.py have the rest."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from common.step import NoRows, Parts, Shape, State
from common.storage import ConvSpec, DeltaSpec
from mlx_backend.recurrent import Rows, replay
from mlx_backend.saved import from_host, shape_of, to_host

PREFILL = 32  # rows from which a commit is that of a prompt


class MlxConv(NoRows):
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

    def point_shapes(self, length: int) -> list[Shape]:
        return [shape_of(self.tail)]

    def save_point(self) -> list[np.ndarray]:
        return [to_host(self.tail)]

    def load(self, length: int, rows: list[Parts], point: list[np.ndarray]) -> None:
        self.tail = self.stream = from_host(point[0], self.tail.dtype)

    @property
    def arrays(self) -> list[mx.array]:
        return [self.tail]

    @property
    def nbytes(self) -> int:
        return self.tail.nbytes


class MlxDelta(NoRows):
    """The recurrent matrix per head in MLX's layout, (Hv, Dv, Dk) float32, and the step's rows for a replay."""

    def __init__(self, spec: DeltaSpec):
        self.spec = spec
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

    def point_shapes(self, length: int) -> list[Shape]:
        return [shape_of(self.matrix)]

    def save_point(self) -> list[np.ndarray]:
        return [to_host(self.matrix)]

    def load(self, length: int, rows: list[Parts], point: list[np.ndarray]) -> None:
        self.matrix, self.rows, self.after = from_host(point[0], mx.float32), None, None

    @property
    def arrays(self) -> list[mx.array]:
        return [self.matrix]

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes


class MlxState(State):
    def commit(self, path: Sequence[int] | np.ndarray) -> None:
        super().commit(path)
        if len(path) > PREFILL:  # else the graph of all chunks would be built before the first is computed
            mx.eval([array for state in self._all() for array in state.arrays])  # type: ignore[attr-defined]
