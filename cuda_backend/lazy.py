"""Ops that run when their consumer is known."""

from collections.abc import Callable
from copy import copy
from typing import Any

from cuda_backend.arrays import Array
from cuda_backend.layout import UNPACKED, Packing, packed_size
from cuda_backend.memory import Arena


class Node:
    """A row-wise op that has not run: (T, K) float32 that its consumer may want dense, as bf16 or packed for `linear`.

    emit(dense, packed, bf16, packing)  launches it, writing where an address is not 0
    """

    def __init__(self, arena: Arena, T: int, K: int, emit: Callable[[int, int, int, Packing], None]):
        self.arena, self.T, self.K, self.emit = arena, T, K, emit
        self.dense = self.bf16 = 0
        self.reads: Array | None = None  # of which `emit` has the address alone
        self.packed: dict[Packing, int] = {}
        self.unscaled: Callable[[int, Packing, int, int], bool] | None = None  # (packed, packing, squares, dense)
        self.loose_dense = 0
        self.eps = 0.0  # of that norm
        self.loose: dict[Packing, tuple[int, int]] = {}
        self.parts: tuple[Array, Array] | None = None  # of an addition, which a norm may do on its way
        self.roping: tuple[Array, tuple[Any, ...]] | None = None  # of norm and rope, which attention may do on its way
        self.norm: tuple[Array, Array | None, float] | None = None  # of a norm, which a cache may do on its way
        self.pieces: Callable[..., None] | None = None  # as emit, with `op` and `gate` of a gate on attention's output
        self.experts: tuple[Array, Array] | None = None  # of a weighted sum, which an addition may do on its way
        self.joined: tuple[Any, ...] = ()  # of a weighted sum in fours, defines and arguments: a norm may do it

    def as_dense(self) -> int:
        if not self.dense:
            self.dense = self.arena.take(self.T * self.K * 4)
            self.emit(self.dense, 0, 0, UNPACKED)
        return self.dense

    def as_bf16(self) -> int:
        if not self.bf16:
            self.bf16 = self.arena.take(self.T * self.K * 2)
            self.emit(0, 0, self.bf16, UNPACKED)
        return self.bf16

    def as_packed(self, packing: Packing) -> int:
        """int8 activations for a product."""
        if packing not in self.packed:
            self.packed[packing] = self.arena.take(packed_size(self.K, self.T, packing))
            self.emit(0, self.packed[packing], 0, packing)
        return self.packed[packing]

    def as_unscaled(self, packing: Packing) -> tuple[int, int]:
        """A norm's int8 rows without the factor of the whole row, and the squares (T, K / 128) that give it.

        Squares at 0: there is no such form, and these are the rows themselves.
        """
        if packing not in self.loose and self.unscaled:
            packed = self.arena.take(packed_size(self.K, self.T, packing))
            squares = self.arena.take(self.T * -(-self.K // 128) * 4)
            if self.unscaled(packed, packing, squares, 0):
                self.loose[packing] = packed, squares
        if packing in self.loose:
            return self.loose[packing]
        return self.as_packed(packing), 0

    def twin(self) -> "Node":
        """The same for another stream, which must not take what this one writes from now on."""
        other = copy(self)
        other.packed, other.loose = dict(self.packed), dict(self.loose)
        return other

    def as_unscaled_dense(self) -> tuple[int, int]:
        """The same in float32 for a router, and the int8 rows that its experts want in the same launch."""
        if not self.unscaled:
            return self.as_dense(), 0
        if not self.loose_dense:
            rows = Packing(1, False)  # of experts of types of which whole numbers are summed; others ask again
            packed = self.arena.take(packed_size(self.K, self.T, rows))
            dense, squares = self.arena.take(self.T * self.K * 4), self.arena.take(self.T * -(-self.K // 128) * 4)
            if not self.unscaled(packed, rows, squares, dense):
                return self.as_dense(), 0
            self.loose_dense, self.loose[rows] = dense, (packed, squares)
        return self.loose_dense, self.loose[Packing(1, False)][1]
