"""`LLM.guide` and -j: replies that follow a JSON schema, a regular expression, choices or a grammar."""

import json
import re
from pathlib import Path

import pytest
import tiny_chat

import generate
from generate.__main__ import main

pytest.importorskip("llguidance", reason="extra: grammar")
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with generate.load(tiny_chat.write(tmp_path_factory.mktemp("model")), backend="numpy") as loaded:
        yield loaded


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("choices", ["yes", "no"], "yes|no"),
        ("choices", ['é\n"q"', "\\x😀"], re.escape('é\n"q"') + "|" + re.escape("\\x😀")),
        ("regex", r"[0-9]{3}/[ab]\/c", r"[0-9]{3}/[ab]/c"),
        ("regex", r"\\/", r"\\/"),
        ("regex", "a\nb", "a\nb"),
        ("regex", "é{2}", "éé"),
        ("grammar", 'start: "q" | /r{2}/', "q|rr"),
        ("grammar", 'root ::= "q" | [r]{2}', "q|rr"),
    ],
)
def test_a_reply_is_what_the_guide_allows(llm, kind, value, expected):
    guide = llm.guide(**{kind: value})
    for reply in llm.generate(["x"] * 3, temperature=1, max_tokens=40, guide=guide):
        assert re.fullmatch(expected, reply.text)
        assert reply.finish_reason == "stop"
    assert re.fullmatch(expected, llm.chat([{"role": "user", "content": "x"}], max_tokens=40, guide=guide).text)


def test_a_reply_is_json_of_the_schema(llm):
    assert json.loads(llm.generate("x", max_tokens=99, guide=llm.guide(schema=SCHEMA)).text)["a"] in (1, 22)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, r"^a guide takes one of schema, regex, choices, grammar; given: none"),
        ({"regex": "a", "choices": ["b"]}, r"given: regex, choices"),
        ({"choices": []}, r"^choices is \[\]; it must be a list of texts, none of them empty"),
        ({"choices": "yes"}, r"^choices is 'yes'"),
        ({"regex": 5}, r"^regex is 5; it must be text"),
        ({"schema": "x"}, r"^schema is 'x'; it must be a dict, or True for any JSON"),
        ({"schema": {"type": "foo"}}, r"^the JSON schema of the reply is not supported: Invalid type: foo"),
        ({"regex": "("}, r"^the grammar is not supported: .*unclosed group"),
    ],
)
def test_wrong_arguments_are_named(llm, given, says):
    with pytest.raises(generate.UsageError, match=says):
        llm.guide(**given)


def test_the_command_line_takes_a_schema(tmp_path: Path, capsys):
    model = ["--model", str(tiny_chat.write(tmp_path / "model")), "--backend", "numpy", "--prompt", "x"]
    assert main([*model, "-j", json.dumps(SCHEMA)]) == 0
    assert json.loads(capsys.readouterr().out)["a"] in (1, 22)
    for schema, says in (
        ("{", "'{' is not JSON"),
        ("[]", "'[]' is not an object, as JSON schemas are"),
        ('{"type": "foo"}', "the JSON schema of the reply is not supported: Invalid type: foo"),
    ):
        assert main([*model, "-j", schema]) == 2
        assert says in capsys.readouterr().err


def test_the_command_line_takes_a_grammar(tmp_path: Path, capsys):
    model = ["--model", str(tiny_chat.write(tmp_path / "model")), "--backend", "numpy", "--prompt", "x"]
    file = tmp_path / "form.gbnf"
    file.write_text('root ::= "a" [0-3]{2}')
    for flags in (["--grammar", file.read_text()], ["--grammar-file", str(file)]):
        assert main([*model, *flags]) == 0
        assert re.fullmatch("a[0-3]{2}\n", capsys.readouterr().out)
    for flags, code, says in (
        (["--grammar", "root ::= ("], 2, "the grammar is"),
        (["--grammar-file", str(tmp_path / "none")], 1, "No such file"),
        (["--grammar", "start: /a/", "-j", "{}"], 2, "--json-schema and --grammar exclude each other"),
    ):
        assert main([*model, *flags]) == code
        assert says in capsys.readouterr().err


def test_a_reply_that_begins_with_reasoning_takes_no_schema(tmp_path: Path, capsys):
    template = tiny_chat.TEMPLATE.replace(
        "<|im_start|>assistant\n",
        "<|im_start|>assistant\n<think>{% if enable_thinking is false %}</think>{% endif %}",
    )
    folder = tiny_chat.write(tmp_path / "model", template=template)
    command = ["--model", str(folder), "--backend", "numpy", "--prompt", "x", "-j", json.dumps(SCHEMA)]
    assert main(command) == 2
    assert "begins replies with reasoning; give --no-think" in capsys.readouterr().err
    assert main([*command, "--no-think"]) == 0
    assert json.loads(capsys.readouterr().out)["a"] in (1, 22)
