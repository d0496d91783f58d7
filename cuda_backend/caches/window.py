"""Keys and values of attention layers with a window: the first positions (sinks), and a ring of the latest ones.

A prefill step has more rows than the ring. It attends to a larger copy of the ring, and writes to `rows_after` what the
ring contains once the step is committed.
"""

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from common.step import MAX_DECODE_ROWS, Parts, Shape
from common.storage import KVSpec
from cuda_backend.caches.kv import KV, KVStore
from cuda_backend.caches.planes import (
    TILE,
    Places,
    Planes,
    all_places,
    copy,
    copy_rows,
    of_slot,
    planes_at,
    planes_bytes,
    read_rows,
    rows_held,
    shapes_of,
    write_rows,
    zeros,
)
from cuda_backend.caches.rows import PoolSlots
from cuda_backend.launch import Stream
from cuda_backend.memory import Arena, Memory
from cuda_backend.replay import DeviceStep
from cuda_backend.runs import Run

NOT_IN_PART = f"a step of {{}} rows is kept whole or not at all; up to {MAX_DECODE_ROWS} may be chosen"


class WindowStore(KVStore):
    """Caches of all layers with one window; a window longer than the context needs no ring."""

    def __init__(self, spec: KVSpec, layers: int, slots: PoolSlots):
        super().__init__(spec, layers, slots)
        self.window, self.is_ring = (spec.window or 0, spec.sinks), self.places.capacity < self.max_rows
        self.slot_bytes = planes_bytes(self.planes)
        self.rows_after = zeros(self.slot_bytes, self.stream) if self.is_ring else None
        self.step_rows = [0] * len(self.lengths)  # per slot, rows of a prefill step that wrote `rows_after`

    @property
    def appends(self) -> bool:
        return not any(self.step_rows)  # of no prefill step, whose rows a commit copies to the ring

    @classmethod
    def places_of(cls, spec: KVSpec, capacity: int) -> Places:
        """Return places for sinks and a ring with room for a decode step, or for all positions if these are fewer."""
        assert spec.window is not None
        fixed, ring = -(-spec.sinks // TILE) * TILE, -(-(spec.window + MAX_DECODE_ROWS) // TILE) * TILE
        return Places(fixed, ring) if fixed + ring < rows_held(capacity) else all_places(capacity)

    @classmethod
    def layer_bytes(cls, spec: KVSpec, slots: int, capacity: int, pages: int = 0) -> int:
        places = cls.places_of(spec, capacity)
        return cls.copied_bytes(spec, capacity) * (slots + (places.capacity < rows_held(capacity)))

    @classmethod
    def copied_bytes(cls, spec: KVSpec, capacity: int) -> int:
        return planes_bytes(cls.planes_of(spec, 1, capacity))

    def layer(self, i: int) -> KV:
        kv = super().layer(i)
        if not self.rows_after:
            return kv
        after = planes_at(self.rows_after.address, self.planes)
        return KV(kv.keys, kv.values, self.parts_of(i, after), self)

    def note_step(self, runs: Sequence[Run]) -> None:
        if not self.is_ring:
            return
        for slot, _, rows in runs:
            self.step_rows[slot] = rows if rows > MAX_DECODE_ROWS else 0
            if rows > MAX_DECODE_ROWS:  # another slot's uncommitted prefill step is lost
                self.step_rows = [-1 if n and i != slot else n for i, n in enumerate(self.step_rows)]

    def commit(self, slot: int, path: list[int]) -> None:
        rows = self.step_rows[slot]
        if path and rows:
            if rows < 0:
                raise ValueError(f"the prefill step of slot {slot} is gone: another sequence's came after it")
            if path != list(range(rows)):
                raise ValueError(NOT_IN_PART.format(rows))
            assert self.rows_after
            copy(self._ring(slot), self.rows_after.address, self.slot_bytes, self.stream)
        else:
            super().commit(slot, path)
        self.step_rows[slot] = 0

    def snapshot(self, slot: int) -> Any:
        if not self.is_ring or not self.lengths[slot]:
            return None
        held = Memory(self.slot_bytes, self.stream)
        copy(held.address, self._ring(slot), held.nbytes, self.stream)
        return held

    def restore(self, slot: int, snapshot: Any) -> None:
        self.step_rows[slot] = 0
        if snapshot:
            copy(self._ring(slot), snapshot.address, snapshot.nbytes, self.stream)
        elif self.is_ring:  # the snapshot of an empty state
            cupy.cuda.runtime.memsetAsync(self._ring(slot), 0, self.slot_bytes, self.stream.ptr)

    def _ring(self, slot: int) -> int:
        return self.memory.address + slot * self.slot_bytes

    def row_shapes(self, tokens: int) -> list[Shape]:
        return []

    def point_shapes(self, length: int) -> list[Shape]:
        return shapes_of(self.planes, self.spec.rows(length))

    def save_rows(self, slot: int, first: int, last: int) -> list[np.ndarray]:
        return []

    def save_point(self, slot: int) -> list[np.ndarray]:
        """Copy the first positions and those of the window, in order of position."""
        return read_rows(of_slot(self.planes, slot), self._seen(self.lengths[slot]), self.stream)

    def load(self, slot: int, length: int, rows: list[Parts], point: list[np.ndarray]) -> None:
        at, ring = 0, of_slot(self.planes, slot)
        for first, last in self._seen(length):
            write_rows(ring, first, [array[:, at : at + last - first] for array in point], self.stream)
            at += last - first
        self.step_rows[slot] = 0

    def _seen(self, past: int) -> list[tuple[int, int]]:
        """List the ranges of positions that later rows may see."""
        window, sinks = self.window
        early = min(sinks, past)
        return [(0, early), (max(early, past - window), past)]

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes + (self.slot_bytes if self.is_ring else 0)


def unrolled(kv: KV, step: DeviceStep, arena: Arena, stream: Stream) -> Planes:
    """Return a copy of the ring, in arena memory that also has places for the rows of a prefill step."""
    past, (window, sinks) = step.past, kv.store.window
    ring = of_slot((kv.keys, kv.values), step.slot)
    places = Places(kv.keys.places.fixed, -(-(step.T + window + TILE) // TILE) * TILE)
    size = planes_bytes(planes_at(0, ring, places))
    rows = planes_at(arena.take(size), ring, places)
    cupy.cuda.runtime.memsetAsync(rows[0].address, 0, size, stream.ptr)
    for first, end in ((0, min(sinks, past)), (max(0, past - window), past)):
        if first < end:
            copy_rows(ring, first, rows, first, end - first, stream)
    return rows


def rolled(kv: KV, step: DeviceStep, rows: Planes, stream: Stream) -> None:
    """Copy to `kv.rows_after` what the ring contains once the step is committed.

    rows  result of `unrolled`, with the step's rows written to it
    """
    window, sinks = kv.store.window
    end = step.past + step.T
    for first, last in ((0, min(sinks, end)), (max(0, end - window), end)):
        if first < last:
            copy_rows(rows, first, kv.rows_after, first, last - first, stream)
