"""Libraries over the clients of OpenAI, Anthropic and Ollama: what they make of answers and errors."""

import asyncio
from importlib.metadata import version

import pytest
from test_clients_python import CALL, SCHEMA, USER, module

pytestmark = pytest.mark.clients

TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
LONG = [{"role": "user", "content": "a b " * 50}]


def test_langchain_ollama(live):
    package = module("langchain_ollama", "langchain-ollama")
    live.client = f"langchain-ollama {version('langchain-ollama')}"
    model = package.ChatOllama(model="scripted", base_url=live.url, validate_model_on_init=True, reasoning=True)
    live.llm.text = "Hm.</think>Hello"
    reply = model.invoke([("system", "Be brief."), ("user", "Hi")])
    assert (reply.text, reply.additional_kwargs["reasoning_content"]) == ("Hello", "Hm.")
    assert reply.usage_metadata["output_tokens"] == len(live.llm.text)
    model = package.ChatOllama(model="scripted", base_url=live.url, temperature=0, num_predict=50, seed=3)
    live.llm.text = "Hello"
    assert "".join(chunk.text for chunk in model.stream("Hi")) == "Hello"
    assert live.llm.options[-1] == {"temperature": 0, "seed": 3, "max_tokens": 50}

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    live.llm.text = CALL
    [call] = model.bind_tools([add]).invoke("Add.").tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 1, "b": 2})
    live.llm.text = '{"a": 1, "b": 2}'
    structured = model.with_structured_output({"title": "sum", **SCHEMA}, method="json_schema")
    assert structured.invoke("Add.") == {"a": 1, "b": 2}


def test_langchain_tells_a_conversation_that_is_too_long(live):
    package = module("langchain_openai", "langchain-openai")
    errors = module("langchain_core.exceptions", "langchain-core")
    live.llm.context = 20
    model = package.ChatOpenAI(model="scripted", base_url=f"{live.url}/v1", api_key="none")
    with pytest.raises(errors.ContextOverflowError):
        model.invoke([("user", "Hi")])
    live.recorder.exchanges.clear()  # replayed against a model of another context


@pytest.fixture
def litellm(live, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no list from another host
    package = module("litellm")
    live.client = f"litellm {version('litellm')}"
    return package


PROVIDERS = {"openai": "/v1", "hosted_vllm": "/v1", "anthropic": "", "ollama_chat": ""}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm(live, litellm, provider):
    base = f"{live.url}{PROVIDERS[provider]}"
    asked = {"model": f"{provider}/scripted", "api_base": base, "api_key": "none", "max_tokens": 200, "num_retries": 0}
    reply = litellm.completion(**asked, messages=[USER])
    assert (reply.choices[0].message.content, reply.usage.completion_tokens) == ("Hello", 5)
    chunks = list(litellm.completion(**asked, messages=[USER], stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello"
    live.llm.text = CALL + CALL.replace("2", "3")
    calls = litellm.completion(**asked, messages=[USER], tools=[TOOL]).choices[0].message.tool_calls
    arguments = ['{"a": 1, "b": 2}', '{"a": 1, "b": 3}']
    assert [(call.function.name, call.function.arguments) for call in calls] == [("add", a) for a in arguments]
    live.llm.text = "Hello"
    assert asyncio.run(litellm.acompletion(**asked, messages=[USER])).choices[0].message.content == "Hello"
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(litellm.BadRequestError, match="only text is supported"):
        litellm.completion(**asked, messages=[{"role": "user", "content": [{"type": "text", "text": "x"}, image]}])
    if provider == "ollama_chat":  # whose errors litellm does not tell apart
        return
    live.llm.context = 60
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asked, messages=LONG)
    del live.recorder.exchanges[-1]  # replayed against a model of another context


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "JSON", "RESPONSES_TOOLS"])
def test_instructor(live, mode):
    package, openai, pydantic = module("instructor"), module("openai"), module("pydantic")
    live.client = f"instructor {version('instructor')}"
    Sum = pydantic.create_model("Sum", a=(int, ...), b=(int, ...))
    live.llm.text = CALL.replace("add", "Sum") if "TOOLS" in mode else '{"a": 1, "b": 2}'
    plain = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
    with plain:
        client = package.from_openai(plain, mode=package.Mode[mode])
        found = client.chat.completions.create(model="scripted", messages=[USER], response_model=Sum, max_retries=0)
    assert (found.a, found.b) == (1, 2)
    assert "guide" in live.llm.options[-1]


MODELS = """\
- model_id: local
  model_name: scripted
  api_base: {url}/v1
  supports_tools: true
  supports_schema: true
"""


def test_llm(live, tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.setenv("LLM_LOAD_PLUGINS", "")  # those that are installed may need further packages
    package = module("llm")
    live.client = f"llm {version('llm')}"
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(url=live.url))
    model = package.get_model("local")
    model.key = "none"
    reply = model.prompt("Hi", system="Be brief.", max_tokens=50, seed=3)
    assert (reply.text(), reply.usage().output) == ("Hello", 5)
    assert model.prompt("Hi", stream=False).text() == "Hello"
    live.llm.text = '{"a": 1, "b": 2}'
    assert model.prompt("Add.", schema=package.schema_dsl("a int, b int")).text() == live.llm.text

    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    live.llm.write = lambda prompt: "Three." if "<|im_start|>tool" in prompt else CALL
    assert model.chain("Add.", tools=[add]).text() == "Three."
