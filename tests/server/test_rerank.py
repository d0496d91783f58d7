"""Reranking by the routes of Jina, Cohere, llama.cpp and vLLM, compared with scores of transformers."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import tiny_reranker
from asgi import call
from conftest import client_of

import generate

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "rerank_golden.json").read_text())
QUERY, DOCUMENTS, SCORES = GOLDEN["query"], GOLDEN["documents"], GOLDEN["scores"]["untied"][0]
ORDER = sorted(range(len(SCORES)), key=lambda at: -SCORES[at])
PATHS = ["/v1/rerank", "/rerank", "/v2/rerank", "/v1/reranking", "/reranking"]
BODY = {"model": "any", "query": QUERY, "documents": DOCUMENTS}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tiny_reranker.write(tmp_path_factory.mktemp("reranker"), tied=False, context=320)
    with generate.load(folder, backend="numpy") as llm:
        yield client_of(llm, "tiny")


@pytest.mark.parametrize("path", PATHS)
def test_rerank(client, path):
    body = client.post(path, json=BODY).json()
    assert (body["object"], body["model"], body["id"][:7]) == ("list", "tiny", "rerank-")
    assert [each["index"] for each in body["results"]] == ORDER
    assert np.allclose([each["relevance_score"] for each in body["results"]], sorted(SCORES, reverse=True), atol=1e-5)
    tokens = sum(each.tokens for each in client.llm.rerank(QUERY, DOCUMENTS))
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert set(body["results"][0]) == {"index", "relevance_score"}


def test_fields_of_rerank(client):
    objects = [{"text": text, "title": "t"} for text in DOCUMENTS]
    body = client.post("/v1/rerank", json=BODY | {"documents": objects, "top_n": 2, "return_documents": True}).json()
    assert [each["index"] for each in body["results"]] == ORDER[:2]
    assert [each["document"] for each in body["results"]] == [{"text": DOCUMENTS[at]} for at in ORDER[:2]]
    whole = client.post("/v1/rerank", json=BODY | {"top_n": 0}).json()
    assert body["usage"] == whole["usage"]
    assert len(whole["results"]) == len(DOCUMENTS)
    for name in ("instruction", "instruct"):
        body = client.post("/v1/rerank", json=BODY | {name: GOLDEN["instructions"][1]}).json()
        found = [each["relevance_score"] for each in sorted(body["results"], key=lambda each: each["index"])]
        assert np.allclose(found, GOLDEN["scores"]["untied"][1], atol=1e-5)
    long = {"query": "q", "documents": ["x" * 400, "y"]}
    refused = client.post("/v1/rerank", json=long)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    for name in ("truncate", "truncation"):
        assert len(client.post("/v1/rerank", json=long | {name: True}).json()["results"]) == 2


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_score(client, path):
    def scores(one, other):
        body = client.post(path, json={"text_1": one, "text_2": other}).json()
        assert [each["index"] for each in body["data"]] == [*range(len(body["data"]))]
        assert {each["object"] for each in body["data"]} == {"score"}
        return [each["score"] for each in body["data"]]

    found = scores(QUERY, DOCUMENTS[:3])
    assert np.allclose(found, SCORES[:3], atol=1e-5)
    assert scores([QUERY] * 3, DOCUMENTS[:3]) == scores([QUERY], DOCUMENTS[:3]) == found
    assert scores(QUERY, DOCUMENTS[1]) == found[1:2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": None}, "query"),
        ({"query": ["a"]}, "query"),
        ({"documents": None}, "documents"),
        ({"documents": []}, "documents"),
        ({"documents": "text"}, "documents"),
        ({"documents": [5]}, "documents[0]"),
        ({"documents": ["a", {"title": "b"}]}, "documents[1].text"),
        ({"documents": [float("nan")]}, None),
        ({"documents": ["a"] * 2049}, "documents"),
        ({"documents": ["\ud800"]}, None),
        ({"top_n": -1}, "top_n"),
        ({"top_n": 1.5}, "top_n"),
        ({"return_documents": "yes"}, "return_documents"),
        ({"instruction": 5}, "instruction"),
        ({"truncate": 1}, "truncate"),
        ({"max_tokens_per_doc": 9}, "max_tokens_per_doc"),
        ({"truncate_prompt_tokens": 9}, "truncate_prompt_tokens"),
    ],
)
def test_wrong_fields_are_named(client, fields, param):
    refused = client.post("/v1/rerank", content=json.dumps(BODY | fields))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("one", "other", "param"),
    [
        (None, "a", "text_1"),
        (["a", "b"], ["a"], "text_1"),
        ("a", [], "text_2"),
        ("a", [5], "text_2[0]"),
        ("a", 5, "text_2"),
    ],
)
def test_wrong_texts_of_score_are_named(client, one, other, param):
    refused = client.post("/score", json={"text_1": one, "text_2": other})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_a_text_of_megabytes_is_refused_before_it_is_encoded(client):
    for fields in ({"documents": ["x" * (5 << 20)]}, {"query": "x" * (5 << 20)}):
        assert client.post("/v1/rerank", json=BODY | fields).status_code == 413
    many = {"query": "x" * (1 << 20), "documents": ["a"] * 2000}  # a megabyte that would be encoded 2,000 times
    assert client.post("/v1/rerank", json=many).status_code == 413


def test_a_chat_model_is_refused(tmp_path):
    with generate.load(tiny_reranker.write(tmp_path, tiny_reranker.CHAT), backend="numpy") as llm:
        refused = client_of(llm, "chat").post("/v1/rerank", json=BODY)
    assert (refused.status_code, refused.json()["error"]["type"]) == (501, "not_supported_error")
    assert "is not used as a reranker" in refused.json()["error"]["message"]


def test_keys_and_other_methods(client):
    pytest.importorskip("starlette")
    from generate.server.guard import Policy, keys_of

    locked = client_of(client.llm, "tiny", Policy(keys_of(["secret"], None, None)))
    assert locked.post("/v1/rerank", json=BODY).status_code == 401
    assert locked.post("/v1/rerank", json=BODY, headers={"authorization": "Bearer secret"}).status_code == 200
    assert client.get("/v1/rerank").status_code == 405


def test_a_client_that_leaves_ends_the_work(client, monkeypatch):
    """At the next step of the model; the server then takes the next request."""
    from common import rerank

    read, documents = rerank.hidden_states, 0

    async def leave():
        left = asyncio.Event()

        def counted(*args):
            nonlocal documents
            documents += 1
            if documents == 3:
                loop.call_soon_threadsafe(left.set)
            return read(*args)

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(rerank, "hidden_states", counted)
        answer = await call(
            client.app, "POST", "/v1/rerank", json.dumps(BODY | {"documents": ["text"] * 2000}).encode(), left=left
        )
        await answer.task
        return answer

    answer = asyncio.run(leave())
    assert answer.status == 0
    assert documents < 1000
    assert client.service.running == 0
    assert client.post("/v1/rerank", json=BODY | {"documents": ["a"]}).status_code == 200


def test_the_log_counts_tokens(client):
    client.log.seek(0)
    client.log.truncate()
    tokens = client.post("/v1/rerank", json=BODY).json()["usage"]["prompt_tokens"]
    assert f"prompt={tokens} " in client.log.getvalue()
    assert QUERY not in client.log.getvalue()
