"""CudaOps for benchmarks: weights have the tensors' types and shapes, and random values made on the device."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from common.hot_experts import HotExperts
from common.quants import BLOCKS, RANDOM_EXPONENT, RANDOM_HALVES
from common.routing_trace import Trace
from common.step import MAX_DECODE_ROWS, Step
from common.tensors import Tensor
from cuda_backend.launch import kernel
from cuda_backend.ops import CudaOps
from cuda_backend.replay import bucket
from cuda_backend.routing_replay import Routing
from cuda_backend.to_host import Arrival
from cuda_backend.weights import Stage, Weight


class RandomOps(CudaOps):
    def __init__(self, experts: HotExperts | None = None, trace: Trace | None = None, start: int = 0) -> None:
        """Open the current GPU.

        experts  as in `CudaOps`
        trace    the routing that steps replay, from token `start` on; None: random routers choose
        """
        super().__init__(experts)
        routing = Routing(trace, self.context.stream, start) if trace else None
        self.context = replace(self.context, routing=routing)
        self.experts_of: dict[int, int] = {}  # number of experts by layer

    def expert_weight(self, *parts: Tensor) -> Weight:
        if self.layer is not None:
            self.experts_of[self.layer] = parts[0].shape[0]
        return super().expert_weight(*parts)

    @contextmanager
    def loading(self) -> Iterator[None]:
        with super().loading():
            yield
            if self.context.routing:
                self.context.routing.open(sorted(self.experts_of), max(self.experts_of.values(), default=0))

    def _run(
        self, fn: Callable[[Any, Any], Any], state: Any, step: Step, arrival: Arrival | None = None
    ) -> tuple[Any, int]:
        if self.context.routing and len(step) <= MAX_DECODE_ROWS:
            self.context.routing.step(len(step), bucket(len(step)))
        return super()._run(fn, state, step, arrival)

    @property
    def stage(self) -> Stage:
        return self._random_rows

    def _random_rows(self, tensor: Tensor, _: Any, rows: slice) -> int:
        """Make random blocks for as many rows."""
        block = BLOCKS[tensor.type]
        nbytes = (rows.stop - rows.start) * tensor.data.shape[-1]
        self.uploader.finish()  # its launches may still read the buffer
        address = self.uploader.scratch(nbytes + 4)
        args = (address, -(-nbytes // 4), (zlib.crc32(tensor.name.encode()) + rows.start) % (1 << 32))
        kernel("random", "fill")((1024,), (256,), args, stream=self.context.stream)
        n = nbytes // block.bytes
        if tensor.type in RANDOM_EXPONENT:
            exponents = (address, n, block.bytes, RANDOM_EXPONENT[tensor.type])
            kernel("random", "set_exponents")((-(-n // 256),), (256,), exponents, stream=self.context.stream)
        for at, value in zip(block.halves, RANDOM_HALVES.get(tensor.type, ()), strict=True):
            halves = (address, n, block.bytes, at, value)
            kernel("random", "set_halves")((-(-n // 256),), (256,), halves, stream=self.context.stream)
        return address
