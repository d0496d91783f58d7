"""Tables of a DFlash draft's weights, by the names of safetensors, of llama.cpp and of lucebox."""

from functools import partial

import numpy as np

from common.checkpoint import Checkpoint
from common.models.blocks import ffn_weights
from common.models.dflash_config import Config
from common.weights import Layout, Matrix, Names, Stored, Table, Vector, columns, mapped, rows


def layout(c: Config, checkpoint: Checkpoint) -> Layout:
    gguf = checkpoint.format == "gguf"
    dialect = "gguf" if gguf else "hf"
    prefix = "model." if "model.fc.weight" in checkpoint.tensors else ""
    tensor, n = Names(dialect, prefix, checkpoint.tensors), len(c.taps)
    fc = _first(tensor, "fc.weight", "dflash.fc.weight", "dflash_fc.weight")
    context = _first(tensor, "enc.output_norm.weight", "dflash.hidden_norm.weight", "dflash_hidden_norm.weight")
    shape = (c.hidden, c.hidden)

    def own(name: str) -> Matrix | None:
        """Describe the embedding or head of GGUF files, which may have copies of the target's; None if missing."""
        return Matrix(tensor("", name, (c.vocab or 0, c.hidden))) if gguf and tensor.has(name) else None

    def markov(name: str) -> Matrix | None:
        return Matrix(tensor(f"markov_head.{name}", name, (c.vocab or 0, c.markov_rank))) if c.markov_rank else None

    top: Table = {
        **{
            f"fc_{i}": Matrix(
                Stored((prefix + fc,), shape, columns(i * c.hidden, c.hidden), part_of=(c.hidden, n * c.hidden))
            )
            for i in range(n)
        },
        **{
            f"tap_norm_{i}": Vector(tensor(f"aux_hidden_norms.{i}.weight", "", (c.hidden,)))
            for i in range(c.is_laguna * n)
        },
        "hidden_norm": Vector(tensor("hidden_norm.weight", context, (c.hidden,))),
        "norm": Vector(tensor("norm.weight", "output_norm.weight", (c.hidden,))),
        "embed": own("token_embd.weight"),
        "head": own("output.weight"),
        "markov_before": markov("markov_w1.weight"),
        "markov_after": markov("markov_w2.weight"),
        **_selector_weights(c, tensor),
    }
    layers = []
    for i in range(c.layers):
        tensor = Names(dialect, f"blk.{i}." if gguf else f"{prefix}layers.{i}.", checkpoint.tensors)
        layers.append(_layer_weights(c, tensor))
    return Layout(top, layers, lambda name: _ignored(name.removeprefix(prefix), c.markov_rank > 0 or c.first == 0))


def _selector_weights(c: Config, tensor: Names) -> Table:
    """List the selector's weights: a score is a row of `before`, scaled by the product with `hidden`, times `after`."""

    def matrix(hf: str, gguf: str, *shape: int) -> Matrix | None:
        return Matrix(tensor(f"candidate_selector.{hf}", f"selector_{gguf}.weight", shape)) if c.selector_rank else None

    return {
        "selector_before": matrix("predecessor_codebook", "predecessor", c.vocab or 0, c.selector_rank),
        "selector_after": matrix("successor_codebook", "successor", c.vocab or 0, c.selector_rank),
        "selector_hidden": matrix("hidden_projection.weight", "hidden", c.selector_rank, c.hidden),
    }


def _conv_weights(c: Config, tensor: Names, ours: str, hf: str) -> Table:
    """List the convolutions' weights around a sublayer: a matrix that computes taps per row, and two of fixed taps."""
    if not c.conv_taps:
        return {ours: None}
    own = tensor(
        f"{hf}_conv.kernel_projection.weight",
        f"{ours}_proj.weight",
        (2 * c.conv_taps * (c.hidden // c.conv_group), c.hidden),
    )
    shape, name = (c.conv_taps, c.hidden), tensor(f"{hf}_conv.base_kernel", f"{ours}_base", ()).names
    sides = [Vector(Stored(name, shape, mapped(partial(_side, i, shape)), (2, *shape))) for i in range(2)]
    return {ours: Matrix(own), f"{ours}_in": sides[0], f"{ours}_out": sides[1]}


def _side(side: int, shape: tuple[int, int], values: np.ndarray) -> np.ndarray:
    return values.reshape(2, *shape)[side]


def _ignored(name: str, is_dspark: bool) -> str | None:
    if name.endswith("rotary_emb.inv_freq"):
        return "rope frequencies"
    if is_dspark and name.startswith(("confidence_head.", "conf_proj.")):
        return "confidence head"
    return "a copy of the target's" if is_dspark and name in ("embed_tokens.weight", "lm_head.weight") else None


def _layer_weights(c: Config, tensor: Names) -> Table:
    H, K, D = c.heads, c.kv_heads, c.head_dim
    q: tuple[Stored, ...] = (tensor("self_attn.q_proj.weight", "attn_q.weight", (H * D, c.hidden)),)
    kv: tuple[Stored, ...] = (
        tensor("self_attn.k_proj.weight", "attn_k.weight", (K * D, c.hidden)),
        tensor("self_attn.v_proj.weight", "attn_v.weight", (K * D, c.hidden)),
    )
    if tensor.has("self_attn.qkv_proj.weight"):  # q, k and v in one matrix
        names, whole, end = (tensor.prefix + "self_attn.qkv_proj.weight",), ((H + 2 * K) * D, c.hidden), (H + 2 * K) * D
        q = (Stored(names, (H * D, c.hidden), rows(np.arange(H * D)), whole),)
        kv = (Stored(names, (2 * K * D, c.hidden), rows(np.arange(H * D, end)), whole),)
    return {
        "attn_norm": Vector(tensor("input_layernorm.weight", "attn_norm.weight", (c.hidden,))),
        "q": Matrix(*q),
        "kv": Matrix(*kv),
        "gate": Matrix(tensor("self_attn.g_proj.weight", "", (H, c.hidden))) if c.is_laguna else None,
        "o": Matrix(tensor("self_attn.o_proj.weight", "attn_output.weight", (c.hidden, H * D))),
        "q_norm": Vector(tensor("self_attn.q_norm.weight", "attn_q_norm.weight", (D,))),
        "k_norm": Vector(tensor("self_attn.k_norm.weight", "attn_k_norm.weight", (D,))),
        "ffn_norm": Vector(
            tensor(
                "post_attention_layernorm.weight",
                _first(tensor, "ffn_norm.weight", "post_attention_norm.weight"),
                (c.hidden,),
            )
        ),
        **ffn_weights(tensor, c.hidden, c.ffn),
        **_conv_weights(c, tensor, "attn_conv", "attention"),
        **_conv_weights(c, tensor, "ffn_conv", "mlp"),
    }


def _first(tensor: Names, *names: str) -> str:
    """Return the name that the file has, or the first."""
    return next((name for name in names if tensor.has(name)), names[0])
