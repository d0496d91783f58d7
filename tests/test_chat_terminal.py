"""The chat on a pseudo-terminal: pastes, history, and Ctrl-C."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
from tiny_chat import write

pexpect = pytest.importorskip("pexpect", reason="pexpect is not installed")
ROOT = Path(__file__).parents[1]


def test_a_paste_is_one_message_and_two_ctrl_c_leave(tmp_path):
    folder, talk = write(tmp_path / "model"), tmp_path / "talk.json"
    flags = ["--chat", "-m", str(folder), "--backend", "numpy", "-n", "4"]
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"}
    chat = pexpect.spawn(sys.executable, ["-m", "generate", *flags], env=environment, cwd=ROOT, timeout=30)
    chat.expect("/help lists commands")
    chat.expect(r"\?2004h")  # bracketed paste is on
    chat.send("\x1b[200~line one\nline two\x1b[201~\r")
    chat.expect(r"\?2004h")
    chat.send("/set temperature 0.7\r")
    chat.expect(r"\?2004h")
    chat.send(f"/save {talk}\r")
    chat.expect("saved 2 messages")
    for _ in range(2):
        chat.expect(r"\?2004h")
        time.sleep(0.2)
        chat.send("\x03")
    chat.expect(pexpect.EOF)
    chat.close()
    assert chat.exitstatus == 0
    assert json.loads(talk.read_text())["messages"][0] == {"role": "user", "content": "line one\nline two"}
    assert "+line two" in (tmp_path / "bimetal/chat_history").read_text()
