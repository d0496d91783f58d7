"""`python -m generate bench --streams 1,4,16`: several replies at once, of a model or of synthetic weights."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from common.checkpoint import open_checkpoint
from common.engine import Engine
from common.errors import BimetalError
from common.hub import resolve_model
from common.models import Model
from common.models.drafts import load_pair
from common.ops import Ops
from common.options import GenerationOptions
from common.pieces import Piece
from common.schedule import SHARED_PREFILL_ROWS
from common.sequence import Call
from generate.backends import open_model, placement_of
from generate.bench_log import environment, log, machine, note
from generate.bench_options import StreamsBench, SyntheticBench
from generate.bench_serve import percentile
from generate.bench_synthetic import open_synthetic
from generate.caches import with_cache
from generate.loading import resolve_draft
from generate.timing import announced

WARM_TOKENS = 8  # of the first run, in which a backend compiles and captures
AHEAD = 32  # tokens that a reply may be ahead of the last one to begin, for each stream
DRAFTED = 4  # times as many with a draft, several of whose tokens a step may accept


class EveryToken:
    """A tokenizer whose every token is a piece of text, and none an end."""

    end_ids: frozenset[int] = frozenset()
    vocab_size = 2**31

    def decoder(self) -> Any:
        return SimpleNamespace(push=lambda token: "x")


@dataclass
class Stream:
    """Times of a call and of each of its tokens, in seconds."""

    called: float
    cancel: threading.Event = field(default_factory=threading.Event)
    tokens: list[float] = field(default_factory=list)
    errors: deque[BaseException] = field(default_factory=deque)

    def put(self, piece: Piece) -> None:
        if piece.text:
            self.tokens.append(time.perf_counter())

    def ended(self, error: BaseException | None) -> None:
        if error is not None:
            self.errors.append(error)


@dataclass(frozen=True)
class Result:
    """Figures of streams while all of them decode.

    tps    tokens per second of all
    host   seconds per step in which the host works, mostly while the device computes; None if waits are not counted
    idle   seconds per step in which the device waits for the host; None if they are not counted
    first  seconds to each first token
    gaps   seconds between tokens
    """

    tps: float
    host: float | None
    idle: float | None
    first: list[float]
    gaps: list[float]


class HostTime:
    """Times per step, after the first one, in which the host works, and in which the device waits for it."""

    def __init__(self, ops: Ops):
        self.ops, self.steps, self.started, self.ended = ops, 0, (0.0, 0.0), (0.0, 0.0)
        self._idle: Callable[[], float] | None = None

    def step(self) -> None:
        """Count a step that has just ended."""
        self.steps += 1
        self.ended = time.perf_counter(), self.ops.waited or 0.0
        if self.steps == 1:
            self.started, self._idle = self.ended, self.ops.count_idle()

    @property
    def seconds(self) -> float | None:
        """Return seconds per step without waits for the device; None if they are not counted, or there was no step."""
        if self.ops.waited is None or self.steps < 2:
            return None
        took, waited = (end - begin for begin, end in zip(self.started, self.ended, strict=True))
        return (took - waited) / (self.steps - 1)

    @property
    def idle(self) -> float | None:
        """Return seconds per step in which the device waits for the host; None if they are not counted."""
        return None if self._idle is None or self.steps < 2 else self._idle()


def run(options: StreamsBench) -> int:
    """Print what each number of streams delivers."""
    context, most = options.contexts[0], max(options.streams)
    capacity = context + options.new_tokens + AHEAD * most * (1 if options.draft is None else DRAFTED)
    model = _model(options, capacity)
    name = model.ops.name
    if most > 1:
        model.ops.prefill_rows = min(model.ops.prefill_rows, SHARED_PREFILL_ROWS)
    print(f"{options.synthetic or options.model} on {name}, {machine(name)}")
    print(f"prompts of {context} tokens, all at once, until the last reply to begin has {options.new_tokens} tokens")
    head = "streams", "tok/s", "of each", "first p50", "p95", "gap p50", "p95 ms", "host ms", "idle ms"
    print("{:>8} {:>9} {:>9} {:>10} {:>9} {:>9} {:>9} {:>8} {:>8}".format(*head))
    rows = []
    for count in options.streams:
        tokenizer: Any = EveryToken()
        engine = Engine(model, tokenizer, capacity, count, queue=count)
        with announced(f"{count} streams"):
            measure(engine, count, context, WARM_TOKENS)
            engine.reset()
            result = measure(engine, count, context, options.new_tokens)
        times = [1e3 * percentile(values, p) for values in (result.first, result.gaps) for p in (50, 95)]
        host, idle = ("-" if x is None else f"{1e3 * x:.3f}" for x in (result.host, result.idle))
        print(
            f"{count:8} {result.tps:9.1f} {result.tps / count:9.1f} {times[0]:10.1f} {times[1]:9.1f} "
            f"{times[2]:9.2f} {times[3]:9.2f} {host:>8} {idle:>8}",
            flush=True,
        )
        rows.append(
            environment(name)
            | {
                "model": options.synthetic or options.model,
                "decoder": f"{count} streams",
                "context": context,
                "prompt_tokens": context,
                "new_tokens": options.new_tokens,
                "runs": 1,
                "decode_tps_median": f"{result.tps:.1f}",
                "peak_gb": f"{model.ops.peak_bytes() / 1e9:.2f}",
                "verdict": options.verdict,
                "note": "first token p50/p95 {:.1f}/{:.1f} ms, gaps {:.2f}/{:.2f} ms; ".format(*times)
                + f"host {host} ms per step, idle {idle}; {note(options)}",
            }
        )
        del engine
    if options.log:
        log(Path(options.log), rows)
    return 0


def _model(options: StreamsBench, capacity: int) -> Model:
    if options.synthetic is not None:
        shapes = SyntheticBench(
            synthetic=options.synthetic,
            backend=options.backend,
            devices=options.devices,
            split=options.split,
            tensor_parallel=options.tensor_parallel,
            memory=options.memory,
            cache=options.cache,
            contexts=options.contexts,
        )
        return open_synthetic(shapes, capacity)
    path = resolve_model(options.model)
    checkpoint = open_checkpoint(path)
    draft = None if options.draft is None else resolve_draft(options.draft, checkpoint, True)
    model = open_model(checkpoint, options.backend, progress=True, placement=placement_of(options))
    model = with_cache(model, options.cache, capacity)
    return model if draft is None else load_pair(draft, model, True)


def measure(engine: Engine, count: int, context: int, new_tokens: int) -> Result:
    """Measure `count` calls at once, until each has `new_tokens` tokens.

    Raises BimetalError if a reply ends before the last one begins.
    """
    random = np.random.default_rng(0)
    streams: list[Stream] = []
    for _ in range(count):
        stream = Stream(time.perf_counter())
        prompt = random.integers(0, engine.model.config.vocab, context).tolist()
        engine.submit(Call(prompt, GenerationOptions(), stream.put, stream.ended, stream.cancel))
        streams.append(stream)
    host = HostTime(engine.model.ops)
    while engine.turn():
        if host.steps or all(stream.tokens for stream in streams):
            host.step()
        if all(len(stream.tokens) >= new_tokens for stream in streams):
            break
    idle = host.idle  # before further steps
    for stream in streams:
        stream.cancel.set()
    engine.drain()
    for stream in streams:
        if stream.errors:
            raise stream.errors[0]
    started = max(stream.tokens[0] for stream in streams)
    ended = min(stream.tokens[-1] for stream in streams)
    if ended <= started:
        raise BimetalError(f"a reply filled the context of {engine.target.context} tokens before the last one began")
    together = sum(started < at <= ended for stream in streams for at in stream.tokens)
    gaps = [b - a for stream in streams for a, b in pairwise(at for at in stream.tokens if at >= started)]
    first = [stream.tokens[0] - stream.called for stream in streams]
    return Result(together / max(ended - started, 1e-9), host.seconds, idle, first, gaps)
