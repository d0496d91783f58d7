"""In which order kernels/delta.cu visits the rows of a tree, and where a matrix waits that several rows go on from.

Needs neither CuPy nor a GPU.
"""

from collections.abc import Sequence

from common.step import PAST

RUN = 4  # visits that a warp of kernels/delta.cu prepares
WAITS = 8  # of a move: what the row before left waits in the slot; else the row goes on from what waits there


def visits(parents: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Rows depth first; a move per visit, 0 or a slot from 1 on, with WAITS for the first of several children; and the
    visit that each visit goes on from, or PAST.

    The child whose rows need the most slots comes last, when its parent's slot is free again: `most_slots` are enough.
    """
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]  # of PAST, of row 0, ...
    for row, parent in enumerate(parents):
        children[parent + 1].append(row)
    slots, needs = [0] * len(children), [0] * len(children)
    for node in reversed(range(len(children))):
        rows = children[node]
        if len(rows) > 1:
            rows.sort(key=lambda row: needs[row + 1])
            slots[node] = needs[rows[-2] + 1] + 1
        if rows:
            needs[node] = max(slots[node], needs[rows[-1] + 1])
    order: list[int] = []
    moves: list[int] = []
    after: list[int] = []
    left = [(row, PAST) for row in reversed(children[0])]
    while left:
        row, visit = left.pop()
        slot = slots[parents[row] + 1]
        moves.append(slot and slot | (WAITS if visit == len(order) - 1 else 0))
        after.append(visit)
        left += [(child, len(order)) for child in reversed(children[row + 1])]
        order.append(row)
    return order, moves, after


def runs(after: Sequence[int]) -> list[int]:
    """Where stretches of at most RUN visits begin, each of which goes on from the one before it."""
    begins: list[int] = []
    for visit, before in enumerate(after):
        if before != visit - 1 or not begins or visit == begins[-1] + RUN:
            begins.append(visit)
    return begins


def most_slots(rows: int) -> int:
    """Slots that any tree of so many rows gets by with; a binary tree below PAST, of 2, 6, 14, ... rows, needs them."""
    return (rows + 2).bit_length() - 2
