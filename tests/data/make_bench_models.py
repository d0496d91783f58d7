"""Write the folders that README's comparison with mlx-lm was measured on: python tests/data/make_bench_models.py FOLDER

smollm2-135m-q4_1   the weights of the demo GGUF as MLX holds them, in the layout of mlx-lm's llama
qwen35-0.1b-4bit    a random Qwen3.5 of mlx-lm's own, quantized by MLX
qwen35moe-4bit, laguna-4bit, glm-4bit    the same for the mixtures of experts, with the true models' heads and top-k
"""

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import glm4_moe_lite, laguna, qwen3_5, qwen3_5_moe

from common.checkpoint import open_checkpoint
from common.hub import resolve_model
from common.models import load_model
from mlx_backend.ops import MlxOps

QWEN35 = {
    "model_type": "qwen3_5_text",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": True,
    "full_attention_interval": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "hidden_act": "silu",
}

QUANTIZATION = {"group_size": 64, "bits": 4}
QWEN35_MOE = QWEN35 | {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
MIXTURE = {"hidden_size": 768, "intermediate_size": 2048, "vocab_size": 32768, "max_position_embeddings": 32768}
LAGUNA = MIXTURE | {
    "model_type": "laguna",
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_attention_heads_per_layer": [12, 16, 16, 16] * 3,
    "layer_types": ["full_attention", *["sliding_attention"] * 3] * 3,
    "mlp_layer_types": ["dense"] + ["sparse"] * 11,
    "head_dim": 128,
    "sliding_window": 512,
    "gating": True,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "moe_routed_scaling_factor": 2.5,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
}
GLM = MIXTURE | {
    "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 10,
    "num_key_value_heads": 10,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.8,
    "num_experts_per_tok": 4,
    "q_lora_rank": 384,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "num_nextn_predict_layers": 0,
}


def smollm2(folder: Path) -> None:
    model = load_model(open_checkpoint(resolve_model("smollm2")), MlxOps(mx.float32))
    c, tensors = model.config, {}

    def put(name: str, weight, first: int = 0, last: int | None = None) -> None:
        for kind, array in zip(("weight", "scales", "biases"), weight[0][:3], strict=True):
            tensors[f"{name}.{kind}"] = mx.contiguous(array[first:last])

    put("model.embed_tokens", model.weights.embed)
    tensors["model.norm.weight"] = model.weights.norm
    q, k = c.heads * c.head_dim, c.kv_heads * c.head_dim
    for i, layer in enumerate(model.weights.layers):
        at = f"model.layers.{i}"
        put(f"{at}.self_attn.q_proj", layer.qkv, 0, q)
        put(f"{at}.self_attn.k_proj", layer.qkv, q, q + k)
        put(f"{at}.self_attn.v_proj", layer.qkv, q + k)
        put(f"{at}.self_attn.o_proj", layer.o)
        put(f"{at}.mlp.gate_proj", layer.gate_up, 0, c.ffn)
        put(f"{at}.mlp.up_proj", layer.gate_up, c.ffn)
        put(f"{at}.mlp.down_proj", layer.down)
        tensors[f"{at}.input_layernorm.weight"] = layer.attn_norm
        tensors[f"{at}.post_attention_layernorm.weight"] = layer.ffn_norm
    config = {
        "model_type": "llama",
        "hidden_size": c.hidden,
        "num_hidden_layers": c.layers,
        "intermediate_size": c.ffn,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.eps,
        "vocab_size": c.vocab,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": c.context,
        "quantization": {"group_size": 32, "bits": 4, "model.embed_tokens": {"group_size": 32, "bits": 8}},
    }
    write(folder, config, tensors)


def random_model(folder: Path, module: Any, config: dict) -> None:
    mx.random.seed(0)
    network = module.Model(module.ModelArgs.from_dict(json.loads(json.dumps(config))))
    nn.quantize(network, **QUANTIZATION)
    write(folder, config | {"quantization": QUANTIZATION}, dict(tree_flatten(network.parameters())))


def write(folder: Path, config: dict, tensors: dict[str, mx.array]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    smollm2(Path(sys.argv[1], "smollm2-135m-q4_1"))
    for name, module, config in (
        ("qwen35-0.1b-4bit", qwen3_5, {"model_type": "qwen3_5", "text_config": QWEN35}),
        ("qwen35moe-4bit", qwen3_5_moe, {"model_type": "qwen3_5_moe", "text_config": QWEN35_MOE}),
        ("laguna-4bit", laguna, LAGUNA),
        ("glm-4bit", glm4_moe_lite, GLM),
    ):
        random_model(Path(sys.argv[1], name), module, config)
