"""Taps: outputs of some of a target's layers, which a draft reads."""

from collections.abc import Sequence
from typing import Any

from common.models import Model
from common.ops import Array, Ops
from common.step import State, Step


class Tap:
    """The ops of a backend that also keep `scale` times the output of some layers, in `outputs` by layer."""

    def __init__(self, ops: Ops, layers: Sequence[int], scale: float = 1.0):
        self._ops, self._layers, self._scale = ops, layers, scale
        self.outputs: dict[int, Array] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def scope(self, layer: int, block: Any, x: Array) -> Array:
        x = self._ops.scope(layer, block, x)
        if layer in self._layers:
            self.outputs[layer] = self._ops.keep(x if self._scale == 1 else self._ops.scale(x, self._scale))
        return x


def tapped(
    model: Model, taps: Sequence[int], state: State, step: Step, rows: slice, layers: range
) -> tuple[Array, dict[int, Array]]:
    """Compute `layers` as a definition's `forward` does; also return the outputs (T, hidden) of taps, by layer.

    A model that computes a multiple of its hidden states has the factor to the ones that were trained.
    """
    tap: Any = Tap(model.ops, taps, getattr(model.config, "hidden_scale", 1.0))
    last = len(model.weights.layers) - 1
    every = slice(None) if last in taps else rows  # a model may compute its last layer for some rows only
    out = model.definition.forward(tap, model.config, model.weights, state, step, every, layers)
    return out[rows] if last in taps and last in layers else out, tap.outputs
