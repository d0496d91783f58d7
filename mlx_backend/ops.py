"""MlxOps: the op contract on MLX's default device: a Mac's GPU, another GPU that MLX's build supports, or the CPU.

MLX is lazy: ops build a graph, which `read`, `sample` or the commit of a prefill chunk evaluates.
"""

import time
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from common.backend import Array, LayerSize, Weight
from common.errors import BimetalError, NotFiniteError
from common.expert_forms import ExpertForm, Streamed
from common.host import available_bytes, peak_resident_bytes
from common.kv_cache import ALL_PAIRS
from common.ops import L2_EPS, ExpertBiases, GateWeights, LatentWeights, Ops, Rope
from common.quants import dequantize
from common.sampling import NOT_A_TOKEN, Sampler, Samplers
from common.step import State, Step
from common.storage import LayerSpec
from common.tensors import Tensor
from mlx_backend import attention as attending
from mlx_backend import elementwise, host, products, quantized, recurrent
from mlx_backend.experts import MlxSlots, expert_bytes
from mlx_backend.kernels import on_metal
from mlx_backend.logits import best_and_entropy, best_of_rows, sampled
from mlx_backend.packed import MlxPacked
from mlx_backend.quantized import Blocks
from mlx_backend.rows import MlxRows
from mlx_backend.state_table import new_state, state_bytes, work_bytes
from mlx_backend.states import MlxDelta
from mlx_backend.weights import GGUF_MAPPING, MODES, Packed, held_bytes, load_matrix, nbytes

COPIED = 2**26  # float32 numbers that are copied to measure bandwidth: far more than a cache holds


class MlxOps(Ops):
    """Ops on MLX arrays; `dtype`: activations, dense weights, affine scales, KV. Recurrent matrices are float32."""

    name = "mlx"
    runs_ahead = joins = divides = True
    built = None  # MLX compiles kernels when arrays are computed
    cache_pairs = ALL_PAIRS

    def __init__(self, dtype: mx.Dtype = mx.float32):
        self.dtype = dtype
        self.item_bytes = dtype.size
        self._narrow: dict[int, tuple[mx.array, mx.array]] = {}  # by id: a float32 vector, and itself in `dtype`
        self._masks = attending.Masks()
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
        multiply = host.matmul if host.serves(x) else products.matmul
        out = [multiply(x, part) for part in w]
        return out[0] if len(out) == 1 else mx.concatenate(out, axis=-1)

    def head_linear(self, x: Array, w: Weight) -> Array:
        return products.by_head(x.swapaxes(0, 1), w).swapaxes(0, 1)

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
            with np.errstate(divide="ignore"):  # a pair that is not turned has a wavelength without end
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
        return x + (self._like_activations(y) if y.ndim < x.ndim else y)

    def swiglu(self, gate: Array, up: Array) -> Array:
        return elementwise.swiglu(gate, up)

    def geglu(self, gate: Array, up: Array) -> Array:
        return elementwise.geglu(gate, up)

    def scale(self, x: Array, factor: float) -> Array:
        return x * factor

    def mul_sigmoid(self, x: Array, gate: Array) -> Array:
        return elementwise.mul_sigmoid(x, gate)

    def mul_softplus(self, x: Array, gate: Array) -> Array:
        return elementwise.mul_softplus(x, gate)

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
        sink_logits: Array | None = None,
    ) -> Array:
        step.the_slot()
        return attending.attention(self._masks, (q, k, v), kv, step, scale, window, causal, sink_logits)

    def block_sparse_attention(
        self, q: Array, k: Array, v: Array, kv: MlxRows | MlxPacked, step: Step, scale: float
    ) -> Array:
        found = attending.block_sparse_attention((q, k, v), kv, scale)
        return self.attention(q, k, v, kv, step, scale) if found is None else found

    def concatenate(self, parts: Sequence[Array]) -> Array:
        return mx.concatenate(list(parts), axis=0)

    def write_kv(self, k: Array, v: Array, kv: MlxRows | MlxPacked, step: Step) -> None:
        rows = attending.by_heads(k, v)
        if isinstance(kv, MlxPacked):
            kv.append(step, *rows)
        else:
            kv.write(*rows)

    def latent_attention(
        self, q_latent: Array, q_rope: Array, latent: Array, k_rope: Array, kv: MlxRows, step: Step, scale: float
    ) -> Array:
        step.the_slot()
        return attending.latent_attention(self._masks, (q_latent, q_rope), (latent, k_rope), kv, step, scale)

    def expanded_attention(
        self,
        q_nope: Array,
        q_rope: Array,
        latent: Array,
        k_rope: Array,
        w: LatentWeights,
        kv: MlxRows,
        step: Step,
        scale: float,
    ) -> Array:
        step.the_slot()
        return attending.expanded_attention(self._masks, (q_nope, q_rope), (latent, k_rope), w, kv, step, scale)

    def short_conv(self, x: Array, taps: Array, conv: Any, step: Step) -> Array:
        step.the_slot()
        conv.stream = mx.concatenate([conv.tail, x], axis=0)
        return recurrent.short_conv(conv.stream, taps, step)

    def parent_rows(self, x: Array, last: Any, step: Step) -> Array:
        step.the_slot()
        last.stream = mx.concatenate([last.tail, x.astype(last.tail.dtype)], axis=0)
        return last.stream[:-1] if step.is_chain else last.stream[mx.array(1 + step.order())]

    def block_conv(self, x: Array, row_taps: Array, base: Array) -> Array:
        return recurrent.block_conv(x, row_taps, base)

    def gated_delta(
        self, q: Array, k: Array, v: Array, a: Array, b: Array, w: GateWeights, delta: MlxDelta, step: Step
    ) -> Array:
        step.the_slot()
        D = k.shape[-1]
        # x / sqrt(sum x² + eps) is RMSNorm with eps / D, over sqrt(D); q is divided by sqrt(D) once more
        q = mx.fast.rms_norm(q, self._constant(D, 1 / D), L2_EPS / D)
        k = mx.fast.rms_norm(k, self._constant(D, D**-0.5), L2_EPS / D)
        repeats = v.shape[1] // k.shape[1]
        if delta.spec.grouped:
            q, k = (mx.repeat(x, repeats, axis=1) for x in (q, k))
        elif not on_metal():
            q, k = (mx.tile(x, (1, repeats, 1)) for x in (q, k))
        delta.rows = k, v, elementwise.log_decay(a, w.dt_bias, w.decay), mx.sigmoid(b.astype(mx.float32))
        out, delta.after = recurrent.gated_delta(q, delta.rows, delta.matrix, step)
        return out

    def _constant(self, size: int, value: float) -> mx.array:
        if (size, value) not in self._constants:
            self._constants[size, value] = mx.full((size,), value, self.dtype)
        return self._constants[size, value]

    # -- experts ---------------------------------------------------------------------------------------------------

    def route_softmax(self, logits: Array, top_k: int, scale: float | None = None) -> tuple[Array, Array]:
        ids = mx.argsort(-logits, axis=-1)[:, :top_k]
        if scale is not None:
            return ids, scale * mx.take_along_axis(mx.softmax(logits.astype(mx.float32), axis=-1), ids, axis=-1)
        best = mx.take_along_axis(logits, ids, axis=-1)
        return ids, mx.softmax(best, axis=-1, precise=True)  # the other logits cancel when the best are renormalized

    def route_sigmoid(self, logits: Array, bias: Array, top_k: int, scale: float) -> tuple[Array, Array]:
        p = mx.sigmoid(logits.astype(mx.float32))
        ids = mx.argsort(-(p + bias), axis=-1)[:, :top_k]
        best = mx.take_along_axis(p, ids, axis=-1)
        return ids, best * (scale / best.sum(axis=-1, keepdims=True))

    def moe(
        self,
        x: Array,
        gate_up: Weight,
        down: Weight,
        ids: Array,
        weights: Array,
        biases: ExpertBiases | None = None,
    ) -> Array:
        if biases is not None:
            gate, up, of_down = map(self._like_activations, (biases.gate, biases.up, biases.down))
            biases = biases._replace(gate=gate, up=up, down=of_down)
        if not isinstance(gate_up, Streamed):
            return products.moe(x, gate_up, down, ids, weights, biases)
        if not len(ids):  # a step without logits: a quantized router's product without rows divides by 0
            return x
        slots = mx.array(gate_up.fetch(np.array(ids)))
        out = products.moe(x, gate_up.parts.weight, down.parts.weight, ids, weights, biases, slots)
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
        mx.async_eval(tokens)  # the device continues while the host prints
        return tokens

    def top_k(self, logits: Array, k: int) -> tuple[Array, Array]:
        ids, logs, total = best_of_rows(logits, k)
        return mx.where(mx.isnan(total), NOT_A_TOKEN, ids), logs

    def argmax_entropy(self, logits: Array, excluded: int) -> tuple[Array, Array]:
        found = best_and_entropy(logits, excluded)
        mx.async_eval(*found)  # as `sample`
        return found

    def read(self, x: Array) -> np.ndarray:
        if mx.issubdtype(x.dtype, mx.floating):
            return np.array(x.astype(mx.float32))
        out = np.array(x)
        if (out == NOT_A_TOKEN).any():
            raise NotFiniteError("the logits of a row hold NaN")
        return out

    def computed(self, x: Array) -> Array:
        mx.eval(x)
        return x

    def copy_bandwidth(self) -> float:
        if mx.default_device().type == mx.DeviceType.cpu:
            return super().copy_bandwidth()
        best, copies = float("inf"), 8  # copies at a time, so that the host's wait for the last one is negligible
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
