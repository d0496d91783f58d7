"""Choose the formats of a model's KV cache, by flags or by free memory (auto)."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from common.errors import BimetalError, UsageError
from common.fit import Blueprint, what_fits
from common.kv_cache import LADDER, CacheOptions, check_pairs, is_auto, options_of, packed
from common.models import Model
from common.ops import Ops
from common.options import CacheChoice
from common.storage import LayerSpec


def cache_of(args: argparse.Namespace) -> CacheChoice:
    """Return the cache options that the flags of a command chose."""
    given: dict[str, Any] = {name: getattr(args, name, None) for name in CacheChoice.__dataclass_fields__}
    return CacheChoice(**given)


def named(choice: CacheChoice) -> str:
    """Describe the chosen options; "" for the defaults."""
    given = [(f.name, getattr(choice, f.name)) for f in fields(CacheChoice) if getattr(choice, f.name) != f.default]
    return ", ".join(f"{name} {value}" for name, value in given)


def cached_spec(spec: Sequence[LayerSpec], choice: CacheChoice, ops: Ops) -> list[LayerSpec]:
    """Return a model's specs with its caches as chosen; raises UsageError for formats that the backend lacks."""
    chosen = packed(spec, options_of(choice))
    check_pairs(chosen, ops.name, ops.cache_pairs)
    return chosen


def automatic(
    choice: CacheChoice, ops: Ops, blueprint: Blueprint, tokens: int, free: int | None = None
) -> CacheOptions:
    """Choose the first pair of LADDER with which `tokens` tokens fit, else the narrowest that the backend supports.

    blueprint  of the model with a KV cache in the backend's own type
    free       bytes beside the weights; None: what is free now, with the weights loaded
    """
    narrowest = CacheOptions()
    for pair in LADDER:
        candidate = options_of(choice, pair)
        try:
            chosen = packed(blueprint.spec, candidate)
            check_pairs(chosen, ops.name, ops.cache_pairs)
        except BimetalError:
            continue  # no kernel, or heads that the format cannot store
        narrowest = candidate
        if what_fits(ops, blueprint._replace(spec=chosen), free=free)(tokens, ops.prefill_rows):
            break
    return narrowest


def chosen_by_memory(options: CacheOptions, tokens: int, free: int, what: str) -> str:
    """Describe what `automatic` chose for `tokens` tokens in `free` bytes of the memory `what`."""
    rule = f"the first that fits, else the last, of {', '.join(map('/'.join, LADDER))}"
    return f"kv auto: {options}, for {tokens} tokens in {free / 1e9:.1f} GB ({what}); {rule}"


def with_cache(model: Any, choice: CacheChoice, tokens: int) -> Any:
    """Return `model` with the chosen cache, for a context of `tokens`; prints the choice of `auto` on stderr."""
    by_memory, options = is_auto(choice), options_of(choice)
    if not isinstance(model, Model):
        if by_memory or options.compresses:
            raise UsageError("the KV cache of a model run by mlx-lm is in its own float type; leave out cache types")
        return model
    if by_memory:
        blueprint = Blueprint(model.config, model.layout, model.definition.state_spec(model.config))
        options = automatic(choice, model.ops, blueprint, tokens)
        print(chosen_by_memory(options, tokens, *model.ops.free_bytes()), file=sys.stderr)
    chosen = replace(model, cache=options)
    _ = chosen.state_spec  # refuses formats that the backend lacks
    return chosen
