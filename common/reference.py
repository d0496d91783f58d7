"""NumpyOps: the definition of every op, in float32, and the backend that runs anywhere.

Written to be read: loops over rows where the mathematics has one, no tricks. Weights are expanded to float32 once.
In short steps each row is computed by itself, bitwise identical to a step of its own.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from common.backend import Array, LayerSize, Weight, decoded_bytes
from common.block_sparse import attend
from common.errors import NotFiniteError
from common.expert_forms import ExpertForm, Streamed
from common.host import available_bytes, peak_resident_bytes
from common.kv_cache import ALL_PAIRS
from common.ops import CLAMPED_GAIN, L2_EPS, ExpertBiases, GateWeights, LatentWeights, Ops, Rope
from common.quants import dequantize
from common.reference_experts import KEPT, NumpySlots, PackedExperts
from common.reference_packed import NumpyPacked
from common.reference_recurrent import NumpyConv, NumpyDelta, delta_rule
from common.reference_rows import NumpyRows, NumpyWindow, VisibleRows, rows_held
from common.sampling import NOT_A_TOKEN, Sampler, Samplers
from common.step import MAX_DECODE_ROWS, PAST, LayerState, State, Step
from common.storage import ConvSpec, DeltaSpec, Kind, KVSpec, LatentSpec, LayerSpec, Spec, all_specs
from common.tensors import Tensor
from common.visible import exact_rows, seen_rows

SHORT_ROWS = 16  # most of a step of a prompt that is short: for more, one product takes about half as long
ATTENDED = 128  # rows of a long step whose attention is computed together: later rows attend to more keys
CACHED = 1 << 19  # elements of a matrix that stay in a core's cache while one row after the other is multiplied


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))  # never overflows


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def gelu(x: np.ndarray) -> np.ndarray:
    """Compute x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x³), as x sigmoid(2 u)."""
    return x * sigmoid(np.float32(2 * (2 / np.pi) ** 0.5) * (x + np.float32(0.044715) * x**3))


def clamped_swiglu(gate: np.ndarray, up: np.ndarray, limit: float) -> np.ndarray:
    """Compute (up + 1) gate sigmoid(1.702 gate), of gates up to `limit` and ups from -limit to limit."""
    gate, up = np.minimum(gate, np.float32(limit)), np.clip(up, np.float32(-limit), np.float32(limit))
    return (up + 1) * gate * sigmoid(np.float32(CLAMPED_GAIN) * gate)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0, x)


class NumpyOps(Ops):
    name = "numpy"
    item_bytes = 4
    cache_pairs = ALL_PAIRS
    joins = divides = True
    short_rows = SHORT_ROWS
    is_long = False  # whether the step that is being computed is long

    def weight(self, *parts: Tensor) -> Weight:
        if len(parts) == 1:
            return dequantize(parts[0])
        if len(parts[0].shape) > 2:
            return np.concatenate([dequantize(part) for part in parts], axis=-2)
        rows = [part.shape[0] for part in parts]
        held = np.empty((sum(rows), parts[0].shape[1]), np.float32)
        for part, own in zip(parts, np.split(held, np.cumsum(rows)[:-1]), strict=True):
            dequantize(part, own)  # in place: new pages cost as much as decoding
        return held

    def expert_weight(self, *parts: Tensor) -> Weight:
        return PackedExperts(parts) if all(part.type in KEPT for part in parts) else self.weight(*parts)

    def vector(self, tensor: Tensor) -> Array:
        return dequantize(tensor)

    def weight_bytes(self, weight: Weight) -> int:
        return weight.nbytes

    def holds(self, stored_type: str) -> str:
        if stored_type in KEPT:
            return "experts as stored, others expanded to float32"
        return "as stored" if stored_type == "F32" else "expanded to float32"

    def expert_bytes(self, form: ExpertForm) -> int:
        return form.nbytes

    def expert_memory(self, forms: Mapping[int, ExpertForm], slots: Mapping[Hashable, int]) -> NumpySlots:
        return NumpySlots(forms, slots)

    def new_state(self, spec: Sequence[LayerSpec], capacity: int) -> State:
        return State([{name: STATES[type(s)](s) for name, s in layer.items()} for layer in spec], capacity)

    def held_bytes(self, *parts: Tensor) -> int:
        return sum(4 * math.prod(part.shape) for part in parts)

    def held_expert_bytes(self, *parts: Tensor) -> int:
        if any(part.type not in KEPT for part in parts):
            return self.held_bytes(*parts)
        return sum(math.prod(part.shape) // 32 * 17 for part in parts)

    def held_state_bytes(self, spec: Sequence[LayerSpec], tokens: int, rows: int) -> int:
        room = rows_held(tokens, rows)
        total = 0
        for s in all_specs(spec):
            total += s.bytes(tokens, self.item_bytes)
            if s.kind is Kind.APPENDS:
                total += (room - tokens) * s.row_bytes(self.item_bytes)  # rows allocated in advance
        return total

    def work_bytes(self, layers: Sequence[LayerSize], tokens: int, rows: int) -> int:
        rows = min(rows, tokens)
        scores = max(layer.heads for layer in layers) * min(rows, ATTENDED) * tokens * 4
        values = max(max(layer.mixer, 2 * layer.ffn) + 4 * layer.hidden for layer in layers)  # silu has temporaries
        expanded = max(layer.expanded for layer in layers) * tokens * 4
        decoded = max(decoded_bytes(layer, tokens) for layer in layers)
        return 2 * scores + rows * tokens + rows * values * 4 + expanded + decoded

    def free_bytes(self) -> tuple[int, str]:
        return available_bytes()

    def run(self, fn: Callable[[State, Step], Array], state: State, step: Step, needed: slice | None = None) -> Array:
        self.is_long = step.is_long
        try:
            return super().run(fn, state, step, needed)
        finally:
            self.is_long = False

    def embed(self, table: Weight, tokens: Array) -> Array:
        return table[np.asarray(tokens)]

    def linear(self, x: Array, w: Weight) -> Array:
        return product(x, w, self.is_long)

    def head_linear(self, x: Array, w: Weight) -> Array:
        return np.stack([product(x[:, h], w[h], self.is_long) for h in range(len(w))], axis=1)

    def rms_norm(self, x: Array, weight: Array | None, eps: float) -> Array:
        x = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(eps))
        return x if weight is None else x * weight

    def rope(self, x: Array, positions: np.ndarray, rope: Rope) -> Array:
        n = len(rope.frequencies)
        angles = positions[:, None].astype(np.float64) * np.array(rope.frequencies)  # float64: positions beyond 1e5
        cos = (np.cos(angles) * rope.magnitude).astype(np.float32)[:, None]
        sin = (np.sin(angles) * rope.magnitude).astype(np.float32)[:, None]
        x1, x2, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
        return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], axis=-1)

    def add(self, x: Array, y: Array) -> Array:
        return x + y

    def swiglu(self, gate: Array, up: Array) -> Array:
        return silu(gate) * up

    def geglu(self, gate: Array, up: Array) -> Array:
        return gelu(gate) * up

    def scale(self, x: Array, factor: float) -> Array:
        return x * np.float32(factor)

    def mul_sigmoid(self, x: Array, gate: Array) -> Array:
        return x * sigmoid(gate)

    def mul_softplus(self, x: Array, gate: Array) -> Array:
        return x * softplus(gate)

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        kv: Any,
        step: Step,
        scale: float,
        window: int | None = None,
        causal: bool = False,
        sink_logits: Array | None = None,
    ) -> Array:
        step.the_slot()
        parts = kv.append(step, k, v, q=q)
        seen = [_mask_of(part, step, kv, window, causal) for part in parts]
        keys, values = parts[0].rows if len(parts) == 1 else _joined(parts)
        joined = seen[0] if len(parts) == 1 else np.concatenate(seen, axis=1)
        return _attend(q, keys, values, joined, scale, step.is_long, sink_logits)

    def block_sparse_attention(self, q: Array, k: Array, v: Array, kv: Any, step: Step, scale: float) -> Array:
        parts = kv.append(step, k, v)
        if len(parts) > 1:  # some rows exact, and some from codes
            return self.attention(q, k, v, kv, step, scale)
        keys, values = parts[0].rows
        return attend(q, keys, values, scale)

    def concatenate(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(parts)

    def write_kv(self, k: Array, v: Array, kv: Any, step: Step) -> None:
        kv.append(step, k, v)

    def latent_attention(
        self, q_latent: Array, q_rope: Array, latent: Array, k_rope: Array, kv: Any, step: Step, scale: float
    ) -> Array:
        step.the_slot()
        rows = _latent_rows(kv, latent, k_rope)
        q = np.concatenate([q_latent, q_rope], axis=-1)
        seen = seen_rows(step, np.arange(len(rows) - len(step)))
        return _attend(q, rows, rows[..., : latent.shape[1]], seen, scale, step.is_long)

    def expanded_attention(
        self,
        q_nope: Array,
        q_rope: Array,
        latent: Array,
        k_rope: Array,
        w: LatentWeights,
        kv: Any,
        step: Step,
        scale: float,
    ) -> Array:
        step.the_slot()
        R = latent.shape[1]
        rows = _latent_rows(kv, latent, k_rope)[:, 0]
        k_nope = np.einsum("nr,hrc->nhc", rows[:, :R], w.k_up, optimize=True)
        k_rope = np.broadcast_to(rows[:, None, R:], (*k_nope.shape[:2], k_rope.shape[1]))
        q, keys = np.concatenate([q_nope, q_rope], axis=-1), np.concatenate([k_nope, k_rope], axis=-1)
        values = np.einsum("nr,hvr->nhv", rows[:, :R], w.v_up, optimize=True)
        seen = seen_rows(step, np.arange(len(rows) - len(step)))
        return _attend(q, keys, values, seen, scale, step.is_long)

    def short_conv(self, x: Array, taps: Array, conv: Any, step: Step) -> Array:
        step.the_slot()
        conv.rows = np.array(x)
        n, parents = len(conv.tail), step.order()
        stream = np.concatenate([conv.tail, x])  # row t of the step at n + t, committed rows before n
        out = np.zeros_like(x)
        at = n + np.arange(len(x))
        for j in range(n, -1, -1):  # from the row itself back through its ancestors
            out += taps[:, j] * stream[at]
            at = np.where(at >= n, n + parents[np.maximum(at - n, 0)], at - 1)  # PAST lands on n - 1
        return silu(out)

    def parent_rows(self, x: Array, last: Any, step: Step) -> Array:
        step.the_slot()
        last.rows = np.array(x)
        return np.concatenate([last.tail, x])[1 + step.order()]  # PAST lands on the tail

    def block_conv(self, x: Array, row_taps: Array, base: Array) -> Array:
        (T, C), n = x.shape, len(base)
        taps = np.repeat(row_taps.reshape(T, n, -1), C // (row_taps.shape[1] // n), axis=2) + base
        out = np.zeros_like(x)
        for i in range(min(n, T)):
            out[i:] += taps[i:, i] * x[: T - i]
        return out

    def gated_delta(
        self, q: Array, k: Array, v: Array, a: Array, b: Array, w: GateWeights, delta: Any, step: Step
    ) -> Array:
        step.the_slot()
        heads = np.arange(v.shape[1])
        of_key = heads // (len(heads) // k.shape[1]) if delta.spec.grouped else heads % k.shape[1]
        q = _l2_normalized(q)[:, of_key] * np.float32(q.shape[-1] ** -0.5)
        k = _l2_normalized(k)[:, of_key]
        delta.rows = k, np.array(v), np.exp(w.decay * softplus(a + w.dt_bias)), sigmoid(b)
        out = np.empty_like(v)
        after: dict[int, np.ndarray] = {PAST: delta.matrix}
        for t, parent in enumerate(step.order().tolist()):
            after[t] = delta_rule(after[parent], *(x[t] for x in delta.rows))
            out[t] = np.einsum("hkv,hk->hv", after[t], q[t])  # read after the update
            if step.is_chain:
                del after[parent]
        delta.after = after
        return out

    def route_softmax(self, logits: Array, top_k: int, scale: float | None = None) -> tuple[Array, Array]:
        p = np.exp(logits - logits.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        ids = np.argsort(-p, axis=-1, kind="stable")[:, :top_k]
        weights = np.take_along_axis(p, ids, axis=-1)
        return ids, weights / weights.sum(axis=-1, keepdims=True) if scale is None else weights * np.float32(scale)

    def route_sigmoid(self, logits: Array, bias: Array, top_k: int, scale: float) -> tuple[Array, Array]:
        p = sigmoid(logits)
        ids = np.argsort(-(p + bias), axis=-1, kind="stable")[:, :top_k]
        weights = np.take_along_axis(p, ids, axis=-1)
        return ids, weights * (np.float32(scale) / weights.sum(axis=-1, keepdims=True))

    def moe(
        self,
        x: Array,
        gate_up: Weight,
        down: Weight,
        ids: Array,
        weights: Array,
        biases: ExpertBiases | None = None,
    ) -> Array:
        if isinstance(gate_up, Streamed):
            places, gate_up, down = gate_up.fetch(ids), gate_up.parts, down.parts
        else:
            places = np.arange(len(gate_up))
        out = np.zeros_like(x)
        for expert in np.unique(ids):
            rows, slot = np.nonzero(ids == expert)
            place = places[expert]
            gate, up = np.split(product(x[rows], gate_up[place], self.is_long), 2, axis=-1)
            if biases is None:
                y = product(self.swiglu(gate, up), down[place], self.is_long)
            else:
                channels = clamped_swiglu(gate + biases.gate[expert], up + biases.up[expert], biases.limit)
                y = product(channels, down[place], self.is_long) + biases.down[expert]
            out[rows] += weights[rows, slot, None] * y
        return out

    def sample(self, logits: Array, sampler: Sampler | Samplers) -> Array:
        if isinstance(sampler, Samplers):
            return sampler.pick(logits)
        return np.array([sampler.pick(row) for row in logits], np.int32)

    def read(self, x: Array) -> np.ndarray:
        out = np.asarray(x)
        if out.dtype.kind == "i" and (out == NOT_A_TOKEN).any():
            raise NotFiniteError("the logits of a row hold NaN")
        return out

    def peak_bytes(self) -> int:
        return peak_resident_bytes()


def product(x: np.ndarray, w: np.ndarray, is_long: bool = False) -> np.ndarray:
    """Compute x @ w.T: x (T, C), w (R, C) -> (T, R). In short steps row by row: BLAS adds in another order for more."""
    if is_long or len(x) > MAX_DECODE_ROWS:
        return x @ w.T
    n = -(-CACHED // w.shape[1])
    pieces = [np.matmul(x[:, None], w[at : at + n].T)[:, 0] for at in range(0, len(w), n)]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=-1)


def _mask_of(part: VisibleRows, step: Step, kv: Any, window: int | None, causal: bool) -> np.ndarray:
    """Mark the rows of a part of a cache that each row of the step attends to: (T, n) bool."""
    mask = seen_rows(step, part.positions, window, kv.sinks, causal)
    if part.exact is not None:
        exact = exact_rows(step, part.positions, kv.spec.packing)
        mask &= exact if part.exact else ~exact
    return mask


def _joined(parts: Sequence[VisibleRows]) -> list[np.ndarray]:
    return [np.concatenate(rows) for rows in zip(*(part.rows for part in parts), strict=True)]


def _latent_rows(kv: Any, latent: np.ndarray, k_rope: np.ndarray) -> np.ndarray:
    """Append the step's latent rows to the past, and return both: (n, 1, R + P)."""
    if len(kv.planes) == 1:
        return kv.write(np.concatenate([latent, k_rope], axis=-1)[:, None])[0]
    return np.concatenate(kv.write(latent[:, None], k_rope[:, None]), axis=-1)


def _attend(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray,
    scale: float,
    is_long: bool,
    sink_logits: np.ndarray | None = None,
) -> np.ndarray:
    """Compute softmax(scale q·k) v over seen rows: q (T, H, D), keys (n, K, D), values (n, K, Dv) -> (T, H, Dv)."""
    T, H, D = q.shape
    K = keys.shape[1]
    q = q.reshape(T, K, -1, D) * np.float32(scale)
    sinks = None if sink_logits is None else sink_logits.reshape(K, -1)
    size, attend_part = (
        (ATTENDED, _attend_together) if is_long else (1, _attend_row)
    )  # a decoding row is computed alone
    out = []
    for rows in (slice(at, at + size) for at in range(0, T, size)):
        columns = np.flatnonzero(mask[rows].any(axis=0))
        lowest, end = int(columns[0]), int(columns[-1]) + 1
        own = slice(lowest, end) if len(columns) == end - lowest else columns  # a slice is not copied
        out.append(attend_part(q[rows], keys[own], values[own], mask[rows, own], sinks))
    return np.concatenate(out).reshape(T, H, -1)


def _attend_row(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, mask: np.ndarray, sinks: np.ndarray | None
) -> np.ndarray:
    """Compute `_attend_together` for one row that attends to all keys; einsum's order does not depend on threads."""
    scores = np.einsum("tkgd,nkd->kgtn", q, keys)
    scores = _softmax(scores, None if sinks is None else sinks[:, :, None, None])
    return np.einsum("kgtn,nkv->tkgv", scores, values)


def _attend_together(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, mask: np.ndarray, sinks: np.ndarray | None
) -> np.ndarray:
    """Compute softmax(q·k) v by BLAS: q (T, K, heads per group, D), keys (n, K, D), values (n, K, Dv).

    sinks  (K, heads per group): one more score of each head, without a value; None: there is none
    """
    T, K, group, D = q.shape
    scores = q.transpose(1, 2, 0, 3).reshape(K, group * T, D) @ keys.transpose(1, 2, 0)
    np.copyto(scores.reshape(K, group, T, -1), -np.inf, where=~mask)
    out = _softmax(scores, None if sinks is None else np.repeat(sinks, T, axis=1)[..., None]) @ values.transpose(
        1, 0, 2
    )
    return out.reshape(K, group, T, -1).transpose(2, 0, 1, 3)


def _softmax(scores: np.ndarray, sinks: np.ndarray | None = None) -> np.ndarray:
    """Compute softmax over the last axis and a further score `sinks` (..., 1), which is left out; in place."""
    top = scores.max(axis=-1, keepdims=True)
    top = top if sinks is None else np.maximum(top, sinks)
    scores -= top
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    scores /= total if sinks is None else total + np.exp(sinks - top)
    return scores


def _l2_normalized(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.sum(np.square(x), axis=-1, keepdims=True) + np.float32(L2_EPS))


def _keys_and_values(s: KVSpec) -> LayerState:
    if s.packing.keeps_exact:
        return NumpyPacked(s)
    return NumpyRows(s) if s.window is None else NumpyWindow(s)


STATES: Mapping[type[Spec], Callable[[Any], LayerState]] = {  # of a spec: its state, empty
    KVSpec: _keys_and_values,
    LatentSpec: NumpyRows,
    ConvSpec: NumpyConv,
    DeltaSpec: NumpyDelta,
}
