"""How much the last tokens of a text attend to each of its tokens, as a model's full attention layers have it."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from common.checks import check_fits, check_tokens
from common.errors import BimetalError, UsageError
from common.models import Model
from common.ops import Ops
from common.step import State, Step


class _Tap:
    """The ops of a backend, whose attention also keeps the keys of all rows and the queries of the latest ones.

    keys     (rows, key heads, width) float16 per step, of each layer that attends to all positions
    queries  (rows, heads, width) float32 of the latest step, and the scale of their products, of each such layer
    """

    def __init__(self, ops: Ops):
        self._ops = ops
        self.keys: list[list[np.ndarray]] = []
        self.queries: list[tuple[np.ndarray, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def attention(
        self, q: Any, k: Any, v: Any, kv: Any, step: Step, scale: float, window: int | None = None, causal: bool = False
    ) -> Any:
        if window is None:
            at = len(self.queries)
            self.queries.append((np.asarray(self._ops.read(q), np.float32), scale))
            if at == len(self.keys):
                self.keys.append([])
            self.keys[at].append(np.asarray(self._ops.read(k), np.float16))
        return self._ops.attention(q, k, v, kv, step, scale, window, causal)


def attention_to(
    model: Model, tokens: Sequence[int], queries: int, context: int, cancel: threading.Event | None = None
) -> np.ndarray:
    """The share of attention that the last `queries` of `tokens` give to each: (T,) float32.

    Of each query the largest share of any layer and head counts; the shares of the queries are averaged. Raises
    UsageError for a model without such layers, and BimetalError when `cancel` is set.
    """
    if not isinstance(model, Model):
        raise UsageError("models that mlx-lm runs do not show their attention; use one that bimetal defines")
    ids = check_tokens(tokens, model.config.vocab)
    check_fits(len(ids), context, model.config.context)
    tap, state, at = _Tap(model.ops), model.new_state(context), 0
    first = max(len(ids) - queries, 0)
    while at < len(ids):
        if cancel is not None and cancel.is_set():
            raise BimetalError("the request was cancelled while its prompt was compressed")
        end = len(ids) if at >= first else min(at + model.ops.prefill_rows, first)
        _read(model, tap, state, Step.chain(np.asarray(ids[at:end], np.int32), at))
        at = end
    if not tap.keys:
        raise UsageError(f"{model.architecture} has no layers whose attention could score a prompt; use another model")
    best = np.zeros((len(ids) - first, len(ids)), np.float32)
    for parts, (q, scale) in zip(tap.keys, tap.queries, strict=True):
        best = np.maximum(best, _shares(q, np.concatenate(parts).astype(np.float32), scale))
    return best.mean(axis=0)


def _read(model: Model, tap: _Tap, state: State, step: Step) -> None:
    """Run one step under the tap, without logits, and commit it."""
    tap.queries.clear()
    ops: Any = tap
    model.definition.forward(ops, model.config, model.weights, state, step, slice(0, 0))
    state.commit(np.arange(len(step)))


def _shares(q: np.ndarray, keys: np.ndarray, scale: float) -> np.ndarray:
    """The largest softmax share of any head: of the last rows q (Q, H, D) for each of keys (T, K, D): (Q, T)."""
    (Q, H, D), (T, K, _) = q.shape, keys.shape
    logits = np.einsum("qkgd,tkd->qkgt", q.reshape(Q, K, H // K, D), keys, optimize=True).reshape(Q, H, T)
    hidden = np.arange(T) > np.arange(T - Q, T)[:, None]
    logits = np.where(hidden[:, None], -np.inf, np.float32(scale) * logits)
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return (shares / shares.sum(axis=-1, keepdims=True)).max(axis=1)
