"""The slots of an engine: choice of the slot for a call, and tests for free memory."""

from collections.abc import Collection, Sequence

from common.models import Model
from common.reading import Reading
from common.slot import Slot
from common.step import Pool

SPARE = 0.05  # of free memory, for what is not predicted


class Slots:
    """The slots for at most `parallel` sequences of at most `context` tokens, created when they are needed.

    tokens  capacity of the pool in tokens; None: `parallel` times `context`
    pool    the states of all slots, if the backend has pools; else None
    """

    def __init__(self, model: Model, context: int, parallel: int, tokens: int | None = None):
        self.model, self.context, self.parallel, self.tokens = model, context, parallel, tokens
        self._taken = 0  # how often a slot was taken
        self.pool = self._new_pool()
        self.slots = [Slot(model, context, self.pool)]

    def _new_pool(self) -> Pool | None:
        if self.parallel == 1 or not isinstance(self.model, Model):
            return None
        return self.model.new_pool(self.parallel, self.context, self.tokens)

    @property
    def grows(self) -> bool:
        """Test whether each state allocates memory as it grows, so that its bytes must be predicted."""
        return self.pool is None and isinstance(self.model, Model) and not self.model.ops.reserves

    def renew(self) -> None:
        """Drop all slots and the pool, after a failure of the backend."""
        self.slots.clear()
        self.pool = None  # the next call allocates another pool, or ends with the error

    def reset(self, busy: Collection[Slot | None]) -> None:
        """Empty idle slots."""
        for slot in self.slots:
            if slot not in busy:
                slot.reset()

    def forget_one(self, busy: Collection[Slot | None]) -> bool:
        """Empty the least recently used idle slot; return whether one held anything."""
        held = [slot for slot in self.slots if slot not in busy and slot.tokens]
        if held:
            oldest = min(held, key=lambda slot: slot.used)
            if self.grows:  # an emptied state keeps its memory
                self.slots.remove(oldest)
            else:
                oldest.reset()
        return bool(held)

    def has_room(self, needs: Sequence[tuple[Slot, int]], busy: Collection[Slot | None]) -> bool:
        """Test whether memory is free for each slot to hold its number of tokens; drops idle slots if necessary.

        True if states do not allocate memory themselves: a step then raises NoRoomError.
        """
        (slot, tokens), *others = needs
        idle = sorted((each for each in self.slots if each not in busy), key=lambda each: each.used)
        return not self.grows or self._fits(tokens, slot, others, idle)

    def take(
        self, prompt: list[int], reading: Reading, tokens: int, running: Sequence[tuple[Slot, int]]
    ) -> Slot | None:
        """Take the idle slot with the longest reusable prefix of `prompt`; else an empty or new one; else the oldest.

        None if the running sequences leave no memory for `tokens` tokens. A sequence that runs alone always gets one.

        running  slots that are taken, and the number of tokens that each will hold
        """
        if not self.slots and self.pool is None:
            self.pool = self._new_pool()
        taken = [slot for slot, _ in running]
        idle = sorted((slot for slot in self.slots if slot not in taken), key=lambda slot: slot.used)
        slot = _longest_prefix(idle, prompt, reading) or next((each for each in idle if not each.tokens), None)
        if slot is None and idle:
            may_add = len(self.slots) < self.parallel and self._fits(tokens, None, running, [])
            slot = None if may_add else idle[0]
        if running or self.pool is not None:  # of a pool, even a sequence alone may need the memory of idle slots
            others = [each for each in idle if each is not slot]
            if not self._fits(tokens, slot, running, others) and running:
                return None
        if slot is None:
            slot = Slot(self.model, self.context, self.pool)
            self.slots.append(slot)
        self._taken += 1
        slot.used = self._taken
        return slot

    def idle(self, count: int) -> list[Slot]:
        """Return the `count` slots that hold fewest tokens, at most `parallel`; only call it while no sequence runs."""
        while len(self.slots) < min(count, self.parallel):
            self.slots.append(Slot(self.model, self.context, self.pool))
        return sorted(self.slots, key=lambda slot: slot.state.length)[:count]

    def _fits(self, tokens: int, slot: Slot | None, running: Sequence[tuple[Slot, int]], idle: list[Slot]) -> bool:
        """Test whether memory is free for `tokens` tokens in `slot`, or in a new one; may drop slots of `idle`."""
        model, ops = self.model, self.model.ops
        if not isinstance(model, Model):
            return True
        if self.pool is not None:
            return self._fits_pool(tokens, slot, running, idle)
        if ops.reserves and slot is not None:
            return True
        needed = self._bytes(self.context if ops.reserves else tokens)
        if not ops.reserves:
            needed -= slot.state.nbytes if slot is not None else 0
            needed += sum(max(0, self._bytes(most) - other.state.nbytes) for other, most in running)
        while needed > ops.free_bytes()[0] * (1 - SPARE):
            if not idle:
                return False
            self.slots.remove(idle.pop(0))
        return True

    def _fits_pool(self, tokens: int, slot: Slot | None, running: Sequence[tuple[Slot, int]], idle: list[Slot]) -> bool:
        """Test the memory of the pool as `_fits` does; may empty idle slots."""
        assert self.pool is not None
        needed = tokens - (slot.state.length if slot is not None else 0)
        needed += sum(max(0, most - other.state.length) for other, most in running)
        held = [each for each in idle if each.tokens]  # also if no step was committed: a first step takes memory
        while (free := self.pool.free_tokens) is not None and needed > free:
            if not held:
                return False
            held.pop(0).reset()
        return True

    def _bytes(self, tokens: int) -> int:
        return self.model.ops.held_state_bytes(self.model.sequence_spec, tokens, self.model.ops.prefill_rows)


def _longest_prefix(idle: Sequence[Slot], prompt: list[int], reading: Reading) -> Slot | None:
    """Choose the slot that can reuse most tokens of a prompt; None if no slot can reuse any."""
    best = max(idle, key=lambda slot: slot.reusable(prompt, reading), default=None)
    return best if best is not None and best.reusable(prompt, reading) else None
