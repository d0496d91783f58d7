"""The formats of caches that the kernels have, and how kernels are built for them: kernels/formats.cuh."""

from common.hadamard import group_of
from common.storage import NATIVE
from cuda_backend.caches.planes import HALF, Plane

PACKED = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "lm2", "lm3", "lm4", "tq3_0")
PAIRS = frozenset((keys, values) for keys in (NATIVE, HALF, *PACKED) for values in (NATIVE, HALF, *PACKED))


def is_packed(keys: Plane, values: Plane) -> bool:
    """Are keys or values in another format than float16, or rotated?"""
    return any(plane.format != HALF or plane.rotated for plane in (keys, values))


def format_defines(keys: Plane, values: Plane) -> tuple[str, ...]:
    """How kernels that write or read rows are built; nothing where both are float16 as they are."""
    if not is_packed(keys, values):
        return ()
    formats = f"KEYS={keys.format.upper()}", f"VALUES={values.format.upper()}"
    return *formats, f"TURN_KEYS={int(keys.rotated)}", f"TURN_VALUES={int(values.rotated)}"


def turn_back(values: Plane) -> int:
    """Columns that kernels/pieces.cu rotates back together, 0: none."""
    return group_of(values.width) if values.rotated else 0
