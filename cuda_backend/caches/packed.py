"""A compressed cache: encoded rows, and float16 copies of those rows that attention reads exactly.

`common.reference_packed.NumpyPacked` defines which tokens a row reads exactly, and how keys are equalised. Exact keys
are stored unrotated. Exact values are rotated if encoded values are, so that attention can add up both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from common.step import Parts, Shape
from common.storage import LEAST_USE, NATIVE, KVSpec, Packing
from cuda_backend.caches.kv import KV, KVStore
from cuda_backend.caches.planes import HALF, Plane, copy
from cuda_backend.caches.rows import PoolSlots
from cuda_backend.caches.window import WindowStore
from cuda_backend.launch import Stream, kernel
from cuda_backend.memory import Memory, copy_in
from cuda_backend.runs import Run


@dataclass(frozen=True)
class Exact:
    """Exact rows and statistics that one layer keeps in addition to its encoded rows.

    kv     keys and values of the tokens that are read exactly; common.storage.ExactSpec
    mean   address of the channels' means in slot 0, float32 (K, D); 0: keys are encoded unchanged
    scale  address of the channels' scales in slot 0, float32 (K, D)
    slot   bytes from the statistics of one slot to those of the next
    """

    kv: KV
    mean: int
    scale: int
    slot: int


class PackedStore(KVStore):
    """Compressed caches of all layers of one shape.

    exact      store of the rows that are read exactly
    stats      mean and scale of the calibrating rows, float32 (slots, 2, layers, K, D): 0 and 1 before that
    slot_stats bytes of the statistics of a slot
    calibrates whether the latest noted step completes the calibrating rows, whose statistics then encode its keys
    """

    def __init__(self, spec: KVSpec, layers: int, slots: PoolSlots):
        super().__init__(spec, layers, slots)
        self.exact = WindowStore(exact_spec(spec), layers, replace(slots, pages=None))
        self.slot_stats = stats_bytes(spec, layers)
        self.stats = Memory(len(self.lengths) * self.slot_stats, self.stream)
        self.calibrates = False
        for slot in range(len(self.lengths)):
            self.clear(slot)

    @classmethod
    def layer_bytes(cls, spec: KVSpec, slots: int, capacity: int, pages: int = 0) -> int:
        beside = WindowStore.layer_bytes(exact_spec(spec), slots, capacity) + slots * stats_bytes(spec, 1)
        return super().layer_bytes(spec, slots, capacity, pages) + beside

    @classmethod
    def copied_bytes(cls, spec: KVSpec, capacity: int) -> int:
        return WindowStore.copied_bytes(exact_spec(spec), capacity) + stats_bytes(spec, 1)

    @property
    def calibration(self) -> int:
        return self.spec.packing.calibration

    def clear(self, slot: int) -> None:
        """Reset a slot's statistics."""
        copy_in(self._stats(slot), np.repeat(np.array([0, 1], np.float32), self.slot_stats // 8), self.stream)

    def _stats(self, slot: int) -> int:
        return self.stats.address + slot * self.slot_stats

    def layer(self, i: int) -> KV:
        part = i * 4 * self.spec.kv_heads * self.spec.key_dim
        mean = self.stats.address + part if self.calibration else 0
        exact = Exact(self.exact.layer(i), mean, mean + self.slot_stats // 2, self.slot_stats if mean else 0)
        return replace(super().layer(i), exact=exact)

    def note_step(self, runs: Sequence[Run]) -> None:
        self.exact.note_step(runs)
        self.calibrates = any(
            self.lengths[slot] < self.calibration < self.lengths[slot] + rows for slot, _, rows in runs
        )

    @property
    def appends(self) -> bool:
        return False

    def commit(self, slot: int, path: list[int]) -> None:
        completes = self.lengths[slot] < self.calibration <= self.lengths[slot] + len(path)
        super().commit(slot, path)
        self.exact.commit(slot, path)
        if completes:
            keys = self.exact.planes[0].of_slot(slot)
            calibrate(keys, self.spec.kv_heads, self.calibration, self._stats(slot), self.stream)

    def snapshot(self, slot: int) -> Any:
        held = None
        if 0 < self.calibration <= self.lengths[slot]:
            held = Memory(self.slot_stats, self.stream)
            copy(held.address, self._stats(slot), held.nbytes, self.stream)
        return self.exact.snapshot(slot), held

    def restore(self, slot: int, snapshot: Any) -> None:
        exact, held = snapshot
        self.exact.restore(slot, exact)
        if held:
            copy(self._stats(slot), held.address, held.nbytes, self.stream)
        else:
            self.clear(slot)

    def point_shapes(self, length: int) -> list[Shape]:
        statistics: list[Shape] = [((self.slot_stats // 4,), np.dtype(np.float32))]
        return self.exact.point_shapes(length) + (statistics if 0 < self.calibration <= length else [])

    def save_point(self, slot: int) -> list[np.ndarray]:
        rows = self.exact.save_point(slot)
        if 0 < self.calibration <= self.lengths[slot]:
            held = Memory(self.slot_stats, self.stream)
            copy(held.address, self._stats(slot), held.nbytes, self.stream)
            rows.append(self.stream.copies.copy(held).view(np.float32))
        return rows

    def load(self, slot: int, length: int, rows: list[Parts], point: list[np.ndarray]) -> None:
        super().load(slot, length, rows, [])
        exact = len(self.exact.point_shapes(length))
        self.exact.load(slot, length, [], point[:exact])
        if point[exact:]:
            copy_in(self._stats(slot), np.ascontiguousarray(point[exact]), self.stream)
        else:
            self.clear(slot)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.exact.nbytes + self.stats.nbytes


def calibrate(
    keys: Plane,
    layer_heads: int,
    count: int,
    out: int,
    stream: Stream,
    rows: int = 1,
    step: int = 0,
    committed: tuple[int, int] = (0, 0),
) -> None:
    """Compute mean, then scale, float32 (rows, heads, D) each, of the first `count` keys and queries of each path.

    keys       float16 rows, the step's among them: of each layer `layer_heads` heads of keys, then as many of queries
    out        address of the results
    step       address of the StepState whose rows these are; 0: one row, whose path is the first positions in order
    committed  address of slot 0's statistics, and elements from one slot's to the next: those of slots that have
               committed `count` keys
    """
    heads, width = keys.heads // 2, keys.width
    kernel("calibrate", "calibrate")(
        (heads, rows),
        (-(-width // 32) * 32,),
        (keys.record, width, layer_heads, count, step, *committed, LEAST_USE, out, out + 4 * rows * heads * width),
        stream=stream,
    )


def keeps_exact(spec: KVSpec) -> bool:
    """Test whether a cache stores exact rows in addition to encoded ones; a float16 cache needs none."""
    return spec.packing.keeps_exact and any(plane.format not in (NATIVE, HALF) for plane in spec.planes)


def exact_spec(spec: KVSpec) -> KVSpec:
    return replace(spec.exact, packing=Packing(rotate_values=spec.packing.rotate_values))


def stats_bytes(spec: KVSpec, layers: int) -> int:
    return 8 * layers * spec.kv_heads * spec.key_dim if spec.packing.calibration else 8
