"""DSpark drafts: against the published code, from both kinds of file, as chain and as tree, and refusals."""

import json

import numpy as np
import pytest
import tiny
from draft_files import LAYER_NAMES, LOGIT, add_tensor, assert_refused, finish, gguf_writer, read_text, states
from folders import rewritten
from test_ops_only import OPEN

from common.checkpoint import open_checkpoint
from common.decode.ddtree import Tree, grow
from common.models.dflash import DflashPair
from common.models.drafts import check_file, load_pair
from common.models.dspark import DsparkPair
from common.quants import dequantize

FOLDER = tiny.FOLDER / "dspark"
GOLDEN = np.load(FOLDER / "golden.npz")
ANCHORS = GOLDEN["anchors"]
TEXT = tiny.golden("qwen35")["ids"].astype(np.int32)
RANK = 32


def log_softmax(x):
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


def test_logits_and_drafts_of_the_published_code(ops):
    pair = load_pair(FOLDER, tiny.load("qwen35", ops))
    assert isinstance(pair, DsparkPair)
    for (state, token), logits, tokens, biased in zip(
        states(pair, TEXT, ANCHORS), *map(GOLDEN.get, ARRAYS), strict=True
    ):
        assert np.abs(pair.ops.read(pair.propose(state, token)) - logits).max() < LOGIT
        ids, logp, _ = pair.drafted(state, token, 1, 4)
        assert ids.ravel().tolist() == tokens.tolist()
        want = np.take_along_axis(log_softmax(biased), tokens[:, None], -1)
        assert np.abs(logp.ravel() - want.ravel()).max() < LOGIT


ARRAYS = ("logits", "tokens", "biased")


def expected(logits, weights, token, k):
    """In float64, candidates of each position after each candidate of the row that the greedy draft chose from."""
    before, after = (dequantize(weights[f"markov_head.markov_w{i}.weight"]).astype(np.float64) for i in (1, 2))
    ids, logp, given = [], [], [token] * k
    for row in logits.astype(np.float64):
        every = log_softmax(row + before[given] @ after.T)
        ids.append(np.argsort(-every, axis=-1)[:, :k])
        logp.append(np.take_along_axis(every, ids[-1], -1))
        given = ids[-1][0]
    return np.stack(ids), np.stack(logp)


def test_candidates_depend_on_the_token_before(ops):
    pair, weights = load_pair(FOLDER, tiny.load("qwen35", ops)), open_checkpoint(FOLDER).tensors
    for (state, token), logits in zip(states(pair, TEXT, ANCHORS), GOLDEN["logits"], strict=True):
        ids, logp, after = pair.drafted(state, token, 5, 3)
        want_ids, want_logp = expected(logits[:3], weights, token, 5)
        assert np.abs(logp - want_logp).max() < LOGIT
        assert (ids == want_ids).mean() > 0.95  # but for near-ties
        for d, p, c in np.ndindex(*ids.shape):
            row = after[d, p, c]
            same = ids[d, 0].tolist()
            assert row == (same.index(ids[d, p, c]) if d < 2 and ids[d, p, c] in same else -1)
        assert (after[:2, 0, 0] == 0).all()


def test_the_tree_is_the_likeliest_prefixes(ops):
    pair = load_pair(FOLDER, tiny.load("qwen35", ops))
    state = pair.new_state(64)
    read_text(pair, state, TEXT, 9)
    ids, logp, after = pair.drafted(state, int(TEXT[9]), 4, 4)
    tree, every = Tree(7), {}

    def visit(prefix, depth, row, chance):
        for token, p, below in zip(ids[depth, row], logp[depth, row], after[depth, row], strict=True):
            here = (*prefix, int(token))
            every[here] = chance + float(p)
            if depth + 1 < len(ids) and below >= 0:
                visit(here, depth + 1, below, every[here])

    visit((), 0, 0, 0.0)
    grow(tree, ids, logp, 12, after)
    paths: list[tuple[int, ...]] = [()]
    for token, parent in list(zip(tree.tokens, tree.parents, strict=True))[1:]:
        paths.append((*paths[parent], token))
    best = sorted(every.values(), reverse=True)[:12]
    assert np.allclose(sorted((every[path] for path in paths[1:]), reverse=True), best)


def write_gguf(path, anchor=True, own=False, **metadata):
    """The draft as llama.cpp's converter writes it; `own`: with an embedding and a head."""
    c = json.loads((FOLDER / "config.json").read_text())
    writer = gguf_writer(path, "dflash", c)
    writer.add_uint32("dflash.block_size", c["block_size"])
    writer.add_array("dflash.target_layers", [i + 1 for i in c["target_layer_ids"]])
    writer.add_mask_token_id(c["mask_token_id"])
    if anchor is not None:
        writer.add_bool("dflash.sample_from_anchor", anchor)
    for key, value in metadata.items():
        writer.add_uint32(f"dflash.{key}", value)
    top = {"norm": "output_norm", "hidden_norm": "enc.output_norm", "fc": "fc"}
    top |= {"markov_head.markov_w1": "markov_w1", "markov_head.markov_w2": "markov_w2"}
    top |= {"confidence_head.proj": "conf_proj"}
    top |= {"embed_tokens": "token_embd", "lm_head": "output"} if own else {}
    for name, tensor in open_checkpoint(FOLDER).tensors.items():
        stem, _, kind = name.rpartition(".")
        parts = stem.split(".", 2)
        to = f"blk.{parts[1]}.{LAYER_NAMES[parts[2]]}" if parts[0] == "layers" else top.get(stem)
        if to:
            add_tensor(writer, f"{to}.{kind}", dequantize(tensor))
    finish(writer)
    return path


@pytest.mark.parametrize(("anchor", "own"), [(True, False), (None, True)])
def test_gguf(anchor, own, tmp_path):
    target = tiny.load("qwen35", OPEN)
    pair = load_pair(write_gguf(tmp_path / "draft.gguf", anchor, own), target)
    assert (pair.draft.markov_rank, pair.draft.first, pair.draft.tokens) == (RANK, 0, 4)
    assert (pair.draft_weights.head is None) != own
    for (state, token), tokens in zip(states(pair, TEXT, ANCHORS), GOLDEN["tokens"], strict=True):
        assert pair.drafted(state, token, 1, 4)[0].ravel().tolist() == tokens.tolist()


def test_a_block_whose_first_row_is_not_drafted(tmp_path):
    """As SpecForge trains them: row i drafts the token at its own position, and the first follows the known token."""
    target, name = tiny.load("qwen35", OPEN), "DSparkDraftModel"
    inner = {"dflash_config": {"projector_type": "dspark", "mask_token_id": 1, "target_layer_ids": [1, 4, 6]}}
    folder = rewritten(
        FOLDER, tmp_path / "a", architectures=[name], sample_from_anchor=False, target_layer_ids=None, **inner
    )
    pair, weights = load_pair(folder, target), open_checkpoint(FOLDER).tensors
    other = load_pair(write_gguf(tmp_path / "draft.gguf", False), target)
    assert pair.draft.tokens == other.draft.tokens == max(pair.budgets) == 3
    for (state, token), logits in zip(states(pair, TEXT, ANCHORS), GOLDEN["logits"], strict=True):
        ids = pair.drafted(state, token, 1, 4)[0].ravel().tolist()
        assert ids == expected(logits[1:], weights, token, 1)[0].ravel().tolist()
    drafts = [each.drafted(*next(states(each, TEXT, ANCHORS)), 1, 4)[0] for each in (pair, other)]
    assert np.array_equal(*drafts)


def test_without_a_bias_it_is_a_dflash_draft(tmp_path):
    """DeepSpec writes its DFlash drafts so: each row drafts the token after it."""

    def plain(tensors):
        return {name: values for name, values in tensors.items() if "markov" not in name and "confidence" not in name}

    folder = rewritten(FOLDER, tmp_path / "draft", plain, markov_rank=0, markov_head_type=None)
    pair = load_pair(folder, tiny.load("qwen35", OPEN))
    assert type(pair) is DflashPair
    for (state, token), logits in zip(states(pair, TEXT, ANCHORS), GOLDEN["logits"], strict=True):
        ids, _ = pair.drafted(state, token, 1, 4)
        assert ids.ravel().tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_head_type": "gated"}, "markov_head_type is 'gated'; supported: vanilla"),
        ({"markov_head_type": "rnn"}, "markov_head_type is 'rnn'; supported: vanilla"),
        ({"markov_rank": None}, "lacks the required key dflash_config.markov_rank"),
        ({"markov_rank": -1}, "markov_rank is -1; supported: 0 or more"),
        ({"markov_rank": 16}, "markov_w1.weight: shape"),
        ({"dspark_bonus_anchor": True}, "dspark_bonus_anchor is True; supported: False"),
        ({"dflash_query_causal": True}, "dflash_query_causal is True; supported: False"),
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type is 'domino'; supported: dspark"),
        ({"selector_rank": 256}, "selector_rank belongs to another kind of draft"),
        ({"target_layer_ids": [-1, 4, 6]}, "are not the numbers of different target layers"),
        ({"architectures": ["Gemma4DSparkModel"]}, r"architectures is \['Gemma4DSparkModel'\]; supported as a draft"),
        ({"draft_vocab_size": 32}, "draft_vocab_size is 32; supported: 96"),
    ],
)
def test_refusals(changes, message, tmp_path):
    assert_refused(rewritten(FOLDER, tmp_path / "draft", **changes), "qwen35", message)


def test_refusals_of_gguf_files(tmp_path):
    check_file(FOLDER, tiny.checkpoint("qwen35"))
    path = write_gguf(tmp_path / "a.gguf", **{"hyper_connection.count": 4})
    assert_refused(path, "qwen35", r"dflash.hyper_connection.count belongs to another kind of draft")
