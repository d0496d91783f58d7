"""Pages of caches: kernels read a table in device memory that maps the positions of each sequence to pages."""

from collections.abc import Iterable, Sequence

import cupy
import numpy as np

from common.errors import NoRoomError
from cuda_backend.caches.planes import PAGE, Planes, page_bytes, pages_at, rows_held, zeros
from cuda_backend.launch import Stream
from cuda_backend.memory import Memory, copy_in
from cuda_backend.runs import Run


class Pages:
    """Pages of PAGE positions, which sequences take as they grow; a page number means one page in every store.

    A page is zeroed when a sequence takes it, because attention multiplies masked rows after the last row by 0.

    count           number of pages
    vacant          slots without a sequence, a list that the pool updates; their pages can be freed
    max_rows        largest number of rows of a sequence
    pages_per_slot  pages of a sequence of that size
    table           address of the page numbers, int32 [slots][pages of a whole context]; captured graphs read it
    held            number of pages of each slot, which are the first entries of its part of the table
    free            numbers of the pages that no slot holds
    """

    def __init__(self, slots: int, capacity: int, count: int, vacant: Sequence[int], stream: Stream):
        self.count, self.vacant, self.stream = count, vacant, stream
        self.max_rows, self.pages_per_slot = rows_held(capacity), pages_of(capacity)
        self._numbers = np.zeros((slots, self.pages_per_slot), np.int32)
        self._memory = zeros(self._numbers.nbytes, stream)
        self.table = self._memory.address
        self.held, self.free = [0] * slots, list(range(count - 1, -1, -1))
        self._stores: list[tuple[int, int]] = []  # (address of the first page, bytes per page) of each store

    def store(self, shape: Planes) -> tuple[Memory, Planes]:
        """Allocate the pages of one store; return the memory and the planes in it."""
        block = page_bytes(shape)
        memory = Memory(self.count * block, self.stream)
        self._stores.append((memory.address, block))
        return memory, pages_at(memory.address, shape, self.table, self.pages_per_slot)

    def hold_runs(self, runs: Iterable[Run], lengths: Sequence[int]) -> None:
        """Take pages for the rows of a step after committed positions; raises NoRoomError as `hold` does."""
        held = self.held
        needs = [(slot, lengths[slot] + rows) for slot, _, rows in runs if lengths[slot] + rows > held[slot] * PAGE]
        if needs:
            self.hold(needs)

    def hold(self, needs: Sequence[tuple[int, int]]) -> None:
        """Take pages until each (slot, positions) of `needs` fits; none, with NoRoomError, if too few are free."""
        held = self.held
        missing = [(slot, -(-min(positions, self.max_rows) // PAGE) - held[slot]) for slot, positions in needs]
        missing = [(slot, more) for slot, more in missing if more > 0]
        if not missing:
            return
        total = sum(more for _, more in missing)
        if total > len(self.free):
            self.reclaim()
        if total > len(self.free):
            raise NoRoomError(
                f"the sequences of the pool hold {self.count - len(self.free)} of {self.count} pages of {PAGE} tokens, "
                f"and a step needs {total} more; run fewer sequences, or choose a shorter context"
            )
        for slot, more in missing:
            self._take(slot, more)

    def _take(self, slot: int, count: int) -> None:
        first = self.held[slot]
        taken = [self.free.pop() for _ in range(count)]
        self._numbers[slot, first : first + count] = taken
        self.held[slot] += count
        copy_in(
            self.table + 4 * (slot * self.pages_per_slot + first),
            self._numbers[slot, first : first + count],
            self.stream,
        )
        for address, block in self._stores:
            for page in taken:
                cupy.cuda.runtime.memsetAsync(address + page * block, 0, block, self.stream.ptr)

    def truncate(self, slot: int, positions: int) -> None:
        """Free the pages of a slot after its first `positions`; work launched on the stream may still read them."""
        kept = min(self.held[slot], -(-positions // PAGE))
        self.free += self._numbers[slot, kept : self.held[slot]].tolist()
        self.held[slot] = kept

    def reclaim(self) -> None:
        """Free the pages of slots whose sequences were deleted."""
        for slot in tuple(self.vacant):
            self.truncate(slot, 0)

    @property
    def block(self) -> int:
        """Count the bytes of a page in all stores."""
        return sum(block for _, block in self._stores)


def pages_of(capacity: int) -> int:
    """Count the pages of a sequence of `capacity` tokens and the rows of a step after them."""
    return -(-rows_held(capacity) // PAGE)


def page_count(slots: int, capacity: int, tokens: int | None) -> int:
    """Count the pages for `slots` sequences of `tokens` tokens together, at least one context; None: all contexts."""
    each = pages_of(capacity)
    return slots * each if tokens is None else min(slots * each, max(each, tokens // PAGE + slots))
