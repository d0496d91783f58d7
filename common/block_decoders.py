"""Decode GGUF's block types: uint8 (n, bytes) to float32 (n, elements).

Operations come in the order of ggml's, so that the bits agree. Sources: ggml-common.h and ggml-quants.c of
ggml-org/llama.cpp, and gguf-py.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
FP4_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # ggml has no -0


# ---- 8-bit floats ---------------------------------------------------------------------------------------------------


def e8m0(exponents: np.ndarray, bias: int) -> np.ndarray:
    """Return 2^(exponent + bias), float32."""
    return np.ldexp(np.float32(1), exponents.astype(np.int32) + bias)


def _e4m3_table() -> np.ndarray:
    """Return the value of each code, float32 (256,): sign, 4 exponent bits (bias 7), 3 of mantissa; 0x7F is NaN."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).astype(np.float32)
    values = np.where(exponent == 0, mantissa / 512, np.ldexp(1 + mantissa / 8, exponent - 7)).astype(np.float32)
    values[0x7F] = np.nan
    return np.where(codes < 128, values, -values[codes & 0x7F])


E4M3 = _e4m3_table()
_UE4M3_HALVED = np.abs(E4M3) / 2  # as ggml reads NVFP4's scales: no sign, and NaN is 0 there (480 under a sign bit)
_UE4M3_HALVED[[0x7F, 0xFF]] = 0, 240


# ---- pieces of blocks -----------------------------------------------------------------------------------------------


def half_floats(data: np.ndarray) -> np.ndarray:
    """Read float16 scales, uint8 (n, 2k) → float32 (n, k)."""
    return data.view("<f2").astype(np.float32)


def bit_fields(data: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Unpack fields, uint8 (n, k) → uint8 (n, k · 8 / bits): the lowest field of `run` bytes, then their next, ..."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return ((data.reshape(len(data), -1, 1, run) >> shifts) & np.uint8((1 << bits) - 1)).reshape(len(data), -1)


def scaled(scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return each scale, (n, groups), times its group of codes, (n, elements)."""
    return (scales[:, :, None] * codes.reshape(*scales.shape, -1).astype(np.float32)).reshape(codes.shape)


def shifted(scales: np.ndarray, codes: np.ndarray, minima: np.ndarray) -> np.ndarray:
    values = scaled(scales, codes).reshape(*minima.shape, -1)
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
    return e8m0(b[:, :1], -128) * FP4_DOUBLED[bit_fields(b[:, 1:], 4, 16)]


def _nvfp4(b: np.ndarray) -> np.ndarray:  # 64 values, a scale for every 16
    return scaled(_UE4M3_HALVED[b[:, :4]], FP4_DOUBLED[bit_fields(b[:, 4:], 4, 8)])


# ---- 256 values -----------------------------------------------------------------------------------------------------


def _q2_k(b: np.ndarray) -> np.ndarray:
    scales, minima = b[:, :16] & 15, b[:, :16] >> 4
    return shifted(half_floats(b[:, 80:82]) * scales, bit_fields(b[:, 16:80], 2, 32), half_floats(b[:, 82:84]) * minima)


def _q3_k(b: np.ndarray) -> np.ndarray:
    scales = bit_fields(b[:, 96:104], 4, 8) | (bit_fields(b[:, 104:108], 2, 4) << 4)
    codes = bit_fields(b[:, 32:96], 2, 32) | (bit_fields(b[:, :32], 1, 32) << 2)  # a clear high bit subtracts 4
    return scaled(half_floats(b[:, 108:]) * (scales.astype(np.float32) - 32), codes.astype(np.float32) - 4)


def k_scales(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Read scales and minima of the 8 groups of Q4_K and Q5_K, (n, 8) each: 6-bit numbers in bytes 4 to 16."""
    low, middle, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    return half_floats(b[:, :2]) * scales, half_floats(b[:, 2:4]) * minima


def _q4_k(b: np.ndarray) -> np.ndarray:
    scales, minima = k_scales(b)
    return shifted(scales, bit_fields(b[:, 16:], 4, 32), minima)


def _q5_k(b: np.ndarray) -> np.ndarray:
    scales, minima = k_scales(b)
    return shifted(scales, bit_fields(b[:, 48:], 4, 32) | (bit_fields(b[:, 16:48], 1, 32) << 4), minima)


def _q6_k(b: np.ndarray) -> np.ndarray:
    codes = bit_fields(b[:, :128], 4, 64) | (bit_fields(b[:, 128:192], 2, 32) << 4)
    return scaled(half_floats(b[:, 208:]) * b[:, 192:208].view(np.int8), codes.astype(np.float32) - 32)


def _iq4_xs(b: np.ndarray) -> np.ndarray:
    scales = bit_fields(b[:, 4:8], 4, 1) | (bit_fields(b[:, 2:4], 2, 1) << 4)
    return scaled(half_floats(b[:, :2]) * (scales.astype(np.float32) - 32), IQ4_VALUES[bit_fields(b[:, 8:], 4, 16)])


def _trits(data: np.ndarray, count: int, run: int) -> np.ndarray:
    """Unpack `count` digits -1, 0, 1 of each byte, a fraction in base 3: times 3^k, its top digit is digit k."""
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
    """Return the type's grid, float32 (entries, 4 or 8); tests/data/make_codebooks.py writes the file."""
    with np.load(Path(__file__).with_name("codebooks.npz")) as grids:
        return grids[type_].astype(np.float32)


@cache
def _sign_patterns() -> np.ndarray:
    """Return ±1, float32 (128, 8): 7 stored signs, and an eighth that makes the number of minus signs even."""
    bits = np.unpackbits(np.arange(128, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    bits[:, 7] = bits.sum(axis=1) % 2
    return 1 - 2 * bits.astype(np.float32)


def _signs(data: np.ndarray) -> np.ndarray:
    """Return one sign per bit, uint8 (n, k) → float32 ±1 (n, 8k)."""
    return 1 - 2 * bit_fields(data, 1, 1).astype(np.float32)


def _grid(type_: str, codes: np.ndarray) -> np.ndarray:
    return codebook(type_)[codes].reshape(len(codes), -1)


def _packed_signs(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Read uint32 words (n, k): a 4-bit scale, (n, k), above four 7-bit sign patterns, ±1 of 32 values, (n, 32k)."""
    patterns = (words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32)) & np.uint32(127)
    return (words >> 28).astype(np.float32), _sign_patterns()[patterns].reshape(len(words), -1)


def _iq2_xxs(b: np.ndarray) -> np.ndarray:
    scales, signs = _packed_signs(b[:, 2:].view("<u4")[:, 1::2])
    codes = b[:, 2:].reshape(len(b), 8, 8)[:, :, :4].reshape(len(b), 32)
    return scaled(half_floats(b[:, :2]) * (scales + 0.5) * 0.25, _grid("IQ2_XXS", codes) * signs)


def _iq2_xs(b: np.ndarray) -> np.ndarray:
    codes, scales = b[:, 2:66].view("<u2"), bit_fields(b[:, 66:], 4, 1).astype(np.float32)
    signs = _sign_patterns()[codes >> 9].reshape(len(b), -1)
    return scaled(half_floats(b[:, :2]) * (scales + 0.5) * 0.25, _grid("IQ2_XS", codes & 511) * signs)


def _iq2_s(b: np.ndarray) -> np.ndarray:
    codes = b[:, 2:34] | (bit_fields(b[:, 66:74], 2, 1).astype(np.uint16) << 8)
    scales = bit_fields(b[:, 74:], 4, 1).astype(np.float32)
    return scaled(half_floats(b[:, :2]) * (scales + 0.5) * 0.25, _grid("IQ2_S", codes) * _signs(b[:, 34:66]))


def _iq3_xxs(b: np.ndarray) -> np.ndarray:
    scales, signs = _packed_signs(b[:, 66:].view("<u4"))
    return scaled(half_floats(b[:, :2]) * (scales + 0.5) * 0.5, _grid("IQ3_XXS", b[:, 2:66]) * signs)


def _iq3_s(b: np.ndarray) -> np.ndarray:
    codes = b[:, 2:66] | (bit_fields(b[:, 66:74], 1, 1).astype(np.uint16) << 8)
    scales = bit_fields(b[:, 106:], 4, 1).astype(np.float32)
    return scaled(half_floats(b[:, :2]) * (2 * scales + 1), _grid("IQ3_S", codes) * _signs(b[:, 74:106]))


def _iq1_s(b: np.ndarray) -> np.ndarray:
    words = b[:, 34:].view("<u2")
    codes = b[:, 2:34] | (_threes(words) << 8)
    delta = np.where(words & 0x8000, np.float32(-0.125), np.float32(0.125)).repeat(32, axis=1)
    scales = 2 * ((words >> 12) & 7).astype(np.float32) + 1
    return scaled(half_floats(b[:, :2]) * scales, _grid("IQ1_S", codes) + delta)


def _iq1_m(b: np.ndarray) -> np.ndarray:
    high = bit_fields(b[:, 32:48], 4, 1)
    codes = b[:, :32] | ((high & 7).astype(np.uint16) << 8)
    delta = np.where(high & 8, np.float32(-0.125), np.float32(0.125)).repeat(8, axis=1)
    scales = 2 * _threes(b[:, 48:].view("<u2")).astype(np.float32) + 1
    return scaled(iq1_m_scale(b) * scales, _grid("IQ1_S", codes) + delta)


def _threes(words: np.ndarray) -> np.ndarray:
    """Return the four low 3-bit fields of each uint16, (n, k) → (n, 4k)."""
    return ((words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16)) & np.uint16(7)).reshape(len(words), -1)


def iq1_m_scale(b: np.ndarray) -> np.ndarray:
    """Return the float16 scale of IQ1_M, (n, 1): its four nibbles are on top of the four words of small scales."""
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
