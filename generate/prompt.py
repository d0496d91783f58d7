"""One prompt, one reply: the text to stdout, figures to stderr."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import BimetalError, UsageError
from common.infill import without_tokens
from common.tokenizer import Tokenizer
from common.tools import is_harmony
from generate.interrupts import INTERRUPTED
from generate.llm import LLM, Prepared
from generate.perplexity import read_text
from generate.terminal import Waiting, cancelled_by_ctrl_c, figures, show, tell_sampling

MOST_READ = 1 << 27  # characters of a prompt on stdin, which may never end


def run(args: argparse.Namespace) -> int:
    prompt, form = _prompt(args), _form(args)
    with LLM(args.model, args.load, partial(check_template, args)) as llm:
        if args.raw or args.suffix is not None or llm.tokenizer.chat_template is None:
            start = partial(llm.stream, prompt, suffix=args.suffix)
        else:
            messages = [*system_message(args.system), {"role": "user", "content": prompt}]
            how = rendering(args)
            if form:
                _check_answers(llm, llm.prepare_chat(messages, **how), next(iter(form)))
            start = partial(llm.stream_chat, messages, **how)
        guide = llm.guide(**form) if form else None
        tell_sampling(llm, args.options)
        with (
            Waiting() as waiting,
            start(**args.options, guide=guide, on_prefill=waiting.update) as stream,
            cancelled_by_ctrl_c(stream, once=True),
        ):
            show(stream, waiting)
        print()
        if args.stats and stream.stats:
            print(figures(stream.stats), file=sys.stderr)
        return INTERRUPTED if stream.finish_reason == "cancelled" else 0


def rendering(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a chat's prompt that the flags give."""
    effort = {} if args.reasoning_effort is None else {"template": {EFFORT: args.reasoning_effort}}
    return {"think": args.think, "parse_special": args.parse_special, **effort}


def _form(args: argparse.Namespace) -> dict[str, Any]:
    """Return the argument of `LLM.guide` that the flags give; {} for a reply of any form."""
    if args.json_schema is not None:
        return {"schema": args.json_schema}
    if args.grammar_file is not None:
        return {"grammar": read_text(Path(args.grammar_file))}
    return {} if args.grammar is None else {"grammar": args.grammar}


def _check_answers(llm: LLM, prompt: Prepared, form: str) -> None:
    """Refuse a prompt whose reply begins with reasoning, which would have to follow the form: UsageError."""
    if prompt.parser is not None and prompt.parser().in_reasoning:
        always = is_harmony(llm.tokenizer.chat_template or "")
        hint = "send the request to a server, where it holds for the answer" if always else "give --no-think"
        raise UsageError(f"the {form} cannot be kept: the chat template begins replies with reasoning; {hint}")


def check_template(args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    """Refuse flags that the model's template or tokenizer lacks support for: UsageError, BimetalError in its words."""
    if args.suffix is not None and tokenizer.fim.missing:
        raise UsageError(f"--suffix: {without_tokens(tokenizer)}")
    if args.raw or args.suffix is not None:
        return
    if args.reasoning_effort is not None and EFFORT not in (tokenizer.chat_template or ""):
        raise UsageError(f"{args.model} has no chat template that reads {EFFORT}; leave --reasoning-effort out")
    if tokenizer.chat_template is not None:
        messages = [*system_message(args.system), {"role": "user", "content": "a"}]
        tokenizer.chat_prompt(messages, think=args.think, parse_special=args.parse_special)
    elif args.command == "chat":
        raise UsageError(f"{args.model} has no chat template; use --prompt, which continues a text")
    elif args.system is not None:
        raise UsageError(f"{args.model} has no chat template, so --system cannot be used")
    elif args.think is not None:
        raise UsageError(f"{args.model} has no chat template, so --think and --no-think cannot be used")


def system_message(text: str | None) -> list[dict[str, Any]]:
    """Return the messages that a conversation begins with: the system prompt, or none."""
    return [] if text is None else [{"role": "system", "content": text}]


EFFORT = "reasoning_effort"  # a variable of templates


class UndecodableError(BimetalError):
    """Bytes of stdin that cannot be decoded, nor can the bytes after them."""


def decoded(read: Callable[[], str], what: str) -> str:
    """Return the text of stdin that `read` returns, named `what` in errors.

    Raises BimetalError for bytes that are not UTF-8, which the text holds as half surrogate pairs, and
    UndecodableError if the encoding of stdin, such as UTF-16, cannot hold such bytes.
    """
    try:
        text = read()
    except UnicodeError as error:
        why = error.reason if isinstance(error, UnicodeDecodeError) else error
        encoding = f"{sys.stdin.encoding.upper()}, the encoding that PYTHONIOENCODING or the locale gives stdin"
        raise UndecodableError(f"{what} is not {encoding}: {why}") from None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BimetalError(f"{what} is not UTF-8 at character {error.start + 1}") from None
    return text


def _prompt(args: argparse.Namespace) -> str:
    """Return the text of --prompt, of the file of --file, or of stdin; raises BimetalError."""
    if args.prompt not in (None, "-"):
        return str(args.prompt)
    if args.file is None:
        return _stdin()
    text = read_text(Path(args.file))
    if not text:
        raise UsageError(f"{args.file} is empty; a prompt must have at least one character")
    return text


def _stdin() -> str:
    prompt = decoded(lambda: sys.stdin.read(MOST_READ + 1), "the prompt on stdin")
    if len(prompt) > MOST_READ:
        raise UsageError(f"the prompt on stdin has more than {MOST_READ} characters, which is the most supported")
    if not prompt:
        raise UsageError("the prompt on stdin is empty; it must have at least one character, or give --prompt TEXT")
    return prompt
