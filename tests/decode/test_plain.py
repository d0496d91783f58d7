"""Plain decoding of every tiny model equals the argmax of its logits read at once."""

import numpy as np
import pytest
import tiny

from common.decode.alone import run_alone
from common.decode.run import DecoderRun
from common.sampling import Sampler, Sampling
from common.step import Step

PROMPT, NEW = 20, 40
NEAR_TIE = 1e-4  # a one-row step and a long one round differently; only a closer call than this may differ


@pytest.mark.parametrize("name", tiny.MODELS)
@pytest.mark.few(6)
def test_greedy_equals_the_argmax_of_one_long_step(name, ops):
    model = tiny.load(name, ops)
    prompt = tiny.golden(name)["ids"][:PROMPT]
    tokens = decode(model, prompt, NEW)
    logits = tiny.logits_of(model, np.array([*prompt, *tokens]))[PROMPT - 1 : -1]
    best = np.sort(logits, axis=-1)
    for token, row, margin in zip(tokens, logits, best[:, -1] - best[:, -2], strict=True):
        assert token == row.argmax() or margin < NEAR_TIE


def test_the_generator_can_be_left_and_taken_up_again(ops):
    model = tiny.load("qwen35", ops)
    prompt = tiny.golden("qwen35")["ids"][:PROMPT]
    whole = decode(model, prompt, NEW)
    state, logits = prefilled(model, prompt)
    tokens = run_alone(DecoderRun(model, state, logits, Sampler(Sampling())))
    first = [next(tokens)[0] for _ in range(NEW // 2)]
    tokens.close()
    assert state.length == PROMPT + len(first) - 1  # all but the newest
    logits = model.forward(state, Step.chain(np.array(first[-1:]), state.length))
    state.commit([0])
    again = run_alone(DecoderRun(model, state, logits, Sampler(Sampling())))
    assert first + [next(again)[0] for _ in range(NEW - len(first))] == whole


def test_it_ends_where_the_state_is_full(ops):
    model = tiny.load("llama", ops)
    prompt = tiny.golden("llama")["ids"][:PROMPT]
    state, logits = prefilled(model, prompt, capacity=PROMPT + 3)
    assert len(list(run_alone(DecoderRun(model, state, logits, Sampler(Sampling()))))) == 4
    assert state.length == state.capacity


def test_seeded_sampling_is_the_same_on_every_backend(ops):
    """The host samples from each backend's logits: rounding would have to cross a draw's place in a cumulative sum."""
    model = tiny.load("qwen3", ops)
    prompt = tiny.golden("qwen3")["ids"][:PROMPT]
    tokens = decode(model, prompt, 12, temperature=1.0, top_p=0.95, seed=11)
    logits = tiny.logits_of(model, np.array([*prompt, *tokens]))[PROMPT - 1 : -1]
    sampler = Sampler(Sampling(temperature=1.0, top_p=0.95, seed=11))
    assert tokens == [sampler.pick(row) for row in logits]


def decode(model, prompt, count, **sampling):
    state, logits = prefilled(model, prompt)
    tokens = run_alone(DecoderRun(model, state, logits, Sampler(Sampling(**sampling))))
    return [next(tokens)[0] for _ in range(count)]


def prefilled(model, prompt, capacity=tiny.CAPACITY):
    state = model.new_state(capacity)
    logits = model.forward(state, Step.chain(np.asarray(prompt), 0), slice(len(prompt) - 1, len(prompt)))
    state.commit(np.arange(len(prompt)))
    return state, logits
