"""The routes."""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router

from generate.server import chat, completions
from generate.server.answer import Generate
from generate.server.errors import ApiError
from generate.server.guard import Guard, Policy
from generate.server.log import Log
from generate.server.models import model_entry, model_list
from generate.server.service import RETRY, Service
from generate.server.wire import dumps

PREFIXES = ("/v1", "")

Handler = Callable[[Request], dict[str, Any]]


def build(service: Service, policy: Policy, log: Log) -> Guard:
    """The whole server as an ASGI application."""

    def get(path: str, handler: Handler) -> Route:
        async def answer(request: Request) -> Response:
            return Response(dumps(handler(request)), media_type="application/json")

        return Route(path, answer, methods=["GET"])

    def health(request: Request) -> dict[str, Any]:
        if service.draining:
            raise ApiError(503, "the server shuts down", retry=RETRY)
        return {"status": "ok", "model": service.facts.name}

    def one_model(request: Request) -> dict[str, Any]:
        return model_entry(service.facts)

    routes: list[BaseRoute] = [
        get("/health", health),
        get("/v1/health", health),
        get("/v1/models", lambda request: model_list(service.facts)),
        get("/v1/models/{name:path}", one_model),
        *(Route(f"{prefix}/chat/completions", Generate(service, chat.parse), methods=["POST"]) for prefix in PREFIXES),
        *(
            Route(f"{prefix}/completions", Generate(service, completions.parse), methods=["POST"])
            for prefix in PREFIXES
        ),
    ]
    return Guard(Router(routes, redirect_slashes=False), policy, log)
