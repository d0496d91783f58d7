"""`python -m generate`: parse the command line, run one command, turn errors into one sentence and an exit code."""

import os
import sys

from common.errors import BimetalError, UsageError
from generate.cli import parse

INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended


def main(argv: list[str]) -> int:
    try:
        args = parse(argv)
        return args.run(args)
    except UsageError as error:
        return _fail(error, 2)
    except BimetalError as error:
        return _fail(error, 1)
    except MemoryError as error:
        return _fail(
            f"out of memory{': ' if str(error) else ''}{error}; try a smaller quantization or a smaller --ctx", 1
        )
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(f"{error.filename or 'system'}: {error.strerror or error}", 1)
    except KeyboardInterrupt:
        return INTERRUPTED


def _fail(error: object, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
