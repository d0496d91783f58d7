"""gpt-oss's published experts on a GPU: held as MXFP4, in the numbers that NumPy gives with int8 activations."""

import numpy as np
import pytest
import tiny
from test_gpt_oss import published  # noqa: F401

from common.models import load_model
from common.step import Step

pytest.importorskip("cupy", reason="CuPy is not installed")

from test_cuda_models import Int8Numpy
from test_synthetic import small  # noqa: F401

from cuda_backend.ops import CudaOps
from cuda_backend.random_weights import RandomOps
from generate.synthetic import synthetic

pytestmark = pytest.mark.gpu


def test_published_experts(published):  # noqa: F811
    ops, ids = CudaOps(), tiny.golden("gptoss")["ids"][:200]
    model = load_model(published[0], ops)
    for layer in model.weights.layers:
        assert {s.type for w in (layer.experts_gate_up, layer.experts_down) for s in w.segments} == {"MXFP4"}
    want = tiny.logits_of(load_model(published[0], Int8Numpy()), ids[:32])
    logits = tiny.logits_of(model, ids[:32], [1, 7, 24])
    rows = [tiny.errors(row[None], expected[None]).kl for row, expected in zip(logits, want, strict=True)]
    print(tiny.errors(logits, want), np.median(rows))
    assert np.median(rows) < 3e-3
    assert tiny.errors(logits, want).top1 > 0.9
    assert np.array_equal(tiny.logits_of(model, ids[:32], [1] * 32), logits)
    whole = tiny.logits_of(model, ids)  # a long step multiplies weights in float16
    assert np.median([tiny.errors(a[None], b[None]).kl for a, b in zip(whole, logits, strict=False)]) < 3e-3


def test_random_experts(small):  # noqa: F811
    """Of a benchmark: blocks whose scales are finite."""
    model = synthetic("gpt-oss-20b:mxfp4", RandomOps())
    logits = model.ops.read(model.forward(model.new_state(16), Step.chain(np.arange(5, dtype=np.int32), 0)))
    assert np.isfinite(logits).all()
    assert logits.std() > 0
