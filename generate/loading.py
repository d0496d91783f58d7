"""Load a model and its draft, and divide the remaining memory among context and replies."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common.adapters import open_adapter
from common.checkpoint import Checkpoint, open_checkpoint
from common.demo import block_beside, demo_path
from common.errors import UsageError, shown
from common.fit import LEAST_CONTEXT, context_that_fits, rows_that_fit, shared_that_fits, what_fits
from common.hub import resolve_adapter, resolve_model
from common.models import Model
from common.models.drafts import check_file, load_pair
from common.models.window import bounded
from common.options import LoadOptions
from common.schedule import SHARED_PREFILL_ROWS
from generate.backends import Placement, open_model, with_rope
from generate.caches import named, with_cache
from generate.expert_streaming import opener
from generate.machines import is_in_group
from generate.prefixes import digest
from generate.spark import hot_experts

PARALLEL = 8  # replies at the same time, if a step may have rows of several
RESERVED = 4  # if each of them reserves memory


def resolve_draft(name: str, target: Checkpoint, progress: bool) -> Path:
    """Return the local path of a draft, after a check that its files fit `target`.

    Runs before weights are loaded, so that a download or a check that fails wastes no time.

    name  "demo", "mtp" for a block of the target's own files, or as `resolve_model` takes it
    """
    if name == "mtp":
        path = block_beside(target.path) or target.path
    else:
        path = demo_path("draft") if name == "demo" else resolve_model(name, progress=progress)
    check_file(path, target)
    return path


def with_adapters(checkpoint: Checkpoint, names: str | Sequence[str], progress: bool) -> Checkpoint:
    """Return the checkpoint with adapters, named as LoadOptions.adapter; raises BimetalError."""
    listed = [names] if isinstance(names, str) else names
    found = [_named_and_scaled(text) for text in listed]
    return replace(checkpoint, adapters=[open_adapter(resolve_adapter(name, progress), x) for name, x in found])


def _named_and_scaled(text: str) -> tuple[str, float]:
    """Return (name, scale) of "NAME=X" or "NAME"; raises UsageError."""
    name, equals, number = text.rpartition("=")
    if not equals:
        return text, 1.0
    try:
        scale = float(number)
    except ValueError:
        return text, 1.0  # a name that contains the sign
    if not name or not math.isfinite(scale):
        raise UsageError(f"adapter is {shown(text)}; it must be NAME, or NAME=X with a finite number X")
    return name, scale


def load_all(
    checkpoint: Checkpoint, draft: Path | None, options: LoadOptions, placement: Placement, progress: bool
) -> Model:
    """Load the model of `checkpoint`, with experts and cache by `options`, and the draft beside it."""
    if is_in_group(placement):
        drafts = None if draft is None else digest(open_checkpoint(draft))
        alike = {"the digest of the draft": drafts, "the format of the KV cache": named(options) or "the default"}
        placement = replace(placement, alike=alike)
    experts = opener(options) or hot_experts(options, checkpoint, placement)
    model = open_model(checkpoint, options.backend, progress, placement, experts)
    model = with_rope(model, options.ctx or model.config.context)
    model = with_cache(model, options, options.ctx or model.config.context)
    if options.max_kv_size is not None:
        model = bounded(model, options.max_kv_size)
    return model if draft is None else load_pair(draft, model, progress)


@dataclass(frozen=True)
class Room:
    """Memory for replies.

    context   most tokens of one reply and its prompt
    parallel  replies at the same time
    tokens    of all replies together, where they share a pool; None: `parallel` contexts
    """

    context: int
    parallel: int
    tokens: int | None


def make_room(model: Model, options: LoadOptions) -> Room:
    """Divide the memory beside a loaded model, and choose the rows of its prefill steps; prints a shortened context."""
    ops, trained = model.ops, model.config.context
    parallel = options.parallel or _usual_parallel(model, options)
    context = options.ctx or trained
    pooled = parallel if ops.joins else 1
    if pooled > 1:
        ops.prefill_rows = min(ops.prefill_rows, SHARED_PREFILL_ROWS)
    if ops.reserves and not ops.expert_vram:  # whose budget was computed for the preferred rows
        ops.prefill_rows = rows_that_fit(ops, model.blueprint, context, pooled)
    if not options.ctx and options.max_kv_size is None and ops.reserves:
        context = context_that_fits(ops, model.blueprint, pooled)
        if context < trained:
            kept = f"{context} of {trained} tokens"
            print(f"the context is {kept}: no more fit into the {ops.free_bytes()[1]}", file=sys.stderr)
    tokens = None
    if ops.reserves and pooled > 1 and options.parallel:
        tokens = shared_that_fits(ops, model.blueprint, context, pooled)
    elif ops.reserves and pooled > 1:
        tokens = context
    return Room(context, parallel, tokens)


def _usual_parallel(model: Model, options: LoadOptions) -> int:
    """Choose the default number of replies at the same time: one, if several would leave too little memory."""
    ops = model.ops
    if not ops.reserves or not ops.joins:
        return PARALLEL if ops.joins else 1
    if options.max_kv_size is not None or ops.expert_vram:
        return 1
    tokens = options.ctx or min(LEAST_CONTEXT, model.config.context)
    fits = what_fits(ops, model.blueprint, RESERVED)
    return RESERVED if fits(tokens, ops.prefill_rows) else 1
