"""Run one decoder over one state, and answer its requests one after another."""

from collections.abc import Generator
from typing import Any

import numpy as np

from common.decode.plain import target_of
from common.decode.registry import decode
from common.decode.requests import EVERY, Choose, Computed, Draft, DraftStretch, Emit, Read, Rows, Stretch
from common.decode.run import DecoderRun
from common.models import Model
from common.models.pair import Pair
from common.ops import Array, Ops
from common.step import State


def run_alone(run: DecoderRun) -> Generator[tuple[int, Array], None, None]:
    """Yield (token, the logits row (1, vocab) it was chosen from) until the state is full or the caller stops."""
    decoder = decode(run)
    answer: Any = None
    try:
        while True:
            request = decoder.send(answer)
            if type(request) is Emit:
                yield request
                answer = None
            elif type(request) is Stretch:
                yield from _tokens(run, request)
                answer = None
            elif type(request) is DraftStretch:
                answer = None  # declined
            else:
                answer = answered(run.model, run.state, request)
    except StopIteration:
        return
    finally:
        decoder.close()


def _tokens(run: DecoderRun, stretch: Stretch) -> Generator[Emit, None, None]:
    """Yield the tokens of a stretch."""
    while True:
        done = answered(run.model, run.state, stretch.rows())
        token = int(run.model.ops.read(stretch.token)[0])
        stretch.note(token)
        yield Emit(token, stretch.row)
        if not stretch.goes_on(done):
            return


def answered(model: Model, state: State, request: Any) -> Any:
    """Answer a request of a decoder other than an Emit or a Stretch."""
    ops, kind = model.ops, type(request)
    if kind is Read:
        return ops.read_all(*request.arrays)
    if kind is Rows:
        runs = target_of(model) if request.target_only else model
        return computed(ops, runs.forward(state, request.step), request)
    if kind is Choose:
        return ops.sample(request.logits, request.sampler)
    return drafted(model, state, request)


def computed(ops: Ops, logits: Array, rows: Rows) -> Computed:
    """Choose the tokens that `rows` requests from the logits (T, vocab) of a step."""
    sampled: Array = None
    masked: tuple[Array, ...] = ()
    if rows.sampler is not None:
        sampled = ops.sample(logits if rows.sampled == EVERY else logits[rows.sampled], rows.sampler)
    if rows.mask is not None:
        masked = ops.argmax_entropy(logits[rows.masked], rows.mask)
    return Computed(logits, sampled, masked)


def drafted(model: Model, state: State, request: Draft) -> tuple[np.ndarray, ...]:
    """Answer a Draft: the most probable tokens of each position, and their log-probabilities, (n, k) each."""
    assert isinstance(model, Pair)
    return model.drafted(state, request.token, request.k, request.depth, request.coupling)
