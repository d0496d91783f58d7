"""Tensor parallelism: each GPU holds some heads and channels of every layer, and computes all rows of a step with them.

An op runs on every GPU, over that GPU's part; `all_reduce` adds up the results of the ranks (transports.py), so that
rows are bitwise identical on all GPUs. A captured step is one graph per GPU. Every GPU chooses the next tokens: greedy
ones from the best of each rank's logits, others from the whole logits. The host reads the tokens of rank 0.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from common.errors import BimetalError
from common.ops import Ops
from common.sampling import Sampler, Samplers
from common.shards import Ranks
from common.step import MAX_DECODE_ROWS, Step
from common.storage import LayerSpec
from common.tensors import Tensor
from cuda_backend import rows, sampling
from cuda_backend.arrays import Array
from cuda_backend.card import card_of
from cuda_backend.exchange import MOST_RANKS
from cuda_backend.multi_gpu_states import MultiGpuPool
from cuda_backend.ops import CudaOps
from cuda_backend.per_rank import GraphPerRank, PerRank, per_rank
from cuda_backend.relay import Gpu, Input, MultiGpuStep
from cuda_backend.replay import DeviceStep, check, shape_of, table_of
from cuda_backend.runs import Runs
from cuda_backend.segments import Program, run_step
from cuda_backend.several_gpus import SeveralGpus, check_devices, each, free
from cuda_backend.to_host import Arrival
from cuda_backend.transports import Transport, open_exchange, warn_of_slow_sums


def on_all(name: str) -> Any:
    """Make the op `name`, which runs on every GPU with that GPU's parts of the arguments."""

    def op(self: "TensorParallelOps", *args: Any, **options: Any) -> Any:
        def one(rank: int) -> Any:
            local = partial(self._local, rank=rank)
            given = {key: each(x, local) for key, x in options.items()}
            return getattr(self.gpus[rank].ops, name)(*each(args, local), **given)

        return self._per_rank(self._each(one))

    return op


class Drawn(Sampler):
    """`sampler` with the random numbers of its next `rows` tokens, equal on every rank."""

    def __init__(self, sampler: Sampler, rows: int):
        self.__dict__ |= vars(sampler)
        self.drawn = None if sampler.is_argmax else sampler.numbers(rows)

    def numbers(self, rows: int) -> np.ndarray:
        assert self.drawn is not None
        return self.drawn


class TensorParallelOps(SeveralGpus):
    """The op contract on GPUs that share every layer: `load` divides a model; other weights are complete on each GPU.

    loaded  the ranks' models, each made with one GPU's ops, of the first `load`
    """

    def __init__(self, gpus: Sequence[Gpu], exchange: Transport, first: int = 0, size: int | None = None):
        """Make the GPUs the ranks from `first` on of `size` ranks, by default of as many as there are GPUs."""
        super().__init__(gpus)
        self.exchange = exchange
        count = size or len(gpus)
        ranks = [Ranks(rank, count, divides_head=True) for rank in range(first, first + len(gpus))]
        self.ranks = ranks[0]  # all ranks' parts have equal sizes: predictions use the first
        for own, gpu in zip(ranks, gpus, strict=True):
            gpu.ops.ranks = own
        self.steps: list[DeviceStep] = []  # the step on each rank, while it is launched
        self.arrivals: list[Arrival] = []  # of the tokens on each rank, while a greedy step is launched
        self.divides_logits = False  # whether each rank has some columns of the step's logits
        self.loaded: list[Any] = []

    # -- weights and states --------------------------------------------------------------------------------------------

    def load(self, make: Callable[[Ops], Any]) -> Any:
        self.loaded = self.each_gpu(lambda gpu: make(gpu.ops))
        return self._joined(self.loaded)

    def load_beside(self, model: Any, make: Callable[[Any], Any]) -> Any:
        models = [replace(loaded, cache=model.cache) for loaded in self.loaded]
        return replace(self._joined(self._each(lambda rank: make(models[rank]))), ops=model.ops)

    def _joined(self, models: Sequence[Any]) -> Any:
        names = [name for name in ("weights", "draft_weights") if hasattr(models[0], name)]
        trees = {name: per_rank(self.gpus, [getattr(model, name) for model in models]) for name in names}
        return replace(models[0], ops=self, **trees)

    def weight(self, *parts: Tensor) -> PerRank:
        return PerRank(self.gpus, self.each_gpu(lambda gpu: gpu.ops.weight(*parts)))

    def vector(self, tensor: Tensor) -> PerRank:
        return PerRank(self.gpus, self.each_gpu(lambda gpu: gpu.ops.vector(tensor)))

    def weight_bytes(self, weight: PerRank) -> int:
        """Count the bytes of a weight on all GPUs, which read their parts at the same time."""
        return sum(gpu.ops.weight_bytes(part) for gpu, part in zip(self.gpus, weight.parts, strict=True))

    def held_pool_bytes(self, spec: Sequence[LayerSpec], slots: int, capacity: int, tokens: int, rows: int) -> int:
        return self.gpus[0].ops.held_pool_bytes(spec, slots, capacity, tokens, rows)

    def free_bytes(self) -> tuple[int, str]:
        least = min(self.gpus, key=free)
        return free(least), f"free memory of GPU {least.index}, which holds 1/{len(self.gpus)} of each layer"

    def free_by_device(self, layers: int) -> list[tuple[int, Sequence[int]]]:
        return [(free(gpu), range(layers)) for gpu in self.gpus]

    def new_pool(self, spec: Sequence[LayerSpec], slots: int, capacity: int, tokens: int | None = None) -> MultiGpuPool:
        parts = self.each_gpu(lambda gpu: gpu.ops.new_pool(spec, slots, capacity, tokens))
        layers = per_rank(self.gpus, [part.layers for part in parts])
        return MultiGpuPool(dict(zip(self.gpus, parts, strict=True)), layers)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def run(self, fn: Callable[[Any, Any], Any], state: Any, step: Step, needed: slice | None = None) -> Any:
        out, count = self._run(fn, state, step), len(step)
        if isinstance(out, tuple):
            return tuple(self._out_of_arena(x, count) for x in out)
        return self._out_of_arena(out if needed is None else out[needed], count)

    def run_greedy(self, fn: Callable[[Any, Any], Any], state: Any, step: Step) -> Any:
        """Run a step as Ops.run_greedy: each rank finds the best of its logits, which are not gathered."""
        if len(step) > MAX_DECODE_ROWS:
            return super().run_greedy(fn, state, step)
        self.arrivals = self._each(lambda rank: self.gpus[rank].context.to_host.expect(len(step)))
        try:
            self._run(fn, state, step)
            return PerRank(self.gpus, self._each(lambda rank: self._arriving(rank, len(step))))
        finally:
            self.arrivals = []

    def _arriving(self, rank: int, count: int) -> Array:
        """Return a rank's tokens of the greedy step that was launched, which are also those of its next step."""
        arrival, inputs = self.arrivals[rank], self.gpus[rank].context.replay.decode_inputs
        arrival.launched()
        tokens = sampling.arriving(arrival, count)
        inputs.place_for(tokens)
        return tokens

    def _run(self, fn: Callable[[Any, Any], Any], state: Any, step: Step) -> Any:
        """Launch a step on every rank; returns its result in arena memory."""
        runs = state.runs(step)
        check(step, runs, state.pool.lengths, state.capacity)
        state.pool.note_runs(step, runs)
        self.exchange.begin()
        try:
            self.announce(fn, state, step)
            self.steps = self._each(lambda rank: self._uploaded(rank, state.pool, step, runs))
            shape = shape_of(state.pool, step, runs)._replace(chooses=bool(self.arrivals))
            call, captured = partial(self._call, fn, state), partial(self._captured, fn, state)
            return run_step(table_of(state, fn), shape, call, captured)
        except BaseException:
            self.exchange.renew()  # the ranks may have launched different parts of the step
            raise
        finally:
            self.steps = []

    def announce(self, fn: Callable[[Any, Any], Any], state: Any, step: Step) -> None:
        """Tell ranks in other processes of a step, for which memory is held here, before its first launch."""

    def _uploaded(self, rank: int, pool: MultiGpuPool, step: Step, runs: Runs) -> DeviceStep:
        if isinstance(step.tokens, PerRank):
            step = replace(step, tokens=step.tokens.parts[rank])
        gpu, arrival = self.gpus[rank], self.arrivals[rank] if self.arrivals else None
        return gpu.context.replay.upload(pool.pools[gpu], step, runs, arrival)

    def _call(self, fn: Callable[[Any, Any], Any], state: Any) -> Any:
        for gpu, step in zip(self.gpus, self.steps, strict=True):
            gpu.context.arena.reset()
            gpu.context.replay.active = step
        try:
            with self.exchange.step():
                out = fn(state, MultiGpuStep(len(self.steps[0])))
                if self.arrivals:
                    self._choose(out)
                return out
        finally:
            for gpu in self.gpus:
                gpu.context.replay.active = None

    def _choose(self, logits: PerRank) -> None:
        """Choose the tokens of a greedy step, on every rank, from the ranks' parts of the logits."""

        def best(rank: int) -> Array:
            first = self.gpus[rank].ops.ranks.rank * logits.shape[1] if self.divides_logits else 0
            return sampling.best_of_rank(self.gpus[rank].context, logits.parts[rank], first)

        gathered = self.exchange.gather(self._each(best))
        self._each(lambda rank: sampling.choose_of_ranks(self.gpus[rank].context, gathered[rank]))

    def _captured(self, fn: Callable[[Any, Any], Any], state: Any) -> Program:
        with ExitStack() as stack:
            captures = self.each_gpu(lambda gpu: stack.enter_context(self._capture(gpu)))
            out = self._call(fn, state)
        return Program([GraphPerRank(self.gpus, captures, self.exchange, self.exchange.index)], out)

    @contextmanager
    def _capture(self, gpu: Gpu) -> Iterator[Any]:
        with gpu.device:
            graph = gpu.context.replay.graph()
        gpu.context.arena.frozen = True
        try:
            yield graph
        finally:
            gpu.context.arena.frozen = False
            with gpu.device:
                graph.end()

    def scope(self, layer: int, block: Callable[[Any], Any], x: PerRank) -> PerRank:
        for gpu in self.gpus:
            gpu.context.arena.turn()
        out: PerRank = block(x)
        return out

    def all_reduce(self, x: PerRank) -> PerRank:
        is_captured = self.gpus[0].context.arena.frozen
        return PerRank(self.gpus, self.exchange.sum(x.parts, fuses=is_captured))

    def all_gather(self, x: PerRank, columns: int) -> PerRank:
        self.divides_logits = x.shape[1] < columns
        if self.arrivals or not self.divides_logits:
            return x
        return PerRank(self.gpus, self.exchange.gather(x.parts))

    def sample(self, logits: PerRank, sampler: Sampler | Samplers) -> Any:
        drawn: Sampler | Samplers
        if isinstance(sampler, Samplers):
            drawn = Samplers([(Drawn(each, rows), rows) for each, rows in sampler.of_sequences])
        elif self.chooses(sampler):
            drawn = Drawn(sampler, len(logits))
        else:
            with self._first() as ops:
                return ops.sample(logits.parts[0], sampler)
        first = self.gpus[0].ops.sample  # it copies the tokens to the host as well

        def one(rank: int) -> Array:
            own = logits.parts[rank]
            return sampling.sample(self.gpus[rank].context, own, drawn) if rank else first(own, drawn)

        return PerRank(self.gpus, self._each(one))

    def read(self, x: Any) -> np.ndarray:
        return self.read_all(x)[0]

    def read_all(self, *xs: Any) -> tuple[np.ndarray, ...]:
        if any(isinstance(x, np.ndarray) for x in xs):
            return tuple(x if isinstance(x, np.ndarray) else self.read(x) for x in xs)
        with self._first() as ops:
            return (ops.read(xs[0].parts[0]),) if len(xs) == 1 else ops.read_all(*(x.parts[0] for x in xs))

    def copy_bandwidth(self) -> float:
        """Return the bandwidth of all GPUs together."""
        return sum(self.each_gpu(lambda gpu: gpu.ops.copy_bandwidth()))

    embed = on_all("embed")
    linear = on_all("linear")
    head_linear = on_all("head_linear")
    rms_norm = on_all("rms_norm")
    rope = on_all("rope")
    norm_rope = on_all("norm_rope")
    gated_rms_norm = on_all("gated_rms_norm")
    add = on_all("add")
    swiglu = on_all("swiglu")
    geglu = on_all("geglu")
    scale = on_all("scale")
    mul_sigmoid = on_all("mul_sigmoid")
    mul_softplus = on_all("mul_softplus")
    attention = on_all("attention")
    block_sparse_attention = on_all("block_sparse_attention")
    latent_attention = on_all("latent_attention")
    expanded_attention = on_all("expanded_attention")
    write_kv = on_all("write_kv")
    short_conv = on_all("short_conv")
    block_conv = on_all("block_conv")
    parent_rows = on_all("parent_rows")
    gated_delta = on_all("gated_delta")
    delta_mixer = on_all("delta_mixer")
    route_softmax = on_all("route_softmax")
    route_sigmoid = on_all("route_sigmoid")
    moe = on_all("moe")
    moe_ffn = on_all("moe_ffn")
    keep = on_all("keep")
    top_k = on_all("top_k")
    argmax_entropy = on_all("argmax_entropy")
    run_chains = Ops.run_chains  # on the host, whose tokens every GPU then gets

    # -- inside --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _first(self) -> Iterator[CudaOps]:
        """Provide the ops of rank 0 for reading a result."""
        try:
            with self.gpus[0].device:
                yield self.gpus[0].ops
        finally:
            self.exchange.check()  # its error explains rows that are not finite

    def _each(self, fn: Callable[[int], Any]) -> list[Any]:
        """Call `fn` with each rank, with its GPU as the current one."""
        out = []
        for rank, gpu in enumerate(self.gpus):
            with gpu.device:
                out.append(fn(rank))
        return out

    def _local(self, x: Any, rank: int) -> Any:
        """Convert an argument to what the ops of a rank take."""
        if isinstance(x, PerRank):
            return x.parts[rank]
        if isinstance(x, MultiGpuStep):
            return self.steps[rank]
        return getattr(self.steps[rank], x.name) if isinstance(x, Input) else x

    def _per_rank(self, outs: Sequence[Any]) -> Any:
        """Wrap the ranks' results of an op."""
        if isinstance(outs[0], tuple):
            return tuple(self._per_rank(parts) for parts in zip(*outs, strict=True))
        return PerRank(self.gpus, outs) if isinstance(outs[0], Array) else outs[0]

    def _out_of_arena(self, x: PerRank, count: int) -> PerRank:
        return PerRank(
            self.gpus, self._each(lambda rank: rows.out_of_arena(self.gpus[rank].context, x.parts[rank], count))
        )


def open_ranks(
    devices: Sequence[int], sizes: Callable[[Ops], Sequence[int]], make: Callable[[], CudaOps]
) -> TensorParallelOps:
    """Open ops on the GPUs `devices`: see `cuda_backend.open_tensor_parallel`."""
    check_devices(devices, devices)
    if len(devices) > MOST_RANKS:
        raise BimetalError(f"tensor_parallel is {len(devices)}; supported are 2 to {MOST_RANKS} GPUs")
    for index in devices[1:]:
        card, first = card_of(index), card_of(devices[0])
        if card != first:  # the division of products, and thus their rounding, depends on the card
            raise BimetalError(
                f"GPU {devices[0]} is {first.name} with {first.sms} multiprocessors, GPU {index} {card.name} with "
                f"{card.sms}; tensor_parallel needs GPUs of one kind, on which rows are equal to the bit"
            )

    gpus = [filling_gpu(index, make) for index in devices]
    ops = TensorParallelOps(gpus, open_exchange(gpus))
    layers = sizes(ops)
    need = sum(layers)
    for gpu in gpus:
        if need > (room := free(gpu)):
            raise BimetalError(
                f"GPU {gpu.index} ({gpu.context.card.name}) has {room / 1e9:.1f} GB free, and its part of every layer "
                f"takes {need / 1e9:.1f} GB; choose more GPUs, or a smaller quantization"
            )
    warn_of_slow_sums(gpus, ops.exchange, len(layers))
    return ops


def filling_gpu(index: int, make: Callable[[], CudaOps]) -> Gpu:
    """Open a GPU for a rank, whose kernels fill all multiprocessors although matrices are divided."""

    def one() -> CudaOps:
        ops = make()
        ops.context = replace(ops.context, fills=True)
        return ops

    return Gpu(index, one)
