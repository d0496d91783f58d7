"""Sums over GPUs that hold parts of the same rows: one kernel on each, through peer memory. See kernels/exchange.cu."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import cupy
import numpy as np

from common.errors import BimetalError
from cuda_backend.arrays import Array
from cuda_backend.host_memory import HostMemory
from cuda_backend.launch import kernel
from cuda_backend.memory import Memory
from cuda_backend.prototypes import PEERS
from cuda_backend.relay import Gpu
from cuda_backend.views import view

MOST_RANKS = len(PEERS.names or ())
PAIRS = 1 << 19  # of neighbours that one exchange takes: 204 rows of 5,120 numbers; a longer step takes several
SECONDS = 10  # that a GPU waits for another one's part
RENEWED = 1 << 31  # exchanges after which the numbers begin again, long before they would come again by themselves


@dataclass(frozen=True)
class End:
    """One GPU's end of an exchange: the buffer that peers write, the kernel's `state`, and a word for the host.

    failed  the word as the host reads it, which lies in `memory`
    """

    gpu: Gpu
    buffer: Memory
    state: Memory
    memory: HostMemory
    failed: np.ndarray

    def clear(self) -> None:
        stream = self.gpu.context.stream
        for memory in (self.buffer, self.state):
            cupy.cuda.runtime.memsetAsync(memory.address, 0, memory.nbytes, stream.ptr)
        stream.synchronize()
        self.failed[:] = 0


class Exchange:
    """Adds up arrays of which each GPU has one, in the order of `gpus`, whose places are the ranks.

    index   exchanges that the step which is being launched has so far
    passed  exchanges since the numbers began
    """

    def __init__(self, gpus: Sequence[Gpu], pairs: int = PAIRS, seconds: float = SECONDS):
        self.pairs, self.seconds = pairs, seconds
        self.index = self.passed = 0
        self.ends: list[End] = []
        for gpu in gpus:
            with gpu.device:
                buffer, state = Memory(2 * len(gpus) * pairs * 16), Memory(8)
                word = HostMemory(4, "words of an exchange")
                self.ends.append(End(gpu, buffer, state, word, word.numbers()))
        self.renew()

    def renew(self) -> None:
        """Begin again, once all GPUs are idle: after a step that did not end, and before numbers come again."""
        self.index = self.passed = 0
        for end in self.ends:
            with end.gpu.device:
                end.gpu.context.stream.synchronize()
        for end in self.ends:
            with end.gpu.device:
                end.clear()

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before a step: begin again where the numbers would come again."""
        if self.passed >= RENEWED:
            self.renew()

    @contextmanager
    def step(self) -> Iterator[None]:
        """The launches of a step, as they come or captured: after them every GPU counts its exchanges."""
        self.index = 0
        yield
        self.passed += self.index
        for end in self.ends if self.index else ():
            with end.gpu.device:
                args = end.state.address, self.index
                kernel("exchange", "count_exchanges", self._defines)((1,), (32,), args, stream=end.gpu.context.stream)

    def sum(self, xs: Sequence[Array]) -> list[Array]:
        """The sum of `xs`, (T, K) each, on every GPU.

        Between the first and the last launch the host does nothing but launch: a GPU that waits must not wait for it.
        """
        T, K = xs[0].shape
        most = 2 * self.pairs
        if K % 2 or most < K:
            raise ValueError(f"rows of {K} numbers; an exchange takes rows of an even number of them up to {most}")
        if not T:  # no row of a piece of a prompt is asked for
            return list(xs)
        outs, kernels = [], []
        for end, x in zip(self.ends, xs, strict=True):
            with end.gpu.device:
                kernels.append(kernel("exchange", "exchange", self._defines))
                x.compute()
                outs.append(Array((T, K), end.gpu.context.arena.take(4 * T * K)))
        rows = most // K
        peers = np.array(tuple(end.buffer.address for end in self.ends) + (0,) * (MOST_RANKS - len(self.ends)), PEERS)
        for first in range(0, T, rows):
            count = min(rows, T - first)
            pairs = count * K // 2
            parts = [view(x[first : first + count]) for x in xs]
            for rank, (end, run, part, out) in enumerate(zip(self.ends, kernels, parts, outs, strict=True)):
                card, stream = end.gpu.context.card, end.gpu.context.stream
                own = rank, self.pairs, end.state.address, self.index, end.memory.address
                to = int(1e9 * self.seconds), out.address + 4 * first * K
                with end.gpu.device:
                    grid = (min(-(-pairs // 256), 2 * card.sms),)
                    run(grid, (256,), (part, K, pairs, peers, end.buffer.address, *own, *to), stream=stream)
            self.index += 1
        return outs

    @property
    def _defines(self) -> tuple[str, ...]:
        return (f"RANKS={len(self.ends)}",)

    # -- what may go wrong ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises BimetalError where a GPU whose work is over has waited in vain, and begins again."""
        lost = [end.gpu.index for end in self.ends if end.failed[0]]
        if lost:
            all_of = ",".join(str(end.gpu.index) for end in self.ends)
            self.renew()
            raise BimetalError(
                f"GPU {lost[0]} waited {self.seconds:g} s for another one of GPUs {all_of}, "
                "whose part of a sum did not come; what the step computed is lost"
            )
