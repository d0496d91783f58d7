"""Speculative decoding: guess a tree of continuations, have the model check all of it in one step, keep what it says.

Lossless: every token is the model's own choice at its place, by the same sampler and the same random numbers as in
plain decoding; guesses only decide how many of those choices one step yields.
"""

import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import numpy as np

from common.decode.budget import Tuner
from common.decode.ddtree import Tree, grow
from common.decode.lookup import Lookup
from common.errors import UsageError
from common.models import Model
from common.models.dflash import Pair
from common.ops import Array
from common.sampling import Ahead, Sampler
from common.step import State, Step

KINDS = ("off", "lookup", "chain", "tree", "lookup+chain", "lookup+tree")
PHASES = ("draft", "tree", "verify", "commit", "host")
LONG = 3  # tokens of a match from which a lookup is trusted more than a draft
LOOKUP_DEPTH = 15
TREE_SIZES = (0, 7, 15, 23, 31, 47, 63)  # with the root, rows for which CUDA kernels are built


@dataclass(frozen=True)
class Speculation:
    """What a caller asks for.

    kind    "lookup" guesses from the text so far; "chain" is the draft's likeliest block, "tree" its likeliest
            prefixes; "lookup+chain" takes the lookup where a long one matches and the draft elsewhere, "lookup+tree"
            puts both into one tree
    budget  guessed tokens per step; None: chosen while decoding
    top_k   tokens that a tree considers at each place
    seed_chain  begin trees with the draft's likeliest block, whatever its probability
    """

    kind: str = "off"
    budget: int | None = None
    top_k: int = 8
    seed_chain: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"spec is {self.kind!r}; supported: {', '.join(KINDS)}")
        if self.budget is not None and self.budget < 1:
            raise UsageError(f"tree_budget is {self.budget}; it must be at least 1")
        if self.top_k < 1:
            raise UsageError(f"tree_topk is {self.top_k}; it must be at least 1")

    @property
    def drafts(self) -> bool:
        return "chain" in self.kind or "tree" in self.kind

    def tuner(self, model: Model) -> Tuner:
        if "tree" in self.kind:
            return Tuner(TREE_SIZES)
        deepest = model.draft.block - 1 if self.drafts and isinstance(model, Pair) else LOOKUP_DEPTH
        return Tuner(sorted({0, deepest, *(size for size in (3, 7, 11, 15, 23, 31) if size < deepest)}))


@dataclass
class Accepted:
    """What speculation did for one reply.

    gains    tokens per step, how often each number came
    rows     of all verifying steps
    budgets  how often each budget ran
    seconds  by phase: draft, tree, verify, commit, host
    """

    gains: Counter[int] = field(default_factory=Counter)
    rows: int = 0
    budgets: Counter[int] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @property
    def steps(self) -> int:
        return sum(self.gains.values())

    @property
    def length(self) -> float:
        """Mean tokens per step, the one that the model adds itself included."""
        return sum(gain * count for gain, count in self.gains.items()) / max(self.steps, 1)

    @property
    def by_position(self) -> list[float]:
        """Share of the steps that accepted a guess at each place after the root."""
        deepest = max(self.gains, default=1)
        reached = [sum(count for gain, count in self.gains.items() if gain > depth) for depth in range(1, deepest)]
        return [count / self.steps for count in reached]


class Guesser:
    """Grows the tree of each step."""

    def __init__(self, model: Model, speculation: Speculation, text: Sequence[int], accepted: Accepted):
        self.model, self.speculation, self.accepted = model, speculation, accepted
        self.lookup = Lookup(text) if "lookup" in speculation.kind else None

    def saw(self, token: int) -> None:
        if self.lookup:
            self.lookup.append(token)

    def tree(self, state: State, token: int, budget: int) -> Tree:
        """Continuations of `token`, the text's newest; `budget` nodes at most."""
        kind, tree = self.speculation.kind, Tree(token)
        room = state.capacity - state.length - 1  # a path may fill the state with its root and so many nodes
        started = time.perf_counter()
        found, matched = self.lookup.find(min(budget, room, LOOKUP_DEPTH)) if self.lookup and room > 0 else ([], 0)
        if kind == "lookup" or (matched >= LONG and found):
            tree.add_chain(found)
        if room < 1 or budget < 1 or kind == "lookup" or (kind == "lookup+chain" and len(tree) > 1):
            self.accepted.seconds["tree"] += time.perf_counter() - started
            return tree
        ids, logp = self._draft(state, token, 1 if "chain" in kind else min(self.speculation.top_k, budget))
        drafted = time.perf_counter()
        ids, logp = ids[: min(room, budget)], logp[: min(room, budget)]
        if "chain" in kind or self.speculation.seed_chain:
            tree.add_chain(ids[: budget + 1 - len(tree), 0].tolist())
        if "tree" in kind:
            grow(tree, ids, logp, budget)
        self.accepted.seconds["draft"] += drafted - started
        self.accepted.seconds["tree"] += time.perf_counter() - drafted
        return tree

    def _draft(self, state: State, token: int, k: int) -> tuple[np.ndarray, ...]:
        assert isinstance(self.model, Pair)
        ids, logp = self.model.ops.top_k(self.model.propose(state, token), k)
        return self.model.ops.read_all(ids, logp)


def check(speculation: Speculation, model: Model) -> None:
    """Refuse speculation that `model` cannot do."""
    if not isinstance(model, Model):
        raise UsageError(f"spec {speculation.kind}: a model run by mlx-lm decodes one token at a time")
    if speculation.drafts and not isinstance(model, Pair):
        raise UsageError(f"spec {speculation.kind} needs a draft model; give one, or choose lookup")
    ops, budget = model.ops, speculation.budget or 0
    if ops.tree_rows is not None and budget >= ops.tree_rows:
        raise UsageError(f"tree_budget is {budget}; the {ops.name} backend checks at most {ops.tree_rows - 1} guesses")


def speculate(
    model: Model,
    state: State,
    logits: Array,
    sampler: Sampler,
    text: Sequence[int],
    speculation: Speculation,
    tuner: Tuner | None = None,
    accepted: Accepted | None = None,
) -> Generator[tuple[int, Array], None, None]:
    """Yield (token, the logits row (1, vocab) it was drawn from), as `plain` does and with the same tokens.

    text    the prompt
    logits  of its last row. Once the generator is closed, the state holds all tokens but the newest.
    """
    check(speculation, model)
    ops, accepted = model.ops, Accepted() if accepted is None else accepted
    if speculation.budget is None and tuner is None:
        tuner = speculation.tuner(model)
    guesser = Guesser(model, speculation, text, accepted)
    token = int(ops.read(ops.sample(logits, sampler))[0])
    sampler.accept(token)
    guesser.saw(token)
    yield token, logits
    while state.length < state.capacity:
        began = time.perf_counter()
        budget = speculation.budget if tuner is None else tuner.choose()
        assert budget is not None
        tree = guesser.tree(state, token, budget)
        guessed = time.perf_counter()
        step = Step.tree(np.array(tree.tokens, np.int32), tree.parents, state.length)
        rows = model.forward(state, step)
        chooser = sampler if sampler.is_argmax else Ahead(sampler, step.positions - state.length)
        best = ops.read(ops.sample(rows, chooser)) if ops.chooses(sampler) else None
        path, verified = [0], time.perf_counter()
        try:
            while True:
                node = path[-1]
                row = rows[node : node + 1]
                if best is None:
                    token = sampler.pick(ops.read(row)[0])
                else:
                    token = int(best[node])
                    if not sampler.is_argmax:
                        sampler.numbers(1)  # which it was drawn with
                sampler.accept(token)
                guesser.saw(token)
                yield token, row
                child = tree.children[node].get(token)
                if child is None:
                    break
                path.append(child)
        finally:
            walked = time.perf_counter()
            state.commit(path)
            ended = time.perf_counter()
            accepted.gains[len(path)] += 1
            accepted.budgets[budget] += 1
            accepted.rows += len(tree)
            accepted.seconds["verify"] += verified - guessed
            accepted.seconds["commit"] += ended - walked
            accepted.seconds["host"] += walked - verified
        if tuner is not None:
            tuner.record(budget, path, ended - walked + verified - began)
