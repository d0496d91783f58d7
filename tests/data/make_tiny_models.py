"""Write tests/data/models/: tiny random models as Hugging Face folders, each with what transformers computes for it.

Made with transformers 5.23 and torch 2.13 on the CPU, in float32. Matrices are stored as BF16 or F16, and the reference
runs on the stored values, so the stored precision costs nothing. golden.npz of a model holds, for 512 random tokens:

ids       (512,) uint8
rows      (130,) int16 positions whose logits are kept: every fourth, and the last ones
logits    (130, vocab) float32
argmax    (512,) uint8, best (512,) float32, lse (512,) float32 of all positions: top-1, its logit, log-sum-exp
keys.i, values.i    (32, K, D) float32 of attention layer i, every sixteenth position of the cache
conv.i, delta.i     the cache of Gated DeltaNet layer i: (3, channels) and (Hv, Dk, Dv), value heads as trained
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

HERE = Path(__file__).parent / "models"
POSITIONS = 512
OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 1024, "initializer_range": 0.02}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # 4 * 16 differs from the hidden size
KV_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}  # heads of 8
DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 12, "linear_value_head_dim": 16},
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        **{"mrope_section": [2, 1, 1], "mrope_interleaved": True},
    },
}
EXPERTS = {
    **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
}
TIED = {"tie_word_embeddings": True}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 128}

MODELS = {  # class, configuration, stored type of the matrices
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, **HEADS, vocab_size=96, num_hidden_layers=3, rope_parameters=LLAMA3, **TIED),
        torch.bfloat16,
    ),
    "llama-untied": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, num_attention_heads=4, vocab_size=96, num_hidden_layers=2, tie_word_embeddings=False),
        torch.float16,
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, **HEADS, vocab_size=96, num_hidden_layers=3), torch.bfloat16),
    "qwen3-yarn": (
        Qwen3ForCausalLM,
        Qwen3Config(**SIZES, **HEADS, vocab_size=96, num_hidden_layers=2, rope_parameters=YARN, **TIED),
        torch.bfloat16,
    ),
    "qwen35": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig(**SIZES, **HEADS, **DELTA, vocab_size=96, num_hidden_layers=8),
        torch.bfloat16,
    ),
    "qwen35moe": (
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeTextConfig(
            **{k: v for k, v in SIZES.items() if k != "intermediate_size"},
            **(HEADS | DELTA | EXPERTS),
            vocab_size=96,
            num_hidden_layers=4,
        ),
        torch.bfloat16,
    ),
    "qwen3moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **SIZES,
            **(HEADS | {k: v for k, v in EXPERTS.items() if not k.startswith("shared")}),
            norm_topk_prob=True,
            vocab_size=96,
            num_hidden_layers=3,
        ),
        torch.bfloat16,
    ),
    "qwen2": (
        Qwen2ForCausalLM,
        Qwen2Config(**SIZES, **KV_HEADS, vocab_size=96, num_hidden_layers=3, **TIED),
        torch.bfloat16,
    ),
    "qwen3next": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig(
            **(SIZES | HEADS | DELTA | EXPERTS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
            vocab_size=96,
            num_hidden_layers=4,
        ),
        torch.bfloat16,
    ),
}
SEEDS = {"qwen3next": 7}  # of others than a model's number: 6 gives a head of q so close to zero that errors are 1e-3


@torch.no_grad()
def randomize(model: torch.nn.Module, stored: torch.dtype, generator: torch.Generator) -> None:
    """Weights that no layer is indifferent to: unit gains, norms away from 1, decays from 0.98 to 0.1 per token.

    The first layer's q and k are small, as eps under their L2 norm shows only there.
    """
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if name.endswith("A_log"):
            p.copy_(1.5 * noise - 2)
        elif p.ndim == 1:
            p.add_(0.3 * noise)
        elif "conv1d" in name:
            p.copy_(noise)
            if "layers.0." in name:
                p[: -DELTA["linear_num_value_heads"] * DELTA["linear_value_head_dim"]] *= 0.01
        else:
            gain = 2 if "embed" in name or "lm_head" in name else 0.7 if name.endswith(OUTPUTS) else 1.2
            p.copy_(gain * noise / p.shape[-1] ** 0.5)
        if p.ndim > 1:
            p.copy_(p.to(stored).float())


@torch.no_grad()
def golden(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, np.ndarray]:
    out = model(ids[None], use_cache=True)
    logits = out.logits[0]
    rows = np.unique(np.r_[0:POSITIONS:4, POSITIONS - 2 : POSITIONS])
    arrays = {
        "ids": ids.numpy().astype(np.uint8),
        "rows": rows.astype(np.int16),
        "logits": logits[rows].numpy(),
        "argmax": logits.argmax(-1).numpy().astype(np.uint8),
        "best": logits.max(-1).values.numpy(),
        "lse": logits.logsumexp(-1).numpy(),
    }
    for i, layer in enumerate(out.past_key_values.layers):
        if hasattr(layer, "recurrent_states"):
            arrays[f"conv.{i}"] = layer.conv_states[0][0].T[-3:].numpy()
            arrays[f"delta.{i}"] = layer.recurrent_states[0][0].numpy()
        else:
            arrays[f"keys.{i}"] = layer.keys[0].transpose(0, 1)[::16].numpy()
            arrays[f"values.{i}"] = layer.values[0].transpose(0, 1)[::16].numpy()
    return arrays


def make(folder: Path, cls: Any, config: Any, stored: torch.dtype, seed: int) -> torch.nn.Module:
    """Write a randomized model of `config` as a folder that transformers and mlx-lm load."""
    model = cls(config).float().eval()
    randomize(model, stored, torch.Generator().manual_seed(seed))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor.to(stored) if tensor.ndim > 1 else tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "generation_config.json").unlink()
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
    return model


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for number, (name, (cls, config, stored)) in enumerate(MODELS.items()):
        seed = SEEDS.get(name, number)
        model = make(HERE / name, cls, config, stored, seed)
        ids = torch.randint(0, config.vocab_size, (POSITIONS,), generator=torch.Generator().manual_seed(seed))
        arrays = golden(model, ids)
        np.savez_compressed(HERE / name / "golden.npz", **arrays)
        p = np.exp(arrays["logits"] - arrays["lse"][arrays["rows"], None])
        print(f"{name:13} logit std {arrays['logits'].std():.2f}, top probability {p.max(-1).mean():.2f}")
