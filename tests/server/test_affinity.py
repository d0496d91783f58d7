"""Requests of one conversation have one session, in every dialect, and reach the server unchanged."""

import asyncio
import json

import pytest

affinity = pytest.importorskip("generate.affinity", reason="the server extra is not installed")

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "Name a prime."}
TOLD = {"role": "assistant", "content": "7"}
MORE = {"role": "user", "content": "Another."}


def passed(body: bytes, pieces: int = 1, headers: tuple = (), method: str = "POST"):
    """(session, body) that the application behind the middleware receives, and what receive() gives after it."""
    size = -(-len(body) // pieces) or 1
    parts = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
    queue = [
        {"type": "http.request", "body": part, "more_body": at < len(parts) - 1} for at, part in enumerate(parts)
    ] + [{"type": "http.disconnect"}]
    found = {}

    async def receive():
        return queue.pop(0)

    async def app(scope, receive, send):
        found["session"] = dict(scope["headers"]).get(b"x-session-id")
        got, more = b"", True
        while more:
            message = await receive()
            got, more = got + message["body"], message["more_body"]
        found["body"], found["next"] = got, await receive()

    scope = {"type": "http", "method": method, "headers": list(headers)}
    asyncio.run(affinity.PromptAffinity(app)(scope, receive, None))
    assert found["next"] == {"type": "http.disconnect"}
    assert found["body"] == body
    return found["session"]


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize(
    ("first", "later"),
    [
        ({"messages": [SYSTEM, ASK]}, {"messages": [SYSTEM, ASK, TOLD, MORE]}),
        ({"system": "Be brief.", "messages": [ASK]}, {"system": "Be brief.", "messages": [ASK, TOLD, MORE]}),
        ({"instructions": "Be brief.", "input": [ASK]}, {"instructions": "Be brief.", "input": [ASK, TOLD, MORE]}),
        ({"prompt": "def add(" + "a, " * 100}, {"prompt": "def add(" + "a, " * 200}),
        ({"prompt": [1, 2, 3] * 100}, {"prompt": [1, 2, 3] * 101}),
    ],
)
def test_turns_of_one_conversation_have_one_session(first, later, pieces) -> None:
    sessions = [passed(json.dumps(body | {"max_tokens": n}).encode(), pieces) for n, body in enumerate((first, later))]
    assert sessions[0] == sessions[1] is not None


def test_other_conversations_have_other_sessions() -> None:
    bodies = [
        {"messages": [ASK]},
        {"messages": [MORE]},
        {"messages": [SYSTEM, ASK]},
        {"system": "Be brief.", "messages": [ASK]},
        {"input": "Name a prime."},
        {"instructions": "Be brief.", "input": "Name a prime."},
    ]
    assert len({passed(json.dumps(body).encode()) for body in bodies}) == len(bodies)


def test_requests_of_an_editor_have_the_session_of_their_file() -> None:
    def session(prefix: str, line: str) -> bytes | None:
        return passed(json.dumps({"input_prefix": prefix, "input_suffix": "", "prompt": line}).encode())

    file = "import os\n" * 40
    assert session(file, "    r") == session(file + "x = 1\n", "    re") != session("import io\n" * 40, "    r")


def test_the_clients_session_stays() -> None:
    body = json.dumps({"messages": [ASK]}).encode()
    assert passed(body, headers=((b"x-session-id", b"mine"),)) == b"mine"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"messages": []}', b'{"prompt": 3}', b"[" * 100_000])
def test_what_is_no_conversation_has_no_session(body) -> None:
    assert passed(body) is None


def test_other_methods_are_not_read() -> None:
    assert passed(b'{"prompt": "a"}', method="DELETE") is None


def test_a_body_beyond_the_limit_is_passed_on(monkeypatch) -> None:
    monkeypatch.setattr(affinity, "MOST_BYTES", 10)
    assert passed(json.dumps({"prompt": "a" * 100}).encode(), pieces=5) is None
