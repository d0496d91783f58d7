"""Every CUDA kernel compiles for every architecture, without a warning and without a spilled register. Needs no GPU.

Uses NVRTC, as CuPy does: from a toolkit, or from the nvidia-cuda-nvrtc wheel.
"""

import ctypes
import itertools
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from cuda_backend.layout import (
    COLS,
    OPTIONS,
    PREFILL_COLS,
    UNITS,
    Card,
    expert_ring,
    latent_tiles,
    padded,
    partition,
    ring,
    source,
    split_count,
    tile_defines,
)

CARDS = [  # multiprocessors; shared memory of one and of a block (CUDA C programming guide, technical specifications)
    Card("A100", 80, 108, 164 << 10, 163 << 10),
    Card("RTX 3090", 86, 82, 100 << 10, 99 << 10),
    Card("RTX 4090", 89, 128, 100 << 10, 99 << 10),
    Card("H200", 90, 132, 228 << 10, 227 << 10),
    Card("RTX 5090", 120, 170, 100 << 10, 99 << 10),
]


def heads() -> list[tuple[str, ...]]:
    return [(f"D={padded(d)}", f"DIM={d}") for d in (8, 16, 64, 128, 256)]


def linear(card: Card, type_: str, cols: int) -> tuple[str, ...]:
    return *tile_defines(type_), f"COLS={cols}", f"STAGES={ring(card, type_, cols)[1]}"


def experts(card: Card, type_: str, cols: int) -> tuple[str, ...]:
    return *tile_defines(type_), f"COLS={cols}", f"STAGES={expert_ring(card, type_, cols)[1]}"


def latent(card: Card, latent_width: int, width: int) -> tuple[str, ...]:
    tile, buffers, _ = latent_tiles(card, width)
    return f"R={latent_width}", f"W={width}", f"TILE={tile}", f"BUFFERS={buffers}"


def variants(card: Card) -> list[tuple[str, tuple[str, ...]]]:
    """All that the launchers may build for a card."""
    plain = [(stem, ()) for stem in ("rows", "light", "conv", "moe", "pieces", "sample", "random", "top_k")]
    plain += [("to_cache", (f"D={d}",)) for d in (128, 256)]
    plain += [
        ("dense", (t, *e)) for t in ("F32", "F16", "BF16") for e in (("ROWS=1",), ("ROWS=8",), ("ROWS=1", "EXPERTS"))
    ]
    plain += [("latent", latent(card, *widths)) for widths in ((16, 32), (512, 576))]
    plain += [("delta", (f"DK={padded(d)}", f"DIM={d}")) for d in (12, 64, 128, 256)]
    plain += [("attention", defines) for defines in heads()]
    for type_ in UNITS:
        plain += [("linear", linear(card, type_, cols)) for cols in COLS]
        plain += [("experts", experts(card, type_, cols)) for cols in (8, PREFILL_COLS)]
        plain += [(stem, tile_defines(type_)) for stem in ("repack", "expand")]
    return plain


FEW = [
    ("rows", ()),
    ("delta", ("DK=128", "DIM=128")),
    ("attention", ("D=64", "DIM=64")),
    ("linear", linear(CARDS[3], "Q6_K", 16)),
]


@cache
def nvrtc() -> ctypes.CDLL:
    folders = [Path(p) / "nvidia" / kind / "lib" for p in sys.path for kind in ("cu13", "cu12", "cuda_nvrtc")]
    for folder in (*folders, *sorted(Path("/usr/local").glob("cuda*/lib64"), reverse=True)):
        for library in folder.glob("libnvrtc.so.*"):
            for builtins in folder.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(library))
    pytest.skip("NVRTC is not installed: pip install nvidia-cuda-nvrtc")


def compiled(stem: str, defines: tuple[str, ...], architecture: int) -> str:
    """The compiler's log."""
    lib, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    assert (
        lib.nvrtcCreateProgram(ctypes.byref(program), source(stem).encode(), f"{stem}.cu".encode(), 0, None, None) == 0
    )
    # as CuPy passes them, and the report of registers
    options = [
        f"-arch=sm_{architecture}",
        *OPTIONS,
        "-ftz=true",
        "--ptxas-options=-v",
        *(f"-D{d}" for d in defines),
    ]
    failed = lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*map(str.encode, options)))
    lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, log)
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    text = log.value.decode()
    assert not failed, text
    return text


def check(stem: str, defines: tuple[str, ...], architecture: int) -> None:
    log = compiled(stem, defines, architecture)
    assert "warning" not in log, log
    reports = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert reports, log
    assert set(reports) == {("0", "0", "0")}, log


@pytest.mark.parametrize(("stem", "defines"), FEW, ids=lambda x: x if isinstance(x, str) else " ".join(x))
def test_compiles(stem, defines):
    check(stem, defines, 90)


def test_compiles_for_the_oldest():
    check("linear", linear(CARDS[0], "Q4_K", 8), 80)


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_everything_compiles(card):
    for stem, defines in variants(card):
        check(stem, defines, card.capability)


def test_a_spill_fails():
    """The check can fail: too few registers for what a kernel holds."""
    with pytest.raises(AssertionError):
        check("attention", ("D=256", "DIM=256", "__launch_bounds__(x)=__launch_bounds__(128,8)"), 90)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_expert_rings_fit(card):
    for type_ in UNITS:
        for cols in (8, PREFILL_COLS):
            ctas, stages, shared = expert_ring(card, type_, cols)
            assert stages >= 2
            assert shared <= card.block_shared
            assert ctas * (shared + 1024) <= card.shared


def test_rings_fit():
    """Two stages or more where speed matters, at most the card's shared memory, as many CTAs whatever the rows."""
    for card, type_ in itertools.product(CARDS, UNITS):
        ctas = {ring(card, type_, cols)[0] for cols in COLS}
        assert len(ctas) == 1
        for cols in COLS:
            _, stages, shared = ring(card, type_, cols)
            assert stages >= (2 if cols <= 32 else 1)
            assert shared <= card.block_shared


@pytest.mark.parametrize(
    ("row_blocks", "k_blocks"), [(1, 1), (1, 20), (272, 20), (40, 68), (40, 24), (1940, 20), (7, 3)]
)
def test_partition(row_blocks, k_blocks):
    """The slots of the launcher are those that CTAs of linear.cu find for themselves."""
    for most in (82, 132, 264):
        ctas, slots = partition(most, row_blocks, k_blocks)
        units = row_blocks * k_blocks
        owner = [c for c in range(ctas) for _ in range(units * c // ctas, units * (c + 1) // ctas)]
        spread = [len(set(owner[b * k_blocks : (b + 1) * k_blocks])) for b in range(row_blocks)]
        firsts = [owner[b * k_blocks] for b in range(row_blocks)]
        assert slots == max(spread)
        assert firsts == [((b * k_blocks + 1) * ctas - 1) // units for b in range(row_blocks)]


def test_split_count():
    begins = [i * 64 for i in range(64)] + [4096 + i * 256 for i in range(112)] + [32768 + i * 1024 for i in range(96)]
    begins += [131072 + i * 4096 for i in range(32)]
    for n in (1, 64, 65, 4096, 4097, 32768, 32769, 131072, 131073, 262144):
        assert split_count(n) == sum(begin < n for begin in begins)
