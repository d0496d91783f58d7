"""Calls an ASGI application without a connection, so that a test decides when the client leaves."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any


class Answer:
    """What an application sent, and the task that it runs in."""

    task: asyncio.Task[None]

    def __init__(self) -> None:
        self.status, self.headers, self.body = 0, dict[str, str](), b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def call(
    app: Any,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    left: asyncio.Event | None = None,
    reads: Callable[[MutableMapping[str, Any]], Awaitable[None]] | None = None,
) -> Answer:
    """Send one request; the client leaves when `left` is set, and `reads` is awaited with each message."""
    answer, sent = Answer(), False
    path, _, query = path.partition("?")
    lines = {"host": "localhost", **(headers or {})}

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await (left or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        if reads is not None:
            await reads(message)
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in message["headers"]}
        else:
            answer.body += message.get("body", b"")

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("utf-8", "surrogateescape"),
        "query_string": query.encode("utf-8", "surrogateescape"),
        "root_path": "",
        "headers": [(k.lower().encode("latin-1", "replace"), v.encode("latin-1", "replace")) for k, v in lines.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8080),
    }
    answer.task = asyncio.ensure_future(app(scope, receive, send))
    if left is None:
        await answer.task
    return answer
