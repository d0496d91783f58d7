"""A text does not depend on what else runs: joined steps against each sequence alone, to the bit on NumPy."""

import gc
import threading
import weakref
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_draft
import tiny_eagle

from common import sequence
from common.decode.requests import Computed
from common.demo import demo_path
from common.engine import Engine
from common.errors import BimetalError, NoRoomError, NotFiniteError
from common.kv_cache import CacheOptions
from common.models import PARTS, load_model
from common.models.drafts import load_pair
from common.models.window import bounded
from common.options import GenerationOptions
from common.prefix_cache import PrefixCache
from common.reference import NumpyOps
from common.sampling import NOT_A_TOKEN
from common.schedule import VERIFY_ROWS, BusyError
from common.sequence import Call, Sequence
from common.slot import Slot
from common.step import MAX_DECODE_ROWS, State, Step
from common.stretches import Stretches

CONTEXT, MASK = 400, 90


class Ids:
    """A tokenizer of tokens without text or end."""

    end_ids: frozenset[int] = frozenset()
    vocab_size = 0

    def decoder(self):
        return SimpleNamespace(push=lambda token: "")


@dataclass(eq=False)
class Reply:
    """What a call gave, and the logits that its state gives for one more token."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    reason: str | None = None
    error: BaseException | None = None
    ended: bool = False
    after: Any = None
    length: int = 0
    call: Call | None = None
    state: dict[str, np.ndarray] | None = None

    def put(self, piece):
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.reason = piece.finish_reason

    def end(self, error):
        self.error, self.ended = error, True


def submit(engine, prompt, shared=None, **options):
    reply = Reply()
    reply.call = Call(prompt, GenerationOptions(**options), reply.put, reply.end, shared=shared)
    reply.sequence = engine.submit(reply.call)
    return reply


def keeps_state(reply):
    """Have a reply copy its state when it ends: `state`, by name."""
    ended = reply.call.ended

    def end(error):
        if reply.sequence.slot is not None:
            reply.state = reply.sequence.slot.state.save()
        ended(error)

    reply.call.ended = end
    return reply


def same_states(pair, one, other):
    """Compare what two states hold for the target: rows of the draft that nobody reads are written by some steps."""
    names = pair.target.new_state(CONTEXT).save()
    return all(np.array_equal(one[name], other[name]) for name in names)


def look(engine, reply):
    """Note what the state of a reply that has just ended gives for one more token."""
    state = reply.sequence.slot.state
    step = Step.chain(np.array([7], np.int32), state.length)
    reply.after, reply.length = engine.model.ops.read(engine.model.forward(state, step)), state.length


def drain(engine, replies, arrivals=(), random=None, cancels=()):
    """Turn the engine, submitting `arrivals` (functions) at random turns, until all replies have ended."""
    arrivals = list(arrivals)
    looked = set()
    for _ in range(5000):
        if arrivals and random.random() < 0.4:
            replies.append(arrivals.pop(0)())
        for reply, tokens in cancels:
            if reply.sequence.new_tokens >= tokens:
                reply.call.cancel.set()
        more = engine.turn()
        for reply in replies:
            if reply.ended and id(reply) not in looked:
                looked.add(id(reply))
                if reply.error is None and reply.sequence.slot is not None:
                    look(engine, reply)
        if not more and not arrivals:
            return replies
    raise AssertionError("the engine does not come to an end")


def without_clock(engine):
    """Let prompts be read before anything decodes, however long their steps take: no time counts."""
    engine.schedule.has_read = engine.schedule.has_decoded = lambda *of: None
    return engine


def owing_a_step(engine):
    """Let a step of decoding follow each step of a prompt, or part of one, beside others."""
    engine.schedule.has_read = lambda seconds, decoders: setattr(engine.schedule, "owed", 1.0 if decoders else 0.0)
    engine.schedule.has_decoded = lambda seconds: setattr(engine.schedule, "owed", 0.0)
    return engine


def alone(model, prompt, **options):
    engine = Engine(model, Ids(), CONTEXT)
    return drain(engine, [keeps_state(submit(engine, prompt, **options))])[0]


def prompts_of(name, count, random):
    ids = np.arange(40, 600) if name == "demo" else tiny.golden(name)["ids"]
    return [random.choice(ids, int(random.integers(2, 40))).tolist() for _ in range(count)]


PLAIN = [
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.1, "top_k": 12, "top_p": 0.9, "min_p": 0.01, "seed": 4},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "seed": 5},
]
DRAFTED = [
    {"spec": "chain", "tree_budget": 5},
    {"spec": "tree", "tree_budget": 17},
    {"spec": "lookup", "tree_budget": 7},
    {"spec": "off"},
    {"spec": "tree"},
    {"spec": "lookup+tree", "tree_budget": 40, "temperature": 0.8, "seed": 2},
    {"spec": "lookup+chain", "tree_budget": 9, "repetition_penalty": 1.2},
]
WINDOWS = [
    {"wedlm_window": 6, "wedlm_tau": 4.3},
    {"wedlm_window": 16, "wedlm_tau": 4.4, "wedlm_verify": True},
    {"wedlm_window": 40, "wedlm_tau": 3.0, "wedlm_order": "paper"},
    {"wedlm_window": 8, "wedlm_tau": 4.3, "temperature": 0.9, "seed": 8},
    {"wedlm_window": 8, "wedlm_tau": 4.4, "wedlm_sure": 4.2},
    {"wedlm_window": 12, "wedlm_tau": 9.0, "wedlm_lambda": 0.0, "wedlm_sure": 0.0},
    {"spec": "off"},
    {"spec": "lookup", "tree_budget": 7},
]


def models(kind, name, ops, folder):
    """A model of a family, and the options to run it with."""
    if name == "demo":  # heads wide enough to be packed
        cache = CacheOptions("q8_0", "lm4", calibration=24, recent=9, sinks=2)
        model = replace(load_model(demo_path(), ops), cache=cache)
        return (load_pair(demo_path("draft"), model), DRAFTED[:3]) if kind == "packed draft" else (model, PLAIN[:3])
    model = tiny.load(name, ops)
    if kind == "draft":
        if name == "qwen35":
            return load_pair(tiny.FOLDER / "dflash", model), DRAFTED
        c, layers = model.config, len(model.layout.layers)
        write = tiny_draft.write(folder / "draft", c.hidden, c.vocab, layers, [0, layers - 1], laguna=name == "laguna")
        return load_pair(write, model), DRAFTED
    if kind == "block":
        return load_pair(tiny.FOLDER / f"mtp-{name}", model), [*DRAFTED[:2], {"spec": "off"}]
    if kind in ("dflash2", "dspark"):
        return load_pair(tiny.FOLDER / kind, model), DRAFTED
    if kind == "eagle":
        folder = tiny_eagle.write(folder / "draft", model.config.hidden, model.config.vocab, [0, 1, 1])
        return load_pair(folder, model), [*DRAFTED[:2], {"spec": "off"}]
    if kind == "wedlm":
        config = replace(model.config, mask_id=MASK)
        return replace(model, config=config), WINDOWS
    if kind == "latent":
        return replace(model, cache=CacheOptions("q8_0", "q8_0")), PLAIN[:3]
    if kind == "bounded":
        return bounded(model, 20), PLAIN[:3]
    return model, PLAIN


CASES = [
    *[("plain", name) for name in tiny.MODELS if name not in ("llama-untied", "qwen3-yarn", "laguna-m1")],
    *[("draft", name) for name in ("qwen35", "laguna", "glm", "qwen3")],
    ("block", "qwen35"),
    pytest.param("block", "glm", marks=pytest.mark.slow),
    pytest.param("eagle", "qwen3", marks=pytest.mark.slow),
    *[pytest.param(kind, "qwen35", marks=pytest.mark.slow) for kind in ("dflash2", "dspark")],
    ("wedlm", "qwen3"),
    ("latent", "glm"),
    ("packed", "demo"),
    pytest.param("packed draft", "demo", marks=pytest.mark.slow),
    ("bounded", "qwen3"),
]


@pytest.mark.parametrize(("kind", "name"), CASES)
@pytest.mark.few(3)
def test_a_text_does_not_depend_on_what_else_runs(kind, name, tmp_path, monkeypatch):
    """Random arrivals, lengths, samplers, decoders and cancellations: tokens, log-probabilities and the final state."""
    monkeypatch.setattr("common.models.DIVIDED_ROWS", 20)
    model, options = models(kind, name, NumpyOps(), tmp_path)
    random = np.random.default_rng(len(kind) * 10 + len(name))
    engine = Engine(model, Ids(), CONTEXT, parallel=5)
    prompts = prompts_of(name, 6 if name == "demo" else 12, random)
    if kind == "wedlm":
        prompts = [[token % 90 for token in prompt] for prompt in prompts]
    asked = []
    for i, prompt in enumerate(prompts):
        how = {"max_tokens": int(random.integers(3, 12 if name == "demo" else 24)), "logprobs": 1}
        how |= options[i % len(options)]
        asked.append((prompt, how))
    replies: list[Reply] = []
    arrivals = [lambda prompt=prompt, how=how: submit(engine, prompt, **how) for prompt, how in asked]
    first = [arrivals.pop(0)() for _ in range(3)]
    drain(engine, first, arrivals, random, cancels=[(first[0], 4)])
    replies = first
    assert len(engine.slots) > 1
    assert not engine.running
    for reply, (prompt, how) in zip(replies, asked, strict=True):
        assert reply.error is None
        expected = alone(model, prompt, **how)
        if reply is first[0] and reply.reason == "cancelled":
            assert reply.tokens == expected.tokens[: len(reply.tokens)]
            continue
        assert reply.tokens == expected.tokens
        assert reply.logprobs == expected.logprobs
        if how.get("spec") == "tree" and "tree_budget" not in how:
            continue  # the budgets, and with them what the state of WeDLM or a draft holds, depend on time
        assert reply.length == expected.length
        assert np.array_equal(reply.after, expected.after)


def test_steps_are_joined():
    """Sequences that decode share one pass over the weights."""
    model = tiny.load("qwen35", NumpyOps())
    engine, rows = without_clock(Engine(model, Ids(), CONTEXT, parallel=4)), []
    run = NumpyOps.run

    def counted(ops, fn, state, step, *rest):
        rows.append(len(step))
        return run(ops, fn, state, step, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NumpyOps, "run", counted)
        replies = [submit(engine, [5, 6, 7 + n], max_tokens=20) for n in range(4)]
        while engine.turn():
            pass
    assert all(len(reply.tokens) == 20 for reply in replies)
    assert rows.count(4) >= 10
    assert len(rows) < 40
    steps = engine.step_tokens
    assert steps.sum == 4 * (3 + 20)  # of prompts, and new ones
    assert steps.counts[1] >= rows.count(4)
    assert sum(steps.counts) == len(rows)


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.3}, {"logprobs": 2}])
@pytest.mark.parametrize("name", ["llama", "qwen35"])
@pytest.mark.few(3)
def test_the_last_token_of_a_prompt_is_read_beside_rows_of_others(name, how, monkeypatch):
    """A template may end a prompt with one token that later prompts lack: it takes no step of its own."""
    model, rows = tiny.load(name, NumpyOps()), list[int]()
    prompts = [[5, 6, 7, 8, 9, 10 + n] for n in range(3)]
    expected = [alone(model, prompt, max_tokens=12, **how) for prompt in prompts]
    engine, run = without_clock(Engine(model, Ids(), CONTEXT, parallel=3)), NumpyOps.run
    monkeypatch.setattr(NumpyOps, "run", lambda *of: (rows.append(len(of[3])), run(*of))[1])
    replies = [Reply() for _ in prompts]
    for reply, prompt in zip(replies, prompts, strict=True):
        options = GenerationOptions(max_tokens=12, **how)
        engine.submit(Call(prompt, options, reply.put, reply.end, threading.Event(), shared=len(prompt) - 1))
    engine.drain()
    assert [reply.error for reply in replies] == [None] * 3
    assert [reply.tokens for reply in replies] == [reply.tokens for reply in expected]
    assert [reply.logprobs for reply in replies] == [reply.logprobs for reply in expected]
    assert rows.count(5) == 3
    assert rows.count(1) <= 6  # until the others have begun, and after they have ended


@pytest.mark.parametrize("ahead", [False, True])
def test_pieces_reach_callers_once_per_step_and_after_the_next_launch(ahead, monkeypatch):
    """Callers that wake up compete for the processor, so a device that computes meanwhile gets its next step first."""
    monkeypatch.setattr(NumpyOps, "runs_ahead", ahead)
    model, done = tiny.load("llama", NumpyOps()), list[str]()
    shown = SimpleNamespace(end_ids=frozenset(), vocab_size=2**31, decoder=lambda: SimpleNamespace(push=str))
    engine, run = without_clock(Engine(model, shown, CONTEXT, parallel=4)), NumpyOps.run
    monkeypatch.setattr(NumpyOps, "run", lambda *of: (done.append("launch"), run(*of))[1])
    engine.deliver = lambda: done.append("deliver")
    replies = [submit(engine, [5, 6, 7 + n], max_tokens=20) for n in range(4)]
    for reply in replies:
        put = reply.call.put
        reply.call.put = lambda piece, put=put: (done.append("put"), put(piece))
    while any(reply.sequence.new_tokens < 2 for reply in replies):
        engine.turn()
    done.clear()
    for _ in range(5):
        engine.turn()
    deliveries = ["launch", "deliver", *4 * ["put"]] if ahead else ["launch", "deliver", *4 * ["put"], "deliver"]
    assert done == 5 * deliveries
    done.clear()
    submit(engine, [5, 6, 7], max_tokens=20)
    engine.turn()
    assert done[0] == "deliver"
    engine.drain()
    assert done[-1] == "deliver"


def test_no_token_waits_for_the_next_prompt_step(monkeypatch):
    """A device would compute a prompt's step between two steps in flight, before the first one's token is read."""
    monkeypatch.setattr(NumpyOps, "runs_ahead", True)
    monkeypatch.setattr(NumpyOps, "prefill_rows", 8)
    model, steps = tiny.load("llama", NumpyOps()), [0]
    engine, run = Engine(model, Ids(), CONTEXT, parallel=2), NumpyOps.run

    def counted(ops, fn, state, step, *rest):
        steps[0] += len(step) <= 2  # those of decoding, which may read the last token of a prompt
        return run(ops, fn, state, step, *rest)

    monkeypatch.setattr(NumpyOps, "run", counted)
    first = submit(engine, [5, 6, 7], max_tokens=300)
    unread = [[], []]  # steps whose token was not handed over, after turns without and with a prompt to read
    while first.sequence.new_tokens < 20:
        engine.turn()
        unread[0].append(steps[0] - first.sequence.new_tokens + 1)
    other = submit(engine, 200 * [8], max_tokens=1)
    engine.turn()
    while other.sequence.reads:
        engine.turn()
        unread[1].append(steps[0] - first.sequence.new_tokens + 1)
    assert set(unread[0][1:]) == {1}
    assert len(unread[1]) > 20
    assert not any(unread[1][2:])  # the step that was in flight, and the first after it
    for _ in range(4):
        engine.turn()
    submit(engine, 6 * [8], max_tokens=1)  # of one step, which holds up one token whatever was launched
    for _ in range(4):
        engine.turn()
        assert steps[0] - first.sequence.new_tokens + 1 == 1


def steps_of(monkeypatch):
    """List the rows of each step that NumpyOps runs."""
    rows, run = [], NumpyOps.run
    monkeypatch.setattr(
        NumpyOps,
        "run",
        lambda ops, fn, state, step, *kept: (rows.append(len(step)), run(ops, fn, state, step, *kept))[1],
    )
    return rows


@pytest.mark.parametrize("name", ["llama", "qwen35", "laguna", "gemma3", "glm", "gptoss"])
def test_others_decode_between_the_parts_of_a_prompts_step(name, monkeypatch):
    """Parts of layers give the bits of whole steps, of which a reply alone has its prompt read."""
    model, random = tiny.load(name, NumpyOps()), np.random.default_rng(2)
    long = random.choice(tiny.golden(name)["ids"], 300).tolist()
    parts = min(PARTS, len(model.weights.layers))
    whole, first_alone = alone(model, long, max_tokens=3), alone(model, [5, 6, 7], max_tokens=40)
    engine = owing_a_step(Engine(model, Ids(), CONTEXT, parallel=2))
    rows = steps_of(monkeypatch)
    first = keeps_state(submit(engine, [5, 6, 7], max_tokens=40))
    while first.sequence.new_tokens < 5:
        engine.turn()
    rows.clear()
    other = keeps_state(submit(engine, long, max_tokens=3))
    drain(engine, [first, other])
    at = [i for i, count in enumerate(rows) if count == 300]
    assert len(at) == parts >= 3
    assert all(rows[i - 1] == 1 for i in at[1:]), rows
    assert (first.tokens, other.tokens) == (first_alone.tokens, whole.tokens)
    for reply, by_itself in ((first, first_alone), (other, whole)):
        assert all(np.array_equal(reply.state[key], by_itself.state[key]) for key in by_itself.state)


def test_others_decode_between_short_steps_of_a_prompt(monkeypatch):
    """A step of up to 136 rows, whose rows do not depend on each other, is divided where several sequences may run."""
    monkeypatch.setattr(NumpyOps, "short_rows", MAX_DECODE_ROWS)
    model, prompt = tiny.load("llama", NumpyOps()), [5 + n % 50 for n in range(100)]
    expected = alone(model, prompt, max_tokens=8).tokens
    engine = owing_a_step(Engine(model, Ids(), CONTEXT, parallel=2))
    rows = steps_of(monkeypatch)
    first = submit(engine, [5, 6, 7], max_tokens=40)
    while first.sequence.new_tokens < 4:
        engine.turn()
    rows.clear()
    second = submit(engine, prompt, max_tokens=8)
    drain(engine, [first, second])
    assert rows[rows.index(64) :][:3] == [64, 1, 36]
    assert second.tokens == expected


def test_a_cancelled_prompt_leaves_nothing_of_its_parts():
    model = tiny.load("qwen35", NumpyOps())
    engine = Engine(model, Ids(), CONTEXT, parallel=2)
    cancelled = submit(engine, 300 * [5], max_tokens=4)
    engine.turn()
    assert cancelled.sequence.is_divided
    cancelled.call.cancel.set()
    engine.drain()
    assert (cancelled.reason, cancelled.sequence.is_divided) == ("cancelled", False)
    other = submit(engine, [5, 6, 7], max_tokens=4)
    engine.drain()
    assert other.tokens == alone(model, [5, 6, 7], max_tokens=4).tokens


def test_the_parts_of_a_step_come_one_after_another():
    """A higher priority waits for the end of a step; where memory runs out, the step runs again."""
    model = tiny.load("qwen35", NumpyOps())
    engine = without_clock(Engine(model, Ids(), CONTEXT, parallel=2))
    first = submit(engine, 300 * [5], max_tokens=4)
    engine.turn()
    urgent = submit(engine, 300 * [6], priority=1, max_tokens=4)
    engine.turn()
    assert first.sequence.is_divided
    assert not urgent.sequence.is_divided
    engine._make_room(NoRoomError("for a test"))
    assert engine.suspended == [first.sequence]
    assert not first.sequence.is_divided
    engine.drain()
    assert first.tokens == alone(model, 300 * [5], max_tokens=4).tokens
    assert urgent.tokens == alone(model, 300 * [6], max_tokens=4).tokens


def test_tokens_of_a_step_are_sampled_in_one_call(monkeypatch):
    """Of all samplers but those that penalize, whose rows the host reads at once."""
    model, calls, reads = tiny.load("llama", NumpyOps()), [], []
    engine = without_clock(Engine(model, Ids(), CONTEXT, parallel=8))
    ways = [*PLAIN, {"logit_bias": {5: 3.0}}, {"temperature": 1.0, "seed": 6}]
    sample, read = NumpyOps.sample, NumpyOps.read
    monkeypatch.setattr(NumpyOps, "sample", lambda ops, *of: (calls.append(len(of[0])), sample(ops, *of))[1])
    monkeypatch.setattr(NumpyOps, "read", lambda ops, x: (reads.append(x.shape), read(ops, x))[1])
    replies = [submit(engine, [5, 6, 7 + n], max_tokens=30, **how) for n, how in enumerate(ways)]
    while any(reply.sequence.new_tokens < 1 for reply in replies):
        engine.turn()
    for _ in range(4):
        calls.clear()
        reads.clear()
        engine.turn()
        assert calls == [4]
        assert sorted(reads) == [(3, model.config.vocab), (4,)]
    engine.drain()
    monkeypatch.undo()
    for n, (reply, how) in enumerate(zip(replies, ways, strict=True)):
        assert reply.tokens == alone(model, [5, 6, 7 + n], max_tokens=30, **how).tokens


@pytest.mark.parametrize("name", ["qwen35", "laguna", "glm", pytest.param("demo", marks=pytest.mark.slow)])
@pytest.mark.long
def test_greedy_texts_on_mlx(name, tmp_path, monkeypatch):
    """Up to near-ties: MLX multiplies several rows in another order than one."""
    monkeypatch.setattr("common.models.DIVIDED_ROWS", 20)
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    from mlx_backend.ops import MlxOps

    model, _ = models("packed" if name == "demo" else "plain", name, MlxOps(), tmp_path)
    engine, random = Engine(model, Ids(), CONTEXT, parallel=4), np.random.default_rng(1)
    asked = [(prompt, {"max_tokens": 16, "logprobs": 2}) for prompt in prompts_of(name, 6, random)]
    replies = drain(engine, [submit(engine, prompt, **how) for prompt, how in asked], (), random)
    for reply, (prompt, how) in zip(replies, asked, strict=True):
        expected = alone(model, prompt, **how)
        for ours, theirs in zip(reply.logprobs, expected.logprobs, strict=True):
            if ours.token != theirs.token:
                (_, best), (_, second) = theirs.top
                assert best - second < 1e-3
                break


def test_an_error_of_one_sequence_ends_it_alone():
    model = tiny.load("llama", NumpyOps())
    engine = Engine(model, Ids(), CONTEXT, parallel=4)

    def fail(read, total):
        raise RuntimeError("the caller's own")

    good = [submit(engine, [5, 6, 7 + n], max_tokens=12) for n in range(2)]
    bad = submit(engine, [8, 9], max_tokens=12, on_prefill=fail)
    drain(engine, [*good, bad])
    assert "the caller's own" in str(bad.error)
    assert [reply.tokens for reply in good] == [alone(model, [5, 6, 7 + n], max_tokens=12).tokens for n in range(2)]


def test_logits_that_are_nan_end_their_sequence_alone(monkeypatch):
    model = tiny.load("llama", NumpyOps())
    engine = without_clock(Engine(model, Ids(), CONTEXT, parallel=4))
    replies = [submit(engine, [5, 6, 7 + n], max_tokens=36) for n in range(3)]
    while any(reply.sequence.new_tokens < 4 for reply in replies):
        engine.turn()
    run = NumpyOps.run

    def spoiled(ops, fn, state, step, *rest):
        logits = np.array(run(ops, fn, state, step, *rest))
        logits[1] = np.nan
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(NumpyOps, "run", spoiled)
        engine.turn()
    while engine.turn():
        pass
    (failed,) = [reply for reply in replies if reply.error is not None]
    assert "NaN" in str(failed.error)
    for n, reply in enumerate(replies):
        assert reply is failed or reply.tokens == alone(model, [5, 6, 7 + n], max_tokens=36).tokens


def test_a_failing_backend_ends_all_with_one_sentence(monkeypatch):
    model = tiny.load("llama", NumpyOps())
    engine = Engine(model, Ids(), CONTEXT, parallel=4)
    replies = [submit(engine, [5, 6, 7 + n], max_tokens=12) for n in range(3)]
    for _ in range(6):
        engine.turn()

    def full(self, *rest):
        raise MemoryError("no 7 GB more")

    with monkeypatch.context() as patch:
        patch.setattr(NumpyOps, "run", full)
        while engine.turn():
            pass
    said = "the numpy backend failed, and all replies in progress ended: no 7 GB more"
    for reply in replies:
        assert isinstance(reply.error, BimetalError)
        assert str(reply.error) == said
    again = drain(engine, [submit(engine, [5, 6, 7], max_tokens=12)])[0]
    assert again.tokens == alone(model, [5, 6, 7], max_tokens=12).tokens


def test_calls_that_wait_end_where_a_failed_backend_has_no_memory_left(monkeypatch):
    """Memory for the slots is taken again by the next call, which ends with the error; a later one is served."""
    model = tiny.load("llama", PooledOps())
    engine = Engine(model, Ids(), CONTEXT, parallel=2)
    running = [submit(engine, [5, 6, 7 + n], max_tokens=12) for n in range(2)]
    for _ in range(4):
        engine.turn()
    waiting = submit(engine, [5, 6, 30], max_tokens=12)

    def broken(*rest):
        raise RuntimeError("an illegal address")

    with monkeypatch.context() as patch:
        patch.setattr(NumpyOps, "run", broken)
        patch.setattr(PooledOps, "new_pool", broken)
        engine.drain()
    assert [type(reply.error) for reply in (*running, waiting)] == [BimetalError, BimetalError, RuntimeError]
    (again,) = drain(engine, [submit(engine, [5, 6, 7], max_tokens=12)])
    assert again.tokens == alone(model, [5, 6, 7], max_tokens=12).tokens
    assert engine.slots[0].state.pool is engine.memory.pool


def test_calls_that_wait_end_where_a_slot_cannot_be_emptied_for_them(monkeypatch):
    """Nothing runs, so that nobody would turn the engine for them."""
    model = tiny.load("llama", NumpyOps())
    engine = Engine(model, Ids(), CONTEXT, parallel=2)
    drain(engine, [submit(engine, [5, 6, 7], max_tokens=2)])
    engine.reset()
    waiting = [submit(engine, [5, 6, 30 + n], max_tokens=12) for n in range(3)]

    def broken(*of):
        raise RuntimeError("an illegal address")

    with monkeypatch.context() as patch:
        patch.setattr(Slot, "reset", broken)
        engine.drain()
    said = "the numpy backend failed, and all replies in progress ended: an illegal address"
    assert [str(reply.error) for reply in waiting] == [said] * 3
    assert engine.load == (0, 0)
    (again,) = drain(engine, [submit(engine, [5, 6, 7], max_tokens=12)])
    assert again.tokens == alone(model, [5, 6, 7], max_tokens=12).tokens


def test_a_caller_whose_end_fails_ends_alone(capsys):
    engine = Engine(tiny.load("llama", NumpyOps()), Ids(), CONTEXT, parallel=2)
    other, ends = submit(engine, [5, 6, 7], max_tokens=12), []

    def end(error):
        ends.append(error)
        raise OSError(5, "the terminal is gone")

    engine.submit(Call([5, 6, 8], GenerationOptions(max_tokens=2), lambda piece: None, end, threading.Event()))
    drain(engine, [other])
    assert (ends, len(other.tokens), other.error) == ([None], 12, None)
    assert "the terminal is gone" in capsys.readouterr().err


def test_a_closed_engine_refuses_calls():
    engine = Engine(tiny.load("llama", NumpyOps()), Ids(), CONTEXT)
    before = submit(engine, [5, 6, 7], max_tokens=3)
    engine.close()
    with pytest.raises(BimetalError, match="is closed"):
        submit(engine, [5, 6, 7], max_tokens=3)
    engine.drain()
    assert len(before.tokens) == 3


@pytest.mark.parametrize("seed", range(6))
def test_a_prompt_that_another_decoder_has_read_gives_the_text_of_a_fresh_slot(seed):
    """Windows with `sure` begin with the prompt's last token, which a slot may have read with the others."""
    model = tiny.load("qwen3", NumpyOps())
    model = replace(model, config=replace(model.config, mask_id=MASK))
    prompt = np.random.default_rng(seed).integers(5, MASK, 42).tolist()
    checked = {"max_tokens": 8, "wedlm_preset": "checked", "wedlm_tau": 4.4, "wedlm_sure": 4.3}
    engine, fresh = Engine(model, Ids(), CONTEXT), Engine(model, Ids(), CONTEXT)
    submit(engine, prompt, spec="off", max_tokens=1)
    engine.drain()
    replies = [submit(each, prompt, **checked) for each in (engine, fresh)]
    for each in (engine, fresh):
        each.drain()
    assert replies[0].tokens == replies[1].tokens


@pytest.mark.parametrize("size", [24, 36, 70])
@pytest.mark.parametrize("how", [{"spec": "off"}, {"wedlm_window": 6, "wedlm_tau": 4.3}, {"wedlm_window": 40}], ids=str)
def test_a_kept_state_gives_the_bits_of_none(size, how):
    """Also with windows, whose first step reads the rest of a prompt if none of its steps is long."""
    model = tiny.load("qwen3", NumpyOps())
    model = replace(model, config=replace(model.config, mask_id=MASK))
    ids = np.random.default_rng(size).integers(5, MASK, (2, size)).tolist()
    ids[1][:20] = ids[0][:20]
    asked = {"max_tokens": 6, "logprobs": 1} | how
    warm, cold = Engine(model, Ids(), CONTEXT), Engine(model, Ids(), CONTEXT)
    drain(warm, [submit(warm, ids[0], shared=20, **asked)])
    replies = [drain(each, [keeps_state(submit(each, ids[1], shared=20, **asked))])[0] for each in (warm, cold)]
    assert [reply.sequence.cached for reply in replies] == [20, 0]
    assert replies[0].logprobs == replies[1].logprobs
    for name, rows in replies[0].state.items():
        assert np.array_equal(rows, replies[1].state[name])


def test_a_cancelled_sequence_leaves_at_the_next_turn():
    """While it decodes, while its prompt is read, and while it waits."""
    model = tiny.load("llama", NumpyOps())
    engine = Engine(model, Ids(), CONTEXT, parallel=2)
    long = [5 + n % 50 for n in range(300)]
    replies = [submit(engine, [5, 6], max_tokens=50), submit(engine, long), submit(engine, [5, 7])]
    for _ in range(4):
        engine.turn()
    for reply in replies:
        reply.call.cancel.set()
    engine.turn()
    assert [reply.reason for reply in replies] == ["cancelled"] * 3
    assert not engine.running
    assert not engine.waiting


def test_replies_of_higher_priority_begin_first():
    model, order = tiny.load("llama", NumpyOps()), list[int]()
    engine = Engine(model, Ids(), CONTEXT)
    for priority in (0, 0, 7, -1, 3):
        how = GenerationOptions(max_tokens=1, priority=priority)
        engine.submit(Call([5, 6], how, lambda piece: None, lambda error, n=priority: order.append(n)))
    engine.drain()
    assert order == [7, 3, 0, 0, -1]


def test_a_full_queue_is_refused():
    """Calls for which a slot is free do not count, also where none has begun: a burst was refused beside idle slots."""
    for parallel in (1, 3):
        engine = Engine(tiny.load("llama", NumpyOps()), Ids(), CONTEXT, parallel, queue=2)
        for begins in (False, True):
            for n in range(parallel + 2):
                submit(engine, [5, n], max_tokens=2)
                if begins and n == 0:
                    engine.turn()
            with pytest.raises(BusyError, match="2 calls wait for the model"):
                submit(engine, [5, 6])
            engine.drain()
        assert not engine._open


def test_memory_that_is_not_free_is_waited_for(monkeypatch):
    """One call alone always runs; others wait until they fit beside those that run."""
    model = tiny.load("llama", NumpyOps())
    engine = Engine(model, Ids(), CONTEXT, parallel=4)
    monkeypatch.setattr(NumpyOps, "free_bytes", lambda self: (1000, "a test"))
    replies = [submit(engine, [5, 6, 7 + n], max_tokens=6) for n in range(3)]
    most = 0
    while engine.turn():
        most = max(most, len(engine.running))
    assert most == 1
    assert all(len(reply.tokens) == 6 for reply in replies)


def test_the_slot_that_holds_most_of_a_prompt_is_taken():
    engine = Engine(tiny.load("llama", NumpyOps()), Ids(), CONTEXT, parallel=3)
    prompts = [[5, 6, 7], [8, 9, 10, 11], [12, 13]]
    texts = [drain(engine, [submit(engine, prompt, max_tokens=9)])[0].tokens for prompt in prompts]
    for prompt, text in zip(prompts, texts, strict=True):
        reply = drain(engine, [submit(engine, [*prompt, *text, 20], max_tokens=3)])[0]
        assert reply.sequence.cached == len(prompt) + len(text) - 1
    other = drain(engine, [submit(engine, [30, 31], max_tokens=3)])[0]
    assert other.sequence.cached == 0
    assert len(engine.slots) == 3


@pytest.mark.parametrize("name", ["qwen35", "laguna"])
@pytest.mark.few(1)
def test_a_slot_returns_to_where_a_reply_began(name, monkeypatch):
    """Another reply and a tool's result follow in the next prompt; at last the user, after whom a template drops more.

    No store can help: too much waits to be saved.
    """
    monkeypatch.setattr(State, "saving", (1, 1))
    monkeypatch.setattr(NumpyOps, "prefill_rows", 150)
    model, ids = tiny.load(name, NumpyOps()), tiny.golden(name)["ids"].tolist() * 4
    engine = Engine(model, Ids(), 900, parallel=4, prefixes=PrefixCache(b"a test", 10**9))

    def ask(engine, tokens, replies):
        """The prompt's replies began at 160 and so on; a user's next prompt keeps 160 tokens alone."""
        got, how = Reply(), GenerationOptions(max_tokens=5, logprobs=1)
        marks = {at: "turn" for at in (160, *replies) if at <= len(tokens)}
        spans = [(at, at) for at in (160, *replies)]
        got.sequence = engine.submit(Call(tokens, how, got.put, got.end, shared=160, marks=marks, replies=spans))
        return drain(engine, [got])[0]

    def check(tokens, replies, cached):
        hit, miss = ask(engine, tokens, replies), ask(Engine(model, Ids(), 900), tokens, replies)
        assert (hit.sequence.cached, hit.tokens, hit.logprobs) == (cached, miss.tokens, miss.logprobs)
        assert np.array_equal(hit.after, miss.after)

    check(ids[:163], [], 0)
    check(ids[:163], [], 160)
    check([*ids[:160], *ids[100:300]], [355], 160)
    check([*ids[:160], *ids[100:295], *ids[:200]], [355, 540], 355)
    check([*ids[:160], *ids[100:295], *ids[:185], *ids[10:40]], [355, 540, 560], 540)
    check([*ids[:160], 7, 7, 7], [], 160)
    assert len(engine.slots) == 1
    assert len(engine.slots[0].marks) <= 2


@pytest.mark.parametrize("name", ["qwen35", "laguna"])
@pytest.mark.few(1)
def test_a_longer_prompt_without_turns_continues_at_the_last_whole_step(name, monkeypatch):
    monkeypatch.setattr(NumpyOps, "prefill_rows", 150)
    model, ids = tiny.load(name, NumpyOps()), tiny.golden(name)["ids"].tolist() * 4
    engine = Engine(model, Ids(), 900, parallel=2)
    for length, cached in ((590, 0), (740, 450), (740, 740), (800, 600)):
        hit, miss = (
            drain(each, [submit(each, ids[:length], max_tokens=4, logprobs=1)])[0]
            for each in (engine, Engine(model, Ids(), 900))
        )
        assert (hit.sequence.cached, hit.tokens, hit.logprobs) == (cached, miss.tokens, miss.logprobs)
        assert np.array_equal(hit.after, miss.after)


def test_prompts_are_cut_at_places_of_their_own(monkeypatch):
    """On a fixed grid and at the shared point, whatever the state held before and what else runs."""
    monkeypatch.setattr(NumpyOps, "prefill_rows", 16)
    engine, steps = Engine(tiny.load("llama", NumpyOps()), Ids(), CONTEXT, parallel=2), []
    run = NumpyOps.run
    monkeypatch.setattr(
        NumpyOps,
        "run",
        lambda ops, fn, state, step, *rest: (
            steps.append((int(step.positions[0]), len(step))),
            run(ops, fn, state, step, *rest),
        )[1],
    )
    prompt = [5 + n % 60 for n in range(50)]
    reply = Reply()
    reply.sequence = engine.submit(Call(prompt, GenerationOptions(max_tokens=1), reply.put, reply.end, shared=20))
    engine.drain()
    assert steps == [(0, 16), (16, 4), (20, 12), (32, 16), (48, 2)]
    steps.clear()
    again = Reply()
    call = Call([*prompt[:30], 9, 9, 9, 9], GenerationOptions(max_tokens=1), again.put, again.end, shared=20)
    again.sequence = engine.submit(call)
    engine.drain()
    assert again.sequence.cached == 20
    assert steps == [(20, 12), (32, 2)]


@pytest.mark.parametrize("name", ["qwen35", "mistral"])  # layers that recur, and layers that all have windows
def test_a_stored_prefix_gives_the_bits_of_reading_it(name, monkeypatch):
    """States kept at the cuts of a prompt, across engines whose slots are new."""
    monkeypatch.setattr(NumpyOps, "prefill_rows", 150)
    model, cache = tiny.load(name, NumpyOps()), PrefixCache(b"a test", 10**9)
    ids = tiny.golden(name)["ids"].tolist()
    shared = [ids[n % len(ids)] for n in range(320)]

    def reply(prefixes, prompt):
        engine, got = Engine(model, Ids(), CONTEXT, parallel=2, prefixes=prefixes), Reply()
        how = GenerationOptions(max_tokens=9, logprobs=1)
        got.sequence = engine.submit(Call(prompt, how, got.put, got.end, shared=310))
        return drain(engine, [got])[0]

    first = reply(cache, shared)
    assert first.sequence.cached == 0
    for tail in ([7, 8, 9], [9, 8, 7, 6]):
        hit, miss = (reply(prefixes, [*shared[:310], *tail]) for prefixes in (cache, None))
        assert hit.sequence.cached == 310
        assert (hit.tokens, hit.logprobs, hit.length) == (miss.tokens, miss.logprobs, miss.length)
        assert np.array_equal(hit.after, miss.after)


@pytest.mark.parametrize("error", [NoRoomError, MemoryError])
def test_a_state_that_cannot_be_kept_ends_no_reply(error, monkeypatch, capsys):
    """At a cut of a prompt, and at the reply's end."""
    model = tiny.load("llama", NumpyOps())
    expected = alone(model, list(range(5, 45)), max_tokens=6)

    def save_rows(*of):
        raise error("no memory is free")

    monkeypatch.setattr(State, "save_rows", save_rows)
    engine = Engine(model, Ids(), CONTEXT, prefixes=PrefixCache(b"a test", 10**9))
    (reply,) = drain(engine, [submit(engine, list(range(5, 45)), shared=30, max_tokens=6)])
    assert (reply.tokens, reply.error) == (expected.tokens, None)
    said = [f"a state of {n} tokens is not kept for later prompts: no memory is free" for n in (30, 45)]
    assert capsys.readouterr().err.splitlines() == said


def test_a_state_that_was_restored_in_part_is_not_reused(monkeypatch):
    """The slot holds a beginning of the stored prompt; the next prompt goes on from that beginning."""
    model, cache = tiny.load("llama", NumpyOps()), PrefixCache(b"a test", 10**9)
    stored = list(range(5, 45))
    first, engine = (Engine(model, Ids(), CONTEXT, prefixes=prefixes) for prefixes in (cache, None))
    drain(first, [submit(first, stored, max_tokens=1)])
    drain(engine, [submit(engine, [*stored[:10], 3], shared=10, max_tokens=1)])
    kv, loaded = type(engine.slots[0].state[1].kv), []
    load = kv.load

    def load_one_layer(self, *of):
        loaded.append(self)
        if len(loaded) > 1:
            raise MemoryError("no memory for rows")
        load(self, *of)

    with monkeypatch.context() as patch:
        patch.setattr(kv, "load", load_one_layer)
        engine.prefixes = cache
        (failed,) = drain(engine, [submit(engine, [*stored, 1, 2], shared=len(stored), max_tokens=4)])
    assert str(failed.error) == "no memory for rows"
    engine.prefixes, asked = None, ([*stored[:10], 7, 8], {"max_tokens": 6, "logprobs": 1})
    (again,) = drain(engine, [submit(engine, asked[0], **asked[1])])
    expected = alone(model, asked[0], **asked[1])
    assert (again.tokens, again.logprobs) == (expected.tokens, expected.logprobs)


@pytest.mark.parametrize("spec", ["chain", "tree", "lookup"])
@pytest.mark.few(1)
def test_the_steps_of_several_drafting_sequences_keep_to_the_row_budget(spec, tmp_path):
    """One step verifies the draft tokens of all, fewer of each; the texts are those of running alone."""
    pair, _ = models("draft", "qwen3", NumpyOps(), tmp_path)
    engine, rows, how = without_clock(Engine(pair, Ids(), CONTEXT, parallel=4)), [], {"spec": spec, "tree_budget": 40}
    run = NumpyOps.run

    def counted(ops, fn, state, step, *rest):
        if step.parents is not None:  # not a pass of the draft
            rows.append((len(step), len(engine.running)))
        return run(ops, fn, state, step, *rest)

    asked = [([5, 6, 7 + n] * 4, how | {"max_tokens": 12 + 4 * n}) for n in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NumpyOps, "run", counted)
        replies = drain(engine, [submit(engine, prompt, **each) for prompt, each in asked])
    together = [n for n, running in rows if running > 1][5:]  # after prompts, and drafts made beside fewer
    assert max(together) <= VERIFY_ROWS
    if spec == "tree":
        assert max(together) == VERIFY_ROWS
        assert 41 in [n for n, running in rows if running == 1]
    for reply, (prompt, each) in zip(replies, asked, strict=True):
        assert reply.tokens == alone(pair, prompt, **each).tokens


@pytest.mark.parametrize(("kind", "name"), [("draft", "qwen3"), ("block", "qwen35")])
def test_sequences_share_the_passes_of_a_draft(kind, name, tmp_path):
    """One draft step for all that draft in a turn, a pass of a block or each token of a chain."""
    pair, _ = models(kind, name, NumpyOps(), tmp_path)
    engine = without_clock(Engine(pair, Ids(), CONTEXT, parallel=5))
    shared, own, how = [], [], {"spec": "chain", "tree_budget": 3}
    asked = [([5, 6, 7 + n] * 3, how | {"max_tokens": 12}) for n in range(4)]
    asked += [([8, 9, 10], {"spec": "off", "max_tokens": 12})]
    each, one = type(pair).propose_each, type(pair).propose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(pair),
            "propose_each",
            lambda self, s, t, rows: (shared.append(len(t) // rows), each(self, s, t, rows))[1],
        )
        patch.setattr(type(pair), "propose", lambda *of: (own.append(len(engine.running)), one(*of))[1])
        replies = [submit(engine, prompt, **options) for prompt, options in asked]
        while len({each.slot for each in engine.running}) < 5 or any(
            not reply.sequence.new_tokens for reply in replies
        ):
            engine.turn()
        shared.clear()
        own.clear()
        engine.turn()
        assert shared == [4] * (1 if kind == "draft" else 3)
        assert own == []
        drain(engine, replies)
    for reply, (prompt, options) in zip(replies, asked, strict=True):
        assert reply.tokens == alone(pair, prompt, **options).tokens


def test_forgetting_slots_at_the_end_of_a_reply_leaves_its_state_whole():
    """A caller who has seen the end, in whatever thread, may ask for that while the state is offered to a store."""
    offered: list[list[int]] = []
    store = SimpleNamespace(
        restore=lambda *of: SimpleNamespace(length=0, matched=0, branch=0),
        offer=lambda tokens, state, reason="turn": offered.append(list(tokens)),
    )
    engine = Engine(tiny.load("llama", NumpyOps()), Ids(), CONTEXT, parallel=2, prefixes=store)
    reply = Reply()
    engine.submit(Call([5, 6, 7], GenerationOptions(max_tokens=4), reply.put, lambda error: engine.reset()))
    engine.drain()
    assert offered[-1] == [5, 6, 7, *reply.tokens[:-1]]
    again = drain(engine, [submit(engine, [5, 6, 7, *reply.tokens], max_tokens=2)])[0]
    assert again.sequence.cached == 0


class PooledOps(NumpyOps):
    """Numpy's ops over a pool: a step over it has rows of several slots, which run one after another."""

    def new_pool(self, spec, slots, capacity, tokens=None):
        return SlotsOf(self, spec, slots, capacity)

    def run(self, fn, state, step):
        if not isinstance(state, SlotsOf):
            if state.pool is not None:
                state.pool.check_room(len(step))
                state.pool.all_steps.append({state.slot})
            return super().run(fn, state, step)
        state.check_room(len(step))
        state.steps.append(step.slots.tolist())
        state.all_steps.append({*step.slots.tolist()})
        part = Step.block if step.parents is None else Step.chain
        parts = step.parts or [part(range(at.start, at.stop), int(step.positions[at.start])) for at in step.runs]
        own = [replace(part, tokens=step.tokens[at]) for at, part in zip(step.runs, parts, strict=True)]
        states = [state.states[step.slots[at.start]] for at in step.runs]
        run = super().run
        return np.concatenate([run(fn, each, part) for each, part in zip(states, own, strict=True)])


class AheadOps(PooledOps):
    """Ops over a pool that choose all tokens but those with penalties, and launch a row before its token is read."""

    runs_ahead = draws = True


class SlotsOf:
    counts = False  # does the pool count its tokens before sequences begin?

    @property
    def free_tokens(self):
        return self.room - sum(state.length for state in self.states.values()) if self.counts else None

    def __init__(self, ops, spec, slots, capacity):
        self.new = lambda: ops.new_state(spec, capacity)
        self.free, self.states, self.steps, self.room, self.refused = list(range(slots)), {}, [], 10**6, 0
        self.all_steps = []  # the slots of each, those of prompts and of one sequence too

    def check_room(self, tokens):
        if sum(state.length for state in self.states.values()) + tokens > self.room:
            self.refused += 1
            raise NoRoomError("no page is free")

    def new_state(self):
        state = self.new()
        state.pool, state.slot = self, self.free.pop()
        self.states[state.slot], load = state, state.load

        def within_room(arrays, length, long_steps):
            self.check_room(length)
            load(arrays, length, long_steps)

        state.load = within_room
        return state

    def commit_rows(self, states, counts):
        for state, count in zip(states, counts, strict=True):
            state.commit(range(count))


def test_a_step_over_a_pool_names_its_slots(tmp_path):
    pair, options = models("draft", "qwen35", PooledOps(), tmp_path)
    alike, _ = models("draft", "qwen35", NumpyOps(), tmp_path)
    random = np.random.default_rng(3)
    engine = without_clock(Engine(pair, Ids(), CONTEXT, parallel=4))
    asked = [(prompt, {"max_tokens": 12} | options[i % 4]) for i, prompt in enumerate(prompts_of("qwen35", 8, random))]
    replies = drain(engine, [submit(engine, prompt, **how) for prompt, how in asked])
    assert max(len(set(slots)) for slots in engine.memory.pool.steps) == 4
    for reply, (prompt, how) in zip(replies, asked, strict=True):
        assert reply.tokens == alone(alike, prompt, **how).tokens


@pytest.mark.parametrize("room", [10**6, 90])
@pytest.mark.parametrize("batches", [2, 3])
@pytest.mark.few(1)
def test_micro_batches_of_a_pool_take_turns(batches, room, monkeypatch, tmp_path):
    """A backend that computes two steps at once gets one of each half of the sequences, before it is waited for; texts
    are those of running alone, where sequences are cancelled and their states move to the host as well.
    """
    monkeypatch.setattr(PooledOps, "micro_batches", batches, raising=False)
    pair, options = models("draft", "qwen35", PooledOps(), tmp_path)
    alike, _ = models("draft", "qwen35", NumpyOps(), tmp_path)
    random = np.random.default_rng(room + batches)
    engine = without_clock(Engine(pair, Ids(), CONTEXT, parallel=5))
    pool = engine.memory.pool
    pool.room, ways = room, [{"spec": "lookup"}, options[1], PLAIN[1] | {"spec": "off"}, PLAIN[3] | {"spec": "off"}]
    if room == 10**6:
        ways[1] = {"spec": "off"}  # before a draft is run launched steps are waited for
    waited, advance = [], Sequence.advance

    def advanced(self, answer):
        if isinstance(answer, Computed) and len(engine.running) > batches:
            own = [i for i, slots in enumerate(pool.all_steps) if self.slot.state.slot in slots]
            waited.append(
                len({slot for slots in pool.all_steps[own[-1] :] for slot in slots} - pool.all_steps[own[-1]])
            )
        return advance(self, answer)

    monkeypatch.setattr(Sequence, "advance", advanced)
    asked = [
        (prompt[:9], {"max_tokens": 8 + i} | ways[i % 4]) for i, prompt in enumerate(prompts_of("qwen35", 8, random))
    ]
    replies = [submit(engine, prompt, **how) for prompt, how in asked]
    cancelled = submit(engine, [3, 4, 5], max_tokens=60, spec="off")
    while engine.turn():
        if cancelled.sequence.new_tokens >= 7:
            cancelled.call.cancel.set()
    monkeypatch.setattr(Sequence, "advance", advance)
    if room == 10**6:
        assert max(len(slots) for slots in pool.all_steps) <= -(-5 // batches)
        assert sum(map(bool, waited)) > 0.8 * len(waited)
    else:
        assert pool.refused
    assert cancelled.tokens == alone(alike, [3, 4, 5], max_tokens=len(cancelled.tokens), spec="off").tokens
    for reply, (prompt, how) in zip(replies, asked, strict=True):
        assert reply.error is None
        assert reply.tokens == alone(alike, prompt, **how).tokens


@pytest.mark.parametrize("room", [10**6, 60])
def test_micro_batches_of_stretches(room, monkeypatch):
    """The tokens of a micro-batch are handed out after the other one's launch; one reply ends early, one is cancelled,
    and with little room states move to the host.
    """
    monkeypatch.setattr(AheadOps, "micro_batches", 2, raising=False)
    model, alike = tiny.load("llama", AheadOps()), tiny.load("llama", NumpyOps())
    engine = without_clock(Engine(model, Ids(), CONTEXT, parallel=4))
    engine.memory.pool.room = room
    done, launch, hand_out = list[tuple[str, Any]](), Stretches.launch, Stretches.hand_out
    monkeypatch.setattr(Stretches, "launch", lambda each: (done.append(("launch", each)), launch(each))[1])
    monkeypatch.setattr(Stretches, "hand_out", lambda each: (done.append(("hand out", each)), hand_out(each))[1])
    asked = [([n, 6, 7], {"max_tokens": 12 if n == 2 else 40, "spec": "off"}) for n in range(3)]
    replies = [submit(engine, prompt, **how) for prompt, how in asked]
    cancelled = submit(engine, [3, 4, 5], max_tokens=60, spec="off")
    while engine.turn():
        if cancelled.sequence.new_tokens >= 30:
            cancelled.call.cancel.set()
    between = [kind == "hand out" and other is not each for (_, other), (kind, each) in pairwise(done)]
    assert sum(between) > len(done) / (3 if room == 10**6 else 20)
    assert engine.preemptions or room == 10**6
    for reply, (prompt, how) in zip(replies, asked, strict=True):
        assert (reply.tokens, reply.error) == (alone(alike, prompt, **how).tokens, None)
    assert cancelled.tokens == alone(alike, [3, 4, 5], max_tokens=len(cancelled.tokens), spec="off").tokens


def test_micro_batches_without_room_for_any_of_them(monkeypatch):
    """Where each batch in turn finds no memory, a sequence is suspended, and the others go on."""
    monkeypatch.setattr(PooledOps, "micro_batches", 2, raising=False)
    model = tiny.load("llama", PooledOps())
    engine = without_clock(Engine(model, Ids(), CONTEXT, parallel=2))
    engine.memory.pool.room = 50
    asked = [[5, 6, 7], [9, 8, 7]]
    replies = [submit(engine, prompt, max_tokens=40, spec="off") for prompt in asked]
    turns = 0
    while engine.turn():
        turns += 1
        assert turns < 1000
    assert engine.preemptions
    for reply, prompt in zip(replies, asked, strict=True):
        assert reply.tokens == alone(model, prompt, max_tokens=40, spec="off").tokens


@pytest.mark.parametrize("room", [130, 75])
@pytest.mark.long
def test_a_sequence_that_gives_its_memory_to_others_goes_on_as_it_was(room, tmp_path):
    """Chains, trees and samplers, with memory for a few at a time: tokens and final states of running alone."""
    pair, options = models("draft", "qwen35", PooledOps(), tmp_path)
    alike, _ = models("draft", "qwen35", NumpyOps(), tmp_path)
    random = np.random.default_rng(room)
    engine = without_clock(Engine(pair, Ids(), CONTEXT, parallel=4))
    pool = engine.memory.pool
    pool.room, ways = room, [*options[:4], *PLAIN[1:3]]
    asked = [
        (prompt[:16], {"max_tokens": int(random.integers(10, 40)), "logprobs": 1} | ways[i % len(ways)])
        for i, prompt in enumerate(prompts_of("qwen35", 9, random))
    ]
    check_arrivals(engine, alike, asked, random)
    assert pool.refused > 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.few(1)
def test_hits_trees_cancellations_and_preemptions_at_once(seed, tmp_path, monkeypatch):
    """Prompts that begin alike, random arrivals and little memory: tokens and final states of running alone."""
    monkeypatch.setattr(NumpyOps, "prefill_rows", 16)
    pair, options = models("draft", "qwen35", PooledOps(), tmp_path)
    alike, _ = models("draft", "qwen35", NumpyOps(), tmp_path)
    random = np.random.default_rng(seed)
    engine = without_clock(Engine(pair, Ids(), CONTEXT, parallel=4, prefixes=PrefixCache(b"a test", 10**9)))
    monkeypatch.setattr(sequence, "RESERVED", 6)  # more of a reply needs memory that others may hold by then
    pool = engine.memory.pool
    pool.room, pool.counts = 170, True
    asked = begun_alike("qwen35", 34, 12, (10, 40), [*options[:4], *PLAIN[1:4]], random)
    replies = check_arrivals(engine, alike, asked, random, cancels={3: 5, 8: 9})
    assert engine.preemptions
    assert sum(reply.sequence.cached > 0 for reply in replies) >= 4


def test_a_sequence_that_is_cancelled_on_the_host_leaves_nothing_there(tmp_path):
    engine = without_clock(Engine(tiny.load("llama", PooledOps()), Ids(), CONTEXT, parallel=2))
    for n in range(2):
        submit(engine, [5 + n, *range(10, 60)], max_tokens=30)
    while len(engine.running) < 2 or not all(each.new_tokens for each in engine.running):
        engine.turn()
    engine._make_room(NoRoomError("no memory for a step"))
    (suspended,) = engine.suspended
    assert suspended.slot._saved is not None
    suspended.call.cancel.set()
    engine.drain()
    assert suspended.reason == "cancelled"
    assert all(slot._saved is None for slot in engine.slots)


@pytest.mark.parametrize("resets", [True, False])
def test_a_state_that_cannot_be_moved_back_ends_its_reply(resets):
    """Nothing else runs by then; the next call finds a slot without what was loaded in part."""
    model = tiny.load("llama", PooledOps())
    engine = without_clock(Engine(model, Ids(), CONTEXT, parallel=2))
    replies = [submit(engine, [5 + n, *range(10, 60)], max_tokens=30) for n in range(2)]
    while len(engine.running) < 2 or not all(each.new_tokens for each in engine.running):
        engine.turn()
    engine._make_room(NoRoomError("no memory for a step"))
    (suspended,) = engine.suspended

    def broken(*of):
        raise BimetalError("the GPU has no memory for a copy")

    suspended.slot.state.load = broken
    if not resets:
        suspended.slot.reset = broken
    engine.drain()
    failed = next(reply for reply in replies if reply.sequence is suspended)
    assert all(reply.ended for reply in replies)
    assert "the GPU has no memory for a copy" in str(failed.error)
    assert engine.suspended == []
    again = drain(engine, [submit(engine, [5, 6, 7], max_tokens=12)])[0]
    assert again.tokens == alone(model, [5, 6, 7], max_tokens=12).tokens


def begun_alike(name, shared, count, lengths, ways, random):
    """Calls whose prompts have one of two beginnings of `shared` tokens; `lengths` bounds the new ones."""
    ids = tiny.golden(name)["ids"].tolist() * 4
    return [
        (
            [*ids[40 * (i % 2) :][:shared], *random.choice(ids, int(random.integers(1, 9))).tolist()],
            {"max_tokens": int(random.integers(*lengths)), "logprobs": 1} | ways[i % len(ways)],
        )
        for i in range(count)
    ]


def check_arrivals(engine, alike, asked, random, cancels=None, chance=0.3, same=same_states, shared=None):
    """Submit calls at random turns until all have ended: each reply and its state are those of `alike` alone.

    cancels  tokens after which a reply is cancelled, by its number
    chance   that a turn has a new call
    same     compares what two states hold for the target
    shared   as in Call
    """
    cancels, replies, left = cancels or {}, list[Reply](), list(asked)
    while left or engine.running or engine.waiting or engine.suspended or engine._inbox:
        if left and random.random() < chance:
            prompt, how = left.pop(0)
            replies.append(keeps_state(submit(engine, prompt, shared, **how)))
        for at, tokens in cancels.items():
            if at < len(replies) and replies[at].sequence.new_tokens >= tokens:
                replies[at].call.cancel.set()
        engine.turn()
    assert [at for at, reply in enumerate(replies) if reply.reason == "cancelled"] == [*cancels]
    for at, (reply, (prompt, how)) in enumerate(zip(replies, asked, strict=True)):
        assert reply.error is None
        if at in cancels:
            how = how | {"max_tokens": len(reply.tokens)}
        expected = alone(alike, prompt, **how)
        assert (reply.tokens, reply.logprobs) == (expected.tokens, expected.logprobs)
        assert at in cancels or same(alike, reply.state, expected.state)
    return replies


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ops", [AheadOps, PooledOps])
@pytest.mark.few(4)
def test_stretches_beside_drafts_penalties_and_cancellations(ops, seed, tmp_path, monkeypatch):
    """Replies that ask for a stretch of tokens at once share steps with others, and end within a stretch; texts, log-
    probabilities and states are those of a backend that reads each token before the next step.
    """
    pair, _ = models("draft", "qwen35", ops(), tmp_path)
    alike, _ = models("draft", "qwen35", NumpyOps(), tmp_path)
    random, shared, launch = np.random.default_rng(seed), list[int](), Stretches.launch
    monkeypatch.setattr(Stretches, "launch", lambda each: (shared.append(len(each.sequences)), launch(each))[1])
    ways = [{"spec": "off"} | how for how in PLAIN] + [{"spec": "lookup"}, {"spec": "tree"}, {"spec": "off"}]
    asked = [
        (prompt, {"max_tokens": int(random.integers(1, 60)), "logprobs": 1} | ways[int(random.integers(len(ways)))])
        for prompt in prompts_of("qwen35", 14, random)
    ]
    asked[3] = asked[3][0], {"max_tokens": 40, "spec": "off"}
    engine = without_clock(Engine(pair, Ids(), CONTEXT, parallel=4))
    check_arrivals(engine, alike, asked, random, cancels={3: 9})
    assert ops is AheadOps or not shared  # how many stretches meet depends on the speed of drafts


def test_a_row_that_is_not_finite_ends_its_reply_within_a_stretch():
    """The step that follows it has been launched; the replies beside it go on."""
    model = tiny.load("llama", AheadOps())
    expected = alone(tiny.load("llama", NumpyOps()), [5, 6, 7], max_tokens=40).tokens
    engine = without_clock(Engine(model, Ids(), CONTEXT, parallel=2))
    good, bad = submit(engine, [5, 6, 7], max_tokens=40), submit(engine, [8, 9], max_tokens=40)
    sample = model.ops.sample

    def broken(logits, sampler):
        tokens = sample(logits, sampler)
        if len(tokens) == 2 and bad.sequence.new_tokens == 10:
            tokens[1] = NOT_A_TOKEN
        return tokens

    def read_all(*xs):
        if any(np.any(np.asarray(x) == NOT_A_TOKEN) for x in xs):
            raise NotFiniteError("a row holds NaN")
        return xs

    model.ops.sample, model.ops.read_all, model.ops.read = broken, read_all, lambda x: read_all(x)[0]
    engine.drain()
    assert "a row holds NaN" in str(bad.error)
    assert bad.sequence.new_tokens == 11  # those before the row, of which the last was in flight beside it
    assert (good.tokens, good.error) == (expected, None)


def test_a_step_that_is_refused_within_a_stretch_ends_its_replies():
    """All of them end with the step's error, and a later reply runs."""
    model = tiny.load("llama", AheadOps())
    engine = without_clock(Engine(model, Ids(), CONTEXT, parallel=3))
    replies, run = [submit(engine, [n, 6, 7], max_tokens=40) for n in range(3)], model.ops.run
    while min(reply.sequence.new_tokens for reply in replies) < 5:
        engine.turn()

    def refused(fn, state, step):
        model.ops.run = run
        raise BimetalError("no such step")

    model.ops.run = refused
    engine.drain()
    assert [str(reply.error) for reply in replies] == 3 * ["no such step"]
    (again,) = drain(engine, [submit(engine, [1, 6, 7], max_tokens=40)])
    assert again.tokens == alone(tiny.load("llama", NumpyOps()), [1, 6, 7], max_tokens=40).tokens


def test_sequences_of_a_pool_begin_when_their_tokens_fit():
    """Nobody is suspended where each waits for memory, and idle slots forget what they hold for the next one."""
    model = tiny.load("llama", PooledOps())
    engine = Engine(model, Ids(), CONTEXT, parallel=3)
    pool = engine.memory.pool
    pool.room, pool.counts = 50, True
    replies = [submit(engine, [n, n + 1, n + 2], max_tokens=20, spec="off") for n in range(1, 7)]
    most = 0
    while engine.turn():
        most = max(most, len(engine.running))
    assert [len(reply.tokens) for reply in replies] == [20] * 6
    assert (most, pool.refused) == (2, 0)
    last = submit(engine, [50, 51, 52], max_tokens=45, spec="off")
    engine.drain()
    assert (len(last.tokens), pool.refused) == (45, 0)
    assert [slot.state.length for slot in engine.slots if slot is not last.sequence.slot] == [0]


@pytest.mark.parametrize(
    ("backend", "kind", "name"),
    [
        ("numpy", "draft", "qwen35"),
        ("numpy", "block", "qwen35"),
        ("numpy", "wedlm", "qwen3"),
        ("numpy", "latent", "glm"),
        ("numpy", "plain", "laguna"),
        ("mlx", "plain", "qwen35"),
        pytest.param("mlx", "latent", "glm", marks=pytest.mark.slow),
        *(pytest.param("mlx", "draft", name, marks=pytest.mark.slow) for name in ("laguna", "qwen35", "glm")),
        pytest.param("mlx", "block", "qwen35", marks=pytest.mark.slow),
        pytest.param("mlx", "block", "glm", marks=pytest.mark.slow),
        pytest.param("numpy", "packed", "demo", marks=pytest.mark.slow),
        pytest.param("mlx", "packed", "demo", marks=pytest.mark.slow),
    ],
)
@pytest.mark.few(1)
def test_states_that_grow_beyond_the_memory_move_to_the_host_and_back(backend, kind, name, tmp_path, monkeypatch):
    """Memory that states are predicted not to fit ends nothing: tokens and log-probabilities of running alone."""
    ops: Any = NumpyOps()
    if backend == "mlx":
        pytest.importorskip("mlx.core", reason="mlx is not installed")
        from mlx_backend.ops import MlxOps

        ops = MlxOps()
    model, options = models(kind, name, ops, tmp_path)
    monkeypatch.setattr(sequence, "RESERVED", 6)
    engine = without_clock(Engine(model, Ids(), CONTEXT, parallel=4))
    engine.schedule.joins = backend == "numpy"  # MLX multiplies several rows in another order than one
    most, moved = 2 * ops.held_state_bytes(model.sequence_spec, 24, ops.prefill_rows), set()
    empty = model.new_state(CONTEXT).nbytes

    def free(self):
        return most - sum(slot.state.nbytes for slot in engine.slots), "a test"

    monkeypatch.setattr(type(ops), "free_bytes", free)
    asked = [([5 + n, 6, 7] * 2, options[n % 3] | {"max_tokens": 16 + 4 * n, "logprobs": 1}) for n in range(4)]
    replies = [submit(engine, prompt, **how) for prompt, how in asked]
    while engine.turn():
        moved.update(id(each) for each in engine.suspended)
        assert all(each.slot.state.nbytes <= empty for each in engine.suspended)
    assert 0 < len(moved) <= engine.preemptions
    monkeypatch.undo()
    for reply, (prompt, how) in zip(replies, asked, strict=True):
        assert reply.error is None
        expected = alone(model, prompt, **how)
        assert (reply.tokens, reply.logprobs) == (expected.tokens, expected.logprobs)


def test_a_sequence_without_memory_ends_if_it_is_alone(tmp_path):
    pair, _ = models("draft", "qwen35", PooledOps(), tmp_path)
    engine = Engine(pair, Ids(), CONTEXT, parallel=2)
    engine.memory.pool.room = 12
    reply = submit(engine, [5, 6, 7], max_tokens=30, spec="off")
    engine.drain()
    assert str(reply.error) == "no page is free"
    assert len(reply.tokens) == 0
    engine.memory.pool.room = 10**6
    again = submit(engine, [5, 6, 7], max_tokens=30, spec="off")
    engine.drain()
    assert len(again.tokens) == 30


def test_nothing_is_left_of_many_calls():
    """Cancelled, refused and failing calls among them: no sequence, slot or tuner stays behind."""
    model, random = tiny.load("llama", NumpyOps()), np.random.default_rng(5)
    engine, gone, replies = Engine(model, Ids(), CONTEXT, parallel=4), [], []

    def fail(read, total):
        raise RuntimeError("the caller's own")

    for n in range(150):
        prompt = random.integers(0, 60, int(random.integers(1, 12))).tolist()
        how = {"max_tokens": int(random.integers(1, 8)), "spec": ("off", "lookup")[n % 2]}
        if n % 10 == 3:
            with pytest.raises(BimetalError):
                submit(engine, [10**6], **how)
        reply = submit(engine, prompt, on_prefill=fail if n % 11 == 5 else None, **how)
        gone.append(weakref.ref(reply.sequence))
        reply.sequence = None
        replies.append(reply)
        if n % 7 == 2:
            replies[int(random.integers(len(replies)))].call.cancel.set()
        for _ in range(int(random.integers(4))):
            engine.turn()
    engine.drain()
    assert all(reply.ended for reply in replies)
    assert [engine.running, engine.waiting, engine.suspended] == [[], [], []]
    assert len(engine.slots) <= 4
    assert engine.tuners
    assert not any(each.users for each in engine.tuners.values())
    del reply
    replies.clear()  # errors hold where they were raised
    gc.collect()
    assert not any(sequence() for sequence in gone)
