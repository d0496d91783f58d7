"""Models of real shapes without a download, for measuring: what a file would hold, but for its numbers.

The types are those that llama.cpp's quantizer gives each matrix (src/llama-quant.cpp, Q4_K_M: Q6_K for the head, and
for value projections, fused qkv and down projections of a third of the layers and both ends).
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from common.checkpoint import Checkpoint
from common.errors import UsageError
from common.models import ARCHITECTURES, Model
from common.ops import Ops
from common.quants import BLOCKS
from common.tensors import Tensor
from common.weights import Matrix, Table, Vector, dense

METADATA: dict[str, dict[str, Any]] = {
    "qwen3.6-27b": {
        "general.architecture": "qwen35",
        "qwen35.vocab_size": 248320,
        "qwen35.embedding_length": 5120,
        "qwen35.block_count": 64,
        "qwen35.attention.head_count": 24,
        "qwen35.attention.head_count_kv": 4,
        "qwen35.attention.key_length": 256,
        "qwen35.feed_forward_length": 17408,
        "qwen35.ssm.group_count": 16,
        "qwen35.ssm.time_step_rank": 48,
        "qwen35.ssm.state_size": 128,
        "qwen35.ssm.inner_size": 6144,
        "qwen35.ssm.conv_kernel": 4,
        "qwen35.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen35.rope.freq_base": 1e7,
        "qwen35.rope.dimension_count": 64,
        "qwen35.context_length": 262144,
    },
    "wedlm-8b": {  # the shapes of Qwen3-8B
        "general.architecture": "qwen3",
        "qwen3.vocab_size": 151936,
        "qwen3.embedding_length": 4096,
        "qwen3.block_count": 36,
        "qwen3.attention.head_count": 32,
        "qwen3.attention.head_count_kv": 8,
        "qwen3.attention.key_length": 128,
        "qwen3.feed_forward_length": 12288,
        "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen3.rope.freq_base": 1e6,
        "qwen3.context_length": 40960,
    },
}
RECIPES = ("q4_k_m", "q4_0", "q8_0")


def synthetic(name: str, ops: Ops) -> Model:
    """The model `shape:recipe`, such as "qwen3.6-27b:q4_k_m".

    Its matrices reach `ops.weight` as tensors whose bytes are all one byte of memory: `ops` is a backend that makes
    random weights of the same types itself.
    """
    shape, _, recipe = name.partition(":")
    if shape not in METADATA or recipe not in RECIPES:
        shapes, recipes = ", ".join(METADATA), ", ".join(RECIPES)
        raise UsageError(f"synthetic model {name!r} is unknown; a shape of {shapes}, a colon, one of {recipes}")
    metadata = METADATA[shape]
    architecture = metadata["general.architecture"]
    definition = ARCHITECTURES[architecture]
    layers = metadata[f"{architecture}.block_count"]
    # the definition asks which names exist and how large a tensor may be: a head of its own, and one tensor per layer
    sizes = metadata[f"{architecture}.vocab_size"], metadata[f"{architecture}.embedding_length"]
    tensors = {"output.weight": _stored("output.weight", sizes, _type("output.weight", recipe, layers))}
    tensors |= {f"blk.{i}": dense(f"blk.{i}", np.zeros(1)) for i in range(layers)}
    checkpoint = Checkpoint(Path(name), "gguf", metadata, tensors)
    config = definition.read_config(checkpoint)
    layout = definition.layout(config, checkpoint)

    def made(entry: Matrix | Vector | None) -> Any:
        if entry is None:
            return None
        if isinstance(entry, Vector):
            name = entry.stored.names[0]
            value = -1.0 if name.endswith("ssm_a") else 0.25 if "conv1d" in name else 1.0
            return ops.vector(dense(name, np.full(entry.stored.shape, value)))
        return ops.weight(*(_stored(s.names[0], s.shape, _type(s.names[0], recipe, layers)) for s in entry.parts))

    def handles(table: Table) -> SimpleNamespace:
        return SimpleNamespace(**{key: made(entry) for key, entry in table.items()})

    weights = handles(layout.top)
    weights.layers = [handles(table) for table in layout.layers]
    return Model(architecture, definition, config, layout, weights, ops)


def _type(name: str, recipe: str, layers: int) -> str:
    if recipe != "q4_k_m":
        return recipe.upper()
    if name == "output.weight":
        return "Q6_K"
    part = name.split(".")
    if part[0] == "blk" and part[2] in ("attn_v", "attn_qkv", "ffn_down"):
        layer = int(part[1])
        if layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2:
            return "Q6_K"
    return "Q4_K"


def _stored(name: str, shape: tuple[int, ...], type_: str) -> Tensor:
    row_bytes = shape[-1] // BLOCKS[type_].elements * BLOCKS[type_].bytes
    return Tensor(name, type_, shape, np.broadcast_to(np.zeros(1, np.uint8), (*shape[:-1], row_bytes)))
