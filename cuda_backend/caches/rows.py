"""Base of every store of appended rows: keys and values, or latents."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from common.step import Parts, Shape
from common.storage import RowSpec
from cuda_backend.caches.pages import Pages
from cuda_backend.caches.planes import (
    Planes,
    check_capacity,
    move_path,
    of_slot,
    page_bytes,
    planes_bytes,
    read_rows,
    shapes_of,
    slots_at,
    write_rows,
    zeros,
)
from cuda_backend.launch import Stream

S = TypeVar("S", bound=RowSpec)


@dataclass(frozen=True)
class PoolSlots:
    """The slots of a pool, as its stores see them.

    capacity  positions of each
    lengths   committed positions of each, which the pool counts
    pages     pages of the rows; None: each slot has memory for all of its places
    """

    capacity: int
    lengths: list[int]
    stream: Stream
    pages: Pages | None = None


class RowStore(Generic[S]):
    """Planes of all layers of one shape, for each slot."""

    def __init__(self, spec: S, layers: int, slots: PoolSlots):
        check_capacity(slots.capacity)
        self.spec, self.layers, self.capacity = spec, layers, slots.capacity
        self.stream, self.lengths, self.pages = slots.stream, slots.lengths, slots.pages
        shape = self.planes_of(spec, layers, slots.capacity)
        if slots.pages:
            self.memory, self.planes = slots.pages.store(shape)
        else:
            self.memory = zeros(len(slots.lengths) * planes_bytes(shape), slots.stream)
            self.planes = slots_at(self.memory.address, shape)

    @classmethod
    def planes_of(cls, spec: S, layers: int, capacity: int) -> Planes:
        """Describe the planes of `layers` layers; no memory is allocated."""
        raise NotImplementedError

    @classmethod
    def layer_bytes(cls, spec: S, slots: int, capacity: int, pages: int = 0) -> int:
        """Predict the device bytes of one layer: of `pages` pages, or if 0 of one sequence's whole context."""
        planes = cls.planes_of(spec, 1, capacity)
        return pages * page_bytes(planes) or planes_bytes(planes)

    @classmethod
    def copied_bytes(cls, spec: S, capacity: int) -> int:
        """Predict the bytes of one layer in a snapshot."""
        return 0

    @property
    def appends(self) -> bool:
        """Test whether a commit of a step's first rows has nothing to do, because they are in place."""
        return True

    def commit(self, slot: int, path: list[int]) -> None:
        if path != list(range(len(path))):  # else its rows are in place
            move_path(of_slot(self.planes, slot), self.lengths[slot], path, self.stream)

    def snapshot(self, slot: int) -> Any:
        return None

    def restore(self, slot: int, snapshot: Any) -> None:
        """Restore nothing here: the pool restores the slot's length, which suffices for rows that append."""

    def row_shapes(self, tokens: int) -> list[Shape]:
        return shapes_of(self.planes, tokens)

    def point_shapes(self, length: int) -> list[Shape]:
        return []

    def save_rows(self, slot: int, first: int, last: int) -> list[np.ndarray]:
        return read_rows(of_slot(self.planes, slot), [(first, last)], self.stream)

    def save_point(self, slot: int) -> list[np.ndarray]:
        return []

    def load(self, slot: int, length: int, rows: list[Parts], point: list[np.ndarray]) -> None:
        at = 0
        for part in zip(*rows, strict=True):
            write_rows(of_slot(self.planes, slot), at, part, self.stream)
            at += part[0].shape[1]

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes
