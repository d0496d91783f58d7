"""A checkpoint on disk, whatever its format: its configuration and its tensors, memory-mapped."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import tensors as tensors_module
from common.adapters import Adapter
from common.errors import BimetalError
from common.gguf import read_gguf
from common.safetensors import fold_quantized, read_json, read_safetensors
from common.tensors import Tensor

SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
INDEX = "model.safetensors.index.json"
WEDLM = "WeDLMForCausalLM"  # in `architectures`
UNFINISHED = "unfinished.json"  # the marker of a folder that a quantization run is still writing


@dataclass
class Checkpoint:
    """A model's files: configuration and tensors, from which the model is built.

    path     the GGUF file, of a split one the first, or the directory of the safetensors files, with config.json and
             perhaps a tokenizer.json
    format   "gguf" or "safetensors"
    config   GGUF metadata (of the first part of a split), or the parsed config.json
    tensors  by their names in the file; MLX's quantized triples are folded into one tensor each
    adapters  that change the weights: generate.loading.with_adapters
    """

    path: Path
    format: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    adapters: Sequence[Adapter] = ()

    def release(self, tensor: Tensor) -> None:
        """Drop the tensor's pages from memory once a copy of it exists, so that loading does not count it twice."""
        tensors_module.release(tensor)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a .gguf file (any part of a split one), a .safetensors file beside its config.json, or a directory.

    A directory holds model.safetensors, or model.safetensors.index.json and the files it lists, or one GGUF; the first
    of these that exists is opened. Only headers are read. Raises BimetalError.
    """
    path = Path(path)
    if path.is_dir():
        try:
            return _open_directory(path)
        except PermissionError as error:
            raise BimetalError(f"{path} cannot be read: {error.strerror}") from error
    if not path.is_file():
        raise BimetalError(f"{path} {'is not a regular file' if path.exists() else 'does not exist'}")
    if path.suffix == ".gguf":
        return _open_gguf(path)
    if path.suffix == ".safetensors":
        index = path.parent / INDEX
        if index.exists() and path.name in _weight_map(index).values():
            return _open_index(index)
        return _open_safetensors([path])
    raise BimetalError(f"{path} is neither a directory nor a .gguf or .safetensors file")


def _open_directory(path: Path) -> Checkpoint:
    if (path / UNFINISHED).exists():
        raise BimetalError(f"{path} is unfinished: give the same quantize command again, or delete the folder")
    if (path / "model.safetensors").exists():
        return _open_safetensors([path / "model.safetensors"])
    if (path / INDEX).exists():
        return _open_index(path / INDEX)
    models: dict[str, Path] = {}  # by name without the number of a part
    for file in sorted(path.glob("*.gguf")):
        if "mmproj" not in file.name:  # a vision tower, beside the model it belongs to
            split = SPLIT_NAME.fullmatch(file.name)
            models.setdefault(f"{split['stem']}-of-{split['count']}" if split else file.name, file)
    if len(models) > 1:
        names = ", ".join(file.name for file in models.values())
        raise BimetalError(f"{path} has several models, name one of them: {names}")
    if not models:
        raise BimetalError(f"{path} has no model.safetensors, no {INDEX} and no .gguf file")
    return _open_gguf(*models.values())


def files_of(path: Path) -> list[Path]:
    """List the files that a model at `path` may be read from: those of a folder, the parts of a GGUF file."""
    if path.suffix == ".safetensors":
        path = path.parent
    found = path.rglob("*") if path.is_dir() else _parts(path)
    return [file for file in found if file.is_file()]


def _parts(path: Path) -> list[Path]:
    """Return the files of a GGUF model that one of them names, in their order."""
    if (match := SPLIT_NAME.fullmatch(path.name)) is None:
        return [path]
    count = int(match["count"])
    return [path.with_name(f"{match['stem']}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]


def _open_gguf(path: Path) -> Checkpoint:
    parts = _parts(path)
    if path not in parts:
        raise BimetalError(f"{path} has a part number that is not from 1 to {len(parts)}")
    if missing := [part.name for part in parts if not part.exists()]:
        some = ", ".join(missing[:8])
        raise BimetalError(f"{path} is one of {len(parts)} files, and {len(missing)} are missing, such as {some}")
    first: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for number, part in enumerate(parts):
        config, in_part = read_gguf(part)
        split = (config.get("split.no", 0), config.get("split.count", 1) or 1)
        if split != (number, len(parts)):
            raise BimetalError(f"{part} says it is part {split[0]!r} (from 0) of {split[1]!r}, unlike its name")
        if twice := tensors.keys() & in_part.keys():
            raise BimetalError(f"{part} has tensors that an earlier part has too, such as {min(twice)!r}")
        tensors |= in_part
        first = first or config
    expected = first.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise BimetalError(
            f"{path} says the model has {expected!r} tensors; its {len(parts)} files have {len(tensors)}"
        )
    return Checkpoint(parts[0], "gguf", first, tensors)


def _open_index(index: Path) -> Checkpoint:
    weight_map = _weight_map(index)
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    return _open_safetensors(files, weight_map)


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BimetalError(f"{index} has no weight_map from tensor names to files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.isprintable():
            raise BimetalError(f"{index} puts tensor {name!r} into {file!r}, which is not the name of a file beside it")
    return weight_map


def _open_safetensors(files: list[Path], listed: Iterable[str] = ()) -> Checkpoint:
    path = files[0].parent
    config = read_json(path / "config.json")
    if config.get("model_type") in ("qwen2", "qwen3") and config.get("architectures") == [WEDLM]:
        config["model_type"] = "wedlm"  # a folder for mlx-lm, which knows the network by that name alone
    tensors: dict[str, Tensor] = {}
    for file in files:
        in_file = read_safetensors(file)
        if twice := tensors.keys() & in_file.keys():
            raise BimetalError(f"{file} has tensors that an earlier file has too, such as {min(twice)!r}")
        tensors |= in_file
    if missing := [name for name in listed if name not in tensors]:
        raise BimetalError(f"{path / INDEX} lists {missing[0]!r}, which is in none of its files")
    return Checkpoint(path, "safetensors", config, fold_quantized(tensors, config))
