"""WeDLM-8B's network is Qwen3's: the same weights under its name give the same logits."""

import numpy as np
import pytest
import tiny

from common.checkpoint import Checkpoint
from common.errors import BimetalError
from common.models import load_model
from common.models.llama import read_config
from common.reference import NumpyOps


def test_it_is_qwen3(tmp_path, ops):
    ids = tiny.golden("qwen3")["ids"][:64]
    ours = tiny.logits_of(load_model(tiny.wedlm(tmp_path, qk_norm=True), ops), ids)
    assert np.array_equal(ours, tiny.logits_of(tiny.load("qwen3", ops), ids))


@pytest.mark.parametrize("keys", [{"qk_norm": False}, {"attention_bias": True}])
def test_the_7b_model_is_refused(tmp_path, keys):
    """WeDLM-7B is Qwen2.5: biases, and no norms of q and k."""
    with pytest.raises(BimetalError, match=next(iter(keys))):
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
