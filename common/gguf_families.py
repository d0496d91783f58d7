"""The metadata keys of each family of models in a GGUF file, without the architecture in front, as llama.cpp's
converter writes them: from the configuration that `common/models` reads and the contents of config.json.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Values = dict[str, Any]
SOFTMAX, SIGMOID = 1, 2  # expert_gating_func


@dataclass(frozen=True)
class Family:
    """Name and keys that a model_type of config.json takes in a GGUF file.

    name   general.architecture
    keys   those that families differ in, of a configuration and the contents of config.json
    theta  rope base where config.json states none
    rope   the part of config.json that states the rope of `rope.freq_base` and `rope.scaling`
    pre    name of the pre-tokenizer where several names have its meaning
    """

    name: str
    keys: Callable[[Any, Values], Values]
    theta: float = 10000.0
    rope: Callable[[Values], Values] = lambda values: values
    pre: str | None = None


def _grouped(c: Any) -> Values:
    return {
        "attention.head_count": c.heads,
        "attention.head_count_kv": c.kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
    }


def _llama(c: Any, values: Values) -> Values:
    window = {} if c.window is None else {"attention.sliding_window": c.window}
    return (
        _grouped(c)
        | window
        | {
            "block_count": c.layers,
            "feed_forward_length": c.ffn,
            "rope.dimension_count": c.head_dim,
        }
    )


def _phi3(c: Any, values: Values) -> Values:
    """Return keys without the head size, which readers derive; a window of 0 is none."""
    original = c.original_context or values.get("original_max_position_embeddings") or c.context
    return {
        "attention.head_count": c.heads,
        "attention.head_count_kv": c.kv_heads,
        "attention.sliding_window": c.window or 0,
        "block_count": c.layers,
        "feed_forward_length": c.ffn,
        "rope.dimension_count": 2 * len(c.rope.frequencies),
        "rope.scaling.original_context_length": original,
    }


def _granite(c: Any, values: Values) -> Values:
    """Return the factors, and the epsilon, as config.json states them."""
    names = {"embedding": "embedding_multiplier", "residual": "residual_multiplier", "logit": "logits_scaling"}
    experts: Values = {}
    if c.experts:
        experts = {"expert_count": c.experts.count, "expert_used_count": c.experts.top_k}
        experts["feed_forward_length"] = c.experts.ffn
    return (
        _llama(c, values)
        | experts
        | {f"{key}_scale": float(values.get(name, 1.0)) for key, name in names.items()}
        | {"attention.scale": c.attention_scale, "attention.layer_norm_rms_epsilon": values.get("rms_norm_eps", 1e-6)}
    )


def _qwen3moe(c: Any, values: Values) -> Values:
    return _llama(c, values) | {
        "feed_forward_length": values.get("intermediate_size", c.experts.ffn),  # of no layer, but converters write it
        "expert_count": c.experts.count,
        "expert_used_count": c.experts.top_k,
        "expert_feed_forward_length": c.experts.ffn,
    }


def _qwen3vl(c: Any, values: Values) -> Values:
    """Return the keys of Qwen3, and the pairs of each head that turn by time, height and width."""
    group = values.get("rope_parameters") or values.get("rope_scaling") or {}
    keys = _qwen3moe(c, values) if c.experts else _llama(c, values)
    return keys | {"rope.dimension_sections": [*group.get("mrope_section", (24, 20, 20)), 0]}


def _qwen35(c: Any, values: Values) -> Values:
    layers = len(c.is_attention)
    interval = c.is_attention.index(True) + 1 if True in c.is_attention else layers
    keys = _grouped(c) | {
        "block_count": layers,
        "full_attention_interval": interval,
        "rope.dimension_count": 2 * len(c.rope.frequencies),
        "ssm.conv_kernel": c.taps,
        "ssm.state_size": c.key_dim,
        "ssm.group_count": c.key_heads,
        "ssm.time_step_rank": c.value_heads,
        "ssm.inner_size": c.value_heads * c.value_dim,
    }
    if sections := values.get("rope_parameters", {}).get("mrope_section"):
        keys["rope.dimension_sections"] = [*sections, 0]
    if any(is_attention != ((i + 1) % interval == 0) for i, is_attention in enumerate(c.is_attention)):
        keys["attention.recurrent_layers"] = [not is_attention for is_attention in c.is_attention]
    if c.experts is None:
        return keys | {"feed_forward_length": c.ffn}
    if dense := values.get("intermediate_size"):  # which Qwen3-Next states and no layer has
        keys["feed_forward_length"] = dense
    return keys | {
        "expert_count": c.experts.count,
        "expert_used_count": c.experts.top_k,
        "expert_feed_forward_length": c.experts.ffn,
        "expert_shared_feed_forward_length": c.experts.shared_ffn,
    }


def _sigmoid_experts(e: Any, dense_layers: int) -> Values:
    return {
        "leading_dense_block_count": dense_layers,
        "expert_count": e.count,
        "expert_used_count": e.top_k,
        "expert_feed_forward_length": e.ffn,
        "expert_weights_norm": True,
        "expert_weights_scale": e.scale,
        "expert_gating_func": SIGMOID,
    }


def _laguna(c: Any, values: Values) -> Values:
    layers = len(c.heads)
    keys = _grouped(c) | _sigmoid_experts(c.experts, c.is_sparse.index(True) if True in c.is_sparse else layers)
    keys |= {
        "block_count": layers,
        "attention.head_count": list(c.heads),
        "feed_forward_length": c.ffn,
        "expert_shared_feed_forward_length": c.experts.shared_ffn,
        "rope.dimension_count": 2 * len(c.rope.frequencies),
    }
    if (factor := _laguna_rope(values)["rope_parameters"].get("attention_factor")) is not None:
        keys["rope.scaling.yarn_attn_factor"] = float(factor)
    if not any(c.is_sliding):
        return keys
    keys |= {
        "attention.sliding_window": c.window,
        "rope.freq_base_swa": float(values["rope_parameters"]["sliding_attention"].get("rope_theta", 10000.0)),
        "rope.dimension_count_swa": 2 * len(c.sliding_rope.frequencies),
    }
    period = next((p for p in range(1, layers) if c.is_sliding == tuple(i % p > 0 for i in range(layers))), None)
    if period != 4:  # which readers assume, so that converters write nothing
        keys["attention.sliding_window_pattern"] = period or list(c.is_sliding)
    return keys


def _laguna_rope(values: Values) -> Values:
    return values | {"rope_parameters": values["rope_parameters"]["full_attention"]}


def _glm(c: Any, values: Values) -> Values:
    """Return the keys of the form that attends to latents, as one KV head."""
    keys = _sigmoid_experts(c.experts, c.dense_layers)
    if not c.sigmoid:
        keys |= {"expert_weights_norm": False, "expert_gating_func": SOFTMAX}
    if c.q_latent:
        keys["attention.q_lora_rank"] = c.q_latent
    yarn = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if (mscale := yarn.get("mscale_all_dim")) is not None:
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * mscale
    return keys | {
        "block_count": c.layers,
        "attention.head_count": c.heads,
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": c.latent,
        "attention.key_length": c.latent + c.rope_dim,
        "attention.value_length": c.latent,
        "attention.key_length_mla": c.nope_dim + c.rope_dim,
        "attention.value_length_mla": c.value_dim,
        "feed_forward_length": c.ffn,
        "expert_shared_count": c.experts.shared_ffn // c.experts.ffn,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "rope.dimension_count": c.rope_dim,
    }


def _glm4_moe(c: Any, values: Values) -> Values:
    keys = _grouped(c) | _sigmoid_experts(c.experts, c.dense_layers)
    return keys | {
        "block_count": c.layers,
        "feed_forward_length": c.ffn,
        "expert_shared_count": c.experts.shared_ffn // c.experts.ffn,
        "rope.dimension_count": 2 * len(c.rope.frequencies),
    }


def _gpt_oss(c: Any, values: Values) -> Values:
    keys = _grouped(c) | ({"attention.sliding_window": c.window} if c.window else {})
    keys |= {
        "block_count": len(c.is_sliding),
        "feed_forward_length": c.experts.ffn,
        "expert_count": c.experts.count,
        "expert_used_count": c.experts.top_k,
        "expert_feed_forward_length": c.experts.ffn,
    }
    if c.is_sliding != tuple(i % 2 == 0 for i in range(len(c.is_sliding))):  # which readers assume
        keys["attention.sliding_window_pattern"] = list(c.is_sliding)
    return keys


def _olmo2(c: Any, values: Values) -> Values:
    keys = _grouped(c) | {"block_count": len(c.is_sliding), "feed_forward_length": c.ffn}
    keys |= {"rope.dimension_count": c.head_dim}
    yarn = _full_rope(values)["rope_parameters"] or values.get("rope_scaling") or {}
    if (factor := yarn.get("attention_factor")) is not None:
        keys["rope.scaling.yarn_attn_factor"] = float(factor)
    if not any(c.is_sliding):
        return keys
    return keys | {"attention.sliding_window": c.window, "attention.sliding_window_pattern": list(c.is_sliding)}


def _full_rope(values: Values) -> Values:
    """Return the contents of config.json with the rope of full layers alone, if it has one for each kind of layer."""
    ropes = values.get("rope_parameters") or {}
    return values | {"rope_parameters": ropes.get("full_attention") or ropes}


def _gemma3(c: Any, values: Values) -> Values:
    keys = _grouped(c) | {"block_count": len(c.is_sliding), "feed_forward_length": c.ffn}
    return keys | ({"attention.sliding_window": c.window} if c.window else {})


def _gemma3_rope(values: Values) -> Values:
    ropes = values.get("rope_parameters") or {}
    return values | {"rope_parameters": ropes.get("full_attention") or {}}


FAMILIES = {  # by config.json's model_type
    "llama": Family("llama", _llama),
    "mistral": Family("llama", _llama),
    "mistral3": Family("llama", _llama),
    "phi3": Family("phi3", _phi3, pre="dbrx"),
    "qwen2": Family("qwen2", _llama),
    "qwen3": Family("qwen3", _llama),
    "qwen3_moe": Family("qwen3moe", _qwen3moe),
    "qwen3_vl": Family("qwen3vl", _qwen3vl),
    "qwen3_vl_text": Family("qwen3vl", _qwen3vl),
    "qwen3_vl_moe": Family("qwen3vlmoe", _qwen3vl),
    "qwen3_vl_moe_text": Family("qwen3vlmoe", _qwen3vl),
    "smollm3": Family("smollm3", _llama),
    "wedlm": Family("wedlm", _llama),
    "qwen3_next": Family("qwen3next", _qwen35),
    "qwen3_5": Family("qwen35", _qwen35),
    "qwen3_5_text": Family("qwen35", _qwen35),
    "qwen3_5_moe": Family("qwen35moe", _qwen35),
    "qwen3_5_moe_text": Family("qwen35moe", _qwen35),
    "granite": Family("granite", _granite, pre="refact"),
    "granitemoe": Family("granitemoe", _granite, pre="refact"),
    "laguna": Family("laguna", _laguna, rope=_laguna_rope),
    "gemma3": Family("gemma3", _gemma3, theta=1e6, rope=_gemma3_rope),
    "gemma3_text": Family("gemma3", _gemma3, theta=1e6, rope=_gemma3_rope),
    "olmo2": Family("olmo2", _olmo2, pre="dbrx"),
    "olmo3": Family("olmo2", _olmo2, theta=5e5, rope=_full_rope, pre="dbrx"),
    "glm4_moe": Family("glm4moe", _glm4_moe, pre="glm4"),
    "gpt_oss": Family("gpt-oss", _gpt_oss, theta=150000.0),
    "deepseek_v2": Family("deepseek2", _glm),
    "deepseek_v3": Family("deepseek2", _glm),
    "glm4_moe_lite": Family("deepseek2", _glm, theta=1e6, pre="glm4"),
}
