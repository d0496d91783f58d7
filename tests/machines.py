"""Processes on loopback that share a model, as mlx.launch would start them on several machines."""

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


@contextmanager
def group(folder, size, *arguments, program=("-m", "generate")):
    """`size` processes of `python PROGRAM ARGUMENTS`, rank 0 first; those that still run are killed at the end."""
    given = os.environ | {"MLX_HOSTFILE": str(hostfile(folder, size)), "OPENBLAS_NUM_THREADS": "1"}
    given["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, *program, *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with ExitStack() as stack:
        found = []
        for rank in range(size):
            environment = given | {"MLX_RANK": str(rank)}
            found.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, **pipes))
            stack.callback(found[-1].communicate)
            stack.callback(found[-1].kill)
        yield found
