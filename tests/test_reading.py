"""How prompts are divided into steps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.reading import GRID_POINTS, Reading, replies_in
from common.step import MAX_DECODE_ROWS

quick = settings(max_examples=100, derandomize=True)
marks = st.dictionaries(st.integers(0, 2000), st.just("turn"), max_size=5)
short = st.sampled_from([16, MAX_DECODE_ROWS])
spans = st.lists(st.integers(0, 2000), max_size=6, unique=True).map(
    lambda ends: [(a, b) for a, b in zip(sorted(ends)[::2], sorted(ends)[1::2], strict=False)]
)


def steps_of(reading, start=0):
    """The steps from token `start` on."""
    steps, at = [], start
    while at < reading.end:
        cut = reading.next_cut(at)
        steps.append((at, cut))
        at = cut
    return steps


def is_long(step, short=MAX_DECODE_ROWS):
    return step[1] - step[0] > short


@quick
@given(end=st.integers(1, 2500), marks=marks, replies=spans, short=short)
def test_steps(end, marks, replies, short):
    reading = Reading(end, 512, marks, replies, short=short)
    steps = steps_of(reading)
    assert [a for a, _ in steps[1:]] == [b for _, b in steps[:-1]]
    assert steps[-1][1] == end
    assert all(b - a <= 512 for a, b in steps)
    in_replies = [any(first <= at < last for first, last in replies) for at, _ in steps]
    long_steps = [step for step, inside in zip(steps, in_replies, strict=True) if is_long(step, short) and not inside]
    assert reading.long_steps == long_steps == [(at, cut) for at, cut in steps if cut - at > reading.short_rows(at)]
    ends = {b for _, b in steps}
    assert {at for at in (*marks, *range(512, end, 512)) if 0 < at < end} <= ends
    for first, last in replies:
        assert not any(is_long(step) for step in steps if first <= step[0] < last)


@quick
@given(end=st.integers(1, 2500), marks=marks, replies=spans)
def test_long_steps_have_a_multiple_of_rows(end, marks, replies):
    """A short step reads the rest, and no step crosses a point of the steps without a multiple."""
    reading, plain = Reading(end, 512, marks, replies, 32), Reading(end, 512, marks, replies)
    steps = steps_of(reading)
    assert all((b - a) % 32 == 0 for a, b in steps if is_long((a, b)))
    assert {b for _, b in steps_of(plain)} <= {b for _, b in steps} | {
        at for first, last in replies for at in range(first, last)
    }
    assert np.array_equal(reading.points, plain.cuts)
    assert len(steps) <= 2 * len(steps_of(plain))
    assert reading.long_steps == [step for step in steps if is_long(step)]


@quick
@given(end=st.integers(1, 2500), marks=marks, replies=spans, at=st.integers(0, 2500), short=short)
def test_where_a_prompt_can_go_on(end, marks, replies, at, short):
    """From any token between long steps, and from there on the steps are as long as they would have been."""
    reading = Reading(end, 512, marks, replies, short=short)
    at = at % end
    before = [step for step in reading.long_steps if step[1] <= at]
    crossed = any(a < at < b for a, b in reading.long_steps)
    assert reading.continues_from(at, before) == (not crossed)
    if not crossed:
        found = [(first, cut) for first, cut in steps_of(reading, at) if cut - first > reading.short_rows(first)]
        assert found == [s for s in reading.long_steps if s[0] >= at]
    assert not reading.continues_from(at, [*before, (0, 137)])


@quick
@given(
    end=st.integers(1, 2500),
    other=st.integers(1, 2500),
    marks=marks,
    replies=spans,
    same=st.integers(0, 2500),
    short=short,
)
def test_how_much_of_a_longer_state_serves(end, other, marks, replies, same, short):
    """No more tokens than two texts share, after which one is read on, and as many as possible."""
    reading = Reading(end, 512, marks, short=short)
    long_steps = Reading(other, 512, {}, replies, short=short).long_steps
    same = min(same, end, other)
    n = reading.usable(same, long_steps)

    def serves(at):
        return reading.continues_from(at, [step for step in long_steps if step[0] < at])

    assert serves(n)
    assert not any(map(serves, range(n + 1, same + 1)))


def test_where_states_are_kept():
    reading = Reading(3 * GRID_POINTS + 7, 512, {40: "system", 3 * GRID_POINTS: "turn", 0: "turn"})
    kept = {40: "system", GRID_POINTS: "grid", 2 * GRID_POINTS: "grid", 3 * GRID_POINTS: "turn"}
    assert reading.kept_cuts() == kept


@pytest.mark.parametrize(
    ("tokens", "spans"),
    [
        ([7, 8, 1, 2, 9, 7, 8, 3, 9, 5], [(2, 5), (7, 9)]),
        ([7, 8, 1, 7, 8, 9, 4], [(2, 6)]),  # a header inside a reply
        ([7, 8, 1, 2], [(2, 2)]),  # a reply without an end
        ([7, 8, 1, 9, 7, 8, 1, 2], [(2, 4), (6, 6)]),
        ([1, 2, 7, 8], [(4, 4)]),  # one that begins
        ([7], []),
    ],
)
def test_replies_of_a_prompt(tokens, spans):
    assert replies_in(tokens, [7, 8], frozenset({9})) == spans
    assert replies_in(np.array(tokens), [], frozenset({9})) == []
