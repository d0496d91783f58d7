"""Tiny models under tests/data/models (make_tiny_models.py, make_tiny_laguna_glm.py, make_tiny_olmo_granite.py), and
helpers that run them.
"""

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from common.checkpoint import Checkpoint, open_checkpoint
from common.models import Model, load_model
from common.ops import Ops
from common.step import State, Step

FOLDER = Path(__file__).parent / "data" / "models"
MODELS = ["llama", "llama-untied", "qwen3", "qwen3-yarn", "qwen35", "qwen35moe", "laguna", "laguna-m1", "glm"]
MODELS += ["qwen3moe", "qwen2", "mistral", "qwen3next", "gemma3", "glm4moe", "gptoss"]
MODELS += ["phi3", "phi4mini"]
MODELS += ["smollm3", "granite", "olmo2", "olmo3", "deepseek2", "deepseek3", "granitemoe"]
CAPACITY = 640


@cache
def checkpoint(name: str) -> Checkpoint:
    return open_checkpoint(FOLDER / name)


@cache
def load(name: str, ops: Ops) -> Model:
    return load_model(checkpoint(name), ops)


@cache
def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / name / "golden.npz") as file:
        return dict(file)


def wedlm(folder: Path, name: str = "qwen3", **keys: Any) -> Path:
    """Write the tiny model `name` to `folder` as a WeDLM model, with further keys of its config.json."""
    shutil.copytree(FOLDER / name, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "wedlm"} | keys))
    return folder


def golden_state(name: str, config: Any) -> dict[str, np.ndarray]:
    """The golden file's states with value heads in the model's order, in the form of `arrays_of`."""
    arrays = {key: array for key, array in golden(name).items() if "." in key}
    for key, array in arrays.items():
        if key.startswith(("conv", "delta")) and not config.grouped:
            tiled = np.arange(config.value_heads).reshape(config.key_heads, -1).T.ravel()
            keys = 2 * config.key_heads * config.key_dim
            channels = keys + (tiled[:, None] * config.value_dim + np.arange(config.value_dim)).ravel()
            arrays[key] = array[tiled] if key.startswith("delta") else array[:, np.r_[:keys, channels]]
    return arrays


def run(model: Model, state: State, ids: np.ndarray, pieces: Iterable[int] = ()) -> np.ndarray:
    """Read `ids` in steps of the given sizes, the rest in one, and commit each: logits (len(ids), vocab)."""
    ids = np.asarray(ids, np.int32)
    logits, start = [], 0
    for size in (*pieces, len(ids)):
        chunk = ids[start : start + size]
        if len(chunk):
            logits.append(model.ops.read(model.forward(state, Step.chain(chunk, state.length))))
            state.commit(range(len(chunk)))
            start += len(chunk)
    return np.concatenate(logits)


def logits_of(model: Model, ids: np.ndarray, pieces: Iterable[int] = ()) -> np.ndarray:
    return run(model, model.new_state(CAPACITY), ids, pieces)


def arrays_of(model: Model, state: State) -> dict[str, np.ndarray]:
    """Arrays of the state by kind and layer: keys and values (n, K, D), of a window its last rows; latent (n, R + P),
    conv (taps - 1, C), delta (Hv, Dk, Dv).
    """
    arrays = {}
    for i, layer in enumerate(state.layers):
        for kind, stored in vars(layer).items():
            tails = {"conv": ("tail",), "last": ("tail",)}
            parts = ({"kv": ("keys", "values"), "latent": ("keys",), "delta": ("matrix",)} | tails)[kind]
            for part in parts:
                array = model.ops.read(getattr(stored, part))
                if kind in ("kv", "latent") and model.ops.name == "numpy":
                    array = array[: state.length]
                elif kind in ("kv", "latent"):
                    array = array[0].swapaxes(0, 1)[stored.start : stored.end]
                elif kind == "delta" and model.ops.name == "mlx":
                    array = array.swapaxes(1, 2)
                name = part if kind == "kv" else kind
                arrays[f"{name}.{i}"] = np.array(array[:, 0] if kind == "latent" else array)
    return arrays


@dataclass(frozen=True)
class Errors:
    """How far logits are from a reference.

    logit  largest |difference|, top1 share of positions with the same best token, kl mean nats per position
    """

    logit: float
    top1: float
    kl: float


def lse(logits: np.ndarray) -> np.ndarray:
    """log-sum-exp of each row, in float64"""
    return np.logaddexp.reduce(logits.astype(np.float64), axis=-1)


def errors(logits: np.ndarray, expected: np.ndarray) -> Errors:
    """Errors of logits (T, vocab) against expected (T, vocab)."""
    p, q = (x - lse(x)[:, None] for x in (expected, logits))
    return Errors(
        logit=float(np.abs(logits - expected).max()),
        top1=float((logits.argmax(-1) == expected.argmax(-1)).mean()),
        kl=float((np.exp(p) * (p - q)).sum(-1).mean()),
    )


def golden_errors(logits: np.ndarray, name: str) -> Errors:
    """Errors against the golden file for its first len(logits) tokens: top1 over all of them, kl over every fourth."""
    g, T = golden(name), len(logits)
    kept = g["rows"] < T
    at_rows = errors(logits[g["rows"][kept]], g["logits"][kept])
    everywhere = max(np.abs(lse(logits) - g["lse"][:T]).max(), np.abs(logits.max(-1) - g["best"][:T]).max())
    top1 = float((logits.argmax(-1) == g["argmax"][:T]).mean())
    return Errors(max(at_rows.logit, float(everywhere)), top1, at_rows.kl)


def chain_arrays(model: Model, ids: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits and state arrays of `ids`, read in one step."""
    state = model.new_state(CAPACITY)
    logits = run(model, state, ids)
    return logits, arrays_of(model, state)
