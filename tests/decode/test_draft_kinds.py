"""DSpark's and EAGLE-3's drafts, whose positions depend on the token before, give the text of plain decoding."""

import numpy as np
import pytest
import tiny
import tiny_eagle
from test_plain import prefilled
from test_speculative import KINDS, PROMPT, assert_same, decode

from common.checks import default_spec
from common.decode import alone as driver
from common.decode.run import DecodeStats
from common.decoders import Speculation
from common.models import load_model
from common.models.drafts import load_pair
from common.reference import NumpyOps

NEW = 14
FOLDERS = ["dspark", "dflash2"]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.95, "seed": 3}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.few(3)
def test_text_of_plain_decoding(folder, sampling, ops, monkeypatch):
    """The draft as it is, and with the true token among its two best candidates now and then."""
    target = tiny.load("qwen35", ops)
    pair, prompt = load_pair(tiny.FOLDER / folder, target), tiny.golden("qwen35")["ids"][:PROMPT].tolist()
    expected, margins, _ = decode(target, prompt, NEW, **sampling)
    text, random, read = [*prompt, *expected, *[0] * 9], np.random.default_rng(2), driver.drafted

    def led(model, state, request):
        ids, logp, after = (part.copy() for part in read(model, state, request))
        row = 0
        for depth, token in enumerate(text[state.length + 1 :][: len(ids)]):
            if row < 0 or random.random() < 0.2:
                break
            place, here = int(random.integers(2)), ids[depth, row].tolist()
            rank = here.index(token) if token in here else place
            for part in (ids, after):  # the true token is the best candidate or the second
                part[depth, row, [place, rank]] = part[depth, row, [rank, place]]
            ids[depth, row, place] = token
            row = after[depth, row, place]
        return ids, logp, after

    for kind, leads in (("chain", False), ("tree", True)):
        with monkeypatch.context() as patch:
            if leads:
                patch.setattr(driver, "drafted", led)
            accepted = DecodeStats()
            tokens, _, state = decode(pair, prompt, NEW, Speculation(kind, 9), accepted=accepted, **sampling)
        assert_same(tokens, expected, margins, ops)
        assert state.length == PROMPT + NEW - 1
        assert not leads or accepted.length > 1.3


FAST = {("llama", "chain"), ("qwen3", "tree"), ("qwen3", "off"), ("llama", "lookup+chain")}
EAGLE = [(name, kind) for name in ("llama", "qwen3", "qwen35", "laguna", "glm") for kind in ("off", *KINDS)]


@pytest.mark.parametrize(
    ("name", "kind"), [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in EAGLE]
)
def test_an_eagle_draft(name, kind, tmp_path):
    """Greedy, and drawn with a seed; with a budget left open as well."""
    target = tiny.load(name, NumpyOps())
    c, layers = target.config, len(target.layout.layers)
    pair = load_pair(tiny_eagle.write(tmp_path / "draft", c.hidden, c.vocab, [0, 1, layers - 1]), target)
    prompt = tiny.golden(name)["ids"][:PROMPT].tolist()
    for budget, sampling in ((3, {}), (None, {}), (9, {"temperature": 0.8, "top_p": 0.95, "seed": 7})):
        expected, _, _ = decode(target, prompt, NEW, **sampling)
        speculation = Speculation(kind, None if kind == "off" else budget)
        tokens, _, state = decode(pair, prompt, NEW, speculation, **sampling)
        assert tokens == expected
        alone, _ = prefilled(pair, [*prompt, *tokens[:-1]])
        for (part, a), b in zip(tiny.arrays_of(pair, state).items(), tiny.arrays_of(pair, alone).values(), strict=True):
            assert np.abs(a - b).max() / max(np.abs(b).max(), 1e-3) < 1e-4, part
    assert default_spec(pair) == "chain"


def test_an_eagle_draft_that_agrees(ops, tmp_path):
    """All its tokens are accepted, and where a token is not in its vocabulary, none of that step."""
    folder = tiny_eagle.write_bigrams(tmp_path / "target")
    target, prompt = load_model(folder, ops), [5, 9, 11]
    expected, margins, _ = decode(target, prompt, 41)
    assert len(set(expected)) > 3
    every = np.arange(target.config.vocab)[::-1]
    for name, ids in (("every", every), ("fewer", every[every != expected[1]])):
        accepted = DecodeStats()
        pair = load_pair(tiny_eagle.write_agreeing(tmp_path / name, folder, ids), target)
        tokens, _, _ = decode(pair, prompt, 41, Speculation("chain", 3), accepted=accepted)
        assert_same(tokens, expected, margins, ops)
        assert (accepted.by_position == [1.0, 1.0, 1.0]) == (name == "every")
