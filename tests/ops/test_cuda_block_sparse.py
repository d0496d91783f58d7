"""Attention that leaves out blocks of keys on a GPU, against its definition."""

import json
import random

import numpy as np
import pytest
from tiny_chat import write

import generate
from common import block_sparse
from common.step import Step
from common.storage import KVSpec

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cases import array  # noqa: E402

from cuda_backend import block_sparse as sparse_attention  # noqa: E402
from cuda_backend.ops import CudaOps  # noqa: E402

pytestmark = pytest.mark.gpu
H, K, BLOCK = 6, 2, block_sparse.BLOCK


@pytest.fixture(scope="module")
def ops():
    return CudaOps()


def sparse(ops, rows, steps, D, slots=1):
    """Attention of all rows, which one sequence reads in `steps`, a number of rows each."""
    q, k, v = rows
    pool = ops.new_pool([{"kv": KVSpec(K, D, D)}], slots, len(q) + 200)
    state, out, at = [pool.new_state() for _ in range(slots)][-1], [], 0
    for count in steps:
        ops.context.arena.reset()
        part = [array(ops, x[at : at + count]) for x in (q, k, v)]
        step = Step.chain(np.zeros(count, np.int32), at, state.slot)
        out.append(np.array(ops.read(ops.block_sparse_attention(*part, state[0].kv, step, D**-0.5))))
        state.commit(range(count))
        at += count
    return np.concatenate(out)


def texts(n, D, seed=3):
    """Rows that float16 holds; blocks differ in their keys, so that the choice of blocks is clear."""
    draws = np.random.default_rng(seed)
    q, k, v = (draws.normal(size=(n, heads, D)) for heads in (H, K, K))
    loud = draws.normal(size=(-(-n // BLOCK), K, D)) * 0.6
    k += np.repeat(loud, BLOCK, axis=0)[:n]
    q[:, :3] += loud[1, 0] * 1.5
    return [x.astype(np.float16).astype(np.float32) for x in (q, k, v)]


def expected(rows, steps, D):
    q, k, v = rows
    ends = np.cumsum(steps)
    return np.concatenate(
        [block_sparse.attend(q[end - n : end], k[:end], v[:end], D**-0.5) for n, end in zip(steps, ends, strict=True)]
    )


def all_keys(rows, first, D):
    """Attention of the rows from `first` on to all keys before them."""
    q, k, v = rows
    grouped = q[first:].reshape(len(q) - first, K, H // K, D) * D**-0.5
    scores = np.einsum("tkgd,nkd->tkgn", grouped, k)
    scores[
        np.broadcast_to((np.arange(len(q)) > np.arange(first, len(q))[:, None])[:, None, None], scores.shape)
    ] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("tkgn,nkd->tkgd", weights, v).reshape(-1, H, D)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(("D", "steps"), [(64, [3840]), (16, [1024, 1024, 1900]), (128, [2048, 1800])], ids=str)
def test_blocks_are_left_out(D, steps, slots, ops):
    rows = texts(sum(steps), D)
    found = sparse(ops, rows, steps, D, slots)
    assert np.abs(found - expected(rows, steps, D)).max() < 4e-3
    assert np.abs(found[-BLOCK:] - all_keys(rows, sum(steps) - BLOCK, D)).max() > 0.05


@pytest.mark.parametrize("steps", [[40, 3000, 600], [3500, 136]], ids=str)
def test_steps_that_see_all_keys(steps, ops):
    """Those of few rows, and those that begin within a block."""
    rows = texts(sum(steps), 64)
    found = sparse(ops, rows, steps, 64)[-steps[-1] :]
    assert np.abs(found - all_keys(rows, sum(steps[:-1]), 64)).max() < 4e-3


def test_scores_of_a_long_text_are_those_of_numpy(tmp_path, monkeypatch):
    folder, seen, attend = write(tmp_path / "drafter"), [], sparse_attention.attend_long
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    tokens = [random.Random(4).randrange(2, 258) for _ in range(1700)]
    monkeypatch.setattr(sparse_attention, "attend_long", lambda *a, **o: seen.append(o["sight"]) or attend(*a, **o))
    scores = []
    for backend in ("numpy", "cuda"):
        with generate.load(folder, backend=backend, parallel=1) as llm:
            scores.append(llm.attention_to(tokens, 8))
    assert np.allclose(*scores, atol=1e-4)
    assert len(seen) == 4  # two layers, in steps of 1,024 and 420 tokens
