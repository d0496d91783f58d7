"""States of sequences on the host, by the tokens that led to them, so that a prompt need not be read twice.

Rows that append are kept in pages of PAGE tokens, which entries with equal beginnings share. What cannot be cut (delta
matrices, convolution tails, windows) is kept whole at the entries' own lengths. Keys are chained hashes of token ids
and long steps; a match compares the ids themselves.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np

from common.errors import BimetalError
from common.reading import GRID_POINTS, Reading, common_length
from common.step import LongStep, Shape, State

PAGE = 256  # tokens


class Found(NamedTuple):
    """What a prompt goes on from.

    length   tokens that the state now holds; 0: it is as it was
    matched  tokens that are equal to those of a kept text
    branch   a cut after which the state is worth keeping, since another text went on differently there; 0: none
    """

    length: int = 0
    matched: int = 0
    branch: int = 0


class Saved(NamedTuple):
    """A state as `State.load` takes it, or from `first` on: rows are of tokens first to the last."""

    tokens: np.ndarray
    long_steps: tuple[LongStep, ...]
    first: int
    rows: list[np.ndarray]
    point: list[np.ndarray]


class Store(Protocol):
    """A slower tier."""

    def first_missing(self, tokens: np.ndarray, long_steps: Sequence[LongStep]) -> int | None:
        """Of a state with such tokens, the first whose rows are to be put; None if it has the state, or no room."""

    def put(self, saved: Saved) -> None:
        """Keep a state, of which the rows before `saved.first` are kept already."""

    def close(self) -> None:
        """Return once all that was put is kept."""

    def get(self, tokens: np.ndarray, reading: Reading, more_than: int) -> Saved | None:
        """The whole state of the longest prefix longer than `more_than` that `reading` can go on from."""


@dataclass(eq=False)
class Page:
    """Rows of PAGE tokens behind those of the pages above it; the root has none.

    steps     the long steps that overlap it
    children  pages that follow it, by key
    entries   those whose last whole page it is
    """

    key: bytes
    parent: "Page | None"
    tokens: np.ndarray
    steps: tuple[LongStep, ...]
    rows: list[np.ndarray]
    used: int = 0
    children: dict[bytes, "Page"] = field(default_factory=dict)
    entries: dict[bytes, "Entry"] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.rows)


@dataclass(eq=False)
class Entry:
    """A state of `length` tokens: the pages up to `page`, the rows of the `tail` behind it, and the point.

    why    what it was kept for: "system", "turn", "branch", "grid"
    base   the longest entry that this one goes on from; `kids` are those that go on from this one
    below  when an entry that goes on from this one was last used
    """

    key: bytes
    page: Page
    length: int
    tail: np.ndarray
    steps: tuple[LongStep, ...]
    rows: list[np.ndarray]
    point: list[np.ndarray]
    why: str
    base: "Entry | None" = None
    kids: set["Entry"] = field(default_factory=set)
    used: int = 0
    below: int = 0

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.rows, *self.point))

    @property
    def value(self) -> int:
        """When it was last of use: what several texts go on from, or all of a system prompt do, outlives them."""
        return max(self.used, self.below) if len(self.kids) > 1 or self.why == "system" else self.used


class PrefixCache:
    """The memory tier; used by one thread.

    fingerprint  all that changes the bits of a state beside its tokens and its long steps
    budget       most bytes; counted before anything is saved
    store        a slower tier, asked for what is not here, and given all that is kept
    freed        called with arrays that nothing refers to any more
    """

    def __init__(
        self,
        fingerprint: bytes,
        budget: int,
        store: Store | None = None,
        freed: Callable[[Sequence[np.ndarray]], object] | None = None,
    ):
        self.budget, self.store, self.freed = budget, store, freed
        self.root = Page(blake2b(fingerprint, digest_size=16).digest(), None, np.empty(0, np.int32), (), [])
        self.bytes = self.clock = 0

    # -- what an engine calls ------------------------------------------------------------------------------------------

    def restore(self, tokens: Sequence[int], state: State, reading: Reading, more_than: int = 0) -> Found:
        """Bring `state` to the longest kept prefix of `tokens`, longer than `more_than` and shorter than all of them.

        Only to one whose bits are those that `reading` gives.
        """
        if not state.can_save:
            return Found()
        self.clock += 1
        ids = np.asarray(tokens, np.int32)
        path = self._path(ids, reading)
        matched, length = self._matched(ids, path), 0
        entry, page = self._resumable(ids, path, reading, not state.point_shapes(1))
        if entry is not None and entry.length > max(more_than, PAGE * page):
            length = entry.length
            self._touch(entry)
            _load(state, Saved(ids[:length], _before(reading, length), 0, self._rows(entry.page, entry), entry.point))
        elif PAGE * page > more_than:
            length = PAGE * page
            for held in path[:page]:
                held.used = self.clock
            _load(state, Saved(ids[:length], _before(reading, length), 0, self._rows(path[page - 1]), []))
        saved = None if self.store is None else self.store.get(ids, reading, max(length, more_than))
        if saved is not None:
            try:
                _load(state, saved)
            except BimetalError:  # of another layout, in spite of its fingerprint
                return Found(length, matched)
            length = len(saved.tokens)
            self._keep(saved.tokens, state, "turn")
        best = max(length, more_than)
        branch = max((cut for cut in reading.cuts.tolist() if best < cut <= matched), default=0)
        return Found(length, max(matched, length), branch if state.point_shapes(1) and branch < len(ids) else 0)

    def matched(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` some text kept in memory begins with, in whatever steps it was read."""
        ids, path, parent = np.asarray(tokens, np.int32), list[Page](), self.root
        while len(part := ids[len(path) * PAGE :][:PAGE]) == PAGE:
            same = [page for page in parent.children.values() if np.array_equal(page.tokens, part)]
            if not same:
                break
            parent = same[0]
            path.append(parent)
        return self._matched(ids, path)

    def offer(self, tokens: Sequence[int], state: State, why: str = "turn") -> None:
        """Keep `state`, which holds exactly `tokens`, if it is new and there is room or something of less value."""
        if state.can_save and state.length:
            ids = np.asarray(tokens, np.int32)
            entry = self._keep(ids, state, why)
            first = None if self.store is None else self.store.first_missing(ids, state.long_steps)
            if first is not None and self.store is not None:
                point = state.save_point() if entry is None else entry.point
                rows = state.save_rows(first, state.length)
                self.store.put(Saved(ids, tuple(state.long_steps), first, rows, point))

    # -- keeping -------------------------------------------------------------------------------------------------------

    def _keep(self, ids: np.ndarray, state: State, why: str) -> Entry | None:
        """The entry of `state`, new or kept before; None if it is larger than the budget."""
        if len(ids) != state.length:
            raise ValueError(f"a state of {state.length} tokens is offered with {len(ids)}")
        self.clock += 1
        steps, whole = tuple(state.long_steps), len(ids) // PAGE
        path = [self.root]
        for at in range(whole):
            page = self._child(path[-1], ids, at, steps)
            if page is None:
                break
            path.append(page)
        tail, over = ids[whole * PAGE :], _overlapping(steps, whole * PAGE, len(ids))
        if len(path) > whole and (entry := path[-1].entries.get(_key(path[-1].key, tail, over))) is not None:
            if not np.array_equal(entry.tail, tail):
                return None  # one hash of two texts: the first stays
            entry.why = why if why == "system" else entry.why
            self._touch(entry)
            return entry
        if len(path) <= whole and _key(path[-1].key, *_part(ids, len(path) - 1, steps)) in path[-1].children:
            return None
        need = _bytes(state.row_shapes(len(ids) - PAGE * (len(path) - 1))) + _bytes(state.point_shapes(len(ids)))
        if not self._make_room(need, path):
            return None
        for at in range(len(path) - 1, whole):
            page = self._page(path[-1], ids, at, steps, state.save_rows(at * PAGE, (at + 1) * PAGE))
            path.append(page)
        key = _key(path[-1].key, tail, over)
        rows = state.save_rows(whole * PAGE, len(ids)) if len(tail) else []
        entry = Entry(key, path[-1], len(ids), tail.copy(), over, rows, state.save_point(), why)
        self._link(entry)
        path[-1].entries[key] = entry
        self.bytes += entry.nbytes
        self._touch(entry)
        if why == "grid":
            self._thin(entry)
        return entry

    def _child(self, parent: Page, ids: np.ndarray, at: int, steps: Sequence[LongStep]) -> Page | None:
        """The page of tokens PAGE * at on behind `parent`, if it is kept; its ids are compared."""
        part, over = _part(ids, at, steps)
        page = parent.children.get(_key(parent.key, part, over))
        return page if page is not None and page.steps == over and np.array_equal(page.tokens, part) else None

    def _page(self, parent: Page, ids: np.ndarray, at: int, steps: Sequence[LongStep], rows: list[np.ndarray]) -> Page:
        part, over = _part(ids, at, steps)
        page = Page(_key(parent.key, part, over), parent, part.copy(), over, rows, self.clock)
        parent.children[page.key] = page
        self.bytes += page.nbytes
        return page

    def _link(self, entry: Entry) -> None:
        """Put `entry` between the longest one that it goes on from and those that go on from it."""
        entry.base = self._base(entry)
        siblings = set(self.entries()) if entry.base is None else entry.base.kids
        for kid in [kid for kid in siblings if kid.base is entry.base and _goes_on(kid, entry)]:
            if entry.base is not None:
                entry.base.kids.discard(kid)
            kid.base = entry
            entry.kids.add(kid)
            entry.below = max(entry.below, kid.used, kid.below)
        if entry.base is not None:
            entry.base.kids.add(entry)

    def _base(self, entry: Entry) -> Entry | None:
        tail, page = entry.tail, entry.page
        while True:
            held = [e for e in page.entries.values() if e.length < entry.length and _begins(e, tail)]
            if held:
                return max(held, key=lambda e: e.length)
            if page.parent is None:
                return None
            tail, page = page.tokens, page.parent

    def _touch(self, entry: Entry) -> None:
        self.clock += 1
        entry.used = self.clock
        page: Page | None = entry.page
        while page is not None:
            page.used, page = self.clock, page.parent
        above = entry.base
        while above is not None:
            above.below, above = self.clock, above.base

    def _thin(self, entry: Entry) -> None:
        """Of the grid points that `entry` goes on from keep the nearest two, and fewer the farther they are."""
        point = entry.base
        while point is not None:
            above, back = point.base, (entry.length - point.length) // GRID_POINTS
            every = 1 << max(back.bit_length() - 1, 0)
            if point.why == "grid" and back > 1 and point.length // GRID_POINTS % every and len(point.kids) < 2:
                self._drop(point)
            point = above

    # -- matching ------------------------------------------------------------------------------------------------------

    def _path(self, ids: np.ndarray, reading: Reading) -> list[Page]:
        """The kept pages of the prompt's beginning, read as `reading` does."""
        path, parent = list[Page](), self.root
        for at in range(len(ids) // PAGE):
            page = self._child(parent, ids, at, reading.long_steps)
            if page is None:
                break
            path.append(page)
            parent = page
        return path

    def _matched(self, ids: np.ndarray, path: list[Page]) -> int:
        """Tokens that the prompt and some kept text begin with."""
        last, rest = path[-1] if path else self.root, ids[len(path) * PAGE :]
        held = [*(page.tokens for page in last.children.values()), *(entry.tail for entry in last.entries.values())]
        return len(path) * PAGE + max((common_length(rest, tokens) for tokens in held), default=0)

    def _resumable(
        self, ids: np.ndarray, path: list[Page], reading: Reading, any_page: bool
    ) -> tuple[Entry | None, int]:
        """The longest entry, and with `any_page` the number of whole pages, that the prompt can go on from."""
        best = None
        for page in (self.root, *path):
            for entry in page.entries.values():
                n, at = entry.length, entry.length - len(entry.tail)
                fits = n < len(ids) and np.array_equal(entry.tail, ids[at:n])
                exact = entry.steps == _overlapping(reading.long_steps, at, n)
                if fits and exact and _is_cut(reading, n) and (best is None or n > best.length):
                    best = entry
        pages = [n for n in range(1, len(path) + 1) if PAGE * n < len(ids) and _is_cut(reading, PAGE * n)]
        return best, (pages[-1] if any_page and pages else 0)

    def _rows(self, page: Page, entry: Entry | None = None) -> list[np.ndarray]:
        parts = [] if entry is None or not len(entry.tail) else [entry.rows]
        held: Page | None = page
        while held is not None and held.parent is not None:
            parts.append(held.rows)
            held = held.parent
        if not parts:
            return []
        return [np.concatenate(arrays, axis=1) for arrays in zip(*reversed(parts), strict=True)]

    # -- giving back ---------------------------------------------------------------------------------------------------

    def entries(self) -> Iterator[Entry]:
        for page in self.pages():
            yield from page.entries.values()

    def pages(self) -> Iterator[Page]:
        """The root, then every page behind its parent."""
        waiting = [self.root]
        while waiting:
            page = waiting.pop()
            yield page
            waiting += page.children.values()

    def _make_room(self, need: int, path: Sequence[Page]) -> bool:
        """Drop what has least value until `need` more bytes fit, but no page of `path`; whether they fit."""
        if need + sum(page.nbytes for page in path) > self.budget:
            return False
        if self.bytes + need <= self.budget:
            return True
        fixed, order = set(map(id, path)), count()
        heap: list[tuple[int, bool, int, Entry | Page]] = [
            (e.value, bool(e.kids), next(order), e) for e in self.entries()
        ]
        heap += [(page.used, True, next(order), page) for page in self.pages() if _is_idle(page)]
        heapify(heap)
        while self.bytes + need > self.budget and heap:
            *_, thing = heappop(heap)
            if id(thing) in fixed:
                continue
            self._drop(thing, fixed)
            page = thing.page if isinstance(thing, Entry) else thing.parent
            if page is not None and page.parent is not None and page.key in page.parent.children and _is_idle(page):
                heappush(heap, (page.used, True, next(order), page))
        return self.bytes + need <= self.budget

    def _drop(self, thing: Entry | Page, fixed: set[int] | None = None) -> None:
        """Give back an entry, and the pages of a state with points that no other needs; or a page without followers."""
        if isinstance(thing, Entry):
            del thing.page.entries[thing.key]
            for kid in thing.kids:
                kid.base = thing.base
            if thing.base is not None:
                thing.base.kids.discard(thing)
                thing.base.kids |= thing.kids
            self._give_back(thing.nbytes, (*thing.rows, *thing.point))
            page: Page | None = thing.page if thing.point else None
        else:
            page = thing
        while page is not None and page.parent is not None and _is_idle(page):
            if id(page) in (fixed or ()):
                return
            del page.parent.children[page.key]
            self._give_back(page.nbytes, page.rows)
            page = page.parent if isinstance(thing, Entry) else None

    def _give_back(self, nbytes: int, arrays: Sequence[np.ndarray]) -> None:
        self.bytes -= nbytes
        if self.freed is not None:
            self.freed(arrays)

    def close(self) -> None:
        """Wait until the slower tier has all that it was given."""
        if self.store is not None:
            self.store.close()

    def clear(self) -> None:
        """Give everything back but what the slower tier has."""
        for page in reversed(list(self.pages())):
            for entry in list(page.entries.values()):
                self._drop(entry)
            if page.parent is not None and page.key in page.parent.children:
                self._drop(page)

    def check(self) -> int:
        """Raise AssertionError where counts, keys or links contradict one another; the number of pages."""
        pages, entries = list(self.pages()), set(self.entries())
        assert self.bytes == sum(p.nbytes for p in pages) + sum(e.nbytes for e in entries), "bytes are miscounted"
        assert self.bytes <= max(self.budget, 0), "more is kept than the budget allows"
        for page in pages[1:]:
            assert page.parent is not None
            assert page.key == _key(page.parent.key, page.tokens, page.steps), "a page has another's key"
            assert page.parent.children[page.key] is page, "a page hangs elsewhere"
        for entry in entries:
            assert entry.base is None or (entry.base in entries and entry in entry.base.kids), "an entry's base is gone"
            assert entry.base is self._base(entry), "an entry goes on from another"
            assert all(kid in entries and kid.base is entry for kid in entry.kids), "a follower is gone"
        if any(entry.point for entry in entries):
            idle = [p for p in pages[1:] if not p.children and not p.entries]
            assert not idle, f"{len(idle)} pages lead to no state"
        return len(pages) - 1


def _is_idle(page: Page) -> bool:
    return page.parent is not None and not page.children and not page.entries


def _load(state: State, saved: Saved) -> None:
    arrays = {f"rows.{i}": array for i, array in enumerate(saved.rows)}
    arrays |= {f"point.{i}": array for i, array in enumerate(saved.point)}
    state.load(arrays, len(saved.tokens), saved.long_steps)


def _before(reading: Reading, length: int) -> tuple[LongStep, ...]:
    return tuple(step for step in reading.long_steps if step[1] <= length)


def _is_cut(reading: Reading, at: int) -> bool:
    """Whether no long step of the reading passes over `at`."""
    return not any(first < at < end for first, end in reading.long_steps)


def _part(ids: np.ndarray, at: int, steps: Sequence[LongStep]) -> tuple[np.ndarray, tuple[LongStep, ...]]:
    """The tokens of page `at`, and the long steps that overlap it."""
    return ids[at * PAGE : (at + 1) * PAGE], _overlapping(steps, at * PAGE, (at + 1) * PAGE)


def _overlapping(steps: Sequence[LongStep], first: int, end: int) -> tuple[LongStep, ...]:
    return tuple(step for step in steps if step[0] < end and step[1] > first)


def _key(parent: bytes, tokens: np.ndarray, steps: Sequence[LongStep]) -> bytes:
    hashed = blake2b(parent, digest_size=16)
    hashed.update(len(tokens).to_bytes(4, "little") + np.ascontiguousarray(tokens, "<i4").tobytes())
    hashed.update(np.asarray(steps, "<i8").tobytes())
    return hashed.digest()


def _bytes(shapes: Sequence[Shape]) -> int:
    return sum(int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize for shape, dtype in shapes)


def _begins(entry: Entry, tail: np.ndarray) -> bool:
    """Whether the tokens behind the entry's page begin with its tail."""
    return len(entry.tail) <= len(tail) and np.array_equal(entry.tail, tail[: len(entry.tail)])


def _goes_on(kid: Entry, entry: Entry) -> bool:
    """Whether `kid` is longer than `entry` and begins with its tokens."""
    if kid.length <= entry.length:
        return False
    tail, page = kid.tail, kid.page
    while page is not entry.page:
        if page.parent is None:
            return False
        tail, page = page.tokens, page.parent
    return _begins(entry, tail)
