"""Records by which kernels read arrays and write results, as in prelude.cuh and store.cuh, and what kernels require."""

import numpy as np

from cuda_backend.arrays import Array
from cuda_backend.layout import groups_of
from cuda_backend.lazy import Target
from cuda_backend.prototypes import IN, OUT

NOTHING = np.zeros((), IN)
COPY, ADD, SWIGLU, MUL_SIGMOID, MUL_SOFTPLUS = range(5)  # kernels/rows.cu pointwise


def out_of(to: Target, K: int) -> np.ndarray:
    """Describe where a kernel writes rows of K columns: store.cuh Out."""
    groups, packing = groups_of(K) if to.packed else -(-K // 32), to.packing
    return np.array((to.dense, to.packed, to.product, K, packing.cols, groups, packing.fine, packing.whole), OUT)


def packed_only(out: np.ndarray) -> tuple[str, ...]:
    """The build of store.cuh for rows that go to a product with scales per 128 columns, and nowhere else."""
    packed = out["packed"] and not (out["dense"] or out["product"] or out["fine"])
    return (f"ONLY={1 if out['cols'] == 1 else 8}",) if packed else ()


def view(x: Array, wide: int = 0) -> np.ndarray:
    """Describe how a kernel reads x: prelude.cuh In. A trailing axis of 1 is repeated `wide` times."""
    address, strides, shape = x.address, x.strides, x.shape

    def record(head: int, width: int, inner: int) -> np.ndarray:
        return np.array((address, x.partial_stride, strides[0], head, x.partials, width, inner), IN)

    if wide > 1 and shape[-1] == 1:
        return record(strides[1] if len(shape) == 3 else 0, wide, 0)
    if len(shape) == 3:
        _, H, D = shape
        if D > 1 and strides[2] != 1:
            raise ValueError(f"kernels read heads whose elements are adjacent, got strides {strides} of {shape}")
        flat = H == 1 or strides[1] == D
        return record(0 if flat else strides[1], 0 if flat else D, 1)
    if len(shape) == 1 or (len(shape) == 2 and (shape[1] == 1 or strides[1] == 1)):
        return record(0, 0, 1)
    raise ValueError(f"kernels read (T, n) or (T, heads, D) with adjacent elements, got {shape} with strides {strides}")


def float4_aligned(*arrays: Array, flat: bool = True) -> bool:
    """Test whether kernels can read four floats of a row, or of a head unless `flat`, at a time, for any T."""
    for x in arrays:
        at, T = view(x), x.shape[0]
        apart = (x.partial_stride // T if x.partials > 1 else 0, at["row"] if T > 1 else 0, at["head"], x.shape[-1])
        if any(n % 4 for n in apart) or at["p"] % 16 or not at["inner"] or (flat and at["width"]):
            return False
    return True


def turns(rope: np.ndarray) -> bool:
    """Test whether a rope's pairs are as kernels/light.cu exchanges them: none, or in lanes apart by a power of two."""
    return int(rope["pairs"]) in (0, 4, 8, 16, 32, 64)
