"""Laguna beyond the goldens of test_golden.py: its configuration, names, window, and planted mistakes."""

import math
from dataclasses import replace

import numpy as np
import pytest
import tiny
from folders import assert_layout, formula_ffn, formula_weight, rewritten, shapes_only, write_folder
from gguf_files import write_gguf
from oracles import llama_cpp_logits, mlx_lm_logits, mlx_lm_model, write_mlx_lm
from test_golden import KL, LOGIT
from test_traps import config, errors_of, fresh, op, passes, rotate_adjacent, rotate_last, weight

from common.checkpoint import open_checkpoint
from common.config import Keys
from common.errors import BimetalError
from common.models import blocks, laguna, load_model
from common.models.blocks import hf_rope
from common.ops import Rope
from common.reference import NumpyOps, sigmoid
from common.storage import state_bytes

FOLDER = tiny.FOLDER / "laguna"
DERIVED = 0.1 * math.log(8) + 1  # YaRN's factor on q and k where the configuration of the tiny models has none


def assert_golden(model, name="laguna", tokens=512):
    errors = tiny.golden_errors(tiny.logits_of(model, tiny.golden(name)["ids"][:tokens]), name)
    assert passes(errors, name), errors


def full_attention(**changes):
    """The tiny model's rope_parameters with some keys of its full layers changed; None removes a key."""
    ropes = tiny.checkpoint("laguna").config["rope_parameters"]
    full = {k: v for k, v in (ropes["full_attention"] | changes).items() if v is not None}
    return {"rope_parameters": ropes | {"full_attention": full}}


# -- configuration -----------------------------------------------------------------------------------------------------

XS2 = {"rope_type": "yarn", "rope_theta": 5e5, "partial_rotary_factor": 0.5, "beta_fast": 64.0, "beta_slow": 1.0}
REVISIONS = [  # factor, original context, beta_fast, attention_factor, then the factor on q and k
    (32.0, 4096, 64.0, 1.0, 1.0),
    (64.0, 4096, 64.0, None, 1.4158883),
    (32.0, 8192, 64.0, 1.3465735903, 1.3465736),
    (128.0, 8192, 32.0, 1.4852, 1.4852),
]


def xs2_rope(**changes):
    values = {k: v for k, v in (XS2 | changes).items() if v is not None}
    return hf_rope(Keys({"rope_parameters": values}, "config.json"), 64)


@pytest.mark.parametrize(("factor", "original", "fast", "attention", "magnitude"), REVISIONS)
def test_yarn_of_the_releases(factor, original, fast, attention, magnitude):
    rope = xs2_rope(
        factor=factor, original_max_position_embeddings=original, beta_fast=fast, attention_factor=attention
    )
    assert rope.magnitude == pytest.approx(magnitude, abs=1e-7)


def test_yarn_frequencies():
    """XS.2's frequencies: 2 to 21 % apart between beta_fast 64 and 32, which tiny models do not show."""
    at = {0: 1.0, 4: 0.193923, 8: 0.0276703, 12: 0.0027969, 16: 4.41942e-5, 20: 8.57026e-6, 31: 9.41831e-8}
    launch = xs2_rope(factor=32.0, original_max_position_embeddings=4096)
    slower = xs2_rope(factor=32.0, original_max_position_embeddings=4096, beta_fast=32.0)
    assert [launch.frequencies[j] for j in at] == pytest.approx(list(at.values()), rel=1e-5)
    assert (slower.frequencies[8], slower.frequencies[12]) == pytest.approx((0.0335582, 0.00336779), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias is True; supported: False"),
        ({"moe_router_logit_softcapping": 3.0}, r"moe_router_logit_softcapping is 3\.0; supported: 0"),
        ({"moe_router_score_func": "sqrtsoftplus"}, "moe_router_score_func is 'sqrtsoftplus'; supported: sigmoid"),
        ({"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input is True"),
        ({"swa_attention_sink_enabled": True}, "swa_attention_sink_enabled is True"),
        ({"num_attention_heads_per_layer": [4, 6]}, "must list the query heads of 6 layers"),
        ({"num_attention_heads_per_layer": [4, 6, 6, 6, 4, 5]}, r"2 KV heads do not divide \[4, 5, 6\] query heads"),
        ({"num_attention_heads_per_layer": [4, 6, 6, 6, 4, True]}, "must list the query heads of 6 layers"),
        ({"num_attention_heads_per_layer": 4}, "num_attention_heads_per_layer is 4, expected list"),
        ({"num_experts_per_tok": 9}, "chooses 9 of 8 experts"),
        (full_attention(partial_rotary_factor=2.0), "rope turns 32 channels of a head of 16"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types must name full_attention or sliding_attention for 6"),
        ({"mlp_layer_types": ["dense"] * 5 + ["moe"]}, "mlp_layer_types must name dense or sparse for 6 layers"),
        ({"sliding_window": None}, "lacks the required key sliding_window"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"rope_parameters": {}}, r"lacks the required key rope_parameters\.full_attention"),
        (full_attention(rope_type="longrope"), "full_attention: rope type 'longrope'; supported"),
        ({"num_hidden_layers": 10**9}, "says it has 1000000000 layers"),
        (
            {"num_attention_heads_per_layer": [4, 8, 6, 6, 4, 6]},
            r"layers\.1\.self_attn\.q_proj.*shape \(96, 32\)",
        ),
    ],
)
def test_refused(tmp_path, changes, message):
    path = rewritten(FOLDER, tmp_path / "m", **changes)
    with pytest.raises(BimetalError, match=message):
        load_model(path, NumpyOps())


def test_published_sizes():
    """XS.2 in 16 bits: 40 KiB per token in 10 full layers, and 60 MiB once 30 windows of 512 are full."""
    c = replace(
        tiny.load("laguna", NumpyOps()).config,
        **{"kv_heads": 8, "head_dim": 128, "window": 512, "is_sliding": tuple(i % 4 > 0 for i in range(40))},
    )
    spec = laguna.state_spec(c)
    assert state_bytes(spec, 1, 2) == 160 * 2**10
    assert state_bytes(spec, 512, 2) == 60 * 2**20 + 512 * 40 * 2**10
    assert state_bytes(spec, 131072, 2) - state_bytes(spec, 512, 2) == (131072 - 512) * 40 * 2**10


# -- names -------------------------------------------------------------------------------------------------------------


def as_in_memory(tensors):
    """transformers' names of the loaded model: fused experts, the bias beside the router, a plural."""
    out = {}
    for name, array in tensors.items():
        name = name.replace("experts.e_score", "gate.e_score").replace("shared_expert.", "shared_experts.")
        if ".mlp.experts." not in name:
            out[name] = array
    for i in range(1, 6):
        at = f"model.layers.{i}.mlp.experts."
        gate, up, down = (
            np.stack([tensors[f"{at}{e}.{part}_proj.weight"] for e in range(8)]) for part in ("gate", "up", "down")
        )
        out |= {f"{at}gate_up_proj": np.concatenate([gate, up], axis=1), f"{at}down_proj": down}
    return out


def as_mlx_lm(tensors):
    """mlx-lm's names, repacked under one more prefix."""
    out = {}
    for name, array in tensors.items():
        if ".mlp.experts." not in name or "e_score" in name:
            name = name.replace("experts.e_score", "gate.e_score").replace("mlp.gate.weight", "mlp.gate.proj.weight")
            out[f"language_model.{name}"] = array
    for i in range(1, 6):
        for part in ("gate", "up", "down"):
            stack = [tensors[f"model.layers.{i}.mlp.experts.{e}.{part}_proj.weight"] for e in range(8)]
            out[f"language_model.model.layers.{i}.mlp.switch_mlp.{part}_proj.weight"] = np.stack(stack)
    return out


@pytest.mark.parametrize("rename", [as_in_memory, as_mlx_lm])
def test_names(ops, tmp_path, rename):
    assert_golden(load_model(rewritten(FOLDER, tmp_path / "m", rename), ops), tokens=64)


@pytest.mark.parametrize(
    "lost",
    [
        "model.layers.3.mlp.experts.e_score_correction_bias",
        "model.layers.3.mlp.shared_expert.down_proj.weight",
        "model.layers.3.mlp.experts.7.up_proj.weight",
        "model.layers.3.self_attn.k_norm.weight",
        "model.layers.0.self_attn.g_proj.weight",
    ],
)
def test_missing_tensors(tmp_path, lost):
    path = rewritten(FOLDER, tmp_path / "m", lambda tensors: {k: v for k, v in tensors.items() if k != lost})
    with pytest.raises(BimetalError, match="lacks tensor"):
        load_model(path, NumpyOps())


def test_unknown_tensors(tmp_path):
    path = rewritten(FOLDER, tmp_path / "m", lambda tensors: tensors | {"model.layers.0.mlp.gate.weight": np.ones(2)})
    with pytest.raises(BimetalError, match=r"layers\.0\.mlp\.gate\.weight, which this architecture does not use"):
        load_model(path, NumpyOps())


@pytest.mark.parametrize("rows", [3, 5])
def test_gates_of_another_size(tmp_path, rows):
    gate = "model.layers.0.self_attn.g_proj.weight"
    path = rewritten(FOLDER, tmp_path / "m", lambda tensors: tensors | {gate: np.ones((rows, 32), np.float32)})
    with pytest.raises(BimetalError, match=rf"{rows} rows, expected 4 \(per head\) or 64"):
        load_model(path, NumpyOps())


def test_the_word_for_the_gate_is_not_believed(tmp_path):
    path = rewritten(tiny.FOLDER / "laguna-m1", tmp_path / "m", gating=True)
    assert_golden(load_model(path, NumpyOps()), "laguna-m1", 64)


# -- GGUF --------------------------------------------------------------------------------------------------------------


def gguf_model(tmp_path, change, ops=None, name="laguna"):
    return load_model(write_gguf(tiny.FOLDER / name, tmp_path / "m.gguf", change=change), ops or NumpyOps())


@pytest.mark.parametrize(
    "change",
    [
        lambda keys, tensors: keys.update({"attention.sliding_window_pattern": [i % 4 > 0 for i in range(6)]}),
        lambda keys, tensors: keys.update({"attention.sliding_window_pattern": 4}),
        lambda keys, tensors: keys.pop("expert_gating_func"),
        lambda keys, tensors: keys.update({"expert_shared_count": 1}),
    ],
)
def test_gguf_keys(tmp_path, change):
    assert_golden(gguf_model(tmp_path, change), tokens=64)


def released():
    """The keys and the shapes of XS.2's GGUF files: 48 and 64 heads, layer 0 dense, 64 of 128 channels roped."""
    heads = [48 if i % 4 == 0 else 64 for i in range(40)]
    keys = {
        **{"block_count": 40, "context_length": 131072, "embedding_length": 2048, "feed_forward_length": 8192},
        **{"attention.head_count": heads, "attention.head_count_kv": 8, "attention.sliding_window": 512},
        **{"attention.key_length": 128, "attention.value_length": 128, "attention.layer_norm_rms_epsilon": 1e-6},
        **{"expert_count": 256, "expert_used_count": 8, "expert_feed_forward_length": 512},
        **{"expert_shared_feed_forward_length": 512, "expert_weights_norm": True, "expert_weights_scale": 2.5},
        **{"expert_gating_func": 2, "leading_dense_block_count": 1, "rope.freq_base": 5e5, "rope.freq_base_swa": 1e4},
        **{"rope.dimension_count": 64, "rope.dimension_count_swa": 128, "rope.scaling.type": "yarn"},
        **{"rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096},
        **{"rope.scaling.yarn_attn_factor": 1.0, "rope.scaling.yarn_beta_fast": 64.0},
    }
    shapes = {"token_embd.weight": (100352, 2048), "output.weight": (100352, 2048), "output_norm.weight": (2048,)}
    for i, H in enumerate(heads):
        block = {
            **{"attn_norm": (2048,), "ffn_norm": (2048,), "attn_q_norm": (128,), "attn_k_norm": (128,)},
            **{"attn_q": (H * 128, 2048), "attn_k": (1024, 2048), "attn_v": (1024, 2048)},
            **{"attn_output": (2048, H * 128), "attn_gate": (H, 2048)},
        }
        if i == 0:
            block |= {"ffn_gate": (8192, 2048), "ffn_up": (8192, 2048), "ffn_down": (2048, 8192)}
        else:
            shapes[f"blk.{i}.exp_probs_b.bias"] = (256,)
            block |= {"ffn_gate_inp": (256, 2048), "ffn_gate_exps": (256, 512, 2048), "ffn_up_exps": (256, 512, 2048)}
            block |= {"ffn_down_exps": (256, 2048, 512), "ffn_gate_shexp": (512, 2048)}
            block |= {"ffn_up_shexp": (512, 2048), "ffn_down_shexp": (2048, 512)}
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
    return keys, shapes


def test_released_gguf():
    keys, shapes = released()
    assert len(shapes) == 678
    checkpoint = shapes_only("laguna", keys, shapes)
    c = laguna.read_config(checkpoint)
    assert (c.heads, c.window) == (tuple(keys["attention.head_count"]), 512)
    assert (sum(c.is_sliding), sum(c.is_sparse)) == (30, 39)
    assert (len(c.rope.frequencies), len(c.sliding_rope.frequencies)) == (32, 64)
    assert_layout(laguna.layout(c, checkpoint), shapes)


def test_gguf_without_a_window(tmp_path):
    model = gguf_model(tmp_path, lambda keys, tensors: keys.update({"attention.head_count": 4}), name="laguna-m1")
    assert not any(model.config.is_sliding)
    assert_golden(model, "laguna-m1", 64)


@pytest.mark.parametrize(("stated", "used"), [(1.0, 1.0), (None, DERIVED), (1.4852, 1.4852)])
def test_gguf_attention_factor(tmp_path, stated, used):
    """A stated factor is config.json's, which the converter copies."""
    key = "rope.scaling.yarn_attn_factor"
    model = gguf_model(tmp_path, lambda keys, _: keys.pop(key) if stated is None else keys.update({key: stated}))
    assert model.config.rope.magnitude == pytest.approx(used)
    assert model.config.sliding_rope.magnitude == 1


def test_gguf_attention_factor_of_xs_2_1(tmp_path):
    """The published file states 1, its config.json the derived factor."""
    key = "rope.scaling."
    changes = {f"{key}factor": 32.0, f"{key}original_context_length": 8192, f"{key}yarn_attn_factor": 1.0}
    model = gguf_model(tmp_path, lambda keys, _: keys.update(changes))
    assert model.config.rope.magnitude == pytest.approx(1.3465736)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention.gating_type": "per_head"}, "names its keys as Ollama does"),
        ({"expert_gating_func": 1}, "expert_gating_func is 1; supported: 2"),
        ({"expert_weights_norm": False}, "expert_weights_norm is False"),
        ({"attention.sliding_window_pattern": [True, False]}, "sliding_window_pattern does not cover 6 layers"),
        ({"attention.head_count": [4, 6]}, "must list the query heads of 6 layers"),
        ({"attention.sliding_window_pattern": "all"}, "sliding_window_pattern is 'all', expected int"),
        ({"rope.dimension_count": 18}, "rope turns 18 channels of a head of 16"),
        ({"block_count": 7}, "must list the query heads of 7 layers"),
    ],
)
def test_gguf_refused(tmp_path, change, message):
    with pytest.raises(BimetalError, match=message):
        gguf_model(tmp_path, lambda keys, tensors: keys.update(change))


# -- logits stated without a file --------------------------------------------------------------------------------------

IDS = [(7 * t * t + 3 * t + 5) % 97 for t in range(24)]
GOLDEN = [  # attention_factor, first logits of the last token, mean |logit|
    (1.0, [-1.52862, -1.48875, -2.27678, -0.45167, 0.03570, 1.42207], 80, 1.295805),
    (None, [-1.69766, -0.31223, 1.73070, 3.12162, 0.18040, -0.94772], 60, 1.329874),
]


def formula_model(path, attention_factor):
    heads, hidden, D = [4, 6, 6, 6, 4], 48, 32
    full = XS2 | {"factor": 32.0, "original_max_position_embeddings": 4096}
    if attention_factor is not None:
        full["attention_factor"] = attention_factor
    values = {
        **{"model_type": "laguna", "vocab_size": 97, "hidden_size": hidden, "intermediate_size": 80},
        **{"num_hidden_layers": 5, "num_attention_heads": 4, "num_attention_heads_per_layer": heads},
        **{"num_key_value_heads": 2, "head_dim": D, "sliding_window": 6, "max_position_embeddings": 131072},
        "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
        **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
        **{"shared_expert_intermediate_size": 40, "moe_routed_scaling_factor": 2.5, "gating": True},
        "partial_rotary_factor": 0.5,  # of no kind of layer in particular, and read by none
        "rope_parameters": {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
    }
    shapes = {name: (97, hidden) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    shapes["model.norm.weight"] = (hidden,)
    for i, H in enumerate(heads):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        shapes |= {f"{layer}self_attn.{x}_proj.weight": (n * D, hidden) for x, n in (("q", H), ("k", 2), ("v", 2))}
        shapes |= {f"{layer}self_attn.o_proj.weight": (hidden, H * D), f"{layer}self_attn.g_proj.weight": (H, hidden)}
        shapes |= {f"{layer}self_attn.{x}_norm.weight": (D,) for x in "qk"}
        if i == 0:
            shapes |= formula_ffn(f"{layer}mlp.", hidden, 80)
            continue
        shapes |= {f"{layer}mlp.gate.weight": (8, hidden), f"{layer}mlp.experts.e_score_correction_bias": (8,)}
        shapes |= formula_ffn(f"{layer}mlp.shared_expert.", hidden, 40)
        for e in range(8):
            shapes |= formula_ffn(f"{layer}mlp.experts.{e}.", hidden, 24)
    return write_folder(path, values, {name: formula_weight(name, *shape) for name, shape in shapes.items()})


@pytest.mark.parametrize(("attention_factor", "last", "best", "mean"), GOLDEN)
def test_stated_logits(ops, tmp_path, attention_factor, last, best, mean):
    logits = tiny.logits_of(load_model(formula_model(tmp_path / "m", attention_factor), ops), IDS)
    assert logits[23, :6] == pytest.approx(last, abs=2e-5)
    assert logits[0, :3] == pytest.approx([-1.58462, 0.44638, 4.86572], abs=2e-5)
    assert (logits[23].argmax(), np.abs(logits).mean()) == (best, pytest.approx(mean, abs=2e-6))


# -- the window --------------------------------------------------------------------------------------------------------


def test_window_bounds_memory():
    model = tiny.load("laguna", NumpyOps())
    spec, state, ids = laguna.state_spec(model.config), model.new_state(tiny.CAPACITY), tiny.golden("laguna")["ids"]
    sliding = [layer for layer, slides in zip(state.layers, model.config.is_sliding, strict=True) if slides]
    for tokens in (10, 14, 100, 388):
        tiny.run(model, state, ids[state.length :][:tokens])
        held = min(state.length, 24)
        assert [layer.kv.nbytes for layer in sliding] == [held * 2 * (16 + 16) * 4] * 4
    at_once = model.new_state(tiny.CAPACITY)
    tiny.run(model, at_once, ids)
    assert at_once.nbytes == state_bytes(spec, 512, 4)


# -- mistakes ----------------------------------------------------------------------------------------------------------


def gate_from_residual(model, patch):
    """Take the gate's input from the layer's input, before its norm."""
    seen, rms_norm, linear = [], model.ops.rms_norm, model.ops.linear

    def spy(x, *args):
        seen[:] = [x] if x.ndim == 2 else seen
        return rms_norm(x, *args)

    def with_residual(x, w):
        for layer, heads in zip(model.weights.layers, model.config.heads, strict=True):
            if w is layer.qkgv:
                values = len(w) - model.config.kv_heads * model.config.head_dim
                rest = np.r_[: values - heads, values : len(w)]
                out = np.empty((len(x), len(w)), np.float32)
                out[:, rest], out[:, values - heads : values] = (
                    linear(x, w[rest]),
                    linear(seen[0], w[values - heads : values]),
                )
                return out
        return linear(x, w)

    patch.setattr(model.ops, "rms_norm", spy)
    patch.setattr(model.ops, "linear", with_residual)
    return model


def rope_of_layers(sliding, wrong):
    """Another rope op on one kind of layer, recognised by the number of rotated channels."""
    n = 8 if sliding else 4
    return op("rope", lambda f, x, p, r: wrong(f, x, p, r) if len(r.frequencies) == n else f(x, p, r))


def magnitude_in_scale(right, *args, scale, window):
    return right(*args, scale=scale * 1.1**2 if window is None else scale, window=window)


def heads_by_modulo(right, q, *args, **kwargs):
    order = np.arange(q.shape[1]).reshape(2, -1).T.ravel()
    out = np.empty_like(q)
    out[:, order] = right(q[:, order], *args, **kwargs)
    return right(q[:, np.argsort(order)], *args, **kwargs)[:, order]


def without_shared(model, patch):
    for layer in model.weights.layers[1:]:
        layer.down = np.zeros_like(layer.down)
    return model


def routed(wrong):
    """Other weights for the chosen experts; `wrong` gets sigmoids, bias and ids."""

    def route(right, logits, bias, top_k, scale):
        ids = right(logits, bias, top_k, scale)[0]
        return ids, wrong(sigmoid(logits), bias, ids, scale).astype(np.float32)

    return op("route_sigmoid", route)


def chosen(p, ids):
    return np.take_along_axis(p, ids, axis=-1)


def softmax_router(right, logits, bias, top_k, scale):
    ids, weights = NumpyOps().route_softmax(logits, top_k)
    return ids, weights * scale


def scaled_shared(model, patch):
    for layer in model.weights.layers[1:]:
        layer.down = 2.5 * layer.down
    return model


def gate_op(wrong):
    return op("mul_softplus", lambda f, x, gate: wrong(x, gate))


def window_op(change):
    return op("attention", lambda f, *a, window, **k: f(*a, window=window and change(window), **k))


def rope_after_norm_only(right, x, w, positions, rope, eps):
    return NumpyOps().rope(x, positions, rope)


ROUTER_TRAPS = [
    ("softmax router", op("route_sigmoid", softmax_router)),
    ("no selection bias", op("route_sigmoid", lambda f, logits, bias, *a: f(logits, 0 * bias, *a))),
    (
        "bias in the weights",
        routed(lambda p, b, ids, s: s * chosen(p + b, ids) / chosen(p + b, ids).sum(-1, keepdims=True)),
    ),
    ("weights not normalized", routed(lambda p, b, ids, s: s * chosen(p, ids))),
    ("normalized over all experts", routed(lambda p, b, ids, s: s * chosen(p, ids) / p.sum(-1, keepdims=True))),
    ("routed scale missing", op("route_sigmoid", lambda f, logits, bias, k, scale: f(logits, bias, k, 1.0))),
    ("routed scale on the shared expert", scaled_shared),
    ("no shared expert", without_shared),
]

TRAPS = [
    ("sigmoid gate", gate_op(lambda x, gate: x * sigmoid(gate))),
    ("no gate", gate_op(lambda x, gate: x)),
    ("gate from the residual", gate_from_residual),
    ("derived YaRN factor", config(rope=lambda c: replace(c.rope, magnitude=DERIVED))),
    ("no YaRN factor", config(rope=lambda c: replace(c.rope, magnitude=1.0))),
    (
        "YaRN factor in the softmax",
        lambda model, patch: op("attention", magnitude_in_scale)(
            config(rope=lambda c: replace(c.rope, magnitude=1.0))(model, patch), patch
        ),
    ),
    (
        "beta_fast 32",
        config(rope=lambda c: replace(c.rope, frequencies=blocks._yarn(1e2, 8, 8.0, 128, (32.0, 1.0), True))),
    ),
    ("one rope for both kinds", config(sliding_rope=lambda c: c.rope)),
    (
        "all channels of full layers",
        config(rope=lambda c: Rope(blocks._yarn(1e2, 16, 8.0, 128, (4.0, 1.0), True), 1.1)),
    ),
    ("half of the channels of sliding layers", config(sliding_rope=lambda c: Rope(blocks._frequencies(1e4, 8)))),
    ("adjacent pairs", op("rope", rotate_adjacent)),
    ("last channels", rope_of_layers(False, rotate_last)),
    ("window one longer", window_op(lambda n: n + 1)),
    ("window one shorter", window_op(lambda n: n - 1)),
    ("no window", window_op(lambda n: None)),
    ("no q and k norm", op("norm_rope", rope_after_norm_only)),
    ("q and k norms ignored", weight("q_norm", "k_norm", wrong=np.ones_like)),
    (
        "norm after rope",
        op("norm_rope", lambda f, x, w, p, r, eps: NumpyOps().rms_norm(NumpyOps().rope(x, p, r), w, eps)),
    ),
    ("KV heads by modulo", op("attention", heads_by_modulo)),
    *ROUTER_TRAPS,
]


@pytest.mark.parametrize("plant", [t[1] for t in TRAPS], ids=[t[0] for t in TRAPS])
@pytest.mark.few(9)
def test_mistake_is_seen(plant, monkeypatch):
    errors = errors_of(plant(fresh("laguna"), monkeypatch), "laguna")
    print(errors)
    assert not passes(errors, "laguna")


def test_gate_per_head_of_a_gate_per_channel_is_seen(monkeypatch):
    plant = gate_op(lambda x, gate: NumpyOps().mul_softplus(x, gate[..., :1]))
    assert not passes(errors_of(plant(fresh("laguna-m1"), monkeypatch), "laguna-m1"), "laguna-m1")


@pytest.mark.parametrize("change", ["one row fewer", "read in the order of slots"])
def test_mistake_in_the_window_between_steps_is_seen(change):
    model, ids = tiny.load("laguna", NumpyOps()), tiny.golden("laguna")["ids"][:128]
    state = model.new_state(tiny.CAPACITY)
    logits = [tiny.run(model, state, ids[:64])]
    for layer, slides in zip(state.layers, model.config.is_sliding, strict=True):
        if slides:
            fewer = change == "one row fewer"
            layer.kv.planes = [rows[2:] if fewer else np.roll(rows, 64 % 24, axis=0) for rows in layer.kv.planes]
    logits.append(tiny.run(model, state, ids[64:]))
    assert not passes(tiny.golden_errors(np.concatenate(logits), "laguna"), "laguna")


# -- other programs ----------------------------------------------------------------------------------------------------


def assert_near(logits, expected, label):
    errors = tiny.errors(logits, expected)
    print(f"{label}: {errors}")
    assert errors.logit < LOGIT["laguna"]
    assert errors.top1 == 1
    assert errors.kl < KL


@pytest.mark.model
@pytest.mark.parametrize("pieces", [[], [100, 7, *[1] * 100]], ids=["whole", "pieces"])
def test_mlx_lm(ops, pieces):
    """mlx-lm ignores attention_factor and derives YaRN's."""
    ids, model = tiny.golden("laguna")["ids"], tiny.load("laguna", ops)
    model = replace(model, config=replace(model.config, rope=replace(model.config.rope, magnitude=DERIVED)))
    expected = mlx_lm_logits(mlx_lm_model(FOLDER), ids, pieces)
    assert_near(tiny.logits_of(model, ids, pieces), expected, f"{ops.name} to mlx-lm")


MLX_LM = {
    **{"model_type": "laguna", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32},
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_attention_heads_per_layer": [4, 6, 6, 4]},
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    **{"num_key_value_heads": 2, "sliding_window": 24, "num_experts": 8, "num_experts_per_tok": 3},
    **{"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "moe_routed_scaling_factor": 2.5},
    **{"max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    "rope_parameters": {
        "full_attention": XS2 | {"rope_theta": 1e2, "factor": 8.0, "original_max_position_embeddings": 128},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
}


@pytest.mark.model
@pytest.mark.parametrize("bits", [3, 4, 6, 8])
def test_quantized_by_mlx_lm(ops, tmp_path, bits):
    """The router in 8 bits, the rest in `bits`."""
    path = write_mlx_lm(tmp_path / "m", MLX_LM, bits, group_size=64, bits=bits)
    tensors = open_checkpoint(path).tensors
    assert tensors["model.layers.1.mlp.gate.proj.weight"].bits == 8
    assert tensors["model.layers.1.mlp.switch_mlp.up_proj.weight"].bits == bits
    ids = np.random.default_rng(bits).integers(96, size=256)
    expected = mlx_lm_logits(mlx_lm_model(path), ids)
    assert_near(tiny.logits_of(load_model(path, ops), ids, [100, 1, 1]), expected, f"{ops.name} to mlx-lm, {bits} bits")


@pytest.mark.model
@pytest.mark.parametrize("name", ["laguna", "laguna-m1"])
def test_llama_cpp(ops, tmp_path, name):
    """llama.cpp ignores the beta_fast of these files (taking 32) and YaRN's factor (deriving it)."""
    path = write_gguf(tiny.FOLDER / name, tmp_path / "m.gguf")
    ids, model = tiny.golden(name)["ids"], load_model(path, ops)
    rope = Rope(blocks._yarn(1e2, 8, 8.0, 128, (32.0, 1.0), True), DERIVED)
    model = replace(model, config=replace(model.config, rope=rope))
    assert_near(tiny.logits_of(model, ids), llama_cpp_logits(path, ids), f"{ops.name} to llama.cpp, {name}")
