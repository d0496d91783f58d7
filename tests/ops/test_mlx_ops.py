"""MlxOps against NumpyOps: every case of tests/ops/cases.py in every activation dtype."""

import numpy as np
import pytest
from cases import CASES, TOLERANCE, Case

from common.reference import NumpyOps

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")

from mlx_backend.ops import MlxOps  # noqa: E402

DTYPES = (mx.float32, mx.float16, mx.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).rpartition(".")[2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_op(case: Case, dtype):
    if case.op == "moe_dense" and dtype != mx.float32 and mx.default_device().type == mx.DeviceType.cpu:
        pytest.skip("MLX's CPU device gathers dense matrices in float32 only")
    ops, tolerance = MlxOps(dtype), TOLERANCE[case.op][DTYPES.index(dtype)]
    for out, want in zip(case(ops), case(NumpyOps()), strict=True):
        assert out.shape == want.shape
        assert np.abs(out - want).max() <= tolerance * np.abs(want).max()
