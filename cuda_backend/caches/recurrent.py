"""Recurrent states of sequences: convolution tails and delta matrices of all layers, and rows yet to be applied.

States come in pairs: a step reads one, applies the path of the last commit to it, and writes the result to the other
one, so that it can run twice. `commit` only notes the path and swaps the two.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from common.errors import BimetalError
from common.step import MAX_DECODE_ROWS, Parts, Shape, Step
from common.storage import ConvSpec, DeltaSpec
from cuda_backend.caches.planes import copy, zeros
from cuda_backend.caches.window import NOT_IN_PART
from cuda_backend.launch import Stream
from cuda_backend.layout import padded
from cuda_backend.memory import Memory, copy_in, free_and_total
from cuda_backend.runs import Run, RunInputs, Runs

NO_RUN = Run(0, 0, 0)  # the run of no step


@dataclass(frozen=True)
class Conv:
    """One layer's two tails, float32 (n, C), `flip` elements apart, and rows (stores, MAX_DECODE_ROWS, C).

    rows  address at which store 0 begins
    """

    tail: int
    flip: int
    rows: int
    spec: ConvSpec
    store: "Recurrent"

    @staticmethod
    def size(spec: ConvSpec) -> int:
        """Count the elements of one layer's state."""
        return -(-(spec.taps - 1) * spec.channels // 64) * 64

    @staticmethod
    def row_parts(spec: ConvSpec) -> tuple[int, ...]:
        """Count the elements that one row of a step stores: the convolution's input."""
        return (spec.channels,)

    @staticmethod
    def copied_bytes(spec: ConvSpec, capacity: int) -> int:
        return 0


@dataclass(frozen=True)
class Delta:
    """One layer's two states, float32 matrices (Hv, Dv, Dk), `flip` elements apart.

    keys, changes, factors  of rows, (stores, MAX_DECODE_ROWS, ...) each: address at which store 0 begins
    """

    matrix: int
    flip: int
    keys: int
    changes: int
    factors: int
    spec: DeltaSpec
    store: "Recurrent"

    @staticmethod
    def size(spec: DeltaSpec) -> int:
        if spec.key_dim > 256 or spec.key_dim % 4 or spec.value_dim % 4:
            raise BimetalError(
                f"Gated DeltaNet keys are {spec.key_dim} and values {spec.value_dim} wide; "
                "the CUDA kernels take multiples of 4, keys up to 256"
            )
        return -(-spec.heads * padded(spec.key_dim) * spec.value_dim // 64) * 64

    @staticmethod
    def row_parts(spec: DeltaSpec) -> tuple[int, ...]:
        """Count the elements that one row of a step stores: the rule's key, change and factor."""
        return spec.key_heads * padded(spec.key_dim), spec.heads * spec.value_dim, spec.heads

    @staticmethod
    def copied_bytes(spec: DeltaSpec, capacity: int) -> int:
        return spec.matrix_bytes


Kinds = Sequence[tuple[Any, Any]]  # for each layer, Conv or Delta, and its spec


@dataclass
class Pair:
    """The two recurrent states of one sequence.

    current     number of the state of all committed rows except those of `path`
    path        committed rows that are still to be applied
    path_store  the store that holds the rows of `path`
    step        rows that may be committed next
    step_store  the store that holds the rows of `step`
    next        number of the state to which the last step applied `path`
    is_whole    whether `step` is committed whole or not at all: no store has its rows, which `next` has applied
    empty       whether nothing was committed: the current state is zeros
    """

    current: int = 0
    path: Sequence[int] = ()
    path_store: int = 0
    step: Run | None = None
    step_store: int = 0
    next: int = 0
    is_whole: bool = False
    empty: bool = True


class Recurrent:
    """Recurrent states of all layers.

    kinds   class and spec of each layer
    memory  per slot two states of all layers, a pair
    rows    stored rows of a step, in one of two stores that all slots share: the next step fills the other one. If
            steps of several micro-batches alternate, each micro-batch has two stores of its own, s and 1 - s
    newest  the store that the last step filled
    """

    appends = False

    def __init__(
        self,
        kinds: Kinds,
        slots: int,
        apply_paths: Callable[["Recurrent", Sequence[int]], None],
        stream: Stream,
        batches: int = 1,
    ):
        self.kinds, self.apply_paths, self.stream = kinds, apply_paths, stream
        self.pairs, self.newest = [Pair() for _ in range(slots)], 1
        self.batches = batches
        self._stores = list(range(1 - batches, batches + 1))  # the latest filled one is last
        self.flip = sum(layer.size(spec) for layer, spec in kinds)  # elements of one of two
        self.memory = zeros(2 * slots * self.flip * 4, stream)
        self.rows = zeros(rows_bytes(kinds, batches), stream)

    def layers(self) -> list[Conv | Delta]:
        """Return the states of each layer; they hold this object, which does not hold them, so that memory is freed."""
        layers: list[Conv | Delta] = []
        at, row_at, batches = self.memory.address, self.rows.address, self.batches
        for layer, spec in self.kinds:
            parts = []  # address of store 0 for each part, after the stores with negative numbers
            for n in layer.row_parts(spec):
                parts.append(row_at + (batches - 1) * 4 * MAX_DECODE_ROWS * n)
                row_at += batches * 8 * MAX_DECODE_ROWS * n
            layers.append(layer(at, self.flip, *parts, spec, self))
            at += 4 * layer.size(spec)
        return layers

    def note_step(self, step: Step, runs: Sequence[Run]) -> None:
        """Note a step before its launch; a step of more than MAX_DECODE_ROWS rows is committed whole or not at all.

        First the paths are applied whose rows the step overwrites (of sequences without a row in the last step), and
        paths of its own sequences in the stores of another micro-batch.
        """
        step.order()
        whole = len(step) > MAX_DECODE_ROWS
        if whole:  # it may run in parts, and steps of others between them overwrite rows
            self.apply([run.slot for run in runs if len(self.pairs[run.slot].path)])
        else:
            if self.batches > 1:
                self._choose_store(runs)
            elif any([pair.path and pair.path_store == self.newest for pair in self.pairs]):
                self.newest = 1 - self.newest
            newest = self.newest
            self.apply([i for i, pair in enumerate(self.pairs) if pair.path and pair.path_store == newest])
            for pair in self.pairs:
                if pair.step_store == newest and not pair.is_whole:
                    pair.step = None
        for run in runs:
            pair = self.pairs[run.slot]
            pair.step, pair.step_store, pair.next, pair.is_whole = run, self.newest, 1 - pair.current, whole

    def _choose_store(self, runs: Sequence[Run]) -> None:
        """Choose the store that a step fills so that few paths, of any sequence, must be applied before.

        Paths of the step's own sequences may lie in the other store, which the step reads; others are applied here.
        Rows of other micro-batches' last steps, of which a path may be committed later, are kept.
        """
        mine, last = {run.slot for run in runs}, self._stores[-(self.batches - 1) :]
        open_steps = {
            pair.step_store
            for slot, pair in enumerate(self.pairs)
            if slot not in mine and pair.step is not None and not pair.is_whole and pair.step_store in last
        }
        own = [self.pairs[run.slot].path_store for run in runs if len(self.pairs[run.slot].path)]
        held = [pair.path_store for pair in self.pairs if len(pair.path)]

        def applied(store: int) -> tuple[bool, int, int]:
            moved = len(own) - own.count(store) - own.count(1 - store)
            return store in open_steps, held.count(store) + moved, held.count(1 - store) - own.count(1 - store)

        self.newest = min(self._stores, key=applied)
        self._stores.remove(self.newest)
        self._stores.append(self.newest)
        moved: dict[int, list[int]] = {}
        for slot in sorted(mine):
            pair = self.pairs[slot]
            if len(pair.path) and pair.path_store not in (self.newest, 1 - self.newest):
                moved.setdefault(pair.path_store, []).append(slot)
        for slots in moved.values():
            self.apply(slots)

    @property
    def store_of_paths(self) -> int:
        """Return the store with the rows of the paths that a noted step applies; a long step applies none."""
        return 1 - self.newest

    def inputs(self, runs: Runs, pasts: Sequence[int]) -> RunInputs:
        """Return what kernels read of a noted step's runs: also the states, and the paths that the step applies."""
        pairs = [self.pairs[slot] for slot in runs.slots]
        sources = [2 * slot + pair.current for slot, pair in zip(runs.slots, pairs, strict=True)]
        targets = [2 * slot + 1 - pair.current for slot, pair in zip(runs.slots, pairs, strict=True)]
        return RunInputs(runs, pasts, sources, targets, [pair.path for pair in pairs], self.store_of_paths)

    def commit(self, slot: int, path: list[int]) -> None:
        if not path:
            return
        pair = self.pairs[slot]
        _, first, rows = pair.step or NO_RUN
        if min(path) < 0 or max(path) >= rows:
            raise ValueError(f"commit of rows {path} of a step of {rows}")
        if pair.is_whole and path != list(range(rows)):
            raise ValueError(NOT_IN_PART.format(rows))
        pair.path = () if pair.is_whole else [first + row for row in path]
        pair.current, pair.path_store, pair.step, pair.empty = pair.next, pair.step_store, None, False

    def apply(self, slots: Sequence[int]) -> None:
        """Apply the paths of `slots`, whose rows lie in one store, as the next step would."""
        if not slots:
            return
        self.apply_paths(self, slots)
        for pair in (self.pairs[slot] for slot in slots):
            pair.current, pair.path = 1 - pair.current, ()
            if pair.is_whole:
                pair.step = None  # the state of this step has been overwritten

    def snapshot(self, slot: int) -> Any:
        """Copy the states with the path applied; None, without memory, for an empty state."""
        if self.pairs[slot].empty:
            return None
        return self._copy(slot)

    def _copy(self, slot: int) -> Memory:
        if len(self.pairs[slot].path):
            self.apply([slot])
        held = Memory(self.flip * 4, self.stream)
        copy(held.address, self._state(slot), held.nbytes, self.stream)
        return held

    def restore(self, slot: int, snapshot: Any) -> None:
        if snapshot is None:
            self.clear(slot)
            return
        copy(self._state(slot), snapshot.address, snapshot.nbytes, self.stream)
        self._replaced(slot)

    def _replaced(self, slot: int) -> None:
        """Note that the whole current state has been written."""
        pair = self.pairs[slot]
        pair.path, pair.step, pair.empty = (), None, False

    def row_shapes(self, tokens: int) -> list[Shape]:
        return []

    def point_shapes(self, length: int) -> list[Shape]:
        return [((self.flip,), np.dtype(np.float32))]

    def save_rows(self, slot: int, first: int, last: int) -> list[np.ndarray]:
        return []

    def save_point(self, slot: int) -> list[np.ndarray]:
        """Copy the states of all layers as stored on the device, with the path applied."""
        self.stream.copies.make_room(4 * self.flip, free_and_total()[0])
        return [self.stream.copies.copy(self._copy(slot)).view(np.float32)]

    def load(self, slot: int, length: int, rows: list[Parts], point: list[np.ndarray]) -> None:
        copy_in(self._state(slot), np.ascontiguousarray(point[0]), self.stream)
        self._replaced(slot)

    def clear(self, slot: int) -> None:
        """Reset the slot for a new sequence."""
        self.pairs[slot] = Pair()
        cupy.cuda.runtime.memsetAsync(self._state(slot), 0, self.flip * 4, self.stream.ptr)

    def _state(self, slot: int) -> int:
        return self.memory.address + (2 * slot + self.pairs[slot].current) * self.flip * 4

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes + self.rows.nbytes


def rows_bytes(kinds: Kinds, batches: int) -> int:
    """Count the device bytes of the rows of steps, for `batches` micro-batches whose steps alternate."""
    return 8 * batches * MAX_DECODE_ROWS * sum(sum(layer.row_parts(spec)) for layer, spec in kinds)


def recurrent_bytes(kinds: Kinds, slots: int, batches: int) -> int:
    """Count the device bytes of a Recurrent."""
    return 8 * slots * sum(layer.size(spec) for layer, spec in kinds) + rows_bytes(kinds, batches)
