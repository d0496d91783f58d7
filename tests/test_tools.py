"""Replies split into reasoning, text and tool calls, in every syntax, wherever a piece may end."""

import asyncio
import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_chat import write as write_model
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

import generate
from common.chat import render
from common.errors import BimetalError, UsageError
from common.pieces import Piece, Stats
from common.reply import Parts, ReplyParser
from common.tokenizer import Tokenizer
from common.tools import GLM, HERMES, QWEN_XML, find_syntax, typed
from generate import terminal
from generate.__main__ import main
from generate.terminal import Waiting

GOLDEN = json.loads((Path(__file__).parent / "data" / "chat_golden.json").read_text(encoding="utf-8"))
TEMPLATES = {name: golden["template"] for name, golden in GOLDEN["templates"].items()}

# What find_syntax looks for, without any thinking.
HERMES_TEMPLATE = '{{ tools }}<tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call>'
QWEN_TEMPLATE = "{{ tools }}<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>"
GLM_TEMPLATE = "{{ tools }}<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>"
THINKING = "{% if enable_thinking %}<think>{% endif %}</think>"

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "flag": {"type": "boolean"},
                    "more": {"type": "object"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


def qwen(name, arguments):
    values = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def glm(name, arguments):
    pairs = (f"<arg_key>{key}</arg_key><arg_value>{plain(value)}</arg_value>" for key, value in arguments.items())
    return f"<tool_call>{name}{''.join(pairs)}</tool_call>"


def glm_lines(name, arguments):
    """GLM-4.6 and Laguna put line breaks between the tags."""
    pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n" for key, value in arguments.items())
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


def plain(value):
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


WRITERS = {
    "hermes": (HERMES_TEMPLATE, hermes),
    "qwen": (QWEN_TEMPLATE, qwen),
    "glm": (GLM_TEMPLATE, glm),
    "glm, lines": (GLM_TEMPLATE, glm_lines),
}
SYNTAXES = pytest.mark.parametrize(("template", "call"), WRITERS.values(), ids=WRITERS)

ARGUMENTS = {
    "none": {},
    "plain": {"path": "a.py", "count": 3},
    "every type": {"count": -7, "flag": True, "more": {"a": [1, None, {"b": "c"}]}, "text": "3"},
    "nested quotes": {"text": """He said: "she said: 'it\\'s \\"it\\"'" `x` \\n""", "more": {"a": 'b "c" \\'}},
    "angle brackets": {"text": "if a < b and c > d: x = <b>y</b> <!-- </ --> <<>>", "more": {"<k>": "</v>"}},
    "unicode": {"path": "Zürich/東京", "text": "🏔️ é e\u0301 \u2028 \u00a0", "more": {"ключ": "ζ"}},
    "white space": {"text": "    indented\n\n\ttab  \n", "path": " "},
    "empty strings": {"text": "", "path": ""},
    "the syntaxes themselves": {
        "text": hermes("now", {}) + qwen("edit", {"path": "p"}) + glm("now", {"a": "b"}),
        "count": 1,
    },
    "closing tags alone": {"text": "ends </tool_call> or </parameter> or </arg_value> or </function> here", "count": 1},
    "thinking": {"text": "<think>no</think>", "path": "</think>"},
}


def take(template, pieces, tools=TOOLS, prompt=""):
    """The parts of a reply that arrives in `pieces`, and the parts after each piece."""
    parser, parts, seen = ReplyParser(template, prompt, tools), Parts(), []
    for piece in pieces:
        parser.push(piece, parts)
        seen.append((parts.text, parts.reasoning, len(parts.tool_calls)))
    parser.finish(parts)
    return parts, seen


def calls(parts):
    """Names and arguments of calls, after the other fields are checked."""
    for index, call in enumerate(parts.tool_calls):
        assert (call["index"], call["type"], set(call)) == (index, "function", {"index", "id", "type", "function"})
        assert re.fullmatch("call_[0-9a-f]{24}", call["id"])
    assert len({call["id"] for call in parts.tool_calls}) == len(parts.tool_calls)
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in parts.tool_calls]


def everywhere(template, text, expected, tools=TOOLS, prompt=""):
    """Check that `text` in one piece, in two cut anywhere, and by character gives (text, reasoning, calls)."""
    cuts = [[text], list(text), *([text[:at], text[at:]] for at in range(len(text) + 1))]
    for pieces in cuts:
        parts, seen = take(template, pieces, tools, prompt)
        assert (parts.text, parts.reasoning, calls(parts)) == expected, pieces[0]
        for shown, thought, _ in seen:
            assert expected[0].startswith(shown)
            assert expected[1].startswith(thought)


# -- calls -------------------------------------------------------------------------------------------------------------


@SYNTAXES
@pytest.mark.parametrize("label", ARGUMENTS)
def test_a_call_comes_out_of_the_text(template, call, label):
    everywhere(template, call("edit", ARGUMENTS[label]), ("", "", [("edit", ARGUMENTS[label])]))


@SYNTAXES
def test_two_calls_and_text_around_them(template, call):
    first, second = ARGUMENTS["plain"], ARGUMENTS["angle brackets"]
    both = [("edit", first), ("now", {})]
    everywhere(
        template,
        f"Let me <b>look</b>.\n\n{call('edit', first)}\n{call('now', {})}\n",
        ("Let me <b>look</b>.", "", both),
    )
    everywhere(template, call("edit", first) + call("now", {}), ("", "", both))
    between = f" a\n{call('edit', first)}\n\nb {call('edit', second)} c\n"
    everywhere(template, between, (" a\n\nb c\n", "", [("edit", first), ("edit", second)]))


@SYNTAXES
def test_a_call_is_there_with_its_last_character(template, call):
    text = "Look.\n" + call("edit", ARGUMENTS["the syntaxes themselves"])
    _, seen = take(template, text)
    assert [found for _, _, found in seen] == [0] * (len(text) - 1) + [1]
    assert seen[5][0] == "Look."


@SYNTAXES
@pytest.mark.parametrize("label", ["plain", "the syntaxes themselves", "closing tags alone"])
def test_a_truncated_call_is_text(template, call, label):
    whole = "Look: " + call("edit", ARGUMENTS[label])
    for end in range(len(whole)):
        parts, _ = take(template, whole[:end])
        assert (parts.text, parts.tool_calls) == (whole[:end], [])


MALFORMED = {
    HERMES_TEMPLATE: [
        "<tool_call></tool_call>",
        "<tool_call>\n\n</tool_call>",
        "<tool_call> is the tag that opens a call </tool_call>",
        '<tool_call>{"name": "now"</tool_call>',
        '<tool_call>{"name": "now", "arguments": {}}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {},}</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "now", "arguments": null}</tool_call>',
        '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a b", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>{'name': 'now', 'arguments': {}}</tool_call>",
        '<tool_call>[{"name": "now", "arguments": {}}]</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>",
        '<tool_call>{"name": "now", "arguments": {"a": ' + "[" * 100_000 + "}}</tool_call>",
        '<tool_call>{"name": "now", "arguments": {"a": "open}}</tool_call> and on',
        "<tool_call>now</tool_call>",
        qwen("now", {}),
    ],
    QWEN_TEMPLATE: [
        "<tool_call></tool_call>",
        "<tool_call> is the tag that opens a call </tool_call>",
        "<tool_call><function=now></tool_call>",
        "<tool_call><function=></function></tool_call>",
        "<tool_call><function=a b></function></tool_call>",
        "<tool_call><function=now</function></tool_call>",
        "<tool_call><function=now></function></function></tool_call>",
        "<tool_call><function=now></function> and</tool_call>",
        "<tool_call><function=now>1</function></tool_call>",
        "<tool_call><function=now><parameter=></parameter></function></tool_call>",
        "<tool_call><function=now><parameter=a>1</function></tool_call> and on",
        "<tool_call><function=now><parameter=a>1</parameter></tool_call> and on",
        "<tool_call><function=now><parameter=a>1<parameter=b>2</parameter></function></tool_call> and on",
        "<tool_call><function=now><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
        "<tool_call><function=now><parameter a>1</parameter></function></tool_call>",
        '<tool_call><function=edit><parameter=more>{"a": NaN}</parameter></function></tool_call>',
        "<function=absent></function>",
        "<function=now></function> and on",
        "<function=now><parameter=a>",
        hermes("now", {}),
    ],
    GLM_TEMPLATE: [
        "<tool_call></tool_call>",
        "<tool_call> is the tag that opens a call </tool_call>",
        "<tool_call>now<arg_key>a</arg_key></tool_call>",
        "<tool_call>now<arg_value>a</arg_value></tool_call>",
        "<tool_call>now<arg_key></arg_key><arg_value>1</arg_value></tool_call>",
        "<tool_call>now<arg_key>a</arg_key>1<arg_value>1</arg_value></tool_call>",
        "<tool_call>now<arg_key>a</arg_key><arg_value>1</tool_call> and on",
        "<tool_call>now<arg_key>a</arg_key><arg_value>1</arg_value>and</tool_call>",
        "<tool_call>now<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>2</arg_value></tool_call>",
        "<tool_call><arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
        '<tool_call>edit<arg_key>more</arg_key><arg_value>{"a": NaN}</arg_value></tool_call>',
        hermes("now", {}),
        qwen("now", {}),
    ],
}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        pytest.param(template, text, id=f"{find_syntax(template).lead}-{at}")
        for template, texts in MALFORMED.items()
        for at, text in enumerate(texts)
    ],
)
def test_a_malformed_call_is_text(template, text):
    for shown in (text, f"Look:\n{text}\n"):
        if len(text) < 1000:
            everywhere(template, shown, (shown, "", []))
        parts, _ = take(template, [shown])
        assert (parts.text, parts.tool_calls) == (shown, [])


@SYNTAXES
def test_a_call_after_a_malformed_one(template, call):
    text = "<tool_call>{no}</tool_call>"
    everywhere(template, f"{text}\n{call('now', {})}", (text, "", [("now", {})]))


@SYNTAXES
def test_text_that_can_become_no_call_is_shown_at_once(template, call):
    _, seen = take(template, ["a <too", "l_box> b", " c"])
    assert [text for text, _, _ in seen] == ["a", "a <tool_box> b", "a <tool_box> b c"]
    if template != GLM_TEMPLATE:
        _, seen = take(template, ["The tag <tool_call>", " opens", " it"])
        assert [text for text, _, _ in seen] == ["The tag", "The tag <tool_call> opens", "The tag <tool_call> opens it"]


def test_a_value_that_is_never_closed_calls_nothing_inside_it():
    inner = qwen("now", {})
    text = f"<tool_call>\n<function=edit>\n<parameter=text>\nFor example:\n{inner}\nor"
    everywhere(QWEN_TEMPLATE, text, (text, "", []))


def test_qwen_may_forget_the_opening_tag():
    bare = qwen("edit", ARGUMENTS["plain"]).removeprefix("<tool_call>\n")
    expected = [("edit", ARGUMENTS["plain"])]
    everywhere(QWEN_TEMPLATE, bare, ("", "", expected))
    everywhere(QWEN_TEMPLATE, bare.removesuffix("\n</tool_call>"), ("", "", expected))
    everywhere(QWEN_TEMPLATE, f"Look.\n{bare}\n{bare}", ("Look.", "", expected * 2))
    prose = "Write <function=name> and then <function=now"
    everywhere(QWEN_TEMPLATE, prose, (prose, "", []))


def test_line_breaks_inside_json_strings():
    text = '<tool_call>{"name": "edit", "arguments": {"text": "a\n\tb"}}</tool_call>'
    everywhere(HERMES_TEMPLATE, text, ("", "", [("edit", {"text": "a\n\tb"})]))


def test_qwen_values_lose_one_line_break_on_each_side():
    for written, value in (("a", "a"), ("\na\n", "a"), ("\n\na\n\n", "\na\n"), ("\n", ""), ("", ""), ("\n a", " a")):
        text = f"<tool_call><function=edit><parameter=text>{written}</parameter></function></tool_call>"
        everywhere(QWEN_TEMPLATE, text, ("", "", [("edit", {"text": value})]))


def test_without_tools_or_a_known_syntax_calls_are_text():
    for _, call in WRITERS.values():
        text = f"Look. {call('now', {})}\n"
        everywhere(HERMES_TEMPLATE, text, (text, "", []), tools=None)
        everywhere("{{ tools }}[TOOL_CALLS]", text, (text, "", []))


@pytest.mark.parametrize(
    ("name", "syntax"),
    [("GLM-4.7-Flash", GLM), ("Qwen-Qwen3-0.6B", HERMES), ("Qwen3.5-4B", QWEN_XML), ("poolside-Laguna-XS.2", GLM)],
)
def test_the_template_names_the_syntax(name, syntax):
    assert find_syntax(TEMPLATES[name]) is syntax


def test_templates_of_other_syntaxes():
    for template in ("", "{{ tools }}", "<seed:tool_call><function=f><parameter=p>", "<|tool_call>arguments"):
        assert find_syntax(template) is None


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({"name": "now"}, "tools is .* not a list"),
        (["now"], "tool 0 is 'now', not an object"),
        ([{"type": "function"}], "tool 0 is .* not an object whose function has a name"),
        ([{"function": "now"}], "tool 0 is .* not an object whose function has a name"),
        ([{"function": {"name": "f", "parameters": [1]}}], r"the parameters of tool f are \[1\], not a JSON schema"),
    ],
)
def test_bad_tools(tools, message):
    with pytest.raises(UsageError, match=message):
        ReplyParser(HERMES_TEMPLATE, "", tools)


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "<function=now>", "<function=edit>", "</function>"),
        *("<parameter=text>", "<parameter=a>", "</parameter>", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>"),
        *('{"name": "now", "arguments": {"a": "', '"}}', '{"name": "now"}', '"', "now", "<", ">", "\n", " ", "x", "é"),
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_text_in_any_pieces(data):
    text = "".join(data.draw(st.lists(FRAGMENTS, max_size=14)))
    template = data.draw(st.sampled_from([HERMES_TEMPLATE, QWEN_TEMPLATE, GLM_TEMPLATE])) + data.draw(
        st.sampled_from(["", THINKING])
    )
    prompt = data.draw(st.sampled_from(["", "<think>\n"]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, _ = take(template, [text], prompt=prompt)
    parts, _ = take(template, pieces, prompt=prompt)
    assert (parts.text, parts.reasoning, calls(parts)) == (whole.text, whole.reasoning, calls(whole))
    if not whole.tool_calls and "<think>" not in template:
        assert whole.text == text


# -- values ------------------------------------------------------------------------------------------------------------

DEFS = {"$defs": {"Town": {"enum": ["Ulm", "Bern"]}, "Loop": {"$ref": "#/$defs/Loop"}, "Many": {"type": "array"}}}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, " null ", " null "),
        ({"type": "string"}, '"quoted"', '"quoted"'),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, " -5\n", -5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "5.5", 5.5),
        ({"type": "integer"}, "many", "many"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "5.0", 5.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "False\n", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "null"}, "None", None),
        ({"type": "object"}, '{"a": [1, "b"]}', {"a": [1, "b"]}),
        ({"type": "object"}, "{'a': 1}", "{'a': 1}"),
        ({"type": "array"}, '["a\nb"]', ["a\nb"]),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "integer"]}, "true", "true"),
        ({"type": ["string", "boolean"]}, "true", True),
        ({"type": ["string", "integer"]}, "05", "05"),
        ({"type": ["string", "integer"]}, "5.5", "5.5"),
        ({"type": ["string", "number"]}, "5", 5),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, '["a"]', ["a"]),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, '{"a": 1}', '{"a": 1}'),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"$ref": "#/$defs/Town"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"$ref": "#/$defs/Town"}, {"type": "null"}]}, "7", "7"),
        ({"$ref": "#/$defs/Town"}, "true", "true"),
        ({"$ref": "#/$defs/Many"}, "[1]", [1]),
        ({"$ref": "#/$defs/Absent"}, "7", 7),
        ({"$ref": "#/$defs/Loop"}, "7", 7),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "1"}, "1", "1"),
        ({"type": "str"}, "x", "x"),
        ({"type": 5}, "5", 5),
        ({}, "5", 5),
        (None, "5", 5),
        (None, "05", "05"),
        (None, "None", None),
        (None, '"quoted"', '"quoted"'),
        (None, "Infinity", "Infinity"),
        (None, '{"a": 1}', {"a": 1}),
        (None, " a ", " a "),
        (True, "5", 5),
    ],
)
def test_the_schema_types_a_value(schema, text, value):
    got = typed(text, schema, DEFS)
    assert (got, type(got)) == (value, type(value))


def test_only_tagged_values_are_typed():
    everywhere(HERMES_TEMPLATE, hermes("edit", {"text": 5}), ("", "", [("edit", {"text": 5})]))
    for template, call in ((QWEN_TEMPLATE, qwen), (GLM_TEMPLATE, glm)):
        everywhere(template, call("edit", {"text": 5}), ("", "", [("edit", {"text": "5"})]))
        everywhere(template, call("absent", {"text": 5}), ("", "", [("absent", {"text": 5})]))


@pytest.mark.model
@pytest.mark.parametrize(
    "label", [label for label in ARGUMENTS if label not in ("the syntaxes themselves", "closing tags alone")]
)
def test_mlx_lm_reads_the_same_calls(label):
    from mlx_lm.tool_parsers import glm47, json_tools, qwen3_coder

    for parser, call in ((json_tools, hermes), (qwen3_coder, qwen), (glm47, glm), (glm47, glm_lines)):
        arguments = ARGUMENTS[label]
        if parser is glm47:  # it strips strings, which templates write as they are
            arguments = {key: value.strip() if isinstance(value, str) else value for key, value in arguments.items()}
        body = call("edit", arguments).removeprefix("<tool_call>").removesuffix("</tool_call>")
        assert parser.parse_tool_call(body.strip(), TOOLS) == {"name": "edit", "arguments": arguments}


# -- reasoning ---------------------------------------------------------------------------------------------------------

OPENED = "<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        (OPENED, "Hm.\n\nSo.\n</think>\n\nYes.", ("Yes.", "Hm.\n\nSo.")),
        (OPENED, "\n Hm. </think> Yes.\n", (" Yes.\n", "Hm.")),
        (OPENED, "</think>\n\n  Yes.", ("  Yes.", "")),
        (OPENED, "Hm. a < b </thin </ think> ", ("", "Hm. a < b </thin </ think>")),
        (OPENED, "Hm.</think>a</think>b<think>c", ("a</think>b<think>c", "Hm.")),
        (OPENED, "", ("", "")),
        (OPENED, " \n", ("", "")),
        ("<|assistant|><think>", "Hm.</think>Yes.", ("Yes.", "Hm.")),
        ("<|assistant|></think>", "\nYes. <think>", ("Yes. <think>", "")),
        ("<|assistant|>", "\n<think>Hm.</think>\nYes.", ("Yes.", "Hm.")),
        ("<|assistant|>", "<think>\n</think>\nYes.", ("Yes.", "")),
        ("<|assistant|>", "Yes <think>Hm.</think>", ("Yes <think>Hm.</think>", "")),
        ("<|assistant|>", "\n\n<b>Yes</b>", ("<b>Yes</b>", "")),
        ("<|assistant|>", "<thin", ("<thin", "")),
        ("<|assistant|>", " <thing>", (" <thing>", "")),
    ],
)
def test_reasoning_is_split_off(prompt, text, expected):
    everywhere(THINKING, text, (*expected, []), prompt=prompt)
    everywhere(THINKING, text, (*expected, []), prompt=prompt, tools=None)
    everywhere(QWEN_TEMPLATE + THINKING, text, (*expected, []), prompt=prompt)


def test_a_template_that_does_not_think_leaves_the_text_alone():
    text = "\n<think>Hm.</think>\nYes."
    everywhere(HERMES_TEMPLATE, text, (text, "", []), prompt=OPENED)


@SYNTAXES
def test_a_call_inside_the_reasoning_is_reasoning(template, call):
    inside = f"Shall I?\n{call('now', {})}\nYes."
    text = f"{inside}\n</think>\n\n{call('edit', {'count': 1})}\n"
    everywhere(template + THINKING, text, ("", inside, [("edit", {"count": 1})]), prompt=OPENED)


# -- templates ---------------------------------------------------------------------------------------------------------

END = re.compile(r"<\|im_end\|>|<\|observation\|>|</assistant>|\Z")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("reasoning", ["A train.", ""])
@pytest.mark.parametrize("label", ["tool call", "tool calls"])
def test_what_a_template_writes_is_read_back(name, reasoning, label):
    """The text after the prompt in a rendered conversation is the reply; as a message it renders to the same text."""
    conversation = GOLDEN["conversations"][label]
    messages, tools = conversation["messages"], conversation["tools"]
    at = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    options = {"tools": tools, "enable_thinking": bool(reasoning), "add_generation_prompt": False}
    messages = [*messages[:at], messages[at] | {"reasoning_content": reasoning}, *messages[at + 1 :]]
    prompt = render(TEMPLATES[name], messages[:at], **options | {"add_generation_prompt": True})
    whole = render(TEMPLATES[name], messages[: at + 2], **options)
    start = prompt.rstrip("\n")
    if not whole.startswith(start):
        start = prompt[: prompt.rindex("<think>")]  # Qwen3 leaves an empty <think> out of what is past
    assert whole.startswith(start)
    reply = whole[len(start) :]
    reply = reply[: END.search(reply).start()]
    parts, _ = take(TEMPLATES[name], reply, tools, prompt)
    expected = [(c["function"]["name"], c["function"]["arguments"]) for c in messages[at]["tool_calls"]]
    assert (parts.text.strip(), parts.reasoning, calls(parts)) == (messages[at]["content"], reasoning, expected)
    again = {"role": "assistant", "content": parts.text, "reasoning_content": reasoning, "tool_calls": parts.tool_calls}
    assert render(TEMPLATES[name], [*messages[:at], again, messages[at + 1]], **options) == whole


# -- end tokens --------------------------------------------------------------------------------------------------------

FAMILIES = {
    "Qwen": (["<|im_end|>", "<|endoftext|>"], ["<|im_start|>", "<|vision_start|>", "<tool_call>", "</think>"]),
    "GLM": (
        ["<|endoftext|>", "<|user|>", "<|observation|>"],
        ["[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "</think>"],
    ),
    "Laguna": (["〈|EOS|〉", "</assistant>"], ["<assistant>", "<user>", "</user>", "<think>", "</tool_call>"]),
    "Llama": (["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"], ["<|begin_of_text|>", "<|start_header_id|>"]),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_end_token_of_a_family_ends_a_reply(name):
    ends, others = FAMILIES[name]
    backend = Backend(models.BPE({"a": 0}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in (*ends, *others)])
    tokenizer = Tokenizer(backend, eos_id=backend.token_to_id(ends[0]))
    assert tokenizer.end_ids == {backend.token_to_id(token) for token in ends}


# -- the API and the command line --------------------------------------------------------------------------------------

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}"
    "<tool_call><function=f><parameter=p></parameter></function></tool_call>{% endif %}"
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}"
)
WEATHER = [
    {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}
]
ASK = [{"role": "user", "content": "hello"}]
CALL = qwen("weather", {"city": "Ulm"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("thinking"), template=CHAT)


def scripted(text, finish_reason="stop"):
    """Engine.submit of a model that writes `text`, one character per token."""

    def submit(call):
        for at, char in enumerate(text):
            call.put(Piece(char, tokens=[at]))
        stats = Stats(len(call.prompt), 0, len(text), 1.0, 1.0, 0, 0, 0)
        call.put(Piece(finish_reason=finish_reason, stats=stats))
        call.ended(None)

    return submit


@pytest.fixture
def llm(folder, monkeypatch):
    with generate.load(str(folder), backend="numpy") as llm:
        llm.say = lambda *args: monkeypatch.setattr(llm._engine, "submit", scripted(*args))
        yield llm


def test_a_reply_has_reasoning_text_and_calls(llm):
    text = f"Hm.\n</think>\n\nLet me look.\n\n{CALL}\n{CALL}"
    llm.say(text)
    reply = llm.chat(ASK, tools=WEATHER)
    assert (reply.reasoning, reply.text, reply.finish_reason) == ("Hm.", "Let me look.", "tool_calls")
    assert reply.tokens == list(range(len(text)))
    assert [call["function"] for call in reply.tool_calls] == [{"name": "weather", "arguments": '{"city": "Ulm"}'}] * 2
    assert [sorted(call) for call in reply.tool_calls] == [["function", "id", "type"]] * 2
    assert reply.message == {
        "role": "assistant",
        "content": "Let me look.",
        "reasoning_content": "Hm.",
        "tool_calls": reply.tool_calls,
    }
    result = {"role": "tool", "tool_call_id": reply.tool_calls[0]["id"], "content": "Rain."}
    assert "(Hm.)Let me look.UlmUlm<|im_end|>\n<|im_start|>tool\nRain." in llm.render([*ASK, reply.message, result])


def test_a_stream_has_them_piece_by_piece(llm):
    llm.say(f"Hm.</think>Look.{CALL}{CALL}")
    stream = llm.stream_chat(ASK, tools=WEATHER)
    pieces = list(stream)
    assert all(p.text or p.reasoning or p.tool_calls or p.finish_reason for p in pieces)
    assert [call["index"] for p in pieces for call in p.tool_calls] == [0, 1]
    assert [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + ["tool_calls"]
    assert "".join(p.text for p in pieces) == stream.text == "Look."
    assert "".join(p.reasoning for p in pieces) == stream.reasoning == "Hm."
    assert [t for p in pieces for t in p.tokens] == stream.tokens
    assert stream.reply().tool_calls == stream.tool_calls


def test_the_async_twin(llm):
    llm.say(f"Hm.</think>{CALL}")
    reply = asyncio.run(llm.achat(ASK, tools=WEATHER))
    assert (reply.reasoning, reply.text, reply.finish_reason) == ("Hm.", "", "tool_calls")


@pytest.mark.parametrize("reason", ["length", "cancelled"])
def test_a_reply_that_was_cut_says_so_even_after_a_call(llm, reason):
    llm.say(f"</think>Look.{CALL}\n<tool_call>\n<func", reason)
    reply = llm.chat(ASK, tools=WEATHER)
    assert (reply.text, len(reply.tool_calls), reply.finish_reason) == ("Look.\n<tool_call>\n<func", 1, reason)


def test_without_calls_the_reason_is_stop(llm):
    llm.say("Hm.</think>Yes.")
    reply = llm.chat(ASK, tools=WEATHER)
    assert (reply.text, reply.finish_reason, reply.tool_calls) == ("Yes.", "stop", [])
    assert "tool_calls" not in reply.message


def test_text_that_is_no_chat_is_left_alone(llm):
    text = f"Hm.</think>{CALL}"
    llm.say(text)
    assert llm.generate("<think>").text == text


def test_thinking_off(llm):
    assert llm.render(ASK).endswith("assistant\n<think>\n")
    assert llm.render(ASK, think=True).endswith("assistant\n<think>\n")
    assert llm.render(ASK, think=False).endswith("<think>\n\n</think>\n\n")
    llm.say("Yes.")
    assert (llm.chat(ASK, think=False).text, llm.chat(ASK).text) == ("Yes.", "")
    assert (llm.chat(ASK, think=False).reasoning, llm.chat(ASK).reasoning) == ("", "Yes.")
    assert llm.chat(ASK, template={"enable_thinking": False}).text == "Yes."


@pytest.mark.parametrize(
    ("template", "think", "message"),
    [
        ("{{ messages }}", True, "cannot turn thinking on"),
        ("{{ messages }}<think>", True, "cannot turn thinking on"),
        ("{{ messages }}<think>", False, "cannot turn thinking off"),
    ],
)
def test_a_template_without_the_switch(llm, monkeypatch, template, think, message):
    monkeypatch.setitem(llm.tokenizer.chat_templates, "default", template)
    with pytest.raises(UsageError, match=message):
        llm.chat(ASK, think=think)


def test_a_template_that_never_thinks_need_not_be_told(llm, monkeypatch):
    monkeypatch.setitem(llm.tokenizer.chat_templates, "default", "{{ messages }}")
    assert llm.render(ASK, think=False) == llm.render(ASK)


def test_a_template_of_its_own_for_tools(llm, monkeypatch):
    monkeypatch.setitem(llm.tokenizer.chat_templates, "default", "{{ messages }}")
    monkeypatch.setitem(llm.tokenizer.chat_templates, "tool_use", HERMES_TEMPLATE)
    llm.say(hermes("weather", {"city": "Ulm"}))
    assert llm.chat(ASK, tools=WEATHER).finish_reason == "tool_calls"
    monkeypatch.setitem(llm.tokenizer.chat_templates, "tool_use", "{{ tools }}[TOOL_CALLS]")
    assert llm.chat(ASK, tools=WEATHER).text == hermes("weather", {"city": "Ulm"})


def test_tools_are_spelled_out_where_the_template_has_no_place_for_them(llm, monkeypatch):
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    monkeypatch.setitem(llm.tokenizer.chat_templates, "default", template)
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    past = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Rain?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "dry"},
        {"role": "tool", "tool_call_id": "2", "content": "wet"},
    ]
    text = llm.render(past, tools=WEATHER)
    system, user, assistant, results = re.split(r"\[(?:system|user|assistant)\]", text)[1:]
    assert system.startswith("Be brief.\n\nYou may call functions")
    assert json.dumps(WEATHER[0]) in system
    assert user == "Rain?"
    assert assistant == hermes("weather", {"city": "Ulm"})
    assert results == "<tool_response>\ndry\n</tool_response>\n<tool_response>\nwet\n</tool_response>"
    assert llm.render(past[1:], tools=WEATHER).startswith("[system]You may call functions")
    parts, _ = take(template, [hermes("weather", {"city": "Ulm"})], WEATHER)
    assert json.loads(parts.tool_calls[0]["function"]["arguments"]) == {"city": "Ulm"}


def test_errors_reach_the_caller(llm):
    with pytest.raises(UsageError, match="tool 0 is 'weather'"):
        llm.chat(ASK, tools=["weather"])
    with pytest.raises(UsageError, match="tools is 5, not a list"):
        llm.render(ASK, tools=5)
    with pytest.raises(TypeError, match="tools is an option of chat"):
        llm.generate("hello", tools=WEATHER)
    with pytest.raises(BimetalError, match="message 0 is"):
        llm.chat(["hello"], tools=WEATHER)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_the_reasoning_dimmed(llm, monkeypatch):
    for out, shown in ((Terminal(), "\x1b[2mHm.\x1b[0m\n\nYes."), (io.StringIO(), "Yes.")):
        monkeypatch.setattr("sys.stdout", out)
        llm.say("Hm.\n</think>\nYes.")
        with llm.stream_chat(ASK) as stream:
            terminal.show(stream, Waiting())
        assert out.getvalue().replace("\x1b[0m\x1b[2m", "") == shown


def test_an_answer_that_never_came_is_said(llm, capsys):
    llm.say("Hm.", "length")
    with llm.stream_chat(ASK) as stream:
        terminal.show(stream, Waiting())
    assert capsys.readouterr() == ("", "the reply ended before the answer began; see --max-tokens and --no-think\n")


def test_a_chat_can_be_told_not_to_think(folder, monkeypatch, capsys):
    for flag, silent in (("--think", True), ("--no-think", False)):
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        assert run(folder, "--chat", flag) == 0
        assert ("the reply ended before the answer began" in capsys.readouterr().err) == silent


def run(folder, *argv):
    return main([*argv, "--model", str(folder), "--backend", "numpy", "-n", "8"])


def test_the_flags(folder, tmp_path, capsys):
    assert run(folder, "-p", "hi", "--no-think") == 0
    answer, err = capsys.readouterr()
    assert len(answer) > 1
    assert err == ""
    assert run(folder, "-p", "hi", "--think") == run(folder, "-p", "hi") == 0
    assert capsys.readouterr().out == "\n\n"
    assert run(folder, "-p", "hi", "--think", "--raw") == 2
    assert "--think and --raw exclude each other" in capsys.readouterr().err
    assert run(write_model(tmp_path, template=None), "-p", "hi", "--no-think") == 2
    assert "no chat template" in capsys.readouterr().err


def test_a_conversation_keeps_the_reasoning(folder, tmp_path, monkeypatch, capsys):
    file = tmp_path / "talk.json"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"hello\n/save {file}\n/load {file}\n/save {file}\n"))
    assert run(folder, "--chat") == 0
    question, answer = json.loads(file.read_text())["messages"]
    assert question == {"role": "user", "content": "hello"}
    assert set(answer) == {"role", "content", "reasoning_content"}
    assert answer["reasoning_content"]
