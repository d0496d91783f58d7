"""A DFlash draft in the shapes of Qwen3.6-27B's with random weights, for benchmarks without a download."""

from pathlib import Path
from typing import Any

from common.checkpoint import Checkpoint
from common.models import Model
from common.models.dflash import DflashPair
from common.models.dflash_config import read_config
from common.models.dflash_load import load_draft
from common.models.dflash_weights import layout
from common.models.target import target_of
from common.tensors import Tensor
from common.weights import Matrix
from generate.synthetic import constant_vector, random_matrix

METADATA: dict[str, Any] = {
    "general.architecture": "dflash",
    "dflash.block_count": 5,
    "dflash.attention.head_count": 32,
    "dflash.attention.head_count_kv": 8,
    "dflash.attention.key_length": 128,
    "dflash.feed_forward_length": 17408,
    "dflash.attention.layer_norm_rms_epsilon": 1e-6,
    "dflash.rope.freq_base": 1e7,
    "dflash.attention.sliding_window": 2048,
    "dflash.attention.sliding_window_pattern": [True, True, True, True, False],
    "dflash.block_size": 16,
    "tokenizer.ggml.mask_token_id": 1,
}
TAPS = 5


def synthetic_pair(target: Model) -> DflashPair:
    """Return `target` with a draft of five layers in Q8_0 that reads five of its layers."""
    hidden, layers = target.config.hidden, len(target.layout.layers)
    ids = [round(1 + i * (layers - 4) / (TAPS - 1)) for i in range(TAPS)]
    metadata = METADATA | {"dflash.embedding_length": hidden, "dflash.target_layers": [i + 1 for i in ids]}
    tensors = {f"blk.{i}": constant_vector(f"blk.{i}", (1,)) for i in range(5)}
    tensors["fc.weight"] = random_matrix("fc.weight", (hidden, TAPS * hidden), "Q8_0")
    checkpoint = Checkpoint(Path("synthetic draft"), "gguf", metadata, tensors)
    config = read_config(checkpoint, target_of(target.definition, target.config))
    tensors = {}
    for entry in layout(config, checkpoint).entries():
        for part in entry.parts:
            tensors[part.names[0]] = _tensor(part.names[0], part.part_of or part.shape, isinstance(entry, Matrix))
    checkpoint = Checkpoint(Path("synthetic draft"), "gguf", metadata, tensors)
    weights = load_draft(checkpoint, config, target)
    parts = (target.architecture, target.definition, target.config, target.layout, target.weights, target.ops)
    return DflashPair(*parts, config, weights)


def _tensor(name: str, shape: tuple[int, ...], is_matrix: bool) -> Tensor:
    return random_matrix(name, shape, "Q8_0") if is_matrix else constant_vector(name, shape)
