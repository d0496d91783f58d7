"""DecoderRun, the input of a decoder, and the statistics that a decoder fills."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.decode.tuner import Tuner, TunerShare
from common.decoders import Speculation
from common.models import Model
from common.ops import Array
from common.sampling import Sampler
from common.step import State

PHASES = ("plain", "draft", "tree", "verify", "commit", "host")
WEDLM_PHASES = ("forward", "choice", "commit", "host")


@dataclass
class DecodeStats:
    """Counts and times of one reply.

    lengths  histogram of the tokens per step: accepted draft tokens and the target's own
    rows     of all steps
    budgets  how often each budget ran; 0 is a plain step
    seconds  by phase; "plain" is the total time of steps without draft tokens
    """

    lengths: Counter[int] = field(default_factory=Counter)
    rows: int = 0
    budgets: Counter[int] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def add_plain(self, steps: int, seconds: float) -> None:
        """Count `steps` steps without draft tokens."""
        if steps:
            self.lengths[1] += steps
            self.budgets[0] += steps
            self.rows += steps
            self.seconds["plain"] += seconds

    def add_step(self, length: int, budget: int, rows: int, seconds: dict[str, float]) -> None:
        """Count a speculative step of `length` tokens, and its seconds by phase."""
        self.lengths[length] += 1
        self.budgets[budget] += 1
        self.rows += rows
        for phase, took in seconds.items():
            self.seconds[phase] += took

    @property
    def steps(self) -> int:
        return sum(self.lengths.values())

    @property
    def length(self) -> float:
        """Compute the acceptance length: mean tokens per step."""
        return sum(length * count for length, count in self.lengths.items()) / max(self.steps, 1)

    @property
    def by_position(self) -> list[float]:
        """Compute the share of steps that accepted a draft token, for each position after the root."""
        deepest = max(self.lengths, default=1)
        reached = [sum(count for length, count in self.lengths.items() if length > at) for at in range(1, deepest)]
        return [count / self.steps for count in reached]


@dataclass
class WedlmStats:
    """Counts and times of one reply of a WeDLM model.

    forwards  steps after the prefill, without one that is in flight when the reply ends
    fills     steps that filled a position
    rows      rows of all steps, without those of the prompt
    tokens    tokens of the reply
    seconds   by phase; the wait for a device that computes asynchronously counts as "choice"
    """

    forwards: int = 0
    fills: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WEDLM_PHASES, 0.0))

    @property
    def tokens_per_forward(self) -> float:
        """Compute tokens of the reply per forward that filled at least one position."""
        return self.tokens / max(self.fills, 1)

    @property
    def rows_per_token(self) -> float:
        return self.rows / max(self.tokens, 1)

    @property
    def cache_share(self) -> float:
        """Compute tokens of the reply divided by computed rows (p_cache in the paper); 1 for plain decoding."""
        return self.tokens / max(self.rows, 1)

    @property
    def figures(self) -> dict[str, float]:
        """Return the counts, ratios of them, and milliseconds per forward by phase, by their names in JSON."""
        times = {f"{phase}_ms": round(1e3 * s / max(self.forwards, 1), 4) for phase, s in self.seconds.items()}
        return {
            "forwards": self.forwards,
            "fills": self.fills,
            "rows": self.rows,
            "tokens_per_forward": round(self.tokens_per_forward, 4),
            "rows_per_token": round(self.rows_per_token, 4),
            "p_cache": round(self.cache_share, 4),
            **times,
        }

    def count_step(self, rows: int, seconds: float) -> None:
        """Count a step of `rows` rows, without those of the prompt, whose forward took `seconds`."""
        self.forwards += 1
        self.rows += rows
        self.seconds["forward"] += seconds

    def add(self, other: "WedlmStats") -> None:
        """Add the counts and times of another reply."""
        for name in ("forwards", "fills", "rows", "tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for phase, seconds in other.seconds.items():
            self.seconds[phase] += seconds


@dataclass
class DecoderRun:
    """Input of a decoder: a model that has read a prompt, and the options of the reply.

    tokens  the prompt
    logits  (1, vocab), of the prompt's last row, unless some of the prompt is unread
    tuner   of the budget, kept between replies; None: a new one where the options leave the budget open
    unread  last tokens of the prompt, which the first step reads because `state` lacks them: one, for WeDLM several

    most_drafted  limit of draft tokens of the next step, set by the engine for the number of replies; None: no limit
    reconsiders   whether to choose a budget at the next token, because a limit of 0 was set or lifted
    runs_ahead    whether a plain step may be requested before the newest token was read; the engine clears it while
                  several steps of prompts run: the request, and thus the token, would wait for them

    A decoder asks `model` for its backend and configuration, and never calls it. Once a decoder is closed, `state`
    holds a prefix of prompt and reply: all tokens but the newest, except in WeDLM's windows, whose newest tokens are
    committed a step later.
    """

    model: Model
    state: State
    logits: Array
    sampler: Sampler
    tokens: Sequence[int] = ()
    options: Speculation = field(default_factory=Speculation)
    tuner: Tuner | TunerShare | None = None
    stats: DecodeStats = field(default_factory=DecodeStats)
    wedlm: WedlmStats = field(default_factory=WedlmStats)
    unread: Sequence[int] = ()
    most_drafted: int | None = None
    reconsiders: bool = False
    runs_ahead: bool = True

    def limit_drafts(self, most: int | None) -> None:
        """Set `most_drafted` for the next steps."""
        self.reconsiders = self.reconsiders or (self.most_drafted == 0) != (most == 0)
        self.most_drafted = most

    def bounded(self, budget: int, sizes: Sequence[int] = ()) -> int:
        """Limit `budget` to `most_drafted`, and round it down to one of `sizes`, which include 0, if any are given."""
        most = budget if self.most_drafted is None else min(budget, self.most_drafted)
        return max((size for size in sizes if size <= most), default=most)
