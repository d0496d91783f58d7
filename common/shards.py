"""A rank's part of a stored tensor: rows, columns or heads, cut from the stored bytes at loading.

Each rank of tensor parallelism holds some heads of a mixer and some channels of a feed-forward network. A model's table
states the part of each weight; a rank's configuration counts its own heads and channels.
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
    """Consecutive rows or columns in equal parts, of which a rank takes one: rows `start` to `stop` of `length`."""

    length: int
    start: int
    stop: int


@dataclass(frozen=True)
class Ranks:
    """One of the ranks that share every layer: its number, and the number of ranks.

    divides_head  each rank has some rows of the head, and `Ops.all_gather` joins the logits; False: each has all rows
    """

    rank: int = 0
    size: int = 1
    divides_head: bool = False

    def divide(self, count: int, what: str) -> int:
        """Return this rank's share of `count` `what`; raises BimetalError if the ranks cannot share them equally."""
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
        """Return how many of the head's `vocab` rows this rank has: all if they do not divide into multiples of 4."""
        is_divided = self.divides_head and vocab % (4 * self.size) == 0  # kernels read 4 logits at a time
        return vocab // self.size if is_divided else vocab

    def segment(self, per_rank: int) -> Segment:
        """Return this rank's part of rows or columns of which each rank takes `per_rank` adjacent ones."""
        return Segment(per_rank * self.size, per_rank * self.rank, per_rank * (self.rank + 1))


ONE = Ranks()


@dataclass(frozen=True)
class Shard:
    """A rank's part of a stored tensor along `axis`: one part of each segment, in the order of the segments."""

    axis: int
    segments: tuple[Segment, ...]

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the stored tensor, of which this rank's part has `shape`."""
        axis = self.axis % len(shape)
        return (*shape[:axis], sum(s.length for s in self.segments), *shape[axis + 1 :])

    @property
    def parts(self) -> int:
        """Return the number of parts, each as large as this rank's, in the stored tensor."""
        return sum(s.length for s in self.segments) // sum(s.stop - s.start for s in self.segments)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Return (first index, last index excluded) of each run along the axis that the rank takes."""
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
    """Cut along the first axis: rows of a matrix, heads of a stack, elements of a vector; None: the whole tensor."""
    return _shard(0, segments)


def by_expert_rows(*segments: Segment) -> Shard | None:
    """Cut rows of every expert, stored as a stack or one by one."""
    return _shard(-2, segments)


def by_columns(*segments: Segment) -> Shard | None:
    """Cut columns of a matrix, or of every expert."""
    return _shard(-1, segments)


def _shard(axis: int, segments: Sequence[Segment]) -> Shard | None:
    is_whole = all(segment.length == segment.stop - segment.start for segment in segments)
    return None if is_whole else Shard(axis, tuple(segments))


def take_columns(tensor: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    """Concatenate columns (first, last excluded) of each run; runs that divide a quantization block are refused."""
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
    """Take runs of an axis before the last, for any type."""
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
    """Return the number of columns that are stored as one unit."""
    if tensor.scales is not None:
        return tensor.group_size
    return BLOCKS[tensor.type].elements if tensor.type in BLOCKS else 1
