"""The safetensors reader against the safetensors package, and MLX's triples folded into single tensors."""

import json
from pathlib import Path

import numpy as np
import pytest
from format_files import safetensors_bytes, stored, write_safetensors
from safetensors.numpy import save_file

from common.checkpoint import open_checkpoint
from common.errors import BimetalError
from common.quants import dequantize


def write_config(folder: Path, **config) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def test_dtypes_as_the_safetensors_package_writes_them(tmp_path):
    dtypes = {"F64": "f8", "F32": "f4", "F16": "f2", "BOOL": "?", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1"}
    dtypes |= {"U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1"}
    arrays = {name: np.arange(6).reshape(2, 3).astype(dtype) for name, dtype in dtypes.items()}
    arrays |= {"scalar": np.array(3, np.float32), "vector": np.arange(5, dtype=np.float32)}
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    write_config(tmp_path, model_type="llama")

    for path in (tmp_path, tmp_path / "model.safetensors"):
        checkpoint = open_checkpoint(path)
        assert (checkpoint.path, checkpoint.format) == (tmp_path, "safetensors")
        assert checkpoint.config == {"model_type": "llama"}
        assert checkpoint.tensors.keys() == arrays.keys()
        for name, array in arrays.items():
            tensor = checkpoint.tensors[name]
            assert tensor.shape == array.shape
            assert tensor.data.tobytes() == array.tobytes()
            assert tensor.type == {"scalar": "F32", "vector": "F32"}.get(name, name)
            np.testing.assert_array_equal(dequantize(tensor), array.astype(np.float32))


def test_bf16(tmp_path):
    bits = np.array([[0x3F80, 0xC000, 0x4049]], np.uint16)
    write_safetensors(tmp_path / "model.safetensors", {"w": ("BF16", bits)})
    write_config(tmp_path)
    np.testing.assert_array_equal(dequantize(open_checkpoint(tmp_path).tensors["w"]), [[1, -2, 3.140625]])


def entry(dtype: object = "F32", shape: object = (4,), offsets: object = (0, 16)) -> dict:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


TWICE = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}'
ONE = entry() | {"b": entry("U8", [2], [16, 18])["a"]}  # 18 bytes
BROKEN = {  # where the words are not ours, they are the safetensors package's
    "empty": (b"", "is empty"),
    "short": (b"\x01\0\0", "cut short or is not a safetensors file: header too small"),
    "header length": ((1 << 63).to_bytes(8, "little") + b"{}", "header too large"),
    "header cut": (safetensors_bytes(entry())[:-4], "cut short or is not a safetensors file: invalid header length"),
    "not UTF-8": (safetensors_bytes(b'{"\xff": 1}'), "invalid UTF-8 in header"),
    "not JSON": (safetensors_bytes(b"{'a': 1}"), "invalid JSON"),
    "not an object": (safetensors_bytes(b"[]"), "invalid JSON"),
    "deep": (safetensors_bytes(b"[" * 100_000), "invalid JSON"),
    "long number": (safetensors_bytes(b'{"a": ' + b"1" * 5000 + b"}"), "number out of range"),
    "name twice": (safetensors_bytes(TWICE, bytes(2)), "invalid offset for tensor `a`"),
    "entry twice": (safetensors_bytes(TWICE.replace(b"[1,2]", b"[0,1]"), bytes(1)), "has the key 'a' twice"),
    "no entry": (safetensors_bytes({"a": 3}), "invalid type: integer `3`"),
    "no shape": (safetensors_bytes({"a": {"dtype": "F32", "data_offsets": [0, 4]}}), "missing field `shape`"),
    "dtype": (safetensors_bytes(entry("F8_E4M3", [16]), bytes(16)), "'a' has dtype 'F8_E4M3'; supported are F64, F32"),
    "dtype list": (safetensors_bytes(entry(["F32"])), "invalid JSON"),
    "negative": (safetensors_bytes(entry(shape=[-4])), "invalid value: integer `-4`"),
    "fraction": (safetensors_bytes(entry(shape=[4.0])), "invalid type: floating point `4.0`"),
    "bool": (safetensors_bytes(entry(shape=[True])), "invalid type: boolean `true`"),
    "no elements": (safetensors_bytes(entry(shape=[0, 4], offsets=[0, 0])), r"'a' has shape \[0, 4\]"),
    "rank": (safetensors_bytes(entry("U8", [1] * 99, [0, 1]), b"x"), "must be up to 8 positive sizes"),
    "product": (safetensors_bytes(entry(shape=[1 << 62, 1 << 62]), bytes(16)), "overflow computing buffer size"),
    "size": (safetensors_bytes(entry(shape=[5]), bytes(16)), "invalid shape, data type, or offset"),
    "three offsets": (safetensors_bytes(entry(offsets=[0, 16, 16]), bytes(16)), "expected 2 elements"),
    "backwards": (safetensors_bytes(entry(offsets=[16, 0]), bytes(16)), "invalid offset for tensor `a`"),
    "outside": (safetensors_bytes(entry(), bytes(15)), "file not fully covered"),
    "overlap": (safetensors_bytes(entry() | {"b": entry(offsets=[12, 28])["a"]}, bytes(28)), "invalid offset"),
    "hole": (safetensors_bytes(entry() | {"b": entry("U8", [2], [20, 22])["a"]}, bytes(22)), "invalid offset"),
    "hole in front": (safetensors_bytes(entry(offsets=[4, 20]), bytes(20)), "invalid offset"),
    "trailing byte": (safetensors_bytes(ONE, bytes(19)), "file not fully covered"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_named(tmp_path, case):
    data, message = BROKEN[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    write_config(tmp_path)
    with pytest.raises(BimetalError, match=message) as error:
        open_checkpoint(tmp_path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_header_whose_length_is_wrong_is_refused(tmp_path):
    """If a header that ends in spaces is given one byte less, every tensor would shift by a byte."""
    path = tmp_path / "model.safetensors"
    write_config(tmp_path)
    data = safetensors_bytes(json.dumps(ONE).encode() + b"  ", bytes(18))
    length = int.from_bytes(data[:8], "little")
    path.write_bytes(data)
    assert open_checkpoint(tmp_path).tensors.keys() == {"a", "b"}
    for wrong in (length - 1, length - 2, length + 1):
        path.write_bytes(wrong.to_bytes(8, "little") + data[8:])
        with pytest.raises(BimetalError, match="is cut short or is not a safetensors file"):
            open_checkpoint(tmp_path)


def test_every_cut_is_noticed(tmp_path):
    path = tmp_path / "model.safetensors"
    write_config(tmp_path)
    write_safetensors(path, {"a": stored("F32", np.ones((2, 3), "f4")), "b": stored("I8", np.ones(5, "i1"))})
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(BimetalError):
            open_checkpoint(path)


def test_config_is_needed(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {"a": stored("F32", np.ones(1, "f4"))})
    with pytest.raises(BimetalError, match=r"config\.json cannot be read: No such file"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(BimetalError, match=r"config\.json must hold a JSON object, not list"):
        open_checkpoint(tmp_path)


# ---- several files --------------------------------------------------------------------------------------------------


def test_index(tmp_path):
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, tensor in zip(names, "ab", strict=True):
        write_safetensors(tmp_path / name, {tensor: stored("F32", np.ones(2, "f4"))})
    write_config(tmp_path)
    index = tmp_path / "model.safetensors.index.json"

    def write_index(weight_map: object) -> None:
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    write_index({"a": names[0], "b": names[1]})
    for path in (tmp_path, tmp_path / names[1]):  # one shard alone is not the model
        checkpoint = open_checkpoint(path)
        assert (checkpoint.path, list(checkpoint.tensors)) == (tmp_path, ["a", "b"])

    broken = [
        ({"a": names[0], "b": names[1], "c": names[1]}, "lists 'c', which is in none of its files"),
        ({"a": "../model.safetensors"}, r"puts tensor 'a' into '\.\./model\.safetensors'"),
        ({"a": 1}, "puts tensor 'a' into 1"),
        ({"a": "\0"}, r"puts tensor 'a' into '\\x00'"),
        ({"a": names[0], "b": "gone.safetensors"}, r"gone\.safetensors cannot be read: No such file"),
        ([], "has no weight_map"),
    ]
    for weight_map, message in broken:
        write_index(weight_map)
        with pytest.raises(BimetalError, match=message):
            open_checkpoint(tmp_path)

    write_index({"a": names[0], "b": names[1]})
    write_safetensors(tmp_path / names[1], {name: stored("F32", np.ones(2, "f4")) for name in "ab"})
    with pytest.raises(BimetalError, match="tensors that an earlier file has too, such as 'a'"):
        open_checkpoint(tmp_path)


# ---- MLX ------------------------------------------------------------------------------------------------------------


def triple(
    name: str, mode: str, bits: int, group: int, rows: tuple[int, ...] = (2,), width: int = 128, dtype: str = "F32"
) -> dict[str, tuple[str, np.ndarray]]:
    random = np.random.default_rng(bits)
    packed = random.integers(0, 1 << 32, (*rows, width * bits // 32), dtype=np.uint32)
    shape = (*rows, width // group)
    arrays = {f"{name}.weight": ("U32", packed)}
    if mode == "affine":
        float_dtype = {"F32": "f4", "F16": "f2", "BF16": "u2"}[dtype]
        arrays[f"{name}.scales"] = (dtype, np.full(shape, 2, float_dtype))
        arrays[f"{name}.biases"] = (dtype, np.full(shape, 3, float_dtype))
    else:
        arrays[f"{name}.scales"] = ("U8", np.full(shape, 120, np.uint8))
    return arrays


def open_quantized(folder: Path, arrays: dict[str, tuple[str, np.ndarray]], **config):
    write_safetensors(folder / "model.safetensors", arrays)
    write_config(folder, **config)
    return open_checkpoint(folder).tensors


MODES = [("affine", bits, group) for bits in (1, 2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
MODES += [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]


@pytest.mark.parametrize(("mode", "bits", "group"), MODES)
@pytest.mark.parametrize("rows", [(2,), (3, 2)])
def test_triples_become_one_tensor(tmp_path, mode, bits, group, rows):
    arrays = triple("m", mode, bits, group, rows) | {"m.bias": stored("F32", np.ones(2, "f4"))}
    tensors = open_quantized(tmp_path, arrays, quantization={"mode": mode, "bits": bits, "group_size": group})
    assert list(tensors) == ["m.weight", "m.bias"]
    tensor = tensors["m.weight"]
    assert (tensor.type, tensor.shape, tensor.bits, tensor.group_size) == (mode, (*rows, 128), bits, group)
    assert tensor.data.tobytes() == arrays["m.weight"][1].tobytes()
    assert (tensor.biases is None) == (mode != "affine")
    assert tensor.nbytes == sum(array.nbytes for name, (_, array) in arrays.items() if name != "m.bias")
    some = tensor.take_rows(np.array([1]))
    np.testing.assert_array_equal(dequantize(some), dequantize(tensor)[[1]])


def test_nulls_of_the_whole_table_are_defaults(tmp_path):
    """As `mlx_lm.convert` writes a mixed recipe without --q-group-size."""
    table = {"group_size": None, "bits": 4, "mode": "affine", "b": {"group_size": None, "bits": 6}}
    tensors = open_quantized(tmp_path, triple("a", "affine", 4, 64) | triple("b", "affine", 6, 64), quantization=table)
    assert {name: (t.bits, t.group_size) for name, t in tensors.items()} == {"a.weight": (4, 64), "b.weight": (6, 64)}


@pytest.mark.parametrize(("mode", "bits", "group"), [("affine", 4, 64), ("affine", 3, 32), ("mxfp4", 4, 32)])
def test_axes_of_length_one_come_and_go(tmp_path, mode, bits, group):
    table = {"mode": mode, "bits": bits, "group_size": group}
    tensor = open_quantized(tmp_path, triple("m", mode, bits, group, (3, 1)), quantization=table)["m.weight"]
    narrow = tensor.reshape((3, 128))
    assert narrow.scales.shape == (3, 128 // group)
    np.testing.assert_array_equal(dequantize(narrow), dequantize(tensor)[:, 0])
    np.testing.assert_array_equal(dequantize(narrow.reshape((1, 3, 128))), dequantize(narrow)[None])


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_half_scales(tmp_path, dtype):
    tensors = open_quantized(tmp_path, triple("m", "affine", 4, 64, dtype=dtype), quantization={"bits": 4})
    assert tensors["m.weight"].scales.type == dtype


def test_overrides_win(tmp_path):
    arrays = triple("a", "mxfp4", 4, 32) | triple("b", "affine", 8, 64) | triple("c", "affine", 4, 64)
    arrays |= triple("d", "mxfp4", 4, 32) | {"e.weight": stored("F32", np.ones((2, 4), "f4"))}
    arrays |= triple("f", "affine", 6, 64) | triple("g", "nvfp4", 4, 16)
    table = {"mode": "mxfp4", "bits": 4, "group_size": 32, "b": {"bits": 8, "group_size": 64}, "c": {}, "d": True}
    table["f"] = {"bits": 6, "group_size": None, "mode": None}  # as mlx-lm's mixed recipes write defaults
    table["g"] = {"bits": None, "group_size": None, "mode": "nvfp4"}
    for key in ("quantization", "quantization_config"):
        tensors = open_quantized(tmp_path, arrays, **{key: table | {"e": False}})
        settings = {name[0]: (tensor.type, tensor.bits, tensor.group_size) for name, tensor in tensors.items()}
        assert settings == {
            **{"a": ("mxfp4", 4, 32), "b": ("affine", 8, 64), "c": ("affine", 4, 64)},
            **{"d": ("mxfp4", 4, 32), "e": ("F32", 0, 0), "f": ("affine", 6, 64), "g": ("nvfp4", 4, 16)},
        }


AFFINE = {"bits": 4, "group_size": 64}
GOOD = triple("m", "affine", 4, 64)
FLOAT = {"m.weight": stored("F32", np.ones((2, 128), "f4"))}


def without(arrays: dict, name: str) -> dict:
    return {key: array for key, array in arrays.items() if key != name}


CONTRADICTIONS = [
    (GOOD, {}, "'m.weight' is packed and has scales, but config.json says nothing about quantization"),
    (GOOD, {"quantization": None}, "says nothing about quantization"),
    (GOOD, {"quantization": [4]}, r"quantization in config.json is \[4\]"),
    (
        GOOD,
        {"quantization_config": {"quant_method": "gptq"}},
        "quant_method 'gptq'; supported are mxfp4 and MLX's modes: affine",
    ),
    (GOOD, {"quantization": AFFINE | {"m": False}}, "'m.weight' is packed and has scales, but config.json says False"),
    (GOOD, {"quantization": AFFINE | {"m": 4}}, "config.json says 4 for it"),
    (FLOAT | {"m.scales": GOOD["m.scales"]}, {"quantization": AFFINE}, "'m.scales' has no packed"),
    ({"m.scales": GOOD["m.scales"]}, {"quantization": AFFINE}, "'m.scales' has no packed"),
    (without(GOOD, "m.scales"), {"quantization": AFFINE}, "'m.weight' is packed .* but there is no 'm.scales'"),
    (without(GOOD, "m.biases"), {"quantization": AFFINE}, "'m.weight' is affine and needs biases"),
    (GOOD, {"quantization": AFFINE | {"mode": "q4"}}, "'m' has the quantization mode 'q4'; supported are affine"),
    (GOOD, {"quantization": AFFINE | {"mode": ["affine"]}}, r"the quantization mode \['affine'\]"),
    (GOOD, {"quantization": AFFINE | {"bits": 7}}, r"'m' is affine with bits 7 .* supported are bits \(1, 2, 3"),
    (GOOD, {"quantization": AFFINE | {"bits": "4"}}, "bits '4'"),
    (GOOD, {"quantization": AFFINE | {"bits": 4.0}}, "bits 4.0"),
    (GOOD, {"quantization": AFFINE | {"group_size": 64.0}}, "group_size 64.0"),
    (GOOD | {"m.global_scale": stored("F32", np.ones(1, "f4"))}, {"quantization": AFFINE}, "'m.global_scale' scales a"),
    (GOOD, {"quantization": AFFINE | {"group_size": 16}}, "group_size 16"),
    (GOOD, {"quantization": AFFINE | {"group_size": 32}}, r"shape \(2, 16\) and its scales \(2, 2\), .* group_size 32"),
    (GOOD, {"quantization": AFFINE | {"bits": 8}}, "does not fit 8 bits"),
    (GOOD, {"quantization": AFFINE | {"bits": 3}}, "does not fit 3 bits"),
    (GOOD, {"quantization": {"mode": "mxfp4"}}, "'m.weight' is mxfp4 and has no use for biases"),
    (triple("m", "mxfp4", 4, 32), {"quantization": {"mode": "nvfp4"}}, "does not fit 4 bits and group_size 16"),
    (without(GOOD, "m.biases"), {"quantization": {"mode": "nvfp4"}}, "'m.scales' is F32; nvfp4 needs U8"),
    (GOOD | {"m.scales": stored("U8", np.ones((2, 2), "u1"))}, {"quantization": AFFINE}, "affine needs F32 or F16"),
    (GOOD | {"m.scales": stored("F32", np.ones((1, 2), "f4"))}, {"quantization": AFFINE}, r"its scales \(1, 2\)"),
    (
        GOOD | {"m.biases": stored("F32", np.ones((2, 1), "f4"))},
        {"quantization": AFFINE},
        r"'m.biases' is F32 \(2, 1\)",
    ),
    (GOOD | {"m.biases": stored("F16", np.ones((2, 2), "f2"))}, {"quantization": AFFINE}, "'m.biases' is F16"),
    (triple("m", "affine", 4, 64, rows=()), {"quantization": AFFINE}, r"'m.weight' has shape \(16,\)"),
]


@pytest.mark.parametrize(("arrays", "config", "message"), CONTRADICTIONS)
def test_contradictions_are_named(tmp_path, arrays, config, message):
    with pytest.raises(BimetalError, match=message):
        open_quantized(tmp_path, arrays, **config)


def test_other_tensors_called_scales_are_left_alone(tmp_path):
    arrays = FLOAT | {"rope.scales": stored("F32", np.ones(3, "f4"))}
    assert open_quantized(tmp_path, arrays).keys() == arrays.keys()
