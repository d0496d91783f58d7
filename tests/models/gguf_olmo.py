"""What llama.cpp's converter makes of OLMo 2 and OLMo 3: keys and tensors, as gguf_laguna_glm.py for others."""

from typing import Any

from gguf_laguna_glm import NAMES, Arrays, Converted, sizes, tensors_of

NORMS = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}


def olmo2(config: dict, weights: Arrays) -> Converted:
    """The rope is that of full layers; those with a window have its base alone."""
    ropes, heads = config["rope_parameters"], config["num_attention_heads"]
    head_dim = config["hidden_size"] // heads
    keys: dict[str, Any] = sizes(config) | {
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
    }
    full = ropes.get("full_attention", ropes)
    keys["rope.freq_base"] = full["rope_theta"]
    if full["rope_type"] == "yarn":
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": full["factor"],
            "rope.scaling.original_context_length": full["original_max_position_embeddings"],
            "rope.scaling.yarn_attn_factor": full["attention_factor"],
            "rope.scaling.yarn_beta_fast": full["beta_fast"],
            "rope.scaling.yarn_beta_slow": full["beta_slow"],
        }
    if "sliding_window" in config:
        keys["attention.sliding_window"] = config["sliding_window"]
        keys["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config["layer_types"]]
    return "olmo2", keys, tensors_of(config, 0, weights, NAMES | NORMS)


CONVERTERS = {"olmo2": olmo2, "olmo3": olmo2}
