"""The op contract: everything that a model may ask of a backend.

Models are plain functions over an `Ops`; they reshape and slice arrays, and leave arithmetic to these methods. The
meaning of each op is its NumPy twin in `common/reference.py`. Required ops are abstract, so a backend that lacks one
cannot be built; composed ops have a default here, and a backend overrides one only where a benchmark row shows why.

Letters: T rows (tokens of the step), H query heads, K key/value heads, D head size, E experts.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from common.errors import BimetalError
from common.expert_forms import ExpertForm, SlotMemory, Streamed
from common.experts import ExpertSupply
from common.sampling import Sampler, Samplers, argmax_entropy, top_k
from common.shards import ONE, Ranks
from common.step import Pool, State, Step
from common.storage import LayerSpec, RowSpec
from common.tensors import Tensor

Array = Any  # the backend's own array; models see its shape, reshape it and slice it, nothing else
Weight = Any  # opaque: dense or any block format

L2_EPS = 1e-6  # under the root, on the sum of squares: the q and k normalization of Gated DeltaNet
VECTOR_ITEM = 4  # bytes: every backend holds vectors in float32


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first 2 * len(frequencies) channels of a head, in half-split pairs (j, j + n).

    frequencies  radians per position of each pair, scaling already applied
    magnitude    factor on the rotated channels (YaRN's attention factor)
    """

    frequencies: tuple[float, ...]
    magnitude: float = 1.0


@dataclass(frozen=True)
class LayerSize:
    """Sizes of one layer's computation, which predict its workspace.

    mixer, ffn  numbers per row that enter and leave the matrices before and after the layer's second norm
    hidden      numbers per row of the residual stream
    heads       query heads of attention, 0 without
    expanded    numbers per past token to which latent attention expands keys and values, 0 without
    states      the layer's states
    """

    mixer: int
    ffn: int
    hidden: int
    heads: int
    expanded: int
    states: LayerSpec


def decoded_bytes(layer: LayerSize, tokens: int) -> int:
    """Bytes of a compressed cache's rows where a step decodes them all: float32, beside what the decoding takes."""
    rows = [s for s in layer.states.values() if isinstance(s, RowSpec) and s.is_packed]
    return sum(3 * 4 * s.rows(tokens) * s.numbers for s in rows)


class ExpertWeights(NamedTuple):
    """A feed-forward network of E experts and a shared expert, which every row takes.

    router          (E, hidden)
    gate_up, down   (E, 2 F, hidden), gate rows first, and (E, hidden, F)
    shared_gate_up  (2 F', hidden), of the shared expert, as shared_down (hidden, F')
    shared_gate     (1, hidden): the sigmoid of its product scales the shared expert's output; None: nothing does
    bias            (E,), added to the sigmoids by which experts are chosen; None: softmax chooses
    """

    router: Weight
    gate_up: Weight
    down: Weight
    shared_gate_up: Weight
    shared_down: Weight
    shared_gate: Weight | None = None
    bias: Array | None = None


class DeltaWeights(NamedTuple):
    """The vectors of a gated DeltaNet layer: of its convolution, its rule and its norm.

    taps            (C, n), as in `short_conv`
    decay, dt_bias  (Hv,), as in `gated_delta`
    norm            (Dv,), of the gated norm, with eps
    """

    taps: Array
    decay: Array
    dt_bias: Array
    norm: Array
    eps: float


class Ops(ABC):
    name: str  # "numpy", "mlx", "cuda"
    item_bytes: int  # of an activation, and of a cached key or value
    prefill_rows = 512  # of one prefill step: enough to fill the matrix units, little enough to answer Ctrl-C
    runs_ahead = False  # may a step be launched on a token that the host has not read yet?
    joins = False  # may a step have rows of several sequences: of a pool, or each with a state of its own?
    micro_batches = 1  # steps of different sequences that are computed at the same time, each on other devices
    replays = False  # is a step of few rows launched at once where its function has run before?
    draws = False  # does `sample` draw by chance without reading the logits?
    tree_rows: int | None = None  # most rows of a tree or a block, where there is a limit
    reserves = False  # does a state take the memory of its whole capacity at once?
    cache_pairs: frozenset[tuple[str, str]] = frozenset()  # (keys, values): formats of caches beside its own float type
    expert_supply: ExpertSupply | None = None  # what holds a mixture's experts where the backend has some in memory
    expert_vram = 0  # bytes that a mixture's experts take in all, where `held_expert_bytes` counts none of them
    ranks: Ranks = ONE  # this rank among those that share every layer, each with a part of its weights and states
    checks_scales = False  # are scales that are not finite refused here? Reading them once more takes its time

    # -- weights and states ----------------------------------------------------------------------------------------

    @abstractmethod
    def weight(self, *parts: Tensor) -> Weight:
        """A matrix (rows, columns) or experts (E, rows, columns), quantized as stored; parts are stacked by rows."""

    def expert_weight(self, *parts: Tensor) -> Weight:
        """The experts (E, rows, columns) of a mixture, as `weight`; a backend may hold some of them elsewhere."""
        return self.weight(*parts)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Weights that are made within can be used after it, and their tensors must last as long.

        Where `checks_scales`, its end raises BimetalError for a scale that is not finite, and `weight` need not.
        """
        yield

    def load(self, make: Callable[["Ops"], Any]) -> Any:
        """The model that `make` makes on these ops; where one process has several ranks, of the part of each."""
        return make(self)

    def load_beside(self, model: Any, make: Callable[[Any], Any]) -> Any:
        """Make a draft and `model`, which `load` gave, by `make`; where one process has several ranks, of each."""
        return make(model)

    @abstractmethod
    def vector(self, tensor: Tensor) -> Array:
        """A small dense tensor (norm weights, conv taps, decay), in at least the precision of the activations."""

    def at(self, layer: int) -> AbstractContextManager[None]:
        """Within it, `weight` and `vector` load for `layer`, counted as in a state: devices may share the layers."""
        return nullcontext()

    def keeps(self, layer: int | None) -> bool:
        """Whether this process loads the weights of `layer`, None for those outside; others may hold some."""
        return True

    @abstractmethod
    def weight_bytes(self, weight: Weight) -> int:
        """Bytes that `weight` occupies on the device."""

    @abstractmethod
    def holds(self, stored_type: str) -> str:
        """Describe how a matrix stored as `stored_type` is held: "as stored", "expanded to float32"."""

    @abstractmethod
    def new_state(self, spec: Sequence[LayerSpec], capacity: int) -> State:
        """An empty state for one sequence of at most `capacity` tokens."""

    def new_pool(self, spec: Sequence[LayerSpec], slots: int, capacity: int, tokens: int | None = None) -> Pool | None:
        """States of up to `slots` sequences, over which one step runs at once; None where each has a state of its own.

        tokens  that the sequences may hold together, at least a whole context; None: `capacity` each

        A step over the pool says by `slots` whose rows it has.
        """
        return None

    # -- experts that are read while a model runs ---------------------------------------------------------------------

    def expert_bytes(self, form: ExpertForm) -> int:
        """Bytes that an expert of this form takes in a slot. Raises BimetalError where experts are not streamed."""
        raise BimetalError(f"the {self.name} backend does not stream experts from files; mlx and numpy do")

    def expert_memory(self, forms: Mapping[int, ExpertForm], slots: Mapping[Hashable, int]) -> SlotMemory:
        """Memory for so many slots of each `ExpertForm.kind`, for layers whose experts have `forms`."""
        raise BimetalError(f"the {self.name} backend does not stream experts from files; mlx and numpy do")

    # -- what a model will take, from its types and shapes alone ----------------------------------------------------

    def held_bytes(self, *parts: Tensor) -> int:
        """Bytes that `weight(*parts)` will occupy; looks at types and shapes, not at data."""
        raise BimetalError(f"the {self.name} backend does not predict what a model takes")

    def held_expert_bytes(self, *parts: Tensor) -> int:
        """Bytes that `expert_weight(*parts)` will occupy."""
        return self.held_bytes(*parts)

    def held_state_bytes(self, spec: Sequence[LayerSpec], tokens: int, rows: int) -> int:
        """Bytes that a state of `spec` occupies once `tokens` tokens have been read in steps of `rows`."""
        raise BimetalError(f"the {self.name} backend does not predict what a model takes")

    def held_pool_bytes(self, spec: Sequence[LayerSpec], slots: int, capacity: int, tokens: int, rows: int) -> int:
        """Bytes of `slots` sequences of up to `capacity` tokens that share memory for `tokens`, as `new_pool` has them.

        rows  of a prefill step. Where there is no pool each sequence takes what it can hold.
        """
        return slots * self.held_state_bytes(spec, capacity, rows)

    def work_bytes(self, layers: Sequence[LayerSize], tokens: int, rows: int) -> int:
        """Most bytes that such a reading takes beside the weights and the state it ends with."""
        raise BimetalError(f"the {self.name} backend does not predict what a model takes")

    def free_bytes(self) -> tuple[int, str]:
        """Bytes that weights, states and work may take on this machine now, and what sets that limit."""
        raise BimetalError(f"the {self.name} backend does not predict what a model takes")

    def room(self, layers: int) -> list[tuple[int, Sequence[int]]]:
        """Free bytes of each device, and the numbers of the layers that it holds."""
        return [(self.free_bytes()[0], range(layers))]

    # -- rows ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def embed(self, table: Weight, tokens: Array) -> Array:
        """tokens (T,) -> (T, hidden)"""

    @abstractmethod
    def linear(self, x: Array, w: Weight) -> Array:
        """x (T, columns), w (rows, columns) -> (T, rows)"""

    @abstractmethod
    def head_linear(self, x: Array, w: Weight) -> Array:
        """Each head by its own matrix: x (T, H, columns), w (H, rows, columns) -> (T, H, rows)"""

    @abstractmethod
    def rms_norm(self, x: Array, weight: Array | None, eps: float) -> Array:
        """x / sqrt(mean(x², last axis) + eps) * weight, computed in float32"""

    @abstractmethod
    def rope(self, x: Array, positions: np.ndarray, rope: Rope) -> Array:
        """Rotate x (T, heads, D) by `positions` (T,)."""

    @abstractmethod
    def add(self, x: Array, y: Array) -> Array:
        """x + y, of the same shape; y (1, n) is added to every row of x (T, n)"""

    @abstractmethod
    def swiglu(self, gate: Array, up: Array) -> Array:
        """silu(gate) * up"""

    @abstractmethod
    def mul_sigmoid(self, x: Array, gate: Array) -> Array:
        """x * sigmoid(gate); a gate with a trailing axis of 1 scales whole rows"""

    @abstractmethod
    def mul_softplus(self, x: Array, gate: Array) -> Array:
        """x * log(1 + exp(gate)), in float32; a gate with a trailing axis of 1 scales whole rows"""

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
    ) -> Array:
        """Grouped-query attention over the committed past and the step's visible rows.

        q (T, H, D), k (T, K, D), v (T, K, Dv) -> (T, H, Dv); query head h reads KV head h // (H // K).
        A window of n hides positions at or below the row's own minus n, but for the first ones that the state keeps
        for good.
        `causal` hides later rows from the rows of a block.
        """

    @abstractmethod
    def latent_attention(
        self, q_latent: Array, q_rope: Array, latent: Array, k_rope: Array, kv: Any, step: Step, scale: float
    ) -> Array:
        """Attention of all heads over one key per token, latent || k_rope, whose latent part is also the value.

        q_latent (T, H, R), q_rope (T, H, P), latent (T, R), k_rope (T, P) -> (T, H, R). Multi-head latent attention
        with the matrices that expand keys and values moved to the query and the output (DeepSeek-V2, arXiv 2405.04434).
        """

    @abstractmethod
    def expanded_attention(
        self,
        q_nope: Array,
        q_rope: Array,
        latent: Array,
        k_rope: Array,
        k_up: Weight,
        v_up: Weight,
        kv: Any,
        step: Step,
        scale: float,
    ) -> Array:
        """Multi-head latent attention as trained: a head's key is k_up.T latent || k_rope, its value v_up latent.

        q_nope (T, H, N), q_rope (T, H, P), latent (T, R), k_rope (T, P), k_up (H, R, N), v_up (H, V, R) -> (T, H, V).
        The state is that of `latent_attention`; keys and values live only as long as the op.
        """

    @abstractmethod
    def short_conv(self, x: Array, taps: Array, conv: Any, step: Step) -> Array:
        """silu of the causal depthwise convolution of x (T, C) with taps (C, n), the last tap on the row itself.

        A row's window is its own ancestors, continued into the committed past.
        """

    @abstractmethod
    def parent_rows(self, x: Array, last: Any, step: Step) -> Array:
        """Return the row that each row of x (T, C) continues: (T, C); the committed past's last, zeros before any.

        The state `last` is that of a short convolution of two taps.
        """

    @abstractmethod
    def block_conv(self, x: Array, own: Array, base: Array) -> Array:
        """The causal convolution of the rows of a block, each with taps of its own: x (T, C) -> (T, C).

        own (T, n * G), base (n, C): row t, channel c is the sum over i of (own[t, i * G + c // (C // G)] + base[i, c])
        times x[t - i, c], where rows before the first are zero.
        """

    @abstractmethod
    def gated_delta(
        self, q: Array, k: Array, v: Array, a: Array, b: Array, decay: Array, dt_bias: Array, delta: Any, step: Step
    ) -> Array:
        """Gated DeltaNet recurrence along each row's ancestors (Yang et al., arXiv 2412.06464), in float32.

        q, k (T, Hk, Dk) before L2 normalization; v (T, Hv, Dv); a, b (T, Hv); decay = -exp(A_log) and dt_bias (Hv,)
        -> (T, Hv, Dv). Value head h uses key head h % Hk.
        """

    # -- experts ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def route_softmax(self, logits: Array, top_k: int) -> tuple[Array, Array]:
        """logits (T, E) -> ids (T, top_k), weights (T, top_k): softmax over all experts, the best renormalized to 1"""

    @abstractmethod
    def route_sigmoid(self, logits: Array, bias: Array, top_k: int, scale: float) -> tuple[Array, Array]:
        """logits (T, E), bias (E,) -> ids (T, top_k), weights (T, top_k), in float32.

        The best by sigmoid(logits) + bias; their sigmoids, without the bias, scaled to a sum of `scale`.
        """

    @abstractmethod
    def moe(self, x: Array, gate_up: Weight, down: Weight, ids: Array, weights: Array) -> Array:
        """Sum over the chosen experts of weight * down(silu(gate x) * up x).

        gate_up (E, 2 F, hidden), gate rows first; down (E, hidden, F); ids, weights (T, k) -> (T, hidden)
        """

    # -- sampling --------------------------------------------------------------------------------------------------

    @abstractmethod
    def sample(self, logits: Array, sampler: Sampler | Samplers) -> Array:
        """The next token of each row of logits (T, vocab): (T,), still on the device where that is possible.

        sampler  one for all rows; or Samplers, of sequences whose rows are chosen in one call

        A row that holds NaN raises NotFiniteError: here where one sampler reads it on the host, else once its token is
        read.
        """

    def chooses(self, sampler: Sampler) -> bool:
        """Test whether `sample` may choose without showing the row to the host."""
        return sampler.is_argmax or (self.draws and not sampler.penalizes)

    @abstractmethod
    def read(self, x: Array) -> np.ndarray:
        """x on the host, floats as float32. Decoders call this, models never."""

    def read_all(self, *xs: Array) -> tuple[np.ndarray, ...]:
        """Each of them, after one wait for the device where that takes time."""
        return tuple(self.read(x) for x in xs)

    @abstractmethod
    def peak_bytes(self) -> int:
        """Most memory that this process has held, in bytes: on the device, or resident where memory is shared."""

    @property
    def launches(self) -> int:
        """Kernels so far, where the backend counts them."""
        return 0

    def copy_bandwidth(self) -> float:
        """Bytes per second of a large copy in the memory that holds the weights, read and written bytes counted."""
        source = np.ones(2**27, np.uint8)
        target = np.empty_like(source)
        best = float("inf")
        for _ in range(5):
            started = time.perf_counter()
            np.copyto(target, source)
            best = min(best, time.perf_counter() - started)
        return 2 * source.nbytes / best

    # -- composed --------------------------------------------------------------------------------------------------

    def run(self, fn: Callable[[State, Step], Array], state: State, step: Step, kept: slice | None = None) -> Array:
        """fn(state, step), kept by the caller for as long as it likes.

        A backend that captures graphs replays one per (fn, state, rows bucket), for as long as fn lives: build fn once.
        Ops inside receive the step that the backend hands to fn, which may live on the device.

        kept  rows of the result that the caller needs; None: all
        """
        out = fn(state, step)
        return out if kept is None else out[kept]

    def scope(self, layer: int, block: Callable[[Array], Array], x: Array) -> Array:
        """block(x), around each layer: where a backend resets its arena and a tap reads hidden states."""
        return block(x)

    def keep(self, x: Array) -> Array:
        """x, in memory that the layers after it leave alone: for what a tap takes out of `scope`."""
        return x

    def all_reduce(self, x: Array) -> Array:
        """The sum of the ranks' x (T, C), equal to the bit on all of them; of one rank x itself."""
        return x

    def all_gather(self, x: Array, columns: int) -> Array:
        """The columns of all ranks' x (T, n), in the order of the ranks, (T, columns); x itself where it has all."""
        return x

    def concatenate(self, parts: Sequence[Array]) -> Array:
        """The rows of all parts, in their order; of backends that join steps."""
        raise BimetalError(f"the {self.name} backend serves one sequence per step")

    def write_kv(self, k: Array, v: Array, kv: Any, step: Step) -> None:
        """Leave k (T, K, D) and v (T, K, D) in `kv` as attention would, for rows that ask nothing."""
        self.attention(k, k, v, kv, step, 1.0)

    def block_sparse_attention(self, q: Array, k: Array, v: Array, kv: Any, step: Step, scale: float) -> Array:
        """Attention of a chain that may leave out keys to which rows attend little, as common.block_sparse does.

        Only to score a text, since what is left out depends on the backend and on the text after a row; here nothing.
        """
        return self.attention(q, k, v, kv, step, scale)

    def top_k(self, logits: Array, k: int) -> tuple[Array, Array]:
        """The k likeliest tokens of each row of logits (T, vocab), best first: ids and log-probabilities, (T, k)."""
        return top_k(self.read(logits), k)

    def argmax_entropy(self, logits: Array, excluded: int) -> tuple[Array, Array]:
        """The likeliest token but `excluded` of each row of logits (T, vocab), and the row's entropy without it.

        Returns ids (T,) int32 and entropies (T,) float32 in nats, of the softmax at temperature 1.
        """
        return argmax_entropy(self.read(logits), excluded)

    def norm_rope(self, x: Array, weight: Array, positions: np.ndarray, rope: Rope, eps: float) -> Array:
        """RMSNorm over the head, then rope: x (T, heads, D)"""
        return self.rope(self.rms_norm(x, weight, eps), positions, rope)

    def gated_rms_norm(self, x: Array, weight: Array, z: Array, eps: float) -> Array:
        """rms_norm(x, weight) * silu(z), x and z (T, heads, D)"""
        return self.swiglu(z, self.rms_norm(x, weight, eps))

    def moe_ffn(self, x: Array, w: ExpertWeights, top_k: int, scale: float = 1.0) -> Array:
        """Add up the `top_k` best experts of each row and the shared expert: x (T, hidden) -> (T, hidden)

        scale  sum of the weights of a row's experts, where the router has a bias
        """
        if isinstance(w.gate_up, Streamed):
            w.gate_up.prefetch()
        y = self.linear(x, w.shared_gate_up)
        F = y.shape[-1] // 2
        y = self.linear(self.swiglu(y[:, :F], y[:, F:]), w.shared_down)
        if w.shared_gate is not None:
            y = self.mul_sigmoid(y, self.linear(x, w.shared_gate))
        logits = self.linear(x, w.router)
        softmax = w.bias is None
        chosen = self.route_softmax(logits, top_k) if softmax else self.route_sigmoid(logits, w.bias, top_k, scale)
        return self.add(self.moe(x, w.gate_up, w.down, *chosen), y)

    def delta_mixer(
        self,
        qkv: Array,
        z: Array,
        a: Array,
        b: Array,
        w: DeltaWeights,
        key_heads: int,
        conv: Any,
        delta: Any,
        step: Step,
    ) -> Array:
        """Short convolution, gated delta rule, gated norm: qkv (T, 2 Hk Dk + Hv Dv), z (T, Hv, Dv) -> (T, Hv, Dv)

        The states advance at the latest when an op takes the result.
        """
        T, Hv, Dv = z.shape
        keys = (qkv.shape[1] - Hv * Dv) // 2
        qkv = self.short_conv(qkv, w.taps, conv, step)
        q = qkv[:, :keys].reshape(T, key_heads, -1)
        k = qkv[:, keys : 2 * keys].reshape(T, key_heads, -1)
        v = qkv[:, 2 * keys :].reshape(T, Hv, Dv)
        o = self.gated_delta(q, k, v, a, b, w.decay, w.dt_bias, delta, step)
        return self.gated_rms_norm(o, w.norm, z, w.eps)
