"""Synthetic models: the shapes and types of real files, and the table that bench makes of them."""

import csv
import re
import time
from collections import Counter

import numpy as np
import pytest

from common.reference import NumpyOps
from common.step import State, Step
from generate import bench_synthetic, bench_wedlm, timing
from generate import synthetic as synthetic_module
from generate.__main__ import main
from generate.backends import Found
from generate.synthetic import METADATA, synthetic, synthetic_checkpoint
from generate.timing import announced

SMALL = {  # keys of a real shape, smaller
    "granite-3.1-3b-a800m": {
        **{"vocab_size": 96, "embedding_length": 256, "block_count": 2, "feed_forward_length": 256},
        **{"attention.head_count": 4, "attention.head_count_kv": 2, "expert_count": 8, "expert_used_count": 2},
    },
    "deepseek-v2-lite": {
        **{"vocab_size": 96, "embedding_length": 256, "block_count": 3, "feed_forward_length": 256},
        **{"attention.head_count": 4, "attention.kv_lora_rank": 256, "expert_count": 8, "expert_used_count": 2},
        "expert_feed_forward_length": 256,
    },
    "olmo-3-7b": {
        **{"vocab_size": 96, "embedding_length": 256, "block_count": 4, "feed_forward_length": 256},
        **{"attention.head_count": 4, "attention.head_count_kv": 2},
    },
    "granite-3.3-8b": {
        **{"vocab_size": 96, "embedding_length": 256, "block_count": 2, "feed_forward_length": 256},
        **{"attention.head_count": 4, "attention.head_count_kv": 2},
    },
    "smollm3-3b": {"vocab_size": 96, "embedding_length": 256, "block_count": 4, "feed_forward_length": 256},
    "wedlm-8b": {"vocab_size": 96, "embedding_length": 256, "block_count": 2, "feed_forward_length": 256},
    "laguna-xs.2": {
        **{"vocab_size": 96, "embedding_length": 256, "block_count": 4, "feed_forward_length": 256},
        **{"attention.head_count": [8, 8, 8, 8], "expert_count": 8, "expert_used_count": 2},
        **{"expert_feed_forward_length": 256, "expert_shared_feed_forward_length": 256},
    },
    "qwen3-next-80b-a3b": {
        **{"vocab_size": 96, "embedding_length": 256, "block_count": 4, "ssm.group_count": 2, "ssm.time_step_rank": 4},
        **{"ssm.inner_size": 512, "expert_count": 8, "expert_used_count": 2},
    },
    "gemma-3-27b": {
        **{"vocab_size": 96, "embedding_length": 256, "block_count": 6, "feed_forward_length": 256},
        **{"attention.head_count": 4, "attention.head_count_kv": 2},
    },
    "glm-4.5-air": {
        **{"vocab_size": 96, "embedding_length": 256, "block_count": 3, "feed_forward_length": 256},
        **{"attention.head_count": 4, "attention.head_count_kv": 2, "expert_count": 8, "expert_used_count": 2},
        "expert_feed_forward_length": 256,
    },
    "gpt-oss-20b": {
        **{"vocab_size": 96, "embedding_length": 256, "block_count": 2, "attention.head_count": 4},
        **{"attention.head_count_kv": 2, "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 256},
    },
    "glm-4.7-flash": {
        **{"vocab_size": 96, "embedding_length": 256, "block_count": 3, "feed_forward_length": 256},
        **{"attention.head_count": 4, "attention.q_lora_rank": 256, "attention.kv_lora_rank": 256},
        **{"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 256},
    },
}


@pytest.fixture
def small(monkeypatch):
    for name, keys in SMALL.items():
        metadata = dict(METADATA[name])
        metadata |= {f"{metadata['general.architecture']}.{key}": value for key, value in keys.items()}
        monkeypatch.setitem(synthetic_module.METADATA, name, metadata)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("qwen3.6-27b", 16.53),
        ("wedlm-8b", 5.02),
        ("qwen2.5-7b", 4.68),
        ("qwen3-30b-a3b", 18.55),
        ("laguna-xs.2", 20.27),
        ("glm-4.7-flash", 18.1),
        ("qwen3-next-80b-a3b", 48.5),
        ("gemma-3-27b", 16.54),
        ("smollm3-3b", 1.907),
        ("granite-3.3-8b", 4.94),
        ("olmo-3-7b", 4.47),
        ("granite-3.1-3b-a800m", 2.02),
        ("deepseek-v2-lite", 10.36),
    ],
)
def test_bytes_of_the_real_files(name, gigabytes):
    """Q4_K_M as published: llama.cpp's files of these models have these sizes, without tokenizers."""
    total = sum(tensor.nbytes for tensor in synthetic_checkpoint(f"{name}:q4_k_m").tensors.values())
    assert total / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize(("name", "gigabytes"), [("gpt-oss-20b", 12.1), ("gpt-oss-120b", 63.4)])
def test_bytes_of_files_with_mxfp4_experts(name, gigabytes):
    """As llama.cpp's files are published, without tokenizers: experts in MXFP4, other matrices in Q8_0."""
    total = sum(tensor.nbytes for tensor in synthetic_checkpoint(f"{name}:mxfp4").tensors.values())
    assert total / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize(("recipe", "most", "narrow"), [("q4_k_m", "Q4_K", "Q5_0"), ("q5_k_m", "Q5_K", "Q5_1")])
def test_types_of_a_recipe(recipe, most, narrow):
    """GLM-4.7-Flash, one of whose matrices has 192 columns."""
    counts = Counter(tensor.type for tensor in synthetic_checkpoint(f"glm-4.7-flash:{recipe}").tensors.values())
    assert counts.keys() == {most, narrow, "Q6_K", "F32"}
    assert counts[most] > counts["Q6_K"] > 0


def test_capitals():
    small, capitals = (synthetic_checkpoint(name).tensors for name in ("wedlm-8b:q5_k_m", "WeDLM-8B:Q5_K_M"))
    assert [(name, t.type, t.shape) for name, t in small.items()] == [(n, t.type, t.shape) for n, t in capitals.items()]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("recipe", synthetic_module.RECIPES)
def test_small_shapes_run(name, recipe, small):
    model = synthetic(f"{name}:{recipe}", NumpyOps())
    state = model.new_state(16)
    logits = model.ops.read(model.forward(state, Step.chain(np.arange(5, dtype=np.int32), 0)))
    assert logits.shape == (5, 96)
    assert np.isfinite(logits).all()


def test_bench(small, tmp_path, capsys):
    table = tmp_path / "rows.tsv"
    argv = ["bench", "--synthetic", "glm-4.7-flash:q4_k_m", "--backend", "numpy", "--contexts", "3,8", "--rows", "1,4"]
    assert main([*argv, "--prefill", "8", "--runs", "1", "--log", str(table), "--note", "a test"]) == 0
    out = capsys.readouterr().out
    assert "copy bandwidth" in out
    assert [line.split()[:2] for line in out.splitlines()[-4:]] == [["3", "1"], ["3", "4"], ["8", "1"], ["8", "4"]]
    rows = list(csv.DictReader(table.open(), delimiter="\t"))
    assert [row["decoder"] for row in rows] == ["prefill", "steps of 1", "steps of 4", "steps of 1", "steps of 4"]
    assert all(row["model"] == "glm-4.7-flash:q4_k_m" for row in rows)


def test_bench_leaves_the_first_prefill_out(small, tmp_path, monkeypatch):
    """By a clock that only forward passes move: the first takes 9 s, the others 1, 4 and 2, whose median is 2."""
    clock, seconds, run, table = [0.0], iter((9.0, 1.0, 4.0, 2.0)), NumpyOps.run, tmp_path / "rows.tsv"

    def timed(*args):
        clock[0] += next(seconds, 0.5)
        return run(*args)

    monkeypatch.setattr(NumpyOps, "run", timed)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(NumpyOps, "copy_bandwidth", lambda self: 1e9)
    argv = ["bench", "--synthetic", "wedlm-8b:q5_k_m", "--backend", "numpy", "--contexts", "3", "--rows", "1"]
    assert main([*argv, "--prefill", "8", "--runs", "3", "--log", str(table)]) == 0
    prefill, step = csv.DictReader(table.open(), delimiter="\t")
    assert prefill["prefill_tps"] == "4.0"
    assert step["decode_tps_median"] == "2.0"


def test_bench_commits_a_row_after_a_prompt(small, monkeypatch):
    """Without this commit a recurrent state would apply a short prompt again in every measured step."""
    commits, found, commit, steps = [], [], State.commit, bench_synthetic._steps

    def committed(state, path):
        commits.append(len(path))
        commit(state, path)

    def measured(model, state, rows, runs):
        found.append((state.length, commits[-1]))
        return steps(model, state, rows, runs)

    monkeypatch.setattr(State, "commit", committed)
    monkeypatch.setattr(bench_synthetic, "_steps", measured)
    argv = ["bench", "--synthetic", "wedlm-8b:q5_k_m", "--backend", "numpy", "--contexts", "8,1,8,9", "--rows", "1"]
    assert main([*argv, "--prefill", "4", "--runs", "1"]) == 0
    assert found == [(1, 1), (8, 1), (9, 1)]


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--synthetic", "gpt-2:q4_k_m"], "synthetic model 'gpt-2:q4_k_m' is unknown"),
        (["--synthetic", "wedlm-8b"], "synthetic model 'wedlm-8b' is unknown"),
        (["--synthetic", "wedlm-8b:q4_k_m", "--rows", "137"], "--rows takes steps of at most 136 rows"),
        (["--synthetic", "wedlm-8b:q4_k_m", "--contexts", "40960"], "contexts and prefill need 41096 tokens"),
        (["--synthetic", "wedlm-8b:q4_k_m", "--runs", "0"], "--runs: '0' is not a whole number of at least 1"),
        (
            ["--synthetic", "wedlm-8b:q4_k_m", "--peer", "mlx-lm"],
            "--peer goes with a model alone, not with --synthetic",
        ),
        (["--synthetic", "wedlm-8b:q4_k_m", "--draft", "demo"], "--draft is 'demo'; with --synthetic it is synthetic"),
        (
            ["--synthetic", "wedlm-8b:q4_k_m", "--draft", "synthetic", "--rows", "1"],
            "--rows goes with --synthetic, not",
        ),
        (["--synthetic", "wedlm-8b:q4_k_m", "--draft", "synthetic", "--contexts", "3,4"], "one of --contexts"),
        (["--synthetic", "laguna-xs.2:q4_k_m", "--spark"], "--spark and --expert-vram go together"),
        (["--synthetic", "laguna-xs.2:q4_k_m", "--spark", "--expert-vram", "9GB"], "--spark needs --routing"),
        (
            ["--synthetic", "laguna-xs.2:q4_k_m", "--routing", "t.npz"],
            "--routing is for CUDA, and the backend is numpy",
        ),
        (
            ["--synthetic", "wedlm-8b:q4_k_m", "--spec-prompts", "prompts.jsonl"],
            "--spec-prompts and --synthetic exclude each other",
        ),
    ],
)
def test_refusals(argv, reason, capsys):
    assert main(["bench", "--backend", "numpy", *argv]) == 2
    assert reason in capsys.readouterr().err


def test_too_little_memory(monkeypatch, capsys):
    monkeypatch.setattr(NumpyOps, "free_bytes", lambda self: (10**9, "a small machine"))
    assert main(["bench", "--backend", "numpy", "--synthetic", "wedlm-8b:q4_k_m"]) == 1
    assert "wedlm-8b:q4_k_m takes" in capsys.readouterr().err
    monkeypatch.undo()
    for jobs in ([], ["--streams", "1"]):
        assert main(["bench", "--backend", "numpy", "--synthetic", "wedlm-8b:q4_k_m", "--memory", "200MB", *jobs]) == 1
        assert "GB on numpy, of 200.0 MB (given by --memory)" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--draft", "synthetic"]])
def test_a_cpu_has_to_be_asked_for(flags, monkeypatch, capsys):
    """A bench on a CPU is refused before anything is made: it would load 5 GB and take hours."""
    monkeypatch.setattr("generate.bench_synthetic.choose", lambda name: Found("mlx", True, "CPU"))
    assert main(["bench", "--synthetic", "wedlm-8b:q4_k_m", *flags]) == 1
    said = capsys.readouterr().err
    assert "wedlm-8b:q4_k_m is 5.0 GB, this machine has no GPU" in said
    assert "--backend mlx runs it anyway" in said


def test_what_takes_long_is_said(capsys):
    with announced("a nap", after=0.01):
        time.sleep(0.2)
    with announced("a blink", after=60):
        pass
    assert capsys.readouterr().err == "a nap: not done after 0 s\n"


def test_bench_of_windows(small, tmp_path, monkeypatch, capsys):
    """A step reads its choice; speed is of three tokens per forward."""
    monkeypatch.setattr(bench_wedlm, "REPEATS", 1)
    table = tmp_path / "log.tsv"
    argv = ["bench", "--synthetic", "wedlm-8b:q5_k_m", "--wedlm", "--backend", "numpy", "--runs", "1"]
    assert main([*argv, "--contexts", "4,8", "--log", str(table)]) == 0
    first, second = csv.DictReader(table.open(), delimiter="\t")
    assert (first["context"], second["context"]) == ("4", "8")
    ms, speed = re.search(r"([\d.]+) ms: .* choice .*; (\d+) tok/s at 3 per forward", first["note"]).groups()
    assert int(speed) == pytest.approx(3e3 / float(ms), rel=0.05, abs=0.6)
    assert float(first["decode_tps_median"]) == pytest.approx(int(speed), abs=0.6)
    assert "forward   choice   commit  idle ms    tok/s" in capsys.readouterr().out
    assert main([*argv, "--rows", "4"]) == 2
    assert "--rows goes with --synthetic, not with --synthetic --wedlm" in capsys.readouterr().err
