"""Several GPUs that share a model by layers: each holds some, and the rows of a step pass from one to the next.

An op runs where the weight or state that it takes lies, without one where its first array does, and its arrays are
copied there; `scope` brings the residual rows to their layer. A captured step is a graph per stretch on one GPU.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import cupy
import numpy as np

from common.errors import BimetalError, UsageError
from common.ops import LayerSize, Ops
from common.step import MAX_DECODE_ROWS, State, Step
from common.storage import LayerSpec
from common.tensors import Tensor
from cuda_backend import rows
from cuda_backend.arrays import Array
from cuda_backend.launch import Graph
from cuda_backend.memory import Memory
from cuda_backend.ops import CudaOps
from cuda_backend.replay import DeviceStep, bucket, check, graphs


class Part:
    """One GPU of several: its ops, and the event that others wait for."""

    def __init__(self, index: int, make: Callable[[], CudaOps]):
        self.index, self.device = index, cupy.cuda.Device(index)
        with self.device:
            self.ops = make()
            self.context = self.ops.context
            self.event = cupy.cuda.Event(disable_timing=True)


@dataclass(frozen=True)
class Held:
    """A weight or a layer's state, and the GPU that holds it."""

    value: Any
    part: Part


class Value:
    """An activation on one of the GPUs, as models see it."""

    __slots__ = ("array", "part", "relay")

    def __init__(self, array: Array, part: Part, relay: "Relay"):
        self.array, self.part, self.relay = array, part, relay

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def __len__(self) -> int:
        return len(self.array)

    def reshape(self, *shape: Any) -> "Value":
        with self.relay.on(self.part):
            return Value(self.array.reshape(*shape), self.part, self.relay)

    def __getitem__(self, index: Any) -> "Value":
        with self.relay.on(self.part):
            return Value(self.array[index], self.part, self.relay)


@dataclass(frozen=True)
class Input:
    """A step's "tokens" or "positions", of which every GPU has its own."""

    name: str


@dataclass(frozen=True)
class SplitStep:
    """What models receive as `step`: T rows."""

    T: int
    tokens: Input = Input("tokens")
    positions: Input = Input("positions")

    def __len__(self) -> int:
        return self.T


# -- a step across GPUs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Crossing:
    """Bytes at `address` of `source` that another GPU needs at `to`."""

    source: Part
    address: int
    to: int
    nbytes: int


@dataclass
class Leg:
    """A stretch of a captured step on one GPU: what it waits for, then a graph."""

    part: Part
    graph: Graph
    crossings: list[Crossing] = field(default_factory=list)


class Relay:
    """Runs step functions over the GPUs, as Replay does on one.

    here   the GPU whose ops are being launched
    steps  the step on every GPU that it has reached
    legs   of a step that is being captured
    """

    def __init__(self, parts: Sequence[Part]):
        self.parts = parts
        self.running: tuple[Any, Step] | None = None
        self.here: Part | None = None
        self.steps: dict[Part, DeviceStep] = {}
        self.legs: list[Leg] | None = None

    def run(self, fn: Callable[[Any, Any], Any], state: Any, step: Step) -> Any:
        """What fn(state, step) returns, in arena memory that the next run overwrites."""
        check(state, step)
        state.note_step(step)
        T, table = bucket(len(step)), state.graphs.setdefault(fn, {})
        self.running = state, step
        try:
            if T > MAX_DECODE_ROWS or T not in table:
                if T <= MAX_DECODE_ROWS:
                    table[T] = None
                return self._call(fn, state, T)
            if table[T] is None:
                table[T] = self._captured(fn, state, T)
            legs, out = table[T]
            for leg in legs:
                self._play(leg)
            return out
        finally:
            for part in self.steps:
                part.context.replay.active = None
            self.steps, self.here, self.running = {}, None, None

    @contextmanager
    def on(self, part: Part) -> Iterator[CudaOps]:
        """Its ops, to launch something."""
        with part.device:
            if self.running and self.here is not part:
                self._reach(part)
            yield part.ops

    def bring(self, x: Value, part: Part) -> Array:
        """x where `part` may read it for the rest of the step."""
        if x.part is part:
            return x.array
        array = x.array
        if not array.is_dense:
            with self.on(x.part) as ops:
                array = rows.dense(ops.context, array)
        nbytes = 4 * array.size
        with part.device:
            crossing = Crossing(x.part, array.address, part.context.arena.take(nbytes, lasting=True), nbytes)
        if self.legs is None:
            cross(crossing, part)
        else:
            with self.on(part):  # before its graph: the stretches that x comes from are over
                self.legs[-1].crossings.append(crossing)
        return Array(array.shape, crossing.to, dtype=array.dtype)

    def _call(self, fn: Callable[[Any, Any], Any], state: Any, T: int) -> Any:
        for part in self.parts:
            part.context.arena.reset()
        return fn(state, SplitStep(T))

    def _captured(self, fn: Callable[[Any, Any], Any], state: Any, T: int) -> tuple[list[Leg], Any]:
        legs: list[Leg] = []
        self.legs = legs
        for part in self.parts:
            part.context.arena.frozen = True
        try:
            return legs, self._call(fn, state, T)
        finally:
            self._leave()
            self.legs = None
            for part in self.parts:
                part.context.arena.frozen = False

    def _reach(self, part: Part) -> None:
        self._leave()
        if part not in self.steps:
            self.steps[part] = part.context.replay.active = self._uploaded(part)
        if self.legs is not None:
            self.legs.append(Leg(part, part.context.replay.graph()))
        self.here = part

    def _leave(self) -> None:
        if self.legs and self.here:
            with self.here.device:
                self.legs[-1].graph.end()
        self.here = None

    def _play(self, leg: Leg) -> None:
        with leg.part.device:
            if leg.part not in self.steps:
                self.steps[leg.part] = self._uploaded(leg.part)
            for crossing in leg.crossings:
                cross(crossing, leg.part)
            leg.graph.launch()

    def _uploaded(self, part: Part) -> DeviceStep:
        assert self.running
        state, step = self.running
        tokens = step.tokens
        if isinstance(tokens, Value):
            array = tokens.array
            if tokens.part is not part:
                memory = Memory(4 * array.size)
                cross(Crossing(tokens.part, array.address, memory.address, memory.nbytes), part)
                array = Array(array.shape, memory.address, owner=memory, dtype=array.dtype)
            step = replace(step, tokens=array)
        return part.context.replay.upload(state.shares[part], step)


def cross(c: Crossing, part: Part) -> None:
    """Copy in the order of the stream of `part`. The source goes on behind the copy, so that neither GPU overwrites
    what the other still reads or has yet to read.
    """
    source, stream = c.source, part.context.stream
    with source.device:
        source.context.stream.record(source.event)
    with part.device:
        stream.wait(source.event)
        cupy.cuda.runtime.memcpyPeerAsync(c.to, part.index, c.address, source.index, c.nbytes, stream.ptr)
        stream.record(part.event)
    with source.device:
        source.context.stream.wait(part.event)


# -- states ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """The states of the layers on one GPU, committed together."""

    part: Part
    state: Any

    def commit(self, path: np.ndarray) -> None:
        with self.part.device:
            self.state.commit(path)

    def snapshot(self) -> Any:
        with self.part.device:
            return self.state.snapshot()

    def restore(self, snapshot: Any) -> None:
        with self.part.device:
            self.state.restore(snapshot)

    @property
    def nbytes(self) -> int:
        return int(self.state.nbytes)


class SplitState(State):
    """`state[i].kv`, ... are held by the GPU of layer i; `shares` is what each GPU has, none of it for some perhaps."""

    def __init__(self, spec: Sequence[LayerSpec], capacity: int, places: Sequence[Part], parts: Sequence[Part]):
        layers: list[dict[str, Any]] = [{} for _ in spec]
        self.shares: dict[Part, Any] = {}
        for part in parts:
            own = [i for i, place in enumerate(places) if place is part]
            with part.device:
                self.shares[part] = share = part.ops.new_state([spec[i] for i in own], capacity)
            for n, i in enumerate(own):
                layers[i] = {name: Held(handle, part) for name, handle in vars(share[n]).items()}
        self.graphs = graphs()
        super().__init__(layers, capacity)

    def note_step(self, step: Step) -> None:
        for share in self.shares.values():
            share.note_step(step)

    def _all(self) -> list[Any]:
        return [Share(part, state) for part, state in self.shares.items()]


# -- the ops -----------------------------------------------------------------------------------------------------------


def forwarded(name: str) -> Any:
    """The op `name` on the GPU that its arguments choose."""

    def op(self: "SplitOps", *args: Any, **options: Any) -> Any:
        part = part_of(args)
        args = tuple(self.relay.bring(x, part) if isinstance(x, Value) else x for x in args)
        with self.relay.on(part) as ops:
            return self._values(getattr(ops, name)(*(self._local(x, part) for x in args), **options), part)

    return op


def part_of(args: Sequence[Any]) -> Part:
    """Where the first weight or state lies, else the first array."""
    return next(x.part for kind in (Held, Value) for x in args if isinstance(x, kind))


class SplitOps(Ops):
    """The op contract on several GPUs.

    layers  the GPU of each layer of the model, as `parts` counts them
    draft   that of the layers behind those, a draft's
    """

    name = CudaOps.name
    item_bytes = CudaOps.item_bytes
    runs_ahead = CudaOps.runs_ahead
    draws = CudaOps.draws
    tree_rows = CudaOps.tree_rows
    checks_scales = CudaOps.checks_scales
    reserves = CudaOps.reserves

    def __init__(self, parts: Sequence[Part], layers: Sequence[int], draft: Part):
        self.parts, self.layers, self.draft = parts, [parts[i] for i in layers], draft
        self.relay = Relay(parts)
        self.prefill_rows = min(part.ops.prefill_rows for part in parts)
        self.loads_on = parts[0]
        for a in parts:
            for b in parts:
                if a is not b:
                    connect(a.index, b.index)

    def _place(self, layer: int) -> Part:
        return self.layers[layer] if layer < len(self.layers) else self.draft

    # -- weights and states --------------------------------------------------------------------------------------------

    @contextmanager
    def at(self, layer: int) -> Iterator[None]:
        self.loads_on = self._place(layer)
        yield

    def weight(self, *parts: Tensor) -> Held:
        with self.loads_on.device:
            return Held(self.loads_on.ops.weight(*parts), self.loads_on)

    def vector(self, tensor: Tensor) -> Held:
        with self.loads_on.device:
            return Held(self.loads_on.ops.vector(tensor), self.loads_on)

    @contextmanager
    def loading(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.device)  # left after `loading`, which checks on it
                stack.enter_context(part.ops.loading())
            yield

    def weight_bytes(self, weight: Held) -> int:
        return weight.part.ops.weight_bytes(weight.value)

    def holds(self, stored_type: str) -> str:
        return self.parts[0].ops.holds(stored_type)

    def held_bytes(self, *parts: Tensor) -> int:
        return self.parts[0].ops.held_bytes(*parts)

    def held_state_bytes(self, spec: Sequence[LayerSpec], tokens: int, rows: int) -> int:
        return self.parts[0].ops.held_state_bytes(spec, tokens, rows)

    def work_bytes(self, layers: Sequence[LayerSize], tokens: int, rows: int) -> int:
        return self.parts[0].ops.work_bytes(layers, tokens, rows)

    def free_bytes(self) -> tuple[int, str]:
        return sum(map(free, self.parts)), f"free memory of GPUs {', '.join(str(part.index) for part in self.parts)}"

    def room(self, layers: int) -> list[tuple[int, Sequence[int]]]:
        held = [(part, [i for i in range(layers) if self._place(i) is part]) for part in self.parts]
        return [(free(part), own) for part, own in held if own]

    def new_state(self, spec: Sequence[LayerSpec], capacity: int) -> State:
        return SplitState(spec, capacity, [self._place(i) for i in range(len(spec))], self.parts)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def run(self, fn: Callable[[Any, Any], Any], state: Any, step: Step) -> Any:
        out, count = self.relay.run(fn, state, step), len(step)
        return tuple(self._kept(x, count) for x in out) if isinstance(out, tuple) else self._kept(out, count)

    def scope(self, layer: int, block: Callable[[Any], Any], x: Value) -> Value:
        part = self._place(layer)
        array = self.relay.bring(x, part)
        with self.relay.on(part) as ops:
            return ops.scope(layer, block, Value(array, part, self.relay))

    def read(self, x: Any) -> np.ndarray:
        if isinstance(x, np.ndarray):
            return x
        with x.part.device:
            return x.part.ops.read(x.array)

    def read_all(self, *xs: Any) -> tuple[np.ndarray, ...]:
        if len({getattr(x, "part", None) for x in xs}) > 1:
            return super().read_all(*xs)
        with xs[0].part.device:
            return xs[0].part.ops.read_all(*(x.array for x in xs))

    def peak_bytes(self) -> int:
        return sum(self._each(lambda ops: ops.peak_bytes()))

    @property
    def launches(self) -> int:
        return sum(part.ops.launches for part in self.parts)

    def copy_bandwidth(self) -> float:
        """Of the slowest GPU."""
        return min(self._each(lambda ops: ops.copy_bandwidth()))

    embed = forwarded("embed")
    linear = forwarded("linear")
    head_linear = forwarded("head_linear")
    rms_norm = forwarded("rms_norm")
    rope = forwarded("rope")
    norm_rope = forwarded("norm_rope")
    gated_rms_norm = forwarded("gated_rms_norm")
    add = forwarded("add")
    swiglu = forwarded("swiglu")
    mul_sigmoid = forwarded("mul_sigmoid")
    mul_softplus = forwarded("mul_softplus")
    attention = forwarded("attention")
    latent_attention = forwarded("latent_attention")
    expanded_attention = forwarded("expanded_attention")
    write_kv = forwarded("write_kv")
    short_conv = forwarded("short_conv")
    gated_delta = forwarded("gated_delta")
    delta_mixer = forwarded("delta_mixer")
    route_softmax = forwarded("route_softmax")
    route_sigmoid = forwarded("route_sigmoid")
    moe = forwarded("moe")
    moe_ffn = forwarded("moe_ffn")
    keep = forwarded("keep")
    sample = forwarded("sample")
    top_k = forwarded("top_k")

    # -- inside --------------------------------------------------------------------------------------------------------

    def _local(self, x: Any, part: Part) -> Any:
        """An argument as the ops of `part` take it."""
        if isinstance(x, Held):
            return x.value
        if isinstance(x, SplitStep):
            return self.relay.steps[part]
        return getattr(self.relay.steps[part], x.name) if isinstance(x, Input) else x

    def _values(self, out: Any, part: Part) -> Any:
        if isinstance(out, tuple):
            return tuple(self._values(x, part) for x in out)
        return Value(out, part, self.relay) if isinstance(out, Array) else out

    def _kept(self, x: Value, count: int) -> Value:
        with x.part.device:
            return Value(rows.kept(x.part.context, x.array, count), x.part, self.relay)

    def _each(self, fn: Callable[[CudaOps], Any]) -> list[Any]:
        out = []
        for part in self.parts:
            with part.device:
                out.append(fn(part.ops))
        return out


# -- which GPU has what ------------------------------------------------------------------------------------------------


def open_parts(
    devices: Sequence[int],
    split: Sequence[float],
    draft: int | None,
    sizes: Callable[[Ops], Sequence[int]],
    make: Callable[[], CudaOps],
) -> Ops:
    """Ops on the GPUs `devices`: see `cuda_backend.open_devices`."""
    count = cupy.cuda.runtime.getDeviceCount()
    chosen = [*devices, *([] if draft is None else [draft])]
    for index in chosen:
        if not 0 <= index < count:
            has = f"GPUs 0 to {count - 1}" if count > 1 else "GPU 0 alone"
            raise UsageError(f"GPU {index} does not exist; this machine has {has}")
    if len(set(devices)) < len(devices):
        raise UsageError(f"devices {','.join(map(str, devices))} name a GPU twice")
    if len(set(chosen)) == 1:
        cupy.cuda.Device(devices[0]).use()
        return make()
    parts = {index: Part(index, make) for index in dict.fromkeys(chosen)}
    holders = [parts[index] for index in devices]
    layer_bytes = sizes(holders[0].ops)
    layers = shared_out(layer_bytes, split or [free(part) for part in holders])
    for place, part in enumerate(holders):
        need, room = sum(n for n, at in zip(layer_bytes, layers, strict=True) if at == place), free(part)
        if need > room:
            raise BimetalError(
                f"GPU {part.index} ({part.context.card.name}) has {room / 1e9:.1f} GB free, and its "
                f"{layers.count(place)} layers take {need / 1e9:.1f} GB; "
                "give it a smaller share of the split, or choose more GPUs"
            )
    return SplitOps(list(parts.values()), layers, parts[devices[-1] if draft is None else draft])


def shared_out(sizes: Sequence[int], split: Sequence[float]) -> list[int]:
    """For each layer, of so many bytes, which share is its: contiguous ranges, close to the proportions, none empty."""
    if len(split) > len(sizes):
        raise UsageError(f"the model has {len(sizes)} layers, too few for {len(split)} GPUs")
    before = np.concatenate([[0], np.cumsum(sizes)])  # bytes of the layers before a cut
    targets = np.cumsum(split) / np.sum(split) * before[-1]
    cuts = [0]
    for number, target in enumerate(targets[:-1], 1):
        nearest = int(np.abs(before - target).argmin())
        cuts.append(min(max(nearest, cuts[-1] + 1), len(sizes) - len(split) + number))
    cuts.append(len(sizes))
    return [number for number in range(len(split)) for _ in range(cuts[number], cuts[number + 1])]


def free(part: Part) -> int:
    with part.device:
        return part.ops.free_bytes()[0]


@cache
def connect(reader: int, owner: int) -> None:
    """Let a GPU reach another's memory; where the hardware cannot, the driver copies by way of the host."""
    runtime = cupy.cuda.runtime
    if runtime.deviceCanAccessPeer(reader, owner):
        with cupy.cuda.Device(reader):
            try:
                runtime.deviceEnablePeerAccess(owner)
            except runtime.CUDARuntimeError as error:
                if "PeerAccessAlreadyEnabled" not in str(error):
                    raise
