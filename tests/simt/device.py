"""The device for our kernels' own tests: on a Mac its GPU, elsewhere the emulator."""

from contextlib import AbstractContextManager, nullcontext

import mlx.core as mx

from simt import metal


def on_metal() -> AbstractContextManager[None]:
    return nullcontext() if mx.metal.is_available() else metal.on_metal()
