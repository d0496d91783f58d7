"""One timeline over a model: reuse what it has already read, read the rest of the prompt, decode the reply.

The command line, the Python API and the bench all generate through `Session.stream`.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from common.decode.budget import Tuner
from common.decode.plain import plain
from common.decode.speculative import Accepted, Speculation, check, speculate
from common.errors import BimetalError, UsageError
from common.models import Model
from common.models.window import windowed
from common.ops import Array, Ops
from common.reply import Parts, ReplyParser, overlap
from common.sampling import Sampler, Sampling, log_softmax
from common.step import Snapshot, Step
from common.tokenizer import Tokenizer

PREFILL_ROWS = Ops.prefill_rows  # where all logits of a step are wanted


@dataclass(frozen=True)
class Logprob:
    """Natural log-probability of a token under the model's own distribution, before penalties and temperature."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the best alternatives, best first


@dataclass(frozen=True)
class Stats:
    """Seconds, tokens and bytes of one reply."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens already in the state
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float  # from the first token to the last
    step_bytes: int  # weight bytes read per decoded token
    state_bytes: int
    peak_bytes: int
    accepted: Accepted | None = None  # where speculation was on
    plain_seconds: float | None = None  # of a step that guesses nothing, where one was measured

    @property
    def speedup(self) -> float | None:
        """Tokens per second over those of steps that guess nothing; None where none was measured."""
        return None if self.plain_seconds is None else self.decode_tps * self.plain_seconds

    @property
    def prefill_tps(self) -> float:
        return (self.prompt_tokens - self.cached_tokens) / max(self.prefill_seconds, 1e-9)

    @property
    def decode_tps(self) -> float:
        return (self.new_tokens - 1) / self.decode_seconds if self.new_tokens > 1 else 0.0

    @property
    def gb_per_s(self) -> float:
        """Weight bytes per second of decoding, in 1e9."""
        return self.step_bytes * self.decode_tps / 1e9


@dataclass
class Piece(Parts):
    """What became certain of a reply, the tokens it came from, and on the last piece why the reply ended.

    finish_reason  "stop": an end token or a stop string; "tool_calls": the same, after calls; "length": max_tokens or
                   the context; "cancelled"
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str | None = None
    stats: Stats | None = None


def take_apart(pieces: Iterable[Piece], parser: ReplyParser) -> Iterator[Piece]:
    """The same reply with its reasoning and tool calls out of the text; a piece comes when any of them is certain."""
    out = Piece()
    for piece in pieces:
        out.tokens += piece.tokens
        out.logprobs += piece.logprobs
        parser.push(piece.text, out)
        if piece.finish_reason:
            parser.finish(out)
            called = parser.calls and piece.finish_reason == "stop"
            out.finish_reason, out.stats = "tool_calls" if called else piece.finish_reason, piece.stats
        if out.text or out.reasoning or out.tool_calls or out.finish_reason:
            yield out
            out = Piece()


class Session:
    """A model's state and the tokens committed to it. Not thread-safe: one owner at a time.

    fa_window  most positions that decoding attends to; None: all. Changes the text
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, context: int, fa_window: int | None = None):
        self.model, self.tokenizer, self.context = model, tokenizer, context
        self.decoding = model if fa_window is None else windowed(model, fa_window)
        self.tuners: dict[Speculation, Tuner] = {}
        self.state = self.model.new_state(self.context)
        self._empty = self.state.snapshot()
        self.reset()

    @property
    def tokens(self) -> list[int]:
        """Committed to the state."""
        return self.text[: self.state.length]

    def reset(self) -> None:
        self.state.restore(self._empty)  # a new state would have no graphs captured
        self.text: list[int] = []  # the last prompt and its reply
        self.accepted = Accepted()
        # what the next prompt may begin with, the state after it, and the logits where that is a whole prompt
        self.turn: tuple[list[int], Snapshot, Array | None] | None = None

    def stream(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        top_logprobs: int | None = None,
        cancel: threading.Event | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
        speculation: Speculation | None = None,
        shared: int | None = None,
    ) -> Iterator[Piece]:
        """Generate a reply to `prompt` (token ids), piece by piece.

        top_logprobs  None for no log-probabilities, else how many alternatives to list
        cancel        ends the reply at the next step, also during prefill
        on_prefill    called with (tokens read, tokens to read)
        speculation   how to guess ahead; None: one token per step
        shared        tokens of the prompt that the next one will begin with, whatever the reply; None: all
        """
        prompt, speculation = list(prompt), speculation or Speculation()
        self._check(prompt, max_tokens, stop, top_logprobs)
        if speculation.kind != "off":
            check(speculation, self.model)
        started = time.perf_counter()
        cached = self._rewind(prompt)
        logits = self._prefill(prompt, len(prompt) if shared is None else shared, cancel, on_prefill)
        first = last = time.perf_counter()
        new, pending = 0, Piece()
        text = StopText(stop)
        decoder = self.tokenizer.decoder()
        reason = "cancelled" if logits is None else "length"
        with closing(self._decode(logits, Sampler(sampling, prompt), speculation)) as tokens:
            for token, row in tokens:
                last = time.perf_counter()
                if not new:
                    first = last
                new += 1
                self.text.append(token)
                if cancel is not None and cancel.is_set():
                    reason = "cancelled"
                    break
                if token in self.tokenizer.end_ids:
                    reason = "stop"
                    break
                pending.tokens.append(token)
                if top_logprobs is not None:
                    pending.logprobs.append(_logprob(self.model.ops.read(row)[-1], token, top_logprobs))
                known = token < self.tokenizer.vocab_size  # a padded vocabulary ends in ids without text
                pending.text = text.push(decoder.push(token) if known else "")
                if text.stopped:
                    reason = "stop"
                    break
                if max_tokens is not None and new >= max_tokens:
                    break
                if pending.text:
                    yield pending
                    pending = Piece()
        if not text.stopped:
            pending.text += text.flush()  # a character that the end cuts in half is not shown
        pending.finish_reason = "stop" if text.stopped else reason
        pending.stats = Stats(
            prompt_tokens=len(prompt),
            cached_tokens=cached,
            new_tokens=new,
            prefill_seconds=first - started,
            decode_seconds=last - first,
            step_bytes=self.model.step_bytes,
            state_bytes=self.state.nbytes,
            peak_bytes=self.model.ops.peak_bytes(),
            accepted=self.accepted if speculation.kind != "off" else None,
            plain_seconds=self.tuners[speculation].plain_seconds if speculation in self.tuners else None,
        )
        yield pending

    def _decode(
        self, logits: Array | None, sampler: Sampler, speculation: Speculation
    ) -> Generator[tuple[int, Array], None, None]:
        if logits is None:
            return
        if speculation.kind == "off":
            yield from plain(self.decoding, self.state, logits, sampler)
            return
        if speculation.budget is None and speculation not in self.tuners:
            self.tuners[speculation] = speculation.tuner(self.model)
        self.accepted = Accepted()
        tuner, text = self.tuners.get(speculation), list(self.text)
        yield from speculate(self.decoding, self.state, logits, sampler, text, speculation, tuner, self.accepted)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """The logits after each of `tokens`, read from an empty state: (T, vocab) float32."""
        self._check_fits(len(tokens))
        state = self.model.new_state(self.context)
        out = []
        for at in range(0, len(tokens), PREFILL_ROWS):
            chunk = np.asarray(tokens[at : at + PREFILL_ROWS], np.int32)
            out.append(self.model.ops.read(self.model.forward(state, Step.chain(chunk, at))))
            state.commit(np.arange(len(chunk)))
        return np.concatenate(out)

    def _rewind(self, prompt: list[int]) -> int:
        """Bring the state to a prefix of `prompt`, and return its length.

        A recurrent state cannot drop tokens, so the choices are the state as it is, as it was after what the last
        prompt shares with this one, or empty.
        """
        if self.tokens == prompt[: len(self.tokens)] and len(self.tokens) < len(prompt):
            return len(self.tokens)
        if self.turn:
            text, snapshot, logits = self.turn
            if text == prompt[: len(text)] and (len(text) < len(prompt) or logits is not None):
                self.text = list(text)
                self.state.restore(snapshot)
                return len(text)
        self.reset()
        return 0

    def _prefill(
        self,
        prompt: list[int],
        shared: int,
        cancel: threading.Event | None,
        on_prefill: Callable[[int, int], None] | None,
    ) -> Array | None:
        """Run the prompt's tokens that the state lacks; the last row's logits (1, vocab), or None if cancelled.

        A state that has read past `shared` keeps what it could go back to before.
        """
        self.text = list(prompt)
        start = at = self.state.length
        end, logits = len(prompt), None
        if at == end:  # the same prompt again
            assert self.turn
            return self.turn[2]
        while at < end:
            if cancel is not None and cancel.is_set():
                return None
            n = min(self.model.ops.prefill_rows, (shared if at < shared else end) - at)
            chunk = np.asarray(prompt[at : at + n], np.int32)
            rows = slice(n - 1, n) if at + n == end else slice(0, 0)
            logits = self.model.forward(self.state, Step.chain(chunk, at), rows)
            self.state.commit(np.arange(n))
            at += n
            if at == shared:
                self.turn = prompt[:at], self.state.snapshot(), logits if at == end else None
            if on_prefill:
                on_prefill(at - start, end - start)
        return logits

    def _check(self, prompt: list[int], max_tokens: int | None, stop: Sequence[str], top: int | None) -> None:
        if not prompt:
            raise UsageError("the prompt is empty; it must have at least one token")
        vocab = self.model.config.vocab
        for token in prompt:
            if not 0 <= token < vocab:
                raise UsageError(f"token id {token} is outside the vocabulary of {vocab}")
        if max_tokens is not None and max_tokens < 1:
            raise UsageError(f"max_tokens is {max_tokens}; it must be at least 1")
        if any(not s for s in stop):
            raise UsageError("a stop string is empty; each must have at least one character")
        if top is not None and not 0 <= top <= vocab:
            raise UsageError(f"top_logprobs is {top}; it must be from 0 to {vocab}")
        self._check_fits(len(prompt))

    def _check_fits(self, tokens: int) -> None:
        if tokens > self.context:
            raise BimetalError(
                f"the prompt has {tokens} tokens and the context holds {self.context}; shorten it or raise ctx "
                f"(the model was trained for {self.model.config.context})"
            )


class StopText:
    """Holds back text that may turn out to begin a stop string, and cuts at the first stop string."""

    def __init__(self, stop: Sequence[str]):
        self.stop = tuple(stop)
        self.held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Add text; what is now certain to lie before any stop string."""
        if not self.stop:
            return text
        self.held += text
        ends = [at for s in self.stop if (at := self.held.find(s)) >= 0]
        if ends:
            self.stopped = True
            out, self.held = self.held[: min(ends)], ""
            return out
        keep = max(overlap(self.held, s) for s in self.stop)
        out, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return out

    def flush(self) -> str:
        out, self.held = self.held, ""
        return out


def _logprob(row: np.ndarray, token: int, top: int) -> Logprob:
    logprobs = log_softmax(row)
    best = np.argsort(-logprobs, kind="stable")[:top]
    return Logprob(token, float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in best))
