"""The rows of latent attention layers: a latent padded to 16 values, then a roped key padded to 16, float16."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from common.errors import BimetalError
from common.storage import NATIVE, LatentSpec
from cuda_backend.caches.planes import HALF, Plane, all_places, check_capacity, keep_path, zeros
from cuda_backend.launch import Stream
from cuda_backend.layout import padded


@dataclass(frozen=True)
class Latent:
    """Rows of one layer."""

    rows: Plane
    store: "LatentStore"


class LatentStore:
    """The rows of all layers of one shape, [layer][capacity][row]; `past` are committed."""

    def __init__(self, spec: LatentSpec, layers: int, capacity: int, stream: Stream):
        check_capacity(capacity)
        self.spec, self.layers, self.stream, self.past = spec, layers, stream, 0
        shape = latent_plane(spec, layers, capacity)
        self.memory = zeros(shape.nbytes, stream)
        self.plane = shape.at(self.memory.address)

    def layer(self, i: int) -> Latent:
        return Latent(self.plane.part(i, 1), self)

    def commit(self, path: np.ndarray) -> None:
        keep_path((self.plane,), self.past, path, self.stream)
        self.past += len(path)

    def snapshot(self) -> Any:
        return self.past

    def restore(self, snapshot: Any) -> None:
        self.past = snapshot

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes


def latent_plane(spec: LatentSpec, layers: int, capacity: int) -> Plane:
    """Rows of `layers` layers, not yet anywhere."""
    if spec.latent_format not in (NATIVE, HALF):
        raise BimetalError(f"the CUDA kernels have no latent cache in {spec.latent_format}; supported: {HALF}")
    width = padded(spec.latent_dim) + padded(spec.rope_dim)
    return Plane(0, layers, 2 * width, width, all_places(capacity))
