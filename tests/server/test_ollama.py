"""Ollama's API: lines, whole replies, what clients ask first, and what the official SDK makes of it."""

import pytest
from wires import ndjson

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
USER = [{"role": "user", "content": "Hello?"}]


def chat(client, **fields):
    return client.post("/api/chat", json={"model": "any", "messages": USER, **fields})


def test_a_chat_is_a_stream_unless_it_is_told_not_to_be(scripted):
    scripted.llm.text = f"Hm.</think>Yes.{CALL}"
    lines = ndjson(chat(scripted, think=True, tools=[ADD]))
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert "".join(line["message"].get("thinking", "") for line in lines) == "Hm."
    assert "".join(line["message"]["content"] for line in lines) == "Yes."
    calls = [call for line in lines for call in line["message"].get("tool_calls", [])]
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in calls] == [("add", {"a": 1})]
    assert (lines[-1]["done_reason"], lines[-1]["eval_count"]) == ("stop", len(scripted.llm.text))
    assert lines[-1]["eval_duration"] == 100_000_000
    whole = chat(scripted, think=True, tools=[ADD], stream=False).json()
    assert whole["message"] == {"role": "assistant", "content": "Yes.", "thinking": "Hm.", "tool_calls": calls}
    assert whole["model"] == "any"


def test_generate_renders_a_prompt_unless_it_is_raw(scripted):
    body = scripted.post("/api/generate", json={"model": "m", "prompt": "Hi", "system": "S", "stream": False}).json()
    assert (body["response"], body["done"]) == ("Hello", True)
    assert scripted.llm.prompts[-1].startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi")
    count = len(scripted.llm.prompts)
    assert ndjson(scripted.post("/api/generate", json={"model": "m", "prompt": "Hi", "raw": True}))[-1]["done"]
    assert len(scripted.llm.prompts) == count


@pytest.mark.parametrize("stream", [False, True])
def test_a_context_goes_on_from_an_earlier_answer(scripted, stream):
    """It was refused, and no answer had one, so that clients of /api/generate began each turn anew."""

    def ask(**fields):
        answer = scripted.post("/api/generate", json={"model": "m", "stream": stream, **fields})
        return ndjson(answer)[-1] if stream else answer.json()

    decode, prompts = scripted.llm.tokenizer.decode, []
    scripted.llm.write = lambda prompt: prompts.append(prompt) or "<think>Hm.</think>Yes."
    context = ask(prompt="Hi")["context"]
    assert decode(context) == prompts[0] + "<think>Hm.</think>Yes."
    again = ask(prompt="And?", context=context)["context"]
    assert prompts[1].startswith(f"{decode(context)}<|im_start|>user\nAnd?")
    assert decode(again).startswith(prompts[1])
    assert "context" not in ask(prompt="Hi", raw=True)
    assert "context" not in ask(prompt="")


def test_options_have_ollamas_names(scripted):
    options = {"num_predict": 7, "seed": 3, "stop": ["x"], "repeat_penalty": 1.1, "temperature": 0.5, "num_ctx": 99}
    chat(scripted, options=options)
    assert scripted.llm.options[-1] == {
        "max_tokens": 7,
        "seed": 3,
        "stop": ("x",),
        "repetition_penalty": 1.1,
        "temperature": 0.5,
    }
    chat(scripted, options={"num_predict": -1, "seed": -1})
    assert scripted.llm.options[-1] == {"max_tokens": None, "seed": None}


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_log_probabilities(scripted, path):
    scripted.llm.text = "Hm.</think>Yes."
    asked = {"model": "m", "messages": USER, "prompt": "Hello?", "think": True, "logprobs": True, "top_logprobs": 1}
    whole = scripted.post(path, json={**asked, "stream": False}).json()["logprobs"]
    lines = ndjson(scripted.post(path, json=asked))
    assert [one for line in lines for one in line.get("logprobs", [])] == whole
    assert "".join(one["token"] for one in whole) == scripted.llm.text
    entry = {"token": "H", "logprob": -0.5, "bytes": [72]}
    assert whole[0] == {**entry, "top_logprobs": [entry]}
    assert scripted.llm.options[-1] == {"logprobs": 1}
    for off in ({"logprobs": False, "top_logprobs": 0}, {"logprobs": None, "top_logprobs": None}):
        assert "logprobs" not in scripted.post(path, json={**asked, **off, "stream": False}).json()
    for wrong in ({"top_logprobs": 21}, {"logprobs": "yes"}, {"logprobs": False}):
        assert scripted.post(path, json={**asked, **wrong}).status_code == 400


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_an_empty_request_loads_the_model(scripted, path):
    assert ndjson(scripted.post(path, json={"model": "m"}))[-1]["done_reason"] == "load"
    assert scripted.post(path, json={"model": "m", "stream": False}).json()["done_reason"] == "load"


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_an_empty_request_that_keeps_the_model_for_no_time_unloads_it(scripted, path):
    """The client gets Ollama's answer; the server's only model stays loaded."""

    def reason(value):
        lines = ndjson(scripted.post(path, json={"model": "m", "messages": [], "keep_alive": value}))
        whole = scripted.post(path, json={"model": "m", "keep_alive": value, "stream": False}).json()
        assert (len(lines), lines[0]["done"], whole["done"]) == (1, True, True)
        assert lines[0]["done_reason"] == whole["done_reason"]
        return whole["done_reason"]

    assert [reason(value) for value in (0, 0.0, "0", "0s", "-0h0.0m")] == ["unload"] * 5
    assert [reason(value) for value in (None, 1, -1, 0.5, "5m", "1h30m", "-1s", ".5s")] == ["load"] * 8
    assert scripted.get("/api/ps").json()["models"][0]["name"] == "scripted"
    asked = {"model": "m", "messages": USER, "prompt": "Hello?", "keep_alive": 0, "stream": False}
    assert scripted.post(path, json=asked).json()["done_reason"] == "stop"


@pytest.mark.parametrize("value", [True, [], {}, "", "x", "5", "5 m", "m", "1.2.3s"])
def test_what_is_no_time_is_refused(scripted, value):
    response = chat(scripted, keep_alive=value)
    words = f"keep_alive is {value!r}; it must be seconds, or a duration such as '5m'"
    assert (response.status_code, response.json()) == (400, {"error": words})


def test_what_clients_ask_first(scripted):
    assert scripted.get("/").text == "Ollama is running"
    assert scripted.head("/").status_code == 200
    major, minor, patch = map(int, scripted.get("/api/version").json()["version"].split("."))
    assert (major, minor, patch) >= (0, 13, 4)
    [model] = scripted.get("/api/tags").json()["models"]
    assert model["name"] == model["model"] == "scripted"
    assert model["size"] > 0
    assert scripted.get("/api/ps").json()["models"][0]["context_length"] == 4096
    shown = scripted.post("/api/show", json={"model": "scripted"}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["scripted.context_length"] == 4096
    assert shown["model_info"]["general.basename"] == "scripted"  # the name that VS Code shows
    assert shown["details"] == model["details"]
    assert model["details"]["quantization_level"] == "F32"
    assert shown["modified_at"] == model["modified_at"]
    assert ndjson(scripted.post("/api/pull", json={"model": "m"})) == [{"status": "success"}]


def test_results_name_their_tool(scripted):
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    chat(scripted, messages=[*USER, called, {"role": "tool", "tool_name": "add", "content": "2"}])
    assert "2<|im_end|>" in scripted.llm.prompts[-1]
    for context, more in (([1, 2], {"raw": True}), ([10**6], {}), ("a", {}), ([-1], {})):
        answer = scripted.post("/api/generate", json={"model": "m", "prompt": "Hi", "context": context, **more})
        assert (answer.status_code, "context" in answer.json()["error"]) == (400, True)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "nobody", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
        {"options": {"temperature": "hot"}},
        {"options": 5},
        {"options": {"mirostat": 1}},
        {"think": 5},
    ],
)
def test_wrong_fields_are_refused_in_the_dialects_envelope(scripted, fields):
    response = chat(scripted, **fields)
    assert response.status_code == 400
    assert list(response.json()) == ["error"]
    assert isinstance(response.json()["error"], str)


def test_an_error_within_a_stream_is_a_line(scripted):
    scripted.llm.error = RuntimeError("secret")
    assert list(ndjson(chat(scripted))[-1]) == ["error"]


def test_the_sdk_reads_replies_and_streams(scripted):
    ollama = pytest.importorskip("ollama")
    scripted.llm.text = f"Yes.{CALL}"
    sdk = ollama.Client(host="http://localhost")
    sdk._client = scripted
    whole = sdk.chat(model="any", messages=USER, tools=[ADD])
    assert (whole.message.content, whole.message.tool_calls[0].function.arguments) == ("Yes.", {"a": 1})
    lines = list(sdk.chat(model="any", messages=USER, tools=[ADD], stream=True))
    assert "".join(line.message.content or "" for line in lines) == "Yes."
    assert lines[-1].done
    assert sdk.generate(model="any", prompt="Hi").response == scripted.llm.text
    assert sdk.show("any").capabilities == ["completion", "tools", "thinking"]
    assert sdk.list().models[0].model == "scripted"
