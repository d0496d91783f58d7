"""WeDLM decoding: masked tokens of a window are filled in parallel under causal attention, one forward per step.

A window is the positions after the committed tokens: filled ones and masks. Each step computes the filled positions
first and the masks after them, so that every mask sees all filled positions; nothing else is special in the forward. A
mask row's logits predict the token of its own position. Masks whose entropy, plus a penalty for their distance from
the first mask, lies below a threshold are filled with their most likely token, and a filled position is final. The
leading run of filled positions had exactly the committed tokens before it, so its keys and values are those of a
prefill, and are committed by the same forward that fills further positions.

With the option `sure`, the same forward also confirms positions that were filled with less certainty, by the logits of
the row before each. If these predict another token, it replaces the position's token, and all later positions are
masks again.

Source: Liu et al. 2025, arXiv 2512.22737; streaming order and defaults as in the published engine.
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.decode.plain import plain, target_of
from common.decode.requests import Choose, Computed, Emit, Read, Request, Rows
from common.decode.run import DecoderRun
from common.decoders import Speculation, WedlmOptions
from common.errors import UsageError
from common.models import Model
from common.ops import Array
from common.sampling import Ahead, Sampler
from common.step import MAX_DECODE_ROWS, Step


def check(options: Speculation, model: Model, sampler: Sampler) -> None:
    """Refuse a model without a mask token, and sampling that `verify` does not serve. Raises UsageError."""
    model = target_of(model)
    if not isinstance(model, Model):
        raise UsageError("spec wedlm: a model run by mlx-lm decodes one token at a time")
    mask_id(model)
    if options.wedlm.verify and not sampler.is_argmax:
        raise UsageError("wedlm_verify gives the text of greedy decoding; leave temperature and penalties out")
    if sampler.guide is not None or sampler.sampling.reweigh is not None:
        what = "reweigh" if sampler.guide is None else "a guide"
        raise UsageError(f"spec wedlm fills masks out of order, which {what} cannot follow; choose spec off")
    if options.wedlm.checks and not sampler.is_argmax:
        raise UsageError(
            f"wedlm_sure {options.wedlm.sure:g} confirms tokens by greedy decoding; leave temperature and penalties out"
        )


def mask_id(model: Model) -> int:
    """Return the id of the mask token; UsageError for a model that was not trained with one."""
    found = getattr(model.config, "mask_id", None)
    if found is None:
        raise UsageError(f"spec wedlm needs a WeDLM checkpoint; {model.architecture} has no mask token")
    return int(found)


def most_unread(options: WedlmOptions) -> int:
    """Return how many tokens of the prompt the first step may read in addition to its masks; 0 with `verify`.

    With `verify` the prompt is read as in plain decoding: its keys and values, and therefore the text, are bitwise
    identical, even if a backend computes long steps in another order.
    """
    return 0 if options.verify else MAX_DECODE_ROWS - options.window


def decode(run: DecoderRun) -> Generator[Request, Any, None]:
    """Emit tokens and the logits rows (1, vocab) that they were chosen from; the draft of a pair is left alone."""
    check(run.options, run.model, run.sampler)
    if run.options.wedlm.verify:
        return decode_verified(run)
    return decode_windows(run)


def choose(entropies: np.ndarray, distances: np.ndarray, options: WedlmOptions) -> np.ndarray:
    """Return indices of the masks to fill: all with an adjusted entropy below tau, else the one with the least.

    entropies (n,) in nats; distances (n,) positions from the first mask.
    """
    adjusted = entropies + options.penalty * distances
    (below,) = (adjusted < options.tau).nonzero()
    return below if len(below) else np.array([int(adjusted.argmin())])


@dataclass
class _Window:
    """Positions from `base` on, numbered from 0; one is filled or a mask by its flag, whatever its token id is.

    base      the first position in the sequence; once a step has been committed, the state holds all positions before
    next      position of the next token to emit, as base
    logits    by filled position, as base: logits of a step, and the row of them from which the token was chosen
    doubtful  filled positions that are to be confirmed, as base
    """

    base: int
    next: int
    tokens: list[int] = field(default_factory=list)
    filled: list[bool] = field(default_factory=list)
    logits: dict[int, tuple[Array, int]] = field(default_factory=dict)
    doubtful: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def leading(self) -> int:
        """Count the filled positions before the first mask."""
        return self.filled.index(False) if False in self.filled else len(self)

    @property
    def settled(self) -> int:
        """Count the leading positions before the first doubtful one."""
        leading = range(self.leading)
        return next((i for i in leading if self.base + i in self.doubtful), len(leading))

    def confirm(self, following: np.ndarray, logits: Array) -> int:
        """Count leading positions up to the first doubtful one that differs from the token `following` its predecessor.

        logits  of the leading positions; a confirmed position takes the row before it as the row it was chosen from
        """
        for i in range(1, len(following)):
            if self.base + i in self.doubtful:
                if following[i - 1] != self.tokens[i]:
                    return i
                self.logits[self.base + i] = logits, i - 1
        return len(following)

    def restart(self, count: int, token: int, logits: Array) -> None:
        """Begin a new window after `count` committed positions, with `token`, which the row before it predicts."""
        self.base += count
        self.tokens, self.filled, self.logits = [token], [True], {self.base: (logits, count - 1)}
        self.doubtful.clear()

    def add(self, tokens: Sequence[int], filled: bool) -> None:
        self.tokens += tokens
        self.filled += [filled] * len(tokens)

    def emit(self, run: DecoderRun) -> Emit:
        """Return the request that outputs the next token, which then counts as emitted."""
        at, self.next = self.next, self.next + 1
        token, sampler = self.tokens[at - self.base], run.sampler
        if not sampler.is_argmax:
            sampler.numbers(1)  # take the number with which the token was drawn
        sampler.accept(token)
        run.wedlm.tokens += 1
        logits, row = self.logits.pop(at)
        return Emit(token, logits[row : row + 1])

    def drop(self, count: int) -> None:
        """Remove the first `count` positions, which have been committed."""
        self.base += count
        del self.tokens[:count], self.filled[:count]

    def fill(self, i: int, token: int, logits: Array, row: int) -> None:
        """Put `token`, chosen from a row of `logits`, in place of a mask."""
        self.tokens[i], self.filled[i] = token, True
        self.logits[self.base + i] = logits, row

    def step(self) -> tuple[Step, list[int]]:
        """Return the rows of a forward, and the positions that are masks, whose rows are the last."""
        known = [i for i, filled in enumerate(self.filled) if filled]
        masks = [i for i, filled in enumerate(self.filled) if not filled]
        order = known + masks
        tokens, positions = np.array([self.tokens[i] for i in order], np.int32), np.array(order, np.int32)
        parents = np.arange(-1, len(order) - 1, dtype=np.int32)
        return Step(tokens, self.base + positions, parents, np.zeros(len(order), np.int32)), masks


def decode_windows(run: DecoderRun) -> Generator[Request, Any, None]:
    """Emit tokens until the state is full or the driver stops. Each turn of the loop is one step of the model.

    1. Masks are added to the window, and the step computes its filled positions and its masks. The first step also
       reads the prompt's unread tokens, as filled positions.
    2. The filled positions before the first mask are final. With the option `sure`, those up to one that is not
       confirmed are.
    3. Final tokens that have not been emitted are emitted, and the final positions committed.
    4. Masks that the model is sure of are filled; where a position was not confirmed, the window begins anew with it.
    5. Positions that are final by now, though not committed, are emitted. Where the backend runs ahead, part 3 of the
       next turn emits them instead: the device computes the next step while the host prints.

    The token after the last position of the state, where a mask has no room, is chosen as in plain decoding. When the
    generator is closed, the state holds a prefix of prompt and reply.
    """
    state, options, stats, mask = run.state, run.options.wedlm, run.wedlm, mask_id(run.model)
    runs_ahead = run.model.ops.runs_ahead and not options.checks  # with `sure`, what is final is known after a step
    window, unread = (yield from _opened(run)), len(run.unread)
    first = window.next  # position of the reply
    logits, token = run.logits, None
    while window.next < state.capacity:
        started = time.perf_counter()
        leading, prompt = window.leading, unread if window.base < first else 0
        size = options.window + (leading if options.order == "streaming" or window.base < first else 0)
        window.add([mask] * (min(size, state.capacity - window.base) - len(window)), False)
        step, masks = window.step()
        done, ahead = yield from _computed(run, window, step, masks)
        computed = time.perf_counter()
        final, following = (yield from _confirmed(run, window, done)) if options.checks else (leading, None)
        if not runs_ahead:
            stats.count_step(len(step) - prompt, computed - started)
        yield from _emit_and_commit(run, window, final)
        if runs_ahead:  # the step was in flight until now
            stats.count_step(len(step) - prompt, computed - started)
        committed = time.perf_counter()
        is_full = not masks and state.length < state.capacity  # in the paper's order
        restarts = following is not None and (final < leading or is_full)
        if restarts:
            assert following is not None
            window.restart(final, following, done.logits)
        elif following is not None and masks:
            yield from _fill_checked(run, window, masks, done, following)
        elif masks:
            yield from _fill(run, window, masks, done, ahead)
        if not restarts:
            window.drop(leading)
        chosen = time.perf_counter()
        stats.fills += bool(masks) or restarts
        stats.seconds["choice"] += chosen - committed
        if not runs_ahead or window.base + window.leading >= state.capacity:
            yield from _emit_settled(run, window)
        if not len(window):
            logits = done.logits[final - 1 : final]
    if len(window):
        logits, token = yield from _compute_last(run, window, unread if window.base < first else 0)
    stats.tokens += 1
    yield from plain(run, logits, token=token)


def _opened(run: DecoderRun) -> Generator[Request, Any, _Window]:
    """Return the first window: the prompt's unread tokens or, with the option `sure`, the first token of the reply."""
    state, unread = run.state, list(run.unread)
    window = _Window(state.length, state.length + len(unread), unread, [True] * len(unread))
    if run.options.wedlm.checks and not unread and state.length < state.capacity:
        (values,) = yield Read(((yield Choose(run.logits, run.sampler)),))
        window.add([int(values[0])], True)
        window.logits[window.base] = run.logits, 0
    return window


def _confirmed(run: DecoderRun, window: _Window, done: Computed) -> Generator[Request, Any, tuple[int, int]]:
    """Read what follows each leading position; return how many of them are final, and the token after these."""
    started = time.perf_counter()
    (best,) = yield Read((done.sampled,))
    final = window.confirm(best, done.logits)
    run.wedlm.seconds["choice"] += time.perf_counter() - started
    return final, int(best[final - 1])


def _compute_last(run: DecoderRun, window: _Window, prompt: int) -> Generator[Request, Any, tuple[Any, Any]]:
    """Compute and commit the last positions of the state, which are filled; return what `plain` goes on from.

    prompt  tokens of the prompt among them
    """
    started, stats = time.perf_counter(), run.wedlm
    step, _ = window.step()
    done = yield Rows(step, run.sampler, slice(len(step) - 1, len(step)), target_only=True)
    run.state.commit(np.arange(len(step)))
    stats.count_step(len(step) - prompt, time.perf_counter() - started)
    stats.fills += 1
    return done.logits[-1:], done.sampled


def _emit_and_commit(run: DecoderRun, window: _Window, final: int) -> Generator[Request, Any, None]:
    """Emit those of the first `final` positions that have not been emitted, and commit all of them.

    If the generator is closed at an Emit, the positions before the emitted one are committed.
    """
    seconds, started, committed = run.wedlm.seconds, time.perf_counter(), final
    try:
        while window.next < window.base + final:
            committed = window.next - window.base
            yield window.emit(run)
        committed = final
    finally:
        emitted = time.perf_counter()
        run.state.commit(np.arange(committed))
    seconds["host"] += emitted - started
    seconds["commit"] += time.perf_counter() - emitted


def _emit_settled(run: DecoderRun, window: _Window) -> Generator[Request, Any, None]:
    """Emit the tokens of settled positions, which a later step commits."""
    started = time.perf_counter()
    try:
        for _ in range(window.next - window.base, window.settled):
            yield window.emit(run)
    finally:
        run.wedlm.seconds["host"] += time.perf_counter() - started


def _computed(
    run: DecoderRun, window: _Window, step: Step, masks: Sequence[int]
) -> Generator[Request, Any, tuple[Computed, Ahead | None]]:
    """Compute a window's step; also return what samples its masks, None for greedy decoding."""
    rows = slice(len(step) - len(masks), len(step))
    mask, sampler = mask_id(run.model), run.sampler
    if run.options.wedlm.checks:
        run_of = slice(0, window.leading)
        return (yield Rows(step, sampler, run_of, mask if masks else None, rows, target_only=True)), None
    if not masks:
        return (yield Rows(step, target_only=True)), None
    if sampler.is_argmax:
        return (yield Rows(step, mask=mask, masked=rows, target_only=True)), None
    ahead = Ahead(sampler, window.base + np.asarray(masks) - window.next)  # a position draws with its own number always
    chooser = ahead if run.model.ops.chooses(sampler) else None
    return (yield Rows(step, chooser, rows, mask, rows, target_only=True)), ahead


def _fill(
    run: DecoderRun, window: _Window, masks: Sequence[int], done: Computed, ahead: Ahead | None
) -> Generator[Request, Any, None]:
    """Fill the masks that the options choose; `masks` are positions, and the last rows of the step."""
    positions, first = np.asarray(masks), len(done.logits) - len(masks)
    best, entropies = yield Read(done.masked)
    chosen = choose(entropies, positions - positions[0], run.options.wedlm)
    if ahead is not None and done.sampled is not None:
        (best,) = yield Read((done.sampled,))
    elif ahead is not None:
        (host,) = yield Read((done.logits[first:],))
        best = np.array([ahead.pick(row) for row in host])
    for j in chosen.tolist():
        window.fill(masks[j], int(best[j]), done.logits, first + j)


def _fill_checked(
    run: DecoderRun, window: _Window, masks: Sequence[int], done: Computed, following: int
) -> Generator[Request, Any, None]:
    """Fill the first mask and the masks that the options choose; a fill is doubtful if the model was not sure of it.

    following  the most probable token after the leading run, which the first mask takes unless its own row is sure.
               If they differ, all other fills are doubtful, because their rows expected another token.
    """
    options, positions, first = run.options.wedlm, np.asarray(masks), len(done.logits) - len(masks)
    best, entropies = yield Read(done.masked)
    last = window.leading
    if entropies[0] < options.sure:
        window.fill(masks[0], int(best[0]), done.logits, first)
    else:
        window.fill(masks[0], following, done.logits, last - 1)
    differs = window.tokens[masks[0]] != best[0]
    below = np.flatnonzero(entropies + options.penalty * (positions - positions[0]) < options.tau)
    for j in below[below > 0].tolist():
        window.fill(masks[j], int(best[j]), done.logits, first + j)
        if differs or entropies[j] >= options.sure:
            window.doubtful.add(window.base + masks[j])


def decode_verified(run: DecoderRun) -> Generator[Request, Any, None]:
    """Emit the tokens of plain greedy decoding, with the model's own masks as the draft.

    The rows of a step are the newest token, the draft, and masks after the draft. The next-token logits of the newest
    token and of each confirmed draft token confirm the draft token after it, or replace it and end the step; a step
    thus gives one token more than it confirms. If the whole draft was confirmed, the tokens that the masks predict,
    up to the first entropy of tau, are the next draft.
    """
    state, sampler, options, stats = run.state, run.sampler, run.options.wedlm, run.wedlm
    mask = mask_id(run.model)
    first = yield Choose(run.logits, sampler)
    (values,) = yield Read((first,))
    token = int(values[0])
    sampler.accept(token)
    stats.tokens += 1
    yield Emit(token, run.logits)
    draft: list[int] = []
    while state.length < state.capacity:
        started = time.perf_counter()
        room = state.capacity - state.length - 1
        draft = draft[:room]
        masks = min(options.window, room - len(draft))
        tokens = np.array([token, *draft, *[mask] * masks], np.int32)
        head, step = 1 + len(draft), Step.chain(tokens, state.length)
        at = slice(head, len(tokens))
        done = yield Rows(step, sampler, slice(0, head), mask if masks else None, at, target_only=True)
        rows, computed = done.logits, time.perf_counter()
        (best,) = yield Read((done.sampled,))
        predicted, entropies = (yield Read(done.masked)) if masks else ((), np.empty(0))
        chosen = time.perf_counter()
        kept = 0
        try:
            while True:
                token = int(best[kept])
                kept += 1
                sampler.accept(token)
                stats.tokens += 1
                yield Emit(token, rows[kept - 1 : kept])
                if kept > len(draft) or draft[kept - 1] != token:
                    break
        finally:
            yielded = time.perf_counter()
            state.commit(np.arange(kept))
            stats.count_step(len(tokens), computed - started)
            stats.fills += 1
            stats.seconds["choice"] += chosen - computed
            stats.seconds["host"] += yielded - chosen
            stats.seconds["commit"] += time.perf_counter() - yielded
        below = int(np.argmax(np.append(entropies, np.inf) >= options.tau))  # masks before the first entropy of tau
        draft = [int(t) for t in predicted[1:below]] if kept == head else []
