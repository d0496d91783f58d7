"""The errors that a user can act on: one sentence that names the thing, its value and what is supported."""


class BimetalError(ValueError):
    """Bad input from outside: a file, a model, a prompt, a device. The command line prints it and exits with 1."""


class UsageError(BimetalError):
    """A flag or an argument that cannot be used as given. The command line prints it and exits with 2."""
