"""A part of Ollama's API: chat, generate, and the requests of its clients before these."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from common.infill import Gap
from common.pieces import Logprob
from common.rules import FINITE, Rule, many, whole
from generate import __version__
from generate.server.body import read_json
from generate.server.chat import MOST_LOGPROBS
from generate.server.constraints import ToolChoice, ending_of, grammar_of, ollama_format, text_grammar_of
from generate.server.conversation import MOST_MESSAGES, Message, arrange, calls_of, reply_begun, tools_of
from generate.server.errors import envelope
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
    Whole,
)
from generate.server.facts import Facts
from generate.server.fields import TEXT, Fields, limit, sampling, stops
from generate.server.infill import check_fim
from generate.server.task import Chat, Task
from generate.server.thinking import effort_options, options_of_begun, switch_options
from generate.server.wire import Frame, Parsed, chat_logprobs, dumps

VERSION = "0.13.5"  # of the implemented API; clients require a minimum
MEDIA = "application/x-ndjson"
DURATION = re.compile(r"[+-]?(0|(([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h))+)")


def _lasts(value: Any) -> bool:
    """Test whether a `keep_alive`, in seconds or as DURATION, keeps a model loaded."""
    if not isinstance(value, str):
        return bool(FINITE.convert(value) != 0)
    if not DURATION.fullmatch(value):
        raise ValueError
    return re.search("[1-9]", value) is not None


KEEP_ALIVE = Rule("seconds, or a duration such as '5m'", _lasts)


@dataclass(frozen=True)
class Head:
    """Fields that the lines of a reply share.

    model     as the client named it
    chat      the reply is a message; else it is a text
    logprobs  log-probabilities are sent
    kept      the client requests that the model stays loaded
    ids       the answer has the token ids of prompt and reply, which the next request may send back as its context
    """

    model: str
    chat: bool
    logprobs: bool
    kept: bool
    facts: Facts
    ids: bool


def parse_chat(fields: Fields, facts: Facts) -> Parsed:
    """Read a request of /api/chat; raises ApiError."""
    messages = [_message(message) for message in fields.objects("messages", MOST_MESSAGES)]
    rendering = _rendering(fields, facts)
    if tools := tools_of(fields, ["function"]):
        rendering["tools"] = tools
    head = _head(fields, facts, chat=True, ids=False)
    if not messages:
        return _parsed(fields, facts, head, None)
    kept, begun = reply_begun(messages)
    if begun:
        rendering = options_of_begun(rendering, facts, ollama_format(fields) is not None, "messages")
    return _parsed(fields, facts, head, Chat(arrange(kept, facts), rendering, begun))


def parse_generate(fields: Fields, facts: Facts) -> Parsed:
    """Read a request of /api/generate; raises ApiError."""
    for key in ("template", "images"):
        if fields.values.get(key):
            raise fields.refuse(key, "it is not supported")
    prompt, system = fields.text("prompt", ""), fields.text("system", "")
    raw, suffix = fields.flag("raw", False), fields.text("suffix")
    before = fields.take(
        "context", many(f"token ids of an earlier answer, below {facts.vocab}", whole(0, facts.vocab - 1)), ()
    )
    if before and (raw or suffix):
        raise fields.refuse("context", f"it does not go with {'raw' if raw else 'suffix'}")
    head = _head(fields, facts, chat=False, ids=not (raw or suffix))
    if suffix:
        check_fim(facts.tokenizer, 400, "suffix")
        if system:
            raise fields.refuse("system", "it does not go with suffix, with which the prompt has no messages")
        return _parsed(fields, facts, head, Gap(prompt, suffix))
    if not prompt:
        return _parsed(fields, facts, head, None)
    if raw or not facts.template:
        text = f"{system}{prompt}"
        return _parsed(fields, facts, head, [*before, *facts.tokenizer.encode(text, False)] if before else text)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    return _parsed(fields, facts, head, Chat(arrange(messages, facts), _rendering(fields, facts), before=before))


def _head(fields: Fields, facts: Facts, chat: bool, ids: bool) -> Head:
    model = str(fields.text("model") or fields.text("name") or "")
    return Head(model, chat, fields.flag("logprobs", False), fields.take("keep_alive", KEEP_ALIVE, True), facts, ids)


def _message(fields: Fields) -> Message:
    role = fields.need("role", TEXT)
    if role not in ("system", "user", "assistant", "tool"):
        raise fields.refuse("role", "it must be system, user, assistant or tool")
    if fields.values.get("images"):
        raise fields.refuse("images", "only text is supported")
    message: Message = {"role": role, "content": fields.text("content", "")}
    if role == "tool" and (name := fields.text("tool_name")) is not None:
        message["name"] = name
    if role == "assistant":
        if thought := fields.text("thinking"):
            message["reasoning_content"] = thought
        if calls := calls_of(fields):
            message["tool_calls"] = calls
    return message


def _rendering(fields: Fields, facts: Facts) -> dict[str, Any]:
    think = fields.values.get("think")
    if isinstance(think, str):
        return effort_options(think, facts)
    return switch_options(fields.flag("think"), facts)


def _parsed(fields: Fields, facts: Facts, head: Head, prompt: Chat | Gap | str | list[int] | None) -> Parsed:
    """Read a request's options; a request without a prompt only loads or unloads the model."""
    given = fields.object("options") or Fields({})
    if isinstance(seed := given.values.get("seed"), int) and seed < 0:
        given = Fields({**given.values, "seed": -1}, given.where)
    options = sampling(given) | stops(given, "stop")
    options |= {name: most or None for name, most in limit(given, "num_predict", minimum=0).items()}  # 0: no limit too
    top = fields.take("top_logprobs", whole(0, MOST_LOGPROBS), 0)
    if top and not head.logprobs:
        raise fields.refuse("top_logprobs", "it needs logprobs to be true")
    if head.logprobs:
        options["logprobs"] = top
    tools = prompt.options.get("tools", ()) if isinstance(prompt, Chat) else ()
    form = ollama_format(fields)
    chats = isinstance(prompt, Chat)
    grammar = grammar_of(facts, tools, ToolChoice("auto"), form, True) if chats else text_grammar_of(form)
    task = Task(
        [] if prompt is None else [prompt],
        options,
        stream=fields.flag("stream", True),
        grammar=grammar,
        ending=ending_of(given, facts, grammar),
        ids=head.ids,
        whole_calls=True,
    )
    return Parsed(task, lambda _: Writer(head), lambda replies: whole_reply(head, replies), MEDIA)


def line(head: Head, done: bool, created: str = "", **values: Any) -> dict[str, Any]:
    return {"model": head.model, "created_at": created or moment(), **values, "done": done}


def moment() -> str:
    """Return the time, as RFC 3339 writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def part(head: Head, text: str, thought: str = "", calls: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the part of the reply that a line holds."""
    if not head.chat:
        return {"response": text} | ({"thinking": thought} if thought else {})
    message: dict[str, Any] = {"role": "assistant", "content": text}
    message |= {"thinking": thought} if thought else {}
    return {"message": message | ({"tool_calls": list(calls)} if calls else {})}


def scores(head: Head, logprobs: Sequence[Logprob]) -> dict[str, Any]:
    """Return the log-probabilities that a line holds."""
    return {"logprobs": chat_logprobs(head.facts.tokenizer, logprobs)} if head.logprobs and logprobs else {}


def call_object(index: int, name: str, arguments: str) -> dict[str, Any]:
    return {"function": {"index": index, "name": name, "arguments": json.loads(arguments)}}


def figures(head: Head, finish: Finish | None) -> dict[str, Any]:
    """Return why a reply ended, its tokens, and its times in nanoseconds."""
    if finish is None:
        return {"done_reason": "load" if head.kept else "unload"}
    usage, stats = finish.usage, finish.stats
    prefill, decode = (0.0, 0.0) if stats is None else (stats.prefill_seconds, stats.decode_seconds)
    return {
        "done_reason": "length" if finish.reason == "length" else "stop",
        "total_duration": int(1e9 * (prefill + decode)),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt,
        "prompt_eval_duration": int(1e9 * prefill),
        "eval_count": usage.completion,
        "eval_duration": int(1e9 * decode),
    }


class Writer:
    """Writes a line per event; a tool call is one line."""

    def __init__(self, head: Head):
        self.head, self.failed = head, False
        self.finish: Finish | None = None
        self.ids: list[int] = []
        self.call = CallBegin(0, "", "")
        self.arguments = ""
        self.frame = Frame(lambda created, text: self._line(False, created=created, **part(head, text)), 2)

    @property
    def ping(self) -> bytes:
        return self.frame.of(moment(), "")  # lines of JSON have no comments

    def begin(self, tokens: int) -> Iterator[bytes]:
        return iter(())

    def push(self, index: int, event: Event) -> Iterator[bytes]:
        if isinstance(event, Prompt | Text | Reasoning | Finish):
            self.ids += event.tokens
        match event:
            case Text(text, logprobs) if logprobs:
                yield self._line(False, **part(self.head, text), **scores(self.head, logprobs))
            case Text(text) if text:
                yield self.frame.of(moment(), text)
            case Reasoning(text, logprobs) if text or logprobs:
                yield self._line(False, **part(self.head, "", text), **scores(self.head, logprobs))
            case CallBegin():
                self.call, self.arguments = event, ""
            case CallArguments(_, text):
                self.arguments += text
            case CallEnd(at):
                call = call_object(at, self.call.name, self.arguments)
                yield self._line(False, **part(self.head, "", "", [call]))
            case Finish():
                self.finish = event
            case Failed(error):
                self.failed = True
                yield dumps(envelope(error, "ollama", "")) + b"\n"

    def end(self) -> Iterator[bytes]:
        if not self.failed:
            context = {"context": self.ids} if self.ids else {}
            yield self._line(True, **part(self.head, ""), **context, **figures(self.head, self.finish))

    def _line(self, done: bool, **values: Any) -> bytes:
        return dumps(line(self.head, done, **values)) + b"\n"


def whole_reply(head: Head, replies: Sequence[Whole]) -> dict[str, Any]:
    """Return the body of a reply that is not streamed."""
    if not replies:
        return line(head, True, **part(head, ""), **figures(head, None))
    reply = replies[0]
    calls = [call_object(at, call.name, call.arguments) for at, call in enumerate(reply.calls)]
    shown = part(head, reply.text, reply.reasoning, calls) | scores(head, reply.logprobs)
    shown |= {"context": [*reply.prompt, *reply.tokens]} if head.ids else {}
    return line(head, True, **shown, **figures(head, reply.finish))


# -- the model ---------------------------------------------------------------------------------------------------------


def _details(facts: Facts) -> dict[str, Any]:
    family = facts.architecture
    form = "gguf" if facts.is_gguf else "safetensors"
    more = {"parameter_size": shown_count(facts.parameters), "quantization_level": facts.quantization}
    return {"parent_model": "", "format": form, "family": family, "families": [family], **more}


def tags(facts: Facts) -> dict[str, Any]:
    """Answer to /api/tags: the one model."""
    return {"models": [_entry(facts)]}


def _modified(facts: Facts) -> str:
    return datetime.fromtimestamp(facts.created, UTC).isoformat()


def shown_count(count: int) -> str:
    """Write a number of parameters as Ollama does: 134.52M, 8.0B."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.{2 if unit == 'M' else 1}f}{unit}"
    return str(count)


def _entry(facts: Facts) -> dict[str, Any]:
    digest = hashlib.sha256(facts.name.encode()).hexdigest()
    names = {"name": facts.name, "model": facts.name, "modified_at": _modified(facts)}
    return names | {"size": facts.size, "digest": digest, "details": _details(facts)}


def running(facts: Facts) -> dict[str, Any]:
    """Answer to /api/ps: the one model, which stays loaded."""
    more = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": facts.size, "context_length": facts.context}
    return {"models": [_entry(facts) | more]}


def show(facts: Facts) -> dict[str, Any]:
    """Answer to /api/show: facts about the one model."""
    capabilities = ["completion"]
    capabilities += ["tools"] if facts.takes_tools else []
    capabilities += ["thinking"] if facts.thinks else []
    capabilities += [] if facts.tokenizer.fim.missing else ["insert"]
    info = {
        "general.architecture": facts.architecture,
        "general.basename": facts.name,
        "general.parameter_count": facts.parameters,
        f"{facts.architecture}.context_length": facts.context,
        f"{facts.architecture}.vocab_size": facts.vocab,
    }
    body = {
        "modified_at": _modified(facts),
        "modelfile": "",
        "parameters": "",
        "template": facts.template,
        "details": _details(facts),
    }
    return body | {"model_info": info, "capabilities": capabilities, "license": ""}


def version() -> dict[str, Any]:
    return {"version": VERSION, "bimetal": __version__}


async def pull(request: Request) -> Response:
    """Answer /api/pull: success for every name, because every name means the served model."""
    await read_json(request)
    return Response(dumps({"status": "success"}) + b"\n", media_type=MEDIA)
