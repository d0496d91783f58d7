"""Plain autoregressive decoding: one row per step."""

from collections.abc import Generator
from typing import Any, Protocol

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


class StretchPlan(Protocol):
    """Divides plain decoding into stretches of tokens, each of which one request covers if the backend runs ahead.

    first_steps  tokens before the first call of `next_steps`
    read         list to which tokens are appended as they are read
    """

    first_steps: int
    read: list[int]

    def next_steps(self) -> int:
        """Return the number of tokens after one that is about to be read until the next call; -1 to end after it."""

    def steps_reconsidered(self) -> int:
        """Return the number of tokens until the next call of `next_steps`, where the run reconsiders."""

    def on_stretch_read(self) -> None:
        """Note that a token for which `next_steps` was called has been read."""


def plain(
    run: DecoderRun, logits: Array, token: Any = None, plan: StretchPlan | None = None
) -> Generator[Request, Any, None]:
    """Emit a token per step until the state is full, the driver stops, or `plan` ends it.

    If the backend runs ahead, and `run` may, the next step is requested before the host has read its token: the device
    computes the step while the host reads and prints the token.

    logits  logits of the last prompt row. The state holds all tokens but the newest, so that a driver may stop
            after any token and continue later
    token   handle of the token that was chosen from `logits`; None: it is chosen first
    plan    None: one stretch without an end
    """
    ops, state, sampler = run.model.ops, run.state, run.sampler
    runs_ahead = ops.runs_ahead and ops.chooses(sampler)
    if token is None:
        token = yield Choose(logits, sampler)
    left, read = (state.capacity, None) if plan is None else (plan.first_steps, plan.read)
    while True:
        if run.reconsiders:
            left = 0 if plan is None else plan.steps_reconsidered()
        if left and runs_ahead and run.runs_ahead and state.length < state.capacity:
            # the sampler counts no tokens: one that does is not the backend's to apply
            stretch = Stretch(run, token, logits, left, read)
            token = logits = ahead = None  # else they would keep the logits before the stretch
            yield stretch
            token, logits, left = stretch.token, stretch.row, stretch.remaining
            del stretch
        ahead, is_due, is_last = None, not left, False
        if left:
            left -= 1
        elif plan is not None:
            left = plan.next_steps()
            is_last = left < 0
        if runs_ahead and run.runs_ahead and not is_last and state.length < state.capacity:
            ahead = yield Rows(Step.chain(token, state.length), sampler, target_only=True)
        (values,) = yield Read((token,))
        value = int(values[0])
        sampler.accept(value)
        if read is not None:
            read.append(value)
        if is_due and plan is not None:
            plan.on_stretch_read()
        yield Emit(value, logits)
        if is_last or state.length >= state.capacity:
            return
        if ahead is None:
            ahead = yield Rows(Step.chain(values, state.length), sampler, target_only=True)
        state.commit(THE_ROW)
        logits, token = ahead.logits, ahead.sampled
