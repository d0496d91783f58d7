"""The decoders, one row each: flags, options, checks and statistics follow from the table.

A further decoder is a file in common/decode, its line in common/decode/registry.py, and a row here.
"""

from dataclasses import dataclass

from common.errors import UsageError


@dataclass(frozen=True)
class Decoder:
    """One row of the table.

    name         the value of --spec
    meaning      for help texts
    family       the module of common/decode that runs it
    needs_draft  whether the model must come with a draft model
    takes        the options that it reads
    """

    name: str
    meaning: str
    family: str
    needs_draft: bool = False
    takes: tuple[str, ...] = ()


_CHAIN, _TREE = ("tree_budget",), ("tree_budget", "tree_topk", "chain_seed")
DECODERS = {
    row.name: row
    for row in (
        Decoder("off", "one token per step", "plain"),
        Decoder("lookup", "what followed the last tokens before", "speculative", False, _CHAIN),
        Decoder("chain", "the draft's likeliest block", "speculative", True, _CHAIN),
        Decoder("tree", "the draft's likeliest prefixes", "speculative", True, _TREE),
        Decoder("lookup+chain", "a long lookup, else the chain", "speculative", True, _CHAIN),
        Decoder("lookup+tree", "both in one tree", "speculative", True, _TREE),
    )
}


@dataclass(frozen=True)
class Speculation:
    """The options of decoding, as the row `kind` of the table reads them.

    kind        a decoder's name
    budget      draft tokens per step; None: chosen while decoding
    top_k       candidates that a tree considers at each position
    seed_chain  begin trees with the draft's likeliest block, whatever its probability
    """

    kind: str = "off"
    budget: int | None = None
    top_k: int = 8
    seed_chain: bool = False

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
