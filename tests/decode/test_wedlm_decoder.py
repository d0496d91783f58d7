"""WeDLM's decoder against an independent simulator without a cache, and the properties that its cache must have."""

import json
import shutil
from contextlib import closing
from itertools import islice

import numpy as np
import pytest
import tiny
from wedlm_simulator import qwen3, simulate, simulate_checked, visible

from common.decode import wedlm
from common.decode.alone import run_alone
from common.decode.registry import check
from common.decode.run import DecoderRun, WedlmStats
from common.decode.wedlm import choose
from common.decoders import Speculation, WedlmOptions
from common.errors import BimetalError, UsageError
from common.kv_cache import with_window
from common.models import load_model
from common.models.window import SINKS, bounded, windowed
from common.quants import dequantize
from common.reference import NumpyOps
from common.sampling import Ahead, Sampler, Sampling, argmax_entropy
from common.step import Step
from common.storage import KVSpec

MASK = 90
PROMPT = [5, 17, 3, 60, 44, 2, 31]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.wedlm(tmp_path_factory.mktemp("wedlm") / "model", mask_token_id=MASK)


@pytest.fixture(scope="module")
def model(folder, ops):
    return load_model(folder, ops)


@pytest.fixture(scope="module")
def network(folder):
    tensors = {name: dequantize(t).astype(np.float64) for name, t in tiny.checkpoint("qwen3").tensors.items()}
    return qwen3(tensors, json.loads((folder / "config.json").read_text()))


def read(model, prompt, capacity=tiny.CAPACITY):
    """A state that holds `prompt`, and its last row's logits."""
    state = model.new_state(capacity)
    if not prompt:
        return state, None
    logits = model.forward(state, Step.chain(np.array(prompt, np.int32), 0), slice(len(prompt) - 1, len(prompt)))
    state.commit(np.arange(len(prompt)))
    return state, logits


def decoded(model, prompt, count, options, sampling=None, unread=1, capacity=tiny.CAPACITY):
    """`count` tokens, the counts, and the state."""
    unread = 0 if options.verify else unread
    state, logits = read(model, prompt[: len(prompt) - unread], capacity)
    rest, sampler = prompt[len(prompt) - unread :], Sampler(sampling or Sampling(), prompt)
    run = DecoderRun(model, state, logits, sampler, prompt, Speculation("wedlm", wedlm=options), unread=rest)
    with closing(run_alone(run)) as tokens:
        out = [token for token, _ in islice(tokens, count)]
    return out, run.wedlm, state


SETTINGS = [(16, 0.4, 0.02), (6, 4.3, 0.05), (8, 4.4, 0.0), (4, 0.0, 0.02), (1, 4.2, 0.0), (5, 100.0, 0.0)]


def test_rows_may_be_reordered(model, network):
    """Filled rows first and masks after them, causal, give the logits of the natural order with explicit visibility."""
    random = np.random.default_rng(2)
    for _ in range(4):
        filled = random.random(9) < 0.5
        tokens = np.where(filled, random.integers(0, 80, 9), MASK)
        natural = network(np.array([*PROMPT, *tokens]), np.arange(16), visible(np.array([*[True] * 7, *filled])))[7:]
        order = np.argsort(~filled, kind="stable").astype(np.int32)
        state, _ = read(model, PROMPT)
        step = Step(tokens[order].astype(np.int32), 7 + order, np.arange(-1, 8, dtype=np.int32), np.zeros(9, np.int32))
        assert np.abs(model.ops.read(model.forward(state, step)) - natural[order]).max() < 2e-3
        plain_order = Step.chain(tokens.astype(np.int32), 7)  # control: the natural order with a causal mask
        if not filled[: filled.sum()].all():
            assert np.abs(model.ops.read(model.forward(state, plain_order)) - natural).max() > 0.05
            by_place = Step.chain(tokens[order].astype(np.int32), 7)  # control: positions by place in the step
            assert np.abs(model.ops.read(model.forward(state, by_place)) - natural[order]).max() > 0.05


@pytest.mark.parametrize(("window", "tau", "penalty"), SETTINGS)
@pytest.mark.few(2)
def test_tokens_and_forwards_are_the_simulators(window, tau, penalty, model, network):
    for prompt in (PROMPT, PROMPT[::-1], [1]):
        expected, fills = simulate(network, prompt, 24, window, tau, penalty, MASK)
        out, stats, _ = decoded(model, prompt, 24, WedlmOptions(window, tau, penalty))
        assert (out, stats.fills) == (expected, fills)


@pytest.mark.parametrize("sure", [0.0, 4.2, 50.0, *(pytest.param(x, marks=pytest.mark.slow) for x in (4.0, 4.3))])
@pytest.mark.parametrize(("window", "tau", "penalty"), [(6, 4.3, 0.05), (8, 4.4, 0.0), (5, 100.0, 0.0), (1, 4.0, 0.0)])
@pytest.mark.few(4)
def test_checked_windows_are_the_simulators(window, tau, penalty, sure, model, network):
    for prompt in (PROMPT, PROMPT[::-1], [1]):
        expected, fills = simulate_checked(network, prompt, 24, window, tau, penalty, sure, MASK)
        out, stats, state = decoded(model, prompt, 24, WedlmOptions(window, tau, penalty, sure=sure))
        assert (out, stats.fills) == (expected, fills)
        fresh, _ = read(model, [*prompt, *out][: state.length])
        ours, theirs = tiny.arrays_of(model, state), tiny.arrays_of(model, fresh)
        assert all(np.abs(ours[name] - theirs[name]).max() < 1e-4 for name in ours)


@pytest.mark.parametrize(("window", "tau"), [(1, 4.0), (8, 4.4), (16, 100.0)])
@pytest.mark.few(2)
def test_what_is_always_checked_is_plain_decodings_text(window, tau, model):
    for prompt in (PROMPT, [1]):
        state, logits = read(model, prompt)
        expected = [token for token, _ in islice(run_alone(DecoderRun(model, state, logits, Sampler(Sampling()))), 30)]
        for count in (30, 1, 5):
            for unread in (0, 1):
                options = WedlmOptions(window, tau, 0.0, sure=0.0)
                out, stats, state = decoded(model, prompt, count, options, unread=unread)
                assert out == expected[:count]
                assert state.length < len(prompt) + count  # never a token that nobody has seen
                assert stats.tokens == count


@pytest.mark.parametrize(("window", "tau"), [(1, 4.0), (8, 4.4), (16, 100.0)])
@pytest.mark.few(2)
def test_checked_windows_in_the_papers_order(window, tau, model):
    """A window of filled positions alone leaves none before the next masks: an index was out of range."""
    for sure in (0.0, 4.2):
        for unread in (0, 1):
            options = WedlmOptions(window, tau, 0.0, order="paper", sure=sure)
            out, stats, state = decoded(model, PROMPT, 30, options, unread=unread)
            assert stats.fills <= stats.tokens == len(out) == 30
            if sure == 0:
                assert out == decoded(model, PROMPT, 30, WedlmOptions(window, tau, 0.0, sure=sure), unread=unread)[0]
            out, _, state = decoded(model, PROMPT, 99, options, capacity=20, unread=unread)
            assert (len(out), state.length) == (21 - len(PROMPT), 20)


@pytest.mark.parametrize("capacity", [7, 8, 9, 20])
def test_checked_windows_fill_the_state(capacity, model):
    """With `sure` 0, and with `verify`, to the token at which plain decoding ends."""
    state, logits = read(model, PROMPT, capacity)
    expected = [token for token, _ in run_alone(DecoderRun(model, state, logits, Sampler(Sampling())))]
    for unread in (0, 1):
        for options in [{"sure": 0}, {"sure": 0, "order": "paper"}, {"sure": 4}, {"verify": True}]:
            settings = WedlmOptions(6, 100.0, 0.0, **options)
            out, stats, state = decoded(model, PROMPT, 99, settings, capacity=capacity, unread=unread)
            assert (len(out), state.length) == (capacity + 1 - len(PROMPT), capacity)
            assert stats.tokens == len(out)
            assert out == expected or options == {"sure": 4}


@pytest.mark.parametrize(("window", "tau", "penalty"), [(6, 4.3, 0.05), (8, 4.4, 0.0), (5, 100.0, 0.0)])
@pytest.mark.parametrize("limit", ["attention_window", "max_kv_size"])
def test_bounded_attention_is_the_simulators(limit, window, tau, penalty, model, network):
    """Each row sees the latest positions before its own, wherever its row stands, and the first ones if those are kept.

    Rows are evicted by committed tokens alone: masks hide none of them.
    """
    made = windowed(model, 6) if limit == "attention_window" else bounded(model, 6 + SINKS)
    sinks = 0 if limit == "attention_window" else SINKS

    def limited(tokens, positions, visible):
        near = (positions > positions[:, None] - 6) | (positions < sinks)
        return network(tokens, positions, visible & near)

    for prompt in (PROMPT, PROMPT[::-1], [1]):
        expected, fills = simulate(limited, prompt, 24, window, tau, penalty, MASK)
        out, stats, _ = decoded(made, prompt, 24, WedlmOptions(window, tau, penalty))
        assert (out, stats.fills) == (expected, fills)


def test_what_a_bounded_cache_keeps(ops):
    """The first 2 and the last 6 of all committed tokens; rows that are not committed evict nothing."""
    state = ops.new_state([{"kv": with_window(KVSpec(1, 4, 4), 6, 2)}], 64)
    kv, at = state.layers[0].kv, 0
    for count, kept in ((6, (0, 6)), (4, (4, 10)), (4, (8, 14)), (1, (9, 15)), (1, (10, 16)), (10, (20, 26))):
        positions = np.arange(at, at + count + 5, dtype=np.float32)
        rows = model_array(ops, np.broadcast_to(positions[:, None, None], (len(positions), 1, 4)).copy())
        ops.write_kv(rows, rows, kv, Step.chain(np.zeros(len(positions), np.int32), at))
        state.commit(np.arange(count))
        at += count
        for plane in kv.save_point():
            assert plane[0, :, 0].tolist() == [*range(min(2, kept[0])), *range(*kept)]


@pytest.mark.parametrize(("window", "tau", "penalty"), SETTINGS)
def test_the_cache_is_a_prefills(window, tau, penalty, model):
    """Keys and values of committed tokens are those of reading prompt and reply anew."""
    out, _, state = decoded(model, PROMPT, 20, WedlmOptions(window, tau, penalty))
    kept = [*PROMPT, *out][: state.length]
    fresh, _ = read(model, kept)
    ours, theirs = tiny.arrays_of(model, state), tiny.arrays_of(model, fresh)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert np.abs(ours[name] - theirs[name]).max() < 1e-4, name


def test_filled_positions_after_a_mask_are_not_committed(model):
    """Such a row saw a mask: its keys and values differ from a prefill's, so that committing it would be wrong."""
    state, _ = read(model, PROMPT)
    step = Step(
        np.array([8, 9, MASK], np.int32),
        np.array([7, 9, 8], np.int32),
        np.arange(-1, 2, dtype=np.int32),
        np.zeros(3, np.int32),
    )
    model.forward(state, step)
    state.commit([0, 1])
    wrong = tiny.arrays_of(model, state)
    fresh, _ = read(model, [*PROMPT, 8, 12, 9])
    right = tiny.arrays_of(model, fresh)
    last = max(name for name in wrong if name.startswith("values"))
    assert np.abs(wrong[last][7] - right[last][7]).max() < 1e-4  # the leading run
    assert np.abs(wrong[last][8] - right[last][9]).max() > 1e-2


def test_where_the_prompt_is_read_changes_nothing(model):
    """The last tokens of a prompt may be read with the first window: one forward less."""
    options = WedlmOptions(6, 4.3, 0.05)
    whole, alone, _ = decoded(model, PROMPT, 20, options, unread=0)
    fused, together, _ = decoded(model, PROMPT, 20, options, unread=5)
    assert whole == fused
    assert alone.fills == together.fills


def test_the_papers_order_counts_filled_positions(model):
    """Everything accepted: forwards that fill and forwards that only commit alternate."""
    stream, engine, _ = decoded(model, PROMPT, 40, WedlmOptions(16, 1e9, 0.0), unread=0)
    _, paper, _ = decoded(model, PROMPT, 40, WedlmOptions(16, 1e9, 0.0, order="paper"), unread=0)
    assert (engine.forwards, engine.rows) == (3, 16 + 2 * 32)  # 16 rows, then 16 filled beside 16 masks
    assert (paper.forwards, paper.rows) == (5, 5 * 16)
    assert len(stream) == 40


@pytest.mark.parametrize(
    ("tau", "penalty", "chosen"), [(0.4, 0.02, [0, 2, 3, 4]), (0.39, 0.1, [0]), (0.0, 0.02, [3]), (0.05, 0.05, [0])]
)
def test_choice(tau, penalty, chosen):
    entropies, positions = np.array([0.25, 0.45, 0.20, 0.10, 0.15]), np.array([0, 1, 2, 4, 5])
    assert choose(entropies, positions, WedlmOptions(16, tau, penalty)).tolist() == chosen


@pytest.mark.parametrize(
    ("row", "entropy"),
    [([2, 1, 0, -1], 0.947537), ([5, 0, 0, 0], 0.119079), ([0] * 4, 1.386294), ([10, 0, 0, 0], 0.001498)],
)
def test_entropy(row, entropy, ops):
    """In nats, without the excluded token, at any scale of the logits."""
    rows = np.array([[*row, 50.0], [*(x + 80 for x in row), 130.0]], np.float32)
    ids, found = argmax_entropy(rows, 4)
    assert ids.tolist() == [0, 0]
    assert found == pytest.approx([entropy] * 2, abs=1e-5)
    ids, found = (ops.read(x) for x in ops.argmax_entropy(model_array(ops, rows), 4))
    assert ids.tolist() == [0, 0]
    assert found == pytest.approx([entropy] * 2, abs=1e-4)


def model_array(ops, rows):
    if ops.name == "numpy":
        return rows
    import mlx.core as mx

    return mx.array(rows)


def test_a_predicted_mask_is_a_token_like_any_other(model, monkeypatch):
    """Masks are known by a flag: a position filled with the mask's id is filled."""
    exact = type(model.ops).argmax_entropy

    def always_mask(self, logits, excluded):
        ids, entropies = (self.read(x) for x in exact(self, logits, excluded))
        return model_array(self, np.full_like(ids, MASK)), model_array(self, entropies)

    monkeypatch.setattr(type(model.ops), "argmax_entropy", always_mask)
    out, _, _ = decoded(model, PROMPT, 12, WedlmOptions(4, 4.3, 0.0))
    assert out == [MASK] * 12


def test_temperature_draws_by_seed(model):
    texts = [decoded(model, PROMPT, 16, WedlmOptions(6, 4.3), Sampling(temperature=1.0, seed=s))[0] for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    penalized = decoded(model, PROMPT, 16, WedlmOptions(6, 4.3), Sampling(repetition_penalty=5.0))[0]
    assert penalized != decoded(model, PROMPT, 16, WedlmOptions(6, 4.3))[0]


@pytest.mark.parametrize("options", [WedlmOptions(6, 4.3), WedlmOptions(1, 0.0), WedlmOptions(16, 4.3, order="paper")])
def test_a_token_is_drawn_with_a_number_of_its_own(options, model, monkeypatch):
    """A position keeps its random number from step to step, and no two positions share one."""
    sampling, drawn = Sampling(temperature=1.0, seed=3), {}

    class Noted(Ahead):
        def __init__(self, sampler, depths):
            super().__init__(sampler, depths)
            first = len(PROMPT) + sum(sampler.reply.values())
            for depth, number in zip(depths.tolist(), self.random_numbers.tolist(), strict=True):
                drawn.setdefault(first + depth, set()).add(number)

    monkeypatch.setattr(wedlm, "Ahead", Noted)
    decoded(model, PROMPT, 16, options, sampling)
    expected = Sampler(sampling).peek(len(drawn)).tolist()
    assert drawn == {len(PROMPT) + i: {number} for i, number in enumerate(expected)}


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_step_is_launched_before_its_tokens_are_handed_over(runs_ahead, folder):
    """Where the backend runs ahead; tokens and counts are those of one that does not."""
    ops = NumpyOps()
    ops.runs_ahead = runs_ahead
    model, order = load_model(folder, ops), []
    forward = ops.run
    ops.run = lambda *of: order.append("step") or forward(*of)
    state, logits = read(model, PROMPT)
    run = DecoderRun(
        model, state, logits, Sampler(Sampling()), PROMPT, Speculation("wedlm", wedlm=WedlmOptions(1, 0.0))
    )
    order.clear()
    for token, _ in islice(run_alone(run), 6):
        order.append(token)
    expected, _, _ = decoded(load_model(folder, NumpyOps()), PROMPT, 6, WedlmOptions(1, 0.0), unread=0)
    ahead = ["step"] if runs_ahead else []
    assert order == ahead + [each for token in expected for each in ("step", token)]


@pytest.mark.parametrize("capacity", [7, 8, 9, 20])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3, repetition_penalty=1.1)])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_state_may_fill_up(capacity, sampling, runs_ahead, model, monkeypatch):
    """The last token has no position in the state: it follows the last row, as in plain decoding."""
    monkeypatch.setattr(model.ops, "runs_ahead", runs_ahead)
    for unread in (0, 1):
        out, stats, state = decoded(model, PROMPT, 99, WedlmOptions(6, 4.3, 0.0), sampling, unread, capacity)
        assert (len(out), state.length) == (capacity + 1 - len(PROMPT), capacity)
        assert stats.tokens == len(out)
        _, logits = read(model, [*PROMPT, *out[:-1]], capacity)
        assert sampling.temperature or out[-1] == int(np.argmax(model.ops.read(logits)))


@pytest.mark.parametrize(("window", "tau"), [(1, 4.0), (4, 0.0), (8, 4.4), (16, 100.0)])
@pytest.mark.few(2)
def test_verified_text_is_plain_decodings(window, tau, model):
    for prompt in (PROMPT, [1], [7] * 12):
        state, logits = read(model, prompt)
        expected = [token for token, _ in islice(run_alone(DecoderRun(model, state, logits, Sampler(Sampling()))), 40)]
        out, stats, state = decoded(model, prompt, 40, WedlmOptions(window, tau, verify=True))
        assert out == expected
        assert stats.forwards <= 40
        assert state.length == len(prompt) + 39  # all but the newest, wherever the caller stops


def test_metrics():
    stats = WedlmStats(forwards=5, fills=4, rows=60, tokens=12)
    assert (stats.tokens_per_forward, stats.rows_per_token, stats.cache_share) == (3.0, 5.0, 0.2)


def test_refusals(folder, tmp_path):
    for bad, name in (
        ({"window": 0}, "wedlm_window is 0"),
        ({"window": 69}, "wedlm_window is 69"),
        ({"tau": float("nan")}, "wedlm_tau is nan"),
        ({"penalty": -1.0}, "wedlm_lambda is -1"),
        ({"order": "x"}, "wedlm_order is 'x'"),
        ({"sure": float("nan")}, "wedlm_sure is nan"),
    ):
        with pytest.raises(UsageError, match=name):
            WedlmOptions(**bad)
    model = tiny.load("qwen3", NumpyOps())
    with pytest.raises(UsageError, match="qwen3 has no mask token"):
        decoded(model, PROMPT, 1, WedlmOptions())
    greedy = Speculation("wedlm", wedlm=WedlmOptions(verify=True))
    with pytest.raises(UsageError, match="wedlm_verify gives the text of greedy decoding"):
        check(greedy, load_model(folder, NumpyOps()), Sampler(Sampling(temperature=1.0)))
    checked = Speculation("wedlm", wedlm=WedlmOptions(sure=0.1))
    with pytest.raises(UsageError, match=r"wedlm_sure 0.1 confirms tokens by greedy decoding"):
        check(checked, load_model(folder, NumpyOps()), Sampler(Sampling(temperature=1.0)))
    shutil.copytree(folder, tmp_path / "bad")
    config = json.loads((folder / "config.json").read_text()) | {"mask_token_id": 10**6}
    (tmp_path / "bad/config.json").write_text(json.dumps(config))
    with pytest.raises(BimetalError, match="mask_token_id is 1000000"):
        load_model(tmp_path / "bad", NumpyOps())
