"""Output of a quantization run: tensors are read, encoded and written a few rows at a time, and runs can resume.

A run writes to a folder next to its result. The folder holds a marker until the result is complete, so that no program
loads a part of a model, and the same command resumes a stopped run.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.amounts import shown_size
from common.checkpoint import UNFINISHED, Checkpoint, files_of
from common.errors import BimetalError, UsageError
from common.files import rewrite
from common.quantize import Encoded, Format, encode_rows, encoded_bytes, float_chunks, float_type
from common.quants import BLOCKS
from common.safetensors import read_json
from common.tensors import Tensor, release


@dataclass(frozen=True)
class Output:
    """One tensor to write.

    name    in the file that is written
    kind    of the weight, or "" for what is no matrix
    shape   logical
    type    of the values that `load` returns
    format  what they are encoded in, or None for a copy
    reason  why a matrix is copied
    load    returns the tensor; only then is it read
    stack   its consecutive tensors, if it is written in parts; of a copy, `load` returns the first
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    type: str
    format: Format | None
    load: Callable[[], Tensor]
    reason: str = ""
    stack: tuple[Tensor, ...] = ()


def output_of(name: str, tensor: Tensor, kind: str = "", format: Format | None = None, reason: str = "") -> Output:
    """Return a tensor of the checkpoint under another name or in another format."""
    type_ = float_type(tensor) if format else tensor.type
    return Output(name, kind, tensor.shape, type_, format, lambda: tensor, reason)


def encoded_chunks(output: Output) -> Iterator[Encoded]:
    """Yield the output's rows in the form in which they are written, in order."""
    for tensor in output.stack or (output.load(),):
        if output.format is None:
            parts = [
                part and np.ascontiguousarray(part.data).reshape(-1) for part in (tensor, tensor.scales, tensor.biases)
            ]
            yield Encoded(*parts)  # type: ignore[arg-type]
        else:
            for rows, type_ in float_chunks(tensor):
                yield encode_rows(rows, type_, output.format, output.name)
        release(tensor)


def parts_of(output: Output) -> tuple[int, int, int]:
    """Compute the bytes of the output's data, scales and biases."""
    if output.format is not None:
        return encoded_bytes(output.shape, output.type, output.format)
    if output.type in BLOCKS:  # known without reading the tensor
        block = BLOCKS[output.type]
        return math.prod(output.shape) // block.elements * block.bytes, 0, 0
    tensor, count = output.load(), len(output.stack) or 1
    scales, biases = (0 if part is None else part.data.nbytes for part in (tensor.scales, tensor.biases))
    return count * (tensor.nbytes - scales - biases), count * scales, count * biases


# -- the working folder ------------------------------------------------------------------------------------------------


def begin(out: Path, source: Checkpoint, outputs: Sequence[Output], settings: dict[str, Any]) -> Path:
    """Return the working folder for `out`: a new one, or that of a stopped run with the same source and plan.

    Raises UsageError if `out` exists, lies in the source, or has a working folder of another run next to it;
    BimetalError if the disk cannot hold the outputs.
    """
    check_place(out, source.path)
    part = out.with_name(out.name + ".part")
    plan = {"source": _fingerprint(source), "plan": _digest(outputs), **settings}
    if part.exists():
        if not (part / UNFINISHED).is_file() or read_json(part / UNFINISHED) != plan:
            raise UsageError(f"{part} holds an unfinished run of other settings or another source; delete it first")
        return part
    check_room(part.parent, sum(sum(parts_of(output)) for output in outputs))
    part.mkdir()
    rewrite(part / UNFINISHED, json.dumps(plan, indent=1))
    return part


def check_place(out: Path, source: Path) -> None:
    """Refuse an output that exists, whose folder is missing, or that lies inside the source."""
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out} exists; give the name of a new file or folder")
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent} is not a folder; make it first")
    folder = source.resolve()
    if folder.is_dir() and folder in (out.parent.resolve(), *out.parent.resolve().parents):
        raise UsageError(f"{out} lies inside the source {source}; give another place")


def check_space(partial: Path, needed: int) -> None:
    """Refuse an output that the disk cannot hold; bytes already in `partial` count."""
    check_room(partial.parent, needed, sum(file.stat().st_size for file in partial.iterdir()))


def check_room(folder: Path, needed: int, written: int = 0) -> None:
    """Refuse a result of `needed` bytes, `written` of them already written, that the disk of `folder` cannot hold."""
    free = shutil.disk_usage(folder).free
    if needed > written + free:
        raise BimetalError(
            f"the result takes {shown_size(needed)}, and the disk of {folder} has {shown_size(written + free)} for it; "
            "free some, or choose a smaller format"
        )


def _fingerprint(source: Checkpoint) -> list[Any]:
    """Hash names, sizes and times of a source's files, to detect a change."""
    path = source.path
    files = files_of(path) if path.is_file() else [*sorted(path.glob("*.safetensors")), path / "config.json"]
    files = [*files, *(file for adapter in source.adapters for file in adapter.files)]
    scales = [adapter.scale for adapter in source.adapters]
    return [*([str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files), *scales]


def _digest(outputs: Sequence[Output]) -> str:
    text = json.dumps([[o.name, o.shape, o.type, o.format and str(o.format)] for o in outputs])
    return hashlib.sha256(text.encode()).hexdigest()
