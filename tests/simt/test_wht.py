"""The wht kernel gives the bits of its definition, in every type, over whole and partial groups."""

from typing import Any

import numpy as np
import pytest

from common.errors import BimetalError
from common.hadamard import wht as definition

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
metal = pytest.importorskip("simt.device", exc_type=ImportError)
from mlx_backend.hadamard import wht  # noqa: E402


def case(shape: tuple[int, ...], dtype: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(sum(shape))
    signs = rng.choice([-1.0, 1.0], (2, shape[-1])).astype(np.float32)
    return mx.array(rng.standard_normal(shape).astype(np.float32) * 3).astype(dtype), signs[0], signs[1]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("shape", [(5, 32), (1, 64), (3, 2, 64), (4, 128), (7, 128), (2, 256), (5, 256)])
def test_the_kernel_gives_the_bits_of_the_definition(shape, dtype):
    x, before, after = case(shape, dtype)
    with metal.on_metal():
        ours = wht(x, mx.array(before), mx.array(after))
    expected = mx.array(definition(np.asarray(x.astype(mx.float32)), before, after)).astype(dtype)
    assert ours.dtype == dtype
    assert mx.array_equal(ours, expected)


def test_rows_that_are_not_contiguous():
    x, before, after = case((5, 64), mx.float16)
    columns = mx.contiguous(x.T)
    with metal.on_metal():
        ours = wht(columns.T, mx.array(before), mx.array(after))
    assert mx.array_equal(ours, mx.array(definition(np.asarray(x), before, after)).astype(mx.float16))


@pytest.mark.parametrize("n", [32, 64, 128, 256])
def test_the_composed_form_and_the_inverse(n):
    x, before, after = case((6, n), mx.float32)
    ours = wht(x, mx.array(before), mx.array(after))
    assert np.abs(np.asarray(ours) - definition(np.asarray(x), before, after)).max() < 1e-5
    assert mx.abs(wht(ours, mx.array(after), mx.array(before)) - x).max().item() < 1e-5


def test_another_width():
    with pytest.raises(BimetalError, match="32, 64, 128, 256 values, not 96"):
        wht(mx.zeros((2, 96)), mx.ones(96), mx.ones(96))
