"""The benchmark of speculative decoding on sets of prompts: prompts, rows, files."""

import csv
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import tiny_chat
import tiny_draft

from common.decoders import Speculation
from common.errors import BimetalError, UsageError

SCRIPT = Path(__file__).parents[1] / "examples" / "benchmarks" / "speculative.py"
ROWS = [{"question": f"What is {i} and {i}?", "answer": "x", "prompt": f"p{i}"} for i in range(9)]


def loaded(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script():
    return loaded("benchmark_sets", SCRIPT)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    target = tiny_chat.write(folder / "target")
    config = json.loads((target / "config.json").read_text())
    draft = tiny_draft.write(
        folder / "draft", config["hidden_size"], config["vocab_size"], config["num_hidden_layers"], taps=[0, 1]
    )
    prompts = folder / "questions.jsonl"
    prompts.write_text("\n".join(map(json.dumps, ROWS)))
    return target, draft, prompts


def test_rates_of_several_replies(files, capsys, monkeypatch):
    target, draft, prompts = files
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    streams = loaded("benchmark_streams", SCRIPT.with_name("streams.py"))
    flags = ["--model", str(target), "--draft", str(draft), "--backend", "numpy", "--sets", str(prompts)]
    assert (
        streams.main([*flags, "--streams", "2", "--tokens", "6", "--rounds", "1", "--modes", "off,chain:3,tree"]) == 0
    )
    head, line = capsys.readouterr().out.splitlines()
    assert head == "2 replies, tokens per second: off, chain:3, tree"
    assert re.fullmatch(r"round 0: [\d,]+ \(1\.00\), [\d,]+ \([\d.]+\), [\d,]+ \([\d.]+\)", line)


@pytest.mark.parametrize("sampling", [(), ("--temperature", "0.8", "--top-p", "0.95")])
def test_files(sampling, script, files, tmp_path, capsys):
    target, draft, prompts = files
    flags = ["--model", str(target), "--draft", str(draft), "--backend", "numpy", "--out", str(tmp_path), *sampling]
    flags += ["--sets", f"gsm8k={prompts},{prompts}", "--prompts", "1", "--new-tokens", "10"]
    flags += ["--modes", "chain:3,tree:5:first"]
    assert script.main(flags) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert [(r["set"], r["mode"]) for r in results["rows"]] == [
        (name, way) for name in ("gsm8k", "questions") for way in ("plain", "chain:3", "tree:5:first")
    ]
    for row in results["rows"]:
        assert row["different_texts"] == 0
        assert row["prompts"] == 1
        assert row["acceptance_length"] == pytest.approx(1 + sum(row["by_position"]), abs=1e-3)
        assert row["rows_per_step"] == {"plain": 1.0, "chain:3": 4.0, "tree:5:first": 6.0}[row["mode"]]
    shares = results["first_draft_token"]
    assert set(shares) == ({"gsm8k", "questions"} if sampling else set())
    assert all(0 <= share <= 1 for each in shares.values() for share in each.values())
    with (tmp_path / "results.tsv").open() as file:
        assert [r["mode"] for r in csv.DictReader(file, delimiter="\t")] == [r["mode"] for r in results["rows"]]
    if any(row["by_position"] for row in results["rows"]):
        assert "share of steps that accept it" in (tmp_path / "results.svg").read_text()
    assert "tokens/step" in capsys.readouterr().out


def test_prompts_of_a_set(script, files):
    """By the template of the set, in the order of numpy's permutation, which datasets' shuffle takes."""
    name, prompts = script.read_set(f"gsm8k={files[2]}", 3, 42)
    assert name == "gsm8k"
    assert prompts == [f"Question: What is {i} and {i}?\nAnswer: " for i in (3, 0, 7)]
    assert script.read_set(str(files[2]), 2, 42) == ("questions", ["p3", "p0"])


def test_refusals(script, files, tmp_path, monkeypatch):
    with pytest.raises(BimetalError, match="lacks the column 'problem' of the set math500"):
        script.read_set(f"math500={files[2]}", 3, 42)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(BimetalError, match="has no prompts"):
        script.read_set(str(empty), 1, 0)
    with pytest.raises(BimetalError, match="cannot be read as a set of prompts"):
        script.read_set(str(tmp_path / "missing.jsonl"), 1, 0)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BimetalError, match="pip install pyarrow"):
        script.read_set(str(tmp_path / "x.parquet"), 1, 0)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *a, **k: (_ for _ in ()).throw(OSError("offline")))
    with pytest.raises(BimetalError, match=r"openai/gsm8k/main/.* cannot be fetched \(OSError\); give a file"):
        script.read_set("gsm8k", 1, 0)


def test_modes(script):
    assert script.mode("tree:22:first", 8) == Speculation("tree", 22, 8, seed_chain=True)
    assert script.mode("chain", 8) == Speculation("chain", None, 8)
    for text in ("tree:x", "tree:3:last", "bush"):
        with pytest.raises(UsageError):
            script.mode(text, 8)
