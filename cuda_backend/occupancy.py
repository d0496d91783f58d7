"""Resources of GPUs, as data: shared memory, L2, and the registers of products, by compute capability.

Launchers read a `Card` from the device (card.py). Tests compile every kernel for the GPUs of CARDS, whose speed
docs/cuda.md predicts. This module needs neither CuPy nor a GPU.
"""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Card:
    """Properties of a GPU that launches depend on, read once. A multiprocessor has 65,536 registers.

    sms           number of multiprocessors
    shared        bytes of shared memory per multiprocessor; block_shared: most bytes that a block may take
    """

    name: str
    capability: int  # 90 for 9.0
    sms: int
    shared: int
    block_shared: int

    @property
    def blocks(self) -> int:
        """Return a product's CTAs per multiprocessor: with 100 KB of shared memory, two would have too small a ring."""
        return 2 if self.shared > 128 << 10 else 1

    @property
    def half(self) -> str:
        """Return the type in which cuBLAS multiplies many rows: before 8.0 tensor cores have no bf16."""
        return "BF16" if self.capability >= 80 else "F16"

    @property
    def finds_slot(self) -> bool:
        """Test whether attention.cu itself finds a slot's rows in float16 planes; on 7.5 its registers would spill."""
        return self.capability >= 80


class Planned(NamedTuple):
    """A card and figures of its data sheet: bytes per second, dense FLOP/s of `half` into float32."""

    card: Card
    bandwidth: float
    flops: float


# CUDA C++ programming guide, technical specifications; NVIDIA's whitepapers of
# Turing, A100, GA102, AD102, H100, RTX Blackwell
CARDS = (
    Planned(Card("T4", 75, 40, 64 << 10, 64 << 10), 0.320e12, 65e12),
    Planned(Card("A100 40 GB", 80, 108, 164 << 10, 163 << 10), 1.555e12, 312e12),
    Planned(Card("RTX 3090", 86, 82, 100 << 10, 99 << 10), 0.936e12, 71e12),
    Planned(Card("RTX 4090", 89, 128, 100 << 10, 99 << 10), 1.008e12, 165e12),
    Planned(Card("H200", 90, 132, 228 << 10, 227 << 10), 4.8e12, 989e12),
    Planned(Card("RTX 5090", 120, 170, 100 << 10, 99 << 10), 1.792e12, 209e12),
)

# Types by the values that their products keep in registers: kernels/tile.cuh
SUMS = ("Q4_K", "Q5_K")  # types whose minima are multiplied by sums of x
APART = ("Q4_1", "Q5_1", "Q2_K")  # types whose minima need separate registers
SIXTEENS = ("Q6_K", "Q3_K", "Q2_K")  # types with a scale per 16 columns
WHOLE = (*SUMS, *SIXTEENS, "IQ4_XS")  # types with integer scales


class InFlight(NamedTuple):
    """Loads that a warp of kernels/stripes.cuh has in flight: more would spill registers, fewer would wait for memory.

    halves  halves of a unit's 256 columns, 128 each
    eights  groups of 8 rows
    """

    halves: int
    eights: int


def in_flight(card: Card, type_: str, cols: int) -> InFlight:
    """Choose the loads for `cols` rows of x: a thread has 80 or 96 registers if two blocks are resident, else 168."""
    all_eights, blackwell, hopper = max(1, cols // 8), card.capability >= 100, card.capability == 90
    one_half = (
        (cols > 32 and not hopper)
        or (cols > 24 and blackwell)
        or (cols == 24 and (card.capability == 80 or (type_ in SIXTEENS and not hopper)))
        or (cols == 16 and type_ not in WHOLE)
        or (cols > 8 and type_ in APART)
    )
    if type_ in APART or (cols == 24 and (type_ in SUMS or (card.capability == 80 and type_ in WHOLE))):
        eights = 1
    elif cols > 32 and not hopper:
        eights = 1 if type_ in SIXTEENS else 2
    elif cols > 24 and blackwell and type_ in SIXTEENS:
        eights = 2
    else:
        eights = all_eights if cols <= 64 else 3 if type_ == "IQ4_XS" else 5
    return InFlight(1 if one_half or type_ == "Q8_0" else 2, eights)


def product_bound(card: Card, types: tuple[str, ...], cols: int, threads: int) -> int:
    """Return the launch bound, in threads, of kernels/linear.cu; its blocks have `threads`.

    For 8 and 16 rows the kernel is compiled for more threads than a block has: a thread then gets 80 registers, not 96.
    This leaves registers for the next kernel, which on 9.0 may begin before the product has ended.
    """
    spills = any(type_ in APART for type_ in types)
    return 384 if card.capability == 90 and cols in (8, 16) and not spills else threads


def product_blocks(card: Card, types: tuple[str, ...], cols: int, stripes: int) -> int:
    """Return the blocks per multiprocessor that kernels/linear.cu is compiled for; `stripes` per block."""
    spills = cols > 16 and any(type_ in APART for type_ in types)
    return 1 if stripes > 1 or spills else card.blocks


def expert_blocks(card: Card, type_: str, cols: int) -> int:
    """Return the blocks per multiprocessor that kernels/experts.cu is compiled for: few for types that would spill."""
    return 1 if cols > 8 and type_ in (*APART, "Q3_K") else card.blocks
