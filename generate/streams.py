"""A reply while it is generated (Stream, AsyncStream), and a finished reply (Reply)."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from common.amounts import counted
from common.errors import UsageError
from common.pieces import Logprob, Piece, Stats
from generate.notebook import reply_markdown
from generate.owner_thread import OwnerThread

DONE = object()
Start = Callable[[Callable[[Any], None], threading.Event], None]  # (what takes pieces, DONE or an exception; cancel)


@dataclass(frozen=True)
class Reply:
    """A finished reply, which prints as its text.

    text           the answer; a chat's reasoning and tool calls are not part of it
    tokens         ids of all that the model wrote, without the end token
    finish_reason  "stop", "tool_calls", "length" or "cancelled"
    logprobs       one per token if the call asked for log-probabilities, else empty
    tool_calls     as in OpenAI's API: {"id", "type": "function", "function": {"name", "arguments": JSON text}}
    """

    text: str
    tokens: list[int]
    finish_reason: str
    stats: Stats
    logprobs: list[Logprob]
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def __str__(self) -> str:
        return self.text

    @property
    def message(self) -> dict[str, Any]:
        """Return the reply as a message for the next turn; templates decide how long they keep the reasoning."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message

    def _repr_markdown_(self) -> str:
        calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in self.tool_calls]
        return reply_markdown(self.text, self.reasoning, calls, self.finish_reason, self.stats)


class _Collected:
    """Base of streams: collects the pieces that have been yielded, and cancels the reply."""

    def __init__(self, owner: OwnerThread) -> None:
        self._owner, self._cancel = owner, threading.Event()
        self.text = self.reasoning = ""
        self.tool_calls: list[dict[str, Any]] = []
        self.tokens: list[int] = []
        self.logprobs: list[Logprob] = []
        self.finish_reason: str | None = None
        self.stats: Stats | None = None

    def cancel(self) -> None:
        """End the reply at the next step; yielded pieces are kept, and a last piece follows."""
        self._cancel.set()

    def __del__(self) -> None:
        self._cancel.set()

    def __repr__(self) -> str:
        state = self.finish_reason or "not finished"
        return f"<{type(self).__name__}: {counted(len(self.tokens), 'token')} read, {state}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a reply that is being written cannot be copied or pickled; read it to the end with reply()")

    def _collect(self, piece: Piece) -> Piece:
        self.text += piece.text
        self.reasoning += piece.reasoning
        self.tool_calls += [{k: v for k, v in call.items() if k != "index"} for call in piece.tool_calls]
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.finish_reason, self.stats = piece.finish_reason, piece.stats
        return piece

    def _reply(self) -> Reply:
        assert self.finish_reason is not None
        assert self.stats is not None
        parts = (self.reasoning, self.tool_calls)
        return Reply(self.text, self.tokens, self.finish_reason, self.stats, self.logprobs, *parts)


class Stream(_Collected):
    """The pieces of a reply; `text`, `reasoning`, `tool_calls`, `tokens`, `logprobs` hold what came so far,
    `finish_reason` and `stats` the end.

    A reply ends at the next step when its `for` loop or `with` block is left, when its stream is dropped, and by
    `cancel()`. `next(stream)` reads single pieces.
    """

    def __init__(self, owner: OwnerThread, start: Start):
        super().__init__(owner)
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        start(partial(owner.outbox.put, self._items), self._cancel)

    def __iter__(self) -> Iterator[Piece]:
        return _Loop(self)

    def __next__(self) -> Piece:
        self._owner.check()
        item = self._items.get()
        if item is DONE:
            self._items.put(DONE)  # a finished iterator stays finished
            raise StopIteration
        if isinstance(item, BaseException):
            self._items.put(DONE)
            raise item
        return self._collect(item)

    def close(self) -> None:
        """End the reply at the next step."""
        self.cancel()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def reply(self) -> Reply:
        """Read to the end, and return the whole reply. An interrupt (Ctrl-C) cancels it and keeps what was yielded."""
        for _ in self:
            pass
        return self._reply()


class _Loop:
    """Iterator of one `for` loop: when the loop is left, Python drops the iterator, which cancels the reply."""

    def __init__(self, stream: Stream):
        self._stream = stream

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._stream)

    def __del__(self) -> None:
        self._stream.cancel()


class AsyncStream(_Collected):
    """The pieces of a reply for `async for`; cancelling the task that reads also ends the reply at the next step."""

    def __init__(self, owner: OwnerThread, start: Start):
        super().__init__(owner)
        items: asyncio.Queue[Any] = asyncio.Queue()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise UsageError(
                "an asynchronous stream needs a running event loop; stream and stream_chat do not"
            ) from None
        self._items, inbox = items, owner.inbox(loop)

        def put(item: Any) -> None:  # holds no reference to the stream: a dropped stream ends its reply
            inbox.put(items, item)

        start(put, self._cancel)

    def __aiter__(self) -> AsyncIterator[Piece]:
        return _AsyncLoop(self)

    async def __anext__(self) -> Piece:
        if self._items.empty():
            self._owner.check()
        try:
            item = await self._items.get()
        except asyncio.CancelledError:
            self._cancel.set()
            raise
        if item is DONE:
            self._items.put_nowait(DONE)  # a finished iterator stays finished
            raise StopAsyncIteration
        if isinstance(item, BaseException):
            self._items.put_nowait(DONE)
            raise item
        return self._collect(item)

    async def aclose(self) -> None:
        """End the reply at the next step."""
        self.cancel()

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    async def reply(self) -> Reply:
        """Read to the end, and return the whole reply."""
        async for _ in self:
            pass
        return self._reply()


class _AsyncLoop:
    """Iterator of one `async for` loop: when the loop is left, Python drops the iterator, which cancels the reply."""

    def __init__(self, stream: AsyncStream):
        self._stream = stream

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        return await self._stream.__anext__()

    def __del__(self) -> None:
        self._stream.cancel()
