"""What a prompt takes on a GPU beside weights and state, from shapes alone.

The terms are those of what launchers take from the arena (`launch.Arena`), in two halves that layers use in turn;
tests/models/test_cuda_work.py compares them with it.
"""

from collections.abc import Sequence

from common.ops import LayerSize
from common.storage import NATIVE, DeltaSpec, KVSpec, LatentSpec
from cuda_backend.layout import padded
from cuda_backend.memory import Arena
from cuda_backend.products import EXPAND
from cuda_backend.weights import UPLOAD

SLACK, CHUNKS = 1.1, 3  # what chunks leave unused: a share of what they hold, and one of each part


def snapshot_bytes(layers: Sequence[LayerSize]) -> int:
    """Of the recurrent states, a copy of which a session keeps to go back to."""
    states = [s for layer in layers for s in layer.states.values() if isinstance(s, DeltaSpec)]
    return sum(s.matrix_bytes for s in states)


def work_bytes(layers: Sequence[LayerSize], tokens: int, rows: int) -> int:
    """Most bytes of the arena and of the uploader's while `tokens` tokens are read in steps of `rows`."""
    half = max(_layer_bytes(layer, tokens, min(rows, tokens)) for layer in layers)
    return int(2 * SLACK * half) + CHUNKS * Arena.CHUNK + 2 * EXPAND + UPLOAD


def _layer_bytes(layer: LayerSize, tokens: int, rows: int) -> int:
    """float32 that enters and leaves matrices, and what lies between."""
    values, past = layer.mixer + layer.ffn + 2 * layer.hidden, 0
    for s in layer.states.values():
        match s:
            case KVSpec():
                values += layer.heads * s.key_dim // 2 + layer.heads * s.value_dim
            case DeltaSpec():
                values += 2 * s.key_heads * s.key_dim + 3 * s.heads * s.value_dim
            case LatentSpec():
                past += layer.expanded  # keys and values of all heads in float16, made of float16
                if s.latent_format != NATIVE:
                    past += (padded(s.latent_dim) + padded(s.rope_dim)) // 2  # rows in float16
    return 4 * (rows * values + tokens * past)
