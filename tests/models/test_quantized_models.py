"""`generate quantize`: what it writes is read back, by us and by mlx-lm, whatever stops it; and what it refuses."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
import tiny_chat
from folders import rewritten
from gguf_files import write_gguf
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

import generate
from common import outputs
from common.checkpoint import Checkpoint, open_checkpoint
from common.config import Keys
from common.demo import demo_path
from common.errors import UsageError
from common.gguf_to_folder import _llama3
from common.gguf_tokenizer import _QWEN2
from common.models import architecture, load_model
from common.models.blocks import hf_rope
from common.quantize import Format, encode
from common.quants import dequantize
from common.recipe import find_weights
from common.recommended import recommended_sampling
from common.reference import NumpyOps
from common.tokenizer import load_tokenizer
from common.weights import dense
from generate.__main__ import main

IDS = tiny.golden("qwen3")["ids"][:96]
MIXTURES = ["laguna", "laguna-m1", "glm", "glm4moe", "qwen3next"]
EXPERTS = ["qwen3moe", "qwen35moe", "qwen3next", "laguna", "glm", "glm4moe", "gptoss"]
EXPERTS += ["deepseek2", "deepseek3", "granitemoe"]
GGUF_MODELS = [name for name in tiny.MODELS if name not in MIXTURES] + MIXTURES


def source(name):
    return str(tiny.FOLDER / name)


def quantize(*args):
    assert main(["quantize", *map(str, args)]) == 0


def divergence(path, name, ops=None):
    """Mean KL in nats of a written model from the tiny model `name`, both in NumPy unless `ops` is given."""
    expected, found = (
        tiny.logits_of(load_model(where, how), IDS).astype(np.float64)
        for where, how in ((tiny.FOLDER / name, NumpyOps()), (path, ops or NumpyOps()))
    )
    p, q = (
        x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)
        for x in (expected, found)
    )
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def files_of(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def swapped(tensor, columns=slice(None)):
    """Columns of each matrix of a stack in BF16 as rows."""
    rows = tensor.data.view("<u2")[:, :, columns].swapaxes(1, 2)
    data = np.ascontiguousarray(rows).view(np.uint8)
    return replace(tensor, shape=rows.shape, data=data)


def as_encoded(name, path):
    """The tiny model `name` whose matrices have the values that `encode` gives them in the formats of `path`."""
    checkpoint, written = open_checkpoint(tiny.FOLDER / name), open_checkpoint(path).tensors
    definition = architecture(checkpoint)[1]
    tensors = dict(checkpoint.tensors)

    def encoded(tensor, module):
        stored = next(written[key] for key in (module, f"language_model.{module}") if key in written)
        if stored.scales is None:
            return dequantize(tensor)
        return dequantize(encode(tensor, Format(stored.type, stored.bits, stored.group_size)))

    for key in find_weights(checkpoint, definition.layout(definition.read_config(checkpoint), checkpoint)):
        values = dequantize(tensors[key])
        if (
            key.endswith("kv_b_proj.weight") and key not in written
        ):  # two modules of mlx-lm's; rows of the first, 16 values, stay as they are
            assert written[key.replace("kv_b_proj", "embed_q")].scales is None
            of_values = np.arange(len(values)) % (len(values) // checkpoint.config["num_attention_heads"]) >= 16
            at = np.flatnonzero(of_values)
            values[at] = encoded(tensors[key].take_rows(at), key.replace("kv_b_proj", "unembed_out"))
        elif key.endswith("experts.gate_up_proj"):  # gpt-oss's columns are rows of two modules of mlx-lm's
            for first, part in enumerate(("gate_proj", "up_proj")):
                rows = swapped(tensors[key], slice(first, None, 2))
                module = key.replace("gate_up_proj", f"{part}.weight")
                values[:, :, first::2] = encoded(rows, module).swapaxes(1, 2)
        elif key.endswith("experts.down_proj"):
            values = encoded(swapped(tensors[key]), key + ".weight").swapaxes(1, 2)
        else:
            module = re.sub(r"\.experts\.\d+\.", ".switch_mlp.", key)
            for stack, part in (("input_linear", "gate_proj"), ("output_linear", "down_proj")):  # of Granite
                module = module.replace(stack, f"switch_mlp.{part}")
            values = encoded(tensors[key], module)
        tensors[key] = dense(key, values)
    return load_model(replace(checkpoint, tensors=tensors), NumpyOps())


@pytest.mark.parametrize("name", tiny.MODELS)
@pytest.mark.few(6)
def test_a_folder_of_8_bits(ops, name, tmp_path):
    """The loader reads what the encoder made, and 8 bits are near the source: its random weights exaggerate."""
    quantize(source(name), tmp_path / "out", "--bits", 8, "--group-size", 32)
    written = load_model(tmp_path / "out", NumpyOps())
    expected = tiny.logits_of(as_encoded(name, tmp_path / "out"), IDS)
    assert np.abs(tiny.logits_of(written, IDS) - expected).max() < 2e-3
    assert divergence(tmp_path / "out", name, ops) < (0.1 if name in ("qwen35", *EXPERTS) else 0.01)


MOST = {"2": 3.0, "3": 1.0, "4": 0.3, "5": 0.06, "6": 0.02, "mxfp4": 1.0, "nvfp4": 0.6}  # nats; each format under half


@pytest.mark.parametrize("format", MOST)
@pytest.mark.few(6)
def test_every_format_makes_a_folder(ops, format, tmp_path):
    flags = ["--bits", format, "--group-size", 32] if format.isdecimal() else ["--mode", format]
    quantize(source("qwen3"), tmp_path / "out", *flags)
    written = tiny.logits_of(load_model(tmp_path / "out", NumpyOps()), IDS)
    assert np.abs(written - tiny.logits_of(as_encoded("qwen3", tmp_path / "out"), IDS)).max() < 1e-4
    assert divergence(tmp_path / "out", "qwen3", ops) < MOST[format]


def test_stacked_experts_become_modules(tmp_path):
    """Newer files keep gate and up projections of all experts in one tensor, which is no module of mlx-lm's."""

    def stacked(tensors):
        out = {name: array for name, array in tensors.items() if ".experts." not in name}
        for prefix in {name.split(".experts.")[0] for name in tensors if ".experts." in name}:
            count = 1 + max(
                int(n.split(".experts.")[1].split(".")[0]) for n in tensors if n.startswith(prefix + ".exp")
            )
            gate, up, down = (
                np.stack([tensors[f"{prefix}.experts.{e}.{part}_proj.weight"] for e in range(count)])
                for part in ("gate", "up", "down")
            )
            out[f"{prefix}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
            out[f"{prefix}.experts.down_proj"] = down
        return out

    folder = rewritten(tiny.FOLDER / "qwen35moe", tmp_path / "in", stacked)
    quantize(folder, tmp_path / "out", "--bits", 8, "--group-size", 32)
    apart = rewritten(tiny.FOLDER / "qwen35moe", tmp_path / "in apart")
    quantize(apart, tmp_path / "apart", "--bits", 8, "--group-size", 32)
    names = open_checkpoint(tmp_path / "out").tensors
    assert names["language_model.model.layers.0.mlp.switch_mlp.gate_proj.weight"].type == "affine"
    one, other = (tiny.logits_of(load_model(tmp_path / out, NumpyOps()), IDS) for out in ("out", "apart"))
    np.testing.assert_array_equal(one, other)
    quantize(folder, tmp_path / "out.gguf", "--type", "F32")
    assert divergence(tmp_path / "out.gguf", "qwen35moe") < 1e-9


def test_the_table_of_settings(tmp_path):
    quantize(
        source("qwen3"),
        tmp_path / "out",
        "--group-size",
        32,
        "--layers",
        "*.layers.1.*=keep",
        "--layers",
        "v_proj=6:32",
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    table = config["quantization"]
    assert config["quantization_config"] == table
    assert {key: table[key] for key in ("group_size", "bits", "mode")} == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
    }
    eight = {"group_size": 32, "bits": 8, "mode": "affine"}
    assert table["model.embed_tokens"] == table["lm_head"] == eight
    assert table["model.layers.1.self_attn.q_proj"] is False
    assert table["model.layers.1.self_attn.v_proj"] == eight | {"bits": 6}  # the last rule that matches
    assert table["model.layers.0.mlp.down_proj"] is False  # 48 columns
    assert "model.layers.0.self_attn.q_proj" not in table
    assert divergence(tmp_path / "out", "qwen3") < 0.3


@pytest.mark.parametrize("name", GGUF_MODELS)
def test_a_gguf_file_is_what_a_converter_makes(name, tmp_path):
    """Against tests/models/gguf_files.py, which follows convert_hf_to_gguf.py and shares nothing with this."""
    quantize(source(name), tmp_path / "ours.gguf", "--type", "F32")
    ours, theirs = (
        open_checkpoint(p) for p in (tmp_path / "ours.gguf", write_gguf(tiny.FOLDER / name, tmp_path / "b.gguf"))
    )
    assert ours.tensors.keys() == theirs.tensors.keys()
    for key, tensor in theirs.tensors.items():
        assert [n for n in ours.tensors[key].shape if n > 1] == [n for n in tensor.shape if n > 1], key
        np.testing.assert_allclose(dequantize(ours.tensors[key]).ravel(), dequantize(tensor).ravel(), rtol=1e-6)
    lacking = theirs.config.keys() - ours.config.keys()
    assert not lacking
    for key, value in theirs.config.items():
        assert ours.config[key] == value, key


@pytest.mark.parametrize("type_", ["Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "F16", "BF16"])
def test_gguf_types(ops, type_, tmp_path):
    quantize(source("qwen3"), tmp_path / "out.gguf", "--type", type_)
    file = open_checkpoint(tmp_path / "out.gguf")
    assert file.tensors["blk.0.attn_q.weight"].type == type_
    assert file.tensors["token_embd.weight"].type == ("Q8_0" if type_.startswith("Q") else type_)
    assert divergence(tmp_path / "out.gguf", "qwen3", ops) < (0.4 if type_.startswith("Q4") else 0.1)
    reader = gguf.GGUFReader(tmp_path / "out.gguf")  # an independent reader
    theirs = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    for name, tensor in file.tensors.items():
        np.testing.assert_array_equal(dequantize(tensor).ravel(), theirs[name].ravel())


@pytest.mark.parametrize("name", GGUF_MODELS)
def test_quantized_gguf_files_of_every_family(name, tmp_path):
    """The blocks of a converter's file, and logits near the source's: random weights of a mixture exaggerate."""
    quantize(source(name), tmp_path / "out.gguf")
    assert divergence(tmp_path / "out.gguf", name) < (0.2 if name in ("qwen35", "laguna-m1", *EXPERTS) else 0.01)
    ours = open_checkpoint(tmp_path / "out.gguf").tensors
    theirs = open_checkpoint(write_gguf(tiny.FOLDER / name, tmp_path / "b.gguf", "Q8_0")).tensors
    quantized = {key for key, tensor in ours.items() if tensor.type == "Q8_0"}
    assert quantized == {key for key, tensor in theirs.items() if tensor.type == "Q8_0"}
    for key in quantized:
        assert ours[key].data.tobytes() == theirs[key].data.tobytes(), key


def test_a_gguf_file_from_a_gguf_file(tmp_path, capsys):
    made = write_gguf(tiny.FOLDER / "qwen35", tmp_path / "in.gguf", mtp=True)
    quantize(made, tmp_path / "out.gguf", "--type", "Q5_1", "--recipe", "uniform")
    before, after = open_checkpoint(made), open_checkpoint(tmp_path / "out.gguf")
    own = {"general.file_type": 9, "general.quantization_version": 2}
    assert after.config == before.config | own
    assert after.tensors["blk.0.attn_qkv.weight"].type == "Q5_1"
    assert after.tensors["blk.8.nextn.eh_proj.weight"].type == "F32"  # not run, so copied
    assert divergence(tmp_path / "out.gguf", "qwen35") < 1.5
    capsys.readouterr()
    assert main(["quantize", str(tmp_path / "out.gguf"), str(tmp_path / "again.gguf"), "--type", "Q4_0"]) == 1
    assert "is quantized already (Q5_1)" in capsys.readouterr().err
    quantize(tmp_path / "out.gguf", tmp_path / "again.gguf", "--type", "Q4_0", "--requantize")
    quantize(tmp_path / "out.gguf", tmp_path / "same.gguf", "--type", "Q5_1", "--recipe", "uniform")
    assert open_checkpoint(tmp_path / "same.gguf").tensors["output.weight"].data.tobytes() == (
        after.tensors["output.weight"].data.tobytes()
    )


@pytest.fixture
def chat_folder(tmp_path):
    """A chat model with Qwen's splitting, a template and recommended sampling."""
    folder = tiny_chat.write(tmp_path / "chat")
    old = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = old["model"]["vocab"]
    merged = {"ab": len(vocabulary), "abc": len(vocabulary) + 1}
    tokenizer = Tokenizer(models.BPE(vocabulary | merged, [("a", "b"), ("ab", "c")]))
    tokenizer.add_special_tokens(["<|im_start|>", tiny_chat.END])
    split = pre_tokenizers.Split(Regex(_QWEN2), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20}')
    config = json.loads((folder / "config.json").read_text())
    size = len(vocabulary) + 8  # rows that no token has
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    tensors = {name: dequantize(t) for name, t in open_checkpoint(folder).tensors.items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.resize(tensors[name], (size, tensors[name].shape[1]))
    os.remove(folder / "model.safetensors")
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("out", ["out", "out.gguf"])
def test_tokenizer_template_and_sampling_go_along(chat_folder, out, tmp_path):
    quantize(chat_folder, tmp_path / out)
    before, after = open_checkpoint(chat_folder), open_checkpoint(tmp_path / out)
    ours, theirs = load_tokenizer(after.path, after.config), load_tokenizer(before.path, before.config)
    text = "<|im_start|>abc ab 12 cabc'll\n é<|im_end|>"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.token_to_id("abc") in ours.encode(text)
    assert (ours.eos_id, ours.add_bos, ours.chat_template) == (theirs.eos_id, theirs.add_bos, theirs.chat_template)
    assert recommended_sampling(after).options == {"temperature": pytest.approx(0.6), "top_k": 20}


@pytest.mark.parametrize("id", [-1, 10**12, 9999])
def test_ids_of_no_token(chat_folder, id, tmp_path):
    """A negative or huge one ended in a traceback, another one in a file that could not be loaded."""
    config = json.loads((chat_folder / "config.json").read_text())
    ids = {"bos_token_id": id, "eos_token_id": [id, 1]}
    (chat_folder / "config.json").write_text(json.dumps(config | ids))
    quantize(chat_folder, tmp_path / "out.gguf")
    file = open_checkpoint(tmp_path / "out.gguf")
    tokenizer = load_tokenizer(file.path, file.config)
    assert (tokenizer.bos_id, tokenizer.end_ids) == (None, {1})


def test_a_tokenizer_that_gguf_has_no_name_for(tmp_path, capsys):
    folder = tiny_chat.write(tmp_path / "chat")
    assert main(["quantize", str(folder), str(tmp_path / "out.gguf")]) == 1
    assert "has no name in GGUF files" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["chat"]


def test_wedlm_keeps_its_mask_and_says_why(tmp_path, capsys):
    folder = tiny.wedlm(tmp_path / "in", mask_token_id=90)
    for out in ("out", "out.gguf"):
        flags = ["--group-size", 32] if out == "out" else ["--type", "Q4_0"]
        quantize(folder, tmp_path / out, *flags, "--recipe", "uniform")
        assert "every mask position reads one row of the embedding" in capsys.readouterr().out
        model = load_model(tmp_path / out, NumpyOps())
        assert (model.architecture, model.config.mask_id) == ("wedlm", 90)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("qwen3", ["WeDLMForCausalLM"])  # as mlx-lm knows it
    assert (
        main(["quantize", str(tmp_path / "out"), str(tmp_path / "again.gguf"), "--type", "Q8_0", "--requantize"]) == 0
    )
    model = load_model(tmp_path / "again.gguf", NumpyOps())
    assert (model.architecture, model.config.mask_id) == ("wedlm", 90)


# -- runs that are stopped ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "out"), [("qwen3", "out"), ("qwen3", "out.gguf"), ("in.gguf", "out")])
@pytest.mark.parametrize("after", [1, 9, 17])
def test_a_killed_run_goes_on(monkeypatch, given, out, after, tmp_path, capsys):
    made = str(write_gguf(tiny.FOLDER / "qwen3", tmp_path / given)) if given == "in.gguf" else source(given)
    flags = ["--bits", "8", "--group-size", "32", "--shard-size", "6000"] if out == "out" else []
    (tmp_path / "whole").mkdir()
    quantize(made, tmp_path / "whole" / out, *flags)
    real, calls = outputs.encode_rows, []

    def stops(*args):
        calls.append(args)
        if len(calls) > after:
            raise KeyboardInterrupt
        return real(*args)

    command = ["quantize", made, str(tmp_path / out), *flags]
    monkeypatch.setattr(outputs, "encode_rows", stops)
    assert main(command) == 130
    assert not (tmp_path / out).exists()
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / f"{out}.part")]) == 1
    message = capsys.readouterr().err
    assert "is unfinished" in message
    assert message.count("\n") == 1
    assert main([*command, "--layers", "*q*=keep"]) == 2  # another plan
    assert "unfinished run of other settings" in capsys.readouterr().err
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / f"{out}.part").glob("*.safetensors")}
    calls.clear()
    monkeypatch.setattr(outputs, "encode_rows", lambda *args: calls.append(args) or real(*args))
    assert main(command) == 0
    if out == "out":
        assert files_of(tmp_path / out) == files_of(tmp_path / "whole" / out)
        assert {name: (tmp_path / out / name).stat().st_mtime_ns for name in before} == before
        assert after == 1 or before
    else:
        assert (tmp_path / out).read_bytes() == (tmp_path / "whole" / out).read_bytes()
        assert len(calls) == len(open_checkpoint(tmp_path / out).tensors) - after  # whole tensors stay
    assert not (tmp_path / f"{out}.part").exists()
    assert divergence(tmp_path / out, "qwen3") < 0.01


def test_a_later_part_that_has_changed_is_noticed(tmp_path):
    """A stopped run of a split GGUF file went on with other weights."""
    parts = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(b"a")
    source = Checkpoint(parts[0], "gguf", {}, {})
    assert outputs.begin(tmp_path / "out", source, [], {}) == outputs.begin(tmp_path / "out", source, [], {})
    parts[1].write_bytes(b"ab")
    with pytest.raises(UsageError, match="another source"):
        outputs.begin(tmp_path / "out", source, [], {})


def test_a_config_that_has_changed_is_noticed(monkeypatch, tmp_path, capsys):
    """The divisors of rope frequencies stayed those of the first config.json."""
    shutil.copytree(tiny.FOLDER / "llama", tmp_path / "llama")
    real, calls = outputs.encode_rows, []

    def stops(*args):
        calls.append(args)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return real(*args)

    command = ["quantize", str(tmp_path / "llama"), str(tmp_path / "out.gguf")]
    monkeypatch.setattr(outputs, "encode_rows", stops)
    assert main(command) == 130
    monkeypatch.setattr(outputs, "encode_rows", real)
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    config["rope_parameters"]["factor"] = 2.0
    (tmp_path / "llama" / "config.json").write_text(json.dumps(config))
    capsys.readouterr()
    assert main(command) == 2
    assert "out.gguf.part holds an unfinished run of other settings or another source" in capsys.readouterr().err


@pytest.mark.long
def test_sigkill(tmp_path):
    """A process that is killed in the middle of a tensor leaves a file that the next one completes."""
    command = ["demo", str(tmp_path / "out.gguf"), "--type", "Q4_0", "--requantize"]
    part = tmp_path / "out.gguf.part" / "model.gguf"
    process = subprocess.Popen([sys.executable, "-m", "generate", "quantize", *command], stdout=subprocess.DEVNULL)
    while process.poll() is None and not (part.exists() and part.stat().st_size > 7_000_000):
        time.sleep(0.0005)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert part.exists()
    quantize(*command)
    command[1] = str(tmp_path / "whole.gguf")
    quantize(*command)
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_a_source_that_changed_is_another_run(monkeypatch, tmp_path, capsys):
    folder = shutil.copytree(tiny.FOLDER / "qwen3", tmp_path / "in")
    command = ["quantize", str(folder), str(tmp_path / "out.gguf")]
    with monkeypatch.context() as patch:
        patch.setattr(outputs, "encode_rows", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(command) == 130
    os.utime(folder / "model.safetensors", (1, 1))
    assert main(command) == 2
    assert "another source" in capsys.readouterr().err


@pytest.mark.long
def test_memory_is_bounded(tmp_path):
    """A matrix of 8 MiB is read, encoded and written a part at a time."""
    folder = tiny_chat.write(tmp_path / "in")
    tensors = {name: dequantize(t) for name, t in open_checkpoint(folder).tensors.items()}
    config = json.loads((folder / "config.json").read_text())
    rows = 1 << 16
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.zeros((rows, tiny_chat.HIDDEN), np.float32)
    os.remove(folder / "model.safetensors")
    save_file(tensors, folder / "model.safetensors")
    del tensors
    for out, flags in (("out", ["--group-size", 32]), ("out.gguf", [])):
        if out == "out.gguf":
            os.remove(folder / "tokenizer.json")
        tracemalloc.start()
        quantize(folder, tmp_path / out, *flags)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 6 << 20


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["out", "--bits", "1"], 2, "bits is 1; affine supports 2, 3, 4, 5, 6, 8"),
        (["out", "--bits", "7"], 2, "bits is 7"),
        (["out", "--bits", "0"], 2, "bits is 0"),
        (["out", "--group-size", "16"], 2, "group size is 16"),
        (["out", "--mode", "mxfp4", "--bits", "8"], 2, "mxfp4 supports 4"),
        (["out", "--mode", "fp4"], 2, "mode is 'fp4'"),
        (["out.gguf", "--type", "Q4_K"], 2, "type is 'Q4_K'; supported: Q8_0"),
        (["out.gguf", "--bits", "4"], 2, "--bits goes with an MLX folder"),
        (["out", "--type", "Q8_0"], 2, "--type goes with a .gguf file"),
        (["out", "--layers", "down_proj"], 2, "is not PATTERN=FORMAT"),
        (["out", "--layers", "down_proj=Q8_0"], 2, "the format in 'down_proj=Q8_0' is 'Q8_0'"),
        (["out", "--layers", "down_proj=7"], 2, "bits is 7"),
        (["out", "--layers", "dwn_proj=8"], 2, "matches no matrix; kinds are down_proj"),
        (["exists"], 2, "exists exists"),
        (["missing/out"], 2, "is not a folder"),
        ([], 2, "OUT is not named"),
        (["out", "--text", "a"], 2, "--text goes with --sensitivity"),
        (["out", "--max-tokens", "0"], 2, "--max-tokens: '0' is not a whole number of at least 1"),
        (["out", "--ctx-window", "9"], 2, "--ctx-window goes with --sensitivity"),
        (["--sensitivity"], 2, "--sensitivity needs --text FILE"),
        (["--sensitivity", "--text", "a", "--shard-size", "9"], 2, "--shard-size goes without --sensitivity"),
    ],
)
def test_refusals(flags, code, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exists").mkdir()
    assert main(["quantize", source("qwen3"), *flags]) == code
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["exists"]


def test_help_lists_the_types(capsys):
    from common.quantize import FLOAT_TYPES, GGUF_TYPES

    with pytest.raises(SystemExit):
        main(["quantize", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    *most, last = *GGUF_TYPES, *FLOAT_TYPES
    assert f"for a .gguf file: {', '.join(most)} or {last} (default: Q8_0)" in words


def test_an_output_inside_its_source(tmp_path, capsys):
    folder = shutil.copytree(tiny.FOLDER / "qwen3", tmp_path / "in")
    before = sorted(folder.iterdir())
    for out in ("out", "out.gguf", "../in/out"):
        assert main(["quantize", str(folder), str(folder / out)]) == 2
        assert "lies inside the source" in capsys.readouterr().err
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("out", ["out", "out.gguf"])
def test_a_full_disk_is_seen_first(out, tmp_path, monkeypatch, capsys):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(outputs.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert main(["quantize", source("qwen3"), str(tmp_path / out)]) == 1
    err = capsys.readouterr().err
    assert re.search(r"the result takes [\d.]+ [KM]B, .* has 1.0 KB for it; free some, or choose a smaller format", err)
    assert not list(tmp_path.iterdir())


def test_values_that_are_not_finite(tmp_path, capsys):
    folder = shutil.copytree(tiny.FOLDER / "qwen3", tmp_path / "in")
    tensors = {name: dequantize(t) for name, t in open_checkpoint(folder).tensors.items()}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = np.nan
    os.remove(folder / "model.safetensors")
    save_file(tensors, folder / "model.safetensors")
    assert main(["quantize", str(folder), str(tmp_path / "out"), "--group-size", "32"]) == 1
    assert "'model.layers.1.mlp.up_proj.weight' has a value that is not finite" in capsys.readouterr().err


def test_families_without_a_gguf_writer(tmp_path, capsys):
    folder = rewritten(tiny.FOLDER / "glm", tmp_path / "in", model_type="deepseek2")
    assert main(["quantize", str(folder), str(tmp_path / "out.gguf")]) == 1
    assert "a GGUF file of deepseek2 cannot be written; supported: llama" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama", "llama-untied", "qwen2", "qwen3", "smollm3", "phi3", "phi4mini"])
def test_a_folder_from_a_gguf_file(name, tmp_path):
    """The bytes of the folder made from the model's own safetensors, where the file holds its values exactly."""
    made = write_gguf(tiny.FOLDER / name, tmp_path / "in.gguf")
    kept, ours = ("o_proj", "attn_output") if name.startswith("phi") else ("v_proj", "attn_v")
    flags = ("--bits", 4, "--group-size", 32, "--layers", f"{kept}=keep")
    folder = rewritten(tiny.FOLDER / name, tmp_path / "in")  # in float32, which scales then take
    quantize(folder, tmp_path / "direct", *flags)
    quantize(made, tmp_path / "out", *flags[:-1], f"{ours}=keep")
    direct, out = (open_checkpoint(tmp_path / folder) for folder in ("direct", "out"))
    assert out.tensors.keys() == direct.tensors.keys()
    for key, tensor in direct.tensors.items():
        np.testing.assert_array_equal(dequantize(out.tensors[key]), dequantize(tensor), key)
        assert (out.tensors[key].type, out.tensors[key].bits) == (tensor.type, tensor.bits)
    assert out.config["quantization"] == direct.config["quantization"]
    ours, theirs = (tiny.logits_of(load_model(folder.path, NumpyOps()), IDS) for folder in (out, direct))
    assert np.abs(ours - theirs).max() < (1e-4 if name == "phi4mini" else 1e-5)  # whose rope's factors a file rounds


@pytest.mark.parametrize(("factor", "high", "original"), [(8.0, 4.0, 8192), (32.0, 4.0, 8192), (4.0, 3.0, 4096)])
def test_llama3s_rope_from_its_divisors(factor, high, original):
    frequencies = 500000.0 ** (-np.arange(64) / 64)
    keys = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high}
    keys["original_max_position_embeddings"] = original
    slowed = np.array(hf_rope(Keys({"rope_theta": 500000.0, "rope_scaling": keys}, "here"), 128).frequencies)
    divisors = (frequencies / slowed).astype(np.float32).astype(np.float64)
    assert _llama3(frequencies / divisors, divisors) == keys


def test_a_folder_from_a_gguf_file_of_a_chat_model(chat_folder, tmp_path):
    """Tokenizer, templates, end tokens and recommended sampling, as the file has them; stopped runs go on."""
    quantize(chat_folder, tmp_path / "in.gguf", "--type", "F32")
    quantize(tmp_path / "in.gguf", tmp_path / "out", "--group-size", 32, "--shard-size", 20_000)
    before, after = open_checkpoint(tmp_path / "in.gguf"), open_checkpoint(tmp_path / "out")
    ours, theirs = load_tokenizer(after.path, after.config), load_tokenizer(before.path, before.config)
    text = "<|im_start|>abc ab 12 cabc'll\n é<|im_end|>"
    assert ours.encode(text) == theirs.encode(text)
    facts = ("bos_id", "eos_id", "add_bos", "end_ids", "chat_templates", "control_tokens")
    assert [getattr(ours, fact) for fact in facts] == [getattr(theirs, fact) for fact in facts]
    assert recommended_sampling(after).options == recommended_sampling(before).options
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def test_the_wedlm_demo_as_a_folder(tmp_path, capsys):
    """A file of a quantized model is decoded and rounded again only where that is asked for; its mask goes along."""
    assert main(["quantize", "demo-wedlm", str(tmp_path / "out")]) == 1
    capsys.readouterr()
    quantize("demo-wedlm", tmp_path / "out", "--requantize", "--bits", 8, "--group-size", 32)
    assert "The embedding and the head keep at least 8 bits: every mask position" in capsys.readouterr().out
    quantize("demo-wedlm", tmp_path / "less", "--requantize", "--bits", 4, "--group-size", 32, "--recipe", "uniform")
    assert "The embedding and the head are worth more bits, such as the 8" in capsys.readouterr().out
    with generate.load(str(tmp_path / "out"), backend="numpy") as llm:
        reply = llm.chat([{"role": "user", "content": "Count by 2 from 11 to 19."}])
        assert reply.text == "Answer: 11, 13, 15, 17, 19.\n"
        assert reply.stats.wedlm.tokens_per_forward > 3


def test_the_wedlm_demo_there_and_back(tmp_path):
    """Its GGUF file is what `quantize` makes of a dense folder: every tensor, the tokens, the template and the mask."""
    quantize("demo-wedlm", tmp_path / "dense", "--layers", "*=keep")
    card = json.loads((tmp_path / "dense/config.json").read_text())
    plain = {key: value for key, value in card.items() if not key.startswith("quantization")}
    (tmp_path / "dense/config.json").write_text(json.dumps(plain))
    quantize(tmp_path / "dense", tmp_path / "again.gguf", "--type", "Q8_0")
    ours, theirs = open_checkpoint(tmp_path / "again.gguf"), open_checkpoint(demo_path("demo-wedlm"))
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in theirs.tensors.items():
        assert (ours.tensors[name].type, ours.tensors[name].data.tobytes()) == (tensor.type, tensor.data.tobytes())
    for key in ("tokens", "merges", "eos_token_id", "mask_token_id", "pre"):
        assert ours.config[f"tokenizer.ggml.{key}"] == theirs.config[f"tokenizer.ggml.{key}"]
    assert ours.config["tokenizer.chat_template"] == theirs.config["tokenizer.chat_template"]


def test_a_gguf_file_cannot_state_the_layers_without_rope(tmp_path, capsys):
    """Its readers take every fourth layer of SmolLM3."""
    folder = rewritten(tiny.FOLDER / "smollm3", tmp_path / "in", no_rope_layers=[1, 0, 1, 1, 1])
    assert main(["quantize", str(folder), str(tmp_path / "out.gguf")]) == 1
    assert "a GGUF file cannot state no_rope (1,) of this model" in capsys.readouterr().err


def test_folders_from_gguf_files_that_are_refused(tmp_path, capsys):
    made = write_gguf(tiny.FOLDER / "qwen35", tmp_path / "in.gguf")
    assert main(["quantize", str(made), str(tmp_path / "out")]) == 1
    supported = "llama, phi3, qwen2, qwen3, smollm3, wedlm"
    words = f"a GGUF file of qwen35, of which no MLX folder can be made; supported: {supported}"
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.part").exists()


# -- sensitivity -------------------------------------------------------------------------------------------------------


def test_sensitivity(tmp_path, capsys):
    folder = tiny_chat.write(tmp_path / "in")
    (tmp_path / "text").write_text("some text to read, again and again; " * 8)
    command = [
        folder,
        "--sensitivity",
        "--text",
        tmp_path / "text",
        "--ctx-window",
        64,
        "--backend",
        "numpy",
    ]
    quantize(*command, "--bits", 2, "--group-size", 32, "--plot", tmp_path / "plot.svg")
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[0].strip(): line for line in lines[3:-1]}
    kinds = {
        "embed",
        "head",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
    }  # down_proj has 48 columns
    assert {key for key in rows if key != "the recipe"} == kinds
    values = [float(line.split(" ± ")[0].split()[-1]) for line in lines[3:-2]]
    assert values == sorted(values, reverse=True)
    assert values[-1] > 0
    whole = float(rows["the recipe"].split(" ± ")[0].split()[-1])
    assert whole > 0
    svg = (tmp_path / "plot.svg").read_text()
    assert svg.count("<rect") == 1 + len(kinds) + 1
    assert "o_proj" in svg
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "plot.svg", "text"]


def test_sensitivity_is_refused_before_anything_is_loaded(tmp_path, capsys, monkeypatch):
    """Where a plot would replace an input, and where no matrix would change, which was a traceback at the end."""
    monkeypatch.setattr("generate.sensitivity.open_model", lambda *_, **__: pytest.fail("a model was loaded"))
    folder, text = tiny_chat.write(tmp_path / "in"), tmp_path / "text"
    text.write_text("some text")
    flags = ["--sensitivity", "--text", str(text)]
    for out in (text, folder / "model.safetensors", folder / "config.json"):
        assert main(["quantize", str(folder), *flags, "--plot", str(out)]) == 2
        assert f"{out} is an input" in capsys.readouterr().err
    for more in ([], ["--requantize"]):
        assert main(["quantize", "demo", *flags, "--type", "Q8_0", *more]) == 2
        assert "no matrix of demo-qwen35-Q8_0.gguf would change, since " in capsys.readouterr().err
    assert text.read_text() == "some text"


# -- mlx-lm ------------------------------------------------------------------------------------------------------------


def float32_copy(name, path):
    """A tiny model in float32, so that mlx-lm computes in it, with the keys that mlx-lm reads."""
    if name == "wedlm":
        folder = tiny.wedlm(path.with_name("wedlm"), mask_token_id=90)
        return rewritten(folder, path, rope_parameters=None, rope_theta=10000.0)
    config = json.loads((tiny.FOLDER / name / "config.json").read_text())
    if name.startswith("qwen35"):
        kind = config["model_type"].removesuffix("_text")
        return rewritten(tiny.FOLDER / name, path, model_type=kind, text_config=config)
    if name == "laguna":  # of which mlx-lm does not read attention_factor
        ropes = config["rope_parameters"]
        ropes["full_attention"].pop("attention_factor")
        return rewritten(tiny.FOLDER / name, path, rope_parameters=ropes)
    older: dict[str, Any] = {"rope_parameters": None, "rope_theta": 10000.0}
    if name == "qwen3next":
        older["partial_rotary_factor"] = 0.25
    if name == "glm4moe":
        older["partial_rotary_factor"] = 0.5
    if name == "qwen3moe":  # as released
        older["num_experts"] = 8
    if name in ("mistral", "phi3"):  # whose window mlx-lm does not read
        older["sliding_window"] = None
    if name == "phi4mini":
        rope = config["rope_parameters"]
        scaling = {"type": "longrope", **{f"{each}_factor": rope[f"{each}_factor"] for each in ("long", "short")}}
        older |= {"rope_scaling": scaling, "partial_rotary_factor": 0.75}
    if name == "deepseek2":
        older |= {"rope_theta": 100.0, "rope_scaling": config["rope_parameters"]}
    if name == "olmo3":
        yarn = config["rope_parameters"]["full_attention"]
        older |= {"rope_theta": 100.0, "rope_scaling": yarn}
    if name == "gemma3":
        older |= {"rope_theta": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
        older |= {"rope_local_base_freq": 10000.0, "sliding_window_pattern": 6}
    folder = rewritten(tiny.FOLDER / name, path, **older)
    for family, key in (("deepseek", "q_lora_rank"), ("glm4moe", "rope_scaling")):  # whose null mlx-lm reads
        if name.startswith(family):
            values = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(values | {key: None}))
    return folder


@pytest.mark.model
@pytest.mark.parametrize("name", [*(n for n in tiny.MODELS if n not in ("qwen3-yarn", "laguna-m1")), "wedlm"])
@pytest.mark.parametrize("flags", [["--bits", "4"], ["--mode", "mxfp4"], ["--bits", "3", "--recipe", "mixed"]], ids=str)
def test_mlx_lm_reads_it(name, flags, tmp_path):
    """The logits of our NumPy reading of the folder, by mlx-lm's definition and MLX's products."""
    utils = pytest.importorskip("mlx_lm.utils")
    import mlx.core as mx

    size = [] if "--mode" in flags else ["--group-size", "32"]
    quantize(float32_copy(name, tmp_path / "in"), tmp_path / "out", *flags, *size)
    model = utils.load_model(Path(tmp_path / "out"))[0]
    theirs = np.array(model(mx.array(IDS)[None]).astype(mx.float32))[0]
    ours = tiny.logits_of(load_model(tmp_path / "out", NumpyOps()), IDS)
    assert np.abs(ours - theirs).max() < 2e-3
    assert (ours.argmax(-1) == theirs.argmax(-1)).all()
