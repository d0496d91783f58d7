"""The keys and values of attention layers that keep every position, of several sequences."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.errors import BimetalError
from common.step import Shape
from common.storage import KVSpec
from cuda_backend.caches.planes import (
    Places,
    Plane,
    Planes,
    all_places,
    check_capacity,
    keep_path,
    of_slot,
    plane_of,
    planes_bytes,
    read_rows,
    rows_held,
    shapes_of,
    slots_at,
    write_rows,
    zeros,
)
from cuda_backend.launch import Stream
from cuda_backend.runs import Run


@dataclass(frozen=True)
class KV:
    """Keys and values of one layer; `after` as keys and values of a window's store, else empty.

    exact  what a compressed cache keeps beside them: caches/packed.py Exact, or None
    """

    keys: Plane
    values: Plane
    after: Planes
    store: "KVStore"
    exact: Any = None


class KVStore:
    """The caches of all layers of one shape: per slot keys [layer][kv_heads][capacity][row], then the values.

    lengths  committed positions of each slot, which the pool counts
    most     positions that there may be, those of a step included
    window   positions that a row sees beside the first ones, 0: all; and the number of first ones that all rows see
    is_ring  positions are overwritten by later ones: WindowStore
    """

    def __init__(self, spec: KVSpec, layers: int, capacity: int, lengths: list[int], stream: Stream):
        check_capacity(capacity)
        self.spec, self.layers, self.stream, self.lengths = spec, layers, stream, lengths
        self.window, self.is_ring = (0, 0), False
        self.places, self.most = self.places_of(capacity), rows_held(capacity)
        shape = kv_planes(spec, layers, self.places)
        self.memory = zeros(len(lengths) * planes_bytes(shape), stream)
        self.planes = slots_at(self.memory.address, shape)

    def places_of(self, capacity: int) -> Places:
        return all_places(capacity)

    def layer(self, i: int) -> KV:
        keys, values = (plane.part(i, self.spec.kv_heads) for plane in self.planes)
        return KV(keys, values, (), self)

    def note_step(self, runs: Sequence[Run]) -> None:
        """Note a step that is about to be launched."""

    def commit(self, slot: int, path: np.ndarray) -> None:
        keep_path(of_slot(self.planes, slot), self.lengths[slot], path, self.stream)

    def snapshot(self, slot: int) -> Any:
        return None

    def restore(self, slot: int, snapshot: Any) -> None:
        """The slot's length is all that there is to go back to."""

    def row_shapes(self, tokens: int) -> list[Shape]:
        return shapes_of(self.planes, tokens)

    def point_shapes(self, length: int) -> list[Shape]:
        return []

    def save_rows(self, slot: int, first: int, last: int) -> list[np.ndarray]:
        return read_rows(of_slot(self.planes, slot), first, last, self.stream)

    def save_point(self, slot: int) -> list[np.ndarray]:
        return []

    def load(self, slot: int, length: int, rows: list[np.ndarray], point: list[np.ndarray]) -> None:
        write_rows(of_slot(self.planes, slot), 0, rows, self.stream)

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes


def kv_planes(spec: KVSpec, layers: int, places: Places) -> Planes:
    """Keys and values of `layers` layers, not yet anywhere."""
    if spec.key_dim != spec.value_dim or spec.key_dim > 256:
        raise BimetalError(
            f"attention keys are {spec.key_dim} and values {spec.value_dim} wide; "
            "the CUDA kernels take equal widths up to 256"
        )
    return tuple(plane_of(plane, layers, places) for plane in spec.planes)


def kv_bytes(spec: KVSpec, capacity: int) -> int:
    """Device bytes of one layer."""
    return planes_bytes(kv_planes(spec, 1, all_places(capacity)))
