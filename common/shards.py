"""A rank's part of a stored tensor: rows, columns or heads, cut from the stored bytes at loading.

Ranks that share every layer (tensor parallelism) each hold some heads of a mixer and some channels of a feed-forward
network. A model's table names the part beside each weight; a rank's configuration counts its own heads and channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from common.errors import BimetalError
from common.quants import BLOCKS
from common.tensors import Tensor


class Segment(NamedTuple):
    """Equal parts of consecutive rows or columns, of which one is taken: rows `start` to `stop` of `length`."""

    length: int
    start: int
    stop: int


@dataclass(frozen=True)
class Ranks:
    """One of the ranks that share every layer: its number, and how many there are.

    divides_head  each rank has rows of the head, and `Ops.all_gather` joins what they give; False: all have all rows
    """

    rank: int = 0
    size: int = 1
    divides_head: bool = False

    def divide(self, count: int, what: str) -> int:
        """Return this rank's share of `count` `what`; raises BimetalError where the ranks cannot share them equally."""
        if count % self.size:
            raise BimetalError(
                f"{count} {what} cannot be divided among {self.size} ranks; choose a number that divides {count}"
            )
        return count // self.size

    def holding(self, count: int, what: str) -> "Ranks":
        """Return this rank among those with different ones of `count` `what`; if there are fewer, ranks hold copies."""
        if self.size > count > 0 and self.size % count == 0:
            return Ranks(self.rank * count // self.size, count)
        self.divide(count, what)
        return self

    def head_rows(self, vocab: int) -> int:
        """Return how many of the head's `vocab` rows this rank has: all where ranks cannot share them by fours."""
        is_divided = self.divides_head and vocab % (4 * self.size) == 0  # kernels read logits in fours
        return vocab // self.size if is_divided else vocab

    def of(self, own: int) -> Segment:
        """Rows of which each rank takes `own` adjacent ones."""
        return Segment(own * self.size, own * self.rank, own * (self.rank + 1))


ONE = Ranks()


@dataclass(frozen=True)
class Shard:
    """A rank's part of a stored tensor along `axis`: a part of each segment, in their order."""

    axis: int
    segments: tuple[Segment, ...]

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the stored tensor, of which this rank's part has `shape`."""
        axis = self.axis % len(shape)
        return (*shape[:axis], sum(s.length for s in self.segments), *shape[axis + 1 :])

    @property
    def parts(self) -> int:
        """Number of parts, of the size of this rank's, in the stored tensor."""
        return sum(s.length for s in self.segments) // sum(s.stop - s.start for s in self.segments)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """First and last index, the last excluded, of each run that the rank takes of the axis."""
        found, first = [], 0
        for segment in self.segments:
            found.append((first + segment.start, first + segment.stop))
            first += segment.length
        return found

    def check(self, tensor: Tensor) -> None:
        """Refuse ranks that would divide a quantization block of the stored tensor: BimetalError."""
        unit = _unit(tensor) if self.axis % len(tensor.shape) == len(tensor.shape) - 1 else 1
        if any(edge % unit for run in self.runs for edge in run):
            most = max(s.length // (s.stop - s.start) for s in self.segments)
            kind = f"groups of {unit}" if tensor.scales is not None else f"{tensor.type} blocks of {unit}"
            raise BimetalError(
                f"{tensor.name}: {tensor.shape[-1]} columns in {kind} cannot be divided among {most} ranks; choose "
                "fewer ranks, or a quantization with smaller blocks"
            )

    def cut(self, tensor: Tensor) -> Tensor:
        """Return the rank's part of a tensor that `check` accepts; no other bytes are read."""
        axis = self.axis % len(tensor.shape)
        if tensor.shape[axis] != sum(s.length for s in self.segments):
            raise ValueError("length")
        return take_columns(tensor, self.runs) if axis == len(tensor.shape) - 1 else _take(tensor, axis, self.runs)


def by_rows(*segments: Segment) -> Shard | None:
    """Along the first axis: rows of a matrix, heads of a stack of them, numbers of a vector; None: whole."""
    return _shard(0, segments)


def by_expert_rows(*segments: Segment) -> Shard | None:
    """Rows of every expert, stored as a stack or one by one."""
    return _shard(-2, segments)


def by_columns(*segments: Segment) -> Shard | None:
    """Columns of a matrix, or of every expert."""
    return _shard(-1, segments)


def _shard(axis: int, segments: Sequence[Segment]) -> Shard | None:
    is_whole = all(segment.length == segment.stop - segment.start for segment in segments)
    return None if is_whole else Shard(axis, tuple(segments))


def take_columns(tensor: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    """Columns (first, last excluded) of each run, beside one another; refused inside a quantization block."""
    unit = _unit(tensor)
    for first, last in runs:
        if first % unit or last % unit:
            raise BimetalError(f"{tensor.name}: blocks of {unit} straddle columns {first} to {last}")
    size = Fraction(tensor.data.shape[-1], tensor.shape[-1])
    data = [tensor.data[..., int(first * size) : int(last * size)] for first, last in runs]
    count = sum(last - first for first, last in runs)
    groups = [(first // unit, last // unit) for first, last in runs]
    return replace(
        tensor,
        shape=(*tensor.shape[:-1], count),
        data=np.ascontiguousarray(data[0]) if len(data) == 1 else np.concatenate(data, axis=-1),
        scales=tensor.scales and take_columns(tensor.scales, groups),
        biases=tensor.biases and take_columns(tensor.biases, groups),
    )


def _take(tensor: Tensor, axis: int, runs: Sequence[tuple[int, int]]) -> Tensor:
    """Runs of an axis before the last, of any type."""
    before = (slice(None),) * axis
    data = [tensor.data[(*before, slice(*run))] for run in runs]
    count = sum(last - first for first, last in runs)
    return replace(
        tensor,
        shape=(*tensor.shape[:axis], count, *tensor.shape[axis + 1 :]),
        data=np.ascontiguousarray(data[0]) if len(data) == 1 else np.concatenate(data, axis=axis),
        scales=tensor.scales and _take(tensor.scales, axis, runs),
        biases=tensor.biases and _take(tensor.biases, axis, runs),
    )


def _unit(tensor: Tensor) -> int:
    """Columns that are stored together."""
    if tensor.scales is not None:
        return tensor.group_size
    return BLOCKS[tensor.type].elements if tensor.type in BLOCKS else 1
