"""WeDLM's windows on the GPU: the order of rows, the cache, and tokens that are NumPy's."""

from contextlib import closing
from itertools import islice

import numpy as np
import pytest
import tiny
from test_wedlm_schedules import ends_of_the_leading_run, replies_at_once, whole_text
from wedlm_simulator import simulate, simulate_checked

from common.decode.alone import run_alone
from common.decode.run import DecoderRun
from common.decoders import Speculation, WedlmOptions
from common.models import load_model
from common.models.window import SINKS, bounded
from common.reference import NumpyOps
from common.sampling import Sampler, Sampling
from common.step import Step

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_backend.ops import CudaOps  # noqa: E402

pytestmark = pytest.mark.gpu

MASK, PROMPT = 90, [5, 17, 3, 60, 44, 2, 31]
SETTINGS = [(16, 0.4, 0.02), (6, 4.3, 0.05), (4, 0.0, 0.02), (1, 4.2, 0.0), (5, 100.0, 0.0)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.wedlm(tmp_path_factory.mktemp("wedlm") / "model", mask_token_id=MASK)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, CudaOps())


@pytest.fixture(scope="module")
def on_host(folder):
    return load_model(folder, NumpyOps())


def read(model, prompt, capacity=64):
    state, logits = model.new_state(capacity), None
    if prompt:
        logits = model.forward(state, Step.chain(np.array(prompt, np.int32), 0), slice(len(prompt) - 1, len(prompt)))
        state.commit(np.arange(len(prompt)))
    return state, logits


def decoded(model, prompt, count, options, unread=3, sampling=None):
    unread = 0 if options.verify else unread
    state, logits = read(model, prompt[: len(prompt) - unread])
    run = DecoderRun(model, state, logits, Sampler(sampling or Sampling(), prompt), prompt)
    run.options, run.unread = Speculation("wedlm", wedlm=options), prompt[len(prompt) - unread :]
    out, rows = [], []
    with closing(run_alone(run)) as tokens:
        for token, row in islice(tokens, count):
            out.append(token)
            rows.append(row)
    return out, [model.ops.read(row)[0] for row in rows], run.wedlm, state


def test_rows_may_be_reordered(model, on_host):
    """Known rows first and masks after them, each at its own position, with part of them in the cache or not."""
    tokens = np.array([8, 9, 11, MASK, MASK, MASK], np.int32)
    order = np.array([7, 8, 10, 9, 11, 12], np.int32)
    step = Step(tokens, order, np.arange(-1, 5, dtype=np.int32), np.zeros(6, np.int32))
    logits = {}
    for each in (model, on_host):
        state, _ = read(each, PROMPT)
        whole = each.ops.read(each.forward(state, step))
        state.commit([0, 1])
        rest = Step(tokens[2:], order[2:], np.arange(-1, 3, dtype=np.int32), np.zeros(4, np.int32))
        assert np.abs(each.ops.read(each.forward(state, rest)) - whole[2:]).max() < 5e-2
        logits[each.ops.name] = whole
    assert np.abs(logits["cuda"] - logits["numpy"]).max() < 5e-2
    state, _ = read(model, PROMPT)
    physical = model.ops.read(model.forward(state, Step.chain(tokens, 7)))  # control: positions by place in the step
    assert np.abs(physical - logits["numpy"]).max() > 0.1


@pytest.mark.parametrize(("window", "tau", "penalty"), SETTINGS)
def test_tokens_are_numpys(window, tau, penalty, model, on_host):
    """Where they differ, the entropy or the best logits were near a tie."""
    options = WedlmOptions(window, tau, penalty)
    ours, rows, counts, _ = decoded(model, PROMPT, 20, options)
    theirs, expected, _, _ = decoded(on_host, PROMPT, 20, options)
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), 20)
    assert same > 4
    for row, other in zip(rows[: min(same, 4)], expected, strict=False):
        assert np.abs(row - other).max() < 5e-2
    assert counts.tokens == 20


@pytest.mark.parametrize(("window", "tau", "penalty"), SETTINGS)
def test_the_cache_is_a_prefills(window, tau, penalty, model):
    """Committed keys and values are those of reading prompt and reply anew: the next logits are the same."""
    out, _, _, state = decoded(model, PROMPT, 16, WedlmOptions(window, tau, penalty))
    fresh, _ = read(model, [*PROMPT, *out][: state.length])
    step = Step.chain(np.array([7], np.int32), state.length)
    ours, theirs = (model.ops.read(model.forward(each, step)) for each in (state, fresh))
    assert np.abs(ours - theirs).max() < 2e-2


def test_a_window_of_one_is_a_loop(model):
    """One mask after the text, its likeliest token in its place, and so on."""
    out, _, counts, _ = decoded(model, PROMPT, 12, WedlmOptions(1, 4.2, 0.0))
    text = list(PROMPT)
    for token in out:
        state, _ = read(model, text)
        row = model.ops.read(model.forward(state, Step.chain(np.array([MASK], np.int32), len(text))))[0]
        row[MASK] = -np.inf
        assert row.max() - row[token] < 2e-2
        text.append(token)
    assert counts.fills == 12


@pytest.mark.parametrize(("window", "tau"), [(1, 4.0), (8, 4.4), (16, 100.0)])
def test_verified_text_is_plain_decodings(window, tau, model):
    for prompt in (PROMPT, [1], [7] * 12):
        state, logits = read(model, prompt)
        expected = [token for token, _ in islice(run_alone(DecoderRun(model, state, logits, Sampler(Sampling()))), 30)]
        out, _, counts, state = decoded(model, prompt, 30, WedlmOptions(window, tau, verify=True))
        assert out == expected
        assert counts.forwards < 30
        assert state.length == len(prompt) + 29


def test_filled_positions_after_a_mask_are_not_committed(model):
    """The leading run holds a prefill's keys and values; a filled row that saw a mask does not."""
    step = Step(
        np.array([8, 9, MASK], np.int32),
        np.array([7, 9, 8], np.int32),
        np.arange(-1, 2, dtype=np.int32),
        np.zeros(3, np.int32),
    )
    rows = {}
    for kept in (1, 2):
        state, _ = read(model, PROMPT)
        model.forward(state, step)
        state.commit(np.arange(kept))
        fresh, _ = read(model, [*PROMPT, 8, 9][: 7 + kept])
        after = Step.chain(np.array([5], np.int32), 7 + kept)
        ours, theirs = (model.ops.read(model.forward(each, after)) for each in (state, fresh))
        rows[kept] = np.abs(ours - theirs).max()
    assert rows[1] < 2e-2
    assert rows[2] > 5e-2


@pytest.mark.parametrize(("window", "tau", "penalty"), [(6, 4.3, 0.05), (4, 0.0, 0.02), (5, 100.0, 0.0)])
@pytest.mark.parametrize("limit", [None, 6 + SINKS])
def test_tokens_are_a_simulators_without_a_cache(limit, window, tau, penalty, model):
    """The procedure in its natural order, over forwards of the whole text from an empty state; a bounded cache too."""
    model = model if limit is None else bounded(model, limit)
    expected, fills = simulate(whole_text(model), PROMPT, 14, window, tau, penalty, MASK)
    out, _, counts, _ = decoded(model, PROMPT, 14, WedlmOptions(window, tau, penalty))
    assert (out, counts.fills) == (expected, fills)


@pytest.mark.parametrize("sure", [0.0, 4.2])
def test_checked_windows_are_the_simulators(sure, model):
    expected, fills = simulate_checked(whole_text(model), PROMPT, 14, 6, 4.4, 0.02, sure, MASK)
    out, _, counts, state = decoded(model, PROMPT, 14, WedlmOptions(6, 4.4, 0.02, sure=sure), unread=1)
    assert (out, counts.fills) == (expected, fills)
    assert state.length < len(PROMPT) + 14


def test_a_reply_ends_at_an_end_token_of_the_leading_run(model):
    ends_of_the_leading_run(model)


def test_several_replies_at_once(model):
    """Windows of other sizes, verified, checked or not, beside plain decoding in one pool: the tokens of each alone."""
    assert replies_at_once(model, 5) == replies_at_once(model, 1)


def test_draws_by_seed(model):
    options = WedlmOptions(6, 4.3)
    texts = [decoded(model, PROMPT, 12, options, sampling=Sampling(temperature=1.0, seed=s))[0] for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    penalized = decoded(model, PROMPT, 12, options, sampling=Sampling(repetition_penalty=5.0))[0]
    assert len(penalized) == 12


def test_no_row_of_logits_is_copied(model, monkeypatch):
    """Two small arrays per step cross to the host."""
    options, read_all, sizes = WedlmOptions(6, 4.3), CudaOps.read_all, []
    monkeypatch.setattr(CudaOps, "read", lambda self, x: pytest.fail("a row was read"))
    monkeypatch.setattr(
        CudaOps, "read_all", lambda self, *xs: (sizes.append(sum(x.size for x in xs)), read_all(self, *xs))[1]
    )
    state = model.new_state(64)
    run = DecoderRun(
        model, state, None, Sampler(Sampling()), PROMPT, Speculation("wedlm", wedlm=options), unread=PROMPT
    )
    with closing(run_alone(run)) as tokens:
        assert len(list(islice(tokens, 12))) == 12
    assert max(sizes) <= 12


@pytest.mark.parametrize("options", [WedlmOptions(6, 4.3, 0.05), WedlmOptions(6, 4.3, 0.05, sure=0.0)])
def test_the_last_token_of_a_full_state(options, model, on_host):
    """It has no position of its own: a step is launched ahead of the tokens before it, and gives it."""
    (out, rows, _, state), (expected, others, _, _) = (decoded(each, PROMPT, 99, options) for each in (model, on_host))
    assert (out, state.length) == (expected, 64)
    assert len(out) == 65 - len(PROMPT)
    assert np.abs(rows[-1] - others[-1]).max() < 1e-2
