"""Speculative decoding: draft a tree of continuations, verify it in one step, and keep the tokens that the model chose.

Lossless: every token is sampled from the target at its position, by the sampler and the random numbers of plain
decoding; a draft only decides how many tokens one step yields.
"""

import time
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from common.coupled import Coupling
from common.decode.ddtree import Tree, best_chain, grow
from common.decode.lookup import Lookup
from common.decode.plain import plain
from common.decode.requests import Choose, Draft, DraftStretch, Emit, Read, Request, Rows
from common.decode.run import DecoderRun
from common.decode.tuner import FIRST, STRETCH, Tuner
from common.decoders import Speculation, check_draft
from common.errors import UsageError
from common.models import Model
from common.models.pair import Pair
from common.sampling import Ahead, Sampler
from common.step import State, Step

UNLIMITED = 1 << 40  # plain steps where other replies leave no row for a draft token, until the run reconsiders
LONG = 3  # minimum tokens of a match for which a lookup is preferred to a draft
LOOKUPS = (0, 3, 7, 11, 15)
LOOKUP_DEPTH = LOOKUPS[-1]
TREE_SIZES = (0, 7, 15, 23, 31, 47, 63, 95, 127)  # with the root, rows for which CUDA kernels are built


def check(options: Speculation, model: Model, sampler: Sampler) -> None:
    """Refuse a decoder that `model` cannot run, whatever the sampling. Raises UsageError."""
    if not isinstance(model, Model):
        raise UsageError(f"spec {options.kind}: a model run by mlx-lm decodes one token at a time")
    check_draft(options.kind, isinstance(model, Pair))


def new_tuner(options: Speculation, model: Model, first: int = FIRST) -> Tuner:
    """Return a tuner of the budgets that `options` allow with `model`; `first` as in Tuner."""
    if "tree" in options.kind:
        return Tuner(TREE_SIZES, first)
    return Tuner(model.budgets if options.decoder.needs_draft and isinstance(model, Pair) else LOOKUPS, first)


class Drafter:
    """Builds the tree of each step from prompt lookup, the draft model, or both; `budgets`: of the steps."""

    def __init__(self, run: DecoderRun, budgets: "Budgets"):
        self.options, self.stats, self.sampler, self.budgets = run.options, run.stats, run.sampler, budgets
        self.lookup = Lookup(run.tokens) if "lookup" in run.options.kind else None

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens of the reply to the text in which prompt lookup searches."""
        if self.lookup:
            self.lookup.extend(tokens)

    def note(self, budget: int, tokens: Sequence[int], path: Sequence[int], seconds: float) -> int:
        """Record a step of `budget`, and the tokens that it gave; choose the budget of the next step."""
        self.extend(tokens)
        self.budgets.record(budget, path, seconds)
        return self.budgets.choose()

    def tree(self, state: State, token: int, budget: int) -> Generator[Draft, Any, Tree]:
        """Draft continuations of `token`, the newest one; the tree has at most `budget` nodes besides its root."""
        kind, tree = self.options.kind, Tree(token)
        room = state.capacity - state.length - 1  # nodes of the longest path: with its root it fills the state
        started = time.perf_counter()
        found, matched = self.lookup.find(min(budget, room, LOOKUP_DEPTH)) if self.lookup and room > 0 else ([], 0)
        if kind == "lookup" or (matched >= LONG and found):
            tree.add_chain(found)
        if room < 1 or budget < 1 or kind == "lookup" or (kind == "lookup+chain" and len(tree) > 1):
            self.stats.seconds["tree"] += time.perf_counter() - started
            return tree
        k = 1 if "chain" in kind else min(self.options.top_k, budget)
        depth, s = min(room, budget), self.sampler.sampling
        coupling = Coupling(s, self.sampler.peek(depth)) if s.temperature > 0 else None
        answer = yield Draft(token, k, depth, coupling)
        drafted = time.perf_counter()
        ids, logp, *after = (part[:depth] for part in answer)
        if "chain" in kind or self.options.seed_chain:
            tree.add_chain(best_chain(ids, *after)[: budget + 1 - len(tree)])
        if "tree" in kind:
            grow(tree, ids, logp, budget, *after)
        self.stats.seconds["draft"] += drafted - started
        self.stats.seconds["tree"] += time.perf_counter() - drafted
        return tree


class Budgets:
    """The draft tokens of each step: as many as the options name or the tuner chooses; 0 where the run may have none.

    tuner  None: the options name a number
    """

    def __init__(self, run: DecoderRun):
        self.run, self.tuner = run, run.tuner
        if run.options.budget is None and self.tuner is None:
            self.tuner = new_tuner(run.options, run.model)
        if self.tuner is not None:
            self.tuner.begin()

    def choose(self) -> int:
        """Choose the number of draft tokens of the next step."""
        self.run.reconsiders = False
        if self.run.most_drafted == 0:
            return 0
        if self.tuner is None:
            return self.run.bounded(self.run.options.budget or 0)
        return self.run.bounded(self.tuner.choose(self.run.most_drafted), self.tuner.sizes)

    def plain_steps(self) -> int:
        """Return the number of plain steps after `choose` returned 0 until it must be called again."""
        if self.run.most_drafted == 0:
            return UNLIMITED
        return STRETCH if self.tuner is None else self.tuner.plain_steps()

    def record(self, size: int, path: Sequence[int], seconds: float, switched: bool = False, steps: int = 1) -> None:
        """Call Tuner.record, unless the options name a budget, or other replies leave no row for a draft token."""
        if self.tuner is not None and self.run.most_drafted != 0:
            self.tuner.record(size, path, seconds, switched, steps)


def decode(run: DecoderRun) -> Generator[Request, Any, None]:
    """Emit the tokens that `plain` emits, with the logits rows (1, vocab) that they were drawn from.

    Before each step a budget is chosen. If it is 0, decoding is plain until a budget above 0 is chosen.
    """
    check(run.options, run.model, run.sampler)
    budgets = Budgets(run)
    drafter = Drafter(run, budgets)
    token, budget, logits = 0, budgets.choose(), run.logits
    if budget:
        token = yield from _first(run, drafter)
    while run.state.length < run.state.capacity:
        if budget:
            stretch = DraftStretch(run, drafter, token, budget)
            if run.model.ops.chooses(run.sampler):
                yield stretch
            if not stretch.steps:
                started = time.perf_counter()
                tokens, path = yield from _step(run, drafter, token, budget)
                stretch.goes_on(tokens, path, time.perf_counter() - started)
            token, budget, logits = stretch.token, stretch.budget, None
            continue
        if logits is None:
            step = Step.chain(np.array([token], np.int32), run.state.length)
            done = yield Rows(step, target_only=True)
            run.state.commit([0])
            logits = done.logits
        stretches = PlainStretches(run, drafter, budgets, logits is run.logits)
        try:
            yield from plain(run, logits, plan=stretches)
        finally:
            stretches.close()
        token, budget, logits = stretches.token, stretches.budget, None


def _first(run: DecoderRun, drafter: Drafter) -> Generator[Request, Any, int]:
    """Emit the token after the prompt, and return it."""
    chosen = yield Choose(run.logits, run.sampler)
    (values,) = yield Read((chosen,))
    token = int(values[0])
    run.sampler.accept(token)
    drafter.extend((token,))
    yield Emit(token, run.logits)
    return token


class PlainStretches:
    """Plain decoding until a budget is chosen, in stretches of steps: the StretchPlan of `plain`.

    A budget is chosen, and the tuner learns what steps took, once per stretch: a step may be as short as the host's
    work for it. The first token is a stretch of its own, because no step was launched ahead of it. A stretch in which
    the run could have no draft tokens is not timed, and includes its first token.

    follows_prompt  whether the first token is the one after the prompt, for which no step was taken
    is_limited      whether the run could have no draft tokens in a part of this stretch
    read            tokens of this stretch
    due             tokens from this stretch's first to the one before the next choice
    token           the newest token, at the end of a stretch
    budget          the budget that was chosen last
    """

    def __init__(self, run: DecoderRun, drafter: Drafter, budgets: Budgets, follows_prompt: bool):
        self.run, self.drafter, self.budgets = run, drafter, budgets
        self.follows_prompt, self.switched = follows_prompt, not follows_prompt
        self.read: list[int] = []
        self.token, self.budget, self.due = 0, 0, budgets.plain_steps()
        self.is_limited = run.most_drafted == 0
        self.first_steps = self.due - 1 if self.is_limited else 0
        self.started = time.perf_counter()

    def next_steps(self) -> int:
        """Choose a budget where one is due; return the steps until the next call, -1 to end plain decoding."""
        left = self.due - len(self.read)
        if left <= 1 or self.run.reconsiders:
            self.budget = self.budgets.choose()
            left = self.budgets.plain_steps() + 1
            self.due = len(self.read) + left
        return -1 if self.budget else left - 2

    def steps_reconsidered(self) -> int:
        """Return the tokens until the next call of `next_steps`: none, unless the run may have no draft tokens."""
        if self.run.most_drafted != 0:
            return 0
        self.budget, self.is_limited, steps = self.budgets.choose(), True, self.budgets.plain_steps()
        self.due = len(self.read) + steps
        return steps - 1

    def on_stretch_read(self) -> None:
        """Record the time of a stretch, whose last token has been read, and begin the next one."""
        ended, steps = time.perf_counter(), len(self.read)
        self.run.stats.add_plain(steps - self.follows_prompt, ended - self.started)
        if not (self.follows_prompt or self.is_limited):
            self.budgets.record(0, [0], (ended - self.started) / steps, self.switched, steps)
        self.switched, self.is_limited = False, self.run.most_drafted == 0
        self.drafter.extend(self.read)
        self.token, self.due, self.follows_prompt, self.started = self.read[-1], self.due - steps, False, ended
        self.read.clear()

    def close(self) -> None:
        """Count the steps of a stretch whose last token has not been read."""
        seconds = time.perf_counter() - self.started
        self.run.stats.add_plain(max(len(self.read) - self.follows_prompt, 0), seconds)


def _step(
    run: DecoderRun, drafter: Drafter, token: int, budget: int
) -> Generator[Request, Any, tuple[list[int], list[int]]]:
    """Emit the tokens that one step verifies after `token`; return them and the path of accepted nodes."""
    state, sampler = run.state, run.sampler
    tree = yield from drafter.tree(state, token, budget)
    drafted = time.perf_counter()
    step = Step.tree(np.array(tree.tokens, np.int32), tree.parents, state.length)
    best = None
    if run.model.ops.chooses(sampler):
        done = yield Rows(step, sampler if sampler.is_argmax else Ahead(sampler, step.positions - state.length))
        (values,) = yield Read((done.sampled,))
        best = values.tolist()
    else:
        done = yield Rows(step)
    rows, tokens, path, verified = done.logits, list[int](), [0], time.perf_counter()
    try:
        while True:
            node = path[-1]
            row = rows[node : node + 1]
            if best is None:
                (values,) = yield Read((row,))
                token = sampler.pick(values[0])
            else:
                token = best[node]
                if not sampler.is_argmax:
                    sampler.numbers(1)  # take the number with which the token was drawn
            sampler.accept(token)
            tokens.append(token)
            yield Emit(token, row)
            child = tree.nodes.get((node, token))
            if child is None:
                break
            path.append(child)
    finally:
        walked = time.perf_counter()
        state.commit(path)
        took = {"verify": verified - drafted, "host": walked - verified, "commit": time.perf_counter() - walked}
        run.stats.add_step(len(path), budget, len(tree), took)
    return tokens, path
