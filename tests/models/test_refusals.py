"""Every mistake in a checkpoint is refused with one sentence that names the thing."""

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import tiny
from gguf_files import write_gguf

from common.checkpoint import Checkpoint, open_checkpoint
from common.errors import BimetalError
from common.models import is_defined, load_model
from common.reference import NumpyOps
from common.tensors import Tensor
from common.weights import dense

FORMATS = ["safetensors", "gguf"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Callable[[str, str], Checkpoint]:
    folder = tmp_path_factory.mktemp("gguf")

    def checkpoint(name: str, form: str) -> Checkpoint:
        if form == "safetensors":
            return tiny.checkpoint(name)
        path = folder / f"{name}.gguf"
        if not path.exists():
            write_gguf(tiny.FOLDER / name, path, mtp=name.startswith("qwen35"))
        return open_checkpoint(path)

    return checkpoint


def changed(checkpoint: Checkpoint, key: str, value: object) -> Checkpoint:
    """With one key of the configuration set, or taken out where the value is ...; "a/b" is key b within a."""
    config = deepcopy(checkpoint.config)
    *outer, last = key.split("/")
    group = config
    for part in outer:
        group = group[part]
    if value is ...:
        del group[last]
    else:
        group[last] = value
    return replace(checkpoint, config=config)


def refusal(checkpoint: Checkpoint) -> str:
    with pytest.raises(BimetalError) as caught:
        load_model(checkpoint, NumpyOps())
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600  # the list of architectures takes most of it
    return message


REQUIRED = {
    (
        "llama",
        "safetensors",
    ): "model_type vocab_size num_attention_heads hidden_size num_hidden_layers intermediate_size "
    "max_position_embeddings rope_parameters/factor rope_parameters/low_freq_factor rope_parameters/high_freq_factor "
    "rope_parameters/original_max_position_embeddings",
    ("llama", "gguf"): "attention.head_count embedding_length block_count feed_forward_length context_length "
    "attention.layer_norm_rms_epsilon",
    ("qwen3-yarn", "safetensors"): "rope_parameters/factor",
    ("qwen3moe", "safetensors"): "num_experts_per_tok moe_intermediate_size norm_topk_prob max_position_embeddings",
    ("qwen3moe", "gguf"): "expert_count expert_used_count expert_feed_forward_length context_length",
    ("qwen3-yarn", "gguf"): "rope.scaling.factor",
    ("qwen35", "safetensors"): "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads "
    "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim intermediate_size "
    "max_position_embeddings",
    (
        "qwen35",
        "gguf",
    ): "block_count attention.key_length attention.head_count attention.head_count_kv embedding_length "
    "ssm.time_step_rank ssm.inner_size ssm.group_count ssm.state_size ssm.conv_kernel rope.dimension_count "
    "feed_forward_length context_length attention.layer_norm_rms_epsilon",
    ("gemma3", "safetensors"): "hidden_size num_hidden_layers intermediate_size",
    ("gemma3", "gguf"): "block_count attention.key_length attention.head_count attention.head_count_kv "
    "embedding_length feed_forward_length context_length attention.layer_norm_rms_epsilon rope.scaling.factor",
    ("gptoss", "safetensors"): "vocab_size hidden_size num_hidden_layers num_attention_heads num_local_experts "
    "num_experts_per_tok intermediate_size max_position_embeddings rope_parameters/factor",
    ("gptoss", "gguf"): "block_count attention.head_count embedding_length expert_count expert_used_count "
    "expert_feed_forward_length context_length attention.layer_norm_rms_epsilon rope.scaling.factor",
    ("qwen3next", "safetensors"): "num_experts num_experts_per_tok moe_intermediate_size",
    ("qwen3next", "gguf"): "expert_count expert_used_count ssm.group_count",
    ("qwen35moe", "safetensors"): "num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size",
    (
        "qwen35moe",
        "gguf",
    ): "expert_count expert_used_count expert_feed_forward_length expert_shared_feed_forward_length",
}


@pytest.mark.parametrize(
    ("name", "form", "key"), [(*where, key) for where, keys in REQUIRED.items() for key in keys.split()]
)
def test_missing_key(checkpoints, name, form, key):
    checkpoint = checkpoints(name, form)
    full = f"{checkpoint.config['general.architecture']}.{key}" if form == "gguf" else key
    assert key.replace("/", ".") in refusal(changed(checkpoint, full, ...))


WRONG = [  # model, format, key, value, what the sentence says
    ("llama", "safetensors", "model_type", "gpt2", "model_type is 'gpt2'; supported: "),
    ("llama", "safetensors", "model_type", ["llama"], "model_type is ['llama']; supported: "),
    ("llama", "gguf", "general.architecture", "falcon", "general.architecture is 'falcon'; supported: "),
    ("llama", "safetensors", "hidden_act", "gelu", "hidden_act is 'gelu'; supported: silu"),
    ("llama", "safetensors", "attention_bias", True, "attention_bias is True; supported: False"),
    ("llama", "safetensors", "mlp_bias", True, "mlp_bias is True; supported: False"),
    ("llama", "safetensors", "partial_rotary_factor", 0.5, "partial_rotary_factor is 0.5; supported: 1.0"),
    ("qwen3", "safetensors", "use_sliding_window", True, "use_sliding_window is True; supported: False"),
    ("llama", "safetensors", "hidden_size", 0, "hidden_size is 0, expected a number from 1"),
    ("llama", "safetensors", "hidden_size", -32, "hidden_size is -32, expected a number from 1"),
    ("llama", "safetensors", "hidden_size", 1 << 40, "hidden_size is 1099511627776, expected a number from 1"),
    ("llama", "safetensors", "hidden_size", "32", "hidden_size is '32', expected int"),
    ("llama", "safetensors", "hidden_size", 32.0, "hidden_size is 32.0, expected int"),
    ("llama", "safetensors", "num_hidden_layers", True, "num_hidden_layers is True, expected int"),
    ("llama", "safetensors", "num_hidden_layers", 10**9, "says it has 1000000000 layers, and has "),
    ("llama", "gguf", "llama.block_count", 10**9, "says it has 1000000000 layers, and has "),
    ("qwen35", "gguf", "qwen35.block_count", 10**9, "says it has 999999999 layers, and has "),
    ("llama", "safetensors", "head_dim", 10**9, "says that a tensor has 4000000000 rows"),
    ("qwen35", "safetensors", "linear_value_head_dim", 10**9, "says that a tensor has 6000000000 rows"),
    ("qwen35moe", "safetensors", "num_experts", 10**9, "says that a tensor has 1000000000 rows"),
    ("gemma3", "safetensors", "hidden_activation", "silu", "hidden_activation is 'silu'; supported: gelu_pytorch_tanh"),
    ("gemma3", "safetensors", "final_logit_softcapping", 30.0, "final_logit_softcapping is 30.0; supported: null"),
    ("gemma3", "safetensors", "attn_logit_softcapping", 50.0, "attn_logit_softcapping is 50.0; supported: null"),
    ("gemma3", "safetensors", "use_bidirectional_attention", True, "use_bidirectional_attention is True; supported: "),
    ("gemma3", "safetensors", "layer_types", ["full_attention"], "layer_types must name full_attention or sliding_"),
    ("gemma3", "safetensors", "layer_types", ["chunked"] * 8, "layer_types must name full_attention or sliding_"),
    ("gemma3", "safetensors", "sliding_window", 0, "sliding_window is 0, expected a number from 1"),
    ("gemma3", "safetensors", "query_pre_attn_scalar", 0, "query_pre_attn_scalar is 0.0, expected a finite number"),
    ("gemma3", "safetensors", "head_dim", 10**9, "says that a tensor has 4000000000 rows"),
    ("gemma3", "safetensors", "num_key_value_heads", 3, "3 key/value heads do not divide 4 heads"),
    ("gemma3", "safetensors", "rope_parameters/full_attention/rope_type", "yarn3", "rope type 'yarn3'; supported: "),
    (
        "gemma3",
        "safetensors",
        "rope_parameters/sliding_attention",
        3,
        "rope_parameters.sliding_attention is 3, expected",
    ),
    ("gemma3", "gguf", "gemma3.final_logit_softcapping", 30.0, "final_logit_softcapping is 30.0; supported: none"),
    ("gemma3", "gguf", "gemma3.attention.sliding_window", -1, "sliding_window is -1, expected a number from 1"),
    ("gemma3", "gguf", "gemma3.attention.sliding_window_pattern", [True], "pattern does not cover 8 layers"),
    ("gemma3", "gguf", "gemma3.attention.value_length", 8, "attention.value_length is 8; supported: 16"),
    ("gemma3", "gguf", "gemma3.block_count", 10**9, "says it has 1000000000 layers, and has "),
    ("qwen3next", "safetensors", "num_experts", 0, "num_experts is 0, expected a number from 1"),
    ("qwen3next", "safetensors", "norm_topk_prob", False, "norm_topk_prob is False; supported: True"),
    ("qwen3next", "safetensors", "decoder_sparse_step", 2, "decoder_sparse_step is 2; supported: 1"),
    ("qwen3next", "safetensors", "mlp_only_layers", [1], "mlp_only_layers is [1]; supported: []"),
    ("qwen3next", "safetensors", "linear_num_key_heads", 4, "4 key heads do not divide 6 value heads"),
    ("qwen3next", "gguf", "qwen3next.ssm.group_count", 4, "4 key heads do not divide 6 value heads"),
    ("qwen3next", "gguf", "qwen3next.expert_gating_func", 2, "expert_gating_func is 2; supported: 1"),
    ("qwen35", "gguf", "qwen35.ssm.inner_size", 10**9, "says that a tensor has 1000000000 rows"),
    ("llama", "safetensors", "num_key_value_heads", 3, "3 key/value heads do not divide 4 heads"),
    ("qwen35", "safetensors", "linear_num_key_heads", 4, "4 key heads do not divide 6 value heads"),
    ("qwen35moe", "safetensors", "num_experts_per_tok", 9, "the configuration chooses 9 of 8 experts"),
    ("qwen3moe", "safetensors", "num_local_experts", 10**9, "states 1000000000 experts per layer; the files have "),
    ("qwen3moe", "safetensors", "num_local_experts", 0, "num_local_experts is 0, expected a number from 1"),
    ("qwen3moe", "safetensors", "num_experts_per_tok", 9, "the configuration chooses 9 of 8 experts"),
    ("qwen3moe", "safetensors", "moe_intermediate_size", 17, "shape (16, 32), the model's configuration says (17, 32)"),
    ("qwen3moe", "safetensors", "norm_topk_prob", False, "norm_topk_prob is False; supported: True"),
    ("qwen3moe", "safetensors", "norm_topk_prob", ..., "lacks the required key norm_topk_prob (bool)"),
    ("qwen3moe", "safetensors", "decoder_sparse_step", 2, "decoder_sparse_step is 2; supported: 1"),
    ("qwen3moe", "safetensors", "mlp_only_layers", [0], "mlp_only_layers is [0]; supported: []"),
    ("qwen3moe", "gguf", "qwen3moe.expert_count", 10**9, "shape (8, 32), the model's configuration says (1000000000, "),
    ("qwen3moe", "gguf", "qwen3moe.expert_used_count", 9, "the configuration chooses 9 of 8 experts"),
    ("qwen3moe", "gguf", "qwen3moe.expert_gating_func", 2, "expert_gating_func is 2; supported: 1"),
    ("qwen3moe", "gguf", "qwen3moe.expert_weights_norm", False, "expert_weights_norm is False; supported: True"),
    ("glm4moe", "safetensors", "n_group", 2, "n_group is 2; supported: 1"),
    ("glm4moe", "safetensors", "topk_group", 2, "topk_group is 2; supported: 1"),
    ("glm4moe", "safetensors", "norm_topk_prob", False, "norm_topk_prob is False; supported: True"),
    ("glm4moe", "safetensors", "first_k_dense_replace", 4, "dense_replace is 4, expected a number from 0 to 3"),
    ("glm4moe", "safetensors", "first_k_dense_replace", 2, "lacks tensors model.layers.1.mlp.down_proj.weight, "),
    ("glm4moe", "safetensors", "num_experts_per_tok", 9, "the configuration chooses 9 of 8 experts"),
    ("glm4moe", "safetensors", "n_routed_experts", ..., "lacks the required key n_routed_experts (int)"),
    ("glm4moe", "safetensors", "use_qk_norm", False, "has tensors model.layers.0.self_attn.k_norm.weight, "),
    ("glm4moe", "safetensors", "attention_bias", "yes", "attention_bias is 'yes', expected bool"),
    ("glm4moe", "safetensors", "rope_parameters/partial_rotary_factor", 1.5, "rope turns 24 channels of a head of 16"),
    ("glm4moe", "safetensors", "num_hidden_layers", 10**9, "says it has 1000000000 layers"),
    ("gptoss", "safetensors", "hidden_act", "gelu", "hidden_act is 'gelu'; supported: silu"),
    ("gptoss", "safetensors", "attention_bias", False, "attention_bias is False; supported: True"),
    ("gptoss", "safetensors", "swiglu_alpha", 1.0, "swiglu_alpha is 1.0; supported: 1.702"),
    ("gptoss", "safetensors", "swiglu_limit", 0.0, "swiglu_limit is 0.0, expected a finite number above 0"),
    ("gptoss", "safetensors", "layer_types", ["chunked"] * 3, "layer_types must name full_attention or sliding_"),
    ("gptoss", "safetensors", "layer_types", ["full_attention"], "layer_types must name full_attention or sliding_"),
    ("gptoss", "safetensors", "sliding_window", 0, "sliding_window is 0, expected a number from 1"),
    ("gptoss", "safetensors", "num_experts_per_tok", 7, "the configuration chooses 7 of 6 experts"),
    ("gptoss", "safetensors", "rope_parameters/truncate", "no", "rope_parameters.truncate is 'no', expected bool"),
    ("gptoss", "safetensors", "num_local_experts", 10**9, "the model's configuration says (1000000000, 32)"),
    ("gptoss", "gguf", "gpt-oss.expert_gating_func", 2, "gpt-oss.expert_gating_func is 2; supported: 3"),
    ("gptoss", "gguf", "gpt-oss.expert_shared_count", 1, "gpt-oss.expert_shared_count is 1; supported: 0"),
    ("gptoss", "gguf", "gpt-oss.leading_dense_block_count", 1, "leading_dense_block_count is 1; supported: 0"),
    ("gptoss", "gguf", "gpt-oss.attention.sliding_window_pattern", [True], "pattern does not cover 3 layers"),
    ("gptoss", "gguf", "gpt-oss.rope.scaling.type", "longrope", "rope.scaling.type 'longrope'; supported: none, "),
    ("glm4moe", "gguf", "glm4moe.rope.dimension_count", 24, "rope turns 24 channels of a head of 16"),
    ("glm4moe", "gguf", "glm4moe.nextn_predict_layers", 3, "nextn_predict_layers leaves 0 layers"),
    ("glm4moe", "gguf", "glm4moe.leading_dense_block_count", -1, "block_count is -1, expected a number from 0 to 3"),
    ("glm4moe", "gguf", "glm4moe.expert_gating_func", 1, "expert_gating_func is 1; supported: 2"),
    ("glm4moe", "gguf", "glm4moe.expert_group_count", 8, "expert_group_count is 8; supported: 1"),
    ("glm4moe", "gguf", "glm4moe.expert_weights_norm", False, "expert_weights_norm is False; supported: True"),
    ("qwen2", "safetensors", "use_sliding_window", True, "use_sliding_window is True; supported: False"),
    ("qwen2", "safetensors", "is_causal", False, "is_causal is False; supported: True"),
    ("qwen2", "gguf", "qwen2.attention.causal", False, "attention.causal is False; supported: True"),
    ("qwen3", "safetensors", "layer_types", ["full_attention", "sliding_attention"], "layer_types has 'sliding_attent"),
    ("qwen3", "safetensors", "layer_types", "full", "layer_types is 'full', expected list"),
    ("qwen2", "safetensors", "num_attention_heads", 3, "2 key/value heads do not divide 3 heads"),
    ("phi3", "safetensors", "lm_head_bias", True, "lm_head_bias is True; supported: False"),
    ("phi3", "safetensors", "hidden_act", "gelu", "hidden_act is 'gelu'; supported: silu"),
    ("phi3", "safetensors", "sliding_window", -1, "sliding_window is -1, expected a number from 1"),
    ("phi3", "gguf", "phi3.rope.dimension_count", 7, "rope turns 7 channels of a head, expected an even number"),
    ("phi3", "gguf", "phi3.rope.scaling.attn_factor", 1.2, "attn_factor is 1.2; supported: 1.0"),
    ("mistral", "safetensors", "sliding_window", 0, "sliding_window is 0, expected a number from 1"),
    ("mistral", "safetensors", "sliding_window", "24", "sliding_window is '24', expected int"),
    ("mistral", "gguf", "llama.attention.sliding_window", -1, "sliding_window is -1, expected a number from 1"),
    ("mistral", "safetensors", "model_type", "mistral3", "lacks the required key text_config (dict)"),
    ("qwen3", "safetensors", "model_type", "qwen3_vl", "lacks the required key text_config (dict)"),
    ("granite", "safetensors", "residual_multiplier", 0, "residual_multiplier is 0.0, expected a finite number above"),
    ("granite", "safetensors", "logits_scaling", -1.0, "logits_scaling is -1.0, expected a finite number above 0"),
    ("granite", "safetensors", "embedding_multiplier", "12", "embedding_multiplier is '12', expected float"),
    ("granite", "safetensors", "attention_multiplier", 0.0, "attention_multiplier is 0.0, expected a finite number"),
    ("granite", "safetensors", "attention_bias", True, "attention_bias is True; supported: False"),
    ("granitemoe", "safetensors", "num_local_experts", ..., "lacks the required key num_local_experts (int)"),
    ("granitemoe", "safetensors", "num_experts_per_tok", 9, "the configuration chooses 9 of 8 experts"),
    ("granitemoe", "gguf", "granitemoe.expert_shared_feed_forward_length", 16, "_length is 16; supported: 0"),
    ("granite", "gguf", "granite.logit_scale", 0.0, "granite.logit_scale is 0.0, expected a finite number above 0"),
    ("granite", "gguf", "granite.rope.scaling.finetuned", False, "scaling.finetuned is False; supported: True"),
    ("olmo2", "safetensors", "attention_bias", True, "attention_bias is True; supported: False"),
    ("olmo2", "safetensors", "hidden_act", "gelu", "hidden_act is 'gelu'; supported: silu"),
    ("olmo2", "safetensors", "num_attention_heads", 3, "2 key/value heads do not divide 3 heads"),
    ("olmo2", "gguf", "olmo2.attention.value_length", 4, "attention.value_length is 4; supported: 8"),
    ("olmo3", "safetensors", "layer_types", ["full_attention"], "layer_types must name full_attention or sliding_"),
    ("olmo3", "safetensors", "sliding_window", ..., "lacks the required key sliding_window (int)"),
    ("olmo3", "safetensors", "rope_parameters/full_attention/mscale", 1.0, "rope_parameters.mscale is not supported"),
    ("olmo3", "gguf", "olmo2.attention.sliding_window_pattern", [True], "window_pattern does not cover 5 layers"),
    ("olmo3", "gguf", "olmo2.attention.sliding_window", -1, "sliding_window is -1, expected a number from 1"),
    ("olmo3", "gguf", "olmo2.rope.scaling.yarn_attn_factor", 1.5, "yarn_attn_factor is 1.5; supported: 1.0"),
    ("deepseek2", "safetensors", "n_group", 8, "n_group is 8; supported: 1"),
    ("deepseek2", "safetensors", "topk_group", 3, "topk_group is 3; supported: 1"),
    ("deepseek2", "safetensors", "topk_method", "noaux_tc", "topk_method is 'noaux_tc'; supported: greedy or group_"),
    ("deepseek2", "safetensors", "norm_topk_prob", True, "norm_topk_prob is True; supported: False"),
    ("deepseek2", "safetensors", "scoring_func", "sigmoid", "scoring_func is 'sigmoid'; supported: softmax"),
    ("deepseek2", "safetensors", "q_lora_rank", 32, "lacks tensors model.layers.0.self_attn.q_a_layernorm.weight, "),
    ("deepseek2", "safetensors", "rope_parameters/mscale", "1", "rope_parameters.mscale is '1', expected float"),
    ("deepseek2", "safetensors", "rope_parameters/rope_type", "longrope", "rope type 'longrope'; supported: default"),
    ("deepseek2", "safetensors", "moe_layer_freq", 2, "moe_layer_freq is 2; supported: 1"),
    ("deepseek2", "gguf", "deepseek2.rope.scaling.yarn_log_multiplier", ..., "lacks the required key deepseek2.rope."),
    ("deepseek2", "gguf", "deepseek2.expert_weights_norm", True, "expert_weights_norm is True; supported: False"),
    ("deepseek2", "gguf", "deepseek2.expert_group_count", 8, "expert_group_count is 8; supported: 1"),
    ("deepseek3", "safetensors", "n_group", ..., "n_group is 8; supported: 1"),
    ("deepseek3", "safetensors", "topk_group", 4, "topk_group is 4; supported: 1"),
    ("deepseek3", "safetensors", "norm_topk_prob", False, "norm_topk_prob is False; supported: True"),
    ("deepseek3", "safetensors", "scoring_func", "softmax", "scoring_func is 'softmax'; supported: sigmoid"),
    ("deepseek3", "safetensors", "attention_bias", True, "attention_bias is True; supported: False"),
    ("smollm3", "safetensors", "no_rope_layers", [1, 0], "no_rope_layers must list 0 or 1 for each of 5 layers"),
    ("smollm3", "safetensors", "no_rope_layers", [2] * 5, "no_rope_layers must list 0 or 1 for each of 5 layers"),
    ("smollm3", "safetensors", "no_rope_layer_interval", 0, "no_rope_layer_interval is 0, expected a number from 1"),
    ("smollm3", "safetensors", "use_sliding_window", True, "use_sliding_window is True; supported: False"),
    ("smollm3", "safetensors", "attention_bias", True, "attention_bias is True; supported: False"),
    ("llama", "safetensors", "rms_norm_eps", 0, "rms_norm_eps is 0.0, expected a finite number above 0"),
    ("llama", "safetensors", "rms_norm_eps", float("nan"), "rms_norm_eps is nan, expected a finite number above 0"),
    ("llama", "safetensors", "rope_parameters", [1e4], "rope_parameters is [10000.0], expected dict"),
    (
        "llama",
        "safetensors",
        "rope_parameters/rope_type",
        "longrope",
        "rope type 'longrope'; supported: default, linear",
    ),
    ("llama", "safetensors", "rope_parameters/short_factor", [1.0], "rope_parameters.short_factor is not supported"),
    ("llama", "safetensors", "rope_parameters/rope_theta", 1.0, "the rope base is 1.0, expected a number above 1"),
    ("llama", "safetensors", "head_dim", 3, "rope turns 3 channels of a head, expected an even number"),
    ("qwen3-yarn", "safetensors", "rope_parameters/mscale", 1.0, "rope_parameters.mscale is not supported"),
    (
        "qwen3-yarn",
        "gguf",
        "qwen3.rope.scaling.type",
        "longrope",
        "rope.scaling.type 'longrope'; supported: none, linear",
    ),
    ("qwen3-yarn", "gguf", "qwen3.rope.scaling.attn_factor", 2.0, "rope.scaling.attn_factor is 2.0; supported: 1.0"),
    ("llama", "gguf", "llama.rope.dimension_count", 8, "rope.dimension_count is 8, expected 16"),
    ("llama", "gguf", "llama.attention.value_length", 8, "attention.value_length is 8; supported: 16"),
    ("llama", "gguf", "llama.expert_count", 8, "llama.expert_count is 8; supported: 0"),
    ("qwen35", "safetensors", "attn_output_gate", False, "attn_output_gate is False; supported: True"),
    (
        "qwen35",
        "safetensors",
        "layer_types",
        ["full_attention"],
        "layer_types must name linear_attention or full_attention",
    ),
    ("qwen35", "safetensors", "layer_types", ["sliding_attention"] * 8, "layer_types must name linear_attention or"),
    ("qwen35", "safetensors", "rope_parameters/partial_rotary_factor", 1.5, "rope turns 24.0 channels of a head of 16"),
    ("qwen35", "gguf", "qwen35.rope.dimension_count", 24, "rope turns 24 channels of a head of 16"),
    ("qwen35", "gguf", "qwen35.nextn_predict_layers", 9, "nextn_predict_layers leaves 0 layers"),
    ("qwen35", "gguf", "qwen35.attention.recurrent_layers", [True], "recurrent_layers lists 1 of 8 layers"),
    ("qwen35moe", "gguf", "qwen35moe.expert_gating_func", 2, "expert_gating_func is 2; supported: 1"),
    ("qwen35moe", "gguf", "qwen35moe.expert_weights_scale", 2.5, "expert_weights_scale is 2.5; supported: 0.0 or 1.0"),
]


@pytest.mark.parametrize(("name", "form", "key", "value", "says"), WRONG)
def test_wrong_key(checkpoints, name, form, key, value, says):
    assert says in refusal(changed(checkpoints(name, form), key, value))


def test_a_vision_tower_beside_another_text(checkpoints):
    """A text whose attention is another one has another model_type; mlx-lm may know it."""
    mistral = checkpoints("mistral", "safetensors")
    config = {"model_type": "mistral3", "text_config": mistral.config | {"model_type": "ministral3"}}
    other = replace(mistral, config=config)
    assert not is_defined(other)
    assert "model_type is 'mistral3 of ministral3'; supported: " in refusal(other)


def with_tensor(checkpoint: Checkpoint, name: str, tensor: Tensor | None) -> Checkpoint:
    tensors = {n: t for n, t in checkpoint.tensors.items() if n != name}
    return replace(checkpoint, tensors=tensors | ({name: tensor} if tensor else {}))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3moe", "qwen35moe", "qwen3next", "gemma3", "glm4moe", "gptoss", "olmo2"]
)
def test_every_tensor_counts(checkpoints, name, form):
    """Without any one tensor, and with any one too long by a row, the file is refused by that tensor's name."""
    checkpoint = checkpoints(name, form)
    optional = {"rope_freqs.weight", "output.weight"}  # without them: an unscaled rope, a tied head
    optional |= {"blk.0.attn_q.bias", "blk.0.attn_q_norm.weight"}  # which tell whether glm4moe's layers have them
    skipped = "blk.4."  # the multi-token-prediction block of qwen35moe
    for key, tensor in checkpoint.tensors.items():
        if key in optional or key.startswith(skipped):
            continue
        assert re.search(
            rf"lacks tensor {re.escape(key)}$|lacks embed_tokens", refusal(with_tensor(checkpoint, key, None))
        )
        if key != "token_embd.weight":  # whose length is the vocabulary's size
            longer = dense(key, np.ones((tensor.shape[0] + 1, *tensor.shape[1:])))
            assert key in refusal(with_tensor(checkpoint, key, longer))


def test_missing_tensors_are_listed(checkpoints):
    checkpoint = checkpoints("llama", "safetensors")
    kept = {n: t for n, t in checkpoint.tensors.items() if ".1." not in n}
    message = refusal(replace(checkpoint, tensors=kept))
    assert "lacks tensors model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight, " in message
    assert message.endswith("and 6 more")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("llama", "model.layers.0.self_attn.q_proj.bias"),
        ("llama", "model.layers.3.input_layernorm.weight"),
        ("qwen3", "model.layers.0.self_attn.sinks"),
        ("qwen2", "model.layers.0.self_attn.o_proj.bias"),
        ("qwen35", "model.layers.3.linear_attn.A_log"),
        ("qwen35", "model.layers.0.mlp.gate.weight"),
    ],
)
def test_unused_tensor(checkpoints, name, key):
    message = refusal(with_tensor(checkpoints(name, "safetensors"), key, dense(key, np.ones(32))))
    assert message.endswith(f"has tensor {key}, which this architecture does not use")


SHAPES = [  # model, format, tensor, shape in the file
    ("llama", "safetensors", "model.embed_tokens.weight", (32, 96)),
    ("llama", "safetensors", "model.norm.weight", ()),
    ("llama", "safetensors", "model.norm.weight", (2, 16)),
    ("qwen35", "safetensors", "model.layers.0.linear_attn.conv1d.weight", (4, 1, 144)),
    ("qwen35", "safetensors", "model.layers.0.linear_attn.conv1d.weight", (144, 4)),
    ("qwen35", "safetensors", "model.layers.0.linear_attn.conv1d.weight", ()),
    ("qwen35", "safetensors", "model.layers.0.linear_attn.out_proj.weight", (96, 32)),
    ("qwen35", "gguf", "blk.0.ssm_conv1d.weight", (4, 144)),
    ("qwen35moe", "gguf", "blk.0.ffn_gate_inp_shexp.weight", (2, 16)),
]


@pytest.mark.parametrize(("name", "form", "key", "shape"), SHAPES)
def test_misshapen_tensor(checkpoints, name, form, key, shape):
    tensor = dense(key, np.ones(shape))
    message = refusal(with_tensor(checkpoints(name, form), key, replace(tensor, shape=shape)))
    assert key in message
    assert str(shape) in message


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("key", ["model.norm.weight", "model.layers.0.linear_attn.conv1d.weight"])
def test_vector_that_is_not_finite(checkpoints, key, value):
    checkpoint = checkpoints("qwen35", "safetensors")
    values = np.ones(checkpoint.tensors[key].shape)
    values.flat[3] = value
    assert re.search(rf"{key}.* not finite", refusal(with_tensor(checkpoint, key, dense(key, values))))


def test_decay_that_overflows(checkpoints):
    key = "model.layers.0.linear_attn.A_log"
    with np.errstate(over="ignore"):
        message = refusal(with_tensor(checkpoints("qwen35", "safetensors"), key, dense(key, np.full(6, 1000.0))))
    assert message == f"{key} is not finite"


def test_scale_that_is_not_finite(tmp_path):
    checkpoint = open_checkpoint(write_gguf(tiny.FOLDER / "llama", tmp_path / "m.gguf", "Q8_0"))
    tensor = checkpoint.tensors["blk.0.attn_q.weight"]
    data = tensor.data.copy()
    data.reshape(-1, 34)[1, :2] = 0x00, 0x7E  # float16 NaN
    message = refusal(with_tensor(checkpoint, tensor.name, replace(tensor, data=data)))
    assert "'blk.0.attn_q.weight' (Q8_0) is not finite at block 1" in message


@pytest.mark.parametrize("type_", ["I32", "U32"])
def test_integers_are_no_weights(checkpoints, type_):
    checkpoint = checkpoints("llama", "safetensors")
    key = "model.norm.weight"
    assert refusal(with_tensor(checkpoint, key, replace(checkpoint.tensors[key], type=type_))) == (
        f"{key} holds {type_} values; weights are floats"
    )


def test_experts_stored_differently(checkpoints):
    checkpoint = checkpoints("qwen35moe", "safetensors")
    key = "model.layers.0.mlp.experts.2.gate_proj.weight"
    message = refusal(with_tensor(checkpoint, key, dense(key, np.ones((16, 32)))))
    assert message == (
        f"{key} is F32 (16, 32) but {key.replace('.2.', '.0.')} is BF16 (16, 32); "
        "the experts of a layer must be stored alike"
    )
