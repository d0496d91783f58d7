"""Bytes of experts that are held in memory: the one rule that loading, `inspect` and `fit` follow."""

from dataclasses import dataclass, replace

from common.checkpoint import Checkpoint
from common.errors import BimetalError
from common.expert_files import expert_forms
from common.expert_profile import least_bytes
from common.expert_stream import sizes_of
from common.fit import Blueprint, predict_run, predict_weights
from common.ops import Ops

RESERVE = 1_500_000_000  # bytes for the interpreter, its libraries, reading threads and the system's cache
CACHED = 4096  # tokens of a context that is not given


@dataclass(frozen=True)
class ExpertBudget:
    """Bytes that streaming takes.

    experts  bytes for slots
    total    bytes of all experts in slots
    layer_bytes  bytes of one layer's experts of each kind
    fixed    bytes of the other weights
    run      bytes of states and work
    memory   bytes for everything
    """

    experts: int
    total: int
    layer_bytes: int
    fixed: int
    run: int
    memory: int

    def __str__(self) -> str:
        share = self.experts / self.total
        return (
            f"experts: {self.experts / 1e9:.2f} of {self.total / 1e9:.2f} GB in memory ({share:.0%}); other weights "
            f"{self.fixed / 1e9:.2f} GB, states and work {self.run / 1e9:.2f} GB"
        )


def expert_budget(
    checkpoint: Checkpoint,
    ops: Ops,
    blueprint: Blueprint,
    tokens: int | None = None,
    cache: int | None = None,
    memory: int | None = None,
) -> ExpertBudget:
    """Divide memory: as many bytes of experts as `cache` allows, and as `memory` leaves beside everything else.

    tokens  of the context; None: 4096, or what the model was trained for
    cache   None: a quarter of the memory, because the system's cache keeps more experts in what is left
    memory  None: what is free, which does not limit a given `cache`

    Raises BimetalError where less than one layer's experts fit, and for a model without experts.
    """
    config, layout, _ = blueprint
    forms = expert_forms(checkpoint, layout)
    count = config.experts.count
    sizes, kinds = sizes_of(forms, ops, len(layout.layers))
    total, least = count * sum(sizes), least_bytes(sizes, count, kinds)
    stacks = [[replace(t, shape=(count, *t.shape)) for t in part] for form in forms.values() for part in form]
    fixed = predict_weights(checkpoint, layout, ops) - sum(ops.held_expert_bytes(*stack) for stack in stacks)
    run = sum(predict_run(ops, blueprint, tokens or min(CACHED, config.context), ops.prefill_rows))
    whole = ops.free_bytes()[0] if memory is None else memory
    room = whole - fixed - run - RESERVE
    if cache is None:
        experts = min(total, room, max(least, whole // 4))
    else:
        experts = min(total, cache if memory is None else min(cache, room))
    if experts < least and (cache is None or cache >= least):
        raise BimetalError(
            f"{whole / 1e9:.2f} GB of memory leave {max(0, room) / 1e9:.2f} GB for experts, and the least is "
            f"{least / 1e9:.2f} GB, which one layer's {count} experts take; the model needs "
            f"{(whole + least - room) / 1e9:.2f} GB"
        )
    return ExpertBudget(experts, total, least, fixed, run, whole)
