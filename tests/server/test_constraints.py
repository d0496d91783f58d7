"""Constrained replies through every dialect, over a model with random weights: they parse, whatever it would write."""

import json
import re
import threading
from collections import Counter

import pytest
from conftest import client_of
from tiny_chat import write as write_model

import generate
from common.tokenizer import Tokenizer

pytest.importorskip("llguidance", reason="the grammar extra is not installed")

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{# tools #}"
HERMES = HEAD + '{# <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call> #}<|im_start|>assistant\n'
THINKING = HERMES + "{% if enable_thinking %}<think>\n{% endif %}{# </think> #}"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["noun", "verb"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
USER = [{"role": "user", "content": "Hello?"}]
OPENAI = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("one", "two")]
SAMPLING = {"temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    with generate.load(
        write_model(tmp_path_factory.mktemp("model"), template=THINKING), backend="numpy", ctx=2048
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def nonsense(model):
    return client_of(model, "nonsense")


def follows(text):
    value = json.loads(text)
    return value.keys() == SCHEMA["properties"].keys() and value["kind"] in ("noun", "verb")


def chat(client, **fields):
    response = client.post("/v1/chat/completions", json={"messages": USER, **SAMPLING, **fields})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"name": "word", "strict": True, "schema": SCHEMA}},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_object", "schema": SCHEMA},
    ],
)
def test_chat_completions_follow_a_schema(nonsense, form):
    choice = chat(nonsense, response_format=form)
    assert follows(choice["message"]["content"])
    assert choice["finish_reason"] == "stop"


def test_any_object(nonsense):
    choice = chat(nonsense, response_format={"type": "json_object"}, max_tokens=400)
    assert choice["message"]["content"].startswith("{")


def test_responses_follow_a_schema(nonsense):
    text = {"format": {"type": "json_schema", "name": "word", "schema": SCHEMA, "strict": True}}
    body = nonsense.post("/v1/responses", json={"input": "Hello?", "text": text, **SAMPLING}).json()
    assert follows(body["output"][0]["content"][0]["text"])
    assert (body["text"], body["status"]) == (text, "completed")


@pytest.mark.parametrize("place", ["output_config", "output_format"])
def test_messages_follow_a_schema(nonsense, place):
    """The schema's place in Anthropic's API, and where it was while it was a beta."""
    form = {"type": "json_schema", "schema": SCHEMA}
    output = {"output_config": {"format": form}} if place == "output_config" else {"output_format": form}
    fields = {"max_tokens": 1000, "messages": USER, **output, **SAMPLING}
    body = nonsense.post("/v1/messages", json=fields).json()
    assert follows(body["content"][0]["text"])
    assert body["stop_reason"] == "end_turn"


def test_ollama_follows_a_schema(nonsense):
    fields = {"model": "m", "messages": USER, "format": SCHEMA, "options": SAMPLING, "stream": False}
    assert follows(nonsense.post("/api/chat", json=fields).json()["message"]["content"])
    body = nonsense.post("/api/generate", json={**fields, "prompt": "Hello?", "format": "json"}).json()
    assert body["response"].startswith("{")


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("name", [None, "two"])
@pytest.mark.few(1)
def test_calls_that_are_required(nonsense, name, several):
    chosen = "required" if name is None else {"type": "function", "function": {"name": name}}
    choice = chat(nonsense, tools=OPENAI, tool_choice=chosen, parallel_tool_calls=several)
    calls = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert len(calls) == 1 or several
    assert all(follows(call["function"]["arguments"]) for call in calls)
    assert {call["function"]["name"] for call in calls} <= ({"one", "two"} if name is None else {name})


def test_calls_that_are_required_in_the_other_dialects(nonsense):
    flat = [{"type": "function", **tool["function"]} for tool in OPENAI]
    chosen = {"type": "function", "name": "two"}
    fields = {"input": "Hello?", "tools": flat, "tool_choice": chosen, "parallel_tool_calls": False, **SAMPLING}
    [item] = nonsense.post("/v1/responses", json=fields).json()["output"]
    assert (item["type"], item["name"]) == ("function_call", "two")
    tools = [{"name": tool["function"]["name"], "input_schema": SCHEMA} for tool in OPENAI]
    for chosen, names in (({"type": "any"}, ("one", "two")), ({"type": "tool", "name": "one"}, ("one",))):
        fields = {"max_tokens": 1000, "messages": USER, "tools": tools, "tool_choice": chosen, **SAMPLING}
        body = nonsense.post("/v1/messages", json=fields).json()
        assert body["stop_reason"] == "tool_use"
        assert all(block["name"] in names for block in body["content"])


def test_calls_of_the_allowed_tools(nonsense):
    allowed = {"tools": [{"type": "function", "function": {"name": "two"}}]}
    chosen = {"type": "allowed_tools", "allowed_tools": {"mode": "required", **allowed}}
    calls = chat(nonsense, tools=OPENAI, tool_choice=chosen)["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} == {"two"}
    flat = [{"type": "function", **tool["function"]} for tool in OPENAI]
    chosen = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "one"}]}
    fields = {"input": "Hello?", "tools": flat, "tool_choice": chosen, **SAMPLING}
    assert {item["name"] for item in nonsense.post("/v1/responses", json=fields).json()["output"]} == {"one"}


PATTERNS = {  # what a reply must match, by the fields of llama.cpp and vLLM that request it
    r"ja|nein/é": [
        {"guided_choice": ["ja", "nein/é"]},
        {"structured_outputs": {"choice": ["ja", "nein/é"]}},
        {"grammar": 'root ::= yes | "nein/\\u00e9" # "no"\nyes ::= "ja"'},
        {"guided_grammar": 'start: "ja" | "nein/é"'},
        {"guided_grammar": 'root ::= start\nstart ::= "ja" | "nein/é"'},
        {"structured_outputs": {"grammar": 'root ::= "ja" | "nein" [/] [é]'}},
    ],
    r"[a-c]{2}/\d\n": [
        {"guided_regex": r"[a-c]{2}/\d\n"},
        {"structured_outputs": {"regex": "[a-c]{2}\\/\\d\n"}},
        {"grammar": 'root ::= [\\x61-c]{2} "/" [0-9] "\\n"'},
    ],
}
JSON_FIELDS = [
    {"json_schema": SCHEMA},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_fields_of_llama_cpp_and_vllm(nonsense, path):
    def text(fields):
        asked = {"messages": USER, "prompt": "Hello?", "max_tokens": 1500, **SAMPLING, **fields}
        response = nonsense.post(f"/v1/{path}", json=asked)
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        return choice["message"]["content"] if "message" in choice else choice["text"]

    for pattern, requests in PATTERNS.items():
        for fields in requests:
            assert re.fullmatch(pattern, text(fields)), fields
    assert all(follows(text(fields)) for fields in JSON_FIELDS)
    assert follows(text({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}))
    assert isinstance(json.loads(text({"structured_outputs": {"json_object": True}})), dict)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"grammar": "root ::= other"}, "the grammar is refused: Rule 'other' not found"),
        ({"grammar": 'root ::= "a'}, "the grammar has '\"a', which is not closed"),
        ({"grammar": "root ::= " + "[" * 60000}, "which is not closed"),  # read in linear time
        ({"grammar": "root ::= )"}, "the grammar is neither GBNF nor Lark: Expected name at line 1"),
        ({"grammar": "root ::= " + "(" * 60 + '"a"' + ")" * 60}, "groups inside each other to more than 50 levels"),
        ({"grammar": " " * (1 << 16) + "r"}, "the grammar has 65537 characters; at most 65536 are read"),
        ({"guided_regex": "(?=a)b"}, "look-around, including look-ahead and look-behind, is not supported"),
        ({"guided_choice": ["a"], "grammar": 'root ::= "a"'}, "grammar and guided_choice exclude each other"),
        ({"guided_choice": ["a"], "tools": OPENAI}, "guided_choice does not go with tools; only a JSON schema does"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos is True; it does not go with guided_choice"),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "supported are json, regex, choice, grammar",
        ),
    ],
)
def test_constraints_that_cannot_be_kept(nonsense, fields, words):
    error = nonsense.post("/v1/chat/completions", json={"messages": USER, **fields})
    assert error.status_code == 400
    assert words in error.json()["error"]["message"]
    assert error.json()["error"]["param"]


def test_a_schema_leaves_room_for_calls(nonsense):
    """An agent with a schema for its last message calls its tools before that."""
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    kinds = set()
    for push in (-9, 9):
        bias = {str(nonsense.llm.tokenizer.token_to_id("<")): push}
        choice = chat(nonsense, tools=OPENAI, response_format=form, logit_bias=bias)
        kinds.add(choice["finish_reason"])
        assert choice["finish_reason"] == "tool_calls" or follows(choice["message"]["content"])
    assert kinds == {"stop", "tool_calls"}


def test_reasoning_comes_before_the_schema(nonsense):
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    fields = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_budget": 20}
    choice = chat(nonsense, response_format=form, **fields)
    assert choice["message"]["reasoning_content"]
    assert follows(choice["message"]["content"])


@pytest.mark.parametrize("effort", ["minimal", "low"])
@pytest.mark.parametrize("budget", [{"thinking_budget": 30}, {"thinking": {"type": "enabled", "budget_tokens": 30}}])
def test_a_low_effort_ends_the_reasoning(nonsense, effort, budget):
    body = nonsense.post(
        "/v1/chat/completions",
        json={"messages": USER, **SAMPLING, "reasoning_effort": effort, "max_tokens": 700, **budget},
    ).json()
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 30 + len("\n</think>\n\n")


BAD = {"type": "object", "properties": {"a": {"type": "frob"}}}
BAD_TOOLS = [{"type": "function", "function": {"name": "one", "parameters": BAD}}]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": BAD}}},
            "response_format.json_schema.schema",
        ),
        ("chat/completions", {"response_format": {"type": "json_object", "schema": BAD}}, "response_format.schema"),
        (
            "chat/completions",
            {"response_format": {"type": "json_object", "schema": {"$ref": "#"}}},
            "response_format.schema",
        ),
        ("chat/completions", {"tools": BAD_TOOLS, "tool_choice": "required"}, "tools"),
        ("chat/completions", {"tools": BAD_TOOLS, "response_format": {"type": "json_object"}}, "tools"),
        ("responses", {"text": {"format": {"type": "json_schema", "schema": BAD}}}, "text.format.schema"),
    ],
)
def test_the_field_of_a_schema_that_is_refused(nonsense, path, fields, param):
    response = nonsense.post(f"/v1/{path}", json={"messages": USER, "input": "a", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


BEGUN = {"continue_final_message": True, "messages": [*USER, {"role": "assistant", "content": "Well"}]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is missing; it must be an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema is missing",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "frob"}}}}, "not supported"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "must be an object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}}, "cannot be followed"),
        ({"continue_final_message": True}, "continue_final_message is True; the last of several messages must be text"),
        ({"add_generation_prompt": False}, "it goes with continue_final_message"),
        ({**BEGUN, "response_format": {"type": "json_object"}}, "a reply that has a required form or call cannot"),
        ({**BEGUN, "reasoning_effort": "high"}, "a reply that reasons first cannot continue it"),
        ({"logit_bias": {"-1": 2}}, "must be a token id"),
        ({"tool_choice": "required"}, "tools are: none"),
        ({"tools": OPENAI, "tool_choice": {"type": "function", "function": {"name": "three"}}}, "one, two"),
        ({"tools": OPENAI, "tool_choice": {"type": "hosted_tool"}}, "tool_choice.type"),
        ({"tools": OPENAI, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools is None"),
        (
            {
                "tools": OPENAI,
                "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "three"}]},
            },
            "one, two",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(nonsense, fields, words):
    response = nonsense.post("/v1/chat/completions", json={"messages": USER, **fields})
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


LOOP = {
    "$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"$ref": "#/$defs/x"}},
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/x"}},
    "required": ["a"],
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_leads_to_nothing_is_the_clients_fault(nonsense, stream):
    """References that refer to each other are found only where the reply has come to them."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": LOOP}}
    body = {"messages": USER, **SAMPLING, "response_format": form, "stream": stream}
    response = nonsense.post("/v1/chat/completions", json=body)
    assert response.status_code == (200 if stream else 400)
    assert "the grammar cannot be followed" in response.text
    assert "invalid_request_error" in response.text
    assert "<state>" not in response.text


@pytest.mark.long
def test_a_template_without_tools_calls_as_they_are_spelled_out(client):
    fields = {"messages": USER, "tools": OPENAI, "tool_choice": "required", "temperature": 0}
    [choice] = client.post("/v1/chat/completions", json=fields).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    function = choice["message"]["tool_calls"][0]["function"]
    assert function["name"] in [tool["function"]["name"] for tool in OPENAI]
    assert isinstance(json.loads(function["arguments"]), dict)


def test_the_models_thread_does_not_read_the_vocabulary(model, nonsense, monkeypatch):
    """All replies would wait for it: half a second with 150,000 tokens."""
    read, threads = Tokenizer.token_bytes, Counter()

    def counted(self, id):
        threads[threading.current_thread().name] += 1
        return read(self, id)

    monkeypatch.setattr(Tokenizer, "token_bytes", counted)
    form = {"type": "json_object", "schema": SCHEMA}
    chat(nonsense, response_format=form, chat_template_kwargs={"enable_thinking": True}, max_tokens=20)
    (own,) = [count for name, count in threads.items() if name == f"bimetal {model.path.name}"]
    assert own < model.tokenizer.vocab_size
