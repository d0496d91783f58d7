"""Prompt lookup (Saxena, 2023): draft the tokens that followed the newest tokens where they occurred before."""

from array import array
from collections.abc import Iterable

import numpy as np

LONGEST = 4  # maximum tokens of the sequences that are searched for


class Lookup:
    """A growing text of tokens with a search for earlier occurrences of its end; `extend` computes nothing."""

    def __init__(self, tokens: Iterable[int] = ()):
        self.tokens = array("i", tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens."""
        self.tokens.extend(tokens)

    def find(self, count: int) -> tuple[list[int], int]:
        """Return the `count` tokens after the newest earlier occurrence of the last tokens, and the match's length.

        If fewer tokens follow the occurrence, the tokens after it are repeated. Without a match: [] and 0.
        """
        tokens = np.array(self.tokens, np.int32)
        if not len(tokens):
            return [], 0
        ends, matched = np.flatnonzero(tokens[:-1] == tokens[-1]), 0  # where the last `matched` tokens ended before
        while len(ends) and matched < LONGEST:
            at, matched = int(ends[-1]) + 1, matched + 1
            ends = ends[ends >= matched]
            ends = ends[tokens[ends - matched] == tokens[-1 - matched]] if matched < len(tokens) else ends[:0]
        if not matched:
            return [], 0
        period = len(tokens) - at
        return [int(tokens[at + i % period]) for i in range(count)], matched
