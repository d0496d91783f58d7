"""Row-wise ops that run when their consumer is known: a declared record of op, inputs and parameters.

A product reads rows quantized, cuBLAS reads half precision (`product`), others float32: the consumer asks for a form,
and one launch computes the op and writes that form. What a consumer computes in its own launch instead is the table of
fuse.py.
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

    name           by which fuse.FUSIONS knows it
    emit           launches the op, which writes the forms of a Target
    emit_deferred  of a norm: as `emit`, but leaves the factor of each whole row to the consumer, and writes to an
                   address the sums of squares of 128 columns each, (T, K / 128), that give it
    """

    name: str
    emit: Callable[["Lazy", Target], None]
    emit_deferred: Callable[["Lazy", Target, int], None] | None = None


@dataclass
class Forms:
    """Addresses of what has been computed of an op, 0 or none for what has not.

    deferred  rows of a norm whose factor is left to the product, and their sums of squares: Op.emit_deferred
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
    """(T, K) float32 that `op` will compute from `inputs`, each form at most once, launched on `context.stream`."""

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
        """int8 rows for a product."""
        if packing not in self.forms.packed:
            packed = self.forms.packed[packing] = self.context.arena.take(packed_size(self.K, self.T, packing))
            self.op.emit(self, Target(packed=packed, packing=packing))
        return self.forms.packed[packing]

    def on(self, context: Context) -> "Lazy":
        """Move this op and its inputs to another stream, whose launches leave this one's forms alone."""
        return replace(
            self, context=context, inputs=tuple(moved(x, context) for x in self.inputs), forms=self.forms.copy()
        )


def lazy_of(x: Array) -> Lazy | None:
    """The op that would compute exactly x, if x has been neither computed nor sliced."""
    return x.lazy if isinstance(x.lazy, Lazy) else None


def moved(x: Array, context: Context) -> Array:
    """x, to be computed on the stream of `context` if it has not been computed."""
    lazy = lazy_of(x)
    return Array(x.shape, lazy=lazy.on(context)) if lazy else x
