"""Middleware before every route: the Host and Origin of a request, keys, CORS, request ids, errors and the log."""

import hashlib
import hmac
import ipaddress
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match

from common.errors import BimetalError
from generate.server.errors import ApiError, dialect_of, envelope, refusal
from generate.server.log import Log, fault_of
from generate.server.page import is_page
from generate.server.sending import ClientGoneError, Message, Receive, Send
from generate.server.wire import dumps, new_id

OPEN = {"/health", "/v1/health", "/favicon.ico"}  # answered without a key, like the pages
CLIENT_GONE = 499


@dataclass(frozen=True)
class Policy:
    """Rules that decide who may call.

    keys     digests of the keys, one of which is required; empty: none is
    hosts    further host names beside localhost and addresses
    origins  web pages that may call from a browser, "*" for all
    """

    keys: Sequence[bytes] = ()
    hosts: Sequence[str] = ()
    origins: Sequence[str] = field(default=())

    def check(self, path: str, headers: Headers) -> None:
        """Raise ApiError for a request that may not pass."""
        if "transfer-encoding" in headers and "content-length" in headers:  # a proxy may use the other one
            message = "the request has both content-length and transfer-encoding; it must have one of them"
            raise ApiError(400, message, headers={"connection": "close"})
        host = headers.get("host", "")
        if not self.allows_host(host):
            message = f"the host {host!r:.80} is not served here; --allow-host admits further names"
            raise ApiError(403, message, "host_not_allowed")
        origin = headers.get("origin")
        if origin is not None and not self.allows_origin(origin, host):
            message = f"the origin {origin!r:.80} may not call this server; --cors-origin admits further ones"
            raise ApiError(403, message, "origin_not_allowed")
        if self.keys and not (path in OPEN or is_page(path)) and not self.has_key(headers):
            asks = {"www-authenticate": "Bearer"}
            raise ApiError(401, "the API key is missing or wrong", "invalid_api_key", headers=asks)

    def allows_host(self, host: str) -> bool:
        """Test whether a Host header names this machine; the header of a page with a rebound DNS name does not."""
        try:
            name = host_name(urlsplit(f"//{host}").hostname or "")
        except ValueError:
            return False
        if name == "localhost" or name.endswith(".localhost") or name in self.hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def allows_origin(self, origin: str, host: str) -> bool:
        """Test whether a browser's page may call: a page of this server, or of an allowed origin."""
        if "*" in self.origins or origin in self.origins:
            return True
        scheme, _, rest = origin.partition("://")
        return scheme in ("http", "https") and rest == host

    def has_key(self, headers: Headers) -> bool:
        """Test whether a request has a valid key, in the header of either API; takes equal time for every wrong key."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")
        return any([hmac.compare_digest(digest(one), key) for one in given for key in self.keys])


def host_name(name: str) -> str:
    """Normalize a host's name for comparison."""
    return name.lower().rstrip(".")


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


MISSING = {  # the last parts of routes of other servers
    **dict.fromkeys(("transcriptions", "translations", "speech"), "audio is not supported"),
    **dict.fromkeys(("generations", "edits"), "images are not supported"),
    **dict.fromkeys(("copy", "create", "delete", "push"), "one model is served, which requests do not change"),
    "batches": "python -m generate batch answers a file of OpenAI requests",
    "files": "files are not stored",
}


class Guard:
    """The outermost ASGI application."""

    def __init__(self, app: Any, policy: Policy, log: Log):
        self.app, self.policy, self.log = app, policy, log

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status, headers = time.perf_counter(), 0, Headers(scope=scope)
        dialect, id = dialect_of(scope["path"]), new_id("req_")
        origin = headers.get("origin")

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                sent = MutableHeaders(scope=message)
                sent["request-id" if dialect == "anthropic" else "x-request-id"] = id
                sent["x-content-type-options"] = "nosniff"
                if origin is not None and self.policy.allows_origin(origin, headers.get("host", "")):
                    sent["access-control-allow-origin"] = origin
                    sent.append("vary", "origin")
            await send(message)

        async def refuse(error: ApiError) -> None:
            body = dumps(envelope(error, dialect, id))
            await Response(body, error.status, error.headers, "application/json")(scope, receive, answer)

        note: dict[str, Any] = {"id": id}
        scope["bimetal"] = note  # endpoints add facts for the log to it
        try:
            self.policy.check("/health" if scope["method"] == "OPTIONS" else scope["path"], headers)
            if scope["method"] == "OPTIONS":
                await preflight(headers)(scope, receive, answer)
            else:
                scope["app"] = self.app  # unknown routes are then raised
                await self.app(scope, receive, answer)
        except (ClientGoneError, ClientDisconnect):
            note["left"] = True
        except Exception as error:
            refused = no_route(scope, error) if isinstance(error, HTTPException) else refusal(error)
            note |= fault_of(error, refused)
            if not status:  # a reply that has begun ends here
                await refuse(refused or ApiError(500, "the server failed to answer this request"))
        finally:
            code = CLIENT_GONE if "left" in note else status
            seconds = time.perf_counter() - started
            self.log.request(scope, code, seconds, note)


def no_route(scope: Message, error: HTTPException) -> ApiError:
    """Return the refusal of an unknown path or method."""
    allowed, path = (error.headers or {}).get("Allow", ""), scope["path"]
    tidy = "/" + "/".join(part for part in path.split("/") if part)
    if allowed:
        why = f"; it takes {allowed}"
    elif tidy != path and any(route.matches({**scope, "path": tidy})[0] != Match.NONE for route in scope["app"].routes):
        why = f"; it is written {tidy}"
    else:
        missing = MISSING.get(tidy.rpartition("/")[2])
        why = f"; {missing}" if missing else ""
    message = f"{scope['method'][:20]} {path[:100]} is not a route here{why}"
    return ApiError(error.status_code, message, headers={"allow": allowed} if allowed else {})


def preflight(headers: Headers) -> Response:
    """Return the answer to a browser's question whether a page of an allowed origin may call."""
    found = {
        "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
        "access-control-allow-headers": headers.get("access-control-request-headers", "authorization, content-type"),
        "access-control-max-age": "600",
    }
    return Response(status_code=204, headers=found)


def keys_of(given: Sequence[str], file: str | None, environment: str | None) -> list[bytes]:
    """Digest the keys from the command line, a file with one per line, and the environment.

    Raises BimetalError for a file without keys, and for a key that no client can send.
    """
    return [digest(key) for key in [*given, *key_in(environment), *([] if file is None else lines_of(file))]]


def key_of(file: str | None, environment: str | None) -> str | None:
    """Read the key for another server: from a file that holds one, else from the environment; None: no key."""
    keys = key_in(environment) if file is None else lines_of(file)
    if len(keys) > 1:
        raise BimetalError(f"{file} holds {len(keys)} API keys; it must hold one")
    return keys[0] if keys else None


def lines_of(file: str) -> list[str]:
    """Return the keys of a file with one per line; raises BimetalError where it has none."""
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise BimetalError(f"{file} is not UTF-8; it must hold one API key per line") from None
    keys = [
        sendable(f"line {at} of {file}", line.strip())
        for at, line in enumerate(lines, 1)
        if line.strip() and not line.startswith("#")
    ]
    if not keys:
        raise BimetalError(f"{file} holds no API key; it must hold one per line")
    return keys


def key_in(environment: str | None) -> list[str]:
    """Return the key that a variable of the environment holds, if it holds one."""
    return [sendable("the environment", key)] if (key := (environment or "").strip()) else []


def sendable(source: str, key: str) -> str:
    """Return a key; raises BimetalError, with its source and without the key, for one that no header can carry."""
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise BimetalError(f"the API key of {source} has characters other than printable ASCII without spaces")
    return key
