"""Drafts of several sequences of a pool against those of each alone."""

from typing import Any

import numpy as np

from common.decode.requests import Draft
from common.row_runner import Choice, RowRunner
from common.sampling import GREEDY
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
    for count in (1, pair.block_tokens) if pair.block_tokens else ():
        for _ in range(3):  # as it comes, captured, replayed
            assert_chains_alike(pair, runner, asked, alone, count)


def assert_chains_alike(pair: Any, runner: RowRunner, asked: list[Asked], alone: list[Asked], count: int) -> None:
    """Assert that chains verified before the host reads them have the tokens and logits of each alone, to the bit."""
    states, newest = [state for state, _ in asked], [draft.token for _, draft in asked]
    tokens, after, logits = runner.chains(states, count, Choice(GREEDY, with_logits=True))(newest)
    (read,), found = pair.ops.read_all(tokens), pair.ops.read(logits)
    assert pair.ops.read(after).tolist() == found.argmax(-1).tolist()
    tokens, after, left = runner.chains(states, count, Choice(GREEDY, with_logits=False))(newest)
    assert left is None
    assert pair.ops.read(tokens).tolist() == read.tolist()
    assert pair.ops.read(after).tolist() == found.argmax(-1).tolist()
    for number, (state, draft) in enumerate(alone):
        own = slice(number * (1 + count), (number + 1) * (1 + count))
        drafted = pair.drafted(state, draft.token, 1, count)[0][:count, 0]
        assert read[own].tolist() == [draft.token, *drafted.tolist()]
        verified = pair.forward(state, Step.chain(read[own], state.length))
        assert np.array_equal(found[own], pair.ops.read(verified))
