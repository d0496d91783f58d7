"""common/kv_formats.py on MLX arrays: the composed form, for any device.

Arithmetic is float32 in the definition's order; only the Walsh-Hadamard transform may add in another order, so that a
number within 1e-6 of a boundary may get the neighbouring code.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

import mlx.core as mx
import numpy as np

from common.hadamard import group_of, signs
from common.kv_formats import BLOCK, FORMATS, LANES, MOST, table
from common.storage import NATIVE, Plane
from mlx_backend import kv_kernels
from mlx_backend.hadamard import wht


class Coder:
    """Writes and reads the rows of one plane, (1, K, n, D) in the activations' dtype."""

    def __init__(self, plane: Plane, dtype: mx.Dtype):
        self.plane, self.dtype = plane, dtype

    def empty(self) -> mx.array:
        p = self.plane
        if p.format == NATIVE:
            return mx.zeros((1, p.heads, 0, p.dim), self.dtype)
        return mx.zeros((1, p.heads, 0, FORMATS[p.format].row_bytes(p.dim)), mx.uint8)

    def encode(self, rows: mx.array) -> mx.array:
        if self.plane.format == NATIVE:
            return rows
        if kv_kernels.encodes(self.plane):
            return kv_kernels.encode([rows], [self.plane])[0]
        rows = rows.astype(mx.float32)
        return encode(rotate(rows) if self.plane.rotated else rows, self.plane.format)

    def decode(self, rows: mx.array) -> mx.array:
        if self.plane.format == NATIVE:
            return rows
        values = decode(rows, self.plane.format, self.plane.dim)
        return (_transformed(values, "S2", "S1") if self.plane.rotated else values).astype(self.dtype)


def encoded(coders: Sequence[Coder], rows: Sequence[mx.array]) -> list[mx.array]:
    """Encode rows (1, K, T, D) of each plane, by one launch if a kernel writes them all."""
    planes = [coder.plane for coder in coders]
    if all(map(kv_kernels.encodes, planes)) and len({x.dtype for x in rows}) == 1:
        return kv_kernels.encode(rows, planes)
    return [coder.encode(x) for coder, x in zip(coders, rows, strict=True)]


@cache
def _signs(name: str, group: int) -> mx.array:
    return mx.array(signs(name, group))


def _transformed(x: mx.array, before: str, after: str) -> mx.array:
    """Return each group of x (..., dim) between two sequences of signs, float32."""
    if not x.size:
        return x
    group = group_of(x.shape[-1])
    return wht(_split(x, group), _signs(before, group), _signs(after, group)).reshape(x.shape)


def rotate(x: mx.array) -> mx.array:
    """Compute `common.hadamard.rotate` of float32 x (..., dim)."""
    return _transformed(x, "S1", "S2")


def encode(x: mx.array, name: str) -> mx.array:
    """Encode float32 (..., dim) to uint8 (..., bytes of a vector)."""
    return _ENCODE[name](x).reshape(*x.shape[:-1], FORMATS[name].row_bytes(x.shape[-1]))


def decode(rows: mx.array, name: str, dim: int) -> mx.array:
    """Decode uint8 (..., bytes of a vector) to float32 (..., dim)."""
    if not rows.size:
        return mx.zeros((*rows.shape[:-1], dim))
    return _DECODE[name](_split(rows, FORMATS[name].block(dim)[1])).reshape(*rows.shape[:-1], dim)


# -- bits -------------------------------------------------------------------------------------------------------------


def _split(x: mx.array, size: int) -> mx.array:
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _shifts(bits: int) -> mx.array:
    return mx.arange(0, 8, bits).astype(mx.uint8)


def _pack(codes: mx.array, bits: int) -> mx.array:
    return (_split(codes, 8 // bits) << _shifts(bits)).sum(axis=-1).astype(mx.uint8)


def _unpack(packed: mx.array, bits: int) -> mx.array:
    fields = (packed[..., None] >> _shifts(bits)) & mx.array((1 << bits) - 1, mx.uint8)
    return fields.reshape(*packed.shape[:-1], packed.shape[-1] * 8 // bits)


def _halves(x: mx.array) -> mx.array:
    held = mx.where(mx.isfinite(x), mx.clip(x, -float(MOST), float(MOST)), x)
    return held[..., None].astype(mx.float16).view(mx.uint8)


def _floats(b: mx.array) -> mx.array:
    return mx.contiguous(b).view(mx.float16)[..., 0].astype(mx.float32)


def _inverse(d: mx.array) -> mx.array:
    inverse = 1 / mx.where(d == 0, 1, d)
    return mx.where((d == 0) | mx.isinf(inverse), 0, inverse)


# -- ggml's blocks of 32 ----------------------------------------------------------------------------------------------


def _codes(x: mx.array, largest: int) -> mx.array:
    return mx.minimum(mx.nan_to_num(x, nan=0.0, posinf=float(largest)), largest).astype(mx.uint8)


def _nibbles(codes: mx.array) -> mx.array:
    low = codes & mx.array(15, mx.uint8)
    return low[..., :16] | (low[..., 16:] << mx.array(4, mx.uint8))


def _parts(codes: mx.array, bits: int) -> list[mx.array]:
    high = [_pack(codes >> mx.array(4, mx.uint8), 1)] if bits == 5 else []
    return [*high, _nibbles(codes)]


def _signed(x: mx.array, bits: int) -> mx.array:
    blocks, half = _split(x, BLOCK), 1 << (bits - 1)
    at = mx.argmax(mx.abs(blocks), axis=-1, keepdims=True)
    d = mx.take_along_axis(blocks, at, axis=-1)[..., 0] / -half
    codes = _codes(blocks * _inverse(d)[..., None] + (half + 0.5), 2 * half - 1)
    return mx.concatenate([_halves(d), *_parts(codes, bits)], axis=-1)


def _shifted(x: mx.array, bits: int) -> mx.array:
    blocks, most = _split(x, BLOCK), (1 << bits) - 1
    low = blocks.min(axis=-1)
    d = (blocks.max(axis=-1) - low) / most
    codes = _codes((blocks - low[..., None]) * _inverse(d)[..., None] + 0.5, most)
    return mx.concatenate([_halves(d), _halves(low), *_parts(codes, bits)], axis=-1)


def _q8_0(x: mx.array) -> mx.array:
    blocks = _split(x, BLOCK)
    d = mx.abs(blocks).max(axis=-1) / 127
    scaled = blocks * _inverse(d)[..., None]
    codes = mx.nan_to_num(mx.sign(scaled) * mx.floor(mx.abs(scaled) + 0.5)).astype(mx.int8).view(mx.uint8)
    return mx.concatenate([_halves(d), codes], axis=-1)


def _five_bits(b: mx.array, bits: int) -> mx.array:
    """Return the codes of blocks without their scales, float32."""
    low = b[..., -16:]
    codes = mx.concatenate([low & mx.array(15, mx.uint8), low >> mx.array(4, mx.uint8)], axis=-1)
    if bits == 5:
        codes = codes | (_unpack(b[..., :4], 1) << mx.array(4, mx.uint8))
    return codes.astype(mx.float32)


def _from_signed(b: mx.array, bits: int) -> mx.array:
    return _floats(b[..., :2])[..., None] * (_five_bits(b[..., 2:], bits) - (1 << (bits - 1)))


def _from_shifted(b: mx.array, bits: int) -> mx.array:
    return _floats(b[..., :2])[..., None] * _five_bits(b[..., 4:], bits) + _floats(b[..., 2:4])[..., None]


def _from_q8_0(b: mx.array) -> mx.array:
    return _floats(b[..., :2])[..., None] * mx.contiguous(b[..., 2:]).view(mx.int8).astype(mx.float32)


# -- Lloyd-Max codes --------------------------------------------------------------------------------------------------


def _norms(x: mx.array) -> mx.array:
    squares = mx.square(_split(x, x.shape[-1] // LANES))
    total = squares[..., 0]
    for i in range(1, squares.shape[-1]):
        total = total + squares[..., i]
    while total.shape[-1] > 1:
        total = total[..., 0::2] + total[..., 1::2]
    return mx.sqrt(total[..., 0])


def _indices(unit: mx.array, name: str) -> mx.array:
    codes = mx.zeros(unit.shape, mx.uint8)
    for boundary in table(name, unit.shape[-1])[1].tolist():
        codes = codes + (unit >= boundary).astype(mx.uint8)
    return codes


@cache
def _centroids(name: str, group: int) -> mx.array:
    return mx.array(table(name, group)[0])


def _packed_codes(codes: mx.array, bits: int) -> mx.array:
    if bits == 3:
        low = _pack(codes & mx.array(3, mx.uint8), 2)
        return mx.concatenate([low, _pack(codes >> mx.array(2, mx.uint8), 1)], axis=-1)
    return _pack(codes, bits)


def _unpacked_codes(b: mx.array, bits: int) -> mx.array:
    if bits == 3:
        low = b.shape[-1] * 2 // 3
        return _unpack(b[..., :low], 2) | (_unpack(b[..., low:], 1) << mx.array(2, mx.uint8))
    return _unpack(b, bits)


def _lloyd_max(x: mx.array, name: str, bits: int) -> mx.array:
    groups = _split(x, group_of(x.shape[-1]))
    n = _norms(groups)
    codes = _indices(groups * _inverse(n)[..., None], name)
    scale = n * _inverse(_norms(_centroids(name, groups.shape[-1])[codes]))
    return mx.concatenate([_halves(mx.where(mx.isfinite(n), scale, n)), _packed_codes(codes, bits)], axis=-1)


def _from_lloyd_max(b: mx.array, name: str, bits: int) -> mx.array:
    codes = _unpacked_codes(b[..., 2:], bits)
    return _centroids(name, codes.shape[-1])[codes] * _floats(b[..., :2])[..., None]


def _turboquant(x: mx.array) -> mx.array:
    groups = _split(x, group_of(x.shape[-1]))
    n = _norms(groups)
    unit = groups * _inverse(n)[..., None]
    codes = _indices(unit, "turboquant")
    residual = unit - _centroids("turboquant", groups.shape[-1])[codes]
    positive = (_transformed(residual, "Q1", "Q2") >= 0).astype(mx.uint8)
    scales = [_halves(n), _halves(_norms(residual) * (n != 0))]
    return mx.concatenate([*scales, _packed_codes(codes, 3), _pack(positive, 1)], axis=-1)


def _from_turboquant(b: mx.array) -> mx.array:
    bits = (b.shape[-1] - 4) // 4
    codes, group = _unpacked_codes(b[..., 4 : 4 + 3 * bits], 3), 8 * bits
    projected = 2 * _unpack(b[..., 4 + 3 * bits :], 1).astype(mx.float32) - 1
    kappa = float(np.float32((np.pi / 2 / group) ** 0.5)) * _floats(b[..., 2:4])
    residual = kappa[..., None] * _transformed(projected, "Q2", "Q1")
    return (_centroids("turboquant", group)[codes] + residual) * _floats(b[..., :2])[..., None]


_ENCODE: dict[str, Callable[[mx.array], mx.array]] = {
    "f16": lambda x: x.astype(mx.float16).view(mx.uint8),
    "bf16": lambda x: x.astype(mx.bfloat16).view(mx.uint8),
    "q8_0": _q8_0,
    "turboquant": _turboquant,
    **{name: partial(_signed, bits=FORMATS[name].bits) for name in ("q4_0", "q5_0")},
    **{name: partial(_shifted, bits=FORMATS[name].bits) for name in ("q4_1", "q5_1")},
    **{name: partial(_lloyd_max, name=name, bits=FORMATS[name].bits) for name in ("tq3_0", "lm2", "lm3", "lm4")},
}
_DECODE: dict[str, Callable[[mx.array], mx.array]] = {
    "f16": lambda b: mx.contiguous(b).view(mx.float16).astype(mx.float32),
    "bf16": lambda b: mx.contiguous(b).view(mx.bfloat16).astype(mx.float32),
    "q8_0": _from_q8_0,
    "turboquant": _from_turboquant,
    **{name: partial(_from_signed, bits=FORMATS[name].bits) for name in ("q4_0", "q5_0")},
    **{name: partial(_from_shifted, bits=FORMATS[name].bits) for name in ("q4_1", "q5_1")},
    **{name: partial(_from_lloyd_max, name=name, bits=FORMATS[name].bits) for name in ("tq3_0", "lm2", "lm3", "lm4")},
}
