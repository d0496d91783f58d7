"""Answer a request for text: parse, prepare, then write the reply whole or as a stream, while the client is there."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from generate.llm import LLM
from generate.server.body import read_json
from generate.server.errors import ApiError
from generate.server.events import Event, Finish, Usage, total
from generate.server.facts import Facts
from generate.server.fields import Fields
from generate.server.service import Service
from generate.server.task import Ready, Task, events, prepare, whole
from generate.server.wire import Parsed, dumps

HEARTBEAT = 5.0  # seconds after which a silent stream gets a sign of life
STALLED = 60.0  # seconds after which a client that reads nothing counts as gone
STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ClientGoneError(Exception):
    """The client left before its reply was whole."""


class Generate:
    """An endpoint, as an ASGI application, of one dialect's requests for text."""

    def __init__(self, service: Service, parse: Callable[[Fields, Facts], Parsed]):
        self.service, self.parse = service, parse

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request; raises ApiError before the reply has begun, and ClientGoneError."""
        facts = self.service.facts
        fields = Fields(await read_json(Request(scope, receive)))
        await while_connected(receive, self._answer(fields, facts, scope, send))

    async def _answer(self, fields: Fields, facts: Facts, scope: Message, send: Send) -> None:
        parsed = await run_in_threadpool(self.parse, fields, facts)
        task, began = parsed.task, time.perf_counter()
        with self.service.admitted():
            llm = self.service.llm
            prompts = await run_in_threadpool(prepare, llm, facts, await self._compressed(task))
            async with (
                aclosing(events(llm, prompts, task)) as found,
                aclosing(self.service.metrics.watched(found, task, began)) as watched,
            ):
                if task.stream:
                    await self._stream(parsed, prompts, watched, scope, send)
                    return
                replies = await whole(watched, len(prompts) * task.n)
            note(scope, total({i: reply.finish.usage for i, reply in enumerate(replies)}, task.n))
            response = Response(dumps(parsed.whole(replies)), media_type="application/json")
            await response(scope, _no_receive, send)

    async def _compressed(self, task: Task) -> Task:
        """The task with its long prompts shortened, where the server does that."""
        if self.service.compressor is None:
            return task
        cancel = threading.Event()
        try:
            shorter, dropped = await asyncio.to_thread(self.service.compressor.shorten, self.service.llm, task, cancel)
        finally:
            cancel.set()
        self.service.metrics.counters["prefill_compression_dropped_tokens"] += dropped
        return shorter

    async def _stream(
        self,
        parsed: Parsed,
        prompts: list[Ready],
        found: AsyncIterator[tuple[int, Event]],
        scope: Message,
        send: Send,
    ) -> None:
        writer, sent, is_sending, is_stalled = parsed.writer(), time.monotonic(), False, False
        task = asyncio.current_task()

        async def write(data: bytes) -> None:
            nonlocal sent, is_sending
            sent, is_sending = time.monotonic(), True
            await send({"type": "http.response.body", "body": data, "more_body": True})
            is_sending = False

        async def beat() -> None:
            nonlocal is_stalled
            while True:
                await asyncio.sleep(HEARTBEAT)
                silent = time.monotonic() - sent
                if is_sending and silent >= STALLED and task is not None:
                    is_stalled = True
                    task.cancel()
                elif not is_sending and silent >= HEARTBEAT and writer.ping:
                    await write(writer.ping)

        headers = [(b"content-type", f"{parsed.media}; charset=utf-8".encode()), *STREAM_HEADERS]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        usages: dict[int, Usage] = {}
        beating = asyncio.ensure_future(beat())
        try:
            await write(b"".join(writer.begin(sum(len(ready.prompt.tokens) for ready in prompts))))
            async for index, event in found:
                if isinstance(event, Finish):
                    usages[index] = event.usage
                if data := b"".join(writer.push(index, event)):
                    await write(data)
            await write(b"".join(writer.end()))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            if is_stalled:
                raise ClientGoneError from None
            raise
        finally:
            beating.cancel()
            if usages:
                note(scope, total(usages, parsed.task.n))


class Utility:
    """An endpoint, as an ASGI application, whose answer is computed at once from a request's JSON object."""

    def __init__(self, service: Service, compute: Callable[[Fields, Facts, LLM], dict[str, Any]]):
        self.service, self.compute = service, compute

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        facts, llm = self.service.facts, self.service.llm
        fields = Fields(await read_json(Request(scope, receive)))
        body = dumps(await run_in_threadpool(self.compute, fields, facts, llm))
        await Response(body, media_type="application/json")(scope, receive, send)


async def while_connected(receive: Receive, work: Awaitable[None]) -> None:
    """Await `work`, and cancel it when the client leaves; raises ClientGoneError then."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        left = not working.done()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
    if left:
        raise ClientGoneError
    working.result()


def note(scope: Message, usage: Usage) -> None:
    """Leave a reply's figures for the log."""
    scope.setdefault("bimetal", {})["usage"] = usage


async def _no_receive() -> Message:
    raise ApiError(500, "a whole reply reads nothing")
