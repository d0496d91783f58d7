"""Choice among a repository's files: quantization, parts of split files, and what safetensors need beside them."""

import re
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from pathlib import Path

from common.errors import BimetalError

DEFAULT_QUANT = "Q4_K_M"

QUANT = re.compile(r"(?<![A-Z0-9])(?:UD-)?(?:I?Q\d\w*|TQ\d_\d|B?F16|FP16|F32|MXFP4\w*|NVFP4\w*)(?!\w)", re.A | re.I)
PART = re.compile(r"-\d{5}-of-(\d{5})(?=\.gguf$)")
BESIDE_WEIGHTS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.safetensors.index.json",
    "modules.json",
)
CONFIG = "adapter_config.json"  # of an adapter, beside one of the next two
PEFT, MLX_LM = "adapter_model.safetensors", "adapters.safetensors"
ADAPTER_KINDS = f"a folder with {CONFIG} and {PEFT} (PEFT) or {MLX_LM} (mlx-lm), or llama.cpp's GGUF file of an adapter"
POOLING = "1_Pooling/config.json"  # of a model of embeddings


def choose_files(
    files: Collection[str], where: str, file: str | None = None, quant: str | None = None
) -> tuple[list[str], str]:
    """Choose the paths to take from a repository that holds `files`, and the one to open ("" for the whole directory).

    `where` names the repository in errors. Without `file` and `quant`, safetensors come before GGUF.
    """
    if file is None and quant is None and (paths := _safetensors(files)):
        return paths, ""
    models: dict[str, list[str]] = {}  # name without the part number -> the parts of that model
    for path in sorted(files):
        if path.lower().endswith(".gguf") and (path == file or not is_aside(path)):
            models.setdefault(PART.sub("", path), []).append(path)
    if not models:
        held = ", ".join(sorted(files)[:10]) or "nothing"
        raise BimetalError(f"{where} has no .gguf file{'' if file or quant else ' and no .safetensors'}, only {held}")
    parts = _parts_of_file(models, where, file) if file else _parts_of_quant(models, where, quant)
    numbered = PART.search(parts[0])
    if numbered and len(parts) != int(numbered[1]):
        raise BimetalError(f"{where} has {len(parts)} of the {int(numbered[1])} parts of {PART.sub('', parts[0])}")
    return parts, parts[0]


def choose_adapter(
    files: Collection[str], where: str, file: str | None = None, quant: str | None = None
) -> tuple[list[str], str]:
    """Choose the files of an adapter as `choose_files` does; a folder of PEFT or mlx-lm comes before GGUF files."""
    if file is None and quant is None:
        for weights in (PEFT, MLX_LM):
            if {weights, CONFIG} <= {*files}:
                return [CONFIG, weights], ""
    adapters = [path for path in files if path.lower().endswith(".gguf")]
    if not adapters:
        held = ", ".join(sorted(files)[:10]) or "nothing"
        raise BimetalError(f"{where} has no adapter, which is {ADAPTER_KINDS}; it has {held}")
    return choose_files(adapters, where, file, quant)


def _safetensors(files: Collection[str]) -> list[str]:
    """List the safetensors at the top of a repository, and what a model needs beside them; [] if there are none."""
    root = sorted(path for path in files if "/" not in path)
    weights = [path for path in root if path.endswith(".safetensors")]
    # Some repositories hold the same weights twice, as model-*.safetensors and as consolidated.safetensors.
    weights = [path for path in weights if path.startswith("model")] or weights
    beside = [path for path in root if any(fnmatchcase(path, kept) for kept in BESIDE_WEIGHTS)]
    return [*beside, *({POOLING} & {*files}), *weights] if weights else []


def is_aside(path: str) -> bool:
    """Test whether a GGUF is by its name no language model, but a vision tower or calibration data."""
    stem = path.rsplit("/", 1)[-1].lower()
    return "mmproj" in stem or stem.startswith("imatrix")


def _parts_of_file(models: dict[str, list[str]], where: str, file: str) -> list[str]:
    for parts in models.values():
        if file in parts:
            return parts
    raise BimetalError(f"{where} has no file {file}; its models are {', '.join(models)}")


def _parts_of_quant(models: dict[str, list[str]], where: str, quant: str | None) -> list[str]:
    labels = {name: quant_label(name) for name in models}
    requested = (quant or DEFAULT_QUANT).upper()
    rules: list[Callable[[str], bool]] = [lambda label: label == requested]
    if quant is None:
        rules.append(lambda _: len(models) == 1)
    else:
        rules.append(lambda label: label.removeprefix("UD-") == requested)  # UD-: unsloth, types mixed
        rules.append(lambda label: label.removeprefix("UD-").startswith(requested + "_"))  # Q4 for a lone Q4_0
    chosen = next((found for rule in rules if (found := [n for n in models if rule(labels[n])])), [])
    if len(chosen) == 1:
        return models[chosen[0]]
    asked = f"quantization {quant}" if quant else f"default quantization {DEFAULT_QUANT}"
    if len({labels[name] for name in chosen}) == 1:
        raise BimetalError(f"{where} has {asked} more than once; name the file, one of {', '.join(chosen)}")
    there = sorted(set(labels.values()))
    amount = "several of" if chosen else "no"
    raise BimetalError(f"{where} has {amount} {asked}; name one of {', '.join(there)}, as in owner/repo:{there[0]}")


def quant_label(name: str) -> str:
    """Return the quantization in a GGUF's path, in capitals (`UD-Q4_K_XL`); without any, the file's stem."""
    found = QUANT.findall(name.removesuffix(".gguf"))
    return (found[-1] if found else Path(name).stem).upper()
