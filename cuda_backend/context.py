"""Context of every op: the card, the stream that it launches on, the memory of a step, and the step on the device."""

from dataclasses import dataclass, field, replace
from typing import Any

import cupy
import numpy as np

from common.errors import BimetalError
from common.hot_experts import HotExperts
from common.ops import Rope
from common.step import NO_ORDER
from cuda_backend.arrays import Array
from cuda_backend.caches.kv import KVStore
from cuda_backend.caches.latent import LatentStore
from cuda_backend.caches.recurrent import Recurrent
from cuda_backend.experts import ExpertStore
from cuda_backend.launch import Stream
from cuda_backend.memory import Arena, Memory, upload
from cuda_backend.occupancy import Card
from cuda_backend.prototypes import ROPE
from cuda_backend.replay import DeviceStep, Replay, RunInput
from cuda_backend.routing import Routing
from cuda_backend.runs import runs_of
from cuda_backend.to_host import ToHost


@dataclass(frozen=True)
class Context:
    """The GPU that one model runs on; a branch of a step has a context of its own, which differs in the stream.

    stream  that ops launch on
    side    another one, for a branch beside it
    forked  recorded where a branch begins, and joined where it ends
    to_host  copies of chosen tokens, which the host reads while a later step runs
    ropes   frequencies on the device, by rope
    groups  tables of `head_linear`, by rows and heads
    experts  where a mixture's experts lie, of which this GPU holds some; None: it holds all
    routing  of steps, where a benchmark replays it
    fills  small products take every place of the card: what follows waits for other GPUs, begun early or not
    """

    card: Card
    stream: Stream
    side: Stream
    arena: Arena
    replay: Replay
    forked: cupy.cuda.Event
    joined: cupy.cuda.Event
    to_host: ToHost
    ropes: dict[Rope, Memory] = field(default_factory=dict)
    groups: dict[tuple[int, int], Any] = field(default_factory=dict)
    experts: ExpertStore | None = None
    routing: Routing | None = None
    fills: bool = False

    def branch(self) -> "Context":
        """Return this context with the streams exchanged."""
        return replace(self, stream=self.side, side=self.stream)

    def on_device(self, numbers: Any) -> Array:
        """int32 numbers that an op was given outside of `Replay.run`, on the device."""
        if isinstance(numbers, Array):
            return numbers
        memory = upload(np.ascontiguousarray(numbers, np.int32), self.stream)
        return Array(np.shape(numbers), memory.address, owner=memory, dtype=np.int32)

    def step_of(self, step: Any, store: KVStore | LatentStore | Recurrent, recurrent: bool = False) -> DeviceStep:
        """The step on the device, uploaded here where an op is called outside of `Replay.run`."""
        if isinstance(step, DeviceStep):
            if recurrent and step.is_block:
                raise BimetalError(NO_ORDER)
            return step
        runs, kept = runs_of(step), 0
        if not isinstance(store, Recurrent) and store.pages:
            store.pages.hold_runs(runs, store.lengths)
        if isinstance(store, Recurrent):
            store.note_step(step, runs)
            kept, inputs = store.store_of_paths(step, runs), [RunInput(run, 0, *store.input(run.slot)) for run in runs]
        else:
            inputs = [RunInput(run, store.lengths[run.slot]) for run in runs]
            if isinstance(store, KVStore):
                store.note_step(runs)
        replay = self.replay
        return replay.uploaded(replay.inputs_for(step, own=True), (len(step), len(runs)), step, kept, inputs)

    def rope_of(self, rope: Rope | None, positions: Array | None) -> np.ndarray:
        """A rope of rows at `positions` as kernels read it: prelude.cuh Rope."""
        if rope is None or positions is None:
            return np.zeros((), ROPE)
        if rope not in self.ropes:
            self.ropes[rope] = upload(np.array(rope.frequencies, np.float64), self.stream)
            self.stream.synchronize()
        return np.array((self.ropes[rope].address, positions.address, len(rope.frequencies), rope.magnitude), ROPE)


def make(card: Card, budget: HotExperts | None = None) -> Context:
    """A context of its own on the current GPU, with `budget` one that holds some experts of a mixture."""
    stream, side, arena = Stream(), Stream(), Arena()
    replay = Replay(arena, stream, side, overlap=card.capability >= 90)
    forked, joined = (cupy.cuda.Event(disable_timing=True) for _ in range(2))
    experts = ExpertStore(budget, stream) if budget else None
    return Context(card, stream, side, arena, replay, forked, joined, ToHost(stream), experts=experts)
