"""Fallback to mlx-lm's own model for architectures that only mlx-lm defines, with the interface of common.models.Model.

Plain decoding only: mlx-lm's caches advance while a step is computed, so that every step is a chain kept as a whole.
"""

import copy
from collections.abc import Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map

from common.checkpoint import Checkpoint
from common.config import Keys
from common.errors import BimetalError
from common.ops import Array
from common.step import Snapshot, State, Step
from mlx_backend.ops import MlxOps


class FallbackModel:
    """mlx-lm's model of `checkpoint`, with the attributes and methods of `common.models.Model`."""

    expert_stream = None
    prompt_rows = 1

    def __init__(self, checkpoint: Checkpoint, ops: MlxOps):
        from mlx_lm.utils import load_model

        keys = Keys(checkpoint.config.get("text_config") or checkpoint.config, f"{checkpoint.path} config.json")
        self.architecture: str = checkpoint.config["model_type"]
        self.config = SimpleNamespace(vocab=keys.size("vocab_size"), context=keys.size("max_position_embeddings"))
        self.experts = (keys.read("num_experts_per_tok", int, 1), keys.read("num_experts", int, 1))
        self.ops = ops
        ops.runs_ahead = False  # mlx-lm cannot undo a step that is not committed
        ops.joins = False  # and its caches advance together
        try:
            self.network = load_model(checkpoint.path)[0]
        except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
            raise BimetalError(f"{checkpoint.path}: neither bimetal nor mlx-lm can load it: {error}") from None

    @cached_property
    def step_bytes(self) -> int:
        """Count the weight bytes read per decoded token, as `common.models.Model` does."""
        weights = dict(tree_flatten(self.network.parameters()))
        untied = any("lm_head" in name for name in weights)
        chosen, count = self.experts
        total = 0.0
        for name, weight in weights.items():
            if not (untied and "embed_tokens" in name):
                total += weight.nbytes * (chosen / count if "switch_mlp" in name else 1)
        return int(total)

    def new_state(self, capacity: int) -> "FallbackState":
        from mlx_lm.models.cache import make_prompt_cache

        return FallbackState(make_prompt_cache(self.network), capacity)

    def forward(self, state: "FallbackState", step: Step, rows: slice = slice(None)) -> Array:
        """Return the logits (n, vocab) of `rows` of the step."""
        if not step.is_chain or state.rows:
            raise BimetalError(f"{self.architecture} runs by mlx-lm, which takes chains of tokens, each kept whole")
        tokens = step.tokens if isinstance(step.tokens, mx.array) else mx.array(np.asarray(step.tokens, np.int32))
        state.rows = len(step)
        return self.network(tokens[None], cache=state.caches)[0][rows]


class FallbackState(State):
    """mlx-lm's caches of one sequence; they hold a step's rows as soon as it has run."""

    can_save = False

    def __init__(self, caches: list[Any], capacity: int):
        super().__init__([], capacity)
        self.caches = caches
        self.rows = 0  # of the step that has run and is not committed

    def commit(self, path: Sequence[int] | np.ndarray) -> None:
        if list(path) != list(range(self.rows)):
            raise BimetalError(f"mlx-lm's caches keep all {self.rows} rows of a step, not {list(path)}")
        self._note_long(self.rows)
        self.length += self.rows
        if self.rows > 1:  # a prefill chunk: bound the lazy graph
            mx.eval(_arrays(self.caches))
        self.rows = 0

    def snapshot(self) -> Snapshot:
        return Snapshot(self.length, [_copied(c) for c in self.caches], 0)

    def restore(self, snapshot: Snapshot) -> None:
        self.length, self.rows = snapshot.length, 0
        self._forget_long()
        self.caches = [_copied(c) for c in snapshot.layers]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in _arrays(self.caches))


def _arrays(caches: list[Any]) -> list[mx.array]:
    return [x for x in _leaves([c.state for c in caches]) if isinstance(x, mx.array)]


def _leaves(tree: Any) -> list[Any]:
    return [leaf for _, leaf in cast(list[tuple[str, Any]], tree_flatten(tree))]


def _copied(cache: Any) -> Any:
    """Return a copy of the cache with array handles of its own: writing into one leaves the other unchanged."""
    copied = copy.copy(cache)
    if not cache.empty():
        copied.state = tree_map(lambda x: mx.array(x) if isinstance(x, mx.array) else x, cache.state)
    return copied
