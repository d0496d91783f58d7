"""`python -m generate bench`: prefill and decode speed at several contexts, and the log that speed claims quote."""

import argparse
import csv
import datetime
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common.checkpoint import open_checkpoint
from common.decode.plain import plain
from common.errors import UsageError
from common.hub import resolve_model
from common.models import Model
from common.sampling import Sampler, Sampling
from common.session import PREFILL_ROWS
from common.step import Step
from generate.backends import backend_package, open_model

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


@dataclass(frozen=True)
class Timing:
    """Tokens per second of one run."""

    prefill: float
    decode: float


Runner = Callable[[np.ndarray, int], Timing]  # (prompt ids, new tokens)


def run(args: argparse.Namespace) -> int:
    if args.runs < 1 or args.new_tokens < 2:
        raise UsageError("--runs must be at least 1 and --new-tokens at least 2")
    path = resolve_model(args.model)
    model = open_model(open_checkpoint(path), args.backend, progress=True)
    ops = model.ops
    limit = args.ctx or model.config.context
    fits = [n for n in args.contexts if n + args.new_tokens <= limit]
    if not fits:
        raise UsageError(f"no context of {args.contexts} leaves room for {args.new_tokens} new tokens within {limit}")
    runners: dict[str, Runner] = {ops.name: ours(model)}
    if args.peer:
        runners[args.peer] = peer(path)
    copy = ops.copy_bandwidth()
    print(f"{path.name} on {ops.name}, {machine()}; copy bandwidth {copy / 1e9:.1f} GB/s")
    print(f"{'':8} {'context':>8} {'prefill tok/s':>14} {'decode tok/s (min..max)':>28} {'GB/s':>7} {'of copy':>8}")
    rows = []
    for context in fits:
        timings = measure(runners, context, args.new_tokens, args.runs, model.config.vocab)
        for name, runs in timings.items():
            decode = [t.decode for t in runs]
            median = statistics.median(decode)
            prefill = statistics.median(t.prefill for t in runs)
            rate = model.step_bytes * median
            spread = f"{median:.1f} ({min(decode):.1f}..{max(decode):.1f})"
            print(f"{name:8} {context:8} {prefill:14.1f} {spread:>28} {rate / 1e9:7.2f} {rate / copy:8.1%}")
            rows.append(
                environment(name)
                | {
                    "model": path.name,
                    "weights": f"{model.step_bytes / 1e9:.3f} GB/token",
                    "decoder": "plain",
                    "context": context,
                    "prompt_tokens": context,
                    "new_tokens": args.new_tokens,
                    "runs": args.runs,
                    "prefill_tps": f"{prefill:.1f}",
                    "decode_tps_median": f"{median:.1f}",
                    "decode_tps_min": f"{min(decode):.1f}",
                    "decode_tps_max": f"{max(decode):.1f}",
                    "gb_per_s": f"{rate / 1e9:.2f}",
                    "peak_gb": f"{ops.peak_bytes() / 1e9:.2f}" if name == ops.name else "",
                    "verdict": args.verdict,
                    "note": args.note,
                }
            )
        if args.peer:
            print(f"{'ratio':8} {context:8} {_ratio(timings, 'prefill'):>14} {_ratio(timings, 'decode'):>28}")
    if args.log:
        log(Path(args.log), rows)
    return 0


def measure(
    runners: dict[str, Runner], context: int, new_tokens: int, runs: int, vocab: int
) -> dict[str, list[Timing]]:
    """Timings of each runner, taken in turn so that a busy machine is busy for all; one warm-up run each."""
    prompt = np.random.default_rng(0).integers(0, vocab, context).astype(np.int32)
    timings: dict[str, list[Timing]] = {name: [] for name in runners}
    with tqdm(total=(runs + 1) * len(runners), desc=f"context {context}", leave=False, disable=None) as bar:
        for number in range(runs + 1):
            for name, runner in runners.items():
                timing = runner(prompt, new_tokens)
                bar.update()
                if number:
                    timings[name].append(timing)
    return timings


def ours(model: Model) -> Runner:
    def once(prompt: np.ndarray, new_tokens: int) -> Timing:
        state = model.new_state(len(prompt) + new_tokens)
        with Clock() as prefill:
            rows = model.ops.prefill_rows
            for at in range(0, len(prompt), rows):
                chunk = prompt[at : at + rows]
                logits = model.forward(state, Step.chain(chunk, at), slice(len(chunk) - 1, len(chunk)))
                state.commit(np.arange(len(chunk)))
            tokens = plain(model, state, logits, Sampler(Sampling()))
            next(tokens)
        with Clock() as decode:
            _take(tokens, new_tokens - 1)
        return Timing(len(prompt) / prefill.seconds, (new_tokens - 1) / decode.seconds)

    return once


def peer(path: Path) -> Runner:
    """mlx-lm's own model and loop over the same safetensors folder."""
    if not path.is_dir():
        raise UsageError(f"mlx-lm reads safetensors folders, {path} is a file")
    tokens_of = backend_package("mlx").mlx_lm_tokens(path, PREFILL_ROWS)

    def once(prompt: np.ndarray, new_tokens: int) -> Timing:
        with Clock() as prefill:
            tokens = tokens_of(prompt, new_tokens)
            next(tokens)
        with Clock() as decode:
            _take(tokens, new_tokens - 1)
        return Timing(len(prompt) / prefill.seconds, (new_tokens - 1) / decode.seconds)

    return once


def _take(tokens: Iterator, count: int) -> None:
    for _ in range(count):
        next(tokens)


class Clock:
    def __enter__(self) -> "Clock":
        self.started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self.started


def _ratio(timings: dict[str, list[Timing]], field: str) -> str:
    """Ours over the peer's, run by run: median (min..max)."""
    pairs = zip(*timings.values(), strict=True)
    ratios = [getattr(a, field) / getattr(b, field) for a, b in pairs]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"


def machine() -> str:
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), name)
    return f"{os.cpu_count()} x {name}"


def environment(runner: str) -> dict[str, str]:
    """What a row must say of where it was measured."""
    packages = {"numpy": ["numpy"], "mlx": ["mlx"], "mlx-lm": ["mlx", "mlx-lm"], "cuda": ["cupy-cuda12x"]}[runner]
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": _git("rev-parse", "--short", "HEAD") or "unknown",
        "dirty": "yes" if _git("status", "--porcelain", "--", ":!BENCHMARKS.tsv") else "no",
        "machine": machine(),
        "os_driver": f"{platform.system()} {platform.release()}",
        "versions": " ".join(f"{name} {_version(name)}" for name in packages),
    }


def log(path: Path, rows: list[dict]) -> None:
    """Append rows to the TSV at `path`, with a header line if it is new."""
    new = not path.exists()
    with path.open("a", newline="") as file:
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
    here = Path(__file__).parent
    try:
        return subprocess.run(["git", "-C", here, *words], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
