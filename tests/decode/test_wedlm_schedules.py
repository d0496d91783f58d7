"""WeDLM's windows: other schedules with the same tokens, counts of forwards and rows, ends, several replies at once."""
# ruff: noqa: F811  tests take the fixtures of test_wedlm_decoder.py by their names

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from test_wedlm_decoder import MASK, PROMPT, decoded, folder, model, read  # noqa: F401  fixtures
from wedlm_simulator import simulate

from common.decode.wedlm import choose
from common.decoders import WedlmOptions
from common.engine import Engine
from common.errors import NotFiniteError
from common.models import load_model
from common.options import GenerationOptions
from common.reference import NumpyOps
from common.sampling import Sampling
from common.sequence import Call
from common.step import Step

EVERYTHING = 1e9  # tau that fills every mask
SETTINGS = [(16, 0.4, 0.02), (6, 4.3, 0.05), (8, 4.4, 0.0), (4, 0.0, 0.02), (5, EVERYTHING, 0.0)]


def chosen_rows(model, step, state, masks):
    """The likeliest tokens and the entropies of the last `masks` rows; nothing is committed."""
    logits = model.forward(state, step)[len(step) - masks :]
    return [model.ops.read(x) for x in model.ops.argmax_entropy(logits, MASK)]


def in_two_forwards(model, prompt, count, options):
    """`count` tokens and the forwards of a schedule that reads what it filled by a forward of its own."""
    state, _ = read(model, prompt)
    tokens, filled, forwards, out = [MASK] * options.window, [False] * options.window, 0, []
    while len(out) < count:
        order = sorted(range(options.window), key=lambda i: not filled[i])
        rows, parents = np.array([tokens[i] for i in order], np.int32), np.arange(-1, options.window - 1)
        step = Step(rows, state.length + np.array(order, np.int32), parents.astype(np.int32), np.zeros_like(rows))
        masks = np.array([i for i in order if not filled[i]])
        best, entropies = chosen_rows(model, step, state, len(masks))
        for j in choose(entropies, masks - masks[0], options):
            tokens[masks[j]], filled[masks[j]] = int(best[j]), True
        run = filled.index(False) if False in filled else options.window
        forwards += 1 + bool(run)
        if run:
            model.forward(state, Step.chain(np.array(tokens[:run], np.int32), state.length))
            state.commit(np.arange(run))
            out += tokens[:run]
        tokens, filled = tokens[run:] + [MASK] * run, filled[run:] + [False] * run
    return out, forwards


@pytest.mark.parametrize(("window", "tau", "penalty"), SETTINGS)
@pytest.mark.few(3)
def test_one_forward_gives_the_tokens_of_two(window, tau, penalty, model):
    """Committing in the forward that fills gives the tokens of committing in a forward of its own."""
    options = WedlmOptions(window, tau, penalty)
    expected, forwards = in_two_forwards(model, PROMPT, 20, options)
    for unread in (0, 1, 5):
        out, stats, _ = decoded(model, PROMPT, 20, options, unread=unread)
        assert out == expected[:20]
        assert stats.forwards == stats.fills < forwards


@pytest.mark.parametrize(("window", "steps"), [(16, 3), (6, 7)])
def test_counts_where_every_mask_is_filled(window, steps, model):
    """40 tokens: forwards and rows by their closed forms, each less the last forward, which would only commit."""
    options = WedlmOptions(window, EVERYTHING, 0.0)
    assert in_two_forwards(model, PROMPT, 40, options)[1] == 2 * steps
    for unread in (0, 5):
        _, stats, _ = decoded(model, PROMPT, 40, options, unread=unread)
        assert (stats.forwards, stats.rows) == (steps, window + 2 * window * (steps - 1))
    _, stats, _ = decoded(model, PROMPT, 40, WedlmOptions(window, EVERYTHING, 0.0, order="paper"), unread=0)
    assert (stats.forwards, stats.fills, stats.rows) == (2 * steps - 1, steps, (2 * steps - 1) * window)


@pytest.mark.parametrize("tau", [0.0, 4.2, EVERYTHING])
def test_a_window_of_one_is_a_loop(tau, model):
    """One mask after the text, its likeliest token in its place, and so on, whatever the threshold."""
    out, stats, _ = decoded(model, PROMPT, 12, WedlmOptions(1, tau, 0.02))
    for i, token in enumerate(out):
        text = [*PROMPT, *out[:i]]
        state, _ = read(model, text)
        (best,), _ = chosen_rows(model, Step.chain(np.array([MASK], np.int32), len(text)), state, 1)
        assert token == best
    assert (stats.forwards, stats.fills) == (12, 12)


@pytest.mark.parametrize("temperature", [0.1, 5.0])
def test_what_is_filled_does_not_depend_on_sampling(temperature, model):
    """Entropies are of the model's own distribution: before the temperature, top-k and top-p."""
    options = WedlmOptions(6, 4.3, 0.05)
    greedy, counts, _ = decoded(model, PROMPT, 20, options)
    narrow = Sampling(temperature=temperature, top_k=1, top_p=0.5, seed=3)
    drawn, stats, _ = decoded(model, PROMPT, 20, options, narrow)
    assert (drawn, stats.fills, stats.rows) == (greedy, counts.fills, counts.rows)


@pytest.mark.parametrize("options", [(6, 4.3, 0.05), (1, 4.2, 0.0), (5, EVERYTHING, 0.0)])
def test_forwards_and_rows_are_counted(options, model, monkeypatch):
    forward, sizes = type(model).forward, []

    def counted(self, state, step, *rest):
        sizes.append(len(step))
        return forward(self, state, step, *rest)

    monkeypatch.setattr(type(model), "forward", counted)
    out, stats, _ = decoded(model, PROMPT, 20, WedlmOptions(*options), unread=3)
    sizes = sizes[1 : len(sizes) - model.ops.runs_ahead]  # without the prompt's own, and one in flight at the end
    assert (stats.forwards, stats.rows, stats.tokens) == (len(sizes), sum(sizes) - 3, len(out))
    assert stats.cache_share == len(out) / stats.rows
    assert stats.cache_share == pytest.approx(stats.tokens_per_forward / (stats.rows / stats.fills))


@pytest.mark.parametrize("count", [1, 2, 5, 20])
def test_a_step_whose_confirmed_tokens_end_the_reply_is_counted(count, model, monkeypatch):
    """It was left out, as one in flight is."""
    forward, sizes = type(model).forward, []

    def counted(self, state, step, *rest):
        sizes.append(len(step))
        return forward(self, state, step, *rest)

    monkeypatch.setattr(type(model), "forward", counted)
    _, stats, _ = decoded(model, PROMPT, count, WedlmOptions(6, EVERYTHING, 0.0, sure=0.0), unread=0)
    assert (stats.forwards, stats.rows) == (len(sizes) - 1, sum(sizes[1:]))  # without the prompt's own


@pytest.mark.parametrize("options", [{}, {"sure": 0.0}, {"verify": True}])
def test_the_wait_for_the_device_is_choice(options, model, monkeypatch):
    """With `sure` it counted as forward: the ids that confirm are read before those of the masks."""
    read_all, waits = type(model.ops).read_all, []

    def slow(self, *of):
        waits.append(0.005)
        time.sleep(waits[-1])
        return read_all(self, *of)

    monkeypatch.setattr(type(model.ops), "read_all", slow)
    _, stats, _ = decoded(model, PROMPT, 8, WedlmOptions(6, 4.3, 0.05, **options))
    assert stats.seconds["choice"] >= sum(waits[bool(options.get("verify")) :])  # the first of `verify` is the prompt's


class Ids:
    """A tokenizer of tokens without text, of which `end_ids` end a reply."""

    vocab_size = 0

    def __init__(self, *end_ids):
        self.end_ids = frozenset(end_ids)

    def decoder(self):
        return SimpleNamespace(push=lambda token: "", flush=lambda: "")


def whole_text(model):
    """Forwards of the whole text from an empty state, in its natural order, as the simulators call them."""

    def forward(tokens, positions, _):
        order = np.argsort(tokens == MASK, kind="stable")
        parents, slots = np.arange(-1, len(tokens) - 1, dtype=np.int32), np.zeros(len(tokens), np.int32)
        step = Step(tokens[order].astype(np.int32), positions[order].astype(np.int32), parents, slots)
        logits = model.ops.read(model.forward(model.new_state(64), step))
        return logits[np.argsort(order)].astype(np.float64)

    return forward


def ends_of_the_leading_run(model):
    """A filled end token ends nothing before its turn; the limit of new tokens holds inside a run."""
    order: list[int] = []
    simulated, _ = simulate(whole_text(model), PROMPT, 14, 6, 0.0, 0.0, MASK, order)
    early = [at for i, at in enumerate(order) if at < 14 and any(before not in order[:i] for before in range(at))]
    assert len(early) > 3  # filled behind a mask

    def reply(count, *ends):
        options = GenerationOptions(max_tokens=count, spec="wedlm", wedlm_window=6, wedlm_tau=0.0, wedlm_lambda=0.0)
        pieces = list(Engine(model, Ids(*ends), 64).stream(PROMPT, options))
        return [token for piece in pieces for token in piece.tokens], pieces[-1].finish_reason

    whole, reason = reply(14)
    assert (whole, reason) == (simulated, "length")
    assert [reply(count)[0] for count in (1, 5)] == [whole[:1], whole[:5]]
    for end in {whole[2], whole[-1], *(whole[at] for at in early)}:
        assert reply(14, end) == (whole[: whole.index(end)], "stop")


def test_a_reply_ends_at_an_end_token_of_the_leading_run(model):
    ends_of_the_leading_run(model)


CALLS = [
    (PROMPT, {"wedlm_window": 6, "wedlm_tau": 4.3, "max_tokens": 17}),
    ([1], {"wedlm_window": 16, "wedlm_tau": 4.4, "wedlm_verify": True, "max_tokens": 12}),
    (PROMPT[::-1] * 5, {"wedlm_window": 40, "wedlm_tau": 3.0, "wedlm_order": "paper", "max_tokens": 9}),
    ([8, 9], {"wedlm_window": 8, "wedlm_tau": 4.4, "wedlm_sure": 4.2, "max_tokens": 14}),
    ([4, 4, 4], {"spec": "off", "max_tokens": 11}),
]


def replies_at_once(model, parallel):
    """The tokens of each call, of an engine that runs `parallel` of them at a time."""
    engine, out = Engine(model, Ids(), 128, parallel), []
    for prompt, options in CALLS:
        tokens = []
        out.append(tokens)
        put = lambda piece, tokens=tokens: tokens.extend(piece.tokens)  # noqa: E731
        end = lambda error: error and pytest.fail(str(error))  # noqa: E731
        engine.submit(Call(prompt, GenerationOptions(**options), put, end, threading.Event()))
    engine.drain()
    assert [len(tokens) for tokens in out] == [options["max_tokens"] for _, options in CALLS]
    return out


def test_several_replies_at_once(model):
    """Windows of other sizes and lengths, verified, checked or not, beside plain decoding: the tokens of each alone."""
    assert replies_at_once(model, 5) == replies_at_once(model, 1)


@pytest.mark.parametrize("fails", [False, True])
def test_masks_of_several_windows_are_one_call(fails, folder, monkeypatch):
    """Each step finds what the masks of all windows predict at once; where a row is not finite, of each by itself."""
    model = load_model(folder, NumpyOps())
    alone, exact, rows = replies_at_once(model, 1), NumpyOps.argmax_entropy, []

    def counted(self, logits, excluded):
        rows.append(len(logits))
        if fails and len(logits) > 40:
            raise NotFiniteError("another window's row")
        return exact(self, logits, excluded)

    monkeypatch.setattr(NumpyOps, "argmax_entropy", counted)
    assert replies_at_once(model, 5) == alone
    assert max(rows) > 40  # more than any window has
