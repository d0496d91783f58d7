"""Masks of attention: the rows of a cache that each row of a step attends to."""

import numpy as np

from common.step import Step
from common.storage import Packing


def seen_rows(
    step: Step, committed: np.ndarray, window: int | None = None, sinks: int = 0, causal: bool = False
) -> np.ndarray:
    """Build the mask (T, n + T) bool: which rows each row attends to, of committed ones and then of the step's.

    committed  (n,) positions of the committed rows
    window     masks positions at or below a row's own minus `window`, except for the first `sinks`
    causal     masks later rows of the step
    """
    T = len(step)
    own = step.visible & np.tri(T, dtype=bool) if causal else step.visible
    seen = np.concatenate([np.ones((T, len(committed)), bool), own], axis=1)
    if window is not None:
        position = _positions(step, committed)
        seen &= (position > step.positions[:, None] - window) | (position < sinks)
    return seen


def exact_rows(step: Step, committed: np.ndarray, packing: Packing) -> np.ndarray:
    """Build the mask (T, n + T) bool of the rows that each row of the step reads exactly, and not from codes."""
    position = _positions(step, committed)
    return (position < packing.first) | (position > step.positions[:, None] - packing.recent)


def _positions(step: Step, committed: np.ndarray) -> np.ndarray:
    return np.concatenate([committed, step.positions])
