"""Order of the rows of a tree in kernels/delta.cu, and the matrices to save because several rows continue them.

This module needs neither CuPy nor a GPU.
"""

from collections.abc import Sequence

from common.step import PAST

BEFORE = 3  # preceding rows that a row's convolution may read: kernels/prepare.cu
SAVES = 8  # flag of a move: save the previous row's matrix under the number; without it, continue from the saved one
LEAF = 16  # a move: no row continues this one, which leaves the matrix unchanged


def depth_first(parents: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Return the rows depth first, a move per row in this order, and the index of the row that each row continues.

    A move is LEAF, 0, or the number (from 1) of a saved matrix, with SAVES if it is saved now. A root continues PAST.

    Leaves come first. The child whose rows need the most saved matrices comes last, when its parent's matrix is not
    needed any more: `most_saved` are enough.
    """
    count = len(parents)
    inner: list[list[int]] = [[] for _ in range(count + 1)]  # children of PAST, of row 0, ... that have children
    leaves: list[list[int]] = [[] for _ in range(count + 1)]  # children without children, in reverse order
    saved, needs = [0] * (count + 1), [0] * (count + 1)
    for node in range(count, -1, -1):
        rows = inner[node]
        if rows:
            rows.reverse()
            if len(rows) > 1:
                rows.sort(key=lambda row: needs[row + 1])
                saved[node] = needs[rows[-2] + 1] + 1
            needs[node] = max(saved[node], needs[rows[-1] + 1])
        if node:
            (inner if rows or leaves[node] else leaves)[parents[node - 1] + 1].append(node - 1)
    moves_of = [number and number | SAVES for number in saved]  # the move of a node's next child that is not a leaf
    order: list[int] = []
    moves: list[int] = []
    predecessors: list[int] = []
    unvisited: list[tuple[int, int]] = []
    row = index = PAST
    while True:
        found = leaves[row + 1]
        order += reversed(found)
        moves += [LEAF] * len(found)
        predecessors += [index] * len(found)
        unvisited += [(child, index) for child in reversed(inner[row + 1])]
        if not unvisited:
            return order, moves, predecessors
        row, predecessor = unvisited.pop()
        node, index = parents[row] + 1, len(order)
        order.append(row)
        moves.append(moves_of[node])
        predecessors.append(predecessor)
        moves_of[node] = saved[node]


def lines(order: Sequence[int], predecessors: Sequence[int]) -> list[tuple[int, ...]]:
    """List for each row the row and BEFORE rows before it, newest first, modulo 256; 255: the newest committed row."""
    out: list[tuple[int, ...]] = []
    for row, predecessor in zip(order, predecessors, strict=True):
        out.append((row, *(out[predecessor][:BEFORE] if predecessor >= 0 else (255, 254, 253))))
    return out


def most_saved(rows: int) -> int:
    """Return how many saved matrices are enough for any tree of `rows` rows.

    A binary tree below PAST that ends in leaves without a sibling, of 4, 10, 22, ... rows, needs this number.
    """
    return ((rows + 2) // 3).bit_length() - 1
