"""Divide a model's layers among machines."""

from collections.abc import Sequence
from itertools import pairwise

from common.errors import BimetalError


def share_layers(sizes: Sequence[int], memory: Sequence[int]) -> list[range]:
    """Divide layers among machines, in order, at least one each, so that the fullest machine is filled least.

    sizes   bytes of each layer
    memory  bytes of each machine

    Raises BimetalError where the layers do not fit.
    """
    machines, layers = len(memory), len(sizes)
    if machines > layers:
        raise BimetalError(f"{machines} machines cannot share {layers} layers; give at most one machine per layer")
    filled = [size / max(own, 1) for own in memory for size in (sum(sizes[a:b]) for a, b in _runs(layers))]
    low, high = 0, len(filled) - 1  # of the sorted shares that a machine may be filled to
    filled.sort()
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _ends(sizes, memory, filled[middle]) else (middle + 1, high)
    ends = _ends(sizes, memory, filled[low])
    assert ends is not None
    found = [range(a, b) for a, b in pairwise([0, *ends])]
    for rank, (own, most) in enumerate(zip(found, memory, strict=True)):
        need = sum(sizes[own.start : own.stop])
        if need > most:
            raise BimetalError(
                f"the model needs {sum(sizes) / 1e9:.3g} GB, {need / 1e9:.3g} GB of it on machine {rank + 1} of "
                f"{machines}, which gives {most / 1e9:.3g} GB: add machines or memory, or choose a smaller quantization"
            )
    return found


def _runs(layers: int) -> list[tuple[int, int]]:
    return [(a, b) for a in range(layers) for b in range(a + 1, layers + 1)]


def _ends(sizes: Sequence[int], memory: Sequence[int], share: float) -> list[int] | None:
    """Find where each machine's layers end if none is filled above `share`; None if that is impossible."""
    ends, at = list[int](), 0
    for rank, own in enumerate(memory):
        left, held, begin = len(memory) - rank - 1, 0, at
        while at < len(sizes) - left and (held + sizes[at]) / max(own, 1) <= share:
            held += sizes[at]
            at += 1
        if at == begin:
            return None
        ends.append(at)
    return ends if at == len(sizes) else None
