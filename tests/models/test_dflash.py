"""The draft: against the published library, from every kind of file, for every family of targets, and its refusals."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import tiny_draft
from draft_files import (
    LAYER_NAMES,
    LOGIT,
    add_tensor,
    assert_drafts_leave_no_trace,
    assert_refused,
    finish,
    gguf_writer,
    states,
)
from folders import rewritten
from test_ops_only import OPEN, Opaque, OpaqueOps, shown

from common.checkpoint import open_checkpoint
from common.errors import BimetalError
from common.models import load_model
from common.models.dflash import CONTEXT_ROWS
from common.models.dflash_config import read_config
from common.models.drafts import load_pair
from common.models.taps import Tap
from common.models.target import Target
from common.quants import dequantize
from common.step import Step
from common.storage import KVSpec

FOLDER = tiny.FOLDER / "dflash"
GOLDEN = np.load(FOLDER / "golden.npz")
TEXT = tiny.golden("qwen35")["ids"].astype(np.int32)


def proposals(pair, anchors):
    return np.stack([pair.ops.read(pair.propose(state, token)) for state, token in states(pair, TEXT, anchors)])


def test_logits_of_the_published_library(ops):
    """Before, at and beyond the window of 8, with tapped layers listed out of order."""
    pair = load_pair(FOLDER, tiny.load("qwen35", ops))
    assert np.abs(proposals(pair, GOLDEN["anchors"]) - GOLDEN["logits"]).max() < LOGIT


def test_a_draft_changes_nothing_and_a_tree_commits_like_a_chain(ops):
    assert_drafts_leave_no_trace(load_pair(FOLDER, tiny.load("qwen35", ops)), TEXT)


def test_it_computes_through_ops_only():
    rows = [load_pair(FOLDER, load_model(tiny.checkpoint("qwen35"), ops)) for ops in (OpaqueOps(), OPEN)]
    rows = [proposals_of_one_step(pair) for pair in rows]
    assert type(rows[0]) is Opaque
    assert np.array_equal(shown(rows[0]), rows[1])


def proposals_of_one_step(pair):
    state = pair.new_state(64)
    pair.forward(state, Step.chain(TEXT[:9], 0), slice(-1, None))
    state.commit(range(9))
    return pair.propose(state, 5)


# -- files -------------------------------------------------------------------------------------------------------------


def write_gguf(path: Path, dialect: str, matrices: str = "F32") -> Path:
    """The draft as a GGUF file, by llama.cpp's converter or by lucebox's."""
    upstream = dialect == "llama.cpp"
    architecture = "dflash" if upstream else "qwen35-dflash-draft"
    c = json.loads((FOLDER / "config.json").read_text())
    writer = gguf_writer(path, architecture, c)
    writer.add_sliding_window(c["sliding_window"])
    writer.add_array(f"{architecture}.attention.sliding_window_pattern", [True, False])
    ids, mask = c["dflash_config"]["target_layer_ids"], c["dflash_config"]["mask_token_id"]
    if upstream:
        writer.add_uint32("dflash.block_size", c["block_size"])
        writer.add_array("dflash.target_layers", [i + 1 for i in ids])
        writer.add_mask_token_id(mask)
    else:
        writer.add_uint32(f"{architecture}.dflash.block_size", c["block_size"])
        writer.add_uint32(f"{architecture}.dflash.n_target_layers", len(ids))
        writer.add_array(f"{architecture}.dflash.target_layer_ids", ids)
        writer.add_uint32(f"{architecture}.dflash.mask_token_id", mask)
    names = LAYER_NAMES | {"norm": "output_norm", "fc": "fc" if upstream else "dflash.fc"}
    names |= {"hidden_norm": "enc.output_norm" if upstream else "dflash.hidden_norm"}
    for name, tensor in open_checkpoint(FOLDER).tensors.items():
        parts = name.removesuffix(".weight").split(".")
        prefix = f"blk.{parts[1]}." if parts[0] == "layers" else ""
        name = prefix + names[".".join(parts[2:] if prefix else parts)] + ".weight"
        add_tensor(writer, name, dequantize(tensor), matrices)
    finish(writer)
    return path


@pytest.mark.parametrize("dialect", ["llama.cpp", "lucebox"])
def test_gguf(dialect, tmp_path):
    target = tiny.load("qwen35", OPEN)
    pair = load_pair(write_gguf(tmp_path / "draft.gguf", dialect), target)
    folder = load_pair(FOLDER, target).draft
    assert replace(pair.draft, eps=folder.eps) == replace(folder, target_layers=None)  # float32 in a GGUF
    assert np.abs(proposals(pair, GOLDEN["anchors"]) - GOLDEN["logits"]).max() < LOGIT


def test_quantized_fc_is_split_between_blocks(tmp_path, ops):
    pair = load_pair(write_gguf(tmp_path / "draft.gguf", "llama.cpp", "Q8_0"), tiny.load("qwen35", ops))
    assert np.abs(proposals(pair, GOLDEN["anchors"]) - GOLDEN["logits"]).max() < 0.3


@pytest.mark.parametrize("target", tiny.MODELS)
def test_every_family_is_a_target(target, tmp_path, ops):
    """With the last layer tapped, too; the target's logits equal those without a draft."""
    plain = tiny.load(target, ops)
    c, layers = plain.config, len(plain.layout.layers)
    pair = load_pair(tiny_draft.write(tmp_path / "draft", c.hidden, c.vocab, layers, [0, layers - 1]), plain)
    state, text = pair.new_state(64), tiny.golden(target)["ids"].astype(np.int32)
    logits = pair.ops.read(pair.forward(state, Step.chain(text[:20], 0), slice(-1, None)))
    state.commit(range(20))
    assert np.abs(logits - tiny.logits_of(plain, text[:20])[-1]).max() < LOGIT
    proposed = pair.ops.read(pair.propose(state, int(text[20])))
    assert proposed.shape == (4, plain.config.vocab)
    assert np.isfinite(proposed).all()


def rms(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def turned(x, positions):
    """Apply rope to x (T, heads, D), base 10,000."""
    n = x.shape[-1] // 2
    angle = np.asarray(positions)[:, None] * 10000.0 ** (-np.arange(n) / n)
    c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
    return np.concatenate([x[..., :n] * c - x[..., n:] * s, x[..., n:] * c + x[..., :n] * s], -1)


def test_lagunas_form_against_its_formula(tmp_path, ops):
    """Against float64, from the features of the target's own layers; each row sees 8 positions."""
    target, P = tiny.load("laguna", ops), 13
    c, layers = target.config, len(target.layout.layers)
    folder = tiny_draft.write(tmp_path / "draft", c.hidden, c.vocab, layers, [1, layers - 1], laguna=True)
    pair, text = load_pair(folder, target), tiny.golden("laguna")["ids"].astype(np.int32)
    state, tap = pair.new_state(64), Tap(ops, pair.draft.taps)
    target.definition.forward(tap, c, target.weights, target.new_state(64), Step.chain(text[:P], 0))
    pair.forward(state, Step.chain(text[:P], 0), slice(-1, None))
    state.commit(range(P))
    got = pair.ops.read(pair.propose(state, int(text[P])))

    w = {name: dequantize(tensor).astype(np.float64) for name, tensor in open_checkpoint(folder).tensors.items()}
    w = {name.removesuffix(".weight"): value for name, value in w.items()}
    features = [ops.read(tap.outputs[i]) for i in pair.draft.taps]
    normed = [rms(f, w[f"aux_hidden_norms.{i}"]) for i, f in enumerate(features)]
    context = rms(np.concatenate(normed, -1) @ w["fc"].T, w["hidden_norm"])
    table = dequantize(tiny.checkpoint("laguna").tensors["model.embed_tokens.weight"]).astype(np.float64)
    H, K, D = tiny_draft.HEADS, tiny_draft.KV_HEADS, tiny_draft.HEAD_DIM
    x = table[[text[P], 1, 1, 1, 1]]
    for i in range(tiny_draft.LAYERS):
        at = {name.removeprefix(f"layers.{i}."): value for name, value in w.items() if name.startswith(f"layers.{i}.")}
        h = rms(x, at["input_layernorm"])
        rows, places = np.concatenate([rms(context, at["input_layernorm"]), h]), np.arange(P + 5)
        qkv = (rows @ at["self_attn.qkv_proj"].T).reshape(P + 5, H + 2 * K, D)
        q = turned(rms(qkv[P:, :H], at["self_attn.q_norm"]), places[P:])
        k = turned(rms(qkv[:, H : H + K], at["self_attn.k_norm"]), places)
        out = np.zeros((5, H, D))
        for t in range(5):
            seen = (places > P + t - 8) & (places <= P + t)
            for head in range(H):
                score = k[seen, head // 2] @ q[t, head] / 4
                p = np.exp(score - score.max())
                out[t, head] = p / p.sum() @ qkv[seen, H + K + head // 2]
        out *= np.log1p(np.exp(h @ at["self_attn.g_proj"].T))[..., None]
        x = x + out.reshape(5, H * D) @ at["self_attn.o_proj"].T
        r = rms(x, at["post_attention_layernorm"])
        gate = r @ at["mlp.gate_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * (r @ at["mlp.up_proj"].T)) @ at["mlp.down_proj"].T
    head = tiny.checkpoint("laguna").tensors.get("lm_head.weight")
    want = rms(x[1:], w["norm"]) @ (table if head is None else dequantize(head)).T
    assert np.abs(got - want).max() < 1e-3
    assert pair.draft.is_causal == (True, True)


def test_layers_keep_their_window_and_full_ones_a_ring(tmp_path):
    pair = load_pair(FOLDER, tiny.load("qwen35", OPEN))
    spec = [state.window for layer in pair.new_state(8).layers[8:] for state in vars(layer).values()]
    assert spec == [8, CONTEXT_ROWS]
    assert pair.draft.is_causal == (True, False)
    assert isinstance(pair.draft.windows[0], int)
    assert KVSpec(2, 16, 16, CONTEXT_ROWS) == KVSpec(2, 16, 16, 4096)


def test_causality_and_layers_come_from_the_file(tmp_path):
    def config(name, **changes):
        return read_config(open_checkpoint(rewritten(FOLDER, tmp_path / name, **changes)), Target(32, 96, 8))

    taps = {"mask_token_id": 1, "target_layer_ids": [1, 4, 6]}
    assert config("a", dflash_config=taps | {"causal": True}).is_causal == (True, True)
    assert config("b", dflash_config=taps | {"causal": False}).is_causal == (False, False)
    assert config("c", is_causal=True).is_causal == (True, True)
    assert config("d", layer_types=None).windows == (None, None)
    assert config("e", use_sliding_window=False).windows == (None, None)
    assert config("f", use_sliding_window=False, is_causal=None).is_causal == (True, False)
    assert config("g", dflash_config={"mask_token_id": 1}).taps == (1, 3, 5)  # fc has room for three of eight layers
    assert config("h").taps == (4, 1, 6)  # as listed: the columns of fc are in that order


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DFlash3DraftModel"]}, r"architectures is \['DFlash3DraftModel'\]; supported as a draft"),
        ({"selector_rank": 256}, "selector_rank belongs to another kind of draft"),
        ({"draft_vocab_size": 32}, "draft_vocab_size is 32; supported: 96"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"hidden_size": 64}, "draft for another model: its hidden size is 64, the model's 32"),
        ({"vocab_size": 128}, "draft for another model: its vocabulary is 128, the model's 96"),
        ({"num_target_layers": 64}, "its number of target layers is 64, the model's 8"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 4, 8]}}, r"reads layers \(1, 4, 8\)"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 4, 4]}}, "different target layers"),
        ({"dflash_config": {"mask_token_id": 96, "target_layer_ids": [1, 4, 6]}}, "mask token 96 is outside"),
        ({"dflash_config": {"target_layer_ids": [1, 4, 6]}}, "lacks the required key dflash_config.mask_token_id"),
        ({"block_size": 1}, "block_size is 1"),
        ({"sliding_window": 4, "is_causal": False}, "sliding_window is 4; a block of 5 tokens must fit in it"),
        ({"dflash_config": {"mask_token_id": 1, "use_swa": True}}, "dflash_config.use_swa is True; supported: False"),
        ({"dflash_config": {"mask_token_id": 1, "causal_head": True}}, "causal_head is True; supported: False"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types must name"),
    ],
)
def test_refusals(changes, message, tmp_path):
    assert_refused(rewritten(FOLDER, tmp_path / "draft", **changes), "qwen35", message)


def test_other_kinds(tmp_path):
    folder = rewritten(FOLDER, tmp_path / "draft", architectures=["DominoDraftModel"])
    words = "draft is a draft of the kind Domino; supported: multi-token-prediction blocks, DFlash, DFlash2, DSpark and"
    assert_refused(folder, "qwen35", words)


def test_a_vocabulary_map_and_other_files_are_refused(tmp_path):
    mapped = rewritten(FOLDER, tmp_path / "d2t", lambda tensors: tensors | {"d2t": np.zeros(4, np.float32)})
    assert_refused(mapped, "qwen35", r"a vocabulary of its own \(d2t\)")
    assert_refused(tiny.FOLDER / "qwen35", "qwen35", "qwen35 has no multi-token-prediction block")
    with pytest.raises(BimetalError, match="hidden states, which a model run by mlx-lm does not show"):
        load_pair(FOLDER, object())
