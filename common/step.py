"""Step, the input of one forward pass, and State, the memory of a sequence that a step reads and extends.

A step has only the new rows: their tokens, their rope positions, and which of the new rows each attends to. The
committed past is always visible, except outside the window of a layer that has one. Until `State.commit` a step changes
nothing that a later step reads, so that it may be run twice. Only `commit(path)` advances a state; rows that are not on
the path are dropped.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from common.errors import BimetalError

PAST = -1  # the parent of a row that continues the committed past
NO_ORDER = "a block whose rows all see each other has no order for a recurrent layer"
MAX_DECODE_ROWS = 136  # maximum rows of a step that decodes or verifies; up to it a row's bits do not depend on others
_FIRST_SLOT = np.zeros(MAX_DECODE_ROWS, np.int32)
_FIRST_SLOT.flags.writeable = False


@cache
def chain_parents(T: int) -> np.ndarray:
    """Return `parents` of a chain of T rows, (T,) int32: read-only, one array for all steps."""
    parents = np.arange(PAST, T - 1, dtype=np.int32)
    parents.flags.writeable = False
    return parents


def _of_slot(T: int, slot: int) -> np.ndarray:
    """Return `slots` of T rows of one sequence."""
    return _FIRST_SLOT[:T] if slot == 0 and T <= MAX_DECODE_ROWS else np.full(T, slot, np.int32)


@dataclass(eq=False)  # not frozen: each reply makes one per token, and a frozen one takes three times as long
class Step:
    """T new rows.

    tokens     (T,) int32 token ids; on the host, or still on the device that sampled them
    positions  (T,) int32 rope positions (tree depth for a tree, logical order for WeDLM); siblings share one
    parents    (T,) int32 row that each row continues, PAST for the committed past, always smaller than the row's own
               index; None: a block whose rows all attend to each other (the DFlash draft)
    slots      (T,) int32 sequence of each row
    hidden     (T, hidden) output of earlier layers, if the step begins with a later layer; None: it begins with tokens
    as_long    whether it is computed as a long step even if it has few rows: `of_prompt`
    """

    tokens: Any
    positions: np.ndarray
    parents: np.ndarray | None
    slots: np.ndarray
    hidden: Any = field(default=None, kw_only=True)
    as_long: bool = field(default=False, kw_only=True)

    @classmethod
    def chain(cls, tokens: Any, start: int, slot: int = 0) -> "Step":
        """Make a step of rows that follow one another from position `start`: decoding, prefill, verifying a chain."""
        T = len(tokens)
        positions = np.arange(start, start + T, dtype=np.int32)
        if T > MAX_DECODE_ROWS:
            return cls(tokens, positions, np.arange(PAST, T - 1, dtype=np.int32), _of_slot(T, slot))
        # few rows: the step may take less time than the host's work for it
        return cls(tokens, positions, chain_parents(T), _of_slot(T, slot))

    @classmethod
    def of_prompt(cls, tokens: Any, start: int, short_rows: int) -> "Step":
        """Make a step of rows of a prompt, all of which are kept: `chain`, and long if it has more than `short_rows`.

        short_rows  of the backend
        """
        step = cls.chain(tokens, start)
        step.as_long = len(step) > short_rows
        return step

    @classmethod
    def tree(cls, tokens: Any, parents: Sequence[int] | np.ndarray, start: int, slot: int = 0) -> "Step":
        """Make a step of the rows of a token tree; a row's position is `start` plus its depth."""
        rows = parents.tolist() if isinstance(parents, np.ndarray) else list(parents)
        T, positions = len(rows), list[int]()
        if len(tokens) == T <= MAX_DECODE_ROWS and rows == list(range(PAST, T - 1)):
            return cls.chain(tokens, start, slot)
        for row, parent in enumerate(rows):
            if not PAST <= parent < row:
                break
            positions.append(start if parent == PAST else positions[parent] + 1)
        if not len(tokens) == T == len(positions):
            raise ValueError(f"parents must list, for each of {len(tokens)} rows, PAST or an earlier row: {parents}")
        return cls(tokens, np.array(positions, np.int32), np.array(rows, np.int32), _of_slot(T, slot))

    @classmethod
    def block(cls, tokens: Any, start: int, slot: int = 0) -> "Step":
        """Make a step of rows that all attend to each other, at consecutive positions."""
        T = len(tokens)
        return cls(tokens, np.arange(start, start + T, dtype=np.int32), None, _of_slot(T, slot))

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def is_long(self) -> bool:
        """Test whether the bits of a row may depend on the number of rows."""
        return self.as_long or len(self.positions) > MAX_DECODE_ROWS

    @cached_property
    def is_chain(self) -> bool:
        T = len(self)
        if T <= MAX_DECODE_ROWS and self.parents is chain_parents(T):
            return True
        return self.parents is not None and bool(np.all(self.parents == np.arange(PAST, T - 1)))

    @cached_property
    def visible(self) -> np.ndarray:
        """Return (T, T) bool: whether row i attends to row j of this step. A row always attends to itself."""
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

    def order(self) -> np.ndarray:
        """Return `parents`, for layers that process rows one after another; refuses a block, which has no order."""
        if self.parents is None:
            raise BimetalError(NO_ORDER)
        return self.parents

    def the_slot(self) -> int:
        """Return the sequence of this step, for kernels that serve one; refuses a step of several sequences."""
        slots = self.slots.tolist()
        if slots and slots.count(slots[0]) < len(slots):
            raise BimetalError(f"this backend serves one sequence per step, got slots {sorted(set(slots))}")
        return slots[0] if slots else 0


class Repeated(partial[Any]):
    """A function (state, step) whose launches depend on the number of rows alone, not on the length of the state.

    A backend may capture it for long steps, and replay it for any of the states.
    """


LongStep = tuple[int, int]  # tokens first to last - 1, read in one long step
Shape = tuple[tuple[int, ...], Any]  # of an array on the host, and its NumPy dtype
Parts = Sequence[np.ndarray]  # (heads, tokens, width) each, of consecutive tokens


class LayerState(Protocol):
    """One state of one layer. Its op writes the rows of a step after the committed past; `commit` keeps some of them.

    A state that only appends may use its length as a snapshot: `State.restore` refuses snapshots with overwritten rows.

    Committed contents can be saved as arrays on the host, in their stored format, and loaded into any state of the same
    spec; later results are bitwise identical. Rows that only append, (heads, tokens, width), are saved for a range of
    tokens. Everything else (windows in the order of positions, convolution tails, delta matrices, calibration) is the
    point, which is saved whole.
    """

    def commit(self, path: np.ndarray) -> None: ...

    def snapshot(self) -> Any: ...

    def restore(self, snapshot: Any) -> None: ...

    def row_shapes(self, tokens: int) -> list[Shape]:
        """Return shape and dtype of the arrays that `save_rows` returns for `tokens` tokens."""
        ...

    def point_shapes(self, length: int) -> list[Shape]:
        """Return shape and dtype of the arrays that `save_point` returns once `length` tokens are committed."""
        ...

    def save_rows(self, first: int, last: int) -> list[np.ndarray]: ...

    def save_point(self) -> list[np.ndarray]: ...

    def load(self, length: int, rows: list[Parts], point: list[np.ndarray]) -> None:
        """Replace the contents by those saved at `length` tokens; `rows` are the rows of all tokens, in parts."""
        ...

    @property
    def nbytes(self) -> int: ...


class NoRows:
    """Base of states of a fixed size, which are saved as a point."""

    def row_shapes(self, tokens: int) -> list[Shape]:
        return []

    def save_rows(self, first: int, last: int) -> list[np.ndarray]:
        return []


@dataclass(frozen=True)
class Snapshot:
    """A point to which a state can be restored; `rewinds` counts the restores before it was taken."""

    length: int
    layers: list[Any]
    rewinds: int


class State:
    """One sequence's memory over all layers: `state[i].kv`, `state[i].conv`, ... as the model's spec names them."""

    can_save = True
    can_wait = False  # whether it can be suspended, though not saved: other processes keep parts of the state
    pool: "Pool | None" = None  # whose `slot` this is
    slot = 0

    def __init__(self, layers: Sequence[Mapping[str, LayerState]], capacity: int):
        self.layers = [SimpleNamespace(**layer) for layer in layers]
        self.capacity = capacity  # maximum number of committed tokens
        self.length = 0  # committed tokens
        self.long_steps: list[LongStep] = []  # of the committed tokens
        self._rewinds = 0  # restores so far
        self._lowest: list[tuple[int, int]] = []  # number and length of restores without a later one to fewer tokens

    def __getitem__(self, layer: int) -> Any:
        return self.layers[layer]

    def _all(self) -> list[LayerState]:
        return [state for layer in self.layers for state in vars(layer).values()]

    def commit(self, path: Sequence[int] | np.ndarray) -> None:
        """Keep rows `path` of the last step, in that order, and forget the other rows.

        path  [0] after plain decoding, 0..n for a chain, root to leaf for a tree; empty keeps nothing
        """
        path = np.asarray(path, np.int64)
        for state in self._all():
            state.commit(path)
        self._note_long(len(path))
        self.length += len(path)

    def commit_prompt(self, step: Step) -> None:
        """Keep all rows of a step of a prompt, and record the step if it is long."""
        first = self.length
        self.commit(np.arange(len(step)))
        if step.is_long and len(step) <= MAX_DECODE_ROWS:  # `commit` records those of more rows
            self.long_steps.append((first, self.length))

    def _note_long(self, rows: int) -> None:
        if rows > MAX_DECODE_ROWS:
            self.long_steps.append((self.length, self.length + rows))

    def _forget_long(self) -> None:
        self.long_steps = [step for step in self.long_steps if step[0] < self.length]

    def snapshot(self) -> Snapshot:
        """Return a point for `restore` of this state; a restore to an earlier point makes it invalid."""
        return Snapshot(self.length, [state.snapshot() for state in self._all()], self._rewinds)

    def restore(self, snapshot: Snapshot) -> None:
        """Return to `snapshot`; raises ValueError if its rows may have been overwritten after an earlier restore."""
        if any(number >= snapshot.rewinds and length < snapshot.length for number, length in self._lowest):
            raise ValueError(f"the snapshot at {snapshot.length} tokens is gone: the state went back to before it")
        self._note_rewind(snapshot.length)
        self.length = snapshot.length
        self._forget_long()
        for state, saved in zip(self._all(), snapshot.layers, strict=True):
            state.restore(saved)

    def _note_rewind(self, length: int) -> None:
        lower = [restore for restore in self._lowest if restore[1] < length]
        self._lowest = [*lower, (self._rewinds, length)]
        self._rewinds += 1

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self._all())

    # -- saved on the host ---------------------------------------------------------------------------------------------

    def row_shapes(self, tokens: int) -> list[Shape]:
        return [shape for state in self._all() for shape in state.row_shapes(tokens)]

    def point_shapes(self, length: int) -> list[Shape]:
        return [shape for state in self._all() for shape in state.point_shapes(length)]

    def save_rows(self, first: int, last: int) -> list[np.ndarray]:
        """Copy the appended rows of committed tokens first to last - 1, (heads, tokens, width) each.

        These arrays, and those of `save_point`, may be complete only after `finish_saving`.
        """
        if not 0 <= first <= last <= self.length:
            raise ValueError(f"rows {first} to {last} of a state of {self.length} tokens")
        return [array for state in self._all() for array in state.save_rows(first, last)]

    def save_point(self) -> list[np.ndarray]:
        """Copy all contents except appended rows; the result is empty if every layer only appends."""
        return [array for state in self._all() for array in state.save_point()]

    def save(self) -> dict[str, np.ndarray]:
        """Copy all committed contents, for `load`."""
        saved = {
            **{f"rows.{i}": array for i, array in enumerate(self.save_rows(0, self.length))},
            **{f"point.{i}": array for i, array in enumerate(self.save_point())},
        }
        self.finish_saving()
        return saved

    @property
    def saving(self) -> tuple[int, int | None]:
        """Return the bytes of incomplete saved arrays, and the maximum before saving waits; None: no maximum."""
        return 0, None

    def when_saved(self, arrays: Sequence[np.ndarray] | None = None) -> Callable[[], object]:
        """Return a function that waits until `arrays`, or all that were saved, are complete; any thread may call it.

        arrays  results of `save_rows` and `save_point` of states of this pool
        """
        return lambda: None

    def finish_saving(self, arrays: Sequence[np.ndarray] | None = None) -> None:
        """Wait until arrays are complete; arguments as in `when_saved`."""
        self.when_saved(arrays)()

    def load(self, arrays: Mapping[str, np.ndarray | Parts], length: int, long_steps: Sequence[LongStep] = ()) -> None:
        """Replace the contents by `arrays`, saved at `length` tokens; later results are bitwise identical.

        arrays      as `save` returns them; rows may be in parts
        long_steps  of the saved state

        Raises BimetalError, and changes nothing, for arrays of another number, shape or dtype.
        """
        if not 0 <= length <= self.capacity:
            raise BimetalError(f"a saved state has {length} tokens; this one holds 0 to {self.capacity}")
        shapes = {
            **{f"rows.{i}": shape for i, shape in enumerate(self.row_shapes(length))},
            **{f"point.{i}": shape for i, shape in enumerate(self.point_shapes(length))},
        }
        if arrays.keys() != shapes.keys():
            raise BimetalError(f"a saved state has {len(arrays)} arrays; this one takes {len(shapes)}, by other names")
        rows, point = list[Parts](), list[np.ndarray]()
        for name, (shape, dtype) in shapes.items():
            array = arrays[name]
            parts: Parts = [array] if isinstance(array, np.ndarray) else array
            if (found := _joined(parts)) != (shape, np.dtype(dtype)):
                raise BimetalError(
                    f"array {name} of a saved state is {found[1]} {found[0]}; this one takes {np.dtype(dtype)} {shape}"
                )
            if name.startswith("rows."):
                rows.append(parts)
            else:
                point += parts
        self.load_parts(length, rows, point)
        self.long_steps = list(long_steps)

    def load_parts(self, length: int, rows: list[Parts], point: list[np.ndarray]) -> None:
        """Load arrays, as `load` does, that are known to fit."""
        for state in self._all():
            own, beside = len(state.row_shapes(length)), len(state.point_shapes(length))
            state.load(length, rows[:own], point[:beside])
            rows, point = rows[own:], point[beside:]
        self.length = length
        self._note_rewind(0)  # the rows of earlier snapshots are gone


def _joined(parts: Parts) -> Shape:
    """Return shape and dtype of all parts together, or of the first part that does not fit the previous one."""
    shape, dtype = parts[0].shape, parts[0].dtype
    for part in parts[1:]:
        if (part.shape[0], *part.shape[2:], part.dtype) != (shape[0], *shape[2:], dtype):
            return part.shape, part.dtype
        shape = shape[0], shape[1] + part.shape[1], *shape[2:]
    return shape, dtype


class Pool(Protocol):
    """States of several sequences in one memory; a step over the pool has rows of any of the sequences."""

    def new_state(self) -> State:
        """Make an empty state in a free slot; the slot is free again when the state is deleted."""
        ...

    def commit_rows(self, states: Sequence[State], counts: Sequence[int]) -> None:
        """Commit the first `counts` rows, at least one, that the last step had of each state, as State.commit."""
        ...

    @property
    def free_tokens(self) -> int | None:
        """Count the tokens for which shared memory is free; None: each sequence has memory for a whole context."""
        ...
