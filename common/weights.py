"""Load the weights of a model from a checkpoint's tensors by the model's table; every tensor is accounted for.

A model defines a table: for each weight its name in either kind of file, its shape, and the conversion of the stored
values to the canonical form (norm weights as multiplied, half-split rope rows, value heads tiled over key heads). The
loader reports the names of missing, unused and misshapen tensors, and passes each tensor to the backend once.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import reduce
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from common.checkpoint import Checkpoint
from common.errors import BimetalError
from common.ops import Ops
from common.quants import BLOCKS, PLAIN, check_scales, dequantize
from common.shards import Shard, take_columns
from common.tensors import Tensor, same_axes, stack

Fix = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Stored:
    """Place of a weight in the checkpoint: its full name, its canonical shape, and the fix from stored to canonical.

    Several names are the layer's experts, one tensor each, to be stacked.

    part_of  shape of the stored tensor, if it holds another weight too; `fix` takes this weight from it
    shard    the part of the stored tensor that this rank takes before `fix`, and whose shapes the others are; None: all
    aliases  name within the layer and fix, by the dialect in which an adapter names weights, "hf" or "gguf"
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    fix: Fix | None = None
    part_of: tuple[int, ...] | None = None
    shard: Shard | None = None
    aliases: Mapping[str, tuple[str, Fix | None]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def whole(self) -> tuple[int, ...]:
        """Return the shape of the whole stored tensor, with axes in the canonical order."""
        shape = self.part_of or self.shape
        return self.shard.whole(shape) if self.shard else shape


@dataclass(frozen=True)
class Names:
    """Makes entries of a table of weights: chooses a tensor's name and fix by the checkpoint's dialect.

    dialect  "hf" (as trained), "mlx" (as converted by mlx-lm) or "gguf"
    prefix   prefix of the names of this layer's tensors in that dialect
    """

    dialect: str
    prefix: str
    tensors: Mapping[str, Tensor]

    def __call__(
        self,
        hf: str,
        gguf: str,
        shape: tuple[int, ...],
        fix: Mapping[str, Fix] | None = None,
        shard: Shard | None = None,
    ) -> Stored:
        """Return the tensor called `hf` (by mlx-lm too) or `gguf`, with the fix for this dialect if there is one."""
        fixes, name = fix or {}, gguf if self.dialect == "gguf" else hf
        aliases = {"hf": (hf, fixes.get("hf")), "gguf": (gguf, fixes.get("gguf"))}
        return Stored((self.prefix + name,), shape, fixes.get(self.dialect), shard=shard, aliases=aliases)

    def has(self, name: str) -> bool:
        return self.prefix + name in self.tensors


@dataclass(frozen=True)
class Matrix:
    """A weight for `linear`, `embed` or `moe`, which stays quantized; several parts are stacked by rows."""

    parts: tuple[Stored, ...]

    def __init__(self, *parts: Stored):
        object.__setattr__(self, "parts", parts)


class ExpertMatrix(Matrix):
    """The matrices (experts, rows, columns) of a mixture's experts, from which `moe` reads those that rows choose."""


@dataclass(frozen=True)
class Vector:
    """A small dense weight: norms, conv taps, decays."""

    stored: Stored

    @property
    def parts(self) -> tuple[Stored, ...]:
        return (self.stored,)


Table = Mapping[str, "Matrix | Vector | None"]  # None: absent in this model (no bias, tied head)


@dataclass(frozen=True)
class Layout:
    """All weights of a model by their names in one checkpoint.

    ignored  function that returns why a tensor that no table lists may be ignored ("MTP block"), or None
    """

    top: Table
    layers: Sequence[Table]
    ignored: Callable[[str], str | None]

    def entries(self) -> Iterator["Matrix | Vector"]:
        for table in (self.top, *self.layers):
            yield from (entry for entry in table.values() if entry is not None)

    def names(self) -> set[str]:
        return {name for e in self.entries() for s in e.parts for name in s.names}

    @property
    def out(self) -> int:
        """Return the layer on whose device the last norm and the head are: the last, or the first for a tied head."""
        return 0 if self.top.get("head") is None else len(self.layers) - 1

    def layer_of(self, name: str, first: int = 0, out: int | None = None) -> int:
        """Return the layer on whose device the weight `name` outside the layers is; the first layer is `first`."""
        return (first + self.out if out is None else out) if name in ("norm", "head") else first


def load_weights(
    checkpoint: Checkpoint,
    layout: Layout,
    ops: Ops,
    progress: bool = False,
    first: int = 0,
    out: int | None = None,
    streamed: Mapping[Matrix, Any] = MappingProxyType({}),
    adapt: Callable[[Matrix, Any], Any] = lambda _, handle: handle,
) -> SimpleNamespace:
    """Return the weights as namespaces of backend handles: `.embed`, `.norm`, ..., `.layers[i].q_proj`, ...

    first     number of the first layer in the state
    out       the layer on whose device the last norm is, if not `layout.out`
    streamed  handles of matrices that stay in the checkpoint's files
    adapt     function that returns what replaces the handle of a matrix: adapted.adapter_of
    """
    account(checkpoint, layout)

    def make(entry: "Matrix | Vector") -> Any:
        held = streamed.get(entry) if isinstance(entry, Matrix) else None
        handle = _handle(checkpoint, entry, ops) if held is None else held
        return adapt(entry, handle) if isinstance(entry, Matrix) else handle

    return make_weights(layout, ops, make, "loading", progress, first, out)


def make_weights(
    layout: Layout,
    ops: Ops,
    make: Callable[["Matrix | Vector"], Any],
    doing: str,
    progress: bool = False,
    first: int = 0,
    out: int | None = None,
) -> SimpleNamespace:
    """Call `make` for every weight, on its layer's device; return the namespaces of `load_weights`."""
    total = sum(len(table) for table in (layout.top, *layout.layers))
    with tqdm(total=total, desc=doing, unit="weight", leave=False, disable=None if progress else True) as bar:

        def handles(table: Table, layer: int | None = None) -> SimpleNamespace:
            made = SimpleNamespace()
            for name, entry in table.items():
                with ops.loading_layer(layout.layer_of(name, first, out) if layer is None else layer):
                    setattr(made, name, make(entry) if entry is not None and ops.has_layer(layer) else None)
                bar.update()
            return made

        with ops.loading():
            weights = handles(layout.top)
            weights.layers = [handles(table, layer) for layer, table in enumerate(layout.layers, first)]
    return weights


@dataclass(frozen=True)
class Misfits:
    """Tensors of a checkpoint that do not fit a layout.

    missing    names that the layout lists and the checkpoint lacks
    unused     names that neither the layout nor its `ignored` lists
    misshapen  a sentence for each weight whose stored shape differs from the layout's
    """

    missing: list[str]
    unused: list[str]
    misshapen: list[str]


def account(checkpoint: Checkpoint, layout: Layout) -> None:
    """Refuse a checkpoint with tensors that are missing, unknown to the model, or of a wrong shape."""
    found = misfits(checkpoint, layout)
    if found.missing:
        raise BimetalError(f"{checkpoint.path} lacks {_listed(found.missing)}")
    if found.unused:
        raise BimetalError(f"{checkpoint.path} has {_listed(found.unused)}, which this architecture does not use")
    if found.misshapen:
        raise BimetalError(found.misshapen[0])


def misfits(checkpoint: Checkpoint, layout: Layout) -> Misfits:
    """List the mismatches between checkpoint and layout, by the headers; of an unknown bias also by its values."""
    used = layout.names()
    unknown = (name for name in checkpoint.tensors if name not in used and layout.ignored(name) is None)
    unused = (name for name in unknown if not _adds_nothing(checkpoint.tensors[name]))
    weights = [stored for entry in layout.entries() for stored in entry.parts]
    misshapen = (_misshapen(checkpoint, stored) for stored in weights if checkpoint.tensors.keys() >= set(stored.names))
    return Misfits(
        sorted(used - checkpoint.tensors.keys()), sorted(unused), list(dict.fromkeys(filter(None, misshapen)))
    )


def _adds_nothing(tensor: Tensor) -> bool:
    """Test whether a tensor is a bias of zeros, which AutoGPTQ writes for matrices whose model has no bias."""
    is_bias = tensor.name.endswith(".bias") and len(tensor.shape) == 1 and tensor.type in ("F32", "F16", "BF16")
    return is_bias and not dequantize(tensor).any()


def _misshapen(checkpoint: Checkpoint, stored: Stored) -> str | None:
    """Return a sentence if the weight cannot have its stored shape; a fix may change a shape, but not its elements."""
    expected = stored.whole
    experts = (len(stored.names),) if len(stored.names) > 1 else ()
    for name in stored.names:
        shape = (*experts, *checkpoint.tensors[name].shape)
        fits = math.prod(shape) == math.prod(expected) if stored.fix else same_axes(shape, expected)
        if not fits:
            return _wrong_shape(name, shape[len(experts) :], expected[len(experts) :])
        if stored.shard:
            stored.shard.check(checkpoint.tensors[name])
    return None


def _wrong_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
    return f"{name}: shape {shape}, the model's configuration says {expected}"


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor{'s' if len(names) > 1 else ''} " + ", ".join(names[:3]) + rest


def _handle(checkpoint: Checkpoint, entry: "Matrix | Vector", ops: Ops) -> Any:
    unseen = isinstance(entry, Matrix) and ops.checks_scales
    parts = [canonical(checkpoint, stored, unseen) for stored in entry.parts]
    if isinstance(entry, Vector) and not np.isfinite(dequantize(parts[0])).all():
        raise BimetalError(f"{parts[0].name} is not finite")  # as stored, or once fixed: exp of a large A_log
    handle = to_backend(entry, parts, ops)
    for stored in entry.parts:
        for name in stored.names:
            checkpoint.release(checkpoint.tensors[name])
    return handle


def to_backend(entry: "Matrix | Vector", parts: Sequence[Tensor], ops: Ops) -> Any:
    """Return the handle of a weight, of the canonical tensors of its parts."""
    if isinstance(entry, Vector):
        return ops.vector(parts[0])
    return ops.expert_weight(*parts) if isinstance(entry, ExpertMatrix) else ops.weight(*parts)


def own_part(checkpoint: Checkpoint, stored: Stored) -> list[Tensor]:
    """Return the tensors of a weight as stored, or this rank's part; raises ValueError if they are too short."""
    tensors = [checkpoint.tensors[name].read() for name in stored.names]
    return [stored.shard.cut(tensor) for tensor in tensors] if stored.shard else tensors


def canonical(checkpoint: Checkpoint, stored: Stored, unseen: bool) -> Tensor:
    """Return the weight as a backend takes it, of a checkpoint that `account` accepted.

    unseen  the backend checks scales itself: bytes that it receives as stored are not checked here
    """
    try:
        tensors = own_part(checkpoint, stored)
    except ValueError as error:
        first = checkpoint.tensors[stored.names[0]]
        raise BimetalError(_wrong_shape(first.name, first.shape, stored.whole)) from error
    for tensor in tensors if stored.fix or len(tensors) > 1 or not unseen else ():
        check_scales(tensor)
    tensor = stack(tensors) if len(tensors) > 1 else tensors[0]
    if tensor.scales is None and tensor.type in PLAIN and not tensor.type.startswith("F"):
        raise BimetalError(f"{tensor.name} holds {tensor.type} values; weights are floats")
    file_shape, expected = tensor.shape, stored.part_of or stored.shape  # of this rank's part
    try:
        tensor = stored.fix(tensor) if stored.fix else tensor
    except BimetalError:
        raise
    except (ValueError, IndexError) as error:  # a fix reshapes by the configuration's sizes
        raise BimetalError(_wrong_shape(tensor.name, file_shape, expected)) from error
    if not same_axes(tensor.shape, stored.shape):
        raise BimetalError(_wrong_shape(tensor.name, file_shape, expected))
    return tensor if tensor.shape == stored.shape else tensor.reshape(stored.shape)


# -- fixes: small functions from a stored tensor to the canonical one --------------------------------------------------


def dense(name: str, values: np.ndarray) -> Tensor:
    """Return float values of any shape as an F32 tensor."""
    values = np.ascontiguousarray(values, np.float32)
    return Tensor(name, "F32", values.shape, values.view(np.uint8))


def mapped(fn: Callable[[np.ndarray], np.ndarray]) -> Fix:
    """Apply `fn` to the float32 values: for small tensors."""
    return lambda tensor: dense(tensor.name, fn(dequantize(tensor)))


@dataclass(frozen=True, eq=False)
class Reordering:
    """Fix that moves or chooses whole rows (axis 0) or columns (axis 1)."""

    axis: int
    fix: Fix

    def __call__(self, tensor: Tensor) -> Tensor:
        return self.fix(tensor)


def rows(index: np.ndarray) -> Fix:
    """Reorder or choose rows; any type."""
    return Reordering(0, lambda tensor: tensor.take_rows(index))


def columns(start: int, count: int) -> Fix:
    """Take `count` columns from `start`; refused where they begin or end inside a quantization block."""
    return lambda tensor: take_columns(tensor, [(start, start + count)])


def composed(*fixes: Fix) -> Fix:
    """Apply one fix after the other."""
    return lambda tensor: reduce(lambda part, fix: fix(part), fixes, tensor)


def column_groups(index: np.ndarray, width: int) -> Fix:
    """Reorder groups of `width` adjacent columns; refused where a quantization block straddles two groups."""

    def take(tensor: Tensor, bytes_per_column: Fraction) -> Tensor:
        size = width * bytes_per_column
        groups = tensor.data.reshape(*tensor.data.shape[:-1], len(index), int(size))
        return replace(tensor, data=groups[..., index, :].reshape(tensor.data.shape))

    def fix(tensor: Tensor) -> Tensor:
        if tensor.shape[-1] != width * len(index):
            raise ValueError("columns")
        if tensor.scales is None and width % (unit := BLOCKS[tensor.type].elements):
            raise BimetalError(f"{tensor.name}: {tensor.type} blocks of {unit} straddle heads of {width} columns")
        if tensor.scales is not None and width % tensor.group_size:
            raise BimetalError(f"{tensor.name}: groups of {tensor.group_size} straddle heads of {width} columns")
        if tensor.scales is None:
            return take(tensor, Fraction(tensor.data.shape[-1], tensor.shape[-1]))
        per_group = Fraction(tensor.scales.data.shape[-1], tensor.shape[-1])
        return replace(
            take(tensor, Fraction(tensor.bits, 8)),
            scales=take(tensor.scales, per_group),
            biases=tensor.biases and take(tensor.biases, per_group),
        )

    return Reordering(1, fix)


def exchanged(tensor: Tensor) -> Tensor:
    """Exchange rows and columns of each matrix of a stack, of floats."""
    count, rows, columns = tensor.shape
    items = tensor.data.reshape(count, rows, columns, -1).swapaxes(1, 2)
    return replace(tensor, shape=(count, columns, rows), data=np.ascontiguousarray(items).reshape(count, columns, -1))
