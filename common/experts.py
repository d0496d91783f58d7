"""Residency of a mixture's experts in memory: the policy of streaming from a disk, and the first placement in VRAM.

An expert slot holds one expert of one layer; layers whose experts are stored alike share their slots. Eviction is
segmented LRU: an expert begins on probation, its second use protects it, and protected experts take at most
`PROTECTED` of the slots; beyond that the least recently used returns to probation. Nothing here reads an expert:
`ensure` returns the loads to do, and the caller reports each by `finish` or `abandon`. All calls come from one thread.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np

from common.errors import BimetalError
from common.expert_profile import Profile, least_bytes, place, uniform
from common.expert_stats import ExpertCounters, ExpertStats

PROTECTED = 0.8  # share of the slots of a size


class ExpertSupply(Protocol):
    """A mixture's experts of which some are in memory: read from files, or held by a backend itself."""

    residency: "Residency"

    def begin_request(self) -> ExpertStats:
        """Return the counts so far. Called before a request's first step, when experts may be exchanged."""

    def stats(self, earlier: ExpertStats | None = None) -> ExpertStats:
        """Return the counts, or the counts since `earlier`."""

    def close(self) -> None:
        """Stop copying and reading experts."""


class Where(Enum):
    """State of an expert: resident, loading or cold."""

    RESIDENT = "resident"
    LOADING = "loading"
    COLD = "cold"


class Key(NamedTuple):
    layer: int
    expert: int


class Load(NamedTuple):
    """A copy to make: expert `key` into `slot` of its layer's pool, in place of `replaces` if the slot is in use."""

    key: Key
    slot: int
    replaces: Key | None = None


class Placement(NamedTuple):
    """Slots in which a step finds the experts that a layer chose.

    slots   of the layer's pool, int32 in the shape of the ids; valid until `release`
    loads   what must be read first
    late    loads of an earlier `prefetch` that have not been reported yet
    """

    slots: np.ndarray
    loads: tuple[Load, ...]
    late: tuple[Load, ...]


@dataclass
class _Entry:
    load: Load
    step: int  # number of the step that used it last, or, if none did, that began its load
    is_loading: bool = True
    uses: int = 0


@dataclass
class _Pool:
    """Slots of one kind; both segments are ordered from the least to the most recently used."""

    size: int
    slots: int
    free: list[int]
    loading: int = 0  # entries whose load has not been reported
    probation: OrderedDict[Key, _Entry] = field(default_factory=OrderedDict)
    protected: OrderedDict[Key, _Entry] = field(default_factory=OrderedDict)

    def find(self, key: Key) -> _Entry | None:
        return self.probation.get(key) or self.protected.get(key)

    def entries(self) -> Iterable[tuple[Key, _Entry]]:
        """Iterate over all entries, in the order of eviction."""
        yield from self.probation.items()
        yield from self.protected.items()


class Residency:
    """The experts that are in memory, within a budget of bytes.

    experts   of each layer
    sizes     bytes of an expert in each layer, 0 where there are no experts
    used      experts per token
    profile   counts by which the slots are divided among kinds; None: all experts alike
    kinds     layers of one kind share their slots; None: layers whose experts have as many bytes
    counters  what happened; the caller adds bytes, latencies and waits
    tables    by layer the slot of each resident expert, -1 of the others: int32 (experts,)
    counts    how often each expert was chosen since the start: int64 (layers, experts)

    Raises BimetalError for a budget below one layer's experts of each kind.
    """

    def __init__(
        self,
        experts: int,
        sizes: Sequence[int],
        used: int,
        budget: int,
        profile: Profile | None = None,
        kinds: Sequence[Hashable] | None = None,
    ):
        self.kinds = tuple(sizes if kinds is None else kinds)
        least = least_bytes(sizes, experts, self.kinds)
        if budget < least:
            raise BimetalError(
                f"the experts' budget is {budget / 1e9:.3g} GB; the least is {least / 1e9:.3g} GB "
                f"({least} bytes), which one layer's {experts} experts take"
            )
        self.experts, self.sizes, self.used, self.budget = experts, tuple(sizes), used, budget
        profile = profile or uniform(len(sizes), experts, used)
        planned = place(profile, sizes, budget, self.kinds)
        self._planned = sorted((int(profile.counts[i, e]), i, e) for i, ids in enumerate(planned) for e in ids.tolist())
        self.pools: dict[Hashable, _Pool] = {}
        for kind, size in dict(zip(self.kinds, sizes, strict=True)).items():
            held = sum(len(ids) for ids, own in zip(planned, self.kinds, strict=True) if own == kind)
            slots = max(experts, held) if size else 0
            self.pools[kind] = _Pool(size, slots, list(range(slots - 1, -1, -1)))
        self.tables = [np.full(experts, -1, np.int32) for _ in sizes]
        self.counts = np.zeros((len(sizes), experts), np.int64)
        self.counters = ExpertCounters(budget, len(sizes))
        self._pinned: set[Key] = set()
        self._step = 0

    @property
    def slots(self) -> dict[Hashable, int]:
        """Count the slots of each kind of experts."""
        return {kind: pool.slots for kind, pool in self.pools.items() if pool.size}

    @property
    def profile(self) -> Profile:
        """Return how often traffic has chosen each expert so far."""
        return Profile(self.counts.copy(), self.used)

    def where(self, layer: int, expert: int) -> Where:
        entry = self._pool(layer).find(Key(layer, expert))
        if entry is None:
            return Where.COLD
        return Where.LOADING if entry.is_loading else Where.RESIDENT

    def resident(self, layer: int) -> np.ndarray:
        """Return the layer's experts that are in memory, in order."""
        return np.flatnonzero(self.tables[layer] >= 0)

    def held_bytes(self) -> int:
        """Count the bytes of the slots in use, with those that are being filled."""
        return sum(pool.size * (pool.slots - len(pool.free)) for pool in self.pools.values())

    # -- a step --------------------------------------------------------------------------------------------------------

    def ensure(self, layer: int, ids: np.ndarray) -> Placement:
        """Place the experts `ids`, of any shape, that rows of the step chose in `layer`.

        They stay in their slots until `release`. Raises BimetalError if experts in use leave too few slots.
        """
        ids = np.asarray(ids)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.experts):
            raise BimetalError(f"the router of layer {layer} chose an expert outside 0 to {self.experts - 1}")
        pool = self._pool(layer)
        self.counts[layer] += np.bincount(ids.ravel(), minlength=self.experts)
        keys = [Key(layer, expert) for expert in np.unique(ids).tolist()]
        found = {key: entry for key in keys if (entry := pool.find(key)) is not None}
        self._pinned.update(keys)
        loads: list[Load] = []
        late = [entry.load for entry in found.values() if entry.is_loading]
        for key in keys:
            if key in found:
                self._touch(pool, key, found[key])
                continue
            load = self._allot(pool, key, None if pool.free else self._victim(pool))
            if load is None:
                self._drop(loads, keys)
                raise BimetalError(
                    f"layer {layer} needs {len(keys)} experts at once, and experts in use occupy too many slots"
                )
            loads.append(load)
            self._touch(pool, key, pool.probation[key])
        self.counters.hits += len(found) - len(late)
        self.counters.misses += len(loads) + len(late)
        table = np.full(self.experts, -1, np.int32)
        for key in keys:
            entry = pool.find(key)
            assert entry is not None
            table[key.expert] = entry.load.slot
        return Placement(table[ids], tuple(loads), tuple(late))

    def prefetch(self, layer: int, ids: Iterable[int]) -> tuple[Load, ...]:
        """Choose loads of experts that `layer` may need soon: into slots that are free or unused for two steps.

        Slots for a whole layer's experts remain beside these loads and the experts in use.
        """
        pool, loads = self._pool(layer), []
        bound = len(self._pinned) + pool.loading  # slots that cannot be reassigned
        for expert in dict.fromkeys(ids):
            key = Key(layer, expert)
            if pool.find(key) is not None:
                continue
            if pool.slots - bound <= self.experts:
                break
            old = (k for k, entry in pool.probation.items() if self._may_leave(k, entry, step=self._step - 1))
            load = self._allot(pool, key, None if pool.free else next(old, None))
            if load is None:
                break
            bound += 1
            loads.append(load)
        self.counters.prefetched += len(loads)
        return tuple(loads)

    def finish(self, load: Load) -> None:
        """Report that the expert is in its slot."""
        entry = self._pool(load.key.layer).find(load.key)
        if entry is not None and entry.load == load:
            entry.is_loading = False
            self._pool(load.key.layer).loading -= 1
            self.tables[load.key.layer][load.key.expert] = load.slot

    def abandon(self, load: Load) -> None:
        """Report that the load has failed: the expert is cold, its slot free."""
        pool = self._pool(load.key.layer)
        entry = pool.find(load.key)
        if entry is not None and entry.load == load:
            pool.loading -= entry.is_loading
            self._remove(pool, load.key)
            pool.free.append(load.slot)

    def release(self) -> None:
        """Release the experts of `ensure`, once the computation has read them."""
        self._pinned.clear()

    def next_step(self, rows: int) -> None:
        """Count a step of `rows` tokens, which begins here."""
        self._step += 1
        self.counters.tokens += rows

    # -- between requests ----------------------------------------------------------------------------------------------

    def preload(self) -> tuple[Load, ...]:
        """Choose the loads of the placement by profile, before the first step; the most used are evicted last."""
        loads = []
        for _, layer, expert in self._planned:
            pool, key = self._pool(layer), Key(layer, expert)
            if pool.find(key) is None and (load := self._allot(pool, key, None)) is not None:
                loads.append(load)
        for pool in self.pools.values():
            for key in list(pool.probation)[-int(PROTECTED * pool.slots) :]:
                pool.probation[key].uses = 1
                self._touch(pool, key, pool.probation[key])
        return tuple(loads)

    # -- slots ---------------------------------------------------------------------------------------------------------

    def _pool(self, layer: int) -> _Pool:
        return self.pools[self.kinds[layer]]

    def _may_leave(self, key: Key, entry: _Entry, step: int) -> bool:
        """Test whether the entry is neither in use nor loading, and was last used before the step `step`."""
        return key not in self._pinned and not entry.is_loading and entry.step < step

    def _victim(self, pool: _Pool) -> Key | None:
        entries = pool.entries()
        return next((key for key, entry in entries if self._may_leave(key, entry, step=self._step + 1)), None)

    def _allot(self, pool: _Pool, key: Key, victim: Key | None) -> Load | None:
        """Give `key` the slot of `victim`, or without a victim a free one; None if no slot is free."""
        if victim is not None:
            load = Load(key, self._remove(pool, victim).load.slot, victim)
            self.counters.evictions += 1
        elif pool.free:
            load = Load(key, pool.free.pop())
        else:
            return None
        pool.probation[key] = _Entry(load, self._step)
        pool.loading += 1
        self.counters.peak = max(self.counters.peak, self.held_bytes())
        return load

    def _remove(self, pool: _Pool, key: Key) -> _Entry:
        entry = pool.probation.pop(key, None) or pool.protected.pop(key)
        self.tables[key.layer][key.expert] = -1
        self._pinned.discard(key)
        return entry

    def _drop(self, loads: Iterable[Load], keys: Iterable[Key]) -> None:
        for load in loads:
            self.abandon(load)
        self._pinned.difference_update(keys)

    def _touch(self, pool: _Pool, key: Key, entry: _Entry) -> None:
        """Count a use: the second one protects."""
        entry.uses += 1
        entry.step = self._step
        if key in pool.protected:
            pool.protected.move_to_end(key)
            return
        if entry.uses < 2:
            pool.probation.move_to_end(key)
            return
        del pool.probation[key]
        pool.protected[key] = entry
        if len(pool.protected) > int(PROTECTED * pool.slots):
            fallen, old = pool.protected.popitem(last=False)
            old.uses = 1  # the next use protects it again
            pool.probation[fallen] = old
