"""Prompts that have the model fill a gap in a text, and llama.cpp's sampler for them."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import UsageError
from common.reading import Turns
from common.tokenizer import Tokenizer

BATCH = 2048  # most tokens of the texts around a gap, three quarters of them before it; the other files come on top
RESERVED = 128  # tokens of a reply that editors request
STRIDE = 256  # tokens of the prefix between two ends of steps, from which a prompt with a longer prefix can continue
SNIPPET = "\n\n--- snippet ---\n\n"  # before each other file, for a tokenizer without a token for it


@dataclass(frozen=True)
class Gap:
    """A gap in a text, as a prompt: the reply fills it. For models with the tokens of fill-in-the-middle.

    prefix    the text before it, or its token ids
    suffix    the text after it
    line      the beginning of the gap's own line, which follows `prefix`
    extra     (name, text) of other files of the repository, or of parts of them, least important first: then the
              prompt has the layout of llama.cpp's /infill, and text far from the gap is left out so that it fits;
              None: the prompt has the texts before and after the gap alone, and nothing is left out
    reserved  most tokens of a reply, for which a prompt with `extra` leaves room twice
    """

    prefix: str | Sequence[int] | np.ndarray
    suffix: str = ""
    line: str = ""
    extra: Sequence[tuple[str, str]] | None = None
    reserved: int = RESERVED


def gap_prompt(tokenizer: Tokenizer, gap: Gap, context: int) -> tuple[list[int], Turns]:
    """Return the token ids of a prompt, and the places after which later prompts of an editor may differ.

    Control tokens that the texts spell out are text. Raises UsageError for a tokenizer without the tokens.

    context  of the model, for which a gap with other files is cut
    """
    fim = tokenizer.fim
    if fim.prefix is None or fim.suffix is None or fim.middle is None:
        raise UsageError(without_tokens(tokenizer))
    prefix = tokenizer.encode_plain(gap.prefix) if isinstance(gap.prefix, str) else list(gap.prefix)
    suffix, line, extra = tokenizer.encode_plain(gap.suffix), tokenizer.encode_plain(gap.line), list[int]()
    if gap.extra is not None:
        left = 2 * gap.reserved
        batch = min(BATCH, max(context - left, context // 2))
        prefix = prefix[max(0, len(prefix) - 3 * (batch // 4)) :]
        suffix = suffix[: max(0, batch // 4 - 2 - len(line))]
        extra = _files(tokenizer, gap.extra)
        extra = extra[max(0, len(extra) - max(0, context - batch - left)) :]
    head = [*extra, *tokenizer.prompt_head, fim.prefix]
    before = [*head, *prefix]
    ends = range(len(head) + STRIDE, len(before), STRIDE)
    turns = Turns(len(before), len(extra), [(at, at) for at in ends], max(ends, default=0))
    return [*before, *line, fim.suffix, *suffix, fim.middle], turns


def without_tokens(tokenizer: Tokenizer) -> str:
    """Return the sentence about a tokenizer that lacks the tokens."""
    names = ", ".join(f"<|fim_{name}|>" for name in tokenizer.fim.missing)
    return f"the model cannot fill in the middle of a text: its tokenizer lacks {names}, under any of the usual names"


def _files(tokenizer: Tokenizer, extra: Sequence[tuple[str, str]]) -> list[int]:
    """Encode the files beside the one with the gap, as the repositories in the training data of such models."""
    fim, plain = tokenizer.fim, tokenizer.encode_plain
    ids = [] if fim.repo is None else [fim.repo, *plain("myproject\n")]
    for name, text in extra:
        ids += plain(SNIPPET) if fim.file is None else [fim.file, *plain(f"{name}\n")]
        ids += plain(text)
    return ids if fim.file is None else [*ids, fim.file, *plain("filename\n")]


MOST_COMPARED = 256  # candidates of a draw, the best ones; each is compared with each


def certain(tokenizer: Tokenizer) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function for `Sampling.reweigh` that ends a reply rather than write an uncertain token.

    It is llama.cpp's sampler "infill". It ends the reply if the tokens that end it are probable together. Otherwise a
    token and another one that begins with its text count as one, and tokens with a probability of at least a fifth
    remain; those with at least an even share, and the end, may be drawn. If no token remains, the reply ends.
    """
    ends = tokenizer.end_ids | tokenizer.fim.ids
    controls = tokenizer.control_ids
    end = tokenizer.eos_id if tokenizer.eos_id is not None else min(ends)

    def text_of(id: int) -> bytes:
        return b"" if id in controls or id >= tokenizer.vocab_size else tokenizer.token_bytes(id)

    def reweigh(weights: np.ndarray) -> np.ndarray:
        ids = np.flatnonzero(weights)
        ids = ids[np.argsort(-weights[ids].astype(np.float64), kind="stable")][:MOST_COMPARED]
        kept = _certain(ids, weights[ids] / weights[ids].sum(), ends, text_of)
        out = np.zeros_like(weights)
        out[kept] = weights[kept]
        if not kept:
            out[end] = 1
        return out

    return reweigh


def _certain(ids: np.ndarray, shares: np.ndarray, ends: Collection[int], text_of: Callable[[int], bytes]) -> list[int]:
    """Return the candidates that may be drawn, none if the reply must end.

    ids     candidates, best first
    shares  of the probability, which sum to 1; they are changed
    """
    is_end = np.isin(ids, list(ends))
    ending = shares[is_end].sum()
    if 3 * ending * len(ids) > 1 - ending:
        return list(ids[is_end])
    _merge(shares, [text_of(id) for id in ids.tolist()])
    kept = is_end | (shares >= 0.2)
    words = kept & ~is_end
    if not words.any():
        return []
    shares = shares / shares[kept].sum()
    return list(ids[kept & (is_end | (shares >= 1 / (words.sum() + 1)))])


def _merge(shares: np.ndarray, texts: Sequence[bytes]) -> None:
    """Add the share of a token to that of another where one's text begins the other's: the larger share takes both."""
    is_left = [True] * len(texts)
    for i, one in enumerate(texts):
        for j, other in enumerate(texts):
            if not is_left[i]:
                break
            if i != j and is_left[j] and one and other.startswith(one):
                into, gone = (j, i) if shares[j] > shares[i] else (i, j)
                shares[into] += shares[gone]
                shares[gone], is_left[gone] = 0, False
