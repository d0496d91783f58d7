"""Workspace that a prompt takes on a GPU beside weights and state, from shapes alone.

The terms follow the allocations of launchers from the arena (`memory.Arena`), in two halves that layers use in turn;
tests/models/test_cuda_work.py compares prediction and use.
"""

from collections.abc import Sequence

from common.backend import LayerSize
from common.step import MAX_DECODE_ROWS
from common.storage import DeltaSpec, KVSpec, LatentSpec, LayerSpec, Spec, all_specs
from cuda_backend.caches.kv import kv_planes
from cuda_backend.caches.packed import exact_spec, keeps_exact, stats_bytes
from cuda_backend.caches.planes import TILE, planes_bytes, rows_held
from cuda_backend.caches.window import window_places
from cuda_backend.layout import EXPANDED, most_sums_bytes, padded
from cuda_backend.memory import Arena
from cuda_backend.products import EXPAND
from cuda_backend.replay import bucket
from cuda_backend.rows import pieces_of
from cuda_backend.sampling import DRAW
from cuda_backend.weights import UPLOAD

STEPS = 2  # whose logits are held at the same time, beside those that each sequence's prompt ended with
SLACK, CHUNKS = 1.1, 3  # unused memory of chunks: a factor on their size, and chunks per part


def snapshot_bytes(spec: Sequence[LayerSpec], tokens: int) -> int:
    """Count the bytes of a slot's two snapshots of recurrent states and rings, from which a prompt may continue."""
    return 2 * sum(_copied_bytes(s, tokens) for s in all_specs(spec))


def _copied_bytes(s: Spec, tokens: int) -> int:
    match s:
        case DeltaSpec():
            return s.matrix_bytes
        case KVSpec() if s.window is None and keeps_exact(s):
            return _copied_bytes(exact_spec(s), tokens) + stats_bytes(s, 1)
        case KVSpec() if s.window is not None:
            return planes_bytes(kv_planes(s, 1, window_places(s, tokens)))
    return 0


def work_bytes(layers: Sequence[LayerSize], tokens: int, rows: int) -> int:
    """Predict the peak bytes of arena and uploader while a prompt of `tokens` tokens is read in steps of `rows`."""
    # EXPAND numbers of two bytes for matrices that prefill expands, which is more than sampling.WORKSPACE
    half = max(_layer_bytes(layer, tokens, min(rows, tokens)) for layer in layers)
    return int(2 * SLACK * half) + CHUNKS * Arena.CHUNK + 2 * EXPAND + UPLOAD


def logits_bytes(vocab: int, sequences: int) -> int:
    """Predict the bytes of logits and of the tokens drawn from them, where a step has a row of each of `sequences`.

    Weights of draws lie in the arena's memory for expanded matrices, which `work_bytes` counts.
    """
    rows = min(sequences, MAX_DECODE_ROWS)
    of_prompts, of_steps = sequences, STEPS * rows
    return (of_prompts + of_steps) * (4 * vocab + 8 * pieces_of(vocab)) + of_steps * (DRAW.size + 4)


def decode_bytes(layers: Sequence[LayerSize], tokens: int, sequences: int) -> int:
    """Predict the bytes of attention's sums in steps that decode several sequences of up to `tokens` tokens."""
    rows, held = bucket(min(sequences, MAX_DECODE_ROWS)), rows_held(tokens)
    states = [(layer.heads, s) for layer in layers for s in layer.states.values() if sequences > 1]
    widths = {(heads, padded(s.key_dim)) for heads, s in states if isinstance(s, KVSpec)}
    widths |= {(heads, padded(s.latent_dim)) for heads, s in states if isinstance(s, LatentSpec)}
    return max((most_sums_bytes(held, rows, *shape) for shape in widths), default=0)


def _layer_bytes(layer: LayerSize, tokens: int, rows: int) -> int:
    """float32 that enters and leaves matrices, and what lies between."""
    values, beside = layer.mixer + layer.ffn + 2 * layer.hidden, 0
    for s in layer.states.values():
        match s:
            case KVSpec():
                values += layer.heads * s.key_dim // 2 + layer.heads * s.value_dim
                if s.window is None and keeps_exact(s):  # queries and rows in float16 once more, and the ring's
                    values += layer.heads * (s.key_dim // 2 + 1) + s.exact.numbers // 2
                    beside += (s.packing.first + s.packing.recent + 2 * TILE) * s.exact.numbers // 2
            case DeltaSpec():
                values += 2 * s.key_heads * s.key_dim + 3 * s.heads * s.value_dim
            case LatentSpec():
                # keys and values of all heads, and rows of pages or in a format, as float16
                row = padded(s.latent_dim) + padded(s.rope_dim)
                beside += min(tokens, EXPANDED) * (layer.expanded + row) // 2
                values += 8 * layer.heads if tokens > EXPANDED else 0
    return 4 * (rows * values + beside)
