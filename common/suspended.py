"""Suspended sequences, whose states are on the host until a running sequence has ended."""

from common.errors import NoRoomError
from common.schedule import Schedule
from common.sequence import Sequence
from common.slot import Slot
from common.slots import Slots

Failed = tuple[Sequence, Exception]  # a sequence that must end, and the error that it ends with


class Suspended:
    """Sequences whose states were moved to the host, and methods to move states there and back.

    sequences  sequences whose states are on the host
    has_ended  whether a sequence has ended since the last one was suspended: memory may be free again
    count      number of suspensions so far
    """

    def __init__(self, schedule: Schedule, memory: Slots):
        self._schedule, self._memory = schedule, memory
        self.sequences: list[Sequence] = []
        self.has_ended, self.count = False, 0

    def make_room(self, running: list[Sequence], error: NoRoomError) -> Failed | None:
        """Free memory for a step that had none: empty an idle slot, else suspend one of `running`.

        If the only running sequence lacks memory, or a state cannot be saved, returns the sequence that must end.
        """
        if self._memory.forget_one(self._taken(running)):
            return None
        victim = self._schedule.victim(running)
        if len(running) == 1:
            return victim, error
        try:
            assert victim.slot
            victim.unfinished_parts = None  # an unfinished prefill step runs again from its beginning
            victim.slot.suspend()
        except Exception as raised:
            return victim, raised
        running.remove(victim)
        self.sequences.append(victim)
        self.has_ended = False
        self.count += 1
        return None

    def grant(self, running: list[Sequence]) -> bool:
        """Test whether all of `running` can continue; sequences that reach their granted memory are granted more."""
        growing = [each for each in running if each.outgrows]
        if not growing or len(running) == 1:
            return True
        needs = [(each.slot, each.next_grant if each.outgrows else each.granted) for each in running if each.slot]
        if not self._memory.has_room(needs, self._taken(running)):
            return False
        for each in growing:
            each.granted = each.next_grant
        return True

    def resume(self, running: list[Sequence]) -> Failed | None:
        """Resume a sequence if memory may be free; return it if it does not fit even alone, or if loading fails."""
        if running and not self.has_ended:
            return None
        self.has_ended = False
        sequence = self._schedule.next_resumed(self.sequences)
        assert sequence.slot
        needs = [(each.slot, each.granted) for each in (sequence, *running) if each.slot]
        if running and not self._memory.has_room(needs, self._taken(running)):
            return None
        try:
            sequence.slot.resume()
        except NoRoomError as error:
            is_alone = not self._memory.forget_one(self._taken(running)) and not running
            return (sequence, error) if is_alone else None
        except Exception as raised:
            sequence.slot.reset()  # its state may be partly loaded
            return sequence, raised
        self.sequences.remove(sequence)
        running.append(sequence)
        return None

    def _taken(self, running: list[Sequence]) -> list[Slot | None]:
        return [each.slot for each in (*running, *self.sequences)]
