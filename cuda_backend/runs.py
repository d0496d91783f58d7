"""The runs of a step: the adjacent rows of each sequence, as in kernels/prelude.cuh Run.

This module needs neither CuPy nor a GPU.
"""

from array import array
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from common.errors import BimetalError
from common.step import MAX_DECODE_ROWS, PAST, Step

MAX_RUNS = 64  # most sequences of a step: kernels/prelude.cuh
NUMBERS = 12  # int32 of a Run there: slot, first, rows, past, from, to, path, path_length, kind, branches, 2 unused


class Run(NamedTuple):
    """Rows `first` to `first + rows - 1` of a step, which belong to the sequence in `slot`."""

    slot: int
    first: int
    rows: int


class Runs(tuple[Run, ...]):
    """The runs of a step, in order. What depends on them alone is found once, since replies keep their slots."""

    @cached_property
    def slots(self) -> list[int]:
        return [run.slot for run in self]

    @cached_property
    def chains(self) -> np.ndarray:
        """Return the parents of rows, (T,) int32, that follow one another in each run."""
        rows = [row for _, first, rows in self for row in (PAST, *range(first, first + rows - 1))[:rows]]
        return np.array(rows, np.int32)

    @cached_property
    def _numbers(self) -> "array[int]":
        """Return the numbers of the runs, of which only the first three of each are not 0."""
        return array("i", [n for run in self for n in (*run, *[0] * (NUMBERS - len(run)))])

    def numbers(self, inputs: "RunInputs", kind: int, branches: Sequence[int]) -> "array[int]":
        """Return the runs as kernels read them, NUMBERS int32 each.

        kind      0: rows that follow their parents, 1: rows of a long step, 2: blocks
        branches  whether the rows of each run are a tree that branches; empty: none are
        """
        out = self._numbers[:]
        out[3::NUMBERS] = array("i", inputs.pasts)
        if inputs.paths:
            lengths = [len(path) for path in inputs.paths]
            out[4::NUMBERS], out[5::NUMBERS] = array("i", inputs.sources), array("i", inputs.targets)
            out[6::NUMBERS], out[7::NUMBERS] = array("i", accumulate([0, *lengths[:-1]])), array("i", lengths)
        if kind:
            out[8::NUMBERS] = array("i", [kind] * len(self))
        if branches:
            out[9::NUMBERS] = array("i", branches)
        return out


class RunInputs(NamedTuple):
    """Numbers of each run of a step that kernels read beside its rows.

    pasts             committed positions
    sources, targets  recurrent states to read and to write, counted from slot 0's first; empty if there are none
    paths             rows of an earlier step that are still to be applied to the state; empty as well
    path_store        number of the store that holds the rows of the paths
    """

    runs: Runs
    pasts: Sequence[int]
    sources: Sequence[int] = ()
    targets: Sequence[int] = ()
    paths: Sequence[Sequence[int]] = ()
    path_store: int = 0


def runs_of(step: Step) -> Runs:
    """Return the runs; raises BimetalError if rows of a sequence are not adjacent, or a long step has several."""
    return _runs(step.slots.astype(np.int32, copy=False).tobytes())


@lru_cache(64)  # replies keep their slots from one step to the next
def _runs(of_rows: bytes) -> Runs:
    """Return the runs of rows; `of_rows` are the bytes of each row's slot, int32."""
    slots = np.frombuffer(of_rows, np.int32).tolist()
    T = len(slots)
    if slots and slots.count(slots[0]) == T:
        return run_of(slots[0], T)
    starts = [first for first in range(T) if not first or slots[first] != slots[first - 1]]
    runs = Runs(Run(slots[first], first, end - first) for first, end in pairwise([*starts, T]))
    sequences = len({slots[first] for first in starts})
    if sequences < len(runs) or len(runs) > MAX_RUNS:
        raise BimetalError(
            f"a step has {len(runs)} runs of rows of {sequences} sequences; "
            f"the CUDA kernels take one run of each, of at most {MAX_RUNS} sequences"
        )
    if len(runs) > 1 and T > MAX_DECODE_ROWS:
        raise BimetalError(f"{T} rows of {len(runs)} sequences; the CUDA kernels take at most {MAX_DECODE_ROWS}")
    return runs


@lru_cache(256)
def run_of(slot: int, rows: int) -> Runs:
    """Return the runs of a step of one sequence."""
    return Runs((Run(slot, 0, rows),))
