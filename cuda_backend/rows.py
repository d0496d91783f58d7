"""Ops that work row by row, and products of rows with matrices: norms, ropes, gates, sums, `linear`, `embed`."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from common.ops import Rope
from common.step import MAX_DECODE_ROWS
from cuda_backend import products
from cuda_backend.arrays import Array
from cuda_backend.context import Context
from cuda_backend.fuse import fused
from cuda_backend.launch import kernel
from cuda_backend.layout import padded
from cuda_backend.lazy import Lazy, Op, Target, lazy_of
from cuda_backend.memory import Memory
from cuda_backend.prototypes import ROPE
from cuda_backend.views import (
    ADD,
    COPY,
    GEGLU,
    MUL_SIGMOID,
    MUL_SOFTPLUS,
    NOTHING,
    SWIGLU,
    float4_aligned,
    out_of,
    packed_only,
    view,
)
from cuda_backend.weights import Weight


def pieces_of(V: int) -> int:
    """Return the number of keys per row of logits that kernels/sample.cu add_up writes."""
    return -(-V // 1024)


LIGHT = {SWIGLU: "swiglu", GEGLU: "geglu", MUL_SIGMOID: "mul_sigmoid"}  # the ops of kernels/light.cu

# -- products ----------------------------------------------------------------------------------------------------------


def embed(context: Context, table: Weight, tokens: Any) -> Array:
    tokens = context.on_device(tokens)
    return products.embed(context, table, tokens.address, len(tokens))


def linear(context: Context, x: Array, w: Weight) -> Array:
    if x.shape[-1] != w.columns:
        raise ValueError(f"linear: x {x.shape} times a matrix of {w.rows} x {w.columns}")
    if not x.shape[0]:
        return Array((0, w.rows))
    return products.linear(context, as_lazy(context, x), w)


def as_lazy(context: Context, x: Array) -> Lazy:
    """Return the lazy op that computes x; if x is computed already, a lazy copy of it."""
    return lazy_of(x) or copied(context, x)


def copied(context: Context, x: Array) -> Lazy:
    return pointwise(context, COPY, x, x)


def dense(context: Context, x: Array) -> Array:
    """Return x computed, contiguous and without partial sums, in the arena."""
    return Array(x.shape, as_lazy(context, x).as_dense())


def summed(context: Context, x: Array) -> Array:
    """Return x without partial sums."""
    return x if x.partials == 1 else Array(x.shape, copied(context, x).as_dense())


def out_of_arena(context: Context, x: Array, count: int) -> Array:
    """Copy the first `count` rows of x out of the arena, which the next step overwrites; add up partial sums.

    If kernels can read rows four floats at a time, as for logits, the same launch finds the largest keys of each row.
    """
    count, stream = min(count, x.shape[0]), context.stream
    shape = (count, *x.shape[1:])
    if len(shape) == 2 and all(shape) and float4_aligned(x):
        pieces, size = pieces_of(shape[1]), 4 * count * shape[1]
        memory = Memory(size + 8 * count * pieces, stream)
        out = Array(shape, memory.address, owner=memory)
        out.best = memory.address + size
        kernel("sample", "add_up")((pieces, count), (256,), (view(x), shape[1], out.address, out.best), stream=stream)
        return out
    memory = Memory(4 * math.prod(shape), stream)
    out = Array(shape, memory.address, owner=memory)
    if out.size:
        copy = pointwise(context, COPY, x[:count], x)
        copy.op.emit(copy, Target(dense=memory.address))
    return out


def keep(context: Context, x: Array) -> Array:
    """Copy x to the part of the arena that lasts until the end of the step."""
    if not x.size:
        return x
    lazy = lazy_of(x)
    if lazy and not lazy.forms.dense:
        lazy.forms.dense = context.arena.take(lazy.T * lazy.K * 4, lasting=True)
        lazy.op.emit(lazy, Target(dense=lazy.forms.dense))
        return Array(x.shape, lazy.forms.dense)  # the op's inputs will be overwritten
    out = Array(x.shape, context.arena.take(4 * x.size, lasting=True))
    copy = copied(context, x)
    copy.op.emit(copy, Target(dense=out.address))
    return out


# -- sums and gates ----------------------------------------------------------------------------------------------------


def add(context: Context, x: Array, y: Array) -> Array:
    if len(y.shape) < len(x.shape) or y.shape[0] == 1 < x.shape[0]:
        y = summed(context, y)
        y = Array(x.shape, y.address, strides=(0, 1), owner=y.owner)
    experts = fused("add", x)
    if experts:
        y.compute()  # after the branch that may compute it
        return Array(x.shape, lazy=Lazy(context, experts.op, experts.T, experts.K, (*experts.inputs, y)))
    return Array(x.shape, lazy=pointwise(context, ADD, x, y))


def swiglu(context: Context, gate: Array, up: Array) -> Array:
    return Array(gate.shape, lazy=pointwise(context, SWIGLU, gate, up))


def geglu(context: Context, gate: Array, up: Array) -> Array:
    return Array(gate.shape, lazy=pointwise(context, GEGLU, gate, up))


def scale(context: Context, x: Array, factor: float) -> Array:
    T, K = x.shape
    return Array(x.shape, lazy=Lazy(context, SCALE, T, K, (x,), factor))


def _emit_scale(lazy: Lazy, target: Target) -> None:
    (x,), factor, out = lazy.inputs, lazy.parameters, out_of(target, lazy.K)
    grid = (lazy.T, -(-int(out["groups"]) // 32))
    kernel("rows", "scale")(grid, (256,), (view(x), factor, out), stream=lazy.context.stream)


SCALE = Op("scale", _emit_scale)


def mul_sigmoid(context: Context, x: Array, gate: Array) -> Array:
    return _gated(context, MUL_SIGMOID, x, gate)


def mul_softplus(context: Context, x: Array, gate: Array) -> Array:
    return _gated(context, MUL_SOFTPLUS, x, gate)


def _gated(context: Context, code: int, x: Array, gate: Array) -> Array:
    attention = fused("gate", x) if len(x.shape) == 3 else None
    if attention:
        parameters = attention.parameters._replace(code=code, gate=gate)
        op = replace(attention.op, name="gated attention")
        return Array(x.shape, lazy=Lazy(context, op, attention.T, attention.K, (), parameters))
    return Array(x.shape, lazy=pointwise(context, code, x, gate))


def pointwise(context: Context, code: int, x: Array, y: Array) -> Lazy:
    """Run an op of kernels/rows.cu pointwise on each element of x and y."""
    return Lazy(context, POINTWISE[code], x.shape[0], math.prod(x.shape[1:]), (x, y), code)


def _emit_pointwise(lazy: Lazy, target: Target) -> None:
    (x, y), code, stream = lazy.inputs, lazy.parameters, lazy.context.stream
    out = out_of(target, lazy.K)
    name = LIGHT.get(code)
    if (
        name
        and lazy.T <= MAX_DECODE_ROWS
        and float4_aligned(x, flat=True)
        and float4_aligned(y, flat=code != MUL_SIGMOID)
    ):
        defines = (f"PARTIALS={x.partials}", f"OTHERS={y.partials}", *packed_only(out))
        grid = (-(-int(out["groups"]) // 8), lazy.T)
        kernel("light", name, defines)(grid, (64,), (view(x), view(y), out), stream=stream)
        return
    grid = (lazy.T, -(-int(out["groups"]) // 32))
    kernel("rows", "pointwise")(grid, (256,), (code, view(x), view(y, repeats=x.shape[-1]), out), stream=stream)


NAMES = {COPY: "copy", ADD: "add", SWIGLU: "swiglu", GEGLU: "geglu"}
NAMES |= {MUL_SIGMOID: "mul_sigmoid", MUL_SOFTPLUS: "mul_softplus"}
POINTWISE = {code: Op(name, _emit_pointwise) for code, name in NAMES.items()}

# -- norms -------------------------------------------------------------------------------------------------------------


class Norm(NamedTuple):
    weight: Array | None
    eps: float

    @property
    def address(self) -> int:
        return self.weight.address if self.weight else 0


def rms_norm(context: Context, x: Array, weight: Array | None, eps: float) -> Array:
    if len(x.shape) == 3:
        return _heads(context, x, Heads(True, weight, eps))
    T, K = x.shape
    return Array((T, K), lazy=Lazy(context, NORM, T, K, (x,), Norm(weight, eps)))


def _terms(lazy: Lazy) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the input of a norm: one array, or two, whose sum is also written to an address."""
    (x,) = lazy.inputs
    added = fused("norm", x)
    if not added:
        return view(x), NOTHING, 0
    added.forms.dense = lazy.context.arena.take(lazy.T * lazy.K * 4)
    first, second = added.inputs
    return view(first), view(second), added.forms.dense


def _emit_norm(lazy: Lazy, target: Target) -> None:
    norm: Norm = lazy.parameters
    first, second, total = _terms(lazy)
    args = (first, second, total != 0, norm.address, norm.eps, total, out_of(target, lazy.K))
    kernel("rows", "add_norm")((lazy.T,), (256,), args, stream=lazy.context.stream)


def _emit_deferred_norm(lazy: Lazy, target: Target, squares: int) -> None:
    (x,), norm, context = lazy.inputs, lazy.parameters, lazy.context
    out = out_of(target, lazy.K)
    grid = (-(-int(out["groups"]) // 8), lazy.T)
    added = fused("norm", x)
    term = fused("norm of a sum", added.inputs[1]) if added else None
    experts = term if term and term.op.name == "experts" else None
    if added and term:
        added.forms.dense = context.arena.take(lazy.T * lazy.K * 4)
    if added and term and not experts:  # the term is a sum over GPUs
        term.parameters.launch_norm(added.inputs[0], term.inputs[0], norm.address, added.forms.dense, squares, out)
        return
    if added and experts:
        y, chosen, *other = experts.inputs
        defines = (f"CHOSEN={chosen.shape[1]}", f"PARTIALS={y.partials}", *packed_only(out))
        mixture = (view(y), chosen.address, view(other[0]) if other else NOTHING, len(other))
        both = (*mixture, view(added.inputs[0]), norm.address, added.forms.dense, squares, out)
        kernel("moe", "combine_scale", defines)(grid, (64,), both, stream=context.stream)
        return
    counts = tuple(term.partials for term in added.inputs) if added else (x.partials, 0)
    first, second, total = _terms(lazy)
    defines = (f"PARTIALS={counts[0]}", f"OTHERS={counts[1]}", *packed_only(out))
    args = (first, second, norm.address, total, squares, out)
    kernel("light", "add_scale", defines)(grid, (64,), args, stream=context.stream)


NORM = Op("norm", _emit_norm, _emit_deferred_norm)

# -- heads -------------------------------------------------------------------------------------------------------------


NO_ROPE = np.zeros((), ROPE)


class Heads(NamedTuple):
    """Parameters of an op on each head of x (T, H, D): norm, then rope, then silu(gate)."""

    norm: bool
    weight: Array | None = None
    eps: float = 0.0
    rope: np.ndarray = NO_ROPE  # prelude.cuh Rope
    positions: Array | None = None  # kept alive here: `rope` has only its address
    gate: Array | None = None

    @property
    def address(self) -> int:
        return self.weight.address if self.weight else 0


def rope(context: Context, x: Array, positions: Any, rope: Rope) -> Array:
    return _heads(context, x, _with_rope(context, Heads(False), positions, rope))


def norm_rope(context: Context, x: Array, weight: Array, positions: Any, rope: Rope, eps: float) -> Array:
    return _heads(context, x, _with_rope(context, Heads(True, weight, eps), positions, rope))


def gated_rms_norm(context: Context, x: Array, weight: Array, z: Array, eps: float) -> Array:
    return _heads(context, x, Heads(True, weight, eps, gate=z))


def _with_rope(context: Context, heads: Heads, positions: Any, rope: Rope) -> Heads:
    places = context.on_device(positions)
    return heads._replace(rope=context.rope_of(rope, places), positions=places)


def _heads(context: Context, x: Array, parameters: Heads) -> Array:
    T, H, D = x.shape
    return Array((T, H, D), lazy=Lazy(context, HEADS, T, H * D, (x,), parameters))


def _emit_heads(lazy: Lazy, target: Target) -> None:
    (x,), heads, stream = lazy.inputs, lazy.parameters, lazy.context.stream
    T, H, D = x.shape
    if (target.packed and target.packing.joins(D)) or (target.product and D % 32):
        emit_copy(lazy, target)
        return
    out = out_of(target, lazy.K)
    light = heads.gate and heads.norm and D == 128 and heads.weight and T <= MAX_DECODE_ROWS
    if light and float4_aligned(x, heads.gate, flat=False):
        short = (view(x), H, T, heads.address, heads.eps, view(heads.gate), out)
        kernel("light", "gated_norm")((-(-T * H // 2),), (64,), short, stream=stream)
        return
    gate = view(heads.gate) if heads.gate else NOTHING
    args = (view(x), H, D, T, heads.norm, heads.address, heads.eps, heads.rope, gate, heads.gate is not None, out)
    kernel("rows", "heads")((-(-T * H // 8),), (256,), args, shared_mem=32 * padded(D), stream=stream)


def emit_copy(lazy: Lazy, target: Target) -> None:
    """Write a form of an op from its float32 rows, for an op whose own kernel does not write this form."""
    flat = Array((lazy.T, lazy.K), lazy.as_dense())
    copy = copied(lazy.context, flat)
    copy.op.emit(copy, target)


HEADS = Op("heads", _emit_heads)


def before_heads(x: Array) -> Array:
    """Return the input of x's norm and rope if the launch that writes the cache can compute both; else None."""
    heads = fused("cache", x)
    return heads.inputs[0] if heads else x


def norm_and_rope(x: Array) -> tuple[bool, int, float, np.ndarray]:
    """Return (whether there is a norm, the address of its weight, its epsilon, the rope) of `before_heads`."""
    heads = fused("cache", x)
    if not heads:
        return False, 0, 0.0, NO_ROPE
    return heads.parameters.norm, heads.parameters.address, heads.parameters.eps, heads.parameters.rope


def before_bias(x: Array) -> tuple[Array, int]:
    """Return the input of x, and the address of the vector that the launch that writes the cache adds; else (x, 0)."""
    added = fused("biased cache", x)
    return (added.inputs[0].reshape(x.shape), added.inputs[1].address) if added else (x, 0)


def before_rope(x: Array) -> tuple[Array, np.ndarray]:
    """Return (input, rope) of x if x is a rope that has not run, else (x, None)."""
    heads = fused("latent cache", x)
    return (heads.inputs[0], heads.parameters.rope) if heads else (x, NO_ROPE)


def block_conv(context: Context, x: Array, row_taps: Array, base: Array) -> Array:
    (T, C), n = x.shape, base.shape[0]
    out = Array((T, C), context.arena.take(T * C * 4))
    args = view(x), view(row_taps), base.address, C, n, row_taps.shape[1] // n, out.address
    kernel("block_conv", "block_conv")((-(-C // 256), T), (256,), args, stream=context.stream)
    return out
