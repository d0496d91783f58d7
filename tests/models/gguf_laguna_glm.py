"""What llama.cpp's converter makes of Laguna, GLM-4.5, Gemma 3, gpt-oss; `deepseek2`: GLM-4.7-Flash, DeepSeek's models.

Independent of `common/models`, like gguf_files.py, which writes them. A test may change both before they are written.
"""

from typing import Any

import gguf
import numpy as np

Arrays = dict[str, np.ndarray]
Converted = tuple[str, dict[str, Any], Arrays]  # architecture, keys without its prefix, tensors

TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.g_proj.weight": "attn_gate.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.kv_b_proj.weight": "attn_kv_b.weight",
    **{f"self_attn.{x}_proj.weight": f"attn_{x}.weight" for x in "qkv"},
    **{f"self_attn.{x}_norm.weight": f"attn_{x}_norm.weight" for x in "qk"},
    **{f"mlp.{x}_proj.weight": f"ffn_{x}.weight" for x in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{x}_proj.weight": f"ffn_{x}_shexp.weight" for x in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{x}_proj.weight": f"ffn_{x}_shexp.weight" for x in ("gate", "up", "down")},
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.experts.e_score_correction_bias": "exp_probs_b.bias",
}
GEMMA_NORMS = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}


def laguna(config: dict, weights: Arrays) -> Converted:
    ropes, head_dim = config["rope_parameters"], config["head_dim"]
    full, sliding = ropes["full_attention"], ropes.get("sliding_attention")
    keys = _common_keys(config, config["num_experts"]) | {
        "attention.head_count": config["num_attention_heads_per_layer"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
        "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
        "expert_weights_scale": config["moe_routed_scaling_factor"],
        "expert_gating_func": 2,
        "rope.freq_base": full["rope_theta"],
        "rope.dimension_count": int(head_dim * full["partial_rotary_factor"]),
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": full["factor"],
        "rope.scaling.original_context_length": full["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": full["beta_fast"],
        "rope.scaling.yarn_beta_slow": full["beta_slow"],
    }
    if "attention_factor" in full:
        keys["rope.scaling.yarn_attn_factor"] = full["attention_factor"]
    if sliding is not None:
        keys["attention.sliding_window"] = config["sliding_window"]
        keys["rope.freq_base_swa"] = sliding["rope_theta"]
        keys["rope.dimension_count_swa"] = int(head_dim * sliding["partial_rotary_factor"])
    return "laguna", keys, tensors_of(config, config["num_experts"], weights)


def glm(config: dict, weights: Arrays) -> Converted:
    heads, rope_dim = config["num_attention_heads"], config["qk_rope_head_dim"]
    N, V, R = config["qk_nope_head_dim"], config["v_head_dim"], config["kv_lora_rank"]
    keys = _common_keys(config, config["n_routed_experts"]) | {
        "attention.head_count": heads,
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": R,
        "attention.key_length": R + rope_dim,
        "attention.value_length": R,
        "attention.key_length_mla": N + rope_dim,
        "attention.value_length_mla": V,
        "leading_dense_block_count": _dense_layers(config),
        "expert_shared_count": config["n_shared_experts"],
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_gating_func": 2,
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
        "rope.dimension_count": rope_dim,
    }
    if config["q_lora_rank"] is not None:
        keys["attention.q_lora_rank"] = config["q_lora_rank"]
    if config["model_type"] == "deepseek_v2":
        keys["expert_gating_func"] = 1
        del keys["expert_weights_norm"]
    if config["rope_parameters"]["rope_type"] == "yarn":
        keys |= _yarn(config["rope_parameters"])
    tensors = tensors_of(config, config["n_routed_experts"], weights)
    for i in range(config["num_hidden_layers"]):
        kv_b = tensors.pop(f"blk.{i}.attn_kv_b.weight").reshape(heads, N + V, R)
        tensors[f"blk.{i}.attn_k_b.weight"] = kv_b[:, :N].swapaxes(1, 2)
        tensors[f"blk.{i}.attn_v_b.weight"] = kv_b[:, N:]
    return "deepseek2", keys, tensors


def _dense_layers(config: dict) -> int:
    kinds = config.get("mlp_layer_types")
    return kinds.count("dense") if kinds else config["first_k_dense_replace"]


def _yarn(rope: dict) -> dict[str, Any]:
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": rope["beta_fast"],
        "rope.scaling.yarn_beta_slow": rope["beta_slow"],
        "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
    }


def gemma3(config: dict, weights: Arrays) -> Converted:
    """Norm weights plus 1; the rope of sliding layers and which layers slide are not stated."""
    full = config["rope_parameters"]["full_attention"]
    keys = sizes(config) | {
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.sliding_window": config["sliding_window"],
        "rope.freq_base": full["rope_theta"],
        "rope.scaling.type": "linear",
        "rope.scaling.factor": full["factor"],
    }
    weights = {name: array + 1 if name.endswith("norm.weight") else array for name, array in weights.items()}
    return "gemma3", keys, tensors_of(config, 0, weights, NAMES | GEMMA_NORMS)


def glm4_moe(config: dict, weights: Arrays) -> Converted:
    head_dim, share = config["head_dim"], config["rope_parameters"]["partial_rotary_factor"]
    keys = _common_keys(config, config["n_routed_experts"]) | {
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_gating_func": 2,
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
        "rope.dimension_count": int(head_dim * share),
    }
    own = {"post_attention_layernorm.weight": "post_attention_norm.weight"}
    own |= {f"self_attn.{x}_proj.bias": f"attn_{x}.bias" for x in "qkv"}
    return "glm4moe", keys, tensors_of(config, config["n_routed_experts"], weights, NAMES | own)


def gpt_oss(config: dict, weights: Arrays) -> Converted:
    """Rows of gates and ups alternate in training; which layers slide, and what YaRN truncates, are not stated."""
    rope = config["rope_parameters"]
    keys = sizes(config) | {
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.sliding_window": config["sliding_window"],
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["intermediate_size"],
        "rope.freq_base": rope["rope_theta"],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }
    own = {
        **{f"self_attn.{x}_proj.bias": f"attn_{x}.bias" for x in "qkv"},
        **{"self_attn.o_proj.bias": "attn_output.bias", "self_attn.sinks": "attn_sinks.weight"},
        **{"mlp.router.weight": "ffn_gate_inp.weight", "mlp.router.bias": "ffn_gate_inp.bias"},
        "post_attention_layernorm.weight": "post_attention_norm.weight",
    }
    tensors = tensors_of(config, 0, weights, NAMES | own)
    for i in range(config["num_hidden_layers"]):
        stem = f"model.layers.{i}.mlp.experts."
        columns, biases = weights[stem + "gate_up_proj"], weights[stem + "gate_up_proj_bias"]
        for first, part in enumerate(("gate", "up")):
            tensors[f"blk.{i}.ffn_{part}_exps.weight"] = columns[:, :, first::2].swapaxes(1, 2)
            tensors[f"blk.{i}.ffn_{part}_exps.bias"] = biases[:, first::2]
        tensors[f"blk.{i}.ffn_down_exps.weight"] = weights[stem + "down_proj"].swapaxes(1, 2)
        tensors[f"blk.{i}.ffn_down_exps.bias"] = weights[stem + "down_proj_bias"]
    return "gpt-oss", keys, tensors


CONVERTERS = {"laguna": laguna, "glm4_moe": glm4_moe, "glm4_moe_lite": glm, "gemma3_text": gemma3, "gpt_oss": gpt_oss}
CONVERTERS |= {"deepseek_v2": glm, "deepseek_v3": glm}


def write_keys(writer: gguf.GGUFWriter, architecture: str, keys: dict[str, Any]) -> None:
    writers = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    for name, value in keys.items():
        add = writers.get(type(value)) or (writer.add_array if isinstance(value, list) else writer.add_string)
        add(f"{architecture}.{name}", value)


def _common_keys(config: dict, experts: int) -> dict[str, Any]:
    return sizes(config) | {
        "expert_count": experts,
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_weights_norm": True,
    }


def sizes(config: dict) -> dict[str, Any]:
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    }


def tensors_of(config: dict, experts: int, weights: Arrays, names: dict[str, str] = NAMES) -> Arrays:
    out = {TOP[name]: array for name, array in weights.items() if name in TOP}
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        layer = {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}
        out |= {f"blk.{i}.{names[name]}": array for name, array in layer.items() if name in names}
        if "mlp.experts.0.gate_proj.weight" in layer:
            for part in ("gate", "up", "down"):
                stack = [layer[f"mlp.experts.{e}.{part}_proj.weight"] for e in range(experts)]
                out[f"blk.{i}.ffn_{part}_exps.weight"] = np.stack(stack)
    return out
