"""kv_encode, kv_attention and kv_merge against the definition: bytes of every format, attention of steps and trees."""

from typing import Any

import numpy as np
import pytest

from common.hadamard import group_of, rotate
from common.kv_cache import CacheOptions, packed
from common.kv_formats import FORMATS
from common.reference import NumpyOps
from common.step import PAST, Step
from common.storage import KVSpec, Plane
from common.weights import dense

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
metal = pytest.importorskip("simt.device", exc_type=ImportError)
from mlx_backend import kv_kernels  # noqa: E402
from mlx_backend.ops import MlxOps  # noqa: E402

CODED = [name for name in kv_kernels.NUMBERS if name not in ("native", "f16", "bf16")]


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("shape", [(1, 1, 1, 32), (1, 1, 3, 64), (1, 2, 2, 128), (1, 1, 2, 256)])
@pytest.mark.few(6)
def test_bytes_are_the_definitions(name, shape):
    """Every format, rotated and not, with zeros, ties, NaN and values that float16 does not hold."""
    x = numbers(*shape)
    zero = 7 if name.endswith("_1") else 0  # which zero is the least of +0 and -0 is no matter of the formats
    x[0, 0, 0] = {32: zero, 64: 1e5, 128: -2, 256: 3}[shape[-1]]
    x[0, 0, -1, 5] = np.nan if shape[-1] == 64 else 0 - x[0, 0, -1].max()
    for rotated in (False, True):
        plane = Plane(shape[1], shape[3], name, rotated)
        with metal.on_metal():
            assert kv_kernels.encodes(plane)
            ours = np.array(kv_kernels.encode([mx.array(x)], [plane])[0])
        with np.errstate(invalid="ignore"):
            expected = FORMATS[name].encode(rotate(x) if rotated else x)
        values = [FORMATS[name].decode(rows, shape[3]) for rows in (ours, expected)]
        np.testing.assert_array_equal(*values)  # NaN equals NaN; codes of a NaN vector are free
        finite = np.isfinite(values[1]).all(axis=-1)
        assert np.array_equal(ours[finite], expected[finite])


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_equalised_keys(dtype):
    x = mx.array(numbers(1, 2, 3, 128)).astype(dtype)
    mean, scale = mx.array(numbers(1, 2, 1, 128)), mx.abs(mx.array(numbers(1, 2, 1, 128, seed=1))) + 0.5
    plane = Plane(2, 128, "lm4", True)
    with metal.on_metal():
        ours = np.array(kv_kernels.encode([x], [plane], mean, scale)[0])
    equal = (np.array(x.astype(mx.float32)) - np.array(mean)) / np.array(scale)
    assert np.array_equal(ours, FORMATS["lm4"].encode(rotate(equal)))


@pytest.mark.parametrize(("pair", "widths"), [(("lm4", "q4_0"), (128, 128)), (("q8_0", "tq3_0"), (64, 256))])
def test_one_launch_writes_keys_and_values(pair, widths, monkeypatch):
    """It reads each number once and writes each byte of the codes once; one SIMD group for each group of numbers."""
    planes = [Plane(2, dim, name, name != "q8_0") for name, dim in zip(pair, widths, strict=True)]
    rows = [numbers(1, 2, 3, dim) for dim in widths]
    launches, make = [], kv_kernels.make_kernel

    def counted(name, **names):
        kernel = make(name, **names)

        def call(**sizes):
            launches.append(sizes)
            return kernel(**sizes)

        return call

    monkeypatch.setattr(kv_kernels, "make_kernel", counted)
    with metal.on_metal():
        ours = kv_kernels.encode([mx.array(x) for x in rows], planes)
    for x, plane, out in zip(rows, planes, ours, strict=True):
        assert np.array_equal(np.array(out), FORMATS[plane.format].encode(rotate(x) if plane.rotated else x))
    (launch,) = launches
    assert launch["grid"] == (32, 2 * 3 * sum(dim // group_of(dim) for dim in widths), 1)
    assert launch["output_shapes"] == [
        (2 * 3 * sum(FORMATS[f].row_bytes(d) for f, d in zip(pair, widths, strict=True)),)
    ]


# -- attention ---------------------------------------------------------------------------------------------------------


TREE = [PAST, 0, 0, 1, 2, PAST]
STEPS = {
    "decode": [(30, None), (1, None), (1, None)],
    "verify": [(7, None), (5, None), (3, None)],
    "tree": [(20, None), (6, TREE)],
    "strips": [(300, None), (2, None)],
}


def run(
    ops: Any, spec: KVSpec, steps: list, heads: int, dtype: Any, device: Any, sinks: list[float] | None = None
) -> list[np.ndarray]:
    """The output of each step; prompts are committed whole, of trees the path to row 3."""
    state, outs = ops.new_state([{"kv": spec}], 1000), []
    logits = None if sinks is None else ops.vector(dense("sinks", np.array(sinks)))
    for T, parents in steps:
        tokens = np.zeros(T, np.int32)
        step = Step.chain(tokens, state.length) if parents is None else Step.tree(tokens, parents, state.length)
        K, D, DV = spec.kv_heads, spec.key_dim, spec.value_dim
        rows = [numbers(T, *s, seed=state.length) for s in ((heads, D), (K, D), (K, DV))]
        rows = [np.array(mx.array(x).astype(dtype).astype(mx.float32)) for x in rows]  # what both sides can hold
        arrays = [mx.array(x).astype(dtype) for x in rows] if ops.name == "mlx" else rows
        if device and (T <= 8):
            with device():
                out = ops.attention(*arrays, state[0].kv, step, 0.125, sink_logits=logits)
        else:
            out = ops.attention(*arrays, state[0].kv, step, 0.125, sink_logits=logits)
        outs.append(np.array(ops.read(out)))
        state.commit(range(T) if parents is None else [0, 1, 3])
    return outs


PAIRS = [("q8_0", "lm4"), ("lm4", "lm3"), ("tq3_0", "tq3_0"), ("q4_0", "q5_1"), ("native", "lm2"), ("f16", "q8_0")]


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
@pytest.mark.few(8)
def test_attention(steps, pair):
    options = CacheOptions(*pair, calibration=None if pair[0] == "native" else 16, sinks=2)
    spec = packed([{"kv": KVSpec(2, 64, 64)}], options)[0]["kv"]
    expected = run(NumpyOps(), spec, STEPS[steps], 4, mx.float32, None)
    ours = run(MlxOps(), spec, STEPS[steps], 4, mx.float32, metal.on_metal)
    for our, want in zip(ours, expected, strict=True):
        assert np.abs(our - want).max() < 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("pair", [("lm4", "lm3"), ("native", "lm2")], ids="/".join)
def test_sink_logits(pair, kernels):
    """A score of each head that has no value, beside strips of codes and of exact rows; composed as well."""
    options = CacheOptions(*pair, calibration=None if pair[0] == "native" else 16, sinks=2)
    spec, sinks = packed([{"kv": KVSpec(2, 64, 64)}], options)[0]["kv"], [-30.0, 0.0, 4.0, 9.0]
    for steps in (STEPS["tree"], STEPS["strips"]):
        expected = run(NumpyOps(), spec, steps, 4, mx.float32, None, sinks)
        ours = run(MlxOps(), spec, steps, 4, mx.float32, metal.on_metal if kernels else None, sinks)
        plain = run(NumpyOps(), spec, steps, 4, mx.float32, None)
        for our, want, without in zip(ours, expected, plain, strict=True):
            assert np.abs(our - want).max() < 1e-4 * np.abs(want).max()
            assert np.abs(without[:, 3]).mean() > 2 * np.abs(want[:, 3]).mean()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize(("D", "DV", "heads"), [(128, 128, 8), (256, 256, 4), (128, 64, 2)])
def test_sizes_of_heads(D, DV, heads, dtype):
    spec = packed([{"kv": KVSpec(2, D, DV)}], CacheOptions("lm4", "lm4", calibration=8))[0]["kv"]
    steps = [(12, None), (2, None)]
    expected = run(NumpyOps(), spec, steps, heads, dtype, None)[-1]
    ours = run(MlxOps(dtype), spec, steps, heads, dtype, metal.on_metal)[-1]
    assert np.abs(ours - expected).max() < {mx.float16: 4e-3, mx.bfloat16: 3e-2}[dtype] * np.abs(expected).max()


def test_a_row_has_its_bits_in_any_step():
    """Rows of one step, of a chain and of a tree are added in the same order."""
    spec = packed([{"kv": KVSpec(1, 64, 64)}], CacheOptions("lm4", "tq3_0", calibration=4, recent=3))[0]["kv"]
    rows = [mx.array(numbers(9, heads, 64)) for heads in (2, 1, 1)]
    outs = []
    for sizes in ([1] * 9, [6, 3], [6, 1, 2]):
        ops, at, out = MlxOps(), 0, []
        state = ops.new_state([{"kv": spec}], 100)
        for size in sizes:
            step = Step.chain(np.zeros(size, np.int32), at)
            with metal.on_metal():
                out.append(ops.attention(*(x[at : at + size] for x in rows), state[0].kv, step, 0.125))
            state.commit(range(size))
            at += size
        outs.append(mx.concatenate(out)[6:])
    assert mx.array_equal(outs[0], outs[1])
    assert mx.array_equal(outs[0], outs[2])


def test_a_step_of_few_rows_takes_the_kernels(monkeypatch):
    """On Metal nothing decodes a cache: the composed form is not called."""
    spec = packed([{"kv": KVSpec(1, 64, 64)}], CacheOptions("q8_0", "lm4"))[0]["kv"]
    ops = MlxOps()
    state = ops.new_state([{"kv": spec}], 100)
    x = [mx.array(numbers(2, heads, 64)) for heads in (2, 1, 1)]
    monkeypatch.setattr("mlx_backend.kv_formats.decode", None)
    monkeypatch.setattr("mlx_backend.kv_formats.encode", None)
    with metal.on_metal():
        out = ops.attention(*x, state[0].kv, Step.chain(np.zeros(2, np.int32), 0), 1.0)
    assert out.shape == (2, 2, 64)
    assert group_of(96) == 32
