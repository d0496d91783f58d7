"""The chat page and the status page: fixed files, which ask no other host for anything."""

from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
VARIES = {"vary": "accept"}
PAGES = {"/": "index.html", "/status": "status.html"}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def routes() -> list[Route]:
    """Return a route for each page and for each file that pages name."""
    folder = files("generate.server") / "static"
    held = {file.name: file.read_bytes() for file in folder.iterdir() if kind_of(file.name)}
    paths = PAGES | {f"/static/{name}": name for name in held}
    return [Route(path, _answer(path, held[name], kind_of(name)), methods=["GET"]) for path, name in paths.items()]


def is_page(path: str) -> bool:
    """Test whether a path is a page or a part of one, which a browser fetches before it can send a key."""
    return path in PAGES or path.startswith("/static/")


def kind_of(name: str) -> str:
    """Return the media type of a file that pages are made of, "" for others."""
    return next((kind for end, kind in TYPES.items() if name.endswith(end)), "")


def _answer(path: str, body: bytes, kind: str) -> Any:
    async def answer(request: Request) -> Response:
        if path == "/" and "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse("Ollama is running", headers=VARIES)  # which Ollama's clients look for
        return Response(body, headers=HEADERS | (VARIES if path == "/" else {}), media_type=kind)

    return answer
