"""Anthropic Messages: requests, whole replies, and the order of a stream's events."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from common.amounts import counted
from common.rules import Rule, one_of, whole
from generate.server.client_tools import tool_of
from generate.server.constraints import anthropic_choice, budget_of, ending_of, grammar_of, openai_format
from generate.server.conversation import MOST_MESSAGES, MOST_PARTS, MOST_TOOLS, Message, arrange, reply_begun
from generate.server.errors import ApiError, envelope
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
from generate.server.fields import LIST, OBJECT, OPTION_RULES, TEXT, TEXT_OR_LIST, Fields, sampling, stops
from generate.server.task import Chat, Task
from generate.server.thinking import KINDS, effort_options, options_of_begun, switch_options
from generate.server.wire import Frame, Parsed, named_sse, new_id

BILLING = "x-anthropic-billing-header:"  # a line that differs between requests, and is removed
HOSTED = {  # blocks that only Anthropic's servers run or read
    *("server_tool_use", "mcp_tool_use", "mcp_tool_result", "redacted_thinking"),
    *(f"{tool}_tool_result" for tool in ("web_search", "web_fetch", "code_execution", "tool_search")),
    *(f"{tool}_code_execution_tool_result" for tool in ("bash", "text_editor")),
}
STOPS = Rule(
    "a list of texts, each of at least one character", lambda value: OPTION_RULES["stop"].convert(LIST.convert(value))
)


@dataclass(frozen=True)
class Head:
    """Fields that the events of a reply share.

    max_tokens  of the request
    thoughts    whether thinking is sent
    """

    id: str
    facts: Facts
    max_tokens: int
    thoughts: bool


def parse(fields: Fields, facts: Facts) -> Parsed:
    """Read a request; raises ApiError."""
    most = fields.need("max_tokens", whole(1))
    task, thoughts = task_of(fields, facts)
    head = Head(new_id("msg_"), facts, most, thoughts)
    return Parsed(task, lambda request_id: Writer(head, request_id), lambda replies: whole_reply(head, replies[0]))


def task_of(fields: Fields, facts: Facts) -> tuple[Task, bool]:
    """Parse a request; return also whether its client reads the thinking. `max_tokens` may be absent."""
    fields.text("model")
    _refuse_unsupported(fields)
    fields.take("stop_sequences", STOPS)
    options = sampling(fields) | stops(fields, "stop_sequences")
    fields.option(options, "max_tokens")
    tools = [known for tool in fields.objects("tools", MOST_TOOLS) if (known := tool_of(tool)) is not None]
    rendering, thoughts = _thinking(fields, facts)
    choice = anthropic_choice(fields, tools)
    several = not (fields.object("tool_choice") or Fields({})).flag("disable_parallel_tool_use", False)
    if seen := choice.shown(tools):
        rendering["tools"] = seen
    output = fields.object("output_config") or Fields({})
    form = output.object("format") or fields.object("output_format")  # the present and the earlier place
    budget = budget_of(fields.object("thinking") or Fields({}), facts, output.text("effort"), "budget_tokens")
    grammar = grammar_of(facts, tools, choice, openai_format(form), several)
    messages, begun = reply_begun(messages_of(fields))
    if begun:
        rendering = options_of_begun(rendering, facts, grammar is not None, "messages")
    task = Task(
        [Chat(arrange([*_system(fields), *messages], facts), rendering, begun)],
        options,
        stream=fields.flag("stream", False),
        first_call_only=not several,
        grammar=grammar,
        budget=budget,
        ending=ending_of(fields, facts, grammar),
        whole_calls=True,
    )
    return task, thoughts


def _refuse_unsupported(fields: Fields) -> None:
    """Refuse fields that must not be ignored."""
    if servers := fields.take("mcp_servers", LIST):  # its entries hold keys: errors must not repeat them
        held = counted(len(servers), "entry", "entries")
        words = "MCP servers are called by the client only; give their functions as tools"
        raise ApiError(400, f"mcp_servers has {held}; {words}", param="mcp_servers")
    if fields.has("container") and fields.values["container"] not in ("", {}):
        raise fields.refuse("container", "no code is run here; leave it out")


def _thinking(fields: Fields, facts: Facts) -> tuple[dict[str, Any], bool]:
    rendering: dict[str, Any] = {}
    if output := fields.object("output_config"):
        rendering = effort_options(output.text("effort"), facts)
    thinking = fields.object("thinking")
    if thinking is None:
        return rendering, True
    kind = thinking.need("type", one_of(*KINDS))
    return rendering | switch_options(kind != "disabled", facts), thinking.text("display") != "omitted"


def _system(fields: Fields) -> list[Message]:
    """Return the system prompt, without the billing line that Claude Code sends first."""
    given = fields.values.get("system")
    if given is None or isinstance(given, str):
        texts = [given or ""]
    else:
        texts = [part.need("text", TEXT) for part in fields.objects("system", MOST_PARTS, TEXT_OR_LIST)]
    kept = [text.partition("\n")[2] if text.startswith(BILLING) else text for text in texts]
    text = "\n".join(text for text in kept if text)
    return [{"role": "system", "content": text}] if text else []


def messages_of(fields: Fields) -> list[Message]:
    """Return the messages in the form of Chat Completions; each tool result is a message of its own."""
    if not fields.need("messages", LIST):
        raise fields.refuse("messages", "it must have at least one message")
    out: list[Message] = []
    for message in fields.objects("messages", MOST_MESSAGES):
        role = message.choice("role", "user", "assistant", "system") or message.need("role", TEXT)
        content = message.values.get("content")
        if content is None or isinstance(content, str):
            out.append({"role": role, "content": content or ""})
        elif role == "assistant":
            out.append(_assistant(message))
        else:
            out += _user(message, role)
    return out


def _assistant(message: Fields) -> Message:
    texts, thoughts, calls = [], [], []
    for block in message.objects("content", MOST_PARTS, TEXT_OR_LIST):
        kind = block.need("type", TEXT)
        if kind == "text":
            texts.append(block.need("text", TEXT))
        elif kind == "thinking":
            thoughts.append(block.text("thinking", ""))
        elif kind == "tool_use":
            arguments = json.dumps(block.take("input", OBJECT, {}), ensure_ascii=False)
            function = {"name": block.need("name", TEXT), "arguments": arguments}
            calls.append({"id": block.text("id", ""), "type": "function", "function": function})
        elif kind not in HOSTED:
            raise block.refuse("type", "an assistant's block must be text, thinking or tool_use")
    out: Message = {"role": "assistant", "content": "\n".join(texts)}
    out |= {"reasoning_content": "\n".join(thoughts)} if any(thoughts) else {}
    return out | ({"tool_calls": calls} if calls else {})


def _user(message: Fields, role: str) -> list[Message]:
    out: list[Message] = []
    for block in message.objects("content", MOST_PARTS, TEXT_OR_LIST):
        kind = block.need("type", TEXT)
        if kind == "tool_result":
            out.append({"role": "tool", "tool_call_id": block.text("tool_use_id", ""), "content": _result(block)})
            continue
        text = _text(block)
        if out and out[-1]["role"] == role:
            out[-1]["content"] += f"\n{text}"
        else:
            out.append({"role": role, "content": text})
    return out or [{"role": role, "content": ""}]


def _result(block: Fields) -> str:
    content = block.values.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_text(part) for part in block.objects("content", MOST_PARTS, TEXT_OR_LIST))


def _text(block: Fields) -> str:
    """Return the text of a block; a document or a search result may hold plain text."""
    kind = block.need("type", TEXT)
    if kind == "document" and (source := block.object("source")):
        return "\n".join(filter(None, [block.text("title"), block.text("context"), _document(source)]))
    if kind == "search_result":
        texts = [_text(part) for part in block.objects("content", MOST_PARTS)]
        return "\n".join([block.need("title", TEXT), block.need("source", TEXT), *texts])
    if kind != "text":
        raise block.refuse("type", "only text is supported")
    return str(block.need("text", TEXT))


def _document(source: Fields) -> str:
    """Return the text of a document's source."""
    kind = source.text("type")
    if kind == "text":
        return str(source.need("data", TEXT))
    if kind != "content":
        raise source.refuse("type", "only documents of plain text are supported")
    content = source.values.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(_text(part) for part in source.objects("content", MOST_PARTS, TEXT_OR_LIST))


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return usage as Anthropic counts it: `input_tokens` are those that were not cached."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


def stop_of(head: Head, finish: Finish) -> dict[str, Any]:
    """Return the entries `stop_reason` and `stop_sequence`, by which Messages says why a reply ended."""
    if finish.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop}
    reason = {"stop": "end_turn", "tool_calls": "tool_use"}.get(finish.reason, "max_tokens")
    if finish.reason == "length" and finish.usage.completion < head.max_tokens:
        reason = "model_context_window_exceeded"
    return {"stop_reason": reason, "stop_sequence": None}


class Writer:
    """Writes events: one block is open at a time, and indices rise from 0."""

    ping = named_sse("ping", {"type": "ping"})

    def __init__(self, head: Head, request_id: str):
        self.head, self.request_id, self.index, self.kind = head, request_id, -1, ""
        self.frame: Frame

    def begin(self, tokens: int) -> Iterator[bytes]:
        usage = usage_object(Usage(tokens))
        message: dict[str, Any] = {
            "id": self.head.id,
            "type": "message",
            "role": "assistant",
            "model": self.head.facts.name,
        }
        message |= {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield named_sse("message_start", {"type": "message_start", "message": message})

    def push(self, index: int, event: Event) -> Iterator[bytes]:
        match event:
            case Reasoning(text) if text and self.head.thoughts:
                yield from self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                yield self.frame.of(text)
            case Text(text) if text:
                yield from self._begin("text", {"type": "text", "text": ""})
                yield self.frame.of(text)
            case CallBegin(_, id, name):
                yield from self._end()
                yield from self._begin("tool_use", {"type": "tool_use", "id": tool_id(id), "name": name, "input": {}})
            case CallArguments(_, text):
                yield self._delta({"type": "input_json_delta", "partial_json": text})
            case CallEnd():
                yield from self._end()
            case Finish():
                yield from self._end()
                delta, usage = stop_of(self.head, event), usage_object(event.usage)
                yield named_sse("message_delta", {"type": "message_delta", "delta": delta, "usage": usage})
                yield named_sse("message_stop", {"type": "message_stop"})
            case Failed(error):
                yield named_sse("error", envelope(error, "anthropic", self.request_id))

    def end(self) -> Iterator[bytes]:
        return iter(())

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        """Open a block, unless one of the kind is open."""
        if self.kind == kind:
            return
        yield from self._end()
        self.index, self.kind = self.index + 1, kind
        if kind == "text":
            self.frame = Frame(lambda text: self._delta({"type": "text_delta", "text": text}))
        elif kind == "thinking":
            self.frame = Frame(lambda text: self._delta({"type": "thinking_delta", "thinking": text}))
        start = {"type": "content_block_start", "index": self.index, "content_block": block}
        yield named_sse("content_block_start", start)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_sse("content_block_delta", {"type": "content_block_delta", "index": self.index, "delta": delta})

    def _end(self) -> Iterator[bytes]:
        if self.kind:
            if self.kind == "thinking":
                yield self._delta({"type": "signature_delta", "signature": ""})
            self.kind = ""
            yield named_sse("content_block_stop", {"type": "content_block_stop", "index": self.index})


def tool_id(id: str) -> str:
    return f"toolu_{id.removeprefix('call_')}"


def is_shown(head: Head, part: TextPart) -> bool:
    """Test whether a whole reply has a block of a part."""
    return bool(part.text) and (head.thoughts or part.kind == "text")


def part_block(part: TextPart | Call) -> dict[str, Any]:
    """Return the block of a part of a whole reply."""
    if isinstance(part, Call):
        return {"type": "tool_use", "id": tool_id(part.id), "name": part.name, "input": json.loads(part.arguments)}
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    return {"type": "thinking", "thinking": part.text, "signature": ""}


def whole_reply(head: Head, reply: Whole) -> dict[str, Any]:
    """Return the body of a reply that is not streamed."""
    content = [part_block(part) for part in reply.parts if isinstance(part, Call) or is_shown(head, part)]
    body: dict[str, Any] = {"id": head.id, "type": "message", "role": "assistant", "model": head.facts.name}
    return body | {"content": content} | stop_of(head, reply.finish) | {"usage": usage_object(reply.finish.usage)}
