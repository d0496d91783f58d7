"""Formats of KV caches: encode and decode a head's vector in NumPy.

A vector of one token and one head is cut into groups, and each group becomes a block of bytes. Nothing is shared
between tokens: rows can be appended, moved and dropped. Arithmetic is float32 in a stated order, so that the codes of a
kernel on any backend are these codes, bit for bit.

f16, bf16                  numbers
q4_0 q4_1 q5_0 q5_1 q8_0   ggml's blocks of 32 (ggml-quants.c of ggml-org/llama.cpp)
lm2 lm3 lm4                Lloyd-Max codes of the unit vector, and one norm: Gaussian tables (Max 1960, Lloyd 1982)
tq3_0                      as lm3 with lucebox's table; `to_blocks` gives its file layout, a norm for every 32 values
turboquant                 keys: tq3_0 codes, a raw norm, and the residual's signs under a second rotation (QJL, arXiv
                           2504.19874), with the scale that an orthonormal projection takes

The Lloyd-Max formats are made for the coordinates of a randomly rotated vector: `common.hadamard.rotate` before encode,
`unrotate` after decode.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from common.block_decoders import DECODERS
from common.errors import BimetalError
from common.hadamard import GROUPS, group_of, signs, wht

BLOCK = 32  # values of one ggml block
LANES = 32  # partial sums of a group's squares: the lanes of a kernel
MOST = np.float32(65504)  # float16's largest finite number

# positive centroids of the optimal quantizer of N(0, 1), and the positive boundaries between them
LLOYD_MAX: dict[int, tuple[tuple[float, ...], tuple[float, ...]]] = {
    2: ((0.4527800346, 1.510417608), (0.9815988216,)),
    3: ((0.2450941789, 0.7560052812, 1.343909279, 2.151945705), (0.5005497301, 1.04995728, 1.747927492)),
    4: (
        (0.1283950299, 0.3880482995, 0.6567591185, 0.9423404565, 1.256231197, 1.618046386, 2.069017227, 2.732589571),
        (0.2582216647, 0.522403709, 0.7995497875, 1.099285827, 1.437138792, 1.843531806, 2.400803399),
    ),
}
# lucebox's, for a unit vector of 128
TQ3: tuple[tuple[float, ...], tuple[float, ...]] = (
    (0.021460, 0.065717, 0.117832, 0.190685),
    (0.043589, 0.091775, 0.154259),
)


@cache
def table(name: str, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (centroids, boundaries), ascending float32, of a format's codes in a unit vector of `group` numbers."""
    is_tq3 = name in ("tq3_0", "turboquant")
    centroids, boundaries = TQ3 if is_tq3 else LLOYD_MAX[int(name[2:])]
    scale = ((128 if is_tq3 else 1) / group) ** 0.5
    positive, above = np.array(centroids) * scale, np.array(boundaries) * scale
    ascending = np.concatenate([-positive[::-1], positive])
    return ascending.astype(np.float32), np.concatenate([-above[::-1], [0], above]).astype(np.float32)


# -- bits -------------------------------------------------------------------------------------------------------------


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack fields of 1, 2 or 4 bits into bytes, the first lowest: uint8 (..., n) -> (..., n * bits / 8)."""
    fields = _split(codes, 8 // bits)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return np.bitwise_or.reduce(fields << shifts, axis=-1).astype(np.uint8)


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Return the inverse of `pack`."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    fields = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return fields.reshape(*packed.shape[:-1], packed.shape[-1] * 8 // bits)


def _split(x: np.ndarray, size: int) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _halves(x: np.ndarray) -> np.ndarray:
    """Return the bytes of float32 (...) as float16, (..., 2); finite numbers stay finite."""
    held = np.where(np.isfinite(x), np.clip(x, -MOST, MOST), x)
    return held[..., None].astype("<f2").view(np.uint8)


def _floats(b: np.ndarray) -> np.ndarray:
    """Read the bytes of float16 numbers: (..., 2) -> float32 (...)."""
    return np.ascontiguousarray(b).view("<f2")[..., 0].astype(np.float32)


# -- numbers ----------------------------------------------------------------------------------------------------------


def _f16(x: np.ndarray) -> np.ndarray:
    return x.astype("<f2").view(np.uint8)


def _from_f16(b: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(b).view("<f2").astype(np.float32)


def _bf16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest, ties to even
    return np.where(np.isnan(x), (bits >> 16) | 64, rounded).astype("<u2").view(np.uint8)


def _from_bf16(b: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(b).view("<u2").astype(np.uint32) << 16).view(np.float32)


# -- ggml's blocks of 32 ----------------------------------------------------------------------------------------------


def _inverse(d: np.ndarray) -> np.ndarray:
    """Compute 1 / d; 0 where d is 0 or so small that its inverse is infinite."""
    inverse = np.divide(1, d, out=np.zeros_like(d), where=d != 0)
    return np.where(np.isinf(inverse), np.float32(0), inverse)


def _codes(x: np.ndarray, largest: int) -> np.ndarray:
    """Truncate x >= 0 to codes up to `largest`; where x is NaN the code is 0, and the block's scale is NaN."""
    return np.minimum(np.nan_to_num(x, nan=0, posinf=largest), largest).astype(np.uint8)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Return the low four bits of 32 codes: 16 bytes, the first half of the codes low."""
    low = codes & 15
    return low[..., :16] | (low[..., 16:] << 4)


def _fifth_bits(codes: np.ndarray) -> np.ndarray:
    return pack(codes >> 4, 1)


def _signed(x: np.ndarray, bits: int) -> np.ndarray:
    """Encode q4_0, q5_0: (code - 2^(bits-1)) * d, where d takes the number of largest magnitude to the lowest code."""
    blocks, half = _split(x, BLOCK), 1 << (bits - 1)
    at = np.abs(blocks).argmax(axis=-1, keepdims=True)
    d = np.take_along_axis(blocks, at, axis=-1)[..., 0] / np.float32(-half)
    codes = _codes(blocks * _inverse(d)[..., None] + np.float32(half + 0.5), 2 * half - 1)
    high = [_fifth_bits(codes)] if bits == 5 else []
    return np.concatenate([_halves(d), *high, _nibbles(codes)], axis=-1)


def _shifted(x: np.ndarray, bits: int) -> np.ndarray:
    """Encode q4_1, q5_1: code * d + m."""
    blocks, most = _split(x, BLOCK), (1 << bits) - 1
    low = blocks.min(axis=-1)
    d = (blocks.max(axis=-1) - low) / np.float32(most)
    codes = _codes((blocks - low[..., None]) * _inverse(d)[..., None] + np.float32(0.5), most)
    high = [_fifth_bits(codes)] if bits == 5 else []
    return np.concatenate([_halves(d), _halves(low), *high, _nibbles(codes)], axis=-1)


def _q8_0(x: np.ndarray) -> np.ndarray:
    blocks = _split(x, BLOCK)
    d = np.abs(blocks).max(axis=-1) / np.float32(127)
    scaled = blocks * _inverse(d)[..., None]
    codes = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))  # halves away from zero
    return np.concatenate([_halves(d), np.nan_to_num(codes).astype(np.int8).view(np.uint8)], axis=-1)


def _from_ggml(b: np.ndarray, name: str) -> np.ndarray:
    if not b.size:
        return np.empty((*b.shape[:-1], BLOCK), np.float32)
    return DECODERS[name](b.reshape(-1, b.shape[-1])).reshape(*b.shape[:-1], BLOCK)


# -- Lloyd-Max codes --------------------------------------------------------------------------------------------------


def norms(x: np.ndarray) -> np.ndarray:
    """Compute sqrt of the sum of squares of each group, (..., group) -> (...), in the order of a kernel of 32 lanes."""
    squares = np.square(_split(x, x.shape[-1] // LANES))
    total = squares[..., 0]
    for i in range(1, squares.shape[-1]):
        total = total + squares[..., i]
    while total.shape[-1] > 1:
        total = total[..., 0::2] + total[..., 1::2]
    return np.sqrt(total[..., 0])


def _unit(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the norms of groups, and the groups divided by them; a group of norm 0 stays 0."""
    n = norms(groups)
    return n, groups * _inverse(n)[..., None]


def _indices(unit: np.ndarray, name: str) -> np.ndarray:
    """Compute the code of every number: the count of boundaries at or below it."""
    return np.searchsorted(table(name, unit.shape[-1])[1], unit, side="right").astype(np.uint8)


def _packed_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes of 2 or 4 bits; of 3 bits the low two of all codes, then the high ones."""
    if bits == 3:
        return np.concatenate([pack(codes & 3, 2), pack(codes >> 2, 1)], axis=-1)
    return pack(codes, bits)


def _unpacked_codes(b: np.ndarray, bits: int) -> np.ndarray:
    if bits == 3:
        low = b.shape[-1] * 2 // 3
        return unpack(b[..., :low], 2) | (unpack(b[..., low:], 1) << 2)
    return unpack(b, bits)


def _lloyd_max(x: np.ndarray, name: str, bits: int) -> np.ndarray:
    """Encode rotated `x`: a scale that keeps the group's norm, then its codes."""
    groups = _split(x, group_of(x.shape[-1]))
    n, unit = _unit(groups)
    codes = _indices(unit, name)
    scale = n * _inverse(norms(table(name, unit.shape[-1])[0][codes]))
    scale = np.where(np.isfinite(n), scale, n)
    return np.concatenate([_halves(scale), _packed_codes(codes, bits)], axis=-1)


def _from_lloyd_max(b: np.ndarray, name: str, bits: int) -> np.ndarray:
    codes = _unpacked_codes(b[..., 2:], bits)
    return table(name, codes.shape[-1])[0][codes] * _floats(b[..., :2])[..., None]


def _turboquant(x: np.ndarray) -> np.ndarray:
    """Encode raw norm, norm of the unit vector's residual, 3-bit codes, and signs of the residual rotated again."""
    groups = _split(x, group_of(x.shape[-1]))
    n, unit = _unit(groups)
    codes = _indices(unit, "turboquant")
    group = unit.shape[-1]
    residual = unit - table("turboquant", group)[0][codes]
    positive = wht(residual, signs("Q1", group), signs("Q2", group)) >= 0
    parts = [_halves(n), _halves(norms(residual) * (n != 0)), _packed_codes(codes, 3)]
    return np.concatenate([*parts, pack(positive.astype(np.uint8), 1)], axis=-1)


def _from_turboquant(b: np.ndarray) -> np.ndarray:
    bits = (b.shape[-1] - 4) // 4  # bytes of one bit of every number
    codes, group = _unpacked_codes(b[..., 4 : 4 + 3 * bits], 3), 8 * bits
    projected = 2 * unpack(b[..., 4 + 3 * bits :], 1).astype(np.float32) - 1
    residual = wht(projected, signs("Q2", group), signs("Q1", group))
    kappa = np.float32((np.pi / 2 / group) ** 0.5) * _floats(b[..., 2:4])
    return (table("turboquant", group)[0][codes] + kappa[..., None] * residual) * _floats(b[..., :2])[..., None]


# -- the table of formats ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """Encoding of a head's vector in a cache.

    bits     of a code, without scales
    scales   bytes of a group's scales
    group    values of a block; 0: `group_of` the head
    encode   float32 (..., n) -> bytes of each group, uint8 (..., groups, block bytes)
    decode   the inverse, (..., groups, group) float32
    """

    name: str
    bits: int
    scales: int
    group: int
    _encode: Callable[[np.ndarray], np.ndarray]
    _decode: Callable[[np.ndarray], np.ndarray]

    def block(self, dim: int) -> tuple[int, int]:
        """Return (values, bytes) of a block of heads of `dim`; raises BimetalError for heads that it cannot store."""
        group = self.group or group_of(dim)
        if not group or dim % group:
            raise BimetalError(
                f"{self.name} stores heads whose size is a multiple of {self.group or GROUPS[-1]}, not {dim}; "
                "supported for this size: " + ", ".join(f.name for f in FORMATS.values() if not dim % (f.group or 32))
            )
        return group, self.scales + group * self.bits // 8

    def row_bytes(self, dim: int) -> int:
        """Count the bytes of a vector of `dim` numbers."""
        group, size = self.block(dim)
        return dim // group * size

    def encode(self, x: np.ndarray) -> np.ndarray:
        """Encode float32 (..., dim) as uint8 (..., row_bytes(dim)). NaN in a vector makes one of its scales NaN."""
        size = self.row_bytes(x.shape[-1])
        with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
            blocks = self._encode(np.ascontiguousarray(x, np.float32))
        return blocks.reshape(*x.shape[:-1], size)

    def decode(self, rows: np.ndarray, dim: int) -> np.ndarray:
        """Decode uint8 (..., row_bytes(dim)) to float32 (..., dim)."""
        with np.errstate(over="ignore", invalid="ignore"):
            return self._decode(_split(rows, self.block(dim)[1])).reshape(*rows.shape[:-1], dim)


def _ggml(name: str, bits: int, scales: int, encode: Callable[[np.ndarray], np.ndarray]) -> Format:
    return Format(name, bits, scales, BLOCK, encode, partial(_from_ggml, name=name.upper()))


def _lm(name: str, bits: int) -> Format:
    encode, decode = partial(_lloyd_max, name=name, bits=bits), partial(_from_lloyd_max, name=name, bits=bits)
    return Format(name, bits, 2, 0, encode, decode)


FORMATS = {
    f.name: f
    for f in (
        Format("f16", 16, 0, 1, _f16, _from_f16),
        Format("bf16", 16, 0, 1, _bf16, _from_bf16),
        _ggml("q4_0", 4, 2, partial(_signed, bits=4)),
        _ggml("q4_1", 4, 4, partial(_shifted, bits=4)),
        _ggml("q5_0", 5, 2, partial(_signed, bits=5)),
        _ggml("q5_1", 5, 4, partial(_shifted, bits=5)),
        _ggml("q8_0", 8, 2, _q8_0),
        _lm("tq3_0", 3),
        _lm("lm2", 2),
        _lm("lm3", 3),
        _lm("lm4", 4),
        Format("turboquant", 4, 4, 0, _turboquant, _from_turboquant),
    )
}


# -- tq3_0's file layout ----------------------------------------------------------------------------------------------


def to_blocks(rows: np.ndarray) -> np.ndarray:
    """Convert tq3_0 rows, uint8 (..., n * 50), to lucebox's blocks of 32 values, (..., n * 56): the norm four times."""
    groups = _split(rows, 50)
    norm = np.broadcast_to(groups[..., None, :2], (*groups.shape[:-1], 4, 2))
    parts = [norm, _split(groups[..., 2:34], 8), _split(groups[..., 34:], 4)]
    return np.concatenate(parts, axis=-1).reshape(*rows.shape[:-1], -1)
