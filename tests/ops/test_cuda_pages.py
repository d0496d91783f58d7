"""Pages of a pool: growth at their edges, release and reuse, what runs out, and the bits of contiguous caches."""

import threading
from functools import partial

import numpy as np
import pytest
import tiny
from test_cuda_pool import Beside, Ids

import generate
from common import saving
from common.attention_scores import attention_to
from common.engine import Engine
from common.errors import BimetalError, NoRoomError
from common.fit import layer_size, predict_run
from common.models.drafts import load_pair
from common.options import GenerationOptions, LoadOptions
from common.scores import completed, score
from common.sequence import Call, Sequence
from common.slot import Slot
from common.step import MAX_DECODE_ROWS, Step
from common.storage import KVSpec, LatentSpec
from generate.loading import make_room

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_backend import memory  # noqa: E402
from cuda_backend.caches import planes  # noqa: E402
from cuda_backend.caches.pages import page_count, pages_of  # noqa: E402
from cuda_backend.caches.planes import PAGE  # noqa: E402
from cuda_backend.memory import copy_in  # noqa: E402
from cuda_backend.ops import CudaOps  # noqa: E402
from cuda_backend.sizes import snapshot_bytes  # noqa: E402
from cuda_backend.states import pool_bytes  # noqa: E402

pytestmark = pytest.mark.gpu
SPEC = [{"kv": KVSpec(2, 64, 64), "latent": LatentSpec(32, 16)}]


@pytest.fixture(scope="module")
def ops():
    return CudaOps()


@pytest.fixture(scope="module", params=["qwen3", "qwen35", "laguna", "glm"])
def model(request, ops):
    return tiny.load(request.param, ops)


def chain(rows: int, past: int, slot: int = 0) -> Step:
    return Step.chain(np.arange(rows, dtype=np.int32), past, slot)


def copy_out(address: int, nbytes: int, stream) -> np.ndarray:
    """Device memory as uint8, once what was launched before is done."""
    out, runtime = np.empty(nbytes, np.uint8), cupy.cuda.runtime
    runtime.memcpyAsync(out.ctypes.data, address, nbytes, runtime.memcpyDeviceToHost, stream.ptr)
    stream.synchronize()
    return out


def table(pool) -> np.ndarray:
    """The page numbers of each slot, as kernels read them."""
    flat = copy_out(pool.pages.table, 4 * pool.slots * pool.pages.pages_per_slot, pool.stores[0].stream)
    return flat.view(np.int32).reshape(pool.slots, -1)


def grow(state, rows: int) -> None:
    """Commit rows that nobody computes."""
    state.note_step(chain(rows, state.length))
    state.commit(np.arange(rows))


def numbers(pool, state) -> list[int]:
    return table(pool)[state.slot, : pool.pages.held[state.slot]].tolist()


def test_pages_are_taken_and_given_back(ops):
    pool = ops.new_pool(SPEC, 3, 1000, 1500)
    a, b = pool.new_state(), pool.new_state()
    count = 1500 // PAGE + 3
    assert pool.pages.count == count
    assert pool.free_tokens == count * PAGE
    for rows, pages in ((0, 0), (1, 1), (255, 1), (1, 2), (255, 2)):
        if rows:
            grow(a, rows)
        assert len(numbers(pool, a)) == pages
    grow(b, 300)
    a.note_step(chain(2, a.length))  # a step that is not committed holds pages for its rows
    held = numbers(pool, a)
    assert len(held) == 3
    assert sorted({*held, *numbers(pool, b)}) == sorted(held + numbers(pool, b))
    assert pool.free_tokens == (count - 5) * PAGE
    empty = b.snapshot()
    grow(b, 500)
    with pytest.raises(NoRoomError, match=f"hold 7 of {count} pages of 256 tokens, and a step needs 2 more"):
        a.note_step(chain(700, a.length))
    assert numbers(pool, a) == held
    b.restore(empty)
    assert len(numbers(pool, b)) == 2
    slot, freed = a.slot, set(held)
    del a
    assert pool.free_tokens == (count - 2) * PAGE
    c = pool.new_state()
    assert c.slot == slot
    grow(c, 600)
    assert set(numbers(pool, c)) & freed


def test_a_page_is_clear_when_it_is_taken(ops):
    """What lies after the last row is multiplied by 0, so that NaN of an earlier sequence would reach the next one."""
    pool = ops.new_pool(SPEC, 2, 600)
    state = pool.new_state()
    grow(state, 10)
    stores = [store for store in pool.stores if store.pages]
    for store in stores:
        ones = np.full(store.memory.nbytes, 255, np.uint8)
        copy_in(store.memory.address, ones, store.stream)
    state.restore(pool.new_state().snapshot())
    grow(state, 300)
    for store in stores:
        block = store.planes[0].block
        whole = copy_out(store.memory.address, store.memory.nbytes, store.stream).reshape(-1, block)
        taken = numbers(pool, state)
        assert not whole[taken].any()
        assert (np.delete(whole, taken, 0) == 255).all()


def test_no_kernel_leaves_its_pages(model):
    """Table entries of pages that no sequence has taken are 0: page 0 holds NaN here, and nobody reads or writes it."""
    beside = Beside(model, 3, 5, (1, 250, 30))
    pages, random = beside.pool.pages, beside.random
    assert numbers(beside.pool, beside.states[0]) == [0]
    stores = [store for store in beside.pool.stores if getattr(store, "pages", None)]
    for store in stores:
        block = store.planes[0].block
        copy_in(store.memory.address, np.full(block // 2, np.nan, np.float16), store.stream)
    beside.step([1, 2], [5, 9])
    beside.step([1, 2], [12, 1])  # crosses 256
    beside.read(2, 270)
    beside.step([1, 2], [MAX_DECODE_ROWS - 20, 3])
    beside.read(1, 140)
    beside.step([2, 1], [int(random.integers(1, 9)) for _ in range(2)])
    assert pages.held[1:] == [2, 2]
    for store in stores:
        page = copy_out(store.memory.address, store.planes[0].block, store.stream).view(np.float16)
        assert np.isnan(page).all()
    beside.states, beside.alone = beside.states[1:], beside.alone[1:]
    beside.check_states()


def test_states_move_between_pages(model):
    """A state saved from one slot goes on in other pages, and one that found too few stays as it was."""
    beside = Beside(model, 3, 6, (200, 300), tokens=0)
    pool, (one, two) = beside.pool, beside.states
    assert pool.pages.count == pages_of(tiny.CAPACITY)
    saved, steps = two.save(), list(two.long_steps)
    three = pool.new_state()
    with pytest.raises(NoRoomError):
        three.load(saved, 300, steps)
    assert (three.length, pool.pages.held[three.slot]) == (0, 0)
    one.restore(three.snapshot())
    three.load(saved, 300, steps)
    beside.states, beside.alone = [three], beside.alone[1:]
    beside.step([0], [6])
    beside.check_states()


def test_a_long_state_moves_in_little_memory(ops, monkeypatch):
    """What is copied to the host and back takes memory beside the pages: for a part of the state at a time."""
    model, random = tiny.load("qwen3", ops), np.random.default_rng(1)
    pool = ops.new_pool(model.state_spec, 2, 2000, 2000)
    held = Slot(model, 2000, pool)
    grow(held.state, 1900)
    before = {name: random.integers(0, 255, array.shape, np.uint8) for name, array in held.state.save().items()}
    held.state.load(before, 1900)
    monkeypatch.setattr(saving, "MOVED", PAGE)
    monkeypatch.setattr(planes, "COPIED", pool.pages.block)
    memory.give_back()
    memory.limit(cupy.get_default_memory_pool().total_bytes() + 2 * pool.pages.block)
    try:
        held.suspend()
        assert pool.pages.held == [0, 0]
        held.resume()
    finally:
        memory.limit(0)
    after = held.state.save()
    assert all(np.array_equal(after[name], array) for name, array in before.items())


@pytest.mark.parametrize("parallel", [2, 3])
def test_replies_when_pages_run_out(ops, parallel, monkeypatch):
    """Sequences in too few pages move to the host and back, each with the tokens of running alone."""
    model = tiny.load("qwen3", ops)
    calls = [([i % 90 for i in range(240)], 30), ([i % 50 for i in range(245)], 20), ([7, 8], 12)]

    def replies(parallel: int, tokens: int | None = None) -> list:
        engine, out = Engine(model, Ids(), 500, parallel, tokens=tokens), []
        for prompt, count in calls:
            out.append([])
            put = lambda piece, out=out[-1]: out.extend(piece.tokens)  # noqa: E731
            end = lambda error, out=out[-1]: out.append(error)  # noqa: E731
            engine.submit(Call(prompt, GenerationOptions(max_tokens=count), put, end, threading.Event()))
        engine.drain()
        pool = engine.memory.pool
        if pool is not None:
            assert pool.pages.count == pages_of(500)
            engine.reset()
            engine.turn()
            assert pool.free_tokens == pool.pages.count * PAGE, "an idle pool holds no page"
        return out

    moved, suspend = [], Slot.suspend
    monkeypatch.setattr(Slot, "suspend", lambda slot: moved.append(suspend(slot)))
    alone = replies(1)
    assert [len(reply) for reply in alone] == [31, 21, 13]
    for _ in range(2):  # prompts wait where a step before them compiles kernels: replies may not meet at first
        assert replies(parallel, 0) == alone
    assert moved


def test_a_cancelled_prompt_gives_its_pages_back(ops, monkeypatch):
    """Of its first step, which had begun: the next prompt finds them in an idle slot that holds no token."""
    monkeypatch.setattr("common.models.DIVIDED_ROWS", 150)
    engine, ends = Engine(tiny.load("qwen3", ops), Ids(), 500, 2, tokens=0), []

    def submit(prompt: list[int]) -> Sequence:
        how = GenerationOptions(max_tokens=5)
        return engine.submit(Call(prompt, how, lambda piece: None, ends.append, threading.Event()))

    submit([7, 8])
    cancelled = submit([i % 90 for i in range(400)])
    while cancelled.unfinished_parts is None:
        engine.turn()
    cancelled.call.cancel.set()
    engine.drain()
    assert engine.memory.pool.pages.held[cancelled.slot.state.slot] == 2
    last = submit([i % 80 for i in range(400)])
    engine.drain()
    assert ends == [None] * 3
    assert (last.new_tokens, last.slot is cancelled.slot) == (5, False)


def test_scores_take_memory_for_their_tokens_alone(ops):
    """Beside slots that have taken nearly all of it, for a whole context."""
    model, ids = tiny.load("qwen3", ops), tiny.golden("qwen3")["ids"][:40].tolist()
    ways = partial(score, model, ids, 20_000), partial(attention_to, model, ids, 8, 20_000)
    expected = [completed(way()) for way in ways]  # takes what steps compute
    memory.give_back()
    memory.limit(cupy.get_default_memory_pool().total_bytes() + (1 << 20))
    try:
        found = [completed(way()) for way in ways]
    finally:
        memory.limit(0)
    assert found[0] == expected[0]
    assert np.array_equal(found[1], expected[1])


def test_drafts_of_replies_share_pages(ops):
    """A draft's rows lie in the same pages: trees of two sequences, one of which crosses a page's edge."""
    pair = load_pair(tiny.FOLDER / "dflash", tiny.load("qwen35", ops))
    calls = [[i % 90 for i in range(252)], [5, 6, 7, 8]]

    def replies(parallel: int) -> list[list[int]]:
        engine, out = Engine(pair, Ids(), 400, parallel, tokens=400), []
        for prompt in calls:
            out.append([])
            put = lambda piece, out=out[-1]: out.extend(piece.tokens)  # noqa: E731
            how = GenerationOptions(max_tokens=8, spec="tree", tree_budget=6)
            engine.submit(Call(prompt, how, put, out[-1].append, threading.Event()))
        engine.drain()
        return out

    alone = replies(1)
    assert [len(reply) for reply in alone] == [9, 9]
    assert replies(2) == alone


def test_memory_of_pages(ops):
    """A pool takes what is predicted, and a fraction of whole contexts for each sequence."""
    pool = ops.new_pool(SPEC, 4, 2000, 2000)
    assert pool.nbytes == pool_bytes(SPEC, 4, 2000, 2000) < pool_bytes(SPEC, 4, 2000) / 2
    state = pool.new_state()
    grow(state, 300)
    assert state.nbytes == 2 * pool.pages.block
    with pytest.raises(BimetalError, match="do not fit"):
        ops.run(lambda s, step: step, state, chain(2001, 300))


@pytest.mark.parametrize(("parallel", "pages"), [(None, page_count(4, 300, 300)), (3, 3 * pages_of(300))])
def test_replies_of_a_loaded_model_share_memory(parallel, pages):
    """By default as much as one context has; where their number is given, what fits up to a context of each."""
    prompts = ["def add(a, b):", "class Stack:", "import "]
    with generate.load("demo", backend="cuda", ctx=300, parallel=parallel) as llm:
        assert llm.parallel == (parallel or 4)
        assert llm._engine.memory.pool.pages.count == pages
        replies = [reply.text for reply in llm.generate(prompts, max_tokens=4, temperature=0)]
        assert 0 <= llm.activity.context_share < 0.5
    with generate.load("demo", backend="cuda", ctx=300, parallel=1) as llm:
        assert llm._engine.memory.pool is None
        assert [llm.generate(prompt, max_tokens=4, temperature=0).text for prompt in prompts] == replies


def test_shared_memory_has_room_for_the_rows_of_a_draft(ops, monkeypatch):
    """A multi-token-prediction block stores keys and values of every token that the replies hold together."""
    pair, free = load_pair(tiny.FOLDER / "mtp-qwen35", tiny.load("qwen35", ops)), 20 * 10**6
    monkeypatch.setattr(ops, "free_by_device", lambda layers: [(free, range(layers))])
    for name in ("work_bytes", "decode_bytes", "logits_bytes"):
        monkeypatch.setattr(ops, name, lambda *_: 0)
    room = make_room(pair, LoadOptions(ctx=2000, parallel=20))
    assert room.context < room.tokens < 20 * room.context
    assert pair.new_pool(20, room.context, room.tokens).nbytes < free


def test_what_slots_take_is_predicted(ops):
    """Pages for one context, and of each slot its fixed states and the copies that it goes back to."""
    model = tiny.load("qwen35", ops)
    one, two, three = (predict_run(ops, model.blueprint, 2000, 512, parallel) for parallel in (1, 2, 3))
    held = ops.new_pool(model.state_spec, 3, 2000, 2000).nbytes + 2 * snapshot_bytes(model.state_spec, 2000)
    assert sum(three[:2]) == held
    assert 0 < two[1] - one[1] == three[1] - two[1]
    logits = [ops.logits_bytes(model.config.vocab, sequences) for sequences in (1, 3)]
    layers = [layer_size(t, s, model.config) for t, s in zip(model.layout.layers, model.state_spec, strict=True)]
    assert ops.decode_bytes(layers, 2000, 3) > ops.decode_bytes(layers, 2000, 1) == 0
    assert one[2] - logits[0] == three[2] - logits[1] - ops.decode_bytes(layers, 2000, 3)
    assert three[0] < 1.7 * one[0]
