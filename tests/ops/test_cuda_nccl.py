"""Exchanges by NCCL: NumPy's bits, those of peers' memory, captured too; and how a transport is chosen."""

from types import SimpleNamespace

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from test_cuda_exchange import COUNT, expected, on, parts, read  # noqa: E402

from common.errors import BimetalError  # noqa: E402
from cuda_backend import transports  # noqa: E402
from cuda_backend.arrays import Array  # noqa: E402
from cuda_backend.exchange import Exchange  # noqa: E402
from cuda_backend.memory import copy_in  # noqa: E402
from cuda_backend.nccl_exchange import NcclExchange, find_nccl  # noqa: E402
from cuda_backend.ops import CudaOps  # noqa: E402
from cuda_backend.relay import Gpu  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")]


@pytest.fixture(scope="module")
def gpus():
    if find_nccl() is None:
        pytest.skip("NCCL is not installed")
    return [Gpu(index, CudaOps) for index in range(COUNT)]


@pytest.fixture
def exchange(gpus):
    return NcclExchange(gpus, find_nccl())


def met(exchange, gpus, x, how="sum"):
    """What each GPU has after a step of one exchange of x (ranks, partials, T, K)."""
    for gpu in gpus:
        gpu.context.arena.reset()
    exchange.begin()
    with exchange.step():
        outs = getattr(exchange, how)([on(gpu, own) for gpu, own in zip(gpus, x, strict=True)])
    return [read(gpu, out) for gpu, out in zip(gpus, outs, strict=True)]


SHAPES = [(1, 1, 8), (3, 1, 128), (2, 5, 512), (1, 40, 132)]


@pytest.mark.parametrize(("partials", "T", "K"), SHAPES)
def test_sum(exchange, gpus, partials, T, K):
    """Partial sums of each GPU, then the GPUs in order: the bits that peers' memory brings too."""
    by_peers = transports.open_exchange(gpus)
    assert isinstance(by_peers, Exchange)
    for seed in range(2):
        x = parts(partials, T, K, seed)
        for out, other in zip(met(exchange, gpus, x), met(by_peers, gpus, x), strict=True):
            assert np.array_equal(out, expected(x))
            assert np.array_equal(out, other)
    exchange.check()


@pytest.mark.parametrize(("partials", "T", "K"), SHAPES)
def test_gather(exchange, gpus, partials, T, K):
    """The columns of all GPUs beside one another, partial sums added up."""
    x = parts(partials, T, K)
    for out in met(exchange, gpus, x, "gather"):
        assert np.array_equal(out, np.concatenate([expected(own[None]) for own in x], axis=1))


def test_no_rows(exchange):
    none = [Array((0, 8))] * COUNT
    assert [x.shape for x in exchange.sum(none)] == [(0, 8)] * COUNT
    assert [x.shape for x in exchange.gather(none)] == [(0, 8 * COUNT)] * COUNT


def test_rows_do_not_depend_on_others(exchange, gpus):
    x = parts(2, 9, 64)
    for how in ("sum", "gather"):
        whole = met(exchange, gpus, x, how)[0]
        for row in (0, 4, 8):
            assert np.array_equal(met(exchange, gpus, x[:, :, row : row + 1], how)[0][0], whole[row])


def test_captured(exchange, gpus):
    """A graph of each GPU with sums one after another and a gather of slices, launched in either order."""
    T, K, depth = 3, 512, 5
    arrays = [on(gpu, own) for gpu, own in zip(gpus, parts(1, T, K), strict=True)]

    def step():
        for gpu in gpus:
            gpu.context.arena.reset()
        with exchange.step():
            sums = arrays
            for _ in range(depth):
                sums = exchange.sum(sums)
            return exchange.gather([each[1:] for each in sums])

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
            assert np.array_equal(read(gpu, out), np.concatenate([sums[1:]] * COUNT, axis=1))
    exchange.check()


def test_a_gpu_that_does_not_end_a_step(exchange, gpus, monkeypatch):
    """It is waited for; then an error names it, and every later step is refused."""
    exchange.renew()  # all are idle
    stream = SimpleNamespace(cuda=SimpleNamespace(done=False))
    busy = SimpleNamespace(index=1, device=gpus[1].device, context=SimpleNamespace(stream=stream))
    monkeypatch.setattr(exchange, "gpus", [gpus[0], busy])
    monkeypatch.setattr(exchange, "seconds", 0.1)
    with pytest.raises(BimetalError, match=r"GPU 1 waited 0\.1 s for a part of another one of GPUs 0,1.*; start"):
        exchange.renew()
    with pytest.raises(BimetalError, match=r"GPUs 0,1.* have lost one another; start the program again"):
        exchange.begin()


def test_an_error_of_nccl(exchange, monkeypatch):
    def fails():
        raise exchange.nccl.NcclError(2)

    monkeypatch.setattr(exchange, "communicators", [SimpleNamespace(check_async_error=fails)])
    with pytest.raises(BimetalError, match=r"NCCL on GPUs 0,1.*; what the step computed is lost"):
        exchange.check()


def test_choice_of_a_transport(gpus, monkeypatch, capsys):
    """Peers' memory where all reach it, else NCCL, with a line; GPUs that have neither are refused."""
    monkeypatch.setattr(cupy.cuda.runtime, "deviceCanAccessPeer", lambda a, b: {a, b} != {0, 1})
    assert isinstance(transports.open_exchange(gpus), NcclExchange)
    assert "GPUs 0 and 1 cannot reach each other's memory: NCCL exchanges their rows" in capsys.readouterr().err
    monkeypatch.setattr(transports, "find_nccl", lambda: None)
    with pytest.raises(BimetalError, match="GPUs 0 and 1 cannot reach each other's memory, which tensor_parallel"):
        transports.open_exchange(gpus)


def test_nccl_is_found_or_not(monkeypatch):
    assert find_nccl() is not None
    monkeypatch.setattr("cupy.cuda.nccl.available", False)
    assert find_nccl() is None


def test_slow_sums_are_reported(exchange, gpus, monkeypatch, capsys):
    """Sums of both transports are measured; a line reports slow ones, for they may cost more than they save."""
    for each in (exchange, transports.open_exchange(gpus)):
        assert 0 < transports.sum_seconds(gpus, each) < 60
        x = parts(1, 2, 64)
        assert np.array_equal(met(each, gpus, x)[0], expected(x))
    capsys.readouterr()
    for seconds, line in ((2e-6, ""), (20e-6, "take 20 us to add up a row, and tensor_parallel does so 128 times")):
        monkeypatch.setattr(transports, "sum_seconds", lambda *_, seconds=seconds: seconds)
        transports.warn_of_slow_sums(gpus, exchange, 64)
        assert line in (said := capsys.readouterr().err)
        assert bool(line) == bool(said)
