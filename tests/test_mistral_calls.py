"""Calls of Mistral's models, which no tag closes: one after another, or as a list."""

import json

import pytest
from tool_texts import (
    ARGUMENTS,
    HERMES_TEMPLATE,
    MISTRAL_LIST_TEMPLATE,
    MISTRAL_TEMPLATE,
    TOOLS,
    calls,
    everywhere,
    hermes,
    mistral,
    mistral_list,
    take,
)

from common.reply import Parts, ReplyParser
from common.tools import HERMES, MISTRAL, MISTRAL_LIST, find_syntax


def one_by_one(*found):
    return "".join(mistral(*call) for call in found)


FORMS = pytest.mark.parametrize(
    ("template", "write"),
    [(MISTRAL_TEMPLATE, one_by_one), (MISTRAL_LIST_TEMPLATE, mistral_list)],
    ids=["one by one", "a list"],
)


def test_the_template_names_the_syntax():
    assert find_syntax(MISTRAL_TEMPLATE) is MISTRAL
    assert find_syntax(MISTRAL_LIST_TEMPLATE) is MISTRAL_LIST
    assert find_syntax("{{ tools }}[TOOL_CALLS]") is None
    assert find_syntax(HERMES_TEMPLATE) is HERMES


@FORMS
@pytest.mark.parametrize("label", ARGUMENTS)
def test_calls_come_out_of_the_text(template, write, label):
    found = [("edit", ARGUMENTS[label]), ("now", {})]
    everywhere(template, write(found[0]), ("", "", found[:1]))
    text = f"Look.\n{write(*found)}"
    for pieces in ([text], list(text)):
        parts, _ = take(template, pieces)
        assert (parts.text, calls(parts)) == ("Look.", found)
    assert all(len(call["id"]) == 9 for call in parts.tool_calls)  # Mistral's templates refuse other ids


def test_the_id_that_a_model_writes_is_read_over():
    text = '[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}[TOOL_CALLS]edit[CALL_ID]123456789[ARGS]{"count": 1}'
    everywhere(MISTRAL_TEMPLATE, text, ("", "", [("now", {}), ("edit", {"count": 1})]))


@FORMS
def test_a_tag_in_a_string_ends_no_call(template, write):
    found = [("edit", {"text": "write [TOOL_CALLS]now[ARGS]{} to call"}), ("now", {})]
    everywhere(template, write(*found), ("", "", found))


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (MISTRAL_TEMPLATE, "[TOOL_CALLS]now"),
        (MISTRAL_TEMPLATE, "[TOOL_CALLS]now[ARGS]"),
        (MISTRAL_TEMPLATE, "[TOOL_CALLS]now[ARGS][1]"),
        (MISTRAL_TEMPLATE, '[TOOL_CALLS]now[ARGS]{"a": "'),
        (MISTRAL_TEMPLATE, "[TOOL_CALLS]now[ARGS]{} and on"),
        (MISTRAL_TEMPLATE, "[TOOL_CALLS]" + "[" * 5000),
        (MISTRAL_LIST_TEMPLATE, "[TOOL_CALLS] []"),
        (MISTRAL_LIST_TEMPLATE, '[TOOL_CALLS] [{"name": "now"}, 3]'),
        (MISTRAL_LIST_TEMPLATE, '[TOOL_CALLS] [{"name": "now", "arguments": {}}] and on'),
        (MISTRAL_LIST_TEMPLATE, "The tag [TOOL_CALLS] opens"),
        (MISTRAL_LIST_TEMPLATE, hermes("now", {})),
    ],
)
def test_a_malformed_call_is_text(template, text):
    if len(text) < 1000:
        everywhere(template, text, (text, "", []))
    parts, _ = take(template, [text])
    assert (parts.text, parts.tool_calls) == (text, [])


def test_a_call_after_a_malformed_one():
    everywhere(MISTRAL_TEMPLATE, "[TOOL_CALLS]no\n[TOOL_CALLS]now[ARGS]{}", ("[TOOL_CALLS]no", "", [("now", {})]))


@FORMS
def test_a_call_that_is_cut(template, write):
    """The tokens of the reply are used up: complete calls, and the arguments so far of one whose name is complete."""
    whole = write(("edit", {"path": "a.py", "count": 3}), ("edit", {"path": "b.py"}))
    for end in range(1, len(whole)):
        parts, parser = Parts(), ReplyParser(template, "", TOOLS)
        parser.push(whole[:end], parts)
        parser.finish(parts, is_cut=True)
        assert parts.text == ""
        found = [call["function"] for call in parts.tool_calls]
        assert [call["name"] for call in found] == ["edit"] * len(found)
        for call, arguments in zip(found, ({"path": "a.py", "count": 3}, {"path": "b.py"}), strict=False):
            assert json.dumps(arguments).startswith(call["arguments"].rstrip())
        if "b.py" in whole[:end]:
            assert len(found) == 2
