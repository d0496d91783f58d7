"""The state of one sequence, and its reuse by later prompts."""

from collections.abc import Sequence
from typing import Any, Protocol

from common.errors import BimetalError
from common.models import Model
from common.ops import Array
from common.prefix_cache import Found
from common.reading import Reading
from common.step import LongStep, Pool, Snapshot, State


class Prefixes(Protocol):
    """A store of states beside the slots, found by their tokens, such as common.prefix_cache.PrefixCache."""

    def restore(self, tokens: Sequence[int], state: State, reading: Reading, more_than: int = 0) -> Found:
        """Load the longest stored proper prefix of `tokens`, above `more_than` tokens, into `state`.

        Only a state with the bits that `reading` gives is used.
        """
        ...

    def offer(self, tokens: Sequence[int], state: State, why: str = "turn") -> None:
        """Keep `state`, which holds exactly `tokens`, if it is useful: at a cut of a prompt, or at a reply's end."""
        ...

    def close(self) -> None:
        """Wait until all states that should outlive the process are stored."""
        ...


class Slot:
    """A state, the tokens committed to it, and a snapshot to which it can be restored.

    tokens  the last prompt and its reply
    turn    tokens with which the next prompt may begin, the snapshot after them, and the logits after a whole prompt
    used    when the slot was last taken, as a count
    """

    def __init__(self, model: Model, context: int, pool: Pool | None = None):
        self.state: State = model.new_state(context) if pool is None else pool.new_state()
        self._empty = self.state.snapshot()
        self.used = 0
        self.tokens: list[int] = []
        self._saved: tuple[dict[str, Any], int, list[LongStep]] | None = None  # while it is suspended
        self.turn: tuple[list[int], Snapshot, Array | None] | None = None

    @property
    def committed(self) -> list[int]:
        """The tokens that the state holds."""
        return self.tokens[: self.state.length]

    def reset(self) -> None:
        """Empty the state; the object is kept, with the graphs that a backend has captured for it."""
        self.state.restore(self._empty)
        self.tokens, self.turn = [], None

    def reusable(self, prompt: list[int], reading: Reading) -> int:
        """Count the tokens of `prompt`, divided into steps by `reading`, that `rewind` would keep."""
        if self._continues(prompt, reading):
            return self.state.length
        return len(self.turn[0]) if self._returns(prompt, reading) and self.turn else 0

    def rewind(self, prompt: list[int], reading: Reading) -> int:
        """Bring the state to a prefix of `prompt` that has the bits of `reading`, and return its length.

        A recurrent state cannot drop tokens, so that there are three choices: the state as it is, the snapshot of
        `turn`, or an empty state.
        """
        kept = self.reusable(prompt, reading)
        if not self._continues(prompt, reading):
            if kept:
                assert self.turn
                self.state.restore(self.turn[1])
            else:
                self.reset()
        self.tokens = list(prompt)
        return kept

    def _continues(self, prompt: list[int], reading: Reading) -> bool:
        length = self.state.length
        same = 0 < length < len(prompt) and self.tokens[:length] == prompt[:length]
        return same and reading.continues_from(length, self.state.long_steps)

    def _returns(self, prompt: list[int], reading: Reading) -> bool:
        if self.turn is None:
            return False
        tokens, snapshot, logits = self.turn
        same = tokens == prompt[: len(tokens)] and (len(tokens) < len(prompt) or logits is not None)
        before = [step for step in self.state.long_steps if step[0] < snapshot.length]
        return same and reading.continues_from(snapshot.length, before)

    def suspend(self) -> None:
        """Move the state to the host and free its memory; raises BimetalError if it cannot be saved."""
        state = self.state
        if not state.can_save:
            raise BimetalError("memory ran out, and a state of this model cannot be moved to the host")
        self._saved = state.save(), state.length, list(state.long_steps)
        state.restore(self._empty)
        if state.pool is None:
            state.load(state.save(), 0)  # arrays without rows, in place of those that had grown
        self.turn = None

    def resume(self) -> None:
        """Move the state back from the host; raises NoRoomError, and changes nothing, if memory is short."""
        assert self._saved is not None
        arrays, length, long_steps = self._saved
        self.state.load(arrays, length, long_steps)
        self._saved = None

    def mark(self, length: int, logits: Any = None) -> None:
        """Take a snapshot after `length` tokens, which are the whole prompt if `logits` are given."""
        self.turn = self.tokens[:length], self.state.snapshot(), logits
