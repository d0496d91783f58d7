"""Tokens that end a reply, by fields of vLLM and llama.cpp, in every API."""

import pytest
from conftest import client_of
from tiny_chat import END
from tiny_chat import write as write_model
from wires import sse

import generate

USER = [{"role": "user", "content": "Hello?"}]
PATHS = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 9},
    "/v1/completions": {"prompt": "Hello?", "max_tokens": 9},
    "/v1/responses": {"input": "Hello?", "max_output_tokens": 9},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
}


@pytest.fixture(scope="module")
def ending(tmp_path_factory):
    """A client of a model that ends each reply at its first token, if it may."""
    with generate.load(write_model(tmp_path_factory.mktemp("model")), backend="numpy", ctx=512) as llm:
        yield client_of(llm, "ending")


@pytest.fixture
def likely_end(ending, monkeypatch):
    """Make the end token the most likely one of every row; a bias would forbid less than a guide does."""
    plain, end = ending.llm.astream_prepared, ending.llm.tokenizer.token_to_id(END)
    monkeypatch.setattr(
        ending.llm, "astream_prepared", lambda prompt, **options: plain(prompt, logit_bias={end: 99.0}, **options)
    )
    return end


def reply(client, path, **fields):
    """Return (the text, the number of its tokens) of a reply."""
    response = client.post(path, json={**PATHS[path], "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    body = response.json()
    usage = body["usage"]
    count = usage.get("completion_tokens", usage.get("output_tokens"))
    if "choices" in body:
        [choice] = body["choices"]
        return choice["message"]["content"] if "message" in choice else choice["text"], count
    parts = body["content"] if "content" in body else body["output"][0]["content"]
    return "".join(part["text"] for part in parts), count


@pytest.mark.parametrize("path", PATHS)
def test_what_ends_a_reply(ending, likely_end, path):
    """These fields of vLLM and llama.cpp were refused, so that their load tests could not fix the length of replies."""
    assert reply(ending, path) == ("", 1)
    assert reply(ending, path, ignore_eos=True) == ("", 9)  # of end tokens alone, which are not shown
    text, count = reply(ending, path, min_tokens=4)
    assert (len(text) > 0, count) == (True, 5)
    assert reply(ending, path, ignore_eos=True, stop_token_ids=[likely_end]) == ("", 1)
    assert reply(ending, path, min_tokens=20)[1] == 9


@pytest.mark.parametrize("path", PATHS)
def test_further_end_tokens(ending, path):
    whole, count = reply(ending, path)
    last = next(character for character in reversed(whole) if character.isascii())
    text, fewer = reply(ending, path, stop_token_ids=ending.llm.tokenizer.encode(last, False))
    assert fewer <= count == 9
    assert whole.startswith(text)
    assert last not in text


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_may_be_shown(client, stream):
    """`include_stop_str_in_output` of vLLM was ignored, and the text lacked its end."""
    fields = {"prompt": "def add(a, b):\n    return", "temperature": 0, "max_tokens": 20, "stop": ["+ b"]}

    def text(**more):
        response = client.post("/v1/completions", json={**fields, "stream": stream, **more})
        chunks = sse(response) if stream else [response.json()]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    assert text() == " a "
    assert text(include_stop_str_in_output=True) == " a + b"
    assert text(include_stop_str_in_output=True, stop=["never"]) == text(stop=None)


def test_a_grammar_that_must_end_ends_before_min_tokens(ending):
    pytest.importorskip("llguidance", reason="the grammar extra is not installed")
    assert reply(ending, "/v1/completions", guided_choice=["yes"], min_tokens=8) == ("yes", 4)
    text, count = reply(ending, "/v1/completions", guided_regex="(yes)+", min_tokens=6)
    assert (text[:6], count >= 7) == ("yesyes", True)


def test_the_options_of_ollama_and_of_llama_cpp(ending, likely_end):
    fields = {"model": "m", "prompt": "Hello?", "stream": False, "raw": True}
    options = {"num_predict": 6, "temperature": 0, "ignore_eos": True}
    assert ending.post("/api/generate", json={**fields, "options": options}).json()["eval_count"] == 6
    assert ending.post("/api/generate", json={**fields, "options": {"num_predict": 6}}).json()["eval_count"] == 1
