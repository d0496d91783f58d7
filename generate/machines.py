"""Processes that share a model, started by mlx.launch or by torchrun: the rank of this one, and checks of options."""

import argparse
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from common.errors import UsageError
from common.group import Launch
from common.options import LoadOptions

COMMANDS = ("prompt", "chat", "serve")
ONE_PROCESS = ("devices", "spark", "stream_experts", "attention_window", "max_kv_size")
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
VARIABLES = "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"


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


def launch(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Return how torchrun, or whatever sets its variables, has started this process; None: it is alone.

    Raises UsageError if a variable is missing or wrong.
    """
    if not environment.get("RANK") or environment.get("WORLD_SIZE", "") in ("", "1"):
        return None
    for name in ("MASTER_ADDR", *NUMBERS):
        if not environment.get(name):
            raise UsageError(f"RANK and WORLD_SIZE are set, and {name} is not; start each process with {VARIABLES}")
        if name in NUMBERS and not environment[name].isdecimal():
            raise UsageError(f"{name} is {environment[name]!r}; a whole number is expected")
    rank, size, local, port = (int(environment[name]) for name in NUMBERS)
    if rank >= size:
        raise UsageError(f"RANK is {rank}, and WORLD_SIZE {size}; ranks are 0 to {size - 1}")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun itself listens on MASTER_PORT
        port += 1
    if not 0 < port < 1 << 16:
        raise UsageError(f"MASTER_PORT is {environment['MASTER_PORT']}; ports are 1 to 65535")
    secret = blake2b(environment.get("BIMETAL_SECRET", "").encode(), digest_size=16).digest()
    return Launch(rank, size, local, environment["MASTER_ADDR"], port, secret)


def own_launch(options: Any) -> Launch | None:
    """Return how this process was started if it is to share a model with others on NVIDIA GPUs; None: it is not.

    options  LoadOptions, a Placement, or arguments: tensor_parallel without devices asks for such a group
    """
    given = getattr(options, "tensor_parallel", None) is not None and not getattr(options, "devices", ())
    return launch() if given and rank() is None else None


def is_in_group(options: Any) -> bool:
    """Test whether this process shares a model with others; options as in `own_launch`."""
    return rank() is not None or own_launch(options) is not None


def is_follower(options: Any) -> bool:
    """Test whether this process follows another one; options as in `own_launch`."""
    launched = own_launch(options)
    return bool(rank() if launched is None else launched.rank)


def check(args: argparse.Namespace) -> None:
    """Refuse commands that a group of processes does not support: UsageError."""
    if args.command not in COMMANDS:
        raise UsageError(
            f"the command {args.command} runs in one process on one machine; in several run a prompt, --chat and serve"
        )
    check_load(args.load)


def check_load(options: LoadOptions) -> None:
    """Refuse options of loading that this process, alone or in a group of processes, does not support: UsageError."""
    ranks, launched = options.tensor_parallel, own_launch(options)
    count = size() if launched is None else launched.size
    on_gpus = rank() is None and options.devices
    if ranks is not None and ranks != count and not on_gpus:
        raise UsageError(f"tensor_parallel {ranks} needs {ranks} processes, one per {_how(ranks, count, launched)}")
    if not is_in_group(options):
        return
    if other := next((name for name in ONE_PROCESS if getattr(options, name)), None):
        raise UsageError(f"{other} works in one process on one machine; leave it out where several share a model")
    backend = "mlx" if launched is None else "cuda"
    if options.backend not in (None, backend):
        starts = "mlx.launch starts processes of mlx" if launched is None else "RANK and WORLD_SIZE are for cuda"
        raise UsageError(
            f"backend {options.backend} does not share a model between machines or processes here: {starts}"
        )
    if options.kv == "auto":
        raise UsageError("kv auto may differ between machines; choose q8, q4 or tq3")
    if options.draft is not None and ranks is None:
        raise UsageError(
            "a draft reads hidden states of layers that lie on several machines; leave draft out, or share every layer "
            f"by tensor_parallel {size()}"
        )


def _how(ranks: int, count: int, launched: Launch | None) -> str:
    """Describe how to start `ranks` processes, where `count` were started."""
    if launched is not None:
        return f"GPU; WORLD_SIZE is {count}"
    if rank() is not None:
        return f"machine; mlx.launch has started {count}"
    return (
        f"machine, or {ranks} devices, NVIDIA GPUs of one machine; start processes by mlx.launch -n {ranks} -- "
        f"python -m generate ..., or on NVIDIA GPUs by "
        f"torchrun --nproc-per-node {ranks} --no-python python -m generate ..."
    )
