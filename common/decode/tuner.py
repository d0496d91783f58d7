"""The budget of each speculative step, chosen while decoding from the time of steps and their accepted tokens."""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence

SECONDS_MEMORY, LENGTH_MEMORY = 32, 16  # steps over which the running means average
FIRST = 3  # steps of a size that count as one, with the time of the fastest, because the others may compile kernels
FIRST_RECORDED = 2  # the same if steps that compile are ignored: the first replay of a graph still takes longer
LENGTHS, FEW_LENGTHS = 6, 2  # steps of a size whose lengths are known before the size is compared with others
DOUBT = 2  # tokens by which the mean of few lengths may be too small
PROMISING = 0.6  # a budget is measured if its estimated rate is above this share of plain decoding's rate
GAP = 2  # steps after plain steps whose lengths are not counted: the draft's context lacks the plain steps
OUTLIER = 3  # times the mean: limit of a step's time
TRIALS = {True: 6, False: 4}  # steps of a trial: of plain decoding (True), of a budget (False)
SHARES = {True: 0.005, False: 0.01}  # of the time of such steps, at most, that trials may lose
SAVED = 32  # maximum time saved for trials, in plain steps, unless the next trial needs more
STRETCH = 32  # plain steps between two choices while plain decoding is best, because a choice takes host time
PATIENCE = 2  # multiple of a trial's cost saved before a trial within a reply: the draft's context may have gaps
DISTURBED = 16  # consecutive steps whose times are ignored, because other work took time as well


class Mean:
    """A running mean in which old values lose weight; `count` is the sum of the weights that were added."""

    def __init__(self, memory: int) -> None:
        self.memory, self.value, self.count = memory, 0.0, 0.0

    def add(self, x: float, weight: float = 1.0) -> None:
        self.count += weight
        self.value += (x - self.value) * weight / min(self.count, self.memory)


class Tuner:
    """Picks the budget with the most tokens per second among `sizes`, ascending; size 0 is plain decoding.

    The first n nodes of a tree are the tree of budget n. A step therefore shows the tokens that every smaller budget
    would have accepted, and the time of its own budget.

    The budgets next to the best one, and plain decoding, are tried again for a few steps from time to time, so that a
    choice can change. Trials cost at most a share of the time, SHARES: the smaller share while plain decoding is best,
    because any trial then finds a budget that is faster.

    first  FIRST, or FIRST_RECORDED where steps that compile are not recorded
    """

    def __init__(self, sizes: Sequence[int], first: int = FIRST):
        self.sizes, self.first = tuple(sizes), first
        self.lengths = {size: Mean(LENGTH_MEMORY) for size in self.sizes}
        self.seconds = {size: Mean(SECONDS_MEMORY) for size in self.sizes}
        self.switch = Mean(SECONDS_MEMORY)  # seconds more that the first plain step takes after another size
        self.runs = dict.fromkeys(self.sizes, 0)
        self.fastest = dict.fromkeys(self.sizes, math.inf)  # seconds of a step
        self.saved = 0.0  # seconds that trials may lose
        self.trial: deque[int] = deque()  # sizes of the steps to come
        self.trials = 0
        self.gap = 0  # steps to come whose lengths are not counted
        self.begins = True  # a reply, before which the prompt filled the draft's context
        self.settled = False  # was the last choice the best size, and not a trial?

    def begin(self) -> None:
        """Note that a reply begins."""
        self.trial.clear()
        self.begins, self.gap = True, 0

    def choose(self, max_budget: int | None = None) -> int:
        """Choose the budget of the next step, of at most `max_budget` draft tokens."""
        sizes = self.sizes if max_budget is None else tuple(size for size in self.sizes if size <= max_budget)
        begins, self.begins, self.settled = self.begins, False, len(sizes) == 1
        if self.settled:
            return 0
        if self.trial:
            return min(self.trial.popleft(), sizes[-1])
        if (first := self._unmeasured(sizes)) is not None:
            return first
        measured = [size for size in sizes if self._is_measured(size)]
        best = max(measured, key=self.rate)
        at = sizes.index(best)
        beside = [sizes[i] for i in (at + 1, at - 1) if 0 <= i < len(sizes)]
        for size in beside:  # the best so far may only be the best of those that were tried
            if size not in measured:
                return size
        others = list(dict.fromkeys((*beside, 0))) if best else [max(filter(None, measured), key=self.rate)]
        tried = others[self.trials % len(others)]
        steps = TRIALS[tried == 0]
        step = self.seconds[tried].value - self.lengths[tried].value / self.rate(best)
        lost = max(steps * step, 0.0) + self.switch.value
        self.saved = min(self.saved, max(SAVED * self.seconds[0].value, PATIENCE * lost))
        if self.saved >= lost * (1 if begins else PATIENCE):
            self.saved -= lost
            self.trials += 1
            self.trial.extend([tried] * (steps - 1) if tried else ())  # plain ones are a stretch: `plain_steps`
            return tried
        self.settled = True
        return best

    def _unmeasured(self, sizes: Sequence[int]) -> int | None:
        """Return one of `sizes` that must be measured before sizes are compared; None: nothing is missing."""
        for size in (sizes[1], 0):
            if not self._is_measured(size):
                return size
        third = sizes[min(len(self.sizes) // 3, 2, len(sizes) - 1)]
        if self.rate(0) > self.rate(sizes[1]):
            # drafts do not pay; the first steps of a further size, which a backend may compile, cost most
            hopes = len(sizes) > 2 and self._prospect(sizes[2], sizes[1]) > PROMISING * self.rate(0)
            third = sizes[2] if hopes else 0
        return None if self._is_measured(third) else third

    def _prospect(self, size: int, known: int) -> float:
        """Estimate the tokens per second of a size from the steps of a smaller one, `known`, as an upper bound.

        This assumes that the steps take equal time, and that each draft token is accepted with the same probability.
        """
        low, high = 0.0, 1.0
        for _ in range(20):  # the share of accepted tokens with which a chain of `known` has its length
            share = (low + high) / 2
            fits = sum(share**i for i in range(known + 1)) < self.lengths[known].value
            low, high = (share, high) if fits else (low, share)
        return sum(low**i for i in range(size + 1)) / max(self.seconds[known].value, 1e-9)

    def _is_measured(self, size: int) -> bool:
        """Test whether a step of `size` was timed, and the lengths of enough steps were counted.

        Few lengths are enough while the time of plain decoding is unknown, and if more tokens per step would not pay.
        """
        seconds, lengths = self.seconds[size], self.lengths[size]
        if size == 0 or not seconds.count or lengths.count >= LENGTHS:
            return seconds.count > 0
        pays = self.seconds[0].count > 0 and (lengths.value + DOUBT) / seconds.value > self.rate(0)
        return lengths.count >= FEW_LENGTHS and not pays

    def plain_steps(self) -> int:
        """Return the number of plain steps after `choose` returned 0 until it must be called again.

        A trial is a stretch too: a choice after each of its steps would take host time that plain decoding does not.
        """
        return STRETCH if self.settled else TRIALS[True]

    def record(self, size: int, path: Sequence[int], seconds: float, switched: bool = False, steps: int = 1) -> None:
        """Record that steps of budget `size` took `seconds` each, and the nodes `path` that the last one accepted.

        switched  a plain step after another size, before which no step was launched ahead
        """
        self.add_time(size, seconds, switched, steps)
        self.gap = self.add_length(size, path, self.gap)

    def add_time(self, size: int, seconds: float, switched: bool = False, steps: int = 1) -> None:
        """Record the time of steps, as `record` does."""
        mean = self.seconds[size]
        if mean.count:
            seconds = min(seconds, OUTLIER * mean.value)
            self.saved += SHARES[size == 0] * seconds * steps
        if switched:
            self.switch.add(max(seconds - mean.value, 0.0) if mean.count else 0.0)
        else:
            self.runs[size] += 1
            self.fastest[size] = min(self.fastest[size], seconds)
            if self.runs[size] >= self.first:
                weight = min(steps, TRIALS[True])  # other work may have taken time beside all steps of a stretch
                if self.runs[size] == self.first:  # the first times may be poor
                    seconds, weight = self.fastest[size], 1
                mean.add(seconds, weight)

    def add_length(self, size: int, path: Sequence[int], gap: int, weight: float = 1.0) -> int:
        """Record the tokens that a step accepted, as `record` does; return the gap after it.

        gap     steps to come of the reply whose lengths are not counted
        weight  of the length: 1 for one reply, less for one of several whose rows are computed in one step
        """
        for smaller in self.sizes if size == 0 or gap == 0 else ():
            if smaller <= size:
                self.lengths[smaller].add(bisect_right(path, smaller), weight)  # a node comes after its parent
        return GAP if size == 0 else max(gap - 1, 0)

    @property
    def plain_seconds(self) -> float | None:
        """Return the mean seconds of a plain step; None before the first."""
        return self.seconds[0].value if self.seconds[0].count else None

    def rate(self, size: int) -> float:
        """Compute the tokens per second of a step with budget `size`."""
        return self.lengths[size].value / max(self.seconds[size].value, 1e-9)


class SharedTuner:
    """A tuner whose choices several replies take together, since their rows are computed in one step.

    If one reply drafted while another decoded plainly, the other would wait for the draft.

    disturbances  counts the steps of prompts and the compiled kernels so far, during which other steps take longer

    users    the replies that take its choices
    number   of the last choice, whose size is `size`; 0 before the first
    timed    number of the last choice after which a reply has recorded a time
    ignored  steps in succession whose times were ignored
    """

    def __init__(self, tuner: Tuner, disturbances: Callable[[], int] = int):
        self.tuner, self.disturbances, self.users = tuner, disturbances, set[TunerShare]()
        self.number, self.size, self.timed, self.ignored = 0, 0, 0, 0

    def add_time(self, size: int, seconds: float, switched: bool, steps: int, quiet: bool) -> None:
        """Record the time of steps as Tuner.record does.

        Steps beside which other work ran are ignored, up to DISTURBED of them in succession.

        quiet  no other work ran beside the steps
        """
        if quiet or self.ignored >= DISTURBED:
            self.ignored = 0
            self.tuner.add_time(size, seconds, switched, steps)
        else:
            self.ignored += 1


class TunerShare:
    """A reply's part in a SharedTuner, with the methods of a Tuner.

    The first reply that calls `choose` again after it took the current choice makes the next one; the other replies
    take that at their next call. Each reply records the tokens that its steps accepted. Only the first reply that
    records after a choice records the time, because a shared step takes it once.
    """

    def __init__(self, shared: SharedTuner):
        self.shared, self.tuner, self.sizes = shared, shared.tuner, shared.tuner.sizes
        self.choice_seen, self.gap = max(shared.number - 1, 0), 0
        self.seen, self.quiet = shared.disturbances(), True  # quiet: the first step is timed after the prompt's token
        shared.users.add(self)

    def leave(self) -> None:
        """Note that the reply has ended."""
        self.shared.users.discard(self)

    def begin(self) -> None:
        """Note that the reply begins."""
        if len(self.shared.users) == 1:
            self.tuner.begin()
            self.choice_seen = self.shared.number  # the last choice was made for earlier replies

    def choose(self, max_budget: int | None = None) -> int:
        """Choose the budget of the next step, of at most `max_budget` draft tokens where this reply begins a choice."""
        shared = self.shared
        if self.choice_seen == shared.number:
            shared.number += 1
            shared.size = self.tuner.choose(max_budget)
        self.choice_seen = shared.number
        return shared.size

    def plain_steps(self) -> int:
        """Return the number of plain steps after `choose` returned 0 until it must be called again."""
        return self.tuner.plain_steps()

    def record(self, size: int, path: Sequence[int], seconds: float, switched: bool = False, steps: int = 1) -> None:
        """Record steps as Tuner.record."""
        was_quiet, seen = self.quiet, self.seen
        self.seen = self.shared.disturbances()
        self.quiet = seen == self.seen
        if self.choice_seen > self.shared.timed or len(self.shared.users) == 1:
            self.shared.timed = self.choice_seen
            # the device may do what was launched before a step after the step before it was recorded
            self.shared.add_time(size, seconds, switched, steps, self.quiet and was_quiet)
        self.gap = self.tuner.add_length(size, path, self.gap, 1 / len(self.shared.users))

    @property
    def plain_seconds(self) -> float | None:
        """Return the mean seconds of a plain step; None before the first."""
        return self.tuner.plain_seconds
