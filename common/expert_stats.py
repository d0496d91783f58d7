"""Counters of streamed experts, which the residency and its reader fill, and their difference over a reply."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

KEPT_READS = 4096  # latest reads of which latencies are kept


@dataclass(frozen=True)
class ExpertStats:
    """Costs of the experts of some tokens.

    budget       bytes that experts may take
    peak         most bytes of experts held so far
    tokens       rows of the steps
    hits         experts that a layer needed and found, once per step and layer
    misses       experts that a layer needed and had to wait for, likewise
    bytes_read   bytes that were read, prefetched ones included
    evictions    experts that were evicted
    prefetched   experts that were read before they were needed
    read_p50     median seconds of a read, of the latest 4096 reads; 0 without reads
    read_p95     95th percentile of these seconds
    waits        seconds that each layer waited for reads
    """

    budget: int
    peak: int
    tokens: int
    hits: int
    misses: int
    bytes_read: int
    evictions: int
    prefetched: int
    read_p50: float
    read_p95: float
    waits: tuple[float, ...]

    @property
    def hit_rate(self) -> float:
        """Compute the share of the needed experts that were in memory; 1 if none was needed."""
        return self.hits / max(1, self.hits + self.misses) if self.misses else 1.0

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_read / max(1, self.tokens)

    @property
    def wait(self) -> float:
        """Sum up the seconds that all layers waited."""
        return sum(self.waits)

    def __str__(self) -> str:
        slowest = max(range(len(self.waits)), key=lambda layer: self.waits[layer], default=0)
        waited = f"waited {self.wait:.2f} s" + (f", most in layer {slowest}" if self.wait else "")
        reads = f"reads {self.read_p50 * 1e3:.2f} ms p50, {self.read_p95 * 1e3:.2f} ms p95, " if self.read_p95 else ""
        size = f"{self.peak / 1e9:.2f} of {self.budget / 1e9:.2f} GB"
        return (
            f"experts: {self.hit_rate:.1%} hits, {self.bytes_per_token / 1e6:.1f} MB per token, {reads}{waited}, "
            f"{self.evictions} evictions, {size}"
        )


@dataclass
class ExpertCounters:
    """Counters that only grow, in the thread that owns the model."""

    budget: int
    layers: int
    peak: int = 0
    tokens: int = 0
    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    evictions: int = 0
    prefetched: int = 0
    waits: np.ndarray = field(init=False)
    reads: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_READS))

    def __post_init__(self) -> None:
        self.waits = np.zeros(self.layers)

    def stats(self, earlier: ExpertStats | None = None) -> ExpertStats:
        """Return the counts so far, or their increase since `earlier`."""
        p50, p95 = np.percentile(list(self.reads), (50, 95)) if self.reads else (0.0, 0.0)
        counts = ("tokens", "hits", "misses", "bytes_read", "evictions", "prefetched")
        since = {name: getattr(self, name) - (getattr(earlier, name) if earlier else 0) for name in counts}
        waits = tuple((self.waits - (earlier.waits if earlier else 0)).tolist())
        return ExpertStats(self.budget, self.peak, read_p50=float(p50), read_p95=float(p95), waits=waits, **since)
