"""`python -m generate` and `bimetal`: run one command, turn errors into one sentence and an exit code."""

import argparse
import codecs
import io
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from common.errors import BimetalError, UsageError, of_system
from common.files import FULL
from common.terminal import Printable, printable
from generate import machines
from generate.bench_options import (
    BenchOptions,
    ModelBench,
    ServeBench,
    SpecBench,
    StreamsBench,
    SyntheticBench,
    SyntheticSpecBench,
    SyntheticWindowBench,
)
from generate.cli import parse
from generate.interrupts import INTERRUPTED, raise_again


def script() -> None:
    """Run the console script, and exit the process."""
    no_output = sys.stdout is None
    prepare_streams()
    if no_output:
        sys.exit(_fail("stdout is closed, so there is nowhere to write; redirect it to a file or to /dev/null", 1))
    raise_again()
    code = main(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OSError:  # main has reported it; flushing the rest of the output at exit would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


class Notes(io.FileIO):
    """A file for notes, errors and logs; lines that cannot be written are dropped.

    A full disk, a closed terminal or a closed pipe does not end the work that the notes report.
    """

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return memoryview(data).nbytes


def prepare_streams() -> None:
    """Open the null device in place of standard streams that are closed, and take ASCII, the C locale's, for UTF-8.

    Characters that another locale's encoding lacks are written as "?". Bytes of stdin that are no text are read as half
    surrogate pairs, which `prompt.decoded` refuses. Lines that stderr cannot take are dropped.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:  # otherwise the next opened file would get the closed descriptor's number
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))
        elif isinstance(stream, io.TextIOWrapper):
            ascii = codecs.lookup(stream.encoding).name == "ascii"
            errors = {"stdin": "surrogateescape", "stdout": "replace", "stderr": "backslashreplace"}[name]
            stream.reconfigure(encoding="utf-8" if ascii else None, errors=errors)
            if name == "stderr":
                notes = io.BufferedWriter(Notes(descriptor, "w", closefd=False))
                sys.stderr = io.TextIOWrapper(notes, stream.encoding, errors, line_buffering=True)


def main(argv: list[str]) -> int:
    try:
        code = run(parse(argv))
        sys.stdout.flush()
        return code
    except UsageError as error:
        return _fail(error, 2)
    except BimetalError as error:
        return _fail(error, 1)
    except MemoryError as error:
        return _fail(
            f"out of memory{': ' if str(error) else ''}{error}; try a smaller quantization or a smaller --ctx", 1
        )
    except BrokenPipeError:  # the reader of our output has closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None and error.errno in FULL:  # of files `naming` gives the name
            error.filename = "stdout"
        return _fail(of_system(error), 1)
    except KeyboardInterrupt:
        return INTERRUPTED


def run(args: argparse.Namespace) -> int:
    """Run the command of parsed arguments; return its exit code."""
    options = getattr(args, "load", args)
    if machines.is_in_group(options):
        machines.check(args)
        if machines.is_follower(options):
            from generate import follow

            return follow.follow(args)
    match args.command:
        case "prompt":
            from generate import prompt

            return prompt.run(args)
        case "chat":
            from generate import chat

            return chat.run(args)
    if not sys.stdout.isatty():
        return _report(args)
    with redirect_stdout(Printable(sys.stdout)):  # names of tensors and files, texts of tokens
        return _report(args)


def _report(args: argparse.Namespace) -> int:
    """Run a command other than a reply to a prompt; return its exit code."""
    match args.command:
        case "list" | "pull" | "rm":
            from generate import downloads

            commands = {"list": downloads.run_list, "pull": downloads.run_pull, "rm": downloads.run_rm}
            return commands[args.command](args)
        case "devices":
            from generate import devices

            return devices.run()
        case "inspect":
            from generate import inspect

            return inspect.run(args)
        case "bench":
            return _bench(args.options)
        case "perplexity":
            from generate import perplexity

            return perplexity.run(args)
        case "fit":
            from generate import fit

            return fit.run(args)
        case "quantize":
            from generate import quantize

            return quantize.run(args)
        case "calibrate":
            from generate import calibrate

            return calibrate.run(args)
        case "pack":
            from generate import pack

            return pack.run(args)
        case "plan":
            from generate import plan, plan_machines

            return plan.run(args) if args.cluster is None else plan_machines.run(args)
        case "batch":
            from generate import batch

            return batch.run(args)
        case "serve":
            return _serve(args)
        case "launch":
            from generate import launch

            return launch.run(args)
        case "selftest":
            from generate import selftest

            return selftest.run(args)
    raise AssertionError(args.command)


def _serve(args: argparse.Namespace) -> int:
    try:
        from generate.server import serve
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise BimetalError(
            f"{error.name} is not installed; the server needs it: pip install 'bimetal[server]'"
        ) from None
    return serve.run(args)


def _bench(options: BenchOptions) -> int:
    from generate import (
        bench,
        bench_log,
        bench_serve,
        bench_spec,
        bench_streams,
        bench_synthetic,
        bench_synthetic_spec,
        bench_wedlm,
    )

    if options.log:
        bench_log.check_log(Path(options.log))
    match options:
        case ModelBench():
            return bench.run(options)
        case SpecBench():
            return bench_spec.run(options)
        case SyntheticBench():
            return bench_synthetic.run(options)
        case SyntheticSpecBench():
            return bench_synthetic_spec.run(options)
        case SyntheticWindowBench():
            return bench_wedlm.run(options)
        case StreamsBench():
            return bench_streams.run(options)
        case ServeBench():
            return bench_serve.run(options)
    raise AssertionError(options)


def _fail(error: object, code: int) -> int:
    print(f"error: {printable(str(error))}", file=sys.stderr)
    return code


if __name__ == "__main__":
    script()
