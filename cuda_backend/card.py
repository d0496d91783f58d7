"""The current GPU, and whether our kernels run on it."""

import cupy

from common.errors import BimetalError
from cuda_backend.occupancy import Card

OLDEST = 75  # compute capability 7.5: products of int8 on tensor cores


def available() -> Card:
    """Return the current GPU's Card; raises BimetalError that says what to install or choose if CUDA cannot run."""
    try:
        if not cupy.cuda.runtime.getDeviceCount():
            raise BimetalError("no NVIDIA GPU is visible; choose another backend, or check CUDA_VISIBLE_DEVICES")
        driver, runtime = cupy.cuda.runtime.driverGetVersion(), cupy.cuda.runtime.runtimeGetVersion()
        if driver // 1000 < runtime // 1000:
            raise BimetalError(
                f"the NVIDIA driver supports CUDA {driver // 1000}.{driver % 1000 // 10} and CuPy is built for "
                f"{runtime // 1000}; update the driver, or install cupy-cuda{driver // 1000}x"
            )
        card = card_of(cupy.cuda.runtime.getDevice())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise BimetalError(
            f"the NVIDIA driver does not answer ({error}); install a driver for CUDA "
            f"{cupy.cuda.runtime.runtimeGetVersion() // 1000}, or choose another backend"
        ) from None
    if card.capability < OLDEST:
        raise BimetalError(
            f"{card.name} has compute capability {card.capability / 10}; the CUDA kernels need 7.5 (Turing) or newer"
        )
    return card


def card_of(index: int) -> Card:
    p = cupy.cuda.runtime.getDeviceProperties(index)
    return Card(
        p["name"].decode(),
        10 * p["major"] + p["minor"],
        p["multiProcessorCount"],
        p["sharedMemPerMultiprocessor"],
        p["sharedMemPerBlockOptin"],
    )
