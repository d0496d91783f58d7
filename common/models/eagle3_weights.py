"""Tables of an EAGLE-3 draft's weights, by the names of each kind of file."""

import numpy as np

from common.checkpoint import Checkpoint
from common.errors import BimetalError
from common.models.blocks import ffn_weights
from common.models.eagle3_config import Config, is_map, layer_of, prefix_of
from common.models.target import Target
from common.quants import dequantize
from common.tensors import Tensor, same_axes
from common.weights import Fix, Layout, Matrix, Names, Stored, Table, Vector, columns, composed, dense, rows


def layout(checkpoint: Checkpoint, c: Config, target: Target) -> Layout:
    gguf = checkpoint.format == "gguf"
    dialect, n = "gguf" if gguf else "hf", len(c.taps)
    tensor = Names(dialect, "" if gguf else prefix_of(checkpoint), checkpoint.tensors)
    head = tensor if tensor.has("lm_head.weight") else Names(dialect, "", checkpoint.tensors)
    has_embed = tensor.has("token_embd.weight" if gguf else "embed_tokens.weight")
    has_head = head.has("output.weight" if gguf else "lm_head.weight")
    if c.hidden != target.hidden and not (has_embed and has_head):
        raise BimetalError(
            f"{checkpoint.path} has no {'head' if has_embed else 'embedding'} of its own, and the model's has "
            f"{target.hidden} channels; the draft has {c.hidden}"
        )
    if not has_head and c.vocab != target.vocab:
        raise BimetalError(f"{checkpoint.path} has no head of its own for its {c.vocab} tokens")
    fused = tensor.prefix + ("enc.output_norm.weight" if gguf else "input_norm.weight")
    top: Table = {
        **{f"fc_{i}": Matrix(_fc(checkpoint, c, target, tensor.prefix, fused, i)) for i in range(n)},
        **{
            f"tap_norm_{i}": Vector(tensor(f"fc_norm.{i}.weight", f"fc_norm.{i}.weight", (target.hidden,)))
            for i in range(n * c.norms_taps)
        },
        "norm": Vector(tensor("norm.weight", "output_norm.weight", (c.hidden,))),
        "embed": Matrix(tensor("embed_tokens.weight", "token_embd.weight", (target.vocab, c.hidden)))
        if has_embed
        else None,
        "head": Matrix(head("lm_head.weight", "output.weight", (c.vocab, c.hidden))) if has_head else None,
    }

    def ignored(name: str) -> str | None:
        if is_map(name, "d2t") or is_map(name, "t2d"):
            return "maps between the vocabularies, of which d2t is read with the configuration"
        if name.endswith("rotary_emb.inv_freq") or name == "rope_freqs.weight":
            return "rope frequencies"
        return "folded into fc" if c.norms_fused and name == fused else None

    return Layout(top, [_layer(c, Names(dialect, layer_of(checkpoint), checkpoint.tensors))], ignored)


def _fc(checkpoint: Checkpoint, c: Config, target: Target, prefix: str, fused: str, i: int) -> Stored:
    """Return the columns of `fc` for tap i, times the weight of a norm over all taps, where there is one.

    The norm's factor per row is left out: the hidden state's own norm cancels it.
    """
    start, whole = i * target.hidden, (c.hidden, len(c.taps) * target.hidden)
    fix = columns(start, target.hidden)
    if c.norms_fused:
        fix = _scaled_columns(checkpoint, fused, fix, start, whole[1])
    return Stored((f"{prefix}fc.weight",), (c.hidden, target.hidden), fix, part_of=whole)


def _scaled_columns(checkpoint: Checkpoint, name: str, cut: Fix, start: int, width: int) -> Fix:
    tensor = checkpoint.tensors.get(name)
    if tensor is None:
        raise BimetalError(f"{checkpoint.path} lacks tensor {name}")
    if not same_axes(tensor.shape, (width,)):
        raise BimetalError(f"{name}: shape {tensor.shape}, the model's configuration says {(width,)}")
    weight = dequantize(tensor).ravel()

    def fix(tensor: Tensor) -> Tensor:
        part = dequantize(cut(tensor))
        return dense(tensor.name, part * weight[start : start + part.shape[-1]])

    return fix


def _layer(c: Config, tensor: Names) -> Table:
    """Return the weights of the layer, whose q, k and v read the embedding's half and the hidden state's half."""
    H, K, D = c.heads, c.kv_heads, c.head_dim

    def half(i: int, hf: str, gguf: str, heads: int, roped: bool) -> Stored:
        fixes = [columns(i * c.hidden, c.hidden)]
        if roped and tensor.dialect == "gguf":  # GGUF stores a rope pair as adjacent rows; here a pair is (j, j + D/2)
            fixes.append(rows(np.arange(heads * D).reshape(heads, D // 2, 2).swapaxes(1, 2).ravel()))
        return Stored(
            tensor(hf, gguf, ()).names, (heads * D, c.hidden), composed(*fixes), part_of=(heads * D, 2 * c.hidden)
        )

    table: dict[str, Matrix | Vector | None] = {
        "attn_norm": Vector(tensor("input_layernorm.weight", "attn_norm.weight", (c.hidden,))),
        "hidden_norm": Vector(tensor("hidden_norm.weight", "attn_norm_2.weight", (c.hidden,))),
    }
    for i, part in enumerate(("embed", "hidden")):
        table[f"q_{part}"] = Matrix(half(i, "self_attn.q_proj.weight", "attn_q.weight", H, True))
        table[f"kv_{part}"] = Matrix(
            half(i, "self_attn.k_proj.weight", "attn_k.weight", K, True),
            half(i, "self_attn.v_proj.weight", "attn_v.weight", K, False),
        )
    for name in "qk" if c.norms_heads else "":
        table[f"{name}_norm"] = Vector(tensor(f"self_attn.{name}_norm.weight", f"attn_{name}_norm.weight", (D,)))
    return table | {
        "o": Matrix(tensor("self_attn.o_proj.weight", "attn_output.weight", (c.hidden, H * D))),
        "ffn_norm": Vector(tensor("post_attention_layernorm.weight", "ffn_norm.weight", (c.hidden,))),
        **ffn_weights(tensor, c.hidden, c.ffn),
    }
