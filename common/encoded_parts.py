"""Encode texts whose parts recur: the parts between control tokens are encoded one by one and remembered.

The next prompt of a conversation repeats the last one, and to find its turns it is encoded several times with other
endings (common/turns.py). With a vocabulary of 150,000 tokens, 12,000 tokens of text take 15 ms each time.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from itertools import islice, pairwise

from tokenizers import AddedToken

REMEMBERED = 1 << 22  # characters of all parts that are remembered
OVERHEAD = 64  # characters that a part counts for beside its own
MOST_PARTS = 1 << 12  # control tokens of a text; a text with more is encoded at once, which frees the interpreter

Found = tuple[list[int], list[tuple[int, int, int]]]


def cuts_of(added: Mapping[int, AddedToken], control: Collection[int]) -> dict[str, int] | None:
    """Return the tokens at which the package cuts a text before anything else, with their ids.

    None if the text between them is not encoded independently of them, or if a token of `control` is not among them.
    """
    raw = {id: token for id, token in added.items() if not token.normalized}
    if any(token.lstrip or token.rstrip or token.single_word for token in added.values()):
        return None
    return {token.content: id for id, token in raw.items()} if raw.keys() >= set(control) and raw else None


class EncodedParts:
    """Cache of the parts that were encoded last.

    cuts    as `cuts_of` returns them
    encode  returns the ids of each of several texts
    """

    def __init__(self, cuts: Mapping[str, int], encode: Callable[[list[str]], list[list[int]]]):
        self.cuts, self.encode = cuts, encode
        longest_first = sorted(cuts, key=len, reverse=True)  # the package takes the longest of several tokens
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._parts: OrderedDict[str, list[int]] = OrderedDict()
        self._size = 0

    def find(self, text: str) -> Found | None:
        """Return the ids of `text`, and start, end and id of each token of `cuts`; None for too many parts."""
        spans = [match.span() for match in islice(self._pattern.finditer(text), MOST_PARTS + 1)]
        if len(spans) > MOST_PARTS:
            return None
        ends = [0, *(at for span in spans for at in span), len(text)]
        parts = [text[a:b] for a, b in pairwise(ends)]  # alternately a text between tokens, and a token
        between = dict.fromkeys(part for part in parts[::2] if part)
        new = [part for part in between if part not in self._parts]
        ids = dict(zip(new, self.encode(new), strict=True)) if new else {}
        found: list[int] = []
        for at, part in enumerate(parts):
            if at % 2:
                found.append(self.cuts[part])
            elif part:
                found += ids[part] if part in ids else self._parts[part]
        self._remember(between, ids)
        return found, [(*span, self.cuts[text[slice(*span)]]) for span in spans]

    def _remember(self, used: Collection[str], new: Mapping[str, list[int]]) -> None:
        """Add the `new` ones of the `used` parts, and forget those that were not used for longest."""
        for part in used:
            if part in self._parts:
                self._parts.move_to_end(part)
            elif len(part) <= REMEMBERED // 4:  # a longer one would evict all others
                self._parts[part] = new[part]
                self._size += len(part) + OVERHEAD
        while self._size > REMEMBERED:
            self._size -= len(self._parts.popitem(last=False)[0]) + OVERHEAD
