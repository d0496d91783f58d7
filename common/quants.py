"""Quantized tensors: the block types of GGUF and their sizes, decoding to float32, and a check of the scales.

A GGUF type stores a row as blocks, which `block_decoders` decode. MLX's modes store codes and scales in separate
tensors (mlx.core.quantize of mlx 0.32).
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from common.block_decoders import DECODERS, E4M3, FP4_VALUES, e8m0, iq1_m_scale, scaled, shifted
from common.errors import BimetalError
from common.tensors import Tensor


class Block(NamedTuple):
    """Block of a GGUF type: `bytes` bytes for `elements` values; `id` is ggml's number of the type.

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

# values of the `halves` of random blocks that give weights of the magnitude of trained weights
RANDOM_HALVES = {"Q4_K": (1e-4, 7.5e-4), "Q5_K": (5e-5, 7.5e-4), "Q5_0": (1.5e-3,), "Q5_1": (1.5e-3, -2.3e-2)}
RANDOM_EXPONENT = {"MXFP4": 120}  # the same for byte 0, a power of 2
RANDOM_HALVES |= {"Q6_K": (2e-5,), "Q4_0": (3e-3,), "Q8_0": (2e-4,)}

PLAIN = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1"},
    **{"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "<u1", "BOOL": "?"},
}  # and BF16, which NumPy lacks
CONVERTERS = 8  # threads that convert blocks: one takes a minute for gpt-oss-20b
CHUNK = 1 << 17  # values decoded at a time, so that temporaries fit in the cache and are much smaller than the result


def dequantize(tensor: Tensor, out: np.ndarray | None = None) -> np.ndarray:
    """Return the values of a tensor of any type, float32 of `tensor.shape`. Raises BimetalError for other types.

    Scales that are NaN or infinite are not checked here; `check_scales` refuses them.

    out  contiguous array of that shape for the values; None: a new array
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


def q8_0_blocks(values: np.ndarray) -> np.ndarray:
    """Encode float32 (rows, columns) as Q8_0: the largest of 32 values becomes 127 or -127; uint8 (rows, bytes)."""
    blocks = values.reshape(len(values), -1, 32)
    scales = (np.abs(blocks).max(axis=2, keepdims=True) / 127).astype(np.float16)
    codes = np.rint(blocks / np.where(scales > 0, scales, 1).astype(np.float32))
    codes = np.clip(codes, -127, 127).astype(np.int8).view(np.uint8)
    return np.concatenate([scales.view(np.uint8), codes], axis=2).reshape(len(values), -1)


def block_type(type_: str, bits: int) -> str | None:
    """Return the GGUF type that holds what a tensor of an MLX mode holds, but for the rounding of scales; or None."""
    return {("mxfp4", 4): "MXFP4", ("affine", 4): "Q4_1", ("affine", 5): "Q5_1"}.get((type_, bits))


def as_blocks(tensor: Tensor) -> Tensor:
    """Convert a tensor of an MLX mode to its `block_type`; other tensors stay as they are.

    Codes keep their values. Scales and biases of affine groups are rounded to float16.
    """
    type_ = block_type(tensor.type, tensor.bits)
    if type_ is None:
        return tensor
    assert tensor.scales is not None
    *rows, size = tensor.shape
    count = math.prod(rows)
    blocks = np.empty((count, size // 32, BLOCKS[type_].bytes), np.uint8)
    codes, scales = (part.data.reshape(count, -1) for part in (tensor, tensor.scales))
    biases = None if tensor.biases is None else tensor.biases.data.reshape(count, -1)

    def convert(part: slice) -> None:
        out = blocks[part]
        if biases is None:
            out[..., 0] = scales[part]
        else:
            assert tensor.scales is not None
            assert tensor.biases is not None
            heads = floats(scales[part], tensor.scales.type), floats(biases[part], tensor.biases.type)
            for i, head in enumerate(heads):
                with np.errstate(over="ignore"):  # infinite scales are refused
                    halves = np.repeat(head.astype("<f2"), tensor.group_size // 32, axis=1)
                out[..., 2 * i : 2 * i + 2] = halves[..., None].view(np.uint8)
        if type_ == "Q5_1":
            fives = unpack_codes(np.ascontiguousarray(codes[part]), 5).reshape(*out.shape[:2], 32)
            out[..., 4:8] = np.packbits(fives >> 4, axis=2, bitorder="little")
            out[..., 8:] = fives[..., :16] & 15 | (fives[..., 16:] & 15) << 4
        else:
            out[..., -16:] = _halves(codes[part]).reshape(*out.shape[:2], 16)

    convert_rows(convert, count, size)
    return Tensor(tensor.name, type_, tensor.shape, blocks.reshape(*rows, -1))


def convert_rows(convert: Callable[[slice], object], rows: int, columns: int) -> None:
    """Call `convert` for slices of all rows of a matrix, in several threads; slices begin at multiples of 8."""
    step = max(8, 8 * CHUNK // columns // 8 * 8)
    with ThreadPoolExecutor(CONVERTERS) as pool:
        list(pool.map(convert, (slice(at, min(at + step, rows)) for at in range(0, rows, step))))


def _halves(codes: np.ndarray) -> np.ndarray:
    """Reorder codes of 4 bits, two per byte in order, so that 16 bytes have 0 to 15 in low halves, 16 to 31 in high."""
    low, words = np.uint64(0x0F0F0F0F0F0F0F0F), np.ascontiguousarray(codes).view("<u8").reshape(-1, 2)
    first, second = words[:, 0], words[:, 1]
    even = first & low | (second & low) << np.uint64(4)
    odd = first >> np.uint64(4) & low | second & ~low
    pairs = even.view(np.uint8).astype("<u2") | odd.view(np.uint8).astype("<u2") << np.uint16(8)
    return pairs.view(np.uint8)


def bits_per_weight(tensor: Tensor) -> float:
    """Compute stored bits per value, including scales and biases."""
    return 8 * tensor.nbytes / math.prod(tensor.shape)


def check_scales(tensor: Tensor) -> None:
    """Raise BimetalError if a scale of a quantized tensor, or a value of a float vector, is NaN or infinite.

    Only scales are read: a float matrix is not checked.
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
    """Mark values that are NaN or infinite; for the name of an MLX mode, such bytes of its scales."""
    if type_ == "nvfp4":
        return (data & 0x7F) == 0x7F
    if type_ in ("mxfp4", "mxfp8"):
        return data == 0xFF
    if type_ == "BF16":
        return (data.view("<u2") & 0x7F80) == 0x7F80
    return ~np.isfinite(data.view(PLAIN[type_]))


def bad_blocks(blocks: np.ndarray, type_: str) -> np.ndarray:
    """Mark the blocks of a GGUF type, uint8 (n, bytes), whose scale is NaN or infinite: bool (n,)"""
    if type_ == "MXFP4":
        return blocks[:, 0] == 0xFF
    if type_ == "NVFP4":
        return ((blocks[:, :4] & 0x7F) == 0x7F).any(axis=1)
    if type_ == "IQ1_M":
        return ~np.isfinite(iq1_m_scale(blocks)[:, 0])
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


# ---- MLX's modes ---------------------------------------------------------------------------------------------------


FP_MODES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], np.ndarray]] = {
    "mxfp4": (lambda scales: e8m0(scales, -127), FP4_VALUES),
    "mxfp8": (lambda scales: e8m0(scales, -127), E4M3),
    "nvfp4": (lambda scales: E4M3[scales], FP4_VALUES),
}


def unpack_codes(packed: np.ndarray, bits: int) -> np.ndarray:
    """Unpack MLX's codes, a bit stream with the lowest bit first: uint8 (rows, bytes) → (rows, bytes · 8 / bits)."""
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
            out[rows] = scaled(scale(scales[rows]), values[codes])
        else:
            assert tensor.biases is not None
            biases = floats(tensor.biases.data.reshape(len(out), -1)[rows], tensor.biases.type)
            out[rows] = shifted(floats(scales[rows], tensor.scales.type), codes, -biases)


def floats(data: np.ndarray, type_: str) -> np.ndarray:
    """Convert stored floats, uint8 (rows, bytes), to float32 (rows, count)."""
    return DECODERS["BF16"](data) if type_ == "BF16" else data.view(PLAIN[type_]).astype(np.float32)
