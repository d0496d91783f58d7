"""`launch`: what agents are started with, and what is refused before they are."""

import json
import os
import socket
import threading

import pytest
from serving import serving

from generate.__main__ import main
from generate.launch import CLIENTS


@pytest.fixture
def url(scripted):
    pytest.importorskip("uvicorn")
    with serving(scripted.app) as url:
        yield url


@pytest.mark.parametrize("client", CLIENTS)
def test_settings_name_the_server_and_its_model(client, url, capsys, monkeypatch):
    monkeypatch.delenv("BIMETAL_API_KEY", raising=False)
    assert main(["launch", client, "--url", url + "/", "--dry-run", "--", "exec", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    text = json.dumps(found)
    assert url in text
    assert "scripted" in text
    assert url + "//" not in text
    assert "4096" in text  # the context, at which agents compact a conversation
    assert found["arguments"][-2:] == ["exec", "--json"]
    assert "4096" in err  # the context is small for an agent


def test_the_client_takes_the_place_of_this_process(url, tmp_path, monkeypatch):
    program = tmp_path / "claude"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    seen = []
    monkeypatch.setattr(os, "execve", lambda *call: seen.append(call))
    main(["launch", "claude", "--url", url, "--", "--print", "hi"])
    [(path, arguments, environment)] = seen
    assert (path, arguments) == (str(program), ["claude", "--print", "hi"])
    assert environment["ANTHROPIC_BASE_URL"] == url
    assert environment["PATH"] == str(tmp_path)


def test_what_is_refused(url, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    for flags, code, said in (
        (["--url", url], 1, "codex is not installed"),
        (
            ["--url", "http://127.0.0.1:9"],
            1,
            "error: no server answers at http://127.0.0.1:9 (Connection refused); start one first: "
            "python -m generate serve --model MODEL\n",
        ),
        (["--url", "localhost"], 2, "must be a URL"),
        (["--url", "http://127.0.0.1:99999"], 2, "must be a URL"),
    ):
        assert main(["launch", "codex", *flags]) == code
        assert said in capsys.readouterr().err


def test_what_speaks_no_http_is_refused(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"220 mail.example.com ESMTP\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert main(["launch", "codex", "--url", url]) == 1
        answering.join()
    assert capsys.readouterr().err == f"error: the server at {url} lists no models as OpenAI's API does\n"
