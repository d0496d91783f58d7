"""Compile C++ to a shared library once: libraries are kept by the hash of their sources."""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
CACHE = Path(tempfile.gettempdir()) / f"bimetal-simt-{os.getuid()}"
MISSING = (
    "" if shutil.which("g++") and platform.machine() == "x86_64" else "needs g++ on x86-64"
)  # why nothing runs here
TEXT = "text"  # what debug information calls a text, as against its header
LINKED = ["-nostdlib", "-x", "none", "-lstdc++", "-lm", "-lc", "-lgcc"]  # the engine is the sanitizers' runtime


class BuildError(AssertionError):
    """The compiler refused a kernel; the message is the compiler's."""


def library(text: str, flags: list[str], header: str = "", defines: tuple[str, ...] = ()) -> Path:
    """The shared library that g++ makes of `header` and `text`.

    header   C++ that many texts begin with: compiled once for each set of flags
    defines  macros of the text, "NAME=VALUE" or "NAME"
    """
    path = _kept(".so", text, header, *flags, *defines)
    if not path.exists():
        before = ["-include", str(_precompiled(header, flags))] if header else []
        macros = "".join(f"#define {macro.replace('=', ' ', 1)}\n" for macro in defines)
        _compile(f'{macros}#line 1 "{TEXT}"\n{text}', [*flags, "-shared", *before, "-x", "c++", "-", *LINKED], path)
    return path


def _precompiled(header: str, flags: list[str]) -> Path:
    """The header's file, beside which g++ finds it compiled."""
    path = _kept(".h", header, *flags)
    compiled = path.with_suffix(".h.gch")
    if not compiled.exists():
        made = _own(path)
        made.write_text(header)
        made.rename(path)
        _compile("", [*flags, "-x", "c++-header", str(path)], compiled)
    return path


def _kept(suffix: str, *sources: str) -> Path:
    """Where a file made of `sources` and of the headers of this folder is kept."""
    headers = (path.read_text() for path in sorted(HERE.glob("*.h")))
    CACHE.mkdir(exist_ok=True)
    return CACHE / (hashlib.sha256("\0".join([*sources, *headers]).encode()).hexdigest()[:24] + suffix)


def _own(path: Path) -> Path:
    """A name beside `path` that is this process's own, for a file that is renamed once it is whole."""
    return path.with_name(f"{os.getpid()}-{path.name}")


def _compile(text: str, flags: list[str], path: Path) -> None:
    """Make the file `path` of `text`; raises BuildError."""
    made = _own(path)
    command = ["g++", "-fPIC", "-w", f"-I{HERE}", *flags, "-o", str(made)]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(done.stderr[:3000])
    made.rename(path)


@functools.cache
def engine() -> ctypes.CDLL:
    """The engine's library, whose symbols every kernel's library shares."""
    path = library((HERE / "engine.cpp").read_text(), ["-std=c++20", "-O2"])
    engine = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    engine.simt_run.restype = ctypes.c_char_p
    return engine


def located(message: str, library: str, text: str) -> str:
    """An error of the engine with lines of `text`, from which the library was made, in place of addresses."""

    def line(match: re.Match[str]) -> str:
        done = subprocess.run(["addr2line", "-e", library, f"0x{match[1]}"], capture_output=True, text=True)
        file, _, rest = done.stdout.strip().rpartition(":")
        number = rest.split()[0]
        if not number.isdecimal():
            return "an unknown line"
        return f"line {number}" if not file.endswith(".h") else f"a line of {Path(file).name}"

    message = re.sub(r"@([0-9a-f]+)", line, message)
    lines = text.splitlines()
    for number in dict.fromkeys(int(n) for n in re.findall(r"line (\d+)", message)):
        if 0 < number <= len(lines):
            message += f"\n  {number}: {lines[number - 1].strip()}"
    return message
