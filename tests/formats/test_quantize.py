"""Encoders against MLX's, bit for bit, and against the gguf package's decoders."""

import gguf
import numpy as np
import pytest

from common.block_decoders import E4M3
from common.errors import BimetalError, UsageError
from common.quantize import (
    AFFINE_BITS,
    FLOAT_TYPES,
    GGUF_TYPES,
    Format,
    encode,
    encoded_bytes,
    gguf_format,
    mlx_format,
    to_e4m3,
)
from common.quants import dequantize
from common.safetensors import MODES
from common.tensors import Tensor

mx = pytest.importorskip("mlx.core")
MX_TYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
MX_FORMATS = [mlx_format("affine", bits, size) for bits in AFFINE_BITS for size in MODES["affine"][1]]
MX_FORMATS += [mlx_format("mxfp4"), mlx_format("nvfp4")]


def hard_rows() -> np.ndarray:
    """float32 (n, 384): normal rows of many sizes, and those that rounding treats apart."""
    random = np.random.default_rng(5)
    rows = random.standard_normal((60, 384)) * 10.0 ** random.uniform(-6, 2, (60, 1))
    one_sided = np.abs(rows[:6])
    steps = random.integers(-24, 25, (6, 384)) / 4.0  # ties between two codes
    constant = np.repeat(np.array([0.0, -0.0, 1.5, -3.0, 1e-9, -1e-9, 2.0**-20, 448 * 6, 6e-8])[:, None], 384, 1)
    sparse = np.where(random.random((6, 384)) < 0.02, rows[6:12], 0)
    return np.concatenate([rows, one_sided, -one_sided, steps, constant, sparse]).astype(np.float32)


def as_tensor(values: np.ndarray, type_: str) -> tuple[Tensor, "mx.array"]:
    """float32 values in a stored type, for ours and for MLX."""
    array = mx.array(values).astype(MX_TYPES[type_])
    data = np.array(array.view(mx.uint8))
    return Tensor("w", type_, values.shape, data), array


@pytest.mark.parametrize("type_", MX_TYPES)
@pytest.mark.parametrize("format", MX_FORMATS, ids=str)
def test_mlx_formats_equal_mlx(format: Format, type_: str) -> None:
    tensor, array = as_tensor(hard_rows(), type_)
    with mx.stream(mx.cpu):
        expected = mx.quantize(array, group_size=format.group_size, bits=format.bits, mode=format.type)
    ours = encode(tensor, format)
    parts = [ours.data, ours.scales.data, *([ours.biases.data] if ours.biases else [])]
    assert len(parts) == len(expected)
    for part, theirs in zip(parts, expected, strict=True):
        bytes_ = np.array(theirs.view(mx.uint8))
        bad = np.flatnonzero((part != bytes_.reshape(part.shape)).any(axis=1))
        np.testing.assert_array_equal(part, bytes_.reshape(part.shape), err_msg=f"rows {bad}")
    assert (ours.data.nbytes, ours.scales.data.nbytes, ours.biases.data.nbytes if ours.biases else 0) == encoded_bytes(
        tensor.shape, type_, format
    )
    assert 8 * ours.nbytes == format.bits_per_weight(type_) * tensor.data[..., 0].size * tensor.shape[-1]


def test_the_smallest_mxfp4_scales() -> None:
    """Groups so small that the exponent of their scale leaves its byte."""
    tensor, array = as_tensor(np.outer(2.0 ** np.arange(-149, -100), np.ones(64)).astype(np.float32), "F32")
    with mx.stream(mx.cpu):
        expected = mx.quantize(array, mode="mxfp4")
    ours = encode(tensor, mlx_format("mxfp4"))
    np.testing.assert_array_equal(ours.scales.data, np.array(expected[1]))
    np.testing.assert_array_equal(ours.data, np.array(expected[0].view(mx.uint8)))


def test_8_bit_floats_equal_mlx() -> None:
    middles = (E4M3[1:127] + E4M3[:126]) / 2
    values = np.concatenate([E4M3[:127], middles, np.nextafter(middles, 0), np.linspace(0, 600, 10001)])
    values = np.concatenate([values, 10.0 ** np.linspace(-12, 3, 10001)]).astype(np.float32)
    np.testing.assert_array_equal(to_e4m3(values), np.array(mx.to_fp8(mx.array(values))))


@pytest.mark.parametrize("type_", [*GGUF_TYPES, *FLOAT_TYPES])
def test_gguf_types_are_the_packages(type_: str) -> None:
    tensor, _ = as_tensor(hard_rows(), "F32")
    ours = encode(tensor, gguf_format(type_.lower()))
    kind = gguf.GGMLQuantizationType[type_]
    theirs = gguf.quants.dequantize(gguf.quants.quantize(hard_rows(), kind), kind)
    np.testing.assert_array_equal(dequantize(ours), theirs)
    assert encoded_bytes(tensor.shape, "F32", gguf_format(type_)) == (ours.nbytes, 0, 0)


@pytest.mark.parametrize("type_", FLOAT_TYPES)
def test_stacks_and_chunks(type_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are encoded as their rows are, however many rows are taken at once."""
    whole, _ = as_tensor(hard_rows(), type_)
    stacked = whole.reshape((3, len(whole.data) // 3, 384))
    for format in (mlx_format("affine", 5, 32), mlx_format("nvfp4"), gguf_format("Q4_1")):
        expected = dequantize(encode(whole, format))
        monkeypatch.setattr("common.quantize.CHUNK", 300)
        np.testing.assert_array_equal(dequantize(encode(stacked, format)).reshape(expected.shape), expected)
        monkeypatch.undo()


def test_a_quantized_tensor_is_decoded_first() -> None:
    whole, _ = as_tensor(hard_rows(), "F32")
    once = encode(whole, gguf_format("Q8_0"))
    again = encode(once, mlx_format("affine", 8, 32))
    assert np.abs(dequantize(again) - dequantize(whole)).max() < 0.02 * np.abs(dequantize(whole)).max()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", [mlx_format("affine"), mlx_format("mxfp4"), gguf_format("Q4_0")], ids=str)
def test_values_that_are_not_finite(value: float, format: Format) -> None:
    rows = hard_rows()
    rows[3, 100] = value
    with pytest.raises(BimetalError, match="'w' has a value that is not finite"):
        encode(as_tensor(rows, "F32")[0], format)


def test_values_beyond_float16() -> None:
    with pytest.raises(BimetalError, match="beyond the range of F16"):
        encode(as_tensor(np.full((2, 32), 1e6, np.float32), "F32")[0], gguf_format("F16"))


@pytest.mark.parametrize("bits", [0, 1, 7, 9])
def test_unknown_bits(bits: int) -> None:
    with pytest.raises(UsageError, match=f"bits is {bits}; affine supports 2, 3, 4, 5, 6, 8"):
        mlx_format("affine", bits)
