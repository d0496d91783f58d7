"""A whole model through its Metal kernels: a prompt, decoding, a tree, and tokens chosen from the logits."""

import numpy as np
import pytest
import tiny

from common.sampling import top_k
from common.step import Step
from mlx_backend.ops import MlxOps

metal = pytest.importorskip("simt.device", exc_type=ImportError)


def test_qwen35():
    ids, ops = tiny.golden("qwen35")["ids"], MlxOps()
    model = tiny.load("qwen35", ops)
    with metal.on_metal():
        state = model.new_state(tiny.CAPACITY)
        logits = [tiny.run(model, state, ids[:20], (16, 1, 2))]
        rows = [ids[20], ids[3], ids[21], ids[4], ids[22]]  # the text, and two tokens beside it
        out = model.forward(state, Step.tree(np.array(rows, np.int32), [-1, 0, 0, 1, 2], state.length))
        best, logs = (ops.read(x) for x in ops.top_k(out, 5))
        state.commit([0, 2, 4])
        logits += [ops.read(out)[[0, 2, 4]], tiny.run(model, state, ids[23:25], (1,))]
    error = tiny.golden_errors(np.concatenate(logits), "qwen35")
    assert error.logit < 1e-4
    assert error.top1 == 1
    want_best, want_logs = top_k(ops.read(out), 5)
    assert np.array_equal(best, want_best)
    assert np.abs(logs - want_logs).max() < 4e-6
