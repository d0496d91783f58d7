"""Products with matrices in any form: dense, packed as MLX does, or in blocks of a GGUF type."""

import mlx.core as mx

from common.errors import BimetalError
from common.ops import ExpertBiases, Weight
from mlx_backend import quantized
from mlx_backend.elementwise import clamped_swiglu, swiglu
from mlx_backend.quantized import Blocks
from mlx_backend.weights import Packed, Part

SORT_ROWS = 64  # rows of experts from which sorting by expert is faster


def matmul(x: mx.array, part: Part, transpose: bool = True) -> mx.array:
    if isinstance(part, Blocks):
        if x.ndim == 2:
            return quantized.matmul(x, part)
        part = quantized.dequantize(part, x.dtype)  # of heads, whose matrices are small
    if isinstance(part, Packed):
        return mx.quantized_matmul(
            x, *part[:3], transpose=transpose, group_size=part.group_size, bits=part.bits, mode=part.mode
        )
    return x @ (part.swapaxes(-1, -2) if transpose else part)


def by_head(x: mx.array, w: Weight, transpose: bool = True) -> mx.array:
    """Multiply by head: x (..., H or 1, T, columns), w (H, rows, columns) -> (..., H, T, rows)."""
    if len(w) > 1:
        raise BimetalError("matrices of heads cannot be stacked from several formats")
    (part,) = w
    heads = (part.codes if isinstance(part, Packed) else part).shape[0]
    return matmul(mx.broadcast_to(x, (*x.shape[:-3], heads, *x.shape[-2:])), part, transpose)


def moe(
    x: mx.array,
    gate_up: Weight,
    down: Weight,
    ids: mx.array,
    weights: mx.array,
    biases: ExpertBiases | None = None,
    slots: mx.array | None = None,
) -> mx.array:
    """Compute the weighted sum of each row's experts, as `Ops.moe` does.

    biases  in the dtype of x
    slots   (E,): number of the matrix of each expert; None: matrices are in the order of the experts
    """
    T, k = ids.shape
    rows = mx.arange(T * k) // k
    experts = ids.reshape(-1)
    ordered = T * k >= SORT_ROWS
    if ordered:
        order = mx.argsort(experts if slots is None else slots[experts])
        rows, experts = rows[order], experts[order]
    y = gather_matmul(x[rows], gate_up, experts, ordered, slots)
    gate, up = mx.split(y, 2, axis=-1)
    if biases is None:
        y = gather_matmul(swiglu(gate, up), down, experts, ordered, slots)
    else:
        channels = clamped_swiglu(gate + biases.gate[experts], up + biases.up[experts], mx.array(biases.limit))
        y = gather_matmul(channels, down, experts, ordered, slots) + biases.down[experts]
    if ordered:
        y = y[mx.argsort(order)]
    return (y.reshape(T, k, y.shape[-1]) * weights[:, :, None].astype(y.dtype)).sum(axis=1)


def gather_matmul(x: mx.array, w: Weight, experts: mx.array, ordered: bool, slots: mx.array | None = None) -> mx.array:
    """Multiply row i of x (n, columns) by matrix slots[experts[i]] of w (n, rows, columns): (n, rows)."""
    each = x.reshape(len(x), 1, x.shape[-1])  # x[:, None] has a stride of 1, by which gather_mm steps on CUDA
    matrices = experts if slots is None else slots[experts]
    out = []
    for part in w:
        if isinstance(part, Blocks):
            out.append(quantized.gather_matmul(x, part, experts, ordered, slots))
            continue
        if isinstance(part, Packed):
            y = mx.gather_qmm(
                each,
                *part[:3],
                rhs_indices=matrices,
                transpose=True,
                group_size=part.group_size,
                bits=part.bits,
                mode=part.mode,
                sorted_indices=ordered,
            )
        else:
            y = mx.gather_mm(each, part.swapaxes(-1, -2), rhs_indices=matrices, sorted_indices=ordered)
        out.append(y.squeeze(1))
    return out[0] if len(out) == 1 else mx.concatenate(out, axis=-1)
