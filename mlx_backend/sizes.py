"""Predict the parts of MLX's workspace: its allocations besides weights and state during prefill.

On the CPU every product of a prompt is computed at once (`MlxOps.linear`), and all arrays between two products exist
at once, because MLX allocates ahead of the thread that computes and frees. The terms for the CPU are measured on
MLX 0.32 (tests/test_fit.py), and also used for GPUs that are not Apple's, which compose the same ops. On a Mac's GPU
attention and the delta rule are single kernels and the scheduler runs about one layer ahead: its terms are an estimate.
"""

from collections.abc import Sequence
from typing import NamedTuple

from common.backend import LayerSize
from common.storage import ConvSpec, DeltaSpec, KVSpec, LatentSpec, RowSpec
from mlx_backend.rows import rows_held

HOST_VALUES = 2**21  # weights decoded at a time for NumPy's products


class Prefill(NamedTuple):
    """A prompt of `tokens` tokens, read in steps of `rows` rows; an activation takes `item_bytes` bytes."""

    tokens: int
    rows: int
    item_bytes: int

    @property
    def step(self) -> int:
        """Return the rows of the largest step."""
        return min(self.rows, self.tokens)


# The workspace of a state beside that of its layer's matrices: numbers per row and bytes beside them, from the mixer's
# first product to its last, and bytes that are kept until a step is committed, with what remains of the step before.
Work = tuple[int, int, int]


def _outgrown(s: RowSpec, prefill: Prefill) -> int:
    """Count rows of the buffer that the last step replaces by a larger one, or 0; the old one exists until then."""
    tokens, rows = prefill.tokens, prefill.rows
    before = rows_held(tokens - ((tokens - 1) % rows + 1), rows, s.window, s.sinks)
    return before if before != rows_held(tokens, rows, s.window, s.sinks) else 0


def _seen(s: RowSpec, prefill: Prefill) -> int:
    """Count the rows that attention reads in the last step."""
    return prefill.tokens if s.window is None else min(prefill.tokens, s.window + prefill.rows)


# -- on the CPU --------------------------------------------------------------------------------------------------------


def _attention_eager(s: RowSpec, layer: LayerSize, prefill: Prefill) -> Work:
    """Count the workspace of attention: rows normed and roped, scores, an outgrown buffer, a mask."""
    pairs = prefill.step * _seen(s, prefill)
    scratch = (layer.heads * pairs + _outgrown(s, prefill) * s.numbers) * prefill.item_bytes
    return 2 * s.numbers, scratch + pairs * (3 if s.window else 1), 0  # NumPy makes a window's mask in parts


def kv_eager(s: KVSpec, layer: LayerSize, prefill: Prefill) -> Work:
    mixer, scratch, _ = _attention_eager(s, layer, prefill)
    # queries are normed, multiplied for rope, roped, scaled; their output gated, laid out
    return mixer + 6 * layer.heads * s.key_dim, scratch, 0


def latent_eager(s: LatentSpec, layer: LayerSize, prefill: Prefill) -> Work:
    mixer, scratch, _ = _attention_eager(s, layer, prefill)
    # queries, as wide as half of what is expanded, are roped, put together, scaled; latents repeat by head
    per_token = layer.expanded + 2 * layer.heads * s.latent_dim
    return mixer + 3 * layer.expanded // 2, scratch + prefill.tokens * per_token * prefill.item_bytes, 0


def conv_eager(s: ConvSpec, layer: LayerSize, prefill: Prefill) -> Work:
    rows = 2 * prefill.step + s.taps - 1  # inputs, and outputs, of which v is a slice
    return 0, 0, rows * s.channels * prefill.item_bytes


def delta_eager(s: DeltaSpec, layer: LayerSize, prefill: Prefill) -> Work:
    keys = s.heads * s.key_dim  # numbers of q, and of k, which is kept beside the new matrix
    # the composed rule keeps the matrix of every row
    return keys, prefill.step * keys * s.value_dim * 4, prefill.step * keys * prefill.item_bytes + s.matrix_bytes


def eager_bytes(layer: LayerSize, states: Sequence[int], prefill: Prefill) -> int:
    """Predict the larger of two spans: from the mixer's first products to its last, and the FFN's first product."""
    mixer = layer.mixer + states[0]  # numbers per row, the residual stream in the place of the last product
    up = 2 * (layer.ffn - 2 * layer.hidden) // 3  # rows of a dense FFN's first matrix; experts have no more
    decoded = 2 * 4 * min(HOST_VALUES, up * layer.hidden)  # MLX's dequantize takes another block for itself
    return max(
        prefill.step * mixer * prefill.item_bytes + states[1], prefill.step * layer.ffn * prefill.item_bytes + decoded
    )


# -- on a Mac's GPU ----------------------------------------------------------------------------------------------------


def kv_lazy(s: KVSpec, layer: LayerSize, prefill: Prefill) -> Work:
    mixer = 2 * layer.heads * s.key_dim + s.numbers  # roped, and laid out head by head
    return mixer, (_seen(s, prefill) + _outgrown(s, prefill)) * s.numbers * prefill.item_bytes, 0


def latent_lazy(s: LatentSpec, layer: LayerSize, prefill: Prefill) -> Work:
    # queries are put together like keys; these are made by head, then laid out for the products
    return layer.expanded // 2, 2 * prefill.tokens * layer.expanded * prefill.item_bytes, 0


def conv_lazy(s: ConvSpec, layer: LayerSize, prefill: Prefill) -> Work:
    rows = prefill.step + s.taps - 1  # the last rows, which the state keeps, are copied at the end of a step
    return 0, 0, rows * s.channels * prefill.item_bytes


def delta_lazy(s: DeltaSpec, layer: LayerSize, prefill: Prefill) -> Work:
    return 2 * s.heads * s.key_dim + layer.hidden, 0, 0  # q and k, tiled over the value heads


def lazy_bytes(layer: LayerSize, states: Sequence[int], prefill: Prefill) -> int:
    return prefill.step * (layer.mixer + states[0] + layer.ffn + 4 * layer.hidden) * prefill.item_bytes + states[1]
