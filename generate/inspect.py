"""`python -m generate inspect MODEL`: the contents of a checkpoint, from its headers."""

import argparse
import math
from collections import defaultdict
from dataclasses import asdict, is_dataclass
from typing import Any

from common import wedlm_calibration
from common.checkpoint import Checkpoint, open_checkpoint
from common.errors import BimetalError
from common.expert_budget import expert_budget
from common.expert_files import expert_forms, expert_matrices
from common.fit import Blueprint, predict_weights
from common.hub import resolve_model
from common.kv_cache import CacheOptions, check_pairs, described, is_auto, packed
from common.kv_formats import FORMATS
from common.models import architecture
from common.models.eagle3_config import config_alone, default_taps, is_eagle3, target_ids
from common.models.eagle3_weights import layout as eagle3_layout
from common.models.mtp import refuse_block
from common.ops import Ops, Rope
from common.shards import Ranks
from common.storage import NATIVE, all_specs, grows, state_bytes
from common.tokenizer import load_tokenizer
from common.weights import Layout, misfits
from generate.backends import open_backend
from generate.caches import automatic, cache_of, cached_spec, chosen_by_memory
from generate.spark import hot_budget

CONTEXTS = (512, 4096, 32768, 131072)


def run(args: argparse.Namespace) -> int:
    cache = cache_of(args)
    checkpoint = open_checkpoint(resolve_model(args.model))
    if is_eagle3(checkpoint):
        _eagle3(checkpoint)
        return 0
    refuse_block(checkpoint)
    name, definition = architecture(checkpoint)
    config = definition.read_config(checkpoint)
    layout = definition.layout(config, checkpoint)
    ops = open_backend(None, checkpoint)
    spec = definition.state_spec(config)
    held, chosen = cached_spec(spec, cache, ops), ""
    if is_auto(cache):
        free, what = ops.free_bytes()
        left = free - predict_weights(checkpoint, layout, ops)
        options = automatic(cache, ops, Blueprint(config, layout, spec), config.context, left)
        held, chosen = packed(spec, options), chosen_by_memory(options, config.context, left, what)
    print(f"{checkpoint.path}\n{name}, {checkpoint.format}")
    _shapes(config)
    _types(checkpoint, ops)
    _tensors(checkpoint, layout)
    _tokenizer(checkpoint)
    if getattr(config, "mask_id", None) is not None:
        _window(checkpoint)
    _memory(checkpoint, layout, held, config.context, ops, chosen)
    _formats(spec, ops)
    _experts(checkpoint, layout, config, ops)
    return 0


def _eagle3(checkpoint: Checkpoint) -> None:
    config, target = config_alone(checkpoint)
    known, listed = target_ids(checkpoint, config, target.vocab), config.taps != default_taps(target.layers)
    print(f"{checkpoint.path}\nEAGLE-3 draft, {checkpoint.format}, for a model of hidden size {target.hidden}")
    print(f"  it knows {target.vocab if known is None else len(known)} of the model's {target.vocab} tokens")
    layers = ", ".join(map(str, config.taps)) if listed else "1, n / 2 - 1 and n - 4 of n"
    print(f"  it reads the outputs of the model's layers {layers}, counted from 0")
    _shapes(config, without="taps")
    _types(checkpoint, None)
    _tensors(checkpoint, eagle3_layout(checkpoint, config, target))


def _shapes(config: Any, without: str = "") -> None:
    print("\nshapes")
    for key, value in asdict(config).items():
        if key == without or value is None or isinstance(getattr(config, key), Ranks):
            continue
        if isinstance(getattr(config, key), Rope):
            rope = getattr(config, key)
            turn = 2 * math.pi / rope.frequencies[-1]
            value = f"{2 * len(rope.frequencies)} channels, the slowest pair turns in {turn:.0f} tokens"
        elif key == "is_attention":
            key, value = "layers", f"{sum(value)} attention and {len(value) - sum(value)} Gated DeltaNet layers"
        elif is_dataclass(getattr(config, key)):
            value = ", ".join(f"{k} {v}" for k, v in value.items())
        print(f"  {key:12} {value:g}" if isinstance(value, float) else f"  {key:12} {value}")


def _types(checkpoint: Checkpoint, ops: Ops | None) -> None:
    sizes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for tensor in checkpoint.tensors.values():
        label = f"{tensor.type} {tensor.bits}-bit g{tensor.group_size}" if tensor.scales else tensor.type
        sizes[label][0] += 1
        sizes[label][1] += tensor.nbytes
    held = {t.type: "" if ops is None else ops.holds(t.type) for t in checkpoint.tensors.values()}
    print("\nblock types by bytes" + ("" if ops is None else f" (as {ops.name} holds matrices of them)"))
    for label, (count, nbytes) in sorted(sizes.items(), key=lambda item: -item[1][1]):
        print(f"  {label:18} {count:5} tensors {_mib(nbytes)}  {held[label.split()[0]]}")


def _tensors(checkpoint: Checkpoint, layout: Layout) -> None:
    found = misfits(checkpoint, layout)
    ignored: dict[str, int] = defaultdict(int)
    for tensor in checkpoint.tensors:
        if tensor not in layout.names() and (why := layout.ignored(tensor)):
            ignored[why] += 1
    print(f"\ntensors: {len(checkpoint.tensors)} in the file, {len(layout.names() & checkpoint.tensors.keys())} used")
    for why, count in ignored.items():
        print(f"  {count} left alone: {why}")
    rows = (("missing", found.missing), ("not understood", found.unused), ("wrong shape", found.misshapen))
    for title, lines in rows:
        for line in lines:
            print(f"  {title}: {line}")


def _tokenizer(checkpoint: Checkpoint) -> None:
    print("\ntokenizer")
    try:
        tokenizer = load_tokenizer(checkpoint.path, checkpoint.config)
    except BimetalError as error:
        print(f"  unusable: {error}")
        return
    ends = ", ".join(f"{tokenizer.decode([id])} {id}" for id in sorted(tokenizer.end_ids))
    print(f"  {tokenizer.vocab_size} tokens; a reply ends at {ends or 'nothing'}")
    print(f"  chat template: {'yes' if tokenizer.chat_template else 'no'}")


def _window(checkpoint: Checkpoint) -> None:
    found = wedlm_calibration.read(checkpoint.path)
    print(f"\nwindow of masks\n  {found or 'not calibrated: the preset balanced (docs/wedlm.md)'}")


def _memory(checkpoint: Checkpoint, layout: Layout, spec: Any, context: int, ops: Ops, chosen: str) -> None:
    weights = sum(t.nbytes for name, t in checkpoint.tensors.items() if name in layout.names())
    print(f"\nmemory: weights {_mib(weights).strip()} as stored; state that {ops.name} allocates for a sequence")
    adds = [state_bytes(spec, n + 1, ops.item_bytes) - state_bytes(spec, n, ops.item_bytes) for n in (1, context)]
    later = f", {adds[1]} later" if adds[1] != adds[0] else ""
    for line in (*filter(None, [chosen]), *described(spec)):
        print(f"  {line}")
    print(f"  a token adds {adds[0]} bytes{later}; buffers grow in larger steps")
    for tokens in sorted({n for n in CONTEXTS if n < context} | {context}):
        held = ops.held_state_bytes(spec, tokens, ops.prefill_rows)
        print(f"  {tokens:8} tokens {_mib(held)} {held / tokens:10.0f} bytes per token")


def _formats(spec: Any, ops: Ops) -> None:
    """Count the bytes per token with keys and values in each format that the backend supports for this model."""
    print("\nKV cache formats: bytes that a token adds, keys and values alike (--cache-type-k, --cache-type-v)")
    for name in (NATIVE, *FORMATS):
        try:
            chosen = packed(spec, CacheOptions(name, name))
            check_pairs(chosen, ops.name, ops.cache_pairs)
        except BimetalError:
            continue
        layers = [s for s in all_specs(chosen) if grows(s)]
        print(f"  {name:10} {sum(s.row_bytes(ops.item_bytes) for s in layers):8} bytes")


def _experts(checkpoint: Checkpoint, layout: Layout, config: Any, ops: Ops) -> None:
    """Describe the memory of a mixture's experts, and the part that --stream-experts keeps in memory."""
    if not expert_matrices(layout):
        return
    try:
        forms = expert_forms(checkpoint, layout)
    except BimetalError as error:
        print(f"\nexperts: {error}")
        return
    count, used = config.experts.count, config.experts.top_k
    token = used * sum(form.nbytes for form in forms.values())
    largest = max(form.nbytes for form in forms.values())
    print(
        f"\nexperts: {count} in each of {len(forms)} layers, {used} per token, at most {largest} bytes each as stored"
    )
    print(f"  a token reads {token} bytes where none is in memory")
    blueprint = Blueprint(config, layout, architecture(checkpoint)[1].state_spec(config))
    if ops.name == "cuda":
        try:
            print(f"  --spark here: {hot_budget(checkpoint, ops, blueprint)}")
        except BimetalError as error:
            print(f"  --spark here: {error}")
        return
    try:
        budget = expert_budget(checkpoint, ops, blueprint)
        print(f"  --stream-experts here: {str(budget).removeprefix('experts: ')}")
    except BimetalError as error:
        print(f"  --stream-experts here: {error}")


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:9.1f} MiB"
