"""Activity of a loaded model at a moment."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.engine import Engine
from common.prefix_cache import PrefixCache
from common.reading import common_length


@dataclass(frozen=True)
class Activity:
    """Counts and rates of a model's current work.

    running, waiting  replies that are generated, and that wait for a slot
    context_share     tokens that the running replies hold, divided by the capacity of all slots
    prefix_bytes      bytes of the states that the prefix cache keeps in memory
    prefix_budget     limit of prefix_bytes
    lengths           tokens of prompt and reply that each running reply holds
    preemptions       number of times that a reply was suspended, so that others had memory
    """

    running: int
    waiting: int
    context_share: float
    prefix_bytes: int
    prefix_budget: int
    lengths: Sequence[int] = ()
    preemptions: int = 0


def activity_of(engine: Engine) -> Activity:
    """Read an engine's activity, in any thread; the figures may be a step apart."""
    running, waiting = engine.load
    lengths = [each.slot.state.length for each in list(engine.running) if each.slot is not None]
    prefixes = engine.prefixes if isinstance(engine.prefixes, PrefixCache) else None
    return Activity(
        running,
        waiting,
        sum(lengths) / (engine.memory.tokens or engine.parallel * engine.target.context),
        prefixes.bytes if prefixes else 0,
        prefixes.budget if prefixes else 0,
        lengths,
        engine.preemptions,
    )


def matched_tokens(engine: Engine, tokens: Sequence[int]) -> int:
    """Count the first tokens that `tokens` share with a slot or a text in the prefix cache; in the owner thread."""
    prefixes = engine.prefixes
    kept = prefixes.matched(tokens) if isinstance(prefixes, PrefixCache) else 0
    return max([kept, *(common_length(slot.committed, tokens) for slot in engine.memory.slots)])
