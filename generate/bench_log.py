"""The log of bench rows, such as BENCHMARKS.tsv: its columns, and the description of the machine in each row."""

import csv
import datetime
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from common.errors import UsageError
from common.files import check_folder, naming
from generate.backends import backend_package, placement_of
from generate.bench_options import LocalBench
from generate.caches import named

COLUMNS = (
    "date",
    "commit",
    "dirty",
    "machine",
    "os_driver",
    "versions",
    "model",
    "weights",
    "kv",
    "decoder",
    "context",
    "prompt_tokens",
    "new_tokens",
    "runs",
    "prefill_tps",
    "decode_tps_median",
    "decode_tps_min",
    "decode_tps_max",
    "gb_per_s",
    "accept_len",
    "peak_gb",
    "parity",
    "base_commit",
    "verdict",
    "note",
)


def machine(runner: str = "") -> str:
    if runner == "cuda":
        return str(backend_package("cuda").find_card())
    return f"{os.cpu_count()} x {processor()}"


def processor() -> str:
    """Return the name of the CPU, on a Mac of the chip."""
    name = platform.processor() or platform.machine()
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or name
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), name)
    return name


def environment(runner: str) -> dict[str, str]:
    """Return the columns that describe where a row was measured."""
    cupy = next((name for name in ("cupy-cuda13x", "cupy-cuda12x") if _version(name) != "?"), "cupy")
    packages = {"numpy": ["numpy"], "mlx": ["mlx"], "mlx-lm": ["mlx", "mlx-lm"], "cuda": [cupy]}[runner]
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": _git("rev-parse", "--short", "HEAD") or "unknown",
        "dirty": "yes" if _git("status", "--porcelain", "--", ":!BENCHMARKS.tsv") else "no",
        "machine": machine(runner),
        "os_driver": f"{platform.system()} {platform.release()}",
        "versions": " ".join(f"{name} {_version(name)}" for name in packages),
    }


def note(options: LocalBench) -> str:
    """Return the GPUs and the formats of the KV cache that were chosen, and --note."""
    return "; ".join(filter(None, (str(placement_of(options)), named(options.cache), options.note)))


def check_log(path: Path) -> None:
    """Raise UsageError, before anything is measured, if `log` cannot append to `path`."""
    try:
        if not path.exists():
            check_folder(path, path.absolute().parent)
            return
        if not path.is_file() and not path.is_dir():  # a device or a pipe
            return
        with path.open("r+", encoding="utf-8", errors="replace") as file:
            head = file.readline().rstrip("\n")
    except OSError as error:
        raise UsageError(f"--log {path} cannot be written: {error.strerror}") from None
    if head and head.split("\t") != list(COLUMNS):
        raise UsageError(f"--log {path} is another table: it begins with {head[:40]!r}, not with {COLUMNS[0]!r}")


def log(path: Path, rows: list[dict]) -> None:
    """Append rows to the TSV at `path`, with a header line if it is empty."""
    new = not path.exists() or not path.stat().st_size
    with naming(path), path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", delimiter="\t", lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "?"


def _git(*words: str) -> str:
    return _output("git", "-C", str(Path(__file__).parent), *words)


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
