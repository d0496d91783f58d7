"""One saved state in one file: safetensors with format, model and checksums in the metadata; never pickle.

A file holds the token ids of the whole state, its point, and the rows that follow those of another file, its base. The
rows have a checksum per PAGE tokens, so that the first tokens of a state can be read without the rest.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import BimetalError
from common.files import check_regular, hold
from common.prefix_cache import Saved
from common.prefix_tree import PAGE
from common.safetensors import parse_object, read_safetensors
from common.step import LongStep
from common.tensors import Tensor

FORMAT, VERSION = "bimetal saved state", "2"
MOST_HEADER = 16 << 20  # maximum bytes of a header
MOST_ARRAYS = 4096  # maximum arrays of rows, or of a point
DIGEST = 16  # bytes of a checksum
TYPES = {"F32": "<f4", "F16": "<f2", "U16": "<u2", "U8": "|u1", "I32": "<i4", "I64": "<i8"}
NAMES = {np.dtype(type_): name for name, type_ in TYPES.items()}


class DamagedError(BimetalError):
    """A file of this model whose content has changed since it was written."""


@dataclass(frozen=True)
class Header:
    """The metadata and the token ids of a file.

    base      the file with the rows before token `first`; "" if `first` is 0
    counts    numbers of arrays: of rows, and of the point
    checksum  checksum of the point
    nbytes    bytes of the file
    """

    path: Path
    base: str
    first: int
    tokens: np.ndarray
    long_steps: tuple[LongStep, ...]
    counts: tuple[int, int]
    checksum: str
    nbytes: int

    @property
    def key(self) -> str:
        return self.path.stem

    @property
    def has_point(self) -> bool:
        """Test whether the state has a point: arrays that cannot be divided by tokens."""
        return self.counts[1] > 0


def key_of(fingerprint: str, tokens: np.ndarray, long_steps: Sequence[LongStep]) -> str:
    """Return the name of a state: 32 hexadecimal digits."""
    hashed = blake2b(fingerprint.encode(), digest_size=16)
    hashed.update(len(tokens).to_bytes(8, "little") + np.ascontiguousarray(tokens, "<i4").tobytes())
    hashed.update(np.asarray(long_steps, "<i8").tobytes())
    return hashed.hexdigest()


def file_bytes(saved: Saved) -> int:
    """Return an upper bound, close to the size, of a state's file."""
    ids = 4 * len(saved.tokens) + 16 * len(saved.long_steps) + DIGEST * (1 + len(saved.tokens) // PAGE)
    rows = (part for parts in saved.rows for part in parts)
    return 5120 + ids + sum(array.nbytes + 256 for array in (*rows, *saved.point))


def write(path: Path, fingerprint: str, saved: Saved, base: str) -> None:
    """Write under another name, wait for the disk, and rename to `path`; raises OSError."""
    point = dict(zip(_names("point", len(saved.point)), map(np.ascontiguousarray, saved.point), strict=True))
    arrays, entries, at = _ids_and_rows(saved) | point, dict[str, Any](), 0
    for name, array in arrays.items():
        offsets = [at, at + array.nbytes]
        entries[name] = {"dtype": NAMES[array.dtype], "shape": array.shape, "data_offsets": offsets}
        at += array.nbytes
    entries["__metadata__"] = {
        **{"format": FORMAT, "version": VERSION, "fingerprint": fingerprint, "key": path.stem, "base": base},
        **{"first": str(saved.first), "counts": f"{len(saved.rows)} {len(point)}"},
        "point": _checksum(point.values()).hex(),
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            hold(file)
            file.write(len(header).to_bytes(8, "little") + header)
            for array in arrays.values():
                file.write(array.data)
            file.flush()
            os.fsync(file.fileno())
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def is_ours(path: Path) -> bool:
    """Test whether the file begins like those of this program; False if it cannot be read."""
    try:
        return _read_metadata(path)[0].get("format") == FORMAT
    except (BimetalError, OSError):
        return False


def read_header(path: Path, fingerprint: str) -> Header:
    """Return the header and the token ids of a file.

    Raises BimetalError for a file that is no state of this model, DamagedError for a damaged one, OSError.
    """
    metadata, entries, start, nbytes = _read_metadata(path)
    if metadata.get("format") != FORMAT:
        raise BimetalError(f"{path} is no saved state")
    if metadata.get("version") != VERSION:
        raise BimetalError(f"{path} has version {metadata.get('version')!r:.20}; supported: {VERSION}")
    if metadata.get("fingerprint") != fingerprint:
        raise BimetalError(f"{path} is a state of another model, or of other options")
    if start + max((_end(entry) for entry in entries.values()), default=0) != nbytes:
        raise DamagedError(f"{path} is cut short")
    tokens = _read_ids(path, entries.get("tokens"), "I32", start, nbytes)
    steps = _read_ids(path, entries.get("long_steps"), "I64", start, nbytes) if "long_steps" in entries else tokens[:0]
    long_steps = tuple((int(first), int(end)) for first, end in steps.reshape(-1, 2))
    if path.stem != metadata.get("key") or path.stem != key_of(fingerprint, tokens, long_steps):
        raise DamagedError(f"{path} has a name that does not match its tokens")
    (first,), base = _numbers(path, metadata, "first", 1, len(tokens)), metadata.get("base")
    if not isinstance(base, str) or bool(base) != bool(first):
        raise DamagedError(f"{path} continues token {first} of the file {base!r:.40}")
    rows, point = _numbers(path, metadata, "counts", 2, MOST_ARRAYS)
    return Header(path, base, first, tokens, long_steps, (rows, point), str(metadata.get("point")), nbytes)


def read(header: Header, length: int, has_end: bool = True) -> Saved:
    """Read the rows of a file before token `length`, in parts of PAGE tokens, and the point of a state that ends there.

    The arrays are copies. Raises DamagedError, OSError.

    has_end  whether the point is read
    """
    try:
        tensors = read_safetensors(header.path)
    except BimetalError as error:
        if not header.path.exists():
            raise FileNotFoundError(str(header.path)) from None
        raise DamagedError(str(error)) from None
    tokens = len(header.tokens) - header.first
    rows = [_array(header.path, name, tensors) for name in _names("rows", header.counts[0])]
    checksums = _array(header.path, "checksums", tensors)
    if checksums.shape != _checksums_shape(tokens) or any(a.ndim != 3 or a.shape[1] != tokens for a in rows):
        raise DamagedError(f"{header.path} lacks rows of its tokens")
    needed = min(length - header.first, tokens)
    parts = list(_parts(rows, needed))
    if any(_checksum(part) != checksum.tobytes() for part, checksum in zip(parts, checksums, strict=False)):
        raise DamagedError(f"{header.path} is damaged: the checksum of its rows does not match")
    ends = has_end and length == len(header.tokens)
    point = [np.array(_array(header.path, name, tensors)) for name in _names("point", header.counts[1] * ends)]
    if ends and _checksum(point).hex() != header.checksum:
        raise DamagedError(f"{header.path} is damaged: the checksum of its point does not match")
    cut = [[part[i][:, : needed - PAGE * n] for n, part in enumerate(parts)] for i in range(len(rows))]
    return Saved(header.tokens, header.long_steps, header.first, cut, point)


def _names(kind: str, count: int) -> list[str]:
    return [f"{kind}.{i}" for i in range(count)]


def _ids_and_rows(saved: Saved) -> dict[str, np.ndarray]:
    """Return the arrays of a file by name, but for the point."""
    rows = [np.ascontiguousarray(ps[0] if len(ps) == 1 else np.concatenate(ps, axis=1)) for ps in saved.rows]
    tokens = len(saved.tokens) - saved.first
    checksums = np.frombuffer(b"".join(map(_checksum, _parts(rows, tokens))), np.uint8)
    ids: dict[str, np.ndarray] = {"tokens": np.ascontiguousarray(saved.tokens, np.int32)}
    if saved.long_steps:
        ids["long_steps"] = np.array(saved.long_steps, np.int64)
    ids["checksums"] = checksums.reshape(_checksums_shape(tokens))
    return ids | dict(zip(_names("rows", len(rows)), rows, strict=True))


def _parts(rows: Sequence[np.ndarray], tokens: int) -> Iterator[list[np.ndarray]]:
    """Copy rows, (heads, tokens, width) each, in parts of PAGE tokens; the last part holds token `tokens` - 1."""
    for at in range(0, tokens, PAGE):
        yield [np.array(array[:, at : at + PAGE], order="C") for array in rows]


def _checksums_shape(tokens: int) -> tuple[int, int]:
    return -(-tokens // PAGE), DIGEST


def _checksum(arrays: Iterable[np.ndarray]) -> bytes:
    hashed = blake2b(digest_size=DIGEST)
    for array in arrays:
        hashed.update(array.data)
    return hashed.digest()


def _array(path: Path, name: str, tensors: dict[str, Tensor]) -> np.ndarray:
    """Return a view of an array of a file."""
    tensor = tensors.get(name)
    if tensor is None or tensor.type not in TYPES:
        raise DamagedError(f"{path} lacks the array {name}, or has it in another type")
    return tensor.data.reshape(-1).view(TYPES[tensor.type]).reshape(tensor.shape)


def _read_metadata(path: Path) -> tuple[dict[str, Any], dict[str, Any], int, int]:
    """Return the metadata, the entries of arrays, where the arrays begin, and the size of the file."""
    check_regular(path)  # a pipe would be opened for ever
    with path.open("rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= min(MOST_HEADER, nbytes - 8):
            raise BimetalError(f"{path} is cut short or is no saved state")
        entries = parse_object(file.read(size), f"the header of {path}")
    metadata = entries.pop("__metadata__", None)
    if not isinstance(metadata, dict):
        raise BimetalError(f"{path} is no saved state")
    return metadata, entries, 8 + size, nbytes


def _read_ids(path: Path, entry: Any, dtype: str, start: int, nbytes: int) -> np.ndarray:
    """Return an array of numbers at the beginning of a file whose structure nobody has checked yet."""
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    item = np.dtype(TYPES[dtype]).itemsize
    whole = isinstance(offsets, list) and len(offsets) == 2 and all(type(at) is int for at in offsets)
    if not whole or entry.get("dtype") != dtype or not 0 <= offsets[0] < offsets[1] <= nbytes - start:  # type: ignore[index]
        raise DamagedError(f"{path} has no whole list of token ids")
    if (offsets[1] - offsets[0]) % (2 * item if dtype == "I64" else item):  # type: ignore[index]
        raise DamagedError(f"{path} has no whole list of token ids")
    with path.open("rb") as file:
        file.seek(start + offsets[0])  # type: ignore[index]
        return np.frombuffer(file.read(offsets[1] - offsets[0]), TYPES[dtype])  # type: ignore[index]


def _end(entry: Any) -> int:
    """Return the end of an array in bytes after the begin of the first array; -1 for an entry without offsets."""
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    return offsets[1] if isinstance(offsets, list) and len(offsets) == 2 and type(offsets[1]) is int else -1


def _numbers(path: Path, metadata: dict[str, Any], name: str, count: int, limit: int) -> list[int]:
    words = str(metadata.get(name)).split()
    if len(words) != count or not all(w.isascii() and w.isdecimal() and len(w) < 12 and int(w) <= limit for w in words):
        raise DamagedError(f"{path}: {name} is {metadata.get(name)!r:.40}; it must be {count} numbers up to {limit}")
    return [int(word) for word in words]
