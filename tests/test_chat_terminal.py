"""The chat on a pseudo-terminal: pastes, history, and Ctrl-C."""

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from tiny_chat import write

from generate.line import _history

pexpect = pytest.importorskip("pexpect", reason="pexpect is not installed")
ROOT = Path(__file__).parents[1]


@pytest.fixture
def chat(tmp_path):
    """Start a chat with a history, in the terminal of which `ready` waits for the prompt."""
    (tmp_path / "bimetal").mkdir()
    (tmp_path / "bimetal/chat_history").write_text("\n# 2026-01-01\n+a question of an earlier chat\n")
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"}
    flags = ["--chat", "-m", str(write(tmp_path / "model")), "--backend", "numpy", "-n", "4", "--ctx", "100000"]
    heard = partial(
        signal.signal, signal.SIGINT, signal.SIG_DFL
    )  # a test run in the background ignores Ctrl-C, as the chat would
    command = ["-m", "generate", *flags]
    chat = pexpect.spawn(sys.executable, command, env=environment, cwd=ROOT, timeout=30, preexec_fn=heard)
    chat.expect("/help lists commands")
    ready(chat)
    yield chat
    chat.close(force=True)


def ready(chat):
    chat.expect(r"\?2004h")  # bracketed paste is on


def test_history_pastes_completion_and_ctrl_c(chat, tmp_path):
    chat.send("\x1b[A\r")
    chat.expect("reading the prompt")
    ready(chat)
    chat.send("\x1b[200~line one\nline two\x1b[201~\r")
    ready(chat)
    chat.send("/set temp")
    chat.expect("temperature")  # of the menu
    chat.send("\t 0.7\r")
    ready(chat)
    chat.send("\x1b[200~" + "long " * 8000 + "\x1b[201~\r")
    chat.expect(r"reading the prompt \d+ of")
    chat.send("\x03\x03")
    chat.expect("cancelled before the reply began; the message is not part of the conversation")
    ready(chat)
    chat.send("/set\r")
    chat.expect("temperature +0.7")
    ready(chat)
    talk = tmp_path / "talk.json"
    chat.send(f"/save {talk}\r")
    chat.expect("saved 4 messages")
    for _ in range(2):
        ready(chat)
        time.sleep(0.2)
        chat.send("\x03")
    chat.expect(pexpect.EOF)
    chat.close()
    assert chat.exitstatus == 0
    asked = [message["content"] for message in json.loads(talk.read_text())["messages"][::2]]
    assert asked == ["a question of an earlier chat", "line one\nline two"]
    assert "+line two" in (tmp_path / "bimetal/chat_history").read_text()


def test_a_history_that_cannot_be_kept(tmp_path, monkeypatch, capsys):
    """The terminal showed a traceback, and waited for Enter."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "bimetal/chat_history").mkdir(parents=True)
    history = _history()
    history.append_string("kept for this chat")
    assert history.get_strings() == ["kept for this chat"]
    assert capsys.readouterr().err.endswith("chat_history: Is a directory\n")
