"""What a sequence stores on the device: recurrent states, and all states of a model together.

All layers of a kind lie in one allocation, so that `commit`, `snapshot` and `restore` are a launch or two, not one per
layer. Recurrent states come in pairs: a step reads one, and writes what the last commit made of it to the other, so it
can run twice; `commit` only notes the path and swaps the two.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.errors import BimetalError
from common.step import MAX_DECODE_ROWS, Shape, State, Step
from common.storage import ConvSpec, DeltaSpec, KVSpec, LatentSpec, LayerSpec, RowSpec, Spec, all_specs
from cuda_backend.caches.kv import KVStore, kv_bytes
from cuda_backend.caches.latent import LatentStore, latent_planes
from cuda_backend.caches.packed import PackedStore, keeps_exact, packed_bytes
from cuda_backend.caches.planes import check_capacity, copy, planes_bytes, zeros
from cuda_backend.caches.window import NOT_IN_PART, WindowStore, window_bytes
from cuda_backend.launch import Stream
from cuda_backend.layout import padded
from cuda_backend.memory import Memory, copy_in, copy_out
from cuda_backend.replay import graphs

NO_ORDER = "a block whose rows all see each other has no order for a recurrent layer"


@dataclass(frozen=True)
class Conv:
    """One layer's tails, float32 (n, C), `flip` elements apart, and rows (2, MAX_DECODE_ROWS, C)."""

    tail: int
    flip: int
    rows: int
    spec: ConvSpec
    store: "Recurrent"


@dataclass(frozen=True)
class Delta:
    """One layer's matrices, float32 (Hv, Dv, Dk), `flip` elements apart.

    rows  k, change and factor of each row, (2, MAX_DECODE_ROWS, ...)
    """

    matrix: int
    flip: int
    rows: int
    spec: DeltaSpec
    store: "Recurrent"


class Recurrent:
    """The recurrent states of all layers.

    matrices  [2][layer], committed but for `path`, rows of the step before that are still to be applied
    current   which of the two
    """

    def __init__(self, specs: Sequence[ConvSpec | DeltaSpec], apply_path: Callable[[Any], None], stream: Stream):
        self.specs, self.apply_path, self.stream = specs, apply_path, stream
        self.current, self.path = 0, np.empty(0, np.int32)
        self.step_rows: int | None = None  # of the step that may be committed
        self.step_whole = False
        self.flip = sum(map(_state_size, specs))  # elements of one of the two
        self.memory = zeros(2 * self.flip * 4, stream)
        self.rows = zeros(2 * MAX_DECODE_ROWS * sum(map(_row_size, specs)) * 4, stream)

    def layers(self) -> list[Conv | Delta]:
        """Each layer's, which hold this one; not held here, so that the memory goes with the last of them."""
        layers: list[Conv | Delta] = []
        at, row_at = self.memory.address, self.rows.address
        for spec in self.specs:
            if isinstance(spec, ConvSpec):
                layers.append(Conv(at, self.flip, row_at, spec, self))
            else:
                layers.append(Delta(at, self.flip, row_at, spec, self))
            at, row_at = at + 4 * _state_size(spec), row_at + 8 * MAX_DECODE_ROWS * _row_size(spec)
        return layers

    def note_step(self, step: Step) -> None:
        """Note a step before its launch; one of more than MAX_DECODE_ROWS rows is committed whole or not at all."""
        if step.parents is None:
            raise BimetalError(NO_ORDER)
        self.step_rows, self.step_whole = len(step), len(step) > MAX_DECODE_ROWS

    def commit(self, path: np.ndarray) -> None:
        if not len(path):
            return
        if self.step_rows is None or path.min() < 0 or path.max() >= self.step_rows:
            raise ValueError(f"commit of rows {path.tolist()} of a step of {self.step_rows or 0}")
        if self.step_whole and not np.array_equal(path, np.arange(self.step_rows)):
            raise ValueError(NOT_IN_PART.format(self.step_rows))
        self.path = np.empty(0, np.int32) if self.step_whole else path.astype(np.int32)
        self.current, self.step_rows = 1 - self.current, None

    def snapshot(self) -> Any:
        """A copy of the states with the path applied."""
        which = self.current
        if len(self.path):
            self.apply_path(self)  # writes the other one, as the next step would
            which = 1 - which
            if self.step_whole:
                self.step_rows = None  # its state was there
        copy = Memory(self.flip * 4, self.stream)
        self._copy(copy.address, self.memory.address + which * self.flip * 4)
        return copy

    def restore(self, snapshot: Any) -> None:
        self._copy(self.memory.address + self.current * self.flip * 4, snapshot.address)
        self.path, self.step_rows = np.empty(0, np.int32), None

    def row_shapes(self, tokens: int) -> list[Shape]:
        return []

    def point_shapes(self, length: int) -> list[Shape]:
        return [((self.flip,), np.dtype(np.float32))]

    def save_rows(self, first: int, last: int) -> list[np.ndarray]:
        return []

    def save_point(self) -> list[np.ndarray]:
        """The states of all layers as they lie on the device, with the path applied."""
        held = self.snapshot()
        return [copy_out(held.address, held.nbytes, self.stream).view(np.float32)]

    def load(self, length: int, rows: list[np.ndarray], point: list[np.ndarray]) -> None:
        copy_in(self.memory.address + self.current * self.flip * 4, np.ascontiguousarray(point[0]), self.stream)
        self.path, self.step_rows = np.empty(0, np.int32), None

    def _copy(self, to: int, source: int) -> None:
        copy(to, source, self.flip * 4, self.stream)

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes + self.rows.nbytes


def _state_size(spec: ConvSpec | DeltaSpec) -> int:
    if isinstance(spec, ConvSpec):
        return -(-(spec.taps - 1) * spec.channels // 64) * 64
    if spec.key_dim > 256 or spec.key_dim % 4 or spec.value_dim % 4:
        raise BimetalError(
            f"Gated DeltaNet keys are {spec.key_dim} and values {spec.value_dim} wide; "
            "the CUDA kernels take multiples of 4, keys up to 256"
        )
    return -(-spec.heads * padded(spec.key_dim) * spec.value_dim // 64) * 64


def _row_size(spec: ConvSpec | DeltaSpec) -> int:
    """Elements that one row of a step leaves."""
    if isinstance(spec, ConvSpec):
        return spec.channels
    return spec.key_heads * padded(spec.key_dim) + spec.heads * (spec.value_dim + 1)


class CudaState(State):
    """`state[i].kv`, `.conv`, `.delta` are the layers' handles; the stores behind them commit all layers at once."""

    def __init__(self, spec: Sequence[LayerSpec], capacity: int, apply_path: Callable[[Any], None], stream: Stream):
        flat = [(i, name, s) for i, layer in enumerate(spec) for name, s in layer.items()]
        cached = [(i, name, s) for i, name, s in flat if isinstance(s, RowSpec)]
        recurrent = [(i, name, s) for i, name, s in flat if isinstance(s, ConvSpec | DeltaSpec)]
        layers: list[dict[str, Any]] = [{} for _ in spec]
        self.stores: list[Any] = []
        for shape in dict.fromkeys(s for _, _, s in cached):
            alike = [(i, name) for i, name, s in cached if s == shape]
            store = _store_of(shape, len(alike), capacity, stream)
            self.stores.append(store)
            for n, (i, name) in enumerate(alike):
                layers[i][name] = store.layer(n)
        self.recurrent = Recurrent([s for _, _, s in recurrent], apply_path, stream) if recurrent else None
        if self.recurrent:
            self.stores.append(self.recurrent)
            for handle, (i, name, _) in zip(self.recurrent.layers(), recurrent, strict=True):
                layers[i][name] = handle
        self.graphs = graphs()
        super().__init__(layers, capacity)

    def note_step(self, step: Step) -> None:
        """A step is about to be launched. A block is for layers that attend alone."""
        for store in self.stores:
            if isinstance(store, KVStore) or (isinstance(store, Recurrent) and step.parents is not None):
                store.note_step(step)

    @property
    def calibrates(self) -> bool:
        """Whether the step that was noted last equalises keys by what it reads itself: it runs once in a sequence."""
        return any(isinstance(store, PackedStore) and store.calibrates for store in self.stores)

    def _all(self) -> list[Any]:
        return self.stores


def state_bytes(spec: Sequence[LayerSpec], capacity: int) -> int:
    """Device bytes of a CudaState, without building it."""
    check_capacity(capacity)
    return sum(_layer_bytes(s, capacity) for s in all_specs(spec))


def _store_of(spec: RowSpec, layers: int, capacity: int, stream: Stream) -> KVStore | LatentStore:
    if isinstance(spec, LatentSpec):
        return LatentStore(spec, layers, capacity, stream)
    assert isinstance(spec, KVSpec)
    if spec.window is not None:
        return WindowStore(spec, layers, capacity, stream)
    return (PackedStore if keeps_exact(spec) else KVStore)(spec, layers, capacity, stream)


def _layer_bytes(spec: Spec, capacity: int) -> int:
    match spec:
        case LatentSpec():
            return planes_bytes(latent_planes(spec, 1, capacity))
        case KVSpec():
            if spec.window is not None:
                return window_bytes(spec, capacity)
            return (packed_bytes if keeps_exact(spec) else kv_bytes)(spec, capacity)
        case ConvSpec() | DeltaSpec():
            return 8 * _state_size(spec) + 8 * MAX_DECODE_ROWS * _row_size(spec)
