"""Microseconds of Python per step of several plain replies, over a model whose steps cost nothing.

python tests/host_time.py [STREAMS] [--profile]
"""

import argparse
import cProfile
import pstats
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from common.engine import Engine
from common.models import Model
from common.options import GenerationOptions
from common.reference import NumpyOps
from common.sequence import Call
from common.step import State
from generate.bench_streams import EveryToken

VOCAB, PROMPT, STEPS, REPEATS = 64, 8, 400, 5


class FreeOps(NumpyOps):
    """A backend with a pool, which runs ahead, and whose steps and choices are made before they are asked for."""

    runs_ahead = replays = draws = True

    def __init__(self) -> None:
        self.logits = np.zeros((512, VOCAB), np.float32)
        self.tokens = np.full(512, 7, np.int32)

    def new_pool(self, spec: Any, slots: int, capacity: int, tokens: int | None = None) -> Any:
        return FreePool(capacity)

    def run(self, fn: Any, state: Any, step: Any, kept: slice | None = None) -> np.ndarray:
        rows = self.logits[: len(step)]
        return rows if kept is None else rows[kept]

    def sample(self, logits: np.ndarray, sampler: Any) -> np.ndarray:
        return self.tokens[: len(logits)]


class FreePool:
    free_tokens = None

    def __init__(self, capacity: int):
        self.capacity, self.slots = capacity, 0

    def new_state(self) -> State:
        state = State([], self.capacity)
        state.pool, state.slot = self, self.slots  # type: ignore[assignment]
        self.slots += 1
        return state


def free_engine(streams: int) -> Engine:
    """An engine in which `streams` replies have begun."""
    definition: Any = SimpleNamespace(state_spec=lambda config: [])
    config, nothing = SimpleNamespace(vocab=VOCAB, context=None, mask_id=None), SimpleNamespace(layers=[])
    layout: Any = SimpleNamespace(top={}, layers=[])
    model = Model("free", definition, config, layout, nothing, FreeOps())
    tokenizer: Any = EveryToken()
    engine = Engine(model, tokenizer, 10**6, streams)
    ignore = lambda *of: None  # noqa: E731
    for n in range(streams):
        engine.submit(Call([n % VOCAB] * PROMPT, GenerationOptions(), ignore, ignore, threading.Event()))
    while len(engine.running) < streams or not all(each.new for each in engine.running):
        engine.turn()
    return engine


def microseconds(streams: int) -> float:
    """The best of REPEATS measurements."""
    best = float("inf")
    for _ in range(REPEATS):
        engine = free_engine(streams)
        began = time.thread_time()
        for _ in range(STEPS):
            engine.turn()
        best = min(best, (time.thread_time() - began) / STEPS)
        assert len(engine.running) == streams
    return 1e6 * best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("streams", nargs="?", type=int, default=16)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    print(f"{args.streams} streams: {microseconds(args.streams):.0f} us per step")
    if args.profile:
        engine, profile = free_engine(args.streams), cProfile.Profile()
        profile.enable()
        for _ in range(STEPS):
            engine.turn()
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
