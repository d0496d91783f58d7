"""GGUF metadata for a Hugging Face folder: the keys that llama.cpp's converter writes for the families listed here.

Our own reading of the keys must give the configuration that config.json gave; else the model cannot be written.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from common.checkpoint import Checkpoint
from common.config import Keys
from common.errors import BimetalError
from common.gguf_tokenizer import GPT2_PATTERN, pre_tokenizer_name
from common.ops import Rope
from common.recommended import GGUF_NAMES, recommended_sampling
from common.tensors import Tensor
from common.tokenizer import load_tokenizer

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type
QUANTIZATION_VERSION = 2  # of ggml's block layouts


class Kind(Enum):
    """Value types by their numbers in a file."""

    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8


@dataclass(frozen=True)
class Key:
    """One metadata entry; `kind` is the number of the value's type, or of a list's elements."""

    name: str
    value: Any
    kind: int


def _key(name: str, value: Any) -> Key:
    first = value[0] if isinstance(value, list) else value
    kinds = {bool: Kind.BOOL, int: Kind.UINT32, float: Kind.FLOAT32, str: Kind.STRING}
    return Key(name, value, kinds[type(first)].value)


# -- the model ---------------------------------------------------------------------------------------------------------


def _llama_keys(c: Any, values: dict[str, Any]) -> dict[str, Any]:
    return {"feed_forward_length": c.ffn, "rope.dimension_count": c.head_dim}


def _qwen35_keys(c: Any, values: dict[str, Any]) -> dict[str, Any]:
    interval = c.is_attention.index(True) + 1 if True in c.is_attention else c.layers
    keys: dict[str, Any] = {
        "full_attention_interval": interval,
        "rope.dimension_count": 2 * len(c.rope.frequencies),
        "ssm.conv_kernel": c.taps,
        "ssm.state_size": c.key_dim,
        "ssm.group_count": c.key_heads,
        "ssm.time_step_rank": c.value_heads,
        "ssm.inner_size": c.value_heads * c.value_dim,
    }
    if sections := values.get("rope_parameters", {}).get("mrope_section"):
        keys["rope.dimension_sections"] = [*sections, 0]
    if any(is_attention != ((i + 1) % interval == 0) for i, is_attention in enumerate(c.is_attention)):
        keys["attention.recurrent_layers"] = [not is_attention for is_attention in c.is_attention]
    if c.experts is None:
        return keys | {"feed_forward_length": c.ffn}
    return keys | {
        "expert_count": c.experts.count,
        "expert_used_count": c.experts.top_k,
        "expert_feed_forward_length": c.experts.ffn,
        "expert_shared_feed_forward_length": c.experts.shared_ffn,
    }


FAMILIES: dict[str, tuple[str, Callable[[Any, dict[str, Any]], dict[str, Any]]]] = {  # by config.json's model_type
    "llama": ("llama", _llama_keys),
    "qwen3": ("qwen3", _llama_keys),
    "wedlm": ("wedlm", _llama_keys),
    "qwen3_5": ("qwen35", _qwen35_keys),
    "qwen3_5_text": ("qwen35", _qwen35_keys),
    "qwen3_5_moe": ("qwen35moe", _qwen35_keys),
    "qwen3_5_moe_text": ("qwen35moe", _qwen35_keys),
}


def gguf_keys(checkpoint: Checkpoint, definition: ModuleType) -> tuple[list[Key], np.ndarray | None]:
    """The metadata of a Hugging Face checkpoint, and the divisors of rope frequencies, for `rope_freqs.weight`.

    Raises BimetalError for families and settings that a GGUF file cannot state.
    """
    family = checkpoint.config["model_type"]
    if family not in FAMILIES:
        raise BimetalError(f"a GGUF file of {family} cannot be written; supported: {', '.join(FAMILIES)}")
    name, own_keys = FAMILIES[family]
    config = definition.read_config(checkpoint)
    values = checkpoint.config.get("text_config") or checkpoint.config
    layers = len(config.is_attention) if hasattr(config, "is_attention") else config.layers
    model: dict[str, Any] = {
        "block_count": layers,
        "context_length": config.context,
        "embedding_length": config.hidden,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.eps,
        "vocab_size": config.vocab,
        **own_keys(config, values),
    }
    scaling, divisors = _rope(Keys(values, f"{checkpoint.path} config.json"), config.rope)
    keys = [_key("general.architecture", name), _key("general.type", "model")]
    keys += [_key("general.name", checkpoint.path.resolve().name)]
    keys += [_key(f"{name}.{key}", value) for key, value in (model | scaling).items()]
    if getattr(config, "mask_id", None) is not None:
        keys.append(_key("tokenizer.ggml.mask_token_id", config.mask_id))
    _check(checkpoint, definition, config, keys, divisors)
    sampling = recommended_sampling(checkpoint).options
    keys += [_key(key, sampling[option]) for key, option in GGUF_NAMES.items() if option in sampling]
    return keys + _tokenizer_keys(checkpoint, config.vocab), divisors


def _rope(keys: Keys, rope: Rope) -> tuple[dict[str, Any], np.ndarray | None]:
    theta = keys.positive("rope_parameters.rope_theta", keys.positive("rope_theta", 10000.0))
    group = keys.read("rope_parameters", dict, {}) or keys.read("rope_scaling", dict, {})
    out: dict[str, Any] = {"rope.freq_base": theta}
    match group.get("rope_type") or group.get("type"):
        case "linear":
            out |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(group["factor"])}
        case "yarn":
            out |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(group["factor"])}
            names = {"original_context_length": "original_max_position_embeddings", "yarn_beta_fast": "beta_fast"}
            names |= {"yarn_beta_slow": "beta_slow"}
            found = {key: group[name] for key, name in names.items() if group.get(name) is not None}
            out |= {f"rope.scaling.{key}": v if key.startswith("o") else float(v) for key, v in found.items()}
        case "llama3":
            count = len(rope.frequencies)
            base = theta ** (-np.arange(count) / count)
            return out, (base / np.array(rope.frequencies)).astype(np.float32)
    return out, None


def stand_in(checkpoint: Checkpoint, keys: list[Key], divisors: np.ndarray | None, tied: bool) -> Checkpoint:
    """A GGUF checkpoint of these keys whose tensors have shapes and no values, for a model's own reading of them."""
    tensors = dict(checkpoint.tensors)
    table = next(tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    tensors["token_embd.weight"] = table
    if not tied:
        tensors["output.weight"] = table
    if divisors is not None:
        data = divisors.view(np.uint8)
        tensors["rope_freqs.weight"] = Tensor("rope_freqs.weight", "F32", divisors.shape, data)
    return Checkpoint(checkpoint.path, "gguf", {key.name: key.value for key in keys}, tensors)


def _check(
    checkpoint: Checkpoint, definition: ModuleType, config: Any, keys: list[Key], divisors: np.ndarray | None
) -> None:
    read = definition.read_config(stand_in(checkpoint, keys, divisors, config.tied))
    for field in fields(config):
        ours, theirs = getattr(config, field.name), getattr(read, field.name)
        if isinstance(ours, Rope):
            same = len(ours.frequencies) == len(theirs.frequencies) and np.allclose(
                [*ours.frequencies, ours.magnitude], [*theirs.frequencies, theirs.magnitude], rtol=1e-6, atol=0
            )
        else:
            same = field.name == "architecture" or ours == theirs
        if not same:
            raise BimetalError(
                f"{checkpoint.path}: a GGUF file cannot state {field.name} {ours!r:.60} of this model; quantize it "
                "into an MLX folder"
            )


# -- the tokenizer -----------------------------------------------------------------------------------------------------


def _tokenizer_keys(checkpoint: Checkpoint, vocab: int) -> list[Key]:
    """Keys of a byte-level BPE; a folder without tokenizer.json gives a file that takes token ids alone."""
    file = checkpoint.path / "tokenizer.json"
    if not file.is_file():
        return [_key("tokenizer.ggml.model", "none")]
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.config)
    values = json.loads(file.read_text(encoding="utf-8"))
    pre = _pre_name(file, values)
    tokens = [f"[PAD{id}]" for id in range(vocab)]
    types = [UNUSED] * vocab
    added = {token["content"]: token for token in values.get("added_tokens", [])}
    for text, id in tokenizer.vocab.items():
        if id >= vocab:
            raise BimetalError(f"{file}: the token {text!r} has id {id}, and the model has {vocab} rows")
        token = added.get(text)
        tokens[id] = text
        types[id] = NORMAL if token is None else CONTROL if token["special"] else USER_DEFINED
    merges = [m if isinstance(m, str) else " ".join(m) for m in values["model"].get("merges", [])]
    keys = [_key("tokenizer.ggml.model", "gpt2"), _key("tokenizer.ggml.pre", pre)]
    keys += [_key("tokenizer.ggml.tokens", tokens), Key("tokenizer.ggml.token_type", types, Kind.INT32.value)]
    keys += [Key("tokenizer.ggml.merges", merges, Kind.STRING.value)]
    for name, special in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id)):
        keys += [] if special is None else [_key(f"tokenizer.ggml.{name}_token_id", special)]
    keys.append(_key("tokenizer.ggml.add_bos_token", tokenizer.add_bos))
    for name, text in tokenizer.chat_templates.items():
        keys.append(_key("tokenizer.chat_template" + ("" if name == "default" else f".{name}"), text))
    return keys


def _pre_name(file: Path, values: dict[str, Any]) -> str:
    """llama.cpp's name of the pre-tokenizer; raises BimetalError for one that has none there."""
    model, pre = values["model"], values.get("pre_tokenizer") or {}
    parts = pre.get("pretokenizers", [pre])
    patterns = []
    for part in parts:
        match part.get("type"):
            case "Split":
                patterns.append(part["pattern"].get("Regex", ""))
            case "Digits" if part.get("individual_digits"):
                patterns.append(r"\p{N}")
            case "ByteLevel" if part.get("use_regex", True):
                patterns.append(GPT2_PATTERN)
    is_bytes = model.get("type") == "BPE" and any(part.get("type") == "ByteLevel" for part in parts)
    name = pre_tokenizer_name(patterns, bool(model.get("ignore_merges"))) if is_bytes else None
    if name is None:
        raise BimetalError(
            f"{file} splits text in a way that has no name in GGUF files; supported are the byte-level BPE tokenizers "
            "of Qwen, Llama 3, GLM, SmolLM, GPT-2 and Laguna"
        )
    return name
