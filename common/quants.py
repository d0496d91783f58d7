"""Block formats: their sizes, and their decoding to float32.

A GGUF type stores a row as blocks; each decoder here takes blocks, uint8 (n, bytes), to float32 (n, elements), with
the operations in the order of ggml's, so that the bits agree. MLX's modes keep codes and scales in separate tensors.
Sources: ggml-common.h and ggml-quants.c of ggml-org/llama.cpp, gguf-py, and mlx.core.quantize (mlx 0.32).
"""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.errors import BimetalError
from common.tensors import Tensor


class Block(NamedTuple):
    """How a GGUF type stores a row: `bytes` bytes for every `elements` values; `id` is ggml's number for the type.

    halves    byte offsets of the float16 scales and minima in a block
    """

    id: int
    elements: int
    bytes: int
    halves: tuple[int, ...] = ()

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.elements


BLOCKS = {
    "F32": Block(0, 1, 4),
    "F16": Block(1, 1, 2),
    "Q4_0": Block(2, 32, 18, (0,)),
    "Q4_1": Block(3, 32, 20, (0, 2)),
    "Q5_0": Block(6, 32, 22, (0,)),
    "Q5_1": Block(7, 32, 24, (0, 2)),
    "Q8_0": Block(8, 32, 34, (0,)),
    "Q2_K": Block(10, 256, 84, (80, 82)),
    "Q3_K": Block(11, 256, 110, (108,)),
    "Q4_K": Block(12, 256, 144, (0, 2)),
    "Q5_K": Block(13, 256, 176, (0, 2)),
    "Q6_K": Block(14, 256, 210, (208,)),
    "IQ2_XXS": Block(16, 256, 66, (0,)),
    "IQ2_XS": Block(17, 256, 74, (0,)),
    "IQ3_XXS": Block(18, 256, 98, (0,)),
    "IQ1_S": Block(19, 256, 50, (0,)),
    "IQ4_NL": Block(20, 32, 18, (0,)),
    "IQ3_S": Block(21, 256, 110, (0,)),
    "IQ2_S": Block(22, 256, 82, (0,)),
    "IQ4_XS": Block(23, 256, 136, (0,)),
    "I8": Block(24, 1, 1),
    "I16": Block(25, 1, 2),
    "I32": Block(26, 1, 4),
    "I64": Block(27, 1, 8),
    "F64": Block(28, 1, 8),
    "IQ1_M": Block(29, 256, 56),
    "BF16": Block(30, 1, 2),
    "TQ1_0": Block(34, 256, 54, (52,)),
    "TQ2_0": Block(35, 256, 66, (64,)),
    "MXFP4": Block(39, 32, 17),
    "NVFP4": Block(40, 64, 36),
}

# of the `halves` of random blocks, so that weights are of the size that trained ones have
RANDOM_HALVES = {"Q4_K": (1e-4, 7.5e-4), "Q5_K": (5e-5, 7.5e-4), "Q5_0": (1.5e-3,), "Q5_1": (1.5e-3, -2.3e-2)}
RANDOM_HALVES |= {"Q6_K": (2e-5,), "Q4_0": (3e-3,), "Q8_0": (2e-4,)}

PLAIN = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1"},
    **{"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "<u1", "BOOL": "?"},
}  # and BF16, which NumPy lacks
CHUNK = 1 << 17  # values decoded at a time, so that temporaries stay in the cache and far below the result's size

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
FP4_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # ggml has no -0


def dequantize(tensor: Tensor, out: np.ndarray | None = None) -> np.ndarray:
    """The values of a tensor of any type, float32 of `tensor.shape`. Raises BimetalError for other types.

    A scale that is NaN or infinite gives what the arithmetic gives; `check_scales` refuses it.

    out  where the values go, contiguous and of that shape; None: a new array
    """
    out = np.empty(tensor.shape, np.float32) if out is None else out
    assert out.shape == tuple(tensor.shape)
    assert out.flags.c_contiguous
    with np.errstate(over="ignore", invalid="ignore"):
        if tensor.scales is not None:
            _decode_mlx(tensor, out.reshape(-1, tensor.shape[-1]))
        else:
            _decode_blocks(tensor, out.reshape(-1))
    return out


def bits_per_weight(tensor: Tensor) -> float:
    """Stored bits per value, scales and biases included."""
    return 8 * tensor.nbytes / math.prod(tensor.shape)


def check_scales(tensor: Tensor) -> None:
    """Raise BimetalError if a scale of a quantized tensor, or a value of a float vector, is NaN or infinite.

    Looks at the scales alone: a float matrix passes unseen.
    """
    if tensor.scales is not None:
        for part in (tensor.scales, tensor.biases):
            if part is not None:
                _refuse(part, _not_finite(part.data.reshape(-1), tensor.type if part.type == "U8" else part.type))
    elif tensor.type in BLOCKS and BLOCKS[tensor.type].elements > 1:
        size = BLOCKS[tensor.type].bytes
        blocks = tensor.data.reshape(-1, size)
        for start in range(0, len(blocks), CHUNK):
            _refuse(tensor, bad_blocks(blocks[start : start + CHUNK], tensor.type), start)
    elif len(tensor.shape) == 1 and tensor.type in ("F64", "F32", "F16", "BF16"):
        _refuse(tensor, _not_finite(tensor.data, tensor.type))


def _refuse(tensor: Tensor, bad: np.ndarray, start: int = 0) -> None:
    if bad.any():
        what = "block" if tensor.type in BLOCKS and BLOCKS[tensor.type].elements > 1 else "element"
        raise BimetalError(
            f"tensor {tensor.name!r} ({tensor.type}) is not finite at {what} {start + int(bad.argmax())}"
        )


def _not_finite(data: np.ndarray, type_: str) -> np.ndarray:
    """Which values are NaN or infinite; for a mode's name, which of its scale bytes are."""
    if type_ == "nvfp4":
        return (data & 0x7F) == 0x7F
    if type_ in ("mxfp4", "mxfp8"):
        return data == 0xFF
    if type_ == "BF16":
        return (data.view("<u2") & 0x7F80) == 0x7F80
    return ~np.isfinite(data.view(PLAIN[type_]))


def bad_blocks(blocks: np.ndarray, type_: str) -> np.ndarray:
    """Which blocks of a GGUF type, uint8 (n, bytes), have a scale that is NaN or infinite: bool (n,)"""
    if type_ == "MXFP4":
        return blocks[:, 0] == 0xFF
    if type_ == "NVFP4":
        return ((blocks[:, :4] & 0x7F) == 0x7F).any(axis=1)
    if type_ == "IQ1_M":
        return ~np.isfinite(_iq1_m_scale(blocks)[:, 0])
    halves = BLOCKS[type_].halves  # which lie together: taken out at once, so that what follows reads them in a row
    at, size = halves[0], 2 * len(halves)
    scales = blocks[:, at : at + size].view(f"<u{size}")[:, 0].copy().view("<u2").reshape(len(blocks), -1)
    bad = (scales & 0x7C00) == 0x7C00
    return bad.view(f"u{len(halves)}")[:, 0] != 0


def _decode_blocks(tensor: Tensor, out: np.ndarray) -> None:
    if tensor.type in PLAIN:
        elements, decode = 1, _plain(PLAIN[tensor.type])
        size = np.dtype(PLAIN[tensor.type]).itemsize
    elif tensor.type in DECODERS:
        _, elements, size, _ = BLOCKS[tensor.type]
        decode = DECODERS[tensor.type]
    else:
        raise BimetalError(f"tensor {tensor.name!r} has type {tensor.type!r}, which cannot be decoded")
    blocks = tensor.data.reshape(-1, size)
    out = out.reshape(-1, elements)
    step = CHUNK // elements
    for start in range(0, len(blocks), step):
        out[start : start + step] = decode(blocks[start : start + step])


def _plain(dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    return lambda blocks: blocks.view(dtype)


# ---- pieces of blocks -----------------------------------------------------------------------------------------------


def half_floats(data: np.ndarray) -> np.ndarray:
    """float16 scales, uint8 (n, 2k) → float32 (n, k)."""
    return data.view("<f2").astype(np.float32)


def bit_fields(data: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Bit fields, uint8 (n, k) → uint8 (n, k · 8 / bits): the lowest field of `run` bytes, then their next, ..."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return ((data.reshape(len(data), -1, 1, run) >> shifts) & np.uint8((1 << bits) - 1)).reshape(len(data), -1)


def _scaled(scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Each scale, (n, groups), times its group of codes, (n, elements)."""
    return (scales[:, :, None] * codes.reshape(*scales.shape, -1).astype(np.float32)).reshape(codes.shape)


def _shifted(scales: np.ndarray, codes: np.ndarray, minima: np.ndarray) -> np.ndarray:
    values = _scaled(scales, codes).reshape(*minima.shape, -1)
    values -= minima[:, :, None]
    return values.reshape(codes.shape)


# ---- 32 values ------------------------------------------------------------------------------------------------------


def _q4_0(b: np.ndarray) -> np.ndarray:
    return half_floats(b[:, :2]) * (bit_fields(b[:, 2:], 4, 16).astype(np.float32) - 8)


def _q4_1(b: np.ndarray) -> np.ndarray:
    return half_floats(b[:, :2]) * bit_fields(b[:, 4:], 4, 16) + half_floats(b[:, 2:4])


def _five_bits(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return (bit_fields(low, 4, 16) | (bit_fields(high, 1, 1) << 4)).astype(np.float32)


def _q5_0(b: np.ndarray) -> np.ndarray:
    return half_floats(b[:, :2]) * (_five_bits(b[:, 6:], b[:, 2:6]) - 16)


def _q5_1(b: np.ndarray) -> np.ndarray:
    return half_floats(b[:, :2]) * _five_bits(b[:, 8:], b[:, 4:8]) + half_floats(b[:, 2:4])


def _q8_0(b: np.ndarray) -> np.ndarray:
    return half_floats(b[:, :2]) * b[:, 2:].view(np.int8)


def _iq4_nl(b: np.ndarray) -> np.ndarray:
    return half_floats(b[:, :2]) * IQ4_VALUES[bit_fields(b[:, 2:], 4, 16)]


def _mxfp4(b: np.ndarray) -> np.ndarray:
    return _e8m0(b[:, :1], -128) * FP4_DOUBLED[bit_fields(b[:, 1:], 4, 16)]


def _nvfp4(b: np.ndarray) -> np.ndarray:  # 64 values, a scale for every 16
    return _scaled(_UE4M3_HALVED[b[:, :4]], FP4_DOUBLED[bit_fields(b[:, 4:], 4, 8)])


# ---- 256 values -----------------------------------------------------------------------------------------------------


def _q2_k(b: np.ndarray) -> np.ndarray:
    scales, minima = b[:, :16] & 15, b[:, :16] >> 4
    return _shifted(
        half_floats(b[:, 80:82]) * scales, bit_fields(b[:, 16:80], 2, 32), half_floats(b[:, 82:84]) * minima
    )


def _q3_k(b: np.ndarray) -> np.ndarray:
    scales = bit_fields(b[:, 96:104], 4, 8) | (bit_fields(b[:, 104:108], 2, 4) << 4)
    codes = bit_fields(b[:, 32:96], 2, 32) | (bit_fields(b[:, :32], 1, 32) << 2)  # a clear high bit subtracts 4
    return _scaled(half_floats(b[:, 108:]) * (scales.astype(np.float32) - 32), codes.astype(np.float32) - 4)


def k_scales(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima of the 8 groups of Q4_K and Q5_K, (n, 8) each: 6-bit numbers in bytes 4 to 16."""
    low, middle, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    return half_floats(b[:, :2]) * scales, half_floats(b[:, 2:4]) * minima


def _q4_k(b: np.ndarray) -> np.ndarray:
    scales, minima = k_scales(b)
    return _shifted(scales, bit_fields(b[:, 16:], 4, 32), minima)


def _q5_k(b: np.ndarray) -> np.ndarray:
    scales, minima = k_scales(b)
    return _shifted(scales, bit_fields(b[:, 48:], 4, 32) | (bit_fields(b[:, 16:48], 1, 32) << 4), minima)


def _q6_k(b: np.ndarray) -> np.ndarray:
    codes = bit_fields(b[:, :128], 4, 64) | (bit_fields(b[:, 128:192], 2, 32) << 4)
    return _scaled(half_floats(b[:, 208:]) * b[:, 192:208].view(np.int8), codes.astype(np.float32) - 32)


def _iq4_xs(b: np.ndarray) -> np.ndarray:
    scales = bit_fields(b[:, 4:8], 4, 1) | (bit_fields(b[:, 2:4], 2, 1) << 4)
    return _scaled(half_floats(b[:, :2]) * (scales.astype(np.float32) - 32), IQ4_VALUES[bit_fields(b[:, 8:], 4, 16)])


def _trits(data: np.ndarray, count: int, run: int) -> np.ndarray:
    """`count` digits -1, 0, 1 of each byte, which holds a fraction in base 3: times 3^k, the top digit is digit k."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
    rotated = data.reshape(len(data), -1, 1, run) * powers
    return ((rotated.astype(np.uint16) * 3) >> 8).reshape(len(data), -1).astype(np.float32) - 1


def _tq1_0(b: np.ndarray) -> np.ndarray:
    digits = [_trits(b[:, :32], 5, 32), _trits(b[:, 32:48], 5, 16), _trits(b[:, 48:52], 4, 4)]
    return half_floats(b[:, 52:]) * np.concatenate(digits, axis=1)


def _tq2_0(b: np.ndarray) -> np.ndarray:
    return half_floats(b[:, 64:]) * (bit_fields(b[:, :64], 2, 32).astype(np.float32) - 1)


# ---- 256 values, from codebooks -------------------------------------------------------------------------------------


@cache
def codebook(type_: str) -> np.ndarray:
    """The type's grid, float32 (entries, 4 or 8); tests/data/make_codebooks.py writes the file."""
    with np.load(Path(__file__).with_name("codebooks.npz")) as grids:
        return grids[type_].astype(np.float32)


@cache
def _sign_patterns() -> np.ndarray:
    """±1, float32 (128, 8): 7 stored signs, and an eighth that makes the number of minus signs even."""
    bits = np.unpackbits(np.arange(128, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    bits[:, 7] = bits.sum(axis=1) % 2
    return 1 - 2 * bits.astype(np.float32)


def _signs(data: np.ndarray) -> np.ndarray:
    """One sign per bit, uint8 (n, k) → float32 ±1 (n, 8k)."""
    return 1 - 2 * bit_fields(data, 1, 1).astype(np.float32)


def _grid(type_: str, codes: np.ndarray) -> np.ndarray:
    return codebook(type_)[codes].reshape(len(codes), -1)


def _packed_signs(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A 4-bit scale, (n, k), over the four 7-bit sign patterns of 32 values, (n, 32k), from uint32 words, (n, k)."""
    patterns = (words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32)) & np.uint32(127)
    return (words >> 28).astype(np.float32), _sign_patterns()[patterns].reshape(len(words), -1)


def _iq2_xxs(b: np.ndarray) -> np.ndarray:
    scales, signs = _packed_signs(b[:, 2:].view("<u4")[:, 1::2])
    codes = b[:, 2:].reshape(len(b), 8, 8)[:, :, :4].reshape(len(b), 32)
    return _scaled(half_floats(b[:, :2]) * (scales + 0.5) * 0.25, _grid("IQ2_XXS", codes) * signs)


def _iq2_xs(b: np.ndarray) -> np.ndarray:
    codes, scales = b[:, 2:66].view("<u2"), bit_fields(b[:, 66:], 4, 1).astype(np.float32)
    signs = _sign_patterns()[codes >> 9].reshape(len(b), -1)
    return _scaled(half_floats(b[:, :2]) * (scales + 0.5) * 0.25, _grid("IQ2_XS", codes & 511) * signs)


def _iq2_s(b: np.ndarray) -> np.ndarray:
    codes = b[:, 2:34] | (bit_fields(b[:, 66:74], 2, 1).astype(np.uint16) << 8)
    scales = bit_fields(b[:, 74:], 4, 1).astype(np.float32)
    return _scaled(half_floats(b[:, :2]) * (scales + 0.5) * 0.25, _grid("IQ2_S", codes) * _signs(b[:, 34:66]))


def _iq3_xxs(b: np.ndarray) -> np.ndarray:
    scales, signs = _packed_signs(b[:, 66:].view("<u4"))
    return _scaled(half_floats(b[:, :2]) * (scales + 0.5) * 0.5, _grid("IQ3_XXS", b[:, 2:66]) * signs)


def _iq3_s(b: np.ndarray) -> np.ndarray:
    codes = b[:, 2:66] | (bit_fields(b[:, 66:74], 1, 1).astype(np.uint16) << 8)
    scales = bit_fields(b[:, 106:], 4, 1).astype(np.float32)
    return _scaled(half_floats(b[:, :2]) * (2 * scales + 1), _grid("IQ3_S", codes) * _signs(b[:, 74:106]))


def _iq1_s(b: np.ndarray) -> np.ndarray:
    words = b[:, 34:].view("<u2")
    codes = b[:, 2:34] | (_threes(words) << 8)
    delta = np.where(words & 0x8000, np.float32(-0.125), np.float32(0.125)).repeat(32, axis=1)
    scales = 2 * ((words >> 12) & 7).astype(np.float32) + 1
    return _scaled(half_floats(b[:, :2]) * scales, _grid("IQ1_S", codes) + delta)


def _iq1_m(b: np.ndarray) -> np.ndarray:
    high = bit_fields(b[:, 32:48], 4, 1)
    codes = b[:, :32] | ((high & 7).astype(np.uint16) << 8)
    delta = np.where(high & 8, np.float32(-0.125), np.float32(0.125)).repeat(8, axis=1)
    scales = 2 * _threes(b[:, 48:].view("<u2")).astype(np.float32) + 1
    return _scaled(_iq1_m_scale(b) * scales, _grid("IQ1_S", codes) + delta)


def _threes(words: np.ndarray) -> np.ndarray:
    """The four low 3-bit fields of each uint16, (n, k) → (n, 4k)."""
    return ((words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16)) & np.uint16(7)).reshape(len(words), -1)


def _iq1_m_scale(b: np.ndarray) -> np.ndarray:
    """The float16 scale of IQ1_M, (n, 1): its four nibbles are on top of the four words of small scales."""
    nibbles = (b[:, 48:].view("<u2") >> 12) << np.arange(0, 16, 4, dtype=np.uint16)
    return nibbles.sum(axis=1, dtype=np.uint16)[:, None].view(np.float16).astype(np.float32)


DECODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "BF16": lambda b: (b.view("<u2").astype(np.uint32) << 16).view(np.float32),
    **{"Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0},
    **{"Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k},
    **{"IQ1_S": _iq1_s, "IQ1_M": _iq1_m, "IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s},
    **{"IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs},
    **{"TQ1_0": _tq1_0, "TQ2_0": _tq2_0, "MXFP4": _mxfp4, "NVFP4": _nvfp4},
}


# ---- 8-bit floats and MLX's modes -----------------------------------------------------------------------------------


def _e8m0(exponents: np.ndarray, bias: int) -> np.ndarray:
    """2^(exponent + bias), float32."""
    return np.ldexp(np.float32(1), exponents.astype(np.int32) + bias)


def _e4m3_table() -> np.ndarray:
    """float32 (256,): sign, 4 exponent bits with bias 7, 3 bits of mantissa; no infinity, 0x7F is NaN."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).astype(np.float32)
    values = np.where(exponent == 0, mantissa / 512, np.ldexp(1 + mantissa / 8, exponent - 7)).astype(np.float32)
    values[0x7F] = np.nan
    return np.where(codes < 128, values, -values[codes & 0x7F])


_E4M3 = _e4m3_table()
_UE4M3_HALVED = np.abs(_E4M3) / 2  # as ggml reads NVFP4's scales: no sign, and NaN is 0 there (480 under a sign bit)
_UE4M3_HALVED[[0x7F, 0xFF]] = 0, 240


FP_MODES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], np.ndarray]] = {
    "mxfp4": (lambda scales: _e8m0(scales, -127), FP4_VALUES),
    "mxfp8": (lambda scales: _e8m0(scales, -127), _E4M3),
    "nvfp4": (lambda scales: _E4M3[scales], FP4_VALUES),
}


def unpack_codes(packed: np.ndarray, bits: int) -> np.ndarray:
    """MLX's codes, a bit stream from the lowest bit up: uint8 (rows, bytes) → uint8 (rows, bytes · 8 / bits)."""
    eights = np.zeros((packed.size // bits, 8), np.uint8)  # 8 codes take `bits` bytes; widened to one uint64
    eights[:, :bits] = packed.reshape(-1, bits)
    codes = eights.view("<u8") >> np.arange(0, 8 * bits, bits, dtype=np.uint64)
    return codes.astype(np.uint8).reshape(len(packed), -1) & np.uint8((1 << bits) - 1)


def _decode_mlx(tensor: Tensor, out: np.ndarray) -> None:
    assert tensor.scales is not None
    packed = tensor.data.reshape(len(out), -1)
    scales = tensor.scales.data.reshape(len(out), -1)
    step = max(1, CHUNK // out.shape[1])
    for start in range(0, len(out), step):
        rows = slice(start, start + step)
        codes = unpack_codes(packed[rows], tensor.bits)
        if tensor.type in FP_MODES:
            scale, values = FP_MODES[tensor.type]
            out[rows] = _scaled(scale(scales[rows]), values[codes])
        else:
            assert tensor.biases is not None
            biases = floats(tensor.biases.data.reshape(len(out), -1)[rows], tensor.biases.type)
            out[rows] = _shifted(floats(scales[rows], tensor.scales.type), codes, -biases)


def floats(data: np.ndarray, type_: str) -> np.ndarray:
    """Stored floats, uint8 (rows, bytes) → float32 (rows, count)."""
    return DECODERS["BF16"](data) if type_ == "BF16" else data.view(PLAIN[type_]).astype(np.float32)
