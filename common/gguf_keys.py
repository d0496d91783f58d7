"""GGUF metadata for a Hugging Face folder: the keys that llama.cpp's converter writes for the families listed here.

The configuration read back from the keys must equal that of config.json; otherwise nothing is written.
"""

import json
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from common.checkpoint import Checkpoint
from common.config import Keys
from common.errors import BimetalError
from common.folder_tokenizer import from_folder
from common.gguf_families import FAMILIES
from common.gguf_tokenizer import GPT2_PATTERN, pre_tokenizer_name
from common.ops import Rope
from common.pooling import GGUF_POOLINGS, POOLING_FOLDER, stated_pooling, states_unit
from common.recommended import GGUF_NAMES, recommended_sampling
from common.tensors import Tensor
from common.tokenizer import Tokenizer

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type
QUANTIZATION_VERSION = 2  # of ggml's block layouts
SHAPES_READ = {  # tensors that a configuration depends on, and the end of their names in a folder
    "token_embd.weight": "embed_tokens.weight",
    "blk.0.attn_gate.weight": ".layers.0.self_attn.g_proj.weight",
    "blk.0.attn_q.bias": ".layers.0.self_attn.q_proj.bias",
    "blk.0.attn_q_norm.weight": ".layers.0.self_attn.q_norm.weight",
}


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


Divisors = dict[str, np.ndarray]  # of rope frequencies, by the names of tensors


def gguf_keys(checkpoint: Checkpoint, definition: ModuleType) -> tuple[list[Key], Divisors]:
    """Return the metadata of a Hugging Face checkpoint, and the tensors that state its rope beside them.

    Raises BimetalError for families and settings that a GGUF file cannot state.
    """
    family = checkpoint.config["model_type"]
    if family not in FAMILIES:
        raise BimetalError(f"a GGUF file of {family} cannot be written; supported: {', '.join(FAMILIES)}")
    form = FAMILIES[family]
    config = definition.read_config(checkpoint)
    values = checkpoint.config.get("text_config") or checkpoint.config
    model: dict[str, Any] = {
        "context_length": config.context,
        "embedding_length": config.hidden,
        "attention.layer_norm_rms_epsilon": config.eps,
        "vocab_size": config.vocab,
        **form.keys(config, values),
    }
    scaling, divisors = _rope(Keys(form.rope(values), f"{checkpoint.path} config.json"), config.rope, form.theta)
    keys = [_key("general.architecture", form.name), _key("general.type", "model")]
    keys += [_key("general.name", checkpoint.path.resolve().name)]
    keys += [_key(f"{form.name}.{key}", value) for key, value in (model | scaling).items()]
    if getattr(config, "mask_id", None) is not None:
        keys.append(_key("tokenizer.ggml.mask_token_id", config.mask_id))
    keys += _pooling_keys(checkpoint, form.name)
    _check(checkpoint, definition, config, keys, divisors)
    sampling = recommended_sampling(checkpoint).options
    keys += [_key(key, sampling[option]) for key, option in GGUF_NAMES.items() if option in sampling]
    return keys + _tokenizer_keys(checkpoint, config.vocab, form.pre), divisors


def _pooling_keys(checkpoint: Checkpoint, architecture: str) -> list[Key]:
    """Return the pooling of a model of embeddings; none for other models."""
    if not (checkpoint.path / POOLING_FOLDER).is_dir():
        return []
    if not states_unit(checkpoint):
        raise BimetalError(
            f"{checkpoint.path}: a GGUF file cannot state embeddings without a normalization; quantize it into an MLX "
            "folder"
        )
    numbers = {name: number for number, name in GGUF_POOLINGS.items()}
    return [_key(f"{architecture}.pooling_type", numbers[stated_pooling(checkpoint)])]


def _rope(keys: Keys, rope: Rope, default_theta: float) -> tuple[dict[str, Any], Divisors]:
    theta = keys.positive("rope_parameters.rope_theta", keys.positive("rope_theta", default_theta))
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
            return out, {"rope_freqs.weight": (base / np.array(rope.frequencies)).astype(np.float32)}
        case "longrope" | "su":
            out["rope.scaling.attn_factor"] = float(rope.magnitude)
            names = {f"rope_factors_{kind}.weight": f"{kind}_factor" for kind in ("long", "short")}
            return out, {tensor: np.array(group[name], np.float32) for tensor, name in names.items()}
    return out, {}


def stand_in(checkpoint: Checkpoint, keys: list[Key], divisors: Divisors, tied: bool) -> Checkpoint:
    """Make a GGUF checkpoint of these keys whose tensors have shapes and no values, so that a model can read it."""
    tensors = dict(checkpoint.tensors)
    for written, suffix in SHAPES_READ.items():
        found = next((tensor for name, tensor in checkpoint.tensors.items() if name.endswith(suffix)), None)
        if found is not None:
            tensors[written] = found
    if not tied:
        tensors["output.weight"] = tensors["token_embd.weight"]
    tensors |= {name: Tensor(name, "F32", each.shape, each.view(np.uint8)) for name, each in divisors.items()}
    return Checkpoint(checkpoint.path, "gguf", {key.name: key.value for key in keys}, tensors)


def _check(checkpoint: Checkpoint, definition: ModuleType, config: Any, keys: list[Key], divisors: Divisors) -> None:
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


def _tokenizer_keys(checkpoint: Checkpoint, vocab: int, preferred_pre: str | None) -> list[Key]:
    """Return the keys of a byte-level BPE; a folder without tokenizer.json gives a file that takes token ids alone."""
    file = checkpoint.path / "tokenizer.json"
    if not file.is_file():
        return [_key("tokenizer.ggml.model", "none")]
    backend, rest = from_folder(checkpoint.path, checkpoint.config)
    known, bos = range(vocab), rest["bos_id"]  # files with other ids are refused
    after = rest["suffix"]  # ends prompts; GGUF files state that eos does
    ends = sorted((id for id in rest["end_ids"] if id in known), key=lambda id: id not in after)
    if after not in ([], ends[:1]):
        raise BimetalError(f"{file} ends prompts with the token ids {after}; GGUF files can state one end token alone")
    rest |= {"bos_id": bos if bos in known else None, "eos_id": ends[0] if ends else None, "end_ids": ends}
    tokenizer = Tokenizer(backend, **rest)
    values = json.loads(file.read_text(encoding="utf-8"))
    pre = _pre_name(file, values, preferred_pre)
    tokens = [f"[PAD{id}]" for id in range(vocab)]
    types = [UNUSED] * vocab
    added = {token["content"]: token for token in values.get("added_tokens", [])}
    for text, id in tokenizer.vocab.items():
        if id >= vocab:
            raise BimetalError(f"{file}: the token {text!r} has id {id}, and the model has {vocab} rows")
        token = added.get(text)
        tokens[id] = text
        types[id] = NORMAL if token is None else CONTROL if token["special"] or id in rest["end_ids"] else USER_DEFINED
    merges = [m if isinstance(m, str) else " ".join(m) for m in values["model"].get("merges", [])]
    if not merges:
        raise BimetalError(f"{file} has no merges, and GGUF files need some; quantize it into an MLX folder")
    keys = [_key("tokenizer.ggml.model", "gpt2"), _key("tokenizer.ggml.pre", pre)]
    keys += [_key("tokenizer.ggml.tokens", tokens), Key("tokenizer.ggml.token_type", types, Kind.INT32.value)]
    keys += [Key("tokenizer.ggml.merges", merges, Kind.STRING.value)]
    more_ends = [id for id in dict.fromkeys(rest["end_ids"]) if id != tokenizer.eos_id]
    if Tokenizer(backend, **(rest | {"end_ids": more_ends[:2]})).end_ids != tokenizer.end_ids:
        raise BimetalError(
            f"{file} has {len(more_ends) + 1} tokens that end a reply; GGUF files name three: eos, eot and eom"
        )
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id} | dict(zip(("eot", "eom"), more_ends, strict=False))
    keys += [_key(f"tokenizer.ggml.{name}_token_id", id) for name, id in ids.items() if id is not None]
    keys.append(_key("tokenizer.ggml.add_bos_token", tokenizer.add_bos))
    keys += [_key("tokenizer.ggml.add_eos_token", True)] if after else []
    for name, text in tokenizer.chat_templates.items():
        keys.append(_key("tokenizer.chat_template" + ("" if name == "default" else f".{name}"), text))
    return keys


def _pre_name(file: Path, values: dict[str, Any], preferred: str | None) -> str:
    """Return llama.cpp's name of the pre-tokenizer; raises BimetalError if llama.cpp has none for it."""
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
    name = pre_tokenizer_name(patterns, bool(model.get("ignore_merges")), preferred) if is_bytes else None
    if name is None:
        raise BimetalError(
            f"{file} splits text in a way that has no name in GGUF files; supported are the byte-level BPE tokenizers "
            "of Qwen, Llama 3, GLM, SmolLM, GPT-2, Laguna and gpt-oss"
        )
    return name
