"""Loads a draft of any kind beside its target."""

from pathlib import Path

from common.checkpoint import Checkpoint, open_checkpoint
from common.errors import BimetalError
from common.models import Model, architecture, is_defined
from common.models.dflash import load_dflash
from common.models.mtp import layout, load_mtp
from common.models.pair import Pair

DRAFTS = ("dflash", "dspark", "eagle", "draft")  # in the class of a draft model, whose model_type may be a target's


def load_pair(path: Path, target: Model, progress: bool = False) -> Pair:
    """`target` with the draft at `path`, a GGUF file or a safetensors folder, on the same backend.

    A file of a model, be it the target's own or one of its multi-token-prediction block alone, gives that block.
    """
    if not isinstance(target, Model):
        raise BimetalError(f"{path}: a draft reads hidden states, which a model run by mlx-lm does not show")
    checkpoint = open_checkpoint(path)
    return (load_mtp if _is_model(checkpoint) else load_dflash)(checkpoint, target, progress)


def check_file(path: Path, target: Checkpoint) -> None:
    """Refuse a file without a block for `target` before weights are loaded, where the file is that of a model."""
    checkpoint = open_checkpoint(path)
    if _is_model(checkpoint) and is_defined(target):
        name, definition = architecture(target)
        layout(checkpoint, name, definition.read_config(target))


def _is_model(checkpoint: Checkpoint) -> bool:
    classes = str(checkpoint.config.get("architectures", "")).lower()
    return is_defined(checkpoint) and not any(kind in classes for kind in DRAFTS)
