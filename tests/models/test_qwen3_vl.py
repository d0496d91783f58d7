"""Qwen3-VL's text: against transformers and mlx-lm with a vision tower beside it, and what `quantize` writes."""

import json

import numpy as np
import pytest
import tiny
from oracles import llama_cpp_logits
from safetensors.numpy import load_file, save_file
from test_dialects import of_qwen3_vl

from common.checkpoint import open_checkpoint
from common.models import load_model
from common.quants import dequantize
from common.reference import NumpyOps
from generate.__main__ import main

IDS = tiny.golden("qwen3moe")["ids"][:96].astype(np.int32)
TEXT = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96},
    **{"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6},
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2], "mrope_interleaved": True}
    },
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
VISION |= {"deepstack_visual_indexes": [0], "patch_size": 4, "num_position_embeddings": 16}


def written(folder, checkpoint):
    """The checkpoint as a folder, in float32."""
    folder.mkdir()
    tensors = {key: dequantize(tensor) for key, tensor in checkpoint.tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    return folder


@pytest.mark.parametrize("name", ["qwen3", "qwen3moe"])
@pytest.mark.parametrize("out", ["m.gguf", "mlx"])
def test_quantize(name, out, tmp_path):
    """The weights are those that come out of the text alone: stacks of experts have the order of the model."""
    flags = ["--type", "Q8_0"] if out == "m.gguf" else ["--bits", "8", "--group-size", "32"]
    found = []
    for kind, checkpoint in (("vl", of_qwen3_vl(tiny.checkpoint(name))), ("text", tiny.checkpoint(name))):
        assert (
            main(["quantize", str(written(tmp_path / kind, checkpoint)), str(tmp_path / f"{kind} {out}"), *flags]) == 0
        )
        found.append(open_checkpoint(tmp_path / f"{kind} {out}"))
    logits = [tiny.logits_of(load_model(each, NumpyOps()), IDS) for each in found]
    assert np.abs(logits[0] - logits[1]).max() < 1e-5
    made, prefix = found[0], found[0].config.get("general.architecture")
    if out == "mlx":
        assert "vision_tower.patch_embed.proj.weight" in made.tensors
        assert not any("mlp.experts." in key for key in made.tensors)
        assert all(key.startswith(("language_model.", "vision_tower.")) for key in made.tensors)
    else:
        assert prefix == {"qwen3": "qwen3vl", "qwen3moe": "qwen3vlmoe"}[name]
        assert list(made.config[f"{prefix}.rope.dimension_sections"]) == [3, 3, 2, 0]


@pytest.mark.model
@pytest.mark.parametrize("name", ["qwen3", "qwen3moe"])
def test_llama_cpp(name, tmp_path):
    """llama.cpp reads the file that `quantize` writes, with its rope over three axes, as we do.

    It turns pairs of none of the sections by a fourth position of 0, where transformers turns them by time. Of released
    sections, (24, 20, 20), these are pairs 61 and 62, which turn by less than 1e-6 a position.
    """
    path = tmp_path / "m.gguf"
    folder = written(tmp_path / "in", of_qwen3_vl(tiny.checkpoint(name)))
    assert main(["quantize", str(folder), str(path), "--type", "F32"]) == 0
    errors = tiny.errors(tiny.logits_of(load_model(path, NumpyOps()), IDS), llama_cpp_logits(path, IDS))
    assert errors.logit < 2e-3
    assert errors.top1 == 1
    assert errors.kl < 1e-7


@pytest.fixture(params=["qwen3_vl", "qwen3_vl_moe"])
def released(request, tmp_path):
    """The name of a model with a vision tower, the folder that transformers writes, and its logits for IDS."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    kind = "Qwen3VLMoe" if request.param.endswith("moe") else "Qwen3VL"
    text = TEXT | (EXPERTS if request.param.endswith("moe") else {}) | {"tie_word_embeddings": False}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=VISION, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "visual" not in name:
                noise = torch.randn(parameter.shape)
                parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else noise / parameter.shape[-1] ** 0.5)
        logits = model(input_ids=torch.tensor(IDS[None].astype(np.int64))).logits[0].numpy()
    model.save_pretrained(tmp_path / "released")
    file = tmp_path / "released" / "model.safetensors"
    tensors = load_file(file)  # without the exchange of releases, which this model was not loaded from
    stacks = {name: t.swapaxes(1, 2).copy() for name, t in tensors.items() if ".mlp.experts." in name}
    save_file(tensors | stacks, file)
    return request.param, file.parent, logits


@pytest.mark.model
def test_transformers(released):
    _, path, expected = released
    errors = tiny.errors(tiny.logits_of(load_model(path, NumpyOps()), IDS), expected)
    assert errors.logit < 1e-4
    assert errors.top1 == 1
    assert errors.kl < 1e-9


@pytest.mark.model
@pytest.mark.parametrize("bits", [None, "4"])
def test_mlx_lm(released, bits, tmp_path):
    """mlx-lm reads what transformers wrote, and what `quantize` writes of it, as we do."""
    utils = pytest.importorskip("mlx_lm.utils")
    import mlx.core as mx

    _, path, _ = released
    config = json.loads((path / "config.json").read_text())
    config["text_config"] |= {"rope_theta": 1e4, "norm_topk_prob": True, "num_experts": 8, "mlp_only_layers": []}
    (path / "config.json").write_text(json.dumps(config))
    if bits:
        assert main(["quantize", str(path), str(tmp_path / "out"), "--bits", bits, "--group-size", "32"]) == 0
        path = tmp_path / "out"
    model = utils.load_model(path)[0]
    theirs = np.array(model(mx.array(IDS)[None]).astype(mx.float32))[0]
    ours = tiny.logits_of(load_model(path, NumpyOps()), IDS)
    assert np.abs(ours - theirs).max() < 2e-3
    assert (ours.argmax(-1) == theirs.argmax(-1)).all()
