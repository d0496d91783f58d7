"""Answer a request for text: parse, prepare, then write the reply whole or as a stream, while the client is there."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from generate.llm import LLM
from generate.server.body import read_json
from generate.server.errors import ApiError, refusal
from generate.server.events import Event, Failed, Finish, Usage, total
from generate.server.facts import Facts
from generate.server.fields import Fields
from generate.server.log import fault_of
from generate.server.sending import ClientGoneError, Message, Receive, Send, in_time, later, sending
from generate.server.service import Service
from generate.server.task import BRIEF, SHORT, Ready, Task, events, finished_replies, is_short, prepare
from generate.server.wire import Parsed, dumps

UNDISTURBED = 0.001  # seconds after a call in which only the model's thread has the interpreter lock, to launch a step

Found = AsyncIterator[tuple[int, Event]]
Count = Callable[[int, Event], None]


class Generate:
    """An endpoint, as an ASGI application, of one dialect's requests for text."""

    def __init__(self, service: Service, parse: Callable[[Fields, Facts], Parsed]):
        self.service, self.parse = service, parse

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request; raises ApiError before the reply has begun, and ClientGoneError."""
        facts, request = self.service.facts, Request(scope, receive)
        fields = Fields(await read_json(request))
        parse = partial(self.parse, fields, facts)
        await while_connected(receive, self._answer(parse, declares_few(request), facts, scope, send))

    async def _answer(self, parse: Callable[[], Parsed], few: bool, facts: Facts, scope: Message, send: Send) -> None:
        """Answer the request that `parse` reads; a body of few bytes is parsed at once."""
        parsed = parse() if few else await run_in_threadpool(parse)
        given = self.service.options | dict(parsed.task.options)
        parsed = replace(parsed, task=replace(parsed.task, options=given))
        task, started = parsed.task, time.perf_counter()
        with self.service.admitted():
            preparing = self._preparing(task, facts)
            if task.stream:
                await self._stream(parsed, preparing, started, scope, send)
                return
            prompts = await preparing
            async with self._events(prompts, task, started) as (found, count):
                replies = await finished_replies(found, len(prompts) * task.n, count)
            note(scope, usage=total({i: reply.finish.usage for i, reply in enumerate(replies)}, task.n))
            body = await run_in_threadpool(lambda: dumps(parsed.whole(replies)))  # takes long if it lists probabilities
            response = Response(body, media_type="application/json")
            await response(scope, no_receive, send)

    def _preparing(self, task: Task, facts: Facts) -> asyncio.Future[list[Ready]]:
        """Begin to prepare the prompts; a brief one is prepared at once, which is faster than another thread."""
        llm = self.service.llm
        if self.service.compressor or llm.tokenizer.is_busy or not is_short(task, BRIEF):
            return asyncio.ensure_future(self._prepared(task, facts))
        ready = asyncio.get_running_loop().create_future()
        try:
            ready.set_result(prepare(llm, facts, task))
        except Exception as error:
            ready.set_exception(error)
        return ready

    async def _prepared(self, task: Task, facts: Facts) -> list[Ready]:
        """Render and encode the prompts; compress long ones first if a drafter is loaded."""
        shorter = await self._compressed(task)
        job = partial(prepare, self.service.llm, facts, shorter)
        if is_short(shorter, SHORT):
            return await asyncio.get_running_loop().run_in_executor(self.service.short_jobs, job)
        return await run_in_threadpool(job)

    @asynccontextmanager
    async def _events(self, prompts: list[Ready], task: Task, started: float) -> AsyncIterator[tuple[Found, Count]]:
        """Yield the events of all replies, and the function that counts an event; replies end with the context."""
        with self.service.metrics.counting(task, started) as count:
            async with aclosing(events(self.service.llm, prompts, task)) as found:
                yield found, count

    async def _compressed(self, task: Task) -> Task:
        """Shorten the long prompts of a task if a drafter is loaded."""
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
        self, parsed: Parsed, preparing: asyncio.Future[list[Ready]], started: float, scope: Message, send: Send
    ) -> None:
        """Send events as they arrive; a request that is refused before a keep-alive is due raises ApiError."""
        writer, usages = parsed.writer(scope["bimetal"]["id"]), dict[int, Usage]()
        try:
            if is_ready := await in_time(preparing):
                preparing.result()
            async with sending(send, parsed.media, lambda: writer.ping) as write:
                if not is_ready:
                    await write(writer.ping)
                try:
                    prompts = await preparing
                except Exception as error:
                    if (refused := refusal(error)) is None:
                        raise
                    note(scope, **fault_of(error, refused))
                    failed = writer.push(0, Failed(refused))  # the status has been sent
                    await write(b"".join([*writer.begin(0), *failed, *writer.end()]))
                    return

                has_begun = not is_ready

                async def begin() -> None:
                    nonlocal has_begun
                    has_begun = True
                    await write(b"".join(writer.begin(sum(len(ready.prompt.tokens) for ready in prompts))))

                async with self._events(prompts, parsed.task, started) as (found, count):
                    with later(UNDISTURBED, begin) as begun:
                        async for index, event in found:
                            count(index, event)
                            if isinstance(event, Failed) and not has_begun:
                                raise event.error  # the status has not been sent yet
                            await begun
                            if isinstance(event, Finish):
                                usages[index] = event.usage
                            elif isinstance(event, Failed):
                                note(scope, **fault_of(event.error, event.error))
                            if data := b"".join(writer.push(index, event)):
                                await write(data)
                        await begun
                await write(b"".join(writer.end()))
        finally:
            preparing.cancel()
            if usages:
                note(scope, usage=total(usages, parsed.task.n))


class Utility:
    """An endpoint, as an ASGI application, whose answer is computed at once from a request's JSON object."""

    def __init__(self, service: Service, compute: Callable[[Fields, Facts, LLM], dict[str, Any]]):
        self.service, self.compute = service, compute

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        facts, llm = self.service.facts, self.service.llm
        fields = Fields(await read_json(Request(scope, receive)))
        body = await run_in_threadpool(lambda: dumps(self.compute(fields, facts, llm)))
        await Response(body, media_type="application/json")(scope, receive, send)


def declares_few(request: Request) -> bool:
    """Test whether a request declares a body of at most SHORT bytes."""
    declared = request.headers.get("content-length", "")
    return declared.isdecimal() and int(declared[:20]) <= SHORT


async def while_connected(receive: Receive, work: Awaitable[None]) -> None:
    """Await `work`, and cancel it when the client leaves; raises ClientGoneError then."""
    task, has_left = asyncio.current_task(), False
    assert task is not None

    async def gone() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = task.cancel()

    with later(UNDISTURBED, gone):
        try:
            await work
        except asyncio.CancelledError:
            if has_left and not task.uncancel():
                raise ClientGoneError from None
            raise


def note(scope: Message, **values: Any) -> None:
    """Add facts about a reply, such as its usage, to the log's line."""
    scope["bimetal"].update(values)


async def no_receive() -> Message:
    """Stand for what a whole answer receives, which reads nothing."""
    raise ApiError(500, "a whole answer reads nothing")
