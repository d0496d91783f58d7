"""Processes that mlx.launch starts for one model: the rank of this process, and checks of options."""

import argparse
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from common.errors import UsageError
from common.options import LoadOptions

COMMANDS = ("prompt", "chat", "serve")
ONE_MACHINE = ("devices", "spark", "stream_experts", "attention_window", "max_kv_size")


def rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of this process in the group that mlx.launch has started; None: it is alone."""
    number = environment.get("MLX_RANK", "")
    several = environment.get("MLX_HOSTFILE") or environment.get("MLX_JACCL_COORDINATOR")
    return int(number) if several and number.isdecimal() else None


def size(environment: Mapping[str, str] = os.environ) -> int:
    """Count the processes that mlx.launch has started; 1 for a process that is alone, or whose list cannot be read."""
    listed = environment.get("MLX_HOSTFILE") or environment.get("MLX_IBV_DEVICES")
    if rank(environment) is not None and listed:
        with suppress(OSError, ValueError, TypeError):
            return len(json.loads(Path(listed).read_text()))
    return 1


def is_in_group() -> bool:
    return rank() is not None


def is_follower() -> bool:
    return bool(rank())


def check(args: argparse.Namespace) -> None:
    """Refuse commands that a group of machines does not support: UsageError."""
    if args.command not in COMMANDS:
        raise UsageError(f"the command {args.command} runs on one machine; on several: a prompt, --chat and serve")
    check_load(args.load)


def check_load(options: LoadOptions) -> None:
    """Refuse options of loading that this process, alone or in a group of machines, does not support: UsageError."""
    ranks = options.tensor_parallel
    on_gpus = rank() is None and options.devices
    if ranks is not None and ranks != size() and not on_gpus:
        alone = f"mlx.launch -n {ranks} -- python -m generate ..."
        started = f"mlx.launch has started {size()}" if rank() is not None else f"start them by {alone}"
        gpus = "" if rank() is not None else f", or {ranks} devices, NVIDIA GPUs of one machine"
        raise UsageError(f"tensor_parallel {ranks} needs {ranks} processes, one per machine{gpus}; {started}")
    if rank() is None:
        return
    if other := next((name for name in ONE_MACHINE if getattr(options, name)), None):
        raise UsageError(f"{other} works on one machine; leave it out where mlx.launch starts several")
    if options.draft is not None and ranks is None:
        raise UsageError(
            "a draft reads hidden states of layers that lie on several machines; leave draft out, or share every layer "
            f"by tensor_parallel {size()}"
        )
    if options.backend not in (None, "mlx"):
        raise UsageError(f"backend {options.backend} runs on one machine; several share a model on mlx")
    if options.kv == "auto":
        raise UsageError("kv auto may differ between machines; choose q8, q4 or tq3")
