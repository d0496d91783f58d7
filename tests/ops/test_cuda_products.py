"""Products with matrices of every block type, against their decoding; rows do not depend on their neighbours."""

from dataclasses import replace

import numpy as np
import pytest

from common.errors import BimetalError
from common.quants import BLOCKS, dequantize
from common.step import MAX_DECODE_ROWS
from common.tensors import Tensor

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_rows import f32, on_multiprocessors, poisoned_ops, quantized_rows, random_matrix, rows_on  # noqa: E402

from cuda_backend.launch import Kernel  # noqa: E402
from cuda_backend.layout import TOGETHER, UNITS  # noqa: E402
from cuda_backend.memory import Memory  # noqa: E402
from cuda_backend.occupancy import WHOLE  # noqa: E402
from cuda_backend.prototypes import prototypes  # noqa: E402
from cuda_backend.sources import KERNELS, OPTIONS  # noqa: E402
from cuda_backend.weights import Weight  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ops():
    return poisoned_ops()


@pytest.mark.parametrize("type_", UNITS)
@pytest.mark.parametrize("shape", [(300, 1280), (5, 256), (1024, 768)])
def test_embed_decodes(type_, shape, ops):
    """The repacked matrix holds the file's values."""
    ops.context.arena.reset()
    tensor = random_matrix(type_, *shape)
    rows = np.array([0, 1, shape[0] - 1, shape[0] // 2], np.int32)
    want = dequantize(tensor)[rows]
    np.testing.assert_allclose(ops.read(ops.embed(ops.weight(tensor), rows)), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("type_", UNITS)
@pytest.mark.parametrize("shape", [(300, 1280), (5, 256), (1024, 768), (5120, 512)])
def test_quantized_linear(type_, shape, ops):
    """The product is that of the file's values with int8 activations, and a row never depends on the other rows."""
    tensor = random_matrix(type_, *shape)
    w, values = ops.weight(tensor), dequantize(tensor).astype(np.float64)
    x = np.random.default_rng(3).normal(size=(MAX_DECODE_ROWS, shape[1])).astype(np.float32)
    x[:, 7] *= 30
    want = quantized_rows(x, type_) @ values.T
    alone = None
    for T in (MAX_DECODE_ROWS, 1, 2, 7, 8, 9, 16, 22, 33, 48, 64, 65, 76, 90, 104, 110, 128, 129):
        ops.context.arena.reset()
        out = ops.read(ops.linear(rows_on(ops, x[:T]), w))
        assert np.abs(out - want[:T]).max() <= 2e-5 * np.abs(want).max(), f"{T} rows"
        alone = out if alone is None else alone
        assert np.array_equal(out, alone[:T]), f"{T} rows differ from the same rows of {MAX_DECODE_ROWS}"


def test_quotient(ops):
    """The division by which CTAs find their stripes: multiples of a divisor, and their neighbours."""
    rng = np.random.default_rng(0)
    d = np.concatenate((np.arange(1, 300), 2 ** np.arange(9, 32) - 1, rng.integers(1, 2**31, 500)))
    multiple = rng.integers(0, 2**32, d.size) // d * d
    n = np.concatenate((multiple, np.maximum(multiple - 1, 0), multiple + d - 1, 0 * d, 0 * d + 2**32 - 1))
    n, d = np.minimum(n, 2**32 - 1).astype(np.uint32), np.tile(d, 5).astype(np.uint32)
    code = """
extern "C" __global__ void divide(const u32* n, const u32* d, u32* out, int count) {
    for (int i = threadIdx.x; i < count; i += 32) out[i] = quotient(n[i], d[i], 0xffffffffu / d[i]);
}
"""
    module = cupy.RawModule(code=(KERNELS / "prelude.cuh").read_text() + code, options=OPTIONS)
    divide = Kernel(module.get_function("divide"), prototypes(code)["divide"])
    memory, out = [Memory(n.nbytes) for _ in range(3)], np.zeros_like(n)
    runtime, stream, addresses = cupy.cuda.runtime, ops.context.stream, tuple(m.address for m in memory)
    for values, m in zip((n, d), memory, strict=False):
        runtime.memcpyAsync(m.address, values.ctypes.data, n.nbytes, runtime.memcpyHostToDevice, stream.ptr)
    divide((1,), (32,), (*addresses, n.size), stream=stream)
    runtime.memcpyAsync(
        out.ctypes.data, memory[2].address, n.nbytes, runtime.memcpyDeviceToHost, ops.context.stream.ptr
    )
    ops.context.stream.synchronize()
    assert np.array_equal(out, n // d)


@pytest.mark.parametrize("type_", ["Q4_K", "Q6_K", "Q8_0"])
def test_stripes(type_, ops, monkeypatch):
    """A CTA that multiplies many units, of several row blocks, in each of its rings and for any rows."""
    monkeypatch.setattr(ops, "context", on_multiprocessors(ops.context, 4))
    tensor = random_matrix(type_, 300, 2560)
    w, values = ops.weight(tensor), dequantize(tensor).astype(np.float64)
    x = np.random.default_rng(3).normal(size=(64, 2560)).astype(np.float32)
    want, alone = quantized_rows(x, type_) @ values.T, None
    for T in (64, 1, 7, 22, 32):
        ops.context.arena.reset()
        out = ops.read(ops.linear(rows_on(ops, x[:T]), w))
        assert np.abs(out - want[:T]).max() <= 2e-5 * np.abs(want).max(), f"{T} rows"
        alone = out if alone is None else alone
        assert np.array_equal(out, alone[:T]), f"{T} rows differ from the same rows of 64"


@pytest.mark.parametrize("columns", [768, 5376])
def test_norms_in_products(columns, ops, monkeypatch):
    """The factors by which a product finishes the norm of its rows, in each of its rings and for any rows."""
    monkeypatch.setattr(ops, "context", on_multiprocessors(ops.context, 4))
    tensor, rng = random_matrix("Q4_K", 300, columns), np.random.default_rng(3)
    w, values = ops.weight(tensor), dequantize(tensor).astype(np.float64)
    x = rng.normal(size=(72, columns)).astype(np.float32) * np.geomspace(1e-2, 1e2, 72, dtype=np.float32)[:, None]
    scale = rng.normal(1, 0.1, columns).astype(np.float32)
    norm, alone = ops.vector(f32(scale)), None
    factors = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-6)
    want = quantized_rows(x * scale, "Q4_K") @ values.T * factors
    for T in (72, 1, 2, 8, 9, 16, 22, 33, 64):
        ops.context.arena.reset()
        out = ops.read(ops.linear(ops.rms_norm(rows_on(ops, x[:T]), norm, 1e-6), w))
        assert np.abs(out - want[:T]).max() <= 2e-5 * np.abs(want).max(), f"{T} rows"
        alone = out if alone is None else alone
        assert np.array_equal(out, alone[:T]), f"{T} rows differ from the same rows of 72"


@pytest.mark.parametrize("types", TOGETHER, ids="+".join)
def test_two_types(types, ops, monkeypatch):
    """Matrices of two types in one launch, in either order, in each of its rings and for any rows."""
    monkeypatch.setattr(ops, "context", on_multiprocessors(ops.context, 5))

    def product(w: Weight, T: int) -> tuple[np.ndarray, int]:
        ops.context.arena.reset()
        rows, before = rows_on(ops, x[:T]), ops.launches
        out, launches = ops.linear(rows, w), ops.launches - before
        return ops.read(out), launches

    x = np.random.default_rng(3).normal(size=(72, 1280)).astype(np.float32)
    for sizes in ((140, 900), (600, 9)):
        parts = [random_matrix(type_, rows, 1280) for type_, rows in zip(types, sizes, strict=True)]
        for order in (parts, parts[::-1]):
            w, one, alone = ops.weight(*order), ops.weight(order[0]), None
            want = np.concatenate([quantized_rows(x, p.type) @ dequantize(p).astype(np.float64).T for p in order], 1)
            for T in (72, 1, 7, 16, 24, 64):
                out, count = product(w, T)
                assert count == product(one, T)[1]
                assert np.abs(out - want[:T]).max() <= 2e-5 * np.abs(want).max(), f"{T} rows"
                alone = out if alone is None else alone
                assert np.array_equal(out, alone[:T]), f"{T} rows differ from the same rows of 72"


@pytest.mark.parametrize("type_", WHOLE)
def test_largest_sums(type_, ops):
    """The largest codes and scales: sums of 128 columns stay integers, in whichever unit they are added."""
    block, random = BLOCKS[type_], np.random.default_rng(9)
    blocks = np.full((130 * 4, block.bytes), 255, np.uint8)
    blocks[390:] = random.integers(0, 256, blocks[390:].shape)
    for at in block.halves:
        blocks[:, at : at + 2] = np.full(1, 0.01, "<f2").view(np.uint8)
    w = ops.weight(Tensor("w", type_, (130, 1024), blocks.reshape(130, -1)))
    x = random.choice(np.float32([-1, 1, 126 / 127]), (64, 1024))
    x[0], x[1] = 1, -1
    x[2, 1:] *= random.random(1023, dtype=np.float32)
    one = []
    for t in range(64):
        ops.context.arena.reset()
        one.append(ops.read(ops.linear(rows_on(ops, x[t : t + 1]), w))[0])
    for T in (8, 24, 32, 48, 64):
        ops.context.arena.reset()
        assert np.array_equal(ops.read(ops.linear(rows_on(ops, x[:T]), w)), one[:T]), f"{T} rows"


@pytest.mark.parametrize("type_", ["Q4_K", "Q5_K", "Q2_K", "Q6_K", "Q4_1"])
def test_far_activations(type_, ops):
    """Rows of large and of small numbers of one sign, so that minima count; infinity and NaN reach a whole row."""
    tensor = random_matrix(type_, 130, 512)
    w, values = ops.weight(tensor), dequantize(tensor).astype(np.float64)
    x = np.abs(np.random.default_rng(3).normal(size=(9, 512))).astype(np.float32)
    x *= np.float32([1, 1e6, 1e30, 1e-20, 1, 1, 1, 1e6, 1])[:, None]
    want = quantized_rows(x, type_) @ values.T
    x[4, 300], x[5, 10], x[6, 511] = np.nan, np.inf, -np.inf
    for T in (9, 1):
        ops.context.arena.reset()
        out = np.concatenate([ops.read(ops.linear(rows_on(ops, x[t : t + T]), w)) for t in range(0, 9, T)])
        assert not np.isfinite(out[4:7]).any()
        for t in (0, 1, 2, 3, 7, 8):
            assert np.abs(out[t] - want[t]).max() <= 2e-5 * np.abs(want[t]).max(), f"row {t} of {T}"


@pytest.mark.parametrize("type_", [*UNITS, "BF16", "F16"])
def test_prefill(type_, ops):
    """More rows than a tree may have multiply in bfloat16."""
    if type_ in UNITS:
        tensor = random_matrix(type_, 300, 1280)
    else:
        halves = np.random.default_rng(1).normal(size=(300, 1280)).astype(np.float16)
        bits = (halves.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) if type_ == "BF16" else halves
        tensor = Tensor("w", type_, (300, 1280), bits.view(np.uint8))
    ops.context.arena.reset()
    x = np.random.default_rng(3).normal(size=(140, 1280)).astype(np.float32)
    want = x.astype(np.float64) @ dequantize(tensor).astype(np.float64).T
    out = ops.read(ops.linear(rows_on(ops, x), ops.weight(tensor)))
    assert np.abs(out - want).max() <= 1e-2 * np.abs(want).max()


def test_mixed_types(ops):
    """Parts of different types make one matrix."""
    parts = [random_matrix("Q6_K", 200, 512), random_matrix("Q4_K", 130, 512), random_matrix("Q4_K", 3, 512)]
    parts.append(random_matrix("Q8_0", 7, 512))  # whose rows of x are packed otherwise
    half = np.random.default_rng(2).normal(size=(9, 512)).astype(np.float16)
    parts.append(Tensor("h", "F16", (9, 512), half.view(np.uint8)))
    x = np.random.default_rng(3).normal(size=(3, 512)).astype(np.float32)
    values = np.concatenate([dequantize(p) for p in parts]).astype(np.float64)
    for T in (1, 3):
        ops.context.arena.reset()
        out = ops.read(ops.linear(rows_on(ops, x[:T]), ops.weight(*parts)))
        want = x[:T] @ values.T
        assert np.abs(out - want).max() <= 1e-2 * np.abs(want).max()


@pytest.mark.parametrize("type_", ["IQ2_XXS", "TQ2_0"])
def test_expanded_types(type_, ops, capfd):
    """A type without a kernel is held as float16, and the user is told."""
    ops.context.arena.reset()
    tensor = random_matrix(type_, 40, 512)
    x = np.random.default_rng(3).normal(size=(2, 512)).astype(np.float32)
    out = ops.read(ops.linear(rows_on(ops, x), ops.weight(tensor)))
    np.testing.assert_allclose(out, x @ dequantize(tensor).T, rtol=1e-2, atol=1e-2 * np.abs(out).max())
    assert type_ in capfd.readouterr().err


def bf16_matrix(rows: int, columns: int) -> Tensor:
    values = np.random.default_rng(5).normal(size=(rows, columns)).astype("<f4")
    return Tensor("w", "BF16", (rows, columns), np.ascontiguousarray(values.view(np.uint16)[:, 1::2]).view(np.uint8))


def test_bf16_where_tensor_cores_lack_it(ops, capfd, monkeypatch):
    """Before compute capability 8.0 a BF16 matrix is held as float16, value by value, or refused."""
    if ops.context.card.half == "BF16":
        pytest.skip("this GPU multiplies bf16")
    monkeypatch.setattr(ops, "expanded", {})  # so that this one is the first
    x = np.random.default_rng(3).normal(size=(3, 64)).astype(np.float32)
    tensor = bf16_matrix(40, 64)
    weight = ops.weight(tensor)
    assert [s.type for s in weight.segments] == ["F16"]
    assert ops.holds("BF16") == "expanded to float16"
    assert "BF16 tensors are held as float16: this GPU cannot multiply it" in capfd.readouterr().err
    out = ops.read(ops.linear(rows_on(ops, x), weight))
    np.testing.assert_allclose(out, x @ dequantize(tensor).T, rtol=1e-5, atol=1e-5)
    large = replace(tensor, data=tensor.data.copy())
    large.data.view(np.uint16)[0, 0] = 0x4788  # 69632
    with pytest.raises(BimetalError, match="holds 69632 as BF16, which this GPU holds as float16, up to 65504"):
        ops.weight(large)


@pytest.mark.parametrize("value", [1e6, -1e6, np.nan, np.inf])
def test_extremes_of_long_steps(value, ops):
    """A finite activation stays finite in a product of many rows; what is not finite reaches the result."""
    ops.context.arena.reset()
    matrix = bf16_matrix(8, 64)
    x = np.zeros((140, 64), np.float32)
    x[3, 5] = value
    out = ops.read(ops.linear(rows_on(ops, x), ops.weight(matrix)))
    assert not out[np.arange(140) != 3].any()
    if np.isfinite(value):
        least = value if ops.context.card.half == "BF16" else np.copysign(65504, value)
        np.testing.assert_allclose(out[3], least * dequantize(matrix)[:, 5], rtol=1e-2)
    else:
        assert not np.isfinite(out[3]).any()


@pytest.mark.parametrize(
    ("type_", "C", "rows"), [("Q4_K", 512, 256), ("Q6_K", 256, 128), ("Q5_0", 192, 128), ("Q8_0", 64, 24)]
)
@pytest.mark.parametrize("normed", [False, True])
def test_heads_of_one_row(type_, C, rows, normed, ops):
    """Heads of one row are read where a product left them, and packed for the next, with the bits of more rows."""
    random = np.random.default_rng(3)
    w, after = ops.weight(random_matrix(type_, rows, C, experts=4)), ops.weight(random_matrix("Q8_0", 64, 4 * rows))
    before, x = ops.weight(random_matrix("Q8_0", 4 * (C + 32), 256)), random.normal(size=(9, 256)).astype(np.float32)
    for last in (lambda y: ops.linear(y.reshape(len(y), 4 * rows), after), lambda y: y):
        outs = []
        for some in (x, x[:1], x[5:6]):
            ops.context.arena.reset()
            y = ops.linear(rows_on(ops, some), before).reshape(len(some), 4, C + 32)[:, :, :C]
            outs.append(ops.read(last(ops.head_linear(ops.rms_norm(y, None, 1e-6) if normed else y, w))))
        assert np.isfinite(outs[0]).all()
        assert outs[0].any()
        assert np.array_equal(outs[0][[0, 5]], np.concatenate(outs[1:]))
