"""The token tree that one step verifies, and DDTree's way to grow it (Ringel and Romano, arXiv 2604.12989)."""

import heapq
from collections.abc import Sequence

import numpy as np

from common.step import PAST


class Tree:
    """Drafted continuations of one known token, the root: node i is row i of the step, after its parent.

    tokens, parents  per node; the root's parent is PAST
    children         per node, from token to node
    """

    def __init__(self, root: int):
        self.tokens, self.parents = [root], [PAST]
        self.children: list[dict[int, int]] = [{}]

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int) -> int:
        """Return the node for `token` after node `parent`; a node is added if there is none."""
        tokens = self.tokens
        node = self.children[parent].setdefault(token, len(tokens))
        if node == len(tokens):
            tokens.append(token)
            self.parents.append(parent)
            self.children.append({})
        return node

    def add_chain(self, tokens: Sequence[int]) -> None:
        """Add `tokens` one after another, the first of them after the root."""
        node = 0
        for token in tokens:
            node = self.add(node, token)


def best_chain(ids: np.ndarray, after: np.ndarray | None = None) -> list[int]:
    """Return the likeliest first token, the likeliest token after it, and so on; `ids` and `after` as for `grow`."""
    if after is None:
        return [int(token) for token in ids[:, 0]]
    chain, row = list[int](), 0
    for tokens, rows in zip(ids, after, strict=True):
        chain.append(int(tokens[row, 0]))
        row = rows[row, 0]
        if row < 0:
            break
    return chain


def grow(tree: Tree, ids: np.ndarray, logp: np.ndarray, budget: int, after: np.ndarray | None = None) -> None:
    """Add the likeliest prefixes, best first, until the tree has `budget` nodes after its root.

    ids, logp  (depth, k): the likeliest tokens of each position and their log-probabilities, best first, of positions
               that are independent, as a draft of a whole block gives them. Or (depth, rows, k), where `after` (depth,
               rows, k) has the row of the next position that follows each token, -1 for none: such a token is a leaf.

    The sum of the probabilities of the nodes, which is the expected number of accepted tokens, is the largest that
    `budget` nodes reach.
    """
    if after is None:
        ids, logp = ids[:, None], logp[:, None]
        after = np.zeros(ids.shape, np.int32)
    tokens, costs, rows = ids.tolist(), (-logp.astype(np.float64)).tolist(), after.tolist()
    if not tokens:
        return
    # -log of a prefix's probability, minus its depth (of equal ones the deepest comes first), its last token's rank,
    # its parent node, its last token's row
    heap: list[tuple[float, int, int, int, int]] = [(costs[0][0][0], 0, 0, 0, 0)]
    deepest, nodes, add, push = len(tokens) - 1, tree.tokens, tree.add, heapq.heappush  # the device waits for this
    while heap and len(nodes) <= budget:
        cost, above, rank, parent, row = heap[0]
        depth = -above
        node, here, below = add(parent, tokens[depth][row][rank]), costs[depth][row], rows[depth][row][rank]
        if rank + 1 < len(here):
            heapq.heapreplace(heap, (cost - here[rank] + here[rank + 1], above, rank + 1, parent, row))
        else:
            heapq.heappop(heap)
        if depth < deepest and below >= 0:
            push(heap, (cost + costs[depth + 1][below][0], above - 1, 0, node, below))
