"""safetensors: a memory-mapped reader, and the folding of MLX's quantized triples into one tensor each.

The safetensors package validates a header; data are mapped here, because the package copies, and NumPy lacks BF16.
Sources: https://github.com/huggingface/safetensors#format, and mlx.nn.quantize for the `quantization` table.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from common.errors import BimetalError
from common.files import check_regular
from common.hf_quantized import fold_other
from common.tensors import Tensor, map_file

MAX_DIMS = 8
ITEM_BYTES = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "BOOL": 1},
    **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1},
    "F8_E4M3": 1,  # only in folders whose configuration says so: hf_quantized.py
}
# MLX modes: (bits, group sizes, types of scales, has biases); mlx 0.32, mlx.core.quantize
FLOATS = ("F32", "F16", "BF16")
MODES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...], bool]] = {
    "affine": ((1, 2, 3, 4, 5, 6, 8), (32, 64, 128), FLOATS, True),
    "mxfp4": ((4,), (32,), ("U8",), False),
    "mxfp8": ((8,), (32,), ("U8",), False),
    "nvfp4": ((4,), (16,), ("U8",), False),
}
DEFAULTS = {"affine": (4, 64), "mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}  # bits, group size


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or BimetalError."""
    check_regular(path)
    try:
        return parse_object(path.read_bytes(), str(path))
    except OSError as error:
        raise BimetalError(f"{path} cannot be read: {error.strerror}") from None


def parse_object(text: bytes, what: str) -> dict[str, Any]:
    """Return the JSON object in `text` (UTF-8), or BimetalError; a key given twice is an error."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(result := dict(items)) < len(items):
            seen: set[str] = set()
            twice = next(key for key, _ in items if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise BimetalError(f"{what} has the key {twice!r} twice")
        return result

    try:
        value = json.loads(text.decode(), object_pairs_hook=pairs)
    except BimetalError:
        raise
    except RecursionError:
        raise BimetalError(f"{what} nests too deeply") from None
    except ValueError as error:
        raise BimetalError(f"{what} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise BimetalError(f"{what} must hold a JSON object, not {type(value).__name__}")
    return value


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one safetensors file, as stored.

    Raises BimetalError for a file that the safetensors package refuses (cut short, inconsistent, with bytes that no
    tensor or two tensors cover), for a tensor without elements, and for 8-bit and smaller float types.
    """
    data = map_file(path)
    try:
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).removeprefix("Error while deserializing header: ").split())
        raise BimetalError(f"{path} is cut short or is not a safetensors file: {reason}") from None
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = parse_object(data[8:start].tobytes(), f"the header of {path}")
    header.pop("__metadata__", None)
    return {name: _map_tensor(data[start:], f"{path}: tensor {name!r}", name, entry) for name, entry in header.items()}


def _map_tensor(data: np.ndarray, where: str, name: str, entry: dict[str, Any]) -> Tensor:
    """Return the tensor of one entry of a header that the safetensors package accepts; `data` follows the header."""
    dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in ITEM_BYTES:
        raise BimetalError(f"{where} has dtype {dtype!r}; supported are {', '.join(ITEM_BYTES)}")
    if 0 in shape or len(shape) > MAX_DIMS:
        raise BimetalError(f"{where} has shape {shape!r}; it must be up to {MAX_DIMS} positive sizes")
    row_bytes = shape[-1] * ITEM_BYTES[dtype] if shape else ITEM_BYTES[dtype]
    return Tensor(name, dtype, tuple(shape), data[first:last].reshape(*shape[:-1], row_bytes))


def fold_quantized(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Fold `X.weight` (uint32), `X.scales`, `X.biases` into one tensor `X.weight` of an MLX mode and its logical shape.

    `config` is the parsed config.json: its `quantization` (or `quantization_config`) gives mode, bits and group size,
    an entry under a module's name overrides them, and `false` there says that the module is not quantized. Works for
    matrices (rows, packed) and stacks of them (experts, rows, packed). Raises BimetalError for a contradiction.
    """
    table = config.get("quantization", config.get("quantization_config"))
    if table is None:
        table = {}
    if not isinstance(table, dict):
        raise BimetalError(f"quantization in config.json is {table!r}; it must be an object")
    if table.get("quant_method") == "mxfp4":
        return _fold_blocks(tensors)
    if "quant_method" in table:
        return fold_other(tensors, table)
    if eighth := next((tensor for tensor in tensors.values() if tensor.type == "F8_E4M3"), None):
        raise BimetalError(f"tensor {eighth.name!r} has dtype 'F8_E4M3', and config.json says nothing about its scales")

    folded = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        weight, scales = tensors.get(f"{module}.weight"), tensors.get(f"{module}.scales")
        packed = weight is not None and weight.type == "U32"
        if kind == "weight" and packed:
            if scales is None:
                raise BimetalError(f"tensor {name!r} is packed (U32), but there is no {module + '.scales'!r}")
            folded[name] = _fold(tensor, scales, tensors.get(f"{module}.biases"), *_settings(table, module))
        elif kind in ("scales", "biases") and packed:
            continue
        elif kind == "global_scale" and packed:  # mlx-lm's nvfp4 experts can have one
            raise BimetalError(f"tensor {name!r} scales a whole packed tensor, which is not supported")
        elif kind == "scales" and table:
            raise BimetalError(f"tensor {name!r} has no packed (U32) weight beside it")
        else:
            folded[name] = tensor
    return folded


def _fold_blocks(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fold `X_blocks` (..., groups, 16) and `X_scales` (..., groups), uint8, into a tensor `X` of MLX's mode mxfp4.

    Its last axis has 32 values for each group, as gpt-oss stores them: codes of 4 bits, the first in the low half.
    """
    folded = {}
    for name, blocks in tensors.items():
        if name.endswith("_scales") and name.removesuffix("_scales") + "_blocks" in tensors:
            continue
        module, scales = name.removesuffix("_blocks"), tensors.get(name.removesuffix("_blocks") + "_scales")
        if module == name:
            folded[name] = blocks
            continue
        if scales is None:
            raise BimetalError(f"tensor {name!r} has blocks of mxfp4, but there is no {module + '_scales'!r}")
        *rows, groups, size = blocks.shape if len(blocks.shape) > 2 else (0, 0, 0)
        if (blocks.type, scales.type, size, scales.shape) != ("U8", "U8", 16, (*rows, groups)):
            raise BimetalError(
                f"tensor {name!r} is {blocks.type} {blocks.shape} and its scales {scales.type} {scales.shape}, which "
                "does not fit blocks of mxfp4: U8 (..., groups, 16) and U8 (..., groups)"
            )
        codes = blocks.data.reshape(*rows, groups * size)
        shape = (*rows, groups * size * 2)
        folded[module] = Tensor(module, "mxfp4", shape, codes, scales=scales, bits=4, group_size=32)
    return folded


def _settings(table: dict[str, Any], module: str) -> tuple[str, int, int]:
    """Return mode, bits and group size of a module.

    Settings that are missing, or null (as in mlx-lm's mixed recipes), take the mode's default, as in MLX.
    """
    settings = table.get(module, True)
    if settings is True:
        settings = table
    if not isinstance(settings, dict) or not table:
        said = "says nothing about quantization" if not table else f"says {settings!r}"
        raise BimetalError(f"tensor {module + '.weight'!r} is packed and has scales, but config.json {said} for it")
    settings = {key: value for key, value in settings.items() if value is not None}
    mode = settings.get("mode", "affine")
    if not isinstance(mode, str) or mode not in MODES:
        raise BimetalError(f"module {module!r} has the quantization mode {mode!r}; supported are {', '.join(MODES)}")
    default_bits, default_group = DEFAULTS[mode]
    bits, group_size = settings.get("bits", default_bits), settings.get("group_size", default_group)
    integers = type(bits) is int and type(group_size) is int
    if not integers or bits not in MODES[mode][0] or group_size not in MODES[mode][1]:
        raise BimetalError(
            f"module {module!r} is {mode} with bits {bits!r} and group_size {group_size!r}; supported are "
            f"bits {MODES[mode][0]} and group_size {MODES[mode][1]}"
        )
    return mode, bits, group_size


def _fold(weight: Tensor, scales: Tensor, biases: Tensor | None, mode: str, bits: int, group_size: int) -> Tensor:
    _, _, scale_types, has_biases = MODES[mode]
    if (biases is not None) != has_biases:
        raise BimetalError(f"tensor {weight.name!r} is {mode} and {'needs' if has_biases else 'has no use for'} biases")
    if scales.type not in scale_types:
        raise BimetalError(f"tensor {scales.name!r} is {scales.type}; {mode} needs {' or '.join(scale_types)}")
    *rows, words = weight.shape
    shape = (*rows, words * 32 // bits)
    if len(rows) not in (1, 2) or scales.shape != (*rows, shape[-1] / group_size):
        raise BimetalError(
            f"tensor {weight.name!r} has shape {weight.shape} and its scales {scales.shape}, which does not fit "
            f"{bits} bits and group_size {group_size}"
        )
    if biases is not None and (biases.shape, biases.type) != (scales.shape, scales.type):
        raise BimetalError(
            f"tensor {biases.name!r} is {biases.type} {biases.shape}; the scales are {scales.type} {scales.shape}"
        )
    return replace(weight, type=mode, shape=shape, scales=scales, biases=biases, bits=bits, group_size=group_size)
