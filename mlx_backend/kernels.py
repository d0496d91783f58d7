"""Make kernels of mx.fast.metal_kernel from the text of metal_kernels/*.metal.

A file there holds a header comment, `#include "name.h"` lines (from metal_kernels/include), helper functions and, last,
`[[kernel]] void name() { ... }`: MLX writes the arguments itself, from the arrays of a call. Launchers first test
`on_metal()`; if it is false they compose MLX's own ops instead.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import cast

import mlx.core as mx

FOLDER = Path(__file__).parents[1] / "metal_kernels"
INCLUDE = re.compile(r'^#include "(.*)"\n', re.MULTILINE)


def on_metal() -> bool:
    """Test whether launchers run Metal kernels: MLX computes on a Mac's GPU."""
    return mx.metal.is_available() and mx.default_device().type == mx.DeviceType.gpu


@cache
def make_kernel(
    name: str, inputs: Sequence[str], outputs: Sequence[str], contiguous: bool = True, atomic: bool = False
) -> Callable[..., list[mx.array]]:
    """Return the kernel of metal_kernels/<name>.metal, as `mx.fast.metal_kernel` returns it.

    inputs, outputs  names of its buffers, in the order of a call's arrays
    contiguous       whether inputs that are not row-contiguous are copied; if not, the kernel reads <input>_strides
    atomic           whether every output is atomic
    """
    header, body = source(name)
    kernel = mx.fast.metal_kernel(
        name=name,
        input_names=list(inputs),
        output_names=list(outputs),
        source=body,
        header=header,
        ensure_row_contiguous=contiguous,
        atomic_outputs=atomic,
    )
    return cast(Callable[..., list[mx.array]], kernel)


def source(name: str) -> tuple[str, str]:
    """Split a kernel's file into (helpers with includes, body), without comments, in which MLX would count names."""
    text = _without_comments((FOLDER / f"{name}.metal").read_text())
    header, _, body = text.partition(f"[[kernel]] void {name}() {{\n")
    included: dict[str, str] = {}

    def include(match: re.Match[str]) -> str:
        file = match[1]
        if file in included:
            return ""
        included[file] = ""
        return INCLUDE.sub(include, _without_comments((FOLDER / "include" / file).read_text()))

    return INCLUDE.sub(include, header).strip() + "\n", body.rstrip().removesuffix("}")


def _without_comments(text: str) -> str:
    return re.sub(r" *//.*", "", text)
