"""Drafts whose positions depend on the token before give the text of plain decoding, as chain and as tree."""

import numpy as np
import pytest
import tiny
from test_speculative import PROMPT, assert_same, decode

from common.decode import alone as driver
from common.decode.run import DecodeStats
from common.decoders import Speculation
from common.models.drafts import load_pair

NEW = 14
FOLDERS = ["dspark"]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.95, "seed": 3}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_text_of_plain_decoding(folder, sampling, ops, monkeypatch):
    """The draft as it is, and with the true token among its candidates now and then."""
    target = tiny.load("qwen35", ops)
    pair, prompt = load_pair(tiny.FOLDER / folder, target), tiny.golden("qwen35")["ids"][:PROMPT].tolist()
    expected, margins, _ = decode(target, prompt, NEW, **sampling)
    text, random, read = [*prompt, *expected, *[0] * 9], np.random.default_rng(2), driver.drafted

    def led(model, state, request):
        ids, logp, after = (part.copy() for part in read(model, state, request))
        row = 0
        for depth, token in enumerate(text[state.length + 1 :][: len(ids)]):
            rank = int(random.integers(ids.shape[2]))
            if row < 0 or random.random() < 0.2:
                break
            if token not in ids[depth, row]:
                ids[depth, row, rank] = token
            row = after[depth, row, ids[depth, row].tolist().index(token)]
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
