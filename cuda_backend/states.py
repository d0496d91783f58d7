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
from common.step import MAX_DECODE_ROWS, State, Step
from common.storage import ConvSpec, DeltaSpec, KVSpec, LatentSpec, LayerSpec, RowSpec, all_specs
from cuda_backend.launch import kernel
from cuda_backend.layout import group_count, padded, tail_places
from cuda_backend.memory import Memory
from cuda_backend.prototypes import PLACES
from cuda_backend.replay import graphs

NO_ORDER = "a block whose rows all see each other has no order for a recurrent layer"
MOST_PIECES = 512  # of a past that attention splits: kernels/pieces.cu combine
TILE = 64  # positions that attention reads at a time
NOT_IN_PART = f"a step of {{}} rows is kept whole or not at all; up to {MAX_DECODE_ROWS} may be chosen"


@dataclass(frozen=True)
class KV:
    """Keys and values of one layer, float16 (kv_heads, capacity, D padded to 16); `after` as keys, see KVStore.

    places  where the cache holds a position: kernels/flash.cuh
    """

    keys: int
    values: int
    after: int
    capacity: int
    places: np.ndarray
    store: "KVStore"


class KVStore:
    """The caches of all layers of one shape: [layer][keys, values][kv_heads][capacity][D padded to 16].

    Of a window the first `keep` positions are held, and a ring of the last with room for the rows of a step. A step
    of more rows than that attends to a copy, and leaves in `after` what the ring becomes where the step is committed.
    """

    def __init__(self, spec: KVSpec, layers: int, capacity: int, stream: cupy.cuda.Stream):
        _check_widths(spec)
        _check_capacity(capacity)
        self.spec, self.layers, self.stream, self.past = spec, layers, stream, 0
        self.places = _places(spec, capacity)
        self.capacity = int(self.places["fixed"] + self.places["ring"])
        self.most = _rows(capacity)  # positions that there may be
        self.is_ring = self.capacity < self.most
        self.width = padded(spec.key_dim)
        self.plane = spec.kv_heads * self.capacity * self.width * 2
        self.memory = zeros(2 * layers * self.plane, stream)
        self.after = zeros(self.memory.nbytes, stream) if self.is_ring else None
        self.step_rows = 0  # of a step that left `after`

    @property
    def window(self) -> tuple[int, int]:
        """Positions that a row sees behind the first ones that are kept, 0: all; and those first ones."""
        return self.spec.window or 0, self.spec.keep

    def layer(self, i: int) -> KV:
        keys = self.memory.address + 2 * i * self.plane
        after = self.after.address + 2 * i * self.plane if self.after else 0
        return KV(keys, keys + self.plane, after, self.capacity, self.places, self)

    def began(self, step: Step) -> None:
        self.step_rows = len(step) if self.is_ring and len(step) > MAX_DECODE_ROWS else 0

    def commit(self, path: np.ndarray) -> None:
        n = len(path)
        if n and self.step_rows:
            if not np.array_equal(path, np.arange(self.step_rows)):
                raise ValueError(NOT_IN_PART.format(self.step_rows))
            assert self.after
            copy(self.memory.address, self.after.address, self.memory.nbytes, self.stream)
        elif n and not np.array_equal(path, np.arange(n)):
            planes = 2 * self.layers * self.spec.kv_heads
            keep_path(self.memory.address, planes, self.capacity, self.places, self.width, self.past, path, self.stream)
        self.past += n
        self.step_rows = 0

    def snapshot(self) -> Any:
        if not self.is_ring:
            return self.past, None
        held = Memory(self.memory.nbytes)
        copy(held.address, self.memory.address, held.nbytes, self.stream)
        return self.past, held

    def restore(self, snapshot: Any) -> None:
        self.past, held = snapshot
        if held:
            copy(self.memory.address, held.address, held.nbytes, self.stream)

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes * (2 if self.is_ring else 1)


@dataclass(frozen=True)
class Latent:
    """Rows of one layer, float16 (capacity, width): a latent padded to 16, then a roped key padded to 16."""

    rows: int
    capacity: int
    width: int
    store: "LatentStore"


class LatentStore:
    """The rows of all layers of one shape, [layer][capacity][width]."""

    def __init__(self, spec: LatentSpec, layers: int, capacity: int, stream: cupy.cuda.Stream):
        _check_capacity(capacity)
        self.spec, self.layers, self.stream, self.past = spec, layers, stream, 0
        self.capacity, self.width = _rows(capacity), latent_width(spec)
        self.places = np.array((self.capacity, TILE), PLACES)
        self.memory = zeros(layers * self.capacity * self.width * 2, stream)

    def layer(self, i: int) -> Latent:
        rows = self.memory.address + i * self.capacity * self.width * 2
        return Latent(rows, self.capacity, self.width, self)

    def commit(self, path: np.ndarray) -> None:
        n = len(path)
        if n and not np.array_equal(path, np.arange(n)):
            planes, address = self.layers, self.memory.address
            keep_path(address, planes, self.capacity, self.places, self.width, self.past, path, self.stream)
        self.past += n

    def snapshot(self) -> Any:
        return self.past

    def restore(self, snapshot: Any) -> None:
        self.past = snapshot

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes


def latent_width(spec: LatentSpec) -> int:
    return padded(spec.latent_dim) + padded(spec.rope_dim)


def _rows(capacity: int) -> int:
    """Rows of a cache of everything, with room for those of a step."""
    return -(-(capacity + MAX_DECODE_ROWS) // TILE) * TILE


def _places(spec: KVSpec, capacity: int) -> np.ndarray:
    rows = _rows(capacity)
    if spec.window is not None:
        fixed, ring = -(-spec.keep // TILE) * TILE, -(-(spec.window + MAX_DECODE_ROWS) // TILE) * TILE
        if fixed + ring < rows:
            return np.array((fixed, ring), PLACES)
    return np.array((rows - TILE, TILE), PLACES)


def _check_widths(spec: KVSpec) -> None:
    if spec.key_dim != spec.value_dim or spec.key_dim > 256:
        raise BimetalError(
            f"attention keys are {spec.key_dim} and values {spec.value_dim} wide; "
            "the CUDA kernels take equal widths up to 256"
        )


def _check_capacity(capacity: int) -> None:
    if group_count(capacity + MAX_DECODE_ROWS) + tail_places(TILE // 2, MAX_DECODE_ROWS) > MOST_PIECES:
        raise BimetalError(f"a context of {capacity} tokens is more than the CUDA kernels take, about a million")


def keep_path(
    address: int, planes: int, capacity: int, places: np.ndarray, width: int, past: int, path: np.ndarray, stream: Any
) -> None:
    """Rows past + path[j] of every plane to past + j, in place."""
    rows, n = np.ascontiguousarray(path, np.int32), len(path)
    device = Memory(rows.nbytes)
    cupy.cuda.runtime.memcpyAsync(device.address, rows.ctypes.data, rows.nbytes, 1, stream.ptr)
    if np.all(np.diff(path) > 0):
        move(address, capacity, places, past, address, capacity, places, past, planes, width, n, stream, device.address)
    else:  # a source may be overwritten before it is read
        dense = np.array((n, 1), PLACES)
        aside = Memory(planes * n * width * 2)
        move(address, capacity, places, past, aside.address, n, dense, 0, planes, width, n, stream, device.address)
        move(aside.address, n, dense, 0, address, capacity, places, past, planes, width, n, stream)


def move(
    source: int,
    capacity: int,
    places: np.ndarray,
    base: int,
    to: int,
    to_capacity: int,
    to_places: np.ndarray,
    to_base: int,
    planes: int,
    width: int,
    n: int,
    stream: Any,
    path: int = 0,
) -> None:
    """n rows of every plane from one cache to another, at positions base + path[j] (or j) to to_base + j."""
    kernel("keep", "keep")(
        (planes, 1 if source == to else min(n, 64)),
        (width // 8,),
        (
            np.uint64(source),
            np.int64(capacity),
            places,
            np.int32(base),
            np.uint64(to),
            np.int64(to_capacity),
            to_places,
            np.int32(to_base),
            np.uint64(path),
            np.int32(n),
            np.int32(width),
        ),
        stream=stream,
    )


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

    def __init__(self, specs: Sequence[ConvSpec | DeltaSpec], settle: Callable[[Any], None], stream: cupy.cuda.Stream):
        self.specs, self.settle, self.stream = specs, settle, stream
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

    def began(self, step: Step) -> None:
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

    def __init__(
        self, spec: Sequence[LayerSpec], capacity: int, settle: Callable[[Any], None], stream: cupy.cuda.Stream
    ):
        flat = [(i, name, s) for i, layer in enumerate(spec) for name, s in layer.items()]
        cached = [(i, name, s) for i, name, s in flat if isinstance(s, RowSpec)]
        recurrent = [(i, name, s) for i, name, s in flat if isinstance(s, ConvSpec | DeltaSpec)]
        layers: list[dict[str, Any]] = [{} for _ in spec]
        self.stores: list[Any] = []
        for shape in dict.fromkeys(s for _, _, s in cached):
            alike = [(i, name) for i, name, s in cached if s == shape]
            store: Any
            if isinstance(shape, LatentSpec):
                store = LatentStore(shape, len(alike), capacity, stream)
            else:
                store = KVStore(shape, len(alike), capacity, stream)
            self.stores.append(store)
            for n, (i, name) in enumerate(alike):
                layers[i][name] = store.layer(n)
        self.recurrent = Recurrent([s for _, _, s in recurrent], settle, stream) if recurrent else None
        if self.recurrent:
            self.stores.append(self.recurrent)
            for handle, (i, name, _) in zip(self.recurrent.layers(), recurrent, strict=True):
                layers[i][name] = handle
        self.graphs = graphs()
        super().__init__(layers, capacity)

    def began(self, step: Step) -> None:
        """A step is about to be launched. A block is for layers that attend alone."""
        for store in self.stores:
            if isinstance(store, KVStore) or (isinstance(store, Recurrent) and step.parents is not None):
                store.began(step)

    def _all(self) -> list[Any]:
        return self.stores


def state_bytes(spec: Sequence[LayerSpec], capacity: int) -> int:
    """Device bytes of a CudaState, without building it."""
    _check_capacity(capacity)
    total = 0
    for s in all_specs(spec):
        if isinstance(s, KVSpec):
            places = _places(s, capacity)
            rows = int(places["fixed"] + places["ring"])
            total += 4 * s.kv_heads * rows * padded(s.key_dim) * (2 if rows < _rows(capacity) else 1)
        elif isinstance(s, LatentSpec):
            total += 2 * _rows(capacity) * latent_width(s)
        else:
            total += 8 * _state_size(s) + 8 * MAX_DECODE_ROWS * _row_size(s)
    return total


def zeros(nbytes: int, stream: cupy.cuda.Stream) -> Memory:
    memory = Memory(nbytes)
    cupy.cuda.runtime.memsetAsync(memory.address, 0, memory.nbytes, stream.ptr)
    return memory


def copy(to: int, source: int, nbytes: int, stream: cupy.cuda.Stream) -> None:
    runtime = cupy.cuda.runtime
    runtime.memcpyAsync(to, source, nbytes, runtime.memcpyDeviceToDevice, stream.ptr)
