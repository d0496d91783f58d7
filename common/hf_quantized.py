"""Quantized Hugging Face folders of other programs: GPTQ, AWQ, compressed-tensors and FP8, read as GGUF's block types.

Codes of 4 bits become Q4_0 where every zero point is 8, else Q4_1, and codes of 8 bits Q8_0; their scales, and products
of scales and zero points, are rounded to float16. Values of FP8 (e4m3 with scales) are encoded anew as Q8_0. Quantized
activations are not reproduced: these programs round them to 8 bits for speed. A matrix is converted when it is read.

Layouts: modules of AutoGPTQ and AutoAWQ, https://github.com/vllm-project/compressed-tensors, FP8 as of DeepSeek-V3.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from common.errors import BimetalError, shown
from common.quants import E4M3, convert_rows, dequantize, q8_0_blocks, unpack_codes
from common.tensors import Converted, Tensor

METHODS = ("gptq", "awq", "compressed-tensors", "fp8")
CT_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each code of a word, from the lowest bits up
BESIDE = (".g_idx", ".weight_shape", ".weight_g_idx")
ROUNDING = (".input_scale", ".input_zero_point", ".output_scale", ".activation_scale", ".k_scale", ".v_scale")
BLOCK = 128  # rows and columns of FP8 that share a scale, where blocks of a matrix do


Make = Callable[[str, Mapping[str, Tensor]], Tensor]  # of a module's name and all tensors


class Codes(NamedTuple):
    """A matrix (rows, columns) of unsigned codes of `bits` bits.

    groups  number of groups of columns, each with a scale
    read    function of a slice of rows, of multiples of 8, which returns their codes, uint8 (n, columns)
    scales  (rows, groups) float32
    zeros   zero points (rows, groups) float32; None: the middle of the codes
    """

    rows: int
    columns: int
    bits: int
    groups: int
    read: Callable[[slice], np.ndarray]
    scales: Callable[[], np.ndarray]
    zeros: Callable[[], np.ndarray] | None = None


def fold_other(tensors: Mapping[str, Tensor], table: Mapping[str, Any]) -> dict[str, Tensor]:
    """Replace the tensors of each quantized module X by one tensor X.weight of a GGUF type.

    table  quantization_config of config.json

    Raises BimetalError for other methods, and for modules that do not fit them.
    """
    method = table.get("quant_method")
    if method not in METHODS:
        known = ", ".join(METHODS)
        raise BimetalError(
            f"config.json says quant_method {shown(method)}; supported are {known}, mxfp4 and MLX's own modes"
        )
    if method == "compressed-tensors" and table.get("format") not in CT_FORMATS:
        raise BimetalError(
            f"config.json says format {shown(table.get('format'))} of compressed-tensors; supported are "
            f"{', '.join(CT_FORMATS)}"
        )
    if method == "awq" and str(table.get("version", "gemm")).lower() != "gemm":
        raise BimetalError(f"config.json says version {shown(table.get('version'))} of AWQ; supported is gemm")
    makers: dict[str, Make] = {"gptq": partial(_gptq, table), "awq": _awq}
    make = makers.get(str(method), partial(_compressed, table))
    folded: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind in ("qweight", "weight_packed") or (kind == "weight" and tensor.type in ("F8_E4M3", "I8")):
            folded[f"{module}.weight"] = make(module, tensors)
        elif not (kind in ("qzeros", "scales") and f"{module}.qweight" in tensors) and not _is_scale(name, tensors):
            folded[name] = tensor
    return folded


def _is_scale(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Test whether a tensor belongs to a quantized matrix, or rounds activations."""
    module, _, kind = name.rpartition(".")
    if kind in ("weight_scale", "weight_scale_inv", "weight_zero_point"):
        return f"{module}.weight" in tensors or f"{module}.weight_packed" in tensors
    return name.endswith((*BESIDE, *ROUNDING))


def _need(tensors: Mapping[str, Tensor], name: str, types: tuple[str, ...], *shapes: tuple[int, ...]) -> Tensor:
    """Return a tensor of one of the types and shapes."""
    tensor = tensors.get(name)
    if tensor is None:
        raise BimetalError(f"tensor {name!r} is missing beside the codes that it scales")
    if tensor.type not in types or (shapes and tensor.shape not in shapes):
        raise BimetalError(
            f"tensor {name!r} is {tensor.type} {tensor.shape}; expected {' or '.join(types)}, "
            f"{' or '.join(map(str, shapes))}"
        )
    return tensor


INTEGERS, FLOATS = ("I32", "U32"), ("F16", "BF16", "F32")


def _words(tensor: Tensor) -> np.ndarray:
    return np.asarray(tensor.data.view("<u4").reshape(tensor.shape))


def _matrix(tensor: Tensor) -> np.ndarray:
    """Return floats of a stored matrix, vector or number as a matrix."""
    values = dequantize(tensor)
    return values.reshape(len(values) if values.ndim else 1, -1)


# -- GPTQ and AWQ: matrices (columns, rows), whose codes lie in words of 32 bits ---------------------------------------


def _gptq(table: Mapping[str, Any], module: str, tensors: Mapping[str, Tensor]) -> Tensor:
    packed = _need(tensors, f"{module}.qweight", INTEGERS)
    scales = _need(tensors, f"{module}.scales", FLOATS)
    groups, rows = _pair(scales)
    stored_zeros = _need(tensors, f"{module}.qzeros", INTEGERS)
    bits = 32 * _pair(stored_zeros)[1] // rows
    words, width = _pair(packed)
    columns = words * 32 // bits if bits in (4, 8) else 0
    if not columns or width != rows or stored_zeros.shape != (groups, rows * bits // 32):
        raise _unfit(module, packed, scales)
    check_order = _order_check(tensors.get(f"{module}.g_idx"), columns, groups)
    offset = 0 if table.get("checkpoint_format") == "gptq_v2" else 1
    per_word = 32 // bits

    def read(part: slice) -> np.ndarray:
        check_order(part)
        own = _words(packed)[:, part]
        codes = np.empty((words, per_word, own.shape[1]), np.uint8)
        for i in range(per_word):
            codes[:, i] = own >> (bits * i) & ((1 << bits) - 1)
        return codes.reshape(columns, -1).T

    def zeros() -> np.ndarray:
        codes = _words(stored_zeros)[..., None] >> np.arange(0, 32, bits, dtype=np.uint32) & ((1 << bits) - 1)
        return codes.reshape(groups, rows).T.astype(np.float32) + offset

    matrix = Codes(rows, columns, bits, groups, read, lambda: _matrix(scales).T)
    if table.get("sym", True) is True:
        matrix = matrix._replace(read=partial(_checked, module, matrix, zeros))
    else:
        matrix = matrix._replace(zeros=zeros)
    return _tensor(module, matrix, (packed, scales, stored_zeros))


def _checked(module: str, matrix: Codes, zeros: Callable[[], np.ndarray], part: slice) -> np.ndarray:
    """Read codes after a check that zero points are the middle, as the configuration says."""
    if part.start == 0 and (zeros() != 1 << (matrix.bits - 1)).any():
        raise BimetalError(f"{module} has zero points that differ, and config.json says sym is true")
    return matrix.read(part)


def _order_check(order: Tensor | None, columns: int, groups: int) -> Callable[[slice], None]:
    """Refuse a module whose columns are not in the order of their groups; return a check for the first rows' reading.

    Of files whose headers alone are here, as for `fit`, numbers are zeros.
    """
    if order is None:
        return lambda part: None
    words = _words(_need({order.name: order}, order.name, INTEGERS, (columns,)))
    error = BimetalError(f"tensor {order.name!r} reorders columns (desc_act, actorder); supported are groups in order")

    def in_order() -> bool:
        return columns % groups == 0 and bool((words == np.arange(columns) // (columns // groups)).all())

    def check(part: slice) -> None:
        if part.start == 0 and not in_order():
            raise error

    if words.any():
        check(slice(0, 0))
    return check


def _awq(module: str, tensors: Mapping[str, Tensor]) -> Tensor:
    packed = _need(tensors, f"{module}.qweight", INTEGERS)
    scales = _need(tensors, f"{module}.scales", FLOATS)
    groups, rows = _pair(scales)
    columns, width = _pair(packed)
    if width * 8 != rows:
        raise _unfit(module, packed, scales)
    stored_zeros = _need(tensors, f"{module}.qzeros", INTEGERS, (groups, width))

    def unpacked(words: np.ndarray) -> np.ndarray:
        codes = np.empty((*words.shape, 8), np.uint8)
        for i, column in enumerate(AWQ_ORDER):
            codes[..., column] = words >> (4 * i) & 15
        return codes.reshape(len(words), -1)

    return _tensor(
        module,
        Codes(
            rows,
            columns,
            4,
            groups,
            lambda part: unpacked(_words(packed)[:, part.start // 8 : -(-part.stop // 8)]).T,
            lambda: _matrix(scales).T,
            lambda: unpacked(_words(stored_zeros)).T.astype(np.float32),
        ),
        (packed, scales, stored_zeros),
    )


def _pair(tensor: Tensor) -> tuple[int, int]:
    if len(tensor.shape) != 2:
        raise BimetalError(f"tensor {tensor.name!r} has shape {tensor.shape}; expected a matrix")
    rows, columns = tensor.shape
    return rows, columns


def _unfit(module: str, packed: Tensor, scales: Tensor) -> BimetalError:
    return BimetalError(
        f"{module} has codes {packed.shape} and scales {scales.shape}, which fit no codes of 4 or 8 bits"
    )


# -- compressed-tensors and FP8: matrices (rows, columns) --------------------------------------------------------------


def _compressed(table: Mapping[str, Any], module: str, tensors: Mapping[str, Tensor]) -> Tensor:
    if f"{module}.weight_packed" in tensors:
        return _packed(_bits(table), module, tensors)
    weight = tensors[f"{module}.weight"]
    rows, columns = _pair(weight)
    name = f"{module}.weight_scale"
    scale = _need(tensors, name if name in tensors else f"{name}_inv", FLOATS)
    if f"{module}.weight_zero_point" in tensors and dequantize(tensors[f"{module}.weight_zero_point"]).any():
        raise BimetalError(f"{module} has zero points beside codes of 8 bits, which are not supported")
    if columns % 32 or not _scales_fit(scale, rows, columns):
        raise BimetalError(f"{module} is {weight.type} {weight.shape} with scales {scale.shape}, which do not fit")
    if weight.type == "I8":
        groups = scale.shape[1] if len(scale.shape) == 2 else 1
        codes = Codes(rows, columns, 8, groups, lambda part: weight.data[part] ^ 0x80, lambda: _spread(scale, rows))
        return _tensor(module, codes, (weight, scale))
    blocks = partial(_fp8_blocks, weight, scale)
    return Converted(f"{module}.weight", "Q8_0", (rows, columns), columns // 32 * 34, (weight, scale), blocks)


def _bits(table: Mapping[str, Any]) -> int:
    """Return the bits of packed codes that the configuration states for its first group of modules; else 4."""
    groups = table.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = group.get("weights") if isinstance(group, dict) else None
    bits = weights.get("num_bits") if isinstance(weights, dict) else None
    return bits if type(bits) is int and bits in (4, 8) else 4


def _scales_fit(scale: Tensor, rows: int, columns: int) -> bool:
    """Test whether scales are of blocks of BLOCK rows and columns, of rows, or of groups of columns in each row."""
    if len(scale.shape) > 2:
        return False
    down, across = (*scale.shape, 1, 1)[:2]
    if (down, across) == (-(-rows // BLOCK), -(-columns // BLOCK)):
        return True
    return down in (1, rows) and columns % across == 0


def _spread(scale: Tensor, rows: int) -> np.ndarray:
    """Return scales for each row: (rows, groups)."""
    values = _matrix(scale)
    size = 1 if len(values) == rows else rows if len(values) == 1 else BLOCK
    return np.repeat(values, size, axis=0)[:rows]


def _fp8_blocks(weight: Tensor, scale: Tensor) -> np.ndarray:
    """Encode e4m3 values times their scales as Q8_0."""
    rows, columns = weight.shape
    scales = _spread(scale, rows)
    size = BLOCK if -(-columns // BLOCK) == scales.shape[1] > 1 else columns // scales.shape[1]
    out = np.empty((rows, columns // 32 * 34), np.uint8)

    def convert(part: slice) -> None:
        codes = weight.data[part]
        if ((codes & 0x7F) == 0x7F).any():
            raise BimetalError(f"tensor {weight.name!r} is not finite")
        out[part] = q8_0_blocks(E4M3[codes] * np.repeat(scales[part], size, axis=1)[:, :columns])

    convert_rows(convert, rows, columns)
    return out


def _packed(bits_stated: int, module: str, tensors: Mapping[str, Tensor]) -> Tensor:
    packed, shape = tensors[f"{module}.weight_packed"], _need(tensors, f"{module}.weight_shape", ("I64", "I32"), (2,))
    rows, words = _pair(packed)
    columns = int(dequantize(shape)[1]) or words * 32 // bits_stated  # of files whose headers alone are here
    bits = 32 * words // columns if columns > 0 else 0
    scale = _need(tensors, f"{module}.weight_scale", FLOATS)
    groups = _pair(scale)[1]
    if bits not in (4, 8) or words != columns * bits // 32 or scale.shape[0] != rows:
        raise _unfit(module, packed, scale)
    check_order = _order_check(tensors.get(f"{module}.weight_g_idx"), columns, groups)

    def read(part: slice) -> np.ndarray:
        check_order(part)
        return unpack_codes(packed.data[part], bits)

    codes = Codes(rows, columns, bits, groups, read, lambda: _matrix(scale))
    if f"{module}.weight_zero_point" not in tensors:
        return _tensor(module, codes, (packed, scale))
    stored = _need(tensors, f"{module}.weight_zero_point", INTEGERS, (-(-rows * bits // 32), groups))

    def zeros() -> np.ndarray:
        shifts = np.arange(0, 32, bits, dtype=np.uint32)[:, None]
        unpacked = _words(stored)[:, None] >> shifts & ((1 << bits) - 1)
        return unpacked.reshape(-1, groups)[:rows].astype(np.float32)

    return _tensor(module, codes._replace(zeros=zeros), (packed, scale, stored))


# -- blocks ------------------------------------------------------------------------------------------------------------


def _tensor(module: str, codes: Codes, parts: tuple[Tensor, ...]) -> Tensor:
    if codes.columns % (32 * codes.groups):
        raise BimetalError(
            f"{module} has {codes.groups} groups of scales for {codes.columns} columns; supported are groups of a "
            "multiple of 32 columns"
        )
    if codes.bits == 8 and codes.zeros is not None:
        raise BimetalError(f"{module} has zero points beside codes of 8 bits, which are not supported")
    type_ = "Q8_0" if codes.bits == 8 else "Q4_0" if codes.zeros is None else "Q4_1"
    size = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[type_]
    row_bytes = codes.columns // 32 * size
    blocks = partial(_blocks, codes, size)
    return Converted(f"{module}.weight", type_, (codes.rows, codes.columns), row_bytes, parts, blocks)


def _blocks(codes: Codes, size: int) -> np.ndarray:
    """Return blocks of 32 columns, uint8 (rows, columns / 32 * size): a scale, perhaps a minimum, and codes."""
    scales, count = codes.scales().astype(np.float16), codes.columns // 32
    minima = None if codes.zeros is None else (-scales.astype(np.float32) * codes.zeros()).astype(np.float16)
    repeats = count // scales.shape[1]
    heads = [scales] if minima is None else [scales, minima]
    out = np.empty((codes.rows, count, size), np.uint8)

    def convert(part: slice) -> None:
        for i, head in enumerate(heads):
            spread = np.ascontiguousarray(np.repeat(head[part], repeats, axis=1))
            out[part, :, 2 * i : 2 * i + 2] = spread[..., None].view(np.uint8)
        blocks = codes.read(part).reshape(-1, count, 32)
        if codes.bits == 8:
            out[part, :, 2:] = blocks ^ 0x80  # as signed numbers
        else:
            out[part, :, 2 * len(heads) :] = blocks[..., :16] | blocks[..., 16:] << 4

    convert_rows(convert, codes.rows, codes.columns)
    return out.reshape(codes.rows, -1)
