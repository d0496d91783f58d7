"""WeDLM decoding: masked tokens of a window are filled in parallel under causal attention, one forward per step.

A window holds the positions after the committed tokens: filled slots and masks. Each step computes the filled slots
first and the masks after them, each at its own position, so that every mask sees all filled slots; nothing else is
special in the forward. A mask row's logits predict the token of its own position. Masks whose entropy, plus a penalty
for their distance from the first mask, lies below a threshold are filled with their most likely token, and a filled
slot is final. The leading run of filled slots had exactly the committed tokens before it, so its keys and values are
those of a prefill, and are committed by the same forward that fills further slots.

Source: Liu et al. 2025, arXiv 2512.22737; streaming order and defaults as in the published engine.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from common.errors import UsageError
from common.models import Model
from common.ops import Array
from common.sampling import Ahead, Sampler
from common.step import MAX_DECODE_ROWS, State, Step

ORDERS = ("streaming", "paper")
PRESETS = {  # window, entropy threshold, distance penalty
    "quality": (16, 0.2, 0.02),
    "balanced": (8, 0.4, 0.05),
    "fast": (16, 0.6, 0.02),
}


@dataclass(frozen=True)
class WedlmOptions:
    """How a window is filled.

    window   masks per step, at least 1
    tau      entropy in nats below which a mask is filled; None: the single mask of least adjusted entropy
    penalty  nats added per position of distance from the first mask (lambda in the paper)
    verify   confirm every token by the next-token logits, so that the text is that of plain greedy decoding
    order    "streaming": as many masks as `window` in every step; "paper": filled slots count into the window
    """

    window: int = 16
    tau: float | None = 0.4
    penalty: float = 0.02
    verify: bool = False
    order: str = "streaming"

    def __post_init__(self) -> None:
        most = MAX_DECODE_ROWS // 2
        if not 1 <= self.window <= most:
            raise UsageError(f"wedlm_window is {self.window}; it must be from 1 to {most}")
        if self.tau is not None and not self.tau > 0:
            raise UsageError(f"wedlm_tau is {self.tau}; it must be above 0")
        if not 0 <= self.penalty < np.inf:
            raise UsageError(f"wedlm_lambda is {self.penalty}; it must be finite and at least 0")
        if self.order not in ORDERS:
            raise UsageError(f"wedlm_order is {self.order!r}; supported: {', '.join(ORDERS)}")


@dataclass
class WedlmStats:
    """Counts of one reply.

    forwards   steps after the prefill
    fills      steps that filled a slot
    rows       rows of all steps
    committed  tokens whose keys and values were kept
    tokens     tokens of the reply
    """

    forwards: int = 0
    fills: int = 0
    rows: int = 0
    committed: int = 0
    tokens: int = 0

    @property
    def tokens_per_forward(self) -> float:
        """Tokens of the reply per forward that filled at least one slot."""
        return self.tokens / max(self.fills, 1)

    @property
    def rows_per_token(self) -> float:
        return self.rows / max(self.tokens, 1)

    @property
    def cache_share(self) -> float:
        """Tokens of the reply over rows computed (p_cache in the paper); 1 for plain decoding."""
        return self.tokens / max(self.rows, 1)


def choose(entropies: np.ndarray, distances: np.ndarray, options: WedlmOptions) -> np.ndarray:
    """Indices of the masks to fill: adjusted entropy below tau, or the one of least adjusted entropy.

    entropies (n,) in nats; distances (n,) positions from the first mask.
    """
    adjusted = entropies + options.penalty * distances
    below = np.flatnonzero(adjusted < options.tau) if options.tau is not None else np.empty(0, np.int64)
    return below if len(below) else np.array([int(adjusted.argmin())])


@dataclass
class _Window:
    """Slots from position `base` on; a slot is filled or a mask by its flag, whatever its token id is."""

    base: int
    tokens: list[int] = field(default_factory=list)
    filled: list[bool] = field(default_factory=list)
    logits: dict[int, Array] = field(default_factory=dict)  # row (1, vocab) that each filled position was chosen from

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def leading(self) -> int:
        """Filled slots before the first mask."""
        return self.filled.index(False) if False in self.filled else len(self)

    def add(self, token: int, filled: bool) -> None:
        self.tokens.append(token)
        self.filled.append(filled)

    def drop(self, count: int) -> None:
        self.base += count
        del self.tokens[:count], self.filled[:count]

    def fill(self, slot: int, token: int, row: Array) -> None:
        self.tokens[slot], self.filled[slot] = token, True
        self.logits[self.base + slot] = row

    def step(self) -> tuple[Step, list[int]]:
        """The rows of a forward, and the slots that are masks, whose rows are the last."""
        known = [slot for slot, filled in enumerate(self.filled) if filled]
        masks = [slot for slot, filled in enumerate(self.filled) if not filled]
        order = np.array([*known, *masks], np.int32)
        tokens = np.array([self.tokens[slot] for slot in order], np.int32)
        parents = np.arange(-1, len(order) - 1, dtype=np.int32)
        return Step(tokens, self.base + order, parents, np.zeros(len(order), np.int32)), masks


def wedlm(
    model: Model,
    state: State,
    unread: Sequence[int],
    sampler: Sampler,
    options: WedlmOptions,
    stats: WedlmStats,
) -> Generator[tuple[int, Array], None, None]:
    """Yield (token, the logits row (1, vocab) that it was chosen from) until the state is full or the caller stops.

    unread  last tokens of the prompt, which the state does not hold yet: the first step reads them with the first masks

    A token is yielded once it and all before it are filled. When the generator is closed, the state holds a prefix of
    prompt and reply.
    """
    mask = mask_id(model)
    window = _Window(state.length, list(unread), [True] * len(unread))
    yielded = first = state.length + len(unread)  # positions of the reply
    while yielded < state.capacity:
        leading = window.leading
        full = options.window + (leading if options.order == "streaming" or window.base < first else 0)
        for _ in range(min(full, state.capacity - window.base) - len(window)):
            window.add(mask, False)
        step, masks = window.step()
        logits = model.forward(state, step)
        state.commit(np.arange(leading))
        stats.forwards += 1
        stats.rows += len(step)
        stats.committed += leading
        if masks:
            _fill(model, window, masks, logits[len(step) - len(masks) :], sampler, options, mask, yielded)
            stats.fills += 1
        window.drop(leading)
        for position in range(yielded, window.base + window.leading):
            token = window.tokens[position - window.base]
            sampler.accept(token)
            stats.tokens += 1
            yielded += 1
            yield token, window.logits.pop(position)


def _fill(
    model: Model,
    window: _Window,
    masks: Sequence[int],
    rows: Array,
    sampler: Sampler,
    options: WedlmOptions,
    mask: int,
    yielded: int,
) -> None:
    """Fill the masks that `options` choose from their logits `rows` (masks, vocab)."""
    ops = model.ops
    slots = np.asarray(masks)
    best, entropies = ops.read_all(*ops.argmax_entropy(rows, mask))
    chosen = choose(entropies, slots - slots[0], options)
    if not sampler.is_argmax:
        at = Ahead(sampler, window.base + slots - yielded)  # a position draws with its own number in every step
        if ops.chooses(sampler):
            best = ops.read(ops.sample(rows, at))
        else:
            host = ops.read(rows)
            best = np.array([at.pick(row) for row in host])
    for j in chosen.tolist():
        window.fill(int(slots[j]), int(best[j]), rows[j : j + 1])


def verified(
    model: Model, state: State, logits: Array, sampler: Sampler, options: WedlmOptions, stats: WedlmStats
) -> Iterator[tuple[int, Array]]:
    """Yield (token, its logits row) of plain greedy decoding, with the model's own masks as the draft.

    logits  the prompt's last row

    Rows of a step: the newest token, the draft, and masks after it. The next-token logits of the newest token and of
    each confirmed draft token confirm the next one or correct it, which gives a further token; what the masks predict
    up to the first entropy of tau is the next draft.
    """
    if not sampler.is_argmax:
        raise UsageError("wedlm_verify gives the text of greedy decoding; leave temperature and penalties out")
    ops, mask = model.ops, mask_id(model)
    token = int(ops.read(ops.sample(logits, sampler))[0])
    sampler.accept(token)
    stats.tokens += 1
    yield token, logits
    draft: list[int] = []
    while state.length < state.capacity:
        room = state.capacity - state.length - 1
        draft = draft[:room]
        masks = min(options.window, room - len(draft))
        tokens = np.array([token, *draft, *[mask] * masks], np.int32)
        rows = model.forward(state, Step.chain(tokens, state.length))
        head = 1 + len(draft)
        best = ops.read(ops.sample(rows[:head], sampler))
        predicted, entropies = ops.read_all(*ops.argmax_entropy(rows[head:], mask)) if masks else ((), np.empty(0))
        confirmed = 0
        while confirmed < len(draft) and draft[confirmed] == best[confirmed]:
            confirmed += 1
        stats.forwards += 1
        stats.fills += 1
        stats.rows += len(tokens)
        try:
            for i in range(confirmed + 1):
                token = int(best[i])
                sampler.accept(token)
                stats.tokens += 1
                yield token, rows[i : i + 1]
        finally:
            state.commit(np.arange(confirmed + 1))
            stats.committed += confirmed + 1
        limit = np.inf if options.tau is None else options.tau
        sure = int(np.argmax(np.append(entropies, np.inf) >= limit))
        draft = [int(t) for t in predicted[1:sure]] if confirmed == len(draft) else []


def mask_id(model: Model) -> int:
    """The id of the mask token; UsageError for a model that was not trained with one."""
    found = getattr(model.config, "mask_id", None)
    if found is None:
        raise UsageError(f"spec wedlm needs a WeDLM checkpoint; {model.architecture} has no mask token")
    return int(found)
