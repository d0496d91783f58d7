"""`python -m generate plan MODEL --machine NAME`: predicted tokens per second by memory for experts."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path

from common.amounts import parse_size, shown_size
from common.checkpoint import open_checkpoint
from common.errors import BimetalError, UsageError
from common.expert_plan import (
    MIXTURES,
    SKEW,
    Machine,
    Mixture,
    budgets,
    hits_of,
    mixture_of,
    plan,
    read_machine,
    room,
    zipf,
)
from common.expert_profile import read_profile
from common.hub import resolve_model
from common.models import architecture
from common.routing_trace import read_trace
from common.storage import state_bytes

TOKENS, ITEM_BYTES = 4096, 2  # of the context whose states stay in memory, in a 16-bit type


def run(args: argparse.Namespace) -> int:
    if args.prompt_tokens is not None:
        raise UsageError("--prompt-tokens goes with --cluster, not with --machine")
    given = [name for name in ("expert_profile", "trace", "skew") if getattr(args, name) is not None]
    if len(given) > 1:
        one, other = (f"--{name.replace('_', '-')}" for name in given[:2])
        raise UsageError(f"{one} and {other} exclude each other; each describes the traffic")
    mixture, machine = _mixture(args.model), read_machine(args.machine)
    hits, traffic = _hits(args, mixture)
    sizes = _budgets(args.expert_cache, mixture, machine)
    rates = [plan(mixture, machine, size, hits) for size in sizes]
    best = max(rates, key=lambda rate: rate.tokens_per_second)
    if args.json:
        rows = [asdict(rate) | {"tokens_per_second": rate.tokens_per_second, "limit": rate.limit} for rate in rates]
        print(json.dumps({"mixture": asdict(mixture), "machine": asdict(machine), "traffic": traffic, "rates": rows}))
        return 0
    print(
        f"{mixture.name} on {machine.name}: {mixture.layers} layers of {mixture.experts} experts, {mixture.used} per "
        f"token, {mixture.expert_bytes / 1e6:.2f} MB each, {mixture.total / 1e9:.1f} GB in all; {traffic}"
    )
    print(f"{'experts in memory':>18} {'hits':>6} {'cached':>7} {'compute':>9} {'wait':>9} {'tok/s':>7}  limit")
    for rate in rates:
        size = f"{rate.budget / 1e9:.1f} GB {rate.budget / mixture.total:4.0%}"
        shares = f"{rate.hits:6.1%} {rate.cached:7.1%}"
        times = f"{rate.compute * 1e3:6.1f} ms {rate.wait * 1e3:6.1f} ms"
        print(f"{size:>18} {shares} {times} {rate.tokens_per_second:7.2f}  {rate.limit}")
    print(f"best: {best.budget / 1e9:.1f} GB, {best.tokens_per_second:.2f} tok/s, limited by {best.limit}")
    return 0


def _mixture(name: str) -> Mixture:
    if name in MIXTURES:
        return MIXTURES[name]
    checkpoint = open_checkpoint(resolve_model(name))
    definition = architecture(checkpoint)[1]
    config = definition.read_config(checkpoint)
    states = state_bytes(definition.state_spec(config), min(TOKENS, config.context), ITEM_BYTES)
    return mixture_of(checkpoint, definition.layout(config, checkpoint), config, states)


def _hits(args: argparse.Namespace, mixture: Mixture) -> tuple[Callable[[float], float], str]:
    """Return a function from the share of experts in memory to the hit rate, and the source of the rates in words."""
    if args.trace is not None:
        trace = read_trace(Path(args.trace)).over(mixture.layers, mixture.experts, mixture.used)
        return cache(
            lambda share: trace.lru_hits(share) if share > 0 else 0.0
        ), f"use as traced in {args.trace}, by LRU"
    if args.expert_profile is None:
        skew = SKEW if args.skew is None else args.skew
        if not 0 <= skew <= 3:
            raise UsageError(f"--skew is {skew}; it must be from 0, where all experts are used alike, to 3")
        return zipf(mixture.experts, skew), f"use by Zipf's law with exponent {skew:g}"
    profile = read_profile(Path(args.expert_profile))
    counted = int(profile.counts.any(axis=1).sum())
    if profile.counts.shape[1] != mixture.experts or counted > mixture.layers:
        theirs, ours = f"{counted} layers of {profile.counts.shape[1]}", f"{mixture.layers} of {mixture.experts}"
        raise BimetalError(
            f"{args.expert_profile} is the profile of another model: it counts {theirs}, not {ours} experts"
        )
    return hits_of(profile), f"use as counted in {args.expert_profile}"


def _budgets(given: str | None, mixture: Mixture, machine: Machine) -> list[int]:
    several = budgets(mixture, machine)
    if given is None:
        return several
    size = parse_size(given)
    if not several[0] <= size <= several[-1]:
        raise UsageError(
            f"--expert-cache is {shown_size(size)}; on {machine.name} it must be from {shown_size(several[0])} to "
            f"{shown_size(room(mixture, machine))}"
        )
    return [size]
