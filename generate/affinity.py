"""Give all requests of a conversation one session id, so that a proxy sends them to the same replica."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders

from generate.server.answer import Message, Receive, Send
from generate.server.body import LONG, MOST_BYTES

HEADER = "x-session-id"  # which Ray Serve's consistent hashing reads
PLAIN = 256  # characters of a prompt without messages, or of an editor's file, that make its session


class PromptAffinity:
    """ASGI middleware: adds a session id to a POST without one, made from the beginning of its conversation.

    All turns of a conversation begin with the same system prompt and first question, in every API.
    """

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request on; a body above MOST_BYTES, which the server refuses, gets no session."""
        if scope["type"] != "http" or scope["method"] != "POST" or HEADER in Headers(scope=scope):
            await self.app(scope, receive, send)
            return
        held, size, more = [], 0, True
        while more and size <= MOST_BYTES:
            message = await receive()
            held.append(message)
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
        body = b"".join(message.get("body", b"") for message in held)
        if not more:
            session = await run_in_threadpool(session_of, body) if size > LONG else session_of(body)
            if session is not None:
                MutableHeaders(scope=scope)[HEADER] = session
        waiting = iter(held)

        async def replayed() -> Message:
            message = next(waiting, None)
            return await receive() if message is None else message

        await self.app(scope, replayed, send)


def session_of(body: bytes) -> str | None:
    """Return a digest of the beginning of the conversation in a request's body; None for a body without one."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    begin = _beginning(value) if isinstance(value, dict) else None
    return None if begin is None else hashlib.sha256(json.dumps(begin).encode()).hexdigest()[:32]


def _beginning(body: Mapping[str, Any]) -> list[Any] | None:
    """Return the system prompt and the messages up to the first user's, or the first characters of a prompt."""
    system = [body.get("system"), body.get("instructions")]
    for name in ("messages", "input"):
        if isinstance(messages := body.get(name), list) and messages:
            first = next((at for at, each in enumerate(messages) if _is_user(each)), len(messages) - 1)
            return [system, messages[: first + 1]]
    text = body.get("input_prefix") or body.get("input", body.get("prompt"))  # the first is of an editor's file
    return [system, text[:PLAIN]] if isinstance(text, str | list) and text else None


def _is_user(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "user"
