"""Small GGUF and safetensors files, byte by byte, so that a test can break any part of one."""

import contextlib
import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from common.checkpoint import open_checkpoint
from common.errors import BimetalError
from common.quants import check_scales, dequantize
from common.tensors import Tensor


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def gguf_bytes(
    metadata: Iterable[tuple[str, int, bytes]] = (),
    tensors: Iterable[tuple[str, tuple[int, ...], int, int]] = (),
    data: bytes = b"",
    version: int = 3,
) -> bytes:
    """A GGUF file from (key, value type, value) and (name, dimensions as in the file, type id, offset)."""
    metadata, tensors = list(metadata), list(tensors)
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, type_id, value in metadata:
        out += text(key) + struct.pack("<I", type_id) + value
    for name, dims, type_id, offset in tensors:
        out += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)
    return out + bytes(-len(out) % 32) + data if tensors else out


def safetensors_bytes(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    return text(header if isinstance(header, bytes) else json.dumps(header)) + data


def stored(dtype: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    return dtype, np.ascontiguousarray(values)


def write_safetensors(path: Path, arrays: dict[str, tuple[str, np.ndarray]]) -> None:
    """A safetensors file of (dtype, array) by name; the dtype is the file's word, the array gives shape and bytes."""
    header, data = {}, b""
    for name, (dtype, array) in arrays.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
        data += array.tobytes()
    path.write_bytes(safetensors_bytes(header, data))


def tensor_of(array: np.ndarray, dtype: str) -> Tensor:
    return Tensor("w", dtype, array.shape, array.view(np.uint8).reshape(*array.shape[:-1], -1))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether arrays are equal to the bit, where any NaN equals any other."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return a.shape == b.shape and bool(((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all())


def read_all(path: Path) -> bool:
    """Open a checkpoint, check and decode all of it; return whether it opened. Raises anything but a BimetalError."""
    try:
        checkpoint = open_checkpoint(path)
    except BimetalError:
        return False
    for tensor in checkpoint.tensors.values():
        with contextlib.suppress(BimetalError):
            check_scales(tensor)
        assert dequantize(tensor).shape == tensor.shape
        checkpoint.release(tensor)
    return True
