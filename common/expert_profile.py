"""Profile of a model's traffic: uses of each expert by layer, the file that keeps them, and a placement by them.

The file is Spark's `<model>.spark.csv`: two comment lines, then one line of counts per layer. Counts place experts
before the first request; later evictions follow recent use (`common/experts.py`).
"""

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from os import PathLike
from pathlib import Path

import numpy as np

from common.errors import BimetalError
from common.files import check_output, check_regular, rewrite

HEADER = re.compile(r"#\s*hotness table:\s*n_layer=(\d+)\s+n_expert=(\d+)\s+n_expert_used=(\d+)\s*")
ASSUMED_USED = 8  # experts per token of a file without its first line, as in Spark
MOST_BYTES = 1 << 26  # of a file: 1000 layers of 4096 experts take less


@dataclass(frozen=True)
class Profile:
    """Counts of how often traffic chose each expert.

    counts  (layers, experts) int64; a layer without experts has zeros
    used    experts per token
    """

    counts: np.ndarray
    used: int

    def ranked(self, layer: int) -> np.ndarray:
        """Return the layer's experts, the most used first and the lower number first among equals: (experts,)."""
        return np.argsort(-self.counts[layer], kind="stable")


def uniform(layers: int, experts: int, used: int) -> Profile:
    """Return the profile of a model without counts: all experts alike."""
    return Profile(np.ones((layers, experts), np.int64), used)


def write_profile(path: Path, profile: Profile) -> None:
    """Write the counts to `path`, whole or not at all. Raises OSError."""
    layers, experts = profile.counts.shape
    lines = [
        f"# hotness table: n_layer={layers} n_expert={experts} n_expert_used={profile.used}",
        "# one row per layer: comma-separated activation counts of experts 0 to n_expert - 1",
        *(",".join(map(str, row)) for row in profile.counts.tolist()),
    ]
    rewrite(path, "\n".join(lines) + "\n")


def read_profile(path: Path) -> Profile:
    """Read the counts from `path`; a file without comment lines is accepted. Raises BimetalError."""
    check_regular(path)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise BimetalError(f"{path} has {path.stat().st_size} bytes; a profile has at most {MOST_BYTES}")
        lines = path.read_bytes().decode("ascii").splitlines()
    except UnicodeDecodeError as error:
        raise BimetalError(f"{path} is not a profile: byte {error.start} is not ASCII") from None
    except OSError as error:
        raise BimetalError(f"{path} cannot be read: {error.strerror}") from None
    stated = next((found for line in lines if (found := HEADER.fullmatch(line.strip()))), None)
    rows = [_counts(path, n, line) for n, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    if not rows or {len(row) for row in rows} != {len(rows[0])}:
        raise BimetalError(f"{path} is not a profile: it must hold one line of counts per layer, all of one length")
    counts, used = np.array(rows, np.int64), ASSUMED_USED
    if stated is not None:
        used = int(stated[3])
        if counts.shape != (int(stated[1]), int(stated[2])):
            held = f"{counts.shape[0]} lines of {counts.shape[1]}"
            raise BimetalError(f"{path} says n_layer={stated[1]} n_expert={stated[2]}, and has {held} counts")
    return Profile(counts, used)


def _counts(path: Path, number: int, line: str) -> list[int]:
    cells = [cell.strip() for cell in line.split(",")]
    bad = next((cell for cell in cells if not (cell.isdecimal() and len(cell) < 19)), None)
    if bad is not None:
        raise BimetalError(f"{path}, line {number}: {bad[:40]!r} is not a count; counts are whole numbers below 10^18")
    return [int(cell) for cell in cells]


def check_profile(path: Path, profile: Profile, sizes: Sequence[int], experts: int) -> None:
    """Refuse the profile of another model, in which `sizes` has one entry per layer, 0 where there are no experts."""
    if profile.counts.shape != (len(sizes), experts):
        theirs, ours = "{} layers of {} experts".format(*profile.counts.shape), f"{len(sizes)} of {experts}"
        raise BimetalError(f"{path} is the profile of another model: it has {theirs}, and the model has {ours}")
    stray = next((layer for layer, n in enumerate(sizes) if not n and profile.counts[layer].any()), None)
    if stray is not None:
        raise BimetalError(f"{path} is the profile of another model: it counts experts in layer {stray}, a dense one")


def open_profile(name: str | PathLike[str] | None, sizes: Sequence[int], experts: int) -> Profile | None:
    """Read the profile in the file `name`; None without a name, or if the file does not exist yet.

    Raises BimetalError for a damaged file or the profile of another model, OSError if the file cannot be created.
    """
    if name is None:
        return None
    path, profile = Path(name), None
    if path.exists():
        profile = read_profile(path)
        check_profile(path, profile, sizes, experts)
    check_output(path)
    return profile


def place(
    profile: Profile, sizes: Sequence[int], budget: int, kinds: Sequence[Hashable] | None = None
) -> list[np.ndarray]:
    """Choose the experts that `budget` bytes hold, by layer, each layer's most used first.

    Each layer first gets as many as a token uses. Then the expert with the most uses per byte follows; among equals
    the one with more uses, then that of the layer that has fewer. `Residency` keeps room for one layer of each kind,
    which experts of this kind fill in any case.

    sizes   bytes of an expert in each layer, 0 where there are no experts
    kinds   layers of one kind share their slots; None: layers whose experts have as many bytes
    """
    layers, experts = profile.counts.shape
    kinds = sizes if kinds is None else kinds
    room: dict[Hashable, int] = {kind: experts for kind in kinds}  # slots that are paid for already
    left = budget - least_bytes(sizes, experts, kinds)
    chosen: list[list[int]] = [[] for _ in range(layers)]
    ranks = [profile.ranked(layer) for layer in range(layers)]

    def entry(layer: int) -> tuple[bool, float, int, int, int]:
        n = len(chosen[layer])
        uses = int(profile.counts[layer, ranks[layer][n]])
        return n >= profile.used, -uses / sizes[layer], -uses, n, layer

    heap = [entry(layer) for layer in range(layers) if sizes[layer]]
    heapify(heap)
    while heap:
        layer = heappop(heap)[-1]
        if room[kinds[layer]] > 0:
            room[kinds[layer]] -= 1
        elif left >= sizes[layer]:
            left -= sizes[layer]
        else:
            continue  # nothing more of this layer fits
        chosen[layer].append(int(ranks[layer][len(chosen[layer])]))
        if len(chosen[layer]) < experts:
            heappush(heap, entry(layer))
    return [np.array(ids, np.int64) for ids in chosen]


def least_bytes(sizes: Sequence[int], experts: int, kinds: Sequence[Hashable] | None = None) -> int:
    """Count the bytes of one whole layer's experts of each kind, which prefill uses at once."""
    by_kind = dict(zip(sizes if kinds is None else kinds, sizes, strict=True))
    return sum(experts * size for size in by_kind.values())
