"""OpenAI Responses: requests, response objects, and the order of a stream's events."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from common.rules import whole
from generate.server.chat import MOST_LOGPROBS
from generate.server.constraints import budget_of, ending_of, grammar_of, openai_choice, openai_format
from generate.server.conversation import Message, arrange
from generate.server.custom_tools import arguments_object, input_of
from generate.server.errors import ApiError
from generate.server.events import (
    Call,
    CallArguments,
    CallBegin,
    CallEnd,
    Event,
    Failed,
    Finish,
    Reasoning,
    Text,
    TextPart,
    Usage,
    Whole,
)
from generate.server.facts import Facts
from generate.server.fields import OBJECT, Fields, limit, sampling
from generate.server.response_items import Tool, messages_of, reply_message, tools_of
from generate.server.store import Store, Stored
from generate.server.task import Chat, Task
from generate.server.thinking import effort_options
from generate.server.wire import Frame, Parsed, chat_logprobs, dumps, named_sse, new_id, now

ECHOED: dict[str, Any] = {  # entries of a request that its response repeats, and their defaults
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
}
PREFIXES = {"function_call": "fc_", "custom_tool_call": "ctc_", "tool_search_call": "tsc_"}  # of the ids of calls


@dataclass(frozen=True)
class Head:
    """Fields that a response repeats from its request, and settings of its writer.

    capped     the reply has a limit beside the context
    summarize  reasoning is sent as a summary
    store      the store that keeps the response; None: it is not kept
    messages   the conversation so far, without instructions
    """

    id: str
    created: int
    facts: Facts
    echoed: dict[str, Any]
    tools: dict[str, Tool]
    logprobs: bool
    capped: bool
    summarize: bool
    messages: list[Message]
    store: Store | None


def parse(store: Store, fields: Fields, facts: Facts) -> Parsed:
    """Read a request; raises ApiError."""
    fields.text("model")
    for key in ("conversation", "prompt"):
        if fields.has(key):
            raise fields.refuse(key, "it is not supported")
    if fields.flag("background", False):
        raise fields.refuse("background", "it is not supported")
    options = sampling(fields)
    options |= limit(fields, "max_output_tokens")
    include = fields.values.get("include") or []
    top = fields.take("top_logprobs", whole(0, MOST_LOGPROBS))
    logprobs = top is not None or (isinstance(include, list) and "message.output_text.logprobs" in include)
    if logprobs:
        options["logprobs"] = top or 0
    text = fields.object("text")
    tools, named = tools_of(fields)
    choice, several = openai_choice(fields, tools), fields.flag("parallel_tool_calls", True)
    reasoning = fields.object("reasoning") or Fields({})
    rendering = effort_options(reasoning.text("effort"), facts)
    if seen := choice.shown(tools):
        rendering["tools"] = seen
    messages = messages_of(fields, store)
    if (previous := fields.text("previous_response_id")) is not None:
        messages = [*previous_messages(store, previous), *messages]
    instructions = fields.text("instructions")
    leading = [{"role": "system", "content": instructions}] if instructions else []
    form = openai_format(text.object("format") if text else None)
    grammar = grammar_of(facts, tools, choice, form, several)
    task = Task(
        [Chat(arrange([*leading, *messages], facts), rendering)],
        options,
        stream=fields.flag("stream", False),
        first_call_only=not several,
        grammar=grammar,
        budget=budget_of(reasoning, facts, reasoning.text("effort"), "max_tokens"),
        field="input",
        ending=ending_of(fields, facts, grammar),
    )
    fields.take("metadata", OBJECT)
    keeps = fields.flag("store", True)
    echoed = {key: completed(fields.values.get(key), default) for key, default in ECHOED.items()}
    head = Head(
        id=new_id("resp_"),
        created=now(),
        facts=facts,
        echoed=echoed,
        tools=named,
        logprobs=logprobs,
        capped=options.get("max_tokens", facts.limit) is not None,
        summarize=reasoning.has("summary"),
        messages=messages,
        store=store if keeps else None,
    )
    return Parsed(task, lambda _: Writer(head), lambda replies: whole_reply(head, replies))


def previous_messages(store: Store, id: str) -> list[Message]:
    """Return the conversation up to and with a stored response; raises ApiError."""
    try:
        return store.get(id).messages
    except ApiError as error:
        code = "previous_response_not_found"
        raise replace(error, message=f"previous {error}", code=code, param="previous_response_id") from None


def completed(given: Any, default: Any) -> Any:
    """Complete an entry of a request by the missing entries of its default; null counts as absent."""
    if isinstance(given, dict) and isinstance(default, dict):
        return given | {key: value for key, value in default.items() if given.get(key) is None}
    return default if given is None else given


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


def response_object(head: Head, status: str, output: Sequence[Any], **more: Any) -> dict[str, Any]:
    """Return a response; `more` replaces entries."""
    body = {"id": head.id, "object": "response", "created_at": head.created, "status": status, "error": None}
    body |= {"incomplete_details": None, "model": head.facts.name, "output": list(output), "usage": None}
    return body | head.echoed | more


@dataclass
class Item:
    """An output item that is being written.

    kind  "message", "reasoning", or that of a call in PREFIXES
    """

    kind: str
    id: str
    index: int
    call: CallBegin | None = None
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)


class Writer:
    """Writes events: an item begins, grows and ends before the next one; the last event holds the whole response."""

    ping = b": waiting\n\n"

    def __init__(self, head: Head):
        self.head, self.number = head, 0
        self.output: list[dict[str, Any]] = []
        self.open: Item | None = None
        self.frame: Frame  # of the text of the open message
        self.whole = Whole()

    def _event(self, kind: str, **values: Any) -> bytes:
        data = {"type": kind, "sequence_number": self.number} | values
        self.number += 1
        return named_sse(kind, data)

    def begin(self, tokens: int) -> Iterator[bytes]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=response_object(self.head, "in_progress", []))

    def push(self, index: int, event: Event) -> Iterator[bytes]:
        if not isinstance(event, Failed):
            self.whole.add(event)
        match event:
            case Reasoning(text) if text:
                yield from self._grow("reasoning", "rs_", text, ())
            case Text(text, logprobs) if text or (self.open and self.open.kind == "message"):
                yield from self._grow("message", "msg_", text, logprobs)
            case CallBegin(_, _, name):
                yield from self._begin(*call_kind(self.head, name), event)
            case CallArguments(_, text):
                assert self.open is not None
                self.open.text += text
                if self.open.kind == "function_call":
                    at = {"item_id": self.open.id, "output_index": self.open.index}
                    yield self._event("response.function_call_arguments.delta", **at, delta=text)
            case CallEnd():
                yield from self._end()
            case Finish():
                if lacks_message(self.whole):
                    yield from self._begin("message", "msg_")
                yield from self._end(status_of_last(event))
                yield self._finish(event)
            case Failed(error):
                yield from self._end("incomplete")
                what = {"code": error.code or "server_error", "message": error.message}
                yield self._event(
                    "response.failed", response=response_object(self.head, "failed", self.output, error=what)
                )

    def end(self) -> Iterator[bytes]:
        return iter(())

    def _begin(self, kind: str, prefix: str, call: CallBegin | None = None) -> Iterator[bytes]:
        yield from self._end()
        self.open = item = Item(kind, new_id(prefix), len(self.output), call)
        added = item_object(self.head, item, "in_progress")
        yield self._event("response.output_item.added", output_index=item.index, item=added)
        at = {"item_id": item.id, "output_index": item.index}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self._event("response.content_part.added", **at, content_index=0, part=part)
            self.frame = Frame(partial(_delta, at), 2)
        elif kind == "reasoning" and self.head.summarize:
            part = {"type": "summary_text", "text": ""}
            yield self._event("response.reasoning_summary_part.added", **at, summary_index=0, part=part)

    def _grow(self, kind: str, prefix: str, text: str, logprobs: Sequence[Any]) -> Iterator[bytes]:
        if self.open is None or self.open.kind != kind:
            yield from self._begin(kind, prefix)
        item = self.open
        assert item is not None
        item.text += text
        at: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
        if kind == "message" and not logprobs:
            yield self.frame.of(self.number, text)
            self.number += 1
        elif kind == "message":
            found = chat_logprobs(self.head.facts.tokenizer, logprobs)
            item.logprobs += found
            yield self._event("response.output_text.delta", **at, content_index=0, delta=text, logprobs=found)
        elif self.head.summarize:
            yield self._event("response.reasoning_summary_text.delta", **at, summary_index=0, delta=text)
        else:
            yield self._event("response.reasoning_text.delta", **at, content_index=0, delta=text)

    def _end(self, status: str = "completed") -> Iterator[bytes]:
        item, self.open = self.open, None
        if item is None:
            return
        at: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
        done = item_object(self.head, item, status)
        if item.kind == "message":
            yield self._event(
                "response.output_text.done", **at, content_index=0, text=item.text, logprobs=item.logprobs
            )
            yield self._event("response.content_part.done", **at, content_index=0, part=done["content"][0])
        elif item.kind == "reasoning" and self.head.summarize:
            yield self._event("response.reasoning_summary_text.done", **at, summary_index=0, text=item.text)
            yield self._event("response.reasoning_summary_part.done", **at, summary_index=0, part=done["summary"][0])
        elif item.kind == "reasoning":
            yield self._event("response.reasoning_text.done", **at, content_index=0, text=item.text)
        elif item.kind == "function_call":
            at["name"] = done["name"]
            yield self._event("response.function_call_arguments.done", arguments=item.text, **at)
        elif item.kind == "custom_tool_call":
            yield self._event("response.custom_tool_call_input.delta", **at, delta=done["input"])
            yield self._event("response.custom_tool_call_input.done", **at, input=done["input"])
        self.output.append(done)
        yield self._event("response.output_item.done", output_index=item.index, item=done)

    def _finish(self, finish: Finish) -> bytes:
        status, more = ended(finish)
        if finish.reason == "length" and not self.head.capped:  # an agent then compacts its conversation
            what = {"code": "context_length_exceeded", "message": "the reply filled the context of the model"}
            status, more = "failed", {"error": what}
        body = response_object(self.head, status, self.output, usage=usage_object(finish.usage), **more)
        keep(self.head, body, self.whole)
        return self._event(f"response.{status}", response=body)


def _delta(item: dict[str, Any], number: str, text: str) -> bytes:
    """Return an event that adds `text` to a message, without log-probabilities; `item` names the output item."""
    kind = "response.output_text.delta"
    more = {"content_index": 0, "delta": text, "logprobs": []}
    return named_sse(kind, {"type": kind, "sequence_number": number} | item | more)


def lacks_message(reply: Whole) -> bool:
    """Test whether a finished reply gets an empty message: one without text and calls, unless cut while it reasoned."""
    return not (reply.text or reply.calls or (reply.reasoning and reply.finish.reason == "length"))


def status_of_last(finish: Finish) -> str:
    """Return the status of the text or reasoning that a reply ends with; a call is whole."""
    return "incomplete" if finish.reason == "length" else "completed"


def ended(finish: Finish) -> tuple[str, dict[str, Any]]:
    """Return the status of a finished response, and the entries that it changes."""
    if finish.reason == "length":
        return "incomplete", {"incomplete_details": {"reason": "max_output_tokens"}}
    return "completed", {"completed_at": now()}


def item_object(head: Head, item: Item, status: str) -> dict[str, Any]:
    """Return an output item, empty while it is in progress."""
    body: dict[str, Any] = {"type": item.kind, "id": item.id, "status": status}
    if item.kind == "message":
        part = {"type": "output_text", "text": item.text, "annotations": [], "logprobs": item.logprobs}
        return body | {"role": "assistant", "content": [] if status == "in_progress" else [part]}
    if item.kind == "reasoning":
        parts = [] if status == "in_progress" else [item.text]
        if head.summarize:
            return body | {"summary": [{"type": "summary_text", "text": text} for text in parts]}
        return body | {"summary": [], "content": [{"type": "reasoning_text", "text": text} for text in parts]}
    assert item.call is not None
    body["call_id"] = item.call.id
    if item.kind == "tool_search_call":
        return body | {"execution": "client", "arguments": arguments_object(item.text)}
    tool = head.tools.get(item.call.name, Tool(item.call.name))
    body["name"] = tool.name
    if tool.namespace is not None:
        body["namespace"] = tool.namespace
    return body | ({"arguments": item.text} if item.kind == "function_call" else {"input": input_of(item.text)})


def call_kind(head: Head, name: str) -> tuple[str, str]:
    """Return the kind of the output item that calls a function, and the prefix of its id."""
    kind = head.tools.get(name, Tool(name)).kind
    return kind, PREFIXES[kind]


def keep(head: Head, body: dict[str, Any], reply: Whole) -> None:
    """Store a response for requests that continue it."""
    if head.store is not None:
        messages = [*head.messages, reply_message(reply.text, reply.reasoning, reply.calls)]
        head.store.put(head.id, Stored(body, messages, len(dumps([body, messages]))))


def whole_item(head: Head, part: TextPart | Call) -> Item:
    """Return the output item of a part of a whole reply."""
    if isinstance(part, Call):
        kind, prefix = call_kind(head, part.name)
        return Item(kind, new_id(prefix), 0, CallBegin(0, part.id, part.name), part.arguments)
    if part.kind == "reasoning":
        return Item("reasoning", new_id("rs_"), 0, text=part.text)
    logprobs = chat_logprobs(head.facts.tokenizer, part.logprobs) if head.logprobs else []
    return Item("message", new_id("msg_"), 0, text=part.text, logprobs=logprobs)


def whole_reply(head: Head, replies: Sequence[Whole]) -> dict[str, Any]:
    """Return the body of a response that is not streamed."""
    reply = replies[0]
    parts = [part for part in reply.parts if isinstance(part, Call) or part.text]
    if lacks_message(reply):
        parts.append(TextPart("text"))
    status, more = ended(reply.finish)
    items = [item_object(head, whole_item(head, part), "completed") for part in parts]
    if isinstance(parts[-1], TextPart):
        items[-1]["status"] = status_of_last(reply.finish)
    body = response_object(head, status, items, usage=usage_object(reply.finish.usage), **more)
    keep(head, body, reply)
    return body
