"""Phi-3, 3.5, 4 and 4-mini (`phi3`): Llama's network, with q, k and v in one matrix, and gate and up in one.

LongRoPE (Ding et al., arXiv 2402.13753) has two sets of divisors of the rope frequencies, for sequences of up to the
length of the first training, and for longer ones. A running sequence cannot change from one to the other, because its
keys are stored with their rope: `for_context` chooses once, by the longest sequence that may come.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from common.checkpoint import Checkpoint
from common.config import Keys
from common.errors import BimetalError
from common.models import llama
from common.models.blocks import gguf_rope, head_sizes, hf_rope, top_weights
from common.ops import Rope
from common.quants import dequantize
from common.shards import by_columns, by_rows
from common.tensors import Tensor
from common.weights import Layout, Matrix, Names, Table, Vector

KINDS = ("longrope", "su")  # names of LongRoPE; the second is older
ORIGINAL = "original_max_position_embeddings"
ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "attention_factor", ORIGINAL}
ROPE_KEYS |= {"long_factor", "short_factor"}
FACTORS = {"long": "rope_factors_long.weight", "short": "rope_factors_short.weight"}  # tensors of GGUF files


@dataclass(frozen=True)
class Config(llama.Config):
    """A configuration whose `rope` is that of sequences longer than `original_context`.

    short_rope  of the others; None: there is one rope
    """

    short_rope: Rope | None = None
    original_context: int = 0


block, for_rank, forward, state_spec = llama.block, llama.for_rank, llama.forward, llama.state_spec


def for_context(c: Config, tokens: int) -> Config:
    """Return the configuration for sequences of at most `tokens` tokens."""
    return c if c.short_rope is None or tokens > c.original_context else replace(c, rope=c.short_rope)


# -- configuration -----------------------------------------------------------------------------------------------------


def read_config(checkpoint: Checkpoint) -> Config:
    return _gguf_config(checkpoint) if checkpoint.format == "gguf" else _hf_config(checkpoint)


def _hf_config(checkpoint: Checkpoint) -> Config:
    keys = Keys(checkpoint.config, f"{checkpoint.path} config.json")
    keys.expect("hidden_act", "silu")
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        keys.expect(key, False)
    layers = keys.size("num_hidden_layers")
    sizes = head_sizes(checkpoint, keys, layers)
    context = keys.size("max_position_embeddings")
    has_head = "lm_head.weight" in checkpoint.tensors
    return Config(
        architecture="phi3",
        vocab=keys.size("vocab_size"),
        **sizes,
        layers=layers,
        ffn=keys.size("intermediate_size"),
        experts=None,
        eps=keys.positive("rms_norm_eps", 1e-5),
        context=context,
        tied=not has_head and keys.read("tie_word_embeddings", bool, False),
        norms_heads=False,
        has_biases=False,
        window=llama.read_window(keys, "sliding_window", context),
        **_hf_ropes(keys, sizes["head_dim"], context),
    )


def _hf_ropes(keys: Keys, head_dim: int, context: int) -> dict[str, Any]:
    """Read the ropes, and the longest sequence of the second; other ropes than LongRoPE as `hf_rope` reads them."""
    group = "rope_parameters" if keys.read("rope_parameters", dict, {}) else "rope_scaling"
    share = keys.positive(f"{group}.partial_rotary_factor", keys.positive("partial_rotary_factor", 1.0))
    dim = int(head_dim * share)
    if (keys.get(f"{group}.rope_type") or keys.get(f"{group}.type")) not in KINDS:
        return {"rope": hf_rope(keys, dim)}
    original = keys.size(ORIGINAL if keys.get(f"{group}.{ORIGINAL}") is None else f"{group}.{ORIGINAL}")
    factor = keys.positive(f"{group}.factor", context / original)
    magnitude = keys.positive(f"{group}.attention_factor", _magnitude(factor, original))
    theta = keys.positive("rope_parameters.rope_theta", keys.positive("rope_theta", 10000.0))
    plain = hf_rope(Keys({"rope_theta": theta}, keys.where), dim)
    if unknown := sorted(keys.read(group, dict).keys() - ROPE_KEYS):
        raise BimetalError(f"{keys.where}: {group}.{unknown[0]} is not supported")
    factors = {name: keys.read(f"{group}.{name}_factor", list) for name in FACTORS}
    return _ropes(keys.where, plain, factors, magnitude, original)


def _gguf_config(checkpoint: Checkpoint) -> Config:
    keys = Keys(checkpoint.config, str(checkpoint.path), prefix="phi3.", nested=False)
    layers = keys.size("block_count")
    sizes = head_sizes(checkpoint, keys, layers)
    table = checkpoint.tensors.get("token_embd.weight")
    context = keys.size("context_length")
    return Config(
        architecture="phi3",
        vocab=table.shape[0] if table and table.shape else keys.size("vocab_size"),
        **sizes,
        layers=layers,
        ffn=keys.size("feed_forward_length"),
        experts=None,
        eps=keys.positive("attention.layer_norm_rms_epsilon"),
        context=context,
        tied="output.weight" not in checkpoint.tensors,
        norms_heads=False,
        has_biases=False,
        window=llama.read_gguf_window(keys, context),
        **_gguf_ropes(keys, checkpoint.tensors, sizes["head_dim"], context),
    )


def _gguf_ropes(keys: Keys, tensors: dict[str, Tensor], head_dim: int, context: int) -> dict[str, Any]:
    plain = gguf_rope(keys, keys.size("rope.dimension_count", head_dim), None)
    if not set(FACTORS.values()) & tensors.keys():
        keys.expect("rope.scaling.attn_factor", 1.0)
        return {"rope": plain}
    if lacking := [name for name in FACTORS.values() if name not in tensors]:
        raise BimetalError(f"{keys.where} lacks tensor {lacking[0]}")
    original = keys.size("rope.scaling.original_context_length", context)
    magnitude = keys.positive("rope.scaling.attn_factor", _magnitude(context / original, original))
    factors = {name: dequantize(tensors[tensor]).ravel().tolist() for name, tensor in FACTORS.items()}
    return _ropes(keys.where, plain, factors, magnitude, original)


def _ropes(where: str, plain: Rope, factors: dict[str, list[Any]], magnitude: float, original: int) -> dict[str, Any]:
    """Return fields of Config for a rope whose frequencies are divided by one of two lists of factors."""
    ropes = {}
    for name, divisors in factors.items():
        frequencies = plain.frequencies
        if len(divisors) != len(frequencies) or not all(map(_is_divisor, divisors)):
            raise BimetalError(f"{where}: the {name} factors of the rope must be {len(frequencies)} numbers above 0")
        ropes[name] = Rope(tuple(f / d for f, d in zip(frequencies, divisors, strict=True)), magnitude)
    return {"rope": ropes["long"], "short_rope": ropes["short"], "original_context": original}


def _is_divisor(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _magnitude(factor: float, original: int) -> float:
    """Return the factor on roped channels of a context that is extended by `factor`."""
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0


# -- weights -----------------------------------------------------------------------------------------------------------


def layout(c: Config, checkpoint: Checkpoint) -> Layout:
    dialect = "gguf" if checkpoint.format == "gguf" else "hf"
    tensor = Names(dialect, "", checkpoint.tensors)
    top = top_weights(c, tensor)
    prefix = "blk.{}." if dialect == "gguf" else "model.layers.{}."
    names = [Names(dialect, prefix.format(i), checkpoint.tensors) for i in range(c.layers)]
    return Layout(top, [_layer_weights(c, each) for each in names], _ignored)


def _layer_weights(c: Config, tensor: Names) -> Table:
    H, K, D, F = c.heads, c.kv_heads, c.head_dim, c.ffn
    heads, kv_heads, channels = c.ranks.segment(H * D), c.kv_ranks.segment(K * D), c.ranks.segment(F)
    qkv, gate_up = ((H + 2 * K) * D, c.hidden), (2 * F, c.hidden)
    return {
        "attn_norm": Vector(tensor("input_layernorm.weight", "attn_norm.weight", (c.hidden,))),
        "qkv": Matrix(
            tensor("self_attn.qkv_proj.weight", "attn_qkv.weight", qkv, shard=by_rows(heads, kv_heads, kv_heads))
        ),
        "o": Matrix(
            tensor("self_attn.o_proj.weight", "attn_output.weight", (c.hidden, H * D), shard=by_columns(heads))
        ),
        "ffn_norm": Vector(tensor("post_attention_layernorm.weight", "ffn_norm.weight", (c.hidden,))),
        "gate_up": Matrix(
            tensor("mlp.gate_up_proj.weight", "ffn_up.weight", gate_up, shard=by_rows(channels, channels))
        ),
        "down": Matrix(tensor("mlp.down_proj.weight", "ffn_down.weight", (c.hidden, F), shard=by_columns(channels))),
    }


def _ignored(name: str) -> str | None:
    if name in FACTORS.values():
        return "rope divisors, read with the configuration"
    return "rope frequencies, computed from the configuration" if name.endswith("rotary_emb.inv_freq") else None
