"""A compressed cache: rows in their formats beside float16 copies of those that attention reads exactly.

What a row reads exactly, and how keys are equalised: `common.reference_states.NumpyPacked`. Keys are kept as they are,
values rotated where the codes are, so that what attention adds up of both is in one domain.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from common.errors import BimetalError
from common.step import Shape
from common.storage import NATIVE, KVSpec, Packing
from cuda_backend.caches.kv import KV, KVStore
from cuda_backend.caches.pages import Pages
from cuda_backend.caches.planes import HALF, Plane, copy
from cuda_backend.caches.window import WindowStore, window_bytes
from cuda_backend.launch import Stream, kernel
from cuda_backend.memory import Memory, copy_in, copy_out
from cuda_backend.runs import Run


@dataclass(frozen=True)
class Exact:
    """What one layer keeps beside its codes.

    kv     keys and values of the tokens that are read exactly
    mean   address of each channel's mean, float32 (K, D); 0: keys are encoded as they are
    scale  of each channel's scale
    """

    kv: KV
    mean: int
    scale: int


class PackedStore(KVStore):
    """The caches of all layers of one shape.

    exact      the rows that are read exactly
    stats      mean and scale of committed rows, float32 (2, layers, K, D): 0 and 1 until there are rows enough
    calibrates whether keys of the step that was noted last are encoded with statistics that it completes itself
    """

    def __init__(
        self,
        spec: KVSpec,
        layers: int,
        capacity: int,
        lengths: list[int],
        stream: Stream,
        pages: Pages | None = None,
    ):
        if len(lengths) > 1:
            raise BimetalError(
                f"a cache of keys in {spec.key_format} that keeps tokens exactly, for {len(lengths)} sequences; "
                "the CUDA backend holds it for one"
            )
        super().__init__(spec, layers, capacity, lengths, stream, pages)
        self.exact = WindowStore(exact_spec(spec), layers, capacity, lengths, stream)
        self.stats = Memory(stats_bytes(spec, layers), stream)
        self.calibrates = False
        self._forget()

    @property
    def calibration(self) -> int:
        return self.spec.packing.calibration

    def _forget(self) -> None:
        half = self.stats.nbytes // 8
        copy_in(self.stats.address, np.repeat(np.array([0, 1], np.float32), half), self.stream)

    def layer(self, i: int) -> KV:
        part = i * 4 * self.spec.kv_heads * self.spec.key_dim
        mean = self.stats.address + part if self.calibration else 0
        return replace(super().layer(i), exact=Exact(self.exact.layer(i), mean, mean + self.stats.nbytes // 2))

    def note_step(self, runs: Sequence[Run]) -> None:
        self.exact.note_step(runs)
        self.calibrates = any(
            self.lengths[slot] < self.calibration < self.lengths[slot] + rows for slot, _, rows in runs
        )

    def commit(self, slot: int, path: np.ndarray) -> None:
        completes = self.lengths[slot] < self.calibration <= self.lengths[slot] + len(path)
        super().commit(slot, path)
        self.exact.commit(slot, path)
        if completes:
            calibrate(self.exact.planes[0], self.calibration, self.stats.address, self.stream)

    def snapshot(self, slot: int) -> Any:
        held = None
        if 0 < self.calibration <= self.lengths[slot]:
            held = Memory(self.stats.nbytes, self.stream)
            copy(held.address, self.stats.address, held.nbytes, self.stream)
        return self.exact.snapshot(slot), held

    def restore(self, slot: int, snapshot: Any) -> None:
        exact, held = snapshot
        self.exact.restore(slot, exact)
        if held:
            copy(self.stats.address, held.address, held.nbytes, self.stream)
        else:
            self._forget()

    def point_shapes(self, length: int) -> list[Shape]:
        statistics: list[Shape] = [((self.stats.nbytes // 4,), np.dtype(np.float32))]
        return self.exact.point_shapes(length) + (statistics if 0 < self.calibration <= length else [])

    def save_point(self, slot: int) -> list[np.ndarray]:
        rows = self.exact.save_point(slot)
        if 0 < self.calibration <= self.lengths[slot]:
            rows.append(copy_out(self.stats.address, self.stats.nbytes, self.stream).view(np.float32))
        return rows

    def load(self, slot: int, length: int, rows: list[np.ndarray], point: list[np.ndarray]) -> None:
        super().load(slot, length, rows, [])
        exact = len(self.exact.point_shapes(length))
        self.exact.load(slot, length, [], point[:exact])
        if point[exact:]:
            copy_in(self.stats.address, np.ascontiguousarray(point[exact]), self.stream)
        else:
            self._forget()

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.exact.nbytes + self.stats.nbytes


def calibrate(keys: Plane, count: int, to: int, stream: Stream, rows: int = 1, step: int = 0) -> None:
    """Mean, then scale, float32 (rows, heads, D) each, of the first `count` keys on the path of each row.

    keys   float16 rows, the step's among them
    step   address of the step whose rows these are; 0: one row, whose path is the first positions in order
    """
    heads, width = keys.heads, keys.width
    kernel("calibrate", "calibrate")(
        (heads, rows),
        (-(-width // 32) * 32,),
        (keys.record, width, count, step, to, to + 4 * rows * heads * width),
        stream=stream,
    )


def keeps_exact(spec: KVSpec) -> bool:
    """Whether exact rows lie beside a cache; one of float16 alone is exact itself."""
    return spec.packing.keeps_exact and any(plane.format not in (NATIVE, HALF) for plane in spec.planes)


def exact_spec(spec: KVSpec) -> KVSpec:
    return replace(spec.exact, packing=Packing(rotate_values=spec.packing.rotate_values))


def stats_bytes(spec: KVSpec, layers: int) -> int:
    return 8 * layers * spec.kv_heads * spec.key_dim if spec.packing.calibration else 8


def exact_bytes(spec: KVSpec, slots: int, capacity: int) -> int:
    """Device bytes of what one layer keeps beside its codes."""
    return window_bytes(exact_spec(spec), slots, capacity) + stats_bytes(spec, 1)
