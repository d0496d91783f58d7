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
    """A store of states beside the slots, by the tokens that led to them: common.prefix_cache.PrefixCache is one."""

    def restore(self, tokens: Sequence[int], state: State, reading: Reading, more_than: int = 0) -> Found:
        """Bring `state` to the longest stored prefix of `tokens`, longer than `more_than` and shorter than all of them.

        Only to one whose bits are those that `reading` gives.
        """
        ...

    def offer(self, tokens: Sequence[int], state: State, why: str = "turn") -> None:
        """Keep `state`, which holds exactly `tokens`, if it is worth it: at a cut of a prompt, or at a reply's end."""
        ...

    def close(self) -> None:
        """Return once all that is to outlive the process is kept."""
        ...


class Slot:
    """A state, the tokens committed to it, and a point that it can go back to.

    tokens  the last prompt and its reply
    turn    what the next prompt may begin with, the state after it, and the logits where that is a whole prompt
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
        """Forget everything; the state stays, and with it what a backend has captured for it."""
        self.state.restore(self._empty)
        self.tokens, self.turn = [], None

    def reusable(self, prompt: list[int], reading: Reading) -> int:
        """Tokens of `prompt`, which `reading` divides into steps, that `rewind` would keep."""
        if self._goes_on(prompt, reading):
            return self.state.length
        return len(self.turn[0]) if self._returns(prompt, reading) and self.turn else 0

    def rewind(self, prompt: list[int], reading: Reading) -> int:
        """Bring the state to a prefix of `prompt` that has the bits of `reading`, and return its length.

        A recurrent state cannot drop tokens, so the choices are the state as it is, as it was after what the last
        prompt shares with this one, or empty.
        """
        kept = self.reusable(prompt, reading)
        if not self._goes_on(prompt, reading):
            if kept:
                assert self.turn
                self.state.restore(self.turn[1])
            else:
                self.reset()
        self.tokens = list(prompt)
        return kept

    def _goes_on(self, prompt: list[int], reading: Reading) -> bool:
        length = self.state.length
        same = 0 < length < len(prompt) and self.tokens[:length] == prompt[:length]
        return same and reading.goes_on_from(length, self.state.long_steps)

    def _returns(self, prompt: list[int], reading: Reading) -> bool:
        if self.turn is None:
            return False
        tokens, snapshot, logits = self.turn
        same = tokens == prompt[: len(tokens)] and (len(tokens) < len(prompt) or logits is not None)
        before = [step for step in self.state.long_steps if step[0] < snapshot.length]
        return same and reading.goes_on_from(snapshot.length, before)

    def suspend(self) -> None:
        """Move the state to the host, and give its memory to others; raises BimetalError where it cannot be saved."""
        state = self.state
        if not state.can_save:
            raise BimetalError("memory ran out, and a state of this model cannot be moved to the host")
        self._saved = state.save(), state.length, list(state.long_steps)
        state.restore(self._empty)
        if state.pool is None:
            state.load(state.save(), 0)  # arrays without rows, in place of those that had grown
        self.turn = None

    def resume(self) -> None:
        """Take the state back from the host; raises NoRoomError, and changes nothing, where memory is short."""
        assert self._saved is not None
        arrays, length, long_steps = self._saved
        self.state.load(arrays, length, long_steps)
        self._saved = None

    def mark(self, length: int, logits: Any = None) -> None:
        """Remember the state as it is: after `length` tokens, which are the whole prompt where `logits` are given."""
        self.turn = self.tokens[:length], self.state.snapshot(), logits
