"""Reasoning is split off the answer, what templates write is read back, and end tokens end replies."""

import re

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend
from tool_texts import (
    GOLDEN,
    HERMES_TEMPLATE,
    QWEN_TEMPLATE,
    SYNTAXES,
    TEMPLATES,
    THINKING,
    calls,
    everywhere,
    take,
)

from common.chat import render
from common.tokenizer import Tokenizer

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
