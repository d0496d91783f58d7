"""Make MLX's packed matrices from stored tensors: weights stay quantized, in MLX's own group formats if these fit.

MLX multiplies affine groups (w = scale * code + bias; 2, 3, 4, 5, 6 or 8 bits; 32, 64 or 128 columns), mxfp4, mxfp8 and
nvfp4. MLX checkpoints hold these formats already. `GGUF_MAPPING` gives the format of each GGUF type, except for types
that `quantized.stays` keeps as stored on Metal.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from common.block_decoders import DECODERS, IQ4_VALUES, bit_fields, half_floats, k_scales
from common.errors import BimetalError
from common.quants import BLOCKS, CHUNK, PLAIN, dequantize, floats
from common.tensors import Tensor
from mlx_backend.quantized import Blocks, filled, load_blocks, stays


class Packed(NamedTuple):
    """Quantized rows as mx.quantized_matmul takes them: codes are uint32 words, a bit stream from the lowest bit up."""

    codes: mx.array
    scales: mx.array
    biases: mx.array | None
    group_size: int
    bits: int
    mode: str


Part = mx.array | Packed | Blocks
Weight = tuple[Part, ...]  # parts to be stacked by rows, one per storage format; mostly a single one


class Target(NamedTuple):
    """The MLX format of a GGUF type, and the largest error of a value relative to the largest magnitude of its group.

    errors  with scales in float32 (0: exact up to rounding the product), float16 and bfloat16
    """

    mode: str
    bits: int
    group_size: int
    errors: tuple[float, float, float] = (0, 0, 0)

    def fidelity(self, dtype: mx.Dtype) -> str:
        error = self.errors[(mx.float32, mx.float16, mx.bfloat16).index(dtype)]
        return "exact" if error == 0 else f"nearly exact (max relative error {error:g})"


def _affine(bits: int, half: float = 0, bfloat: float = 0.004) -> Target:
    return Target("affine", bits, 32, (0, half, bfloat))


# One affine group cannot hold two scales of 16 values: types with such scales are rounded to 256 levels of 32 values,
# and so are types that index codebooks, at nine bits per value instead of sixteen.
_NEAREST = Target("affine", 8, 32, (0.004, 0.006, 0.015))
GGUF_MAPPING: dict[str, Target] = {
    **{"Q4_0": _affine(4), "Q4_1": _affine(4), "Q5_0": _affine(5), "Q5_1": _affine(5), "Q8_0": _affine(8)},
    **{"Q4_K": _affine(4, 0.0015, 0.012), "Q5_K": _affine(5, 0.0015, 0.012)},
    **{"IQ4_NL": _affine(8, 0.001, 0.015), "IQ4_XS": _affine(8, 0.002, 0.015)},
    **dict.fromkeys(("Q2_K", "Q3_K", "Q6_K"), _NEAREST),
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"), _NEAREST),
    "MXFP4": Target("mxfp4", 4, 32),
    "NVFP4": Target("nvfp4", 4, 16),
}
MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")  # of MLX checkpoints: kept as stored


def load_matrix(parts: tuple[Tensor, ...], dtype: mx.Dtype) -> Weight:
    """Load the parts, (rows, columns) or (E, rows, columns) each, stacking neighbours of one format into one matrix.

    dtype  of activations, dense matrices and affine scales alike, so that no product is promoted
    """
    return tuple(_part(group, dtype) for group in grouped(parts))


def grouped(parts: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group neighbours of one format, which become one matrix."""
    groups: list[list[Tensor]] = []
    for part in parts:
        if groups and format_of(groups[-1][0]) == format_of(part):
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def _part(group: list[Tensor], dtype: mx.Dtype) -> Part:
    match format_of(group[0]):
        case Target() as target:
            return _packed(group, target, dtype)
        case str():
            return load_blocks(group)
        case None:
            return _dense(group, dtype)


def stored_dtype(tensors: Iterable[Tensor], exceeds_float16: bool = False) -> mx.Dtype:
    """Return the float type of most of a checkpoint's bytes; quantized ones count as their scales (GGUF: float16).

    exceeds_float16  whether bfloat16 replaces float16
    """
    sizes = {mx.float16: 0, mx.bfloat16: 0, mx.float32: 0}
    for tensor in tensors:
        type_ = tensor.scales.type if tensor.scales is not None else tensor.type
        sizes[{"BF16": mx.bfloat16, "U8": mx.bfloat16, "F32": mx.float32}.get(type_, mx.float16)] += tensor.nbytes
    best = max(sizes, key=lambda dtype: sizes[dtype])
    return mx.bfloat16 if exceeds_float16 and best == mx.float16 else best


def nbytes(weight: Weight) -> int:
    return sum(
        sum(a.nbytes for a in part if isinstance(a, mx.array)) if isinstance(part, tuple) else part.nbytes
        for part in weight
    )


def held_bytes(tensor: Tensor, dtype: mx.Dtype) -> int:
    """Predict `nbytes` of a matrix of this type and shape."""
    count, target = math.prod(tensor.shape), format_of(tensor)
    if target is None:
        return count * dtype.size
    if isinstance(target, str):
        return count * BLOCKS[target].bytes // BLOCKS[target].elements
    scale = 2 * dtype.size if target.mode == "affine" else 1  # and a bias
    return count * target.bits // 8 + count // target.group_size * scale


def format_of(tensor: Tensor) -> Target | str | None:
    """Return the format of a tensor: MLX's groups, the GGUF type of blocks that are kept, None for plain numbers."""
    if tensor.scales is not None:
        return Target(tensor.type, tensor.bits, tensor.group_size)
    return tensor.type if stays(tensor.type) else GGUF_MAPPING.get(tensor.type)


def _dense(parts: list[Tensor], dtype: mx.Dtype) -> mx.array:
    arrays = []
    for part in parts:
        if part.type == "BF16":
            array = mx.array(part.data.view("<u2").reshape(part.shape)).view(mx.bfloat16)
        elif part.type in ("F16", "F32"):
            array = mx.array(part.data.view(PLAIN[part.type]).reshape(part.shape))
        else:
            array = mx.array(dequantize(part))
        arrays.append(array.astype(dtype))
    out = arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=-2)
    mx.eval(out)
    return out


def _packed(parts: list[Tensor], target: Target, dtype: mx.Dtype) -> Packed:
    mode, bits, size = target.mode, target.bits, target.group_size
    lead, columns = parts[0].shape[:-2], parts[0].shape[-1]
    rows = [part.shape[-2] for part in parts]
    scale_type = mx.float32 if mode == "affine" else mx.uint8
    out = [filled((*lead, sum(rows), columns * bits // 32), mx.uint32)]
    out += [filled((*lead, sum(rows), columns // size), scale_type) for _ in range(2 if mode == "affine" else 1)]
    for part, end in zip(parts, np.cumsum(rows), strict=True):
        repack(part, target, *(np.asarray(a)[..., end - part.shape[-2] : end, :] for a in out))
    if mode == "affine" and dtype != mx.float32:
        out[1:] = [a.astype(dtype) for a in out[1:]]
        if not all(mx.isfinite(a).all() for a in out[1:]):
            raise BimetalError(f"{parts[0].name}: a scale of its {parts[0].type} groups is beyond {dtype}")
    return Packed(out[0], out[1], out[2] if mode == "affine" else None, size, bits, mode)


def repack(tensor: Tensor, target: Target, codes: np.ndarray, scales: np.ndarray, *biases: np.ndarray) -> None:
    """Write the tensor's groups into `codes`, `scales` and, for affine groups, `biases`: a few rows at a time."""
    step = max(1, CHUNK // tensor.shape[-1])
    for index in np.ndindex(*tensor.shape[:-2]):
        for start in range(0, tensor.shape[-2], step):
            rows = (*index, slice(start, start + step))
            groups = _mlx_groups(tensor, rows) if tensor.scales is not None else _gguf_groups(tensor, target, rows)
            for out, values in zip((codes, scales, *biases), groups, strict=True):
                out[rows] = values.reshape(out[rows].shape)


Groups = tuple[np.ndarray, ...]  # uint32 words, scales, biases of affine groups


def _mlx_groups(tensor: Tensor, rows: tuple) -> Groups:
    words = tensor.data[rows].view("<u4")
    parts = [part for part in (tensor.scales, tensor.biases) if part is not None]
    return words, *(part.data[rows] if part.type == "U8" else floats(part.data[rows], part.type) for part in parts)


def _gguf_groups(tensor: Tensor, target: Target, rows: tuple) -> Groups:
    blocks = tensor.data[rows].reshape(-1, BLOCKS[tensor.type].bytes)
    codes, *scales = _SPLIT.get(tensor.type, _nearest(tensor.type))(blocks)
    return pack_codes(codes, target.bits), *scales


def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack uint8 codes (n, 32 k) into MLX's stream of `bits` bits each, from the lowest up: uint32 (n, k * bits)."""
    if bits == 8:
        return codes.view("<u4")
    if bits == 4:
        pairs = codes.view("<u2")
        return (pairs | pairs >> 4).astype(np.uint8).view("<u4")
    eights = codes.view("<u8")  # each pass halves the number of fields: 8 of 8 bits, 4 of 2 bits, 2 of 4 bits
    for width, even in ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0x00000000FFFFFFFF)):
        low = np.uint64(even)
        eights = (eights & low) | ((eights & ~low) >> np.uint64(width - width // 8 * bits))
    words = eights.view(np.uint8).reshape(-1, 8)[:, :bits]
    return np.ascontiguousarray(words).reshape(len(codes), -1).view("<u4")


# -- GGUF blocks, uint8 (n, bytes), as codes (n, elements), scales and biases (n, groups) ------------------------------


def _symmetric(codes: Callable[[np.ndarray], np.ndarray], zero: int) -> Callable[[np.ndarray], Groups]:
    """Return scales and biases of scale * (code - zero); the scale is the block's first two bytes."""

    def split(b: np.ndarray) -> Groups:
        scales = half_floats(b[:, :2])
        return codes(b), scales, -zero * scales

    return split


def _with_minimum(split: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], Groups]:
    return lambda b: (split(b), half_floats(b[:, :2]), half_floats(b[:, 2:4]))


def _k_quant(split: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], Groups]:
    def groups(b: np.ndarray) -> Groups:
        scales, minima = k_scales(b)
        return split(b), scales, -minima

    return groups


def _five(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return bit_fields(low, 4, 16) | (bit_fields(high, 1, 1) << 4)


def _iq4_xs(b: np.ndarray) -> Groups:
    fine = (bit_fields(b[:, 4:8], 4, 1) | (bit_fields(b[:, 2:4], 2, 1) << 4)).astype(np.float32) - 32
    scales = half_floats(b[:, :2]) * fine
    return _IQ4_CODES[bit_fields(b[:, 8:], 4, 16)], scales, -127 * scales


def _nearest(type_: str) -> Callable[[np.ndarray], Groups]:
    """Round to 256 levels between the least and the largest of 32 decoded values."""

    def split(b: np.ndarray) -> Groups:
        values = DECODERS[type_](b).reshape(-1, 32)
        low, high = values.min(axis=1, keepdims=True), values.max(axis=1, keepdims=True)
        scales = (high - low) / 255
        codes = np.rint((values - low) / np.where(scales == 0, 1, scales)).astype(np.uint8)
        return codes, scales, low

    return split


_IQ4_CODES = (IQ4_VALUES + 127).astype(np.uint8)
_SPLIT: dict[str, Callable[[np.ndarray], Groups]] = {
    "Q4_0": _symmetric(lambda b: bit_fields(b[:, 2:], 4, 16), 8),
    "Q5_0": _symmetric(lambda b: _five(b[:, 6:], b[:, 2:6]), 16),
    "Q8_0": _symmetric(lambda b: b[:, 2:] ^ np.uint8(0x80), 128),
    "IQ4_NL": _symmetric(lambda b: _IQ4_CODES[bit_fields(b[:, 2:], 4, 16)], 127),
    "IQ4_XS": _iq4_xs,
    "Q4_1": _with_minimum(lambda b: bit_fields(b[:, 4:], 4, 16)),
    "Q5_1": _with_minimum(lambda b: _five(b[:, 8:], b[:, 4:8])),
    "Q4_K": _k_quant(lambda b: bit_fields(b[:, 16:], 4, 32)),
    "Q5_K": _k_quant(lambda b: bit_fields(b[:, 48:], 4, 32) | (bit_fields(b[:, 16:48], 1, 32) << 4)),
    "MXFP4": lambda b: (bit_fields(b[:, 1:], 4, 16), b[:, :1]),
    "NVFP4": lambda b: (bit_fields(b[:, 4:], 4, 8), b[:, :4] & 0x7F),  # ggml ignores the sign of a scale
}
