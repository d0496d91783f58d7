"""Several sequences on several GPUs: the bits of one GPU, in micro-batches that keep all GPUs at work."""

import threading

import numpy as np
import pytest
import tiny
from test_cuda_pool import Beside, Ids, a_path, a_step, together

from common.engine import Engine
from common.fit import what_fits
from common.models import load_model
from common.models.drafts import load_pair
from common.options import GenerationOptions
from common.prefix_cache import PrefixCache
from common.schedule import Schedule
from common.sequence import Call
from common.slot import Slot
from generate.backends import Placement, open_backend

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_backend.ops import CudaOps  # noqa: E402

COUNT = cupy.cuda.runtime.getDeviceCount()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")]

TWO = Placement((0, 1), (1, 1))
CONTEXT = 500


@pytest.fixture(scope="module", params=["qwen3", "qwen35", "laguna", "glm"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def one(name):
    return tiny.load(name, CudaOps())


def several(name, placement=TWO):
    return load_model(tiny.checkpoint(name), open_backend("cuda", tiny.checkpoint(name), placement))


@pytest.fixture(scope="module")
def two(name):
    return several(name)


def replies(model, calls, parallel=1, random=None, tokens=None, prefixes=None):
    """The tokens of each call: a prompt, options, and after how many tokens it is cancelled.

    random  submits calls at random turns; None: all at once
    """
    engine, out = Engine(model, Ids(), CONTEXT, parallel, tokens=tokens, prefixes=prefixes), []
    left, turns = list(calls), 0
    while left or engine.turn():
        turns += 1
        assert turns < 3000
        if not left or (random is not None and random.random() < 0.6):
            continue
        prompt, options, most = left.pop(0)
        reply, cancel = [], threading.Event()

        def put(piece, reply=reply, cancel=cancel, most=most):
            reply.extend(piece.tokens)
            if most is not None and len(reply) >= most:
                cancel.set()

        def ended(error):
            assert error is None, error

        engine.submit(Call(prompt, GenerationOptions(**options), put, ended, cancel))
        out.append(reply)
    return out


CALLS = [
    ([1, 2, 3, 1, 2, 3, 1, 2], {"max_tokens": 9, "spec": "lookup"}, None),
    ([5], {"max_tokens": 12}, None),
    ([7, 8, 9, 10], {"max_tokens": 8, "temperature": 0.8, "seed": 3}, None),
    ([11, 4], {"max_tokens": 30}, 5),
    ([4, 4, 4], {"max_tokens": 6, "temperature": 1.0, "seed": 4, "top_k": 9}, None),
    ([6, 5, 4, 3], {"max_tokens": 7}, None),
]


def test_rows_of_sequences(two, one):
    """Chains and trees of sequences whose micro-batches change, with some that sit steps out or commit nothing."""
    beside = Beside(two, 4, 1, (0, 3, 70, 150), single=one)
    assert beside.pool.pool is beside.pool
    for who in ([0, 1], [2, 3], [0, 1], [2, 3], [0, 2], [1, 3], [3], [0, 1, 2, 3], [1, 2], [0, 3]):
        beside.step(who, [int(beside.random.integers(1, 9)) for _ in who], keeps=0.8)
    beside.read(2, 150)
    snapshots = [(state.snapshot(), alone.snapshot()) for state, alone in zip(beside.states, beside.alone, strict=True)]
    beside.step([0, 1, 2, 3], [1, 3, 1, 2])
    for i in (0, 2):
        beside.states[i].restore(snapshots[i][0])
        beside.alone[i].restore(snapshots[i][1])
    left = beside.states[1].slot
    beside.states[1] = beside.alone[1] = None
    beside.states[1], beside.alone[1] = beside.pool.new_state(), one.new_state(tiny.CAPACITY)
    assert beside.states[1].slot == left
    for _ in range(3):
        beside.step([0, 1, 2, 3], [1, 4, 1, 5])


def test_steps_before_their_commits(two, one):
    """A step of one micro-batch is launched before what the other one keeps of its step is known."""
    beside, read = Beside(two, 4, 7, (3, 0, 40, 5), single=one), one.ops.read
    for turn in range(4):
        if turn in (0, 2):
            beside.step([0, 1, 2, 3], [1, 2, 1, 1])
        batches = ([0, 1], [2, 3]) if turn < 3 else ([0, 2], [1, 3])
        random, vocab = beside.random, two.config.vocab
        steps = [a_step(random, vocab, state.length, int(random.integers(1, 7))) for state in beside.states]
        logits = [
            two.forward(beside.pool, together([steps[i] for i in who], [beside.states[i].slot for i in who]))
            for who in batches
        ]
        for who, rows in zip(batches, logits, strict=True):
            alone = np.concatenate([read(one.forward(beside.alone[i], steps[i])) for i in who])
            assert np.array_equal(two.ops.read(rows), alone), turn
            for i in who:
                path = a_path(beside.random, steps[i])
                beside.states[i].commit(path)
                beside.alone[i].commit(path)


@pytest.mark.parametrize("batches", [2, 1])
def test_replies(two, one, batches, monkeypatch):
    """Replies that come and go, one of them cancelled, are those of one GPU and one sequence, however they are cut."""
    alone = [reply[:5] if call[2] else reply for call, reply in zip(CALLS, replies(one, CALLS), strict=True)]
    assert [len(reply) for reply in alone] == [9, 12, 8, 5, 6, 7]
    assert two.ops.micro_batches == 2
    monkeypatch.setattr(two.ops, "micro_batches", batches)
    beside = replies(two, CALLS, 4, np.random.default_rng(batches))
    assert [reply[:5] if call[2] else reply for call, reply in zip(CALLS, beside, strict=True)] == alone


def test_replies_when_pages_run_out(two, one, monkeypatch):
    """A sequence moves from both GPUs to the host and back, with the tokens of running alone."""
    calls = [([i % 90 for i in range(240)], 30), ([i % 50 for i in range(245)], 20), ([7, 8], 40)]
    calls = [(prompt, {"max_tokens": count, "spec": "off"}, None) for prompt, count in calls]
    moved, suspend = [], Slot.suspend
    monkeypatch.setattr(Slot, "suspend", lambda slot: moved.append(suspend(slot)))
    for name in ("has_read", "has_decoded"):  # prompts are read side by side, however long their steps take
        monkeypatch.setattr(Schedule, name, lambda *of: None)
    assert replies(two, calls, 3, tokens=0) == replies(one, calls)
    pages = [pool.pages for pool in two.new_pool(3, CONTEXT, 0).pools.values() if pool.pages]
    assert bool(moved) == bool(pages)


def test_a_stored_prefix(two, one):
    """What one reply leaves of all layers, another one begins with."""
    prompt = [i % 40 for i in range(120)]
    calls = [(prompt, {"max_tokens": 6}, None), ([*prompt, 3, 4], {"max_tokens": 7}, None)]
    store = PrefixCache(b"a test", 10**9)
    found, restore = [], store.restore

    def noted(*of):
        found.append(restore(*of).length)
        return restore(*of)

    store.restore = noted
    got = [replies(two, [call], 2, prefixes=store)[0] for call in calls]
    assert got == [replies(one, [call])[0] for call in calls]
    assert max(found) >= 100


@pytest.mark.skipif(COUNT < 3, reason="needs three GPUs")
def test_three_gpus(one, name):
    model = several(name, Placement((2, 0, 1), (1, 1, 1)))
    assert model.ops.micro_batches == 3
    calls = [call for call in CALLS if call[2] is None]
    assert replies(model, calls, 5, np.random.default_rng(3)) == replies(one, calls)


@pytest.mark.parametrize("placement", [TWO, Placement((0,), draft=1)], ids=["two", "own"])
@pytest.mark.parametrize(("draft", "spec"), [("dflash", "tree"), ("mtp-qwen35", "chain")])
def test_drafts(draft, spec, placement):
    """Replies that share a draft's passes, beside others in micro-batches, are those of one GPU and one sequence."""
    how = {"max_tokens": 8, "spec": spec, "tree_budget": 6 if spec == "tree" else 3}
    calls = [([5, 6, 7, 8 + n], how if n < 3 else {"max_tokens": 9, "spec": "off"}, None) for n in range(4)]
    out = []
    for target, parallel in ((tiny.load("qwen35", CudaOps()), 1), (several("qwen35", placement), 4)):
        out.append(replies(load_pair(tiny.FOLDER / draft, target), calls, parallel))
    assert out[0] == out[1]


def test_memory_of_a_pool(two, name):
    """Each GPU takes what is predicted for its layers."""
    pool, ops = two.new_pool(3, 300, 400), two.ops
    room = ops.free_by_device(len(two.state_spec))
    assert len(room) == 2
    for (_, own), held in zip(room, pool.pools.values(), strict=True):
        spec = [two.state_spec[i] for i in own]
        one, three = (ops.held_pool_bytes(spec, slots, 300, 400, 64) for slots in (1, 3))
        beside = three - held.nbytes  # the copies that two more slots go back to
        assert 0 <= beside <= three - one
    assert what_fits(ops, two.blueprint, 3)(300, 64)


@pytest.mark.skipif(not hasattr(cupy, "clock"), reason="needs the clock of the stand-in for CuPy")
@pytest.mark.parametrize("spec", ["off", "lookup"])
def test_all_gpus_work_at_once(spec):
    """Four greedy replies on a timeline of two GPUs: as one step for all, the GPUs take turns; as two micro-batches,
    whose steps have as many kernels, both are at work, since nobody waits for a step before others are launched. With
    draft tokens each decoder waits for its own step.
    """
    model, clock = several("qwen35"), cupy.clock
    taken = []
    for batches in (1, 2):
        model.ops.micro_batches = batches
        engine = Engine(model, Ids(), CONTEXT, 4)
        for n in range(4):
            how = GenerationOptions(max_tokens=300, spec=spec)
            engine.submit(Call([n, n + 1], how, lambda piece: None, lambda error: None, threading.Event()))
        engine.schedule.has_read = engine.schedule.has_decoded = lambda *of: None  # prompts first, whatever time it is
        for _ in range(4 + 4 * batches):  # until steps are captured
            engine.turn()
        started, busy = clock.host, list(clock.busy)
        for _ in range(12 * batches):
            engine.turn()
        taken.append((clock.host - started, [after - before for after, before in zip(clock.busy, busy, strict=True)]))
    (turns, alone), (overlapped, halves) = taken
    assert turns > 0.9 * sum(alone)
    assert overlapped < 1.15 * max(halves)
    assert 1.8 * sum(alone) < sum(halves) < 2.05 * sum(alone), "no path is applied for the other micro-batch"
