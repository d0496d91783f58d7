"""Write models that make_tiny_models.py does not write, as it does: laguna, laguna-m1, glm, mistral, gemma3, glm4moe,
gptoss, phi3 and phi4mini.

The scale of Gemma's embedding is rounded to bfloat16, as transformers does where weights are bfloat16.
GLM's latent norms take the configuration's rms_norm_eps here, where transformers takes the default of its norm class.
Beyond what that file describes, golden.npz of a model holds

keys.i, values.i    of a sliding layer: every sixteenth of the window's last rows
latent.i            (32, R + P) float32 of a latent layer, every sixteenth position: normed latent, roped key
short               (12, vocab) float32 of phi4mini: logits of every eighth of the first 96 tokens, alone in a sequence,
                    which is short enough for the other factors of its rope
"""

from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from make_tiny_models import HEADS, HERE, KV_HEADS, POSITIONS, SIZES, golden, make
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LagunaConfig,
    LagunaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 16}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e2, "factor": 8.0, "original_max_position_embeddings": 128},
    **{"beta_fast": 4.0, "beta_slow": 1.0, "partial_rotary_factor": 0.5},
}
SHORT = 128  # tokens of phi4mini's first training
PHI3 = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAGUNA = {
    **(SIZES | HEADS | EXPERTS),
    **{"vocab_size": 96, "num_experts": 8, "shared_expert_intermediate_size": 24, "moe_routed_scaling_factor": 2.5},
}
MODELS: dict[str, tuple[Any, Any]] = {
    "laguna": (
        LagunaForCausalLM,
        LagunaConfig(
            **LAGUNA,
            num_hidden_layers=6,
            layer_types=["full_attention", *["sliding_attention"] * 3, "full_attention", "sliding_attention"],
            num_attention_heads_per_layer=[4, 6, 6, 6, 4, 6],
            sliding_window=24,
            rope_parameters={
                "full_attention": YARN | {"attention_factor": 1.1},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            },
        ),
    ),
    "laguna-m1": (  # no window, a gate per channel, a derived attention factor, two dense layers
        LagunaForCausalLM,
        LagunaConfig(
            **LAGUNA,
            num_hidden_layers=3,
            mlp_layer_types=["dense", "dense", "sparse"],
            gating="per-element",
            rope_parameters={"full_attention": YARN},
        ),
    ),
    "glm": (
        Glm4MoeLiteForCausalLM,
        Glm4MoeLiteConfig(
            **(SIZES | EXPERTS),
            **{"vocab_size": 96, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3},
            **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24},
            n_routed_experts=8,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
    ),
    "mistral": (  # of version 0.1 of 7B: later releases have no window
        MistralForCausalLM,
        MistralConfig(**SIZES, **HEADS, vocab_size=96, num_hidden_layers=3, sliding_window=24),
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **(SIZES | HEADS),
            **{"vocab_size": 96, "num_hidden_layers": 8, "sliding_window": 24, "query_pre_attn_scalar": 16},
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 1e2, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
    ),
    "glm4moe": (  # of GLM-4.5: GLM-4.5-Air has no norms of q and k
        Glm4MoeForCausalLM,
        Glm4MoeConfig(
            **(SIZES | HEADS | EXPERTS),
            **{"vocab_size": 96, "num_hidden_layers": 3, "n_routed_experts": 8, "routed_scaling_factor": 2.5},
            **{"attention_bias": True, "use_qk_norm": True, "num_mtp_layers": 0},
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        ),
    ),
    "gptoss": (  # YaRN's ramp ends between two pairs
        GptOssForCausalLM,
        GptOssConfig(
            **(SIZES | HEADS | {"intermediate_size": 32}),
            **{"vocab_size": 96, "num_hidden_layers": 3, "num_local_experts": 6, "num_experts_per_tok": 3},
            sliding_window=24,
            rope_parameters={
                **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 128},
                **{"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
            },
        ),
    ),
    "phi3": (  # of Phi-3-mini-4k: Phi-4 has no window
        Phi3ForCausalLM,
        Phi3Config(**SIZES, **KV_HEADS, **PHI3, num_hidden_layers=3, sliding_window=24),
    ),
    "phi4mini": (
        Phi3ForCausalLM,
        Phi3Config(
            **SIZES,
            **KV_HEADS,
            **PHI3,
            num_hidden_layers=3,
            tie_word_embeddings=True,
            original_max_position_embeddings=SHORT,
            rope_parameters={
                **{"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
                **{"original_max_position_embeddings": SHORT},
                **{"short_factor": [1.0, 1.25, 1.5], "long_factor": [1.1, 4.0, 16.0]},
            },
        ),
    ),
}
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")  # models of latent attention, by their model_type
SEEDS = {"gemma3": 103, "phi3": 106, "phi4mini": 107}  # of others than a model's number


def states(cache: DynamicCache, config: Any) -> dict[str, np.ndarray]:
    arrays, kinds = {}, getattr(config, "layer_types", [])
    sliding = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    if config.model_type in ("mistral", "phi3") and config.sliding_window:
        sliding = list(range(config.num_hidden_layers))
    for i, layer in enumerate(cache.layers):
        keys, values = (x[0].transpose(0, 1).numpy() for x in (layer.keys, layer.values))
        if config.model_type in LATENT:
            if config.model_type == "deepseek_v2":  # whose rope pairs stay adjacent
                values = np.concatenate([values[..., ::2], values[..., 1::2]], axis=-1)
            arrays[f"latent.{i}"] = np.concatenate([keys, values], axis=-1)[::16, 0]
        elif i in sliding:
            arrays[f"keys.{i}"] = keys[-config.sliding_window :][::16]
            arrays[f"values.{i}"] = values[-config.sliding_window :][::16]
        else:
            arrays[f"keys.{i}"], arrays[f"values.{i}"] = keys[::16], values[::16]
    return arrays


def write(name: str, cls: Any, config: Any, seed: int) -> None:
    torch.manual_seed(seed)
    changed = {"glm4_moe": _glm, "gemma3_text": _gemma, "gpt_oss": _gpt_oss, **dict.fromkeys(LATENT, _glm)}.get(
        config.model_type
    )
    create = partial(changed, cls) if changed else cls
    model = make(HERE / name, create, config, torch.bfloat16, seed)
    ids = torch.randint(0, config.vocab_size, (POSITIONS,), generator=torch.Generator().manual_seed(seed))
    cache = DynamicCache()  # without the configuration: keeps the rows before the window too
    arrays = golden(partial(model, past_key_values=cache), ids)
    arrays = {key: array for key, array in arrays.items() if "." not in key} | states(cache, config)
    if name == "phi4mini":
        with torch.no_grad():
            arrays["short"] = model(ids[None, :96]).logits[0, ::8].numpy()
    np.savez_compressed(HERE / name / "golden.npz", **arrays)
    p = np.exp(arrays["logits"] - arrays["lse"][arrays["rows"], None])
    print(f"{name:13} logit std {arrays['logits'].std():.2f}, top probability {p.max(-1).mean():.2f}")


@torch.no_grad()
def _glm(cls: Any, config: Any) -> Any:
    """With the configuration's epsilon in every norm, and biases of the routers, buffers that `randomize` skips."""
    model = cls(config)
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = config.rms_norm_eps
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape))
    return model


@torch.no_grad()
def _gemma(cls: Any, config: Any) -> Any:
    model = cls(config)
    scale = model.get_input_embeddings().embed_scale
    scale.copy_(scale.bfloat16())
    return model


@torch.no_grad()
def _gpt_oss(cls: Any, config: Any) -> Any:
    """With sink logits that are large beside 24 scores, and inputs of experts whose gates and ups exceed the limit."""
    model = cls(config)
    for name, p in model.named_parameters():
        if name.endswith("sinks"):
            p.fill_(2.0)
        elif name.endswith("post_attention_layernorm.weight"):
            p.fill_(3.0)
    return model


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for number, (name, (cls, config)) in enumerate(MODELS.items(), start=100):
        write(name, cls, config, SEEDS.get(name, number))
