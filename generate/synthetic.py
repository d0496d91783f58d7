"""Models of released shapes with random weights, for benchmarks without a download.

The types are those that llama.cpp's quantizer gives each matrix (src/llama-quant.cpp, Q4_K_M: Q6_K for the head, and
for value projections, fused qkv and down projections of a third of the layers and both ends; Q5_0 and Q8_0 for rows
that no block of 256 divides; routers stay float32).
"""

import zlib
from pathlib import Path
from typing import Any

import numpy as np

from common.checkpoint import Checkpoint
from common.errors import UsageError
from common.models import ARCHITECTURES, Model, rank_config
from common.ops import Ops
from common.quants import BLOCKS, RANDOM_EXPONENT, RANDOM_HALVES
from common.tensors import Tensor
from common.weights import Matrix, Stored, Vector, dense, make_weights, own_part, to_backend

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
    "qwen3-next-80b-a3b": {
        "general.architecture": "qwen3next",
        "qwen3next.vocab_size": 151936,
        "qwen3next.embedding_length": 2048,
        "qwen3next.block_count": 48,
        "qwen3next.attention.head_count": 16,
        "qwen3next.attention.head_count_kv": 2,
        "qwen3next.attention.key_length": 256,
        "qwen3next.ssm.group_count": 16,
        "qwen3next.ssm.time_step_rank": 32,
        "qwen3next.ssm.state_size": 128,
        "qwen3next.ssm.inner_size": 4096,
        "qwen3next.ssm.conv_kernel": 4,
        "qwen3next.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen3next.expert_count": 512,
        "qwen3next.expert_used_count": 10,
        "qwen3next.expert_feed_forward_length": 512,
        "qwen3next.expert_shared_feed_forward_length": 512,
        "qwen3next.rope.freq_base": 1e7,
        "qwen3next.rope.dimension_count": 64,
        "qwen3next.context_length": 262144,
    },
    "gemma-3-27b": {
        "general.architecture": "gemma3",
        "gemma3.vocab_size": 262144,
        "gemma3.embedding_length": 5376,
        "gemma3.block_count": 62,
        "gemma3.attention.head_count": 32,
        "gemma3.attention.head_count_kv": 16,
        "gemma3.attention.key_length": 128,
        "gemma3.attention.sliding_window": 1024,
        "gemma3.feed_forward_length": 21504,
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma3.rope.freq_base": 1e6,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
        "gemma3.context_length": 131072,
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
    "phi-4": {
        "general.architecture": "phi3",
        "phi3.vocab_size": 100352,
        "phi3.embedding_length": 5120,
        "phi3.block_count": 40,
        "phi3.attention.head_count": 40,
        "phi3.attention.head_count_kv": 10,
        "phi3.attention.sliding_window": 0,
        "phi3.feed_forward_length": 17920,
        "phi3.attention.layer_norm_rms_epsilon": 1e-5,
        "phi3.rope.freq_base": 2.5e5,
        "phi3.rope.dimension_count": 128,
        "phi3.context_length": 16384,
    },
    "qwen2.5-7b": {
        "general.architecture": "qwen2",
        "qwen2.vocab_size": 152064,
        "qwen2.embedding_length": 3584,
        "qwen2.block_count": 28,
        "qwen2.attention.head_count": 28,
        "qwen2.attention.head_count_kv": 4,
        "qwen2.attention.key_length": 128,
        "qwen2.feed_forward_length": 18944,
        "qwen2.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen2.rope.freq_base": 1e6,
        "qwen2.context_length": 32768,
    },
    "qwen3-30b-a3b": {
        "general.architecture": "qwen3moe",
        "qwen3moe.vocab_size": 151936,
        "qwen3moe.embedding_length": 2048,
        "qwen3moe.block_count": 48,
        "qwen3moe.attention.head_count": 32,
        "qwen3moe.attention.head_count_kv": 4,
        "qwen3moe.attention.key_length": 128,
        "qwen3moe.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen3moe.expert_count": 128,
        "qwen3moe.expert_used_count": 8,
        "qwen3moe.expert_feed_forward_length": 768,
        "qwen3moe.rope.freq_base": 1e6,
        "qwen3moe.context_length": 40960,
    },
    "laguna-xs.2": {
        "general.architecture": "laguna",
        "laguna.vocab_size": 100352,
        "laguna.embedding_length": 2048,
        "laguna.block_count": 40,
        "laguna.attention.head_count": [48, 64, 64, 64] * 10,
        "laguna.attention.head_count_kv": 8,
        "laguna.attention.key_length": 128,
        "laguna.attention.sliding_window": 512,
        "laguna.attention.layer_norm_rms_epsilon": 1e-6,
        "laguna.feed_forward_length": 8192,
        "laguna.leading_dense_block_count": 1,
        "laguna.expert_count": 256,
        "laguna.expert_used_count": 8,
        "laguna.expert_feed_forward_length": 512,
        "laguna.expert_shared_feed_forward_length": 512,
        "laguna.expert_weights_scale": 2.5,
        "laguna.rope.freq_base": 5e5,
        "laguna.rope.freq_base_swa": 1e4,
        "laguna.rope.dimension_count": 64,
        "laguna.rope.dimension_count_swa": 128,
        "laguna.rope.scaling.type": "yarn",
        "laguna.rope.scaling.factor": 32.0,
        "laguna.rope.scaling.original_context_length": 4096,
        "laguna.rope.scaling.yarn_beta_fast": 64.0,
        "laguna.rope.scaling.yarn_beta_slow": 1.0,
        "laguna.context_length": 131072,
    },
    "glm-4.5-air": {
        "general.architecture": "glm4moe",
        "glm4moe.vocab_size": 151552,
        "glm4moe.embedding_length": 4096,
        "glm4moe.block_count": 46,
        "glm4moe.attention.head_count": 96,
        "glm4moe.attention.head_count_kv": 8,
        "glm4moe.attention.key_length": 128,
        "glm4moe.attention.layer_norm_rms_epsilon": 1e-5,
        "glm4moe.feed_forward_length": 10944,
        "glm4moe.leading_dense_block_count": 1,
        "glm4moe.expert_count": 128,
        "glm4moe.expert_used_count": 8,
        "glm4moe.expert_shared_count": 1,
        "glm4moe.expert_feed_forward_length": 1408,
        "glm4moe.expert_weights_scale": 1.0,
        "glm4moe.rope.freq_base": 1e6,
        "glm4moe.rope.dimension_count": 64,
        "glm4moe.context_length": 131072,
    },
    "gpt-oss-20b": {
        "general.architecture": "gpt-oss",
        "gpt-oss.vocab_size": 201088,
        "gpt-oss.embedding_length": 2880,
        "gpt-oss.block_count": 24,
        "gpt-oss.attention.head_count": 64,
        "gpt-oss.attention.head_count_kv": 8,
        "gpt-oss.attention.key_length": 64,
        "gpt-oss.attention.sliding_window": 128,
        "gpt-oss.attention.layer_norm_rms_epsilon": 1e-5,
        "gpt-oss.expert_count": 32,
        "gpt-oss.expert_used_count": 4,
        "gpt-oss.expert_feed_forward_length": 2880,
        "gpt-oss.rope.freq_base": 1.5e5,
        "gpt-oss.rope.scaling.type": "yarn",
        "gpt-oss.rope.scaling.factor": 32.0,
        "gpt-oss.rope.scaling.original_context_length": 4096,
        "gpt-oss.context_length": 131072,
    },
    "glm-4.7-flash": {
        "general.architecture": "deepseek2",
        "deepseek2.vocab_size": 154880,
        "deepseek2.embedding_length": 2048,
        "deepseek2.block_count": 47,
        "deepseek2.attention.head_count": 20,
        "deepseek2.attention.q_lora_rank": 768,
        "deepseek2.attention.kv_lora_rank": 512,
        "deepseek2.attention.key_length_mla": 256,
        "deepseek2.attention.value_length_mla": 256,
        "deepseek2.attention.layer_norm_rms_epsilon": 1e-5,
        "deepseek2.feed_forward_length": 10240,
        "deepseek2.leading_dense_block_count": 1,
        "deepseek2.expert_count": 64,
        "deepseek2.expert_used_count": 4,
        "deepseek2.expert_shared_count": 1,
        "deepseek2.expert_feed_forward_length": 1536,
        "deepseek2.expert_weights_scale": 1.8,
        "deepseek2.rope.freq_base": 1e6,
        "deepseek2.rope.dimension_count": 64,
        "deepseek2.context_length": 202752,
    },
    "smollm3-3b": {
        "general.architecture": "smollm3",
        "smollm3.vocab_size": 128256,
        "smollm3.embedding_length": 2048,
        "smollm3.block_count": 36,
        "smollm3.attention.head_count": 16,
        "smollm3.attention.head_count_kv": 4,
        "smollm3.feed_forward_length": 11008,
        "smollm3.attention.layer_norm_rms_epsilon": 1e-6,
        "smollm3.rope.freq_base": 5e6,
        "smollm3.context_length": 65536,
    },
    "granite-3.3-8b": {
        "general.architecture": "granite",
        "granite.vocab_size": 49159,
        "granite.embedding_length": 4096,
        "granite.block_count": 40,
        "granite.attention.head_count": 32,
        "granite.attention.head_count_kv": 8,
        "granite.attention.scale": 0.0078125,
        "granite.feed_forward_length": 12800,
        "granite.attention.layer_norm_rms_epsilon": 1e-5,
        "granite.embedding_scale": 12.0,
        "granite.residual_scale": 0.22,
        "granite.logit_scale": 16.0,
        "granite.rope.freq_base": 1e7,
        "granite.context_length": 131072,
    },
    "granite-3.1-3b-a800m": {
        "general.architecture": "granitemoe",
        "granitemoe.vocab_size": 49155,
        "granitemoe.embedding_length": 1536,
        "granitemoe.block_count": 32,
        "granitemoe.attention.head_count": 24,
        "granitemoe.attention.head_count_kv": 8,
        "granitemoe.attention.scale": 0.015625,
        "granitemoe.feed_forward_length": 512,
        "granitemoe.expert_count": 40,
        "granitemoe.expert_used_count": 8,
        "granitemoe.attention.layer_norm_rms_epsilon": 1e-6,
        "granitemoe.embedding_scale": 12.0,
        "granitemoe.residual_scale": 0.22,
        "granitemoe.logit_scale": 6.0,
        "granitemoe.rope.freq_base": 1e7,
        "granitemoe.context_length": 131072,
    },
    "olmo-3-7b": {
        "general.architecture": "olmo2",
        "olmo2.vocab_size": 100278,
        "olmo2.embedding_length": 4096,
        "olmo2.block_count": 32,
        "olmo2.attention.head_count": 32,
        "olmo2.attention.head_count_kv": 32,
        "olmo2.attention.sliding_window": 4096,
        "olmo2.feed_forward_length": 11008,
        "olmo2.attention.layer_norm_rms_epsilon": 1e-6,
        "olmo2.rope.freq_base": 5e5,
        "olmo2.rope.scaling.type": "yarn",
        "olmo2.rope.scaling.factor": 8.0,
        "olmo2.rope.scaling.original_context_length": 8192,
        "olmo2.context_length": 65536,
    },
    "deepseek-v2-lite": {
        "general.architecture": "deepseek2",
        "deepseek2.vocab_size": 102400,
        "deepseek2.embedding_length": 2048,
        "deepseek2.block_count": 27,
        "deepseek2.attention.head_count": 16,
        "deepseek2.attention.kv_lora_rank": 512,
        "deepseek2.attention.key_length_mla": 192,
        "deepseek2.attention.value_length_mla": 128,
        "deepseek2.attention.layer_norm_rms_epsilon": 1e-6,
        "deepseek2.feed_forward_length": 10944,
        "deepseek2.leading_dense_block_count": 1,
        "deepseek2.expert_count": 64,
        "deepseek2.expert_used_count": 6,
        "deepseek2.expert_shared_count": 2,
        "deepseek2.expert_feed_forward_length": 1408,
        "deepseek2.expert_weights_scale": 1.0,
        "deepseek2.expert_gating_func": 1,
        "deepseek2.rope.freq_base": 1e4,
        "deepseek2.rope.dimension_count": 64,
        "deepseek2.rope.scaling.type": "yarn",
        "deepseek2.rope.scaling.factor": 40.0,
        "deepseek2.rope.scaling.original_context_length": 4096,
        "deepseek2.rope.scaling.yarn_log_multiplier": 0.0707,
        "deepseek2.context_length": 163840,
    },
}
METADATA["gpt-oss-120b"] = METADATA["gpt-oss-20b"] | {"gpt-oss.block_count": 36, "gpt-oss.expert_count": 128}
TIED = ("gemma3", "granite", "granitemoe", "smollm3")  # architectures whose embedding is the head
HEAD = "output.weight", "token_embd.weight"  # its name if it is not the embedding, and if it is
RECIPES = ("q4_k_m", "q5_k_m", "q4_0", "q8_0", "mxfp4")  # the last has MXFP4 experts and the rest in Q8_0


def synthetic(name: str, ops: Ops, progress: bool = False) -> Model:
    """Return the model `shape:recipe`, such as "qwen3.6-27b:q4_k_m", on the backend of `ops`."""
    checkpoint = synthetic_checkpoint(name)
    model: Model = ops.load(lambda each: _made(checkpoint, each, progress))
    return model


def _made(checkpoint: Checkpoint, ops: Ops, progress: bool) -> Model:
    architecture = checkpoint.config["general.architecture"]
    definition = ARCHITECTURES[architecture]
    config = rank_config(definition, checkpoint, ops.ranks)
    layout = definition.layout(config, checkpoint)

    def made(entry: Matrix | Vector) -> Any:
        tensors = [own_part(checkpoint, stored)[0] for stored in entry.parts]  # as canonical as they need to be
        return to_backend(entry, tensors, ops)

    weights = make_weights(layout, ops, made, "making", progress)
    return Model(architecture, definition, config, layout, weights, ops)


def synthetic_checkpoint(name: str) -> Checkpoint:
    """Make a checkpoint of the shape and recipe, without memory: all rows of a matrix are one random row.

    Products take the same time as with other weights; `cuda_backend/random_weights.py` makes complete matrices.
    """
    shape, _, recipe = name.lower().partition(":")  # files are named with capitals
    if shape not in METADATA or recipe not in RECIPES:
        shapes, recipes = ", ".join(METADATA), ", ".join(RECIPES)
        raise UsageError(
            f"synthetic model {name!r} is unknown; give SHAPE:RECIPE with a shape of {shapes} and a recipe of {recipes}"
        )
    metadata = METADATA[shape]
    architecture = metadata["general.architecture"]
    definition = ARCHITECTURES[architecture]
    layers = metadata[f"{architecture}.block_count"]
    checkpoint = Checkpoint(Path(name), "gguf", metadata, _known_tensors(metadata, architecture, recipe, layers))
    layout = definition.layout(definition.read_config(checkpoint), checkpoint)
    tensors = {}
    for entry in layout.entries():
        for stored in entry.parts:
            key, is_matrix = stored.names[0], isinstance(entry, Matrix)
            type_ = _type(stored, recipe, layers, HEAD[architecture in TIED])
            tensors[key] = random_matrix(key, stored.shape, type_) if is_matrix else constant_vector(key, stored.shape)
    return Checkpoint(Path(name), "gguf", metadata, tensors)


def _known_tensors(metadata: dict[str, Any], architecture: str, recipe: str, layers: int) -> dict[str, Tensor]:
    """List what a definition reads of a file before its layout: a head, an attention gate, a tensor per layer."""
    head = metadata[f"{architecture}.vocab_size"], metadata[f"{architecture}.embedding_length"]
    tensors = {f"blk.{i}": dense(f"blk.{i}", np.zeros(1)) for i in range(layers)}
    name = HEAD[architecture in TIED]
    tensors[name] = random_matrix(name, head, _type(Stored((name,), head), recipe, layers, name))
    if architecture == "glm4moe":  # whose q, k and v have biases
        heads = metadata["glm4moe.attention.head_count"] * metadata["glm4moe.attention.key_length"]
        tensors["blk.0.attn_q.bias"] = constant_vector("blk.0.attn_q.bias", (heads,))
    if architecture == "laguna":  # whose gate is one per head
        heads = metadata["laguna.attention.head_count"][0]
        tensors["blk.0.attn_gate.weight"] = random_matrix("blk.0.attn_gate.weight", (heads, head[1]), "Q4_K")
    return tensors


def _type(stored: Stored, recipe: str, layers: int, head: str) -> str:
    part = stored.names[0].split(".")
    if "ffn_gate_inp" in part:
        return "F32"
    if recipe == "mxfp4":
        return "MXFP4" if part[-2].endswith("_exps") else "Q8_0"
    if not recipe.endswith("_k_m"):
        return recipe.upper()
    most = recipe.removesuffix("_m").upper()
    type_ = "Q6_K" if _has_more_bits(stored.names[0], layers, head) else most
    if stored.shape[-1] % 256:  # llama.cpp's fallback
        return {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}[type_]
    return type_


def _has_more_bits(name: str, layers: int, head: str) -> bool:
    part = name.split(".")
    if name == head:
        return True
    if part[0] == "blk" and part[2] in ("attn_v", "attn_qkv", "ffn_down", "ffn_down_exps", "ffn_down_shexp"):
        layer = int(part[1])
        return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    return False


def constant_vector(name: str, shape: tuple[int, ...]) -> Tensor:
    """Make a norm weight, decay or filter in F32, of one number with which activations stay finite."""
    value = -1.0 if name.endswith("ssm_a") else 0.25 if "conv1d" in name else 0.0 if "probs_b" in name else 1.0
    return dense(name, np.full(shape, value))


def random_matrix(name: str, shape: tuple[int, ...], type_: str) -> Tensor:
    """Make a matrix whose rows are all one random row, in the memory of one; the rows of a router differ."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    if type_ == "F32":  # a router, whose rows must differ
        return dense(name, random.normal(scale=shape[-1] ** -0.5, size=shape))
    block = BLOCKS[type_]
    row = random.integers(0, 256, (shape[-1] // block.elements, block.bytes), dtype=np.uint8)
    if type_ in RANDOM_EXPONENT:
        row[:, 0] = RANDOM_EXPONENT[type_]
    for at, value in zip(block.halves, RANDOM_HALVES.get(type_, ()), strict=True):
        row[:, at : at + 2] = np.array([value], "<f2").view(np.uint8)
    return Tensor(name, type_, shape, np.broadcast_to(row.reshape(-1), (*shape[:-1], row.size)))
