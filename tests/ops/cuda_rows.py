"""Ops, matrices and rows for the tests on a GPU."""

from dataclasses import replace

import cupy
import numpy as np
import pytest
from cases import array

from common.quants import BLOCKS
from common.tensors import Tensor
from common.weights import dense
from cuda_backend.occupancy import WHOLE
from cuda_backend.ops import CudaOps


def rows_of(ops, plane, heads, places):
    """uint8 (heads, places, row_bytes) of a plane."""
    whole = np.empty(heads * plane.head_bytes, np.uint8)
    runtime = cupy.cuda.runtime
    runtime.memcpyAsync(
        whole.ctypes.data, plane.address, whole.nbytes, runtime.memcpyDeviceToHost, ops.context.stream.ptr
    )
    ops.context.stream.synchronize()
    return whole.reshape(heads, -1, plane.row_bytes)[:, places]


def outliers(random, *shape):
    x = random.normal(size=shape).astype(np.float32)
    x[..., 3] *= 4
    x[..., -2] -= 2
    return x


def attend(ops, state, rows, step, window=None, logits=None):
    if isinstance(ops, CudaOps):
        ops.context.arena.reset()
    q, k, v = (array(ops, x) for x in rows)
    logits = None if logits is None else ops.vector(dense("sinks", logits))
    out = ops.attention(q, k, v, state[0].kv, step, rows[0].shape[-1] ** -0.5, window, sink_logits=logits)
    return np.array(ops.read(out))


def on_multiprocessors(context, sms):
    return replace(context, card=replace(context.card, sms=sms))


def on_hopper(context):
    """The context where kernels for compute capability 9.0 alone run: such a GPU, or a CPU."""
    card = context.card
    if card.name != "a CPU" and card.capability != 90:
        pytest.skip(f"a kernel for compute capability 9.0 alone does not run on {card.name}")
    return replace(context, card=replace(card, capability=90))


def poisoned_ops() -> CudaOps:
    """CudaOps whose workspace holds NaN until a kernel writes it."""
    ops = CudaOps()
    take = ops.context.arena.take

    def poisoned(nbytes, lasting=False):
        address = take(nbytes, lasting)
        for stream in (ops.context.side_stream, ops.context.stream):
            stream.synchronize()
        cupy.cuda.runtime.memsetAsync(address, 0xFF, nbytes, ops.context.stream.ptr)
        ops.context.stream.synchronize()
        return address

    ops.context.arena.take = poisoned  # type: ignore[method-assign]
    return ops


def random_matrix(type_: str, rows: int, columns: int, experts: int = 0) -> Tensor:
    """Random codes, and scales of about 1/100."""
    block, random = BLOCKS[type_], np.random.default_rng(5)
    n = max(experts, 1) * rows * columns // block.elements
    blocks = random.integers(0, 256, (n, block.bytes), dtype=np.uint8)
    for at in block.halves:
        blocks[:, at : at + 2] = random.uniform(0.005, 0.02, n).astype("<f2")[:, None].view(np.uint8)
    if type_ == "MXFP4":
        blocks[:, 0] = random.integers(115, 125, n)
    shape = (experts, rows, columns) if experts else (rows, columns)
    return Tensor("w", type_, shape, blocks.reshape(*shape[:-1], -1))


def quantized_rows(x: np.ndarray, type_: str) -> np.ndarray:
    """Activations as the kernels quantize them for a matrix: int8 with a scale per 32 or 128 columns, in float64."""
    n = 128 if type_ in WHOLE else 32
    padded = np.zeros((len(x), -(-x.shape[1] // n) * n), np.float32)
    padded[:, : x.shape[1]] = x
    groups = padded.reshape(len(x), -1, n)
    scale = np.abs(groups).max(axis=-1, keepdims=True) * np.float32(1 / 127)
    codes = np.rint(groups * (np.float32(1) / np.maximum(scale, np.float32(1e-30))))
    return (codes.astype(np.float64) * scale).reshape(len(x), -1)[:, : x.shape[1]]


def rows_on(ops, x: np.ndarray):
    table = ops.weight(Tensor("x", "F32", x.shape, x.view(np.uint8)))
    return ops.embed(table, np.arange(len(x), dtype=np.int32))


def f32(values: np.ndarray) -> Tensor:
    values = np.ascontiguousarray(values, np.float32)
    return Tensor("values", "F32", values.shape, values.reshape(len(values), -1).view(np.uint8))
