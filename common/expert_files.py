"""Locate a checkpoint's experts, and read one: straight from its files, or from a pack beside them.

In a GGUF file and in stacked safetensors an expert's gate, up and down matrices are each one run of bytes; in a pack
(`common/expert_pack.py`) they are adjacent. Files are opened again for reading, so that no page of a memory map is
touched, and after each read the file is checked: if it has changed since its header was read, it is refused.
"""

import errno
import fcntl
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np

from common.checkpoint import Checkpoint
from common.errors import BimetalError
from common.expert_forms import ExpertForm, components
from common.tensors import MappedFile, Tensor, stored_at
from common.weights import ExpertMatrix, Layout, Stored, account

MUCH_LARGER = 4  # times the memory: for larger files the system's cache is bypassed


@dataclass(frozen=True)
class Runs:
    """Places of the runs of a layer's experts.

    files    number of the file of each run: (experts, runs)
    offsets  bytes from its beginning: int64 (experts, runs)
    """

    files: np.ndarray
    offsets: np.ndarray


class OpenFile:
    """A file of which experts are read; `stat` is its state when its header was read."""

    def __init__(self, path: Path, stat: os.stat_result):
        self.path, self.stat, self._identity = path, stat, _identity(stat)
        self.drops_cache = False
        try:
            self._file: IO[bytes] = path.open("rb", buffering=0)
        except OSError as error:
            raise BimetalError(f"{path} cannot be read: {error.strerror}") from None
        weakref.finalize(self, self._file.close)
        self.check()

    def check(self) -> None:
        """Refuse a file that is another one than at loading, or that was written to."""
        if _identity(os.fstat(self._file.fileno())) != self._identity:
            raise BimetalError(f"{self.path} has changed since the model was loaded; load the model again")

    def bypass_cache(self) -> None:
        """Keep what is read out of the system's cache, where the system lets us."""
        self.drops_cache = True
        if hasattr(fcntl, "F_NOCACHE"):
            fcntl.fcntl(self._file, fcntl.F_NOCACHE, 1)

    def read(self, offset: int, buffers: Sequence[np.ndarray]) -> None:
        """Fill `buffers`, one after the other, with the bytes from `offset`; `check` follows. Raises BimetalError."""
        views = [memoryview(buffer.data).cast("B") for buffer in buffers]
        at, end = offset, offset + sum(len(view) for view in views)
        while at < end:
            try:
                count = os.preadv(self._file.fileno(), views, at)
            except OSError as error:
                name = errno.errorcode.get(error.errno or 0, "")
                raise BimetalError(
                    f"{self.path} cannot be read at byte {at}: {error.strerror} {name}".rstrip()
                ) from None
            if count == 0:
                size = os.fstat(self._file.fileno()).st_size
                raise BimetalError(f"{self.path} ends at byte {size}, before an expert that ends at byte {end}")
            at += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if views:
                views[0] = views[0][count:]
        if self.drops_cache and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), offset, end - offset, os.POSIX_FADV_DONTNEED)


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


class ExpertSource:
    """The stored experts of a model: `read` may be called from any thread.

    forms  by layer, of layers with experts
    """

    def __init__(self, files: Sequence[OpenFile], forms: Mapping[int, ExpertForm], runs: Mapping[int, Runs]):
        self.files, self.forms, self._runs = files, forms, runs

    @property
    def file_bytes(self) -> int:
        return sum(file.stat.st_size for file in self.files)

    @property
    def experts(self) -> int:
        """Return the number of experts of a layer."""
        return max(len(runs.files) for runs in self._runs.values())

    def bypass_cache(self, memory: int) -> bool:
        """Keep reads out of the system's cache where the files are much larger than `memory` bytes."""
        if self.file_bytes <= MUCH_LARGER * memory:
            return False
        for file in self.files:
            file.bypass_cache()
        return True

    def read_starts(self, layer: int, expert: int, buffers: Sequence[np.ndarray]) -> None:
        """Fill `buffers`, one per run, with the run's first bytes."""
        runs = self._runs[layer]
        for file, offset, buffer in zip(runs.files[expert], runs.offsets[expert], buffers, strict=True):
            self.files[file].read(int(offset), [buffer])
            self.files[file].check()

    def read(self, layer: int, expert: int, buffers: Sequence[np.ndarray]) -> None:
        """Fill `buffers`, one per run of `forms[layer].sizes`, contiguous; adjacent runs in one call of the system."""
        runs = self._runs[layer]
        files, offsets = runs.files[expert].tolist(), runs.offsets[expert].tolist()
        first = 0
        for i in range(1, len(buffers) + 1):
            adjacent = (
                i < len(buffers) and files[i] == files[i - 1] and offsets[i] == offsets[i - 1] + buffers[i - 1].nbytes
            )
            if not adjacent:
                self.files[files[first]].read(offsets[first], buffers[first:i])
                first = i
        for file in set(files):
            self.files[file].check()


def expert_matrices(layout: Layout) -> dict[int, tuple[ExpertMatrix, ExpertMatrix]]:
    """Return the matrices (gate and up, down) of each layer that has experts, by layer."""
    found = {}
    for layer, table in enumerate(layout.layers):
        matrices = [entry for entry in table.values() if isinstance(entry, ExpertMatrix)]
        if matrices:
            gate_up, down = matrices
            found[layer] = gate_up, down
    return found


def expert_forms(checkpoint: Checkpoint, layout: Layout) -> dict[int, ExpertForm]:
    """Describe how the checkpoint stores each layer's experts; raises BimetalError for a model without experts."""
    account(checkpoint, layout)
    matrices = expert_matrices(layout)
    if not matrices:
        raise BimetalError(f"{checkpoint.path} has no experts to stream; it is no mixture of experts")
    return {
        layer: ExpertForm(*(tuple(_expert_tensor(checkpoint, part, 0) for part in m.parts) for m in pair))
        for layer, pair in matrices.items()
    }


def checkpoint_source(checkpoint: Checkpoint, layout: Layout) -> ExpertSource:
    """Locate the experts in the checkpoint's own files. Raises BimetalError."""
    forms, runs = expert_forms(checkpoint, layout), {}
    files: dict[MappedFile, int] = {}
    for layer, pair in expert_matrices(layout).items():
        parts = [part for matrix in pair for part in matrix.parts]
        rows = [_runs_of(checkpoint, parts, expert, files) for expert in range(parts[0].shape[0])]
        places = np.array(rows, np.int64)  # (experts, runs, 2)
        runs[layer] = Runs(places[..., 0], places[..., 1])
    return ExpertSource([OpenFile(mapped.path, mapped.stat) for mapped in files], forms, runs)


def _runs_of(
    checkpoint: Checkpoint, parts: Sequence[Stored], expert: int, files: dict[MappedFile, int]
) -> list[tuple[int, int]]:
    """Locate each run of an expert: file number and offset; a new file gets the next number."""
    found = []
    for part in parts:
        for component in components(_expert_tensor(checkpoint, part, expert)):
            place = stored_at(component.data)
            if place is None or not component.data.flags.c_contiguous:
                raise BimetalError(f"{component.name} is not stored as one run of bytes, so it cannot be streamed")
            found.append((files.setdefault(place[0], len(files)), place[1]))
    return found


def _expert_tensor(checkpoint: Checkpoint, stored: Stored, expert: int) -> Tensor:
    """Return the tensor (rows, columns) of one expert, as stored."""
    if stored.fix is not None:
        raise BimetalError(f"{stored.names[0]} is converted when it is loaded, so it cannot be streamed")
    if stored.shard is not None:
        raise BimetalError(f"{stored.names[0]} is divided among ranks, so it cannot be streamed")
    if len(stored.names) > 1:
        return checkpoint.tensors[stored.names[expert]].reshape(stored.shape[1:])
    tensor = checkpoint.tensors[stored.names[0]].reshape(stored.shape)

    def row(part: Tensor) -> Tensor:
        return replace(part, shape=part.shape[1:], data=part.data[expert])

    return replace(
        row(tensor),
        scales=tensor.scales and row(tensor.scales),
        biases=tensor.biases and row(tensor.biases),
    )
