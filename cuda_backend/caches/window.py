"""The keys and values of attention layers that see a window: its first positions, and a ring of the last ones.

A prefill step has more rows than the ring has room for. It attends to a copy of the ring with more room, and leaves in
`after` what the ring becomes where the step is committed.
"""

from typing import Any

import cupy
import numpy as np

from common.step import MAX_DECODE_ROWS, Shape, Step
from common.storage import KVSpec
from cuda_backend.caches.kv import KV, KVStore, kv_planes
from cuda_backend.caches.planes import (
    TILE,
    Places,
    Planes,
    all_places,
    copy,
    move,
    planes_at,
    planes_bytes,
    read_rows,
    rows_held,
    shapes_of,
    write_rows,
    zeros,
)
from cuda_backend.launch import Stream
from cuda_backend.memory import Arena, Memory

NOT_IN_PART = f"a step of {{}} rows is kept whole or not at all; up to {MAX_DECODE_ROWS} may be chosen"


class WindowStore(KVStore):
    """The caches of all layers of one window; a window that no context fills is kept as any other cache."""

    def __init__(self, spec: KVSpec, layers: int, capacity: int, stream: Stream):
        super().__init__(spec, layers, capacity, stream)
        self.window, self.is_ring = (spec.window or 0, spec.keep), self.places.capacity < self.most
        self.after = zeros(self.memory.nbytes, stream) if self.is_ring else None
        self.step_rows = 0  # of a step that left `after`

    def places_of(self, capacity: int) -> Places:
        return window_places(self.spec, capacity)

    def layer(self, i: int) -> KV:
        kv = super().layer(i)
        if not self.after:
            return kv
        after = planes_at(self.after.address, self.planes)
        return KV(kv.keys, kv.values, tuple(plane.part(i, self.spec.kv_heads) for plane in after), self)

    def note_step(self, step: Step) -> None:
        self.step_rows = len(step) if self.is_ring and len(step) > MAX_DECODE_ROWS else 0

    def commit(self, path: np.ndarray) -> None:
        if len(path) and self.step_rows:
            if not np.array_equal(path, np.arange(self.step_rows)):
                raise ValueError(NOT_IN_PART.format(self.step_rows))
            assert self.after
            copy(self.memory.address, self.after.address, self.memory.nbytes, self.stream)
            self.past += len(path)
        else:
            super().commit(path)
        self.step_rows = 0

    def snapshot(self) -> Any:
        if not self.is_ring:
            return self.past, None
        held = Memory(self.memory.nbytes, self.stream)
        copy(held.address, self.memory.address, held.nbytes, self.stream)
        return self.past, held

    def restore(self, snapshot: Any) -> None:
        self.past, held = snapshot
        if held:
            copy(self.memory.address, held.address, held.nbytes, self.stream)

    def row_shapes(self, tokens: int) -> list[Shape]:
        return []

    def point_shapes(self, length: int) -> list[Shape]:
        return shapes_of(self.planes, self.spec.rows(length))

    def save_rows(self, first: int, last: int) -> list[np.ndarray]:
        return []

    def save_point(self) -> list[np.ndarray]:
        """The first positions and those of the window, in order, wherever the ring has them."""
        parts = [read_rows(self.planes, first, last, self.stream) for first, last in self._seen(self.past)]
        return [np.concatenate(pair, axis=1) for pair in zip(*parts, strict=True)]

    def load(self, length: int, rows: list[np.ndarray], point: list[np.ndarray]) -> None:
        at = 0
        for first, last in self._seen(length):
            write_rows(self.planes, first, [array[:, at : at + last - first] for array in point], self.stream)
            at += last - first
        self.past, self.step_rows = length, 0

    def _seen(self, past: int) -> list[tuple[int, int]]:
        """The stretches of positions that later rows may see."""
        window, keep = self.window
        early = min(keep, past)
        return [(0, early), (max(early, past - window), past)]

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes * (2 if self.is_ring else 1)


def window_places(spec: KVSpec, capacity: int) -> Places:
    """The first positions and a ring with room for a decode step, or all positions where these are fewer."""
    assert spec.window is not None
    fixed, ring = -(-spec.keep // TILE) * TILE, -(-(spec.window + MAX_DECODE_ROWS) // TILE) * TILE
    return Places(fixed, ring) if fixed + ring < rows_held(capacity) else all_places(capacity)


def window_bytes(spec: KVSpec, capacity: int) -> int:
    """Device bytes of one layer."""
    places = window_places(spec, capacity)
    return planes_bytes(kv_planes(spec, 1, places)) * (2 if places.capacity < rows_held(capacity) else 1)


def unrolled(kv: KV, T: int, arena: Arena, stream: Stream) -> Planes:
    """A copy of a ring with room for T more rows."""
    store, past = kv.store, kv.store.past
    window, keep = store.window
    ring = kv.keys, kv.values
    places = Places(kv.keys.places.fixed, -(-(T + window + TILE) // TILE) * TILE)
    size = planes_bytes(planes_at(0, ring, places))
    room = planes_at(arena.take(size), ring, places)
    cupy.cuda.runtime.memsetAsync(room[0].address, 0, size, stream.ptr)
    for first, end in ((0, min(keep, past)), (max(0, past - window), past)):
        if first < end:
            move(ring, first, room, first, end - first, stream)
    return room


def rolled(kv: KV, T: int, room: Planes, stream: Stream) -> None:
    """What the ring becomes where the T rows, which `room` holds, are committed."""
    window, keep = kv.store.window
    end = kv.store.past + T
    for first, last in ((0, min(keep, end)), (max(0, end - window), end)):
        if first < last:
            move(room, first, kv.after, first, last - first, stream)
