"""MlxOps: the op contract on MLX's default device: a Mac's GPU, another GPU that MLX's build supports, or the CPU.

MLX is lazy: ops build a graph, which `read`, `sample` or the commit of a prefill chunk evaluates.
"""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from common.errors import BimetalError, NotFiniteError
from common.expert_forms import ExpertForm, Streamed
from common.host import available_bytes, peak_resident_bytes
from common.kv_cache import ALL_PAIRS
from common.ops import L2_EPS, Array, LayerSize, Ops, Rope, Weight
from common.quants import dequantize
from common.sampling import NOT_A_TOKEN, Sampler, Samplers
from common.step import State, Step
from common.storage import LayerSpec, Packing
from common.tensors import Tensor
from common.visible import exact_rows, seen_rows
from mlx_backend import host, quantized, recurrent
from mlx_backend.experts import MlxSlots, expert_bytes
from mlx_backend.kernels import on_metal
from mlx_backend.kv_formats import encoded, rotate
from mlx_backend.kv_kernels import EVERY, CachePart, attend, attends
from mlx_backend.logits import best_and_entropy, best_of_rows, sampled
from mlx_backend.packed import MlxPacked
from mlx_backend.quantized import Blocks
from mlx_backend.rows import MlxRows
from mlx_backend.sizes import work_bytes
from mlx_backend.states import MlxDelta, new_state, state_bytes
from mlx_backend.weights import GGUF_MAPPING, MODES, Packed, Part, held_bytes, load_matrix, nbytes

COPIED = 2**26  # float32 numbers that are copied to measure bandwidth: far more than a cache holds
SORT_ROWS = 64  # rows of experts from which sorting them by expert pays


def _fused(fn: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Compile an elementwise expression into one kernel on a GPU; MLX's CPU device would need a C++ compiler."""
    return mx.compile(fn, shapeless=True) if mx.default_device().type == mx.DeviceType.gpu else fn


@_fused
def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


@_fused
def _mul_sigmoid(x: mx.array, gate: mx.array) -> mx.array:
    return x * mx.sigmoid(gate)


@_fused
def _mul_softplus(x: mx.array, gate: mx.array) -> mx.array:
    return (x * mx.logaddexp(gate.astype(mx.float32), 0)).astype(x.dtype)


@_fused
def _log_decay(a: mx.array, dt_bias: mx.array, decay: mx.array) -> mx.array:
    return decay * mx.logaddexp(a.astype(mx.float32) + dt_bias, 0)


class MlxOps(Ops):
    """Ops on MLX arrays; `dtype`: activations, dense weights, affine scales, KV. Recurrent matrices are float32."""

    name = "mlx"
    runs_ahead = joins = True
    cache_pairs = ALL_PAIRS

    def __init__(self, dtype: mx.Dtype = mx.float32):
        self.dtype = dtype
        self.item_bytes = dtype.size
        self._narrow: dict[int, tuple[mx.array, mx.array]] = {}  # by id: a float32 vector, and itself in `dtype`
        self._masks: WeakKeyDictionary[Step, dict[tuple[int, int | None, bool, int], mx.array]] = WeakKeyDictionary()
        self._wavelengths: dict[Rope, mx.array] = {}
        self._constants: dict[tuple[int, float], mx.array] = {}

    def weight(self, *parts: Tensor) -> Weight:
        return load_matrix(parts, self.dtype)

    def vector(self, tensor: Tensor) -> Array:
        return mx.array(dequantize(tensor))

    def weight_bytes(self, weight: Weight) -> int:
        return weight.nbytes if isinstance(weight, Streamed) else nbytes(weight)

    def expert_bytes(self, form: ExpertForm) -> int:
        return expert_bytes(form, self.dtype)

    def expert_memory(self, forms: Mapping[int, ExpertForm], slots: Mapping[Hashable, int]) -> MlxSlots:
        return MlxSlots(forms, slots, self.dtype)

    def holds(self, stored_type: str) -> str:
        if quantized.stays(stored_type):
            return "as stored"
        target = GGUF_MAPPING.get(stored_type)
        if target is not None:
            return f"{target.mode}, {target.bits} bits, groups of {target.group_size}: {target.fidelity(self.dtype)}"
        name = str(self.dtype).rpartition(".")[2]
        kept = stored_type in MODES or stored_type == {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[name]
        return "as stored" if kept else f"as {name}"

    def new_state(self, spec: Sequence[LayerSpec], capacity: int) -> State:
        return new_state(spec, capacity, self.dtype)

    # -- predicted memory --------------------------------------------------------------------------------------------

    def held_bytes(self, *parts: Tensor) -> int:
        return sum(held_bytes(part, self.dtype) for part in parts)

    def held_state_bytes(self, spec: Sequence[LayerSpec], tokens: int, rows: int) -> int:
        return state_bytes(spec, tokens, rows, self.dtype.size)

    def work_bytes(self, layers: Sequence[LayerSize], tokens: int, rows: int) -> int:
        return work_bytes(layers, tokens, rows, self.dtype.size, fused=on_metal())

    def free_bytes(self) -> tuple[int, str]:
        if mx.default_device().type == mx.DeviceType.cpu:
            return available_bytes()
        info = mx.device_info()
        if not mx.metal.is_available():
            return int(info["free_memory"]), f"free on {info['device_name']}"
        limit = int(info["max_recommended_working_set_size"])
        return limit, f"most that {info['device_name']} lets its GPU wire"

    # -- rows ------------------------------------------------------------------------------------------------------

    def embed(self, table: Weight, tokens: Array) -> Array:
        ids = tokens if isinstance(tokens, mx.array) else mx.array(np.asarray(tokens, np.int32))
        if len(table) > 1:
            raise BimetalError("an embedding table cannot be stacked from several formats")
        part = table[0]
        if isinstance(part, Blocks):
            return quantized.dequantize(part.take(ids), self.dtype)
        if not isinstance(part, Packed):
            return part[ids]
        biases = None if part.biases is None else part.biases[ids]
        codes, scales = part.codes[ids], part.scales[ids]
        return mx.dequantize(codes, scales, biases, part.group_size, part.bits, part.mode, dtype=self.dtype)

    def linear(self, x: Array, w: Weight) -> Array:
        multiply = host.matmul if host.serves(x) else _matmul
        out = [multiply(x, part) for part in w]
        return out[0] if len(out) == 1 else mx.concatenate(out, axis=-1)

    def head_linear(self, x: Array, w: Weight) -> Array:
        return _by_head(x.swapaxes(0, 1), w).swapaxes(0, 1)

    def rms_norm(self, x: Array, weight: Array | None, eps: float) -> Array:
        return mx.fast.rms_norm(x, None if weight is None else self._like_activations(weight), eps)

    def _like_activations(self, vector: mx.array) -> mx.array:
        """Cast a vector once to the activations' dtype, so that products are not promoted to float32."""
        if vector.dtype == self.dtype:
            return vector
        if id(vector) not in self._narrow:
            self._narrow[id(vector)] = vector, vector.astype(self.dtype)
        return self._narrow[id(vector)][1]

    def rope(self, x: Array, positions: np.ndarray, rope: Rope) -> Array:
        T = len(x)
        n = 2 * len(rope.frequencies)
        if rope not in self._wavelengths:
            self._wavelengths[rope] = mx.array(1 / np.array(rope.frequencies), mx.float32)
        rotate = partial(mx.fast.rope, dims=n, traditional=False, base=None, scale=1.0, freqs=self._wavelengths[rope])
        if T == 1 or np.array_equal(positions, np.arange(positions[0], positions[0] + T)):
            y = rotate(x.swapaxes(0, 1)[None], offset=int(positions[0])).squeeze(0).swapaxes(0, 1)  # one sequence
        else:
            y = rotate(x[:, :, None], offset=mx.array(positions)).squeeze(2)  # T sequences of one row
        if rope.magnitude == 1:
            return y
        return mx.concatenate([y[..., :n] * rope.magnitude, y[..., n:]], axis=-1)

    def add(self, x: Array, y: Array) -> Array:
        return x + y

    def swiglu(self, gate: Array, up: Array) -> Array:
        return _swiglu(gate, up)

    def mul_sigmoid(self, x: Array, gate: Array) -> Array:
        return _mul_sigmoid(x, gate)

    def mul_softplus(self, x: Array, gate: Array) -> Array:
        return _mul_softplus(x, gate)

    # -- ops that read and write their own state --------------------------------------------------------------------

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        kv: MlxRows | MlxPacked,
        step: Step,
        scale: float,
        window: int | None = None,
        causal: bool = False,
    ) -> Array:
        step.the_slot()
        if isinstance(kv, MlxPacked):
            return self._attend_packed(q, k, v, kv, step, scale, window, causal)
        past = kv.past
        if kv.spec.is_packed and kv.window is window is None and not causal and attends(kv.spec.planes, step):
            return self._attend_codes(q, k, v, kv, step, scale)
        keys, values = kv.write(k.swapaxes(0, 1)[None], v.swapaxes(0, 1)[None])
        if window is not None and not kv.keep:  # the first row that any row of the step may see
            first = past + len(step) - keys.shape[2]
            hidden = max(0, min(past, int(step.positions.min()) - window + 1) - first)
            keys, values = keys[:, :, hidden:], values[:, :, hidden:]
        return self._attend(q, keys, values, step, past, scale, window, causal, kv.keep)

    def _attend_codes(self, q: mx.array, k: mx.array, v: mx.array, kv: MlxRows, step: Step, scale: float) -> mx.array:
        """Attention over a cache without exact rows, read as it is stored."""
        past, planes, query = kv.past, kv.spec.planes, q.astype(mx.float32) * scale
        kv.put(encoded(kv.coders, [x.swapaxes(0, 1)[None] for x in (k, v)]))
        query = rotate(query) if planes[0].rotated else query
        part = CachePart(query, mx.zeros(q.shape[:2]), kv.buffers, planes, past, past, EVERY)
        return attend([part], step, past, Packing(), q.dtype)

    def _attend_packed(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        kv: MlxPacked,
        step: Step,
        scale: float,
        window: int | None,
        causal: bool,
    ) -> mx.array:
        """Attention over codes and, as more keys of the same product, over the rows that are read exactly."""
        if window is None and not causal and kv.is_uniform(step) and attends(kv.spec.planes, step):
            past, query = kv.past, q.astype(mx.float32) * scale
            rows = k.swapaxes(0, 1)[None], v.swapaxes(0, 1)[None]
            return attend(kv.parts(step, query, *rows), step, past, kv.spec.packing, q.dtype)
        parts = kv.hold(step, k.swapaxes(0, 1)[None], v.swapaxes(0, 1)[None])
        seen = []
        for part in parts:
            exact = exact_rows(step, part.places, kv.spec.packing)
            seen.append(seen_rows(step, part.places, window, kv.keep, causal) & (exact if part.exact else ~exact))
        keys, values = (mx.concatenate(list(rows), axis=2) for rows in zip(*(part.rows for part in parts), strict=True))
        mask = mx.array(np.concatenate(seen, axis=1))
        out = mx.fast.scaled_dot_product_attention(q.swapaxes(0, 1)[None], keys, values, scale=scale, mask=mask)
        return out.squeeze(0).swapaxes(0, 1)

    def concatenate(self, parts: Sequence[Array]) -> Array:
        return mx.concatenate(list(parts), axis=0)

    def write_kv(self, k: Array, v: Array, kv: MlxRows | MlxPacked, step: Step) -> None:
        rows = k.swapaxes(0, 1)[None], v.swapaxes(0, 1)[None]
        if isinstance(kv, MlxPacked):
            kv.hold(step, *rows)
        else:
            kv.write(*rows)

    def latent_attention(
        self, q_latent: Array, q_rope: Array, latent: Array, k_rope: Array, kv: MlxRows, step: Step, scale: float
    ) -> Array:
        step.the_slot()
        past = kv.past
        rows = _latent_rows(kv, latent, k_rope)
        # composed: MLX has no fused attention for heads this wide, and its own fallback copies the values
        rows = rows.squeeze((0, 1))
        scores = (mx.concatenate([q_latent, q_rope], axis=-1) * scale) @ rows.T  # (T, H, n)
        mask = self._mask(step, past, past, None, causal=False)
        if isinstance(mask, str):
            mask = mx.arange(past + len(step)) <= past + mx.arange(len(step))[:, None]
        if mask is not None:
            scores = mx.where(mask[:, None], scores, -mx.inf)
        return (mx.softmax(scores, axis=-1, precise=True) @ rows)[..., : latent.shape[1]]

    def expanded_attention(
        self,
        q_nope: Array,
        q_rope: Array,
        latent: Array,
        k_rope: Array,
        k_up: Weight,
        v_up: Weight,
        kv: MlxRows,
        step: Step,
        scale: float,
    ) -> Array:
        step.the_slot()
        past, R = kv.past, latent.shape[1]
        rows = _latent_rows(kv, latent, k_rope)
        k_nope, values = _by_head(rows[..., :R], k_up, transpose=False), _by_head(rows[..., :R], v_up)
        roped = mx.broadcast_to(rows[..., R:], (*k_nope.shape[:3], k_rope.shape[1]))
        q, keys = mx.concatenate([q_nope, q_rope], axis=-1), mx.concatenate([k_nope, roped], axis=-1)
        return self._attend(q, keys, values, step, past, scale)

    def _attend(
        self,
        q: mx.array,
        keys: mx.array,
        values: mx.array,
        step: Step,
        past: int,
        scale: float,
        window: int | None = None,
        causal: bool = False,
        keep: int = 0,
    ) -> mx.array:
        """Attend: q (T, H, D), keys (1, K, n, D), values (1, K, n, Dv) -> (T, H, Dv)."""
        mask = self._mask(step, keys.shape[2] - len(step), past, window, causal, keep)
        out = mx.fast.scaled_dot_product_attention(q.swapaxes(0, 1)[None], keys, values, scale=scale, mask=mask)
        return out.squeeze(0).swapaxes(0, 1)  # out[0] would be a gather

    def _mask(
        self, step: Step, shown: int, past: int, window: int | None, causal: bool, keep: int = 0
    ) -> mx.array | str | None:
        """Mask of what the step's rows see of `shown` committed rows and of each other; None where they see everything.

        The committed rows are the first `keep` (all, if fewer) and the last.
        """
        T, first = len(step), min(keep, past)
        if window is None or int(step.positions.max()) < window:
            if T == 1 or (step.parents is None and not causal):
                return None
            if step.is_chain or step.parents is None:
                return "causal"
            window = None
        elif T == 1 and shown - first < window:
            return None
        masks = self._masks.setdefault(step, {})
        key = shown, window, causal, keep
        if key not in masks:
            places = np.concatenate([np.arange(first), np.arange(past - shown + first, past)])
            masks[key] = mx.array(seen_rows(step, places, window, keep, causal))
        return masks[key]

    def short_conv(self, x: Array, taps: Array, conv: Any, step: Step) -> Array:
        step.the_slot()
        conv.stream = mx.concatenate([conv.tail, x], axis=0)
        return recurrent.short_conv(conv.stream, taps, step)

    def parent_rows(self, x: Array, last: Any, step: Step) -> Array:
        step.the_slot()
        last.stream = mx.concatenate([last.tail, x.astype(last.tail.dtype)], axis=0)
        return last.stream[:-1] if step.is_chain else last.stream[mx.array(1 + recurrent.parents_of(step))]

    def block_conv(self, x: Array, own: Array, base: Array) -> Array:
        return recurrent.block_conv(x, own, base)

    def gated_delta(
        self,
        q: Array,
        k: Array,
        v: Array,
        a: Array,
        b: Array,
        decay: Array,
        dt_bias: Array,
        delta: MlxDelta,
        step: Step,
    ) -> Array:
        step.the_slot()
        D = k.shape[-1]
        # x / sqrt(sum x² + eps) is RMSNorm with eps / D, over sqrt(D); q is divided by sqrt(D) once more
        q = mx.fast.rms_norm(q, self._constant(D, 1 / D), L2_EPS / D)
        k = mx.fast.rms_norm(k, self._constant(D, D**-0.5), L2_EPS / D)
        if not on_metal():
            q, k = (mx.tile(x, (1, v.shape[1] // x.shape[1], 1)) for x in (q, k))
        delta.rows = k, v, _log_decay(a, dt_bias, decay), mx.sigmoid(b.astype(mx.float32))
        out, delta.after = recurrent.gated_delta(q, delta.rows, delta.matrix, step)
        return out

    def _constant(self, size: int, value: float) -> mx.array:
        if (size, value) not in self._constants:
            self._constants[size, value] = mx.full((size,), value, self.dtype)
        return self._constants[size, value]

    # -- experts ---------------------------------------------------------------------------------------------------

    def route_softmax(self, logits: Array, top_k: int) -> tuple[Array, Array]:
        ids = mx.argsort(-logits, axis=-1)[:, :top_k]
        best = mx.take_along_axis(logits, ids, axis=-1)
        return ids, mx.softmax(best, axis=-1, precise=True)  # the others cancel when the best are renormalized

    def route_sigmoid(self, logits: Array, bias: Array, top_k: int, scale: float) -> tuple[Array, Array]:
        p = mx.sigmoid(logits.astype(mx.float32))
        ids = mx.argsort(-(p + bias), axis=-1)[:, :top_k]
        best = mx.take_along_axis(p, ids, axis=-1)
        return ids, best * (scale / best.sum(axis=-1, keepdims=True))

    def moe(self, x: Array, gate_up: Weight, down: Weight, ids: Array, weights: Array) -> Array:
        if not isinstance(gate_up, Streamed):
            return _experts(x, gate_up, down, ids, weights)
        slots = mx.array(gate_up.fetch(np.array(ids)))
        out = _experts(x, gate_up.parts.weight, down.parts.weight, ids, weights, slots)
        gate_up.parts.memory.last = out
        return out

    # -- sampling --------------------------------------------------------------------------------------------------

    def sample(self, logits: Array, sampler: Sampler | Samplers) -> Array:
        if not sampler.is_argmax:
            return sampled(logits, sampler.of_rows if isinstance(sampler, Samplers) else [sampler] * len(logits))
        if on_metal():
            tokens = self.top_k(logits, 1)[0].squeeze(1)  # MLX's argmax gives a whole row to one core
        else:
            tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
            tokens = mx.where(mx.isnan(logits.max(axis=-1)), NOT_A_TOKEN, tokens)
        mx.async_eval(tokens)  # the device works on while the host prints
        return tokens

    def top_k(self, logits: Array, k: int) -> tuple[Array, Array]:
        ids, logs, total = best_of_rows(logits, k)
        return mx.where(mx.isnan(total), NOT_A_TOKEN, ids), logs

    def argmax_entropy(self, logits: Array, excluded: int) -> tuple[Array, Array]:
        return best_and_entropy(logits, excluded)

    def read(self, x: Array) -> np.ndarray:
        if mx.issubdtype(x.dtype, mx.floating):
            return np.array(x.astype(mx.float32))
        out = np.array(x)
        if (out == NOT_A_TOKEN).any():
            raise NotFiniteError("the logits of a row hold NaN")
        return out

    def copy_bandwidth(self) -> float:
        if mx.default_device().type == mx.DeviceType.cpu:
            return super().copy_bandwidth()
        best, copies = float("inf"), 8  # at a time, so that the host's wait for the last one does not count
        source = mx.zeros(COPIED)
        for _ in range(5):
            target = source
            mx.eval(target)
            started = time.perf_counter()
            for _ in range(copies):
                target = target + 1
            mx.eval(target)
            best = min(best, time.perf_counter() - started)
        return 2 * copies * source.nbytes / best

    def peak_bytes(self) -> int:
        return max(peak_resident_bytes(), mx.get_peak_memory())


def _latent_rows(kv: MlxRows, latent: mx.array, k_rope: mx.array) -> mx.array:
    """Append the step's rows to the past: (1, 1, n, R + P) of both"""
    if len(kv.buffers) == 1:
        return kv.write(mx.concatenate([latent, k_rope], axis=-1)[None, None])[0]
    return mx.concatenate(kv.write(latent[None, None], k_rope[None, None]), axis=-1)


def _matmul(x: mx.array, part: Part, transpose: bool = True) -> mx.array:
    if isinstance(part, Blocks):
        if x.ndim == 2:
            return quantized.matmul(x, part)
        part = quantized.dequantize(part, x.dtype)  # of heads, whose matrices are small
    if isinstance(part, Packed):
        return mx.quantized_matmul(
            x, *part[:3], transpose=transpose, group_size=part.group_size, bits=part.bits, mode=part.mode
        )
    return x @ (part.swapaxes(-1, -2) if transpose else part)


def _by_head(x: mx.array, w: Weight, transpose: bool = True) -> mx.array:
    """Multiply by head: x (..., H or 1, T, columns), w (H, rows, columns) -> (..., H, T, rows)."""
    if len(w) > 1:
        raise BimetalError("matrices of heads cannot be stacked from several formats")
    (part,) = w
    heads = (part.codes if isinstance(part, Packed) else part).shape[0]
    return _matmul(mx.broadcast_to(x, (*x.shape[:-3], heads, *x.shape[-2:])), part, transpose)


def _experts(
    x: mx.array, gate_up: Weight, down: Weight, ids: mx.array, weights: mx.array, slots: mx.array | None = None
) -> mx.array:
    """`MlxOps.moe`; `slots` is the table (E,) from experts to the matrices that hold them, None for all in order."""
    T, k = ids.shape
    rows = mx.arange(T * k) // k
    experts = ids.reshape(-1)
    ordered = T * k >= SORT_ROWS
    if ordered:
        order = mx.argsort(experts if slots is None else slots[experts])
        rows, experts = rows[order], experts[order]
    y = _gather_matmul(x[rows], gate_up, experts, ordered, slots)
    F = y.shape[-1] // 2
    y = _gather_matmul(_swiglu(y[:, :F], y[:, F:]), down, experts, ordered, slots)
    if ordered:
        y = y[mx.argsort(order)]
    return (y.reshape(T, k, y.shape[-1]) * weights[:, :, None].astype(y.dtype)).sum(axis=1)


def _gather_matmul(x: mx.array, w: Weight, experts: mx.array, ordered: bool, slots: mx.array | None = None) -> mx.array:
    """Multiply row i of x (n, columns) by matrix slots[experts[i]] of w (n, rows, columns): (n, rows)."""
    each = x.reshape(len(x), 1, x.shape[-1])  # x[:, None] has a stride of 1, by which gather_mm steps on CUDA
    matrices = experts if slots is None else slots[experts]
    out = []
    for part in w:
        if isinstance(part, Blocks):
            out.append(quantized.gather_matmul(x, part, experts, ordered, slots))
            continue
        if isinstance(part, Packed):
            y = mx.gather_qmm(
                each,
                *part[:3],
                rhs_indices=matrices,
                transpose=True,
                group_size=part.group_size,
                bits=part.bits,
                mode=part.mode,
                sorted_indices=ordered,
            )
        else:
            y = mx.gather_mm(each, part.swapaxes(-1, -2), rhs_indices=matrices, sorted_indices=ordered)
        out.append(y.squeeze(1))
    return out[0] if len(out) == 1 else mx.concatenate(out, axis=-1)
