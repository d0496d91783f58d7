"""Plausible mistakes, planted one at a time: the golden logits must notice each of them.

Most of these mistakes let a real model go on writing fluent text. The first 128 golden positions are read in two steps
of 64, so that mistakes at the boundary of two steps count. A trap changes a loaded model before, or its state between
the steps.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import tiny
from gguf_files import write_gguf
from test_golden import KL, LOGIT

from common import reference
from common.models import blocks, llama, load_model, qwen35
from common.ops import Rope
from common.reference import NumpyOps, clamped_swiglu, delta_rule, sigmoid, silu

ROWS = 128
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # some mistakes overflow


def op(name: str, wrong: Callable) -> Callable:
    """Replace an op; `wrong` gets the right one and the arguments."""

    def plant(model, patch):
        right = getattr(model.ops, name)
        patch.setattr(model.ops, name, lambda *args, **kwargs: wrong(right, *args, **kwargs), raising=False)
        return model

    return plant


def inner(name: str, wrong: Callable, within: str) -> Callable:
    """Replace a function of common/reference.py while the op `within` runs."""

    def run(right, *args, **kwargs):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, name, wrong)
            return right(*args, **kwargs)

    return op(within, run)


def weight(*names: str, wrong: Callable) -> Callable:
    """Change weights of every layer that has them, and of the top."""

    def plant(model, patch):
        for table in (model.weights, *model.weights.layers):
            for name in names:
                if getattr(table, name, None) is not None:
                    setattr(table, name, wrong(getattr(table, name)))
        return model

    return plant


def config(**wrong: Callable) -> Callable:
    """Change keys of the configuration; each function gets the right configuration."""
    return lambda model, patch: replace(
        model, config=replace(model.config, **{key: change(model.config) for key, change in wrong.items()})
    )


def rotate_adjacent(right, x, positions, rope):
    n = 2 * len(rope.frequencies)
    split = np.arange(n).reshape(-1, 2).T.ravel()  # pairs (0, 1), (2, 3), ... to (j, j + n/2), and back
    out = x.copy()
    out[..., split] = right(x[..., split], positions, rope)
    return out


def rotate_last(right, x, positions, rope):
    return right(x[..., ::-1], positions, rope)[..., ::-1]


def read_before_update(right, q, *rest):
    """Read o from the decayed matrix before the row's own key and value are added."""
    before: list[np.ndarray] = []

    def spy(S, k, v, decay, beta):
        before.append(decay[:, None, None] * S)
        return delta_rule(S, k, v, decay, beta)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "delta_rule", spy)
        out = right(q, *rest)
    q = np.tile(reference._l2_normalized(q) * q.shape[-1] ** -0.5, (1, out.shape[1] // q.shape[1], 1))
    return np.stack([np.einsum("hkv,hk->hv", S, row) for S, row in zip(before, q, strict=True)])


def decay_after_read(S, k, v, decay, beta):
    correction = beta[:, None] * (v - np.einsum("hkv,hk->hv", S, k))
    return decay[:, None, None] * S + k[:, :, None] * correction[:, None, :]


def no_decay(S, k, v, decay, beta):
    return delta_rule(S, k, v, np.ones_like(decay), beta)


def bounded_l2(x):
    return x / np.maximum(np.sqrt(np.sum(np.square(x), axis=-1, keepdims=True)), reference.L2_EPS)


def query_rows(order: Callable) -> Callable:
    """Take the rows of q and gate, stored as (head, q or gate, channel), in another order; H = 4, D = 16."""
    H, D = 4, 16
    index = order(np.arange(2 * H * D).reshape(H, 2, D)).ravel()
    return weight("qkv", wrong=lambda w: np.concatenate([w[: 2 * H * D][index], w[2 * H * D :]]))


def top_of_softmax(right, logits, top_k, scale):
    """The chosen probabilities without renormalization."""
    ids, weights = right(logits, logits.shape[-1])
    return ids[:, :top_k], weights[:, :top_k]


def rope_adjacent(right, x, w, positions, rope, eps):
    return rotate_adjacent(REFERENCE.rope, REFERENCE.rms_norm(x, w, eps), positions, rope)


def biased_weights(right, logits, bias, top_k, scale):
    """The chosen experts weighted by the scores that chose them."""
    ids, _ = right(logits, bias, top_k, scale)
    scores = np.take_along_axis(sigmoid(logits) + bias, ids, axis=-1)
    return ids, scale * scores / scores.sum(-1, keepdims=True)


def swap_halves(w):
    return np.roll(w, w.shape[1] // 2, axis=1)


def unscaled(rope):
    return replace(rope, magnitude=1.0)


def plain_rope(c):
    return Rope(blocks._frequencies(1e4, c.head_dim))


def of_k_heads(right, x, w, eps):
    """Norm each k head of 8 channels alone, of two that OLMo 2 norms together."""
    if w.size != 16:
        return right(x, w, eps)
    return right(x.reshape(len(x), 2, 8), w.reshape(2, 8), eps).reshape(x.shape)


def tiled(x):
    """Key heads (T, 2, D) in such an order that grouped value heads read those of tiled ones."""
    return np.tile(x, (1, 3, 1))


REFERENCE = NumpyOps()
NORMS = ("norm", "mixer_norm", "ffn_norm", "q_norm", "k_norm")

TRAPS = [  # name, model, mistake
    # Gated DeltaNet
    ("V heads grouped", "qwen35", op("gated_delta", lambda f, q, k, *a: f(q.repeat(3, 1), k.repeat(3, 1), *a))),
    ("V heads tiled", "qwen3next", op("gated_delta", lambda f, q, k, *a: f(tiled(q), tiled(k), *a))),
    ("q not scaled", "qwen35", op("gated_delta", lambda f, q, *a: f(q, *a) * q.shape[-1] ** 0.5)),
    ("q and k swapped", "qwen35", op("gated_delta", lambda f, q, k, *a: f(k, q, *a))),
    ("no L2 norm", "qwen35", inner("_l2_normalized", lambda x: x, "gated_delta")),
    ("L2 norm as max(norm, eps)", "qwen35", inner("_l2_normalized", bounded_l2, "gated_delta")),
    ("L2 eps on the mean", "qwen35", inner("L2_EPS", 12e-6, "gated_delta")),
    ("o read before the update", "qwen35", op("gated_delta", read_before_update)),
    ("decay after the read", "qwen35", inner("delta_rule", decay_after_read, "gated_delta")),
    ("no decay", "qwen35", inner("delta_rule", no_decay, "gated_delta")),
    ("exp of a finished decay", "qwen35", weight("decay", wrong=lambda w: -np.exp(w))),
    ("decay left as A_log", "qwen35", weight("decay", wrong=lambda w: np.log(-w))),
    ("no dt bias", "qwen35", weight("dt_bias", wrong=np.zeros_like)),
    ("a and b swapped", "qwen35", op("gated_delta", lambda f, q, k, v, a, b, *r: f(q, k, v, b, a, *r))),
    (
        "norm after the gate",
        "qwen35",
        op("gated_rms_norm", lambda f, x, w, z, eps: REFERENCE.rms_norm(x * silu(z), w, eps)),
    ),
    (
        "sigmoid of z",
        "qwen35",
        op("gated_rms_norm", lambda f, x, w, z, eps: REFERENCE.rms_norm(x, w, eps) * sigmoid(z)),
    ),
    ("gated norm + 1", "qwen35", weight("delta_norm", wrong=lambda w: w + 1)),
    # short convolution
    ("taps reversed", "qwen35", weight("taps", wrong=lambda w: w[:, ::-1])),
    ("no SiLU after the convolution", "qwen35", inner("silu", lambda x: x, "short_conv")),
    ("convolution without its past", "qwen35", op("short_conv", lambda f, x, w, *a: f(x, w * [0, 0, 0, 1], *a))),
    # attention
    ("q and gate as halves", "qwen35", query_rows(lambda rows: rows.reshape(2, 4, 16).swapaxes(0, 1))),
    ("q and gate swapped", "qwen35", query_rows(lambda rows: rows[:, ::-1])),
    ("SiLU as attention gate", "qwen35", op("mul_sigmoid", lambda f, x, gate: x * silu(gate))),
    ("no attention gate", "qwen35", op("mul_sigmoid", lambda f, x, gate: x)),
    ("rope on all channels", "qwen35", config(rope=plain_rope)),
    ("rope divided by the head size", "qwen35", config(rope=lambda c: Rope(plain_rope(c).frequencies[:4]))),
    ("rope on the last channels", "qwen35", op("rope", rotate_last)),
    ("rope of adjacent pairs", "qwen35", op("rope", rotate_adjacent)),
    ("rope theta x 10", "qwen35", config(rope=lambda c: Rope(blocks._frequencies(1e5, 8)))),
    ("positions // 4", "qwen35", op("rope", lambda f, x, positions, rope: f(x, positions // 4, rope))),
    ("rope backwards", "qwen35", op("rope", lambda f, x, positions, rope: f(x, -positions, rope))),
    (
        "query heads interleaved",
        "qwen3",
        op("attention", lambda f, q, *a, **k: f(q[:, [0, 2, 1, 3]], *a, **k)[:, [0, 2, 1, 3]]),
    ),
    ("scale of hidden / heads", "qwen3", op("attention", lambda f, *a, scale, **k: f(*a, scale=8**-0.5, **k))),
    (
        "rope before the norm",
        "qwen3",
        op("norm_rope", lambda f, x, w, p, r, eps: REFERENCE.rms_norm(REFERENCE.rope(x, p, r), w, eps)),
    ),
    ("no q and k norm", "qwen3", op("norm_rope", lambda f, x, w, p, r, eps: REFERENCE.rope(x, p, r))),
    ("no biases", "qwen2", op("add", lambda f, x, y: x if y.ndim == 1 else f(x, y))),
    ("biases after rope", "qwen2", config(rope=lambda c: Rope(tuple(1e-9 for _ in c.rope.frequencies)))),
    ("no biases beside norms", "glm4moe", op("add", lambda f, x, y: x if y.ndim == 1 else f(x, y))),
    ("rope of all channels", "glm4moe", config(rope=plain_rope)),
    ("rope of adjacent halves", "glm4moe", op("norm_rope", rope_adjacent)),
    ("bias of the router in weights", "glm4moe", op("route_sigmoid", biased_weights)),
    ("no scale of routed experts", "glm4moe", op("route_sigmoid", lambda f, logits, b, k, scale: f(logits, b, k, 1.0))),
    ("no window", "mistral", op("attention", lambda f, *a, window, **k: f(*a, window=None, **k))),
    ("the other rope", "phi4mini", config(rope=lambda c: c.short_rope)),
    ("a rope without its factor", "phi4mini", config(rope=lambda c: Rope(c.rope.frequencies))),
    ("a window of one key more", "mistral", config(window=lambda c: c.window + 1)),
    ("embedding not divided by the residual factor", "granite", config(embedding_scale=lambda c: 3.0)),
    ("embedding not multiplied", "granite", config(embedding_scale=lambda c: 1 / 0.6)),
    ("epsilon of undivided hidden states", "granite", config(eps=lambda c: 1e-2)),
    ("scores divided by the root of the head size", "granite", config(attention_scale=lambda c: 8**-0.5)),
    ("logits not divided", "granite", config(logit_scale=lambda c: 1.0)),
    ("logits multiplied", "granite", config(logit_scale=lambda c: 1.5)),
    ("norms of each k head", "olmo2", op("rms_norm", of_k_heads)),
    ("no norm of k", "olmo2", op("rms_norm", lambda f, x, w, eps: x if w.size == 16 else f(x, w, eps))),
    ("norms after the halves left out", "olmo2", weight("attn_post_norm", "ffn_post_norm", wrong=np.ones_like)),
    ("YaRN in layers with a window", "olmo3", config(sliding_rope=lambda c: c.rope)),
    ("YaRN in no layer", "olmo3", config(rope=lambda c: c.sliding_rope)),
    ("no magnitude of YaRN", "olmo3", config(rope=lambda c: unscaled(c.rope))),
    ("a window of one key less", "olmo3", config(window=lambda c: c.window - 1)),
    ("windows in all layers", "olmo3", config(is_sliding=lambda c: (True,) * len(c.is_sliding))),
    ("rope in every layer", "smollm3", config(no_rope=lambda c: ())),
    ("rope in every fourth layer alone", "smollm3", config(no_rope=lambda c: (0, 1, 2, 4))),
    # norms
    ("norms without + 1", "qwen35", weight(*NORMS, wrong=lambda w: w - 1)),
    ("norms + 1 twice", "qwen35", weight(*NORMS, wrong=lambda w: w + 1)),
    ("q and k norms without + 1", "qwen35", weight("q_norm", "k_norm", wrong=lambda w: w - 1)),
    ("rms eps 1e-5", "qwen35", config(eps=lambda c: 1e-5)),
    ("final norm without eps and weight", "llama", weight("norm", wrong=np.ones_like)),
    # experts
    ("router not renormalized", "qwen35moe", op("route_softmax", top_of_softmax)),
    ("one expert fewer", "qwen35moe", op("route_softmax", lambda f, logits, k, scale: f(logits, k - 1))),
    ("equal experts", "qwen35moe", op("route_softmax", lambda f, *a: (f(*a)[0], np.full_like(f(*a)[1], 1 / 3)))),
    ("experts' gate and up swapped", "qwen35moe", weight("experts_gate_up", wrong=swap_halves)),
    ("router not renormalized, no shared expert", "qwen3moe", op("route_softmax", top_of_softmax)),
    ("shared expert without its gate", "qwen35moe", op("mul_sigmoid", lambda f, x, g: f(x, g) if g.ndim > 2 else x)),
    ("probabilities among the chosen experts", "deepseek2", op("route_softmax", lambda f, x, k, scale: f(x, k))),
    ("probabilities not scaled", "deepseek2", op("route_softmax", lambda f, x, k, scale: f(x, k, 1.0))),
    ("scores without YaRN's factor", "deepseek2", config(score_factor=lambda c: 1.0)),
    ("YaRN's factor of scores not squared", "deepseek2", config(score_factor=lambda c: c.score_factor**0.5)),
    ("YaRN's magnitude of the rope too", "deepseek2", config(rope=lambda c: replace(c.rope, magnitude=1.147))),
    ("positions not divided", "deepseek2", config(rope=lambda c: Rope(blocks._frequencies(1e2, 8)))),
    (
        "no scale of routed experts of DeepSeek-V3",
        "deepseek3",
        op("route_sigmoid", lambda f, x, b, k, s: f(x, b, k, 1.0)),
    ),
    # feed-forward, head, rope scaling
    ("gate and up swapped", "llama", op("swiglu", lambda f, gate, up: f(up, gate))),
    ("gate and up swapped in GeGLU", "gemma3", op("geglu", lambda f, gate, up: f(up, gate))),
    ("SwiGLU for GeGLU", "gemma3", op("geglu", lambda f, gate, up: silu(gate) * up)),
    ("embedding not scaled", "gemma3", op("scale", lambda f, x, factor: x)),
    ("scale of the embedding not rounded", "gemma3", op("scale", lambda f, x, factor: f(x, 32**0.5))),
    ("norms around 0", "gemma3", weight("attn_norm", "ffn_norm", "norm", wrong=lambda w: w - 1)),
    ("norms after the halves around 0", "gemma3", weight("attn_post_norm", "ffn_post_norm", wrong=lambda w: w - 1)),
    ("one rope for all layers", "gemma3", config(sliding_rope=lambda c: c.rope)),
    ("global rope not scaled", "gemma3", config(rope=lambda c: Rope(blocks._frequencies(1e2, 16)))),
    ("window of one key less", "gemma3", config(window=lambda c: c.window - 1)),
    ("window in every layer", "gemma3", config(is_sliding=lambda c: (True,) * len(c.is_sliding))),
    ("window in no layer", "gemma3", config(is_sliding=lambda c: (False,) * len(c.is_sliding))),
    ("scores divided by another root", "gemma3", config(query_scalar=lambda c: 24.0)),
    ("no sink logits", "gptoss", op("attention", lambda f, *a, sink_logits, **k: f(*a, **k))),
    ("sink logits of other heads", "gptoss", weight("sink_logits", wrong=lambda w: np.roll(w, 1))),
    ("sink logits scaled as scores", "gptoss", weight("sink_logits", wrong=lambda w: w / 4)),
    ("no bias of the output", "gptoss", weight("o_bias", wrong=np.zeros_like)),
    ("no bias of the router", "gptoss", weight("router_bias", wrong=np.zeros_like)),
    ("softmax over all experts", "gptoss", op("route_softmax", top_of_softmax)),
    ("no biases of gates", "gptoss", weight("gate_bias", wrong=np.zeros_like)),
    ("no biases of ups", "gptoss", weight("up_bias", wrong=np.zeros_like)),
    ("no biases of downs", "gptoss", weight("down_bias", wrong=np.zeros_like)),
    ("experts' gate and up swapped, with biases", "gptoss", weight("experts_gate_up", wrong=swap_halves)),
    ("gates and ups not clamped", "gptoss", config(limit=lambda c: 1e9)),
    ("ups without + 1", "gptoss", inner("clamped_swiglu", lambda g, u, limit: clamped_swiglu(g, u - 1, limit), "moe")),
    ("SiLU of clamped gates", "gptoss", inner("CLAMPED_GAIN", 1.0, "moe")),
    ("full layers first", "gptoss", config(is_sliding=lambda c: tuple(not slides for slides in c.is_sliding))),
    (
        "YaRN between whole pairs",
        "gptoss",
        config(rope=lambda c: Rope(blocks._yarn(1e4, 16, 8.0, 128, (32.0, 1.0), True), c.rope.magnitude)),
    ),
    ("llama3 scaling ignored", "llama", config(rope=plain_rope)),
    ("YaRN ignored", "qwen3-yarn", config(rope=plain_rope)),
    ("YaRN without its attention factor", "qwen3-yarn", config(rope=lambda c: unscaled(c.rope))),
]


LOADING = [  # name, model, format, module, function of the loader that then leaves things as they are
    ("V rows as stored", "qwen35", "safetensors", qwen35, "rows"),
    ("V columns as stored", "qwen35", "safetensors", qwen35, "column_groups"),
    ("rope pairs as stored", "llama", "gguf", llama, "rows"),
    ("rope pairs of layers without rope as stored", "smollm3", "gguf", llama, "rows"),
    ("rope divisors not read", "llama", "gguf", blocks, "dequantize"),
]

BOUNDARY = [  # name, what the state of a Gated DeltaNet layer becomes between two steps
    ("convolution tail dropped", lambda conv, delta: conv.tail.fill(0)),
    ("convolution tail after SiLU", lambda conv, delta: assign(conv.tail, silu(conv.tail))),
    ("convolution tail a row late", lambda conv, delta: assign(conv.tail, np.roll(conv.tail, 1, axis=0))),
    ("S dropped", lambda conv, delta: delta.matrix.fill(0)),
    ("S transposed", lambda conv, delta: assign(delta.matrix, delta.matrix.swapaxes(1, 2).reshape(6, 12, 16))),
    ("S rounded to float16", lambda conv, delta: assign(delta.matrix, delta.matrix.astype(np.float16))),
]

assign = np.copyto


@cache
def loaded(name: str):
    return load_model(tiny.FOLDER / name, NumpyOps())


def fresh(name: str):
    """A model that a trap may change."""
    return replace(loaded(name), weights=deepcopy(loaded(name).weights), ops=NumpyOps())


def errors_of(model, name, between=None):
    ids, state = tiny.golden(name)["ids"][:ROWS], model.new_state(tiny.CAPACITY)
    first = tiny.run(model, state, ids[: ROWS // 2])
    for layer in map(vars, state.layers):
        if between and "delta" in layer:
            between(**layer)
    return tiny.golden_errors(np.concatenate([first, tiny.run(model, state, ids[ROWS // 2 :])]), name)


def passes(errors, name) -> bool:
    return errors.logit < LOGIT[name] and errors.top1 == 1 and errors.kl < KL


@pytest.mark.parametrize("name", tiny.MODELS)
def test_no_mistake_passes(name):
    assert passes(errors_of(fresh(name), name), name)


@pytest.mark.parametrize(("name", "plant"), [t[1:] for t in TRAPS], ids=[t[0] for t in TRAPS])
@pytest.mark.few(16)
def test_mistake_is_seen(name, plant, monkeypatch):
    errors = errors_of(plant(fresh(name), monkeypatch), name)
    print(errors)
    assert not passes(errors, name)


@pytest.mark.parametrize("between", [t[1] for t in BOUNDARY], ids=[t[0] for t in BOUNDARY])
def test_mistake_between_steps_is_seen(between):
    errors = errors_of(fresh("qwen35"), "qwen35", between)
    print(errors)
    assert not passes(errors, "qwen35")


@pytest.mark.parametrize(("name", "form", "module", "function"), [t[1:] for t in LOADING], ids=[t[0] for t in LOADING])
def test_mistake_in_loading_is_seen(name, form, module, function, monkeypatch, tmp_path):
    path = tiny.FOLDER / name if form == "safetensors" else write_gguf(tiny.FOLDER / name, tmp_path / "m.gguf")
    assert passes(errors_of(load_model(path, NumpyOps()), name), name)
    nothing = (
        (lambda tensor: np.ones(tensor.shape)) if function == "dequantize" else (lambda *how: lambda tensor: tensor)
    )
    monkeypatch.setattr(module, function, nothing)
    errors = errors_of(load_model(path, NumpyOps()), name)
    print(errors)
    assert not passes(errors, name)
