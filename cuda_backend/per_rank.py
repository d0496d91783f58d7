"""Values of tensor parallelism, one per GPU: arrays, weights, captured steps. A rank is an index into `gpus`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from common.adapted import Adapted
from cuda_backend.launch import Graph
from cuda_backend.relay import Gpu
from cuda_backend.transports import Transport


class PerRank:
    """An array, a weight or a layer's state of each rank; arrays have equal shapes. `gpus` may outnumber `parts`."""

    __slots__ = ("gpus", "parts")

    def __init__(self, gpus: Sequence[Gpu], parts: Sequence[Any]):
        self.gpus, self.parts = gpus, tuple(parts)

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.parts[0].shape
        return shape

    def __len__(self) -> int:
        return len(self.parts[0])

    def reshape(self, *shape: Any) -> "PerRank":
        return self._each(lambda part: part.reshape(*shape))

    def __getitem__(self, index: Any) -> "PerRank":
        return self._each(lambda part: part[index])

    def _each(self, change: Callable[[Any], Any]) -> "PerRank":
        parts = []
        for gpu, part in zip(self.gpus, self.parts, strict=False):
            with gpu.device:
                parts.append(change(part))
        return PerRank(self.gpus, parts)


# -- trees of a model --------------------------------------------------------------------------------------------------


def per_rank(gpus: Sequence[Gpu], trees: Sequence[Any]) -> Any:
    """Join the weights of all ranks in one tree of PerRank weights; `trees` are namespaces and lists."""
    first = trees[0]
    if isinstance(first, SimpleNamespace):
        return SimpleNamespace(**{n: per_rank(gpus, [getattr(tree, n) for tree in trees]) for n in vars(first)})
    if isinstance(first, list):
        return [per_rank(gpus, parts) for parts in zip(*trees, strict=True)]
    if isinstance(first, Adapted):
        return Adapted(*(per_rank(gpus, handles) for handles in zip(*trees, strict=True)))
    return None if first is None else PerRank(gpus, trees)


# -- captured steps ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GraphPerRank:
    """A captured step: one graph per rank, and the number of exchanges. All graphs are launched before any wait."""

    gpus: Sequence[Gpu]
    graphs: Sequence[Graph]
    exchange: Transport
    exchanges: int

    def play(self) -> None:
        self.exchange.passed += self.exchanges
        for gpu, graph in zip(self.gpus, self.graphs, strict=True):
            with gpu.device:
                graph.play()
