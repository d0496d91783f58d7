"""Responses: objects, the order of a stream's events, conversations that go on, and what the official SDK needs."""

import json
import threading

import pytest
from conftest import client_of
from wires import named

URL = "/v1/responses"
CALL = '<tool_call>\n{"name": "NAME", "arguments": {"a": 1}}\n</tool_call>'
ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
USER = [{"role": "user", "content": "Hello?"}]


def ask(client, **fields):
    return client.post(URL, json={"input": "Hello?", **fields})


def test_a_response(scripted):
    body = ask(scripted, metadata={"a": "b"}, instructions="Be brief.", max_output_tokens=99).json()
    assert (body["object"], body["status"], body["model"], body["error"]) == ("response", "completed", "scripted", None)
    [item] = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"][0] | {"logprobs": []} == {
        "type": "output_text",
        "text": "Hello",
        "annotations": [],
        "logprobs": [],
    }
    assert (body["metadata"], body["instructions"], body["max_output_tokens"]) == ({"a": "b"}, "Be brief.", 99)
    usage = body["usage"]
    assert (usage["output_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (5, 3)
    assert usage["total_tokens"] == usage["input_tokens"] + 5
    assert scripted.llm.prompts[-1].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello?")


def test_the_order_of_a_stream(scripted):
    scripted.llm.text = "Hm.</think>" + "Yes." + CALL.replace("NAME", "add")
    found = named(ask(scripted, stream=True, tools=[ADD], reasoning={"effort": "low", "summary": "auto"}))
    names = [name for name, _ in found]
    assert [n for at, n in enumerate(names) if at == 0 or names[at - 1] != n] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    done = [data["item"] for name, data in found if name == "response.output_item.done"]
    final = found[-1][1]["response"]
    assert final["output"] == done
    assert final["id"] == found[0][1]["response"]["id"]
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]
    assert done[0]["summary"] == [{"type": "summary_text", "text": "Hm."}]
    assert (done[2]["name"], done[2]["arguments"]) == ("add", '{"a": 1}')
    for name, data in found:
        if "item_id" in data:
            assert data["item_id"] == done[data["output_index"]]["id"], name


def test_log_probabilities_are_those_of_the_text(scripted):
    scripted.llm.text, scripted.llm.cut = "Hm.\n</think>Yes." + CALL.replace("NAME", "add"), 1
    fields = {"tools": [ADD], "reasoning": {"effort": "low"}, "top_logprobs": 1}
    found = named(ask(scripted, stream=True, **fields))
    deltas = [one for name, data in found if name.endswith("output_text.delta") for one in data["logprobs"]]
    for output in (ask(scripted, **fields).json()["output"], found[-1][1]["response"]["output"]):
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
        [part] = output[1]["content"]
        assert part["logprobs"] == deltas
        assert "".join(one["token"] for one in deltas) == part["text"] == "Yes."


def test_a_whole_reply_has_the_order_of_its_stream(scripted):
    call = CALL.replace("NAME", "add")
    scripted.llm.text, scripted.llm.cut = f"Hm.</think>One.{call}Two.{call}Three.", 1
    fields = {"tools": [ADD], "reasoning": {"effort": "low"}}
    whole = ask(scripted, **fields).json()["output"]
    streamed = named(ask(scripted, stream=True, **fields))[-1][1]["response"]["output"]
    for output in (whole, streamed):
        shown = [item["content"][0]["text"] if item["type"] == "message" else item["type"] for item in output]
        assert shown == ["reasoning", "One.", "function_call", "Two.", "function_call", "Three."]


def test_reasoning_is_sent_raw_without_a_summary(scripted):
    scripted.llm.text = "Hm.</think>Yes."
    found = named(ask(scripted, stream=True, reasoning={"effort": "low"}))
    text = "".join(data["delta"] for name, data in found if name == "response.reasoning_text.delta")
    assert text == "Hm."
    assert found[-1][1]["response"]["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]


def test_namespaces_and_custom_tools(scripted):
    tools = [
        {"type": "namespace", "name": "agents", "tools": [{**ADD, "name": "spawn"}]},
        {"type": "custom", "name": "patch", "format": {"type": "text"}},
        {"type": "web_search"},
    ]
    scripted.llm.text = CALL.replace("NAME", "agents.spawn") + CALL.replace("NAME", "patch").replace(
        '"a": 1', '"input": "x"'
    )
    first, second = ask(scripted, tools=tools).json()["output"]
    assert (first["type"], first["name"], first["namespace"]) == ("function_call", "spawn", "agents")
    assert (second["type"], second["name"], second["input"]) == ("custom_tool_call", "patch", "x")
    names = [name for name, _ in named(ask(scripted, tools=tools, stream=True))]
    assert "response.custom_tool_call_input.done" in names
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "Go"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Ok"}]},
        *({k: v for k, v in item.items() if k != "status"} for item in (first, second)),
        {"type": "function_call_output", "call_id": first["call_id"], "output": "1"},
        {
            "type": "custom_tool_call_output",
            "call_id": second["call_id"],
            "output": [{"type": "input_text", "text": "2"}],
        },
        {"type": "web_search_call"},
    ]
    assert ask(scripted, tools=tools, input=history).status_code == 200
    prompt = scripted.llm.prompts[-1]
    assert '"agents.spawn"' in prompt
    assert prompt.count("<|im_start|>assistant") == 2
    assert "<|im_start|>tool\n1<|im_end|>\n<|im_start|>tool\n2<|im_end|>" in prompt


def shown_tools(client):
    """The functions that the latest prompt shows, by name."""
    text = client.llm.prompts[-1].partition('[{"type": "function"')
    found = json.JSONDecoder().raw_decode("".join(text[1:]))[0]
    return {tool["function"]["name"]: tool["function"] for tool in found}


def test_tools_among_the_items_of_a_conversation(scripted):
    """Codex sends all its tools so to some models: as an item, in a namespace that stands for none."""
    held = [
        {"type": "namespace", "name": "functions", "description": "x", "tools": [{**ADD, "description": "Adds."}]},
        {"type": "namespace", "name": "agents", "tools": [{**ADD, "name": "spawn"}]},
        {"type": "web_search"},
    ]
    items = [{"type": "additional_tools", "role": "developer", "tools": held}, *USER]
    scripted.llm.text = CALL.replace("NAME", "add") + CALL.replace("NAME", "agents.spawn")
    for fields in ({"input": items}, {"input": items, "tools": [ADD], "tool_choice": "required"}):
        output = ask(scripted, **fields).json()["output"]
        assert [(item["name"], item.get("namespace")) for item in output] == [("add", None), ("spawn", "agents")]
        assert list(shown_tools(scripted)) == ["add", "agents.spawn"]
        assert shown_tools(scripted)["add"]["description"] == "Adds."
    call = {"type": "function_call", "name": "add", "namespace": "functions", "call_id": "c", "arguments": "{}"}
    ask(scripted, input=[*items, call])
    assert '{"name": "add", "arguments": ' in scripted.llm.prompts[-1]
    for wrong, param in (({"tools": 5}, "input[0].tools"), ({"tools": [{}]}, "input[0].tools[0].type")):
        error = ask(scripted, input=[items[0] | wrong, *USER]).json()["error"]
        assert error["param"] == param


def test_the_grammar_of_a_custom_tool_is_shown(scripted):
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "patch"'}
    tools = [
        {"type": "custom", "name": "apply_patch", "format": grammar},
        {"type": "custom", "name": "note", "format": {"type": "text"}},
    ]
    ask(scripted, tools=tools)
    shown = {name: tool["parameters"]["properties"]["input"] for name, tool in shown_tools(scripted).items()}
    words = 'Text of this lark grammar:\nstart: "patch"'
    assert shown == {"apply_patch": {"type": "string", "description": words}, "note": {"type": "string"}}
    error = ask(scripted, tools=[{"type": "custom", "name": "a", "format": {"type": "grammar"}}]).json()["error"]
    assert error["message"] == "tools[0].format.syntax is missing; it must be text"


def test_the_client_searches_its_tools(scripted):
    """Codex keeps some functions back, and gives those that the model finds by a search."""
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}}
    search = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": parameters}
    scripted.llm.text = CALL.replace("NAME", "tool_search").replace('"a": 1', '"query": "sum"')
    whole, *streamed = outputs(scripted, tools=[search])
    assert streamed == [whole, whole]
    call = {"type": "tool_search_call", "status": "completed", "execution": "client", "arguments": {"query": "sum"}}
    assert whole == [call]
    assert shown_tools(scripted)["tool_search"]["parameters"] == parameters
    [item] = ask(scripted, tools=[search]).json()["output"]
    loaded = [ADD, {"type": "namespace", "name": "mail", "tools": [{**ADD, "name": "send"}]}]
    answer = {"type": "tool_search_output", "call_id": item["call_id"], "execution": "client", "tools": loaded}
    scripted.llm.text = CALL.replace("NAME", "mail.send")
    [found] = ask(scripted, tools=[search], input=[*USER, item, answer]).json()["output"]
    assert (found["type"], found["name"], found["namespace"]) == ("function_call", "send", "mail")
    assert list(shown_tools(scripted)) == ["tool_search", "add", "mail.send"]
    assert '"query": "sum"' in scripted.llm.prompts[-1]
    assert '<|im_start|>tool\n["add", "mail.send"]<|im_end|>' in scripted.llm.prompts[-1]


def test_tools_that_a_request_cannot_have(scripted):
    """Those of OpenAI's servers are left out; those of the client are refused, which would miss their calls."""
    hosted = ("web_search", "web_search_preview_2025_03_11", "file_search", "mcp", "image_generation", "tool_search")
    ask(scripted, tools=[ADD, *({"type": kind} for kind in hosted)])
    assert list(shown_tools(scripted)) == ["add"]
    words = "it is not supported; give a tool that the client runs as a function or a custom tool"
    for kind in ("local_shell", "shell", "apply_patch", "computer_use_preview", "foo"):
        response = ask(scripted, tools=[ADD, {"type": kind}])
        assert response.status_code == 400
        assert response.json()["error"]["message"] == f"tools[1].type is {kind!r}; {words}"


def test_a_conversation_goes_on_from_a_response(scripted):
    first = ask(scripted).json()
    second = ask(scripted, input="More.", previous_response_id=first["id"]).json()
    assert scripted.llm.prompts[-1] == (
        "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nMore.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert scripted.get(f"{URL}/{second['id']}").json() == second
    refused = scripted.get(f"{URL}/{second['id']}?stream=true")  # a client read the object as a stream without events
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
    assert scripted.delete(f"{URL}/{second['id']}").json()["deleted"] is True
    for id in (second["id"], ask(scripted, store=False).json()["id"]):
        response = ask(scripted, previous_response_id=id)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "previous_response_not_found")


def test_tokens_of_a_conversation_that_goes_on_are_counted(scripted):
    first = ask(scripted).json()
    more = {"input": "And now?", "previous_response_id": first["id"]}
    counted = scripted.post(f"{URL}/input_tokens", json=more).json()
    assert counted["input_tokens"] == ask(scripted, **more).json()["usage"]["input_tokens"]
    assert counted["input_tokens"] > first["usage"]["input_tokens"] + len("And now?")


def test_items_can_be_named_by_their_ids(scripted):
    """The AI SDK sends the ids of what a stored response holds, and not the items."""
    scripted.llm.text = "Hm.</think>" + "Yes." + CALL.replace("NAME", "add")
    user = {"role": "user", "content": "Hello?"}
    first = ask(scripted, input=[user], tools=[ADD], reasoning={"effort": "low"}).json()
    items = first["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    result = {"type": "function_call_output", "call_id": items[2]["call_id"], "output": "2"}
    named = [{"type": "item_reference", "id": item["id"]} for item in items]
    prompts = []
    for sent in (items, named):
        response = ask(scripted, input=[user, *sent, result], tools=[ADD])
        assert response.status_code == 200
        prompts.append(scripted.llm.prompts[-1])
    assert prompts[0] == prompts[1]
    assert "Yes." in prompts[0]
    assert scripted.delete(f"{URL}/{first['id']}").status_code == 200
    error = ask(scripted, input=[user, *named, result]).json()["error"]
    assert error["message"] == (
        f"input[1].id is {items[0]['id']!r}; no response that is kept has this item; send the item itself"
    )


def test_a_response_that_is_not_stored(scripted):
    for method in ("GET", "DELETE"):
        response = scripted.request(method, f"{URL}/resp_unknown")
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, None, None)
        assert error["message"].startswith("response 'resp_unknown' is not found")
    error = ask(scripted, previous_response_id="resp_unknown").json()["error"]
    assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")
    assert error["message"].startswith("previous response 'resp_unknown' is not found")


def test_entries_of_a_request_are_repeated_with_their_defaults(scripted):
    body = ask(
        scripted, text={"verbosity": "low", "format": None}, reasoning={"effort": "low"}, metadata={"a": "b"}
    ).json()
    assert body["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert body["reasoning"] == {"effort": "low", "summary": None}
    assert body["metadata"] == {"a": "b"}


def outputs(client, **fields):
    """The output of a whole reply, of a stream's last event, and of its finished items, without ids."""
    events = named(ask(client, stream=True, **fields))
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    found = ask(client, **fields).json()["output"], events[-1][1]["response"]["output"], done
    return [[{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in output] for output in found]


@pytest.mark.parametrize("text", ["", "Hm.</think>"])
def test_an_empty_reply_is_an_empty_message(scripted, text):
    scripted.llm.text = text
    whole, *streamed = outputs(scripted, **({"reasoning": {"effort": "low"}} if text else {}))
    assert streamed == [whole, whole]
    assert [item["type"] for item in whole] == ["reasoning", "message"][not text :]
    assert (whole[-1]["content"][0]["text"], whole[-1]["status"]) == ("", "completed")


@pytest.mark.parametrize("most", [{"max_output_tokens": 9}, {}])
@pytest.mark.parametrize(
    ("text", "kinds", "last"),
    [
        ("Hm.", ["reasoning"], "incomplete"),
        ("Hm.</think>Ye", ["reasoning", "message"], "incomplete"),
        ("Hm.</think>" + CALL.replace("NAME", "add"), ["reasoning", "function_call"], "completed"),
    ],
)
def test_the_item_that_was_cut_is_incomplete(scripted, most, text, kinds, last):
    scripted.llm.text, scripted.llm.finish = text, "length"
    whole, *streamed = outputs(scripted, tools=[ADD], reasoning={"effort": "low"}, **most)
    assert streamed == [whole, whole]
    assert [item["type"] for item in whole] == kinds
    assert [item["status"] for item in whole] == ["completed"] * (len(kinds) - 1) + [last]


def test_the_store_serves_threads():
    """A response is not dropped between the steps of a look-up, which another thread does."""
    pytest.importorskip("starlette", reason="the server extra is not installed")
    from generate.server.store import Store, Stored

    store, stored, hashed, dropping = Store(), Stored({}, [], 10), [], []

    class Id(str):
        __slots__ = ()

        def __hash__(self):
            hashed.append(self)
            if len(hashed) == 2:  # it has been found
                dropping.append(threading.Thread(target=store.delete, args=("a",)))
                dropping[0].start()
                dropping[0].join(0.2)
            return str.__hash__(self)

    store.put("a", stored)
    assert store.get(Id("a")) is stored
    dropping[0].join(10)
    assert (len(store), store._bytes) == (0, 0)


def test_the_store_is_bounded_in_number_and_bytes():
    pytest.importorskip("starlette", reason="the server extra is not installed")
    from generate.server.errors import ApiError
    from generate.server.store import Store, Stored

    store = Store(max_responses=3, max_bytes=100)
    for at in range(5):
        store.put(str(at), Stored({}, [], 10))
    assert len(store) == 3
    store.put("large", Stored({}, [], 85))
    assert len(store) == 2
    store.put("too large", Stored({}, [], 101))
    assert len(store) == 0
    with pytest.raises(ApiError, match="is not found"):
        store.get("large")


@pytest.mark.parametrize(
    ("fields", "status", "event"),
    [
        ({"max_output_tokens": 5}, "incomplete", "response.incomplete"),
        ({}, "incomplete", "response.failed"),
    ],
)
def test_a_reply_that_was_cut(scripted, fields, status, event):
    """An agent that set no cap has filled its context, and compacts it when it is told so."""
    scripted.llm.finish = "length"
    body = ask(scripted, **fields).json()
    assert (body["status"], body["incomplete_details"]) == (status, {"reason": "max_output_tokens"})
    name, data = named(ask(scripted, stream=True, **fields))[-1]
    assert name == event
    if event == "response.failed":
        assert data["response"]["error"]["code"] == "context_length_exceeded"


def test_a_reply_that_the_server_cut(scripted):
    """Its limit is no sign of a full context."""
    scripted.llm.finish = "length"
    client = client_of(scripted.llm, "scripted", options={"max_tokens": 5})
    assert named(ask(client, stream=True))[-1][0] == "response.incomplete"
    assert named(ask(client, stream=True, max_output_tokens=-1))[-1][0] == "response.failed"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"name": "add", "parameters": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"name": "b"}]}]}, "tools[0].tools[0].type"),
        ({"metadata": 3}, "metadata"),
    ],
)
def test_wrong_fields_are_refused_by_name(scripted, fields, param):
    response = ask(scripted, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_items_of_an_unknown_type_are_refused(scripted):
    for items, at in (([{"type": "foo"}], 0), ([USER[0], {"type": "compaction_trigger"}], 1)):
        response = ask(scripted, input=items)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, f"input[{at}].type")
        assert error["message"] == (
            f"input[{at}].type is {items[at]['type']!r}; supported are message, reasoning, function_call, "
            "function_call_output, custom_tool_call, custom_tool_call_output, agent_message, additional_tools, "
            "tool_search_call, tool_search_output, local_shell_call, local_shell_call_output, shell_call, "
            "shell_call_output, apply_patch_call, apply_patch_call_output"
        )


def test_a_message_of_another_agent_is_read(scripted):
    """Codex gives an agent its task so, where it runs several."""
    task = {"type": "agent_message", "author": "/root", "recipient": "/root/a"}
    given = [{"type": "input_text", "text": "Count"}, {"type": "input_text", "text": "files."}]
    secret = {"type": "encrypted_content", "encrypted_content": "x"}
    items = [task | {"content": [secret]}, task | {"content": [given[0], secret, given[1]]}]
    assert ask(scripted, input=items).status_code == 200
    assert scripted.llm.prompts[-1].startswith("<|im_start|>user\nCount\nfiles.<|im_end|>")
    image = ask(scripted, input=[task | {"content": [{"type": "input_image", "image_url": "x"}]}])
    assert image.json()["error"]["param"] == "input[0].content[0].type"


def test_items_that_only_other_servers_read_are_left_out(scripted):
    """A conversation that was begun at OpenAI goes on here: what its servers ran or encrypted is in it."""
    ask(scripted, input=USER)
    kinds = ("web_search_call", "computer_call", "mcp_call", "compaction", "ghost_snapshot", "tool_search_output")
    items = [{"type": kind, "id": "x", "encrypted_content": "x", "status": "completed"} for kind in kinds]
    assert ask(scripted, input=[*items, *USER]).status_code == 200
    assert scripted.llm.prompts[-1] == scripted.llm.prompts[-2]


RAN = [{"stdout": "a.py", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]


@pytest.mark.parametrize(
    ("name", "entry", "arguments", "output", "text"),
    [
        ("local_shell", "action", {"command": ["ls"]}, {"output": "a.py"}, "a.py"),
        ("shell", "action", {"commands": ["ls"]}, {"output": RAN}, json.dumps(RAN)),
        ("apply_patch", "operation", {"type": "delete_file", "path": "a.py"}, {"status": "failed"}, "failed"),
    ],
)
def test_commands_and_patches_of_a_conversation_are_read(scripted, name, entry, arguments, output, text):
    """A model did not know what had been done in a conversation that was begun at OpenAI."""
    call = {"type": f"{name}_call", "call_id": "1", entry: arguments}
    assert ask(scripted, input=[*USER, call, {"type": f"{name}_call_output", "call_id": "1", **output}]).is_success
    called = json.dumps({"name": name, "arguments": arguments})
    shown = f"<|im_start|>assistant\n<tool_call>{called}</tool_call><|im_end|>\n<|im_start|>tool\n{text}<|im_end|>"
    assert shown in scripted.llm.prompts[-1]
    error = ask(scripted, input=[{**call, entry: "ls"}]).json()["error"]
    assert error["message"] == f"input[0].{entry} is 'ls'; it must be an object"


@pytest.mark.parametrize(
    ("items", "name"),
    [
        (5, "input"),
        ([{"role": "user", "content": 5}], "input[0].content"),
        ([{"type": "function_call_output", "call_id": "c", "output": 5}], "input[0].output"),
    ],
)
def test_what_may_be_text_or_a_list_is_refused_with_both(scripted, items, name):
    error = ask(scripted, input=items).json()["error"]
    assert (error["message"], error["param"]) == (f"{name} is 5; it must be text or a list", name)


def test_a_request_without_input(scripted):
    """Its reply was one to an empty message of the user."""
    for none, words in (
        ({}, "is missing; it must be text or a list"),
        ({"input": []}, "is []; it must have at least one item"),
    ):
        response = scripted.post(URL, json={"instructions": "Be brief.", **none})
        assert (response.status_code, response.json()["error"]["message"]) == (400, f"input {words}")
    first = ask(scripted, input="").json()
    for none in ({}, {"input": None}, {"input": []}):
        assert scripted.post(URL, json={"previous_response_id": first["id"], **none}).status_code == 200
        assert scripted.llm.prompts[-1].count("<|im_start|>user") == 1


def test_max_tool_calls_limits_no_function(scripted):
    """OpenAI counts the calls of tools that its own servers run by it, and none of a client's functions."""
    scripted.llm.text = 2 * CALL.replace("NAME", "add")
    response = ask(scripted, tools=[ADD, {"type": "web_search"}], max_tool_calls=1)
    assert [item["type"] for item in response.json()["output"]] == ["function_call"] * 2


def test_the_sdk_reads_replies_and_streams(scripted):
    openai = pytest.importorskip("openai")
    sdk = openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=scripted, max_retries=0)
    scripted.llm.text = "Hm.</think>" + "Yes." + CALL.replace("NAME", "add")
    fields = {"model": "any", "input": "Hello?", "tools": [ADD], "reasoning": {"effort": "low", "summary": "auto"}}
    whole = sdk.responses.create(**fields)
    with sdk.responses.stream(**fields) as stream:
        final = stream.get_final_response()
    for response in (whole, final):
        assert response.output_text == "Yes."
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
        assert json.loads(response.output[2].arguments) == {"a": 1}
    assert sdk.responses.retrieve(whole.id).id == whole.id


def test_where_prompts_are_prepared(scripted, monkeypatch):
    """A brief prompt is prepared at once, unless a thread encodes another text.

    A short request may continue a long conversation, which takes a thread of its own and delays no short prompt.
    """
    from generate.server import answer

    places, prepare = list[str](), scripted.llm.prepare_chat

    def noted(*args, **options):
        name = threading.current_thread().name
        places.append("short" if name.startswith("bimetal prompts") else "long" if "worker" in name else "at once")
        return prepare(*args, **options)

    monkeypatch.setattr(scripted.llm, "prepare_chat", noted)
    ask(scripted, input="Hello.")
    with monkeypatch.context() as busy:
        busy.setattr(type(scripted.llm.tokenizer), "is_busy", True)
        ask(scripted, input="Hello.")
    monkeypatch.setattr(answer, "BRIEF", 0)
    monkeypatch.setattr(answer, "SHORT", 100)
    short = ask(scripted, input="Hello.").json()
    long = ask(scripted, input="word " * 40).json()
    ask(scripted, input="More.", previous_response_id=short["id"])
    ask(scripted, input="More.", previous_response_id=long["id"])
    ask(scripted, input="Hello.", text={"format": {"type": "json_object"}})
    assert places == ["at once", "short", "short", "long", "short", "long", "long"]
