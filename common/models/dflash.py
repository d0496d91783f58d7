"""The DFlash draft (Chen et al., arXiv 2602.06036): a block of tokens in one pass, from hidden states of the target.

Each layer's attention reads keys and values made of the target's hidden states at every committed position, then those
of the block: the newest token and a mask for every token after it. Row i of the block predicts the token at its own
position. Embedding and head are the target's own. A target and its draft share one state, so that one commit moves
both, and the draft needs no prompt of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from common.checkpoint import Checkpoint
from common.config import Keys
from common.errors import BimetalError
from common.models import Model
from common.models.blocks import check_sizes, ffn_weights, gguf_rope, hf_rope, swiglu_ffn
from common.models.pair import Pair
from common.ops import Array, Ops, Rope
from common.step import State, Step
from common.storage import KVSpec, LayerSpec
from common.weights import Layout, Matrix, Names, Stored, Table, Vector, columns, load_weights, rows

NAME, LAGUNA = "DFlashDraftModel", "DFlashLagunaForCausalLM"
CONTEXT_ROWS = 4096  # that a layer without a window keeps: more than drafts are trained on, little beside the target's
CHAINS = (3, 7, 11, 15, 23, 31)  # depths of a chain among which a budget is chosen, beside the whole block
KINDS = ("full_attention", "sliding_attention")
OTHER_ALGORITHMS = ("markov_rank", "selector_rank", "selector_top_k", "conv_kernel_size")
UNSUPPORTED = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping", "attention_value_scale")


@dataclass(frozen=True)
class Config:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    eps: float
    rope: Rope
    windows: tuple[int | None, ...]  # per layer: positions that a row sees, its own included; None: all
    is_causal: tuple[bool, ...]  # per layer: rows of the block see earlier ones alone
    block: int  # tokens of a block, the known one included
    mask_token: int
    taps: tuple[int, ...]  # target layers whose output the draft reads, in the order of the columns of `fc`
    vocab: int | None  # of the target, where the file says it
    target_layers: int | None
    is_laguna: bool = False  # a norm per tap, the context through each layer's norm, gated attention

    @property
    def layers(self) -> int:
        return len(self.windows)


# -- configuration -----------------------------------------------------------------------------------------------------


def read_config(checkpoint: Checkpoint, target: Model) -> Config:
    """The draft's configuration, checked against the target that it is to serve."""
    for name in checkpoint.tensors:
        if name.rpartition(".")[2] in ("d2t", "t2d"):
            raise BimetalError(f"{checkpoint.path} has a vocabulary of its own ({name}), which is not supported")
    c = (_gguf_config if checkpoint.format == "gguf" else _hf_config)(checkpoint, target)
    _check_belongs(c, checkpoint.path, target)
    return c


def _hf_config(checkpoint: Checkpoint, target: Model) -> Config:
    keys = Keys(checkpoint.config, f"{checkpoint.path} config.json")
    names = keys.read("architectures", list)
    if names not in ([NAME], [LAGUNA]):
        raise BimetalError(f"{keys.where}: architectures is {names}; supported as a draft: {NAME}, {LAGUNA}")
    vocab = keys.read("vocab_size", int, 0) or None
    keys.expect("draft_vocab_size", vocab)
    keys.expect("gating", "per-head")
    keys.expect("hidden_act", "silu")
    keys.expect("attention_bias", False)
    keys.expect("partial_rotary_factor", 1.0)
    keys.expect("dflash_config.use_swa", False)
    for key in (*OTHER_ALGORITHMS, *UNSUPPORTED):
        for place in (key, f"dflash_config.{key}"):
            if keys.get(place) is not None:
                raise BimetalError(f"{keys.where}: {place} belongs to another kind of draft, which is not supported")
    layers, heads = keys.size("num_hidden_layers"), keys.size("num_attention_heads")
    head_dim, kv_heads = keys.size("head_dim"), keys.size("num_key_value_heads", heads)
    check_sizes(checkpoint, layers, heads, kv_heads, heads * head_dim)
    kinds = keys.read("layer_types", list, ["full_attention"] * layers)
    if len(kinds) != layers or set(kinds) - set(KINDS):
        raise BimetalError(f"{keys.where}: layer_types must name {' or '.join(KINDS)} for {layers} layers")
    slides = [kind == "sliding_attention" for kind in kinds]
    has_window = keys.read("use_sliding_window", bool, True)
    causal = keys.flag("is_causal" if keys.flag("dflash_config.causal") is None else "dflash_config.causal")

    def either(key: str) -> str:
        return key if keys.get(key) is not None else f"dflash_config.{key}"

    return Config(
        hidden=keys.size("hidden_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=keys.size("intermediate_size"),
        eps=keys.positive("rms_norm_eps", 1e-6),
        rope=hf_rope(keys, head_dim),
        windows=tuple(keys.size("sliding_window") if slide and has_window else None for slide in slides),
        is_causal=tuple(slides) if causal is None else (causal,) * layers,
        block=keys.size(either("block_size")),
        mask_token=keys.read(either("mask_token_id"), int),
        taps=_taps(keys.where, keys.read(either("target_layer_ids"), list, []), 0) or _default_taps(checkpoint, target),
        vocab=vocab,
        target_layers=keys.read(either("num_target_layers"), int, 0) or None,
        is_laguna=names == [LAGUNA],
    )


def _gguf_config(checkpoint: Checkpoint, target: Model) -> Config:
    """Metadata as llama.cpp writes them (`dflash`), or as lucebox does (`dflash-draft`, `qwen35-dflash-draft`)."""
    architecture = str(checkpoint.config.get("general.architecture"))
    upstream = architecture == "dflash"
    if not upstream and not architecture.endswith("dflash-draft"):
        raise BimetalError(f"{checkpoint.path}: general.architecture is {architecture!r}, which is no DFlash draft")
    keys = Keys(checkpoint.config, str(checkpoint.path), prefix=architecture + ".", nested=False)
    inner = "" if upstream else "dflash."
    for key in (*OTHER_ALGORITHMS, *UNSUPPORTED, "dspark.enabled", "dspark.markov_rank", "laguna"):
        for place in (key, f"dflash.{key}"):
            if keys.get(place):
                raise BimetalError(
                    f"{keys.where}: {keys.prefix}{place} belongs to another kind of draft, which is not supported"
                )
    layers, heads = keys.size("block_count"), keys.size("attention.head_count")
    head_dim, kv_heads = keys.size("attention.key_length"), keys.size("attention.head_count_kv", heads)
    check_sizes(checkpoint, layers, heads, kv_heads, heads * head_dim)
    keys.expect("attention.value_length", head_dim)
    window = keys.read("attention.sliding_window", int, 0)
    pattern = keys.read("attention.sliding_window_pattern", list, [window > 0] * layers)
    if len(pattern) < layers:
        raise BimetalError(f"{keys.where}: {keys.prefix}attention.sliding_window_pattern covers {len(pattern)} layers")
    slides = [window > 0 and bool(slide) for slide in pattern[:layers]]
    causal = keys.flag("attention.causal")
    listed = keys.read("target_layers" if upstream else "dflash.target_layer_ids", list, [])
    mask = checkpoint.config.get("tokenizer.ggml.mask_token_id")
    tokens = checkpoint.config.get("tokenizer.ggml.tokens")
    return Config(
        hidden=keys.size("embedding_length"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=keys.size("feed_forward_length"),
        eps=keys.positive("attention.layer_norm_rms_epsilon", 1e-6),
        rope=gguf_rope(keys, head_dim, None),
        windows=tuple(window if slide else None for slide in slides),
        is_causal=tuple(slides) if causal is None else (causal,) * layers,
        block=keys.size(f"{inner}block_size"),
        mask_token=mask if isinstance(mask, int) else keys.read(f"{inner}mask_token_id", int),
        taps=_taps(keys.where, listed, int(upstream)) or _default_taps(checkpoint, target),  # it counts inputs
        vocab=len(tokens) if isinstance(tokens, list) else keys.read("vocab_size", int, 0) or None,
        target_layers=None,
    )


def _taps(where: str, listed: list[Any], first: int) -> tuple[int, ...]:
    """Layer ids from 0, in the order in which a file lists them, counted there from `first`."""
    if any(type(i) is not int or i < first for i in listed) or len(set(listed)) < len(listed):
        raise BimetalError(f"{where}: {listed} are not the numbers of different target layers")
    return tuple(i - first for i in listed)


def _default_taps(checkpoint: Checkpoint, target: Model) -> tuple[int, ...]:
    """As many layers as `fc` has room for, from the second to the third from the end."""
    fc = next((t for name, t in checkpoint.tensors.items() if name.endswith("fc.weight")), None)
    layers, n = len(target.layout.layers), fc.shape[-1] // target.config.hidden if fc is not None else 0
    return (layers // 2,) if n == 1 else tuple(round(1 + i * (layers - 4) / (n - 1)) for i in range(n))


def _check_belongs(c: Config, path: Path, target: Model) -> None:
    layers = len(target.layout.layers)
    for what, drafts, targets in (
        ("hidden size", c.hidden, target.config.hidden),
        ("vocabulary", c.vocab or target.config.vocab, target.config.vocab),
        ("number of target layers", c.target_layers or layers, layers),
    ):
        if drafts != targets:
            raise BimetalError(f"{path} is a draft for another model: its {what} is {drafts}, the model's {targets}")
    if not c.taps or max(c.taps) >= layers:
        raise BimetalError(f"{path} is a draft for another model: it reads layers {c.taps}, the model has {layers}")
    if not 0 <= c.mask_token < target.config.vocab:
        raise BimetalError(f"{path}: mask token {c.mask_token} is outside the vocabulary of {target.config.vocab}")
    if c.block < 2:
        raise BimetalError(f"{path}: block_size is {c.block}; a block has the known token and at least one more")
    for window, is_causal in zip(c.windows, c.is_causal, strict=True):
        if window is not None and window < c.block and not is_causal:
            raise BimetalError(f"{path}: sliding_window is {window}; a block of {c.block} tokens must fit in it")


# -- weights -----------------------------------------------------------------------------------------------------------


def layout(c: Config, checkpoint: Checkpoint) -> Layout:
    gguf = checkpoint.format == "gguf"
    dialect = "gguf" if gguf else "hf"
    prefix = "model." if "model.fc.weight" in checkpoint.tensors else ""
    at, n = Names(dialect, prefix, checkpoint.tensors), len(c.taps)
    fc = _first(at, "fc.weight", "dflash.fc.weight", "dflash_fc.weight")
    context = _first(at, "enc.output_norm.weight", "dflash.hidden_norm.weight", "dflash_hidden_norm.weight")
    shape = (c.hidden, c.hidden)
    top: Table = {
        **{
            f"fc_{i}": Matrix(
                Stored((prefix + fc,), shape, columns(i * c.hidden, c.hidden), part_of=(c.hidden, n * c.hidden))
            )
            for i in range(n)
        },
        **{
            f"tap_norm_{i}": Vector(at(f"aux_hidden_norms.{i}.weight", "", (c.hidden,))) for i in range(c.is_laguna * n)
        },
        "hidden_norm": Vector(at("hidden_norm.weight", context, (c.hidden,))),
        "norm": Vector(at("norm.weight", "output_norm.weight", (c.hidden,))),
    }
    layers = []
    for i in range(c.layers):
        at = Names(dialect, f"blk.{i}." if gguf else f"{prefix}layers.{i}.", checkpoint.tensors)
        layers.append(_layer_weights(c, at))
    return Layout(top, layers, lambda name: "rope frequencies" if name.endswith("rotary_emb.inv_freq") else None)


def _layer_weights(c: Config, at: Names) -> Table:
    H, K, D = c.heads, c.kv_heads, c.head_dim
    q: tuple[Stored, ...] = (at("self_attn.q_proj.weight", "attn_q.weight", (H * D, c.hidden)),)
    kv: tuple[Stored, ...] = (
        at("self_attn.k_proj.weight", "attn_k.weight", (K * D, c.hidden)),
        at("self_attn.v_proj.weight", "attn_v.weight", (K * D, c.hidden)),
    )
    if at.has("self_attn.qkv_proj.weight"):  # the three in one
        names, whole, end = (at.prefix + "self_attn.qkv_proj.weight",), ((H + 2 * K) * D, c.hidden), (H + 2 * K) * D
        q = (Stored(names, (H * D, c.hidden), rows(np.arange(H * D)), whole),)
        kv = (Stored(names, (2 * K * D, c.hidden), rows(np.arange(H * D, end)), whole),)
    return {
        "attn_norm": Vector(at("input_layernorm.weight", "attn_norm.weight", (c.hidden,))),
        "q": Matrix(*q),
        "kv": Matrix(*kv),
        "gate": Matrix(at("self_attn.g_proj.weight", "", (H, c.hidden))) if c.is_laguna else None,
        "o": Matrix(at("self_attn.o_proj.weight", "attn_output.weight", (c.hidden, H * D))),
        "q_norm": Vector(at("self_attn.q_norm.weight", "attn_q_norm.weight", (D,))),
        "k_norm": Vector(at("self_attn.k_norm.weight", "attn_k_norm.weight", (D,))),
        "ffn_norm": Vector(
            at(
                "post_attention_layernorm.weight",
                _first(at, "ffn_norm.weight", "post_attention_norm.weight"),
                (c.hidden,),
            )
        ),
        **ffn_weights(at, c.hidden, c.ffn),
    }


def _first(at: Names, *names: str) -> str:
    """The name that the file has, or the first."""
    return next((name for name in names if at.has(name)), names[0])


# -- the network -------------------------------------------------------------------------------------------------------


def state_spec(c: Config) -> list[LayerSpec]:
    return [{"kv": KVSpec(c.kv_heads, c.head_dim, c.head_dim, window or CONTEXT_ROWS)} for window in c.windows]


def write_context(ops: Ops, c: Config, w: Any, states: Sequence[Any], step: Step, features: Sequence[Array]) -> None:
    """Write the draft's keys and values of the step's rows, from hidden states (T, hidden) of the layers `c.taps`."""
    x: Array = None
    for i, feature in enumerate(features):
        if c.is_laguna:
            feature = ops.rms_norm(feature, getattr(w, f"tap_norm_{i}"), c.eps)
        part = ops.linear(feature, getattr(w, f"fc_{i}"))
        x = part if x is None else ops.add(x, part)
    x = ops.rms_norm(x, w.hidden_norm, c.eps)
    for layer, state in zip(w.layers, states, strict=True):
        k, v = _keys_values(ops, c, layer, step, ops.rms_norm(x, layer.attn_norm, c.eps) if c.is_laguna else x)
        ops.write_kv(k, v, state.kv, step)


def forward(ops: Ops, c: Config, w: Any, embed: Any, head: Any, states: Sequence[Any], step: Step, first: int) -> Array:
    """The logits (block - 1, vocab) of the masked rows of a block; `first` is the first layer's number in the state."""
    x = ops.embed(embed, step.tokens)
    for i, (layer, state) in enumerate(zip(w.layers, states, strict=True)):
        x = ops.scope(first + i, partial(block, ops, c, layer, state, step, i), x)
    return ops.linear(ops.rms_norm(x[1:], w.norm, c.eps), head)


def block(ops: Ops, c: Config, w: Any, state: Any, step: Step, layer: int, x: Array) -> Array:
    x = ops.add(x, attention(ops, c, w, state.kv, step, layer, ops.rms_norm(x, w.attn_norm, c.eps)))
    return ops.add(x, swiglu_ffn(ops, w, ops.rms_norm(x, w.ffn_norm, c.eps)))


def attention(ops: Ops, c: Config, w: Any, kv: Any, step: Step, layer: int, x: Array) -> Array:
    """x (T, hidden) -> (T, hidden)"""
    T, H, D = x.shape[0], c.heads, c.head_dim
    q = ops.norm_rope(ops.linear(x, w.q).reshape(T, H, D), w.q_norm, step.positions, c.rope, c.eps)
    k, v = _keys_values(ops, c, w, step, x)
    window = c.windows[layer] or CONTEXT_ROWS
    o = ops.attention(q, k, v, kv, step, scale=D**-0.5, window=window, causal=c.is_causal[layer])
    if w.gate is not None:
        o = ops.mul_softplus(o, ops.linear(x, w.gate).reshape(T, H, 1))
    return ops.linear(o.reshape(T, H * D), w.o)


def _keys_values(ops: Ops, c: Config, w: Any, step: Step, x: Array) -> tuple[Array, Array]:
    T, K, D = x.shape[0], c.kv_heads, c.head_dim
    kv = ops.linear(x, w.kv)
    k = ops.norm_rope(kv[:, : K * D].reshape(T, K, D), w.k_norm, step.positions, c.rope, c.eps)
    return k, kv[:, K * D :].reshape(T, K, D)


# -- target and draft --------------------------------------------------------------------------------------------------


class Tap:
    """The ops of a backend, which keep the output of some layers in `taken`, by layer."""

    def __init__(self, ops: Ops, layers: Sequence[int]):
        self._ops, self._layers = ops, layers
        self.taken: dict[int, Array] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def scope(self, layer: int, block: Any, x: Array) -> Array:
        x = self._ops.scope(layer, block, x)
        if layer in self._layers:
            self.taken[layer] = self._ops.keep(x)
        return x


@dataclass(frozen=True)
class DflashPair(Pair):
    """A target and its DFlash draft."""

    draft: Config
    spec: ClassVar[str] = "tree"

    @property
    def draft_spec(self) -> list[LayerSpec]:
        return state_spec(self.draft)

    @property
    def budgets(self) -> Sequence[int]:
        deepest = self.draft.block - 1
        return sorted({0, deepest, *(size for size in CHAINS if size < deepest)})

    def _logits(self, state: State, step: Step, rows: slice) -> Array:
        taps, layers = self.draft.taps, len(self.weights.layers)
        tap: Any = Tap(self.ops, taps)
        taps_last = max(taps) == layers - 1  # which a model may compute for some rows alone
        logits = self.definition.forward(
            tap, self.config, self.weights, state, step, slice(None) if taps_last else rows
        )
        features = [tap.taken[i] for i in taps]
        write_context(self.ops, self.draft, self.draft_weights, self._draft_states(state), step, features)
        return logits[rows] if taps_last else logits

    @cached_property
    def target(self) -> Model:
        """The target alone, over the same state: its steps leave no rows for the draft, whose caches commit blanks."""
        parts = self.architecture, self.definition, self.config, self.layout, self.weights, self.ops
        return Model(*parts, expert_stream=self.expert_stream)

    def drafted(self, state: State, token: int, k: int, depth: int) -> tuple[np.ndarray, ...]:
        return self.ops.read_all(*self.ops.top_k(self.propose(state, token), k))

    def propose(self, state: State, token: int) -> Array:
        """Logits (block - 1, vocab) of the tokens after `token`, the one that follows the state; commits nothing."""
        tokens = np.full(self.draft.block, self.draft.mask_token, np.int32)
        tokens[0] = token
        return self.ops.run(self._block, state, Step.block(tokens, state.length))[: self.draft.block - 1]

    @cached_property
    def _block(self) -> Any:
        return partial(self._block_logits)

    def _block_logits(self, state: State, step: Step) -> Array:
        head = self.weights.embed if self.weights.head is None else self.weights.head
        states, first = self._draft_states(state), len(self.weights.layers)
        return forward(self.ops, self.draft, self.draft_weights, self.weights.embed, head, states, step, first)

    def _draft_states(self, state: State) -> list[Any]:
        return [state[len(self.weights.layers) + i] for i in range(self.draft.layers)]


def load_dflash(checkpoint: Checkpoint, target: Model, progress: bool = False) -> DflashPair:
    """`target` with the draft of `checkpoint` on the same backend."""
    config = read_config(checkpoint, target)
    weights = load_draft(checkpoint, config, target, progress)
    parts = (target.architecture, target.definition, target.config, target.layout, target.weights, target.ops)
    return DflashPair(*parts, config, weights, cache=target.cache, expert_stream=target.expert_stream)


def load_draft(checkpoint: Checkpoint, c: Config, target: Model, progress: bool = False) -> SimpleNamespace:
    """The draft's weights: its layers are counted after the target's, its last norm lies beside the target's head."""
    first = len(target.layout.layers)
    return load_weights(checkpoint, layout(c, checkpoint), target.ops, progress, first, target.layout.out)
