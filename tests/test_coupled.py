"""Draft tokens that take the target's random numbers, on distributions that are known."""

import numpy as np
import pytest

from common.coupled import CANDIDATES, SEVERAL, Coupling
from common.sampling import Sampler, Sampling, draw_weights, top_k

VOCAB, PAIRS = 200, 600


def pairs(noise, scale=3.0):
    """Logits of a target and of a draft that differ by `noise`, (PAIRS, VOCAB) each."""
    random = np.random.default_rng(1)
    target = random.normal(size=(PAIRS, VOCAB)) * scale
    return target.astype(np.float32), (target + noise * random.normal(size=target.shape)).astype(np.float32)


def shares(noise, **options):
    """Of draws that a draft meets: by the likeliest token, by a draw of its own, by the coupled one, and 1 - TV."""
    sampling = Sampling(seed=3, **options)
    sampler, apart = Sampler(sampling), np.random.default_rng(4)
    met = {"likeliest": 0.0, "drawn apart": 0.0, "coupled": 0.0, "overlap": 0.0}
    for target, draft in zip(*pairs(noise), strict=True):
        p, q = (
            weights / weights.sum()
            for weights in (draw_weights(row, sampling).astype(float) for row in (target, draft))
        )
        ids, logp = top_k(draft[None], CANDIDATES)
        coupled, _ = Coupling(sampling, sampler.peek(1)).ranked(ids, logp, 1)
        token = sampler.pick(target)
        met["likeliest"] += token == draft.argmax()
        met["drawn apart"] += token == apart.choice(VOCAB, p=q)
        met["coupled"] += token == coupled[0, 0]
        met["overlap"] += np.minimum(p, q).sum()
    return {name: count / PAIRS for name, count in met.items()}


@pytest.mark.parametrize(("noise", "gain"), [(0.3, 0.08), (1.0, 0.03)])
@pytest.mark.parametrize("options", [{"temperature": 0.8, "top_p": 0.95}, {"temperature": 1.0, "top_k": 20}])
def test_it_meets_more_draws(noise, gain, options):
    """Than the likeliest token and a draw of its own. A share of 600 draws has a standard deviation below 0.021."""
    met = shares(noise, **options)
    print(options, noise, met)
    assert met["coupled"] > max(met["likeliest"], met["drawn apart"]) + gain
    assert met["coupled"] < met["overlap"] + 0.05


def test_chances_are_those_of_being_drawn():
    """With a target that is a draw from the Dirichlet distribution around the draft's, as the ranking takes it."""
    random, sampling, count = np.random.default_rng(5), Sampling(temperature=0.5), 4000
    q = np.array([0.4, 0.3, 0.2, 0.1])  # by likelihood; ids in another order
    ids = np.array([2, 0, 3, 1])
    numbers = random.random(count)
    answer = Coupling(sampling, numbers).ranked(*(np.tile(row, (count, 1)) for row in (ids, np.log(q))), 4)
    by_id = q[ids.argsort()]
    targets = random.dirichlet(SEVERAL.certainty * by_id, count).cumsum(axis=-1)
    drawn = (targets[:, :-1] < numbers[:, None]).sum(axis=-1)
    met = answer[0] == drawn[:, None]
    assert np.abs(np.exp(answer[1]).sum(axis=-1) - 1).max() < 1e-5
    assert np.abs(met.mean(axis=0) - np.exp(answer[1]).mean(axis=0)).max() < 0.05
    assert met.mean(axis=0)[0] > 0.5  # the likeliest token is drawn at 0.4


def test_cuts_of_the_target_are_the_drafts():
    random = np.random.default_rng(6)
    ids, logp = top_k(random.normal(size=(50, VOCAB)).astype(np.float32), CANDIDATES)
    numbers = random.random(50)
    for cut, kept in (({"top_k": 1}, 1), ({"top_p": 1e-6}, 1), ({"min_p": 0.999999}, 1), ({"top_k": 3}, 3)):
        best, chances = Coupling(Sampling(temperature=1.0, **cut), numbers).ranked(ids, logp, 5)
        assert all(set(row[:kept]) == set(few[:kept]) for row, few in zip(best, ids, strict=True))
        assert (np.exp(chances[:, kept:]) < 1e-8).all()


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_numbers_at_the_ends(number):
    ids, logp = np.array([[5, 1, 9]]), np.log([[0.4, 0.35, 0.25]])
    best, _ = Coupling(Sampling(temperature=0.5), np.array([number])).ranked(ids, logp, 1)
    assert best[0, 0] == (9 if number else 1)


def test_rows_take_the_numbers_of_their_positions():
    """Of several rows per position too, and from a position on."""
    random = np.random.default_rng(7)
    ids, logp = top_k(random.normal(size=(6, VOCAB)).astype(np.float32), CANDIDATES)
    coupling = Coupling(Sampling(temperature=1.0, top_p=0.9), random.random(6))
    best, chances = coupling.ranked(ids, logp, 4)
    for at in range(6):
        one = coupling.ranked(ids[at : at + 1], logp[at : at + 1], 4, at)
        assert np.array_equal(one[0][0], best[at])
        assert np.array_equal(one[1][0], chances[at])
    wide = coupling.ranked(np.stack([ids, ids], axis=1), np.stack([logp, logp], axis=1), 4)
    assert all(
        np.array_equal(part[:, row], whole) for part, whole in zip(wide, (best, chances), strict=True) for row in (0, 1)
    )
