"""gpt-oss-20b and -120b (`gpt_oss`; GGUF's `gpt-oss`): sink logits in attention, experts with biases, MXFP4 weights.

Layers with a window alternate with full ones. In each head a learned logit joins the denominator of the softmax. All
projections, the router and the experts have biases, and the experts' SwiGLU is clamped. Published safetensors store
experts in MXFP4, gate and up rows alternately; other folders store them as floats, transposed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from common.adapted import linear
from common.checkpoint import Checkpoint
from common.config import Keys
from common.models.blocks import (
    Experts,
    gguf_rope,
    gguf_sliding,
    head_shares,
    head_sizes,
    hf_rope,
    hf_sliding,
    sliding_spec,
    through,
    top_weights,
)
from common.models.llama import attention_weights, queries_keys_values
from common.ops import Array, ExpertBiases, ExpertWeights, Ops, Rope
from common.shards import ONE, Ranks, by_columns, by_expert_rows, by_rows
from common.step import State, Step
from common.storage import LayerSpec
from common.tensors import Tensor
from common.weights import ExpertMatrix, Fix, Layout, Matrix, Names, Stored, Table, Vector, composed, exchanged, mapped

EXCEEDS_FLOAT16 = True

PATTERN = 2  # layers of a period: all but its last have windows
LIMIT = 7.0  # of gates and ups, which GGUF files do not state
SOFTMAX_OF_CHOSEN = 3  # expert_gating_func


@dataclass(frozen=True)
class Config:
    vocab: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    is_sliding: tuple[bool, ...]  # of each layer
    window: int  # keys that a row of a sliding layer attends to, including its own
    rope: Rope
    experts: Experts
    limit: float  # of gates and ups: ops.ExpertBiases
    eps: float
    context: int
    tied: bool
    has_biases: bool = True
    norms_heads: bool = False
    ranks: Ranks = ONE  # ranks that share heads and channels; the numbers above are this rank's share
    kv_ranks: Ranks = ONE  # ranks that hold different KV heads


# -- configuration -----------------------------------------------------------------------------------------------------


def read_config(checkpoint: Checkpoint) -> Config:
    return _gguf_config(checkpoint) if checkpoint.format == "gguf" else _hf_config(checkpoint)


def for_rank(c: Config, ranks: Ranks) -> Config:
    """Return the configuration of one rank: its heads, and its channels of each expert."""
    return replace(c, **head_shares(c, ranks), experts=c.experts.for_rank(ranks))


def _hf_config(checkpoint: Checkpoint) -> Config:
    keys = Keys(checkpoint.config, f"{checkpoint.path} config.json")
    keys.expect("hidden_act", "silu")
    keys.expect("attention_bias", True)
    keys.expect("swiglu_alpha", 1.702)
    layers = keys.size("num_hidden_layers")
    sizes = head_sizes(checkpoint, keys, layers)
    is_sliding = hf_sliding(keys, layers, PATTERN)
    return Config(
        vocab=keys.size("vocab_size"),
        **sizes,
        is_sliding=is_sliding,
        window=keys.size("sliding_window", 128) if any(is_sliding) else 0,
        rope=hf_rope(keys, sizes["head_dim"], 150000.0),
        experts=Experts(
            keys.size("num_local_experts"), keys.size("num_experts_per_tok"), keys.size("intermediate_size")
        ),
        limit=keys.positive("swiglu_limit", LIMIT),
        eps=keys.positive("rms_norm_eps", 1e-5),
        context=keys.size("max_position_embeddings"),
        tied=keys.read("tie_word_embeddings", bool, False) and "lm_head.weight" not in checkpoint.tensors,
    )


def _gguf_config(checkpoint: Checkpoint) -> Config:
    """Read a GGUF file's keys. llama.cpp begins and ends YaRN's ramp at whole pairs; the model was trained without."""
    keys = Keys(checkpoint.config, str(checkpoint.path), prefix="gpt-oss.", nested=False)
    keys.expect("expert_gating_func", SOFTMAX_OF_CHOSEN)
    keys.expect("expert_shared_count", 0)
    keys.expect("leading_dense_block_count", 0)
    layers = keys.size("block_count")
    sizes = head_sizes(checkpoint, keys, layers)
    window = keys.size("attention.sliding_window") if keys.get("attention.sliding_window") else 0
    table = checkpoint.tensors.get("token_embd.weight")
    return Config(
        vocab=table.shape[0] if table and table.shape else keys.size("vocab_size"),
        **sizes,
        is_sliding=gguf_sliding(keys, layers, window, PATTERN),
        window=window,
        rope=gguf_rope(keys, sizes["head_dim"], None, truncates=False),
        experts=Experts(
            keys.size("expert_count"), keys.size("expert_used_count"), keys.size("expert_feed_forward_length")
        ),
        limit=LIMIT,
        eps=keys.positive("attention.layer_norm_rms_epsilon"),
        context=keys.size("context_length"),
        tied="output.weight" not in checkpoint.tensors,
    )


# -- weights -----------------------------------------------------------------------------------------------------------


def layout(c: Config, checkpoint: Checkpoint) -> Layout:
    dialect = "gguf" if checkpoint.format == "gguf" else "hf"
    tensor = Names(dialect, "", checkpoint.tensors)
    top = top_weights(c, tensor)
    prefix = "blk.{}." if dialect == "gguf" else "model.layers.{}."
    names = [Names(dialect, prefix.format(i), checkpoint.tensors) for i in range(len(c.is_sliding))]
    return Layout(top, [_layer_weights(c, tensor) for tensor in names], lambda name: None)


def _layer_weights(c: Config, tensor: Names) -> Table:
    heads = c.ranks.segment(c.heads)
    return {
        "attn_norm": Vector(tensor("input_layernorm.weight", "attn_norm.weight", (c.hidden,))),
        **attention_weights(c, tensor),
        "o_bias": Vector(tensor("self_attn.o_proj.bias", "attn_output.bias", (c.hidden,))),
        "sink_logits": Vector(tensor("self_attn.sinks", "attn_sinks.weight", (c.heads,), shard=by_rows(heads))),
        "ffn_norm": Vector(tensor("post_attention_layernorm.weight", "post_attention_norm.weight", (c.hidden,))),
        "router": Matrix(tensor("mlp.router.weight", "ffn_gate_inp.weight", (c.experts.count, c.hidden))),
        "router_bias": Vector(tensor("mlp.router.bias", "ffn_gate_inp.bias", (c.experts.count,))),
        **(
            _separate_experts(c, tensor)
            if tensor.dialect == "gguf" or tensor.has("mlp.experts.gate_proj.weight")
            else _joined_experts(c, tensor)
        ),
    }


def _separate_experts(c: Config, tensor: Names) -> Table:
    """List gates, ups and downs of experts as mlx-lm and llama.cpp name them: a stack each, and its biases."""
    E, F, channels = c.experts.count, c.experts.ffn, c.ranks.segment(c.experts.ffn)

    def stored(part: str, kind: str, shape: tuple[int, ...], **more: Any) -> Stored:
        return tensor(f"mlp.experts.{part}_proj.{kind}", f"ffn_{part}_exps.{kind}", shape, **more)

    rows, columns = by_expert_rows(channels), by_columns(channels)
    fix = _shared_among(c.ranks)
    return {
        "experts_gate_up": ExpertMatrix(
            stored("gate", "weight", (E, F, c.hidden), shard=rows), stored("up", "weight", (E, F, c.hidden), shard=rows)
        ),
        "experts_down": ExpertMatrix(stored("down", "weight", (E, c.hidden, F), shard=columns)),
        "gate_bias": Vector(stored("gate", "bias", (E, F), shard=columns)),
        "up_bias": Vector(stored("up", "bias", (E, F), shard=columns)),
        "down_bias": Vector(stored("down", "bias", (E, c.hidden), fix=fix and {"hf": fix, "gguf": fix})),
    }


def _joined_experts(c: Config, tensor: Names) -> Table:
    """List experts as published: gates and ups are alternating rows of MXFP4, or columns of floats; so are biases."""
    E, F, both = c.experts.count, c.experts.ffn, c.ranks.segment(2 * c.experts.ffn)
    name = tensor.prefix + "mlp.experts."
    found = tensor.tensors.get(name + "gate_up_proj")
    of_floats = found is not None and found.scales is None
    whole = (E, c.hidden, 2 * F) if of_floats else (E, 2 * F, c.hidden)

    def half(first: int) -> Stored:
        fix = composed(exchanged, _every_second(first)) if of_floats else _every_second(first)
        shard = by_columns(both) if of_floats else by_expert_rows(both)
        return Stored((name + "gate_up_proj",), (E, F, c.hidden), fix, whole, shard)

    def half_bias(first: int) -> Vector:
        fix = mapped(lambda biases: biases[:, first::2])
        return Vector(Stored((name + "gate_up_proj_bias",), (E, F), fix, (E, 2 * F), by_columns(both)))

    channels = c.ranks.segment(F)
    down = (
        Stored((name + "down_proj",), (E, c.hidden, F), exchanged, (E, F, c.hidden), by_expert_rows(channels))
        if of_floats
        else Stored((name + "down_proj",), (E, c.hidden, F), shard=by_columns(channels))
    )
    return {
        "experts_gate_up": ExpertMatrix(half(0), half(1)),
        "experts_down": ExpertMatrix(down),
        "gate_bias": half_bias(0),
        "up_bias": half_bias(1),
        "down_bias": Vector(Stored((name + "down_proj_bias",), (E, c.hidden), _shared_among(c.ranks))),
    }


def _shared_among(ranks: Ranks) -> Fix | None:
    """Return the fix that gives each rank an equal part of what is added once for all of them; None for one rank."""
    return None if ranks.size == 1 else mapped(lambda values: values / np.float32(ranks.size))


def _every_second(first: int) -> Callable[[Tensor], Tensor]:
    """Take every second row of each matrix of a stack, from `first` on; any type."""

    def take(tensor: Tensor) -> Tensor:
        return replace(
            tensor,
            shape=(tensor.shape[0], tensor.shape[1] // 2, tensor.shape[2]),
            data=tensor.data[:, first::2],
            scales=tensor.scales and take(tensor.scales),
            biases=tensor.biases and take(tensor.biases),
        )

    return take


# -- the network -------------------------------------------------------------------------------------------------------


def state_spec(c: Config) -> list[LayerSpec]:
    return sliding_spec(c)


def forward(
    ops: Ops, c: Config, w: Any, state: State, step: Step, rows: slice = slice(None), layers: range | None = None
) -> Array:
    """Return the logits (n, vocab) of `rows` of the step; of some `layers`, what blocks.through returns."""
    return through(block, ops, c, w, state, step, rows, layers)


def block(ops: Ops, c: Config, w: Any, state: State, step: Step, layer: int, rows: slice, x: Array) -> Array:
    z = ops.rms_norm(x, w.attn_norm, c.eps)
    mixed = ops.all_reduce(attention(ops, c, w, state[layer].kv, step, layer, z))
    x = ops.add(x, ops.add(mixed, w.o_bias))[rows]
    return ops.add(x, ops.all_reduce(moe(ops, c, w, ops.rms_norm(x, w.ffn_norm, c.eps))))


def attention(ops: Ops, c: Config, w: Any, kv: Any, step: Step, layer: int, x: Array) -> Array:
    """Compute attention with sink logits for this rank's heads of x: (T, hidden), without the bias of the output."""
    q, k, v = queries_keys_values(ops, c, w, step, x)
    window = c.window if c.is_sliding[layer] else None
    o = ops.attention(q, k, v, kv, step, scale=c.head_dim**-0.5, window=window, sink_logits=w.sink_logits)
    return linear(ops, o.reshape(x.shape[0], -1), w.o)


def moe(ops: Ops, c: Config, w: Any, x: Array) -> Array:
    """Return the best experts of each row, of this rank's channels: x (T, hidden) -> (T, hidden)."""
    biases = ExpertBiases(w.router_bias, w.gate_bias, w.up_bias, w.down_bias, c.limit)
    return ops.moe_ffn(x, ExpertWeights(w.router, w.experts_gate_up, w.experts_down, biases=biases), c.experts.top_k)
