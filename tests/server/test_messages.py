"""Anthropic Messages: bodies, the order of a stream, what Claude Code sends, and what the official SDK makes of it."""

import json

import pytest
from wires import named

URL = "/v1/messages"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
USER = [{"role": "user", "content": "Hello?"}]


def ask(client, **fields):
    return client.post(f"{URL}?beta=true", json={"model": "any", "max_tokens": 99, "messages": USER, **fields})


def test_a_reply(scripted):
    scripted.llm.text = f"Hm.</think>Yes.{CALL}"
    body = ask(scripted, tools=[ADD], thinking={"type": "adaptive"}).json()
    assert (body["type"], body["role"], body["stop_reason"]) == ("message", "assistant", "tool_use")
    thought, text, call = body["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "Hm.")
    assert text == {"type": "text", "text": "Yes."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 1})
    assert call["id"].startswith("toolu_")
    usage = body["usage"]
    assert (usage["cache_read_input_tokens"], usage["output_tokens"]) == (3, len(scripted.llm.text))
    count = scripted.post(f"{URL}/count_tokens", json={"model": "any", "messages": USER, "tools": [ADD]}).json()
    assert count["input_tokens"] > 3 + usage["input_tokens"] - 10 > 0


def test_the_order_of_a_stream(scripted):
    scripted.llm.text = f"Hm.</think>Yes.{CALL}"
    found = named(ask(scripted, stream=True, tools=[ADD], thinking={"type": "enabled", "budget_tokens": 1024}))
    names = [name for name, _ in found]
    assert [n for at, n in enumerate(names) if at == 0 or names[at - 1] != n] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_stop") * 3,
        "message_delta",
        "message_stop",
    ]
    starts = [data for name, data in found if name == "content_block_start"]
    assert [(s["index"], s["content_block"]["type"]) for s in starts] == [(0, "thinking"), (1, "text"), (2, "tool_use")]
    deltas = [data["delta"] for name, data in found if name == "content_block_delta"]
    assert "".join(d.get("thinking", "") for d in deltas) == "Hm."
    assert "".join(d.get("text", "") for d in deltas) == "Yes."
    assert "".join(d.get("partial_json", "") for d in deltas) == '{"a": 1}'
    start, end = found[0][1]["message"], found[-2][1]
    assert start["usage"]["input_tokens"] == end["usage"]["input_tokens"] + 3
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_a_whole_reply_has_the_order_of_its_stream(scripted):
    scripted.llm.text, scripted.llm.cut = f"Hm.</think>One.{CALL}Two.{CALL}Three.", 1
    fields = {"tools": [ADD], "thinking": {"type": "adaptive"}}
    content = ask(scripted, **fields).json()["content"]
    assert [block.get("text", block["type"]) for block in content] == [
        "thinking",
        *("One.", "tool_use", "Two.", "tool_use", "Three."),
    ]
    starts = [d for name, d in named(ask(scripted, stream=True, **fields)) if name == "content_block_start"]
    assert [start["content_block"]["type"] for start in starts] == [block["type"] for block in content]


@pytest.mark.parametrize(
    ("finish", "stop", "most", "reason"),
    [
        ("stop", None, 99, "end_turn"),
        ("stop", "END", 99, "stop_sequence"),
        ("length", None, 5, "max_tokens"),
        ("length", None, 99, "model_context_window_exceeded"),
    ],
)
def test_why_a_reply_ends(scripted, finish, stop, most, reason):
    scripted.llm.finish, scripted.llm.stop = finish, stop
    body = ask(scripted, max_tokens=most, stop_sequences=["END"]).json()
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, stop)
    end = named(ask(scripted, max_tokens=most, stream=True))[-2][1]
    assert end["delta"] == {"stop_reason": reason, "stop_sequence": stop}


def test_two_turns_of_claude_code_begin_with_the_same_prompt(scripted):
    """Its billing line, its cache marks and the form of its inline system message differ between turns."""

    def turn(hash, inline, *more):
        mark = {"cache_control": {"type": "ephemeral"}}
        return {
            "system": [
                {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={hash};"},
                {"type": "text", "text": "You are an agent."} | (mark if more else {}),
            ],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"} | mark]},
                {"role": "system", "content": inline},
                *more,
            ],
            "context_management": {"edits": []},
            "metadata": {"user_id": "{}"},
        }

    ask(scripted, **turn("1a", "Be careful."))
    use = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "3"}]}
    more = (
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, {"type": "text", "text": "Go"}]},
    )
    ask(scripted, **turn("2b", [{"type": "text", "text": "Be careful."}], *more))
    first, second = scripted.llm.prompts[-2:]
    assert "billing" not in first
    assert second.startswith(first)
    assert "<|im_start|>tool\n3<|im_end|>\n<|im_start|>user\nGo<|im_end|>" in second


def test_documents_and_search_results_are_text(scripted):
    """Search results were refused, and a document's title and context left out."""
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    found = {"type": "search_result", "source": "https://a.example", "title": "A", "content": parts}
    asked = [
        {"type": "document", "source": {"type": "text", "data": "Three."}, "title": "B", "context": "of 1999"},
        {"type": "document", "source": {"type": "content", "content": parts}, "citations": {"enabled": True}},
        {"type": "document", "source": {"type": "content", "content": "Four."}},
        found,
        {"type": "text", "text": "Which?"},
    ]
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [found]}
    messages = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    assert ask(scripted, messages=messages).status_code == 200
    shown = "A\nhttps://a.example\nOne.\nTwo."
    prompt = scripted.llm.prompts[-1]
    assert f"user\nB\nof 1999\nThree.\nOne.\nTwo.\nFour.\n{shown}\nWhich?<|im_end|>" in prompt
    assert f"tool\n{shown}<|im_end|>" in prompt
    image = {"type": "image", "source": {"type": "url", "url": "https://a.example"}}
    refused = ask(scripted, messages=[{"role": "user", "content": [found | {"content": [image]}]}])
    words = "messages[0].content[0].content[0].type is 'image'; only text is supported"
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, words)


def test_a_late_system_message_joins_its_neighbour_where_the_template_refuses_it(tmp_path):
    from conftest import client_of
    from scripted import TEMPLATE, Scripted

    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning') }}{% endif %}{% endfor %}" + TEMPLATE
    )
    client = client_of(Scripted(tmp_path / "model", strict), "strict")
    late = {"role": "system", "content": "Late."}
    assert ask(client, system="First.", messages=[*USER, late]).status_code == 200
    assert "user\nHello?\n\nLate.<|im_end|>" in client.llm.prompts[-1]


def test_thinking_can_be_left_out(scripted):
    scripted.llm.text = "Hm.</think>Yes."
    omitted = {"type": "adaptive", "display": "omitted"}
    assert [block["type"] for block in ask(scripted, thinking=omitted).json()["content"]] == ["text"]
    starts = [d for n, d in named(ask(scripted, thinking=omitted, stream=True)) if n == "content_block_start"]
    assert [start["content_block"]["type"] for start in starts] == ["text"]
    ask(scripted, thinking={"type": "disabled"}, output_config={"effort": "high"})
    assert "<think>" not in scripted.llm.prompts[-1]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"max_tokens": 0},
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"tools": [{"name": "a"}, {}]},
        {"temperature": "hot"},
    ],
)
def test_wrong_fields_are_refused_in_the_dialects_envelope(scripted, fields):
    response = ask(scripted, **fields)
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert body["request_id"] == response.headers["request-id"]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"system": 5}, "system"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 5}]}]},
            "messages[0].content[0].content",
        ),
    ],
)
def test_what_may_be_text_or_a_list_is_refused_with_both(scripted, fields, name):
    assert ask(scripted, **fields).json()["error"]["message"] == f"{name} is 5; it must be text or a list"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"stop_sequences": "x"},
            "stop_sequences is 'x'; it must be a list of texts, each of at least one character",
        ),
        (
            {"stop_sequences": [""]},
            "stop_sequences is ['']; it must be a list of texts, each of at least one character",
        ),
        ({"thinking": {"type": "foo"}}, "thinking.type is 'foo'; it must be one of enabled, disabled, adaptive"),
        ({"thinking": {}}, "thinking.type is missing; it must be one of enabled, disabled, adaptive"),
    ],
)
def test_what_anthropics_api_does_not_know_is_refused(scripted, fields, words):
    response = ask(scripted, **fields)
    assert (response.status_code, response.json()["error"]["message"]) == (400, words)
    assert ask(scripted, stop_sequences=["x", "y"], thinking={"type": "disabled"}).status_code == 200
    assert ask(scripted, stop_sequences=[], thinking=None).status_code == 200


def test_what_only_anthropics_servers_ran_is_left_out(scripted):
    """A conversation that was begun there goes on here."""
    kinds = ("server_tool_use", "web_fetch_tool_result", "bash_code_execution_tool_result", "mcp_tool_result")
    blocks = [*({"type": kind, "id": "x"} for kind in kinds), {"type": "text", "text": "Done."}]
    prompts = []
    for content in (blocks, "Done."):
        assert ask(scripted, messages=[*USER, {"role": "assistant", "content": content}, *USER]).status_code == 200
        prompts.append(scripted.llm.prompts[-1])
    assert prompts[0] == prompts[1]


BASH = {"command", "restart"}
EDITOR = {"command", "path", "view_range", "file_text", "old_str", "new_str", "insert_line"}


@pytest.mark.parametrize(
    ("kind", "name", "inputs"),
    [
        ("bash_20250124", "bash", BASH),
        ("bash_20241022", "bash", BASH),
        ("text_editor_20250728", "str_replace_based_edit_tool", {*EDITOR, "insert_text"}),
        ("text_editor_20250429", "str_replace_based_edit_tool", EDITOR),
        ("text_editor_20250124", "str_replace_editor", EDITOR),
        ("memory_20250818", "memory", {*EDITOR, "insert_text", "old_path", "new_path"}),
    ],
)
def test_tools_that_the_client_runs_have_their_documented_inputs(scripted, kind, name, inputs):
    """Anthropic's models know these inputs, so that clients send no schema."""
    scripted.llm.text = CALL.replace('"add"', f'"{name}"').replace('{"a": 1}', '{"command": "view", "path": "a"}')
    tool = {"type": kind, "name": name, "max_characters": 10000}
    for choice in ({"type": "auto"}, {"type": "tool", "name": name}):
        content = ask(scripted, tools=[tool], tool_choice=choice).json()["content"]
        assert [(block["type"], block["name"]) for block in content] == [("tool_use", name)]
        assert content[0]["input"] == {"command": "view", "path": "a"}
    [shown] = shown_tools(scripted)
    assert shown["name"] == name
    assert set(shown["parameters"]["properties"]) == inputs
    assert all(one["description"] for one in (shown, *shown["parameters"]["properties"].values()))
    assert set(shown["parameters"]["required"]) <= {"command", "path"}
    commands = shown["parameters"]["properties"]["command"].get("enum", [])
    assert ("undo_edit" in commands) == (kind == "text_editor_20250124")


def shown_tools(client):
    """The functions that the latest prompt shows."""
    text = client.llm.prompts[-1].partition("<|im_end|>\n[")[2]
    return [tool["function"] for tool in json.JSONDecoder().raw_decode(f"[{text}")[0]]


def test_tools_that_the_client_does_not_run_are_left_out(scripted):
    """A tool of another type went missing without a word."""
    kinds = ("web_search_20250305", "code_execution_20250825", "computer_20250124", "tool_search_tool_bm25")
    hosted = [{"type": kind, "name": "x"} for kind in kinds]
    ask(scripted, tools=[ADD, *hosted])
    assert [tool["name"] for tool in shown_tools(scripted)] == ["add"]
    for kind in ("shell_20300101", "bash_new", "bash", "browser_toolset_20260801"):
        response = ask(scripted, tools=[ADD, {"type": kind, "name": "x"}])
        words = "supported are custom and, with a date, bash, text_editor, memory"
        assert (response.status_code, response.json()["error"]["message"]) == (
            400,
            f"tools[1].type is {kind!r}; {words}",
        )
    error = ask(scripted, tools=[{"type": "bash_20250124"}]).json()["error"]
    assert error["message"] == "tools[0].name is missing; it must be text"


@pytest.mark.parametrize("path", [URL, f"{URL}/count_tokens"])
def test_what_only_anthropics_servers_run_is_refused(scripted, path):
    """A reply without the tools of a server, or the files of a container, would answer another question."""

    def said(**fields):
        response = scripted.post(path, json={"model": "any", "max_tokens": 9, "messages": USER, **fields})
        return response.status_code, response.json().get("error", {}).get("message", "")

    server = {"authorization_token": "sk-secret", "type": "url", "url": "https://example.com", "name": "files"}
    status, message = said(mcp_servers=[server])
    assert (status, message.partition(";")[0]) == (400, "mcp_servers has 1 entry")
    assert "secret" not in message
    assert said(mcp_servers=5) == (400, "mcp_servers is 5; it must be a list")
    for container in ("container_1", {"id": "container_1"}, {"skills": [{"skill_id": "pdf"}]}):
        status, message = said(container=container)
        assert (status, message) == (400, f"container is {container!r}; no code is run here; leave it out")
    for nothing in ({"mcp_servers": []}, {"mcp_servers": None, "container": None}, {"container": {}}):
        assert said(**nothing)[0] == 200


def test_an_error_within_a_stream_is_an_event(scripted):
    scripted.llm.error = RuntimeError("secret")
    response = ask(scripted, stream=True)
    name, data = named(response)[-1]
    assert (name, data["error"]["type"]) == ("error", "api_error")
    assert data["request_id"] == response.headers["request-id"]


def test_the_sdk_reads_replies_and_streams(scripted):
    anthropic = pytest.importorskip("anthropic")
    scripted.llm.text = f"Hm.</think>Yes.{CALL}"
    sdk = anthropic.Anthropic(base_url="http://localhost", api_key="none", http_client=scripted, max_retries=0)
    fields = {"model": "any", "messages": USER, "max_tokens": 99, "tools": [ADD], "thinking": {"type": "adaptive"}}
    whole = sdk.messages.create(**fields)
    with sdk.messages.stream(**fields) as stream:
        final = stream.get_final_message()
    for reply in (whole, final):
        assert [block.type for block in reply.content] == ["thinking", "text", "tool_use"]
        assert (reply.content[1].text, reply.content[2].input, reply.stop_reason) == ("Yes.", {"a": 1}, "tool_use")
    assert sdk.messages.count_tokens(model="any", messages=USER).input_tokens > 0
    assert [model.id for model in sdk.models.list()] == ["scripted"]
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        sdk.messages.create(**fields | {"max_tokens": 0})
