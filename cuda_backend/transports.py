"""Choose how tensor parallelism exchanges rows: through peer memory, or by NCCL if GPUs cannot access each other's."""

import itertools
import sys
from collections.abc import Sequence

import cupy

from common.errors import BimetalError
from cuda_backend.arrays import Array
from cuda_backend.exchange import Exchange
from cuda_backend.launch import Graph
from cuda_backend.nccl_exchange import NcclExchange, find_nccl, package
from cuda_backend.relay import Gpu
from cuda_backend.several_gpus import connect

Transport = Exchange | NcclExchange

SLOW = 8e-6  # seconds per sum above which tensor parallelism may slow a small model down
SUMS, COLUMNS, RUNS = 16, 256, 3  # what `sum_seconds` measures


def open_exchange(gpus: Sequence[Gpu]) -> Transport:
    """Open the exchange of `gpus`, whose places are the ranks; BimetalError if they have no way to exchange rows."""
    pairs = [(a.index, b.index) for a, b in itertools.permutations(gpus, 2)]
    apart = next((pair for pair in pairs if not cupy.cuda.runtime.deviceCanAccessPeer(*pair)), None)
    if apart is None:
        for pair in pairs:
            connect(*pair)
        return Exchange(gpus)
    cannot = f"GPUs {apart[0]} and {apart[1]} cannot reach each other's memory"
    if (nccl := find_nccl()) is None:
        raise BimetalError(
            f"{cannot}, which tensor_parallel needs without NCCL (pip install {package()}); "
            "use split, by which each holds some of the layers"
        )
    print(f"{cannot}: NCCL exchanges their rows, and split may be faster", file=sys.stderr)
    return NcclExchange(gpus, nccl)


def warn_of_slow_sums(gpus: Sequence[Gpu], exchange: Transport, layers: int, prints: bool = True) -> None:
    """Measure a sum; print the time of sums per token of `layers` layers if the connection of the GPUs is slow.

    prints  whether anything is printed: across processes all measure together, and one prints
    """
    seconds = sum_seconds(gpus, exchange)
    if prints and seconds > SLOW:
        print(
            f"{exchange.names} take {1e6 * seconds:.0f} us to add up a row, and tensor_parallel does so "
            f"{2 * layers} times per token ({2e3 * layers * seconds:.1f} ms): one GPU, or split, may be faster",
            file=sys.stderr,
        )


def sum_seconds(gpus: Sequence[Gpu], exchange: Transport) -> float:
    """Measure the seconds of a sum of one row, among many sums in a captured graph on each GPU."""
    xs = list[Array]()
    for gpu in gpus:
        gpu.context.arena.reset()
        with gpu.device:
            xs.append(Array((1, COLUMNS), gpu.context.arena.take(4 * COLUMNS)))

    def launch() -> None:
        with exchange.step():
            sums = xs
            for _ in range(SUMS):
                sums = exchange.sum(sums)

    launch()  # load kernels and allocate memory before the capture
    graphs, best = list[Graph](), float("inf")
    for gpu in gpus:
        with gpu.device:
            graphs.append(gpu.context.replay.graph())
    launch()
    for gpu, graph in zip(gpus, graphs, strict=True):
        with gpu.device:
            graph.end()
    last = gpus[-1]  # it begins when the others wait for it
    with last.device:
        begun, done = cupy.cuda.Event(), cupy.cuda.Event()
    for _ in range(RUNS):
        for gpu, graph in zip(gpus, graphs, strict=True):
            with gpu.device:
                if gpu is last:
                    gpu.context.stream.record(begun)
                graph.play()
        with last.device:
            last.context.stream.record(done)
        exchange.passed += exchange.index
        for gpu in gpus:
            with gpu.device:
                gpu.context.stream.synchronize()
        best = min(best, cupy.cuda.get_elapsed_time(begun, done) / 1e3)
    exchange.check()
    return best / SUMS
