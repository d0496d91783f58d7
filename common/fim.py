"""FimTokens: the tokens of fill-in-the-middle (Bavarian et al., arXiv 2207.14255).

They precede the text before a gap, the text after it, and the reply, which fills the gap. Models spell them
differently; the names and the keys of GGUF files are those that llama.cpp knows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

NAMES = {
    "prefix": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    "suffix": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    "middle": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    ),
    "pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "repo": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "file": ("<|file_sep|>",),
}
GGUF_KEYS = {  # under tokenizer.ggml, with _token_id; the second is that of older files
    "prefix": ("fim_pre", "prefix"),
    "suffix": ("fim_suf", "suffix"),
    "middle": ("fim_mid", "middle"),
    "pad": ("fim_pad",),
    "repo": ("fim_rep",),
    "file": ("fim_sep",),
}


@dataclass(frozen=True)
class FimTokens:
    """The ids of a tokenizer's tokens by what follows each; None: it has no such token.

    prefix, suffix  the text before the gap, and after it
    middle          the reply
    pad             fills a batch in training
    repo, file      the name of a repository, and of a file in it
    """

    prefix: int | None = None
    suffix: int | None = None
    middle: int | None = None
    pad: int | None = None
    repo: int | None = None
    file: int | None = None

    @property
    def missing(self) -> list[str]:
        """List which of the three tokens that every such prompt has are missing."""
        return [name for name in ("prefix", "suffix", "middle") if getattr(self, name) is None]

    @property
    def ids(self) -> frozenset[int]:
        """Return the ids of all tokens; none where one that every such prompt has is missing."""
        ids = (getattr(self, field.name) for field in fields(self))
        return frozenset() if self.missing else frozenset(id for id in ids if id is not None)


def find_fim(token_to_id: Callable[[str], int | None], declared: Mapping[str, int | None]) -> FimTokens:
    """Find the tokens by their ids in `declared`, else by name.

    declared  ids that the tokenizer's files state, by the fields of FimTokens
    """
    found = {}
    for role, names in NAMES.items():
        ids = [declared.get(role), *map(token_to_id, names)]
        found[role] = next((id for id in ids if id is not None), None)
    return FimTokens(**found)
