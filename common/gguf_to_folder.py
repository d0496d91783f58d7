"""Convert a GGUF file to a folder that mlx-lm reads: names, order of rows, config.json, files of a tokenizer.

As in `common/gguf_file.py`, the model's own table lists the tensors: once for the file, once for the folder.
"""

import json
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from tokenizers.processors import TemplateProcessing

from common.checkpoint import WEDLM, Checkpoint
from common.config import Keys
from common.errors import BimetalError
from common.files import rewrite
from common.gguf_tokenizer import from_gguf
from common.ops import Rope
from common.outputs import Output
from common.quantize import FLOAT_TYPES, Format, float_type
from common.quants import dequantize
from common.recipe import Choice, Weight
from common.recommended import recommended_sampling
from common.tensors import Tensor
from common.tokenizer import Tokenizer
from common.weights import Layout, Matrix, Stored, canonical, dense

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "wedlm": WEDLM,
}


@dataclass(frozen=True)
class Folder:
    """Files of a folder beside its tensors.

    config   config.json
    outputs  its tensors
    """

    config: dict[str, Any]
    outputs: list[Output]


def as_folder(
    checkpoint: Checkpoint,
    family: str,
    definition: ModuleType,
    layout: Layout,
    weights: dict[str, Weight],
    choices: dict[str, Choice],
) -> Folder:
    """Convert a GGUF checkpoint to a folder. Raises BimetalError for families and settings that it cannot state."""
    if family not in FAMILIES:
        raise BimetalError(
            f"{checkpoint.path} is a GGUF file of {family}, of which no MLX folder can be made; supported: "
            f"{', '.join(FAMILIES)}. Begin with the model's safetensors folder, or name an OUT that ends in .gguf"
        )
    config = definition.read_config(checkpoint)
    card = _config(checkpoint, family, config)
    embed = dense("", np.zeros((1, 1)))
    named = {"model.embed_tokens.weight": embed} | ({} if config.tied else {"lm_head.weight": embed})
    tensors = dict(checkpoint.tensors) | named  # of which a table looks at the names alone
    file = Checkpoint(checkpoint.path, "safetensors", card, tensors)
    _check(checkpoint, config, definition.read_config(file))
    written = definition.layout(config, file)
    outputs = []
    for ours, theirs in zip((layout.top, *layout.layers), (written.top, *written.layers), strict=True):
        for name, entry in ours.items():
            other = theirs[name]
            if entry is None or other is None:
                continue
            for source, target in zip(entry.parts, other.parts, strict=True):
                assert target.fix is None
                assert len(target.names) == len(source.names) == 1
                tensor = checkpoint.tensors[source.names[0]]
                load = partial(_load, checkpoint, source, target.names[0])
                kind, choice = "", Choice(None)
                if isinstance(entry, Matrix):
                    kind, choice = weights[tensor.name].kind, choices[tensor.name]
                plain = Format(tensor.type if tensor.type in FLOAT_TYPES else "F32")
                format = choice.format or plain
                outputs.append(
                    Output(target.names[0], kind, target.shape, float_type(tensor), format, load, choice.reason)
                )
    return Folder(card, outputs)


def _load(checkpoint: Checkpoint, source: Stored, name: str) -> Tensor:
    return replace(canonical(checkpoint, source, unseen=False), name=name)


def _config(checkpoint: Checkpoint, family: str, c: Any) -> dict[str, Any]:
    """Write the config.json of a GGUF file of one of FAMILIES."""
    keys = Keys(checkpoint.config, str(checkpoint.path), prefix=family + ".", nested=False)
    card: dict[str, Any] = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "vocab_size": c.vocab,
        "hidden_size": c.hidden,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.ffn,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": c.eps,
        "rope_theta": float(keys.positive("rope.freq_base", 10000.0)),
        "max_position_embeddings": c.context,
        "tie_word_embeddings": c.tied,
    }
    if c.mask_id is not None:
        card |= {"mask_token_id": c.mask_id, "qk_norm": c.norms_heads, "attention_bias": c.has_biases}
    if family == "phi3":
        return card | _phi3(checkpoint, keys, c)
    kind = keys.get("rope.scaling.type") or "none"
    if kind != "none":
        scaling = {"rope_type": kind, "factor": keys.positive("rope.scaling.factor")}
        names = {"original_context_length": "original_max_position_embeddings", "yarn_beta_fast": "beta_fast"}
        for key, name in (names | {"yarn_beta_slow": "beta_slow"}).items():
            if keys.get(f"rope.scaling.{key}") is not None:
                scaling[name] = keys.get(f"rope.scaling.{key}")
        card["rope_scaling"] = scaling
    elif (table := checkpoint.tensors.get("rope_freqs.weight")) is not None:
        card["rope_scaling"] = _llama3(np.array(c.rope.frequencies), dequantize(table).ravel().astype(np.float64))
    return card


def _phi3(checkpoint: Checkpoint, keys: Keys, c: Any) -> dict[str, Any]:
    """Return what Phi's config.json has beside the keys of others: its window and its rope."""
    more = {
        "partial_rotary_factor": 2 * len(c.rope.frequencies) / c.head_dim,
        "sliding_window": c.window,
        "original_max_position_embeddings": keys.size("rope.scaling.original_context_length", c.context),
    }
    if c.short_rope is None:
        return more
    tables = {f"{kind}_factor": checkpoint.tensors[f"rope_factors_{kind}.weight"] for kind in ("long", "short")}
    lists = {name: dequantize(table).ravel().tolist() for name, table in tables.items()}
    return more | {"rope_scaling": {"type": "longrope", **lists}}


def _llama3(frequencies: np.ndarray, divisors: np.ndarray) -> dict[str, Any]:
    """Recover Llama 3's rule from its divisors, with a low_freq_factor of 1, as in all of its models.

    A pair of frequency f is slowed by 1 / ((1 - s) / factor + s), where s = (original f / 2 pi - 1) / (high - 1), held
    within 0 and 1. Pairs with s between these give `original` and, if there are two, `high`, which is 4 in Llama 3.1.
    """
    base, factor = frequencies * divisors, float(divisors.max())
    high, original = 4.0, 8192
    if factor > 1:
        s = (1 / divisors - 1 / factor) / (1 - 1 / factor)
        between = np.flatnonzero((s > 1e-4) & (s < 1 - 1e-4))
        if len(between) > 1:
            slope, start = np.polyfit(base[between], s[between], 1)
            high = round(1 - 1 / start, 4)
            original = round(2 * np.pi * slope * (high - 1))
        elif len(between):
            original = round(2 * np.pi * float(((high - 1) * s[between] + 1)[0] / base[between][0]))
    return {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _check(checkpoint: Checkpoint, config: Any, read: Any) -> None:
    """Refuse a model whose config.json would not give this configuration."""
    for field in fields(config):
        ours, theirs = getattr(config, field.name), getattr(read, field.name)
        same = ours == theirs
        if isinstance(ours, Rope):
            same = np.allclose([*ours.frequencies, ours.magnitude], [*theirs.frequencies, theirs.magnitude], 1e-6, 0)
        if not same:
            raise BimetalError(
                f"{checkpoint.path}: config.json cannot state {field.name} {ours!r:.60} of this file; name an OUT that "
                "ends in .gguf"
            )


def write_files(partial: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """Write the tokenizer and the recommended sampling into `partial`; what config.json adds of special tokens."""
    sampling = dict(recommended_sampling(checkpoint).options)
    generation: dict[str, Any] = {"do_sample": True, "temperature": 1.0, **sampling} if sampling else {}
    special: dict[str, Any] = {}
    if checkpoint.config.get("tokenizer.ggml.model") != "none":
        backend, rest = from_gguf(checkpoint.config)
        tokenizer = Tokenizer(backend, **rest)
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": tokenizer.add_bos}
        for name, id in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id)):
            if id is not None:
                settings[f"{name}_token"] = backend.id_to_token(id)
        if tokenizer.add_bos:
            bos = settings["bos_token"]
            backend.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_id)])
        if tokenizer.bos_id is not None:
            special["bos_token_id"] = tokenizer.bos_id
        if tokenizer.end_ids:
            special["eos_token_id"] = sorted(tokenizer.end_ids, key=lambda id: (id != tokenizer.eos_id, id))
        rewrite(partial / "tokenizer.json", backend.to_str())
        rewrite(partial / "tokenizer_config.json", json.dumps(settings, indent=1))
        for name, template in tokenizer.chat_templates.items():
            folder = partial if name == "default" else partial / "additional_chat_templates"
            folder.mkdir(exist_ok=True)
            rewrite(folder / ("chat_template.jinja" if name == "default" else f"{Path(name).name}.jinja"), template)
    rewrite(partial / "generation_config.json", json.dumps(generation | special, indent=1))
    return special
