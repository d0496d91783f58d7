"""`python -m generate plan MODEL --cluster FILE`: predicted speed of the ways to divide a model."""

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path

from common.checkpoint import Checkpoint, open_checkpoint
from common.errors import BimetalError, UsageError
from common.hub import resolve_model
from common.machines_plan import Work, read_hosts, ways
from common.models import architecture, rank_config
from common.shards import ONE, Ranks
from common.storage import state_bytes
from common.weights import ExpertMatrix, Matrix, account

CONTEXT, PROMPT = 4096, 512
ITEM_BYTES = 2  # of a state's number


def run(args: argparse.Namespace) -> int:
    given = [name for name in ("expert_cache", "expert_profile", "trace", "skew") if getattr(args, name) is not None]
    if other := next(iter(given), None):
        raise UsageError(f"--{other.replace('_', '-')} goes with --machine, not with --cluster")
    hosts, link = read_hosts(Path(args.cluster))
    prompt = PROMPT if args.prompt_tokens is None else args.prompt_tokens
    checkpoint = open_checkpoint(resolve_model(args.model))
    work = work_of(checkpoint)
    found = ways(hosts, link, work, _part_of(checkpoint, Ranks(0, len(hosts), divides_head=link.gpus)), prompt)
    if args.json:
        rows = [asdict(way) | {"tokens_per_second": 1 / way.token} for way in found]
        print(json.dumps({"work": asdict(work), "ways": rows}))
        return 0
    total, read = sum(work.held) / 1e9, (work.read + work.experts) / 1e9
    print(f"{args.model}: {total:.3g} GB with a context of {CONTEXT} tokens, {read:.3g} GB read per token")
    print(f"{'':>26} {'tok/s of one reply':>19} {'of all':>8} {'first token':>12}  of {prompt} tokens")
    for way in found:
        note = "" if way.built else "  (not in this version)"
        print(f"{way.name:>26} {1 / way.token:19.2f} {way.all:8.2f} {way.first:10.2f} s{note}")
    if built := [way for way in found if way.built]:
        many = max(built, key=lambda way: way.all)
        print(f"for one reply: {built[0].name}; for several: {many.name}")
    return 0


def _part_of(checkpoint: Checkpoint, ranks: Ranks) -> Work | None:
    """Return the work of each of `ranks`, which share every layer; None if they cannot share them equally."""
    try:
        return work_of(checkpoint, ranks)
    except BimetalError:
        return None


def work_of(checkpoint: Checkpoint, ranks: Ranks = ONE) -> Work:
    """Return the work of the model, or of one of ranks that share every layer, from its headers.

    Raises BimetalError for an architecture that is not ours, and where `ranks` cannot share heads or channels equally.
    """
    definition = architecture(checkpoint)[1]
    config = rank_config(definition, checkpoint, ranks)
    layout = definition.layout(config, checkpoint)
    account(checkpoint, layout)
    spec = definition.state_spec(config)
    tokens = min(CONTEXT, config.context)
    held = [state_bytes([layer], tokens, ITEM_BYTES) for layer in spec]
    read = experts = flops = 0.0
    mixture = getattr(config, "experts", None)
    seen: set[str] = set()
    for at, table in enumerate((layout.top, *layout.layers)):
        for name, entry in table.items():
            if entry is None:
                continue
            names = [(each, part.shard) for part in entry.parts for each in part.names]
            shards = {each: shard for each, shard in names if each not in seen or name == "head"}
            seen |= shards.keys()  # one tensor may hold two weights; ranks hold rows of a tied head a second time
            size = sum(
                checkpoint.tensors[each].nbytes // (shard.parts if shard else 1) for each, shard in shards.items()
            )
            held[max(at - 1, 0)] += size
            if name == "embed" and layout.top["head"] is not None:
                continue
            numbers = sum(math.prod(part.shape) for part in entry.parts) if isinstance(entry, Matrix) else 0
            if isinstance(entry, ExpertMatrix):
                if mixture is None:
                    raise BimetalError(f"{checkpoint.path} has experts that its configuration does not describe")
                experts += size * mixture.top_k / mixture.count
                flops += 2 * numbers * mixture.top_k / mixture.count
            else:
                read += size
                flops += 2 * numbers
    logits = 4 * config.vocab if ranks.head_rows(config.vocab) < config.vocab else 0
    return Work(held, config.hidden, read, experts, mixture.top_k if mixture else 0, flops, logits)
