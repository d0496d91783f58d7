"""A server without a model of its own: it shortens long prompts and sends them to another server."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from urllib.parse import quote

import httpx2
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router

from generate.server import ollama, page
from generate.server.answer import while_connected
from generate.server.body import read_json
from generate.server.errors import RETRY, ApiError, dialect_of, envelope, refusal
from generate.server.guard import Guard, Policy
from generate.server.log import Log
from generate.server.metrics import MEDIA
from generate.server.sending import Message, Receive, Send, Write, in_time, sending
from generate.server.service import Service
from generate.server.upstream import STREAMS, WHOLE, Upstream, kind_of, read_lines, read_object
from generate.server.wire import dumps, named_sse, sse

TEXTS = ("text", "input_text", "output_text")  # types of parts that hold text
PROMPTS = {"/v1/completions": "prompt", "/api/generate": "prompt"}
SHORTENED = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", *PROMPTS)
COUNTS = ("/v1/chat/completions/input_tokens", "/v1/responses/input_tokens", "/v1/messages/count_tokens")
PASSED = (*COUNTS, "/api/show", "/tokenize", "/detokenize", "/apply-template")
UNVERSIONED = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
)  # some clients call them without the version
READ = ("/v1/models", "/api/tags", "/api/ps", "/api/version")
JSON = [(b"content-type", WHOLE.encode())]
HEADERS = ("anthropic-version", "anthropic-beta")

Place = tuple[Any, Any]  # a container of a request, and the key or index of a text in it


def build(service: Service, upstream: Upstream, policy: Policy, log: Log) -> Guard:
    """Return the server as an ASGI application."""

    def health(request: Request) -> dict[str, Any]:
        if service.draining:
            raise ApiError(503, "the server shuts down", retry=RETRY)
        compressor_of(service)
        return {"status": "ok", "upstream": upstream.base}

    def props(request: Request) -> dict[str, Any]:
        return {"upstream": upstream.base, "prefill_compression": compressor_of(service).shown()}

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(upstream.base, {}), media_type=MEDIA)

    def shown(compute: Any) -> Any:
        async def answer(request: Request) -> Response:
            return Response(dumps(compute(request)), media_type=WHOLE)

        return answer

    own = {"/health": shown(health), "/v1/health": shown(health), "/props": shown(props), "/metrics": metrics}
    routes: list[BaseRoute] = [*page.routes(), *(Route(path, answer, methods=["GET"]) for path, answer in own.items())]
    routes.append(Route("/api/pull", ollama.pull, methods=["POST"]))
    forward = partial(Forward, service, upstream, upstream.client(service.max_requests))
    post = {path: path for path in (*SHORTENED, *PASSED)} | {path.removeprefix("/v1"): path for path in UNVERSIONED}
    routes += [Route(path, forward("POST", target), methods=["POST"]) for path, target in post.items()]
    get = {path: path for path in READ} | {"/models": "/v1/models"}
    routes += [Route(path, forward("GET", target), methods=["GET"]) for path, target in get.items()]
    routes.append(Route("/v1/models/{name:path}", ForwardModel(partial(forward, "GET")), methods=["GET"]))
    return Guard(Router(routes, redirect_slashes=False), policy, log)


def compressor_of(service: Service) -> Any:
    """Return the model that shortens prompts; raises ApiError while it is loaded."""
    if service.compressor is None:
        raise ApiError(503, "Loading model", retry=RETRY)
    return service.compressor


class Forward:
    """A route, as an ASGI application, whose requests the upstream server answers."""

    def __init__(self, service: Service, upstream: Upstream, client: httpx2.AsyncClient, method: str, path: str):
        self.service, self.upstream, self.client = service, upstream, client
        self.method, self.path, self.dialect = method, path, dialect_of(path)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request; raises ApiError before the answer has begun, and ClientGoneError."""
        request = Request(scope, receive)
        body = await read_json(request) if self.method == "POST" else None
        passed = {name: request.headers[name] for name in HEADERS if name in request.headers}
        await while_connected(receive, self._answer(body, passed, send))

    async def _answer(self, body: dict[str, Any] | None, passed: Mapping[str, str], send: Send) -> None:
        compressor_of(self.service)
        with self.service.admitted():
            started = time.perf_counter()
            preparing = asyncio.ensure_future(self._prepared(body))
            try:
                if body is not None and self._streams(body) and not await in_time(preparing):
                    await self._answer_late(preparing, body, passed, send)
                else:
                    await self._answer_now(await preparing, passed, send)
            finally:
                preparing.cancel()
            self.service.metrics.observe("e2e_request_latency_seconds", time.perf_counter() - started)

    def _streams(self, body: Mapping[str, Any]) -> bool:
        return self.path in SHORTENED and body.get("stream", self.dialect == "ollama") is True

    async def _answer_now(self, data: bytes | None, passed: Mapping[str, str], send: Send) -> None:
        """Return the upstream server's answer, with its status."""
        async with self.upstream.ask(self.client, self.method, self.path, data, passed) as response:
            kind = kind_of(response)
            if kind == WHOLE:
                found = await read_object(response)
                await send({"type": "http.response.start", "status": 200, "headers": JSON})
                await send({"type": "http.response.body", "body": found, "more_body": False})
                return
            async with sending(send, kind, bytes) as write:
                await self._pass_on(response, write)

    async def _answer_late(
        self, preparing: asyncio.Future[bytes | None], body: dict[str, Any], passed: Mapping[str, str], send: Send
    ) -> None:
        """Send keep-alives while a prompt is compressed, and then the stream; a refusal becomes its last event."""
        kind = STREAMS[self.dialect == "ollama"]
        ping = ping_of(self.path, body)
        async with sending(send, kind, lambda: b"" if preparing.done() else ping) as write:
            await write(ping)
            try:
                data = await preparing
                async with self.upstream.ask(self.client, self.method, self.path, data, passed) as response:
                    if (answered := kind_of(response)) != kind:
                        raise ApiError(502, f"the upstream server answered with {answered!r}, and not with a stream")
                    await self._pass_on(response, write)
            except Exception as error:
                if (refused := refusal(error)) is None:
                    raise
                await write(failure(self.path, self.dialect, refused))

    async def _prepared(self, body: dict[str, Any] | None) -> bytes | None:
        """Return the request with its long texts shortened, and the model's name replaced where the settings say so."""
        if body is None:
            return None
        found = list(places(self.path, body)) if self.path in SHORTENED else []
        if found:
            cancel = threading.Event()
            texts = [at[key] for at, key in found]
            try:
                short, dropped = await asyncio.to_thread(compressor_of(self.service).shortened, texts, cancel)
            finally:
                cancel.set()
            for (at, key), text in zip(found, short, strict=True):
                at[key] = text
            self.service.metrics.counters["prefill_compression_dropped_tokens"] += dropped
        if self.upstream.model is not None:
            body["model"] = self.upstream.model
        return await run_in_threadpool(dumps, body)

    async def _pass_on(self, response: httpx2.Response, write: Write) -> None:
        try:
            async for part in read_lines(response):
                await write(part)
        except ApiError as error:
            await write(failure(self.path, self.dialect, error))
        except httpx2.HTTPError as error:
            broken = ApiError(502, f"the upstream server's stream broke off: {type(error).__name__}")
            await write(failure(self.path, self.dialect, broken))


class ForwardModel:
    """The route of one model, as an ASGI application; `forward` makes the application of its path."""

    def __init__(self, forward: Callable[[str], Forward]):
        self.forward = forward

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request; raises ApiError for a name that would lead to another path of the upstream server."""
        name = scope["path_params"]["name"]
        if name in (".", ".."):
            raise ApiError(404, f"the model {name!r} is not found")
        await self.forward(f"/v1/models/{quote(name, safe='', errors='replace')}")(scope, receive, send)


def places(path: str, body: dict[str, Any]) -> Iterator[Place]:
    """Find the texts of a request that may be shortened: none beside tools, in an echoed prompt, or in token ids."""
    if any(body.get(key) for key in ("tools", "functions", "echo")):
        return
    key = PROMPTS.get(path, "input" if path == "/v1/responses" else "messages")
    given = body.get(key)
    if isinstance(given, str) and given:
        yield body, key
    messages = given if isinstance(given, list) and path not in PROMPTS else []
    if any(isinstance(message, dict) and message.get("tools") for message in messages):  # an item of Responses
        return
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
            continue
        content = message.get("content")
        if isinstance(content, str) and content:
            yield message, "content"
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") in TEXTS and isinstance(part.get("text"), str):
                yield part, "text"


def ping_of(path: str, body: Mapping[str, Any]) -> bytes:
    """Make a keep-alive, in the form of a stream that has not begun."""
    if path == "/v1/messages":
        return named_sse("ping", {"type": "ping"})
    if not path.startswith("/api/"):
        return b": waiting\n\n"
    text = {"response": ""} if path == "/api/generate" else {"message": {"role": "assistant", "content": ""}}
    return dumps({"model": str(body.get("model")), "created_at": ollama.moment(), **text, "done": False}) + b"\n"


def failure(path: str, dialect: str, error: ApiError) -> bytes:
    """End a failed stream in its dialect; an unfinished event is ended first."""
    what = envelope(error, dialect, "")
    if dialect == "ollama":
        return json.dumps(what).encode() + b"\n"
    if dialect == "anthropic":
        return b"\n" + named_sse("error", what)
    if path == "/v1/responses":
        code = {"code": error.code or "server_error", "message": error.message}
        response = {"id": "", "object": "response", "status": "failed", "output": [], "error": code}
        return b"\n" + named_sse("response.failed", {"type": "response.failed", "response": response})
    return b"\n" + sse(what) + b"data: [DONE]\n\n"
