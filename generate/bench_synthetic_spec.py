"""`python -m generate bench --synthetic SHAPE:RECIPE --draft synthetic`: the parts of a speculative step.

Model and draft have real shapes and random weights.
"""

from pathlib import Path

import numpy as np

from common.decode.alone import run_alone
from common.decode.run import PHASES, DecoderRun, DecodeStats
from common.decoders import Speculation
from common.sampling import Sampler, Sampling
from common.step import Step
from generate.bench_log import environment, log, machine, note
from generate.bench_options import SyntheticSpecBench
from generate.bench_synthetic import open_synthetic
from generate.synthetic_draft import synthetic_pair
from generate.timing import announced

PUBLISHED_LENGTH = 8.31  # tokens per step of Qwen3.5-27B with its draft on HumanEval, 22 nodes (Luce-Org/lucebox)


def run(options: SyntheticSpecBench) -> int:
    """Print the time of each part of a speculative step at one context.

    Random weights accept hardly any draft token, so a step gives one token; its speed at PUBLISHED_LENGTH is computed.
    """
    context, steps = options.contexts[0], options.runs * 10
    pair = synthetic_pair(open_synthetic(options, context + 2 * steps + 40))
    ops, name = pair.ops, pair.ops.name
    print(f"{options.synthetic} with a draft of {pair.draft.layers} layers, random weights, on {name}, {machine(name)}")
    print(f"{context} tokens of context, {steps} steps each, ms per step; tok/s at {PUBLISHED_LENGTH} tokens per step")
    print(f"{'budget':>7} {'rows':>6} " + " ".join(f"{phase:>8}" for phase in (*PHASES, "total")) + f" {'tok/s':>8}")
    rows = []
    for budget in options.budgets:
        state, accepted = pair.new_state(context + 2 * steps + 40), DecodeStats()
        ids = np.random.default_rng(0).integers(0, pair.config.vocab, context).astype(np.int32)
        for at in range(0, context, ops.prefill_rows):
            chunk = ids[at : at + ops.prefill_rows]
            logits = pair.forward(state, Step.chain(chunk, at), slice(len(chunk) - 1, len(chunk)))
            state.commit(np.arange(len(chunk)))
        how = Speculation("tree", budget, options.tree_topk)
        tokens = run_alone(DecoderRun(pair, state, logits, Sampler(Sampling()), ids.tolist(), how, stats=accepted))
        with announced(f"{5 + steps} steps with a tree of {budget} draft tokens"):
            while accepted.steps < 5:  # launches, captures and tunes
                next(tokens)
            accepted.lengths.clear()
            accepted.rows, accepted.seconds = 0, dict.fromkeys(PHASES, 0.0)
            while accepted.steps < steps:
                next(tokens)
        tokens.close()
        ms = [1e3 * accepted.seconds[phase] / accepted.steps for phase in PHASES]
        total = sum(ms)
        speed, drawn = PUBLISHED_LENGTH / total * 1e3, accepted.rows / accepted.steps
        print(f"{budget:7} {drawn:6.1f} " + " ".join(f"{x:8.3f}" for x in (*ms, total)) + f" {speed:8.0f}", flush=True)
        rows.append(
            environment(name)
            | {
                "model": options.synthetic,
                "decoder": f"speculative step, tree {budget}",
                "context": context,
                "runs": steps,
                "accept_len": f"{accepted.length:.2f}",
                "peak_gb": f"{ops.peak_bytes() / 1e9:.2f}",
                "verdict": options.verdict,
                "note": f"{total:.3f} ms: "
                + ", ".join(f"{phase} {x:.3f}" for phase, x in zip(PHASES, ms, strict=True))
                + f"; {speed:.0f} tok/s at {PUBLISHED_LENGTH}; {note(options)}",
            }
        )
    if options.log:
        log(Path(options.log), rows)
    return 0
