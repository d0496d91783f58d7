"""Relevance of documents to a query: /rerank of Jina's, Cohere's, llama.cpp's and vLLM's APIs, and vLLM's /score."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from common.errors import BimetalError, NotFiniteError, PromptTooLongError
from common.rerank import Ranked
from common.rules import Rule, whole
from generate.llm import LLM
from generate.server.answer import no_receive, note, while_connected
from generate.server.body import read_json
from generate.server.embeddings import MOST_INPUTS
from generate.server.errors import ApiError, too_long
from generate.server.events import Usage
from generate.server.fields import LIST, TEXT, TEXT_OR_LIST, Fields
from generate.server.json_object import MOST_BYTES
from generate.server.sending import Message, Receive, Send
from generate.server.service import Service
from generate.server.utilities import MOST_TEXT
from generate.server.wire import dumps, new_id

LIMITS = ("max_tokens_per_doc", "max_chunks_per_doc", "max_doc_length", "truncate_prompt_tokens", "rank_fields")


@dataclass(frozen=True)
class Ranking:
    """A request: queries with the documents of each, the entry that has the documents, and what makes the answer."""

    pairs: Sequence[tuple[str, Sequence[str]]]
    key: str
    write: Callable[[Sequence[Sequence[Ranked]]], dict[str, Any]]


class Rerank:
    """An endpoint, as an ASGI application, of the requests that `parse` reads."""

    def __init__(self, service: Service, parse: Callable[[Fields], Ranking]):
        self.service, self.parse = service, parse

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        fields = Fields(await read_json(request))
        await while_connected(receive, self._answer(fields, scope, send))

    async def _answer(self, fields: Fields, scope: Message, send: Send) -> None:
        llm, name = self.service.llm, self.service.facts.name
        with self.service.admitted():
            await run_in_threadpool(check, llm)
            ranking, options = self.parse(fields), options_of(fields)
            check_size(ranking, options["instruction"] or "")
            found = [await _ranked(llm.arerank(*pair, **options), ranking.key) for pair in ranking.pairs]
        tokens = sum(each.tokens for ranked in found for each in ranked)
        note(scope, usage=Usage(prompt=tokens))
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        body = {"id": new_id("rerank-"), "object": "list", "model": name, "usage": usage} | ranking.write(found)
        await Response(dumps(body), media_type="application/json")(scope, no_receive, send)


def check(llm: LLM) -> None:
    """Refuse a model that is no reranker: ApiError, with status 501 as in llama.cpp."""
    try:
        llm.check_reranker()
    except BimetalError as error:
        raise ApiError(501, str(error)) from None


def check_size(ranking: Ranking, instruction: str) -> None:
    """Refuse long texts, and prompts of more characters together than a body has bytes: ApiError."""
    longest = max(len(text) for query, documents in ranking.pairs for text in (query, instruction, *documents))
    size = sum(
        len(query) + len(instruction) + len(document) for query, documents in ranking.pairs for document in documents
    )
    for count, most, words in (
        (longest, MOST_TEXT, "a text has"),
        (size, MOST_BYTES, "the documents, each with its query, have"),
    ):
        if count > most:
            raise ApiError(413, f"{words} {count} characters; at most {most} are supported", param=ranking.key)


async def _ranked(work: Awaitable[list[Ranked]], key: str) -> list[Ranked]:
    try:
        return await work
    except PromptTooLongError as error:
        raise too_long(error, key) from None
    except NotFiniteError as error:
        raise ApiError(500, str(error)) from error


def options_of(fields: Fields) -> dict[str, Any]:
    """Return the options of a request for `LLM.rerank`."""
    for key in LIMITS:
        if fields.has(key):
            raise fields.refuse(key, "it is not supported; truncate: true cuts documents that exceed the context")
    instruction = fields.text("instruction", fields.text("instruct"))
    return {"instruction": instruction, "truncate": fields.flag("truncate", fields.flag("truncation", False))}


def rerank(fields: Fields) -> Ranking:
    """Read a request of /rerank."""
    query, documents = fields.need("query", TEXT), _texts(fields, "documents", LIST)
    top_n, returns = fields.take("top_n", whole(0), 0), fields.flag("return_documents", False)

    def write(found: Sequence[Sequence[Ranked]]) -> dict[str, Any]:
        most = found[0][: top_n or None]
        shown = [{"document": {"text": documents[each.index]}} if returns else {} for each in most]
        scores = [{"index": each.index, "relevance_score": each.score} for each in most]
        return {"results": [score | more for score, more in zip(scores, shown, strict=True)]}

    return Ranking([(query, documents)], "documents", write)


def score(fields: Fields) -> Ranking:
    """Read a request of vLLM's /score: one text or several (`text_1`), and as many, or several for one (`text_2`)."""
    queries, documents = (_texts(fields, key) for key in ("text_1", "text_2"))
    if len(queries) not in (1, len(documents)):
        raise ApiError(
            400,
            f"text_1 has {len(queries)} texts and text_2 {len(documents)}; it must have one, or as many",
            param="text_1",
        )
    alone = [(query, [document]) for query, document in zip(queries, documents, strict=False)]

    def write(found: Sequence[Sequence[Ranked]]) -> dict[str, Any]:
        scores = [each.score for ranked in found for each in sorted(ranked, key=lambda each: each.index)]
        data = [{"index": at, "object": "score", "score": each} for at, each in enumerate(scores)]
        return {"created": int(time.time()), "data": data}

    return Ranking(alone if len(queries) > 1 else [(queries[0], documents)], "text_2", write)


def _texts(fields: Fields, key: str, rule: Rule = TEXT_OR_LIST) -> list[str]:
    """Return the texts of an entry: of a list of texts or of objects with a `text`, or by `rule` of one text."""
    given = fields.values.get(key)
    listed = [given] if rule is TEXT_OR_LIST and isinstance(given, str) else fields.need(key, rule)
    if not 1 <= len(listed) <= MOST_INPUTS:
        raise ApiError(400, f"{key} has {len(listed)} entries; it must have 1 to {MOST_INPUTS}", param=key)
    texts = enumerate(listed)
    return [each if isinstance(each, str) else fields.item(key, at, each).need("text", TEXT) for at, each in texts]
