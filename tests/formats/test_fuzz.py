"""Damaged files: reading any bytes ends soon, in little memory, in values or in a BimetalError."""

import json
import random
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from format_files import gguf_bytes, read_all, safetensors_bytes, text
from hypothesis import given, settings
from hypothesis import strategies as st

from common.quants import BLOCKS

pytestmark = pytest.mark.filterwarnings("error")

MEMORY = 2**20  # bytes; the files are about 5 kB, and 1-bit codes take 32 times their size as float32
SECONDS = 5  # of this thread alone
NUMBERS = [0, 1, 2, 8, 9, 13, 31, 64, 255, 1 << 16, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 60]
NUMBERS += [(1 << 63) - 1, 1 << 63, (1 << 64) - 1]
WORDS = [struct.pack("<Q", number) for number in NUMBERS]
WORDS += [struct.pack("<I", number) for number in NUMBERS if number < 1 << 32]
TOKENS = [
    b"[",
    b"{",
    b"]",
    b"}",
    b'"',
    b",",
    b":",
    b"-",
    b"0",
    b"1e999",
    b"NaN",
    b"null",
    b"true",
    b"[]",
    b"{}",
    b"\\ud800",
]

Edit = tuple[int, int, bytes]  # where, how many bytes to remove, what to insert


def gguf_seed() -> bytes:
    """A GGUF file with a value of every type and a tensor of every type."""
    rng = np.random.default_rng(0)
    sizes = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    metadata = [(f"key.{type_id}", type_id, struct.pack("<" + form, 1)) for type_id, form in sizes.items()]
    metadata += [("general.alignment", 4, struct.pack("<I", 32)), ("name", 8, text("model"))]
    metadata += [("words", 9, struct.pack("<IQ", 8, 3) + text("a") + text("") + text("字"))]
    metadata += [("floats", 9, struct.pack("<IQ3f", 6, 3, 1, 2, 3))]
    metadata += [("nested", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ2B", 0, 2, 1, 2))]
    tensors, data = [], b""
    for name, block in BLOCKS.items():
        tensors.append((name, (block.elements, 2), block.id, len(data)))
        data += rng.bytes(2 * block.bytes)
        data += bytes(-len(data) % 32)
    return gguf_bytes(metadata, tensors, data)


def safetensors_seed() -> tuple[bytes, dict]:
    """A safetensors file with a tensor of every dtype and mode, and the config that describes them."""
    rng = np.random.default_rng(0)
    header, data = {"__metadata__": {"format": "mlx"}}, b""
    modules = {"a": ("affine", 4, 64), "b": ("affine", 3, 32), "c": ("mxfp4", 4, 32), "d": ("nvfp4", 4, 16)}
    modules["e"] = ("mxfp8", 8, 32)
    entries: dict[str, tuple[str, tuple[int, ...], int]] = {
        **{"f64": ("F64", (2, 3), 48), "f32": ("F32", (4,), 16), "f16": ("F16", (2, 2), 8), "bf16": ("BF16", (2,), 4)},
        **{"i64": ("I64", (), 8), "u16": ("U16", (3, 1, 1), 6), "bool": ("BOOL", (5,), 5)},
    }
    for name, (mode, bits, group) in modules.items():
        entries[f"{name}.weight"] = ("U32", (2, 4 * bits), 32 * bits)
        scale, size = ("F16", 2) if mode == "affine" else ("U8", 1)
        entries[f"{name}.scales"] = (scale, (2, 128 // group), 256 // group * size)
        if mode == "affine":
            entries[f"{name}.biases"] = entries[f"{name}.scales"]
    for name, (dtype, shape, size) in entries.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + size]}
        data += rng.bytes(size)
    table = {name: {"mode": mode, "bits": bits, "group_size": group} for name, (mode, bits, group) in modules.items()}
    config = {"model_type": "llama", "quantization": {"bits": 4, "group_size": 64, "f32": False} | table}
    return safetensors_bytes(header, data), config


GGUF = gguf_seed()
SAFETENSORS, CONFIG = safetensors_seed()


def apply(data: bytes, edits: list[Edit]) -> bytes:
    for at, removed, inserted in edits:
        at = min(at, len(data))
        data = data[:at] + inserted + data[at + removed :]
    return data


def bounded(path: Path) -> bool:
    """`read_all`, under the limits on time and memory."""
    start = time.thread_time()
    tracemalloc.start()
    try:
        opened = read_all(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MEMORY, f"{peak} bytes for a file of {path.stat().st_size}"
    assert time.thread_time() - start < SECONDS
    return opened


def read_gguf_bytes(folder: Path, data: bytes) -> bool:
    path = folder / "m.gguf"
    path.unlink(missing_ok=True)  # a new file: the old one may still be mapped
    path.write_bytes(data)
    return bounded(path)


def read_safetensors_bytes(folder: Path, data: bytes, config: bytes) -> bool:
    path = folder / "model.safetensors"
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    (folder / "config.json").write_bytes(config)
    return bounded(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder in which the seeds have been read, so that the cache of codebooks is filled before memory counts."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "m.gguf").write_bytes(GGUF)
    assert read_all(folder / "m.gguf")
    assert read_safetensors_bytes(folder, SAFETENSORS, json.dumps(CONFIG).encode())
    return folder


def edits(size: int, inserted: st.SearchStrategy[bytes]) -> st.SearchStrategy[list[Edit]]:
    removed = st.sampled_from([0, 1, 1, 4, 8, 64, size])
    same_size = st.tuples(st.integers(0, size), inserted).map(lambda pair: (pair[0], len(pair[1]), pair[1]))
    return st.lists(st.one_of(same_size, st.tuples(st.integers(0, size), removed, inserted)), min_size=1, max_size=4)


BYTES = st.one_of(st.binary(max_size=9), st.sampled_from(WORDS))
JSON_BYTES = st.one_of(BYTES, st.sampled_from(TOKENS))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([*NUMBERS, "F32", "U32", "mxfp4"])
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
QUICK = settings(max_examples=200)


@QUICK
@given(edits=edits(len(GGUF), BYTES))
def test_damaged_gguf(folder, edits):
    read_gguf_bytes(folder, apply(GGUF, edits))


@QUICK
@given(edits=edits(len(SAFETENSORS), JSON_BYTES))
def test_damaged_safetensors(folder, edits):
    read_safetensors_bytes(folder, apply(SAFETENSORS, edits), json.dumps(CONFIG).encode())


@QUICK
@given(edits=edits(len(json.dumps(CONFIG)), JSON_BYTES))
def test_damaged_config(folder, edits):
    read_safetensors_bytes(folder, SAFETENSORS, apply(json.dumps(CONFIG).encode(), edits))


@QUICK
@given(
    name=st.sampled_from(["f32", "a.weight", "a.scales", "new"]), key=st.sampled_from(["dtype", "shape"]), value=JSON
)
def test_any_json_in_the_header(folder, name, key, value):
    size = int.from_bytes(SAFETENSORS[:8], "little")
    header = json.loads(SAFETENSORS[8 : 8 + size])
    header[name] = value if name == "new" else header[name] | {key: value}
    read_safetensors_bytes(folder, safetensors_bytes(header, SAFETENSORS[8 + size :]), json.dumps(CONFIG).encode())


@QUICK
@given(key=st.sampled_from(["bits", "group_size", "mode", "a", "quant_method"]), module=st.booleans(), value=JSON)
@pytest.mark.long
def test_any_json_in_the_config(folder, key, module, value):
    config = json.loads(json.dumps(CONFIG))
    table = config["quantization"]["a"] if module else config["quantization"]
    table[key] = value
    read_safetensors_bytes(folder, SAFETENSORS, json.dumps(config).encode())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gguf", "safetensors", "config"])
def test_corpus_of_damaged_files(folder, kind):
    """5,000 files of each kind; enough of them still open that the decoders run too."""
    config = json.dumps(CONFIG).encode()
    whole, inserts, read = {
        "gguf": (GGUF, WORDS, lambda data: read_gguf_bytes(folder, data)),
        "safetensors": (SAFETENSORS, [*WORDS, *TOKENS], lambda data: read_safetensors_bytes(folder, data, config)),
        "config": (config, TOKENS, lambda data: read_safetensors_bytes(folder, SAFETENSORS, data)),
    }[kind]
    rng = random.Random(7)
    opened = 0
    for _ in range(5000):
        damage: list[Edit] = []
        for _ in range(rng.choice([1, 1, 2, 4])):
            inserted = rng.choice([rng.randbytes(rng.randrange(5)), rng.randbytes(1), rng.choice(inserts)])
            removed = rng.choice([len(inserted)] * 4 + [0, 1, 8, len(whole)])
            damage.append((rng.randrange(len(whole)), removed, inserted))
        opened += read(apply(whole, damage))
    assert 100 < opened < 4900
