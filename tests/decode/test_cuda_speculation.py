"""Speculative decoding on the GPU: the draft's logits, and text that equals plain decoding to the last token."""

import gc
import itertools

import draft_table
import numpy as np
import pool_drafts
import pytest
import tiny
import tiny_draft
import tiny_eagle
from test_plain import prefilled

from common.coupled import CANDIDATES, Coupling
from common.decode.alone import run_alone
from common.decode.run import DecoderRun, DecodeStats
from common.decoders import DECODERS, Speculation
from common.errors import BimetalError, NotFiniteError
from common.fit import predict_stacks
from common.hot_experts import HotExperts, hot_sizes
from common.kv_cache import CacheOptions
from common.models import load_model
from common.models.drafts import load_pair
from common.reference import NumpyOps
from common.sampling import Sampler, Sampling, top_k
from common.step import Step
from common.weights import dense

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_backend.ops import CudaOps  # noqa: E402

pytestmark = pytest.mark.gpu

FOLDER = tiny.FOLDER / "dflash"
GOLDEN = np.load(FOLDER / "golden.npz")
TEXT = tiny.golden("qwen35")["ids"].astype(np.int32)


@pytest.fixture(scope="module")
def pair():
    return load_pair(FOLDER, load_model(tiny.checkpoint("qwen35"), CudaOps()))


def test_logits_of_the_published_library(pair):
    """With float16 keys and values; twice each, so that captured graphs are compared too."""
    state, proposed = pair.new_state(64), []
    for anchor in GOLDEN["anchors"]:
        while state.length < anchor:
            pair.forward(state, Step.chain(TEXT[state.length : state.length + 1], state.length))
            state.commit([0])
        proposed.append(pair.ops.read(pair.propose(state, int(TEXT[anchor]))))
        assert np.array_equal(proposed[-1], pair.ops.read(pair.propose(state, int(TEXT[anchor]))))
    error = np.abs(np.stack(proposed) - GOLDEN["logits"])
    print("largest error", error.max(), "of logits up to", np.abs(GOLDEN["logits"]).max())
    assert error.max() < 0.05


def test_a_prompt_read_at_once_is_the_drafts_context(pair):
    """Compare with NumPy; prefill multiplies in bfloat16, which moves a tiny model's logits."""
    anchor, proposed = 98, []
    for each in (pair, load_pair(FOLDER, load_model(tiny.checkpoint("qwen35"), NumpyOps()))):
        state, _ = prefilled(each, TEXT[:anchor].tolist())
        proposed.append(each.ops.read(each.propose(state, int(TEXT[anchor]))))
    assert np.abs(proposed[0] - proposed[1]).max() < 0.8


def test_memory_of_a_state(pair):
    """The draft's memory is freed with the state."""

    def used() -> int:
        state, logits = prefilled(pair, TEXT[:12].tolist())
        tokens = run_alone(
            DecoderRun(pair, state, logits, Sampler(Sampling()), TEXT[:12].tolist(), Speculation("tree", 7))
        )
        for _ in range(12):
            next(tokens)
        tokens.close()
        return cupy.get_default_memory_pool().used_bytes()

    gc.disable()
    try:
        used()
        assert used() == used()
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [row.name for row in DECODERS.values() if row.family == "speculative"])
def test_greedy_equals_plain(pair, kind):
    assert_plain(pair, TEXT[:20].tolist(), 40, Speculation(kind, 12))


@pytest.mark.parametrize("draft", ["dflash", "mtp-qwen35"])
def test_sequences_of_a_pool_share_passes(draft):
    pool_drafts.assert_alike(load_pair(tiny.FOLDER / draft, load_model(tiny.checkpoint("qwen35"), CudaOps())), TEXT)


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe", "glm", "glm4moe"])
def test_multi_token_prediction(name):
    """Logits of the block against another implementation, with float16 keys; text equal to plain decoding."""
    block = load_pair(tiny.FOLDER / f"mtp-{name}", load_model(tiny.checkpoint(name), CudaOps()))
    golden, ids = np.load(tiny.FOLDER / f"mtp-{name}" / "golden.npz"), tiny.golden(name)["ids"].astype(np.int32)
    state = block.new_state(64)
    for anchor, expected in zip(golden["anchors"], golden["logits"], strict=True):
        while state.length < anchor:
            block.forward(state, Step.chain(ids[state.length : state.length + 1], state.length))
            state.commit([0])
        for n, row in enumerate(expected, 1):
            got = [block.ops.read(block.propose(state, ids[anchor : anchor + n].tolist()))[0] for _ in range(3)]
            assert np.abs(got[0] - row).max() < 0.05
            assert all(np.array_equal(got[0], again) for again in got)  # as captured, too
    accepted = assert_plain(block, ids[:20].tolist(), 30, Speculation("chain", 3))
    assert set(accepted.budgets) == {3}


@pytest.mark.parametrize("name", ["dspark", "dflash2"])
def test_candidates_after_the_token_before(name):
    """Against NumPy's, with float16 keys; text equal to plain decoding, as chain and as tree."""
    pairs = [
        load_pair(tiny.FOLDER / name, load_model(tiny.checkpoint("qwen35"), ops)) for ops in (CudaOps(), NumpyOps())
    ]
    for anchor in (1, 9, 20):
        answers = []
        for each in pairs:
            state = each.new_state(64)
            for token in TEXT[:anchor]:
                each.forward(state, Step.chain(np.array([token]), state.length))
                state.commit([0])
            answers.append([each.drafted(state, int(TEXT[anchor]), 5, 4) for _ in range(3)])
        for again in answers[0][1:]:  # as captured, too
            assert all(np.array_equal(a, b) for a, b in zip(answers[0][0], again, strict=True))
        (ids, logp, after), (want, chances, rows) = (each[0] for each in answers)
        assert np.abs(logp - chances).max() < 0.1
        assert (ids == want).mean() > 0.8  # but for near-ties
        assert ids.shape == after.shape == rows.shape
    assert_plain(pairs[0], TEXT[:20].tolist(), 12, Speculation("chain", 4))
    assert_plain(pairs[0], TEXT[:20].tolist(), 12, Speculation("tree", 12))


FAMILIES = ["llama", "qwen3", "qwen3moe", "qwen35moe", "laguna", "laguna-m1", "glm", "glm4moe"]
FAMILIES += ["phi3", "phi4mini", "gptoss", "smollm3", "granite", "granitemoe", "olmo2", "olmo3", "deepseek2"]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", ["DFlash2", "DSpark"])
def test_text_of_every_family(kind, name):
    assert draft_table.works(draft_table.KINDS[kind], name, CudaOps())


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen35", "qwen35moe", "qwen3next", "gemma3", "laguna", "glm"])
def test_eagle(name, tmp_path):
    """Logits of the draft against NumPy's, with float16 keys, as captured too; text equal to plain decoding."""
    folder, flags = tmp_path / "draft", {"norm_before_residual": True, "fc_norm": True}
    if name == "qwen3":
        tiny_eagle.write_speculators(folder, 48, 96, 32, [0, 1, 2], **flags)
    else:
        tiny_eagle.write(folder, 32, 96, [0, 1, 2])
    pairs = [load_pair(folder, load_model(tiny.checkpoint(name), ops)) for ops in (NumpyOps(), CudaOps())]
    ids, states = tiny.golden(name)["ids"].astype(np.int32), [pair.new_state(64) for pair in pairs]
    for pair, state in zip(pairs, states, strict=True):
        for end in (9, 10, 11):
            pair.forward(state, Step.chain(ids[state.length : end], state.length), slice(-1, None))
            state.commit(range(end - state.length))
    for n in (1, 2, 3):
        expected, *got = (
            pair.ops.read(pair.propose(state, ids[11 : 11 + n].tolist()))[0]
            for pair, state in [(pairs[0], states[0]), *[(pairs[1], states[1])] * 3]
        )
        assert np.abs(got[0] - expected).max() < 0.05
        assert all(np.array_equal(got[0], again) for again in got)
    accepted = assert_plain(pairs[1], ids[:20].tolist(), 30, Speculation("chain", 3))
    assert set(accepted.budgets) == {3}


@pytest.mark.parametrize("formats", [("q8_0", "q8_0"), ("q8_0", "lm4")], ids="-".join)
def test_compressed_caches_of_a_draft(formats, tmp_path):
    """Logits against NumPy's, a block after a step and a captured one; text equal to plain decoding."""
    rows, pairs = [], []
    for ops in (CudaOps(), NumpyOps()):
        target = load_model(tiny.checkpoint("qwen35"), ops)
        pairs.append(tiny_draft.packed_pair(tmp_path / ops.name, target, CacheOptions(*formats)))
        state, _ = prefilled(pairs[-1], TEXT[:20].tolist(), 64)
        rows.append([ops.read(pairs[-1].propose(state, 5)) for _ in range(3)])
    assert all(np.array_equal(rows[0][0], again) for again in rows[0])
    assert np.abs(rows[0][0] - rows[1][0]).mean() < 0.1
    for kind in ("chain", "tree"):
        assert_plain(pairs[0], TEXT[:20].tolist(), 12, Speculation(kind, 7))


@pytest.mark.parametrize("budget", [128, 135])
def test_the_largest_trees(pair, budget):
    accepted = assert_plain(pair, TEXT[:20].tolist(), 20, Speculation("tree", budget, 40))
    assert accepted.rows == accepted.steps * (budget + 1)


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.02}, {"presence_penalty": 0.3}])
def test_sampled_text(pair, sampling):
    """Text sampled on the device, one row ahead and as trees, equals text sampled on the host from the same logits."""
    asked, prompt = Sampling(temperature=0.9, seed=6, **sampling), TEXT[:20].tolist()
    assert_plain(pair, prompt, 30, Speculation("lookup+tree", 12), asked)
    state, logits = prefilled(pair, prompt)
    tokens, sampler = run_alone(DecoderRun(pair, state, logits, Sampler(asked))), Sampler(asked)
    for token, row in itertools.islice(tokens, 30):
        assert token == sampler.pick(pair.ops.read(row)[0])
        sampler.accept(token)


def test_sampled_drafts_are_ranked_as_on_the_host(pair):
    """From the device's best candidates: the tokens that the host ranks first from the same logits."""
    state, _ = prefilled(pair, TEXT[:20].tolist())
    coupling = Coupling(Sampling(temperature=1.0, top_p=0.95), np.random.default_rng(2).random(4))
    for _ in range(2):
        ids, chances = pair.drafted(state, 7, 5, 4, coupling)
        rows = pair.ops.read(pair.propose(state, 7))[:4]
        expected = coupling.ranked(*top_k(rows, CANDIDATES), 5)
        assert np.array_equal(ids, expected[0])
        assert np.abs(chances - expected[1]).max() < 1e-3


@pytest.mark.parametrize("kind", ["chain", "lookup+tree"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3moe", "qwen35moe", "laguna", "glm"])
def test_every_family_is_a_target(name, kind, tmp_path):
    """With a random draft, whose features come from the first and the last layer."""
    target = load_model(tiny.checkpoint(name), CudaOps())
    c, layers = target.config, len(target.layout.layers)
    folder = tiny_draft.write(tmp_path / "draft", c.hidden, c.vocab, layers, [0, layers - 1], laguna=name == "laguna")
    prompt = tiny.golden(name)["ids"][:12].tolist()
    assert_plain(load_pair(folder, target), prompt, 24, Speculation(kind, 40, top_k=32))


@pytest.mark.parametrize("name", ["qwen3moe", "qwen35moe", "laguna", "glm", "glm4moe"])
def test_trees_with_cold_experts(name, tmp_path):
    """With a random draft, and some of the target's experts in slots: the text of the resident target."""
    checkpoint, whole = tiny.checkpoint(name), load_model(tiny.checkpoint(name), CudaOps())
    c, layers = whole.config, len(whole.layout.layers)
    sizes = hot_sizes(predict_stacks(checkpoint, whole.layout, whole.ops), c.experts.count)
    ops = CudaOps(HotExperts((sizes.min_budget + sizes.max_budget) // 2, c.experts.top_k))
    folder = tiny_draft.write(tmp_path / "draft", c.hidden, c.vocab, layers, [0, layers - 1], laguna=name == "laguna")
    prompt, texts = tiny.golden(name)["ids"][:12].tolist(), []
    for model, how in ((whole, Speculation("off")), (load_model(checkpoint, ops), Speculation("lookup+tree", 20))):
        pair = load_pair(folder, model)
        state, logits = prefilled(pair, prompt)
        tokens = run_alone(DecoderRun(pair, state, logits, Sampler(Sampling()), prompt, how, None, DecodeStats()))
        texts.append([next(tokens)[0] for _ in range(24)])
        tokens.close()
    assert texts[0] == texts[1]
    assert ops.context.experts.stats().misses > 0


def assert_plain(pair, prompt, new, speculation, sampling=None):
    sampling = sampling or Sampling()
    state, logits = prefilled(pair, prompt)
    tokens = run_alone(DecoderRun(pair, state, logits, Sampler(sampling)))
    expected = [next(tokens)[0] for _ in range(new)]
    state, logits = prefilled(pair, prompt)
    accepted = DecodeStats()
    tokens = run_alone(DecoderRun(pair, state, logits, Sampler(sampling), prompt, speculation, None, accepted))
    assert [next(tokens)[0] for _ in range(new)] == expected
    tokens.close()
    assert state.length == len(prompt) + new - 1
    return accepted


def test_a_block_is_refused_by_recurrent_layers_alone(pair):
    state = pair.new_state(64)
    pair.propose(state, 3)
    with pytest.raises(BimetalError, match="no order for a recurrent layer"):
        pair.forward(state, Step.block(TEXT[:3], 0))


def test_top_k_ties_infinities_and_nan(pair):
    rows = np.random.default_rng(0).integers(0, 40, (5, 3000)).astype(np.float32)  # many ties
    rows[1] = -np.inf
    rows[1, [5, 2999, 70]] = 2, 3, 2
    ops = pair.ops
    logits = ops.embed(ops.weight(dense("rows", rows)), np.arange(5, dtype=np.int32))
    for k in (1, 3, 17, 64):
        for got, want in zip(ops.top_k(logits, k), top_k(rows, k), strict=True):
            got = ops.read(got)
            assert np.array_equal(np.isfinite(got), np.isfinite(want))
            finite = np.isfinite(want)
            assert np.abs(got[finite] - want[finite]).max() < 1e-5
    rows[3, 123] = np.nan
    logits = ops.embed(ops.weight(dense("rows", rows)), np.arange(5, dtype=np.int32))
    with pytest.raises(NotFiniteError):
        ops.read(ops.top_k(logits, 4)[0])
