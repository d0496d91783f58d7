"""`--chat`: a conversation in the terminal."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from common.errors import BimetalError, UsageError
from generate.backends import placement_of
from generate.cli import sampling_options
from generate.llm import LLM
from generate.reply import PrefillBar, figures, show

HELP = """\
/reset        forget the conversation, keep the system prompt
/system TEXT  set the system prompt and forget the conversation; without TEXT, remove it
/regen        write the last reply again
/save FILE    write the conversation to FILE as JSON
/load FILE    continue a saved conversation
/stats        figures of the last reply
/help         this list
/quit         leave (or Ctrl-D)
A line that is only \"\"\" begins or ends a message of several lines. Ctrl-C stops the reply, not the program."""


def run(args: argparse.Namespace) -> int:
    how = (args.ctx, True, args.draft, args.fa_window, args.max_kv_size, placement_of(args))
    with LLM(args.model, args.backend, *how) as llm:
        if llm.tokenizer.chat_template is None:
            raise UsageError(f"{args.model} has no chat template; use --prompt with --raw")
        if sys.stdin.isatty():
            import readline  # noqa: F401  line editing and history for input()

            print(f"{llm.path.name} ({llm.architecture}) on {llm.backend}, context {llm.context}; /help lists commands")
        Chat(llm, args).loop()
    return 0


class Chat:
    """The history and the commands that act on it."""

    def __init__(self, llm: LLM, args: argparse.Namespace):
        self.llm, self.show_stats = llm, args.stats
        self.options = sampling_options(args) | {"think": args.think}
        self.system: str | None = args.system
        self.history: list[dict[str, Any]] = []
        self.last_figures = "no reply yet"

    def loop(self) -> None:
        while (text := self._read()) is not None:
            try:
                if text.startswith("/"):
                    if self._command(*text[1:].partition(" ")[::2]):
                        return
                elif text.strip():
                    self.history.append({"role": "user", "content": text})
                    self._reply()
            except (BimetalError, OSError) as error:
                print(f"error: {error}", file=sys.stderr)

    def _read(self) -> str | None:
        """The next message or command; None at the end of input. Ctrl-C drops the line."""
        prompt = "> " if sys.stdin.isatty() else ""
        try:
            line = input(prompt)
            if line.strip() != '"""':
                return line
            lines = []
            while (line := input("")).strip() != '"""':
                lines.append(line)
            return "\n".join(lines)
        except EOFError:
            return None
        except KeyboardInterrupt:
            print("\nCtrl-D or /quit leaves")
            return ""

    def _reply(self) -> None:
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        try:
            with PrefillBar() as bar:
                stream = self.llm.stream_chat(system + self.history, **self.options, on_prefill=bar.update)
                with stream:
                    show(stream, bar)
        except BimetalError:
            self.history.pop()  # the message that could not be answered
            raise
        print()
        self.history.append(stream.reply().message)
        assert stream.stats
        self.last_figures = figures(stream.stats)
        if self.show_stats:
            print(self.last_figures, file=sys.stderr)

    def _command(self, name: str, argument: str) -> bool:
        """Run a command; True to leave."""
        argument = argument.strip()
        if name in ("quit", "exit"):
            return True
        if name == "help":
            print(HELP)
        elif name == "reset":
            self.history.clear()
        elif name == "system":
            self.system = argument or None
            self.history.clear()
        elif name == "stats":
            print(self.last_figures)
        elif name == "regen":
            self._regenerate()
        elif name == "save":
            self._save(argument)
        elif name == "load":
            self._load(argument)
        else:
            raise UsageError(
                f"/{name} is not a command; /help lists them, and a message that begins with / can be quoted"
            )
        return False

    def _regenerate(self) -> None:
        if not self.history:
            raise UsageError("there is no reply to write again")
        if self.history[-1]["role"] == "assistant":
            self.history.pop()
        self._reply()

    def _save(self, file: str) -> None:
        path, partial = _path(file, "save"), _path(file + ".part", "save")
        partial.write_text(json.dumps({"system": self.system, "messages": self.history}, ensure_ascii=False, indent=1))
        os.replace(partial, path)
        print(f"saved {len(self.history)} messages to {path}")

    def _load(self, file: str) -> None:
        path = _path(file, "load")
        try:
            saved = json.loads(path.read_text())
            system, messages = saved["system"], saved["messages"]
            keys = ("role", "content", "reasoning_content")
            history = [{key: str(m[key]) for key in keys if key in m or key != "reasoning_content"} for m in messages]
        except (ValueError, KeyError, TypeError) as error:
            raise BimetalError(f"{path} is not a conversation that /save wrote: {error}") from None
        self.system, self.history = system, history
        print(f"loaded {len(history)} messages from {path}")


def _path(file: str, command: str) -> Path:
    if not file or file == ".part":
        raise UsageError(f"/{command} needs a file name")
    return Path(file).expanduser()
