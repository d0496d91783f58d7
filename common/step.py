"""What one pass over a model receives (Step) and what it leaves behind (State).

A step carries the new rows only: their tokens, their rope positions and which of the new rows each may see. The
committed past is always visible, minus a window where a layer has one. Until `State.commit`, a step changes nothing
that a later step can see, so it may be run twice; `commit(path)` is the one way forward and the one rollback.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from common.errors import BimetalError

PAST = -1  # the parent of a row that continues the committed past
MAX_DECODE_ROWS = 136  # of a step that decodes or verifies a draft; how a row is computed does not depend on how many


@dataclass(frozen=True, eq=False)
class Step:
    """T new rows.

    tokens     (T,) int32 token ids; on the host, or still on the device that sampled them
    positions  (T,) int32 rope positions (tree depth for a tree, logical order for WeDLM); siblings share one
    parents    (T,) int32 row that each row continues, PAST for the committed past, always smaller than the row's own
               index; None: a block whose rows all see each other (the DFlash draft)
    slots      (T,) int32 sequence of each row
    """

    tokens: Any
    positions: np.ndarray
    parents: np.ndarray | None
    slots: np.ndarray

    @classmethod
    def chain(cls, tokens: Any, start: int, slot: int = 0) -> "Step":
        """Rows that follow one another from position `start`: decoding, prefill, chain verify."""
        T = len(tokens)
        positions = np.arange(start, start + T, dtype=np.int32)
        return cls(tokens, positions, np.arange(PAST, T - 1, dtype=np.int32), np.full(T, slot, np.int32))

    @classmethod
    def tree(cls, tokens: Any, parents: Sequence[int] | np.ndarray, start: int, slot: int = 0) -> "Step":
        """Rows of a token tree; a row's position is `start` plus its depth."""
        parents = np.asarray(parents, np.int32)
        T, depth = len(parents), list[int]()
        for row, parent in enumerate(parents.tolist()):
            if not PAST <= parent < row:
                break
            depth.append(0 if parent == PAST else depth[parent] + 1)
        if not len(tokens) == T == len(depth):
            raise ValueError(f"parents must list, for each of {len(tokens)} rows, PAST or an earlier row: {parents}")
        return cls(tokens, start + np.array(depth, np.int32), parents, np.full(T, slot, np.int32))

    @classmethod
    def block(cls, tokens: Any, start: int, slot: int = 0) -> "Step":
        """Rows that all see each other, at consecutive positions."""
        T = len(tokens)
        return cls(tokens, np.arange(start, start + T, dtype=np.int32), None, np.full(T, slot, np.int32))

    def __len__(self) -> int:
        return len(self.positions)

    @cached_property
    def is_chain(self) -> bool:
        return self.parents is not None and bool(np.all(self.parents == np.arange(PAST, len(self) - 1)))

    @cached_property
    def visible(self) -> np.ndarray:
        """(T, T) bool: may row i see row j of this step? A row always sees itself."""
        T = len(self)
        if self.parents is None:
            return np.ones((T, T), bool)
        if self.is_chain:
            return np.tri(T, dtype=bool)
        visible = np.eye(T, dtype=bool)
        for t, parent in enumerate(self.parents):
            if parent != PAST:
                visible[t] |= visible[parent]
        return visible

    def the_slot(self) -> int:
        """The one sequence of this step, for kernels that serve one; refuses a step that mixes sequences."""
        if len(self) and np.any(self.slots != self.slots[0]):
            raise BimetalError(
                f"this backend serves one sequence per step, got slots {sorted(set(self.slots.tolist()))}"
            )
        return int(self.slots[0]) if len(self) else 0


class LayerState(Protocol):
    """One state of one layer. Its op writes the rows of a step beside the committed past; `commit` keeps some.

    A state that only appends may snapshot its length alone: `State.restore` refuses a snapshot whose rows are gone.
    """

    def commit(self, path: np.ndarray) -> None: ...

    def snapshot(self) -> Any: ...

    def restore(self, snapshot: Any) -> None: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class Snapshot:
    """A point that a state can go back to; `rewinds` counts the restores before it was taken."""

    length: int
    layers: list[Any]
    rewinds: int


class State:
    """One sequence's memory over all layers: `state[i].kv`, `state[i].conv`, ... as the model's spec names them."""

    def __init__(self, layers: Sequence[Mapping[str, LayerState]], capacity: int):
        self.layers = [SimpleNamespace(**layer) for layer in layers]
        self.capacity = capacity  # most tokens that may ever be committed
        self.length = 0  # committed tokens
        self._rewound_to: list[int] = []

    def __getitem__(self, layer: int) -> Any:
        return self.layers[layer]

    def _all(self) -> list[LayerState]:
        return [state for layer in self.layers for state in vars(layer).values()]

    def commit(self, path: Sequence[int] | np.ndarray) -> None:
        """Keep rows `path` of the last step, in that order, and forget its others.

        path  [0] after plain decoding, 0..n for a chain, root to leaf for a tree; empty keeps nothing
        """
        path = np.asarray(path, np.int64)
        for state in self._all():
            state.commit(path)
        self.length += len(path)

    def snapshot(self) -> Snapshot:
        """Where the state stands now, for `restore` on the same state; good until a restore to before it."""
        return Snapshot(self.length, [state.snapshot() for state in self._all()], len(self._rewound_to))

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to `snapshot`; raises ValueError where an earlier restore let its rows be overwritten."""
        if any(length < snapshot.length for length in self._rewound_to[snapshot.rewinds :]):
            raise ValueError(f"the snapshot at {snapshot.length} tokens is gone: the state went back to before it")
        self._rewound_to.append(snapshot.length)
        self.length = snapshot.length
        for state, saved in zip(self._all(), snapshot.layers, strict=True):
            state.restore(saved)

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self._all())
