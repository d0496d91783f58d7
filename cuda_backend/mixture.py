"""Mixtures of experts: routing, the experts' products and their weighted sum, and the shared expert."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np

from common.errors import BimetalError
from common.ops import ExpertBiases
from common.step import MAX_DECODE_ROWS
from cuda_backend import rows
from cuda_backend.arrays import Array
from cuda_backend.context import Context
from cuda_backend.expert_products import NO_CLAMP, Groups, chosen_linear, grouped_linear, heads_of_one, joins
from cuda_backend.fuse import dense_for_product
from cuda_backend.launch import kernel
from cuda_backend.layout import PREFILL_COLS
from cuda_backend.lazy import Lazy, Op, Target, lazy_of, moved
from cuda_backend.memory import upload
from cuda_backend.products import is_packed
from cuda_backend.prototypes import CHOICE, CLAMP
from cuda_backend.views import NOTHING, float4_aligned, out_of, view
from cuda_backend.weights import Weight


class Router(NamedTuple):
    """Parameters of the choice of experts.

    scale   sum of the weights of a row's experts; if `whole`, the factor on their probabilities
    whole   whether these probabilities are among all experts
    bias    address of the numbers added to sigmoid scores before the choice; 0: softmax
    shared  whether a shared expert is matrix number E of the same launches
    gate    of the shared expert's weight, sigmoid(gate); None: its weight is 1
    """

    top_k: int
    scale: float = 1.0
    bias: int = 0
    shared: bool = False
    gate: Array | None = None
    whole: bool = False

    @property
    def ids_per_row(self) -> int:
        """Count the matrices that a row is multiplied by."""
        return self.top_k + self.shared


class Experts(NamedTuple):
    """Experts, and perhaps a shared one beside them; `biases` are of experts without a shared one."""

    gate_up: Weight
    down: Weight
    shared_gate_up: Weight | None = None
    shared_down: Weight | None = None
    biases: ExpertBiases | None = None


def router_of(top_k: int, scale: float | None, bias: int = 0) -> Router:
    """Return the parameters of Ops.moe_ffn."""
    return Router(top_k, 1.0 if scale is None else scale, bias, whole=scale is not None and not bias)


def route_softmax(context: Context, logits: Array, top_k: int, scale: float | None = None) -> tuple[Array, Array]:
    return _route(context, logits, router_of(top_k, scale))


def route_sigmoid(context: Context, logits: Array, bias: Array, top_k: int, scale: float) -> tuple[Array, Array]:
    return _route(context, logits, Router(top_k, scale, bias.address))


def moe(
    context: Context,
    x: Array,
    gate_up: Weight,
    down: Weight,
    ids: Array,
    weights: Array,
    biases: ExpertBiases | None = None,
) -> Array:
    return _experts(context, x, Experts(gate_up, down, biases=biases), ids.owner, weights)


def moe_ffn(
    context: Context, x: Array, matrix: Weight, router: Router, experts: Experts, shared_gate: Weight | None
) -> Array:
    """Compute `Ops.moe_ffn`.

    A shared expert of the experts' type is one more matrix of their launches, one of another type a branch.

    matrix       matrix of the router
    shared_gate  matrix of the gate on the shared expert; None: no gate
    """
    shared_gate_up, shared_down = experts.shared_gate_up, experts.shared_down
    if shared_gate_up is None or shared_down is None:
        return _chosen(context, x, matrix, router, experts, None)
    if joins(experts.gate_up, shared_gate_up) and joins(experts.down, shared_down):
        return _chosen(context, x, matrix, router._replace(shared=True), experts, shared_gate)

    def always(branch: Context, x: Array) -> Array:
        y = rows.linear(branch, x, shared_gate_up)
        F = y.shape[1] // 2
        y = rows.linear(branch, rows.swiglu(branch, y[:, :F], y[:, F:]), shared_down)
        return rows.mul_sigmoid(branch, y, rows.linear(branch, x, shared_gate)) if shared_gate else y

    def chosen(x: Array) -> Array:
        return _chosen(context, x, matrix, router, Experts(experts.gate_up, experts.down), None)

    y, best = _beside(context, x, always, chosen)
    return rows.add(context, best, y)


def _chosen(
    context: Context, x: Array, matrix: Weight, router: Router, experts: Experts, shared_gate: Weight | None
) -> Array:
    """Choose experts for each row, multiply by them, and return the weighted sums."""
    logits = rows.linear(context, x, matrix)
    if experts.biases:
        logits = rows.add(context, logits, experts.biases.router)
    if context.routing and experts.gate_up.layer is not None:  # the router runs only for its time
        logits = context.routing.logits_of(experts.gate_up.layer, x.shape[0])
    router = router._replace(gate=rows.linear(context, x, shared_gate) if shared_gate else None)
    at_once = x.shape[0] == 1 and router.top_k <= 31 and matrix.rows <= 512
    if at_once and is_packed(experts.gate_up) and is_packed(experts.down):
        weights = Array((1, router.ids_per_row), context.arena.take(4 * router.ids_per_row))
        choice = _choice(context, logits, router, weights)
        _fetch(context, experts.gate_up, choice, 0, 1, router.top_k)
        return _experts_of_one(context, x, experts, choice, weights)
    ids, weights = _route(context, logits, router)
    if x.shape[0] <= MAX_DECODE_ROWS:
        _fetch(context, experts.gate_up, np.zeros((), CHOICE), ids.address, x.shape[0], router.ids_per_row)
    return _experts(context, x, experts, ids.owner, weights)


def _experts_of_one(context: Context, x: Array, experts: Experts, choice: np.ndarray, weights: Array) -> Array:
    """Compute the experts of one row; the products choose them and write their weights: kernels/choose.cuh Choice."""
    gate_up, down, shared_gate_up, shared_down, biases = experts
    ids = context.arena.take(4 * weights.shape[1]) if biases else 0
    of_pairs = biases and (biases.gate.address, biases.up.address, ids, biases.limit)
    clamp = np.array(of_pairs, CLAMP) if of_pairs else NO_CLAMP
    y = chosen_linear(context, rows.as_lazy(context, x), gate_up, shared_gate_up, choice, clamp)
    y = chosen_linear(context, y, down, shared_down, choice, clamp)
    best = Array((1, down.rows), lazy=_sum_of_experts(context, y, weights))
    return rows.add(context, best, _sum_of_biases(context, biases.down, ids, weights)) if biases else best


def _experts(context: Context, x: Array, experts: Experts, groups: Groups, weights: Array) -> Array:
    """Compute the experts of several rows, grouped by expert."""
    T, k = weights.shape
    gate_up, down, shared_gate_up, shared_down, biases = experts
    F = gate_up.rows // 2
    if T > MAX_DECODE_ROWS and context.experts and gate_up.layer is not None:
        context.experts.count_prompt(gate_up.layer, groups.ids, _step_address(context), T, k)
    with _for_rows(context, gate_up, T) as w:
        y = grouped_linear(context, rows.as_lazy(context, x), w, groups, k, shared_gate_up, groups_ready=False)
    gate, up = y[:, :F], y[:, F:]
    x = _clamped(context, gate, up, groups.ids, biases) if biases else rows.swiglu(context, gate, up)
    with _for_rows(context, down, T) as w:
        y = grouped_linear(context, rows.as_lazy(context, x), w, groups, 1, shared_down)
    best = Array((T, down.rows), lazy=_sum_of_experts(context, y, weights))
    return rows.add(context, best, _sum_of_biases(context, biases.down, groups.ids, weights)) if biases else best


def _fetch(context: Context, experts: Weight, choice: np.ndarray, ids: int, T: int, ids_per_row: int) -> None:
    """Let cold experts that T rows chose take slots: cuda_backend/hot_layers.py fetch."""
    if context.experts and experts.layer is not None:
        context.experts.fetch(experts.layer, choice, ids, _step_address(context), T, ids_per_row)


def _step_address(context: Context) -> int:
    step = context.replay.active
    return step.address if step else 0


def _for_rows(context: Context, experts: Weight, T: int) -> AbstractContextManager[Weight]:
    """Provide the experts for the launches in the block; for a prefill step all of them are in GPU memory."""
    if context.experts is None or experts.layer is None or T <= MAX_DECODE_ROWS:
        return nullcontext(experts)
    return context.experts.staged(experts)


def _beside(
    context: Context, x: Array, first: Callable[[Context, Array], Array], second: Callable[[Array], Array]
) -> tuple[Array, Array]:
    """Compute first(branch, x) and second(x), the first as a branch of the graph."""
    main, side, branch = context.stream, context.side_stream, context.branch()
    lazy = lazy_of(x)
    if lazy:
        dense_for_product(lazy)  # both read these forms; each computes any other form itself
    main.record(context.forked)
    side.wait(context.forked)
    y = moved(first(branch, moved(x, branch)), context)
    z = second(x)
    side.record(context.joined)
    main.wait(context.joined)
    return y, z


# -- biases of experts -------------------------------------------------------------------------------------------------


def _clamped(context: Context, gate: Array, up: Array, ids: int, biases: ExpertBiases) -> Array:
    """Compute the channels of pairs of a row and an expert, (pairs, F), from products without biases.

    ids  address of the pairs' experts, int32
    """
    pairs, F = gate.shape
    return Array((pairs, F), lazy=Lazy(context, CLAMPED, pairs, F, (gate, up), (ids, biases)))


def _emit_clamped(lazy: Lazy, target: Target) -> None:
    (gate, up), (ids, biases), out = lazy.inputs, lazy.parameters, out_of(target, lazy.K)
    kernel("rows", "clamped")(
        (lazy.T, -(-int(out["groups"]) // 32)),
        (256,),
        (view(gate), view(up), ids, biases.gate.address, biases.up.address, biases.limit, out),
        stream=lazy.context.stream,
    )


CLAMPED = Op("clamped swiglu", _emit_clamped)


def _sum_of_biases(context: Context, down: Array, ids: int, weights: Array) -> Array:
    """Add up the biases (E, C) of the experts of each row, weighted by `weights` (T, k): (T, C)."""
    (T, k), C = weights.shape, down.shape[1]
    out = Array((T, C), context.arena.take(T * C * 4))
    args = down.address, ids, weights.address, k, C, out.address
    kernel("moe", "sum_biases")((-(-C // 256), T), (256,), args, stream=context.stream)
    return out


# -- the sum of the experts --------------------------------------------------------------------------------------------


def _sum_of_experts(context: Context, y: Array, weights: Array) -> Lazy:
    """Add up the outputs of each row's experts, y (pairs, C), weighted by `weights` (T, k)."""
    return Lazy(context, EXPERTS, weights.shape[0], y.shape[1], (y, weights))


def _emit_experts(lazy: Lazy, target: Target) -> None:
    if not target.dense:
        rows.emit_copy(lazy, target)
        return
    y, weights, *other = lazy.inputs
    args = (
        view(y),
        weights.address,
        weights.shape[1],
        lazy.K,
        view(other[0]) if other else NOTHING,
        len(other),
        target.dense,
    )
    kernel("moe", "combine")((-(-lazy.K // 256), lazy.T), (256,), args, stream=lazy.context.stream)


EXPERTS = Op("experts", _emit_experts)

# -- routing -----------------------------------------------------------------------------------------------------------


def _route(context: Context, logits: Array, router: Router) -> tuple[Array, Array]:
    """Compute ids and weights (T, ids_per_row); a shared expert, number E, is last."""
    T, E = logits.shape
    if E > 512:
        raise BimetalError(f"a router chooses among {E} experts; the CUDA kernels take at most 512")
    arena, stream = context.arena, context.stream
    k, matrices = router.ids_per_row, E + router.shared
    pairs, cols = T * k, 8 if T <= MAX_DECODE_ROWS else PREFILL_COLS
    most = min(pairs, matrices) + pairs // cols
    ids, groups, order = (arena.take(n) for n in (pairs * 4, 16 * (1 + most), pairs * 4))
    weights = Array((T, k), arena.take(pairs * 4))
    choice = _choice(context, logits, router, weights)
    kernel("moe", "route", (f"PER={-(-E // 32)}",))((T,), (32,), (choice, ids), stream=stream)
    args = ids, _step_address(context), T, k, matrices, cols, groups, order
    kernel("moe", "group")((1,), (1024,), args, shared_mem=12 * matrices, stream=stream)
    table = Groups(ids, groups, order, pairs, most, cols, k if T <= MAX_DECODE_ROWS else 0)
    return Array((T, k), ids, owner=table, dtype=np.int32), weights


def _choice(context: Context, logits: Array, router: Router, weights: Array) -> np.ndarray:
    """Make the struct Choice of kernels/choose.cuh."""
    plain = logits if logits.is_dense or lazy_of(logits) else rows.dense(context, logits)
    gate = view(router.gate) if router.gate else NOTHING
    sizes = logits.shape[1], router.top_k, router.shared, router.gate is not None, router.whole
    return np.array((plain.address, router.bias, weights.address, gate, *sizes, router.scale), CHOICE)


# -- a matrix per head -------------------------------------------------------------------------------------------------


def head_linear(context: Context, x: Array, w: Weight) -> Array:
    """Multiply each head by its own matrix: x (T, H, columns), w (H, rows, columns) -> (T, H, rows)"""
    T, H, C = x.shape
    y = _heads_of_one_row(context, x, w) if T == 1 else None
    if y:
        return y
    lazy = lazy_of(x)
    if not lazy or C % 256:  # otherwise each packed head is a packed row, and the heads of a row are adjacent
        flat = Array((T * H, C), x.address) if lazy else x.reshape(T * H, C)
        lazy = rows.as_lazy(context, flat)
    return grouped_linear(context, lazy, w, _head_groups(context, T, H), 1).reshape(T, H, w.rows)


def _heads_of_one_row(context: Context, x: Array, w: Weight) -> Array | None:
    """Compute head_linear of x (1, H, columns), packed if a product reads it packed; None: not supported."""
    _, H, C = x.shape
    lazy = lazy_of(x)
    packs = lazy is not None and C % 256 == 0  # otherwise a packed head is not a packed row
    heads = x.reshape(H, C) if not packs else x
    if not is_packed(w) or len(w.segments) > 1 or not (packs or float4_aligned(heads)):
        return None
    return Array((1, H, w.rows), lazy=Lazy(context, HEAD_PRODUCTS, 1, H * w.rows, (heads,), w))


def _emit_head_products(lazy: Lazy, target: Target) -> None:
    (x,), w = lazy.inputs, lazy.parameters
    if target.product or (target.packed and (target.packing.cols > 1 or w.rows % 128 or lazy.K % 256)):
        rows.emit_copy(lazy, target)
    else:
        heads_of_one(lazy.context, (lazy_of(x) if len(x.shape) == 3 else None) or x, w, target)


HEAD_PRODUCTS = Op("head products", _emit_head_products)


def _head_groups(context: Context, T: int, H: int) -> Groups:
    """Group the rows (t, head), each of which takes the matrix of its head."""
    if (T, H) in context.groups:
        return context.groups[T, H]
    cols = 8 if T <= MAX_DECODE_ROWS else PREFILL_COLS
    order = np.arange(T * H, dtype=np.int32).reshape(T, H).T
    groups = [(h, h * T + t, min(cols, T - t), 0) for h in range(H) for t in range(0, T, cols)]
    table = np.array([(len(groups), 0, 0, 0), *groups], np.int32)
    ids = np.tile(np.arange(H, dtype=np.int32), T)
    memory = upload(np.concatenate([table.ravel(), order.ravel(), ids]), context.stream)
    at = memory.address
    ends = at + table.nbytes, at + table.nbytes + order.nbytes
    made = Groups(ends[1], at, ends[0], T * H, len(groups), cols, 0, memory)
    if T <= MAX_DECODE_ROWS:  # keep the tables, whose addresses captured graphs have
        context.groups[T, H] = made
    return made
