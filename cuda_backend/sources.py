"""Source text of each kernel: the headers that it needs, in order, and its own file in kernels/."""

import re
from pathlib import Path

from cuda_backend.layout import UNITS

KERNELS = Path(__file__).with_name("kernels")
ARCHITECTURES = {
    "tall": "sm_90a",
    "tall_latent": "sm_90a",
    "wide": "sm_90a",
}  # kernels with instructions of one compute capability alone
OPTIONS = ("-std=c++17", "-fmad=false")  # sums are rounded as written, equally in all kernels
HEADERS = (  # each header, and the kernels that need it, all of them after prelude.cuh
    ("tile.cuh", ("experts", "single", "repack", "expand")),
    ("flash.cuh", ("attention", "split", "tall", "tall_latent", "wide", "one_row", "latent", "pieces")),
    ("keys.cuh", ("sample", "draw", "top_k", "entropy")),
    (
        "plane.cuh",
        (
            "attention",
            "choose_blocks",
            "split",
            "tall",
            "tall_latent",
            "wide",
            "one_row",
            "latent",
            "copy_rows",
            "heads_to_cache",
            "to_cache",
            "calibrate",
        ),
    ),
    (
        "exact.cuh",
        ("attention", "split", "tall", "tall_latent", "wide", "one_row", "latent", "heads_to_cache", "to_cache"),
    ),
    (
        "formats.cuh",
        (
            "attention",
            "split",
            "tall",
            "tall_latent",
            "wide",
            "one_row",
            "latent",
            "heads_to_cache",
            "to_cache",
            "pieces",
        ),
    ),
    ("encode.cuh", ("latent", "heads_to_cache", "to_cache")),
    ("decode.cuh", ("attention", "split", "tall", "tall_latent", "wide", "one_row", "latent")),
    ("operands.cuh", ("split", "tall", "tall_latent", "wide", "one_row")),
    ("head.cuh", ("rows", "heads_to_cache")),
    ("ring.cuh", ("experts", "single", "tall", "tall_latent", "wide")),
    ("hopper.cuh", ("tall", "tall_latent", "wide")),
    ("warp_groups.cuh", ("tall", "tall_latent", "wide")),
    ("product.cuh", ("experts", "single")),
    ("packed.cuh", ("single",)),
    ("convolve.cuh", ("delta", "prepare")),
    ("delta.cuh", ("delta", "delta_each")),
    ("store.cuh", ("rows", "light", "pieces", "moe", "single", "delta", "delta_each", "exchange_norm")),
    ("sums.cuh", ("light", "exchange_norm")),
    ("peers.cuh", ("exchange", "exchange_norm")),
    ("matrices.cuh", ("dense", "experts", "hot_experts", "moe", "single")),
    ("choose.cuh", ("hot_experts", "moe", "single")),
)


def source(stem: str, second: tuple[str, ...] = ()) -> str:
    """Return the text that is compiled for kernels/<stem>.cu; `second`: definitions of linear.cu's second matrix."""
    if stem == "linear":
        return _source_of_linear(second)
    headers = [header for header, stems in HEADERS if stem in stems]
    return _text("prelude.cuh", *headers, f"{stem}.cu")


def _source_of_linear(second: tuple[str, ...]) -> str:
    """Wrap each of two types in a namespace; the macros of the first are undefined before those of the second."""
    of_type = _text("tile.cuh", "product.cuh", "packed.cuh", "stripes.cuh")
    lines = [_text("prelude.cuh", "ring.cuh", "matrix.cuh"), "namespace first {", of_type, "}"]
    if second:
        macros = [*UNITS, *(d.split("=")[0] for d in second), *re.findall(r"^ *#define (\w+)", of_type, re.MULTILINE)]
        lines += (f"#undef {name}" for name in dict.fromkeys(macros))
        lines += ("#define " + d.replace("=", " ", 1) for d in (*second, "SECOND"))
        lines += "namespace second {", of_type, "}"
    return "\n".join((*lines, _text("linear.cu")))


def _text(*names: str) -> str:
    return "\n".join((KERNELS / name).read_text() for name in names)
