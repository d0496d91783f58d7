"""Experts that lie anywhere: the table of addresses that the kernels read, and what is copied where."""

from dataclasses import replace

import numpy as np
import pytest

from common.ops import ExpertWeights
from common.quants import BLOCKS
from common.tensors import Tensor
from common.weights import dense

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_backend.arrays import Array  # noqa: E402
from cuda_backend.host_memory import HostMemory  # noqa: E402
from cuda_backend.memory import Memory, upload  # noqa: E402
from cuda_backend.ops import CudaOps  # noqa: E402
from cuda_backend.weights import Weight  # noqa: E402

pytestmark = pytest.mark.gpu

E, HIDDEN, F = 12, 256, 256


@pytest.fixture(scope="module")
def ops():
    return CudaOps()


def stack(type_: str, rows: int, columns: int, seed: int) -> Tensor:
    random = np.random.default_rng(seed)
    shape = (E, rows, columns)
    if type_ == "F16":
        return Tensor("w", type_, shape, random.normal(scale=0.06, size=shape).astype("<f2").view(np.uint8))
    block = BLOCKS[type_]
    data = random.integers(0, 256, (E * rows * columns // block.elements, block.bytes), dtype=np.uint8)
    for at in block.halves:
        data[:, at : at + 2] = np.array([0.01], "<f2").view(np.uint8)
    return Tensor("w", type_, shape, data.reshape(E, rows, -1))


def moved(ops: CudaOps, w: Weight) -> tuple[Weight, tuple[Memory, HostMemory]]:
    """Move the experts of `w`, half of them to other memory and half to the host's, and leave NaN where they were.

    Returns the weight with a table, and the memory to which its experts have moved.
    """
    (s,) = w.segments
    runtime, stream = cupy.cuda.runtime, ops.context.stream
    device, host = Memory(s.memory.nbytes), HostMemory(s.memory.nbytes, "a test")
    places = np.array([(host, device)[e % 2].address + (E - 1 - e) * s.expert_bytes for e in range(E)], np.uint64)
    for e, place in enumerate(places.tolist()):
        kind = runtime.memcpyDeviceToDevice if e % 2 else runtime.memcpyDeviceToHost
        runtime.memcpyAsync(place, s.memory.address + e * s.expert_bytes, s.expert_bytes, kind, stream.ptr)
    runtime.memsetAsync(s.memory.address, 0xFF, s.memory.nbytes, stream.ptr)
    table = upload(places, stream)
    stream.synchronize()
    return replace(w, segments=(replace(s, places=table, moved=True),)), (device, host)


@pytest.mark.parametrize("type_", ["Q4_K", "Q8_0", "F16"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_table_says_where_experts_lie(type_, shared, ops):
    gate_up, down = (ops.weight(stack(type_, *shape)) for shape in ((2 * F, HIDDEN, 1), (HIDDEN, F, 2)))
    random = np.random.default_rng(3)
    router = ops.weight(dense("r", random.normal(scale=HIDDEN**-0.5, size=(E, HIDDEN))))
    beside = [ops.weight(dense("s", random.normal(scale=0.06, size=n))) for n in ((2 * F, HIDDEN), (HIDDEN, F))]
    x = random.normal(size=(150, HIDDEN)).astype(np.float32)

    def out(T: int, gate_up: Weight, down: Weight) -> np.ndarray:
        ops.context.arena.reset()
        memory = upload(x[:T], ops.context.stream)
        rows = Array((T, HIDDEN), memory.address, owner=memory)
        if shared:
            return ops.read(ops.moe_ffn(rows, ExpertWeights(router, gate_up, down, *beside), 3))
        return ops.read(ops.moe(rows, gate_up, down, *ops.route_softmax(ops.linear(rows, router), 3)))

    counts = 1, 7, 70 if type_ == "F16" else 150  # values of float16 take longest on a CPU
    before = [out(T, gate_up, down) for T in counts]
    weights, kept = zip(*(moved(ops, w) for w in (gate_up, down)), strict=True)
    for T, expected in zip(counts, before, strict=True):
        assert np.isfinite(expected).all()
        assert np.array_equal(out(T, *weights), expected), f"{T} rows"
    assert len(kept) == 2
