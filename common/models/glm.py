"""GLM-4.7-Flash (`glm4_moe_lite`) and GGUF's `deepseek2`, which DeepSeek's models are too (deepseek.py): multi-head
latent attention, experts chosen by a sigmoid router.

The state of a layer is one row per token for all heads: a normed latent and a roped key. A step of few rows attends to
the stored rows directly; a prompt first expands them into keys and values. Both forms compute the same function. Files
store rope pairs as adjacent channels; loading permutes the rows of the weight matrices, so that pairs are half-split.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from common.adapted import linear
from common.checkpoint import Checkpoint
from common.config import Keys
from common.errors import BimetalError
from common.models.blocks import (
    Experts,
    MtpNames,
    RowFn,
    check_sizes,
    ffn_weights,
    gguf_rope,
    hf_rope,
    probability_moe,
    probability_moe_weights,
    sigmoid_moe,
    sigmoid_moe_weights,
    swiglu_ffn,
    through,
    top_weights,
    yarn_magnitude,
)
from common.ops import Array, LatentWeights, Ops, Rope
from common.quants import dequantize
from common.shards import ONE, Ranks, by_columns, by_rows
from common.step import MAX_DECODE_ROWS, State, Step
from common.storage import LatentSpec, LayerSpec
from common.tensors import Tensor
from common.weights import Fix, Layout, Matrix, Names, Table, Vector, dense, rows

NORM_FIX: dict[str, Fix] = {}
MTP = MtpNames(
    layer="",
    fc="eh_proj.weight",
    embedding_norm="enorm.weight",
    hidden_norm="hnorm.weight",
    norm="shared_head.norm.weight",
    embed="embed_tokens.weight",
    head="shared_head.head.weight",
    prefixes=("model.layers.{}.",),
)
GATINGS = {1: "softmax", 2: "sigmoid"}  # expert_gating_func
GLM_VOCAB = 154880  # identifies early GGUF files of GLM, which state no gating function or a wrong one


@dataclass(frozen=True)
class Config:
    vocab: int
    hidden: int
    layers: int
    dense_layers: int  # number of first layers with a dense FFN; the other layers have experts
    heads: int
    q_latent: int  # R of the queries; 0: they are computed without a latent
    latent: int  # R of keys and values
    nope_dim: int  # N, channels of a key without position
    rope_dim: int  # P
    value_dim: int  # V
    rope: Rope
    ffn: int
    experts: Experts
    eps: float
    latent_eps: float  # of the norms of latents
    context: int
    tied: bool
    score_factor: float = 1.0  # YaRN's, on scores that are divided by the root of N + P
    sigmoid: bool = True  # whether a sigmoid chooses experts; False: a softmax, whose probabilities are their weights
    ranks: Ranks = ONE  # ranks that share heads and channels; the numbers above are this rank's share

    def expands(self, rows: int, past: int) -> bool:
        """Test whether `rows` rows after `past` committed ones need fewer operations if keys and values are expanded.

        Either form takes R (N + V) operations per head, to move each row to the latents and back, or to expand each
        key, past ones included. Expanded, each pair of a row and a key takes 2 R - N - V fewer. Steps of few rows
        always use one form, so that a token has the same bits in a step of its own and among draft tokens.
        """
        saved = 2 * self.latent - self.nope_dim - self.value_dim
        pays = rows * (past + rows) * saved > past * self.latent * (self.nope_dim + self.value_dim)
        return rows > MAX_DECODE_ROWS and pays


# -- configuration -----------------------------------------------------------------------------------------------------


def read_config(checkpoint: Checkpoint) -> Config:
    return _gguf_config(checkpoint) if checkpoint.format == "gguf" else _hf_config(checkpoint)


def for_rank(c: Config, ranks: Ranks) -> Config:
    """Return the configuration of one rank: its heads and channels; every rank holds all latents."""
    return replace(
        c,
        heads=ranks.divide(c.heads, "heads"),
        ffn=ranks.divide(c.ffn, "channels of the feed-forward network"),
        experts=c.experts.for_rank(ranks),
        ranks=ranks,
    )


def _hf_config(checkpoint: Checkpoint) -> Config:
    keys = Keys(checkpoint.config, f"{checkpoint.path} config.json")
    keys.expect("rope_scaling.rope_type", "default")
    keys.expect("rope_scaling.type", "default")
    keys.expect("rope_parameters.rope_type", "default")
    keys.expect("partial_rotary_factor", 1, 1.0)
    keys.expect("rope_parameters.partial_rotary_factor", 1, 1.0)
    keys.expect("topk_method", "noaux_tc")
    keys.expect("scoring_func", "sigmoid")
    keys.expect("norm_topk_prob", True)
    keys.expect("n_group", 1)
    keys.expect("topk_group", 1)
    fields = hf_fields(checkpoint, keys)
    layers, kinds = fields["layers"], keys.read("mlp_layer_types", list, [])
    leading = kinds.index("sparse") if "sparse" in kinds else keys.read("first_k_dense_replace", int, 1)
    if kinds and kinds != ["dense"] * leading + ["sparse"] * (layers - leading):
        raise BimetalError(f"{keys.where}: mlp_layer_types must be dense, then sparse, for {layers} layers")
    eps = keys.positive("rms_norm_eps", 1e-5)
    return Config(
        **fields,
        dense_layers=leading,
        q_latent=keys.size("q_lora_rank"),
        rope=hf_rope(keys, fields["rope_dim"], 1e6),
        eps=eps,
        latent_eps=eps,  # as mlx-lm and llama.cpp; transformers uses 1e-6
    )


def hf_fields(checkpoint: Checkpoint, keys: Keys) -> dict[str, Any]:
    """Read the fields of a configuration that all models with this attention state alike in config.json."""
    keys.expect("hidden_act", "silu")
    keys.expect("attention_bias", False)
    keys.expect("rope_interleave", True)
    keys.expect("moe_layer_freq", 1)
    layers, heads = keys.size("num_hidden_layers"), keys.size("num_attention_heads")
    nope_dim, rope_dim, value_dim = (keys.size(f"{k}_head_dim") for k in ("qk_nope", "qk_rope", "v"))
    latent = keys.size("kv_lora_rank")
    check_sizes(checkpoint, layers, heads, 1, heads * (nope_dim + rope_dim), heads * value_dim, latent + rope_dim)
    ffn = keys.size("moe_intermediate_size")
    return {
        "vocab": keys.size("vocab_size"),
        "hidden": keys.size("hidden_size"),
        "layers": layers,
        "heads": heads,
        "latent": latent,
        "nope_dim": nope_dim,
        "rope_dim": rope_dim,
        "value_dim": value_dim,
        "ffn": keys.size("intermediate_size"),
        "experts": Experts(
            keys.size("n_routed_experts"),
            keys.size("num_experts_per_tok"),
            ffn,
            ffn * keys.size("n_shared_experts"),
            keys.positive("routed_scaling_factor", 1.0),
        ),
        "context": keys.size("max_position_embeddings"),
        "tied": keys.read("tie_word_embeddings", bool, False) and "lm_head.weight" not in checkpoint.tensors,
    }


def _gguf_config(checkpoint: Checkpoint) -> Config:
    keys = Keys(checkpoint.config, str(checkpoint.path), prefix="deepseek2.", nested=False)
    keys.expect("expert_group_count", 1)
    keys.expect("expert_group_used_count", 1)
    layers = keys.size("block_count") - keys.read("nextn_predict_layers", int, 0)
    if layers < 1:
        raise BimetalError(f"{checkpoint.path}: deepseek2.nextn_predict_layers leaves {layers} layers")
    table = checkpoint.tensors.get("token_embd.weight")
    vocab = table.shape[0] if table else keys.size("vocab_size")
    sigmoid = _gguf_sigmoid(checkpoint, keys, vocab)
    keys.expect("expert_weights_norm", sigmoid)
    heads, rope_dim = keys.size("attention.head_count"), keys.size("rope.dimension_count")
    is_older = "blk.0.attn_kv_b.weight" in checkpoint.tensors and keys.get("attention.key_length_mla") is None
    suffix = "" if is_older else "_mla"  # of files whose keys and values are one matrix, and one KV head for each head
    key_dim, value_dim = (keys.size(f"attention.{part}_length{suffix}") for part in ("key", "value"))
    if key_dim <= rope_dim:
        raise BimetalError(f"{checkpoint.path}: {rope_dim} roped channels leave none of a key's {key_dim} for its rest")
    latent = keys.size("attention.kv_lora_rank")
    check_sizes(checkpoint, layers, heads, 1, heads * key_dim, heads * value_dim, latent + rope_dim)
    ffn = keys.size("expert_feed_forward_length")
    rope, score_factor = _gguf_rope(keys, rope_dim)
    return Config(
        vocab=vocab,
        hidden=keys.size("embedding_length"),
        layers=layers,
        dense_layers=keys.read("leading_dense_block_count", int),
        heads=heads,
        q_latent=keys.read("attention.q_lora_rank", int, 0),
        latent=latent,
        nope_dim=key_dim - rope_dim,
        rope_dim=rope_dim,
        value_dim=value_dim,
        rope=rope,
        ffn=keys.size("feed_forward_length"),
        experts=Experts(
            keys.size("expert_count"),
            keys.size("expert_used_count"),
            ffn,
            ffn * keys.size("expert_shared_count"),
            keys.positive("expert_weights_scale"),
        ),
        eps=keys.positive("attention.layer_norm_rms_epsilon"),
        latent_eps=keys.positive("attention.layer_norm_rms_epsilon"),
        context=keys.size("context_length"),
        tied="output.weight" not in checkpoint.tensors,
        score_factor=score_factor,
        sigmoid=sigmoid,
    )


def _gguf_sigmoid(checkpoint: Checkpoint, keys: Keys, vocab: int) -> bool:
    """Test whether a sigmoid chooses experts: as the file states, or because the router has biases."""
    stated = keys.get("expert_gating_func")
    if stated is None:
        return vocab == GLM_VOCAB or any(name.endswith("exp_probs_b.bias") for name in checkpoint.tensors)
    keys.expect("expert_gating_func", *GATINGS)
    return vocab == GLM_VOCAB or GATINGS[stated] == "sigmoid"


def _gguf_rope(keys: Keys, dim: int) -> tuple[Rope, float]:
    """Return the rope of `dim` channels, and YaRN's factor on scores: that of the rope's own magnitude is then 1."""
    rope = gguf_rope(keys, dim, None)
    if keys.get("rope.scaling.type") != "yarn":
        return rope, 1.0
    mscale = round(10 * keys.positive("rope.scaling.yarn_log_multiplier"), 6)  # a tenth of it is stored, in float32
    factor = yarn_magnitude(keys.positive("rope.scaling.factor"), mscale)
    return replace(rope, magnitude=1.0), factor**2


# -- weights -----------------------------------------------------------------------------------------------------------


def layout(c: Config, checkpoint: Checkpoint) -> Layout:
    moe_weights = sigmoid_moe_weights if c.sigmoid else probability_moe_weights
    return dense_first_layout(c, checkpoint, _attention_weights, moe_weights)


def dense_first_layout(
    c: Any,
    checkpoint: Checkpoint,
    mixer: Callable[[Any, Names], Table],
    moe_weights: Callable[..., Table] = sigmoid_moe_weights,
) -> Layout:
    """Describe a model whose first layers have a dense network, and the others experts.

    mixer        lists the other weights of a layer
    moe_weights  lists the weights of experts and their router
    """
    dialect = "gguf" if checkpoint.format == "gguf" else "hf"
    tensor = Names(dialect, "", checkpoint.tensors)
    top = top_weights(c, tensor)
    prefix = "blk." if dialect == "gguf" else "model.layers."
    layers = []
    for i in range(c.layers):
        tensor = Names(dialect, f"{prefix}{i}.", checkpoint.tensors)
        weights = partial(ffn_weights, ffn=c.ffn) if i < c.dense_layers else partial(moe_weights, e=c.experts)
        layers.append({**mixer(c, tensor), **weights(tensor, c.hidden, ranks=c.ranks)})
    return Layout(top, layers, partial(ignored, prefix, c.layers))


def mtp_weights(c: Config, tensor: Names) -> Table:
    """Return the layer of a multi-token-prediction block."""
    return {**_attention_weights(c, tensor), **sigmoid_moe_weights(tensor, c.hidden, c.experts, c.ranks)}


def check_mtp(checkpoint: Checkpoint) -> None:
    """Accept every layout: all of them store norm weights as they are multiplied."""


def _attention_weights(c: Config, tensor: Names) -> Table:
    H, R, N, P, V = c.heads, c.latent, c.nope_dim, c.rope_dim, c.value_dim
    half_split = np.arange(P).reshape(-1, 2).T.ravel()  # pairs (0, 1), (2, 3), ... to (j, j + P/2)
    q_rows = np.arange(H * (N + P)).reshape(H, N + P)[:, np.r_[:N, N + half_split]].ravel()
    if tensor.has("self_attn.kv_b_proj.weight") or tensor.has("attn_kv_b.weight"):
        fused = partial(tensor, "self_attn.kv_b_proj.weight", "attn_kv_b.weight")
        heads = by_rows(c.ranks.segment(H * (N + V)))
        k_up = fused((H, R, N), _always(lambda kv: _transposed(_head_rows(kv, H, slice(0, N)))), shard=heads)
        v_up = fused((H, V, R), _always(lambda kv: _head_rows(kv, H, slice(N, N + V))), shard=heads)
        k_up, v_up = (replace(part, part_of=(H * (N + V), R)) for part in (k_up, v_up))
    else:
        heads = by_rows(c.ranks.segment(H))
        k_up = tensor("self_attn.embed_q.weight", "attn_k_b.weight", (H, R, N), shard=heads)
        v_up = tensor("self_attn.unembed_out.weight", "attn_v_b.weight", (H, V, R), shard=heads)
    kv_down = tensor(
        "self_attn.kv_a_proj_with_mqa.weight",
        "attn_kv_a_mqa.weight",
        (R + P, c.hidden),
        _always(rows(np.r_[:R, R + half_split])),
    )
    q_up = tensor(
        "self_attn.q_b_proj.weight" if c.q_latent else "self_attn.q_proj.weight",
        "attn_q_b.weight" if c.q_latent else "attn_q.weight",
        (H * (N + P), c.q_latent or c.hidden),
        _always(rows(q_rows)),
        shard=by_rows(c.ranks.segment(H * (N + P))),
    )
    if c.q_latent:
        q_down = tensor("self_attn.q_a_proj.weight", "attn_q_a.weight", (c.q_latent, c.hidden))
        q_norm = tensor("self_attn.q_a_layernorm.weight", "attn_q_a_norm.weight", (c.q_latent,))
        down: Table = {"down_qkv": Matrix(q_down, kv_down), "q_norm": Vector(q_norm)}
    else:
        down = {"down_qkv": Matrix(kv_down)}
    return {
        "attn_norm": Vector(tensor("input_layernorm.weight", "attn_norm.weight", (c.hidden,))),
        **down,
        "q_up": Matrix(q_up),
        "kv_norm": Vector(tensor("self_attn.kv_a_layernorm.weight", "attn_kv_a_norm.weight", (R,))),
        "k_up": Matrix(k_up),
        "v_up": Matrix(v_up),
        "o": Matrix(
            tensor(
                "self_attn.o_proj.weight",
                "attn_output.weight",
                (c.hidden, H * V),
                shard=by_columns(c.ranks.segment(H * V)),
            )
        ),
        "ffn_norm": Vector(tensor("post_attention_layernorm.weight", "ffn_norm.weight", (c.hidden,))),
    }


def _always(fix: Fix) -> dict[str, Fix]:
    return {"hf": fix, "gguf": fix}


def _head_rows(kv: Tensor, heads: int, part: slice) -> Tensor:
    """Select rows `part` of every head: (heads * rows, columns) -> (heads, n, columns), still quantized."""

    def cut(tensor: Tensor) -> Tensor:
        data = tensor.data.reshape(heads, -1, tensor.data.shape[-1])[:, part]
        return replace(tensor, shape=(*data.shape[:2], tensor.shape[-1]), data=np.ascontiguousarray(data))

    return replace(cut(kv), scales=kv.scales and cut(kv.scales), biases=kv.biases and cut(kv.biases))


def _transposed(tensor: Tensor) -> Tensor:
    """Return the last two axes swapped; a quantized tensor becomes float32, because its blocks lie along the rows."""
    H, N, R = tensor.shape
    if tensor.type not in ("F32", "F16", "BF16"):
        return dense(tensor.name, dequantize(tensor).swapaxes(1, 2))
    items = tensor.data.reshape(H, N, R, -1).swapaxes(1, 2)
    return replace(tensor, shape=(H, R, N), data=np.ascontiguousarray(items).reshape(H, R, -1))


def ignored(prefix: str, layers: int, name: str) -> str | None:
    """Return why a tensor may be ignored: that of a layer after the model's own; None for others."""
    layer = name.removeprefix(prefix).split(".")[0] if name.startswith(prefix) else ""
    return "multi-token-prediction block, run with draft mtp" if layer.isdigit() and int(layer) >= layers else None


# -- the network -------------------------------------------------------------------------------------------------------


def state_spec(c: Config) -> list[LayerSpec]:
    return [mtp_spec(c)] * c.layers


def mtp_spec(c: Config) -> LayerSpec:
    """Return the state of the multi-token-prediction block's mixer: that of every layer."""
    return {"latent": LatentSpec(c.latent, c.rope_dim)}


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
    expand = c.expands(len(step), state.length)
    y = attention(ops, c, w, state[layer].latent, step, expand, ops.rms_norm(x, w.attn_norm, c.eps))
    return ops.add(x, ops.all_reduce(y))


def ffn(ops: Ops, c: Any, w: Any, layer: int, x: Array) -> Array:
    """Compute x (T, hidden) plus the output of the layer's feed-forward network."""
    z = ops.rms_norm(x, w.ffn_norm, c.eps)
    moe = sigmoid_moe if getattr(c, "sigmoid", True) else probability_moe
    y = swiglu_ffn(ops, w, z) if layer < c.dense_layers else moe(ops, c.experts, w, z)
    return ops.add(x, ops.all_reduce(y))


def write_past(ops: Ops, c: Config, w: Any, state: State, step: Step, layer: int, x: Array) -> None:
    """Write the rows of x (T, hidden) to the layer's state by running attention: no op writes latent rows alone."""
    mixed(ops, c, w, state, step, layer, x)


def attention(ops: Ops, c: Config, w: Any, state: Any, step: Step, expand: bool, x: Array) -> Array:
    """Compute multi-head latent attention in either form, for this rank's heads of x (T, hidden): (T, hidden)."""
    T, H, R, N, P, V = x.shape[0], c.heads, c.latent, c.nope_dim, c.rope_dim, c.value_dim
    down, end = linear(ops, x, w.down_qkv), c.q_latent
    of_queries = ops.rms_norm(down[:, :end], w.q_norm, c.latent_eps) if c.q_latent else x
    q = linear(ops, of_queries, w.q_up).reshape(T, H, N + P)
    q_nope, q_rope = q[:, :, :N], ops.rope(q[:, :, N:], step.positions, c.rope)
    latent = ops.rms_norm(down[:, end : end + R], w.kv_norm, c.latent_eps)
    k_rope = ops.rope(down[:, end + R :].reshape(T, 1, P), step.positions, c.rope).reshape(T, P)
    scale = c.score_factor * (N + P) ** -0.5
    if expand:
        o = ops.expanded_attention(q_nope, q_rope, latent, k_rope, LatentWeights(w.k_up, w.v_up), state, step, scale)
    else:
        o = ops.latent_attention(ops.head_linear(q_nope, w.k_up), q_rope, latent, k_rope, state, step, scale)
        o = ops.head_linear(o, w.v_up)
    return linear(ops, o.reshape(T, H * V), w.o)
