"""The Python API: a loaded model (LLM) and the reply it is writing (Stream)."""

import asyncio
import queue
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from common.chat import render
from common.checkpoint import open_checkpoint
from common.decode.speculative import Speculation
from common.demo import demo_path
from common.errors import BimetalError, UsageError
from common.fit import context_that_fits
from common.hub import resolve_model
from common.models.dflash import load_pair
from common.models.window import bounded
from common.reply import ReplyParser
from common.sampling import Sampling
from common.session import Logprob, Piece, Session, Stats, take_apart
from common.tokenizer import Tokenizer, load_tokenizer
from common.tools import schemas
from generate.backends import ONE_GPU, Placement, check_draft, leave_thread, open_model
from generate.owner import Owner

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

_DONE = object()


@dataclass(frozen=True)
class Reply:
    """A finished reply.

    text           the answer; a chat's reasoning and tool calls are not part of it
    tokens         ids of all that the model wrote, without the end token
    finish_reason  "stop", "tool_calls", "length" or "cancelled"
    logprobs       one per token where they were asked for, else empty
    tool_calls     as in OpenAI's API: {"id", "type": "function", "function": {"name", "arguments": JSON text}}
    """

    text: str
    tokens: list[int]
    finish_reason: str
    stats: Stats
    logprobs: list[Logprob]
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a message, to go on with; templates decide how long they keep the reasoning."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


class _Collected:
    """What a stream has yielded so far."""

    def __init__(self) -> None:
        self.text = self.reasoning = ""
        self.tool_calls: list[dict[str, Any]] = []
        self.tokens: list[int] = []
        self.logprobs: list[Logprob] = []
        self.finish_reason: str | None = None
        self.stats: Stats | None = None

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
    """An iterator of pieces; `text`, `reasoning`, `tool_calls`, `tokens`, `logprobs` hold what came so far,
    `finish_reason` and `stats` the end.

    `cancel()` ends the reply at the next step, and so does closing, leaving a `with` block or dropping the stream.
    """

    def __init__(self, start: Callable[[Callable[[Any], None], threading.Event], None]):
        super().__init__()
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._cancel = threading.Event()
        start(self._items.put, self._cancel)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        item = self._items.get()
        if item is _DONE:
            self._items.put(_DONE)  # a finished iterator stays finished
            raise StopIteration
        if isinstance(item, BaseException):
            self._items.put(_DONE)
            raise item
        return self._collect(item)

    def cancel(self) -> None:
        self._cancel.set()

    close = cancel

    def __del__(self) -> None:
        self._cancel.set()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def reply(self) -> Reply:
        """Read to the end. An interrupt (Ctrl-C) cancels the rest and keeps what came."""
        for _ in self:
            pass
        return self._reply()


class AsyncStream(_Collected):
    """Stream's twin for `async for`; leaving the loop's task, or `cancel()`, ends the reply at the next step."""

    def __init__(self, start: Callable[[Callable[[Any], None], threading.Event], None]):
        super().__init__()
        self._items: asyncio.Queue[Any] = asyncio.Queue()
        self._cancel = threading.Event()
        loop = asyncio.get_running_loop()

        def put(item: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._items.put_nowait, item)

        start(put, self._cancel)

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        try:
            item = await self._items.get()
        except asyncio.CancelledError:
            self._cancel.set()
            raise
        if item is _DONE:
            self._items.put_nowait(_DONE)  # a finished iterator stays finished
            raise StopAsyncIteration
        if isinstance(item, BaseException):
            self._items.put_nowait(_DONE)
            raise item
        return self._collect(item)

    def cancel(self) -> None:
        self._cancel.set()

    def __del__(self) -> None:
        self._cancel.set()

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    async def reply(self) -> Reply:
        """Read to the end."""
        async for _ in self:
            pass
        return self._reply()


def _thinking(template: str, think: bool) -> dict[str, bool]:
    """The variable that turns thinking on or off in a chat template."""
    if "enable_thinking" in template:
        return {"enable_thinking": think}
    if think:
        raise UsageError("the model's chat template cannot turn thinking on; leave think out")
    if "<think>" in template:
        raise UsageError("the model's chat template cannot turn thinking off; leave think out")
    return {}


def _shut(owner: Owner, running: Iterable[threading.Event]) -> None:
    for cancel in list(running):
        cancel.set()
    owner.close()


def resolve_draft(name: str, progress: bool) -> Path:
    """The local path of a draft: "demo", or as `resolve_model` takes it."""
    return demo_path("draft") if name == "demo" else resolve_model(name, progress=progress)


class LLM:
    """A loaded model. Any thread may call it; calls run one after another in the thread that owns the model."""

    tokenizer: Tokenizer

    def __init__(
        self,
        model: str,
        backend: str | None = None,
        ctx: int | None = None,
        progress: bool = False,
        draft: str | None = None,
        fa_window: int | None = None,
        max_kv_size: int | None = None,
        placement: Placement = ONE_GPU,
    ):
        check_draft(placement.draft, draft)
        self.path = resolve_model(model, progress=progress)
        self.draft_path = None if draft is None else resolve_draft(draft, progress)
        if ctx is not None and ctx < 1:
            raise UsageError(f"ctx is {ctx}; it must be at least 1")
        self._running: weakref.WeakSet[threading.Event] = weakref.WeakSet()
        self._owner = Owner(f"bimetal {self.path.name}", leave_thread)
        self._shut = weakref.finalize(self, _shut, self._owner, self._running)  # also at exit, and when dropped
        self._session: Session = self._owner.submit(
            lambda: self._load(backend, ctx, progress, fa_window, max_kv_size, placement)
        ).result()

    def _load(
        self,
        backend: str | None,
        ctx: int | None,
        progress: bool,
        fa_window: int | None,
        max_kv_size: int | None,
        placement: Placement,
    ) -> Session:
        checkpoint = open_checkpoint(self.path)
        self.tokenizer = load_tokenizer(checkpoint.path, checkpoint.config)
        model = open_model(checkpoint, backend, progress, placement)
        if max_kv_size is not None:
            model = bounded(model, max_kv_size)
        if self.draft_path is not None:
            model = load_pair(self.draft_path, model, progress)
        self.backend, self.architecture = model.ops.name, model.architecture
        self.trained_context: int = model.config.context
        self.context = ctx or self.trained_context
        if not ctx and max_kv_size is None and model.ops.reserves:
            spec = model.definition.state_spec(model.config)
            self.context = context_that_fits(model.ops, model.config, model.layout, spec)
            if self.context < self.trained_context:
                kept = f"{self.context} of {self.trained_context} tokens"
                print(f"the context is {kept}: no more fit into the {model.ops.free_bytes()[1]}", file=sys.stderr)
        return Session(model, self.tokenizer, self.context, fa_window)

    # -- text ----------------------------------------------------------------------------------------------------------

    def stream(self, prompt: Prompt, **options: Any) -> Stream:
        """The reply to `prompt` (text or token ids), piece by piece.

        max_tokens    most tokens of the reply; None: to the end of the context
        stop          strings that end the reply and are not part of it
        logprobs      None, or how many alternatives to list beside each token's log-probability
        on_prefill    called in the owner thread with (tokens read, tokens to read)
        temperature, top_p, top_k, min_p, repetition_penalty, frequency_penalty, presence_penalty, seed
                      see common.sampling.Sampling; the default is greedy
        spec          "off", "lookup", "chain", "tree", "lookup+chain" or "lookup+tree": how to guess ahead. The text is
                      the same; the default is "tree" with a draft, else "off"
        tree_budget   guessed tokens per step; None: chosen while decoding
        tree_topk     tokens that a tree considers at each place (8)
        chain_seed    begin trees with the draft's likeliest block (False)
        """
        return Stream(self._starter(self._ids(prompt), options))

    def generate(self, prompt: Prompt, **options: Any) -> Reply:
        """The whole reply to `prompt`; options as in `stream`."""
        with self.stream(prompt, **options) as stream:
            return stream.reply()

    def stream_chat(self, messages: Sequence[Message], **options: Any) -> Stream:
        """The assistant's reply to `messages`, piece by piece; options as in `stream`, and

        think     whether to think before the answer; None: as the model's chat template has it
        tools     what the model may call, as in OpenAI's API. A call leaves the text once it is whole; a malformed one,
                  or one in a syntax that common.tools does not know, stays there as the model wrote it
        template  a dict of what else the chat template reads

        Stop strings count in the reasoning and in calls too.
        """
        return Stream(self._starter(*self._chat(messages, options)))

    def chat(self, messages: Sequence[Message], **options: Any) -> Reply:
        """The assistant's whole reply to `messages`; options as in `stream_chat`."""
        with self.stream_chat(messages, **options) as stream:
            return stream.reply()

    def astream(self, prompt: Prompt, **options: Any) -> AsyncStream:
        """`stream` for `async for`."""
        return AsyncStream(self._starter(self._ids(prompt), options))

    async def agenerate(self, prompt: Prompt, **options: Any) -> Reply:
        """`generate`, awaited."""
        async with self.astream(prompt, **options) as stream:
            return await stream.reply()

    def astream_chat(self, messages: Sequence[Message], **options: Any) -> AsyncStream:
        """`stream_chat` for `async for`."""
        return AsyncStream(self._starter(*self._chat(messages, options)))

    async def achat(self, messages: Sequence[Message], **options: Any) -> Reply:
        """`chat`, awaited."""
        async with self.astream_chat(messages, **options) as stream:
            return await stream.reply()

    def render(self, messages: Sequence[Message], tools: Any = None, think: bool | None = None, **template: Any) -> str:
        """`messages` as the model's chat template writes them, up to where the assistant's reply begins."""
        special = {"bos_token": self.tokenizer.bos_id, "eos_token": self.tokenizer.eos_id}
        tokens: dict[str, Any] = {name: self.tokenizer.decode([id]) for name, id in special.items() if id is not None}
        source = self._template(tools)
        if think is not None:
            template |= _thinking(source or "", think)
        return render(source, messages, tools, **(tokens | template))

    # -- numbers -------------------------------------------------------------------------------------------------------

    def logits(self, prompt: Prompt) -> np.ndarray:
        """The logits after each token of `prompt`: (T, vocab) float32."""
        ids = self._ids(prompt)
        return self._submit(lambda: self._session.logits(ids)).result()

    async def alogits(self, prompt: Prompt) -> np.ndarray:
        """`logits`, awaited."""
        ids = self._ids(prompt)
        return await asyncio.wrap_future(self._submit(lambda: self._session.logits(ids)))

    # -- the owner thread ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel what runs, end the owner thread and free the model."""
        if self._shut.alive:
            for cancel in list(self._running):
                cancel.set()
            self._owner.submit(lambda: delattr(self, "_session"))
            self._shut()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, job: Callable[[], Any]) -> Any:
        if not self._shut.alive:
            raise BimetalError(f"{self.path.name} is closed; load it again")
        return self._owner.submit(job)

    def _ids(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(id) for id in prompt]

    def _template(self, tools: Any) -> str | None:
        """The template's source; some models have one of their own for conversations with tools."""
        source = self.tokenizer.chat_template
        if tools:
            schemas(tools)  # refuses what is no tool
            source = self.tokenizer.chat_templates.get("tool_use", source)
            if source is not None and "tools" not in source:
                raise UsageError("the model's chat template has no place for tools; leave them out")
        return source

    def _chat(
        self, messages: Sequence[Message], options: dict[str, Any]
    ) -> tuple[list[int], dict[str, Any], ReplyParser, int]:
        """The prompt's ids, the options that are left, what takes the reply apart, and how many ids the next turn's
        prompt will begin with: templates leave out what an assistant thought before."""
        tools, think = options.pop("tools", None), options.pop("think", None)
        template = options.pop("template", {})
        text = self.render(messages, tools, think, **template)
        parser = ReplyParser(self._template(tools) or "", text, tools)
        ids = self.tokenizer.encode(text, add_special=False)
        try:
            turn = {"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}
            later = self.render([*messages, *turn], tools, think, **template)
        except BimetalError:  # nobody asked for that turn
            return ids, options, parser, len(ids)
        pairs = zip(ids, self.tokenizer.encode(later, add_special=False), strict=False)
        shared = 0 if later.startswith(text) else sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return ids, options, parser, shared or len(ids)

    def _speculation(self, options: dict[str, Any]) -> Speculation:
        kind = options.pop("spec", None) or ("tree" if self.draft_path else "off")
        budget, top_k = options.pop("tree_budget", None), options.pop("tree_topk", Speculation.top_k)
        seed_chain = options.pop("chain_seed", False)
        given = {"tree_budget": budget is not None, "chain_seed": seed_chain, "tree_topk": top_k != Speculation.top_k}
        for name in (name for name, asked in given.items() if asked):
            if kind == "off":
                raise UsageError(f"{name} is for guessing ahead, which is off; give a draft or choose spec lookup")
            if name != "tree_budget" and "tree" not in kind:
                raise UsageError(f"{name} is for trees, and spec is {kind}")
        return Speculation(kind, budget, top_k, seed_chain)

    def _starter(
        self, ids: list[int], options: dict[str, Any], parser: ReplyParser | None = None, shared: int | None = None
    ) -> Callable[[Callable[[Any], None], threading.Event], None]:
        """Check the options now, in the caller's thread; what remains puts pieces, then _DONE or an exception."""
        max_tokens, stop = options.pop("max_tokens", None), options.pop("stop", ())
        logprobs, on_prefill = options.pop("logprobs", None), options.pop("on_prefill", None)
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        speculation = self._speculation(options)
        try:
            sampling = Sampling(**options)
        except TypeError:
            others = ("max_tokens", "stop", "logprobs", "on_prefill", "spec", "tree_budget", "tree_topk", "chain_seed")
            known = ", ".join((*Sampling.__dataclass_fields__, *others))
            unknown = next(name for name in options if name not in Sampling.__dataclass_fields__)
            raise UsageError(f"{unknown} is not an option of generate; supported: {known}") from None

        def start(put: Callable[[Any], None], cancel: threading.Event) -> None:
            def job() -> None:
                try:
                    pieces = self._session.stream(
                        ids, sampling, max_tokens, stop, logprobs, cancel, on_prefill, speculation, shared
                    )
                    for piece in pieces if parser is None else take_apart(pieces, parser):
                        put(piece)
                    put(_DONE)
                except BaseException as error:
                    put(error)

            self._running.add(cancel)
            self._submit(job)

        return start
