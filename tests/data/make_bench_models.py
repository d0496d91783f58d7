"""Write the folders that README's comparison with mlx-lm was measured on: python tests/data/make_bench_models.py FOLDER

smollm2-135m-q4_1   the weights of the demo GGUF as MLX holds them, in the layout of mlx-lm's llama
qwen35-0.1b-4bit    a random Qwen3.5 of mlx-lm's own, quantized by MLX
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5

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


def qwen35(folder: Path) -> None:
    mx.random.seed(0)
    config = {"model_type": "qwen3_5", "text_config": QWEN35, "quantization": {"group_size": 64, "bits": 4}}
    network = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(json.loads(json.dumps(config))))
    nn.quantize(network, group_size=64, bits=4)
    write(folder, config, dict(tree_flatten(network.parameters())))


def write(folder: Path, config: dict, tensors: dict[str, mx.array]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    smollm2(Path(sys.argv[1], "smollm2-135m-q4_1"))
    qwen35(Path(sys.argv[1], "qwen35-0.1b-4bit"))
