"""/infill as llama.cpp's server has it, what editors send to it, and `suffix` of the other APIs."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_chat
from conftest import client_of
from wires import sse

import generate
from common.errors import UsageError
from common.infill import Gap, certain
from common.options import Sampling
from common.sampling import draw_weights
from generate.server import line_limits
from generate.server.fields import Fields
from generate.server.line_limits import LineLimits
from generate.server.llama_cpp import chosen

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "fim_golden.json").read_text())
CONTEXT, LIMIT = 4096, 128  # as in make_fim_golden.py
EDITOR = {"input_prefix": "def add(a, b):\n", "input_suffix": "\n\nprint(add(1, 2))\n", "prompt": "    ret"}


@pytest.fixture(scope="module", params=GOLDEN)
def golden(request, tmp_path_factory):
    """A client of a tiny model, and what llama.cpp answered with it."""
    names = tiny_chat.FIM if request.param == "repository" else tiny_chat.FIM[:3]
    folder = tiny_chat.write(tmp_path_factory.mktemp("fim"), fim=names, context=CONTEXT)
    with generate.load(folder, backend="numpy") as llm:
        yield client_of(llm, "tiny", options={"max_tokens": LIMIT}), GOLDEN[request.param]


@pytest.fixture(scope="module")
def editor(tmp_path_factory):
    folder = tiny_chat.write(tmp_path_factory.mktemp("fim"), fim=tiny_chat.FIM, context=CONTEXT)
    with generate.load(folder, backend="numpy") as llm:
        yield client_of(llm, "tiny")


def ask(client, **fields):
    response = client.post("/infill", json=EDITOR | {"n_predict": 8} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def gap_of(sent):
    files = [(each["filename"], each["text"]) for each in sent["input_extra"]]
    return Gap(sent["input_prefix"], sent["input_suffix"], sent["prompt"], files)


def test_prompts_and_replies_are_those_of_llama_cpp(golden):
    client, expected = golden
    for case in expected["answers"]:
        sent, answer = case["sent"], case["answer"]
        tokens = client.llm.prepare(gap_of(sent)).tokens
        assert client.llm.tokenizer.decode(tokens) == answer["prompt"]
        found = ask(client, **sent)
        whole = answer["content"].removesuffix("\ufffd")  # llama.cpp shows a part of a character at the end
        assert found["content"].removesuffix("\ufffd") == whole
        kept = ("stop_type", "stopping_word", "tokens_evaluated", "has_new_line", "truncated")
        assert {key: found[key] for key in kept} == {key: answer[key] for key in kept}
    assert {case["answer"]["stop_type"] for case in expected["answers"]} >= {"limit"}


def test_the_sampler_infill_keeps_the_tokens_that_llama_cpp_keeps(golden):
    client, expected = golden
    tokenizer, reweigh = client.llm.tokenizer, certain(client.llm.tokenizer)
    several = 0
    for draw in expected["draws"]:
        row = client.llm.logits(tokenizer.encode(draw["prompt"]))[-1]
        row[[int(id) for id in expected["bias"]]] += np.array([*expected["bias"].values()], np.float32)
        kept = np.flatnonzero(reweigh(draw_weights(row, Sampling(temperature=1.0, top_k=40, top_p=0.9))))
        assert kept.tolist() == draw["candidates"]
        several += len(kept) > 1
    assert several


VIM = {  # llama.vim a1c8e6e
    "id_slot": 0,
    "input_extra": [{"text": "import os\n", "time": [1, 2], "filename": "a.py"}],
    "n_predict": 16,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.9,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 250,
    "response_fields": [
        "content",
        *(f"timings/prompt_{name}" for name in ("n", "ms", "per_token_ms", "per_second")),
        *(f"timings/predicted_{name}" for name in ("n", "ms", "per_token_ms", "per_second")),
        "truncated",
        "tokens_cached",
    ],
}
VSCODE = {  # llama.vscode 3938fb3
    "id_slot": 0,
    "input_extra": [{"text": "import os\n", "time": 1732881600000, "filename": "/home/a.py"}],
    "n_predict": 16,
    "n_cmpl": 3,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "n_indent": 4,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 2500,
}


def test_llama_vim(editor):
    found = ask(editor, **VIM)
    assert list(found) == VIM["response_fields"]
    assert found["timings/prompt_n"] > 0
    ahead = {"input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "temperature": 0.0, "samplers": []}
    assert ask(editor, **VIM | ahead | {"t_max_predict_ms": 1, "response_fields": [""]}) == {}


def test_llama_vscode(editor):
    found = ask(editor, **VSCODE)
    assert [each["index"] for each in found] == [0, 1, 2]
    assert all(each["generation_settings"]["n_ctx"] == CONTEXT for each in found)
    [one] = [ask(editor, **VSCODE | {"n_cmpl": 1})]
    assert one["content"] is not None
    assert one["timings"]["prompt_per_second"] > 0


def test_n_predict_0_reads_the_prompt_alone(editor):
    files = [{"filename": "b.py", "text": "x = 1\n" * 60}]
    first = ask(editor, input_extra=files, n_predict=0)
    assert (first["content"], first["stop_type"]) == ("", "limit")
    assert ask(editor, input_extra=files)["timings"]["cache_n"] > 300


def test_one_more_character_reads_neither_other_files_nor_the_prefix_again(editor):
    files = [{"filename": "c.py", "text": "y = 2\n" * 50}]
    prefix = "def f(x):\n" * 30
    read = len(editor.llm.prepare(Gap(prefix, "", "", [("c.py", files[0]["text"])])).tokens) - 2  # but SUF and MID
    ask(editor, input_extra=files, input_prefix=prefix)
    for line in ("    retu", "    retur", "    return"):
        assert ask(editor, input_extra=files, input_prefix=prefix, prompt=line)["timings"]["cache_n"] >= read
    longer = ask(editor, input_extra=files, input_prefix=f"{prefix}    return x\n", prompt="")
    assert longer["timings"]["cache_n"] >= read - 256  # another line continues at a multiple of 256 tokens
    alone = client_of(editor.llm, "tiny")
    assert (
        longer["content"] == ask(alone, input_extra=files, input_prefix=f"{prefix}    return x\n", prompt="")["content"]
    )


def test_a_stream_has_the_text_of_a_whole_reply(editor):
    whole = ask(editor, temperature=0, n_predict=24)
    response = editor.post("/infill", json=EDITOR | {"temperature": 0, "n_predict": 24, "stream": True})
    *parts, last = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert not any(part["stop"] for part in parts)
    assert last["stop"]
    assert last["content"] == ""
    timed = ("timings", "generation_settings", "content")
    assert {k: v for k, v in last.items() if k not in timed} == {k: v for k, v in whole.items() if k not in timed}


@pytest.mark.parametrize("name", [*tiny_chat.FIM, tiny_chat.END])
def test_a_reply_ends_at_each_token_of_the_prompts_layout(editor, name):
    id = editor.llm.tokenizer.token_to_id(name)
    found = ask(editor, logit_bias={str(id): 100}, temperature=0)
    assert (found["content"], found["stop_type"], found["tokens_predicted"]) == ("", "eos", 1)


def test_a_model_of_windows_decodes_one_token_at_a_time_with_the_sampler(tmp_path):
    folder = tiny_chat.write(tmp_path, fim=tiny_chat.FIM, masked=True, context=CONTEXT)
    with generate.load(folder, backend="numpy") as llm:
        with pytest.raises(UsageError, match="out of order, which reweigh cannot follow; choose spec off"):
            llm.generate("a", reweigh=certain(llm.tokenizer))
        client = client_of(llm, "tiny")
        assert ask(client, **VIM)["timings/prompt_n"] > 0
        assert ask(client)["tokens_predicted"] > 0


def test_samplers_leave_out_the_options_of_others(editor):
    given = {"top_k": 3, "top_p": 0.5, "temperature": 0, "repeat_penalty": 1.5}
    options = chosen(Fields(given | {"samplers": ["top_k", "infill"]}), editor.llm.tokenizer)
    assert options.pop("reweigh") is not None
    penalties = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    assert options == penalties | {"temperature": 1.0, "top_k": 3, "top_p": 1.0, "min_p": 0.0}
    given["repetition_penalty"] = given.pop("repeat_penalty")
    assert chosen(Fields(given), editor.llm.tokenizer) == given


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": None}, "input_suffix"),
        ({"input_suffix": 5}, "input_suffix"),
        ({"prompt": ["a"]}, "prompt"),
        ({"input_extra": {"text": "a"}}, "input_extra"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
        ({"input_extra": [{"text": "a", "filename": 5}]}, "input_extra[0].filename"),
        ({"samplers": ["top_z"]}, "samplers"),
        ({"samplers": "top_k"}, "samplers"),
        ({"n_indent": -1}, "n_indent"),
        ({"n_cmpl": 0}, "n_cmpl"),
        ({"lora": [{"id": 0, "scale": 0.5}]}, "lora"),
        ({"n_probs": -1}, "n_probs"),
        ({"n_probs": 3, "post_sampling_probs": True}, "post_sampling_probs"),
        ({"xtc_probability": 0.5}, "xtc_probability"),
        ({"response_fields": "content"}, "response_fields"),
    ],
)
def test_wrong_fields_are_named(editor, fields, param):
    refused = editor.post("/infill", json=EDITOR | fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_a_model_without_the_tokens_is_refused(client):
    refused = client.post("/infill", json=EDITOR)
    assert refused.status_code == 501
    assert refused.json()["error"]["type"] == "not_supported_error"
    words = "its tokenizer lacks <|fim_prefix|>, <|fim_suffix|>, <|fim_middle|>"
    assert words in refused.json()["error"]["message"]
    for path, fields in (("/v1/completions", {"prompt": "a"}), ("/api/generate", {"prompt": "a"})):
        refused = client.post(path, json=fields | {"suffix": "b"})
        assert refused.status_code == 400
        assert words in refused.text
    assert "insert" not in client.post("/api/show", json={"model": "demo"}).json()["capabilities"]


def test_a_line_that_is_never_cut_may_be_too_long(editor):
    refused = editor.post("/infill", json=EDITOR | {"prompt": "x" * 5000})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


# -- limits by lines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "indent", "shown"),
    [
        ("a\n    b\n  c\n", 4, "a\n    b\n  "),
        ("a\n\tb\nc", 1, "a\n\tb\n"),
        ("a\n\n    b", 4, "a\n"),  # an empty line, as in llama.cpp
        ("a\n    b", 4, "a\n    b"),
        ("a\n  ", 4, "a\n  "),
        ("a\nb", 0, "a\nb"),
    ],
)
@pytest.mark.parametrize("cut", [1, 2, 3, 99])
def test_a_reply_ends_at_a_line_with_less_indentation(text, indent, shown, cut):
    limits, found = LineLimits(indent), ""
    for at in range(0, len(text), cut):
        if not limits.is_over:
            found += limits.push(text[at : at + cut])
    assert found == shown
    assert limits.is_over == (shown != text)


def test_a_reply_ends_with_a_line_after_its_time(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(line_limits.time, "perf_counter", lambda: clock[0])
    limits = LineLimits(seconds=0.25)
    for text, now, is_over in (("a\n", 0, False), ("b\n", 0.2, False), ("c", 0.3, False), ("d\n", 0.4, True)):
        clock[0] = now
        assert limits.push(text) == text
        assert limits.is_over == is_over


def test_t_max_predict_ms_ends_a_reply_after_a_line(editor):
    newline = editor.llm.tokenizer.encode("\n")[0]
    found = ask(editor, n_predict=3000, t_max_predict_ms=50, logit_bias={str(newline): 100}, temperature=0)
    assert found["stop_type"] == "limit"
    assert not found["truncated"]
    assert len(found["content"]) < 3000
    assert {*found["content"]} == {"\n"}


# -- suffix of other APIs ----------------------------------------------------------------------------------------------


def test_suffix_of_completions(editor):
    expected = editor.llm.generate("def add(", suffix="): pass", temperature=0, max_tokens=9)
    fields = {"prompt": "def add(", "suffix": "): pass", "temperature": 0, "max_tokens": 9}
    body = editor.post("/v1/completions", json=fields).json()
    assert body["choices"][0]["text"] == expected.text
    assert body["usage"]["prompt_tokens"] == expected.stats.prompt_tokens
    ids = editor.llm.tokenizer.encode("def add(")
    for prompt in ([ids], ["def add("], ids):
        again = editor.post("/v1/completions", json=fields | {"prompt": prompt}).json()
        assert again["choices"][0]["text"] == expected.text
    chunks = sse(editor.post("/v1/completions", json=fields | {"stream": True}))
    assert "".join(c["choices"][0]["text"] for c in chunks) == expected.text
    assert editor.post("/v1/completions", json=fields | {"prompt": ""}).status_code == 200
    assert editor.post("/v1/completions", json=fields | {"prompt": "", "suffix": ""}).status_code == 400
    refused = editor.post("/v1/completions", json=fields | {"echo": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")


def test_suffix_of_ollama(editor):
    expected = editor.llm.generate("def add(", suffix="): pass", temperature=0, max_tokens=9)
    fields = {
        "prompt": "def add(",
        "suffix": "): pass",
        "stream": False,
        "options": {"temperature": 0, "num_predict": 9},
    }
    found = editor.post("/api/generate", json=fields).json()
    assert found["response"] == expected.text
    assert found["prompt_eval_count"] == expected.stats.prompt_tokens
    assert "insert" in editor.post("/api/show", json={"model": "tiny"}).json()["capabilities"]
    refused = editor.post("/api/generate", json=fields | {"system": "Be brief."})
    assert refused.status_code == 400
    assert "system" in refused.json()["error"]
