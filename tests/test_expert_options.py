"""Streaming experts from the command line and from Python: the same text, counters that move, one sentence each."""

import json
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tiny
import tiny_chat

import generate
from common.checkpoint import open_checkpoint
from common.errors import BimetalError, UsageError
from common.expert_budget import RESERVE, expert_budget
from common.expert_pack import ALIGNMENT, pack_source, write_pack
from common.expert_profile import read_profile
from common.expert_stream import ExpertStream
from common.fit import Blueprint
from common.models import architecture
from common.options import LoadOptions
from common.reference import NumpyOps
from generate.__main__ import main

sys.path.append(str(Path(__file__).parent / "models"))
from folders import rewritten


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Laguna that has a tokenizer of bytes."""
    where = tmp_path_factory.mktemp("mixture")
    tiny_chat.write(where / "chat")
    vocab = json.loads((where / "chat/config.json").read_text())["vocab_size"]
    noise = np.random.default_rng(0)

    def widen(tensors):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = noise.standard_normal((vocab, 32)).astype(np.float32)
        return tensors

    rewritten(tiny.FOLDER / "laguna", where / "laguna", widen, vocab_size=vocab)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (where / "chat" / name).rename(where / "laguna" / name)
    return where / "laguna"


def layout_of(path):
    checkpoint = open_checkpoint(path)
    definition = architecture(checkpoint)[1]
    config = definition.read_config(checkpoint)
    return checkpoint, definition.layout(config, checkpoint), config, definition


@pytest.fixture
def run(folder, capsys):
    def run(*argv):
        code = main([*argv, "--model", str(folder)])
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
@pytest.mark.long
def test_the_text_is_that_of_the_loaded_model(run, backend, tmp_path):
    ask = "--raw", "--prompt", "hello there", "-n", "24", "--backend", backend
    code, text, _ = run(*ask)
    assert code == 0
    profile = tmp_path / "laguna.spark.csv"
    for more in ((), ("--expert-cache", "60KB"), ("--expert-cache", "60KB", "--expert-profile", str(profile))) * 2:
        code, streamed, err = run(*ask, "--stream-experts", "--stats", *more)
        assert (code, streamed) == (0, text), err
        assert re.search(r"experts: [\d.]+% hits, [\d.]+ MB per token, reads [\d.]+ ms p50", err)
    counts = read_profile(profile).counts
    ran = 2 * 3 * (4 * (11 + 23) + 24)  # of the last layer, prefill computes one row
    assert ran <= counts.sum() <= ran + 2 * 3 * 5  # MLX launches a step ahead


def test_a_profile_that_cannot_be_written_is_refused_before_the_first_reply(folder, tmp_path):
    profile = tmp_path / "none" / "p.csv"
    with pytest.raises(OSError, match=re.escape(str(profile))):
        generate.load(folder, backend="numpy", stream_experts=True, expert_profile=profile)


def test_a_profile_that_became_another_models_is_refused_at_the_end(folder, tmp_path):
    profile = tmp_path / "p.csv"
    llm = generate.load(folder, backend="numpy", stream_experts=True, expert_profile=profile)
    profile.write_text("1,2\n3,4\n")
    with pytest.raises(BimetalError, match="is the profile of another model: it has 2 layers of 2 experts"):
        llm.close()
    assert profile.read_text() == "1,2\n3,4\n"


def test_counters_are_those_of_each_reply(folder):
    with generate.load(folder, backend="numpy", stream_experts=True, expert_cache="160KB") as llm:
        first, second = (llm.generate("abc", max_tokens=9).stats.experts for _ in range(2))
    assert first.tokens == 3 + 8
    assert second.tokens < first.tokens + 1
    assert 0 < first.hit_rate < 1
    assert first.bytes_per_token > 0
    assert first.peak <= first.budget == 160_000
    assert len(first.waits) == 6
    assert first.waits[0] == 0 < first.wait


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
@pytest.mark.few(1)
def test_replies_side_by_side_keep_their_texts(folder, backend):
    prompts = ["hello", "a longer prompt than that", "x"]
    with generate.load(folder, backend=backend) as llm:
        alone = [llm.generate(prompt, max_tokens=12).text for prompt in prompts]
    more = {"stream_experts": True, "expert_cache": "160KB", "parallel": 3}
    with generate.load(folder, backend=backend, **more) as llm, ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda prompt: llm.generate(prompt, max_tokens=12).text, prompts))
    assert together == alone


def test_a_server_shows_what_experts_cost(folder):
    pytest.importorskip("starlette", reason="the server's extra is not installed")
    from generate.server.service import Service

    with generate.load(folder, backend="numpy", stream_experts=True, expert_cache="160KB") as llm:
        llm.generate("abc", max_tokens=9)
        service = Service(1)
        service.serve(llm, "m")
        text, stats = service.metrics_text(), llm.expert_stats
    assert f'expert_read_bytes{{model_name="m"}} {stats.bytes_read}' in text
    assert f'expert_evictions{{model_name="m"}} {stats.evictions}' in text
    with generate.load(folder, backend="numpy") as llm:
        assert llm.expert_stats is None


def test_only_the_models_thread_has_its_experts_count(folder, monkeypatch):
    """Any thread may read the figures while steps run, which a supply that counts late must not count twice."""
    with generate.load(folder, backend="numpy", stream_experts=True, expert_cache="160KB") as llm:
        reply = llm.generate("abc", max_tokens=9)
        counted = []
        monkeypatch.setattr(ExpertStream, "stats", lambda *_: counted.append(threading.current_thread()))
        stats = llm.expert_stats
    assert (counted, stats.tokens) == ([], reply.stats.experts.tokens)


@pytest.mark.parametrize(
    ("name", "switches"),
    [
        *((name, "stream_experts, which is off") for name in ("expert_cache", "expert_pack")),
        ("expert_vram", "spark, which is off"),
        ("expert_profile", "stream_experts or spark, which are off"),
    ],
)
def test_a_flag_without_effect_is_an_error(name, switches, run):
    with pytest.raises(UsageError, match=f"{name} goes with {switches}"):
        LoadOptions(**{name: "8GB"})
    code, _, err = run("--prompt", "x", f"--{name.replace('_', '-')}", "8GB")
    assert code == 2
    assert f"goes with {switches}" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--spark", "--backend", "numpy"), "spark holds hot experts on an NVIDIA GPU, and the backend is numpy"),
        (("--spark", "--stream-experts"), "spark and stream_experts exclude each other"),
        (("--spark", "--expert-cache", "8GB"), "expert_cache goes with stream_experts, which is off"),
        (("--spark", "--expert-vram", "lots"), "expert_vram is 'lots'; it must be bytes, or an amount of memory"),
    ],
)
def test_hot_experts_elsewhere_are_refused(argv, message, run):
    code, out, err = run("--raw", "--prompt", "x", *argv)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (("--expert-cache", "lots"), 2, "expert_cache is 'lots'; it must be bytes, or an amount of memory"),
        (("--expert-cache", "10KB"), 1, "the experts' budget is 1e-05 GB; the least is"),
        (("--memory", "1GB"), 1, "1.00 GB of memory leave 0.00 GB for experts, and the least is 0.00 GB"),
        (("--expert-profile", "{folder}/config.json"), 1, "config.json is not a profile|line 1: .* is not a count"),
        (("--expert-pack", "{folder}/config.json"), 1, "config.json is no pack of experts; `generate pack` writes one"),
        (("--expert-pack", "{folder}/none"), 1, "none cannot be read: No such file or directory"),
    ],
)
def test_bad_values_are_one_sentence(run, folder, argv, code, message):
    argv = [part.format(folder=folder) for part in argv]
    got, out, err = run("--raw", "--prompt", "x", "--backend", "numpy", "--stream-experts", *argv)
    assert (got, out) == (code, "")
    assert re.search(f"^error: .*({message})", err, re.MULTILINE), err


def test_a_limit_on_memory(run):
    code, out, err = run("--raw", "--prompt", "x", "--backend", "numpy", "--memory", "1MB")
    assert (code, out) == (1, "")
    assert re.search(r"the model needs [\d.]+ MB of memory, and memory is limited to 1.0 MB: allow more", err)
    assert "machine" not in err


def test_a_model_without_experts_is_refused(capsys, tmp_path):
    tiny_chat.write(tmp_path / "chat")
    assert main(["--raw", "--prompt", "x", "--stream-experts", "--model", str(tmp_path / "chat")]) == 1
    assert "has no experts to stream; it is no mixture of experts" in capsys.readouterr().err


def test_memory_bounds_the_experts(folder):
    """One rule: memory less other weights, states and a reserve; at most the cache that is asked for."""
    checkpoint, layout, config, definition = layout_of(folder)
    ask = checkpoint, NumpyOps(), Blueprint(config, layout, definition.state_spec(config)), 512
    whole = expert_budget(*ask, memory=100 * 10**9)
    assert whole.experts == whole.total == 5 * 8 * whole.layer_bytes // 8
    assert expert_budget(*ask, cache=60_000).experts == 60_000
    memory = RESERVE + whole.fixed + whole.run + 70_000
    assert expert_budget(*ask, memory=memory).experts == 70_000
    assert expert_budget(*ask, memory=memory, cache=60_000).experts == 60_000
    assert expert_budget(*ask, memory=memory, cache=80_000).experts == 70_000
    with pytest.raises(BimetalError, match=r"the model needs \d"):
        expert_budget(*ask, memory=memory - 70_000)


def test_inspect_and_fit_show_what_streaming_takes(run, folder, capsys):
    code, out, _ = run("inspect")
    assert code == 0
    assert "experts: 8 in each of 5 layers, 3 per token, at most 6144 bytes each as stored" in out
    assert "--stream-experts here: " in out
    assert main(["fit", str(folder), "--memory", "1MB", "--backend", "numpy"]) == 0
    assert re.search(r"with --stream-experts, 1024 tokens: .* the model needs 1.51 GB", capsys.readouterr().out)


# -- packs -------------------------------------------------------------------------------------------------------------


def test_a_pack_gives_the_same_text(run, folder, tmp_path, capsys):
    assert main(["pack", str(folder), str(tmp_path / "p.experts")]) == 0
    assert "40 experts of 5 layers" in capsys.readouterr().out
    ask = "--raw", "--prompt", "hello there", "-n", "24", "--backend", "numpy"
    _, text, _ = run(*ask)
    code, packed, err = run(
        *ask, "--stream-experts", "--expert-cache", "60KB", "--expert-pack", str(tmp_path / "p.experts")
    )
    assert (code, packed) == (0, text), err
    assert main(["pack", str(folder), str(tmp_path / "p.experts")]) == 2
    assert "exists; give the name of a new file" in capsys.readouterr().err


def test_an_expert_of_a_pack_is_one_aligned_run(folder, tmp_path, monkeypatch):
    checkpoint, layout, _, _ = layout_of(folder)
    _, plan = write_pack(checkpoint, layout, tmp_path / "p", lambda n: None)
    source = pack_source(tmp_path / "p", checkpoint, layout)
    assert all(at % ALIGNMENT == 0 for at in (*plan.starts.values(), *plan.blocks.values()))
    assert (tmp_path / "p").stat().st_size == plan.end
    calls = []
    monkeypatch.setattr(source.files[0], "read", lambda offset, buffers: calls.append((offset, len(buffers))))
    source.read(2, 3, [np.empty(size, np.uint8) for size in source.forms[2].sizes])
    assert calls == [(plan.starts[2] + 3 * plan.blocks[2], 3)]


@pytest.mark.parametrize("cut", [0, 10, 30_000, 500_001])
def test_a_stopped_pack_goes_on(folder, tmp_path, cut):
    checkpoint, layout, _, _ = layout_of(folder)
    whole, again = tmp_path / "whole", tmp_path / "again"
    _, plan = write_pack(checkpoint, layout, whole, lambda n: None)
    (tmp_path / "again.part").write_bytes(whole.read_bytes()[:cut])
    counted = []
    write_pack(checkpoint, layout, again, counted.append)
    assert again.read_bytes() == whole.read_bytes()
    assert sum(counted) == plan.end
    assert not (tmp_path / "again.part").exists()


def test_a_pack_of_another_model_is_refused(folder, tmp_path):
    checkpoint, layout, _, _ = layout_of(folder)
    other, other_layout, _, _ = layout_of(tiny.FOLDER / "glm")
    write_pack(other, other_layout, tmp_path / "glm", lambda n: None)
    with pytest.raises(BimetalError, match=r"glm is a pack of another model than .*; layer 1 differs"):
        pack_source(tmp_path / "glm", checkpoint, layout)
    (tmp_path / "new.part").write_bytes((tmp_path / "glm").read_bytes()[:400])
    with pytest.raises(UsageError, match=r"new.part holds an unfinished pack of another model"):
        write_pack(checkpoint, layout, tmp_path / "new", lambda n: None)
    whole = tmp_path / "whole"
    write_pack(checkpoint, layout, whole, lambda n: None)
    whole.write_bytes(whole.read_bytes()[:-1])
    with pytest.raises(BimetalError, match="and a whole pack of this model has"):
        pack_source(whole, checkpoint, layout)
