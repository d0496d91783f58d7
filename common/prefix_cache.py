"""The prefix cache: states of earlier prompts in host memory, looked up by their tokens.

Rows of keys and values are kept in pages of PAGE tokens, which texts with an equal beginning share. States that cannot
be divided by tokens (delta matrices, convolution tails, windows) are kept whole as a point, at the end of an entry.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np

from common.errors import BimetalError
from common.prefix_tree import PAGE, Entry, Page, chained_key, overlapping, page_part, root_key
from common.reading import GRID_POINTS, Reading, common_length
from common.saving import bytes_after, load, may_save, rows_after, saved_rows
from common.step import LongStep, Parts, State


class Found(NamedTuple):
    """Result of a look-up in the cache.

    length   tokens that the state now holds; 0: the state is unchanged
    matched  first tokens of the prompt that some kept text shares
    branch   a cut of the prompt at which a state should be kept, because two texts differ after it; 0: none
    """

    length: int = 0
    matched: int = 0
    branch: int = 0


class Saved(NamedTuple):
    """A state as `State.load` takes it, or the end of a state: `rows` belong to the tokens from `first` on, in parts.

    finish  function that waits until the arrays are complete; any thread can call it
    """

    tokens: np.ndarray
    long_steps: tuple[LongStep, ...]
    first: int
    rows: Sequence[Parts]
    point: Sequence[np.ndarray]
    finish: Callable[[], object] = lambda: None


class Store(Protocol):
    """A slower tier of the cache, on disk."""

    def first_missing(self, tokens: np.ndarray, long_steps: Sequence[LongStep]) -> int | None:
        """Find the first token whose rows the store lacks; None if it has the whole state, or no space for it."""

    def put(self, saved: Saved) -> None:
        """Store a state; its rows before `saved.first` are stored already."""

    def close(self) -> None:
        """Wait until every state that was passed to `put` is stored."""

    def get(self, tokens: np.ndarray, reading: Reading, more_than: int) -> Saved | None:
        """Return the state of the longest stored prefix, above `more_than` tokens, at which `reading` can resume.

        The result is a whole stored state, or the beginning of a stored state that has no point.
        """


class PrefixCache:
    """The memory tier; used by one thread.

    fingerprint  hash of everything that changes a state's bits, except its tokens and its long steps
    budget       maximum bytes; checked before a state is saved
    store        a slower tier, which receives every kept state and is looked up after a miss
    freed        function that is called with the arrays of dropped states
    """

    def __init__(
        self,
        fingerprint: bytes,
        budget: int,
        store: Store | None = None,
        freed: Callable[[Sequence[np.ndarray]], object] | None = None,
    ):
        self.budget, self.store, self.freed = budget, store, freed
        self.root = Page(root_key(fingerprint), None, np.empty(0, np.int32), (), [])
        self.bytes = self.clock = 0

    # -- what an engine calls ------------------------------------------------------------------------------------------

    def restore(self, tokens: Sequence[int], state: State, reading: Reading, more_than: int = 0) -> Found:
        """Load the longest kept proper prefix of `tokens` above `more_than` tokens into `state`.

        Only a prefix counts whose state is bitwise identical to that of reading the prompt as `reading` does.
        """
        if not state.can_save:
            return Found()
        self.clock += 1
        ids = np.asarray(tokens, np.int32)
        path = self._path(ids, reading.long_steps)
        matched, length = self._matched(ids, path), 0
        entry, page = self._resumable(ids, path, reading, not state.point_shapes(1))
        if entry is not None and entry.length > max(more_than, PAGE * page):
            length = entry.length
            self._touch(entry)
            load(state, ids[:length], _before(reading, length), self._rows(entry.page, entry), entry.point)
        elif PAGE * page > more_than:
            length = PAGE * page
            for held in path[:page]:
                held.used = self.clock
            load(state, ids[:length], _before(reading, length), self._rows(path[page - 1]), [])
        saved = None if self.store is None else self.store.get(ids, reading, max(length, more_than))
        if saved is not None:
            try:
                load(state, saved.tokens, saved.long_steps, saved.rows, saved.point)
            except BimetalError:  # the state has another layout, in spite of its fingerprint
                return Found(length, matched)
            length = len(saved.tokens)
            kept = [self.root, *self._path(saved.tokens, state.long_steps)]
            if may_save(state, "turn", bytes_after(state, PAGE * (len(kept) - 1))):
                try:
                    self._add(saved.tokens, state, "turn", kept)
                except (BimetalError, MemoryError) as error:
                    _say_not_kept(length, error)
        best = max(length, more_than)
        branch = max((cut for cut in reading.cuts.tolist() if best < cut <= matched), default=0)
        return Found(length, max(matched, length), branch if state.point_shapes(1) and branch < len(ids) else 0)

    def matched(self, tokens: Sequence[int]) -> int:
        """Count the tokens that the prompt shares with some text in memory, read in any steps."""
        ids, path, parent = np.asarray(tokens, np.int32), list[Page](), self.root
        while len(part := ids[len(path) * PAGE :][:PAGE]) == PAGE:
            same = [page for page in parent.children.values() if np.array_equal(page.tokens, part)]
            if not same:
                break
            parent = same[0]
            path.append(parent)
        return self._matched(ids, path)

    def offer(self, tokens: Sequence[int], state: State, reason: str = "turn") -> None:
        """Keep `state`, which holds exactly `tokens`, if it is new and fits; less valuable states make room.

        While earlier states are still being saved, fewer states are kept. A state for whose copy no memory is free is
        left out with a line on stderr.
        """
        if not state.can_save or not state.length:
            return
        if len(tokens) != state.length:
            raise ValueError(f"a state of {state.length} tokens is offered with {len(tokens)}")
        ids = np.asarray(tokens, np.int32)
        path = [self.root, *self._path(ids, state.long_steps)]
        if not may_save(state, reason, bytes_after(state, PAGE * (len(path) - 1))):
            return
        try:
            self._keep(ids, state, self._add(ids, state, reason, path))
        except (BimetalError, MemoryError) as error:
            _say_not_kept(len(ids), error)

    # -- adding --------------------------------------------------------------------------------------------------------

    def _keep(self, ids: np.ndarray, state: State, entry: Entry | None) -> None:
        """Store the rows that the slower tier lacks: from `entry`, or without one from the device."""
        first = None if self.store is None else self.store.first_missing(ids, state.long_steps)
        if first is None or self.store is None:
            return
        rows: Sequence[Parts]
        if entry is None:
            rows, point = list(zip(*saved_rows(state, first), strict=True)), state.save_point()
        else:
            rows, point = [rows_after(parts, first) for parts in self._rows(entry.page, entry)], entry.point
        finish = state.when_saved([*point, *(part for parts in rows for part in parts)])
        self.store.put(Saved(ids, tuple(state.long_steps), first, rows, point, finish))

    def _add(self, ids: np.ndarray, state: State, reason: str, path: list[Page]) -> Entry | None:
        """Return the entry of `state`, new or old; None if the budget is too small. If saving fails, nothing is added.

        path  the root and the kept pages of the beginning of `ids`; new pages are appended
        """
        self.clock += 1
        steps, whole = tuple(state.long_steps), len(ids) // PAGE
        tail, over = ids[whole * PAGE :], overlapping(steps, whole * PAGE, len(ids))
        if len(path) > whole and (entry := path[-1].entries.get(chained_key(path[-1].key, tail, over))) is not None:
            if not np.array_equal(entry.tail, tail):
                return None  # two texts with one hash: the first is kept
            entry.reason = reason if reason == "system" else entry.reason
            self._touch(entry)
            return entry
        if len(path) <= whole and chained_key(path[-1].key, *page_part(ids, len(path) - 1, steps)) in path[-1].children:
            return None
        if not self._make_room(bytes_after(state, PAGE * (len(path) - 1)), path):
            return None
        held = len(path)
        try:
            for at in range(held - 1, whole):
                page = self._page(path[-1], ids, at, steps, state.save_rows(at * PAGE, (at + 1) * PAGE))
                path.append(page)
            rows = state.save_rows(whole * PAGE, len(ids)) if len(tail) else []
            point = state.save_point()
        except BaseException:
            for page in reversed(path[held:]):
                self._drop(page)
            raise
        key = chained_key(path[-1].key, tail, over)
        entry = Entry(key, path[-1], len(ids), tail.copy(), over, rows, point, reason)
        entry.insert(self.entries())
        path[-1].entries[key] = entry
        self.bytes += entry.nbytes
        self._touch(entry)
        if reason == "grid":
            self._thin(entry)
        return entry

    def _page(
        self, parent: Page, ids: np.ndarray, number: int, steps: Sequence[LongStep], rows: list[np.ndarray]
    ) -> Page:
        part, over = page_part(ids, number, steps)
        page = Page(chained_key(parent.key, part, over), parent, part.copy(), over, rows, self.clock)
        parent.children[page.key] = page
        self.bytes += page.nbytes
        return page

    def _touch(self, entry: Entry) -> None:
        self.clock += 1
        entry.touch(self.clock)

    def _thin(self, entry: Entry) -> None:
        """Drop grid points before `entry`, but keep the nearest two, and fewer of those farther back."""
        point = entry.base
        while point is not None:
            above, back = point.base, (entry.length - point.length) // GRID_POINTS
            every = 1 << max(back.bit_length() - 1, 0)
            if point.reason == "grid" and back > 1 and point.length // GRID_POINTS % every and len(point.kids) < 2:
                self._drop(point)
            point = above

    # -- matching ------------------------------------------------------------------------------------------------------

    def _path(self, ids: np.ndarray, long_steps: Sequence[LongStep]) -> list[Page]:
        """Return the kept pages with which the tokens begin, read in such steps."""
        path, parent = list[Page](), self.root
        for at in range(len(ids) // PAGE):
            page = parent.child(ids, at, long_steps)
            if page is None:
                break
            path.append(page)
            parent = page
        return path

    def _matched(self, ids: np.ndarray, path: list[Page]) -> int:
        """Count the tokens that the prompt shares with some kept text; `path` are the prompt's complete pages."""
        last, rest = path[-1] if path else self.root, ids[len(path) * PAGE :]
        held = [*(page.tokens for page in last.children.values()), *(entry.tail for entry in last.entries.values())]
        return len(path) * PAGE + max((common_length(rest, tokens) for tokens in held), default=0)

    def _resumable(
        self, ids: np.ndarray, path: list[Page], reading: Reading, any_page: bool
    ) -> tuple[Entry | None, int]:
        """Return the longest entry at which the prompt can resume, and with `any_page` the number of whole pages."""
        best = None
        for page in (self.root, *path):
            for entry in page.entries.values():
                n, at = entry.length, entry.length - len(entry.tail)
                fits = n < len(ids) and np.array_equal(entry.tail, ids[at:n])
                exact = entry.steps == overlapping(reading.long_steps, at, n)
                if fits and exact and _is_cut(reading, n) and (best is None or n > best.length):
                    best = entry
        pages = [n for n in range(1, len(path) + 1) if PAGE * n < len(ids) and _is_cut(reading, PAGE * n)]
        return best, (pages[-1] if any_page and pages else 0)

    def _rows(self, page: Page, entry: Entry | None = None) -> list[Parts]:
        """Return the rows up to the end of `page`, or of `entry` after it, in parts."""
        parts = [] if entry is None or not len(entry.tail) else [entry.rows]
        held: Page | None = page
        while held is not None and held.parent is not None:
            parts.append(held.rows)
            held = held.parent
        return list(zip(*reversed(parts), strict=True))

    # -- eviction ------------------------------------------------------------------------------------------------------

    def entries(self) -> Iterator[Entry]:
        for page in self.root.subtree():
            yield from page.entries.values()

    def _make_room(self, need: int, path: Sequence[Page]) -> bool:
        """Drop the least valuable entries and pages, none of `path`; return whether `need` more bytes fit."""
        if need + sum(page.nbytes for page in path) > self.budget:
            return False
        if self.bytes + need <= self.budget:
            return True
        fixed, order = set(map(id, path)), count()
        heap: list[tuple[int, bool, int, Entry | Page]] = [
            (e.value, bool(e.kids), next(order), e) for e in self.entries()
        ]
        heap += [(page.used, True, next(order), page) for page in self.root.subtree() if page.is_idle]
        heapify(heap)
        while self.bytes + need > self.budget and heap:
            *_, node = heappop(heap)
            if id(node) in fixed:
                continue
            self._drop(node, fixed)
            page = node.page if isinstance(node, Entry) else node.parent
            if page is not None and page.parent is not None and page.key in page.parent.children and page.is_idle:
                heappush(heap, (page.used, True, next(order), page))
        return self.bytes + need <= self.budget

    def _drop(self, node: Entry | Page, fixed: set[int] | None = None) -> None:
        """Drop a page without children, or an entry and, if it has a point, the pages that only it needs."""
        if isinstance(node, Entry):
            node.remove()
            self._give_back(node.nbytes, (*node.rows, *node.point))
            page: Page | None = node.page if node.point else None
        else:
            page = node
        while page is not None and page.parent is not None and page.is_idle:
            if id(page) in (fixed or ()):
                return
            del page.parent.children[page.key]
            self._give_back(page.nbytes, page.rows)
            page = page.parent if isinstance(node, Entry) else None

    def _give_back(self, nbytes: int, arrays: Sequence[np.ndarray]) -> None:
        self.bytes -= nbytes
        if self.freed is not None:
            self.freed(arrays)

    def close(self) -> None:
        """Wait until the slower tier has stored every state that it received."""
        if self.store is not None:
            self.store.close()


def _say_not_kept(tokens: int, error: Exception) -> None:
    print(f"a state of {tokens} tokens is not kept for later prompts: {error}", file=sys.stderr)


def _before(reading: Reading, length: int) -> tuple[LongStep, ...]:
    return tuple(step for step in reading.long_steps if step[1] <= length)


def _is_cut(reading: Reading, position: int) -> bool:
    """Test whether no long step of the reading spans position `position`."""
    return not any(first < position < end for first, end in reading.long_steps)
