"""The group of processes that mlx.launch has started: rows are sent by mx.distributed (ring, JACCL).

Its collectives keep a core busy while they wait, and do not detect a lost machine: orders are sent over the sockets of
common/group.py.
"""

import faulthandler
import json
import os
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import numpy as np

from common import group
from common.errors import BimetalError

JOIN = 60  # seconds for all ranks to join; MLX's ring stops connecting after half of it, but never stops listening
CONNECT = 20.0  # seconds for a follower to connect


class Group(group.Group):
    """The group of processes that share a model, as this process sees it, with the exchange of rows by MLX."""

    def __init__(self) -> None:
        """Join the group that the environment names; raises BimetalError if a member does not join."""
        try:
            with _ends_after(JOIN):
                self._group = mx.distributed.init(strict=True)
        except RuntimeError as error:
            raise BimetalError(f"the group of machines cannot be joined: {error}") from None
        self.rank, self.size = self._group.rank(), self._group.size()
        super().__init__(self.rank, self.size, self._followers() if self.rank == 0 else self._leader())

    # -- rows --------------------------------------------------------------------------------------------------------
    # Arrays without rows (outputs of steps without logits) stay lazy: MLX's quantized product would divide by 0.

    def pass_on(self, x: mx.array) -> None:
        """Compute x and send it to the next rank; the last rank sends to rank 0."""
        if not x.size:
            return
        with self._telling_of_loss():
            mx.eval(mx.distributed.send(x, (self.rank + 1) % self.size, group=self._group))

    def receive(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """Receive an array from the previous rank."""
        if 0 in shape:
            return mx.zeros(shape, dtype)
        with self._telling_of_loss():
            x = mx.distributed.recv(shape, dtype, (self.rank - 1) % self.size, group=self._group)
            mx.eval(x)
        return x

    def add_up(self, x: mx.array) -> mx.array:
        """Return the sum of x over all ranks, of equal shapes: lazy, for `compute`."""
        return mx.distributed.all_sum(x, group=self._group)

    def compute(self, *arrays: mx.array) -> None:
        """Evaluate arrays that depend on sums over all ranks."""
        with self._telling_of_loss():
            mx.eval([x for x in arrays if x.size])

    def _by_mlx(self, values: list[int]) -> np.ndarray:
        """Return the integers of every rank, below 2**31 each: (size, n). MLX sends them, before sockets are open."""
        mine = np.zeros((self.size, len(values)), np.int32)
        mine[self.rank] = values
        with self._telling_of_loss():
            return np.array(mx.distributed.all_sum(mx.array(mine), group=self._group))

    @contextmanager
    def _telling_of_loss(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._is_broken = True
            raise BimetalError(f"a machine of the group was lost: {error}") from None

    # -- connecting --------------------------------------------------------------------------------------------------

    def _followers(self) -> dict[int, socket.socket]:
        """Accept followers that know the group's secret; return their sockets by rank."""
        secret = secrets.token_bytes(16)
        with socket.create_server(("", 0)) as server:
            self._by_mlx([server.getsockname()[1], *np.frombuffer(secret, "<u2").tolist()])
            return group.accept_followers(server, self.size, secret, CONNECT)

    def _leader(self) -> dict[int, socket.socket]:
        port, *secret = self._by_mlx([0] * 9)[0].tolist()
        address = leader_host(os.environ), port
        return group.reach_leader(address, self.rank, self.size, np.array(secret, "<u2").tobytes(), CONNECT)


def leader_host(environment: Mapping[str, str]) -> str:
    """Return the address of rank 0, as mlx.launch tells it; raises BimetalError."""
    if coordinator := environment.get("MLX_JACCL_COORDINATOR"):
        return coordinator.rpartition(":")[0]
    try:
        first = json.loads(Path(environment["MLX_HOSTFILE"]).read_text())[0]
        return str((first if isinstance(first, str) else first[0]).rpartition(":")[0])
    except (KeyError, OSError, ValueError, IndexError, AttributeError):
        raise BimetalError(
            "MLX_HOSTFILE names no file of addresses; start the program by mlx.launch with the backend ring or jaccl"
        ) from None


@contextmanager
def _ends_after(seconds: int) -> Iterator[None]:
    """End this process if the block takes longer: MLX holds Python's lock while rank 0 waits for the others."""
    if os.environ.get("MLX_RANK") == "0":
        print(f"waiting for the other machines, {seconds} s at most", file=sys.stderr, flush=True)
    with Path(os.devnull).open("w") as nowhere:
        faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)  # a thread without Python's lock
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
