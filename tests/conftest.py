"""Fixtures that several areas share."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # before NumPy is loaded: threads of two workers wait for each other's cores
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest

from common.reference import NumpyOps

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # MLX's float32 products on an M5 or an NVIDIA GPU: 10 bits of 23


@pytest.fixture(scope="session", params=["numpy", "mlx"])
def ops(request):
    """Each backend that runs on this machine without a GPU, in float32."""
    if request.param == "numpy":
        return NumpyOps()
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    from mlx_backend.ops import MlxOps

    return MlxOps()
