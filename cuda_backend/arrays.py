"""Array: an activation on the device, as models see it."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from cuda_backend.to_host import Arrival


class Source(Protocol):
    """An op that has not been launched."""

    def as_dense(self) -> int:
        """Compute the op, if necessary, and return the address of its contiguous float32 result."""


class Array:
    """An activation: float32 or int32 on the device, perhaps not computed yet, perhaps partial sums to be added.

    Models see `shape`, reshape and slice. Strides are in elements.

    partials  number of partial sums to add, `partial_stride` elements apart
    needs     (end, count) pairs: columns of (T, n) up to `end` have only `count` partial sums that are not zero
    best      address of the largest keys of a step's logits, if kernels/sample.cu found them, else 0
    arrival   host memory to which a kernel also writes the numbers, and those of the next array that `read_all`
              reads together with this one; None: `read` copies them
    record    the struct by which kernels read a computed array, if it has been made: views.py `view`
    """

    __slots__ = (
        "_address",
        "arrival",
        "best",
        "dtype",
        "lazy",
        "needs",
        "owner",
        "partial_stride",
        "partials",
        "record",
        "shape",
        "strides",
    )

    def __init__(
        self,
        shape: Sequence[int],
        address: int = 0,
        *,
        strides: Sequence[int] | None = None,
        lazy: Source | None = None,
        partials: int = 1,
        partial_stride: int = 0,
        needs: Sequence[tuple[int, int]] = (),
        owner: Any = None,
        dtype: Any = np.float32,
    ):
        self.shape = tuple(shape)
        self.needs, self.best = needs, 0
        self.arrival: Arrival | None = None
        self.record: np.ndarray | None = None
        self.strides = tuple(strides) if strides is not None else contiguous(self.shape)
        self._address, self.lazy, self.owner, self.dtype = address, lazy, owner, dtype
        self.partials, self.partial_stride = partials, partial_stride

    @property
    def address(self) -> int:
        return self._address or (self.lazy.as_dense() if self.lazy else 0)

    def compute(self) -> None:
        """Run the op that produces the array, if it has not run."""
        if not self._address and self.lazy:
            self.lazy.as_dense()

    @property
    def is_computed(self) -> bool:
        return bool(self._address)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_dense(self) -> bool:
        """Test whether the array is computed, without partial sums, and contiguous."""
        return bool(self._address) and self.partials == 1 and self.strides == contiguous(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def reshape(self, *shape: Any) -> "Array":
        target = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        if -1 in target:
            rest = -math.prod(target)
            target = tuple(self.size // rest if n == -1 else n for n in target)
        if self.lazy and not self._address:
            return Array(target, lazy=self.lazy)
        return self._view(target, reshaped(self.shape, self.strides, target), 0)

    def __getitem__(self, index: Any) -> "Array":
        """Return a view by numbers, slices and at most one `...`; a view of all of a lazy array stays lazy."""
        index = index if isinstance(index, tuple) else (index,)
        if Ellipsis in index:
            at = index.index(Ellipsis)
            rest = len(self.shape) - len(index) + 1
            index = (*index[:at], *(slice(None),) * rest, *index[at + 1 :])
        offset, shape, strides = 0, [], []
        for i, (n, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            at = index[i] if i < len(index) else slice(None)
            if isinstance(at, slice):
                start, stop, step = at.indices(n)
                offset += start * stride
                shape.append(max(0, -(-(stop - start) // step)))
                strides.append(stride * step)
            else:
                offset += at * stride
        if self.lazy and not self._address and offset == 0 and tuple(shape) == self.shape:
            return self
        partials = self.partials
        if self.needs and len(index) == 2 and shape[1]:  # of the segments within the slice
            first, last = offset % self.shape[1], offset % self.shape[1] + shape[1]
            begins = (0, *(end for end, _ in self.needs))
            partials = max(
                n for begin, (end, n) in zip(begins, self.needs, strict=False) if begin < last and end > first
            )
        out = self._view(shape, strides, offset, partials)
        if self.best and not offset and tuple(shape[1:]) == self.shape[1:] and tuple(strides) == self.strides:
            out.best = self.best  # of the first rows
        return out

    def _view(self, shape: Sequence[int], strides: Sequence[int], offset: int, partials: int = 0) -> "Array":
        return Array(
            shape,
            self.address + 4 * offset,
            strides=strides,
            partials=partials or self.partials,
            partial_stride=self.partial_stride,
            owner=self.owner,
            dtype=self.dtype,
        )


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, n = [], 1
    for size in reversed(shape):
        strides.append(n)
        n *= size
    return tuple(reversed(strides))


def reshaped(shape: Sequence[int], strides: Sequence[int], target: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a reshape that copies nothing; raises ValueError if a copy would be necessary."""
    if math.prod(shape) != math.prod(target):
        raise ValueError(f"an array of shape {tuple(shape)} cannot be reshaped to {tuple(target)}")
    # adjacent axes that are contiguous with each other: (elements, stride of the last axis)
    runs: list[list[int]] = []
    for n, stride in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if runs and runs[-1][1] == n * stride:
            runs[-1] = [runs[-1][0] * n, stride]
        else:
            runs.append([n, stride])
    out, left = [], 1
    for n in reversed(target):
        if n == 1:
            out.append(left)
            continue
        if left == 1:
            size, unit = runs.pop() if runs else [n, 1]
            left = size
        if left % n:
            raise ValueError(f"a view of shape {tuple(shape)} cannot be reshaped to {tuple(target)} without a copy")
        out.append(unit)
        unit, left = unit * n, left // n
    return tuple(reversed(out))
