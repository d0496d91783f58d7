"""Steps across several GPUs: arrays tagged with their GPU, and the graphs and copies of a captured step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cupy

from common.step import Step
from cuda_backend import rows
from cuda_backend.arrays import Array
from cuda_backend.launch import Graph
from cuda_backend.memory import Memory
from cuda_backend.ops import CudaOps
from cuda_backend.replay import DeviceStep, check, shape_of, table_of
from cuda_backend.runs import Runs
from cuda_backend.segments import HostCall, Program, Segment, run_step


class Gpu:
    """One of several GPUs: its ops, and the event that other GPUs wait for."""

    def __init__(self, index: int, make: Callable[[], CudaOps]):
        self.index, self.device = index, cupy.cuda.Device(index)
        with self.device:
            self.ops = make()
            self.context = self.ops.context
            self.event = cupy.cuda.Event(disable_timing=True)


@dataclass(frozen=True)
class OnGpu:
    """A weight or a layer's state in the memory of one of the GPUs."""

    value: Any
    gpu: Gpu


class Value:
    """An activation on one of the GPUs, as models see it."""

    __slots__ = ("array", "gpu", "relay")

    def __init__(self, array: Array, gpu: Gpu, relay: "Relay"):
        self.array, self.gpu, self.relay = array, gpu, relay

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def __len__(self) -> int:
        return len(self.array)

    def reshape(self, *shape: Any) -> "Value":
        with self.relay.on(self.gpu):
            return Value(self.array.reshape(*shape), self.gpu, self.relay)

    def __getitem__(self, index: Any) -> "Value":
        with self.relay.on(self.gpu):
            return Value(self.array[index], self.gpu, self.relay)


@dataclass(frozen=True)
class Input:
    """A step's "tokens" or "positions", of which every GPU has a copy."""

    name: str


@dataclass(frozen=True)
class MultiGpuStep:
    """The `step` that models receive: T rows."""

    T: int
    tokens: Input = Input("tokens")
    positions: Input = Input("positions")

    def __len__(self) -> int:
        return self.T


# -- segments of a captured step ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PeerCopy:
    """Copy bytes from `address` on one GPU to address `target_address` on another, in the order of the target's stream.

    The source waits for the copy, so that it does not overwrite data that are not copied yet.
    """

    source: Gpu
    address: int
    target: Gpu
    target_address: int
    nbytes: int

    def play(self) -> None:
        source, target, runtime = self.source, self.target, cupy.cuda.runtime
        stream = target.context.stream
        with source.device:
            source.context.stream.record(source.event)
        with target.device:
            stream.wait(source.event)
            runtime.memcpyPeerAsync(
                self.target_address, target.index, self.address, source.index, self.nbytes, stream.ptr
            )
            stream.record(target.event)
        with source.device:
            source.context.stream.wait(target.event)


@dataclass(frozen=True)
class GpuGraph:
    """The graph of consecutive layers of a step on one GPU."""

    gpu: Gpu
    graph: Graph

    def play(self) -> None:
        with self.gpu.device:
            self.graph.play()


class Relay:
    """Run step functions over several GPUs, as Replay does on one.

    current_gpu  the GPU whose ops are being launched
    steps        the DeviceStep of every GPU that the step has reached
    segments     segments of the step that is being captured, before `graph`, which is open on the current GPU
    """

    def __init__(self, gpus: Sequence[Gpu]):
        self.gpus = gpus
        self.lent: list[tuple[Gpu, Gpu]] = []  # GPUs whose sampled tokens others copy in the current step
        self.running: tuple[Any, Step, Runs] | None = None
        self.current_gpu: Gpu | None = None
        self.steps: dict[Gpu, DeviceStep] = {}
        self.segments: list[Segment] | None = None
        self.graph: Graph | None = None

    def run(self, fn: Callable[[Any, Any], Any], state: Any, step: Step) -> Any:
        """Run fn(state, step); the result lies in arena memory that the next run overwrites."""
        runs = state.runs(step)
        check(step, runs, state.pool.lengths, state.capacity)
        state.pool.note_runs(step, runs)
        shape, table = shape_of(state.pool, step, runs), table_of(state, fn)
        call, captured = (partial(run, fn, state, shape.T) for run in (self._call, self._captured))
        self.running = state, step, runs
        try:
            return run_step(table, shape, call, captured)
        finally:
            for gpu in self.steps:
                gpu.context.replay.active = None
            self.steps, self.current_gpu, self.running = {}, None, None
            for source, target in self.lent:  # their memory will be reused by later launches
                with source.device:
                    source.context.stream.wait(target.event)
            self.lent = []

    @contextmanager
    def on(self, gpu: Gpu) -> Iterator[CudaOps]:
        """Make the GPU current for launches, and return its ops."""
        with gpu.device:
            if self.running and self.current_gpu is not gpu:
                self._reach(gpu)
            yield gpu.ops

    def bring(self, x: Value, gpu: Gpu) -> Array:
        """Return x in memory that `gpu` may read until the end of the step."""
        if x.gpu is gpu:
            return x.array
        array = x.array
        if not array.is_dense:
            with self.on(x.gpu) as ops:
                array = rows.dense(ops.context, array)
        nbytes = 4 * array.size
        with gpu.device:
            copy = PeerCopy(x.gpu, array.address, gpu, gpu.context.arena.take(nbytes, lasting=True), nbytes)
        if self.segments is None:
            copy.play()
        else:
            with self.on(gpu):  # copied before the graph starts: the graphs that computed x have ended
                self.segments.append(copy)
        return Array(array.shape, copy.target_address, dtype=array.dtype)

    def _call(self, fn: Callable[[Any, Any], Any], state: Any, T: int) -> Any:
        for gpu in self.gpus:
            gpu.context.arena.reset()
        return fn(state, MultiGpuStep(T))

    def _captured(self, fn: Callable[[Any, Any], Any], state: Any, T: int) -> Program:
        segments = self.segments = []
        for gpu in self.gpus:
            gpu.context.arena.frozen = True
        try:
            out = self._call(fn, state, T)
        finally:
            self._leave()
            self.segments = None
            for gpu in self.gpus:
                gpu.context.arena.frozen = False
        return Program(segments, out)

    def _reach(self, gpu: Gpu) -> None:
        """Continue the step on `gpu`."""
        self._leave()
        if self.segments is not None and gpu not in self.steps:
            self.segments.append(HostCall(partial(self._arrive, gpu)))
        self._arrive(gpu)
        if self.segments is not None:
            self.graph = gpu.context.replay.graph()
        self.current_gpu = gpu

    def _leave(self) -> None:
        if self.segments is not None and self.current_gpu and self.graph:
            with self.current_gpu.device:
                self.graph.end()
            self.segments.append(GpuGraph(self.current_gpu, self.graph))
            self.graph = None
        self.current_gpu = None

    def _arrive(self, gpu: Gpu) -> None:
        """Upload the step to `gpu`, once."""
        if gpu not in self.steps:
            with gpu.device:
                self.steps[gpu] = gpu.context.replay.active = self._uploaded(gpu)

    def _uploaded(self, gpu: Gpu) -> DeviceStep:
        assert self.running
        state, step, runs = self.running
        if isinstance(step.tokens, Value):
            step = replace(step, tokens=self._tokens(step.tokens, gpu))
        return gpu.context.replay.upload(state.pool.pools[gpu], step, runs)

    def _tokens(self, tokens: Value, gpu: Gpu) -> Array:
        """Return sampled tokens that `gpu` may read; it waits for these alone, not for later work of their GPU."""
        array, source = tokens.array, tokens.gpu
        if source is gpu:
            return array
        memory = Memory(4 * array.size, gpu.context.stream)
        if array.arrival is None:
            PeerCopy(source, array.address, gpu, memory.address, memory.nbytes).play()
        else:
            stream, copy = gpu.context.stream, cupy.cuda.runtime.memcpyPeerAsync
            stream.wait(array.arrival.done)
            copy(memory.address, gpu.index, array.address, source.index, memory.nbytes, stream.ptr)
            stream.record(gpu.event)
            self.lent.append((source, gpu))
        return Array(array.shape, memory.address, owner=memory, dtype=array.dtype)
