"""llama.cpp's `/infill`, with which editors have a model fill the gap at the cursor."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.infill import RESERVED, Gap, certain, without_tokens
from common.rules import Rule, one_of, whole
from common.tokenizer import Tokenizer
from generate.server.chat import MOST_CHOICES, bias
from generate.server.constraints import ending_of
from generate.server.errors import ApiError, envelope
from generate.server.events import Event, Failed, Finish, Text, Whole
from generate.server.facts import Facts
from generate.server.fields import LIST, TEXT, Fields, limit, priority, sampling, stops
from generate.server.line_limits import LineLimits
from generate.server.task import Task
from generate.server.wire import Frame, Parsed, sse, timings

MOST_FILES = 4096
TEXTS = Rule("a list of texts", lambda value: [TEXT.convert(each) for each in LIST.convert(value)])
SAMPLERS = {  # of llama.cpp, with the fields of each
    "penalties": ("repetition_penalty", "repeat_penalty", "frequency_penalty", "presence_penalty"),
    "top_k": ("top_k",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "temperature": ("temperature",),
    "infill": (),
    **dict.fromkeys(("dry", "top_n_sigma", "typ_p", "xtc", "adaptive_p"), ()),  # without effect by their defaults
}
NEUTRAL: dict[str, dict[str, Any]] = {  # our options without a sampler; llama.cpp's draws at the temperature 1 then
    "penalties": {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
}
UNSUPPORTED = {"lora": ([],), "n_probs": (0,), "return_tokens": (False,), "grammar": ("",), "json_schema": ()}


@dataclass(frozen=True)
class Head:
    """Parts of an answer that do not depend on the reply.

    shown     paths of the fields that the answer has; empty: all
    settings  shown as `generation_settings`
    several   the answer is a list
    """

    facts: Facts
    shown: Sequence[str]
    settings: Mapping[str, Any]
    several: bool


def check_fim(tokenizer: Tokenizer, status: int, field: str | None = None) -> None:
    """Refuse a model that lacks the tokens: ApiError with `status`, about `field`."""
    if tokenizer.fim.missing:
        raise ApiError(status, without_tokens(tokenizer), param=field)


def parse(fields: Fields, facts: Facts) -> Parsed:
    """Read a request; raises ApiError. `id_slot`, `cache_prompt` and `t_max_prompt_ms` are accepted without effect."""
    check_fim(facts.tokenizer, 501)
    fields.text("model")
    prefix, suffix = fields.need("input_prefix", TEXT), fields.need("input_suffix", TEXT)
    files = fields.objects("input_extra", MOST_FILES)
    extra = [(file.text("filename", "tmp"), file.need("text", TEXT)) for file in files]
    gap = Gap(prefix, suffix, fields.text("prompt", ""), extra, RESERVED if facts.limit is None else facts.limit)
    for key, neutral in UNSUPPORTED.items():
        if fields.has(key) and fields.values[key] not in neutral:
            raise fields.refuse(key, "it is not supported; leave it out")
    options = chosen(fields, facts.tokenizer) | stops(fields, "stop") | priority(fields) | bias(fields, facts)
    limited = limit(fields, "n_predict", "max_tokens", minimum=0)
    silent = limited.get("max_tokens") == 0  # the prompt is read into the cache
    options |= {"max_tokens": 1} if silent else limited
    indent = fields.take("n_indent", whole(0), 0)
    milliseconds = fields.take("t_max_predict_ms", whole(-1), 0)
    limits = partial(LineLimits, indent, max(milliseconds, 0) / 1000, silent)
    n = fields.take("n_cmpl" if fields.has("n_cmpl") else "n", whole(1, MOST_CHOICES), 1)
    stream = fields.flag("stream", False)
    shown = fields.take("response_fields", TEXTS, ())
    most = limited.get("max_tokens", facts.limit)
    settings = {"n_ctx": facts.context, "n_predict": -1 if most is None else most, "stream": stream, "n_indent": indent}
    settings |= {name: value for name, value in options.items() if name not in ("reweigh", "max_tokens")}
    head = Head(facts, shown, settings, n > 1)
    task = Task([gap], options, n, stream, field="input_prefix", limits=limits, ending=ending_of(fields, facts))
    return Parsed(task, lambda _: Writer(head), lambda replies: whole_reply(head, replies))


def chosen(fields: Fields, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the sampling options of a request; where it lists `samplers`, those of others are left out.

    The samplers run in this server's order. Raises ApiError.
    """
    if not fields.has("samplers"):
        return sampling(fields)
    names = {_sampler(fields, each) for each in fields.take("samplers", LIST)}
    unused = {key for name, keys in SAMPLERS.items() if name not in names for key in keys}
    found = sampling(Fields({key: value for key, value in fields.values.items() if key not in unused}, fields.where))
    for name in NEUTRAL.keys() - names:
        found |= NEUTRAL[name]
    return found | ({"reweigh": certain(tokenizer)} if "infill" in names else {})


def _sampler(fields: Fields, name: Any) -> str:
    given: str = Fields({"samplers": name}, fields.where).take("samplers", one_of(*SAMPLERS))
    return given


def answer(head: Head, index: int, text: str, finish: Finish, streamed: bool = False) -> dict[str, Any]:
    """Return the answer about one reply, or the last message of its stream, which repeats no text."""
    usage, facts = finish.usage, head.facts
    length = usage.prompt + usage.completion
    body: dict[str, Any] = {
        "index": index,
        "content": "" if streamed else text,
        "tokens": [],
        "stop": True,
        "model": facts.name,
        "tokens_predicted": usage.completion,
        "tokens_evaluated": usage.prompt,
        "generation_settings": head.settings,
        "has_new_line": "\n" in text,
        "truncated": finish.reason == "length" and length >= facts.context,
        "stop_type": "limit" if finish.reason == "length" else "eos" if finish.stop is None else "word",
        "stopping_word": finish.stop or "",
        "tokens_cached": length - min(usage.completion, 1),  # the state lacks the newest token
    }
    if finish.stats is not None:
        body["timings"] = editor_timings(timings(finish.stats, usage))
    return {path: value for path in head.shown for value in _at(body, path)} if head.shown else body


def editor_timings(found: dict[str, Any]) -> dict[str, Any]:
    """Add the milliseconds per token to `timings`."""
    each = {f"{name}_per_token_ms": found[f"{name}_ms"] / (found[f"{name}_n"] or 1) for name in ("prompt", "predicted")}
    return found | {name: round(value, 3) for name, value in each.items()}


def _at(body: Any, path: str) -> Iterator[Any]:
    """Yield the value at `path`, whose keys are divided by "/", if there is one."""
    for key in path.split("/"):
        if not isinstance(body, dict) or key not in body:
            return
        body = body[key]
    yield body


class Writer:
    """Writes a message for each piece of text, and the figures with the last."""

    ping = b": waiting\n\n"

    def __init__(self, head: Head):
        self.head, self.tokens = head, 0
        self.texts: dict[int, str] = {}
        self.frames: dict[int, Frame] = {}

    def begin(self, tokens: int) -> Iterator[bytes]:
        self.tokens = tokens
        return iter(())

    def _frame(self, index: int) -> Frame:
        more = {"tokens": [], "stop": False, "tokens_evaluated": self.tokens}
        if index not in self.frames:
            self.frames[index] = Frame(lambda text: sse({"index": index, "content": text, **more}))
        return self.frames[index]

    def push(self, index: int, event: Event) -> Iterator[bytes]:
        match event:
            case Text(text):
                self.texts[index] = self.texts.get(index, "") + text
                yield self._frame(index).of(text)
            case Finish():
                yield sse(answer(self.head, index, self.texts.get(index, ""), event, streamed=True))
            case Failed(error):
                yield sse(envelope(error, "openai", ""))

    def end(self) -> Iterator[bytes]:
        return iter(())


def whole_reply(head: Head, replies: Sequence[Whole]) -> dict[str, Any] | list[dict[str, Any]]:
    """Return the body of a reply that is not streamed, a list of several."""
    found = [answer(head, index, reply.text, reply.finish) for index, reply in enumerate(replies)]
    return found if head.several else found[0]
