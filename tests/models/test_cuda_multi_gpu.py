"""Tiny models over several GPUs give the bits of one GPU; the draft may have a GPU of its own."""

import gc
import itertools
from dataclasses import replace

import numpy as np
import pytest
import tiny
import tiny_chat
import tiny_draft
import tiny_eagle
from narrow import WIDE, narrow

import generate
from common.decode.alone import run_alone
from common.decode.run import DecoderRun
from common.decoders import Speculation
from common.errors import BimetalError, UsageError
from common.fit import SPARE, Blueprint, context_that_fits, predict_layers
from common.models import ARCHITECTURES, load_model
from common.models.drafts import load_pair
from common.ops import Ops
from common.sampling import Sampler, Sampling
from common.step import PAST, Step
from generate.backends import Placement, open_backend
from generate.synthetic import synthetic, synthetic_checkpoint

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_backend import layer_split  # noqa: E402
from cuda_backend.ops import CudaOps  # noqa: E402
from cuda_backend.states import state_bytes  # noqa: E402

COUNT = cupy.cuda.runtime.getDeviceCount()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")]
three = pytest.mark.skipif(COUNT < 3, reason="needs three GPUs")

TREE = [PAST, 0, 1, 1, 0, 4, 2, 3]
FAMILIES = [
    "llama",
    "mistral",
    "phi4mini",
    "qwen2",
    "qwen3",
    "qwen3moe",
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "gemma3",
    "laguna",
    "glm",
    "glm4moe",
    "gptoss",
    "smollm3",
    "granite",
    "olmo2",
    "olmo3",
    "deepseek2",
    "deepseek3",
    "granitemoe",
]
TWO = Placement((0, 1), (1, 1))


def ops_on(name, placement):
    return open_backend("cuda", tiny.checkpoint(name), placement)


def texts(name):
    return tiny.golden(name)["ids"].astype(np.int32)


def story(model, ids, prompt):
    """The logits of a prompt, of single rows, of trees of which a branch is kept, and after a restored snapshot."""
    state, out = model.new_state(160), []

    def read(step, path):
        out.append(model.ops.read(model.forward(state, step)))
        state.commit(path)

    def chain(start, n):
        read(Step.chain(ids[start : start + n], state.length), range(n))

    chain(0, prompt)
    counts = [model.ops.launches]
    for at in range(prompt, prompt + 3):  # as it comes, captured, replayed
        chain(at, 1)
        counts.append(model.ops.launches)
    assert len(set(np.diff(counts))) == 1, counts
    for _ in range(2):
        read(Step.tree(ids[70:78], TREE, state.length), [0, 1, 3])
    saved = state.snapshot()
    chain(80, 3)
    state.restore(saved)
    chain(80, 3)
    assert np.array_equal(*out[-2:])
    return np.concatenate(out)


@pytest.fixture(scope="module", params=FAMILIES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def one():
    return CudaOps()


@pytest.fixture(scope="module", params=[5, 66], ids=["short", "prefill"])
def prompt(request):
    return request.param


@pytest.fixture(scope="module")
def expected(name, one, prompt):
    return story(tiny.load(name, one), texts(name), prompt)


@pytest.mark.parametrize(
    "placement",
    [TWO, Placement((1, 0), (1, 3)), pytest.param(Placement((2, 0, 1), (1, 1, 1)), marks=three)],
    ids=["two", "uneven", "three"],
)
def test_logits(name, expected, prompt, placement):
    model = load_model(tiny.checkpoint(name), ops_on(name, placement))
    assert np.array_equal(story(model, texts(name), prompt), expected)


def test_each_holds_its_layers(name):
    def used():
        pools = []
        for device in (0, 1):
            with cupy.cuda.Device(device):
                pools.append(cupy.get_default_memory_pool().used_bytes())
        return np.array(pools)

    ops = ops_on(name, Placement((0, 1), (1, 2)))
    gc.collect()  # what other tests left must not go meanwhile
    before = used()
    model = load_model(tiny.checkpoint(name), ops)
    sizes = predict_layers(tiny.checkpoint(name), model.layout, ops)
    places = [gpu.index for gpu in ops.layers]
    assert places == sorted(places)
    assert {*places} == {0, 1}
    for device, grown in enumerate(used() - before):
        own = sum(size for size, place in zip(sizes, places, strict=True) if place == device)
        count = sum(len(vars(layer)) for layer in model.weights.layers) + 3
        assert own <= grown <= own + 512 * count  # what an allocation is rounded up to
    state, spec = model.new_state(64), model.definition.state_spec(model.config)
    for gpu, share in state.shares.items():
        assert share.nbytes == state_bytes([s for s, place in zip(spec, ops.layers, strict=True) if place is gpu], 64)
    assert state.nbytes == state_bytes(spec, 64)


@pytest.mark.parametrize("full", [0, 1])
def test_the_fullest_sets_the_context(full, monkeypatch):
    """The GPU of a draft holds no layers of the model, so that its memory does not bound the context."""
    ops = ops_on("qwen3", Placement((0, 1), (1, 1), draft=2 if COUNT > 2 else 1))
    checkpoint = tiny.checkpoint("qwen3")
    definition = ARCHITECTURES["qwen3"]
    config = replace(definition.read_config(checkpoint), context=1 << 20)
    layout, spec = definition.layout(config, checkpoint), definition.state_spec(config)
    for name in ("work_bytes", "logits_bytes"):
        monkeypatch.setattr(CudaOps, name, lambda *_: 0)
    own = [[s for i, s in enumerate(spec) if ops.layers[i].index == device] for device in (0, 1)]
    limit = state_bytes(own[full], 5000)
    monkeypatch.setattr(layer_split, "free", lambda gpu: limit / (1 - SPARE) if gpu.index == full else 10**15)
    context = context_that_fits(ops, Blueprint(config, layout, spec))
    assert state_bytes(own[full], context) <= limit < state_bytes(own[full], context + 64)


@pytest.mark.parametrize("target", ["qwen35", "laguna"])
@pytest.mark.parametrize(
    "placement",
    [
        Placement((0,), draft=1),
        Placement((0, 1), (3, 1), draft=0),
        Placement((0, 1), (1, 3)),
        pytest.param(Placement((0, 2), (1, 1), draft=1), marks=three),
    ],
    ids=["a GPU of its own", "beside the first layers", "beside the last", "a third"],
)
def test_draft(target, placement, one, tmp_path):
    """A draft's logits, and tokens and logits of speculative decoding by chain and by tree."""
    alone = tiny.load(target, one)
    layers, hidden, vocab = len(alone.layout.layers), alone.config.hidden, alone.config.vocab
    taps = (0, layers - 1) if target == "qwen35" else (1, 2)
    folder = tiny_draft.write(tmp_path / "draft", hidden, vocab, layers, taps, laguna=target == "laguna")
    several = load_model(tiny.checkpoint(target), ops_on(target, placement))
    outputs = []
    for model in (alone, several):
        pair, ids, out = load_pair(folder, model), texts(target), []
        for kind in ("chain", "tree"):
            state = pair.new_state(96)
            logits = pair.forward(state, Step.chain(ids[:12], 0), slice(11, 12))
            state.commit(range(12))
            out.append(pair.ops.read(pair.propose(state, int(ids[12]))))
            text, how = ids[:12].tolist(), Speculation(kind, 5)
            tokens = run_alone(DecoderRun(pair, state, logits, Sampler(Sampling()), text, how))
            for token, row in (next(tokens) for _ in range(5)):
                out += [np.array([token]), pair.ops.read(row)]
        outputs.append(out)
    assert all(np.array_equal(a, b) for a, b in zip(*outputs, strict=True))


@pytest.mark.parametrize("name", ["qwen35", "glm"])
def test_multi_token_prediction(name, one):
    """A block on a GPU of its own: its logits after one token and after three, and tokens by chain."""
    assert_chains(name, tiny.FOLDER / f"mtp-{name}", (one, ops_on(name, Placement((0,), draft=1))))


@pytest.mark.parametrize("placement", [Placement((0,), draft=1), Placement((0, 1), (1, 2))])
def test_eagle(placement, one, tmp_path):
    """A draft on a GPU of its own, or whose layers to read and embedding lie on two."""
    folder = tiny_eagle.write(tmp_path / "draft", 32, 96, [0, 1, 2])
    assert_chains("llama", folder, (one, ops_on("llama", placement)))


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
@pytest.mark.parametrize("placement", [Placement((0,), draft=1), Placement((0, 1), (5, 3))])
def test_candidates_after_the_token_before(kind, placement, one):
    """Equal on two GPUs to those on one, and the tokens of chain and tree."""
    outputs, ids = [], texts("qwen35")
    for ops in (one, ops_on("qwen35", placement)):
        pair, out = load_pair(tiny.FOLDER / kind, load_model(tiny.checkpoint("qwen35"), ops)), []
        for mode in ("chain", "tree"):
            state = pair.new_state(96)
            logits = pair.forward(state, Step.chain(ids[:12], 0), slice(11, 12))
            state.commit(range(12))
            out += pair.drafted(state, int(ids[12]), 3, 3)
            run = DecoderRun(pair, state, logits, Sampler(Sampling()), ids[:12].tolist(), Speculation(mode, 5))
            out += [np.array([token]) for token, _ in itertools.islice(run_alone(run), 6)]
        outputs.append(out)
    assert all(np.array_equal(a, b) for a, b in zip(*outputs, strict=True))


def assert_chains(name, draft, several):
    """Assert that a draft's logits, and tokens and logits of its chains, are the same on each of `several`."""
    outputs, ids = [], tiny.golden(name)["ids"].astype(np.int32)
    for ops in several:
        pair, out = load_pair(draft, load_model(tiny.checkpoint(name), ops)), []
        state = pair.new_state(96)
        logits = pair.forward(state, Step.chain(ids[:12], 0), slice(11, 12))
        state.commit(range(12))
        out += [pair.ops.read(pair.propose(state, ids[12 : 12 + n].tolist())) for n in (1, 3)]
        tokens = run_alone(
            DecoderRun(pair, state, logits, Sampler(Sampling()), ids[:12].tolist(), Speculation("chain", 3))
        )
        for token, row in (next(tokens) for _ in range(8)):
            out += [np.array([token]), pair.ops.read(row)]
        outputs.append(out)
    assert all(np.array_equal(a, b) for a, b in zip(*outputs, strict=True))


@pytest.mark.parametrize("name", WIDE)
def test_real_widths(name, monkeypatch):
    """Models whose products finish the norm of their rows, and whose norms add up a mixture before they scale it."""
    narrow(name, monkeypatch)
    ids, logits = np.random.default_rng(1).integers(0, 512, 110).astype(np.int32), []
    for placement in (Placement(), Placement((1, 0), (1, 1))):
        ops = open_backend("cuda", synthetic_checkpoint(f"{name}:q4_k_m"), placement, random=True)
        model = synthetic(f"{name}:q4_k_m", ops)
        logits.append(tiny.run(model, model.new_state(160), ids, [100, 1, 1, 1, 7]))
        assert np.isfinite(logits[-1]).all()
    assert np.array_equal(*logits)


def test_every_op_is_forwarded():
    own = {name for name in vars(CudaOps) if hasattr(Ops, name) and not name.startswith("_")}
    classes = layer_split.LayerSplitOps.__mro__
    assert own <= {name for c in classes[: classes.index(Ops)] for name in vars(c)}


def test_draws_on_the_last_gpu(one):
    ids, drawn = texts("llama"), []
    for ops in (one, ops_on("llama", TWO)):
        model = load_model(tiny.checkpoint("llama"), ops)
        logits = model.forward(model.new_state(64), Step.chain(ids[:9], 0))
        drawn.append(ops.read(ops.sample(logits, Sampler(Sampling(temperature=0.9, top_k=20, seed=3)))))
    assert np.array_equal(*drawn)


def test_one_gpu_of_several(one):
    with cupy.cuda.Device(0):
        ops = ops_on("llama", Placement((1,)))
        assert type(ops) is CudaOps
        assert cupy.cuda.runtime.getDevice() == 1
        logits = tiny.logits_of(load_model(tiny.checkpoint("llama"), ops), texts("llama")[:9])
    assert np.array_equal(logits, tiny.logits_of(tiny.load("llama", one), texts("llama")[:9]))


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        (((0, COUNT),), f"GPU {COUNT} does not exist; this machine has GPUs 0 to {COUNT - 1}"),
        (((0,), (), COUNT), f"GPU {COUNT} does not exist"),
        (((0, 0),), "devices 0,0 name a GPU twice"),
        (((0, 1), (1,)), "split has 1 proportions for 2 devices; give one each"),
        (((0, 1), (1, 0)), "split is 1,0; proportions must be above 0"),
        (((), (1, 1)), "split needs devices"),
        (((), (), 1), "draft_device needs devices"),
    ],
)
def test_refused(placement, said):
    with pytest.raises(UsageError, match=said):
        ops_on("llama", Placement(*placement))


def test_more_gpus_than_layers():
    with pytest.raises(UsageError, match="the model has 2 layers, too few for 3 GPUs"):
        layer_split.shared_out([5, 5], [1, 1, 1])


def test_too_little_memory_names_the_gpu(monkeypatch):
    monkeypatch.setattr(layer_split, "free", lambda gpu: 10**9 if gpu.index == 0 else 10)
    with pytest.raises(BimetalError, match=r"GPU 1 \(.*\) has 0.0 GB free, and its 2 layers take 0.0 GB"):
        ops_on("qwen3", Placement((0, 1), (1, 2)))


@pytest.mark.parametrize(
    ("sizes", "proportions", "layers"),
    [
        ([1] * 8, [1, 1], [0] * 4 + [1] * 4),
        ([1] * 8, [1, 3], [0] * 2 + [1] * 6),
        ([10, 1, 1, 1, 1, 1, 1], [1, 1], [0] + [1] * 6),  # an embedding lies beside the first layer
        ([1, 1, 10], [1, 1, 1], [0, 1, 2]),  # none empty
        ([1] * 4, [1000, 1, 1], [0, 0, 1, 2]),
        ([1] * 4, [1, 1, 1000], [0, 1, 2, 2]),
    ],
)
def test_shared_out(sizes, proportions, layers):
    assert layer_split.shared_out(sizes, proportions) == layers


def test_through_the_api(tmp_path):
    """Text from several GPUs, in the thread that owns the model, and from the second GPU alone."""
    folder, replies = tiny_chat.write(tmp_path / "model"), []
    for how in ({}, {"devices": (0, 1), "split": (1, 1)}, {"devices": (1,)}):
        with generate.load(str(folder), backend="cuda", **how) as llm:
            replies.append(llm.generate("one two", max_tokens=6, logprobs=2))
            assert np.array_equal(llm.logits("one two")[-1].argmax(), replies[0].tokens[0])
    assert replies[0].tokens == replies[1].tokens == replies[2].tokens
    assert replies[0].logprobs == replies[1].logprobs == replies[2].logprobs
