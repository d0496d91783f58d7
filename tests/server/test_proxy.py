"""A server that shortens prompts and lets another answer: what it sends on, and what it believes of the answers."""

import asyncio
import io
import json
import random
import time

import pytest
from asgi import call
from conftest import client_of
from scripted import Scripted
from serving import serving
from test_hostile import check, requests
from tiny_chat import write as write_model

import generate
from generate.__main__ import main

pytest.importorskip("uvicorn", reason="the server extra is not installed")

from generate.server import proxy
from generate.server.compression import Compression, Compressor
from generate.server.guard import Policy, key_of
from generate.server.log import Log
from generate.server.service import Service
from generate.server.upstream import Upstream

KEY, OWN = "sk-secret-of-the-upstream", "sk-of-the-client"
CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
SHORT = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]},
    OLLAMA: {"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
}


class Canned:
    """An ASGI application that answers everything with `status`, `headers` and `parts`, and keeps what it was sent.

    breaks  the connection ends in the middle of the answer
    """

    def __init__(self):
        self.reset()

    def reset(self):
        self.status, self.kind, self.more, self.parts, self.breaks = 200, "application/json", [], [b"{}"], False
        self.bodies, self.headers = [], {}

    async def __call__(self, scope, receive, send):
        body, message = b"", {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            body += message.get("body", b"")
        self.bodies.append(body)
        self.headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        headers = [(b"content-type", self.kind.encode()), *self.more]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        for part in self.parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if self.breaks:
            raise RuntimeError("broken on purpose")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    with generate.load(write_model(tmp_path_factory.mktemp("drafter") / "tiny"), backend="numpy", parallel=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def behind():
    """A canned server, and its address."""
    canned = Canned()
    with serving(canned) as url:
        yield canned, url


@pytest.fixture
def canned(behind):
    behind[0].reset()
    return behind[0]


@pytest.fixture
def between(behind, drafter):
    """Sends a request through a server to the canned one: the answer. Its `service` and `log` are attributes."""
    ask = made(behind[1], drafter)
    yield ask
    ask.close()


def made(url, drafter, **more):
    service, log = Service(8), io.StringIO()
    service.compressor = Compressor(drafter, Compression("tiny", ((1, 0.2),), 300))
    app = proxy.build(service, Upstream(url, KEY, **more), Policy(), Log(stream=log))

    def ask(path, body=None, method="POST", **headers):
        data = b"" if body is None else json.dumps(body).encode()
        return runner.run(call(app, method, path, data, headers))

    runner = asyncio.Runner()  # one event loop, to which kept connections belong
    ask.service, ask.log, ask.app, ask.run, ask.close = service, log, app, runner.run, runner.close
    return ask


def words(count):
    rng = random.Random(3)
    return " ".join("".join(rng.choices("abcdefghijklmnop", k=4)) for _ in range(count))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "system", "content": "S" * 99}, {"role": "user", "content": "TEXT"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "TEXT"}]}]}),
        ("/v1/completions", {"prompt": "TEXT"}),
        (RESPONSES, {"input": "TEXT", "instructions": "S" * 99}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "TEXT"}]}]}),
        (MESSAGES, {"system": "S" * 99, "messages": [{"role": "user", "content": "TEXT"}]}),
        (OLLAMA, {"messages": [{"role": "user", "content": "TEXT"}]}),
        ("/api/generate", {"prompt": "TEXT", "system": "S" * 99}),
    ],
)
@pytest.mark.few(3)
def test_long_texts_are_shortened(between, canned, path, body):
    text = words(100)
    given = json.loads(json.dumps(body).replace("TEXT", text))
    assert between(path, given).status == 200
    sent, rest = canned.bodies[-1].decode(), json.dumps(body)
    assert 0.1 * len(text) < len(sent) - len(rest) < 0.5 * len(text)
    assert rest.count("S" * 99) == sent.count("S" * 99)
    whole = {**given, "tools": [{"type": "function"}]}
    assert between(path, whole).status == 200
    assert json.loads(canned.bodies[-1]) == whole
    figures = between("/metrics", method="GET").body.decode()
    assert "bimetal:prefill_compression_dropped_tokens_total" in figures
    assert between.service.metrics.counters["prefill_compression_dropped_tokens"] > len(text) / 2


def test_a_conversation_whose_items_hold_tools_is_not_shortened(between, canned):
    held = {"type": "additional_tools", "tools": [{"type": "function", "name": "add"}]}
    given = {"input": [held, {"role": "user", "content": words(100)}]}
    assert between(RESPONSES, given).status == 200
    assert json.loads(canned.bodies[-1]) == given


def test_a_server_behind_answers_as_itself(tmp_path, drafter):
    behind = client_of(Scripted(tmp_path / "model", context=1 << 16), "scripted")
    with serving(behind.app) as url:
        ask = made(url, drafter, model="other")
        for path, body in SHORT.items():
            given = {**body, "stream": False}
            assert ask(path, given).json.keys() == behind.post(path, json=given).json().keys()
            given["stream"] = True
            assert len(ask(path, given).body) > 0.9 * len(behind.post(path, json=given).content)
        for path in ("/v1/models", "/models"):
            assert ask(path, method="GET").json["data"][0]["id"] == "scripted"
        assert ask(OLLAMA, {**SHORT[OLLAMA], "stream": False}).json["model"] == "other"


def test_every_route_of_a_prompt_and_of_the_models(tmp_path, drafter):
    """Those that clients of a server with a model use, also without the version."""
    behind = client_of(Scripted(tmp_path / "model", context=1 << 16), "scripted")
    with serving(behind.app) as url:
        ask = made(url, drafter)
        for path in (CHAT, RESPONSES):
            body = {**SHORT[path], "stream": False}
            assert ask(path.removeprefix("/v1"), body).json.keys() == behind.post(path, json=body).json().keys()
            count = behind.post(f"{path}/input_tokens", json=body).json()
            assert ask(f"{path}/input_tokens", body).json == count
        assert ask("/completions", {"prompt": "Hi"}).json["object"] == "text_completion"
        for name in ("scripted", "owner%2Fname", "owner/name?x=1", "a%20b"):
            assert ask(f"/v1/models/{name}", method="GET").json["id"] == "scripted"
    assert ask("/api/pull", {"model": "any"}).json == {"status": "success"}


def test_a_models_name_leads_to_no_other_path(between, canned):
    for name in (".", ".."):
        assert between(f"/v1/models/{name}", method="GET").status == 404
    assert canned.bodies == []
    paths = []

    def forward(path):
        async def answer(*_):
            paths.append(path)

        return answer

    for name in ("../../secret", "a?b#c", "\udcff"):
        asyncio.run(proxy.ForwardModel(forward)({"path_params": {"name": name}}, None, None))
    assert paths == ["/v1/models/..%2F..%2Fsecret", "/v1/models/a%3Fb%23c", "/v1/models/%3F"]


def test_keys(between, canned, capfd):
    between(CHAT, SHORT[CHAT], authorization=f"Bearer {OWN}", cookie=OWN)
    assert canned.headers["authorization"] == f"Bearer {KEY}"
    assert OWN not in str(canned.headers)
    canned.status, canned.parts = 400, [json.dumps({"error": {"message": f"bad key {KEY}", "code": "x"}}).encode()]
    answer = between(CHAT, SHORT[CHAT])
    assert answer.status == 400
    assert answer.json["error"]["message"] == "the upstream server answered 400: bad key …"
    said = between.log.getvalue() + "".join(capfd.readouterr()) + repr(Upstream("http://a", KEY))
    assert KEY not in said
    assert OWN not in said


@pytest.mark.parametrize("path", SHORT)
@pytest.mark.parametrize(
    ("status", "parts", "expected"),
    [
        (400, b'{"error": {"message": "too long", "code": "context_length_exceeded"}}', 400),
        (401, b"{}", 502),
        (422, b'{"detail": []}', 400),
        (429, b"[" * 5000, 429),
        (500, b"\xff", 502),
        (503, b'{"error": "busy"}', 503),
        (302, b"", 502),
        (204, b"", 502),
    ],
)
def test_refusals_in_the_dialect(between, canned, path, status, parts, expected):
    canned.status, canned.parts = status, [parts] if parts else []
    canned.more = [(b"location", b"http://127.0.0.1:1/")]
    answer = between(path, SHORT[path])
    assert answer.status == expected
    error = answer.json["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith("the upstream server")
    assert ("retry-after" in answer.headers) == (expected in (429, 503))
    assert (answer.json.get("type") == "error") == (path == MESSAGES)
    if expected == 400 and path in (CHAT, RESPONSES):
        assert error["code"] in ("context_length_exceeded", None)


@pytest.mark.parametrize(
    ("kind", "more", "parts"),
    [
        ("text/html", [], [b"<script>"]),
        ("application/json", [], [b"<html>"]),
        ("application/json", [], [b"[1]"]),
        ("application/json", [], [b'{"a": NaN}']),
        ("application/json", [(b"content-encoding", b"gzip")], [b"\x1f\x8b"]),
        ("application/json", [], [b" " * (1 << 20)] * 33),
    ],
)
def test_answers_that_are_refused(between, canned, kind, more, parts):
    canned.kind, canned.more, canned.parts = kind, more, parts
    answer = between(CHAT, SHORT[CHAT])
    assert answer.status == 502
    assert "upstream" in answer.json["error"]["message"]
    assert b"<script>" not in answer.body


@pytest.mark.parametrize("path", SHORT)
@pytest.mark.parametrize("how", ["breaks", "bytes", "long"])
def test_a_stream_that_fails_ends_with_an_error(between, canned, path, how, monkeypatch):
    monkeypatch.setattr("generate.server.upstream.MOST_LINE", 1000)
    canned.kind = "application/x-ndjson" if path == OLLAMA else "text/event-stream"
    first = b'{"a": 1}\n' if path == OLLAMA else b'data: {"a": 1}\n\ndata: {"b'
    canned.parts = [first, {"breaks": b"x", "bytes": b"\xff\n", "long": b"x" * 2000}[how]]
    canned.breaks = how == "breaks"
    answer = between(path, SHORT[path])
    assert answer.status == 200
    text = answer.body.decode()
    assert '{"a": 1}' in text
    events = text.strip().split("\n")
    last = json.loads((events[-1] if events[-1] != "data: [DONE]" else events[-3]).removeprefix("data: "))
    assert "upstream" in json.dumps(last)
    assert "xxx" not in text


def test_nothing_listens(drafter):
    ask = made("http://127.0.0.1:9", drafter)
    answer = ask(MESSAGES, SHORT[MESSAGES])
    assert (answer.status, answer.json["type"], answer.json["error"]["type"]) == (502, "error", "api_error")
    assert ask("/v1/nothing", {}).status == 404
    assert ask("/health", method="GET").json["status"] == "ok"
    ask.service.compressor = None
    assert ask(CHAT, SHORT[CHAT]).status == ask("/health", method="GET").status == 503


def test_a_client_that_leaves_ends_the_request(canned, drafter):
    """Also at the upstream server, which notices that its reader left."""
    left = asyncio.Event()
    ended = []

    async def waits(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        ended.append(True)

    async def run(app):
        answer = await call(app, "POST", CHAT, json.dumps(SHORT[CHAT]).encode(), left=left)
        while not answer.body:
            await asyncio.sleep(0.01)
        left.set()
        await asyncio.wait_for(answer.task, 5)
        for _ in range(200):
            if ended:
                return
            await asyncio.sleep(0.01)

    with serving(waits) as url:
        ask = made(url, drafter)
        ask.run(run(ask.app))
        assert ended
        assert ask.service.running == 0


@pytest.mark.parametrize("path", SHORT)
@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.few(3)
def test_signs_of_life_while_a_prompt_is_compressed(between, canned, path, status, monkeypatch):
    """A refusal of the other server then is an event of the stream, and no longer a status."""
    monkeypatch.setattr("generate.server.sending.HEARTBEAT", 0.02)
    shortened = between.service.compressor.shortened

    def slow(*of):
        time.sleep(0.1)
        return shortened(*of)

    monkeypatch.setattr(between.service.compressor, "shortened", slow)
    canned.status = status
    canned.kind = "application/x-ndjson" if path == OLLAMA else "text/event-stream"
    canned.parts = [b'{"a": 1}\n' if path == OLLAMA else b'data: {"a": 1}\n\n']
    first, *_, last = between(path, {**SHORT[path], "stream": True}).body.decode().strip().split("\n")
    assert first in (": waiting", "event: ping") or json.loads(first)["message"]["content"] == ""
    assert last.endswith('{"a": 1}') == (status == 200)
    whole = between(path, {**SHORT[path], "stream": False})
    assert whole.status == status
    assert b"waiting" not in whole.body


COMPRESSES = ("--prefill-compression", "auto", "--prefill-drafter", "demo")
OF_A_MODEL = [
    ("--model", "-m", "smollm2"),
    ("--model", "-m", "demo"),
    ("--ctx", "-c", "100"),
    ("--parallel", "--parallel", "2"),
    ("--devices", "--devices", "0,1"),
    ("--cache-type-k", "-ctk", "q8_0"),
    ("--stream-experts", "--stream-experts"),
    ("--cache-memory", "--cache-memory", "1GB"),
    ("--draft", "--draft", "demo"),
    ("--spec", "--spec", "lookup"),
    ("--wedlm-verify", "--wedlm-verify"),
    ("--no-warmup", "--no-warmup"),
]


def test_flags(capsys, tmp_path):
    base = ["--prefill-upstream-base", "http://127.0.0.1:9/v1"]
    for flags, said in (
        (base, "needs --prefill-compression"),
        (["--prefill-upstream-model", "m"], "needs --prefill-upstream-base"),
        (["--prefill-upstream-base", "http://user:secret@127.0.0.1"], "without a name or a key"),
        *(([*base, *COMPRESSES, *flags], f"goes without {flag}, which has no effect") for flag, *flags in OF_A_MODEL),
    ):
        assert main(["serve", "--port", "0", *flags]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert "secret" not in error
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert key_of(str(file), OWN) == KEY
    assert key_of(None, OWN) == OWN
    assert key_of(None, None) is None


def test_hostile_requests_are_answered(canned, between, drafter):
    """As by a server with a model: with no fault of ours, and in the dialect's envelope."""
    between.service.compressor = Compressor(drafter, Compression("tiny", ((1, 0.2),), 10**6))

    async def run():
        for method, path, data, headers in requests(5, 250):
            answer = await asyncio.wait_for(call(between.app, method, path, data, headers), 20)
            if method != "HEAD":
                check(path, data, answer)

    between.run(run())
    assert between.service.running == 0
