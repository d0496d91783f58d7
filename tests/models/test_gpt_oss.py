"""gpt-oss beyond the goldens of test_golden.py: published MXFP4 experts, the released shapes, mlx-lm's folders."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import tiny
from folders import assert_layout, shapes_only
from gguf_files import write_gguf
from oracles import mlx_lm_logits, mlx_lm_model
from safetensors.numpy import load_file, save_file
from test_golden import KL, LOGIT

from common.block_decoders import FP4_VALUES
from common.checkpoint import open_checkpoint
from common.config import Keys
from common.errors import BimetalError
from common.models import blocks, gpt_oss, load_model
from common.quants import as_blocks, dequantize
from common.reference import NumpyOps
from common.storage import state_bytes
from common.weights import canonical
from generate.__main__ import main

FOLDER = tiny.FOLDER / "gptoss"
ROWS = 128
EXPERTS = ("gate_up_proj", "down_proj")


def mxfp4(values):
    """Blocks (..., groups, 16) and scales (..., groups) of values (..., 32 groups): OCP's MX specification."""
    groups = values.reshape(*values.shape[:-1], -1, 32)
    exponents = np.ceil(np.log2(np.abs(groups).max(axis=-1) / 6)).astype(int)
    near = np.abs(groups[..., None] / 2.0 ** exponents[..., None, None] - FP4_VALUES).argmin(axis=-1).astype(np.uint8)
    return near[..., ::2] | near[..., 1::2] << 4, (exponents + 127).astype(np.uint8)


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    """The tiny model with its experts as OpenAI publishes them, and a folder with the same values as floats."""
    folder, floats = (tmp_path_factory.mktemp(name) / "model" for name in ("published", "floats"))
    tensors = {name: dequantize(tensor) for name, tensor in open_checkpoint(FOLDER).tensors.items()}
    packed, plain = dict(tensors), dict(tensors)
    for name, values in tensors.items():
        if name.endswith(EXPERTS):
            codes, scales = mxfp4(values.swapaxes(1, 2))
            packed |= {name + "_blocks": codes, name + "_scales": scales}
            del packed[name]
            both = FP4_VALUES[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(*codes.shape[:-1], 32)
            both = both * 2.0 ** (scales[..., None].astype(np.float32) - 127)
            plain[name] = both.reshape(*codes.shape[:-2], -1).swapaxes(1, 2)
    config = json.loads((FOLDER / "config.json").read_text())
    quantized = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    for path, arrays, more in ((folder, packed, quantized), (floats, plain, {})):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config | more))
        arrays = {name: a if a.dtype == np.uint8 else a.astype(np.float32) for name, a in arrays.items()}
        save_file({name: np.ascontiguousarray(a) for name, a in arrays.items()}, path / "model.safetensors")
    return folder, floats


def logits(path, ops, **config):
    checkpoint = open_checkpoint(path)
    model = load_model(replace(checkpoint, config=checkpoint.config | config), ops)
    return tiny.logits_of(model, tiny.golden("gptoss")["ids"][:ROWS]), model


def test_published_experts(ops, published):
    """Blocks and scales give the logits of the floats that they stand for, which are not those of the tiny model."""
    (packed, model), (floats, _) = (logits(folder, ops) for folder in published)
    errors = tiny.errors(packed, floats)
    assert errors.logit < LOGIT["gptoss"]
    assert errors.kl < KL
    assert tiny.golden_errors(packed, "gptoss").logit > 0.1
    stored = open_checkpoint(published[0])
    experts = sum(tensor.nbytes for name, tensor in stored.tensors.items() if name.endswith(EXPERTS))
    matrices = [m for layer in model.weights.layers for m in (layer.experts_gate_up, layer.experts_down)]
    assert sum(map(ops.weight_bytes, matrices)) == experts
    layers = zip(model.layout.layers, model.weights.layers, strict=True)
    for table, layer in layers:
        parts = [canonical(stored, part, unseen=True) for part in table["experts_gate_up"].parts]
        assert ops.held_expert_bytes(*parts) == ops.weight_bytes(layer.experts_gate_up)


def test_published_experts_are_gguf_blocks(published):
    """MXFP4 of a GGUF file: the same values in another order of halves."""
    for tensor in open_checkpoint(published[0]).tensors.values():
        blocks = as_blocks(tensor)
        assert (blocks.type == "MXFP4") == tensor.name.endswith(EXPERTS)
        np.testing.assert_array_equal(dequantize(blocks), dequantize(tensor))


@pytest.mark.model
def test_published_experts_as_transformers_reads_them(published):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    mxfp4_of = pytest.importorskip("transformers.integrations.mxfp4", reason="transformers is not installed")
    stored, ours = load_file(published[0] / "model.safetensors"), open_checkpoint(published[0]).tensors
    names = [name for name in ours if name.endswith(EXPERTS)]
    assert len(names) == 6
    for name in names:
        parts = (torch.tensor(stored[name + kind]) for kind in ("_blocks", "_scales"))
        values = mxfp4_of.convert_moe_packed_tensors(*parts, dtype=torch.float32)
        np.testing.assert_array_equal(dequantize(ours[name]).swapaxes(1, 2), values.numpy())


def test_blocks_without_scales(published, tmp_path):
    shutil.copytree(published[0], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("_scales"))
    for change, message in (
        ({name: tensors[name][:, :1]}, "does not fit blocks of mxfp4"),
        ({name: None}, "has blocks of mxfp4, but there is no 'model.layers"),
    ):
        kept = {key: array for key, array in (tensors | change).items() if array is not None}
        save_file({key: np.ascontiguousarray(array) for key, array in kept.items()}, tmp_path / "model.safetensors")
        with pytest.raises(BimetalError, match=message):
            open_checkpoint(tmp_path)


def of_mlx_lm(path, published):
    """The published folder as mlx-lm converts it: gates and ups apart, blocks as words."""
    config = json.loads((published / "config.json").read_text())
    table = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    tensors = {}
    for name, array in load_file(published / "model.safetensors").items():
        stem, _, leaf = name.rpartition(".")
        if leaf.endswith(("_blocks", "_scales")):
            kind = "weight" if leaf.endswith("_blocks") else "scales"
            words = array.reshape(*array.shape[:2], -1).view(np.uint32) if kind == "weight" else array
            if leaf.startswith("down"):
                tensors[f"{stem}.down_proj.{kind}"] = words
            else:
                tensors |= {f"{stem}.{part}_proj.{kind}": words[:, i::2] for i, part in enumerate(("gate", "up"))}
        elif leaf == "gate_up_proj_bias":
            tensors |= {f"{stem}.{part}_proj.bias": array[:, i::2] for i, part in enumerate(("gate", "up"))}
        else:
            tensors[name.replace("down_proj_bias", "down_proj.bias")] = array
    config |= {"quantization": table, "quantization_config": table}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(a) for name, a in tensors.items()}, path / "model.safetensors")
    return path


def test_folder_of_mlx_lm(ops, published, tmp_path):
    folder = of_mlx_lm(tmp_path / "mlx", published[0])
    np.testing.assert_array_equal(logits(folder, ops)[0], logits(published[0], ops)[0])


def test_published_experts_stay_packed_in_a_folder(ops, published, tmp_path):
    """`quantize` names them as mlx-lm does, and keeps their codes."""
    flags = "--bits", "8", "--group-size", "32", "--layers", "experts.*=keep"
    assert main(["quantize", str(published[0]), str(tmp_path / "out"), *flags]) == 0
    written = open_checkpoint(tmp_path / "out")
    stored = open_checkpoint(of_mlx_lm(tmp_path / "mlx", published[0])).tensors
    experts = [name for name in stored if ".experts." in name]
    assert {name for name in written.tensors if ".experts." in name} == set(experts)
    for name in experts:
        assert written.tensors[name].type == stored[name].type
        np.testing.assert_array_equal(dequantize(written.tensors[name]), dequantize(stored[name]))
    errors = tiny.errors(logits(tmp_path / "out", ops)[0], logits(published[0], ops)[0])
    assert 0 < errors.kl < 0.1


def test_published_experts_are_not_quantized_twice(published, tmp_path, capsys):
    assert main(["quantize", str(published[0]), str(tmp_path / "out.gguf")]) == 1
    assert "gate_up_proj' is quantized already (mxfp4)" in capsys.readouterr().err


@pytest.mark.model
def test_written_folder_in_mlx_lm(published, tmp_path):
    assert main(["quantize", str(FOLDER), str(tmp_path / "out"), "--bits", "8", "--group-size", "32"]) == 0
    rope = json.loads((FOLDER / "config.json").read_text())["rope_parameters"]
    scaling = {"rope_theta": rope["rope_theta"], "rope_scaling": rope}
    expected = mlx_lm_logits(mlx_lm_model(tmp_path / "out", **scaling), tiny.golden("gptoss")["ids"][:ROWS])
    ours, _ = logits(tmp_path / "out", NumpyOps(), rope_parameters=rope | {"truncate": True})
    assert tiny.errors(ours, expected).logit < LOGIT["gptoss"]


@pytest.mark.model
def test_mlx_lm(ops, published):
    """mlx-lm reads the published folder; its YaRN begins and ends at whole pairs, so that ours is given that here."""
    rope = json.loads((FOLDER / "config.json").read_text())["rope_parameters"]
    scaling = {"rope_theta": rope["rope_theta"], "rope_scaling": rope}
    expected = mlx_lm_logits(mlx_lm_model(published[0], **scaling), tiny.golden("gptoss")["ids"][:ROWS])
    ours, _ = logits(published[0], ops, rope_parameters=rope | {"truncate": True})
    errors = tiny.errors(ours, expected)
    print(errors)
    assert errors.logit < LOGIT["gptoss"]
    assert errors.kl < KL


def test_released_keys(ops):
    """As gpt-oss-20b's config.json states rope, without keys that have defaults."""
    config = json.loads((FOLDER / "config.json").read_text())
    rope = config["rope_parameters"]
    old = {"rope_parameters": None, "rope_theta": rope["rope_theta"], "rope_scaling": rope}
    absent = dict.fromkeys(("layer_types", "swiglu_limit", "swiglu_alpha", "attention_bias", "rms_norm_eps"))
    errors = tiny.golden_errors(logits(FOLDER, ops, **old, **absent)[0], "gptoss")
    assert errors.logit < LOGIT["gptoss"]


def test_gguf_pattern(tmp_path):
    """Which layers slide as a list, and the kind of router, as newer files state them."""
    path = write_gguf(FOLDER, tmp_path / "m.gguf")
    listed = {"gpt-oss.attention.sliding_window_pattern": [True, False, True], "gpt-oss.expert_gating_func": 3}
    assert np.array_equal(*(logits(path, NumpyOps(), **keys)[0] for keys in ({}, listed)))


def test_gguf_with_published_experts(ops, tmp_path, published):
    """Experts of a GGUF file in MXFP4, the type of the published files."""
    checkpoint = open_checkpoint(write_gguf(published[1], tmp_path / "m.gguf"))
    stored = dict(checkpoint.tensors)
    for name, tensor in open_checkpoint(published[0]).tensors.items():
        if name.endswith(EXPERTS):
            layer, whole = name.split(".")[2], as_blocks(tensor)
            parts = (
                {"down": whole}
                if "down" in name
                else {
                    part: replace(
                        whole, shape=(whole.shape[0], whole.shape[1] // 2, whole.shape[2]), data=whole.data[:, i::2]
                    )
                    for i, part in enumerate(("gate", "up"))
                }
            )
            stored |= {f"blk.{layer}.ffn_{part}_exps.weight": each for part, each in parts.items()}
    model = load_model(replace(checkpoint, tensors=stored), ops)
    found = tiny.logits_of(model, tiny.golden("gptoss")["ids"][:ROWS])
    assert tiny.errors(found, logits(published[1], ops)[0]).logit < LOGIT["gptoss"]


def released_shapes():
    """Names and shapes of gpt-oss-20b's GGUF files."""
    shapes = {"token_embd.weight": (201088, 2880), "output.weight": (201088, 2880), "output_norm.weight": (2880,)}
    for i in range(24):
        block = {"attn_norm.weight": (2880,), "post_attention_norm.weight": (2880,), "attn_sinks.weight": (64,)}
        for part, rows in (("q", 4096), ("k", 512), ("v", 512)):
            block |= {f"attn_{part}.weight": (rows, 2880), f"attn_{part}.bias": (rows,)}
        block |= {"attn_output.weight": (2880, 4096), "attn_output.bias": (2880,)}
        block |= {"ffn_gate_inp.weight": (32, 2880), "ffn_gate_inp.bias": (32,)}
        for part in ("gate", "up", "down"):
            block |= {f"ffn_{part}_exps.weight": (32, 2880, 2880), f"ffn_{part}_exps.bias": (32, 2880)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    return shapes


def test_released_gguf():
    keys = {
        **{"block_count": 24, "context_length": 131072, "embedding_length": 2880, "feed_forward_length": 2880},
        **{"attention.head_count": 64, "attention.head_count_kv": 8, "attention.key_length": 64},
        **{"attention.value_length": 64, "attention.layer_norm_rms_epsilon": 1e-5, "attention.sliding_window": 128},
        **{"expert_count": 32, "expert_used_count": 4, "expert_feed_forward_length": 2880, "rope.freq_base": 150000.0},
        **{"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096},
    }
    checkpoint = shapes_only("gpt-oss", keys, released_shapes())
    c = gpt_oss.read_config(checkpoint)
    assert c.is_sliding == (True, False) * 12
    assert (c.experts.count, c.experts.top_k, c.experts.ffn, c.limit) == (32, 4, 2880, 7.0)
    assert c.rope.magnitude == pytest.approx(1.3465736)
    assert state_bytes(gpt_oss.state_spec(c), 1000, 2) == 12 * 2 * 8 * 64 * 2 * (1000 + 128)
    assert_layout(gpt_oss.layout(c, checkpoint), released_shapes())


def test_ramp_of_yarn():
    """gpt-oss's ramp ends between two pairs, by about half of one; rounded, pairs near both ends differ."""
    rope = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    plain, rounded = (
        np.array(blocks.hf_rope(Keys({"rope_parameters": rope | {"truncate": truncates}}, "test"), 64).frequencies)
        for truncates in (False, True)
    )
    ratio = plain / 150000.0 ** (-np.arange(32) / 32)
    assert (ratio[:9] == 1).all()
    np.testing.assert_allclose(ratio[18:], 1 / 32)
    assert ratio[17] == pytest.approx(1 - 31 / 32 * (17 - 8.0928) / (17.3980 - 8.0928), abs=1e-4)
    assert 8 <= np.count_nonzero(plain != rounded) <= 10
