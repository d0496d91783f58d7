"""One prompt, one reply: stream the text to stdout, the figures to stderr."""

import argparse
import sys
from functools import partial

from tqdm import tqdm

from common.errors import UsageError
from common.session import PREFILL_ROWS, Stats
from generate.backends import placement_of
from generate.cli import sampling_options
from generate.llm import LLM, Stream

INTERRUPTED = 130
DIM, RESET = "\x1b[2m", "\x1b[0m"


def run(args: argparse.Namespace) -> int:
    prompt = args.prompt if args.prompt is not None else _stdin()
    how = (args.ctx, True, args.draft, args.fa_window, args.max_kv_size, placement_of(args))
    with LLM(args.model, args.backend, *how) as llm:
        options = sampling_options(args)
        if args.raw or llm.tokenizer.chat_template is None:
            if args.system is not None:
                raise UsageError(f"{args.model} has no chat template, so --system has no place to go")
            if args.think is not None:
                raise UsageError(f"{args.model} has no chat template, so it cannot be told to think or not")
            start = partial(llm.stream, prompt)
        else:
            messages = [{"role": "system", "content": args.system}] if args.system is not None else []
            messages.append({"role": "user", "content": prompt})
            start = partial(llm.stream_chat, messages, think=args.think)
        with PrefillBar() as bar, start(**options, on_prefill=bar.update) as stream:
            whole = show(stream, bar)
        print()
        if args.stats and stream.stats:
            print(figures(stream.stats), file=sys.stderr)
        return 0 if whole else INTERRUPTED


def _stdin() -> str:
    try:
        prompt = sys.stdin.read()
        prompt.encode()  # some locales smuggle undecodable bytes through as half surrogate pairs
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise UsageError(f"the prompt on stdin is not UTF-8: {error.reason} at position {error.start}") from None
    return prompt


def show(stream: Stream, bar: "PrefillBar") -> bool:
    """Print the reply as it comes; False if Ctrl-C ended it. The text so far stays, and the stats are read.

    A terminal shows the reasoning dimmed; anything else gets the answer alone.
    """
    whole, thinking, terminal = True, False, sys.stdout.isatty()
    while True:
        try:
            for piece in stream:
                bar.close()
                if piece.reasoning and terminal:
                    sys.stdout.write(f"{DIM}{piece.reasoning}{RESET}")
                    thinking = True
                if piece.text and thinking:
                    sys.stdout.write("\n\n")
                    thinking = False
                sys.stdout.write(piece.text)
                sys.stdout.flush()
            if whole and stream.reasoning and not stream.text:
                print("the reply ended before the answer began; see --max-tokens and --no-think", file=sys.stderr)
            return whole
        except KeyboardInterrupt:
            if not whole:
                raise
            whole = False
            stream.cancel()


class PrefillBar:
    """Progress over a long prompt, on a terminal only; `update` comes from the owner thread."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None

    def update(self, read: int, total: int) -> None:
        if total <= PREFILL_ROWS or not sys.stderr.isatty():
            return
        if self._bar is None:
            self._bar = tqdm(total=total, desc="reading the prompt", unit="token", leave=False)
        self._bar.update(read - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> "PrefillBar":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def figures(stats: Stats) -> str:
    """The stats of a reply in two lines, four where it was guessed ahead."""
    read = stats.prompt_tokens - stats.cached_tokens
    cached = f" (and {stats.cached_tokens} kept from before)" if stats.cached_tokens else ""
    text = (
        f"prefill {read} tokens{cached}, {stats.prefill_tps:.1f} tok/s, first token in {stats.prefill_seconds:.3f} s\n"
        f"decode {stats.new_tokens} tokens, {stats.decode_tps:.1f} tok/s, {stats.gb_per_s:.2f} GB/s of weights; "
        f"state {stats.state_bytes / 2**20:.1f} MiB, peak memory {stats.peak_bytes / 2**20:.0f} MiB"
    )
    return text if stats.accepted is None else f"{text}\n{speculation_figures(stats)}"


def speculation_figures(stats: Stats) -> str:
    accepted = stats.accepted
    assert accepted is not None
    steps = max(accepted.steps, 1)
    against = f", {stats.speedup:.2f} x steps of one token" if stats.speedup else ""
    places = " ".join(f"{share:.0%}" for share in accepted.by_position)
    phases = ", ".join(f"{name} {1e3 * seconds / steps:.2f}" for name, seconds in accepted.seconds.items())
    return (
        f"guessed ahead: {accepted.length:.2f} tokens per step of {accepted.rows / steps:.1f} rows{against}; "
        f"accepted by place: {places or 'none'}\n"
        f"ms per step: {phases}"
    )
