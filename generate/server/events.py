"""The events of a reply, which every dialect writes in its own form, and a reply as the sum of its events."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace

from common.pieces import Logprob, Piece, Stats
from generate.server.errors import ApiError
from generate.server.line_limits import LineLimits


@dataclass(frozen=True)
class Usage:
    """Tokens of one reply.

    reasoning  tokens of the reasoning, counted in `completion` too
    accepted   draft tokens that became part of the reply; rejected: the others that were verified
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    accepted: int = 0
    rejected: int = 0


def total(usages: Mapping[int, Usage], n: int) -> Usage:
    """Add up the usage of replies, by index; each prompt has `n` successive replies, and counts once."""
    each = (replace(u, prompt=0, cached=0) if index % n else u for index, u in usages.items())
    return Usage(*(sum(column) for column in zip(*(astuple(u) for u in each), strict=True)))


@dataclass(frozen=True)
class Prompt:
    """The prompt's token ids, before everything else of a reply to a request for token ids."""

    tokens: Sequence[int]


@dataclass(frozen=True)
class Echo:
    """The prompt, which precedes its reply if requested.

    scores  of each token but the first; None if no log-probabilities are requested
    """

    text: str
    tokens: Sequence[int]
    scores: Sequence[Logprob] | None = None


@dataclass(frozen=True)
class Text:
    """A part of the text; `tokens` are its ids, if requested."""

    text: str
    logprobs: tuple[Logprob, ...] = ()
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reasoning:
    """A part of the reasoning; `tokens` are its ids, if requested."""

    text: str
    logprobs: tuple[Logprob, ...] = ()
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class CallBegin:
    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A part of a call's arguments, which are JSON text."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    index: int


@dataclass(frozen=True)
class Finish:
    """The end of a reply.

    reason  "stop", "tool_calls" or "length"
    stop    the stop string that ended it
    end     Logprob of the end token, if log-probabilities were requested
    tokens  the end token, if token ids were requested
    """

    reason: str
    usage: Usage
    stop: str | None = None
    end: Logprob | None = None
    stats: Stats | None = None
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Failed:
    """The end of a reply by an error."""

    error: ApiError


Event = Prompt | Echo | Text | Reasoning | CallBegin | CallArguments | CallEnd | Finish | Failed


class Events:
    """Turns the pieces of one reply into events.

    first_call_only  whether a reply ends with its first call
    limits           the line limits of the reply; None: there are none
    whole_calls      whether a call that the end of the reply cuts is left out: its arguments are no JSON
    ids              whether events have token ids
    shows_stop       whether a stop string that ends the reply is part of its text
    """

    def __init__(
        self,
        first_call_only: bool = False,
        limits: LineLimits | None = None,
        whole_calls: bool = False,
        ids: bool = False,
        shows_stop: bool = False,
    ):
        self._first_call_only, self._limits, self._whole_calls, self._ids = first_call_only, limits, whole_calls, ids
        self._shows_stop = shows_stop
        self._thought = 0
        self._held: list[Logprob] = []
        self._held_ids: list[int] = []
        self._ended: str | None = None  # why the rest of the reply is not read, except its figures

    @property
    def is_over(self) -> bool:
        """Test whether the reply has ended before its last piece."""
        return self._ended is not None

    def of(self, piece: Piece) -> Iterator[Event]:
        """Yield the events of `piece`."""
        self._thought += piece.thought
        self._held += piece.logprobs[piece.thought :]
        if self._ids:
            self._held_ids += piece.tokens[piece.thought :]
        if not self.is_over:
            yield from self._content(piece)
        if piece.finish_reason:
            stats = piece.stats
            assert stats is not None
            if piece.finish_reason == "cancelled" and not self.is_over:
                yield Failed(ApiError(503, "the server ended this reply, because it shuts down", retry=5))
                return
            reason = self._ended or piece.finish_reason
            ids = (piece.end_token,) if self._ids and piece.end_token is not None else ()
            yield Finish(reason, usage_of(stats, self._thought), piece.stop, piece.end, stats, ids)

    def _content(self, piece: Piece) -> Iterator[Event]:
        reasoned = tuple(piece.logprobs[: piece.thought])
        thoughts = tuple(piece.tokens[: piece.thought]) if self._ids else ()
        if piece.reasoning or reasoned or thoughts:
            yield Reasoning(piece.reasoning, reasoned, thoughts)
        text = piece.text + (piece.stop or "" if self._shows_stop else "")
        if self._limits is not None:
            text = self._limits.push(text)
            self._ended = "length" if self._limits.is_over else None
        if text or (piece.finish_reason and (self._held or self._held_ids)):
            logprobs, self._held = tuple(self._held), []
            ids, self._held_ids = tuple(self._held_ids), []
            yield Text(text, logprobs, ids)
        for call in piece.tool_calls:
            if self._whole_calls and not _is_json(call["function"]["arguments"]):
                continue
            yield CallBegin(call["index"], call["id"], call["function"]["name"])
            yield CallArguments(call["index"], call["function"]["arguments"])
            yield CallEnd(call["index"])
            if self._first_call_only:
                self._ended = "tool_calls"
                return


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def usage_of(stats: Stats, reasoning: int) -> Usage:
    """Return the figures of a reply as APIs count them."""
    accepted = rejected = 0
    if stats.accepted is not None:
        accepted = sum((length - 1) * count for length, count in stats.accepted.lengths.items())
        rejected = max(0, stats.accepted.rows - stats.accepted.steps - accepted)
    return Usage(stats.prompt_tokens, stats.cached_tokens, stats.new_tokens, reasoning, accepted, rejected)


@dataclass
class Call:
    """A complete tool call; arguments are JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class TextPart:
    """A part of a reply that is text or reasoning.

    kind  "text" or "reasoning"
    """

    kind: str
    text: str = ""
    logprobs: list[Logprob] = field(default_factory=list)


@dataclass
class Whole:
    """All of a reply.

    prompt, tokens  their ids, if requested
    parts           in the order in which they were written
    """

    prompt: Sequence[int] = ()
    tokens: list[int] = field(default_factory=list)
    echo: Echo | None = None
    parts: list[TextPart | Call] = field(default_factory=list)
    finish: Finish = field(default_factory=lambda: Finish("stop", Usage()))

    @property
    def text(self) -> str:
        return "".join(part.text for part in self._text_parts() if part.kind == "text")

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self._text_parts() if part.kind == "reasoning")

    @property
    def logprobs(self) -> list[Logprob]:
        return [one for part in self._text_parts() for one in part.logprobs]

    @property
    def calls(self) -> list[Call]:
        return [part for part in self.parts if isinstance(part, Call)]

    def _text_parts(self) -> Iterator[TextPart]:
        return (part for part in self.parts if isinstance(part, TextPart))

    def _grow(self, kind: str, text: str, logprobs: Sequence[Logprob]) -> None:
        last = self.parts[-1] if self.parts else None
        if not isinstance(last, TextPart) or last.kind != kind:
            last = TextPart(kind)
            self.parts.append(last)
        last.text += text
        last.logprobs += logprobs

    def add(self, event: Event) -> None:
        """Add an event; raises the error of one that failed."""
        match event:
            case Prompt(ids):
                self.prompt = ids
            case Echo():
                self.echo = event
            case Text(text, logprobs, ids):
                self._grow("text", text, logprobs)
                self.tokens += ids
            case Reasoning(text, logprobs, ids):
                self._grow("reasoning", text, logprobs)
                self.tokens += ids
            case CallBegin(_, id, name):
                self.parts.append(Call(id, name))
            case CallArguments(_, text):
                self.calls[-1].arguments += text
            case Finish():
                self.finish = event
                self.tokens += event.tokens
            case Failed(error):
                raise error
