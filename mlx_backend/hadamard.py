"""The Walsh-Hadamard transform with signs on MLX."""

import mlx.core as mx

from common.errors import BimetalError
from mlx_backend import kernels

WIDTHS = (32, 64, 128, 256)
ROWS_PER_GROUP = 4


def wht(x: mx.array, before: mx.array, after: mx.array) -> mx.array:
    """Compute `common.hadamard.wht` in x's dtype: x (..., n) with n 32, 64, 128 or 256, signs (n,) float32."""
    n = x.shape[-1]
    if n not in WIDTHS:
        raise BimetalError(f"wht takes rows of {', '.join(map(str, WIDTHS))} values, not {n}")
    if not kernels.on_metal():
        rotated = mx.hadamard_transform(x.astype(mx.float32) * before, scale=n**-0.5) * after
        return rotated.astype(x.dtype)
    kernel = kernels.make_kernel("wht", inputs=("x", "before", "after"), outputs=("out",))
    return kernel(
        inputs=[x, before, after],
        template=[("T", x.dtype), ("N", n)],
        grid=(32, x.size // n, 1),
        threadgroup=(32, ROWS_PER_GROUP, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )[0]
