"""How many tokens to guess per step, learnt while decoding from what steps take and what they gain."""

import math
from collections.abc import Sequence

MEMORY = 32  # steps that an average looks back
FIRST = 3  # runs of a size of which the fastest counts, as one: a backend may compile or capture in the others
PROBE = 16  # every so many steps a neighbouring size or none may run, so that its figures stay true
SHARE = 0.02  # of the time, at most, that these may lose: on a CPU a step that guesses takes several plain ones' time


class Mean:
    """A running mean that forgets."""

    def __init__(self) -> None:
        self.value, self.count = 0.0, 0

    def add(self, x: float) -> None:
        self.count += 1
        self.value += (x - self.value) / min(self.count, MEMORY)


class Tuner:
    """Picks the budget with the most tokens per second among `sizes`, ascending.

    A tree grown to a budget holds those of all smaller budgets, its first nodes. So a step tells what every smaller one
    would have gained, and only its own time.
    """

    def __init__(self, sizes: Sequence[int]):
        self.sizes = tuple(sizes)
        self.gain = {size: Mean() for size in self.sizes}
        self.seconds = {size: Mean() for size in self.sizes}
        self.runs = dict.fromkeys(self.sizes, 0)
        self.least = dict.fromkeys(self.sizes, math.inf)  # seconds of a run
        self.steps = 0
        self.spare = 0.0  # seconds that may be lost

    def choose(self) -> int:
        self.steps += 1
        middle = self.sizes[len(self.sizes) // 3]
        for size in (middle, self.sizes[0]):
            if not self.seconds[size].count:
                return size
        measured = [i for i, size in enumerate(self.sizes) if self.seconds[size].count]
        best = max(measured, key=lambda i: self.rate(self.sizes[i]))
        beside = [i for i in (best + 1, best - 1) if 0 <= i < len(self.sizes)]
        for i in beside:  # the best so far may only be the best of those that were tried
            if i not in measured:
                return self.sizes[i]
        if self.steps % PROBE == 0:
            others = [i for i in (*beside, 0) if i != best]
            probed = self.sizes[others[self.steps // PROBE % len(others)]]
            lost = self.seconds[probed].value - self.gain[probed].value / self.rate(self.sizes[best])
            if lost <= self.spare:
                self.spare -= max(lost, 0)
                return probed
        return self.sizes[best]

    def record(self, size: int, path: Sequence[int], seconds: float) -> None:
        """A step that ran for `size` accepted the nodes `path`, its root first."""
        self.runs[size] += 1
        self.spare += SHARE * seconds
        self.least[size] = min(self.least[size], seconds)
        if self.runs[size] >= FIRST:
            self.seconds[size].add(self.least[size] if self.runs[size] == FIRST else seconds)
        for smaller in self.sizes:
            if smaller <= size:
                self.gain[smaller].add(sum(node <= smaller for node in path))

    @property
    def plain_seconds(self) -> float | None:
        """Of a step that guesses nothing."""
        return self.seconds[0].value if self.seconds[0].count else None

    def rate(self, size: int) -> float:
        """Tokens per second."""
        return self.gain[size].value / max(self.seconds[size].value, 1e-9)
