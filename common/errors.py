"""The errors that a user can act on: one sentence that names the thing, its value and what is supported."""

from typing import Any

CLOSED = "the model is closed"  # of a call that comes while its model is being dropped


class BimetalError(ValueError):
    """Bad input from outside: a file, a model, a prompt, a device. The command line prints it and exits with 1."""


class UsageError(BimetalError):
    """A flag or an argument that cannot be used as given. The command line prints it and exits with 2."""


class PromptTooLongError(BimetalError):
    """A prompt of more tokens than the context holds.

    tokens   of the prompt, or a number that it certainly reaches
    context  most tokens of prompt and reply
    """

    def __init__(self, message: str, tokens: int, context: int):
        super().__init__(message)
        self.tokens, self.context = tokens, context


class NoRoomError(BimetalError):
    """A pool of states has no memory left for the rows of a step; the step has changed nothing."""


class NotFiniteError(BimetalError):
    """Logits that are not numbers: damaged weights, or activations beyond the range of their type."""

    def __init__(self, what: str):
        super().__init__(f"{what}: the weights are damaged, or the activations pass the range of their type")


def of_system(error: OSError) -> str:
    """Return an error of the system in one sentence: the file, and what is wrong with it."""
    return f"{error.filename or 'system'}: {error.strerror or error}"


def shown(value: Any) -> str:
    """Return the first 80 characters of a value as Python writes it, for a message about any value at all."""
    try:
        return f"{value!r:.80}"
    except Exception:  # integers of thousands of digits, and objects that fail to write themselves
        return f"<{type(value).__name__}>"
