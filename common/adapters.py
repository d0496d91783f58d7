"""Files of LoRA adapters: low-rank changes of a model's matrices (Hu et al., arXiv 2106.09685).

An adapter is a folder of PEFT or of mlx-lm, or a GGUF file of llama.cpp, and names the model's matrices in its dialect.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.config import Keys
from common.errors import BimetalError, shown
from common.gguf import read_gguf
from common.hub_files import ADAPTER_KINDS, CONFIG, MLX_LM, PEFT
from common.quants import PLAIN, dequantize
from common.safetensors import read_json, read_safetensors
from common.tensors import Tensor

HF_LAYER = re.compile(r"(?:(?:model|language_model)\.)*layers\.(\d{1,6})\.(.+)", re.ASCII)  # not of vision towers
GGUF_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)", re.ASCII)

UNSUPPORTED = (  # keys of PEFT's configuration
    *("modules_to_save", "target_parameters", "trainable_token_indices", "alora_invocation_tokens"),
    *("layer_replication", "use_bdlora", "kasa_config", "monteclora_config", "arrow_config"),
)

Place = tuple[int | None, str]  # a layer, None outside of the layers, and a weight's name there, in some dialect


class Change(NamedTuple):
    """Change of a matrix W (rows, columns) to W + up @ down, in float32; the adapter's scale is part of `up`.

    down  (rank, columns)
    up    (rows, rank)
    """

    down: np.ndarray
    up: np.ndarray


@dataclass(frozen=True)
class Adapter:
    """An adapter's changes, by the places of the weights in `dialect`, "hf" or "gguf": weights.Names.

    scale  factor that the changes have been multiplied by
    """

    path: Path
    dialect: str
    changes: Mapping[Place, Change]
    scale: float

    @property
    def files(self) -> list[Path]:
        """List the files that hold the adapter."""
        folder = self.path / CONFIG, self.path / PEFT, self.path / MLX_LM
        return [self.path] if self.path.is_file() else [file for file in folder if file.is_file()]


def open_adapter(path: Path, scale: float = 1.0) -> Adapter:
    """Read an adapter whose changes are multiplied by `scale`; raises BimetalError."""
    if path.suffix == ".gguf" and path.is_file():
        return _open_gguf(path, scale)
    folder = path.parent if path.suffix == ".safetensors" else path
    if not (folder / CONFIG).is_file():
        raise BimetalError(f"{path} is not an adapter; supported: {ADAPTER_KINDS}")
    keys = Keys(read_json(folder / CONFIG), str(folder / CONFIG))
    if (folder / PEFT).is_file():
        return _open_peft(folder, keys, scale)
    if (folder / MLX_LM).is_file():
        return _open_mlx(folder, keys, scale)
    raise BimetalError(f"{folder} has {CONFIG} and neither {PEFT} nor {MLX_LM}")


def _open_peft(folder: Path, keys: Keys, scale: float) -> Adapter:
    keys.expect("peft_type", "LORA")
    for key in ("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora"):
        keys.expect(key, False)
    keys.expect("bias", "none")
    keys.expect("init_lora_weights", True, False, "gaussian", "eva", "orthogonal")  # others change the weights too
    for key in UNSUPPORTED:
        if keys.get(key):
            raise BimetalError(f"{keys.where}: {key} is {shown(keys.get(key))}; supported: none")
    rank, alpha = keys.size("r"), keys.positive("lora_alpha")
    is_rooted = keys.read("use_rslora", bool, False)
    ranks, alphas = (_pattern(keys, key) for key in ("rank_pattern", "alpha_pattern"))
    changes: dict[Place, Change] = {}
    for module, (down, up) in _pairs(folder / PEFT, ".lora_A.weight", ".lora_B.weight"):
        name = module.removeprefix("base_model.model.")
        expected, numerator = _matching(ranks, name, rank), _matching(alphas, name, alpha)
        if len(down) != expected:
            raise BimetalError(f"{folder / PEFT}: {module} has rank {len(down)}; {CONFIG} says {expected:g}")
        factor = numerator / (expected**0.5 if is_rooted else expected)
        _put(changes, module, _place_of(name + ".weight"), Change(down, up * np.float32(scale * factor)))
    return Adapter(folder, "hf", changes, scale)


def _pattern(keys: Keys, key: str) -> Mapping[str, float]:
    """Read numbers by modules' names or their ends; PEFT allows any regular expression there."""
    values = keys.read(key, dict, {})
    for name, value in values.items():
        is_plain = re.fullmatch(r"[\w.^]+", name, re.ASCII) is not None
        if not is_plain or type(value) not in (int, float) or not 0 < value < 1e9:
            raise BimetalError(f"{keys.where}: {key} has {shown(name)}: {shown(value)}; supported: a name and a number")
    return values


def _matching(values: Mapping[str, float], module: str, default: float) -> float:
    """Return the first value whose name is the module's, or its end after a dot."""
    ends = ((name.lstrip("^"), value) for name, value in values.items())
    return next((value for end, value in ends if module == end or module.endswith("." + end)), default)


def _open_mlx(folder: Path, keys: Keys, scale: float) -> Adapter:
    keys.expect("fine_tune_type", "lora")
    factor = keys.positive("lora_parameters.scale")
    changes: dict[Place, Change] = {}
    for module, (down, up) in _pairs(folder / MLX_LM, ".lora_a", ".lora_b"):
        up = np.ascontiguousarray(up.T) * np.float32(scale * factor)
        _put(changes, module, _place_of(module + ".weight"), Change(np.ascontiguousarray(down.T), up))
    return Adapter(folder, "hf", changes, scale)


def _open_gguf(path: Path, scale: float) -> Adapter:
    config, tensors = read_gguf(path)
    keys = Keys(config, str(path), nested=False)
    if keys.get("general.type") != "adapter":
        raise BimetalError(f"{path}: general.type is {shown(keys.get('general.type'))}; an adapter has 'adapter'")
    keys.expect("adapter.type", "lora")
    if keys.get("adapter.alora.invocation_tokens"):
        raise BimetalError(f"{path}: adapter.alora.invocation_tokens is not supported")
    alpha = keys.read("adapter.lora.alpha", float, 0.0)
    changes: dict[Place, Change] = {}
    for name, (down, up) in _pairs_of(str(path), tensors, ".lora_a", ".lora_b"):
        factor = alpha / len(down) if alpha else 1.0  # as llama.cpp
        match = GGUF_LAYER.fullmatch(name)
        place = (int(match[1]), match[2]) if match else (None, name)
        changes[place] = Change(down, up * np.float32(scale * factor))
    return Adapter(path, "gguf", changes, scale)


def _pairs(path: Path, down: str, up: str) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    return _pairs_of(str(path), read_safetensors(path), down, up)


def _pairs_of(
    where: str, tensors: Mapping[str, Tensor], down: str, up: str
) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    """Yield (name, both factors in float32) of each changed matrix; `down` and `up` are the ends of tensors' names."""
    if not tensors:
        raise BimetalError(f"{where} has no tensors")
    for name, tensor in tensors.items():
        if name.endswith(up) and name.removesuffix(up) + down in tensors:
            continue
        other = tensors.get(name.removesuffix(down) + up)
        if not name.endswith(down) or other is None:
            raise BimetalError(f"{where}: {name} is no half of a pair {down}, {up}")
        yield name.removesuffix(down), (_factor(where, tensor), _factor(where, other))


def _factor(where: str, tensor: Tensor) -> np.ndarray:
    if len(tensor.shape) != 2 or (tensor.type in PLAIN and not tensor.type.startswith(("F", "BF"))):
        raise BimetalError(f"{where}: {tensor.name} is {tensor.type} {tensor.shape}; expected a matrix of floats")
    values = dequantize(tensor)
    if not np.isfinite(values).all():
        raise BimetalError(f"{where}: {tensor.name} is not finite")
    return values


def _put(changes: dict[Place, Change], module: str, place: Place, change: Change) -> None:
    """Add a change; refuses a second one of a place, which another prefix may name."""
    if place in changes:
        raise BimetalError(f"adapter module {shown(module)} changes the same weight as another one")
    changes[place] = change


def _place_of(name: str) -> Place:
    """Return the place of a weight by its name in a Hugging Face or MLX model, without regard to prefixes."""
    match = HF_LAYER.fullmatch(name)
    return (int(match[1]), match[2]) if match else (None, name)
