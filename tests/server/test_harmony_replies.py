"""Replies of gpt-oss through every dialect: reasoning, calls, efforts, and constraints on the right message."""

import json

import pytest
from conftest import client_of
from scripted import Scripted
from tiny_chat import write as write_model
from tool_texts import HARMONY_TEMPLATE, HARMONY_TOKENS, TOOLS, harmony
from wires import named, ndjson, sse

import generate
from common.guide import AfterReasoning
from common.harmony import reasoning_tags

TEMPLATE = HARMONY_TEMPLATE + "{{ '' if reasoning_effort is not defined else reasoning_effort }}"
START = "<|start|>assistant"
ANALYSIS, FINAL = (f"<|channel|>{name}<|message|>" for name in ("analysis", "final"))
ANSWERED = f"{ANALYSIS}They greet.<|end|>{START}{FINAL}Hi!"
CALLED = (
    f"{ANALYSIS}The time.<|end|>{START}<|channel|>commentary<|message|>Let me look.<|end|>{START}{harmony('now', {})}"
)
USER = [{"role": "user", "content": "Hello?"}]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["noun", "verb"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
STRICT = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("one", "two")]
FORM = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
BUDGET = {"thinking_budget": 20, "temperature": 1.0, "seed": 3}


@pytest.fixture
def harmonious(tmp_path):
    """A client of a scripted model, which is its `llm`."""
    return client_of(Scripted(tmp_path / "model", TEMPLATE, control=HARMONY_TOKENS), "scripted")


@pytest.fixture(scope="module")
def nonsense(tmp_path_factory):
    """A client of a model with random weights."""
    pytest.importorskip("llguidance", reason="the grammar extra is not installed")
    folder = write_model(tmp_path_factory.mktemp("model"), template=TEMPLATE, control=HARMONY_TOKENS)
    with generate.load(folder, backend="numpy", ctx=2048) as llm:
        yield client_of(llm, "nonsense")


def chat(client, **fields):
    response = client.post("/v1/chat/completions", json={"messages": USER, **fields})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def test_chat_completions(harmonious):
    harmonious.llm.text = ANSWERED
    message = chat(harmonious)["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hi!", "They greet.")
    events = sse(harmonious.post("/v1/chat/completions", json={"messages": USER, "stream": True}))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == "Hi!"
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "They greet."


def test_calls_of_chat_completions_and_their_results(harmonious):
    harmonious.llm.text = CALLED
    choice = chat(harmonious, tools=TOOLS)
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("Let me look.", "The time.")
    [call] = message["tool_calls"]
    assert (call["function"], choice["finish_reason"]) == ({"name": "now", "arguments": "{}"}, "tool_calls")
    harmonious.llm.text = ANSWERED
    result = {"role": "tool", "tool_call_id": call["id"], "content": "10:15"}
    chat(harmonious, tools=TOOLS, messages=[*USER, message, result])
    assert harmonious.llm.prompts[-1].endswith(
        f"{START}{ANALYSIS}The time.\n\nLet me look.<|end|>{START} to=functions.now<|channel|>commentary json"
        f"<|message|>{{}}<|call|><|start|>functions.now to=assistant<|channel|>commentary<|message|>10:15<|end|>{START}"
    )


def test_the_other_dialects(harmonious):
    harmonious.llm.text = CALLED
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = harmonious.post("/v1/responses", json={"input": "Hello?", "tools": tools}).json()
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call"]
    names = [name for name, _ in named(harmonious.post("/v1/responses", json={"input": "Hello?", "stream": True}))]
    assert "response.completed" in names
    tools = [{"name": tool["function"]["name"], "input_schema": {"type": "object"}} for tool in TOOLS]
    fields = {"max_tokens": 99, "messages": USER, "tools": tools, "thinking": {"type": "enabled", "budget_tokens": 50}}
    body = harmonious.post("/v1/messages", json=fields).json()
    assert [block["type"] for block in body["content"]] == ["thinking", "text", "tool_use"]
    lines = ndjson(harmonious.post("/api/chat", json={"model": "m", "messages": USER, "tools": TOOLS}))
    assert "".join(line["message"].get("thinking", "") for line in lines) == "The time."
    assert "".join(line["message"]["content"] for line in lines) == "Let me look."
    assert sum(len(line["message"].get("tool_calls", ())) for line in lines) == 1


@pytest.mark.parametrize(
    ("effort", "told"), [("low", "low"), ("high", "high"), ("minimal", "low"), ("none", "low"), ("xhigh", "high")]
)
def test_the_template_gets_an_effort_that_the_model_knows(harmonious, effort, told):
    chat(harmonious, reasoning_effort=effort)
    assert harmonious.llm.prompts[-1].endswith(f"{START}{told}")
    assert "guide" not in harmonious.llm.options[-1]  # an effort that the model is told has no budget
    harmonious.post("/v1/responses", json={"input": "Hello?", "reasoning": {"effort": effort}})
    harmonious.post("/api/chat", json={"model": "m", "messages": USER, "think": effort})
    assert all(prompt.endswith(told) for prompt in harmonious.llm.prompts)


def test_a_late_system_message_that_the_template_leaves_out_is_shown(harmonious):
    messages = [*USER, {"role": "assistant", "content": "Hi!"}, *USER, {"role": "system", "content": "In French."}]
    chat(harmonious, messages=messages)
    assert "Hello?\n\nIn French." in harmonious.llm.prompts[-1]


def test_a_reply_that_goes_on_is_the_answer(harmonious):
    harmonious.llm.text, seen = " is well.", []
    harmonious.llm.write = lambda prompt: seen.append(prompt) or harmonious.llm.text
    message = chat(harmonious, messages=[*USER, {"role": "assistant", "content": "All"}], continue_final_message=True)
    assert message["message"]["content"] == " is well."
    assert seen[0].endswith(f"{START}{FINAL}All")


def follows(text):
    value = json.loads(text)
    return value.keys() == SCHEMA["properties"].keys() and value["kind"] in ("noun", "verb")


def test_a_schema_holds_for_the_answer(nonsense):
    message = chat(nonsense, **FORM, **BUDGET)["message"]
    assert follows(message["content"])
    assert message["reasoning_content"]


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_choice": ["ja", "nein"]},
        {"grammar": 'root ::= start\nstart ::= "ja"'},
        {"guided_grammar": '%llguidance {}\nstart: "ja" | "nein"'},
    ],
)
def test_a_grammar_holds_for_the_answer(nonsense, fields):
    message = chat(nonsense, **fields, **BUDGET)["message"]
    assert message["content"] in ("ja", "nein")
    assert message["reasoning_content"]


def test_a_call_is_required_and_follows_the_reasoning(nonsense):
    choice = chat(nonsense, tools=STRICT, tool_choice="required", **BUDGET)
    [call] = choice["message"]["tool_calls"]
    assert follows(call["function"]["arguments"])
    assert choice["message"]["reasoning_content"]
    chosen = {"type": "function", "function": {"name": "two"}}
    [call] = chat(nonsense, tools=STRICT, tool_choice=chosen, **BUDGET)["message"]["tool_calls"]
    assert call["function"]["name"] == "two"


def test_tools_beside_a_schema(nonsense):
    for seed in range(4):
        message = chat(nonsense, tools=STRICT, **FORM, **BUDGET | {"seed": seed})["message"]
        texts = [call["function"]["arguments"] for call in message.get("tool_calls", ())] or [message["content"]]
        assert all(follows(text) for text in texts)


def test_a_budget_ends_the_reasoning_of_a_free_reply(nonsense):
    tokenizer = nonsense.llm.tokenizer
    for calls, after in ((False, f"<|end|>{START}{FINAL}"), (True, f"<|end|>{START}")):
        tags = reasoning_tags(False, calls)
        guide = AfterReasoning(tokenizer, nonsense.llm.vocab_size, tags, False, None, 3, {})
        for token in tokenizer.encode(f"{ANALYSIS}abc", False):
            assert guide.allowed() is None
            guide.accept(token)
        for token in tokenizer.encode(after, False):
            assert guide.allowed().nonzero()[0].tolist() == [token]
            guide.accept(token)
        assert guide.allowed() is None


def test_a_reply_to_plain_text_has_no_channels(nonsense):
    """What a grammar of Completions describes is the reply itself."""
    fields = {"prompt": "Hello?", "guided_choice": ["ja", "nein"], "temperature": 1.0, "seed": 3}
    assert nonsense.post("/v1/completions", json=fields).json()["choices"][0]["text"] in ("ja", "nein")
    body = nonsense.post("/completion", json={"prompt": "Hello?", "grammar": 'root ::= "ja"'}).json()
    assert body["content"] == "ja"


def test_the_command_line_names_what_keeps_a_form(tmp_path, capsys):
    from generate.__main__ import main

    folder = write_model(tmp_path / "model", template=TEMPLATE, control=HARMONY_TOKENS)
    assert main(["--model", str(folder), "--prompt", "a", "--json-schema", "{}", "--backend", "numpy"]) == 2
    assert "send the request to a server, where it holds for the answer" in capsys.readouterr().err
