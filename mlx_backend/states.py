"""One sequence's memory in MLX arrays: keys and values, convolution tails, delta matrices."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from common.step import ConvSpec, DeltaSpec, KVSpec, LayerSpec, Spec, State

PREFILL = 32  # rows of a commit from which it is a prompt's
KV_ROWS = 256  # keys and values grow by this many rows, or by a quarter where that is more


class MlxKV:
    """Keys (1, K, n, D) and values (1, K, n, Dv) of committed rows, then the step's rows, then room."""

    def __init__(self, spec: KVSpec, dtype: mx.Dtype):
        self.keys = mx.zeros((1, spec.kv_heads, 0, spec.key_dim), dtype)
        self.values = mx.zeros((1, spec.kv_heads, 0, spec.value_dim), dtype)
        self.past = 0

    def write(self, k: mx.array, v: mx.array) -> None:
        """Put the step's rows, (1, K, T, D), behind the past."""
        end = self.past + k.shape[2]
        if end > self.keys.shape[2]:
            room = end + max(KV_ROWS, end // 4)
            self.keys, self.values = _grown(self.keys, room), _grown(self.values, room)
        self.keys[:, :, self.past : end] = k
        self.values[:, :, self.past : end] = v

    def commit(self, path: np.ndarray) -> None:
        end = self.past + len(path)
        if not np.array_equal(path, np.arange(len(path))):
            rows = mx.array(self.past + path)
            self.keys[:, :, self.past : end] = self.keys[:, :, rows]
            self.values[:, :, self.past : end] = self.values[:, :, rows]
        self.past = end

    def snapshot(self) -> Any:
        return self.past

    def restore(self, snapshot: Any) -> None:
        self.past = snapshot

    @property
    def arrays(self) -> list[mx.array]:
        return [self.keys, self.values]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


def _grown(rows: mx.array, room: int) -> mx.array:
    B, K, n, D = rows.shape
    return mx.concatenate([rows, mx.zeros((B, K, room - n, D), rows.dtype)], axis=2)


class MlxConv:
    """The last taps - 1 committed inputs, oldest first; zeros before the first token. Never written in place."""

    def __init__(self, spec: ConvSpec, dtype: mx.Dtype):
        self.tail = mx.zeros((spec.taps - 1, spec.channels), dtype)
        self.stream = self.tail  # the tail, then the step's inputs

    def commit(self, path: np.ndarray) -> None:
        n, t = len(self.tail), len(path)
        if np.array_equal(path, np.arange(t)):
            self.tail = self.stream[t : t + n]
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
    """The recurrent matrix per head as MLX lays it, (1, Hv, Dv, Dk) float32, and the step's rows for a replay."""

    def __init__(self, spec: DeltaSpec, dtype: mx.Dtype):
        self.matrix = mx.zeros((1, spec.heads, spec.value_dim, spec.key_dim), mx.float32)
        self.rows: tuple[mx.array, ...] = ()  # k, v (1, T, H, D), exp(g), beta (1, T, H)
        self.after: mx.array | None = None  # the matrix after all rows of a chain

    def commit(self, path: np.ndarray) -> None:
        T = self.rows[0].shape[1] if self.rows else 0
        if self.after is not None and len(path) == T:
            self.matrix = self.after
        elif len(path):
            at = mx.array(path)
            k, v, decay, beta = (x[:, at] for x in self.rows)
            self.matrix = mx.fast.gated_delta_update(k, k, v, decay, beta, self.matrix)[1]
        self.rows, self.after = (), None

    def snapshot(self) -> Any:
        return self.matrix

    def restore(self, snapshot: Any) -> None:
        self.matrix = snapshot
        self.rows, self.after = (), None

    @property
    def arrays(self) -> list[mx.array]:
        return [self.matrix]

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes


STATES: dict[type[Spec], Any] = {KVSpec: MlxKV, ConvSpec: MlxConv, DeltaSpec: MlxDelta}


class MlxState(State):
    def commit(self, path: Sequence[int] | np.ndarray) -> None:
        super().commit(path)
        if len(path) > PREFILL:  # else the graph of all chunks would be built before the first is computed
            mx.eval([array for state in self._all() for array in state.arrays])  # type: ignore[attr-defined]


def new_state(spec: Sequence[LayerSpec], capacity: int, dtype: mx.Dtype) -> MlxState:
    return MlxState([{name: STATES[type(s)](s, dtype) for name, s in layer.items()} for layer in spec], capacity)
