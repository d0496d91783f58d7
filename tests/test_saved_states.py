"""Saving a state on the host and loading it: each later step has the same bits, for every family and backend."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import tiny_draft
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import BimetalError
from common.models.drafts import load_pair
from common.models.window import bounded
from common.step import PAST, Step

TEXT = tiny.golden("qwen35")["ids"].astype(np.int32)
TREE = [PAST, 0, 1, 1, 0, 4, 2, 3]
quick = settings(max_examples=6, derandomize=True)


@pytest.fixture(scope="module", params=["qwen3", "qwen35", "laguna", "mistral", "glm", "bounded", "pair"])
def model(ops, request, tmp_path_factory):
    if request.param == "bounded":
        return bounded(tiny.load("qwen3", ops), 12)
    if request.param == "pair":
        target = tiny.load("qwen3", ops)
        c, folder = target.config, tmp_path_factory.mktemp("drafts") / "draft"
        return load_pair(tiny_draft.write(folder, c.hidden, c.vocab, len(target.layout.layers), (0, 1)), target)
    model = tiny.load(request.param, ops)
    c = model.config
    if request.param == "mistral":  # every layer has a window
        return replace(model, config=replace(c, window=5))
    if request.param != "laguna":
        return model
    # a full layer, and one whose window the rows of these tests leave
    c = replace(c, heads=c.heads[:2], is_sliding=c.is_sliding[:2], is_sparse=c.is_sparse[:2], window=5)
    layers = model.weights.layers[:2]
    return replace(model, config=c, weights=SimpleNamespace(**vars(model.weights) | {"layers": layers}))


def forward(model, state, step):
    return np.array(model.ops.read(model.forward(state, step)))


def after(model, state):
    """Logits of a tree, of one of its paths committed and of rows after it."""
    tree = forward(model, state, Step.tree(TEXT[40:48], TREE, state.length))
    state.commit([0, 1, 3, 7])
    return np.concatenate([tree, tiny.run(model, state, TEXT[60:75], [1, 1, 6])])


def identical(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def used(model, length):
    """A state that other tokens went through, whose windows stand elsewhere."""
    state = model.new_state(tiny.CAPACITY)
    tiny.run(model, state, TEXT[200 : 200 + length], [3] * 2)
    return state


@quick
@given(length=st.integers(1, 45), pieces=st.lists(st.integers(1, 9), max_size=4), tree=st.booleans())
@pytest.mark.few(2)
def test_a_loaded_state_goes_on_with_the_same_bits(model, length, pieces, tree):
    state = model.new_state(tiny.CAPACITY)
    tiny.run(model, state, TEXT[:length], pieces)
    if tree:
        forward(model, state, Step.tree(TEXT[40:48], TREE, length))
        state.commit([0, 4, 5])  # a path that a backend may still have to apply
    saved, length = state.save(), state.length
    kept = {name: array.copy() for name, array in saved.items()}
    expected = after(model, state)
    for other in (model.new_state(tiny.CAPACITY), used(model, 31), state):
        other.load(saved, length)
        assert other.length == length
        assert identical(other.save(), kept)
        assert np.array_equal(after(model, other), expected)
    assert identical(saved, kept), "a state writes into arrays that it was loaded from"


@pytest.mark.parametrize("length", [0, 7, 40])
@pytest.mark.few(12)
def test_shapes_are_known_before_saving(model, length):
    state = model.new_state(tiny.CAPACITY)
    if length:
        tiny.run(model, state, TEXT[:length])
    for arrays, shapes in (
        (state.save_rows(0, length), state.row_shapes(length)),
        (state.save_point(), state.point_shapes(length)),
    ):
        assert [(array.shape, array.dtype) for array in arrays] == shapes
    fresh = model.new_state(tiny.CAPACITY)
    fresh.load(state.save(), length)
    assert np.array_equal(after(model, fresh), after(model, state))


def test_rows_come_in_ranges(model):
    """Rows that append are saved by pages; later tokens leave them as they are."""
    state = model.new_state(tiny.CAPACITY)
    tiny.run(model, state, TEXT[:40])
    pages = [state.save_rows(first, first + 10) for first in (0, 10, 20, 30)]
    tiny.run(model, state, TEXT[40:50])
    whole = state.save_rows(0, 40)
    for i, array in enumerate(whole):
        assert np.array_equal(array, np.concatenate([page[i] for page in pages], axis=1))
    with pytest.raises(ValueError, match="rows 45 to 51 of a state of 50 tokens"):
        state.save_rows(45, 51)
    pages.append(state.save_rows(40, 50))
    parts = {f"rows.{i}": arrays for i, arrays in enumerate(zip(*pages, strict=True))}
    saved, expected = state.save(), after(model, state)
    state.load(saved | parts, 50)
    assert np.array_equal(after(model, state), expected)
    if parts:
        with pytest.raises(BimetalError, match=r"array rows.0 of a saved state is"):
            state.load(saved | {"rows.0": parts["rows.0"][1:]}, 50)


def test_snapshots_from_before_a_load_are_gone(model):
    state = model.new_state(tiny.CAPACITY)
    empty = state.snapshot()
    tiny.run(model, state, TEXT[:9])
    saved, snapshot = state.save(), state.snapshot()
    state.load(saved, 9)
    with pytest.raises(ValueError, match="the snapshot at 9 tokens is gone"):
        state.restore(snapshot)
    state.restore(empty)
    assert np.array_equal(after(model, state), after(model, model.new_state(tiny.CAPACITY)))


def test_arrays_that_do_not_fit_are_refused(model):
    state = model.new_state(20)
    tiny.run(model, state, TEXT[:9])
    saved, before = state.save(), state.save()
    name = next(iter(saved))
    for arrays, length, message in (
        ({}, 9, "has 0 arrays"),
        (saved | {"more": saved[name]}, 9, "by other names"),
        (saved | {name: saved[name][:, :-1]}, 9, f"array {name} of a saved state is"),
        (saved | {name: saved[name].astype(np.float64)}, 9, "float64"),
        (saved, 21, "has 21 tokens; this one holds 0 to 20"),
        (saved, -1, "has -1 tokens"),
    ):
        with pytest.raises(BimetalError, match=message):
            state.load(arrays, length)
    assert identical(state.save(), before)
