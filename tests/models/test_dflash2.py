"""DFlash2 drafts: against the published library, from both kinds of file, as chain and as tree, and refusals."""

import json
from dataclasses import replace

import numpy as np
import pytest
import tiny
from draft_files import LAYER_NAMES, LOGIT, add_tensor, assert_refused, finish, gguf_writer, read_text, states
from folders import rewritten
from test_dspark import log_softmax
from test_ops_only import OPEN

from common.checkpoint import open_checkpoint
from common.decode.ddtree import best_chain
from common.models.dflash2 import Dflash2Pair
from common.models.drafts import check_file, load_pair
from common.quants import dequantize
from common.step import Step

FOLDER = tiny.FOLDER / "dflash2"
GOLDEN = np.load(FOLDER / "golden.npz")
ANCHORS = GOLDEN["anchors"]
TEXT = tiny.golden("qwen35")["ids"].astype(np.int32)
INNER = json.loads((FOLDER / "config.json").read_text())["dflash_config"]
RANK, CANDIDATES = 8, 6


def test_logits_and_drafts_of_the_published_library(ops):
    """Before, at and beyond the window of 8."""
    pair = load_pair(FOLDER, tiny.load("qwen35", ops))
    assert isinstance(pair, Dflash2Pair)
    assert pair.draft.is_causal == (False, False)
    for (state, token), logits, tokens in zip(
        states(pair, TEXT, ANCHORS), GOLDEN["logits"], GOLDEN["tokens"], strict=True
    ):
        assert np.abs(pair.ops.read(pair.propose(state, token)) - logits).max() < LOGIT
        for k, depth in ((1, 4), (3, 4), (1, 2)):
            ids, _, after = pair.drafted(state, token, k, depth)
            assert best_chain(ids, after) == tokens[:depth].tolist()


def hidden_states(pair):
    """A list to which each block adds the last normed hidden states (4, hidden) of its draft tokens."""
    seen, ops = [], pair.ops

    class Ops(type(ops)):
        def linear(self, x, w):
            if w is pair.draft_weights.selector_hidden:
                seen.append(np.array(x))
            return super().linear(x, w)

    return replace(pair, ops=Ops()), seen


def test_scores_by_their_formula():
    """In float64, of all pairs of candidates that follow each other."""
    pair, seen = hidden_states(load_pair(FOLDER, tiny.load("qwen35", OPEN)))
    state = pair.new_state(64)
    w = {name: dequantize(t).astype(np.float64) for name, t in open_checkpoint(FOLDER).tensors.items()}
    w = {name.removeprefix("candidate_selector."): values for name, values in w.items()}
    read_text(pair, state, TEXT, 20)
    ids, logp, after = pair.drafted(state, int(TEXT[20]), CANDIDATES, 4)
    logits, (hidden,) = GOLDEN["logits"][4].astype(np.float64), seen
    before = [int(TEXT[20])] * CANDIDATES
    for i, row in enumerate(logits):
        chosen = np.argsort(-row)[:CANDIDATES]
        scale = w["hidden_projection.weight"] @ hidden[i]
        for p, token in enumerate(before):
            score = row[chosen] + w["successor_codebook"][chosen] @ (w["predecessor_codebook"][token] * scale)
            order = np.argsort(-score)
            assert ids[i, p].tolist() == chosen[order].tolist()
            assert np.abs(logp[i, p] - log_softmax(score)[order]).max() < LOGIT
            assert after[i, p].tolist() == (order.tolist() if i < 3 else [-1] * CANDIDATES)
        before = chosen.tolist()


def test_it_proposes_again_what_it_proposed(ops):
    pair = load_pair(FOLDER, tiny.load("qwen35", ops))
    state = pair.new_state(64)
    read_text(pair, state, TEXT, 12)
    first = pair.drafted(state, 5, 4, 4)
    pair.forward(state, Step.tree(np.array([TEXT[12], 3, 4]), [-1, 0, 0], 12))
    assert all(np.array_equal(a, b) for a, b in zip(first, pair.drafted(state, 5, 4, 4), strict=True))


def write_gguf(path, matrices="F32", **metadata):
    """The draft as llama.cpp's converter writes it."""
    writer = gguf_writer(path, "dflash", json.loads((FOLDER / "config.json").read_text()))
    writer.add_sliding_window(8)
    writer.add_array("dflash.attention.sliding_window_pattern", [True, True])
    writer.add_array("dflash.target_layers", [i + 1 for i in INNER["target_layer_ids"]])
    writer.add_mask_token_id(INNER["mask_token_id"])
    sizes = {key: value for key, value in INNER.items() if key not in ("target_layer_ids", "mask_token_id")}
    for key, value in (sizes | metadata).items():
        if value is not None:
            writer.add_uint32(f"dflash.{key}", value)
    names = {f"{name}.weight": f"{ours}.weight" for name, ours in LAYER_NAMES.items()}
    for hf, ours in (("attention_conv", "attn_conv"), ("mlp_conv", "ffn_conv")):
        names |= {f"{hf}.kernel_projection.weight": f"{ours}_proj.weight", f"{hf}.base_kernel": f"{ours}_base"}
    top = {"norm.weight": "output_norm.weight", "hidden_norm.weight": "enc.output_norm.weight"}
    top |= {"candidate_selector.predecessor_codebook": "selector_predecessor.weight"}
    top |= {"candidate_selector.successor_codebook": "selector_successor.weight"}
    top |= {"candidate_selector.hidden_projection.weight": "selector_hidden.weight", "fc.weight": "fc.weight"}
    for name, tensor in open_checkpoint(FOLDER).tensors.items():
        parts = name.split(".", 2)
        to = f"blk.{parts[1]}.{names[parts[2]]}" if parts[0] == "layers" else top[name]
        add_tensor(writer, to, dequantize(tensor), matrices)
    finish(writer)
    return path


def test_gguf(tmp_path):
    pair = load_pair(write_gguf(tmp_path / "draft.gguf"), tiny.load("qwen35", OPEN))
    for (state, token), tokens in zip(states(pair, TEXT, ANCHORS), GOLDEN["tokens"], strict=True):
        ids, _, after = pair.drafted(state, token, 1, 4)
        assert best_chain(ids, after) == tokens.tolist()


def test_quantized_gguf(tmp_path, ops):
    pair = load_pair(write_gguf(tmp_path / "draft.gguf", "Q8_0"), tiny.load("qwen35", ops))
    for (state, token), logits in zip(states(pair, TEXT, ANCHORS), GOLDEN["logits"], strict=True):
        assert np.corrcoef(pair.ops.read(pair.propose(state, token)).ravel(), logits.ravel())[0, 1] > 0.98


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_group_size": 5}, "conv_group_size is 5, which does not divide 32 channels"),
        ({"conv_kernel_size": 3}, "conv.*shape .*, the model's configuration says"),
        ({"selector_rank": 16}, "candidate_selector.*: shape"),
        ({"selector_top_k": 97}, "selector_top_k is 97, of a vocabulary of 96"),
        ({"selector_top_k": None}, "lacks the required key dflash_config.selector_top_k"),
        ({"markov_rank": 4}, "dflash_config.markov_rank belongs to another kind of draft"),
        ({"output_multiplier": 0.5}, "dflash_config.output_multiplier is 0.5; supported: 1"),
        ({"final_logit_softcapping": 20.0}, "dflash_config.final_logit_softcapping is 20.0; supported: 0"),
        ({"input_embedding_scale": 2.0}, "input_embedding_scale is 2.0; supported: 1"),
    ],
)
def test_refusals(changes, message, tmp_path):
    assert_refused(rewritten(FOLDER, tmp_path / "draft", dflash_config=INNER | changes), "qwen35", message)


def test_neutral_scales_are_no_obstacle(tmp_path):
    scales = {"output_multiplier": 1.0, "final_logit_softcapping": None, "input_embedding_scale": 1}
    folder = rewritten(FOLDER, tmp_path / "draft", dflash_config=INNER | scales)
    assert load_pair(folder, tiny.load("qwen35", OPEN)).draft == load_pair(FOLDER, tiny.load("qwen35", OPEN)).draft
    check_file(folder, tiny.checkpoint("qwen35"))


def test_a_gguf_file_without_sizes_is_refused(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", conv_group_size=None)
    assert_refused(path, "qwen35", "lacks the required key dflash.conv_group_size")
