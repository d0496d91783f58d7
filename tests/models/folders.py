"""Checkpoints for tests: a tiny model with other names or keys, weights given by a formula, and shapes alone."""

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from common.checkpoint import Checkpoint, open_checkpoint
from common.quants import dequantize
from common.tensors import Tensor
from common.weights import Layout

Shapes = dict[str, tuple[int, ...]]
Arrays = dict[str, np.ndarray]


def write_folder(path: Path, config: Mapping[str, Any], tensors: Arrays) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path / "model.safetensors")
    return path


def rewritten(
    folder: Path, path: Path, rename: Callable[[Arrays], Arrays] = lambda tensors: tensors, **config: Any
) -> Path:
    """A copy of `folder`: `rename` maps its float32 tensors, `config` overrides keys (None removes one)."""
    tensors = {name: dequantize(tensor) for name, tensor in open_checkpoint(folder).tensors.items()}
    values = json.loads((folder / "config.json").read_text()) | config
    return write_folder(path, {k: v for k, v in values.items() if v is not None}, rename(tensors))


def formula_weight(name: str, *shape: int) -> np.ndarray:
    """Numbers that depend on the name and shape alone, so that a test can state logits without a file."""
    noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if "layernorm" in name or name.endswith("norm.weight"):
        noise = 1 + 0.3 * noise
    elif name.endswith("e_score_correction_bias"):
        noise = 0.2 * noise
    else:
        noise = 1.5 * noise / np.sqrt(shape[-1])
    return noise.astype(np.float32)


def shapes_only(architecture: str, keys: Mapping[str, Any], shapes: Shapes) -> Checkpoint:
    """A GGUF file of a real model's size without a single value."""
    config = {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in keys.items()}
    tensors = {name: Tensor(name, "F16", shape, np.empty((*shape[:-1], 0))) for name, shape in shapes.items()}
    return Checkpoint(Path("model.gguf"), "gguf", config, tensors)


def assert_layout(layout: Layout, shapes: Shapes) -> None:
    """Assert that every tensor is used, in its shape."""
    stored = {stored.names[0]: stored.shape for entry in layout.entries() for stored in entry.parts}
    assert stored == shapes


def formula_ffn(prefix: str, hidden: int, ffn: int) -> Shapes:
    """Names and shapes of a SwiGLU FFN."""
    shapes = {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
    return {f"{prefix}{part}.weight": shape for part, shape in shapes.items()}
