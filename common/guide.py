"""Guides: before each token of a reply they mask the allowed ones, and then receive the chosen one.

A decoder that drafts asks the same questions in the same order as plain decoding, because the sampler of a guided reply
chooses on the host, row after row along the accepted path: the text is the same with every decoder.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import numpy as np

from common.reply import Tags
from common.tokenizer import Tokenizer


class Guide(Protocol):
    """Restricts one reply."""

    def allowed(self) -> np.ndarray | None:
        """Return which tokens may come next, (vocab,) bool; None: all of them."""
        ...

    def accept(self, token: int) -> None:
        """Take note of the next token of the reply."""
        ...


class AfterReasoning:
    """Leaves the reasoning unrestricted, ends it after `budget` tokens, and restricts the reply after it by `inner`.

    tokenizer  of the model, whose logits have `vocab` tokens
    tags       Tags of the reasoning
    is_open    whether the prompt has opened the reasoning; else the reply may do so
    inner      makes the guide of the reply after the reasoning; None: it is unrestricted
    budget     most tokens of the reasoning, the closing tag not counted; None: any number
    spills     `spilling` of the closing tag; read where there is an `inner`
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab: int,
        tags: Tags,
        is_open: bool,
        inner: Callable[[], Guide] | None,
        budget: int | None,
        spills: Mapping[bytes, Sequence[int]],
    ):
        self._tokenizer, self._vocab = tokenizer, vocab
        self._opening, self._closing, self._early = tags.opening.encode(), tags.closing.encode(), tags.early
        self._inner, self._budget, self._spills = inner, budget, spills
        self._guide: Guide | None = None
        self._reasons = is_open
        self._ended = False
        self._text = b""  # of the reasoning so far, or of the reply before it
        self._forced: list[int] = []
        self._count = 0
        if not is_open and inner is not None:
            if tags.begins:
                self._forced = tokenizer.encode(tags.opening, False)
            else:  # a reply that must follow a grammar cannot open its reasoning itself
                self._end()

    def allowed(self) -> np.ndarray | None:
        if self._ended:
            return None if self._guide is None else self._guide.allowed()
        if self._reasons and self._budget is not None and self._count >= self._budget and not self._forced:
            self._forced = self._tokenizer.encode(self._early, False)
        if self._forced:
            return only(self._forced[0], self._vocab)
        if not self._reasons or self._inner is None:
            return None
        mask = np.ones(self._vocab, bool)
        mask[list(self._tokenizer.end_ids)] = False  # the reply has not begun
        held = next((n for n in range(len(self._closing) - 1, -1, -1) if self._text.endswith(self._closing[:n])), 0)
        mask[self._spills[self._closing[held:]]] = False
        return mask

    def accept(self, token: int) -> None:
        if self._ended:
            if self._guide is not None:
                self._guide.accept(token)
            return
        if self._forced:
            del self._forced[0]
            if not self._forced and self._reasons:
                self._end()
            self._reasons |= not self._forced
            return
        known = token < self._tokenizer.vocab_size
        self._text += self._tokenizer.token_bytes(token) if known else b""
        if self._reasons:
            self._count += 1
            if self._closing in self._text:
                self._end()
            self._text = self._text[-len(self._closing) :]
        else:
            begun = self._text.lstrip()
            if begun.startswith(self._opening):
                self._reasons, self._text = True, begun[len(self._opening) :]
            elif begun and not self._opening.startswith(begun):
                self._end()

    def _end(self) -> None:
        self._ended = True
        self._guide = None if self._inner is None else self._inner()


class Begun:
    """Begins with the tokens `head`, and restricts what follows by the guide that `inner` makes.

    vocab  number of logits of a row
    """

    def __init__(self, head: Sequence[int], vocab: int, inner: Callable[[], Guide]):
        self._left, self._vocab, self._inner = list(head), vocab, inner()

    def allowed(self) -> np.ndarray | None:
        return only(self._left[0], self._vocab) if self._left else self._inner.allowed()

    def accept(self, token: int) -> None:
        if self._left:
            del self._left[0]
        else:
            self._inner.accept(token)


def only(token: int, vocab: int) -> np.ndarray:
    """Return a mask (vocab,) bool of one token."""
    mask = np.zeros(vocab, bool)
    mask[token] = True
    return mask


class AtLeast:
    """Lets no token of `ends` come before `least` tokens of the reply, unless `inner` allows nothing else.

    inner  the guide of the reply; None: it is unrestricted
    vocab  number of logits of a row
    """

    def __init__(self, least: int, ends: Collection[int], vocab: int, inner: Guide | None):
        self._left, self._inner = least, inner
        self._others = np.ones(vocab, bool)
        self._others[list(ends)] = False

    def allowed(self) -> np.ndarray | None:
        mask = None if self._inner is None else self._inner.allowed()
        if self._left <= 0:
            return mask
        longer = self._others if mask is None else mask & self._others
        return longer if longer.any() else mask

    def accept(self, token: int) -> None:
        self._left -= 1
        if self._inner is not None:
            self._inner.accept(token)


def spilling(tokenizer: Tokenizer, closing: str) -> dict[bytes, list[int]]:
    """Find the tokens that close the reasoning and begin the reply in one token, unseen by the guide of the reply.

    Returns them by the missing end of the tag `closing`. Takes half a second for 150,000 tokens.
    """
    tag = closing.encode()
    found: dict[bytes, list[int]] = {tag[n:]: [] for n in range(len(tag))}
    rests = tuple(found)
    for token in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token)
        if text.startswith(rests):
            for rest in rests:
                if text.startswith(rest) and text[len(rest) :].strip():
                    found[rest].append(token)
    return found
