"""Qwen3-Next (`qwen3next`), Qwen3.5 and Qwen3.6 (`qwen35`, `qwen35moe`): three Gated DeltaNet layers, one of attention.

Conventions inside: value heads are in the order of GGUF files, because a 256-wide quantization block cannot be split to
reorder 128-wide heads: tiled over key heads (head h uses key head h % Hk), for Qwen3-Next grouped (h // (Hv / Hk)).
Norm weights are multiplied as they stand.
"""

from functools import partial
from typing import Any

import numpy as np

from common.adapted import linear
from common.checkpoint import Checkpoint
from common.errors import BimetalError
from common.models.blocks import (
    MtpNames,
    RowFn,
    ffn_weights,
    routed_weights,
    shared_weights,
    swiglu_ffn,
    through,
    top_weights,
)
from common.models.qwen3_next import delta_weights as grouped_delta_weights
from common.models.qwen35_config import Config
from common.models.qwen35_config import for_rank as for_rank
from common.models.qwen35_config import read_config as read_config
from common.ops import Array, DeltaInputs, DeltaWeights, ExpertWeights, GateWeights, Ops
from common.shards import Segment, by_columns, by_rows
from common.step import State, Step
from common.storage import ConvSpec, DeltaSpec, KVSpec, LayerSpec
from common.weights import Fix, Layout, Matrix, Names, Stored, Table, Vector, column_groups, mapped, rows

NORM_FIX = {"hf": mapped(lambda w: w + 1)}  # stored around 0 as trained, around 1 in converted files
MTP = MtpNames(
    layer="layers.0.",
    fc="fc.weight",
    embedding_norm="pre_fc_norm_embedding.weight",
    hidden_norm="pre_fc_norm_hidden.weight",
    norm="norm.weight",
    embed="embed_tokens.weight",
    head="lm_head.weight",
    prefixes=("mtp.", "model.mtp.", "language_model.mtp."),
    is_alone=True,
)


# -- weights -----------------------------------------------------------------------------------------------------------


def layout(c: Config, checkpoint: Checkpoint) -> Layout:
    dialect, prefix = _dialect(checkpoint)
    top_at = Names(dialect, prefix, checkpoint.tensors)
    head_at = Names(dialect, "language_model." if prefix.startswith("language_model.") else "", checkpoint.tensors)
    top = top_weights(c, top_at, "", head_at, NORM_FIX)
    layers = []
    for i, is_attention in enumerate(c.is_attention):
        tensor = Names(dialect, f"blk.{i}." if dialect == "gguf" else f"{prefix}layers.{i}.", checkpoint.tensors)
        layers.append(_layer_weights(c, tensor, is_attention))
    return Layout(top, layers, partial(_ignored, dialect, len(c.is_attention)))


def _layer_weights(c: Config, tensor: Names, is_attention: bool) -> Table:
    post_norm = (
        "ffn_norm.weight" if tensor.has("ffn_norm.weight") else "post_attention_norm.weight"
    )  # two writers' names
    return {
        "mixer_norm": Vector(tensor("input_layernorm.weight", "attn_norm.weight", (c.hidden,), NORM_FIX)),
        **(_attention_weights if is_attention else grouped_delta_weights if c.grouped else _delta_weights)(c, tensor),
        "ffn_norm": Vector(tensor("post_attention_layernorm.weight", post_norm, (c.hidden,), NORM_FIX)),
        **(_moe_weights(c, tensor) if c.experts else ffn_weights(tensor, c.hidden, c.ffn, c.ranks)),
    }


def _dialect(checkpoint: Checkpoint) -> tuple[str, str]:
    """Return the dialect and the prefix of its model-level names.

    mlx-lm stores conv1d as (channels, taps, 1); in such files it has also added 1 to the norm weights.
    """
    if checkpoint.format == "gguf":
        return "gguf", ""
    for prefix in ("model.language_model.", "language_model.model.", "model."):
        if prefix + "embed_tokens.weight" in checkpoint.tensors:
            conv = next((t for n, t in checkpoint.tensors.items() if n.endswith("conv1d.weight")), None)
            return ("mlx" if conv is not None and conv.shape[-1:] == (1,) else "hf"), prefix
    raise BimetalError(
        f"{checkpoint.path} lacks embed_tokens.weight under model., model.language_model. or language_model.model."
    )


def _attention_weights(c: Config, tensor: Names) -> Table:
    H, K, D = c.heads, c.kv_heads, c.head_dim
    q, kv = c.ranks.segment(2 * H * D), c.kv_ranks.segment(K * D)  # per head: D rows of q, then D of the gate
    parts: tuple[Stored, ...] = (
        tensor("self_attn.q_proj.weight", "attn_q.weight", (2 * H * D, c.hidden), shard=by_rows(q)),
        tensor("self_attn.k_proj.weight", "attn_k.weight", (K * D, c.hidden), shard=by_rows(kv)),
        tensor("self_attn.v_proj.weight", "attn_v.weight", (K * D, c.hidden), shard=by_rows(kv)),
    )
    if tensor.dialect == "gguf" and tensor.has("attn_qkv.weight"):  # some writers fuse the three
        parts = (tensor("", "attn_qkv.weight", ((2 * H + 2 * K) * D, c.hidden), shard=by_rows(q, kv, kv)),)
    of_heads = by_columns(c.ranks.segment(H * D))
    return {
        "qkv": Matrix(*parts),
        "o": Matrix(tensor("self_attn.o_proj.weight", "attn_output.weight", (c.hidden, H * D), shard=of_heads)),
        "q_norm": Vector(tensor("self_attn.q_norm.weight", "attn_q_norm.weight", (D,), NORM_FIX)),
        "k_norm": Vector(tensor("self_attn.k_norm.weight", "attn_k_norm.weight", (D,), NORM_FIX)),
    }


def _delta_weights(c: Config, tensor: Names) -> Table:
    keys, values = c.key_heads * c.key_dim, c.value_heads * c.value_dim
    channels = 2 * keys + values
    repeats = c.value_heads // c.key_heads
    tiled = np.arange(c.value_heads).reshape(c.key_heads, repeats).T.ravel()  # head r * Hk + g is stored g * R + r
    value_rows = (tiled[:, None] * c.value_dim + np.arange(c.value_dim)).ravel()
    qkv_rows = np.concatenate([np.arange(2 * keys), 2 * keys + value_rows])

    def of_values(width: int) -> list[Segment]:
        """Select this rank's value heads, `width` rows each, in the file's order: grouped by key head, or tiled."""
        if tensor.dialect == "gguf":
            return [c.ranks.segment(c.key_heads * width)] * repeats
        return [c.ranks.segment(c.value_heads * width)]

    def grouped(fix: Fix) -> dict[str, Fix]:
        """Apply `fix` to files in which head g * R + r uses key head g: files as trained, and mlx-lm's."""
        return {"hf": fix, "mlx": fix}

    decay = mapped(lambda A_log: -np.exp(A_log[tiled]))
    taps = {  # a depthwise convolution's weight has an axis of length 1
        "hf": mapped(lambda conv: conv.squeeze(1)[qkv_rows]),
        "mlx": mapped(lambda conv: conv.squeeze(2)[qkv_rows]),
    }
    qkv_shard = by_rows(c.ranks.segment(keys), c.ranks.segment(keys), *of_values(c.value_dim))
    value_shard, head_shard = by_rows(*of_values(c.value_dim)), by_rows(*of_values(1))
    by_value, by_head = grouped(rows(value_rows)), grouped(rows(tiled))
    heads, H = (c.value_heads,), (c.value_heads, c.hidden)
    return {
        "qkvzba": Matrix(
            tensor(
                "linear_attn.in_proj_qkv.weight",
                "attn_qkv.weight",
                (channels, c.hidden),
                grouped(rows(qkv_rows)),
                shard=qkv_shard,
            ),
            tensor("linear_attn.in_proj_z.weight", "attn_gate.weight", (values, c.hidden), by_value, shard=value_shard),
            tensor("linear_attn.in_proj_b.weight", "ssm_beta.weight", H, by_head, shard=head_shard),
            tensor("linear_attn.in_proj_a.weight", "ssm_alpha.weight", H, by_head, shard=head_shard),
        ),
        "taps": Vector(
            tensor("linear_attn.conv1d.weight", "ssm_conv1d.weight", (channels, c.taps), taps, shard=qkv_shard)
        ),
        "decay": Vector(tensor("linear_attn.A_log", "ssm_a", heads, grouped(decay), shard=head_shard)),
        "dt_bias": Vector(tensor("linear_attn.dt_bias", "ssm_dt.bias", heads, by_head, shard=head_shard)),
        "delta_norm": Vector(tensor("linear_attn.norm.weight", "ssm_norm.weight", (c.value_dim,))),  # never around 0
        "out": Matrix(
            tensor(
                "linear_attn.out_proj.weight",
                "ssm_out.weight",
                (c.hidden, values),
                grouped(column_groups(tiled, c.value_dim)),
                shard=by_columns(*of_values(c.value_dim)),
            )
        ),
    }


def mtp_weights(c: Config, tensor: Names) -> Table:
    """Return the layer of a multi-token-prediction block: one that attends."""
    return _layer_weights(c, tensor, is_attention=True)


def check_mtp(checkpoint: Checkpoint) -> None:
    """Refuse a block in MLX's layout: mlx-lm drops it, and other writers do not agree on how norms are stored."""
    names = [name for name, tensor in checkpoint.tensors.items() if tensor.scales is not None]
    names += [n for n, t in checkpoint.tensors.items() if n.endswith("conv1d.weight") and t.shape[-1:] == (1,)]
    if names:
        raise BimetalError(
            f"{checkpoint.path} has a multi-token-prediction block in MLX's layout; supported: GGUF, and safetensors "
            "as trained"
        )


def _moe_weights(c: Config, tensor: Names) -> Table:
    assert c.experts
    return {
        **routed_weights(tensor, c.hidden, c.experts, c.ranks),
        **shared_weights(tensor, c.hidden, c.experts.shared_ffn, c.ranks),
        "shared_gate": Matrix(tensor("mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight", (1, c.hidden))),
    }


def _ignored(dialect: str, layers: int, name: str) -> str | None:
    if dialect == "gguf":
        block = name.split(".")[1] if name.startswith("blk.") else ""
        return "multi-token-prediction block, run with draft mtp" if block.isdigit() and int(block) >= layers else None
    if name.startswith(("mtp.", "model.mtp.", "language_model.mtp.")):
        return "multi-token-prediction block, run with draft mtp"
    if name.startswith(("model.visual.", "visual.", "vision_tower.")):
        return "vision tower, not run"
    return None


# -- the network -------------------------------------------------------------------------------------------------------


def state_spec(c: Config) -> list[LayerSpec]:
    attention = mtp_spec(c)
    delta: LayerSpec = {
        "conv": ConvSpec(2 * c.key_heads * c.key_dim + c.value_heads * c.value_dim, c.taps),
        "delta": DeltaSpec(c.key_heads, c.value_heads, c.key_dim, c.value_dim, c.grouped),
    }
    return [attention if is_attention else delta for is_attention in c.is_attention]


def mtp_spec(c: Config) -> LayerSpec:
    """Return the state of the multi-token-prediction block's mixer: an attention layer's keys and values."""
    return {"kv": KVSpec(c.kv_heads, c.head_dim, c.head_dim)}


def forward(
    ops: Ops, c: Config, w: Any, state: State, step: Step, rows: slice = slice(None), layers: range | None = None
) -> Array:
    """Return the logits (n, vocab) of `rows` of the step; of some `layers`, what blocks.through returns."""
    return through(block, ops, c, w, state, step, rows, layers)


def halves(ops: Ops, c: Config, w: Any, state: State, step: Step, layer: int) -> tuple[RowFn, RowFn]:
    """Return both halves of a layer: functions from x (T, hidden) to x and what the half adds."""
    return partial(mixed, ops, c, w, state, step, layer), partial(ffn, ops, c, w)


def block(ops: Ops, c: Config, w: Any, state: State, step: Step, layer: int, rows: slice, x: Array) -> Array:
    return ffn(ops, c, w, mixed(ops, c, w, state, step, layer, x)[rows])


def mixed(ops: Ops, c: Config, w: Any, state: State, step: Step, layer: int, x: Array) -> Array:
    """Add to x (T, hidden) what the layer's mixer computes; a layer after the model's own attends."""
    is_attention = layer >= len(c.is_attention) or c.is_attention[layer]
    mixer = attention if is_attention else gated_deltanet
    y = mixer(ops, c, w, state[layer], step, ops.rms_norm(x, w.mixer_norm, c.eps))
    return ops.add(x, ops.all_reduce(y))


def ffn(ops: Ops, c: Config, w: Any, x: Array) -> Array:
    """Compute x (T, hidden) plus the output of the layer's feed-forward network."""
    y = (moe_ffn if c.experts else dense_ffn)(ops, c, w, ops.rms_norm(x, w.ffn_norm, c.eps))
    return ops.add(x, ops.all_reduce(y))


def attention(ops: Ops, c: Config, w: Any, state: Any, step: Step, x: Array) -> Array:
    """Compute grouped-query attention with a sigmoid gate on its output, for this rank's heads of x: (T, hidden)."""
    T, H, D = x.shape[0], c.heads, c.head_dim
    qkv = linear(ops, x, w.qkv)
    q_gate = qkv[:, : 2 * H * D].reshape(T, H, 2 * D)
    q, gate = q_gate[..., :D], q_gate[..., D:]
    q = ops.norm_rope(q, w.q_norm, step.positions, c.rope, c.eps)
    o = ops.attention(q, *_keys_values(ops, c, w, step, qkv), state.kv, step, scale=D**-0.5)
    return linear(ops, ops.mul_sigmoid(o, gate).reshape(T, H * D), w.o)


def write_past(ops: Ops, c: Config, w: Any, state: State, step: Step, layer: int, x: Array) -> None:
    """Write the keys and values of x (T, hidden) to an attention layer's state, as `mixed` would."""
    qkv = linear(ops, ops.rms_norm(x, w.mixer_norm, c.eps), w.qkv)
    ops.write_kv(*_keys_values(ops, c, w, step, qkv), state[layer].kv, step)


def _keys_values(ops: Ops, c: Config, w: Any, step: Step, qkv: Array) -> tuple[Array, Array]:
    T, H, K, D = qkv.shape[0], c.heads, c.kv_heads, c.head_dim
    k = qkv[:, 2 * H * D : (2 * H + K) * D].reshape(T, K, D)
    v = qkv[:, (2 * H + K) * D :].reshape(T, K, D)
    return ops.norm_rope(k, w.k_norm, step.positions, c.rope, c.eps), v


def gated_deltanet(ops: Ops, c: Config, w: Any, state: Any, step: Step, x: Array) -> Array:
    """Compute short convolution, delta rule and gated norm for this rank's heads of x (T, hidden): (T, hidden)."""
    T, Hv, Dv = x.shape[0], c.value_heads, c.value_dim
    values = Hv * Dv
    y = linear(ops, x, w.qkvzba)
    channels = 2 * c.key_heads * c.key_dim + values
    qkv, z = y[:, :channels], y[:, channels : channels + values].reshape(T, Hv, Dv)
    b, a = y[:, channels + values : channels + values + Hv], y[:, channels + values + Hv :]
    weights = DeltaWeights(w.taps, GateWeights(w.decay, w.dt_bias), w.delta_norm, c.eps)
    o = ops.delta_mixer(DeltaInputs(qkv, z, a, b), weights, c.key_heads, state.conv, state.delta, step)
    return linear(ops, o.reshape(T, values), w.out)


def dense_ffn(ops: Ops, c: Config, w: Any, x: Array) -> Array:
    return swiglu_ffn(ops, w, x)


def moe_ffn(ops: Ops, c: Config, w: Any, x: Array) -> Array:
    """Return the best experts of each row, plus one shared expert with a sigmoid gate."""
    assert c.experts
    experts = ExpertWeights(w.router, w.experts_gate_up, w.experts_down, w.gate_up, w.down, w.shared_gate)
    return ops.moe_ffn(x, experts, c.experts.top_k)
