"""Drafts of several sequences of a pool against those of each alone."""

from typing import Any

import numpy as np

from common.decode.requests import Draft
from common.row_runner import RowRunner
from common.step import State, Step

Asked = tuple[State, Draft]


def assert_alike(pair: Any, text: np.ndarray) -> None:
    """Assert that each sequence drafts what it drafts alone, to the bit, also as captured, and deeper than a block."""
    pool, asked, alone = pair.new_pool(3, 64), list[Asked](), list[Asked]()
    for n, length in enumerate((3, 9, 20)):
        for state in (pool.new_state(), pair.new_state(64)):
            for token in text[:length]:
                pair.forward(state, Step.chain(np.array([token], np.int32), state.length))
                state.commit([0])
            (asked if state.pool is pool else alone).append((state, Draft(int(text[length]), 1 + n, 2 + 3 * n)))
    expected = [pair.drafted(state, *draft) for state, draft in alone]
    runner = RowRunner(pair)
    for some in (slice(3), slice(3), slice(3), slice(1, 3)):
        for answer, want in zip(runner.drafted(asked[some]), expected[some], strict=True):
            assert isinstance(answer, tuple)
            assert all(np.array_equal(a, b) for a, b in zip(answer, want, strict=True))
