"""What a sequence leaves behind on the device: the cache of each attention layer, and recurrent states.

All layers of a kind lie in one allocation, so that `commit`, `snapshot` and `restore` are a launch or two, not one per
layer. Recurrent states come in pairs: a step reads one, and writes what the last commit made of it to the other, so it
can run twice; `commit` only notes the path and swaps the two.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from common.errors import BimetalError
from common.step import ConvSpec, DeltaSpec, KVSpec, LatentSpec, LayerSpec, State, Step, WindowSpec
from cuda_backend.launch import Memory, kernel
from cuda_backend.layout import padded, split_count
from cuda_backend.replay import TREE_ROWS, graphs

NO_LATENT = "the CUDA kernels have no latent attention yet; choose another backend for this model"
NO_ORDER = "a block whose rows all see each other has no order for a recurrent layer"
MOST_PIECES = 512  # of a past that attention splits: kernels/attention.cu combine
TILE = 64  # positions that attention reads at a time


@dataclass(frozen=True)
class KV:
    """Keys and values of one layer, float16 (kv_heads, capacity, D padded to 16)."""

    keys: int
    values: int
    capacity: int
    store: "KVStore"


class KVStore:
    """The caches of all layers of one shape: [layer][keys, values][kv_heads][capacity][D padded to 16]."""

    def __init__(self, spec: KVSpec, layers: int, capacity: int, stream: cupy.cuda.Stream):
        if spec.key_dim != spec.value_dim or spec.key_dim > 256:
            raise BimetalError(
                f"attention keys are {spec.key_dim} and values {spec.value_dim} wide; "
                "the CUDA kernels take equal widths up to 256"
            )
        if split_count(capacity + TREE_ROWS) > MOST_PIECES:
            raise BimetalError(f"a context of {capacity} tokens is more than the CUDA kernels take, about a million")
        self.spec, self.layers, self.stream, self.past = spec, layers, stream, 0
        self.capacity = -(-(capacity + TREE_ROWS) // TILE) * TILE  # and room for the rows of a step
        self.width = padded(spec.key_dim)
        self.plane = spec.kv_heads * self.capacity * self.width * 2
        self.memory = zeros(2 * layers * self.plane, stream)

    def layer(self, i: int) -> KV:
        keys = self.memory.address + 2 * i * self.plane
        return KV(keys, keys + self.plane, self.capacity, self)

    def commit(self, path: np.ndarray) -> None:
        n = len(path)
        if n and not np.array_equal(path, np.arange(n)):
            rows = np.ascontiguousarray(path, np.int32)
            device = Memory(rows.nbytes)
            cupy.cuda.runtime.memcpyAsync(device.address, rows.ctypes.data, rows.nbytes, 1, self.stream.ptr)
            if np.all(np.diff(path) > 0):
                self._keep(self.memory.address, self.capacity, self.past, self.capacity, self.past, device.address, n)
            else:  # a source may be overwritten before it is read
                copy = Memory(2 * self.layers * self.spec.kv_heads * n * self.width * 2)
                self._keep(copy.address, n, 0, self.capacity, self.past, device.address, n)
                self._keep(self.memory.address, self.capacity, self.past, n, 0, 0, n, copy.address)
        self.past += n

    def _keep(
        self, to: int, to_capacity: int, to_base: int, capacity: int, base: int, path: int, n: int, source: int = 0
    ) -> None:
        kernel("attention", "keep", (f"D={self.width}", f"DIM={self.spec.key_dim}"))(
            (2 * self.layers * self.spec.kv_heads,),
            (self.width // 8,),
            (
                np.uint64(source or self.memory.address),
                np.int64(capacity),
                np.int64(base),
                np.uint64(to),
                np.int64(to_capacity),
                np.int64(to_base),
                np.uint64(path),
                np.int32(n),
            ),
            stream=self.stream,
        )

    def snapshot(self) -> Any:
        return self.past

    def restore(self, snapshot: Any) -> None:
        self.past = snapshot

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes


@dataclass(frozen=True)
class Conv:
    """One layer's tails, float32 (n, C), `flip` elements apart, and rows (2, 64, C)."""

    tail: int
    flip: int
    rows: int
    spec: ConvSpec
    store: "Recurrent"


@dataclass
class Delta:
    """One layer's matrices, float32 (Hv, Dv, Dk), `flip` elements apart, and rows (2, 64, ...) of k, change, factor.

    key_heads  as the layer's first step told
    """

    matrix: int
    flip: int
    rows: int
    spec: DeltaSpec
    store: "Recurrent"
    key_heads: int = 1


class Recurrent:
    """The recurrent states of all layers.

    matrices  [2][layer], committed but for `path`, rows of the step before that are still to be applied
    current   which of the two
    """

    def __init__(self, specs: Sequence[ConvSpec | DeltaSpec], settle: Callable[[Any], None], stream: cupy.cuda.Stream):
        self.specs, self.settle, self.stream = specs, settle, stream
        self.current, self.path = 0, np.empty(0, np.int32)
        self.step_rows: int | None = None  # of the step that may be committed
        self.step_whole = False
        sizes = [_state_size(s) for s in specs]
        rows = [_row_size(s) for s in specs]
        self.flip = sum(sizes)  # elements of one of the two
        self.memory = zeros(2 * self.flip * 4, stream)
        self.rows = zeros(2 * TREE_ROWS * sum(rows) * 4, stream)
        self.layers: list[Conv | Delta] = []
        at, row_at = self.memory.address, self.rows.address
        for spec, size, row in zip(specs, sizes, rows, strict=True):
            made = Conv if isinstance(spec, ConvSpec) else Delta
            self.layers.append(made(at, self.flip, row_at, spec, self))  # type: ignore[arg-type]
            at, row_at = at + 4 * size, row_at + 8 * TREE_ROWS * row

    def began(self, step: Step) -> None:
        """The step is about to be launched; one of more than TREE_ROWS leaves its own state, no rows to choose from."""
        if step.parents is None:
            raise BimetalError(NO_ORDER)
        self.step_rows, self.step_whole = len(step), len(step) > TREE_ROWS

    def commit(self, path: np.ndarray) -> None:
        if not len(path):
            return
        if self.step_rows is None or path.min() < 0 or path.max() >= self.step_rows:
            raise ValueError(f"commit of rows {path.tolist()} of a step of {self.step_rows or 0}")
        if self.step_whole and not np.array_equal(path, np.arange(self.step_rows)):
            raise ValueError(
                f"a step of {self.step_rows} rows is kept whole or not at all; up to {TREE_ROWS} may be chosen"
            )
        self.path = np.empty(0, np.int32) if self.step_whole else path.astype(np.int32)
        self.current, self.step_rows = 1 - self.current, None

    def snapshot(self) -> Any:
        """A copy of the states with the path applied."""
        which = self.current
        if len(self.path):
            self.settle(self)  # writes the other one, as the next step would
            which = 1 - which
            if self.step_whole:
                self.step_rows = None  # its state was there
        copy = Memory(self.flip * 4)
        self._copy(copy.address, self.memory.address + which * self.flip * 4)
        return copy

    def restore(self, snapshot: Any) -> None:
        self._copy(self.memory.address + self.current * self.flip * 4, snapshot.address)
        self.path, self.step_rows = np.empty(0, np.int32), None

    def _copy(self, to: int, source: int) -> None:
        cupy.cuda.runtime.memcpyAsync(
            to, source, self.flip * 4, cupy.cuda.runtime.memcpyDeviceToDevice, self.stream.ptr
        )

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes + self.rows.nbytes


def _state_size(spec: ConvSpec | DeltaSpec) -> int:
    if isinstance(spec, ConvSpec):
        return -(-(spec.taps - 1) * spec.channels // 64) * 64
    if spec.key_dim > 256:
        raise BimetalError(f"Gated DeltaNet keys are {spec.key_dim} wide; the CUDA kernels take widths up to 256")
    return -(-spec.heads * padded(spec.key_dim) * spec.value_dim // 64) * 64


def _row_size(spec: ConvSpec | DeltaSpec) -> int:
    """Elements that one row of a step leaves; for a delta state as if every value head had its own key."""
    if isinstance(spec, ConvSpec):
        return spec.channels
    return spec.heads * (padded(spec.key_dim) + spec.value_dim + 1)


class CudaState(State):
    """`state[i].kv`, `.conv`, `.delta` are the layers' handles; the stores behind them commit all layers at once."""

    def __init__(
        self, spec: Sequence[LayerSpec], capacity: int, settle: Callable[[Any], None], stream: cupy.cuda.Stream
    ):
        flat = [(i, name, s) for i, layer in enumerate(spec) for name, s in layer.items()]
        if any(isinstance(s, LatentSpec) for _, _, s in flat):
            raise BimetalError(NO_LATENT)
        if any(isinstance(s, WindowSpec) and s.keep for _, _, s in flat):
            raise BimetalError("a window that keeps its first rows has no CUDA kernel yet; use --backend mlx or numpy")
        # a window's rows are hidden, not dropped: it keeps the whole context
        flat = [
            (i, n, KVSpec(s.kv_heads, s.key_dim, s.value_dim) if isinstance(s, WindowSpec) else s) for i, n, s in flat
        ]
        kv = [(i, name, s) for i, name, s in flat if isinstance(s, KVSpec)]
        recurrent = [(i, name, s) for i, name, s in flat if isinstance(s, ConvSpec | DeltaSpec)]
        layers: list[dict[str, Any]] = [{} for _ in spec]
        self.stores: list[Any] = []
        for shape in dict.fromkeys(s for _, _, s in kv):
            alike = [(i, name) for i, name, s in kv if s == shape]
            store = KVStore(shape, len(alike), capacity, stream)
            self.stores.append(store)
            for n, (i, name) in enumerate(alike):
                layers[i][name] = store.layer(n)
        self.recurrent = Recurrent([s for _, _, s in recurrent], settle, stream) if recurrent else None
        if self.recurrent:
            self.stores.append(self.recurrent)
            for handle, (i, name, _) in zip(self.recurrent.layers, recurrent, strict=True):
                layers[i][name] = handle
        self.graphs = graphs()
        super().__init__(layers, capacity)

    def _all(self) -> list[Any]:
        return self.stores


def state_bytes(spec: Sequence[LayerSpec], capacity: int) -> int:
    """Device bytes of a CudaState, without building it."""
    total = 0
    for s in (s for layer in spec for s in layer.values()):
        if isinstance(s, KVSpec | WindowSpec):
            rows = -(-(capacity + TREE_ROWS) // TILE) * TILE
            total += 4 * s.kv_heads * rows * padded(s.key_dim)
        elif isinstance(s, ConvSpec | DeltaSpec):
            total += 8 * _state_size(s) + 8 * TREE_ROWS * _row_size(s)
        else:
            raise BimetalError(NO_LATENT)
    return total


def zeros(nbytes: int, stream: cupy.cuda.Stream) -> Memory:
    memory = Memory(nbytes)
    cupy.cuda.runtime.memsetAsync(memory.address, 0, memory.nbytes, stream.ptr)
    return memory
