"""Configuration of an EAGLE-3 draft, and the map from its vocabulary to the target's.

Published drafts are safetensors folders with the tensor names of the EAGLE code (`midlayer`) or of vLLM and speculators
(`layers.0`), and GGUF files of llama.cpp's architecture `eagle3`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from common.checkpoint import Checkpoint
from common.config import Keys
from common.errors import BimetalError
from common.models.blocks import gguf_rope, head_sizes, hf_rope
from common.models.target import Target
from common.ops import Rope
from common.quants import PLAIN
from common.tensors import Tensor, same_axes

NAMES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel", "LlamaForCausalLM")
IDS = "eagle_aux_hidden_state_layer_ids"
EAGLE_CONFIG: dict[str, tuple[Any, ...]] = {  # the keys of eagle_config and their supported values; (): any
    IDS: (),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "parallel_draft_heads_num_layers": (),
    "has_lm_head": (),
    "eagle_decoder_type": ("llama",),
}
EXPECTED = {  # supported values of keys that change the arithmetic
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "bias": False,
    "is_causal": True,
    "logit_scale": 1.0,
    "parallel_drafting": False,
}
WHOLE_IDS = ("I64", "I32")
ANY_DEPTH = 1 << 20  # layers of an unknown target


@dataclass(frozen=True)
class Config:
    """Configuration of a draft, as its file states it.

    window          positions that a row attends to, including its own; None: all
    taps            target layers whose output the draft reads, in the order of the columns of `fc`
    vocab           number of tokens of the draft's head
    norms_heads     whether to norm each q and k head before rope
    norms_taps      whether to norm each tap before `fc`
    norms_fused     whether to norm all taps as one vector before `fc`
    norms_residual  whether the residual stream begins with the normed hidden state
    norms_output    whether the next row reads the normed output as its hidden state
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    eps: float
    rope: Rope
    window: int | None
    taps: tuple[int, ...]
    vocab: int
    norms_heads: bool = False
    norms_taps: bool = False
    norms_fused: bool = False
    norms_residual: bool = False
    norms_output: bool = False


def is_eagle3(checkpoint: Checkpoint) -> bool:
    """Test by tensor names, not by the configuration, whether the file has the layer of an EAGLE-3 draft."""
    if checkpoint.format == "gguf":
        return checkpoint.config.get("general.architecture") == "eagle3"
    return layer_of(checkpoint) + "hidden_norm.weight" in checkpoint.tensors


def prefix_of(checkpoint: Checkpoint) -> str:
    """Find the prefix of a safetensors folder's names, except of its head and its maps."""
    return "model." if "model.fc.weight" in checkpoint.tensors else ""


def layer_of(checkpoint: Checkpoint) -> str:
    """Find the prefix of the names of the layer's tensors."""
    if checkpoint.format == "gguf":
        return "blk.0."
    prefix = prefix_of(checkpoint)
    return prefix + ("midlayer." if any("midlayer." in name for name in checkpoint.tensors) else "layers.0.")


# -- configuration -----------------------------------------------------------------------------------------------------


def read_config(checkpoint: Checkpoint, target: Target) -> Config:
    """Return the draft's configuration, checked against the target that it is to serve."""
    c, vocab, features = _stated(checkpoint, target.layers)
    at = checkpoint.path
    for what, drafts, targets in (("hidden size", features, target.hidden), ("vocabulary", vocab, target.vocab)):
        if drafts != targets:
            raise BimetalError(f"{at} is a draft for another model: its {what} is {drafts}, the model's {targets}")
    if not c.taps or min(c.taps) < 0 or max(c.taps) >= target.layers:
        raise BimetalError(
            f"{at} is a draft for another model: it reads the outputs of layers {c.taps}; the model has {target.layers}"
        )
    if not 0 < c.vocab <= target.vocab:
        raise BimetalError(f"{at}: its own vocabulary has {c.vocab} tokens; expected 1 to {target.vocab}, the model's")
    if c.norms_taps and c.norms_fused:
        raise BimetalError(f"{at}: fc_norm and norm_before_fc exclude each other")
    if c.norms_fused and not c.norms_residual:
        raise BimetalError(f"{at}: norm_before_fc is True; supported: together with norm_before_residual")
    return c


def config_alone(checkpoint: Checkpoint) -> tuple[Config, Target]:
    """Return the configuration, checked against the target that the file itself states, of whatever depth."""
    _, vocab, features = _stated(checkpoint, ANY_DEPTH)
    target = Target(features, vocab, ANY_DEPTH)
    return read_config(checkpoint, target), target


def default_taps(layers: int) -> tuple[int, ...]:
    """Return the layers before layers 2, n / 2 and n - 3 of a target of n, which a file without a list reads."""
    return tuple(i - 1 for i in (2, layers // 2, layers - 3))


def _stated(checkpoint: Checkpoint, layers: int) -> tuple[Config, int, int]:
    """Return the configuration for a target of `layers`, and the target's vocabulary and hidden size."""
    return _gguf_config(checkpoint) if checkpoint.format == "gguf" else _hf_config(checkpoint, layers)


def _hf_config(checkpoint: Checkpoint, layers: int) -> tuple[Config, int, int]:
    where = f"{checkpoint.path} config.json"
    top = Keys(checkpoint.config, where)
    names = top.read("architectures", list)
    if len(names) != 1 or names[0] not in NAMES:
        raise BimetalError(f"{where}: architectures is {names}; supported as an EAGLE-3 draft: {', '.join(NAMES)}")
    inner = top.read("transformer_layer_config", dict, {})
    keys = Keys(inner, f"{where} transformer_layer_config") if inner else top
    for each in (top, keys):
        for key, value in EXPECTED.items():
            each.expect(key, value)
    for key in top.read("eagle_config", dict, {}):
        if key not in EAGLE_CONFIG:
            raise BimetalError(f"{where}: eagle_config.{key} is not supported")
        if EAGLE_CONFIG[key]:
            top.expect(f"eagle_config.{key}", *EAGLE_CONFIG[key])
    kind = keys.read("model_type", str, "llama")
    keys.expect("model_type", "llama", "qwen3")
    if not layer_of(checkpoint).endswith("midlayer."):  # files with a midlayer may state the target's number of layers
        keys.expect("num_hidden_layers", 1)
    if (
        f"{prefix_of(checkpoint)}lm_head.weight" not in checkpoint.tensors
        and "lm_head.weight" not in checkpoint.tensors
    ):
        top.expect("tie_word_embeddings", False)
    sizes = head_sizes(checkpoint, keys, 1)
    kinds = keys.read("layer_types", list, [])[:1]
    share = keys.positive("rope_parameters.partial_rotary_factor", keys.positive("partial_rotary_factor", 1.0))
    vocab = keys.size("vocab_size")
    config = Config(
        **sizes,
        ffn=keys.size("intermediate_size"),
        eps=keys.positive("rms_norm_eps", 1e-6),
        rope=hf_rope(keys, int(sizes["head_dim"] * min(share, 1.0))),
        window=keys.size("sliding_window") if kinds == ["sliding_attention"] else None,
        taps=_hf_taps(top, layers),
        vocab=top.size("draft_vocab_size", vocab),
        norms_heads=kind == "qwen3",
        norms_taps=top.read("fc_norm", bool, False),
        norms_fused=top.read("norm_before_fc", bool, False),
        norms_residual=top.read("norm_before_residual", bool, False),
        norms_output=top.read("norm_output", bool, False),
    )
    return config, vocab, top.size("target_hidden_size", config.hidden)


def _hf_taps(keys: Keys, layers: int) -> tuple[int, ...]:
    """Read the taps: vLLM and speculators list the next layer of each; eagle_config, read by SGLang, the layer."""
    if listed := keys.read(IDS, list, []):
        return _numbers(keys.where, listed, 1)
    if listed := keys.read(f"eagle_config.{IDS}", list, []):
        return _numbers(keys.where, listed, 0)
    return default_taps(layers)


def _numbers(where: str, listed: list[Any], first: int) -> tuple[int, ...]:
    if any(type(i) is not int or i < first for i in listed) or len(listed) > 16:
        raise BimetalError(f"{where}: {listed} are not the numbers of target layers, counted from {first}")
    return tuple(i - first for i in listed)


def _gguf_config(checkpoint: Checkpoint) -> tuple[Config, int, int]:
    keys = Keys(checkpoint.config, str(checkpoint.path), prefix="eagle3.", nested=False)
    keys.expect("block_count", 1)
    for key in ("w1a1.version", "w8a8.version", "w1a1_head.version"):
        keys.expect(key, 0)
    sizes = head_sizes(checkpoint, keys, 1)
    keys.expect("attention.sliding_window", 0)
    listed = keys.read("target_layers", list, []) or keys.read("extract_layers", list)  # the older key
    known = checkpoint.config.get("tokenizer.ggml.tokens")
    vocab = len(known) if isinstance(known, list) else keys.size("vocab_size")
    d2t = checkpoint.tensors.get("d2t")
    config = Config(
        **sizes,
        ffn=keys.size("feed_forward_length"),
        eps=keys.positive("attention.layer_norm_rms_epsilon"),
        rope=gguf_rope(keys, sizes["head_dim"], checkpoint.tensors.get("rope_freqs.weight")),
        window=None,
        taps=_numbers(keys.where, listed, 1),  # llama.cpp names the layer whose input the draft reads
        vocab=vocab if d2t is None else max(d2t.shape, default=0),
        norms_fused=keys.read("norm_before_fc", bool, False),
        norms_residual=keys.read("norm_before_residual", bool, False),
    )
    return config, vocab, keys.size("target_hidden_size", config.hidden)


# -- the vocabulary ----------------------------------------------------------------------------------------------------


def target_ids(checkpoint: Checkpoint, c: Config, vocab: int) -> np.ndarray | None:
    """Return the target's id (c.vocab,) int32 of each token of the draft; None: both have the same `vocab` tokens.

    A GGUF file's `d2t` lists these ids; that of a safetensors folder the differences to the draft's ids.
    """
    found = [tensor for name, tensor in checkpoint.tensors.items() if is_map(name, "d2t")]
    if not found:
        if c.vocab != vocab:
            raise BimetalError(
                f"{checkpoint.path} lacks the tensor d2t: it knows {c.vocab} of the model's {vocab} tokens"
            )
        return None
    name = found[0].name
    if found[0].type not in WHOLE_IDS or not same_axes(found[0].shape, (c.vocab,)):
        raise BimetalError(f"{name}: {found[0].type} {found[0].shape}; expected {' or '.join(WHOLE_IDS)} {(c.vocab,)}")
    ids = _integers(found[0])
    if checkpoint.format != "gguf":
        if ids.min() < -vocab or ids.max() > vocab:  # checked before a sum that could overflow
            raise BimetalError(f"{name} leads outside the model's vocabulary of {vocab}")
        ids = ids + np.arange(c.vocab)
    if ids.min() < 0 or ids.max() >= vocab:
        raise BimetalError(f"{name} leads outside the model's vocabulary of {vocab}")
    if len(np.unique(ids)) < len(ids):
        raise BimetalError(f"{name} names a token of the model twice")
    return ids.astype(np.int32)


def _integers(tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.data).ravel().view(PLAIN[tensor.type]).astype(np.int64)


def is_map(name: str, kind: str) -> bool:
    """Test whether a tensor is the map `kind`, d2t or t2d, between the vocabularies."""
    return name.rpartition(".")[2] == kind
