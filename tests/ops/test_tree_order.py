"""The order in which the CUDA kernel of the delta rule computes the rows of a tree; without a GPU."""

import numpy as np
import pytest

from common.step import PAST
from cuda_backend.tree_order import LEAF, SAVES, depth_first, lines, most_saved


def saved_of(parents):
    """Go through the tree as the kernel does; returns the number of matrices that it saved."""
    order, moves, after = depth_first(parents)
    saved, current = {}, PAST
    for row, move, before in zip(order, moves, after, strict=True):
        assert (move == LEAF) == (row not in parents)
        if move & SAVES:
            saved[move - SAVES] = current
        elif move != LEAF and move:
            current = saved[move]
        assert current == parents[row] == (PAST if before == PAST else order[before])
        if move != LEAF:  # which leaves the matrix as it is
            current = row
    assert sorted(order) == list(range(len(parents)))
    return max(saved, default=0)


@pytest.mark.parametrize("T", [1, 2, 5, 22, 64, 136])
def test_every_row_goes_on_from_its_parent(T):
    random = np.random.default_rng(T)
    for reach in random.integers(1, T + 1, 20):
        parents = [int(random.integers(max(PAST, t - reach), t)) for t in range(T)]
        assert saved_of(parents) <= most_saved(T)
    assert saved_of(list(range(-1, T - 1))) == 0
    assert depth_first(list(range(-1, T - 1)))[0] == list(range(T))


@pytest.mark.parametrize("T", [4, 10, 22, 46, 94])
def test_a_binary_tree_needs_the_most_saved_matrices(T):
    inner = (T + 2) // 3 * 2 - 2
    parents = [PAST, PAST, *((t - 2) // 2 for t in range(2, inner)), *range(inner // 2 - 1, inner)]
    assert saved_of(parents) == most_saved(T) == most_saved(T - 1) + 1


def test_leaves_need_no_saved_matrix():
    assert saved_of([PAST, 0, 0, 0, 1, 4, 4, 4, 5]) == 0
    assert saved_of([PAST, 0, 0, 1, 2]) == 1


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
