"""Embeddings are pooled hidden states after the last norm: the head makes of them the logits that others computed."""

import json

import numpy as np
import pytest
import tiny

from common import scores
from common.checkpoint import Checkpoint
from common.embeddings import embed
from common.errors import BimetalError
from common.ops import Ops
from common.pooling import Pooling, stated_pooling
from common.reference import NumpyOps
from common.scores import completed, logits_of


def head_of(name: str, hidden: np.ndarray) -> np.ndarray:
    """The logits (vocab,) that the model's head makes of a hidden state (hidden,)."""
    model = tiny.load(name, NumpyOps())
    head = model.weights.embed if model.weights.head is None else model.weights.head
    logits: np.ndarray = model.ops.linear(hidden[None], head)[0]
    return logits


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x)


@pytest.mark.parametrize("name", tiny.MODELS)
def test_the_head_makes_the_golden_logits_of_hidden_states(ops: Ops, name: str) -> None:
    """The golden files are transformers' logits (tests/data/make_tiny_models.py)."""
    model, golden = tiny.load(name, ops), tiny.golden(name)
    ids = golden["ids"].tolist()
    found = completed(embed(model, ids, len(ids), Pooling("last")))
    assert found.dtype == np.float32
    assert np.linalg.norm(found) == pytest.approx(1, abs=1e-6)
    logits = head_of(name, found)
    expected = golden["logits"][-1]
    assert np.allclose(unit(logits), unit(expected), atol=2e-3)


@pytest.mark.parametrize("name", tiny.MODELS)
def test_the_mean_is_that_of_the_tokens_own_states(ops: Ops, name: str) -> None:
    """Of a prefix each: the hidden states of a causal model do not depend on later tokens."""
    model = tiny.load(name, ops)
    ids = tiny.golden(name)["ids"].tolist()[:6]
    found = completed(embed(model, ids, 6, Pooling("mean")))
    rows = head_of(name, found)
    logits = tiny.run(model, model.new_state(6), np.asarray(ids))
    assert np.allclose(unit(rows), unit(logits.mean(axis=0)), atol=1e-4)  # the head is linear


def test_a_text_of_several_steps(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.load("qwen35", ops)
    ids = tiny.golden("qwen35")["ids"].tolist()
    whole = [completed(embed(model, ids, len(ids), Pooling(pooling))) for pooling in ("last", "mean")]
    monkeypatch.setattr(Ops, "prefill_rows", 5)
    steps = [completed(embed(model, ids, len(ids), Pooling(pooling))) for pooling in ("last", "mean")]
    assert np.allclose(whole, steps, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "qwen35"])
def test_logits_of_the_last_tokens(ops: Ops, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny.load(name, ops), tiny.golden(name)["ids"].tolist()[:23]
    whole = completed(logits_of(model, ids, 23))
    monkeypatch.setattr(scores, "PREFILL_ROWS", 8)
    for last in (1, 2, 7, 9, 22, 23, 99):
        found = completed(logits_of(model, ids, 23, last))
        assert found.shape == whole[-last:].shape
        assert np.allclose(found, whole[-last:], atol=2e-4)


def test_files_state_the_pooling(tmp_path) -> None:
    def gguf(**keys: object) -> Checkpoint:
        return Checkpoint(tmp_path, "gguf", {"general.architecture": "qwen3", **keys}, {})

    assert stated_pooling(gguf()) == "last"
    assert stated_pooling(gguf(**{"qwen3.pooling_type": 1})) == "mean"
    assert stated_pooling(gguf(**{"qwen3.pooling_type": 3})) == "last"
    with pytest.raises(BimetalError, match=r"pooling_type is 2; 1 \(mean\) and 3 \(last\) are supported"):
        stated_pooling(gguf(**{"qwen3.pooling_type": 2}))
    folder = Checkpoint(tmp_path, "safetensors", {}, {})
    assert stated_pooling(folder) == "last"
    file = tmp_path / "1_Pooling" / "config.json"
    file.parent.mkdir()
    modes = {"word_embedding_dimension": 1024, "pooling_mode_cls_token": False, "include_prompt": True}
    file.write_text(json.dumps(modes | {"pooling_mode_mean_tokens": True}))
    assert stated_pooling(folder) == "mean"
    file.write_text(json.dumps({"embedding_dimension": 1024, "pooling_mode": "mean"}))
    assert stated_pooling(folder) == "mean"
    file.write_text(json.dumps(modes | {"pooling_mode_lasttoken": True}))
    assert stated_pooling(folder) == "last"
    for broken in (
        {},
        {"pooling_mode_cls_token": True},
        {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True},
    ):
        file.write_text(json.dumps(broken))
        with pytest.raises(BimetalError, match="supported: lasttoken, mean_tokens"):
            stated_pooling(folder)
    file.write_text("[]")
    with pytest.raises(BimetalError, match="cannot be read"):
        stated_pooling(folder)
