import sys

import numpy as np
import pytest
import tiny_chat
from safetensors.numpy import load_file, save_file

from common.terminal import printable
from generate.__main__ import main


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("żółć 東京 🙂 ‍", "żółć 東京 🙂 ‍"),
        ("\x1b]52;c;aGk=\x07", "\\x1b]52;c;aGk=\\x07"),  # sets the clipboard
        ("\x1b[8mhidden", "\\x1b[8mhidden"),
        ("\x9b8m", "\\x9b8m"),  # CSI in one character
        ("kept\rover", "kept\\x0dover"),
        ("\x00\x7f\x08", "\\x00\\x7f\\x08"),
        ("abc\u202ecba\u2066", "abc\\u202ecba\\u2066"),
    ],
)
def test_printable(text, shown):
    assert printable(text) == shown
    assert "".join(map(printable, text)) == shown


def test_replies_and_errors_on_a_terminal(tmp_path, capsys, monkeypatch):
    """A random model of one-byte tokens writes control characters soon; a pipe gets them as they are."""
    folder = tiny_chat.write(tmp_path / "m")
    command = [
        "--model",
        str(folder),
        "--backend",
        "numpy",
        "--raw",
        "--prompt",
        "hi",
        "-n",
        "120",
        "--temperature",
        "2",
    ]
    assert main([*command, "--seed", "0"]) == 0
    piped = capsys.readouterr().out
    assert printable(piped) != piped
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "isatty", lambda: True)
        assert main([*command, "--seed", "0"]) == 0
        assert capsys.readouterr().out == printable(piped)
    bad = tiny_chat.write(tmp_path / "bad", template="{{ raise_exception('\x1b]52;c;aGk=\x07') }}")
    assert main(["--model", str(bad), "--backend", "numpy", "--prompt", "hi"]) == 1
    assert "this conversation: \\x1b]52;c;aGk=\\x07\n" in capsys.readouterr().err


def test_reports_on_a_terminal(tmp_path, capsys, monkeypatch):
    """Names of tensors reached it as they are."""
    folder = tiny_chat.write(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"\x1b]52;c;aGk=\x07": np.zeros(4, np.float32)}, folder / "model.safetensors")
    said = {}
    for terminal in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
            assert main(["inspect", str(folder)]) == 0
            said[terminal] = capsys.readouterr().out
    assert "not understood: \x1b]52;c;aGk=\x07" in said[False]
    assert said[True] == printable(said[False])
