"""Microseconds of Python per step of several replies, over a model whose steps cost nothing.

python tests/host_time.py [STREAMS] [--cuda [SHAPE:RECIPE]] [--spec KIND] [--budget N] [--temperature T] [--steps N]
    [--text] [--profile]

--cuda  counts the CUDA backend's Python too, of a step that is replayed; what CuPy and the driver take comes on top
--text  gives tokens the text that the demo model's tokenizer has for them
--spec  lookup; with --cuda also wedlm, whose steps give 3 tokens, chain, all of whose draft tokens are accepted, and
        tree, none of whose are
"""

import argparse
import cProfile
import pstats
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import free_cuda
import numpy as np

from common.checkpoint import open_checkpoint
from common.demo import demo_path
from common.engine import Engine
from common.models import Model
from common.models.llama import WEDLM_MASK
from common.options import GenerationOptions
from common.reference import NumpyOps
from common.sequence import Call
from common.step import State
from common.tokenizer import Tokenizer, load_tokenizer
from generate.bench_options import SyntheticBench
from generate.bench_streams import EveryToken

VOCAB, PROMPT, WARM, REPEATS, CONTEXT = 64, 8, 50, 5, 32768
EVERY_TOKEN = EveryToken()
WINDOW = {"wedlm_window": 16, "wedlm_tau": 0.05, "wedlm_lambda": 0.02}


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

    def commit_rows(self, states: list[State], counts: list[int]) -> None:
        for state, count in zip(states, counts, strict=True):
            state.commit(range(count))


def free_model() -> Model:
    definition: Any = SimpleNamespace(state_spec=lambda config: [])
    config, nothing = SimpleNamespace(vocab=VOCAB, context=None, mask_id=None), SimpleNamespace(layers=[])
    layout: Any = SimpleNamespace(top={}, layers=[])
    return Model("free", definition, config, layout, nothing, FreeOps())


def cuda_model(shape: str, spec: str) -> Model:
    """A model of real shapes on a CUDA backend that computes nothing, with a draft where `spec` needs one."""
    free_cuda.install()
    from generate.bench_synthetic import open_synthetic  # once CuPy's place is taken
    from generate.synthetic_draft import synthetic_pair

    model = open_synthetic(SyntheticBench(synthetic=shape, backend="cuda"), CONTEXT)
    if spec in ("chain", "tree"):
        model = synthetic_pair(model)
    free_cuda.count()
    return replace(model, config=replace(model.config, mask_id=WEDLM_MASK)) if spec == "wedlm" else model


def demo_tokenizer() -> Tokenizer:
    """The demo model's tokenizer, of which no token ends a reply."""
    checkpoint = open_checkpoint(demo_path())
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.config)
    tokenizer.end_ids = frozenset()
    return tokenizer


def begun(model: Model, streams: int, options: GenerationOptions, tokenizer: Any = EVERY_TOKEN) -> Engine:
    """An engine in which `streams` replies have begun, after steps in which a backend captures."""
    engine = Engine(model, tokenizer, CONTEXT, streams)
    failed: list[BaseException | None] = []
    for n in range(streams):
        prompt = [n % VOCAB] * PROMPT
        engine.submit(Call(prompt, options, lambda piece: None, failed.append, threading.Event()))
    while len(engine.running) < streams or not all(each.new_tokens > WARM for each in engine.running):
        engine.turn()
        if failed:
            raise failed[0] or RuntimeError("a reply has ended")
    return engine


def turns(engine: Engine, steps: int) -> tuple[float, float, float]:
    """Seconds of a step, those of them in which a device has nothing to do, and its tokens."""
    streams, before = len(engine.running), sum(each.new_tokens for each in engine.running)
    free_cuda.idle.seconds = 0.0
    started = time.thread_time()
    for _ in range(steps):
        engine.turn()
    seconds = time.thread_time() - started
    assert len(engine.running) == streams, "a reply has ended"
    return (
        seconds / steps,
        free_cuda.idle.seconds / steps,
        (sum(each.new_tokens for each in engine.running) - before) / steps,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("streams", nargs="?", type=int, default=16)
    parser.add_argument("--cuda", nargs="?", const="wedlm-8b:q4_k_m", metavar="SHAPE:RECIPE")
    parser.add_argument("--spec", default="off")
    parser.add_argument("--budget", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--text", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    model = cuda_model(args.cuda, args.spec) if args.cuda else free_model()
    budget = {} if args.budget is None else {"tree_budget": args.budget}
    how: dict[str, Any] = {"spec": args.spec, "temperature": args.temperature} | (
        WINDOW if args.spec == "wedlm" else budget
    )
    options = GenerationOptions(**how)
    tokenizer: Any = demo_tokenizer() if args.text else EVERY_TOKEN
    engines = (begun(model, args.streams, options, tokenizer) for _ in range(REPEATS))
    seconds, idle, tokens = min(turns(engine, args.steps) for engine in engines)
    print(f"{args.streams} streams: {1e6 * seconds:.0f} us per step of {tokens:.1f} tokens")
    if args.cuda:
        print(f"{1e6 * idle:.0f} us of them between the end of a step and the launch of the next one")
    if args.profile:
        engine, profile = begun(model, args.streams, options, tokenizer), cProfile.Profile()
        free_cuda.calls.clear()
        profile.enable()
        turns(engine, args.steps)
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        calls = ", ".join(f"{count / args.steps:.1f} {name}" for name, count in free_cuda.calls.items())
        print(f"calls of CuPy per step: {calls}")


if __name__ == "__main__":
    main()
