"""A captured step: a list of segments, each a graph, a call on the host, or a copy between GPUs."""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from common.step import MAX_DECODE_ROWS


class Segment(Protocol):
    """A launch.Graph, a HostCall, or a copy: relay.py PeerCopy."""

    def play(self) -> None: ...


@dataclass(frozen=True)
class HostCall:
    """Work of the host between two graphs of a step."""

    fn: Callable[[], None]

    def play(self) -> None:
        self.fn()


class Program(NamedTuple):
    """A captured step: its segments, and what it returns, in arena memory that they write."""

    segments: list[Segment]
    out: Any


def run_step(
    table: MutableMapping[int, Program | None], T: int, call: Callable[[], Any], capture: Callable[[], Program]
) -> Any:
    """Run a step of T rows and return its result.

    The first step of T rows is run by `call`, the second is captured, later ones are replayed. A prefill step, whose
    number of rows is rarely repeated, is always run by `call`.
    """
    if T > MAX_DECODE_ROWS or T not in table:
        if T <= MAX_DECODE_ROWS:
            table[T] = None
        return call()
    program = table[T]
    if program is None:
        program = table[T] = capture()
    for segment in program.segments:
        segment.play()
    return program.out
