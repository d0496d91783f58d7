"""Base of every store of appended rows, whatever its rows hold."""

from typing import Any

import numpy as np

from common.step import Parts, Shape
from cuda_backend.caches.pages import Pages
from cuda_backend.caches.planes import (
    Planes,
    move_path,
    of_slot,
    planes_bytes,
    read_rows,
    shapes_of,
    slots_at,
    write_rows,
    zeros,
)
from cuda_backend.launch import Stream


class RowStore:
    """The planes of all layers of one shape, for each slot.

    lengths  committed positions of each slot, which the pool counts
    pages    that the rows lie in; None: each slot has memory for all of its places
    """

    def __init__(self, shape: Planes, lengths: list[int], stream: Stream, pages: Pages | None = None):
        self.stream, self.lengths, self.pages = stream, lengths, pages
        if pages:
            self.memory, self.planes = pages.store(shape)
        else:
            self.memory = zeros(len(lengths) * planes_bytes(shape), stream)
            self.planes = slots_at(self.memory.address, shape)

    def commit(self, slot: int, path: np.ndarray) -> None:
        if path.tolist() != list(range(len(path))):  # else its rows lie where they belong
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
