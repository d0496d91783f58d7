"""Requests that nobody should send: each is answered, with no status of a fault of ours, in the dialect's envelope."""

import asyncio
import gc
import json
import os
import random

import pytest
from asgi import call
from conftest import client_of
from scripted import TEMPLATE
from tiny_chat import write as write_model

import generate
from generate.server.errors import ApiError
from generate.server.json_object import parse_json

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
USER = {"role": "user", "content": "Hello?"}
HISTORY = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    USER,
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": "2"},
]
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "2"}]},
]
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]},
    {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "2"},
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
VALID = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": HISTORY,
        "tools": [TOOL],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": True},
        "logit_bias": {"5": 1},
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
        "stop": ["x"],
        "seed": 1,
        "temperature": 0.5,
        "max_tokens": 9,
        "reasoning_effort": "low",
    },
    "/v1/completions": {"prompt": ["a", [5, 6]], "max_tokens": 3, "echo": True, "logprobs": 1, "n": 1, "stop": "x"},
    "/v1/responses": {
        "input": ITEMS,
        "instructions": "Be brief.",
        "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "add"}]}],
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "metadata": {"a": "b"},
        "include": ["message.output_text.logprobs"],
        "previous_response_id": None,
        "max_output_tokens": 9,
    },
    "/v1/messages": {
        "max_tokens": 9,
        "messages": BLOCKS,
        "system": [{"type": "text", "text": "x-anthropic-billing-header: a"}],
        "tools": [{"name": "add", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "high"},
        "stop_sequences": ["x"],
    },
    "/v1/messages/count_tokens": {"messages": BLOCKS},
    "/api/chat": {
        "model": "m",
        "messages": HISTORY[1:2],
        "tools": [TOOL],
        "options": {"num_predict": 3},
        "format": SCHEMA,
    },
    "/api/generate": {"model": "m", "prompt": "Hi", "system": "S", "options": {"stop": ["x"]}, "think": True},
    "/tokenize": {"content": "Hi", "with_pieces": True},
    "/detokenize": {"tokens": [5, 6]},
    "/apply-template": {"messages": HISTORY},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/chat/completions/input_tokens": {"messages": HISTORY},
    "/api/show": {"model": "m"},
    "/api/pull": {"model": "m"},
}
ODD = (
    *(None, True, False, 0, 1, -1, 2, 1.5, -0.0, 1e308, 10**30, -(10**30), 2**63, 2**64, "", "x", "auto", "required"),
    *("\x00", "\u202e", "😀", "<|im_end|>", "<tool_call>", "</think>", "{{ 1 / 0 }}", "../../etc/passwd", "a" * 5000),
    *('{"a": "\\ud800"}', '{"a": NaN}', "[" * 3000, '{"a":' * 3000, "1e999", "9" * 5000),
    *([], {}, [[]], [{}], [None], [1, "a"], {"type": "text"}, {"type": "function"}, {"": None}, {"a": {"b": []}}),
    *({"$ref": "#"}, {"type": "string", "pattern": "(a+)+$"}, {"allOf": [{}] * 9}, {"enum": []}, {"minimum": "x"}),
)
RAW = (
    *(
        b"",
        b"{",
        b"[]",
        b"null",
        b"1",
        b'"',
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"a":1e999}',
    ),
    *(
        b'{"messages":"\\ud800"}',
        b'{"\\udc00":1}',
        b"[" * 5000,
        b'{"a":' * 3000,
        b'{"a":' + b"9" * 5000 + b"}",
        b"{}" * 9,
    ),
    *(b"\x00" * 99, b'{"messages":[' + b"{}," * 5000 + b"{}]}", b'{"a":"' + b"\\u0000" * 99 + b'"}'),
)
METHODS = ("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "X")
PATHS = (
    "/",
    "//",
    "/v1",
    "/v1/",
    "/v1/models/%00",
    "/v1/responses/x",
    "/static/../x",
    "/\udc80",
    "/a" * 3000,
    "/v1/files",
)
HEADERS = (
    {"host": "evil"},
    {"host": ""},
    {"origin": "null"},
    {"content-length": "-1"},
    {"content-length": "9" * 40},
    {"content-type": "text/xml"},
    {"authorization": "Bearer \xff"},
    {"x-api-key": "k" * 9999},
    {"access-control-request-headers": "a" * 999},
)


def mutated(value, rng):
    """A copy of a JSON value with one place of it replaced, left out or repeated."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if rng.random() < 0.05:
            return {**value, rng.choice(("x", "", "name", "type", "\u2028")): rng.choice(ODD)}
        return {**value, key: mutated(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        if rng.random() < 0.1:
            return value * rng.choice((0, 2, 3))
        return [*value[:at], mutated(value[at], rng), *value[at + 1 :]]
    return rng.choice(ODD)


def requests(seed, count):
    """Methods, paths, bodies and headers."""
    rng = random.Random(seed)
    for _ in range(count):
        path = rng.choice(list(VALID))
        body = VALID[path]
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            body = mutated(body, rng)
        if isinstance(body, dict) and rng.random() < 0.4:
            body["stream"] = rng.choice((True, True, False, "yes"))
        data = rng.choice(RAW) if rng.random() < 0.1 else json.dumps(body).encode()
        method, headers = "POST", {}
        if rng.random() < 0.05:
            method, path = rng.choice(METHODS), rng.choice((path, *PATHS))
        if rng.random() < 0.05:
            headers = rng.choice(HEADERS)
        yield method, path, data, headers


def check(path, data, answer):
    """Refusals are 4xx in the dialect's envelope; a stream begins with 200."""
    assert 200 <= answer.status < 500, (answer.status, path, data[:2000], answer.body[:500])
    if answer.status < 400 or not answer.body:
        return
    body = json.loads(answer.body)
    error = body["error"]
    if path.startswith("/api/"):
        assert isinstance(error, str)
    elif path.startswith("/v1/messages"):
        assert (body["type"], bool(error["type"]), bool(error["message"])) == ("error", True, True)
    else:
        assert {"message", "type", "param", "code"} <= error.keys()


def attack(client, seed, count):
    app = client.app

    async def run():
        for method, path, data, headers in requests(seed, count):
            answer = await asyncio.wait_for(call(app, method, path, data, headers), 20)
            if method != "HEAD":
                check(path, data, answer)
            assert b'"server_error"' not in answer.body, (path, data[:2000], answer.body[-500:])
            assert b'"api_error"' not in answer.body, (path, data[:2000], answer.body[-500:])

    asyncio.run(run())


def held():
    """Open files and resident bytes of this process; zeros where the system does not list them."""
    if not os.path.isdir("/proc/self/fd"):
        return 0, 0
    with open("/proc/self/statm") as file:
        return len(os.listdir("/proc/self/fd")), int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def clear(client):
    """Drop what the test itself and the store of responses keep."""
    for kept in (client.llm.prompts, client.llm.options, client.service.store._held):
        kept.clear()
    client.log.seek(client.log.truncate(0))
    gc.collect()


def test_an_empty_body_is_named():
    with pytest.raises(ApiError, match="the body is empty; it must be a JSON object"):
        parse_json(b" \r\n")


@pytest.mark.parametrize("seed", [1, 5, 7])
@pytest.mark.long
def test_a_thousand(scripted, seed):
    scripted.llm.text = "Hm.</think>Yes."
    attack(scripted, seed, 300)
    clear(scripted)
    files, size = held()
    attack(scripted, seed + 1, 700)
    clear(scripted)
    later, grown = held()
    assert later <= files
    assert grown - size < 32 << 20
    assert (scripted.service.running, scripted.llm.running) == (0, 0)


def test_against_a_model(tmp_path):
    """A model with random weights behind the same requests, so that options reach an engine."""
    with generate.load(write_model(tmp_path / "model", template=TEMPLATE), backend="numpy") as llm:
        client = client_of(llm, "nonsense")
        attack(client, 3, 150)
        assert client.service.running == 0
        assert not llm._engine.running


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 20))
def test_a_hundred_thousand(scripted, seed):
    scripted.llm.text = "Hm.</think>Yes."
    found = []
    for part in range(10):  # what the test itself keeps of 10,000 requests would be more than what is looked for
        attack(scripted, 100 * seed + part, 1_000)
        assert len(scripted.service.store) <= 256
        clear(scripted)
        found.append(held())
    files, sizes = zip(*found, strict=True)
    assert max(files[1:]) <= files[0]
    assert sizes[-1] - sizes[0] < 16 << 20
