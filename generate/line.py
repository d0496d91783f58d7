"""Read a line of a chat: on a terminal with history, completion and pasted lines, else as input() does.

A terminal is read through prompt_toolkit, because readline would read each line of a paste as a message.
"""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any


class Interrupted(Exception):  # noqa: N818  a key, no error
    """Ctrl-C while a line was typed. `was_empty`: nothing had been typed."""

    def __init__(self, was_empty: bool):
        self.was_empty = was_empty


def line_reader(*completions: Sequence[str]) -> Callable[[str], str]:
    """Return a function that takes a prompt and returns the line, or the pasted lines, that a person enters.

    completions  groups of commands that the Tab key completes

    The function raises EOFError at the end of input and Interrupted on Ctrl-C.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _plain_line
    return _terminal_reader([command for commands in completions for command in commands])


def _plain_line(prompt: str) -> str:
    try:
        return input(prompt if sys.stdin.isatty() else "")
    except KeyboardInterrupt:
        raise Interrupted(was_empty=True) from None


def _terminal_reader(commands: Sequence[str]) -> Callable[[str], str]:
    """Return a reader with history, completion of commands, and lines that Alt-Enter adds."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer, Completion
    from prompt_toolkit.key_binding import KeyBindings

    class Commands(Completer):
        def get_completions(self, document: Any, complete_event: Any) -> Iterable[Completion]:
            typed = document.text_before_cursor
            if typed.startswith("/"):
                shorter = [c for c in commands if c.startswith(typed) and c.count(" ") == typed.count(" ")]
                yield from (Completion(command, start_position=-len(typed)) for command in shorter)

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(history=_history(), completer=Commands(), key_bindings=keys)

    def read(prompt: str) -> str:
        try:
            return session.prompt(prompt)
        except KeyboardInterrupt:
            raise Interrupted(was_empty=not session.default_buffer.text) from None

    return read


def _history() -> Any:
    """Open the history of lines, a file that only the user can read; in memory if the file cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    file = Path(state, "bimetal", "chat_history")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(0o600)
        file.open("ab").close()
    except OSError as error:
        print(f"earlier messages are not kept: {file}: {error.strerror}", file=sys.stderr)
        return InMemoryHistory()
    return FileHistory(str(file))
