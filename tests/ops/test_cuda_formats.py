"""Compressed caches on a GPU: the bytes that kernels write, and what attention makes of them, row by row."""

import itertools

import numpy as np
import pytest

from common.errors import BimetalError, UsageError
from common.hadamard import rotate
from common.kv_cache import CacheOptions, check_pairs, packed
from common.kv_formats import FORMATS
from common.ops import LatentWeights, Rope
from common.reference import NumpyOps
from common.step import PAST, Step
from common.storage import NATIVE, KVSpec, LatentSpec, Packing
from common.weights import dense

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cases import array  # noqa: E402
from cuda_rows import attend, outliers, rows_of  # noqa: E402

from cuda_backend.arrays import Array  # noqa: E402
from cuda_backend.caches.formats import KEYS, PACKED, PAIRS  # noqa: E402
from cuda_backend.ops import CudaOps  # noqa: E402

pytestmark = pytest.mark.gpu
MIXED = [
    ("turboquant", "tq3_0"),
    ("q8_0", "lm4"),
    ("lm4", "tq3_0"),
    ("q5_1", NATIVE),
    (NATIVE, "q4_0"),
    ("f16", "f16"),
    ("bf16", "lm4"),
]


@pytest.fixture(scope="module")
def ops():
    return CudaOps()


def spec_of(K, D, keys, values, window=None, sinks=0):
    turn = Packing(rotate_keys=keys not in (NATIVE, "q8_0"), rotate_values=values in ("lm2", "lm3", "lm4", "tq3_0"))
    return KVSpec(K, D, D, window, sinks, keys, values, turn)


@pytest.mark.parametrize("T", [1, 3, 140])
@pytest.mark.parametrize("D", [64, 96, 128, 256])
@pytest.mark.parametrize("format_", KEYS)
def test_bytes(format_, D, T, ops):
    """Rows are those of NumPy, bit for bit: of a step that decodes, and of a prompt. A vector of zeros stays zeros."""
    K, random = 3, np.random.default_rng(5)
    k, v = outliers(random, T, K, D), outliers(random, T, K, D)
    k[0, 1] = 0
    state = ops.new_state([{"kv": spec_of(K, D, format_, format_ if format_ in PACKED else "tq3_0")}], 200)
    kv = state[0].kv
    ops.write_kv(array(ops, k), array(ops, v), kv, Step.chain(np.zeros(T, np.int32), 0))
    for x, plane in ((k, kv.keys), (v, kv.values)):
        format_ = FORMATS[plane.format]
        expected = format_.encode(rotate(x) if plane.rotated else x).transpose(1, 0, 2)
        rows = rows_of(ops, plane, K, range(T))
        if x is k:  # whose smallest value is 0 or -0
            assert not format_.decode(rows[1, 0], D).any()
            rows[1, 0] = expected[1, 0]
        assert np.array_equal(rows, expected)


@pytest.mark.parametrize(("H", "K", "D"), [(6, 2, 64), (12, 2, 128), (6, 1, 256)])
@pytest.mark.parametrize("pair", [*((f, f) for f in PACKED), *MIXED], ids="/".join)
def test_attention(pair, H, K, D, ops):
    """Against NumPy over equal codes: a prompt, a chain, a tree, and what a committed path leaves."""
    random, spec = np.random.default_rng(7), [{"kv": spec_of(K, D, *pair)}]
    numpy = NumpyOps()
    states = ops.new_state(spec, 300), numpy.new_state(spec, 300)
    tree = Step.tree(np.zeros(6, np.int32), [PAST, 0, 0, 1, PAST, 2], 151)
    for step, path in (
        (Step.chain(np.zeros(150, np.int32), 0), range(150)),
        (Step.chain(np.zeros(1, np.int32), 150), [0]),
        (tree, [0, 2, 5]),
        (Step.chain(np.zeros(20, np.int32), 154), []),
    ):
        T = len(step)
        rows = [random.normal(size=(T, H, D)), *(outliers(random, T, K, D) for _ in range(2))]
        out, expected = (attend(on, state, rows, step) for on, state in zip((ops, numpy), states, strict=True))
        for state in states:
            state.commit(path)
        assert np.abs(out - expected).max() <= 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize("past", [0, 50, 64, 250])
@pytest.mark.parametrize(
    "spec",
    [
        (6, 2, 64, ("lm4", "lm4"), None),
        (6, 2, 128, ("q8_0", "q8_0"), None),
        (24, 4, 256, ("tq3_0", "tq3_0"), None),
        (6, 2, 128, ("turboquant", "tq3_0"), None),
        (8, 2, 64, ("q8_0", "q4_0"), 100),
    ],
    ids=lambda s: f"{s[2]}-{'-'.join(s[3])}-{s[4]}",
)
def test_rows_do_not_see_their_neighbours(spec, past, ops):
    """A row of a tree has the bits of plain decoding, in 16 rows a CTA and in 32, and so do the rows of its path."""
    H, K, D, pair, window = spec
    random, layer = np.random.default_rng(11), [{"kv": spec_of(K, D, *pair, window, 5 if window else 0)}]
    n, parents = 13, [PAST, 0, 0, 1, 3, 4, 5, 2, 6, PAST, 8, 10, 11]
    tree = Step.tree(np.zeros(n, np.int32), parents, past)
    before = [outliers(random, past, heads, D) for heads in (H, K, K)]
    rows = [outliers(random, n, heads, D) for heads in (H, K, K)]

    def state():
        made = ops.new_state(layer, 600)
        for start in range(0, past, 60):
            part = [x[start : start + 60] for x in before]
            attend(ops, made, part, Step.chain(np.zeros(len(part[0]), np.int32), start), window)
            made.commit(range(len(part[0])))
        return made

    one, other = state(), state()
    out = attend(ops, one, rows, tree, window)
    path = np.flatnonzero(tree.visible[12])
    for at, row in enumerate(path):
        alone = attend(
            ops, other, [x[row : row + 1] for x in rows], Step.chain(np.zeros(1, np.int32), past + at), window
        )
        assert np.array_equal(alone[0], out[row])
        other.commit([0])
    one.commit(path)
    later = [outliers(random, 2, heads, D) for heads in (H, K, K)]
    step = Step.chain(np.zeros(2, np.int32), past + len(path))
    assert np.array_equal(attend(ops, one, later, step, window), attend(ops, other, later, step, window))


@pytest.mark.parametrize("pair", [("q8_0", "q8_0"), ("q8_0", "lm4")], ids="/".join)
def test_windows(pair, ops):
    """A ring of packed rows over three wraps, prompts longer than it among them, as NumPy attends."""
    H, K, D, window = 4, 2, 64, 70
    random, spec = np.random.default_rng(13), [{"kv": spec_of(K, D, *pair, window, 5)}]
    numpy = NumpyOps()
    states = ops.new_state(spec, 2000), numpy.new_state(spec, 2000)
    at = 0
    for T in (150, 1, 3, 136, 200, 1, 2, 300, 1):
        rows = [random.normal(size=(T, H, D)), *(outliers(random, T, K, D) for _ in range(2))]
        step = Step.chain(np.zeros(T, np.int32), at)
        out, expected = (attend(on, state, rows, step, window) for on, state in zip((ops, numpy), states, strict=True))
        assert np.abs(out - expected).max() <= 2e-3 * np.abs(expected).max(), T
        at += T
        for state in states:
            state.commit(range(T))


class Latents:
    """Rows of a latent cache, attended to in either form."""

    H, N, P, V = 3, 24, 16, 20

    def __init__(self, R, format_):
        self.R, self.random = R, np.random.default_rng(23)
        self.spec = [{"kv": LatentSpec(R, self.P, format_, format_ != "q8_0")}]
        self.k_up, self.v_up = (self.normal(self.H, *shape) / 8 for shape in ((R, self.N), (self.V, R)))

    def normal(self, *shape):
        return self.random.normal(size=shape).astype(np.float32)

    def rows(self, T, wide):
        return (
            self.normal(T, self.H, wide),
            self.normal(T, self.H, self.P),
            outliers(self.random, T, self.R),
            self.normal(T, self.P),
        )

    def latent(self, ops, state, rows, step):
        if isinstance(ops, CudaOps):
            ops.context.arena.reset()
        arrays = [array(ops, x) for x in rows]
        return np.array(ops.read(ops.latent_attention(*arrays, state[0].kv, step, 0.1)))

    def expanded(self, ops, state, rows, step):
        if isinstance(ops, CudaOps):
            ops.context.arena.reset()
        arrays = [array(ops, x) for x in rows]
        ups = LatentWeights(*(ops.weight(dense("up", w)) for w in (self.k_up, self.v_up)))
        return np.array(ops.read(ops.expanded_attention(*arrays, ups, state[0].kv, step, 0.1)))


@pytest.mark.parametrize("R", [64, 128, 512])
@pytest.mark.parametrize("format_", ["bf16", "q8_0", "q4_0", "lm4", "tq3_0"])
def test_latents(format_, R, ops):
    """Against NumPy over equal codes: prompts in both forms, a chain, a tree, and what a committed path leaves."""
    made, numpy = Latents(R, format_), NumpyOps()
    states = ops.new_state(made.spec, 300), numpy.new_state(made.spec, 300)
    tree = Step.tree(np.zeros(6, np.int32), [PAST, 0, 0, 1, PAST, 2], 142)
    for step, path, form in (
        (Step.chain(np.zeros(140, np.int32), 0), range(140), made.expanded),
        (Step.chain(np.zeros(2, np.int32), 140), [0, 1], made.latent),
        (tree, [0, 2, 5], made.latent),
        (Step.chain(np.zeros(140, np.int32), 145), [], made.latent),
    ):
        rows = made.rows(len(step), made.N if form == made.expanded else R)
        out, expected = (form(on, state, rows, step) for on, state in zip((ops, numpy), states, strict=True))
        for state in states:
            state.commit(path)
        tolerance = 1e-2 if form == made.expanded else 2e-3
        assert np.abs(out - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("format_", ["f16", "lm4"])
@pytest.mark.parametrize("expanded", [64, 192])
def test_latents_of_a_prompt_in_stretches(expanded, format_, ops, monkeypatch):
    """A long step that expands few positions at a time, of pages here, has the bits of one that expands all at once.

    Matrices choose columns, so that their products have the same bits however many rows there are.
    """
    made = Latents(128, format_)
    made.k_up, made.v_up = (np.zeros_like(up) for up in (made.k_up, made.v_up))
    for h in range(made.H):
        made.k_up[h, 5 * np.arange(made.N) + h, np.arange(made.N)] = 0.5
        made.v_up[h, np.arange(made.V), 3 * np.arange(made.V) + h] = 1
    pool = ops.new_pool(made.spec, 2, 500)
    states = ops.new_state(made.spec, 500), pool.new_state()
    for past, count in ((0, 150), (150, 210)):
        rows, step = made.rows(count, made.N), Step.chain(np.zeros(count, np.int32), past)
        whole = made.expanded(ops, states[0], rows, step)
        with monkeypatch.context() as patched:
            patched.setattr("cuda_backend.latent.EXPANDED", expanded)
            parts = made.expanded(ops, states[1], rows, step)
        assert np.array_equal(parts, whole)
        for state in states:
            state.commit(range(count))


def test_latents_in_float16_by_name(ops):
    """A latent of 48, which no format but float16 stores, in one plane with its roped keys."""
    made = Latents(48, "f16")
    made.spec = [{"kv": LatentSpec(48, made.P, "f16")}]
    rows, step = made.rows(3, 48), Step.chain(np.zeros(3, np.int32), 0)
    out, expected = (made.latent(on, on.new_state(made.spec, 100), rows, step) for on in (ops, NumpyOps()))
    assert np.abs(out - expected).max() <= 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize("past", [0, 50, 64])
@pytest.mark.parametrize("format_", ["q8_0", "lm4"])
def test_rows_of_latents_do_not_see_their_neighbours(format_, past, ops):
    """A row of a tree has the bits of plain decoding."""
    made, parents = Latents(128, format_), [PAST, 0, 0, 1, 3, 4, 5, 2, 6, PAST, 8, 10, 11]
    before, rows = made.rows(past, 128), made.rows(13, 128)

    def state():
        filled = ops.new_state(made.spec, 300)
        if past:
            made.latent(ops, filled, before, Step.chain(np.zeros(past, np.int32), 0))
            filled.commit(range(past))
        return filled

    tree = Step.tree(np.zeros(13, np.int32), parents, past)
    out, other = made.latent(ops, state(), rows, tree), state()
    for at, row in enumerate(np.flatnonzero(tree.visible[12])):
        step = Step.chain(np.zeros(1, np.int32), past + at)
        assert np.array_equal(made.latent(ops, other, [x[row : row + 1] for x in rows], step)[0], out[row])
        other.commit([0])


def test_norm_and_rope_before_the_bytes(ops):
    """Keys are normed, turned and rotated in the launch that stores them: as NumPy, but for the last bits of a sine."""
    H, K, D, T = 6, 2, 128, 5
    random, spec = np.random.default_rng(17), [{"kv": spec_of(K, D, "lm4", "lm4")}]
    rope, weight = Rope(tuple(0.3**i for i in range(32))), random.normal(size=D).astype(np.float32)
    q, k, v = (random.normal(size=(T, heads, D)).astype(np.float32) for heads in (H, K, K))
    outs = []
    for on in (ops, NumpyOps()):
        step, state = Step.chain(np.zeros(T, np.int32), 0), on.new_state(spec, 100)
        positions = ops.context.on_device(step.positions) if on is ops else step.positions
        norm = on.vector(dense("norm", weight))
        turned = [on.norm_rope(array(on, x), norm, positions, rope, 1e-6) for x in (q, k)]
        outs.append(on.read(on.attention(*turned, array(on, v), state[0].kv, step, D**-0.5)))
    assert np.abs(outs[0] - outs[1]).max() <= 2e-2 * np.abs(outs[1]).max()


def test_bytes_of_a_state(ops):
    """A state takes what the formats take, for its capacity and the rows of a step, and says so before it is built."""
    for (keys, values), D in itertools.product([("q8_0", "lm4"), ("tq3_0", "tq3_0")], (128, 256)):
        spec = [{"kv": spec_of(4, D, keys, values)}] * 2
        state = ops.new_state(spec, 1000)
        per_row = 2 * 4 * sum(FORMATS[f].row_bytes(D) for f in (keys, values))
        assert state.nbytes == 1152 * per_row == ops.held_state_bytes(spec, 1000, 64)


def test_refusals(ops):
    """Formats without kernels and widths that differ are refused."""
    assert {("q8_0", "q8_0"), ("lm4", "tq3_0"), ("bf16", "bf16"), ("turboquant", "tq3_0")} <= PAIRS
    coded = packed([{"kv": LatentSpec(128, 64)}], CacheOptions("turboquant"))
    with pytest.raises(
        UsageError, match="cuda backend has no cache of keys in turboquant and values in turboquant; sup"
    ):
        check_pairs(coded, ops.name, ops.cache_pairs)
    with pytest.raises(BimetalError, match="heads of 80 in bf16 have no CUDA kernel"):
        ops.new_state([{"kv": KVSpec(2, 80, 80, None, 0, "bf16", "bf16")}], 100)
    with pytest.raises(BimetalError, match="keys are 128 and values 64 wide"):
        ops.new_state([{"kv": KVSpec(2, 128, 64)}], 100)


def test_strided_heads(ops):
    """Heads that lie apart, as products leave them, are encoded as heads in a row are."""
    K, D, T, random = 2, 64, 4, np.random.default_rng(19)
    wide = random.normal(size=(T, 2 * K, D)).astype(np.float32)
    state = ops.new_state([{"kv": spec_of(K, D, "q4_0", "lm3")}], 100)
    both = array(ops, wide.reshape(T, -1))
    k, v = (both[:, i * K * D : (i + 1) * K * D].reshape(T, K, D) for i in range(2))
    assert isinstance(k, Array)
    ops.write_kv(k, v, state[0].kv, Step.chain(np.zeros(T, np.int32), 0))
    for x, plane, name in ((wide[:, :K], state[0].kv.keys, "q4_0"), (wide[:, K:], state[0].kv.values, "lm3")):
        expected = FORMATS[name].encode(rotate(x)).transpose(1, 0, 2)
        assert np.array_equal(rows_of(ops, plane, K, range(T)), expected)
