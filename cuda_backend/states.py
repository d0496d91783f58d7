"""States of sequences on the device: a pool of slots, each with the states of all layers for one sequence.

All layers of a kind lie in one allocation, so that `commit`, `snapshot` and `restore` take one or two launches, not one
per layer.
"""

import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from common.errors import BimetalError
from common.step import Parts, Shape, State, Step
from common.storage import Kind, LayerSpec, Spec, all_specs, grows
from cuda_backend.caches.kv import KVStore
from cuda_backend.caches.packed import PackedStore
from cuda_backend.caches.pages import Pages, page_count
from cuda_backend.caches.planes import PAGE, check_capacity
from cuda_backend.caches.recurrent import Recurrent, recurrent_bytes
from cuda_backend.caches.rows import PoolSlots
from cuda_backend.launch import Stream
from cuda_backend.memory import free_and_total
from cuda_backend.replay import graphs
from cuda_backend.runs import MAX_RUNS, RunInputs, Runs, run_of, runs_of
from cuda_backend.state_table import store_of


class CudaPool:
    """The states of up to `slots` sequences of at most `capacity` tokens, computed together in one step.

    `pool[i].kv`, `.conv`, `.delta` are the handles of layer i; their stores commit all layers at once.

    tokens   that all sequences may hold together; None: `slots` times `capacity`. The minimum is `capacity`
    batches  micro-batches, whose steps alternate
    length   constant, because steps of few rows have the same launches at any length
    lengths  committed tokens of each slot
    graphs   captured steps, for any sequences
    pages    pages of the rows that grow; None for one sequence, whose rows are contiguous
    """

    length = 0

    def __init__(
        self,
        spec: Sequence[LayerSpec],
        slots: int,
        capacity: int,
        apply_paths: Callable[[Recurrent, Sequence[int]], None],
        stream: Stream,
        tokens: int | None = None,
        batches: int = 1,
    ):
        if not 1 <= slots <= MAX_RUNS:
            raise BimetalError(f"a pool of {slots} sequences; the CUDA kernels take 1 to {MAX_RUNS}")
        self.slots, self.capacity, self.copies = slots, capacity, stream.copies
        self.lengths, self.vacant = [0] * slots, list(range(slots))
        flat = [(i, name, s) for i, layer in enumerate(spec) for name, s in layer.items()]
        cached = [(i, name, s) for i, name, s in flat if grows(s)]
        recurrent = [(i, name, s) for i, name, s in flat if not grows(s)]
        layers: list[dict[str, Any]] = [{} for _ in spec]
        self.pages: Pages | None = None
        if slots > 1 and any(in_pages(s) for _, _, s in cached):
            self.pages = Pages(slots, capacity, page_count(slots, capacity, tokens), self.vacant, stream)
        self.stores: list[Any] = []
        for shape in dict.fromkeys(s for _, _, s in cached):
            alike = [(i, name) for i, name, s in cached if s == shape]
            pages = self.pages if in_pages(shape) else None
            store = store_of(shape)(shape, len(alike), PoolSlots(capacity, self.lengths, stream, pages))
            self.stores.append(store)
            for n, (i, name) in enumerate(alike):
                layers[i][name] = store.layer(n)
        self.recurrent: Recurrent | None = None
        if recurrent:
            self.recurrent = Recurrent([(store_of(s), s) for _, _, s in recurrent], slots, apply_paths, stream, batches)
            self.stores.append(self.recurrent)
            for handle, (i, name, _) in zip(self.recurrent.layers(), recurrent, strict=True):
                layers[i][name] = handle
        self.layers = [SimpleNamespace(**layer) for layer in layers]
        self.graphs, self.captures_long = graphs(), may_capture(spec)

    def __getitem__(self, layer: int) -> Any:
        return self.layers[layer]

    @property
    def pool(self) -> "CudaPool":
        return self

    def new_state(self) -> "CudaState":
        """Take a vacant slot as the state of a new sequence; the slot is vacant again when the state is deleted."""
        if not self.vacant:
            raise BimetalError(f"all {self.slots} sequences of the pool are taken")
        slot = min(self.vacant)
        self.vacant.remove(slot)
        self.set_length(slot, 0)
        for store in self.stores if self.slots > 1 else ():
            if isinstance(store, Recurrent | PackedStore):
                store.clear(slot)
        return CudaState(self, slot)

    def set_length(self, slot: int, length: int) -> None:
        """Set the number of committed tokens of a slot, and free the pages after them."""
        shorter = length < self.lengths[slot] or not length
        self.lengths[slot] = length
        if self.pages and shorter:
            self.pages.truncate(slot, length)

    def commit_rows(self, states: Sequence[State], counts: Sequence[int]) -> None:
        """Commit the first `counts` rows, at least one, that the last step of decoding had of each state."""
        rows = [(state.slot, count) for state, count in zip(states, counts, strict=True)]
        for store in self.stores:
            if not store.appends:
                for slot, count in rows:
                    store.commit(slot, list(range(count)))
        for slot, count in rows:
            self.lengths[slot] += count

    @property
    def free_tokens(self) -> int | None:
        """Count the tokens for which pages are free; None: each sequence has memory for all of its own."""
        if not self.pages:
            return None
        self.pages.reclaim()
        return len(self.pages.free) * PAGE

    def runs(self, step: Step) -> Runs:
        """Return the rows of each sequence of a step, whose `slots` are the pool's."""
        runs, vacant = runs_of(step), set(self.vacant)
        for slot in runs.slots:
            if not 0 <= slot < self.slots or slot in vacant:
                raise BimetalError(f"a step has rows of slot {slot}, which no sequence of the pool has")
        return runs

    def note_step(self, step: Step) -> None:
        """Note a step that is about to be launched."""
        self.note_runs(step, self.runs(step))

    def note_runs(self, step: Step, runs: Runs) -> None:
        """Note a step and its runs, a block in attention stores only; raises NoRoomError if too few pages are free."""
        if self.pages:
            self.pages.hold_runs(runs, self.lengths)
        for store in self.stores:
            if isinstance(store, KVStore):
                store.note_step(runs)
            elif isinstance(store, Recurrent) and step.parents is not None:
                store.note_step(step, runs)

    @property
    def calibrates(self) -> bool:
        """Test whether the latest noted step completes a calibration; a sequence has one such step."""
        return any(isinstance(store, PackedStore) and store.calibrates for store in self.stores)

    def inputs(self, step: Step, runs: Runs) -> RunInputs:
        """Return what kernels read of the runs of a noted step."""
        pasts = [self.lengths[slot] for slot in runs.slots]
        if not self.recurrent or step.parents is None:
            return RunInputs(runs, pasts)
        return self.recurrent.inputs(runs, pasts)

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores)

    def bytes_of(self, slot: int) -> int:
        """Count the bytes of the pages that a slot holds, and its share of everything else."""
        if not self.pages:
            return self.nbytes // self.slots
        shared = self.nbytes - self.pages.count * self.pages.block
        return shared // self.slots + self.pages.held[slot] * self.pages.block


class OfSlot(NamedTuple):
    """One sequence's part of a store."""

    store: Any
    slot: int

    def snapshot(self) -> Any:
        return self.store.snapshot(self.slot)

    def restore(self, snapshot: Any) -> None:
        self.store.restore(self.slot, snapshot)

    def row_shapes(self, tokens: int) -> list[Shape]:
        return self.store.row_shapes(tokens)

    def point_shapes(self, length: int) -> list[Shape]:
        return self.store.point_shapes(length)

    def save_rows(self, first: int, last: int) -> list[np.ndarray]:
        return self.store.save_rows(self.slot, first, last)

    def save_point(self) -> list[np.ndarray]:
        return self.store.save_point(self.slot)

    def load(self, length: int, rows: list[Parts], point: list[np.ndarray]) -> None:
        self.store.load(self.slot, length, rows, point)


class CudaState(State):
    """One sequence's slot of a pool; `state[i].kv`, `.conv`, `.delta` are the pool's handles."""

    def __init__(self, pool: CudaPool, slot: int):
        self.pool: CudaPool = pool
        self.slot = slot
        super().__init__([vars(layer) for layer in pool.layers], pool.capacity)
        self._parts = [OfSlot(store, slot) for store in pool.stores]
        weakref.finalize(self, pool.vacant.append, slot).atexit = False

    @property
    def length(self) -> int:
        return self.pool.lengths[self.slot]

    @length.setter
    def length(self, length: int) -> None:
        self.pool.set_length(self.slot, length)

    @property
    def recurrent(self) -> Recurrent | None:
        return self.pool.recurrent

    @property
    def graphs(self) -> Any:
        return self.pool.graphs

    @property
    def calibrates(self) -> bool:
        return self.pool.calibrates

    def runs(self, step: Step) -> Runs:
        """Return the rows of a step, all of this sequence, whatever slot they name."""
        if len(step) > 1:
            step.the_slot()
        return run_of(self.slot, len(step))

    def note_step(self, step: Step) -> None:
        self.pool.note_runs(step, self.runs(step))

    def _all(self) -> list[Any]:
        return self._parts

    def commit(self, path: Sequence[int] | np.ndarray) -> None:
        kept = path.tolist() if isinstance(path, np.ndarray) else list(path)  # Python numbers: faster than arrays
        pool, slot, count = self.pool, self.slot, len(kept)
        in_place = kept == list(range(count))
        for store in pool.stores:
            if not (in_place and store.appends):
                store.commit(slot, kept)
        self._note_long(count)
        pool.set_length(slot, pool.lengths[slot] + count)

    @property
    def saving(self) -> tuple[int, int | None]:
        return self.pool.copies.waiting_bytes, self.pool.copies.limit(free_and_total()[0])

    def when_saved(self, arrays: Sequence[np.ndarray] | None = None) -> Callable[[], object]:
        return self.pool.copies.completion(arrays)

    @property
    def nbytes(self) -> int:
        return self.pool.bytes_of(self.slot)

    def load_parts(self, length: int, rows: list[Parts], point: list[np.ndarray]) -> None:
        """Load parts as State.load_parts; raises NoRoomError, and changes nothing, if too few pages are free."""
        if self.pool.pages:
            self.pool.pages.hold([(self.slot, length)])
        super().load_parts(length, rows, point)


def may_capture(spec: Sequence[LayerSpec]) -> bool:
    """Test whether the launches of a long step are identical at every length of a state, and for every slot.

    They differ for rings, whose copies depend on where a ring begins, and for codes, whose exact rows are in a ring.
    """
    return all(store_of(s) is KVStore and not s.is_packed for s in all_specs(spec) if grows(s))


def state_bytes(spec: Sequence[LayerSpec], capacity: int) -> int:
    """Predict the device bytes of a pool of one sequence, without building it."""
    return pool_bytes(spec, 1, capacity)


def pool_bytes(
    spec: Sequence[LayerSpec], slots: int, capacity: int, tokens: int | None = None, batches: int = 1
) -> int:
    """Predict the device bytes of a CudaPool, without building it."""
    check_capacity(capacity)
    pages = page_count(slots, capacity, tokens) if slots > 1 else 0
    recurrent = [(store_of(s), s) for s in all_specs(spec) if not grows(s)]
    rows = sum(store_of(s).layer_bytes(s, slots, capacity, pages) for s in all_specs(spec) if grows(s))
    return rows + recurrent_bytes(recurrent, slots, batches)


def in_pages(spec: Spec) -> bool:
    """Test whether a pool of several sequences stores rows of a spec in pages: rows that are appended."""
    return spec.kind is Kind.APPENDS
