"""What a sequence stores in each layer, and what that takes: the one owner of both facts.

A spec names its arrays of rows (`planes`), whether they append, wrap or recur (`kind`), and counts their bytes.
Backends build their states from it, and predictions of memory ask it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

NATIVE = "native"  # the format of a cache in the backend's own float type


class Kind(Enum):
    """How a state grows: by a row per token, by a row per token up to a bound, or not at all."""

    APPENDS = "appends"
    WRAPS = "wraps"
    RECURS = "recurs"


@dataclass(frozen=True)
class Plane:
    """One array of rows: per token `heads` vectors of `dim` numbers, stored in `format`."""

    heads: int
    dim: int
    format: str = NATIVE

    def row_bytes(self, item_bytes: int) -> int:
        """Bytes of one token's row; a number of the format NATIVE takes `item_bytes`."""
        return self.heads * self.dim * item_bytes


class RowSpec:
    """A state of one row per token: what keys and values, windows and latent rows share."""

    window: int | None = None  # rows that are kept behind the first `keep`; None: all
    keep: int = 0  # first rows of a sequence that are kept for good

    @property
    def kind(self) -> Kind:
        return Kind.APPENDS if self.window is None else Kind.WRAPS

    @property
    def planes(self) -> tuple[Plane, ...]:
        raise NotImplementedError

    @property
    def numbers(self) -> int:
        """Numbers of one token's row, over all planes."""
        return sum(plane.heads * plane.dim for plane in self.planes)

    def row_bytes(self, item_bytes: int) -> int:
        return sum(plane.row_bytes(item_bytes) for plane in self.planes)

    def rows(self, tokens: int) -> int:
        """Rows that are held after `tokens` tokens."""
        return tokens if self.window is None else min(tokens, self.keep + self.window)

    def bytes(self, tokens: int, item_bytes: int) -> int:
        return self.rows(tokens) * self.row_bytes(item_bytes)


@dataclass(frozen=True)
class KVSpec(RowSpec):
    """Keys and values of one attention layer, each in a format of its own.

    A layer with a `window` sees, and keeps, the first `keep` tokens and the last `window`.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    keep: int = 0
    key_format: str = NATIVE
    value_format: str = NATIVE

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The keys, then the values."""
        return (
            Plane(self.kv_heads, self.key_dim, self.key_format),
            Plane(self.kv_heads, self.value_dim, self.value_format),
        )


@dataclass(frozen=True)
class LatentSpec(RowSpec):
    """One row per token of a latent attention layer, shared by its heads: a compressed part and a roped part."""

    latent_dim: int
    rope_dim: int

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane(1, self.latent_dim + self.rope_dim),)


class RecurrentSpec:
    """A state of a fixed size."""

    kind = Kind.RECURS

    def bytes(self, tokens: int, item_bytes: int) -> int:
        raise NotImplementedError


@dataclass(frozen=True)
class ConvSpec(RecurrentSpec):
    """The last taps - 1 inputs of one short convolution."""

    channels: int
    taps: int

    def bytes(self, tokens: int, item_bytes: int) -> int:
        return (self.taps - 1) * self.channels * item_bytes


@dataclass(frozen=True)
class DeltaSpec(RecurrentSpec):
    """The float32 matrix per head, (heads, key_dim, value_dim), of one Gated DeltaNet layer with so many key heads."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def matrix_bytes(self) -> int:
        return self.heads * self.key_dim * self.value_dim * 4

    def bytes(self, tokens: int, item_bytes: int) -> int:
        return self.matrix_bytes


Spec = KVSpec | LatentSpec | ConvSpec | DeltaSpec
LayerSpec = Mapping[str, Spec]


def grows(s: Spec) -> bool:
    """Whether a state grows with the tokens read."""
    return s.kind is not Kind.RECURS


def all_specs(layers: Iterable[LayerSpec]) -> list[Spec]:
    """The specs of all layers, in order."""
    return [s for layer in layers for s in layer.values()]


def state_bytes(layers: Sequence[LayerSpec], tokens: int, item_bytes: int) -> int:
    """Bytes of a sequence's state at `tokens` tokens; a number in the backend's own float type takes `item_bytes`."""
    return sum(s.bytes(tokens, item_bytes) for s in all_specs(layers))
