"""Rows of a Gated DeltaNet mixer, in chains and in trees."""

from itertools import chain

import numpy as np
import pytest

from common.errors import BimetalError
from common.ops import DeltaInputs, DeltaWeights, GateWeights
from common.shards import Ranks
from common.step import MAX_DECODE_ROWS, PAST, Step
from common.storage import ConvSpec, DeltaSpec

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_rows import f32, poisoned_ops, rows_on  # noqa: E402

from cuda_backend import recurrent  # noqa: E402
from cuda_backend.ops import CudaOps  # noqa: E402

pytestmark = pytest.mark.gpu

TREES = {  # of as many rows as there may be
    "random": [PAST, *np.random.default_rng(3).integers(PAST, np.arange(1, MAX_DECODE_ROWS))],
    "near": [PAST, *(max(PAST, t - 1 - t * t % 5) for t in range(1, MAX_DECODE_ROWS))],
    "two children each": [(t - 2) // 2 if t > 1 else PAST for t in range(MAX_DECODE_ROWS)],
    "a leaf beside each": [(t - 1) // 2 * 2 if t else PAST for t in range(MAX_DECODE_ROWS)],
    "leaves": [PAST] * MAX_DECODE_ROWS,
}


@pytest.fixture(scope="module")
def ops():
    return poisoned_ops()


def mixer_on(ops: CudaOps, T: int, D: int = 128, slots: int = 0):
    """A state, and a function that runs some of T random rows through a Gated DeltaNet mixer of heads D wide.

    slots  of a pool, whose states come in place of the one; 0: no pool
    """
    Hk, Hv, taps = 1, 2, 4
    C, V, random = (2 * Hk + Hv) * D, Hv * D, np.random.default_rng(11)
    y = random.normal(size=(T, C + V + 2 * Hv)).astype(np.float32)
    w, decay = ops.vector(f32(random.normal(size=(C, taps)))), ops.vector(f32(-np.exp(random.normal(size=Hv))))
    bias, norm = (ops.vector(f32(np.ones(n))) for n in (Hv, D))
    pool = ops.new_pool([{"conv": ConvSpec(C, taps), "delta": DeltaSpec(Hk, Hv, D, D)}], max(slots, 1), 1000)
    states = [pool.new_state() for _ in range(slots or 1)]

    def run(rows: list[int], step: Step) -> np.ndarray:
        ops.context.arena.reset()
        some, n = rows_on(ops, y[rows]), len(rows)
        qkv, z = some[:, :C], some[:, C : C + V].reshape(n, Hv, D)
        a, b = some[:, C + V : C + V + Hv], some[:, C + V + Hv :]
        conv, delta = pool[0].conv, pool[0].delta
        weights = DeltaWeights(w, GateWeights(decay, bias), norm, 1e-6)
        return ops.read(ops.delta_mixer(DeltaInputs(qkv, z, a, b), weights, Hk, conv, delta, step))

    return states if slots else states[0], run


@pytest.mark.parametrize("D", [12, 64, 128, 256])
def test_one_row_of_each_sequence(D, ops):
    """A row has the bits of its sequence alone where others have a row each, and so have the states that it leaves."""
    n, places = 5, np.zeros(5, int)
    states, run = mixer_on(ops, 40, D, slots=n)
    single, alone = zip(*(mixer_on(ops, 40, D) for _ in range(n)), strict=True)

    def step(sizes: dict[int, int]) -> None:
        """The next rows of sequences, by `sizes` rows per sequence; the first row of each is committed."""
        rows = [[8 * i + places[i] + t for t in range(size)] for i, size in sizes.items()]
        parents = np.concatenate(
            [[PAST, *range(at, at + len(r) - 1)] for at, r in zip(firsts(sizes), rows, strict=True)]
        )
        slots = np.repeat([states[i].slot for i in sizes], list(sizes.values())).astype(np.int32)
        T = len(slots)
        out = run(
            list(chain(*rows)), Step(np.zeros(T, np.int32), np.zeros(T, np.int32), parents.astype(np.int32), slots)
        )
        for i, at, own in zip(sizes, firsts(sizes), rows, strict=True):
            want = alone[i](own, Step.chain(np.zeros(len(own), np.int32), 0))
            assert np.array_equal(out[at : at + len(own)], want), f"sequence {i} of {sizes}"
            places[i] += 1
            states[i].commit([0]), single[i].commit([0])

    step(dict.fromkeys(range(n), 1))
    step({0: 1, 2: 1, 3: 1})
    step({1: 2, 4: 1})
    step(dict.fromkeys((4, 1, 0, 3), 1))
    step(dict.fromkeys(range(n), 1))
    for ours, theirs in zip(states, single, strict=True):
        saved, want = ours.save(), theirs.save()
        assert all(np.array_equal(saved[name], want[name]) for name in want)


def firsts(sizes: dict[int, int]) -> list[int]:
    """The first row of each sequence in a step of `sizes` rows per sequence."""
    return [0, *np.cumsum(list(sizes.values()))][:-1]


def test_mixer_rows_are_alone(ops):
    """A row of a Gated DeltaNet mixer has the same bits in a step of any number of rows, in a chain and in a tree."""
    state, run = mixer_on(ops, 64)
    alone = []
    for t in range(64):
        alone.append(run([t], Step.chain(np.zeros(1, np.int32), t)))
        state.commit([0])
    alone = np.concatenate(alone)
    for sizes in ((64,), (2, 8, 16, 22, 15, 1), (33, 31), (17, 47)):
        state, run = mixer_on(ops, 64)
        at = 0
        for n in sizes:
            out = run(list(range(at, at + n)), Step.chain(np.zeros(n, np.int32), at))
            assert np.array_equal(out, alone[at : at + n]), f"{n} rows from {at} of {sizes}"
            state.commit(np.arange(n))
            at += n
    # a tree whose every other row goes on with the chain, and of which the rest are leaves
    state, run = mixer_on(ops, 64)
    run([0, 1], Step.chain(np.zeros(2, np.int32), 0))
    state.commit([0, 1])
    parents = [-1, -1, *(i - 2 if i % 2 == 0 else i - 3 for i in range(2, 46))]
    rows = [2 + i // 2 if i % 2 == 0 else 63 - i // 2 for i in range(46)]
    out = run(rows, Step.tree(np.zeros(46, np.int32), parents, 2))
    assert np.array_equal(out[::2], alone[2:25])
    snapshot = state.snapshot()
    state.commit(np.arange(0, 20, 2))
    held = state.snapshot()
    want = run([12], Step.chain(np.zeros(1, np.int32), 12))
    assert np.array_equal(want, alone[12:13])
    state.restore(held)
    assert np.array_equal(run([12], Step.chain(np.zeros(1, np.int32), 12)), want)
    state.restore(snapshot)
    assert np.array_equal(run([2, 3], Step.chain(np.zeros(2, np.int32), 2)), alone[2:4])


def test_ctas_of_fewer_columns(ops, monkeypatch):
    """Where other GPUs have other heads, CTAs of half the columns give the same rows and leave the same state."""
    found, rows = [], list(range(MAX_DECODE_ROWS))
    monkeypatch.setattr(ops, "ranks", Ranks(0, 2))
    for narrow in (False, True):
        monkeypatch.setattr(recurrent, "_is_narrow", lambda *_, narrow=narrow: narrow)
        state, run = mixer_on(ops, MAX_DECODE_ROWS + 6)
        outs = [run([MAX_DECODE_ROWS + t for t in range(6)], Step.chain(np.zeros(6, np.int32), 0))]
        state.commit([0, 1, 2])
        for tree in ("near", "two children each"):
            step = Step.tree(np.zeros(MAX_DECODE_ROWS, np.int32), TREES[tree], state.length)
            outs.append(run(rows, step))
            state.commit(np.flatnonzero(step.visible[MAX_DECODE_ROWS - 1]))
        outs.append(run(rows[:64], Step.chain(np.zeros(64, np.int32), state.length)))
        state.commit(range(40))
        found.append((*outs, *state.save().values()))
    assert all(np.array_equal(*both) for both in zip(*found, strict=True))


@pytest.mark.parametrize("widths", [(10, 16), (16, 10), (260, 16)])
def test_widths_of_the_delta_rule(widths, ops):
    with pytest.raises(BimetalError, match=f"keys are {widths[0]} and values {widths[1]} wide; .* multiples of 4"):
        ops.new_state([{"delta": DeltaSpec(1, 2, *widths)}], 10)


@pytest.mark.parametrize("D", [128, 256])
@pytest.mark.parametrize("tree", TREES)
def test_mixer_trees_are_plain(tree, D, ops):
    """Every row of a tree has the bits of the chain that leads to it, and leaves its state."""
    parents, rows = TREES[tree], list(range(MAX_DECODE_ROWS))
    state, run = mixer_on(ops, MAX_DECODE_ROWS + 8, D)
    run([MAX_DECODE_ROWS + t for t in range(6)], Step.chain(np.zeros(6, np.int32), 0))
    state.commit([0, 1, 2])
    step = Step.tree(np.zeros(MAX_DECODE_ROWS, np.int32), parents, 3)
    out = run(rows, step)
    before = state.snapshot()
    for leaf in sorted(set(rows) - set(parents)):
        path = np.flatnonzero(step.visible[leaf])
        assert np.array_equal(run(path.tolist(), Step.chain(np.zeros(len(path), np.int32), 3)), out[path]), leaf
    for row in (0, 29, 126, 127, 128, MAX_DECODE_ROWS - 1):
        path, after = np.flatnonzero(step.visible[row]), []
        for whole in (True, False):
            state.restore(before)
            if whole:
                run(rows, step)
                state.commit(path)
            else:
                for at, one in enumerate(path):
                    run([int(one)], Step.chain(np.zeros(1, np.int32), 3 + at))
                    state.commit([0])
            after.append(
                run([MAX_DECODE_ROWS + 6, MAX_DECODE_ROWS + 7], Step.chain(np.zeros(2, np.int32), 3 + len(path)))
            )
        assert np.array_equal(*after), row
