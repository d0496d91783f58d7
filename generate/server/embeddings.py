"""Embeddings, of OpenAI's, llama.cpp's and Ollama's APIs."""

import base64
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from common.checks import check_tokens
from common.errors import PromptTooLongError, UsageError
from generate.llm import LLM
from generate.server.answer import no_receive, note, while_connected
from generate.server.body import read_json
from generate.server.errors import ApiError, too_long
from generate.server.events import Usage
from generate.server.facts import Facts
from generate.server.fields import Fields
from generate.server.sending import Message, Receive, Send
from generate.server.service import Service
from generate.server.utilities import MOST_TEXT
from generate.server.wire import dumps

MOST_INPUTS = 2048
FORMATS = ("float", "base64")
WORDS = "it must be text, a list of texts, a list of token ids, or a list of such lists, none of them empty"
Found = Sequence[np.ndarray]  # of each text: (hidden,) float32
Write = Callable[[Fields, Facts, Found, int, float], Any]  # (request, facts, embeddings, tokens, seconds) to a body


class Embeddings:
    """An endpoint, as an ASGI application.

    keys   of the request's entry with the texts; the first that is given counts
    write  makes the body of the answer
    cuts   whether a text beyond the context is cut, unless the request has `truncate: false`
    """

    def __init__(self, service: Service, keys: Sequence[str], write: Write, cuts: bool = False):
        self.service, self.keys, self.write, self.cuts = service, keys, write, cuts

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        facts, request = self.service.facts, Request(scope, receive)
        fields = Fields(await read_json(request))
        await while_connected(receive, self._answer(fields, facts, scope, send))

    async def _answer(self, fields: Fields, facts: Facts, scope: Message, send: Send) -> None:
        llm, started = self.service.llm, time.perf_counter()
        key = next((key for key in self.keys if fields.has(key)), self.keys[0])
        cuts = self.cuts and fields.flag("truncate", True)
        fields.choice("encoding_format", *FORMATS)
        with self.service.admitted():
            inputs = _inputs(fields, key)
            prompts = await run_in_threadpool(lambda: [_encoded(llm, key, each, cuts) for each in inputs])
            found = [await llm.aembed(ids) for ids in prompts]
        tokens = sum(map(len, prompts))
        note(scope, usage=Usage(prompt=tokens))
        body = self.write(fields, facts, found, tokens, time.perf_counter() - started)
        await Response(dumps(body), media_type="application/json")(scope, no_receive, send)


def _inputs(fields: Fields, key: str) -> list[Any]:
    """Return the texts, or lists of token ids, of a request."""
    given = fields.values.get(key)
    if given is None:
        raise ApiError(400, f"{key} is missing; {WORDS}", param=key)
    several = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    if len(several) > MOST_INPUTS:
        raise ApiError(400, f"{key} has {len(several)} entries; at most {MOST_INPUTS} are supported", param=key)
    if not all(isinstance(each, str | list) and each for each in several):
        raise fields.refuse(key, WORDS)
    return several


def _encoded(llm: LLM, key: str, text: Any, cuts: bool) -> list[int]:
    """Return the token ids of one text; one beyond the context is refused, or with `cuts` cut."""
    if len(text) > MOST_TEXT:
        most = f"at most {MOST_TEXT} are supported"
        raise ApiError(413, f"{key} has a text of {len(text)} characters; {most}", param=key)
    try:
        if isinstance(text, str) and not cuts:
            llm.tokenizer.check_fits(text, llm.context)
        ids = check_tokens(llm.tokenizer.encode(text) if isinstance(text, str) else text, llm.vocab_size)
    except PromptTooLongError as error:
        raise too_long(error, key) from None
    except UsageError as error:
        raise ApiError(400, str(error), param=key) from None
    if len(ids) > llm.context and not cuts:
        raise too_long(PromptTooLongError("", len(ids), llm.context), key)
    if len(ids) <= llm.context:
        return ids
    tail = llm.tokenizer.prompt_tail if isinstance(text, str) else []  # whose hidden state the embedding may be
    return ids[: llm.context - len(tail)] + tail


def openai(fields: Fields, facts: Facts, found: Found, tokens: int, seconds: float) -> dict[str, Any]:
    """Answer to /v1/embeddings: numbers, or the bytes of float32 numbers in base64."""
    form = fields.choice("encoding_format", *FORMATS, default="float")
    _check_dimensions(fields, found)
    values = [
        base64.b64encode(each.astype("<f4").tobytes()).decode() if form == "base64" else each.tolist() for each in found
    ]
    data = [{"object": "embedding", "index": at, "embedding": value} for at, value in enumerate(values)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": facts.name, "usage": usage}


def llama_cpp(fields: Fields, facts: Facts, found: Found, tokens: int, seconds: float) -> list[dict[str, Any]]:
    """Answer to /embedding."""
    if fields.has("embd_normalize") and fields.values["embd_normalize"] != 2:
        raise fields.refuse("embd_normalize", "it must be 2: embeddings have the length 1")
    return [{"index": at, "embedding": [_unit(each).tolist()]} for at, each in enumerate(found)]


def ollama(fields: Fields, facts: Facts, found: Found, tokens: int, seconds: float) -> dict[str, Any]:
    """Answer to /api/embed; times are in nanoseconds."""
    _check_dimensions(fields, found)
    body = {"model": fields.text("model", ""), "embeddings": [_unit(each).tolist() for each in found]}
    return body | {"total_duration": int(1e9 * seconds), "load_duration": 0, "prompt_eval_count": tokens}


def ollama_one(fields: Fields, facts: Facts, found: Found, tokens: int, seconds: float) -> dict[str, Any]:
    """Answer to /api/embeddings, which Ollama had before /api/embed."""
    return {"embedding": _unit(found[0]).tolist()}


def _unit(embedding: np.ndarray) -> np.ndarray:
    """Give an embedding the length 1, whatever the model's files state."""
    return embedding / max(float(np.linalg.norm(embedding)), 1e-12)


def _check_dimensions(fields: Fields, found: Found) -> None:
    if fields.has("dimensions") and fields.values["dimensions"] != len(found[0]):
        raise fields.refuse("dimensions", f"the model's embeddings have {len(found[0])}")
