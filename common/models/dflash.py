"""The DFlash draft (Chen et al., arXiv 2602.06036): a block of tokens in one pass, from hidden states of the target.

Each layer's attention reads keys and values made of the target's hidden states at every committed position, then those
of the block: the newest token and a mask for every token after it. Row i of the block predicts the token at its own
position, or in drafts of DeepSpec the token after it. Embedding and head are the target's own. A target and its draft
share one state, so that one commit advances both, and the draft does not read the prompt.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np

from common.coupled import Coupling, considered
from common.models import Model
from common.models.blocks import RowFn, swiglu_ffn
from common.models.dflash_config import Config
from common.models.pair import Pair, Pass
from common.ops import Array, Ops
from common.step import State, Step
from common.storage import KVSpec, LayerSpec

CONTEXT_ROWS = 4096  # kept by a layer without a window: more than drafts are trained on, few beside the target's
CHAINS = (3, 7, 11, 15, 23, 31)  # depths of a chain among which a budget is chosen, beside the whole block


# -- the network -------------------------------------------------------------------------------------------------------


def state_spec(c: Config) -> list[LayerSpec]:
    return [{"kv": KVSpec(c.kv_heads, c.head_dim, c.head_dim, window or CONTEXT_ROWS)} for window in c.windows]


def write_context(ops: Ops, c: Config, w: Any, states: Sequence[Any], step: Step, features: Sequence[Array]) -> None:
    """Write the draft's keys and values of the step's rows, from hidden states (T, hidden) of the layers `c.taps`."""
    x: Array = None
    for i, feature in enumerate(features):
        if c.is_laguna:
            feature = ops.rms_norm(feature, getattr(w, f"tap_norm_{i}"), c.eps)
        part = ops.linear(feature, getattr(w, f"fc_{i}"))
        x = part if x is None else ops.add(x, part)
    x = ops.rms_norm(x, w.hidden_norm, c.eps)
    for layer, state in zip(w.layers, states, strict=True):
        k, v = _keys_values(ops, c, layer, step, ops.rms_norm(x, layer.attn_norm, c.eps) if c.is_laguna else x)
        ops.write_kv(k, v, state.kv, step)


def forward(ops: Ops, c: Config, w: Any, embed: Any, states: Sequence[Any], step: Step, first: int) -> Array:
    """Return the outputs (T, hidden) of a block's rows; `first` is the first layer's number in the state."""
    x = ops.embed(embed, step.tokens)
    for i, (layer, state) in enumerate(zip(w.layers, states, strict=True)):
        x = ops.scope(first + i, partial(block, ops, c, layer, state, step, i), x)
    return x


def block(ops: Ops, c: Config, w: Any, state: Any, step: Step, layer: int, x: Array) -> Array:
    attend: RowFn = partial(attention, ops, c, w, state.kv, step, layer)
    ffn: RowFn = partial(swiglu_ffn, ops, w)
    if c.conv_taps:
        attend = partial(_convolved, ops, (w.attn_conv, w.attn_conv_in, w.attn_conv_out), attend)
        ffn = partial(_convolved, ops, (w.ffn_conv, w.ffn_conv_in, w.ffn_conv_out), ffn)
    x = ops.add(x, attend(ops.rms_norm(x, w.attn_norm, c.eps)))
    return ops.add(x, ffn(ops.rms_norm(x, w.ffn_norm, c.eps)))


def _convolved(ops: Ops, conv: tuple[Any, Array, Array], sublayer: RowFn, x: Array) -> Array:
    """Run a sublayer between DFlash2's two convolutions along the block; x (T, hidden) gives their own taps."""
    matrix, before, after = conv
    taps = ops.linear(x, matrix)
    each = taps.shape[1] // 2
    return ops.block_conv(sublayer(ops.block_conv(x, taps[:, :each], before)), taps[:, each:], after)


def attention(ops: Ops, c: Config, w: Any, kv: Any, step: Step, layer: int, x: Array) -> Array:
    """Compute attention of block rows x (T, hidden) over context and block: (T, hidden)."""
    T, H, D = x.shape[0], c.heads, c.head_dim
    q = ops.norm_rope(ops.linear(x, w.q).reshape(T, H, D), w.q_norm, step.positions, c.rope, c.eps)
    k, v = _keys_values(ops, c, w, step, x)
    window = c.windows[layer] or CONTEXT_ROWS
    o = ops.attention(q, k, v, kv, step, scale=D**-0.5, window=window, causal=c.is_causal[layer])
    if w.gate is not None:
        o = ops.mul_softplus(o, ops.linear(x, w.gate).reshape(T, H, 1))
    return ops.linear(o.reshape(T, H * D), w.o)


def _keys_values(ops: Ops, c: Config, w: Any, step: Step, x: Array) -> tuple[Array, Array]:
    T, K, D = x.shape[0], c.kv_heads, c.head_dim
    kv = ops.linear(x, w.kv)
    k = ops.norm_rope(kv[:, : K * D].reshape(T, K, D), w.k_norm, step.positions, c.rope, c.eps)
    return k, kv[:, K * D :].reshape(T, K, D)


# -- target and draft --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DflashPair(Pair):
    """A target and its DFlash draft."""

    draft: Config
    spec: ClassVar[str] = "tree"

    @property
    def draft_spec(self) -> list[LayerSpec]:
        return state_spec(self.draft)

    @property
    def budgets(self) -> Sequence[int]:
        deepest = self.draft.tokens
        return sorted({0, deepest, *(size for size in CHAINS if size < deepest)})

    @property
    def taps(self) -> Sequence[int]:
        return self.draft.taps

    def last_layers(self, state: State, step: Step, rows: slice, layers: range, outputs: Mapping[int, Array]) -> Array:
        logits, features = self._tapped_to_last(state, step, rows, layers, outputs)
        write_context(self.ops, self.draft, self.draft_weights, self._draft_states(state), step, features)
        return logits

    @cached_property
    def target(self) -> Model:
        """Return the target alone, over the same state: its steps write no draft rows, and commit blanks for them."""
        parts = self.architecture, self.definition, self.config, self.layout, self.weights, self.ops
        return Model(*parts, expert_stream=self.expert_stream)

    def drafting(
        self, token: int, k: int, depth: int, coupling: Coupling | None = None
    ) -> Generator[Pass, Any, tuple[np.ndarray, ...]]:
        most = min(depth, self.draft.tokens)  # later rows of the pass are ignored
        ids, logp = yield Pass(token, most, considered(k, coupling, self.config.vocab))
        return self.ranked(ids, logp, k, coupling)

    @property
    def shares_passes(self) -> bool:
        return not self.draft.conv_taps  # convolutions along a block would mix it with other blocks of the step

    @property
    def block_tokens(self) -> int:
        return self.draft.tokens if self.shares_passes else 0

    def pass_step(self, inputs: int, length: int) -> Step:
        tokens = self._masks.copy()
        tokens[0] = inputs
        return Step.block(tokens, length)

    @cached_property
    def _masks(self) -> np.ndarray:
        return np.full(self.draft.block, self.draft.mask_token, np.int32)

    def propose(self, state: State, inputs: int) -> Array:
        """Compute logits (n, vocab) of the tokens after `inputs`, the token that follows the state; commits nothing."""
        return self.run_pass(state, inputs)[: self.draft.tokens]

    def run_pass(self, state: State, inputs: int) -> Any:
        return self.ops.run(self._block, state, self.pass_step(inputs, state.length))

    def propose_each(self, state: Any, step: Step, rows: int) -> Array:
        return self.ops.run(self._blocks, state, step)

    def draft_chains(self, state: Any, step: Step, rows: int, count: int) -> Array:
        return self.ops.run_chains(self._blocks, state, step, rows, self.draft.first, count)

    def rows_of_each(self, number: int, rows: int) -> slice:
        first = number * rows + self.draft.first
        return slice(first, first + self.draft.tokens)

    @cached_property
    def _block(self) -> Any:
        return partial(self._block_logits, self.draft.first)

    @cached_property
    def _blocks(self) -> Any:
        """Build the function for several sequences, which computes the logits of every row."""
        return partial(self._block_logits, 0)

    def _block_logits(self, first: int, state: State, step: Step) -> Any:
        """Return the logits (n, vocab) of a block's rows from `first` on.

        With DFlash2 also the factors of its scores, (n, selector_rank).
        """
        ops, own, target = self.ops, self.draft_weights, self.weights
        embed = target.embed if own.embed is None else own.embed
        x = forward(ops, self.draft, own, embed, self._draft_states(state), step, len(target.layers))
        x = ops.rms_norm(x[first:], own.norm, self.draft.eps)
        logits = self.head_logits(x) if own.head is None else ops.linear(x, own.head)
        return (logits, ops.linear(x, own.selector_hidden)) if self.draft.selector_rank else logits

    def _draft_states(self, state: State) -> list[Any]:
        return [state[len(self.weights.layers) + i] for i in range(self.draft.layers)]
