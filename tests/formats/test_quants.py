"""Block decoding, bit for bit against gguf-py and against what MLX made of the same bytes."""

import runpy
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from format_files import same_bits, tensor_of

from common.errors import BimetalError
from common.quants import BLOCKS, CHUNK, as_blocks, bits_per_weight, block_type, check_scales, dequantize, unpack_codes
from common.tensors import Tensor

DATA = Path(__file__).parents[1] / "data"
FLOATS = ("F32", "F16", "BF16")
QUANTIZED = [name for name, block in BLOCKS.items() if block.elements > 1]
HALVES = [0x0000, 0x8000, 0x0001, 0x83FF, 0x3C00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00]  # f16: ±0 tiny max inf NaN

pytestmark = pytest.mark.filterwarnings("error")


def random_blocks(name: str, count: int = 200) -> np.ndarray:
    return np.random.default_rng(BLOCKS[name].id).integers(0, 256, (count, BLOCKS[name].bytes), dtype=np.uint8)


def adversarial_blocks(name: str) -> np.ndarray:
    """All bits clear, all set, and special values wherever a scale can be."""
    block = BLOCKS[name]
    special = random_blocks(name, 256)
    for at in block.halves:
        special[: len(HALVES) ** 2, at : at + 2] = np.resize(HALVES, (len(HALVES) ** 2, 1)).astype("<u2").view(np.uint8)
    if len(block.halves) == 2:  # every pair
        at = block.halves[1]
        special[: len(HALVES) ** 2, at : at + 2] = np.repeat(HALVES, len(HALVES)).astype("<u2")[:, None].view(np.uint8)
    if name == "IQ1_M":
        for part in range(4):
            high = (np.resize(HALVES, 256) >> (4 * part)) & 15
            special[:, 49 + 2 * part] = (special[:, 49 + 2 * part] & 15) | (high << 4)
    if name in ("MXFP4", "NVFP4"):
        special[:, : 1 if name == "MXFP4" else 4] = np.arange(256, dtype=np.uint8)[:, None]
    return np.concatenate([np.zeros((1, block.bytes), np.uint8), np.full((1, block.bytes), 255, np.uint8), special])


def by_gguf(name: str, blocks: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])


def blocks_tensor(name: str, blocks: np.ndarray) -> Tensor:
    return Tensor("w", name, (len(blocks), BLOCKS[name].elements), blocks)


def test_sizes_are_those_of_ggml():
    sizes = {type_.name: (type_.value, *size) for type_, size in gguf.GGML_QUANT_SIZES.items()}
    assert {name: (block.id, block.elements, block.bytes) for name, block in BLOCKS.items()}.items() <= sizes.items()
    assert {type_.name for type_ in gguf.quants._type_traits} <= BLOCKS.keys()
    assert BLOCKS["Q4_K"].bits_per_weight == 4.5


def test_codebooks_are_those_of_gguf():
    expected = runpy.run_path(str(DATA / "make_codebooks.py"))["codebooks"]()
    with np.load(DATA.parents[1] / "common" / "codebooks.npz") as ours:
        assert ours.keys() == expected.keys()
        for name, grid in expected.items():
            np.testing.assert_array_equal(ours[name], grid)


@pytest.mark.parametrize("name", [*QUANTIZED, *FLOATS])
@pytest.mark.parametrize("make", [random_blocks, adversarial_blocks])
def test_same_bits_as_gguf(name, make):
    blocks = make(name)
    assert same_bits(dequantize(blocks_tensor(name, blocks)), by_gguf(name, blocks))


@pytest.mark.parametrize("name", ["Q4_0", "IQ2_XS", "BF16"])
def test_chunks_join(name):
    block = BLOCKS[name]
    count = 2 * CHUNK // block.elements + 3
    blocks = np.resize(random_blocks(name, 1000), (count, block.bytes))
    stack = Tensor("w", name, (1, count, block.elements), blocks[None])
    assert same_bits(dequantize(stack), by_gguf(name, blocks)[None])


def test_plain_numbers():
    values = np.array([[0, 1, 1], [1, 0, 1]])
    for dtype, word in [("F64", "<f8"), ("I64", "<i8"), ("I16", "<i2"), ("U64", "<u8"), ("U8", "u1"), ("BOOL", "?")]:
        np.testing.assert_array_equal(dequantize(tensor_of(values.astype(word), dtype)), values)
    np.testing.assert_array_equal(dequantize(tensor_of(-values.astype("i1"), "I8")), -values)
    assert dequantize(Tensor("w", "F32", (), np.float32(2).reshape(1).view(np.uint8))) == 2


def test_temporaries_stay_small():
    tensor = Tensor("w", "Q6_K", (4096, 1024), np.zeros((4096, 840), np.uint8))
    tracemalloc.start()
    out = dequantize(tensor)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < out.nbytes + 4 * 2**20


def test_unknown_type():
    with pytest.raises(BimetalError, match="'w' has type 'Q9_K'"):
        dequantize(Tensor("w", "Q9_K", (1, 32), np.zeros((1, 32), np.uint8)))


# ---- MLX ------------------------------------------------------------------------------------------------------------


def mlx_tensor(mode: str, bits: int, group: int, parts: dict[str, np.ndarray]) -> Tensor:
    scales = tensor_of(parts["scales"], "F32" if mode == "affine" else "U8")
    biases = tensor_of(parts["biases"], "F32") if mode == "affine" else None
    packed = tensor_of(parts["packed"], "U32")
    return Tensor(
        "w", mode, (*packed.shape[:-1], packed.shape[-1] * 32 // bits), packed.data, scales, biases, bits, group
    )


def mlx_golden() -> dict[tuple[str, int, int], dict[str, np.ndarray]]:
    cases: dict[tuple[str, int, int], dict[str, np.ndarray]] = {}
    with np.load(DATA / "mlx_quantized.npz") as arrays:
        for key in arrays:
            mode, bits, group, part = key.split("-")
            cases.setdefault((mode, int(bits), int(group)), {})[part] = arrays[key]
    return cases


@pytest.mark.parametrize("case", mlx_golden(), ids=lambda case: "-".join(map(str, case)))
def test_same_bits_as_mlx(case):
    parts = mlx_golden()[case]
    tensor = mlx_tensor(*case, parts)
    assert same_bits(dequantize(tensor), parts["values"])
    experts = mlx_tensor(*case, {key: np.stack([part, part[::-1]]) for key, part in parts.items()})
    assert same_bits(dequantize(experts), np.stack([parts["values"], parts["values"][::-1]]))
    assert bits_per_weight(tensor) == case[1] + (64 if case[0] == "affine" else 8) / case[2]


@pytest.mark.parametrize("scale_type", ["F16", "BF16"])
def test_half_scales_are_computed_in_float32(scale_type):
    scales, biases = np.array([[0.1, -3.0]], np.float32), np.array([[7.0, 0.3]], np.float32)
    if scale_type == "F16":
        stored = [part.astype(np.float16) for part in (scales, biases)]
        scales, biases = (part.astype(np.float32) for part in stored)
    else:
        stored = [(part.view(np.uint32) >> 16).astype(np.uint16) for part in (scales, biases)]
        scales, biases = ((part.astype(np.uint32) << 16).view(np.float32) for part in stored)
    codes = np.arange(64, dtype=np.uint8)[None]
    tensor = Tensor("w", "affine", (1, 64), codes, *(tensor_of(part, scale_type) for part in stored), 8, 32)
    expected = scales.repeat(32, axis=1) * codes + biases.repeat(32, axis=1)
    assert same_bits(dequantize(tensor), expected)


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_are_one_bit_stream(bits):
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 32))
    streams = [sum(int(code) << (bits * i) for i, code in enumerate(row)) for row in codes]
    packed = np.array([list(stream.to_bytes(4 * bits, "little")) for stream in streams], np.uint8)
    np.testing.assert_array_equal(unpack_codes(packed, bits), codes)


# ---- scales that are not finite -------------------------------------------------------------------------------------


def refused(tensor: Tensor) -> bool:
    try:
        check_scales(tensor)
    except BimetalError:
        return True
    return False


@pytest.mark.parametrize("name", QUANTIZED)
def test_block_scales_are_checked(name):
    blocks = adversarial_blocks(name)
    if name == "MXFP4":  # finite scales can overflow here, and ggml reads 0xFF as 2^127
        bad = blocks[:, 0] == 0xFF
    elif name == "NVFP4":
        bad = ((blocks[:, :4] & 0x7F) == 0x7F).any(axis=1)
    else:
        bad = ~np.isfinite(by_gguf(name, blocks)).all(axis=1)
    assert 0 < bad.sum() < len(bad)
    assert [refused(blocks_tensor(name, blocks[i : i + 1])) for i in range(len(blocks))] == bad.tolist()
    assert not refused(blocks_tensor(name, blocks[~bad]))
    with pytest.raises(BimetalError, match=f"'w' .* at block {bad.argmax()}$"):
        check_scales(blocks_tensor(name, blocks))


@pytest.mark.parametrize("case", mlx_golden(), ids=lambda case: "-".join(map(str, case)))
def test_mlx_scales_are_checked(case):
    parts = {key: part.copy() for key, part in mlx_golden()[case].items()}
    if case[0] == "affine":
        assert not refused(mlx_tensor(*case, parts))
        for part in ("scales", "biases"):
            for value in (np.nan, np.inf, -np.inf):
                broken = parts | {part: np.full_like(parts[part], value)}
                assert refused(mlx_tensor(*case, broken))
    else:
        nan = {0x7F, 0xFF} if case[0] == "nvfp4" else {0xFF}
        for byte in range(256):
            tensor = mlx_tensor(*case, parts | {"scales": np.full_like(parts["scales"], byte)})
            assert refused(tensor) == (byte in nan)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_vectors_are_checked(dtype):
    def vector(value: float) -> Tensor:
        values = np.array([1, value, 2], {"F64": "<f8", "F16": "<f2"}.get(dtype, "<f4"))
        if dtype == "BF16":
            values = (values.view(np.uint32) >> 16).astype(np.uint16)
        return tensor_of(values, dtype)

    assert not refused(vector(1000))
    assert all(refused(vector(value)) for value in (np.nan, np.inf, -np.inf))
    assert not refused(tensor_of(np.full((1, 2), np.nan, np.float32), "F32"))  # a matrix is too much to look through


@pytest.mark.parametrize("case", mlx_golden(), ids=lambda case: "-".join(map(str, case)))
def test_mlx_modes_as_blocks(case):
    """Codes keep their values; scales and biases of affine groups are rounded to float16."""
    parts = mlx_golden()[case]
    tensor = mlx_tensor(*case, {key: np.stack([part, part[::-1]]) for key, part in parts.items()})
    blocks = as_blocks(tensor)
    if block_type(*case[:2]) is None:
        assert blocks is tensor
        return
    assert (blocks.type, blocks.shape) == (block_type(*case[:2]), tensor.shape)
    floats = {key: part for key, part in parts.items() if part.dtype == np.float32}
    rounded = {key: part.astype(np.float16).astype(np.float32) for key, part in floats.items()}
    expected = dequantize(mlx_tensor(*case, parts | rounded))
    finite = np.isfinite(expected)  # MLX computes 2^127 of a group before it halves a value
    assert finite.mean() > 0.9
    for found, rows in zip(dequantize(blocks), (slice(None), slice(None, None, -1)), strict=True):
        assert np.array_equal(found[finite[rows]], expected[rows][finite[rows]])
