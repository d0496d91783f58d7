"""Plain autoregressive decoding: one row per step."""

from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from common.decode.requests import THE_ROW, Choose, Emit, Read, Request, Rows, Stretch
from common.decode.run import DecoderRun
from common.models import Model
from common.models.pair import Pair
from common.ops import Array
from common.step import Step


def decode(run: DecoderRun) -> Generator[Request, Any, None]:
    """Decode without draft tokens, even if a draft is loaded. The first step reads the prompt's unread token."""
    if not run.unread:
        yield from plain(run, run.logits)
        return
    first = yield Rows(Step.chain(np.array(run.unread, np.int32), run.state.length), run.sampler, target_only=True)
    run.state.commit(THE_ROW)
    yield from plain(run, first.logits, token=first.sampled)


def target_of(model: Model) -> Model:
    """Return the model for steps that need not write rows for a draft."""
    return model.target if isinstance(model, Pair) else model


def plain(
    run: DecoderRun,
    logits: Array,
    next_steps: Callable[[], int] | None = None,
    on_stretch_read: Callable[[], None] | None = None,
    read: list[int] | None = None,
    token: Any = None,
) -> Generator[Request, Any, None]:
    """Emit a token per step until the state is full or the driver stops.

    If the backend runs ahead, and `run` may, the next step is requested before the host has read its token: the device
    computes the step while the host reads and prints the token. If `next_steps` need not be called, one request
    covers several tokens.

    logits           logits of the last prompt row. The state holds all tokens but the newest, so that a driver may stop
                     after any token and continue later
    next_steps       function that is called before a token is read, first for the first token; returns the number of
                     tokens after it until the next call, or -1 to end the generator after it; None: no end
    on_stretch_read  function that is called when a token for which `next_steps` was called has been read
    read             list to which tokens are appended as they are read
    token            handle of the token that was chosen from `logits`; None: it is chosen first
    """
    ops, state, sampler = run.model.ops, run.state, run.sampler
    runs_ahead = ops.runs_ahead and ops.chooses(sampler)
    if token is None:
        token = yield Choose(logits, sampler)
    left = 0 if next_steps is not None else run.state.capacity
    while True:
        if run.reconsiders:
            left = 0
        if left and runs_ahead and run.runs_ahead and state.length < state.capacity:
            # the sampler counts no tokens: one that does is not the backend's to apply
            stretch = Stretch(run, token, logits, left, read)
            token = logits = ahead = None  # else they would keep the logits before the stretch
            yield stretch
            token, logits, left = stretch.token, stretch.row, 0 if run.reconsiders else stretch.remaining
            del stretch
        ahead, is_due, is_last = None, not left, False
        if left:
            left -= 1
        elif next_steps is not None:
            left = next_steps()
            is_last = left < 0
        if runs_ahead and run.runs_ahead and not is_last and state.length < state.capacity:
            ahead = yield Rows(Step.chain(token, state.length), sampler, target_only=True)
        (values,) = yield Read((token,))
        value = int(values[0])
        sampler.accept(value)
        if read is not None:
            read.append(value)
        if is_due and on_stretch_read is not None:
            on_stretch_read()
        yield Emit(value, logits)
        if is_last or state.length >= state.capacity:
            return
        if ahead is None:
            ahead = yield Rows(Step.chain(values, state.length), sampler, target_only=True)
        state.commit(THE_ROW)
        logits, token = ahead.logits, ahead.sampled
