"""Events as bytes: JSON, server-sent events, lines of JSON, and figures that several dialects send."""

import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any, Protocol

from common.pieces import Logprob, Stats
from common.tokenizer import Tokenizer
from generate.server.events import Event, Usage, Whole
from generate.server.task import Task

LEAST_LOGPROB = -9999.0  # in place of minus infinity, which JSON lacks
ENDS = {"\x85": r"\u0085", "\u2028": r"\u2028", "\u2029": r"\u2029"}  # where some clients end a line, beside "\n"


class StreamWriter(Protocol):
    """Writes the events of a reply as they arrive.

    `begin` is called with the tokens of all prompts, `push` with the index of the reply.

    ping  the keep-alive that is sent while nothing else is, also before `begin`
    """

    @property
    def ping(self) -> bytes: ...

    def begin(self, tokens: int) -> Iterable[bytes]: ...

    def push(self, index: int, event: Event) -> Iterable[bytes]: ...

    def end(self) -> Iterable[bytes]: ...


@dataclass(frozen=True)
class Parsed:
    """A request of any dialect: its task, and the writers of its reply.

    writer  makes the writer of a stream, given the id of the request
    whole   makes the body of a reply that is sent whole
    media   of a stream
    """

    task: Task
    writer: Callable[[str], StreamWriter]
    whole: Callable[[Sequence[Whole]], Any]
    media: str = "text/event-stream"


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def dumps(value: Any) -> bytes:
    return _bytes(_encode(value))


def _bytes(text: str) -> bytes:
    """Encode JSON text, in which only strings have ends of lines, as one line."""
    if not text.isascii():
        for end, escaped in ENDS.items():
            text = text.replace(end, escaped)
    return text.encode(errors="replace")


class Frame:
    """A message that is sent for each piece of a text; only a few of its values differ.

    make   writes the message with given texts as these values, in order
    count  of these values
    """

    def __init__(self, make: Callable[..., bytes], count: int = 1):
        markers = [secrets.token_hex(16) for _ in range(count)]
        rest, self._before = make(*markers), list[bytes]()
        for marker in markers:
            before, _, rest = rest.partition(f'"{marker}"'.encode())
            self._before.append(before)
        self._end = rest

    def of(self, *values: str | int) -> bytes:
        """Return the message with `values`."""
        parts: list[bytes] = []
        for before, value in zip(self._before, values, strict=True):
            text = encode_basestring(value) if isinstance(value, str) else str(value)
            parts += before, _bytes(text)
        return b"".join((*parts, self._end))


def sse(value: Any) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


def named_sse(name: str, value: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + dumps(value) + b"\n\n"


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def now() -> int:
    return int(time.time())


def openai_usage(usage: Usage) -> dict[str, Any]:
    """Return the usage object of Chat Completions and Completions."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning,
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.rejected,
        },
    }


def timings(stats: Stats, usage: Usage) -> dict[str, Any]:
    """Return the times of a reply, under llama.cpp's names; with a WeDLM model its windows' too."""
    read = stats.prompt_tokens - stats.cached_tokens
    found: dict[str, Any] = {
        "cache_n": stats.cached_tokens,
        "prompt_n": read,
        "prompt_ms": round(1000 * stats.prefill_seconds, 3),
        "prompt_per_second": round(stats.prefill_tps, 3),
        "predicted_n": stats.new_tokens,
        "predicted_ms": round(1000 * stats.decode_seconds, 3),
        "predicted_per_second": round(stats.decode_tps, 3),
    }
    if stats.accepted is not None:
        found |= {"draft_n": usage.accepted + usage.rejected, "draft_n_accepted": usage.accepted}
    if stats.wedlm is not None:
        found["wedlm"] = stats.wedlm.figures
    return found


def token_text(tokenizer: Tokenizer, token: int) -> tuple[str, bytes]:
    """Return the text of one token, in which half a character is U+FFFD, and its bytes; padding ids have none."""
    data = tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b""
    return data.decode(errors="replace"), data


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def chat_logprobs(tokenizer: Tokenizer, logprobs: Iterable[Logprob]) -> list[dict[str, Any]]:
    """List log-probabilities as Chat Completions and Responses do."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, data = token_text(tokenizer, token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(data)}

    return [
        entry(one.token, one.logprob) | {"top_logprobs": [entry(token, value) for token, value in one.top]}
        for one in logprobs
    ]
