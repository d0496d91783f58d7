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
LINKED = ["-nostdlib", "-x", "none", "-lstdc++", "-lm", "-lc", "-lgcc"]  # the engine is the sanitizers' runtime


class BuildError(AssertionError):
    """The compiler refused a kernel; the message is the compiler's."""


def library(text: str, flags: list[str]) -> Path:
    """The shared library that g++ makes of `text`."""
    headers = "".join(path.read_text() for path in sorted(HERE.glob("*.h")))
    path = CACHE / (hashlib.sha256("\0".join([text, headers, *flags]).encode()).hexdigest()[:24] + ".so")
    if not path.exists():
        CACHE.mkdir(exist_ok=True)
        made = path.with_suffix(f".{os.getpid()}.so")
        command = ["g++", *flags, "-shared", "-fPIC", "-w", f"-I{HERE}", "-x", "c++", "-"]
        command += [*LINKED, "-o", str(made)]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        if done.returncode:
            raise BuildError(done.stderr[:3000])
        made.rename(path)
    return path


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
        number = done.stdout.strip().rpartition(":")[2].split()[0]
        return f"line {number}" if number.isdecimal() else "an unknown line"

    message = re.sub(r"@([0-9a-f]+)", line, message)
    lines = text.splitlines()
    for number in dict.fromkeys(int(n) for n in re.findall(r"line (\d+)", message)):
        if 0 < number <= len(lines):
            message += f"\n  {number}: {lines[number - 1].strip()}"
    return message
