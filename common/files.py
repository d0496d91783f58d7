"""Write files: a regular file is replaced as a whole or left as it was; any other file is written directly."""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from common.errors import BimetalError, UsageError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a write, which name no file


@contextmanager
def rewriting(path: Path) -> Iterator[IO[bytes]]:
    """Open a binary file for writing and seeking; its bytes replace those of `path` if the block ends without error.

    A regular or new file is written under another name and renamed; a symbolic link is followed and kept. A device
    or a pipe gets the bytes at the end, in order. Raises OSError.
    """
    target = _target(path)
    if target.exists() and not target.is_file():
        with naming(path), TemporaryFile() as file:
            yield file
            file.seek(0)
            with target.open("wb") as sink:
                shutil.copyfileobj(file, sink)
        return
    partial = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with naming(path), partial.open("w+b") as file:
            yield file
        if target.exists():
            shutil.copymode(target, partial)
        partial.replace(target)
    except OSError as error:
        if error.filename == str(partial):
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):  # of a folder that cannot be written, whose error comes from the block
            partial.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name `path` in the error of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            error.filename = str(path)
        raise


def _target(path: Path) -> Path:
    """Resolve the file that a path leads to, or the path of a new one; raises OSError."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():  # which realpath cannot follow
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return target


def check_output(path: Path, inputs: Iterable[Path] = ()) -> None:
    """Refuse, before long work, a file that `rewriting` cannot write, and one of the `inputs` of that work.

    Raises UsageError for an input, else OSError.
    """
    target = _target(path)
    if target.is_file() and (file := next((file for file in inputs if target.samefile(file)), None)):
        raise UsageError(f"{path} is an input, {file}, and would be overwritten; give the name of another file")
    if target.is_file() or not target.exists():
        check_folder(path, target.parent)


def check_folder(path: Path, folder: Path) -> None:
    """Refuse a folder in which no file can be created; raises OSError that names `path`, the file to create."""
    try:
        TemporaryFile(dir=folder).close()
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def rewrite(path: Path, text: str) -> None:
    """Replace the content of `path` by `text`, in UTF-8, as `rewriting` does."""
    with rewriting(path) as file:
        file.write(text.encode())


def check_regular(path: Path) -> None:
    """Refuse a path that exists and is no file whose end is known: BimetalError."""
    if path.exists() and not path.is_file():
        raise BimetalError(f"{path} is not a regular file")


def hold(file: IO[bytes]) -> None:
    """Mark an open file as in use, for `is_held` of any process, until all its handles and mappings are closed."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def is_held(path: Path) -> bool:
    """Test whether a process, this one included, has the file open or locked; False where the system cannot tell."""
    with suppress(OSError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
