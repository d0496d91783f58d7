"""The order in which the CUDA kernel of the delta rule visits a tree; without a GPU."""

import numpy as np
import pytest

from common.step import PAST
from cuda_backend.tree_order import LEAF, WAITS, depth_first, lines, most_slots


def slots_of(parents):
    """Visit the tree as the kernel does; returns the slots that it took."""
    order, moves, after = depth_first(parents)
    waiting, current = {}, PAST
    for row, move, before in zip(order, moves, after, strict=True):
        assert (move == LEAF) == (row not in parents)
        if move & WAITS:
            waiting[move - WAITS] = current
        elif move != LEAF and move:
            current = waiting[move]
        assert current == parents[row] == (PAST if before == PAST else order[before])
        if move != LEAF:  # which leaves the matrix as it is
            current = row
    assert sorted(order) == list(range(len(parents)))
    return max(waiting, default=0)


@pytest.mark.parametrize("T", [1, 2, 5, 22, 64, 136])
def test_every_row_goes_on_from_its_parent(T):
    random = np.random.default_rng(T)
    for reach in random.integers(1, T + 1, 20):
        parents = [int(random.integers(max(PAST, t - reach), t)) for t in range(T)]
        assert slots_of(parents) <= most_slots(T)
    assert slots_of(list(range(-1, T - 1))) == 0
    assert depth_first(list(range(-1, T - 1)))[0] == list(range(T))


@pytest.mark.parametrize("T", [4, 10, 22, 46, 94])
def test_a_binary_tree_needs_the_most_slots(T):
    inner = (T + 2) // 3 * 2 - 2
    parents = [PAST, PAST, *((t - 2) // 2 for t in range(2, inner)), *range(inner // 2 - 1, inner)]
    assert slots_of(parents) == most_slots(T) == most_slots(T - 1) + 1


def test_leaves_need_no_slot():
    assert slots_of([PAST, 0, 0, 0, 1, 4, 4, 4, 5]) == 0
    assert slots_of([PAST, 0, 0, 1, 2]) == 1


@pytest.mark.parametrize("T", [1, 2, 22, 136])
def test_lines(T):
    random = np.random.default_rng(T)
    parents = [int(random.integers(PAST, t)) for t in range(T)]
    order, _, after = depth_first(parents)
    for row, line in zip(order, lines(order, after), strict=True):
        want = [row]
        for _ in range(3):
            want.append(parents[want[-1]] if want[-1] >= 0 else want[-1] - 1)
        assert list(line) == [before % 256 for before in want]
