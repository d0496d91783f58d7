"""Chat Completions: fields, bodies, the order of a stream, and what the official SDK makes of it."""

import json

import pytest
from wires import sse

URL = "/v1/chat/completions"
USER = [{"role": "user", "content": "def add(a, b):"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def ask(client, **fields):
    return client.post(URL, json={"messages": USER, "temperature": 0, **fields})


def test_a_reply_is_that_of_the_python_api(client, demo):
    body = ask(client, max_tokens=16).json()
    expected = demo.chat(USER, temperature=0, max_tokens=16)
    [choice] = body["choices"]
    assert choice["message"]["content"] == expected.text
    assert (choice["finish_reason"], body["object"], body["model"]) == ("length", "chat.completion", "demo")
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + 16 == expected.stats.prompt_tokens + 16
    assert body["timings"]["predicted_n"] == 16


def test_a_stream_has_the_text_of_a_whole_reply(client):
    whole = ask(client, max_tokens=16).json()["choices"][0]["message"]["content"]
    chunks = sse(ask(client, max_tokens=16, stream=True))
    assert list(chunks[0]["choices"][0]["delta"]) == ["role", "content"]
    assert all("role" not in c["choices"][0]["delta"] for c in chunks[1:])
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == whole
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert all("usage" not in c for c in chunks)


def test_usage_comes_last_where_it_is_asked_for(client):
    chunks = sse(ask(client, max_tokens=4, stream=True, stream_options={"include_usage": True}))
    assert [c["usage"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4


def test_logprobs_in_both_modes(client, demo):
    whole = ask(client, max_tokens=6, logprobs=True, top_logprobs=2).json()["choices"][0]
    chunks = sse(ask(client, max_tokens=6, logprobs=True, top_logprobs=2, stream=True))
    streamed = [one for c in chunks if (found := c["choices"][0]["logprobs"]) for one in found["content"]]
    assert streamed == whole["logprobs"]["content"]
    expected = demo.chat(USER, temperature=0, max_tokens=6, logprobs=2).logprobs
    assert [one["logprob"] for one in streamed] == [one.logprob for one in expected]
    assert [len(one["top_logprobs"]) for one in streamed] == [2] * 6
    assert b"".join(bytes(one["bytes"]) for one in streamed).decode() == whole["message"]["content"]


def test_choices_of_one_seed_differ_and_repeat(client):
    fields = {"n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 8}
    first, second = (ask(client, **fields).json() for _ in range(2))
    texts = [c["message"]["content"] for c in first["choices"]]
    assert texts == [c["message"]["content"] for c in second["choices"]]
    assert len(set(texts)) == 3
    assert [c["index"] for c in first["choices"]] == [0, 1, 2]
    assert first["usage"]["completion_tokens"] == 24
    assert first["usage"]["prompt_tokens"] == ask(client, max_tokens=1).json()["usage"]["prompt_tokens"]
    chunks = sse(ask(client, stream=True, **fields))
    for index, text in enumerate(texts):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in mine) == text
        assert [c["finish_reason"] for c in mine].count("length") == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_lower_priority_comes_first_as_in_vllm(scripted, path):
    body = {"messages": USER, "prompt": "Hi."}
    for given, expected in ((3, -3), (-2, 2), (0, 0), (None, 0)):
        assert scripted.post(path, json=body | {"priority": given}).status_code == 200
        assert scripted.llm.options[-1].get("priority", 0) == expected
    refused = scripted.post(path, json=body | {"priority": "high"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")


@pytest.mark.parametrize("fields", [{"top_p": 0}, {"top_p": 0.0, "top_k": 40}, {"min_p": 1}])
def test_the_ends_of_ranges_keep_the_likeliest_token(client, fields):
    texts = [
        ask(client, max_tokens=8, seed=3, **how).json()["choices"][0]["message"]["content"]
        for how in ({"temperature": 0}, {"temperature": 1.5, **fields})
    ]
    assert texts[0] == texts[1]


def test_logit_bias_forbids_and_forces(client, demo):
    plain = ask(client, max_tokens=1).json()["choices"][0]["message"]["content"]
    [token] = demo.tokenizer.encode(plain, add_special_tokens=False)
    other = ask(client, max_tokens=1, logit_bias={str(token): -100}).json()["choices"][0]["message"]["content"]
    assert other != plain
    [forced] = demo.tokenizer.encode(" return", add_special_tokens=False)
    bias = {str(forced): 100}
    assert ask(client, max_tokens=1, logit_bias=bias).json()["choices"][0]["message"]["content"] == " return"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_a_reply(scripted, stream):
    """The model's own pieces stop in its session; here the option arrives."""
    ask(scripted, stop=["\n", "END"], stream=stream)
    assert scripted.llm.options[-1]["stop"] == ("\n", "END")


def test_tool_calls(scripted):
    scripted.llm.text = f"Adding.{CALL}{CALL}"
    body = ask(scripted, tools=[TOOL]).json()
    message = body["choices"][0]["message"]
    assert message["content"] == "Adding."
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "add", "arguments": '{"a": 1}'}] * 2
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    chunks = sse(ask(scripted, tools=[TOOL], stream=True))
    deltas = [d for c in chunks for d in c["choices"][0]["delta"].get("tool_calls", [])]
    assert [d["index"] for d in deltas] == [0, 0, 1, 1]
    assert [d["function"]["arguments"] for d in deltas] == ["", '{"a": 1}'] * 2
    assert len({d["id"] for d in deltas if "id" in d}) == 2
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_custom_tools(scripted):
    """Their calls hold free text, which a model writes as the argument `input` of a function."""
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "x"'}}
    patch = {"type": "custom", "custom": {"name": "patch", "description": "Patches.", "format": grammar}}
    written = '<tool_call>\n{"name": "patch", "arguments": {"input": "é\\n{"}}\n</tool_call>'
    scripted.llm.text = f"{written}{CALL}{written}"
    message = ask(scripted, tools=[TOOL, patch]).json()["choices"][0]["message"]
    custom = {"type": "custom", "custom": {"name": "patch", "input": "é\n{"}}
    function = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    calls = message["tool_calls"]
    assert [{key: value for key, value in call.items() if key != "id"} for call in calls] == [custom, function, custom]
    shown = scripted.llm.prompts[-1]
    schema = '"description": "Text of this lark grammar:\\nstart: \\"x\\""'
    assert '"name": "patch", "description": "Patches."' in shown
    assert schema in shown
    chunks = sse(ask(scripted, tools=[TOOL, patch], stream=True))
    deltas = [delta for chunk in chunks for delta in chunk["choices"][0]["delta"].get("tool_calls", [])]
    first, second, *_ = deltas
    begun = {"index": 0, "id": first["id"], "type": "custom", "custom": {"name": "patch", "input": ""}}
    assert (first, second) == (begun, {"index": 0, "custom": {"input": "é\n{"}})
    assert [delta["index"] for delta in deltas] == [0, 0, 1, 1, 2, 2]
    assert deltas[3]["function"] == {"arguments": '{"a": 1}'}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "Done."} for call in calls]
    assert ask(scripted, tools=[TOOL, patch], messages=[*USER, message, *results]).status_code == 200
    assert '{"name": "patch", "arguments": {"input": "é\\n{"}}' in scripted.llm.prompts[-1]


def test_a_custom_tool_can_be_chosen(scripted):
    pytest.importorskip("llguidance", reason="the grammar extra is not installed")
    tools = [TOOL, {"type": "custom", "custom": {"name": "note"}}]
    scripted.llm.text = CALL.replace("add", "note").replace('"a": 1', '"input": "x"')
    chosen = {"type": "custom", "custom": {"name": "note"}}
    [call] = ask(scripted, tools=tools, tool_choice=chosen).json()["choices"][0]["message"]["tool_calls"]
    assert call["custom"] == {"name": "note", "input": "x"}
    assert "guide" in scripted.llm.options[-1]
    error = ask(scripted, tools=tools, tool_choice={"type": "hosted"}).json()["error"]
    assert error["message"] == "tool_choice.type is 'hosted'; it must be function, custom or allowed_tools"


@pytest.mark.parametrize("path", [URL, f"{URL}/input_tokens", "/apply-template"])
def test_tools_of_other_types_are_refused(scripted, path):
    """They were left out, and the model answered without them."""
    for kind in ("web_search", "local_shell", ""):
        response = scripted.post(path, json={"messages": USER, "tools": [TOOL, {"type": kind}]})
        words = f"tools[1].type is {kind!r}; supported are tools of the type function and custom"
        assert (response.status_code, response.json()["error"]["message"]) == (400, words)


def test_parallel_calls_can_be_turned_off(scripted):
    scripted.llm.text = f"{CALL}{CALL}and more"
    message = ask(scripted, tools=[TOOL], parallel_tool_calls=False).json()["choices"][0]["message"]
    assert (len(message["tool_calls"]), message["content"]) == (1, None)


def test_tools_are_left_out_where_none_may_be_called(scripted):
    scripted.llm.text = CALL
    message = ask(scripted, tools=[TOOL], tool_choice="none").json()["choices"][0]["message"]
    assert (message["content"], "tool_calls" in message) == (CALL, False)
    assert "name arguments" not in scripted.llm.prompts[-1]


def test_reasoning_has_both_names(scripted):
    scripted.llm.text = "Let me see.\n</think>\n\nYes."
    fields = {"chat_template_kwargs": {"enable_thinking": True}}
    body = ask(scripted, **fields).json()
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("Let me see.",) * 2 + ("Yes.",)
    assert 10 <= body["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 20
    chunks = sse(ask(scripted, stream=True, **fields))
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert "".join(d.get("reasoning", "") for d in deltas) == "Let me see."
    assert "".join(d.get("content", "") for d in deltas) == "Yes."


@pytest.mark.parametrize("tag", ["", "<think>\n"])
def test_log_probabilities_of_the_reasoning_come_with_it(scripted, tag):
    scripted.llm.text, scripted.llm.cut = f"{tag}Let me see.\n</think>\n\nYes.", 1
    fields = {"chat_template_kwargs": {"enable_thinking": not tag}, "logprobs": True}
    whole = ask(scripted, **fields).json()["choices"][0]["logprobs"]["content"]
    parts = {"reasoning": [], "content": []}
    for chunk in sse(ask(scripted, stream=True, **fields))[1:-1]:
        [choice] = chunk["choices"]
        parts["reasoning" if "reasoning" in choice["delta"] else "content"] += choice["logprobs"]["content"]
    assert parts["reasoning"] + parts["content"] == whole
    texts = {key: "".join(one["token"] for one in found) for key, found in parts.items()}
    assert texts == {"reasoning": f"{tag}Let me see.\n</think>", "content": "\n\nYes."}


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("low", True), ("high", True), ("unheard of", True)])
def test_effort_turns_thinking_on_and_off(scripted, effort, thinks):
    ask(scripted, reasoning_effort=effort)
    assert ("<think>" in scripted.llm.prompts[-1]) == thinks


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False, "reasoning_effort": "high"}, False),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"thinking": {}, "reasoning_effort": "high"}, True),
    ],
)
def test_switches_of_thinking(scripted, fields, thinks):
    """Clients add them to a request, as other servers of OpenAI's API take them."""
    assert ask(scripted, **fields).status_code == 200
    assert ("<think>" in scripted.llm.prompts[-1]) == thinks
    assert "it must be one of enabled" in ask(scripted, thinking={"type": "no"}).json()["error"]["message"]


def test_a_call_in_the_earlier_form_is_rendered(scripted):
    """Messages of the role function, which give its result, were read before."""
    call = {"name": "add", "arguments": '{"a": 1}'}
    result = {"role": "function", "name": "add", "content": "2"}
    prompts = []
    for message in ({"function_call": call}, {"tool_calls": [{"id": "", "type": "function", "function": call}]}):
        ask(scripted, messages=[*USER, {"role": "assistant", "content": None, **message}, result])
        prompts.append(scripted.llm.prompts[-1])
    assert prompts[0] == prompts[1]
    assert '"add"' in prompts[0]


def test_messages_of_every_kind_are_rendered(scripted):
    arguments = {"name": "add", "arguments": '{"a": 1}'}
    ask(
        scripted,
        messages=[
            {"role": "developer", "content": "One"},
            {"role": "system", "content": [{"type": "text", "text": "Two"}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": arguments}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ],
    )
    assert scripted.llm.prompts[-1] == (
        "<|im_start|>system\nOne\n\nTwo<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>\n<|im_start|>tool\n2<|im_end|>\n'
        "<|im_start|>assistant\n"
    )


def test_whole_numbers_may_be_written_as_floats(scripted):
    """JSON has one kind of number, and some languages write 4 as 4.0."""
    fields = {"max_tokens": 4.0, "seed": -2.0, "n": 1.0, "top_logprobs": 2.0, "logprobs": True, "temperature": 1.0}
    assert scripted.post(URL, json={"messages": USER, **fields}).status_code == 200
    options = scripted.llm.options[-1]
    assert [options[name] for name in ("max_tokens", "seed", "logprobs")] == [4, 2**64 - 2, 2]
    options = {"num_predict": 3.0, "seed": 7.0}
    chat = {"messages": USER, "stream": False, "options": options}
    assert scripted.post("/api/chat", json=chat).status_code == 200
    assert [scripted.llm.options[-1][name] for name in ("max_tokens", "seed")] == [3, 7]
    for value in (4.5, 1e300, -0.5):
        refused = scripted.post(URL, json={"messages": USER, "max_tokens": value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "nobody", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
            "messages[0].tool_calls[0].custom",
        ),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": -0.5}, "top_p"),
        ({"top_p": False}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"xtc_probability": 0.5}, "xtc_probability"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"mirostat": 2}, "mirostat"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"allowed_token_ids": [2]}, "allowed_token_ids"),
        ({"bad_words": ["no"]}, "bad_words"),
        ({"logits_processors": ["a"]}, "logits_processors"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 10}, "truncate_prompt_tokens"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"structured_outputs": False}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json"),
        ({"ignore_eos": 2}, "ignore_eos"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop_token_ids": [-2]}, "stop_token_ids"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "x"}}}]},
            "tools[0].custom.format.type",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"stream": "yes"}, "stream"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {"voice": "a"}}, "audio"),
        ({"functions": [{"name": "weather"}]}, "functions"),
        ({"function_call": {"name": "weather"}}, "function_call"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"continue_final_message": False, "add_generation_prompt": False}, "add_generation_prompt"),
        ({"tool_choice": "any"}, "tool_choice"),
    ],
)
def test_wrong_fields_are_refused_by_name(scripted, fields, param):
    response = ask(scripted, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"]


def test_a_message_without_content_is_refused(scripted):
    """A misspelled key was a message without a word."""
    message = ask(scripted, messages=[{"role": "user", "text": "Hi"}]).json()["error"]["message"]
    assert message == "messages[0].content is missing; it must be text or a list"
    assert ask(scripted, messages=[{"role": "user", "content": None}]).status_code == 200


def test_a_flag_is_refused_in_the_words_of_json(scripted):
    message = ask(scripted, stream="yes").json()["error"]["message"]
    assert message == "stream is 'yes'; it must be true or false"


def test_unknown_fields_and_models_are_taken(scripted):
    fields = {"model": "gpt-9", "user": "me", "metadata": {"a": 1}, "prompt_cache_key": "k", "store": True, "new": [1]}
    assert ask(scripted, **fields).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_what_asks_for_nothing_is_ignored(scripted, stream):
    """Fields of other servers, at values by which they do nothing, and fields that nobody knows."""
    neutral = {"xtc_probability": 0, "dry_multiplier": 0.0, "ignore_eos": False, "typical_p": 1.0, "top_n_sigma": -1}
    unknown = {"verbosity": "low", "safety_identifier": "a", "prediction": {"type": "content"}, "service_tier": "auto"}
    neutral |= {"prompt_logprobs": None, "return_tokens_as_token_ids": False, "chat_template": None, "documents": []}
    neutral |= {"functions": [], "function_call": "auto"}
    neutral |= {"use_beam_search": False, "stop_token_ids": [], "allowed_token_ids": None, "bad_words": []}
    grammars = {"grammar": "", "json_schema": {}, "guided_json": "", "guided_regex": "", "guided_choice": []}
    neutral |= grammars | {"guided_grammar": None, "structured_outputs": {}}
    assert ask(scripted, stream=stream, **neutral, **unknown).status_code == 200
    completion = {"prompt": "Hello?", "stream": stream, **neutral, **unknown}
    assert scripted.post("/v1/completions", json=completion).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (URL, "messages", [{"role": "user", "content": "a b" * 4096}]),
        ("/v1/completions", "prompt", "a b" * 4096),
        ("/v1/completions", "prompt", [5] * 4097),
        ("/v1/responses", "input", "a b" * 4096),
    ],
)
def test_a_prompt_beyond_the_context_is_refused_before_a_stream_begins(scripted, path, field, value, stream):
    response = scripted.post(path, json={field: value, "stream": stream})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)
    assert error["n_ctx"] == 4096 < error["n_prompt_tokens"]
    # by these words clients know that they must shorten the conversation
    assert error["message"].startswith(f"prompt is too long: {error['n_prompt_tokens']} tokens > 4096 maximum")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (URL, {"messages": [{"role": "user", "content": ""}]}),
        ("/v1/responses", {"input": ""}),
        ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": ""}]}),
        ("/api/chat", {"messages": [{"role": "user", "content": ""}]}),
    ],
)
def test_a_prompt_without_tokens_is_refused_before_a_stream_begins(client, path, body, stream):
    response = client.post(path, json={**body, "stream": stream})
    assert response.status_code == 400
    assert "the prompt is empty" in response.text


def test_an_error_within_a_stream_is_an_event(scripted):
    scripted.llm.error = RuntimeError("secret")
    chunks = sse(ask(scripted, stream=True))
    assert chunks[-1]["error"]["type"] == "server_error"
    assert "secret" not in json.dumps(chunks)
    response = ask(scripted)
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")


def test_the_sdk_reads_replies_and_streams(scripted):
    openai = pytest.importorskip("openai")
    scripted.llm.text = f"Adding.{CALL}{CALL}"
    sdk = openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=scripted, max_retries=0)
    fields = {"model": "any", "messages": USER, "tools": [TOOL]}
    whole = sdk.chat.completions.create(**fields)
    with sdk.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion()
    for reply in (whole, final):
        message = reply.choices[0].message
        assert (message.role, message.content, len(message.tool_calls)) == ("assistant", "Adding.", 2)
        assert json.loads(message.tool_calls[1].function.arguments) == {"a": 1}
        assert reply.choices[0].finish_reason == "tool_calls"
    assert [model.id for model in sdk.models.list()] == ["scripted"]
    assert sdk.models.retrieve("owner/repo").id == "scripted"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        sdk.chat.completions.create(**fields, temperature=-1)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(scripted, mode):
    """Where the model may choose, it sees the allowed tools alone; the grammar of required calls leaves no choice."""
    pytest.importorskip("llguidance", reason="the grammar extra is not installed")
    tools = [{"type": "function", "function": {"name": name}} for name in ("first", "second")]
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "second"}}]}
    chosen = {"type": "allowed_tools", "allowed_tools": allowed}
    scripted.post(URL, json={"messages": USER, "tools": tools, "tool_choice": chosen})
    prompt = scripted.llm.prompts[-1]
    assert ('"first"' in prompt, '"second"' in prompt) == (mode == "required", True)


CUT = 'Look.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b'


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_max_tokens_cuts_has_the_arguments_so_far(scripted, stream):
    """As in llama.cpp and vLLM; it was text with the model's tags. Clients see by `length` that it is incomplete."""
    scripted.llm.text, scripted.llm.finish = CUT, "length"
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    fields = {"messages": [{"role": "user", "content": "1 and 2?"}], "tools": tools, "stream": stream}
    response = scripted.post("/v1/chat/completions", json=fields)
    if stream:
        choices = [chunk["choices"][0] for chunk in sse(response)]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        calls = [call["function"] for choice in choices for call in choice["delta"].get("tool_calls", ())]
        name, arguments, reason = calls[0]["name"], calls[1]["arguments"], choices[-1]["finish_reason"]
    else:
        [choice] = response.json()["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
        name, arguments = choice["message"]["tool_calls"][0]["function"].values()
    assert (text, name, arguments, reason) == ("Look.", "add", '{"a": 1, "b', "length")


@pytest.mark.parametrize("stream", [False, True])
def test_apis_whose_arguments_are_objects_leave_a_cut_call_out(scripted, stream):
    scripted.llm.text, scripted.llm.finish = CUT, "length"
    tool = {"name": "add", "input_schema": {"type": "object"}}
    fields = {"messages": [{"role": "user", "content": "1 and 2?"}], "stream": stream}
    found = scripted.post("/v1/messages", json=fields | {"tools": [tool], "max_tokens": 9}).text
    assert "max_tokens" in found
    assert "tool_use" not in found
    assert "tool_call" not in found
    function = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    found = scripted.post("/api/chat", json=fields | {"tools": [function]}).text
    assert '"done_reason":"length"' in found
    assert "tool_call" not in found
    responses = {"input": "1 and 2?", "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}]}
    found = scripted.post("/v1/responses", json=responses | {"stream": stream, "max_output_tokens": 9}).text
    assert '"status":"incomplete"' in found
    assert "<tool_call>" not in found
    assert r"{\"a\": 1, \"b" in found
