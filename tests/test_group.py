"""The sockets of a group of processes: who may join, what all must agree on, and peers that are lost or hostile."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest

from common import group
from common.errors import BimetalError
from common.group import GREETING, LENGTH, Group, accept_followers, reach_leader

SECRET, OTHER = b"s" * 16, b"t" * 16


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def ended(monkeypatch):
    """The sentences with which processes would have ended, and a short wait before that."""
    found: list[str] = []
    monkeypatch.setattr(group, "_give_up", found.append)
    monkeypatch.setattr(group, "UNWIND", 0.0)
    return found


@pytest.fixture(autouse=True)
def groups(ended, monkeypatch):
    """Every group that a test makes is over at its end: a peer that is lost later would end this process."""
    made: list[Group] = []
    begin = Group.__init__

    def noted(self, *args):
        made.append(self)
        begin(self, *args)

    monkeypatch.setattr(Group, "__init__", noted)
    yield
    for each in made:
        each._is_over = True


def two():
    """Both ranks of a group, in this process, and their sockets."""
    ends = socket.socketpair()
    return Group(0, 2, {1: ends[0]}), Group(1, 2, {0: ends[1]}), ends


def both(leader, follower, work):
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(work, each) for each in (leader, follower)]
        return [run.exception(10) or run.result() for run in runs]


def until(found):
    end = time.monotonic() + 5
    while not found and time.monotonic() < end:
        time.sleep(0.01)
    return found


@pytest.mark.parametrize(
    "greeting",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        GREETING.pack(1, 2, OTHER),
        GREETING.pack(0, 2, SECRET),
        GREETING.pack(2, 2, SECRET),
        GREETING.pack(1, 3, SECRET),
    ],
    ids=["silent", "http", "secret", "leader", "beyond", "size"],
)
def test_strangers_are_refused_and_the_follower_joins(server, greeting, monkeypatch) -> None:
    monkeypatch.setattr(group, "GREET", 0.3)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept_followers, server, 2, SECRET, 10)
        with closing(socket.create_connection(server.getsockname())) as stranger:
            stranger.settimeout(5)
            stranger.sendall(greeting)
            with suppress(ConnectionResetError):  # closed with bytes that nobody read
                assert stranger.recv(1) == b""
        peers = reach_leader(server.getsockname(), 1, 2, SECRET, 10)
        assert list(peers) == [0]
        assert list(accepted.result(10)) == [1]


def test_a_rank_that_two_processes_have(server) -> None:
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept_followers, server, 3, SECRET, 10)
        first = reach_leader(server.getsockname(), 1, 3, SECRET, 10)
        with pytest.raises(BimetalError, match=r"rank 0 at .* refuses rank 1 of 3: its group has this rank already"):
            reach_leader(server.getsockname(), 1, 3, SECRET, 10)
        second = reach_leader(server.getsockname(), 2, 3, SECRET, 10)
        assert sorted(accepted.result(10)) == [1, 2]
        del first, second


def test_who_does_not_come(server) -> None:
    with pytest.raises(BimetalError, match=r"^rank 1 of 2 did not join the group in 0.2 s$"):
        accept_followers(server, 2, SECRET, 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        free = other.getsockname()
    with pytest.raises(
        BimetalError, match=r"^rank 0 of the group is not reached at 127.0.0.1:\d+: Connection refused$"
    ):
        reach_leader(free, 1, 2, SECRET, 0.3)


def test_a_follower_waits_for_a_leader_that_starts_later() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
    with ThreadPoolExecutor(1) as pool:
        reached = pool.submit(reach_leader, address, 1, 2, SECRET, 10)
        time.sleep(0.3)
        with socket.create_server(address) as server:
            assert list(accept_followers(server, 2, SECRET, 10)) == [1]
        assert list(reached.result(10)) == [0]


def test_values_and_facts(ended) -> None:
    leader, follower, _ = two()
    assert both(leader, follower, lambda each: each.gather([each.rank, "x"])) == [[[0, "x"], [1, "x"]]] * 2
    assert both(leader, follower, lambda each: each.agree({"ctx": None, "the model": "a"})) == [None, None]
    errors = both(leader, follower, lambda each: each.agree({"ctx": 4096, "the model": "ab"[each.rank]}))
    assert [str(error) for error in errors] == [
        "the model is a on rank 0, and b on rank 1; all ranks need the same"
    ] * 2
    assert not ended


def test_orders_questions_and_the_end(ended) -> None:
    leader, follower, _ = two()

    def follow() -> list[str]:
        seen = []
        for order in follower.orders():
            seen.append(order["do"])
            if order["do"] == "free":
                follower.answer(7)
        return seen

    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(follow)
        leader.order("step", rows=[1, 2])
        assert leader.ask("free") == [7]
        leader.close()
        assert seen.result(10) == ["step", "free"]
    assert not ended


def test_no_step_follows_one_that_failed() -> None:
    """Followers may wait for rows of the step that failed, and would take those of the next one for them."""
    leader, _, _ = two()
    leader.order("step")
    with pytest.raises(MemoryError), leader.whole_step():
        raise MemoryError
    with pytest.raises(BimetalError, match="an earlier step failed"):
        leader.order("step")


@pytest.mark.parametrize(
    "sent",
    [
        LENGTH.pack(0),
        LENGTH.pack(2**32 - 1),
        LENGTH.pack(4) + b"null",
        LENGTH.pack(2) + b"[]",
        LENGTH.pack(2) + b"{}",
        LENGTH.pack(3) + b"\xff\xfe\x00",
        LENGTH.pack(len(nested := b"[" * 100000)) + nested,
    ],
    ids=["empty", "huge", "null", "list", "no order", "bytes", "deep"],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_garbled_messages_end_the_process(ended, sent, rank) -> None:
    ours, theirs = socket.socketpair()
    Group(rank, 2, {1 - rank: ours})
    theirs.sendall(sent)
    assert until(ended) == [f"rank {1 - rank} of the group was lost: its messages are garbled"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_peer_ends_the_process(ended, rank) -> None:
    ours, theirs = socket.socketpair()
    told = threading.Event()
    Group(rank, 2, {1 - rank: ours}).when_lost = told.set
    theirs.sendall(LENGTH.pack(100) + json.dumps({"do": "step"}).encode())  # of which the end is missing
    theirs.close()
    assert until(ended) == [f"rank {1 - rank} of the group was lost: its process has ended"]
    assert told.wait(5)


def test_a_question_to_a_lost_follower(ended) -> None:
    leader, _, (_, theirs) = two()
    theirs.shutdown(socket.SHUT_RDWR)
    with pytest.raises(BimetalError, match=r"rank 1 of the group was lost|an earlier step failed"):
        leader.ask("free")
