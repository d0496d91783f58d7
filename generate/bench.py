"""`python -m generate bench`: prefill and decode speed at several contexts, and the log of such rows."""

import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common.checkpoint import Checkpoint, open_checkpoint
from common.decode.alone import run_alone
from common.decode.run import DecoderRun
from common.errors import BimetalError, UsageError
from common.hub import resolve_model
from common.models import Model
from common.sampling import Sampler, Sampling
from common.scores import PREFILL_ROWS
from common.step import Step
from generate.backends import backend_package, choose, leave_thread, open_model, placement_of, usable
from generate.bench_log import environment, log, machine, note
from generate.bench_options import ModelBench
from generate.caches import with_cache
from generate.owner_thread import OwnerThread
from generate.timing import Clock

WAKE = 0.25  # seconds after which Ctrl-C is noticed


@dataclass(frozen=True)
class Timing:
    """Tokens per second of one run."""

    prefill: float
    decode: float


Runner = Callable[[np.ndarray, int], Timing]  # (prompt ids, new tokens)


def run(options: ModelBench) -> int:
    """Print prefill and decode speed of a model at several contexts, on one backend or on all of this machine."""
    path = resolve_model(options.model)
    checkpoint = open_checkpoint(path)
    names = (
        [found.name for found in usable()] if options.backend == "all" else [choose(options.backend, checkpoint).name]
    )
    rows: list[dict[str, object]] = []
    for name in names:  # each in its own thread: the end of the thread frees its memory
        owner, stop = OwnerThread(f"bench {name}", leave_thread), threading.Event()
        job = partial(_bench_backend, path, checkpoint, name, options, name == names[0], stop)
        try:
            done = owner.submit(job)
            while not wait([done], WAKE).done:  # a signal that another thread gets ends no wait of this one
                pass
            rows += done.result()
        finally:  # Ctrl-C included: the job ends at its next step
            stop.set()
            owner.close()
    if options.log:
        log(Path(options.log), rows)
    return 0


def _bench_backend(
    path: Path, checkpoint: Checkpoint, backend: str, options: ModelBench, heading: bool, stop: threading.Event
) -> list[dict[str, object]]:
    """Measure one backend, print a line per context, and return the rows of the log.

    heading  print the heading of the table, and which contexts are left out
    stop     when set, ends the measurement at the next step
    """
    model = open_model(checkpoint, backend, progress=True, placement=placement_of(options))
    model = with_cache(model, options.cache, max(options.contexts) + options.new_tokens)
    ops = model.ops
    limit = options.ctx or model.config.context
    fits = [n for n in options.contexts if n + options.new_tokens <= limit]
    if not fits:
        raise UsageError(
            f"no context of {options.contexts} leaves room for {options.new_tokens} new tokens within {limit}"
        )
    runners: dict[str, Runner] = {ops.name: ours(model, stop)}
    if options.peer:
        runners[options.peer] = peer(path, stop)
    copy = ops.copy_bandwidth()
    if heading:
        for n in set(options.contexts) - set(fits):
            print(f"left out: {n} tokens leave no room for {options.new_tokens} more within {limit}", file=sys.stderr)
        print(f"{path.name}, {machine(ops.name)}; copy bandwidth {copy / 1e9:.1f} GB/s")
        print(
            f"{'':8} {'context':>8} {'prefill tok/s':>14} {'decode tok/s (min..max)':>28} {'GB/s':>7} {'of copy':>8}",
            flush=True,
        )
    rows = []
    for context in fits:
        timings = measure(runners, context, options.new_tokens, options.runs, model.config.vocab)
        for name, runs in timings.items():
            rows.append(_reported(path, model, options, context, name, runs, copy))
        if options.peer:
            print(f"{'ratio':8} {context:8} {_ratio(timings, 'prefill'):>14} {_ratio(timings, 'decode'):>28}")
    return rows


def _reported(
    path: Path, model: Model, options: ModelBench, context: int, name: str, runs: Sequence[Timing], copy: float
) -> dict[str, object]:
    """Print the line of one context and runner, and return it as a row of the log.

    copy  bytes per second of a copy on the device
    """
    decode = [t.decode for t in runs]
    median = statistics.median(decode)
    prefill = statistics.median(t.prefill for t in runs)
    rate = model.step_bytes * median
    spread = f"{median:.1f} ({min(decode):.1f}..{max(decode):.1f})"
    print(f"{name:8} {context:8} {prefill:14.1f} {spread:>28} {rate / 1e9:7.2f} {rate / copy:8.1%}", flush=True)
    return environment(name) | {
        "model": path.name,
        "weights": f"{model.step_bytes / 1e9:.3f} GB/token",
        "decoder": "plain",
        "context": context,
        "prompt_tokens": context,
        "new_tokens": options.new_tokens,
        "runs": options.runs,
        "prefill_tps": f"{prefill:.1f}",
        "decode_tps_median": f"{median:.1f}",
        "decode_tps_min": f"{min(decode):.1f}",
        "decode_tps_max": f"{max(decode):.1f}",
        "gb_per_s": f"{rate / 1e9:.2f}",
        "peak_gb": f"{model.ops.peak_bytes() / 1e9:.2f}" if name == model.ops.name else "",
        "verdict": options.verdict,
        "note": note(options),
    }


def measure(
    runners: dict[str, Runner], context: int, new_tokens: int, runs: int, vocab: int
) -> dict[str, list[Timing]]:
    """Time the runners alternately, so that other load affects all of them, after one warm-up run each."""
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


def ours(model: Model, stop: threading.Event) -> Runner:
    """Return a run of our model; raises BimetalError at the next step once `stop` is set."""

    def once(prompt: np.ndarray, new_tokens: int) -> Timing:
        state = model.new_state(len(prompt) + new_tokens)
        with Clock() as prefill:
            rows = model.ops.prefill_rows
            for at in range(0, len(prompt), rows):
                _go_on(stop)
                chunk = prompt[at : at + rows]
                step = Step.of_prompt(chunk, at, model.ops.short_rows)
                logits = model.forward(state, step, slice(len(chunk) - 1, len(chunk)))
                state.commit_prompt(step)
            tokens = run_alone(DecoderRun(model, state, logits, Sampler(Sampling())))
            next(tokens)
        with Clock() as decode:
            _take(tokens, new_tokens - 1, stop)
        return Timing(len(prompt) / prefill.seconds, (new_tokens - 1) / decode.seconds)

    return once


def peer(path: Path, stop: threading.Event) -> Runner:
    """Return a runner of mlx-lm's own model and loop over the same safetensors folder; `stop` as in `ours`."""
    if not path.is_dir():
        raise UsageError(f"mlx-lm reads safetensors folders, {path} is a file")
    tokens_of = backend_package("mlx").mlx_lm_tokens(path, PREFILL_ROWS)

    def once(prompt: np.ndarray, new_tokens: int) -> Timing:
        with Clock() as prefill:
            tokens = tokens_of(prompt, new_tokens)
            next(tokens)
        with Clock() as decode:
            _take(tokens, new_tokens - 1, stop)
        return Timing(len(prompt) / prefill.seconds, (new_tokens - 1) / decode.seconds)

    return once


def _take(tokens: Iterator, count: int, stop: threading.Event) -> None:
    for _ in range(count):
        _go_on(stop)
        next(tokens)


def _go_on(stop: threading.Event) -> None:
    if stop.is_set():
        raise BimetalError("the bench was interrupted")


def _ratio(timings: dict[str, list[Timing]], field: str) -> str:
    """Divide our speeds by the peer's, run by run; return the ratios in words: median (min..max)."""
    pairs = zip(*timings.values(), strict=True)
    ratios = [getattr(a, field) / getattr(b, field) for a, b in pairs]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
