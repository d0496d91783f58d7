"""Processes on loopback that share a model, as mlx.launch or torchrun would start them on several machines."""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def hostfile(folder, size):
    """The file of a ring of `size` processes on free ports."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(size)]
        addresses = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in taken]
    path = Path(folder) / "hosts.json"
    path.write_text(json.dumps(addresses))
    return path


def group(folder, size, *arguments, program=("-m", "generate")):
    """`size` processes of `python PROGRAM ARGUMENTS` as mlx.launch starts them; see `started`."""
    hosts = str(hostfile(folder, size))
    each = [{"MLX_HOSTFILE": hosts, "MLX_RANK": str(rank)} for rank in range(size)]
    return started(size * [[*program, *arguments]], each)


def cuda_group(size, *arguments, program=("-m", "generate"), gpus=None, of_rank_1=(), **changed):
    """`size` processes as torchrun starts them, over the stand-in for CuPy; see `started`.

    gpus     of the machine; None: one per process
    of_rank_1, changed  more arguments, and variables, of rank 1 alone
    """
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1]), "WORLD_SIZE": str(size)}
    each = [on_cpu(gpus or size) | where | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    each[1] |= changed
    commands = [[*program, *arguments, *(of_rank_1 if rank == 1 else ())] for rank in range(size)]
    return started(commands, each)


def on_cpu(gpus):
    """Variables by which a process takes the stand-in for CuPy, with `gpus` GPUs."""
    folders = ROOT / "tests" / "cuda_on_cpu", ROOT, ROOT / "tests"
    return {"PYTHONPATH": os.pathsep.join(map(str, folders)), "BIMETAL_GPUS": str(gpus)}


@contextmanager
def started(commands, variables):
    """A process of `python COMMAND` for each of both, rank 0 first; those that still run are killed at the end."""
    given = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with ExitStack() as stack:
        found = []
        for command, own in zip(commands, variables, strict=True):
            environment, python = given | own, [sys.executable, *command]
            found.append(subprocess.Popen(python, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, **pipes))
            stack.callback(found[-1].communicate)
            stack.callback(found[-1].kill)
        yield found
