"""Parts that model files share: rope settings, dense FFN, experts and their router, the loop over layers, head."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from common.adapted import linear
from common.checkpoint import Checkpoint
from common.config import Keys
from common.errors import BimetalError
from common.ops import Array, ExpertWeights, Ops, Rope
from common.quants import dequantize
from common.shards import ONE, Ranks, Shard, by_columns, by_expert_rows, by_rows
from common.step import State, Step
from common.storage import KVSpec, LayerSpec
from common.tensors import Tensor, same_axes
from common.weights import ExpertMatrix, Fix, Matrix, Names, Stored, Table, Vector, exchanged

Fixes = Mapping[str, Fix]  # by dialect
NO_FIX: Fixes = {}
RowFn = Callable[[Array], Array]  # of x (T, hidden)


@dataclass(frozen=True)
class Experts:
    """Experts chosen by a router, and shared ones of `shared_ffn` channels in all."""

    count: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    scale: float = 1.0  # sum of the chosen experts' weights, or factor on their probabilities

    def __post_init__(self) -> None:
        if self.top_k > self.count:
            raise BimetalError(f"the configuration chooses {self.top_k} of {self.count} experts")

    def for_rank(self, ranks: Ranks) -> "Experts":
        """Return all experts, with this rank's channels of each."""
        ffn = ranks.divide(self.ffn, "channels of an expert")
        return replace(self, ffn=ffn, shared_ffn=ranks.divide(self.shared_ffn, "channels of the shared expert"))


@dataclass(frozen=True)
class MtpNames:
    """Names of the tensors of a multi-token-prediction block in a model's files.

    layer     prefix of the names of the block's own layer
    fc        the matrix (hidden, 2 hidden) over the normed embedding and the normed hidden state, in that order
    norm      of the block's output
    prefixes  what all names begin with, {} being the number of the layer
    is_alone  whether the prefix is the same for every number
    """

    layer: str
    fc: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    embed: str
    head: str
    prefixes: tuple[str, ...] = ("blk.{}.",)
    is_alone: bool = False


def swiglu_ffn(ops: Ops, w: Any, x: Array) -> Array:
    """Compute down(silu(gate x) * up x) of x (T, hidden) with this rank's channels; w.gate_up stacks both by rows."""
    y = linear(ops, x, w.gate_up)
    F = y.shape[-1] // 2
    return linear(ops, ops.swiglu(y[:, :F], y[:, F:]), w.down)


def ffn_weights(tensor: Names, hidden: int, ffn: int, ranks: Ranks = ONE) -> Table:
    """List the weights of a dense network with `ffn` channels on this rank."""
    channels = ranks.segment(ffn)
    return {
        "gate_up": Matrix(
            tensor("mlp.gate_proj.weight", "ffn_gate.weight", (ffn, hidden), shard=by_rows(channels)),
            tensor("mlp.up_proj.weight", "ffn_up.weight", (ffn, hidden), shard=by_rows(channels)),
        ),
        "down": Matrix(tensor("mlp.down_proj.weight", "ffn_down.weight", (hidden, ffn), shard=by_columns(channels))),
    }


def sigmoid_moe(ops: Ops, e: Experts, w: Any, x: Array) -> Array:
    """Return the best experts of each row, plus the shared ones as they are, of this rank's channels.

    x (T, hidden) -> (T, hidden)
    """
    matrices = w.router, w.experts_gate_up, w.experts_down, w.gate_up, w.down
    return ops.moe_ffn(x, ExpertWeights(*matrices, bias=w.router_bias), e.top_k, e.scale)


def probability_moe(ops: Ops, e: Experts, w: Any, x: Array) -> Array:
    """Return the best experts of each row by a softmax, plus the shared ones as they are, of this rank's channels.

    Their weights are e.scale times their probabilities among all experts: x (T, hidden) -> (T, hidden).
    """
    matrices = w.router, w.experts_gate_up, w.experts_down, w.gate_up, w.down
    return ops.moe_ffn(x, ExpertWeights(*matrices), e.top_k, e.scale)


def probability_moe_weights(tensor: Names, hidden: int, e: Experts, ranks: Ranks = ONE) -> Table:
    """List the weights of a mixture with a softmax router and with shared experts."""
    return {**routed_weights(tensor, hidden, e, ranks), **shared_weights(tensor, hidden, e.shared_ffn, ranks)}


def sigmoid_moe_weights(tensor: Names, hidden: int, e: Experts, ranks: Ranks = ONE) -> Table:
    """List the weights of a mixture with a sigmoid router, whose scores have biases, and with shared experts."""
    bias = _first(tensor, "mlp.gate.e_score_correction_bias", "mlp.experts.e_score_correction_bias")
    return {
        **routed_weights(tensor, hidden, e, ranks),
        "router_bias": Vector(tensor(bias, "exp_probs_b.bias", (e.count,))),
        **shared_weights(tensor, hidden, e.shared_ffn, ranks),
    }


def shared_weights(tensor: Names, hidden: int, channels: int, ranks: Ranks = ONE) -> Table:
    """List the weights of shared experts, which have `channels` in all on this rank."""
    of_rank = ranks.segment(channels)
    is_one = any(tensor.has(f"mlp.shared_expert.{part}_proj.weight") for part in ("gate", "up", "down"))
    name = "mlp.shared_expert" if is_one else "mlp.shared_experts"
    inner, outer = (channels, hidden), (hidden, channels)
    return {
        "gate_up": Matrix(
            tensor(f"{name}.gate_proj.weight", "ffn_gate_shexp.weight", inner, shard=by_rows(of_rank)),
            tensor(f"{name}.up_proj.weight", "ffn_up_shexp.weight", inner, shard=by_rows(of_rank)),
        ),
        "down": Matrix(tensor(f"{name}.down_proj.weight", "ffn_down_shexp.weight", outer, shard=by_columns(of_rank))),
    }


def softmax_moe(ops: Ops, e: Experts, w: Any, x: Array) -> Array:
    """Return the best experts of each row by a softmax, of this rank's channels: x (T, hidden) -> (T, hidden)."""
    return ops.moe_ffn(x, ExpertWeights(w.router, w.experts_gate_up, w.experts_down), e.top_k)


def routed_weights(tensor: Names, hidden: int, e: Experts, ranks: Ranks = ONE) -> Table:
    """List a router and its experts, named as in training, transformers or mlx-lm, stacked or one tensor per expert.

    A rank holds all experts, each with `e.ffn` of its channels. Stacks of Qwen3-VL have rows and columns exchanged.
    """
    channels = ranks.segment(e.ffn)

    def experts(part: str, gguf: str, shape: tuple[int, ...], shard: Shard | None) -> Stored:
        stacks = (f"mlp.switch_mlp.{part}.weight", f"mlp.experts.{part}")
        if tensor.dialect == "gguf" or any(map(tensor.has, stacks)):
            return tensor(_first(tensor, *stacks), gguf, shape, shard=shard)
        if e.count > len(tensor.tensors):
            raise BimetalError(
                f"the configuration states {e.count} experts per layer; the files have {len(tensor.tensors)} tensors"
            )
        names = tuple(f"{tensor.prefix}mlp.experts.{i}.{part}.weight" for i in range(e.count))
        return Stored(names, shape, shard=shard)

    E, F = e.count, e.ffn
    down = experts("down_proj", "ffn_down_exps.weight", (E, hidden, F), by_columns(channels))
    if _is_exchanged(tensor, hidden):
        rows, columns, name = by_expert_rows(channels), by_columns(channels, channels), tensor.prefix + "mlp.experts."
        gate_up = ExpertMatrix(
            Stored((name + "gate_up_proj",), (E, 2 * F, hidden), exchanged, (E, hidden, 2 * F), columns)
        )
        down = Stored((name + "down_proj",), (E, hidden, F), exchanged, (E, F, hidden), rows)
    elif tensor.has("mlp.experts.gate_up_proj") or tensor.has("ffn_gate_up_exps.weight"):
        both = by_expert_rows(channels, channels)
        gate_up = ExpertMatrix(
            tensor("mlp.experts.gate_up_proj", "ffn_gate_up_exps.weight", (E, 2 * F, hidden), shard=both)
        )
    else:
        gate_up = ExpertMatrix(
            experts("gate_proj", "ffn_gate_exps.weight", (E, F, hidden), by_expert_rows(channels)),
            experts("up_proj", "ffn_up_exps.weight", (E, F, hidden), by_expert_rows(channels)),
        )
    router = _first(tensor, "mlp.gate.weight", "mlp.gate.proj.weight")
    return {
        "router": Matrix(tensor(router, "ffn_gate_inp.weight", (E, hidden))),
        "experts_gate_up": gate_up,
        "experts_down": ExpertMatrix(down),
    }


def _is_exchanged(tensor: Names, hidden: int) -> bool:
    """Test whether stacks of experts have rows and columns exchanged, by the shape of one, as transformers does."""
    down = "mlp.experts.down_proj"
    shape = tensor.tensors[tensor.prefix + down].shape if tensor.has(down) else ()
    return len(shape) == 3 and shape[2] == hidden != shape[1]


def _first(tensor: Names, *names: str) -> str:
    """Return the first of the names that a tensor has, else the first."""
    return next((name for name in names if tensor.has(name)), names[0])


def top_weights(c: Any, tensor: Names, base: str = "model.", head: Names | None = None, fix: Fixes = NO_FIX) -> Table:
    """List the embedding, the last norm and the head of a model of configuration `c`.

    base  prefix of the first two names in folders
    head  names of the tensor of the head; None: `tensor`
    fix   of the norm, by dialect
    """
    embed = tensor(base + "embed_tokens.weight", "token_embd.weight", (c.vocab, c.hidden))
    own = (head or tensor)("lm_head.weight", "output.weight", (c.vocab, c.hidden))
    norm = Vector(tensor(base + "norm.weight", "output_norm.weight", (c.hidden,), fix))
    return {"embed": Matrix(embed), "norm": norm, "head": _head_weight(c, embed, own)}


def _head_weight(c: Any, embed: Stored, head: Stored) -> Matrix | None:
    """Describe this rank's rows of the head of a model of configuration `c`; None if the whole embedding is the head.

    embed, head  places in the files of the embedding, and of a head that is not tied to it
    """
    stored, rows = embed if c.tied else head, c.ranks.head_rows(c.vocab)
    if rows < c.vocab:
        return Matrix(replace(stored, shape=(rows, c.hidden), shard=by_rows(c.ranks.segment(rows))))
    return None if c.tied else Matrix(stored)


def through(
    block: Callable[..., Array],
    ops: Ops,
    c: Any,
    w: Any,
    state: State,
    step: Step,
    rows: slice = slice(None),
    layers: range | None = None,
) -> Array:
    """Compute layers; return the logits (n, vocab) of `rows`, or if more layers follow, the output (T, hidden).

    block   function of one layer, called with (ops, c, its weights, state, step, its number, rows, x), which returns
            `rows` of its output
    layers  layers to compute, with step.hidden as input unless they begin with layer 0; None: all
    """
    count = len(w.layers)
    layers = range(count) if layers is None else layers
    x = step.hidden if layers.start else embedded(ops, c, w, step.tokens)
    for i in layers:
        needed = rows if i + 1 == count else slice(None)  # nothing after the last mixer mixes rows
        x = ops.scope(i, partial(block, ops, c, w.layers[i], state, step, i, needed), x)
    return head(ops, c, w, x) if layers.stop == count else ops.keep(x)


def embedded(ops: Ops, c: Any, w: Any, tokens: Array) -> Array:
    """Return the input of the first layer, (T, hidden): rows of the embedding, scaled if `c` has a scale for it."""
    x, factor = ops.embed(w.embed, tokens), getattr(c, "embedding_scale", 1.0)
    return x if factor == 1 else ops.scale(x, factor)


def head(ops: Ops, c: Any, w: Any, x: Array) -> Array:
    """Return the logits (n, vocab) of the last layer's output x (n, hidden)."""
    return head_product(ops, c, w, ops.rms_norm(x, w.norm, c.eps))


def head_product(ops: Ops, c: Any, w: Any, x: Array) -> Array:
    """Return the logits (n, vocab) of normed x (n, hidden), whole on every rank, scaled if `c` has a scale for them.

    Without a head the embedding is it.
    """
    logits, factor = linear(ops, x, w.embed if w.head is None else w.head), getattr(c, "logit_scale", 1.0)
    return ops.all_gather(logits if factor == 1 else ops.keep(ops.scale(logits, factor)), c.vocab)


KINDS = ("full_attention", "sliding_attention")  # of layers, as config.json names them


def head_shares(c: Any, ranks: Ranks) -> dict[str, Any]:
    """Return what one rank changes in a configuration: heads, kv_heads, and the ranks that share each."""
    kv_ranks = ranks.holding(c.kv_heads, "KV heads")
    heads = ranks.divide(c.heads, "heads")
    return {"heads": heads, "kv_heads": c.kv_heads // kv_ranks.size, "ranks": ranks, "kv_ranks": kv_ranks}


def sliding_spec(c: Any) -> list[LayerSpec]:
    """List what each layer stores: keys and values of all tokens, or of a window where `is_sliding` is true."""
    full: LayerSpec = {"kv": KVSpec(c.kv_heads, c.head_dim, c.head_dim)}
    sliding: LayerSpec = {"kv": KVSpec(c.kv_heads, c.head_dim, c.head_dim, c.window)}
    return [sliding if slides else full for slides in c.is_sliding]


def hf_sliding(keys: Keys, layers: int, period: int) -> tuple[bool, ...]:
    """Return for each layer whether it has a window: as layer_types says, or all but the last of each period."""
    kinds = keys.read("layer_types", list, [KINDS[(i + 1) % period > 0] for i in range(layers)])
    if len(kinds) != layers or any(kind not in KINDS for kind in kinds):
        raise BimetalError(f"{keys.where}: layer_types must name {' or '.join(KINDS)} for {layers} layers")
    return tuple(kind == "sliding_attention" for kind in kinds)


def gguf_sliding(keys: Keys, layers: int, window: int, period: int) -> tuple[bool, ...]:
    """Return for each layer whether it has a window, from a list or from a period, whose last layer is full.

    period  that of files that state neither
    """
    key = "attention.sliding_window_pattern"
    pattern = keys.get(key)
    if not isinstance(pattern, list):
        period = keys.size(key, period)
        pattern = [(i + 1) % period > 0 for i in range(layers)]
    if len(pattern) < layers:
        raise BimetalError(f"{keys.where}: {keys.prefix}{key} does not cover {layers} layers")
    return tuple(window > 0 and bool(slides) for slides in pattern[:layers])


ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "factor"}
ROPE_KEYS |= {"original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}  # llama3
ROPE_KEYS |= {"beta_fast", "beta_slow", "attention_factor", "truncate"}  # yarn


def check_sizes(checkpoint: Checkpoint, layers: int, heads: int, kv_heads: int, *rows: int) -> None:
    """Refuse sizes that the file's tensors cannot have, before memory of this size is allocated."""
    if heads % kv_heads:
        raise BimetalError(f"{checkpoint.path}: {kv_heads} key/value heads do not divide {heads} heads")
    if layers > len(checkpoint.tensors):
        raise BimetalError(f"{checkpoint.path} says it has {layers} layers, and has {len(checkpoint.tensors)} tensors")
    most = max((math.prod(tensor.shape) for tensor in checkpoint.tensors.values()), default=0)
    if max(rows) > most:
        raise BimetalError(
            f"{checkpoint.path} says that a tensor has {max(rows)} rows; its largest has {most} elements"
        )


SIZES = {  # hidden size, heads, KV heads and head size, by the format of the file
    "safetensors": ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    "gguf": ("embedding_length", "attention.head_count", "attention.head_count_kv", "attention.key_length"),
}


def head_sizes(checkpoint: Checkpoint, keys: Keys, layers: int) -> dict[str, Any]:
    """Read fields of a configuration: the hidden size and the heads of grouped-query attention in each of `layers`.

    If the file does not state them, there are as many KV heads as heads, and the head size is hidden / heads.
    """
    hidden_key, heads_key, kv_key, dim_key = SIZES[checkpoint.format]
    hidden, heads = keys.size(hidden_key), keys.size(heads_key)
    kv_heads, head_dim = keys.size(kv_key, heads), keys.size(dim_key, max(hidden // heads, 1))
    check_sizes(checkpoint, layers, heads, kv_heads, heads * head_dim)
    if checkpoint.format == "gguf":
        keys.expect("attention.value_length", head_dim)
    return {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}


def hf_rope(keys: Keys, dim: int, default_theta: float = 10000.0) -> Rope:
    """Read the rope of `dim` channels from config.json: rope_parameters, or the older rope_theta and rope_scaling."""
    theta = keys.positive("rope_parameters.rope_theta", keys.positive("rope_theta", default_theta))
    _check_rope(keys.where, theta, dim)
    group = "rope_parameters" if keys.read("rope_parameters", dict, {}) else "rope_scaling"
    if unknown := sorted(keys.read(group, dict, {}).keys() - ROPE_KEYS):
        raise BimetalError(f"{keys.where}: {group}.{unknown[0]} is not supported")
    kind = keys.get(f"{group}.rope_type") or keys.get(f"{group}.type") or "default"
    if kind in ("default", "mrope"):
        return Rope(_frequencies(theta, dim))
    if kind == "linear":
        return Rope(tuple(f / keys.positive(f"{group}.factor") for f in _frequencies(theta, dim)))
    if kind == "llama3":
        return Rope(
            _llama3(
                _frequencies(theta, dim),
                keys.positive(f"{group}.factor"),
                keys.positive(f"{group}.low_freq_factor"),
                keys.positive(f"{group}.high_freq_factor"),
                keys.size(f"{group}.original_max_position_embeddings"),
            )
        )
    if kind == "yarn":
        original = keys.size(f"{group}.original_max_position_embeddings", keys.size("max_position_embeddings", 1))
        factor = keys.positive(f"{group}.factor")
        fast = keys.positive(f"{group}.beta_fast", 32.0)
        slow = keys.positive(f"{group}.beta_slow", 1.0)
        truncates = keys.read(f"{group}.truncate", bool, True)
        # used as it is: llama.cpp multiplies the attention factor of a GGUF by the derived one (KL 0.94)
        magnitude = keys.positive(f"{group}.attention_factor", yarn_magnitude(factor))
        return Rope(_yarn(theta, dim, factor, original, (fast, slow), truncates), magnitude)
    raise BimetalError(f"{keys.where}: rope type {kind!r}; supported: default, linear, llama3, yarn")


def gguf_rope(
    keys: Keys, dim: int, factors: Tensor | None, default_theta: float = 10000.0, truncates: bool = True
) -> Rope:
    """Read the rope of `dim` channels from GGUF metadata; `factors`: rope_freqs.weight, divisors per pair.

    truncates  whether YaRN's ramp begins and ends at whole pairs, which GGUF files do not state
    """
    theta = keys.positive("rope.freq_base", default_theta)
    _check_rope(keys.where, theta, dim)
    if keys.get("rope.dimension_count") not in (None, dim):
        raise BimetalError(f"{keys.where}: rope.dimension_count is {keys.get('rope.dimension_count')}, expected {dim}")
    frequencies = _frequencies(theta, dim)
    if factors is not None:
        divisors = dequantize(factors).ravel()
        if not same_axes(factors.shape, (dim // 2,)) or not np.all(np.isfinite(divisors) & (divisors > 0)):
            raise BimetalError(f"{factors.name}: shape {factors.shape}, expected {dim // 2} finite divisors above 0")
        frequencies = tuple(f / float(d) for f, d in zip(frequencies, divisors, strict=True))
    kind = keys.get("rope.scaling.type") or "none"
    if kind == "none":
        return Rope(frequencies)
    factor = keys.positive("rope.scaling.factor")
    if kind == "linear":
        return Rope(tuple(f / factor for f in frequencies))
    if kind == "yarn":
        original = keys.size("rope.scaling.original_context_length", keys.size("context_length", 1))
        fast = keys.positive("rope.scaling.yarn_beta_fast", 32.0)
        slow = keys.positive("rope.scaling.yarn_beta_slow", 1.0)
        for key in ("attn_factor", "yarn_ext_factor"):
            keys.expect(f"rope.scaling.{key}", 1.0)
        magnitude = yarn_magnitude(factor)
        if not math.isclose(keys.positive("rope.scaling.yarn_attn_factor", 1.0), magnitude, rel_tol=1e-6):
            keys.expect("rope.scaling.yarn_attn_factor", 1.0)  # llama.cpp replaces it by the derived one
        return Rope(_yarn(theta, dim, factor, original, (fast, slow), truncates), magnitude)
    raise BimetalError(f"{keys.where}: rope.scaling.type {kind!r}; supported: none, linear, yarn")


def _check_rope(where: str, theta: float, dim: int) -> None:
    if theta <= 1:
        raise BimetalError(f"{where}: the rope base is {theta}, expected a number above 1")
    if dim < 2 or dim % 2:
        raise BimetalError(f"{where}: rope turns {dim} channels of a head, expected an even number")


def _frequencies(theta: float, dim: int) -> tuple[float, ...]:
    return tuple(theta ** (-2 * j / dim) for j in range(dim // 2))


def _llama3(frequencies: tuple[float, ...], factor: float, low: float, high: float, original: int) -> tuple[float, ...]:
    """Apply Llama 3.1's rule: divide low frequencies by `factor`, keep high ones, blend linearly between."""

    def scaled(f: float) -> float:
        turns = original * f / (2 * math.pi)  # rotations within the original context
        if turns < low:
            return f / factor
        if turns > high:
            return f
        keep = (turns - low) / (high - low)
        return keep * f + (1 - keep) * f / factor

    return tuple(scaled(f) for f in frequencies)


def _yarn(
    theta: float, dim: int, factor: float, original: int, turns: tuple[float, float], truncates: bool
) -> tuple[float, ...]:
    """Apply YaRN (Peng et al., arXiv 2309.00071): interpolate low frequencies, keep high ones, ramp between them.

    turns      rotations within the original context at which the ramp begins, and at which it ends
    truncates  whether it begins and ends at whole pairs, the next ones outside
    """

    def pair_with(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = map(pair_with, turns)
    if truncates:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, dim - 1)
    frequencies = []
    for j, f in enumerate(_frequencies(theta, dim)):
        ramp = min(max((j - low) / max(high - low, 0.001), 0), 1)
        frequencies.append(f * (1 - ramp) + f / factor * ramp)
    return tuple(frequencies)


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's attention factor of positions that are divided by `factor`."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0
