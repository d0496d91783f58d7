"""Fixtures that several areas share."""

import pytest

from common.reference import NumpyOps


@pytest.fixture(scope="session", params=["numpy", "mlx"])
def ops(request):
    """Each backend that runs on this machine without a GPU, in float32."""
    if request.param == "numpy":
        return NumpyOps()
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    from mlx_backend.ops import MlxOps

    return MlxOps()
