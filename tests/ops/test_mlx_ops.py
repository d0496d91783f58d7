"""MlxOps against NumpyOps: every case of tests/ops/cases.py in float32, every fifth in the halves that GPUs use."""

import io

import numpy as np
import pytest
from cases import CASES, TOLERANCE, Case, Inputs

from common.errors import NotFiniteError
from common.ops import GateWeights, Rope
from common.reference import NumpyOps
from common.sampling import Sampler, Sampling
from common.step import Step
from common.storage import ConvSpec, DeltaSpec, KVSpec

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")

from mlx_backend.ops import MlxOps  # noqa: E402

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
IN_DTYPES = [(case, 0) for case in CASES] + [(case, dtype) for dtype in (1, 2) for case in CASES[dtype::5]]


@pytest.mark.parametrize(("case", "dtype"), IN_DTYPES, ids=lambda x: x.name if isinstance(x, Case) else str(DTYPES[x]))
@pytest.mark.few(300)
def test_op(case: Case, dtype):
    if case.op == "moe_dense" and dtype and mx.default_device().type == mx.DeviceType.cpu:
        pytest.skip("MLX's CPU device gathers dense matrices in float32 only")
    tolerance = TOLERANCE[case.op][dtype]
    for out, want in zip(case(MlxOps(DTYPES[dtype])), case(NumpyOps()), strict=True):
        assert out.shape == want.shape
        assert np.abs(out - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("op", sorted(TOLERANCE.keys() - {"moe_dense", "route", "top_k"}))
def test_no_output_is_promoted(op, dtype):
    """Norm weights, decays and router weights are float32 beside half activations; products stay in half types."""
    case = next(case for case in CASES if case.op == op)
    assert {out.dtype for out in case.run(Inputs(MlxOps(dtype)))} == {dtype}


@pytest.mark.parametrize("position", [10**3, 10**5, 10**6])
def test_far_rope(position):
    """MLX computes angles in float32: rope errs by at most 1.5e-7 radians per position, here as in mlx-lm."""
    rope, x = Rope(tuple(1e4 ** (-j / 32) for j in range(32))), np.ones((3, 1, 64), np.float32)
    for positions in (np.arange(position, position + 3), np.array([position, position + 1, position + 1])):
        got, want = np.array(MlxOps().rope(mx.array(x), positions, rope)), NumpyOps().rope(x, positions, rope)
        off = np.abs(np.arctan2(got[..., 32:], got[..., :32]) - np.arctan2(want[..., 32:], want[..., :32]))
        assert np.minimum(off, 2 * np.pi - off).max() < 1.5e-7 * position


def test_rope_of_a_row_does_not_depend_on_its_neighbours():
    rope, x = Rope(tuple(1e6 ** (-j / 32) for j in range(32))), mx.random.normal((5, 2, 64), key=mx.random.key(1))
    ops, positions = MlxOps(), np.arange(70000, 70005)
    chain = ops.rope(x, positions, rope)
    order = np.array([3, 1, 4, 0, 2])
    assert mx.array_equal(ops.rope(x[mx.array(order)], positions[order], rope), chain[mx.array(order)])
    assert mx.array_equal(ops.rope(x[2:3], positions[2:3], rope), chain[2:3])


def test_greedy_sampling_stays_on_the_device_and_ties_go_to_the_smaller_id():
    ops = MlxOps()
    token = ops.sample(mx.array([[0.0, 3, 3, 1], [-1, -2, -mx.inf, -1]]), Sampler(Sampling()))
    assert isinstance(token, mx.array)
    assert ops.read(token).tolist() == [1, 0]


def test_other_sampling_is_the_samplers():
    logits = np.random.default_rng(0).normal(size=(1, 50)).astype(np.float32)
    sampling = Sampling(temperature=1.3, top_p=0.9, seed=5)
    assert MlxOps().sample(mx.array(logits), Sampler(sampling)).tolist() == [Sampler(sampling).pick(logits[0])]


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_are_refused(at, temperature):
    logits = np.array([[0.0, 1, 2, 3]], np.float32)
    logits[0, at] = np.nan
    ops = MlxOps()
    with pytest.raises(NotFiniteError, match="NaN"):
        ops.read(ops.sample(mx.array(logits), Sampler(Sampling(temperature=temperature, seed=0))))


def pending(array: mx.array) -> int:
    """Operations that `array` still waits for."""
    dot = io.StringIO()
    mx.export_to_dot(dot, array)
    return dot.getvalue().count("rectangle")


def test_a_prefill_chunk_is_computed_when_it_is_committed():
    ops = MlxOps()
    i = Inputs(ops)
    state = ops.new_state([{"kv": KVSpec(1, 8, 8), "conv": ConvSpec(6, 4), "delta": DeltaSpec(1, 2, 32, 32)}], 1000)
    for start in (0, 40):
        step = Step.chain(np.zeros(40, np.int32), start)
        out = ops.attention(i.rows(40, 2, 8), i.rows(40, 1, 8), i.rows(40, 1, 8), state[0].kv, step, 0.3)
        ops.short_conv(i.rows(40, 6), i.vector(6, 4), state[0].conv, step)
        q, v, a = i.rows(40, 1, 32), i.rows(40, 2, 32), i.rows(40, 2)
        ops.gated_delta(q, q, v, a, a, GateWeights(i.vector(2), i.vector(2)), state[0].delta, step)
        assert pending(out) > 0
        state.commit(np.arange(40))
        assert [pending(array) for part in state._all() for array in part.arrays] == [0, 0, 0, 0]


def test_window_snapshots_outlive_later_writes():
    """A window's rows are overwritten in place; a snapshot keeps its own."""
    ops, i = MlxOps(), Inputs(MlxOps())
    state = ops.new_state([{"kv": KVSpec(1, 8, 8, 5)}], 1000)
    rows = [[i.rows(n, 1, 8) for _ in "qkv"] for n in (7, 3, 300, 2)]

    def read(n: int) -> np.ndarray:
        step = Step.chain(np.zeros(len(rows[n][0]), np.int32), state.length)
        out = ops.read(ops.attention(*rows[n], state[0].kv, step, 0.3, window=5))
        state.commit(np.arange(len(step)))
        return out

    read(0)
    saved = state.snapshot()
    first = read(1), read(2), read(3)
    for _ in range(2):
        state.restore(saved)
        assert all(np.array_equal(read(n), out) for n, out in zip((1, 2, 3), first, strict=True))
