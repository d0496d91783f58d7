"""The EAGLE-3 draft (Li et al., arXiv 2503.01840): one layer that drafts token by token, with a vocabulary of its own.

A matrix `fc` fuses the hidden states of three target layers (low, middle and high) into one. A row of the draft's layer
reads its token's embedding and the fused hidden state of the previous position, each normed; its output predicts the
next token, among the tokens that the map `d2t` lists. To draft further tokens, the layer reads the token that it
drafted, with its own output as hidden state. The first row of a sequence has a hidden state of zeros; vLLM and
llama.cpp omit that row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.checkpoint import Checkpoint
from common.models import Model
from common.models.blocks import swiglu_ffn
from common.models.chain import ChainPair
from common.models.eagle3_config import Config, read_config, target_ids
from common.models.eagle3_weights import layout
from common.models.target import Target, target_of
from common.ops import Array
from common.step import State, Step
from common.storage import ConvSpec, KVSpec, LayerSpec
from common.weights import account, load_weights


def check_eagle3(checkpoint: Checkpoint, target: Target) -> None:
    """Refuse, by headers and the map of the vocabulary alone, a draft that does not fit `target`."""
    config = read_config(checkpoint, target)
    target_ids(checkpoint, config, target.vocab)
    account(checkpoint, layout(checkpoint, config, target))


def load_eagle3(checkpoint: Checkpoint, target: Model, progress: bool = False) -> "Eagle3Pair":
    """Load the draft of `checkpoint` beside `target`, on the same backend."""
    first, fits = len(target.layout.layers), target_of(target.definition, target.config)
    config = read_config(checkpoint, fits)
    ids = target_ids(checkpoint, config, fits.vocab)
    tables = layout(checkpoint, config, fits)
    weights = load_weights(checkpoint, tables, target.ops, progress, first, target.layout.out)
    parts = target.architecture, target.definition, target.config, target.layout, target.weights, target.ops
    return Eagle3Pair(*parts, config, weights, tables, ids, cache=target.cache, expert_stream=target.expert_stream)


@dataclass(frozen=True)
class Eagle3Pair(ChainPair):
    """A target and its EAGLE-3 draft.

    ids  (draft's vocabulary,) int32: the target's id of each token of the draft; None: both have the same ids
    """

    draft: Config
    ids: np.ndarray | None

    @property
    def draft_spec(self) -> list[LayerSpec]:
        """List the states of the layer, and the fused hidden state of the last committed token."""
        c = self.draft
        return [{"kv": KVSpec(c.kv_heads, c.head_dim, c.head_dim, c.window), "last": ConvSpec(c.hidden, 2)}]

    @property
    def taps(self) -> Sequence[int]:
        return self.draft.taps

    def last_layers(self, state: State, step: Step, rows: slice, layers: range, outputs: Mapping[int, Array]) -> Array:
        logits, features = self._tapped_to_last(state, step, rows, layers, outputs)
        _, normed = self._hidden(state, step, self._fused(features))
        k, v = self._keys_values(step, self._embedded(step), normed)
        self.ops.write_kv(k, v, self._state(state).kv, step)
        return logits

    def _fused(self, features: list[Array]) -> Array:
        """Return one hidden state (T, hidden) of the tapped ones (T, hidden of the target) each."""
        ops, w, x = self.ops, self.draft_weights, None
        for i, feature in enumerate(features):
            if self.draft.norms_taps:
                feature = ops.rms_norm(feature, getattr(w, f"tap_norm_{i}"), self.draft.eps)
            part = ops.linear(feature, getattr(w, f"fc_{i}"))
            x = part if x is None else ops.add(x, part)
        return x

    # -- the layer -----------------------------------------------------------------------------------------------------

    def _state(self, state: State) -> Any:
        return state[len(self.weights.layers)]

    def _table(self, step: Step) -> Array:
        own = self.draft_weights.embed
        return self.ops.embed(self.weights.embed if own is None else own, step.tokens)

    def _embedded(self, step: Step) -> Array:
        return self.ops.rms_norm(self._table(step), self.draft_weights.layers[0].attn_norm, self.draft.eps)

    def _hidden(self, state: State, step: Step, hidden: Array) -> tuple[Array, Array]:
        """Return the row of `hidden` (T, hidden) before each row: as it is, and normed."""
        before = self.ops.parent_rows(hidden, self._state(state).last, step)
        return before, self.ops.rms_norm(before, self.draft_weights.layers[0].hidden_norm, self.draft.eps)

    def _both(self, name: str, embedded: Array, hidden: Array) -> Array:
        """Return the product of a matrix whose columns are for the embedding, then for the hidden state."""
        ops, w = self.ops, self.draft_weights.layers[0]
        of_embedding = ops.linear(embedded, getattr(w, f"{name}_embed"))
        return ops.add(of_embedding, ops.linear(hidden, getattr(w, f"{name}_hidden")))

    def _with_rope(self, x: Array, name: str, step: Step) -> Array:
        """Apply the norm `name`, if the draft has it, then rope, to x (T, heads, D)."""
        c, ops = self.draft, self.ops
        if not c.norms_heads:
            return ops.rope(x, step.positions, c.rope)
        return ops.norm_rope(x, getattr(self.draft_weights.layers[0], name), step.positions, c.rope, c.eps)

    def _keys_values(self, step: Step, embedded: Array, hidden: Array) -> tuple[Array, Array]:
        T, K, D = embedded.shape[0], self.draft.kv_heads, self.draft.head_dim
        kv = self._both("kv", embedded, hidden)
        return self._with_rope(kv[:, : K * D].reshape(T, K, D), "k_norm", step), kv[:, K * D :].reshape(T, K, D)

    # -- drafting ------------------------------------------------------------------------------------------------------

    def _first(self, step: Step) -> Array:
        return self._table(step)

    def _pass(self, state: State, step: Step, hidden: Array) -> Array:
        c, ops, w = self.draft, self.ops, self.draft_weights.layers[0]
        T, H, D = hidden.shape[0], c.heads, c.head_dim
        embedded, (before, normed) = self._embedded(step), self._hidden(state, step, hidden)
        q = self._with_rope(self._both("q", embedded, normed).reshape(T, H, D), "q_norm", step)
        k, v = self._keys_values(step, embedded, normed)
        o = ops.attention(q, k, v, self._state(state).kv, step, scale=D**-0.5, window=c.window)
        x = ops.add(normed if c.norms_residual else before, ops.linear(o.reshape(T, H * D), w.o))
        x = ops.add(x, swiglu_ffn(ops, w, ops.rms_norm(x, w.ffn_norm, c.eps)))
        return ops.rms_norm(x, self.draft_weights.norm, c.eps) if c.norms_output else x

    def _head(self, hidden: Array) -> Array:
        ops, w = self.ops, self.draft_weights
        x = hidden if self.draft.norms_output else ops.rms_norm(hidden, w.norm, self.draft.eps)
        return self.head_logits(x) if w.head is None else ops.linear(x, w.head)

    def of_target(self, ids: np.ndarray) -> np.ndarray:
        return ids if self.ids is None else self.ids[ids]
