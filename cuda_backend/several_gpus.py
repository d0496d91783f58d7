"""Ops that pipeline parallelism (layer_split.py) and tensor parallelism (tensor_parallel.py) have in common."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import cupy

from common.backend import LayerSize
from common.errors import UsageError
from common.ops import Ops
from common.storage import LayerSpec
from common.tensors import Tensor
from cuda_backend.multi_gpu_states import MultiGpuPool, MultiGpuState
from cuda_backend.ops import CudaOps
from cuda_backend.relay import Gpu


class SeveralGpus(Ops):
    """Base of LayerSplitOps and TensorParallelOps: methods of all `gpus`, and those that the first one runs for all."""

    name = CudaOps.name
    item_bytes = CudaOps.item_bytes
    warm_rows = CudaOps.warm_rows
    runs_ahead = CudaOps.runs_ahead
    replays = CudaOps.replays
    draws = CudaOps.draws
    cache_pairs = CudaOps.cache_pairs
    checks_scales, adapter_type = CudaOps.checks_scales, CudaOps.adapter_type
    reserves = CudaOps.reserves
    joins = CudaOps.joins
    divides = False  # hidden states would have to be copied from the GPU of one part to the GPU of the next

    def __init__(self, gpus: Sequence[Gpu]):
        self.gpus = gpus
        self.prefill_rows = min(gpu.ops.prefill_rows for gpu in gpus)

    @contextmanager
    def loading(self) -> Iterator[None]:
        with ExitStack() as stack:
            for gpu in self.gpus:
                stack.enter_context(gpu.device)  # left only after `loading`, whose last check runs on this GPU
                stack.enter_context(gpu.ops.loading())
            yield

    def prompt_rows(self, spec: Sequence[LayerSpec]) -> int:
        return 1  # long steps are not captured on several GPUs

    def holds(self, stored_type: str) -> str:
        return self.gpus[0].ops.holds(stored_type)

    def held_bytes(self, *parts: Tensor) -> int:
        return self.gpus[0].ops.held_bytes(*parts)

    def held_expert_bytes(self, *parts: Tensor) -> int:
        return self.gpus[0].ops.held_expert_bytes(*parts)

    def held_state_bytes(self, spec: Sequence[LayerSpec], tokens: int, rows: int) -> int:
        return self.gpus[0].ops.held_state_bytes(spec, tokens, rows)

    def work_bytes(self, layers: Sequence[LayerSize], tokens: int, rows: int) -> int:
        return self.gpus[0].ops.work_bytes(layers, tokens, rows)

    def decode_bytes(self, layers: Sequence[LayerSize], tokens: int, sequences: int) -> int:
        return self.gpus[0].ops.decode_bytes(layers, tokens, sequences)

    def logits_bytes(self, vocab: int, sequences: int) -> int:
        return self.gpus[0].ops.logits_bytes(vocab, sequences)

    @abstractmethod
    def new_pool(
        self, spec: Sequence[LayerSpec], slots: int, capacity: int, tokens: int | None = None
    ) -> MultiGpuPool: ...

    def new_state(self, spec: Sequence[LayerSpec], capacity: int) -> MultiGpuState:
        return self.new_pool(spec, 1, capacity).new_state()

    def peak_bytes(self) -> int:
        return sum(self.each_gpu(lambda gpu: gpu.ops.peak_bytes()))

    @property
    def launches(self) -> int:
        return sum(gpu.ops.launches for gpu in self.gpus)

    @property
    def built(self) -> int:
        return sum(gpu.ops.built for gpu in self.gpus)

    @property
    def waited(self) -> float:
        return sum(gpu.ops.waited for gpu in self.gpus)

    def count_idle(self) -> None:
        """Count nothing: each GPU waits for the others too."""

    def each_gpu(self, fn: Callable[[Gpu], Any]) -> list[Any]:
        """Call `fn` with each GPU, made the current one, and return the results."""
        out = []
        for gpu in self.gpus:
            with gpu.device:
                out.append(fn(gpu))
        return out


# -- arguments of an op ------------------------------------------------------------------------------------------------


def leaves(x: Any) -> Iterator[Any]:
    """Iterate over the leaves of `x`, which may be a tuple of tuples."""
    if isinstance(x, tuple):
        for part in x:
            yield from leaves(part)
    else:
        yield x


def each(x: Any, change: Callable[[Any], Any]) -> Any:
    """Return `x` with `change` of each leaf; a named tuple keeps its type."""
    if not isinstance(x, tuple):
        return change(x)
    parts = [each(part, change) for part in x]
    return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)


# -- the GPUs of this machine ------------------------------------------------------------------------------------------


def check_devices(devices: Sequence[int], chosen: Sequence[int]) -> None:
    """Raise UsageError for a GPU of `chosen` that this machine lacks, or one that `devices` names twice."""
    count = cupy.cuda.runtime.getDeviceCount()
    for index in chosen:
        if not 0 <= index < count:
            has = f"GPUs 0 to {count - 1}" if count > 1 else "GPU 0 alone"
            raise UsageError(f"GPU {index} does not exist; this machine has {has}")
    if len(set(devices)) < len(devices):
        raise UsageError(f"devices {','.join(map(str, devices))} name a GPU twice")


def free(gpu: Gpu) -> int:
    """Count the bytes of the GPU's memory that are free."""
    with gpu.device:
        return gpu.ops.free_bytes()[0]


@cache
def connect(reader: int, owner: int) -> None:
    """Let a GPU access another's memory; if the hardware cannot, the driver copies through the host."""
    runtime = cupy.cuda.runtime
    if runtime.deviceCanAccessPeer(reader, owner):
        with cupy.cuda.Device(reader):
            try:
                runtime.deviceEnablePeerAccess(owner)
            except runtime.CUDARuntimeError as error:
                if "PeerAccessAlreadyEnabled" not in str(error):
                    raise
