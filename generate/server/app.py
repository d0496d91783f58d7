"""Routes of the server: which function answers each path."""

from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router

from generate import __version__
from generate.server import (
    chat,
    completions,
    embeddings,
    infill,
    llama_cpp,
    messages,
    ollama,
    page,
    rerank,
    responses,
    utilities,
)
from generate.server.answer import Generate, Utility
from generate.server.errors import RETRY, ApiError
from generate.server.facts import Facts
from generate.server.fields import Fields
from generate.server.guard import Guard, Policy
from generate.server.log import Log
from generate.server.metrics import MEDIA
from generate.server.models import model_entry, model_list
from generate.server.service import Service
from generate.server.wire import Parsed, dumps

PREFIXES = ("/v1", "")  # some clients omit the version
STORED = "/v1/responses/{id}"


def build(service: Service, policy: Policy, log: Log) -> Guard:
    """Return the whole server as an ASGI application."""
    routes = [
        *_replies(service),  # looked up first
        *_embeddings(service),
        *_rerank(service),
        *page.routes(),
        *_status(service),
        *_utilities(service),
        *_ollama(service),
        *_stored(service),
    ]
    return Guard(Router(routes, redirect_slashes=False), policy, log)


def _get(path: str, handler: Callable[[Request], Any], *more: str) -> Route:
    """Return a route of GET, and the methods `more`, whose handler's return value is sent as JSON."""

    async def answer(request: Request) -> Response:
        return Response(dumps(handler(request)), media_type="application/json")

    return Route(path, answer, methods=["GET", *more])


def _status(service: Service) -> list[BaseRoute]:
    def health(request: Request) -> dict[str, Any]:
        if service.draining:
            raise ApiError(503, "the server shuts down", retry=RETRY)
        return {"status": "ok", "model": service.facts.name}

    def slots(request: Request) -> list[dict[str, Any]]:
        found = service.slots_list()
        if request.query_params.get("fail_on_no_slot") and all(slot["is_processing"] for slot in found):
            raise ApiError(503, "no slot is free", retry=RETRY)
        return found

    async def metrics(request: Request) -> Response:
        return Response(service.metrics_text(), media_type=MEDIA)

    return [
        Route("/metrics", metrics, methods=["GET"]),
        _get("/health", health),
        _get("/v1/health", health),
        _get("/version", lambda request: {"version": __version__}),
        _get("/props", lambda request: service.props()),
        _get("/tokenizer_info", lambda request: utilities.tokenizer_info(service.facts)),
        _get("/slots", slots),
        *(_get(f"{prefix}/models", lambda request: model_list(service.facts)) for prefix in PREFIXES),
        _get("/v1/models/{name:path}", lambda request: model_entry(service.facts)),
    ]


def _replies(service: Service) -> list[BaseRoute]:
    parsers: dict[str, Callable[[Fields, Facts], Parsed]] = {
        **{f"{prefix}/chat/completions": chat.parse for prefix in PREFIXES},
        **{f"{prefix}/completions": completions.parse for prefix in PREFIXES},
        **{f"{prefix}/responses": partial(responses.parse, service.store) for prefix in PREFIXES},
        "/v1/messages": messages.parse,
        "/completion": llama_cpp.parse,
        "/infill": infill.parse,
        "/api/chat": ollama.parse_chat,
        "/api/generate": ollama.parse_generate,
    }
    return [Route(path, Generate(service, parse), methods=["POST"]) for path, parse in parsers.items()]


def _embeddings(service: Service) -> list[BaseRoute]:
    inputs, contents = ("input", "content"), ("content", "input")
    endpoint = partial(embeddings.Embeddings, service)
    found = {
        **{f"{prefix}/embeddings": endpoint(inputs, embeddings.openai) for prefix in PREFIXES},
        "/embedding": endpoint(contents, embeddings.llama_cpp),
        "/api/embed": endpoint(("input",), embeddings.ollama, cuts=True),
        "/api/embeddings": endpoint(("prompt",), embeddings.ollama_one),
    }
    return [Route(path, each, methods=["POST"]) for path, each in found.items()]


def _rerank(service: Service) -> list[BaseRoute]:
    paths = [f"{prefix}/{name}" for prefix in PREFIXES for name in ("rerank", "reranking")]
    found = dict.fromkeys([*paths, "/v2/rerank"], rerank.rerank) | dict.fromkeys(["/v1/score", "/score"], rerank.score)
    return [Route(path, rerank.Rerank(service, parse), methods=["POST"]) for path, parse in found.items()]


def _utilities(service: Service) -> list[BaseRoute]:
    found: dict[str, utilities.Utility] = {
        "/tokenize": utilities.tokenize,
        "/detokenize": utilities.detokenize,
        "/apply-template": utilities.apply_template,
        "/v1/chat/completions/input_tokens": utilities.count_chat,
        "/v1/responses/input_tokens": partial(utilities.count_response, service.store),
        "/v1/messages/count_tokens": utilities.count_messages,
        "/api/show": lambda fields, facts, llm: ollama.show(facts),
    }
    return [Route(path, Utility(service, compute), methods=["POST"]) for path, compute in found.items()]


def _ollama(service: Service) -> list[BaseRoute]:
    return [
        _get("/api/version", lambda request: ollama.version()),
        _get("/api/tags", lambda request: ollama.tags(service.facts)),
        _get("/api/ps", lambda request: ollama.running(service.facts)),
        Route("/api/pull", ollama.pull, methods=["POST"]),
    ]


def _stored(service: Service) -> list[BaseRoute]:
    def stored(request: Request) -> dict[str, Any]:
        id = request.path_params["id"]
        if request.query_params.get("stream") == "true":
            raise ApiError(400, "stream is true; a stored response is sent whole", param="stream")
        if request.method != "DELETE":
            return service.store.get(id).body
        service.store.delete(id)
        return {"id": id, "object": "response", "deleted": True}

    return [_get(STORED, stored, "DELETE")]
