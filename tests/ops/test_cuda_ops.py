"""CudaOps against NumpyOps, block types against their decoding, and rows that do not depend on their neighbours."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
from cases import CASES, TOLERANCE, Case, Inputs, stateful

from common.errors import BimetalError, NotFiniteError
from common.ops import DeltaWeights, ExpertWeights, Rope
from common.quants import BLOCKS, dequantize
from common.reference import NumpyOps
from common.step import MAX_DECODE_ROWS, PAST, Step
from common.storage import ConvSpec, DeltaSpec, KVSpec, LatentSpec
from common.tensors import Tensor
from common.weights import dense

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_backend import expert_products  # noqa: E402
from cuda_backend import rows as rows_of  # noqa: E402
from cuda_backend.arrays import Array  # noqa: E402
from cuda_backend.launch import Kernel  # noqa: E402
from cuda_backend.layout import KERNELS, OPTIONS, TOGETHER, UNITS  # noqa: E402
from cuda_backend.memory import Memory  # noqa: E402
from cuda_backend.occupancy import WHOLE  # noqa: E402
from cuda_backend.ops import CudaOps  # noqa: E402
from cuda_backend.prototypes import prototypes  # noqa: E402
from cuda_backend.weights import Weight  # noqa: E402

pytestmark = pytest.mark.gpu

REFUSED = (  # what the kernels do not take yet, and say so
    "a tree or block has 140 rows",
    "attention keys are 24 and values 8 wide",
)
# keys, values and queries are float16, quantized matrices meet int8 activations, prefill multiplies in bfloat16
COLUMN = {"attention": 1, "latent_attention": 1, "moe": 2}


def on_multiprocessors(context, sms):
    return replace(context, card=replace(context.card, sms=sms))


@pytest.fixture(scope="module")
def ops():
    """CudaOps whose workspace holds NaN until a kernel writes it."""
    ops = CudaOps()
    take = ops.context.arena.take

    def poisoned(nbytes, lasting=False):
        address = take(nbytes, lasting)
        for stream in (ops.context.side, ops.context.stream):
            stream.synchronize()
        cupy.cuda.runtime.memsetAsync(address, 0xFF, nbytes, ops.context.stream.ptr)
        ops.context.stream.synchronize()
        return address

    ops.context.arena.take = poisoned
    return ops


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_op(case: Case, ops):
    ops.context.arena.reset()
    try:
        outputs = case(ops)
    except BimetalError as error:
        if any(reason in str(error) for reason in REFUSED):
            pytest.skip(str(error))
        raise
    tolerance = max(TOLERANCE[case.op][COLUMN.get(case.op, 0)], 2e-6)
    for out, want in zip(outputs, case(NumpyOps()), strict=True):
        assert out.shape == want.shape
        assert np.abs(out - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize(("H", "K", "D", "turning"), [(4, 1, 128, 128), (6, 2, 256, 64)])
@pytest.mark.parametrize(("kind", "T"), [("chain", 1), ("tree", 7), ("tree", 33), ("chain", 140)])
def test_norm_and_rope_on_the_way_to_the_cache(kind, T, H, K, D, turning, ops):
    """Attention applies norm and rope where it stores queries and keys: their positions share memory, as in a model."""
    rope = Rope(tuple(1e4 ** (-2 * j / turning) for j in range(turning // 2)), 1.0)

    def outputs(ops, memory):
        def attend(i, kv, step):
            positions = memory(step.positions)
            q, k = (i.ops.norm_rope(i.rows(len(step), n, D), i.vector(D), positions, rope, 1e-6) for n in (H, K))
            return i.ops.attention(q, k, i.rows(len(step), K, D), kv, step, scale=D**-0.5)

        return [ops.read(out) for out in stateful({"state": KVSpec(K, D, D)}, 7, kind, T, attend)(Inputs(ops))]

    ops.context.arena.reset()
    for out, want in zip(outputs(ops, ops.context.on_device), outputs(NumpyOps(), np.asarray), strict=True):
        assert np.abs(out - want).max() <= TOLERANCE["attention"][1] * np.abs(want).max()


def random_matrix(type_: str, rows: int, columns: int, experts: int = 0) -> Tensor:
    """Random codes, and scales of about 1/100."""
    block, random = BLOCKS[type_], np.random.default_rng(5)
    n = max(experts, 1) * rows * columns // block.elements
    blocks = random.integers(0, 256, (n, block.bytes), dtype=np.uint8)
    for at in block.halves:
        blocks[:, at : at + 2] = random.uniform(0.005, 0.02, n).astype("<f2")[:, None].view(np.uint8)
    if type_ == "MXFP4":
        blocks[:, 0] = random.integers(115, 125, n)
    shape = (experts, rows, columns) if experts else (rows, columns)
    return Tensor("w", type_, shape, blocks.reshape(*shape[:-1], -1))


def quantized_rows(x: np.ndarray, type_: str) -> np.ndarray:
    """Activations as the kernels quantize them for a matrix: int8 with a scale per 32 or 128 columns, in float64."""
    n = 128 if type_ in WHOLE else 32
    padded = np.zeros((len(x), -(-x.shape[1] // n) * n), np.float32)
    padded[:, : x.shape[1]] = x
    groups = padded.reshape(len(x), -1, n)
    scale = np.abs(groups).max(axis=-1, keepdims=True) * np.float32(1 / 127)
    codes = np.rint(groups * (np.float32(1) / np.maximum(scale, np.float32(1e-30))))
    return (codes.astype(np.float64) * scale).reshape(len(x), -1)[:, : x.shape[1]]


def rows_on(ops, x: np.ndarray):
    table = ops.weight(Tensor("x", "F32", x.shape, x.view(np.uint8)))
    return ops.embed(table, np.arange(len(x), dtype=np.int32))


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
    for bias, scale in ((None, 1.0), (ops.vector(dense("b", random.normal(size=20))), 2.5)):
        outs = []
        for some in (slice(0, 9), slice(0, 1), slice(5, 6)):
            ops.context.arena.reset()
            rows = ops.add(rows_on(ops, x[some]), ops.linear(rows_on(ops, z[some]), before))
            mixture = ExpertWeights(router, *experts, *shared, bias=bias)
            y = ops.moe_ffn(ops.rms_norm(rows, norm, 1e-6), mixture, 3, scale)
            outs.append(ops.read(ops.add(rows, y)))
        assert np.isfinite(outs[0]).all()
        assert np.array_equal(outs[0][[0, 5]], np.concatenate(outs[1:]))


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


def hard_rows(vocab):
    """Ordinary logits, and hard ones for a sampler: ties everywhere, at the best, of zeros; infinities."""
    random = np.random.default_rng(3)
    rows = random.normal(scale=3, size=(24, vocab)).astype(np.float32)
    rows[4:8] = random.integers(-3, 4, (4, vocab)) / 2
    rows[8] = 0
    rows[9] = np.where(random.random(vocab) < 0.5, 0.0, -0.0)
    rows[10, 1:] = -np.inf
    rows[11] = -np.inf
    rows[12, vocab // 2 :] = np.inf
    rows[13] *= 1e30
    rows[14] *= 1e-38
    rows[15] = 50 - np.sqrt(np.arange(vocab))
    rows[16, vocab - 1] = 40
    rows[17, : vocab // 2] = -80
    rows[18:] *= [[0.01], [0.1], [0.5], [1], [2], [5]]
    return rows


@pytest.mark.parametrize("vocab", [1, 2, 33, 5003])
@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 1.0},
        {"temperature": 0.01},
        {"temperature": 30.0},
        {"temperature": 0.8, "top_k": 40},
        {"temperature": 1.3, "top_k": 64, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 20, "min_p": 0.2},
        {"temperature": 2.5, "top_k": 300, "top_p": 0.7, "min_p": 0.05},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_k": 5002},
        {"temperature": 1.0, "top_p": 0.95},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 3.0, "top_p": 1 - 1e-9},
        {"temperature": 0.7, "min_p": 0.05},
        {"temperature": 0.7, "top_p": 0.5, "min_p": 0.9},
    ],
)
def test_draws_are_the_hosts(asked, vocab, ops):
    """A seed gives the same tokens as on the host, from logits that stay on the device."""
    from common.sampling import Sampler, Sampling

    logits, sampling = hard_rows(vocab), Sampling(**asked, seed=11)
    host, device = Sampler(sampling), Sampler(sampling)
    want = [host.pick(row) for row in logits]
    assert ops.read(ops.sample(rows_on(ops, logits), device)).tolist() == want
    assert host.random.random() == device.random.random()
    logits[3, vocab // 2] = np.nan
    with pytest.raises(NotFiniteError):
        ops.read(ops.sample(rows_on(ops, logits), device))


def test_argmax(ops):
    from common.sampling import Sampler, Sampling

    greedy = Sampler(Sampling())
    logits = np.random.default_rng(3).normal(size=(5, 30011)).astype(np.float32)
    logits[1, [70, 30000]] = 9  # ties go to the smaller id
    logits[2] = -np.inf
    logits[2, 17] = -1e30
    assert ops.read(ops.sample(rows_on(ops, logits), greedy)).tolist() == logits.argmax(-1).tolist()
    logits[3, 5] = np.nan
    with pytest.raises(NotFiniteError):
        ops.read(ops.sample(rows_on(ops, logits), greedy))


@pytest.mark.parametrize("vocab", [2, 33, 640, 5003])
def test_argmax_and_entropy(vocab, ops):
    """Ties, peaks and flat rows; without the excluded token, wherever it stands; the same bits in every run."""
    from common.sampling import argmax_entropy

    logits = hard_rows(vocab)
    logits = logits[np.isfinite(logits.max(-1)) & (logits.max(-1) < 1e20)]
    for excluded in (0, vocab // 2, vocab - 1, int(logits[0].argmax())):
        rows = logits[np.isfinite(np.delete(logits, excluded, 1).max(-1))]
        want_ids, want = argmax_entropy(rows, excluded)
        ids, found = ops.read_all(*ops.argmax_entropy(rows_on(ops, rows), excluded))
        assert ids.tolist() == want_ids.tolist()
        assert np.abs(found - want).max() < 2e-5
        again = ops.read_all(*ops.argmax_entropy(rows_on(ops, rows)[1:], excluded))
        assert np.array_equal(again[0], ids[1:])
        assert np.array_equal(again[1], found[1:])
        rows = rows.copy()
        rows[2, excluded] = np.nan
        with pytest.raises(NotFiniteError):
            ops.read_all(*ops.argmax_entropy(rows_on(ops, rows), excluded))


@pytest.mark.parametrize("vocab", [4, 1028, 5000, 5003])
def test_sampled_steps(vocab):
    """The best of a product's logits; and a step reads the tokens that it is given, whatever ran in between."""
    from common.sampling import Sampler, Sampling

    ops = CudaOps()  # no graph is captured where each result is filled with NaN first
    greedy, state = Sampler(Sampling()), ops.new_state((), 64)
    rows = np.random.default_rng(5).normal(size=(vocab, 256)).astype(np.float32)
    table = ops.weight(Tensor("x", "F32", rows.shape, rows.view(np.uint8)))
    head = ops.weight(random_matrix("Q4_K", vocab, 256))

    def fn(state, step):
        return ops.linear(ops.embed(table, step.tokens), head)

    def after(tokens):
        return ops.run(fn, state, Step.chain(tokens, 0))

    for T in (1, 5):
        for turn in range(3):  # as it comes, captured, replayed
            ids = (np.arange(T, dtype=np.int32) + turn) % vocab
            logits = after(ids)
            sampled = ops.sample(logits, greedy)
            at_once, found = ops.read(after(sampled)), ops.read(sampled)
            assert found.tolist() == ops.read(logits).argmax(-1).tolist()
            assert np.array_equal(ops.read(after(found)), at_once)
            others = ops.sample(after(ids[::-1].copy()), greedy)
            assert np.array_equal(ops.read(after(sampled)), at_once)
            assert np.array_equal(ops.read(after(others)), ops.read(after(ops.read(others))))
            sampled = ops.sample(logits, greedy)
            after(ids)
            assert np.array_equal(ops.read(after(sampled)), at_once)
    logits = rows_of.kept(ops.context, rows_on(ops, rows), 2)
    sampled, memory = ops.sample(logits, greedy), weakref.ref(logits.owner)
    del logits
    assert memory() is None  # a step's may have 135 MB, and tokens outlive it
    assert ops.read(sampled).tolist() == rows[:2].argmax(-1).tolist()
    rows[1, -1] = np.nan
    with pytest.raises(NotFiniteError):
        ops.read(ops.sample(rows_of.kept(ops.context, rows_on(ops, rows), 2), greedy))


def test_chosen_tokens_do_not_wait_for_later_work(ops, monkeypatch):
    """The host reads a token while the step after it runs: by the event of its copy, not by the end of the stream."""
    from common.sampling import Sampler, Sampling

    rows = np.random.default_rng(7).normal(size=(2, 1028)).astype(np.float32)
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=1)):
        chosen = ops.sample(rows_on(ops, rows), Sampler(sampling))
        copied = ops.read(chosen[:])
        with monkeypatch.context() as patch:
            patch.setattr(type(ops.context.stream), "synchronize", lambda stream: pytest.fail("it waits for all"))
            assert np.array_equal(ops.read(chosen), copied)


@pytest.mark.parametrize("at", [np.s_[:0], np.s_[:, :0], np.s_[:, 4:4]], ids=str)
def test_nothing_is_read(at, ops):
    rows = np.ones((3, 1024), np.float32)
    assert ops.read(rows_on(ops, rows)[at]).shape == rows[at].shape


def mixer_on(ops: CudaOps, T: int, D: int = 128):
    """A state, and a function that runs some of T random rows through a Gated DeltaNet mixer of heads D wide."""
    Hk, Hv, taps = 1, 2, 4
    C, V, random = (2 * Hk + Hv) * D, Hv * D, np.random.default_rng(11)
    y = random.normal(size=(T, C + V + 2 * Hv)).astype(np.float32)
    w, decay = ops.vector(f32(random.normal(size=(C, taps)))), ops.vector(f32(-np.exp(random.normal(size=Hv))))
    bias, norm = (ops.vector(f32(np.ones(n))) for n in (Hv, D))
    state = ops.new_state([{"conv": ConvSpec(C, taps), "delta": DeltaSpec(Hk, Hv, D, D)}], 1000)

    def run(rows: list[int], step: Step) -> np.ndarray:
        ops.context.arena.reset()
        some, n = rows_on(ops, y[rows]), len(rows)
        qkv, z = some[:, :C], some[:, C : C + V].reshape(n, Hv, D)
        a, b = some[:, C + V : C + V + Hv], some[:, C + V + Hv :]
        conv, delta = state[0].conv, state[0].delta
        return ops.read(ops.delta_mixer(qkv, z, a, b, DeltaWeights(w, decay, bias, norm, 1e-6), Hk, conv, delta, step))

    return state, run


def f32(values: np.ndarray) -> Tensor:
    values = np.ascontiguousarray(values, np.float32)
    return Tensor("values", "F32", values.shape, values.reshape(len(values), -1).view(np.uint8))


def test_mixer_rows_are_alone(ops):
    """A row of a Gated DeltaNet mixer has the same bits in a step of any number of rows, in a chain and in a tree."""
    state, run = mixer_on(ops, 64)
    alone = []
    for t in range(64):
        alone.append(run([t], Step.chain(np.zeros(1, np.int32), t)))
        state.commit([0])
    alone = np.concatenate(alone)
    for sizes in ((64,), (2, 8, 16, 22, 15, 1), (33, 31), (17, 47)):
        state, run = mixer_on(ops, 64)
        at = 0
        for n in sizes:
            out = run(list(range(at, at + n)), Step.chain(np.zeros(n, np.int32), at))
            assert np.array_equal(out, alone[at : at + n]), f"{n} rows from {at} of {sizes}"
            state.commit(np.arange(n))
            at += n
    # a tree whose every other row goes on with the chain, and of which the rest are leaves
    state, run = mixer_on(ops, 64)
    run([0, 1], Step.chain(np.zeros(2, np.int32), 0))
    state.commit([0, 1])
    parents = [-1, -1, *(i - 2 if i % 2 == 0 else i - 3 for i in range(2, 46))]
    rows = [2 + i // 2 if i % 2 == 0 else 63 - i // 2 for i in range(46)]
    out = run(rows, Step.tree(np.zeros(46, np.int32), parents, 2))
    assert np.array_equal(out[::2], alone[2:25])
    snapshot = state.snapshot()
    state.commit(np.arange(0, 20, 2))
    held = state.snapshot()
    want = run([12], Step.chain(np.zeros(1, np.int32), 12))
    assert np.array_equal(want, alone[12:13])
    state.restore(held)
    assert np.array_equal(run([12], Step.chain(np.zeros(1, np.int32), 12)), want)
    state.restore(snapshot)
    assert np.array_equal(run([2, 3], Step.chain(np.zeros(2, np.int32), 2)), alone[2:4])


@pytest.mark.parametrize("widths", [(10, 16), (16, 10), (260, 16)])
def test_widths_of_the_delta_rule(widths, ops):
    with pytest.raises(BimetalError, match=f"keys are {widths[0]} and values {widths[1]} wide; .* multiples of 4"):
        ops.new_state([{"delta": DeltaSpec(1, 2, *widths)}], 10)


TREES = {  # of as many rows as there may be
    "random": [PAST, *np.random.default_rng(3).integers(PAST, np.arange(1, MAX_DECODE_ROWS))],
    "near": [PAST, *(max(PAST, t - 1 - t * t % 5) for t in range(1, MAX_DECODE_ROWS))],
    "two children each": [(t - 2) // 2 if t > 1 else PAST for t in range(MAX_DECODE_ROWS)],
    "a leaf beside each": [(t - 1) // 2 * 2 if t else PAST for t in range(MAX_DECODE_ROWS)],
    "leaves": [PAST] * MAX_DECODE_ROWS,
}


@pytest.mark.parametrize("D", [128, 256])
@pytest.mark.parametrize("tree", TREES)
def test_mixer_trees_are_plain(tree, D, ops):
    """Every row of a tree has the bits of the chain that leads to it, and leaves its state."""
    parents, rows = TREES[tree], list(range(MAX_DECODE_ROWS))
    state, run = mixer_on(ops, MAX_DECODE_ROWS + 8, D)
    run([MAX_DECODE_ROWS + t for t in range(6)], Step.chain(np.zeros(6, np.int32), 0))
    state.commit([0, 1, 2])
    step = Step.tree(np.zeros(MAX_DECODE_ROWS, np.int32), parents, 3)
    out = run(rows, step)
    before = state.snapshot()
    for leaf in sorted(set(rows) - set(parents)):
        path = np.flatnonzero(step.visible[leaf])
        assert np.array_equal(run(path.tolist(), Step.chain(np.zeros(len(path), np.int32), 3)), out[path]), leaf
    for row in (0, 29, 126, 127, 128, MAX_DECODE_ROWS - 1):
        path, after = np.flatnonzero(step.visible[row]), []
        for whole in (True, False):
            state.restore(before)
            if whole:
                run(rows, step)
                state.commit(path)
            else:
                for at, one in enumerate(path):
                    run([int(one)], Step.chain(np.zeros(1, np.int32), 3 + at))
                    state.commit([0])
            after.append(
                run([MAX_DECODE_ROWS + 6, MAX_DECODE_ROWS + 7], Step.chain(np.zeros(2, np.int32), 3 + len(path)))
            )
        assert np.array_equal(*after), row


class Attention:
    """Layers to compare rows of: random queries, keys and values by node of a tree."""

    def __init__(self, ops, H: int, K: int, D: int, spec, window: int | None = None):
        self.ops, self.spec, self.window, self.random = ops, spec, window, np.random.default_rng(3)
        self.widths = ((H, D), (K, D), (K, D)) if not isinstance(spec, LatentSpec) else ((H, D), (H, 8), (D,), (8,))
        self.past = [self.random.normal(size=(320, *shape)).astype(np.float32) for shape in self.widths]

    def state(self, past: int):
        state = self.ops.new_state([{"kv": self.spec}], past + 200)
        for start in range(0, past, 64):
            n = min(64, past - start)
            self(state, [x[start % 320 : start % 320 + n] for x in self.past], Step.chain(np.zeros(n, np.int32), start))
            state.commit(range(n))
        return state

    def __call__(self, state, inputs, step) -> np.ndarray:
        self.ops.context.arena.reset()
        arrays = [rows_on(self.ops, x.reshape(len(x), -1)).reshape(x.shape) for x in inputs]
        if isinstance(self.spec, LatentSpec):
            return self.ops.read(self.ops.latent_attention(*arrays, state[0].kv, step, 0.3))
        return self.ops.read(self.ops.attention(*arrays, state[0].kv, step, 0.3, self.window))

    def check(self, past: int, n: int) -> None:
        """A tree of n rows against the chain of each leaf, and against plain decoding of one leaf."""
        parents = [int(self.random.integers(max(PAST, t - 4), t)) for t in range(n)]
        rows = [2 * self.random.normal(size=(n, *shape)).astype(np.float32) for shape in self.widths]
        state, tokens = self.state(past), np.zeros(n, np.int32)
        tree = Step.tree(tokens, parents, past)
        out = self(state, rows, tree)
        for leaf in sorted(set(range(n)) - set(parents)):
            path = np.flatnonzero(tree.visible[leaf])
            chain = Step.chain(tokens[path], past)
            assert np.array_equal(self(state, [x[path] for x in rows], chain), out[path]), f"leaf {leaf} of {parents}"
        for at, row in enumerate(path):
            alone = self(state, [x[row : row + 1] for x in rows], Step.chain(tokens[:1], past + at))
            assert np.array_equal(alone[0], out[row]), f"row {row} of {parents}, alone"
            state.commit([0])


@pytest.mark.parametrize("n", [2, 7, 22, 64, MAX_DECODE_ROWS])
@pytest.mark.parametrize("past", [0, 1, 50, 63, 64, 65, 250, 256, 300])
@pytest.mark.parametrize(
    "layer",
    [
        (6, 2, 16, KVSpec(2, 16, 16), None),
        (24, 4, 64, KVSpec(4, 64, 64), None),
        (8, 8, 80, KVSpec(8, 80, 80), None),
        (40, 1, 16, KVSpec(1, 16, 16), None),
        (6, 2, 16, KVSpec(2, 16, 16), 33),
        (6, 2, 16, KVSpec(2, 16, 16, 33), 33),
        (6, 2, 16, KVSpec(2, 16, 16, 100, 5), 100),
        (3, 1, 16, LatentSpec(16, 8), None),
        (40, 1, 48, LatentSpec(48, 8), None),
    ],
    ids=lambda layer: f"{layer[0]}.{layer[1]}.{layer[2]}-{type(layer[3]).__name__}-{layer[4]}",
)
def test_rows_of_trees_are_plain(layer, past, n, ops):
    """Rows of trees have the bits of plain decoding, whatever their siblings and wherever they lie in the cache."""
    Attention(ops, *layer).check(past, n)


@pytest.mark.parametrize("slots", [(1, 1, 1), (3, 4, 20), (7, 8, 9), (5, 16, 2)])
@pytest.mark.parametrize(("H", "K", "D", "pairs"), [(6, 2, 128, 64), (10, 5, 256, 32)])
def test_heads_of_partial_sums(H, K, D, pairs, slots, ops):
    """Heads normed and rotated before they are stored in the cache, however many warps add them up."""
    random, eps = np.random.default_rng(3), 1e-6
    sums = [random.normal(size=(n, 5, heads, D)).astype(np.float32) for n, heads in zip(slots, (H, K, K), strict=True)]
    weights_, rope = [f32(random.normal(size=D)) for _ in range(2)], Rope(tuple(0.3**i for i in range(pairs)))

    def run(on, inputs, past, state):
        step = Step.chain(np.zeros(len(inputs[0]), np.int32), past)
        positions = ops.context.on_device(step.positions) if on is ops else step.positions  # q and k turn by the same
        norms = [on.vector(w) for w in weights_]
        q, k = (on.norm_rope(x, w, positions, rope, eps) for x, w in zip(inputs[:2], norms, strict=True))
        out = on.read(on.attention(q, k, inputs[2], state[0].kv, step, D**-0.5))
        state.commit(range(len(out)))
        return out

    def on_device(rows):
        ops.context.arena.reset()
        flat = [rows_on(ops, np.ascontiguousarray(x[:, rows]).reshape(-1, x[0, 0].size)) for x in sums]
        shapes = [x[0, rows].shape for x in sums]
        return [
            Array(shape, f.address, partials=n, partial_stride=int(np.prod(shape)), owner=f)
            for f, shape, n in zip(flat, shapes, slots, strict=True)
        ]

    spec = [{"kv": KVSpec(K, D, D)}]
    numpy = NumpyOps()
    want = run(numpy, [x.sum(0) for x in sums], 0, numpy.new_state(spec, 100))
    out = run(ops, on_device(slice(5)), 0, ops.new_state(spec, 100))
    assert np.abs(out - want).max() <= TOLERANCE["attention"][1] * np.abs(want).max()
    state = ops.new_state(spec, 100)
    alone = [run(ops, on_device(slice(t, t + 1)), t, state) for t in range(5)]
    assert np.array_equal(np.concatenate(alone), out)


def test_rows_of_trees_are_plain_behind_a_long_past(ops, monkeypatch):
    """Where a single row's pieces are tiles, more than a warp reads together, and where they no longer are."""
    layer = Attention(ops, 6, 2, 16, KVSpec(2, 16, 16))
    for past in (4090, 4100):
        layer.check(past, 9)
    monkeypatch.setattr(ops, "context", on_multiprocessors(ops.context, 64))
    for n in (9, 64):
        layer.check(1000, n)
