"""The table of a GPU's state for each class of specs, and of its predicted bytes; pools and predictions read it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from common.backend import LayerSize
from common.storage import ConvSpec, DeltaSpec, KVSpec, LatentSpec, LayerSpec, Spec, all_specs
from cuda_backend.caches.formats import packed_bytes
from cuda_backend.caches.kv import KVStore
from cuda_backend.caches.latent import LatentStore
from cuda_backend.caches.packed import PackedStore, keeps_exact
from cuda_backend.caches.planes import TILE, Places, plane_of
from cuda_backend.caches.recurrent import Conv, Delta
from cuda_backend.caches.window import WindowStore
from cuda_backend.layout import EXPANDED, latent_tiles, padded, split_rows, split_tiles
from cuda_backend.occupancy import Card


class Kept(NamedTuple):
    """Functions of a spec, for one class of specs.

    store  the class of its store, or of its layers in Recurrent, which predict bytes
    work   workspace of a layer, given the number of tokens of a prompt: (float32 per row of a step, other float32)
    width  numbers that attention adds up for each head, padded; 0: none
    check  refuses rows that exceed a card's shared memory; BimetalError
    """

    store: Callable[[Any], Any]
    work: Callable[[Any, LayerSize, int], tuple[int, int]]
    width: Callable[[Any], int] = lambda s: 0
    check: Callable[[Card, Any], object] = lambda card, s: None


def _kv_store(s: KVSpec) -> type[KVStore]:
    if s.window is not None:
        return WindowStore
    return PackedStore if keeps_exact(s) else KVStore


def _kv_work(s: KVSpec, layer: LayerSize, tokens: int) -> tuple[int, int]:
    values = layer.heads * s.key_dim // 2 + layer.heads * s.value_dim
    if _kv_store(s) is not PackedStore:
        return values, 0
    values += layer.heads * (s.key_dim // 2 + 1) + s.exact.numbers // 2  # second float16 copies of queries and rows
    return values, (s.packing.exact + 2 * TILE) * s.exact.numbers // 2  # a copy of the ring


def _kv_check(card: Card, s: KVSpec) -> None:
    keys, values = (plane_of(plane, 1, Places(0, 1)) for plane in s.planes)
    packed = packed_bytes(keys, values)
    split_tiles(card, keys.width, split_rows(card, keys.width, 32, packed), packed)


def _latent_width(s: LatentSpec) -> int:
    return padded(s.latent_dim) + padded(s.rope_dim)


def _latent_work(s: LatentSpec, layer: LayerSize, tokens: int) -> tuple[int, int]:
    # float16 keys and values of all heads, and float16 copies of rows that lie in pages or in another format
    beside = min(tokens, EXPANDED) * (layer.expanded + _latent_width(s)) // 2
    values = layer.expanded // 2  # about the float16 queries of a row and its result
    return values + (8 * layer.heads if tokens > EXPANDED else 0), beside


def _latent_check(card: Card, s: LatentSpec) -> None:
    latent_tiles(card, _latent_width(s))


def _delta_work(s: DeltaSpec, layer: LayerSize, tokens: int) -> tuple[int, int]:
    return 2 * s.key_heads * s.key_dim + 3 * s.heads * s.value_dim, 0


TABLE: Mapping[type[Spec], Kept] = {
    KVSpec: Kept(_kv_store, _kv_work, lambda s: padded(s.key_dim), _kv_check),
    LatentSpec: Kept(lambda s: LatentStore, _latent_work, lambda s: padded(s.latent_dim), _latent_check),
    ConvSpec: Kept(lambda s: Conv, lambda s, layer, tokens: (0, 0)),
    DeltaSpec: Kept(lambda s: Delta, _delta_work),
}


def kept(s: Spec) -> Kept:
    return TABLE[type(s)]


def store_of(s: Spec) -> Any:
    return kept(s).store(s)


def check_room(card: Card, spec: Sequence[LayerSpec]) -> None:
    """Refuse caches whose rows exceed a card's shared memory; BimetalError."""
    for s in dict.fromkeys(all_specs(spec)):
        kept(s).check(card, s)
