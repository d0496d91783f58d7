"""One rank of a shared tiny model: python tests/share.py NAME FOLDER [RANKS [DRAFT]]. Rank 0 leaves logits in FOLDER,
each rank what it read. Without RANKS each rank has layers of its own; with it every layer is shared.

Started on MLX by test_machines.py, which computes the same in one process; on CUDA by test_processes.py, with RANK set,
or without, where this process has all ranks.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import ranks
import tiny

from common import weights
from common.checkpoint import Checkpoint
from common.decode.requests import Draft
from common.joined_step import JoinedStep
from common.models import Model, llama
from common.models.chain import ChainPair
from common.models.drafts import load_pair
from common.models.pair import Pair
from common.row_runner import RowRunner
from common.saving import save_in_parts
from common.step import PAST, Step
from common.tensors import Tensor
from generate.backends import Placement, open_model
from generate.follow import join

CAPACITY = 640
TREE = [PAST, 0, 1, 1, 0, 4, 2, 3]


def logits(model: Model, ids: np.ndarray, joins: bool = False) -> dict[str, np.ndarray]:
    """Run a prompt in two long steps, rows of decoding, a tree, a step back, two states in turn, and in one step.

    joins  whether one step has rows of both; where the backend has pools, they are of one
    """
    pool: Any = model.new_pool(3, CAPACITY, 2 * CAPACITY) if joins else None
    one, other = (model.new_state(CAPACITY) if pool is None else pool.new_state() for _ in range(2))
    found: dict[str, np.ndarray] = {}
    empty = one.snapshot()

    def run(name: str, state, step, path, rows=slice(None)) -> None:
        found[name] = model.ops.read(model.forward(state, step, rows)).copy()
        state.commit(path)

    run("prompt", one, Step.chain(ids[:150], 0), range(150), slice(-1, None))
    run("more", one, Step.chain(ids[150:200], 150), range(50))
    point = one.snapshot()
    run("other", other, Step.chain(ids[40:60], 0), range(20))
    run("tree", one, Step.tree(ids[200:208], TREE, 200), [0, 1, 3])
    for number in range(3 if model.ops.replays else 1):  # as it comes, captured, replayed
        run(f"after {number}", one, Step.chain(ids[208:209], 203 + number), [0])
    one.restore(point)
    run("again", one, Step.chain(ids[200:203], 200), range(3))
    del point
    if model.definition is llama:  # the others have no rows that all see each other
        run("block", one, Step.block(ids[210:214], 203), [])
    run("aside", other, Step.chain(ids[60:61], 20), [0])
    if joins:
        parts = [Step.chain(ids[203:205], 203), Step.chain(ids[61:62], 21)]
        both, state, step = join(model, [one, other], [len(model.sequence_spec)] * 2, parts)
        if pool is not None:
            both, state, step = model, pool, JoinedStep.of(parts, step.tokens, [one.slot, other.slot])
        for number in range(3 if model.ops.replays else 1):
            found[f"together {number}"] = model.ops.read(both.forward(state, step)).copy()
        one.commit([])
        other.commit([0])
        run("after together", other, Step.chain(ids[62:64], 22), [0, 1])
    if pool is not None:  # as a state waits in host memory
        saved = save_in_parts(one), one.length, list(one.long_steps)
        one.restore(empty)
        run("meanwhile", one, Step.chain(ids[:3], 0), [0, 1])
        one.load(*saved)
        del saved
    if isinstance(model, Pair):
        chain = isinstance(model, ChainPair)
        for name, tokens in (("drafted", ids[203:204]), ("drafted on", ids[203:206])):
            proposed = model.propose(one, tokens.tolist()) if chain else model.propose(one, int(tokens[0]))  # type: ignore[attr-defined]
            found[name] = model.ops.read(proposed).copy()
        if joins:
            asked = [(one, Draft(int(ids[203]), 2, 3)), (other, Draft(int(ids[64]), 2, 4))]
            for i, answer in enumerate(RowRunner(model).drafted(asked)):
                assert isinstance(answer, tuple)
                found |= {f"ids together {i}": answer[0], f"drafted together {i}": answer[1]}
        found["target"] = model.ops.read(model.target.forward(one, Step.chain(ids[203:206], 203), slice(-1, None)))
        one.commit(range(3))
        run("beside", one, Step.chain(ids[206:208], 206), range(2), slice(-1, None))
    return found


def checkpoint(name: str) -> Checkpoint:
    """The tiny model called `name`, after "wide" or "grouped" one of ranks.py."""
    kind, _, sized = name.rpartition(" ")
    return {"": tiny.checkpoint, "wide": ranks.wide, "grouped": ranks.grouped}[kind](sized)


def ids(name: str) -> np.ndarray:
    return tiny.golden(name.rpartition(" ")[2])["ids"].astype(np.int32)


def main(name: str, folder: Path, size: int | None = None, draft: str = "") -> None:
    read: dict[str, int] = {}
    own_part = weights.own_part

    def noted(checkpoint: Checkpoint, stored: weights.Stored) -> list[Tensor]:
        tensors = own_part(checkpoint, stored)
        for key, tensor in zip(stored.names, tensors, strict=True):
            read[key] = read.get(key, 0) + tensor.nbytes
        return tensors

    weights.own_part = noted
    given = os.environ.get("MLX_RANK", os.environ.get("RANK"))
    devices = tuple(range(size or 1)) if given is None else ()
    backend = "mlx" if "MLX_RANK" in os.environ else "cuda"
    model: Any = open_model(checkpoint(name), backend, placement=Placement(devices, tensor_parallel=size))
    if draft:
        model = load_pair(Path(draft), model)
    rank = int(given or 0)
    (folder / f"read{rank}.json").write_text(json.dumps(read))
    if rank:
        model.ops.follow([getattr(model, "target", model), model], join)
    else:
        found: dict[str, Any] = logits(model, ids(name), size == 2 or backend == "cuda")
        np.savez(folder / "logits.npz", **found)


if __name__ == "__main__":
    sizes, drafts = map(int, sys.argv[3:4]), sys.argv[4:5]
    main(sys.argv[1], Path(sys.argv[2]), next(sizes, None), next(iter(drafts), ""))
