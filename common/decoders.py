"""The decoders, one row each: flags, options, checks and statistics follow from the table.

docs/extending.md lists what a further decoder takes.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from common.errors import UsageError

MOST_WINDOW = 68  # masks of a WeDLM window: a step has twice as many rows, half of common.step.MAX_DECODE_ROWS
ORDERS = ("streaming", "paper")


@dataclass(frozen=True)
class Decoder:
    """One row of the table.

    name         the value of --spec
    meaning      for help texts
    family       the module of common/decode that runs it, such as "plain"; imported when a reply needs it
    needs_draft  whether the model must come with a draft model
    takes        the options that it reads; with tree_budget, its steps verify draft tokens
    """

    name: str
    meaning: str
    family: str
    needs_draft: bool = False
    takes: tuple[str, ...] = ()


_CHAIN, _TREE = ("tree_budget",), ("tree_budget", "tree_topk", "chain_seed")
_WEDLM = ("wedlm_preset", "wedlm_window", "wedlm_tau", "wedlm_lambda", "wedlm_verify", "wedlm_order", "wedlm_sure")
DECODERS = {
    row.name: row
    for row in (
        Decoder("off", "one token per step", "plain"),
        Decoder(
            "lookup", "prompt lookup, what followed these tokens earlier in the text", "speculative", False, _CHAIN
        ),
        Decoder("chain", "the draft's most probable token at each position", "speculative", True, _CHAIN),
        Decoder("tree", "the draft's most probable prefixes, as a tree", "speculative", True, _TREE),
        Decoder("lookup+chain", "a lookup of at least 3 matching tokens, else the chain", "speculative", True, _CHAIN),
        Decoder("lookup+tree", "both in one tree", "speculative", True, _TREE),
        Decoder("wedlm", "fill a window of masked tokens in parallel, with WeDLM models", "wedlm", False, _WEDLM),
    )
}


def check_taken(kind: str | None, names: Iterable[str]) -> None:
    """Refuse options, by name, of other decoders than `kind`; raises UsageError.

    kind  None: not chosen, for a model without a draft, which decodes plainly or in windows
    """
    taken = DECODERS["wedlm" if kind is None else kind].takes
    for name in names:
        if name in taken:
            continue
        takers = [row for row in DECODERS.values() if name in row.takes]
        words, alone = ", ".join(row.name for row in takers), [row.name for row in takers if not row.needs_draft]
        advice = f"give a draft or choose spec {alone[0]}" if alone else f"give a draft and choose spec {words}"
        if kind == "off" and name not in DECODERS["wedlm"].takes:
            raise UsageError(f"{name} is for speculative decoding, which is off; {advice}")
        raise UsageError(
            f"{name} is for spec {words}, and {f'spec is {kind}' if kind else f'none is chosen; {advice}'}"
        )


def check_draft(kind: str, has_draft: bool) -> None:
    """Refuse a decoder that lacks its draft model; raises UsageError."""
    if DECODERS[kind].needs_draft and not has_draft:
        raise UsageError(f"spec {kind} needs a draft model; give one, or choose lookup")


@dataclass(frozen=True)
class WedlmOptions:
    """Options that fill a window of masked tokens.

    window   masks per step, at least 1
    tau      entropy in nats below which a mask is filled; the mask of least adjusted entropy is, where none lies below
    penalty  nats added per position of distance from the first mask (lambda in the paper)
    verify   confirm every token by the next-token logits, so that the text is that of plain greedy decoding
    order    "streaming": as many masks as `window` in every step; "paper": filled positions count into the window
    sure     entropy in nats from which a filled mask is confirmed by the next-token logits; inf: none is
    """

    window: int = 8
    tau: float = 0.4
    penalty: float = 0.05
    verify: bool = False
    order: str = "streaming"
    sure: float = math.inf

    def __post_init__(self) -> None:
        if not 1 <= self.window <= MOST_WINDOW:
            raise UsageError(f"wedlm_window is {self.window}; it must be from 1 to {MOST_WINDOW}")
        if not self.tau >= 0:
            raise UsageError(f"wedlm_tau is {self.tau}; it must be at least 0")
        if not 0 <= self.penalty < math.inf:
            raise UsageError(f"wedlm_lambda is {self.penalty}; it must be finite and at least 0")
        if not self.sure >= 0:
            raise UsageError(f"wedlm_sure is {self.sure}; it must be at least 0")
        if self.order not in ORDERS:
            raise UsageError(f"wedlm_order is {self.order!r}; supported: {', '.join(ORDERS)}")

    @property
    def words(self) -> str:
        checked = f", sure {self.sure:g}" if self.checks else ""
        return f"{self.window}, {self.tau:g}, {self.penalty:g}{checked}"

    @property
    def checks(self) -> bool:
        """Test whether filled masks of high entropy are confirmed by the next-token logits."""
        return self.sure < math.inf


PRESETS = {
    "quality": WedlmOptions(10, 0.2, 0.02),  # later masks could not pass tau
    "balanced": WedlmOptions(8, 0.4, 0.05),
    "fast": WedlmOptions(16, 0.6, 0.02),
    "checked": WedlmOptions(16, 0.6, 0.02, sure=0.1),
}


@dataclass(frozen=True)
class Speculation:
    """The options of decoding, as the row `kind` of the table reads them.

    kind        a decoder's name
    budget      draft tokens per step; None: chosen while decoding
    top_k       candidates that a tree considers at each position
    seed_chain  begin trees with the draft's most probable block, whatever its probability
    wedlm       how a WeDLM model fills its window
    """

    kind: str = "off"
    budget: int | None = None
    top_k: int = 8
    seed_chain: bool = False
    wedlm: WedlmOptions = field(default_factory=WedlmOptions)

    def __post_init__(self) -> None:
        if self.kind not in DECODERS:
            raise UsageError(f"spec is {self.kind!r}; supported: {', '.join(DECODERS)}")
        if self.budget is not None and self.budget < 1:
            raise UsageError(f"tree_budget is {self.budget}; it must be at least 1")
        if self.top_k < 1:
            raise UsageError(f"tree_topk is {self.top_k}; it must be at least 1")

    @property
    def decoder(self) -> Decoder:
        return DECODERS[self.kind]

    @property
    def drafts(self) -> bool:
        """Test whether steps verify draft tokens: `accepted` then counts them."""
        return "tree_budget" in self.decoder.takes

    @property
    def fills(self) -> bool:
        """Test whether steps fill windows of masked tokens."""
        return self.decoder.family == "wedlm"
