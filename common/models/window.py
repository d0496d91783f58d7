"""Attention to the newest positions alone, for long contexts. It changes what the model says."""

from dataclasses import replace
from typing import Any

from common.errors import UsageError
from common.models import Model
from common.ops import Array, Ops
from common.step import LatentSpec, Step


class Windowed:
    """The ops of a backend, whose attention hides positions at or below a row's own minus `window`."""

    def __init__(self, ops: Ops, window: int):
        self._ops, self._window = ops, window

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        kv: Any,
        step: Step,
        scale: float,
        window: int | None = None,
        causal: bool = False,
    ) -> Array:
        window = min(window or self._window, self._window)
        return self._ops.attention(q, k, v, kv, step, scale, window, causal)


def windowed(model: Model, window: int) -> Model:
    """`model` with its attention kept to `window` positions; weights and states are shared."""
    if window < 1:
        raise UsageError(f"fa_window is {window}; it must be at least 1")
    if not isinstance(model, Model):
        raise UsageError("fa_window: a model run by mlx-lm has no such window")
    spec = model.definition.state_spec(model.config)
    if any(isinstance(s, LatentSpec) for layer in spec for s in layer.values()):
        raise UsageError(f"fa_window: the latent attention of {model.architecture} has no window")
    ops: Any = Windowed(model.ops, window)
    return replace(model, ops=ops)
