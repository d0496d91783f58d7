"""Output of a reply on a terminal or a pipe: progress, the text while it is generated, figures at the end."""

import itertools
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from common.amounts import counted
from common.decode.run import WedlmStats
from common.pieces import Stats
from common.terminal import printable
from generate.llm import LLM
from generate.streams import Stream

DIM, RESET = "\x1b[2m", "\x1b[0m"
ERASE_LINE = "\r\x1b[K"
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


def tell_sampling(llm: LLM, given: Mapping[str, Any]) -> None:
    """Print on stderr the recommended sampling that replaces options that are not given."""
    options = {name: value for name, value in llm.recommended_options.items() if name not in given}
    if options:
        values = ", ".join(f"{name} {value:g}" for name, value in options.items())
        print(f"sampling: {values}, as {llm.recommended.source} recommends", file=sys.stderr)


def show(stream: Stream, waiting: "Waiting") -> None:
    """Print the reply to stdout as it comes. A terminal shows the reasoning dimmed; a pipe gets the answer alone."""
    thinking, terminal = False, sys.stdout.isatty()
    for piece in stream:
        waiting.close()
        if piece.reasoning and terminal:
            sys.stdout.write(f"{DIM}{printable(piece.reasoning)}{RESET}")
            thinking = True
        if piece.text and thinking:
            sys.stdout.write("\n\n")
            thinking = False
        sys.stdout.write(printable(piece.text) if terminal else piece.text)
        sys.stdout.flush()
    if stream.finish_reason != "cancelled" and stream.reasoning and not stream.text:
        print("the reply ended before the answer began; see --max-tokens and --no-think", file=sys.stderr)


@contextmanager
def cancelled_by_ctrl_c(stream: Stream, once: bool) -> Iterator[None]:
    """Let Ctrl-C end the reply at its next step; its text so far is kept, and its stats can be read.

    once  a second Ctrl-C raises KeyboardInterrupt; False: it changes nothing, as the reply is ending
    """
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return

    def cancel(*_: object) -> None:
        stream.cancel()
        if once:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Waiting:
    """A spinner on stderr, where that is a terminal, until the first piece of a reply."""

    def __init__(self) -> None:
        self._read = self._total = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._spin, daemon=True) if sys.stderr.isatty() else None

    def update(self, read: int, total: int) -> None:
        """Show how many tokens of the prompt have been read; any thread may call it."""
        self._read, self._total = read, total

    def close(self) -> None:
        """Erase the spinner."""
        if self._thread is not None and not self._over.is_set():
            self._over.set()
            self._thread.join()
            sys.stderr.write(ERASE_LINE)
            sys.stderr.flush()

    def _spin(self) -> None:
        for frame in itertools.cycle(SPINNER):
            tokens = f" {self._read} of {self._total} tokens" if self._total else ""
            sys.stderr.write(f"{ERASE_LINE}{DIM}{frame} reading the prompt{tokens}{RESET}")
            sys.stderr.flush()
            if self._over.wait(0.1):
                return

    def __enter__(self) -> "Waiting":
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def figures(stats: Stats) -> str:
    """Return the stats of a reply in two lines; more where decoding was speculative, or experts were streamed.

    A reply of a few tokens has no speed of decoding.
    """
    read = stats.prompt_tokens - stats.cached_tokens
    cached = f" (and {stats.cached_tokens} kept from before)" if stats.cached_tokens else ""
    if stats.matched_tokens > stats.cached_tokens:
        cached += (
            f" ({stats.matched_tokens} begin an earlier text; no state was kept after the first {stats.cached_tokens})"
        )
    speed = f", {stats.decode_tps:.1f} tok/s, {stats.gb_per_s:.2f} GB/s of weights" if stats.is_timed else ""
    text = (
        f"prefill {counted(read, 'token')}{cached}, {stats.prefill_tps:.1f} tok/s, "
        f"first token in {stats.prefill_seconds:.3f} s\n"
        f"decode {counted(stats.new_tokens, 'token')}{speed}; "
        f"state {stats.state_bytes / 2**20:.1f} MiB, peak memory {stats.peak_bytes / 2**20:.0f} MiB"
    )
    if stats.experts is not None:
        text += f"\n{stats.experts}"
    if stats.wedlm is not None:
        return f"{text}\n{window_figures(stats.wedlm)}"
    return text if stats.accepted is None else f"{text}\n{speculation_figures(stats)}"


def speculation_figures(stats: Stats) -> str:
    """Return the acceptance of draft tokens, and milliseconds per step by phase, in two lines."""
    accepted = stats.accepted
    assert accepted is not None
    steps = max(accepted.steps, 1)
    against = f", {stats.speedup:.2f} x plain decoding" if stats.speedup and stats.is_timed else ""
    positions = " ".join(f"{share:.0%}" for share in accepted.by_position)
    phases = ", ".join(f"{name} {1e3 * seconds / steps:.2f}" for name, seconds in accepted.seconds.items())
    plain = accepted.budgets[0]
    without = f"{plain} of {steps} steps without draft tokens; " if plain else ""
    return (
        f"speculative decoding: {accepted.length:.2f} tokens per step of {accepted.rows / steps:.1f} rows{against}; "
        f"{without}accepted by position: {positions or 'none'}\n"
        f"ms per step: {phases}"
    )


def window_figures(wedlm: WedlmStats) -> str:
    """Return tokens and rows of a WeDLM model's forwards, and milliseconds per forward by phase."""
    phases = ", ".join(f"{name} {1e3 * s / max(wedlm.forwards, 1):.2f}" for name, s in wedlm.seconds.items())
    return (
        f"wedlm: {wedlm.tokens_per_forward:.2f} tokens per forward, {wedlm.rows_per_token:.2f} rows per token, "
        f"p_cache {wedlm.cache_share:.2f}\n"
        f"ms per forward: {phases}"
    )
