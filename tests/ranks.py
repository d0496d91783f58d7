"""Ranks that share every layer of a tiny model, as threads of one process on NumPy."""

import threading
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tiny

from common.checkpoint import Checkpoint
from common.models import architecture
from common.quantize import Format, encode
from common.reference import NumpyOps
from common.shards import Ranks
from common.tensors import Tensor
from common.weights import dense

# Sizes that three ranks divide, of models whose own sizes they do not.
WIDE: dict[str, dict[str, Any]] = {
    "glm": {"num_attention_heads": 6, "num_key_value_heads": 6, "moe_intermediate_size": 24},
    "qwen35moe": {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
        "moe_intermediate_size": 24,
    },
}
WIDE["qwen3next"] = WIDE["qwen35moe"]
# Sizes whose halves are whole groups of 32 columns.
GROUPED: dict[str, dict[str, Any]] = {
    "qwen3": {"intermediate_size": 128},
    "qwen3moe": {"moe_intermediate_size": 64},
    "qwen35": {"intermediate_size": 128, "linear_value_head_dim": 32},
    "qwen35moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "linear_value_head_dim": 32},
    "gemma3": {"intermediate_size": 128},
    "olmo3": {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4},
    "laguna-m1": {"intermediate_size": 128, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128},
    "glm4moe": {"intermediate_size": 64, "moe_intermediate_size": 64},
    "gptoss": {"intermediate_size": 64},
    "glm": {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
    },
}
GROUPED["qwen3next"] = GROUPED["qwen35moe"]


class RankOps(NumpyOps):
    """One of several threads; `met` and `shown` are common to all of them.

    taken  bytes of each weight that the rank was given
    """

    def __init__(self, ranks: Ranks, met: threading.Barrier, shown: list[Any]):
        self.ranks, self._met, self._shown = ranks, met, shown
        self.taken: dict[str, int] = {}
        self.sums = self.gathers = 0

    def all_reduce(self, x: np.ndarray) -> np.ndarray:
        self._shown[self.ranks.rank] = x
        self._met.wait(60)
        total = self._shown[0]
        for part in self._shown[1:]:
            total = total + part
        self._met.wait(60)
        self.sums += 1
        return total

    def all_gather(self, x: np.ndarray, columns: int) -> np.ndarray:
        if x.shape[1] == columns:
            return x
        self._shown[self.ranks.rank] = x
        self._met.wait(60)
        whole = np.concatenate(self._shown, axis=1)
        self._met.wait(60)
        self.gathers += 1
        return whole

    def weight(self, *parts: Tensor) -> np.ndarray:
        for part in parts:
            self.taken[part.name] = self.taken.get(part.name, 0) + part.nbytes
        return super().weight(*parts)


def together(size: int, work: Callable[[RankOps], Any], divides_head: bool = False) -> list[Any]:
    """What `work` returns on each of `size` ranks; raises what one of them raised."""
    met, shown = threading.Barrier(size), [None] * size
    found: list[Any] = [None] * size

    def one(rank: int) -> None:
        try:
            found[rank] = work(RankOps(Ranks(rank, size, divides_head), met, shown))
        except BaseException as error:
            met.abort()
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [each for each in found if isinstance(each, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return found


def _weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers that depend on the name and shape alone."""
    noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    return 0.3 * noise if len(shape) == 1 else 1.5 * noise / np.sqrt(shape[-1])


@cache
def wide(name: str) -> Checkpoint:
    """The tiny model with the sizes of WIDE."""
    return _resized(name, WIDE[name])


@cache
def grouped(name: str) -> Checkpoint:
    """The tiny model with the sizes of GROUPED, its matrices in 4 bits and groups of 32 columns."""
    c = _resized(name, GROUPED[name])
    quantized = {
        key: encode(tensor, Format("affine", 4, 32)) if len(tensor.shape) == 2 and "gate.weight" not in key else tensor
        for key, tensor in c.tensors.items()
    }
    return replace(c, tensors=quantized)


def _resized(name: str, sizes: dict[str, Any]) -> Checkpoint:
    """The tiny model with other sizes, its weights given by a formula."""
    c = replace(tiny.checkpoint(name), config=tiny.checkpoint(name).config | sizes, path=Path(f"resized {name}"))
    definition = architecture(c)[1]
    tensors = {}
    for entry in definition.layout(definition.read_config(c), c).entries():
        for stored in entry.parts:
            shape = stored.whole[1:] if len(stored.names) > 1 else stored.whole
            for key in stored.names:
                values = _weight(key, shape)
                tensors[key] = dense(key, values[:, None] if key.endswith("conv1d.weight") else values)
    return replace(c, tensors=tensors)
