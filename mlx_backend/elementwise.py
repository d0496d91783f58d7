"""Elementwise expressions of ops, each one kernel on a GPU."""

import math
from collections.abc import Callable

import mlx.core as mx

from common.ops import CLAMPED_GAIN


def fused(fn: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Compile an elementwise expression into one kernel; on the CPU return it, since MLX would need a C++ compiler."""
    return mx.compile(fn, shapeless=True) if mx.default_device().type == mx.DeviceType.gpu else fn


@fused
def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


@fused
def geglu(gate: mx.array, up: mx.array) -> mx.array:
    x = gate.astype(mx.float32)  # whose third power exceeds float16's maximum
    half = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return (x * mx.sigmoid(2 * half)).astype(gate.dtype) * up


@fused
def clamped_swiglu(gate: mx.array, up: mx.array, limit: mx.array) -> mx.array:
    g, u = mx.minimum(gate.astype(mx.float32), limit), mx.clip(up.astype(mx.float32), -limit, limit)
    return ((u + 1) * g * mx.sigmoid(CLAMPED_GAIN * g)).astype(gate.dtype)


@fused
def mul_sigmoid(x: mx.array, gate: mx.array) -> mx.array:
    return x * mx.sigmoid(gate)


@fused
def mul_softplus(x: mx.array, gate: mx.array) -> mx.array:
    return (x * mx.logaddexp(gate.astype(mx.float32), 0)).astype(x.dtype)


@fused
def log_decay(a: mx.array, dt_bias: mx.array, decay: mx.array) -> mx.array:
    return decay * mx.logaddexp(a.astype(mx.float32) + dt_bias, 0)
