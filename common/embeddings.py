"""Compute the embedding of a text: hidden states after the model's last norm, of one token or averaged."""

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np

from common.checks import check_fits, check_tokens
from common.errors import UsageError
from common.models import Model
from common.ops import Array, Ops
from common.pooling import LAST, Pooling
from common.step import State, Step


class _NoHead:
    """The ops of a backend without the head's product: `forward` returns the hidden states after the last norm."""

    def __init__(self, model: Model):
        self._ops, weights = model.ops, model.weights
        self._head = weights.embed if weights.head is None else weights.head
        self._hidden: Array | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def linear(self, x: Array, weight: Any) -> Array:
        if weight is not self._head:
            return self._ops.linear(x, weight)
        self._hidden = self._ops.keep(x)
        return self._hidden

    def scale(self, x: Array, factor: float) -> Array:
        return x if x is self._hidden else self._ops.scale(x, factor)  # a scale of logits

    def all_gather(self, x: Array, columns: int) -> Array:
        return x  # each rank has all of the hidden state


def embed(model: Model, tokens: Sequence[int], context: int, pooling: Pooling) -> Generator[None, None, np.ndarray]:
    """Compute the embedding of `tokens`, read from an empty state: (hidden,) float32.

    Between two `yield`s one step of the model is computed. Raises UsageError for models that mlx-lm runs.
    """
    ids = check_tokens(tokens, model.config.vocab)
    check_fits(len(ids), context, model.config.context)
    state = empty_state(model, len(ids))
    total = np.zeros(model.config.hidden)
    for hidden in hidden_states(model, state, ids):
        total = hidden[-1] if pooling.tokens == LAST else total + hidden.sum(axis=0) / len(ids)
        yield
    return (total / max(float(np.linalg.norm(total)), 1e-12) if pooling.has_unit else total).astype(np.float32)


def empty_state(model: Model, capacity: int) -> State:
    """Make a state for `hidden_states`, beside the slots; raises UsageError for models that mlx-lm runs."""
    if not isinstance(model, Model):
        raise UsageError("models that mlx-lm runs do not show their hidden states; use one that bimetal defines")
    return model.ops.new_state(model.state_spec, capacity)  # without the layers of a draft


def hidden_states(model: Model, state: State, ids: Sequence[int]) -> Iterator[np.ndarray]:
    """Read `ids` into a state, and yield the hidden states after the last norm of each step: (T, hidden) float64."""
    ops: Any = _NoHead(model)

    def run(state: State, step: Step) -> Array:
        return model.definition.forward(ops, model.config, model.weights, state, step)

    for at in range(0, len(ids), Ops.prefill_rows):
        chunk = np.asarray(ids[at : at + Ops.prefill_rows], np.int32)
        step = Step.of_prompt(chunk, state.length, model.ops.short_rows)
        hidden = model.ops.read(model.ops.run(run, state, step))[: len(step)].astype(np.float64)
        state.commit_prompt(step)
        yield hidden
