"""Keys and values of several sequences, for attention layers that keep every position."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import BimetalError
from common.storage import KVSpec
from cuda_backend.caches.planes import Places, Plane, Planes, all_places, plane_of, rows_held
from cuda_backend.caches.rows import PoolSlots, RowStore
from cuda_backend.runs import Run


@dataclass(frozen=True)
class KV:
    """Keys and values of one layer.

    rows_after  of a window: planes with its contents after the commit of a prefill step (caches/window.py); else ()
    exact       exact rows and statistics of a compressed cache (caches/packed.py Exact); None: not compressed
    """

    keys: Plane
    values: Plane
    rows_after: Planes
    store: "KVStore"
    exact: Any = None


class KVStore(RowStore[KVSpec]):
    """Caches of all layers of one shape: per slot or page, keys [layer][kv_heads][place][row], then values.

    max_rows  largest number of positions, including the rows of a step
    window    (positions that a row sees besides the sinks, 0: all; number of sinks, the first positions)
    is_ring   whether later positions overwrite earlier ones: WindowStore
    """

    def __init__(self, spec: KVSpec, layers: int, slots: PoolSlots):
        super().__init__(spec, layers, slots)
        self.window, self.is_ring = (0, 0), False
        self.places, self.max_rows = self.places_of(spec, slots.capacity), rows_held(slots.capacity)

    @classmethod
    def places_of(cls, spec: KVSpec, capacity: int) -> Places:
        return all_places(capacity)

    @classmethod
    def planes_of(cls, spec: KVSpec, layers: int, capacity: int) -> Planes:
        if spec.key_dim != spec.value_dim or spec.key_dim > 256:
            raise BimetalError(
                f"attention keys are {spec.key_dim} and values {spec.value_dim} wide; "
                "the CUDA kernels take equal widths up to 256"
            )
        return tuple(plane_of(plane, layers, cls.places_of(spec, capacity)) for plane in spec.planes)

    def layer(self, i: int) -> KV:
        keys, values = self.parts_of(i, self.planes)
        return KV(keys, values, (), self)

    def parts_of(self, i: int, planes: Planes) -> Planes:
        """Return the rows of layer `i` of planes that hold all layers."""
        return tuple(plane.part(i, of.heads) for plane, of in zip(planes, self.spec.planes, strict=True))

    def note_step(self, runs: Sequence[Run]) -> None:
        """Note a step that is about to be launched."""
