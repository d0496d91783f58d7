"""GPTQ, AWQ, compressed-tensors and FP8: the values that their own programs read (data/make_hf_quantized.py)."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

from common.checkpoint import open_checkpoint
from common.errors import BimetalError
from common.hf_quantized import fold_other
from common.models import load_model
from common.quants import BLOCKS, dequantize
from common.reference import NumpyOps
from common.safetensors import fold_quantized
from common.tensors import Tensor, release
from common.weights import column_groups
from generate.__main__ import main

with np.load(Path(__file__).parents[1] / "data" / "hf_quantized.npz") as file:
    FOUND = dict(file)
CASES = sorted({name.partition("/")[0] for name in FOUND})
TYPES = {"float16": "F16", "float32": "F32", "int32": "I32", "int64": "I64", "int8": "I8"}
BLOCK_TYPES = {"gptq-8": "Q8_0", "gptq-asymmetric": "Q4_1", "awq": "Q4_1", "ct-asymmetric": "Q4_1"}
BLOCK_TYPES |= dict.fromkeys(("ct-int8", "ct-fp8", "fp8", "fp8-tensor"), "Q8_0")
# Of the largest value: codes keep their values but for a minimum that is rounded to float16. FP8 is encoded anew: half
# a step of 127, and the scale's rounding.
ERROR = {"gptq": 0, "ct": 0, "gptq-8": 0, "ct-int8": 1e-3} | dict.fromkeys(("ct-fp8", "fp8", "fp8-tensor"), 0.0045)


def tensors_of(case: str, module: str = "m") -> dict[str, Tensor]:
    tensors = {}
    for key, values in FOUND.items():
        name = key.removeprefix(f"{case}/")
        if name == key or name in ("config", "dense"):
            continue
        name, _, type_ = name.partition(":")
        array = np.ascontiguousarray(values)
        data = array.view(np.uint8) if array.ndim else array.reshape(1).view(np.uint8)
        tensors[f"{module}.{name}"] = Tensor(f"{module}.{name}", type_ or TYPES[str(values.dtype)], values.shape, data)
    return tensors


def config_of(case: str) -> dict:
    return json.loads(str(FOUND[f"{case}/config"]))


@pytest.mark.parametrize("case", CASES)
def test_values(case):
    (tensor,) = fold_other(tensors_of(case), config_of(case)).values()
    expected = FOUND[f"{case}/dense"]
    assert (tensor.name, tensor.shape) == ("m.weight", expected.shape)
    assert tensor.type == BLOCK_TYPES.get(case, "Q4_0")
    assert np.abs(dequantize(tensor) - expected).max() <= ERROR.get(case, 1e-3) * np.abs(expected).max()


@pytest.mark.parametrize("case", CASES)
def test_bytes(case):
    """What is predicted before a matrix is converted is what it has then, again after its release."""
    (tensor,) = fold_other(tensors_of(case), config_of(case)).values()
    rows, columns = tensor.shape
    block = BLOCKS[tensor.type]
    assert tensor.nbytes == rows * columns // block.elements * block.bytes
    first = tensor.data
    assert first.shape == (rows, tensor.nbytes // rows)
    assert tensor.data is first
    release(tensor)
    assert tensor.data is not first
    assert np.array_equal(tensor.data, first)
    assert np.array_equal(tensor.take_rows(np.array([3, 1])).data, first[[3, 1]])


def test_other_tensors_stay():
    others = {"norm.weight": tensors_of("gptq")["m.scales"], "m.bias": tensors_of("gptq")["m.scales"]}
    assert set(fold_other(tensors_of("gptq") | others, config_of("gptq"))) == {"m.weight", *others}
    rounding = {f"m.{name}": tensors_of("fp8-tensor")["m.weight_scale"] for name in ("input_scale", "k_scale")}
    assert set(fold_other(tensors_of("fp8-tensor") | rounding, config_of("fp8-tensor"))) == {"m.weight"}


@pytest.mark.parametrize("case", CASES)
def test_headers_alone(case):
    """`fit` sees zeros in place of all numbers."""
    empty = {
        name: Tensor(name, tensor.type, tensor.shape, np.zeros_like(tensor.data))
        for name, tensor in tensors_of(case).items()
    }
    (tensor,) = fold_other(empty, config_of(case)).values()
    (whole,) = fold_other(tensors_of(case), config_of(case)).values()
    assert (tensor.type, tensor.shape, tensor.nbytes) == (whole.type, whole.shape, whole.nbytes)


@pytest.mark.parametrize("case", ["gptq", "awq", "fp8-tensor"])
def test_heads_of_columns_in_another_order(case):
    """As Qwen3.5's output projection takes them: blocks move as a whole, and heads that divide a block are refused."""
    (tensor,) = fold_other(tensors_of(case), config_of(case)).values()
    heads = tensor.shape[1] // 32
    index = np.random.default_rng(0).permutation(heads)
    expected = dequantize(tensor).reshape(-1, heads, 32)[:, index].reshape(tensor.shape)
    assert np.array_equal(dequantize(column_groups(index, 32)(tensor.read())), expected)
    with pytest.raises(BimetalError, match=f"{tensor.type} blocks of 32 straddle heads of 16 columns"):
        column_groups(np.arange(2 * heads), 16)(tensor.read())


# -- a whole model -----------------------------------------------------------------------------------------------------


def awq(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> dict[str, np.ndarray]:
    """Pack codes (rows, columns), zero points and scales (rows, groups) as AutoAWQ does."""

    def packed(values: np.ndarray) -> np.ndarray:
        words = np.zeros((values.shape[0], values.shape[1] // 8), np.uint32)
        for i, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            words |= values[:, column::8].astype(np.uint32) << np.uint32(4 * i)
        return words.view(np.int32)

    return {"qweight": packed(codes.T), "qzeros": packed(zeros.T), "scales": scales.T.astype(np.float16)}


def awq_model(folder: Path) -> tuple[Path, Path]:
    """A folder whose matrices are AWQ, and one with the same values in float32."""
    source, random = tiny.checkpoint("qwen3"), np.random.default_rng(0)
    quantized, plain = {}, {}
    for name, tensor in source.tensors.items():
        values = dequantize(tensor)
        plain[name] = quantized[name] = values
        if name.endswith("_proj.weight") and values.shape[1] % 32 == 0 and values.shape[0] % 8 == 0:
            rows, columns = values.shape
            codes, zeros = random.integers(16, size=(rows, columns)), random.integers(16, size=(rows, columns // 32))
            scales = np.full(zeros.shape, 2.0**-5)
            quantized |= {f"{name.removesuffix('weight')}{kind}": x for kind, x in awq(codes, zeros, scales).items()}
            del quantized[name]
            plain[name] = ((codes - np.repeat(zeros, 32, 1)) * np.repeat(scales, 32, 1)).astype(np.float32)
    assert sum(name.endswith("qweight") for name in quantized) >= 8
    return write(folder / "quantized", source.config | AWQ, quantized), write(folder / "plain", source.config, plain)


def logits_of(path: Path, ops: NumpyOps) -> np.ndarray:
    return tiny.logits_of(load_model(open_checkpoint(path), ops), tiny.golden("qwen3")["ids"][:40])


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_model(backend, tmp_path):
    ops = NumpyOps()
    if backend == "mlx":
        mx = pytest.importorskip("mlx.core")
        from mlx_backend.ops import MlxOps

        ops = MlxOps(mx.float32)
    quantized, plain = awq_model(tmp_path)
    assert np.abs(logits_of(quantized, ops) - logits_of(plain, ops)).max() < 1e-4


@pytest.mark.gpu
def test_model_on_cuda(tmp_path):
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from cuda_backend.ops import CudaOps

    quantized, plain = awq_model(tmp_path)
    model = load_model(open_checkpoint(quantized), CudaOps())
    assert "Q4_1" in {segment.type for segment in model.weights.layers[0].qkv.segments}
    found = tiny.logits_of(model, tiny.golden("qwen3")["ids"][:40])
    assert tiny.errors(found, logits_of(plain, NumpyOps())).kl < 5e-3  # activations are rounded to 8 bits


def test_biases_of_zeros(tmp_path):
    """AutoGPTQ writes them for matrices that have none; any other number is refused."""
    quantized, _ = awq_model(tmp_path)
    expected, name = logits_of(quantized, NumpyOps()), "model.layers.0.self_attn.o_proj.bias"
    tensors = load_file(quantized / "model.safetensors") | {name: np.zeros(32, np.float16)}
    save_file(tensors, quantized / "model.safetensors")
    assert np.array_equal(logits_of(quantized, NumpyOps()), expected)
    tensors[name][3] = 1
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(BimetalError, match=r"o_proj\.bias, which this architecture does not use"):
        logits_of(quantized, NumpyOps())


def test_written_as_gguf(tmp_path, capsys):
    """A GGUF file keeps the blocks, without a second rounding; an MLX folder cannot."""
    quantized, _ = awq_model(tmp_path)
    assert main(["quantize", str(quantized), str(tmp_path / "model.gguf"), "--layers", "*=keep"]) == 0
    types = {name: tensor.type for name, tensor in open_checkpoint(tmp_path / "model.gguf").tensors.items()}
    assert types["blk.0.attn_q.weight"] == "Q4_1"
    found = logits_of(tmp_path / "model.gguf", NumpyOps())
    assert np.array_equal(found, logits_of(quantized, NumpyOps()))
    capsys.readouterr()
    assert main(["quantize", str(quantized), str(tmp_path / "folder"), "--layers", "*=keep"]) == 1
    assert "is read as Q4_1, which an MLX folder cannot store; give --requantize, or" in capsys.readouterr().err


AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}}


def write(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# -- refused -----------------------------------------------------------------------------------------------------------


def changed(case: str, **tensors) -> dict[str, Tensor]:
    """The tensors of a case with some replaced by arrays, or left out (None)."""
    found = tensors_of(case)
    for name, values in tensors.items():
        key = f"m.{name}"
        if values is None:
            del found[key]
        else:
            array = np.ascontiguousarray(values)
            found[key] = Tensor(key, found[key].type if key in found else "I32", array.shape, array.view(np.uint8))
    return found


@pytest.mark.parametrize(
    ("case", "config", "tensors", "words"),
    [
        (
            "gptq",
            {"quant_method": "hqq"},
            {},
            "quant_method 'hqq'; supported are gptq, awq, compressed-tensors, fp8,",
        ),
        ("ct", {"format": "marlin-24"}, {}, "format 'marlin-24' of compressed-tensors; supported are pack-quantized"),
        ("awq", {"version": "gemv"}, {}, "version 'gemv' of AWQ; supported is gemm"),
        ("gptq", {}, {"g_idx": np.arange(128, dtype=np.int32)[::-1] // 64}, "'m.g_idx' reorders columns (desc_act"),
        ("gptq", {}, {"scales": None}, "'m.scales' is missing beside the codes"),
        (
            "gptq",
            {},
            {"qweight": np.zeros((16, 31), np.int32)},
            "m has codes (16, 31) and scales (2, 32), which fit no",
        ),
        ("awq", {}, {"qzeros": np.zeros((2, 3), np.int32)}, "'m.qzeros' is I32 (2, 3); expected I32 or U32, (2, 4)"),
        (
            "ct",
            {},
            {"weight_shape": np.array([32, 256])},
            "m has codes (32, 16) and scales (32, 2), which fit no codes",
        ),
        ("ct", {}, {"weight_g_idx": np.arange(128, dtype=np.int32) % 2}, "'m.weight_g_idx' reorders columns (desc_act"),
        ("gptq", {}, {"g_idx": np.zeros(127, np.int32)}, "'m.g_idx' is I32 (127,); expected I32 or U32, (128,)"),
        (
            "fp8",
            {},
            {"weight_scale_inv": np.ones((3, 2), np.float32)},
            "m is F8_E4M3 (136, 160) with scales (3, 2), which",
        ),
        ("fp8", {}, {"weight_scale_inv": None}, "'m.weight_scale_inv' is missing beside the codes"),
        ("gptq-8", {"sym": False}, {}, "m has zero points beside codes of 8 bits, which are not supported"),
    ],
)
def test_refused(case, config, tensors, words):
    with pytest.raises(BimetalError, match=re.escape(words)):
        fold_other(changed(case, **tensors), config_of(case) | config)


@pytest.mark.parametrize(
    ("case", "tensors", "words"),
    [
        (
            "gptq",
            {"qzeros": np.zeros((2, 4), np.int32)},
            "m has zero points that differ, and config.json says sym is true",
        ),
        ("gptq", {"g_idx": np.zeros(128, np.int32)}, "tensor 'm.g_idx' reorders columns (desc_act, actorder)"),
        ("fp8", {"weight": np.full((136, 160), 0x7F, np.uint8)}, "tensor 'm.weight' is not finite"),
    ],
)
def test_refused_when_read(case, tensors, words):
    (tensor,) = fold_other(changed(case, **tensors), config_of(case)).values()
    with pytest.raises(BimetalError, match=re.escape(words)):
        dequantize(tensor)


def test_eight_bits_without_a_method():
    weight = tensors_of("fp8")["m.weight"]
    with pytest.raises(BimetalError, match=r"'F8_E4M3', and config\.json says nothing about"):
        fold_quantized({"m.weight": weight}, {})
