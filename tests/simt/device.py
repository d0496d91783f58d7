"""Where our kernels' own tests run: on a Mac its GPU, elsewhere the emulator."""

from contextlib import nullcontext

import mlx.core as mx

__all__ = ["on_metal"]

if mx.metal.is_available():
    on_metal = nullcontext
else:
    from simt.metal import on_metal
