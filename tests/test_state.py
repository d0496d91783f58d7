"""The state contract, for keys and values, windows, latent rows, convolutions and recurrent matrices, on every backend.

A row of a tree gives the logits of its path read alone; committing a path equals reading it alone; a step without a
commit changes nothing; a snapshot can be restored. Every comparison is with a fresh state that read the tokens as one
plain chain.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import BimetalError
from common.reference import NumpyOps
from common.step import PAST, Step

# between two float32 ways to the same numbers; NumPy computes few rows each by itself
LOGIT = {"numpy": 0, "mlx": 5e-4}  # tests/models/test_golden.py
STATE = {"numpy": 0, "mlx": 1e-4}  # of the largest element
TEXT = tiny.golden("qwen35")["ids"].astype(np.int32)
MORE = TEXT[100:110]

# trunk of depth 0, 3 and 4, then two branches whose rows alternate; a convolution window is 4 rows
FORKS = {
    0: [PAST, PAST, 0, 1, 2, 3, 4, 5],
    3: [PAST, 0, 1, 2, 2, 3, 4, 5, 6, 7, 8],
    4: [PAST, 0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 9],
}

quick = settings(max_examples=12, derandomize=True)
parent_lists = st.integers(1, 9).flatmap(lambda n: st.tuples(*(st.integers(PAST, t - 1) for t in range(n))))
pasts = st.sampled_from([0, 1, 2, 3, 4, 9])  # around the 3 rows that a convolution keeps


@pytest.fixture(scope="module", params=["qwen3", "qwen35", "laguna", "mistral", "glm"])
def model(ops, request):
    model = tiny.load(request.param, ops)
    c = model.config
    if request.param == "qwen3":
        return model
    if request.param == "mistral":  # every layer has a window
        return replace(model, config=replace(c, window=5))
    if request.param == "qwen35":  # one round of layers has every kind of state
        c = replace(c, is_attention=c.is_attention[:4])
    elif request.param == "laguna":  # a full layer, and one whose window the rows of these tests leave
        c = replace(c, heads=c.heads[:2], is_sliding=c.is_sliding[:2], is_sparse=c.is_sparse[:2], window=5)
    else:
        c = replace(c, layers=2)
    layers = model.weights.layers[: len(model.definition.state_spec(c))]
    return replace(model, config=c, weights=SimpleNamespace(**vars(model.weights) | {"layers": layers}))


def started(model, past, capacity=tiny.CAPACITY):
    """A state that holds the first `past` tokens of the text."""
    state = model.new_state(capacity)
    if past:
        tiny.run(model, state, TEXT[:past])
    return state


def tree_of(parents, past):
    tokens = TEXT[40 : 40 + len(parents)]
    return Step.tree(tokens, parents, past)


def path_to(row, parents):
    return [] if row == PAST else [*path_to(parents[row], parents), row]


def forward(model, state, step):
    return np.array(model.ops.read(model.forward(state, step)))


def continued(model, state):
    """Logits of a few more tokens, two of them read one by one."""
    return tiny.run(model, state, MORE, [1, 1])


def identical(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def assert_same_logits(model, logits, expected):
    assert np.abs(logits - expected).max() <= LOGIT[model.ops.name]


def assert_same_state(model, state, other):
    expected = tiny.arrays_of(model, other)
    for key, array in tiny.arrays_of(model, state).items():
        scale = max(np.abs(expected[key]).max(initial=0), 1e-3)
        assert np.abs(array - expected[key]).max(initial=0) / scale <= STATE[model.ops.name], key
    assert state.length == other.length


def check_tree(model, parents, past):
    """Compare every row with its path, then the commit of every path, and of none."""
    tree = tree_of(parents, past)
    logits = forward(model, started(model, past), tree)
    for row in range(PAST, len(parents)):
        path = path_to(row, parents)
        alone = started(model, past)
        if path:
            along = tiny.run(model, alone, np.asarray(tree.tokens)[path])
            assert_same_logits(model, logits[path], along)
        state = started(model, past)
        forward(model, state, tree)
        state.commit(path)
        assert_same_state(model, state, alone)
        assert_same_logits(model, continued(model, state), continued(model, alone))


@settings(quick, max_examples=7)  # each of which commits every path
@given(parents=parent_lists, past=pasts)
@pytest.mark.few(2)
def test_trees(model, parents, past):
    check_tree(model, parents, past)


@pytest.mark.parametrize(("depth", "past"), [(0, 9), (3, 2), (4, 0)])
@pytest.mark.few(4)
def test_forks(model, depth, past):
    check_tree(model, FORKS[depth], past)


@pytest.mark.parametrize("kept", range(7))
@pytest.mark.few(16)
def test_part_of_a_chain(model, kept):
    state, alone = started(model, 5), started(model, 5)
    forward(model, state, Step.chain(TEXT[5:11], 5))
    state.commit(range(kept))
    if kept:
        tiny.run(model, alone, TEXT[5 : 5 + kept])
    assert_same_state(model, state, alone)
    assert_same_logits(model, continued(model, state), continued(model, alone))


@pytest.mark.parametrize("past", [0, 9])
def test_step_changes_nothing(model, past):
    """A step may be run again, with other steps in between, to the bit."""
    state, tree = started(model, past), tree_of(FORKS[3], past)
    before = tiny.arrays_of(model, state)
    first = forward(model, state, tree)
    forward(model, state, Step.chain(TEXT[60:90], past))
    forward(model, state, Step.chain(TEXT[60:61], past))
    assert np.array_equal(first, forward(model, state, tree))
    assert identical(before, tiny.arrays_of(model, state))


@pytest.mark.parametrize("past", [0, 9])
def test_last_step_counts(model, past):
    """A commit keeps rows of the last step, whatever ran before it."""
    state, alone, tree = started(model, past), started(model, past), tree_of(FORKS[3], past)
    forward(model, state, Step.chain(TEXT[60:90], past))
    forward(model, state, tree)
    state.commit(path_to(9, FORKS[3]))
    tiny.run(model, alone, np.asarray(tree.tokens)[path_to(9, FORKS[3])])
    assert_same_state(model, state, alone)


@pytest.mark.parametrize("past", [0, 9])
def test_reject_everything(model, past):
    state, tree = started(model, past), tree_of(FORKS[4], past)
    before = tiny.arrays_of(model, state)
    forward(model, state, tree)
    state.commit([])
    assert identical(before, tiny.arrays_of(model, state))
    assert state.length == past
    assert np.array_equal(continued(model, state), continued(model, started(model, past)))


def test_tree_larger_than_the_room_left(model):
    """Capacity bounds what is committed, not the rows of a step."""
    state = started(model, 9, capacity=11)
    forward(model, state, tree_of(FORKS[4], 9))
    state.commit([0, 1])
    alone = started(model, 9)
    tiny.run(model, alone, TEXT[40:42])
    assert_same_state(model, state, alone)


@pytest.mark.parametrize("past", [0, 2, 9])
def test_restore(model, past):
    """A snapshot survives steps, commits and its own restore, to the bit."""
    state = started(model, past)
    before, snapshot = tiny.arrays_of(model, state), state.snapshot()
    first = continued(model, state)
    for _ in range(2):
        state.restore(snapshot)
        assert identical(before, tiny.arrays_of(model, state))
        assert state.length == past
        forward(model, state, tree_of(FORKS[0], past))
        state.commit([1, 3])
        state.restore(snapshot)
        assert np.array_equal(continued(model, state), first)


def test_restore_of_a_lost_snapshot(model):
    state = started(model, 3)
    early = state.snapshot()
    tiny.run(model, state, TEXT[3:6])
    late = state.snapshot()
    state.restore(early)
    tiny.run(model, state, TEXT[20:30])
    with pytest.raises(ValueError, match="the snapshot at 6 tokens is gone"):
        state.restore(late)
    after = state.snapshot()
    state.restore(early)
    with pytest.raises(ValueError, match="the snapshot at 13 tokens is gone"):
        state.restore(after)
    assert_same_state(model, state, started(model, 3))


def test_many_restores_leave_nothing(model):
    state = model.new_state(40)
    empty = state.snapshot()
    for _ in range(50):
        tiny.run(model, state, TEXT[:3])
        state.snapshot()
        state.restore(empty)
    assert len(state._lowest) == 1


def test_states_are_apart(model):
    """Two sequences in turns do not affect each other."""
    one, other = started(model, 3), model.new_state(tiny.CAPACITY)
    tiny.run(model, other, TEXT[50:55])
    tiny.run(model, one, TEXT[3:9])
    tiny.run(model, other, TEXT[55:57])
    assert_same_state(model, one, started(model, 9))


moves = st.one_of(
    st.tuples(st.just("read"), st.integers(1, 6)),
    st.tuples(st.just("tree"), parent_lists, st.integers(PAST, 8)),
    st.tuples(st.just("snapshot")),
    st.tuples(st.just("restore"), st.integers(0, 8)),
)


@quick
@given(history=st.lists(moves, min_size=3, max_size=10))
def test_any_history(model, history):
    """After any history the state is that of the committed tokens read in order."""
    state, tokens, saved = model.new_state(tiny.CAPACITY), [], []
    for move, *rest in history:
        if move == "read":
            tiny.run(model, state, TEXT[len(tokens) + 7 :][: rest[0]])
            tokens = [*tokens, *TEXT[len(tokens) + 7 :][: rest[0]]]
        elif move == "tree":
            parents, row = rest
            tree = tree_of(parents, len(tokens))
            forward(model, state, tree)
            path = path_to(min(row, len(parents) - 1), parents)
            state.commit(path)
            tokens = [*tokens, *np.asarray(tree.tokens)[path]]
        elif move == "snapshot":
            saved.append((tokens, state.snapshot()))
        elif saved:
            index = rest[0] % len(saved)
            tokens, snapshot = saved[index]
            state.restore(snapshot)
            saved = [(kept, s) for kept, s in saved if len(kept) <= len(tokens)]
    alone = model.new_state(tiny.CAPACITY)
    if tokens:
        tiny.run(model, alone, np.array(tokens))
    assert_same_state(model, state, alone)


def test_mixed_sequences_are_refused(model):
    step = Step(TEXT[:2], np.arange(2, dtype=np.int32), np.array([PAST, PAST], np.int32), np.array([0, 1], np.int32))
    with pytest.raises(BimetalError, match=r"one sequence per step, got slots \[0, 1\]"):
        forward(model, model.new_state(8), step)


def test_block_is_refused_by_recurrent_layers(ops):
    model = tiny.load("qwen35", ops)
    with pytest.raises(BimetalError, match="no order for a recurrent layer"):
        forward(model, model.new_state(8), Step.block(TEXT[:3], 0))


def test_a_prompt_of_few_rows(model):
    """Read in one step, which is long on NumPy, and gives the numbers of a short one; rows after it are single rows."""
    state, short, count = model.new_state(tiny.CAPACITY), model.new_state(tiny.CAPACITY), 40
    step = Step.of_prompt(TEXT[:count], 0, model.ops.short_rows)
    logits = model.ops.read(model.forward(state, step))
    state.commit_prompt(step)
    assert np.abs(logits - tiny.run(model, short, TEXT[:count])).max() <= LOGIT["mlx"]
    assert (state.long_steps, short.long_steps) == ([(0, count)] if model.ops.name == "numpy" else [], [])
    together = model.ops.read(model.forward(state, Step.chain(MORE, count)))
    single = np.concatenate([tiny.run(model, state, MORE[t : t + 1]) for t in range(len(MORE))])
    assert np.abs(together - single).max() <= LOGIT[model.ops.name]


def test_a_long_step_that_fails_is_over():
    ops = NumpyOps()

    def fails(state, step):
        assert ops.is_long
        raise MemoryError

    with pytest.raises(MemoryError):
        ops.run(fails, None, Step.of_prompt(TEXT[:17], 0, 16))
    assert not ops.is_long
