"""EAGLE-3 drafts: against their formula in float64, from every kind of file, and their refusals."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny
import tiny_eagle
from draft_files import (
    LAYER_NAMES,
    LOGIT,
    add_tensor,
    assert_drafts_leave_no_trace,
    assert_refused,
    finish,
    gguf_writer,
)
from folders import rewritten
from test_ops_only import OPEN, Opaque, OpaqueOps, shown

from common.checkpoint import open_checkpoint
from common.fit import predict_run
from common.models import load_model
from common.models.drafts import load_pair
from common.models.eagle3_config import config_alone, read_config
from common.models.taps import Tap
from common.models.target import Target
from common.quants import PLAIN, dequantize
from common.reference import NumpyOps
from common.step import Step

PAST, DRAFTS = 13, 3


def text_of(name: str) -> np.ndarray:
    return tiny.golden(name)["ids"].astype(np.int32)


def proposals(pair, text) -> np.ndarray:
    """Logits (DRAFTS, n) after one to DRAFTS tokens from PAST on, the text before them read in three steps."""
    state = pair.new_state(64)
    for end in (5, 6, PAST):
        pair.forward(state, Step.chain(text[state.length : end], state.length), slice(-1, None))
        state.commit(range(end - state.length))
    return np.stack([pair.ops.read(pair.propose(state, text[PAST : PAST + n].tolist()))[0] for n in (1, 2, 3)])


def table_of(name: str) -> np.ndarray:
    return dequantize(tiny.checkpoint(name).tensors["model.embed_tokens.weight"]).astype(np.float64)


def assert_formula(folder: Path, name: str, ops, pair=None) -> None:
    target, text = tiny.load(name, ops), text_of(name)
    pair = load_pair(folder, target) if pair is None else pair
    tap = Tap(ops, pair.draft.taps)
    target.definition.forward(tap, target.config, target.weights, target.new_state(64), Step.chain(text[:PAST], 0))
    features = np.concatenate([ops.read(tap.outputs[i]) for i in pair.draft.taps], -1).astype(np.float64)
    want = tiny_eagle.expected(folder, features, table_of(name), text[: PAST + DRAFTS], DRAFTS)
    got = proposals(pair, text)
    assert np.abs(want).max() > 1
    assert np.abs(got - want).max() < LOGIT


def test_the_formula_is_that_of_the_published_code(tmp_path):
    golden, (features, table, text) = np.load(tiny.FOLDER.parent / "eagle3_golden.npz"), tiny_eagle.golden_inputs()
    for name, folder in tiny_eagle.golden_drafts(tmp_path).items():
        logits = tiny_eagle.expected(folder, features, table, text, DRAFTS)
        assert np.abs(logits - golden[name]).max() < 1e-5, name  # its norms compute in float32


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_logits_of_the_formula(name, ops, tmp_path):
    """In the form of SpecForge and AngelSlim: a vocabulary and a head of its own, the target's embedding."""
    c = tiny.load(name, ops).config
    assert_formula(tiny_eagle.write(tmp_path / "draft", c.hidden, c.vocab, [0, 1, 1]), name, ops)


def test_a_window(ops, tmp_path):
    window = {"layer_types": ["sliding_attention"], "sliding_window": 4}
    assert_formula(tiny_eagle.write(tmp_path / "draft", 32, 96, [0, 1, 2], **window), "llama", ops)


@pytest.mark.parametrize(
    "flags",
    [
        {"norm_before_residual": True},
        {"norm_before_residual": False, "fc_norm": True},
        {"norm_before_residual": True, "norm_output": True, "fc_norm": True},
        {"norm_before_residual": True, "norm_output": True, "norm_before_fc": True},
    ],
)
@pytest.mark.parametrize("hidden", [32, 48])
def test_the_norms_of_speculators(flags, hidden, ops, tmp_path):
    """With a Qwen3 layer and an embedding of its own, also of another width than the target's."""
    folder = tiny_eagle.write_speculators(tmp_path / "draft", hidden, 96, 32, [0, 1, 2], **flags)
    assert_formula(folder, "qwen3", ops)


@pytest.mark.parametrize("name", tiny.MODELS)
def test_every_family_is_a_target(name, tmp_path):
    """The last layer is tapped as well; the target's logits have the bits of the target alone."""
    plain, text = tiny.load(name, NumpyOps()), text_of(name)[:20]
    c, layers = plain.config, len(plain.layout.layers)
    pair = load_pair(tiny_eagle.write(tmp_path / "draft", c.hidden, c.vocab, [0, 1, layers - 1]), plain)
    rows = [each.forward(each.new_state(64), Step.chain(text, 0), slice(-1, None)) for each in (plain, pair)]
    assert np.array_equal(*rows)
    assert proposals(pair, text_of(name)).shape == (DRAFTS, tiny_eagle.VOCAB)


def test_draft_tokens_are_of_the_target_s_vocabulary(ops, tmp_path):
    pair, text = load_pair(tiny_eagle.write(tmp_path / "draft", 32, 96, [0, 1, 1]), tiny.load("llama", ops)), None
    text = text_of("llama")
    state = pair.new_state(64)
    pair.forward(state, Step.chain(text[:9], 0), slice(-1, None))
    state.commit(range(9))
    ids, logp = pair.drafted(state, int(text[9]), 4, 3)
    assert ids.shape == logp.shape == (3, 4)
    first = pair.ops.read(pair.propose(state, [int(text[9])]))[0]
    best = tiny_eagle.chosen_ids(96)[np.argsort(-first, kind="stable")[:4]]
    assert np.array_equal(ids[0], best)
    again = pair.ops.read(pair.propose(state, [int(text[9]), int(best[0])]))[0]  # the embedding of the target's id
    assert ids[1, 0] == tiny_eagle.chosen_ids(96)[again.argmax()]


def test_a_draft_changes_nothing_and_a_tree_commits_like_a_chain(ops, tmp_path):
    pair = load_pair(tiny_eagle.write(tmp_path / "draft", 32, 96, [0, 1, 1]), tiny.load("qwen3", ops))
    assert_drafts_leave_no_trace(pair, text_of("qwen3"))


def test_it_computes_through_ops_only(tmp_path):
    folder, rows = tiny_eagle.write(tmp_path / "draft", 32, 96, [0, 1, 1]), []
    for ops in (OpaqueOps(), OPEN):
        pair = load_pair(folder, load_model(tiny.checkpoint("llama"), ops))
        state = pair.new_state(64)
        pair.forward(state, Step.chain(text_of("llama")[:9], 0), slice(-1, None))
        state.commit(range(9))
        rows.append(pair.propose(state, [5, 6]))
    assert type(rows[0]) is Opaque
    assert np.array_equal(shown(rows[0]), rows[1])


def test_its_memory_is_predicted(tmp_path):
    pair = load_pair(tiny_eagle.write(tmp_path / "draft", 32, 96, [0, 1, 1]), tiny.load("llama", NumpyOps()))
    _, layout, spec = pair.blueprint
    assert len(layout.layers) == len(spec) == len(pair.new_state(8).layers) == 4
    assert min(predict_run(pair.ops, pair.blueprint, 100, 50)) > 0


# -- files -------------------------------------------------------------------------------------------------------------

GGUF_NAMES = LAYER_NAMES | {
    "hidden_norm": "attn_norm_2",
    "norm": "output_norm",
    "lm_head": "output",
    "fc": "fc",
    "input_norm": "enc.output_norm",
}


def write_gguf(folder: Path, path: Path, taps_key: str = "target_layers", matrices: str = "F32", **changes) -> Path:
    """The draft in `folder` as llama.cpp's converter writes it: rope pairs side by side, d2t as ids of the target."""
    c = json.loads((folder / "config.json").read_text())
    writer = gguf_writer(path, "eagle3", c)
    writer.add_rope_dimension_count(c["head_dim"])
    writer.add_vocab_size(c["vocab_size"])
    writer.add_array(f"eagle3.{taps_key}", [i + 1 for i in c["eagle_config"]["eagle_aux_hidden_state_layer_ids"]])
    writer.add_uint32("eagle3.target_hidden_size", changes.pop("hidden", c["hidden_size"]))
    for key in ("norm_before_residual", "norm_before_fc"):
        writer.add_bool(f"eagle3.{key}", c.get(key, False))
    for name, tensor in open_checkpoint(folder).tensors.items():
        if name == "d2t":
            ids = tensor.data.view("<i8") + np.arange(tiny_eagle.VOCAB)
            writer.add_tensor("d2t", changes.pop("ids", ids), raw_dtype=gguf.GGMLQuantizationType.I64)
        elif name != "t2d":
            values, part = dequantize(tensor), name.removesuffix(".weight").removeprefix("midlayer.")
            if part in ("self_attn.q_proj", "self_attn.k_proj"):
                halves = values.reshape(-1, 2, c["head_dim"] // 2, values.shape[-1])
                values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
            name = ("blk.0." if name.startswith("midlayer.") else "") + GGUF_NAMES[part] + ".weight"
            add_tensor(writer, name, values, matrices)
    finish(writer)
    return path


@pytest.mark.parametrize(("key", "fused"), [("target_layers", True), ("extract_layers", False)])
def test_gguf(key, fused, ops, tmp_path):
    changes = {"norm_before_residual": True, "norm_before_fc": fused}
    folder = tiny_eagle.write(tmp_path / "plain", 32, 96, [0, 1, 2], **changes)
    if fused:
        norm = {"input_norm.weight": tiny_eagle.weight("input_norm", 3 * 32)}
        folder = copied(folder, tmp_path / "draft", lambda tensors: tensors | norm)
    target = tiny.load("llama", ops)
    pair = load_pair(write_gguf(folder, tmp_path / "draft.gguf", key), target)
    assert pair.draft.taps == load_pair(folder, target).draft.taps
    assert_formula(folder, "llama", ops, pair)


def test_a_quantized_gguf(ops, tmp_path):
    """Both halves of q, k and v and the three parts of fc begin at a quantization block."""
    folder, target = tiny_eagle.write(tmp_path / "draft", 32, 96, [0, 1, 2]), tiny.load("llama", ops)
    text, rows = text_of("llama"), []
    for matrices in ("F32", "Q8_0"):
        path = write_gguf(folder, tmp_path / f"{matrices}.gguf", "target_layers", matrices)
        rows.append(proposals(load_pair(path, target), text))
    assert np.abs(rows[0] - rows[1]).max() < 0.3


def test_other_names_and_layers(tmp_path):
    """NeMo's prefix, the default layers, those of vLLM, and a midlayer beside the target's number of layers."""
    folder = tiny_eagle.write(tmp_path / "draft", 32, 96, [0, 1, 1])

    def config(name, rename=lambda t: t, layers=36, **changes):
        return read_config(open_checkpoint(copied(folder, tmp_path / name, rename, **changes)), Target(32, 96, layers))

    assert config("a").taps == (0, 1, 1)
    assert config("b", eagle_config=None).taps == (1, 17, 32)  # the inputs of layers 2, 18 and 33
    assert config("c", eagle_aux_hidden_state_layer_ids=[2, 18, 33]).taps == (1, 17, 32)
    assert config("d", num_hidden_layers=36).hidden == 32
    assert config("e", sliding_window=8).window is None
    assert config_alone(open_checkpoint(tmp_path / "a"))[0].taps == (0, 1, 1)
    copied(folder, tmp_path / "f", prefixed)
    text, target = text_of("llama"), tiny.load("llama", NumpyOps())
    copied(folder, tmp_path / "g", architectures=["LlamaForCausalLM"], num_hidden_layers=40)  # as the authors call it
    first, *others = (proposals(load_pair(each, target), text) for each in (folder, tmp_path / "f", tmp_path / "g"))
    assert all(np.array_equal(first, other) for other in others)


def prefixed(tensors):
    return {n if n in ("d2t", "t2d", "lm_head.weight") else f"model.{n}": a for n, a in tensors.items()}


def copied(folder: Path, path: Path, rename=lambda tensors: tensors, **changes) -> Path:
    """As `rewritten`, with tensors of integers."""
    whole = {n: t for n, t in open_checkpoint(folder).tensors.items() if t.type in ("I64", "BOOL")}
    maps = {n: t.data.view(PLAIN[t.type]).reshape(t.shape) for n, t in whole.items()}
    return rewritten(folder, path, lambda tensors: rename(tensors | maps), **changes)


def moved(**changes):
    """d2t with other numbers at some places."""

    def change(tensors):
        d2t = tensors["d2t"].copy()
        for place, number in changes.items():
            d2t[int(place[1:])] = number
        return tensors | {"d2t": d2t}

    return change


def without(*ends):
    return lambda tensors: {n: a for n, a in tensors.items() if not n.endswith(ends)}


REFUSED = [
    ({"hidden_size": 64}, None, "is a draft for another model: its hidden size is 64, the model's 32"),
    ({"target_hidden_size": 64}, None, "is a draft for another model: its hidden size is 64, the model's 32"),
    ({"vocab_size": 128}, None, "is a draft for another model: its vocabulary is 128, the model's 96"),
    ({"draft_vocab_size": 97}, None, "its own vocabulary has 97 tokens; expected 1 to 96"),
    ({"draft_vocab_size": 39}, None, r"d2t: I64 \(40,\); expected I64 or I32 \(39,\)"),
    ({"draft_vocab_size": 2**40}, None, "draft_vocab_size is 1099511627776, expected a number"),
    ({"eagle_config": {"taps": [1]}}, None, "eagle_config.taps is not supported"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, None, "use_aux_hidden_state is False; supported: True"),
    (
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
        None,
        r"reads the outputs of layers \(0, 1, 3\); the model has 3",
    ),
    ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, None, "are not the numbers of target layers, counted from 1"),
    ({"eagle_config": None}, None, r"reads the outputs of layers \(1, 0, -1\)"),
    ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, None, "supported as an EAGLE-3 draft: LlamaForCausalLMEagle3"),
    ({"model_type": "deepseek_v3"}, None, "model_type is 'deepseek_v3'; supported: llama or qwen3"),
    ({"attention_bias": True}, None, "attention_bias is True; supported: False"),
    ({"parallel_drafting": True}, None, "parallel_drafting is True; supported: False"),
    ({"norm_before_fc": True}, None, "norm_before_fc is True; supported: together with norm_before_residual"),
    ({"norm_before_fc": True, "norm_before_residual": True}, None, "lacks tensor input_norm.weight"),
    ({"norm_before_fc": True, "fc_norm": True}, None, "fc_norm and norm_before_fc exclude each other"),
    ({"fc_norm": True}, None, r"lacks tensors fc_norm\.0\.weight, fc_norm\.1\.weight"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, None, "rope type 'dynamic'; supported"),
    ({}, without("q_proj.weight"), r"lacks tensor midlayer\.self_attn\.q_proj\.weight"),
    ({}, without("d2t"), "lacks the tensor d2t: it knows 40 of the model's 96 tokens"),
    ({}, without("lm_head.weight"), "has no head of its own for its 40 tokens"),
    (
        {},
        lambda t: t | {"fc.bias": np.ones(32, np.float32)},
        "has tensor fc.bias, which this architecture does not use",
    ),
    (
        {},
        lambda t: t | {"fc.weight": t["fc.weight"][:, :64]},
        r"fc.weight: shape \(32, 64\), the model's configuration",
    ),
    ({}, moved(_39=57), "d2t leads outside the model's vocabulary of 96"),
    ({}, moved(_0=-1), "d2t leads outside the model's vocabulary of 96"),
    ({}, moved(_3=2**63 - 1), "d2t leads outside the model's vocabulary of 96"),
    ({}, lambda t: t | {"d2t": np.zeros(40, np.int64) - np.arange(40)}, "d2t names a token of the model twice"),
    ({}, lambda t: t | {"d2t": np.zeros(40, np.float32)}, r"d2t: F32 \(40,\); expected I64 or I32 \(40,\)"),
]


@pytest.mark.parametrize(("changes", "rename", "words"), REFUSED)
def test_refusals(changes, rename, words, tmp_path):
    folder = tiny_eagle.write(tmp_path / "draft", 32, 96, [0, 1, 1])
    path = copied(folder, tmp_path / "other", rename or (lambda tensors: tensors), **changes)
    assert_refused(path, "llama", words)


def test_gguf_refusals(tmp_path):
    folder = tiny_eagle.write(tmp_path / "draft", 32, 96, [0, 1, 1])
    for name, changes, words in (
        ("a", {"hidden": 64}, "its hidden size is 64, the model's 32"),
        ("b", {"ids": np.arange(60, 100)}, "d2t leads outside the model's vocabulary of 96"),
        ("c", {"ids": np.arange(40) // 2}, "d2t names a token of the model twice"),
    ):
        assert_refused(write_gguf(folder, tmp_path / f"{name}.gguf", **changes), "llama", words)


@pytest.mark.parametrize(
    ("names", "kind"), [("EagleLlamaForCausalLM", "EAGLE-1 or EAGLE-2"), ("PEagleDraftModel", "P-EAGLE")]
)
def test_other_kinds_of_eagle(names, kind, tmp_path):
    folder = tiny_eagle.write(tmp_path / "draft", 32, 96, [0, 1, 1])
    rename = (lambda tensors: tensors) if kind == "P-EAGLE" else without("hidden_norm.weight")
    path = copied(folder, tmp_path / "other", rename, architectures=[names])
    assert_refused(path, "llama", f"is a draft of the kind {kind}; supported: multi-token-prediction blocks")
