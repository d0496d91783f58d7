"""Speculative steps of several replies at once: the texts and states of each alone, in fewer requests."""

import threading
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
from test_engine import CONTEXT, AheadOps, Ids, PooledOps, Reply, alone, drain, prompts_of, submit

from common.checkpoint import open_checkpoint
from common.decode.tuner import TunerShare
from common.demo import demo_path
from common.draft_stretches import DraftStretches
from common.engine import Engine
from common.errors import BimetalError, NoRoomError, NotFiniteError
from common.models import load_model
from common.models.dflash import DflashPair
from common.models.drafts import load_pair
from common.options import GenerationOptions
from common.reference import NumpyOps
from common.row_runner import RowRunner
from common.sequence import Call
from common.stretches import Stretches
from common.tokenizer import load_tokenizer


class Letters(Ids):
    """A tokenizer whose tokens are letters."""

    vocab_size = 10**6

    def decoder(self):
        return SimpleNamespace(push=lambda token: chr(97 + token % 26))


TEXTS = [
    "def add(a, b):\n    return a",
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\n\n",
    "for i in range(",
]


def pair_of(ops):
    return load_pair(tiny.FOLDER / "dflash", tiny.load("qwen35", ops))


def demo_pair(ops):
    """Load a pair whose draft's tokens are often accepted."""
    return load_pair(demo_path("draft"), load_model(demo_path(), ops))


def demo_prompts():
    checkpoint = open_checkpoint(demo_path())
    return list(map(load_tokenizer(checkpoint.path, checkpoint.config).encode, TEXTS))


@pytest.fixture
def counted(monkeypatch):
    """Counts of launches of several replies' steps, of those whose drafts the host reads, and of requested drafts."""
    counts = SimpleNamespace(steps=0, chains=0, drafted=0)

    def count(owner, name, field):
        real = getattr(owner, name)

        def called(*args):
            setattr(counts, field, getattr(counts, field) + 1)
            return real(*args)

        monkeypatch.setattr(owner, name, called)

    count(DraftStretches, "launch", "steps")
    count(DraftStretches, "_launch_chains", "chains")
    count(RowRunner, "drafted", "drafted")
    return counts


@pytest.mark.parametrize("ops", [PooledOps, AheadOps])
def test_greedy_chains_are_verified_before_they_are_read(ops, counted):
    """Replies end at several lengths, one is cancelled; what their states give for one more token is compared too."""
    pair, alike = demo_pair(ops()), demo_pair(NumpyOps())
    engine = Engine(pair, Ids(), CONTEXT, parallel=4)
    asked = [
        (prompt, {"spec": "chain", "tree_budget": 5, "max_tokens": most})
        for prompt, most in zip(demo_prompts(), (5, 9, 14, 40), strict=True)
    ]
    replies = [submit(engine, prompt, **how) for prompt, how in asked]
    drain(engine, replies, cancels=[(replies[3], 9)])
    assert counted.chains == counted.steps < 14
    assert not counted.drafted
    for reply, (prompt, _) in zip(replies, asked, strict=True):
        assert reply.error is None
        expected = alone(alike, prompt, spec="off", max_tokens=len(reply.tokens))
        assert (reply.tokens, reply.length) == (expected.tokens, expected.length)
        assert np.array_equal(reply.after, expected.after)
    assert [len(reply.tokens) for reply in replies[:3]] == [5, 9, 14]
    for reply in replies:  # the first token came before the first step; the last step is counted too
        lengths = reply.sequence.run.stats.lengths
        assert sum(length * steps for length, steps in lengths.items()) == len(reply.tokens) - 1


@pytest.mark.parametrize(("size", "budget", "is_chain"), [(7, None, True), (15, None, False), (7, 7, False)])
def test_a_short_tree_of_auto_is_a_chain(size, budget, is_chain, counted, monkeypatch):
    """A tree of a budget that the options name stays a tree, and so does a larger one."""
    monkeypatch.setattr(TunerShare, "choose", lambda share, most=None: size)
    engine, asked = Engine(demo_pair(AheadOps()), Ids(), CONTEXT, parallel=2), demo_prompts()[:2]
    replies = [submit(engine, prompt, spec="tree", tree_budget=budget, max_tokens=16) for prompt in asked]
    drain(engine, replies)
    assert counted.steps > 1
    assert counted.chains == (counted.steps if is_chain else 0)
    for reply, prompt in zip(replies, asked, strict=True):
        expected = alone(demo_pair(NumpyOps()), prompt, spec="off", max_tokens=16)
        assert (reply.error, reply.tokens) == (None, expected.tokens)


@pytest.mark.parametrize(
    "how",
    [
        {"spec": "tree", "tree_budget": 7},
        {"spec": "chain", "tree_budget": 3, "temperature": 0.8, "seed": 1},
        {"spec": "lookup", "tree_budget": 7},
    ],
)
def test_other_drafts_share_passes_and_steps(how, counted):
    pair, alike, random = pair_of(AheadOps()), pair_of(NumpyOps()), np.random.default_rng(1)
    engine = Engine(pair, Ids(), CONTEXT, parallel=3)
    prompts = prompts_of("qwen35", 3, random)
    replies = drain(engine, [submit(engine, prompt, max_tokens=16, **how) for prompt in prompts])
    assert counted.steps
    assert not counted.chains
    for reply, prompt in zip(replies, prompts, strict=True):
        assert (reply.error, reply.tokens) == (None, alone(alike, prompt, max_tokens=16, **how).tokens)


def test_a_draft_of_nan_ends_its_reply_alone(monkeypatch):
    pair = pair_of(NumpyOps())
    engine = Engine(pair, Ids(), CONTEXT, parallel=2)
    replies = [submit(engine, [3 + n, 4, 5], spec="chain", tree_budget=3, max_tokens=20) for n in range(2)]
    while not all(reply.sequence.new_tokens > 4 for reply in replies):
        engine.turn()
    propose, masks = type(pair).propose_each, pair.draft.block

    def with_nan(self, state, step, rows):
        logits = propose(self, state, step, rows).copy()
        if len(step.runs) == 2:
            logits[masks : 2 * masks] = np.nan
        return logits

    monkeypatch.setattr(type(pair), "propose_each", with_nan)
    while not replies[1].ended:
        engine.turn()
    monkeypatch.undo()
    drain(engine, replies)
    assert isinstance(replies[1].error, NotFiniteError)
    assert replies[0].error is None
    expected = alone(pair, [3, 4, 5], spec="off", max_tokens=20)
    assert replies[0].tokens == expected.tokens


def test_a_draft_without_memory_suspends_a_reply(monkeypatch):
    """And ends none, where one reply alone drafts too."""
    pair, real, refused = pair_of(AheadOps()), DflashPair.drafted, []

    def drafted(self, *args):
        if not refused:
            refused.append(args)
            raise NoRoomError("no page is free")
        return real(self, *args)

    engine = Engine(pair, Ids(), CONTEXT, parallel=2)
    ways = {"spec": "tree", "tree_budget": 7}, {"spec": "off"}
    replies = [submit(engine, [3 + n, 4, 5], max_tokens=12, **how) for n, how in enumerate(ways)]
    monkeypatch.setattr(DflashPair, "drafted", drafted)
    drain(engine, replies)
    assert refused
    assert engine.preemptions == 1
    for n, reply in enumerate(replies):
        assert reply.error is None
        assert reply.tokens == alone(pair_of(NumpyOps()), [3 + n, 4, 5], spec="off", max_tokens=12).tokens


def test_replies_with_and_without_a_draft_of_their_own_pass(counted):
    """A pass of DFlash2 has rows of one sequence alone: two replies that need it do not share it, one does not wait."""
    pair, alike = (load_pair(tiny.FOLDER / "dflash2", tiny.load("qwen35", ops())) for ops in (AheadOps, NumpyOps))
    tree, lookup = {"spec": "tree", "tree_budget": 7}, {"spec": "lookup", "tree_budget": 7}
    prompts = prompts_of("qwen35", 3, np.random.default_rng(2))
    for ways, shares in (((lookup, tree, tree), False), ((lookup, tree, lookup), True)):
        engine = Engine(pair, Ids(), CONTEXT, parallel=3)
        asked = list(zip(prompts, ways, strict=True))
        replies = [submit(engine, prompt, max_tokens=24, **how) for prompt, how in asked]
        while not all(reply.sequence.new_tokens for reply in replies):
            engine.turn()
        counted.steps, turns = 0, 0
        while len(engine.running) == 3:
            turns += engine.turn()
        assert counted.steps == (turns if shares else 0)
        assert turns > 1
        drain(engine, replies)
        for reply, prompt in zip(replies, prompts, strict=True):
            assert (reply.error, reply.tokens) == (None, alone(alike, prompt, max_tokens=24, spec="off").tokens)


def test_tokens_are_delivered_before_a_step_that_the_host_waits_for(monkeypatch):
    """On a backend that computes at once they would otherwise wait for the whole next step."""
    done, launch = [], DraftStretches.launch
    monkeypatch.setattr(DraftStretches, "launch", lambda each: (done.append("launch"), launch(each))[1])
    engine = Engine(pair_of(NumpyOps()), Ids(), CONTEXT)
    engine.deliver = lambda: done.append("deliver")
    drain(engine, [submit(engine, [3, 4, 5], spec="chain", tree_budget=3, max_tokens=8)])
    steps = [at for at, what in enumerate(done) if what == "launch"]
    assert len(steps) > 2
    assert all(done[at - 1] == "deliver" and "deliver" in done[before + 2 : at] for before, at in pairwise(steps))


def pieces_of(pair, ends=None, at=None, **options):
    """Return the pieces of a reply, which is cancelled with the piece of token number `at`; and its slot."""
    engine, pieces, reply, cancel = Engine(pair, Letters(), CONTEXT), [], Reply(), threading.Event()

    def put(piece):
        pieces.append(piece)
        if len(pieces) == at:
            cancel.set()

    how = options if "spec" in options else {"spec": "chain", "tree_budget": 5} | options
    call = Call(demo_prompts()[0], GenerationOptions(**how), put, reply.end, cancel, ends=ends)
    sequence = engine.submit(call)
    engine.drain()
    assert reply.error is None
    return pieces, sequence.slot


def tokens_in(pieces):
    return [token for piece in pieces for token in piece.tokens]


def text_of(pieces):
    return "".join(piece.text for piece in pieces)


def test_each_token_has_a_piece_of_its_own(counted):
    """Of a step that gives several, too; with log-probabilities and stop strings their text is the same."""
    pair = demo_pair(NumpyOps())
    pieces, _ = pieces_of(pair, max_tokens=40)
    assert counted.steps < 20
    single, _ = pieces_of(pair, max_tokens=40, logprobs=0)
    assert [len(piece.tokens) for piece in pieces] == [len(piece.tokens) for piece in single] == [1] * 40
    text = text_of(pieces)
    assert text == text_of(single) == "".join(chr(97 + token % 26) for token in tokens_in(single))
    stop = text[7:9]
    stopped, _ = pieces_of(pair, max_tokens=40, stop=[stop])
    assert stopped[-1].finish_reason == "stop"
    assert text_of(stopped) == text[: text.index(stop)]


@pytest.mark.parametrize("at", [1, 6, 7, 8, 9])
def test_a_reply_is_cancelled_within_a_step(at):
    """No token comes after the one at which it is cancelled, and its state has all of its slot but the newest token."""
    pair = demo_pair(NumpyOps())
    (drafted, slot), (plain, _) = (pieces_of(pair, at=at, max_tokens=40, **how) for how in ({}, {"spec": "off"}))
    assert drafted[-1].finish_reason == plain[-1].finish_reason == "cancelled"
    assert tokens_in(drafted) == tokens_in(plain)
    assert len(tokens_in(drafted)) == at
    assert slot.state.length == len(slot.tokens) - 1


def test_end_tokens_that_do_not_end_a_reply_are_not_shown(monkeypatch):
    pair = demo_pair(NumpyOps())
    tokens = tokens_in(pieces_of(pair, max_tokens=20)[0])
    monkeypatch.setattr(Letters, "end_ids", frozenset(tokens[5:7]))
    drafted, plain = (pieces_of(pair, frozenset(), max_tokens=20, **how)[0] for how in ({}, {"spec": "off"}))
    assert tokens_in(drafted) == tokens_in(plain) == tokens
    assert text_of(drafted) == text_of(plain)
    assert len(text_of(drafted)) < 20


@pytest.mark.parametrize("spec", ["chain", "lookup"])
def test_replies_that_may_not_draft_share_one_stretch(spec, monkeypatch):
    """Sixty-four newest tokens fill a step: once all replies have begun, nothing is asked of their decoders again."""
    shared, real = [], Stretches.__init__

    def begin(self, *args):
        real(self, *args)
        shared.append(len(self.sequences))

    monkeypatch.setattr(Stretches, "__init__", begin)
    engine = Engine(pair_of(AheadOps()), Ids(), CONTEXT, 64)
    replies = [submit(engine, prompt, spec=spec) for prompt in prompts_of("qwen35", 64, np.random.default_rng(3))]
    while not all(reply.sequence.new_tokens for reply in replies):
        engine.turn()
    shared.clear()
    for _ in range(40):
        engine.turn()
    assert len(engine.running) == 64
    assert not shared


def test_a_step_is_launched_before_the_tokens_of_the_last_one_are_output(monkeypatch):
    """Of greedy chains. All tokens of a step are output, also where the reply is cancelled among them."""
    events, launch = [], DraftStretches.launch
    monkeypatch.setattr(DraftStretches, "launch", lambda each: (events.append("launch"), launch(each))[1])
    engine, reply, cancel = Engine(demo_pair(AheadOps()), Letters(), CONTEXT, 2), Reply(), threading.Event()
    engine.deliver = lambda: events.append("deliver")

    def put(piece):
        events.extend(piece.tokens)
        if events.count("launch") == 3:
            cancel.set()

    call = Call(demo_prompts()[0], GenerationOptions(spec="chain", tree_budget=5), put, reply.end, cancel)
    sequence = engine.submit(call)
    engine.drain()
    assert reply.error is None
    first, second, third = (at for at, what in enumerate(events) if what == "launch")
    steps = [
        [what for what in part if what != "deliver"]
        for part in (events[first:second], events[second:third], events[third:])
    ]
    assert steps[0] == ["launch"]  # its tokens are kept
    assert len(steps[1]) > 2
    assert events[second + len(steps[1])] == "deliver"  # before the host waits for the second step
    tokens = [what for what in events if isinstance(what, int)]
    assert sequence.slot.tokens == [*sequence.prompt, *tokens]
    assert sequence.slot.state.length == len(sequence.slot.tokens) - 1


@pytest.mark.parametrize("error", [BimetalError, RuntimeError])
def test_tokens_are_output_before_a_failed_launch_ends_the_reply(error, monkeypatch):
    launches, launch = [], DraftStretches.launch

    def fails(self):
        launches.append(len(self.sequences))
        if len(launches) == 3:
            raise error("no")
        return launch(self)

    monkeypatch.setattr(DraftStretches, "launch", fails)
    engine = Engine(demo_pair(AheadOps()), Letters(), CONTEXT, 2)
    reply = submit(engine, demo_prompts()[0], spec="chain", tree_budget=5)
    engine.drain()
    assert isinstance(reply.error, BimetalError)
    assert len(launches) == 3
    assert reply.sequence.new_tokens > 3
    assert len(reply.tokens) == reply.sequence.new_tokens
