"""Embeddings by the routes of OpenAI, llama.cpp and Ollama, compared with those of llama.cpp's server."""

import asyncio
import base64
import json
from pathlib import Path

import numpy as np
import pytest
import tiny_chat
from conftest import client_of

import generate
from common.errors import BimetalError, PromptTooLongError, UsageError

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "embedding_golden.json").read_text())
TEXTS = GOLDEN["texts"]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tiny_chat.write(tmp_path_factory.mktemp("tiny"), fim=tiny_chat.FIM)
    with generate.load(folder, backend="numpy") as llm:
        yield client_of(llm, "tiny")


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_those_of_llama_cpp(client, pooling):
    found = client.llm.embed(TEXTS, pooling=pooling)
    assert found.dtype == np.float32
    assert np.allclose(found, GOLDEN[pooling], atol=2e-4)
    assert np.allclose(np.linalg.norm(found, axis=1), 1)
    assert (client.llm.embed(TEXTS[1], pooling=pooling) == found[1]).all()
    assert (client.llm.embed(client.llm.tokenizer.encode(TEXTS[1]), pooling=pooling) == found[1]).all()
    assert (asyncio.run(client.llm.aembed(TEXTS[1], pooling)) == found[1]).all()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
def test_openai(client, path):
    body = client.post(path, json={"input": TEXTS, "model": "any"}).json()
    assert [each["index"] for each in body["data"]] == [0, 1, 2]
    assert np.allclose([each["embedding"] for each in body["data"]], GOLDEN["last"], atol=2e-4)
    tokens = sum(len(client.llm.tokenizer.encode(text)) for text in TEXTS)
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    [one] = client.post(path, json={"input": TEXTS[0], "encoding_format": "base64", "dimensions": 32}).json()["data"]
    assert np.allclose(np.frombuffer(base64.b64decode(one["embedding"]), "<f4"), GOLDEN["last"][0], atol=2e-4)
    ids = client.llm.tokenizer.encode(TEXTS[0])
    for given in (ids, [ids], [TEXTS[0]]):
        [again] = client.post(path, json={"input": given}).json()["data"]
        assert np.allclose(again["embedding"], GOLDEN["last"][0], atol=2e-4)


def test_llama_cpp(client):
    [one, other] = client.post("/embedding", json={"content": TEXTS[:2]}).json()
    assert np.allclose(one["embedding"], [GOLDEN["last"][0]], atol=2e-4)
    assert other["index"] == 1
    assert client.post("/embedding", json={"content": "a", "embd_normalize": -1}).status_code == 400


def test_ollama(client):
    body = client.post("/api/embed", json={"model": "any", "input": TEXTS}).json()
    assert np.allclose(body["embeddings"], GOLDEN["last"], atol=2e-4)
    assert body["model"] == "any"
    long = "x" * 300
    cut = client.post("/api/embed", json={"input": long}).json()
    assert cut["prompt_eval_count"] == client.llm.context
    assert client.post("/api/embed", json={"input": long, "truncate": False}).status_code == 400
    old = client.post("/api/embeddings", json={"prompt": TEXTS[0]}).json()
    assert np.allclose(old["embedding"], GOLDEN["last"][0], atol=2e-4)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": 5}, "input"),
        ({"input": [10**8]}, "input"),
        ({"input": [[True]]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "x" * 300}, "input"),
        ({"input": "a", "dimensions": 8}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_wrong_fields_are_named(client, fields, param):
    refused = client.post("/v1/embeddings", json=fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_refusals_in_python(client, tmp_path):
    with pytest.raises(UsageError, match="pooling is 'cls'; it must be one of last, mean"):
        client.llm.embed("a", pooling="cls")
    with pytest.raises(PromptTooLongError):
        client.llm.embed("x" * 300)
    folder = tiny_chat.write(tmp_path)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    with generate.load(folder, backend="numpy") as llm:
        assert (llm.embed("abc") == llm.embed("abc", pooling="mean")).all()
        assert not (llm.embed("abc") == llm.embed("abc", pooling="last")).all()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    with generate.load(folder, backend="numpy") as llm, pytest.raises(BimetalError, match="states no pooling"):
        llm.embed("abc")


def test_a_text_that_is_cut_keeps_its_end_token(tmp_path):
    """Its hidden state is the embedding of a model that pools the last token."""
    folder = tiny_chat.write(tmp_path)
    tiny_chat.end_texts(folder)
    with generate.load(folder, backend="numpy") as llm:
        *found, end = llm.tokenizer.encode("x" * (llm.context - 1))
        assert [end] == llm.tokenizer.prompt_tail
        body = client_of(llm, "tiny").post("/api/embed", json={"input": "x" * 300}).json()
        assert (body["prompt_eval_count"], len(found)) == (llm.context, llm.context - 1)
        assert np.allclose(body["embeddings"][0], llm.embed([*found, end]), atol=1e-6)


def test_a_folder_without_a_normalization(tmp_path):
    folder = tiny_chat.write(tmp_path)
    (folder / "modules.json").write_text('[{"type": "sentence_transformers.models.Transformer"}]')
    with generate.load(folder, backend="numpy") as llm:
        found, client = llm.embed("abc"), client_of(llm, "tiny")
        assert abs(np.linalg.norm(found) - 1) > 0.1
        one = client.post("/v1/embeddings", json={"input": "abc"}).json()["data"][0]["embedding"]
        assert np.allclose(one, found, atol=1e-5)
        for path, of in (
            ("/api/embed", lambda body: body["embeddings"][0]),
            ("/embedding", lambda body: body[0]["embedding"][0]),
        ):
            unit = of(client.post(path, json={"input": "abc"}).json())
            assert np.allclose(unit, found / np.linalg.norm(found), atol=1e-5)


def test_a_draft_changes_no_embedding():
    with generate.load("demo", backend="numpy", draft="demo") as pair, generate.load("demo", backend="numpy") as plain:
        assert (pair.embed("def add(a, b):") == plain.embed("def add(a, b):")).all()
        assert pair.generate("x = ", max_tokens=2).finish_reason == "length"
