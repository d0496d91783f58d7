"""Products with GGUF blocks as the file stores them, by our own Metal kernels.

MLX's affine groups would take 8 bits and two scales for types whose files take 2.6 to 6.6 bits, and would round the
scales of Q5_0 and Q5_1 if a model is bfloat16. On Metal such blocks stay as stored; on other devices
`mlx_backend/weights.py` converts them to affine groups.
"""

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from common.block_decoders import codebook
from common.quants import BLOCKS
from common.tensors import Tensor
from mlx_backend import kernels

CODEBOOKS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
# Offsets of each type's 16-bit fields in a block. These fields are held separately, so that the other bytes are whole
# 32-bit words: in blocks of 210 or 110 bytes every other word would be unaligned.
HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "IQ4_NL": (0,),
    "IQ4_XS": (0, 2),
    **dict.fromkeys(CODEBOOKS, (0,)),
}
VECTORS, MATRICES = 8, 64  # rows of x up to which qmv.metal multiplies, and up to which qmm.metal does
DECODED = 2**23  # weights decoded at a time for products of a prompt
ROWS_PER_GROUP, ROWS_PER_MATRIX_GROUP = 4, 16  # of the matrix, per SIMD group of qmv.metal and of qmm.metal


class Blocks(NamedTuple):
    """Rows of blocks of a GGUF type, whose 16-bit fields are held separately.

    words   (..., rows, words of all blocks of a row) uint32
    halves  (..., rows, 16-bit fields of all blocks of a row) uint16
    """

    words: mx.array
    halves: mx.array
    type: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the matrix, (rows, columns), or of the matrices, (E, rows, columns)."""
        return *self.words.shape[:-1], self.halves.shape[-1] // len(HALVES[self.type]) * BLOCKS[self.type].elements

    def take(self, rows: mx.array | slice) -> "Blocks":
        return Blocks(self.words[rows], self.halves[rows], self.type)


def stays(type_: str) -> bool:
    """Test whether a matrix of this type is held as `Blocks`."""
    return type_ in HALVES and kernels.on_metal()


def load_blocks(parts: Sequence[Tensor]) -> Blocks:
    """Stack parts of one type, (rows, columns) or (E, rows, columns) each, by rows to one matrix."""
    *lead, _, columns = parts[0].shape
    out = new_blocks((*lead, sum(part.shape[-2] for part in parts), columns), parts[0].type)
    words, halves = np.asarray(out.words), np.asarray(out.halves)
    end = 0
    for part in parts:
        start, end = end, end + part.shape[-2]
        fill_blocks(part, words[..., start:end, :], halves[..., start:end, :])
    return out


def new_blocks(shape: tuple[int, ...], type_: str) -> Blocks:
    """Make blocks of zeros of a matrix or matrices of `shape`."""
    block, fields = BLOCKS[type_], len(HALVES[type_])
    *rows, columns = shape
    blocks, size = columns // block.elements, block.bytes - 2 * fields
    return Blocks(filled((*rows, blocks * size // 4), mx.uint32), filled((*rows, blocks * fields), mx.uint16), type_)


def fill_blocks(tensor: Tensor, words: np.ndarray, halves: np.ndarray) -> None:
    """Write the tensor's blocks into views of `Blocks.words` and `Blocks.halves` of its shape."""
    block, fields = BLOCKS[tensor.type], HALVES[tensor.type]
    blocks, size = tensor.shape[-1] // block.elements, block.bytes - 2 * len(fields)
    rest = slice(2 * len(fields), None) if fields[0] == 0 else slice(0, size)  # the fields lie at one end of a block
    stored = tensor.data.reshape(*tensor.shape[:-1], blocks, block.bytes)
    words.view(np.uint8).reshape(*words.shape[:-1], blocks, size)[...] = stored[..., rest]
    to_halves = halves.view(np.uint8).reshape(*halves.shape[:-1], blocks, len(fields), 2)
    for i, at in enumerate(fields):
        to_halves[..., i, :] = stored[..., at : at + 2]


def filled(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Make evaluated zeros, into which NumPy writes, so that a matrix is not copied twice."""
    out = mx.zeros(shape, dtype)
    mx.eval(out)
    return out


def matmul(x: mx.array, w: Blocks) -> mx.array:
    """Multiply x (T, columns) by w (rows, columns) transposed: (T, rows)."""
    T, N = len(x), w.shape[-2]
    if T <= VECTORS:
        return _qmv(x, w, None, T)
    if T <= MATRICES:
        return _qmm(x, w)
    step = max(1, DECODED // x.shape[-1])
    out = [x @ dequantize(w.take(slice(at, at + step)), x.dtype).T for at in range(0, N, step)]
    return out[0] if len(out) == 1 else mx.concatenate(out, axis=-1)


def gather_matmul(x: mx.array, w: Blocks, experts: mx.array, ordered: bool, slots: mx.array | None = None) -> mx.array:
    """Multiply row i of x (n, columns) by matrix experts[i] of w (E, rows, columns) transposed: (n, rows).

    ordered  True if rows of one expert are adjacent, and can share its decoded weights
    slots    int32 by expert: the number of its matrix in w; None: matrices are in the order of the experts
    """
    return _qmv(x, w, experts, len(x) if ordered else 1, slots)


def _qmv(x: mx.array, w: Blocks, experts: mx.array | None, together: int, slots: mx.array | None = None) -> mx.array:
    """Launch qmv.metal; `together`: how many rows of x may share decoded weights, of which a SIMD group has up to 8."""
    T, rows = len(x), w.shape[-2]
    M = next(m for m in (1, 2, 4, 8) if m >= together or m == 8)
    chunks, gather = -(-T // M), 0 if experts is None else 1 if slots is None else 2
    words, halves = (a.reshape(-1, *a.shape[-2:]) for a in (w.words, w.halves))
    none = mx.zeros(1, mx.int32)
    of_row, table = none if experts is None else experts.astype(mx.int32), none if slots is None else slots
    names = ("x", "words", "halves", "codebook", "experts", "slots")
    kernel = kernels.make_kernel("qmv", inputs=names, outputs=("out",))
    return kernel(
        inputs=[x, words, halves, _codebook(w.type), of_row, table],
        template=[("T", x.dtype), *_layout(w.type), ("M", M), ("GATHER", gather)],
        grid=(32, -(-rows // ROWS_PER_GROUP), chunks),
        threadgroup=(32, 2, 1),
        output_shapes=[(T, rows)],
        output_dtypes=[x.dtype],
    )[0]


def _qmm(x: mx.array, w: Blocks) -> mx.array:
    T, rows = len(x), w.shape[0]
    kernel = kernels.make_kernel("qmm", inputs=("x", "words", "halves", "codebook"), outputs=("out",))
    return kernel(
        inputs=[x, w.words, w.halves, _codebook(w.type)],
        template=[("T", x.dtype), *_layout(w.type), ("TILES", next(n for n in (2, 4, 8) if 8 * n >= T))],
        grid=(32, -(-rows // ROWS_PER_MATRIX_GROUP), 1),
        threadgroup=(32, 4, 1),
        output_shapes=[(T, rows)],
        output_dtypes=[x.dtype],
    )[0]


def dequantize(w: Blocks, dtype: mx.Dtype) -> mx.array:
    """Decode the weights, in the shape of the matrix or matrices."""
    rows, columns = prod(w.shape[:-1]), w.shape[-1]
    kernel = kernels.make_kernel("dequantize", inputs=("words", "halves", "codebook"), outputs=("out",))
    return kernel(
        inputs=[w.words.reshape(rows, -1), w.halves.reshape(rows, -1), _codebook(w.type)],
        template=[("T", dtype), *_layout(w.type)],
        grid=(columns // 8, rows, 1),
        threadgroup=(min(columns // 8, 256), 1, 1),
        output_shapes=[w.shape],
        output_dtypes=[dtype],
    )[0]


def _layout(type_: str) -> list[tuple[str, int]]:
    block, halves = BLOCKS[type_], len(HALVES[type_])
    return [("TYPE", block.id), ("BLOCK", block.elements), ("W", (block.bytes - 2 * halves) // 4), ("H", halves)]


@cache
def _codebook(type_: str) -> mx.array:
    """Return the codebook as words of four magnitudes; one unused word for a type without a codebook."""
    if type_ not in CODEBOOKS:
        return mx.zeros(1, mx.uint32)
    return mx.array(codebook(type_).astype(np.uint8).view("<u4").reshape(-1))
