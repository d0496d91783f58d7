"""Answers to several decoders' requests for rows and drafts: one joined step if the backend supports it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from common.decode.alone import computed
from common.decode.plain import target_of
from common.decode.requests import EVERY, Computed, Draft, Rows
from common.errors import BimetalError, NotFiniteError
from common.joined_step import JoinedState, JoinedStep, joined
from common.models import Model
from common.models.pair import Pair, Pass
from common.ops import Array, Ops
from common.options import Sampling
from common.sampling import Sampler, Samplers
from common.step import MAX_DECODE_ROWS, State, Step

Drafted = tuple[np.ndarray, ...]  # what Pair.drafting returns
DRAFT_LAYERS = 10**6  # more than any draft has
SAMPLED, PICKED, NOT_CHOSEN = range(3)  # kinds of rows, in the order in which they lie in a step
UNREAD = Sampler(Sampling())  # of rows whose token nobody reads


class RowRunner:
    """Runs steps of `model`, which may be a pair."""

    def __init__(self, model: Model):
        self.model, self.ops, self.target = model, model.ops, target_of(model)
        self._joined: dict[bool, Model] = {}  # by whether the target runs without its draft
        self._state: JoinedState | None = None  # of the last joined step

    def alone(self, state: State, rows: Rows) -> Computed:
        """Run a step with the rows of one sequence."""
        model = self.target if rows.target_only else self.model
        step = rows.step if type(rows.step.tokens) is not Part else _by_itself(rows.step)
        return computed(self.ops, model.forward(state, step), rows)

    def together(self, asked: Sequence[tuple[State, Rows]]) -> list[Computed | Exception]:
        """Run a step with the rows of each sequence; an error that concerns one sequence is that sequence's result."""
        kinds = [_kind(rows) for _, rows in asked]
        if kinds == sorted(kinds):
            return self._together([state for state, _ in asked], [rows for _, rows in asked], kinds)
        order = sorted(range(len(asked)), key=kinds.__getitem__)
        answers = self._together([asked[i][0] for i in order], [asked[i][1] for i in order], sorted(kinds))
        return [answer for _, answer in sorted(zip(order, answers, strict=True), key=lambda pair: pair[0])]

    def _together(self, states: list[State], asked: list[Rows], kinds: list[int]) -> list[Computed | Exception]:
        """Run one step for all, in the order of their kinds."""
        steps = [rows.step for rows in asked]
        tokens, target_only = tokens_of(self.ops, steps), all([rows.target_only for rows in asked])
        pool: Any = states[0].pool
        if pool is not None:
            step = JoinedStep.of(steps, tokens, [state.slot for state in states])
            logits = (self.target if target_only else self.model).forward(pool, step)
        else:
            omits = self.target is not self.model  # the draft's rows, in a step after which nothing is drafted
            step, state = JoinedStep.of(steps, tokens), self._state_of(states, [omits and r.target_only for r in asked])
            logits = self._model(target_only).forward(state, step)
        runs = step.runs
        chosen = [
            *self._sampled(logits, asked[: kinds.count(SAMPLED)], runs),
            *self._picked(logits, asked[kinds.count(SAMPLED) :], runs[kinds.count(SAMPLED) :]),
        ]
        filled = self._filled(logits, asked, runs)
        return [
            _answer(self.ops, LogitRows(logits, at.start, at.stop), rows, each, masked)
            for at, rows, each, masked in zip(runs, asked, chosen, filled, strict=True)
        ]

    def _sampled(self, logits: Array, asked: list[Rows], runs: list[slice]) -> list["Part"]:
        """Choose tokens of the first rows of a step in one call, each by the sampler of its sequence."""
        if not asked:
            return []
        parts = [_rows_in(rows.sampled, at) for rows, at in zip(asked, runs, strict=False)]
        samplers, end = list[tuple[Sampler, int]](), 0
        for rows, part in zip(asked, parts, strict=True):
            assert rows.sampler is not None
            if part.start > end:
                samplers.append((UNREAD, part.start - end))
            samplers.append((rows.sampler, part.stop - part.start))
            end = part.stop
        whole = Whole(self.ops, self.ops.sample(logits if end == len(logits) else logits[:end], Samplers(samplers)))
        return [Part(whole, part) for part in parts]

    def _picked(self, logits: Array, asked: list[Rows], runs: list[slice]) -> list["Part | Exception | None"]:
        """Choose tokens of rows that the host must read (penalties, guides); None if nothing is to be chosen."""
        count = sum(rows.sampler is not None for rows in asked)
        chosen: list[Part | Exception | None] = [None] * len(asked)
        if not count:
            return chosen
        first = runs[0].start
        host = self.ops.read(logits[first : runs[count - 1].stop])
        for i, (rows, at) in enumerate(zip(asked[:count], runs, strict=False)):
            assert rows.sampler is not None
            part = _rows_in(rows.sampled, at)
            try:
                own = host[part.start - first : part.stop - first]
                tokens = np.array([rows.sampler.pick(row) for row in own], np.int32)
                chosen[i] = Part(Whole(self.ops, tokens, host=(tokens,)), slice(0, len(tokens)))
            except BimetalError as error:
                chosen[i] = error
        return chosen

    def _filled(self, logits: Array, asked: list[Rows], runs: list[slice]) -> list[tuple["Part", ...] | None]:
        """Find what the masks of several windows predict in one call, over the rows from the first mask to the last.

        None for a sequence without masks, and for all where there is one window, or where a row is not finite.
        """
        parts = [None if rows.mask is None else _rows_in(rows.masked, at) for rows, at in zip(asked, runs, strict=True)]
        of = [(rows.mask, part) for rows, part in zip(asked, parts, strict=True) if part is not None]
        if len(of) < 2:
            return [None] * len(asked)
        first, end = min(part.start for _, part in of), max(part.stop for _, part in of)
        mask = of[0][0]  # the model's, which all of them have
        assert mask is not None
        try:
            whole = Whole(self.ops, *self.ops.argmax_entropy(logits[first:end], mask))
        except NotFiniteError:  # in any row
            return [None] * len(asked)
        at = [None if part is None else slice(part.start - first, part.stop - first) for part in parts]
        return [None if rows is None else (Part(whole, rows), Part(whole, rows, 1)) for rows in at]

    @property
    def shares_drafts(self) -> bool:
        """Whether `drafted` serves several sequences."""
        return isinstance(self.model, Pair) and self.model.shares_passes

    def drafted(self, asked: Sequence[tuple[State, Draft]]) -> list[Drafted | Exception]:
        """Draft for each sequence; an answer is what Pair.drafting returns, or the error that is the sequence's own.

        Each of its passes is one step for as many sequences as have rows in it; raises what the backend raises.
        """
        pair = self.model
        assert isinstance(pair, Pair)
        drafting = [pair.drafting(*draft) for _, draft in asked]
        answers, passes = dict[int, Drafted | Exception](), dict[int, tuple[Pass, Step]]()

        def go_on(i: int, found: Any) -> None:
            passes.pop(i, None)
            if isinstance(found, Exception):
                answers[i] = found
                return
            try:
                next_pass = drafting[i].send(found)
                passes[i] = next_pass, pair.pass_step(next_pass.given, asked[i][0].length)
            except StopIteration as done:
                answers[i] = done.value
            except BimetalError as error:
                answers[i] = error

        for i in range(len(asked)):
            go_on(i, None)
        while passes:
            rows = min(len(step) for _, step in passes.values())
            chosen = [i for i, (_, step) in passes.items() if len(step) == rows][: max(1, MAX_DECODE_ROWS // rows)]
            found = self._found(pair, [(asked[i][0], *passes[i]) for i in chosen])
            for i, each in zip(chosen, found, strict=True):
                go_on(i, each)
        return [answers[i] for i in range(len(asked))]

    def _found(self, pair: Pair, asked: list[tuple[State, Pass, Step]]) -> list[Any]:
        """Run one pass over sequences of as many rows each; an answer may be the error that is the sequence's own."""
        states, steps = [state for state, _, _ in asked], [step for _, _, step in asked]
        tokens, rows, pool = np.concatenate([step.tokens for step in steps]), len(steps[0]), states[0].pool
        if pool is not None:
            logits = pair.propose_each(pool, JoinedStep.of(steps, tokens, [state.slot for state in states]), rows)
        else:
            joined_pair: Any = self._model(False)
            state = self._state_of(states, [False] * len(states))
            logits = joined_pair.propose_each(state, JoinedStep.of(steps, tokens), rows)
        own = [pair.rows_of_each(number, rows) for number in range(len(asked))]
        most = max(each.k for _, each, _ in asked)
        try:
            best = self.ops.read_all(*self.ops.top_k(logits, most)) if most else None
        except NotFiniteError:  # in any row
            best = None
        found: list[Any] = []
        for at, (_, each, _) in zip(own, asked, strict=True):
            if best is not None:
                found.append([part[at][: each.positions, : each.k] for part in best])
                continue
            try:
                found.append(pair.found(logits[at], each))
            except BimetalError as error:
                found.append(error)
        return found

    def _model(self, target_only: bool) -> Model:
        if target_only not in self._joined:
            self._joined[target_only] = joined(self.target if target_only else self.model)
        return self._joined[target_only]

    def _state_of(self, states: list[State], without_draft: list[bool]) -> Any:
        """The states as one; of some of them the layers of a draft stay as they are."""
        layers = len(self.model.weights.layers)
        own = [layers if each else layers + DRAFT_LAYERS for each in without_draft]
        if self._state is None or self._state.states != states or self._state.own != own:
            self._state = JoinedState(states, own)
        return self._state


def _kind(rows: Rows) -> int:
    """Rank a sequence's rows in a joined step: rows whose tokens are sampled in one call come first."""
    return NOT_CHOSEN if rows.sampler is None else PICKED if rows.sampler.penalizes else SAMPLED


def _rows_in(sampled: slice, at: slice) -> slice:
    """Return where rows `sampled` of a sequence lie in a step in which its rows are `at`."""
    if sampled is EVERY:
        return at
    first, end, _ = sampled.indices(at.stop - at.start)
    return slice(at.start + first, at.start + end)


def _answer(
    ops: Ops,
    logits: "LogitRows",
    rows: Rows,
    chosen: "Part | Exception | None",
    filled: "tuple[Part, ...] | None",
) -> Computed | Exception:
    """The answer of one sequence; `filled`: what its masks predict, where that was found for several at once."""
    if isinstance(chosen, Exception):
        return chosen
    if rows.mask is None or filled is not None:
        return Computed(logits, chosen, filled or ())
    try:
        return Computed(logits, chosen, ops.argmax_entropy(logits[rows.masked].cut(), rows.mask))
    except BimetalError as error:
        return error


class LogitRows:
    """Rows `first` to `end` of a step's logits, which are cut out where they are used."""

    __slots__ = ("end", "first", "logits")

    def __init__(self, logits: Array, first: int, end: int):
        self.logits, self.first, self.end = logits, first, end

    def __len__(self) -> int:
        return self.end - self.first

    def __getitem__(self, rows: slice) -> "LogitRows":
        part = _rows_in(rows, slice(self.first, self.end))
        return LogitRows(self.logits, part.start, part.stop)

    def cut(self) -> Array:
        return self.logits[self.first : self.end]


class Whole:
    """Arrays (T,) that a joined step found for its rows, which are read from the device once, and together.

    host  the arrays on the host, where known
    """

    def __init__(self, ops: Ops, *arrays: Array, host: tuple[np.ndarray, ...] | None = None):
        self.ops, self.arrays, self._host = ops, arrays, host

    def read(self, number: int, rows: slice) -> np.ndarray:
        """Return rows of an array on the host."""
        if self._host is None:
            try:
                self._host = self.ops.read_all(*self.arrays)
            except NotFiniteError:  # in any row
                return self.ops.read(self.arrays[number][rows])
        return self._host[number][rows]


class Part:
    """One sequence's rows of an array of a Whole."""

    __slots__ = ("number", "rows", "whole")

    def __init__(self, whole: Whole, rows: slice, number: int = 0):
        self.whole, self.rows, self.number = whole, rows, number

    def __len__(self) -> int:
        return int(self.rows.stop - self.rows.start)

    def read(self) -> np.ndarray:
        return self.whole.read(self.number, self.rows)


OF_A_STEP = {Part, LogitRows}


def read(ops: Ops, of: Sequence[Any]) -> tuple[np.ndarray, ...]:
    """Parts, LogitRows, and arrays of the backend, on the host."""
    if len(of) == 1 and type(of[0]) is Part:
        return (of[0].read(),)
    if OF_A_STEP.isdisjoint(map(type, of)):
        return ops.read_all(*of)
    return tuple([_on_host(ops, x) for x in of])


def array_of(logits: Any) -> Array:
    """LogitRows, or logits of the backend, as the backend's."""
    return logits.cut() if type(logits) is LogitRows else logits


def _by_itself(step: Step) -> Step:
    """A step that runs by itself: its tokens are no Part."""
    tokens = step.tokens
    return replace(step, tokens=tokens.whole.arrays[tokens.number][tokens.rows])


def tokens_of(ops: Ops, steps: Sequence[Step]) -> Any:
    """The tokens of `steps`: on the device where they are the whole of what one joined step chose, else on the host."""
    first = steps[0].tokens
    if type(first) is Part:
        whole, at = first.whole, 0
        for step in steps:
            tokens = step.tokens
            if type(tokens) is not Part or tokens.whole is not whole or tokens.rows.start != at:
                break
            at = tokens.rows.stop
        else:
            if at == len(whole.arrays[0]):
                return whole.arrays[0]
    return np.concatenate([_on_host(ops, step.tokens) for step in steps])


def _on_host(ops: Ops, x: Any) -> np.ndarray:
    if type(x) is Part:
        return x.read()
    return x if isinstance(x, np.ndarray) else ops.read(array_of(x))
