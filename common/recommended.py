"""Sampling options that a model's files recommend: generation_config.json, or general.sampling keys of a GGUF."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.checkpoint import Checkpoint
from common.errors import BimetalError, UsageError
from common.options import Sampling
from common.safetensors import read_json

FILE = "generation_config.json"
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
GGUF_NAMES = {  # https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


@dataclass(frozen=True)
class Recommended:
    """Sampling options by name, and the file that states them; {} and "" if a model recommends none."""

    options: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


def recommended_sampling(checkpoint: Checkpoint) -> Recommended:
    """Return the options that a GGUF's metadata recommends, else a generation_config.json beside the model's files.

    A generation_config.json whose do_sample is not true recommends greedy decoding. Raises BimetalError.
    """
    path = Path(checkpoint.path)
    values = {
        name: checkpoint.config[key] for key, name in GGUF_NAMES.items() if checkpoint.config.get(key) is not None
    }
    if values:
        return _checked(values, path)
    file = (path if path.is_dir() else path.parent) / FILE
    if not file.is_file():
        return Recommended()
    card = read_json(file)
    if card.get("do_sample") is True:
        values = {"temperature": 1.0} | {name: card[name] for name in NAMES if card.get(name) is not None}
    elif card.get("repetition_penalty") is not None:
        values = {"repetition_penalty": card["repetition_penalty"]}
    return _checked(values, file)


def _checked(values: dict[str, Any], file: Path) -> Recommended:
    if values.get("top_k") == -1:  # some publishers mean "all" by it
        values["top_k"] = 0
    try:
        accepted = Sampling(**values)
    except UsageError as error:
        raise BimetalError(f"{file} recommends an invalid sampling option: {error}") from None
    options = {name: getattr(accepted, name) for name in values}
    defaults = Sampling()
    changed = {name: value for name, value in options.items() if value != getattr(defaults, name)}
    return Recommended(changed, file.name) if changed else Recommended()
