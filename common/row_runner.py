"""Run the rows and drafts that decoders request, for several sequences in one joined step if the backend can."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np

from common.decode.alone import computed
from common.decode.plain import target_of
from common.decode.requests import EVERY, THE_ROW, Computed, Draft, Rows, Stretch
from common.errors import BimetalError, NotFiniteError
from common.joined_step import JoinedState, JoinedStep, joined
from common.models import Model
from common.models.pair import Pair, Pass
from common.ops import Array, Ops
from common.sampling import GREEDY, Sampler, Samplers
from common.step import MAX_DECODE_ROWS, State, Step

Drafted = tuple[np.ndarray, ...]  # result of Pair.drafting
DRAFT_LAYERS = 10**6  # more than any draft has
SAMPLED, PICKED, NOT_CHOSEN = range(3)  # kinds of rows, in the order in which they lie in a step
Chosen = tuple[Array, Array | None]  # tokens (T,) int32; the logits (T, vocab) that they were chosen from, if needed
VerifiedChains = tuple[Array, Array, Array | None]  # tokens (T,) int32 of chains; Chosen after each


class Choice(NamedTuple):
    """Choice of a token after each row of a step; `with_logits`: the logits of the rows are needed too."""

    sampler: Sampler | Samplers
    with_logits: bool


class RowRunner:
    """Runs steps of `model`, which may be a pair."""

    def __init__(self, model: Model):
        self.model, self.ops, self.target = model, model.ops, target_of(model)
        self._joined: dict[bool, Model] = {}  # by whether the target runs without its draft
        self._state: JoinedState | None = None  # of the last joined step

    def alone(self, state: State, request: Rows | Stretch) -> Computed:
        """Run a step with the rows of one sequence."""
        rows = _rows_of(request)
        model = self.target if rows.target_only else self.model
        step = rows.step
        if type(step.tokens) is Handle:
            step = replace(step, tokens=tokens_of(self.ops, [step.tokens]))
        return computed(self.ops, model.forward(state, step), rows)

    def together(self, requests: Sequence[tuple[State, Rows | Stretch]]) -> Sequence[Computed | Exception]:
        """Run a step with the rows of each sequence; an error of one sequence becomes the result of that sequence."""
        states, rows = [state for state, _ in requests], [_rows_of(each) for _, each in requests]
        kinds = [_kind(each) for each in rows]
        if kinds == sorted(kinds):
            return self._together(states, rows, kinds)
        order = sorted(range(len(requests)), key=kinds.__getitem__)
        answers = self._together([states[i] for i in order], [rows[i] for i in order], sorted(kinds))
        return [answer for _, answer in sorted(zip(order, answers, strict=True), key=lambda pair: pair[0])]

    def single_rows(self, states: list[State], choice: Choice) -> Callable[[Any, np.ndarray], Chosen]:
        """Return a function of tokens and positions, (n,) int32, which computes a row of each state.

        It may leave out the draft's rows.
        """
        pool, target = cast(Any, states[0].pool), self.target
        if len(states) == 1:
            (state,) = states
            return lambda tokens, positions: _chosen(target, state, Step.chain(tokens, int(positions[0])), choice)
        if pool is not None:  # which asks for no sequence's own step
            slots = np.array([state.slot for state in states], np.int32)

            def of_pool(tokens: Any, positions: np.ndarray) -> Chosen:
                return _chosen(target, pool, JoinedStep.of_single_rows(tokens, positions, slots), choice)

            return of_pool

        def of_states(tokens: Any, positions: np.ndarray) -> Chosen:
            parts = [Step.chain(THE_ROW, at) for at in positions.tolist()]
            return _chosen(*self._runs_on(states, [True] * len(states)), JoinedStep.of(parts, tokens), choice)

        return of_states

    def _runs_on(self, states: list[State], without_draft: list[bool]) -> tuple[Model, Any]:
        """Return the model and the state of a joined step, which may leave out the draft's rows `without_draft`."""
        target_only, pool = all(without_draft), cast(Any, states[0].pool)
        if pool is not None:
            return self.target if target_only else self.model, pool
        omits = self.target is not self.model  # the draft's rows, in a step after which nothing is drafted
        return self._model(target_only), self._state_of(states, [omits and each for each in without_draft])

    def _together(self, states: list[State], requests: list[Rows], kinds: list[int]) -> list[Computed | Exception]:
        """Run one step for all, in the order of their kinds."""
        steps = [rows.step for rows in requests]
        tokens = tokens_of(self.ops, [step.tokens for step in steps])
        slots = None if states[0].pool is None else [state.slot for state in states]
        step = JoinedStep.of(steps, tokens, slots)
        model, state = self._runs_on(states, [rows.target_only for rows in requests])
        logits = model.forward(state, step)
        runs = step.runs
        chosen = [
            *self._sampled(logits, requests[: kinds.count(SAMPLED)], runs),
            *self._picked(logits, requests[kinds.count(SAMPLED) :], runs[kinds.count(SAMPLED) :]),
        ]
        filled = self._filled(logits, requests, runs)
        return [
            _answer(self.ops, LogitRows(logits, at.start, at.stop), rows, each, masked)
            for at, rows, each, masked in zip(runs, requests, chosen, filled, strict=True)
        ]

    def _sampled(self, logits: Array, requests: list[Rows], runs: Sequence[slice]) -> list["Handle"]:
        """Choose tokens of the first rows of a step in one call, each by the sampler of its sequence."""
        if not requests:
            return []
        sampled = [_rows_in(rows.sampled, at) for rows, at in zip(requests, runs, strict=False)]
        samplers, end = list[tuple[Sampler, int]](), 0
        for rows, at in zip(requests, sampled, strict=True):
            assert rows.sampler is not None
            if at.start > end:
                samplers.append((GREEDY, at.start - end))  # their tokens are not read
            samplers.append((rows.sampler, at.stop - at.start))
            end = at.stop
        tokens = self.ops.sample(logits if end == len(logits) else logits[:end], Samplers(samplers))
        found = StepResults(self.ops, tokens)
        return [Handle(found, at) for at in sampled]

    def _picked(self, logits: Array, requests: list[Rows], runs: Sequence[slice]) -> list["Handle | Exception | None"]:
        """Choose tokens of rows that the host must read (penalties, guides); None if nothing is to be chosen."""
        count = sum(rows.sampler is not None for rows in requests)
        chosen: list[Handle | Exception | None] = [None] * len(requests)
        if not count:
            return chosen
        first = runs[0].start
        host = self.ops.read(logits[first : runs[count - 1].stop])
        for i, (rows, at) in enumerate(zip(requests[:count], runs, strict=False)):
            assert rows.sampler is not None
            sampled = _rows_in(rows.sampled, at)
            try:
                own = host[sampled.start - first : sampled.stop - first]
                tokens = np.array([rows.sampler.pick(row) for row in own], np.int32)
                chosen[i] = Handle(StepResults(self.ops, tokens, host=(tokens,)), slice(0, len(tokens)))
            except BimetalError as error:
                chosen[i] = error
        return chosen

    def _filled(self, logits: Array, requests: list[Rows], runs: Sequence[slice]) -> list[tuple["Handle", ...] | None]:
        """Compute the predictions for masks of several windows in one call, over rows from the first mask to the last.

        None for a sequence without masks; None for all if there is only one window, or if a row is not finite.
        """
        pairs = zip(requests, runs, strict=True)
        masked = [None if rows.mask is None else _rows_in(rows.masked, at) for rows, at in pairs]
        known = [at for at in masked if at is not None]
        if len(known) < 2:
            return [None] * len(requests)
        first, end = min(at.start for at in known), max(at.stop for at in known)
        mask = next(rows.mask for rows in requests if rows.mask is not None)  # the model's mask id, equal for all
        try:
            found = StepResults(self.ops, *self.ops.argmax_entropy(logits[first:end], mask))
        except NotFiniteError:  # in any row
            return [None] * len(requests)
        moved = [None if at is None else slice(at.start - first, at.stop - first) for at in masked]
        return [None if at is None else (Handle(found, at), Handle(found, at, 1)) for at in moved]

    @property
    def shares_drafts(self) -> bool:
        """Test whether `drafted` serves several sequences."""
        return isinstance(self.model, Pair) and self.model.shares_passes

    def drafted(self, requests: Sequence[tuple[State, Draft]]) -> list[Drafted | Exception]:
        """Draft for each sequence; return for each the result of Pair.drafting, or the error of that sequence.

        A pass is one step for all sequences that have rows in it. Errors of the backend are raised.
        """
        pair = self.model
        assert isinstance(pair, Pair)
        if len(requests) == 1:
            ((state, draft),) = requests
            try:
                return [pair.drafted(state, *draft)]
            except NotFiniteError as error:
                return [error]
        drafting = [pair.drafting(*draft) for _, draft in requests]
        answers, passes = dict[int, Drafted | Exception](), dict[int, tuple[Pass, Step]]()

        def go_on(i: int, found: Any) -> None:
            passes.pop(i, None)
            if isinstance(found, Exception):
                answers[i] = found
                return
            try:
                next_pass = drafting[i].send(found)
                passes[i] = next_pass, pair.pass_step(next_pass.inputs, requests[i][0].length)
            except StopIteration as done:
                answers[i] = done.value
            except BimetalError as error:
                answers[i] = error

        for i in range(len(requests)):
            go_on(i, None)
        while passes:
            rows = min(len(step) for _, step in passes.values())
            chosen = [i for i, (_, step) in passes.items() if len(step) == rows][: max(1, MAX_DECODE_ROWS // rows)]
            found = self._found(pair, [(requests[i][0], *passes[i]) for i in chosen])
            for i, each in zip(chosen, found, strict=True):
                go_on(i, each)
        return [answers[i] for i in range(len(requests))]

    def _found(self, pair: Pair, passes: list[tuple[State, Pass, Step]]) -> list[Any]:
        """Run one pass over sequences with equal numbers of rows; return each one's result or error."""
        states, steps = [state for state, _, _ in passes], [step for _, _, step in passes]
        tokens, rows = np.concatenate([step.tokens for step in steps]), len(steps[0])
        slots = None if states[0].pool is None else [state.slot for state in states]
        logits = self._proposed(states, JoinedStep.of(steps, tokens, slots))
        runs = [pair.rows_of_each(number, rows) for number in range(len(passes))]
        k = max(each.k for _, each, _ in passes)
        try:
            best = self.ops.read_all(*self.ops.top_k(logits, k)) if k else None
        except NotFiniteError:  # in any row
            best = None
        found: list[Any] = []
        for run, (_, each, _) in zip(runs, passes, strict=True):
            if best is not None:
                found.append([part[run][: each.positions, : each.k] for part in best])
                continue
            try:
                found.append(pair.found(logits[run], each))
            except BimetalError as error:
                found.append(error)
        return found

    def _proposed(self, states: list[State], step: JoinedStep) -> Array:
        """Run a pass of the draft with equally many rows of each sequence; return the result of `propose_each`."""
        pair, pool, rows = cast(Pair, self.model), cast(Any, states[0].pool), len(step) // len(states)
        if pool is not None:
            return pair.propose_each(pool, step, rows)
        joined_pair: Any = self._model(False)
        return joined_pair.propose_each(self._state_of(states, [False] * len(states)), step, rows)

    def chains(self, states: list[State], count: int, choice: Choice) -> Callable[[list[int]], VerifiedChains]:
        """Return a function of each state's newest token, which drafts `count` tokens after it and verifies them.

        The host need not read the drafts in between. The function returns, of 1 + count rows of each state, the tokens
        (n,) int32, which are its newest token and the drafted ones, and then what the model chooses after each. The
        states are of a pool, and the draft is one whose passes give `block_tokens`, at least `count`.
        """
        pair, slots = cast(Pair, self.model), [state.slot for state in states]
        masks = np.tile(pair.pass_step(0, 0).tokens, (len(states), 1))
        rows, pool = masks.shape[1], states[0].pool

        def verified(newest: list[int]) -> VerifiedChains:
            starts, inputs = [state.length for state in states], masks.copy()
            inputs[:, 0] = newest
            block = JoinedStep.of_equal_runs(inputs.reshape(-1), starts, rows, slots, is_block=True)
            tokens = pair.draft_chains(pool, block, rows, count)
            step = JoinedStep.of_equal_runs(tokens, starts, 1 + count, slots)
            return tokens, *_chosen(*self._runs_on(states, [False] * len(states)), step, choice)

        return verified

    def _model(self, target_only: bool) -> Model:
        if target_only not in self._joined:
            self._joined[target_only] = joined(self.target if target_only else self.model)
        return self._joined[target_only]

    def _state_of(self, states: list[State], without_draft: list[bool]) -> Any:
        """Join the states; a step leaves the draft's layers of those `without_draft` as they are."""
        layers = len(self.model.weights.layers)
        counts = [layers if each else layers + DRAFT_LAYERS for each in without_draft]
        if self._state is None or self._state.states != states or self._state.layer_counts != counts:
            self._state = JoinedState(states, counts)
        return self._state


def _chosen(model: Model, state: Any, step: Step, choice: Choice) -> Chosen:
    """Run a step and choose a token after each row."""
    if choice.sampler.is_argmax and not choice.with_logits:
        return model.greedy_tokens(state, step), None
    logits = model.forward(state, step)
    return model.ops.sample(logits, choice.sampler), logits


def _rows_of(request: Rows | Stretch) -> Rows:
    return request.rows() if isinstance(request, Stretch) else request


def _kind(rows: Rows) -> int:
    """Rank a sequence's rows in a joined step: rows whose tokens are sampled in one call come first."""
    return NOT_CHOSEN if rows.sampler is None else PICKED if rows.sampler.penalizes else SAMPLED


def _rows_in(sampled: slice, run: slice) -> slice:
    """Return where rows `sampled` of a sequence are in a joined step, of which the sequence's rows are `run`."""
    if sampled is EVERY:
        return run
    first, end, _ = sampled.indices(run.stop - run.start)
    return slice(run.start + first, run.start + end)


def _answer(
    ops: Ops,
    logits: "LogitRows",
    rows: Rows,
    chosen: "Handle | Exception | None",
    filled: "tuple[Handle, ...] | None",
) -> Computed | Exception:
    """Return the answer of one sequence.

    filled  predictions for its masks, if they were computed for several sequences at once
    """
    if isinstance(chosen, Exception):
        return chosen
    if rows.mask is None or filled is not None:
        return Computed(logits, chosen, filled or ())
    try:
        return Computed(logits, chosen, ops.argmax_entropy(logits[rows.masked].cut(), rows.mask))
    except BimetalError as error:
        return error


class LogitRows:
    """One sequence's rows, `first` to `end`, of the logits (T, vocab) of a joined step.

    Indexing gives LogitRows again and launches nothing; `cut` makes the backend's array of the rows.
    """

    __slots__ = ("end", "first", "logits")

    def __init__(self, logits: Array, first: int, end: int):
        self.logits, self.first, self.end = logits, first, end

    def __len__(self) -> int:
        return self.end - self.first

    def __getitem__(self, rows: slice) -> "LogitRows":
        first, end, _ = rows.indices(self.end - self.first)
        return LogitRows(self.logits, self.first + first, self.first + end)

    def cut(self) -> Array:
        """Return the rows as the backend's array."""
        return self.logits[self.first : self.end]


class StepResults:
    """Arrays (T,) that one call found for rows of all sequences of a joined step: tokens; or ids and entropies.

    The first sequence that reads its rows copies the arrays to the host, for all sequences.

    arrays  on the device
    host    copies of the arrays, if they were made on the host
    """

    def __init__(self, ops: Ops, *arrays: Array, host: tuple[np.ndarray, ...] | None = None):
        self.ops, self.arrays, self._host = ops, arrays, host

    def read(self, number: int, rows: slice) -> np.ndarray:
        """Return rows of array `number` on the host."""
        if self._host is None:
            try:
                self._host = self.ops.read_all(*self.arrays)
            except NotFiniteError:  # in any row
                return self.ops.read(self.arrays[number][rows])
        return self._host[number][rows]

    def tokens(self) -> list[int | Exception]:
        """Return all tokens; an error in place of a token whose logits hold NaN."""
        try:
            return self.read(0, EVERY).tolist()
        except NotFiniteError:
            return [self._token(at) for at in range(len(self.arrays[0]))]

    def _token(self, index: int) -> int | Exception:
        try:
            return int(self.read(0, slice(index, index + 1))[0])
        except NotFiniteError as error:
            return error


class Handle:
    """One sequence's `rows` of array `number` of StepResults: the handle that a Computed gives to a decoder."""

    __slots__ = ("number", "results", "rows")

    def __init__(self, results: StepResults, rows: slice, number: int = 0):
        self.results, self.rows, self.number = results, rows, number

    def __len__(self) -> int:
        return int(self.rows.stop - self.rows.start)

    def read(self) -> np.ndarray:
        """Return the rows on the host."""
        return self.results.read(self.number, self.rows)


OF_A_JOINED_STEP = {Handle, LogitRows}


def read(ops: Ops, arrays: Sequence[Any]) -> tuple[np.ndarray, ...]:
    """Bring Handles, LogitRows and arrays of the backend to the host."""
    if len(arrays) == 1 and type(arrays[0]) is Handle:
        return (arrays[0].read(),)
    if OF_A_JOINED_STEP.isdisjoint(map(type, arrays)):
        return ops.read_all(*arrays)
    return tuple([_on_host(ops, x) for x in arrays])


def token_of(ops: Ops, handle: Any) -> int:
    """Bring the one token of a Handle or of an array of the backend to the host."""
    return int(handle.read()[0] if type(handle) is Handle else ops.read(handle)[0])


def array_of(logits: Any) -> Array:
    """Return the backend's array of LogitRows, or of logits that are one already."""
    return logits.cut() if type(logits) is LogitRows else logits


def tokens_of(ops: Ops, tokens_of_each: Sequence[Any]) -> Any:
    """Join the tokens of each of several sequences.

    The result is an array on the device if there is one sequence, or if one joined step chose all the tokens, in this
    order: the next step can then be launched before the host knows its tokens. Else it is an array on the host.
    """
    first = tokens_of_each[0]
    if len(tokens_of_each) == 1:
        return first if type(first) is not Handle else first.results.arrays[first.number][first.rows]
    if type(first) is Handle:
        results, at = first.results, 0
        for tokens in tokens_of_each:
            if type(tokens) is not Handle or tokens.results is not results or tokens.rows.start != at:
                break
            at = tokens.rows.stop
        else:
            if at == len(results.arrays[0]):
                return results.arrays[0]
    return np.concatenate([_on_host(ops, tokens) for tokens in tokens_of_each])


def _on_host(ops: Ops, x: Any) -> np.ndarray:
    if type(x) is Handle:
        return x.read()
    return x if isinstance(x, np.ndarray) else ops.read(array_of(x))
