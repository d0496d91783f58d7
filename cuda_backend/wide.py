"""What tensor parallelism has once per GPU: arrays, weights, states and captured steps. Ranks are places in `gpus`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from common.step import State
from cuda_backend.exchange import Exchange
from cuda_backend.launch import Graph
from cuda_backend.multi_gpu_states import Share
from cuda_backend.relay import Gpu
from cuda_backend.replay import graphs


class Wide:
    """An array, a weight or a layer's state of each rank; arrays have one shape. `gpus` may be more than `parts`."""

    __slots__ = ("gpus", "parts")

    def __init__(self, gpus: Sequence[Gpu], parts: Sequence[Any]):
        self.gpus, self.parts = gpus, tuple(parts)

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.parts[0].shape
        return shape

    def __len__(self) -> int:
        return len(self.parts[0])

    def reshape(self, *shape: Any) -> "Wide":
        return self._each(lambda part: part.reshape(*shape))

    def __getitem__(self, index: Any) -> "Wide":
        return self._each(lambda part: part[index])

    def _each(self, change: Callable[[Any], Any]) -> "Wide":
        parts = []
        for gpu, part in zip(self.gpus, self.parts, strict=False):
            with gpu.device:
                parts.append(change(part))
        return Wide(self.gpus, parts)


# -- trees of a model --------------------------------------------------------------------------------------------------


def widened(gpus: Sequence[Gpu], trees: Sequence[Any]) -> Any:
    """The weights of all ranks as one tree of Wide weights; `trees` are namespaces and lists of weights or None."""
    first = trees[0]
    if isinstance(first, SimpleNamespace):
        return SimpleNamespace(**{n: widened(gpus, [getattr(tree, n) for tree in trees]) for n in vars(first)})
    if isinstance(first, list):
        return [widened(gpus, parts) for parts in zip(*trees, strict=True)]
    return None if first is None else Wide(gpus, trees)


# -- states ------------------------------------------------------------------------------------------------------------


class WidePool:
    """A CudaPool of each rank, over whose slots and pages one thing happens alike."""

    length = 0

    def __init__(self, gpus: Sequence[Gpu], parts: Sequence[Any]):
        self.gpus, self.parts, self.graphs = gpus, tuple(parts), graphs()
        self.slots, self.capacity = parts[0].slots, parts[0].capacity
        layers = zip(*(part.layers for part in parts), strict=True)
        self.layers = [widened(gpus, layer) for layer in layers]

    def __getitem__(self, layer: int) -> Any:
        return self.layers[layer]

    def new_state(self) -> "WideState":
        return WideState(self)

    @property
    def free_tokens(self) -> int | None:
        tokens: int | None = self.parts[0].free_tokens
        return tokens

    @property
    def calibrates(self) -> bool:
        return any(part.calibrates for part in self.parts)


class WideState(State):
    """One sequence's slot of each rank's pool."""

    def __init__(self, pool: WidePool):
        self.parts: list[Any] = []
        for gpu, part in zip(pool.gpus, pool.parts, strict=True):
            with gpu.device:
                self.parts.append(part.new_state())
        self.slot = self.parts[0].slot
        super().__init__([vars(layer) for layer in pool.layers], pool.capacity)
        self.pool: Any = pool

    @property
    def graphs(self) -> Any:
        return self.pool.graphs

    @property
    def calibrates(self) -> bool:
        return bool(self.pool.calibrates)

    def _all(self) -> list[Any]:
        return [Share(gpu, part) for gpu, part in zip(self.pool.gpus, self.parts, strict=True)]


# -- captured steps ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WideGraph:
    """A step as a graph of each rank, with so many exchanges. All are launched before the host waits for any."""

    gpus: Sequence[Gpu]
    graphs: Sequence[Graph]
    exchange: Exchange
    exchanges: int

    def play(self) -> None:
        self.exchange.passed += self.exchanges
        for gpu, graph in zip(self.gpus, self.graphs, strict=True):
            with gpu.device:
                graph.play()
