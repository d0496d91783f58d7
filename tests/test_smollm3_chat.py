"""Tool calls with a template like SmolLM3's: it reads tools as `xml_tools`, and writes no calls of earlier messages."""

from common.chat import render
from common.tools import HERMES, syntax_of

TEMPLATE = (
    "{% if messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '\n\n' }}{% endif %}"
    "{% if xml_tools or python_tools %}{{ '### Tools\n<tools></tools>' }}{% endif %}"
    "{% for message in messages %}{% set content = message.content if message.content is string else '' %}"
    "{% if message.role in ('user', 'tool') %}{{ '<|im_start|>user\n' + content + '<|im_end|>\n' }}"
    "{% elif message.role == 'assistant' %}"
    "{% generation %}{{ '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}{% endgeneration %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"type": "function", "function": {"name": "now", "arguments": "{}"}}
ASKED = {"role": "user", "content": "What time is it?"}


def test_tools_reach_the_model():
    text = render(TEMPLATE, [ASKED], TOOLS)
    assert text.startswith("<|im_start|>system\nYou may call functions")
    assert '"name": "now"' in text
    assert "### Tools" not in text
    assert syntax_of(TEMPLATE) == HERMES


def test_calls_and_results_are_kept():
    turns = [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "10:15"}]
    text = render(TEMPLATE, turns, TOOLS)
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>\n' in text
    assert "<|im_start|>user\n<tool_response>\n10:15\n</tool_response><|im_end|>\n" in text


def test_without_tools_nothing_is_added():
    assert render(TEMPLATE, [ASKED]) == "<|im_start|>user\nWhat time is it?<|im_end|>\n<|im_start|>assistant\n"
