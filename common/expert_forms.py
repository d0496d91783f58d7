"""Forms in which a mixture stores its experts, and handles for weights that are read from files."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from common.tensors import Tensor


class ExpertForm(NamedTuple):
    """Storage of a layer's experts: expert 0 as tensors (rows, columns), whose types and shapes all experts share.

    gate_up  one tensor, or gate and up
    down     one tensor
    """

    gate_up: tuple[Tensor, ...]
    down: tuple[Tensor, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.gate_up + self.down

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the bytes of each run of an expert, in the order in which `ExpertSource.read` fills runs."""
        return tuple(part.data.nbytes for tensor in self.tensors for part in components(tensor))

    @property
    def nbytes(self) -> int:
        """Count the bytes of an expert as it is stored."""
        return sum(self.sizes)

    @property
    def kind(self) -> tuple:
        """Return a key that is equal for layers whose experts can share slots."""
        return tuple(
            (t.type, t.shape, t.bits, t.group_size, tuple(part.type for part in components(t)))
            for tensors in (self.gate_up, self.down)
            for t in (*tensors, tensors[0])  # where one matrix ends and the next begins
        )


def components(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensor itself, and the scales and biases of an MLX mode."""
    return tuple(part for part in (tensor, tensor.scales, tensor.biases) if part is not None)


def filled(tensors: Sequence[Tensor], buffers: Iterable[np.ndarray]) -> list[Tensor]:
    """Return tensors like `tensors` whose bytes are those of `buffers`, one buffer per component."""
    taken = iter(buffers)

    def part(t: Tensor) -> Tensor:  # dataclasses.replace takes longer than a read of some experts
        return Tensor(t.name, t.type, t.shape, next(taken).reshape(t.data.shape), bits=t.bits, group_size=t.group_size)

    def whole(t: Tensor) -> Tensor:
        if t.scales is None:
            return part(t)
        own = part(t)
        scales = part(t.scales)
        biases = None if t.biases is None else part(t.biases)
        return Tensor(t.name, t.type, t.shape, own.data, scales, biases, t.bits, t.group_size)

    return [whole(tensor) for tensor in tensors]


class SlotMemory(Protocol):
    """Memory of the slots of all kinds of experts, on one backend.

    nbytes  bytes of all slots
    """

    nbytes: int

    def buffers(self, layer: int, slot: int) -> list[np.ndarray]:
        """Return contiguous buffers to fill, one per run of an expert; the slot's own if it holds stored bytes."""

    def landed(self, layer: int, slot: int, tensors: Sequence[Tensor]) -> None:
        """Make the slot's expert from the tensors in filled buffers; called by reading threads. Raises BimetalError."""

    def wait(self) -> None:
        """Wait for all computations that read slots."""

    def matrices(self, layer: int) -> tuple[Any, Any]:
        """Return the slots that `moe` takes in place of gate-up and down; layers of one kind share them."""


@dataclass(frozen=True)
class Streamed:
    """The weight handle of one matrix of a layer's experts, which are read while the model runs.

    fetch     reads the experts of ids (T, k) that have no slot; returns the slot of each expert, int32 (experts,)
    prefetch  begins to read the experts that the last step chose in the layer
    parts     what the backend computes with: the slots of all layers whose experts are of this kind
    nbytes    bytes that all experts of the layer would take in memory; 0 in the handle of its second matrix
    """

    fetch: Callable[[np.ndarray], np.ndarray]
    prefetch: Callable[[], None]
    parts: Any
    nbytes: int
