"""Context of every op: the GPU's properties, the stream of its launches, memory of a step, the step on the device."""

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
from cuda_backend.replay import DeviceStep, Replay, long_past, one_row_each
from cuda_backend.routing_replay import Routing
from cuda_backend.runs import RunInputs, runs_of
from cuda_backend.segments import Shape
from cuda_backend.to_host import ToHost


@dataclass(frozen=True)
class Context:
    """The GPU that one model runs on; a branch of a step has its own context, with the two streams exchanged.

    stream   stream that ops launch on
    side_stream  second stream, for a branch that runs beside the first
    forked   event at the beginning of a branch; joined: event at its end
    to_host  copies of chosen tokens, which the host reads while a later step runs
    ropes   frequencies on the device, by rope
    groups  tables of `head_linear`, by rows and heads
    experts  store of a mixture's experts, some of which are in host memory; None: all are in GPU memory
    routing  the trace of routing that a benchmark replays
    fills  small products use every multiprocessor too, because the next kernel waits for other GPUs anyway
    """

    card: Card
    stream: Stream
    side_stream: Stream
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
        return replace(self, stream=self.side_stream, side_stream=self.stream)

    def on_device(self, numbers: Any) -> Array:
        """Copy int32 numbers to the device, for an op that is called outside `Replay.run`."""
        if isinstance(numbers, Array):
            return numbers
        memory = upload(np.ascontiguousarray(numbers, np.int32), self.stream)
        return Array(np.shape(numbers), memory.address, owner=memory, dtype=np.int32)

    def step_of(self, step: Any, store: KVStore | LatentStore | Recurrent, recurrent: bool = False) -> DeviceStep:
        """Return the step in device memory; upload it first if the op is called outside `Replay.run`."""
        if isinstance(step, DeviceStep):
            if recurrent and step.is_block:
                raise BimetalError(NO_ORDER)
            return step
        runs = runs_of(step)
        if not isinstance(store, Recurrent) and store.pages:
            store.pages.hold_runs(runs, store.lengths)
        if isinstance(store, Recurrent):
            store.note_step(step, runs)
            inputs = store.inputs(runs, [0] * len(runs))
        else:
            inputs = RunInputs(runs, [store.lengths[slot] for slot in runs.slots])
            if isinstance(store, KVStore):
                store.note_step(runs)
        replay = self.replay
        shape = Shape(len(step), len(runs), one_row_each(step, runs), long_past(step, inputs.pasts))
        return replay.uploaded(replay.inputs_for(step, separate=True), shape, step, inputs)

    def rope_of(self, rope: Rope | None, positions: Array | None) -> np.ndarray:
        """Return the rope of rows at `positions` as kernels read it: prelude.cuh Rope."""
        if rope is None or positions is None:
            return np.zeros((), ROPE)
        if rope not in self.ropes:
            self.ropes[rope] = upload(np.array(rope.frequencies, np.float64), self.stream)
            self.stream.synchronize()
        return np.array((self.ropes[rope].address, positions.address, len(rope.frequencies), rope.magnitude), ROPE)


def make(card: Card, budget: HotExperts | None = None) -> Context:
    """Make a context on the current GPU; with `budget` one that holds some experts of a mixture."""
    stream, side, arena = Stream(), Stream(), Arena()
    captures_long = card.finds_slot and budget is None  # the host copies the experts of a long step
    replay = Replay(arena, stream, side, overlap=card.capability >= 90, captures_long=captures_long)
    forked, joined = (cupy.cuda.Event(disable_timing=True) for _ in range(2))
    experts = ExpertStore(budget, stream) if budget else None
    return Context(card, stream, side, arena, replay, forked, joined, ToHost(stream), experts=experts)
