"""The op contract between models and backends.

Models are plain functions over an `Ops`; they reshape and slice arrays, and leave arithmetic to these methods. The
meaning of each op is its NumPy form in `common/reference.py`. Required ops are abstract, so that a backend that lacks
one cannot be built. Composed ops have a default here, which a backend overrides where a benchmark shows a gain. What
loaders and the engine call is its base class (common/backend.py).
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from common.backend import Array, Backend, Weight
from common.errors import BimetalError
from common.expert_forms import Streamed
from common.sampling import GREEDY, Sampler, Samplers, argmax_entropy, top_k
from common.step import Step

CLAMPED_GAIN = 1.702  # of the gate, in the sigmoid of clamped SwiGLU
L2_EPS = 1e-6  # added to the sum of squares under the root, to normalize q and k of Gated DeltaNet


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first 2 * len(frequencies) channels of a head, in half-split pairs (j, j + n).

    frequencies  radians per position of each pair, scaling already applied
    magnitude    factor on the rotated channels (YaRN's attention factor)
    """

    frequencies: tuple[float, ...]
    magnitude: float = 1.0


class ExpertBiases(NamedTuple):
    """Biases of E experts, whose activation is then SwiGLU of clamped gates and ups, as in gpt-oss.

    router    (E,), added to the router's logits
    gate, up  (E, F) each, added to the products with gate and up rows
    down      (E, hidden), added to an expert's output before its weight
    limit     gates are at most this, ups from -limit to limit: (up + 1) * gate * sigmoid(CLAMPED_GAIN * gate)
    """

    router: Array
    gate: Array
    up: Array
    down: Array
    limit: float


class ExpertWeights(NamedTuple):
    """A feed-forward network of E experts, and perhaps a shared expert, which computes every row.

    router          (E, hidden)
    gate_up, down   (E, 2 F, hidden), gate rows first, and (E, hidden, F)
    shared_gate_up  (2 F', hidden), of the shared expert, as shared_down (hidden, F'); None: there is no shared expert
    shared_gate     (1, hidden): the sigmoid of its product scales the shared expert's output; None: no scale
    bias            (E,), added to the sigmoids by which experts are chosen; None: they are chosen by softmax
    biases          of the experts and of their router; None: no biases, and SwiGLU without limits
    """

    router: Weight
    gate_up: Weight
    down: Weight
    shared_gate_up: Weight | None = None
    shared_down: Weight | None = None
    shared_gate: Weight | None = None
    bias: Array | None = None
    biases: ExpertBiases | None = None


class LatentWeights(NamedTuple):
    """The matrices of latent attention that expand latents: k_up (H, R, N) to keys, v_up (H, V, R) to values."""

    k_up: Weight
    v_up: Weight


class GateWeights(NamedTuple):
    """The vectors of the delta rule's gates, (Hv,) each: decay = -exp(A_log), and dt_bias, which is added to a."""

    decay: Array
    dt_bias: Array


class DeltaWeights(NamedTuple):
    """The vectors of a gated DeltaNet layer: of its convolution, its delta rule and its norm.

    taps   (C, n), as in `short_conv`
    gates  as in `gated_delta`
    norm   (Dv,), of the gated norm, with eps
    """

    taps: Array
    gates: GateWeights
    norm: Array
    eps: float


class DeltaInputs(NamedTuple):
    """The projected rows of a gated DeltaNet layer.

    qkv   (T, 2 Hk Dk + Hv Dv), before the convolution
    z     (T, Hv, Dv), the gate after the norm
    a, b  (T, Hv), as in `gated_delta`
    """

    qkv: Array
    z: Array
    a: Array
    b: Array


class Ops(Backend):
    """The ops of a backend.

    Letters: T rows (tokens of the step), H query heads, K key/value heads, D head size, E experts.
    """

    # -- rows ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def embed(self, table: Weight, tokens: Array) -> Array:
        """Look up rows of the table: tokens (T,) -> (T, hidden)."""

    @abstractmethod
    def linear(self, x: Array, w: Weight) -> Array:
        """Compute x @ w.T: x (T, columns), w (rows, columns) -> (T, rows)."""

    @abstractmethod
    def head_linear(self, x: Array, w: Weight) -> Array:
        """Multiply each head by its own matrix: x (T, H, columns), w (H, rows, columns) -> (T, H, rows)."""

    @abstractmethod
    def rms_norm(self, x: Array, weight: Array | None, eps: float) -> Array:
        """Compute x / sqrt(mean(x², last axis) + eps) * weight in float32."""

    @abstractmethod
    def rope(self, x: Array, positions: np.ndarray, rope: Rope) -> Array:
        """Rotate x (T, heads, D) by `positions` (T,)."""

    @abstractmethod
    def add(self, x: Array, y: Array) -> Array:
        """Compute x + y of the same shape; a vector y (n,), or a row (1, n), is added to every row of x (T, n)."""

    @abstractmethod
    def swiglu(self, gate: Array, up: Array) -> Array:
        """Compute silu(gate) * up."""

    @abstractmethod
    def geglu(self, gate: Array, up: Array) -> Array:
        """Compute gelu(gate) * up, with the approximation by tanh."""

    @abstractmethod
    def scale(self, x: Array, factor: float) -> Array:
        """Compute factor * x of x (T, n)."""

    @abstractmethod
    def mul_sigmoid(self, x: Array, gate: Array) -> Array:
        """Compute x * sigmoid(gate); a gate with a last axis of 1 scales whole rows."""

    @abstractmethod
    def mul_softplus(self, x: Array, gate: Array) -> Array:
        """Compute x * log(1 + exp(gate)) in float32; a gate with a last axis of 1 scales whole rows."""

    # -- ops that read and write their own state --------------------------------------------------------------------

    @abstractmethod
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
        """Compute grouped-query attention over the committed past and the step's visible rows.

        q (T, H, D), k (T, K, D), v (T, K, Dv) -> (T, H, Dv); query head h reads KV head h // (H // K).
        A window of n masks positions at or below the row's own minus n, except for the attention sinks of the state.
        With `causal` a row of a block does not attend to later rows.

        sink_logits  (H,) float32: the softmax of each head has one more score, this one, whose value is zero
        """

    @abstractmethod
    def latent_attention(
        self, q_latent: Array, q_rope: Array, latent: Array, k_rope: Array, kv: Any, step: Step, scale: float
    ) -> Array:
        """Compute attention of all heads over one key per token, latent || k_rope; its latent part is also the value.

        q_latent (T, H, R), q_rope (T, H, P), latent (T, R), k_rope (T, P) -> (T, H, R). This is multi-head latent
        attention (DeepSeek-V2, arXiv 2405.04434) with the matrices that expand keys and values absorbed into the query
        and the output.
        """

    @abstractmethod
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
        """Compute multi-head latent attention as trained: keys k_up.T latent || k_rope and values v_up latent per head.

        q_nope (T, H, N), q_rope (T, H, P), latent (T, R), k_rope (T, P) -> (T, H, V).
        The state is that of `latent_attention`; keys and values are temporary.
        """

    @abstractmethod
    def short_conv(self, x: Array, taps: Array, conv: Any, step: Step) -> Array:
        """Compute silu of the causal depthwise convolution of x (T, C) with taps (C, n); the last tap is the row's own.

        The previous inputs of a row are its ancestors in the step, and before them the committed past.
        """

    @abstractmethod
    def parent_rows(self, x: Array, last: Any, step: Step) -> Array:
        """Return each row's parent row of x (T, C): (T, C); for a root the last committed row, or zeros if none exists.

        The state `last` is that of a short convolution of two taps.
        """

    @abstractmethod
    def block_conv(self, x: Array, row_taps: Array, base: Array) -> Array:
        """Compute the causal convolution along the rows of a block, with taps per row: x (T, C) -> (T, C).

        row_taps (T, n * G), base (n, C): row t, channel c is the sum over i of x[t - i, c] times
        (row_taps[t, i * G + c // (C // G)] + base[i, c]); rows before the first are zero.
        """

    @abstractmethod
    def gated_delta(
        self, q: Array, k: Array, v: Array, a: Array, b: Array, w: GateWeights, delta: Any, step: Step
    ) -> Array:
        """Compute the Gated DeltaNet recurrence (Yang et al., arXiv 2412.06464) along each row's ancestors in float32.

        q, k (T, Hk, Dk) before L2 normalization; v (T, Hv, Dv); a, b (T, Hv) -> (T, Hv, Dv).
        Value head h uses key head h % Hk, or h // (Hv / Hk) if the spec of `delta` is grouped.
        """

    # -- experts ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def route_softmax(self, logits: Array, top_k: int, scale: float | None = None) -> tuple[Array, Array]:
        """Choose experts by softmax of logits (T, E): ids and weights, (T, top_k) each.

        scale  factor on the probabilities, which are the weights; None: the weights of a row sum to 1
        """

    @abstractmethod
    def route_sigmoid(self, logits: Array, bias: Array, top_k: int, scale: float) -> tuple[Array, Array]:
        """Choose experts by sigmoid: logits (T, E), bias (E,) -> ids (T, top_k), weights (T, top_k) in float32.

        The chosen experts have the largest sigmoid(logits) + bias; their weights are the sigmoids without the bias,
        scaled to a sum of `scale`.
        """

    @abstractmethod
    def moe(
        self,
        x: Array,
        gate_up: Weight,
        down: Weight,
        ids: Array,
        weights: Array,
        biases: ExpertBiases | None = None,
    ) -> Array:
        """Compute the sum over the chosen experts of weight * down(silu(gate x) * up x), or that with `biases`.

        gate_up (E, 2 F, hidden), gate rows first; down (E, hidden, F); ids, weights (T, k) -> (T, hidden).
        """

    # -- sampling --------------------------------------------------------------------------------------------------

    @abstractmethod
    def sample(self, logits: Array, sampler: Sampler | Samplers) -> Array:
        """Choose the next token of each row of logits (T, vocab): (T,), on the device if possible.

        sampler  one for all rows, or Samplers for the rows of several sequences

        A row with NaN raises NotFiniteError: here if the sampler reads the row on the host, else when its token is
        read.
        """

    def run_greedy(self, fn: Callable[[Any, Any], Array], state: Any, step: Step) -> Array:
        """Run fn(state, step), which gives logits, and return the most probable token of each row, as `sample` does."""
        return self.sample(self.run(fn, state, step), GREEDY)

    def run_chains(
        self, fn: Callable[[Any, Any], Array], state: Any, step: Step, rows: int, first: int, count: int
    ) -> Array:
        """Run a draft's pass fn(state, step), which gives logits (T, vocab), and draft `count` tokens of each sequence.

        Returns each sequence's newest token and the most probable tokens after it, (n,) int32.

        rows   rows of each sequence, of which row 0 has the newest token
        first  row of which the logits are of the token after the newest; the next rows are of the tokens after that
        """
        best = self.read(self.top_k(self.run(fn, state, step), 1)[0])[: len(step)].reshape(-1, rows)
        newest = np.reshape(step.tokens, (-1, rows))[:, :1]
        return np.concatenate([newest, best[:, first : first + count]], axis=1).reshape(-1)

    def chooses(self, sampler: Sampler) -> bool:
        """Test whether `sample` chooses without copying the row to the host."""
        return sampler.is_argmax or (self.draws and not sampler.penalizes)

    # -- composed --------------------------------------------------------------------------------------------------

    def scope(self, layer: int, block: Callable[[Array], Array], x: Array) -> Array:
        """Return block(x), the output of a layer. Backends reset their arena here; drafts read hidden states here."""
        return block(x)

    def keep(self, x: Array) -> Array:
        """Return x in memory that later layers do not overwrite, for hidden states that are read after them."""
        return x

    def all_reduce(self, x: Array) -> Array:
        """Return the sum of the ranks' x (T, C), bitwise identical on all ranks; with one rank x itself."""
        return x

    def all_gather(self, x: Array, columns: int) -> Array:
        """Return the columns of all ranks' x (T, n) in rank order, (T, columns); x itself if it has all columns."""
        return x

    def concatenate(self, parts: Sequence[Array]) -> Array:
        """Return the rows of all parts, in order. Only backends that join steps implement this op."""
        raise BimetalError(f"the {self.name} backend serves one sequence per step")

    def write_kv(self, k: Array, v: Array, kv: Any, step: Step) -> None:
        """Write k (T, K, D) and v (T, K, D) to `kv` as attention would, for rows without queries."""
        self.attention(k, k, v, kv, step, 1.0)

    def block_sparse_attention(self, q: Array, k: Array, v: Array, kv: Any, step: Step, scale: float) -> Array:
        """Compute attention of a chain that may skip blocks of keys with little attention, as common.block_sparse does.

        Only for scoring a text: the skipped blocks depend on the backend and on later text. The default skips none.
        """
        return self.attention(q, k, v, kv, step, scale)

    def top_k(self, logits: Array, k: int) -> tuple[Array, Array]:
        """Return ids and log-probabilities, (T, k) each, of the k best tokens of each row of logits (T, vocab)."""
        return top_k(self.read(logits), k)

    def argmax_entropy(self, logits: Array, excluded: int) -> tuple[Array, Array]:
        """Return the best token of each row of logits (T, vocab), and the row's entropy, both without token `excluded`.

        Returns ids (T,) int32 and entropies (T,) float32 in nats, of the softmax at temperature 1.
        """
        return argmax_entropy(self.read(logits), excluded)

    def norm_rope(self, x: Array, weight: Array, positions: np.ndarray, rope: Rope, eps: float) -> Array:
        """Apply RMSNorm over each head, then rope, to x (T, heads, D)."""
        return self.rope(self.rms_norm(x, weight, eps), positions, rope)

    def gated_rms_norm(self, x: Array, weight: Array, z: Array, eps: float) -> Array:
        """Compute rms_norm(x, weight) * silu(z) of x and z (T, heads, D)."""
        return self.swiglu(z, self.rms_norm(x, weight, eps))

    def moe_ffn(self, x: Array, w: ExpertWeights, top_k: int, scale: float | None = None) -> Array:
        """Compute the sum of each row's `top_k` best experts and any shared expert: x (T, hidden) -> (T, hidden).

        scale  sum of the weights of a row's experts, if the router has a bias; factor on their probabilities, if it has
               none; None: the weights sum to 1
        """
        if isinstance(w.gate_up, Streamed):
            w.gate_up.prefetch()
        y = None if w.shared_gate_up is None else self._shared_expert(x, w)
        logits = self.linear(x, w.router)
        if w.biases is not None:
            logits = self.add(logits, w.biases.router)
        if w.bias is None:
            chosen = self.route_softmax(logits, top_k, scale)
        else:
            chosen = self.route_sigmoid(logits, w.bias, top_k, 1.0 if scale is None else scale)
        best = self.moe(x, w.gate_up, w.down, *chosen, w.biases)
        return best if y is None else self.add(best, y)

    def _shared_expert(self, x: Array, w: ExpertWeights) -> Array:
        y = self.linear(x, w.shared_gate_up)
        F = y.shape[-1] // 2
        y = self.linear(self.swiglu(y[:, :F], y[:, F:]), w.shared_down)
        return y if w.shared_gate is None else self.mul_sigmoid(y, self.linear(x, w.shared_gate))

    def delta_mixer(self, x: DeltaInputs, w: DeltaWeights, key_heads: int, conv: Any, delta: Any, step: Step) -> Array:
        """Apply convolution, gated delta rule and gated norm to the rows x: (T, Hv, Dv).

        The states are written when an op takes the result, or earlier.
        """
        T, Hv, Dv = x.z.shape
        keys = (x.qkv.shape[1] - Hv * Dv) // 2
        qkv = self.short_conv(x.qkv, w.taps, conv, step)
        q = qkv[:, :keys].reshape(T, key_heads, -1)
        k = qkv[:, keys : 2 * keys].reshape(T, key_heads, -1)
        v = qkv[:, 2 * keys :].reshape(T, Hv, Dv)
        o = self.gated_delta(q, k, v, x.a, x.b, w.gates, delta, step)
        return self.gated_rms_norm(o, w.norm, x.z, w.eps)
