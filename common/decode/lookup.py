"""Prompt lookup (Saxena, 2023): draft the tokens that followed the newest tokens where they occurred before."""

from collections.abc import Iterable

LENGTHS = (4, 3, 2, 1)  # of the sequences looked for, the longest first


class Lookup:
    """An index over growing `tokens`: where each sequence of a few tokens last continued."""

    def __init__(self, tokens: Iterable[int] = ()):
        self.tokens: list[int] = []
        self._after: list[dict[tuple[int, ...], int]] = [{} for _ in LENGTHS]
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Add a token; the sequences that ended before it continue with it."""
        end = len(self.tokens)
        for n, after in zip(LENGTHS, self._after, strict=True):
            if end >= n:
                after[tuple(self.tokens[end - n :])] = end
        self.tokens.append(token)

    def find(self, count: int) -> tuple[list[int], int]:
        """The `count` tokens that followed the newest earlier occurrence of the last tokens, and the match's length.

        Where they reach the end of `tokens` they continue as it begins to repeat itself; [] and 0 without a match.
        """
        for n, after in zip(LENGTHS, self._after, strict=True):
            at = after.get(tuple(self.tokens[-n:]))
            if at is not None and len(self.tokens) >= n:
                period = len(self.tokens) - at
                return [self.tokens[at + i % period] for i in range(count)], n
        return [], 0
