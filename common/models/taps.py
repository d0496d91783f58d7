"""Taps: outputs of some of a target's layers, which a draft reads."""

from collections.abc import Sequence
from typing import Any

from common.models import Model
from common.ops import Array, Ops
from common.step import State, Step


class Tap:
    """The ops of a backend that also keep the output of some layers, in `outputs` by layer."""

    def __init__(self, ops: Ops, layers: Sequence[int]):
        self._ops, self._layers = ops, layers
        self.outputs: dict[int, Array] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def scope(self, layer: int, block: Any, x: Array) -> Array:
        x = self._ops.scope(layer, block, x)
        if layer in self._layers:
            self.outputs[layer] = self._ops.keep(x)
        return x


def tapped(
    model: Model, taps: Sequence[int], state: State, step: Step, rows: slice, layers: range
) -> tuple[Array, dict[int, Array]]:
    """Compute `layers` as a definition's `forward` does; also return the outputs (T, hidden) of taps, by layer."""
    tap: Any = Tap(model.ops, taps)
    last = len(model.weights.layers) - 1
    every = slice(None) if last in taps else rows  # a model may compute its last layer for some rows only
    out = model.definition.forward(tap, model.config, model.weights, state, step, every, layers)
    return out[rows] if last in taps and last in layers else out, tap.outputs
