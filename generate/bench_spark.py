"""Benchmark of a synthetic mixture with some experts in GPU memory: steps, and bytes read over the link."""

from pathlib import Path
from typing import Any

from common.amounts import parse_size
from common.checkpoint import Checkpoint
from common.errors import UsageError
from common.fit import predict_stacks
from common.hot_experts import HotExperts, check_hot, hot_sizes
from common.models import architecture
from common.ops import Ops
from common.routing_trace import read_trace
from generate.backends import backend_package
from generate.bench_options import SyntheticBench

PLACING = 4  # the first quarter of a trace says which experts are hot; steps replay what follows


def open_ops(options: SyntheticBench, checkpoint: Checkpoint, backend: str) -> Ops:
    """Open ops that replay the trace of --routing; with --spark, GPU memory holds as many experts as --expert-vram."""
    if backend != "cuda":
        raise UsageError(f"--routing is for CUDA, and the backend is {backend}")
    if options.devices:
        raise UsageError("--routing is for one GPU; leave --devices out")
    assert options.routing
    package, definition = backend_package("cuda"), architecture(checkpoint)[1]
    if options.memory:
        package.limit_memory(parse_size(options.memory))
    config = definition.read_config(checkpoint)
    stacks = predict_stacks(checkpoint, definition.layout(config, checkpoint), package.random_ops())
    layers = [i for i, stack in enumerate(stacks) if stack]
    if not layers:
        raise UsageError(f"--routing is for mixtures, and {options.synthetic} has no experts")
    trace = read_trace(Path(options.routing)).over(len(layers), config.experts.count, config.experts.top_k)
    start = len(trace.ids) // PLACING
    if not options.spark:
        return package.random_ops(None, trace, start)  # type: ignore[no-any-return]
    sizes, text = hot_sizes(stacks, config.experts.count), options.expert_vram or ""
    nbytes = sizes.budget_of(_percent(text)) if text.endswith("%") else parse_size(text)
    check_hot(nbytes, sizes)
    profile = trace.profile(start, layers)
    return package.random_ops(HotExperts(nbytes, config.experts.top_k, profile), trace, start)  # type: ignore[no-any-return]


def _percent(text: str) -> float:
    try:
        share = float(text[:-1]) / 100
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise UsageError(f"--expert-vram is {text!r}; a share is above 0% and below 100%")
    return share


class Measured:
    """Work with experts of the steps since `begin`, in words for a table."""

    def __init__(self, ops: Any):
        self.store = ops.context.experts
        self.link = self.store.link_rate()

    def begin(self) -> None:
        self.before = self.store.stats()

    def __str__(self) -> str:
        stats, slots = self.store.stats(self.before), sum(self.store.residency.slots.values())
        limit = self.link * stats.tokens / max(1, stats.bytes_read)
        return (
            f"{slots} slots, {stats.hit_rate:.2%} hits, {stats.bytes_per_token / 1e6:.1f} MB per row; "
            f"{stats.evictions} experts moved to slots; the link's {self.link / 1e9:.1f} GB/s allow {limit:.0f} rows/s"
        )
