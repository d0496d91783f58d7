"""Replies that come, are cancelled and continue kept states on the GPU: each has the bits of running alone."""

import numpy as np
import pytest
from test_engine import CONTEXT, DRAFTED, PLAIN, Ids, begun_alike, check_arrivals, models, without_clock

from common import sequence
from common.engine import Engine
from common.prefix_cache import PrefixCache
from common.prefix_disk import PrefixDisk
from common.step import Step

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_backend.ops import CudaOps  # noqa: E402

pytestmark = pytest.mark.gpu
WAYS = [{"spec": "tree", "tree_budget": 7}, PLAIN[1], {"spec": "chain", "tree_budget": 4}, *DRAFTED[2:4], PLAIN[3]]


def same_logits(pair, *saved):
    """Compare the logits after two states; their arrays also have rows of the draft, which not every step writes."""
    logits = []
    for arrays in saved:
        state, length = pair.new_state(CONTEXT), arrays["rows.0"].shape[1]
        state.load(arrays, length)
        logits.append(pair.ops.read(pair.forward(state, Step.chain(np.array([7], np.int32), length))))
    return np.array_equal(*logits)


@pytest.mark.parametrize(("seed", "count"), [(0, 3), (1, 6), (2, 12)])
@pytest.mark.parametrize("name", ["qwen3", "qwen35", "laguna", "glm"])
def test_hits_trees_cancellations_and_preemptions_at_once(name, seed, count, tmp_path, monkeypatch):
    """Prompts that begin with one of two long steps, random arrivals and few pages; then as many after a restart, which
    has these beginnings on disk.
    """
    monkeypatch.setattr(sequence, "RESERVED", 6)  # more of a reply needs pages that others may hold by then
    ops, random = CudaOps(), np.random.default_rng(seed)
    ops.prefill_rows = 160
    pair, _ = models("draft", name, ops, tmp_path)
    asked, cached, preemptions, lines = begun_alike(name, 240, 2 * count, (10, 18), WAYS, random), [], 0, []
    how = {"cancels": {1: 5}, "chance": 0.8, "same": same_logits, "shared": 240}
    for calls in (asked[:count], asked[count:]):
        store = PrefixCache(b"a test", 10**9, PrefixDisk(tmp_path / "kept", 10**9, "a" * 32, lines.append))
        engine = without_clock(Engine(pair, Ids(), CONTEXT, parallel=3, prefixes=store, tokens=0))
        cached += [reply.sequence.cached for reply in check_arrivals(engine, pair, calls, random, **how)]
        preemptions += engine.preemptions
        store.close()
    assert cached[count:] == [240] * count
    assert preemptions
    assert lines == []
