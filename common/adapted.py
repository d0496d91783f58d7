"""The weights of a model with LoRA adapters: a product W x becomes W x + up (down x), and W stays as it is stored."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from common.adapters import Adapter, Change, Place
from common.checkpoint import Checkpoint
from common.errors import BimetalError, shown
from common.ops import Array, Ops, Weight
from common.quantize import FLOAT_TYPES, float_bytes
from common.quants import dequantize, q8_0_blocks
from common.tensors import Converted, Tensor
from common.weights import ExpertMatrix, Layout, Matrix, Reordering, Stored, Table, dense

MOST_RANK = 4096
MULTIPLE = 32  # of which the rank of a changed weight is a multiple, by rows of zeros: columns of a block
KEPT_AS_STORED = "embeddings, heads of the vocabulary, routers, experts, shared experts, matrices per attention head"
PER_HEAD = {"k_up", "v_up"}  # names in a model's table of weights that `linear` does not multiply, and in mixtures
IN_MIXTURES = {"router", "gate_up", "down", "shared_gate"}


class Adapted(NamedTuple):
    """Handles of a weight and of its change: `linear` adds both products."""

    base: Weight
    down: Weight
    up: Weight


def linear(ops: Ops, x: Array, w: Weight | Adapted) -> Array:
    """Compute x @ w.T of x (T, columns), with the change of an adapter if `w` has one: (T, rows)."""
    if type(w) is not Adapted:
        return ops.linear(x, w)
    return ops.add(ops.linear(x, w.base), ops.linear(ops.linear(x, w.down), w.up))


def handles_of(w: Weight | Adapted) -> Sequence[Weight]:
    """List the handles of a weight."""
    return w if type(w) is Adapted else (w,)


def changes_of(layout: Layout, adapters: Sequence[Adapter]) -> dict[Matrix, Change]:
    """Return the joined change of each matrix that adapters change; refuses changes that no matrix can take."""
    found: dict[Matrix, list[Change]] = {}
    for adapter in adapters:
        used = set[Place]()
        for layer, table in enumerate(layout.layers):
            for name, entry in table.items():
                if isinstance(entry, Matrix) and is_adaptable(table, name, entry):
                    parts = [_of_part(adapter, layer, part, used) for part in entry.parts]
                    if any(parts):
                        found.setdefault(entry, []).append(_stacked(entry, parts))
        if left := [place for place in adapter.changes if place not in used]:
            place, name = left[0]
            where = "" if place is None else f" of layer {place}"
            more = f" and {len(left) - 1} more weights" if len(left) > 1 else ""
            raise BimetalError(
                f"adapter {adapter.path} changes {shown(name)}{where}{more}, which this model lacks or cannot change; "
                f"not changed are {KEPT_AS_STORED}"
            )
    return {entry: _joined(changes) for entry, changes in found.items()}


def is_adaptable(table: Table, name: str, entry: Matrix) -> bool:
    """Test whether an adapter may change the matrix `name` of a layer's table: whether `linear` multiplies by it."""
    in_mixture = "router" in table and name in IN_MIXTURES
    return not (isinstance(entry, ExpertMatrix) or name in PER_HEAD or in_mixture)


def _of_part(adapter: Adapter, layer: int, part: Stored, used: set[Place]) -> Change | None:
    """Return the change of a weight in its canonical order of rows and columns; None if the adapter has none."""
    name, fix = part.aliases.get(adapter.dialect, ("", None))
    change = adapter.changes.get((layer, name))
    if change is None:
        return None
    used.add((layer, name))
    shape = len(change.up), change.down.shape[1]
    if shape != part.whole or change.up.shape[1] != len(change.down) or len(change.down) > MOST_RANK:
        raise BimetalError(
            f"adapter {adapter.path} changes {shown(name)} by {change.up.shape} times {change.down.shape}; the model's "
            f"is {part.whole}, and a rank is at most {MOST_RANK}"
        )
    factors = [dense(name, change.down), dense(name, change.up)]
    if part.shard:  # rows are those of `up`, columns those of `down`
        factor = 1 - part.shard.axis % 2
        factors[factor] = part.shard.cut(factors[factor])
    if isinstance(fix, Reordering):
        factors[1 - fix.axis] = fix(factors[1 - fix.axis])
    elif fix is not None:
        raise BimetalError(f"adapter {adapter.path} changes {shown(name)}, whose stored form this model converts")
    return Change(*map(dequantize, factors))


def _stacked(entry: Matrix, parts: Sequence[Change | None]) -> Change:
    """Return the change of a matrix whose parts are stacked by rows; ranks of parts lie side by side."""
    rank = sum(len(part.down) for part in parts if part)
    up, row, column = np.zeros((sum(stored.shape[0] for stored in entry.parts), rank), np.float32), 0, 0
    for stored, part in zip(entry.parts, parts, strict=True):
        if part:
            up[row : row + stored.shape[0], column : column + len(part.down)] = part.up
            column += len(part.down)
        row += stored.shape[0]
    return Change(np.concatenate([part.down for part in parts if part]), up)


def _joined(changes: Sequence[Change]) -> Change:
    """Return the sum of several adapters' changes, with a rank that is a multiple of MULTIPLE."""
    down, up = np.concatenate([c.down for c in changes]), np.concatenate([c.up for c in changes], axis=1)
    more = -len(down) % MULTIPLE
    return Change(np.pad(down, ((0, more), (0, 0))), np.pad(up, ((0, 0), (0, more))))


def adapter_of(layout: Layout, adapters: Sequence[Adapter], ops: Ops) -> Callable[[Matrix, Weight], Weight | Adapted]:
    """Return a function that adds the change of a matrix, if there is one, to the matrix's handle."""
    changes = changes_of(layout, adapters)

    def adapt(entry: Matrix, base: Weight) -> Weight | Adapted:
        if entry not in changes:
            return base
        down, up = (ops.weight(factor) for factor in factors_of(changes[entry], ops.adapter_type))
        return Adapted(base, down, up)

    return adapt


def merged(checkpoint: Checkpoint, layout: Layout) -> Checkpoint:
    """Return the checkpoint with its adapters added to its weights, each when its bytes are read.

    A weight keeps its float type; a quantized one becomes F32. Raises BimetalError for adapters that name weights in
    another dialect than the checkpoint, whose rows may have another order.
    """
    dialect = "gguf" if checkpoint.format == "gguf" else "hf"
    changes_of(layout, checkpoint.adapters)  # refuses what does not fit
    tensors = dict(checkpoint.tensors)
    for adapter in checkpoint.adapters:
        if adapter.dialect != dialect:
            kinds = {"gguf": "a GGUF file", "hf": "a Hugging Face or MLX folder"}
            raise BimetalError(
                f"adapter {adapter.path} is {kinds[adapter.dialect]} and {checkpoint.path} is {kinds[dialect]}; "
                "only adapters and models of one kind can be merged"
            )
        for layer, table in enumerate(layout.layers):
            parts = [part for entry in table.values() if isinstance(entry, Matrix) for part in entry.parts]
            for name, part in {part.names[0]: part for part in parts if dialect in part.aliases}.items():
                if change := adapter.changes.get((layer, part.aliases[dialect][0])):
                    tensors[name] = _changed(tensors[name], change)
    return replace(checkpoint, tensors=tensors)


def _changed(tensor: Tensor, change: Change) -> Tensor:
    type_ = tensor.type if tensor.type in FLOAT_TYPES else "F32"

    def convert() -> np.ndarray:
        values = dequantize(tensor) + (change.up @ change.down).reshape(tensor.shape)
        return float_bytes(values, type_)

    row_bytes = tensor.shape[-1] * (4 if type_ == "F32" else 2)
    return Converted(tensor.name, type_, tensor.shape, row_bytes, (tensor,), convert)


def factors_of(change: Change, type_: str) -> tuple[Tensor, Tensor]:
    """Return both factors as tensors of a file, of type F32, or Q8_0 where columns divide into its blocks, else F16."""
    down, up = (_tensor(name, values, type_) for name, values in zip(("down", "up"), change, strict=True))
    return down, up


def _tensor(name: str, values: np.ndarray, type_: str) -> Tensor:
    if type_ == "F32":
        return dense(name, values)
    with np.errstate(over="ignore"):  # the backend refuses scales and values beyond float16
        if values.shape[1] % 32:
            return Tensor(name, "F16", values.shape, values.astype(np.float16).view(np.uint8))
        return Tensor(name, type_, values.shape, q8_0_blocks(values))
