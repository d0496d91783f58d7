"""Models leave arithmetic to `ops`: every model runs over arrays that can be reshaped and sliced, and nothing else."""

import numpy as np
import pytest
import tiny

from common.models import load_model, qwen35
from common.ops import Ops
from common.reference import NumpyOps
from common.step import Step


class Opaque:
    """An array as a model sees it: its shape, reshape and slices. Everything else raises."""

    __slots__ = ("_hidden",)
    __array_ufunc__ = None  # NumPy's operators give up
    __iter__ = None

    def __init__(self, array):
        self._hidden = array

    @property
    def shape(self):
        return self._hidden.shape

    def reshape(self, *shape):
        return Opaque(self._hidden.reshape(*shape))

    def __getitem__(self, index):
        for part in index if isinstance(index, tuple) else (index,):
            assert part is ... or isinstance(part, int | slice), f"a model may slice, not gather: {part!r}"
        return Opaque(self._hidden[index])

    def __array__(self, *args, **kwargs):
        raise TypeError("a model may not turn an array into a NumPy array")


class OpaqueWeight:
    """A weight handle, which models only pass on."""

    __slots__ = ("_hidden",)
    __array_ufunc__ = None

    def __init__(self, weight):
        self._hidden = weight


def shown(x):
    if isinstance(x, tuple) and hasattr(x, "_fields"):  # weights that belong together
        return type(x)(*map(shown, x))
    return x._hidden if isinstance(x, Opaque | OpaqueWeight) else x


def hidden(x):
    if isinstance(x, tuple):
        return tuple(map(hidden, x))
    return Opaque(x) if isinstance(x, np.ndarray) else x


def wrapped(name):
    """An op of NumpyOps over opaque arrays and weight handles."""
    op, wrap = getattr(NumpyOps, name), OpaqueWeight if name in ("weight", "vector") else hidden

    def call(self, *args, **kwargs):
        return wrap(op(OPEN, *map(shown, args), **{key: shown(x) for key, x in kwargs.items()}))

    return call


OPEN = NumpyOps()  # ops that call ops do so on plain arrays
OpaqueOps = type("OpaqueOps", (NumpyOps,), {name: wrapped(name) for name in (*Ops.__abstractmethods__, "write_kv")})


def run(name, ops):
    model = load_model(tiny.checkpoint(name), ops)
    state, ids = model.new_state(64), tiny.golden(name)["ids"].astype(np.int32)
    outputs = [model.forward(state, Step.chain(ids[:9], 0), slice(-1, None))]
    state.commit(range(9))
    outputs.append(model.forward(state, Step.tree(ids[9:13], [-1, 0, 0, 1], 9)))
    state.commit([0, 1])
    outputs.append(model.forward(state, Step.chain(ids[13:14], 11)))
    return outputs


@pytest.mark.parametrize("name", tiny.MODELS)
def test_models_compute_through_ops_only(name):
    outputs = run(name, OpaqueOps())
    assert all(type(output) is Opaque for output in outputs)
    for output, plain in zip(outputs, run(name, OPEN), strict=True):
        np.testing.assert_array_equal(shown(output), plain)


MISTAKES = {
    "operator": lambda ops, c, w, x: x + x,
    "operator with a number": lambda ops, c, w, x: 2 * x,
    "NumPy function": lambda ops, c, w, x: np.exp(x),
    "NumPy reduction": lambda ops, c, w, x: np.sum(x),
    "method": lambda ops, c, w, x: x.sum(),
    "dtype": lambda ops, c, w, x: x.astype(np.float16),
    "reading a value": lambda ops, c, w, x: float(x[0, 0]),
    "comparing": lambda ops, c, w, x: x > 0,
    "iterating": lambda ops, c, w, x: list(x),
    "gathering": lambda ops, c, w, x: x[np.array([0])],
    "writing": lambda ops, c, w, x: x.__setitem__(0, 0),
    "weight as an array": lambda ops, c, w, x: ops.linear(x, w.down.T),
    "sum of weights": lambda ops, c, w, x: w.down + w.down,
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_arithmetic_in_a_model_is_caught(mistake, monkeypatch):
    monkeypatch.setattr(qwen35, "dense_ffn", mistake)
    with pytest.raises((TypeError, AttributeError, AssertionError)):
        run("qwen35", OpaqueOps())
