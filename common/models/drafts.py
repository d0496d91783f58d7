"""Load a draft of any kind beside its target."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from common.backend import VECTOR_ITEM
from common.checkpoint import Checkpoint, open_checkpoint
from common.errors import BimetalError
from common.kv_cache import CacheOptions
from common.models import Model, architecture, is_defined, kind_of
from common.models.dflash_load import check_dflash, load_dflash
from common.models.eagle3 import check_eagle3, load_eagle3
from common.models.eagle3_config import is_eagle3
from common.models.mtp import check_mtp, load_mtp
from common.models.pair import Pair
from common.models.target import target_of
from common.ops import Ops
from common.storage import LayerSpec
from common.tensors import Tensor

REFUSED = {  # kinds of drafts that are not supported, by what identifies them
    "domino": "Domino",
    "peagle": "P-EAGLE",
    "eagle": "EAGLE-1 or EAGLE-2",
    "medusa": "Medusa",
}
SUPPORTED = "multi-token-prediction blocks, DFlash, DFlash2, DSpark and EAGLE-3"


def load_pair(path: Path, target: Model, progress: bool = False) -> Pair:
    """Load the draft at `path`, a GGUF file or a safetensors folder, beside `target`, on the same backend.

    If `path` is the target's own file, or has only a multi-token-prediction block, the draft is that block.
    """
    if not isinstance(target, Model):
        raise BimetalError(f"{path}: a draft reads hidden states, which a model run by mlx-lm does not show")
    checkpoint = open_checkpoint(path)
    _refuse_others(checkpoint)
    load: Any = load_eagle3 if _is_eagle3(checkpoint) else load_mtp if _is_model(checkpoint) else load_dflash
    pair: Pair = target.ops.load_beside(target, lambda each: load(checkpoint, each, progress))
    return pair


def check_file(path: Path, target: Checkpoint) -> None:
    """Refuse, by headers alone, a draft of a kind that is not supported, or that does not fit its target.

    A target that only mlx-lm can run is not detected here; `load_pair` refuses it.
    """
    checkpoint = open_checkpoint(path)
    _refuse_others(checkpoint)
    if not is_defined(target):
        return
    name, definition = architecture(target)
    config = definition.read_config(target)
    if _is_eagle3(checkpoint):
        check_eagle3(checkpoint, target_of(definition, config))
    elif _is_model(checkpoint):
        check_mtp(checkpoint, name, config)
    else:
        check_dflash(checkpoint, target_of(definition, config))


class Counter:
    """Takes the place of a backend while a draft is loaded: adds up the bytes of its weights, and holds none."""

    def __init__(self, ops: Ops):
        self._ops, self.bytes = ops, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def load_beside(self, model: Model, make: Callable[[Model], Any]) -> Any:
        return make(model)

    def loading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def at(self, layer: int) -> AbstractContextManager[None]:
        return nullcontext()

    def weight(self, *parts: Tensor) -> None:
        self.bytes += self._ops.held_bytes(*parts)

    def expert_weight(self, *parts: Tensor) -> None:
        self.bytes += self._ops.held_expert_bytes(*parts)

    def vector(self, tensor: Tensor) -> None:
        self.bytes += VECTOR_ITEM * math.prod(tensor.shape)


def predict_draft(path: Path, target: Checkpoint, ops: Ops, cache: CacheOptions) -> tuple[int, list[LayerSpec]]:
    """Predict the bytes of the draft at `path` on the backend of `ops`, and list what its layers store for a sequence.

    cache  formats of the target's cache, which the draft's cache has too
    """
    name, definition = architecture(target)
    config = definition.read_config(target)
    counter = Counter(ops)
    tables, weights = definition.layout(config, target), SimpleNamespace(layers=[])
    model = Model(name, definition, config, tables, weights, cast(Ops, counter), cache=cache)
    pair = load_pair(path, model)
    return counter.bytes, replace(pair, ops=ops).sequence_spec[len(tables.layers) :]


def _is_model(checkpoint: Checkpoint) -> bool:
    """Test whether the file holds a model, and not a draft that has the model_type of a model."""
    return is_defined(checkpoint) and not any(mark in kind_of(checkpoint) for mark in ("dflash", "dspark"))


def _is_eagle3(checkpoint: Checkpoint) -> bool:
    return "eagle3" in kind_of(checkpoint) or is_eagle3(checkpoint)


def _refuse_others(checkpoint: Checkpoint) -> None:
    for mark, kind in REFUSED.items():
        if mark in kind_of(checkpoint) and not (mark == "eagle" and _is_eagle3(checkpoint)):
            raise BimetalError(f"{checkpoint.path} is a draft of the kind {kind}; supported: {SUPPORTED}")
