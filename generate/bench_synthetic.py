"""`python -m generate bench --synthetic SHAPE:RECIPE`: steps and prefill of real shapes with random weights."""

import statistics
from pathlib import Path
from typing import Any

import numpy as np

from common import fit
from common.amounts import parse_size, shown_size
from common.errors import BimetalError, UsageError
from common.models import Model, architecture, rank_config
from common.sampling import GREEDY
from common.step import MAX_DECODE_ROWS, State, Step
from common.storage import state_bytes
from common.weights import Matrix
from generate import bench_spark
from generate.backends import choose, open_backend, placement_of
from generate.bench_log import environment, log, machine, note
from generate.bench_options import SyntheticBench, SyntheticSpecBench, SyntheticWindowBench
from generate.caches import cached_spec, with_cache
from generate.synthetic import synthetic, synthetic_checkpoint
from generate.timing import Clock, announced

WARM_RUNS = 16  # during which hot experts find their slots
REPEATS = 32  # steps between two readings of the clock, launched one after the other: only the first waits for the host


def run(options: SyntheticBench) -> int:
    """Print the speed of prefill, and of steps of several rows at several contexts."""
    if max(options.rows) > MAX_DECODE_ROWS:
        raise UsageError(
            f"--rows takes steps of at most {MAX_DECODE_ROWS} rows, got {max(options.rows)}; more is --prefill"
        )
    tokens = max(*options.contexts, *options.prefill) + MAX_DECODE_ROWS
    model = open_synthetic(options, tokens)
    ops = model.ops
    name, copy = ops.name, ops.copy_bandwidth()
    print(f"{options.synthetic}, random weights, on {name}, {machine(name)}; copy bandwidth {copy / 1e9:.0f} GB/s")
    if ops.reserves and not ops.expert_vram:
        most = _predicted(options.synthetic, model, tokens)
        print(f"predicted: {most / 1e9:.2f} GB at most; prefill steps of {ops.prefill_rows} rows")
    common = environment(name) | {"model": options.synthetic, "runs": options.runs, "verdict": options.verdict}
    rows = [*_bench_prefill(model, options), *_bench_steps(model, options, copy)]
    if options.log:
        log(Path(options.log), [common | row for row in rows])
    return 0


def _bench_prefill(model: Model, options: SyntheticBench) -> list[dict[str, object]]:
    """Print the speed of reading prompts of each length; return the rows of the log."""
    rows: list[dict[str, object]] = []
    print(f"{'prefill':>10} {'ms':>9} {'tok/s':>9}")
    for n in options.prefill:
        with announced(f"prefill of {n} tokens, {options.runs + 1} times"):
            times = [read_prompt(model, model.new_state(n), n) for _ in range(options.runs + 1)]
        seconds = statistics.median(times[1:])  # the first compiles
        print(f"{n:10} {seconds * 1e3:9.2f} {n / seconds:9.1f}", flush=True)
        speed = {"prompt_tokens": n, "prefill_tps": f"{n / seconds:.1f}"}
        rows.append({"decoder": "prefill", **speed, "note": note(options)})
    return rows


def _bench_steps(model: Model, options: SyntheticBench, copy: float) -> list[dict[str, object]]:
    """Print the speed of steps of each number of rows at each context; return the rows of the log.

    copy  bytes per second of a copy
    """
    experts = bench_spark.Measured(model.ops) if options.spark else None
    head = ("context", "rows", "ms", "min..max", "tok/s", "GB/s", "of copy", "kernels", "peak GB")
    print("{:>8} {:>5} {:>9} {:>17} {:>9} {:>7} {:>8} {:>8} {:>8}".format(*head))
    state = model.new_state(max(options.contexts) + MAX_DECODE_ROWS)
    rows: list[dict[str, object]] = []
    for context in sorted(set(options.contexts)):
        with announced(f"reading {context} tokens"):
            read_prompt(model, state, context - state.length - 1)
            read_prompt(model, state, 1)  # as in decoding: a step finds one row that layers have still to apply
        for n in options.rows:
            with announced(f"steps of {n} rows at a context of {context} tokens, {3 + options.runs * REPEATS} of them"):
                if experts:
                    _steps(model, state, n, WARM_RUNS)
                    experts.begin()
                times, kernels = _steps(model, state, n, options.runs)
            ms, low, high = (1e3 * f(times) for f in (statistics.median, min, max))
            rate, peak = read_bytes(model, n, context) / ms * 1e3, model.ops.peak_bytes()
            spread = f"{low:.3f}..{high:.3f}"
            print(
                f"{context:8} {n:5} {ms:9.3f} {spread:>17} {n / ms * 1e3:9.1f} {rate / 1e9:7.0f} {rate / copy:8.1%} "
                f"{kernels or '-':>8} {peak / 1e9:8.2f}",
                flush=True,
            )
            notes = f"{ms:.3f} ms, {kernels or 'uncounted'} kernels; copy {copy / 1e9:.0f} GB/s; "
            if experts:
                print(f"{'':14} {experts}", flush=True)
                notes += f"{experts}; "
            rows.append(
                {
                    "weights": f"{read_bytes(model, n, 0) / 1e9:.3f} GB/step",
                    "decoder": f"steps of {n}",
                    "context": context,
                    "new_tokens": REPEATS * n,
                    "decode_tps_median": f"{n / ms * 1e3:.1f}",
                    "decode_tps_min": f"{n / high * 1e3:.1f}",
                    "decode_tps_max": f"{n / low * 1e3:.1f}",
                    "gb_per_s": f"{rate / 1e9:.1f}",
                    "peak_gb": f"{peak / 1e9:.2f}",
                    "note": notes + note(options),
                }
            )
    return rows


def open_synthetic(options: SyntheticBench | SyntheticSpecBench | SyntheticWindowBench, tokens: int) -> Model:
    """Make the model of --synthetic, for `tokens` tokens; refuses one for which this machine is too small or slow."""
    checkpoint, found = synthetic_checkpoint(options.synthetic), choose(options.backend)
    definition = architecture(checkpoint)[1]
    config = definition.read_config(checkpoint)
    if tokens > config.context:
        raise UsageError(f"contexts and prefill need {tokens} tokens with the rows of a step, of {config.context}")
    if options.backend is None and not found.is_gpu:
        size = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        raise BimetalError(
            f"{options.synthetic} is {size / 1e9:.1f} GB, this machine has no GPU that we can use, and a CPU takes "
            f"hours; --backend {found.name} runs it anyway"
        )
    if isinstance(options, SyntheticBench) and options.routing:
        ops = bench_spark.open_ops(options, checkpoint, found.name)
    else:
        ops = open_backend(found.name, checkpoint, placement_of(options), random=True)
    config = rank_config(definition, checkpoint, ops.ranks)
    needed = fit.predict_weights(checkpoint, definition.layout(config, checkpoint), ops)
    spec = cached_spec(definition.state_spec(config), options.cache, ops)
    needed += ops.held_state_bytes(spec, tokens, ops.prefill_rows)
    free, reason = ops.free_bytes()
    if options.memory and ops.name != "cuda":  # whose ops know their limit
        free, reason = parse_size(options.memory), "given by --memory"
    if needed > free:
        raise BimetalError(
            f"{options.synthetic} takes {shown_size(needed)} on {ops.name}, of {shown_size(free)} ({reason})"
        )
    with announced(f"making {options.synthetic}, {needed / 1e9:.1f} GB"):
        model = with_cache(synthetic(options.synthetic, ops, progress=True), options.cache, tokens)
    if ops.reserves and not ops.expert_vram:
        ops.prefill_rows = fit.rows_that_fit(ops, model.blueprint, tokens)
    return model


def _predicted(name: str, model: Model, tokens: int) -> int:
    """Predict the bytes of weights, of a state of `tokens` tokens and of its steps, as `fit` does."""
    weights = fit.predict_weights(synthetic_checkpoint(name), model.layout, model.ops)
    return weights + sum(fit.predict_run(model.ops, model.blueprint, tokens, model.ops.prefill_rows))


def read_prompt(model: Model, state: State, tokens: int) -> float:
    """Read `tokens` random tokens; return the seconds that it took."""
    ids = np.random.default_rng(state.length).integers(0, model.config.vocab, tokens).astype(np.int32)
    ops = model.ops
    with Clock() as clock:
        for at in range(0, tokens, ops.prefill_rows):
            chunk = ids[at : at + ops.prefill_rows]
            logits = model.forward(state, Step.chain(chunk, state.length), slice(len(chunk) - 1, len(chunk)))
            state.commit(np.arange(len(chunk)))
        if tokens > 0:
            ops.read(ops.sample(logits, GREEDY))
    return clock.seconds


def _steps(model: Model, state: State, rows: int, runs: int) -> tuple[list[float], int]:
    """Run `runs` times REPEATS steps of `rows` rows with greedy sampling.

    Returns the seconds per step of each run, and the kernels of a step, 0 where the backend does not count them.
    """
    ops = model.ops
    tokens: Any = np.random.default_rng(rows).integers(0, model.config.vocab, rows).astype(np.int32)

    def after(tokens: Any) -> Any:
        """Return what a step over `tokens` chooses: as in decoding, the next step waits for it."""
        return model.greedy_tokens(state, Step.chain(tokens, state.length))

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
    """Count the bytes of weights, keys and values that a step of `rows` rows reads, if rows choose random experts."""
    total = state_bytes(model.state_spec, context, model.ops.item_bytes) if context else 0.0
    for table, handles in zip(
        (model.layout.top, *model.layout.layers), (model.weights, *model.weights.layers), strict=True
    ):
        for name, entry in table.items():
            if isinstance(entry, Matrix) and not (name == "embed" and model.layout.top["head"] is not None):
                share = 1.0
                if name.startswith("experts_"):
                    share -= (1 - model.config.experts.top_k / model.config.experts.count) ** rows
                total += share * model.ops.weight_bytes(getattr(handles, name))
    return total
