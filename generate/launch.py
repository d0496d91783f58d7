"""`python -m generate launch CLIENT`: start a coding agent on a server of ours, with the settings that it needs.

Nothing is written to the client's own files: settings are environment variables and arguments, for this run alone.
"""

import argparse
import json
import os
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException

from common.errors import BimetalError

KEY = "BIMETAL_API_KEY"
NO_KEY = "none"  # clients refuse to start without a key, servers without keys take any
TIMEOUT = 10  # seconds that the server may take to answer
MOST_ANSWER = 1 << 20  # bytes of the server's list of models
LEAST_CONTEXT = 16_384  # tokens: agents send 12 thousand and more before the first question


@dataclass(frozen=True)
class Served:
    """A running server: its address, its model, the model's context, and the key to send."""

    url: str
    model: str
    context: int
    key: str


@dataclass(frozen=True)
class Client:
    """A coding agent.

    program   its command
    package   its name in the npm registry
    settings  the environment variables and the arguments that point it at a server
    """

    program: str
    package: str
    settings: Callable[[Served], tuple[Mapping[str, str], Sequence[str]]]


def run(args: argparse.Namespace) -> int:
    """Replace this process by the client; with --dry-run print what would be started, and return."""
    client = CLIENTS[args.client]
    served = find(args.url, os.environ.get(KEY, ""))
    if served.context and served.context < LEAST_CONTEXT:
        note = f"the context of {served.model} is {served.context} tokens; agents need {LEAST_CONTEXT} or more"
        print(f"note: {note}: serve with a larger --ctx", file=sys.stderr)
    variables, arguments = client.settings(served)
    arguments = [*arguments, *args.rest]
    if args.dry_run:
        print(json.dumps({"program": client.program, "arguments": arguments, "environment": dict(variables)}, indent=2))
        return 0
    program = shutil.which(client.program)
    if program is None:
        raise BimetalError(f"{client.program} is not installed; its package is {client.package} (npm install -g)")
    sys.stdout.flush()
    os.execve(program, [client.program, *arguments], os.environ | variables)


def find(url: str, key: str) -> Served:
    """Ask the server at `url` for its model; raises BimetalError if none answers."""
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key or NO_KEY}"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            model = json.loads(answer.read(MOST_ANSWER))["data"][0]
            return Served(url, str(model["id"]), int(model.get("max_model_len") or 0), key or NO_KEY)
    except urllib.error.HTTPError as error:
        hint = f"; put the server's key into {KEY}" if error.code == 401 else ""
        raise BimetalError(f"the server at {url} answered {error.code} {error.reason}{hint}") from None
    except OSError as error:
        reason = getattr(error, "reason", error)  # which urllib leaves as it was raised, or as text
        why = getattr(reason, "strerror", None) or reason
        start = "python -m generate serve --model MODEL"
        raise BimetalError(f"no server answers at {url} ({why}); start one first: {start}") from None
    except (ValueError, LookupError, TypeError, AttributeError, HTTPException):
        raise BimetalError(f"the server at {url} lists no models as OpenAI's API does") from None


def codex(served: Served) -> tuple[Mapping[str, str], Sequence[str]]:
    """Return settings of Codex: a model provider of its own, which speaks the Responses API."""
    provider = {"name": "bimetal", "base_url": f"{served.url}/v1", "wire_api": "responses", "env_key": KEY}
    settings: dict[str, object] = {"model": served.model, "model_provider": "bimetal"}
    settings |= {"model_context_window": served.context} if served.context else {}
    settings |= {f"model_providers.bimetal.{name}": value for name, value in provider.items()}
    settings["model_providers.bimetal.supports_websockets"] = False
    arguments = [word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    return {KEY: served.key}, arguments


def claude(served: Served) -> tuple[Mapping[str, str], Sequence[str]]:
    """Return settings of Claude Code: all models are the served one; nothing changes the beginning of a request."""
    models = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")))
    context = {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.context)} if served.context else {}
    return context | {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key,
        **dict.fromkeys((*models, "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"), served.model),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
        "API_TIMEOUT_MS": "3000000",
    }, ()


def opencode(served: Served) -> tuple[Mapping[str, str], Sequence[str]]:
    """Return settings of OpenCode: a provider of Chat Completions, in the configuration in its environment."""
    limit = {"limit": {"context": served.context, "output": served.context // 2}} if served.context else {}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "bimetal",
        "options": {"baseURL": f"{served.url}/v1", "apiKey": served.key},
        "models": {served.model: {"name": served.model} | limit},
    }
    config = {"provider": {"bimetal": provider}, "model": f"bimetal/{served.model}"}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}, ()


CLIENTS = {
    "codex": Client("codex", "@openai/codex", codex),
    "claude": Client("claude", "@anthropic-ai/claude-code", claude),
    "opencode": Client("opencode", "opencode-ai", opencode),
}
