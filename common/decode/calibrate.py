"""Measure windows of a WeDLM model on a text: agreement with plain decoding, and tokens per forward.

Agreement is the share of a reply's tokens that are the most probable next token after the prompt and the previous
tokens of the reply, by the same weights. Plain greedy decoding has an agreement of 1, at one token per forward. The
measure needs no reference answers, and a token that differs counts once, whatever follows it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from common.amounts import counted
from common.decode.alone import run_alone
from common.decode.run import DecoderRun, WedlmStats
from common.decoders import Speculation, WedlmOptions
from common.errors import BimetalError, UsageError
from common.models import Model
from common.ops import Array
from common.sampling import Sampler, Sampling
from common.step import State, Step

SURE = 0.1  # minimum entropy in nats of a fill that is confirmed
WINDOWS, TAUS, PENALTIES = (8, 16), (0.1, 0.2, 0.4, 0.6, 0.9), (0.02, 0.05, 0.1)


@dataclass
class Point:
    """Measurements of the replies with one window.

    agreeing  number of tokens that agree with plain decoding, per reply
    sizes     number of tokens, per reply
    nats      sum of -log p of all tokens, each as the next token after the tokens before it
    stats     summed over the replies
    """

    options: WedlmOptions
    agreeing: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    nats: float = 0.0
    stats: WedlmStats = field(default_factory=WedlmStats)

    @property
    def agreement(self) -> float:
        return sum(self.agreeing) / max(sum(self.sizes), 1)

    @property
    def error(self) -> float:
        """Compute the standard error of the agreement; replies are independent, tokens of a reply are not."""
        rest = np.array(self.agreeing) - self.agreement * np.array(self.sizes)
        count = len(rest)
        return math.sqrt((rest**2).sum() * count / max(count - 1, 1)) / max(sum(self.sizes), 1)

    @property
    def nats_per_token(self) -> float:
        return self.nats / max(sum(self.sizes), 1)

    @property
    def has_filled(self) -> bool:
        return self.stats.fills > 0

    @property
    def tokens_per_forward(self) -> float:
        return self.stats.tokens_per_forward


def grid(windows: Sequence[int], taus: Sequence[float], penalties: Sequence[float]) -> list[WedlmOptions]:
    """Combine all values, and the largest window and smallest lambda also with `sure`, which confirms doubtful fills.

    The adjusted entropy of a mask further than tau / lambda from the first one is never below tau. A window that adds
    only such masks to a smaller one is left out.
    """
    kept: dict[tuple[int, float, float], WedlmOptions] = {}
    for window, tau, penalty in product(sorted(windows), taus, penalties):
        options = WedlmOptions(window, tau, penalty)
        reach = window if penalty == 0 or tau == math.inf else min(window, max(1, math.ceil(tau / penalty)))
        kept.setdefault((reach, tau, penalty), options)
    settings = list(kept.values())
    checked = [replace(o, sure=SURE) for o in settings if o.penalty == min(penalties) and o.window == max(windows)]
    return settings + checked


def cut_prompts(ids: Sequence[int], size: int, max_prompts: int) -> list[list[int]]:
    """Cut up to `max_prompts` prompts of `size` tokens, evenly spread, from a text; UsageError if it is too short."""
    count = len(ids) // size
    if not count:
        held = counted(len(ids), "token")
        raise UsageError(f"the text has {held}, and one prompt takes {size}; give a longer text or shorter prompts")
    chosen = np.linspace(0, count - 1, min(count, max_prompts)).round().astype(int)
    return [list(ids[at * size : (at + 1) * size]) for at in chosen]


def measure(
    model: Model,
    prompts: Sequence[Sequence[int]],
    settings: Sequence[WedlmOptions],
    new_tokens: int,
    ends: frozenset[int],
    progress: Callable[[], object] = lambda: None,
) -> list[Point]:
    """Measure each of `settings` on replies to all prompts, of at most `new_tokens` tokens.

    ends      tokens that end a reply
    progress  function that is called after each reply
    """
    points = [Point(options) for options in settings]
    for prompt in prompts:
        state = model.new_state(len(prompt) + new_tokens)
        logits = _read(model, state, prompt)
        after = state.snapshot()
        for point in points:
            state.restore(after)
            reply = _reply(model, state, prompt, logits, point, ends)
            state.restore(after)
            same, nats = _agreement(model, state, logits, reply)
            point.agreeing.append(same)
            point.sizes.append(len(reply))
            point.nats += nats
            progress()
    return points


def best(points: Sequence[Point], loss: float) -> Point | None:
    """Choose the point with most tokens per forward among points whose agreement is at least 1 - `loss`.

    None if there is no such point. A point whose forwards filled no mask, because every reply ended, has no rate.
    """
    good = [point for point in points if point.has_filled and point.agreement >= 1 - loss]
    return max(good, key=lambda p: (p.tokens_per_forward, -p.stats.rows_per_token), default=None)


def _chunks(model: Model, tokens: Sequence[int]) -> Iterator[np.ndarray]:
    for at in range(0, len(tokens), model.ops.prefill_rows):
        yield np.asarray(tokens[at : at + model.ops.prefill_rows], np.int32)


def _read(model: Model, state: State, prompt: Sequence[int]) -> Array:
    """Read the prompt; return its last row's logits (1, vocab)."""
    logits: Array = None
    for chunk in _chunks(model, prompt):
        n, ends = len(chunk), state.length + len(chunk) == len(prompt)
        step = Step.of_prompt(chunk, state.length, model.ops.short_rows)
        logits = model.forward(state, step, slice(n - 1, n) if ends else slice(0, 0))
        state.commit_prompt(step)
    return logits


def _reply(
    model: Model, state: State, prompt: Sequence[int], logits: Array, point: Point, ends: frozenset[int]
) -> list[int]:
    """Return the tokens of a greedy reply in the point's windows, the end token included."""
    run = DecoderRun(model, state, logits, Sampler(Sampling()), prompt, Speculation("wedlm", wedlm=point.options))
    reply: list[int] = []
    with closing(run_alone(run)) as tokens:
        for token, _ in tokens:
            reply.append(token)
            if token in ends:
                break
    point.stats.add(run.wedlm)
    return reply


def _agreement(model: Model, state: State, logits: Array, reply: Sequence[int]) -> tuple[int, float]:
    """Count the reply's tokens that are the most probable after the previous ones; also sum their -log p."""
    rows = [model.ops.read(logits)]
    for chunk in _chunks(model, reply[:-1]):
        rows.append(model.ops.read(model.forward(state, Step.chain(chunk, state.length))))
        state.commit(np.arange(len(chunk)))
    values = np.concatenate(rows)
    if not np.isfinite(values.max(axis=-1)).all():
        raise BimetalError("the logits of a reply are not finite; this model cannot be calibrated")
    values = values - values.max(axis=-1, keepdims=True)
    at = np.take_along_axis(values, np.array(reply)[:, None], axis=-1)[:, 0]
    nats = np.log(np.exp(values).sum(axis=-1, dtype=np.float64)) - at
    return int((values.argmax(axis=-1) == reply).sum()), float(nats.sum())
