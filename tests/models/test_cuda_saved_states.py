"""Saving a state of the GPU on the host and loading it: each later step has the same bits."""

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import tiny
from narrow import narrow

from common.kv_cache import CacheOptions
from common.step import PAST, Step
from generate.synthetic import synthetic

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_backend import background_copies, memory, staged  # noqa: E402
from cuda_backend.ops import CudaOps  # noqa: E402
from cuda_backend.random_weights import RandomOps  # noqa: E402

pytestmark = pytest.mark.gpu

TREE = [PAST, 0, 1, 1, 0, 4, 2, 3]


@pytest.fixture(scope="module")
def ops():
    return CudaOps()


def forward(model, state, step):
    return np.array(model.ops.read(model.forward(state, step)))


def after(model, state, ids):
    tree = forward(model, state, Step.tree(ids[:8], TREE, state.length))
    state.commit([0, 1, 3, 7])
    return np.concatenate([tree, tiny.run(model, state, ids[8:16], [1, 5])])


def check(model, ids, length, capacity):
    """Save after a prompt and a tree whose path is not applied yet; load into states at other places of their rings."""
    state = model.new_state(capacity)
    tiny.run(model, state, ids[:length])
    forward(model, state, Step.tree(ids[20:28], TREE, length))
    state.commit([0, 4, 5])
    saved, length = state.save(), state.length
    expected = after(model, state, ids)
    other = model.new_state(capacity)
    tiny.run(model, other, ids[30:60], [7])
    parts = {k: np.split(v, [1, 3], axis=1) if k.startswith("rows") else v for k, v in saved.items()}
    for loaded, arrays in ((model.new_state(capacity), saved), (other, parts), (state, saved)):
        loaded.load(arrays, length)
        again = loaded.save()
        assert all(np.array_equal(again[name], saved[name]) for name in saved)
        assert np.array_equal(after(model, loaded, ids), expected)


@pytest.mark.parametrize("length", [5, 140])
@pytest.mark.parametrize("name", ["qwen3", "qwen35", "laguna", "mistral", "gemma3", "glm", "gptoss"])
def test_families(ops, name, length):
    check(tiny.load(name, ops), tiny.golden(name)["ids"].astype(np.int32), length, tiny.CAPACITY)


def test_a_window_that_has_wrapped(monkeypatch):
    """140 tokens in one step, whose ring was rolled, then more of them one after another."""
    narrow("laguna-xs.2", monkeypatch)
    model = synthetic("laguna-xs.2:q4_k_m", RandomOps())
    check(model, np.random.default_rng(1).integers(0, 512, 300).astype(np.int32), 280, 320)


@pytest.mark.parametrize("pair", [("q8_0", "lm4"), ("lm4", "lm4"), ("tq3_0", "q5_1")], ids="/".join)
@pytest.mark.parametrize("counts", [(0, 0, 0), (4, 9, 20), (2, 30, 60)], ids=str)
def test_formats(pair, counts, monkeypatch):
    """Codes alone; codes beside exact rows, with and without the statistics of a calibration."""
    narrow("wedlm-8b", monkeypatch)
    coded = CacheOptions(*pair, **dict(zip(("sinks", "recent", "calibration"), counts, strict=True)))
    model = replace(synthetic("wedlm-8b:q4_k_m", RandomOps()), cache=coded)
    check(model, np.random.default_rng(1).integers(0, 512, 100).astype(np.int32), 37, 120)


@pytest.mark.parametrize("name", ["qwen35", "laguna", "mistral"])
def test_a_state_that_is_emptied(ops, name):
    model, ids = tiny.load(name, ops), tiny.golden(name)["ids"].astype(np.int32)
    state = model.new_state(tiny.CAPACITY)
    empty = state.snapshot()
    assert not any(empty.layers)  # it takes no memory
    expected = tiny.run(model, state, ids[:9], [4])
    tiny.run(model, state, ids[20:200])
    state.restore(empty)
    assert np.array_equal(tiny.run(model, state, ids[:9], [4]), expected)


@pytest.mark.parametrize("many", [0, 1 << 30])
@pytest.mark.parametrize("name", ["qwen35", "laguna", "glm"])
def test_copies_are_made_beside_later_steps(ops, name, many, monkeypatch):
    """What is saved is what the state held then, though its rows are overwritten before the copies are complete."""
    monkeypatch.setattr(background_copies, "MANY", many)
    model, ids = tiny.load(name, ops), tiny.golden(name)["ids"].astype(np.int32)
    state = model.new_state(tiny.CAPACITY)
    tiny.run(model, state, ids[:9])
    before, saved = state.snapshot(), []
    for turn in range(6):
        tiny.run(model, state, ids[10 + turn : 20 + turn], [turn + 1])
        expected = {k: v.copy() for k, v in state.save().items()} if turn % 2 else None
        saved.append((state.save_rows(3, state.length), state.save_point(), expected))
        state.restore(before)
    state.finish_saving()
    for rows, point, expected in saved[1::2]:
        whole = [v[:, 3:] for k, v in expected.items() if k.startswith("rows")]
        assert all(np.array_equal(a, b) for a, b in zip(rows, whole, strict=True))
        assert all(np.array_equal(a, b) for a, b in zip(point, list(expected.values())[len(whole) :], strict=True))


@pytest.mark.parametrize("nbytes", [1, 64, 65, 64 * 8, 64 * 21 + 5])
def test_copies_through_pinned_memory(ops, nbytes, monkeypatch):
    """Arrays of any size, also when the next one comes at once and its source is overwritten after it."""
    monkeypatch.setattr(staged, "CHUNK", 64)
    monkeypatch.setattr(memory, "LARGE", 1)
    stream, found = ops.context.stream, np.empty((3, nbytes), np.uint8)
    stream.staged.started, source = None, np.empty(nbytes, np.uint8)
    device = memory.Memory(3 * nbytes, stream)
    expected = np.random.default_rng(0).integers(0, 255, (3, nbytes), np.uint8)
    for i, array in enumerate(expected):
        source[:] = array
        memory.copy_in(device.address + i * nbytes, source, stream)
    cupy.cuda.runtime.memcpyAsync(found.ctypes.data, device.address, found.nbytes, 2, stream.ptr)
    stream.synchronize()
    stream.staged.started = None
    assert np.array_equal(found, expected)


def test_copies_while_the_interpreter_ends(ops):
    """A script that ended right after a reply showed that no thread could be started."""
    copies, source = background_copies.BackgroundCopies(ops.context.stream.cuda), np.arange(200, dtype=np.uint8)
    first, second = (memory.upload(each, ops.context.stream) for each in (source, source[::-1].copy()))
    out = [copies.copy(first)]
    copies.worker[0].shutdown()
    out.append(copies.copy(second))
    copies.completion()()
    assert np.array_equal(out, [source, source[::-1]])


def test_copies_that_wait(ops, monkeypatch):
    monkeypatch.setattr(background_copies, "MANY", 100)
    copies = background_copies.BackgroundCopies(ops.context.stream.cuda)
    slow, out = Future(), np.empty(101, np.uint8)
    copies.waiting.append((slow, out))
    assert (copies.waiting_bytes, copies.limit(0), copies.limit(699)) == (101, 100, 200)
    copies.make_room(100, 1200)  # returns at once: a quarter of what is free is more
    slow.set_result(None)
    assert copies.waiting_bytes == 0
    copies.waiting.append((slow, out))
    copies.make_room(1, 0)
    assert not copies.waiting


def test_arrays_are_waited_for_alone(ops):
    copies = background_copies.BackgroundCopies(ops.context.stream.cuda)
    outs = [np.empty(8, np.uint8) for _ in range(4)]
    done = [Future() for _ in outs]
    copies.waiting.extend(zip(done, outs, strict=True))
    of_two, of_all = copies.completion([outs[0], outs[2].view(np.float32)[:1], np.empty(3)]), copies.completion()
    done[0].set_result(None)
    done[2].set_result(None)
    of_two()
    done[1].set_result(None)
    done[3].set_exception(RuntimeError("the GPU is gone"))
    with pytest.raises(RuntimeError, match="gone"):
        of_all()
