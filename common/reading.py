"""Divide a prompt into steps, depending on its tokens and its template alone.

In a short step the bits of a row do not depend on the other rows; in a long step they depend on the number of rows. A
step of more rows than the backend's `short_rows` is long. The bits of a state therefore follow from its tokens and its
long steps. A prompt may continue a saved state whose long steps are those that the prompt itself would have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest

import numpy as np

from common.step import MAX_DECODE_ROWS, LongStep

GRID_POINTS = 8192  # tokens between the kept points of a long prompt

Span = tuple[int, int]


@dataclass(frozen=True)
class Reading:
    """The steps of a prompt of `end` tokens.

    grid     a step ends at every multiple of this number
    short    most rows of a short step of the prompt, at most MAX_DECODE_ROWS
    multiple long steps have a multiple of this number of rows; a short step reads the rest
    marks    further ends of steps, and the reason for keeping a state there: "system", "turn"
    replies  ranges (first, end) of earlier replies, which are read in short steps, as they were decoded; at an empty
             range a step ends
    """

    end: int
    grid: int
    marks: Mapping[int, str] = field(default_factory=dict)
    replies: Sequence[Span] = ()
    multiple: int = 1
    short: int = MAX_DECODE_ROWS

    @cached_property
    def points(self) -> np.ndarray:
        """Return points of the grid, marks, begins and ends of replies, and the end of the prompt, ascending."""
        inside = [cut for cut in (*self.marks, *(at for span in self.replies for at in span)) if 0 < cut < self.end]
        return np.unique([*range(self.grid, self.end, self.grid), *inside, self.end])

    @cached_property
    def cuts(self) -> np.ndarray:
        """Return the ends of steps, ascending, without the short steps of replies."""
        begins = np.array([0, *self.points[:-1]], np.int64)
        rests = np.where(self.points - begins > self.short, (self.points - begins) % self.multiple, 0)
        return np.unique([*(self.points - rests), *self.points])

    def next_cut(self, at: int) -> int:
        """Return the end of the step that begins at token `at`."""
        cut = int(self.cuts[np.searchsorted(self.cuts, at, side="right")])
        return min(cut, at + MAX_DECODE_ROWS) if self._in_reply(at) else cut

    def short_rows(self, at: int) -> int:
        """Return the most rows of a short step that begins at token `at`."""
        return MAX_DECODE_ROWS if self._in_reply(at) else self.short

    def _in_reply(self, at: int) -> bool:
        return any(first <= at < end for first, end in self.replies)

    @cached_property
    def long_steps(self) -> list[LongStep]:
        """List the long steps if the prompt is read from its beginning."""
        steps, at = [], 0
        for cut in self.cuts.tolist():
            if cut - at > self.short and not self._in_reply(at):
                steps.append((at, cut))
            at = cut
        return steps

    def continues_from(self, length: int, long_steps: Sequence[LongStep]) -> bool:
        """Test whether a state of `length` tokens, read in these long steps, is bitwise that of this reading."""
        before = [step for step in self.long_steps if step[0] < length]
        return before == list(long_steps) and all(end <= length for _, end in before)

    def usable(self, length: int, long_steps: Sequence[LongStep]) -> int:
        """Count the tokens, at most `length`, after which this reading can continue a state with these long steps.

        Up to this point the long steps of both are equal, and none of them extends past it.
        """
        return same_steps(length, self.long_steps, long_steps)

    def kept_cuts(self) -> dict[int, str]:
        """Return the cuts after which a state is kept, and why: the marks, and a grid in long prompts."""
        grid = range(GRID_POINTS, self.end, GRID_POINTS) if GRID_POINTS % self.grid == 0 else ()
        return {**dict.fromkeys(grid, "grid"), **{at: why for at, why in self.marks.items() if 0 < at <= self.end}}


def same_steps(length: int, one: Sequence[LongStep], other: Sequence[LongStep]) -> int:
    """Count the tokens, at most `length`, that two readings read in the same long steps."""
    for mine, yours in zip_longest(one, other, fillvalue=(length, length)):
        if mine != yours or mine[1] > length:
            return min(mine[0], yours[0], length)
    return length


def replies_in(tokens: Sequence[int], header: Sequence[int], ends: frozenset[int]) -> list[Span]:
    """List the ranges of a chat's prompt that are replies: after each `header`, to the next end token, inclusive.

    A range without an end token is empty: a reply begins there, and its end is unknown.

    header  tokens with which the template begins a reply; if empty, the result is empty
    """
    if not header:
        return []
    ids, width = np.asarray(tokens, np.int64), len(header)
    if len(ids) < width:
        return []
    starts = np.flatnonzero(np.all(np.lib.stride_tricks.sliding_window_view(ids, width) == header, axis=1)) + width
    stops = np.flatnonzero(np.isin(ids, list(ends))) + 1
    spans, free = list[Span](), 0
    for start in starts.tolist():
        if start >= free:
            at = int(np.searchsorted(stops, start, side="right"))
            free = int(stops[at]) if at < len(stops) else start
            spans.append((start, free))
    return spans


@dataclass(frozen=True)
class Turns:
    """Positions in a prompt, in tokens, found by its chat template.

    shared   end of the tokens with which the next prompt begins, if its newest message is the user's; None: all
    system   end of the system messages; 0: there are none
    replies  ranges of earlier replies
    begun    beginning of the reply; if the newest message of the next prompt is a tool's, that prompt begins with all
             tokens before `begun`. Above `shared` for templates that drop earlier thinking when the user writes.
             0: unknown
    """

    shared: int | None = None
    system: int = 0
    replies: Sequence[Span] = ()
    begun: int = 0


def common_length(one: Sequence[int] | np.ndarray, other: Sequence[int] | np.ndarray) -> int:
    """Count the first tokens that both have in common."""
    n = min(len(one), len(other))
    differ = np.asarray(one[:n]) != np.asarray(other[:n])
    return int(differ.argmax()) if differ.any() else n
