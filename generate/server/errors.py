"""Errors of the API: one exception, written in each dialect's own envelope."""

from dataclasses import dataclass, field
from typing import Any

from common.errors import BimetalError, PromptTooLongError, UsageError
from common.schedule import BusyError

RETRY = 5  # seconds after which a client that was refused may try again

OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    502: "server_error",
    503: "unavailable_error",
}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass
class ApiError(Exception):
    """Refusal of a request.

    status   HTTP status
    code     OpenAI's `code`, such as "model_not_found"
    param    the invalid field
    entries  further entries of the error object
    retry    seconds after which the client may try again
    headers  of the answer, by name
    """

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    entries: dict[str, Any] = field(default_factory=dict)
    retry: int | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.retry is not None:
            self.headers = {**self.headers, "retry-after": str(self.retry)}

    def __str__(self) -> str:
        return self.message


def dialect_of(path: str) -> str:
    """Return the dialect that answers under a path: "openai", "anthropic" or "ollama"."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return "anthropic"
    return "ollama" if path.startswith("/api/") else "openai"


def envelope(error: ApiError, dialect: str, request_id: str) -> dict[str, Any]:
    """Return the body of a refusal, or the payload of an error inside a stream."""
    if dialect == "anthropic":
        kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}
    if dialect == "ollama":
        return {"error": error.message}
    kind = OPENAI_TYPES.get(error.status, "invalid_request_error")
    return {
        "error": {"message": error.message, "type": kind, "param": error.param, "code": error.code, **error.entries}
    }


def refusal(error: Exception) -> ApiError | None:
    """Return the client's error if `error` was raised by its request; None for an error of the server."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLongError):
        return too_long(error, "messages")
    if isinstance(error, BusyError):
        return ApiError(503, str(error), retry=RETRY)
    return ApiError(400, str(error)) if isinstance(error, BimetalError) else None


def too_long(error: PromptTooLongError, field: str) -> ApiError:
    """Return the refusal of a prompt beyond the context, which stands in `field` of the request.

    It begins with Anthropic's words, by which Claude Code, LiteLLM and LangChain recognize it.
    """
    lengths = f"{error.tokens} tokens > {error.context} maximum"
    words = f"prompt is too long: {lengths}; shorten it, or serve a larger context (--ctx)"
    numbers = {"n_prompt_tokens": error.tokens, "n_ctx": error.context}
    return ApiError(400, words, "context_length_exceeded", field, numbers)


def failure(error: Exception) -> ApiError:
    """Return the error that ends a reply which has begun; its cause is `error`, for the log."""
    if isinstance(error, ApiError):
        return error
    refused = refusal(error) if isinstance(error, UsageError | PromptTooLongError | BusyError) else None
    words = str(error) if isinstance(error, BimetalError) else "the server failed to write this reply"
    failed = refused or ApiError(500, words)
    failed.__cause__ = error
    return failed
