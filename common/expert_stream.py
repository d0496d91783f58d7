"""Read experts while a model runs: a pool of threads does the loads that the residency chooses.

A layer's `moe` op calls `fetch` with the experts that its rows chose, and finds all of them in slots until the next
layer fetches. Before the router has run, `prefetch` reads the experts that the last step chose in this layer. Each
backend has its own `SlotMemory`.
"""

import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from common.expert_files import ExpertSource, expert_matrices
from common.expert_forms import ExpertForm, SlotMemory, Streamed, filled
from common.expert_profile import Profile
from common.expert_stats import ExpertStats
from common.experts import Key, Load, Residency
from common.ops import Ops
from common.quants import check_scales
from common.weights import Layout, Matrix

THREADS = 8  # reads at a time: what keeps an SSD's queue busy


class ExpertStream:
    """Reads experts into the slots of `memory`, as `residency` decides. Owned by one thread."""

    def __init__(self, residency: Residency, source: ExpertSource, memory: SlotMemory, threads: int = THREADS):
        self.residency, self.source, self.memory = residency, source, memory
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="experts")
        self._reads: dict[Load, Future[float]] = {}
        self._latest: dict[int, list[int]] = {}  # experts that the last step chose, by layer
        self._layer = -1  # of the last fetch
        self._checked: set[Key] = set()  # experts whose scales are finite

    def handles(self, layout: Layout) -> dict[Matrix, Streamed]:
        """Make the handles that stand for the experts' weights in a model."""
        made: dict[Matrix, Streamed] = {}
        for layer, pair in expert_matrices(layout).items():
            calls = partial(self.fetch, layer), partial(self.prefetch, layer)
            sizes = self.residency.experts * self.residency.sizes[layer], 0
            for matrix, parts, nbytes in zip(pair, self.memory.matrices(layer), sizes, strict=True):
                made[matrix] = Streamed(*calls, parts, nbytes)
        return made

    def fetch(self, layer: int, ids: np.ndarray) -> np.ndarray:
        """Read the missing ones of the experts `ids` (T, k) of `layer`; return the slot of each, int32 (experts,).

        The slots of `ids` hold until the next call; an expert that is not in memory has -1. Raises BimetalError for a
        read that fails; what has been read stays.
        """
        self.memory.wait()
        self.residency.release()
        if layer <= self._layer or self._layer < 0:
            self.residency.next_step(len(ids))
        self._layer = layer
        self._harvest()
        placement = self.residency.ensure(layer, ids)
        self._start(placement.loads)
        started = time.perf_counter()
        self._wait((*placement.loads, *placement.late))
        self.residency.counters.waits[layer] += time.perf_counter() - started
        self._latest[layer] = np.unique(ids).tolist()
        return self.residency.tables[layer].copy()

    def prefetch(self, layer: int) -> None:
        """Begin to read the experts that the last step chose in `layer`."""
        self._harvest()
        self._start(self.residency.prefetch(layer, self._latest.get(layer, ())))

    def preload(self) -> None:
        """Read the experts of the residency's placement, before the first step. Raises BimetalError."""
        loads = self.residency.preload()
        self._start(loads)
        self._wait(loads)

    def begin_request(self) -> ExpertStats:
        """Return the counts so far."""
        return self.stats()

    def stats(self, earlier: ExpertStats | None = None) -> ExpertStats:
        """Return the counts, or the counts since `earlier`."""
        return self.residency.counters.stats(earlier)

    def close(self) -> None:
        """Wait for reads in progress, and drop the others."""
        self._pool.shutdown(cancel_futures=True)

    def _start(self, loads: Iterable[Load]) -> None:
        for load in loads:
            self._reads[load] = self._pool.submit(self._read, load)

    def _read(self, load: Load) -> float:
        """Read one expert, in a thread of the pool; return the seconds it took."""
        started = time.perf_counter()
        (layer, expert), slot = load.key, load.slot
        buffers = self.memory.buffers(layer, slot)
        self.source.read(layer, expert, buffers)
        tensors = filled(self.source.forms[layer].tensors, buffers)
        if load.key not in self._checked:  # once: the file is the same afterwards
            for tensor in tensors:
                check_scales(tensor)
            self._checked.add(load.key)
        self.memory.landed(layer, slot, tensors)
        return time.perf_counter() - started

    def _wait(self, loads: Sequence[Load]) -> None:
        """Wait for all loads; raises the first failure after the last of them has stopped writing."""
        failures = [failure for load in loads if (failure := self._settled(load)) is not None]
        if failures:
            raise failures[0]

    def _harvest(self) -> None:
        """Report the prefetches that are done; one that failed is tried again when it is needed."""
        for load in [load for load, read in self._reads.items() if read.done()]:
            self._settled(load)

    def _settled(self, load: Load) -> BaseException | None:
        """Wait for one read and report it; return its failure, if any."""
        read = self._reads.pop(load)
        try:
            seconds = read.result()
        except BaseException as error:
            if not read.done():  # interrupted while it waited
                self._reads[load] = read
                raise
            self.residency.abandon(load)
            return error
        self.residency.finish(load)
        self.residency.counters.reads.append(seconds)
        self.residency.counters.bytes_read += self.source.forms[load.key.layer].nbytes
        return None


def open_stream(
    source: ExpertSource, ops: Ops, layers: int, used: int, budget: int, profile: Profile | None = None
) -> ExpertStream:
    """Open a stream over `budget` bytes of slots, and read the experts that `profile` counts most.

    layers  of the model
    used    experts per token
    """
    sizes, kinds = sizes_of(source.forms, ops, layers)
    residency = Residency(source.experts, sizes, used, budget, profile, kinds)
    stream = ExpertStream(residency, source, ops.expert_memory(source.forms, residency.slots))
    if profile is not None:
        stream.preload()
    return stream


def sizes_of(forms: Mapping[int, ExpertForm], ops: Ops, layers: int) -> tuple[list[int], list[Hashable]]:
    """List the bytes of an expert in a slot, and its kind, by layer; 0 and None for layers without experts."""
    sizes = [ops.expert_bytes(forms[i]) if i in forms else 0 for i in range(layers)]
    return sizes, [forms[i].kind if i in forms else None for i in range(layers)]
