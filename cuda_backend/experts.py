"""Hot experts in GPU memory, all experts in pinned host memory.

Kernels read an expert at the address in a table: in a slot of GPU memory, or in host memory over the link. Whether
experts are resident therefore changes neither the step's graph nor any bit of its result. Before the products of a
layer a kernel exchanges experts (hot_layers.py): each cold one that the rows chose takes the slot of a resident one
that was used less. The host only reads counts. A step of a prompt copies a layer's cold experts to a buffer instead.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import cupy
import numpy as np

from common.errors import BimetalError
from common.expert_stats import ExpertStats
from common.experts import Residency
from common.hot_experts import HotExperts, HotSizes, check_hot
from common.step import MAX_DECODE_ROWS
from cuda_backend.expert_stacks import DOWN, GATE_UP, Stack, Staging, copy, parts_of_expert, to_host, write_addresses
from cuda_backend.host_memory import HostMemory
from cuda_backend.hot_layers import HotLayers
from cuda_backend.launch import Stream
from cuda_backend.memory import Memory
from cuda_backend.weights import Weight

R = TypeVar("R")

LINK_BYTES = 1 << 28  # size of the copy that measures the link


class ExpertStore:
    """The experts of one model; one thread owns it.

    layers     layers that have experts, in order
    residency  which experts are in slots at the start, and the counters, once `open` has been called
    slots      by layer of `layers`, the slot of each expert, -1 of cold ones, when they were last read from the device
    """

    residency: Residency
    slots: np.ndarray

    def __init__(self, budget: HotExperts, stream: Stream):
        self.budget, self.stream, self.copies = budget, stream, Stream()
        self.stacks: dict[int, list[Stack]] = {}
        self.layers: list[int] = []
        self.is_open = False
        self.fetched: set[int] = set()  # layers of the step that is being launched or captured
        self.fetching: weakref.WeakSet[Any] = weakref.WeakSet()  # step functions whose graphs fetch experts
        self.has_changed = False  # whether a step may have exchanged experts since `slots` was read
        self.counts_step = False  # whether a layer of the step that is being launched has counted experts
        self.copied = 0  # bytes that the host has copied to the device
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
        self.slots = self._place()
        row_ids = self.budget.used + 1  # most ids per row: a shared expert's number is the last
        stacks, memory = [self.stacks[layer] for layer in self.layers], [self._memory(layer) for layer in self.layers]
        self.hot = HotLayers(stacks, self.slots, memory, self.budget.profile, self.layers, row_ids, self.stream)
        self.is_open = True

    def _place(self) -> np.ndarray:
        """Copy the first experts to their slots; return the slot of each expert, -1 of cold ones."""
        slots, entries = np.full((len(self.layers), self.experts), -1, np.int32), []
        for load in self.residency.preload():
            layer, expert = load.key
            address, size = self._memory(layer)
            for s, host, slot in parts_of_expert(self.stacks[layer], expert, address + load.slot * size):
                copy(slot, host, s.expert_bytes, self.stream)
                assert s.places
                entries.append((s.places.address + 8 * expert, slot))
            self.residency.finish(load)
            self.copied += size
            slots[self.layers.index(layer), expert] = load.slot
        write_addresses(entries, self.stream)
        return slots

    def _slot_bytes(self, layer: int) -> int:
        return sum(stack.slot_bytes for stack in self.stacks.get(layer, ()))

    def _memory(self, layer: int) -> tuple[int, int]:
        """Return the address of the slots that hold the layer's experts, and the bytes of one."""
        size = self._slot_bytes(layer)
        return self.memory[size].address, size

    # -- what ops ask during a step ------------------------------------------------------------------------------------

    def fetch(self, layer: int, choice: np.ndarray, ids: int, step: int, T: int, k: int) -> None:
        """Exchange experts before a step of T rows multiplies by them: `HotLayers.fetch`."""
        if layer in self.fetched:  # a second time in one step: the exchanges of the first must have been noted
            self._keep()
        self.fetched.add(layer)
        self.counts_step = True
        self.hot.fetch(self.layers.index(layer), choice, ids, step, T, k)

    def count_prompt(self, layer: int, ids: int, step: int, T: int, k: int) -> None:
        """Count the experts (T, k) int32 at `ids` that a prefill step chose."""
        self.counts_step = True
        self.hot.count(self.layers.index(layer), ids, step, T, k)

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
        slots = self.slots[self.layers.index(layer)]
        address, size = self._memory(layer)
        places = np.uint64(address) + slots.clip(0).astype(np.uint64) * np.uint64(size)
        copied = self.staging.begin(layer, place, np.where(slots >= 0, places, np.uint64(0)))
        self.copied += copied

    # -- between steps -------------------------------------------------------------------------------------------------

    def step(self, fn: Any, rows: int, T: int, run: Callable[[], R]) -> R:
        """Call `run`, which launches a step of `rows` real rows, padded to T; returns the result of `run`."""
        if not self.is_open:
            return run()
        while self.waits and self.waits[0][2].done:
            layer, before, after = self.waits.popleft()
            self.residency.counters.waits[layer] += cupy.cuda.get_elapsed_time(before, after) / 1e3
        if T > MAX_DECODE_ROWS and self.has_changed:
            self._read()  # prefill copies those experts that are not in slots
        self.staging.held = [None, None]  # experts have changed since a step that failed
        self.fetched.clear()
        self.counts_step = False
        try:
            return run()
        finally:
            if self.fetched:
                self.fetching.add(fn)
            if fn in self.fetching:
                self._keep()
            if self.counts_step or fn in self.fetching:
                self.residency.next_step(rows)

    def _keep(self) -> None:
        self.hot.keep()
        self.fetched.clear()
        self.has_changed = True

    def _read(self) -> None:
        """Wait for all steps, and read slots and counts from the device."""
        now, counters = self.hot.read(), self.residency.counters
        self.slots, self.has_changed = now.slots, False
        self.residency.counts[self.layers] = now.uses
        counters.misses = int(now.cold.sum() + now.in_prompts.sum())
        counters.hits = int(now.needed.sum()) - counters.misses
        counters.evictions = int(now.exchanges.sum())
        sizes = np.array([self._slot_bytes(layer) for layer in self.layers], np.int64)
        counters.bytes_read = self.copied + int(now.cold @ sizes)

    def stats(self, earlier: ExpertStats | None = None) -> ExpertStats:
        """Return the counters of experts, or their growth since `earlier`."""
        self._read()
        return self.residency.counters.stats(earlier)

    def link_rate(self) -> float:
        """Measure the bytes per second of the link to the host: the limit of copies, and of experts that are missed."""
        return HostMemory(LINK_BYTES, "a measurement").rate(self.copies)

    # -- between requests ----------------------------------------------------------------------------------------------

    def begin_request(self) -> ExpertStats:
        """Return the counters so far."""
        return self.stats()

    def close(self) -> None:
        """Wait for all copies, and read the counters."""
        if self.is_open:
            self._read()
        self.copies.synchronize()
