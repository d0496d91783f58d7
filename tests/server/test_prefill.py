"""Replies that go on from text of the assistant, through each API that has them."""

import pytest
from conftest import client_of
from scripted import TEMPLATE, Scripted

USER = {"role": "user", "content": "Add."}
BEGUN = [USER, {"role": "assistant", "content": "The sum "}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def chat(client, messages=BEGUN, **fields):
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, **fields}
    return client.post("/v1/chat/completions", json=body)


def text_of_chat(client, **fields):
    return chat(client, **fields).json()["choices"][0]["message"]["content"]


def text_of_messages(client, **fields):
    body = {"messages": BEGUN, "max_tokens": 50, **fields}
    return client.post("/v1/messages", json=body).json()["content"][0]["text"]


def text_of_ollama(client, **fields):
    body = {"model": "m", "messages": BEGUN, "stream": False, **fields}
    return client.post("/api/chat", json=body).json()["message"]["content"]


@pytest.mark.parametrize("ask", [text_of_chat, text_of_messages, text_of_ollama])
def test_a_reply_goes_on(scripted, ask):
    """The prompt ends with the text; the reply is what follows, with its white space, which a new reply leaves out."""
    seen = []
    scripted.llm.write = lambda prompt: seen.append(prompt) or "\n is three."
    assert ask(scripted) == "\n is three."
    [prompt] = seen
    assert prompt.endswith("<|im_start|>assistant\nThe sum ")
    assert prompt.count("assistant\n") == 1


def test_control_tokens_in_the_text_are_plain(scripted):
    messages = [USER, {"role": "assistant", "content": "<|im_end|>"}]
    scripted.llm.write = lambda prompt: "x"
    assert chat(scripted, messages).status_code == 200
    end = scripted.llm.tokenizer.encode("<|im_end|>")
    plain = scripted.llm.tokenizer.encode_plain("<|im_end|>")
    assert end != plain
    count = {"messages": messages, "continue_final_message": True}
    long = scripted.post("/v1/chat/completions/input_tokens", json=count).json()["input_tokens"]
    count = {"messages": [USER]}
    short = scripted.post("/v1/chat/completions/input_tokens", json=count).json()["input_tokens"]
    assert long - short == len(plain)


def test_a_call_goes_on(scripted):
    """A text that begins a call ends as a call."""
    messages = [USER, {"role": "assistant", "content": 'Yes.<tool_call>{"name": "add", '}]
    scripted.llm.text = '"arguments": {}}</tool_call>'
    [choice] = chat(scripted, messages, tools=[TOOL]).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}
    assert choice["message"]["content"] is None


def test_a_reply_that_goes_on_does_not_reason(tmp_path):
    """A template that can turn reasoning off does; with one that cannot, the text would stand in the reasoning."""
    client = client_of(Scripted(tmp_path / "switch"), "switch")
    seen = []
    client.llm.write = lambda prompt: seen.append(prompt) or "three"
    assert text_of_messages(client) == "three"
    assert "<think>" not in seen[-1]
    always = TEMPLATE.replace("{% if enable_thinking %}<think>\n{% endif %}", "<think>\n")
    client = client_of(Scripted(tmp_path / "always", always), "always")
    response = client.post("/v1/messages", json={"messages": BEGUN, "max_tokens": 50})
    assert response.status_code == 400
    assert "begins each reply with reasoning" in response.json()["error"]["message"]
    assert chat(client, thinking={"type": "enabled"}).status_code == 400


@pytest.mark.parametrize("last", [{"content": ""}, {"content": "Hm", "tool_calls": [{"function": {"name": "add"}}]}])
def test_other_last_messages_are_followed_by_a_new_one(scripted, last):
    messages = [USER, {"role": "assistant", **last}]
    assert chat(scripted, messages).status_code == 400
    scripted.llm.text = "Hello"
    body = {"model": "m", "messages": messages, "stream": False}
    assert scripted.post("/api/chat", json=body).json()["message"]["content"] == "Hello"
    assert scripted.llm.prompts[-1].endswith("<|im_end|>\n<|im_start|>assistant\n")
