"""Gated delta rule and short convolution on MLX: our Metal kernels, and MLX's own ops without Metal.

MLX's fused gated_delta_update supports six pairs of head counts, with heads of 128, and rounds a chain of more than
eight rows differently; `gated_delta.metal` computes chains, prompts, trees and replays with the same bits.
"""

from functools import lru_cache

import mlx.core as mx
import numpy as np

from common.step import PAST, Step
from mlx_backend import kernels

Rows = tuple[mx.array, mx.array, mx.array, mx.array]  # k (T, H, Dk), v (T, Hv, Dv), log decay and beta (T, Hv) float32


# -- gated delta rule --------------------------------------------------------------------------------------------------


def gated_delta(q: mx.array, rows: Rows, matrix: mx.array, step: Step) -> tuple[mx.array, mx.array | None]:
    """Compute `NumpyOps.gated_delta` after its normalization: q (T, H, Dk), matrix (Hv, Dv, Dk) float32.

    H is Hv without Metal and for grouped heads, else a divisor of Hv.
    Returns out (T, Hv, Dv) in v's type and, for a chain, the matrix after its last row.
    """
    step.order()
    if kernels.on_metal():
        walk, first_places = _walk(step)
        out, after = _delta_paths(q, rows, matrix, walk)
        return (out, after) if step.is_chain else (out[first_places], None)
    if step.is_chain:
        return _chain(q, rows, matrix)
    return _tree(q, rows, matrix, step.visible).astype(rows[1].dtype), None


def replay(rows: Rows, matrix: mx.array, path: np.ndarray) -> mx.array:
    """Apply the rows of `path` one after another; return the matrix after the last one."""
    if kernels.on_metal():
        walk = path.astype(np.int32)
        walk[0] = ~walk[0]
        return _delta_paths(rows[0], rows, matrix, mx.array(walk))[1]
    at = mx.array(path)
    k, v, g, beta = (x[at] for x in rows)
    return _chain(k, (k, v, g, beta), matrix)[1]


@lru_cache(maxsize=1)  # all layers take the same
def _walk(step: Step) -> tuple[mx.array, mx.array]:
    """Return the order in which gated_delta.metal computes a step's rows, and the first index of each row in it."""
    walk = walk_over(step.order())
    return mx.array(walk), mx.array(np.unique(np.maximum(walk, ~walk), return_index=True)[1])


def walk_over(parents: np.ndarray) -> np.ndarray:
    """Return the order of rows for `gated_delta.metal`: one path per leaf, its first row as ~row."""
    walk: list[int] = []
    for leaf in np.setdiff1d(np.arange(len(parents)), parents).tolist():
        path = [leaf]
        while parents[path[-1]] != PAST:
            path.append(int(parents[path[-1]]))
        walk += [~path[-1], *path[-2::-1]]
    return np.array(walk, np.int32)


def _delta_paths(q: mx.array, rows: Rows, matrix: mx.array, walk: mx.array) -> tuple[mx.array, mx.array]:
    """Launch gated_delta.metal; returns the output of every row of the order, (n, Hv, Dv), and the last matrix."""
    k, v, g, beta = rows
    q, k, g, beta, matrix = (mx.contiguous(x) for x in (q, k, g, beta, matrix))
    names = ("q", "k", "v", "g", "beta", "matrix", "walk")
    kernel = kernels.make_kernel("gated_delta", inputs=names, outputs=("out", "after"), contiguous=False)
    out, after = kernel(
        inputs=[q, k, v, g, beta, matrix, walk],
        template=[("T", v.dtype), ("DK", k.shape[-1])],
        grid=(32, v.shape[2], v.shape[1]),
        threadgroup=(32, 4, 1),
        output_shapes=[(len(walk), *v.shape[1:]), matrix.shape],
        output_dtypes=[v.dtype, mx.float32],
    )
    return out, after


def _chain(q: mx.array, rows: Rows, matrix: mx.array) -> tuple[mx.array, mx.array]:
    k, v, g, beta = rows
    q, k, v, decay, beta, matrix = (x[None] for x in (q, k, v, mx.exp(g), beta, matrix))
    out, after = mx.fast.gated_delta_update(q, k, v, decay, beta, matrix)
    return out.squeeze(0), after.squeeze(0)


def _tree(q: mx.array, rows: Rows, S: mx.array, visible: np.ndarray) -> mx.array:
    """Apply the delta rule along each row's ancestors, all rows at once: (T, Hv, Dv) float32.

    Row t adds k_t d_t' to the matrix, with (I + A) d = r. A couples a row to its strict ancestors, so that substitution
    solves the system exactly in as many rounds as the depth of the tree.
    """
    k, v, g, beta = rows
    q, k, v = (x.swapaxes(0, 1).astype(mx.float32) for x in (q, k, v))  # (H, T, D)
    g, beta = g.T, beta.T[:, :, None]  # (H, T)
    seen = mx.array(visible)
    total = mx.where(seen, g[:, None, :], 0).sum(axis=-1)  # log decay from the root down to each row
    ratio = mx.exp(mx.where(seen, total[:, :, None] - total[:, None, :], -mx.inf))
    A = beta * ratio * (k @ k.swapaxes(1, 2)) * mx.array(~np.eye(len(visible), dtype=bool))
    since, past = mx.exp(total)[:, :, None], S.swapaxes(1, 2)
    r = d = beta * (v - since * (k @ past))
    for _ in range(int(visible.sum(axis=1).max()) - 1):
        d = r - A @ d
    out = since * (q @ past) + (ratio * (q @ k.swapaxes(1, 2))) @ d
    return out.swapaxes(0, 1)


# -- short convolution -------------------------------------------------------------------------------------------------


def short_conv(stream: mx.array, taps: mx.array, step: Step) -> mx.array:
    """Compute `NumpyOps.short_conv`: stream (n + T, C) of committed rows and the step's, taps (C, n + 1) -> (T, C)."""
    parents, T, (C, width) = step.order(), len(step), taps.shape
    if kernels.on_metal():
        kernel = kernels.make_kernel("short_conv", inputs=("stream", "taps", "parents"), outputs=("out",))
        return kernel(
            inputs=[stream, taps, mx.zeros(1, mx.int32) if step.is_chain else mx.array(parents)],
            template=[("T", stream.dtype), ("TAPS", width), ("TREE", not step.is_chain)],
            grid=(C, T, 1),
            threadgroup=(min(C, 256), 1, 1),
            output_shapes=[(T, C)],
            output_dtypes=[stream.dtype],
        )[0]
    if step.is_chain:
        windows = mx.as_strided(stream, (T, width, C), (C, C, 1))
    else:
        windows = stream[mx.array(_windows(parents, width - 1))]
    out = (windows * taps.astype(stream.dtype).T).sum(axis=1)
    return out * mx.sigmoid(out)


def block_conv(x: mx.array, row_taps: mx.array, base: mx.array) -> mx.array:
    """Compute `NumpyOps.block_conv`: x (T, C), row_taps (T, n * G), base (n, C) -> (T, C)."""
    (T, C), n = x.shape, len(base)
    taps = mx.repeat(row_taps.reshape(T, n, -1), C * n // row_taps.shape[1], axis=2) + base.astype(x.dtype)
    before = mx.concatenate([mx.zeros((n - 1, C), x.dtype), x])
    return sum((taps[:, i] * before[n - 1 - i : n - 1 - i + T] for i in range(1, n)), taps[:, 0] * x)


def _windows(parents: np.ndarray, n: int) -> np.ndarray:
    """Compute indices (T, n + 1) of each row's convolution window in the stream of n committed rows and the step's."""
    at = n + np.arange(len(parents))
    windows = [at]
    for _ in range(n):
        at = np.where(at >= n, n + parents[np.maximum(at - n, 0)], at - 1)  # PAST lands on n - 1
        windows.append(at)
    return np.stack(windows[::-1], axis=1)
