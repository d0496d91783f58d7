"""Configuration of a DFlash draft, from config.json or from GGUF metadata of llama.cpp and of lucebox."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.checkpoint import Checkpoint
from common.config import Keys
from common.errors import BimetalError
from common.models.blocks import gguf_rope, head_sizes, hf_rope
from common.models.target import Target
from common.ops import Rope

NAME, LAGUNA = "DFlashDraftModel", "DFlashLagunaForCausalLM"
DSPARK = ("Qwen3DSparkModel", "DSparkDraftModel")  # architectures as DeepSpec and SpecForge write them
DFLASH2 = "DFlash2DraftModel"
NAMES = (NAME, LAGUNA, DFLASH2, *DSPARK)
LAYER_TYPES = ("full_attention", "sliding_attention")
SELECTOR = ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")  # of DFlash2
SCALES = ("input_embedding_scale", "output_multiplier", "attention_value_scale", "logit_scale", "embedding_scale")


@dataclass(frozen=True)
class Config:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    eps: float
    rope: Rope
    windows: tuple[int | None, ...]  # per layer: positions that a row attends to, including its own; None: all
    is_causal: tuple[bool, ...]  # per layer: whether rows of the block attend only to earlier rows
    block: int  # tokens of a block, including the known one
    mask_token: int
    taps: tuple[int, ...]  # target layers whose output the draft reads, in the order of the columns of `fc`
    vocab: int | None  # of the target, if the file states it
    target_layers: int | None
    is_laguna: bool = False  # one norm per tap, each layer's norm on the context, gated attention
    first: int = 1  # row of the block that predicts the first draft token: 0 the known token's, 1 a mask's own position
    markov_rank: int = 0  # of DSpark's bias by the previous token; 0: none
    conv_taps: int = 0  # of DFlash2's convolutions along the block; 0: none
    conv_group: int = 0  # channels that share the taps computed from a row
    selector_rank: int = 0  # of DFlash2's scores of candidates at two consecutive positions; 0: none
    candidates: int = 0  # per position

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def tokens(self) -> int:
        """Return the number of draft tokens of a block."""
        return self.block - self.first


def read_config(checkpoint: Checkpoint, target: Target) -> Config:
    """Return the draft's configuration, checked against the target that it is to serve."""
    for name in checkpoint.tensors:
        if name.rpartition(".")[2] in ("d2t", "t2d"):
            raise BimetalError(f"{checkpoint.path} has a vocabulary of its own ({name}), which is not supported")
    c = (_gguf_config if checkpoint.format == "gguf" else _hf_config)(checkpoint, target)
    _check_belongs(c, checkpoint.path, target)
    return replace(c, vocab=target.vocab)


def _hf_config(checkpoint: Checkpoint, target: Target) -> Config:
    keys = Keys(checkpoint.config, f"{checkpoint.path} config.json")
    names = keys.read("architectures", list)
    if len(names) != 1 or names[0] not in NAMES:
        raise BimetalError(f"{keys.where}: architectures is {names}; supported as a draft: {', '.join(NAMES)}")
    is_dspark, is_dflash2 = names[0] in DSPARK, names[0] == DFLASH2
    vocab = keys.read("vocab_size", int, 0) or None
    keys.expect("draft_vocab_size", vocab)
    keys.expect("gating", "per-head")
    keys.expect("hidden_act", "silu")
    keys.expect("attention_bias", False)
    keys.expect("partial_rotary_factor", 1.0)
    keys.expect("dflash_config.use_swa", False)
    keys.expect("dflash_config.causal_head", False)
    _refuse(keys, ("", "dflash_config."), () if is_dflash2 else SELECTOR, () if is_dspark else ("markov_rank",))
    layers = keys.size("num_hidden_layers")
    sizes = head_sizes(checkpoint, keys, layers)
    kinds = keys.read("layer_types", list, ["full_attention"] * layers)
    if len(kinds) != layers or set(kinds) - set(LAYER_TYPES):
        raise BimetalError(f"{keys.where}: layer_types must name {' or '.join(LAYER_TYPES)} for {layers} layers")
    slides = [kind == "sliding_attention" for kind in kinds]
    has_window = keys.read("use_sliding_window", bool, True)
    causal = keys.flag("is_causal" if keys.flag("dflash_config.causal") is None else "dflash_config.causal")

    def either(key: str) -> str:
        return key if keys.get(key) is not None else f"dflash_config.{key}"

    if is_dspark:
        keys.expect(either("projector_type"), "dspark")
        keys.expect(either("markov_head_type"), "vanilla")
        keys.expect(either("dflash_query_causal"), False)
        keys.expect(either("dspark_bonus_anchor"), False)
        causal = bool(causal)
    return Config(
        **sizes,
        ffn=keys.size("intermediate_size"),
        eps=keys.positive("rms_norm_eps", 1e-6),
        rope=hf_rope(keys, sizes["head_dim"]),
        windows=tuple(keys.size("sliding_window") if slide and has_window else None for slide in slides),
        is_causal=tuple(slides) if causal is None else (causal,) * layers,
        block=keys.size(either("block_size")),
        mask_token=keys.read(either("mask_token_id"), int),
        taps=_taps(keys.where, keys.read(either("target_layer_ids"), list, []), 0) or _default_taps(checkpoint, target),
        vocab=vocab,
        target_layers=keys.read(either("num_target_layers"), int, 0) or None,
        is_laguna=names == [LAGUNA],
        first=0 if keys.read(either("sample_from_anchor"), bool, is_dspark) else 1,
        markov_rank=keys.read(either("markov_rank"), int) if is_dspark else 0,
        **(_selector(keys, {key: either(key) for key in SELECTOR}) if is_dflash2 else {}),
    )


def _gguf_config(checkpoint: Checkpoint, target: Target) -> Config:
    """Read metadata as llama.cpp writes them (`dflash`), or as lucebox does (`dflash-draft`, `qwen35-dflash-draft`)."""
    architecture = str(checkpoint.config.get("general.architecture"))
    upstream = architecture == "dflash"
    if not upstream and not architecture.endswith("dflash-draft"):
        raise BimetalError(f"{checkpoint.path}: general.architecture is {architecture!r}, which is no DFlash draft")
    keys = Keys(checkpoint.config, str(checkpoint.path), prefix=architecture + ".", nested=False)
    inner = "" if upstream else "dflash."
    is_dflash2 = upstream and "selector_hidden.weight" in checkpoint.tensors  # llama.cpp detects DFlash2 by it,
    markov = checkpoint.tensors.get("markov_w1.weight") if upstream else None  # and DSpark by this
    others = ("hyper_connection.count", "dspark.enabled", "dspark.markov_rank", "laguna")
    _refuse(keys, ("", "dflash."), () if is_dflash2 else SELECTOR, others)
    layers = keys.size("block_count")
    sizes = head_sizes(checkpoint, keys, layers)
    window = keys.read("attention.sliding_window", int, 0)
    pattern = keys.read("attention.sliding_window_pattern", list, [window > 0] * layers)
    if len(pattern) < layers:
        raise BimetalError(f"{keys.where}: {keys.prefix}attention.sliding_window_pattern covers {len(pattern)} layers")
    slides = [window > 0 and bool(slide) for slide in pattern[:layers]]
    causal = keys.flag("attention.causal")
    if is_dflash2 or markov is not None:  # without the key, in llama.cpp all rows of a block attend to each other
        causal = bool(causal)
    listed = keys.read("target_layers" if upstream else "dflash.target_layer_ids", list, [])
    mask = checkpoint.config.get("tokenizer.ggml.mask_token_id")
    tokens = checkpoint.config.get("tokenizer.ggml.tokens")
    return Config(
        **sizes,
        ffn=keys.size("feed_forward_length"),
        eps=keys.positive("attention.layer_norm_rms_epsilon", 1e-6),
        rope=gguf_rope(keys, sizes["head_dim"], None),
        windows=tuple(window if slide else None for slide in slides),
        is_causal=tuple(slides) if causal is None else (causal,) * layers,
        block=keys.size(f"{inner}block_size"),
        mask_token=mask if isinstance(mask, int) else keys.read(f"{inner}mask_token_id", int),
        taps=_taps(keys.where, listed, int(upstream)) or _default_taps(checkpoint, target),  # llama.cpp counts inputs
        vocab=len(tokens) if isinstance(tokens, list) else keys.read("vocab_size", int, 0) or None,
        target_layers=None,
        first=0 if keys.read("sample_from_anchor", bool, markov is not None) else 1,
        markov_rank=0 if markov is None else markov.shape[-1],
        **(_selector(keys, {key: key for key in SELECTOR}) if is_dflash2 else {}),
    )


def _refuse(keys: Keys, places: Sequence[str], *others: Sequence[str]) -> None:
    """Refuse keys of other kinds of drafts, and scales other than 1, at any of `places`."""
    for place in places:
        for key in itertools.chain(*others):
            if keys.get(place + key) not in (None, 0, False):
                raise BimetalError(
                    f"{keys.where}: {keys.prefix}{place}{key} belongs to another kind of draft, which is not supported"
                )
        for key in SCALES:
            keys.expect(place + key, 1)
        keys.expect(f"{place}final_logit_softcapping", 0)


def _selector(keys: Keys, at: Mapping[str, str]) -> dict[str, Any]:
    """Read sizes of DFlash2's convolutions and selector; `at` maps a key to its name in the file."""
    fields = {
        "conv_taps": "conv_kernel_size",
        "conv_group": "conv_group_size",
        "selector_rank": "selector_rank",
        "candidates": "selector_top_k",
    }
    return {field: keys.size(at[key]) for field, key in fields.items()}


def _taps(where: str, listed: list[Any], first: int) -> tuple[int, ...]:
    """Return layer ids from 0, in the order of a file, which counts them from `first`."""
    if any(type(i) is not int or i < first for i in listed) or len(set(listed)) < len(listed):
        raise BimetalError(f"{where}: {listed} are not the numbers of different target layers")
    return tuple(i - first for i in listed)


def _default_taps(checkpoint: Checkpoint, target: Target) -> tuple[int, ...]:
    """Choose as many layers as `fc` has room for, from the second to the third from the end."""
    fc = next((t for name, t in checkpoint.tensors.items() if name.endswith("fc.weight")), None)
    layers, n = target.layers, fc.shape[-1] // target.hidden if fc is not None else 0
    return (layers // 2,) if n == 1 else tuple(round(1 + i * (layers - 4) / (n - 1)) for i in range(n))


def _check_belongs(c: Config, path: Path, target: Target) -> None:
    layers = target.layers
    for what, drafts, targets in (
        ("hidden size", c.hidden, target.hidden),
        ("vocabulary", c.vocab or target.vocab, target.vocab),
        ("number of target layers", c.target_layers or layers, layers),
    ):
        if drafts != targets:
            raise BimetalError(f"{path} is a draft for another model: its {what} is {drafts}, the model's {targets}")
    if not c.taps or max(c.taps) >= layers:
        raise BimetalError(f"{path} is a draft for another model: it reads layers {c.taps}, the model has {layers}")
    if not 0 <= c.mask_token < target.vocab:
        raise BimetalError(f"{path}: mask token {c.mask_token} is outside the vocabulary of {target.vocab}")
    if c.block < 2:
        raise BimetalError(f"{path}: block_size is {c.block}; a block has the known token and at least one more")
    if c.conv_taps and c.hidden % c.conv_group:
        raise BimetalError(f"{path}: conv_group_size is {c.conv_group}, which does not divide {c.hidden} channels")
    if c.candidates > target.vocab:
        raise BimetalError(f"{path}: selector_top_k is {c.candidates}, of a vocabulary of {target.vocab}")
    if c.markov_rank < 0:
        raise BimetalError(f"{path}: markov_rank is {c.markov_rank}; supported: 0 or more")
    for window, is_causal in zip(c.windows, c.is_causal, strict=True):
        if window is not None and window < c.block and not is_causal:
            raise BimetalError(f"{path}: sliding_window is {window}; a block of {c.block} tokens must fit in it")
