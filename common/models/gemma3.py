"""Gemma 3 (`gemma3`, `gemma3_text`): attention with a window in five of six layers, norms before and after each half.

Layers with a window have a rope of their own. The embedding is multiplied by the root of the hidden size, rounded to
bfloat16 as in training. Vision towers are skipped.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from common.adapted import linear
from common.checkpoint import Checkpoint
from common.config import Keys
from common.errors import BimetalError
from common.models.blocks import (
    KINDS,
    check_sizes,
    ffn_weights,
    gguf_rope,
    gguf_sliding,
    head_shares,
    hf_rope,
    hf_sliding,
    sliding_spec,
    through,
    top_weights,
)
from common.ops import Array, Ops, Rope
from common.quantize import rounded
from common.shards import ONE, Ranks, by_columns, by_rows
from common.step import State, Step
from common.storage import LayerSpec
from common.weights import Layout, Matrix, Names, Table, Vector, mapped

EXCEEDS_FLOAT16 = True  # the residual stream exceeds float16's maximum of 65504
NORM_FIX = {"hf": mapped(lambda w: w + 1)}  # stored around 0 in safetensors, mlx-lm's too, around 1 in GGUF files
PATTERN = 6  # every sixth layer has no window
LAYERS_27B = 62  # whose GGUF files do not state that queries are scaled by hidden / heads, not by the head size


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
    query_scalar: float  # scores are divided by its root
    ffn: int
    eps: float
    context: int
    tied: bool
    ranks: Ranks = ONE  # ranks that share heads and channels; the numbers above are this rank's share
    kv_ranks: Ranks = ONE  # ranks that hold different KV heads

    @property
    def embedding_scale(self) -> float:
        """Return the root of the hidden size, rounded to bfloat16."""
        return float(rounded(np.sqrt([self.hidden], dtype=np.float32), "BF16")[0])


# -- configuration -----------------------------------------------------------------------------------------------------


def read_config(checkpoint: Checkpoint) -> Config:
    return _gguf_config(checkpoint) if checkpoint.format == "gguf" else _hf_config(checkpoint)


def for_rank(c: Config, ranks: Ranks) -> Config:
    """Return the configuration of one rank: its heads and its channels of the feed-forward network."""
    return replace(c, **head_shares(c, ranks), ffn=ranks.divide(c.ffn, "channels of the feed-forward network"))


def _hf_config(checkpoint: Checkpoint) -> Config:
    """Read config.json; that of the 4B model leaves out what transformers has as defaults."""
    where = f"{checkpoint.path} config.json"
    keys = Keys(checkpoint.config.get("text_config") or checkpoint.config, where)
    keys.expect("hidden_activation", "gelu_pytorch_tanh")
    for key in ("attention_bias", "use_bidirectional_attention"):
        keys.expect(key, False)
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if keys.get(key) is not None:
            raise BimetalError(f"{where}: {key} is {keys.get(key)!r:.60}; supported: null")
    layers, hidden, head_dim = keys.size("num_hidden_layers"), keys.size("hidden_size"), keys.size("head_dim", 256)
    heads, kv_heads = keys.size("num_attention_heads", 8), keys.size("num_key_value_heads", 4)
    check_sizes(checkpoint, layers, heads, kv_heads, heads * head_dim)
    period = keys.size("sliding_window_pattern", keys.size("_sliding_window_pattern", PATTERN))
    is_sliding = hf_sliding(keys, layers, period)
    full, sliding = _hf_rope(keys, head_dim)
    table = checkpoint.tensors.get(_prefix(checkpoint) + "embed_tokens.weight")
    return Config(
        vocab=keys.size("vocab_size", table.shape[0] if table and table.shape else 262208),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        is_sliding=is_sliding,
        window=keys.size("sliding_window", 4096) if any(is_sliding) else 0,
        rope=full,
        sliding_rope=sliding if any(is_sliding) else full,
        query_scalar=keys.positive("query_pre_attn_scalar", 256.0),
        ffn=keys.size("intermediate_size"),
        eps=keys.positive("rms_norm_eps", 1e-6),
        context=keys.size("max_position_embeddings", 131072),
        tied=not any(name.endswith("lm_head.weight") for name in checkpoint.tensors),
    )


def _hf_rope(keys: Keys, dim: int) -> tuple[Rope, Rope]:
    """Return the ropes of full and of sliding layers, from rope_parameters or the older keys."""
    ropes = keys.read("rope_parameters", dict, {})
    if not ropes:
        local = {"rope_theta": keys.positive("rope_local_base_freq", 1e4)}
        return hf_rope(keys, dim, 1e6), hf_rope(Keys(local, keys.where), dim)
    full, sliding = (
        Keys({"rope_parameters": keys.read(f"rope_parameters.{kind}", dict, {})}, f"{keys.where} {kind}")
        for kind in KINDS
    )
    return hf_rope(full, dim, 1e6), hf_rope(sliding, dim, 1e4)


def _gguf_config(checkpoint: Checkpoint) -> Config:
    keys = Keys(checkpoint.config, str(checkpoint.path), prefix="gemma3.", nested=False)
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if keys.get(key) is not None:
            raise BimetalError(f"{keys.where}: gemma3.{key} is {keys.get(key)!r:.60}; supported: none")
    layers, hidden, head_dim = (keys.size(key) for key in ("block_count", "embedding_length", "attention.key_length"))
    heads, kv_heads = keys.size("attention.head_count"), keys.size("attention.head_count_kv")
    keys.expect("attention.value_length", head_dim)
    check_sizes(checkpoint, layers, heads, kv_heads, heads * head_dim)
    window = keys.size("attention.sliding_window") if keys.get("attention.sliding_window") else 0
    is_sliding = gguf_sliding(keys, layers, window, PATTERN)
    full = gguf_rope(keys, head_dim, None, 1e6)
    local = {"gemma3.rope.freq_base": keys.positive("rope.freq_base_swa", 1e4)}
    table = checkpoint.tensors.get("token_embd.weight")
    return Config(
        vocab=table.shape[0] if table and table.shape else keys.size("vocab_size"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        is_sliding=is_sliding,
        window=window,
        rope=full,
        sliding_rope=gguf_rope(Keys(local, keys.where, "gemma3.", nested=False), head_dim, None) if window else full,
        query_scalar=hidden / heads if layers == LAYERS_27B else float(head_dim),
        ffn=keys.size("feed_forward_length"),
        eps=keys.positive("attention.layer_norm_rms_epsilon"),
        context=keys.size("context_length"),
        tied="output.weight" not in checkpoint.tensors,
    )


# -- weights -----------------------------------------------------------------------------------------------------------


def layout(c: Config, checkpoint: Checkpoint) -> Layout:
    dialect, prefix = ("gguf", "") if checkpoint.format == "gguf" else ("hf", _prefix(checkpoint))
    tensor = Names(dialect, prefix, checkpoint.tensors)
    head_at = Names(dialect, "language_model." if prefix.startswith("language_model.") else "", checkpoint.tensors)
    top = top_weights(c, tensor, "", head_at, NORM_FIX)
    names = [f"blk.{i}." if dialect == "gguf" else f"{prefix}layers.{i}." for i in range(len(c.is_sliding))]
    return Layout(top, [_layer_weights(c, Names(dialect, name, checkpoint.tensors)) for name in names], _ignored)


def _prefix(checkpoint: Checkpoint) -> str:
    """Return the prefix of the names of the text model: alone, and beside a vision tower in older and newer folders."""
    prefixes = ("model.language_model.", "language_model.model.", "model.")
    return next((p for p in prefixes if p + "embed_tokens.weight" in checkpoint.tensors), "model.")


def _layer_weights(c: Config, tensor: Names) -> Table:
    H, K, D = c.heads, c.kv_heads, c.head_dim
    heads, kv_heads = c.ranks.segment(H * D), c.kv_ranks.segment(K * D)

    def norm(hf: str, gguf: str, size: int) -> Vector:
        return Vector(tensor(hf, gguf, (size,), NORM_FIX))

    return {
        "attn_norm": norm("input_layernorm.weight", "attn_norm.weight", c.hidden),
        "qkv": Matrix(
            tensor("self_attn.q_proj.weight", "attn_q.weight", (H * D, c.hidden), shard=by_rows(heads)),
            tensor("self_attn.k_proj.weight", "attn_k.weight", (K * D, c.hidden), shard=by_rows(kv_heads)),
            tensor("self_attn.v_proj.weight", "attn_v.weight", (K * D, c.hidden), shard=by_rows(kv_heads)),
        ),
        "o": Matrix(
            tensor("self_attn.o_proj.weight", "attn_output.weight", (c.hidden, H * D), shard=by_columns(heads))
        ),
        "q_norm": norm("self_attn.q_norm.weight", "attn_q_norm.weight", D),
        "k_norm": norm("self_attn.k_norm.weight", "attn_k_norm.weight", D),
        "attn_post_norm": norm("post_attention_layernorm.weight", "post_attention_norm.weight", c.hidden),
        "ffn_norm": norm("pre_feedforward_layernorm.weight", "ffn_norm.weight", c.hidden),
        **ffn_weights(tensor, c.hidden, c.ffn, c.ranks),
        "ffn_post_norm": norm("post_feedforward_layernorm.weight", "post_ffw_norm.weight", c.hidden),
    }


def _ignored(name: str) -> str | None:
    vision = "vision_tower.", "multi_modal_projector."
    return "vision tower, not run" if name.removeprefix("model.").startswith(vision) else None


# -- the network -------------------------------------------------------------------------------------------------------


def state_spec(c: Config) -> list[LayerSpec]:
    return sliding_spec(c)


def forward(
    ops: Ops, c: Config, w: Any, state: State, step: Step, rows: slice = slice(None), layers: range | None = None
) -> Array:
    """Return the logits (n, vocab) of `rows` of the step; of some `layers`, what blocks.through returns."""
    return through(block, ops, c, w, state, step, rows, layers)


def block(ops: Ops, c: Config, w: Any, state: State, step: Step, layer: int, rows: slice, x: Array) -> Array:
    mixed = ops.all_reduce(attention(ops, c, w, state[layer].kv, step, layer, ops.rms_norm(x, w.attn_norm, c.eps)))
    x = ops.add(x, ops.rms_norm(mixed, w.attn_post_norm, c.eps))[rows]
    y = ops.all_reduce(geglu_ffn(ops, w, ops.rms_norm(x, w.ffn_norm, c.eps)))
    return ops.add(x, ops.rms_norm(y, w.ffn_post_norm, c.eps))


def attention(ops: Ops, c: Config, w: Any, kv: Any, step: Step, layer: int, x: Array) -> Array:
    """Compute grouped-query attention for this rank's heads of x: (T, hidden)."""
    T, H, K, D = x.shape[0], c.heads, c.kv_heads, c.head_dim
    rope, window = (c.sliding_rope, c.window) if c.is_sliding[layer] else (c.rope, None)
    qkv = linear(ops, x, w.qkv)
    q = ops.norm_rope(qkv[:, : H * D].reshape(T, H, D), w.q_norm, step.positions, rope, c.eps)
    k = ops.norm_rope(qkv[:, H * D : (H + K) * D].reshape(T, K, D), w.k_norm, step.positions, rope, c.eps)
    v = qkv[:, (H + K) * D :].reshape(T, K, D)
    o = ops.attention(q, k, v, kv, step, scale=c.query_scalar**-0.5, window=window)
    return linear(ops, o.reshape(T, H * D), w.o)


def geglu_ffn(ops: Ops, w: Any, x: Array) -> Array:
    """Compute down(gelu(gate x) * up x) of x (T, hidden) with this rank's channels; w.gate_up stacks both by rows."""
    y = linear(ops, x, w.gate_up)
    F = y.shape[-1] // 2
    return linear(ops, ops.geglu(y[:, :F], y[:, F:]), w.down)
