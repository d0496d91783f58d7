"""CudaOps: the op contract on NVIDIA GPUs, through our own kernels.

Ops that work row by row run when their consumer is known: a product wants its input quantized, and takes norm, gate and
quantization in the same launch. Products leave partial sums that the next kernel adds.
"""

import gc
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import cupy
import numpy as np

from common.errors import BimetalError, NotFiniteError
from common.ops import Array as AnyArray
from common.ops import LayerSize, Ops, Rope
from common.quants import dequantize
from common.step import MAX_DECODE_ROWS, State, Step
from common.storage import LayerSpec
from common.tensors import Tensor
from cuda_backend import attention as attending
from cuda_backend import latent, mixture, products, recurrent, sampling, sizes, weights
from cuda_backend.arrays import Array
from cuda_backend.caches.kv import KVStore
from cuda_backend.caches.latent import LatentStore
from cuda_backend.card import available
from cuda_backend.launch import Stream, kernel
from cuda_backend.layout import FLOATS, UNITS, UNPACKED, Packing, padded
from cuda_backend.lazy import Node
from cuda_backend.memory import Arena, Memory
from cuda_backend.products import Groups
from cuda_backend.prototypes import ROPE
from cuda_backend.replay import DeviceStep, Replay
from cuda_backend.states import NO_ORDER, CudaState, Recurrent, state_bytes
from cuda_backend.upload import BUFFERS, Uploader
from cuda_backend.views import ADD, COPY, MUL_SIGMOID, MUL_SOFTPLUS, NOTHING, SWIGLU, in_fours, only, out_of, view
from cuda_backend.weights import Weight

LIGHT = {SWIGLU: "swiglu", MUL_SIGMOID: "mul_sigmoid"}  # those that kernels/light.cu has
NO_PATH = np.empty(0, np.int32)


class CudaOps(Ops):
    name = "cuda"
    item_bytes = 2  # of a cached key or value; activations are float32
    runs_ahead = draws = checks_scales = reserves = True
    tree_rows = MAX_DECODE_ROWS

    def __init__(self) -> None:
        self.card = available()
        total = cupy.cuda.runtime.memGetInfo()[1]
        self.prefill_rows = 8192 if total > 64e9 else 1024  # a step expands every matrix once, whatever its rows
        self.stream = Stream()
        self.side = Stream()  # beside it, a layer's experts
        self.forked, self.joined = (cupy.cuda.Event(disable_timing=True) for _ in range(2))
        self.arena = Arena()
        self.replay = Replay(self.arena, self.stream, self.side, overlap=self.card.capability >= 90)
        self.ropes: dict[Rope, Memory] = {}
        self.expanded: dict[str, int] = {}  # types held as float16, and how many tensors
        self.heads: dict[tuple[int, int], Groups] = {}  # for head_linear, by rows and heads

    @cached_property
    def uploader(self) -> Uploader:
        return Uploader(self.stream)

    # -- weights and states --------------------------------------------------------------------------------------------

    def weight(self, *parts: Tensor) -> Weight:
        weight, expanded = weights.load(parts, self.uploader)
        for type_ in expanded:
            if type_ not in self.expanded:
                print(f"{type_} has no CUDA kernel yet: its tensors are held as float16", file=sys.stderr)
            self.expanded[type_] = self.expanded.get(type_, 0) + 1
        return weight

    def check_weights(self) -> None:
        """Raises BimetalError for a scale that is not finite in a weight that was made since the last call."""
        self.uploader.check()

    @contextmanager
    def loading(self) -> Iterator[None]:
        self.uploader.ahead = BUFFERS - 2
        try:
            yield
            self.check_weights()
        finally:
            self.uploader.drop()
            self.uploader.ahead = 0

    def vector(self, tensor: Tensor) -> Array:
        values = dequantize(tensor)
        memory = weights.upload(values, self.stream)
        return Array(values.shape, memory.address, owner=memory)

    def weight_bytes(self, weight: Weight) -> int:
        return weight.nbytes

    def holds(self, stored_type: str) -> str:
        if stored_type in FLOATS or stored_type in UNITS:
            return "as stored"
        return "expanded to float16"

    def held_bytes(self, *parts: Tensor) -> int:
        return sum(weights.held_bytes(part) for part in parts)

    def held_state_bytes(self, spec: Sequence[LayerSpec], tokens: int, rows: int) -> int:
        return state_bytes(spec, tokens)

    def work_bytes(self, layers: Sequence[LayerSize], tokens: int, rows: int) -> int:
        kept = 2 * sizes.snapshot_bytes(layers)  # an empty state, and the last turn's
        return sizes.work_bytes(layers, tokens, rows) + kept

    def free_bytes(self) -> tuple[int, str]:
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()  # it keeps what nobody uses
        return int(cupy.cuda.runtime.memGetInfo()[0]), f"free memory of {self.card.name}"

    def new_state(self, spec: Sequence[LayerSpec], capacity: int) -> State:
        return CudaState(spec, capacity, partial(recurrent.settle, self), self.stream)

    def run(self, fn: Callable[[Any, Any], Any], state: Any, step: Step) -> Any:
        out, rows = self.replay.run(fn, state, step)
        return tuple(self.kept(x, rows) for x in out) if isinstance(out, tuple) else self.kept(out, rows)

    def kept(self, x: Array, rows: int) -> Array:
        """The first `rows` of x, summed, in memory of its own: the arena's is overwritten by the next step.

        Of rows in fours, as logits are, the largest keys are found on the way: they cost nothing there.
        """
        rows = min(rows, x.shape[0])
        shape = (rows, *x.shape[1:])
        if len(shape) == 2 and all(shape) and in_fours(x):
            pieces, size = sampling.pieces_of(shape[1]), 4 * rows * shape[1]
            memory = Memory(size + 8 * rows * pieces)
            out = Array(shape, memory.address, owner=memory, best=memory.address + size)
            args = view(x), np.int32(shape[1]), np.uint64(out.address), np.uint64(out.best)
            kernel("sample", "add_up")((pieces, rows), (256,), args, stream=self.stream)
            return out
        memory = Memory(4 * int(np.prod(shape)))
        out = Array(shape, memory.address, owner=memory)
        if out.size:
            node = self.pointwise(COPY, x[:rows], x)
            node.emit(memory.address, 0, 0, UNPACKED)
        return out

    def dense(self, x: Array) -> Array:
        """x computed and added up, one element behind the other, in the arena."""
        return Array(x.shape, self.node_of(x).as_dense())

    def scope(self, layer: int, block: Callable[[AnyArray], AnyArray], x: AnyArray) -> AnyArray:
        self.arena.turn()
        return block(x)

    # -- rows ----------------------------------------------------------------------------------------------------------

    def embed(self, table: Weight, tokens: Any) -> Array:
        tokens = self.on_device(tokens)
        return products.embed(table, tokens.address, len(tokens), self.arena, self.stream)

    def linear(self, x: Array, w: Weight) -> Array:
        if x.shape[-1] != w.columns:
            raise ValueError(f"linear: x {x.shape} times a matrix of {w.rows} x {w.columns}")
        if not x.shape[0]:
            return Array((0, w.rows))
        return products.linear(x, w, self.card, self.arena, self.stream, self.node_of(x))

    def head_linear(self, x: Array, w: Weight) -> Array:
        T, H, C = x.shape
        y = mixture.heads_of_one_row(self, x, w) if T == 1 else None
        if y:
            return y
        node = x.whole_node()
        if not node or C % 256:  # else the packed heads of a row are packed rows one after the other
            node = self.node_of(Array((T * H, C), x.address) if node else x.reshape(T * H, C))
        y = self.grouped(node, w, mixture.head_groups(self, T, H), 1)
        return y.reshape(T, H, w.rows)

    def rms_norm(self, x: Array, weight: Array | None, eps: float) -> Array:
        if len(x.shape) == 3:
            return self._heads(x, weight, eps)
        T, K = x.shape
        sum_ = self._pending_sum(x)

        def terms() -> tuple[Any, ...]:
            """What is normed: one or two arrays, whose sum is kept at the address behind them."""
            if not sum_ or sum_[0].dense:
                return view(x), NOTHING, np.int32(0), np.uint64(0)
            node, first, second = sum_  # the addition happens on the way
            node.dense = self.arena.take(T * K * 4)
            return view(first), view(second), np.int32(1), np.uint64(node.dense)

        def emit(dense: int, packed: int, bf16: int, packing: Packing) -> None:
            *inputs, keep = terms()
            out = out_of(dense, packed, bf16, K, packing)
            args = (*inputs, np.uint64(weight.address if weight else 0), np.float32(eps), keep, out)
            kernel("rows", "add_norm")((T,), (256,), args, stream=self.stream)

        def unscaled(packed: int, packing: Packing, squares: int, dense: int) -> bool:
            pending = sum_ if sum_ and not sum_[0].dense else None
            last = pending[2].whole_node() if pending else None
            joined = last.joined if last and not last.dense else ()
            inputs = (x,) if not pending else (pending[1],) if joined else pending[1:]
            if K % 128 or not in_fours(*inputs):
                return False
            out = out_of(dense, packed, 0, K, packing)
            grid, scale = (-(-int(out["groups"]) // 8), T), np.uint64(weight.address if weight else 0)
            if pending and joined:
                pending[0].dense = self.arena.take(T * K * 4)
                defines, summed = joined
                args = (*summed, view(pending[1]), scale, np.uint64(pending[0].dense), np.uint64(squares), out)
                kernel("moe", "combine_scale", (*defines, *only(out)))(grid, (64,), args, stream=self.stream)
                return True
            first, second, _, keep = terms()
            args = (first, second, scale, keep, np.uint64(squares), out)
            slots = (pending[1].slots, pending[2].slots) if pending else (x.slots, 0)
            defines = (f"SLOTS={slots[0]}", f"OTHERS={slots[1]}", *only(out))
            kernel("light", "add_scale", defines)(grid, (64,), args, stream=self.stream)
            return True

        node = Node(self.arena, T, K, emit)
        node.unscaled, node.eps, node.norm = unscaled, eps, (x, weight, eps)
        return Array(x.shape, node=node)

    def rope(self, x: Array, positions: Any, rope: Rope) -> Array:
        return self._heads(x, None, 0.0, positions=positions, rope=rope, norm=False)

    def norm_rope(self, x: Array, weight: Array, positions: Any, rope: Rope, eps: float) -> Array:
        return self._heads(x, weight, eps, positions=positions, rope=rope)

    def gated_rms_norm(self, x: Array, weight: Array, z: Array, eps: float) -> Array:
        return self._heads(x, weight, eps, gate=z)

    def add(self, x: Array, y: Array) -> Array:
        first = x.whole_node()
        if first and first.experts and not first.dense:  # what else a layer adds, in the same launch
            experts, weights = first.experts
            return Array(x.shape, node=mixture.sum_of_experts(self, experts, weights, y))
        node = self.pointwise(ADD, x, y)
        node.parts = x, y
        return Array(x.shape, node=node)

    def swiglu(self, gate: Array, up: Array) -> Array:
        return Array(gate.shape, node=self.pointwise(SWIGLU, gate, up))

    def mul_sigmoid(self, x: Array, gate: Array) -> Array:
        return self._gated(MUL_SIGMOID, x, gate)

    def mul_softplus(self, x: Array, gate: Array) -> Array:
        return self._gated(MUL_SOFTPLUS, x, gate)

    def _gated(self, op: int, x: Array, gate: Array) -> Array:
        node = x.whole_node()
        if node and node.pieces and not node.dense and len(x.shape) == 3 and x.shape[2] % 128 == 0:
            return Array(x.shape, node=Node(self.arena, node.T, node.K, partial(node.pieces, op=op, gate=gate)))
        return Array(x.shape, node=self.pointwise(op, x, gate))

    # -- ops with modules of their own ---------------------------------------------------------------------------------

    attention = attending.attention
    write_kv = attending.write_kv
    latent_attention = latent.latent_attention
    expanded_attention = latent.expanded_attention
    short_conv = recurrent.short_conv
    gated_delta = recurrent.gated_delta
    delta_mixer = recurrent.delta_mixer
    route_softmax = mixture.route_softmax
    route_sigmoid = mixture.route_sigmoid
    moe = mixture.moe
    moe_ffn = mixture.moe_ffn
    sample = sampling.sample
    top_k = sampling.top_k

    # -- what goes on and what comes out -------------------------------------------------------------------------------

    def keep(self, x: Array) -> Array:
        node = x.whole_node()
        if node and not node.dense:
            node.dense = self.arena.take(node.T * node.K * 4, lasting=True)
            node.emit(node.dense, 0, 0, UNPACKED)
            return Array(x.shape, node.dense)  # what the node was computed from will be gone
        out = Array(x.shape, self.arena.take(4 * x.size, lasting=True))
        self.pointwise(COPY, x, x).emit(out.address, 0, 0, UNPACKED)
        return out

    def read(self, x: Any) -> np.ndarray:
        if isinstance(x, np.ndarray):
            return x
        if x.dtype == np.float32 and not x.is_dense:
            x = self.kept(x, x.shape[0])
        return self.read_all(x)[0]

    def read_all(self, *xs: Any) -> tuple[np.ndarray, ...]:
        """Those of a `top_k`, which lie one behind the other, in one copy."""
        at = [getattr(x, "address", 0) for x in xs]
        if not all(at) or any(a + 4 * x.size != b for a, b, x in zip(at, at[1:], xs, strict=False)):
            return super().read_all(*xs)
        ends = list(itertools.accumulate(x.size for x in xs))
        flat = np.empty(ends[-1], np.int32)
        if flat.size:
            runtime = cupy.cuda.runtime
            runtime.memcpyAsync(flat.ctypes.data, at[0], flat.nbytes, runtime.memcpyDeviceToHost, self.stream.ptr)
        self.stream.synchronize()
        read = [part.view(x.dtype).reshape(x.shape) for x, part in zip(xs, np.split(flat, ends[:-1]), strict=True)]
        if any(x.dtype == np.int32 and np.any(x < 0) for x in read):
            raise NotFiniteError("the logits of a row hold NaN")
        return tuple(read)

    def copy_bandwidth(self) -> float:
        runtime, n = cupy.cuda.runtime, 1 << 30
        source, target = Memory(n), Memory(n)
        best = float("inf")
        for _ in range(10):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            self.stream.record(start)
            runtime.memcpyAsync(target.address, source.address, n, runtime.memcpyDeviceToDevice, self.stream.ptr)
            self.stream.record(end)
            end.synchronize()
            best = min(best, cupy.cuda.get_elapsed_time(start, end) / 1e3)
        return 2 * n / best

    @property
    def launches(self) -> int:
        return self.stream.launches + self.side.launches

    def peak_bytes(self) -> int:
        return int(cupy.get_default_memory_pool().total_bytes())

    # -- inside --------------------------------------------------------------------------------------------------------

    def on_device(self, numbers: Any) -> Array:
        """int32 numbers that an op was given outside `run`."""
        if isinstance(numbers, Array):
            return numbers
        memory = weights.upload(np.ascontiguousarray(numbers, np.int32), self.stream)
        return Array(np.shape(numbers), memory.address, owner=memory, dtype=np.int32)

    def step_of(self, step: Any, store: KVStore | LatentStore | Recurrent, recurrent: bool = False) -> DeviceStep:
        """The step on the device, uploaded here where an op is called outside `run`."""
        if isinstance(step, DeviceStep):
            if recurrent and step.is_block:
                raise BimetalError(NO_ORDER)
            return step
        past, current, path = 0, 0, NO_PATH
        if isinstance(store, Recurrent):
            current, path = store.current, store.path
        else:
            past = store.past
        inputs = self.replay.inputs_for(step, own=True)
        inputs.upload(step, past, current, path)
        if not isinstance(store, LatentStore):
            store.began(step)
        return inputs.step(len(step))

    def node_of(self, x: Array) -> Node:
        """What computes x for a product: the op that is still to run, or a copy of what is there."""
        return x.whole_node() or self.pointwise(COPY, x, x)

    def summed(self, x: Array) -> Array:
        """x without partial sums."""
        return x if x.slots == 1 else Array(x.shape, self.pointwise(COPY, x, x).as_dense())

    def pointwise(self, op: int, x: Array, y: Array) -> Node:
        T, K = x.shape[0], math.prod(x.shape[1:])

        def emit(dense: int, packed: int, bf16: int, packing: Packing) -> None:
            out = out_of(dense, packed, bf16, K, packing)
            name = LIGHT.get(op)
            if name and T <= MAX_DECODE_ROWS and in_fours(x, flat=True) and in_fours(y, flat=op == SWIGLU):
                args = (view(x), view(y), out)
                defines = (f"SLOTS={x.slots}", f"OTHERS={y.slots}", *only(out))
                kernel("light", name, defines)((-(-int(out["groups"]) // 8), T), (64,), args, stream=self.stream)
                return
            grid = (T, -(-int(out["groups"]) // 32))
            both = view(x), view(y, wide=x.shape[-1])
            kernel("rows", "pointwise")(grid, (256,), (np.int32(op), *both, out), stream=self.stream)

        return Node(self.arena, T, K, emit)

    def _heads(
        self,
        x: Array,
        weight: Array | None,
        eps: float,
        positions: Any = None,
        rope: Rope | None = None,
        gate: Array | None = None,
        norm: bool = True,
    ) -> Array:
        """An op on each head of x (T, H, D): norm, then rope, then silu(gate)."""
        T, H, D = x.shape
        address = weight.address if weight else 0
        places = None if rope is None else self.on_device(positions)
        turn = self.rope_of(rope, places)

        def emit(dense: int, packed: int, bf16: int, packing: Packing) -> None:
            if (packed and packing.joins(D)) or (bf16 and D % 32):
                source = view(Array((T, H * D), node.as_dense()))
                out = out_of(0, packed, bf16, H * D, packing)
                grid = (T, -(-int(out["groups"]) // 32))
                kernel("rows", "pointwise")(grid, (256,), (np.int32(COPY), source, source, out), stream=self.stream)
                return
            if gate and norm and D == 128 and weight and T <= MAX_DECODE_ROWS and in_fours(x, gate, flat=False):
                args = (view(x), np.int32(H), np.int32(T), np.uint64(address), np.float32(eps), view(gate))
                out = out_of(dense, packed, bf16, H * D, packing)
                kernel("light", "gated_norm")((-(-T * H // 2),), (64,), (*args, out), stream=self.stream)
                return
            kernel("rows", "heads")(
                (-(-T * H // 8),),
                (256,),
                (
                    view(x),
                    np.int32(H),
                    np.int32(D),
                    np.int32(T),
                    np.int32(norm),
                    np.uint64(weight.address if weight else 0),
                    np.float32(eps),
                    turn,
                    view(gate) if gate else NOTHING,
                    np.int32(gate is not None),
                    out_of(dense, packed, bf16, H * D, packing),
                ),
                shared_mem=32 * padded(D),
                stream=self.stream,
            )

        node = Node(self.arena, T, H * D, emit)
        node.reads = places
        if gate is None:
            node.roping = x, (np.int32(norm), np.uint64(address), np.float32(eps), turn)
        return Array((T, H, D), node=node)

    def rope_of(self, rope: Rope | None, places: Array | None) -> np.ndarray:
        if rope is None or places is None:
            return np.zeros((), ROPE)
        if rope not in self.ropes:
            self.ropes[rope] = weights.upload(np.array(rope.frequencies, np.float64), self.stream)
            self.stream.synchronize()
        table = self.ropes[rope].address, places.address, len(rope.frequencies), rope.magnitude
        return np.array(table, ROPE)

    def grouped(
        self, x: Node, w: Weight, groups: Groups, share: int, last: Weight | None = None, known: bool = True
    ) -> Array:
        return products.grouped_linear(x, w, groups, share, self.card, self.arena, self.stream, last, known)

    def _pending_sum(self, x: Array) -> tuple[Node, Array, Array] | None:
        node = x.whole_node()
        return (node, *node.parts) if node and node.parts else None
