"""The gated delta rule and the short convolution on Metal: chains, trees, commits, against the NumPy reference."""

import mlx.core as mx
import numpy as np
import pytest

from common.errors import BimetalError
from common.ops import GateWeights
from common.reference import NumpyOps
from common.step import Step
from common.storage import ConvSpec, DeltaSpec
from common.weights import dense
from mlx_backend import recurrent
from mlx_backend.ops import MlxOps

metal = pytest.importorskip("simt.device", exc_type=ImportError)
DTYPES = pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
DELTA = {mx.float32: 2e-6, mx.float16: 4e-3, mx.bfloat16: 3e-2}  # of the largest: q and k are rounded after their norm
CONV = {mx.float32: 1e-6, mx.float16: 5e-4, mx.bfloat16: 4e-3}  # of the largest: the output's rounding
PARENTS = [-1, 0, 0, 1, 1, 3, -1, 6, 2]
PATH = [0, 1, 3, 5]


def numbers(dtype: mx.Dtype, *shape: int) -> tuple[np.ndarray, mx.array]:
    """Random values that `dtype` represents, so that both sides read equal ones."""
    x = mx.array(np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)).astype(dtype)
    return np.asarray(x.astype(mx.float32)), x


def rows_of_delta(dtype: mx.Dtype, T: int, Hk: int, Hv: int, Dk: int, Dv: int) -> list[tuple[np.ndarray, mx.array]]:
    q, k = numbers(dtype, T, Hk, Dk), numbers(dtype, T, Hk, Dk)
    wide = [x.reshape(T, 2, Hv, Dv)[:, 1] for x in numbers(dtype, T, 2 * Hv * Dv)]  # a slice, as a projection gives it
    return [q, k, (wide[0], wide[1]), numbers(dtype, T, Hv), numbers(dtype, T, Hv)]


def delta_run(ops, which: int, spec: DeltaSpec, dtype: mx.Dtype, Hk: int, steps: list[tuple[Step, list[int]]]):
    """Run each step's rows and its commit; the last output and matrix in float32."""
    state = ops.new_state([{"delta": spec}], 100)
    decay, dt_bias = (dense("v", np.linspace(a, b, spec.heads, dtype=np.float32)) for a, b in ((-1, -0.1), (-1, 1)))
    out = None
    for step, path in steps:
        rows = [x[which] for x in rows_of_delta(dtype, len(step), Hk, spec.heads, spec.key_dim, spec.value_dim)]
        out = ops.gated_delta(*rows, GateWeights(ops.vector(decay), ops.vector(dt_bias)), state[0].delta, step)
        state.commit(path)
    return np.asarray(ops.read(out)), np.asarray(state[0].delta.matrix)


def chain(T: int, start: int = 0) -> Step:
    return Step.chain(np.zeros(T, np.int32), start)


def tree(start: int = 0) -> Step:
    return Step.tree(np.zeros(len(PARENTS), np.int32), PARENTS, start)


STEPS = {
    "decode": [(chain(1), [0]), (chain(1, 1), [0])],
    "prefill": [(chain(11), list(range(11)))],
    "verify": [(chain(3), [0, 1, 2]), (chain(5, 3), [0, 1]), (chain(1, 5), [0])],
    "tree": [(chain(2), [0, 1]), (tree(2), PATH), (chain(1, 6), [0])],
    "kept nothing": [(tree(), []), (tree(), [6])],
}


@DTYPES
@pytest.mark.parametrize("steps", STEPS)
def test_gated_delta(steps, dtype):
    shape = {mx.float32: (2, 4, 64, 3), mx.float16: (1, 3, 32, 5), mx.bfloat16: (1, 1, 40, 2)}[dtype]
    spec = DeltaSpec(*shape)
    with metal.on_metal():
        ours = delta_run(MlxOps(dtype), 1, spec, dtype, shape[0], STEPS[steps])
    expected = delta_run(NumpyOps(), 0, spec, dtype, shape[0], STEPS[steps])
    for our, theirs in zip(ours, (expected[0], expected[1].swapaxes(1, 2)), strict=True):
        assert np.abs(our - theirs).max() <= DELTA[dtype] * np.abs(theirs).max()


def test_a_path_of_a_tree_has_the_bits_of_decoding_it():
    """A path has the same bits row by row, as one chain, inside a tree, and committed from a tree."""
    H, D = 2, 32
    q, k, v, g, beta = (
        mx.array(np.random.default_rng(i).normal(size=(9, H, D)[: 3 - i // 3]).astype(np.float32)) for i in range(5)
    )
    g, start = -mx.abs(g), mx.random.normal((H, D, D), key=mx.random.key(0))
    with metal.on_metal():
        rows = k, v, g, beta
        out, _ = recurrent.gated_delta(q, rows, start, tree())
        kept = recurrent.replay(rows, start, np.array(PATH))
        at = mx.array(PATH)
        path_out, path_matrix = recurrent.gated_delta(q[at], tuple(x[at] for x in rows), start, chain(len(PATH)))
        matrix, alone = start, []
        for t in PATH:
            one, matrix = recurrent.gated_delta(q[t : t + 1], tuple(x[t : t + 1] for x in rows), matrix, chain(1))
            alone.append(one)
    assert mx.array_equal(out[at], mx.concatenate(alone))
    assert mx.array_equal(path_out, mx.concatenate(alone))
    assert mx.array_equal(kept, matrix)
    assert mx.array_equal(path_matrix, matrix)


def test_the_walk_over_a_tree():
    walk = recurrent.walk_over(np.array(PARENTS))
    assert walk.tolist() == [~0, 1, 4, ~0, 1, 3, 5, ~6, 7, ~0, 2, 8]
    assert recurrent.walk_over(np.arange(-1, 3)).tolist() == [~0, 1, 2, 3]


def test_rows_without_an_order():
    rows = tuple(mx.zeros((2, 1, 32)[:n]) for n in (3, 3, 2, 2))
    with metal.on_metal(), pytest.raises(BimetalError, match="no order for a recurrent layer"):
        recurrent.gated_delta(rows[0], rows, mx.zeros((1, 32, 32)), Step.block(np.zeros(2, np.int32), 0))


@DTYPES
@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("steps", STEPS)
def test_short_conv(steps, taps, dtype):
    """3 channels, fewer values than a device buffer holds, then 300, more than one group."""
    for C in (3, 300):
        results = []
        for which, ops in enumerate((NumpyOps(), MlxOps(dtype))):
            with metal.on_metal():
                state = ops.new_state([{"conv": ConvSpec(C, taps)}], 100)
                for step, path in STEPS[steps]:
                    x = numbers(dtype, len(step), C + 2)[which][:, 1:-1]
                    out = ops.short_conv(x, ops.vector(dense("taps", numbers(dtype, C, taps)[0])), state[0].conv, step)
                    state.commit(path)
                results.append((ops.read(out), np.asarray(ops.read(state[0].conv.tail))))
        want, ours = results
        assert np.abs(ours[0] - want[0]).max() <= CONV[dtype] * np.abs(want[0]).max()
        assert np.array_equal(ours[1], want[1])
