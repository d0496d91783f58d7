"""The rows of latent attention layers: a latent padded to 16 values, then a roped key padded to 16, float16.

In a format the latents lie in a plane of their own, and the roped keys, float16, in another.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from common.step import Shape
from common.storage import NATIVE, LatentSpec
from cuda_backend.caches.planes import (
    HALF,
    Plane,
    Planes,
    all_places,
    check_capacity,
    keep_path,
    of_slot,
    plane_of,
    planes_bytes,
    read_rows,
    shapes_of,
    slots_at,
    write_rows,
    zeros,
)
from cuda_backend.launch import Stream
from cuda_backend.layout import padded


@dataclass(frozen=True)
class Latent:
    """Rows of one layer; `roped` is `rows` where one plane holds both parts."""

    rows: Plane
    roped: Plane
    store: "LatentStore"

    @property
    def apart(self) -> bool:
        return self.rows is not self.roped

    @property
    def width(self) -> int:
        """Channels of both parts, each padded."""
        return self.rows.width + (self.roped.width if self.apart else 0)


class LatentStore:
    """The rows of all layers of one shape, [slot][layer][capacity][row]; `lengths`: committed, of each slot."""

    def __init__(self, spec: LatentSpec, layers: int, capacity: int, lengths: list[int], stream: Stream):
        check_capacity(capacity)
        self.spec, self.layers, self.stream, self.lengths = spec, layers, stream, lengths
        shape = latent_planes(spec, layers, capacity)
        self.memory = zeros(len(lengths) * planes_bytes(shape), stream)
        self.planes = slots_at(self.memory.address, shape)

    def layer(self, i: int) -> Latent:
        parts = [plane.part(i, 1) for plane in self.planes]
        return Latent(parts[0], parts[-1], self)

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


def latent_planes(spec: LatentSpec, layers: int, capacity: int) -> Planes:
    """Rows of `layers` layers, not yet anywhere."""
    places = all_places(capacity)
    if spec.latent_format in (NATIVE, HALF) and not spec.rotate_latent:
        width = padded(spec.latent_dim) + padded(spec.rope_dim)
        return (Plane(0, layers, 2 * width, width, places),)
    return tuple(plane_of(plane, layers, places) for plane in spec.planes)
