"""The bench of speculative modes prints and logs what it measured, and refuses what it cannot measure."""

import csv
import json
import re

import pytest
import tiny_chat
import tiny_draft

from common.errors import UsageError
from generate import bench_spec, synthetic, synthetic_draft
from generate.__main__ import main


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    target = tiny_chat.write(folder / "target")
    config = json.loads((target / "config.json").read_text())
    sizes = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    draft = tiny_draft.write(folder / "draft", *sizes, taps=[0, 1])
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("hello hello hello", "abcabc", "x")))
    return target, draft, prompts


def bench(files, *flags):
    target, _, prompts = files
    return main(
        ["bench", "-m", str(target), "--backend", "numpy", "--spec-prompts", str(prompts), "--new-tokens", "12", *flags]
    )


def test_table_and_log(files, tmp_path, capsys):
    log = tmp_path / "log.tsv"
    flags = ("--prompts", "2", "--budgets", "3,9", "--log", str(log), "--note", "why")
    assert bench(files, "--draft", str(files[1]), *flags) == 0
    out = capsys.readouterr().out
    ways = ["plain", "lookup", "chain", "tree", "lookup+chain", "lookup+tree", "tree, chain first", "tree 3", "tree 9"]
    assert all(f"\n{way} " in out for way in ways)
    assert "differ" not in out
    assert re.search(r"draft +tree +verify +commit +host +ms", out)
    shares = out[out.index("accepted by position") :].splitlines()[1 : len(ways)]
    assert [line[:18].strip() for line in shares] == ways[1:]
    assert all(re.fullmatch(r"none|( *\d+%)+", line[18:].strip()) for line in shares)
    rows = list(csv.DictReader(log.open(), delimiter="\t"))
    assert [row["decoder"] for row in rows] == ways
    assert all(float(row["accept_len"]) >= 1 and float(row["decode_tps_median"]) > 0 for row in rows)
    assert rows[0]["note"] == "prompts.jsonl; why"


def test_sampled(files, tmp_path, capsys):
    """Sampled texts are those of plain decoding; draft tokens are compared with what the distributions allow."""
    log = tmp_path / "log.tsv"
    flags = ("--temperature", "0.8", "--top-p", "0.95", "--prompts", "1", "--draft", str(files[1]), "--log", str(log))
    assert bench(files, *flags) == 0
    out = capsys.readouterr().out
    assert "12 new tokens each, temperature 0.8, top-p 0.95" in out
    assert "differ" not in out
    assert re.search(r"first draft token: overlap [01]\.\d+, coupled [01]\.\d+, likeliest [01]\.\d+\n", out)
    rows = list(csv.DictReader(log.open(), delimiter="\t"))
    assert rows[0]["note"] == "prompts.jsonl; temperature 0.8, top-p 0.95"


def test_windows(files, tmp_path, capsys):
    """A WeDLM model is also measured at each preset, and verified, whose texts are the plain ones."""
    log, target = tmp_path / "log.tsv", tiny_chat.write(tmp_path / "wedlm", masked=True)
    assert bench((target, *files[1:]), "--prompts", "2", "--log", str(log)) == 0
    out = capsys.readouterr().out
    assert re.search(r"wedlm verify .* same\n", out)
    assert re.search(r"windows +rows/token +p_cache +forward +choice +commit +host ms/forward", out)
    rows = {row["decoder"]: row for row in csv.DictReader(log.open(), delimiter="\t")}
    assert {f"wedlm {name}" for name in ("quality", "balanced", "fast", "verify")} < rows.keys()
    assert float(rows["wedlm verify"]["accept_len"]) >= 1
    assert "rows per token, p_cache" in rows["wedlm fast"]["note"]
    assert bench((target, *files[1:]), "--prompts", "1", "--temperature", "0.8") == 0
    out, err = capsys.readouterr()
    assert "left out: wedlm verify, which needs greedy decoding" in err
    assert re.search(r"\nwedlm fast ", out)


@pytest.mark.parametrize(("prompt", "plain_ends"), [("import os", False), ("def f(x):\n    return", True)])
def test_replies_of_one_step_have_no_rate(prompt, plain_ends, tmp_path, capsys):
    """A window that ends a reply in its first step gave its tokens within microseconds of each other.

    The second prompt's reply is an end token alone.
    """
    log, prompts = tmp_path / "log.tsv", tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": prompt}))
    flags = [
        "-m",
        "demo-wedlm",
        "--backend",
        "numpy",
        "--spec-prompts",
        str(prompts),
        "--new-tokens",
        "2",
        "--log",
        str(log),
    ]
    assert main(["bench", *flags]) == 0
    out = capsys.readouterr().out
    rows = {row["decoder"]: row for row in csv.DictReader(log.open(), delimiter="\t")}
    short = [way for way, row in rows.items() if not row["decode_tps_median"]]
    assert short
    assert ("plain" in short) == plain_ends
    assert f"replies of one step, left out of tok/s: {', '.join(f'{way} 1' for way in short)}\n" in out
    for way in short:
        assert re.search(rf"\n{way} .* +- +- +(same|differ)", out)
        assert rows[way]["runs"] == "1"


def test_without_a_draft(files, capsys):
    assert bench(files, "--prompts", "1") == 0
    assert "lookup " in capsys.readouterr().out
    assert bench(files, "--budgets", "3") == 2
    assert "--budgets needs --draft" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--draft", "demo", "--budgets", "3,136"], "--budgets: '136' is not a whole number from 1 to 135"),
        (["--temperature", "-1"], "temperature is -1.0; it must be a finite number of at least 0"),
        (["--top-p", "2"], "top_p is 2.0; it must be"),
        (["--tree-topk", "4"], "--tree-topk needs --draft"),
        (["--note", "why"], "--note goes with --log FILE"),
        (["--verdict", "keep"], "--verdict goes with --log FILE"),
        (["--wedlm"], "--wedlm goes with --synthetic, not with --spec-prompts"),
        (["--runs", "2"], "--runs goes with a model alone or --synthetic or --synthetic --draft or"),
    ],
)
def test_refused_before_anything_is_measured(flags, message, files, monkeypatch, capsys):
    monkeypatch.setattr(bench_spec, "open_model", lambda *args, **kwargs: pytest.fail("a model was loaded"))
    assert bench(files, *flags) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "has no prompts"), ('{"text": "a"}', 'line 1 is not {"prompt": text}'), ('{"prompt": ""}', "line 1 is not")],
)
def test_prompt_files(text, message, files, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    assert bench((files[0], files[1], file)) == 2
    assert message in capsys.readouterr().err


def test_line_ends_within_a_prompt(tmp_path):
    """JSON writes U+0085 and U+2028 as they are; the line was cut there, and refused."""
    prompts = ["a\u2028b", "c\x85d"]
    file = tmp_path / "prompts.jsonl"
    text = "\r\n".join(json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts)
    file.write_text(text, encoding="utf-8", newline="")
    assert bench_spec.read_prompts(str(file), 9) == prompts


def test_prompt_files_that_cannot_be_read(tmp_path):
    """The system's error repeated the name, beside its number."""
    file = tmp_path / "prompts.jsonl"
    with pytest.raises(UsageError, match=r"jsonl cannot be read as a prompt file: No such file or directory$"):
        bench_spec.read_prompts(str(file), 9)
    file.write_bytes(b"{}\n\xff")
    with pytest.raises(UsageError, match=r"jsonl cannot be read as a prompt file: it is not UTF-8 at byte 3$"):
        bench_spec.read_prompts(str(file), 9)


def test_a_synthetic_pair(monkeypatch, capsys):
    """A synthetic pair of shapes small enough for the NumPy backend."""
    small = {
        "general.architecture": "qwen3",
        "qwen3.vocab_size": 256,
        "qwen3.embedding_length": 64,
        "qwen3.block_count": 8,
        "qwen3.attention.head_count": 2,
        "qwen3.attention.head_count_kv": 1,
        "qwen3.attention.key_length": 32,
        "qwen3.feed_forward_length": 64,
        "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen3.context_length": 512,
    }
    monkeypatch.setitem(synthetic.METADATA, "small", small)
    sizes = {"feed_forward_length": 64, "attention.head_count": 2, "attention.head_count_kv": 1}
    for key, size in sizes.items():
        monkeypatch.setitem(synthetic_draft.METADATA, f"dflash.{key}", size)
    flags = ["--synthetic", "small:q8_0", "--draft", "synthetic", "--backend", "numpy", "--budgets", "7", "--runs", "1"]
    assert main(["bench", *flags, "--contexts", "40"]) == 0
    out = capsys.readouterr().out
    assert "with a draft of 5 layers" in out
    assert out.splitlines()[-1].split()[0] == "7"
