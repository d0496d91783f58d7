"""`python -m generate bench --synthetic SHAPE:RECIPE --wedlm`: steps of a window, on real shapes and random weights.

Random weights choose nothing useful: a step commits a fixed number of tokens, and speed is computed from that number.
Each run begins at the context that the table names and lasts REPEATS steps.
`idle ms` is what a step takes longer than one that is queued behind others: the time in which the device waits for the
host, from the read of a choice to the launch of the next step.
"""

import statistics
import time
from pathlib import Path

import numpy as np

from common.models import Model
from common.models.llama import WEDLM_MASK
from common.step import State, Step
from generate.bench_log import environment, log, machine, note
from generate.bench_options import SyntheticWindowBench
from generate.bench_synthetic import REPEATS, open_synthetic, read_prompt
from generate.timing import announced

ROWS, MASKS, COMMITTED = 16, 8, 3  # of a step: rows, masks among them, and tokens that it commits
PHASES = ("forward", "choice", "commit")


def run(options: SyntheticWindowBench) -> int:
    """Measure milliseconds of a step of ROWS rows with its choice, at each context."""
    steps, room = 3 + 2 * options.runs * REPEATS, REPEATS * COMMITTED + ROWS
    model = open_synthetic(options, max(options.contexts) + room)
    ops = model.ops
    print(f"{options.synthetic}, random weights, on {ops.name}, {machine(ops.name)}")
    print(f"steps of {ROWS} rows, {MASKS} of them masks, whose ids and entropies the host reads; {COMMITTED} committed")
    print(
        f"{'context':>8} {'ms':>8} {'min..max':>16} "
        + " ".join(f"{p:>8}" for p in PHASES)
        + f" {'idle ms':>8} {'tok/s':>8}"
    )
    rows = []
    for context in sorted(set(options.contexts)):
        state = model.new_state(context + room)
        with announced(f"{steps} steps at a context of {context} tokens"):
            read_prompt(model, state, context)
            read = state.snapshot()
            _steps(model, state, 3)
            taken, queued = [], []
            for _ in range(options.runs):
                state.restore(read)
                taken.append(_steps(model, state, REPEATS))
                state.restore(read)
                queued.append(1e3 * _queued_steps(model, state, REPEATS))
        totals = [1e3 * sum(seconds) for seconds in taken]
        ms, parts = statistics.median(totals), [1e3 * statistics.median(part) for part in zip(*taken, strict=True)]
        spread, speed = f"{min(totals):.3f}..{max(totals):.3f}", COMMITTED / ms * 1e3
        times = " ".join(f"{x:8.3f}" for x in parts)
        idle = "-" if ops.waited is None else f"{ms - statistics.median(queued):.3f}"
        print(f"{context:8} {ms:8.3f} {spread:>16} {times} {idle:>8} {speed:8.0f}", flush=True)
        phases = ", ".join(f"{phase} {x:.3f}" for phase, x in zip(PHASES, parts, strict=True))
        rows.append(
            environment(ops.name)
            | {
                "model": options.synthetic,
                "decoder": f"wedlm step of {ROWS}",
                "context": context,
                "runs": options.runs,
                "decode_tps_median": f"{speed:.1f}",
                "decode_tps_min": f"{COMMITTED / max(totals) * 1e3:.1f}",
                "decode_tps_max": f"{COMMITTED / min(totals) * 1e3:.1f}",
                "peak_gb": f"{ops.peak_bytes() / 1e9:.2f}",
                "verdict": options.verdict,
                "note": f"{ms:.3f} ms: {phases}; idle {idle}; {speed:.0f} tok/s at {COMMITTED} per forward; "
                + note(options),
            }
        )
    if options.log:
        log(Path(options.log), rows)
    return 0


def _steps(model: Model, state: State, count: int) -> tuple[float, float, float]:
    """Measure the mean seconds by phase of `count` steps, each of which waits for the one before, as in decoding."""
    ops, seconds = model.ops, [0.0] * len(PHASES)
    tokens, mask = _window(model)
    for _ in range(count):
        marks = [time.perf_counter()]
        logits = model.forward(state, Step.chain(tokens, state.length))
        marks.append(time.perf_counter())
        found = ops.argmax_entropy(logits[ROWS - MASKS :], mask)
        ops.read_all(*found)
        marks.append(time.perf_counter())
        state.commit(np.arange(COMMITTED))
        marks.append(time.perf_counter())
        seconds = [total + b - a for total, a, b in zip(seconds, marks, marks[1:], strict=False)]
    forward, choice, commit = (total / count for total in seconds)
    return forward, choice, commit


def _queued_steps(model: Model, state: State, count: int) -> float:
    """Measure the mean seconds of `count` queued steps of the device: the host waits for the last one only."""
    tokens, mask = _window(model)
    started = time.perf_counter()
    for _ in range(count):
        logits = model.forward(state, Step.chain(tokens, state.length))
        found = model.ops.argmax_entropy(logits[ROWS - MASKS :], mask)
        state.commit(np.arange(COMMITTED))
    model.ops.read_all(*found)
    return (time.perf_counter() - started) / count


def _window(model: Model) -> tuple[np.ndarray, int]:
    """Return the tokens of a step, of which the last are masks, and the mask's id."""
    mask = min(WEDLM_MASK, model.config.vocab - 1)
    known = np.random.default_rng(0).integers(0, mask, ROWS - MASKS)
    return np.array([*known, *[mask] * MASKS], np.int32), mask
