"""Read GGUF: header, metadata and tensor directory, memory-mapped; `common/quants.py` decodes the bytes.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every count, length and offset is checked against the
file's size before anything of that size is made.
"""

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import BimetalError
from common.quants import BLOCKS
from common.tensors import Tensor, map_file

MAX_DIMS = 4
MAX_ARRAY = 1 << 24  # elements of one metadata array; the largest vocabularies have 2^18
MAX_NESTING = 4  # arrays of arrays

SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
STRING, ARRAY = 8, 9
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")

TYPES = {block.id: name for name, block in BLOCKS.items()}
# Known ids without a decoder: activation formats, layouts that ggml removed, and newer types.
OTHER_TYPES = {
    **{4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"},
    **{36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 41: "Q1_0"},
}


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the metadata and the tensors of one GGUF file of version 2 or 3.

    Metadata arrays become lists. A tensor's shape is the file's list of dimensions reversed, so that the last axis is
    contiguous. Raises BimetalError for a file that is cut short, inconsistent or of an unsupported kind.
    """
    data = map_file(path)
    reader = _Reader(data, path)
    magic = reader.take(4, "the magic number")
    if magic != b"GGUF":
        raise BimetalError(f"{path} is not a GGUF file: it starts with {magic!r}")
    version = reader.unpack(U32, "the version")
    if version not in (2, 3):
        if int.from_bytes(U32.pack(version), "big") in (2, 3):
            raise BimetalError(f"{path} is a big-endian GGUF file; only little-endian files are supported")
        raise BimetalError(f"{path} has GGUF version {version}; versions 2 and 3 are supported")
    tensor_count = reader.count(32, "tensors")  # name length, rank, one dimension, type, offset
    metadata_count = reader.count(13, "metadata keys")  # key length, type, one byte

    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = reader.string("a metadata key")
        if key in metadata:
            raise BimetalError(f"{path} has the metadata key {key!r} twice")
        metadata[key] = reader.value(reader.unpack(U32, f"the type of {key!r}"), f"metadata key {key!r}")

    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise BimetalError(f"{path} has general.alignment {alignment!r}; it must be a power of two")
    entries = [reader.tensor_entry() for _ in range(tensor_count)]
    start = -(-reader.pos // alignment) * alignment
    return metadata, _map_tensors(data, path, entries, start, alignment)


def _map_tensors(
    data: np.ndarray, path: Path, entries: list[tuple[str, tuple[int, ...], str, int]], start: int, alignment: int
) -> dict[str, Tensor]:
    """Cut the tensors (name, shape, type, offset) out of the data that begin at `start`; refuses gaps and overlaps."""
    tensors: dict[str, Tensor] = {}
    end, previous = start, ""
    for name, shape, type_, offset in sorted(entries, key=lambda entry: entry[3]):
        block = BLOCKS[type_]
        if shape[-1] % block.elements:
            raise BimetalError(
                f"{path}: tensor {name!r} has rows of {shape[-1]} values, but {type_} stores {block.elements} at a time"
            )
        row_bytes = shape[-1] // block.elements * block.bytes
        first = start + offset
        last = first + math.prod(shape[:-1]) * row_bytes
        if name in tensors:
            raise BimetalError(f"{path} has the tensor {name!r} twice")
        if offset % alignment:
            raise BimetalError(f"{path}: tensor {name!r} is at offset {offset}, not a multiple of {alignment}")
        if last > len(data):
            raise BimetalError(
                f"{path} is cut short: tensor {name!r} ends at byte {last}, and the file has {len(data)} bytes"
            )
        if first < end:
            raise BimetalError(f"{path}: tensors {previous!r} and {name!r} overlap")
        if first > -(-end // alignment) * alignment:
            raise BimetalError(f"{path}: bytes {end} to {first}, in front of tensor {name!r}, belong to no tensor")
        end, previous = last, name
        tensors[name] = Tensor(name, type_, shape, data[first:last].reshape(*shape[:-1], row_bytes))
    return {entry[0]: tensors[entry[0]] for entry in entries}


class _Reader:
    """A position in the header; every read names its purpose, for the message about a file that is cut short."""

    def __init__(self, data: np.ndarray, path: Path) -> None:
        self.data = data.data
        self.path = path
        self.pos = 0

    def need(self, size: int, what: str) -> None:
        if size > len(self.data) - self.pos:
            raise BimetalError(
                f"{self.path} is cut short: {what} needs {size} bytes at byte {self.pos}, "
                f"and the file has {len(self.data)} bytes"
            )

    def take(self, size: int, what: str) -> bytes:
        self.need(size, what)
        self.pos += size
        return bytes(self.data[self.pos - size : self.pos])

    def unpack(self, form: struct.Struct, what: str) -> int:
        return form.unpack(self.take(form.size, what))[0]

    def count(self, min_bytes: int, what: str) -> int:
        count = self.unpack(U64, f"the number of {what}")
        self.need(count * min_bytes, f"{count} {what}")
        return count

    def string(self, what: str) -> str:
        text = self.take(self.unpack(U64, f"the length of {what}"), what)
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise BimetalError(f"{self.path}: {what} is not UTF-8: {text[:40]!r}") from None

    def value(self, type_id: int, what: str, depth: int = 0) -> Any:
        if type_id == STRING:
            return self.string(what)
        if type_id != ARRAY:
            return self.numbers(type_id, 1, what)[0]
        element_type = self.unpack(U32, f"the element type of {what}")
        count = self.unpack(U64, f"the length of {what}")
        if count > MAX_ARRAY:
            raise BimetalError(f"{self.path}: {what} is an array of {count} elements; up to {MAX_ARRAY} are supported")
        if element_type == STRING:
            return self.strings(count, what)
        if element_type != ARRAY:
            return self.numbers(element_type, count, what)
        if depth == MAX_NESTING:
            raise BimetalError(f"{self.path}: {what} nests arrays deeper than {MAX_NESTING} levels")
        self.need(count * 12, what)
        return [self.value(ARRAY, what, depth + 1) for _ in range(count)]

    def numbers(self, type_id: int, count: int, what: str) -> list[Any]:
        if type_id not in SCALARS:
            raise BimetalError(f"{self.path}: {what} has the value type {type_id}; types 0 to 12 are defined")
        dtype = np.dtype(SCALARS[type_id])
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype).tolist()

    def strings(self, count: int, what: str) -> list[str]:
        """Read `count` strings, in a bare loop: a vocabulary of 2^18 strings is read before the first token."""
        self.need(count * U64.size, what)
        data, pos, size, unpack = self.data, self.pos, len(self.data), U64.unpack_from
        texts = []
        try:
            for _ in range(count):
                end = pos + 8 + (unpack(data, pos)[0] if pos + 8 <= size else 0)
                if end > size:
                    self.pos = pos
                    self.need(end - pos, what)
                texts.append(str(data[pos + 8 : end], "utf-8"))
                pos = end
        except UnicodeDecodeError as error:
            raise BimetalError(f"{self.path}: {what} holds text that is not UTF-8: {error.object[:40]!r}") from None
        self.pos = pos
        return texts

    def tensor_entry(self) -> tuple[str, tuple[int, ...], str, int]:
        name = self.string("a tensor's name")
        rank = self.unpack(U32, f"the rank of tensor {name!r}")
        if not 1 <= rank <= MAX_DIMS:
            raise BimetalError(f"{self.path}: tensor {name!r} has {rank} dimensions; 1 to {MAX_DIMS} are supported")
        dims = np.frombuffer(self.take(8 * rank, f"the shape of tensor {name!r}"), "<u8").tolist()
        if 0 in dims:
            raise BimetalError(f"{self.path}: tensor {name!r} is empty: its shape is {dims[::-1]}")
        type_id = self.unpack(U32, f"the type of tensor {name!r}")
        if type_id not in TYPES:
            known = OTHER_TYPES.get(type_id, "unknown")
            raise BimetalError(
                f"{self.path}: tensor {name!r} has type {type_id} ({known}); supported are {', '.join(TYPES.values())}"
            )
        return name, tuple(dims[::-1]), TYPES[type_id], self.unpack(U64, f"the offset of tensor {name!r}")
