"""CudaOps against NumpyOps, op by op."""

import numpy as np
import pytest
from cases import CASES, TOLERANCE, Case, Inputs, stateful

from common.errors import BimetalError
from common.ops import Rope
from common.reference import NumpyOps
from common.storage import KVSpec

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_rows import poisoned_ops, rows_on  # noqa: E402

pytestmark = pytest.mark.gpu

REFUSED = (  # what the kernels do not take yet, and say so
    "a tree or block has 140 rows",
    "attention keys are 24 and values 8 wide",
)
# keys, values and queries are float16, quantized matrices meet int8 activations, prefill multiplies in bfloat16
COLUMN = {"attention": 1, "latent_attention": 1, "moe": 2}


@pytest.fixture(scope="module")
def ops():
    return poisoned_ops()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_op(case: Case, ops):
    ops.context.arena.reset()
    try:
        outputs = case(ops)
    except BimetalError as error:
        if any(reason in str(error) for reason in REFUSED):
            pytest.skip(str(error))
        raise
    tolerance = max(TOLERANCE[case.op][COLUMN.get(case.op, 0)], 2e-6)
    for out, want in zip(outputs, case(NumpyOps()), strict=True):
        assert out.shape == want.shape
        assert np.abs(out - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize(("H", "K", "D", "turning"), [(4, 1, 128, 128), (6, 2, 256, 64)])
@pytest.mark.parametrize(("kind", "T"), [("chain", 1), ("tree", 7), ("tree", 33), ("chain", 140)])
def test_norm_and_rope_before_they_are_stored(kind, T, H, K, D, turning, ops):
    """Attention applies norm and rope where it stores queries and keys: their positions share memory, as in a model."""
    rope = Rope(tuple(1e4 ** (-2 * j / turning) for j in range(turning // 2)), 1.0)

    def outputs(ops, memory):
        def attend(i, kv, step):
            positions = memory(step.positions)
            q, k = (i.ops.norm_rope(i.rows(len(step), n, D), i.vector(D), positions, rope, 1e-6) for n in (H, K))
            return i.ops.attention(q, k, i.rows(len(step), K, D), kv, step, scale=D**-0.5)

        return [ops.read(out) for out in stateful({"state": KVSpec(K, D, D)}, 7, kind, T, attend)(Inputs(ops))]

    ops.context.arena.reset()
    for out, want in zip(outputs(ops, ops.context.on_device), outputs(NumpyOps(), np.asarray), strict=True):
        assert np.abs(out - want).max() <= TOLERANCE["attention"][1] * np.abs(want).max()


@pytest.mark.parametrize("at", [np.s_[:0], np.s_[:, :0], np.s_[:, 4:4]], ids=str)
def test_nothing_is_read(at, ops):
    rows = np.ones((3, 1024), np.float32)
    assert ops.read(rows_on(ops, rows)[at]).shape == rows[at].shape
