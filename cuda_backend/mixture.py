"""Mixtures of experts: who takes a row, the experts' products and their sum, and what runs beside them."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from common.errors import BimetalError
from common.ops import Ops
from common.step import MAX_DECODE_ROWS
from cuda_backend.arrays import Array
from cuda_backend.launch import kernel
from cuda_backend.layout import PREFILL_COLS, Packing
from cuda_backend.lazy import Node
from cuda_backend.products import Groups, chosen_linear, heads_of_one, is_packed, joins
from cuda_backend.prototypes import CHOICE
from cuda_backend.views import COPY, NOTHING, SWIGLU, in_fours, view
from cuda_backend.weights import Weight, upload

if TYPE_CHECKING:
    from cuda_backend.ops import CudaOps


def route_softmax(ops: "CudaOps", logits: Array, top_k: int) -> tuple[Array, Array]:
    return _route(ops, logits, 0, top_k, 1.0)


def route_sigmoid(ops: "CudaOps", logits: Array, bias: Array, top_k: int, scale: float) -> tuple[Array, Array]:
    return _route(ops, logits, bias.address, top_k, scale)


def moe(ops: "CudaOps", x: Array, gate_up: Weight, down: Weight, ids: Array, weights: Array) -> Array:
    return _experts(ops, x, gate_up, down, ids.owner, weights)


def moe_ffn(
    ops: "CudaOps",
    x: Array,
    router: Weight,
    bias: Array | None,
    top_k: int,
    scale: float,
    gate_up: Weight,
    down: Weight,
    shared_gate_up: Weight,
    shared_down: Weight,
    shared_gate: Weight | None = None,
) -> Array:
    """A shared expert stored as the others are is one more matrix of their launches, else a branch of the graph."""
    T, E, shared = x.shape[0], router.rows, (shared_gate_up, shared_down)
    if T > MAX_DECODE_ROWS:
        return Ops.moe_ffn(ops, x, router, bias, top_k, scale, gate_up, down, *shared, shared_gate)
    address, joined = bias.address if bias else 0, joins(gate_up, shared_gate_up) and joins(down, shared_down)

    def always(x: Array) -> Array:
        y = ops.linear(x, shared_gate_up)
        F = y.shape[1] // 2
        y = ops.linear(ops.swiglu(y[:, :F], y[:, F:]), shared_down)
        return ops.mul_sigmoid(y, ops.linear(x, shared_gate)) if shared_gate else y

    def chosen(x: Array) -> Array:
        logits, last = ops.linear(x, router), shared if joined else (None, None)
        gate = ops.linear(x, shared_gate) if joined and shared_gate else None
        if T > 1 or top_k > 31 or E > 512 or not is_packed(gate_up) or not is_packed(down):
            ids, weights = _route(ops, logits, address, top_k, scale, joined, gate)
            return _experts(ops, x, gate_up, down, ids.owner, weights, last)
        weights = Array((1, top_k + joined), ops.arena.take(4 * (top_k + joined)))
        choice = _choice(ops, logits, address, top_k, scale, joined, gate, weights)
        device = ops.card, ops.arena, ops.stream
        y = chosen_linear(ops.node_of(x), gate_up, last[0], choice, *device)
        y = chosen_linear(y, down, last[1], choice, *device)
        return Array((1, down.rows), node=sum_of_experts(ops, y, weights, None))

    if joined:
        return chosen(x)
    y, best = _beside(ops, x, always, chosen)
    return ops.add(best, y)


def _experts(
    ops: "CudaOps",
    x: Array,
    gate_up: Weight,
    down: Weight,
    groups: Groups,
    weights: Array,
    shared: tuple[Weight | None, Weight | None] = (None, None),
) -> Array:
    T, k = weights.shape
    F = gate_up.rows // 2
    y = ops.grouped(ops.node_of(x), gate_up, groups, k, shared[0], known=False)
    y = ops.grouped(ops.pointwise(SWIGLU, y[:, :F], y[:, F:]), down, groups, 1, shared[1])
    return Array((T, down.rows), node=sum_of_experts(ops, y, weights, None))


def _beside(
    ops: "CudaOps", x: Array, first: Callable[[Array], Array], second: Callable[[Array], Array]
) -> tuple[Array, Array]:
    """first(x) and second(x), the first as a branch of the graph."""
    node = x.whole_node()
    if node:
        node.as_unscaled_dense()  # for both; another form is each one's own
    ops.stream.record(ops.forked)
    ops.side.wait(ops.forked)
    main, ops.stream = ops.stream, ops.side
    try:
        y = first(Array(x.shape, node=node.twin()) if node else x)
    finally:
        ops.stream = main
    z = second(x)
    ops.side.record(ops.joined)
    ops.stream.wait(ops.joined)
    return y, z


def sum_of_experts(ops: "CudaOps", y: Array, chosen: Array, other: Array | None) -> Node:
    """What each row's experts return, weighted, and what else there is to add."""
    (T, k), C = chosen.shape, y.shape[1]
    more = view(other) if other else NOTHING
    args = (view(y), np.uint64(chosen.address), np.int32(k))

    def emit(dense: int, packed: int, bf16: int, packing: Packing) -> None:
        if not dense:
            raise ValueError("the sum over experts is computed dense")
        both = (*args, np.int32(C), more, np.int32(other is not None))
        kernel("moe", "combine")((-(-C // 256), T), (256,), (*both, np.uint64(dense)), stream=ops.stream)

    node = Node(ops.arena, T, C, emit)
    node.experts = None if other else (y, chosen)
    if in_fours(y) and (other is None or in_fours(other)):
        node.joined = (f"CHOSEN={k}", f"SLOTS={y.slots}"), (*args[:2], more, np.int32(other is not None))
    return node


def _route(
    ops: "CudaOps",
    logits: Array,
    bias: int,
    top_k: int,
    scale: float,
    shared: bool = False,
    gate: Array | None = None,
) -> tuple[Array, Array]:
    """Ids and weights (T, top_k); a shared expert's, number E with the weight 1 or sigmoid(gate), behind them."""
    T, E = logits.shape
    if E > 512:
        raise BimetalError(f"a router chooses among {E} experts; the CUDA kernels take at most 512")
    k, matrices = top_k + shared, E + shared
    pairs, cols = T * k, 8 if T <= MAX_DECODE_ROWS else PREFILL_COLS
    most = min(pairs, matrices) + pairs // cols
    ids, groups, order = (ops.arena.take(n) for n in (pairs * 4, 16 * (1 + most), pairs * 4))
    chosen = Array((T, k), ops.arena.take(pairs * 4))
    choice = _choice(ops, logits, bias, top_k, scale, shared, gate, chosen)
    kernel("moe", "route", (f"PER={-(-E // 32)}",))((T,), (32,), (choice, np.uint64(ids)), stream=ops.stream)
    step = ops.replay.active
    sizes = (np.int32(T), np.int32(k), np.int32(matrices), np.int32(cols))
    kernel("moe", "group")(
        (1,),
        (1024,),
        (np.uint64(ids), np.uint64(step.state if step else 0), *sizes, np.uint64(groups), np.uint64(order)),
        shared_mem=12 * matrices,
        stream=ops.stream,
    )
    table = Groups(ids, groups, order, pairs, most, cols, k if T <= MAX_DECODE_ROWS else 0)
    return Array((T, k), ids, owner=table, dtype=np.int32), chosen


def _choice(
    ops: "CudaOps",
    logits: Array,
    bias: int,
    top_k: int,
    scale: float,
    shared: bool,
    gate: Array | None,
    weights: Array,
) -> np.ndarray:
    """kernels/choose.cuh Choice"""
    plain = logits if logits.is_dense or logits.whole_node() else ops.dense(logits)
    sizes = logits.shape[1], top_k, shared, gate is not None
    return np.array((plain.address, bias, weights.address, view(gate) if gate else NOTHING, *sizes, scale), CHOICE)


def heads_of_one_row(ops: "CudaOps", x: Array, w: Weight) -> Array | None:
    """head_linear of x (1, H, columns), packed where a product wants it; None: not by this way."""
    _, H, C = x.shape
    node = x.whole_node()
    packs = node is not None and C % 256 == 0  # else packed heads are no packed rows one after the other
    rows = x.reshape(H, C) if not packs else x
    if not is_packed(w) or len(w.segments) > 1 or not (packs or in_fours(rows)):
        return None
    source = node if node and packs else rows

    def emit(dense: int, packed: int, bf16: int, packing: Packing) -> None:
        if bf16 or (packed and (packing.cols > 1 or w.rows % 128 or H * w.rows % 256)):
            flat = Array((1, H * w.rows), made.as_dense())
            ops.pointwise(COPY, flat, flat).emit(0, packed, bf16, packing)
        else:
            heads_of_one(source, w, dense, packed, packing, ops.card, ops.stream)

    made = Node(ops.arena, 1, H * w.rows, emit)
    return Array((1, H, w.rows), node=made)


def head_groups(ops: "CudaOps", T: int, H: int) -> Groups:
    """Rows (t, head) of which each takes the matrix of its head."""
    if (T, H) in ops.heads:
        return ops.heads[T, H]
    cols = 8 if T <= MAX_DECODE_ROWS else PREFILL_COLS
    order = np.arange(T * H, dtype=np.int32).reshape(T, H).T
    groups = [(h, h * T + t, min(cols, T - t), 0) for h in range(H) for t in range(0, T, cols)]
    table = np.array([(len(groups), 0, 0, 0), *groups], np.int32)
    ids = np.tile(np.arange(H, dtype=np.int32), T)
    memory = upload(np.concatenate([table.ravel(), order.ravel(), ids]), ops.stream)
    at = memory.address
    ends = at + table.nbytes, at + table.nbytes + order.nbytes
    made = Groups(ends[1], at, ends[0], T * H, len(groups), cols, 0, memory)
    if T <= MAX_DECODE_ROWS:  # captured graphs point to it
        ops.heads[T, H] = made
    return made
