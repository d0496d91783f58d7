"""Exact tokens and calibrated keys beside a compressed cache on a GPU, as NumPy defines them."""

from dataclasses import replace

import numpy as np
import pytest

from common.joined_step import JoinedStep
from common.kv_cache import CacheOptions, packed
from common.kv_formats import FORMATS
from common.reference import NumpyOps
from common.step import PAST, Step
from common.storage import NATIVE, KVSpec

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cases import array  # noqa: E402
from cuda_rows import attend, on_hopper, on_multiprocessors, outliers, rows_of  # noqa: E402

from cuda_backend import replay  # noqa: E402
from cuda_backend.attention import pieces_launches  # noqa: E402
from cuda_backend.caches.formats import KEYS, PACKED  # noqa: E402
from cuda_backend.exact import open_exact  # noqa: E402
from cuda_backend.layout import ONE_ROW_CODES  # noqa: E402
from cuda_backend.ops import CudaOps  # noqa: E402

pytestmark = pytest.mark.gpu
FEW = [("lm4", "lm4"), ("tq3_0", "tq3_0"), ("q8_0", "lm4"), ("q4_0", "q5_1")]
ONE_ROW = [*FEW, *((f, f) for f in sorted(ONE_ROW_CODES - {"lm4", "tq3_0"})), ("lm4", "q4_0")]
EVERY = [(k, v) for k in (NATIVE, *KEYS) for v in (NATIVE, *PACKED) if (k, v) not in [(NATIVE, NATIVE), *FEW]]


@pytest.fixture(scope="module")
def ops():
    return CudaOps()


def spec_of(pair, K=2, D=64, **packing):
    options = CacheOptions(*pair, **{"calibration": 6, "sinks": 2, "recent": 3, **packing})
    return packed([{"kv": KVSpec(K, D, D)}], options)


def rows_at(places, heads, D):
    """q, k and v of tokens: those of a token are the same, whenever it is read.

    They are numbers of float16, so that keys have the same statistics on all backends, and the same codes.
    """
    made = [np.random.default_rng([7, int(place)]) for place in places]
    q, k, v = (np.stack([outliers(m, n, D) for m in made]) for n in heads)
    return [x.astype(np.float16).astype(np.float32) for x in (q, k, v)]


class Read:
    """A sequence on one backend: tokens are numbers, and stand for the same rows everywhere."""

    def __init__(self, ops, spec, H=4, state=None, logits=None):
        self.ops, self.spec, self.state, self.logits = ops, spec, state or ops.new_state(spec, 1200), logits
        self.heads, self.D = (H, spec[0]["kv"].kv_heads, spec[0]["kv"].kv_heads), spec[0]["kv"].key_dim

    def step(self, step):
        rows = rows_at(step.tokens, self.heads, self.D)
        return attend(self.ops, self.state, rows, step, logits=self.logits)

    def chain(self, tokens, keep=True):
        tokens = np.asarray(tokens, np.int32)
        out = self.step(Step.chain(tokens, self.state.length, self.state.slot))
        self.state.commit(range(len(tokens)) if keep else [])
        return out


def near(out, expected, tolerance=5e-3):
    """Queries are rounded to float16 after they were equalised, by statistics of few tokens here."""
    assert np.abs(out - expected).max() <= tolerance * np.abs(expected).max()


def agrees_with_numpy(ops, pair, D=64, logits=None, **packing):
    """Chains of any length, a tree, what a path of it leaves, and a prompt after them."""
    cuda, numpy = (Read(on, spec_of(pair, D=D, **packing), logits=logits) for on in (ops, NumpyOps()))
    token = 0
    for count in (3, 1, 9, 1, 1, 140, 20, 1):
        near(*(read.chain(range(token, token + count)) for read in (cuda, numpy)))
        token += count
    tree = Step.tree(token + np.arange(6, dtype=np.int32), [PAST, 0, 0, 1, PAST, 2], token)
    near(*(read.step(tree) for read in (cuda, numpy)))
    for read in (cuda, numpy):
        read.state.commit([0, 2, 5])
    near(*(read.chain(range(500, 640)) for read in (cuda, numpy)))
    near(*(read.chain([900]) for read in (cuda, numpy)))


@pytest.mark.parametrize("pair", FEW, ids="/".join)
def test_as_numpy(pair, ops):
    agrees_with_numpy(ops, pair)


@pytest.mark.parametrize("pair", FEW[:2], ids="/".join)
def test_as_numpy_with_sink_logits(pair, ops):
    agrees_with_numpy(ops, pair, logits=np.array([-30.0, 0.0, 3.0, 8.0]))


@pytest.mark.parametrize("D", [128, 256])
def test_as_numpy_of_wide_heads(D, ops):
    agrees_with_numpy(ops, ("lm4", "tq3_0"), D)


@pytest.mark.parametrize("pair", EVERY, ids="/".join)
def test_every_pair_as_numpy(pair, ops):
    agrees_with_numpy(ops, pair)


@pytest.mark.parametrize(
    "packing",
    [
        {"calibration": 150, "sinks": 4, "recent": 128},
        {"calibration": 0, "sinks": 70, "recent": 0},
        {"calibration": 0, "sinks": 0, "recent": 100},
        {"calibration": 13, "sinks": 0, "recent": 0},
        {"calibration": 100, "sinks": 130, "recent": 70},
    ],
    ids=lambda packing: "-".join(map(str, packing.values())),
)
def test_counts(packing, ops):
    """Prompts and chains pass the tokens that calibrate; sinks, recent tokens or neither; more than a tile of each."""
    agrees_with_numpy(ops, ("lm4", "lm3"), **packing)


@pytest.mark.parametrize("past", [0, 4, 7, 60, 130])
@pytest.mark.parametrize("pair", [("lm4", "lm4"), ("q8_0", "tq3_0")], ids="/".join)
@pytest.mark.parametrize("counts", [(6, 2, 3), (62, 0, 2)], ids=str)
def test_rows_of_a_tree_have_the_bits_of_plain_decoding(counts, pair, past, ops):
    """Also where a path passes the tokens that calibrate: each path has statistics of its own."""
    spec = spec_of(pair, **dict(zip(("calibration", "sinks", "recent"), counts, strict=True)))
    parents = [PAST, 0, 0, 1, 3, 4, 5, 2, 6, PAST, 8, 10, 11]
    tokens = 300 + np.arange(len(parents), dtype=np.int32)
    tree = Step.tree(tokens, parents, past)
    one = Read(ops, spec, H=12)
    if past:
        one.chain(range(past))
    before = one.state.snapshot()
    out = one.step(tree)
    for leaf in (12, 7, 9):
        path = np.flatnonzero(tree.visible[leaf])
        alone = Read(ops, spec, H=12)
        if past:
            alone.chain(range(past))
        for row in path:
            assert np.array_equal(alone.chain([tokens[row]])[0], out[row])
        one.state.restore(before)
        one.step(tree)
        one.state.commit(path)
        for count in (2, 1, 70):
            assert np.array_equal(one.chain(range(400, 400 + count)), alone.chain(range(400, 400 + count)))
        one.state.restore(before)


@pytest.mark.parametrize("rows", [3, 130])
@pytest.mark.parametrize("past", [70, 300])
@pytest.mark.parametrize(("H", "K", "D"), [(6, 1, 256), (8, 2, 128)])
@pytest.mark.parametrize("counts", [(6, 2, 3), (20, 70, 130)], ids=str)
@pytest.mark.parametrize("pair", ONE_ROW, ids="/".join)
def test_one_row_has_the_bits_of_many(pair, counts, H, K, D, past, rows, ops):
    """Tiles are pieces by themselves in steps of few rows; one of them may hold both codes and exact rows."""
    packing = dict(zip(("calibration", "sinks", "recent"), counts, strict=True))
    one, many = (Read(ops, spec_of(pair, K, D, **packing), H) for _ in range(2))
    for read in (one, many):
        read.chain(range(past))
    for token in range(500, 503):
        alone = one.chain([token])
        others = np.array([token, *range(9, 8 + rows)], np.int32)
        among = many.step(Step.chain(others, many.state.length, many.state.slot))
        many.state.commit([0])
        assert np.isfinite(alone).all()
        assert np.array_equal(alone[0], among[0])


@pytest.mark.parametrize("pair", FEW, ids="/".join)
def test_larger_blocks_after_a_long_past(pair, ops, monkeypatch):
    """Rows of two sequences that CTAs of 64 rows compute where one past is long have the bits of plain decoding."""
    monkeypatch.setattr(replay, "LONG_PAST", 100)
    spec = spec_of(pair, 2, 128, calibration=20, sinks=70, recent=30)
    pool = ops.new_pool(spec, 2, 1200)
    many, alone = (
        [Read(ops, spec, 8, state) for state in states]
        for states in ((pool.new_state(), pool.new_state()), (None, None))
    )
    for i, past in enumerate((300, 90)):
        for read in (many[i], alone[i]):
            read.chain(range(past))
    steps = [Step.chain(np.arange(500, 514, dtype=np.int32), read.state.length) for read in many]
    joined = JoinedStep.of(steps, np.concatenate([step.tokens for step in steps]), [r.state.slot for r in many])
    pool.note_step(joined)
    out = attend(ops, pool, rows_at(joined.tokens, many[0].heads, 128), joined)
    for read, at in zip(alone, joined.runs, strict=True):
        assert np.array_equal(np.concatenate([read.chain([token]) for token in range(500, 514)]), out[at])


@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize("counts", [(20, 70, 30), (0, 0, 100), (0, 150, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize(("H", "K", "D"), [(24, 4, 256), (24, 2, 128)])
@pytest.mark.parametrize("pair", [*FEW, ("bf16", "lm2"), (NATIVE, "q8_0")], ids="/".join)
def test_products_of_warp_groups(pair, H, K, D, counts, multiprocessors, ops, monkeypatch):
    """Rows of trees after a long past have the bits of plain decoding.

    tall.cu and wide.cu compute the tiles without exact rows. After groups of several tiles, split.cu goes on where
    they end within one.
    """
    monkeypatch.setattr(replay, "LONG_PAST", 100)
    monkeypatch.setattr(ops, "context", on_multiprocessors(on_hopper(ops.context), multiprocessors))
    spec = spec_of(pair, K, D, **dict(zip(("calibration", "sinks", "recent"), counts, strict=True)))
    for past, n in ((300, 9), (448, 22)):
        many, alone = Read(ops, spec, H), Read(ops, spec, H)
        for read in (many, alone):
            for start in range(0, past, 60):
                read.chain(range(start, min(past, start + 60)))
        tree = Step.tree(500 + np.arange(n, dtype=np.int32), [PAST, *(max(PAST, t - 3) for t in range(n - 1))], past)
        step, kv = ops.context.step_of(tree, many.state[0].kv.store), many.state[0].kv
        exact = open_exact(ops.context, kv, n, H, step)
        launches = pieces_launches(ops.context.card, kv, replace(step, long_past=True), H // K, exact, 0)
        assert [x.name for x in launches] == ["wide" if (D, n) == (256, 22) else "tall", "split"]
        out = many.step(tree)
        for row in np.flatnonzero(tree.visible[n - 1]):
            assert np.array_equal(alone.chain(tree.tokens[row : row + 1])[0], out[row])


def test_products_of_warp_groups_of_several_sequences(ops, monkeypatch):
    """Rows of two sequences, one with a long past, have the bits of plain decoding alone."""
    monkeypatch.setattr(replay, "LONG_PAST", 100)
    monkeypatch.setattr(ops, "context", on_multiprocessors(on_hopper(ops.context), 1))
    spec = spec_of(("lm4", "lm4"), 1, 256, calibration=0, sinks=3, recent=100)
    pool = ops.new_pool(spec, 2, 1200)
    many, alone = (
        [Read(ops, spec, 6, state) for state in states]
        for states in ((pool.new_state(), pool.new_state()), (None, None))
    )
    for i, past in enumerate((300, 90)):
        for read in (many[i], alone[i]):
            for start in range(0, past, 60):
                read.chain(range(start, min(past, start + 60)))
    steps = [Step.chain(np.arange(500, 506, dtype=np.int32), read.state.length) for read in many]
    joined = JoinedStep.of(steps, np.concatenate([step.tokens for step in steps]), [r.state.slot for r in many])
    pool.note_step(joined)
    out = attend(ops, pool, rows_at(joined.tokens, many[0].heads, 256), joined)
    for read, at in zip(alone, joined.runs, strict=True):
        assert np.array_equal(np.concatenate([read.chain([token]) for token in range(500, 506)]), out[at])


@pytest.mark.parametrize("past", [3, 6, 40, 200])
def test_snapshots(past, ops):
    """What was read after a snapshot leaves no trace: neither rows nor statistics, of chains or of a long step."""
    spec = spec_of(("lm4", "lm4"), calibration=5, recent=20)
    one, alone = Read(ops, spec), Read(ops, spec)
    for read in (one, alone):
        read.chain(range(past))
    before = one.state.snapshot()
    for count in (9, 150, 1):
        one.chain(range(700, 700 + count))
    one.state.restore(before)
    one.chain(range(800, 950), keep=False)
    one.chain(range(800, 830), keep=False)
    for count in (1, 3, 200, 1):
        assert np.array_equal(one.chain(range(60, 60 + count)), alone.chain(range(60, 60 + count)))


def test_bytes_of_keys(ops):
    """Codes of calibrated keys are those of NumPy, bit for bit."""
    spec = spec_of(("lm4", "q8_0"), calibration=6)
    cuda, numpy = (Read(on, spec) for on in (ops, NumpyOps()))
    for read in (cuda, numpy):
        read.chain(range(6))
        read.chain(range(6, 26))
    plane, held = cuda.state[0].kv.keys, numpy.state[0].kv.codes.planes[0]
    assert np.array_equal(rows_of(ops, plane, 2, range(6, 26)).transpose(1, 0, 2), held[6:26])


def test_keys_with_outliers(ops):
    """Keys of a few large channels, of little use to queries: calibration brings the attention near the exact one."""
    T, D, random = 900, 128, np.random.default_rng(1234)
    x = random.standard_normal((T, D)).astype(np.float32)
    x[:, [3, 17, 64, 101]] *= 20
    x[:, 3] += 60
    x[:, 17] -= 60
    sigma = x.std(axis=0)
    q = (0.35 * x[random.integers(0, T, T)] / sigma**2 + random.standard_normal((T, D)) / sigma).astype(np.float32)
    logits = q @ x[512:].T
    q *= 2 / logits.std() * D**0.5
    v = np.eye(D, dtype=np.float32)[np.arange(T) % D]  # the probability of groups of tokens
    losses = {}
    for name, pair, calibration in (
        ("lm4", ("lm4", NATIVE), 512),
        ("tq3_0", ("tq3_0", NATIVE), 512),
        ("bare", ("tq3_0", NATIVE), 0),
        ("exact", (NATIVE, NATIVE), 0),
    ):
        spec = packed(
            [{"kv": KVSpec(1, D, D)}],
            CacheOptions(*pair, calibration=calibration, sinks=0, recent=0),
        )
        state = ops.new_state(spec, T)
        for start, end in ((0, 512), (512, T)):
            rows = [y[start:end, None] for y in (q, x, v)]
            out = attend(ops, state, rows, Step.chain(np.zeros(end - start, np.int32), start))
            state.commit(range(end - start))
        losses[name] = np.maximum(out[:, 0], 1e-9)
    exact = losses.pop("exact")
    kl = {name: float((exact * np.log(exact / p)).sum(axis=-1).mean()) for name, p in losses.items()}
    assert kl["lm4"] <= 0.02, kl
    assert kl["tq3_0"] <= 0.08, kl
    assert kl["bare"] > 0.3, kl


def test_bytes_of_a_state(ops):
    """Codes for the capacity, the ring of exact keys, queries and values twice, and the statistics: as predicted."""
    spec = spec_of(("lm4", "tq3_0"), D=128, calibration=512, sinks=4, recent=128) * 2
    state = ops.new_state(spec, 4000)
    rows, exact = 4160, 512 + 320
    codes = rows * 2 * sum(FORMATS[f].row_bytes(128) for f in ("lm4", "tq3_0"))
    assert state.nbytes == 2 * (codes + 2 * exact * 3 * 2 * 256 + 2 * 4 * 2 * 128)
    assert state.nbytes == ops.held_state_bytes(spec, 4000, 64)


def test_float16_by_name_keeps_nothing_beside_it(ops):
    """Rows of float16 are exact themselves."""
    options = CacheOptions("f16", "f16", sinks=4, recent=8)
    spec = packed([{"kv": KVSpec(2, 64, 64)}], options)
    plain = [{"kv": replace(spec[0]["kv"], packing=replace(spec[0]["kv"].packing, sinks=0, recent=0))}]
    assert ops.new_state(spec, 100).nbytes == ops.new_state(plain, 100).nbytes


@pytest.mark.parametrize("calibration", [0, 6, 20])
def test_keys_and_values_are_written_alone(calibration, ops):
    """`write_kv` leaves what attention does to queries of zeros, of a chain and of a long step."""
    spec = spec_of(("lm4", "lm4"), calibration=calibration)
    one, other = Read(ops, spec), Read(ops, spec)
    at = 0
    for count in (4, 9, 150):
        tokens = np.arange(at, at + count, dtype=np.int32)
        q, k, v = rows_at(tokens, other.heads, 64)
        step = Step.chain(tokens, one.state.length)
        attend(ops, other.state, [np.zeros_like(q), k, v], step)
        other.state.commit(range(count))
        ops.context.arena.reset()
        ops.write_kv(array(ops, k), array(ops, v), one.state[0].kv, step)
        one.state.commit(range(count))
        at += count
    assert np.array_equal(one.chain([at]), other.chain([at]))


@pytest.mark.parametrize("packing", [{}, {"calibration": 0, "sinks": 1}, {"recent": 500}], ids=str)
def test_sequences_of_a_pool(packing, ops):
    """Each has the bits of running alone, before, at and after the keys that calibrate."""
    spec = spec_of(("lm4", "q8_0"), **packing)
    pool = ops.new_pool(spec, 3, 1200)
    many = [Read(ops, spec, state=pool.new_state()) for _ in range(3)]
    alone = [Read(ops, spec) for _ in range(3)]
    for i, count in enumerate((0, 4, 160)):
        if count:
            assert np.array_equal(*(reads[i].chain(range(count)) for reads in (many, alone)))
    for turn, counts in enumerate([(1, 3, 2), (4, 1, 5), (7, 2, 1), (2, 90, 3)]):
        steps = []
        for i, count in enumerate(counts):
            tokens = 100 * turn + 10 * i + np.arange(count, dtype=np.int32)
            steps.append(Step.tree(tokens, [max(PAST, t - 2) for t in range(count)], many[i].state.length))
        joined = JoinedStep.of(steps, np.concatenate([step.tokens for step in steps]), [r.state.slot for r in many])
        pool.note_step(joined)
        out = attend(ops, pool, rows_at(joined.tokens, many[0].heads, 64), joined)
        for i, (step, at) in enumerate(zip(steps, joined.runs, strict=True)):
            assert np.array_equal(out[at], alone[i].step(step)), f"sequence {i}, turn {turn}"
            path = np.flatnonzero(step.visible[-1])
            for read in (many[i], alone[i]):
                read.state.commit(path)
    assert np.array_equal(*(reads[1].chain(range(600, 750)) for reads in (many, alone)))
    for one, other in zip(many, alone, strict=True):
        saved, expected = one.state.save(), other.state.save()
        assert all(np.array_equal(saved[name], expected[name]) for name in expected)
    slot = many[1].state.slot
    del one, read
    many[1] = None
    fresh, new = Read(ops, spec, state=pool.new_state()), Read(ops, spec)
    assert fresh.state.slot == slot
    for count in (3, 9):
        assert np.array_equal(*(read.chain(range(count)) for read in (fresh, new)))
