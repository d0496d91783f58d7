"""All-reduce and all-gather of rows among the GPUs of one process, by one kernel on each GPU, through peer memory.

The kernels are kernels/exchange.cu, and kernels/exchange_norm.cu for a sum whose consumer is a norm.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import cupy
import numpy as np

from common.errors import BimetalError
from cuda_backend.arrays import Array
from cuda_backend.host_memory import HostMemory
from cuda_backend.launch import Kernel, kernel
from cuda_backend.lazy import Lazy, Op, Target
from cuda_backend.memory import Memory
from cuda_backend.prototypes import MEETING, PEERS
from cuda_backend.relay import Gpu
from cuda_backend.rows import dense, emit_copy
from cuda_backend.views import float4_aligned, packed_only, view

MOST_RANKS = len(PEERS.names or ())
NUMBERS = 1 << 20  # most numbers of one exchange: 204 rows of 5,120; a longer step takes several
SECONDS = 10  # timeout of a GPU that waits for another GPU's part
RENEWED = 1 << 31  # exchanges after which numbers are reset, before they would overflow
RESIDENT = 10, 4  # CTAs of exchange_scale on a multiprocessor, of two ranks and of more: exchange_norm.cu


@dataclass(frozen=True)
class End:
    """One GPU's end of an exchange: the buffer that peers write, the kernels' `state`, and a failure flag.

    failed  the flag as the host reads it, in `memory`
    """

    gpu: Gpu
    buffer: Memory
    state: Memory
    memory: HostMemory
    failed: np.ndarray

    def clear(self) -> None:
        stream, memset = self.gpu.context.stream, cupy.cuda.runtime.memsetAsync
        memset(self.buffer.address, 0xFF, self.buffer.nbytes, stream.ptr)  # kernels/peers.cuh UNSENT
        memset(self.state.address, 0, self.state.nbytes, stream.ptr)
        stream.synchronize()
        self.failed[:] = 0


class Exchange:
    """Add up or concatenate one array of each GPU, in the order of `gpus`; a rank is an index into `gpus`.

    index    exchanges so far in the step that is being launched
    passed   exchanges since the exchange numbers were reset
    pending  the last sum and its arrays, if its consumer may compute it
    names    all GPUs, for messages
    """

    def __init__(self, gpus: Sequence[Gpu], numbers: int = NUMBERS, seconds: float = SECONDS):
        self.numbers, self.seconds = numbers, seconds
        self.capacity = -(-numbers // 128) * 128
        self.index = self.passed = 0
        self.pending: list[tuple[Sum, Array]] = []
        self.ends: list[End] = []
        self.names = f"GPUs {','.join(str(gpu.index) for gpu in gpus)}"
        for gpu in gpus:
            with gpu.device:
                buffer, state = Memory(2 * len(gpus) * self.capacity * 4), Memory(8)
                word = HostMemory(4, "words of an exchange")
                self.ends.append(End(gpu, buffer, state, word, word.numbers()))
        addresses = [end.buffer.address for end in self.ends]
        self.peers = np.array(tuple(addresses + [0] * (MOST_RANKS - len(addresses))), PEERS)
        self.renew()

    def renew(self) -> None:
        """Wait for all GPUs and reset the exchange numbers: after a failed step, and before numbers repeat."""
        self.passed = 0
        for end in self.ends:
            with end.gpu.device:
                end.gpu.context.stream.synchronize()
        for end in self.ends:
            with end.gpu.device:
                end.clear()

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Prepare a step: reset the exchange numbers if they would repeat in this step."""
        if self.passed >= RENEWED:
            self.renew()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surround the launches of a step, eager or captured; then each GPU adds the step's exchanges to its count."""
        self.index, self.pending = 0, []
        yield
        self.launch_pending()
        self.passed += self.index
        for end in self.ends if self.index else ():
            with end.gpu.device:
                args = end.state.address, self.index
                kernel("exchange", "count_exchanges", self.defines)((1,), (32,), args, stream=end.gpu.context.stream)

    def sum(self, xs: Sequence[Array], fuses: bool = False) -> list[Array]:
        """Add up `xs`, (T, K) each, on every GPU.

        fuses  the sum's consumer may compute it, by launches on one GPU after another; only while graphs are captured,
               since captured launches wait for no other GPU
        """
        self.launch_pending()
        (T, K), card = xs[0].shape, self.ends[0].gpu.context.card
        is_small = K % 4 == 0 and self.numbers >= T * K and RESIDENT[len(xs) > 2] * card.sms >= T * -(-K // 256)
        if not (fuses and T and is_small):
            return self._meet("exchange", xs, 1)
        for rank, (end, x) in enumerate(zip(self.ends, xs, strict=True)):
            with end.gpu.device:
                part, own = Sum(self, rank, self.meeting(rank)), as_float4(end.gpu, x)
                self.pending.append((part, Array((T, K), lazy=Lazy(end.gpu.context, SUM, T, K, (own,), part))))
        self.index += 1
        return [x for _, x in self.pending]

    def gather(self, xs: Sequence[Array]) -> list[Array]:
        """Join the columns of `xs`, (T, K) each, on every GPU: (T, ranks * K)."""
        self.launch_pending()
        return self._meet("gather", xs, len(self.ends))

    def launch_pending(self) -> None:
        """Launch the pending sum, before another exchange."""
        pending, self.pending = self.pending, []
        for end, (part, x) in zip(self.ends, pending, strict=False):
            if not part.is_launched:
                with end.gpu.device:
                    x.compute()

    def _meet(self, name: str, xs: Sequence[Array], wide: int) -> list[Array]:
        """Launch the kernel `name` on every GPU: from xs (T, K) it computes rows of `wide` * K numbers.

        Between the first and the last launch the host does nothing else, since launched kernels wait for those of the
        other GPUs.
        """
        T, K = xs[0].shape
        if K % 4 or self.numbers < K:
            raise ValueError(f"rows of {K} numbers; an exchange takes rows of a multiple of 4 up to {self.numbers}")
        if not T:  # no logits of a prefill step are requested
            return [Array((0, wide * K)) for _ in xs]
        outs, kernels, parts = [], [], []
        for end, x in zip(self.ends, xs, strict=True):
            with end.gpu.device:
                kernels.append(kernel("exchange", name, self.defines))
                parts.append(as_float4(end.gpu, x))
                outs.append(Array((T, wide * K), end.gpu.context.arena.take(4 * T * wide * K)))
        rows = self.numbers // K
        for first in range(0, T, rows):
            count = min(rows, T - first)
            views = [view(part[first : first + count]) for part in parts]
            for rank, (end, run, own, out) in enumerate(zip(self.ends, kernels, views, outs, strict=True)):
                with end.gpu.device:
                    to = out.address + 4 * first * wide * K
                    self.launch(run, rank, own, (count, K), self.meeting(rank), to)
            self.index += 1
        return outs

    def launch(
        self, run: Kernel, rank: int, x: np.ndarray, shape: tuple[int, int], meeting: np.ndarray, out: int
    ) -> None:
        """Launch `run`, a kernel of kernels/exchange.cu, on one GPU for its x (T, K)."""
        (T, K), context = shape, self.ends[rank].gpu.context
        grid = (min(-(-T * K // 512), 4 * context.card.sms),)
        run(grid, (128,), (x, K, T * K // 4, self.peers, meeting, out), stream=context.stream)

    def meeting(self, rank: int) -> np.ndarray:
        """Make the struct Meeting of kernels/peers.cuh, which describes the next exchange."""
        end = self.ends[rank]
        places = end.buffer.address, end.state.address, end.memory.address
        return np.array((*places, int(1e9 * self.seconds), rank, self.capacity, self.index), MEETING)

    @property
    def defines(self) -> tuple[str, ...]:
        return (f"RANKS={len(self.ends)}",)

    # -- what may go wrong ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that no GPU timed out; resets the exchange and raises BimetalError if one did."""
        lost = [end.gpu.index for end in self.ends if end.failed[0]]
        if lost:
            self.renew()
            raise BimetalError(
                f"GPU {lost[0]} waited {self.seconds:g} s for another one of {self.names}, "
                "whose part of a sum did not come; what the step computed is lost"
            )


def as_float4(gpu: Gpu, x: Array) -> Array:
    """Compute x, and return it contiguous and aligned, so that kernels can read four adjacent floats at a time."""
    x.compute()
    return x if float4_aligned(x) else dense(gpu.context, x)


@dataclass
class Sum:
    """One GPU's part of a sum that its consumer may compute: the parameters of a Lazy of `SUM`."""

    exchange: Exchange
    rank: int
    meeting: np.ndarray
    is_launched: bool = False

    def launch(self, x: Array, out: int) -> None:
        """Write the sum to `out`; x (T, K) is this GPU's part of the sum."""
        self._once()
        run = kernel("exchange", "exchange", self.exchange.defines)
        T, K = x.shape
        self.exchange.launch(run, self.rank, view(x), (T, K), self.meeting, out)

    def launch_norm(self, x: Array, part: Array, weight: int, total: int, squares: int, out: np.ndarray) -> None:
        """Write x (T, K) plus the sum to `total`, and the norm by kernels/exchange_norm.cu to `squares` and `out`.

        part    this GPU's part of the sum
        weight  address of the norm's weight; 0: none
        """
        self._once()
        partials = f"PARTIALS={x.partials}", f"OTHERS={part.partials}"
        run = kernel("exchange_norm", "exchange_scale", (*self.exchange.defines, *partials, *packed_only(out)))
        args = (view(x), view(part), weight, total, squares, out, self.exchange.peers, self.meeting)
        stream = self.exchange.ends[self.rank].gpu.context.stream
        run((-(-int(out["groups"]) // 8), x.shape[0]), (64,), args, stream=stream)

    def _once(self) -> None:
        if self.is_launched:
            raise RuntimeError("a sum over GPUs is launched twice in one step")
        self.is_launched = True


def _emit_sum(lazy: Lazy, target: Target) -> None:
    if not target.dense:
        emit_copy(lazy, target)
        return
    (x,) = lazy.inputs
    lazy.parameters.launch(x, target.dense)


SUM = Op("sum over GPUs", _emit_sum)
