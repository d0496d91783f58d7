"""Source text of each kernel: the headers that it needs, in order, and its own file in kernels/."""

import re
from pathlib import Path

from cuda_backend.layout import UNITS

KERNELS = Path(__file__).with_name("kernels")
OPTIONS = ("-std=c++17", "-fmad=false")  # sums are rounded as written, equally in all kernels
WARP_GROUPS = ("tall", "tall_latent", "wide")
PIECES = ("split", *WARP_GROUPS, "one_row", "latent")  # kernels that compute pieces of attention
TO_CACHE = ("heads_to_cache", "to_cache")
ARCHITECTURES = dict.fromkeys(WARP_GROUPS, "sm_90a")  # kernels with instructions of one compute capability alone
HEADERS = (  # each header, and the kernels that need it, all of them after prelude.cuh
    ("tile.cuh", ("experts", "single", "repack", "expand")),
    ("flash.cuh", ("attention", *PIECES, "pieces")),
    ("keys.cuh", ("sample", "draw", "top_k", "entropy")),
    ("plane.cuh", ("attention", "choose_blocks", *PIECES, "copy_rows", *TO_CACHE, "calibrate")),
    ("exact.cuh", ("attention", *PIECES, *TO_CACHE)),
    ("formats.cuh", ("attention", *PIECES, *TO_CACHE, "pieces")),
    ("encode.cuh", ("latent", *TO_CACHE)),
    ("decode.cuh", ("attention", *PIECES)),
    ("operands.cuh", ("split", *WARP_GROUPS, "one_row")),
    ("head.cuh", ("rows", "heads_to_cache")),
    ("ring.cuh", ("experts", "single", *WARP_GROUPS)),
    ("hopper.cuh", WARP_GROUPS),
    ("warp_groups.cuh", WARP_GROUPS),
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
