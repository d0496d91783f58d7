"""Tensor parallelism across processes: each has one GPU, which is one rank, and NCCL exchanges rows between them.

Rank 0 sends the steps, with their tokens, to the other ranks (common/following.py), and alone samples tokens.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import cupy
import numpy as np

from common.errors import BimetalError, UsageError
from common.following import Follower, Join, Leader, Mirror
from common.group import Group, Launch, join
from common.ops import Ops
from common.step import LayerState, Step
from common.storage import LayerSpec
from cuda_backend.card import card_of
from cuda_backend.exchange import MOST_RANKS
from cuda_backend.multi_gpu_states import MultiGpuPool, MultiGpuState
from cuda_backend.nccl_exchange import NcclExchange, find_nccl, lasting, package
from cuda_backend.ops import CudaOps
from cuda_backend.per_rank import PerRank
from cuda_backend.relay import Gpu
from cuda_backend.several_gpus import free
from cuda_backend.tensor_parallel import TensorParallelOps, filling_gpu
from cuda_backend.transports import warn_of_slow_sums


class ProcessExchange(NcclExchange):
    """Exchange by NCCL between the GPUs of several processes."""

    def __init__(self, gpu: Gpu, nccl: ModuleType, group: Group):
        self.group = group
        with gpu.device:
            super().__init__([gpu], nccl, across=[_communicator(nccl, group)], size=group.size)
        group.when_lost = self.abort

    def renew(self) -> None:
        """Refuse further steps: other ranks may wait for rows that this one has not sent."""
        self.is_over = True
        self.group.fail()

    def check(self) -> None:
        self.group.check()
        super().check()

    def abort(self) -> None:
        """End what waits on this GPU for a lost rank."""
        for communicator in self.communicators:
            communicator.abort()


def _communicator(nccl: ModuleType, group: Group) -> Any:
    """Make the communicator of this rank, by an id that rank 0 gives to all."""
    try:
        id = bytes.fromhex(group.gather("" if group.rank else nccl.get_unique_id().hex())[0])
        return lasting(nccl.NcclCommunicator(group.size, id, group.rank))
    except nccl.NcclError as error:
        raise BimetalError(f"NCCL does not join {group.size} ranks: {error}; NCCL_DEBUG=WARN shows why") from error


class LedPool(MultiGpuPool):
    """Rank 0's part of a pool, of which each other rank has a part too."""

    def __init__(self, pool: MultiGpuPool, leader: Leader, id: int):
        super().__init__(pool.pools, pool.layers)
        self.leader, self.id = leader, id

    def new_state(self) -> "LedState":
        return LedState(self)


class LedState(MultiGpuState):
    """Rank 0's part of one sequence's state; `mirror` stands for the parts of the other ranks."""

    can_save, can_wait = False, True  # other processes keep parts of the state

    def __init__(self, pool: LedPool):
        super().__init__(pool)
        self.mirror = pool.leader.new_state(pool.capacity, pool.id, self.slot)

    def _all(self) -> list[LayerState | Mirror]:
        return [*super()._all(), self.mirror]


class ProcessOps(TensorParallelOps):
    """The op contract on this process's GPU, which has one of `group.size` parts of every layer.

    answers  what a follower tells rank 0 when it is asked
    """

    runs_ahead = False  # the other ranks get a step's tokens from the host of rank 0
    run_greedy = Ops.run_greedy  # the other ranks choose no tokens

    def __init__(self, gpu: Gpu, exchange: ProcessExchange, group: Group):
        super().__init__([gpu], exchange, group.rank, group.size)
        self.group, self.leader = group, Leader(group)
        self.answers = {"free_bytes": super().free_bytes}
        weakref.finalize(self, group.close)

    def follow(self, models: Sequence[Any], join: Join) -> None:
        """Follow rank 0's orders until it ends; arguments as in Follower."""
        Follower(self, models, join).run(self.group)

    def weight_bytes(self, weight: PerRank) -> int:
        return self.group.size * super().weight_bytes(weight)

    def free_bytes(self) -> tuple[int, str]:
        """Return the bytes that are free on the rank with least free memory, and what sets that limit; for rank 0."""
        found = [super().free_bytes()[0], *(nbytes for nbytes, _ in self.group.ask("free_bytes"))]
        least = min(range(len(found)), key=found.__getitem__)
        return found[least], f"free memory of rank {least}, which holds 1/{len(found)} of each layer"

    def free_by_device(self, layers: int) -> list[tuple[int, Sequence[int]]]:
        return [(self.free_bytes()[0], range(layers))]

    def new_pool(self, spec: Sequence[LayerSpec], slots: int, capacity: int, tokens: int | None = None) -> MultiGpuPool:
        pool = super().new_pool(spec, slots, capacity, tokens)
        if self.group.rank:
            return pool
        sizes = {"slots": slots, "capacity": capacity, "tokens": tokens}
        return self.leader.new("pool", lambda number: LedPool(pool, self.leader, number), **sizes)

    def announce(self, fn: Callable[[Any, Any], Any], state: Any, step: Step) -> None:
        if self.group.rank:
            return
        tokens = step.tokens if isinstance(step.tokens, np.ndarray) else self.read(step.tokens)
        is_pool = isinstance(state, LedPool)
        self.leader.step(fn, step, tokens, {"pool": state.id} if is_pool else {"states": [state.mirror.id]})


def open_rank(
    launch: Launch, sizes: Callable[[Ops], Sequence[int]], make: Callable[[], CudaOps], facts: Mapping[str, object]
) -> ProcessOps:
    """Open this process's GPU as one of the ranks: see `cuda_backend.open_process`."""
    if (nccl := find_nccl()) is None:
        raise BimetalError(f"tensor_parallel across processes needs NCCL: pip install {package()}")
    if launch.size > MOST_RANKS:
        raise BimetalError(f"tensor_parallel is {launch.size}; supported are 2 to {MOST_RANKS} GPUs")
    index = own_device(launch.local_rank)
    cupy.cuda.Device(index).use()
    group, card = join(launch), card_of(index)
    versions = {
        "the version of CUDA": cupy.cuda.runtime.runtimeGetVersion(),
        "the version of NVRTC": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "the version of NCCL": nccl.get_version(),
        # on which kernels and the division of products depend
        "the GPU": f"{card.name} of compute capability {card.capability / 10} with {card.sms} multiprocessors",
    }
    group.agree({**facts, **versions})
    gpu = filling_gpu(index, make)
    exchange = ProcessExchange(gpu, nccl, group)
    ops = ProcessOps(gpu, exchange, group)
    layers = sizes(ops)
    need = sum(layers)
    for rank, room in enumerate(group.gather(free(gpu))):
        if need > room:
            raise BimetalError(
                f"the GPU of rank {rank} has {room / 1e9:.1f} GB free, and its part of every layer takes "
                f"{need / 1e9:.1f} GB; start more processes, or choose a smaller quantization"
            )
    warn_of_slow_sums([gpu], exchange, len(layers), prints=not launch.rank)
    return ops


def own_device(local_rank: int) -> int:
    """Return the number of this process's GPU: its number on the machine, or 0 if it sees one GPU alone."""
    count = cupy.cuda.runtime.getDeviceCount()
    if local_rank < count or count == 1:  # a launcher may have made one GPU visible to each process
        return local_rank if local_rank < count else 0
    raise UsageError(
        f"LOCAL_RANK is {local_rank}, and this machine has GPUs 0 to {count - 1}: start fewer processes here"
    )
