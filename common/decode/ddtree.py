"""The token tree that one step verifies, and DDTree's algorithm to build it (Ringel and Romano, arXiv 2604.12989)."""

import heapq
from collections.abc import Sequence

import numpy as np

from common.step import PAST


class Tree:
    """Drafted continuations of one known token, the root: node i is row i of the step, after its parent.

    tokens, parents  per node; the root's parent is PAST
    nodes            by parent and token
    """

    def __init__(self, root: int):
        self.tokens, self.parents = [root], [PAST]
        self.nodes: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def add_chain(self, tokens: Sequence[int]) -> None:
        """Add `tokens` one after another, the first of them after the root."""
        nodes, node, count = self.nodes, 0, len(self.tokens)
        for token in tokens:
            parent, node = node, nodes.setdefault((node, token), count)
            if node == count:  # a new node
                self.tokens.append(token)
                self.parents.append(parent)
                count += 1


def best_chain(ids: np.ndarray, after: np.ndarray | None = None) -> list[int]:
    """Return the most probable first token, the most probable token after it, and so on; arguments as for `grow`."""
    if after is None:
        return ids[:, 0].tolist()
    chain, row = list[int](), 0
    for tokens, rows in zip(ids, after, strict=True):
        chain.append(int(tokens[row, 0]))
        row = rows[row, 0]
        if row < 0:
            break
    return chain


def grow(tree: Tree, ids: np.ndarray, logp: np.ndarray, budget: int, after: np.ndarray | None = None) -> None:
    """Add the most probable prefixes, best first, until the tree has `budget` nodes in addition to its root.

    ids, logp  (depth, k): the most probable tokens of each position and their log-probabilities, best first, if
               positions are independent, as in a draft of a whole block. Else (depth, rows, k), and `after` (depth,
               rows, k) has the row of the next position that follows each token, -1 for none: such a token is a leaf.

    The sum of the probabilities of the nodes is the expected number of accepted tokens; it is the maximum for `budget`
    nodes.
    """
    if after is None:
        ids, logp = ids[:, None], logp[:, None]
    tokens, costs, rows = ids.tolist(), (-logp).tolist(), None if after is None else after.tolist()
    if not tokens:
        return
    deepest, nodes, push, push_and_pop = len(tokens) - 1, tree.nodes, heapq.heappush, heapq.heappushpop
    # -log of a prefix's probability, minus its depth (of equal ones the deepest comes first), its last token's rank,
    # its parent node, its last token's row
    best, heap, count = (costs[0][0][0], 0, 0, 0, 0), list[tuple[float, int, int, int, int]](), len(tree)
    while count <= budget:  # the device waits for this
        cost, above, rank, parent, row = best
        depth = -above
        here, token, below = costs[depth][row], tokens[depth][row][rank], 0 if rows is None else rows[depth][row][rank]
        node = nodes.setdefault((parent, token), count)
        if node == count:  # a new node
            tree.tokens.append(token)
            tree.parents.append(parent)
            count += 1
        if rank + 1 < len(here):
            push(heap, (cost - here[rank] + here[rank + 1], above, rank + 1, parent, row))
        if depth < deepest and below >= 0:
            best = push_and_pop(heap, (cost + costs[depth + 1][below][0], above - 1, 0, node, below))
        elif heap:
            best = heapq.heappop(heap)
        else:
            return
