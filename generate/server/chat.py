"""OpenAI Chat Completions."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from common.pieces import Stats
from common.rules import number, whole
from generate.server.constraints import budget_of, ending_of, form_of, grammar_of, openai_choice, openai_format
from generate.server.conversation import MOST_TOOLS, Message, arrange, messages_of, reply_begun, tools_of
from generate.server.custom_tools import input_of
from generate.server.errors import ApiError, envelope
from generate.server.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Event,
    Failed,
    Finish,
    Prompt,
    Reasoning,
    Text,
    Usage,
    Whole,
    total,
)
from generate.server.facts import Facts
from generate.server.fields import Fields, limit, priority, sampling, stops
from generate.server.task import Chat, Task
from generate.server.thinking import effort_options, options_of_begun, template_options, thinking_options
from generate.server.wire import Frame, Parsed, chat_logprobs, new_id, now, openai_usage, sse, timings

MOST_CHOICES = 128
MOST_LOGPROBS = 20
NEVER = -1e9  # bias of a token that must not come


@dataclass(frozen=True)
class Head:
    """Fields that all chunks of a reply share.

    custom  names of the tools whose calls are free text
    ids     token ids are sent
    """

    id: str
    created: int
    facts: Facts
    usage: bool
    logprobs: bool
    choices: int
    custom: Collection[str]
    ids: bool


def parse(fields: Fields, facts: Facts) -> Parsed:
    """Read a request; raises ApiError."""
    fields.text("model")
    options = sampling(fields) | stops(fields, "stop") | bias(fields, facts) | priority(fields)
    options |= limit(fields, "max_completion_tokens", "max_tokens", "n_predict")
    logprobs = fields.flag("logprobs", False)
    top = fields.take("top_logprobs", whole(0, MOST_LOGPROBS))
    if top is not None and not logprobs:
        raise fields.refuse("top_logprobs", "it needs logprobs to be true")
    if logprobs:
        options["logprobs"] = top or 0
    _refuse_unsupported(fields)
    tools = tools_of(fields)
    choice, several = openai_choice(fields, tools), fields.flag("parallel_tool_calls", True)
    effort = fields.text("reasoning_effort")
    rendering = effort_options(effort, facts) | thinking_options(fields, facts)
    rendering |= template_options(fields.object("chat_template_kwargs"), facts)
    if seen := choice.shown(tools):
        rendering["tools"] = seen
    stream = fields.flag("stream", False)
    streaming = fields.object("stream_options")
    n = fields.take("n", whole(1, MOST_CHOICES), 1)
    form = form_of(fields, openai_format(fields.object("response_format"), nested=True))
    grammar = grammar_of(facts, tools, choice, form, several)
    task = Task(
        prompts=[_conversation(fields, facts, rendering, grammar is not None)],
        options=options,
        n=n,
        stream=stream,
        first_call_only=not several,
        grammar=grammar,
        budget=_budget(fields, facts, effort),
        ending=ending_of(fields, facts, grammar),
        ids=fields.flag("return_token_ids", False),
    )
    usage = bool(streaming and streaming.flag("include_usage", False))
    head = Head(new_id("chatcmpl-"), now(), facts, usage, logprobs, n, custom_names(fields), task.ids)
    return Parsed(task, lambda _: Writer(head), lambda replies: whole_reply(head, replies))


def _conversation(fields: Fields, facts: Facts, rendering: dict[str, Any], constrained: bool) -> Chat:
    """Read the messages; as in vLLM, `continue_final_message` has the reply go on from the last one."""
    messages: Sequence[Message] = messages_of(fields)
    continues = fields.flag("continue_final_message", False)
    if not continues and fields.flag("add_generation_prompt") is False:
        raise fields.refuse("add_generation_prompt", "it goes with continue_final_message")
    begun = ""
    if continues:
        messages, begun = reply_begun(messages)
        if not begun:
            raise fields.refuse("continue_final_message", "the last of several messages must be text of the assistant")
        rendering = options_of_begun(rendering, facts, constrained, "messages")
    return Chat(arrange(messages, facts), rendering, begun)


def custom_names(fields: Fields) -> set[str]:
    """Return the names of the custom tools among those of a request."""
    return {
        tool.values["custom"]["name"] for tool in fields.objects("tools", MOST_TOOLS) if tool.text("type") == "custom"
    }


def _budget(fields: Fields, facts: Facts, effort: str | None) -> int | None:
    thinking = fields.object("thinking")
    if thinking is not None and thinking.has("budget_tokens"):
        return budget_of(thinking, facts, effort, "budget_tokens")
    return budget_of(fields, facts, effort, "thinking_budget", "reasoning_budget")


def bias(fields: Fields, facts: Facts) -> dict[str, Any]:
    """Return the `logit_bias` of a request: token ids, as text, to numbers from -100 to 100; or llama.cpp's list."""
    if isinstance(fields.values.get("logit_bias"), list):
        return _paired_bias(fields.values["logit_bias"], facts)
    given = fields.object("logit_bias")
    if given is None or not given.values:
        return {}
    rule = number("a number from -100 to 100", lambda x: -100 <= x <= 100)
    found = {}
    for key in given.values:
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < facts.vocab):
            raise ApiError(
                400,
                f"logit_bias has the key {key!r:.80}; it must be a token id below {facts.vocab}",
                param="logit_bias",
            )
        found[int(key)] = given.take(key, rule, 0.0)
    return {"logit_bias": found}


def _paired_bias(pairs: list[Any], facts: Facts) -> dict[str, Any]:
    """Return the bias of pairs of a token id or text and a number; the number false forbids the tokens."""
    found: dict[int, float] = {}
    for at, pair in enumerate(pairs):
        match pair:
            case [str(text), False | int() | float() as value]:
                ids = facts.tokenizer.encode_plain(text)
            case [int(id), False | int() | float() as value] if 0 <= id < facts.vocab:
                ids = [id]
            case _:
                what = f"a token id below {facts.vocab} or text, and a number or false"
                raise ApiError(400, f"logit_bias[{at}] is {pair!r:.80}; it must be {what}", param="logit_bias")
        found |= dict.fromkeys(ids, NEVER if value is False else float(value))
    return {"logit_bias": found} if found else {}


def _refuse_unsupported(fields: Fields) -> None:
    """Refuse fields that must not be ignored."""
    if fields.has("modalities") and fields.values["modalities"] != ["text"]:
        raise fields.refuse("modalities", "only text is supported")
    if fields.has("audio"):
        raise fields.refuse("audio", "only text is supported")
    for key in ("functions", "function_call"):
        if fields.has(key) and fields.values[key] not in ([], "none", "auto"):
            raise fields.refuse(key, "it is not supported; give functions as tools, and choose by tool_choice")
    if fields.has("web_search_options"):
        raise fields.refuse("web_search_options", "it is not supported; leave it out")


class Writer:
    """Writes chunks: the role first, then the reply, one finish_reason per choice, and the usage if requested."""

    ping = b": waiting\n\n"

    def __init__(self, head: Head):
        self.head = head
        self.frames: dict[tuple[int, str], Frame] = {}
        self.custom: dict[tuple[int, int], str] = {}  # arguments of open calls, by choice and call
        self.usages: dict[int, Usage] = {}
        self.stats: Stats | None = None
        self.failed = False
        self.none = {"usage": None} if head.usage else {}
        self.base = {
            "id": head.id,
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": head.facts.name,
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish: str | None = None,
        logprobs: Any = None,
        ids: Sequence[int] = (),
        **more: Any,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        if self.head.ids:
            choice["token_ids"] = ids
        return sse(self.base | {"choices": [choice]} | more | self.none)

    def _frame(self, index: int, *keys: str) -> Frame:
        """Return a template of the chunks of choice `index` whose delta has texts under `keys`."""
        if (index, keys[0]) not in self.frames:

            def chunk(*texts: str) -> bytes:
                return self._chunk(index, dict(zip(keys, texts, strict=True)))

            self.frames[index, keys[0]] = Frame(chunk, len(keys))
        return self.frames[index, keys[0]]

    def _texts(self, index: int, part: Text | Reasoning, *keys: str) -> bytes:
        """Write a chunk whose delta has a text under each of `keys`, with log-probabilities and ids if requested."""
        if not (self.head.logprobs or self.head.ids):
            return self._frame(index, *keys).of(*[part.text] * len(keys))
        found = None
        if self.head.logprobs:
            found = {"content": chat_logprobs(self.head.facts.tokenizer, part.logprobs), "refusal": None}
        return self._chunk(index, dict.fromkeys(keys, part.text), logprobs=found, ids=part.tokens)

    def begin(self, tokens: int) -> Iterator[bytes]:
        for index in range(self.head.choices):
            yield self._chunk(index, {"role": "assistant", "content": ""})
            self._frame(index, "content")  # built before the first token

    def push(self, index: int, event: Event) -> Iterator[bytes]:
        match event:
            case Prompt(ids) if index == 0:
                yield self._chunk(index, {}, prompt_token_ids=ids)
            case Text():
                yield self._texts(index, event, "content")
            case Reasoning():
                yield self._texts(index, event, "reasoning_content", "reasoning")
            case CallBegin(at, id, name):
                if name in self.head.custom:
                    self.custom[index, at] = ""
                yield self._chunk(index, {"tool_calls": [{"index": at, **call_object(self.head, id, name, "")}]})
            case CallArguments(at, text) if (index, at) in self.custom:
                self.custom[index, at] += text
            case CallArguments(at, text):
                yield self._chunk(index, {"tool_calls": [{"index": at, "function": {"arguments": text}}]})
            case CallEnd(at) if (index, at) in self.custom:
                text = input_of(self.custom.pop((index, at)))
                yield self._chunk(index, {"tool_calls": [{"index": at, "custom": {"input": text}}]})
            case Finish(reason, usage):
                self.usages[index], self.stats = usage, event.stats
                yield self._chunk(index, {}, reason, ids=event.tokens)
            case Failed(error):
                self.failed = True
                yield sse(envelope(error, "openai", ""))

    def end(self) -> Iterator[bytes]:
        if self.head.usage and not self.failed:
            usage = total(self.usages, self.head.choices)
            figures = {"timings": timings(self.stats, usage)} if self.stats else {}
            yield sse(self.base | {"choices": [], "usage": openai_usage(usage)} | figures)
        yield b"data: [DONE]\n\n"


def call_object(head: Head, id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call of a message; a custom tool's holds free text in place of arguments."""
    if name in head.custom:
        return {"id": id, "type": "custom", "custom": {"name": name, "input": input_of(arguments)}}
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def whole_reply(head: Head, replies: Sequence[Whole]) -> dict[str, Any]:
    """Return the body of a reply that is not streamed."""
    choices = []
    usage = total({index: reply.finish.usage for index, reply in enumerate(replies)}, head.choices)
    for index, reply in enumerate(replies):
        message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
        if reply.reasoning:
            message |= {"reasoning_content": reply.reasoning, "reasoning": reply.reasoning}
        if reply.calls:
            message["content"] = reply.text or None
            message["tool_calls"] = [call_object(head, call.id, call.name, call.arguments) for call in reply.calls]
        logprobs = None
        if head.logprobs:
            logprobs = {"content": chat_logprobs(head.facts.tokenizer, reply.logprobs), "refusal": None}
        choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": reply.finish.reason})
        if head.ids:
            choices[-1]["token_ids"] = reply.tokens
    body = {"id": head.id, "object": "chat.completion", "created": head.created, "model": head.facts.name}
    body |= {"choices": choices, "usage": openai_usage(usage)}
    body |= {"prompt_token_ids": replies[0].prompt} if head.ids else {}
    stats = replies[-1].finish.stats
    return body | ({"timings": timings(stats, usage)} if stats else {})
