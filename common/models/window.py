"""Attention limited to the newest positions, for long contexts. The limit changes the text."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from common.errors import UsageError
from common.kv_cache import with_window
from common.models import Model
from common.ops import Array, Ops
from common.step import Pool, State, Step
from common.storage import Kind, LayerSpec, all_specs, grows

SINKS = 4  # first tokens that a bounded cache keeps, attention sinks (Xiao et al., arXiv 2309.17453)


class Windowed:
    """The ops of a backend with attention that masks positions at or below a row's own minus `window`."""

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
        sink_logits: Array | None = None,
    ) -> Array:
        return self._ops.attention(q, k, v, kv, step, scale, self._window_of(window), causal, sink_logits)

    def _window_of(self, window: int | None) -> int:
        return min(window or self._window, self._window)


class Bounded(Windowed):
    """The ops of a backend whose full layers keep the first SINKS rows of a sequence and its last `window` rows."""

    def _window_of(self, window: int | None) -> int:
        return window or self._window

    def new_state(self, spec: Sequence[LayerSpec], capacity: int) -> State:
        return self._ops.new_state(self._bounded_layers(spec), capacity)

    def new_pool(self, spec: Sequence[LayerSpec], slots: int, capacity: int, tokens: int | None = None) -> Pool | None:
        return self._ops.new_pool(self._bounded_layers(spec), slots, capacity, tokens)

    def _bounded_layers(self, spec: Sequence[LayerSpec]) -> list[LayerSpec]:
        return [{name: self._bounded(s) for name, s in layer.items()} for layer in spec]

    def _bounded(self, s: Any) -> Any:
        return with_window(s, self._window, SINKS) if s.kind is Kind.APPENDS else s


def windowed(model: Model, window: int) -> Model:
    """Return `model` with attention limited to `window` positions; weights and states are shared."""
    return _with_ops(model, Windowed, "attention_window", window, 1, 0)


def bounded(model: Model, size: int) -> Model:
    """Return `model` with at most `size` tokens in the caches of its full layers: the first SINKS and the latest."""
    return _with_ops(model, Bounded, "max_kv_size", size, 2 * SINKS, SINKS)


def _with_ops(model: Model, wrapper: type[Windowed], name: str, value: int, least: int, sinks: int) -> Model:
    if value < least:
        raise UsageError(f"{name} is {value}; it must be at least {least}")
    if not isinstance(model, Model):
        raise UsageError(f"{name}: a model run by mlx-lm has no such window")
    spec = model.definition.state_spec(model.config)
    if any(grows(s) and not s.can_wrap for s in all_specs(spec)):
        raise UsageError(f"{name}: the latent attention of {model.architecture} has no window")
    ops: Any = wrapper(model.ops, value - sinks)
    return replace(model, ops=ops)
