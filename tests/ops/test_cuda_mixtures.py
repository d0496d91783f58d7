"""Products with the experts of a mixture, and its shared expert."""

from dataclasses import replace

import numpy as np
import pytest

from common.errors import BimetalError
from common.ops import ExpertWeights
from common.quants import BLOCKS, dequantize
from common.reference import NumpyOps
from common.weights import dense

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_rows import poisoned_ops, random_matrix, rows_on  # noqa: E402

from cuda_backend import expert_products  # noqa: E402
from cuda_backend.layout import UNITS  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ops():
    return poisoned_ops()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("type_", ["Q4_K", "Q8_0"], ids=["one more matrix", "a branch"])
def test_shared_expert(type_, gated, ops):
    """An expert for all rows, stored as the others or not; the norm after it adds all up as one by one, to the bit."""
    stacks = [random_matrix(t, rows, 256, experts=21) for t, rows in (("Q4_K", 512), ("Q6_K", 256), (type_, 512))]
    gate_up, down = (replace(s, shape=(20, *s.shape[1:]), data=s.data[:20]) for s in stacks[:2])
    shared = [replace(s, shape=s.shape[1:], data=s.data[20]) for s in (stacks[2], stacks[1])]
    random = np.random.default_rng(3)
    router, gate, x, z = (random.normal(size=(n, 256)).astype(np.float32) for n in (20, 1, 7, 7))
    stored = [dense("r", router / 16), gate_up, down, *shared, *([dense("g", gate / 16)] if gated else [])]
    scale, bias = ops.vector(dense("n", np.full(256, 0.7))), ops.vector(dense("b", np.zeros(20)))
    after = random_matrix("Q5_0", 40, 256)
    weights, last = [ops.weight(part) for part in stored], ops.weight(after)

    def normed(T: int, one_by_one: bool) -> np.ndarray:
        ops.context.arena.reset()
        y = ops.moe_ffn(rows_on(ops, x[:T]), ExpertWeights(*weights, bias=bias), 9, 2.5)
        total = ops.add(rows_on(ops, z[:T]), y)
        if one_by_one:
            assert np.isfinite(ops.read(total)).all()
        return ops.read(ops.linear(ops.rms_norm(total, scale, 1e-6), last))

    out = normed(7, one_by_one=False)
    assert np.array_equal(out, normed(7, one_by_one=True))
    assert np.array_equal(out[:1], normed(1, one_by_one=False))
    reference = NumpyOps()
    values = [dequantize(part) for part in stored]
    total = z + reference.moe_ffn(x, ExpertWeights(*values, bias=np.zeros(20, np.float32)), 9, 2.5)
    want = reference.rms_norm(total, np.float32(0.7), 1e-6) @ dequantize(after).T
    assert np.abs(out - want).max() <= 5e-2 * np.abs(want).max()


@pytest.mark.parametrize(
    ("type_", "F"), [(t, 512 if BLOCKS[t].elements > 128 else 384) for t in UNITS] + [("Q6_K", 2048)]
)
def test_chosen_for_one_row(type_, F, ops, monkeypatch):
    """A step of one row routes, joins and multiplies in launches of its own, with the bits of more rows."""
    if F > 512:  # more units than a ring holds
        monkeypatch.setattr(expert_products, "parts_of", lambda *_: 1)
    stacks = [random_matrix(type_, rows, columns, experts=21) for rows, columns in ((2 * F, 512), (512, F))]
    experts = [ops.weight(replace(s, shape=(20, *s.shape[1:]), data=s.data[:20])) for s in stacks]
    shared = [ops.weight(replace(s, shape=s.shape[1:], data=s.data[20])) for s in stacks]
    random = np.random.default_rng(3)
    router = ops.weight(dense("r", random.normal(scale=512**-0.5, size=(20, 512))))
    before, norm = ops.weight(random_matrix("Q8_0", 512, 1024)), ops.vector(dense("n", random.normal(size=512)))
    x, z = (random.normal(size=(9, n)).astype(np.float32) for n in (512, 1024))
    for bias, scale in ((None, None), (None, 2.5), (ops.vector(dense("b", random.normal(size=20))), 2.5)):
        outs = []
        for some in (slice(0, 9), slice(0, 1), slice(5, 6)):
            ops.context.arena.reset()
            rows = ops.add(rows_on(ops, x[some]), ops.linear(rows_on(ops, z[some]), before))
            mixture = ExpertWeights(router, *experts, *shared, bias=bias)
            y = ops.moe_ffn(ops.rms_norm(rows, norm, 1e-6), mixture, 3, scale)
            outs.append(ops.read(ops.add(rows, y)))
        assert np.isfinite(outs[0]).all()
        assert np.array_equal(outs[0][[0, 5]], np.concatenate(outs[1:]))


def test_too_many_experts(ops):
    logits = np.zeros((2, 600), np.float32)
    with pytest.raises(BimetalError, match="among 600 experts; the CUDA kernels take at most 512"):
        ops.route_softmax(rows_on(ops, logits), 4)


@pytest.mark.parametrize("type_", ["Q4_K", "Q6_K", "Q8_0"])
def test_quantized_experts(type_, ops):
    """Experts multiply the rows that chose them, whichever rows are in the step."""
    gate_up, down = random_matrix(type_, 512, 256, experts=6), random_matrix(type_, 256, 256, experts=6)
    w, v = ops.weight(gate_up), ops.weight(down)
    x = np.random.default_rng(3).normal(size=(20, 256)).astype(np.float32)
    logits = np.random.default_rng(4).normal(size=(20, 6)).astype(np.float32)
    reference = NumpyOps()
    ids, weights = reference.route_softmax(logits, 2)
    want = reference.moe(x, dequantize(gate_up), dequantize(down), ids, weights)
    outs = []
    for T in (20, 1, 7):
        ops.context.arena.reset()
        chosen = ops.route_softmax(rows_on(ops, logits[:T]), 2)
        outs.append(ops.read(ops.moe(rows_on(ops, x[:T]), w, v, *chosen)))
        assert np.abs(outs[-1] - want[:T]).max() <= 5e-2 * np.abs(want).max()
        assert np.array_equal(outs[-1], outs[0][:T])
