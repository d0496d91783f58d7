"""Parameters of kernels: structs as kernels/*.cuh declare them, and prototypes read from a kernel's text.

This module needs neither CuPy nor a GPU.
"""

import ctypes
import re
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

Field = tuple[str, str]


def _struct(*fields: tuple[str, str | np.dtype]) -> np.dtype:
    return np.dtype(list(fields), align=True)


def _named(kind: str, *names: str) -> list[Field]:
    return [(name, kind) for name in names]


IN = _struct(("p", "u8"), *_named("i8", "partial_stride", "row", "head"), *_named("i4", "partials", "width", "inner"))
OUT = _struct(*_named("u8", "dense", "packed", "product"), *_named("i4", "K", "cols", "groups", "fine", "whole"))
ROPE = _struct(*_named("u8", "frequencies", "positions"), ("pairs", "i4"), ("magnitude", "f4"))
CHOICE = _struct(
    *_named("u8", "logits", "bias", "weights"),
    ("gate", IN),
    *_named("i4", "E", "k", "shared", "gated", "whole"),
    ("scale", "f4"),
)
CLAMP = _struct(*_named("u8", "gate", "up", "ids"), ("limit", "f4"))  # kernels/single.cu
HOT_LAYER = _struct(  # kernels/hot_experts.cu
    ("part", "(6,4)u8"),  # of an expert: addresses of its table and of the host's expert 0; bytes, offset in a slot
    *_named("u8", "parts", "slots", "slot_bytes", "slot_of", "leaving", "exchanged", "seen", "score", "uses", "counts"),
)
MATRICES = _struct(*_named("u8", "first", "last", "table"), ("bytes", "i8"), ("count", "i4"))
MATRIX = _struct(
    *_named("u8", "w", "out"),
    *_named("i4", "N", "k_blocks", "units", "stripes", "each"),
    *_named("u4", "k_blocks_inverse", "units_inverse", "stripes_inverse"),
)
ROWS = _struct(*_named("u8", "packed", "squares"), *_named("i4", "T", "parts"), *_named("f4", "columns", "eps"))
PARTIALS = _struct(("partial_stride", "i8"), ("row", "i8"), ("partials", "i4"))
PLANE = _struct(
    *_named("u8", "rows", "table"), ("block", "i8"), *_named("i4", "row", "capacity", "fixed", "ring", "pages")
)
EXACT = _struct(
    ("keys", PLANE),
    ("values", PLANE),
    *_named("u8", "q", "shift", "mean", "scale", "positions"),
    *_named("i4", "own", "slots", "first", "recent"),
)

PEERS = _struct(*_named("u8", *(f"peer{i}" for i in range(8))))
MEETING = _struct(
    *_named("u8", "received", "state", "failed"),
    ("patience", "i8"),
    *_named("i4", "rank", "capacity", "index"),
)

TYPES: dict[str, np.dtype] = {
    "int": np.dtype(np.int32),
    "u32": np.dtype(np.uint32),
    "s64": np.dtype(np.int64),
    "u64": np.dtype(np.uint64),
    "float": np.dtype(np.float32),
    "double": np.dtype(np.float64),
    "In": IN,
    "Out": OUT,
    "Rope": ROPE,
    "Turn": ROPE,  # kernels/latent.cu
    "Choice": CHOICE,
    "Clamp": CLAMP,
    "Matrices": MATRICES,
    "Matrix": MATRIX,
    "Rows": ROWS,
    "Partials": PARTIALS,
    "Plane": PLANE,
    "Exact": EXACT,
    "Peers": PEERS,  # kernels/peers.cuh
    "Meeting": MEETING,
}
ADDRESS = np.dtype(np.uint64)
END, BUFFER_POINTER, BUFFER_SIZE = range(3)  # CU_LAUNCH_PARAM_*, cuda.h
LIST = struct.calcsize("5P")  # bytes
BOUNDS = r"__launch_bounds__\((?:[^()]|\([^()]*\))*\)"
PROTOTYPE = re.compile(
    rf'extern "C" __global__ void\s*(?:{BOUNDS})?\s*(?:CLUSTER\s+)?(?P<name>\w+)\((?P<parameters>[^)]*)\)'
)


def prototypes(code: str) -> dict[str, tuple[str, ...]]:
    """List the parameters of each kernel in CUDA C++ source: {"fill": ("u32* words", "s64 n", "u32 seed")}."""
    found = PROTOTYPE.finditer(code)
    return {m["name"]: tuple(p.strip() for p in " ".join(m["parameters"].split()).split(",")) for m in found}


def type_of(parameter: str) -> np.dtype:
    """Return the NumPy type of a parameter as written in a prototype; raises KeyError for a struct that TYPES lacks."""
    return ADDRESS if "*" in parameter else TYPES[parameter.replace("const ", "").split()[0]]


class Arguments:
    """Puts the arguments of a launch into host memory, in the form of the driver's parameter `extra`.

    The memory begins with the list that `extra` points to: the address and the size of a buffer, which has the
    arguments as C aligns them. One call of `struct` converts them all, because a step waits for its launches.
    """

    def __init__(self, types: Sequence[np.dtype]):
        form = "5P"
        self.records = {number: dtype for number, dtype in enumerate(types) if dtype.names}
        for dtype in types:
            padding = -struct.calcsize(form) % dtype.alignment
            form += f"{padding}x{dtype.itemsize}s" if dtype.names else dtype.char
        self.struct, self.count = struct.Struct(form), len(types)
        self.size = ctypes.c_size_t(self.struct.size - LIST)

    def pack(self, args: Sequence[Any]) -> ctypes.c_char:
        """Return the first byte of the memory, which lives as long as it; raises TypeError for other arguments."""
        if self.records and len(args) == self.count:
            args = list(args)
            for number, dtype in self.records.items():
                args[number] = _bytes_of(args[number], dtype)
        memory = bytearray(self.struct.size)
        first = ctypes.c_char.from_buffer(memory)
        address, size = ctypes.addressof(first), ctypes.addressof(self.size)
        try:
            self.struct.pack_into(memory, 0, BUFFER_POINTER, address + LIST, BUFFER_SIZE, size, END, *args)
        except (struct.error, OverflowError) as error:
            given = error if len(args) == self.count else f"{len(args)} arguments"
            raise TypeError(str(given)) from error
        return first


def _bytes_of(record: Any, dtype: np.dtype) -> bytes:
    if getattr(record, "dtype", None) != dtype:
        raise TypeError(f"{type(record).__name__} {record} in place of a record of {', '.join(dtype.names or ())}")
    return bytes(record.tobytes())
