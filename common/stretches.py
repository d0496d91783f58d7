"""Decode a token per step for sequences that each ask for a Stretch, with no request of a decoder per token."""

from collections.abc import Sequence as List
from typing import Any

import numpy as np

from common.decode.requests import THE_ROW, Stretch
from common.errors import BimetalError
from common.ops import Array
from common.row_runner import Choice, Handle, LogitRows, RowRunner, StepResults, token_of, tokens_of
from common.sampling import Samplers
from common.sequence import Sequence

Ended = tuple[Sequence, Exception | None]  # a sequence that ends, and the error that it ends with


class Stretches:
    """Sequences whose rows are computed in the same steps, each sequence within a Stretch.

    What depends on the sequences alone is found once, because a step may be as short as the host's work for it. The
    newest tokens and their logits stay in the arrays of a step; `settle` puts each sequence's own into its Stretch.

    sequences   in the order of their rows
    steps_left  number of steps until one of the stretches ends
    """

    launches_at_once = True  # `launch` does not wait for the device

    def __init__(self, runner: RowRunner, sequences: List[Sequence]):
        self.sequences, self.ops = list(sequences), runner.ops
        self.stretches: list[Stretch] = [each.request for each in sequences]  # type: ignore[misc]
        self.states = [each.run.state for each in self.stretches]
        self.steps_left = max(1, min(map(_steps_left, self.stretches)))  # 1 where a run may no longer run ahead
        self._taken = 0  # steps so far whose tokens were handed out
        samplers = [each.run.sampler for each in self.stretches]
        sampler = samplers[0] if len(samplers) == 1 else Samplers([(each, 1) for each in samplers])
        choice = Choice(sampler, any([each.with_rows for each in sequences]))
        self._choose = runner.single_rows(self.states, choice)
        self._tokens = tokens_of(self.ops, [each.token for each in self.stretches])  # of the rows to be launched
        self._positions = np.array([state.length for state in self.states], np.int32)
        self._found: StepResults | None = None  # the newest tokens; None: they are still in the stretches
        self._logits: Array | None = None  # from which they were chosen; None if no sequence needs its row
        self._ahead: tuple[StepResults, Array | None] | None = None  # tokens and logits of the launched step

    def launch(self) -> "Stretches":
        """Launch the step with the row of each newest token, which the host need not have read; return self."""
        tokens, logits = self._choose(self._tokens, self._positions)
        self._ahead = StepResults(self.ops, tokens), logits
        return self

    def hand_out(self) -> tuple[list[Ended], int, bool]:
        """Add the newest tokens to their replies, and commit their rows, which `launch` computed.

        Returns the sequences that end, the number of tokens, and whether one is a reply's first. If `steps_left` is 0
        then, call `settle`.
        """
        assert self._ahead is not None
        (found, logits), self._ahead = self._ahead, None
        ended, kept, new, begins = list[Ended](), list[int](), 0, False
        rows = zip(self.sequences, self.stretches, self._read(), strict=True)
        for at, (sequence, stretch, token) in enumerate(rows):
            if sequence.request is not stretch:  # it has ended
                continue
            try:
                if isinstance(token, Exception):
                    raise token
                if stretch.read_ids is not None:
                    stretch.read_ids.append(token)
                row = self._row(at) if sequence.with_rows else None
                new, begins = new + 1, begins or not sequence.new_tokens
                if sequence.take(token, row):
                    sequence.opened = sequence.opened or sequence.new_tokens
                    kept.append(at)
                else:
                    ended.append((sequence, None))
            except Exception as error:
                ended.append((sequence, error))
        self._commit(kept)
        if self._found is None:
            for stretch in self.stretches:
                stretch.token = stretch.row = None  # else they would keep the logits before these steps
        self._logits, self._found, self._tokens = logits, found, found.arrays[0]
        self._positions = self._positions + 1  # another array: an earlier step may not have read its own yet
        self._taken, self.steps_left = self._taken + 1, self.steps_left - 1
        if len(kept) < len(self.sequences):
            self.steps_left = 0
        return ended, new, begins

    def _commit(self, numbers: List[int]) -> None:
        """Commit the row of each sequence whose index is in `numbers`."""
        states = self.states if len(numbers) == len(self.states) else [self.states[number] for number in numbers]
        if (pool := self.states[0].pool) is not None:
            pool.commit_rows(states, [1] * len(states))
            return
        for state in states:
            state.commit(THE_ROW)

    def _read(self) -> List[int | Exception]:
        """Bring the newest tokens to the host; an error in place of a token whose logits hold NaN."""
        if self._found is not None:
            return self._found.tokens()
        return [_token(self.ops, each.token) for each in self.stretches]

    def _row(self, number: int) -> Any:
        """Return the logits row (1, vocab) from which the newest token of sequence `number` was chosen, or None."""
        if self._found is None:
            return self.stretches[number].row
        return None if self._logits is None else LogitRows(self._logits, number, number + 1)

    def stop(self) -> None:
        """Launch no further step: `settle` at once, or after the tokens before the launched step were handed out."""
        if self._ahead is None:
            self.settle()
        else:
            self.steps_left = 1

    def settle(self) -> list[Sequence]:
        """Put the newest tokens into the stretches, for other steps; return the sequences whose stretch has ended."""
        for number, stretch in enumerate(self.stretches):
            if self._found is not None:
                stretch.row, stretch.token = self._row(number), Handle(self._found, slice(number, number + 1))
            stretch.remaining -= self._taken
        self._taken, self.steps_left, self._found, self._logits, self._tokens = 0, 0, None, None, None
        live = zip(self.sequences, self.stretches, strict=True)
        return [each for each, stretch in live if each.request is stretch and not _steps_left(stretch)]


def _steps_left(stretch: Stretch) -> int:
    """Count the steps until a stretch ends; at least 1 of a stretch that has just been requested."""
    run = stretch.run
    goes_on = run.runs_ahead and not run.reconsiders
    return min(stretch.remaining, run.state.capacity - run.state.length) if goes_on else 0


def _token(ops: Any, handle: Any) -> int | Exception:
    try:
        return token_of(ops, handle)
    except BimetalError as error:
        return error
