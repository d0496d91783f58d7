"""Convolution and the gated delta rule, by themselves and as one mixer, and the commit of what they keep."""

from typing import TYPE_CHECKING, Any

import numpy as np

from common.ops import Ops
from common.step import MAX_DECODE_ROWS, Step
from cuda_backend.arrays import Array
from cuda_backend.launch import kernel
from cuda_backend.layout import UNPACKED, Packing, delta_slot, delta_slots, padded
from cuda_backend.lazy import Node
from cuda_backend.states import Conv, Delta, Recurrent
from cuda_backend.tree_order import BEFORE
from cuda_backend.views import NOTHING, in_fours, only, out_of, view

if TYPE_CHECKING:
    from cuda_backend.ops import CudaOps


def short_conv(ops: "CudaOps", x: Array, taps: Array, conv: Conv, step: Any) -> Array:
    T, C = x.shape
    step = ops.step_of(step, conv.store, recurrent=True)
    out = Array((T, C), ops.arena.take(T * C * 4))
    _conv(ops, view(x), taps.address, conv, step.state, T, out.address)
    return out


def gated_delta(
    ops: "CudaOps",
    q: Array,
    k: Array,
    v: Array,
    a: Array,
    b: Array,
    decay: Array,
    dt_bias: Array,
    delta: Delta,
    step: Any,
) -> Array:
    T, Hv, Dv = v.shape
    out = Array((T, Hv, Dv), ops.arena.take(T * Hv * Dv * 4))
    step = ops.step_of(step, delta.store, recurrent=True)
    inputs = tuple(view(x) for x in (*(_in_fours(ops, ops.summed(x)) for x in (q, k, v)), a, b))
    weights = decay.address, dt_bias.address
    _delta(ops, inputs, *weights, delta, step.state, T, out_of(out.address, 0, 0, Hv * Dv, UNPACKED))
    return out


def delta_mixer(
    ops: "CudaOps",
    qkv: Array,
    z: Array,
    a: Array,
    b: Array,
    taps: Array,
    decay: Array,
    dt_bias: Array,
    norm: Array,
    eps: float,
    key_heads: int,
    conv: Conv,
    delta: Delta,
    step: Any,
) -> Array:
    T, Hv, Dv = z.shape
    if conv.spec.taps > BEFORE + 1:
        states = conv, delta, step
        return Ops.delta_mixer(ops, qkv, z, a, b, taps, decay, dt_bias, norm, eps, key_heads, *states)
    step = ops.step_of(step, delta.store, recurrent=True)
    inputs, weights = (view(_in_fours(ops, qkv)), NOTHING, NOTHING, view(a), view(b)), (decay.address, dt_bias.address)
    before = conv, taps.address
    if ops.card.capability < 90 or Dv != 128 or delta.spec.key_dim > 128 or not in_fours(z, flat=False):
        o = Array((T, Hv, Dv), ops.arena.take(T * Hv * Dv * 4))
        _delta(ops, inputs, *weights, delta, step.state, T, out_of(o.address, 0, 0, Hv * Dv, UNPACKED), before)
        return ops.gated_rms_norm(o, norm, z, eps)
    after = view(z), norm.address, eps

    def emit(dense: int, packed: int, bf16: int, packing: Packing) -> None:
        out = out_of(dense, packed, bf16, Hv * Dv, packing)
        _delta(ops, inputs, *weights, delta, step.state, T, out, before, after)

    node = Node(ops.arena, T, Hv * Dv, emit)
    if ops.replay.active:
        return Array((T, Hv, Dv), node=node)
    return Array((T, Hv, Dv), node.as_dense())  # a commit may come before the result is read


def _in_fours(ops: "CudaOps", x: Array) -> Array:
    return x if in_fours(x, flat=False) else ops.dense(x)


def settle(ops: "CudaOps", recurrent: Recurrent) -> None:
    """Apply the committed path of every layer, as the next step would, with no rows."""
    inputs = ops.replay.small
    inputs.upload(Step.chain(np.empty(0, np.int32), 0), 0, recurrent.current, recurrent.path)
    for layer in recurrent.layers():
        if isinstance(layer, Conv):
            _conv(ops, NOTHING, 0, layer, inputs.memory.address, 1, 0)
        else:
            _delta(ops, (NOTHING,) * 5, 0, 0, layer, inputs.memory.address, 0, out_of(0, 0, 0, 0, UNPACKED))


def _conv(ops: "CudaOps", x: np.ndarray, taps: int, conv: Conv, step: int, T: int, out: int) -> None:
    C, n = conv.spec.channels, conv.spec.taps - 1
    kernel("conv", "conv")(
        (-(-C // 256), T),
        (256,),
        (
            x,
            np.uint64(taps),
            np.int32(C),
            np.int32(n),
            np.uint64(conv.tail),
            np.int64(conv.flip),
            np.uint64(conv.rows),
            np.uint64(step),
            np.uint64(out),
        ),
        stream=ops.stream,
    )


def _delta(
    ops: "CudaOps",
    inputs: tuple[np.ndarray, ...],
    decay: int,
    bias: int,
    delta: Delta,
    step: int,
    T: int,
    out: np.ndarray,
    before: tuple[Conv, int] | None = None,
    after: tuple[np.ndarray, int, float] | None = None,
) -> None:
    """The delta rule of q, k, v, a and b, or of q, k and v's convolution (state and taps) that the first holds.

    after  z, weight and eps of the norm behind it
    """
    Hk, Hv, Dk, Dv = delta.spec.key_heads, delta.spec.heads, padded(delta.spec.key_dim), delta.spec.value_dim
    changes = delta.rows + 2 * MAX_DECODE_ROWS * Hk * Dk * 4
    factors = changes + 2 * MAX_DECODE_ROWS * Hv * Dv * 4
    conv, taps = before or (None, 0)
    z, norm, eps = after or (NOTHING, 0, 0.0)
    alone = T == 1 and conv is not None
    shared_slots, spilled, shared = delta_slots(ops.card, Dk, T, after is not None)
    most = delta_slots(ops.card, Dk, MAX_DECODE_ROWS, after is not None)[2]
    spill = ops.arena.take(Hv * -(-Dv // 64) * spilled * delta_slot(Dk)) if spilled else 0
    widths = f"DK={Dk}", f"DIM={delta.spec.key_dim}", f"TAPS={conv.spec.taps if conv else 0}"
    sums = {"SLOTS": inputs[0], "A_SLOTS": inputs[3], "B_SLOTS": inputs[4]}
    slots = tuple(f"{name}={x['slots']}" for name, x in sums.items())
    defines = *widths, f"NORM={int(after is not None)}", f"ALONE={int(alone)}", *(slots if alone else ()), *only(out)
    head = (*inputs, np.uint64(decay), np.uint64(bias), np.uint64(step), np.int32(Hk), np.int32(Hv), np.int32(Dv))
    tail = (
        np.uint64(taps),
        np.uint64(conv.tail if conv else 0),
        np.int64(conv.flip if conv else 0),
        np.uint64(conv.rows if conv else 0),
    )
    prepared: tuple[np.uint64, ...] = (np.uint64(0),) * 4
    if T and not alone:
        sizes = T * Hk * Dk, T * Hk * Dk, T * Hv * Dv, T * Hv * 2  # queries, keys, values, gates
        prepared = tuple(np.uint64(ops.arena.take(4 * n)) for n in sizes)
        kernel("prepare", "prepare", (*widths, *slots))(
            (2 * Hk + Hv * -(-Dv // 128) + -(-Hv // 16), min(-(-T // 4), 64)),
            (128,),
            (*head, np.uint64(delta.rows), np.uint64(factors), *tail, *prepared),
            stream=ops.stream,
        )
    kernel("delta", "delta", defines, most)(
        (Hv, -(-Dv // 64)),
        (448 if alone else 384,),
        (
            *head,
            np.uint64(delta.matrix),
            np.int64(delta.flip),
            np.uint64(delta.rows),
            np.uint64(changes),
            np.uint64(factors),
            *tail,
            *prepared,
            np.uint64(spill),
            np.int32(shared_slots),
            np.int32(spilled),
            z,
            np.uint64(norm),
            np.float32(eps),
            out,
        ),
        shared_mem=shared,
        stream=ops.stream,
    )
