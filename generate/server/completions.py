"""OpenAI's legacy Completions, with the features of evaluation harnesses: `echo`, `logprobs`, prompts of token ids."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from common.infill import Gap
from common.pieces import Logprob
from common.rules import whole
from common.tokenizer import Tokenizer
from generate.server.chat import MOST_CHOICES, MOST_LOGPROBS, bias
from generate.server.constraints import ending_of, form_of, openai_format, text_grammar_of
from generate.server.errors import ApiError, envelope
from generate.server.events import Echo, Event, Failed, Finish, Prompt, Text, Usage, Whole, total
from generate.server.facts import Facts
from generate.server.fields import Fields, limit, priority, sampling, stops
from generate.server.infill import check_fim
from generate.server.task import Task
from generate.server.wire import Frame, Parsed, finite, new_id, now, openai_usage, sse, timings, token_text

MOST_PROMPTS = 128
PROMPT_WORDS = "a prompt is text, a list of texts, a list of token ids, or a list of such lists, none of them empty"


@dataclass(frozen=True)
class Head:
    """Fields that all chunks of a reply share.

    ids  token ids are sent
    """

    id: str
    created: int
    facts: Facts
    usage: bool
    logprobs: bool
    n: int
    ids: bool


def parse(fields: Fields, facts: Facts) -> Parsed:
    """Read a request; raises ApiError."""
    fields.text("model")
    suffix = fields.text("suffix") or None
    prompts = _prompts(fields, may_be_empty=suffix is not None)
    options = sampling(fields) | stops(fields, "stop") | priority(fields) | bias(fields, facts)
    limited = limit(fields, "max_tokens", "n_predict", minimum=0)
    generates = limited.get("max_tokens") != 0
    logprobs = fields.take("logprobs", whole(0, MOST_LOGPROBS))
    if logprobs is not None:
        options["logprobs"] = logprobs
    if generates:
        options |= limited
    form = form_of(fields, openai_format(fields.object("response_format"), nested=True))
    n, echo = fields.take("n", whole(1, MOST_CHOICES), 1), fields.flag("echo", False)
    if fields.take("best_of", whole(1), n) != n:
        raise fields.refuse("best_of", f"it must be n, which is {n}")
    if not generates and not echo:
        key = "max_tokens" if fields.has("max_tokens") else "n_predict"
        raise fields.refuse(key, "it must be -1, for no limit, or at least 1 without echo")
    if suffix is not None:
        check_fim(facts.tokenizer, 400, "suffix")
        if echo:
            raise fields.refuse("suffix", "it does not go with echo")
        prompts = [Gap(prompt, suffix) for prompt in prompts]
    if echo and n > 1:
        raise fields.refuse("n", "it must be 1 with echo")
    if len(prompts) * n > MOST_CHOICES:
        raise fields.refuse("n", f"prompts and n together ask for more than {MOST_CHOICES} replies")
    streaming = fields.object("stream_options")
    usage = bool(streaming and streaming.flag("include_usage", False))
    stream, grammar = fields.flag("stream", False), text_grammar_of(form)
    task = Task(
        prompts,
        options,
        n,
        stream,
        echo=echo,
        generates=generates,
        grammar=grammar,
        field="prompt",
        ending=ending_of(fields, facts, grammar),
        ids=fields.flag("return_token_ids", False),
    )
    head = Head(new_id("cmpl-"), now(), facts, usage, logprobs is not None, n, task.ids)
    return Parsed(task, lambda _: Writer(head), lambda replies: whole_reply(head, replies))


def _prompts(fields: Fields, may_be_empty: bool) -> list[Any]:
    """Return the prompts: one or several texts or lists of token ids; one text `may_be_empty` if a suffix follows."""
    prompt = fields.values.get("prompt")
    if may_be_empty and prompt in ("", None):
        return [""]
    if not isinstance(prompt, str | list) or not prompt:
        raise fields.refuse("prompt", PROMPT_WORDS)
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        _check_prompt(prompt, "prompt")
        return [prompt]
    if len(prompt) > MOST_PROMPTS:
        raise ApiError(400, f"prompt has {len(prompt)} entries; at most {MOST_PROMPTS} are supported", param="prompt")
    for i, one in enumerate(prompt):
        _check_prompt(one, f"prompt[{i}]")
    return prompt


def _check_prompt(one: Any, name: str) -> None:
    """Refuse what is neither text nor token ids, by the `name` and value of the entry that is at fault."""
    if isinstance(one, list) and one:
        wrong = next((i for i, id in enumerate(one) if not isinstance(id, int) or isinstance(id, bool)), None)
        if wrong is None:
            return
        one, name = one[wrong], f"{name}[{wrong}]"
    elif isinstance(one, str) and one:
        return
    raise ApiError(400, f"{name} is {one!r:.80}; {PROMPT_WORDS}", param="prompt")


class Tokens:
    """Lists log-probabilities in the form of Completions, and the offset of each token in the text."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.decoder, self.text_offset = tokenizer, tokenizer.decoder(), 0

    def of(self, logprobs: Sequence[Logprob | int]) -> dict[str, list[Any]]:
        """Return the four lists for some tokens; a prompt's first token has no log-probability and is a bare id."""
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for one in logprobs:
            token = one if isinstance(one, int) else one.token
            columns["tokens"].append(token_text(self.tokenizer, token)[0])
            columns["token_logprobs"].append(None if isinstance(one, int) else finite(one.logprob))
            columns["top_logprobs"].append(None if isinstance(one, int) else self._top(one))
            columns["text_offset"].append(self.text_offset)
            self.text_offset += len(self.decoder.push(token)) if token < self.tokenizer.vocab_size else 0
        return columns

    def _top(self, one: Logprob) -> dict[str, float]:
        """Return the log-probabilities of the token and the best alternatives by text; of equal texts, the highest."""
        found = {token_text(self.tokenizer, one.token)[0]: finite(one.logprob)}
        for token, value in one.top:
            text = token_text(self.tokenizer, token)[0]
            found[text] = max(found.get(text, finite(value)), finite(value))
        return found


def echoed(echo: Echo) -> list[Logprob | int]:
    """List the arguments of `Tokens.of` for a prompt: the id of its first token, and the scores of the others."""
    return [echo.tokens[0], *(echo.scores or ())]


class Writer:
    """Writes chunks of text."""

    ping = b": waiting\n\n"

    def __init__(self, head: Head):
        self.head, self.failed = head, False
        self.usages: dict[int, Usage] = {}
        self.columns: dict[int, Tokens] = {}
        self.stats: Any = None
        self.frames: dict[int, Frame] = {}
        self.base = {
            "id": head.id,
            "object": "text_completion",
            "created": head.created,
            "model": head.facts.name,
        }
        self.none = {"usage": None} if head.usage else {}

    def begin(self, tokens: int) -> Iterator[bytes]:
        self._frame(0)  # built before the first token
        return iter(())

    def _chunk(
        self, index: int, text: str, finish: str | None, entries: Sequence[Logprob | int], **ids: Sequence[int]
    ) -> bytes:
        logprobs = None
        if self.head.logprobs:
            logprobs = self.columns.setdefault(index, Tokens(self.head.facts.tokenizer)).of(entries)
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        if self.head.ids:
            choice |= {"token_ids": [], **ids}
        return sse(self.base | {"choices": [choice]} | self.none)

    def _frame(self, index: int) -> Frame:
        if index not in self.frames:
            self.frames[index] = Frame(lambda text: self._chunk(index, text, None, ()))
        return self.frames[index]

    def push(self, index: int, event: Event) -> Iterator[bytes]:
        match event:
            case Prompt(ids):
                yield self._chunk(index, "", None, (), prompt_token_ids=ids)
            case Echo():
                yield self._chunk(index, event.text, None, echoed(event))
            case Text(text, logprobs, ids) if self.head.logprobs or self.head.ids:
                yield self._chunk(index, text, None, logprobs, token_ids=ids)
            case Text(text):
                yield self._frame(index).of(text)
            case Finish(reason, usage):
                self.usages[index], self.stats = usage, event.stats
                yield self._chunk(index, "", reason, [event.end] if event.end else [], token_ids=event.tokens)
            case Failed(error):
                self.failed = True
                yield sse(envelope(error, "openai", ""))

    def end(self) -> Iterator[bytes]:
        if self.head.usage and not self.failed:
            usage = total(self.usages, self.head.n)
            figures = {"timings": timings(self.stats, usage)} if self.stats else {}
            yield sse(self.base | {"choices": [], "usage": openai_usage(usage)} | figures)
        yield b"data: [DONE]\n\n"


def whole_reply(head: Head, replies: Sequence[Whole]) -> dict[str, Any]:
    """Return the body of a reply that is not streamed."""
    choices = []
    usage = total({index: reply.finish.usage for index, reply in enumerate(replies)}, head.n)
    for index, reply in enumerate(replies):
        entries = [*(echoed(reply.echo) if reply.echo else ()), *reply.logprobs]
        entries += [reply.finish.end] if reply.finish.end else []
        logprobs = Tokens(head.facts.tokenizer).of(entries) if head.logprobs else None
        text = (reply.echo.text if reply.echo else "") + reply.text
        choices.append({"index": index, "text": text, "logprobs": logprobs, "finish_reason": reply.finish.reason})
        if head.ids:
            choices[-1] |= {"prompt_token_ids": reply.prompt, "token_ids": reply.tokens}
    body = {"id": head.id, "object": "text_completion", "created": head.created, "model": head.facts.name}
    body |= {"choices": choices, "usage": openai_usage(usage)}
    stats = replies[-1].finish.stats
    return body | ({"timings": timings(stats, usage)} if stats else {})
