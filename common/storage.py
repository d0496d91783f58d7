"""Specs of the states that each layer stores for a sequence, and of their bytes.

A spec lists its arrays of rows (`planes`), states whether they append, wrap or recur (`kind`), and counts their bytes.
Backends build their states from specs, and predictions of memory add up their bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeGuard

from common.kv_formats import FORMATS

NATIVE = "native"  # the format of a cache in the backend's own float type
LEAST_USE = 1 / 64  # least use of a channel by the calibrating queries, relative to the channel they use most


class Kind(Enum):
    """Growth of a state: a row per token (APPENDS), a row per token up to a bound (WRAPS), a fixed size (RECURS)."""

    APPENDS = "appends"
    WRAPS = "wraps"
    RECURS = "recurs"


@dataclass(frozen=True)
class Plane:
    """One array of rows: `heads` vectors of `dim` numbers per token in `format`, optionally rotated before encoding."""

    heads: int
    dim: int
    format: str = NATIVE
    rotated: bool = False

    def row_bytes(self, item_bytes: int) -> int:
        """Compute the bytes of one token's row; a number of the format NATIVE takes `item_bytes`."""
        native = self.format == NATIVE
        return self.heads * (self.dim * item_bytes if native else FORMATS[self.format].row_bytes(self.dim))


@dataclass(frozen=True)
class Packing:
    """Options of a compressed cache in addition to its formats.

    rotate_keys    rotate keys before they are encoded
    rotate_values  rotate values before they are encoded
    sinks          first tokens of a sequence that attention reads exactly, in the backend's own float type
    recent         latest tokens, including a row's own, that attention reads exactly
    calibration    number of first tokens whose keys and queries determine each channel's mean and scale, with which
                   later keys are encoded; these tokens are read exactly as well. 0: keys are encoded unscaled
    """

    rotate_keys: bool = False
    rotate_values: bool = False
    sinks: int = 0
    recent: int = 0
    calibration: int = 0

    @property
    def first(self) -> int:
        """Return the number of first tokens that are read exactly."""
        return max(self.sinks, self.calibration)

    @property
    def exact(self) -> int:
        """Return the maximum length of a sequence at which all tokens are read exactly."""
        return self.first + self.recent

    @property
    def keeps_exact(self) -> bool:
        return self.exact > 0


class Spec:
    """Base of all specs, with defaults for a state of fixed size, which has no rows."""

    @property
    def kind(self) -> Kind:
        return Kind.RECURS

    @property
    def planes(self) -> tuple[Plane, ...]:
        return ()

    @property
    def numbers(self) -> int:
        """Count the numbers of one token's row over all planes."""
        return sum(plane.heads * plane.dim for plane in self.planes)

    @property
    def is_packed(self) -> bool:
        """Test whether some plane has another format than the backend's own float type."""
        return any(plane.format != NATIVE for plane in self.planes)

    def row_bytes(self, item_bytes: int) -> int:
        return sum(plane.row_bytes(item_bytes) for plane in self.planes)

    def bytes(self, tokens: int, item_bytes: int) -> int:
        """Count the bytes after `tokens` tokens; a number in the backend's own float type takes `item_bytes`."""
        raise NotImplementedError


class RowSpec(Spec):
    """Base of the states with rows per token: keys and values, windows, latent rows."""

    window: int | None = None  # latest rows that are held beside the first `sinks`; None: all
    sinks: int = 0  # first rows of a sequence, which are kept when rows before the window are dropped
    packing: Packing = Packing()  # options beside the formats
    can_wrap = False  # whether it takes a window
    plane_names: tuple[str, ...] = ()  # in words, as many as it may have

    @property
    def kind(self) -> Kind:
        return Kind.APPENDS if self.window is None else Kind.WRAPS

    @property
    def formats(self) -> tuple[str, str]:
        """Return the formats of keys and of values, as options name them."""
        return self.planes[0].format, self.planes[-1].format

    def rows(self, tokens: int) -> int:
        """Return the number of rows that are held after `tokens` tokens."""
        return tokens if self.window is None else min(tokens, self.sinks + self.window)

    def exact_bytes(self, tokens: int, item_bytes: int) -> int:
        """Count the bytes of exact copies in the backend's own float type, and of calibration statistics."""
        return 0

    def bytes(self, tokens: int, item_bytes: int) -> int:
        return self.rows(tokens) * self.row_bytes(item_bytes) + self.exact_bytes(tokens, item_bytes)


@dataclass(frozen=True)
class KVSpec(RowSpec):
    """Keys and values of one attention layer, each in a format of its own.

    A layer with a `window` holds, and attends to, the first `sinks` tokens and the last `window` tokens.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    sinks: int = 0
    key_format: str = NATIVE
    value_format: str = NATIVE
    packing: Packing = Packing()
    can_wrap = True
    plane_names = "keys", "values"

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Return the planes of keys and of values."""
        return (
            Plane(self.kv_heads, self.key_dim, self.key_format, self.packing.rotate_keys),
            Plane(self.kv_heads, self.value_dim, self.value_format, self.packing.rotate_values),
        )

    @property
    def exact(self) -> "ExactSpec":
        """Return the spec of the rows that attention reads exactly, as a separate cache."""
        recent, first, asks = self.packing.recent, self.packing.first, self.packing.calibration > 0
        return ExactSpec(self.kv_heads, self.key_dim, self.value_dim, recent, first, holds_queries=asks)

    def exact_bytes(self, tokens: int, item_bytes: int) -> int:
        held = self.exact.bytes(tokens, item_bytes) if self.packing.keeps_exact else 0
        return held + self.statistics_bytes(tokens)

    def statistics_bytes(self, tokens: int) -> int:
        """Count the bytes of a calibration: a mean and a scale of each channel of the keys, float32."""
        calibrated = 0 < self.packing.calibration <= tokens
        return 2 * 4 * self.kv_heads * self.key_dim if calibrated else 0


@dataclass(frozen=True)
class ExactSpec(KVSpec):
    """Rows in addition to a compressed cache: keys and values that attention reads exactly, queries for calibration.

    holds_queries  whether the plane of the keys also has a query for each key: the query head of its group with the
                   number `position % (query heads per KV head)`; zeros for rows without queries
    """

    holds_queries: bool = False

    @property
    def planes(self) -> tuple[Plane, ...]:
        keys, values = super().planes
        return (replace(keys, heads=2 * keys.heads) if self.holds_queries else keys), values


@dataclass(frozen=True)
class LatentSpec(RowSpec):
    """One row per token of a latent attention layer, shared by its heads: a compressed part and a roped part."""

    latent_dim: int
    rope_dim: int
    latent_format: str = NATIVE
    rotate_latent: bool = False
    plane_names = "latent rows", "roped parts"

    @property
    def formats(self) -> tuple[str, str]:
        return self.latent_format, self.latent_format

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Return one plane of both parts, or one of the latent in its format and one of the native roped part."""
        if self.latent_format == NATIVE:
            return (Plane(1, self.latent_dim + self.rope_dim),)
        return (Plane(1, self.latent_dim, self.latent_format, self.rotate_latent), Plane(1, self.rope_dim))


@dataclass(frozen=True)
class ConvSpec(Spec):
    """The last taps - 1 inputs of one short convolution."""

    channels: int
    taps: int

    def bytes(self, tokens: int, item_bytes: int) -> int:
        return (self.taps - 1) * self.channels * item_bytes


@dataclass(frozen=True)
class DeltaSpec(Spec):
    """The float32 matrix per head, (heads, key_dim, value_dim), of one Gated DeltaNet layer.

    grouped  value head h uses key head h // (heads / key_heads); False: h % key_heads
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    grouped: bool = False

    @property
    def matrix_bytes(self) -> int:
        return self.heads * self.key_dim * self.value_dim * 4

    def bytes(self, tokens: int, item_bytes: int) -> int:
        return self.matrix_bytes


LayerSpec = Mapping[str, Spec]


def grows(s: Spec) -> TypeGuard[RowSpec]:
    """Test whether a state grows with the tokens read."""
    return s.kind is not Kind.RECURS


def all_specs(layers: Iterable[LayerSpec]) -> list[Spec]:
    """Return the specs of all layers, in order."""
    return [s for layer in layers for s in layer.values()]


def state_bytes(layers: Sequence[LayerSpec], tokens: int, item_bytes: int) -> int:
    """Count the bytes of a state at `tokens` tokens; a number in the backend's own float type takes `item_bytes`."""
    return sum(s.bytes(tokens, item_bytes) for s in all_specs(layers))
