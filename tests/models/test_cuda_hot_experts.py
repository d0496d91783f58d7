"""Models of which the GPU holds some experts: the bits of the fully resident model, whatever the budget."""

import numpy as np
import pytest
import tiny
from gguf_files import write_gguf

from common.errors import BimetalError
from common.expert_profile import Profile
from common.hot_experts import HotExperts
from common.models import load_model
from common.step import PAST, Step

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_backend import experts  # noqa: E402
from cuda_backend.memory import ALIGN  # noqa: E402
from cuda_backend.ops import CudaOps  # noqa: E402

pytestmark = pytest.mark.gpu

MIXTURES = ["qwen35moe", "laguna", "glm"]
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
    assert not all((table >= 0).all() for table in store.residency.tables), "some experts are cold"
    counters = store.residency.counters
    assert counters.misses > 0
    assert counters.bytes_read > 0
    assert store.residency.held_bytes() + store.staging.nbytes <= store.budget.nbytes


def test_what_moves_in_and_out(path, name, whole, monkeypatch):
    """Experts change slots all the time, steps run ahead of copies, and every bit stays."""
    monkeypatch.setattr(experts, "MISSES", 0.5)
    monkeypatch.setattr(experts, "TURNS", 1)
    ids = tiny.golden(name)["ids"].astype(np.int32)
    expected = traffic(whole, ids)
    model, store = spark(path, whole, 0.3)
    for _ in range(2):
        for n, (out, want) in enumerate(zip(traffic(model, ids), expected, strict=True)):
            assert np.array_equal(out, want), f"step {n}"
        store.begin_request()
    assert store.residency.counters.evictions > 0
    assert store.residency.counters.prefetched > 0


def test_counts(path, name, whole):
    """Uses are those of the rows: as many per layer as rows and experts per row, of padding rows none."""
    model, store = spark(path, whole, 0.3)
    state, ids = model.new_state(tiny.CAPACITY), tiny.golden(name)["ids"].astype(np.int32)
    rows = 0
    for n in (70, 1, 1, 1, 5, 5, 5):
        model.forward(state, Step.chain(ids[:n], state.length))
        state.commit(range(n))
        rows += n
    store._count_all()
    used = model.config.experts.top_k
    assert store.residency.counts[store.layers].sum(axis=1).tolist() == [rows * used] * len(store.layers)
    assert store.residency.counters.tokens == rows


def test_a_prompt_of_which_one_row_is_read(path, name, whole):
    """Its last layer runs for few rows, and counts nothing; steps after it are counted as they route."""
    ids = tiny.golden(name)["ids"].astype(np.int32)
    model, store = spark(path, whole, 0.3)
    state = model.new_state(tiny.CAPACITY)
    for at in range(3):
        model.ops.read(model.forward(state, Step.chain(ids[at : at + 1], at)))
        state.commit([0])
    model.ops.read(model.forward(state, Step.chain(ids[3:140], 3), slice(136, 137)))
    state.commit(range(137))
    model.ops.read(model.forward(state, Step.chain(ids[140:141], 140)))
    store._count_all()
    counts, used = store.residency.counts[store.layers], model.config.experts.top_k
    assert counts[:-1].sum(axis=1).tolist() == [141 * used] * (len(store.layers) - 1)
    assert counts[-1].sum() == 4 * used


def test_a_profile_places(path, name, whole):
    """The experts that a profile counts most are in slots before the first step."""
    count, layers = whole.config.experts.count, len(whole.weights.layers)
    counts = np.zeros((layers, count), np.int64)
    sparse = [i for i, layer in enumerate(whole.weights.layers) if hasattr(layer, "experts_down")]
    counts[sparse] = np.arange(count)
    _, store = spark(path, whole, 0.3, Profile(counts, whole.config.experts.top_k))
    for layer in sparse:
        held = store.residency.resident(layer)
        assert len(held) == 0 or held.min() >= count - len(held)


def test_a_copy_that_fails(path, name, whole, monkeypatch):
    """A copy that fails is one sentence, and what is computed later is right all the same."""
    monkeypatch.setattr(experts, "MISSES", 0.5)
    monkeypatch.setattr(experts, "TURNS", 1)
    ids = tiny.golden(name)["ids"].astype(np.int32)
    expected = tiny.run(whole, whole.new_state(tiny.CAPACITY), ids[:40], [1] * 40)
    model, store = spark(path, whole, 0.3)

    def failing(*_):
        raise BimetalError("copying 5 bytes of experts to the GPU failed: injected")

    state, out, failures = model.new_state(tiny.CAPACITY), [], 0
    for i in range(40):
        if i >= 16 and failures:
            break
        step = Step.chain(ids[i : i + 1], i)
        with monkeypatch.context() as patch:
            patch.setattr(experts, "copy", failing if i % 3 == 0 else experts.copy)
            try:
                out.append(model.ops.read(model.forward(state, step)))
            except BimetalError as error:
                failures += str(error).startswith("expert ") and str(error).count("failed") == 1
                out.append(None)
        out[-1] = model.ops.read(model.forward(state, step)) if out[-1] is None else out[-1]
        state.commit([0])
    assert failures > 0
    assert np.array_equal(np.concatenate(out), expected[: len(out)])
    assert store.residency.counters.prefetched > 0


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
