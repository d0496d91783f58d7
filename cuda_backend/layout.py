"""Compute the layout of device data and of launches, on which kernels and launchers must agree.

This module needs neither CuPy nor a GPU, so that any machine can compile the kernels and check their budgets.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from common import block_sparse
from common.errors import BimetalError
from common.step import MAX_DECODE_ROWS
from cuda_backend.occupancy import WHOLE, Card, expert_blocks, in_flight, product_blocks, product_bound
from cuda_backend.tree_order import most_saved

# by type: columns of a unit, bytes of a tile of 16 rows: kernels/tile.cuh
UNITS = {
    "Q4_0": (256, 2304),
    "Q4_1": (256, 2560),
    "Q5_0": (256, 2816),
    "Q5_1": (256, 3072),
    "Q8_0": (128, 2176),
    "Q2_K": (256, 1344),
    "Q3_K": (256, 1824),
    "Q4_K": (256, 2304),
    "Q5_K": (256, 2816),
    "Q6_K": (256, 3360),
    "IQ4_NL": (256, 2304),
    "IQ4_XS": (256, 2208),
    "MXFP4": (256, 2176),
}
FLOATS = {"F32": 4, "F16": 2, "BF16": 2}
TOGETHER = ("Q4_K", "Q6_K"), ("Q5_K", "Q6_K")  # types of adjacent matrices in one launch, as llama.cpp mixes them
COLS = (1, 8, 16, 24, 32, 40, 48, 64, 72)  # rows of x that one `linear` kernel takes
SPLIT_TILE = 64  # positions of a tile of kernels/split.cu
WIDE_ROWS = 16, 32, 48  # rows of a warp group of kernels/wide.cu
FEWEST_OF_WARP_GROUPS = {128: 48, 256: 24}  # rows per KV head, by width of a head, for kernels/tall.cu and wide.cu
ONE_ROW_CODES = {"q4_0", "q8_0", "lm2", "lm3", "lm4", "tq3_0"}  # formats that kernels/one_row.cu decodes
LATENT_ROWS = 32  # rows per CTA of kernels/latent.cu
EXPANDED = 8192  # latents that prefill expands to keys and values at a time; a multiple of a tile
BLOCK_CHOICE = (  # definitions for kernels/choose_blocks.cu
    f"BLOCK={block_sparse.BLOCK}",
    f"SINKS={block_sparse.SINKS}",
    f"LATEST={block_sparse.LATEST}",
    f"MOST={block_sparse.MOST}",
    f"MASS={round(1000 * block_sparse.MASS)}",
)
MOST_SINGLE = 256  # most pieces that have one tile each: kernels/flash.cuh
PREFILL_COLS = 32  # rows of a group of kernels/experts.cu in a prefill step


def tile_defines(type_: str) -> tuple[str, ...]:
    return type_, f"EXPECTED_TILE_BYTES={UNITS[type_][1]}"


@functools.cache
def ring(card: Card, type_: str, cols: int) -> tuple[int, int, int]:
    """Return (stripes per multiprocessor, stages of the ring, bytes of the ring); `cols` does not change the first."""

    def stages(columns: int, room: int) -> int:  # more would take shared memory in which the next kernels can begin
        return min(3, (room - 16) // (_stage(type_, columns) + 16))

    half = card.shared // 2 - 1024  # each block keeps 1 KB for the system
    stripes = 2 if stages(1, half) >= 3 else 1
    whole = min(card.block_shared, card.shared - 1024)  # before 8.0 a block may take all; the kernel declares some
    n = stages(cols, half if stripes == 2 and cols <= 24 else whole)
    if n < 1:
        raise BimetalError(f"{card.name} has too little shared memory for {cols} rows of {type_}")
    return stripes, n, n * (_stage(type_, cols) + 16) + 16


@dataclass(frozen=True)
class LinearLaunch:
    """Build and launch of kernels/linear.cu; `stripes` per CTA, shared memory in bytes."""

    defines: tuple[str, ...]
    second: tuple[str, ...]  # definitions of a second matrix
    threads: int
    shared: int
    stripes: int


def linear_launch(card: Card, types: tuple[str, ...], cols: int) -> LinearLaunch:
    """Choose the launch: warps that multiply, a warp that loads, and for up to 8 rows a warp for factors of norms."""
    rings = [ring(card, t, cols) for t in types]
    ahead = cols <= 8
    threads = 288 + 32 * ahead
    stripes = min(per_sm for per_sm, _, _ in rings) if cols > 24 else 1  # more rows take the registers of two CTAs

    def of_type(type_: str, stages: int) -> tuple[str, ...]:
        halves, eights = in_flight(card, type_, cols)
        return *tile_defines(type_), f"STAGES={stages}", f"HALVES_AT_ONCE={halves}", f"EIGHTS_AT_ONCE={eights}"

    defines, *second = (of_type(t, stages) for t, (_, stages, _) in zip(types, rings, strict=True))
    blocks = product_blocks(card, types, cols, stripes)
    per_sm = f"BLOCKS={blocks}", f"BOUND={product_bound(card, types, cols, threads)}"
    both = f"COLS={cols}", f"AHEAD={int(ahead)}", f"STRIPES={stripes}", *per_sm
    shared = max(nbytes for _, _, nbytes in rings)
    return LinearLaunch((*defines, *both), tuple(*second), threads, shared, stripes)


@functools.cache
def expert_ring(card: Card, type_: str, cols: int) -> tuple[int, int, int]:
    """Return (stripes, stages, bytes) as `ring` does, for kernels/experts.cu, which gathers its rows."""
    k, tile = UNITS[type_]
    stage = 8 * tile + cols * (k // 32 * 40 + (32 if k == 128 else 0)) + 16
    half = card.shared // 2 - 1024
    ctas = card.blocks if half // stage >= 2 else 1
    n = min(6, (half if ctas == 2 else card.block_shared) // stage)
    return ctas, n, n * stage


def expert_defines(card: Card, type_: str, cols: int) -> tuple[str, ...]:
    """List the macros of kernels/experts.cu."""
    sizes = f"COLS={cols}", f"STAGES={expert_ring(card, type_, cols)[1]}"
    return *tile_defines(type_), *sizes, f"BLOCKS={expert_blocks(card, type_, cols)}"


def single_defines(card: Card, type_: str) -> tuple[str, ...]:
    """List the macros of kernels/single.cu."""
    return *tile_defines(type_), "COLS=1", f"STAGES={ring(card, type_, 1)[1]}", f"BLOCKS={card.blocks}"


def parts_of(card: Card, ctas: int, matrices: int, row_blocks: int, k_blocks: int) -> int:
    """Count the parts of k with which the matrices of one row fill `ctas` CTAs per multiprocessor in experts.cu.

    More CTAs than multiprocessors are divided in two if the busiest multiprocessor then has less to do.
    """
    whole = matrices * row_blocks
    fewest = 2 if whole > card.sms and -(-2 * whole // card.sms) < 2 * -(-whole // card.sms) else 1
    return min(k_blocks, max(fewest, ctas * card.sms // whole))


def _stage(type_: str, cols: int) -> int:
    k, tile = UNITS[type_]
    return 8 * tile + k // 32 * cols * row_bytes(packing(type_, cols))


class Packing(NamedTuple):
    """Form of int8 rows that kernels/store.cuh writes for one or two products.

    cols   rows of the product, whose values are interleaved; 1: each row is contiguous
    fine   whether each scale covers 32 columns; else 128
    whole  rows of a first product, before those of the product with `cols`; 0: there is one product
    """

    cols: int
    fine: bool
    whole: int = 0

    def joins(self, D: int) -> bool:
        """Test whether one scale covers columns of several heads of width D."""
        return D % (32 if self.fine else 128) != 0


UNPACKED = Packing(0, False)


def packing(type_: str, rows: int) -> Packing:
    """Choose the form of `rows` rows for a product with a matrix of a type: integer sums need one scale."""
    whole = next(c for c in COLS if c >= rows - 64) if rows > COLS[-1] else 0
    cols = next(c for c in COLS if c >= rows - whole)
    return Packing(cols, type_ not in WHOLE, whole)


def row_bytes(packing: Packing) -> int:
    """Count the bytes of 32 columns of a packed row."""
    return 40 if packing.cols == 1 else 36 if packing.fine else 37


def packed_size(columns: int, rows: int, packing: Packing) -> int:
    """Count the bytes of `rows` packed rows."""
    padded = packing.whole + -(-(rows - packing.whole) // packing.cols) * packing.cols
    return groups_of(columns) * row_bytes(packing) * padded


@functools.cache
def shares(card: Card, matrices: tuple[tuple[str, int, int], ...], fills: bool = False) -> tuple[int, ...]:
    """Return the number of stripes of each matrix (type, row blocks, k blocks) of a launch of one or two.

    For two matrices: minimise the longest stripe, then the longest of the other matrix, then both means.

    fills  small matrices use all multiprocessors too: Context.fills
    """
    per_sm = min(ring(card, type_, 1)[0] for type_, _, _ in matrices)
    most = per_sm * card.sms
    if len(matrices) == 1:
        units = matrices[0][1] * matrices[0][2]
        # from 9.0 on the next kernel may begin beside this one; one stripe per multiprocessor leaves room for it
        if not fills and card.capability >= 90 and per_sm > 1 and most < units <= 2 * most:
            most = -(-units // (units // card.sms))
        return (most,)

    sizes = [(row_blocks * k_blocks, 8 * UNITS[type_][1]) for type_, row_blocks, k_blocks in matrices]  # units, bytes

    def cost(n: int) -> tuple[float, ...]:
        stripes = n, most - n
        longest = [-(-units // n) * size for (units, size), n in zip(sizes, stripes, strict=True)]
        mean = [units / n * size for (units, size), n in zip(sizes, stripes, strict=True)]
        return max(longest), sum(longest), max(mean)

    n = min(range(per_sm, most, per_sm), key=cost)
    return n, most - n


@functools.cache
def partition(ctas: int, row_blocks: int, k_blocks: int) -> tuple[int, int]:
    """Return the CTAs of a launch and the partial sums of its output: the most CTAs that compute one row block."""
    units = row_blocks * k_blocks
    ctas = min(ctas, units)
    if ctas < units <= 2 * ctas:  # the longest stripe stays as long, with fewer partial sums
        ctas = -(-units // 2)
    first = np.arange(row_blocks, dtype=np.int64) * k_blocks
    spread = ((first + k_blocks) * ctas - 1) // units - ((first + 1) * ctas - 1) // units
    return ctas, int(spread.max()) + 1


def latent_tiles(card: Card, width: int) -> tuple[int, int, int]:
    """Return (positions per tile of kernels/latent.cu, buffers of 32 positions, bytes) for its shared memory.

    With tiles of 64 positions the kernel waits half as often, but needs more than one tile in flight.
    """
    buffer, rows = 32 * (width + 8) * 2, LATENT_ROWS
    for tile, least, most in ((64, 5, 5), (32, 2, 4)):
        fixed = rows * (tile + 8) * 2 + 4 * rows * (tile + 8) * 4
        buffers = min(most, (card.block_shared - 1024 - fixed) // buffer)  # the kernel declares some itself
        if buffers >= least and width <= 1024:  # the kernel's `gather` has a thread per channel
            return tile, buffers, fixed + buffers * buffer
    raise BimetalError(f"{card.name} has too little shared memory for latents {width} wide")


def tall_latent_tiles(card: Card, width: int, latent: int) -> tuple[tuple[str, ...], int, int, int] | None:
    """Return the build of kernels/tall_latent.cu: (definitions, bytes of shared memory, threads, rows per CTA).

    Returns None if the kernel has no build for float16 rows of `latent` + 64 channels.
    """
    if card.capability != 90 or (latent, width) != (512, 576):
        return None
    sizes = f"R={latent}", f"D={width}", "STAGES=2", "GROUPS=2", "ROWS_EACH=32", "ALONE=0", "WINDOWED=0"
    return sizes, (64 + 2 * SPLIT_TILE) * 2 * width + 32, 384, 64


def split_tiles(
    card: Card, width: int, rows: int, packed: int = 0, exact: bool = False
) -> tuple[tuple[str, ...], int, int]:
    """Return (definitions of kernels/split.cu for 16, 32 or 64 rows per CTA, bytes of shared memory, CTAs per SM).

    packed  bytes of the longest row of a cache that is not float16, whose rows the buffers hold encoded; 0: float16
    exact   whether some tokens are read as float16 in addition
    """

    most = 4 if rows == 16 else 1 if exact and width > 128 and card.capability < 90 else 2  # more would spill registers

    def fit(buffers: int) -> tuple[int, int, int]:
        tiles = 1 if packed else buffers
        shared = (rows + tiles * SPLIT_TILE) * (width + 8) * 2 + rows * (2 * (SPLIT_TILE + 8) + 16)
        shared += buffers * SPLIT_TILE * packed
        return min(most, card.shared // (shared + 2048)), buffers, shared

    choices = {16: (2, 3, 4), 32: (2, 3) if packed else (2, 4), 64: (2, 3) if packed else (2,)}[rows]  # others spill
    ctas, buffers, shared = max(fit(n) for n in choices)
    if not ctas:  # keys and values use the same buffer, one after the other
        ctas, buffers, shared = fit(1)
    if not ctas:
        raise BimetalError(
            f"{card.name} has too little shared memory for heads of {width} in rows of {packed} bytes; "
            "supported are keys and values of fewer bits, or both in f16"
        )
    sizes = f"D={width}", f"ROWS={rows}", f"OF_WARP={blocks_of_warp(rows)}", f"BUFFERS={buffers}", f"CTAS={ctas}"
    return sizes, shared, ctas


def blocks_of_warp(rows: int) -> int:
    """Count the blocks of 16 rows that a warp of kernels/split.cu computes, for `rows` rows per CTA."""
    return max(1, rows // 32)


def one_row_tiles(card: Card, width: int, packed: int = 0, exact: bool = False) -> tuple[tuple[str, ...], int, int]:
    """Return (definitions of kernels/one_row.cu, bytes of shared memory, CTAs per multiprocessor; 0: it does not fit).

    width, packed, exact  as in `split_tiles`
    """
    line = packed or 2 * (width + 8)
    most, choices = (4 if width <= 128 else 3, (4, 6)) if packed else (min(4, 512 // width), (3, 4))

    def fit(buffers: int) -> tuple[int, int, int]:
        shared = SPLIT_TILE * (buffers * line + exact * 2 * (width + 8)) + 8 * 2 * (SPLIT_TILE + 8)
        return min(most, card.shared // (shared + (4096 if packed else 3072))), buffers, shared

    ctas, buffers, shared = max(fit(n) for n in choices)
    return (f"D={width}", f"BUFFERS={buffers}", f"CTAS={ctas}"), shared, ctas


def split_rows(card: Card, width: int, rows: int, packed: int = 0, exact: bool = False) -> int:
    """Return the rows per CTA of kernels/split.cu for a step with `rows` rows per KV head: 16, or 32 if they fit."""
    if rows <= 16:
        return 16
    try:
        split_tiles(card, width, 32, packed, exact)
    except BimetalError:
        return 16
    return 32


def takes_64_rows(card: Card, width: int, rows: int, packed: int = 0, exact: bool = False) -> bool:
    """Test whether after a long past CTAs of 64 rows are faster than CTAs of 32, with `rows` rows per KV head.

    CTAs of 64 rows read the cache half as often, but there are half as many of them, too few for all multiprocessors
    after a short past. With heads wider than 128, one CTA would take all registers of a multiprocessor.
    """
    if width > 128 or rows < 48:
        return False
    try:
        return split_tiles(card, width, 64, packed, exact)[2] == 2
    except BimetalError:
        return False


class WarpGroups(NamedTuple):
    """Build and launch of a kernel of warp groups: macros of its sizes, shared memory in bytes, threads.

    is_tall  whether it is kernels/tall.cu, not wide.cu
    rows     rows per CTA
    ctas     CTAs per multiprocessor
    folds    whether the sums of a piece may include those of earlier pieces
    """

    is_tall: bool
    defines: tuple[str, ...]
    shared: int
    threads: int
    rows: int
    ctas: int
    folds: bool = False


def warp_groups(card: Card, width: int, rows: int, packed: int = 0, keys: str = "f16") -> WarpGroups | None:
    """Choose the kernel of warp groups that computes committed tiles after a long past.

    rows    rows of the step per KV head
    packed  as in `split_tiles`
    keys    format of keys
    Returns None if none has a build, or split.cu alone is as fast.
    """
    if card.capability != 90 or keys == "turboquant" or rows < FEWEST_OF_WARP_GROUPS.get(width, math.inf):
        return None
    is_tall = width == 128 or (rows > 48 and 5 * -(-rows // 128) < 7 * -(-rows // 144))  # as measured: kernels/tall.cu
    return tall_tiles(card, width, rows, packed) if is_tall else wide_tiles(card, width, rows, packed)


def tall_tiles(card: Card, width: int, rows: int, packed: int = 0) -> WarpGroups:
    """Return the build of kernels/tall.cu for `rows` rows per KV head; other parameters as in `warp_groups`."""
    groups = 1 if rows <= 64 and width == 128 else 2
    ctas, folds = 3 - groups, groups == 2 and width == 128
    fixed = groups * 64 * 2 * width
    room = card.block_shared if ctas == 1 else card.shared // 2 - 1024
    ring, shared = _ring(room - 4096 - fixed, width, packed)
    sizes = f"D={width}", "ROWS_EACH=64", f"GROUPS={groups}", f"CTAS={ctas}", f"FOLDS={int(folds)}", *ring
    return WarpGroups(True, sizes, fixed + shared, 128 * (groups + 1), 64 * groups, ctas, folds)


def wide_tiles(card: Card, width: int, rows: int, packed: int = 0) -> WarpGroups:
    """Return the build of kernels/wide.cu for `rows` rows per KV head; other parameters as in `warp_groups`."""
    blocks = -(-rows // (3 * WIDE_ROWS[-1]))
    each = next(n for n in WIDE_ROWS if 3 * n * blocks >= rows)
    fixed = 3 * each * 2 * (width + SPLIT_TILE)
    ring, shared = _ring(card.block_shared - 8192 - fixed, width, packed)
    sizes = f"D={width}", f"ROWS_EACH={each}", "GROUPS=3", *ring
    return WarpGroups(False, sizes, fixed + shared, 512, 3 * each, 1)


def _ring(room: int, width: int, packed: int) -> tuple[tuple[str, ...], int]:
    """Divide `room` bytes between tiles of float16 and tiles of codes; returns definitions, and the bytes taken."""
    tile, codes = SPLIT_TILE * width * 2, SPLIT_TILE * packed
    coded = max(2, min(4, (room - 4 * tile) // codes)) if packed else 0
    stages = 1 << min(8, (room - coded * codes) // tile).bit_length() - 1  # a power of 2
    return (f"STAGES={stages}", *((f"CODED={coded}",) if packed else ())), stages * (tile + 16) + coded * codes


def whole_tiles(card: Card, width: int) -> tuple[tuple[str, ...], int]:
    """Return (definitions of kernels/attention.cu, bytes of shared memory for 64 queries and tiles of the cache).

    If two tiles of 64 positions do not fit, keys and values use one tile of 32, one after the other.
    """
    line = (width + 8) * 2
    if 3 * 64 * line <= card.block_shared:
        return (f"D={width}",), 3 * 64 * line
    return (f"D={width}", "POSITIONS=32"), (64 + 32) * line


def groups_of(columns: int) -> int:
    """Count the groups of 32 columns of a packed row, padded to a whole unit of any weight (256 columns)."""
    return -(-columns // 256) * 8


@functools.cache
def delta_saved(
    card: Card, key_width: int, rows: int, norm: bool, runs: int = 1, wide: int = 64
) -> tuple[int, int, int]:
    """Return (matrices that kernels/delta.cu saves in shared memory, matrices that it saves elsewhere, shared bytes).

    Shared memory has one matrix, if it fits: more are rarely used, and would keep the next kernel from starting early.

    runs  sequences whose trees share the rows
    wide  columns of a CTA
    """
    chunk = 16  # rows that a CTA reads together, at most
    saved = max(most_saved(rows) - (key_width <= 128), 0) if rows <= MAX_DECODE_ROWS else 0
    shared = 4 * 2 * chunk * (2 * key_width + 3 * wide + 4) + 2 * MAX_DECODE_ROWS
    shared += 4 * (2 * chunk * 64 + chunk * 128 + 8) if norm else 0
    size = saved_bytes(key_width, wide)
    if shared > card.block_shared:
        raise BimetalError(f"{card.name} has too little shared memory for recurrent heads with keys {key_width} wide")
    shared_saved = int(saved > 0 and shared + size <= card.block_shared)
    spilled = saved - shared_saved
    if runs > 1:  # a tree that saves n elsewhere has at least n times the rows of the smallest tree that does so
        spilled = rows // ((6 << (key_width <= 128) + shared_saved) - 2)
    return shared_saved, spilled, shared + shared_saved * size


def saved_bytes(key_width: int, wide: int = 64) -> int:
    """Count the bytes of a matrix that kernels/delta.cu saves: the columns of a CTA."""
    return -(-key_width // 64) * 64 * wide * 4


def padded(width: int) -> int:
    """Round up a head's width to its width in memory, a multiple of 16."""
    return -(-width // 16) * 16


def row_blocks(rows: int, runs: int, group: int, size: int) -> int:
    """Return the largest number of blocks of `size` for `rows` * `group`, if no block mixes two of `runs` sequences."""
    return (rows * group + min(rows, runs) * (size - 1)) // size


def piece_places(most: int, tile: int, window: int, sinks: int, shares: int) -> int:
    """Count the places for sums of the pieces of `most` positions, without tails: kernels/flash.cuh Pieces."""
    if window:
        is_single = (window + sinks) // tile + 4 <= min(shares, MOST_SINGLE)
        size = tile if is_single else window_group(window + sinks)
        return -(-sinks // size) + (1 << (window // size + 1).bit_length())
    return max(group_count(most), shares)


def sums_bytes(places: int, rows: int, heads: int, width: int) -> int:
    """Count the bytes of sums and stats of kernels/split.cu or latent.cu, with `places` for each row and head."""
    return places * rows * heads * (4 * width + 8)


def most_sums_bytes(most: int, rows: int, heads: int, width: int) -> int:
    """Count the bytes of sums and stats for `rows` rows, each of a sequence of up to `most` positions."""
    return sums_bytes(group_count(most) + tail_places(SPLIT_TILE, rows), rows, heads, width)


def tail_places(tile: int, rows: int) -> int:
    """Return the largest number of tiles that `rows` rows of a step occupy."""
    return (tile - 1 + rows + tile - 1) // tile


def window_group(seen: int) -> int:
    """Return the positions per group for a row that sees `seen` positions, its window and the sinks."""
    return 128 if seen <= 4096 else 256 if seen <= 65536 else 4096


def group_count(n: int) -> int:
    """Count the groups of n positions, as kernels/flash.cuh group_of numbers them."""
    if n <= 4096:
        return -(-n // 128)
    if n <= 32768:
        return 32 + -(-(n - 4096) // 256)
    if n <= 131072:
        return 144 + -(-(n - 32768) // 1024)
    if n <= 262144:
        return 240 + -(-(n - 131072) // 2048)
    return 304 + -(-(n - 262144) // 4096)


def run_count(most: int, window: int, sinks: int) -> int:
    """Count the runs of eight groups that kernels/pieces.cu finds in `most` positions, at most."""
    groups = group_count(most)
    if window:
        size = window_group(window + sinks)
        groups = min(-(-most // size), -(-(window + MAX_DECODE_ROWS) // size) + -(-sinks // size) + 8)
    return groups // 8 + 2
