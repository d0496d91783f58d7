"""A pack: a mixture's experts in one file, one block per expert, so that one read returns a whole expert.

The file begins with MAGIC, the length of a JSON header (uint64, little-endian) and the header; the blocks follow at
multiples of ALIGNMENT, layer after layer and expert after expert. A block holds an expert's runs in the order of
`ExpertForm.tensors`: gate, up, down, each with its scales and biases.
"""

import json
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.checkpoint import Checkpoint
from common.errors import BimetalError, UsageError
from common.expert_files import ExpertSource, OpenFile, Runs, checkpoint_source
from common.expert_forms import ExpertForm, components
from common.outputs import check_place, check_room
from common.safetensors import parse_object
from common.weights import Layout

MAGIC = b"BIMETAL experts\n"
ALIGNMENT = 1 << 14  # bytes: a page of Apple Silicon
SAMPLE = 1 << 12  # bytes of an expert that are compared, so that a pack of another model is refused


@dataclass(frozen=True)
class Plan:
    """Offsets of the blocks of a pack.

    header  the file's first bytes
    starts  by layer, offset of the first expert's block
    blocks  by layer, bytes from one block to the next
    end     of the file
    """

    header: bytes
    starts: dict[int, int]
    blocks: dict[int, int]
    end: int


def write_pack(
    checkpoint: Checkpoint, layout: Layout, out: Path, advance: Callable[[int], object]
) -> tuple[ExpertSource, Plan]:
    """Write the experts of a checkpoint into the new file `out`, or resume a stopped run.

    The file is written as `out`.part and renamed when it is complete.

    advance  called with bytes written, or found from an earlier run; they add up to `Plan.end`
    """
    check_place(out, checkpoint.path)
    source = checkpoint_source(checkpoint, layout)
    plan = _plan(source)
    part = out.with_name(out.name + ".part")
    with part.open("r+b" if part.exists() else "w+b") as file:
        begun = file.read(len(plan.header))
        if begun and begun != plan.header[: len(begun)]:
            raise UsageError(f"{part} holds an unfinished pack of another model or version; delete it first")
        held = part.stat().st_size
        check_room(out.parent, plan.end, held)
        if held < len(plan.header):
            file.seek(0)
            file.write(plan.header)
        advance(min(plan.starts.values()))
        for layer, form in source.forms.items():
            buffers = [np.empty(size, np.uint8) for size in form.sizes]
            for expert in range(source.experts):
                at, block = plan.starts[layer] + expert * plan.blocks[layer], plan.blocks[layer]
                if held < at + block:  # a block that was cut is written again
                    source.read(layer, expert, buffers)
                    file.seek(at)
                    for buffer in buffers:
                        file.write(buffer.data)
                    file.write(bytes(block - form.nbytes))
                advance(block)
        file.flush()
        os.fsync(file.fileno())
    part.replace(out)
    return source, plan


def pack_source(path: Path, checkpoint: Checkpoint, layout: Layout) -> ExpertSource:
    """Open a pack of this checkpoint. Raises BimetalError for a pack of another model, or a damaged one."""
    own = checkpoint_source(checkpoint, layout)
    plan = _plan(own)
    try:
        stat = path.stat()
        with path.open("rb") as file:
            header = file.read(len(plan.header))
    except OSError as error:
        raise BimetalError(f"{path} cannot be read: {error.strerror}") from None
    if not header.startswith(MAGIC):
        raise BimetalError(f"{path} is no pack of experts; `generate pack` writes one")
    if header != plan.header:
        raise BimetalError(
            f"{path} is a pack of another model than {checkpoint.path}; {_difference(header, plan.header)}"
        )
    if stat.st_size != plan.end:
        raise BimetalError(f"{path} has {stat.st_size} bytes, and a whole pack of this model has {plan.end}")
    runs = {}
    for layer, form in own.forms.items():
        offsets = plan.starts[layer] + np.cumsum([0, *form.sizes[:-1]])
        offsets = offsets + plan.blocks[layer] * np.arange(own.experts)[:, None]
        runs[layer] = Runs(np.zeros_like(offsets), offsets)
    return ExpertSource([OpenFile(path, stat)], own.forms, runs)


def _plan(source: ExpertSource) -> Plan:
    layers: dict[str, Any] = {}
    for layer, form in source.forms.items():
        layers[str(layer)] = {"runs": [_described(form)], "experts": source.experts, "sample": _sample(source, layer)}
    text = json.dumps({"version": 1, "layers": layers}, sort_keys=True).encode()
    header = MAGIC + len(text).to_bytes(8, "little") + text
    at = _aligned(len(header))
    starts, blocks = {}, {}
    for layer, form in source.forms.items():
        starts[layer], blocks[layer] = at, _aligned(form.nbytes)
        at += source.experts * blocks[layer]
    return Plan(header, starts, blocks, at)


def _described(form: ExpertForm) -> list[list[Any]]:
    parts = [part for tensor in form.tensors for part in components(tensor)]
    return [[part.type, list(part.shape), part.bits, part.group_size, part.data.nbytes] for part in parts]


def _sample(source: ExpertSource, layer: int) -> int:
    """Return a checksum of the layer's first and last expert's first bytes."""
    sizes = [min(SAMPLE, size) for size in source.forms[layer].sizes]
    total = 0
    for expert in (0, source.experts - 1):
        buffers = [np.empty(size, np.uint8) for size in sizes]
        source.read_starts(layer, expert, buffers)
        for buffer in buffers:
            total = zlib.crc32(buffer.data, total)
    return total


def _difference(header: bytes, expected: bytes) -> str:
    """Name the difference between the headers of two packs."""
    at = len(MAGIC) + 8
    try:
        theirs = parse_object(header[at : at + int.from_bytes(header[len(MAGIC) : at], "little")], "header")
    except BimetalError:
        return "its header has another length"
    ours = parse_object(expected[at:], "header")
    layers = [n for n, of_layer in ours["layers"].items() if theirs.get("layers", {}).get(n) != of_layer]
    return f"layer {layers[0]} differs" if layers else "their layers differ in number"


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
