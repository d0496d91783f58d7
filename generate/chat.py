"""`--chat`: a conversation in the terminal."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common.amounts import counted
from common.errors import BimetalError, UsageError, of_system, shown
from common.files import check_regular, rewrite
from common.options import ChatOptions
from common.terminal import printable
from generate.line import Interrupted, line_reader
from generate.llm import LLM, warm_up_beside
from generate.prompt import UndecodableError, check_template, decoded, rendering, system_message
from generate.terminal import Waiting, cancelled_by_ctrl_c, figures, show, tell_sampling

COMMANDS = {
    "reset": "forget the conversation, keep the system prompt",
    "system": "TEXT  set the system prompt and forget the conversation; without TEXT, remove it",
    "regen": "write the last reply again",
    "set": "NAME VALUE  change an option, such as temperature 0.7; without NAME, list the options",
    "save": "FILE  write the conversation to FILE as JSON",
    "load": "FILE  continue a saved conversation",
    "stats": "figures of the last reply",
    "help": "this list",
    "quit": "leave (or Ctrl-D, or Ctrl-C twice at an empty prompt)",
}
KEYS = (
    'A pasted text is one message, whatever its lines; Alt-Enter begins a new line. A line that is only """ begins '
    "or ends a message of several lines. Ctrl-C stops the reply, not the program."
)


def _switch(text: str) -> bool:
    return {"on": True, "off": False}[text]


SETTINGS: dict[str, Callable[[str], Any]] = {  # what /set changes, and how its value is read
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "seed": int,
    "max_tokens": int,
    "think": _switch,
}


NO_VALUE = {"seed": ("-1",), "max_tokens": ("-1", "-2")}  # as the flags take them: a new seed, and no limit
KEPT = ("role", "content", "reasoning_content")  # of a message in a file
KINDS = {float: "a number", int: "a whole number", _switch: "on or off"}


def run(args: argparse.Namespace) -> int:
    with LLM(args.model, args.load, partial(check_template, args)) as llm:
        if sys.stdin.isatty():
            print(f"{llm.path.name} ({llm.architecture}) on {llm.backend}, context {llm.context}; /help lists commands")
            warm_up_beside(llm)  # while the user types
        tell_sampling(llm, args.options)
        Chat(llm, args).loop()
    return 0


class Chat:
    """The history and the commands that act on it."""

    def __init__(self, llm: LLM, args: argparse.Namespace):
        self.llm, self.show_stats = llm, args.stats
        self.options: dict[str, Any] = args.options | rendering(args)
        self.system: str | None = args.system
        self.history: list[dict[str, Any]] = []
        self.last_figures = "no reply yet"
        self.read_line = line_reader([f"/{name}" for name in COMMANDS], [f"/set {name}" for name in SETTINGS])

    def loop(self) -> None:
        """Answer messages and run commands until the end of input, /quit, or two Ctrl-C at an empty prompt."""
        interrupts = 0
        while True:
            try:
                text = self._read()
                interrupts = 0
                if text is None or (text.startswith("/") and self._command(*text[1:].partition(" ")[::2])):
                    return
                if text.strip() and not text.startswith("/"):
                    self._answer([*self.history, {"role": "user", "content": text}])
            except Interrupted as interrupted:  # Ctrl-C dropped the line
                interrupts = interrupts + 1 if interrupted.was_empty else 0
                if interrupts == 2:
                    return
                print("Ctrl-C again, Ctrl-D or /quit leaves" if interrupts else "")
            except KeyboardInterrupt:  # before a reply began
                print("cancelled", file=sys.stderr)
            except UndecodableError:
                raise
            except BimetalError as error:
                print(f"error: {printable(str(error))}", file=sys.stderr)
            except OSError as error:
                if error.filename is None:  # of stdin or stdout themselves: leave them open
                    raise
                print(f"error: {printable(of_system(error))}", file=sys.stderr)

    def _read(self) -> str | None:
        """Return the next message or command; None at the end of input. Raises Interrupted on Ctrl-C."""
        try:
            return decoded(self._message, "the message")
        except EOFError:
            return None

    def _message(self) -> str:
        """Return the next line, or the lines after one that is only three quotes, to the next such line."""
        text = self.read_line("> ")
        if text.strip() != '"""':
            return text
        lines = []
        while (line := self.read_line("")).strip() != '"""':
            lines.append(line)
        return "\n".join(lines)

    def _answer(self, messages: list[dict[str, Any]]) -> None:
        """Reply to `messages`, which with the reply become the history; without any reply the history is unchanged."""
        with (
            Waiting() as waiting,
            self.llm.stream_chat(
                [*system_message(self.system), *messages], **self.options, on_prefill=waiting.update
            ) as stream,
            cancelled_by_ctrl_c(stream, once=False),
        ):
            show(stream, waiting)
        if stream.finish_reason == "cancelled" and not (stream.text or stream.reasoning):
            print("cancelled before the reply began; the message is not part of the conversation", file=sys.stderr)
            return
        print()
        self.history = [*messages, stream.reply().message]
        assert stream.stats
        self.last_figures = figures(stream.stats)
        if self.show_stats:
            print(self.last_figures, file=sys.stderr)

    def _command(self, name: str, argument: str) -> bool:
        """Run a command; return True to leave."""
        argument = argument.strip()
        match name:
            case "quit" | "exit":
                return True
            case "help":
                print("\n".join(f"/{command:7} {what}" for command, what in COMMANDS.items()) + f"\n{KEYS}")
            case "reset":
                self.history = []
            case "system":
                self.system, self.history = argument or None, []
            case "stats":
                print(self.last_figures)
            case "set":
                self._set(*argument.partition(" ")[::2])
            case "regen":
                self._regenerate()
            case "save":
                self._save(_path(argument, "save"))
            case "load":
                self._load(_path(argument, "load"))
            case _:
                raise UsageError(f"/{name} is not a command; /help lists them, and a space before / makes it a message")
        return False

    def _set(self, name: str, value: str) -> None:
        """Set an option for later replies, "default" resets it; without a name, list the options."""
        if not name:
            for known in SETTINGS:
                used = self.options.get(known, self.llm.recommended_options.get(known))
                print(f"{known:20} {'default' if used is None else used}")
            return
        if (key := name.replace("-", "_")) not in SETTINGS:
            raise UsageError(f"/set {name} is not an option; options: {', '.join(SETTINGS)}")
        value = value.strip()
        try:
            read = None if value == "default" or value in NO_VALUE.get(key, ()) else SETTINGS[key](value)
        except (ValueError, KeyError):
            kind = KINDS[SETTINGS[key]]
            raise UsageError(f"/set {key} takes {kind} or default, not {shown(value)}") from None
        options = {n: v for n, v in self.options.items() if n != key} | ({} if read is None else {key: read})
        ChatOptions(**options)  # refuses values that no model supports
        if key == "think":  # and those that this model's template does not support
            self.llm.render([*system_message(self.system), {"role": "user", "content": "a"}], think=read)
        self.options = options

    def _regenerate(self) -> None:
        messages = self.history[:-1] if self.history and self.history[-1]["role"] == "assistant" else self.history
        if not messages:
            raise UsageError("there is no reply to write again")
        self._answer(messages)

    def _save(self, path: Path) -> None:
        saved = {"system": self.system, "messages": self.history}
        rewrite(path, json.dumps(saved, ensure_ascii=False, indent=1))
        print(f"saved {counted(len(self.history), 'message')} to {path}")

    def _load(self, path: Path) -> None:
        check_regular(path)
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            system, messages = _entry(saved, "system"), _entry(saved, "messages")
            if not isinstance(messages, list):
                raise TypeError(f"{shown(messages)} is no list")
            history = [
                {key: _text(_entry(m, key)) for key in KEPT if key != "reasoning_content" or key in m} for m in messages
            ]
            system = None if system is None else _text(system)
        except (ValueError, TypeError, RecursionError) as error:
            why = f"it is not UTF-8 at byte {error.start}" if isinstance(error, UnicodeDecodeError) else error
            raise BimetalError(f"{path} is not a conversation that /save wrote: {why}") from None
        self.system, self.history = system, history
        print(f"loaded {counted(len(history), 'message')} from {path}")


def _entry(value: Any, key: str) -> Any:
    if not isinstance(value, dict) or key not in value:
        raise TypeError(f"{shown(value)} has no {key}")
    return value[key]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{shown(value)} is no text")
    return value


def _path(file: str, command: str) -> Path:
    """Return the path of a typed file name: if the locale is not UTF-8, the system's names are decoded differently."""
    if not file or "\0" in file:
        raise UsageError(f"/{command} needs a file name{' without the character NUL' if file else ''}")
    return Path(os.path.expanduser(os.fsdecode(file.encode())))
