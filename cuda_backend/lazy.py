"""Lazy row-wise ops: records of an op, its inputs and its parameters, launched when their consumer is known.

A quantized product reads int8 rows (`packed`), cuBLAS half precision (`product`), other ops float32 (`dense`). The
consumer requests one of these forms, and one launch computes the op and writes the form. fuse.py lists the consumers
that compute the op in their own launch instead.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from cuda_backend.arrays import Array
from cuda_backend.context import Context
from cuda_backend.layout import UNPACKED, Packing, packed_size


class Target(NamedTuple):
    """Addresses to which an op writes its rows, one per form; 0 for a form that is not requested."""

    dense: int = 0  # float32
    packed: int = 0  # int8 with scales, as `packing` says
    product: int = 0  # half precision for cuBLAS, of type `Card.half`
    packing: Packing = UNPACKED


@dataclass(frozen=True)
class Op:
    """A row-wise op.

    name           key of the op in fuse.FUSIONS
    emit           launches the op, which writes the forms of a Target
    emit_deferred  for norms: as `emit`, but does not multiply rows by 1 / rms; it also writes sums of squares of 128
                   columns each, (T, K / 128) float32, from which the consumer computes that factor
    """

    name: str
    emit: Callable[["Lazy", Target], None]
    emit_deferred: Callable[["Lazy", Target, int], None] | None = None


@dataclass
class Forms:
    """Addresses of the computed forms of an op; 0, or no entry, for a form that is not computed.

    deferred  rows of a norm without the factor 1 / rms, and their sums of squares: Op.emit_deferred
    """

    dense: int = 0
    product: int = 0
    packed: dict[Packing, int] = field(default_factory=dict)
    deferred_dense: int = 0
    deferred: dict[Packing, tuple[int, int]] = field(default_factory=dict)

    def copy(self) -> "Forms":
        return replace(self, packed=dict(self.packed), deferred=dict(self.deferred))


@dataclass(frozen=True, eq=False)
class Lazy:
    """Array (T, K) that `op` computes from `inputs`, each form at most once, launched on `context.stream`."""

    context: Context
    op: Op
    T: int
    K: int
    inputs: tuple[Array, ...]
    parameters: Any = None
    forms: Forms = field(default_factory=Forms)

    def as_dense(self) -> int:
        if not self.forms.dense:
            self.forms.dense = self.context.arena.take(self.T * self.K * 4)
            self.op.emit(self, Target(dense=self.forms.dense))
        return self.forms.dense

    def as_product(self) -> int:
        if not self.forms.product:
            self.forms.product = self.context.arena.take(self.T * self.K * 2)
            self.op.emit(self, Target(product=self.forms.product))
        return self.forms.product

    def as_packed(self, packing: Packing) -> int:
        """Return int8 rows for a product."""
        if packing not in self.forms.packed:
            packed = self.forms.packed[packing] = self.context.arena.take(packed_size(self.K, self.T, packing))
            self.op.emit(self, Target(packed=packed, packing=packing))
        return self.forms.packed[packing]

    def on(self, context: Context) -> "Lazy":
        """Copy this op and its inputs for a launch on another stream, with its own record of forms."""
        return replace(
            self, context=context, inputs=tuple(moved(x, context) for x in self.inputs), forms=self.forms.copy()
        )


def lazy_of(x: Array) -> Lazy | None:
    """Return the op whose whole result is x, if x is not computed yet; else None."""
    return x.lazy if isinstance(x.lazy, Lazy) else None


def moved(x: Array, context: Context) -> Array:
    """Return x, which will be computed on the stream of `context` if it is not computed yet."""
    lazy = lazy_of(x)
    return Array(x.shape, lazy=lazy.on(context)) if lazy else x
