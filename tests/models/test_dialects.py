"""The same weights under every name and layout that writers give them: the golden logits do not change.

Each dialect is the tiny model's checkpoint with tensors and keys renamed or laid out anew, in memory.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import tiny
from gguf_files import write_gguf
from test_golden import KL, LOGIT

from common.checkpoint import Checkpoint, open_checkpoint
from common.models import load_model
from common.quants import dequantize
from common.reference import NumpyOps
from common.tensors import Tensor, stack
from common.weights import dense

ROWS = 128


def mapped(tensor: Tensor, fn: Callable[[np.ndarray], np.ndarray]) -> Tensor:
    return dense(tensor.name, fn(dequantize(tensor)))


def renamed(c: Checkpoint, name: Callable[[str], str]) -> Checkpoint:
    return replace(c, tensors={name(key): tensor for key, tensor in c.tensors.items()})


def as_trained_with_vision(c: Checkpoint) -> Checkpoint:
    """The released Qwen3.5: text under model.language_model, its keys under text_config, vision and MTP beside it."""
    c = renamed(c, lambda key: key.replace("model.", "model.language_model.", 1))
    extra = ("model.visual.patch_embed.proj.weight", "mtp.fc.weight", "mtp.layers.0.mlp.gate_proj.weight")
    outer = {"model_type": c.config["model_type"].replace("_text", ""), "text_config": c.config}
    return replace(c, config=outer, tensors=c.tensors | {key: dense(key, np.ones((2, 2))) for key in extra})


def of_mlx_lm(c: Checkpoint) -> Checkpoint:
    """mlx-lm's conversion: 1 added to norms, taps on the middle axis, experts stacked, Qwen3.5 under language_model."""
    tensors, wrapper = {}, "" if c.config["model_type"] == "qwen3_next" else "language_model."
    for key, tensor in c.tensors.items():
        if key.endswith("conv1d.weight"):
            tensor = mapped(tensor, lambda conv: conv.swapaxes(1, 2))
        elif key.endswith("norm.weight") and "linear_attn" not in key:
            tensor = mapped(tensor, lambda w: w + 1)
        tensors[wrapper + key] = tensor
    for part in ("gate", "up", "down"):
        for i in range(len(c.config["layer_types"])):
            names = [f"{wrapper}model.layers.{i}.mlp.experts.{e}.{part}_proj.weight" for e in range(8)]
            if names[0] in tensors:
                whole = f"{wrapper}model.layers.{i}.mlp.switch_mlp.{part}_proj.weight"
                tensors[whole] = stack([tensors.pop(name) for name in names])
    return replace(c, tensors=tensors)


def with_stacked_experts(c: Checkpoint) -> Checkpoint:
    """Experts of a layer in two tensors, as transformers holds them."""
    tensors = dict(c.tensors)
    for i in range(c.config["num_hidden_layers"]):
        if f"model.layers.{i}.mlp.experts.0.gate_proj.weight" not in tensors:
            continue
        parts = [
            [dequantize(tensors.pop(f"model.layers.{i}.mlp.experts.{e}.{p}_proj.weight")) for e in range(8)]
            for p in ("gate", "up", "down")
        ]
        gate, up, down = map(np.stack, parts)
        for name, array in (("gate_up_proj", np.concatenate([gate, up], axis=1)), ("down_proj", down)):
            tensors[f"model.layers.{i}.mlp.experts.{name}"] = dense(name, array)
    return replace(c, tensors=tensors)


def in_modules(c: Checkpoint) -> Checkpoint:
    """mlx-lm's conversion of a mixture without Gated DeltaNet: experts of a layer stacked by projection."""
    tensors = dict(c.tensors)
    for i in range(c.config["num_hidden_layers"]):
        for part in ("gate", "up", "down"):
            names = [f"model.layers.{i}.mlp.experts.{e}.{part}_proj.weight" for e in range(8)]
            if names[0] not in tensors:
                continue
            tensors[f"model.layers.{i}.mlp.switch_mlp.{part}_proj.weight"] = stack([tensors.pop(n) for n in names])
    return replace(c, tensors=tensors)


def with_released_key(c: Checkpoint) -> Checkpoint:
    """The number of experts by the name that releases state; transformers 5 writes another one."""
    config = {key: value for key, value in c.config.items() if key != "num_local_experts"}
    return replace(c, config=config | {"num_experts": 8})


def beside_a_vision_tower(c: Checkpoint) -> Checkpoint:
    """Mistral Small 3.1 as released, its text under language_model."""
    c = renamed(c, lambda key: "language_model." + key)
    extra = ("vision_tower.ln_pre.weight", "multi_modal_projector.linear_1.weight")
    outer = {"model_type": "mistral3", "text_config": c.config}
    return replace(c, config=outer, tensors=c.tensors | {key: dense(key, np.ones((2, 2))) for key in extra})


def as_transformers_names_it(c: Checkpoint) -> Checkpoint:
    """The same saved by transformers 5, its head outside of the text."""
    c = renamed(c, lambda key: key.replace("model.", "model.language_model.", 1))
    extra = "model.vision_tower.ln_pre.weight"
    outer = {"model_type": "mistral3", "text_config": c.config}
    return replace(c, config=outer, tensors=c.tensors | {extra: dense(extra, np.ones((2, 2)))})


def of_mistral(c: Checkpoint) -> Checkpoint:
    """Under the name of releases without a window, whose network is Llama's."""
    return replace(c, config=c.config | {"model_type": "mistral", "sliding_window": None})


def of_qwen3_vl(c: Checkpoint) -> Checkpoint:
    """Qwen3-VL as released: text under model.language_model, rope over three axes; stacks of experts are exchanged."""
    kind = "qwen3_vl_moe" if "num_experts_per_tok" in c.config else "qwen3_vl"
    c = with_stacked_experts(c)
    stacks = {key: mapped(t, lambda w: w.swapaxes(1, 2)) for key, t in c.tensors.items() if ".mlp.experts." in key}
    extra = "model.visual.patch_embed.proj.weight"
    rope = c.config["rope_parameters"] | {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
    text = {key: value for key, value in c.config.items() if key != "norm_topk_prob"}  # which transformers leaves out
    outer = {"model_type": kind, "text_config": text | {"model_type": f"{kind}_text", "rope_parameters": rope}}
    c = renamed(replace(c, tensors=c.tensors | stacks), lambda key: key.replace("model.", "model.language_model.", 1))
    return replace(c, config=outer, tensors=c.tensors | {extra: dense(extra, np.ones((2, 2)))})


def of_qwen3_vl_by_mlx_lm(c: Checkpoint) -> Checkpoint:
    c = renamed(in_modules(c), lambda key: "language_model." + key)
    kind = "qwen3_vl_moe" if "num_experts_per_tok" in c.config else "qwen3_vl"
    extra = "vision_tower.patch_embed.proj.weight"
    tensors = c.tensors | {extra: dense(extra, np.ones((2, 2)))}
    return replace(c, config={"model_type": kind, "text_config": c.config}, tensors=tensors)


def of_qwen3_vl_text(c: Checkpoint) -> Checkpoint:
    """The text alone, as transformers saves it."""
    return replace(c, config=c.config | {"model_type": "qwen3_vl_text"})


def with_old_rope_keys(c: Checkpoint) -> Checkpoint:
    """rope_theta and rope_scaling, before transformers 5."""
    config = dict(c.config)
    rope = dict(config.pop("rope_parameters"))
    theta, share = rope.pop("rope_theta"), rope.pop("partial_rotary_factor", None)
    config |= {"rope_theta": theta, "rope_scaling": rope if rope["rope_type"] != "default" else None}
    return replace(c, config=config | ({"partial_rotary_factor": share} if share else {}))


def with_interval(c: Checkpoint) -> Checkpoint:
    config = {key: value for key, value in c.config.items() if key != "layer_types"}
    return replace(c, config=config | {"full_attention_interval": 4})


def with_prediction_block(c: Checkpoint) -> Checkpoint:
    """As released, with a multi-token-prediction block beside the model."""
    extra = ("mtp.fc.weight", "mtp.layers.0.mlp.experts.0.gate_proj.weight")
    return replace(c, tensors=c.tensors | {key: dense(key, np.ones((2, 2))) for key in extra})


def in_float32(c: Checkpoint) -> Checkpoint:
    return replace(c, tensors={key: mapped(tensor, lambda w: w) for key, tensor in c.tensors.items()})


def beside_vision(c: Checkpoint, prefix: str) -> Checkpoint:
    """Gemma 3 of 4B and more: text below `prefix`, its keys in text_config, a vision tower beside it."""
    outer = "model." if prefix == "model.language_model." else ""
    extra = (outer + "vision_tower.vision_model.head.weight", outer + "multi_modal_projector.mm_soft_emb_norm.weight")
    c = renamed(c, lambda key: key.replace("model.", prefix, 1))
    config = {"model_type": "gemma3", "text_config": c.config, "vision_config": {}}
    return replace(c, config=config, tensors=c.tensors | {key: dense(key, np.ones((2, 2))) for key in extra})


def gemma_as_released(c: Checkpoint) -> Checkpoint:
    return beside_vision(c, "language_model.model.")


def gemma_of_newer_transformers(c: Checkpoint) -> Checkpoint:
    return beside_vision(c, "model.language_model.")


def with_older_gemma_keys(c: Checkpoint) -> Checkpoint:
    """Ropes and windows as before transformers 5, without the keys that have defaults."""
    config = {key: value for key, value in c.config.items() if key not in ("rope_parameters", "layer_types")}
    for key in ("_sliding_window_pattern", "vocab_size", "rms_norm_eps", "max_position_embeddings"):
        del config[key]
    config |= {"rope_theta": 1e2, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6}
    return replace(c, config=config | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})


def by_interval(c: Checkpoint) -> Checkpoint:
    """Without the list of layers without rope."""
    return replace(c, config={key: value for key, value in c.config.items() if key != "no_rope_layers"})


def of_olmo3_as_released(c: Checkpoint) -> Checkpoint:
    """One base of all ropes, and YaRN beside it, for full layers alone."""
    config = {key: value for key, value in c.config.items() if key not in ("rope_parameters", "layer_types")}
    yarn = {key: value for key, value in c.config["rope_parameters"]["full_attention"].items() if key != "rope_theta"}
    return replace(c, config=config | {"rope_theta": 1e2, "rope_scaling": yarn})


def with_a_period(c: Checkpoint) -> Checkpoint:
    """Which layers have a window as the period that readers assume, without a factor that they derive."""
    keys = ("olmo2.attention.sliding_window_pattern", "olmo2.rope.scaling.yarn_attn_factor")
    return replace(c, config={key: value for key, value in c.config.items() if key not in keys})


def older_deepseek(c: Checkpoint) -> Checkpoint:
    """Files of DeepSeek-V2-Lite before attention to latents: one matrix for keys and values, one KV head per head."""
    tensors = {key: tensor for key, tensor in c.tensors.items() if "attn_k_b" not in key and "attn_v_b" not in key}
    for i in range(3):
        k, v = (dequantize(c.tensors[f"blk.{i}.attn_{part}_b.weight"]) for part in "kv")
        kv = np.concatenate([k.swapaxes(1, 2), v], axis=1)
        tensors[f"blk.{i}.attn_kv_b.weight"] = dense(f"blk.{i}.attn_kv_b.weight", kv.reshape(-1, kv.shape[-1]))
    drop = ("_mla", "expert_gating_func", "expert_group_count", "expert_group_used_count")
    config = {key: value for key, value in c.config.items() if not key.endswith(drop)}
    keys = {"head_count_kv": 4, "key_length": 24, "value_length": 24}
    return replace(c, config=config | {f"deepseek2.attention.{k}": v for k, v in keys.items()}, tensors=tensors)


def without_gating(c: Checkpoint) -> Checkpoint:
    """The biases of the router say that a sigmoid chooses experts."""
    return replace(c, config={key: value for key, value in c.config.items() if "gating_func" not in key})


def granite_in_modules(c: Checkpoint) -> Checkpoint:
    """mlx-lm's conversion of a Granite mixture: gate and up apart."""
    tensors = dict(c.tensors)
    for i in range(3):
        name = f"model.layers.{i}.block_sparse_moe."
        gate, up = np.split(dequantize(tensors.pop(name + "input_linear.weight")), 2, axis=1)
        down = dequantize(tensors.pop(name + "output_linear.weight"))
        for part, array in (("gate", gate), ("up", up), ("down", down)):
            key = f"{name}switch_mlp.{part}_proj.weight"
            tensors[key] = dense(key, array)
    return replace(c, tensors=tensors)


SAFETENSORS = [
    ("granitemoe", granite_in_modules),
    ("granitemoe", with_old_rope_keys),
    ("deepseek2", with_old_rope_keys),
    ("deepseek2", with_stacked_experts),
    ("deepseek2", in_modules),
    ("deepseek3", with_old_rope_keys),
    ("olmo2", with_old_rope_keys),
    ("olmo3", of_olmo3_as_released),
    ("granite", with_old_rope_keys),
    ("smollm3", by_interval),
    ("smollm3", with_old_rope_keys),
    ("gemma3", gemma_as_released),
    ("gemma3", gemma_of_newer_transformers),
    ("gemma3", with_older_gemma_keys),
    ("gemma3", in_float32),
    ("qwen35", as_trained_with_vision),
    ("qwen35moe", as_trained_with_vision),
    ("qwen35", of_mlx_lm),
    ("qwen35moe", of_mlx_lm),
    ("qwen35moe", with_stacked_experts),
    ("qwen3moe", with_stacked_experts),
    ("qwen3moe", in_modules),
    ("qwen3moe", with_released_key),
    ("qwen3moe", with_old_rope_keys),
    ("glm4moe", with_stacked_experts),
    ("glm4moe", in_modules),
    ("glm4moe", with_old_rope_keys),
    ("qwen3next", of_mlx_lm),
    ("qwen3next", with_stacked_experts),
    ("qwen3next", with_old_rope_keys),
    ("qwen3next", with_interval),
    ("qwen3next", with_prediction_block),
    ("llama", with_old_rope_keys),
    ("llama", of_mistral),
    ("mistral", with_old_rope_keys),
    ("phi3", with_old_rope_keys),
    ("phi4mini", with_old_rope_keys),
    ("mistral", beside_a_vision_tower),
    ("mistral", as_transformers_names_it),
    ("qwen2", with_old_rope_keys),
    ("qwen3-yarn", with_old_rope_keys),
    ("qwen35", with_old_rope_keys),
    ("qwen35", with_interval),
    ("qwen35", in_float32),
    ("qwen3", of_qwen3_vl),
    ("qwen3", of_qwen3_vl_by_mlx_lm),
    ("qwen3", of_qwen3_vl_text),
    ("qwen3moe", of_qwen3_vl),
    ("qwen3moe", of_qwen3_vl_by_mlx_lm),
]


def fused(c: Checkpoint, kind: str, wholes: str, parts: tuple[str, ...], axis: int) -> Checkpoint:
    """Tensors `parts` of each block that has them as one tensor, where the block has a tensor `kind`."""
    tensors = dict(c.tensors)
    for key in c.tensors:
        if key.endswith("." + kind):
            block = key.removesuffix(kind)
            arrays = [dequantize(tensors.pop(block + part)) for part in parts]
            tensors[block + wholes] = dense(block + wholes, np.concatenate(arrays, axis))
    return replace(c, tensors=tensors)


def fused_attention(c: Checkpoint) -> Checkpoint:
    return fused(c, "attn_q.weight", "attn_qkv.weight", ("attn_q.weight", "attn_k.weight", "attn_v.weight"), 0)


def fused_experts(c: Checkpoint) -> Checkpoint:
    parts = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
    return fused(c, parts[0], "ffn_gate_up_exps.weight", parts, 1)


def other_norm_name(c: Checkpoint) -> Checkpoint:
    return renamed(c, lambda key: key.replace("post_attention_norm", "ffn_norm"))


def listed_layers(c: Checkpoint) -> Checkpoint:
    """Which layers are recurrent, and the key/value heads of each, as arrays; the last is the prediction block."""
    is_recurrent = [(i + 1) % 4 != 0 for i in range(c.config["qwen35.block_count"] - 1)] + [False]
    heads = [0 if r else c.config["qwen35.attention.head_count_kv"] for r in is_recurrent]
    keys = {"qwen35.attention.recurrent_layers": is_recurrent, "qwen35.attention.head_count_kv": heads}
    config = {key: value for key, value in c.config.items() if "full_attention_interval" not in key}
    return replace(c, config=config | keys)


def without_unit_axes(c: Checkpoint) -> Checkpoint:
    """As a quantizer rewrites what the converter stored: axes of length 1 at the end of GGUF's list are dropped."""
    return replace(c, tensors={key: t.reshape(tuple(n for n in t.shape if n != 1)) for key, t in c.tensors.items()})


def with_unit_axes(c: Checkpoint) -> Checkpoint:
    """Every vector as a matrix of one row, every filter with the axis that a convolution's weight has in PyTorch."""

    def widened(key: str, tensor: Tensor) -> Tensor:
        if key.endswith("ssm_conv1d.weight"):
            return tensor.reshape((tensor.shape[0], 1, tensor.shape[1]))
        return tensor.reshape((1, *tensor.shape)) if len(tensor.shape) == 1 else tensor

    return replace(c, tensors={key: widened(key, tensor) for key, tensor in c.tensors.items()})


def joined_projections(c: Checkpoint) -> Checkpoint:
    """Older files of Qwen3-Next: q, k, v and z in one matrix, key head by key head as trained."""
    tensors, trained = dict(c.tensors), tiny.checkpoint("qwen3next").tensors
    for i in range(3):
        del tensors[f"blk.{i}.attn_qkv.weight"], tensors[f"blk.{i}.attn_gate.weight"]
        name = f"blk.{i}.ssm_in.weight"
        tensors[name] = replace(trained[f"model.layers.{i}.linear_attn.in_proj_qkvz.weight"], name=name)
    return replace(c, tensors=tensors)


def listed_windows(c: Checkpoint) -> Checkpoint:
    """Which layers have a window as an array, and the rope of these layers."""
    keys = {"gemma3.attention.sliding_window_pattern": [(i + 1) % 6 > 0 for i in range(8)]}
    return replace(c, config=c.config | keys | {"gemma3.rope.freq_base_swa": 1e4})


def of_qwen3vl(c: Checkpoint) -> Checkpoint:
    """Qwen3-VL, whose rope turns pairs by three axes, and whose first layers take features of images."""
    old = c.config["general.architecture"] + "."
    new = old.replace("qwen3", "qwen3vl")
    config = {key.replace(old, new, 1) if key.startswith(old) else key: value for key, value in c.config.items()}
    more = {"general.architecture": new[:-1], f"{new}rope.dimension_sections": [3, 3, 2, 0]}
    return replace(c, config=config | more | {f"{new}n_deepstack_layers": 3})


GGUF = [
    ("qwen3", of_qwen3vl),
    ("qwen3moe", of_qwen3vl),
    ("deepseek2", older_deepseek),
    ("deepseek2", fused_experts),
    ("deepseek3", without_gating),
    ("olmo3", with_a_period),
    ("olmo2", with_unit_axes),
    ("gemma3", listed_windows),
    ("gemma3", without_unit_axes),
    ("gemma3", with_unit_axes),
    ("qwen3next", joined_projections),
    ("qwen3next", fused_attention),
    ("qwen3next", fused_experts),
    ("qwen3next", without_unit_axes),
    ("qwen3next", with_unit_axes),
    ("qwen35moe", without_unit_axes),
    ("qwen35moe", with_unit_axes),
    ("qwen35", with_unit_axes),
    ("qwen35", fused_attention),
    ("qwen35moe", fused_experts),
    ("qwen3moe", fused_experts),
    ("glm4moe", fused_experts),
    ("glm4moe", with_unit_axes),
    ("qwen3moe", with_unit_axes),
    ("qwen35", other_norm_name),
    ("qwen35", listed_layers),
]


def assert_golden(checkpoint: Checkpoint, name: str) -> None:
    errors = tiny.golden_errors(
        tiny.logits_of(load_model(checkpoint, NumpyOps()), tiny.golden(name)["ids"][:ROWS]), name
    )
    assert errors.logit < LOGIT[name]
    assert errors.top1 == 1
    assert errors.kl < KL


@pytest.mark.parametrize(("name", "dialect"), SAFETENSORS)
def test_safetensors(name, dialect):
    assert_golden(dialect(tiny.checkpoint(name)), name)


@pytest.mark.parametrize(("name", "dialect"), GGUF)
def test_gguf(name, dialect, tmp_path):
    path = write_gguf(tiny.FOLDER / name, tmp_path / "m.gguf", mtp=name.startswith("qwen35"))
    assert_golden(dialect(open_checkpoint(path)), name)
