"""Formats of caches that the kernels support, and the definitions of kernels for them: kernels/formats.cuh."""

from common.hadamard import group_of
from common.storage import NATIVE
from cuda_backend.caches.planes import HALF, Plane

PACKED = ("bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "lm2", "lm3", "lm4", "tq3_0")
KEYS = (*PACKED, "turboquant")  # it estimates inner products, which values do not need
PAIRS = frozenset((keys, values) for keys in (NATIVE, HALF, *KEYS) for values in (NATIVE, HALF, *PACKED))


def format_defines(keys: Plane, values: Plane) -> tuple[str, ...]:
    """List the macros of kernels that write or read rows; none if both formats are plain float16."""
    if all(plane.format == HALF and not plane.rotated for plane in (keys, values)):
        return ()
    formats = f"KEYS={keys.format.upper()}", f"VALUES={values.format.upper()}"
    return *formats, f"TURN_KEYS={int(keys.rotated)}", f"TURN_VALUES={int(values.rotated)}"


def packed_bytes(keys: Plane, values: Plane) -> int:
    """Count the bytes of the longer row, which attention unpacks before its products; 0 if both are float16."""
    return 0 if keys.format == values.format == HALF else max(keys.row_bytes, values.row_bytes)


def turn_back(values: Plane) -> int:
    """Count the columns that kernels/pieces.cu rotates back together; 0: none."""
    return group_of(values.width) if values.rotated else 0
