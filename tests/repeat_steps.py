"""Replay one step many times on a GPU and count the replays whose logits differ: python tests/repeat_steps.py.

python tests/repeat_steps.py [SHAPE:RECIPE] [SEQUENCES] [REPLAYS]

A step leaves nothing that a later step can see until it is committed, so that all replays must give the same bits. What
differs is a race between kernels that overlap, which compute-sanitizer does not see: it runs one kernel at a time.
The exit code is 1 if a replay differs.
"""

import sys
from typing import Any

import numpy as np

from common.joined_step import JoinedStep
from common.step import Step
from generate.bench_options import SyntheticBench
from generate.bench_synthetic import open_synthetic

PROMPT = 64  # tokens of each sequence


def main(shape: str, sequences: int = 16, replays: int = 2000) -> int:
    context = 4 * PROMPT
    model = open_synthetic(SyntheticBench(synthetic=shape, backend="cuda"), context * sequences)
    pool: Any = model.new_pool(sequences, context)
    states = [pool.new_state() for _ in range(sequences)]
    for number, state in enumerate(states):
        tokens = (np.arange(PROMPT, dtype=np.int32) * (number + 3) + number) % 1000
        model.forward(state, Step.chain(tokens, 0), slice(PROMPT - 1, PROMPT))
        state.commit(np.arange(PROMPT))
    tokens, slots = np.arange(sequences, dtype=np.int32), [state.slot for state in states]

    def logits() -> np.ndarray:
        rows = [Step.chain(tokens[i : i + 1], state.length) for i, state in enumerate(states)]
        read: np.ndarray = model.ops.read(model.forward(pool, JoinedStep.of(rows, tokens, slots)))
        return read

    for _ in range(3):  # called, captured, replayed
        logits()
    for state in states:
        state.commit(np.zeros(1, np.int64))  # a recurrent state then has a path to apply
    expected, differing = logits(), 0
    for replay in range(replays):
        found = logits()
        rows = np.flatnonzero((found != expected).any(axis=1))
        if len(rows):
            differing += 1
            print(f"replay {replay}: rows {rows.tolist()}, by up to {np.abs(found - expected).max():.2g}", flush=True)
    print(f"{shape}, {sequences} sequences: {differing} of {replays} replays differ")
    return int(differing > 0)


if __name__ == "__main__":
    name, *counts = sys.argv[1:] or ["qwen3.6-27b:q4_k_m"]
    sys.exit(main(name, *map(int, counts)))
