"""Launch the kernels that write and read compressed caches on a Mac's GPU: kv_encode, kv_attention and kv_merge."""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from common.hadamard import group_of, signs
from common.kv_formats import FORMATS, table
from common.step import MAX_DECODE_ROWS, Step
from common.storage import NATIVE, Packing, Plane
from mlx_backend.kernels import make_kernel, on_metal

NUMBERS = {NATIVE: 0, "f16": 1, "bf16": 2, "q4_0": 3, "q4_1": 4, "q5_0": 5, "q5_1": 6, "q8_0": 7}
NUMBERS |= {"lm2": 8, "lm3": 9, "lm4": 10, "tq3_0": 9}  # include/kv.h
SIZES = (64, 128, 256)  # of heads that kv_attention supports
STRIP = 256  # rows of a cache that one SIMD group reads
EVERY, CODES, EXACT = 0, 1, 2  # kv_attention's PART


class CachePart(NamedTuple):
    """A part of a cache as kv_attention reads it.

    q          (T, H, D) float32: the step's queries, scaled, in the domain of the keys
    bias       (T, H) float32, added to the scores
    stored     keys and values (1, K, room, width), the step's rows after `committed` others
    planes     specs of the stored keys and values
    early      number of committed rows that hold tokens 0, 1, ...; later rows hold the last tokens of the past
    selection  the rows that the kernel reads: EVERY, CODES or EXACT
    """

    q: mx.array
    bias: mx.array
    stored: Sequence[mx.array]
    planes: Sequence[Plane]
    committed: int
    early: int
    selection: int


def encodes(plane: Plane) -> bool:
    """Test whether kv_encode writes this plane on this machine."""
    return on_metal() and NUMBERS.get(plane.format, 0) > NUMBERS["bf16"]


def attends(planes: Sequence[Plane], step: Step) -> bool:
    """Test whether kv_attention reads these planes for this step; for many rows the cache is decoded once for all."""
    kept = all(plane.format in NUMBERS and plane.dim in SIZES for plane in planes)
    return on_metal() and kept and len(step) <= MAX_DECODE_ROWS


def encode(
    rows: Sequence[mx.array], planes: Sequence[Plane], mean: mx.array | None = None, scale: mx.array | None = None
) -> list[mx.array]:
    """Encode rows (1, K, T, D) of one plane, or keys and values of two, in one launch: (1, K, T, bytes) uint8 each.

    mean, scale  (1, K, 1, D) float32, which equalise keys
    """
    keys, values = rows[0], rows[-1]
    sizes = [FORMATS[plane.format].row_bytes(plane.dim) for plane in planes]
    shapes = [(*x.shape[:3], size) for x, size in zip(rows, sizes, strict=True)]
    jobs = sum(x.size // group_of(x.shape[3]) for x in rows)
    groups = [group_of(plane.dim) for plane in planes]
    none = mx.zeros(16)
    tables = "key_boundaries", "key_centroids", "value_boundaries", "value_centroids"
    names = ("keys", "values", "mean", "scale", "before", "after", *tables)
    kernel = make_kernel("kv_encode", inputs=names, outputs=("out",))
    flat = kernel(
        inputs=[
            keys,
            values,
            none if mean is None else mean.reshape(-1),
            none if scale is None else scale.reshape(-1),
            _signs("S1", max(groups)),
            _signs("S2", max(groups)),
            *(table for plane in (planes[0], planes[-1]) for table in _tables(plane.format, group_of(plane.dim))[::-1]),
        ],
        template=[
            ("KF", NUMBERS[planes[0].format]),
            ("VF", NUMBERS[planes[-1].format]),
            ("KG", groups[0]),
            ("VG", groups[-1]),
            ("EQUALISED", mean is not None),
            ("KEYS_TURN", planes[0].rotated),
            ("VALUES_TURN", planes[-1].rotated),
            ("D", planes[0].dim),
        ],
        grid=(32, jobs, 1),
        threadgroup=(32, 4 if jobs % 4 == 0 else 1, 1),
        output_shapes=[(sum(map(math.prod, shapes)),)],
        output_dtypes=[mx.uint8],
    )[0]
    parts = mx.split(flat, [math.prod(shapes[0])]) if len(shapes) > 1 else [flat]
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def attend(
    parts: Sequence[CachePart],
    step: Step,
    past: int,
    packing: Packing,
    dtype: mx.Dtype,
    sink_logits: mx.array | None = None,
) -> mx.array:
    """Attend to all parts of a cache with one softmax, which sink_logits (H,) float32 join: (T, H, DV) in `dtype`."""
    T, H, _ = parts[0].q.shape
    gathered = [_gather(part, step, past, packing) for part in parts]
    sums, most, weights = (mx.concatenate(list(of), axis=2) for of in zip(*gathered, strict=True))
    DV, group = sums.shape[-1], group_of(sums.shape[-1])
    rotated = parts[0].planes[1].rotated
    names = ("sums", "most", "weights", "coded", "before", "after", "sinks")
    kernel = make_kernel("kv_merge", inputs=names, outputs=("out",))
    return kernel(
        inputs=[
            sums,
            most,
            weights,
            mx.array([gathered[0][1].shape[2]], mx.int32),
            _signs("S1", group),
            _signs("S2", group),
            mx.zeros(H) if sink_logits is None else sink_logits,
        ],
        template=[
            ("T", dtype),
            ("DV", DV),
            ("GROUP", group),
            ("ROTATED", rotated),
            ("SINKS", sink_logits is not None),
        ],
        grid=(32, T * H, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(T, H, DV)],
        output_dtypes=[dtype],
    )[0]


def _gather(part: CachePart, step: Step, past: int, packing: Packing) -> tuple[mx.array, mx.array, mx.array]:
    """Compute sums (T, H, strips, DV), largest scores and weights (T, H, strips) of one part."""
    keys, values = (stored.squeeze(0) for stored in part.stored)
    T, H, D = part.q.shape
    K, DV = keys.shape[0], part.planes[1].dim
    strips = -(-(part.committed + T) // STRIP)
    late = past - (part.committed - part.early)
    places = [past, part.committed, part.early, late, packing.first, packing.recent, 0, 0]
    names = ("q", "bias", "keys", "values", "positions", "seen", "key_table", "value_table", "places")
    kernel = make_kernel("kv_attention", inputs=names, outputs=("sums", "most", "weights"))
    sums, most, weights = kernel(
        inputs=[
            part.q,
            part.bias,
            keys,
            values,
            mx.array(step.positions),
            mx.array(step.visible.astype(np.uint8).ravel()),
            *(_tables(plane.format, group_of(plane.dim))[0] for plane in part.planes),
            mx.array(places, mx.int32),
        ],
        template=[
            ("KF", NUMBERS[part.planes[0].format]),
            ("VF", NUMBERS[part.planes[1].format]),
            ("D", D),
            ("DV", DV),
            ("KG", group_of(D)),
            ("VG", group_of(DV)),
            ("HEADS", H // K),
            ("STRIP", STRIP),
            ("PART", part.selection),
        ],
        grid=(32, strips, T * K),
        threadgroup=(32, 1, 1),
        output_shapes=[(T, H, strips, DV), (T, H, strips), (T, H, strips)],
        output_dtypes=[mx.float32] * 3,
    )
    return sums, most, weights


@cache
def _signs(name: str, group: int) -> mx.array:
    return mx.array(signs(name, group))


@cache
def _tables(name: str, group: int) -> tuple[mx.array, mx.array]:
    """Return centroids and boundaries of a format in 16 floats each; zeros for formats without."""
    if name not in FORMATS or FORMATS[name].group:
        return mx.zeros(16), mx.zeros(16)
    centroids, boundaries = (mx.array(np.pad(part, (0, 16 - len(part)))) for part in table(name, group))
    return centroids, boundaries
