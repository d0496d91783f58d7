"""Sequences of one pool computed in one step: each has the bits of running alone, in chains and in trees."""

import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import tiny_eagle

from common import models
from common.engine import Engine
from common.errors import BimetalError
from common.models.drafts import load_pair
from common.options import GenerationOptions, Sampling
from common.sampling import Sampler
from common.sequence import Call
from common.step import MAX_DECODE_ROWS, PAST, Step
from common.storage import ConvSpec, DeltaSpec
from common.warm_up import warm_sizes

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_backend import gemm, replay  # noqa: E402
from cuda_backend import ops as ops_of  # noqa: E402
from cuda_backend.memory import Memory  # noqa: E402
from cuda_backend.ops import CudaOps  # noqa: E402
from cuda_backend.segments import Shape  # noqa: E402
from cuda_backend.states import pool_bytes  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ops():
    return CudaOps()


@pytest.fixture(scope="module", params=tiny.MODELS)
def model(request, ops):
    return tiny.load(request.param, ops)


def together(steps: list[Step], slots: list[int]) -> Step:
    """The rows of one step per sequence, each sequence's in the slot of that number."""
    firsts = np.cumsum([0, *map(len, steps)])
    parents = [np.where(s.parents == PAST, PAST, s.parents + at) for s, at in zip(steps, firsts, strict=False)]
    return Step(
        np.concatenate([s.tokens for s in steps]),
        np.concatenate([s.positions for s in steps]),
        np.concatenate(parents).astype(np.int32),
        np.concatenate([np.full(len(s), slot, np.int32) for s, slot in zip(steps, slots, strict=True)]),
    )


def a_step(random: np.random.Generator, vocab: int, past: int, rows: int) -> Step:
    tokens = random.integers(0, vocab, rows).astype(np.int32)
    if random.random() < 0.5:
        return Step.chain(tokens, past)
    return Step.tree(tokens, [int(random.integers(max(PAST, t - 4), t)) for t in range(rows)], past)


def a_path(random: np.random.Generator, step: Step) -> np.ndarray:
    return np.flatnonzero(step.visible[int(random.integers(len(step)))])


class Beside:
    """Sequences in a pool, and each of them alone in a state of its own.

    tokens  as Ops.new_pool
    single  the model that computes each of them alone, if not `model`
    """

    def __init__(self, model, slots: int, seed: int, prompts: tuple[int, ...], tokens: int | None = None, single=None):
        self.model, self.random, self.single = model, np.random.default_rng(seed), single or model
        self.pool = model.new_pool(slots, tiny.CAPACITY, tokens)
        self.states = [self.pool.new_state() for _ in prompts]
        self.alone = [self.single.new_state(tiny.CAPACITY) for _ in prompts]
        for i, n in enumerate(prompts):
            if n:
                self.read(i, n)

    def read(self, i: int, rows: int) -> None:
        """A step of a prompt of sequence `i`."""
        own = self.states[i], self.alone[i]
        step = Step.chain(self.random.integers(0, self.model.config.vocab, rows).astype(np.int32), own[0].length)
        both = zip((self.model, self.single), own, strict=True)
        logits = [model.ops.read(model.forward(state, step)) for model, state in both]
        assert np.array_equal(*logits), f"{rows} rows of sequence {i}"
        for each in own:
            each.commit(np.arange(rows))

    def step(self, who: list[int], sizes: list[int], keeps: float = 1.0) -> None:
        vocab = self.model.config.vocab
        steps = [a_step(self.random, vocab, self.states[i].length, n) for i, n in zip(who, sizes, strict=True)]
        joined = together(steps, [self.states[i].slot for i in who])
        read, forward = self.model.ops.read, self.model.forward
        logits = read(forward(self.pool, joined))
        assert np.array_equal(logits, read(forward(self.pool, joined))), "a step may run twice"
        at = 0
        for i, step in zip(who, steps, strict=True):
            want = self.single.ops.read(self.single.forward(self.alone[i], step))
            assert np.array_equal(logits[at : at + len(step)], want), f"sequence {i} of {who}, {sizes} rows"
            at += len(step)
        for i, step in zip(who, steps, strict=True):
            if self.random.random() < keeps:
                path = a_path(self.random, step)
                self.states[i].commit(path)
                self.alone[i].commit(path)

    def check_states(self) -> None:
        """What is committed goes on alike, whether the rows that follow run in the pool or alone."""
        for i, state in enumerate(self.states):
            saved, want = state.save(), self.alone[i].save()
            assert saved.keys() == want.keys()
            assert all(np.array_equal(saved[name], want[name]) for name in want), f"sequence {i}"


def test_rows_of_sequences_are_alone(model):
    """Chains and trees after pasts of every length, with sequences that sit steps out or commit nothing."""
    beside = Beside(model, 4, 1, (0, 3, 70, 150))
    beside.step([0, 1, 2, 3], [1, 1, 1, 1])
    beside.step([0, 1, 2, 3], [5, 1, 9, 3])
    for sizes in ([2, 1, 1, 1], [1, 1, 1, 1]) * 2:  # replayed in turn, with and without two rows of one
        beside.step([0, 1, 2, 3], sizes)
    beside.step([1, 3], [2, 7], keeps=0.5)
    beside.step([2], [4])
    beside.step([3, 0, 1], [30, 24, 60], keeps=0.7)
    for _ in range(3):
        who = [i for i in range(4) if beside.random.random() < 0.7] or [1]
        beside.step(who, [int(beside.random.integers(1, 12)) for _ in who], keeps=0.8)
    beside.check_states()


def test_a_prompt_beside_sequences(model):
    """A long step of one sequence between steps of all, and a new sequence in a slot that another one left."""
    beside = Beside(model, 3, 2, (5, 140, 9))
    beside.step([0, 1, 2], [3, 1, 4])
    beside.read(0, 150)
    beside.step([0, 1, 2], [1, 1, 1])
    left = beside.states[1].slot
    beside.states[1] = beside.alone[1] = None
    beside.states[1], beside.alone[1] = beside.pool.new_state(), model.new_state(tiny.CAPACITY)
    assert beside.states[1].slot == left
    beside.step([0, 1, 2], [2, 6, 1])
    snapshots = [(state.snapshot(), alone.snapshot()) for state, alone in zip(beside.states, beside.alone, strict=True)]
    beside.step([0, 1, 2], [1, 3, 1])
    for i in (0, 2):
        beside.states[i].restore(snapshots[i][0])
        beside.alone[i].restore(snapshots[i][1])
    beside.step([0, 1, 2], [4, 1, 5])
    beside.check_states()


@pytest.fixture(scope="module", params=["dflash", "mtp-qwen35", "eagle"])
def pair(request, ops, tmp_path_factory):
    target = tiny.load("qwen35", ops)
    if request.param != "eagle":
        return load_pair(tiny.FOLDER / request.param, target)
    c, folder = target.config, tmp_path_factory.mktemp("pair") / "eagle"
    return load_pair(tiny_eagle.write(folder, c.hidden, c.vocab, [0, 1, len(target.layout.layers) - 1]), target)


def test_others_decode_between_the_parts_of_a_long_step(model, monkeypatch):
    """Parts that are called, captured and replayed have the bits of whole steps, and so have the rows of the others."""
    beside = in_parts(model, monkeypatch)
    programs = beside.pool.graphs.get(model._parts[0], {})
    assert (programs.get(Shape(140)) is not None) == beside.pool.captures_long


def test_others_decode_between_the_parts_of_a_pair(pair, monkeypatch):
    """The draft's rows, which come of several parts, are those of a whole step."""
    in_parts(pair, monkeypatch)


def in_parts(model, monkeypatch) -> Beside:
    monkeypatch.setattr(models, "DIVIDED_ROWS", MAX_DECODE_ROWS + 1)
    beside = Beside(model, 3, 3, (5, 2, 9))
    beside.step([0, 1, 2], [3, 1, 4])  # of which a path may be left to apply
    for rows in (slice(139, 140), slice(0, 0), slice(139, 140), slice(139, 140)):
        state, single = beside.states[0], beside.alone[0]
        step = Step.chain(beside.random.integers(0, model.config.vocab, 140).astype(np.int32), state.length)
        parts, count, logits = model.forward_in_parts(state, step, rows), 1, None
        while logits is None:
            try:
                next(parts)
                count += 1
                beside.step([1, 2], [1, int(beside.random.integers(1, 5))])
            except StopIteration as done:
                logits = model.ops.read(done.value)
        assert count == min(models.PARTS, len(model.weights.layers))
        assert np.array_equal(logits, model.ops.read(model.forward(single, step, rows)))
        for each in (state, single):
            each.commit(np.arange(140))
        beside.step([0, 1, 2], [2, 1, 3])
    beside.check_states()
    return beside


@pytest.mark.parametrize("rows", [slice(0, 0), slice(159, 160)])
def test_long_steps_are_replayed_at_every_length_and_in_every_slot(model, rows):
    """The first of 160 rows is called, the second captured; a function that is made for each step is called."""
    random, pool = np.random.default_rng(7), model.new_pool(3, 700)
    called = partial(model._logits, rows=rows)
    for before in (0, 5, 150, 33):
        ids = random.integers(0, model.config.vocab, before + 480).astype(np.int32)
        replayed, expected = pool.new_state(), model.new_state(700)
        for at, n in ((0, before), *((before + i * 160, 160) for i in range(3))):
            if not n:
                continue
            step, here = Step.chain(ids[at : at + n], at), rows if n == 160 else slice(0, 0)
            found = model.ops.read(model.forward(replayed, step, here))
            called_out = model.ops.read(model.ops.run(called if n == 160 else model._no_row, expected, step))
            assert np.array_equal(found, called_out)
            for state in (replayed, expected):
                state.commit(range(n))
        saved, want = replayed.save(), expected.save()
        assert all(np.array_equal(saved[name], want[name]) for name in want)
        if before == 5:
            kept = replayed  # the next sequence has another slot
    assert kept.slot != replayed.slot
    programs = pool.graphs.get(model._last_row if rows.stop else model._no_row, {})
    assert (programs.get(Shape(160)) is not None) == pool.captures_long
    assert pool.captures_long or not model.architecture.startswith(("llama", "qwen"))


def test_long_steps_that_were_not_used_for_longest_are_dropped(model, monkeypatch):
    monkeypatch.setattr(replay, "LONG_PROGRAMS", 2)
    state, arena = model.new_state(1000), model.ops.context.arena
    if not state.pool.captures_long:
        pytest.skip("its long steps are launched one kernel after the other")
    for T in (140, 140, 150, 150, 140, 160, 160):
        model.forward(state, Step.chain(np.arange(T) % model.config.vocab, 0), slice(0, 0))
    programs = state.graphs[model._no_row]
    assert [shape.T for shape in programs] == [140, 160]
    before, moved = programs[Shape(160)], Memory(arena.passing.nbytes)
    monkeypatch.setattr(arena, "passing", moved)  # whose address captured steps do not have
    for expected in (None, moved):  # called first, then captured
        model.forward(state, Step.chain(np.arange(160) % model.config.vocab, 0), slice(0, 0))
        program = programs[Shape(160)]
        assert program is not before
        assert (program and program.scratch) is expected


def test_long_steps_where_products_cannot_be_captured(model, monkeypatch):
    """CuPy's function refuses a captured stream: where the library is not found, steps are called."""
    state, expected, context = model.new_state(440), model.new_state(440), model.ops.context
    if not state.pool.captures_long:
        pytest.skip("its long steps are launched one kernel after the other")
    multiply = gemm.cublas.gemmEx

    def refuse(*args):
        if context.stream.is_captured:
            raise NotImplementedError
        multiply(*args)

    monkeypatch.setattr(gemm, "_library", lambda: None)
    monkeypatch.setattr(gemm.cublas, "gemmEx", refuse)
    monkeypatch.setattr(context.replay, "captures_long", True)
    for at in range(0, 420, 140):
        step = Step.chain(np.arange(140, dtype=np.int32) % model.config.vocab, at)
        found = model.ops.read(model.forward(state, step, slice(139, 140)))
        called = model.ops.run(partial(model._logits, rows=slice(139, 140)), expected, step)
        assert np.array_equal(found, model.ops.read(called))
        for each in (state, expected):
            each.commit(range(140))
        assert context.replay.captures_long == (at == 0)


class Ids:
    """A tokenizer of tokens without text or end."""

    end_ids: frozenset[int] = frozenset()
    vocab_size = 0

    def decoder(self):
        return SimpleNamespace(push=lambda token: "")


def replies(model, parallel: int, calls, warms: bool = False) -> list[list[int]]:
    """The tokens of each call, all submitted at once; with `warms` after steps of which nothing is kept."""
    engine, out = Engine(model, Ids(), 400, parallel), []
    for size in warm_sizes(model, engine.memory) if warms else ():
        assert size.rows > 40 or engine.warm_up(size)
    for prompt, options in calls:
        tokens: list[int] = []
        out.append(tokens)
        put, end = (lambda piece, tokens=tokens: tokens.extend(piece.tokens)), (lambda error: None)
        engine.submit(Call(prompt, GenerationOptions(**options), put, end, threading.Event()))
    while engine.turn():
        if parallel > 1:
            assert engine.memory.pool is not None
    return out


def test_an_engine_runs_over_a_pool(model):
    """Replies of an engine of three slots are those of one slot: greedy, sampled, penalized, with looked-up drafts."""
    calls = [
        ([1, 2, 3, 1, 2, 3, 1, 2], {"max_tokens": 9, "spec": "lookup"}),
        ([5], {"max_tokens": 7}),
        ([7, 8, 9, 10], {"max_tokens": 6, "temperature": 0.8, "seed": 3}),
        ([4, 4, 4], {"max_tokens": 5, "temperature": 1.0, "seed": 4, "top_k": 9}),
        ([6, 7], {"max_tokens": 6, "temperature": 0.7, "seed": 5, "repetition_penalty": 1.3}),
        ([8], {"max_tokens": 6, "logit_bias": {5: 3.0}}),
    ]
    alone = replies(model, 1, calls)
    assert [len(tokens) for tokens in alone] == [options["max_tokens"] for _, options in calls]
    assert replies(model, 3, calls) == alone
    assert replies(model, 3, calls, warms=True) == alone


def test_memory_of_many_sequences():
    """The rows of a step are held once for all: 64 recurrent states of Qwen3.6-27B take 21 GB, not 82."""
    layer = {"conv": ConvSpec(10240, 4), "delta": DeltaSpec(16, 48, 128, 128)}
    one, many = (pool_bytes([layer] * 48, slots, 4096) for slots in (1, 64))
    assert 64 * one > 80e9
    assert 20.5e9 < many < 21.5e9
    held = CudaOps().new_pool([layer], 2, 64)
    assert held.nbytes == pool_bytes([layer], 2, 64)


def test_a_pool_takes_no_parts_of_the_blocks_of_another(ops, monkeypatch):
    """CuPy cuts blocks that are free: 0.8 of 22.7 GB were rests of them, as an emulation of its pool showed."""
    order, allocate = list[str](), Memory.__init__

    def noted(self, *of) -> None:
        order.append("allocate")
        allocate(self, *of)

    monkeypatch.setattr(ops_of, "give_back_blocks", lambda: order.append("give back"))
    monkeypatch.setattr(Memory, "__init__", noted)
    ops.new_state(tiny.load("llama", ops).state_spec, 64)
    assert order[order.index("give back") + 1] == "allocate"
    assert order.count("give back") == 1


def test_gaps_between_steps_are_measured():
    """The gap after every eighth step whose tokens are copied, and none before a benchmark begins to measure."""
    ops = CudaOps()
    model, random = tiny.load("llama", ops), np.random.default_rng(0)
    state = model.new_state(16)

    def decode() -> None:
        ops.sample(model.forward(state, a_step(random, model.config.vocab, state.length, 1)), Sampler(Sampling()))
        state.commit([0])

    decode()
    assert ops.idle is None
    seconds = ops.count_idle()
    assert seconds() == 0
    for _ in range(10):
        decode()
    assert len(ops.idle.gaps) == 2  # after the first and the ninth
    assert seconds() > 0


def test_refusals(ops):
    model = tiny.load("qwen35", ops)
    pool = ops.new_pool(model.state_spec, 2, 64)
    states = [pool.new_state() for _ in range(2)]
    with pytest.raises(BimetalError, match="all 2 sequences"):
        pool.new_state()
    chain = Step.chain(np.zeros(2, np.int32), 0)
    with pytest.raises(BimetalError, match="slot 2, which no sequence"):
        model.forward(pool, together([chain, chain], [0, 2]))
    with pytest.raises(BimetalError, match="one run of each"):
        model.forward(pool, together([chain, chain, chain], [0, 1, 0]))
    half = Step.chain(np.zeros(MAX_DECODE_ROWS // 2 + 1, np.int32), 0)
    with pytest.raises(BimetalError, match="rows of 2 sequences"):
        model.forward(pool, together([half, half], [0, 1]))
    with pytest.raises(BimetalError, match="1 to 64"):
        ops.new_pool(model.state_spec, 65, 64)
    states[0].commit([])
    with pytest.raises(ValueError, match="of a step of 0"):
        states[0].commit([0])
