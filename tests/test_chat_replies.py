"""Reasoning and tool calls in replies of the API and the command line."""

import asyncio
import io
import json
import re

import pytest
from tiny_chat import write as write_model
from tool_texts import (
    HERMES_TEMPLATE,
    hermes,
    qwen,
    take,
)

import generate
from common.errors import BimetalError, UsageError
from common.pieces import Piece, Stats
from generate import terminal
from generate.__main__ import main
from generate.terminal import Waiting

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
    text = "Look." if reason == "length" else "Look.\n<tool_call>\n<func"
    assert (reply.text, len(reply.tool_calls), reply.finish_reason) == (text, 1, reason)


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
