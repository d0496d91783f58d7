"""Handle Ctrl-C while the command line is imported, before its own `except` is active."""

import os
import signal
import sys

INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended


def end_quietly() -> None:
    """Have Ctrl-C end this process without a traceback, where it was started for the command line."""
    module = sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] if sys.argv[:1] == ["-m"] else []
    is_command = module == ["generate"] or os.path.basename("".join(sys.argv[:1])) == "bimetal"
    if is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Have Ctrl-C raise KeyboardInterrupt again, where `end_quietly` has changed that."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: object) -> None:
    os._exit(INTERRUPTED)
