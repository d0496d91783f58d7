"""GGUF files of Laguna and GLM that `generate quantize` makes: names, sources of every kind, tokenizers, refusals."""

import json
import re
import tracemalloc

import gguf
import numpy as np
import pytest
import test_glm
import test_laguna
import tiny
from folders import rewritten
from gguf_files import write_gguf
from gguf_laguna_glm import NAMES, TOP
from test_quantized_models import IDS, divergence, quantize, source
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from common.checkpoint import Checkpoint, open_checkpoint
from common.gguf_file import converted
from common.gguf_tokenizer import _LLAMA3, _NEWLINE_RUN, _QWEN2
from common.models import architecture, load_model
from common.quantize import Format
from common.recipe import choose, find_weights, uniform
from common.reference import NumpyOps
from common.tensors import Tensor
from common.tokenizer import load_tokenizer
from common.weights import account
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


LAGUNA_XS_2 = {
    **{"model_type": "laguna", "vocab_size": 100352, "hidden_size": 2048, "num_hidden_layers": 40, "head_dim": 128},
    **{"num_attention_heads": 48, "num_attention_heads_per_layer": [48, 64, 64, 64] * 10, "num_key_value_heads": 8},
    **{"layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 10, "sliding_window": 512},
    **{"mlp_layer_types": ["dense"] + ["sparse"] * 39, "intermediate_size": 8192, "num_experts": 256},
    **{"num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    **{"moe_routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "gating": True},
    "rope_parameters": {
        "full_attention": {
            **{"rope_type": "yarn", "rope_theta": 500000.0, "partial_rotary_factor": 0.5, "factor": 32.0},
            **{"original_max_position_embeddings": 4096, "beta_fast": 64.0, "beta_slow": 1.0, "attention_factor": 1.0},
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    },
}
GLM_4_7_FLASH = {
    **{"model_type": "glm4_moe_lite", "vocab_size": 154880, "hidden_size": 2048, "num_hidden_layers": 47},
    **{"num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 768, "kv_lora_rank": 512},
    **{"qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "intermediate_size": 10240},
    **{"first_k_dense_replace": 1, "n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536},
    **{"n_shared_experts": 1, "routed_scaling_factor": 1.8, "norm_topk_prob": True, "n_group": 1, "topk_group": 1},
    **{"rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "rope_theta": 1e6},
}


def folder_of(config, shapes, path):
    """A folder in bfloat16 without a single value, whose GGUF file has `shapes`."""
    shared = "shared_expert." if config["model_type"] == "laguna" else "shared_experts."
    names = {gguf: hf for hf, gguf in (NAMES | TOP).items() if "shared_expert" not in hf or shared in hf}
    found = {}
    for name, shape in shapes.items():
        block, i, short = re.fullmatch(r"(blk\.(\d+)\.)?(.*)", name).groups()
        prefix = f"model.layers.{i}." if block else ""
        if experts := re.fullmatch(r"ffn_(\w+)_exps.weight", short):
            stack = {f"{prefix}mlp.experts.{e}.{experts[1]}_proj.weight": shape[1:] for e in range(shape[0])}
            found |= stack
        elif short == "attn_k_b.weight":
            heads, latent, keys = shape
            rows = heads * (keys + shapes[f"{block}attn_v_b.weight"][1])
            found[f"{prefix}self_attn.kv_b_proj.weight"] = (rows, latent)
        elif short != "attn_v_b.weight":
            found[prefix + names[short]] = shape
    tensors = {name: Tensor(name, "BF16", shape, np.empty((*shape[:-1], 0), np.uint8)) for name, shape in found.items()}
    return Checkpoint(path, "safetensors", config, tensors)


@pytest.mark.parametrize(
    ("config", "released", "dense"),
    [(LAGUNA_XS_2, test_laguna.released, 239), (GLM_4_7_FLASH, test_glm.released, 281)],
    ids=["laguna-xs.2", "glm-4.7-flash"],
)
def test_keys_and_tensors_of_the_releases(config, released, dense, tmp_path):
    """What the published files have: names, shapes, how many tensors are float32, and every key with its value."""
    keys, shapes = released()
    checkpoint = folder_of(config, shapes, tmp_path)
    definition = architecture(checkpoint)[1]
    layout = definition.layout(definition.read_config(checkpoint), checkpoint)
    account(checkpoint, layout)
    weights, recipe = find_weights(checkpoint, layout), uniform(Format("Q8_0"))
    choices = {name: choose(weight, recipe, False, True) for name, weight in weights.items()}
    written, outputs = converted(checkpoint, definition, layout, weights, choices)
    assert {output.name: output.shape for output in outputs} == shapes
    types = [output.format.type for output in outputs]
    assert (types.count("F32"), types.count("Q8_0")) == (dense, len(shapes) - dense)
    values = {key.name.partition(".")[2]: key.value for key in written}
    assert {key: values[key] for key in keys} == keys


def test_modules_of_mlx_lm(tmp_path, capsys):
    """The experts of a layer are one module, and both halves of kv_b_proj are modules of their own."""
    quantize(source("glm"), tmp_path / "out", "--group-size", 32, "--layers", "experts.up_proj=8:32")
    names = open_checkpoint(tmp_path / "out").tensors
    assert not any(".experts." in name or "kv_b_proj" in name for name in names)
    up = names["model.layers.1.mlp.switch_mlp.up_proj.weight"]
    assert (up.shape, up.bits) == ((8, 16, 32), 8)
    assert names["model.layers.1.mlp.switch_mlp.down_proj.weight"].shape == (8, 32, 16)  # in float, and stacked
    assert names["model.layers.0.self_attn.unembed_out.weight"].shape == (3, 24, 32)
    quantize(source("glm"), tmp_path / "same", "--layers", "*=keep")
    assert np.abs(logits(tmp_path / "same") - logits(tiny.FOLDER / "glm")).max() < 1e-5
    capsys.readouterr()
    for out, format in (("other", "8:32"), ("other.gguf", "Q4_0")):
        flags = ["--layers", f"*.experts.3.up_proj={format}", *(["--group-size", "32"] if out == "other" else [])]
        assert main(["quantize", source("glm"), str(tmp_path / out), *flags]) == 1
        assert "are to be stored unlike; the experts of a layer are one matrix" in capsys.readouterr().err
        assert not (tmp_path / out).exists()


@pytest.mark.parametrize("out", ["out", "out.gguf", "fused.gguf"])
@pytest.mark.long
def test_a_layer_of_experts_is_never_whole_in_memory(out, tmp_path):
    """8 experts of 4096 rows each, in matrices of 4 MiB and, where gate and up are one tensor, of 8."""
    at = "model.layers.2.mlp.experts."

    def larger(tensors):
        experts = {k for k in tensors if k.startswith(at) and not k.endswith("bias")}
        grown = {k: np.repeat(a, 256, int("down" in k)) if k in experts else a for k, a in tensors.items()}
        if out == "fused.gguf":
            parts = ([grown.pop(f"{at}{e}.{part}_proj.weight") for e in range(8)] for part in ("gate", "up", "down"))
            gate, up, down = map(np.stack, parts)
            grown |= {f"{at}gate_up_proj": np.concatenate([gate, up], axis=1), f"{at}down_proj": down}
        return grown

    folder = rewritten(tiny.FOLDER / "laguna-m1", tmp_path / "in", larger, moe_intermediate_size=4096)
    tracemalloc.start()
    quantize(folder, tmp_path / out, *(["--group-size", 32] if out == "out" else []))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


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


@pytest.mark.parametrize("name", ["laguna", "laguna-m1", "glm", "glm4moe", "deepseek2"])
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
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")], ignore_merges=name.startswith("glm")))
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
        ("glm4moe", "glm4", [_LLAMA3], ["<end>", "<turn>", "<tool>"]),
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
