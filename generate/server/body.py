"""Read a request's body, bounded in bytes."""

import asyncio
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from generate.server import connection
from generate.server.errors import ApiError
from generate.server.json_object import MOST_BYTES, parse_json

CODINGS = {"gzip", "x-gzip", "deflate", "compress", "br", "zstd"}
LONG = 1 << 18  # bytes from which a body is parsed beside the event loop


async def read_json(request: Request) -> dict[str, Any]:
    """Return the JSON object that a request holds; raises ApiError."""
    data = await read_bytes(request)
    return await run_in_threadpool(parse_json, data) if len(data) > LONG else parse_json(data)


async def read_bytes(request: Request) -> bytes:
    """Return the whole body.

    Raises ApiError for a compressed one, beyond MOST_BYTES, and where the client leaves or sends nothing for long.
    """
    coding = request.headers.get("content-encoding", "")
    if CODINGS & {name.strip().lower() for name in coding.split(",")}:
        raise ApiError(415, f"the body's content-encoding is {coding!r:.80}; bodies are read uncompressed only")
    too_large = ApiError(413, f"the body has more than {MOST_BYTES} bytes, which is the most supported")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > MOST_BYTES:
        raise too_large
    held, size, now = [], 0, asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(connection.PATIENCE) as limit:
            async for chunk in request.stream():
                limit.reschedule(now() + connection.PATIENCE)
                size += len(chunk)
                if size > MOST_BYTES:
                    raise too_large
                held.append(chunk)
    except ClientDisconnect:
        raise ApiError(400, "the client left before its request was whole") from None
    except TimeoutError:
        message = f"nothing of the request's body has come for {connection.PATIENCE:g} seconds"
        raise ApiError(408, message, headers={"connection": "close"}) from None
    return b"".join(held)
