"""Write tests/data/models/smollm3, and those listed in MODELS below, as make_tiny_laguna_glm.py does for others.

Each golden.npz holds what that file and make_tiny_models.py describe. Made with transformers 5.24 and torch 2.14.
"""

from typing import Any

import transformers
from make_tiny_laguna_glm import write
from make_tiny_models import KV_HEADS, SIZES, TIED
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e2, "factor": 8.0, "original_max_position_embeddings": 128},
    **{"beta_fast": 4.0, "beta_slow": 1.0},
}
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
GRANITE = {  # an epsilon that matters, because norms are of x divided by the residual multiplier
    **{"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.5},
    **{"rms_norm_eps": 1e-2, "logits_scaling": 1.5},
}
LATENT = {
    **{"vocab_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4},
    **{"q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24},
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "moe_intermediate_size": 16},
}
MODELS: dict[str, tuple[Any, Any]] = {
    "smollm3": (  # its fourth layer has no rope
        SmolLM3ForCausalLM,
        SmolLM3Config(**SIZES, **KV_HEADS, **THETA, **TIED, vocab_size=96, num_hidden_layers=5, pad_token_id=None),
    ),
    "granite": (
        GraniteForCausalLM,
        GraniteConfig(
            **(SIZES | KV_HEADS | THETA | TIED | GRANITE | {"vocab_size": 96, "num_hidden_layers": 3}),
        ),
    ),
    "olmo2": (
        Olmo2ForCausalLM,
        Olmo2Config(**SIZES, **KV_HEADS, **THETA, vocab_size=96, num_hidden_layers=3),
    ),
    "olmo3": (  # its fourth layer has no window, and a rope by YaRN
        Olmo3ForCausalLM,
        Olmo3Config(
            **(SIZES | KV_HEADS | {"vocab_size": 96, "num_hidden_layers": 5, "sliding_window": 24}),
            rope_parameters={
                "full_attention": YARN | {"attention_factor": 1.2079441541679836},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
            },
        ),
    ),
    "deepseek2": (  # as V2-Lite: queries without a latent, YaRN of scores alone
        DeepseekV2ForCausalLM,
        DeepseekV2Config(
            **(SIZES | LATENT | {"routed_scaling_factor": 1.5}),
            **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
            rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        ),
    ),
    "deepseek3": (  # as Moonlight
        DeepseekV3ForCausalLM,
        DeepseekV3Config(
            **(SIZES | LATENT | THETA | {"routed_scaling_factor": 2.446}),
            **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_mtp_layers": 0},
        ),
    ),
    "granitemoe": (
        GraniteMoeForCausalLM,
        GraniteMoeConfig(
            **(SIZES | KV_HEADS | THETA | TIED | GRANITE | {"intermediate_size": 16}),
            **{"vocab_size": 96, "num_hidden_layers": 3, "num_local_experts": 8, "num_experts_per_tok": 3},
        ),
    ),
}
SEEDS = {"olmo3": 301}  # of others than a model's number

if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for number, (name, (cls, config)) in enumerate(MODELS.items(), start=200):
        write(name, cls, config, SEEDS.get(name, number))
