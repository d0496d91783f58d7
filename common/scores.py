"""Compute the logits after each token of a text, and the text's log-probabilities.

The generators of this module compute one step, or a part of one, between two `yield`s, and return the result. At a
`yield` the engine can generate replies: a text is read into a state of its own.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import TypeVar

import numpy as np

from common.checks import check_fits, check_head, check_tokens
from common.models import Model
from common.ops import Ops
from common.pieces import Logprob
from common.step import Step

T = TypeVar("T")
PREFILL_ROWS = Ops.prefill_rows  # rows of a step of which all logits are read
SCORED = 1 << 20  # logits that the host converts to log-probabilities at a time


def completed(steps: Generator[None, None, T]) -> T:
    """Run a generator to its end, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value


def logits_of(
    model: Model, tokens: Sequence[int], context: int, last: int | None = None
) -> Generator[None, None, np.ndarray]:
    """Compute the logits after each of `tokens`, read from an empty state: (T, vocab) float32.

    last  only the logits after the last `last` tokens; None: all
    """
    read: list[np.ndarray] = []
    for rows in _steps(model, tokens, context, last):
        read.append(rows)
        yield
    return np.concatenate(read)


def score(model: Model, tokens: Sequence[int], context: int, top: int = 0) -> Generator[None, None, list[Logprob]]:
    """Score each of `tokens` but the first by its log-probability after the previous ones, with `top` alternatives."""
    scores: list[Logprob] = []
    most = max(SCORED // model.config.vocab, 1)
    for rows in _steps(model, tokens, context):
        for part in np.split(rows, range(most, len(rows), most)):
            following = tokens[len(scores) + 1 : len(scores) + 1 + len(part)]
            scores += [Logprob.of(row, token, top) for row, token in zip(part, following, strict=False)]
            yield
    return scores


def _steps(model: Model, tokens: Sequence[int], context: int, last: int | None = None) -> Iterator[np.ndarray]:
    """Yield the logits after the `last` of `tokens`, read from an empty state, a step of rows (T, vocab) at a time."""
    check_head(model.config)
    ids = check_tokens(tokens, model.config.vocab)
    check_fits(len(ids), context, model.config.context)
    first = 0 if last is None else max(len(ids) - last, 0)
    state = model.new_state(len(ids))  # whose memory lies beside that of the slots
    for at in range(0, len(ids), PREFILL_ROWS):
        chunk = np.asarray(ids[at : at + PREFILL_ROWS], np.int32)
        step = Step.of_prompt(chunk, at, model.ops.short_rows)
        skipped = min(max(first - at, 0), len(chunk))
        logits = model.forward(state, step, slice(skipped, len(chunk)) if skipped else slice(None))
        found = model.ops.read(logits) if skipped < len(chunk) else np.zeros((0, model.config.vocab), np.float32)
        state.commit_prompt(step)  # before steps of other states
        yield found
