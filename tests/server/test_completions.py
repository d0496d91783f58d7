"""Legacy Completions as evaluation harnesses use them, and the routes about tokens, templates and figures."""

import asyncio
import threading
from itertools import pairwise

import numpy as np
import pytest
from asgi import call
from conftest import client_of
from wires import sse

from common.errors import UsageError
from common.sampling import log_softmax
from generate import __version__
from generate.cli import parse
from generate.llm import LLM

URL = "/v1/completions"
PROMPT = "def add(a, b):\n    return"


def ask(client, **fields):
    return client.post(URL, json={"prompt": PROMPT, "temperature": 0, **fields})


@pytest.mark.parametrize("prompts", [{"prompt": PROMPT}, {"messages": [{"role": "user", "content": "a"}]}])
def test_n_predict_limits_a_reply(client, prompts):
    """It was ignored, and a reply went on to the end of the context."""
    path = "/v1/completions" if "prompt" in prompts else "/v1/chat/completions"

    def finished(**limits):
        response = client.post(path, json={**prompts, "temperature": 0, **limits})
        return response.json()["usage"]["completion_tokens"] if response.status_code == 200 else response.text

    assert finished(n_predict=3) == 3
    assert finished(n_predict=3, max_tokens=2) == 2
    assert finished(n_predict=-1, max_tokens=2) == 2
    assert "n_predict is 0; it must be -1, for no limit, or " in finished(n_predict=0)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("/v1/completions", "max_tokens"),
        ("/v1/completions", "n_predict"),
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/chat/completions", "n_predict"),
        ("/v1/responses", "max_output_tokens"),
    ],
)
def test_a_limit_of_minus_1_is_none(scripted, path, key):
    """It was refused, or did not take the place of the limit of `serve -n`."""
    client = client_of(scripted.llm, "scripted", options={"max_tokens": 7})
    asked = (
        {"input": "a"} if path == "/v1/responses" else {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    )
    for most, taken in ((None, 7), (3, 3), (-1, None), (-2, None)):
        assert client.post(path, json=asked | {key: most}).status_code == 200
        assert scripted.llm.options[-1]["max_tokens"] == taken
    refused = client.post(path, json=asked | {key: -3})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == key
    assert "-1, for no limit" in refused.json()["error"]["message"]


def test_a_prompt_of_unknown_tokens_is_the_fault_of_its_field(client):
    refused = ask(client, prompt=[10**8])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


def test_sampling_of_the_server(scripted):
    """Flags of `serve` were refused; they hold where a request has no value of its own."""
    flags = ["--temp", "0.5", "--top-k", "4", "--top-p", "0.9", "--min-p", "0.1", "--repeat-penalty", "1.5", "-s", "3"]
    given = parse(["serve", "demo", *flags, "-n", "9"]).options
    options = {"temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.5, "seed": 3}
    assert given == options | {"max_tokens": 9}
    client = client_of(scripted.llm, "scripted", options=given)
    params = client.get("/props").json()["default_generation_settings"]["params"]
    assert params == given | {"n_predict": 9, "repeat_penalty": 1.5, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    for more in ({}, {"temperature": 0, "seed": 4, "max_tokens": 2}, {"temperature": None, "top_k": -1}):
        assert ask(client, **{"temperature": None, **more}).status_code == 200
        own = {name: max(value, 0) for name, value in more.items() if value is not None}
        assert scripted.llm.options[-1] == given | own
    ask(client, seed=-1, n=2)
    assert scripted.llm.options[-1]["seed"] is None


def test_text_goes_on_as_in_the_python_api(client, demo):
    body = ask(client, max_tokens=8).json()
    assert body["choices"][0]["text"] == demo.generate(PROMPT, temperature=0, max_tokens=8).text
    chunks = sse(ask(client, max_tokens=8, stream=True))
    assert "".join(c["choices"][0]["text"] for c in chunks) == body["choices"][0]["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def scores(choice, tokens):
    """What a harness computes of an echo: the log-probabilities of all tokens but the first and the new one."""
    return choice["logprobs"]["token_logprobs"][1:tokens], choice["logprobs"]["top_logprobs"][1:tokens]


@pytest.mark.parametrize("most", [0, 1])
def test_an_echo_scores_the_prompt(client, demo, most):
    ids = demo.tokenizer.encode(PROMPT)
    rows = demo.logits(ids)
    expected = [log_softmax(row)[id] for row, id in zip(rows, ids[1:], strict=False)]
    for prompt in (PROMPT, ids, [PROMPT], [ids]):
        [choice] = ask(client, prompt=prompt, echo=True, max_tokens=most, logprobs=1).json()["choices"]
        found, best = scores(choice, len(ids))
        assert np.allclose(found, expected)
        assert len(choice["logprobs"]["tokens"]) == len(ids) + most
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert choice["text"].startswith(PROMPT)
        greedy = [max(top, key=top.get) for top in best]
        assert greedy == [demo.tokenizer.decode([int(row.argmax())]) for row in rows[:-1]]
        offsets = choice["logprobs"]["text_offset"]
        assert [PROMPT[a:b] for a, b in pairwise(offsets[: len(ids)])] == [
            demo.tokenizer.decode([id]) for id in ids[: len(ids) - 1]
        ]


def test_an_end_token_keeps_its_place_among_the_log_probabilities(scripted):
    """Harnesses drop the last entry, which must not be one of the prompt."""
    scripted.llm.text = ""
    [choice] = ask(scripted, echo=True, max_tokens=1, logprobs=1).json()["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(PROMPT) + 1
    assert choice["logprobs"]["token_logprobs"][-1] == -0.25
    chunks = sse(ask(scripted, echo=True, max_tokens=1, logprobs=1, stream=True))
    assert chunks[-1]["choices"][0]["logprobs"]["token_logprobs"] == [-0.25]


def test_several_prompts_and_repetitions(client, demo):
    body = ask(client, prompt=["a =", "b ="], n=2, max_tokens=3).json()
    texts = [c["text"] for c in body["choices"]]
    assert texts == [demo.generate(p, temperature=0, max_tokens=3).text for p in ("a =", "a =", "b =", "b =")]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (4, 12)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": None},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": ["a", 1]},
        {"prompt": [1, True]},
        {"prompt": [10**9]},
        {"max_tokens": 0},
        {"suffix": "end"},
        {"best_of": 3},
        {"n": 2, "echo": True},
        {"n": 129},
        {"logprobs": 21},
        {"prompt": ["a"] * 129},
    ],
)
def test_wrong_fields_are_refused(client, fields):
    response = ask(client, **fields)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("prompt", "wrong"),
    [
        (["a" * 200, 3], "prompt[1] is 3"),
        ([*range(50), "a"], "prompt[50] is 'a'"),
        ([[1, 2], [1, None]], "prompt[1][1] is None"),
        (["a", ""], "prompt[1] is ''"),
        ([True], "prompt[0] is True"),
        ({"a": 1}, "prompt is {'a': 1}"),
    ],
)
def test_the_wrong_entry_of_a_prompt_is_named(scripted, prompt, wrong):
    error = ask(scripted, prompt=prompt).json()["error"]
    words = "a prompt is text, a list of texts, a list of token ids, or a list of such lists, none of them empty"
    assert (error["message"], error["param"]) == (f"{wrong}; {words}", "prompt")


def test_long_texts_are_not_tokenized(scripted, monkeypatch):
    """One request's text would hold up the prompts of all others."""
    monkeypatch.setattr("generate.server.utilities.MOST_TEXT", 5)
    for key in ("content", "prompt"):
        assert scripted.post("/tokenize", json={key: "a" * 5}).json()["count"] >= 5
        refused = scripted.post("/tokenize", json={key: "a" * 6})
        assert (refused.status_code, refused.json()["error"]["param"]) == (413, key)
    found = scripted.post("/tokenize", json={"content": "abab", "with_pieces": True, "return_token_strs": True}).json()
    assert [one["piece"] for one in found["tokens"]] == found["token_strs"] == list("abab")


def test_a_conversation_without_the_beginning_of_a_reply(scripted):
    given = {"messages": [{"role": "user", "content": "Hi"}]}
    text, begun = "<|im_start|>user\nHi<|im_end|>\n", "<|im_start|>assistant\n"
    for more, expected in (({"add_generation_prompt": False}, text), ({}, text + begun)):
        assert scripted.post("/apply-template", json=given | more).json() == {"prompt": expected}
        ids = scripted.post("/tokenize", json=given | more).json()["tokens"]
        assert scripted.post("/detokenize", json={"tokens": ids}).json()["content"] == expected
    assert scripted.post("/tokenize", json=given | {"add_generation_prompt": 5}).status_code == 400


def test_a_piece_that_is_no_text_is_a_list_of_bytes(scripted):
    asked = {"content": "é€", "with_pieces": True, "return_token_strs": True}
    found = scripted.post("/tokenize", json=asked).json()
    pieces = [one["piece"] for one in found["tokens"]]
    assert b"".join(bytes(p) if isinstance(p, list) else p.encode() for p in pieces).decode() == asked["content"]
    assert [p for p in pieces if isinstance(p, list)] == pieces == [[byte] for byte in asked["content"].encode()]
    assert set(found["token_strs"]) == {"\ufffd"}


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
def test_answers_are_written_beside_the_event_loop(scripted, monkeypatch, path):
    from generate.server import answer

    threads, dumps = [], answer.dumps
    monkeypatch.setattr(answer, "dumps", lambda value: threads.append(threading.get_ident()) or dumps(value))
    found = asyncio.run(call(scripted.app, "POST", path, b'{"prompt": "Hi"}'))
    assert found.status == 200
    assert len(threads) == 1
    assert threads != [threading.get_ident()]


def test_tokens_and_templates(client, demo):
    ids = demo.tokenizer.encode("a = 1")
    assert client.post("/tokenize", json={"content": "a = 1"}).json()["tokens"] == ids
    found = client.post("/tokenize", json={"prompt": "a = 1", "with_pieces": True}).json()
    assert ([one["id"] for one in found["tokens"]], found["count"]) == (ids, len(ids))
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"content": "a = 1", "prompt": "a = 1"}
    messages = {"messages": [{"role": "user", "content": "a = 1"}]}
    assert client.post("/apply-template", json=messages).json() == {"prompt": "a = 1"}
    assert client.post("/tokenize", json=messages).json()["tokens"] == ids
    assert client.post("/v1/chat/completions/input_tokens", json=messages).json() == {"input_tokens": len(ids)}
    counted = client.post("/v1/responses/input_tokens", json={"input": "a = 1"}).json()
    assert counted["input_tokens"] == len(ids)
    assert client.post("/detokenize", json={"tokens": [10**6]}).status_code == 400
    shown = client.get("/tokenizer_info").json()
    assert client.post("/tokenize", json={"content": shown["eos_token"]}).json()["tokens"] == [demo.tokenizer.eos_id]
    assert (shown["bos_token"], shown["chat_template"]) == (None, demo.tokenizer.chat_template)


VLLM = [  # what vLLM's own dashboards read, but for adapters, images, sleep, and caches of other machines
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total", "admission_rejections_total"),
    *("prompt_tokens_total", "prompt_tokens_by_source_total", "prompt_tokens_cached_total", "generation_tokens_total"),
    *("request_success_total", "request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total"),
    *("request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prefill_kv_computed_tokens"),
    *("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
    "spec_decode_num_accepted_tokens_per_pos_total",
]


def test_figures(scripted):
    for stream in (False, True):
        ask(scripted, max_tokens=9, stream=stream)
    scripted.llm.finish = "length"
    ask(scripted)
    lines = scripted.get("/metrics").text.splitlines()
    values = {line.split(" ")[0]: float(line.split(" ")[1]) for line in lines if not line.startswith("#")}
    label = '{model_name="scripted"'
    assert values[f'bimetal:request_success_total{label},finished_reason="stop"}}'] == 2
    assert values[f'bimetal:request_success_total{label},finished_reason="length"}}'] == 1
    assert values[f"bimetal:generation_tokens_total{label}}}"] == 15
    assert values[f"bimetal:prefix_cache_hits_total{label}}}"] == 9
    assert values[f"bimetal:time_to_first_token_seconds_count{label}}}"] == 3
    assert values[f'bimetal:request_params_max_tokens_bucket{label},le="10"}}'] == 2
    assert values[f"bimetal:num_requests_running{label}}}"] == 0
    named = [line.split(" ")[2] for line in lines if line.startswith("# TYPE")]
    assert len(named) == len(set(named))
    assert values[f'bimetal:cache_config_info{label},num_slots="2",max_model_len="4096"}}'] == 1
    assert values[f"bimetal:num_preemptions_total{label}}}"] == 0
    assert values[f'bimetal:prompt_tokens_by_source_total{label},source="local_compute"}}'] == 66
    assert values[f'bimetal:prompt_tokens_by_source_total{label},source="local_cache_hit"}}'] == 9
    assert values[f'bimetal:request_max_num_generation_tokens_bucket{label},le="5"}}'] == 3
    assert values[f"bimetal:request_prefill_kv_computed_tokens_sum{label}}}"] == 66
    assert [name for name in VLLM if f"bimetal:{name}" not in named] == []
    props = scripted.get("/props").json()
    assert props["total_slots"] == len(scripted.get("/slots").json()) == 2
    assert props["chat_template_caps"]["supports_tools"]
    assert props["prefix_cache"] == {"bytes": 0, "budget_bytes": 0, "queries": 75, "hits": 9}


def test_the_model_as_clients_look_for_it(scripted):
    """Under the names of OpenAI, Anthropic, OpenRouter, vLLM, llama.cpp and LM Studio."""
    [model] = scripted.get("/v1/models").json()["data"]
    assert scripted.get("/models").json()["data"] == [model]
    assert scripted.get("/v1/models/owner%2Fname").json() == model
    assert (model["object"], model["type"], model["id"], model["owned_by"]) == ("model", "model", "scripted", "bimetal")
    limits = {model[name] for name in ("context_length", "max_model_len", "max_context_length", "max_input_tokens")}
    assert limits == {model["meta"]["n_ctx"]} == {4096}
    assert model["meta"]["n_params"] * 4 < model["meta"]["size"]  # float32, and a header


def test_the_settings_of_requests_that_give_none(scripted):
    props = scripted.get("/props").json()
    params = props["default_generation_settings"]["params"]
    assert {name: params[name] for name in ("temperature", "top_p", "n_predict", "seed")} == {
        "temperature": 0.0,
        "top_p": 1.0,
        "n_predict": -1,
        "seed": -1,
    }
    assert props["eos_token"] == scripted.get("/tokenizer_info").json()["eos_token"] == "<|im_end|>"
    assert scripted.get("/version").json() == {"version": __version__}


@pytest.mark.parametrize("busy", [1, 2])
def test_slots_that_are_all_busy(scripted, busy):
    """As in llama.cpp, a load balancer can ask whether a slot is free."""
    scripted.llm.running = busy
    assert scripted.get("/slots").status_code == 200
    assert scripted.get("/slots?fail_on_no_slot=1").status_code == (503 if busy == 2 else 200)


@pytest.mark.long
def test_windows_of_the_server():
    """Flags of speculation and windows were refused; they hold for every request that may decode so."""
    figures = []
    for flags in (["--spec", "wedlm", "--wedlm-window", "4"], ["--wedlm-tau", "0"], ["--spec", "off"]):
        args = parse(["serve", "--model", "demo-wedlm", *flags])
        with LLM(args.model, args.load, window=args.window) as llm:
            client = client_of(llm, options=args.options)
            body = ask(client, prompt="Count by 2 from 11 to 29.", max_tokens=20).json()
            figures.append(body["timings"].get("wedlm"))
            assert ask(client, prompt="a", max_tokens=4, temperature=1).status_code == 200
            assert client.get("/props").json()["speculative"] == ("off" if "off" in flags else "wedlm")
    assert figures[0]["tokens_per_forward"] > 1 >= figures[1]["tokens_per_forward"]
    assert figures[2] is None
    args = parse(["serve", "--model", "demo", "--wedlm-window", "4"])
    with pytest.raises(UsageError, match="wedlm_window is for spec wedlm, and spec is off"):
        LLM(args.model, args.load, window=args.window)


def test_a_server_without_a_mask_token():
    """It began to serve, and refused every request."""
    args = parse(["serve", "--model", "demo", "--spec", "wedlm"])
    with pytest.raises(UsageError, match="spec wedlm needs a WeDLM checkpoint"):
        LLM(args.model, args.load, window=args.window)


def test_a_server_that_verifies_windows():
    """The flag of `serve` had no effect, because every request was taken to leave verifying out."""
    args = parse(["serve", "--model", "demo-wedlm", "--wedlm-preset", "fast", "--wedlm-verify"])
    with LLM(args.model, args.load, window=args.window) as llm:
        of = {"max_tokens": 20, "temperature": 0}
        plain, unverified = (llm.generate("a", **of, **o).text for o in ({"spec": "off"}, {"wedlm_preset": "fast"}))
        chosen = llm.generate("a", **of, wedlm_verify=False).text
        served = ask(client_of(llm, options=args.options), prompt="a", max_tokens=20).json()["choices"][0]["text"]
    assert served == plain != unverified
    assert chosen == unverified
