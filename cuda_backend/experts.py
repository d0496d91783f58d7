"""Hot experts in GPU memory, all experts in pinned host memory.

Kernels read an expert at the address in a table: in a slot of GPU memory, or in host memory over the link, each byte
once per step. Whether experts are resident therefore changes neither the step's graph nor any bit of its result. Steps
write the experts that their rows chose to a log. Between steps the host reads the log and starts copies of experts that
were missed repeatedly, on a separate stream; when a copy has completed, the host updates the table.
"""

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import cupy
import numpy as np

from common.errors import BimetalError
from common.expert_stats import ExpertStats
from common.experts import Load, Residency
from common.hot_experts import HotExperts, HotSizes, check_hot
from common.step import MAX_DECODE_ROWS
from cuda_backend.expert_stacks import DOWN, GATE_UP, Stack, Staging, Tables, copy, parts_of_expert, to_host
from cuda_backend.host_memory import HostMemory
from cuda_backend.launch import Stream
from cuda_backend.memory import Memory
from cuda_backend.weights import Weight

R = TypeVar("R")

LOGS = 4  # most steps whose logs have not been counted yet
TURNS = 8  # steps in which the recency of all layers' experts is updated once, some layers in each step
# Misses of an expert, each faded by FADE per step, from which it is copied to a slot. Tried, by simulation of 256
# experts of which 60 % or 30 % have slots: from the first miss on -> 6.1 and 20.1 experts over the link per token and 8
# layers against 4.4 and 12.5, hits 95.1 % and 83.8 % against 94.1 % and 83.6 %; 1.5 misses, 0.98 -> 4.6 and 13.5
MISSES = 2.5
FADE = 0.995
COPIES = 8  # experts copied at the same time: more would take the link's bandwidth from misses
SWAPS = 64  # most experts swapped between two requests
LINK_BYTES = 1 << 28  # size of the copy that measures the link
SWAP_GAIN = 8  # uses that an expert must have more than the one whose slot it takes


class Logged(NamedTuple):
    """The experts that a step's rows chose.

    done         recorded after the copy of the log
    ids          by layer, `ids_per_row` for each row, in pinned memory that is filled once `done` has happened: int32
    rows         rows of the step without padding
    ids_per_row  by layer, ids that a row logs; the last may be a shared expert's number
    resident     (layers, experts) at the step
    """

    done: cupy.cuda.Event
    ids: np.ndarray
    rows: int
    ids_per_row: np.ndarray
    resident: np.ndarray


class Copying(NamedTuple):
    """An expert that is being copied to its slot, between two events."""

    load: Load
    begun: cupy.cuda.Event
    done: cupy.cuda.Event


class ExpertStore:
    """The experts of one model; one thread owns it.

    layers     layers that have experts, in order
    residency  which experts are in slots, once `open` has been called
    """

    residency: Residency

    def __init__(self, budget: HotExperts, stream: Stream):
        self.budget, self.stream, self.copies = budget, stream, Stream()
        self.stacks: dict[int, list[Stack]] = {}
        self.layers: list[int] = []
        self.is_open = False
        self.copying: list[Copying] = []
        self.logged: deque[Logged] = deque()
        self.logs: weakref.WeakSet[Any] = weakref.WeakSet()  # step functions that write a log
        self.waits: deque[tuple[int, cupy.cuda.Event, cupy.cuda.Event]] = deque()

    # -- loading -------------------------------------------------------------------------------------------------------

    def hold(self, weight: Weight) -> Weight:
        """Move a stack that has just been loaded to the host: first a layer's gates and ups, then its downs."""
        assert weight.layer is not None
        if self.is_open:
            raise BimetalError("spark holds the experts of one model, and a second one has experts as well")
        stack = to_host(weight, self.stream)
        self.stacks.setdefault(weight.layer, []).append(stack)
        return stack.weight

    def open(self) -> None:
        """Allocate the slots, after all experts are loaded, and copy the first experts there. Raises BimetalError."""
        if self.is_open:
            return
        if not self.stacks:
            raise BimetalError("the model has no experts, so spark has no effect; leave it out")
        self.layers = sorted(self.stacks)
        self.experts = self.stacks[self.layers[0]][0].weight.segments[0].experts
        count = 0 if self.budget.profile is None else len(self.budget.profile.counts)
        sizes = [self._slot_bytes(layer) for layer in range(max(count, self.layers[-1] + 1))]
        cupy.get_default_memory_pool().free_all_blocks()  # memory of moved stacks
        self.staging = Staging(self.stacks, self.stream, self.copies)
        check_hot(self.budget.nbytes, HotSizes(self.experts, tuple(sizes), self.staging.nbytes))
        slots = self.budget.nbytes - self.staging.nbytes
        self.residency = Residency(self.experts, sizes, self.budget.used, slots, self.budget.profile)
        slots_of = self.residency.slots
        self.memory = {size: Memory(size * slots_of[size]) for size in sorted(set(sizes)) if size}
        self.tables = Tables(self.stream)
        self.row_ids = self.budget.used + 1  # most ids per row: a shared expert's number is the last
        self.ids_per_row = np.full(
            len(self.layers), self.budget.used
        )  # ids that a row of a layer logs in steps of few rows
        self.prompt_ids_per_row = np.zeros_like(
            self.ids_per_row
        )  # in a step of a prompt; 0: it ran the layer for few rows alone
        most = len(self.layers) * MAX_DECODE_ROWS * self.row_ids
        self.log = Memory(4 * most)
        self.pinned = itertools.cycle([HostMemory(4 * most, "a log") for _ in range(LOGS)])
        self.prompt: HostMemory | None = None
        self.prompt_ids: np.ndarray | None = None  # ids by layer, of a prefill step that is being launched
        self.resident = np.zeros((len(self.layers), self.experts), bool)
        self.uses, self.misses = (np.zeros(self.resident.shape, t) for t in (np.int64, np.float32))
        self.turn = 0
        self.is_open = True
        self._start(self.residency.preload())
        self.copies.synchronize()
        self._land()

    def _slot_bytes(self, layer: int) -> int:
        return sum(stack.slot_bytes for stack in self.stacks.get(layer, ()))

    # -- what ops ask during a step ------------------------------------------------------------------------------------

    def log_of(self, layer: int, T: int, ids_per_row: int) -> int:
        """Return the address to which a step of T rows writes the ids of a layer: (T, ids_per_row) int32."""
        i, self.writes_log = self.layers.index(layer), True
        self.ids_per_row[i] = ids_per_row
        return self.log.address + 4 * i * T * self.row_ids

    @contextmanager
    def staged(self, weight: Weight) -> Iterator[Weight]:
        """Provide the stack for a product of prefill launched within; afterwards the next layer's stack is copied."""
        assert weight.layer is not None
        layer, which = weight.layer, GATE_UP if weight is self.stacks[weight.layer][GATE_UP].weight else DOWN
        for part in (GATE_UP, DOWN)[which:]:
            if self.staging.held[part] != layer:
                self._bring(layer, part)
        before, after = (cupy.cuda.Event() for _ in range(2))
        self.stream.record(before)
        staged = self.staging.use(layer, which)
        self.stream.record(after)
        self.waits.append((layer, before, after))
        yield staged
        self.staging.release(which)
        following = next((other for other in self.layers if other > layer), None)
        if following is not None:
            self._bring(following, which)

    def _bring(self, layer: int, place: int) -> None:
        slots = self.residency.tables[layer]
        size = self._slot_bytes(layer)
        places = np.uint64(self.memory[size].address) + slots.clip(0).astype(np.uint64) * np.uint64(size)
        copied = self.staging.begin(layer, place, np.where(slots >= 0, places, np.uint64(0)))
        self.residency.counters.bytes_read += copied

    def log_prompt(self, layer: int, ids: int, T: int, ids_per_row: int) -> None:
        """Copy a layer's ids (T, ids_per_row) int32 of a prefill step to the host, in the order of the stream."""
        nbytes, L, i = 4 * T * ids_per_row, len(self.layers), self.layers.index(layer)
        if self.prompt is None or self.prompt.nbytes < nbytes * L:
            self._count_all()
            self.prompt = HostMemory(nbytes * L, "a log")
        runtime, at = cupy.cuda.runtime, self.prompt.address + nbytes * i
        runtime.memcpyAsync(at, ids, nbytes, runtime.memcpyDeviceToHost, self.stream.ptr)
        self.prompt_ids_per_row[i] = ids_per_row
        self.prompt_ids = self.prompt.numbers()[: L * T * ids_per_row].reshape(L, -1)

    # -- between steps -------------------------------------------------------------------------------------------------

    def step(self, fn: Any, rows: int, T: int, run: Callable[[], R]) -> R:
        """Call `run`, which launches a step of `rows` real rows, padded to T; returns the result of `run`."""
        if not self.is_open:
            return run()
        if T > MAX_DECODE_ROWS:
            self._count_all()  # the log of the preceding prefill step is in the same memory
        self._advance()
        self.writes_log, self.prompt_ids = False, None
        self.prompt_ids_per_row[:] = 0
        self.staging.held = [None, None]  # the tables have changed since a step that failed
        out = run()
        if self.writes_log:
            self.logs.add(fn)
        if self.prompt_ids is not None or (T <= MAX_DECODE_ROWS and fn in self.logs):
            self.residency.next_step(rows)
            ids, done = self._ids(T), cupy.cuda.Event(disable_timing=True)
            self.stream.record(done)
            taken = self.ids_per_row if self.prompt_ids is None else self.prompt_ids_per_row
            self.logged.append(Logged(done, ids, rows, taken.copy(), self.resident.copy()))
        return out

    def _count_all(self) -> None:
        """Count the logs of all steps so far."""
        while self.logged:
            self.logged[0].done.synchronize()
            self._count(self.logged.popleft())

    def _ids(self, T: int) -> np.ndarray:
        """Return the memory for the ids of the step that has just been launched."""
        if self.prompt_ids is not None:
            return self.prompt_ids
        if len(self.logged) == LOGS:
            self.logged[0].done.synchronize()
            self._count(self.logged.popleft())
        memory, count, runtime = next(self.pinned), len(self.layers) * T * self.row_ids, cupy.cuda.runtime
        kind = runtime.memcpyDeviceToHost
        runtime.memcpyAsync(memory.address, self.log.address, 4 * count, kind, self.stream.ptr)
        return memory.numbers()[:count].reshape(len(self.layers), -1)

    def _advance(self) -> None:
        """Count the logs of steps, write tables of completed copies, and begin others."""
        while self.logged and self.logged[0].done.done:
            self._count(self.logged.popleft())
        while self.waits and self.waits[0][2].done:
            layer, before, after = self.waits.popleft()
            self.residency.counters.waits[layer] += cupy.cuda.get_elapsed_time(before, after) / 1e3
        self._land()
        self._start(self._chosen())

    def _count(self, step: Logged) -> None:
        L, E, counters = len(self.layers), self.experts, self.residency.counters
        at = np.arange(step.rows)[:, None] * step.ids_per_row[:, None, None] + np.arange(self.budget.used)
        ids = np.take_along_axis(step.ids, at.reshape(L, -1), 1)
        flat = ids.clip(0, E - 1) + E * np.arange(L)[:, None]
        uses = np.bincount(flat.ravel(), minlength=L * E).reshape(L, E) * (step.ids_per_row > 0)[:, None]
        missed = (uses > 0) & ~step.resident
        counters.hits += int(np.count_nonzero(uses) - np.count_nonzero(missed))
        counters.misses += int(np.count_nonzero(missed))
        if step.rows <= MAX_DECODE_ROWS:  # a prefill step counts its copies itself
            sizes = [self._slot_bytes(layer) for layer in self.layers]
            counters.bytes_read += int(np.count_nonzero(missed, axis=1) @ np.array(sizes, np.int64))
            self.misses *= FADE
            self.misses += missed
        self.residency.counts[self.layers] += uses
        self.uses += uses

    def _chosen(self) -> list[Load]:
        """Choose the experts to copy now, from the layers of this step."""
        loads: list[Load] = []
        for i in range(self.turn % TURNS, len(self.layers), TURNS):
            layer = self.layers[i]
            self.residency.touch(layer, np.flatnonzero(self.uses[i]).tolist())
            self.uses[i] = 0
            missed = np.flatnonzero(self.misses[i] >= MISSES)
            room = COPIES - len(self.copying) - len(loads)
            if missed.size and room > 0:
                best = missed[np.argsort(-self.misses[i, missed], kind="stable")][:room]
                loads += self.residency.prefetch(layer, best.tolist())
                self.misses[i, best] = 0
        self.turn += 1
        return loads

    def _start(self, loads: Sequence[Load]) -> None:
        """Start copies to slots; they wait until no step reads the experts that were in these slots."""
        if not loads:
            return
        left = [load.replaces for load in loads if load.replaces is not None]
        entries = []
        for layer, expert in left:
            self.resident[self.layers.index(layer), expert] = False
            entries += [self._entry(s, expert, host) for s, host, _ in self._parts(layer, expert)]
        self.tables.write(entries)
        free = cupy.cuda.Event(disable_timing=True)
        self.stream.record(free)
        self.copies.wait(free)
        for n, load in enumerate(loads):
            begun, done = (cupy.cuda.Event() for _ in range(2))
            self.copies.record(begun)
            try:
                for s, host, slot in self._parts(load.key.layer, load.key.expert, load.slot):
                    copy(slot, host, s.expert_bytes, self.copies)
            except BimetalError as error:
                for other in loads[n:]:
                    self.residency.abandon(other)
                raise BimetalError(f"expert {load.key.expert} of layer {load.key.layer}: {error}") from None
            self.copies.record(done)
            self.copying.append(Copying(load, begun, done))

    def _land(self) -> None:
        """Write the table entries of experts whose copies have completed since the last call."""
        landed = list(itertools.takewhile(lambda copying: copying.done.done, self.copying))
        self.copying = self.copying[len(landed) :]
        entries = []
        for load, begun, done in landed:
            (layer, expert), counters = load.key, self.residency.counters
            self.residency.finish(load)
            counters.bytes_read += self._slot_bytes(layer)
            counters.reads.append(cupy.cuda.get_elapsed_time(begun, done) / 1e3)
            self.resident[self.layers.index(layer), expert] = True
            entries += [self._entry(s, expert, slot) for s, _, slot in self._parts(layer, expert, load.slot)]
        self.tables.write(entries)

    def _parts(self, layer: int, expert: int, slot: int = 0) -> Iterator[tuple[Any, int, int]]:
        size = self._slot_bytes(layer)
        return parts_of_expert(self.stacks[layer], expert, self.memory[size].address + slot * size)

    def _entry(self, segment: Any, expert: int, address: int) -> tuple[int, int]:
        return segment.places.address + 8 * expert, address

    def stats(self, earlier: ExpertStats | None = None) -> ExpertStats:
        """Return the counters of experts, or their growth since `earlier`."""
        self._count_all()
        return self.residency.counters.stats(earlier)

    def link_rate(self) -> float:
        """Measure the bytes per second of the link to the host: the limit of copies, and of experts that are missed."""
        return HostMemory(LINK_BYTES, "a measurement").rate(self.copies)

    # -- between requests ----------------------------------------------------------------------------------------------

    def begin_request(self) -> ExpertStats:
        """Give slots to the experts that requests have used most, and return the counters so far."""
        stats = self.stats()
        if not self.copying:
            self._start(self.residency.swap(self.residency.counts, SWAPS, SWAP_GAIN))
        return stats

    def close(self) -> None:
        """Wait for all copies."""
        self._count_all()
        self.copies.synchronize()
