"""The option --spark: hot experts in a GPU's memory, cold ones in host memory."""

import sys
from dataclasses import dataclass
from typing import Any

from common.checkpoint import Checkpoint
from common.errors import BimetalError, UsageError
from common.expert_profile import open_profile
from common.fit import SPARE, Blueprint, predict_run, predict_stacks, predict_weights
from common.hot_experts import HotExperts, HotSizes, check_hot, hot_sizes
from common.models import architecture, is_defined
from common.ops import Ops
from common.options import LoadOptions
from generate.backends import ONE_GPU, Placement, choose, open_backend
from generate.caches import cached_spec

CONTEXT = 32768  # default tokens of the context beside whose cache experts must fit


@dataclass(frozen=True)
class HotBudget:
    """Division of a GPU's memory, in bytes.

    experts  expert slots, and the buffer through which prefill copies a layer
    fixed    the other weights
    run      states and work
    """

    experts: int
    sizes: HotSizes
    fixed: int
    run: int

    def __str__(self) -> str:
        slots, whole = self.experts - self.sizes.staging, self.sizes.max_budget - self.sizes.staging
        return (
            f"hot experts: {slots / 1e9:.2f} of {whole / 1e9:.2f} GB in VRAM ({slots / whole:.0%}), all of them in "
            f"pinned host memory; prefill {self.sizes.staging / 1e9:.2f} GB, other weights {self.fixed / 1e9:.2f} GB, "
            f"states and work {self.run / 1e9:.2f} GB"
        )


def hot_budget(
    checkpoint: Checkpoint,
    ops: Ops,
    blueprint: Blueprint,
    tokens: int | None = None,
    vram: int | None = None,
    memory: int | None = None,
) -> HotBudget:
    """Divide a GPU's memory between hot experts, other weights, states and work.

    tokens  of the context; None: 32768, or what the model was trained for
    vram    bytes for experts; None: what is left of `memory`
    memory  bytes for everything; None: what is free

    Raises BimetalError for a model without experts, and if too few or all experts fit.
    """
    config, layout, _ = blueprint
    stacks = predict_stacks(checkpoint, layout, ops)
    if not any(stacks):
        raise BimetalError(f"{checkpoint.path} has no experts, so spark has no effect; leave it out")
    sizes = hot_sizes(stacks, config.experts.count)
    fixed = predict_weights(checkpoint, layout, ops) - sum(map(sum, stacks))
    run = sum(predict_run(ops, blueprint, tokens or min(CONTEXT, config.context), ops.prefill_rows))
    free = int((1 - SPARE) * (ops.free_bytes()[0] if memory is None else memory))
    if vram is None and free - fixed - run < sizes.min_budget:
        raise BimetalError(
            f"{free / 1e9:.2f} GB of VRAM leave {max(0, free - fixed - run) / 1e9:.2f} GB for experts, and the "
            f"least is {sizes.min_budget / 1e9:.2f} GB: one layer's {sizes.experts} experts of each size, and as much "
            "for prefill"
        )
    if vram is None and free - fixed - run >= sizes.max_budget:
        raise BimetalError(
            f"all experts, {sizes.max_budget / 1e9:.2f} GB, fit beside everything else, so spark has no effect; "
            "leave it out"
        )
    experts = vram or free - fixed - run
    check_hot(experts, sizes)
    return HotBudget(experts, sizes, fixed, run)


def hot_experts(options: LoadOptions, checkpoint: Checkpoint, placement: Placement = ONE_GPU) -> HotExperts | None:
    """Read and print the budget of --spark; None without it. Call it in the thread that will load the model."""
    if not options.spark:
        return None
    backend = choose(options.backend, checkpoint).name
    if backend != "cuda":
        raise UsageError(f"spark holds hot experts on an NVIDIA GPU, and the backend is {backend}; try stream_experts")
    if options.devices:
        raise UsageError("spark runs on one GPU, the first one; leave devices out")
    if not is_defined(checkpoint):
        raise BimetalError(f"{checkpoint.path}: spark needs an architecture that this package defines")
    definition = architecture(checkpoint)[1]
    config, ops = definition.read_config(checkpoint), open_backend(backend, checkpoint, placement)
    layout, spec = definition.layout(config, checkpoint), cached_spec(definition.state_spec(config), options, ops)
    vram: Any = options.expert_vram  # the option's rule has made it bytes
    budget = hot_budget(checkpoint, ops, Blueprint(config, layout, spec), options.ctx, vram)
    profile = open_profile(options.expert_profile, budget.sizes.sizes, budget.sizes.experts)
    print(budget, file=sys.stderr)
    return HotExperts(budget.experts, config.experts.top_k, profile)
