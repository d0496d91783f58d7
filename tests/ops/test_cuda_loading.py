"""Loading weights onto the device: every byte, scales that are refused, and what the host holds meanwhile."""

import gc
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from common.errors import BimetalError
from common.quants import BLOCKS
from common.tensors import Tensor, map_file

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_backend import upload  # noqa: E402
from cuda_backend.arrays import Array  # noqa: E402
from cuda_backend.layout import UNITS  # noqa: E402
from cuda_backend.memory import Memory  # noqa: E402
from cuda_backend.ops import CudaOps  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture
def ops():
    return CudaOps()


def zeros(type_: str, *shape: int) -> Tensor:
    block = BLOCKS[type_]
    return Tensor("w", type_, shape, np.zeros((*shape[:-1], shape[-1] // block.elements * block.bytes), np.uint8))


def test_buffers_are_filled_one_after_the_other(ops, monkeypatch):
    """Arrays far larger than the buffers, of any length: no buffer is refilled before the device has fetched it."""
    monkeypatch.setattr(upload, "BUFFER", 1 << 20)
    monkeypatch.setattr(upload, "LEAST", 1 << 12)
    random = np.random.default_rng(0)
    for lengths in ([1], [3_000_001], [262_144, 262_144, 1], list(random.integers(1, 300_000, 40))):
        arrays = [random.normal(size=n).astype(np.float32).view(np.uint8).reshape(-1, 4) for n in lengths]
        memory = Memory(4 * sum(lengths))
        copies = [array.copy() for array in arrays]
        ops.uploader.copy(memory.address, copies)
        ops.uploader.finish()
        for copy in copies:
            copy[:] = 0xFF  # the host's may change
        read = ops.read(Array((sum(lengths),), memory.address, owner=memory))
        np.testing.assert_array_equal(read, np.concatenate(arrays).view(np.float32).ravel())


@pytest.mark.parametrize("type_", UNITS)
def test_scale_that_is_not_finite(type_, ops):
    first, bad = zeros(type_, 3, 512), zeros(type_, 300, 512)
    ops.weight(first, bad)
    ops.check_weights()
    size = BLOCKS[type_].bytes
    at = BLOCKS[type_].halves[-1] if BLOCKS[type_].halves else 0
    bad.data.reshape(-1, size)[-2, at : at + 2] = (0xFF, 0) if type_ == "MXFP4" else (0, 0xFC)
    ops.weight(first)
    ops.weight(first, bad)
    with pytest.raises(BimetalError, match=rf"'w' \({type_}\) is not finite at block {bad.data.size // size - 2}"):
        ops.check_weights()
    ops.check_weights()


def test_more_weights_than_are_checked_together(ops, monkeypatch):
    monkeypatch.setattr(upload, "FLAGS", 2)
    bad = zeros("Q4_K", 128, 256)
    bad.data[5, 1] = 0x7C
    good = zeros("Q4_K", 128, 256)
    held = [ops.weight(bad), ops.weight(good)]
    with pytest.raises(BimetalError, match=r"'w' \(Q4_K\) is not finite at block 5"):
        ops.weight(good)
    held += [ops.weight(good) for _ in range(5)]
    ops.check_weights()


def test_load_that_is_interrupted(monkeypatch):
    """No reader is left when the interrupt arrives, the next load is right, and the threads end with their owner."""
    ops, (first, second) = CudaOps(), (np.full((1 << 20, 1), n, np.uint8) for n in range(2))
    memory, read, copy = Memory(2 << 20), [], np.copyto

    def interrupted(place: np.ndarray, piece: np.ndarray) -> None:
        if piece[0, 0] == 0:
            raise KeyboardInterrupt
        time.sleep(0.3)
        read.append(piece[0, 0])
        copy(place, piece)

    ops.uploader.copy(memory.address, [second])  # sent by nobody
    ops.uploader.drop()
    with monkeypatch.context() as patch:
        patch.setattr(np, "copyto", interrupted)
        ops.uploader.copy(memory.address, [first, second])
        with pytest.raises(KeyboardInterrupt):
            ops.uploader.finish()
    assert read == [1]
    ops.uploader.copy(memory.address, [second, first])
    ops.uploader.finish()
    held = ops.read(Array((1 << 19,), memory.address, owner=memory)).view(np.uint8)
    np.testing.assert_array_equal(held, np.concatenate([second, first]).ravel())
    threads = ops.uploader.readers._threads
    del ops
    gc.collect()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_weights_that_are_loaded_together(ops, monkeypatch):
    """Readers go on while the next weight is prepared; after `loading` all weights are complete, failures aside."""
    monkeypatch.setattr(upload, "BUFFER", 1 << 20)
    random = np.random.default_rng(1)
    values = [random.normal(size=(n, 512)).astype(np.float32) for n in (700, 3, 2000, 512, 1)]
    tensors = [Tensor("w", "F32", v.shape, v.view(np.uint8)) for v in values]

    def failing() -> None:
        with ops.loading():
            ops.weight(tensors[2])
            assert ops.uploader.filling
            raise BimetalError("a file that is not what it says")

    with pytest.raises(BimetalError, match="not what it says"):
        failing()
    assert not ops.uploader.filling
    with ops.loading():
        held = [ops.weight(tensor) for tensor in tensors]
        assert ops.uploader.filling
    one = ops.weight(tensors[0])
    assert not ops.uploader.filling
    for weight, value in zip([*held, one], [*values, values[0]], strict=True):
        memory = weight.segments[0].memory
        np.testing.assert_array_equal(ops.read(Array(value.shape, memory.address, owner=memory)), value)


def anonymous() -> int:
    """Bytes of this process's host memory that are not a file's pages."""
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))


@pytest.mark.skipif(not hasattr(cupy, "ndarray"), reason="the stand-in's device memory is the host's")
def test_host_memory(ops, tmp_path: Path):
    """A file is not copied beside its map: more than the buffers and 64 MB would be a copy of half of it."""
    path, columns = tmp_path / "weights", 8192
    rows = zeros("Q4_K", 1 << 14, columns).data
    with path.open("wb") as file:
        for _ in range(10):
            file.write(rows)
    data = map_file(path).reshape(10, *rows.shape)
    ops.weight(zeros("Q4_K", 128, columns))  # what comes first takes its own: a context, kernels, buffers
    before, peak, over = anonymous(), 0, threading.Event()

    def watch():
        nonlocal peak
        while not over.is_set():
            peak = max(peak, anonymous())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        held = [ops.weight(Tensor(f"w{i}", "Q4_K", (len(rows), columns), part)) for i, part in enumerate(data)]
    finally:
        over.set()
        watcher.join()
    assert sum(weight.nbytes for weight in held) == data.nbytes
    assert peak - before < upload.BUFFERS * upload.BUFFER + (64 << 20) < data.nbytes / 2
