"""Drafts that take the target's random numbers: the text of plain decoding, and more accepted tokens."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
from test_plain import prefilled

from common.checkpoint import open_checkpoint
from common.coupled import Coupling, considered
from common.decode.alone import run_alone
from common.decode.run import DecoderRun, DecodeStats
from common.decoders import Speculation
from common.demo import demo_path
from common.models import load_model
from common.models.drafts import load_pair
from common.models.pair import Pass
from common.reference import NumpyOps
from common.sampling import Sampler, Sampling
from common.step import Step
from common.tokenizer import load_tokenizer

PROMPTS = Path(__file__).parents[1] / "data" / "prompts.jsonl"
SAMPLINGS = [
    {"temperature": 0.4},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.01},
]


def text_of(model, prompt, new, sampling, speculation=None):
    """A text of `new` tokens, and what steps accepted."""
    state, logits = prefilled(model, prompt, len(prompt) + new)
    sampler, accepted = Sampler(sampling, prompt), DecodeStats()
    tokens = run_alone(DecoderRun(model, state, logits, sampler, prompt, speculation or Speculation(), stats=accepted))
    out = [next(tokens)[0] for _ in range(new)]
    tokens.close()
    return out, accepted


@pytest.mark.parametrize("options", [SAMPLINGS[1], {"temperature": 0.9, "repetition_penalty": 1.2}])
@pytest.mark.parametrize(
    ("draft", "kinds"), [("dflash", ("chain", "tree")), ("mtp-qwen35", ("lookup+chain",)), ("dspark", ("tree",))]
)
@pytest.mark.few(2)
def test_the_text_of_a_seed_is_that_of_plain_decoding(draft, kinds, options):
    target, sampling = tiny.load("qwen35", NumpyOps()), Sampling(seed=5, **options)
    pair, prompt = load_pair(tiny.FOLDER / draft, target), tiny.golden("qwen35")["ids"][:20].tolist()
    expected, _ = text_of(target, prompt, 16, sampling)
    for kind in kinds:
        for budget in (4, None):
            assert text_of(pair, prompt, 16, sampling, Speculation(kind, budget))[0] == expected


def test_a_drafted_token_decides_the_next_ones_of_a_block(monkeypatch):
    """A multi-token-prediction block reads the coupled token of each position, not the likeliest one."""
    pair = load_pair(tiny.FOLDER / "mtp-qwen35", tiny.load("qwen35", NumpyOps()))
    prompt = tiny.golden("qwen35")["ids"][:20].tolist()
    state, _ = prefilled(pair, prompt)
    coupling = Coupling(Sampling(temperature=3.0), np.array([0.9, 0.2, 0.7]))
    ids, _ = pair.drafted(state, 7, 1, 3, coupling)
    likeliest, _ = pair.drafted(state, 7, 1, 3)
    assert ids[:, 0].tolist() != likeliest[:, 0].tolist()
    for at in range(3):
        logits = pair.propose(state, [7, *ids[:at, 0].tolist()])
        found = pair.found(logits, Pass(None, 1, considered(1, coupling, logits.shape[-1])))
        assert pair.ranked(*found, 1, coupling, at)[0][0, 0] == ids[at, 0]


@pytest.mark.parametrize("name", ["dflash", "dspark", "mtp-qwen35"])
def test_candidates_of_each_backend(name, ops):
    """Those of NumPy, on every backend."""
    prompt, coupling = tiny.golden("qwen35")["ids"][:20].tolist(), Coupling(Sampling(temperature=1.0), np.full(4, 0.6))
    answers = []
    for each in (NumpyOps(), ops):
        pair = load_pair(tiny.FOLDER / name, tiny.load("qwen35", each))
        answers.append(pair.drafted(prefilled(pair, prompt)[0], 7, 3, 4, coupling))
    assert np.array_equal(answers[0][0], answers[1][0])
    assert np.abs(np.exp(answers[0][1]) - np.exp(answers[1][1])).max() < 1e-3


@pytest.mark.slow
def test_the_demo_pair():
    """Texts of two prompts at several temperatures; and draft tokens that meet the text, against other ways to choose.

    At each other token of a text the draft proposes a chain: coupled, by the likeliest tokens, by numbers of its own.
    """
    checkpoint = open_checkpoint(demo_path())
    target, tokenizer = load_model(checkpoint, NumpyOps()), load_tokenizer(checkpoint.path, checkpoint.config)
    pair = load_pair(demo_path("draft"), target)
    prompts = [tokenizer.encode(json.loads(line)["prompt"])[-120:] for line in PROMPTS.open()][::16]
    met, apart = dict.fromkeys(("coupled", "likeliest", "apart"), 0), np.random.default_rng(3)
    for seed, prompt in enumerate(prompts):
        for options in SAMPLINGS if seed < 2 else SAMPLINGS[1:2]:
            sampling = Sampling(seed=seed, **options)
            text, _ = text_of(target, prompt, 80, sampling)
            for kind in ("chain", "tree") if seed < 2 else ():
                assert text_of(pair, prompt, 80, sampling, Speculation(kind, 15))[0] == text
        sampling = Sampling(seed=seed, **SAMPLINGS[1])
        text, _ = text_of(target, prompt, 80, sampling)
        state, _ = prefilled(pair, prompt, len(prompt) + 80)
        numbers = Sampler(sampling).numbers(80)
        for at in range(0, 76, 2):
            logits = pair.propose(state, text[at])[:4]
            for name, own in (("coupled", numbers[at + 1 : at + 5]), ("apart", apart.random(4)), ("likeliest", None)):
                coupling = None if own is None else Coupling(sampling, own)
                found = pair.found(logits, Pass(None, 4, considered(1, coupling, logits.shape[-1])))
                ids = pair.ranked(*found, 1, coupling)[0][:, 0].tolist()
                met[name] += next((i for i in range(4) if ids[i] != text[at + 1 + i]), 4)
            pair.forward(state, Step.chain(np.array(text[at : at + 2], np.int32), state.length))
            state.commit([0, 1])
    print(met)
    assert met["coupled"] > 1.1 * met["apart"]
    assert met["coupled"] > met["likeliest"]
