"""Rows of attention in trees have the bits of plain decoding."""

import dataclasses

import numpy as np
import pytest
from cases import TOLERANCE

from common.joined_step import JoinedStep
from common.kv_cache import CacheOptions, packed
from common.ops import Rope
from common.reference import NumpyOps
from common.step import MAX_DECODE_ROWS, PAST, Step
from common.storage import KVSpec, LatentSpec

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_rows import f32, on_hopper, on_multiprocessors, poisoned_ops, rows_on  # noqa: E402

from cuda_backend import replay  # noqa: E402
from cuda_backend.arrays import Array  # noqa: E402
from cuda_backend.attention import pieces_launches  # noqa: E402
from cuda_backend.exact import NO_EXACT  # noqa: E402
from cuda_backend.latent import latent_launches  # noqa: E402
from cuda_backend.layout import takes_64_rows  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ops():
    return poisoned_ops()


class Attention:
    """Layers to compare rows of: random queries, keys and values by node of a tree."""

    def __init__(self, ops, H: int, K: int, D: int, spec, window: int | None = None, scale: float = 0.3):
        self.ops, self.spec, self.window, self.scale, self.random = ops, spec, window, scale, np.random.default_rng(3)
        is_latent = isinstance(spec, LatentSpec)
        self.widths = ((H, D), (H, spec.rope_dim), (D,), (spec.rope_dim,)) if is_latent else ((H, D), (K, D), (K, D))
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
            return self.ops.read(self.ops.latent_attention(*arrays, state[0].kv, step, self.scale))
        return self.ops.read(self.ops.attention(*arrays, state[0].kv, step, self.scale, self.window))

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
        (16, 2, 128, KVSpec(2, 128, 128), None),
        (8, 2, 128, KVSpec(2, 128, 128, 100, 5), 100),
        (6, 1, 256, KVSpec(1, 256, 256), None),
        (3, 1, 16, LatentSpec(16, 8), None),
        (40, 1, 48, LatentSpec(48, 8), None),
    ],
    ids=lambda layer: f"{layer[0]}.{layer[1]}.{layer[2]}-{type(layer[3]).__name__}-{layer[4]}",
)
def test_rows_of_trees_are_plain(layer, past, n, ops):
    """Rows of trees have the bits of plain decoding, whatever their siblings and wherever they lie in the cache."""
    Attention(ops, *layer).check(past, n)


def attend_to(ops, state, rows, step, window=None) -> np.ndarray:
    ops.context.arena.reset()
    arrays = [rows_on(ops, x.reshape(len(x), -1)).reshape(x.shape) for x in rows]
    return ops.read(ops.attention(*arrays, state[0].kv, step, 0.3, window))


@pytest.mark.parametrize("lengths", [(300, 5, 64), (1, 700, 1100, 40, 450, 300)], ids=len)
@pytest.mark.parametrize(("H", "K", "D"), [(8, 2, 64), (6, 2, 128), (6, 1, 256), (9, 1, 128)])
@pytest.mark.parametrize("cache", ["f16", "window", "q8_0", "lm4"])
def test_one_row_of_each_sequence(cache, H, K, D, lengths, ops):
    """A row of each of many sequences has the bits of its own sequence alone, whoever shares the multiprocessors."""
    spec = [{"kv": KVSpec(K, D, D, 100, 5) if cache == "window" else KVSpec(K, D, D)}]
    if cache not in ("f16", "window"):
        spec = packed(spec, CacheOptions(cache, cache, sinks=2, recent=30, calibration=6))
    random, window = np.random.default_rng(5), 100 if cache == "window" else None
    pool = ops.new_pool(spec, len(lengths), 1200)
    many, alone = [pool.new_state() for _ in lengths], [ops.new_state(spec, 1200) for _ in lengths]

    def attend(state, rows, step):
        return attend_to(ops, state, rows, step, window)

    def rows_of(n):
        return [random.normal(size=(n, heads, D)).astype(np.float32) for heads in (H, K, K)]

    for own, other, length in zip(many, alone, lengths, strict=True):
        for start in range(0, length, 130):
            n = min(130, length - start)
            rows = rows_of(n)
            for state in (own, other):
                step = Step.chain(np.zeros(n, np.int32), start, state.slot)
                pool.note_step(step) if state is own else None
                attend(pool if state is own else other, rows, step)
                state.commit(range(n))
    for _ in range(2):
        steps = [Step.chain(np.zeros(1, np.int32), state.length) for state in many]
        joined = JoinedStep.of(steps, np.zeros(len(many), np.int32), [state.slot for state in many])
        rows = rows_of(len(many))
        pool.note_step(joined)
        out = attend(pool, rows, joined)
        for i, (own, other) in enumerate(zip(many, alone, strict=True)):
            single = attend(other, [x[i : i + 1] for x in rows], Step.chain(np.zeros(1, np.int32), other.length))
            assert np.array_equal(out[i], single[0]), f"sequence {i}"
            own.commit([0]), other.commit([0])


@pytest.mark.parametrize(("H", "K", "D"), [(8, 1, 128), (12, 2, 256)])
def test_products_of_warp_groups_of_several_sequences(H, K, D, ops, monkeypatch):
    """Rows of several sequences in a step have the bits of their own sequence alone, some of which are short."""
    monkeypatch.setattr(replay, "LONG_PAST", 100)
    monkeypatch.setattr(ops, "context", on_hopper(ops.context))
    random, lengths, n = np.random.default_rng(5), (300, 5, 192), 12
    spec = [{"kv": KVSpec(K, D, D)}]
    pool = ops.new_pool(spec, len(lengths), 400)
    many, alone = [pool.new_state() for _ in lengths], [ops.new_state(spec, 400) for _ in lengths]

    def rows_of(count):
        return [2 * random.normal(size=(count, heads, D)).astype(np.float32) for heads in (H, K, K)]

    for own, other, length in zip(many, alone, lengths, strict=True):
        for start in range(0, length, 64):
            count = min(64, length - start)
            rows = rows_of(count)
            for state in (own, other):
                step = Step.chain(np.zeros(count, np.int32), start, state.slot)
                pool.note_step(step) if state is own else None
                attend_to(ops, pool if state is own else other, rows, step)
                state.commit(range(count))
    steps = [Step.chain(np.zeros(n, np.int32), state.length) for state in many]
    joined = JoinedStep.of(steps, np.repeat(np.arange(3, dtype=np.int32), n), [state.slot for state in many])
    rows = rows_of(3 * n)
    pool.note_step(joined)
    out = attend_to(ops, pool, rows, joined)
    for i, other in enumerate(alone):
        own = slice(i * n, i * n + n)
        single = attend_to(ops, other, [x[own] for x in rows], Step.chain(np.zeros(n, np.int32), other.length))
        assert np.array_equal(out[own], single), f"sequence {i}"


@pytest.mark.parametrize("partials", [(1, 1, 1), (3, 4, 20), (7, 8, 9), (5, 16, 2)])
@pytest.mark.parametrize(("H", "K", "D", "pairs"), [(6, 2, 128, 64), (10, 5, 256, 32)])
def test_heads_of_partial_sums(H, K, D, pairs, partials, ops):
    """Heads normed and rotated before they are stored in the cache, however many warps add them up."""
    random, eps = np.random.default_rng(3), 1e-6
    sums = [
        random.normal(size=(n, 5, heads, D)).astype(np.float32) for n, heads in zip(partials, (H, K, K), strict=True)
    ]
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
            for f, shape, n in zip(flat, shapes, partials, strict=True)
        ]

    spec = [{"kv": KVSpec(K, D, D)}]
    numpy = NumpyOps()
    want = run(numpy, [x.sum(0) for x in sums], 0, numpy.new_state(spec, 100))
    out = run(ops, on_device(slice(5)), 0, ops.new_state(spec, 100))
    assert np.abs(out - want).max() <= TOLERANCE["attention"][1] * np.abs(want).max()
    state = ops.new_state(spec, 100)
    alone = [run(ops, on_device(slice(t, t + 1)), t, state) for t in range(5)]
    assert np.array_equal(np.concatenate(alone), out)


@pytest.mark.parametrize(
    ("D", "format"),
    [*((D, "native") for D in (32, 80, 128, 256)), *((D, "q8_0") for D in (32, 128, 256))],  # 80 is packed in no format
)
@pytest.mark.parametrize("partials", [1, 3, 9])
def test_biases(D, partials, format, ops):
    """Vectors are added to q, k and v in the launch that writes the cache, with the bits of launches of their own."""
    H, K, T = 6, 2, 140
    random, rope = np.random.default_rng(3), Rope(tuple(0.3**i for i in range(D // 2)))
    sums = [random.normal(size=(partials, T, n * D)).astype(np.float32) for n in (H, K, K)]
    vectors = [f32(random.normal(scale=4, size=n * D)) for n in (H, K, K)]
    spec = [{"kv": KVSpec(K, D, D, key_format=format, value_format=format)}]

    def run(on, inputs, fuses=True):
        n = len(inputs[0])
        step, state = Step.chain(np.zeros(n, np.int32), 0), on.new_state(spec, 200)
        positions = ops.context.on_device(step.positions) if on is ops else step.positions
        added = [on.add(x, on.vector(b)).reshape(n, -1, D) for x, b in zip(inputs, vectors, strict=True)]
        for x in () if fuses else added:
            x.compute()
        launched = on.launches
        q, k = (on.rope(x, positions, rope) for x in added[:2])
        out = on.attention(q, k, added[2], state[0].kv, step, D**-0.5)
        return np.array(on.read(out)), on.launches - launched

    def on_device(n):
        ops.context.arena.reset()
        flat = [rows_on(ops, np.ascontiguousarray(x[:, :n]).reshape(partials * n, -1)) for x in sums]
        return [
            Array((n, f.shape[1]), f.address, partials=partials, partial_stride=n * f.shape[1], owner=f) for f in flat
        ]

    want = run(NumpyOps(), [x.sum(0) for x in sums])[0]
    for n in (1, 5, T):
        (out, launches), (apart, as_many) = run(ops, on_device(n)), run(ops, on_device(n), fuses=False)
        if D < 128 or partials <= 3 or n > MAX_DECODE_ROWS:  # otherwise warps share the partial sums of a head
            assert np.array_equal(out, apart)
        assert launches == as_many
        assert np.abs(out - want[:n]).max() <= 3e-2 * np.abs(want).max()


def test_rows_of_trees_are_plain_behind_a_long_past(ops, monkeypatch):
    """Where a single row's pieces are tiles, more than a warp reads together, and where they no longer are."""
    layer = Attention(ops, 6, 2, 16, KVSpec(2, 16, 16))
    for past in (4090, 4100):
        layer.check(past, 9)
    monkeypatch.setattr(ops, "context", on_multiprocessors(ops.context, 64))
    for n in (9, 64):
        layer.check(1000, n)


@pytest.mark.parametrize(
    ("H", "K", "D", "kernel", "rows"),
    [
        (24, 4, 256, "wide", (4, 22)),
        (8, 1, 256, "tall", (14, 30)),
        (16, 2, 128, "tall", (6, 12, 20)),
    ],
)
@pytest.mark.parametrize("past", [192, 300])
def test_products_of_warp_groups_after_a_long_past(past, H, K, D, kernel, rows, ops, monkeypatch):
    """Rows of kernels/tall.cu and wide.cu have the bits of plain decoding, also those of a tree.

    split.cu computes the tails.
    """
    monkeypatch.setattr(replay, "LONG_PAST", 100)
    monkeypatch.setattr(ops, "context", on_hopper(ops.context))
    for n in rows:
        assert [x.name for x in launches_after_a_long_past(ops, KVSpec(K, D, D), H, n)] == [kernel, "split"]
        Attention(ops, H, K, D, KVSpec(K, D, D)).check(past, n)


@pytest.mark.parametrize("multiprocessors", [2, 132])
@pytest.mark.parametrize(("past", "rows"), [(192, (2, 4)), (300, (3, 22)), (1100, (9,))])
def test_latents_after_a_long_past(past, rows, multiprocessors, ops, monkeypatch):
    """Rows of kernels/tall_latent.cu have the bits of plain decoding, also those of a tree.

    latent.cu computes the tails.
    """
    monkeypatch.setattr(replay, "LONG_PAST", 100)
    monkeypatch.setattr(ops, "context", on_multiprocessors(on_hopper(ops.context), multiprocessors))
    spec = LatentSpec(512, 64)
    kv = ops.new_state([{"kv": spec}], 400)[0].kv
    for n in rows:
        step = ops.context.step_of(Step.chain(np.zeros(n, np.int32), 0), kv.store)
        launches = latent_launches(ops.context.card, kv, dataclasses.replace(step, long_past=True), 20)
        assert [x.name for x in launches] == ["tall_latent", "latent"]
        Attention(ops, 20, 1, 512, spec, scale=0.04).check(past, n)


@pytest.mark.parametrize("multiprocessors", [1, 2, 3])
def test_sums_that_stay_with_a_warp_group(multiprocessors, ops, monkeypatch):
    """Pieces of a run of groups that one CTA computes have the bits of plain decoding; several CTAs divide runs."""
    monkeypatch.setattr(replay, "LONG_PAST", 100)
    monkeypatch.setattr(ops, "context", on_multiprocessors(on_hopper(ops.context), multiprocessors))
    committed, _ = launches_after_a_long_past(ops, KVSpec(1, 128, 128), 8, 9)
    assert committed.folds
    Attention(ops, 8, 1, 128, KVSpec(1, 128, 128)).check(1400, 9)


def launches_after_a_long_past(ops, spec, H: int, n: int):
    kv = ops.new_state([{"kv": spec}], 400)[0].kv
    step = ops.context.step_of(Step.chain(np.zeros(n, np.int32), 0), kv.store)
    long = dataclasses.replace(step, long_past=True)
    return pieces_launches(ops.context.card, kv, long, H // spec.kv_heads, NO_EXACT, 0)


@pytest.mark.parametrize(("H", "K", "D"), [(24, 4, 64), (8, 2, 128)])
@pytest.mark.parametrize("past", [100, 192, 300])
def test_larger_blocks_after_a_long_past(past, H, K, D, ops, monkeypatch):
    """Rows that CTAs of 64 compute where the past is long have the bits of plain decoding, also those of a tree."""
    monkeypatch.setattr(replay, "LONG_PAST", 100)
    kv = ops.new_state([{"kv": KVSpec(K, D, D)}], 400)[0].kv
    for n in (8, 14, 20):
        step = ops.context.step_of(Step.chain(np.zeros(n, np.int32), 0), kv.store)
        assert not step.long_past
        long = dataclasses.replace(step, long_past=True)
        split = pieces_launches(ops.context.card, kv, long, H // K, NO_EXACT, 0)[-1]
        assert f"ROWS={64 if takes_64_rows(ops.context.card, D, n * H // K) else 32}" in split.defines
        Attention(ops, H, K, D, KVSpec(K, D, D)).check(past, n)
