"""States of sequences on several GPUs: a pool per GPU, of its layers or its part of every layer, with equal slots."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from common.step import Parts, Shape, State, Step
from cuda_backend.memory import free_and_total
from cuda_backend.relay import Gpu
from cuda_backend.replay import graphs
from cuda_backend.runs import Runs
from cuda_backend.states import CudaPool, CudaState


@dataclass(frozen=True)
class Share:
    """A sequence's states of the layers on one GPU, committed together."""

    gpu: Gpu
    state: CudaState

    def commit(self, path: np.ndarray) -> None:
        with self.gpu.device:
            self.state.commit(path)

    def snapshot(self) -> Any:
        with self.gpu.device:
            return self.state.snapshot()

    def restore(self, snapshot: Any) -> None:
        with self.gpu.device:
            self.state.restore(snapshot)

    def row_shapes(self, tokens: int) -> list[Shape]:
        return self.state.row_shapes(tokens)

    def point_shapes(self, length: int) -> list[Shape]:
        return self.state.point_shapes(length)

    def save_rows(self, first: int, last: int) -> list[np.ndarray]:
        with self.gpu.device:
            return self.state.save_rows(first, last)

    def save_point(self) -> list[np.ndarray]:
        with self.gpu.device:
            return self.state.save_point()

    def load(self, length: int, rows: list[Parts], point: list[np.ndarray]) -> None:
        with self.gpu.device:
            self.state.load_parts(length, rows, point)

    @property
    def nbytes(self) -> int:
        return self.state.nbytes


class MultiGpuPool:
    """The states of up to `slots` sequences of at most `capacity` tokens, computed together in one step.

    The pools of all GPUs have equal numbers of slots and pages, which are taken and freed together: the first pool
    shows whether pages are short.

    pools   the pool of each GPU; some may have no layers
    layers  `pool[i].kv`, ... of all layers, as the ops of these GPUs receive them
    """

    length = 0  # a pool has no single length

    def __init__(self, pools: Mapping[Gpu, CudaPool], layers: Sequence[SimpleNamespace]):
        self.pools, self.layers = pools, layers
        self.first = next(iter(pools.values()))
        self.slots, self.capacity = self.first.slots, self.first.capacity
        self.graphs = graphs()

    def __getitem__(self, layer: int) -> SimpleNamespace:
        return self.layers[layer]

    @property
    def pool(self) -> "MultiGpuPool":
        return self

    def new_state(self) -> "MultiGpuState":
        """Take a vacant slot as the state of a new sequence; the slot is vacant again when the state is deleted."""
        return MultiGpuState(self)

    @property
    def lengths(self) -> list[int]:
        """Return the committed tokens of each slot."""
        return self.first.lengths

    @property
    def free_tokens(self) -> int | None:
        """Count the tokens for which pages are free on every GPU; None: each sequence has memory for all of its own."""
        free = [tokens for pool in self.pools.values() if (tokens := pool.free_tokens) is not None]
        return min(free, default=None)

    def runs(self, step: Step) -> Runs:
        """Return the rows of each sequence of a step, whose `slots` are the pool's."""
        return self.first.runs(step)

    def note_runs(self, step: Step, runs: Runs) -> None:
        """Note a step before its launch, and its runs; NoRoomError if pages for its rows are short."""
        for gpu, pool in self.pools.items():
            with gpu.device:
                pool.note_runs(step, runs)

    def commit_rows(self, states: Sequence[State], counts: Sequence[int]) -> None:
        """Commit the first `counts` rows, at least one, that the last step of decoding had of each state."""
        for gpu, pool in self.pools.items():
            with gpu.device:
                pool.commit_rows(states, counts)
        for state, count in zip(states, counts, strict=True):
            state.length += count

    @property
    def calibrates(self) -> bool:
        return any(pool.calibrates for pool in self.pools.values())

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools.values())


class MultiGpuState(State):
    """One sequence's slot of a pool; `shares` are its parts on each GPU."""

    def __init__(self, pool: MultiGpuPool):
        self.pool: MultiGpuPool = pool
        self.shares: dict[Gpu, CudaState] = {}
        for gpu, own in pool.pools.items():
            with gpu.device:
                self.shares[gpu] = own.new_state()
        (self.slot,) = {share.slot for share in self.shares.values()}
        super().__init__([vars(layer) for layer in pool.layers], pool.capacity)

    @property
    def saving(self) -> tuple[int, int | None]:
        """Count the bytes of all GPUs, of which each has a share."""
        waiting = most = 0
        for gpu, share in self.shares.items():
            with gpu.device:
                copies = share.pool.copies
                waiting, most = waiting + copies.waiting_bytes, most + copies.limit(free_and_total()[0])
        return waiting, most

    def when_saved(self, arrays: Sequence[np.ndarray] | None = None) -> Callable[[], object]:
        waits = [share.when_saved(arrays) for share in self.shares.values()]
        return lambda: [wait() for wait in waits]

    @property
    def graphs(self) -> Any:
        return self.pool.graphs

    @property
    def calibrates(self) -> bool:
        return self.pool.calibrates

    def runs(self, step: Step) -> Runs:
        """Return the rows of a step, all of this sequence, whatever slot they name."""
        return next(iter(self.shares.values())).runs(step)

    def _all(self) -> list[Any]:
        return [Share(gpu, state) for gpu, state in self.shares.items()]
