"""Options of KV cache compression, and the storage specs that they give."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.errors import UsageError
from common.hadamard import GROUPS, group_of
from common.kv_formats import FORMATS
from common.options import CacheChoice
from common.storage import NATIVE, KVSpec, LatentSpec, LayerSpec, Packing, Plane, RowSpec, Spec, all_specs, grows

PLAIN_BITS = 8  # minimum bits of a format that needs no rotation, no calibration and no exact rows
CALIBRATION = 512  # tokens whose keys and queries calibrate the later keys
SINKS, RECENT = 4, 128  # tokens that are read exactly below 8 bits: docs/kv-cache.md measures them
BOUNDARY = "q8_0"  # the format of boundary layers where the chosen one is narrower
SHORTHANDS = {"q8": ("q8_0", "q8_0"), "q4": ("lm4", "lm4"), "tq3": ("tq3_0", "tq3_0")}
ALL_PAIRS = frozenset((keys, values) for keys in (NATIVE, *FORMATS) for values in (NATIVE, *FORMATS))
LADDER = ((NATIVE, NATIVE), ("q8_0", "q8_0"), ("q8_0", "lm4"), ("lm4", "lm4"), ("tq3_0", "tq3_0"))  # of "auto"


@dataclass(frozen=True)
class CacheOptions:
    """Options of the KV cache; None is the formats' default.

    keys, values   names of FORMATS, or NATIVE: the backend's own float type
    rotate_keys    by default, keys below 8 bits are rotated
    rotate_values  by default, values in Lloyd-Max formats are rotated
    sinks, recent  first and latest tokens that are read exactly; by default 4 and 128 beside keys or values below
                   8 bits, else none
    calibration    first tokens whose keys and queries give each channel's mean and scale; 0: none; by default 512 where
                   keys are below 8 bits
    boundary       first and last layers, counted among those with a cache, in at least 8 bits
    """

    keys: str = NATIVE
    values: str = NATIVE
    rotate_keys: bool | None = None
    rotate_values: bool | None = None
    sinks: int | None = None
    recent: int | None = None
    calibration: int | None = None
    boundary: int = 0

    @property
    def compresses(self) -> bool:
        return (self.keys, self.values) != (NATIVE, NATIVE)

    def __str__(self) -> str:
        return f"keys {self.keys}, values {self.values}"

    @property
    def pair(self) -> str:
        return f"{self.keys}/{self.values}"


def is_auto(choice: CacheChoice) -> bool:
    """Test whether the formats are `auto`: chosen by free memory."""
    if choice.kv == "auto" and (choice.cache_type_k or choice.cache_type_v):
        raise UsageError("kv auto chooses both formats; leave out cache_type_k and cache_type_v, or kv")
    return choice.kv == "auto"


def options_of(choice: CacheChoice, pair: tuple[str, str] = (NATIVE, NATIVE)) -> CacheOptions:
    """Complete the chosen options; `pair` replaces formats that were not chosen."""
    if choice.kv in SHORTHANDS and choice.cache_type_k and choice.cache_type_v:
        raise UsageError(
            f"kv {choice.kv} stands for both formats, and cache_type_k {choice.cache_type_k} and cache_type_v "
            f"{choice.cache_type_v} replace both; leave out kv, or one of the others"
        )
    keys, values = SHORTHANDS.get(choice.kv or "", pair)
    return CacheOptions(
        choice.cache_type_k or keys,
        choice.cache_type_v or values,
        choice.kv_rotate_k,
        choice.kv_rotate_v,
        choice.kv_sinks,
        choice.kv_recent,
        choice.kv_calibration,
        choice.kv_boundary,
    )


def bits_of(format_: str) -> int:
    """Return the bits of a code of a format; 16 or 32 for formats that store numbers."""
    return 32 if format_ == NATIVE else FORMATS[format_].bits


def packed(spec: Sequence[LayerSpec], options: CacheOptions) -> list[LayerSpec]:
    """Return the specs of a model's layers with their caches in the chosen formats.

    A windowed cache holds few rows: its keys are at least q8_0, and nothing is kept beside them. A latent row is key
    and value at once: its compressed part takes the format of the keys, its roped part stays in the backend's own type.
    """
    if not options.compresses:
        return list(spec)
    cached = [i for i, layer in enumerate(spec) if any(map(grows, layer.values()))]
    outer = {*cached[: options.boundary], *cached[-options.boundary :]} if options.boundary else set()
    return [
        {name: _packed_spec(s, _widened(options) if i in outer else options) for name, s in layer.items()}
        for i, layer in enumerate(spec)
    ]


def _widened(options: CacheOptions) -> CacheOptions:
    """Widen keys and values to at least 8 bits."""
    keys, values = (BOUNDARY if bits_of(f) < PLAIN_BITS else f for f in (options.keys, options.values))
    return replace(options, keys=keys, values=values)


def _packed_spec(s: Spec, options: CacheOptions) -> Spec:
    pack = PACK.get(type(s))
    return pack(s, options) if pack else s


def _packed_latents(s: LatentSpec, options: CacheOptions) -> LatentSpec:
    if options.values not in (NATIVE, options.keys):
        raise UsageError(
            f"values of a latent cache are in {options.values} and keys in {options.keys}; a latent row is key and "
            "value at once, and takes one format"
        )
    rotated = _rotates_keys(options, options.keys) and options.keys != NATIVE
    return replace(s, latent_format=options.keys, rotate_latent=rotated)


def _packed_kv(s: KVSpec, options: CacheOptions) -> KVSpec:
    keys, values = options.keys, options.values
    coded = bits_of(keys) < PLAIN_BITS
    keeps = coded or bits_of(values) < PLAIN_BITS
    packing = Packing(
        rotate_keys=keys != NATIVE and _rotates_keys(options, keys),
        rotate_values=values != NATIVE and _either(options.rotate_values, not FORMATS[values].group),
        sinks=_either(options.sinks, SINKS if keeps else 0),
        recent=_either(options.recent, RECENT if keeps else 0),
        calibration=_either(options.calibration, CALIBRATION if coded else 0),
    )
    return _within_window(replace(s, key_format=keys, value_format=_value_format(values), packing=packing))


PACK: Mapping[type[Spec], Callable[[Any, CacheOptions], Spec]] = {KVSpec: _packed_kv, LatentSpec: _packed_latents}


def _rotates_keys(options: CacheOptions, keys: str) -> bool:
    return _either(options.rotate_keys, bits_of(keys) < PLAIN_BITS)


def _value_format(values: str) -> str:
    """Return tq3_0 for turboquant: values are averaged, and need no estimate of inner products."""
    return "tq3_0" if values == "turboquant" else values


def _within_window(s: KVSpec) -> KVSpec:
    if s.window is None:
        return s
    rotations = Packing(rotate_keys=s.packing.rotate_keys, rotate_values=s.packing.rotate_values)
    return replace(s, key_format=BOUNDARY if bits_of(s.key_format) < PLAIN_BITS else s.key_format, packing=rotations)


def with_window(s: KVSpec, window: int, sinks: int) -> KVSpec:
    """Return `s` bounded to the first `sinks` tokens and the last `window`."""
    return _within_window(replace(s, window=window, sinks=sinks))


def _either(chosen: Any, default: Any) -> Any:
    return default if chosen is None else chosen


def described(spec: Sequence[LayerSpec]) -> list[str]:
    """Describe how the layers of a model store their caches, a line for each group of equal layers."""
    lines: dict[str, list[int]] = {}
    for i, layer in enumerate(spec):
        for s in layer.values():
            if grows(s):
                lines.setdefault(_described_spec(s), []).append(i)
    return [f"layers {', '.join(map(str, layers))}: {line}" for line, layers in lines.items()]


def _described_spec(s: RowSpec) -> str:
    parts = [f"{name} {plane.format}{_rotations(plane)}" for name, plane in zip(s.plane_names, s.planes, strict=False)]
    if s.packing.keeps_exact:
        parts.append(f"first {s.packing.first} and latest {s.packing.recent} tokens exact")
        parts.append("keys equalised" if s.packing.calibration else "keys as they are")
    if s.window is not None:
        parts.append(f"the first {s.sinks} and the last {s.window} tokens alone")
    return ", ".join(parts)


def _rotations(plane: Plane) -> str:
    """Describe the rotation of a plane; its groups where they are smaller than a head and than the usual 128."""
    group = group_of(plane.dim)
    if not plane.rotated:
        return ""
    return f" rotated in groups of {group}" if group < min(plane.dim, GROUPS[0]) else " rotated"


def check_pairs(spec: Sequence[LayerSpec], backend: str, pairs: frozenset[tuple[str, str]]) -> None:
    """Refuse formats that the backend does not support, and heads that a format cannot store: BimetalError."""
    for s in filter(grows, all_specs(spec)):
        pair = s.formats
        if pair != (NATIVE, NATIVE) and pair not in pairs:
            raise UsageError(
                f"the {backend} backend has no cache of keys in {pair[0]} and values in {pair[1]}; "
                f"supported: {_listed(pairs)}"
            )
        for plane in s.planes:
            if plane.format != NATIVE:
                FORMATS[plane.format].block(plane.dim)
            if plane.rotated and not group_of(plane.dim):
                raise UsageError(f"heads of {plane.dim} cannot be rotated; supported are multiples of {GROUPS[-1]}")


def _listed(pairs: frozenset[tuple[str, str]]) -> str:
    """Return the pairs, keys before a slash and their values after it."""
    rows: dict[tuple[str, ...], list[str]] = {}
    names = [NATIVE, *FORMATS]
    for keys in names:
        values = tuple(v for v in names if (keys, v) in pairs)
        if values:
            rows.setdefault(values, []).append(keys)
    return "; ".join(f"{' '.join(keys)} / {' '.join(values)}" for values, keys in rows.items()) or NATIVE
