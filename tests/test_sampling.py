"""Sampling on rows whose distribution is known."""

from collections import Counter

import numpy as np
import pytest

from common.errors import NotFiniteError, UsageError
from common.pieces import Logprob
from common.sampling import Ahead, Sampler, Sampling, draw_weights, log_softmax, top_k

ROW = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625], np.float32))


def frequencies(row: np.ndarray, draws: int = 20000, **options: float) -> np.ndarray:
    sampler = Sampler(Sampling(seed=1, **options))
    counts = Counter(sampler.pick(row) for _ in range(draws))
    return np.array([counts[i] for i in range(len(row))]) / draws


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 1.0}, [0.5, 0.25, 0.125, 0.0625, 0.0625]),
        ({"temperature": 0.5}, np.array([0.5, 0.25, 0.125, 0.0625, 0.0625]) ** 2 / 0.3359375),
        ({"temperature": 1.0, "top_k": 2}, [2 / 3, 1 / 3, 0, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.6}, [2 / 3, 1 / 3, 0, 0, 0]),  # the token that crosses 0.6 stays
        ({"temperature": 1.0, "top_p": 1e-9}, [1, 0, 0, 0, 0]),
        ({"temperature": 1.0, "min_p": 0.2}, [4 / 7, 2 / 7, 1 / 7, 0, 0]),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.8}, [2 / 3, 1 / 3, 0, 0, 0]),  # top-p acts on what top-k left
        ({"temperature": 0.0}, [1, 0, 0, 0, 0]),
    ],
)
@pytest.mark.few(1)
def test_frequencies(options, expected):
    """20,000 samples: three standard deviations of a share are at most 0.0106."""
    assert np.abs(frequencies(ROW, **options) - np.array(expected)).max() < 0.0106


def test_chi_square_of_the_plain_distribution():
    draws = 20000
    expected = np.exp(ROW) * draws
    observed = frequencies(ROW, draws, temperature=1.0) * draws
    assert ((observed - expected) ** 2 / expected).sum() < 18.5  # 4 degrees of freedom, p = 0.001


def test_draw_weights_of_whole_prefixes():
    """Compare with tokens added one by one from the best."""
    random = np.random.default_rng(5)
    for trial in range(300):
        row = (random.integers(-6, 7, 40) / 2 if trial % 2 else random.normal(scale=4, size=40)).astype(np.float32)
        s = Sampling(
            temperature=random.uniform(0.1, 3),
            top_p=random.choice([1.0, 0.9, 0.3, 1e-9]),
            top_k=random.choice([0, 1, 7]),
            min_p=random.choice([0, 0.05, 0.5]),
        )
        whole = [round(float(np.exp((float(x) - float(row.max())) / s.temperature)) * 2**40) for x in row]
        order = sorted(range(40), key=lambda i: (-row[i], i))[: int(s.top_k) or None]
        enough, kept, sum_ = s.top_p * sum(whole[i] for i in order), [], 0
        for i in order:
            kept.append(i)
            sum_ += whole[i]
            if s.top_p < 1 and sum_ >= enough:
                break
        want = [whole[i] if i in kept and whole[i] >= s.min_p * 2**40 else 0 for i in range(40)]
        assert np.abs(draw_weights(row, s).astype(np.int64) - want).max() <= 1  # two exponentials
        assert np.array_equal(draw_weights(row, s) > 0, np.array(want) > 0)


@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [0.01, 0.9, 0.999])
def test_a_top_p_of_few_tokens_and_of_most(scale, top_p):
    """Compare with a full sort of 5,000 tokens."""
    row = (np.random.default_rng(2).normal(size=5000) * scale).astype(np.float32).round(2)
    every = draw_weights(row, Sampling(temperature=1.0))
    order = np.argsort(-row, kind="stable")
    kept = order[: np.searchsorted(np.cumsum(every[order]), np.uint64(np.ceil(top_p * float(every.sum())))) + 1]
    assert set(np.flatnonzero(draw_weights(row, Sampling(temperature=1.0, top_p=top_p)))) == set(kept)


@pytest.mark.parametrize("row", [[-np.inf] * 3, [np.inf, 0, np.inf], [-0.0, -np.inf, 0.0]])
def test_infinite_logits_have_draw_weights(row):
    best = np.array(row) == max(row)
    assert np.array_equal(draw_weights(np.array(row, np.float32), Sampling(temperature=0.7)), best * 2**40)


def test_same_seed_same_tokens():
    rows = np.random.default_rng(0).normal(size=(50, 100)).astype(np.float32)
    one, two, other = (
        [sampler.pick(row) for row in rows]
        for sampler in (Sampler(Sampling(temperature=1.0, seed=seed)) for seed in (7, 7, 8))
    )
    assert one == two
    assert one != other


def test_one_random_number_per_token():
    """Speculative decoding asks in another order and must meet the same numbers."""
    sampler, bare = Sampler(Sampling(temperature=1.0, seed=3)), np.random.Generator(np.random.Philox(3))
    for _ in range(10):
        u = bare.random()
        assert sampler.pick(ROW) == int(np.searchsorted(np.cumsum(np.exp(ROW.astype(np.float64))), u, side="right"))


def test_rows_ahead_take_the_numbers_of_their_places():
    """Two draft tokens for one position are sampled with one number, and leave the sampler as it was."""
    rows = np.random.default_rng(1).normal(size=(6, 50)).astype(np.float32)
    sampler, plain = (Sampler(Sampling(temperature=1.5, seed=4)) for _ in range(2))
    want = [plain.pick(row) for row in rows[:4]]
    ahead = Ahead(sampler, np.array([0, 1, 1, 2, 3, 1]))
    assert [ahead.pick(rows[i]) for i in (0, 1, 1, 2, 3)] == [want[i] for i in (0, 1, 1, 2, 3)]
    assert [sampler.pick(row) for row in rows[:4]] == want


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    sampler = Sampler(Sampling(repetition_penalty=2.0), prompt=[0])
    assert sampler.pick(np.array([3.0, 2.0, -9.0], np.float32)) == 1  # 3 / 2 < 2
    sampler.accept(1)
    assert sampler.pick(np.array([-1.0, -1.5, -1.9], np.float32)) == 2  # -2, -3, -1.9


def test_a_bias_is_added_after_the_penalties():
    """A repeated token's logit 4 is 2 after the penalty, and the bias decides between 2 and 3."""
    row = np.array([4.0, 3.0], np.float32)
    for bias, token in ((0.5, 1), (1.5, 0)):
        sampler = Sampler(Sampling(repetition_penalty=2.0, logit_bias={0: bias}), [0])
        assert (sampler.pick(row), sampler.is_argmax) == (token, False)


def test_frequency_and_presence_penalties_count_the_reply_only():
    row = np.array([1.0, 0.5, 0.0], np.float32)
    sampler = Sampler(Sampling(frequency_penalty=0.3), prompt=[0, 0, 0])
    picks = []
    for _ in range(4):
        picks.append(sampler.pick(row))
        sampler.accept(picks[-1])
    assert picks == [0, 0, 1, 0]  # token 0 scores 1.0, 0.7, then 0.4 below 0.5; token 1 then falls to 0.2
    sampler = Sampler(Sampling(presence_penalty=0.6))
    sampler.accept(0)
    sampler.accept(0)
    assert sampler.pick(row) == 1  # 0.4 whatever the count


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [0, 0.5])
@pytest.mark.parametrize(
    ("penalty", "token"),
    [({"repetition_penalty": 1e-320}, 1), ({"frequency_penalty": 1e308}, 0), ({"presence_penalty": -1e308}, 1)],
)
def test_penalties_beyond_float32_decide_alone(penalty, token, temperature):
    sampler = Sampler(Sampling(temperature=temperature, seed=1, **penalty), [1])
    sampler.accept(1)
    assert sampler.pick(np.array([1, 1], np.float32)) == token


def test_ties_go_to_the_smaller_id_at_any_temperature():
    row = np.zeros(5, np.float32)
    assert Sampler(Sampling()).pick(row) == 0
    assert Sampler(Sampling(temperature=1.0, top_k=1, seed=0)).pick(row) == 0


def test_nan_logits_are_refused():
    with pytest.raises(NotFiniteError, match="1 of 3 logits are NaN"):
        Sampler(Sampling()).pick(np.array([0, np.nan, 1], np.float32))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1.0},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"frequency_penalty": float("nan")},
        {"presence_penalty": float("inf")},
        {"seed": -1},
    ],
)
def test_bad_parameters_are_named(options):
    (name,) = options
    with pytest.raises(UsageError, match=rf"^{name} is .*; it must be "):
        Sampling(**options)


def test_log_softmax_sums_to_one():
    row = np.array([1000.0, 999.0, -1000.0], np.float32)
    assert np.exp(log_softmax(row)).sum() == pytest.approx(1, abs=1e-12)


def test_top_k_is_sorted_with_ties_to_the_smaller_id():
    ids, logp = top_k(np.array([[0.0, 3, 3, 1], [-np.inf, 5, 4, 6]], np.float32), 3)
    assert ids.tolist() == [[1, 2, 3], [3, 1, 2]]
    assert np.allclose(np.exp(logp).sum(), np.exp([3, 3, 1]).sum() / np.exp([0, 3, 3, 1]).sum() + 1)
    with pytest.raises(NotFiniteError, match="1 of 4 logits are NaN"):
        top_k(np.array([[0.0, np.nan, 3, 1]], np.float32), 2)


@pytest.mark.parametrize("top", [0, 1, 5, 40])
def test_alternatives_are_in_the_order_of_a_whole_sort(top):
    """Of equal log-probabilities the smaller id comes first, also where only some of them are among the best."""
    random = np.random.default_rng(top)
    for decimals in (0, 1, 6):
        row = np.round(random.normal(size=40) * 2, decimals).astype(np.float32)
        found = Logprob.of(row, 3, top)
        order = sorted(range(40), key=lambda i, row=row: (-row[i], i))[:top]
        assert [i for i, _ in found.top] == order
        expected = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
        assert np.allclose([found.logprob, *(value for _, value in found.top)], expected[[3, *order]], atol=1e-6)
