"""Recipes, which map a weight of a model to the format that stores it, and the plan for one checkpoint.

A recipe is any function from a `Weight` to a `Format`, or to None for a weight that is copied. Kinds are the last
part of a matrix's name (`q_proj`, `down_proj`, in GGUF files `attn_q`, `ffn_down`), with `experts.` before those of a
mixture, and `embed`, `head` and `router` for these three.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np

from common.checkpoint import Checkpoint
from common.errors import BimetalError, UsageError
from common.quantize import FLOAT_TYPES, MLX_MODES, Format, gguf_format, mlx_format
from common.safetensors import MODES
from common.tensors import Tensor
from common.weights import Layout, Matrix, Stored

DECAYS = ("in_proj_a", "in_proj_b", "in_proj_ba", "ssm_alpha", "ssm_beta", "ssm_ba")  # and weights of changes
FRAGILE = ("embed", "head", *DECAYS)  # few bytes, and a high loss in few bits
LARGEST_ERRORS = (
    *("v_proj", "down_proj", "attn_v", "ffn_down", "experts.down_proj", "experts.ffn_down_exps"),
    "experts.output_linear",  # Granite's
)


@dataclass(frozen=True)
class Weight:
    """One matrix, or a stack of experts, as the checkpoint stores it.

    module  its name without ".weight"
    layer   None outside the layers, else 0 to layers - 1
    """

    tensor: Tensor
    module: str
    kind: str
    layer: int | None
    layers: int
    stored: Stored


Recipe = Callable[[Weight], Format | None]


def weights_of(layout: Layout) -> Iterator[tuple[str, str, int | None, Stored]]:
    """Yield (entry name, tensor name, layer, its place in the files) of every matrix that a model multiplies by."""
    for layer, table in ((None, layout.top), *enumerate(layout.layers)):
        for entry_name, entry in table.items():
            if isinstance(entry, Matrix):
                for stored in entry.parts:
                    yield from ((entry_name, name, layer, stored) for name in stored.names)


def find_weights(checkpoint: Checkpoint, layout: Layout) -> dict[str, Weight]:
    """Return the matrices of a checkpoint by the name of their tensor."""
    return {
        name: Weight(
            checkpoint.tensors[name],
            name.removesuffix(".weight"),
            _kind(entry, name),
            layer,
            len(layout.layers),
            stored,
        )
        for entry, name, layer, stored in weights_of(layout)
    }


def _kind(entry: str, name: str) -> str:
    if entry in ("embed", "head"):
        return entry
    if entry in ("router", "shared_gate"):
        return "router"
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    return f"experts.{leaf}" if entry.startswith("experts_") else leaf


# -- recipes -----------------------------------------------------------------------------------------------------------


def uniform(format: Format) -> Recipe:
    """Assign one format to every matrix except routers, which choose experts and take few bytes."""
    return lambda weight: None if weight.kind == "router" else format


def careful(format: Format) -> Recipe:
    """Assign formats as `uniform` does, but 8 bits to the embedding, the head and the small projections of decays."""
    rest = uniform(format)
    return lambda weight: at_8_bits(format) if weight.kind in FRAGILE else rest(weight)


def mixed(format: Format) -> Recipe:
    """Assign formats as `careful` does, but more bits to values and down projections of some layers.

    This is llama.cpp's choice of layers for Q4_K_M: an eighth at both ends, and every third between.
    """
    rest, more = careful(format), more_bits(format)

    def recipe(weight: Weight) -> Format | None:
        n, i = weight.layers, weight.layer
        if weight.kind in LARGEST_ERRORS and i is not None and (i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2):
            return more
        return rest(weight)

    return recipe


RECIPES: dict[str, Callable[[Format], Recipe]] = {"careful": careful, "uniform": uniform, "mixed": mixed}


def at_8_bits(format: Format) -> Format:
    """Return the format with 8 bits for the same kind of file; a format with more bits is returned unchanged."""
    if format.type in FLOAT_TYPES:
        return format
    return mlx_format("affine", 8, max(32, format.group_size)) if format.type in MODES else Format("Q8_0")


def more_bits(format: Format) -> Format:
    """Return the format with about two more bits for the same kind of file."""
    if format.type in MODES:
        bits = {2: 4, 3: 5, 4: 6}.get(format.bits, 8)
        return mlx_format("affine", bits, max(32, format.group_size))
    return {"Q4_0": Format("Q5_1"), "Q4_1": Format("Q5_1")}.get(format.type, at_8_bits(format))


def with_rules(recipe: Recipe, rules: Sequence[tuple[str, Format | None]]) -> Recipe:
    """Override `recipe` by (pattern, format) rules: the last pattern that matches a kind or a module's name decides."""

    def ruled(weight: Weight) -> Format | None:
        for pattern, format in reversed(rules):
            if fnmatchcase(weight.kind, pattern) or fnmatchcase(weight.module, pattern):
                return format
        return recipe(weight)

    return ruled


def parse_rule(text: str, is_gguf: bool) -> tuple[str, Format | None]:
    """Parse PATTERN=FORMAT; FORMAT is keep, a GGUF type, or for MLX folders BITS, BITS:GROUP, mxfp4 or nvfp4."""
    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern:
        raise UsageError(f"{text!r} is not PATTERN=FORMAT, such as down_proj=6")
    if name == "keep":
        return pattern, None
    if is_gguf:
        return pattern, gguf_format(name)
    if name in MLX_MODES:
        return pattern, mlx_format(name)
    bits, colon, group = name.partition(":")
    if not bits.isdecimal() or (colon and not group.isdecimal()):
        raise UsageError(f"the format in {text!r} is {name!r}; supported: keep, BITS, BITS:GROUP, mxfp4, nvfp4")
    return pattern, mlx_format("affine", int(bits), int(group) if colon else None)


def check_rules(rules: Sequence[tuple[str, Format | None]], weights: dict[str, Weight]) -> None:
    """Refuse a pattern that matches no weight."""
    for pattern, _ in rules:
        if not any(fnmatchcase(w.kind, pattern) or fnmatchcase(w.module, pattern) for w in weights.values()):
            kinds = ", ".join(sorted({w.kind for w in weights.values()}))
            raise UsageError(f"the pattern {pattern!r} matches no matrix; kinds are {kinds}")


# -- the plan ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """Decision about a matrix: its format, or None and the reason why the matrix is not quantized."""

    format: Format | None
    reason: str = ""


def choose(weight: Weight, recipe: Recipe, requantize: bool, is_gguf: bool) -> Choice:
    """Choose the format of a weight, or keep it. Raises BimetalError for quantized weights without `requantize`."""
    format, tensor = recipe(weight), weight.tensor
    if format is None:
        return Choice(None, "kept by the recipe")
    if (tensor.type, tensor.bits, tensor.group_size) == (format.type, format.bits, format.group_size):
        return Choice(None, f"is {format} already")
    if tensor.type not in (*FLOAT_TYPES, "F64") and not requantize:
        raise BimetalError(
            f"tensor {tensor.name!r} is quantized already ({tensor.type}), and a second rounding adds its error to the "
            "first; quantize the original, or give --requantize"
        )
    width = (weight.stored if _is_reordered_stack(weight.stored) else tensor).shape[-1]
    if width % format.unit:
        return Choice(None, f"rows of {width} are no multiple of {format.unit}")
    if not is_gguf and not _fix_takes(weight.stored, tensor, format):
        return Choice(None, f"groups of {format.unit} straddle the heads that the loader reorders")
    return Choice(format)


def choice_of(weight: Weight, choices: dict[str, Choice]) -> Choice:
    """Return the choice for a weight; the experts of a layer, which files hold as one matrix, must share it.

    Raises BimetalError.
    """
    first, *others = weight.stored.names
    for other in others:
        if choices[other] != choices[first]:
            raise BimetalError(f"{first} and {other} are to be stored unlike; the experts of a layer are one matrix")
    return choices[first]


def _is_reordered_stack(stored: Stored) -> bool:
    """Test whether this is a stack of experts that is written in the order of the model, not as it is stored."""
    return stored.fix is not None and stored.part_of is not None and len(stored.part_of) == 3


def _fix_takes(stored: Stored, tensor: Tensor, format: Format) -> bool:
    """Test whether the loader can still reorder the weight after it is stored in `format`."""
    if stored.fix is None or len(stored.names) > 1 or _is_reordered_stack(stored):
        return True
    lead, width = tensor.shape[:-1], tensor.shape[-1]

    def empty(columns: int, type_: str) -> Tensor:
        return Tensor(tensor.name, type_, (*lead, columns), np.zeros((*lead, columns), np.uint8))

    groups = empty(width // format.group_size, "U8")
    data = np.zeros((*lead, width * format.bits // 8), np.uint8)
    quantized = Tensor(tensor.name, format.type, tensor.shape, data, groups, groups, format.bits, format.group_size)
    try:
        stored.fix(replace(quantized, biases=None) if format.type != "affine" else quantized)
    except BimetalError:
        return False
    return True
