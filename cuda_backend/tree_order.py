"""Order in which kernels/delta.cu computes the rows of a tree, and slots for matrices that several rows continue.

Needs neither CuPy nor a GPU.
"""

from collections.abc import Sequence

from common.step import PAST

BEFORE = 3  # rows before one that its convolution may read: kernels/prepare.cu
WAITS = 8  # a move: save the previous row's matrix in the slot; without it, continue from the matrix in the slot
LEAF = 16  # a move: no row continues this one, which leaves the matrix unchanged


def depth_first(parents: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Return the rows depth first, a move per row in this order, and the index of the row that each row continues.

    A move is LEAF, 0, or a slot from 1 on, with WAITS where the slot is first used. A root continues PAST.

    Leaves come first. The child whose rows need the most slots comes last, when its parent's slot is free again:
    `most_slots` are enough.
    """
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]  # of PAST, of row 0, ...
    for row, parent in enumerate(parents):
        children[parent + 1].append(row)
    inner: list[list[int]] = [[]] * len(children)  # those that have children
    slots, needs = [0] * len(children), [0] * len(children)
    for node in reversed(range(len(children))):
        rows = [row for row in children[node] if children[row + 1]]
        if not rows:
            continue
        if len(rows) > 1:
            rows.sort(key=lambda row: needs[row + 1])
            slots[node] = needs[rows[-2] + 1] + 1
        needs[node], inner[node] = max(slots[node], needs[rows[-1] + 1]), rows
    moves_of = [slot and slot | WAITS for slot in slots]  # of a node's next child that is no leaf
    order: list[int] = []
    moves: list[int] = []
    after: list[int] = []
    left: list[tuple[int, int]] = []
    row = visit = PAST
    while True:
        for child in children[row + 1]:
            if not children[child + 1]:
                order.append(child)
                moves.append(LEAF)
                after.append(visit)
        left += [(child, visit) for child in reversed(inner[row + 1])]
        if not left:
            return order, moves, after
        row, before = left.pop()
        node, visit = parents[row] + 1, len(order)
        order.append(row)
        moves.append(moves_of[node])
        after.append(before)
        moves_of[node] = slots[node]


def lines(order: Sequence[int], after: Sequence[int]) -> list[tuple[int, ...]]:
    """List by visit its row and BEFORE rows before it, newest first, modulo 256; 255: the newest committed one."""
    out: list[tuple[int, ...]] = []
    for row, before in zip(order, after, strict=True):
        out.append((row, *(out[before][:BEFORE] if before >= 0 else (255, 254, 253))))
    return out


def most_slots(rows: int) -> int:
    """Slots that any tree of so many rows gets by with; a binary tree below PAST that ends in leaves without a sibling,
    of 4, 10, 22, ... rows, needs them.
    """
    return ((rows + 2) // 3).bit_length() - 1
