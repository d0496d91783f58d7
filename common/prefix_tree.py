"""The tree of kept prefixes: pages of tokens that texts share, and entries, which are states at the ends of texts.

A page is looked up by a hash of its tokens chained with the hash of its parent; the token ids are then compared, so
that two texts with the same hash are never confused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from common.step import LongStep

PAGE = 256  # tokens


@dataclass(eq=False)
class Page:
    """The rows of PAGE tokens, which follow the tokens of the parent pages; the root has no tokens.

    steps     the long steps that overlap the page
    children  the pages that continue this one, by key
    entries   the entries whose last whole page is this one
    used      time of the last use, on the cache's clock
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

    @property
    def is_idle(self) -> bool:
        """Test whether the page is unused: without children and entries, and not the root."""
        return self.parent is not None and not self.children and not self.entries

    def child(self, ids: np.ndarray, number: int, steps: Sequence[LongStep]) -> "Page | None":
        """Return the child that holds page `number` of the tokens `ids`; token ids are compared."""
        part, over = page_part(ids, number, steps)
        page = self.children.get(chained_key(self.key, part, over))
        return page if page is not None and page.steps == over and np.array_equal(page.tokens, part) else None

    def subtree(self) -> Iterator["Page"]:
        """Iterate over this page, then every page of its subtree after its parent."""
        waiting = [self]
        while waiting:
            page = waiting.pop()
            yield page
            waiting += page.children.values()


@dataclass(eq=False)
class Entry:
    """A state of `length` tokens: the rows of the pages up to `page`, the rows of the `tail` after them, and the point.

    reason      why the state is kept: "system", "turn", "branch", "grid"
    base        the longest entry that is a prefix of this one; `kids` are the entries of which this one is the base
    used        time of the last use, on the cache's clock
    used_below  time of the last use of any entry of which this one is a prefix
    """

    key: bytes
    page: Page
    length: int
    tail: np.ndarray
    steps: tuple[LongStep, ...]
    rows: list[np.ndarray]
    point: list[np.ndarray]
    reason: str
    base: "Entry | None" = None
    kids: set["Entry"] = field(default_factory=set)
    used: int = 0
    used_below: int = 0

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.rows, *self.point))

    @property
    def value(self) -> int:
        """Return the time of the last use; for branch points and system prompts the use of a longer text counts too."""
        return max(self.used, self.used_below) if len(self.kids) > 1 or self.reason == "system" else self.used

    def is_prefix_of(self, tail: np.ndarray) -> bool:
        """Test whether `tail`, the tokens of a text after the entry's page, begins with the entry's tail."""
        return len(self.tail) <= len(tail) and np.array_equal(self.tail, tail[: len(self.tail)])

    def extends(self, entry: "Entry") -> bool:
        """Test whether this entry is longer than `entry` and begins with its tokens."""
        if self.length <= entry.length:
            return False
        tail, page = self.tail, self.page
        while page is not entry.page:
            if page.parent is None:
                return False
            tail, page = page.tokens, page.parent
        return entry.is_prefix_of(tail)

    def find_base(self) -> "Entry | None":
        """Return the longest other entry whose tokens begin this one's."""
        tail, page = self.tail, self.page
        while True:
            shorter = [e for e in page.entries.values() if e.length < self.length and e.is_prefix_of(tail)]
            if shorter:
                return max(shorter, key=lambda e: e.length)
            if page.parent is None:
                return None
            tail, page = page.tokens, page.parent

    def insert(self, roots: Iterator["Entry"]) -> None:
        """Link this entry between its base and the entries that extend it.

        roots  entries, including all that have no base
        """
        self.base = self.find_base()
        siblings = set(roots) if self.base is None else self.base.kids
        for kid in [kid for kid in siblings if kid.base is self.base and kid.extends(self)]:
            if self.base is not None:
                self.base.kids.discard(kid)
            kid.base = self
            self.kids.add(kid)
            self.used_below = max(self.used_below, kid.used, kid.used_below)
        if self.base is not None:
            self.base.kids.add(self)

    def remove(self) -> None:
        """Unlink this entry from its page, its base and its kids."""
        del self.page.entries[self.key]
        for kid in self.kids:
            kid.base = self.base
        if self.base is not None:
            self.base.kids.discard(self)
            self.base.kids |= self.kids

    def touch(self, now: int) -> None:
        """Record a use at time `now` for the entry, its pages and its bases."""
        self.used = now
        page: Page | None = self.page
        while page is not None:
            page.used, page = now, page.parent
        base = self.base
        while base is not None:
            base.used_below, base = now, base.base


def page_part(ids: np.ndarray, number: int, steps: Sequence[LongStep]) -> tuple[np.ndarray, tuple[LongStep, ...]]:
    """Return the tokens of page `number`, and the long steps that overlap it."""
    return ids[number * PAGE : (number + 1) * PAGE], overlapping(steps, number * PAGE, (number + 1) * PAGE)


def overlapping(steps: Sequence[LongStep], first: int, end: int) -> tuple[LongStep, ...]:
    return tuple(step for step in steps if step[0] < end and step[1] > first)


def root_key(fingerprint: bytes) -> bytes:
    return blake2b(fingerprint, digest_size=16).digest()


def chained_key(parent: bytes, tokens: np.ndarray, steps: Sequence[LongStep]) -> bytes:
    """Hash the parent's key, the tokens, and the long steps that overlap them."""
    hashed = blake2b(parent, digest_size=16)
    hashed.update(len(tokens).to_bytes(4, "little") + np.ascontiguousarray(tokens, "<i4").tobytes())
    hashed.update(np.asarray(steps, "<i8").tobytes())
    return hashed.digest()
