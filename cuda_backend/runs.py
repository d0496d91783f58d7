"""The runs of a step: the adjacent rows of each sequence, as in kernels/prelude.cuh Run.

This module needs neither CuPy nor a GPU.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from common.errors import BimetalError
from common.step import MAX_DECODE_ROWS, Step

MAX_RUNS = 64  # most sequences of a step: kernels/prelude.cuh


class Run(NamedTuple):
    """Rows `first` to `first + rows - 1` of a step, which belong to the sequence in `slot`."""

    slot: int
    first: int
    rows: int


def runs_of(step: Step) -> Sequence[Run]:
    """Return the runs; raises BimetalError if rows of a sequence are not adjacent, or a long step has several."""
    return _runs(step.slots.astype(np.int32, copy=False).tobytes())


@lru_cache(64)  # replies keep their slots from one step to the next
def _runs(of_rows: bytes) -> Sequence[Run]:
    """Return the runs of rows; `of_rows` are the bytes of each row's slot, int32."""
    slots = np.frombuffer(of_rows, np.int32).tolist()
    T = len(slots)
    if slots and slots.count(slots[0]) == T:
        return [Run(slots[0], 0, T)]
    starts = [first for first in range(T) if not first or slots[first] != slots[first - 1]]
    runs = [Run(slots[first], first, end - first) for first, end in pairwise([*starts, T])]
    sequences = len({slots[first] for first in starts})
    if sequences < len(runs) or len(runs) > MAX_RUNS:
        raise BimetalError(
            f"a step has {len(runs)} runs of rows of {sequences} sequences; "
            f"the CUDA kernels take one run of each, of at most {MAX_RUNS} sequences"
        )
    if len(runs) > 1 and T > MAX_DECODE_ROWS:
        raise BimetalError(f"{T} rows of {len(runs)} sequences; the CUDA kernels take at most {MAX_DECODE_ROWS}")
    return runs
