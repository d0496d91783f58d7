"""Tokens drawn on the device against the host's, and when the host can read them."""

import weakref

import numpy as np
import pytest

from common.errors import NotFiniteError
from common.joined_step import JoinedStep
from common.sampling import GREEDY, NOT_A_TOKEN, Sampler, Samplers, Sampling, argmax_entropy
from common.step import MAX_DECODE_ROWS, Step
from common.tensors import Tensor

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_rows import poisoned_ops, random_matrix, rows_on  # noqa: E402

from cuda_backend import rows as rows_of  # noqa: E402
from cuda_backend import sampling as sampling_of  # noqa: E402
from cuda_backend.memory import Memory  # noqa: E402
from cuda_backend.ops import CudaOps  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ops():
    return poisoned_ops()


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


DRAWS = [
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
]


@pytest.mark.parametrize("vocab", [1, 2, 33, 5003])
@pytest.mark.parametrize("asked", DRAWS)
def test_draws_are_the_hosts(asked, vocab, ops):
    """A seed gives the same tokens as on the host, from logits that stay on the device."""
    logits, sampling = hard_rows(vocab), Sampling(**asked, seed=11)
    host, device = Sampler(sampling), Sampler(sampling)
    want = [host.pick(row) for row in logits]
    assert ops.read(ops.sample(rows_on(ops, logits), device)).tolist() == want
    assert host.random.random() == device.random.random()
    logits[3, vocab // 2] = np.nan
    with pytest.raises(NotFiniteError):
        ops.read(ops.sample(rows_on(ops, logits), device))


@pytest.fixture
def launched(ops, monkeypatch):
    """The name of each launch of sampling.py, with its grid."""
    grids, kernel = [], sampling_of.kernel

    def noted(stem, name):
        function = kernel(stem, name)
        return lambda grid, *of, **options: (grids.append((name, grid)), function(grid, *of, **options))

    monkeypatch.setattr(sampling_of, "kernel", noted)
    return grids


def in_groups_of(rows, vocab, ops, monkeypatch):
    """Bound the memory for drawing to that of `rows` rows."""
    monkeypatch.setattr(sampling_of, "WORKSPACE", rows * 8 * (vocab + 2 * sampling_of.DRAW_BINS) + 100)
    ops.context.arena.passing = Memory(0)


@pytest.mark.parametrize("group", [0, 1, 7, 1000])
@pytest.mark.parametrize("vocab", [1, 33, 5003])
def test_draws_of_several_sequences(vocab, group, ops, launched, monkeypatch):
    """One call for samplers that differ, of which the greedy ones' rows take no memory, in groups that fit into it."""
    logits = hard_rows(vocab)
    logits = np.concatenate([logits, logits[::-1]])
    logits[30, vocab // 2] = np.nan
    ways, random = [{}, *DRAWS, {}], np.random.default_rng(vocab)
    cuts = np.sort(random.choice(np.arange(1, len(logits)), len(ways) - 1, replace=False)).tolist()
    rows = np.diff([0, *cuts, len(logits)]).tolist()
    host, device = (
        [(Sampler(Sampling(**how, seed=i)), n) for i, (how, n) in enumerate(zip(ways, rows, strict=True))]
        for _ in range(2)
    )
    want = Samplers(host).pick(logits)
    assert want[30] == NOT_A_TOKEN
    in_groups_of(group, vocab, ops, monkeypatch)
    tokens = ops.sample(rows_on(ops, logits), Samplers(device))
    drawn, most = len(logits) - rows[0] - rows[-1], max(group, 1)
    groups = [min(most, drawn - first) for first in range(0, drawn, most)]
    assert [grid[1] for name, grid in launched if name == "weigh_each"] == groups
    assert [grid[0] for name, grid in launched if name == "draw_each"] == groups
    assert ops.context.arena.passing.nbytes <= most * 8 * (vocab + 2 * sampling_of.DRAW_BINS) + 100
    assert all(ops.read(tokens[i : i + 1]) == want[i] for i in range(len(logits)) if i != 30)
    with pytest.raises(NotFiniteError):
        ops.read(tokens)
    assert (
        ops.read(ops.sample(rows_on(ops, logits[:2]), Samplers(host[:1] * 2))).tolist()
        == logits[:2].argmax(-1).tolist()
    )


@pytest.mark.parametrize("asked", [{"temperature": 0.8}, {"temperature": 1.3, "top_k": 64, "top_p": 0.9}])
def test_draws_of_one_sequence_in_groups(asked, ops, launched, monkeypatch):
    logits, sampling = hard_rows(1027), Sampling(**asked, seed=11)
    in_groups_of(5, 1027, ops, monkeypatch)
    tokens = ops.read(ops.sample(rows_on(ops, logits), Sampler(sampling)))
    assert tokens.tolist() == Samplers([(Sampler(sampling), len(logits))]).pick(logits).tolist()
    assert [grid for name, grid in launched if name == "draw"] == [(5,)] * 4 + [(4,)]


def test_argmax(ops):
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
    logits = hard_rows(vocab)
    logits = logits[np.isfinite(logits.max(-1)) & (logits.max(-1) < 1e20)]
    for excluded in (0, vocab // 2, vocab - 1, int(logits[0].argmax())):
        rows = logits[np.isfinite(np.delete(logits, excluded, 1).max(-1))]
        want_ids, want = argmax_entropy(rows, excluded)
        before = ops.waited
        ids, found = ops.read_all(*ops.argmax_entropy(rows_on(ops, rows), excluded))
        assert ops.waited > before
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
    logits = rows_of.out_of_arena(ops.context, rows_on(ops, rows), 2)
    sampled, memory = ops.sample(logits, greedy), weakref.ref(logits.owner)
    del logits
    assert memory() is None  # a step's may have 135 MB, and tokens outlive it
    assert ops.read(sampled).tolist() == rows[:2].argmax(-1).tolist()
    logits = rows_of.out_of_arena(ops.context, rows_on(ops, rows), 4)
    for part, launches in ((slice(3), 1), (slice(1, 4), 2)):  # the best of the first rows are known
        before = ops.launches
        found = ops.read(ops.sample(logits[part], greedy))
        assert found.tolist() == rows[:4][part].argmax(-1).tolist()
        assert ops.launches - before == launches
    rows[1, -1] = np.nan
    with pytest.raises(NotFiniteError):
        ops.read(ops.sample(rows_of.out_of_arena(ops.context, rows_on(ops, rows), 2), greedy))


@pytest.mark.parametrize("vocab", [4, 1028, 5000, 5003])
def test_greedy_steps(vocab):
    """Tokens chosen where the logits lie are those of `sample`, and stay while later steps run."""
    ops = CudaOps()
    state, rng = ops.new_state((), 256), np.random.default_rng(6)
    rows = rng.normal(size=(vocab, 256)).astype(np.float32)
    table = ops.weight(Tensor("x", "F32", rows.shape, rows.view(np.uint8)))
    head = ops.weight(random_matrix("Q4_K", vocab, 256))

    def fn(state, step):
        return ops.linear(ops.embed(table, step.tokens), head)

    earlier = []
    for T in (1, 5, 5, 11, 1, 5, 5, 11, 136, 136, 137):
        step = Step.chain(rng.integers(0, vocab, T).astype(np.int32), 0)
        want = ops.read(ops.sample(ops.run(fn, state, step), GREEDY))
        for _ in range(3):  # as it comes, captured, replayed
            tokens = ops.run_greedy(fn, state, step)
            if T <= MAX_DECODE_ROWS:  # the next step reads them where they are
                after = ops.read(ops.run_greedy(fn, state, Step.chain(tokens, 0)))
                assert after.tolist() == ops.read(ops.run_greedy(fn, state, Step.chain(want, 0))).tolist()
            assert ops.read(tokens).tolist() == want.tolist()
            assert ops.read(tokens[:1]).tolist() == want[:1].tolist()
        earlier.append((tokens, want))
    for tokens, want in earlier:
        assert ops.read(tokens).tolist() == want.tolist()
        assert ops.read(tokens[-1:]).tolist() == want[-1:].tolist()
    later = ops.run_greedy(fn, state, Step.chain(earlier[1][0], 0))  # of a step before the last
    assert ops.read(later).tolist() == ops.read(ops.run_greedy(fn, state, Step.chain(earlier[1][1], 0))).tolist()
    rows[3] = np.nan
    table = ops.weight(Tensor("x", "F32", rows.shape, rows.view(np.uint8)))
    spoiled = ops.run_greedy(lambda *of: fn(*of), state, Step.chain(np.array([1, 3], np.int32), 0))
    assert ops.read(spoiled[:1])[0] >= 0
    with pytest.raises(NotFiniteError):
        ops.read(spoiled)


def test_chosen_tokens_do_not_wait_for_later_work(ops, monkeypatch):
    """The host reads a token while the step after it runs: by the event of its copy, not by the end of the stream."""
    rows = np.random.default_rng(7).normal(size=(2, 1028)).astype(np.float32)
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=1)):
        chosen = ops.sample(rows_on(ops, rows), Sampler(sampling))
        copied = ops.read(chosen[:])
        with monkeypatch.context() as patch:
            patch.setattr(type(ops.context.stream), "synchronize", lambda stream: pytest.fail("it waits for all"))
            assert np.array_equal(ops.read(chosen), copied)


@pytest.mark.parametrize("vocab", [5003, 5004])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_chains_of_a_draft(count, vocab):
    """Newest tokens of a pass, and the best of each row after them; a row with NaN gives no token."""
    ops, rows = CudaOps(), hard_rows(vocab)
    pool = ops.new_pool((), 4, 64)
    states = [pool.new_state() for _ in range(4)]
    held = [rows, rows.copy()]
    held[1][7, 3] = np.nan
    tables = [ops.weight(Tensor("x", "F32", each.shape, each.view(np.uint8))) for each in held]
    tokens = np.arange(24, dtype=np.int32).reshape(4, 6)
    step = JoinedStep.of_equal_runs(tokens.reshape(-1), [0] * 4, 6, [state.slot for state in states], is_block=True)

    def fn(state, step):
        return ops.embed(tables[0], step.tokens)

    def spoiled(state, step):
        return ops.embed(tables[1], step.tokens)

    expected = [[row[0], *(rows[each].argmax() for each in row[1 : 1 + count])] for row in tokens]
    for _ in range(3):  # as it comes, captured, replayed
        found = ops.run_chains(fn, pool, step, 6, 1, count)
        assert ops.read(found).reshape(4, -1).tolist() == expected
    found = ops.run_chains(spoiled, pool, step, 6, 1, count)
    assert ops.read(found[: 1 + count]).tolist() == expected[0]
    with pytest.raises(NotFiniteError):
        ops.read(found)
