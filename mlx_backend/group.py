"""The processes that share a model, one per machine: rank 0 decides, and sends orders to the others over TCP.

Rows of a step are sent by mx.distributed (ring, JACCL), whose collectives keep a core busy while they wait. Orders are
sent over sockets of our own, which wait without a busy core and close when a process or machine ends: a lost peer is
detected within 8 seconds.
"""

import faulthandler
import json
import os
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from common.errors import BimetalError

Order = dict[str, Any]
GREETING = struct.Struct("!i16s")  # a follower's rank, and the secret of the group
LENGTH = struct.Struct("!I")
JOIN = 60  # seconds for all ranks to join; MLX's ring stops connecting after half of it, but never stops listening
CONNECT = 20.0  # seconds for a follower to connect
UNWIND = 2.0  # seconds for threads that wait for a lost peer to end by themselves
# Probes of an idle connection: the first after 2 s, then one per second; lost after 5 without an answer.
PROBES = {"TCP_KEEPIDLE": 2, "TCP_KEEPALIVE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 7000}


class Group:
    """The group of processes that share a model, as this process sees it.

    rank, size  its number, and the number of processes
    """

    def __init__(self) -> None:
        """Join the group that the environment names; raises BimetalError if a member does not join."""
        try:
            with _ends_after(JOIN):
                self._group = mx.distributed.init(strict=True)
        except RuntimeError as error:
            raise BimetalError(f"the group of machines cannot be joined: {error}") from None
        self.rank, self.size = self._group.rank(), self._group.size()
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._is_over = self._is_broken = False
        self._lock = threading.Lock()
        self._peers = self._followers() if self.rank == 0 else {0: self._leader()}
        for rank, peer in self._peers.items():
            threading.Thread(target=self._listen, args=(rank, peer), daemon=True).start()

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

    def gather(self, values: list[int]) -> np.ndarray:
        """Return the integers of every rank, below 2**31 each: (size, n)."""
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

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        """Refuse all further orders if the block fails: followers may wait for rows that this rank never sent."""
        try:
            yield
        except BaseException:
            self._is_broken = True
            raise

    # -- orders ------------------------------------------------------------------------------------------------------

    def order(self, what: str, **values: Any) -> None:
        """Send the order `what` to all followers; raises BimetalError if one is lost, and after a failed step."""
        if self._is_broken:
            raise BimetalError("the group of machines has ended: an earlier step failed; start it again")
        data = json.dumps({"do": what, **values}).encode()
        with self._lock:
            for rank, peer in self._peers.items():
                try:
                    peer.sendall(LENGTH.pack(len(data)) + data)
                except OSError as error:
                    self._is_broken = True
                    raise BimetalError(lost(rank, error.strerror)) from None

    def orders(self) -> Iterator[Order]:
        """Iterate over rank 0's orders, until it ends."""
        while (order := self._orders.get()) is not None:
            yield order

    def close(self) -> None:
        """End the group, on rank 0: followers end too, or if one is lost, when their connections close."""
        if not self._is_over and not self._is_broken:
            self._is_over = True
            with suppress(BimetalError):
                self.order("end")

    def _listen(self, rank: int, peer: socket.socket) -> None:
        """Receive a peer's orders; ends this process soon after the peer is lost."""
        why = "its process has ended"
        try:
            while (size := _received(peer, LENGTH.size)) and (data := _received(peer, LENGTH.unpack(size)[0])):
                order = json.loads(data)
                if order["do"] == "end":
                    self._is_over = True
                    self._orders.put(None)
                    return
                self._orders.put(order)
        except OSError as error:
            why = str(error.strerror)
        time.sleep(0 if self.rank else UNWIND)
        if not self._is_over:
            _give_up(lost(rank, why))

    # -- connecting --------------------------------------------------------------------------------------------------

    def _followers(self) -> dict[int, socket.socket]:
        """Accept followers that know the group's secret; return their sockets by rank."""
        secret, peers = secrets.token_bytes(16), dict[int, socket.socket]()
        with socket.create_server(("", 0)) as server:
            server.settimeout(CONNECT)
            self.gather([server.getsockname()[1], *np.frombuffer(secret, "<u2").tolist()])
            while len(peers) < self.size - 1:
                try:
                    peer, _ = server.accept()
                    peer.settimeout(CONNECT)
                    rank, given = GREETING.unpack(_received(peer, GREETING.size) or bytes(GREETING.size))
                except OSError:
                    missing = sorted(set(range(1, self.size)) - peers.keys())
                    raise BimetalError(f"rank {missing[0]} of the group did not connect in {CONNECT:g} s") from None
                if secrets.compare_digest(given, secret) and rank not in peers:
                    peers[rank] = _watched(peer)
        return peers

    def _leader(self) -> socket.socket:
        port, *secret = self.gather([0] * 9)[0].tolist()
        host = leader_host(os.environ)
        try:
            peer = socket.create_connection((host, port), CONNECT)
        except OSError as error:
            raise BimetalError(f"rank 0 of the group is not reached at {host}:{port}: {error.strerror}") from None
        peer.sendall(GREETING.pack(self.rank, np.array(secret, "<u2").tobytes()))
        return _watched(peer)


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


def lost(rank: int, why: str | None) -> str:
    return f"rank {rank} of the group was lost: {why or 'no answer'}"


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


def _give_up(why: str) -> None:
    """End this process with a sentence, even if other threads wait."""
    print(f"\nerror: {why}", file=sys.stderr, flush=True)  # on a line of its own: MLX's threads may be writing theirs
    os._exit(1)


def _watched(peer: socket.socket) -> socket.socket:
    """Enable keep-alive probes on `peer`, so that its loss is detected while nothing is sent."""
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in PROBES.items():
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return peer


def _received(peer: socket.socket, size: int) -> bytes:
    """Receive `size` bytes, or b"" if the peer has ended."""
    data = b""
    while len(data) < size:
        more = peer.recv(size - len(data))
        if not more:
            return b""
        data += more
    return data
