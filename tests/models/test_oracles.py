"""Against transformers, llama.cpp and mlx-lm in the same run, in every format that each of them reads.

The models are those of tests/data/make_tiny_models.py at twice the width, because mlx-lm quantizes groups of 32 columns
at least, with key and value heads of one size, which is all that llama.cpp supports for Qwen3.5.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
from gguf_files import write_gguf

from common.config import Keys
from common.models import load_model
from common.models.blocks import hf_rope

sys.path.append(str(Path(__file__).parents[1] / "data"))

pytestmark = pytest.mark.model

IDS = tiny.golden("qwen35")["ids"].astype(np.int32)
NAMES = ["llama", "qwen2", "qwen3", "qwen3moe", "qwen35", "qwen35moe"]  # mlx-lm's Qwen3-Next has another epsilon
LOGIT = dict.fromkeys(NAMES, 1e-4) | dict.fromkeys(("qwen35", "qwen35moe"), 1e-3)
KL = 1e-8

RECIPES = {
    "4 bits": {"bits": 4, "group_size": 32},
    "8 bits": {"bits": 8, "group_size": 64},
    "mixed": {"bits": 5, "group_size": 32, "quant_predicate": lambda path, module: mixed(path)},
    "mxfp4": {"mode": "mxfp4"},
    "mxfp8": {"mode": "mxfp8"},
    "nvfp4": {"mode": "nvfp4"},
}


def mixed(path: str) -> bool | dict:
    """Other bits and group sizes for some modules, and no quantization for others."""
    if path.endswith(("embed_tokens", "lm_head")):
        return {"bits": 8, "group_size": 64}
    if path.endswith("down_proj"):
        return {"bits": 6, "group_size": 32}
    if path.endswith(("v_proj", "in_proj_z")):
        return {"bits": 3, "group_size": 64}
    return not path.endswith(("k_proj", "in_proj_a", "shared_expert.up_proj"))


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def oracle(name, tmp_path_factory):
    """A folder with a float32 model, and the logits that transformers gives for IDS."""
    make = pytest.importorskip("make_tiny_models", reason="torch and transformers are not installed")
    torch = make.torch
    cls, config, _ = make.MODELS[name]
    wide = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "moe_intermediate_size": 32}
    wide |= {"hidden_size": 128} if name == "qwen2" else {}  # whose heads have hidden / heads columns
    wide |= {"shared_expert_intermediate_size": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    values = config.to_dict()
    folder = tmp_path_factory.mktemp(name)
    model = make.make(
        folder, cls, type(config)(**values | {k: v for k, v in wide.items() if k in values}), torch.float32, 7
    )
    with torch.no_grad():
        return folder, model(torch.tensor(IDS[None].astype(np.int64))).logits[0].numpy()


def assert_close(logits, expected, name, label):
    errors = tiny.errors(logits, expected)
    print(f"{label} {name}: {errors}")
    assert errors.logit < LOGIT[name]
    assert errors.top1 == 1
    assert errors.kl < KL


ROPES = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "attention_factor": 0.7},
    {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 4096, "beta_fast": 16, "beta_slow": 2},
]


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e7])
@pytest.mark.parametrize("rope", ROPES)
def test_rope_frequencies(rope, theta):
    """Frequencies and magnitude of every supported kind of rope, for the sizes of real models."""
    pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    values = {"hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128, "max_position_embeddings": 131072}
    values["rope_parameters"] = rope | {"rope_theta": theta}
    expected = LlamaRotaryEmbedding(transformers.LlamaConfig(**values))
    ours = hf_rope(Keys(values, "test"), 128)
    # at the end of a ramp float32 loses digits, in a difference from 1, where it ends between two pairs
    rtol = 1e-6 if rope.get("truncate", True) else 3e-6
    np.testing.assert_allclose(ours.frequencies, expected.inv_freq.numpy(), rtol=rtol)
    assert ours.magnitude == pytest.approx(expected.attention_scaling)


def test_transformers(ops, name, oracle):
    folder, expected = oracle
    assert_close(tiny.logits_of(load_model(folder, ops), IDS), expected, name, f"transformers, {ops.name}")


def llama_cpp_logits(path):
    oracle = pytest.importorskip("oracle_llama_cpp", reason="llama-cpp-python is not installed")
    llm = oracle.open_llama(path, 640)
    llm.eval(IDS.tolist())
    return np.array(llm.scores[: len(IDS)])


@pytest.mark.parametrize("mtp", [False, True])
def test_llama_cpp(ops, name, oracle, mtp, tmp_path):
    path = write_gguf(oracle[0], tmp_path / "m.gguf", "F32", mtp=mtp and name.startswith("qwen35"))
    expected = llama_cpp_logits(path)
    assert_close(expected, oracle[1], name, "llama.cpp against transformers")  # the file is what it should be
    assert_close(tiny.logits_of(load_model(path, ops), IDS), expected, name, f"llama.cpp, {ops.name}")


@pytest.mark.parametrize("matrices", ["Q8_0", "Q4_1", "Q5_0"])
def test_llama_cpp_quantized(ops, name, oracle, matrices, tmp_path):
    """llama.cpp rounds activations to 8 bits on the CPU, so only the distributions are close."""
    path = write_gguf(oracle[0], tmp_path / "m.gguf", matrices)
    errors = tiny.errors(tiny.logits_of(load_model(path, ops), IDS), llama_cpp_logits(path))
    print(f"llama.cpp {matrices}, {ops.name} {name}: {errors}")
    assert errors.kl < 0.05


@pytest.fixture(scope="module")
def mlx_lm_folder(name, oracle, tmp_path_factory):
    """The model in mlx-lm's form: rope_theta and rope_scaling, the vision model's type, stacked experts."""
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    import mlx.core as mx

    config = json.loads((oracle[0] / "config.json").read_text())
    if not name.startswith("qwen35"):
        rope = config.pop("rope_parameters")
        config |= {"rope_theta": rope["rope_theta"], "rope_scaling": rope if name == "llama" else None}
    config["model_type"] = config["model_type"].removesuffix("_text")
    if name == "qwen3moe":
        config["num_experts"] = config.pop("num_local_experts")
    weights = mx.load(str(oracle[0] / "model.safetensors"))
    for i in range(config["num_hidden_layers"] if name == "qwen35moe" else 0):
        gate, up, down = (
            mx.stack([weights.pop(f"model.layers.{i}.mlp.experts.{e}.{part}_proj.weight") for e in range(8)])
            for part in ("gate", "up", "down")
        )
        weights[f"model.layers.{i}.mlp.experts.gate_up_proj"] = mx.concatenate([gate, up], axis=1)
        weights[f"model.layers.{i}.mlp.experts.down_proj"] = down
    folder = tmp_path_factory.mktemp("mlx_lm")
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def mlx_lm_logits(folder):
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model as load_mlx_lm

    model, _ = load_mlx_lm(folder)
    return np.array(model(mx.array(IDS)[None], cache=make_prompt_cache(model))[0])


def test_mlx_lm(ops, name, mlx_lm_folder):
    expected = mlx_lm_logits(mlx_lm_folder)
    assert_close(tiny.logits_of(load_model(mlx_lm_folder, ops), IDS), expected, name, f"mlx-lm, {ops.name}")


@pytest.mark.parametrize("recipe", RECIPES)
def test_mlx_lm_quantized(ops, name, oracle, mlx_lm_folder, recipe, tmp_path):
    """mlx-lm's conversion gives the same logits in mlx-lm and here."""
    from mlx_lm import utils

    model, config = utils.load_model(mlx_lm_folder)
    model, config = utils.quantize_model(model, config, **{"bits": None, "group_size": None} | RECIPES[recipe])
    utils.save_model(tmp_path, model)
    utils.save_config(config, tmp_path / "config.json")
    expected = mlx_lm_logits(tmp_path)
    assert tiny.errors(expected, oracle[1]).logit > 10 * LOGIT[name]  # it was quantized
    assert_close(tiny.logits_of(load_model(tmp_path, ops), IDS), expected, name, f"mlx-lm {recipe}, {ops.name}")
