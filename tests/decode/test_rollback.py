"""Random trees of which a random path or nothing is kept leave the state of reading the kept tokens one by one."""

import numpy as np
import pytest
import tiny

from common.models import load_model
from common.step import PAST, Step

STEPS, ROWS = 2000, 8


def after_trees(model, tokens, steps, capacity, seed=0):
    """The state after `steps` random trees, and the kept tokens."""
    random, state, kept = np.random.default_rng(seed), model.new_state(capacity), []
    for _ in range(steps):
        n = int(random.integers(1, ROWS + 1))
        parents = [int(random.integers(max(PAST, t - 3), t)) for t in range(n)]
        rows = random.choice(tokens, n).astype(np.int32)
        model.forward(state, Step.tree(rows, parents, state.length))
        path, row = [], int(random.integers(PAST, n))  # PAST keeps nothing
        while row != PAST:
            path.insert(0, row)
            row = parents[row]
        state.commit(path)
        kept += rows[path].tolist()
    return state, kept


def one_by_one(model, tokens, capacity, beside=0):
    """The state after `tokens`, each read in a step with `beside` other rows that are not kept."""
    state = model.new_state(capacity)
    for at, token in enumerate(tokens):
        others = np.roll(tokens, -at)[:beside]
        model.forward(state, Step.chain(np.array([token, *others], np.int32), at))
        state.commit([0])
    return state


def assert_same_state(model, steps):
    """Compare states: to the bit on NumPy, on MLX within 1e-5 of each array's largest element.

    MLX multiplies eight rows in another order than one, and a row's rounding grows where a norm divides by nearly zero:
    its error may be up to twice that of plain decoding in which each token has seven other rows beside it.
    """
    tokens = tiny.golden("qwen35")["ids"]
    state, kept = after_trees(model, tokens, steps, capacity=4 * steps)
    alone = one_by_one(model, kept, capacity=4 * steps)
    assert state.length == alone.length == len(kept) > steps
    arrays, expected = tiny.arrays_of(model, state), tiny.arrays_of(model, alone)
    if model.ops.name == "numpy":
        assert all(np.array_equal(array, expected[name]) for name, array in arrays.items())
        return
    beside = tiny.arrays_of(model, one_by_one(model, kept, capacity=4 * steps, beside=ROWS - 1))
    for name, array in arrays.items():
        scale = np.abs(expected[name]).max()
        rounding = np.abs(beside[name] - expected[name]).max() / scale
        error = np.abs(array - expected[name]).max() / scale
        print(f"{name}: {error:.1e}, of rounding {rounding:.1e}")
        assert error < max(1e-5, 2 * rounding), name


@pytest.mark.parametrize("name", tiny.MODELS)
@pytest.mark.few(2)
def test_state_after_trees(name, ops):
    assert_same_state(tiny.load(name, ops), 30)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen35", "laguna", "mistral", "glm"])
def test_state_after_thousands_of_trees(name, ops):
    assert_same_state(tiny.load(name, ops), STEPS)


def after_chains(model, tokens, steps, capacity, seed=0):
    """The state after `steps` chains of random tokens, each with its first few rows kept, or none."""
    random, state, kept = np.random.default_rng(seed), model.new_state(capacity), []
    for _ in range(steps):
        rows = random.choice(tokens, random.integers(1, ROWS + 1)).astype(np.int32)
        model.forward(state, Step.chain(rows, state.length))
        n = int(random.integers(0, len(rows) + 1))
        state.commit(range(n))
        kept += rows[:n].tolist()
    return state, kept


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "qwen35"])
@pytest.mark.parametrize("kind", [after_chains, after_trees])
def test_state_on_cuda(name, kind):
    """Compare the logits of a last step, which reads the whole state, to the bit."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from cuda_backend.ops import CudaOps

    model, tokens = load_model(tiny.checkpoint(name), CudaOps()), tiny.golden(name)["ids"]
    state, kept = kind(model, tokens, STEPS, 5 * STEPS)
    alone = one_by_one(model, kept, 5 * STEPS)
    step = Step.chain(tokens[:5].astype(np.int32), state.length)
    one, other = (model.ops.read(model.forward(each, step)) for each in (state, alone))
    assert np.array_equal(one, other)
