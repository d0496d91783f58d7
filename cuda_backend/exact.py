"""One step over the exact rows of a compressed cache: the kernels' arguments, and the queries against these rows."""

from typing import NamedTuple

import numpy as np

from cuda_backend.caches.kv import KV
from cuda_backend.caches.packed import Exact, PackedStore, calibrate
from cuda_backend.caches.planes import Planes, of_slot
from cuda_backend.caches.window import rolled, unrolled
from cuda_backend.context import Context
from cuda_backend.prototypes import EXACT
from cuda_backend.replay import DeviceStep


class ExactStep(NamedTuple):
    """Arguments of kernels (kernels/exact.cuh), their build, and the planes that hold the step's rows."""

    record: np.ndarray
    defines: tuple[str, ...] = ()
    planes: Planes = ()


NO_EXACT = ExactStep(np.zeros((), EXACT))


def open_exact(context: Context, kv: KV, T: int, H: int, step: DeviceStep) -> ExactStep:
    """Open a layer's exact rows with room for the step's rows, and memory for the queries (T, H, D) of the step."""
    exact: Exact | None = kv.exact
    if exact is None:
        return NO_EXACT
    planes: Planes = (exact.kv.keys, exact.kv.values)
    if step.prefill and exact.kv.store.is_ring:
        planes = unrolled(exact.kv, step, context.arena, context.stream)
    elif step.prefill:
        planes = of_slot(planes, step.slot)
    packing, width = kv.store.spec.packing, kv.keys.width
    q, shift = context.arena.take(T * H * width * 2), context.arena.take(T * H * 4)
    addresses = q, shift, exact.mean, exact.scale, step.positions.address
    counts = 0, exact.slot // 4, packing.first, packing.recent
    record = np.array((*(plane.record for plane in planes), *addresses, *counts), EXACT)
    return ExactStep(record, ("EXACT=1",), planes)


def calibrated(context: Context, kv: KV, step: DeviceStep, opened: ExactStep) -> ExactStep | None:
    """Return `opened` with each row's statistics, for a step that completes them; None for other steps."""
    store = kv.store
    if not isinstance(store, PackedStore) or not store.calibrates:
        return None
    heads, rows = kv.keys.heads, 1 if step.prefill else step.T
    size = 4 * heads * kv.keys.width
    stats = context.arena.take(2 * rows * size)
    address = 0 if step.prefill else step.address
    committed = kv.exact.mean, kv.exact.slot // 4
    calibrate(opened.planes[0], heads, store.calibration, stats, context.stream, rows, address, committed)
    record = opened.record.copy()
    record["mean"], record["scale"] = stats, stats + rows * size
    record["own"], record["slots"] = 0 if step.prefill else heads * kv.keys.width, 0
    return opened._replace(record=record)


def close_exact(context: Context, kv: KV, step: DeviceStep, opened: ExactStep) -> None:
    """Write the ring's contents after the commit of a long step."""
    if opened.planes and step.prefill and kv.exact.kv.store.is_ring:
        rolled(kv.exact.kv, step, opened.planes, context.stream)
