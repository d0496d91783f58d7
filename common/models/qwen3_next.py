"""Weights of Qwen3-Next's Gated DeltaNet layers, the rest of which is as in `qwen35.py`.

Files as trained, and mlx-lm's, store the rows of all projections key head by key head: its q, its k, and v and z of its
value heads; in a second matrix b and a of its value heads. GGUF files have q, k and v of all heads in one matrix and z
in another, older ones all four as trained; b and a are as trained in both.
"""

from typing import Any

import numpy as np

from common.models.qwen35_config import Config
from common.shards import by_columns, by_rows
from common.weights import Matrix, Names, Stored, Table, Vector, mapped, rows


def delta_weights(c: Config, tensor: Names) -> Table:
    """List the weights of a Gated DeltaNet layer, value heads grouped by key head as stored."""
    keys, values = c.key_heads * c.key_dim, c.value_heads * c.value_dim
    channels, of_heads = 2 * keys + values, c.ranks.segment(c.value_heads)
    of_keys, of_values = c.ranks.segment(keys), c.ranks.segment(values)
    qkv_shard = by_rows(of_keys, of_keys, of_values)
    taps = {  # a depthwise convolution's weight has an axis of length 1
        "hf": mapped(lambda conv: conv.squeeze(1)),
        "mlx": mapped(lambda conv: conv.squeeze(2)),
    }
    decay = {dialect: mapped(lambda A_log: -np.exp(A_log)) for dialect in ("hf", "mlx")}
    head_shard, heads = by_rows(of_heads), (c.value_heads,)
    return {
        "qkvzba": Matrix(*_qkvz(c, tensor), _ba(c, tensor)),
        "taps": Vector(
            tensor("linear_attn.conv1d.weight", "ssm_conv1d.weight", (channels, c.taps), taps, shard=qkv_shard)
        ),
        "decay": Vector(tensor("linear_attn.A_log", "ssm_a", heads, decay, shard=head_shard)),
        "dt_bias": Vector(tensor("linear_attn.dt_bias", "ssm_dt.bias", heads, shard=head_shard)),
        "delta_norm": Vector(tensor("linear_attn.norm.weight", "ssm_norm.weight", (c.value_dim,))),
        "out": Matrix(
            tensor("linear_attn.out_proj.weight", "ssm_out.weight", (c.hidden, values), shard=by_columns(of_values))
        ),
    }


def _qkvz(c: Config, tensor: Names) -> tuple[Stored, Stored]:
    """Return q, k and v of all heads, and z of all heads."""
    keys, values = c.key_heads * c.key_dim, c.value_heads * c.value_dim
    if tensor.dialect == "gguf" and not tensor.has("ssm_in.weight"):
        of_keys, of_values = c.ranks.segment(keys), c.ranks.segment(values)
        return (
            tensor("", "attn_qkv.weight", (2 * keys + values, c.hidden), shard=by_rows(of_keys, of_keys, of_values)),
            tensor("", "attn_gate.weight", (values, c.hidden), shard=by_rows(of_values)),
        )
    of_key = values // c.key_heads  # rows of v, and of z, of a key head
    parts = np.split(_by_key_head(c, 2 * c.key_dim + 2 * of_key), np.cumsum([c.key_dim, c.key_dim, of_key]), axis=1)
    q, k, v, z = (part.ravel() for part in parts)

    def part(index: np.ndarray) -> Stored:
        whole = (2 * keys + 2 * values, c.hidden)
        shard = by_rows(c.ranks.segment(whole[0]))
        name = "ssm_in.weight" if tensor.dialect == "gguf" else "linear_attn.in_proj_qkvz.weight"
        return Stored((tensor.prefix + name,), (len(index), c.hidden), rows(index), part_of=whole, shard=shard)

    return part(np.concatenate([q, k, v])), part(z)


def _ba(c: Config, tensor: Names) -> Stored:
    """Return b of all value heads, then a."""
    b, a = np.split(_by_key_head(c, 2 * c.value_heads // c.key_heads), 2, axis=1)
    order: dict[str, Any] = dict.fromkeys(("hf", "mlx", "gguf"), rows(np.concatenate([b.ravel(), a.ravel()])))
    shape = (2 * c.value_heads, c.hidden)
    shard = by_rows(c.ranks.segment(shape[0]))
    return tensor("linear_attn.in_proj_ba.weight", "ssm_ba.weight", shape, order, shard=shard)


def _by_key_head(c: Config, count: int) -> np.ndarray:
    """Return the numbers of rows that are stored key head by key head, `count` of each: (key heads, count)."""
    return np.arange(c.key_heads * count).reshape(c.key_heads, count)
