"""Task: a request of any dialect, and its execution on a model."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from common.call_grammar import REPLY
from common.checks import check_fits
from common.errors import PromptTooLongError, UsageError
from common.gbnf import lark_of
from common.grammar import SchemaError
from common.guide import AfterReasoning, AtLeast, Begun, Guide
from common.harmony import ANSWER, START, reasoning_tags
from common.infill import Gap
from common.reply import THINKING
from common.tools import is_harmony
from generate.llm import LLM, Prepared
from generate.server.errors import ApiError, failure, too_long
from generate.server.events import Echo, Event, Events, Failed, Finish, Prompt, Usage, Whole
from generate.server.facts import Facts
from generate.server.line_limits import LineLimits

BRIEF = 1 << 12  # characters of prompts that are prepared in about a millisecond
SHORT = 1 << 16  # characters of prompts that are prepared in less time than a thread waits for others


@dataclass(frozen=True)
class Chat:
    """A conversation, in the form of OpenAI's API.

    options  of rendering: tools, think, template
    begun    text with which the reply has begun; it goes on from there
    before   token ids of an earlier conversation, which precede it
    """

    messages: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    begun: str = ""
    before: Sequence[int] = ()


@dataclass(frozen=True)
class Grammar:
    """A grammar that a reply must follow, in a language of `lark_of`.

    field  of the request that holds the schema of the reply, or its tools if the reply must call one
    head   text that precedes what the grammar describes, with control tokens
    """

    text: str
    field: str
    head: str = ""


@dataclass(frozen=True)
class Ending:
    """Rules by which a reply ends, beside its limit.

    stops    token ids that end it, beside the tokenizer's end tokens
    ignores  whether the tokenizer's end tokens do not end it
    least    tokens of the reply before which no end token may come
    shown    whether a stop string that ends the reply is part of its text
    """

    stops: Sequence[int] = ()
    ignores: bool = False
    least: int = 0
    shown: bool = False

    def ends(self, llm: LLM, prompt: Prepared) -> frozenset[int]:
        """Return the tokens that end a reply to `prompt`."""
        usual = llm.tokenizer.end_ids if prompt.ends is None else prompt.ends
        return frozenset(self.stops) | (frozenset() if self.ignores else usual)


@dataclass(frozen=True)
class Task:
    """A request.

    prompts          conversations, texts, token ids or gaps in a text; each is replied to `n` times
    field            of the request that holds the prompts
    options          of generation, as keywords of GenerationOptions
    stream           whether the reply is sent while it is written
    first_call_only  whether a reply ends with its first tool call
    echo             whether the prompt precedes the reply, with log-probabilities if the options request them
    generates        whether there is a reply at all, or only an echo
    grammar          the grammar of the reply after its reasoning
    budget           most tokens of the reasoning
    limits           makes the line limits of one reply; None: there are none
    ending           how a reply ends, beside its limit
    ids              whether the answer has the token ids of prompt and reply
    whole_calls      whether calls that the end of the reply cuts are left out: their arguments are no JSON
    """

    prompts: Sequence[Chat | Gap | str | list[int]]
    options: Mapping[str, Any]
    n: int = 1
    stream: bool = False
    first_call_only: bool = False
    echo: bool = False
    generates: bool = True
    grammar: Grammar | None = None
    budget: int | None = None
    field: str = "messages"
    limits: Callable[[], LineLimits] | None = None
    ending: Ending = Ending()
    ids: bool = False
    whole_calls: bool = False


@dataclass(frozen=True)
class Ready:
    """A prepared prompt; `guide` makes the guide of one reply, if replies are constrained."""

    prompt: Prepared
    guide: Callable[[], Guide] | None = None


def prepare(llm: LLM, facts: Facts, task: Task) -> list[Ready]:
    """Render and encode the prompts, and compile the grammar.

    Takes up to seconds. Raises BimetalError, and ApiError for a prompt beyond the context.
    """
    inner = None if task.grammar is None else compiled(facts, task.grammar)
    try:
        prompts = rendered(llm, task)
    except PromptTooLongError as error:
        raise too_long(error, task.field) from None
    except UsageError as error:
        if any(isinstance(prompt, Chat) for prompt in task.prompts):  # whose options may be invalid
            raise
        raise ApiError(400, str(error), param=task.field) from None
    if task.ending != Ending():
        prompts = [replace(prompt, ends=task.ending.ends(llm, prompt)) for prompt in prompts]
    return [Ready(prompt, _guide(facts, task, prompt, inner)) for prompt in prompts]


def compiled(facts: Facts, grammar: Grammar) -> Callable[[], Guide]:
    """Compile a grammar; raises ApiError with the invalid field."""
    try:
        made = facts.grammars.guide(lark_of(grammar.text))
        head = facts.tokenizer.encode(grammar.head, False)
        return partial(Begun, head, facts.vocab, made) if head else made
    except SchemaError as error:
        raise ApiError(400, str(error), param=grammar.field if error.owner == REPLY else "tools") from None
    except UsageError as error:
        raise ApiError(400, str(error), param=grammar.field) from None


def is_short(task: Task, max_characters: int) -> bool:
    """Test whether a request has at most `max_characters` to prepare; a short one may continue a long conversation."""
    count, left = 0, list[Any](tuple(vars(p).values()) if isinstance(p, Chat | Gap) else p for p in task.prompts)
    while left and count <= max_characters:
        each = left.pop()
        if isinstance(each, Mapping):
            left += each.keys()
            left += each.values()
        elif isinstance(each, list | tuple):
            left += each
        count += len(each) if isinstance(each, str) else 1
    return task.grammar is None and count <= max_characters


def rendered(llm: LLM, task: Task) -> list[Prepared]:
    """Render and encode the prompts."""
    return [
        _chat(llm, prompt, task.field) if isinstance(prompt, Chat) else llm.prepare(prompt) for prompt in task.prompts
    ]


def _chat(llm: LLM, prompt: Chat, field: str) -> Prepared:
    """Render and encode a conversation, what precedes it, and the text with which its reply has begun."""
    ready = llm.prepare_chat(prompt.messages, **prompt.options)
    if prompt.before:
        at = ready.tokens[:1] == [llm.tokenizer.bos_id]
        ready = Prepared([*prompt.before, *ready.tokens[at:]], ready.parser)
        check_fits(len(ready.tokens), llm.context, llm.trained_context)
    if not prompt.begun:
        return ready
    assert ready.parser is not None
    head = ANSWER.removeprefix(f"{START}assistant") if is_harmony(llm.tokenizer.chat_template or "") else ""
    if ready.parser(begun=head).in_reasoning:
        words = "the model's chat template begins each reply with reasoning, so that no reply can continue a text"
        raise ApiError(400, words, param=field)
    tokens = ready.tokens + llm.tokenizer.encode(head, False) + llm.tokenizer.encode_plain(prompt.begun)
    check_fits(len(tokens), llm.context, llm.trained_context)
    return Prepared(tokens, partial(ready.parser, begun=head + prompt.begun))


def _guide(facts: Facts, task: Task, prompt: Prepared, inner: Callable[[], Guide] | None) -> Callable[[], Guide] | None:
    """Make the guide of replies to one prompt, with their reasoning and the tokens before which they may not end."""
    guide = _after_reasoning(facts, task, prompt, inner)
    if not task.ending.least:
        return guide
    ends = facts.tokenizer.end_ids if prompt.ends is None else prompt.ends
    return lambda: AtLeast(task.ending.least, ends, facts.vocab, guide and guide())


def _after_reasoning(
    facts: Facts, task: Task, prompt: Prepared, inner: Callable[[], Guide] | None
) -> Callable[[], Guide] | None:
    """Make the guide of replies after their reasoning, which is unrestricted, but bounded."""
    parser = None if prompt.parser is None else prompt.parser()
    is_open = parser is not None and parser.in_reasoning
    if task.budget is None and not is_open:
        return inner
    if not facts.thinks or (task.budget is None and inner is None):
        return inner
    spills = {} if inner is None else facts.spills
    tags = THINKING
    if parser is not None and is_harmony(facts.template):
        tags, is_open = reasoning_tags(inner is not None, parser.takes_calls), False
    return partial(AfterReasoning, facts.tokenizer, facts.vocab, tags, is_open, inner, task.budget, spills)


def events(llm: LLM, prompts: Sequence[Ready], task: Task) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield the events of all replies, each with the reply's index: of prompt p and repetition i, p * n + i.

    Leaving the loop, or cancelling the task that runs it, ends the replies at their next step.
    """
    is_alone = len(prompts) * task.n == 1
    return reply_events(llm, prompts[0], task, 0) if is_alone else _together(llm, prompts, task)


async def _together(llm: LLM, prompts: Sequence[Ready], task: Task) -> AsyncGenerator[tuple[int, Event], None]:
    queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    async def write(index: int) -> None:
        async with aclosing(reply_events(llm, prompts[index // task.n], task, index)) as found:
            async for event in found:
                queue.put_nowait(event)

    writers = [asyncio.ensure_future(write(index)) for index in range(len(prompts) * task.n)]
    left = len(writers)
    try:
        while left:
            index, event = await queue.get()
            left -= isinstance(event, Finish | Failed)
            yield index, event
    finally:
        for writer in writers:
            writer.cancel()
        await asyncio.gather(*writers, return_exceptions=True)


async def reply_events(llm: LLM, ready: Ready, task: Task, index: int) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield the events of reply number `index`, with that number; the last one is Finish or Failed."""
    options, prompt = dict(task.options), ready.prompt
    if ready.guide is not None:
        options["guide"] = ready.guide
    chooses = options.get("guide") or options.get("reweigh")
    if chooses and options.get("spec", llm.default_spec) == "wedlm":  # whose windows fill tokens out of order
        options["spec"] = "off"
    if index % task.n and options.get("seed") is not None:
        options["seed"] = (options["seed"] + index % task.n) % 2**64
    opening: list[Event] = [Prompt(prompt.tokens)] if task.ids else []  # sent once the reply begins: it may be refused
    try:
        if task.echo:
            opening.append(await echo(llm, task, prompt, index // task.n))
            for event in opening:
                yield index, event
            opening = []
        if not task.generates:  # but echoes
            yield index, Finish("length", Usage(len(prompt.tokens)))
            return
        made = Events(
            task.first_call_only, task.limits and task.limits(), task.whole_calls, task.ids, task.ending.shown
        )
        async with llm.astream_prepared(prompt, **options) as stream:
            async for piece in stream:
                for event in (*opening, *made.of(piece)):
                    yield index, event
                opening = []
                if made.is_over:
                    stream.cancel()
    except Exception as error:
        yield index, Failed(failure(error))


async def echo(llm: LLM, task: Task, prompt: Prepared, index: int) -> Echo:
    """Return the echo of prompt number `index`."""
    given = task.prompts[index]
    text = given if isinstance(given, str) else llm.tokenizer.decode(prompt.tokens)
    top = task.options.get("logprobs")
    return Echo(text, prompt.tokens, None if top is None else await llm.ascore(prompt.tokens, top))


async def finished_replies(
    found: AsyncIterator[tuple[int, Event]], count: int, on_event: Callable[[int, Event], object] = lambda *_: None
) -> list[Whole]:
    """Return `count` replies when they are finished; raises the error of one that failed.

    on_event  called with each event and its reply's index
    """
    replies = [Whole() for _ in range(count)]
    async for index, event in found:
        on_event(index, event)
        replies[index].add(event)
    return replies
