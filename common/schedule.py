"""Schedule of an engine, without tensors: which waiting sequences begin, and whose rows the next step has.

- A waiting sequence begins when a slot and memory are free for it: the highest priority first, with equal priority the
  oldest. At most MOST_SKIPS later sequences may overtake a sequence for which memory is not free.
- A long step of a prompt is computed in parts of consecutive layers; other sequences decode between two parts.
- While sequences decode, steps of prompts take at most half of the host's time, which equals the time of the steps if
  the host waits for them. If the host does not wait, parts of prompts and steps of decoding alternate. Prompts are read
  one after another.
- A step of decoding has at most `most_rows` rows. A sequence that did not fit in a step is first in the next one.
- If a backend computes several steps at once, decoding sequences are divided into the same number of micro-batches,
  which run one after another and whose sizes differ by at most one. A sequence stays in its micro-batch if possible.
- If several sequences decode, their draft tokens and newest tokens together are at most VERIFY_ROWS rows, in equal
  parts: an additional row of a long step takes more time than a draft token is likely to save.
- If memory runs out, the youngest sequence is suspended. It resumes unchanged when another sequence has ended; no
  sequence begins before that.
- At most `queue` sequences wait; further ones are refused.
"""

from collections.abc import Callable, Collection
from typing import Protocol, TypeVar

from common.errors import BimetalError
from common.step import MAX_DECODE_ROWS

MOST_SKIPS = 4
MOST_OWED = 2.0  # maximum seconds owed to decoding, because a first step may take long to compile
VERIFY_ROWS = 64
QUEUE = 256  # maximum number of sequences that wait
SHARED_PREFILL_ROWS = 1024  # maximum rows of a prompt's step while other replies wait for it


class BusyError(BimetalError):
    """The queue is full."""


class Item(Protocol):
    """A sequence as the schedule reads it.

    priority  higher begins first, and has its prompt read first
    arrival   number that grows from one sequence to the next
    reads     whether its next step is a step of its prompt
    is_divided  whether some parts of that step have run
    rows      rows of its next step, if it decodes
    waited    steps of decoding since the last step that had room for it
    skips     later arrivals that began before it
    """

    priority: int
    arrival: int
    waited: int
    skips: int

    @property
    def reads(self) -> bool: ...

    @property
    def is_divided(self) -> bool: ...

    @property
    def rows(self) -> int: ...


T = TypeVar("T", bound=Item)


class Schedule:
    """The scheduling policy, and the time that decoding is owed because steps of prompts ran.

    joins    whether a step may have rows of several sequences
    batches  number of steps of decoding that the backend computes at once
    """

    def __init__(self, joins: bool, queue: int = QUEUE, most_rows: int = MAX_DECODE_ROWS, batches: int = 1):
        self.joins, self.queue, self.most_rows, self.batches = joins, queue, most_rows, batches
        self.owed = 0.0  # seconds
        self._batch_of: dict[int, int] = {}  # the micro-batch of each sequence that decoded last, by arrival
        self._last = 0  # the micro-batch that ran last

    def check_room(self, waiting: int) -> None:
        """Refuse a further sequence; raises BusyError."""
        if waiting >= self.queue:
            raise BusyError(f"{waiting} calls wait for the model, and the queue holds {self.queue}; call again later")

    def admit(self, waiting: list[T], begin: Callable[[T], bool]) -> list[T]:
        """Begin the sequences that may begin; remove them from `waiting` and return them.

        begin  function that takes a slot and memory for a sequence, or returns False
        """
        begun: list[T] = []
        for item in sorted(waiting, key=lambda item: (item.skips < MOST_SKIPS, -item.priority, item.arrival)):
            waiting.remove(item)
            if begin(item):
                begun.append(item)
                for other in waiting:
                    other.skips += other.arrival < item.arrival
                continue
            waiting.append(item)
            if item.skips >= MOST_SKIPS:
                break
        return begun

    def reader(self, running: Collection[T]) -> T | None:
        """Return the sequence whose prompt is read next; None if a step of decoding is next."""
        readers = [item for item in running if item.reads]
        if not readers or (self.owed > 0 and any(not item.reads for item in running)):
            return None
        return min(readers, key=lambda item: (not item.is_divided, -item.priority, item.arrival))

    def step(self, decoders: list[T]) -> list[T]:
        """Select sequences whose rows fit one step: those that waited longest first, then those with fewest rows.

        With several micro-batches, only sequences of the next one are selected.
        """
        if self.batches > 1 and len(decoders) > 1:
            decoders = self._next_batch(decoders)
        if len(decoders) < 2 or (self.joins and sum([item.rows for item in decoders]) <= self.most_rows):
            for item in decoders:
                item.waited = 0
            return sorted(decoders, key=lambda item: item.arrival)
        chosen: list[T] = []
        rows = 0
        for item in sorted(decoders, key=lambda item: (-item.waited, item.rows, item.arrival)):
            fits = rows + item.rows <= self.most_rows if self.joins else not chosen
            if fits:
                chosen.append(item)
                rows += item.rows
                item.waited = 0
            else:
                item.waited += 1
        return chosen

    def _next_batch(self, decoders: list[T]) -> list[T]:
        """Divide `decoders` into micro-batches, and return the one that runs next."""
        members: list[list[T]] = [[] for _ in range(self.batches)]
        added: list[T] = []
        for item in sorted(decoders, key=lambda item: item.arrival):
            number = self._batch_of.get(item.arrival)
            (added if number is None else members[number]).append(item)
        for item in added:
            min(members, key=len).append(item)
        while len(most := max(members, key=len)) > len(least := min(members, key=len)) + 1:
            least.append(most.pop())
        self._batch_of = {item.arrival: number for number, batch in enumerate(members) for item in batch}
        turns = [(self._last + n) % self.batches for n in range(1, self.batches + 1)]
        self._last = next(number for number in turns if members[number])
        return members[self._last]

    def most_drafted(self, drafting: int, others: int) -> int | None:
        """Return the maximum draft tokens of each of `drafting` sequences while `others` decode too; None: no limit."""
        if drafting + others < 2:
            return None
        return max(0, (VERIFY_ROWS - others) // drafting - 1)

    def victim(self, running: Collection[T]) -> T:
        """Choose the sequence that is suspended when memory runs out: the lowest priority, then the youngest."""
        return min(running, key=lambda item: (item.priority, -item.arrival))

    def next_resumed(self, suspended: Collection[T]) -> T:
        """Choose the suspended sequence that resumes first."""
        return max(suspended, key=lambda item: (item.priority, -item.arrival))

    def has_read(self, seconds: float, decoders: bool) -> None:
        """Count a step of a prompt; `decoders` states whether other sequences decode."""
        self.owed = min(self.owed + seconds, MOST_OWED) if decoders else 0.0

    def has_decoded(self, seconds: float) -> None:
        """Count a step of decoding."""
        self.owed = max(0.0, self.owed - seconds)
