"""Fixtures that several areas share."""

import os
from collections import defaultdict

if "PYTEST_XDIST_WORKER" in os.environ:  # before NumPy is loaded: threads of two workers wait for each other's cores
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

from common.reference import NumpyOps

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")  # on a busy machine an example may take any time
os.environ.setdefault("MLX_ENABLE_TF32", "0")  # MLX's float32 products on an M5 or an NVIDIA GPU: 10 bits of 23


@pytest.fixture(scope="session", params=["numpy", "mlx"])
def ops(request):
    """Each backend that runs on this machine without a GPU, in float32."""
    if request.param == "numpy":
        return NumpyOps()
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    from mlx_backend.ops import MlxOps

    return MlxOps()


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(items):
    """Mark the cases of a test with the mark `few(n)` as long, all but n of them."""
    cases = defaultdict(list)
    for item in items:
        few = item.get_closest_marker("few")
        if few and not any(item.get_closest_marker(name) for name in ("gpu", "model", "slow", "compile")):
            cases[item.path, item.originalname, few.args[0]].append(item)
    for (_, _, count), alike in cases.items():
        kept = {i * len(alike) // count for i in range(count)}
        for i, item in enumerate(alike):
            if i not in kept:
                item.add_marker("long")
