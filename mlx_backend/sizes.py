"""What MLX takes beside weights and state while a prompt is read.

MLX frees an array when the work that reads it is done, and its scheduler runs about one layer ahead of that work, so
that all which one layer makes is alive at once. The terms are measured on MLX 0.32's CPU device (tests/test_fit.py);
on a GPU, where attention and the delta rule are single kernels, they are an estimate.
"""

from collections.abc import Sequence

from common.ops import LayerSize
from common.step import ConvSpec, DeltaSpec, KVSpec, LatentSpec, WindowSpec
from mlx_backend.states import rows_held


def work_bytes(layers: Sequence[LayerSize], tokens: int, rows: int, item: int, fused: bool) -> int:
    rows = min(rows, tokens)
    streams = [s for layer in layers for s in layer.states.values() if isinstance(s, ConvSpec)]
    kept = sum((rows + s.taps - 1) * s.channels for s in streams)  # a chunk's tails are cut out of these at its end
    return item * kept + max(_layer_bytes(layer, tokens, rows, item, fused) for layer in layers)


def _outgrown(s: KVSpec | WindowSpec, tokens: int, rows: int) -> int:
    """Rows of the buffer that the last step replaces by a larger one, if it does; a layer's old one lives till then."""
    window = s.window if isinstance(s, WindowSpec) else None
    before = rows_held(tokens - ((tokens - 1) % rows + 1), rows, window)
    return before if before != rows_held(tokens, rows, window) else 0


def _layer_bytes(layer: LayerSize, tokens: int, rows: int, item: int, fused: bool) -> int:
    mixer, ffn, scratch = layer.mixer, layer.ffn + 4 * layer.hidden, 0
    for s in layer.states.values():
        match s:
            case KVSpec() | WindowSpec():
                seen = tokens if isinstance(s, KVSpec) else min(tokens, s.window + rows)
                size = s.kv_heads * (s.key_dim + s.value_dim)
                mixer += 2 * layer.heads * s.key_dim + size  # roped, and laid out head by head
                scratch += (seen + _outgrown(s, tokens, rows)) * size * item
                scratch += 0 if fused else layer.heads * rows * seen * item + rows * seen
            case LatentSpec():
                mixer += layer.expanded // 2  # queries are put together like keys
                scratch += 2 * tokens * layer.expanded * item  # made by head, then laid out for the products
                scratch += 0 if fused else layer.heads * rows * tokens * item + rows * tokens
            case DeltaSpec():
                mixer += 2 * s.heads * s.key_dim + layer.hidden  # q and k, tiled over the value heads
                if not fused:  # the composed rule keeps the matrix after every row, and ends before the FFN begins
                    return max(rows * mixer * item + rows * s.heads * s.key_dim * s.value_dim * 4, rows * ffn * item)
    return rows * (mixer + ffn) * item + scratch
