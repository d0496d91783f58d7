"""Rows of latent attention layers, float16: a latent, then a roped key, each padded to a multiple of 16 values.

In a compressed cache, latents have their own plane in the cache's format, and roped keys another plane in float16.
"""

from dataclasses import dataclass

from common.storage import NATIVE, LatentSpec
from cuda_backend.caches.planes import HALF, Plane, Planes, all_places, plane_of
from cuda_backend.caches.rows import RowStore
from cuda_backend.layout import padded


@dataclass(frozen=True)
class Latent:
    """Rows of one layer; `roped` is `rows` if one plane holds both parts."""

    rows: Plane
    roped: Plane
    store: "LatentStore"

    @property
    def apart(self) -> bool:
        return self.rows is not self.roped

    @property
    def width(self) -> int:
        """Count the channels of both parts, each padded."""
        return self.rows.width + (self.roped.width if self.apart else 0)


class LatentStore(RowStore[LatentSpec]):
    """Rows of all layers of one shape, [slot or page][layer][place][row]."""

    @classmethod
    def planes_of(cls, spec: LatentSpec, layers: int, capacity: int) -> Planes:
        places = all_places(capacity)
        if spec.latent_format in (NATIVE, HALF) and not spec.rotate_latent:
            width = padded(spec.latent_dim) + padded(spec.rope_dim)
            return (Plane(0, layers, 2 * width, width, places),)
        return tuple(plane_of(plane, layers, places) for plane in spec.planes)

    def layer(self, i: int) -> Latent:
        parts = [plane.part(i, 1) for plane in self.planes]
        return Latent(parts[0], parts[-1], self)
