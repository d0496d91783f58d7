"""Pieces of a reply as the engine returns them, log-probabilities and, at the end, statistics."""

from dataclasses import dataclass, field

import numpy as np

from common.decode.run import DecodeStats, WedlmStats
from common.expert_stats import ExpertStats
from common.reply import Parser, Parts
from common.sampling import best_of, log_softmax

LEAST_TIMED = 4  # tokens; with fewer the time is mostly that of the first step


@dataclass(frozen=True)
class Logprob:
    """Natural log-probability of a token under the model's own distribution, before penalties and temperature."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability) of the best alternatives, best first

    @classmethod
    def of(cls, row: np.ndarray, token: int, top: int) -> "Logprob":
        """Read `token` and the `top` best alternatives from a row of logits (vocab,) float32."""
        logprobs = log_softmax(row)
        best = best_of(logprobs, top).tolist() if top else ()
        return cls(token, float(logprobs[token]), tuple((i, float(logprobs[i])) for i in best))


@dataclass(frozen=True)
class Stats:
    """Seconds, tokens and bytes of one reply."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens that were already in the state
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float  # from the first token to the last
    step_bytes: int  # weight bytes read per decoded token
    state_bytes: int
    peak_bytes: int
    matched_tokens: int = 0  # first prompt tokens that an earlier text has too, with or without a state
    accepted: DecodeStats | None = None  # with speculative decoding
    wedlm: WedlmStats | None = None  # with the windows of a WeDLM model
    experts: ExpertStats | None = None  # with experts that are read while the model runs
    plain_seconds: float | None = None  # of a step without draft tokens, if one was measured
    first_tokens: int = 1  # tokens of the step that gave the first one; a WeDLM window gives several

    @property
    def speedup(self) -> float | None:
        """Divide tokens per second by those of plain decoding; None if no plain step was measured."""
        return None if self.plain_seconds is None else self.decode_tps * self.plain_seconds

    @property
    def prefill_tps(self) -> float:
        """Compute prompt tokens per second, without cached tokens."""
        return (self.prompt_tokens - self.cached_tokens) / max(self.prefill_seconds, 1e-9)

    @property
    def decode_tps(self) -> float:
        """Compute tokens per second of the steps after the first token's; 0 if there were none."""
        return self.timed_tokens / self.decode_seconds if self.timed_tokens else 0.0

    @property
    def timed_tokens(self) -> int:
        """Count the tokens that were generated in `decode_seconds`, by the steps after the first token's."""
        return max(self.new_tokens - self.first_tokens, 0)

    @property
    def is_timed(self) -> bool:
        """Test whether `decode_tps` is a mean over at least LEAST_TIMED tokens; otherwise it is not shown."""
        return self.timed_tokens >= LEAST_TIMED

    @property
    def gb_per_s(self) -> float:
        """Compute weight bytes read per second of decoding, in 1e9."""
        return self.step_bytes * self.decode_tps / 1e9


@dataclass(slots=True)
class Piece(Parts):
    """A part of a reply that can no longer change: text, its tokens, and on the last piece why the reply ended.

    finish_reason  "stop": an end token or a stop string; "tool_calls": as "stop", after calls; "length": max_tokens or
                   the context; "cancelled"
    stop           the stop string that ended the reply
    end_token      the end token that ended the reply
    end            its Logprob, if log-probabilities were requested
    thought        number of tokens of the reasoning and its tags, which precede all others
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str | None = None
    stats: Stats | None = None
    stop: str | None = None
    end_token: int | None = None
    end: Logprob | None = None
    thought: int = 0


class PieceParser:
    """Moves reasoning and tool calls out of the text of a reply; without a parser pieces stay as they are."""

    def __init__(self, parser: Parser | None):
        self.parser, self.out = parser, Piece()

    def push(self, piece: Piece) -> Piece | None:
        """Return the piece to show, once any part of it is certain."""
        if self.parser is None:
            return piece
        out = self.out
        out.tokens += piece.tokens
        out.logprobs += piece.logprobs
        begins_in_reasoning = self.parser.in_reasoning
        self.parser.push(piece.text, out)
        if begins_in_reasoning or self.parser.in_reasoning:
            out.thought = len(out.tokens)
        if piece.finish_reason:
            self.parser.finish(out, is_cut=piece.finish_reason == "length")
            called = self.parser.calls and piece.finish_reason == "stop"
            out.finish_reason, out.stats = "tool_calls" if called else piece.finish_reason, piece.stats
            out.stop, out.end_token, out.end = piece.stop, piece.end_token, piece.end
        if not (out.text or out.reasoning or out.tool_calls or out.finish_reason):
            return None
        self.out = Piece()
        return out
