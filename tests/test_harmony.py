"""Replies in the harmony format of gpt-oss: channels, calls, prompts, and guides."""

import io
import json

import pytest
from tiny_chat import write
from tool_texts import ARGUMENTS, HARMONY_TEMPLATE, HARMONY_TOKENS, TOOLS, calls, everywhere, harmony, take

from common.chat import render
from common.errors import UsageError
from common.harmony import arranged, reply_parser, turn_ends
from common.reply import Parts
from common.tokenizer import Tokenizer, load_tokenizer
from common.tools import HARMONY, find_syntax
from common.turns import reply_header, turns_of
from generate.__main__ import main

START = "<|start|>assistant"
ANALYSIS, FINAL, COMMENTARY = (f"<|channel|>{name}<|message|>" for name in ("analysis", "final", "commentary"))
PROMPT = f"<|start|>user<|message|>Hello?<|end|>{START}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("harmony"), template=HARMONY_TEMPLATE, control=HARMONY_TOKENS)
    return load_tokenizer(folder, {})


# -- replies -----------------------------------------------------------------------------------------------------------


def test_the_template_names_the_syntax():
    assert find_syntax(HARMONY_TEMPLATE) is HARMONY


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{ANALYSIS}They greet.\n<|end|>{START}{FINAL} Hi!\n<|return|>", (" Hi!\n", "They greet.\n")),
        (f"{ANALYSIS}Hm. a < b <| c<|end|>{START}{FINAL}Hi <|b|>", ("Hi <|b|>", "Hm. a < b <| c")),
        (f"{FINAL}Hi!", ("Hi!", "")),
        (f"{ANALYSIS}One.<|end|>{START}{ANALYSIS}Two.<|end|>\n{START}{FINAL}Hi!", ("Hi!", "One.\n\nTwo.")),
        (f"{ANALYSIS}One.<|end|>{START}{COMMENTARY}Look.<|end|>{START}{FINAL}Hi!", ("Look.\n\nHi!", "One.")),
        (f"{ANALYSIS}One.<|end|>{FINAL}Hi!", ("Hi!", "One.")),
        (f"{ANALYSIS}One.{START}{FINAL}Hi!", ("Hi!", "One.")),
        (f"{ANALYSIS}One.{FINAL}Hi!", ("Hi!", "One.")),
        ("<|channel|>final <|constrain|>json<|message|>{}", ("{}", "")),
        (" to=user<|channel|>final<|message|>Hi!", ("Hi!", "")),
        ("Hi!", ("Hi!", "")),
        (" {}\n", (" {}\n", "")),
        ("t", ("t", "")),
        (f"{ANALYSIS}<|end|>", ("", "")),
        (ANALYSIS, ("", "")),
        (f"{ANALYSIS}Hm.<|end|>{START}<|channel|>fin", ("", "Hm.")),
        ("", ("", "")),
    ],
)
def test_messages_are_told_apart_by_their_channels(text, expected):
    everywhere(HARMONY_TEMPLATE, text, (*expected, []), prompt=PROMPT)
    everywhere(HARMONY_TEMPLATE, text, (*expected, []), prompt=PROMPT, tools=None)


@pytest.mark.parametrize("label", ARGUMENTS)
def test_calls(label):
    found = [("edit", ARGUMENTS[label])]
    everywhere(HARMONY_TEMPLATE, harmony(*found[0]), ("", "", found))
    text = f"{ANALYSIS}Hm.<|end|>{START}{COMMENTARY}Look.<|end|>{START}{harmony(*found[0])}<|call|>"
    for pieces in ([text], list(text)):
        parts, _ = take(HARMONY_TEMPLATE, pieces)
        assert (parts.text, parts.reasoning, calls(parts)) == ("Look.", "Hm.", found)


@pytest.mark.parametrize(
    "head",
    [
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.now<|message|>",
        "<|channel|>commentary to=functions.now json<|message|>",
        "<|channel|>commentary to=now code<|message|>",
        "<|channel|>analysis to=functions.now <|constrain|>json<|message|>",
        " to=functions.now<|channel|>commentary <|constrain|>json<|message|>",
        " to=functions.now<|channel|>commentary json<|message|>",
        f"{START} to=functions.now<|channel|>commentary json<|message|>",
    ],
)
@pytest.mark.parametrize("end", ["", "<|call|>", "<|end|>"])
def test_headers_of_calls(head, end):
    everywhere(HARMONY_TEMPLATE, f'{head}{{"a": 1}}{end}', ("", "", [("now", {"a": 1})]))
    everywhere(HARMONY_TEMPLATE, f"{head}{end}", ("", "", [("now", {})]))


def test_several_calls_and_a_tag_in_a_string():
    found = [("edit", {"text": "ends with <|call|> or <|end|> here"}), ("now", {})]
    text = f"<|call|>{START}".join(harmony(*call) for call in found)
    everywhere(HARMONY_TEMPLATE, text, ("", "", found))


@pytest.mark.parametrize("body", ["[1]", '{"a": "', "{} and on", "[" * 5000])
def test_a_malformed_call_is_text(body):
    text = f"<|channel|>commentary to=functions.now <|constrain|>json<|message|>{body}"
    parts, _ = take(HARMONY_TEMPLATE, [f"{ANALYSIS}Hm.<|end|>{text}"])
    assert (parts.text, parts.reasoning, parts.tool_calls) == (text, "Hm.", [])
    if len(body) < 1000:
        everywhere(HARMONY_TEMPLATE, text, (text, "", []))


def test_a_tool_of_the_reasoning_that_nobody_gave_is_reasoning():
    text = f"<|channel|>analysis to=python code<|message|>print(1)<|call|>{START}{FINAL}Hi!"
    everywhere(HARMONY_TEMPLATE, text, ("Hi!", "print(1)", []))
    everywhere(HARMONY_TEMPLATE, text, ("Hi!", "print(1)", []), tools=None)


def test_a_call_without_tools_is_text():
    text = harmony("now", {})
    everywhere(HARMONY_TEMPLATE, text, (text, "", []), tools=None)


def test_a_reply_that_is_cut():
    """Tokens are used up anywhere: no part of a header is shown, and calls have the arguments so far."""
    whole = f"{ANALYSIS}Hm.<|end|>{START}{FINAL}Hi!<|end|>{START}{harmony('edit', {'path': 'a.py'})}"
    for end in range(len(whole) + 1):
        parts, parser = Parts(), reply_parser(HARMONY_TEMPLATE, PROMPT, TOOLS)
        parser.push(whole[:end], parts)
        parser.finish(parts, is_cut=True)
        assert "Hi!".startswith(parts.text)
        assert "Hm.".startswith(parts.reasoning)
        for call in parts.tool_calls:
            assert call["function"]["name"] == "edit"
            assert json.dumps({"path": "a.py"}).startswith(call["function"]["arguments"])
    assert parts.tool_calls[0]["function"]["arguments"] == '{"path": "a.py"}'


def test_a_reply_that_goes_on():
    parts, parser = Parts(), reply_parser(HARMONY_TEMPLATE, PROMPT, None, begun=f"{FINAL}Hi <")
    parser.push("|b|>", parts)
    parser.finish(parts)
    assert (parts.text, parser.in_reasoning) == ("|b|>", False)


def test_a_prompt_may_open_the_answer():
    everywhere(HARMONY_TEMPLATE, "Hi!", ("Hi!", "", []), prompt=PROMPT + FINAL)
    assert not reply_parser(HARMONY_TEMPLATE, PROMPT + FINAL).in_reasoning
    everywhere(HARMONY_TEMPLATE, f"{FINAL}Hi!", ("Hi!", "", []), prompt="Hello?")


def test_which_tokens_are_reasoning():
    parser = reply_parser(HARMONY_TEMPLATE, PROMPT)
    seen = []
    for piece in (
        "<|channel|>",
        "analysis",
        "<|message|>",
        "Hm.",
        "<|end|>",
        START,
        "<|channel|>",
        "final",
        "<|message|>",
    ):
        parser.push(piece, Parts())
        seen.append(parser.in_reasoning)
    assert seen == [True] * 8 + [False]


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_calls_of_one_message_become_several_with_their_results():
    one, two = ({"id": name, "function": {"name": name, "arguments": {}}} for name in ("one", "two"))
    result = {"role": "tool", "tool_call_id": "one", "content": "1"}
    other = {"role": "tool", "tool_call_id": "two", "content": "2"}
    user = {"role": "user", "content": "Hello?"}
    called = {"role": "assistant", "content": "Look.", "thinking": "Hm.", "tool_calls": [one, two]}
    first = {"role": "assistant", "content": "", "thinking": "Hm.\n\nLook.", "tool_calls": [one]}
    second = {"role": "assistant", "content": "", "tool_calls": [two]}
    assert arranged([user, called, other, result, user]) == [user, first, result, second, other, user]
    assert arranged([called]) == [first, second]
    plain = [{"role": "tool", "content": text} for text in "ab"]
    assert arranged([called, *plain]) == [first, plain[0], second, plain[1]]
    assert arranged([user, {"role": "assistant", "content": "a", "tool_calls": []}])[1] == {
        "role": "assistant",
        "content": "a",
    }


def test_a_conversation_with_a_call_and_reasoning_is_rendered():
    called = {"role": "assistant", "content": None, "reasoning_content": "Hm."}
    called["tool_calls"] = [{"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}]
    messages = [{"role": "user", "content": "Hello?"}, called, {"role": "tool", "tool_call_id": "c", "content": "1"}]
    text = render(HARMONY_TEMPLATE, messages, [{"type": "function", "function": {"name": "now"}}])
    assert text == (
        "<|start|>developer<|message|>// \nnow<|end|><|start|>user<|message|>Hello?<|end|>"
        f"{START}{ANALYSIS}Hm.<|end|>{START} to=functions.now<|channel|>commentary json<|message|>{{}}<|call|>"
        f"<|start|>functions.now to=assistant<|channel|>commentary<|message|>1<|end|>{START}"
    )


def test_the_switch_of_thinking(tokenizer):
    messages = [{"role": "user", "content": "Hello?"}]
    assert tokenizer.chat_prompt(messages, think=True).text == PROMPT
    with pytest.raises(UsageError, match="reasoning_effort"):
        tokenizer.chat_prompt(messages, think=False)


def test_end_tokens(tokenizer):
    ends = {tokenizer.decode([id]) for id in tokenizer.end_ids}
    assert ends == {"<|im_end|>", "<|return|>", "<|call|>"}
    assert turn_ends(HARMONY_TEMPLATE, tokenizer) == tokenizer.end_ids | {tokenizer.token_to_id("<|end|>")}
    assert turn_ends("", tokenizer) == tokenizer.end_ids


def test_what_the_next_turn_repeats(tokenizer):
    """All of the prompt: the next one drops the reasoning of the reply. After a call it keeps the reasoning."""
    user = {"role": "user", "content": "Hello?"}
    called = {"role": "assistant", "content": "", "thinking": "Hm."}
    called["tool_calls"] = [{"id": "c", "function": {"name": "now", "arguments": {}}}]
    result = {"role": "tool", "content": "1"}
    for messages in ([user], [user, {"role": "assistant", "content": "Hi!", "thinking": "Hm."}, user]):
        prompt = tokenizer.chat_prompt(messages)
        ends = turn_ends(prompt.template, tokenizer)
        turns = turns_of(tokenizer.chat_prompt, messages, prompt, reply_header(tokenizer.chat_prompt), ends)
        assert turns.shared == turns.begun == len(prompt.tokens)
    [(first, last)] = turns.replies
    assert tokenizer.decode(prompt.tokens[first:last]) == f"{FINAL}Hi!<|end|>"
    messages = [user, called, result]
    prompt = tokenizer.chat_prompt(messages)
    turns = turns_of(tokenizer.chat_prompt, messages, prompt, reply_header(tokenizer.chat_prompt), ends)
    assert tokenizer.decode(prompt.tokens[: turns.shared]) == PROMPT  # the reasoning is dropped after the answer
    assert turns.begun == len(prompt.tokens)


# -- the command line --------------------------------------------------------------------------------------------------


def test_the_effort_of_a_prompt_and_of_a_chat(tmp_path, monkeypatch, capsys):
    template = HARMONY_TEMPLATE + "{{ '' if reasoning_effort is not defined else reasoning_effort }}"
    folder = str(write(tmp_path / "model", template=template, control=HARMONY_TOKENS))
    prompts = []
    rendered = Tokenizer.chat_prompt
    monkeypatch.setattr(Tokenizer, "chat_prompt", lambda *a, **k: prompts.append(rendered(*a, **k)) or prompts[-1])
    flags = ["--backend", "numpy", "--max-tokens", "1", "--reasoning-effort", "high"]
    assert main(["--model", folder, "--prompt", "a", *flags]) == 0
    assert any(prompt.text.endswith(f"{START}high") for prompt in prompts)
    prompts.clear()
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n/quit\n"))
    assert main(["--model", folder, "--chat", *flags]) == 0
    assert any(prompt.text.endswith(f"{START}high") for prompt in prompts)
    capsys.readouterr()
    plain = str(write(tmp_path / "plain"))
    assert main(["--model", plain, "--prompt", "a", *flags]) == 2
    assert "has no chat template that reads reasoning_effort; leave --reasoning-effort out" in capsys.readouterr().err
    assert main(["--model", folder, "--prompt", "a", "--raw", *flags]) == 2
    assert "--reasoning-effort and --raw exclude each other" in capsys.readouterr().err
