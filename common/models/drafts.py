"""Loads a draft of any kind beside its target."""

from pathlib import Path
from typing import Any

from common.checkpoint import Checkpoint, open_checkpoint
from common.errors import BimetalError
from common.models import Model, architecture, is_defined
from common.models.dflash_load import load_dflash
from common.models.eagle3 import check_eagle3, load_eagle3
from common.models.eagle3_config import Target, is_eagle3
from common.models.mtp import layout, load_mtp
from common.models.pair import Pair

KEYS = ("architectures", "general.architecture", "speculators_model_type")  # that say what kind a draft is
REFUSED = {  # the kind, by a mark of it
    "domino": "Domino",
    "peagle": "P-EAGLE",
    "eagle": "EAGLE-1 or EAGLE-2",
    "medusa": "Medusa",
}
SUPPORTED = "multi-token-prediction blocks, DFlash, DFlash2, DSpark and EAGLE-3"


def load_pair(path: Path, target: Model, progress: bool = False) -> Pair:
    """`target` with the draft at `path`, a GGUF file or a safetensors folder, on the same backend.

    A file of a model, be it the target's own or one of its multi-token-prediction block alone, gives that block.
    """
    if not isinstance(target, Model):
        raise BimetalError(f"{path}: a draft reads hidden states, which a model run by mlx-lm does not show")
    checkpoint = open_checkpoint(path)
    _refuse_others(checkpoint)
    load: Any = load_eagle3 if _is_eagle3(checkpoint) else load_mtp if _is_model(checkpoint) else load_dflash
    pair: Pair = target.ops.load_beside(target, lambda each: load(checkpoint, each, progress))
    return pair


def check_file(path: Path, target: Checkpoint) -> None:
    """Refuse, before weights are loaded, a draft of a kind that is not supported, and a model without a block.

    An EAGLE-3 draft is checked against its target too.
    """
    checkpoint = open_checkpoint(path)
    _refuse_others(checkpoint)
    if not is_defined(target):
        return
    name, definition = architecture(target)
    if _is_eagle3(checkpoint):
        c = definition.read_config(target)
        check_eagle3(checkpoint, Target(c.hidden, c.vocab, len(definition.state_spec(c))))
    elif _is_model(checkpoint):
        layout(checkpoint, name, definition.read_config(target))


def _is_model(checkpoint: Checkpoint) -> bool:
    """Whether the file is that of a model, and not of a draft whose model_type is a model's."""
    return is_defined(checkpoint) and not any(mark in _kind(checkpoint) for mark in ("dflash", "dspark"))


def _is_eagle3(checkpoint: Checkpoint) -> bool:
    return "eagle3" in _kind(checkpoint) or is_eagle3(checkpoint)


def _refuse_others(checkpoint: Checkpoint) -> None:
    for mark, kind in REFUSED.items():
        if mark in _kind(checkpoint) and not (mark == "eagle" and _is_eagle3(checkpoint)):
            raise BimetalError(f"{checkpoint.path} is a draft of the kind {kind}; supported: {SUPPORTED}")


def _kind(checkpoint: Checkpoint) -> str:
    return " ".join(str(checkpoint.config.get(key, "")) for key in KEYS).lower()
