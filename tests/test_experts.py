"""The residency of experts against a plain model of segmented LRU, the profile's file, and placement from it."""

import random
import re

import numpy as np
import pytest

from common.errors import BimetalError
from common.expert_profile import Profile, check_profile, place, read_profile, uniform, write_profile
from common.experts import PROTECTED, Key, Residency, Where

E, USED = 8, 2


class PlainCache:
    """Segmented LRU of one size with lists: each from the least to the most recently used."""

    def __init__(self, slots: int):
        self.slots, self.probation, self.protected = slots, [], []

    def use(self, keys: list[Key]) -> list[Key]:
        """Use `keys` at once; the keys that had to leave, in order."""
        left = []
        pending = [key for key in keys if key not in self.probation + self.protected]
        for key in keys:
            if key in pending:
                if len(self.probation) + len(self.protected) == self.slots:
                    old = next(k for k in self.probation + self.protected if k not in keys)
                    (self.probation if old in self.probation else self.protected).remove(old)
                    left.append(old)
                self.probation.append(key)
            elif key in self.protected:
                self.protected.remove(key)
                self.protected.append(key)
            else:
                self.probation.remove(key)
                self.protected.append(key)
                if len(self.protected) > int(PROTECTED * self.slots):
                    self.probation.append(self.protected.pop(0))
        return left


def check(residency: Residency) -> None:
    """What holds at every moment: one expert per slot, within the budget, tables that show the resident alone."""
    for kind, pool in residency.pools.items():
        slots = [entry.load.slot for _, entry in pool.entries()]
        assert sorted(slots + pool.free) == list(range(pool.slots))
        assert pool.loading == sum(entry.is_loading for _, entry in pool.entries())
        assert len(pool.protected) <= int(PROTECTED * pool.slots)
        for key, entry in pool.entries():
            assert residency.kinds[key.layer] == kind
            assert residency.tables[key.layer][key.expert] == (-1 if entry.is_loading else entry.load.slot)
    assert residency.held_bytes() <= residency.counters.peak <= residency.budget
    assert sum(len(residency.resident(layer)) for layer, n in enumerate(residency.sizes) if n) == sum(
        not entry.is_loading for pool in residency.pools.values() for _, entry in pool.entries()
    )


@pytest.mark.parametrize("seed", range(40))
def test_leaves_in_the_order_of_a_plain_cache(seed):
    rng = random.Random(seed)
    slots = rng.randint(E, 3 * E)
    residency = Residency(E, [10, 10, 10], USED, 10 * slots + rng.randint(0, 9))
    plain = PlainCache(slots)
    popular = [rng.sample(range(E), 3) for _ in range(3)]
    for _ in range(60):
        residency.next_step(1)
        for layer in range(3):
            count = rng.choice((1, 2, 2, 2, E))
            ids = rng.sample(range(E), count) if rng.random() < 0.4 else rng.choices(popular[layer], k=count)
            placement = residency.ensure(layer, np.array(ids).reshape(1, -1))
            left = plain.use(sorted({Key(layer, expert) for expert in ids}))
            assert [load.replaces for load in placement.loads if load.replaces] == left
            assert not placement.late
            for load in placement.loads:
                assert residency.where(*load.key) is Where.LOADING
                residency.finish(load)
            np.testing.assert_array_equal(placement.slots[0], residency.tables[layer][ids])
            residency.release()
            check(residency)
    counters = residency.counters.stats()
    assert counters.tokens == 60
    assert counters.hits > 0
    assert residency.counts.sum() >= 60 * 3


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.few(12)
def test_a_step_keeps_its_experts_whatever_loads_beside_it(seed):
    """With prefetches that are late, loads that fail and two sizes of experts."""
    rng = random.Random(seed)
    sizes = [0, 10, 30, 10]
    residency = Residency(E, sizes, USED, 10 * rng.randint(E, 3 * E) + 30 * rng.randint(E, 2 * E))
    flying, latest = [], {}
    for _ in range(80):
        residency.next_step(1)
        for layer in (1, 2, 3):
            flying += residency.prefetch(layer, latest.get(layer, ()))
            while flying and rng.random() < 0.7:
                load = flying.pop(rng.randrange(len(flying)))
                (residency.abandon if rng.random() < 0.2 else residency.finish)(load)
            check(residency)
            ids = np.array(rng.choices(range(E), k=rng.choice((2, 2, 6, 30))))
            placement = residency.ensure(layer, ids)
            held = dict(zip(ids.tolist(), placement.slots.tolist(), strict=True))
            assert set(placement.late) <= set(flying)
            for load in (*placement.loads, *placement.late):
                residency.finish(load)
            flying = [load for load in flying if load not in placement.late]
            flying += residency.prefetch(layer, range(E))
            for expert, slot in held.items():
                assert residency.tables[layer][expert] == slot
            residency.release()
            check(residency)
            latest[layer] = ids
    assert residency.counters.hits > residency.counters.misses > 0


def test_a_prefetch_takes_what_two_steps_have_not_used():
    residency = Residency(E, [10, 10], USED, 10 * (E + 3))

    def step(layer: int, *ids: int) -> None:
        residency.next_step(1)
        for load in residency.ensure(layer, np.array(ids)).loads:
            residency.finish(load)
        residency.release()

    step(0, 0, 1, 2, 3)
    step(0, 4, 5, 6, 7)
    assert [load.replaces for load in residency.prefetch(1, range(E))] == [None] * 3
    for expert in range(3):
        assert residency.where(1, expert) is Where.LOADING
    placement = residency.ensure(1, np.array([0]))
    assert [load.key for load in placement.late] == [Key(1, 0)]
    for expert in range(3):
        residency.finish(residency.pools[10].probation[Key(1, expert)].load)
    residency.release()
    step(0, 4, 5)  # protected now
    step(0, 4, 5)
    assert [load.replaces for load in residency.prefetch(1, range(3, E))] == [Key(0, 0), Key(0, 1), Key(0, 2)]
    check(residency)


def test_the_least_budget_is_one_layer_of_each_size():
    assert Residency(E, [0, 10, 30], USED, 40 * E).slots == {10: E, 30: E}
    with pytest.raises(BimetalError, match=r"the least is 3.2e-07 GB \(320 bytes\), which one layer's 8 experts take"):
        Residency(E, [0, 10, 30], USED, 40 * E - 1)


def test_experts_in_use_that_take_the_room_are_an_error():
    residency = Residency(E, [10, 10], USED, 10 * E)
    for load in residency.ensure(0, np.arange(E)).loads:
        residency.finish(load)
    with pytest.raises(BimetalError, match="layer 1 needs 2 experts at once, and experts in use occupy too many slots"):
        residency.ensure(1, np.arange(2))
    residency.release()
    assert len(residency.ensure(1, np.arange(2)).loads) == 2
    check(residency)


def test_a_router_outside_the_experts_is_an_error():
    with pytest.raises(BimetalError, match="the router of layer 0 chose an expert outside 0 to 7"):
        Residency(E, [10], USED, 10 * E).ensure(0, np.array([E]))


def test_preload_leaves_the_most_used_for_last():
    counts = np.array([[9, 1, 8, 2, 7, 3, 6, 4], [0, 0, 0, 0, 0, 50, 60, 0]])
    residency = Residency(E, [10, 10], USED, 10 * E, Profile(counts, USED))
    for load in residency.preload():
        residency.finish(load)
    assert residency.resident(0).tolist() == [0, 2, 4, 5, 6, 7]
    assert residency.resident(1).tolist() == [5, 6]
    left = [load.replaces for load in residency.ensure(1, np.array([0, 1])).loads]
    assert left == [Key(0, 5), Key(0, 7)]  # used 3 and 4 times; 1 and 2 are cold
    check(residency)


def test_place_gives_bytes_to_the_most_used():
    counts = np.array([[40, 30, 20, 10], [4, 3, 2, 1]])
    assert [ids.tolist() for ids in place(Profile(counts, 1), [1, 1], 5)] == [[0, 1, 2, 3], [0]]
    assert [len(ids) for ids in place(uniform(2, 4, 1), [1, 1], 6)] == [3, 3]
    # per byte a use of the second layer's experts is worth a tenth
    assert [len(ids) for ids in place(Profile(np.array([[4, 4, 4, 4], [9, 9, 9, 9]]), 1), [1, 10], 44)] == [4, 4]


def test_a_profile_comes_back_as_written(tmp_path):
    profile = Profile(np.arange(12, dtype=np.int64).reshape(3, 4) * 10**15, 2)
    write_profile(tmp_path / "m.gguf.spark.csv", profile)
    read = read_profile(tmp_path / "m.gguf.spark.csv")
    assert read.used == 2
    np.testing.assert_array_equal(read.counts, profile.counts)
    check_profile(tmp_path / "m.gguf.spark.csv", read, [1, 1, 1], 4)
    (tmp_path / "bare.csv").write_text("1,2\n3,4\n")
    assert read_profile(tmp_path / "bare.csv").used == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it must hold one line of counts per layer"),
        ("1,2\n3\n", "all of one length"),
        ("1,-2\n", "line 1: '-2' is not a count"),
        ("1,1e3\n", "'1e3' is not a count"),
        ("1,,2\n", "line 1: '' is not a count"),
        (
            "# hotness table: n_layer=2 n_expert=2 n_expert_used=1\n1,2\n",
            "and has 1 lines of 2",
        ),
        ("9" * 19 + "\n", "counts are whole numbers below"),
        ("1,é\n", "byte 2 is not ASCII"),
    ],
)
def test_a_damaged_profile_is_one_sentence(tmp_path, text, message):
    (tmp_path / "p.csv").write_text(text, encoding="utf-8")
    with pytest.raises(BimetalError, match=re.escape(message)):
        read_profile(tmp_path / "p.csv")


def test_a_profile_of_another_model_is_refused(tmp_path):
    with pytest.raises(BimetalError, match="of another model: it has 2 layers of 4 experts, and the model has 3 of 4"):
        check_profile(tmp_path / "p.csv", uniform(2, 4, 1), [1, 1, 1], 4)
    with pytest.raises(BimetalError, match="it counts experts in layer 0, a dense one"):
        check_profile(tmp_path / "p.csv", uniform(2, 4, 1), [0, 1], 4)
    with pytest.raises(BimetalError, match="cannot be read"):
        read_profile(tmp_path / "missing.csv")
