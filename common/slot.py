"""Slots: the state of one sequence, and its reuse by later prompts."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

from common.errors import BimetalError
from common.models import Model
from common.ops import Array
from common.prefix_cache import Found
from common.reading import Reading
from common.saving import save_in_parts
from common.step import LongStep, Pool, Snapshot, State


class Prefixes(Protocol):
    """A store of states outside the slots, looked up by their tokens, such as common.prefix_cache.PrefixCache."""

    def restore(self, tokens: Sequence[int], state: State, reading: Reading, more_than: int = 0) -> Found:
        """Load the longest stored proper prefix of `tokens`, above `more_than` tokens, into `state`.

        Only a state that is bitwise identical to that of `reading` is used.
        """
        ...

    def offer(self, tokens: Sequence[int], state: State, reason: str = "turn") -> None:
        """Keep `state`, which holds exactly `tokens`, if it is useful: at a cut of a prompt, or at a reply's end."""
        ...

    def close(self) -> None:
        """Wait until all states that should outlive the process are stored."""
        ...


class Mark(NamedTuple):
    """A snapshot of a slot's state after `length` tokens, and the logits after them if the prompt ended there."""

    length: int
    snapshot: Snapshot
    logits: Array | None


class Slot:
    """A state, the tokens committed to it, and snapshots to which it can be restored.

    tokens  the last prompt and its reply
    marks   snapshots at prefixes of `tokens` that the next prompt may share, in ascending order
    used    time at which the slot was last taken, as a count
    """

    def __init__(self, model: Model, context: int, pool: Pool | None = None):
        self.state: State = model.new_state(context) if pool is None else pool.new_state()
        self._empty = self.state.snapshot()
        self.used = 0
        self.tokens: list[int] = []
        self._saved: tuple[dict[str, Any], int, list[LongStep]] | None = None  # while it is suspended
        self.marks: list[Mark] = []

    @property
    def committed(self) -> list[int]:
        """Return the tokens that the state holds."""
        return self.tokens[: self.state.length]

    def reset(self) -> None:
        """Empty the state; its object is kept, together with the graphs that a backend has captured for it."""
        self.state.restore(self._empty)
        self.tokens, self.marks = [], []

    def reusable(self, prompt: list[int], reading: Reading) -> int:
        """Count the tokens of `prompt`, divided into steps by `reading`, that `rewind` would keep."""
        if self._continues(prompt, reading):
            return self.state.length
        mark = self._mark(prompt, reading)
        return mark.length if mark else 0

    def rewind(self, prompt: list[int], reading: Reading) -> int:
        """Restore the state at a prefix of `prompt`, as `reading` would give it, and return its length.

        A recurrent state cannot drop tokens. Therefore the result is the current state, a mark, or an empty state.
        """
        if not self._continues(prompt, reading):
            mark = self._mark(prompt, reading)
            if mark:
                self.state.restore(mark.snapshot)
                self.marks = [each for each in self.marks if each.length <= mark.length]
            else:
                self.reset()
        self.tokens = list(prompt)
        return self.state.length

    def logits_after(self, length: int) -> Array | None:
        """Return the logits after `length` tokens, if a prompt ended there."""
        return next((mark.logits for mark in self.marks if mark.length == length), None)

    def _continues(self, prompt: list[int], reading: Reading) -> bool:
        length = self.state.length
        same = 0 < length < len(prompt) and self.tokens[:length] == prompt[:length]
        return same and reading.continues_from(length, self.state.long_steps)

    def _mark(self, prompt: list[int], reading: Reading) -> Mark | None:
        """Return the last mark at which the prompt can continue.

        If the prompt ends at the mark, the mark must have logits, and `reading` must end there too.
        """
        for mark in reversed(self.marks):
            n = mark.length
            goes_on = n < len(prompt) or (n == len(prompt) == reading.end and mark.logits is not None)
            before = [step for step in self.state.long_steps if step[0] < n]
            if goes_on and self.tokens[:n] == prompt[:n] and reading.continues_from(n, before):
                return mark
        return None

    def suspend(self) -> None:
        """Move the state to the host and free its memory; raises BimetalError if it cannot be saved."""
        state = self.state
        if not (state.can_save or state.can_wait):
            raise BimetalError("memory ran out, and a state of this model cannot be moved to the host")
        self._saved = save_in_parts(state), state.length, list(state.long_steps)
        state.restore(self._empty)
        if state.pool is None:
            state.load(state.save(), 0)  # replaces grown arrays by empty ones
        self.marks = []

    def resume(self) -> None:
        """Move the state back from the host; raises NoRoomError, and changes nothing, if memory is short."""
        assert self._saved is not None
        arrays, length, long_steps = self._saved
        self.state.load(arrays, length, long_steps)
        self.forget_saved()

    def forget_saved(self) -> None:
        """Free the copy on the host of a suspended sequence."""
        self._saved = None

    def mark(self, length: int, turns: Collection[int], logits: Any = None) -> None:
        """Take a snapshot after `length` tokens, which are the whole prompt if `logits` are given.

        turns  lengths at which marks are kept
        """
        self.marks = [mark for mark in self.marks if mark.length in turns and mark.length != length]
        self.marks.append(Mark(length, self.state.snapshot(), logits))
