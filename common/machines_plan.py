"""Predict tokens per second and the time to the first token for each way to share a model among machines.

One machine takes read / bandwidth + step for a token; `step` does not depend on the bytes read (launches, attention,
waits). An exchange of b bytes among n machines takes latency + 2 (n - 1) / n x b / bandwidth of the link.

replicas  each machine has the whole model: the step of one machine, n replies at once
pipeline  layers shared: the sum over machines of their shares of a step, and n transfers of a row; one reply at a time,
          or on GPUs of one machine n at once
tensor    every layer shared: the reads of one rank, all of `step`, and two exchanges per layer; on GPUs of one machine
          the head is divided too, and a token's logits are gathered
experts   experts shared, all else on each: the busiest machine's experts, all else, and one exchange per layer
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from common.amounts import parse_size
from common.errors import BimetalError, UsageError, shown
from common.layer_shares import share_layers

CHUNK = 512  # rows of a prompt's step
ITEM = 4  # bytes of a number that is sent


@dataclass(frozen=True)
class Host:
    """A machine.

    memory     bytes for the model
    bandwidth  bytes per second at which decoding reads weights
    step       seconds of a decoding step beside that
    flops      per second, of a prompt
    """

    name: str
    memory: float
    bandwidth: float
    step: float
    flops: float


@dataclass(frozen=True)
class Link:
    """The connection between machines: bytes per second, and the seconds of the smallest exchange.

    gpus  whether the machines are GPUs of one machine
    """

    bandwidth: float
    latency: float
    gpus: bool = False


@dataclass(frozen=True)
class Work:
    """Bytes and operations that a model needs.

    held     bytes of each layer with its states; those outside the layers count to the first
    read     bytes that a token reads, without its experts
    experts  bytes of the experts that a token chooses; 0: the model has none
    chosen   number of experts that a token chooses per layer
    flops    floating-point operations per token of a prompt
    logits   bytes of a token's logits that ranks gather; 0: each has the whole head
    """

    held: Sequence[int]
    hidden: int
    read: float
    experts: float
    chosen: int
    flops: float
    logits: float = 0


@dataclass(frozen=True)
class Way:
    """A way to share a model: seconds per token of one reply, tokens per second of all, seconds to the first token.

    built  whether this version can do it
    """

    name: str
    token: float
    all: float
    first: float
    built: bool


def read_hosts(path: Path) -> tuple[list[Host], Link]:
    """Read {"machines": [{"name", "memory", "read_gbs", "step_ms", "tflops"}, ...], "link": {"gbs", "us", "gpus"}}."""
    try:
        values = _object("it", json.loads(path.read_text(encoding="utf-8")))
        machines, between = values["machines"], _object("link", values["link"])
        if not isinstance(machines, list):
            raise ValueError(f"machines is {shown(machines)}; it must be a list")
        hosts = [
            Host(
                str(each.get("name", number)),
                parse_size(str(each["memory"])),
                _positive(each, "read_gbs") * 1e9,
                _finite(each.get("step_ms", 0), "step_ms") * 1e-3,
                _positive(each, "tflops") * 1e12,
            )
            for number, machine in enumerate(machines, 1)
            if (each := _object(f"machine {number}", machine))
        ]
        gpus = between.get("gpus", False)
        if not isinstance(gpus, bool):
            raise ValueError(f"gpus is {gpus!r}; it must be true or false")
        link = Link(_positive(between, "gbs") * 1e9, _positive(between, "us") * 1e-6, gpus)
    except KeyError as error:
        raise BimetalError(f"{path} lacks {error}; docs/machines.md shows such a file") from None
    except (ValueError, RecursionError) as error:
        raise BimetalError(f"{path} describes no machines: {error}") from None
    if not hosts or any(host.step < 0 for host in hosts):
        raise BimetalError(
            f"{path} describes {len(hosts)} machines; at least one is needed, with step_ms of at least 0"
        )
    return hosts, link


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{name} is {shown(value)}; it must be an object with entries")
    return value


def _positive(values: Mapping[str, Any], name: str) -> float:
    number = _finite(values[name], name)
    if number <= 0:
        raise ValueError(f"{name} is {values[name]}; it must be above 0")
    return number


def _finite(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {shown(value)}; it must be a finite number")
    return float(value)


def exchange(link: Link, machines: int, size: float) -> float:
    """Compute the seconds of a sum over all machines of `size` bytes each."""
    return link.latency + 2 * (machines - 1) / machines * size / link.bandwidth


def step_time(host: Host, work: Work, share: float = 1.0) -> float:
    """Compute the seconds of a share of a decoding step on one machine."""
    return share * ((work.read + work.experts) / host.bandwidth + host.step)


def ways(hosts: Sequence[Host], link: Link, work: Work, rank_work: Work | None, prompt: int) -> list[Way]:
    """List the ways in which the model fits, the fastest for one reply first; raises UsageError if there is none.

    rank_work  of each rank of tensor parallelism over all hosts; None: they cannot share heads and channels equally
    prompt     tokens before the first one of the reply
    """
    n, total = len(hosts), sum(work.held)
    found = []
    if holding := [host for host in hosts if host.memory >= total]:
        steps = [step_time(host, work) for host in holding]
        best = min(range(len(steps)), key=steps.__getitem__)
        first = prompt * work.flops / holding[best].flops + steps[best]
        name = "one machine" if len(holding) == 1 else f"replicas on {len(holding)}"
        found.append(Way(name, steps[best], sum(1 / step for step in steps), first, True))
    if n > 1:
        if way := _pipeline(hosts, link, work, prompt):
            found.append(way)
        if rank_work and (way := _tensor(hosts, link, rank_work, prompt)):
            found.append(way)
        if work.experts and (way := _experts(hosts, link, work, prompt)):
            found.append(way)
    if not found:
        given = sum(host.memory for host in hosts)
        raise UsageError(
            f"the model needs {total / 1e9:.3g} GB, and the machines give {given / 1e9:.3g} GB, "
            "too little for any way to divide it"
        )
    return sorted(found, key=lambda way: way.token)


def _pipeline(hosts: Sequence[Host], link: Link, work: Work, prompt: int) -> Way | None:
    try:
        shares = share_layers(work.held, [int(host.memory) for host in hosts])
    except BimetalError:
        return None
    n, layers = len(hosts), len(work.held)
    parts = [len(own) / layers for own in shares]

    def passes(rows: int) -> float:
        return n * (link.latency + rows * work.hidden * ITEM / link.bandwidth)

    token = sum(step_time(host, work, part) for host, part in zip(hosts, parts, strict=True)) + passes(1)
    compute = sum(part * prompt * work.flops / host.flops for host, part in zip(hosts, parts, strict=True))
    first = compute + _chunks(prompt) * passes(min(prompt, CHUNK)) + token
    return Way(f"pipeline over {n}", token, (n if link.gpus else 1) / token, first, True)


def _tensor(hosts: Sequence[Host], link: Link, rank_work: Work, prompt: int) -> Way | None:
    n, layers = len(hosts), len(rank_work.held)
    if any(host.memory < sum(rank_work.held) for host in hosts):
        return None

    def exchanges(rows: int) -> float:
        return 2 * layers * exchange(link, n, rows * rank_work.hidden * ITEM)

    gather = link.latency + (n - 1) / n * rank_work.logits / link.bandwidth if rank_work.logits else 0
    token = max(step_time(host, rank_work) for host in hosts) + exchanges(1) + gather
    compute = max(prompt * rank_work.flops / host.flops for host in hosts)
    first = compute + _chunks(prompt) * exchanges(min(prompt, CHUNK)) + token
    return Way(f"tensor parallel over {n}", token, 1 / token, first, True)


def _experts(hosts: Sequence[Host], link: Link, work: Work, prompt: int) -> Way | None:
    """Predict expert parallelism: each expert on one machine; all else on every machine."""
    n, layers = len(hosts), len(work.held)
    if any(host.memory < sum(work.held) / n + work.read for host in hosts):
        return None
    busiest = busiest_share(work.chosen, n)
    dense = work.read / (work.read + work.experts)

    def exchanges(rows: int) -> float:
        return layers * exchange(link, n, rows * work.hidden * ITEM)

    token = max((work.read + busiest * work.experts) / host.bandwidth + host.step for host in hosts) + exchanges(1)
    compute = max(prompt * work.flops * (dense + (1 - dense) / n) / host.flops for host in hosts)
    first = compute + _chunks(prompt) * exchanges(min(prompt, CHUNK)) + token
    return Way(f"expert parallel over {n}", token, 1 / token, first, False)


@cache
def busiest_share(chosen: int, machines: int) -> float:
    """Compute the mean share of a token's experts on the machine with most of them, if all are equally probable."""
    drawn = np.random.default_rng(0).multinomial(chosen, [1 / machines] * machines, size=20_000)
    return float(drawn.max(axis=1).mean() / chosen)


def _chunks(prompt: int) -> int:
    return -(-prompt // CHUNK)
