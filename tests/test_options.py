"""Options of loading and of generating: what they accept, how they are refused, and what `help` shows of them."""

import inspect
import pydoc

import numpy as np
import pytest
import tiny_chat

import generate
from common.chat import chat_prompt
from common.errors import UsageError
from common.options import RESERVED, ChatOptions, GenerationOptions, LoadOptions, Options, Sampling, TextOptions
from generate.llm import LLM

METHODS = {
    "stream": TextOptions,
    "generate": TextOptions,
    "astream": TextOptions,
    "agenerate": TextOptions,
    "stream_chat": ChatOptions,
    "chat": ChatOptions,
    "astream_chat": ChatOptions,
    "achat": ChatOptions,
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with generate.load(tiny_chat.write(tmp_path_factory.mktemp("tiny")), backend="numpy") as llm:
        yield llm


@pytest.mark.parametrize("kind", [Sampling, GenerationOptions, TextOptions, ChatOptions, LoadOptions])
def test_none_is_the_default_of_every_option(kind):
    assert kind(**dict.fromkeys(kind.__dataclass_fields__)) == kind()


WRONG = {
    "temperature": ("0.5", float("nan"), float("inf"), 10**400, -1, True, [1.0]),
    "top_p": ("x", 0, 1.5),
    "top_k": (1.5, -1, "4"),
    "min_p": (1, -0.1),
    "repetition_penalty": (0, "1"),
    "frequency_penalty": (float("-inf"), "x"),
    "presence_penalty": (float("nan"), {}),
    "guide": (5, "json"),
    "reweigh": (5, "infill"),
    "logit_bias": ({"1": 1.0}, {-1: 1.0}, {1: float("nan")}, [1]),
    "seed": ("x", 1.5, -1, False),
    "max_tokens": ("x", 0, 2.0, True),
    "stop": (5, [""], "", b"x", ["a", 5]),
    "logprobs": (True, -1, "3"),
    "priority": ("high", 1.5, True, 2**31),
    "on_prefill": (5,),
    "spec": ("trees", 5, True),
    "tree_budget": (0, "auto"),
    "tree_topk": (0, 1.5),
    "chain_seed": ("yes", 1),
    "wedlm_preset": ("slow", 1),
    "wedlm_window": (0, 69, 1.5),
    "wedlm_tau": (float("nan"), -0.1, "0.4"),
    "wedlm_lambda": (float("nan"), float("inf"), -1),
    "wedlm_verify": ("yes", 1),
    "wedlm_order": ("engine", 0),
    "wedlm_sure": (float("nan"), -0.1, "0.1"),
    "think": ("yes", 1),
    "parse_special": ("yes", 1),
    "tools": (5, "weather"),
    "template": ([("a", 1)], "x", {1: 2}, {"tools": []}, {"messages": []}, {"template": "x"}, {"self": 1}),
}
WRONG_LOADING = {
    "cache_memory": (-1, 1.5, "some"),
    "cache_dir": (5, ""),
    "cache_disk": (0, "20 apples"),
    "backend": (5, b"numpy"),
    "ctx": (0, True, 1.5, "4096"),
    "progress": ("yes",),
    "draft": (5, b"demo", ""),
    "adapter": (5, "", ["a", 1]),
    "attention_window": (0, 2.5),
    "max_kv_size": (0, "8"),
    "devices": (0, "01", (0, True), (-1,)),
    "split": ("1,3", (1, 0), (1, "3")),
    "draft_device": (-1, "1"),
    "tensor_parallel": (1, 2.5),
    "parallel": (0, 2.5),
    "queue": (0, "all"),
    "reranker": ("yes", 1),
    "cache_type_k": ("q9", 8),
    "cache_type_v": ("native", ["q8_0"]),
    "kv": ("q8_0", 8),
    "kv_rotate_k": ("yes",),
    "kv_rotate_v": (1,),
    "kv_sinks": (-1, 1.5),
    "kv_recent": ("all",),
    "kv_calibration": (-1, 3, 63, 64.0),
    "kv_boundary": (-1, True),
    "stream_experts": ("yes", 1),
    "expert_cache": (0, "lots", "8 gigs", 1.5),
    "memory": (-1, "much", True),
    "expert_pack": (5, ""),
    "expert_profile": (b"p", ""),
    "spark": ("yes", 1),
    "expert_vram": (0, "lots", 1.5),
}


def test_every_option_has_a_wrong_value_here():
    assert set(WRONG) == set(ChatOptions.__dataclass_fields__)
    assert set(WRONG_LOADING) == set(LoadOptions.__dataclass_fields__)


def test_a_templates_variables_are_no_arguments_of_the_prompt():
    assert {*RESERVED} == {*inspect.signature(chat_prompt).parameters, "self"}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_of_a_reply_is_named(llm, name, value):
    with pytest.raises(UsageError, match=f"^{name} is .*; it must be "):
        llm.stream_chat([{"role": "user", "content": "hello"}], **{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG_LOADING.items() for value in values]
)
def test_a_wrong_value_of_loading_is_named(name, value):
    with pytest.raises(UsageError, match=f"^{name} is .*; it must be "):
        generate.load("demo", **{name: value})


@pytest.mark.parametrize(
    "options",
    [{"max_tokens": -(10**5000)}, {"temperature": 10**5000}, {"logprobs": 10**5000}, {"logit_bias": {10**5000: 1}}],
)
def test_a_number_of_thousands_of_digits_is_named_by_its_type(llm, options):
    with pytest.raises(UsageError, match="<int>"):
        llm.generate("hello", **options)


@pytest.mark.parametrize("model", [5, None, b"demo", ""])
def test_a_model_is_a_name_or_a_path(model):
    with pytest.raises(UsageError, match=r"^model is .*; it must be a name or a path"):
        generate.load(model)


def test_numbers_of_numpy_are_numbers():
    options = GenerationOptions(
        temperature=np.float32(0.5), top_p=1, top_k=np.int64(4), stop=["a"], max_tokens=np.uint8(3)
    )
    assert [(type(v), v) for v in (options.temperature, options.top_p, options.top_k, options.max_tokens)] == [
        (float, 0.5),
        (float, 1.0),
        (int, 4),
        (int, 3),
    ]
    assert options.stop == GenerationOptions(stop="a").stop == ("a",)


@pytest.mark.parametrize(
    ("method", "name", "hint"),
    [
        ("generate", "max_new_tokens", "did you mean max_tokens?"),
        ("generate", "json_schema", "did you mean guide?"),
        ("chat", "response_format", "did you mean guide?"),
        ("generate", "n", "a list that has the prompt n times gives n replies"),
        ("generate", "system", "chat takes"),
        ("generate", "tempreature", "did you mean temperature?"),
        ("generate", "top_logprobs", "did you mean logprobs?"),
        ("stream", "n_ctx", "ctx is an option of load"),
        ("generate", "temp", "did you mean temperature?"),
        ("chat", "stream", "stream(prompt) and stream_chat(messages) give a reply in pieces"),
        ("generate", "tools", "tools is an option of chat"),
        ("chat", "enable_thinking", "did you mean think?"),
        ("chat", "xyzzy", "its options are temperature, top_p"),
        ("load", "n_ctx", "did you mean ctx?"),
        ("load", "fa_window", "did you mean attention_window?"),
        ("load", "contex", "did you mean ctx?"),  # nearest to another program's name
        ("load", "modle", "did you mean model?"),
        ("generate", "promt", "did you mean prompt?"),
        ("load", "temperature", "temperature is an option of generate"),
    ],
)
def test_an_unknown_name_is_a_type_error_with_the_nearest(llm, method, name, hint):
    call, argument = (generate.load, "demo") if method == "load" else (getattr(llm, method), "hello")
    with pytest.raises(TypeError) as refused:
        call(argument, **{name: 1})
    assert str(refused.value).startswith(f"{method}() has no option {name}; {hint}")


@pytest.mark.parametrize("method", METHODS)
def test_help_shows_every_option_with_type_default_and_meaning(llm, method):
    shown, options = inspect.signature(getattr(llm, method)), METHODS[method]
    assert list(shown.parameters)[1:] == list(options.__dataclass_fields__)
    for name, field in options.__dataclass_fields__.items():
        parameter = shown.parameters[name]
        assert (parameter.kind, parameter.default) == (inspect.Parameter.KEYWORD_ONLY, field.default)
        assert parameter.annotation == field.type
    page = " ".join(pydoc.plain(pydoc.render_doc(getattr(llm, method))).split())
    assert all(" ".join(field.metadata["meaning"].split()) in page for field in options.__dataclass_fields__.values())
    assert inspect.iscoroutinefunction(getattr(LLM, method)) == (method in ("agenerate", "achat"))


def test_help_of_load():
    shown = inspect.signature(generate.load).parameters
    assert list(shown) == ["model", *LoadOptions.__dataclass_fields__]
    assert shown["model"].default == "demo"
    assert "context length: most tokens" in generate.load.__doc__


def test_load_without_a_model_is_the_demo(monkeypatch):
    monkeypatch.setattr("generate.llm.LLM", lambda *args: args)
    assert generate.load() == ("demo", LoadOptions())
    assert generate.load(ctx=64) == ("demo", LoadOptions(ctx=64))
    assert generate.load(model="x", ctx=None) == ("x", LoadOptions())


def test_arguments_are_bound_as_pythons_own(llm):
    assert llm.generate(prompt="hello", max_tokens=2).tokens == llm.generate("hello", max_tokens=2).tokens
    with pytest.raises(TypeError, match="missing a required argument: 'prompt'"):
        llm.generate(max_tokens=2)
    with pytest.raises(TypeError, match=r"generate\(\) takes prompt by position; options are given by name"):
        llm.generate("hello", 2)


def test_options_cannot_be_changed():
    options: Options = GenerationOptions()
    with pytest.raises(AttributeError):
        options.seed = 1
