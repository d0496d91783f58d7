"""The likeliest token and the entropy of rows of logits on Metal, against the definition: ties, passes, NaN."""

import mlx.core as mx
import numpy as np
import pytest

from common.errors import NotFiniteError
from common.sampling import argmax_entropy as definition
from mlx_backend.logits import SLICE, best_and_entropy
from mlx_backend.ops import MlxOps

metal = pytest.importorskip("simt.device", exc_type=ImportError)


def rows(vocab: int) -> np.ndarray:
    """Ordinary, peaked, flat, tied, partly hidden and far-off rows."""
    x = np.random.default_rng(vocab).standard_normal((6, vocab)).astype(np.float32)
    x[1, vocab // 2] = 40
    x[2] = 3
    x[3] = np.round(x[3])
    x[4, ::2] = -np.inf
    x[5] = x[5] * 20 - 300
    return x


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("vocab", [3, SLICE, SLICE + 1, 3000])
def test_ids_and_entropies(vocab, dtype):
    """One slice, a slice of one logit, two passes; the excluded token first, last, and the best of a row."""
    x = mx.array(rows(vocab)).astype(dtype)
    exact = np.asarray(x.astype(mx.float32))
    for excluded in (0, vocab - 1, int(exact[0].argmax())):
        with metal.on_metal():
            ids, found = MlxOps(dtype).read_all(*MlxOps(dtype).argmax_entropy(x, excluded))
        want_ids, want = definition(exact, excluded)
        assert ids.dtype == np.int32
        assert np.array_equal(ids, want_ids)
        assert np.abs(found - want).max() < 1e-5
        composed_ids, composed = (np.asarray(out) for out in best_and_entropy(x, excluded))
        assert np.array_equal(composed_ids, want_ids)
        assert np.abs(composed - want).max() < 1e-5


def test_a_row_does_not_depend_on_the_others():
    x = mx.array(rows(1500))
    with metal.on_metal():
        together, alone = best_and_entropy(x, 7), best_and_entropy(x[3:4], 7)
    assert all(mx.array_equal(a[3:4], b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("at", [5, 700])
def test_not_a_number(at):
    """A NaN is refused wherever it stands, in the excluded token's place too; other rows keep their ids."""
    x = mx.array(rows(1200))
    x[1, at] = mx.nan
    with metal.on_metal():
        emulated = MlxOps().argmax_entropy(x, 5)
    for ids, _ in (emulated, MlxOps().argmax_entropy(x, 5)):
        assert np.flatnonzero(np.asarray(ids) == -1).tolist() == [1]
        with pytest.raises(NotFiniteError):
            MlxOps().read(ids)
