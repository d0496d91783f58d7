"""`python -m generate batch`: answers to a file of requests, and a stopped run that goes on where it was."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from tiny_chat import write

import generate
from generate import batch
from generate.__main__ import main

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def run(folder, tmp_path, capsys):
    """Run the command over lines of IN, which are left as they are without any; (exit code, stderr)."""

    def run(lines=None, *argv, model=folder):
        if lines is not None:
            (tmp_path / "in").write_text("".join(f"{each}\n" for each in lines))
        given = [str(tmp_path / "in"), str(tmp_path / "out"), "--model", model, "--backend", "numpy"]
        return main(["batch", *given, *argv]), capsys.readouterr().err

    return run


def answers(tmp_path):
    """The answers by custom_id."""
    found = [json.loads(line) for line in (tmp_path / "out").read_bytes().splitlines()]
    return {answer["custom_id"]: answer for answer in found}


def request(name, url=TEXT, method="POST", **body):
    return json.dumps({"custom_id": name, "method": method, "url": url, "body": body})


def text_of(answer):
    (choice,) = answer["response"]["body"]["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def test_each_form_of_a_request_gets_the_reply_of_the_api(run, folder, tmp_path):
    how = {"max_tokens": 12, "temperature": 0.8, "seed": 3}
    lines = [
        request("a", prompt="def f", **how),
        request("b", CHAT, messages=MESSAGES, model="any", max_completion_tokens=9),
        "",
        json.dumps({"prompt": "def f", "answer": 42} | how),
        json.dumps({"custom_id": "c", "messages": MESSAGES}),
    ]
    code, said = run(lines, "--max-tokens", "5", "--parallel", "2")
    assert (code, said.splitlines()[-1]) == (0, f"{tmp_path / 'out'}: 4 answers")
    found = answers(tmp_path)
    with generate.load(folder, backend="numpy") as llm:
        text = llm.generate("def f", **how).text
        assert [text_of(found[name]) for name in ("a", "line-4")] == [text, text]
        assert text_of(found["b"]) == llm.chat(MESSAGES, max_tokens=9).text
        assert text_of(found["c"]) == llm.chat(MESSAGES, max_tokens=5).text
    for answer in found.values():
        assert list(answer) == ["id", "custom_id", "response", "error"]
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["request_id"].startswith("req_")
    body = found["b"]["response"]["body"]
    assert (body["object"], body["usage"]["completion_tokens"]) == ("chat.completion", 9)


BAD = [
    ("nonsense", None, "invalid_json_line", "line 2 of the requests: it is not JSON"),
    ("[1]", None, "invalid_json_line", "it is not a JSON object"),
    ('{"prompt": "\\ud800"}', None, "invalid_json_line", "half a surrogate pair"),
    ('{"custom_id": "a"}', "a", "missing_required_parameter", "method is missing"),
    ('{"custom_id": 5, "prompt": "a"}', None, "invalid_request", "custom_id is 5"),
    (request("b", method="GET"), "b", "invalid_method", "method is 'GET'; it must be POST"),
    (request("c", "/v1/embeddings"), "c", "invalid_url", "it must be /v1/chat/completions or /v1/completions"),
    (request("d", prompt="a", temperature=-1), "d", 400, "temperature is -1"),
    (request("e", prompt="a", stream=True), "e", 400, "answers of a batch are written whole"),
    (request("f", prompt="a" * 999), "f", 400, "999"),
    (request("g", CHAT), "g", 400, "messages"),
]


def test_a_bad_line_gets_an_error_and_leaves_the_others_alone(run, tmp_path):
    good = request("good", prompt="a", max_tokens=2)
    code, said = run([good, *(line for line, *_ in BAD)])
    assert (code, said.splitlines()[-1]) == (1, f"error: {len(BAD)} of 12 answers in {tmp_path / 'out'} are errors")
    found = [json.loads(line) for line in (tmp_path / "out").read_bytes().splitlines()]
    found.sort(key=lambda answer: int(answer["id"].split("_")[2]))
    assert found.pop(0)["response"]["status_code"] == 200
    for at, (answer, (_, name, kind, words)) in enumerate(zip(found, BAD, strict=True)):
        assert answer["custom_id"] == (name or f"line-{at + 2}")
        if isinstance(kind, int):
            assert (answer["error"], answer["response"]["status_code"]) == (None, kind)
            assert words in answer["response"]["body"]["error"]["message"]
        else:
            assert (answer["response"], answer["error"]["code"]) == (None, kind)
            assert words in answer["error"]["message"]


def test_two_answers_have_no_name_in_common(run, tmp_path):
    """A request without a name is called by its line, and no other request may be."""
    unnamed = json.dumps({"prompt": "a", "max_tokens": 1})
    for first in (unnamed, "nonsense"):
        code, said = run(["", first, request("line-2", prompt="b", max_tokens=1)])
        assert (code, said.splitlines()[-1]) == (
            2,
            f"error: line 3 of {tmp_path / 'in'} has the custom_id 'line-2', by which the answer to line 2 is named, "
            "because that line has none; give another custom_id",
        )
        assert not (tmp_path / "out").read_bytes()
    names = ["line-2", "line-1", "line-9", "line-4"]
    assert run([request(name, prompt="a", max_tokens=1) for name in names] + [unnamed])[0] == 0
    assert sorted(answers(tmp_path)) == sorted([*names, "line-5"])


def test_two_requests_of_one_name_are_refused(run, tmp_path):
    """A program that looks answers up by name lost one of the two."""
    code, said = run(["", *(request(name, prompt="a", max_tokens=1) for name in ("é", "b", "é"))])
    assert (code, said.splitlines()[-1]) == (
        2,
        f"error: lines 2 and 4 of {tmp_path / 'in'} have one custom_id, 'é', by which their answers are named; give "
        "each another",
    )
    assert not (tmp_path / "out").read_bytes()


def test_a_line_that_is_too_long_is_not_held(run, tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "MOST_BYTES", 100)
    code, _ = run([json.dumps({"prompt": "a" * 1000}), json.dumps({"prompt": "a" * 50, "max_tokens": 2})])
    assert code == 1
    assert "more than 100 bytes" in answers(tmp_path)["line-1"]["error"]["message"]
    assert answers(tmp_path)["line-2"]["error"] is None


def test_a_run_goes_on_where_it_was(run, tmp_path):
    """Whole lines are kept as they are; a torn one and what is missing are answered; nothing is answered twice."""
    lines = [request(f"n{n}", prompt=f"def f{n}", max_tokens=4) for n in range(12)]
    assert run(lines)[0] == 0
    out, texts = tmp_path / "out", {name: text_of(answer) for name, answer in answers(tmp_path).items()}
    kept = out.read_bytes().splitlines(keepends=True)
    part = [kept[at] for at in (7, 0, 3)]
    out.write_bytes(b"".join(part) + kept[5][:-9])
    assert run()[0] == 0
    assert out.read_bytes().splitlines(keepends=True)[:3] == part
    assert {name: text_of(answer) for name, answer in answers(tmp_path).items()} == texts
    assert len(out.read_bytes().splitlines()) == 12
    assert run(model="/no/such/model")[0] == 0  # nothing is left, and nothing is loaded


@pytest.mark.long
def test_a_killed_run_goes_on(run, folder, tmp_path):
    lines = [request(f"n{n}", prompt="a" * (n % 9 + 1), max_tokens=40) for n in range(60)]
    (tmp_path / "in").write_text("".join(f"{each}\n" for each in lines))
    out = tmp_path / "out"
    argv = [sys.executable, "-m", "generate", "batch", tmp_path / "in", out, "--model", folder, "--backend", "numpy"]
    killed = subprocess.Popen([*argv, "--parallel", "2"], stderr=subprocess.DEVNULL)
    while not out.exists() or out.read_bytes().count(b"\n") < 3:
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    kept = out.read_bytes().count(b"\n")
    assert 3 <= kept < 60
    assert run()[0] == 0
    found = answers(tmp_path)
    assert len(found) == out.read_bytes().count(b"\n") == 60
    for n in range(9, 60):
        assert text_of(found[f"n{n}"]) == text_of(found[f"n{n % 9}"])


def test_an_output_that_is_not_of_these_requests_is_refused(run, tmp_path):
    out = tmp_path / "out"
    assert run([request("a", prompt="a", max_tokens=1)])[0] == 0
    code, said = run([request("b", prompt="b", max_tokens=1)])
    assert code == 2
    assert "answers to other requests" in said
    out.write_bytes(out.read_bytes() * 2)
    assert "or answers a request again" in run([request("a", prompt="a", max_tokens=1)])[1]
    out.write_text("notes\n")
    code, said = run()
    assert (code, out.read_text()) == (2, "notes\n")
    assert "line 1" in said
    out.unlink()
    out.symlink_to(tmp_path / "in")
    assert "has the requests" in run()[1]
    out.unlink()
    out.mkdir()
    assert "not a regular file" in run()[1]


def test_two_runs_do_not_write_to_one_output(run, tmp_path):
    with (tmp_path / "out").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code, said = run([request("a", prompt="a")])
    assert code == 1
    assert "another process" in said


def test_a_full_disk_names_the_output(run, tmp_path, monkeypatch):
    class Full:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __iter__(self):
            return iter(self.file)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def flush(self):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    opened = batch.opened
    monkeypatch.setattr(batch, "opened", lambda *paths: Full(opened(*paths)))
    code, err = run([json.dumps({"prompt": "a", "max_tokens": 2})])
    assert (code, err.splitlines()[-1]) == (1, f"error: {tmp_path / 'out'}: No space left on device")


def test_a_missing_input_leaves_no_output(run, tmp_path):
    code, said = run()
    assert code == 1
    assert "No such file" in said
    assert not os.path.exists(tmp_path / "out")


def test_few_requests_are_in_memory(run, tmp_path, monkeypatch):
    """Input is read as answers are written, a few times as many requests as run at once."""
    read, most = batch.read_requests, 0
    out = tmp_path / "out"

    def counted(path):
        nonlocal most
        for request in read(path):
            most = max(most, request.number - out.read_bytes().count(b"\n"))
            yield request

    lines = [request(f"n{n}", prompt="a", max_tokens=1) for n in range(40)]
    (tmp_path / "in").write_text("".join(f"{each}\n" for each in lines))
    monkeypatch.setattr(batch, "check_requests", lambda *_: 40)
    monkeypatch.setattr(batch, "read_requests", counted)
    assert run(None, "--parallel", "2")[0] == 0
    assert 2 < most <= 4 * 2


def test_windows_of_a_wedlm_model(run, tmp_path):
    line, forwards = json.dumps({"messages": [{"role": "user", "content": "Count by 2 from 11 to 19."}]}), []
    for preset in ("quality", "fast"):
        assert run([line], "--wedlm-preset", preset, model="demo-wedlm")[0] == 0
        forwards.append(answers(tmp_path)["line-1"]["response"]["body"]["timings"]["wedlm"]["forwards"])
        (tmp_path / "out").unlink()
    assert forwards[1] < forwards[0]


def test_a_window_is_left_out_of_replies_that_cannot_have_it(run, tmp_path):
    """Constrained and sampled requests were errors beside a flag of a window."""
    pytest.importorskip("llguidance", reason="the grammar extra is not installed")
    chat = {"messages": [{"role": "user", "content": "Count by 2 from 11 to 29."}], "max_tokens": 8}
    lines = [json.dumps(chat | more) for more in ({"response_format": {"type": "json_object"}}, {"temperature": 1})]
    for flags in (["--wedlm-preset", "checked"], ["--wedlm-verify"]):
        (tmp_path / "out").unlink(missing_ok=True)
        assert run(lines, *flags, model="demo-wedlm")[0] == 0
