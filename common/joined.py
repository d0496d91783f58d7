"""Answer the rows that several decoders ask for: by one joined step where the backend can, and choose their tokens."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from common.decode.alone import computed
from common.decode.plain import target_of
from common.decode.requests import EVERY, Computed, Rows
from common.errors import BimetalError, NotFiniteError
from common.joined_step import JoinedState, JoinedStep, joined
from common.models import Model
from common.ops import Array, Ops
from common.step import State, Step

DRAFT_LAYERS = 10**6  # more than any draft has


class RowRunner:
    """Runs steps of `model`, which may be a pair."""

    def __init__(self, model: Model):
        self.model, self.ops, self.target = model, model.ops, target_of(model)
        self._joined: dict[bool, Model] = {}  # by whether the target runs without its draft
        self._state: JoinedState | None = None  # of the last joined step

    def alone(self, state: State, rows: Rows) -> Computed:
        """What the rows of one sequence give."""
        model = self.target if rows.target_only else self.model
        step = rows.step if type(rows.step.tokens) is not Part else _by_itself(rows.step)
        return computed(self.ops, model.forward(state, step), rows)

    def together(self, asked: Sequence[tuple[State, Rows]]) -> list[Computed | Exception]:
        """What the rows of each sequence give, or the error that is its own; raises what the backend raises."""
        if all(_is_greedy(rows) for _, rows in asked):
            return self._together([state for state, _ in asked], [rows for _, rows in asked])
        order = sorted(range(len(asked)), key=lambda i: not _is_greedy(asked[i][1]))
        answers = self._together([asked[i][0] for i in order], [asked[i][1] for i in order])
        return [answer for _, answer in sorted(zip(order, answers, strict=True), key=lambda pair: pair[0])]

    def _together(self, states: list[State], asked: list[Rows]) -> list[Computed | Exception]:
        """One step for all; those that choose greedily come first."""
        steps = [rows.step for rows in asked]
        tokens, target_only = tokens_of(self.ops, steps), all(rows.target_only for rows in asked)
        pool: Any = states[0].pool
        if pool is not None:
            step = JoinedStep.of(steps, tokens, [state.slot for state in states])
            logits = (self.target if target_only else self.model).forward(pool, step)
        else:
            step, state = JoinedStep.of(steps, tokens), self._state_of(states, asked)
            logits = self._model(target_only).forward(state, step)
        greedy = sum(map(_is_greedy, asked))
        whole = None
        if greedy and asked[0].sampler is not None:
            with suppress(NotFiniteError):  # in any row: each sequence then chooses by itself
                whole = Whole(self.ops, self.ops.sample(logits[: step.runs[greedy - 1].stop], asked[0].sampler))
        answers: list[Computed | Exception] = []
        for at, rows in zip(step.runs, asked, strict=True):
            if whole is None or len(answers) >= greedy:
                answers.append(_chosen(self.ops, logits[at], rows))
                continue
            if rows.sampled == EVERY and rows.mask is None:
                answers.append(Computed(logits[at], Part(whole, at)))
                continue
            first, end, _ = rows.sampled.indices(at.stop - at.start)
            answer = _chosen(self.ops, logits[at], rows._replace(sampler=None))
            part = Part(whole, slice(at.start + first, at.start + end))
            answers.append(answer._replace(sampled=part) if type(answer) is Computed else answer)
        return answers

    def _model(self, target_only: bool) -> Model:
        if target_only not in self._joined:
            self._joined[target_only] = joined(self.target if target_only else self.model)
        return self._joined[target_only]

    def _state_of(self, states: list[State], asked: list[Rows]) -> Any:
        layers = len(self.model.weights.layers)
        omits = self.target is not self.model  # the draft's rows, in a step after which nothing is drafted
        own = [layers if rows.target_only and omits else layers + DRAFT_LAYERS for rows in asked]
        if self._state is None or self._state.states != states or self._state.own != own:
            self._state = JoinedState(states, own)
        return self._state


def _is_greedy(rows: Rows) -> bool:
    return rows.sampler is not None and rows.sampler.is_argmax


def _chosen(ops: Ops, logits: Array, rows: Rows) -> Computed | Exception:
    try:
        return computed(ops, logits, rows)
    except BimetalError as error:
        return error


class Whole:
    """The tokens that a joined step chose, (T,), which are read from the device once."""

    def __init__(self, ops: Ops, array: Array):
        self.ops, self.array = ops, array
        self._host: np.ndarray | None = None

    def read(self, rows: slice) -> np.ndarray:
        if self._host is None:
            try:
                self._host = self.ops.read(self.array)
            except NotFiniteError:  # in any row
                return self.ops.read(self.array[rows])
        return self._host[rows]


class Part:
    """One sequence's rows of a Whole."""

    __slots__ = ("rows", "whole")

    def __init__(self, whole: Whole, rows: slice):
        self.whole, self.rows = whole, rows

    def __len__(self) -> int:
        return int(self.rows.stop - self.rows.start)


def read(ops: Ops, of: Sequence[Any]) -> tuple[np.ndarray, ...]:
    """Parts, and arrays of the backend, on the host."""
    for x in of:
        if type(x) is Part:
            return tuple(x.whole.read(x.rows) if type(x) is Part else ops.read(x) for x in of)
    return ops.read_all(*of)


def _by_itself(step: Step) -> Step:
    """A step that runs by itself: its tokens are no Part."""
    tokens = step.tokens
    return replace(step, tokens=tokens.whole.array[tokens.rows])


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
            if at == len(whole.array):
                return whole.array
    return np.concatenate([_on_host(ops, step.tokens) for step in steps])


def _on_host(ops: Ops, tokens: Any) -> np.ndarray:
    if isinstance(tokens, np.ndarray):
        return tokens
    return tokens.whole.read(tokens.rows) if type(tokens) is Part else ops.read(tokens)
