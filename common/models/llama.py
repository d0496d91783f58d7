"""Llama (`llama`), Qwen2 (`qwen2`), Qwen3 (`qwen3`, `qwen3moe`), WeDLM (`wedlm`): grouped-query attention, SwiGLU FFN.

Qwen2 adds biases to q, k and v; Qwen3 norms each q and k head before rope. WeDLM-7B is Qwen2, WeDLM-8B is Qwen3 with
other weights. In Qwen3's mixtures every layer has experts, chosen by a softmax, in place of the FFN. Mistral
(`mistral`, in GGUF files `llama`) is Llama, perhaps with a window. Text beside a vision tower, which is not run, is
that of Mistral (`mistral3`) or of Qwen3 (`qwen3_vl`, `qwen3_vl_moe`; in GGUF files `qwen3vl`, `qwen3vlmoe`), whose
rope over time, height and width is a plain one where all three positions are equal, as they are for text.
SmolLM3 (`smollm3`) is Llama without rope in every fourth layer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from common.adapted import linear
from common.checkpoint import Checkpoint
from common.config import REQUIRED, Keys
from common.errors import BimetalError
from common.models.blocks import (
    Experts,
    ffn_weights,
    gguf_rope,
    head_shares,
    head_sizes,
    hf_rope,
    routed_weights,
    softmax_moe,
    swiglu_ffn,
    through,
    top_weights,
)
from common.ops import Array, Ops, Rope
from common.shards import ONE, Ranks, by_columns, by_rows
from common.step import State, Step
from common.storage import KVSpec, LayerSpec
from common.weights import Fix, Layout, Matrix, Names, Table, Vector, rows

WEDLM_MASK = 151665
BESIDE_VISION = ("mistral3", "qwen3_vl", "qwen3_vl_moe")  # whose config.json has a text_config
MIXTURES = ("qwen3_moe", "qwen3moe", "qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3vlmoe")
NORMS_HEADS = ("qwen3", "qwen3_vl", "qwen3_vl_text", "qwen3vl", *MIXTURES)  # WeDLM's files tell
ADJACENT = ("granite", "granitemoe", "llama", "smollm3")  # whose rope pairs are adjacent rows of a head in GGUF files
EXPERT_FFN = dict.fromkeys(("qwen3moe", "qwen3vlmoe"), "expert_feed_forward_length")  # keys of GGUF files
EXPERT_FFN |= {"granitemoe": "feed_forward_length"}
NO_ROPE = 4  # every fourth layer of SmolLM3 has no rope, which its GGUF files do not state
CLASSIFIERS = {"gguf": "cls.output.weight", "safetensors": "score.weight"}  # heads with a row for each label


@dataclass(frozen=True)
class Config:
    architecture: str  # a key of ARCHITECTURES in common/models/__init__.py
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # channels of the dense network; 0 if experts replace it
    experts: Experts | None
    eps: float
    rope: Rope
    context: int
    tied: bool
    norms_heads: bool  # whether there are norms of q and k
    has_biases: bool  # whether there are biases of q, k and v
    window: int | None = None  # keys that a row attends to, including its own; None: all
    no_rope: tuple[int, ...] = ()  # numbers of the layers without rope
    mask_id: int | None = None  # of WeDLM: the token id of a masked position
    has_head: bool = True  # whether there are logits: some models of embeddings, and classifiers, have none
    ranks: Ranks = ONE  # ranks that share heads and channels; the numbers above are this rank's share
    kv_ranks: Ranks = ONE  # ranks that hold different KV heads

    @cached_property
    def without_rope(self) -> "Config":
        """Return the configuration of a layer without rope: of a rope that turns no pair, and changes no bit."""
        return replace(self, rope=Rope((0.0,) * len(self.rope.frequencies)))


def read_config(checkpoint: Checkpoint) -> Config:
    return _gguf_config(checkpoint) if checkpoint.format == "gguf" else _hf_config(checkpoint)


def for_rank(c: Config, ranks: Ranks) -> Config:
    """Return the configuration of one rank: its heads and its channels of the feed-forward network."""
    return replace(
        c,
        **head_shares(c, ranks),
        ffn=ranks.divide(c.ffn, "channels of the feed-forward network"),
        experts=c.experts and c.experts.for_rank(ranks),
    )


def _hf_config(checkpoint: Checkpoint) -> Config:
    architecture, outer = checkpoint.config["model_type"], Keys(checkpoint.config, f"{checkpoint.path} config.json")
    keys = Keys(outer.read("text_config", dict), outer.where) if architecture in BESIDE_VISION else outer
    keys.expect("hidden_act", "silu")
    keys.expect("mlp_bias", False)
    keys.expect("use_sliding_window", False)
    keys.expect("is_causal", True)  # some models of embeddings attend to later tokens
    if other := set(map(str, keys.read("layer_types", list, []))) - {"full_attention"}:
        raise BimetalError(f"{keys.where}: layer_types has {min(other)!r:.60}; supported: full_attention")
    keys.expect("partial_rotary_factor", 1.0)
    keys.expect("rope_parameters.partial_rotary_factor", 1.0)
    layers = keys.size("num_hidden_layers")
    sizes = head_sizes(checkpoint, keys, layers)
    base, head = _prefixes(checkpoint)
    is_tied = keys.read("tie_word_embeddings", bool, outer.read("tie_word_embeddings", bool, False))
    has_own = f"{head}lm_head.weight" in checkpoint.tensors
    is_classifier, is_base = CLASSIFIERS["safetensors"] in checkpoint.tensors, not base
    context = keys.size("max_position_embeddings")
    is_wedlm = architecture == "wedlm"
    keys.expect("attention_bias", False, is_wedlm)
    experts = _hf_experts(keys, architecture) if architecture in MIXTURES else None
    return Config(
        architecture=architecture,
        vocab=keys.size("vocab_size"),
        **sizes,
        layers=layers,
        ffn=0 if experts else keys.size("intermediate_size"),
        experts=experts,
        eps=keys.positive("rms_norm_eps", 1e-6),
        rope=hf_rope(keys, sizes["head_dim"]),
        context=context,
        tied=not has_own and (is_tied or is_base or is_classifier),
        has_head=has_own or not (is_classifier or (is_base and not is_tied)),
        norms_heads=keys.read("qk_norm", bool, True) if is_wedlm else architecture in NORMS_HEADS,
        has_biases=architecture == "qwen2" or (is_wedlm and keys.read("attention_bias", bool, False)),
        window=read_window(keys, "sliding_window", context) if architecture.startswith("mistral") else None,
        no_rope=_hf_no_rope(keys, layers) if architecture == "smollm3" else (),
        mask_id=_mask_id(keys) if is_wedlm else None,
    )


def read_window(keys: Keys, key: str, context: int) -> int | None:
    """Read a window; None without one, or where the whole context is in it."""
    window = keys.size(key, context)
    return window if window < context else None


def _hf_no_rope(keys: Keys, layers: int) -> tuple[int, ...]:
    """Return the layers without rope: those with a 0 in the list, or else the last of each interval."""
    interval = keys.size("no_rope_layer_interval", NO_ROPE)
    turned = keys.read("no_rope_layers", list, [int((i + 1) % interval > 0) for i in range(layers)])
    if len(turned) < layers or any(turns not in (0, 1) for turns in turned):
        raise BimetalError(f"{keys.where}: no_rope_layers must list 0 or 1 for each of {layers} layers")
    return tuple(i for i in range(layers) if not turned[i])


def _hf_experts(keys: Keys, architecture: str) -> Experts:
    """Read the experts of every layer; transformers 5 states their number as num_local_experts."""
    keys.expect("decoder_sparse_step", 1)
    keys.expect("mlp_only_layers", [])
    if not keys.read("norm_topk_prob", bool, True if "_vl_" in architecture else REQUIRED):
        raise BimetalError(f"{keys.where}: norm_topk_prob is False; supported: True")
    count = "num_experts" if keys.get("num_local_experts") is None else "num_local_experts"
    return Experts(keys.size(count), keys.size("num_experts_per_tok"), keys.size("moe_intermediate_size"))


def _prefixes(checkpoint: Checkpoint) -> tuple[str, str]:
    """Return the prefixes of the names of a folder's layers, and of its head.

    The first is "" where it was saved without the class around the network, as models of embeddings are.
    """
    bases = ("", "model.", "language_model.model.", "model.language_model.")
    base = next((base for base in bases if base + "embed_tokens.weight" in checkpoint.tensors), "model.")
    return base, "language_model." if base.startswith("language_model.") else ""


def _mask_id(keys: Keys) -> int | None:
    """Read the mask's token id; published WeDLM checkpoints have null here, and were trained with 151665."""
    vocab = keys.size("vocab_size")
    mask = keys.read("mask_token_id", int, WEDLM_MASK)
    if keys.get("mask_token_id") is None and mask >= vocab:
        return None
    if not 0 <= mask < vocab:
        raise BimetalError(f"{keys.where}: mask_token_id is {mask}; the vocabulary has {vocab} tokens")
    return mask


def _gguf_config(checkpoint: Checkpoint) -> Config:
    architecture = checkpoint.config["general.architecture"]
    keys = Keys(checkpoint.config, str(checkpoint.path), prefix=architecture + ".", nested=False)
    layers = keys.size("block_count")
    sizes = head_sizes(checkpoint, keys, layers)
    keys.expect("attention.causal", True)
    experts = _gguf_experts(keys, architecture) if architecture in EXPERT_FFN else None
    if experts is None:
        keys.expect("expert_count", 0)
    table = checkpoint.tensors.get("token_embd.weight")
    is_wedlm, context = architecture == "wedlm", keys.size("context_length")
    return Config(
        architecture=architecture,
        vocab=table.shape[0] if table and table.shape else keys.size("vocab_size"),
        **sizes,
        layers=layers,
        ffn=0 if experts else keys.size("feed_forward_length"),
        experts=experts,
        eps=keys.positive("attention.layer_norm_rms_epsilon"),
        rope=gguf_rope(keys, sizes["head_dim"], checkpoint.tensors.get("rope_freqs.weight")),
        context=context,
        tied="output.weight" not in checkpoint.tensors,
        has_head=CLASSIFIERS["gguf"] not in checkpoint.tensors or "output.weight" in checkpoint.tensors,
        norms_heads="blk.0.attn_q_norm.weight" in checkpoint.tensors if is_wedlm else architecture in NORMS_HEADS,
        has_biases=architecture == "qwen2" or (is_wedlm and "blk.0.attn_q.bias" in checkpoint.tensors),
        window=read_gguf_window(keys, context) if architecture == "llama" else None,
        no_rope=tuple(range(NO_ROPE - 1, layers, NO_ROPE)) if architecture == "smollm3" else (),
        mask_id=_gguf_mask_id(checkpoint, keys) if is_wedlm else None,
    )


def read_gguf_window(keys: Keys, context: int) -> int | None:
    """Read a window as `read_window`; 0 is none too."""
    key = "attention.sliding_window"
    return None if keys.get(key) == 0 else read_window(keys, key, context)


def _gguf_experts(keys: Keys, architecture: str) -> Experts:
    keys.expect("expert_gating_func", 1)
    keys.expect("expert_weights_norm", True)
    keys.expect("expert_weights_scale", 0.0, 1.0)
    keys.expect("expert_shared_count", 0)
    keys.expect("expert_shared_feed_forward_length", 0)
    keys.expect("leading_dense_block_count", 0)
    return Experts(keys.size("expert_count"), keys.size("expert_used_count"), keys.size(EXPERT_FFN[architecture]))


def _gguf_mask_id(checkpoint: Checkpoint, keys: Keys) -> int:
    mask, table = checkpoint.config.get("tokenizer.ggml.mask_token_id"), checkpoint.tensors.get("token_embd.weight")
    vocab = table.shape[0] if table and table.shape else 0
    if not isinstance(mask, int | np.integer) or not 0 <= mask < vocab:
        raise BimetalError(f"{keys.where}: tokenizer.ggml.mask_token_id is {mask}; the vocabulary has {vocab} tokens")
    return int(mask)


def layout(c: Config, checkpoint: Checkpoint, moe_weights: Callable[..., Table] = routed_weights) -> Layout:
    """Describe the weights; moe_weights lists those of a layer's experts and their router."""
    dialect = "gguf" if checkpoint.format == "gguf" else "hf"
    base, head = _prefixes(checkpoint)
    top = top_weights(c, Names(dialect, "", checkpoint.tensors), base, Names(dialect, head, checkpoint.tensors))
    prefix = "blk.{}." if dialect == "gguf" else base + "layers.{}."
    names = [Names(dialect, prefix.format(i), checkpoint.tensors) for i in range(c.layers)]
    return Layout(top, [_layer_weights(c, tensor, moe_weights) for tensor in names], _ignored)


def _layer_weights(c: Config, tensor: Names, moe_weights: Callable[..., Table]) -> Table:
    return {
        **attention_weights(c, tensor, pairs_adjacent=c.architecture in ADJACENT),
        "attn_norm": Vector(tensor("input_layernorm.weight", "attn_norm.weight", (c.hidden,))),
        "ffn_norm": Vector(tensor("post_attention_layernorm.weight", "ffn_norm.weight", (c.hidden,))),
        **(
            moe_weights(tensor, c.hidden, c.experts, c.ranks)
            if c.experts
            else ffn_weights(tensor, c.hidden, c.ffn, c.ranks)
        ),
    }


def attention_weights(c: Any, tensor: Names, pairs_adjacent: bool = False) -> Table:
    """List the weights of a layer's attention.

    c               a configuration with the heads, biases and norms of this file's
    pairs_adjacent  whether a rope pair in GGUF files is two adjacent rows of a head
    """
    H, K, D = c.heads, c.kv_heads, c.head_dim
    heads, kv_heads = c.ranks.segment(H * D), c.kv_ranks.segment(K * D)

    def half_split(heads: int) -> dict[str, Fix]:
        """Permute rows of a GGUF file to rope pairs (j, j + D/2)."""
        if not pairs_adjacent:
            return {}
        return {"gguf": rows(np.arange(heads * D).reshape(heads, D // 2, 2).swapaxes(1, 2).ravel())}

    table: dict[str, Matrix | Vector | None] = {
        "qkv": Matrix(
            tensor("self_attn.q_proj.weight", "attn_q.weight", (H * D, c.hidden), half_split(H), shard=by_rows(heads)),
            tensor(
                "self_attn.k_proj.weight", "attn_k.weight", (K * D, c.hidden), half_split(K), shard=by_rows(kv_heads)
            ),
            tensor("self_attn.v_proj.weight", "attn_v.weight", (K * D, c.hidden), shard=by_rows(kv_heads)),
        ),
        "o": Matrix(
            tensor("self_attn.o_proj.weight", "attn_output.weight", (c.hidden, H * D), shard=by_columns(heads))
        ),
    }
    if c.has_biases:
        for part, n, segment in (("q", H, heads), ("k", K, kv_heads), ("v", K, kv_heads)):
            name, shard = f"self_attn.{part}_proj.bias", by_rows(segment)
            table[f"{part}_bias"] = Vector(tensor(name, f"attn_{part}.bias", (n * D,), shard=shard))
    if c.norms_heads:
        table["q_norm"] = Vector(tensor("self_attn.q_norm.weight", "attn_q_norm.weight", (D,)))
        table["k_norm"] = Vector(tensor("self_attn.k_norm.weight", "attn_k_norm.weight", (D,)))
    return table


def _ignored(name: str) -> str | None:
    if name in CLASSIFIERS.values():
        return "the head of a classifier, which rerankers read"
    if name == "rope_freqs.weight":
        return "rope divisors, read with the configuration"
    if name.removeprefix("model.").startswith(("vision_tower.", "visual.", "multi_modal_projector.")):
        return "vision tower, not run"
    if name.endswith("rotary_emb.inv_freq"):
        return "rope frequencies, computed from the configuration"
    return None


def state_spec(c: Config) -> list[LayerSpec]:
    return [{"kv": KVSpec(c.kv_heads, c.head_dim, c.head_dim, c.window)}] * c.layers


def forward(
    ops: Ops, c: Config, w: Any, state: State, step: Step, rows: slice = slice(None), layers: range | None = None
) -> Array:
    """Return the logits (n, vocab) of `rows` of the step; of some `layers`, what blocks.through returns."""
    return through(block, ops, c, w, state, step, rows, layers)


def block(ops: Ops, c: Config, w: Any, state: State, step: Step, layer: int, rows: slice, x: Array) -> Array:
    of_layer = c.without_rope if layer in c.no_rope else c
    mixed = attention(ops, of_layer, w, state[layer].kv, step, ops.rms_norm(x, w.attn_norm, c.eps))
    x = ops.add(x, ops.all_reduce(mixed))[rows]
    z = ops.rms_norm(x, w.ffn_norm, c.eps)
    return ops.add(x, ops.all_reduce(softmax_moe(ops, c.experts, w, z) if c.experts else swiglu_ffn(ops, w, z)))


def attention(ops: Ops, c: Any, w: Any, kv: Any, step: Step, x: Array) -> Array:
    """Compute grouped-query attention for this rank's heads of x (T, hidden): (T, hidden).

    Scores are multiplied by the scale of attention that `c` has, else divided by the root of the head size.
    """
    q, k, v = queries_keys_values(ops, c, w, step, x)
    scale = getattr(c, "attention_scale", c.head_dim**-0.5)
    o = ops.attention(q, k, v, kv, step, scale=scale, window=c.window)
    return linear(ops, o.reshape(x.shape[0], -1), w.o)


def queries_keys_values(ops: Ops, c: Any, w: Any, step: Step, x: Array) -> tuple[Array, Array, Array]:
    """Compute roped queries (T, H, D) and keys (T, K, D), and values (T, K, D), of x (T, hidden)."""
    T, H, K, D = x.shape[0], c.heads, c.kv_heads, c.head_dim
    qkv = linear(ops, x, w.qkv)
    q, k, v = qkv[:, : H * D], qkv[:, H * D : (H + K) * D], qkv[:, (H + K) * D :]
    if c.has_biases:
        q, k, v = ops.add(q, w.q_bias), ops.add(k, w.k_bias), ops.add(v, w.v_bias)
    q, k, v = q.reshape(T, H, D), k.reshape(T, K, D), v.reshape(T, K, D)
    if c.norms_heads:
        q = ops.norm_rope(q, w.q_norm, step.positions, c.rope, c.eps)
        k = ops.norm_rope(k, w.k_norm, step.positions, c.rope, c.eps)
    else:
        q = ops.rope(q, step.positions, c.rope)
        k = ops.rope(k, step.positions, c.rope)
    return q, k, v
