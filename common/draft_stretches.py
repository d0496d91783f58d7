"""Run speculative steps of sequences that each request a DraftStretch: one request of a decoder for many steps."""

import time
from collections.abc import Callable, Generator
from collections.abc import Sequence as List
from contextlib import suppress
from typing import Any

import numpy as np

from common.decode.ddtree import Tree
from common.decode.requests import Computed, Draft, DraftStretch, Rows
from common.decode.run import DecoderRun
from common.errors import NotFiniteError
from common.models.pair import Pair
from common.row_runner import Choice, Handle, LogitRows, RowRunner, StepResults, VerifiedChains, read
from common.sampling import GREEDY, Ahead
from common.sequence import Sequence
from common.step import MAX_DECODE_ROWS, Step
from common.stretches import Ended

SHORT_TREE = 7  # largest budget of `auto` whose greedy tree is drafted as a chain, which accepts about as many tokens


class DraftStretches:
    """Sequences whose drafts are made and verified in the same steps, each sequence within a DraftStretch.

    sequences   in the order of their rows
    steps_left  1 until one of the stretches ends, then 0
    """

    def __init__(self, runner: RowRunner, sequences: List[Sequence]):
        self.sequences, self.runner, self.ops, self.steps_left = list(sequences), runner, runner.ops, 1
        self.stretches: list[DraftStretch] = [each.request for each in sequences]  # type: ignore[misc]
        self.states = [each.run.state for each in self.stretches]
        runs = [each.run for each in self.stretches]
        self._longest_chain = min(map(_longest_chain, runs))
        self._verified: list[tuple[Any, Any]] = []  # of the launched step: each sequence's tree and its Computed
        self._chains: tuple[int, Callable[[list[int]], VerifiedChains]] | None = None  # by their draft tokens
        self._times = 0.0, 0.0  # when the step began, and when its trees were complete
        self._over: list[Sequence] = []  # whose stretch has ended, and not the reply
        self._next_chain = self._chain_tokens()  # of the next step

    def launch(self) -> "DraftStretches":
        """Draft, and launch the step that verifies the drafts; return self."""
        started = time.perf_counter()
        if count := self._next_chain:
            with suppress(NotFiniteError):  # of any sequence; the draft of each is made again below
                self._launch_chains(count)
                self._times = started, started
                return self
        trees = self._trees()
        drafted = time.perf_counter()
        rows = [
            (state, _rows_of(stretch, tree))
            for state, stretch, tree in zip(self.states, self.stretches, trees, strict=True)
            if isinstance(tree, Tree)
        ]
        found = iter([self.runner.alone(*rows[0])] if len(rows) == 1 else self.runner.together(rows) if rows else ())
        self._verified = [(tree, next(found) if isinstance(tree, Tree) else tree) for tree in trees]
        self._times = started, drafted
        return self

    def _chain_tokens(self) -> int:
        """Return the draft tokens of each sequence if all are greedy chains that a single pass drafts, else 0.

        The step that verifies such chains can be launched before the host reads them.
        """
        pair, count = self.runner.model, self.stretches[0].budget
        if not (isinstance(pair, Pair) and 0 < count <= min(self._longest_chain, pair.block_tokens)):
            return 0
        if self.states[0].pool is None:  # a backend that reads them for `draft_chains`
            return 0
        fit = [state.capacity - state.length > count for state in self.states]
        if not all(fit) or any([stretch.budget != count for stretch in self.stretches]):
            return 0
        return count if len(self.states) * len(pair.pass_step(0, 0)) <= MAX_DECODE_ROWS else 0

    def _launch_chains(self, count: int) -> None:
        if self._chains is None or self._chains[0] != count:
            choice = Choice(GREEDY, any([each.with_rows for each in self.sequences]))
            self._chains = count, self.runner.chains(self.states, count, choice)
        tokens, after, logits = self._chains[1]([each.token for each in self.stretches])
        drafted, chosen = StepResults(self.ops, tokens), StepResults(self.ops, after)
        self._verified = []
        for first in range(0, len(tokens), 1 + count):
            at = slice(first, first + 1 + count)
            rows = None if logits is None else LogitRows(logits, at.start, at.stop)
            self._verified.append((Handle(drafted, at), Computed(rows, Handle(chosen, at))))

    def _trees(self) -> list[Tree | Exception]:
        """Return each sequence's tree, or its error; the draft's passes are shared."""
        trees: list[Any] = [None] * len(self.stretches)
        waiting: list[tuple[int, Generator[Draft, Any, Tree], Draft]] = []
        for at, (state, stretch) in enumerate(zip(self.states, self.stretches, strict=True)):
            making = stretch.source.tree(state, stretch.token, stretch.budget)
            try:
                waiting.append((at, making, next(making)))
            except StopIteration as done:
                trees[at] = done.value
        if waiting:
            answers = self.runner.drafted([(self.states[at], draft) for at, _, draft in waiting])
            for (at, making, _), answer in zip(waiting, answers, strict=True):
                trees[at] = answer if isinstance(answer, Exception) else _last(making, answer)
        return trees

    def hand_out(self) -> tuple[list[Ended], int, bool]:
        """Commit the paths of the launched step, and add its tokens to their replies.

        Tokens of greedy chains that end no reply are kept until the next step has been launched: Sequence.take_kept.

        Returns the sequences that end, the number of tokens, and whether one is a reply's first. If `steps_left` is 0
        then, call `settle`.
        """
        ended, steps, new, begins, verified = list[Ended](), list[_Accepted](), 0, False, 0.0
        may_keep = self.ops.runs_ahead and self._longest_chain > 0
        rows = zip(self.sequences, self.stretches, self._verified, strict=True)
        for sequence, stretch, (drafted, result) in rows:
            if sequence.request is not stretch:  # it has ended
                continue
            try:
                if isinstance(result, Exception):
                    raise result
                step = _accepted(sequence, stretch, drafted, *read(self.ops, (result.sampled,)))
                verified = verified or time.perf_counter()
                begins = begins or not sequence.new_tokens
                steps.append(step)
                if not (may_keep and sequence.keep(step.tokens)) and not step.hand_out(result.logits):
                    ended.append((sequence, None))
            except Exception as error:
                ended.append((sequence, error))
        self._verified = []
        (started, complete), walked = self._times, time.perf_counter()
        self._commit(steps)
        now = time.perf_counter()
        took = {"verify": verified - complete, "host": walked - verified, "commit": now - walked}
        over = [each for each, _ in ended]
        for step in steps:
            new += len(step.path)
            step.stretch.run.stats.add_step(len(step.path), step.stretch.budget, step.rows, took)
            if step.sequence in over:
                continue
            if not step.stretch.goes_on(step.tokens, step.path, now - started):
                self._over.append(step.sequence)
        if ended or self._over:
            self.steps_left = 0
        self._next_chain = self._chain_tokens() if self.steps_left else 0
        return ended, new, begins

    def _commit(self, steps: List["_Accepted"]) -> None:
        """Commit the path of each sequence."""
        states = [step.stretch.run.state for step in steps]
        counts = [len(step.path) for step in steps]
        pool = self.states[0].pool
        if pool is not None and all([step.path[-1] == count - 1 for step, count in zip(steps, counts, strict=True)]):
            pool.commit_rows(states, counts)
            return
        for state, step in zip(states, steps, strict=True):
            state.commit(step.path)

    @property
    def launches_at_once(self) -> bool:
        """Test whether `launch` does not wait for the device."""
        return self.ops.runs_ahead and self._next_chain > 0

    def stop(self) -> None:
        """Run no further step."""
        self.steps_left = 0

    def settle(self) -> list[Sequence]:
        """Return the sequences whose stretch has ended."""
        over, self._over = self._over, []
        return [each for each in over if each.request in self.stretches]


class _Accepted:
    """One sequence's accepted nodes of a draft.

    path    accepted nodes, the root first; a reply that ends within the path keeps the part up to its end
    tokens  the token that the model chose after each node of `path`
    rows    number of rows of the draft, with its root
    """

    __slots__ = ("path", "rows", "sequence", "stretch", "tokens")

    def __init__(self, sequence: Sequence, stretch: DraftStretch, path: list[int], chosen: List[int]):
        self.sequence, self.stretch, self.path, self.rows = sequence, stretch, path, len(chosen)
        self.tokens = [chosen[node] for node in path]

    def hand_out(self, logits: Any) -> bool:
        """Add the tokens to the reply, chosen from rows of `logits`; return whether the reply continues."""
        sequence, sampler, before = self.sequence, self.stretch.run.sampler, self.sequence.new_tokens
        try:
            for node, token in zip(self.path, self.tokens, strict=True):
                if not sampler.is_argmax:
                    sampler.numbers(1)  # take the number with which the token was drawn
                if not sequence.take(token, logits[node : node + 1] if sequence.with_rows else None):
                    return False
            return True
        finally:  # also where a caller's function fails
            added = sequence.new_tokens - before
            del self.path[added:], self.tokens[added:]


def _accepted(sequence: Sequence, stretch: DraftStretch, drafted: Tree | Handle, chosen: np.ndarray) -> _Accepted:
    """Return the path of draft tokens that the model accepts.

    drafted  a tree, or the tokens of a chain
    chosen   the model's token after each row
    """
    after, path = chosen.tolist(), [0]
    if isinstance(drafted, Tree):
        while (child := drafted.nodes.get((path[-1], after[path[-1]]))) is not None:
            path.append(child)
    else:
        for row, token in enumerate(drafted.read()[1:].tolist()):
            if token != after[row]:
                break
            path.append(row + 1)
    return _Accepted(sequence, stretch, path, after)


def _longest_chain(run: DecoderRun) -> int:
    """Return the most draft tokens of a chain that is verified before the host reads it; 0: there is no such chain."""
    if not run.sampler.is_argmax or run.options.kind not in ("chain", "tree"):
        return 0
    if run.options.kind == "chain":
        return MAX_DECODE_ROWS
    return SHORT_TREE if run.options.budget is None else 0


def _rows_of(stretch: DraftStretch, tree: Tree) -> Rows:
    """Return the request for the rows of a tree; a token is chosen after each row."""
    sampler, length = stretch.run.sampler, stretch.run.state.length
    step = Step.tree(np.array(tree.tokens, np.int32), tree.parents, length)
    return Rows(step, sampler if sampler.is_argmax else Ahead(sampler, step.positions - length))


def _last(making: Generator[Draft, Any, Tree], answer: Any) -> Tree:
    """Return the tree of a generator that was waiting for its one Draft."""
    try:
        making.send(answer)
    except StopIteration as done:
        tree: Tree = done.value
        return tree
    raise RuntimeError("a tree takes one draft")
