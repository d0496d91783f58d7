"""Every CUDA kernel compiles for every architecture, without a warning, a spilled register or a stack. Needs no GPU.

Everything that a launcher may build is compiled for six cards by NVRTC, as CuPy does it: from a toolkit, or from the
nvidia-cuda-nvrtc wheel of the test extra. Reports are kept by the hash of source, options and compiler.
"""

import ctypes
import hashlib
import itertools
import os
import re
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from common.block_sparse import BLOCK
from common.errors import BimetalError
from common.kv_formats import FORMATS
from common.step import MAX_DECODE_ROWS
from cuda_backend import occupancy
from cuda_backend.layout import (
    BLOCK_CHOICE,
    COLS,
    ONE_ROW_CODES,
    PREFILL_COLS,
    TOGETHER,
    UNITS,
    delta_saved,
    expert_defines,
    expert_ring,
    group_count,
    latent_tiles,
    linear_launch,
    one_row_tiles,
    padded,
    partition,
    ring,
    run_count,
    shares,
    single_defines,
    split_rows,
    split_tiles,
    takes_64_rows,
    tall_latent_tiles,
    tile_defines,
    warp_groups,
    whole_tiles,
)
from cuda_backend.occupancy import Card
from cuda_backend.sources import ARCHITECTURES, KERNELS, OPTIONS, source

PACKED = [  # widths of heads, formats of keys and of values
    *((d, f, f) for d in (128, 256) for f in ("Q8_0", "Q4_0", "LM4", "TQ3_0", "BF16")),
    *((64, "LM4", "LM4"), (128, "Q4_1", "Q5_0"), (256, "Q8_0", "LM4"), (96, "F16", "LM2"), (128, "Q5_1", "F16")),
    *((d, "TURBOQUANT", "TQ3_0") for d in (64, 128, 256)),
]
CARDS = [planned.card for planned in occupancy.CARDS]


def heads(card: Card) -> list[tuple[str, ...]]:
    return [(*whole_tiles(card, padded(d))[0], f"DIM={d}") for d in (8, 16, 64, 128, 256)]


def splits(card: Card, width: int, packed: int = 0, exact: bool = False) -> list[tuple[str, ...]]:
    """Builds of kernels/split.cu for few rows and for many."""
    rows = dict.fromkeys(split_rows(card, width, n, packed, exact) for n in (16, 32))
    return [split_tiles(card, width, n, packed, exact)[0] for n in rows]


def splits_of_64(card: Card, width: int, packed: int = 0, exact: bool = False) -> list[tuple[str, ...]]:
    """The build of kernels/split.cu for CTAs of 64 rows, if it has one; windows are not read by it."""
    fits = takes_64_rows(card, width, 64, packed, exact)
    return [split_tiles(card, width, 64, packed, exact)[0]] if fits else []


def linear(card: Card, type_: str, cols: int) -> tuple[str, ...]:
    return linear_launch(card, (type_,), cols).defines


def single(card: Card, type_: str, per: int, choice: int, made: int, pack: int) -> tuple[str, ...]:
    kind = f"PER={per}", f"CHOICE={choice}", f"MADE={made}", f"PACK={pack}"
    return *single_defines(card, type_), *kind


def latent(card: Card, latent_width: int, width: int) -> tuple[str, ...]:
    tile, buffers, _ = latent_tiles(card, width)
    return f"R={latent_width}", f"W={width}", f"TILE={tile}", f"BUFFERS={buffers}", "WINDOWED=0"


def prepare(width: int, taps: int, partials: tuple[int, int, int]) -> tuple[str, ...]:
    sums = (f"{name}={n}" for name, n in zip(("PARTIALS", "A_PARTIALS", "B_PARTIALS"), partials, strict=True))
    return f"DK={padded(width)}", f"DIM={width}", f"TAPS={taps}", *sums


def delta(width: int, taps: int, norm: int, alone: int) -> tuple[str, ...]:
    ways = f"NORM={norm}", f"ALONE={alone}"
    if alone:
        return *prepare(width, taps, (5, 7, 7)), *ways, *(("ONLY=1",) if norm else ())
    return f"DK={padded(width)}", f"DIM={width}", f"TAPS={taps}", *ways, *(("ONLY=8",) if norm else ())


Build = tuple[str, tuple[str, ...]]  # a kernel file and its definitions


def variants(card: Card) -> list[Build]:
    """All builds that the launchers may request for a card."""
    attention = attention_builds(card) + packed_builds(card) + latent_builds(card)
    return row_builds() + attention + recurrent_builds(card) + product_builds(card)


def row_builds() -> list[Build]:
    """Row-wise ops, sampling, sums over ranks and copies."""
    builds = [(stem, ()) for stem in ("rows", "light", "conv", "moe", "sample", "draw", "random", "top_k", "entropy")]
    builds += [("calibrate", ()), ("block_conv", ()), ("conv", ("PARENTS=1",))]
    builds += [("exchange", (f"RANKS={n}",)) for n in (2, 8)]
    terms = (2, 1, 8, ("ONLY=1",)), (2, 1, 9, ("ONLY=8",)), (4, 1, 40, ()), (8, 1, 40, ())
    builds += [("exchange_norm", (f"RANKS={n}", f"PARTIALS={s}", f"OTHERS={m}", *form)) for n, s, m, form in terms]
    builds += [("copy_rows", (f"UNIT={unit}",)) for unit in (2, 4, 8, 16)]
    sums = (1, 0, 8), (1, 9, 1), (1, 40, 0), (18, 18, 8), (40, 40, 1), (64, 64, 8)
    builds += [("light", (f"PARTIALS={n}", f"OTHERS={m}", f"ONLY={form}")) for n, m, form in sums]
    return builds


def attention_builds(card: Card) -> list[Build]:
    """Attention to rows in float16, and what follows it."""
    builds: list[Build] = []
    forms = itertools.product(("WARPS=1", "WARPS=2"), ("ALONE=0", "ALONE=1"))
    kinds = [*itertools.product(forms, ((0, 0), (1, 0), (1, 1)), ((), ("ONLY=1",), ("ONLY=8",)))]
    builds += [("pieces", (*form, f"GATED={gated}", f"WINDOWED={w}", *only)) for form, (gated, w), only in kinds]
    builds += [
        ("pieces", (*form, f"GATED={w}", f"WINDOWED={w}", *only, "SINK_LOGITS=1"))
        for form, (gated, w), only in kinds
        if gated == w
    ]
    builds += [
        ("pieces", (*form, f"GATED={gated}", "WINDOWED=0", "FOLDED=1"))
        for form, (gated, w), only in kinds
        if not (w or only)
    ]
    for biased in ((), ("BIASED=1",)):
        builds += [("to_cache", (f"D={d}", f"ALONE={one}", *biased)) for d in (128, 256) for one in (0, 1)]
        builds += [("heads_to_cache", biased)]
    builds += [("attention", (*whole_tiles(card, 256)[0], "DIM=256", "IN_PARTS=1"))]
    turned = itertools.product(("WARPS=1", "WARPS=2"), ("ALONE=0", "ALONE=1"), (0, 1), (32, 64, 128))
    forms = [(*form, f"GATED={gated}", "WINDOWED=0", f"TURN_VALUES={g}") for *form, gated, g in turned]
    builds += [("pieces", form) for form in forms]
    builds += [("pieces", (*form, "SINK_LOGITS=1")) for form in forms if "GATED=0" in form]
    if card.capability == 90:
        builds += [("pieces", (*form, "FOLDED=1")) for form in forms if form[-1] == "TURN_VALUES=128"]
        builds += [("pieces", (*form[:-1], "FOLDED=1")) for form in forms if form[-1] == "TURN_VALUES=128"]
    tiles = [t for d in (16, 64, 80, 128, 256) for t in splits(card, d)]
    builds += [("split", (*t, f"WINDOWED={w}", f"ALONE={alone}")) for t in tiles for w in (0, 1) for alone in (0, 1)]
    tiles = [t for d in (16, 64, 80, 128) for t in splits_of_64(card, d)]
    builds += [("split", (*t, "WINDOWED=0", f"ALONE={alone}")) for t in tiles for alone in (0, 1)]
    tiles = [t for t, _, ctas in (one_row_tiles(card, d) for d in (64, 128, 256)) if ctas]
    builds += [("one_row", (*t, f"WINDOWED={w}", f"ALONE={alone}")) for t in tiles for w in (0, 1) for alone in (0, 1)]
    if card.capability == 90:
        builds += [
            (kernel, (*t, "WINDOWED=0", f"ALONE={alone}"))
            for d in (128, 256)
            for kernel, t in of_warp_groups(card, d)
            for alone in (0, 1)
        ]
        tiles = [t for d in (128, 256) for t in (*splits(card, d), *splits_of_64(card, d))]
        builds += [("split", (*t, "TAILS=1", "WINDOWED=0", f"ALONE={alone}")) for t in tiles for alone in (0, 1)]
    builds += [("attention", defines) for defines in heads(card)]
    builds += [("attention", (*defines, "SINK_LOGITS=1")) for defines in heads(card)]
    builds += [("attention", (*defines, f"SPARSE={BLOCK}")) for defines in heads(card)] + [
        ("choose_blocks", BLOCK_CHOICE)
    ]
    return builds


def of_warp_groups(card: Card, width: int, packed: int = 0, keys: str = "f16") -> list[tuple[str, tuple[str, ...]]]:
    """Kernels of warp groups for each number of rows, with definitions."""
    found = [warp_groups(card, width, rows, packed, keys) for rows in (24, 48, 96, 144, 256)]
    return [("tall" if x.is_tall else "wide", x.defines) for x in dict.fromkeys(found) if x]


def packed_builds(card: Card) -> list[Build]:
    """Attention to packed rows."""
    builds: list[Build] = []
    for d, keys, values in PACKED:
        formats = (
            f"KEYS={keys}",
            f"VALUES={values}",
            f"TURN_KEYS={int(keys not in ('Q8_0', 'BF16'))}",
            f"TURN_VALUES={int(values[0] in 'LT')}",
        )
        exact = (*formats, "EXACT=1")
        for form in (formats, exact):
            for biased in ((), ("BIASED=1",)):
                builds += [
                    ("to_cache", (f"D={d}", f"ALONE={one}", *form, *biased)) for one in (0, 1) if d in (128, 256)
                ]
                builds += [("heads_to_cache", (f"WIDTH={d}", *form, *biased))]
            whole = *whole_tiles(card, d)[0], f"DIM={d}", *form
            builds += [("attention", whole), ("attention", (*whole, "SINK_LOGITS=1"))]
        longest = max(FORMATS[name.lower()].row_bytes(d) for name in (keys, values))
        if longest == 512 and card.shared <= 64 << 10:
            continue  # test_rows_that_do_not_fit
        tiles = splits(card, d, longest)
        builds += [("split", (*t, *formats, f"WINDOWED={w}", f"ALONE={w}")) for t in tiles for w in (0, 1)]
        tiles = splits(card, d, longest, exact=True)
        builds += [("split", (*t, *exact, "WINDOWED=0", "ALONE=0")) for t in tiles]
        for form in (formats, exact):
            tiles = splits_of_64(card, d, longest, form is exact)
            builds += [("split", (*t, *form, "WINDOWED=0", f"ALONE={alone}")) for t in tiles for alone in (0, 1)]
            groups = of_warp_groups(card, d, longest, keys.lower())
            if not groups:
                continue
            builds += [(x, (*t, *form, "WINDOWED=0", f"ALONE={alone}")) for x, t in groups for alone in (0, 1)]
            tiles += splits(card, d, longest, form is exact)
            builds += [("split", (*t, *form, "TAILS=1", "WINDOWED=0", f"ALONE={n}")) for t in tiles for n in (0, 1)]
        if d in (128, 256) and {keys.lower(), values.lower()} <= ONE_ROW_CODES:
            tiled = [(one_row_tiles(card, d, longest, form is exact), form) for form in (formats, exact)]
            builds += [
                ("one_row", (*t, *form, "WINDOWED=0", f"ALONE={alone}"))
                for (t, _, ctas), form in tiled
                for alone in (0, 1)
                if ctas
            ]
    return builds


def latent_builds(card: Card) -> list[Build]:
    """Latent attention."""
    builds: list[Build] = []
    latents = ((16, 32), (128, 144), (512, 576)) if card.capability >= 80 else ((16, 32), (128, 144))
    builds += [("latent", latent(card, *widths)) for widths in latents if widths != (128, 144)]
    groups = tall_latent_tiles(card, 576, 512)
    builds += [("latent", (*latent(card, 512, 576), "TAILS=1"))] if groups else []
    coded = [(f, *widths) for f in ("BF16", "Q8_0", "Q4_0", "LM4", "TQ3_0") for widths in latents[1:]]
    builds += [
        ("latent", (*latent(card, *w), "APART=1", f"KEYS={f}", f"TURN_KEYS={int(f != 'Q8_0')}")) for f, *w in coded
    ]
    builds = [(stem, (*defines, f"ALONE={alone}")) for stem, defines in builds for alone in (0, 1)]
    return builds + ([("tall_latent", groups[0])] if groups else [])


def recurrent_builds(card: Card) -> list[Build]:
    """The convolution and the delta rule."""
    builds: list[Build] = []
    builds += [
        ("prepare", prepare(d, 4, e))
        for d in (12, 64, 128, 256)
        for e in ((1, 1, 1), (3, 3, 3), (5, 7, 7), (20, 40, 20))
    ]
    builds += [("prepare", prepare(d, taps, (1, 1, 1))) for d in (12, 128, 256) for taps in (0, 2)]
    builds += [("prepare", (*prepare(d, 4, (5, 7, 7)), "EACH=1")) for d in (12, 128, 256)]
    builds += [("delta_each", (f"DK={padded(d)}", "NORM=0")) for d in (12, 64, 128, 256)]
    builds += [("delta_each", (f"DK={d}", "NORM=1", *only)) for d in (64, 128, 256) for only in ((), ("ONLY=8",))]
    keys = (12, 64, 128, 256) if card.capability >= 80 else (12, 64, 128)  # test_too_little_shared_memory
    builds += [("delta", delta(d, *e)) for d in keys for e in ((0, 0, 0), (4, 0, 0), (4, 0, 1))]
    builds += [("delta", (*delta(128, 4, 0, 0), "WIDE=32", *grouped)) for grouped in ((), ("GROUPED=1",))]
    builds += [("delta", (*delta(128, 4, 0, alone), "GROUPED=1")) for alone in (0, 1)]
    builds += [("delta_each", ("DK=128", "NORM=1", "GROUPED=1", *only)) for only in ((), ("ONLY=8",))]
    if card.capability >= 90:
        builds += [("delta", delta(d, 4, 1, alone)) for d in (64, 128) for alone in (0, 1)]
        builds += [("delta", (*delta(128, 4, 1, alone), "GROUPED=1")) for alone in (0, 1)]
    return builds


def product_builds(card: Card) -> list[Build]:
    """Products, and the routing and sums of experts."""
    builds: list[Build] = []
    builds += [("moe", (f"PER={n}",)) for n in (2, 8, 16)]
    builds += [("hot_experts", (f"CHOOSES={n > 0:d}", f"PER={max(1, n)}")) for n in (0, 2, 8, 16)]
    builds += [
        ("moe", (f"CHOSEN={k}", f"PARTIALS={n}", f"ONLY={form}"))
        for k, n, form in ((1, 8, 0), (5, 3, 1), (9, 2, 8), (30, 1, 0))
    ]
    builds += [
        ("dense", (t, *e)) for t in ("F32", "F16", "BF16") for e in (("ROWS=1",), ("ROWS=2",), ("ROWS=1", "EXPERTS"))
    ]
    for type_ in UNITS:
        builds += [("linear", linear(card, type_, cols)) for cols in COLS]
        builds += [("experts", expert_defines(card, type_, cols)) for cols in (8, PREFILL_COLS)]
        kinds = (8, 1, 0, 0), (2, 1, 2, 0), (16, 1, 2, 0), (1, 0, 1, 0), (1, 0, 0, 1)
        builds += [("single", single(card, type_, *kind)) for kind in kinds]
        builds += [("single", (*single(card, type_, *kind), "MOVED=1")) for kind in ((8, 1, 0, 0), (8, 1, 2, 0))]
        clamped = [(*single(card, type_, n, 1, made, 0), "CLAMPED=1") for n in (1, 4) for made in (0, 2)]
        builds += [("single", (*form, *moved)) for form in clamped for moved in ((), ("MOVED=1",))]
        builds += [("experts", (*expert_defines(card, type_, 8), "MOVED=1"))]
        builds += [(stem, tile_defines(type_)) for stem in ("repack", "expand")]
    return builds


@cache
def nvrtc() -> ctypes.CDLL:
    folders = [Path(p) / "nvidia" / kind / "lib" for p in sys.path for kind in ("cu13", "cu12", "cuda_nvrtc")]
    for folder in (*folders, *sorted(Path("/usr/local").glob("cuda*/lib64"), reverse=True)):
        for library in folder.glob("libnvrtc.so.*"):
            for builtins in folder.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(library))
    if sys.platform != "linux":
        pytest.skip("the CUDA backend runs on Linux alone, and so does the compiler's wheel")
    raise FileNotFoundError("NVRTC is not installed: pip install nvidia-cuda-nvrtc")


def report(code: str, options: tuple[str, ...]) -> str:
    """The compiler's log, which ends with the registers, stack and spills of each function."""
    lib = nvrtc()
    compiler = f"{lib._name} {os.stat(lib._name).st_mtime_ns}"
    key = hashlib.sha256("\0".join([compiler, *options, code]).encode()).hexdigest()
    kept = Path(tempfile.gettempdir()) / f"bimetal-nvrtc-{os.getuid()}" / key[:24]
    if not kept.exists():
        text = compiled(lib, code, options)
        kept.parent.mkdir(exist_ok=True)
        made = kept.with_suffix(f".{os.getpid()}")
        made.write_text(text)
        made.rename(kept)
    return kept.read_text()


def compiled(lib: ctypes.CDLL, code: str, options: tuple[str, ...]) -> str:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert lib.nvrtcCreateProgram(ctypes.byref(program), code.encode(), b"kernel.cu", 0, None, None) == 0
    words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = lib.nvrtcCompileProgram(program, len(options), words)
    lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, log)
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    text = log.value.decode()
    assert not failed, text
    return text


def check(code: str, defines: tuple[str, ...], capability: int, architecture: str | None = None) -> None:
    # as CuPy passes them, and the report of registers
    target = architecture or f"sm_{capability}"
    options = (f"-arch={target}", *OPTIONS, "-ftz=true", "--ptxas-options=-v", *(f"-D{d}" for d in defines))
    log = report(code, options)
    assert "warning" not in log, log
    usage = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert usage, log
    assert set(usage) == {("0", "0", "0")}, log


def groups() -> list[tuple[str, str]]:
    """Kernel files; a file that is compiled per block type appears with each of these types."""
    builds = [build for card in CARDS for build in variants(card)]
    pairs = dict.fromkeys((stem, d[0] if d and d[0] in UNITS else "") for stem, d in builds)
    return [(stem, type_) for stem, type_ in pairs]


@pytest.mark.compile
@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
@pytest.mark.parametrize(("stem", "type_"), groups(), ids=lambda x: x or "any")
def test_compiles(stem, type_, card):
    of_file = [d for s, d in variants(card) if s == stem and (not type_ or d[0] == type_)]
    if not of_file:
        pytest.skip(f"kernels/{stem}.cu is not for compute capability {card.capability / 10}")
    for defines in of_file:
        check(source(stem), defines, card.capability, ARCHITECTURES.get(stem))


@pytest.mark.compile
@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
@pytest.mark.parametrize("types", TOGETHER, ids="+".join)
def test_two_types_compile(types, card):
    for cols in COLS:
        launch = linear_launch(card, types, cols)
        check(source("linear", launch.second), launch.defines, card.capability)


def test_every_file_is_compiled():
    assert {stem for stem, _ in groups()} == {path.stem for path in KERNELS.glob("*.cu")}


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
@pytest.mark.parametrize(
    ("body", "log"),
    [
        ("x[0] = x[1];", ""),
        ("int unused = 1;", "never referenced"),
        ("float y[64]; for (int i = 0; i < 64; i++) y[(int)x[i]] = i; x[0] = y[(int)x[64]];", "256 bytes stack frame"),
        (
            "float y[96];\n#pragma unroll\nfor (int i = 0; i < 96; i++) y[i] = x[i];\n"
            "#pragma unroll\nfor (int i = 0; i < 96; i++) x[i] = y[i];",
            "[1-9][0-9]* bytes spill stores",
        ),
        ("x[0] = nothing;", "is undefined"),
    ],
    ids=["sound", "warning", "stack", "spill", "error"],
)
def test_faults_are_found(body, log, card):
    """The check finds faults planted in a kernel whose 1024 threads have 64 registers each."""
    code = (KERNELS / "prelude.cuh").read_text()
    code += f'extern "C" __global__ void __launch_bounds__(1024) f(volatile float* x) {{ {body} }}\n'
    if not log:
        return check(code, (), card.capability)
    with pytest.raises(AssertionError, match=log):
        check(code, (), card.capability)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_expert_rings_fit(card):
    for type_ in UNITS:
        for cols in (8, PREFILL_COLS):
            ctas, stages, shared = expert_ring(card, type_, cols)
            assert stages >= (2 if cols == 8 or card.shared > 64 << 10 else 1)
            assert shared <= card.block_shared
            assert ctas * (shared + 1024) <= card.shared


def test_rings_fit():
    """Two stages or more where speed matters, at most the card's shared memory, and as many CTAs for any rows."""
    for card, type_ in itertools.product(CARDS, UNITS):
        ctas = {ring(card, type_, cols)[0] for cols in COLS}
        assert len(ctas) == 1
        for cols in COLS:
            _, stages, shared = ring(card, type_, cols)
            assert stages >= (2 if cols <= (32 if card.shared > 64 << 10 else 16) else 1)
            assert shared + 512 <= card.block_shared  # the kernel declares some itself


def test_shares():
    """CTAs fill all places, except for a small matrix from compute capability 9.0 on: it leaves the second place free.

    Of two types no stripe is longer than necessary, and neither takes more because the other has places to spare.
    """
    before, card = (next(c for c in CARDS if c.name == name) for name in ("A100 40 GB", "H200"))
    assert shares(before, (("Q4_K", 24, 16),)) == (216,)  # where nothing could begin there
    assert shares(card, (("Q4_K", 192, 16),)) == (264,)
    assert shares(card, (("Q4_K", 40, 24),)) == (264,)
    assert shares(card, (("Q4_K", 32, 16),)) == (171,)  # of 3 units
    assert shares(card, (("Q4_K", 16, 20),)) == (160,)  # of 2
    assert shares(card, (("Q4_K", 40, 12),)) == (160,)  # of 3, so that some multiprocessors take 6
    assert shares(card, (("Q4_K", 40, 12),), fills=True) == (264,)  # of 2, as `partition` finds
    assert shares(card, (("Q4_K", 16, 8),)) == (264,)  # of 1, as `partition` finds
    assert shares(card, (("Q4_K", 40, 16), ("Q6_K", 8, 16))) == (200, 64)  # of at most 4 units and 2


@pytest.mark.parametrize(
    ("row_blocks", "k_blocks"), [(1, 1), (1, 20), (272, 20), (40, 68), (40, 24), (1940, 20), (7, 3)]
)
def test_partition(row_blocks, k_blocks):
    """The partial sums of the launcher are those that the CTAs of linear.cu compute."""
    for most in (82, 132, 264):
        ctas, partials = partition(most, row_blocks, k_blocks)
        units = row_blocks * k_blocks
        owner = [c for c in range(ctas) for _ in range(units * c // ctas, units * (c + 1) // ctas)]
        spread = [len(set(owner[b * k_blocks : (b + 1) * k_blocks])) for b in range(row_blocks)]
        firsts = [owner[b * k_blocks] for b in range(row_blocks)]
        assert partials == max(spread)
        assert firsts == [((b * k_blocks + 1) * ctas - 1) // units for b in range(row_blocks)]


def test_group_count():
    begins = [i * 128 for i in range(32)] + [4096 + i * 256 for i in range(112)]
    begins += [32768 + i * 1024 for i in range(96)] + [131072 + i * 2048 for i in range(64)]
    begins += [262144 + i * 4096 for i in range(32)]
    for n in (1, 128, 129, 4096, 4097, 32768, 32769, 131072, 131073, 262144, 262145, 393216):
        assert group_count(n) == sum(begin < n for begin in begins)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
@pytest.mark.parametrize("rows", [16, 32, 64])
def test_split_fits(card, rows):
    for width in (16, 64, 80, 128, 256):
        if rows == 64 and not takes_64_rows(card, width, rows):
            continue
        assert whole_tiles(card, width)[1] <= card.block_shared
        defines, shared, ctas = split_tiles(card, width, rows)
        assert ctas >= 1, defines
        assert shared <= card.block_shared
        assert ctas * (shared + 2048) <= card.shared  # 1 KB is the system's, and the kernel declares some itself


def test_cards_for_ctas_of_64_rows():
    """Heads of 128 need 128 KB of shared memory, heads of 64 less; wider ones, and fewer than 48 rows, take none."""
    taken = {card.name: [d for d in (64, 128, 256) if takes_64_rows(card, d, 64)] for card in CARDS}
    assert taken["H200"] == taken["A100 40 GB"] == [64, 128]
    assert taken["RTX 4090"] == [64]
    assert not any(takes_64_rows(card, 64, 47) for card in CARDS)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_rows_that_do_not_fit(card):
    """Rows of 512 bytes are unpacked beside themselves, for which a small card has no room."""
    if card.shared > 64 << 10:
        assert all(split_tiles(card, 256, split_rows(card, 256, rows, 512), 512)[2] for rows in (16, 32))
        return
    with pytest.raises(BimetalError, match=f"{card.name} has too little shared memory for heads of 256 in rows of 512"):
        split_tiles(card, 256, split_rows(card, 256, 32, 512), 512)


def test_too_little_shared_memory():
    """What needs more than the 64 KB of compute capability 7.5 is refused there, and fits all others."""
    small, *others = CARDS
    assert small.capability == 75
    with pytest.raises(BimetalError, match=r"^T4 has too little shared memory for latents 576 wide$"):
        latent_tiles(small, 576)
    with pytest.raises(BimetalError, match=r"^T4 has too little shared memory for recurrent heads with keys 256 wide$"):
        delta_saved(small, 256, 1, norm=False)
    for card in others:
        assert latent_tiles(card, 576)
        assert delta_saved(card, 256, 1, norm=False)
    for packed in (0, 272, 144):  # f16, q8_0, q4_0
        rows = split_rows(small, 256, 32, packed, packed > 0)
        assert rows == (16 if packed else 32)
        assert split_tiles(small, 256, rows, packed, packed > 0)[2] == 1


def test_rows_of_a_step():
    assert f"#define MAX_DECODE_ROWS {MAX_DECODE_ROWS} " in source("copy_rows")


def test_run_count():
    """One run for every eight groups, wherever a window lies among them."""
    for most in (64, 1024, 4160, 40000, 300000):
        assert run_count(most, 0, 0) * 8 >= group_count(most)
        for window, sinks in ((512, 0), (512, 200), (4096, 64), (60000, 0)):
            size = 128 if window + sinks <= 4096 else 256
            for past in range(0, most, max(1, most // 50)):
                low = max(sinks, past - window + 1)
                seen = {i // size // 8 for i in (*range(min(sinks, past)), *range(low, past + MAX_DECODE_ROWS))}
                assert run_count(most, window, sinks) >= min(len(seen), -(-most // size // 8))
