"""Rows of attention for the tests of compressed caches on a GPU."""

import cupy
import numpy as np

from common.weights import dense
from cuda_backend.ops import CudaOps


def array(ops, values):
    rows = np.asarray(values, np.float32).reshape(len(values), -1)
    return ops.embed(ops.weight(dense("rows", rows)), np.arange(len(rows), dtype=np.int32)).reshape(*np.shape(values))


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


def attend(ops, state, rows, step, window=None):
    if isinstance(ops, CudaOps):
        ops.context.arena.reset()
    q, k, v = (array(ops, x) for x in rows)
    return np.array(ops.read(ops.attention(q, k, v, state[0].kv, step, rows[0].shape[-1] ** -0.5, window)))
