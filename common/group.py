"""The processes that share a model: rank 0 decides, and sends orders to the others over TCP.

The sockets wait without a busy core, and close when a process or machine ends: a lost peer is detected within 8
seconds. How rows of a step are exchanged is the backend's matter.
"""

import json
import os
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from common.errors import BimetalError

Order = dict[str, Any]
GREETING = struct.Struct("!ii16s")  # a follower's rank, the number of ranks, and the secret of the group
LENGTH = struct.Struct("!I")
MOST = 1 << 27  # bytes of a message
JOIN = 60.0  # seconds for all ranks to join
GREET = 2.0  # seconds for a peer to greet
ACCEPTED = b"\1"  # rank 0's answer to a greeting
UNWIND = 2.0  # seconds for threads that wait for a lost peer to end by themselves
# Probes of an idle connection: the first after 2 s, then one per second; lost after 5 without an answer.
PROBES = {"TCP_KEEPIDLE": 2, "TCP_KEEPALIVE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 7000}


class Launch(NamedTuple):
    """Describe how this process was started.

    rank, size  its number, and the number of processes
    local_rank  its number on its machine
    host, port  where rank 0 listens
    secret      16 bytes that all ranks know
    """

    rank: int
    size: int
    local_rank: int
    host: str
    port: int
    secret: bytes


class Group:
    """The group of processes that share a model, as this process sees it.

    rank, size  its number, and the number of processes
    when_lost   called in another thread when a peer is lost, so that a wait for this peer ends
    """

    def __init__(self, rank: int, size: int, peers: Mapping[int, socket.socket]):
        """Listen to peers: on rank 0 `accept_followers`, on a follower rank 0 alone, as `reach_leader` returns it."""
        self.rank, self.size, self._peers = rank, size, dict(peers)
        self.when_lost: Callable[[], None] = lambda: None
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._answers: dict[int, queue.SimpleQueue[Any]] = {peer: queue.SimpleQueue() for peer in peers}
        self._is_over = self._is_broken = self._is_lost = False
        self._why = "the group of processes has ended: an earlier step failed; start it again"
        self._lock = threading.Lock()
        for number, peer in self._peers.items():
            threading.Thread(target=self._listen, args=(number, peer), daemon=True).start()

    # -- orders ------------------------------------------------------------------------------------------------------

    def order(self, what: str, **values: Any) -> None:
        """Send the order `what` to all followers; raises BimetalError if one is lost, and after a failed step."""
        self.check()
        self._send({"do": what, **values})

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

    def check(self) -> None:
        """Raise BimetalError after a failed step, or if a peer is lost."""
        if self._is_broken:
            raise BimetalError(self._why)

    def fail(self) -> None:
        """Refuse all further orders."""
        self._is_broken = True

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        """Refuse all further orders if the block fails: followers may wait for rows that this rank never sent."""
        try:
            yield
        except BaseException:
            self.fail()
            raise

    # -- values of all ranks -----------------------------------------------------------------------------------------

    def ask(self, what: str) -> list[Any]:
        """Order `what`, and return the value that each follower answers."""
        self.order(what)
        return self._answered()

    def answer(self, value: Any) -> None:
        """Send rank 0 the value for which it asked."""
        self._send({"value": value})

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, as JSON keeps them; all ranks call this at the same point of their work."""
        if self.rank:
            self.answer(value)
            order = self._orders.get()
            if order is None:
                raise BimetalError("rank 0 of the group has ended")
            values: list[Any] = order["values"]
            return values
        values = [value, *self._answered()]
        self.order("values", values=values)
        return values

    def agree(self, facts: Mapping[str, object]) -> None:
        """Raise BimetalError, on all ranks, if one has other facts than rank 0; all ranks call this together.

        facts  what must be equal, by a description such as "the version of NCCL"
        """
        first, *others = self.gather({what: str(fact) for what, fact in facts.items()})
        for rank, own in enumerate(others, 1):
            for what, fact in first.items():
                if own.get(what) != fact:
                    self.close()
                    self._is_over = True
                    raise BimetalError(
                        f"{what} is {fact} on rank 0, and {own.get(what)} on rank {rank}; all ranks need the same"
                    )

    # -- messages ----------------------------------------------------------------------------------------------------

    def _send(self, message: Order) -> None:
        with self._lock:
            for rank, peer in self._peers.items():
                try:
                    _send(peer, message)
                except OSError as error:
                    why = "its process has ended" if isinstance(error, ConnectionError) else error.strerror
                    self._is_broken = True
                    raise BimetalError(self._why if self._is_lost else lost(rank, why)) from None

    def _answered(self) -> list[Any]:
        """Return the next answer of each follower; raises BimetalError if one is lost."""
        found = []
        for rank in sorted(self._peers):
            message = self._answers[rank].get()
            if message is None:
                raise BimetalError(self._why)
            found.append(message["value"])
        return found

    def _listen(self, rank: int, peer: socket.socket) -> None:
        """Receive a peer's messages; ends this process soon after the peer is lost."""
        why: str | None = "its process has ended"
        try:
            while (message := received(peer)) is not None:
                if self.rank == 0:
                    message["value"]  # a message without one is garbled
                    self._answers[rank].put(message)
                elif message["do"] == "end":
                    self._is_over = True
                    self._orders.put(None)
                    return
                elif message["do"] == "lost":
                    rank, why = message["rank"], message["why"]
                    break
                else:
                    self._orders.put(message)
        except ConnectionResetError:
            pass
        except OSError as error:
            why = error.strerror
        except (ValueError, KeyError):
            why = "its messages are garbled"
        if self._is_over or self._is_lost:  # the ranks that have learned of a loss end too
            return
        self._is_lost, self._why = True, lost(rank, why)
        self.fail()
        for answers in self._answers.values():
            answers.put(None)
        if self.rank == 0 and self._lock.acquire(timeout=UNWIND):  # not amidst another message
            for other in self._peers.keys() - {rank}:
                with suppress(OSError):
                    _send(self._peers[other], {"do": "lost", "rank": rank, "why": why})
            self._lock.release()
        threading.Thread(target=self.when_lost, daemon=True).start()
        time.sleep(0 if self.rank else UNWIND)
        if not self._is_over:
            _give_up(self._why)


def join(launch: Launch) -> Group:
    """Join the group of processes that share a model; raises BimetalError if a rank does not come."""
    rank, size, _, host, port, secret = launch
    if rank:
        return Group(rank, size, reach_leader((host, port), rank, size, secret))
    listens_to = host if host in ("localhost", "127.0.0.1") else ""
    try:
        server = socket.create_server((listens_to, port))
    except OSError as error:
        raise BimetalError(
            f"rank 0 cannot listen on port {port}: {error.strerror}; choose another MASTER_PORT"
        ) from None
    print(f"waiting for the other processes, {JOIN:g} s at most", file=sys.stderr, flush=True)
    with server:
        return Group(rank, size, accept_followers(server, size, secret))


# -- connecting --------------------------------------------------------------------------------------------------------


def accept_followers(
    server: socket.socket, size: int, secret: bytes, seconds: float = JOIN
) -> dict[int, socket.socket]:
    """Accept `size` - 1 followers that know the group's secret, and return their sockets by rank.

    A peer that does not greet, or greets otherwise, is refused. Raises BimetalError for a follower that does not join.
    """
    peers, until = dict[int, socket.socket](), time.monotonic() + seconds
    while len(peers) < size - 1:
        server.settimeout(max(1e-3, until - time.monotonic()))
        try:
            peer, _ = server.accept()
        except OSError:
            missing = sorted(set(range(1, size)) - peers.keys())
            raise BimetalError(f"rank {missing[0]} of {size} did not join the group in {seconds:g} s") from None
        peer.settimeout(GREET)
        with suppress(OSError):
            rank, count, given = GREETING.unpack(_bytes(peer, GREETING.size) or bytes(GREETING.size))
            if secrets.compare_digest(given, secret) and count == size and 0 < rank < size and rank not in peers:
                peer.sendall(ACCEPTED)
                peers[rank] = _watched(peer)
                continue
        peer.close()
    return peers


def reach_leader(
    address: tuple[str, int], rank: int, size: int, secret: bytes, seconds: float = JOIN
) -> dict[int, socket.socket]:
    """Connect to rank 0, which may not listen yet; returns its socket as `Group` takes it. Raises BimetalError."""
    where, until = f"{address[0]}:{address[1]}", time.monotonic() + seconds
    while True:
        try:
            peer = socket.create_connection(address, max(1.0, until - time.monotonic()))
            break
        except OSError as error:
            if isinstance(error, socket.gaierror) or time.monotonic() > until:
                raise BimetalError(
                    f"rank 0 of the group is not reached at {where}: {error.strerror or error}"
                ) from None
            time.sleep(0.1)
    try:
        peer.settimeout(max(GREET, until - time.monotonic()))
        peer.sendall(GREETING.pack(rank, size, secret))
        if peer.recv(1) == ACCEPTED:
            return {0: _watched(peer)}
    except OSError:
        pass
    peer.close()
    raise BimetalError(
        f"rank 0 at {where} refuses rank {rank} of {size}: its group has this rank already, another number of ranks or "
        "another secret, or another program listens there"
    )


def lost(rank: int, why: str | None) -> str:
    return f"rank {rank} of the group was lost: {why or 'no answer'}"


def _give_up(why: str) -> None:
    """End this process with a sentence, even if other threads wait."""
    print(f"\nerror: {why}", file=sys.stderr, flush=True)  # on a line of its own: other threads may be writing theirs
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


def _send(peer: socket.socket, message: Order) -> None:
    data = json.dumps(message).encode()
    peer.sendall(LENGTH.pack(len(data)) + data)


def received(peer: socket.socket) -> Order | None:
    """Receive a message; None if the peer has ended, ValueError if it sends anything else."""
    size = _bytes(peer, LENGTH.size)
    if not size:
        return None
    count = LENGTH.unpack(size)[0]
    if not 0 < count <= MOST:
        raise ValueError(f"a message of {count} bytes")
    data = _bytes(peer, count)
    if not data:
        return None
    try:
        message = json.loads(data)
    except RecursionError:
        message = None
    if not isinstance(message, dict):
        raise ValueError(f"a message that is {type(message).__name__}")
    return message


def _bytes(peer: socket.socket, size: int) -> bytes:
    """Receive `size` bytes, or b"" if the peer has ended."""
    data = bytearray()
    while len(data) < size:
        more = peer.recv(min(size - len(data), 1 << 20))
        if not more:
            return b""
        data += more
    return bytes(data)
