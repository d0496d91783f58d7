"""GLM-4.5, GLM-4.6 and GLM-4.7 (`glm4_moe`; GGUF's `glm4moe`): Llama's attention, experts chosen by a sigmoid router.

q, k and v have biases, the largest models norms of each q and k head, and rope turns half of a head's channels. The
first layers have a dense network in place of experts. The multi-token-prediction block is named as GLM-4.7-Flash's.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from common.checkpoint import Checkpoint
from common.config import Keys
from common.errors import BimetalError
from common.models.blocks import (
    Experts,
    RowFn,
    gguf_rope,
    head_shares,
    head_sizes,
    hf_rope,
    sigmoid_moe_weights,
    through,
)
from common.models.glm import MTP as MTP
from common.models.glm import NORM_FIX as NORM_FIX
from common.models.glm import check_mtp as check_mtp
from common.models.glm import dense_first_layout, ffn
from common.models.llama import attention, attention_weights, queries_keys_values
from common.ops import Array, Ops, Rope
from common.shards import ONE, Ranks
from common.step import State, Step
from common.storage import KVSpec, LayerSpec
from common.weights import Layout, Names, Table, Vector


@dataclass(frozen=True)
class Config:
    vocab: int
    hidden: int
    layers: int
    dense_layers: int  # number of first layers with a dense FFN; the other layers have experts
    heads: int
    kv_heads: int
    head_dim: int
    norms_heads: bool  # whether there are norms of q and k
    has_biases: bool  # whether there are biases of q, k and v
    rope: Rope
    ffn: int
    experts: Experts
    eps: float
    context: int
    tied: bool
    window: None = None  # a row attends to all keys
    ranks: Ranks = ONE  # ranks that share heads and channels; the numbers above are this rank's share
    kv_ranks: Ranks = ONE  # ranks that hold different KV heads


# -- configuration -----------------------------------------------------------------------------------------------------


def read_config(checkpoint: Checkpoint) -> Config:
    c = _gguf_config(checkpoint) if checkpoint.format == "gguf" else _hf_config(checkpoint)
    if (turned := 2 * len(c.rope.frequencies)) > c.head_dim:
        raise BimetalError(f"{checkpoint.path}: rope turns {turned} channels of a head of {c.head_dim}")
    return c


def for_rank(c: Config, ranks: Ranks) -> Config:
    """Return the configuration of one rank: its heads, and its channels of each feed-forward network."""
    return replace(
        c,
        **head_shares(c, ranks),
        ffn=ranks.divide(c.ffn, "channels of the feed-forward network"),
        experts=c.experts.for_rank(ranks),
    )


def _hf_config(checkpoint: Checkpoint) -> Config:
    keys = Keys(checkpoint.config, f"{checkpoint.path} config.json")
    keys.expect("hidden_act", "silu")
    for key in ("n_group", "topk_group"):
        keys.expect(key, 1)
    for key in ("norm_topk_prob", "is_causal"):
        keys.expect(key, True)
    layers, ffn = keys.size("num_hidden_layers"), keys.size("moe_intermediate_size")
    sizes = head_sizes(checkpoint, keys, layers)
    share = keys.positive("rope_parameters.partial_rotary_factor", keys.positive("partial_rotary_factor", 0.5))
    return Config(
        vocab=keys.size("vocab_size"),
        **sizes,
        layers=layers,
        dense_layers=_leading(keys, "first_k_dense_replace", keys.read("first_k_dense_replace", int, 1), layers),
        norms_heads=keys.read("use_qk_norm", bool, False),
        has_biases=keys.read("attention_bias", bool, False),
        rope=hf_rope(keys, int(sizes["head_dim"] * share)),
        ffn=keys.size("intermediate_size"),
        experts=Experts(
            keys.size("n_routed_experts"),
            keys.size("num_experts_per_tok"),
            ffn,
            ffn * keys.size("n_shared_experts", 1),
            keys.positive("routed_scaling_factor", 1.0),
        ),
        eps=keys.positive("rms_norm_eps", 1e-5),
        context=keys.size("max_position_embeddings"),
        tied=keys.read("tie_word_embeddings", bool, False) and "lm_head.weight" not in checkpoint.tensors,
    )


def _gguf_config(checkpoint: Checkpoint) -> Config:
    keys = Keys(checkpoint.config, str(checkpoint.path), prefix="glm4moe.", nested=False)
    keys.expect("expert_gating_func", 2)  # sigmoid, also if the key is missing
    keys.expect("expert_weights_norm", True)
    keys.expect("expert_group_count", 1)
    keys.expect("expert_group_used_count", 1)
    layers = keys.size("block_count") - keys.read("nextn_predict_layers", int, 0)
    if layers < 1:
        raise BimetalError(f"{checkpoint.path}: glm4moe.nextn_predict_layers leaves {layers} layers")
    sizes, ffn = head_sizes(checkpoint, keys, layers), keys.size("expert_feed_forward_length")
    table = checkpoint.tensors.get("token_embd.weight")
    dense = keys.read("leading_dense_block_count", int)
    return Config(
        vocab=table.shape[0] if table and table.shape else keys.size("vocab_size"),
        **sizes,
        layers=layers,
        dense_layers=_leading(keys, "leading_dense_block_count", dense, layers),
        norms_heads="blk.0.attn_q_norm.weight" in checkpoint.tensors,
        has_biases="blk.0.attn_q.bias" in checkpoint.tensors,
        rope=gguf_rope(keys, keys.size("rope.dimension_count", sizes["head_dim"]), None),
        ffn=keys.size("feed_forward_length"),
        experts=Experts(
            keys.size("expert_count"),
            keys.size("expert_used_count"),
            ffn,
            ffn * keys.size("expert_shared_count"),
            keys.positive("expert_weights_scale", 1.0),
        ),
        eps=keys.positive("attention.layer_norm_rms_epsilon"),
        context=keys.size("context_length"),
        tied="output.weight" not in checkpoint.tensors,
    )


def _leading(keys: Keys, key: str, dense: int, layers: int) -> int:
    """Check the number of dense layers, which precede the others."""
    if not 0 <= dense <= layers:
        raise BimetalError(f"{keys.where}: {keys.prefix}{key} is {dense}, expected a number from 0 to {layers}")
    return dense


# -- weights -----------------------------------------------------------------------------------------------------------


def layout(c: Config, checkpoint: Checkpoint) -> Layout:
    return dense_first_layout(c, checkpoint, _mixer_weights)


def _mixer_weights(c: Config, tensor: Names) -> Table:
    return {
        "attn_norm": Vector(tensor("input_layernorm.weight", "attn_norm.weight", (c.hidden,))),
        **attention_weights(c, tensor),
        "ffn_norm": Vector(tensor("post_attention_layernorm.weight", "post_attention_norm.weight", (c.hidden,))),
    }


def mtp_weights(c: Config, tensor: Names) -> Table:
    """Return the layer of a multi-token-prediction block."""
    return {**_mixer_weights(c, tensor), **sigmoid_moe_weights(tensor, c.hidden, c.experts, c.ranks)}


# -- the network -------------------------------------------------------------------------------------------------------


def state_spec(c: Config) -> list[LayerSpec]:
    return [mtp_spec(c)] * c.layers


def mtp_spec(c: Config) -> LayerSpec:
    """Return the state of the multi-token-prediction block's mixer: that of every layer."""
    return {"kv": KVSpec(c.kv_heads, c.head_dim, c.head_dim)}


def forward(
    ops: Ops, c: Config, w: Any, state: State, step: Step, rows: slice = slice(None), layers: range | None = None
) -> Array:
    """Return the logits (n, vocab) of `rows` of the step; of some `layers`, what blocks.through returns."""
    return through(block, ops, c, w, state, step, rows, layers)


def block(ops: Ops, c: Config, w: Any, state: State, step: Step, layer: int, rows: slice, x: Array) -> Array:
    return ffn(ops, c, w, layer, mixed(ops, c, w, state, step, layer, x)[rows])


def halves(ops: Ops, c: Config, w: Any, state: State, step: Step, layer: int) -> tuple[RowFn, RowFn]:
    """Return both halves of a layer: functions from x (T, hidden) to x and what the half adds."""
    return partial(mixed, ops, c, w, state, step, layer), partial(ffn, ops, c, w, layer)


def mixed(ops: Ops, c: Config, w: Any, state: State, step: Step, layer: int, x: Array) -> Array:
    """Compute x (T, hidden) plus the output of the layer's attention."""
    y = attention(ops, c, w, state[layer].kv, step, ops.rms_norm(x, w.attn_norm, c.eps))
    return ops.add(x, ops.all_reduce(y))


def write_past(ops: Ops, c: Config, w: Any, state: State, step: Step, layer: int, x: Array) -> None:
    """Write the keys and values of x (T, hidden) to the layer's state, as `mixed` would."""
    _, k, v = queries_keys_values(ops, c, w, step, ops.rms_norm(x, w.attn_norm, c.eps))
    ops.write_kv(k, v, state[layer].kv, step)
