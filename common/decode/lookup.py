"""Prompt lookup (Saxena, 2023): guess that the text goes on as it did after the same tokens before."""

from collections.abc import Iterable

LENGTHS = (4, 3, 2, 1)  # of the sequences looked for, the longest first


class Lookup:
    """An index over a text that grows: where each sequence of a few tokens last went on."""

    def __init__(self, text: Iterable[int] = ()):
        self.text: list[int] = []
        self._after: list[dict[tuple[int, ...], int]] = [{} for _ in LENGTHS]
        for token in text:
            self.append(token)

    def append(self, token: int) -> None:
        end = len(self.text)  # what ended here goes on with `token`
        for n, after in zip(LENGTHS, self._after, strict=True):
            if end >= n:
                after[tuple(self.text[end - n :])] = end
        self.text.append(token)

    def find(self, count: int) -> tuple[list[int], int]:
        """The `count` tokens that followed the newest earlier occurrence of the text's end, and the match's length.

        Where they reach the end of the text they go on as it begins to repeat itself; [] and 0 without a match.
        """
        for n, after in zip(LENGTHS, self._after, strict=True):
            at = after.get(tuple(self.text[-n:]))
            if at is not None and len(self.text) >= n:
                period = len(self.text) - at
                return [self.text[at + i % period] for i in range(count)], n
        return [], 0
