"""Predict the workspace of a prompt on a GPU, beside weights and state, from shapes alone.

The terms follow the allocations of launchers from the arena (`memory.Arena`), in two halves that layers alternate;
tests/models/test_cuda_work.py compares prediction and use.
"""

from collections.abc import Sequence

from common.backend import LayerSize
from common.step import MAX_DECODE_ROWS
from common.storage import LayerSpec, all_specs, grows
from cuda_backend.caches.planes import rows_held
from cuda_backend.layout import most_sums_bytes
from cuda_backend.memory import Arena
from cuda_backend.products import EXPAND
from cuda_backend.replay import LONG_ROWS, bucket
from cuda_backend.rows import pieces_of
from cuda_backend.sampling import DRAW
from cuda_backend.state_table import kept, store_of
from cuda_backend.weights import UPLOAD

STEPS = 2  # steps whose logits are held at the same time, beside the last logits of each sequence's prompt
SLACK, CHUNKS = 1.1, 3  # unused memory of chunks: a factor on their size, and chunks per part


def snapshot_bytes(spec: Sequence[LayerSpec], tokens: int) -> int:
    """Count the bytes of a slot's two snapshots of recurrent states and rings, from which prompts may continue."""
    return 2 * sum(store_of(s).copied_bytes(s, tokens) for s in all_specs(spec))


def work_bytes(layers: Sequence[LayerSize], tokens: int, rows: int) -> int:
    """Predict the peak bytes of arena and uploader while a prompt of `tokens` tokens is read in steps of `rows`."""
    # EXPAND numbers of two bytes for matrices that prefill expands, the head among them where all rows give logits;
    # sampling.WORKSPACE is less, and reuses them
    half = max(_layer_bytes(layer, tokens, min(rows, tokens)) for layer in layers)
    return int(2 * SLACK * half) + CHUNKS * Arena.CHUNK + 2 * EXPAND + UPLOAD


def logits_bytes(vocab: int, sequences: int) -> int:
    """Predict the bytes of logits and of tokens sampled from them, in steps of one row of each of `sequences`.

    Draw weights lie in the arena's memory for expanded matrices, which `work_bytes` counts.
    """
    rows = min(sequences, MAX_DECODE_ROWS)
    of_prompts, of_steps = sequences, STEPS * rows
    return (of_prompts + of_steps) * (4 * vocab + 8 * pieces_of(vocab)) + of_steps * (DRAW.itemsize + 4)


def sums_bytes(layers: Sequence[LayerSize], tokens: int, sequences: int) -> int:
    """Predict the bytes of attention's sums in steps that decode several sequences of up to `tokens` tokens."""
    rows, held = bucket(min(sequences, MAX_DECODE_ROWS)), rows_held(tokens)
    states = [(layer.heads, s) for layer in layers for s in layer.states.values() if sequences > 1 and grows(s)]
    shapes = {(heads, kept(s).width(s)) for heads, s in states}
    return max((most_sums_bytes(held, rows, *shape) for shape in shapes), default=0)


def hidden_bytes(layers: Sequence[LayerSize]) -> int:
    """Predict the bytes of hidden states between the parts of a prefill step.

    There are four copies: at a part's end, its copy, the copy of the part before, and the next part's input.
    """
    return 4 * 4 * LONG_ROWS * max((layer.hidden for layer in layers), default=0)


def _layer_bytes(layer: LayerSize, tokens: int, rows: int) -> int:
    """Count float32 numbers that enter and leave matrices, and those in between."""
    parts = [kept(s).work(s, layer, tokens) for s in layer.states.values()]
    values = layer.mixer + layer.ffn - layer.gathered + 2 * layer.hidden + sum(values for values, _ in parts)
    return 4 * (rows * values + sum(beside for _, beside in parts))
