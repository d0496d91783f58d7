"""GGUF files of Laguna and GLM that `generate quantize` makes: names, sources of every kind, tokenizers, refusals."""

import json
import re

import gguf
import numpy as np
import pytest
import test_glm
import test_laguna
import tiny
from folders import rewritten
from gguf_files import write_gguf
from test_quantized_models import IDS, divergence, quantize, source
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from common.checkpoint import open_checkpoint
from common.gguf_tokenizer import _LLAMA3, _NEWLINE_RUN, _QWEN2
from common.models import load_model
from common.reference import NumpyOps
from common.tokenizer import load_tokenizer
from generate.__main__ import main

MLX_NAMES = {"laguna": test_laguna.as_mlx_lm, "glm": test_glm.as_mlx_lm}


def logits(path):
    return tiny.logits_of(load_model(path, NumpyOps()), IDS)


def constants_of(keys):
    """The names of metadata that gguf-py has, with {arch} for the architecture."""
    for name, value in vars(keys).items():
        if isinstance(value, type):
            yield from constants_of(value)
        elif isinstance(value, str) and not name.startswith("_"):
            yield value


@pytest.mark.parametrize(
    ("name", "architecture"), [("glm", gguf.MODEL_ARCH.DEEPSEEK2), ("laguna", gguf.MODEL_ARCH.AFMOE)]
)
def test_names_of_mixtures_are_gguf_pys(name, architecture, tmp_path):
    """Tensors by gguf-py's table, metadata by its constants. It lacks Laguna, which llama.cpp names as AFMoE but for
    the norm of the feed-forward network."""
    quantize(source(name), tmp_path / "out.gguf")
    checkpoint, file = open_checkpoint(tiny.FOLDER / name), open_checkpoint(tmp_path / "out.gguf")
    table = gguf.get_tensor_name_map(architecture, checkpoint.config["num_hidden_layers"])
    expected = set()
    for key in checkpoint.tensors:
        key = re.sub(r"experts\.\d+\.", "experts.", key)  # stacked
        key = re.sub(r"(gate|experts)\.e_score_correction_bias", "gate.e_score_correction.bias", key)
        for part in ("k_b_proj", "v_b_proj"):  # kv_b_proj is split
            found = table.get_name(key.replace("kv_b_proj", part), (".weight", ".bias"))
            expected.add(found.replace("post_attention_norm", "ffn_norm") if found else key)
    assert file.tensors.keys() == expected
    prefix = file.config["general.architecture"] + "."
    assert {key.replace(prefix, "{arch}.", 1) for key in file.config} <= set(constants_of(gguf.Keys))


@pytest.mark.parametrize("name", MLX_NAMES)
def test_from_an_mlx_folder(name, tmp_path):
    """mlx-lm's names and quantized modules, decoded: the same weights, so the same logits."""
    folder = rewritten(tiny.FOLDER / name, tmp_path / "in", MLX_NAMES[name])
    quantize(folder, tmp_path / "mlx", "--bits", 4, "--group-size", 32)
    assert main(["quantize", str(tmp_path / "mlx"), str(tmp_path / "out.gguf")]) == 1  # a second rounding
    quantize(tmp_path / "mlx", tmp_path / "out.gguf", "--layers", "*=keep")
    assert np.abs(logits(tmp_path / "out.gguf") - logits(tmp_path / "mlx")).max() < 1e-4
    quantize(tmp_path / "mlx", tmp_path / "again.gguf", "--requantize")
    assert {tensor.type for tensor in open_checkpoint(tmp_path / "again.gguf").tensors.values()} == {"F32", "Q8_0"}


def test_from_experts_in_one_tensor(tmp_path):
    folder = rewritten(tiny.FOLDER / "laguna", tmp_path / "in", test_laguna.as_in_memory)
    for made, out in ((folder, "one.gguf"), (tiny.FOLDER / "laguna", "other.gguf")):
        quantize(made, tmp_path / out, "--type", "F32")
    one, other = (open_checkpoint(tmp_path / out).tensors for out in ("one.gguf", "other.gguf"))
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        assert tensor.data.tobytes() == other[key].data.tobytes(), key


def test_a_block_of_further_tokens_is_left_out(tmp_path):
    quantize(rewritten(tiny.FOLDER / "glm", tmp_path / "in", test_glm.with_mtp), tmp_path / "out.gguf", "--type", "F32")
    file = open_checkpoint(tmp_path / "out.gguf")
    assert file.config["deepseek2.block_count"] == 3
    assert not any(key.startswith("blk.3.") for key in file.tensors)
    assert divergence(tmp_path / "out.gguf", "glm") < 1e-9


@pytest.mark.parametrize("name", ["laguna", "laguna-m1", "glm"])
def test_from_a_gguf_file(name, tmp_path):
    made = write_gguf(tiny.FOLDER / name, tmp_path / "in.gguf")
    quantize(made, tmp_path / "out.gguf", "--type", "Q8_0")
    before, after = open_checkpoint(made), open_checkpoint(tmp_path / "out.gguf")
    assert after.config == before.config | {"general.file_type": 7, "general.quantization_version": 2}
    assert after.tensors["blk.1.attn_output.weight"].shape == before.tensors["blk.1.attn_output.weight"].shape
    assert after.tensors["blk.2.ffn_gate_exps.weight"].type == "Q8_0"
    assert after.tensors["blk.2.ffn_gate_inp.weight"].type == "F32"
    assert divergence(tmp_path / "out.gguf", name) < 0.2


def test_a_fused_projection_of_a_gguf_file_stays_fused(tmp_path):
    """Older files of GLM hold both halves of what expands a latent in one tensor."""

    def fused(keys, tensors):
        for i in range(3):
            k, v = (tensors.pop(f"blk.{i}.attn_{part}_b.weight") for part in "kv")
            kv = np.concatenate([k.swapaxes(1, 2), v], axis=1)
            tensors[f"blk.{i}.attn_kv_b.weight"] = kv.reshape(-1, kv.shape[-1])

    made = write_gguf(tiny.FOLDER / "glm", tmp_path / "in.gguf", change=fused)
    quantize(made, tmp_path / "out.gguf")
    assert open_checkpoint(tmp_path / "out.gguf").tensors["blk.0.attn_kv_b.weight"].type == "Q8_0"
    assert divergence(tmp_path / "out.gguf", "glm") < 0.2


@pytest.mark.parametrize(
    ("kinds", "written"),
    [
        ("fsssfs", None),  # every fourth layer is full, which readers assume
        ("fsfsfs", 2),
        ("sssfss", [True, True, True, False, True, True]),
        ("ffffff", None),
    ],
)
def test_layers_with_windows(kinds, written, tmp_path):
    named = {"f": "full_attention", "s": "sliding_attention"}
    folder = tmp_path / "in"
    config = tiny.checkpoint("laguna").config

    def widened(tensors):  # as many heads in every layer, so that any of them may slide
        layer = {key: array for key, array in tensors.items() if ".layers.1.self_attn." in key}
        return tensors | {k.replace(".1.", f".{i}.", 1): array for k, array in layer.items() for i in range(6)}

    rewritten(
        tiny.FOLDER / "laguna",
        folder,
        widened,
        layer_types=[named[kind] for kind in kinds],
        num_attention_heads_per_layer=[config["num_attention_heads_per_layer"][1]] * 6,
    )
    quantize(folder, tmp_path / "out.gguf", "--type", "F32")
    file = open_checkpoint(tmp_path / "out.gguf")
    assert file.config.get("laguna.attention.sliding_window_pattern") == written
    assert ("laguna.attention.sliding_window" in file.config) == ("s" in kinds)
    assert np.abs(logits(tmp_path / "out.gguf") - logits(folder)).max() < 1e-4


# -- tokenizers --------------------------------------------------------------------------------------------------------


def with_tokenizer(name, path, patterns, ends):
    """The tiny model with a byte-level tokenizer that splits at `patterns`; `ends` end a reply."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    size = len(alphabet) + len(ends)

    def wider(tensors):
        heads = {key: tensors[key] for key in ("model.embed_tokens.weight", "lm_head.weight")}
        return tensors | {key: np.resize(array, (size, array.shape[1])) for key, array in heads.items()}

    ids = list(range(len(alphabet), size))
    folder = rewritten(tiny.FOLDER / name, path, wider, vocab_size=size, eos_token_id=ids, bos_token_id=None)
    vocabulary = {token: id for id, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")], ignore_merges=name == "glm"))
    tokenizer.add_special_tokens(ends[:1])
    tokenizer.add_tokens(ends[1:])  # not special, as Laguna's second one
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("name", "pre", "patterns", "ends"),
    [
        ("laguna", "laguna", [_NEWLINE_RUN, _QWEN2], ["<end>", "<turn>"]),
        ("glm", "glm4", [_LLAMA3], ["<end>", "<turn>", "<tool>"]),
    ],
)
def test_tokens_that_end_a_reply_go_along(name, pre, patterns, ends, tmp_path):
    """All of them, as control tokens, and the converter's name of the pre-tokenizer."""
    folder = with_tokenizer(name, tmp_path / "in", patterns, ends)
    quantize(folder, tmp_path / "out.gguf")
    before, after = (open_checkpoint(path) for path in (folder, tmp_path / "out.gguf"))
    keys = {key.removeprefix("tokenizer.ggml."): value for key, value in after.config.items()}
    eos, *more = before.config["eos_token_id"]
    assert (keys["pre"], keys["eos_token_id"]) == (pre, eos)
    assert [keys[f"{name}_token_id"] for name in ("eot", "eom")[: len(more)]] == more
    assert [keys["token_type"][id] for id in (eos, *more)] == [3] * len(ends)  # control
    ours, theirs = load_tokenizer(after.path, after.config), load_tokenizer(before.path, before.config)
    assert ours.end_ids == theirs.end_ids == {eos, *more}
    text = "ab 12\n\n c<turn><end>"
    assert ours.encode(text) == theirs.encode(text)


def test_more_ends_than_a_gguf_file_names(tmp_path, capsys):
    folder = with_tokenizer("glm", tmp_path / "in", [_LLAMA3], ["<end>", "<turn>", "<tool>", "<more>"])
    assert main(["quantize", str(folder), str(tmp_path / "out.gguf")]) == 1
    assert "has 4 tokens that end a reply; GGUF files name three" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


def test_a_tokenizer_without_merges(tmp_path, capsys):
    """llama.cpp and our reader need them."""
    folder = with_tokenizer("glm", tmp_path / "in", [_LLAMA3], ["<end>"])
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())
    values["model"]["merges"] = []
    file.write_text(json.dumps(values))
    assert main(["quantize", str(folder), str(tmp_path / "out.gguf")]) == 1
    assert "tokenizer.json has no merges" in capsys.readouterr().err
