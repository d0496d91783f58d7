"""The disk tier: a folder of files, one per saved state, in a folder of its own for each fingerprint.

A thread writes the files, so that no reply waits for the disk; if the process dies, only unwritten files are lost. A
file is marked older than the files that it continues, so that no file continues the oldest one.
"""

import os
import queue
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import BimetalError, of_system
from common.files import is_held
from common.prefix_cache import Saved
from common.prefix_file import DamagedError, Header, file_bytes, is_ours, key_of, read, read_header, write
from common.prefix_tree import PAGE
from common.reading import Reading, common_length, same_steps
from common.step import LongStep

NAME = re.compile(r"[0-9a-f]{32}\.state")
PARTIAL = re.compile(r"[0-9a-f]{32}\.state\.\d+\.part")
FOLDER = re.compile(r"[0-9a-f]{32}")
IN_FLIGHT = 4  # maximum number of states that wait to be written; further states are not written


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


@dataclass(frozen=True)
class Known:
    """A state on the disk, or one that waits to be written; the latter has no header.

    base   the file that has the rows of the tokens before `first`, and possibly more rows; "" without one
    first  first of the tokens whose rows are in this file
    """

    tokens: np.ndarray
    long_steps: tuple[LongStep, ...]
    base: str
    first: int
    header: Header | None = None

    @classmethod
    def of(cls, header: Header) -> "Known":
        return cls(header.tokens, header.long_steps, header.base, header.first, header)

    def shared(self, tokens: np.ndarray, long_steps: Sequence[LongStep]) -> int:
        """Count the first tokens, without the last one, whose rows equal those of a state with such long steps."""
        return same_steps(common_length(self.tokens, tokens[:-1]), self.long_steps, long_steps)

    def usable(self, tokens: np.ndarray, reading: Reading) -> int:
        """Count the first tokens of a prompt, without its last one, after which `reading` can continue this state.

        A state with a point can only be used as a whole; one that is not written yet cannot be used: 0.
        """
        if self.header is None:
            return 0
        n = reading.usable(common_length(self.tokens, tokens[:-1]), self.long_steps)
        return 0 if self.header.has_point and n < len(self.tokens) else n


class PrefixDisk:
    """States of one fingerprint in `folder`; states of all fingerprints there take at most `budget` bytes.

    report  function that is called with a line about each file that is ignored
    """

    def __init__(self, folder: Path, budget: int, fingerprint: str, report: Callable[[str], object] = to_stderr):
        self.top, self.folder, self.budget = folder, folder / fingerprint, budget
        self.fingerprint, self.report = fingerprint, report
        self.known: dict[str, Known] = {}
        self._lock = threading.Lock()
        self._looked = 0  # modification time of the folder at the last look
        self._ignored = set[str]()  # names of files
        self._jobs: queue.Queue[tuple[str, Saved] | None] = queue.Queue(IN_FLIGHT)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BimetalError(f"the folder of saved states {self.folder} cannot be made: {error.strerror}") from None
        self._scan()
        self._thread = threading.Thread(target=self._write_all, name="bimetal saved states", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._jobs, self._thread)  # at exit, waiting states are written

    # -- what the memory tier calls ------------------------------------------------------------------------------------

    def first_missing(self, tokens: np.ndarray, long_steps: Sequence[LongStep]) -> int | None:
        """Find the first token whose rows must be stored; None if the whole state is stored, or has no room."""
        key = key_of(self.fingerprint, tokens, long_steps)
        with self._lock:
            if key in self.known:
                self._touch(key)
                return None
            if self._jobs.full():
                return None
            return self._base(tokens, long_steps)[0]

    def put(self, saved: Saved) -> None:
        """Queue a state for writing; its rows before `saved.first` are stored already."""
        key = key_of(self.fingerprint, saved.tokens, saved.long_steps)
        with self._lock:
            first, base = self._base(saved.tokens, saved.long_steps)
            if first != saved.first:
                return  # the file that it continues was deleted
            self.known[key] = Known(saved.tokens, saved.long_steps, base, first)
        try:
            self._jobs.put_nowait((key, saved))
        except queue.Full:
            self._forget(key)

    def get(self, tokens: np.ndarray, reading: Reading, more_than: int) -> Saved | None:
        """Read the state of the longest prefix, above `more_than` tokens, from which `reading` can continue.

        The beginning of a longer state is read if it gives at least PAGE tokens more; of several such states the
        shortest is chosen, because its files have no rows that only longer prefixes need.
        """
        self._look()
        with self._lock:
            fitting = [
                (n, -len(known.tokens), key)
                for key, known in self.known.items()
                if (n := known.usable(tokens, reading)) > more_than
                if n == len(known.tokens) or n >= more_than + PAGE
            ]
        for n, _, key in sorted(fitting, reverse=True):
            saved = self._read(key, n)
            if saved is not None:
                with self._lock:
                    self._touch(key)
                return saved
        return None

    def flush(self) -> None:
        """Wait until all states that were put are written or have failed."""
        self._jobs.join()

    def close(self) -> None:
        """Write the waiting states, and end the thread."""
        self._end()

    # -- reading -------------------------------------------------------------------------------------------------------

    def _scan(self) -> None:
        for path in sorted(self.folder.iterdir()):
            if PARTIAL.fullmatch(path.name) and not is_held(path):
                path.unlink(missing_ok=True)  # left by a process that ended while it wrote
        self._looked = self.folder.stat().st_mtime_ns
        for header in self._new_headers():
            self.known[header.key] = Known.of(header)
        for key, known in sorted(self.known.items(), key=lambda item: len(item[1].tokens)):
            before, file = self.known.get(known.base), known.header
            follows = before and before.first < known.first <= before.shared(known.tokens, known.long_steps)
            if file and known.base and not follows:
                self._ignore(file.path, DamagedError(f"{file.path} continues a state that is gone"))
                del self.known[key]

    def _look(self) -> None:
        """Find the files that other processes have written since the last look; a file is found after its base."""
        with suppress(OSError):
            changed = self.folder.stat().st_mtime_ns
            if changed == self._looked:
                return
            self._looked = changed
            for header in sorted(self._new_headers(), key=lambda header: len(header.tokens)):
                with self._lock:
                    if not header.base or header.base in self.known:
                        self.known.setdefault(header.key, Known.of(header))

    def _new_headers(self) -> Iterator[Header]:
        """Read the headers of the files that are neither known nor ignored; reports those that cannot be used."""
        for path in sorted(self.folder.iterdir()):
            if NAME.fullmatch(path.name) and path.stem not in self.known and path.name not in self._ignored:
                try:
                    yield read_header(path, self.fingerprint)
                except (BimetalError, OSError) as error:
                    self._ignore(path, error)

    def _ignore(self, path: Path, error: Exception) -> None:
        """Report a file that cannot be used; one of ours that is damaged is deleted."""
        if isinstance(error, FileNotFoundError):
            return  # another process deleted it to make room
        self._ignored.add(path.name)
        damaged = isinstance(error, DamagedError)
        what = of_system(error) if isinstance(error, OSError) else error
        self.report(f"{what}; it is {'deleted' if damaged else 'ignored'}")
        if damaged:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _read(self, key: str, length: int) -> Saved | None:
        """Read the rows of the first `length` tokens of a state from its files; at its full length also its point.

        If a file is damaged, reports it and returns None.
        """
        files, parts, at = list[Header](), list[Saved](), key
        while True:
            path = self._path(at)
            try:
                header = self._adopted(at)
                end = min([length, *(file.first for file in files)])
                if files and (header.first >= files[-1].first or len(header.tokens) < files[-1].first):
                    raise DamagedError(f"{path} lacks the tokens of the files that continue it")
                if files and Known.of(header).shared(files[0].tokens, files[0].long_steps) < files[-1].first:
                    raise DamagedError(f"{path} has other tokens than the files that continue it")
                files.append(header)
                if header.first < length:
                    parts.append(read(header, end, has_end=len(files) == 1))
                if any(_rows_alike(part) != _rows_alike(parts[0]) for part in parts):
                    raise DamagedError(f"{path} has rows of another shape than the files that continue it")
            except FileNotFoundError:  # another process deleted it to make room
                self._forget(key, delete=True)
                return None
            except (BimetalError, OSError) as error:
                self._ignore(path, error)
                self._forget(at)
                return None
            if not header.base:
                break
            at = header.base
        rows = zip(*(part.rows for part in reversed(parts)), strict=True)
        joined = [[array for arrays in held for array in arrays] for held in rows]
        long_steps = tuple(step for step in files[0].long_steps if step[0] < length)
        return Saved(files[0].tokens[:length], long_steps, 0, joined, parts[0].point)

    def _adopted(self, key: str) -> Header:
        """Read the header of a file, which another process may have written; raises BimetalError, OSError."""
        header = read_header(self._path(key), self.fingerprint)
        with self._lock:
            self.known[key] = Known.of(header)
        return header

    # -- writing -------------------------------------------------------------------------------------------------------

    def _base(self, tokens: np.ndarray, long_steps: Sequence[LongStep]) -> tuple[int, str]:
        """Find the file that has most of the first rows of a state; return their number and its key, else (0, "").

        Candidates are whole states, and the beginning of a state if it has at least PAGE tokens more than these.
        """
        whole, best = (0, ""), (0, "")
        for key, known in self.known.items():
            n = known.shared(tokens, long_steps)
            if n == len(known.tokens):
                whole = max(whole, (n, key))
            if n > known.first:
                best = max(best, (n, key))
        return best if best[0] >= whole[0] + PAGE else whole

    def _touch(self, key: str) -> None:
        """Mark the file as the newest, and the files that it continues as still newer."""
        now = time.time_ns()
        while known := self.known.get(key):
            with suppress(OSError):
                os.utime(self._path(key), ns=(now, now))
            key, now = known.base, now + 1

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.state"

    def _write_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            key, saved = job
            try:
                self._write(key, saved)
            except Exception as error:  # also errors of a backend's copy
                self._forget(key)
                with suppress(Exception):
                    self.report(f"a state of {len(saved.tokens)} tokens is not written to {self.folder}: {error}")
            finally:
                self._jobs.task_done()
                del job, saved
        self._jobs.task_done()

    def _write(self, key: str, saved: Saved) -> None:
        with self._lock:
            known = self.known.get(key)
            base = known.base if known else ""
            self._touch(base)
            before = self.known.get(base)
        if known is None:  # forgotten while it waited: a file of that name was deleted to make room
            return
        if base and (before is None or before.header is None):
            self._forget(key)  # the file that it continues could not be written
            return
        with suppress(BimetalError, OSError):
            self._adopted(key)  # another process has written this file
            return
        saved.finish()
        if not self._make_room(file_bytes(saved), base):
            self._forget(key)
            return
        write(self._path(key), self.fingerprint, saved, base)
        self._adopted(key)
        with self._lock:
            self._touch(key)

    def _make_room(self, need: int, base: str) -> bool:
        """Delete the oldest files, but none that `base` continues, until `need` bytes fit; return whether they fit."""
        fixed = set[Path]()
        while known := self.known.get(base):
            fixed.add(self._path(base))
            base = known.base
        files = sorted((stat.st_mtime_ns, path, stat.st_size) for path, stat in self._files())
        total = sum(size for *_, size in files)
        loose = [(path, size) for _, path, size in files if path not in fixed and is_ours(path)]
        if total - sum(size for _, size in loose) + need > self.budget:
            return False
        for path, size in loose:
            if total + need > self.budget:
                path.unlink(missing_ok=True)
                if path.parent == self.folder:
                    self._forget(path.stem)
                total -= size
        return True

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield the files of all fingerprints."""
        for folder in self.top.iterdir():
            if FOLDER.fullmatch(folder.name) and folder.is_dir():
                for path in folder.iterdir():
                    if NAME.fullmatch(path.name):
                        with suppress(OSError):
                            yield path, path.stat()

    def _forget(self, key: str, delete: bool = False) -> None:
        with self._lock:
            self.known.pop(key, None)
        if delete:
            with suppress(OSError):
                self._path(key).unlink(missing_ok=True)


def _end(jobs: "queue.Queue[tuple[str, Saved] | None]", thread: threading.Thread) -> None:
    jobs.put(None)
    thread.join()


def _rows_alike(saved: Saved) -> list[tuple[int, int, str]]:
    """Return the properties that consecutive rows have in common."""
    return [(parts[0].shape[0], parts[0].shape[2], parts[0].dtype.str) for parts in saved.rows]
