"""Calibrating the windows of a WeDLM model: the figures, the file beside the model, and replies that take it."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import generate
from common import wedlm_calibration
from common.decode.calibrate import Point, best, cut_prompts, grid, measure
from common.decode.run import WedlmStats
from common.decoders import PRESETS, WedlmOptions
from common.demo import demo_path
from common.errors import BimetalError, UsageError
from common.models import load_model
from common.reference import NumpyOps
from generate.__main__ import main

sys.path.insert(0, str(Path(__file__).parents[1] / "examples/train"))
import wedlm_tasks

ENOUGH = ["--prompts", "4", "--new-tokens", "24", "--windows", "4,8", "--taus", "0.1,0.4", "--lambdas", "0.05"]

STORIES = [f"Question: Tell a story about {name}.\n" for name in wedlm_tasks.NAMES[:3]]  # whose words are drawn freely


@pytest.fixture
def model(tmp_path):
    return Path(shutil.copy(demo_path("demo-wedlm"), tmp_path / "small.gguf"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "questions.jsonl"
    texts = [*STORIES[:1], *(wedlm_tasks.held_out(task)[0][0] for task in wedlm_tasks.TASKS)]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return file


def test_agreement_is_with_plain_decoding():
    """Each token of a reply against the likeliest one at its place, after the tokens before it."""
    model = load_model(demo_path("demo-wedlm"), NumpyOps())
    with generate.load("demo-wedlm", backend="numpy") as llm:
        ids = [llm.tokenizer.encode(text) for text in (wedlm_tasks.held_out("code")[3][0], *STORIES)]
        options = WedlmOptions(16, 9.0, 0.0)
        (point,) = measure(model, ids, [options], 30, frozenset(llm.tokenizer.end_ids))
        same, sizes, nats = [], [], 0.0
        for prompt in ids:
            reply = llm.generate(prompt, max_tokens=30, wedlm_window=16, wedlm_tau=9, wedlm_lambda=0)
            tokens = [*reply.tokens, *([min(llm.tokenizer.end_ids)] if reply.finish_reason == "stop" else [])]
            rows = llm.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
            same.append(int((rows.argmax(-1) == tokens).sum()))
            logs = rows - np.log(np.exp(rows.astype(np.float64)).sum(-1, keepdims=True))
            nats -= logs[np.arange(len(tokens)), tokens].sum()
            sizes.append(len(tokens))
    assert len(llm.tokenizer.end_ids) == 1
    assert point.sizes == sizes
    assert point.agreeing == same
    assert point.nats == pytest.approx(nats, rel=1e-4)
    assert 0.2 < point.agreement < 1
    assert point.tokens_per_forward > 5


def test_a_mask_that_nobody_trained_disagrees():
    """Any other token in the mask's place fills windows as fast, with tokens that plain decoding would not choose."""
    model = load_model(demo_path("demo-wedlm"), NumpyOps())
    with generate.load("demo-wedlm", backend="numpy") as llm:
        ids = [llm.tokenizer.encode(question) for question, _ in wedlm_tasks.held_out("counting")[:2]]
    settings, ends = [WedlmOptions(8, 0.4, 0.05)], frozenset(llm.tokenizer.end_ids)
    (trained,) = measure(model, ids, settings, 24, ends)
    (control,) = measure(replace(model, config=replace(model.config, mask_id=40)), ids, settings, 24, ends)
    assert trained.agreement > 0.95
    assert control.agreement < 0.7
    assert control.nats_per_token > trained.nats_per_token + 0.5


def point(agreement, length, rows=100):
    count = 1000
    stats = WedlmStats(fills=count, rows=rows, tokens=round(length * count))
    return Point(WedlmOptions(), [round(agreement * count)], [count], stats=stats)


def test_the_best_point():
    points = [point(1.0, 2), point(0.985, 5), point(0.981, 5, 90), point(0.5, 9)]
    assert best(points, 0.02) is points[2]
    assert best(points, 0.0) is points[0]
    assert best(points[3:], 0.02) is None
    unused = Point(WedlmOptions(), [2], [2], stats=WedlmStats(tokens=2))  # whose reply ended before a forward
    assert best([unused, points[0]], 0.0) is points[0]
    assert best([unused], 0.0) is None
    assert point(0.5, 1).error == 0
    halves = Point(WedlmOptions(), [10, 0], [10, 10])
    assert (halves.agreement, halves.error) == (0.5, pytest.approx(0.5))


def test_the_grid_leaves_out_windows_without_effect():
    reach = grid([8, 16, 32], [0.4], [0.05])
    assert reach == [WedlmOptions(8, 0.4, 0.05)]
    assert [o.window for o in grid([8, 16, 32], [0.6], [0.05])] == [8, 16]
    assert grid([16, 8], [0.6], [0.0, 0.1]) == [
        WedlmOptions(8, 0.6, 0.0),
        WedlmOptions(8, 0.6, 0.1),
        WedlmOptions(16, 0.6, 0.0),
        WedlmOptions(16, 0.6, 0.0, sure=0.1),
    ]


def test_prompts_are_spread_over_the_text():
    assert cut_prompts(range(10), 2, 3) == [[0, 1], [4, 5], [8, 9]]
    assert cut_prompts(range(5), 5, 3) == [[0, 1, 2, 3, 4]]
    with pytest.raises(UsageError, match="the text has 4 tokens, and one prompt takes 5"):
        cut_prompts(range(4), 5, 3)


@pytest.mark.long
def test_the_command(model, prompts, capsys):
    command = ["calibrate", str(model), "--text", str(prompts), "--backend", "numpy", *ENOUGH, "--loss", "0.2"]
    assert main([*command, "--dry-run"]) == 0
    assert "would keep" in capsys.readouterr().out
    assert not wedlm_calibration.calibration_path(model).exists()
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "4 prompts" in out
    assert "tokens/forward" in out
    assert out.count("  <\n") == 1
    found = wedlm_calibration.read(model)
    assert found.text == "questions.jsonl"
    assert str(found) in out
    assert model.with_name("small.wedlm.json").is_file()
    assert not list(model.parent.glob("*.part"))
    assert main(["inspect", str(model)]) == 0
    assert str(found) in capsys.readouterr().out


@pytest.mark.long
def test_a_folder_of_a_gguf_file_keeps_it_where_replies_look(model, prompts, capsys):
    """It was kept in the folder's own wedlm.json, which is read for safetensors alone."""
    assert (
        main(["calibrate", str(model.parent), "--text", str(prompts), "--backend", "numpy", *ENOUGH, "--loss", "0.2"])
        == 0
    )
    assert str(model.with_name("small.wedlm.json")) in capsys.readouterr().out
    assert load_model(model.parent, NumpyOps()).window == wedlm_calibration.read(model).window


def test_a_window_that_never_ran_has_no_rate(model, prompts, capsys):
    """Two tokens of no forward at all were the best rate, and the tokens of one window were called those of all."""
    grid = ["--windows", "4,8", "--taus", "0.1,0.4", "--lambdas", "0.05", "--loss", "0.9"]
    command = ["calibrate", str(model), "--text", str(prompts), "--backend", "numpy", "--dry-run", *grid]
    assert main([*command, "--new-tokens", "1", "--prompts", "2"]) == 0
    out, _ = capsys.readouterr()
    assert "sure" not in out.splitlines()[-1]
    assert [line.removesuffix("  <").split()[-2] for line in out.splitlines()[2:-1]] == ["1.00", "1.00", "1.00", "-"]


def test_replies_take_it_and_flags_replace_it(model):
    kept = WedlmOptions(3, 0.0, 0.02)
    wedlm_calibration.write(model, wedlm_calibration.Calibration(kept, 1.0, 1.0, "text"))
    with generate.load(str(model), backend="numpy") as llm, generate.load("demo-wedlm", backend="numpy") as plain:
        question = wedlm_tasks.held_out("counting")[0][0]
        rows = {}
        for name, options in {
            "kept": {},
            "the same": {"wedlm_window": 3, "wedlm_tau": 0, "wedlm_lambda": 0.02},
            "balanced": {"wedlm_preset": "balanced"},
            "one flag": {"wedlm_tau": 1.0},
            "off": {"spec": "off"},
        }.items():
            stats = llm.generate(question, max_tokens=20, **options).stats.wedlm
            rows[name] = stats and (stats.rows, stats.fills)
        assert rows["kept"] == rows["the same"] != rows["balanced"]
        assert rows["one flag"] not in (rows["kept"], rows["balanced"])
        assert rows["off"] is None
        stats = plain.generate(question, max_tokens=20).stats.wedlm
        assert (stats.rows, stats.fills) == rows["balanced"]


@pytest.mark.long
def test_a_calibrated_window_confirms_with_greedy_decoding_alone(model):
    kept = WedlmOptions(16, 2.0, 0.0, sure=0.0)
    file = wedlm_calibration.write(model, wedlm_calibration.Calibration(kept, 1.0, 1.0, "text"))
    assert json.loads(file.read_text())["sure"] == 0.0
    assert wedlm_calibration.read(model).window == kept
    with generate.load(str(model), backend="numpy") as llm:
        story = STORIES[0]
        plain = llm.generate(story, max_tokens=30, spec="off")
        assert llm.generate(story, max_tokens=30).tokens == plain.tokens
        drawn = llm.generate(story, max_tokens=30, temperature=1.0, seed=1)
        flags = {"wedlm_window": 16, "wedlm_tau": 2.0, "wedlm_lambda": 0.0, "wedlm_preset": "balanced"}
        assert drawn.tokens == llm.generate(story, max_tokens=30, temperature=1.0, seed=1, **flags).tokens


def test_a_folder_keeps_it_inside_and_quantizing_leaves_it_behind(tmp_path):
    assert wedlm_calibration.calibration_path(tmp_path) == tmp_path / "wedlm.json"
    assert wedlm_calibration.window_beside(tmp_path) == PRESETS["balanced"]
    found = wedlm_calibration.Calibration(WedlmOptions(5, 0.3, 0.04), 0.99, 4.5, "a.txt")
    assert wedlm_calibration.read(wedlm_calibration.write(tmp_path, found).parent) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "wedlm.json"),
        ("{", "wedlm.json"),
        ('{"window": 8, "tau": 0.4}', "it has no 'lambda'"),
        ('{"window": 8.5, "tau": 0.4, "lambda": 0, "agreement": 1, "tokens_per_forward": 1}', "window is 8.5"),
        (
            '{"window": 8, "tau": 0, "lambda": 0, "sure": -1, "agreement": 1, "tokens_per_forward": 1}',
            "wedlm_sure is -1",
        ),
        ('{"window": 0, "tau": 0.4, "lambda": 0, "agreement": 1, "tokens_per_forward": 1}', "wedlm_window is 0"),
        ('{"window": 8, "tau": NaN, "lambda": 0, "agreement": 1, "tokens_per_forward": 1}', "wedlm.json"),
        ('{"window": 1e999, "tau": 1, "lambda": 0, "agreement": 1, "tokens_per_forward": 1}', "wedlm.json"),
    ],
)
def test_a_file_that_is_none(text, message, tmp_path):
    (tmp_path / "wedlm.json").write_text(text)
    with pytest.raises(BimetalError, match=message):
        wedlm_calibration.read(tmp_path)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--text", "EMPTY"], 2, "the text has 0 tokens, and one prompt takes 64"),
        (["--text", "BINARY"], 1, "is not UTF-8"),
        (["--text", "missing.txt"], 1, "No such file"),
        (["--text", "PROMPTS", "--loss", "nan"], 2, "--loss is nan"),
        (["--text", "PROMPTS", "--prompt-tokens", "8"], 2, "--prompt-tokens goes with a text that is cut into pieces"),
        (["--text", "PROMPTS", "--loss", "1"], 2, "--loss is 1.0"),
        (["--text", "PROMPTS", "--taus", "nan"], 2, "wedlm_tau is nan"),
        (["--text", "PROMPTS", "--windows", "69"], 2, "wedlm_window is 69"),
        (["--text", "PROMPTS", "--new-tokens", "5000"], 2, "or fewer --new-tokens"),
        (
            ["--text", "WORDS"],
            2,
            "take 128 tokens, and the model was trained for 96; give shorter prompts (of a text by",
        ),
        (
            ["--text", "PROMPTS", "--prompts", "1", "--windows", "16", "--taus", "9", "--lambdas", "0", "--loss", "0"],
            1,
            "no window keeps 100.0%",
        ),
    ],
)
def test_refusals(flags, code, message, model, prompts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("common.decode.calibrate.SURE", float("inf"))  # else one point agrees even on a story
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "words.txt").write_text("word " * 400)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    names = {
        "EMPTY": tmp_path / "empty.txt",
        "WORDS": tmp_path / "words.txt",
        "BINARY": tmp_path / "binary.txt",
        "PROMPTS": prompts,
    }
    flags = [str(names.get(flag, flag)) for flag in flags]
    assert main(["calibrate", str(model), "--backend", "numpy", *flags]) == code
    assert message in capsys.readouterr().err
    assert not wedlm_calibration.calibration_path(model).exists()


def test_a_folder_that_cannot_be_written_is_refused_first(model, prompts, capsys, monkeypatch):
    """After minutes, the calibration could not be kept."""

    def read_only(*_, **__):
        raise OSError(30, "Read-only file system", "/folder/part")

    monkeypatch.setattr("common.files.TemporaryFile", read_only)
    monkeypatch.setattr("generate.calibrate.open_model", lambda *_, **__: pytest.fail("a model was loaded"))
    assert main(["calibrate", str(model), "--text", str(prompts), "--backend", "numpy"]) == 1
    assert capsys.readouterr().err == f"error: {wedlm_calibration.calibration_path(model)}: Read-only file system\n"


def test_a_model_without_a_mask(tmp_path, prompts, capsys):
    assert main(["calibrate", "demo", "--text", str(prompts)]) == 2
    assert "has no mask token" in capsys.readouterr().err


def test_logits_that_are_not_numbers(monkeypatch):
    model = load_model(demo_path("demo-wedlm"), NumpyOps())
    forward = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda *args: forward(*args) * np.float32(np.nan))
    with pytest.raises(BimetalError, match="NaN"):
        measure(model, [[5, 6]], [WedlmOptions()], 4, frozenset())
