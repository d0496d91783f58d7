"""One session on the NumPy backend: stop strings, ends, prefix reuse, cancellation."""

import threading

import numpy as np
import pytest
from tiny_chat import CONTEXT, write

from common.decode.requests import Emit
from common.engine import Engine
from common.errors import BimetalError, UsageError
from common.models import load_model
from common.options import GenerationOptions
from common.reference import NumpyOps
from common.sampling import log_softmax
from common.scores import PREFILL_ROWS, completed, logits_of
from common.step import MAX_DECODE_ROWS
from common.stop import StopText
from common.tokenizer import load_tokenizer

PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("tiny"))
    return load_model(folder, NumpyOps()), load_tokenizer(folder, {})


@pytest.fixture
def session(parts):
    return Engine(*parts, CONTEXT)


@pytest.fixture
def short(session, monkeypatch):
    """The session, on a backend that reads every step of these prompts as a short one."""
    monkeypatch.setattr(session.model.ops, "short_rows", MAX_DECODE_ROWS)
    return session


def generate(session, prompt=PROMPT, max_tokens=30, **options):
    how = {name: options.pop(name) for name in ("cancel", "shared") if name in options}
    pieces = list(session.stream(prompt, GenerationOptions(max_tokens=max_tokens, **options), **how))
    text = "".join(p.text for p in pieces)
    return text, [t for p in pieces for t in p.tokens], pieces[-1].finish_reason, pieces


def test_greedy_is_the_argmax_of_the_logits(session):
    _, tokens, reason, _ = generate(session)
    logits = completed(logits_of(session.model, PROMPT + tokens, CONTEXT))
    assert tokens == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert reason == "length"


def test_the_last_piece_alone_carries_reason_and_stats(session):
    *_, pieces = generate(session)
    assert all(p.finish_reason is None and p.stats is None for p in pieces[:-1])
    stats = pieces[-1].stats
    assert (stats.prompt_tokens, stats.cached_tokens, stats.new_tokens) == (20, 0, 30)
    assert (
        stats.step_bytes
        == sum(
            w.nbytes for layer in session.model.weights.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)
        )
        + session.model.weights.head.nbytes
    )


def test_a_character_that_the_end_cuts_is_not_shown(session, monkeypatch):
    """The reply ends after two of the three bytes of "€"."""
    euro = session.target.tokenizer.encode("a€", add_special_tokens=False)
    monkeypatch.setattr("common.sequence.decode", lambda _: (Emit(token, None) for token in euro))
    text, reply, reason, _ = generate(session, max_tokens=3)
    assert (text, reply, reason) == ("a", euro[:3], "length")


def test_max_tokens_one(session):
    _, tokens, reason, _ = generate(session, max_tokens=1)
    assert (len(tokens), reason) == (1, "length")


def test_the_context_ends_the_reply(parts):
    session = Engine(*parts, 25)
    _, tokens, reason, _ = generate(session, max_tokens=None)
    assert reason == "length"
    assert len(tokens) == 25 - len(PROMPT) + 1  # the token after the last place is still known
    assert session.slots[0].state.length == 25


def test_a_prompt_that_fills_the_context_gets_one_token(parts):
    _, tokens, reason, _ = generate(Engine(*parts, len(PROMPT)), max_tokens=None)
    assert (len(tokens), reason) == (1, "length")


def test_an_end_token_ends_the_reply_and_is_not_part_of_it(session):
    _, tokens, _, _ = generate(session)
    end = tokens[10]
    session.target.tokenizer.end_ids, before = frozenset({end}), session.target.tokenizer.end_ids
    try:
        session.reset()
        _, cut, reason, pieces = generate(session)
    finally:
        session.target.tokenizer.end_ids = before
    assert (cut, reason) == (tokens[: tokens.index(end)], "stop")
    assert pieces[-1].stats.new_tokens == len(cut) + 1


def test_a_stop_string_is_cut_wherever_tokens_split_it(session):
    text, *_ = generate(session)
    for width in (1, 2, 3, 5):
        stop = text[7 : 7 + width]
        cut, _, reason, _ = generate(session, stop=[stop])
        assert (cut, reason) == (text[: text.find(stop)], "stop")


def test_no_piece_shows_what_a_stop_string_takes_back(session):
    text, *_ = generate(session)
    stop = text[9:14]
    shown = ""
    for piece in session.stream(PROMPT, GenerationOptions(max_tokens=30, stop=[stop])):
        shown += piece.text
        assert text[: text.find(stop)].startswith(shown)


@pytest.mark.parametrize("text", ["abcabcabd", "aaaaab", "xxabc", "ab", ""])
@pytest.mark.parametrize("stop", [["abd"], ["aab"], ["zz"], ["abc", "ca"], ["b", "bc"]])
def test_stop_text_equals_a_search_over_the_whole(text, stop):
    held = StopText(stop)
    out = "".join(held.push(char) for char in text if not held.stopped)
    if not held.stopped:
        out += held.flush()
    # the stop string that is complete first ends the text
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    assert out == (text[: min(ends)[1]] if ends else text)
    assert held.stopped == bool(ends)


def test_log_probabilities_are_those_of_the_model(session):
    _, tokens, _, pieces = generate(session, logprobs=3, temperature=1.0, seed=5)
    rows = completed(logits_of(session.model, PROMPT + tokens, CONTEXT))[len(PROMPT) - 1 : -1]
    logprobs = [lp for p in pieces for lp in p.logprobs]
    assert [lp.token for lp in logprobs] == tokens
    for lp, row in zip(logprobs, rows, strict=True):
        expected = log_softmax(row)
        assert lp.logprob == pytest.approx(expected[lp.token], abs=1e-4)
        assert [id for id, _ in lp.top] == np.argsort(-expected)[:3].tolist()


def test_a_longer_prompt_reuses_what_was_read(short):
    _, tokens, _, _ = generate(short)
    longer = PROMPT + tokens + [70, 71, 72]
    _, warm, _, pieces = generate(short, longer)
    short.reset()
    _, cold, _, _ = generate(short, longer)
    assert warm == cold
    assert pieces[-1].stats.cached_tokens == len(PROMPT) + len(tokens) - 1  # the newest token was never run


def test_a_long_step_of_the_prompt_is_read_again_if_the_prompt_goes_on(session):
    """NumPy computes the longer prompt's rows in a step of another number of rows, in which they have other bits."""
    _, tokens, _, _ = generate(session)
    assert session.slots[0].state.long_steps == [(0, len(PROMPT))]
    longer = PROMPT + tokens + [70, 71, 72]
    warm = generate(session, longer, logprobs=1)[-1]
    assert warm[-1].stats.cached_tokens == 0
    session.reset()
    cold = generate(session, longer, logprobs=1)[-1]
    assert [piece.logprobs for piece in warm] == [piece.logprobs for piece in cold]


def test_the_same_prompt_again_reads_nothing(session):
    _, first, _, _ = generate(session)
    _, second, _, pieces = generate(session)
    assert first == second
    assert pieces[-1].stats.cached_tokens == len(PROMPT)


def test_another_continuation_of_the_last_prompt_goes_back_to_its_end(short):
    generate(short)
    other = [*PROMPT, 99, 98]
    _, warm, _, pieces = generate(short, other)
    assert pieces[-1].stats.cached_tokens == len(PROMPT)
    short.reset()
    assert warm == generate(short, other)[1]


@pytest.mark.parametrize("shared", [1, 7, len(PROMPT)])
def test_a_prompt_that_begins_as_the_last_was_said_to(short, shared):
    generate(short, shared=shared)
    _, again, _, pieces = generate(short, shared=shared)
    assert pieces[-1].stats.cached_tokens == shared
    other = [*PROMPT[:shared], 99, 98, 97]
    _, warm, _, pieces = generate(short, other, shared=shared + 2)
    assert pieces[-1].stats.cached_tokens == shared
    _, _, _, pieces = generate(short, [*other[: shared + 2], 96], shared=shared)  # which the state has passed
    assert pieces[-1].stats.cached_tokens == shared + 2
    _, _, _, pieces = generate(short, other[: shared + 2])  # no logits are kept for it
    assert pieces[-1].stats.cached_tokens == 0
    short.reset()
    assert warm == generate(short, other)[1]
    short.reset()
    assert again == generate(short)[1]


def test_another_prompt_starts_over(session):
    generate(session)
    _, tokens, _, pieces = generate(session, [90, 91, 92])
    assert pieces[-1].stats.cached_tokens == 0
    session.reset()
    assert tokens == generate(session, [90, 91, 92])[1]


def test_a_reply_left_in_the_middle_leaves_a_usable_session(session):
    _, whole, _, _ = generate(session)
    session.reset()
    stream = session.stream(PROMPT, GenerationOptions(max_tokens=30))
    for _ in range(5):
        next(stream)
    stream.close()
    assert session.slots[0].committed == (PROMPT + whole)[: session.slots[0].state.length]
    assert generate(session)[1] == whole


def test_cancel_before_prefill_and_while_decoding(session):
    cancel = threading.Event()
    pieces = []
    for piece in session.stream(PROMPT, GenerationOptions(max_tokens=30), cancel):
        pieces.append(piece)
        cancel.set()
    assert pieces[-1].finish_reason == "cancelled"
    assert len(pieces) <= 3
    *_, (last,) = generate(session, [80, 81], cancel=cancel)
    assert (last.text, last.finish_reason, last.stats.new_tokens) == ("", "cancelled", 0)


def test_prefill_in_pieces_reports_progress(parts):
    model, tokenizer = parts
    session = Engine(model, tokenizer, 2 * PREFILL_ROWS + 10)
    seen = []
    prompt = [40 + i % 50 for i in range(PREFILL_ROWS + 7)]
    options = GenerationOptions(max_tokens=1, on_prefill=lambda read, total: seen.append((read, total)))
    list(session.stream(prompt, options))
    assert seen == [(PREFILL_ROWS, len(prompt)), (len(prompt), len(prompt))]


def test_refusals(session):
    for options, message in (
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [1000]}, "token id 1000 is outside the vocabulary of 258"),
        ({"prompt": [-1]}, "token id -1 is outside"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop": [""]}, "stop is .*; it must be text or a list of texts"),
        ({"logprobs": 1000}, "logprobs is 1000; it must be at most the vocabulary of 258"),
    ):
        with pytest.raises(UsageError, match=message):
            generate(session, **options)
    with pytest.raises(BimetalError, match=f"the prompt has {CONTEXT + 1} tokens and the context holds {CONTEXT}"):
        generate(session, [50] * (CONTEXT + 1))


def test_another_prompt_begins_the_same_state_anew(session):
    """The state is reused, and with it what a backend has captured for it."""
    state, (_, first, *_) = session.slots[0].state, generate(session)
    generate(session, prompt=list(range(70, 90)))
    assert session.slots[0].state is state
    assert generate(session)[1] == first
    assert state.length == len(PROMPT) + 29
