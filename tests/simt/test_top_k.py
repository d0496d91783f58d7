"""The best tokens of rows of logits on Metal, against the definition: ids, ties, sums, NaN."""

from contextlib import nullcontext
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from common.errors import NotFiniteError
from common.sampling import NOT_A_TOKEN, Sampler, Samplers, Sampling
from common.sampling import top_k as definition
from mlx_backend.logits import best_of_rows
from mlx_backend.ops import MlxOps

metal = pytest.importorskip("simt.device", exc_type=ImportError)


def logits(T: int, vocab: int, dtype: mx.Dtype) -> mx.array:
    x = np.random.default_rng(vocab).standard_normal((T, vocab)).astype(np.float32) * 3
    return mx.array(x).astype(dtype)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(
    ("T", "vocab", "k"), [(1, 5, 1), (2, 3, 8), (3, 512, 4), (2, 513, 4), (3, 3000, 1), (2, 3000, 40)]
)
def test_ids_and_log_probabilities(T, vocab, k, dtype):
    """One slice, a slice of one logit, several passes; half types have many equal logits."""
    x = logits(T, vocab, dtype)
    with metal.on_metal():
        ids, logs = (MlxOps(dtype).read(out) for out in MlxOps(dtype).top_k(x, k))
    want_ids, want_logs = definition(np.asarray(x.astype(mx.float32)), k)
    assert ids.dtype == np.int32
    assert np.array_equal(ids, want_ids)
    assert np.abs(logs - want_logs).max() < 4e-6


def test_equal_and_hidden_logits():
    """Ties across lanes and slices go to the smaller id; -inf is an ordinary logit."""
    x = np.full((2, 1400), -np.inf, np.float32)
    x[0, [1399, 700, 40, 33, 8]] = 1.5
    x[1, [3, 600]] = [0, 2]
    with metal.on_metal():
        ids, logs = (np.asarray(out) for out in best_of_rows(mx.array(x), 5)[:2])
    assert ids.tolist() == [[8, 33, 40, 700, 1399], [600, 3, 0, 1, 2]]
    assert np.allclose(logs[0], np.log(0.2))
    assert np.allclose(logs[1, :2], [np.log(1 / (1 + np.exp(-2))), np.log(1 / (1 + np.exp(2)))])
    assert np.isneginf(logs[1, 2:]).all()


def test_not_a_number():
    x = mx.array(np.where(np.arange(1200) == 700, np.nan, 1).astype(np.float32))[None]
    with metal.on_metal():
        ids, _ = MlxOps().top_k(x, 3)
        greedy = MlxOps().sample(x, Sampler(Sampling()))
        for tokens in (ids, greedy):
            with pytest.raises(NotFiniteError):
                MlxOps().read(tokens)


def test_greedy():
    x = logits(3, 1100, mx.bfloat16)
    with metal.on_metal():
        tokens = MlxOps(mx.bfloat16).sample(x, Sampler(Sampling()))
    assert np.array_equal(tokens, mx.argmax(x, axis=-1))
    assert tokens.dtype == mx.int32


def test_more_than_the_kernel_takes():
    x = logits(1, 600, mx.float32)
    with metal.on_metal():
        ids, _, _ = best_of_rows(x, 200)
    assert np.array_equal(np.asarray(ids), definition(np.asarray(x), 200)[0])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=0.7, top_k=40, top_p=0.9),
        Sampling(temperature=3.0, top_k=64, min_p=0.05),
    ],
)
def test_drawing_among_the_best(sampling, dtype, monkeypatch):
    """Sampling by the logits of top-k tokens alone gives the token of the definition; bfloat16 has ties there."""
    x, ops, sizes = logits(3, 1100, dtype), MlxOps(dtype), []
    pick = Sampler.pick
    for seed in range(5):
        ours, definition = (Sampler(replace(sampling, seed=seed)) for _ in range(2))
        with metal.on_metal(), monkeypatch.context() as patch:
            patch.setattr(Sampler, "pick", lambda self, row: (sizes.append(len(row)), pick(self, row))[1])
            tokens = ops.sample(x, ours)
        assert tokens.tolist() == [definition.pick(row) for row in np.asarray(x.astype(mx.float32))]
    assert max(sizes) <= sampling.top_k
    with metal.on_metal(), pytest.raises(NotFiniteError):
        ops.read(ops.sample(mx.where(mx.arange(1100) == 700, mx.nan, x), Sampler(sampling)))


EACH = [
    Sampling(),
    Sampling(temperature=0.7, top_k=40, top_p=0.9, seed=1),
    Sampling(temperature=1.0, top_k=3, seed=2),
    Sampling(temperature=1.3, top_p=0.8, seed=3),
    Sampling(temperature=2.0, min_p=0.05, seed=4),
]


@pytest.mark.parametrize("metal_too", [True, False])
def test_samplers_of_several_sequences_in_one_call(metal_too):
    """Rows with few best tokens beside rows that need every logit: each has the token of its own sampler."""
    x, ops = logits(9, 1100, mx.float32), MlxOps()
    x = mx.where((mx.arange(9)[:, None] == 4) & (mx.arange(1100) == 7), mx.nan, x)
    samplers = Samplers([(Sampler(each), rows) for each, rows in zip(EACH, (1, 3, 2, 2, 1), strict=True)])
    with metal.on_metal() if metal_too else nullcontext():
        tokens = ops.sample(x, samplers)
    definition = Samplers([(Sampler(each), rows) for each, rows in zip(EACH, (1, 3, 2, 2, 1), strict=True)])
    assert tokens.tolist() == definition.pick(np.asarray(x)).tolist()
    assert tokens.tolist()[4] == NOT_A_TOKEN
    with pytest.raises(NotFiniteError):
        ops.read(tokens)
