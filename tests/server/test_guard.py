"""Who may call, what is refused when, what the log says, and what happens when a client or the server leaves."""

import asyncio
import contextlib
import gzip
import importlib
import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from asgi import call
from conftest import client_of
from serving import serving
from tiny_chat import write as write_model

import generate
from common.errors import UsageError
from common.hub import find_model
from generate.cli import parse

USER = {"messages": [{"role": "user", "content": "Hello?"}]}
BODY = json.dumps(USER).encode()
CHAT = "/v1/chat/completions"


@pytest.fixture
def policy():
    pytest.importorskip("starlette", reason="the server extra is not installed")
    from generate.server.guard import Policy, digest

    return Policy([digest("first-key"), digest("second-key")], ("my.host",), ("https://page.example",))


def test_keys(scripted, policy):
    log = io.StringIO()
    client = client_of(scripted.llm, "scripted", policy, log=log)
    wrong = {"authorization": "Bearer wrong", "x-api-key": "wrong"}
    for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": ""}, {"authorization": "first-key"}, wrong):
        for path, envelope in (
            (CHAT, "error"),
            ("/v1/messages", "type"),
            ("/api/chat", "error"),
            ("/metrics", "error"),
        ):
            response = client.post(path, json=USER, headers=headers)
            assert response.status_code == 401
            assert envelope in response.json()
    right = {"authorization": "Bearer second-key"}, {"x-api-key": "first-key"}
    beside = [right[0] | {"x-api-key": "wrong"}, right[1] | {"authorization": "Bearer wrong"}]
    for headers in (*right, *beside):
        assert client.post(CHAT, json=USER, headers=headers).status_code == 200
    assert client.get("/health").status_code == 200
    written = log.getvalue()
    assert "status=401" in written
    assert not re.search("first-key|second-key|wrong|Hello", written)


def test_keys_come_from_flag_file_and_environment(tmp_path):
    pytest.importorskip("starlette", reason="the server extra is not installed")
    from common.errors import BimetalError
    from generate.server.guard import digest, keys_of

    file = tmp_path / "keys"
    file.write_text("# ours\none\n\ntwo \n")
    assert keys_of(["zero"], str(file), "three") == [digest(key) for key in ("zero", "three", "one", "two")]
    file.write_text("# none\n")
    with pytest.raises(BimetalError, match="holds no API key"):
        keys_of([], str(file), None)
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo")  # as editors on Windows write it
    assert keys_of([], str(file), " three\n") == [digest(key) for key in ("three", "one", "two")]
    assert keys_of([], None, " \n") == []
    for text in ("one\nschlüssel", "one\na b", "one\na\0"):  # which no client could send as it stands
        file.write_text(text, encoding="utf-8")
        with pytest.raises(BimetalError, match=r"line 2 of .* has characters other than printable ASCII") as refused:
            keys_of([], str(file), None)
        assert text[4:] not in str(refused.value)
        with pytest.raises(BimetalError, match="the environment has characters other than printable ASCII"):
            keys_of([], None, text)


def test_refusals_have_the_headers_of_their_status(scripted, policy):
    locked = client_of(scripted.llm, "scripted", policy)
    assert locked.get("/v1/models").headers["www-authenticate"] == "Bearer"
    found = scripted.put("/v1/responses/x")
    assert (found.status_code, set(found.headers["allow"].split(", "))) == (405, {"GET", "HEAD", "DELETE"})
    assert scripted.get(CHAT).headers["allow"] == "POST"
    for accept in ("text/html", "*/*"):
        assert scripted.get("/", headers={"accept": accept}).headers["vary"] == "accept"


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/api/chat", "/tokenize", "/v1/responses"])
@pytest.mark.parametrize("coding", ["gzip", "identity, ZSTD", "br"])
def test_compressed_bodies_are_refused(scripted, path, coding):
    found = scripted.post(path, content=gzip.compress(BODY), headers={"content-encoding": coding})
    assert found.status_code == 415
    assert repr(coding) in json.dumps(found.json())
    assert "error" in found.json()


def address_of(url):
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def test_a_body_has_one_length(scripted):
    """Of two lengths a proxy before the server may read the other one, and take the rest for another request."""
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"
    chunk = f"{len(BODY):x}\r\n".encode() + BODY + b"\r\n0\r\n\r\n"
    with serving(scripted.app) as url:
        answer = exchanged(url, head.encode() + chunk)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"it must have one of them" in answer
    assert scripted.llm.prompts == []


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8080", 200),
        ("localhost.:8080", 200),
        ("LOCALHOST", 200),
        ("My.Host.", 200),
        ("127.0.0.1", 200),
        ("[::1]:8080", 200),
        ("192.168.1.7:8080", 200),
        ("my.host", 200),
        ("app.localhost", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("", 403),
        ("[::1", 403),
    ],
)
def test_hosts(scripted, policy, host, status):
    client = client_of(scripted.llm, "scripted", policy)
    assert client.get("/health", headers={"host": host}).status_code == status


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost", 200),
        ("https://page.example", 200),
        ("null", 403),
        ("http://localhost:3000", 403),
        ("https://evil.example", 403),
        ("file://localhost", 403),
        ("http://localhost.evil.example", 403),
    ],
)
def test_origins(scripted, policy, origin, status):
    client = client_of(scripted.llm, "scripted", policy)
    headers = {"origin": origin, "authorization": "Bearer first-key"}
    response = client.post(CHAT, json=USER, headers=headers)
    assert response.status_code == status
    assert response.headers.get("access-control-allow-origin") == (origin if status == 200 else None)
    asked = {"origin": origin, "access-control-request-headers": "x-stainless-os"}
    preflight = client.options(CHAT, headers=asked)
    assert preflight.status_code == (204 if status == 200 else 403)
    if status == 200:
        assert preflight.headers["access-control-allow-headers"] == "x-stainless-os"


def test_hosts_and_origins_are_compared_as_clients_send_them(scripted):
    from generate.server.serve import policy_of

    flags = ["--allow-host", "My.Host.", "--cors-origin", "https://Page.example/", "--api-key", "k"]
    client = client_of(scripted.llm, "scripted", policy_of(parse(["serve", *flags])))
    headers = {"host": "my.host", "origin": "https://page.example"}
    answer = client.get("/health", headers=headers)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://page.example")
    assert client.get("/health", headers={**headers, "origin": "https://other.example"}).status_code == 403


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        *(("--allow-host", text) for text in ("", "my.host:8080", "http://my.host", "a b", "m\xfcller.example")),
        *(
            ("--cors-origin", text)
            for text in ("", "page.example", "https://page.example/chat", "https://", "https://*x")
        ),
    ],
)
def test_hosts_and_origins_that_no_client_sends_are_refused(flag, text):
    with pytest.raises(UsageError, match=f"argument {flag}: .* must be "):
        parse(["serve", f"{flag}={text}"])
    for origin in (
        "*",
        "null",
        "http://localhost:3000",
        "http://[::1]:3000",
        "app://obsidian.md",
        "vscode-webview://a-1",
    ):
        assert parse(["serve", "--cors-origin", origin]).cors_origin == [origin]


def test_listening_beyond_this_machine_needs_a_key(monkeypatch):
    pytest.importorskip("uvicorn", reason="the server extra is not installed")
    from generate.server.serve import policy_of

    monkeypatch.delenv("BIMETAL_API_KEY", raising=False)
    for host in ("0.0.0.0", "::", "192.168.1.7", "my.host"):
        with pytest.raises(UsageError, match="reached from other machines"):
            policy_of(parse(["serve", "--host", host]))
        policy_of(parse(["serve", "--host", host, "--insecure"]))
        assert policy_of(parse(["serve", "--host", host, "--api-key", "k"])).keys
    for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"):
        assert not policy_of(parse(["serve", "--host", host])).keys
    monkeypatch.setenv("BIMETAL_API_KEY", "k")
    assert policy_of(parse(["serve", "--host", "0.0.0.0"])).keys


def test_a_server_that_loads_is_full_or_ends_refuses_for_a_while(scripted):
    service = scripted.service
    service.max_requests = 0
    full = scripted.post(CHAT, json=USER)
    service.max_requests, service.draining = 64, True
    draining = scripted.post("/v1/messages", json={**USER, "max_tokens": 5})
    health = scripted.get("/health")
    service.draining, service._facts, service._llm = False, None, None
    loading = [
        scripted.post(CHAT, json=USER),
        scripted.get("/health"),
        scripted.get("/v1/models"),
        scripted.get("/metrics"),
    ]
    for response in (full, draining, health, *loading):
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
    assert service.metrics.counters["admission_rejections"] == 1
    assert draining.json()["error"]["type"] == "overloaded_error"
    assert loading[0].json()["error"]["message"] == "Loading model"


def test_unknown_routes_and_methods(scripted):
    assert scripted.get("/v2/chat").json()["error"]["type"] == "not_found_error"
    assert scripted.get("/v2/chat").status_code == 404
    assert scripted.get(CHAT).status_code == 405
    assert scripted.get("/api/chat").json()["error"].startswith("GET /api/chat is not a route")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/v1/audio/speech", "audio is not supported"),
        ("/api/copy", "one model is served, which requests do not change"),
        ("/v1/batches", "python -m generate batch answers a file of OpenAI requests"),
        ("/v1//chat/completions", "it is written /v1/chat/completions"),
        ("/v1/chat/completions/", "it is written /v1/chat/completions"),
    ],
)
def test_what_clients_of_other_servers_ask_for(scripted, path, why):
    response = scripted.post(path, json=USER)
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error if isinstance(error, str) else error["message"]) == f"POST {path} is not a route here; {why}"


def test_a_long_body_is_refused_before_it_is_read(scripted):
    response = scripted.post(CHAT, content=b"{}", headers={"content-length": str(1 << 40)})
    assert response.status_code == 413
    wide = json.dumps({"messages": [0] * (1 << 20)}).encode()
    assert scripted.post(CHAT, content=wide).status_code == 413


@pytest.mark.parametrize("part", [b"a" * 1000, b": b\r\nc"])
def test_headers_that_do_not_end_are_refused(scripted, part):
    """One that is long, and many of them."""
    with serving(scripted.app) as url, socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as asked:
        asked.settimeout(20)
        asked.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 1 << 22:
                asked.sendall(part * (4096 // len(part)))
                sent += 4096
        assert sent < 1 << 22


def exchanged(url, *parts):
    """Everything that a server sends to a client that sends `parts`, until it closes the connection."""
    with socket.create_connection(address_of(url), timeout=10) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(0.05)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


HEAD = b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\n"


def test_what_is_not_http_is_refused_in_json(scripted):
    with serving(scripted.app) as url:
        for sent in (b"G@T / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" * 99, b"GET / HTTP/1.1\r\n\r\n"):
            head, _, body = exchanged(url, sent).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ")
            assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_broken_body_after_its_refusal_ends_the_connection(scripted, policy, caplog):
    """The answer has been sent when the rest of the request turns out not to be HTTP."""
    app = client_of(scripted.llm, "scripted", policy).app
    with serving(app) as url:
        answer = exchanged(url, HEAD + b"transfer-encoding: chunked\r\n\r\n", b"no number\r\n")
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert [record for record in caplog.records if record.exc_info] == []


def test_clients_that_send_no_whole_request_are_sent_away(scripted, monkeypatch):
    monkeypatch.setattr("generate.server.connection.PATIENCE", 0.15)
    scripted.llm.pause = 0.12  # a reply may take longer
    asked = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with serving(scripted.app) as url:
        assert exchanged(url) == exchanged(url, HEAD, b"x: y\r\n") == b""
        assert exchanged(url, asked, HEAD).count(b"HTTP/1.1 200 ") == 1
        late = exchanged(url, HEAD + b"content-length: 99\r\n\r\n", b"{", b" ")
        assert late.startswith(b"HTTP/1.1 408 ")
        assert json.loads(late.partition(b"\r\n\r\n")[2])["error"]["message"].startswith("nothing of the request's")
        length = b"connection: close\r\ncontent-length: 15\r\n\r\n"
        assert b'"status":"completed"' in exchanged(url, HEAD + length + b'{"input": "Hi"}')


@pytest.mark.parametrize("whole", [False, True])
def test_a_connection_whose_client_reads_nothing_ends(monkeypatch, whole):
    """With an answer that was written, and with one that has been given up."""
    pytest.importorskip("uvicorn", reason="the server extra is not installed")
    from generate.server import connection

    ended, lost = threading.Event(), connection.Connection.connection_lost

    def connection_lost(self, error):
        lost(self, error)
        ended.set()

    monkeypatch.setattr(connection, "PATIENCE", 0.15)
    monkeypatch.setattr(connection.Connection, "connection_lost", connection_lost)

    async def app(scope, receive, send):
        long = b"x" * (32 << 20)  # more than the buffers of sockets hold
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": long, "more_body": not whole})

    with serving(app) as url, socket.create_connection(address_of(url)) as asked:
        asked.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert ended.wait(10)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_reply_within_a_step(scripted, stream):
    model, app = scripted.llm, scripted.app
    model.text, model.cut, model.pause = "x" * 4000, 1, 0.001

    async def run():
        left = asyncio.Event()
        body = json.dumps(USER | {"stream": stream}).encode()
        answer = await call(app, "POST", CHAT, body, left=left)
        while model.steps < 5:
            await asyncio.sleep(0.001)
        left.set()
        await answer.task
        return model.steps

    steps = asyncio.run(run())
    assert (model.running, scripted.service.running) == (0, 0)
    assert model.steps == steps < 4000
    assert "status=499" in scripted.log.getvalue()
    assert scripted.service.metrics.finished == {"abort": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_a_prefill(demo, stream):
    """A prompt of many steps: the engine has dropped it before it has read the half."""
    client = client_of(demo)
    steps = []
    run = demo._engine.model.ops.run

    def counted(fn, state, step, *rest):
        steps.append(len(step) if step.hidden is None else 0)  # of which a part may be computed
        return run(fn, state, step, *rest)

    async def leaves():
        left = asyncio.Event()
        ids = [5 + at % 1000 for at in range(4000)]
        body = json.dumps({"prompt": ids, "stream": stream, "max_tokens": 50}).encode()
        answer = await call(client.app, "POST", "/v1/completions", body, left=left)
        while not steps:
            await asyncio.sleep(0.001)
        left.set()
        await answer.task
        while demo._engine.running or demo._engine.waiting:
            await asyncio.sleep(0.001)

    demo._engine.model.ops.run = counted
    try:
        asyncio.run(leaves())
    finally:
        del demo._engine.model.ops.run
    assert sum(steps) < 4000
    assert client.service.running == 0


def test_a_silent_stream_gets_signs_of_life(scripted, monkeypatch):
    from generate.server import sending

    monkeypatch.setattr(sending, "HEARTBEAT", 0.02)
    scripted.llm.pause = 0.06
    assert ": waiting\n\n" in scripted.post(CHAT, json={**USER, "stream": True}).text
    messages = scripted.post("/v1/messages", json={**USER, "max_tokens": 9, "stream": True}).text
    assert "event: ping\n" in messages
    lines = scripted.post("/api/chat", json=USER).text.splitlines()
    texts = [json.loads(line)["message"]["content"] for line in lines]
    assert texts[0] == ""
    assert [text for text in texts if text] == ["He", "ll", "o"]


def test_a_sign_of_life_comes_as_soon_as_it_is_due(monkeypatch):
    """Counted from the last part of the stream, and not from its beginning."""
    from generate.server import sending

    monkeypatch.setattr(sending, "HEARTBEAT", 0.5)
    times = []

    async def send(message):
        times.append(time.monotonic())

    async def run():
        async with sending.sending(send, "text/event-stream", lambda: b": waiting\n\n") as write:
            await asyncio.sleep(0.3)
            await write(b"data: Hello\n\n")
            await asyncio.sleep(0.75)

    asyncio.run(run())
    _, part, sign, *_ = times
    assert 0.49 < sign - part < 0.65


def test_a_head_that_is_sent_as_its_client_leaves():
    """Both in one turn of the event loop: nothing fails there."""
    from generate.server.sending import later

    faults = []

    async def wait(sent):
        with later(0, sent.wait) as done:
            await done

    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda loop, fault: faults.append(fault))
        waiting = asyncio.ensure_future(wait(sent := asyncio.Event()))
        await asyncio.sleep(0.05)
        sent.set()
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])

    asyncio.run(run())
    assert faults == []


@pytest.mark.parametrize("pause", [0.0, 0.06])
def test_a_client_that_reads_nothing_counts_as_gone(scripted, monkeypatch, pause):
    """From the first part on, and from the keep-alive that follows it."""
    from generate.server import sending

    monkeypatch.setattr(sending, "HEARTBEAT", 0.02)
    monkeypatch.setattr(sending, "STALLED", 0.05)
    model = scripted.llm
    model.text, model.cut, model.pause = "x" * 4000, 1, pause
    body = json.dumps(USER | {"stream": True}).encode()

    async def run():
        never = asyncio.Event()

        async def send(message):
            data = message.get("body")
            if data and not (pause and b'"role"' in data):
                await never.wait()

        asked = await call(scripted.app, "POST", CHAT, body, left=asyncio.Event(), reads=send)
        await asyncio.wait_for(asked.task, 10)

    asyncio.run(run())
    assert (model.running, scripted.service.running) == (0, 0)
    assert "status=499" in scripted.log.getvalue()


def test_a_client_that_reads_nothing_has_one_line(scripted, monkeypatch):
    """The HTTP server adds none of its own: the line of the request says that the client is gone."""
    from generate.server import sending
    from generate.server.log import Log, forwarding

    monkeypatch.setattr(sending, "HEARTBEAT", 0.05)
    monkeypatch.setattr(sending, "STALLED", 0.2)
    scripted.llm.text, scripted.llm.cut = "x" * (1 << 24), 1 << 20
    body = json.dumps(USER | {"stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    libraries = io.StringIO()
    with (
        forwarding(Log(stream=libraries)),
        serving(scripted.app) as url,
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client,
    ):
        client.sendall(head + body)
        ends = time.monotonic() + 20
        while "status=499" not in scripted.log.getvalue() and time.monotonic() < ends:
            time.sleep(0.02)
    assert "status=499" in scripted.log.getvalue()
    assert scripted.log.getvalue().count("\n") == 1
    assert libraries.getvalue() == ""


def test_a_path_does_not_forge_a_line_of_the_log(scripted):
    paths = {"/a%0aforged": r'path="/a\nforged"', "/a%20status=200": 'path="/a status=200"', "/%22": r'path="/\""'}
    for path, shown in {**paths, "/plain": "path=/plain", "/a%1b%e2%80%a8": r'path="/a\u001b\u2028"'}.items():
        assert scripted.get(path).status_code == 404
        *_, line, end = scripted.log.getvalue().split("\n")
        assert f" {shown} status=404 " in line
        assert end == ""
    assert len(scripted.log.getvalue().splitlines()) == 5


def test_the_log_as_json(scripted):
    from generate.server.log import Log

    stream = io.StringIO()
    scripted.app.log = Log(as_json=True, stream=stream)
    scripted.post(CHAT, json=USER)
    asyncio.run(call(scripted.app, "GET", "/a\x1b[31m"))
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["path"], first["status"], first["new"]) == (CHAT, 200, 5)
    assert second["status"] == 404
    assert "\x1b" not in stream.getvalue()


def test_a_fault_of_ours_names_its_place_and_nothing_else(scripted):
    def fail(messages, **options):
        raise RuntimeError("Hello? is a secret")

    scripted.llm.prepare_chat = fail
    response = scripted.post(CHAT, json=USER)
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    written = scripted.log.getvalue()
    assert "RuntimeError at test_guard.py" in written
    assert "secret" not in written + response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/api/chat", "/v1/responses"])
def test_a_fault_of_the_engine_names_its_place_and_nothing_else(scripted, path, stream):
    scripted.llm.error = ZeroDivisionError("Hello? is a secret")
    body = {**USER, "max_tokens": 9, "input": "Hello?", "stream": stream}
    response = scripted.post(path, json=body)
    assert response.status_code == (200 if stream else 500)
    [line] = scripted.log.getvalue().splitlines()
    assert ' error=ZeroDivisionError at="ZeroDivisionError at scripted.py' in line
    assert "secret" not in line + response.text


def test_a_refusal_within_a_stream_is_in_the_log(scripted, monkeypatch):
    from common.schedule import BusyError
    from generate.server import sending

    scripted.llm.error = BusyError("Hello? is a secret")
    scripted.post(CHAT, json={**USER, "stream": True})
    monkeypatch.setattr(sending, "HEARTBEAT", 0.0)
    scripted.post(CHAT, json={"messages": [{"role": "user", "content": "a" * 9999}], "stream": True})
    busy, late = scripted.log.getvalue().splitlines()
    assert " status=200 " in busy
    assert busy.endswith(" error=BusyError")
    assert " status=200 " in late
    assert late.endswith(" error=context_length_exceeded")


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/api/chat", "/v1/responses"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_full_queue_refuses_a_stream_before_it_begins(scripted, path, n):
    from common.schedule import BusyError

    def refuse(prompt, **options):
        raise BusyError("2 calls wait")

    scripted.llm.astream_prepared = refuse
    response = scripted.post(path, json={**USER, "max_tokens": 9, "input": "Hello?", "stream": True, "n": n})
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert "2 calls wait" in str(response.json()["error"])
    assert scripted.service.running == 0


def test_libraries_write_to_the_log(scripted, capfd):
    """What the HTTP server and the event loop warn of has the log's form, and no message of an exception."""
    from generate.server.log import Log, forwarding

    stream = io.StringIO()
    with forwarding(Log(as_json=True, stream=stream)):
        with serving(scripted.app) as url:
            exchanged(url, b"G@T / HTTP/1.1\r\n\r\n")
        try:
            raise RuntimeError("secret")
        except RuntimeError:
            logging.getLogger("asyncio").exception("a task\nsecret")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["event"], first["source"]) == ("warning", "uvicorn.error")
    assert (second["event"], second["message"]) == ("error", "a task")
    assert second["at"].startswith("RuntimeError at test_guard.py")
    assert "secret" not in stream.getvalue() + "".join(capfd.readouterr())
    assert logging.getLogger("asyncio").propagate


@pytest.mark.long
def test_many_clients_are_served_in_order(demo):
    """24 clients on 8 slots: each gets the text that it gets alone."""
    client = client_of(demo, most=24)
    prompts = [f"def f{at}(x):" for at in range(24)]

    async def run():
        bodies = [json.dumps({"prompt": p, "max_tokens": 6, "temperature": 0}).encode() for p in prompts]
        return await asyncio.gather(*(call(client.app, "POST", "/v1/completions", body) for body in bodies))

    answers = asyncio.run(run())
    texts = [answer.json["choices"][0]["text"] for answer in answers]
    assert texts == [demo.generate(prompt, max_tokens=6, temperature=0).text for prompt in prompts]


def test_figures_of_a_model_that_works(demo):
    client = client_of(demo)

    async def run():
        left = asyncio.Event()
        body = json.dumps({"prompt": "def f(x):", "max_tokens": 400, "n": 3, "stream": True}).encode()
        answer = await call(client.app, "POST", "/v1/completions", body, left=left)
        while not demo.activity.context_share:
            await asyncio.sleep(0.005)
        seen = demo.activity, client.service.metrics_text(), client.service.slots_list()
        left.set()
        await answer.task
        while demo.activity.running:
            await asyncio.sleep(0.005)
        return seen

    now, text, slots = asyncio.run(run())
    assert 1 <= now.running <= 3
    assert now.running + now.waiting <= 3
    assert 0 < now.context_share < 1
    assert "bimetal:kv_cache_usage_perc{" in text
    assert 1 <= sum(slot["is_processing"] for slot in slots) <= 3
    assert all(slot["is_processing"] or not slot["n_past"] for slot in slots)
    assert any(slot["n_past"] for slot in slots)


@pytest.mark.slow
def test_a_thousand_clients_on_64_slots(tmp_path):
    """Each text is that of a single run, and replies end in the order of the requests. Prints the waits."""
    count, slots, ended = 1000, 64, []
    with generate.load(write_model(tmp_path / "model"), backend="numpy", parallel=slots, queue=count) as llm:
        client = client_of(llm, "nonsense", most=count)
        prompts = [f"{at:04d} is a number" for at in range(count)]

        async def ask(prompt):
            started = time.perf_counter()
            body = json.dumps({"prompt": prompt, "max_tokens": 8, "temperature": 0}).encode()
            declared = {"content-length": str(len(body))}  # as clients do: threads overtake one another
            answer = await call(client.app, "POST", "/v1/completions", body, declared)
            ended.append(prompt)
            return answer.json["choices"][0]["text"], time.perf_counter() - started

        async def run():
            return await asyncio.gather(*map(ask, prompts))

        started = time.perf_counter()
        found = asyncio.run(run())
        seconds = time.perf_counter() - started
        waits = sorted(wait for _, wait in found)
        print(
            f"{count} clients: p50 {waits[count // 2]:.1f} s, p99 {waits[count * 99 // 100]:.1f} s of {seconds:.1f} s"
        )
        late = max(abs(ended.index(prompt) - at) for at, prompt in enumerate(prompts))
        print(f"at most {late} places from the order of the requests")
        assert late < 3 * slots  # those that run end together, and threads that parse overtake one another
        assert [text for text, _ in found] == [llm.generate(p, max_tokens=8, temperature=0).text for p in prompts]
        assert client.service.running == 0


@pytest.fixture
def process():
    """A server in a process of its own, its address, and its log when it has ended."""
    command = [sys.executable, "-m", "generate", "serve", "--port", "0", "--backend", "numpy", "--grace", "20"]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    made = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env, cwd=root)
    lines = []
    while "ready" not in (line := made.stderr.readline()):
        assert line, lines
        lines.append(line)
    made.url = re.search(r"http://\S+", "".join(lines))[0]
    yield made
    made.kill()
    made.wait()


@pytest.mark.parametrize("log_is_read", [True, False])
def test_sigterm_lets_replies_finish_and_refuses_new_ones(process, log_is_read):
    """A log that could not be written, as that of a terminal that was closed, cut the replies off."""
    pytest.importorskip("uvicorn", reason="the server extra is not installed")
    if not log_is_read:
        process.stderr.close()
    body = json.dumps({"prompt": "def f(x):", "max_tokens": 300, "stream": True, "temperature": 0}).encode()
    request = urllib.request.Request(f"{process.url}/v1/completions", body)
    with urllib.request.urlopen(request) as response:
        response.readline()
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(OSError, match=r"refused|503|reset"):
            urllib.request.urlopen(f"{process.url}/health", timeout=5)
        rest = response.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"length"' in rest or b'"finish_reason":"stop"' in rest
    assert process.wait(timeout=30) == 0
    assert not log_is_read or "draining" in process.stderr.read()


def test_what_cannot_be_served_ends_with_a_sentence(tmp_path, capsys):
    pytest.importorskip("uvicorn", reason="the server extra is not installed")
    from generate.__main__ import main

    for absent in (["nope"], [str(tmp_path / "none.gguf")], [str(tmp_path)], ["demo", "--draft", "nope"]):
        assert main(["serve", *absent, "--port", "0"]) == 1
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 1
    assert main(["serve", "--port", "0", "--tensor-parallel", "2"]) == 2
    assert main(["serve", "--host", "0.0.0.0"]) == 2
    assert main(["serve", "--host", "256.1.1.1", "--insecure"]) == 1
    err = capsys.readouterr().err
    assert err.count("error: ") == err.count("\n") == 8  # no line says that the server listens
    assert "Traceback" not in err
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --host or --port" in err
    assert threading.active_count() < 50


@pytest.mark.parametrize("options", [["--memory", "1MB"], ["--draft", "{draft}"]], ids=["memory", "draft"])
def test_what_only_the_loaded_model_shows_ends_with_a_sentence(tmp_path, capsys, options):
    """No line says that a server listens whose model cannot be loaded."""
    pytest.importorskip("uvicorn", reason="the server extra is not installed")
    from generate.__main__ import main

    given = [option.format(draft=find_model("demo")) for option in options]
    assert main(["serve", "--port", "0", "--backend", "numpy", *given]) == 1
    loading, failed, error = capsys.readouterr().err.splitlines()
    assert " loading url=http://127.0.0.1:" in loading
    assert " failed url=http://127.0.0.1:" in failed
    assert error.startswith("error: ")


def test_as_many_requests_wait_as_the_flag_says(monkeypatch):
    """The model's own queue has room for them, also in a replica."""
    pytest.importorskip("uvicorn", reason="the server extra is not installed")
    from generate.__main__ import main

    queues = []

    def load(model, options, window):
        queues.append(options.queue)
        raise UsageError("this is all that is asked for")

    monkeypatch.setattr("generate.server.serve.LLM", load)
    assert main(["serve", "--port", "0", "--max-queue", "600"]) == 2
    ray, config, serve = (ModuleType(name) for name in ("ray", "ray.serve.config", "ray.serve"))
    ray.serve, serve.config, config.RequestRouterConfig = serve, config, dict
    serve.ingress = lambda: lambda replica: replica
    serve.Application = object
    serve.get_replica_context = lambda: SimpleNamespace(replica_id=SimpleNamespace(unique_id="one"))
    for module in (ray, serve, config):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "generate.deploy", raising=False)
    deploy = importlib.import_module("generate.deploy")
    sys.modules.pop("generate.deploy")
    monkeypatch.setattr(deploy, "LLM", load)
    with pytest.raises(UsageError, match="this is all"):
        deploy.Replica(["--max-queue", "700"])
    assert queues == [600, 700]
