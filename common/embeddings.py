"""Compute the embedding of a text: hidden states after the model's last norm, of one token or averaged, of length 1."""

import json
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from common.checkpoint import Checkpoint
from common.checks import check_fits, check_tokens
from common.errors import BimetalError, UsageError
from common.models import Model
from common.ops import Array, Ops
from common.step import State, Step

LAST, MEAN = "last", "mean"
POOLINGS = (LAST, MEAN)
GGUF_POOLINGS = {1: MEAN, 3: LAST}  # ARCHITECTURE.pooling_type


class _NoHead:
    """The ops of a backend without the head's product: `forward` returns the hidden states after the last norm."""

    def __init__(self, model: Model):
        self._ops, weights = model.ops, model.weights
        self._head = weights.embed if weights.head is None else weights.head

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def linear(self, x: Array, weight: Any) -> Array:
        return self._ops.keep(x) if weight is self._head else self._ops.linear(x, weight)

    def all_gather(self, x: Array, columns: int) -> Array:
        return x  # each rank has all of the hidden state


def embed(model: Model, tokens: Sequence[int], context: int, pooling: str) -> Generator[None, None, np.ndarray]:
    """Compute the embedding of `tokens`, read from an empty state: (hidden,) float32 of length 1.

    Between two `yield`s one step of the model is computed. Raises UsageError for models that mlx-lm runs.

    pooling  "last": of the last token; "mean": of all, averaged before the length is made 1
    """
    if not isinstance(model, Model):
        raise UsageError("models that mlx-lm runs do not show their hidden states; use one that bimetal defines")
    ids = check_tokens(tokens, model.config.vocab)
    check_fits(len(ids), context, model.config.context)
    ops: Any = _NoHead(model)

    def run(state: State, step: Step) -> Array:
        return model.definition.forward(ops, model.config, model.weights, state, step)

    state = model.ops.new_state(model.state_spec, len(ids))  # without the layers of a draft
    total = np.zeros(model.config.hidden)
    for at in range(0, len(ids), Ops.prefill_rows):
        step = Step.of_prompt(np.asarray(ids[at : at + Ops.prefill_rows], np.int32), at, model.ops.short_rows)
        hidden = model.ops.read(model.ops.run(run, state, step))[: len(step)].astype(np.float64)
        state.commit_prompt(step)
        total = hidden[-1] if pooling == LAST else total + hidden.sum(axis=0)
        yield
    return (total / max(float(np.linalg.norm(total)), 1e-12)).astype(np.float32)


def stated_pooling(checkpoint: Checkpoint) -> str:
    """Return the pooling that a model's files state; without a statement that of the last token, as in vLLM.

    They state it in a GGUF file by ARCHITECTURE.pooling_type, in a folder by 1_Pooling/config.json. Raises BimetalError
    for poolings that are not supported.
    """
    if checkpoint.format == "gguf":
        stated = checkpoint.config.get(f"{checkpoint.config.get('general.architecture')}.pooling_type", 3)
        if stated not in GGUF_POOLINGS:
            raise BimetalError(
                f"{checkpoint.path}: pooling_type is {stated!r:.40}; 1 (mean) and 3 (last) are supported"
            )
        return GGUF_POOLINGS[stated]
    file = checkpoint.path / "1_Pooling" / "config.json"
    if not file.is_file():
        return LAST
    try:
        stated = json.loads(file.read_text(encoding="utf-8"))
        modes = {key.removeprefix("pooling_mode_") for key, is_on in stated.items() if is_on is True}
    except (ValueError, AttributeError) as error:
        raise BimetalError(f"{file} cannot be read: {error}") from None
    found = {"lasttoken": LAST, "mean_tokens": MEAN}
    chosen = modes & {"cls_token", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", *found}
    if len(chosen) != 1 or not chosen <= found.keys():
        raise BimetalError(f"{file} states {', '.join(sorted(chosen)) or 'no pooling'}; supported: {', '.join(found)}")
    return found[chosen.pop()]
