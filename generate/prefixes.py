"""The prefix cache of a loaded model: its size, its tiers, and the fingerprint of all that its states depend on."""

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path

import numpy as np

from common.checkpoint import Checkpoint
from common.host import available_bytes
from common.models import Model
from common.models.pair import Pair
from common.options import PrefixChoice
from common.prefix_cache import PrefixCache
from common.prefix_disk import PrefixDisk
from common.tensors import Converted, Tensor
from common.weights import dense

SHARE, MOST = 10, 8 << 30  # default budget: 1 / SHARE of free memory, at most MOST bytes
DISK = 20 * 10**9  # default bytes on disk
TRIM = 256 << 20  # bytes freed between two trims
SAMPLE = 64  # bytes at either end of each tensor
ROOT = Path(__file__).parents[1]
SOURCES = (".py", ".cu", ".cuh", ".metal", ".h")


class Trim:
    """Returns freed memory to the system, because glibc keeps large freed pieces."""

    def __init__(self) -> None:
        self.freed = 0
        self.trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone

    def __call__(self, arrays: Sequence[np.ndarray]) -> None:
        self.freed += sum(array.nbytes for array in arrays)
        if self.trim is not None and self.freed >= TRIM:
            self.trim(0)
            self.freed = 0


def memory_budget(choice: PrefixChoice) -> int:
    """Return the bytes for states on the host."""
    if choice.cache_memory is not None:
        return int(choice.cache_memory)
    return min(available_bytes()[0] // SHARE, MOST)


def open_prefixes(
    model: Model, checkpoints: Sequence[Checkpoint], choice: PrefixChoice, facts: Sequence[object]
) -> PrefixCache | None:
    """Return the cache for `model`; None where its states cannot be saved, or nothing may be kept.

    checkpoints  of the model, and of its draft
    facts        other values that change bits: the card, the placement, windows
    """
    budget = memory_budget(choice)
    if not isinstance(model, Model) or (budget == 0 and choice.cache_dir is None):
        return None
    name = fingerprint(model, checkpoints, facts)
    disk = None
    if choice.cache_dir is not None:
        disk = PrefixDisk(Path(choice.cache_dir).expanduser(), int(choice.cache_disk or DISK), name)
    return PrefixCache(bytes.fromhex(name), budget, disk, Trim())


def fingerprint(model: Model, checkpoints: Sequence[Checkpoint], facts: Sequence[object]) -> str:
    """Return all that the bits of a state depend on beside its tokens and its long steps, as 32 hexadecimal digits."""
    hashed = blake2b(digest_size=16)
    for part in _parts(model, checkpoints, facts):
        hashed.update(len(part).to_bytes(8, "little") + part)
    return hashed.hexdigest()


def _parts(model: Model, checkpoints: Sequence[Checkpoint], facts: Sequence[object]) -> Iterator[bytes]:
    for checkpoint in checkpoints:
        yield from identity(checkpoint)
    draft = model.draft if isinstance(model, Pair) else None
    types = sorted({tensor.type for checkpoint in checkpoints for tensor in checkpoint.tensors.values()})
    held = [(type_, model.ops.holds(type_)) for type_ in types]
    threads = os.environ.get("OPENBLAS_NUM_THREADS"), os.environ.get("OMP_NUM_THREADS"), os.cpu_count()
    described: list[object] = [model.architecture, model.config, draft, model.state_spec, model.ops.name, held]
    described += [model.ops.item_bytes, model.ops.prefill_rows, np.__version__, threads, sys.byteorder, *facts]
    yield from (repr(fact).encode() for fact in described)
    yield sources(model.ops.name)


def digest(checkpoint: Checkpoint) -> str:
    """Return 8 hexadecimal digits in which different checkpoints differ."""
    hashed = blake2b(repr([(key, checkpoint.config[key]) for key in sorted(checkpoint.config)]).encode(), digest_size=4)
    for part in identity(checkpoint):
        hashed.update(part)
    return hashed.hexdigest()


def identity(checkpoint: Checkpoint) -> Iterator[bytes]:
    """Describe the tensors of a checkpoint and of its adapters: names, types, shapes and some bytes of each."""
    for name in sorted(checkpoint.tensors):
        yield from _identity(checkpoint.tensors[name])
    for adapter in checkpoint.adapters:
        for place, change in adapter.changes.items():
            yield repr((adapter.dialect, place)).encode()
            for factor in change:
                yield from _identity(dense("factor", factor))


def _identity(tensor: Tensor) -> Iterator[bytes]:
    """Describe a tensor: name, type, shape, and the bytes at both ends, in which fine-tuned models differ."""
    if isinstance(tensor, Converted):
        for stored in tensor.parts:
            yield from _identity(stored)
        return
    for part in (tensor, tensor.scales, tensor.biases):
        if part is not None:
            yield f"{part.name} {part.type} {part.shape} {part.bits} {part.group_size}".encode()
            rows = part.data.reshape(-1)
            yield rows[:SAMPLE].tobytes() + rows[-SAMPLE:].tobytes()


@cache
def sources(backend: str) -> bytes:
    """Return a hash of the code that computes: any change of it may change bits."""
    folders = {"cuda": ["cuda_backend"], "mlx": ["mlx_backend", "metal_kernels"]}.get(backend, [])
    hashed = blake2b(digest_size=16)
    for folder in ("common", *folders):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SOURCES:
                hashed.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return hashed.digest()
