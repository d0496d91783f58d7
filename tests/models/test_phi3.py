"""Phi-3: the two ropes of LongRoPE, fused matrices on several ranks, and names of older files."""

import json
from dataclasses import replace

import numpy as np
import pytest
import tiny
from gguf_files import write_gguf
from oracles import llama_cpp_logits

from common.checkpoint import open_checkpoint
from common.errors import BimetalError
from common.models import load_model, phi3
from common.options import LoadOptions
from common.reference import NumpyOps
from generate.backends import Placement, with_rope
from generate.loading import load_all

SHORT = 128  # tokens of phi4mini's first training


@pytest.mark.parametrize("is_gguf", [False, True])
def test_short_sequences_have_another_rope(ops, is_gguf, tmp_path, capsys):
    """As transformers computes for a sequence of at most 128 tokens; the golden file of 512 has the other rope."""
    path = write_gguf(tiny.FOLDER / "phi4mini", tmp_path / "m.gguf") if is_gguf else tiny.FOLDER / "phi4mini"
    model = load_model(path, ops)
    golden = tiny.golden("phi4mini")
    short, long = (with_rope(model, tokens) for tokens in (SHORT, SHORT + 1))
    assert capsys.readouterr().err == (
        "the rope is that of sequences of at most 128 tokens, because they may have 128\n"
        "the rope is that of sequences longer than 128 tokens, because they may have 129\n"
    )
    logits = tiny.logits_of(short, golden["ids"][:96])[::8]
    errors = tiny.errors(logits, golden["short"])
    assert errors.logit < 1e-4
    assert errors.kl < 1e-9
    assert np.abs(tiny.logits_of(long, golden["ids"][:96])[::8] - golden["short"]).max() > 0.1
    assert long.config == model.config


@pytest.mark.parametrize(("ctx", "kind"), [(64, "of at most 128"), (None, "longer than 128")])
def test_the_context_chooses_the_rope(ctx, kind, capsys):
    checkpoint, options = tiny.checkpoint("phi4mini"), LoadOptions(backend="numpy", ctx=ctx)
    model = load_all(checkpoint, None, options, Placement(), False)
    assert model.config.rope == (model.config.short_rope if ctx else phi3.read_config(checkpoint).rope)
    assert f"the rope is that of sequences {kind} tokens" in capsys.readouterr().err


def test_a_model_with_one_rope_prints_nothing(capsys):
    model = tiny.load("phi3", NumpyOps())
    assert with_rope(model, 64) is model
    assert capsys.readouterr().err == ""


def test_names_of_older_files():
    """`su` in rope_scaling, and the length of the first training beside it, as Phi-3-mini-128k was released."""
    checkpoint = tiny.checkpoint("phi4mini")
    rope = dict(checkpoint.config["rope_parameters"])
    theta, share = rope.pop("rope_theta"), rope.pop("partial_rotary_factor")
    del rope["original_max_position_embeddings"], rope["rope_type"]
    older = {"rope_scaling": rope | {"type": "su"}, "rope_theta": theta, "partial_rotary_factor": share}
    config = {key: value for key, value in checkpoint.config.items() if key != "rope_parameters"} | older
    read = phi3.read_config(replace(checkpoint, config=config))
    assert read == phi3.read_config(checkpoint)
    assert len(read.rope.frequencies) == 3
    assert read.rope.magnitude == pytest.approx((1 + np.log(8) / np.log(128)) ** 0.5)


WRONG = [
    ({"long_factor": [1.0, 2.0]}, "the long factors of the rope must be 3 numbers above 0"),
    ({"short_factor": [1.0, 2.0, 0]}, "the short factors of the rope must be 3 numbers above 0"),
    ({"short_factor": [1.0, 2.0, "x"]}, "the short factors of the rope must be 3 numbers above 0"),
    ({"short_factor": None}, "lacks the required key rope_parameters.short_factor"),
    ({"short_mscale": 1.2}, "rope_parameters.short_mscale is not supported"),
    ({"rope_type": "yarn"}, "rope_parameters.long_factor is not supported"),
]


@pytest.mark.parametrize(("keys", "words"), WRONG)
def test_ropes_that_are_refused(keys, words):
    checkpoint = tiny.checkpoint("phi4mini")
    rope = checkpoint.config["rope_parameters"] | keys
    with pytest.raises(BimetalError, match=words):
        phi3.read_config(replace(checkpoint, config=checkpoint.config | {"rope_parameters": rope}))


def test_a_gguf_file_without_one_list_of_factors(tmp_path):
    checkpoint = open_checkpoint(write_gguf(tiny.FOLDER / "phi4mini", tmp_path / "m.gguf"))
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name != "rope_factors_short.weight"}
    with pytest.raises(BimetalError, match=r"lacks tensor rope_factors_short\.weight"):
        phi3.read_config(replace(checkpoint, tensors=tensors))


def test_a_gguf_file_of_ours_has_the_factors_of_both(tmp_path):
    """Written by `quantize` from a folder, and read as llama.cpp reads it."""
    from generate.__main__ import main

    assert main(["quantize", str(tiny.FOLDER / "phi4mini"), str(tmp_path / "m.gguf"), "--type", "Q8_0"]) == 0
    written, expected = (
        open_checkpoint(path)
        for path in (tmp_path / "m.gguf", write_gguf(tiny.FOLDER / "phi4mini", tmp_path / "their.gguf"))
    )
    assert set(written.tensors) == set(expected.tensors)
    keys = {key: value for key, value in expected.config.items() if key.startswith("phi3.")}
    assert {key: written.config[key] for key in keys} == pytest.approx(keys)
    folder = json.loads((tiny.FOLDER / "phi4mini" / "config.json").read_text())["rope_parameters"]
    for name in ("long", "short"):
        data = written.tensors[f"rope_factors_{name}.weight"].data.view(np.float32).ravel()
        assert data == pytest.approx(folder[f"{name}_factor"])


@pytest.mark.model
@pytest.mark.parametrize("name", ["phi3", "phi4mini"])
def test_llama_cpp(name, tmp_path):
    """With the long factors, as its context is longer than the first training. It has no windows of Phi's files."""
    path = write_gguf(tiny.FOLDER / name, tmp_path / "m.gguf")
    ids = tiny.golden(name)["ids"][: 24 if name == "phi3" else 512].astype(np.int32)
    errors = tiny.errors(tiny.logits_of(load_model(path, NumpyOps()), ids), llama_cpp_logits(path, ids))
    assert errors.logit < 2e-3
    assert errors.top1 == 1
    assert errors.kl < 1e-7
