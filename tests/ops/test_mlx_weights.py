"""The weights that MLX multiplies against those of the file: errors of every GGUF type and MLX mode, stacked parts."""

import numpy as np
import pytest

from common.errors import BimetalError
from common.quants import BLOCKS, dequantize
from common.tensors import Tensor
from common.weights import dense

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")

from mlx_backend import host, quantized  # noqa: E402
from mlx_backend.ops import MlxOps  # noqa: E402
from mlx_backend.quantized import Blocks  # noqa: E402
from mlx_backend.weights import GGUF_MAPPING, Packed, load_matrix, nbytes, pack_codes, stored_dtype  # noqa: E402

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
FLOAT = 2e-7  # "exact": a product and a sum, each rounded to float32


def blocks(type_: str, *shape: int) -> Tensor:
    """Random blocks; their float16 scales and minima lie between 2^-7 and 2^-5, their 8-bit scales far from NaN."""
    random = np.random.default_rng(3)
    block = BLOCKS[type_]
    data = random.integers(0, 256, (*shape[:-1], shape[-1] // block.elements, block.bytes), np.uint8)
    for at in block.halves:
        half = random.uniform(2**-7, 2**-5, data.shape[:-1]).astype(np.float16)
        data[..., at : at + 2] = half[..., None].view(np.uint8)
    scale_bytes = {"MXFP4": 1, "NVFP4": 4}.get(type_, 0)
    data[..., :scale_bytes] = random.integers(40, 126, (*data.shape[:-1], scale_bytes))
    if type_ == "IQ1_M":  # its scale lies in the four top nibbles
        data[..., 49::2] = data[..., 49::2] & 15 | np.array([0, 0, 0, 0x20], np.uint8)
    if type_ == "TQ2_0":  # three of the four codes
        data[..., :64] &= ~((data[..., :64] & 0x55) << 1)
    return Tensor(type_.lower(), type_, shape, data.reshape(*shape[:-1], -1))


def values(weight: tuple) -> np.ndarray:
    """The weights of the handle's rows in float32."""
    out = []
    for part in weight:
        if isinstance(part, Packed):
            scales, biases = (a.astype(mx.float32) if part.biases is not None else a for a in part[1:3])
            part = mx.dequantize(part.codes, scales, biases, part.group_size, part.bits, part.mode, dtype=mx.float32)
        elif isinstance(part, Blocks):
            part = quantized.dequantize(part, mx.float32)
        out.append(np.array(part.astype(mx.float32)))
    return np.concatenate(out, axis=-2)


def error(got: np.ndarray, want: np.ndarray, group: int) -> float:
    """The largest error relative to the largest magnitude of its group."""
    got, want = got.reshape(-1, group), want.reshape(-1, group)
    return float((np.abs(got - want).max(axis=1) / np.maximum(np.abs(want).max(axis=1), 1e-30)).max())


@pytest.mark.parametrize("type_", GGUF_MAPPING)
def test_gguf_type(type_):
    tensor, target = blocks(type_, 7, 1024), GGUF_MAPPING[type_]
    want = dequantize(tensor)
    weight = load_matrix((tensor,), mx.float32)
    assert len(weight) == 1
    if quantized.stays(type_):  # on Metal
        assert np.array_equal(values(weight), want)
        return
    assert weight[0][3:] == (target.group_size, target.bits, target.mode)
    for dtype, most in zip(DTYPES, target.errors, strict=True):
        off = error(values(load_matrix((tensor,), dtype)), want, target.group_size)
        assert off <= most + FLOAT
        assert most == 0 or off > most / 4, "the table overstates the error"
    x = np.random.default_rng(0).normal(size=(3, 1024)).astype(np.float32)
    product = np.array(MlxOps().linear(mx.array(x), weight))
    assert np.abs(product - x @ values(weight).T).max() < 2e-6 * np.abs(product).max() * 32


@pytest.mark.parametrize("rows", [2, 16, 33])
@pytest.mark.parametrize(("mode", "bits"), [("affine", 3), ("affine", 4), ("affine", 8), ("mxfp4", 4)])
def test_products_of_several_rows(mode, bits, rows, monkeypatch):
    """On the CPU, BLAS multiplies decoded blocks; those of a short step are too small for threads."""
    stored = mx.quantize(mx.random.normal((301, 768)), group_size=32, bits=bits, mode=mode)
    most, product = [], np.matmul
    weight = (Packed(*stored, *[None] * (3 - len(stored)), 32, bits, mode),)
    x = np.random.default_rng(0).normal(size=(rows, 768)).astype(np.float32)
    monkeypatch.setattr(np, "matmul", lambda a, b, out: (most.append(len(a) * b.size), product(a, b, out=out))[1])
    got = np.array(MlxOps().linear(mx.array(x), weight))
    assert np.abs(got - x @ values(weight).T).max() < 1e-6 * 768
    assert rows > host.FEW or max(most, default=0) <= host.ONE_THREAD


def test_every_block_type_has_a_target():
    assert GGUF_MAPPING.keys() == {name for name, block in BLOCKS.items() if block.elements > 1}


@pytest.mark.parametrize("stored", ["Q4_0", "Q6_K", "BF16", "F16", "F32", "F64"])
def test_experts_and_stacked_rows(stored):
    """Neighbours of one format become one matrix, also inside each expert."""
    one, two = (_any(stored, 3, rows, 256) for rows in (5, 2))
    (weight,) = load_matrix((one, two), mx.float32)
    want = np.concatenate([dequantize(one), dequantize(two)], axis=1)
    assert error(values((weight,)), want, 32) <= GGUF_MAPPING["Q6_K"].errors[0]


def test_parts_of_several_formats():
    parts = [_any(stored, rows, 256) for stored, rows in (("Q4_K", 5), ("Q4_K", 3), ("F32", 2), ("Q8_0", 4))]
    weight = load_matrix(tuple(parts), mx.float32)
    assert [type(part) for part in weight] == [Packed, mx.array, Packed]
    x = np.random.default_rng(0).normal(size=(3, 256)).astype(np.float32)
    want = x @ np.concatenate([dequantize(part) for part in parts]).T
    assert np.abs(np.array(MlxOps().linear(mx.array(x), weight)) - want).max() < 1e-5 * np.abs(want).max()


MODES = [(mode, bits, size) for mode in ("F16", "BF16", "F32") for bits in (2, 3, 4, 5, 6, 8) for size in (32, 64, 128)]
MODES += [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]


@pytest.mark.parametrize(("scales", "bits", "size"), MODES)
def test_mlx_modes_as_stored(scales, bits, size):
    """Codes and scales of an MLX checkpoint arrive bit for bit, whatever the alignment of the file."""
    dtype = {"F16": mx.float16, "BF16": mx.bfloat16}.get(scales, mx.float32)
    mode = "affine" if scales in ("F16", "BF16", "F32") else scales
    matrix = mx.random.normal((2, 6, 256), key=mx.random.key(0)).astype(dtype)
    stored = mx.quantize(matrix, group_size=size, bits=bits, mode=mode)
    tensor = _mlx_tensor(stored, matrix.shape, mode, bits, size)
    (weight,) = load_matrix((tensor,), dtype)
    assert weight[3:] == (size, bits, mode)
    for got, want in zip(weight[:3], stored, strict=False):
        assert got.dtype == want.dtype
        assert mx.array_equal(got, want)
    assert nbytes((weight,)) == tensor.nbytes
    wide = values(load_matrix((tensor,), mx.float32))
    assert error(wide, dequantize(tensor), size) <= FLOAT


def test_scales_beyond_float16():
    tensor = blocks("Q4_K", 1, 256)
    tensor.data[:, 0:2] = np.array([60000], np.float16).view(np.uint8)
    assert np.isfinite(values(load_matrix((tensor,), mx.float32))).all()
    with pytest.raises(BimetalError, match=r"q4_k: a scale of its Q4_K groups is beyond .*float16"):
        load_matrix((tensor,), mx.float16)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_pack_codes_as_mlx_does(bits):
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 64)).astype(np.uint8)
    packed = mx.array(pack_codes(codes, bits).reshape(3, -1))
    ones, zeros = mx.ones((3, 2)), mx.zeros((3, 2))
    assert np.array_equal(np.array(mx.dequantize(packed, ones, zeros, group_size=32, bits=bits)), codes)


def test_stored_dtype():
    small, big = _any("F32", 4, 256), _any("Q4_K", 64, 256)
    assert stored_dtype([small, big]) == mx.float16
    assert stored_dtype([small, big], exceeds_float16=True) == mx.bfloat16
    assert stored_dtype([small, _any("BF16", 64, 256)]) == mx.bfloat16
    assert stored_dtype([small]) == mx.float32
    matrix = mx.random.normal((64, 256)).astype(mx.bfloat16)
    stored = mx.quantize(matrix, group_size=64, bits=4)
    assert stored_dtype([small, _mlx_tensor(stored, matrix.shape, "affine", 4, 64)]) == mx.bfloat16


def _any(stored: str, *shape: int) -> Tensor:
    if BLOCKS[stored].elements > 1:
        return blocks(stored, *shape)
    matrix = np.random.default_rng(5).normal(size=shape).astype(np.float32)
    if stored == "BF16":
        return Tensor("bf16", stored, shape, (matrix.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8))
    return Tensor("plain", stored, shape, matrix.astype({"F16": "f2", "F32": "f4", "F64": "f8"}[stored]).view(np.uint8))


def _mlx_tensor(stored: list, shape: tuple[int, ...], mode: str, bits: int, size: int) -> Tensor:
    """The triple as a checkpoint has it, each part at an odd address."""

    def part(array: mx.array) -> Tensor:
        type_ = {mx.bfloat16: "BF16", mx.float16: "F16", mx.float32: "F32", mx.uint8: "U8", mx.uint32: "U32"}[
            array.dtype
        ]
        raw = np.array(array.view(mx.uint8))
        odd = np.zeros(raw.size + 1, np.uint8)[1:]
        odd[:] = raw.ravel()
        return Tensor("m", type_, array.shape, odd.reshape(raw.shape))

    codes, scales, *biases = (part(array) for array in stored)
    return Tensor("m", mode, tuple(shape), codes.data, scales, biases[0] if biases else None, bits, size)


def test_dense_is_held_in_the_dtype_of_activations():
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        (weight,) = load_matrix((dense("w", np.ones((2, 3))),), dtype)
        assert weight.dtype == dtype
