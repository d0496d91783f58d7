"""A throughput model of streamed experts: from routing, bytes and rates to tokens per second.

On unified memory a layer reads what it misses and then computes, because reads and the GPU share the memory's
bandwidth; reads begun before the router has chosen are hidden. On a GPU with memory of its own the host
computes cold experts, or copies them, while the GPU computes the others; a layer with cold experts pays for a merge.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from common.checkpoint import Checkpoint
from common.errors import BimetalError, UsageError
from common.expert_files import expert_forms, expert_matrices
from common.expert_profile import Profile
from common.safetensors import read_json
from common.weights import Layout

SKEW = 0.9  # exponent of Zipf's law between the four published hit rates (docs/experts.md)
SYSTEM = 4e9  # bytes of memory that the system and other programs keep
WIRED = 0.75  # share of unified memory that a Mac lets its GPU wire


@dataclass(frozen=True)
class Mixture:
    """Bytes that a token of a mixture of experts reads.

    layers        that have experts
    experts       of each layer
    used          per token and layer
    expert_bytes  of one expert, as stored
    other_bytes   that a token reads beside them: attention, shared experts, routers, head
    fixed_bytes   that are always in memory: `other_bytes`, embedding, states
    """

    name: str
    layers: int
    experts: int
    used: int
    expert_bytes: int
    other_bytes: int
    fixed_bytes: int

    @property
    def total(self) -> int:
        """Count the bytes of all experts."""
        return self.layers * self.experts * self.expert_bytes


@dataclass(frozen=True)
class Machine:
    """Rates of a machine and of an engine on it; rates are bytes per second, times seconds.

    memory      of the machine, or of its GPU if the GPU has its own memory
    bandwidth   at which the GPU reads weights
    disk        of cold reads, in pieces of an expert
    cached      of reads from the system's cache
    layer       beside reading weights: launches and waits, per layer
    hidden      share of the reads that run while the GPU computes
    host        of experts that the host computes or copies, whichever is sooner; 0: memory is unified
    merge       of a layer in which the host computes
    """

    name: str
    memory: float
    bandwidth: float
    disk: float
    cached: float
    layer: float
    hidden: float = 0.0
    host: float = 0.0
    merge: float = 0.0


@dataclass(frozen=True)
class Rate:
    """Prediction of the model for one budget.

    budget  bytes of experts in memory
    hits    share of the experts that are in memory
    cached  share that is read from the system's cache
    compute seconds per token that the GPU computes and launches
    wait    seconds per token that reads, or the host, add
    """

    budget: int
    hits: float
    cached: float
    compute: float
    wait: float

    @property
    def tokens_per_second(self) -> float:
        return 1 / (self.compute + self.wait)

    @property
    def limit(self) -> str:
        return "reads" if self.wait > self.compute else "GPU and launches"


# Published rates, and what follows from published times on the same machine (docs/experts.md). `layer` is that of the
# engine which published them: of another engine it must be measured.
MACHINES = {
    machine.name: machine
    for machine in (
        Machine("m1-ultra-64gb", 64e9, 640e9, 5e9, 25e9, 3.7e-3, hidden=0.7),
        Machine("m5-pro-64gb", 64e9, 245e9, 6e9, 25e9, 2.0e-3, hidden=0.7),
        Machine("m4-16gb", 16e9, 96e9, 2e9, 12e9, 4.75e-3),
        Machine("rtx3090-24gb", 24e9, 750e9, 3e9, 12e9, 0.165e-3, host=96e9, merge=0.2e-3),
    )
}
MIXTURES = {
    mixture.name: mixture
    for mixture in (
        Mixture("qwen3.5-122b-a10b", 48, 256, 8, 5_308_416, 2_400_000_000, 4_600_000_000),
        Mixture("qwen3.5-397b-a17b", 60, 512, 4, 7_077_888, 5_500_000_000, 8_000_000_000),
        Mixture("qwen3.6-35b-a3b", 40, 256, 8, 1_400_000, 700_000_000, 1_900_000_000),
        Mixture("laguna-xs.2", 39, 256, 8, 1_830_000, 900_000_000, 1_400_000_000),
    )
}


def rate_at(mixture: Mixture, machine: Machine, budget: int, hits: float, cached: float) -> Rate:
    """Predict the rate with a share `hits` of the experts in memory, and `cached` in the system's cache."""
    read = mixture.used * mixture.expert_bytes  # per layer
    compute = machine.layer + (read + mixture.other_bytes / mixture.layers) / machine.bandwidth
    cold = 1 - hits - cached
    if machine.host:
        busy = read * (1 - hits) / machine.host
        some = 1 - hits**mixture.used  # of the layers have an expert that is cold
        wait = max(0.0, busy - compute) + some * machine.merge
    else:
        wait = (1 - machine.hidden) * read * (cached / machine.cached + cold / machine.disk)
    return Rate(budget, hits, cached, mixture.layers * compute, mixture.layers * wait)


def plan(mixture: Mixture, machine: Machine, budget: int, share: Callable[[float], float]) -> Rate:
    """Predict the rate with `budget` bytes of experts in memory; the system's cache holds others in the remainder.

    share  maps a share of the experts' bytes to the share of chosen experts found in them (the hit rate)
    """
    left = 0.0 if machine.host else machine.memory - SYSTEM - mixture.fixed_bytes - budget
    hits = share(min(1.0, budget / mixture.total))
    both = share(min(1.0, (budget + max(0.0, left)) / mixture.total))
    return rate_at(mixture, machine, budget, hits, both - hits)


class Hits:
    """Hit rate by the share of the experts' bytes in memory, most popular experts first."""

    def __init__(self, counts: np.ndarray):
        """Rank the experts of all layers by `counts` (layers, experts), how often traffic chose each."""
        self._ranked = np.sort(counts.astype(np.float64), axis=None)[::-1].cumsum()

    def __call__(self, share: float) -> float:
        at = share * len(self._ranked)
        whole = np.concatenate([[0.0], self._ranked])
        return float(np.interp(at, np.arange(len(whole)), whole) / max(whole[-1], 1e-300))


def zipf(experts: int, skew: float) -> Hits:
    """Return the hit rates of traffic that chooses the n-th most popular expert with the weight n^-skew."""
    return Hits((1 + np.arange(experts, dtype=np.float64))[None] ** -skew)


def room(mixture: Mixture, machine: Machine) -> int:
    """Compute the bytes of experts that fit beside everything else."""
    usable = machine.memory - 1e9 if machine.host else WIRED * machine.memory
    return int(min(mixture.total, usable - mixture.fixed_bytes))


def budgets(mixture: Mixture, machine: Machine) -> list[int]:
    """List budgets to compare: one layer's experts, powers of two of a GB, and all that fits. Raises BimetalError."""
    least, most = mixture.experts * mixture.expert_bytes, room(mixture, machine)
    if most < least:
        raise BimetalError(
            f"{mixture.name} does not run on {machine.name}: {machine.memory / 1e9:.0f} GB leave "
            f"{max(0, most) / 1e9:.1f} GB for experts, and one layer's take {least / 1e9:.1f} GB"
        )
    between = [2**n * 10**9 for n in range(10) if least < 2**n * 10**9 < most]
    return [least, *between, most]


def read_machine(name: str) -> Machine:
    """Return one of MACHINES, or the machine that a JSON file describes by Machine's fields. Raises UsageError."""
    if name in MACHINES:
        return MACHINES[name]
    if not Path(name).is_file():
        raise UsageError(f"machine {name!r} is neither a file nor one of {', '.join(MACHINES)}")
    values: dict[str, Any] = read_json(Path(name))
    known = {f.name: f for f in fields(Machine)}
    needed = ("memory", "bandwidth", "disk", "cached", "layer")
    if unknown := sorted(values.keys() - known.keys()):
        raise UsageError(f"{name} has {unknown[0]!r}; a machine has {', '.join(known)}")
    if missing := [key for key in needed if key not in values]:
        raise UsageError(f"{name} lacks {missing[0]!r}; a machine has {', '.join(known)}")
    for key, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e18
        if key != "name" and not (number and (value > 0 or key not in needed)):
            raise UsageError(f"{name}: {key} is {json.dumps(value)}; it must be a number above 0")
    return Machine(**({"name": Path(name).stem} | values))


def hits_of(profile: Profile) -> Hits:
    """Return the hit rates by the counts of a profile."""
    if not profile.counts.any():
        raise BimetalError("the profile counts no use of any expert")
    return Hits(profile.counts[profile.counts.any(axis=1)])


def mixture_of(checkpoint: Checkpoint, layout: Layout, config: Any, states: int) -> Mixture:
    """Count what a token of the model reads, from headers; `states` bytes of a sequence stay in memory.

    Raises BimetalError for a model without experts.
    """
    forms = expert_forms(checkpoint, layout)
    experts = {name for pair in expert_matrices(layout).values() for m in pair for s in m.parts for name in s.names}
    rest = {name: checkpoint.tensors[name].nbytes for name in layout.names() - experts}
    embed = layout.top.get("embed")
    tied = layout.top.get("head") is None
    unread = 0 if tied or embed is None else sum(rest[name] for s in embed.parts for name in s.names)
    fixed = sum(rest.values())
    nbytes = sum(form.nbytes for form in forms.values()) // len(forms)
    count, used = config.experts.count, config.experts.top_k
    return Mixture(checkpoint.path.name, len(forms), count, used, nbytes, fixed - unread, fixed + states)
