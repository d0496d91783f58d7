"""A mixture's experts in pinned host memory, and the tables of addresses through which kernels read them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import cupy
import numpy as np

from common.errors import BimetalError
from common.hot_experts import ALIGN
from cuda_backend.host_memory import HostMemory
from cuda_backend.launch import Stream, kernel
from cuda_backend.memory import Memory, copy_in, upload
from cuda_backend.weights import Segment, Weight

GATE_UP, DOWN = 0, 1  # the stacks of a layer, in the order in which they are loaded


@dataclass(frozen=True)
class Stack:
    """One of the two stacks of a layer's experts.

    weight   the stack, with `memory` on the host and the tables that decode steps read
    staged   the stack with the tables that prefill steps read
    offsets  byte offset of each segment's part of an expert in a slot; slot_bytes: bytes of all parts
    """

    weight: Weight
    staged: Weight
    offsets: tuple[int, ...]
    slot_bytes: int

    @property
    def nbytes(self) -> int:
        """Count the bytes of the whole stack."""
        return sum(s.memory.nbytes for s in self.weight.segments)


def to_host(weight: Weight, stream: Stream) -> Stack:
    """Move a stack that has just been loaded to the host; its device memory is freed with `weight`."""
    segments, offsets, end = [], [], 0
    for s in weight.segments:
        host = HostMemory(s.memory.nbytes, "experts")
        runtime = cupy.cuda.runtime
        runtime.memcpyAsync(host.address, s.memory.address, s.memory.nbytes, runtime.memcpyDeviceToHost, stream.ptr)
        moved = replace(s, memory=host, moved=True)
        assert s.places
        copy_in(s.places.address, in_host(moved), stream)
        segments.append(moved)
        offsets.append(end)
        end += -(-moved.expert_bytes // ALIGN) * ALIGN
    stream.synchronize()
    held = replace(weight, segments=tuple(segments))
    tables = tuple(replace(s, places=Memory(8 * s.experts)) for s in segments)
    return Stack(held, replace(held, segments=tables), tuple(offsets), end)


def in_host(s: Segment) -> np.ndarray:
    """Return the addresses of a segment's experts in host memory: (experts,) uint64."""
    return s.memory.address + np.arange(s.experts, dtype=np.uint64) * np.uint64(s.expert_bytes)


def parts_of_expert(stacks: Sequence[Stack], expert: int, slot: int) -> Iterator[tuple[Segment, int, int]]:
    """List the parts of an expert: segment, address in host memory, address in the slot at `slot`."""
    for stack in stacks:
        for s, offset in zip(stack.weight.segments, stack.offsets, strict=True):
            yield s, s.memory.address + expert * s.expert_bytes, slot + offset
        slot += stack.slot_bytes


def write_addresses(entries: Sequence[tuple[int, int]], stream: Stream) -> None:
    """Write (address of a table's entry, its value) pairs, in the order of `stream`."""
    if not entries:
        return
    memory = upload(np.array(entries, np.uint64), stream)
    kernel("moe", "place")((-(-len(entries) // 256),), (256,), (memory.address, len(entries)), stream=stream)
    stream.synchronize()  # before `memory` is given back


class Staging:
    """Device memory for one layer's two stacks during prefill, one place per stack.

    While the product of one stack runs, the next stack is copied to the other's place. Experts in slots are read there;
    the others are copied in runs of neighbours.
    """

    def __init__(self, stacks: Mapping[int, Sequence[Stack]], stream: Stream, copies: Stream):
        self.stacks, self.stream, self.copies = stacks, stream, copies
        self.memory = [Memory(max(pair[which].nbytes for pair in stacks.values())) for which in (GATE_UP, DOWN)]
        self.free = [cupy.cuda.Event(disable_timing=True) for _ in self.memory]
        self.ready = [cupy.cuda.Event(disable_timing=True) for _ in self.memory]
        self.held: list[int | None] = [None, None]  # layer of the stack that is in each place, or being copied there
        self.tables: list[list[np.ndarray]] = [[], []]
        for event in self.free:
            stream.record(event)

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self.memory)

    def begin(self, layer: int, place: int, slots: np.ndarray) -> int:
        """Copy the experts without a slot once the place is free; return the bytes copied.

        slots  address of each expert's slot, 0 for an expert without one: (experts,) uint64
        """
        self.copies.wait(self.free[place])
        at, copied, tables = self.memory[place].address, 0, []
        offset = sum(stack.slot_bytes for stack in self.stacks[layer][:place])
        stack = self.stacks[layer][place]
        for s, own in zip(stack.weight.segments, stack.offsets, strict=True):
            places = np.where(slots > 0, slots + np.uint64(offset + own), np.uint64(0))
            for first, end in _runs(slots == 0):
                nbytes = (end - first) * s.expert_bytes
                copy(at + first * s.expert_bytes, s.memory.address + first * s.expert_bytes, nbytes, self.copies)
                copied += nbytes
                places[first:end] = at + np.arange(first, end, dtype=np.uint64) * np.uint64(s.expert_bytes)
            tables.append(places)
            at += s.memory.nbytes
        self.copies.record(self.ready[place])
        self.held[place], self.tables[place] = layer, tables
        return copied

    def use(self, layer: int, place: int) -> Weight:
        """Return the stack whose copies have been started, for launches on the stream from now on."""
        self.stream.wait(self.ready[place])
        staged = self.stacks[layer][place].staged
        for s, places in zip(staged.segments, self.tables[place], strict=True):
            assert s.places
            copy_in(s.places.address, places, self.stream)
        return staged

    def release(self, place: int) -> None:
        """Allow the place to be overwritten after the work launched so far."""
        self.held[place] = None
        self.stream.record(self.free[place])


def _runs(chosen: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of each run of adjacent true elements."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], chosen, [False]))))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def copy(target: int, source: int, nbytes: int, stream: Stream) -> None:
    """Copy from the host to the device in the order of `stream`. Raises BimetalError."""
    runtime = cupy.cuda.runtime
    try:
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyHostToDevice, stream.ptr)
    except runtime.CUDARuntimeError as error:
        raise BimetalError(f"copying {nbytes} bytes of experts to the GPU failed: {error}") from None
