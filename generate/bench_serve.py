"""`python -m generate bench --serve URL`: load test of a server, this one or another with the same routes.

Requests are streamed Chat Completions. `--concurrency` is the number of requests that run at once; with `--rate`
requests start at random times, `--rate` per second on average. Prompts are random words, other ones in every run, so
that no prefix cache has them; `--seed` repeats the prompts of a run. The server's tokenizer counts their tokens, by the
routes /tokenize and /detokenize of llama.cpp and vLLM; for a server without them a prompt has as many words.
"""

import asyncio
import json
import random
import ssl
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from tqdm import tqdm

from common.amounts import counted
from common.errors import BimetalError
from common.terminal import printable
from generate.bench_log import environment, log
from generate.bench_options import ServeBench

WORDS = (
    "the",
    "a",
    "of",
    "to",
    "in",
    "is",
    "on",
    "that",
    "by",
    "with",
    "as",
    "for",
    "was",
    "it",
    "from",
    "at",
    "one",
    "all",
)
MOST_LINE = 1 << 20  # bytes of one event
CONNECTING = 10.0  # seconds for the first connection
PERCENTILES = (50, 95, 99)
NO_ROUTE = ("404", "405", "422", "501")  # statuses of a server that lacks a route, or has another one of its name
TRIES = 8  # most changes of a text until it has the tokens of a prompt
TOKENIZED = 16  # prompts at a time


class NoTokenizerError(Exception):
    """The server does not show its tokenizer."""


@dataclass
class Answer:
    """Result of one request; times in seconds.

    first   from the request to the first token
    total   from the request to the end of the reply
    gaps    between events that bring tokens
    tokens  of the reply as the server counts them, else the events that brought text
    """

    first: float = 0.0
    total: float = 0.0
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    error: str = ""


def run(options: ServeBench) -> int:
    """Print what the server delivers; 1 where a request failed, BimetalError where all did."""
    asyncio.run(_check(options.serve, min(options.timeout, CONNECTING)))
    prompts, lengths = asyncio.run(_prompts(options))
    answers, seconds = asyncio.run(_load(options, prompts))
    good = [answer for answer in answers if not answer.error]
    errors = [answer.error for answer in answers if answer.error]
    for error in dict.fromkeys(errors):
        print(f"{errors.count(error)} failed: {printable(error)}", file=sys.stderr)
    if not good:
        raise BimetalError(f"{options.serve} answered none of the requests, {options.requests} in all")
    tokens = sum(answer.tokens for answer in good)
    print(f"{options.serve}, {_how(options)}, {_size(options, lengths)}, {options.new_tokens} new tokens")
    print(
        f"{counted(len(good), 'reply', 'replies')} in {seconds:.1f} s, {len(errors)} failed; "
        f"{tokens / seconds:.1f} tokens/s in all"
    )
    figures = {
        "first token, ms": [answer.first for answer in good],
        "between tokens, ms": [gap for answer in good for gap in answer.gaps],
        "whole reply, ms": [answer.total for answer in good],
    }
    print(f"{'':20} " + " ".join(f"{'p' + str(p):>9}" for p in PERCENTILES))
    for name, values in figures.items():
        print(f"{name:20} " + " ".join(f"{1e3 * percentile(values, p):9.1f}" for p in PERCENTILES))
    if options.log:
        log(Path(options.log), [_row(options, lengths, tokens / seconds, figures, len(errors))])
    return 1 if errors else 0


def percentile(values: list[float], percent: int) -> float:
    """Return the value below which `percent` % of the sorted values lie; NaN without values."""
    if not values:
        return float("nan")
    return sorted(values)[min(len(values) - 1, percent * len(values) // 100)]


def _how(options: ServeBench) -> str:
    return f"{options.rate:g} requests/s" if options.rate else f"{options.concurrency} at a time"


def _size(options: ServeBench, lengths: Sequence[int]) -> str:
    if not lengths:
        return f"{options.prompt_tokens} prompt words"
    least, most = min(lengths), max(lengths)
    return f"{most if least == most else f'{least} to {most}'} prompt tokens"


def _row(
    options: ServeBench, lengths: Sequence[int], speed: float, figures: dict[str, list[float]], errors: int
) -> dict[str, object]:
    text = "; ".join(
        f"{name} " + "/".join(f"{1e3 * percentile(values, p):.1f}" for p in PERCENTILES)
        for name, values in figures.items()
    )
    notes = f"p50/p95/p99: {text}", f"{errors} failed" if errors else "", "" if lengths else _size(options, lengths)
    return environment("numpy") | {
        "model": options.serve,
        "decoder": f"serve, {_how(options)}",
        "prompt_tokens": max(lengths, default=""),
        "new_tokens": options.new_tokens,
        "runs": options.requests,
        "decode_tps_median": f"{speed:.1f}",
        "verdict": options.verdict,
        "note": "; ".join(filter(None, (*notes, options.note))),
    }


async def _check(address: str, seconds: float) -> None:
    """Check that a connection to the server can be made within `seconds`; raises BimetalError if not."""
    try:
        (await asyncio.wait_for(_connection(urlsplit(address)), seconds))[1].close()
    except OSError as error:
        why = error.strerror or str(error) or f"no connection within {seconds:g} s"
        raise BimetalError(f"no server answers at {address}: {why}; start it, or give another --serve URL") from None


async def _prompts(options: ServeBench) -> tuple[list[str], list[int]]:
    """Make the prompts, and count the tokens of each; no counts where the server does not show its tokenizer."""
    chance, room = random.Random(options.seed), asyncio.Semaphore(TOKENIZED)
    texts = [" ".join(chance.choices(WORDS, k=options.prompt_tokens)) for _ in range(options.requests)]

    async def one(text: str) -> tuple[str, int]:
        async with room:
            return await _fitted(options, text)

    try:
        fitted = await asyncio.gather(*map(one, texts))
    except NoTokenizerError:
        words = f"--prompt-tokens {options.prompt_tokens} counts words"
        print(f"{options.serve} has no /tokenize and /detokenize by which tokens are counted; {words}", file=sys.stderr)
        return texts, []
    return [text for text, _ in fitted], [length for _, length in fitted]


async def _fitted(options: ServeBench, text: str) -> tuple[str, int]:
    """Cut or lengthen a text to the tokens of a prompt; return it and its tokens.

    Their number may differ from the requested one if the tokenizer does not encode its own texts to the same tokens.
    """
    words, requested = text.split(), options.prompt_tokens
    ids = await _tokenize(options, text)
    for _ in range(TRIES):
        if len(ids) > requested:
            text = (await _entry(options, "/detokenize", {"tokens": ids[:requested]}, "content", "prompt")).lstrip()
        elif len(ids) < requested:
            text = " ".join([text, *words[: requested - len(ids)]])
        else:
            break
        ids = await _tokenize(options, text)
    return text, len(ids)


async def _tokenize(options: ServeBench, text: str) -> list[int]:
    """Return the tokens of a text, without those by which a prompt begins or ends."""
    plain = {"add_special": False, "add_special_tokens": False}
    found: list[int] = await _entry(options, "/tokenize", {"content": text, "prompt": text, **plain}, "tokens")
    return found


async def _entry(options: ServeBench, path: str, body: dict[str, Any], *keys: str) -> Any:
    """Return the first of the entries `keys` in the answer of a route; raises NoTokenizerError if it has none."""

    async def ask() -> tuple[str, bytes]:
        async with _asking(options, path, body) as reader:
            status, chunked = await _head(reader)
            return status, b"".join([part async for part in _parts(reader, chunked)])

    try:
        status, answer = await asyncio.wait_for(ask(), options.timeout)
    except (OSError, EOFError, ValueError) as error:
        raise BimetalError(f"{options.serve}{path} does not answer: {error or type(error).__name__}") from None
    if not status.startswith(("200", *NO_ROUTE)):
        raise BimetalError(f"{options.serve}{path} answered {status}{_reason(answer)}")
    try:
        found = json.loads(answer)
        return next(found[key] for key in keys if key in found)
    except (ValueError, TypeError, StopIteration):
        raise NoTokenizerError from None


async def _load(options: ServeBench, prompts: Sequence[str]) -> tuple[list[Answer], float]:
    """Send all requests; return their answers, and the seconds from the first request to the last answer."""
    chance, room = random.Random(options.seed), asyncio.Semaphore(options.concurrency)
    with tqdm(total=len(prompts), desc="requests", leave=False, disable=None) as bar:

        async def one(prompt: str) -> Answer:
            try:
                return await asyncio.wait_for(_ask(options, prompt), options.timeout)
            except TimeoutError:
                return Answer(error=f"no whole reply within {options.timeout:g} s")
            except (OSError, EOFError, ValueError, BimetalError) as error:
                return Answer(error=str(error) or type(error).__name__)
            finally:
                bar.update()

        async def turn(prompt: str) -> Answer:
            async with room:
                return await one(prompt)

        started = time.perf_counter()
        if not options.rate:
            answers = await asyncio.gather(*map(turn, prompts))
        else:
            tasks = []
            for prompt in prompts:
                tasks.append(asyncio.create_task(one(prompt)))
                await asyncio.sleep(chance.expovariate(options.rate))
            answers = await asyncio.gather(*tasks)
        return answers, time.perf_counter() - started


async def _ask(options: ServeBench, prompt: str) -> Answer:
    """Send one request and read its events."""
    started = time.perf_counter()
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": options.new_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with _asking(options, "/v1/chat/completions", body) as reader:
        answer, last, events = Answer(), started, 0
        async for event in _events(reader):
            if error := event.get("error"):
                raise BimetalError(str(error.get("message", error) if isinstance(error, dict) else error))
            answer.tokens = (event.get("usage") or {}).get("completion_tokens", answer.tokens)
            if not any(_brings_text(choice) for choice in event.get("choices") or ()):
                continue
            now, events = time.perf_counter(), events + 1
            if events == 1:
                answer.first = now - started
            else:
                answer.gaps.append(now - last)
            last = now
        answer.total, answer.tokens = time.perf_counter() - started, answer.tokens or events
        if not events:
            raise BimetalError("the reply has no text")
        return answer


@asynccontextmanager
async def _asking(options: ServeBench, path: str, values: dict[str, Any]) -> AsyncIterator[asyncio.StreamReader]:
    """Send a request on a connection of its own, from which its answer is read."""
    url = urlsplit(options.serve)
    body = json.dumps(values | ({"model": options.model} if options.model else {})).encode()
    reader, writer = await _connection(url)
    try:
        head = [
            f"POST {path} HTTP/1.1",
            f"Host: {url.netloc.rpartition('@')[2]}",
            "Content-Type: application/json",
            "Connection: close",
            f"Content-Length: {len(body)}",
            *([f"Authorization: Bearer {options.api_key}"] if options.api_key else []),
        ]
        writer.write("\r\n".join([*head, "", ""]).encode() + body)
        await writer.drain()
        yield reader
    finally:
        writer.close()


async def _connection(url: SplitResult) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    secure = ssl.create_default_context() if url.scheme == "https" else None
    return await asyncio.open_connection(url.hostname, url.port or (443 if secure else 80), ssl=secure, limit=MOST_LINE)


def _brings_text(choice: dict) -> bool:
    delta = choice.get("delta") or {}
    return bool(delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"))


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[dict]:
    """Yield the JSON of a streamed answer's events; raises BimetalError for a status other than 200."""
    status, chunked = await _head(reader)
    if not status.startswith("200"):
        body = b"".join([part async for part in _parts(reader, chunked)])
        raise BimetalError(f"the server answered {status}{_reason(body)}")
    held = b""
    async for part in _parts(reader, chunked):
        *lines, held = (held + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                yield json.loads(data)


async def _head(reader: asyncio.StreamReader) -> tuple[str, bool]:
    """Read the head of an answer: its status, as in "404 Not Found", and whether its body comes in chunks."""
    status = (await reader.readline()).decode("latin-1").partition(" ")[2].strip()
    chunked = False
    while line := (await reader.readline()).strip():
        chunked |= line.lower().replace(b" ", b"") == b"transfer-encoding:chunked"
    return status or "nothing", chunked


def _reason(body: bytes) -> str:
    """Return ": " and the server's message in the body of a refusal; "" if there is none."""
    try:
        error = json.loads(body)["error"]
        return f": {error['message'] if isinstance(error, dict) else error}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


async def _parts(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """Yield the bytes of a body as they arrive, with or without chunked encoding."""
    if not chunked:
        while part := await reader.read(1 << 16):
            yield part
        return
    while size := int((await reader.readline()).split(b";")[0].strip() or b"0", 16):
        yield await reader.readexactly(size)
        await reader.readline()
