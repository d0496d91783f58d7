"""Laguna (`laguna`): gated attention, with a window in three of four layers, and experts chosen by a sigmoid router.

Layers differ in their number of query heads and in their rope. The gate on attention's output is a softplus, one per
head (XS.2) or one per channel (M.1), by the shape of its matrix.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from common.adapted import linear
from common.checkpoint import Checkpoint
from common.config import Keys
from common.errors import BimetalError
from common.models.blocks import (
    KINDS,
    Experts,
    check_sizes,
    ffn_weights,
    gguf_rope,
    hf_rope,
    sigmoid_moe,
    sigmoid_moe_weights,
    sliding_spec,
    swiglu_ffn,
    through,
    top_weights,
)
from common.ops import Array, Ops, Rope
from common.shards import ONE, Ranks, by_columns, by_rows
from common.step import State, Step
from common.storage import LayerSpec
from common.weights import Layout, Matrix, Names, Table, Vector

EXCEEDS_FLOAT16 = True  # products inside the experts exceed float16's maximum of 65504
# YaRN's factor and original context in XS-2.1, whose GGUF states 1 where its config.json states the derived 1.3466.
XS_2_1 = (32, 8192)


@dataclass(frozen=True)
class Config:
    vocab: int
    hidden: int
    heads: tuple[int, ...]  # query heads per layer
    kv_heads: int
    head_dim: int
    is_sliding: tuple[bool, ...]  # per layer
    window: int  # keys that a row of a sliding layer attends to, including its own
    rope: Rope
    sliding_rope: Rope
    gate_per_channel: bool
    is_sparse: tuple[bool, ...]  # per layer: whether it has experts; the other layers have a dense FFN
    ffn: int
    experts: Experts
    eps: float
    context: int
    tied: bool
    ranks: Ranks = ONE  # ranks that share heads and channels; the numbers above are this rank's share
    kv_ranks: Ranks = ONE  # ranks that hold different KV heads


# -- configuration -----------------------------------------------------------------------------------------------------


def read_config(checkpoint: Checkpoint) -> Config:
    c = _gguf_config(checkpoint) if checkpoint.format == "gguf" else _hf_config(checkpoint)
    if any(heads % c.kv_heads for heads in c.heads):
        raise BimetalError(f"{checkpoint.path}: {c.kv_heads} KV heads do not divide {sorted(set(c.heads))} query heads")
    for rope in (c.rope, c.sliding_rope):
        if 2 * len(rope.frequencies) > c.head_dim:
            raise BimetalError(
                f"{checkpoint.path}: rope turns {2 * len(rope.frequencies)} channels of a head of {c.head_dim}"
            )
    return c


def for_rank(c: Config, ranks: Ranks) -> Config:
    """Return the configuration of one rank: its heads, and its channels of each feed-forward network."""
    kv_ranks = ranks.holding(c.kv_heads, "KV heads")
    return replace(
        c,
        heads=tuple(ranks.divide(heads, "heads") for heads in c.heads),
        kv_heads=c.kv_heads // kv_ranks.size,
        ffn=ranks.divide(c.ffn, "channels of the feed-forward network"),
        experts=c.experts.for_rank(ranks),
        ranks=ranks,
        kv_ranks=kv_ranks,
    )


def _hf_config(checkpoint: Checkpoint) -> Config:
    where = f"{checkpoint.path} config.json"
    keys = Keys(checkpoint.config, where)
    keys.expect("hidden_act", "silu")
    for key in ("attention_bias", "qkv_bias", "moe_apply_router_weight_on_input", "swa_attention_sink_enabled"):
        keys.expect(key, False)
    keys.expect("moe_router_logit_softcapping", 0, 0.0)
    keys.expect("moe_router_score_func", "sigmoid")
    layers, head_dim, kv_heads = keys.size("num_hidden_layers"), keys.size("head_dim"), keys.size("num_key_value_heads")
    check_sizes(checkpoint, layers, kv_heads, kv_heads, kv_heads * head_dim)
    same = [keys.size("num_attention_heads")] * layers
    heads = _heads(
        keys, "num_attention_heads_per_layer", keys.read("num_attention_heads_per_layer", list, same), layers
    )
    kinds = _per_layer(keys, "layer_types", KINDS, ["full_attention"] * layers)
    mlps = _per_layer(keys, "mlp_layer_types", ("dense", "sparse"), ["dense"] + ["sparse"] * (layers - 1))

    def rope(kind: str) -> Rope:
        values = {"rope_parameters": keys.read(f"rope_parameters.{kind}", dict)}
        share = Keys(values, f"{where} {kind}").positive("rope_parameters.partial_rotary_factor", 1.0)
        return hf_rope(Keys(values, f"{where} {kind}"), int(head_dim * share))

    is_sliding = tuple(kind == "sliding_attention" for kind in kinds)
    full = rope("full_attention")
    gate = f"{_prefix(checkpoint)}model.layers.0.self_attn.g_proj.weight"
    return Config(
        vocab=keys.size("vocab_size"),
        hidden=keys.size("hidden_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        is_sliding=is_sliding,
        window=keys.size("sliding_window") if any(is_sliding) else 0,
        rope=full,
        sliding_rope=rope("sliding_attention") if any(is_sliding) else full,
        gate_per_channel=_gate_per_channel(checkpoint, gate, heads[0], head_dim),
        is_sparse=tuple(mlp == "sparse" for mlp in mlps),
        ffn=keys.size("intermediate_size"),
        experts=Experts(
            keys.size("num_experts"),
            keys.size("num_experts_per_tok"),
            keys.size("moe_intermediate_size"),
            keys.size("shared_expert_intermediate_size"),
            keys.positive("moe_routed_scaling_factor", 1.0),
        ),
        eps=keys.positive("rms_norm_eps", 1e-6),
        context=keys.size("max_position_embeddings"),
        tied=keys.read("tie_word_embeddings", bool, False)
        and not any(name.endswith("lm_head.weight") for name in checkpoint.tensors),
    )


def _gguf_config(checkpoint: Checkpoint) -> Config:
    keys = Keys(checkpoint.config, str(checkpoint.path), prefix="laguna.", nested=False)
    if keys.get("attention.gating_type") is not None:
        raise BimetalError(
            f"{checkpoint.path} names its keys as Ollama does; supported: files of llama.cpp's converter"
        )
    keys.expect("expert_gating_func", 2)  # sigmoid, also if the key is missing
    keys.expect("expert_weights_norm", True)
    keys.expect("expert_shared_count", 1)
    layers, head_dim = keys.size("block_count"), keys.size("attention.key_length")
    kv_heads = keys.size("attention.head_count_kv")
    keys.expect("attention.value_length", head_dim)
    check_sizes(checkpoint, layers, kv_heads, kv_heads, kv_heads * head_dim)
    listed = keys.get("attention.head_count")
    same = [] if isinstance(listed, list) else [keys.size("attention.head_count")] * layers
    heads = _heads(keys, "attention.head_count", same or listed, layers)
    window = keys.size("attention.sliding_window") if keys.get("attention.sliding_window") else 0  # none in M.1
    is_sliding = _gguf_sliding(keys, layers, window)
    dense = keys.read("leading_dense_block_count", int)
    table = checkpoint.tensors.get("token_embd.weight")
    rope, sliding_rope = _gguf_ropes(keys, head_dim, any(is_sliding))
    return Config(
        vocab=table.shape[0] if table else keys.size("vocab_size"),
        hidden=keys.size("embedding_length"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        is_sliding=is_sliding,
        window=window,
        rope=rope,
        sliding_rope=sliding_rope,
        gate_per_channel=_gate_per_channel(checkpoint, "blk.0.attn_gate.weight", heads[0], head_dim),
        is_sparse=tuple(i >= dense for i in range(layers)),
        ffn=keys.size("feed_forward_length"),
        experts=Experts(
            keys.size("expert_count"),
            keys.size("expert_used_count"),
            keys.size("expert_feed_forward_length"),
            keys.size("expert_shared_feed_forward_length"),
            keys.positive("expert_weights_scale"),
        ),
        eps=keys.positive("attention.layer_norm_rms_epsilon"),
        context=keys.size("context_length"),
        tied="output.weight" not in checkpoint.tensors,
    )


def _gguf_sliding(keys: Keys, layers: int, window: int) -> tuple[bool, ...]:
    """Return for each layer whether it has a window, from a list or from a period, whose first layer is full."""
    pattern = keys.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        period = keys.size("attention.sliding_window_pattern", 4)
        pattern = [i % period > 0 for i in range(layers)]
    if len(pattern) < layers:
        raise BimetalError(f"{keys.where}: laguna.attention.sliding_window_pattern does not cover {layers} layers")
    return tuple(window > 0 and bool(slides) for slides in pattern[:layers])


def _gguf_ropes(keys: Keys, head_dim: int, slides: bool) -> tuple[Rope, Rope]:
    """Return the ropes of full layers and of layers with windows; both are equal if no layer `slides`."""
    stated = keys.get("rope.scaling.yarn_attn_factor")
    factor = None if stated is None else keys.positive("rope.scaling.yarn_attn_factor")
    release = keys.get("rope.scaling.factor"), keys.get("rope.scaling.original_context_length")
    if factor == 1 and release == XS_2_1:
        factor = None
    derived = {key: value for key, value in keys.values.items() if not key.endswith(".yarn_attn_factor")}
    rope = gguf_rope(Keys(derived, keys.where, "laguna.", nested=False), keys.size("rope.dimension_count"), None)
    rope = rope if factor is None else replace(rope, magnitude=factor)
    if not slides:
        return rope, rope
    plain = {"laguna.rope.freq_base": keys.positive("rope.freq_base_swa", 10000.0)}
    dim = keys.size("rope.dimension_count_swa", head_dim)
    return rope, gguf_rope(Keys(plain, keys.where, "laguna.", nested=False), dim, None)


def _heads(keys: Keys, key: str, heads: list[Any], layers: int) -> tuple[int, ...]:
    if len(heads) != layers or not all(type(h) is int and 0 < h < 2**31 for h in heads):
        raise BimetalError(f"{keys.where}: {keys.prefix}{key} must list the query heads of {layers} layers")
    return tuple(heads)


def _per_layer(keys: Keys, key: str, names: tuple[str, ...], default: list[str]) -> list[str]:
    values = keys.read(key, list, default)
    if len(values) != len(default) or any(value not in names for value in values):
        raise BimetalError(f"{keys.where}: {key} must name {' or '.join(names)} for {len(default)} layers")
    return values


def _gate_per_channel(checkpoint: Checkpoint, name: str, heads: int, head_dim: int) -> bool:
    """Test by the shape of the gate's matrix whether it is per channel: `gating` is true for both kinds."""
    gate = checkpoint.tensors.get(name)
    if gate is None:
        raise BimetalError(f"{checkpoint.path} lacks tensor {name}, whose shape tells the kind of attention gate")
    if gate.shape[0] not in (heads, heads * head_dim):
        raise BimetalError(f"{name}: {gate.shape[0]} rows, expected {heads} (per head) or {heads * head_dim}")
    return gate.shape[0] == heads * head_dim


# -- weights -----------------------------------------------------------------------------------------------------------


def layout(c: Config, checkpoint: Checkpoint) -> Layout:
    dialect, prefix = ("gguf", "") if checkpoint.format == "gguf" else ("hf", _prefix(checkpoint))
    tensor = Names(dialect, prefix, checkpoint.tensors)
    top = top_weights(c, tensor)
    layers = []
    for i, heads in enumerate(c.heads):
        tensor = Names(dialect, f"blk.{i}." if dialect == "gguf" else f"{prefix}model.layers.{i}.", checkpoint.tensors)
        weights = partial(sigmoid_moe_weights, e=c.experts) if c.is_sparse[i] else partial(ffn_weights, ffn=c.ffn)
        layers.append({**_attention_weights(c, tensor, heads), **weights(tensor, c.hidden, ranks=c.ranks)})
    return Layout(top, layers, lambda name: None)


def _prefix(checkpoint: Checkpoint) -> str:
    """Return the prefix of all tensor names: "" except in repacked checkpoints."""
    wrapped = "language_model.model.embed_tokens.weight" in checkpoint.tensors
    return "language_model." if wrapped else ""


def _attention_weights(c: Config, tensor: Names, heads: int) -> Table:
    K, D = c.kv_heads, c.head_dim
    gates = heads * D if c.gate_per_channel else heads
    q_rows, kv_rows, gate_rows = c.ranks.segment(heads * D), c.kv_ranks.segment(K * D), c.ranks.segment(gates)
    return {
        "attn_norm": Vector(tensor("input_layernorm.weight", "attn_norm.weight", (c.hidden,))),
        "qkgv": Matrix(  # values last, often of a wider type: adjacent matrices of one type are one product
            tensor("self_attn.q_proj.weight", "attn_q.weight", (heads * D, c.hidden), shard=by_rows(q_rows)),
            tensor("self_attn.k_proj.weight", "attn_k.weight", (K * D, c.hidden), shard=by_rows(kv_rows)),
            tensor("self_attn.g_proj.weight", "attn_gate.weight", (gates, c.hidden), shard=by_rows(gate_rows)),
            tensor("self_attn.v_proj.weight", "attn_v.weight", (K * D, c.hidden), shard=by_rows(kv_rows)),
        ),
        "o": Matrix(
            tensor("self_attn.o_proj.weight", "attn_output.weight", (c.hidden, heads * D), shard=by_columns(q_rows))
        ),
        "q_norm": Vector(tensor("self_attn.q_norm.weight", "attn_q_norm.weight", (D,))),
        "k_norm": Vector(tensor("self_attn.k_norm.weight", "attn_k_norm.weight", (D,))),
        "ffn_norm": Vector(tensor("post_attention_layernorm.weight", "ffn_norm.weight", (c.hidden,))),
    }


# -- the network -------------------------------------------------------------------------------------------------------


def state_spec(c: Config) -> list[LayerSpec]:
    return sliding_spec(c)


def forward(
    ops: Ops, c: Config, w: Any, state: State, step: Step, rows: slice = slice(None), layers: range | None = None
) -> Array:
    """Return the logits (n, vocab) of `rows` of the step; of some `layers`, what blocks.through returns."""
    return through(block, ops, c, w, state, step, rows, layers)


def block(ops: Ops, c: Config, w: Any, state: State, step: Step, layer: int, rows: slice, x: Array) -> Array:
    mixed = attention(ops, c, w, state[layer].kv, step, layer, ops.rms_norm(x, w.attn_norm, c.eps))
    x = ops.add(x, ops.all_reduce(mixed))[rows]
    z = ops.rms_norm(x, w.ffn_norm, c.eps)
    ffn = sigmoid_moe(ops, c.experts, w, z) if c.is_sparse[layer] else swiglu_ffn(ops, w, z)
    return ops.add(x, ops.all_reduce(ffn))


def attention(ops: Ops, c: Config, w: Any, kv: Any, step: Step, layer: int, x: Array) -> Array:
    """Compute grouped-query attention with a softplus gate on its output, for this rank's heads of x: (T, hidden)."""
    T, H, K, D = x.shape[0], c.heads[layer], c.kv_heads, c.head_dim
    rope, window = (c.sliding_rope, c.window) if c.is_sliding[layer] else (c.rope, None)
    qkgv = linear(ops, x, w.qkgv)
    q = ops.norm_rope(qkgv[:, : H * D].reshape(T, H, D), w.q_norm, step.positions, rope, c.eps)
    k = ops.norm_rope(qkgv[:, H * D : (H + K) * D].reshape(T, K, D), w.k_norm, step.positions, rope, c.eps)
    gate = qkgv[:, (H + K) * D : -K * D].reshape(T, H, D if c.gate_per_channel else 1)
    v = qkgv[:, -K * D :].reshape(T, K, D)
    o = ops.attention(q, k, v, kv, step, scale=D**-0.5, window=window)
    return linear(ops, ops.mul_softplus(o, gate).reshape(T, H * D), w.o)
