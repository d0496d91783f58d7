"""Sums over GPUs: the bits of NumPy's sum in the order of the ranks, captured too; a GPU that does not come."""

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_rows import random_matrix  # noqa: E402

from common.errors import BimetalError  # noqa: E402
from cuda_backend import exchange as exchanging  # noqa: E402
from cuda_backend.arrays import Array  # noqa: E402
from cuda_backend.exchange import Exchange  # noqa: E402
from cuda_backend.memory import copy_in, upload  # noqa: E402
from cuda_backend.ops import CudaOps  # noqa: E402
from cuda_backend.relay import Gpu  # noqa: E402
from cuda_backend.several_gpus import connect  # noqa: E402

COUNT = cupy.cuda.runtime.getDeviceCount()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")]


@pytest.fixture(scope="module")
def gpus():
    for a in range(COUNT):
        for b in range(COUNT):
            if a != b:
                connect(a, b)
    return [Gpu(index, CudaOps) for index in range(COUNT)]


def parts(partials, T, K, seed=0):
    """Partial sums of each rank, (ranks, partials, T, K), of magnitudes that make the order of a sum matter."""
    random, shape = np.random.default_rng(seed), (COUNT, partials, T, K)
    return (random.normal(size=shape) * 10.0 ** random.integers(-3, 4, shape)).astype(np.float32)


def expected(x):
    """The partial sums of each rank added in order, then of the ranks in order."""
    out = None
    for rank in x:
        own = rank[0]
        for partial in rank[1:]:
            own = own + partial
        out = own if out is None else out + own
    return out


def on(gpu, x):
    """(partials, T, K) as an array of partial sums."""
    with gpu.device:
        memory = upload(np.ascontiguousarray(x), gpu.context.stream)
    return Array(x.shape[1:], memory.address, partials=len(x), partial_stride=x[0].size, owner=memory)


def read(gpu, x):
    with gpu.device:
        return gpu.ops.read(x)


def summed(exchange, gpus, x):
    for gpu in gpus:
        gpu.context.arena.reset()
    exchange.begin()
    with exchange.step():
        outs = exchange.sum([on(gpu, own) for gpu, own in zip(gpus, x, strict=True)])
    return [read(gpu, out) for gpu, out in zip(gpus, outs, strict=True)]


@pytest.mark.parametrize(
    ("partials", "T", "K"),
    [(1, 1, 8), (3, 1, 128), (2, 5, 512), (1, 40, 132)],
    ids=["few", "sums", "rows", "turns"],
)
def test_sum(gpus, partials, T, K):
    """Of more rows than fit, in several exchanges; an exchange after the others overwrites what they read."""
    exchange = Exchange(gpus, numbers=2400)
    for seed in range(3):
        x = parts(partials, T, K, seed)
        for out in summed(exchange, gpus, x):
            assert np.array_equal(out, expected(x))
        exchange.check()


def test_rows_do_not_depend_on_others(gpus):
    exchange, x = Exchange(gpus), parts(2, 9, 64)
    whole = summed(exchange, gpus, x)[0]
    for row in (0, 4, 8):
        assert np.array_equal(summed(exchange, gpus, x[:, :, row : row + 1])[0][0], whole[row])


def test_captured(gpus):
    """A graph of each GPU with exchanges one after another: one GPU begins once all of another's are launched."""
    exchange, T, K, depth = Exchange(gpus, numbers=1200), 3, 512, 5  # two exchanges for each sum
    arrays = [on(gpu, own) for gpu, own in zip(gpus, parts(1, T, K), strict=True)]

    def step():
        for gpu in gpus:
            gpu.context.arena.reset()
        with exchange.step():
            sums = arrays
            for _ in range(depth):
                sums = exchange.sum(sums)
        return sums

    step()
    graphs = []
    for gpu in gpus:
        with gpu.device:
            graphs.append(gpu.context.replay.graph())
    outs = step()
    for gpu, graph in zip(gpus, graphs, strict=True):
        with gpu.device:
            graph.end()
    for seed in range(4):
        x = parts(1, T, K, seed)
        for gpu, array, own in zip(gpus, arrays, x, strict=True):
            with gpu.device:
                copy_in(array.address, own, gpu.context.stream)
        order = list(zip(gpus, graphs, strict=True))
        for gpu, graph in order if seed % 2 else order[::-1]:
            with gpu.device:
                graph.play()
        sums = expected(x)
        for _ in range(depth - 1):
            sums = expected(np.stack([sums] * COUNT)[:, None])
        for gpu, out in zip(gpus, outs, strict=True):
            assert np.array_equal(read(gpu, out), sums)
    exchange.check()


@pytest.mark.parametrize("T", [1, 3, 16 if COUNT == 2 else 8])  # more GPUs add up fewer rows in such a launch
def test_a_sum_that_a_norm_takes(gpus, T):
    """In a graph one launch adds up what ranks hold and what a norm adds, with the bits of one launch for each."""
    exchange, K, depth = Exchange(gpus), 384, 4
    tensor, taken = random_matrix("Q8_0", 64, K), random_matrix("Q8_0", K, 64)
    weights, x, arrays = [], np.random.default_rng(3).normal(size=(T, K)).astype(np.float32), []
    for gpu, own in zip(gpus, parts(3, T, K), strict=True):
        with gpu.device:
            norm = upload(np.linspace(0.5, 2, K, dtype=np.float32), gpu.context.stream)
            weights.append((gpu.ops.weight(tensor), gpu.ops.weight(taken), Array((K,), norm.address, owner=norm)))
        arrays.append((on(gpu, own), on(gpu, x[None])))

    def step(fuses):
        """Layers of a sum, an addition, a norm and two products, the last one the part of the sum that follows."""
        ops, parts, xs = [gpu.ops for gpu in gpus], [own for own, _ in arrays], [x for _, x in arrays]
        with exchange.step():
            for _ in range(depth):
                sums, parts_of_next = exchange.sum(parts, fuses), []
                for rank, gpu in enumerate(gpus):
                    with gpu.device:
                        xs[rank] = ops[rank].add(xs[rank], sums[rank])
                        y = ops[rank].rms_norm(xs[rank], weights[rank][2], 1e-6)
                        y = ops[rank].linear(y, weights[rank][0])
                        parts_of_next.append(ops[rank].linear(y, weights[rank][1]))
                parts = parts_of_next
            sums = exchange.sum(parts, fuses)  # whose only consumer is not a norm
            return [gpu.ops.add(own, y) for gpu, own, y in zip(gpus, xs, sums, strict=True)]

    def reset():
        for gpu in gpus:
            gpu.context.arena.reset()

    reset()
    for gpu, out in zip(gpus, step(False), strict=True):
        read(gpu, out)
    outs, counts = [], []
    for fuses in (False, True):
        graphs = []
        reset()
        for gpu in gpus:
            with gpu.device:
                graphs.append(gpu.context.replay.graph())
        found = step(fuses)
        for gpu, graph, out in zip(gpus, graphs, found, strict=True):
            with gpu.device:
                out.compute()
                graph.end()
        counts.append([graph.kernels for graph in graphs])
        for gpu, graph in zip(gpus, graphs, strict=True):
            with gpu.device:
                graph.play()
        outs.append([read(gpu, out) for gpu, out in zip(gpus, found, strict=True)])
    assert all(a == b + depth for a, b in zip(*counts, strict=True))
    assert all(np.array_equal(out, outs[0][0]) for out in (*outs[0], *outs[1]))
    assert np.isfinite(outs[0][0]).all()
    exchange.check()


@pytest.mark.parametrize("T", [1, 5])
def test_gather(gpus, T):
    """Columns of all ranks beside one another, of partial sums too; a NaN of any bits stays a NaN."""
    exchange, x = Exchange(gpus, numbers=256), parts(2, T, 64)
    x[0, 1, 0, 5], x[-1, 0, 0, 63] = np.inf, np.array(0xFFFFFFFF, np.uint32).view(np.float32)
    for _ in range(2):
        with exchange.step():
            outs = exchange.gather([on(gpu, own) for gpu, own in zip(gpus, x, strict=True)])
        for gpu, out in zip(gpus, outs, strict=True):
            whole = np.concatenate([own[0] + own[1] for own in x], axis=1)
            assert np.array_equal(read(gpu, out), whole, equal_nan=True)
    exchange.check()


def test_a_gpu_that_does_not_come(gpus, monkeypatch):
    """The wait ends in a sentence, later exchanges of the step end at once, and the next step is right again."""
    exchange, x, kernel = Exchange(gpus, seconds=0.2), parts(1, 2, 64), exchanging.kernel

    def of_the_first(stem, name, defines):
        launch = kernel(stem, name, defines)
        return launch if cupy.cuda.runtime.getDevice() == 0 else lambda *_, **__: None

    with monkeypatch.context() as patch:
        patch.setattr(exchanging, "kernel", of_the_first)
        with exchange.step():
            sums = [on(gpu, own) for gpu, own in zip(gpus, x, strict=True)]
            for _ in range(3):
                sums = exchange.sum(sums)
        assert np.isnan(read(gpus[0], sums[0])).all()
    with pytest.raises(BimetalError, match=r"GPU 0 waited 0.2 s for another one of GPUs 0,1.*, whose part of a sum"):
        exchange.check()
    assert np.array_equal(summed(exchange, gpus, x)[1], expected(x))
    exchange.check()


def test_numbers_begin_again(gpus, monkeypatch):
    monkeypatch.setattr(exchanging, "RENEWED", 2)
    exchange = Exchange(gpus)
    for seed in range(5):
        x = parts(1, 2, 64, seed)
        assert np.array_equal(summed(exchange, gpus, x)[-1], expected(x))
        assert exchange.passed == 1 + seed % 2


@pytest.mark.parametrize("K", [6, 2052])
def test_refused(gpus, K):
    exchange = Exchange(gpus, numbers=2048)
    with pytest.raises(ValueError, match=f"rows of {K} numbers; an exchange takes"):
        exchange.sum([Array((1, K))] * COUNT)
