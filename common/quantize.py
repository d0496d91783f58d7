"""Encode weights, bit for bit as `mlx.core.quantize`, or in the GGUF types of the gguf package.

An encoder takes rows in their stored dtype, because MLX computes mxfp4 and nvfp4 in the dtype of its input and stores
affine scales in that dtype. `common/quants.py` decodes. Source: mlx 0.32 on its CPU device.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from common.block_decoders import FP4_VALUES
from common.errors import BimetalError, UsageError
from common.quants import BLOCKS, CHUNK, FP_MODES, check_scales, dequantize, floats
from common.safetensors import DEFAULTS, MODES
from common.tensors import Tensor

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
MLX_MODES = ("affine", "mxfp4", "nvfp4")
GGUF_TYPES = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")  # encoded by the gguf package, as are floats and ternary types
FLOAT_TYPES = ("F32", "F16", "BF16")
_SMALLEST_SCALE = np.float32(1e-7)
_FP4_MIDDLES = (FP4_VALUES[1:8] + FP4_VALUES[:7]) / 2  # all of them quarters
# code by magnitude in quarters, rounded up: the number of middles below it; a tie takes the smaller value
_FP4_CODES = (np.arange(25)[:, None] > 4 * _FP4_MIDDLES).sum(axis=1).astype(np.uint8)


@dataclass(frozen=True)
class Format:
    """Format of a matrix: an MLX mode with bits and group size, or a GGUF type, for which both are 0."""

    type: str
    bits: int = 0
    group_size: int = 0

    def __str__(self) -> str:
        return f"{self.bits} bits in groups of {self.group_size}" if self.type == "affine" else self.type

    @property
    def unit(self) -> int:
        """Return the number of values that are stored as one unit; a row's length must be a multiple of it."""
        return self.group_size or BLOCKS[self.type].elements

    def bits_per_weight(self, stored: str = "BF16") -> float:
        """Compute bits per value, including scales; `stored` is the type of the source and of affine scales."""
        if self.type not in MODES:
            return BLOCKS[self.type].bits_per_weight
        scale = 16 * _scale_bytes(stored) if self.type == "affine" else 8
        return self.bits + scale / self.group_size


class Encoded(NamedTuple):
    """Rows as stored: uint8 (rows, bytes); scales and biases are None for GGUF types, biases also for fp4 modes."""

    data: np.ndarray
    scales: np.ndarray | None = None
    biases: np.ndarray | None = None


def mlx_format(mode: str, bits: int | None = None, group_size: int | None = None) -> Format:
    """Return the MLX format of a mode, by default with the mode's own bits and group size. Raises UsageError."""
    if mode not in MLX_MODES:
        raise UsageError(f"mode is {mode!r}; supported: {', '.join(MLX_MODES)}")
    default_bits, default_size = DEFAULTS[mode]
    bits, group_size = default_bits if bits is None else bits, default_size if group_size is None else group_size
    allowed_bits = AFFINE_BITS if mode == "affine" else MODES[mode][0]
    if bits not in allowed_bits:
        raise UsageError(f"bits is {bits}; {mode} supports {', '.join(map(str, allowed_bits))}")
    if group_size not in MODES[mode][1]:
        raise UsageError(f"group size is {group_size}; {mode} supports {', '.join(map(str, MODES[mode][1]))}")
    return Format(mode, bits, group_size)


def gguf_format(type_: str) -> Format:
    """Return the GGUF type of that name, in lower or upper case. Raises UsageError."""
    if type_.upper() not in (*GGUF_TYPES, *FLOAT_TYPES):
        raise UsageError(f"type is {type_!r}; supported: {', '.join((*GGUF_TYPES, *FLOAT_TYPES))}")
    return Format(type_.upper())


def encode(tensor: Tensor, format: Format) -> Tensor:
    """Return a tensor of two axes or more in `format`, whole in memory; raises BimetalError where it is not finite."""
    chunks = [encode_rows(rows, type_, format, tensor.name) for rows, type_ in float_chunks(tensor)]
    lead = tensor.shape[:-1]
    data, scales, biases = (
        None if parts[0] is None else np.concatenate(parts).reshape(*lead, -1) for parts in zip(*chunks, strict=True)
    )
    assert data is not None
    if scales is None:
        return Tensor(tensor.name, format.type, tensor.shape, data)
    groups = (*lead, tensor.shape[-1] // format.group_size)
    kind = scale_type(float_type(tensor)) if format.type == "affine" else "U8"
    scale_tensor = Tensor(tensor.name, kind, groups, scales)
    bias_tensor = None if biases is None else Tensor(tensor.name, kind, groups, biases)
    settings = format.bits, format.group_size
    return Tensor(tensor.name, format.type, tensor.shape, data, scale_tensor, bias_tensor, *settings)


def rows_at_once(width: int) -> int:
    """Return the number of rows of `width` values to encode at a time, so that temporaries stay small."""
    return max(1, CHUNK // width)


def encode_rows(data: np.ndarray, type_: str, format: Format, name: str) -> Encoded:
    """Encode rows of a float tensor, uint8 (rows, bytes) of `type_`, in `format`; errors state `name`."""
    stored = "F32" if type_ == "F64" else type_
    values = data.view("<f8").astype(np.float32) if type_ == "F64" else floats(data, type_)
    if not np.isfinite(values).all():
        raise BimetalError(f"tensor {name!r} has a value that is not finite, which cannot be quantized")
    if format.type not in MODES:
        return Encoded(_gguf_rows(values, format.type, name))
    groups = values.reshape(-1, format.group_size)
    if format.type == "affine":
        codes, scales, biases = _affine(groups, format.bits)
        parts = [float_bytes(part.reshape(len(data), -1), stored) for part in (scales, biases)]
        return Encoded(pack_codes(codes.reshape(len(data), -1), format.bits), *parts)
    codes, exponents = _fp4(groups, format.type, stored)
    return Encoded(pack_codes(codes.reshape(len(data), -1), 4), exponents.reshape(len(data), -1))


def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes to MLX's bit stream, lowest bit first: uint8 (rows, n) → (rows, n · bits / 8); n is divisible by 8."""
    if bits == 8:
        return codes
    kind: Any = np.uint8 if 8 % bits == 0 else np.uint64
    count = 8 // bits if 8 % bits == 0 else 8
    runs = codes.reshape(-1, count)
    packed = np.zeros(len(runs), kind)
    for place in range(count):
        packed |= runs[:, place].astype(kind) << kind(place * bits)
    if kind is np.uint8:
        return packed.reshape(len(codes), -1)
    return np.ascontiguousarray(packed.view(np.uint8).reshape(-1, 8)[:, :bits]).reshape(len(codes), -1)


def _affine(groups: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute codes (n, size), scales (n, 1) and biases (n, 1) of groups (n, size), in float32.

    The end of the range farther from 0 keeps its exact value: the scale is this end divided by a whole number.
    """
    bins = np.float32((1 << bits) - 1)
    low, high = groups.min(axis=1, keepdims=True), groups.max(axis=1, keepdims=True)
    below = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / bins, _SMALLEST_SCALE)
    scale = np.where(below, scale, -scale)
    edge = np.where(below, low, high)
    count = np.rint(edge / scale)
    exact = count != 0
    scale = np.where(exact, edge / np.where(exact, count, 1), scale)
    bias = np.where(exact, edge, np.float32(0))
    steps = groups - bias
    steps /= scale
    np.rint(steps, out=steps)
    np.clip(steps, 0, bins, out=steps)
    return steps.astype(np.uint8), scale, bias


def _fp4(groups: np.ndarray, mode: str, type_: str) -> tuple[np.ndarray, np.ndarray]:
    """Compute 4-bit codes (n, size) and stored scales uint8 (n, 1); each step is rounded to `type_` as in MLX."""
    largest = rounded(np.abs(groups).max(axis=1, keepdims=True) / np.float32(6), type_)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if mode == "nvfp4":
            exponents = to_e4m3(largest)
            scales = rounded(FP_MODES[mode][0](exponents), type_)
        else:
            powers = np.ceil(np.log2(largest))
            powers = np.where(largest == 0, np.float32(0), powers)
            exponents = (powers.astype(np.int32) + 127).astype(np.uint8)
            scales = rounded(np.exp2(powers), type_)
        sizes = np.abs(rounded(groups / scales, type_))
    sizes[np.broadcast_to(scales == 0, sizes.shape)] = 0
    codes = _FP4_CODES[np.minimum(np.ceil(4 * sizes), len(_FP4_CODES) - 1).astype(np.uint8)]
    return np.where((groups < 0) & (codes > 0), codes | np.uint8(8), codes), exponents


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """Round float32 of at least 0 to 8-bit floats with 4 bits of exponent, ties to even; at most 448."""
    mantissa, exponent = np.frexp(np.minimum(values, np.float32(448)))
    normal = values >= 2.0**-6  # smaller ones have no exponent of their own
    codes = np.where(
        normal,
        np.rint(mantissa * 16) + (exponent + 5) * 8,  # 8 steps from one power of two to the next
        np.rint(values * 512),
    )
    return codes.astype(np.uint8)


def rounded(values: np.ndarray, type_: str) -> np.ndarray:
    """Round float32 values to `type_`."""
    if type_ == "F16":
        return values.astype(np.float16).astype(np.float32)
    if type_ == "BF16":
        return (_bf16(values).astype(np.uint32) << 16).view(np.float32)
    return values


def _bf16(values: np.ndarray) -> np.ndarray:
    """Convert float32 to bfloat16 bits, uint16, ties to even."""
    words = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((words + np.uint32(0x7FFF) + ((words >> 16) & np.uint32(1))) >> 16).astype(np.uint16)


def scale_type(stored: str) -> str:
    """Return the type of affine scales beside rows of the type `stored`."""
    return stored if stored in FLOAT_TYPES else "F32"


def _scale_bytes(stored: str) -> int:
    return 4 if scale_type(stored) == "F32" else 2


def float_bytes(values: np.ndarray, type_: str) -> np.ndarray:
    """Convert float32 (rows, n) to bytes of `type_`, uint8 (rows, ...)."""
    kinds = {"F32": lambda v: v, "F16": lambda v: v.astype(np.float16), "BF16": _bf16}
    return np.ascontiguousarray(kinds[type_](values)).view(np.uint8)


def float_chunks(tensor: Tensor) -> Iterator[tuple[np.ndarray, str]]:
    """Yield the rows of a tensor of any type in order, as (uint8 (rows, bytes), float type); quantized rows as F32."""
    rows, width = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    flat = tensor if len(tensor.shape) == 2 else tensor.reshape((rows, width))
    for at in range(0, rows, rows_at_once(width)):
        part = flat.take_rows(np.arange(at, min(at + rows_at_once(width), rows)))
        if tensor.type in (*FLOAT_TYPES, "F64"):
            yield part.data, tensor.type
        else:
            check_scales(part)
            yield dequantize(part).view(np.uint8), "F32"


def float_type(tensor: Tensor) -> str:
    """Return the float type that `float_chunks` gives a tensor's rows in."""
    return tensor.type if tensor.type in (*FLOAT_TYPES, "F64") else "F32"


def _gguf_rows(values: np.ndarray, type_: str, name: str) -> np.ndarray:
    """Encode float32 (rows, n) as blocks of a GGUF type, uint8 (rows, bytes)."""
    if type_ in FLOAT_TYPES:
        with np.errstate(over="ignore"):
            data = float_bytes(values, type_)
        if type_ != "F32" and not np.isfinite(floats(data, type_)).all():
            raise BimetalError(f"tensor {name!r} has a value of {np.abs(values).max():g}, beyond the range of {type_}")
        return data
    from gguf import GGMLQuantizationType, quants  # slow to import, and needed here alone

    blocks = quants.quantize(values, GGMLQuantizationType[type_])
    return np.asarray(blocks).view(np.uint8).reshape(len(values), -1)


def encoded_bytes(shape: tuple[int, ...], stored: str, format: Format) -> tuple[int, int, int]:
    """Compute the bytes of data, scales and biases of a tensor in `format`, as `encode_rows` returns them."""
    rows, width = math.prod(shape[:-1]), shape[-1]
    if format.type not in MODES:
        return rows * width // BLOCKS[format.type].elements * BLOCKS[format.type].bytes, 0, 0
    groups = rows * width // format.group_size
    size = groups * _scale_bytes(stored) if format.type == "affine" else groups
    return rows * width * format.bits // 8, size, size if format.type == "affine" else 0
