"""What the model files share: reading rope settings, the dense FFN, the head."""

import math
from typing import Any

import numpy as np

from common.config import Keys
from common.errors import BimetalError
from common.ops import Array, Ops, Rope
from common.quants import dequantize
from common.tensors import Tensor


def swiglu_ffn(ops: Ops, w: Any, x: Array) -> Array:
    """x (T, hidden) -> down(silu(gate x) * up x); w.gate_up stacks both by rows"""
    y = ops.linear(x, w.gate_up)
    F = y.shape[-1] // 2
    return ops.linear(ops.swiglu(y[:, :F], y[:, F:]), w.down)


def head(ops: Ops, w: Any, x: Array, rows: slice, eps: float) -> Array:
    """The logits (n, vocab) of `rows` of the last layer's output x (T, hidden); a tied head is the embedding."""
    return ops.linear(ops.rms_norm(x[rows], w.norm, eps), w.embed if w.head is None else w.head)


def hf_rope(keys: Keys, dim: int, default_theta: float = 10000.0) -> Rope:
    """Rope of `dim` channels as config.json states it: rope_parameters, or the older rope_theta and rope_scaling."""
    theta = keys.positive("rope_parameters.rope_theta", keys.positive("rope_theta", default_theta))
    group = "rope_parameters" if keys.get("rope_parameters") else "rope_scaling"
    kind = keys.get(f"{group}.rope_type") or keys.get(f"{group}.type") or "default"
    if kind in ("default", "mrope"):
        return Rope(_frequencies(theta, dim))
    if kind == "linear":
        return Rope(tuple(f / keys.positive(f"{group}.factor") for f in _frequencies(theta, dim)))
    if kind == "llama3":
        return Rope(
            _llama3(
                _frequencies(theta, dim),
                keys.positive(f"{group}.factor"),
                keys.positive(f"{group}.low_freq_factor"),
                keys.positive(f"{group}.high_freq_factor"),
                keys.size(f"{group}.original_max_position_embeddings"),
            )
        )
    if kind == "yarn":
        original = keys.size(f"{group}.original_max_position_embeddings", keys.size("max_position_embeddings", 1))
        factor = keys.positive(f"{group}.factor")
        fast = keys.positive(f"{group}.beta_fast", 32.0)
        slow = keys.positive(f"{group}.beta_slow", 1.0)
        magnitude = keys.get(f"{group}.attention_factor")
        return _yarn(theta, dim, factor, original, fast, slow, float(magnitude) if magnitude else None)
    raise BimetalError(f"{keys.where}: rope type {kind!r}; supported: default, linear, llama3, yarn")


def gguf_rope(keys: Keys, dim: int, factors: Tensor | None, default_theta: float = 10000.0) -> Rope:
    """Rope of `dim` channels from GGUF metadata; `factors` is the file's rope_freqs.weight, divisors per pair."""
    theta = keys.positive("rope.freq_base", default_theta)
    if keys.get("rope.dimension_count") not in (None, dim):
        raise BimetalError(f"{keys.where}: rope.dimension_count is {keys.get('rope.dimension_count')}, expected {dim}")
    frequencies = _frequencies(theta, dim)
    if factors is not None:
        divisors = dequantize(factors)
        if divisors.shape != (dim // 2,) or not np.all(np.isfinite(divisors) & (divisors > 0)):
            raise BimetalError(f"{factors.name}: expected {dim // 2} finite divisors above 0, got {divisors.shape}")
        frequencies = tuple(f / float(d) for f, d in zip(frequencies, divisors, strict=True))
    kind = keys.get("rope.scaling.type") or "none"
    if kind == "none":
        return Rope(frequencies)
    factor = keys.positive("rope.scaling.factor")
    if kind == "linear":
        return Rope(tuple(f / factor for f in frequencies))
    if kind == "yarn":
        original = keys.size("rope.scaling.original_context_length", keys.size("context_length", 1))
        fast = keys.positive("rope.scaling.yarn_beta_fast", 32.0)
        slow = keys.positive("rope.scaling.yarn_beta_slow", 1.0)
        return _yarn(theta, dim, factor, original, fast, slow, None)
    raise BimetalError(f"{keys.where}: rope.scaling.type {kind!r}; supported: none, linear, yarn")


def _frequencies(theta: float, dim: int) -> tuple[float, ...]:
    return tuple(theta ** (-2 * j / dim) for j in range(dim // 2))


def _llama3(frequencies: tuple[float, ...], factor: float, low: float, high: float, original: int) -> tuple[float, ...]:
    """Llama 3.1's rule: long waves are slowed by `factor`, short ones kept, between them a linear blend."""

    def scaled(f: float) -> float:
        turns = original * f / (2 * math.pi)  # rotations within the original context
        if turns < low:
            return f / factor
        if turns > high:
            return f
        keep = (turns - low) / (high - low)
        return keep * f + (1 - keep) * f / factor

    return tuple(scaled(f) for f in frequencies)


def _yarn(
    theta: float, dim: int, factor: float, original: int, fast: float, slow: float, magnitude: float | None
) -> Rope:
    """YaRN (Peng et al., arXiv 2309.00071): interpolate slow pairs, keep fast ones, ramp between."""

    def pair_with(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair_with(fast)), 0), min(math.ceil(pair_with(slow)), dim - 1)
    frequencies = []
    for j, f in enumerate(_frequencies(theta, dim)):
        ramp = min(max((j - low) / max(high - low, 0.001), 0), 1)
        frequencies.append(f * (1 - ramp) + f / factor * ramp)
    if magnitude is None:
        magnitude = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return Rope(tuple(frequencies), magnitude)
