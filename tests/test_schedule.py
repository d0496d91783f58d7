"""The policy of an engine over a fake model and a fake clock: who begins, and who runs next."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from common.schedule import MOST_OWED, MOST_SKIPS, BusyError, Schedule


@dataclass(eq=False)
class Fake:
    """A sequence that reads `chunks` steps of its prompt and then decodes `left` tokens, `rows` rows a step."""

    arrival: int
    chunks: int = 0
    left: int = 5
    rows: int = 1
    priority: int = 0
    size: int = 1
    waited: int = 0
    skips: int = 0
    begun: float = -1.0
    is_divided: bool = False
    ran: list[float] = field(default_factory=list)

    @property
    def reads(self) -> bool:
        return self.chunks > 0


class Machine:
    """Runs fakes by a schedule: a step of a prompt takes `chunk` seconds, one of decoding `step`."""

    def __init__(self, slots=4, memory=10**9, joins=True, chunk=0.1, step=0.01, batches=1):
        self.schedule, self.slots, self.memory = Schedule(joins, batches=batches), slots, memory
        self.chunk, self.step, self.now = chunk, step, 0.0
        self.waiting, self.running, self.prompt_seconds, self.decode_seconds = [], [], 0.0, 0.0
        self.rows, self.batches = [], []

    def begin(self, item):
        if len(self.running) >= self.slots or sum(each.size for each in self.running) + item.size > self.memory:
            return False
        self.running.append(item)
        item.begun = self.now
        return True

    def turn(self):
        self.schedule.admit(self.waiting, self.begin)
        item = self.schedule.reader(self.running)
        if item is not None:
            decoders = any(not each.reads for each in self.running)
            self.now += self.chunk
            self.prompt_seconds += self.chunk * decoders
            item.chunks -= 1
            self.schedule.has_read(self.chunk, decoders)
            return
        chosen = self.schedule.step([each for each in self.running if not each.reads])
        self.now += self.step
        self.decode_seconds += self.step
        self.rows.append(sum(each.rows for each in chosen))
        self.batches.append(sorted(each.arrival for each in chosen))
        for each in chosen:
            each.ran.append(self.now)
            each.left -= 1
            if not each.left:
                self.running.remove(each)
        self.schedule.has_decoded(self.step)

    def drain(self):
        while self.waiting or self.running:
            self.turn()


def test_the_oldest_begins_first_and_every_slot_is_used():
    machine = Machine(slots=2)
    machine.waiting = [Fake(3), Fake(1), Fake(2)]
    machine.turn()
    assert sorted(each.arrival for each in machine.running) == [1, 2]
    machine.drain()


def test_a_higher_priority_begins_first_and_is_read_first():
    machine = Machine(slots=2)
    machine.waiting = [Fake(1, 3), Fake(2, 3), Fake(3, 3, priority=1)]
    machine.turn()
    assert sorted(each.arrival for each in machine.running) == [1, 3]
    assert [each.chunks for each in sorted(machine.running, key=lambda each: each.arrival)] == [3, 2]


def test_what_does_not_fit_is_passed_a_few_times_and_then_waited_for():
    """A stream of small calls must not starve a large one, whatever their priority."""
    machine = Machine(slots=8, memory=10)
    large = Fake(0, size=10, left=3)
    machine.running = [Fake(-1, left=40)]
    machine.waiting = [large]
    small = []
    for n in range(1, 60):
        small.append(Fake(n, priority=1))
        machine.waiting.append(small[-1])
        machine.turn()
    machine.drain()
    assert large.skips == MOST_SKIPS
    assert large.begun >= 0
    later = [each for each in small if each.begun < large.begun]
    assert len(later) == MOST_SKIPS


def test_prompts_take_at_most_half_of_the_time_while_others_decode():
    machine = Machine(slots=4)
    machine.waiting = [Fake(1, 0, left=400), Fake(2, 12, left=5), Fake(3, 12, left=5)]
    while any(each.reads for each in (*machine.waiting, *machine.running)) or machine.waiting:
        machine.turn()
        assert machine.prompt_seconds <= machine.decode_seconds + machine.chunk + 1e-9
    assert machine.prompt_seconds > 0.4 * (machine.prompt_seconds + machine.decode_seconds)


def test_one_slow_step_does_not_hold_prompts_back_for_long():
    """A backend may compile in a step."""
    machine = Machine(chunk=60.0)
    machine.running = [Fake(0, 0, left=10**6), Fake(1, 2)]
    machine.turn()
    machine.chunk, started = 0.1, machine.now
    while machine.running[1].chunks:
        machine.turn()
    assert machine.now - started < MOST_OWED + 0.2


def test_a_lone_prompt_is_read_at_once():
    machine = Machine()
    machine.waiting = [Fake(1, 5)]
    for _ in range(5):
        machine.turn()
    assert machine.decode_seconds == 0
    assert not machine.running[0].reads


def test_prompts_are_read_one_after_another():
    machine = Machine()
    machine.waiting = [Fake(1, 3), Fake(2, 3)]
    for _ in range(3):
        machine.turn()
    assert sorted(each.chunks for each in machine.running) == [0, 3]


def test_a_step_has_no_more_rows_than_fit_and_nobody_starves():
    machine = Machine(slots=12)
    plain = [Fake(n, left=50) for n in range(4)]
    trees = [Fake(n, left=50, rows=rows) for n, rows in enumerate((64, 64, 48, 32, 136, 16), 4)]
    machine.waiting = [*plain, *trees]
    machine.drain()
    assert max(machine.rows) <= 136
    for each in (*plain, *trees):
        gaps = [b - a for a, b in zip(each.ran, each.ran[1:], strict=False)]
        assert max(gaps) <= 6.5 * machine.step


def test_plain_rows_always_fit_beside_trees_of_a_usual_size():
    machine = Machine(slots=64)
    plain = [Fake(n, left=20) for n in range(60)]
    machine.waiting = [*plain, Fake(60, left=20, rows=64), Fake(61, left=20, rows=64)]
    machine.drain()
    for each in plain:
        assert max(b - a for a, b in zip(each.ran, each.ran[1:], strict=False)) <= 1.5 * machine.step


@pytest.mark.parametrize(("batches", "count"), [(2, 2), (2, 5), (3, 2), (3, 4), (3, 7), (2, 16)])
def test_micro_batches_take_turns(batches, count):
    """Every sequence runs once in a round, beside the same others, in as many equal steps as there are devices."""
    machine = Machine(slots=16, batches=batches)
    machine.running = [Fake(n, left=12) for n in range(count)]
    machine.drain()
    steps = min(batches, count)
    assert machine.batches[: 11 * steps] == machine.batches[:steps] * 11
    assert sorted(n for batch in machine.batches[:steps] for n in batch) == list(range(count))
    sizes = [len(batch) for batch in machine.batches[:steps]]
    assert max(sizes) - min(sizes) <= 1


def test_micro_batches_stay_even_where_sequences_come_and_go():
    """Sizes differ by one at most, nobody waits for long, and whoever is in a micro-batch mostly stays there."""
    random, schedule = np.random.default_rng(1), Schedule(True, batches=2)
    decoders, ran, twice = [Fake(n) for n in range(4)], dict.fromkeys(range(4), 3), 0
    for n in range(4, 400):
        chosen = schedule.step(list(decoders))
        assert abs(2 * len(chosen) - len(decoders)) <= 1
        twice += sum(ran.get(each.arrival) == n - 1 for each in chosen)
        ran |= {each.arrival: n for each in chosen}
        assert all(n - ran.get(each.arrival, each.arrival) <= 3 for each in decoders)
        if random.random() < 0.3:
            decoders.append(Fake(n))
        if random.random() < 0.3 and len(decoders) > 3:
            decoders.pop(int(random.integers(len(decoders))))
    assert twice < 40


def test_without_joined_steps_sequences_take_turns():
    machine = Machine(slots=3, joins=False)
    machine.waiting = [Fake(1, left=6), Fake(2, left=6), Fake(3, left=6)]
    machine.drain()
    assert machine.rows == [1] * 18


def test_the_youngest_of_the_lowest_priority_gives_its_memory():
    schedule, items = Schedule(True), [Fake(1), Fake(2), Fake(3, priority=1), Fake(4, priority=1)]
    assert schedule.victim(items).arrival == 2
    assert schedule.next_resumed(items).arrival == 3


def test_a_full_queue_refuses():
    schedule = Schedule(True, queue=2)
    schedule.check_room(1)
    with pytest.raises(BusyError, match="2 calls wait for the model, and the queue holds 2; call again later"):
        schedule.check_room(2)


def test_a_thousand_calls_all_end():
    machine = Machine(slots=6, memory=30)
    waiting = [Fake(n, n % 4, 1 + n % 7, 1 + n * 13 % 40, n % 3, 1 + n % 25) for n in range(1000)]
    for each in waiting:
        machine.waiting.append(each)
        machine.turn()
    machine.drain()
    assert all(each.left == 0 for each in waiting)


@pytest.mark.parametrize(
    ("drafting", "others", "most"),
    [(1, 0, None), (2, 0, 31), (1, 1, 62), (4, 0, 15), (16, 0, 3), (32, 0, 1), (33, 0, 0), (64, 0, 0), (2, 100, 0)],
)
def test_draft_tokens_shrink_with_the_number_that_decode(drafting, others, most):
    assert Schedule(joins=True).most_drafted(drafting, others) == most
