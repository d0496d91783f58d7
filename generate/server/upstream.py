"""Another server that answers requests; its answers must be bounded, of known media types, and UTF-8."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2

from generate.server.errors import RETRY, ApiError
from generate.server.json_object import parse_json

CONNECTING, WRITING, SILENT = 10.0, 60.0, 600.0  # seconds: to connect, to send, and between parts of an answer
MOST_WHOLE = 32 << 20  # bytes of an answer that is not a stream
MOST_STREAM = 256 << 20
MOST_LINE = 8 << 20
MOST_REFUSAL = 1 << 16
MOST_MESSAGE = 500  # characters
WHOLE, STREAMS = "application/json", ("text/event-stream", "application/x-ndjson")
SAME = (400, 404, 405, 409, 413, 429)  # statuses that are passed to the client
BUSY = (503, 529)


@dataclass(frozen=True)
class Upstream:
    """The server to which requests are forwarded.

    base   its address, without /v1
    key    sent with each request; clients' own keys are not
    model  replaces the model in requests; None: it is not replaced
    """

    base: str
    key: str | None = field(default=None, repr=False)
    model: str | None = None

    def client(self, max_connections: int) -> httpx2.AsyncClient:
        """Make an HTTP client of at most `max_connections`, which ignores redirects and the machine's proxies."""
        return httpx2.AsyncClient(
            timeout=httpx2.Timeout(SILENT, connect=CONNECTING, write=WRITING),
            limits=httpx2.Limits(max_connections=max_connections),
            follow_redirects=False,
            trust_env=False,
        )

    @asynccontextmanager
    async def ask(
        self, client: httpx2.AsyncClient, method: str, path: str, body: bytes | None, passed: Mapping[str, str]
    ) -> AsyncIterator[httpx2.Response]:
        """Send a request, and yield an answer of status 200 whose body is unread; raises ApiError.

        passed  headers of the client that are forwarded
        """
        headers = {**passed, "accept-encoding": "identity", "user-agent": "bimetal"}
        headers |= {} if body is None else {"content-type": WHOLE}
        if self.key is not None:
            headers |= {"authorization": f"Bearer {self.key}", "x-api-key": self.key}
        try:
            async with client.stream(method, self.base + path, content=body, headers=headers) as response:
                if response.status_code != 200:
                    raise await self._refused(response)
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise ApiError(502, "the upstream server compressed its answer, which is not supported")
                yield response
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ApiError(502, f"the upstream server did not answer: {type(error).__name__}") from None

    async def _refused(self, response: httpx2.Response) -> ApiError:
        """Translate an answer of another status than 200 for the client."""
        status = response.status_code
        if status in (401, 403):
            return ApiError(502, "the upstream server refused this server's key", "upstream_key")
        message, code = refusal_of(await read_body(response, MOST_REFUSAL))
        if self.key:
            message = message.replace(self.key, "…")
        text = f"the upstream server answered {status}" + (f": {message}" if message else "")
        if status == 422:
            return ApiError(400, text, code)
        if status in BUSY or status == 429:
            return ApiError(429 if status == 429 else 503, text, code, retry=RETRY)
        return ApiError(status if status in SAME else 502, text, code)


def refusal_of(data: bytes) -> tuple[str, str | None]:
    """Read the message and the code of a refusal in any dialect; "" and None if it has none."""
    try:
        error = json.loads(data)["error"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return "", None
    text = error.get("message") if isinstance(error, dict) else error
    code = error.get("code") if isinstance(error, dict) else None
    message = "".join(c for c in text if c.isprintable())[:MOST_MESSAGE] if isinstance(text, str) else ""
    return message, code if isinstance(code, str) and code.isidentifier() and len(code) < 80 else None


async def read_body(response: httpx2.Response, max_bytes: int) -> bytes:
    """Read the body of an answer; raises ApiError beyond `max_bytes` bytes."""
    held = bytearray()
    async for part in response.aiter_raw():
        held += part
        if len(held) > max_bytes:
            raise ApiError(
                502, f"the upstream server's answer has more than {max_bytes} bytes, which is the most supported"
            )
    return bytes(held)


async def read_object(response: httpx2.Response) -> bytes:
    """Read an answer that is a JSON object, as it was sent; raises ApiError for anything else."""
    data = await read_body(response, MOST_WHOLE)
    try:
        parse_json(data)
    except ApiError as error:
        raise ApiError(502, f"the upstream server's answer is no JSON object: {error.message}") from None
    return data


async def read_lines(response: httpx2.Response) -> AsyncIterator[bytes]:
    """Yield the bytes of a stream as they arrive, cut after ends of lines.

    Raises ApiError for a line or a stream that is too long, or not UTF-8.
    """
    held, total = bytearray(), 0
    async for part in response.aiter_raw():
        total += len(part)
        end = part.rfind(b"\n") + 1
        if end:
            yield checked(bytes(held) + part[:end])
            held.clear()
        held += part[end:]
        if len(held) > MOST_LINE or total > MOST_STREAM:
            most = f"{MOST_LINE} bytes per line and {MOST_STREAM} in all"
            raise ApiError(502, f"the upstream server's stream has more than {most}, which is the most supported")
    if held:
        yield checked(bytes(held) + b"\n")


def checked(text: bytes) -> bytes:
    try:
        text.decode()
    except UnicodeDecodeError:
        raise ApiError(502, "the upstream server's stream is not UTF-8") from None
    return text


def kind_of(response: httpx2.Response) -> str:
    """Return the media type of an answer; raises ApiError for one that no route of ours has."""
    kind: Any = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != WHOLE and kind not in STREAMS:
        raise ApiError(502, f"the upstream server answered with {kind!r:.60}; JSON and its streams are supported")
    return str(kind)
