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


class Read(NamedTuple):
    """A prompt of `tokens` tokens that is read in steps of `rows`; a number takes `item` bytes."""

    tokens: int
    rows: int
    item: int

    @property
    def step(self) -> int:
        """Return the rows of the largest step."""
        return min(self.rows, self.tokens)


# The workspace of a state beside that of its layer's matrices: numbers per row and bytes beside them, from the mixer's
# first product to its last, and bytes that are kept until a step is committed, with what remains of the step before.
Work = tuple[int, int, int]


def _outgrown(s: RowSpec, read: Read) -> int:
    """Count rows of the buffer that the last step replaces by a larger one, or 0; the old one exists until then."""
    tokens, rows = read.tokens, read.rows
    before = rows_held(tokens - ((tokens - 1) % rows + 1), rows, s.window, s.sinks)
    return before if before != rows_held(tokens, rows, s.window, s.sinks) else 0


def _seen(s: RowSpec, read: Read) -> int:
    """Count the rows that attention reads in the last step."""
    return read.tokens if s.window is None else min(read.tokens, s.window + read.rows)


# -- on the CPU --------------------------------------------------------------------------------------------------------


def _attention_eager(s: RowSpec, layer: LayerSize, read: Read) -> Work:
    """Count the workspace of attention: rows normed and roped, scores, an outgrown buffer, a mask."""
    pairs = read.step * _seen(s, read)
    scratch = (layer.heads * pairs + _outgrown(s, read) * s.numbers) * read.item
    return 2 * s.numbers, scratch + pairs * (3 if s.window else 1), 0  # NumPy makes a window's mask in parts


def kv_eager(s: KVSpec, layer: LayerSize, read: Read) -> Work:
    mixer, scratch, _ = _attention_eager(s, layer, read)
    # queries are normed, multiplied for rope, roped, scaled; their output gated, laid out
    return mixer + 6 * layer.heads * s.key_dim, scratch, 0


def latent_eager(s: LatentSpec, layer: LayerSize, read: Read) -> Work:
    mixer, scratch, _ = _attention_eager(s, layer, read)
    # queries, as wide as half of what is expanded, are roped, put together, scaled; latents repeat by head
    per_token = layer.expanded + 2 * layer.heads * s.latent_dim
    return mixer + 3 * layer.expanded // 2, scratch + read.tokens * per_token * read.item, 0


def conv_eager(s: ConvSpec, layer: LayerSize, read: Read) -> Work:
    return 0, 0, (2 * read.step + s.taps - 1) * s.channels * read.item  # its inputs, and its outputs: v is their slice


def delta_eager(s: DeltaSpec, layer: LayerSize, read: Read) -> Work:
    keys = s.heads * s.key_dim  # numbers of q, and of k, which is kept beside the new matrix
    # the composed rule keeps the matrix of every row
    return keys, read.step * keys * s.value_dim * 4, read.step * keys * read.item + s.matrix_bytes


def eager_bytes(layer: LayerSize, states: Sequence[int], read: Read) -> int:
    """Predict the larger of two spans: from the mixer's first products to its last, and the FFN's first product."""
    mixer = layer.mixer + states[0]  # numbers per row, the residual stream in the place of the last product
    up = 2 * (layer.ffn - 2 * layer.hidden) // 3  # rows of a dense FFN's first matrix; experts have no more
    decoded = 2 * 4 * min(HOST_VALUES, up * layer.hidden)  # MLX's dequantize takes another block for itself
    return max(read.step * mixer * read.item + states[1], read.step * layer.ffn * read.item + decoded)


# -- on a Mac's GPU ----------------------------------------------------------------------------------------------------


def kv_lazy(s: KVSpec, layer: LayerSize, read: Read) -> Work:
    mixer = 2 * layer.heads * s.key_dim + s.numbers  # roped, and laid out head by head
    return mixer, (_seen(s, read) + _outgrown(s, read)) * s.numbers * read.item, 0


def latent_lazy(s: LatentSpec, layer: LayerSize, read: Read) -> Work:
    # queries are put together like keys; these are made by head, then laid out for the products
    return layer.expanded // 2, 2 * read.tokens * layer.expanded * read.item, 0


def conv_lazy(s: ConvSpec, layer: LayerSize, read: Read) -> Work:
    return 0, 0, (read.step + s.taps - 1) * s.channels * read.item  # of which a step's tails are cut at its end


def delta_lazy(s: DeltaSpec, layer: LayerSize, read: Read) -> Work:
    return 2 * s.heads * s.key_dim + layer.hidden, 0, 0  # q and k, tiled over the value heads


def lazy_bytes(layer: LayerSize, states: Sequence[int], read: Read) -> int:
    return read.step * (layer.mixer + states[0] + layer.ffn + 4 * layer.hidden) * read.item + states[1]
