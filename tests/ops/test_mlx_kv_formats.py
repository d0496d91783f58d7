"""Cache formats on MLX: the bytes of the definition, and its values back."""

import json
from pathlib import Path

import numpy as np
import pytest

from common.kv_formats import FORMATS
from common.storage import Plane

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
from mlx_backend.kv_formats import Coder, decode, encode  # noqa: E402

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "kv_golden.json").read_text())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_golden_bytes(name, dim):
    x = mx.array(np.sin(np.arange(dim)).astype(np.float32)).reshape(1, 1, 1, dim)
    coder = Coder(Plane(1, dim, name, not FORMATS[name].group), mx.float32)
    assert np.array(coder.encode(x)).tobytes().hex() == GOLDEN[name][str(dim)]


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_and_values_are_the_definitions(name):
    x = np.random.default_rng(1).standard_normal((1, 2, 300, 128)).astype(np.float32)
    x[0, 0, 0], x[0, 0, 1], x[0, 0, 2, 7] = 0, 65504, 1e-30
    rows = FORMATS[name].encode(x)
    assert np.array_equal(np.array(encode(mx.array(x), name)), rows)
    np.testing.assert_allclose(np.array(decode(mx.array(rows), name, 128)), FORMATS[name].decode(rows, 128), atol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_nan_stays(name):
    x = np.ones((1, 1, 3, 128), np.float32)
    x[..., 5] = np.nan
    assert np.isnan(np.array(decode(encode(mx.array(x), name), name, 128))).any(axis=-1).all()
