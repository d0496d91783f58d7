"""Writes a tiny Hugging Face model as the GGUF file that llama.cpp's converter would make of it.

Independent of `common/models`: names, keys and conventions are those of convert_hf_to_gguf.py (llama.cpp), that is
norm weights plus 1, -exp(A_log), value heads tiled over key heads but for qwen3next, rope pairs of `llama` as adjacent
rows.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import gguf
import gguf_laguna_glm
import gguf_olmo
import numpy as np

from common.checkpoint import open_checkpoint
from common.quants import dequantize

NAMES = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    **{f"self_attn.{part}_proj.bias": f"attn_{part}.bias" for part in "qkv"},
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "self_attn.qkv_proj.weight": "attn_qkv.weight",
    "mlp.gate_up_proj.weight": "ffn_up.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.router.layer.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.output_linear.weight": "ffn_down_exps.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
}
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
TOP["lm_head.weight"] = "output.weight"
ARCHITECTURES = {  # by config.json's model_type, where the names differ
    **{"mistral": "llama", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"},
    **{"qwen3_moe": "qwen3moe", "qwen3_next": "qwen3next"},
}
CONVERTERS = gguf_laguna_glm.CONVERTERS | gguf_olmo.CONVERTERS  # by config.json's model_type
DENSE = ("_norm.weight", "ssm_conv1d.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", ".bias")
ADJACENT = ("granite", "granitemoe", "llama", "smollm3")  # architectures whose rope pairs are adjacent rows of a head
DELTA = ("qwen3next", "qwen35")  # architectures with Gated DeltaNet layers
TYPES = {kind.name: kind for kind in gguf.GGMLQuantizationType}


def write_gguf(
    folder: Path,
    path: Path,
    matrices: str = "F32",
    mtp: bool | dict[str, np.ndarray] = False,
    expand: bool = False,
    change: Callable[[dict, dict], None] = lambda keys, tensors: None,
) -> Path:
    """`folder`'s model at `path`, its matrices of type F32, F16 or a quantized one where their width allows it.

    mtp     append a multi-token-prediction block: that of these tensors, or some block to a Qwen3.5
    expand  store what gguf-py reads back from the quantized matrices, as F32
    change  is given the keys and tensors of a model in CONVERTERS before they are written
    """
    config = json.loads((folder / "config.json").read_text())
    weights = {name: dequantize(tensor) for name, tensor in open_checkpoint(folder).tensors.items()}
    nextn: dict[str, np.ndarray] = {}
    if isinstance(mtp, dict):
        n, nextn = config["num_hidden_layers"], _nextn(config, mtp)
        weights |= {name.replace("mtp.layers.0.", f"model.layers.{n}."): array for name, array in mtp.items()}
        config["num_hidden_layers"] = n + 1
    if config["model_type"] in CONVERTERS:
        architecture, keys, tensors = CONVERTERS[config["model_type"]](config, weights)
        keys |= {"nextn_predict_layers": 1} if nextn else {}
        tensors |= nextn
        change(keys, tensors)
        writer = gguf.GGUFWriter(path, architecture)
        gguf_laguna_glm.write_keys(writer, architecture, keys)
    else:
        architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
        writer = gguf.GGUFWriter(path, architecture)
        _write_keys(writer, config, architecture, mtp is True)
        tensors = _tensors(config, architecture, weights)
        if nextn:
            writer.add_nextn_predict_layers(1)
            tensors |= nextn
        elif mtp:
            tensors |= _mtp_block(config, tensors)
        rope = config["rope_parameters"]
        if rope["rope_type"] == "llama3":
            tensors["rope_freqs.weight"] = _llama3_divisors(config)
        if rope["rope_type"] == "longrope":
            tensors |= {f"rope_factors_{name}.weight": np.array(rope[f"{name}_factor"]) for name in ("long", "short")}
    writer.add_tokenizer_model("none")
    for name, array in tensors.items():
        dense = array.ndim == 1 or name.endswith(DENSE)
        kind = TYPES["F32" if dense else matrices]
        if array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = TYPES["F16"]
        data = gguf.quants.quantize(np.ascontiguousarray(array, np.float32), kind)
        if expand:
            data, kind = gguf.quants.dequantize(data, kind), TYPES["F32"]
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


NEXTN = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}
NEXTN |= {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "shared_head.norm": "shared_head_norm"}


def _nextn(config: dict, block: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a multi-token-prediction block that do not belong to its layer."""
    n, out = config["num_hidden_layers"], {}
    for name, array in block.items():
        short = name.removeprefix("mtp.").removeprefix(f"model.layers.{n}.").removesuffix(".weight")
        if short in NEXTN:
            is_around_0 = name.startswith("mtp.") and array.ndim == 1
            out[f"blk.{n}.nextn.{NEXTN[short]}.weight"] = array + 1 if is_around_0 else array
    return out


def _write_keys(writer: gguf.GGUFWriter, config: dict, architecture: str, mtp: bool) -> None:
    rope, heads = config["rope_parameters"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"] + mtp)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    if architecture != "phi3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    writer.add_vocab_size(config["vocab_size"])
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    if architecture == "llama" and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "phi3":
        original = config["original_max_position_embeddings"]
        writer.add_sliding_window(config["sliding_window"] or 0)
        writer.add_rope_scaling_orig_ctx_len(original)
        if rope["rope_type"] == "longrope":
            scale = config["max_position_embeddings"] / original
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
    if architecture.startswith("granite"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if architecture.startswith(DELTA):
        values = config["linear_num_value_heads"]
        if "mrope_section" in rope:
            writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
        writer.add_full_attention_interval(4)
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(values)
        writer.add_ssm_inner_size(values * config["linear_value_head_dim"])
    if mtp:
        writer.add_nextn_predict_layers(1)
    if "num_experts" in config or "num_local_experts" in config:
        writer.add_expert_count(_experts(config))
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if "moe_intermediate_size" in config:
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if architecture in ("qwen35moe", "qwen3next"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _experts(config: dict) -> int:
    return config.get("num_experts") or config["num_local_experts"]


def _tensors(config: dict, architecture: str, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    out = {TOP[name]: array for name, array in weights.items() if name in TOP}
    if architecture.startswith(DELTA):
        out["output_norm.weight"] = out["output_norm.weight"] + 1
    post_norm = "post_attention_norm.weight" if architecture.startswith(DELTA) else "ffn_norm.weight"
    norms = {"input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": post_norm}
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        layer = {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}
        for name, array in layer.items():
            if name in NAMES | norms:
                out[f"blk.{i}.{(NAMES | norms)[name]}"] = _converted(config, architecture, name, array)
        if "linear_attn.in_proj_qkvz.weight" in layer:
            parts = _apart(config, layer["linear_attn.in_proj_qkvz.weight"])
            out |= {f"blk.{i}.attn_{part}.weight": array for part, array in parts.items()}
        if "block_sparse_moe.input_linear.weight" in layer:
            gate, up = np.split(layer["block_sparse_moe.input_linear.weight"], 2, axis=1)
            out |= {f"blk.{i}.ffn_gate_exps.weight": gate, f"blk.{i}.ffn_up_exps.weight": up}
        if "mlp.experts.0.gate_proj.weight" in layer:
            for part in ("gate", "up", "down"):
                stack = [layer[f"mlp.experts.{e}.{part}_proj.weight"] for e in range(_experts(config))]
                out[f"blk.{i}.ffn_{part}_exps.weight"] = np.stack(stack)
    return out


def _converted(config: dict, architecture: str, name: str, array: np.ndarray) -> np.ndarray:
    if architecture in ADJACENT and name.startswith(("self_attn.q_proj", "self_attn.k_proj")):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        return array.reshape(heads, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
    if not architecture.startswith(DELTA):
        return array
    if name.endswith("norm.weight") and not name.startswith("linear_attn"):
        return array + 1
    if not name.startswith("linear_attn") or name.endswith("norm.weight"):
        return array
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width, keys = config["linear_value_head_dim"], 2 * groups * config["linear_key_head_dim"]

    def tiled(x: np.ndarray, per_head: int) -> np.ndarray:
        """From head g * R + r to head r * groups + g along the first axis."""
        return x.reshape(groups, heads // groups, per_head, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)

    if name.endswith("conv1d.weight"):
        array = array[:, 0]
    if name.endswith("A_log"):
        array = -np.exp(array)
    if architecture == "qwen3next":
        return array
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        return np.concatenate([array[:keys], tiled(array[keys:], width)])
    if name.endswith("in_proj_z.weight"):
        return tiled(array, width)
    if name.endswith("out_proj.weight"):
        return tiled(array.T, width).T
    return tiled(array, 1)


def _apart(config: dict, qkvz: np.ndarray) -> dict[str, np.ndarray]:
    """Rows of q, k, v and z, stored key head by key head, as two matrices of all heads."""
    groups, width = config["linear_num_key_heads"], config["linear_key_head_dim"]
    per_key = config["linear_num_value_heads"] // groups * config["linear_value_head_dim"]
    of_heads = qkvz.reshape(groups, -1, qkvz.shape[1])
    q, k, v, z = (part.reshape(-1, qkvz.shape[1]) for part in np.split(of_heads, np.cumsum([width, width, per_key]), 1))
    return {"qkv": np.concatenate([q, k, v]), "gate": z}


def _mtp_block(config: dict, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One more attention block with its own inputs, as `nextn_predict_layers` = 1 announces."""
    n, hidden = config["num_hidden_layers"], config["hidden_size"]
    attention = f"blk.{n - 1}."
    block = {name.replace(attention, f"blk.{n}."): 2 * a for name, a in tensors.items() if name.startswith(attention)}
    block[f"blk.{n}.nextn.eh_proj.weight"] = np.ones((hidden, 2 * hidden), np.float32)
    return block | {f"blk.{n}.nextn.{k}.weight": np.ones(hidden) for k in ("enorm", "hnorm", "shared_head_norm")}


def _llama3_divisors(config: dict) -> np.ndarray:
    rope, dim = config["rope_parameters"], config["head_dim"]
    waves = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((original / waves - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
