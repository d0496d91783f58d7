"""`python -m generate bench`: prefill and decode speed at several contexts, and the log that speed claims quote."""

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from common import fit
from common.checkpoint import Checkpoint, open_checkpoint
from common.decode.plain import plain
from common.errors import BimetalError, UsageError
from common.hub import resolve_model
from common.models import Model, architecture
from common.sampling import Sampler, Sampling
from common.session import PREFILL_ROWS
from common.step import MAX_DECODE_ROWS, State, Step
from common.storage import state_bytes
from common.weights import Matrix
from generate.backends import (
    backend_package,
    choose,
    leave_thread,
    open_backend,
    open_model,
    placement_of,
    usable,
)
from generate.bench_log import environment, log, machine, note
from generate.caches import cache_of, cached_spec, with_cache
from generate.owner import Owner
from generate.synthetic import synthetic, synthetic_checkpoint


@dataclass(frozen=True)
class Timing:
    """Tokens per second of one run."""

    prefill: float
    decode: float


Runner = Callable[[np.ndarray, int], Timing]  # (prompt ids, new tokens)


def run(args: argparse.Namespace) -> int:
    """Print prefill and decode speed of a model at several contexts, on one backend or on all of this machine."""
    if args.runs < 1 or args.new_tokens < 2:
        raise UsageError("--runs must be at least 1 and --new-tokens at least 2")
    path = resolve_model(args.model)
    checkpoint = open_checkpoint(path)
    names = [found.name for found in usable()] if args.backend == "all" else [choose(args.backend, checkpoint).name]
    rows = []
    for name in names:  # each in a thread of its own, at whose end its memory is given back
        owner = Owner(f"bench {name}", leave_thread)
        try:
            rows += owner.submit(partial(_bench_backend, path, checkpoint, name, args, name == names[0])).result()
        finally:
            owner.close()
    if args.log:
        log(Path(args.log), rows)
    return 0


def _bench_backend(
    path: Path, checkpoint: Checkpoint, backend: str, args: argparse.Namespace, heading: bool
) -> list[dict[str, str]]:
    """Print the lines of one backend, under a heading where asked for; the rows of the log."""
    model = open_model(checkpoint, backend, progress=True, placement=placement_of(args))
    model = with_cache(model, cache_of(args), max(args.contexts) + args.new_tokens)
    ops = model.ops
    limit = args.ctx or model.config.context
    fits = [n for n in args.contexts if n + args.new_tokens <= limit]
    if not fits:
        raise UsageError(f"no context of {args.contexts} leaves room for {args.new_tokens} new tokens within {limit}")
    runners: dict[str, Runner] = {ops.name: ours(model)}
    if args.peer:
        runners[args.peer] = peer(path)
    copy = ops.copy_bandwidth()
    if heading:
        for n in set(args.contexts) - set(fits):
            print(f"left out: {n} tokens leave no room for {args.new_tokens} more within {limit}", file=sys.stderr)
        print(f"{path.name}, {machine(ops.name)}; copy bandwidth {copy / 1e9:.1f} GB/s")
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
            print(f"{name:8} {context:8} {prefill:14.1f} {spread:>28} {rate / 1e9:7.2f} {rate / copy:8.1%}", flush=True)
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
                    "note": note(args),
                }
            )
        if args.peer:
            print(f"{'ratio':8} {context:8} {_ratio(timings, 'prefill'):>14} {_ratio(timings, 'decode'):>28}")
    return rows


# -- real shapes, random weights ---------------------------------------------------------------------------------------

REPEATS = 32  # steps between two readings of the clock, launched one after the other: only the first waits for the host


def run_synthetic(args: argparse.Namespace) -> int:
    """Steps of a few rows behind several contexts, and prefill, of a model of real shapes and random weights."""
    if args.runs < 1:
        raise UsageError("--runs must be at least 1")
    if max(args.rows) > MAX_DECODE_ROWS:
        raise UsageError(
            f"--rows takes steps of at most {MAX_DECODE_ROWS} rows, got {max(args.rows)}; more is --prefill"
        )
    model = open_synthetic(args, max(*args.contexts, *args.prefill) + MAX_DECODE_ROWS)
    ops = model.ops
    name, copy = ops.name, ops.copy_bandwidth()
    print(f"{args.synthetic}, random weights, on {name}, {machine(name)}; copy bandwidth {copy / 1e9:.0f} GB/s")
    common = environment(name) | {"model": args.synthetic, "runs": args.runs, "verdict": args.verdict}
    rows = []
    print(f"{'prefill':>10} {'ms':>9} {'tok/s':>9}")
    for n in args.prefill:
        with announced(f"prefill of {n} tokens, {args.runs + 1} times"):
            times = [_prefill(model, model.new_state(n), n) for _ in range(args.runs + 1)]
        seconds = statistics.median(times[1:])  # the first compiles
        print(f"{n:10} {seconds * 1e3:9.2f} {n / seconds:9.1f}", flush=True)
        rows.append(
            common | {"decoder": "prefill", "prompt_tokens": n, "prefill_tps": f"{n / seconds:.1f}", "note": note(args)}
        )
    head = ("context", "rows", "ms", "min..max", "tok/s", "GB/s", "of copy", "kernels", "peak GB")
    print("{:>8} {:>5} {:>9} {:>17} {:>9} {:>7} {:>8} {:>8} {:>8}".format(*head))
    state = model.new_state(max(args.contexts) + MAX_DECODE_ROWS)
    for context in sorted(set(args.contexts)):
        with announced(f"reading {context} tokens"):
            _prefill(model, state, context - state.length - 1)
            _prefill(model, state, 1)  # as in decoding: no step finds more than a row that layers have still to apply
        for n in args.rows:
            with announced(f"steps of {n} rows behind {context} tokens, {3 + args.runs * REPEATS} of them"):
                times, kernels = _steps(model, state, n, args.runs)
            ms, low, high = (1e3 * f(times) for f in (statistics.median, min, max))
            rate = read_bytes(model, n, context) / ms * 1e3
            spread = f"{low:.3f}..{high:.3f}"
            print(
                f"{context:8} {n:5} {ms:9.3f} {spread:>17} {n / ms * 1e3:9.1f} {rate / 1e9:7.0f} {rate / copy:8.1%} "
                f"{kernels or '-':>8} {ops.peak_bytes() / 1e9:8.2f}",
                flush=True,
            )
            rows.append(
                common
                | {
                    "weights": f"{read_bytes(model, n, 0) / 1e9:.3f} GB/step",
                    "decoder": f"steps of {n}",
                    "context": context,
                    "new_tokens": REPEATS * n,
                    "decode_tps_median": f"{n / ms * 1e3:.1f}",
                    "decode_tps_min": f"{n / high * 1e3:.1f}",
                    "decode_tps_max": f"{n / low * 1e3:.1f}",
                    "gb_per_s": f"{rate / 1e9:.1f}",
                    "peak_gb": f"{ops.peak_bytes() / 1e9:.2f}",
                    "note": f"{ms:.3f} ms, {kernels or 'uncounted'} kernels; copy {copy / 1e9:.0f} GB/s; {note(args)}",
                }
            )
    if args.log:
        log(Path(args.log), rows)
    return 0


def open_synthetic(args: argparse.Namespace, tokens: int) -> Model:
    """The model of --synthetic, for `tokens` tokens; what this machine is not for is refused before it is made."""
    checkpoint, found = synthetic_checkpoint(args.synthetic), choose(args.backend)
    definition = architecture(checkpoint)[1]
    config = definition.read_config(checkpoint)
    limit = args.ctx or config.context
    if tokens > limit:
        raise UsageError(f"contexts and prefill need {tokens} tokens with the rows of a step, of {limit}")
    if args.backend is None and not found.is_gpu:
        size = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        raise BimetalError(
            f"{args.synthetic} is {size / 1e9:.1f} GB, this machine has no GPU that we can use, and a CPU takes hours; "
            f"--backend {found.name} runs it all the same"
        )
    ops = open_backend(found.name, checkpoint, placement_of(args), random=True)
    needed = fit.predict_weights(checkpoint, definition.layout(config, checkpoint), ops)
    spec = cached_spec(definition.state_spec(config), cache_of(args), ops)
    needed += ops.held_state_bytes(spec, tokens, ops.prefill_rows)
    free, reason = ops.free_bytes()
    if needed > free:
        raise BimetalError(
            f"{args.synthetic} takes {needed / 1e9:.1f} GB on {ops.name}, of {free / 1e9:.1f} GB ({reason})"
        )
    with announced(f"making {args.synthetic}, {needed / 1e9:.1f} GB"):
        return with_cache(synthetic(args.synthetic, ops, progress=True), cache_of(args), tokens)


@contextmanager
def announced(what: str, after: float = 10.0) -> Iterator[None]:
    """Say on stderr what is being done once it has taken `after` seconds, terminal or not."""
    timer = threading.Timer(after, print, [f"{what}: not done after {after:.0f} s"], {"file": sys.stderr})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _prefill(model: Model, state: State, tokens: int) -> float:
    """Seconds to read as many random tokens."""
    ids = np.random.default_rng(state.length).integers(0, model.config.vocab, tokens).astype(np.int32)
    ops, greedy = model.ops, Sampler(Sampling())
    with Clock() as clock:
        for at in range(0, tokens, ops.prefill_rows):
            chunk = ids[at : at + ops.prefill_rows]
            logits = model.forward(state, Step.chain(chunk, state.length), slice(len(chunk) - 1, len(chunk)))
            state.commit(np.arange(len(chunk)))
        if tokens > 0:
            ops.read(ops.sample(logits, greedy))
    return clock.seconds


def _steps(model: Model, state: State, rows: int, runs: int) -> tuple[list[float], int]:
    """Seconds of a step of `rows` rows that samples greedily, and its kernels, 0 where the backend does not count."""
    ops, greedy = model.ops, Sampler(Sampling())
    tokens: Any = np.random.default_rng(rows).integers(0, model.config.vocab, rows).astype(np.int32)

    def after(tokens: Any) -> Any:
        """What a step over `tokens` chooses: as in decoding, the next one waits for it."""
        return ops.sample(model.forward(state, Step.chain(tokens, state.length)), greedy)

    before = ops.launches
    tokens = after(tokens)
    kernels = ops.launches - before
    for _ in range(2):  # captures a graph, and runs it
        tokens = after(tokens)
    ops.read(tokens)
    times = []
    for _ in range(runs):
        with Clock() as clock:
            for _ in range(REPEATS):
                tokens = after(tokens)
            ops.read(tokens)
        times.append(clock.seconds / REPEATS)
    return times, kernels


def read_bytes(model: Model, rows: int, context: int) -> float:
    """Bytes of weights and cached keys and values that a step of `rows` rows reads, experts chosen independently."""
    total = state_bytes(model.state_spec, context, model.ops.item_bytes) if context else 0.0
    for table, handles in zip(
        (model.layout.top, *model.layout.layers), (model.weights, *model.weights.layers), strict=True
    ):
        for name, entry in table.items():
            if isinstance(entry, Matrix) and not (name == "embed" and not model.config.tied):
                share = 1.0
                if name.startswith("experts_"):
                    share -= (1 - model.config.experts.top_k / model.config.experts.count) ** rows
                total += share * model.ops.weight_bytes(getattr(handles, name))
    return total


# -- runs of a checkpoint ----------------------------------------------------------------------------------------------


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
