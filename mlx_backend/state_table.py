"""The table of MLX's state for each class of specs, and of its predicted bytes; states and predictions read it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from common.backend import LayerSize, decoded_bytes
from common.step import LayerState
from common.storage import ConvSpec, DeltaSpec, KVSpec, LatentSpec, LayerSpec, RowSpec, Spec, all_specs
from mlx_backend import sizes
from mlx_backend.packed import MlxPacked
from mlx_backend.quantized import DECODED
from mlx_backend.rows import MlxRows, rows_held
from mlx_backend.sizes import Prefill, Work
from mlx_backend.states import MlxConv, MlxDelta, MlxState


class StateFunctions(NamedTuple):
    """Functions of one class of specs that make a state on MLX and predict its memory.

    make   makes the empty state of a spec in a float type
    held_bytes  predicts its bytes once a prompt has been read
    eager  predicts its part of a layer's workspace on the CPU
    lazy   predicts its part on a Mac's GPU
    """

    make: Callable[[Any, mx.Dtype], LayerState]
    held_bytes: Callable[[Any, Prefill], int]
    eager: Callable[[Any, LayerSize, Prefill], Work]
    lazy: Callable[[Any, LayerSize, Prefill], Work]


def _rows_bytes(s: RowSpec, prefill: Prefill) -> int:
    apart = min(prefill.tokens, s.sinks)  # rows that are kept when rows before the window are dropped
    return (rows_held(prefill.tokens, prefill.rows, s.window, s.sinks) + apart) * s.row_bytes(prefill.item_bytes)


def _kv_state(s: KVSpec, dtype: mx.Dtype) -> LayerState:
    return MlxPacked(s, dtype) if s.packing.keeps_exact else MlxRows(s, dtype)


def _kv_bytes(s: KVSpec, prefill: Prefill) -> int:
    exact = _rows_bytes(s.exact, prefill) if s.packing.keeps_exact else 0
    return _rows_bytes(s, prefill) + exact + s.statistics_bytes(prefill.tokens)


def _fixed_bytes(s: Spec, prefill: Prefill) -> int:
    return s.bytes(prefill.tokens, prefill.item_bytes)


TABLE: Mapping[type[Spec], StateFunctions] = {
    KVSpec: StateFunctions(_kv_state, _kv_bytes, sizes.kv_eager, sizes.kv_lazy),
    LatentSpec: StateFunctions(MlxRows, _rows_bytes, sizes.latent_eager, sizes.latent_lazy),
    ConvSpec: StateFunctions(MlxConv, _fixed_bytes, sizes.conv_eager, sizes.conv_lazy),
    DeltaSpec: StateFunctions(lambda s, _: MlxDelta(s), _fixed_bytes, sizes.delta_eager, sizes.delta_lazy),
}


def functions_of(s: Spec) -> StateFunctions:
    return TABLE[type(s)]


def new_state(spec: Sequence[LayerSpec], capacity: int, dtype: mx.Dtype) -> MlxState:
    return MlxState([{name: functions_of(s).make(s, dtype) for name, s in layer.items()} for layer in spec], capacity)


def state_bytes(spec: Sequence[LayerSpec], tokens: int, rows: int, item_bytes: int) -> int:
    """Predict `MlxState.nbytes` once `tokens` tokens have been read in steps of `rows` rows."""
    return sum(functions_of(s).held_bytes(s, Prefill(tokens, rows, item_bytes)) for s in all_specs(spec))


def work_bytes(layers: Sequence[LayerSize], tokens: int, rows: int, item_bytes: int, fused: bool) -> int:
    """Predict the workspace; `fused` if attention and the delta rule are single kernels, as on a Mac's GPU."""
    prefill, peak = Prefill(tokens, rows, item_bytes), 0
    # a step without logits leaves the head lazy, which keeps the two arrays of the last residual addition
    logits = 2 * rows * layers[-1].hidden * item_bytes if tokens > rows else 0
    # if fused: decoded weights, which products of many rows read
    total = 2 * DECODED * item_bytes if fused else logits
    for layer in layers:
        parts = [
            (functions_of(s).lazy if fused else functions_of(s).eager)(s, layer, prefill) for s in layer.states.values()
        ]
        states = [sum(numbers) for numbers in zip((0, 0, 0), *parts, strict=True)]
        of_layer = (sizes.lazy_bytes if fused else sizes.eager_bytes)(layer, states, prefill)
        peak = max(peak, of_layer + decoded_bytes(layer, tokens))
        total += states[2]
    return total + peak
