"""Captured steps: lists of segments, each a graph, a call on the host, or a copy between GPUs."""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from common.step import MAX_DECODE_ROWS


class Segment(Protocol):
    """A launch.Graph, a HostCall, or a copy: relay.py PeerCopy."""

    def play(self) -> None: ...


@dataclass(frozen=True)
class HostCall:
    """Work on the host between two graphs of a step."""

    fn: Callable[[], None]

    def play(self) -> None:
        self.fn()


class Shape(NamedTuple):
    """Properties of a step that determine its launches.

    T             largest number of rows
    runs          largest number of sequences
    one_row_each  whether each of several sequences has one row
    long_past     whether rows share a sequence that has replay.LONG_PAST committed tokens or more
    chooses       whether the step gives greedy tokens: tensor_parallel.py `run_greedy`
    """

    T: int
    runs: int = 1
    one_row_each: bool = False
    long_past: bool = False
    chooses: bool = False


class Program(NamedTuple):
    """A captured step: its segments, and its result, in arena memory that they write.

    scratch  memory of Arena.scratch that it reads, in long steps
    """

    segments: list[Segment]
    out: Any
    scratch: Any = None


def run_step(
    table: MutableMapping[Shape, Program | None], shape: Shape, call: Callable[[], Any], capture: Callable[[], Program]
) -> Any:
    """Run a step and return its result.

    The first step of a shape is run by `call`, the second is captured, later ones are replayed; failed steps do not
    count. Long steps are always run by `call`; Replay captures the ones whose launches depend on the number of rows
    alone.
    """
    if shape.T > MAX_DECODE_ROWS or shape not in table:
        out = call()
        if shape.T <= MAX_DECODE_ROWS:
            table[shape] = None
        return out
    program = table[shape]
    if program is None:
        program = table[shape] = capture()
    for segment in program.segments:
        segment.play()
    return program.out
