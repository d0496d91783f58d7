"""Tool calls are split off the text, in every syntax, wherever a piece may end, and their values are typed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_texts import (
    ARGUMENTS,
    GLM_TEMPLATE,
    HERMES_TEMPLATE,
    QWEN_TEMPLATE,
    SYNTAXES,
    TEMPLATES,
    THINKING,
    TOOLS,
    WRITERS,
    calls,
    everywhere,
    glm,
    glm_lines,
    hermes,
    qwen,
    take,
)

from common.errors import UsageError
from common.reply import Parts, ReplyParser
from common.tools import GLM, HERMES, QWEN_XML, find_syntax, lacks_tools, typed

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


@settings(max_examples=150)
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


WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "day": {"type": "integer"}}}
CUTS = [  # as llama.cpp parses them, but for white space between arguments
    (HERMES_TEMPLATE, '<tool_call>\n{"name": "get_wea', None),
    (HERMES_TEMPLATE, '<tool_call>\n{"name": "get_weather", "argu', "{"),
    (HERMES_TEMPLATE, '<tool_call>\n{"name": "get_weather", "arguments": {"ci', '{"ci'),
    (HERMES_TEMPLATE, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa', '{"city": "Pa'),
    (HERMES_TEMPLATE, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"', '{"city": "Paris"'),
    (HERMES_TEMPLATE, '<tool_call>\n{"name": "get_weather", "arguments": {"day": 1}}\n</tool', '{"day": 1}'),
    (QWEN_TEMPLATE, "<tool_call>\n<function=get_wea", None),
    (QWEN_TEMPLATE, "<tool_call>\n<function=get_weather>\n<parame", "{"),
    (QWEN_TEMPLATE, "<tool_call>\n<function=get_weather>\n<parameter=city>\nPa", '{"city": "Pa'),
    (QWEN_TEMPLATE, "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</par", '{"city": "Paris'),
    (QWEN_TEMPLATE, "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<", '{"city": "Paris"'),
    (
        QWEN_TEMPLATE,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=day>\n12\n</pa",
        '{"city": "Paris", "day": 12',
    ),
    (
        QWEN_TEMPLATE,
        "<tool_call>\n<function=get_weather>\n<parameter=day>\n12\n</parameter>\n</function>\n<",
        '{"day": 12}',
    ),
    (GLM_TEMPLATE, "<tool_call>get_weather<arg_key>ci", "{"),
    (GLM_TEMPLATE, "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Pa", '{"city": "Pa'),
    (GLM_TEMPLATE, "<tool_call>get_weather<arg_key>day</arg_key><arg_value>12</arg_value>", '{"day": 12'),
]


@pytest.mark.parametrize(("template", "text", "arguments"), CUTS)
def test_a_call_that_the_limit_of_a_reply_cuts(template, text, arguments):
    """It was shown as text, with its tags."""
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]
    for step in (1, 5, len(text)):
        parser, parts = ReplyParser(template, "", tools), Parts()
        reply = f"Let me see.\n{text}"
        for at in range(0, len(reply), step):
            parser.push(reply[at : at + step], parts)
        parser.finish(parts, is_cut=True)
        assert parts.text == "Let me see."
        assert [call["function"] for call in parts.tool_calls] == (
            [] if arguments is None else [{"name": "get_weather", "arguments": arguments}]
        )
    whole, parser = Parts(), ReplyParser(template, "", tools)
    parser.push(text, whole)
    parser.finish(whole)
    assert whole.text == text or whole.tool_calls


@pytest.mark.parametrize("template", [HERMES_TEMPLATE, QWEN_TEMPLATE, GLM_TEMPLATE])
def test_any_beginning_of_a_call_shows_no_tags(template):
    write = {HERMES_TEMPLATE: hermes, QWEN_TEMPLATE: qwen, GLM_TEMPLATE: glm}[template]
    text = write("edit", {"path": 'a"b\\c', "text": "x < y </p\n", "count": 3, "more": {"k": [1, "é"]}})
    for end in range(1, len(text)):
        parser, parts = ReplyParser(template, "", TOOLS), Parts()
        parser.push(text[:end], parts)
        parser.finish(parts, is_cut=True)
        assert parts.text == ""
        assert len(parts.tool_calls) <= 1


def test_which_templates_have_a_place_for_tools():
    """Phi-4-mini's reads them from the system message, where no API puts them."""
    own = "{% if 'tools' in message and message['tools'] %}{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}{% endif %}"
    assert lacks_tools(own)
    assert lacks_tools("{{ message.tools }}{{ message.content }}")
    assert not lacks_tools("{% for tool in tools %}{{ tool }}{% endfor %}")
    assert not lacks_tools("{%- if tools is defined %}")
