"""Write tests/data/hf_quantized.npz: random matrices as other programs quantize them, and the values that they read.

Made with auto-gptq 0.7.1, autoawq 0.2.9 (packing_utils and WQLinear_GEMM), compressed-tensors 0.20 and torch 2.14 on
the CPU: python make_hf_quantized.py FOLDER, where FOLDER holds the unpacked auto_gptq wheel and autoawq's source. For
each case the file has CASE/config, the JSON of quantization_config, CASE/TENSOR for each tensor of module `m`, and
CASE/dense, float32 (rows, columns). Tensors of types that NumPy lacks are stored as their bits, CASE/TENSOR:TYPE.
"""

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

HERE, LIBRARIES = Path(__file__).parent, Path(sys.argv[1])
ROWS, COLUMNS = 32, 128
FP8_ROWS, FP8_COLUMNS = 136, 160  # the last blocks of 128 are shorter
found: dict[str, np.ndarray] = {}


def module(name: str, path: Path) -> Any:
    """Import one file of a library, without the package around it."""
    spec = importlib.util.spec_from_file_location(name, path)
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def save(case: str, config: dict, tensors: dict[str, torch.Tensor], dense: torch.Tensor) -> None:
    found[f"{case}/config"] = np.array(json.dumps(config))
    for name, tensor in tensors.items():
        kinds = {torch.bfloat16: (torch.int16, "BF16"), torch.float8_e4m3fn: (torch.uint8, "F8_E4M3")}
        if tensor.dtype in kinds:
            bits, type_ = kinds[tensor.dtype]
            found[f"{case}/{name}:{type_}"] = tensor.view(bits).numpy()
        else:
            found[f"{case}/{name}"] = tensor.numpy()
    found[f"{case}/dense"] = dense.float().numpy()


def linear(seed: int) -> torch.nn.Linear:
    torch.manual_seed(seed)
    layer = torch.nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.float16)
    layer.weight.data = torch.randn(ROWS, COLUMNS).half()
    return layer


def grid(layer: torch.nn.Linear, bits: int, group: int, sym: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points (rows, groups), with which each weight is moved to the nearest code."""
    w, most = layer.weight.data.float().reshape(ROWS, -1, group), (1 << bits) - 1
    if sym:
        scale = (w.abs().amax(2) / (most // 2)).half().float()
        zero = torch.full_like(scale, (most + 1) // 2)
    else:
        low, high = w.amin(2).clamp(max=0), w.amax(2).clamp(min=0)
        scale = ((high - low) / most).half().float()
        zero = torch.round(-low / scale).clamp(1, most)
    codes = torch.clamp(torch.round(w / scale[..., None]) + zero[..., None], 0, most)
    layer.weight.data = ((codes - zero[..., None]) * scale[..., None]).reshape(ROWS, COLUMNS)
    return scale, zero


def gptq(case: str, bits: int, group: int, sym: bool, seed: int) -> None:
    QuantLinear = module("auto_gptq_qlinear", LIBRARIES / "auto_gptq/nn_modules/qlinear/qlinear_cuda.py").QuantLinear
    layer = linear(seed)
    scale, zero = grid(layer, bits, group, sym)
    made = QuantLinear(bits, group, COLUMNS, ROWS, False)
    index = torch.arange(COLUMNS, dtype=torch.int32) // group
    made.pack(layer, scale, zero, index)
    made.autogptq_cuda_available = False
    with torch.no_grad():
        dense = made(torch.eye(COLUMNS, dtype=torch.float32)).T
    tensors = {name: getattr(made, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": False}
    save(case, config, tensors, dense)


def awq(case: str, group: int, seed: int) -> None:
    for name in ("awq", "awq.utils", "awq.utils.utils", "awq.modules", "awq.modules.linear"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["awq.utils.utils"].get_best_device = lambda: "cpu"
    source = next(LIBRARIES.glob("autoawq-*")) / "awq"
    module("awq.utils.module", source / "utils" / "module.py")
    packing = module("awq.utils.packing_utils", source / "utils" / "packing_utils.py")
    gemm = module("awq.modules.linear.gemm", source / "modules" / "linear" / "gemm.py")
    layer = linear(seed)
    scale, zero = grid(layer, 4, group, False)
    layer.weight.data = layer.weight.data.half()
    made = gemm.WQLinear_GEMM.from_linear(layer, 4, group, scales=scale.T.contiguous(), zeros=zero.T.contiguous())
    dense = packing.dequantize_gemm(made.qweight, made.qzeros, made.scales, 4, group).T
    tensors = {name: getattr(made, name) for name in ("qweight", "qzeros", "scales")}
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    save(case, config, tensors, dense)


def compressed(case: str, format: str, seed: int, **args: Any) -> None:
    layer = linear(seed)
    weights = QuantizationArgs(**args)
    group = args.get("group_size") or COLUMNS
    if args["type"] == "float":
        scale = (layer.weight.data.float().abs().amax(1, keepdim=True) / 448).bfloat16()
        zero = None
    else:
        scale, unsigned = grid(layer, args["num_bits"], group, args["symmetric"])
        zero = (unsigned - (1 << (args["num_bits"] - 1))).to(torch.int8)
    state = {"weight": layer.weight.data.bfloat16(), "weight_scale": scale.bfloat16()}
    if zero is not None and not args["symmetric"]:
        state["weight_zero_point"] = zero
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=format)
    compressor = BaseCompressor.load_from_registry(format)
    packed = compressor.compress(dict(state), scheme)
    exact = {**packed, "weight_scale": packed["weight_scale"].float()}  # values in float32
    dense = compressor.decompress(exact, scheme)["weight"]
    save(case, {"quant_method": "compressed-tensors", "format": format}, packed, dense)


def fp8(case: str, key: str, block: tuple[int, int] | None, seed: int) -> None:
    """e4m3 values and scales per block or matrix, as torch converts them."""
    torch.manual_seed(seed)
    w = torch.randn(FP8_ROWS, FP8_COLUMNS)
    size = block or (FP8_ROWS, FP8_COLUMNS)
    down, across = -(-FP8_ROWS // size[0]), -(-FP8_COLUMNS // size[1])
    scale = torch.zeros(down, across)
    codes = torch.zeros(FP8_ROWS, FP8_COLUMNS, dtype=torch.float8_e4m3fn)
    dense = torch.zeros(FP8_ROWS, FP8_COLUMNS)
    for i in range(down):
        for j in range(across):
            at = slice(i * size[0], (i + 1) * size[0]), slice(j * size[1], (j + 1) * size[1])
            scale[i, j] = w[at].abs().max() / 448
            codes[at] = (w[at] / scale[i, j]).to(torch.float8_e4m3fn)
            dense[at] = codes[at].float() * scale[i, j]
    config = {"quant_method": "fp8", "fmt": "e4m3"} | ({"weight_block_size": list(block)} if block else {})
    save(case, config, {"weight": codes, key: scale if block else scale.reshape(())}, dense)


def main() -> None:
    sys.path.insert(0, str(LIBRARIES))
    gptq("gptq", 4, 64, True, 0)
    gptq("gptq-asymmetric", 4, 32, False, 1)
    gptq("gptq-8", 8, 64, True, 2)
    awq("awq", 64, 3)
    group = {"num_bits": 4, "type": "int", "strategy": "group"}
    compressed("ct", "pack-quantized", 4, **group, group_size=64, symmetric=True)
    compressed("ct-asymmetric", "pack-quantized", 5, **group, group_size=32, symmetric=False)
    compressed("ct-int8", "int-quantized", 6, num_bits=8, type="int", strategy="channel", symmetric=True)
    compressed("ct-fp8", "float-quantized", 7, num_bits=8, type="float", strategy="channel", symmetric=True)
    fp8("fp8", "weight_scale_inv", (128, 128), 8)
    fp8("fp8-tensor", "weight_scale", None, 9)
    np.savez_compressed(HERE / "hf_quantized.npz", **found)


if __name__ == "__main__":
    main()
