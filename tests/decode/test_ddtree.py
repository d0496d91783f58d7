"""The tree builder against all prefixes, and prompt lookup against a search of the text."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.decode.ddtree import Tree, grow
from common.decode.lookup import LONGEST, Lookup
from common.step import PAST

quick = settings(max_examples=200, derandomize=True)


def marginals(seed, depth, vocab):
    """Token ids and log-probabilities of `depth` positions, best first."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(depth, vocab)) * random.uniform(0.5, 4)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = np.argsort(-logp, axis=-1)
    return ids, np.take_along_axis(logp, ids, axis=-1)


def path_of(tree, node):
    return () if node == 0 else (*path_of(tree, tree.parents[node]), tree.tokens[node])


def expected(tree, ids, logp):
    """The expected number of accepted tokens: the sum of the probabilities of the nodes."""
    p = [dict(zip(ids[d].tolist(), np.exp(logp[d]), strict=True)) for d in range(len(ids))]
    return sum(np.prod([p[d][token] for d, token in enumerate(path_of(tree, n))]) for n in range(1, len(tree)))


@quick
@given(seed=st.integers(0, 10**6), depth=st.integers(1, 4), vocab=st.integers(1, 5), budget=st.integers(1, 30))
def test_no_tree_of_the_budget_is_better(seed, depth, vocab, budget):
    ids, logp = marginals(seed, depth, vocab)
    tree = Tree(99)
    grow(tree, ids, logp, budget)
    p = np.exp(logp)
    every = [
        np.prod([p[d, rank] for d, rank in enumerate(ranks)])
        for n in range(1, depth + 1)
        for ranks in itertools.product(range(vocab), repeat=n)
    ]
    best = sum(sorted(every, reverse=True)[:budget])  # a prefix is never likelier than its own: the best are a tree
    assert len(tree) - 1 == min(budget, len(every))
    assert expected(tree, ids, logp) == pytest.approx(best, rel=1e-9)
    assert len({path_of(tree, n) for n in range(len(tree))}) == len(tree)


@quick
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 40))
def test_a_tree_begins_with_those_of_smaller_budgets(seed, budget):
    ids, logp = marginals(seed, 6, 8)
    whole, part = Tree(7), Tree(7)
    grow(whole, ids, logp, 40)
    grow(part, ids, logp, budget)
    assert part.tokens == whole.tokens[: len(part)]
    assert part.parents == whole.parents[: len(part)]
    assert all(PAST <= parent < node for node, parent in enumerate(whole.parents))


@quick
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 40), length=st.integers(0, 6))
def test_a_chain_that_is_there_first_keeps_its_place(seed, budget, length):
    ids, logp = marginals(seed, 6, 8)
    chain = [*ids[: length // 2, 0].tolist(), *range(50, 50 + length - length // 2)][:budget]
    tree = Tree(7)
    tree.add_chain(chain)
    grow(tree, ids, logp, budget)
    assert path_of(tree, len(chain)) == tuple(chain)
    assert len(tree) == budget + 1
    for node in range(1, len(tree)):
        assert tree.nodes[tree.parents[node], tree.tokens[node]] == node


def test_fewer_prefixes_than_the_budget_and_no_places():
    tree = Tree(3)
    grow(tree, np.zeros((0, 2), int), np.zeros((0, 2)), 5)
    assert (tree.tokens, tree.parents) == ([3], [PAST])
    grow(tree, np.array([[5], [6]]), np.array([[-0.1], [-0.2]]), 5)
    assert (tree.tokens, tree.parents) == ([3, 5, 6], [PAST, 0, 1])


def searched(text, count):
    for n in range(LONGEST, 0, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                found = list(text[start + n :])
                while len(found) < count:
                    found += text[start + n :]
                return found[:count], n
    return [], 0


@quick
@given(text=st.lists(st.integers(0, 3), max_size=40), count=st.integers(1, 9))
def test_lookup_finds_what_a_search_finds(text, count):
    lookup = Lookup(text[: len(text) // 2])
    for token in text[len(text) // 2 :]:
        lookup.extend([token])
    assert lookup.find(count) == searched(text, count)
