"""Long chats: each turn reads its own tokens alone, whatever the template drops, for agents and after a restart too."""

import pytest
from conftest import client_of
from tiny_chat import write

import generate

KEEPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
DROPS = (  # thinking before the user's last message
    "{% set last = namespace(at=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}"
    + KEEPS.replace("m.reasoning_content %}", "m.reasoning_content and loop.index0 > last.at %}")
)


def in_python(llm):
    """A function that replies to messages: (tokens of the prompt, those of them that were kept)."""

    def ask(messages):
        stats = llm.chat(messages, max_tokens=8, temperature=0).stats
        return stats.prompt_tokens, stats.cached_tokens

    return ask


def over_http(llm):
    """As `in_python`, through a server of the model."""
    client = client_of(llm, "tiny")

    def ask(messages):
        body = {"messages": messages, "max_tokens": 8, "temperature": 0}
        usage = client.post("/v1/chat/completions", json=body).json()["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    return ask


def turn(number, role, repeats=1):
    """A reply with its thinking, and the message after it."""
    thinking = f"What follows from {number}? " * 3
    return [
        {"role": "assistant", "content": f"Step {number} is done.", "reasoning_content": thinking},
        {"role": role, "content": f"Now what about {number}? " * repeats, "tool_call_id": "a"},
    ]


@pytest.mark.parametrize(("turns", "tokens"), [(6, 2000), pytest.param(20, 10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("template", "ask", "roles"),
    [(KEEPS, in_python, ["user"]), (DROPS, in_python, ["user"]), (DROPS, over_http, ["tool", "tool", "user"])],
    ids=["keeps", "drops", "agent"],
)
@pytest.mark.long
def test_a_turn_reads_fewer_than_300_tokens(template, ask, roles, turns, tokens, tmp_path):
    """A token of this model is a byte. The second half of the turns follows a restart."""
    model = write(tmp_path / "model", template=template, context=2 * tokens + 4000)
    messages, read = [{"role": "user", "content": "Begin."}], []
    while sum(len(message["content"]) for message in messages) < tokens:
        messages += turn(len(messages), "user", repeats=10)
    for _ in range(2):
        with generate.load(model, backend="numpy", cache_dir=tmp_path / "kept") as llm:
            reply = ask(llm)
            for _ in range(turns // 2):
                length, kept = reply(messages)
                assert length > tokens
                read.append(length - kept)
                messages += turn(len(messages), roles[len(read) % len(roles)])
    assert read[0] > tokens
    assert max(read[1:]) < 300, read
