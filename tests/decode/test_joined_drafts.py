"""Several sequences share the passes of their draft: each has what it drafts alone, to the bit on NumPy."""

import numpy as np
import pytest
import tiny
import tiny_eagle
from test_plain import prefilled

from common import row_runner
from common.coupled import Coupling
from common.decode.requests import Draft
from common.errors import NotFiniteError
from common.models.drafts import load_pair
from common.reference import NumpyOps
from common.row_runner import RowRunner
from common.sampling import Sampling

KINDS = ["dflash", "dspark", "mtp-qwen35", "eagle"]
COUPLING = Coupling(Sampling(temperature=0.9), np.array([0.9, 0.2, 0.7, 0.4, 0.6]))
ASKED = [
    (9, Draft(7, 1, 4)),
    (12, Draft(8, 5, 3)),
    (3, Draft(9, 2, 1)),
    (20, Draft(10, 3, 5, COUPLING)),
]  # after a prompt


def pair_of(kind, ops, folder):
    target = tiny.load("qwen35", ops)
    if kind == "eagle":
        return load_pair(tiny_eagle.write(folder / kind, target.config.hidden, target.config.vocab, [0, 1, 2]), target)
    return load_pair(tiny.FOLDER / kind, target)


def asked_of(pair):
    ids = tiny.golden("qwen35")["ids"]
    return [(prefilled(pair, ids[:length].tolist())[0], draft) for length, draft in ASKED]


def same(answers, expected):
    return all(
        len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(answers, expected, strict=True)
    )


@pytest.mark.parametrize("most", [136, 11])
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_does_not_depend_on_the_others(kind, most, tmp_path, monkeypatch):
    """Chains, trees and coupled draft tokens of several depths; of more rows than a step has, too."""
    pair, passes = pair_of(kind, NumpyOps(), tmp_path), []
    asked = asked_of(pair)
    expected = [pair.drafted(state, *draft) for state, draft in asked]
    monkeypatch.setattr(row_runner, "MAX_DECODE_ROWS", most)
    propose = type(pair).propose_each
    monkeypatch.setattr(
        type(pair),
        "propose_each",
        lambda self, state, step, rows: (passes.append(len(step)), propose(self, state, step, rows))[1],
    )
    runner = RowRunner(pair)
    assert same(runner.drafted(asked), expected)
    if kind in ("dflash", "dspark"):
        block = pair.draft.block
        assert passes == ([4 * block] if most == 136 else [2 * block, 2 * block])
    elif most == 136:
        assert passes == [4, 6, 9, 8, 5][: len(passes)]
    assert max(passes) <= most
    assert same(runner.drafted(asked[::-1]), expected[::-1])


def test_a_draft_of_which_each_sequence_has_passes_of_its_own():
    """Convolutions along a block know no other blocks in its step."""
    pair = load_pair(tiny.FOLDER / "dflash2", tiny.load("qwen35", NumpyOps()))
    assert not RowRunner(pair).shares_drafts


@pytest.mark.parametrize("kind", ["dflash", "mtp-qwen35"])
def test_logits_that_are_nan_are_an_error_of_their_sequence(kind, tmp_path, monkeypatch):
    pair = pair_of(kind, NumpyOps(), tmp_path)
    asked = asked_of(pair)
    expected = [pair.drafted(state, *draft) for state, draft in asked]
    propose = type(pair).propose_each

    def spoiled(self, state, step, rows):
        logits = np.array(propose(self, state, step, rows))
        logits[pair.rows_of_each(1, rows)] = np.nan
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(type(pair), "propose_each", spoiled)
        answers = RowRunner(pair).drafted(asked[:2])
    assert isinstance(answers[1], NotFiniteError)
    assert same(answers[:1], expected[:1])


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_on_mlx(kind, tmp_path):
    """Ids of a draft alone; log-probabilities up to another order of sums."""
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    from mlx_backend.ops import MlxOps

    pair = pair_of(kind, MlxOps(), tmp_path)
    asked = asked_of(pair)
    for answer, (state, draft) in zip(RowRunner(pair).drafted(asked), asked, strict=True):
        ids, logp, *_ = pair.drafted(state, *draft)
        assert np.array_equal(answer[0], ids)
        assert np.abs(answer[1] - logp).max() < 1e-4
