"""GLM-4.7-Flash beyond the goldens of test_golden.py: both forms of attention, names, planted mistakes."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import tiny
from folders import assert_layout, formula_ffn, formula_weight, rewritten, shapes_only, write_folder
from gguf_files import write_gguf
from oracles import llama_cpp_logits, mlx_lm_logits, mlx_lm_model, write_mlx_lm
from test_golden import KL
from test_laguna import ROUTER_TRAPS
from test_ops_only import Opaque, OpaqueOps, run
from test_traps import config, errors_of, fresh, op, rotate_adjacent, weight

from common.checkpoint import open_checkpoint
from common.errors import BimetalError
from common.models import glm, load_model
from common.ops import Rope
from common.reference import NumpyOps
from common.step import PAST, Step
from common.storage import state_bytes
from common.tensors import Tensor

FOLDER = tiny.FOLDER / "glm"
LOGIT = 1e-4
H, N, P, R, V = 3, 16, 8, 32, 24  # of the tiny model


def passes(errors) -> bool:
    return errors.logit < LOGIT and errors.top1 == 1 and errors.kl < KL


def assert_golden(model, tokens=512):
    errors = tiny.golden_errors(tiny.logits_of(model, tiny.golden("glm")["ids"][:tokens]), "glm")
    assert passes(errors), errors


# -- configuration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias is True; supported: False"),
        ({"rope_interleave": False}, "rope_interleave is False; supported: True"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'; supported: default"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling.type is 'yarn'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; supported: noaux_tc"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; supported: sigmoid"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"n_group": 4, "topk_group": 2}, "n_group is 4; supported: 1"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types must be dense, then sparse"),
        ({"q_lora_rank": None}, "lacks the required key q_lora_rank"),
        ({"kv_lora_rank": 40}, r"kv_a_proj_with_mqa.weight: shape \(40, 32\)"),
        ({"qk_nope_head_dim": 24, "v_head_dim": 16}, r"layers\.0\.self_attn\.q_b_proj\.weight: shape \(72, 32\)"),
        ({"num_hidden_layers": 10**9, "mlp_layer_types": None}, "says it has 1000000000 layers"),
    ],
)
def test_refused(tmp_path, changes, message):
    path = rewritten(FOLDER, tmp_path / "m", **changes)
    with pytest.raises(BimetalError, match=message):
        load_model(path, NumpyOps())


@pytest.mark.parametrize("head", [64, 192])
def test_head_dim_is_not_read(tmp_path, head):
    """transformers writes the number of roped channels under the name head_dim."""
    assert_golden(load_model(rewritten(FOLDER, tmp_path / "m", head_dim=head), NumpyOps()), 64)


# -- names -------------------------------------------------------------------------------------------------------------


def as_mlx_lm(tensors):
    """mlx-lm's names: halves of kv_b_proj per head, the key half transposed, and stacked experts."""
    out = {name: array for name, array in tensors.items() if ".mlp.experts." not in name and "kv_b_proj" not in name}
    for i in range(3):
        kv = tensors[f"model.layers.{i}.self_attn.kv_b_proj.weight"].reshape(H, N + V, R)
        out[f"model.layers.{i}.self_attn.embed_q.weight"] = kv[:, :N].swapaxes(1, 2)
        out[f"model.layers.{i}.self_attn.unembed_out.weight"] = kv[:, N:]
    for i in (1, 2):
        for part in ("gate", "up", "down"):
            stack = [tensors[f"model.layers.{i}.mlp.experts.{e}.{part}_proj.weight"] for e in range(8)]
            out[f"model.layers.{i}.mlp.switch_mlp.{part}_proj.weight"] = np.stack(stack)
    return out


def with_mtp(tensors):
    """A fourth layer, which predicts a further token."""
    block = {k.replace("layers.2.", "layers.3."): 2 * a for k, a in tensors.items() if ".layers.2." in k}
    return tensors | block | {"model.layers.3.eh_proj.weight": np.ones((32, 64), np.float32)}


@pytest.mark.parametrize("rename", [as_mlx_lm, with_mtp])
def test_names(ops, tmp_path, rename):
    assert_golden(load_model(rewritten(FOLDER, tmp_path / "m", rename), ops), 64)


@pytest.mark.parametrize(
    "lost",
    [
        "model.layers.2.mlp.gate.e_score_correction_bias",
        "model.layers.2.mlp.shared_experts.down_proj.weight",
        "model.layers.0.self_attn.kv_a_layernorm.weight",
        "model.layers.0.self_attn.kv_b_proj.weight",
    ],
)
def test_missing_tensors(tmp_path, lost):
    path = rewritten(FOLDER, tmp_path / "m", lambda tensors: {k: v for k, v in tensors.items() if k != lost})
    with pytest.raises(BimetalError, match="lacks tensor"):
        load_model(path, NumpyOps())


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16", "Q8_0"])
def test_key_half_of_a_fused_matrix(stored, tmp_path):
    """A float type is kept when the key half is transposed; blocks of a quantized matrix are expanded."""
    values = np.random.default_rng(0).normal(size=(H * (N + V), R)).astype(np.float16).astype(np.float32)
    fused = {"blk.0.attn_kv_b.weight": values}
    path = write_gguf(FOLDER, tmp_path / "m.gguf", stored, change=lambda keys, tensors: tensors.update(fused))
    tensor = open_checkpoint(path).tensors["blk.0.attn_kv_b.weight"]
    key_half = glm._transposed(glm._head_rows(tensor, H, slice(0, N)))
    value_half = glm._head_rows(tensor, H, slice(N, N + V))
    assert (key_half.type, value_half.type) == ("F32" if stored == "Q8_0" else stored, stored)
    ops = NumpyOps()
    whole = ops.weight(tensor).reshape(H, N + V, R)
    assert np.array_equal(ops.weight(key_half), whole[:, :N].swapaxes(1, 2))
    assert np.array_equal(ops.weight(value_half), whole[:, N:])


@pytest.mark.parametrize("bits", [4, 8])
def test_fused_matrix_quantized_by_mlx_lm(ops, tmp_path, bits):
    """Older conversions: the value half stays quantized, the key half is expanded without a second rounding."""
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")

    def quantize(tensors, keep):
        for name in [name for name in tensors if "kv_b_proj" in name]:
            parts = mx.quantize(mx.array(tensors.pop(name)), 32, bits)
            if keep:
                fields = zip(("weight", "scales", "biases"), parts, strict=True)
                tensors |= {name.replace("weight", field): np.array(part) for field, part in fields}
            else:
                tensors[name] = np.array(mx.dequantize(*parts, 32, bits))
        return tensors

    ids = tiny.golden("glm")["ids"][:128]
    quantization = {"group_size": 32, "bits": bits}
    packed = rewritten(FOLDER, tmp_path / "packed", lambda t: quantize(t, True), quantization=quantization)
    expanded = rewritten(FOLDER, tmp_path / "expanded", lambda t: quantize(t, False))
    logits = [tiny.logits_of(load_model(path, ops), ids, [20]) for path in (packed, expanded)]
    assert passes(tiny.errors(*logits))


# -- GGUF --------------------------------------------------------------------------------------------------------------


def gguf_model(tmp_path, change, ops=None):
    return load_model(write_gguf(FOLDER, tmp_path / "m.gguf", change=change), ops or NumpyOps())


def released():
    """The keys and the shapes of GLM-4.7-Flash's GGUF files, which name no gating function."""
    keys = {
        **{"block_count": 47, "context_length": 202752, "embedding_length": 2048, "feed_forward_length": 10240},
        **{"attention.head_count": 20, "attention.head_count_kv": 1, "attention.q_lora_rank": 768},
        **{"attention.kv_lora_rank": 512, "attention.key_length": 576, "attention.value_length": 512},
        **{"attention.key_length_mla": 256, "attention.value_length_mla": 256, "rope.dimension_count": 64},
        **{"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e6, "leading_dense_block_count": 1},
        **{"expert_count": 64, "expert_used_count": 4, "expert_shared_count": 1, "expert_feed_forward_length": 1536},
        **{"expert_group_count": 1, "expert_group_used_count": 1, "expert_weights_scale": 1.8},
        "expert_weights_norm": True,
    }
    shapes = {"token_embd.weight": (154880, 2048), "output.weight": (154880, 2048), "output_norm.weight": (2048,)}
    for i in range(47):
        block = {
            **{"attn_norm": (2048,), "ffn_norm": (2048,), "attn_q_a_norm": (768,), "attn_kv_a_norm": (512,)},
            **{"attn_q_a": (768, 2048), "attn_q_b": (5120, 768), "attn_kv_a_mqa": (576, 2048)},
            **{"attn_k_b": (20, 512, 192), "attn_v_b": (20, 256, 512), "attn_output": (2048, 5120)},
        }
        if i == 0:
            block |= {"ffn_gate": (10240, 2048), "ffn_up": (10240, 2048), "ffn_down": (2048, 10240)}
        else:
            shapes[f"blk.{i}.exp_probs_b.bias"] = (64,)
            block |= {"ffn_gate_inp": (64, 2048), "ffn_gate_exps": (64, 1536, 2048), "ffn_up_exps": (64, 1536, 2048)}
            block |= {"ffn_down_exps": (64, 2048, 1536), "ffn_gate_shexp": (1536, 2048)}
            block |= {"ffn_up_shexp": (1536, 2048), "ffn_down_shexp": (2048, 1536)}
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
    return keys, shapes


def test_released_gguf():
    keys, shapes = released()
    assert len(shapes) == 844
    checkpoint = shapes_only("deepseek2", keys, shapes)
    c = glm.read_config(checkpoint)
    assert (c.vocab, c.nope_dim, c.value_dim, c.experts.shared_ffn) == (glm.GLM_VOCAB, 192, 256, 1536)
    assert state_bytes(glm.state_spec(c), 1, 2) == 54144  # 576 values in each of 47 layers
    assert [c.expands(*step) for step in ((136, 0), (137, 0), (398, 10**6), (399, 10**6))] == [False, True, False, True]
    assert_layout(glm.layout(c, checkpoint), shapes)


def fuse_kv(keys, tensors):
    for i in range(3):
        k, v = (tensors.pop(f"blk.{i}.attn_{x}_b.weight") for x in "kv")
        tensors[f"blk.{i}.attn_kv_b.weight"] = np.concatenate([k.swapaxes(1, 2), v], axis=1).reshape(-1, R)


def fuse_experts(keys, tensors):
    for i in (1, 2):
        gate, up = (tensors.pop(f"blk.{i}.ffn_{x}_exps.weight") for x in ("gate", "up"))
        tensors[f"blk.{i}.ffn_gate_up_exps.weight"] = np.concatenate([gate, up], axis=1)


def add_mtp(keys, tensors):
    block = {k.replace("blk.2.", "blk.3."): 2 * a for k, a in tensors.items() if k.startswith("blk.2.")}
    tensors |= block | {"blk.3.nextn.eh_proj.weight": np.ones((32, 64), np.float32)}
    tensors |= {f"blk.3.nextn.{k}.weight": np.ones(32, np.float32) for k in ("enorm", "hnorm", "shared_head_norm")}
    keys |= {"block_count": 4, "nextn_predict_layers": 1}


@pytest.mark.parametrize(
    "change", [fuse_kv, fuse_experts, add_mtp, lambda keys, tensors: keys.pop("expert_gating_func")]
)
def test_gguf_variants(ops, tmp_path, change):
    assert_golden(gguf_model(tmp_path, change, ops), 64)


@pytest.mark.parametrize("matrices", ["Q8_0", "Q5_1"])
def test_gguf_fused_and_quantized(ops, tmp_path, matrices):
    """A fused quantized matrix gives the logits of its values as gguf-py reads them."""
    ids = tiny.golden("glm")["ids"][:128]
    paths = [
        write_gguf(FOLDER, tmp_path / f"{expand}.gguf", matrices, expand=expand, change=fuse_kv)
        for expand in (False, True)
    ]
    assert passes(tiny.errors(*(tiny.logits_of(load_model(path, ops), ids, [20]) for path in paths)))


@pytest.mark.parametrize(("vocab", "supported"), [(glm.GLM_VOCAB, True), (96, False)])
def test_gguf_softmax_router(tmp_path, vocab, supported):
    """A converter wrote softmax for this model by mistake; a softmax of other models does not norm its weights."""
    path = write_gguf(FOLDER, tmp_path / "m.gguf", change=lambda keys, tensors: keys.update({"expert_gating_func": 1}))
    checkpoint = open_checkpoint(path)
    checkpoint.tensors["token_embd.weight"] = Tensor("token_embd.weight", "F32", (vocab, 32), np.empty((vocab, 0)))
    if supported:
        assert glm.read_config(checkpoint).vocab == vocab
    else:
        with pytest.raises(BimetalError, match="expert_weights_norm is True; supported: False"):
            glm.read_config(checkpoint)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda keys, _: keys.update({"expert_group_count": 8}), "expert_group_count is 8; supported: 1"),
        (
            lambda keys, _: keys.update({"rope.scaling.type": "yarn"}),
            "lacks the required key deepseek2.rope.scaling.factor",
        ),
        (lambda keys, _: keys.update({"expert_gating_func": 3}), "expert_gating_func is 3; supported: 1 or 2"),
        (lambda keys, _: keys.pop("attention.key_length_mla"), "lacks the required key deepseek2.attention.key_length"),
        (lambda keys, _: keys.pop("attention.q_lora_rank"), "lacks tensors blk.0.attn_q.weight, "),
        (lambda keys, _: keys.update({"attention.key_length_mla": 8}), "8 roped channels leave none"),
        (lambda keys, _: keys.update({"nextn_predict_layers": 3}), "leaves 0 layers"),
        (lambda keys, tensors: tensors.pop("blk.1.exp_probs_b.bias"), "lacks tensor blk.1.exp_probs_b.bias"),
        (
            lambda keys, tensors: tensors.update({"blk.0.attn_k_b.weight": np.ones((H, N, R), np.float32)}),
            r"attn_k_b.weight: shape \(3, 16, 32\), the model's configuration says \(3, 32, 16\)",
        ),
    ],
)
def test_gguf_refused(tmp_path, change, message):
    with pytest.raises(BimetalError, match=message):
        gguf_model(tmp_path, change)


# -- logits stated without a file --------------------------------------------------------------------------------------

IDS = [(7 * t * t + 3 * t + 5) % 97 for t in range(24)]
LAST = [-1.35272, 0.26237, 0.22759, 0.66258, -0.04682, -0.21890]  # first logits of the last token


def formula_model(path):
    hidden, heads = 48, 5
    values = {
        **{"model_type": "glm4_moe_lite", "vocab_size": 97, "hidden_size": hidden, "intermediate_size": 80},
        **{"num_hidden_layers": 3, "num_attention_heads": heads, "q_lora_rank": 40, "kv_lora_rank": 32},
        **{"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
        **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1},
        **{"routed_scaling_factor": 1.8, "first_k_dense_replace": 1, "max_position_embeddings": 202752},
    }
    shapes = {name: (97, hidden) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    shapes["model.norm.weight"] = (hidden,)
    for i in range(3):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        shapes |= {
            f"{layer}self_attn.q_a_proj.weight": (40, hidden),
            f"{layer}self_attn.q_a_layernorm.weight": (40,),
            f"{layer}self_attn.q_b_proj.weight": (heads * 20, 40),
            f"{layer}self_attn.kv_a_proj_with_mqa.weight": (40, hidden),
            f"{layer}self_attn.kv_a_layernorm.weight": (32,),
            f"{layer}self_attn.kv_b_proj.weight": (heads * 28, 32),
            f"{layer}self_attn.o_proj.weight": (hidden, heads * 16),
        }
        if i == 0:
            shapes |= formula_ffn(f"{layer}mlp.", hidden, 80)
            continue
        shapes |= {f"{layer}mlp.gate.weight": (8, hidden), f"{layer}mlp.gate.e_score_correction_bias": (8,)}
        shapes |= formula_ffn(f"{layer}mlp.shared_experts.", hidden, 24)
        for e in range(8):
            shapes |= formula_ffn(f"{layer}mlp.experts.{e}.", hidden, 24)
    return write_folder(path, values, {name: formula_weight(name, *shape) for name, shape in shapes.items()})


def test_stated_logits(ops, tmp_path):
    """With the configuration's epsilon in all norms; 1e-6 in the latent ones moves a logit by 4e-5."""
    logits = tiny.logits_of(load_model(formula_model(tmp_path / "m"), ops), IDS)
    assert logits[23, :6] == pytest.approx(LAST, abs=1e-5)
    assert logits[0, :3] == pytest.approx([1.18382, 0.53363, -0.06115], abs=2e-5)
    assert (logits[23].argmax(), np.abs(logits).mean()) == (43, pytest.approx(1.333349, abs=2e-6))


# -- two forms of attention, one state ---------------------------------------------------------------------------------

FORMS = {"latent": False, "expanded": True}
STEPS = {
    "a chain": lambda ids: Step.chain(ids[60:68], 60),
    "a tree": lambda ids: Step.tree(ids[60:68], [PAST, PAST, 0, 1, 2, 2, 4, 3], 60),
    "a block": lambda ids: Step.block(ids[60:68], 60),
    "one row": lambda ids: Step.chain(ids[60:61], 60),
}


@pytest.fixture(params=FORMS.values(), ids=FORMS.keys())
def form(request, monkeypatch):
    """Make every step take this form of attention."""
    monkeypatch.setattr(glm.Config, "expands", lambda config, rows, past: request.param)
    return request.param


def test_one_form_for_all(ops, form):
    model, ids = tiny.load("glm", ops), tiny.golden("glm")["ids"]
    assert passes(tiny.golden_errors(tiny.logits_of(model, ids), "glm"))
    assert passes(tiny.golden_errors(tiny.logits_of(model, ids[:128], [30, 1, 1, 40]), "glm"))


def test_forms_compute_through_ops_only(form):
    assert all(type(output) is Opaque for output in run("glm", OpaqueOps()))


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_forms_agree(ops, step, monkeypatch):
    model, ids, logits = tiny.load("glm", ops), tiny.golden("glm")["ids"].astype(np.int32), []
    for expand in FORMS.values():
        monkeypatch.setattr(glm.Config, "expands", lambda config, rows, past, expand=expand: expand)
        state = model.new_state(tiny.CAPACITY)
        tiny.run(model, state, ids[:60])
        logits.append(model.ops.read(model.forward(state, step(ids))))
    np.testing.assert_allclose(*logits, atol=LOGIT)


@pytest.mark.parametrize(
    ("past", "rows", "form"), [(0, 136, "latent"), (0, 137, "expanded"), (60, 136, "latent"), (60, 137, "expanded")]
)
def test_form_that_is_taken(monkeypatch, past, rows, form):
    """With 32 latent, 16 and 24 other channels: rows * (past + rows) * 24 products against past * 32 * 40."""
    model, calls, ids = fresh("glm"), [], tiny.golden("glm")["ids"]
    state = model.new_state(tiny.CAPACITY)
    if past:
        tiny.run(model, state, ids[:past])
    for name in ("latent", "expanded"):
        right = getattr(model.ops, f"{name}_attention")
        spy = lambda *a, right=right, name=name: calls.append(name) or right(*a)  # noqa: E731
        monkeypatch.setattr(model.ops, f"{name}_attention", spy, raising=False)
    tiny.run(model, state, ids[past : past + rows])
    assert calls == [form] * 3


# -- mistakes ----------------------------------------------------------------------------------------------------------


def split_kv(wrong):
    """Take keys (H, N, R) and values (H, V, R) out of the fused matrix (H * (N + V), R) in a wrong way."""

    def plant(model, patch):
        for layer in model.weights.layers:
            kv = np.concatenate([layer.k_up.swapaxes(1, 2), layer.v_up], axis=1).reshape(-1, R)
            k, v = wrong(kv)
            layer.k_up, layer.v_up = k.swapaxes(1, 2), v
        return model

    return plant


def value_first(kv):
    heads = kv.reshape(H, N + V, R)
    return heads[:, V:], heads[:, :V]


def all_keys_first(kv):
    return kv[: H * N].reshape(H, N, R), kv[H * N :].reshape(H, V, R)


def not_transposed(kv):
    heads = kv.reshape(H, N + V, R)
    return np.ascontiguousarray(heads[:, :N]).reshape(H, R, N).swapaxes(1, 2), heads[:, N:]


def scaled(factor):
    """Both forms with another factor on the scores, whose scale is the last argument."""

    def plant(model, patch):
        for name in ("latent_attention", "expanded_attention"):
            model = op(name, lambda f, *a: f(*a[:-1], a[-1] * factor))(model, patch)
        return model

    return plant


def only_heads(count, wrong):
    """Another rope on queries (3 heads) or keys (1)."""
    return op("rope", lambda f, x, *a: wrong(f, x, *a) if x.shape[1] == count else f(x, *a))


def rows_in_place(change):
    """Give the attention ops other rows to store and read; `change` maps (latent, k_rope)."""

    def plant(model, patch):
        def latent_attention(f, q_latent, q_rope, latent, k_rope, *rest):
            return f(q_latent, q_rope, *change(latent, k_rope), *rest)

        def expanded_attention(f, q_nope, q_rope, latent, k_rope, *rest):
            return f(q_nope, q_rope, *change(latent, k_rope), *rest)

        return op("expanded_attention", expanded_attention)(
            op("latent_attention", latent_attention)(model, patch), patch
        )

    return plant


def norm_over_all(latent, k_rope):
    row = NumpyOps().rms_norm(np.concatenate([latent, k_rope], axis=-1), None, 1e-6)
    return row[:, :R], row[:, R:]


def latent_norms(wrong: Callable) -> Callable:
    """Replace the norms of latents; `wrong` gets the right norm, x and the weight."""

    def plant(model, patch):
        right, latent = model.ops.rms_norm, [w for layer in model.weights.layers for w in (layer.q_norm, layer.kv_norm)]

        def norm(x, w, eps):
            return wrong(right, x, w) if any(w is each for each in latent) else right(x, w, eps)

        patch.setattr(model.ops, "rms_norm", norm, raising=False)
        return model

    return plant


ROPED_FIRST = np.r_[N : N + P, :N]  # channels of a query head


TRAPS = [
    ("half-split pairs", op("rope", rotate_adjacent)),  # rows are reordered at load, so that this is one reorder short
    ("half-split pairs of queries", only_heads(3, rotate_adjacent)),
    ("half-split pairs of keys", only_heads(1, rotate_adjacent)),
    ("scale by the latent row", scaled(((N + P) / (R + P)) ** 0.5)),
    ("scale by the unroped channels", scaled(((N + P) / N) ** 0.5)),
    ("YaRN's factor on the scale", scaled(1.35**2)),
    ("values before keys", split_kv(value_first)),
    ("all keys before all values", split_kv(all_keys_first)),
    ("key matrix not transposed", split_kv(not_transposed)),
    (
        "roped channels first",
        weight("q_up", wrong=lambda w: w.reshape(H, N + P, -1)[:, ROPED_FIRST].reshape(w.shape)),
    ),
    ("keys without rope", only_heads(1, lambda f, x, *a: x)),
    ("rope theta x 100", config(rope=lambda c: Rope(tuple(1e6 ** (-2 * j / P) for j in range(P // 2))))),
    ("norm over the whole row", rows_in_place(norm_over_all)),
    ("norm on the roped key too", rows_in_place(lambda c, k: (c, NumpyOps().rms_norm(k, None, 1e-6)))),
    ("no latent norms", latent_norms(lambda norm, x, w: x * w)),
    ("latent norms without weights", weight("q_norm", "kv_norm", wrong=np.ones_like)),
    ("epsilon of latent norms", latent_norms(lambda norm, x, w: norm(x, w, 1e-6))),
    *ROUTER_TRAPS,
]


@pytest.mark.parametrize("plant", [t[1] for t in TRAPS], ids=[t[0] for t in TRAPS])
def test_mistake_is_seen(plant, monkeypatch):
    errors = errors_of(plant(fresh("glm"), monkeypatch), "glm")
    print(errors)
    assert not passes(errors)


def test_tables_of_traps_start_from_a_right_model():
    assert passes(errors_of(fresh("glm"), "glm"))


# -- other programs ----------------------------------------------------------------------------------------------------


def assert_near(logits, expected, label):
    errors = tiny.errors(logits, expected)
    print(f"{label}: {errors}")
    assert passes(errors)


@pytest.mark.model
@pytest.mark.parametrize("pieces", [[], [100, 7, *[1] * 100]], ids=["whole", "pieces"])
def test_mlx_lm(ops, pieces):
    ids = tiny.golden("glm")["ids"]
    expected = mlx_lm_logits(mlx_lm_model(FOLDER, rope_theta=1e4), ids, pieces)
    model = tiny.load("glm", ops)
    assert_near(tiny.logits_of(model, ids, pieces), expected, f"{ops.name} to mlx-lm")


MLX_LM = {
    **{"model_type": "glm4_moe_lite", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128},
    **{"num_hidden_layers": 3, "num_attention_heads": 5, "num_key_value_heads": 5, "q_lora_rank": 64},
    **{"kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 16, "v_head_dim": 32, "rope_theta": 1e4},
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "n_shared_experts": 1},
    **{"routed_scaling_factor": 1.8, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5},
}


@pytest.mark.model
@pytest.mark.parametrize("bits", [3, 4, 6, 8])
def test_quantized_by_mlx_lm(ops, tmp_path, bits):
    """Both forms of attention on quantized embed_q and unembed_out, the key matrix used either way round."""
    path = write_mlx_lm(tmp_path / "m", MLX_LM, bits, group_size=64, bits=bits)
    tensors = open_checkpoint(path).tensors
    assert tensors["model.layers.0.self_attn.embed_q.weight"].bits == bits
    assert tensors["model.layers.1.mlp.gate.weight"].type == "F32"
    ids = np.random.default_rng(bits).integers(96, size=320)
    expected = mlx_lm_logits(mlx_lm_model(path), ids)
    model = load_model(path, ops)
    assert [model.config.expands(*step) for step in ((140, 0), (20, 140), (160, 160))] == [True, False, True]
    assert_near(tiny.logits_of(model, ids, [140, 20]), expected, f"{ops.name} to mlx-lm, {bits} bits")


@pytest.mark.model
def test_llama_cpp(ops, tmp_path):
    path = write_gguf(FOLDER, tmp_path / "m.gguf")
    ids = tiny.golden("glm")["ids"]
    assert_near(tiny.logits_of(load_model(path, ops), ids), llama_cpp_logits(path, ids), f"{ops.name} to llama.cpp")


@pytest.mark.model
def test_llama_cpp_with_mtp(ops, tmp_path):
    """A block for multi-token prediction changes nothing in either program."""
    path = write_gguf(FOLDER, tmp_path / "m.gguf", change=add_mtp)
    ids = tiny.golden("glm")["ids"][:64]
    assert_near(tiny.logits_of(load_model(path, ops), ids), llama_cpp_logits(path, ids), f"{ops.name} to llama.cpp")


@pytest.mark.model
@pytest.mark.parametrize("name", ["deepseek2", "deepseek3"])
def test_latents_have_an_epsilon_of_their_own(name):
    """As in transformers, whose models read rms_norm_eps for the other norms alone."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    source, ids = tiny.checkpoint(name), tiny.golden(name)["ids"][:64].astype(np.int64)
    eps = {"rms_norm_eps": 0.01}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tiny.FOLDER / name, dtype=torch.float32, **eps)
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor(ids[None])).logits[0].numpy()
    found = tiny.logits_of(load_model(replace(source, config=source.config | eps), NumpyOps()), ids)
    assert np.abs(found - expected).max() < 1e-4
