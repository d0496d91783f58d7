"""States whose rows are made of their tokens, so that a test knows what any state must hold."""

from functools import cache
from typing import Any

import numpy as np

from common.prefix_tree import chained_key
from common.reading import Reading
from common.step import State

ROW = np.dtype(np.int64)
POISON = -77


class Rows:
    """A layer whose row of a token depends on all tokens before it; with `points` it also keeps their sum apart."""

    def __init__(self, points):
        self.points, self.rows = points, np.zeros((1, 0, 2), ROW)

    def row_shapes(self, tokens):
        return [((1, tokens, 2), ROW)]

    def point_shapes(self, length):
        return [((3,), ROW)] if self.points else []

    def save_rows(self, first, last):
        return [self.rows[:, first:last].copy()]

    def save_point(self):
        return [np.full(3, self.rows[..., 0].sum())] if self.points else []

    def load(self, length, rows, point):
        assert not any((array == POISON).any() for array in (*rows[0], *point)), "freed rows are read"
        self.rows = np.concatenate(rows[0], axis=1)
        assert all((array == self.rows[..., 0].sum()).all() for array in point), "rows and point are of two texts"

    nbytes = 0


class Fake(State):
    def __init__(self, points, tokens=(), reading=None):
        rows: Any = Rows(points)  # what of a LayerState the prefix cache calls
        super().__init__([{"kv": rows}], 1_000_000)
        self.read(tokens, reading or reading_of(tokens))

    def read(self, tokens, reading):
        """Read on from what the state holds."""
        held, tokens = self[0].kv, np.asarray(tokens, np.int64)
        sums = np.cumsum(tokens * (1 + np.arange(len(tokens)))) if len(tokens) else tokens
        held.rows = np.concatenate([held.rows, np.stack([sums, tokens], axis=-1)[None, self.length :]], axis=1)
        self.length = len(tokens)
        self.long_steps = [step for step in reading.long_steps if step[1] <= self.length]


def reading_of(tokens, **marks):
    return Reading(max(len(tokens), 1), 512, {at: reason for reason, at in marks.items()})


@cache
def _drawn(n, seed):
    return tuple(np.random.default_rng(seed).integers(3, 50, n).tolist())


def text(n, seed=0):
    return list(_drawn(n, seed))


def texts(choice, length):
    """One of a few texts that share beginnings of several lengths."""
    parts = [(0, 300), (choice % 3, 300), (10 + choice % 7, 400), (100 + choice % 11, 200)]
    return [token for seed, n in parts for token in text(n, seed)][:length]


def restored(cache, points, tokens, **marks):
    """What the cache finds for a prompt; the state is compared with one that read the tokens."""
    state, reading = Fake(points), reading_of(tokens, **marks)
    found = cache.restore(tokens, state, reading)
    expected = Fake(points, tokens[: found.length], reading)
    assert state.length == found.length
    if found.length:
        assert np.array_equal(state[0].kv.rows, expected[0].kv.rows)
        assert state.long_steps == expected.long_steps
        state.read(tokens, reading)
        assert np.array_equal(state[0].kv.rows, Fake(points, tokens, reading)[0].kv.rows)
    return found


def offer(cache, points, tokens, reason="turn", **marks):
    cache.offer(tokens, Fake(points, tokens, reading_of(tokens, **marks)), reason)
    check(cache)


def check(cache):
    """Count the pages; fails where counts, keys or links contradict one another."""
    pages, entries = list(cache.root.subtree()), set(cache.entries())
    assert cache.bytes == sum(p.nbytes for p in pages) + sum(e.nbytes for e in entries), "bytes are miscounted"
    assert cache.bytes <= max(cache.budget, 0), "the budget is exceeded"
    for page in pages[1:]:
        assert page.key == chained_key(page.parent.key, page.tokens, page.steps), "a page has another's key"
        assert page.parent.children[page.key] is page, "a page is not its parent's child"
    for entry in entries:
        assert entry.base is None or (entry.base in entries and entry in entry.base.kids), "an entry's base is gone"
        assert entry.base is entry.find_base(), "an entry has a wrong base"
        assert all(kid in entries and kid.base is entry for kid in entry.kids), "an entry that extends another is gone"
    if any(entry.point for entry in entries):
        idle = [p for p in pages[1:] if not p.children and not p.entries]
        assert not idle, f"{len(idle)} pages lead to no state"
    return len(pages) - 1


def clear(cache):
    """Drop everything in memory; a slower tier keeps its states."""
    for page in reversed(list(cache.root.subtree())):
        for entry in list(page.entries.values()):
            cache._drop(entry)
        if page.parent is not None and page.key in page.parent.children:
            cache._drop(page)
