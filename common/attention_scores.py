"""Compute the attention of the last tokens of a text to each of its tokens, in a model's layers of full attention."""

import threading
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from common.amounts import counted
from common.block_sparse import BLOCK
from common.checks import check_fits, check_tokens
from common.errors import BimetalError, UsageError
from common.models import Model
from common.ops import Array, Ops
from common.step import State, Step

FULL = 2 * BLOCK  # last tokens of a text, which attend to all keys: a score needs all of their attention
ROWS = 1024  # most tokens of a step: the keys of all layers stay on the device until it ends


class _Tap:
    """The ops of a backend, whose attention also keeps keys and queries of layers that attend to all positions.

    Layers with sink logits are not among them.

    sparse         those layers may leave out keys
    keys, queries  of each such layer, (rows, key heads, width) and (rows, heads, width), on the device
    scales         of their products
    """

    def __init__(self, ops: Ops, sparse: bool):
        self._ops, self.sparse = ops, sparse
        self.keys: list[Array] = []
        self.queries: list[Array] = []
        self.scales: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        kv: Any,
        step: Step,
        scale: float,
        window: int | None = None,
        causal: bool = False,
        sink_logits: Any = None,
    ) -> Any:
        if window is None and sink_logits is None:  # whose shares do not sum up to 1
            self.queries.append(self._ops.keep(q))
            self.keys.append(self._ops.keep(k))
            self.scales.append(scale)
            if self.sparse:
                return self._ops.block_sparse_attention(q, k, v, kv, step, scale)
        return self._ops.attention(q, k, v, kv, step, scale, window, causal, sink_logits)


def attention_to(
    model: Model, tokens: Sequence[int], queries: int, context: int, cancel: threading.Event | None = None
) -> Generator[None, None, np.ndarray]:
    """Compute the share of attention that the last `queries` of `tokens` give to each: (T,) float32.

    Between two `yield`s one step of the model, or the shares of one layer, are computed.

    A token's share is the mean over the queries of the largest share in any layer and head. The model runs on its
    backend, where all rows but the last FULL may leave out keys; the host computes the shares, from keys in float16.
    Raises UsageError for a model without such layers or with tensor parallelism, and BimetalError when `cancel` is set.
    """
    if not isinstance(model, Model):
        raise UsageError("models that mlx-lm runs do not show their attention; use one that bimetal defines")
    if model.ops.ranks.size > 1:
        raise UsageError(f"{model.ops.ranks.size} ranks share each layer, and none has all heads; score with one GPU")
    ids = check_tokens(tokens, model.config.vocab)
    check_fits(len(ids), context, model.config.context)
    state, at, rows = model.new_state(len(ids)), 0, min(model.ops.prefill_rows, ROWS)
    first, sparse = max(len(ids) - queries, 0), max(len(ids) - FULL, 0)
    parts: list[list[np.ndarray]] = []  # of each step, the keys of each layer
    while at < len(ids):
        if cancel is not None and cancel.is_set():
            raise BimetalError(f"attention_to was cancelled after it read {at} of {counted(len(ids), 'token')}")
        end = len(ids) if at >= first else min(at + rows, sparse if at < sparse else first)
        step = Step.chain(np.asarray(ids[at:end], np.int32), at)
        asked, keys, scales = _read(model, state, step, end <= sparse, end == len(ids))
        parts.append([key.astype(np.float16) for key in keys])
        at = end
        yield
    if not scales:
        raise UsageError(f"{model.architecture} has no layers whose attention could score a prompt; use another model")
    best = np.zeros((len(ids) - first, len(ids)), np.float32)
    for q, layer, scale in zip(asked, zip(*parts, strict=True), scales, strict=True):
        best = np.maximum(best, _shares(q, np.concatenate(layer).astype(np.float32), scale))
        yield
    return best.mean(axis=0)


def _read(
    model: Model, state: State, step: Step, sparse: bool, asks: bool
) -> tuple[list[np.ndarray], list[np.ndarray], list[float]]:
    """Run one step under the tap, without logits, and commit it: queries, keys and scales of each layer.

    sparse  its rows may leave out keys
    asks    read the queries as well; False: return none
    """
    scales: list[float] = []

    def run(state: State, step: Step) -> tuple[Array, ...]:
        tap: Any = _Tap(model.ops, sparse)
        model.definition.forward(
            tap, model.config, model.weights, state, step, slice(0, 1)
        )  # one row of logits, which nothing reads
        scales[:] = tap.scales
        return (*(tap.queries if asks else ()), *tap.keys)

    found = [model.ops.read(x) for x in model.ops.run(run, state, step)]
    state.commit(np.arange(len(step)))
    return found[: -len(scales)] if asks and scales else [], found[-len(scales) :] if scales else [], scales


def _shares(q: np.ndarray, keys: np.ndarray, scale: float) -> np.ndarray:
    """Compute the largest softmax share of any head, for the last rows q (Q, H, D) and keys (T, K, D): (Q, T)."""
    (Q, H, D), (T, K, _) = q.shape, keys.shape
    logits = np.einsum("qkgd,tkd->qkgt", q.reshape(Q, K, H // K, D), keys, optimize=True).reshape(Q, H, T)
    hidden = np.arange(T) > np.arange(T - Q, T)[:, None]
    logits = np.where(hidden[:, None], -np.inf, np.float32(scale) * logits)
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return (shares / shares.sum(axis=-1, keepdims=True)).max(axis=1)
