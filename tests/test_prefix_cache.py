"""The memory tier: what is found, what is given back, and that nothing leaks, against states made of their tokens."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_states import POISON, Fake, Rows, check, clear, offer, reading_of, restored, text, texts

from common.errors import NoRoomError
from common.prefix_cache import PrefixCache
from common.reading import Reading


@pytest.fixture(params=[True, False], ids=["points", "rows"])
def points(request):
    return request.param


@pytest.fixture
def cache():
    return PrefixCache(b"a model", 10**9)


def test_an_entry_is_found_by_longer_prompts_alone(cache, points):
    tokens = text(100)
    offer(cache, points, tokens)
    assert restored(cache, points, tokens).length == 0
    assert restored(cache, points, tokens[:99]).length == 0
    assert restored(cache, points, [*tokens, 5]).length == 100
    assert restored(cache, points, [*tokens[:99], 51, 51]).length == 0
    assert restored(PrefixCache(b"another", 10**9), points, [*tokens, 5]).length == 0


def test_the_longest_is_found(cache, points):
    tokens = text(2000)
    for n in (100, 300, 520, 1000):
        offer(cache, points, tokens[:n], **{f"turn{i}": at for i, at in enumerate((100, 300, 520, 1000)) if at < n})
    marks = {"turn0": 100, "turn1": 300, "turn2": 520, "turn3": 1000}
    for n, length in ((101, 100), (305, 300), (999, 520), (2000, 1000)):
        assert restored(cache, points, tokens[:n], **marks).length == length
    state = Fake(points)
    found = cache.restore(tokens, state, reading_of(tokens, **marks), more_than=1000)
    assert (found.length, state.length) == (0, 0)


def test_only_states_with_the_bits_of_the_prompt(cache, points):
    """A prompt whose steps pass over the end of an entry reads it again, from the last cut on."""
    tokens = text(1500)
    offer(cache, points, tokens[:700])  # 512, then 188 in one step
    assert restored(cache, points, tokens).length == (0 if points else 512)
    assert restored(cache, points, tokens, turn=700).length == 700
    offer(cache, points, tokens[:600])  # 512, then 88 in a short step, which any cut allows
    assert restored(cache, points, tokens[:640]).length == 600


def test_pages_are_shared(cache, points):
    tokens = text(1024)
    offer(cache, points, [*tokens, *text(30, 1)], turn=1024)
    before = cache.bytes
    offer(cache, points, [*tokens, *text(30, 2)], turn=1024)
    assert check(cache) == 4
    assert cache.bytes - before < 1000


def test_pages_without_points_serve_at_any_cut(cache):
    tokens = text(1500)
    offer(cache, False, tokens, turn=1300)
    assert restored(cache, False, [*tokens[:1100], 1, 2]).length == 1024
    assert restored(cache, False, [*tokens[:1023], 1, 2]).length == 512


def test_a_branch_is_named_once(cache):
    """Where another text went on differently, the last cut before it is worth a state."""
    tokens = text(1500)
    offer(cache, True, tokens)
    other = [*tokens[:1200], *text(300, 1)]
    found = restored(cache, True, other)
    assert (found.length, found.matched, found.branch) == (0, 1200, 1024)
    offer(cache, True, other[:1024], "branch")
    assert restored(cache, True, [*tokens[:1200], *text(300, 2)]) == (1024, 1200, 0)


def test_ids_are_compared_and_not_only_hashed(cache, points, monkeypatch):
    """Two texts whose hashes are equal never share a state."""
    for module in ("prefix_tree", "prefix_cache"):
        monkeypatch.setattr(f"common.{module}.chained_key", lambda parent, tokens, steps: b"the same")
    tokens, other = text(300), text(300, 1)
    for one in (tokens, other):
        cache.offer(one, Fake(points, one))
    assert restored(cache, points, [*other, 1, 2], turn=300).length == 0
    assert restored(cache, points, [*tokens, 1, 2], turn=300).length == 300


def sizes(points, lengths):
    """Bytes of a cache that keeps prefixes of one text, of `lengths` tokens."""
    cache = PrefixCache(b"", 10**9)
    for n in lengths:
        offer(cache, points, text(2000)[:n])
    return cache.bytes


def test_the_oldest_go_first_and_a_shared_beginning_outlives_its_ends(points):
    system, cache = text(120), PrefixCache(b"", sizes(points, [120]) + 3 * sizes(points, [200]))
    offer(cache, points, system)
    for seed in range(1, 12):
        chat = [*system, *text(80, seed)]
        assert restored(cache, points, chat, turn=120).length == 120
        offer(cache, points, chat, turn=120)
    newest = [*system, *text(80, 11)]
    assert restored(cache, points, [*newest, 4], turn=120).length == 200
    oldest = [*system, *text(80, 1)]
    assert restored(cache, points, [*oldest, 4], turn=120).length == 120


def test_a_conversation_loses_its_oldest_turns_first(points):
    tokens = text(200)
    cache = PrefixCache(b"", sizes(points, [110, 120, 130]))
    for n in range(20, 131, 10):
        offer(cache, points, tokens[:n])
    assert restored(cache, points, [*tokens[:130], 5]).length == 130
    assert restored(cache, points, [*tokens[:90], 5]).length == 0


def test_what_is_larger_than_the_budget_is_not_kept(points):
    cache = PrefixCache(b"", 500)
    offer(cache, points, text(10))
    before = cache.bytes
    offer(cache, points, text(400))
    assert cache.bytes == before > 0
    none = PrefixCache(b"", 0)
    offer(none, points, text(10))
    assert none.bytes == check(none) == 0


@pytest.mark.parametrize(
    ("waiting", "most", "kept"),
    [
        (10**4, 10**4, ["system"]),
        (10**3, 10**4, ["turn", "branch", "system"]),
        (0, 10**4, ["grid", "turn", "branch", "system"]),
        (0, 10**3, ["turn", "branch", "system"]),
    ],
)
def test_less_is_kept_while_earlier_states_are_saved(points, waiting, most, kept, monkeypatch):
    """System prompts always; a point of the grid only if it leaves room for the end of the turn."""
    tokens = text(200)
    monkeypatch.setattr(Fake, "saving", (waiting, most))
    for reason in ("grid", "turn", "branch", "system"):
        cache = PrefixCache(b"", 10**9)
        offer(cache, points, tokens, reason=reason)
        assert restored(cache, points, [*tokens, 5], turn=200).length == (200 if reason in kept else 0)


def test_a_hit_waits_for_its_own_arrays_alone(cache, points, monkeypatch):
    waited = []
    monkeypatch.setattr(Fake, "when_saved", lambda self, arrays=None: lambda: waited.append(arrays))
    tokens = text(700)
    offer(cache, points, tokens, turn=600)
    offer(cache, points, text(300, 1))
    assert not waited
    assert restored(cache, points, [*tokens, 5], turn=700, system=600).length == 700
    (arrays,) = waited
    assert sum(array.shape[1] for array in arrays if array.ndim == 3) == 700
    assert len(arrays) == 3 + points


class Disk:
    """A store that lacks the rows from token `first` on."""

    def __init__(self, first):
        self.first, self.states = first, []

    def first_missing(self, tokens, long_steps):
        return self.first

    def put(self, saved):
        self.states.append(saved)

    def get(self, tokens, reading, more_than):
        return None


@pytest.mark.parametrize("first", [0, 256, 300, 511])
def test_rows_leave_the_device_once(points, first, monkeypatch):
    """Those of pages that are kept already, and those that the store takes as well, are not copied again."""
    copied, save_rows = [], Rows.save_rows
    monkeypatch.setattr(Rows, "save_rows", lambda self, *span: (copied.append(span), save_rows(self, *span))[1])
    cache = PrefixCache(b"", 10**9, Disk(first))
    offer(cache, points, text(520), turn=500)
    assert copied == [(0, 256), (256, 512), (512, 520)]
    offer(cache, points, text(530), turn=500, system=520)
    assert copied[3:] == [(512, 530)]
    for saved, length in zip(cache.store.states, (520, 530), strict=True):
        (rows,) = saved.rows
        assert np.array_equal(np.concatenate(rows, axis=1), Fake(points, text(length))[0].kv.rows[:, first:])


@pytest.mark.parametrize("first", [0, 300])
def test_rows_for_the_disk_alone_leave_the_device_in_parts(points, first, monkeypatch):
    """A copy takes memory of the device, so that those of a long state are not made at once."""
    monkeypatch.setattr("common.saving.MOVED", 100)
    copied, save_rows = [], Rows.save_rows
    monkeypatch.setattr(Rows, "save_rows", lambda self, *span: (copied.append(span), save_rows(self, *span))[1])
    cache, tokens = PrefixCache(b"", 0, Disk(first)), text(520)
    offer(cache, points, tokens)
    ends = [*range(first, 520, 100), 520]
    assert copied == [*pairwise(ends)]
    (saved,) = cache.store.states
    (rows,) = saved.rows
    assert np.array_equal(np.concatenate(rows, axis=1), Fake(points, tokens)[0].kv.rows[:, first:])
    assert len(saved.point) == points


@pytest.mark.parametrize("budget", [0, 10**9])
@pytest.mark.parametrize("last", [100, 256, 512, 600])
def test_a_state_for_whose_copy_no_memory_is_free_is_left_out(points, budget, last, monkeypatch, capsys):
    """Wherever that happens, nothing of the state is left, and a later one is kept."""
    monkeypatch.setattr("common.saving.MOVED", 100)
    save_rows = Rows.save_rows

    def save(self, first, end):
        if end >= last:
            raise NoRoomError("no memory is free")
        return save_rows(self, first, end)

    cache, tokens = PrefixCache(b"", budget, Disk(0)), text(600)
    offer(cache, points, tokens[:40])
    before = cache.bytes
    with monkeypatch.context() as patch:
        patch.setattr(Rows, "save_rows", save)
        offer(cache, points, tokens)
    assert (cache.bytes, len(cache.store.states)) == (before, 1)
    assert capsys.readouterr().err == "a state of 600 tokens is not kept for later prompts: no memory is free\n"
    offer(cache, points, tokens)
    assert len(cache.store.states) == 2
    assert restored(cache, points, [*tokens, 5], turn=600).length == (600 if budget else 0)


def test_bytes_are_counted_before_anything_is_saved(points, monkeypatch):
    cache = PrefixCache(b"", sizes(points, [300]))
    offer(cache, points, text(300))
    saved = Rows.save_rows

    def save_rows(self, first, last):
        assert cache.bytes + 16 * (last - first) <= cache.budget
        return saved(self, first, last)

    monkeypatch.setattr(Rows, "save_rows", save_rows)
    offer(cache, points, text(290, 1))


def test_grid_points_thin_out():
    cache, tokens = PrefixCache(b"", 10**9), text(16 * 8192)
    for n in range(8192, len(tokens) + 1, 8192):
        state = Fake(True)
        state.capacity = len(tokens)
        state.read(tokens[:n], Reading(n, 512))
        cache.offer(tokens[:n], state, "grid")
    check(cache)
    assert sorted(entry.length // 8192 for entry in cache.entries()) == [8, 12, 14, 15, 16]


operations = st.tuples(st.sampled_from(["read", "read", "offer", "clear"]), st.integers(0, 10**6), st.integers(1, 1200))


def run(cache, points, history):
    for operation, choice, length in history:
        tokens = texts(choice, length)
        marks = {"turn": 300, "system": 40} if choice % 2 else {}
        if operation == "clear" and choice % 50 == 0:
            clear(cache)
            assert cache.bytes == check(cache) == 0
        elif operation == "offer":
            offer(cache, points, tokens, ("turn", "grid", "system", "branch")[choice % 4], **marks)
            if cache.budget > 60_000:
                assert restored(cache, points, [*tokens, 60], **marks, end=length).length == length
        elif operation == "read":
            found = restored(cache, points, tokens, **marks)
            assert found.length <= found.matched <= len(tokens)
    check(cache)


def poisoned(budget):
    """A cache that spoils what it gives back, and the bytes that it has given back."""
    freed = []

    def free(arrays):
        for array in arrays:
            assert not (array == POISON).all() or not array.size, "given back twice"
            array.fill(POISON)
            freed.append(array.nbytes)

    return PrefixCache(b"", budget, freed=free), freed


@settings(max_examples=60, derandomize=True)
@given(
    history=st.lists(operations, max_size=40),
    budget=st.sampled_from([2000, 20_000, 40_000, 10**8]),
    points=st.booleans(),
)
def test_any_history(history, budget, points):
    """Whatever came before, a state that is found is the one that reading the tokens gives."""
    cache, _ = poisoned(budget)
    run(cache, points, history)


@pytest.mark.long
def test_nothing_leaks_in_4_000_operations(points):
    random = np.random.default_rng(4)
    cache, freed = poisoned(30_000)
    for _ in range(40):
        kinds = random.choice(["read", "offer"], 100)
        run(cache, points, [(kind, int(random.integers(10**6)), int(random.integers(1, 1200))) for kind in kinds])
    held = cache.bytes
    assert 10_000 < held <= 30_000
    clear(cache)
    assert cache.bytes == check(cache) == 0
    assert sum(freed) > 30_000
