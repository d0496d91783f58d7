"""The memory of one sequence, and what a later prompt can reuse of it."""

from collections.abc import Sequence
from typing import Any, Protocol

from common.models import Model
from common.ops import Array
from common.step import Snapshot, State


class Prefixes(Protocol):
    """A store of states beside the slots, by the tokens that led to them."""

    def restore(self, tokens: Sequence[int], state: State, more_than: int) -> int:
        """Bring `state` to the longest stored prefix of `tokens` that is longer than `more_than`, and not all of them.

        Returns the prefix's length, or 0, after which `state` is as it was.
        """

    def offer(self, tokens: Sequence[int], state: State) -> None:
        """Store, if it is worth it, `state`, which holds exactly `tokens`: a cut of a prompt, or the end of a reply."""


class Slot:
    """A state, the tokens committed to it, and a point that it can go back to.

    tokens  the last prompt and its reply
    turn    what the next prompt may begin with, the state after it, and the logits where that is a whole prompt
    used    when the slot was last taken, as a count
    """

    def __init__(self, model: Model, context: int):
        self.state: State = model.new_state(context)
        self._empty = self.state.snapshot()
        self.used = 0
        self.tokens: list[int] = []
        self.turn: tuple[list[int], Snapshot, Array | None] | None = None

    @property
    def committed(self) -> list[int]:
        """Those of the tokens that the state holds."""
        return self.tokens[: self.state.length]

    def reset(self) -> None:
        """Forget everything; the state stays, and with it what a backend has captured for it."""
        self.state.restore(self._empty)
        self.tokens, self.turn = [], None

    def reusable(self, prompt: list[int]) -> int:
        """Tokens of `prompt` that `rewind` would keep."""
        if self._goes_on(prompt):
            return self.state.length
        return len(self.turn[0]) if self._returns(prompt) and self.turn else 0

    def rewind(self, prompt: list[int], prefixes: Prefixes | None = None) -> int:
        """Bring the state to a prefix of `prompt`, and return its length.

        A recurrent state cannot drop tokens, so the choices are the state as it is, as it was after what the last
        prompt shares with this one, a stored one, or empty.
        """
        kept = self.reusable(prompt)
        if not self._goes_on(prompt):
            if kept:
                assert self.turn
                self.state.restore(self.turn[1])
            else:
                self.reset()
        stored = 0 if prefixes is None else prefixes.restore(prompt, self.state, kept)
        if stored:
            self.turn = None
        self.tokens = list(prompt)
        return stored or kept

    def _goes_on(self, prompt: list[int]) -> bool:
        length = self.state.length
        return 0 < length < len(prompt) and self.tokens[:length] == prompt[:length]

    def _returns(self, prompt: list[int]) -> bool:
        if self.turn is None:
            return False
        tokens, _, logits = self.turn
        return tokens == prompt[: len(tokens)] and (len(tokens) < len(prompt) or logits is not None)

    def mark(self, length: int, logits: Any = None) -> None:
        """Remember the state as it is: after `length` tokens, which are the whole prompt where `logits` are given."""
        self.turn = self.tokens[:length], self.state.snapshot(), logits


def next_cut(at: int, end: int, grid: int, shared: int) -> int:
    """Where the step of a prompt that begins at token `at` ends.

    Cuts are the multiples of `grid`, `shared` and `end`: they depend on the prompt alone, never on what else runs or on
    how much of it a state held before. Backends multiply long steps in an order that depends on their rows.
    """
    return min(cut for cut in ((at // grid + 1) * grid, shared, end) if cut > at)
