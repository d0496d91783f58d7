"""All-reduce and all-gather of rows by NCCL, for GPUs without access to each other's memory, and across processes.

NCCL only copies every part to every GPU. The consumer of a sum adds the parts as partial sums in the order of the
ranks, so that results are bitwise those of exchange.py. With three GPUs and more, NCCL's sums depend on message sizes.
"""

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import cupy

from common.errors import BimetalError
from cuda_backend import rows
from cuda_backend.arrays import Array
from cuda_backend.exchange import SECONDS
from cuda_backend.relay import Gpu


def find_nccl() -> ModuleType | None:
    """Return CuPy's bindings of NCCL; None if its library is missing."""
    try:
        from cupy.cuda import nccl
    except ImportError:
        return None
    return nccl if nccl.available else None


def package() -> str:
    """Name the package that contains NCCL for this version of CUDA."""
    return f"nvidia-nccl-cu{cupy.cuda.runtime.runtimeGetVersion() // 1000}"


class NcclExchange:
    """Exchange by NCCL: a communicator per GPU of this process.

    index, passed  as in `Exchange`, like the argument `fuses` of `sum`
    is_over        whether a GPU waits for another GPU that has ended its step
    names          all ranks, for messages
    """

    def __init__(
        self, gpus: Sequence[Gpu], nccl: ModuleType, seconds: float = SECONDS, across: Sequence[Any] = (), size: int = 0
    ):
        """Join the GPUs of this process; a rank is an index into `gpus`.

        across  communicators of `gpus` with other processes, in which they are some of `size` ranks; by default none
        """
        self.gpus, self.nccl, self.seconds = gpus, nccl, seconds
        self.index = self.passed = 0
        self.is_over = False
        devices = tuple(gpu.index for gpu in gpus)
        self.size = size or len(gpus)
        self.communicators = across or _communicators(nccl, devices)
        self.names = f"ranks {','.join(map(str, range(size)))}" if across else f"GPUs {','.join(map(str, devices))}"

    def begin(self) -> None:
        """Refuse the next step if a GPU still waits in an earlier one: raises BimetalError."""
        if self.is_over:
            raise BimetalError(f"{self.names} have lost one another; start the program again")

    @contextmanager
    def step(self) -> Iterator[None]:
        """Enclose the launches of a step, whether they run or are captured."""
        self.index = 0
        yield
        self.passed += self.index

    def sum(self, xs: Sequence[Array], fuses: bool = False) -> list[Array]:
        """Bring `xs`, (T, K) each, to every GPU as one partial sum per rank; any consumer adds them up."""
        T, K = xs[0].shape
        if not T:
            return list(xs)
        parts = self._all_of(xs)
        return [Array((T, K), part, partials=self.size, partial_stride=T * K) for part in parts]

    def gather(self, xs: Sequence[Array]) -> list[Array]:
        """Join the columns of `xs`, (T, K) each, on every GPU: (T, ranks * K)."""
        (T, K), n, outs = xs[0].shape, self.size, list[Array]()
        for gpu, part in zip(self.gpus, self._all_of(xs) if T else [0] * len(xs), strict=True):
            with gpu.device:
                joined = Array((T, n, K), part, strides=(K, T * K, 1))
                outs.append(Array((T, n * K), rows.dense(gpu.context, joined).address if T > 1 else part))
        return outs

    def _all_of(self, xs: Sequence[Array]) -> list[int]:
        """Copy the parts `xs`, (T, K) each, to every GPU; return their addresses there: (ranks, T, K) float32."""
        sent, received = list[Array](), list[int]()
        for gpu, x in zip(self.gpus, xs, strict=True):
            with gpu.device:
                sent.append(x if x.is_dense else rows.dense(gpu.context, x))
                received.append(gpu.context.arena.take(4 * self.size * x.size))
        self.nccl.groupStart()
        try:
            for gpu, communicator, x, to in zip(self.gpus, self.communicators, sent, received, strict=True):
                stream = gpu.context.stream
                communicator.allGather(x.address, to, x.size, self.nccl.NCCL_FLOAT32, stream.ptr)
                stream.joined = True  # NCCL may have made it wait for one of its own streams
        finally:
            self.nccl.groupEnd()
        self.index += 1
        return received

    # -- what may go wrong ---------------------------------------------------------------------------------------------

    def renew(self) -> None:
        """Wait for all GPUs after a failed step; BimetalError if one still waits for another."""
        self.index = self.passed = 0
        until = time.monotonic() + self.seconds
        for gpu in self.gpus:
            with gpu.device:
                while not gpu.context.stream.cuda.done:
                    if time.monotonic() > until:
                        self.is_over = True
                        raise BimetalError(
                            f"GPU {gpu.index} waited {self.seconds:g} s for a part of another one of "
                            f"{self.names}; start the program again"
                        )
                    time.sleep(1e-3)

    def check(self) -> None:
        """Raise BimetalError after an error of NCCL."""
        try:
            for communicator in self.communicators:
                communicator.check_async_error()
        except self.nccl.NcclError as error:
            raise BimetalError(f"NCCL on {self.names}: {error}; what the step computed is lost") from error


@cache
def _communicators(nccl: ModuleType, devices: tuple[int, ...]) -> Sequence[Any]:
    """Return a communicator per GPU; all models on these GPUs share them, and they last as long as the process."""
    try:
        communicators = nccl.NcclCommunicator.initAll(list(devices))
    except nccl.NcclError as error:
        names = ",".join(map(str, devices))
        raise BimetalError(f"NCCL does not join GPUs {names}: {error}; use split instead") from error
    return tuple(map(lasting, communicators))


def lasting(communicator: Any) -> Any:
    """Let a communicator last as long as the process.

    CuPy destroys a communicator with its object. NCCL then waits until all graphs that contain its calls are freed;
    Python may free these graphs later, which would be a deadlock.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(communicator))
    return communicator
