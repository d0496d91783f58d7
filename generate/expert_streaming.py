"""The option --stream-experts: experts that are read while a model runs."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.checkpoint import Checkpoint
from common.expert_budget import expert_budget
from common.expert_files import ExpertSource, checkpoint_source
from common.expert_pack import pack_source
from common.expert_profile import Profile, open_profile, write_profile
from common.expert_stream import ExpertStream, open_stream
from common.experts import ExpertSupply
from common.fit import Blueprint
from common.models import OpenExperts, architecture
from common.ops import Ops
from common.options import ExpertChoice, LoadOptions
from common.weights import Layout
from generate.caches import cached_spec


def opener(options: LoadOptions) -> Callable[[Ops], OpenExperts] | None:
    """Make the `open_experts` of load_model from ops; None without --stream-experts."""
    if not options.stream_experts:
        return None
    return lambda ops: lambda checkpoint, layout, config: _open(checkpoint, layout, config, ops, options)


def _open(checkpoint: Checkpoint, layout: Layout, config: Any, ops: Ops, options: LoadOptions) -> ExpertStream:
    spec = cached_spec(architecture(checkpoint)[1].state_spec(config), options, ops)
    asked = {"cache": options.expert_cache, "memory": options.memory}
    budget = expert_budget(checkpoint, ops, Blueprint(config, layout, spec), options.ctx, **asked)  # type: ignore[arg-type]
    source = expert_source(checkpoint, layout, options)
    layers, used = len(layout.layers), config.experts.top_k
    sizes = [int(layer in source.forms) for layer in range(layers)]
    profile = open_profile(options.expert_profile, sizes, source.experts)
    stream = open_stream(source, ops, layers, used, budget.experts, profile)
    bypassed = source.bypass_cache(budget.memory)
    print(f"{budget}{'; reads bypass the cache of the system' if bypassed else ''}", file=sys.stderr)
    return stream


def expert_source(checkpoint: Checkpoint, layout: Layout, options: ExpertChoice) -> ExpertSource:
    """Open the experts in the file of --expert-pack, or in the checkpoint's own files."""
    if options.expert_pack is None:
        return checkpoint_source(checkpoint, layout)
    return pack_source(Path(options.expert_pack), checkpoint, layout)


def save_profile(options: ExpertChoice, stream: ExpertSupply) -> None:
    """Add how often each expert was used to the counts in the file of --expert-profile, if it is named."""
    if options.expert_profile is not None:
        residency = stream.residency
        before = open_profile(options.expert_profile, residency.sizes, residency.experts)
        used = residency.profile
        counts = used.counts if before is None else used.counts + before.counts
        write_profile(Path(options.expert_profile), Profile(counts, used.used))
