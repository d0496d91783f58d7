"""Predict MLX's workspace: what it allocates beside weights and state during prefill.

On the CPU every product of a prompt is computed at once (`MlxOps.linear`), and all arrays between two products exist
at once, because MLX allocates ahead of the thread that computes and frees. The terms for the CPU are measured on
MLX 0.32 (tests/test_fit.py), and also used for GPUs that are not Apple's, which compose the same ops. On a Mac's GPU
attention and the delta rule are single kernels and the scheduler runs about one layer ahead: its terms are an estimate.
"""

from collections.abc import Sequence

from common.backend import LayerSize, decoded_bytes
from common.storage import ConvSpec, DeltaSpec, KVSpec, LatentSpec, RowSpec
from mlx_backend.quantized import DECODED
from mlx_backend.rows import rows_held

HOST_VALUES = 2**21  # weights decoded at a time for NumPy's products


def work_bytes(layers: Sequence[LayerSize], tokens: int, rows: int, item: int, fused: bool) -> int:
    """Bytes of the workspace; `fused` where attention and the delta rule are single kernels, as on a Mac's GPU."""
    if not fused:
        kept = _kept_bytes(layers, tokens, rows, item)
        return kept + max(_eager_bytes(layer, tokens, rows, item) + decoded_bytes(layer, tokens) for layer in layers)
    rows = min(rows, tokens)
    streams = [s for layer in layers for s in layer.states.values() if isinstance(s, ConvSpec)]
    kept = sum((rows + s.taps - 1) * s.channels for s in streams)  # a chunk's tails are cut out of these at its end
    kept += 2 * DECODED  # weights of types that have their own kernels, for products of many rows
    return item * kept + max(_lazy_bytes(layer, tokens, rows, item) + decoded_bytes(layer, tokens) for layer in layers)


def _outgrown(s: RowSpec, tokens: int, rows: int) -> int:
    """Rows of the buffer that the last step replaces by a larger one, or 0; a layer's old buffer lives until then."""
    before = rows_held(tokens - ((tokens - 1) % rows + 1), rows, s.window, s.sinks)
    return before if before != rows_held(tokens, rows, s.window, s.sinks) else 0


def _seen(s: RowSpec, tokens: int, rows: int) -> int:
    """Rows that attention reads in the last step."""
    return tokens if s.window is None else min(tokens, s.window + rows)


# -- on the CPU --------------------------------------------------------------------------------------------------------


def _kept_bytes(layers: Sequence[LayerSize], tokens: int, rows: int, item: int) -> int:
    """Bytes that recurrent layers keep until a chunk is committed, with what remains of the chunk before."""
    T, total = min(rows, tokens), 0
    for layer in layers:
        for s in layer.states.values():
            match s:
                case ConvSpec():
                    total += (2 * T + s.taps - 1) * s.channels * item  # its inputs, and its outputs: v is their slice
                case DeltaSpec():
                    total += T * s.heads * s.key_dim * item + s.matrix_bytes  # k, new matrix
    # the logits of no row that a chunk ends with are never computed, and hold the two arrays that they would add
    return total + (2 * rows * layers[-1].hidden * item if tokens > rows else 0)


def _eager_bytes(layer: LayerSize, tokens: int, rows: int, item: int) -> int:
    """Bytes of the larger of two spans: from the mixer's first products to its last, and the FFN's first product."""
    T = min(rows, tokens)
    mixer, scratch = layer.mixer, 0  # numbers per row, the residual stream in the place of the last product
    for s in layer.states.values():
        match s:
            case KVSpec():
                seen, size = _seen(s, tokens, rows), s.numbers
                # queries are normed, multiplied for rope, roped, scaled; their output gated, laid out; keys likewise
                mixer += 6 * layer.heads * s.key_dim + 2 * size
                scratch += (layer.heads * T * seen + _outgrown(s, tokens, rows) * size) * item
                scratch += T * seen * (3 if s.window else 1)  # a mask; NumPy makes a window's in parts
            case LatentSpec():
                # queries, as wide as half of what is expanded, are roped, put together, scaled; so is the row's latent
                mixer += 3 * layer.expanded // 2 + 2 * s.numbers
                scratch += tokens * (layer.expanded + 2 * layer.heads * s.latent_dim) * item  # latents repeat by head
                scratch += (layer.heads * T * tokens + _outgrown(s, tokens, rows) * s.numbers) * item
                scratch += T * tokens
            case DeltaSpec():
                mixer += s.heads * s.key_dim  # q; k is kept
                scratch += T * s.heads * s.key_dim * s.value_dim * 4  # the composed rule keeps the matrix of every row
    up = 2 * (layer.ffn - 2 * layer.hidden) // 3  # rows of a dense FFN's first matrix; experts have no more
    decoded = 2 * 4 * min(HOST_VALUES, up * layer.hidden)  # MLX's dequantize takes another block for itself
    return max(T * mixer * item + scratch, T * layer.ffn * item + decoded)


# -- on a Mac's GPU ----------------------------------------------------------------------------------------------------


def _lazy_bytes(layer: LayerSize, tokens: int, rows: int, item: int) -> int:
    mixer, ffn, scratch = layer.mixer, layer.ffn + 4 * layer.hidden, 0
    for s in layer.states.values():
        match s:
            case KVSpec():
                seen, size = _seen(s, tokens, rows), s.numbers
                mixer += 2 * layer.heads * s.key_dim + size  # roped, and laid out head by head
                scratch += (seen + _outgrown(s, tokens, rows)) * size * item
            case LatentSpec():
                mixer += layer.expanded // 2  # queries are put together like keys
                scratch += 2 * tokens * layer.expanded * item  # made by head, then laid out for the products
            case DeltaSpec():
                mixer += 2 * s.heads * s.key_dim + layer.hidden  # q and k, tiled over the value heads
    return rows * (mixer + ffn) * item + scratch
