"""Read from a model's files which hidden states become an embedding, and whether its length is made 1.

A folder states both as sentence-transformers does, in modules.json and in the config.json of its pooling, a GGUF file
by ARCHITECTURE.pooling_type.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.checkpoint import Checkpoint
from common.errors import BimetalError, shown

LAST, MEAN = "last", "mean"
POOLINGS = (LAST, MEAN)
GGUF_POOLINGS = {1: MEAN, 3: LAST}  # ARCHITECTURE.pooling_type
FOLDER_POOLINGS = {"lasttoken": LAST, "mean": MEAN, "mean_tokens": MEAN}
MODES = ("cls", "cls_token", "max", "max_tokens", "mean_sqrt_len_tokens", "weightedmean", *FOLDER_POOLINGS)
MODULES, POOLING_FOLDER = "modules.json", "1_Pooling"  # the name that sentence-transformers gives the folder


@dataclass(frozen=True)
class Pooling:
    """Describe which hidden states become an embedding, and its length.

    tokens    "last": the hidden state of the last token; "mean": the mean of all
    has_unit  whether the embedding is divided by its length
    """

    tokens: str = LAST
    has_unit: bool = True


def stated_pooling(checkpoint: Checkpoint) -> str:
    """Return the pooling that a model's files state; without a statement that of the last token, as in vLLM.

    Raises BimetalError for poolings that are not supported.
    """
    if checkpoint.format == "gguf":
        stated = checkpoint.config.get(f"{checkpoint.config.get('general.architecture')}.pooling_type", 3)
        if stated not in GGUF_POOLINGS:
            raise BimetalError(
                f"{checkpoint.path}: pooling_type is {stated!r:.40}; 1 (mean) and 3 (last) are supported"
            )
        return GGUF_POOLINGS[stated]
    file = checkpoint.path / POOLING_FOLDER / "config.json"
    if not file.is_file():
        return LAST
    stated = _read(file, dict)
    chosen = {key.removeprefix("pooling_mode_") for key, is_on in stated.items() if is_on is True} & {*MODES}
    if "pooling_mode" in stated:
        chosen.add(str(stated["pooling_mode"]))
    found = {FOLDER_POOLINGS.get(mode) for mode in chosen}
    if len(found) != 1 or None in found:
        supported = "lasttoken, mean_tokens"
        raise BimetalError(f"{file} states {', '.join(sorted(chosen)) or 'no pooling'}; supported: {supported}")
    return str(found.pop())


def states_unit(checkpoint: Checkpoint) -> bool:
    """Test whether a model's files state embeddings of length 1, as they do unless modules.json has no normalization.

    Raises BimetalError for modules that hold further weights.
    """
    file = checkpoint.path / MODULES
    if checkpoint.format == "gguf" or not file.is_file():
        return True
    modules = _read(file, list)
    kinds = [str(each.get("type")).rpartition(".")[2] if isinstance(each, dict) else shown(each) for each in modules]
    if unknown := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
        raise BimetalError(f"{file} has the module {unknown[0]}; supported: Transformer, Pooling, Normalize")
    return "Normalize" in kinds


def _read(file: Path, kind: type) -> Any:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BimetalError(f"{file} cannot be read: {error}") from None
    if not isinstance(value, kind):
        raise BimetalError(f"{file} cannot be read: it holds a {type(value).__name__}, not a {kind.__name__}")
    return value
