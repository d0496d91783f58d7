"""Models of which the GPU holds some experts: the bits of the fully resident model, whatever the budget."""

import ctypes

import numpy as np
import pytest
import tiny
from gguf_files import write_gguf

from common.errors import BimetalError
from common.expert_profile import Profile
from common.hot_experts import HotExperts
from common.models import load_model
from common.ops import ExpertWeights
from common.step import PAST, Step

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_backend.arrays import Array  # noqa: E402
from cuda_backend.expert_stacks import parts_of_expert  # noqa: E402
from cuda_backend.memory import ALIGN, upload  # noqa: E402
from cuda_backend.ops import CudaOps  # noqa: E402

pytestmark = pytest.mark.gpu

MIXTURES = ["qwen35moe", "qwen3next", "qwen3moe", "laguna", "glm", "glm4moe", "gptoss", "deepseek2", "granitemoe"]
TREE = [PAST, 0, 1, 1, 0, 4, 2, 3]
SHARES = [0.0, 0.3, 0.6]  # of what lies between the least budget and all experts


@pytest.fixture(scope="module")
def resident():
    return CudaOps()


@pytest.fixture(scope="module", params=MIXTURES)
def name(request):
    return request.param


@pytest.fixture(scope="module", params=["stored", "Q8_0"])
def path(request, name, tmp_path_factory):
    """The tiny model with floats as its experts, and with blocks."""
    folder = tiny.FOLDER / name
    return folder if request.param == "stored" else write_gguf(folder, tmp_path_factory.mktemp(name) / "m.gguf", "Q8_0")


@pytest.fixture(scope="module")
def whole(path, resident):
    return load_model(path, resident)


def budgets(model):
    """The least budget, and that with which all experts are resident."""
    layers = [layer for layer in model.weights.layers if hasattr(layer, "experts_down")]
    stacks = [[s for w in (layer.experts_gate_up, layer.experts_down) for s in w.segments] for layer in layers]
    slots = [sum(-(-s.expert_bytes // ALIGN) * ALIGN for s in segments) for segments in stacks]
    staging = sum(max(sum(s.memory.nbytes for s in w.segments) for w in stack) for stack in _pairs(layers))
    count = model.config.experts.count
    return count * sum(set(slots)) + staging, count * sum(slots) + staging


def _pairs(layers):
    return [[getattr(layer, key) for layer in layers] for key in ("experts_gate_up", "experts_down")]


def spark(path, model, share, profile=None):
    """The model with some experts in slots, and the store that holds them."""
    least, most = budgets(model)
    budget = least + int(share * (most - least))
    ops = CudaOps(HotExperts(budget, model.config.experts.top_k, profile))
    return load_model(path, ops), ops.context.experts


def traffic(model, ids):
    """Logits of prefill, single rows, chains of several lengths, a tree of which a path is kept, and a snapshot."""
    state, out = model.new_state(tiny.CAPACITY), []

    def forward(step):
        out.append(model.ops.read(model.forward(state, step)))

    forward(Step.chain(ids[:137], 0))
    state.commit(range(137))
    kept = state.snapshot()
    for n in (1, 1, 1, 5, 5, 5, 20, 1):
        forward(Step.chain(ids[state.length : state.length + n], state.length))
        state.commit(range(n))
    for _ in range(3):
        forward(Step.tree(ids[100:108], TREE, state.length))
    state.commit([0, 1, 2, 6])
    state.restore(kept)
    for i in range(12):
        forward(Step.chain(ids[300 + i : 301 + i], state.length))
        state.commit([0])
    forward(Step.chain(ids[:137], state.length))
    return out


@pytest.mark.parametrize("share", SHARES)
def test_bits_of_the_resident_model(path, name, whole, share):
    ids = tiny.golden(name)["ids"].astype(np.int32)
    expected = traffic(whole, ids)
    model, store = spark(path, whole, share)
    for n, (out, want) in enumerate(zip(traffic(model, ids), expected, strict=True)):
        assert np.array_equal(out, want), f"step {n}"
    stats = store.stats()
    assert (store.slots < 0).any(), "some experts are cold"
    assert stats.misses > 0
    assert stats.bytes_read > 0
    assert store.residency.held_bytes() + store.staging.nbytes <= store.budget.nbytes


def contents(store):
    """Yield for each part of an expert in a slot its bytes at the table's address, and those in host memory."""
    runtime = cupy.cuda.runtime

    def numbers(address, n, dtype=np.uint8):
        out = np.empty(n, dtype)
        runtime.memcpyAsync(out.ctypes.data, address, out.nbytes, runtime.memcpyDeviceToHost, store.stream.ptr)
        store.stream.synchronize()
        return out

    address_of = {i: store._memory(layer) for i, layer in enumerate(store.layers)}
    for i, layer in enumerate(store.layers):
        for expert in range(store.experts):
            address, size = address_of[i]
            slot = address + max(0, int(store.slots[i, expert])) * size
            for s, host, place in parts_of_expert(store.stacks[layer], expert, slot):
                at = int(numbers(s.places.address + 8 * expert, 1, np.uint64)[0])
                assert at == (place if store.slots[i, expert] >= 0 else host), (layer, expert)
                if at != host:
                    own = np.ctypeslib.as_array((ctypes.c_uint8 * s.expert_bytes).from_address(host))
                    yield numbers(at, s.expert_bytes), own


def test_what_moves_in_and_out(path, name, whole):
    """Experts change slots all the time, and every bit stays: of results, and of the experts in slots."""
    ids = tiny.golden(name)["ids"].astype(np.int32)
    expected = traffic(whole, ids)
    model, store = spark(path, whole, 0.3)
    for _ in range(2):
        for n, (out, want) in enumerate(zip(traffic(model, ids), expected, strict=True)):
            assert np.array_equal(out, want), f"step {n}"
        store.begin_request()
    assert store.stats().evictions > 0
    assert all(np.array_equal(held, own) for held, own in contents(store))
    places = [
        (store._memory(layer), slot)
        for layer, row in zip(store.layers, store.slots, strict=True)
        for slot in row
        if slot >= 0
    ]
    assert len(set(places)) == len(places), "two experts share a slot"


def test_a_layer_that_runs_twice_in_a_step(path, name, whole):
    """The second run finds the experts that the first has moved; most of both runs' experts are cold at first."""
    ids = tiny.golden(name)["ids"].astype(np.int32)
    model, store = spark(path, whole, 0.0)
    e, random = model.config.experts, np.random.default_rng(5)
    pairs = [(x.layers[i], i) for i in store.layers for x in (whole.weights, model.weights)]
    rows = random.normal(size=(2, 24, model.config.hidden)).astype(np.float32)

    def outputs(m, w):
        shared = [getattr(w, key, None) for key in ("gate_up", "down")]
        weights = ExpertWeights(w.router, w.experts_gate_up, w.experts_down, *shared)
        made = [upload(x[i : i + 1], m.ops.context.stream) for i in range(24) for x in rows]
        return [m.ops.read(m.ops.moe_ffn(Array(rows[0, :1].shape, x.address), weights, e.top_k)) for x in made]

    model.ops.read(model.forward(model.new_state(tiny.CAPACITY), Step.chain(ids[:1], 0)))
    before = store.stats().evictions
    for expected, own in zip(pairs[::2], pairs[1::2], strict=True):
        want = outputs(whole, expected[0])
        got = store.step(outputs, 1, 1, lambda w=own[0]: outputs(model, w))
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    assert store.stats().evictions > before + 8
    assert all(np.array_equal(held, own) for held, own in contents(store))


def test_counts(path, name, whole):
    """Uses are those of the rows: as many per layer as rows and experts per row, of padding rows none."""
    model, store = spark(path, whole, 0.3)
    state, ids = model.new_state(tiny.CAPACITY), tiny.golden(name)["ids"].astype(np.int32)
    rows = 0
    for n in (70, 1, 1, 1, 5, 5, 5):
        model.forward(state, Step.chain(ids[:n], state.length))
        state.commit(range(n))
        rows += n
    store.stats()
    used = model.config.experts.top_k
    assert store.residency.counts[store.layers].sum(axis=1).tolist() == [rows * used] * len(store.layers)
    assert store.residency.counters.tokens == rows


def test_a_prompt_of_which_one_row_is_read(path, name, whole):
    """Its last layer runs for one row, and counts its experts; steps after it are counted as they route."""
    ids = tiny.golden(name)["ids"].astype(np.int32)
    model, store = spark(path, whole, 0.3)
    state = model.new_state(tiny.CAPACITY)
    for at in range(3):
        model.ops.read(model.forward(state, Step.chain(ids[at : at + 1], at)))
        state.commit([0])
    model.ops.read(model.forward(state, Step.chain(ids[3:140], 3), slice(136, 137)))
    state.commit(range(137))
    model.ops.read(model.forward(state, Step.chain(ids[140:141], 140)))
    store.stats()
    counts, used = store.residency.counts[store.layers], model.config.experts.top_k
    assert counts[:-1].sum(axis=1).tolist() == [141 * used] * (len(store.layers) - 1)
    assert counts[-1].sum() == 5 * used


def test_a_profile_places(path, name, whole):
    """The experts that a profile counts most are in slots before the first step."""
    count, layers = whole.config.experts.count, len(whole.weights.layers)
    counts = np.zeros((layers, count), np.int64)
    sparse = [i for i, layer in enumerate(whole.weights.layers) if hasattr(layer, "experts_down")]
    counts[sparse] = np.arange(count)
    _, store = spark(path, whole, 0.3, Profile(counts, whole.config.experts.top_k))
    for layer in sparse:
        held = np.flatnonzero(store.slots[store.layers.index(layer)] >= 0)
        assert len(held) == 0 or held.min() >= count - len(held)


def test_budgets_that_are_refused(path, whole):
    least, most = budgets(whole)
    used = whole.config.experts.top_k
    with pytest.raises(BimetalError, match=r"the least for this model is .* one layer's .* experts of each size"):
        load_model(path, CudaOps(HotExperts(least - 1, used)))
    with pytest.raises(BimetalError, match="so spark has no effect"):
        load_model(path, CudaOps(HotExperts(most, used)))


def test_a_model_without_experts():
    with pytest.raises(BimetalError, match="the model has no experts, so spark has no effect"):
        load_model(tiny.checkpoint("qwen3"), CudaOps(HotExperts(10**9, 4)))
