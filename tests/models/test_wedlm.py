"""WeDLM-8B's network is Qwen3's: the same weights under its name give the same logits."""

import json

import numpy as np
import pytest
import tiny

from common.checkpoint import Checkpoint
from common.errors import BimetalError
from common.models import load_model
from common.models.llama import read_config
from common.reference import NumpyOps
from generate.__main__ import main


def test_it_is_qwen3(tmp_path, ops):
    ids = tiny.golden("qwen3")["ids"][:64]
    ours = tiny.logits_of(load_model(tiny.wedlm(tmp_path, qk_norm=True), ops), ids)
    assert np.array_equal(ours, tiny.logits_of(tiny.load("qwen3", ops), ids))


def of_7b(folder):
    """The tiny qwen2 model under WeDLM's name, with the keys of WeDLM-7B."""
    return tiny.wedlm(folder, "qwen2", qk_norm=False, attention_bias=True, mask_token_id=95)


def test_the_7b_model_is_qwen2(tmp_path, ops):
    """WeDLM-7B is Qwen2.5: biases, and no norms of q and k."""
    ids = tiny.golden("qwen2")["ids"][:64]
    model = load_model(of_7b(tmp_path), ops)
    assert np.array_equal(tiny.logits_of(model, ids), tiny.logits_of(tiny.load("qwen2", ops), ids))
    assert model.config.mask_id == 95


@pytest.mark.parametrize("out", ["out.gguf", "out"])
def test_the_7b_model_is_written_as_itself(tmp_path, out):
    ids = tiny.golden("qwen2")["ids"][:64]
    format = ["--type", "F32"] if out.endswith("gguf") else ["--bits", "8", "--group-size", "32"]
    assert main(["quantize", str(of_7b(tmp_path / "in")), str(tmp_path / out), *format]) == 0
    if out == "out.gguf":
        assert main(["quantize", str(tmp_path / out), str(tmp_path / "back"), "--layers", "*=keep"]) == 0
        out = "back"
    model = load_model(tmp_path / out, NumpyOps())
    assert (model.architecture, model.config.mask_id) == ("wedlm", 95)
    errors = tiny.errors(tiny.logits_of(model, ids), tiny.logits_of(tiny.load("qwen2", NumpyOps()), ids))
    assert errors.logit < (1e-5 if out == "back" else 0.5)
    assert json.loads((tmp_path / out / "config.json").read_text())["model_type"] == "qwen2"  # as mlx-lm knows it


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"qk_norm": False}, "and 3 more, which this architecture does not use"),
        ({"attention_bias": True}, "lacks tensors model.layers.0.self_attn.k_proj.bias"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'; supported: False or True"),
    ],
)
def test_keys_that_the_tensors_do_not_have(tmp_path, keys, says):
    with pytest.raises(BimetalError, match=says):
        load_model(tiny.wedlm(tmp_path, **keys), NumpyOps())


@pytest.mark.parametrize(
    ("keys", "mask"),
    [
        ({"vocab_size": 151936, "mask_token_id": None}, 151665),
        ({"vocab_size": 151936}, 151665),
        ({"vocab_size": 151936, "mask_token_id": 7}, 7),
        ({"vocab_size": 151665}, None),  # has no such row
    ],
)
def test_the_mask_of_a_folder(keys, mask):
    """Published checkpoints leave it null."""
    config = tiny.checkpoint("qwen3").config | {"model_type": "wedlm"} | keys
    assert read_config(Checkpoint(tiny.FOLDER, "safetensors", config, tiny.checkpoint("qwen3").tensors)).mask_id == mask


@pytest.mark.parametrize("mask", [96, -1, "<mask>"])
def test_a_mask_outside_of_the_vocabulary(tmp_path, mask):
    with pytest.raises(BimetalError, match="mask_token_id is"):
        load_model(tiny.wedlm(tmp_path, mask_token_id=mask), NumpyOps())
