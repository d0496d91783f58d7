"""Convolution and the gated delta rule, separately and as one mixer, and the commit of their states."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from common.ops import DeltaInputs, DeltaWeights, GateWeights
from common.step import MAX_DECODE_ROWS, Step
from cuda_backend import rows
from cuda_backend.arrays import Array
from cuda_backend.caches.recurrent import Conv, Delta, Recurrent
from cuda_backend.context import Context
from cuda_backend.launch import kernel
from cuda_backend.layout import delta_saved, padded, saved_bytes
from cuda_backend.lazy import Lazy, Op, Target
from cuda_backend.runs import Run, Runs
from cuda_backend.tree_order import BEFORE
from cuda_backend.views import NOTHING, float4_aligned, out_of, packed_only, view

NARROW_ROWS = 32  # rows from which CTAs of 32 columns may be faster


class Taps(NamedTuple):
    """The convolution before the delta rule: its state, and the address of its taps."""

    conv: Conv
    address: int


class Rule(NamedTuple):
    """A delta rule over T rows.

    inputs  q, k, v, a and b as kernels read them; with `taps` the first input is q, k and v joined, not yet convolved
    decay   addresses of decay and dt_bias
    step    address of the StepState, for at most `runs` sequences
    columns  columns of the state that a CTA of kernels/delta.cu computes
    one_row_each  whether each of several sequences has one row
    """

    delta: Delta
    inputs: tuple[np.ndarray, ...]
    decay: tuple[int, int]
    step: int
    T: int
    runs: int = 1
    taps: Taps | None = None
    columns: int = 64
    one_row_each: bool = False


class GatedNorm(NamedTuple):
    """The norm after the delta rule, and the gate after the norm, as kernels/delta.cu reads them."""

    z: np.ndarray = NOTHING
    weight: int = 0
    eps: float = 0.0


def short_conv(context: Context, x: Array, taps: Array, conv: Conv, step: Any) -> Array:
    T, C = x.shape
    step = context.step_of(step, conv.store, recurrent=True)
    out = Array((T, C), context.arena.take(T * C * 4))
    _conv(context, view(x), Taps(conv, taps.address), step.address, T, out.address)
    return out


def parent_rows(context: Context, x: Array, last: Conv, step: Any) -> Array:
    T, C = x.shape
    step = context.step_of(step, last.store, recurrent=True)
    out = Array((T, C), context.arena.take(T * C * 4))
    _conv(context, view(x), Taps(last, 0), step.address, T, out.address, ("PARENTS=1",))
    return out


def gated_delta(
    context: Context,
    q: Array,
    k: Array,
    v: Array,
    a: Array,
    b: Array,
    w: GateWeights,
    delta: Delta,
    step: Any,
) -> Array:
    T, Hv, Dv = v.shape
    out = Array((T, Hv, Dv), context.arena.take(T * Hv * Dv * 4))
    step = context.step_of(step, delta.store, recurrent=True)
    inputs = tuple(view(x) for x in (*(_float4_rows(context, rows.summed(context, x)) for x in (q, k, v)), a, b))
    rule = Rule(delta, inputs, (w.decay.address, w.dt_bias.address), step.address, T, step.runs)
    _delta(context, rule, out_of(Target(dense=out.address), Hv * Dv))
    return out


def mixes(conv: Conv) -> bool:
    """Test whether `delta_mixer` supports the number of taps of the convolution."""
    return conv.spec.taps <= BEFORE + 1


def delta_mixer(
    context: Context,
    x: DeltaInputs,
    w: DeltaWeights,
    conv: Conv,
    delta: Delta,
    step: Any,
    is_part: bool = False,
) -> Array:
    """Compute convolution, delta rule and gated norm: from capability 9.0 on in one launch for one row, else in two.

    is_part  other GPUs have the other heads, so that few CTAs compute these: `_is_narrow`
    """
    T, Hv, Dv = x.z.shape
    step = context.step_of(step, delta.store, recurrent=True)
    inputs = view(_float4_rows(context, x.qkv)), NOTHING, NOTHING, view(x.a), view(x.b)
    taps = Taps(conv, w.taps.address)
    narrow = is_part and not step.one_row_each and _is_narrow(context, delta, T, step.runs)
    wide, decay = 32 if narrow else 64, (w.gates.decay.address, w.gates.dt_bias.address)
    rule = Rule(delta, inputs, decay, step.address, T, step.runs, taps, wide, step.one_row_each)
    one_launch = context.card.capability >= 90 and delta.spec.key_dim <= 128  # more rows than one of each sequence
    joins = (one_launch or step.one_row_each) and Dv == 128 and float4_aligned(x.z, flat=False)
    if narrow or not joins:
        o = Array((T, Hv, Dv), context.arena.take(T * Hv * Dv * 4))
        _delta(context, rule, out_of(Target(dense=o.address), Hv * Dv))
        return rows.gated_rms_norm(context, o, w.norm, x.z, w.eps)
    mixer = Mixer(rule, GatedNorm(view(x.z), w.norm.address, w.eps))
    lazy = Lazy(context, MIXER, T, Hv * Dv, x, mixer)
    if context.replay.active:
        return Array((T, Hv, Dv), lazy=lazy)
    return Array((T, Hv, Dv), lazy.as_dense())  # a commit may precede the read of the result


def _is_narrow(context: Context, delta: Delta, T: int, runs: int) -> bool:
    """Test whether CTAs of 32 columns are faster: the recurrence bounds the launch, and CTAs fit one wave.

    The norm is then a launch of its own, with bitwise identical results.
    """
    ctas = delta.spec.heads * -(-delta.spec.value_dim // 32) * runs
    return NARROW_ROWS <= T <= MAX_DECODE_ROWS and delta.spec.key_dim <= 128 and ctas <= context.card.sms


class Mixer(NamedTuple):
    rule: Rule
    norm: GatedNorm


def _emit_mixer(lazy: Lazy, target: Target) -> None:
    mixer: Mixer = lazy.parameters
    _delta(lazy.context, mixer.rule, out_of(target, lazy.K), mixer.norm)


MIXER = Op("delta mixer", _emit_mixer)


def _float4_rows(context: Context, x: Array) -> Array:
    return x if float4_aligned(x, flat=False) else rows.dense(context, x)


def apply_paths(context: Context, recurrent: Recurrent, slots: Sequence[int]) -> None:
    """Apply the committed paths of `slots` in every layer, by a step without rows."""
    inputs, n = context.replay.decode_inputs, len(slots)
    runs = Runs(Run(slot, i, 0) for i, slot in enumerate(slots))
    store = recurrent.pairs[slots[0]].path_store
    inputs.upload(Step.chain(np.empty(0, np.int32), 0), recurrent.inputs(runs, [0] * n)._replace(path_store=store))
    for layer in recurrent.layers():
        if isinstance(layer, Conv):
            _conv(context, NOTHING, Taps(layer, 0), inputs.memory.address, n, 0)
        else:
            rule = Rule(layer, (NOTHING,) * 5, (0, 0), inputs.memory.address, 0, n)
            _delta(context, rule, out_of(Target(), 0))


def _conv(
    context: Context, x: np.ndarray, taps: Taps, step: int, T: int, out: int, defines: tuple[str, ...] = ()
) -> None:
    conv = taps.conv
    C = conv.spec.channels
    args = (x, taps.address, C, conv.spec.taps - 1, conv.tail, conv.flip, conv.rows, step, out)
    kernel("conv", "conv", defines)((-(-C // 256), T), (256,), args, stream=context.stream)


def _delta(context: Context, rule: Rule, out: np.ndarray, norm: GatedNorm | None = None) -> None:
    """Launch kernels/delta.cu or delta_each.cu, after prepare.cu; with `norm` also the gated norm."""
    delta, _, _, step, T, runs, before, wide, one_row_each = rule
    card, arena, spec = context.card, context.arena, delta.spec
    Hk, Hv, Dk, Dv = spec.key_heads, spec.heads, padded(spec.key_dim), spec.value_dim
    alone = T == 1 and before is not None
    prepared = (0, 0, 0, 0) if alone or not T else _prepare(context, rule)
    state = delta.matrix, delta.flip, delta.keys, delta.changes, delta.factors
    with_norm, grouped = f"NORM={int(norm is not None)}", ("GROUPED=1",) if spec.grouped else ()
    end = *(norm or GatedNorm()), out
    if one_row_each:
        kernel("delta_each", "delta_each", (f"DK={Dk}", with_norm, *grouped, *packed_only(out)))(
            (Hv, runs), (256,), (step, Hk, Hv, Dv, *state, *prepared, *end), stream=context.stream
        )
        return
    shared_saved, spilled, shared = delta_saved(card, Dk, T, norm is not None, runs, wide)
    most = delta_saved(card, Dk, MAX_DECODE_ROWS, norm is not None, wide=wide)[2]
    spill = arena.take(Hv * -(-Dv // wide) * spilled * saved_bytes(Dk, wide)) if spilled else 0
    narrow = () if wide == 64 else (f"WIDE={wide}",)
    widths, partials, inputs, tail = _convolution(rule)
    defines = (
        *widths,
        with_norm,
        f"ALONE={int(alone)}",
        *narrow,
        *(partials if alone else ()),
        *grouped,
        *packed_only(out),
    )
    kernel("delta", "delta", defines, most)(
        (Hv, -(-Dv // wide), runs),
        (4 * wide + (192 if alone and Dk <= 128 else 128),),
        (*inputs, *state, *tail, *prepared, spill, shared_saved, spilled, *end),
        shared_mem=shared,
        stream=context.stream,
    )


def _prepare(context: Context, rule: Rule) -> tuple[int, ...]:
    """Launch kernels/prepare.cu; return the addresses of queries, keys, values and gates."""
    delta, T, spec = rule.delta, rule.T, rule.delta.spec
    Hk, Hv, Dk, Dv = spec.key_heads, spec.heads, padded(spec.key_dim), spec.value_dim
    prepared = tuple(context.arena.take(4 * n) for n in (T * Hk * Dk, T * Hk * Dk, T * Hv * Dv, T * Hv * 2))
    widths, partials, inputs, tail = _convolution(rule)
    kernel("prepare", "prepare", (*widths, *partials, *(("EACH=1",) if rule.one_row_each else ())))(
        (2 * Hk + Hv * -(-Dv // 128) + -(-Hv // 16), min(-(-T // 4), 64)),
        (128,),
        (*inputs, delta.keys, delta.factors, *tail, *prepared),
        stream=context.stream,
    )
    return prepared


def _convolution(rule: Rule) -> tuple[tuple[str, ...], tuple[str, ...], tuple[Any, ...], tuple[int, ...]]:
    """Return arguments shared by prepare.cu and delta.cu: two groups of definitions, first arguments, those of taps."""
    spec, (conv, taps) = rule.delta.spec, rule.taps or (None, 0)
    widths = f"DK={padded(spec.key_dim)}", f"DIM={spec.key_dim}", f"TAPS={conv.spec.taps if conv else 0}"
    sums = {"PARTIALS": rule.inputs[0], "A_PARTIALS": rule.inputs[3], "B_PARTIALS": rule.inputs[4]}
    partials = tuple(f"{name}={x['partials']}" for name, x in sums.items())
    inputs = *rule.inputs, *rule.decay, rule.step, spec.key_heads, spec.heads, spec.value_dim
    return widths, partials, inputs, (taps, conv.tail, conv.flip, conv.rows) if conv else (0, 0, 0, 0)
