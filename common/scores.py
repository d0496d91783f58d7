"""The logits after each token of a text, and the text's log-probabilities."""

import threading
from collections.abc import Iterator, Sequence

import numpy as np

from common.checks import check_fits, check_tokens
from common.models import Model
from common.ops import Ops
from common.pieces import Logprob
from common.step import Step

PREFILL_ROWS = Ops.prefill_rows  # rows of a step of which all logits are read


def logits_of(model: Model, tokens: Sequence[int], context: int) -> np.ndarray:
    """The logits after each of `tokens`, read from an empty state: (T, vocab) float32."""
    return np.concatenate(list(_steps(model, tokens, context)))


def score(
    model: Model, tokens: Sequence[int], context: int, top: int, cancel: threading.Event | None = None
) -> list[Logprob]:
    """Score each of `tokens` but the first, after those before it, with the `top` best alternatives.

    cancel  ends the scores at the next step
    """
    scores: list[Logprob] = []
    for rows in _steps(model, tokens, context):
        if cancel is not None and cancel.is_set():
            break
        following = tokens[len(scores) + 1 : len(scores) + 1 + len(rows)]
        scores += [Logprob.of(row, token, top) for row, token in zip(rows, following, strict=False)]
    return scores


def _steps(model: Model, tokens: Sequence[int], context: int) -> Iterator[np.ndarray]:
    """Yield the logits after each of `tokens`, read from an empty state, a step of rows (T, vocab) at a time."""
    ids = check_tokens(tokens, model.config.vocab)
    check_fits(len(ids), context, model.config.context)
    state = model.new_state(len(ids))  # whose memory lies beside that of the slots
    for at in range(0, len(ids), PREFILL_ROWS):
        chunk = np.asarray(ids[at : at + PREFILL_ROWS], np.int32)
        yield model.ops.read(model.forward(state, Step.chain(chunk, at)))
        state.commit(np.arange(len(chunk)))
