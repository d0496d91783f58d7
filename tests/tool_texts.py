"""Tool calls as families write them, for tests that read them back: templates, writers, and how texts are read."""

import json
import re
from pathlib import Path

import pytest

from common.harmony import reply_parser
from common.reply import Parts

GOLDEN = json.loads((Path(__file__).parent / "data" / "chat_golden.json").read_text(encoding="utf-8"))
TEMPLATES = {name: golden["template"] for name, golden in GOLDEN["templates"].items()}

# What find_syntax looks for, without any thinking.
HERMES_TEMPLATE = '{{ tools }}<tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call>'
QWEN_TEMPLATE = "{{ tools }}<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>"
GLM_TEMPLATE = "{{ tools }}<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>"
MISTRAL_TEMPLATE = "{{ tools }}[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments }}"
MISTRAL_LIST_TEMPLATE = '{{ tools }}[TOOL_CALLS] [{"name": NAME, "arguments": ARGUMENTS}]'
HARMONY_TOKENS = [f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "return", "call")]
HARMONY_TEMPLATE = (  # as gpt-oss's: the reasoning before a call is dropped once a message of the assistant follows
    "{% if tools %}<|start|>developer<|message|>"
    "{% for tool in tools %}// {{ tool.function.description + '\n' + tool.function.name }}{% endfor %}"
    "<|end|>{% endif %}"
    "{% set last = namespace(name='') %}{% for m in messages %}{% if m.tool_calls %}"
    "{% set ns = namespace(later=false) %}{% for later in messages[loop.index:] %}"
    "{% if later.role == 'assistant' and 'tool_calls' not in later %}{% set ns.later = true %}{% endif %}{% endfor %}"
    "{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}{% if m.thinking and not ns.later %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% set call = m.tool_calls[0].function %}{% set last.name = call.name %}<|start|>assistant to=functions."
    "{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}"
    "<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'user' or loop.first %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    "{# reasoning_effort #}"
)
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


def mistral(name, arguments):
    """Small 3.2 writes the call's id too, Devstral does not."""
    return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}"


def mistral_list(*calls):
    listed = [{"name": name, "arguments": arguments, "id": "abcdefghi"} for name, arguments in calls]
    return f"[TOOL_CALLS] {json.dumps(listed, ensure_ascii=False)}"


def harmony(name, arguments):
    head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return head + json.dumps(arguments, ensure_ascii=False)


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
    parser, parts, seen = reply_parser(template, prompt, tools), Parts(), []
    for piece in pieces:
        parser.push(piece, parts)
        seen.append((parts.text, parts.reasoning, len(parts.tool_calls)))
    parser.finish(parts)
    return parts, seen


def calls(parts):
    """Names and arguments of calls, after the other fields are checked."""
    for index, call in enumerate(parts.tool_calls):
        assert (call["index"], call["type"], set(call)) == (index, "function", {"index", "id", "type", "function"})
        assert re.fullmatch("call_[0-9a-f]{24}|[0-9a-f]{9}", call["id"])
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
