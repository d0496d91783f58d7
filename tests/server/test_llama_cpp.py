"""llama.cpp's /completion, and token ids of prompts and replies under the names of llama.cpp and vLLM."""

import json

import pytest
from wires import sse

from common.schedule import BusyError

PROMPT = "def add(a, b):\n    return"
URL = "/completion"


def ask(client, **fields):
    response = client.post(URL, json={"prompt": PROMPT, "temperature": 0, "n_predict": 6, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def messages_of(client, **fields):
    """The messages of a stream, which has no [DONE] in llama.cpp's own API."""
    response = client.post(URL, json={"prompt": PROMPT, "temperature": 0, "n_predict": 6, "stream": True, **fields})
    assert response.status_code == 200, response.text
    return [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]


def test_a_reply_and_its_figures(client, demo):
    body, plain = ask(client), demo.generate(PROMPT, temperature=0, max_tokens=6)
    ids = demo.tokenizer.encode(PROMPT)
    assert (body["content"], body["stop"], body["stop_type"]) == (plain.text, True, "limit")
    assert (body["tokens_predicted"], body["tokens_evaluated"], body["tokens"]) == (6, len(ids), [])
    assert body["generation_settings"]["n_predict"] == 6
    assert (body["timings"]["predicted_n"], body["truncated"], body["index"]) == (6, False, 0)
    stopped = ask(client, n_predict=20, stop=["b"])
    assert (stopped["stop_type"], stopped["stopping_word"], "b" in stopped["content"]) == ("word", "b", False)


def test_a_stream_has_the_text_of_a_whole_reply(client):
    messages = messages_of(client)
    assert "".join(m["content"] for m in messages) == ask(client)["content"]
    assert [m["stop"] for m in messages] == [False] * (len(messages) - 1) + [True]
    assert messages[-1]["tokens_predicted"] == 6


def test_prompts_of_every_form(client, demo):
    ids, text = demo.tokenizer.encode(PROMPT), ask(client)["content"]
    head = demo.tokenizer.encode("def add(a, b):", True)
    rest = demo.tokenizer.encode("\n    return", False)
    assert ask(client, prompt=ids)["content"] == text
    assert ask(client, prompt=["def add(a, b):", *rest])["tokens_evaluated"] == len(head + rest)
    assert ask(client, prompt={"prompt_string": PROMPT})["content"] == text
    both = ask(client, prompt=[PROMPT, ids], n_cmpl=2)
    assert [(one["index"], one["content"]) for one in both] == [(at, text) for at in range(4)]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (None, "prompt is None; a prompt is text, or a list of token ids and texts"),
        ([], "prompt is []; from 1 to 128 prompts"),
        ([1, None], "prompt is [1, None]"),
        ([[]], "prompt[0] is []"),
        ([1, True], "prompt is [1, True]"),
        ({"prompt_string": "a", "multimodal_data": ["b"]}, "a prompt is text"),
        ([10**9], "1000000000"),
    ],
)
def test_prompts_that_are_none(client, prompt, words):
    refused = client.post(URL, json={"prompt": prompt})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    assert words in refused.json()["error"]["message"]


def test_probabilities(client):
    body = ask(client, n_probs=3)
    assert len(body["completion_probabilities"]) == 6
    first = body["completion_probabilities"][0]
    assert first["logprob"] == first["top_logprobs"][0]["logprob"] > first["top_logprobs"][2]["logprob"]
    assert bytes(first["bytes"]).decode() == first["token"] == body["content"][: len(first["token"])]
    streamed = messages_of(client, n_probs=3)
    found = [one for message in streamed for one in message.get("completion_probabilities", [])]
    assert found == body["completion_probabilities"]


def test_biases_in_pairs(client, demo):
    body = ask(client, n_predict=1, return_tokens=True)
    (token,) = body["tokens"]
    assert ask(client, n_predict=1, logit_bias=[[token, False]], return_tokens=True)["tokens"] != [token]
    assert ask(client, n_predict=1, logit_bias=[[" zero", 200]])["content"] in (" zero", " z")
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "temperature": 0}
    for pairs in ([], [[" zero", 300]]):  # llama.cpp's Chat Completions take pairs too
        [choice] = client.post("/v1/chat/completions", json=chat | {"logit_bias": pairs}).json()["choices"]
        assert (choice["message"]["content"] in (" zero", " z")) == bool(pairs)
    for pairs in ([[token]], [[token, "a"]], [[-1, 2]], [[token, True], 5], [[10**9, 1.0]]):
        refused = client.post(URL, json={"prompt": "a", "logit_bias": pairs})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logit_bias")


def test_grammars(client):
    pytest.importorskip("llguidance", reason="the grammar extra is not installed")
    assert ask(client, grammar='root ::= [0-9] "!"', n_predict=9)["content"][1:] == "!"
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    assert json.loads(ask(client, json_schema=schema, n_predict=40)["content"])["a"] in (True, False)


def test_token_ids_under_llama_cpps_name(client, demo):
    body = ask(client, return_tokens=True)
    assert demo.tokenizer.decode(body["tokens"]) == body["content"]
    messages = messages_of(client, return_tokens=True)
    assert [id for message in messages for id in message["tokens"]] == body["tokens"]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_token_ids_under_vllms_names(scripted, path):
    """With them a trainer sees the tokens that the model wrote, its reasoning and the end included."""
    scripted.llm.text = "<think>ab</think>cd"
    fields = {"messages": [{"role": "user", "content": "a"}], "prompt": "abc", "return_token_ids": True}
    body = scripted.post(f"/v1/{path}", json=fields).json()
    [choice] = body["choices"]
    prompt = (choice if path == "completions" else body)["prompt_token_ids"]
    assert scripted.llm.tokenizer.decode(prompt).startswith("abc" if path == "completions" else "<|im_start|>")
    assert scripted.llm.tokenizer.decode(choice["token_ids"]) == scripted.llm.text
    chunks = sse(scripted.post(f"/v1/{path}", json={**fields, "stream": True}))
    streamed = [id for chunk in chunks for one in chunk["choices"] for id in one["token_ids"]]
    assert streamed == choice["token_ids"]
    (first,) = [
        held["prompt_token_ids"]
        for chunk in chunks
        for held in (chunk["choices"][0] if path == "completions" else chunk,)
        if "prompt_token_ids" in held
    ]
    assert first == prompt
    assert "token_ids" not in scripted.post(f"/v1/{path}", json={**fields, "return_token_ids": False}).text


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/api/generate", {"model": "m"}), ("/v1/completions", {"return_token_ids": True, "stream": True})],
)
def test_ids_of_a_prompt_are_not_sent_before_its_reply_begins(scripted, path, fields):
    """The status of a reply that is refused at once was 200."""
    scripted.llm.text, scripted.llm.error = "", BusyError("2 calls wait")
    assert scripted.post(path, json={"prompt": "abc", **fields}).status_code == 503


def test_the_end_token_is_among_the_ids(client, demo):
    end = min(demo.tokenizer.end_ids)
    fields = {"prompt": "a", "return_token_ids": True, "logit_bias": {str(end): 100}, "temperature": 0}
    [choice] = client.post("/v1/completions", json=fields).json()["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("", [end], "stop")
