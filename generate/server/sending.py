"""Send a body while it is made, with keep-alives to clients that wait."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

HEARTBEAT = 5.0  # seconds after which a silent stream gets a keep-alive
STALLED = 60.0  # seconds after which a client that reads nothing counts as gone
HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Write = Callable[[bytes], Awaitable[None]]


class ClientGoneError(Exception):
    """The client left before its reply was whole."""


@asynccontextmanager
async def sending(send: Send, media: str, ping: Callable[[], bytes]) -> AsyncIterator[Write]:
    """Yield what writes a part of a streamed body, whose status 200 goes before the first part, and end the body.

    ping  makes what is sent after HEARTBEAT seconds without a part; b"": nothing

    Raises ClientGoneError if the client has read nothing for STALLED seconds.
    """
    sent, has_begun, is_sending, is_stalled = time.monotonic(), False, False, False
    task = asyncio.current_task()

    async def put(data: bytes, more: bool) -> None:
        nonlocal sent, has_begun, is_sending
        sent, is_sending = time.monotonic(), True
        if not has_begun:
            has_begun = True
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data, "more_body": more})
        is_sending = False

    async def write(data: bytes) -> None:
        await put(data, True)

    async def beat() -> None:
        nonlocal is_stalled
        while True:
            silent = time.monotonic() - sent
            if is_sending and silent >= STALLED and task is not None:
                is_stalled = True
                task.cancel()
            elif not is_sending and silent >= HEARTBEAT and (data := ping()):
                with suppress(TimeoutError):  # the client reads nothing, which is found above
                    await asyncio.wait_for(write(data), STALLED)
            await asyncio.sleep(HEARTBEAT - silent if silent < HEARTBEAT else HEARTBEAT)

    headers = [(b"content-type", f"{media}; charset=utf-8".encode()), *HEADERS]
    with later(HEARTBEAT, beat):
        try:
            yield write
            await put(b"", False)
        except asyncio.CancelledError:
            if is_stalled:
                raise ClientGoneError from None
            raise


@contextmanager
def later(seconds: float, run: Callable[[], Coroutine[Any, Any, None]]) -> Iterator[asyncio.Future[None]]:
    """Run a task that begins after `seconds` and ends with the block; yields a future that is done when the task is.

    A timer takes less of the event loop than a task that begins by sleeping.
    """
    loop, task = asyncio.get_running_loop(), None
    done: asyncio.Future[None] = loop.create_future()

    def begin() -> None:
        nonlocal task
        task = loop.create_task(run())
        task.add_done_callback(finish)

    def finish(task: asyncio.Task[None]) -> None:
        if task.cancelled() or done.cancelled():  # the one who waits may be cancelled in the same turn of the loop
            done.cancel()
        elif error := task.exception():
            done.set_exception(error)
        else:
            done.set_result(None)

    timer = loop.call_later(seconds, begin)
    try:
        yield done
    finally:
        timer.cancel()
        if task is not None:
            task.cancel()


async def in_time(work: asyncio.Future[Any]) -> bool:
    """Wait until `work` is done or a keep-alive is due; whether it is. Cancelling the wait cancels the work."""
    if work.done():
        return True
    try:
        await asyncio.wait((work,), timeout=HEARTBEAT)
    except asyncio.CancelledError:
        work.cancel()
        raise
    return work.done()
