"""CudaOps: the op contract on NVIDIA GPUs, through our own kernels.

Ops that work row by row run when their consumer is known: a product wants its input quantized, and takes norm, gate and
quantization in the same launch. Products leave partial sums that the next kernel adds.
"""

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import cupy
import numpy as np

from common.errors import BimetalError, NotFiniteError
from common.ops import Array as AnyArray
from common.ops import Ops, Rope
from common.quants import dequantize
from common.sampling import ONE, Sampler
from common.step import LayerSpec, State, Step
from common.tensors import Tensor
from cuda_backend import weights
from cuda_backend.launch import IN, OUT, PLACES, ROPE, Arena, Array, Kernel, Memory, Node, kernel
from cuda_backend.layout import (
    FLOATS,
    LATENT_TILE,
    PREFILL_COLS,
    SPLIT_ROWS,
    SPLIT_TILE,
    UNITS,
    Card,
    delta_shared,
    groups_of,
    latent_tiles,
    padded,
    piece_places,
    split_tiles,
    tail_places,
)
from cuda_backend.replay import TREE_ROWS, DeviceStep, Replay
from cuda_backend.states import (
    KV,
    NO_ORDER,
    TILE,
    Conv,
    CudaState,
    Delta,
    KVStore,
    Latent,
    LatentStore,
    Recurrent,
    move,
    state_bytes,
)
from cuda_backend.weights import Groups, Weight

COPY, ADD, SWIGLU, MUL_SIGMOID, MUL_SOFTPLUS = range(5)  # kernels/rows.cu pointwise
LIGHT = {SWIGLU: "swiglu", MUL_SIGMOID: "mul_sigmoid"}  # those that kernels/light.cu has
OLDEST = 80  # compute capability 8.0: cp.async, bf16, mma.m16n8k32
NOTHING = np.zeros((), IN)
LOG2_E = 1.4426950408889634  # exponentials are powers of 2
DRAW_BINS = 2048  # kernels/draw.cu BINS
MOST_BEST = 64  # tokens of a row that kernels/top_k.cu finds
NO_PATH = np.empty(0, np.int32)


class CudaOps(Ops):
    name = "cuda"
    item_bytes = 2  # of a cached key or value; activations are float32
    runs_ahead = draws = True

    def __init__(self) -> None:
        self.card = available()
        total = cupy.cuda.runtime.memGetInfo()[1]
        self.prefill_rows = 8192 if total > 64e9 else 1024  # a step expands every matrix once, whatever its rows
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.side = cupy.cuda.Stream(non_blocking=True)  # beside it, a layer's experts
        self.forked, self.joined = (cupy.cuda.Event(disable_timing=True) for _ in range(2))
        self.arena = Arena()
        self.replay = Replay(self.arena, self.stream, overlap=self.card.capability >= 90)
        self.ropes: dict[Rope, Memory] = {}
        self.expanded: dict[str, int] = {}  # types held as float16, and how many tensors
        self.heads: dict[tuple[int, int], Groups] = {}  # for head_linear, by rows and heads

    # -- weights and states --------------------------------------------------------------------------------------------

    def weight(self, *parts: Tensor) -> Weight:
        weight, expanded = weights.load(parts, self.stream)
        for type_ in expanded:
            if type_ not in self.expanded:
                print(f"{type_} has no CUDA kernel yet: its tensors are held as float16", file=sys.stderr)
            self.expanded[type_] = self.expanded.get(type_, 0) + 1
        return weight

    def vector(self, tensor: Tensor) -> Array:
        values = dequantize(tensor)
        memory = weights.upload(values, self.stream)
        self.stream.synchronize()
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

    def free_bytes(self) -> tuple[int, str]:
        return int(cupy.cuda.runtime.memGetInfo()[0]), f"free memory of {self.card.name}"

    def new_state(self, spec: Sequence[LayerSpec], capacity: int) -> State:
        return CudaState(spec, capacity, self._settle, self.stream)

    def run(self, fn: Callable[[Any, Any], Any], state: Any, step: Step) -> Any:
        out, rows = self.replay.run(fn, state, step)
        return tuple(self.kept(x, rows) for x in out) if isinstance(out, tuple) else self.kept(out, rows)

    def kept(self, x: Array, rows: int) -> Array:
        """The first `rows` of x, summed, in memory of its own: the arena's is overwritten by the next step."""
        rows = min(rows, x.shape[0])
        shape = (rows, *x.shape[1:])
        memory = Memory(4 * int(np.prod(shape)))
        out = Array(shape, memory.address, owner=memory)
        if out.size:
            node = self._pointwise(COPY, x[:rows], x)
            node.emit(memory.address, 0, 0, 0)
        return out

    def dense(self, x: Array) -> Array:
        """x computed and added up, one element behind the other, in the arena."""
        return Array(x.shape, self._node(x).as_dense())

    def scope(self, layer: int, block: Callable[[AnyArray], AnyArray], x: AnyArray) -> AnyArray:
        self.arena.turn()
        return block(x)

    # -- rows ----------------------------------------------------------------------------------------------------------

    def embed(self, table: Weight, tokens: Any) -> Array:
        tokens = self._on_device(tokens)
        return weights.embed(table, tokens.address, len(tokens), self.arena, self.stream)

    def linear(self, x: Array, w: Weight) -> Array:
        if x.shape[-1] != w.columns:
            raise ValueError(f"linear: x {x.shape} times a matrix of {w.rows} x {w.columns}")
        if not x.shape[0]:
            return Array((0, w.rows))
        return weights.linear(x, w, self.card, self.arena, self.stream, self._node(x))

    def head_linear(self, x: Array, w: Weight) -> Array:
        T, H, C = x.shape
        node = x.whole_node()
        if not node or C % 256:  # else the packed heads of a row are packed rows one after the other
            node = self._node(Array((T * H, C), x.address) if node else x.reshape(T * H, C))
        y = self._grouped(node, w, self._head_groups(T, H), 1)
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

        def emit(dense: int, packed: int, bf16: int, cols: int) -> None:
            *inputs, keep = terms()
            out = self._out(dense, packed, bf16, K, cols)
            args = (*inputs, np.uint64(weight.address if weight else 0), np.float32(eps), keep, out)
            kernel("rows", "add_norm")((T,), (256,), args, stream=self.stream)

        def unscaled(packed: int, cols: int, squares: int, dense: int) -> bool:
            pending = sum_ if sum_ and not sum_[0].dense else None
            last = pending[2].whole_node() if pending else None
            joined = last.joined if last and not last.dense else ()
            inputs = (x,) if not pending else (pending[1],) if joined else pending[1:]
            if K % 128 or not in_fours(*inputs):
                return False
            out = self._out(dense, packed, 0, K, cols)
            grid, scale = (-(-int(out["groups"]) // 8), T), np.uint64(weight.address if weight else 0)
            if pending and joined:
                pending[0].dense = self.arena.take(T * K * 4)
                args = (*joined, view(pending[1]), scale, np.uint64(pending[0].dense), np.uint64(squares), out)
                kernel("moe", "combine_scale")(grid, (64,), args, stream=self.stream)
                return True
            *views, keep = terms()
            args = (*views, scale, keep, np.uint64(squares), out)
            kernel("light", "add_scale")(grid, (64,), args, stream=self.stream)
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
            return Array(x.shape, node=self._sum_of_experts(*first.experts, y))
        node = self._pointwise(ADD, x, y)
        node.parts = x, y
        return Array(x.shape, node=node)

    def swiglu(self, gate: Array, up: Array) -> Array:
        return Array(gate.shape, node=self._pointwise(SWIGLU, gate, up))

    def mul_sigmoid(self, x: Array, gate: Array) -> Array:
        return self._gated(MUL_SIGMOID, x, gate)

    def mul_softplus(self, x: Array, gate: Array) -> Array:
        return self._gated(MUL_SOFTPLUS, x, gate)

    def _gated(self, op: int, x: Array, gate: Array) -> Array:
        node = x.whole_node()
        if node and node.pieces and not node.dense and len(x.shape) == 3 and x.shape[2] % 32 == 0:
            return Array(x.shape, node=Node(self.arena, node.T, node.K, partial(node.pieces, op=op, gate=gate)))
        return Array(x.shape, node=self._pointwise(op, x, gate))

    # -- ops with state ------------------------------------------------------------------------------------------------

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        kv: KV,
        step: Any,
        scale: float,
        window: int | None = None,
        causal: bool = False,
    ) -> Array:
        T, H, D = q.shape
        K, wide = k.shape[1], padded(D)
        step = self._step(step, kv.store)
        q16 = self.arena.take(T * H * wide * 2)
        keep = kv.store.window[1]
        cache, values, capacity, places = kv.keys, kv.values, kv.capacity, kv.places
        if step.prefill and kv.store.is_ring:  # rows of a ring would overwrite one another
            cache, values, capacity, places = self._unrolled(kv, T)
        self._heads_to_cache(q, k, v, step, wide, q16, cache, values, capacity, places)
        head = (
            np.uint64(q16),
            np.uint64(cache),
            np.uint64(values),
            np.int64(capacity),
            places,
            np.int32(H),
            np.int32(K),
        )
        at = (np.uint64(step.state), np.uint64(step.positions.address), np.int32(T))
        seen = (np.float32(scale * LOG2_E), np.int32(window or 0), np.int32(keep))
        defines = f"D={wide}", f"DIM={D}"
        if step.prefill:
            out = Array((T, H, D), self.arena.take(T * H * D * 4))
            shared = 3 * 64 * (wide + 8) * 2
            kernel("attention", "whole", defines, shared)(
                (-(-T * (H // K) // 64), K),
                (128,),
                (*head, *at, *seen, np.uint64(out.address)),
                shared_mem=shared,
                stream=self.stream,
            )
            if kv.store.is_ring:
                self._rolled(kv, T, cache, capacity, places)
            return out
        buffers, shared, ctas = split_tiles(self.card, wide)
        blocks = -(-T * (H // K) // SPLIT_ROWS)
        shares = max(1, ctas * self.card.sms // (K * blocks))
        trunk = piece_places(kv.store.most, SPLIT_TILE, window or 0, keep, shares)
        count = trunk + tail_places(SPLIT_TILE, T)
        sums, stats = self.arena.take(count * T * H * wide * 4), self.arena.take(count * T * H * 8)
        kernel("split", "split", (f"D={wide}", f"BUFFERS={buffers}", f"CTAS={ctas}"), shared)(
            (shares * blocks, K),
            (256,),
            (*head, *at, *seen, np.int32(causal), np.int32(shares), np.int32(trunk), np.uint64(sums), np.uint64(stats)),
            shared_mem=shared,
            stream=self.stream,
        )
        pieces = Pieces(sums, stats, T, H, wide, 0, SPLIT_TILE.bit_length() - 1, window or 0, keep, shares, trunk)
        return self._combined(pieces, (T, H, D), step)

    def write_kv(self, k: Array, v: Array, kv: KV, step: Any) -> None:
        step = self._step(step, kv.store)
        if step.prefill and kv.store.is_ring:
            cache, values, capacity, places = self._unrolled(kv, len(k))
            self._heads_to_cache(None, k, v, step, padded(k.shape[2]), 0, cache, values, capacity, places)
            self._rolled(kv, len(k), cache, capacity, places)
        else:
            self._heads_to_cache(None, k, v, step, padded(k.shape[2]), 0, kv.keys, kv.values, kv.capacity, kv.places)

    def _heads_to_cache(
        self,
        q: Array | None,
        k: Array,
        v: Array,
        step: DeviceStep,
        wide: int,
        q16: int,
        keys: int,
        values: int,
        capacity: int,
        places: np.ndarray,
    ) -> None:
        """Float16 of q, and of k and v in the cache; norm and rope happen on the way."""
        T, K, D = k.shape
        H = q.shape[1] if q else 0
        queries = q or k
        sources = unroped(queries), unroped(k), v
        (q_norm, q_weight, q_eps, q_rope), (k_norm, k_weight, k_eps, k_rope) = roping(queries), roping(k)
        alike = q_norm == k_norm and q_eps == k_eps and bytes(q_rope) == bytes(k_rope)
        if alike and D in (128, 256) and T <= TREE_ROWS and in_fours(*sources, flat=False) and turns(q_rope):
            norms = q_norm, q_weight, k_weight, q_eps, q_rope
            cache = np.uint64(keys), np.uint64(values), np.int64(capacity)
            kernel("to_cache", "to_cache", (f"D={D}",))(
                (-(-T * (H + 2 * K) // 2),),
                (64,),
                (
                    *(view(x) for x in sources),
                    np.int32(H),
                    np.int32(K),
                    np.uint64(step.state),
                    np.int32(T),
                    *norms,
                    np.uint64(q16),
                    *cache,
                    np.int32(places["fixed"]),
                    np.int32(places["ring"]),
                ),
                stream=self.stream,
            )
            return
        kernel("rows", "heads_to_cache")(
            (-(-T * (H + 2 * K) // 8),),
            (256,),
            (
                *(view(x) for x in sources),
                np.int32(H),
                np.int32(K),
                np.int32(D),
                np.int32(wide),
                np.uint64(step.state),
                np.int32(T),
                *roping(queries),
                *roping(k),
                np.uint64(q16),
                np.uint64(keys),
                np.uint64(values),
                np.int64(capacity),
                np.int32(places["fixed"]),
                np.int32(places["ring"]),
            ),
            shared_mem=32 * padded(D),
            stream=self.stream,
        )

    def _unrolled(self, kv: KV, T: int) -> tuple[int, int, int, np.ndarray]:
        """A copy of a ring with room for T more rows: keys, values, capacity and places."""
        store, past = kv.store, kv.store.past
        window, keep = store.window
        K = store.spec.kv_heads
        places = np.array((kv.places["fixed"], -(-(T + window + TILE) // TILE) * TILE), PLACES)
        capacity = int(places["fixed"] + places["ring"])
        plane = K * capacity * store.width * 2
        keys = self.arena.take(2 * plane)
        cupy.cuda.runtime.memsetAsync(keys, 0, 2 * plane, self.stream.ptr)
        for first, end in ((0, min(keep, past)), (max(0, past - window), past)):
            if first < end:
                ring = kv.keys, kv.capacity, kv.places, first
                move(*ring, keys, capacity, places, first, 2 * K, store.width, end - first, self.stream)
        return keys, keys + plane, capacity, places

    def _rolled(self, kv: KV, T: int, keys: int, capacity: int, places: np.ndarray) -> None:
        """What the ring becomes where the T rows are committed."""
        store, end = kv.store, kv.store.past + T
        window, keep = store.window
        for first, last in ((0, min(keep, end)), (max(0, end - window), end)):
            if first < last:
                after = kv.after, kv.capacity, kv.places, first
                rows = 2 * store.spec.kv_heads, store.width, last - first
                move(keys, capacity, places, first, *after, *rows, self.stream)

    def _combined(self, pieces: "Pieces", shape: tuple[int, int, int], step: DeviceStep) -> Array:
        """The pieces added up, when their consumer is known; a gate may come along."""
        T, H, D = shape

        def launch(dense: int, packed: int, bf16: int, cols: int, op: int = 0, gate: Array | None = None) -> None:
            out = self._out(dense, packed, bf16, H * D, cols)
            self._combine(pieces, D, step, out, op, view(gate, wide=D) if gate else NOTHING)

        def emit(dense: int, packed: int, bf16: int, cols: int) -> None:
            if (packed or bf16) and D % 32:  # groups of 32 straddle heads
                self._pointwise(COPY, flat := Array((T, H * D), node.as_dense()), flat).emit(0, packed, bf16, cols)
            else:
                launch(dense, packed, bf16, cols)

        node = Node(self.arena, T, H * D, emit)
        node.pieces = launch
        return Array(shape, node=node)

    def _combine(
        self, pieces: "Pieces", D: int, step: DeviceStep, out: np.ndarray, op: int = 0, gate: np.ndarray = NOTHING
    ) -> None:
        """The pieces added up, D columns of a head."""
        sums, stats, T, H, wide, first, *cut = pieces
        kernel("pieces", "combine")(
            (H, T, -(-D // 256)),
            (256,),
            (
                np.uint64(sums),
                np.uint64(stats),
                np.int32(H),
                np.int32(wide),
                np.int32(D),
                np.uint64(step.state),
                np.uint64(step.positions.address),
                np.int32(T),
                np.int32(first),
                *(np.int32(x) for x in cut),
                np.int32(op),
                gate,
                out,
            ),
            stream=self.stream,
        )

    def latent_attention(
        self, q_latent: Array, q_rope: Array, latent: Array, k_rope: Array, kv: Latent, step: Any, scale: float
    ) -> Array:
        T, H, R = q_latent.shape
        step, wide = self._step(step, kv.store), padded(R)
        q16 = self.arena.take(T * H * kv.width * 2)
        self._gather(q_latent, q_rope, latent, k_rope, kv, step, wide, kv.width, q16)
        rows, most = min(T, TREE_ROWS), kv.store.past + T if step.prefill else kv.capacity
        blocks, (buffers, shared) = -(-rows * H // SPLIT_ROWS), latent_tiles(self.card, kv.width)
        shares = max(1, self.card.shared // (shared + 2048) * self.card.sms // blocks)
        trunk = piece_places(most, LATENT_TILE, 0, 0, shares)
        count = trunk + tail_places(LATENT_TILE, rows)
        sums, stats = self.arena.take(count * rows * H * wide * 4), self.arena.take(count * rows * H * 8)
        out = 0 if rows == T else self.arena.take(T * H * R * 4)
        for first in range(0, T, TREE_ROWS):
            n = min(rows, T - first)
            kernel("latent", "split", (*self._latent(kv), f"BUFFERS={buffers}"), shared)(
                (shares * blocks,),
                (256,),
                (
                    np.uint64(q16),
                    np.uint64(kv.rows),
                    np.int32(H),
                    np.uint64(step.state),
                    np.uint64(step.positions.address),
                    np.int32(n),
                    np.int32(first),
                    np.float32(scale * LOG2_E),
                    np.int32(shares),
                    np.int32(trunk),
                    np.uint64(sums),
                    np.uint64(stats),
                ),
                shared_mem=shared,
                stream=self.stream,
            )
            pieces = Pieces(sums, stats, n, H, wide, first, LATENT_TILE.bit_length() - 1, 0, 0, shares, trunk)
            if out:
                self._combine(pieces, R, step, self._out(out, 0, 0, H * R, 0))
        return Array((T, H, R), out) if out else self._combined(pieces, (T, H, R), step)

    def expanded_attention(
        self,
        q_nope: Array,
        q_rope: Array,
        latent: Array,
        k_rope: Array,
        k_up: Weight,
        v_up: Weight,
        kv: Latent,
        step: Any,
        scale: float,
    ) -> Array:
        T, H, N = q_nope.shape
        step = self._step(step, kv.store)
        if not step.prefill:  # one form for few rows, so that their number does not choose another
            o = self.latent_attention(self.head_linear(q_nope, k_up), q_rope, latent, k_rope, kv, step, scale)
            return self.head_linear(o, v_up)
        P, V = q_rope.shape[2], v_up.rows
        n, wide = kv.store.past + T, padded(max(N + P, V))
        q16 = self.arena.take(T * H * wide * 2)
        self._gather(q_nope, q_rope, latent, k_rope, kv, step, N, wide, q16)
        capacity = -(-n // TILE) * TILE
        plane = capacity * wide * 2
        keys = self.arena.take(2 * H * plane)
        values = keys + H * plane
        cupy.cuda.runtime.memsetAsync(keys, 0, 2 * H * plane, self.stream.ptr)
        weights.expand_heads(k_up, False, kv.rows, kv.width, n, keys, plane, wide, self.arena, self.stream)
        weights.expand_heads(v_up, True, kv.rows, kv.width, n, values, plane, wide, self.arena, self.stream)
        kernel("latent", "spread", (*self._latent(kv), "BUFFERS=2"))(
            (-(-n * (wide - N) // 256), H),
            (256,),
            (
                np.uint64(kv.rows),
                np.int32(n),
                np.int32(N),
                np.int32(P),
                np.int32(wide),
                np.int64(capacity),
                np.uint64(keys),
            ),
            stream=self.stream,
        )
        out = Array((T, H, V), self.arena.take(T * H * V * 4))
        places = np.array((capacity, TILE), PLACES)
        shared = 3 * 64 * (wide + 8) * 2
        kernel("attention", "whole", (f"D={wide}", f"DIM={V}"), shared)(
            (-(-T // 64), H),
            (128,),
            (
                *(np.uint64(x) for x in (q16, keys, values)),
                np.int64(capacity),
                places,
                np.int32(H),
                np.int32(H),
                np.uint64(step.state),
                np.uint64(step.positions.address),
                np.int32(T),
                np.float32(scale * LOG2_E),
                np.int32(0),
                np.int32(0),
                np.uint64(out.address),
            ),
            shared_mem=shared,
            stream=self.stream,
        )
        return out

    def _latent(self, kv: Latent) -> tuple[str, str]:
        return f"R={padded(kv.store.spec.latent_dim)}", f"W={kv.width}"

    def _gather(
        self,
        q: Array,
        q_rope: Array,
        latent: Array,
        k_rope: Array,
        kv: Latent,
        step: DeviceStep,
        at: int,
        wide: int,
        q16: int,
    ) -> None:
        """q || roped q_rope as float16, the latter from channel `at`, and this step's rows of the cache."""
        T, H, main = q.shape
        (q_from, q_turn), (k_from, k_turn) = turned(q_rope), turned(k_rope)
        node = latent.whole_node()
        norm = node.norm if node and not node.dense else None
        plain, weight, eps = norm or (latent, None, 0.0)
        kernel("latent", "gather", (*self._latent(kv), "BUFFERS=2"))(
            (T * (H + 1),),
            (-(-max(wide, kv.width) // 32) * 32,),
            (
                *(view(x) for x in (q, q_from, plain, k_from)),
                np.int32(T),
                np.int32(H),
                np.int32(main),
                np.int32(at),
                np.int32(q_rope.shape[2]),
                np.int32(wide),
                q_turn,
                k_turn,
                np.int32(norm is not None),
                np.uint64(weight.address if weight else 0),
                np.float32(eps),
                np.int32(latent.shape[1]),
                np.uint64(step.state),
                np.uint64(q16),
                np.uint64(kv.rows),
            ),
            stream=self.stream,
        )

    def short_conv(self, x: Array, taps: Array, conv: Conv, step: Any) -> Array:
        T, C = x.shape
        step = self._step(step, conv.store, recurrent=True)
        out = Array((T, C), self.arena.take(T * C * 4))
        self._conv(view(x), taps.address, conv, step.state, T, out.address)
        return out

    def gated_delta(
        self,
        q: Array,
        k: Array,
        v: Array,
        a: Array,
        b: Array,
        decay: Array,
        dt_bias: Array,
        delta: Delta,
        step: Any,
    ) -> Array:
        T, Hv, Dv = v.shape
        out = Array((T, Hv, Dv), self.arena.take(T * Hv * Dv * 4))
        step = self._step(step, delta.store, recurrent=True)
        delta.key_heads = k.shape[1]
        inputs = tuple(view(x) for x in (*(self._summed(x) for x in (q, k, v)), a, b))
        weights = decay.address, dt_bias.address
        self._delta(inputs, *weights, delta, step.state, T, self._out(out.address, 0, 0, Hv * Dv, 0))
        return out

    def delta_mixer(
        self,
        qkv: Array,
        z: Array,
        a: Array,
        b: Array,
        taps: Array,
        decay: Array,
        dt_bias: Array,
        norm: Array,
        eps: float,
        key_heads: int,
        conv: Conv,
        delta: Delta,
        step: Any,
    ) -> Array:
        T, Hv, Dv = z.shape
        step = self._step(step, delta.store, recurrent=True)
        delta.key_heads = key_heads
        inputs, weights = (view(qkv), NOTHING, NOTHING, view(a), view(b)), (decay.address, dt_bias.address)
        before = conv, taps.address
        if self.card.capability < 90 or Dv != 128 or delta.spec.key_dim > 128 or not in_fours(z, flat=False):
            o = Array((T, Hv, Dv), self.arena.take(T * Hv * Dv * 4))
            self._delta(inputs, *weights, delta, step.state, T, self._out(o.address, 0, 0, Hv * Dv, 0), before)
            return self.gated_rms_norm(o, norm, z, eps)
        after = view(z), norm.address, eps

        def emit(dense: int, packed: int, bf16: int, cols: int) -> None:
            out = self._out(dense, packed, bf16, Hv * Dv, cols)
            self._delta(inputs, *weights, delta, step.state, T, out, before, after)

        node = Node(self.arena, T, Hv * Dv, emit)
        if self.replay.active:
            return Array((T, Hv, Dv), node=node)
        return Array((T, Hv, Dv), node.as_dense())  # a commit may come before the result is read

    def keep(self, x: Array) -> Array:
        node = x.whole_node()
        if node and not node.dense:
            node.dense = self.arena.take(node.T * node.K * 4, lasting=True)
            node.emit(node.dense, 0, 0, 0)
            return Array(x.shape, node.dense)  # what the node was computed from will be gone
        out = Array(x.shape, self.arena.take(4 * x.size, lasting=True))
        self._pointwise(COPY, x, x).emit(out.address, 0, 0, 0)
        return out

    # -- experts -------------------------------------------------------------------------------------------------------

    def route_softmax(self, logits: Array, top_k: int) -> tuple[Array, Array]:
        return self._route(logits, 0, top_k, 1.0)

    def route_sigmoid(self, logits: Array, bias: Array, top_k: int, scale: float) -> tuple[Array, Array]:
        return self._route(logits, bias.address, top_k, scale)

    def moe(self, x: Array, gate_up: Weight, down: Weight, ids: Array, chosen: Array) -> Array:
        T, C, F, groups = len(ids), down.rows, gate_up.rows // 2, ids.owner
        y = self._grouped(self._node(x), gate_up, groups, ids.shape[1])
        y = self._grouped(self._pointwise(SWIGLU, y[:, :F], y[:, F:]), down, groups, 1)
        return Array((T, C), node=self._sum_of_experts(y, chosen, None))

    def _sum_of_experts(self, y: Array, chosen: Array, other: Array | None) -> Node:
        """What each row's experts return, weighted, and what else there is to add."""
        (T, k), C = chosen.shape, y.shape[1]
        more = view(other) if other else NOTHING
        args = (view(y), np.uint64(chosen.address), np.int32(k))

        def emit(dense: int, packed: int, bf16: int, cols: int) -> None:
            if not dense:
                raise ValueError("the sum over experts is computed dense")
            both = (*args, np.int32(C), more, np.int32(other is not None))
            kernel("moe", "combine")((-(-C // 256), T), (256,), (*both, np.uint64(dense)), stream=self.stream)

        node = Node(self.arena, T, C, emit)
        node.experts = None if other else (y, chosen)
        if in_fours(y) and (other is None or in_fours(other)):
            node.joined = (*args, more, np.int32(other is not None))
        return node

    def beside(
        self, x: Array, first: Callable[[Array], Array], second: Callable[[Array], Array]
    ) -> tuple[Array, Array]:
        if x.shape[0] > TREE_ROWS:
            return super().beside(x, first, second)
        node = x.whole_node()
        if node:
            node.as_unscaled_dense()  # for both; another form is each one's own
        self.forked.record(self.stream)
        self.side.wait_event(self.forked)
        main, self.stream, Kernel.apart = self.stream, self.side, True
        try:
            y = first(Array(x.shape, node=node.twin()) if node else x)
        finally:
            self.stream, Kernel.apart = main, False
        z = second(x)
        self.joined.record(self.side)
        self.stream.wait_event(self.joined)
        Kernel.apart = True
        return y, z

    # -- the way out ---------------------------------------------------------------------------------------------------

    def sample(self, logits: Array, sampler: Sampler) -> Any:
        if not self.chooses(sampler):
            return np.array([sampler.pick(row) for row in self.read(logits)], np.int32)
        T, V = logits.shape
        pieces = min(64, -(-V // 256))
        memory = Memory(T * pieces * 8 + T * 4)
        tokens = Array((T,), memory.address + T * pieces * 8, owner=memory, dtype=np.int32)
        best = np.uint64(memory.address), np.int32(pieces)
        kernel("sample", "partial")(
            (pieces, T), (256,), (np.uint64(logits.address), np.int32(V), best[0]), stream=self.stream
        )
        if not sampler.is_argmax:
            tokens.owner = memory, self._draw(logits, best, sampler, tokens.address)
            return tokens
        kernel("sample", "final")((T,), (32,), (*best, np.uint64(tokens.address)), stream=self.stream)
        return tokens

    def _draw(self, logits: Array, best: tuple[Any, ...], sampler: Sampler, tokens: int) -> Memory:
        """Sampler.pick of each row, `best` its best keys by pieces. Returns memory that must last until it has run."""
        s, (T, V) = sampler.sampling, logits.shape
        cut = s.top_k > 0 or s.top_p < 1
        memory = Memory(8 * T * (V + 1 + 2 * DRAW_BINS * cut))
        uniform = memory.address + 8 * T * V
        chances, bins = np.uint64(memory.address), np.uint64(uniform + 8 * T)
        weights.copy_in(uniform, sampler.numbers(T), self.stream)
        if cut:
            cupy.cuda.runtime.memsetAsync(int(bins), 0, 16 * T * DRAW_BINS, self.stream.ptr)
        head = np.uint64(logits.address), np.int32(V), *best
        args = (*head, np.float64(s.temperature), np.int32(cut), chances, bins)
        kernel("draw", "weigh")((min(256, -(-V // 256)), T), (256,), args, stream=self.stream)
        limits = np.int32(min(s.top_k, V)), np.float64(s.top_p), np.uint64(max(1, math.ceil(s.min_p * ONE)))
        args = (*head, chances, bins, *limits, np.uint64(uniform), np.uint64(tokens))
        kernel("draw", "draw")((T,), (1024,), args, stream=self.stream)
        return memory

    def top_k(self, logits: Array, k: int) -> tuple[Array, Array]:
        T, V = logits.shape
        k, pieces = min(k, V), min(64, -(-V // 256))
        if k > MOST_BEST or 64 * 256 * pieces < V:
            return super().top_k(logits, k)
        memory = Memory(T * (pieces * (8 * k + 8) + 8 * k))
        sums = memory.address + T * pieces * 8 * k
        ids = sums + T * pieces * 8
        out = [Array((T, k), ids + i * T * k * 4, owner=memory, dtype=t) for i, t in enumerate((np.int32, np.float32))]
        keys = np.uint64(memory.address), np.uint64(sums)
        args = (np.uint64(logits.address), np.int32(V), np.int32(k), *keys)
        kernel("top_k", "partial")((pieces, T), (256,), args, stream=self.stream)
        last = (*keys, np.int32(pieces), np.int32(k), np.uint64(out[0].address), np.uint64(out[1].address))
        kernel("top_k", "final")((T,), (256,), last, stream=self.stream)
        return out[0], out[1]

    def read(self, x: Any) -> np.ndarray:
        if isinstance(x, np.ndarray):
            return x
        if x.dtype == np.float32:
            x = self.kept(x, x.shape[0])
        out = np.empty(x.shape, x.dtype)
        if out.size:
            runtime = cupy.cuda.runtime
            runtime.memcpyAsync(out.ctypes.data, x.address, out.nbytes, runtime.memcpyDeviceToHost, self.stream.ptr)
        self.stream.synchronize()
        if out.dtype == np.int32 and np.any(out < 0):
            raise NotFiniteError("the logits of a row hold NaN")
        return out

    def copy_bandwidth(self) -> float:
        runtime, n = cupy.cuda.runtime, 1 << 30
        source, target = Memory(n), Memory(n)
        best = float("inf")
        for _ in range(10):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(self.stream)
            runtime.memcpyAsync(target.address, source.address, n, runtime.memcpyDeviceToDevice, self.stream.ptr)
            end.record(self.stream)
            end.synchronize()
            best = min(best, cupy.cuda.get_elapsed_time(start, end) / 1e3)
        return 2 * n / best

    @property
    def launches(self) -> int:
        return Kernel.launches

    def peak_bytes(self) -> int:
        return int(cupy.get_default_memory_pool().total_bytes())

    # -- inside --------------------------------------------------------------------------------------------------------

    def _on_device(self, numbers: Any) -> Array:
        """int32 numbers that an op was given outside `run`."""
        if isinstance(numbers, Array):
            return numbers
        memory = weights.upload(np.ascontiguousarray(numbers, np.int32), self.stream)
        return Array(np.shape(numbers), memory.address, owner=memory, dtype=np.int32)

    def _step(self, step: Any, store: KVStore | LatentStore | Recurrent, recurrent: bool = False) -> DeviceStep:
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

    def _node(self, x: Array) -> Node:
        """What computes x for a product: the op that is still to run, or a copy of what is there."""
        return x.whole_node() or self._pointwise(COPY, x, x)

    def _summed(self, x: Array) -> Array:
        """x without partial sums."""
        return x if x.slots == 1 else Array(x.shape, self._pointwise(COPY, x, x).as_dense())

    def _pointwise(self, op: int, x: Array, y: Array) -> Node:
        T, K = x.shape[0], math.prod(x.shape[1:])

        def emit(dense: int, packed: int, bf16: int, cols: int) -> None:
            out = self._out(dense, packed, bf16, K, cols)
            name = LIGHT.get(op)
            if name and T <= TREE_ROWS and in_fours(x, flat=True) and in_fours(y, flat=op == SWIGLU):
                args = (view(x), view(y), out)
                kernel("light", name)((-(-int(out["groups"]) // 8), T), (64,), args, stream=self.stream)
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
        turn = self._rope(rope, positions)

        def emit(dense: int, packed: int, bf16: int, cols: int) -> None:
            if (packed or bf16) and D % 32:  # groups of 32 straddle heads
                source = view(Array((T, H * D), node.as_dense()))
                out = self._out(0, packed, bf16, H * D, cols)
                grid = (T, -(-int(out["groups"]) // 32))
                kernel("rows", "pointwise")(grid, (256,), (np.int32(COPY), source, source, out), stream=self.stream)
                return
            if gate and norm and D == 128 and weight and T <= TREE_ROWS and in_fours(x, gate, flat=False):
                args = (view(x), np.int32(H), np.int32(T), np.uint64(address), np.float32(eps), view(gate))
                out = self._out(dense, packed, bf16, H * D, cols)
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
                    self._out(dense, packed, bf16, H * D, cols),
                ),
                shared_mem=32 * padded(D),
                stream=self.stream,
            )

        node = Node(self.arena, T, H * D, emit)
        if gate is None:
            node.roping = x, (np.int32(norm), np.uint64(address), np.float32(eps), turn)
        return Array((T, H, D), node=node)

    def _rope(self, rope: Rope | None, positions: Any) -> np.ndarray:
        if rope is None:
            return np.zeros((), ROPE)
        if rope not in self.ropes:
            self.ropes[rope] = weights.upload(np.array(rope.frequencies, np.float64), self.stream)
            self.stream.synchronize()
        table = self.ropes[rope].address, self._on_device(positions).address, len(rope.frequencies), rope.magnitude
        return np.array(table, ROPE)

    def _grouped(self, x: Node, w: Weight, groups: Groups, share: int) -> Array:
        return weights.grouped_linear(x, w, groups, share, self.card, self.arena, self.stream)

    def _head_groups(self, T: int, H: int) -> Groups:
        """Rows (t, head) of which each takes the matrix of its head."""
        if (T, H) in self.heads:
            return self.heads[T, H]
        cols = 8 if T <= TREE_ROWS else PREFILL_COLS
        order = np.arange(T * H, dtype=np.int32).reshape(T, H).T
        groups = [(h, h * T + t, min(cols, T - t), 0) for h in range(H) for t in range(0, T, cols)]
        table = np.array([(len(groups), 0, 0, 0), *groups], np.int32)
        ids = np.tile(np.arange(H, dtype=np.int32), T)
        memory = weights.upload(np.concatenate([table.ravel(), order.ravel(), ids]), self.stream)
        at = memory.address
        ends = at + table.nbytes, at + table.nbytes + order.nbytes
        made = Groups(ends[1], at, ends[0], T * H, len(groups), cols, H, memory)
        if T <= TREE_ROWS:  # captured graphs point to it
            self.heads[T, H] = made
        return made

    def _route(self, logits: Array, bias: int, top_k: int, scale: float) -> tuple[Array, Array]:
        T, E = logits.shape
        pairs, cols = T * top_k, 8 if T <= TREE_ROWS else PREFILL_COLS
        most = min(pairs, E) + pairs // cols
        ids, groups, order = (self.arena.take(n) for n in (pairs * 4, 16 * (1 + most), pairs * 4))
        chosen = Array((T, top_k), self.arena.take(pairs * 4))
        head = (view(logits), np.int32(E), np.int32(top_k), np.uint64(bias), np.float32(scale))
        tables = (np.uint64(groups), np.uint64(order)) if T == 1 else (np.uint64(0), np.uint64(0))
        args = (*head, np.uint64(ids), np.uint64(chosen.address), *tables)
        if E > 512:
            raise BimetalError(f"a router chooses among {E} experts; the CUDA kernels take at most 512")
        per = -(-E // 32)
        route = kernel("moe", "route", (f"PER={per}",))
        route((T,), (32 * per,), args, shared_mem=4 * (2 * E + top_k), stream=self.stream)
        if T > 1:
            step = self.replay.active
            sizes = (np.int32(T), np.int32(top_k), np.int32(E), np.int32(cols))
            kernel("moe", "group")(
                (1,),
                (1024,),
                (np.uint64(ids), np.uint64(step.state if step else 0), *sizes, np.uint64(groups), np.uint64(order)),
                shared_mem=12 * E,
                stream=self.stream,
            )
        table = Groups(ids, groups, order, pairs, most, cols, top_k)
        return Array((T, top_k), ids, owner=table, dtype=np.int32), chosen

    def _conv(self, x: np.ndarray, taps: int, conv: Conv, step: int, T: int, out: int) -> None:
        C, n = conv.spec.channels, conv.spec.taps - 1
        kernel("conv", "conv")(
            (-(-C // 256), T),
            (256,),
            (
                x,
                np.uint64(taps),
                np.int32(C),
                np.int32(n),
                np.uint64(conv.tail),
                np.int64(conv.flip),
                np.uint64(conv.rows),
                np.uint64(step),
                np.uint64(out),
            ),
            stream=self.stream,
        )

    def _delta(
        self,
        inputs: tuple[np.ndarray, ...],
        decay: int,
        bias: int,
        delta: Delta,
        step: int,
        T: int,
        out: np.ndarray,
        before: tuple[Conv, int] | None = None,
        after: tuple[np.ndarray, int, float] | None = None,
    ) -> None:
        """The delta rule of q, k, v, a and b, or of q, k and v's convolution (state and taps) that the first holds.

        after  z, weight and eps of the norm behind it
        """
        Hk, Hv, Dk, Dv = delta.key_heads, delta.spec.heads, padded(delta.spec.key_dim), delta.spec.value_dim
        changes = delta.rows + 2 * 64 * Hv * Dk * 4
        factors = changes + 2 * 64 * Hv * Dv * 4
        conv, taps = before or (None, 0)
        z, norm, eps = after or (NOTHING, 0, 0.0)
        room, shared = delta_shared(Dk, T, after is not None)
        most = max(shared, delta_shared(Dk, TREE_ROWS, after is not None)[1])
        alone = T == 1 and conv is not None
        widths = f"DK={Dk}", f"DIM={delta.spec.key_dim}", f"TAPS={conv.spec.taps if conv else 0}"
        defines = *widths, f"NORM={int(after is not None)}", f"ALONE={int(alone)}"
        head = (*inputs, np.uint64(decay), np.uint64(bias), np.uint64(step), np.int32(Hk), np.int32(Hv), np.int32(Dv))
        tail = (
            np.uint64(taps),
            np.uint64(conv.tail if conv else 0),
            np.int64(conv.flip if conv else 0),
            np.uint64(conv.rows if conv else 0),
        )
        prepared: tuple[np.uint64, ...] = (np.uint64(0),) * 4
        if T and not alone:
            sizes = T * Hk * Dk, T * Hk * Dk, T * Hv * Dv, T * Hv * 2  # queries, keys, values, gates
            prepared = tuple(np.uint64(self.arena.take(4 * n)) for n in sizes)
            kernel("delta", "prepare", defines)(
                (2 * Hk + Hv * -(-Dv // 128) + -(-Hv // 8), -(-T // 16)),
                (128,),
                (*head, np.uint64(delta.rows), np.uint64(factors), *tail, *prepared),
                stream=self.stream,
            )
        kernel("delta", "delta", defines, most)(
            (Hv, -(-Dv // 64)),
            (448 if alone else 384,),
            (
                *head,
                np.uint64(delta.matrix),
                np.int64(delta.flip),
                np.uint64(delta.rows),
                np.uint64(changes),
                np.uint64(factors),
                *tail,
                *prepared,
                np.int32(room),
                z,
                np.uint64(norm),
                np.float32(eps),
                out,
            ),
            shared_mem=shared,
            stream=self.stream,
        )

    def _settle(self, recurrent: Recurrent) -> None:
        """Apply the committed path of every layer, as the next step would, with no rows."""
        inputs = self.replay.small
        inputs.upload(Step.chain(np.empty(0, np.int32), 0), 0, recurrent.current, recurrent.path)
        for layer in recurrent.layers:
            if isinstance(layer, Conv):
                self._conv(NOTHING, 0, layer, inputs.memory.address, 1, 0)
            else:
                self._delta((NOTHING,) * 5, 0, 0, layer, inputs.memory.address, 0, self._out(0, 0, 0, 0, 0))

    def _out(self, dense: int, packed: int, bf16: int, K: int, cols: int) -> np.ndarray:
        groups = groups_of(K) if packed else -(-K // 32)
        return np.array((dense, packed, bf16, K, cols, groups), OUT)

    def _pending_sum(self, x: Array) -> tuple[Node, Array, Array] | None:
        node = x.whole_node()
        return (node, *node.parts) if node and node.parts else None


class Pieces(NamedTuple):
    """What kernels/split.cu left for pieces.cu: sums and stats, rows, heads and their width, and how it was cut."""

    sums: int
    stats: int
    T: int
    H: int
    R: int
    first: int
    tile_bits: int
    window: int
    keep: int
    shares: int
    trunk: int


def view(x: Array, wide: int = 0) -> np.ndarray:
    """How a kernel reads x: prelude.cuh In. A trailing axis of 1 is repeated `wide` times."""
    address, strides, shape = x.address, x.strides, x.shape
    if wide > 1 and shape[-1] == 1:
        head = strides[1] if len(shape) == 3 else 0
        return np.array((address, x.slot, strides[0], head, x.slots, wide, 0), IN)
    if len(shape) == 3:
        _, H, D = shape
        if D > 1 and strides[2] != 1:
            raise ValueError(f"kernels read heads whose elements are adjacent, got strides {strides} of {shape}")
        flat = H == 1 or strides[1] == D
        return np.array((address, x.slot, strides[0], 0 if flat else strides[1], x.slots, 0 if flat else D, 1), IN)
    if len(shape) == 1:
        return np.array((address, x.slot, strides[0], 0, x.slots, 0, 1), IN)
    if len(shape) == 2 and (shape[1] == 1 or strides[1] == 1):
        return np.array((address, x.slot, strides[0], 0, x.slots, 0, 1), IN)
    raise ValueError(f"kernels read (T, n) or (T, heads, D) with adjacent elements, got {shape} with strides {strides}")


def in_fours(*arrays: Array, flat: bool = True) -> bool:
    """Do fours of a row, or of a head unless `flat`, lie at multiples of 16 bytes? The answer holds for any T."""
    for x in arrays:
        at, T = view(x), x.shape[0]
        apart = (x.slot // T if x.slots > 1 else 0, at["row"] if T > 1 else 0, at["head"], x.shape[-1])
        if any(n % 4 for n in apart) or at["p"] % 16 or not at["inner"] or (flat and at["width"]):
            return False
    return True


def turns(rope: np.ndarray) -> bool:
    """Are a rope's pairs as kernels/light.cu exchanges them: none, or in lanes apart by a power of two?"""
    return int(rope["pairs"]) in (0, 4, 8, 16, 32, 64)


def unroped(x: Array) -> Array:
    """What norm and rope of x start from, so that attention applies them on the way to the cache."""
    node = x.whole_node()
    return node.roping[0] if node and node.roping else x


def roping(x: Array) -> tuple[Any, ...]:
    node = x.whole_node()
    if node and node.roping:
        return node.roping[1]
    return np.int32(0), np.uint64(0), np.float32(0), np.zeros((), ROPE)


def turned(x: Array) -> tuple[Array, np.ndarray]:
    """What a rope of x that has not run starts from, and the rope; x and none where it is something else."""
    node = x.whole_node()
    if node and node.roping and not node.dense and not node.roping[1][0]:
        return node.roping[0], node.roping[1][3]
    return x, np.zeros((), ROPE)


def available() -> Card:
    """The device's card; raises BimetalError with what to install or choose where CUDA cannot run."""
    try:
        if not cupy.cuda.runtime.getDeviceCount():
            raise BimetalError("no NVIDIA GPU is visible; choose another backend, or check CUDA_VISIBLE_DEVICES")
        driver, runtime = cupy.cuda.runtime.driverGetVersion(), cupy.cuda.runtime.runtimeGetVersion()
        if driver // 1000 < runtime // 1000:
            raise BimetalError(
                f"the NVIDIA driver supports CUDA {driver // 1000}.{driver % 1000 // 10} and CuPy is built for "
                f"{runtime // 1000}; update the driver, or install cupy-cuda{driver // 1000}x"
            )
        card = card_of(cupy.cuda.runtime.getDevice())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise BimetalError(
            f"the NVIDIA driver does not answer ({error}); install a driver for CUDA "
            f"{cupy.cuda.runtime.runtimeGetVersion() // 1000}, or choose another backend"
        ) from None
    if card.capability < OLDEST:
        raise BimetalError(
            f"{card.name} has compute capability {card.capability / 10}; the CUDA kernels need 8.0 (Ampere) or newer"
        )
    return card


def card_of(index: int) -> Card:
    p = cupy.cuda.runtime.getDeviceProperties(index)
    return Card(
        p["name"].decode(),
        10 * p["major"] + p["minor"],
        p["multiProcessorCount"],
        p["sharedMemPerMultiprocessor"],
        p["sharedMemPerBlockOptin"],
    )
