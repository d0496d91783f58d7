"""A stand-in for the Hugging Face Hub on 127.0.0.1: the part of its HTTP interface that huggingface_hub uses.

Large files (`.gguf`, `.safetensors`) are answered as LFS files are: with their SHA-256, and a redirect to a second
server, of another origin, that plays the content delivery network. Xet is announced only where a Repo asks for it.
Endpoints: https://huggingface.co/docs/hub/api
"""

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


def is_large(path: str) -> bool:
    return path.endswith((".gguf", ".safetensors"))


@dataclass
class Repo:
    """A repository at one commit. gated: files need `token`; hidden: all of it does; xet: large files announce Xet."""

    files: dict[str, bytes]
    commit: str = COMMIT
    revisions: tuple[str, ...] = ("main",)
    gated: bool = False
    hidden: bool = False
    xet: bool = False


@dataclass
class Fault:
    """What goes wrong `times` times with requests of `method` whose path contains `path`.

    status          answer this instead, with `headers`
    change          changes the listing of a repository before it is sent
    cut             number of bytes of the body after which the connection is closed
    short           number of bytes by which the body is shortened, under a Content-Length that agrees
    flip            change the last byte
    whole           ignore the Range header
    delay           seconds of sleep between every 64 KiB
    """

    method: str
    path: str
    times: int = 1
    status: int = 0
    cut: int = -1
    short: int = 0
    flip: bool = False
    whole: bool = False
    delay: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)
    change: Callable[[dict[str, Any]], None] | None = None


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    cdn: bool
    sent: int = 0  # bytes of the body


@dataclass
class HubServer:
    """`with HubServer({"owner/repo": Repo({...})}) as hub:` serves at `hub.url` and records `hub.requests`."""

    repos: dict[str, Repo]
    token: str = "hf_secret"
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def __enter__(self) -> "HubServer":
        handlers = [type("Handler", (_Handler,), {"hub": self, "cdn": cdn}) for cdn in (False, True)]
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for handler in handlers]
        self.url, self.cdn_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers)
        for server in self._servers:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def sent(self, name: str) -> list[Request]:
        """The GET requests that carried (a part of) the file `name`'s content."""
        large = is_large(name)
        return [r for r in self.requests if r.method == "GET" and r.path.endswith("/" + name) and r.cdn == large]

    def take_fault(self, method: str, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.times > 0 and fault.method == method and fault.path in path:
                fault.times -= 1
                return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of `hub`; cdn: of its second server, which sends the content of large files."""

    hub: HubServer
    cdn: bool
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms for the client's delayed ACK

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.serve()

    def do_GET(self) -> None:
        self.serve()

    def serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.request_log = Request(self.command, path, {k.lower(): v for k, v in self.headers.items()}, self.cdn)
        if self.cdn or "/api/models/" in path or "/resolve/" in path:  # not what the client asks about itself
            self.hub.requests.append(self.request_log)
        # A fault in a large file's content belongs to the server that sends it, not to the redirect before.
        redirects = not self.cdn and self.command == "GET" and "/resolve/" in path and is_large(path)
        self.fault = None if redirects else self.hub.take_fault(self.command, path)
        if self.fault and self.fault.status:
            return self.answer(self.fault.status, self.fault.headers)
        if self.cdn:
            owner, repo, name = path.removeprefix("/").split("/", 2)
            return self.answer_content(self.hub.repos[f"{owner}/{repo}"].files[name], {})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path):
            return self.answer_api(match[1], match[2] or "revision", match[3] or "main")
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.answer_file(*match.groups())
        self.answer(404, {})

    def authorized(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def find(self, name: str, revision: str) -> Repo | None:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.hidden and not self.authorized()):
            self.answer(401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            return None
        if revision not in (*repo.revisions, repo.commit):
            self.answer(404, {"X-Error-Code": "RevisionNotFound"})
            return None
        return repo

    def answer_api(self, name: str, kind: str, revision: str) -> None:
        if (repo := self.find(name, revision)) is None:
            return
        entries = [(path, data, _oid(path, data)) for path, data in repo.files.items()]
        body: Any
        if kind == "tree":
            body = [
                {"type": "file", "path": path, "size": len(data), "oid": oid}
                | ({"lfs": {"oid": oid, "size": len(data), "pointerSize": 134}} if is_large(path) else {})
                | ({"xetHash": oid} if repo.xet and is_large(path) else {})
                for path, data, oid in entries
            ]
        else:
            siblings = [
                {"rfilename": path, "size": len(data), "blobId": oid}
                | ({"lfs": {"sha256": oid, "size": len(data), "pointerSize": 134}} if is_large(path) else {})
                for path, data, oid in entries
            ]
            body = {"id": name, "modelId": name, "sha": repo.commit, "siblings": siblings, "tags": []}
            body |= {"private": False, "downloads": 0, "likes": 0}
            if self.fault and self.fault.change:
                self.fault.change(body)
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def answer_file(self, name: str, revision: str, path: str) -> None:
        if (repo := self.find(name, revision)) is None:
            return
        if repo.gated and not self.authorized():
            return self.answer(401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
        if path not in repo.files:
            return self.answer(404, {"X-Error-Code": "EntryNotFound"})
        data = repo.files[path]
        headers = {"X-Repo-Commit": repo.commit, "ETag": f'"{_oid(path, data)}"'}
        if not is_large(path):
            return self.answer_content(data, headers)
        headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(data))}
        if repo.xet:
            headers |= {"X-Xet-Hash": _oid(path, data), "X-Xet-Refresh-Route": f"{self.hub.url}/api/models/{name}/xet"}
        self.answer(302, headers | {"Location": f"{self.hub.cdn_url}/{name}/{path}"})

    def answer_content(self, data: bytes, headers: dict[str, str]) -> None:
        fault = self.fault or Fault("", "")
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if fault.flip:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if not asked or fault.whole:
            return self.answer(200, headers | {"Accept-Ranges": "bytes"}, data)
        start = int(asked[1])
        if start >= len(data):
            return self.answer(416, {"Content-Range": f"bytes */{len(data)}"})
        content_range = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.answer(206, headers | {"Content-Range": content_range}, data[start:])

    def answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        fault = self.fault or Fault("", "")
        body = body[: len(body) - fault.short]
        self.send_response(status)
        for key, value in (headers | fault.headers).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        end = len(body) if fault.cut < 0 else min(fault.cut, len(body))
        for at in range(0, end, 65536):
            chunk = body[at : min(at + 65536, end)]
            try:
                self.wfile.write(chunk)
            except (BrokenPipeError, ConnectionResetError):
                break
            self.request_log.sent += len(chunk)
            time.sleep(fault.delay)
        self.close_connection = end < len(body) or self.close_connection


def _oid(path: str, data: bytes) -> str:
    """A large file's SHA-256, any other file's git blob hash."""
    if is_large(path):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
