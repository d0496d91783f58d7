"""Sequence: a prompt and its reply during generation, with steps of the prompt, decoder, text and statistics."""

import threading
import time
from collections.abc import Callable, Generator, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.checks import check_fits, check_tokens, default_spec, default_window, speculation_of
from common.decode.plain import target_of
from common.decode.registry import check, decode
from common.decode.requests import ASKS_ROWS, Choose, Draft, DraftStretch, Emit, Read, Request, Rows, Stretch
from common.decode.run import DecoderRun
from common.decode.tuner import TunerShare
from common.decode.wedlm import most_unread
from common.errors import UsageError, shown
from common.expert_stats import ExpertStats
from common.models import Model
from common.ops import Array
from common.options import GenerationOptions
from common.pieces import Logprob, Piece, Stats
from common.reading import Reading, Span
from common.row_runner import array_of, read, token_of
from common.sampling import Sampler
from common.slot import Prefixes, Slot
from common.step import MAX_DECODE_ROWS, State, Step
from common.stop import StopText
from common.tokenizer import Tokenizer


@dataclass(frozen=True)
class Target:
    """The model, tokenizer and context length that sequences run on.

    decoding  the model for decoding, with `attention_window`; without that option `model` itself
    context   maximum tokens of a sequence
    """

    model: Model
    decoding: Model
    tokenizer: Tokenizer
    context: int

    def check_fits(self, tokens: int) -> None:
        """Refuse a prompt of `tokens` tokens that does not fit the context: PromptTooLongError."""
        check_fits(tokens, self.context, self.model.config.context)


@dataclass(eq=False)
class Call:
    """A caller's request.

    put       function that is called with each piece
    ended     function that is called once, after the last piece or with the error that ended the reply
    cancel    event that ends the reply at the next step, also during prefill and in the queue
    shared    number of the prompt's tokens with which the next prompt will begin; None: all
    marks     Reading.marks of the prompt
    replies   Reading.replies of the prompt
    ends      tokens that end the reply; None: those of the tokenizer
    """

    prompt: Any
    options: GenerationOptions
    put: Callable[[Piece], object]
    ended: Callable[[BaseException | None], object]
    cancel: threading.Event = field(default_factory=threading.Event)
    shared: int | None = None
    marks: Mapping[int, str] = field(default_factory=dict)
    replies: List[Span] = ()
    ends: frozenset[int] | None = None


RESERVED = 1024  # tokens of a reply for which memory is granted at a time
SHARED_ROWS = 64  # most rows of a short step of a prompt where steps are divided, so that others wait less for it


class Sequence:
    """A prompt and the reply to it. The constructor checks the call: UsageError, BimetalError.

    request  the decoder's current request, Rows, a Draft or a Stretch; None while the prompt is read
    run      the input of the decoder; None while the prompt is read
    with_rows  whether `take` needs the logits of each token's row
    cached   tokens of the prompt that were not read, because a slot or the prefix cache held their state
    matched  first tokens of the prompt that are also the first of an earlier text; no state was kept for some of them
    end      tokens of the prompt that steps of the prompt read; the decoder's first step reads the rest
    new_tokens  tokens of the reply so far
    opened   tokens of the step that generated the first token; 0 until a later step is requested
    pending  the piece that has not been put, because its text may be part of a stop string or of a character
    reason   why the reply has ended, as in Piece.finish_reason
    granted  tokens for which memory was free at the last check
    waited   steps of decoding since the last step that had room for the sequence's rows
    skips    number of later calls that began before this one
    unfinished_parts  remaining parts of the prompt's step that is being computed; None: the next step begins
    """

    def __init__(self, target: Target, call: Call):
        self.target, self.call, self.options = target, call, call.options
        model = target.model
        self.prompt = check_tokens(call.prompt, model.config.vocab)
        if call.options.logprobs is not None and call.options.logprobs > model.config.vocab:
            vocab = model.config.vocab
            raise UsageError(
                f"logprobs is {shown(call.options.logprobs)}; it must be at most the vocabulary of {vocab}"
            )
        if (most := max(call.options.logit_bias or (), default=0)) >= model.config.vocab:
            raise UsageError(f"logit_bias has the token id {shown(most)}; the vocabulary has {model.config.vocab}")
        target.check_fits(len(self.prompt))
        self.sampler = Sampler(call.options, self.prompt)
        window = default_window(model, self.sampler.is_argmax)
        self.speculation = speculation_of(call.options, default_spec(model), window)
        check(self.speculation, model, self.sampler)
        self.ends = target.tokenizer.end_ids if call.ends is None else call.ends
        self.text, self.detokenizer = StopText(call.options.stop), target.tokenizer.decoder()
        self.with_rows = call.options.logprobs is not None
        self.priority, self.arrival, self.waited, self.skips = call.options.priority, 0, 0, 0
        self.slot: Slot | None = None
        self.decoder: Generator[Request, Any, None] | None = None
        self.request: Rows | Draft | Stretch | DraftStretch | None = None
        self.tuner: TunerShare | None = None
        self.run: DecoderRun | None = None
        self.unfinished_parts: Generator[None, None, Array] | None = None
        self.cached = self.matched = self.new_tokens = self.opened = 0
        self.started = self.first_token_at = self.last_token_at = 0.0
        self.reading = self._reading()
        reply = min(call.options.max_tokens or RESERVED, RESERVED)
        self.granted = min(len(self.prompt) + reply, target.context)
        self.offered: dict[int, str] = {}  # cuts after which the state is offered to a store, and why
        self.turns: set[int] = set()  # cuts after which its slot takes a snapshot
        self.experts: ExpertStats | None = None  # before it began
        self.pending = Piece()
        self.reason = "length"

    @property
    def outgrows(self) -> bool:
        """Test whether the next step needs more memory than was granted."""
        return self.slot is not None and self.slot.state.length >= self.granted

    @property
    def next_grant(self) -> int:
        """Count the tokens for which memory must be free before the next grant."""
        return min(self.granted + RESERVED, self.target.context)

    @property
    def reads(self) -> bool:
        """Test whether its next step reads the prompt."""
        return self.decoder is None

    @property
    def is_divided(self) -> bool:
        """Test whether some parts of the prompt's next step have been computed."""
        return self.unfinished_parts is not None

    def reads_twice(self, divides: bool) -> bool:
        """Test whether, after it has begun, more than one step of its prompt, or some parts of a step, are left.

        divides  whether steps of prompts are computed in parts
        """
        if self.slot is None:
            return False
        cut = self._next_cut(divides)
        return cut < self.end or (divides and self.target.model.divides(cut - self.slot.state.length))

    @property
    def rows(self) -> int:
        """Count the rows of its next step of decoding."""
        request = self.request
        if type(request) is DraftStretch:
            return 1 + request.budget
        return len(request.step) if type(request) is Rows else 1

    # -- the prompt --------------------------------------------------------------------------------------------------

    def begin(self, slot: Slot, cached: int, prefixes: Prefixes | None) -> bool:
        """Take a slot whose state holds `cached` tokens of the prompt; return whether some are left to read."""
        self.started = self.first_token_at = self.last_token_at = time.perf_counter()
        stream = getattr(self.target.model, "expert_stream", None)  # a model run by mlx-lm has none
        self.experts = None if stream is None else stream.begin_request()
        self.slot = slot
        if prefixes is not None and cached < len(self.prompt):
            found = prefixes.restore(self.prompt, slot.state, self.reading, cached)
            if found.length:
                cached, slot.marks = found.length, []
            self.matched = found.matched
            self.offered = {found.branch: "branch", **self.reading.kept_cuts()}
        self.cached, self.matched = cached, max(self.matched, cached)
        self.end = len(self.prompt) - (self._unread_after(cached) or self._joins_last(cached))
        self.turns = {at for at, why in self.reading.marks.items() if why == "turn"}
        if self.call.shared is None and slot.state.can_save:  # a longer prompt has no cut where this one ends
            self.turns.update(self.reading.points[-2:-1].tolist())
        if cached in self.turns and cached not in [mark.length for mark in slot.marks]:
            slot.mark(cached, self.turns)
        return cached < self.end

    def _shared(self, end: int) -> int:
        return end if self.call.shared is None else min(self.call.shared, end)

    def _reading(self) -> Reading:
        """Return the steps of the prompt, as if it were read from its beginning."""
        last, grid = self._unread(MAX_DECODE_ROWS), self.target.model.ops.prefill_rows
        end = len(self.prompt) - last
        replies = [(max(first - last, 0), behind) for first, behind in self.call.replies]
        marks = {**self.call.marks, self._shared(end): "turn"}
        return Reading(end, grid, marks, replies, self.target.model.prompt_rows, self.target.model.ops.short_rows)

    def _unread(self, new: int) -> int:
        """Count the tokens, of the last `new` of the prompt, that prefill leaves to the decoder's first step.

        Only WeDLM leaves any: all if they are few, which saves a forward pass, else the last one, because prefill reads
        the others faster. With `attention_window` it leaves none, because decoding attends to less than prefill.
        """
        if not self.speculation.fills or self.target.decoding is not self.target.model:
            return 0
        most = most_unread(self.speculation.wedlm)
        return new if new <= most else min(most, 1)

    def _unread_after(self, cached: int) -> int:
        """Count the tokens that prefill leaves to the decoder's first step, after `cached` kept tokens.

        A long step of the prompt is never left to the decoder, because its rows have other bits in a short step.
        """
        if any(first >= cached for first, _ in self.reading.long_steps):
            return len(self.prompt) - self.reading.end
        return self._unread(len(self.prompt) - cached)

    def _joins_last(self, cached: int) -> bool:
        """Test whether a step of decoding, shared with other replies, reads the prompt's last token.

        A row of a short step does not depend on the other rows. False if a draft would then lack the row.
        """
        model, last = self.target.model, len(self.prompt) - 1
        plain = self.speculation.kind == "off" and target_of(model) is model is self.target.decoding
        return plain and self.call.shared == last and cached <= last

    def read(self, divides: bool, beside: bool) -> tuple[Step, Array] | None:
        """Run the next step of the prompt, or with `divides` its next part; return the step if it is complete.

        The step is returned with the logits (n, vocab) of the prompt's last row, or of no rows.

        beside  other sequences run, so that short steps are divided too
        """
        step, rows = self._prompt_step(divides and beside)
        assert self.slot
        model, state = self.target.model, self.slot.state
        if not divides:
            return step, model.forward(state, step, rows)
        parts, self.unfinished_parts = self.unfinished_parts or model.forward_in_parts(state, step, rows), None
        try:
            next(parts)
        except StopIteration as done:
            return step, done.value
        self.unfinished_parts = parts
        return None

    def _next_cut(self, divides: bool) -> int:
        """Return the end of the prompt's next step.

        With `divides` a short step has at most SHARED_ROWS rows, none of whose bits depend on the other rows.
        """
        assert self.slot
        at = self.slot.state.length
        cut = self.reading.next_cut(at)
        is_short = cut - at <= self.reading.short_rows(at)
        return min(cut, at + SHARED_ROWS) if divides and is_short else cut

    def _prompt_step(self, divides: bool) -> tuple[Step, slice]:
        """Return (the next step of the prompt, the rows whose logits are needed)."""
        assert self.slot
        at, cut = self.slot.state.length, self._next_cut(divides)
        n = cut - at
        rows = slice(n - 1, n) if cut == len(self.prompt) else slice(0, 0)
        return Step.of_prompt(np.asarray(self.prompt[at:cut], np.int32), at, self.reading.short_rows(at)), rows

    def commit_prompt_step(self, step: Step, logits: Array, prefixes: Prefixes | None) -> bool:
        """Commit a step of the prompt; return whether more steps are left."""
        assert self.slot
        state, end = self.slot.state, self.end
        state.commit_prompt(step)
        at = state.length
        if at in self.turns:
            self.slot.mark(at, self.turns, logits if at == len(self.prompt) else None)
        if prefixes is not None and at in self.offered:
            prefixes.offer(self.prompt[:at], state, self.offered[at])
        if self.options.on_prefill:
            self.options.on_prefill(at - self.cached, end - self.cached)
        return at < end

    # -- the reply ---------------------------------------------------------------------------------------------------

    def take_tuner(self, tuner: TunerShare) -> None:
        """Take the tuner that chooses the budgets of the reply, before the decoder begins."""
        assert self.run
        self.tuner = self.run.tuner = tuner

    def decode(self, logits: Array) -> None:
        """Begin to decode from the logits (1, vocab) of the prompt's last row, unless some of the prompt is unread."""
        assert self.slot
        state, target = self.slot.state, self.target
        unread = self.prompt[state.length :]
        self.run = DecoderRun(
            target.decoding, state, logits, self.sampler, self.prompt, self.speculation, unread=unread
        )
        self.first_token_at = self.last_token_at = time.perf_counter()
        self.decoder = decode(self.run)

    @property
    def asked_rows(self) -> tuple[State, Rows | Stretch]:
        """Return (the state, the decoder's request for rows)."""
        assert self.slot
        assert isinstance(self.request, Rows | Stretch)
        return self.slot.state, self.request

    @property
    def asked_draft(self) -> tuple[State, Draft]:
        """Return (the state, the decoder's request for a draft)."""
        assert self.slot
        assert type(self.request) is Draft
        return self.slot.state, self.request

    def advance(self, answer: Any) -> bool:
        """Send the decoder the answer to its request, and handle its requests until it needs rows or a draft.

        The answer is None to a stretch whose tokens have been handed out. Returns False at the end of the reply.
        """
        decoder, ops, stretch = self.decoder, self.target.model.ops, self.request
        assert decoder is not None
        if type(stretch) is Stretch and answer is not None:
            token = token_of(ops, stretch.token)
            stretch.note(token)
            if not self.take(token, stretch.row):
                return False
            if stretch.goes_on(answer):
                self.opened = self.opened or self.new_tokens
                return True
            answer = None
        while True:
            try:
                request = decoder.send(answer)
            except StopIteration:
                return False
            if type(request) is Emit:
                if not self.take(request.token, request.row):
                    return False
                answer = None
            elif type(request) is Read:
                answer = read(ops, request.arrays)
            elif type(request) is Choose:
                answer = ops.sample(array_of(request.logits), request.sampler)
            else:
                assert type(request) is Draft or isinstance(request, ASKS_ROWS)
                self.request = request
                self.opened = self.opened or self.new_tokens
                return True

    def take(self, token: int, row: Array) -> bool:
        """Add a token of the reply, with the logits (1, vocab) of its row; return whether the reply continues.

        The row is needed if the options request log-probabilities. A step of a small model may be as short as the
        host's work for its tokens, most of which is done here.
        """
        assert self.slot
        self.slot.tokens.append(token)
        if self.call.cancel.is_set():
            self.new_tokens += 1
            self.reason = "cancelled"
            return False
        return self._show(token, row)

    def keep(self, tokens: List[int]) -> bool:
        """Keep tokens for `take_kept`, unless they may end the reply or need their rows; return whether they are."""
        assert self.slot
        assert type(self.request) is DraftStretch
        if not self.new_tokens or self.with_rows or self.text.stop or not self.ends.isdisjoint(tokens):
            return False
        if self.options.max_tokens is not None and self.new_tokens + len(tokens) >= self.options.max_tokens:
            return False
        self.slot.tokens += tokens
        self.request.kept = list(tokens)
        return True

    def take_kept(self) -> None:
        """Add the kept tokens to the reply, all of them, since the state holds them."""
        if type(self.request) is DraftStretch and self.request.kept:
            tokens, self.request.kept = self.request.kept, []
            for token in tokens:
                self._show(token, None)

    def _show(self, token: int, row: Array) -> bool:
        """Add a token to the pending piece, as `take` does."""
        self.last_token_at = time.perf_counter()
        if not self.new_tokens:
            self.first_token_at = self.last_token_at
        self.new_tokens += 1
        call, pending, tokenizer = self.call, self.pending, self.target.tokenizer
        if token in self.ends:
            self.reason, pending.end_token = "stop", token
            pending.end = self._logprob(token, row) if self.with_rows else None
            return False
        pending.tokens.append(token)
        if self.with_rows:
            pending.logprobs.append(self._logprob(token, row))
        text = ""  # of ids beyond a padded vocabulary, and of end tokens that do not end the reply
        if token < tokenizer.vocab_size and token not in tokenizer.end_ids:
            text = self.detokenizer.push(token)
        if self.text.stop:
            text = self.text.push(text)
            if self.text.stopped:
                self.reason, pending.text = "stop", text
                return False
        pending.text = text
        if self.new_tokens == self.options.max_tokens:
            return False
        if text:
            call.put(pending)
            self.pending = Piece()
        return True

    def _logprob(self, token: int, row: Array) -> Logprob:
        """Compute the log-probability of a token that was chosen from `row` (1, vocab)."""
        assert self.options.logprobs is not None
        (host,) = read(self.target.model.ops, (row,))
        return Logprob.of(host[-1], token, self.options.logprobs)

    def finish(self) -> None:
        """Put the last piece, with the reason and the statistics."""
        if not self.text.stopped:
            self.pending.text += self.text.flush()  # an incomplete last character is not shown
        self.pending.finish_reason = self.reason
        self.pending.stop = self.text.stopped_by
        model, run = self.target.model, self.run
        stream = None if self.experts is None else model.expert_stream
        self.pending.stats = Stats(
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached,
            matched_tokens=self.matched,
            new_tokens=self.new_tokens,
            prefill_seconds=self.first_token_at - self.started,
            decode_seconds=self.last_token_at - self.first_token_at,
            step_bytes=model.step_bytes,
            state_bytes=self.slot.state.nbytes if self.slot else 0,
            peak_bytes=model.ops.peak_bytes(),
            accepted=None if run is None or not self.speculation.drafts else run.stats,
            wedlm=None if run is None or not self.speculation.fills else run.wedlm,
            plain_seconds=None if self.tuner is None else self.tuner.plain_seconds,
            experts=None if stream is None else stream.stats(self.experts),
            first_tokens=self.opened or self.new_tokens,
        )
        self.call.put(self.pending)
