import json
import os
import re
import tracemalloc
from pathlib import Path

import pytest

from common import template as sandbox
from common.chat import render
from common.errors import BimetalError

GOLDEN = json.loads((Path(__file__).parent / "data" / "chat_golden.json").read_text(encoding="utf-8"))
TEMPLATES = {name: golden["template"] for name, golden in GOLDEN["templates"].items()}
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content + '' }}{% endfor %}"
USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("label", GOLDEN["conversations"])
def test_renders_what_transformers_renders(name, label):
    expected, conversation = GOLDEN["templates"][name]["rendered"][label], GOLDEN["conversations"][label]
    if expected is None:
        with pytest.raises(BimetalError, match="the chat template refuses this conversation: "):
            render(TEMPLATES[name], **conversation)
    else:
        assert render(TEMPLATES[name], **conversation) == expected


@pytest.mark.model
@pytest.mark.skipif("BIMETAL_TEMPLATES" not in os.environ, reason="BIMETAL_TEMPLATES names a folder of .jinja files")
def test_renders_what_transformers_renders_now():
    """For every template of the folder, such as llama.cpp's models/templates."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    files = sorted(Path(os.environ["BIMETAL_TEMPLATES"]).glob("*.jinja"))
    assert files
    for file in files:
        template = file.read_text(encoding="utf-8")
        for label, conversation in GOLDEN["conversations"].items():
            rest = {"add_generation_prompt": True} | conversation
            try:
                expected = render_jinja_template([rest.pop("messages")], chat_template=template, **rest)[0][0]
            except (TemplateError, TypeError):
                expected = None
            try:
                rendered = render(template, **conversation)
            except BimetalError:
                rendered = None
            assert rendered == expected, (file.name, label)


def test_a_refusal_says_what_the_template_says():
    with pytest.raises(BimetalError, match=r"refuses this conversation: No user query found in messages\."):
        render(TEMPLATES["Qwen3.5-4B"], [{"role": "system", "content": "Be terse."}])


def test_a_templates_own_words_are_cut():
    with pytest.raises(BimetalError, match=r"refuses this conversation: x+$") as refused:
        render("{{ raise_exception('x' * 200000) }}", [USER])
    assert len(str(refused.value)) < 1100


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("a\n{% if %}", "error in line 2"),
        ("{% for x in y %}", "error in line 1"),
        ("{{ x | no_such_filter }}", "error in line 1: No filter named 'no_such_filter'"),
        ("{% for x in y %}" * 30 + "{% endfor %}" * 30, "nested too deeply"),
        ("{{ (" * 3000, "nested too deeply"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ missing | tojson }}", "TypeError: Object of type Undefined"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ raise_exception('sorry, ' ~ messages[0].role) }}", "refuses this conversation: sorry, user"),
    ],
)
def test_broken_templates(template, error):
    with pytest.raises(BimetalError, match=error):
        render(template, [USER])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ (messages | map(attribute='__class__') | list)[0]() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set n = namespace() %}{% set n.__html__ = raise_exception %}{{ n }}",
        "{{ namespace({'__html__': raise_exception}) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ self.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_refuses(attack):
    with pytest.raises(BimetalError):
        render(attack, [USER])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ dict.__base__ }}",
    ],
)
def test_the_sandbox_shows_nothing(attack):
    assert render(attack, [USER]) == ""


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("{'b': '<é>', 'a': [1, none, true]} | tojson", '{"b": "<é>", "a": [1, null, true]}'),
        ("{'b': 1, 'a': 'é'} | tojson(ensure_ascii=true, sort_keys=true)", '{"a": "\\u00e9", "b": 1}'),
        ("[1, {'a': 2}] | tojson(separators=(',', ':'))", '[1,{"a":2}]'),
        ("[1] | tojson(indent=1)", "[\n 1\n]"),
        ("dict(a=1).a ~ namespace(b=2).b ~ namespace({'c': 3}).c", "123"),
        ("'<b>' ~ messages[0].content", "<b>Hi"),
    ],
)
def test_expressions(expression, text):
    assert render("{{ " + expression + " }}", [USER]) == text


def test_statements():
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", [USER]) == "01"
    assert render("a\n  {% if true %}\nb\n  {% endif %}\n", [USER]) == "a\nb\n"
    assert re.fullmatch(r"20\d\d", render("{{ strftime_now('%Y') }}", [USER]))
    scoped = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert render(scoped, [USER]) == "21"


@pytest.mark.parametrize(
    "bomb",
    [
        "{{ 'a' * 10 ** 9 }}",
        "{% set x = 10 ** 9 * 'a' %}",
        "{{ ['b' * 1000] * 100000 }}",
        "{{ 2 ** (2 ** 40) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '%s%s' % ('a' * 200000, 'a' * 200000) }}",
        "{{ 'a\n' | indent(10 ** 9) }}",
        "{{ 'a' | center(10 ** 9) }}",
        "{{ 'a'.ljust(10 ** 9) }}",
        "{{ 'a'.encode('utf-16').decode('utf-16') }}",
        "{{ messages | tojson(indent=10 ** 8) }}",
        "{{ 'a' | truncate(10, end='x' * 10 ** 9) }}",
        "{{ range(9) | batch(10 ** 9, 'x') | list }}",
        "{{ range(9) | slice(10 ** 9) | list }}",
        "{{ 1.5 | round(10 ** 9) }}",
        "{{ range(99999) | list | join('x' * 1000) }}",
        "{{ 'a'.join(['b' * 1000] * 100) * 9 }}",
        "{{ range(99999) | map('center', 99999) | join | length }}",
        "{{ lipsum(n=10 ** 6) }}",
        "{{ range(10 ** 9) | list }}",
        "{{ strftime_now('%999999999d') }}",
        *(
            "{% set ns = namespace(s=['a', 'a']) %}{% for i in range(60) %}{% set ns.s = " + double + " %}{% endfor %}"
            for double in (
                "ns.s + ns.s",
                "ns.s ~ ns.s",
                "[ns.s, ns.s]",
                "(ns.s, ns.s)",
                "{'a': ns.s, 'b': ns.s}",
                "dict(a={'x': ns.s}.items(), b={'x': ns.s}.items())",
                "(ns.s | string).replace('', ns.s | string)",
            )
        ),
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}" + "{% for i in r %}" * 3 + "{% endfor %}" * 3,
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set x %}{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}{% endset %}",
        "{% filter upper %}{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}{% endfilter %}",
        "{% set r = range(99999) | list %}" + "{% set a = r[1:] %}" * 1300,
        "{% set l = range(38000) | list %}{{ l | select('in', l) | list | length }}",
        "{% set l = range(38000) | list %}" + "{% if a in l %}{% endif %}" * 500,
        "{% set l = range(38000) | list %}" + "{% if a is in l %}{% endif %}" * 500,
        "{% set l = range(38000) | list %}{% set m = l + [] %}{{ l" + " == m == l" * 400 + " }}",
        "{{ range(38000) | batch(1) | sum(start=[]) | length }}",
        "{{ range(99999)" + " | select" * 900 + " | list | length }}",
        *(
            "{% set a = '0.' * 99999 ~ '0' %}{{ ('x' * 80000) | list | " + by + "(attribute=a) | length }}"
            for by in ("sort", "min", "sum", "groupby")
        ),
        "{{ dict(range(0, 99999 * (2 ** 61 - 1), 2 ** 61 - 1) | batch(2)) | length }}",
        "{{ {}.fromkeys(range(0, 99999 * (2 ** 61 - 1), 2 ** 61 - 1)) | length }}",
        "{{ range(0, 99999 * (2 ** 61 - 1), 2 ** 61 - 1) | unique | list | length }}",
        "{{ ('\u0101' * 200000).strip('\u0102' * 200000 ~ '\u0101') }}",
        "{{ ('a' * 200000).rfind('b' ~ 'a' * 60000) }}",
        "{% set a = 2 ** 260000 %}{% set b = 3 ** 80000 %}" + "{% if a // b - b %}{% endif %}" * 300,
        "{% for x in [1] if " + "a or " * 4000 + "true recursive %}{{ loop(range(99999)) }}{% endfor %}",
        "{{ " + "9" * 5000 + " }}",
        "x" * 70000,
        "{{ a" + " < a" * 15000 + " }}",
        "{{ [" + "a," * 30000 + "] }}",
    ],
)
@pytest.mark.few(10)
def test_a_template_that_takes_too_much_is_stopped(bomb, monkeypatch):
    """Within the time that one run may take, here 0.2 s, and 100 MB."""
    monkeypatch.setattr(sandbox, "SECONDS", 0.2)
    sandbox.compile_template.cache_clear()
    tracemalloc.start()
    try:
        with pytest.raises(BimetalError, match=r"^[^\n]+$"):
            render(bomb, [USER])
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


def test_the_limit_grows_with_the_conversation():
    copies = "{% for i in range(10) %}{{ messages[0].content }}{% endfor %}"
    assert len(render(copies, [{"role": "user", "content": "x" * 10**6}])) == 10**7
    with pytest.raises(BimetalError, match=r"makes more than the \d+ characters that this conversation may take"):
        render(copies.replace("10", "99"), [{"role": "user", "content": "x" * 10**6}])


@pytest.mark.long
def test_a_long_conversation_is_rendered_in_time():
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 40} for i in range(4000)]
    for source in TEMPLATES.values():
        assert len(render(source, messages)) > 4000 * 200


def test_no_content_is_empty_unless_the_template_looks_for_none():
    messages = [USER, {"role": "assistant", "content": None}, {"role": "assistant"}]
    assert render(PLAIN, messages) == "[user]Hi[assistant][assistant]"
    looks = "{% for m in messages %}{{ 'none' if m['content'] is none else 'text' }},{% endfor %}"
    assert render(looks, messages) == "text,none,none,"


def test_text_parts_are_joined_unless_the_template_reads_them():
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    assert render(PLAIN, [{"role": "user", "content": parts}]) == "[user]One.\nTwo."
    reads = "{% for p in messages[0].content %}<{{ p.text }}>{% endfor %}"
    assert render(reads, [{"role": "user", "content": parts}]) == "<One.><Two.>"


def test_arguments_as_json_text_are_objects_to_the_template():
    def chat(arguments):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]

    for template in TEMPLATES.values():
        assert render(template, chat('{"a": "é", "b": [1]}')) == render(template, chat({"a": "é", "b": [1]}))
        assert render(template, chat("")) == render(template, chat({}))
    assert '"arguments": not json' in render(TEMPLATES["Qwen-Qwen3-0.6B"], chat("not json"))


def test_the_callers_messages_are_left_alone():
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [USER, {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call]}]
    before = json.dumps(messages)
    render(TEMPLATES["Qwen3.5-4B"], messages)
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"content": "Hi"}, "message 0 is .* not an object with a role"),
        ("Hi", "message 0 is 'Hi', not an object with a role"),
        ({"role": "user", "text": "Hi"}, r"message 0 has no content; its keys are \['role', 'text'\]"),
        ({"role": "user", "content": 7}, "message 0 has content of type int"),
        ({"role": "user", "content": {"text": "Hi"}}, "message 0 has content of type dict"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "message 0 has a part of type 'image_url'; only text"),
        ({"role": "user", "content": ["Hi"]}, "message 0 has a part of type 'str'"),
        ({"role": "assistant", "tool_calls": 7}, "message 0 has tool_calls 7, not a list"),
        ({"role": "assistant", "tool_calls": ["f"]}, "message 0 has a tool call 'f', not an object"),
    ],
)
def test_bad_messages(message, error):
    with pytest.raises(BimetalError, match=error):
        render(PLAIN, [message])


def test_arguments_that_are_nested_too_deeply_stay_text():
    call = {"function": {"name": "f", "arguments": "[" * 100_000}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    template = "{{ messages[0].tool_calls[0].function.arguments | length }}"
    assert render(template, messages) == "100000"
