"""A process other than rank 0 in a group of machines."""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from common.checkpoint import open_checkpoint
from common.hub import resolve_model
from common.joined_step import JoinedState, JoinedStep, joined
from common.models import Model
from common.rules import PATH
from common.step import State, Step
from generate.backends import Placement
from generate.loading import load_all, resolve_draft, with_adapters


def follow(args: argparse.Namespace) -> int:
    """Load this rank's part of the model, and run rank 0's orders until it ends; return 0."""
    options = args.load
    limit: Any = options.memory  # the option's rule has made it bytes
    path = resolve_model(PATH.accept("model", args.model), progress=False)
    checkpoint = with_adapters(open_checkpoint(path), options.adapter, False)
    draft = None if options.draft is None else resolve_draft(str(options.draft), checkpoint, False)
    placement = Placement(memory=limit, tokens=options.ctx, tensor_parallel=options.tensor_parallel)
    model: Any = load_all(checkpoint, draft, options, placement, False)
    model.ops.follow([getattr(model, "target", model), model], join)
    return 0


def join(
    model: Model, states: Sequence[State], layer_counts: Sequence[int], parts: Sequence[Step]
) -> tuple[Model, Any, Step]:
    """Return the model, the state and the step that run `parts` of several sequences as one step.

    layer_counts  as in JoinedState
    """
    step = JoinedStep.of(parts, np.concatenate([part.tokens for part in parts]))
    return joined(model), JoinedState(states, layer_counts), step
