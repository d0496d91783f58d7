"""Python clients from PyPI against a server on loopback: what they send is answered so that they accept it."""

import asyncio
import json
import math
import subprocess
import sys
from importlib.metadata import version

import pytest

from common.sampling import log_softmax

pytestmark = pytest.mark.clients

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
USER = {"role": "user", "content": "What is one and two?"}


def module(name, package=None):
    package = package or name
    return pytest.importorskip(name, reason=f"{package} is not installed (pip install 'bimetal[clients]')")


@pytest.fixture
def openai(live):
    """OpenAI's client of the live server."""
    package = module("openai")
    live.client = f"openai {package.__version__}"
    with package.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_chat(live, openai):
    tool = {"type": "function", "function": {"name": "add", "parameters": SCHEMA, "strict": True}}
    assert [model.id for model in openai.models.list()] == ["scripted"]
    assert openai.models.retrieve("scripted").id == "scripted"
    reply = openai.chat.completions.create(model="scripted", messages=[USER], n=2, logprobs=True, top_logprobs=1)
    assert [choice.message.content for choice in reply.choices] == ["Hello", "Hello"]
    assert "".join(t.token for t in reply.choices[0].logprobs.content) == "Hello"
    assert reply.usage.completion_tokens == 10

    live.llm.text = "Let me see." + CALL
    messages = [{"role": "developer", "content": "Add."}, USER]
    with openai.chat.completions.stream(
        model="scripted", messages=messages, tools=[tool], stream_options={"include_usage": True}
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "tool_calls.function.arguments.delta"} <= kinds
    message = final.choices[0].message
    assert (message.content, final.choices[0].finish_reason) == ("Let me see.", "tool_calls")
    [call] = message.tool_calls
    assert (call.function.name, call.function.parsed_arguments) == ("add", {"a": 1, "b": 2})
    assert final.usage.prompt_tokens > 0

    live.llm.text = "Three."
    said = {"role": "assistant", "content": message.content, "tool_calls": [call.model_dump()]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    chunks = list(
        openai.chat.completions.create(model="scripted", messages=[*messages, said, result], tools=[tool], stream=True)
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Three."


def test_openai_parses_structured_output(live, openai):
    pydantic = module("pydantic")
    Sum = pydantic.create_model("Sum", a=(int, ...), b=(int, ...))
    live.llm.text = '{"a": 1, "b": 2}'
    chat = openai.chat.completions.parse(model="scripted", messages=[USER], response_format=Sum)
    assert chat.choices[0].message.parsed == Sum(a=1, b=2)
    response = openai.responses.parse(model="scripted", input="Add.", text_format=Sum)
    assert response.output_parsed == Sum(a=1, b=2)


def test_openai_tool_choices(live, openai):
    module("llguidance", "llguidance")
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("add", "sub")]
    live.llm.text = CALL + CALL.replace("add", "sub")
    asked = {"model": "scripted", "messages": [USER], "tools": tools}
    with openai.chat.completions.stream(**asked, tool_choice="required") as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [(event.index, event.name) for event in done] == [(0, "add"), (1, "sub")]
    named = {"type": "function", "function": {"name": "add"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    for choice, several, count in ((named, False, 1), (allowed, True, 2), ("auto", True, 2), ("none", True, 0)):
        reply = openai.chat.completions.create(**asked, tool_choice=choice, parallel_tool_calls=several)
        assert len(reply.choices[0].message.tool_calls or ()) == count
    assert '"sub"' not in live.llm.prompts[-3]


def test_openai_continues_a_message(live, openai):
    said = {"role": "assistant", "content": "The sum "}
    more = {"continue_final_message": True, "add_generation_prompt": False}
    live.llm.text = "is three."
    reply = openai.chat.completions.create(model="scripted", messages=[USER, said], extra_body=more)
    assert reply.choices[0].message.content == "is three."
    assert live.llm.prompts[-1].endswith("<|im_start|>assistant\n")  # the text comes after it


def test_openai_completions(live, openai):
    reply = openai.completions.create(model="scripted", prompt=["a", "b"], echo=True, logprobs=1, max_tokens=5)
    assert [choice.text for choice in reply.choices] == ["aHello", "bHello"]
    assert len(reply.choices[0].logprobs.token_logprobs) == len(reply.choices[0].logprobs.tokens)
    chunks = list(openai.completions.create(model="scripted", prompt="a", stream=True))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "Hello"


def test_openai_responses(live, openai):
    tool = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}
    first = openai.responses.create(model="scripted", input="Hi", instructions="Be brief.", store=True)
    assert (first.output_text, first.status) == ("Hello", "completed")
    assert openai.responses.retrieve(first.id).output_text == "Hello"
    live.llm.text = "Let me see." + CALL
    with openai.responses.stream(model="scripted", input="Add.", tools=[tool], previous_response_id=first.id) as stream:
        kinds = [event.type for event in stream]
        second = stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert {"response.output_text.delta", "response.function_call_arguments.done"} <= set(kinds)
    message, call = second.output
    assert (message.content[0].text, call.name, call.parsed_arguments) == ("Let me see.", "add", {"a": 1, "b": 2})
    live.llm.text = "Three."
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    third = openai.responses.create(model="scripted", input=[result], previous_response_id=second.id)
    assert third.output_text == "Three."
    assert "Be brief." not in live.llm.prompts[-1]  # instructions count for one response
    openai.responses.delete(first.id)
    with pytest.raises(module("openai").NotFoundError):
        openai.responses.retrieve(first.id)


def test_openai_errors(live, openai):
    package = module("openai")
    with pytest.raises(package.BadRequestError) as refused:
        openai.chat.completions.create(model="scripted", messages=[USER], temperature=-1)
    assert refused.value.param == "temperature"
    live.llm.context = 20
    with pytest.raises(package.BadRequestError) as refused:
        openai.chat.completions.create(model="scripted", messages=[USER])
    assert refused.value.code == "context_length_exceeded"
    del live.recorder.exchanges[-1]  # replayed against a model of another context
    with pytest.raises(package.NotFoundError, match="is not a route here"):
        openai.files.list()
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(package.BadRequestError, match="only text is supported"):
        openai.chat.completions.create(model="scripted", messages=[{"role": "user", "content": [image]}])
    with pytest.raises(package.BadRequestError) as refused:
        openai.chat.completions.create(model="scripted", messages=[USER], response_format={"type": "json_schema"})
    assert refused.value.param == "response_format.json_schema"


def test_openai_async_client_that_leaves(live):
    package = module("openai")
    live.client, live.llm.text, live.llm.pause = f"openai {package.__version__}", "long " * 200, 0.01

    async def run():
        async with package.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(model="scripted", messages=[USER], stream=True)
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    break
            await stream.close()
        for _ in range(200):
            if not live.llm.running:
                return
            await asyncio.sleep(0.01)

    asyncio.run(run())
    assert live.llm.running == 0
    assert live.llm.steps < 400
    live.recorder.exchanges.clear()  # when a client leaves is not replayed


@pytest.fixture
def anthropic(live):
    """Anthropic's client of the live server."""
    package = module("anthropic")
    live.client = f"anthropic {package.__version__}"
    with package.Anthropic(base_url=live.url, api_key="none", max_retries=0) as client:
        yield client


def test_anthropic_messages(live, anthropic):
    assert [model.id for model in anthropic.models.list()] == ["scripted"]
    asked = {"model": "scripted", "max_tokens": 99, "messages": [USER]}
    reply = anthropic.messages.create(**asked, system="Be brief.")
    assert (reply.content[0].text, reply.stop_reason) == ("Hello", "end_turn")
    assert anthropic.messages.count_tokens(model="scripted", messages=[USER]).input_tokens > len(USER["content"])
    with anthropic.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == "Hello"
        final = stream.get_final_message()
    assert (final.usage.output_tokens, final.stop_reason) == (5, "end_turn")


def test_anthropic_parts_of_a_prompt(live, anthropic):
    """System prompts as lists, places of its cache, documents, a last message of the assistant, and stops."""
    cached = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "Be brief.", **cached}, {"type": "text", "text": "Be kind."}]
    source = {"type": "text", "media_type": "text/plain", "data": "One and two is three."}
    content = [{"type": "document", "source": source}, {"type": "text", "text": "What is it?", **cached}]
    said = [{"role": "user", "content": content}, {"role": "assistant", "content": "It is "}]
    live.llm.text = "three"
    reply = anthropic.messages.create(
        model="scripted",
        max_tokens=99,
        system=system,
        messages=said,
        stop_sequences=["."],
        cache_control=cached["cache_control"],
    )
    assert (reply.content[0].text, reply.stop_reason, live.llm.options[-1]["stop"]) == ("three", "end_turn", (".",))
    prompt = "<|im_start|>system\nBe brief.\nBe kind.<|im_end|>\n<|im_start|>user\nOne and two is three.\nWhat is it?"
    assert live.llm.prompts[-1] == f"{prompt}<|im_end|>\n<|im_start|>assistant\n"
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    with pytest.raises(module("anthropic").BadRequestError, match="only text is supported"):
        anthropic.messages.create(model="scripted", max_tokens=9, messages=[{"role": "user", "content": [image]}])


def test_anthropic_tools_and_thinking(live, anthropic):
    tool = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
    asked = {"model": "scripted", "max_tokens": 4096, "tools": [tool]}
    live.llm.text = "One and two.</think>Let me see." + CALL
    with anthropic.messages.stream(
        **asked, messages=[USER], thinking={"type": "enabled", "budget_tokens": 1024}
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert {"thinking", "text", "input_json", "content_block_stop", "message_stop"} <= kinds
    thinking, text, call = final.content
    assert (thinking.thinking, text.text, final.stop_reason) == ("One and two.", "Let me see.", "tool_use")
    assert (call.name, call.input) == ("add", {"a": 1, "b": 2})
    live.llm.text = "Three."
    said = {"role": "assistant", "content": [block.model_dump() for block in final.content]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "3"}]}
    reply = anthropic.beta.messages.create(
        **asked, messages=[USER, said, result], betas=["interleaved-thinking-2025-05-14"]
    )
    assert reply.content[0].text == "Three."


def test_anthropic_errors(live, anthropic):
    package = module("anthropic")
    with pytest.raises(package.BadRequestError) as refused:
        anthropic.messages.create(model="scripted", max_tokens=9, messages=[{"role": "robot", "content": "Hi"}])
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    live.llm.context = 20
    with pytest.raises(package.BadRequestError, match=r"prompt is too long: \d+ tokens > 20 maximum"):
        anthropic.messages.create(model="scripted", max_tokens=9, messages=[USER])
    del live.recorder.exchanges[-1]  # replayed against a model of another context


def test_ollama(live):
    package = module("ollama")
    live.client = f"ollama {version('ollama')}"
    client = package.Client(live.url)
    assert [model.model for model in client.list().models] == ["scripted"]
    assert "tools" in client.show("scripted").capabilities
    assert [model.model for model in client.ps().models] == ["scripted"]
    assert client.pull("any").status == "success"
    assert client.generate("scripted", "Hi").response == "Hello"
    assert "".join(part.response for part in client.generate("scripted", "Hi", stream=True)) == "Hello"
    parts = list(client.chat("scripted", [USER], stream=True))
    assert ("".join(part.message.content for part in parts), parts[-1].done_reason) == ("Hello", "stop")

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    live.llm.text = CALL
    message = client.chat("scripted", [USER], tools=[add]).message
    [call] = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", {"a": 1, "b": 2})
    live.llm.text = "Three."
    result = {"role": "tool", "content": "3", "tool_name": "add"}
    assert client.chat("scripted", [USER, message, result], tools=[add]).message.content == "Three."
    live.llm.text = '{"a": 1, "b": 2}'
    assert json.loads(client.chat("scripted", [USER], format=SCHEMA).message.content) == {"a": 1, "b": 2}
    live.llm.text = "Hm.</think>Yes."
    thought = client.chat("scripted", [USER], think=True).message
    assert (thought.thinking, thought.content) == ("Hm.", "Yes.")
    live.llm.text = "three."
    said = {"role": "assistant", "content": "It is "}
    options = {"temperature": 0.5, "num_predict": 9, "seed": 3, "stop": ["\n"], "num_ctx": 2048}
    assert client.chat("scripted", [USER, said], options=options, keep_alive="5m").message.content == "three."
    assert live.llm.options[-1] == {"temperature": 0.5, "max_tokens": 9, "seed": 3, "stop": ("\n",)}
    assert client.generate("scripted", keep_alive=0).done_reason == "unload"
    with pytest.raises(package.ResponseError, match="only text is supported"):
        client.chat("scripted", [{**USER, "images": [b"x"]}])
    with pytest.raises(package.ResponseError) as refused:
        client.chat("scripted", [{"role": "robot", "content": ""}])
    assert refused.value.status_code == 400


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langchain(live, responses):
    package = module("langchain_openai", "langchain-openai")
    live.client = f"langchain-openai {version('langchain-openai')}"
    model = package.ChatOpenAI(
        model="scripted", base_url=f"{live.url}/v1", api_key="none", use_responses_api=responses, stream_usage=True
    )
    system = ("system", "Be brief.")
    assert model.invoke([system, ("user", "Hi")]).text == "Hello"
    chunks = list(model.stream([system, ("user", "Hi")]))
    assert "".join(chunk.text for chunk in chunks) == "Hello"
    usage = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert usage[-1]["output_tokens"] == 5

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    live.llm.text = CALL
    said = model.bind_tools([add]).invoke("Add.")
    [call] = said.tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 1, "b": 2})
    live.llm.text = "Three."
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    assert model.bind_tools([add]).invoke([("user", "Add."), said, result]).text == "Three."
    live.llm.text = '{"a": 1, "b": 2}'
    structured = model.with_structured_output({"title": "sum", **SCHEMA}, method="json_schema", strict=True)
    assert structured.invoke("Add.") == {"a": 1, "b": 2}


TASK = """\
task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{target}"
{more}
"""
QUESTIONS = [
    {"question": "def add(a, b):\n    return", "choices": [" a + b", " zebra"], "answer": 0},
    {"question": "for i in", "choices": [" and", " range(10):"], "answer": 1},
]


def test_lm_eval(live_demo, tmp_path):
    """Scores are those that the model's own logits give; the tokenizer is the server's."""
    module("lm_eval", "lm-eval[api]")
    live_demo.client = f"lm-eval {version('lm_eval')}"
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    more = 'doc_to_choice: "{{choices}}"\ntarget_delimiter: ""\nmetric_list: [{metric: acc}]'
    task = TASK.format(data=tmp_path / "data.jsonl", kind="multiple_choice", target="{{answer}}", more=more)
    (tmp_path / "tiny.yaml").write_text(task)
    arguments = f"model=demo,base_url={live_demo.url}/v1/completions,num_concurrent=1,max_retries=1"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", arguments]
    command += ["--tasks", "tiny", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    env = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "PATH": "/usr/bin:/bin"}
    made = subprocess.run([*command, "--log_samples"], env=env, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr[-3000:]
    [samples] = (tmp_path / "out").rglob("samples_tiny_*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    for question, sample in zip(QUESTIONS, sorted(found, key=lambda s: s["doc_id"]), strict=True):
        for choice, [[score, _]] in zip(question["choices"], sample["resps"], strict=True):
            assert math.isclose(float(score), score_of(live_demo.llm, question["question"], choice), abs_tol=1e-3)


def score_of(llm, context, choice):
    """The log-probability of `choice` after `context`, of the model's own logits."""
    head, whole = llm.tokenizer.encode(context, False), llm.tokenizer.encode(context + choice, False)
    scored = list(zip(llm.logits(whole), whole[1:], strict=False))[len(head) - 1 :]
    return sum(float(log_softmax(row)[id]) for row, id in scored)
