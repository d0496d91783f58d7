"""`bench --serve`: what it measures of a server whose pauses and failures are known."""

import csv
import re
import threading
import time

import pytest
from serving import serving

from generate.__main__ import main
from generate.bench_serve import percentile


@pytest.fixture
def served(scripted):
    """The URL of a scripted server, and its model."""
    uvicorn = pytest.importorskip("uvicorn")
    server = uvicorn.Server(uvicorn.Config(scripted.app, port=0, log_config=None, ws="none", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    host, port = server.servers[0].sockets[0].getsockname()
    yield f"http://{host}:{port}", scripted.llm
    server.should_exit = True
    thread.join(10)


def test_counts_and_times(served, capsys):
    url, model = served
    model.text, model.cut, model.pause = "abcdefgh", 2, 0.02
    assert main(["bench", "--serve", url, "--requests", "6", "--concurrency", "3", "--new-tokens", "8"]) == 0
    out = capsys.readouterr().out
    assert "6 replies" in out
    assert "0 failed" in out
    first, gap = (float(line.split()[-3]) for line in out.splitlines() if line.startswith(("first", "between")))
    assert first >= 20
    assert gap >= 15
    assert [options["max_tokens"] for options in model.options] == [8] * 6
    assert len(set(model.prompts)) == 6  # no cache holds them


def test_requests_at_a_rate(served, capsys):
    url, _ = served
    assert main(["bench", "--serve", url, "--requests", "5", "--rate", "200"]) == 0
    assert "5 replies" in capsys.readouterr().out


def test_prompts_of_another_run_are_new(served):
    url, model = served
    for seed in ([], [], ["--seed", "3"], ["--seed", "3"]):
        assert main(["bench", "--serve", url, "--requests", "2", "--concurrency", "1", *seed]) == 0
    first, second, third, again = (model.prompts[i : i + 2] for i in range(0, 8, 2))
    assert not set(first) & set(second)
    assert third == again


def lengths_of(model):
    """The tokens of each prompt's text, without the template's."""
    texts = [prompt.split("user\n")[1].split("<|im_end|>")[0] for prompt in model.prompts]
    return [len(model.tokenizer.encode(text, add_special_tokens=False)) for text in texts]


def test_prompts_have_the_requested_tokens(served, capsys, monkeypatch):
    """They had as many words: three times the tokens of this model."""
    url, model = served
    assert main(["bench", "--serve", url, "--requests", "3", "--prompt-tokens", "50", "--seed", "3"]) == 0
    assert ", 50 prompt tokens, " in capsys.readouterr().out
    encode = model.tokenizer.encode
    monkeypatch.setattr(model.tokenizer, "encode", lambda text, *of, **more: encode(text[::7], *of, **more))
    assert main(["bench", "--serve", url, "--requests", "2", "--prompt-tokens", "50", "--seed", "3"]) == 0
    assert ", 50 prompt tokens, " in capsys.readouterr().out
    assert lengths_of(model)[3:] == [50, 50]
    monkeypatch.undo()
    assert lengths_of(model)[:3] == [50] * 3


def test_the_tokens_of_prompts_are_said_where_they_are_others(served, capsys, monkeypatch):
    url, model = served
    decode = model.tokenizer.decode
    monkeypatch.setattr(model.tokenizer, "decode", lambda ids: decode(ids[:-1]))
    assert main(["bench", "--serve", url, "--requests", "9", "--prompt-tokens", "50", "--seed", "1"]) == 0
    lengths = lengths_of(model)
    assert 50 not in lengths
    assert f", {min(lengths)} to {max(lengths)} prompt tokens, " in capsys.readouterr().out


@pytest.mark.parametrize("status", [404, 503])
def test_a_server_that_does_not_show_its_tokenizer(scripted, capsys, status, tmp_path):
    responses = pytest.importorskip("starlette.responses")

    async def app(scope, receive, send):
        other = (
            responses.JSONResponse({"error": "none"}, status) if scope["path"].endswith("tokenize") else scripted.app
        )
        await other(scope, receive, send)

    with serving(app) as url:
        flags = ["--requests", "2", "--prompt-tokens", "50", "--log", str(tmp_path / "rows.tsv")]
        assert main(["bench", "--serve", url, *flags]) == (0 if status == 404 else 1)
    out, err = capsys.readouterr()
    if status == 503:
        assert err == f"error: {url}/tokenize answered 503 Service Unavailable: none\n"
        return
    words = "has no /tokenize and /detokenize by which tokens are counted; --prompt-tokens 50 counts words"
    assert err == f"{url} {words}\n"
    assert ", 50 prompt words, " in out
    [row] = csv.DictReader((tmp_path / "rows.tsv").open(), delimiter="\t")
    assert row["prompt_tokens"] == ""
    assert row["note"].endswith("; 50 prompt words")


def test_failures_are_counted(served, capsys):
    url, model = served
    model.error = RuntimeError("broken")
    assert main(["bench", "--serve", url, "--requests", "2"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.startswith("2 failed: "), "nan" in err) == ("", True, False)
    assert err.endswith(f"\nerror: {url} answered none of the requests, 2 in all\n")
    assert main(["bench", "--serve", url.replace("http", "ftp")]) == 2
    assert "must be a URL" in capsys.readouterr().err
    assert main(["bench", "--serve", "http://127.0.0.1:9", "--requests", "10000"]) == 1
    assert re.fullmatch(r"error: no server answers at http://127.0.0.1:9: .*\n", capsys.readouterr().err)
    assert main(["bench", "--serve", url, "--requests", "1", "--prompt-tokens", "9000"]) == 1
    assert "1 failed: the server answered 400 Bad Request: prompt is too long: " in capsys.readouterr().err
    assert main(["bench", "--requests", "3"]) == 2
    assert "--requests goes with --serve" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--kv", "q8"],
        ["--cache-type-k", "q8_0"],
        ["--kv-sinks", "4"],
        ["--backend", "numpy"],
        ["--devices", "0"],
        ["--memory", "1GB"],
    ],
)
def test_flags_of_a_model_that_runs_here_are_refused(flags, capsys):
    assert main(["bench", "--serve", "http://127.0.0.1:9", *flags]) == 2
    err = capsys.readouterr().err
    assert f"{flags[0]} goes with a model alone or --spec-prompts or" in err
    assert "not with --serve" in err


def test_a_rate_takes_the_place_of_a_number_at_a_time(capsys):
    assert main(["bench", "--serve", "http://127.0.0.1:9", "--rate", "3", "--concurrency", "2"]) == 2
    assert "--rate and --concurrency exclude each other" in capsys.readouterr().err


def test_percentiles():
    assert [percentile([3.0, 1.0, 2.0], p) for p in (0, 50, 99)] == [1.0, 2.0, 3.0]
