"""Records by which kernels read arrays and write results, as in prelude.cuh and store.cuh, and their requirements."""

import numpy as np

from cuda_backend.arrays import Array
from cuda_backend.layout import groups_of
from cuda_backend.lazy import Target
from cuda_backend.prototypes import IN, OUT

NOTHING = np.zeros((), IN)
COPY, ADD, SWIGLU, MUL_SIGMOID, MUL_SOFTPLUS, GEGLU = range(6)  # kernels/rows.cu pointwise


def out_of(target: Target, K: int) -> np.ndarray:
    """Make the struct Out of store.cuh: where a kernel writes rows of K columns."""
    groups, packing = groups_of(K) if target.packed else -(-K // 32), target.packing
    return np.array(
        (target.dense, target.packed, target.product, K, packing.cols, groups, packing.fine, packing.whole), OUT
    )


def packed_only(out: np.ndarray) -> tuple[str, ...]:
    """Return the definition of store.cuh for rows that only a product with scales per 128 columns reads."""
    packed = out["packed"] and not (out["dense"] or out["product"] or out["fine"])
    return (f"ONLY={1 if out['cols'] == 1 else 8}",) if packed else ()


def view(x: Array, repeats: int = 0) -> np.ndarray:
    """Make the struct In of prelude.cuh: how a kernel reads x. A trailing axis of 1 is repeated `repeats` times."""
    if repeats > 1 and x.shape[-1] == 1:
        head, width, inner = x.strides[1] if len(x.shape) == 3 else 0, repeats, 0
    elif x.record is not None:
        return x.record
    else:
        head, width, inner = _row(x)
    record = np.array((x.address, x.partial_stride, x.strides[0], head, x.partials, width, inner), IN)
    if inner and x.is_computed:  # the result of a replayed step is read in every step
        x.record = record
    return record


def _row(x: Array) -> tuple[int, int, int]:
    """Return (elements from one head to the next, elements per head; both 0 for a contiguous row; element stride)."""
    shape, strides = x.shape, x.strides
    if len(shape) == 3:
        _, H, D = shape
        if D > 1 and strides[2] != 1:
            raise ValueError(f"kernels read heads whose elements are adjacent, got strides {strides} of {shape}")
        return (0, 0, 1) if H == 1 or strides[1] == D else (strides[1], D, 1)
    if len(shape) == 1 or (len(shape) == 2 and (shape[1] == 1 or strides[1] == 1)):
        return 0, 0, 1
    raise ValueError(f"kernels read (T, n) or (T, heads, D) with adjacent elements, got {shape} with strides {strides}")


def float4_aligned(*arrays: Array, flat: bool = True) -> bool:
    """Test whether kernels can read four floats at a time, of rows, or of heads unless `flat`, for any T."""
    for x in arrays:
        address, (head, width, _), T = x.address, _row(x), x.shape[0]
        partial = x.partial_stride // T if x.partials > 1 else 0
        row = x.strides[0] if T > 1 else 0
        if address % 16 or partial % 4 or row % 4 or head % 4 or x.shape[-1] % 4 or (flat and width):
            return False
    return True


def turns(rope: np.ndarray) -> bool:
    """Test whether kernels/light.cu can exchange a rope's pairs: none, or in lanes apart by a power of two."""
    return int(rope["pairs"]) in (0, 4, 8, 16, 32, 64)
