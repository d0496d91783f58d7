"""CudaOps: the op contract on one NVIDIA GPU, whose methods are functions of other files."""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import cupy
import numpy as np

from common.backend import LayerSize
from common.errors import NotFiniteError
from common.hot_experts import HotExperts
from common.ops import Array as AnyArray
from common.ops import DeltaInputs, DeltaWeights, ExpertWeights, Ops
from common.quants import dequantize
from common.sampling import Sampler, Samplers
from common.step import MAX_DECODE_ROWS, State, Step
from common.storage import LayerSpec
from common.tensors import Tensor
from cuda_backend import attention as attending
from cuda_backend import block_sparse, latent, mixture, recurrent, rows, sampling, sizes, weights
from cuda_backend.arrays import Array
from cuda_backend.caches.formats import PAIRS
from cuda_backend.card import available
from cuda_backend.context import Context, make
from cuda_backend.idle import Idle
from cuda_backend.launch import kernels_built
from cuda_backend.layout import UNITS
from cuda_backend.memory import Memory, free_and_total, give_back, give_back_blocks, upload
from cuda_backend.replay import BUCKETS, bucket
from cuda_backend.state_table import check_room
from cuda_backend.states import CudaPool, may_capture, pool_bytes, state_bytes
from cuda_backend.to_host import Arrival
from cuda_backend.upload import BUFFERS, Uploader
from cuda_backend.weights import Weight

PROMPT_ROWS = 32  # the number of rows of each captured long step is a multiple of this
LONG_WARM = range(160, 257, PROMPT_ROWS)  # rows of long steps captured early: typical turns of a conversation

P = ParamSpec("P")
R = TypeVar("R")


def of_context(op: Callable[Concatenate[Context, P], R]) -> Callable[Concatenate["CudaOps", P], R]:
    """Make a method from an op, a function whose first argument is the context."""

    @wraps(op)
    def method(self: "CudaOps", *args: P.args, **options: P.kwargs) -> R:
        return op(self.context, *args, **options)

    return method


class CudaOps(Ops):
    name = "cuda"
    item_bytes = 2  # of a cached key or value; activations are float32
    warm_rows = (*BUCKETS, *LONG_WARM)
    runs_ahead = replays = draws = checks_scales = reserves = joins = divides = True
    cache_pairs, adapter_type = PAIRS, "Q8_0"

    def __init__(self, experts: HotExperts | None = None) -> None:
        """Open the current GPU.

        experts  GPU memory for hot experts, while host memory holds all experts; None: all are in GPU memory
        """
        self.context = make(available(), experts)
        self.expert_supply = self.context.experts
        self.expert_vram = experts.nbytes if experts else 0
        self.layer: int | None = None  # for which weights are loaded
        _, total = free_and_total()
        self.prefill_rows = 8192 if total > 64e9 else 1024  # a step of any number of rows expands every matrix once
        self.expanded: dict[str, int] = {}  # types held as float16, and how many tensors
        self.idle: Idle | None = None  # of a benchmark

    @cached_property
    def uploader(self) -> Uploader:
        return Uploader(self.context.stream)

    # -- weights and states --------------------------------------------------------------------------------------------

    @property
    def stage(self) -> weights.Stage | None:
        """Choose how rows of a stored tensor are made on the device; None: they are copied."""
        return None

    @contextmanager
    def loading_layer(self, layer: int) -> Iterator[None]:
        before, self.layer = self.layer, layer
        try:
            yield
        finally:
            self.layer = before

    def expert_weight(self, *parts: Tensor) -> Weight:
        weight = replace(self.weight(*parts), layer=self.layer)
        if self.context.experts is None:
            return weight
        self.uploader.finish()
        return self.context.experts.hold(weight)

    def weight(self, *parts: Tensor) -> Weight:
        weight, expanded = weights.load(parts, self.uploader, self.context.card.half, self.stage)
        for type_ in expanded:
            if type_ not in self.expanded:
                why = "this GPU cannot multiply it" if type_ == "BF16" else "it has no CUDA kernel yet"
                print(f"{type_} tensors are held as float16: {why}", file=sys.stderr)
            self.expanded[type_] = self.expanded.get(type_, 0) + 1
        return weight

    def check_weights(self) -> None:
        """Raise BimetalError for a scale that is not finite in a weight made since the last call."""
        self.uploader.check()

    @contextmanager
    def loading(self) -> Iterator[None]:
        self.uploader.ahead = BUFFERS - 2
        try:
            yield
            self.check_weights()
            if self.context.experts:
                self.context.experts.open()
        finally:
            self.uploader.drop()
            self.uploader.ahead = 0

    def vector(self, tensor: Tensor) -> Array:
        values = dequantize(tensor)
        memory = upload(values, self.context.stream)
        return Array(values.shape, memory.address, owner=memory)

    def weight_bytes(self, weight: Weight) -> int:
        return weight.nbytes

    def holds(self, stored_type: str) -> str:
        if stored_type in (*UNITS, "F32", "F16", "mxfp4", self.context.card.half):
            return "as stored"
        return "as Q4_1 of 4 bits, Q5_1 of 5, else as float16" if stored_type == "affine" else "expanded to float16"

    def held_bytes(self, *parts: Tensor) -> int:
        return sum(weights.held_bytes(part) for part in parts)

    def held_expert_bytes(self, *parts: Tensor) -> int:
        return 0 if self.context.experts else self.held_bytes(*parts)

    def held_state_bytes(self, spec: Sequence[LayerSpec], tokens: int, rows: int) -> int:
        return state_bytes(spec, tokens)

    def held_pool_bytes(
        self, spec: Sequence[LayerSpec], slots: int, capacity: int, tokens: int, rows: int, batches: int = 1
    ) -> int:
        """Predict the bytes of a pool as Ops.held_pool_bytes does; `batches` as in `new_pool`."""
        beside = (slots - 1) * sizes.snapshot_bytes(spec, capacity)  # work_bytes counts the snapshots of one slot
        return pool_bytes(spec, slots, capacity, tokens, batches) + beside

    def work_bytes(self, layers: Sequence[LayerSize], tokens: int, rows: int) -> int:
        kept = sizes.snapshot_bytes([layer.states for layer in layers], tokens)
        return sizes.work_bytes(layers, tokens, rows) + kept

    def decode_bytes(self, layers: Sequence[LayerSize], tokens: int, sequences: int) -> int:
        between = sizes.hidden_bytes(layers) if sequences > 1 else 0
        return between + sizes.sums_bytes(layers, tokens, sequences)

    def logits_bytes(self, vocab: int, sequences: int) -> int:
        return sizes.logits_bytes(vocab, sequences)

    def free_bytes(self) -> tuple[int, str]:
        give_back()
        return free_and_total()[0], f"free memory of {self.context.card.name}"

    def prompt_rows(self, spec: Sequence[LayerSpec]) -> int:
        return PROMPT_ROWS if self.context.replay.captures_long and may_capture(spec) else 1

    def new_state(self, spec: Sequence[LayerSpec], capacity: int) -> State:
        return self.new_pool(spec, 1, capacity).new_state()

    def new_pool(
        self, spec: Sequence[LayerSpec], slots: int, capacity: int, tokens: int | None = None, batches: int = 1
    ) -> CudaPool:
        """Make states of up to `slots` sequences, which one step may compute together.

        tokens   most tokens of all sequences together, at least one whole context; None: each may hold `capacity`
        batches  number of micro-batches, whose steps alternate
        """
        check_room(self.context.card, spec)
        give_back_blocks()  # CuPy's pool would divide blocks of earlier states, and the rests would be lost
        apply_paths = partial(recurrent.apply_paths, self.context)
        return CudaPool(spec, slots, capacity, apply_paths, self.context.stream, tokens, batches)

    def run(self, fn: Callable[[Any, Any], Any], state: Any, step: Step, needed: slice | None = None) -> Any:
        out, count = self._run(fn, state, step)
        if isinstance(out, tuple):
            return tuple(rows.out_of_arena(self.context, x, count) for x in out)
        return rows.out_of_arena(self.context, out if needed is None else out[needed], count)

    def run_greedy(self, fn: Callable[[Any, Any], Any], state: Any, step: Step) -> Array:
        if len(step) > MAX_DECODE_ROWS:
            return super().run_greedy(fn, state, step)
        arrival = self.context.to_host.expect(len(step))
        logits, count = self._run(fn, state, step, arrival)
        tokens = sampling.greedy_tokens(self.context, logits, count, arrival)
        if self.idle:
            self.idle.ends()
        return tokens

    def run_chains(
        self, fn: Callable[[Any, Any], Any], state: Any, step: Step, rows: int, first: int, count: int
    ) -> Array:
        arrival = self.context.to_host.expect(len(step) // rows * (1 + count))
        logits, _ = self._run(fn, state, step, arrival)
        return sampling.draft_chains(self.context, logits, arrival, rows, first, count)

    def _run(
        self, fn: Callable[[Any, Any], Any], state: Any, step: Step, arrival: Arrival | None = None
    ) -> tuple[Any, int]:
        """Run a step as Replay.run does, with the experts that it needs."""
        if self.idle:
            self.idle.begins()
        play = partial(self.context.replay.run, fn, state, step, arrival)
        store = self.context.experts
        return play() if store is None else store.step(fn, len(step), bucket(len(step)), play)

    def scope(self, layer: int, block: Callable[[AnyArray], AnyArray], x: AnyArray) -> AnyArray:
        self.context.arena.turn()
        return block(x)

    # -- ops that other files hold -------------------------------------------------------------------------------------

    embed = of_context(rows.embed)
    linear = of_context(rows.linear)
    head_linear = of_context(mixture.head_linear)
    rms_norm = of_context(rows.rms_norm)
    rope = of_context(rows.rope)
    norm_rope = of_context(rows.norm_rope)
    gated_rms_norm = of_context(rows.gated_rms_norm)
    add = of_context(rows.add)
    swiglu = of_context(rows.swiglu)
    geglu = of_context(rows.geglu)
    scale = of_context(rows.scale)
    mul_sigmoid = of_context(rows.mul_sigmoid)
    mul_softplus = of_context(rows.mul_softplus)
    block_sparse_attention = of_context(block_sparse.block_sparse_attention)
    write_kv = of_context(attending.write_kv)
    latent_attention = of_context(latent.latent_attention)
    expanded_attention = of_context(latent.expanded_attention)
    short_conv = of_context(recurrent.short_conv)
    block_conv = of_context(rows.block_conv)
    parent_rows = of_context(recurrent.parent_rows)
    gated_delta = of_context(recurrent.gated_delta)
    route_softmax = of_context(mixture.route_softmax)
    route_sigmoid = of_context(mixture.route_sigmoid)
    moe = of_context(mixture.moe)

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        kv: Any,
        step: Any,
        scale: float,
        window: int | None = None,
        causal: bool = False,
        sink_logits: Array | None = None,
    ) -> Array:
        return attending.attention(self.context, (q, k, v), kv, step, scale, window, causal, sink_logits)

    def delta_mixer(self, x: DeltaInputs, w: DeltaWeights, key_heads: int, conv: Any, delta: Any, step: Any) -> Array:
        if not recurrent.mixes(conv):
            return super().delta_mixer(x, w, key_heads, conv, delta, step)
        return recurrent.delta_mixer(self.context, x, w, conv, delta, step, is_part=self.ranks.size > 1)

    def moe_ffn(self, x: Array, w: ExpertWeights, top_k: int, scale: float | None = None) -> Array:
        if not x.shape[0]:  # a prefill step without logits: `linear` launches nothing either
            return Array(x.shape)
        if x.shape[0] > MAX_DECODE_ROWS:
            return super().moe_ffn(x, w, top_k, scale)
        how = mixture.router_of(top_k, scale, w.bias.address if w.bias else 0)
        experts = mixture.Experts(w.gate_up, w.down, w.shared_gate_up, w.shared_down, w.biases)
        return mixture.moe_ffn(self.context, x, w.router, how, experts, w.shared_gate)

    def sample(self, logits: Array, sampler: Sampler | Samplers) -> Any:
        if isinstance(sampler, Sampler) and not self.chooses(sampler):
            return np.array([sampler.pick(row) for row in self.read(logits)], np.int32)
        tokens = sampling.sample(self.context, logits, sampler)
        if self.idle:
            self.idle.ends()
        return tokens

    def top_k(self, logits: Array, k: int) -> tuple[Array, Array]:
        k = min(k, logits.shape[1])
        if not sampling.finds(logits.shape[1], k):
            return super().top_k(logits, k)
        return sampling.top_k(self.context, logits, k)

    def argmax_entropy(self, logits: Array, excluded: int) -> tuple[Array, Array]:
        return sampling.argmax_entropy(self.context, logits, excluded)

    # -- steps and results ---------------------------------------------------------------------------------------------

    keep = of_context(rows.keep)

    def read(self, x: Any) -> np.ndarray:
        if isinstance(x, np.ndarray):
            return x
        if x.dtype == np.float32 and not x.is_dense:
            x = rows.out_of_arena(self.context, x, x.shape[0])
        return self.read_all(x)[0]

    def read_all(self, *xs: Any) -> tuple[np.ndarray, ...]:
        """Read the adjacent arrays of a `top_k` or an `argmax_entropy` in one copy."""
        arrival = getattr(xs[0], "arrival", None)
        if len(xs) == 1 and arrival is not None and arrival.numbers.size == xs[0].size:  # chosen tokens
            return (_tokens(arrival.read()),)
        at = [getattr(x, "address", 0) for x in xs]
        if not all(at) or any(a + 4 * x.size != b for a, b, x in zip(at, at[1:], xs, strict=False)):
            return super().read_all(*xs)
        ends = list(itertools.accumulate(x.size for x in xs))
        if arrival is not None and arrival.numbers.size == ends[-1]:
            flat = arrival.read()
        else:
            flat = self.context.to_host.read(at[0], ends[-1])
        read = [flat[end - x.size : end].view(x.dtype).reshape(x.shape) for x, end in zip(xs, ends, strict=True)]
        return tuple([_tokens(x) if x.dtype == np.int32 else x for x in read])

    def copy_bandwidth(self) -> float:
        runtime, stream, n = cupy.cuda.runtime, self.context.stream, 1 << 30
        source, target = Memory(n), Memory(n)
        best = float("inf")
        for _ in range(10):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            stream.record(start)
            runtime.memcpyAsync(target.address, source.address, n, runtime.memcpyDeviceToDevice, stream.ptr)
            stream.record(end)
            end.synchronize()
            best = min(best, cupy.cuda.get_elapsed_time(start, end) / 1e3)
        del source, target
        give_back()  # so that peak_bytes counts the model alone
        return 2 * n / best

    @property
    def launches(self) -> int:
        return self.context.stream.launches + self.context.side_stream.launches

    @property
    def built(self) -> int:
        return self.context.arena.steps + self.context.replay.built + kernels_built()

    @property
    def waited(self) -> float:
        return self.context.to_host.waited

    def count_idle(self) -> Callable[[], float]:
        self.idle = Idle(self.context.stream)
        return self.idle.seconds

    def peak_bytes(self) -> int:
        return int(cupy.get_default_memory_pool().total_bytes())


def _tokens(read: np.ndarray) -> np.ndarray:
    """Return token ids as kernels wrote them; raises NotFiniteError for -1, which marks a row that holds NaN."""
    if np.count_nonzero(read < 0):
        raise NotFiniteError("the logits of a row hold NaN")
    return read
