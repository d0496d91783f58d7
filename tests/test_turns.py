"""What a chat template shows of a prompt, for templates that keep earlier thinking and templates that drop it."""

from functools import partial
from itertools import takewhile

import pytest
from tiny_chat import TEMPLATE, write

from common.checkpoint import open_checkpoint
from common.demo import demo_path
from common.errors import BimetalError
from common.reading import Reading
from common.tokenizer import load_tokenizer
from common.turns import reply_header, turns_of

THINKING = (  # as Qwen's: reasoning of earlier turns is left out, that of the last one is not
    "{% if tools %}<|im_start|>system\ntools: {{ tools | length }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last and m.thinking %}<think>{{ m.thinking }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
STRICT = (  # refuses two replies in a row, and a conversation that does not begin with the user
    "{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
)
UNASKED = (  # as Llama 2's: add_generation_prompt changes nothing
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>"
    "{% else %}[{{ m.role }}]{{ m.content }}[/{{ m.role }}]{% endif %}{% endfor %}"
)
ENDLESS = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}<|assistant|>\n"
AGENT = (  # as Qwen3.5's: reasoning before the user's last message is left out
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>{{ m.thinking }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
SYSTEM = [{"role": "system", "content": "Be brief."}]
CHAT = [
    {"role": "user", "content": "aaa"},
    {"role": "assistant", "content": "bbb"},
    {"role": "user", "content": "ccc"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write(tmp_path_factory.mktemp("tiny")), {})


def shown(tokenizer, template, messages, tools=None):
    """The prompt, and its parts by what the turns call them, as text."""
    tokenizer.chat_templates["default"] = template
    render = partial(tokenizer.chat_prompt, tools=tools)
    prompt = render(messages)
    turns = turns_of(render, messages, prompt, reply_header(render), tokenizer.end_ids, bool(tools))
    parts = [(0, turns.shared), (0, turns.system), *turns.replies]
    return prompt.text, [None if end is None else tokenizer.decode(prompt.tokens[first:end]) for first, end in parts]


@pytest.mark.parametrize("template", [TEMPLATE, THINKING])
def test_parts(tokenizer, template):
    text, (shared, system, *replies) = shown(tokenizer, template, [*SYSTEM, *CHAT])
    assert shared == text.removesuffix("<think>")
    assert system == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert replies == ["bbb<|im_end|>"]


def test_replies_of_a_template_without_a_generation_prompt(tokenizer):
    assert shown(tokenizer, UNASKED, CHAT)[1][2:] == ["bbb<|im_end|>"]
    assert shown(tokenizer, ENDLESS, CHAT)[1][2:] == [""]  # which nothing ends
    assert shown(tokenizer, ENDLESS.removesuffix("<|assistant|>\n"), CHAT)[1][2:] == []


def test_tools_belong_to_the_system_prompt(tokenizer):
    assert shown(tokenizer, TEMPLATE, CHAT)[1][1] == ""
    before = "<|im_start|>system\ntools: 1<|im_end|>\n<|im_start|>user\n"
    assert shown(tokenizer, THINKING, CHAT, TOOLS)[1][1] == before


def test_a_template_that_refuses_the_other_conversations(tokenizer):
    _, (shared, system, *replies) = shown(tokenizer, STRICT, CHAT)
    assert (shared, system, replies) == (shown(tokenizer, TEMPLATE, CHAT)[0], "", ["bbb<|im_end|>"])
    never = "{% if messages | length > 3 %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    assert shown(tokenizer, never, CHAT)[1] == [None, ""]
    with pytest.raises(BimetalError):
        shown(tokenizer, STRICT, [*SYSTEM, *CHAT])


def test_a_prompt_whose_last_token_the_reply_may_extend():
    """Later prompts have one token for the end of the header and the beginning of the reply."""
    checkpoint = open_checkpoint(demo_path())
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.config)
    tokenizer.chat_templates["default"] = (
        "{% for m in messages %}<{{ m['role'] }}>\n{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    prompt = tokenizer.chat_prompt(CHAT)
    later = tokenizer.chat_prompt([*CHAT, {"role": "assistant", "content": "of"}, {"role": "user", "content": "on"}])
    turns = turns_of(tokenizer.chat_prompt, CHAT, prompt, reply_header(tokenizer.chat_prompt), tokenizer.end_ids)
    assert later.text.startswith(prompt.text)
    assert turns.shared == len(prompt.tokens) - 1
    assert later.tokens[: turns.shared] == prompt.tokens[:-1]


@pytest.mark.parametrize("template", [TEMPLATE, THINKING, UNASKED, ENDLESS])
@pytest.mark.parametrize("system", [[], SYSTEM])
def test_each_turn_reads_what_the_one_before_it_kept(tokenizer, template, system):
    """The long steps of a turn are those of the turn before it, and then others: so that its state serves."""
    tokenizer.chat_templates["default"] = template
    messages, before = [*system, {"role": "user", "content": "a" * 300}], None
    for turn in range(6):
        prompt = tokenizer.chat_prompt(messages)
        turns = turns_of(
            tokenizer.chat_prompt, messages, prompt, reply_header(tokenizer.chat_prompt), tokenizer.end_ids
        )
        end = len(prompt.tokens)
        marks = {turns.system: "system", turns.begun: "turn", turns.shared or end: "turn"}
        reading = Reading(end, 512, marks, turns.replies)
        if before:
            tokens, earlier = before
            kept = max(at for at, why in earlier.kept_cuts().items() if why == "turn")
            assert prompt.tokens[:kept] == tokens[:kept]
            assert reading.continues_from(kept, [step for step in earlier.long_steps if step[1] <= kept])
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, prompt.tokens, strict=False)))
            assert kept >= same - len("<think>")
            assert len(prompt.tokens) - kept < 600
        before = prompt.tokens, reading
        reply = {"role": "assistant", "content": f"{turn}" * 200, "reasoning_content": "hm" * 100}
        messages += [reply, {"role": "user", "content": "b" * (150 + turn)}]


def test_an_agent_reads_the_results_of_its_tools_alone(tokenizer):
    """Each prompt continues at the beginning of the last reply; after the user's message at that of the first one."""
    tokenizer.chat_templates["default"] = AGENT
    messages, kept = [*SYSTEM, {"role": "user", "content": "a" * 300}], []
    results = ["tool", "tool", "tool", "user", "tool"]
    for role in (*results, None):
        prompt = tokenizer.chat_prompt(messages)
        turns = turns_of(
            tokenizer.chat_prompt, messages, prompt, reply_header(tokenizer.chat_prompt), tokenizer.end_ids
        )
        marks = {turns.system: "system", turns.begun: "turn", turns.shared: "turn"}
        reading = Reading(len(prompt.tokens), 512, marks, turns.replies)
        if kept:
            at = max(
                at
                for tokens, steps in kept
                if tokens == prompt.tokens[: (at := len(tokens))] and reading.continues_from(at, steps)
            )
            if messages[-1]["role"] == "tool":
                assert prompt.text.count("assistant\n", len(tokenizer.decode(prompt.tokens[:at]))) == 1
            else:
                assert tokenizer.decode(prompt.tokens[:at]).count("assistant\n") == 1
        for at in (turns.begun, turns.shared):
            kept.append((prompt.tokens[:at], [step for step in reading.long_steps if step[1] <= at]))
        messages += [{"role": "assistant", "content": "b" * 200}, {"role": role, "content": "c" * 400}]
