"""OLMo 2 and 3 (`olmo2`, `olmo3`; GGUF's `olmo2`): norms after attention and FFN, and of all q or k heads together.

OLMo 3 has windows in three of four layers; layers without a window have a rope of their own, by YaRN.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from common.adapted import linear
from common.checkpoint import Checkpoint
from common.config import Keys
from common.models.blocks import (
    KINDS,
    ffn_weights,
    gguf_rope,
    gguf_sliding,
    head_shares,
    head_sizes,
    hf_rope,
    hf_sliding,
    sliding_spec,
    swiglu_ffn,
    through,
    top_weights,
)
from common.ops import Array, Ops, Rope
from common.shards import ONE, Ranks, by_columns, by_rows
from common.step import State, Step
from common.storage import LayerSpec
from common.weights import Fix, Layout, Matrix, Names, Table, Vector, mapped, rows

PATTERN = 4  # every fourth layer of OLMo 3 has no window


@dataclass(frozen=True)
class Config:
    vocab: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    is_sliding: tuple[bool, ...]  # per layer
    window: int  # keys that a row of a sliding layer attends to, including its own
    rope: Rope
    sliding_rope: Rope
    ffn: int
    eps: float
    context: int
    tied: bool
    ranks: Ranks = ONE  # ranks that share heads and channels; the numbers above are this rank's share
    kv_ranks: Ranks = ONE  # ranks that hold different KV heads


# -- configuration -----------------------------------------------------------------------------------------------------


def read_config(checkpoint: Checkpoint) -> Config:
    return _gguf_config(checkpoint) if checkpoint.format == "gguf" else _hf_config(checkpoint)


def for_rank(c: Config, ranks: Ranks) -> Config:
    """Return the configuration of one rank: its heads and its channels of the feed-forward network."""
    return replace(c, **head_shares(c, ranks), ffn=ranks.divide(c.ffn, "channels of the feed-forward network"))


def _hf_config(checkpoint: Checkpoint) -> Config:
    keys, is_olmo3 = (
        Keys(checkpoint.config, f"{checkpoint.path} config.json"),
        checkpoint.config["model_type"] == "olmo3",
    )
    keys.expect("hidden_act", "silu")
    keys.expect("attention_bias", False)
    layers = keys.size("num_hidden_layers")
    sizes = head_sizes(checkpoint, keys, layers)
    is_sliding = hf_sliding(keys, layers, PATTERN) if is_olmo3 else (False,) * layers
    full, sliding = _hf_ropes(keys, sizes["head_dim"], 5e5 if is_olmo3 else 1e4)
    return Config(
        vocab=keys.size("vocab_size"),
        **sizes,
        is_sliding=is_sliding,
        window=keys.size("sliding_window") if any(is_sliding) else 0,
        rope=full,
        sliding_rope=sliding if any(is_sliding) else full,
        ffn=keys.size("intermediate_size"),
        eps=keys.positive("rms_norm_eps", 1e-5),
        context=keys.size("max_position_embeddings"),
        tied=keys.read("tie_word_embeddings", bool, False) and "lm_head.weight" not in checkpoint.tensors,
    )


def _hf_ropes(keys: Keys, dim: int, theta: float) -> tuple[Rope, Rope]:
    """Return the ropes of full and of sliding layers, from those of each kind, or from the older keys.

    theta  base of files that state none
    """
    if keys.get(f"rope_parameters.{KINDS[0]}") is None:
        base = keys.positive("rope_parameters.rope_theta", keys.positive("rope_theta", theta))
        return hf_rope(keys, dim, theta), hf_rope(Keys({"rope_theta": base}, keys.where), dim)
    full, sliding = (
        Keys({"rope_parameters": keys.read(f"rope_parameters.{kind}", dict, {})}, f"{keys.where} {kind}")
        for kind in KINDS
    )
    return hf_rope(full, dim, theta), hf_rope(sliding, dim, theta)


def _gguf_config(checkpoint: Checkpoint) -> Config:
    keys = Keys(checkpoint.config, str(checkpoint.path), prefix="olmo2.", nested=False)
    layers = keys.size("block_count")
    sizes = head_sizes(checkpoint, keys, layers)
    window = keys.size("attention.sliding_window") if keys.get("attention.sliding_window") else 0
    full = gguf_rope(keys, sizes["head_dim"], None)
    base = {"olmo2.rope.freq_base": keys.positive("rope.freq_base_swa", keys.positive("rope.freq_base", 1e4))}
    sliding = gguf_rope(Keys(base, keys.where, "olmo2.", nested=False), sizes["head_dim"], None)
    table = checkpoint.tensors.get("token_embd.weight")
    return Config(
        vocab=table.shape[0] if table and table.shape else keys.size("vocab_size"),
        **sizes,
        is_sliding=gguf_sliding(keys, layers, window, PATTERN),
        window=window,
        rope=full,
        sliding_rope=sliding if window else full,
        ffn=keys.size("feed_forward_length"),
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
    """List the weights of a layer. Every rank has all rows of q and k, which one norm divides, its own first."""
    D = c.head_dim
    heads, kv_heads = c.ranks.segment(c.heads * D), c.kv_ranks.segment(c.kv_heads * D)
    q, k = (np.r_[s.start : s.stop, : s.start, s.stop : s.length] for s in (heads, kv_heads))

    def ordered(index: np.ndarray) -> dict[str, Fix]:
        return {} if c.ranks.size == 1 else {"hf": rows(index), "gguf": rows(index)}

    def norm(part: str, index: np.ndarray) -> Vector:
        fix = {} if c.ranks.size == 1 else dict.fromkeys(("hf", "gguf"), mapped(lambda w: w[index]))
        return Vector(tensor(f"self_attn.{part}_norm.weight", f"attn_{part}_norm.weight", (len(index),), fix))

    return {
        "qkv": Matrix(
            tensor("self_attn.q_proj.weight", "attn_q.weight", (len(q), c.hidden), ordered(q)),
            tensor("self_attn.k_proj.weight", "attn_k.weight", (len(k), c.hidden), ordered(k)),
            tensor("self_attn.v_proj.weight", "attn_v.weight", (c.kv_heads * D, c.hidden), shard=by_rows(kv_heads)),
        ),
        "q_norm": norm("q", q),
        "k_norm": norm("k", k),
        "o": Matrix(
            tensor("self_attn.o_proj.weight", "attn_output.weight", (c.hidden, c.heads * D), shard=by_columns(heads))
        ),
        "attn_post_norm": Vector(tensor("post_attention_layernorm.weight", "post_attention_norm.weight", (c.hidden,))),
        **ffn_weights(tensor, c.hidden, c.ffn, c.ranks),
        "ffn_post_norm": Vector(tensor("post_feedforward_layernorm.weight", "post_ffw_norm.weight", (c.hidden,))),
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
    mixed = ops.all_reduce(attention(ops, c, w, state[layer].kv, step, layer, x))
    x = ops.add(x, ops.rms_norm(mixed, w.attn_post_norm, c.eps))[rows]
    return ops.add(x, ops.rms_norm(ops.all_reduce(swiglu_ffn(ops, w, x)), w.ffn_post_norm, c.eps))


def attention(ops: Ops, c: Config, w: Any, kv: Any, step: Step, layer: int, x: Array) -> Array:
    """Compute grouped-query attention for this rank's heads of x (T, hidden): (T, hidden)."""
    T, H, K, D = x.shape[0], c.heads, c.kv_heads, c.head_dim
    rope, window = (c.sliding_rope, c.window) if c.is_sliding[layer] else (c.rope, None)
    queries, keys = H * D * c.ranks.size, K * D * c.kv_ranks.size  # columns of all ranks
    qkv = linear(ops, x, w.qkv)
    q = ops.rms_norm(qkv[:, :queries], w.q_norm, c.eps)[:, : H * D].reshape(T, H, D)
    k = ops.rms_norm(qkv[:, queries : queries + keys], w.k_norm, c.eps)[:, : K * D].reshape(T, K, D)
    v = qkv[:, queries + keys :].reshape(T, K, D)
    q, k = (ops.rope(each, step.positions, rope) for each in (q, k))
    o = ops.attention(q, k, v, kv, step, scale=D**-0.5, window=window)
    return linear(ops, o.reshape(T, H * D), w.o)
