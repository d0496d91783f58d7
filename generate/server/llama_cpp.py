"""llama.cpp's own API for text: `/completion`, and what `/infill` shares with it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.infill import Gap, certain
from common.pieces import Logprob
from common.rules import Rule, one_of, whole
from common.tokenizer import Tokenizer
from generate.server.chat import MOST_CHOICES, bias
from generate.server.constraints import ending_of, form_of, text_grammar_of
from generate.server.errors import ApiError, envelope
from generate.server.events import Event, Failed, Finish, Prompt, Text, Whole
from generate.server.facts import Facts
from generate.server.fields import LIST, TEXT, Fields, limit, priority, sampling, stops
from generate.server.line_limits import LineLimits
from generate.server.task import Task
from generate.server.wire import Frame, Parsed, finite, sse, timings, token_text

MOST_SCORES = 256  # alternatives to a token
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
UNSUPPORTED: dict[str, tuple[Any, ...]] = {"lora": ([],), "image_data": ([],), "post_sampling_probs": (False,)}
PROMPT_WORDS = "a prompt is text, or a list of token ids and texts; several prompts are a list without token ids"


@dataclass(frozen=True)
class Head:
    """Parts of an answer that do not depend on the reply.

    shown     paths of the fields that the answer has; empty: all
    settings  shown as `generation_settings`
    several   the answer is a list
    scores    log-probabilities are sent
    """

    facts: Facts
    shown: Sequence[str]
    settings: Mapping[str, Any]
    several: bool
    scores: bool


def parse(fields: Fields, facts: Facts) -> Parsed:
    """Read a request of /completion; raises ApiError."""
    given = fields.values.get("prompt")
    several = isinstance(given, list) and not any(type(part) is int for part in given)
    entries = given if several else [given]
    if not entries or len(entries) > MOST_CHOICES:
        raise fields.refuse("prompt", f"from 1 to {MOST_CHOICES} prompts are supported")
    names = [f"prompt[{at}]" if several else "prompt" for at in range(len(entries))]
    prompts = [_prompt(facts.tokenizer, name, entry) for name, entry in zip(names, entries, strict=True)]
    return parsed(fields, facts, prompts, "prompt")


def _prompt(tokenizer: Tokenizer, name: str, given: Any) -> str | list[int]:
    """Return a prompt as text or token ids; an object may hold the text."""
    if isinstance(given, dict) and not given.get("multimodal_data"):
        given = given.get("prompt_string")
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not given or any(type(part) not in (int, str) for part in given):
        raise ApiError(400, f"{name} is {given!r:.80}; {PROMPT_WORDS}", param="prompt")
    ids: list[int] = []
    for at, part in enumerate(given):
        ids += tokenizer.encode(part, at == 0) if isinstance(part, str) else [part]
    return ids


def parsed(fields: Fields, facts: Facts, prompts: Sequence[Gap | str | list[int]], field: str) -> Parsed:
    """Read everything but the prompts, which stand in `field`; raises ApiError.

    `id_slot`, `cache_prompt` and `t_max_prompt_ms` are accepted without effect.
    """
    fields.text("model")
    for key, neutral in UNSUPPORTED.items():
        if fields.has(key) and fields.values[key] not in neutral:
            raise fields.refuse(key, "it is not supported; leave it out")
    options = chosen(fields, facts.tokenizer) | stops(fields, "stop") | priority(fields) | bias(fields, facts)
    limited = limit(fields, "n_predict", "max_tokens", minimum=0)
    silent = limited.get("max_tokens") == 0  # the prompt is read into the cache
    options |= {"max_tokens": 1} if silent else limited
    if scores := fields.take("n_probs", whole(0, MOST_SCORES), 0):
        options["logprobs"] = scores
    indent = fields.take("n_indent", whole(0), 0)
    milliseconds = fields.take("t_max_predict_ms", whole(-1), 0)
    n = fields.take("n_cmpl" if fields.has("n_cmpl") else "n", whole(1, MOST_CHOICES), 1)
    if len(prompts) * n > MOST_CHOICES:
        raise fields.refuse("n_cmpl", f"prompts and n_cmpl together ask for more than {MOST_CHOICES} replies")
    stream = fields.flag("stream", False)
    shown = fields.take("response_fields", TEXTS, ())
    grammar = text_grammar_of(form_of(fields, None))
    most = limited.get("max_tokens", facts.limit)
    settings = {"n_ctx": facts.context, "n_predict": -1 if most is None else most, "stream": stream, "n_indent": indent}
    settings |= {name: value for name, value in options.items() if name not in ("reweigh", "max_tokens")}
    head = Head(facts, shown, settings, len(prompts) * n > 1, scores > 0)
    task = Task(
        prompts,
        options,
        n,
        stream,
        grammar=grammar,
        field=field,
        limits=partial(LineLimits, indent, max(milliseconds, 0) / 1000, silent),
        ending=ending_of(fields, facts, grammar),
        ids=fields.flag("return_tokens", False),
    )
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


def answer(head: Head, index: int, reply: Whole, streamed: bool = False) -> dict[str, Any]:
    """Return the answer about one reply, or the last message of its stream, which repeats no text."""
    finish, facts, text = reply.finish, head.facts, reply.text
    usage = finish.usage
    length = usage.prompt + usage.completion
    body: dict[str, Any] = {
        "index": index,
        "content": "" if streamed else text,
        "tokens": [] if streamed else reply.tokens,
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
    if head.scores and not streamed:
        body["completion_probabilities"] = probabilities(facts.tokenizer, reply.logprobs)
    if finish.stats is not None:
        body["timings"] = editor_timings(timings(finish.stats, usage))
    return {path: value for path in head.shown for value in _at(body, path)} if head.shown else body


def probabilities(tokenizer: Tokenizer, logprobs: Sequence[Logprob]) -> list[dict[str, Any]]:
    """List log-probabilities as llama.cpp does."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, data = token_text(tokenizer, token)
        return {"id": token, "token": text, "bytes": list(data), "logprob": finite(logprob)}

    return [entry(one.token, one.logprob) | {"top_logprobs": [entry(*other) for other in one.top]} for one in logprobs]


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
        self.replies: dict[int, Whole] = {}
        self.frames: dict[int, Frame] = {}

    def begin(self, tokens: int) -> Iterator[bytes]:
        self.tokens = tokens
        return iter(())

    def _message(self, index: int, text: str, **more: Any) -> bytes:
        told = {"tokens": [], "stop": False, "tokens_evaluated": self.tokens} | more
        return sse({"index": index, "content": text, **told})

    def _frame(self, index: int) -> Frame:
        if index not in self.frames:
            self.frames[index] = Frame(partial(self._message, index))
        return self.frames[index]

    def push(self, index: int, event: Event) -> Iterator[bytes]:
        if isinstance(event, Failed):
            yield sse(envelope(event.error, "openai", ""))
            return
        reply = self.replies.setdefault(index, Whole())
        reply.add(event)
        match event:
            case Prompt(ids):
                self.tokens = len(ids)
            case Text(text, (), ()):
                yield self._frame(index).of(text)
            case Text(text, logprobs, ids):
                found = probabilities(self.head.facts.tokenizer, logprobs)
                scores = {"completion_probabilities": found} if self.head.scores else {}
                yield self._message(index, text, tokens=ids, **scores)
            case Finish():
                yield sse(answer(self.head, index, reply, streamed=True))

    def end(self) -> Iterator[bytes]:
        return iter(())


def whole_reply(head: Head, replies: Sequence[Whole]) -> dict[str, Any] | list[dict[str, Any]]:
    """Return the body of a reply that is not streamed, a list of several."""
    found = [answer(head, index, reply) for index, reply in enumerate(replies)]
    return found if head.several else found[0]
