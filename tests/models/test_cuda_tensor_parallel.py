"""Tiny models whose layers two GPUs share: logits equal on both to the bit, and those of one GPU within rounding."""

from dataclasses import replace

import numpy as np
import pool_drafts
import pytest
import ranks
import tiny
import tiny_chat
import tiny_draft
import tiny_eagle
from narrow import WIDE, narrow

import generate
from common.decode.alone import run_alone
from common.decode.run import DecoderRun
from common.decoders import Speculation
from common.errors import BimetalError, NotFiniteError, UsageError
from common.joined_step import JoinedStep
from common.models import load_model
from common.models.drafts import load_pair
from common.ops import Ops
from common.sampling import Sampler, Samplers, Sampling
from common.step import PAST, Step
from common.tensors import Tensor
from generate.backends import Placement, open_backend
from generate.prefixes import fingerprint
from generate.synthetic import synthetic, synthetic_checkpoint

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_backend import exchange, tensor_parallel, transports  # noqa: E402
from cuda_backend.nccl_exchange import NcclExchange  # noqa: E402
from cuda_backend.ops import CudaOps  # noqa: E402
from cuda_backend.per_rank import PerRank  # noqa: E402
from cuda_backend.tensor_parallel import TensorParallelOps  # noqa: E402

COUNT = cupy.cuda.runtime.getDeviceCount()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")]

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
# Partial sums are added in another order than one product adds them, then rows are quantized for the next product: as
# two GPUs of different stripes. Gated DeltaNet's norms of small heads amplify it.
TWO = Placement((0, 1), tensor_parallel=2)
LOGIT, KL = 0.02, 1e-5


def checkpoint(name):
    return ranks.wide(name) if name == "glm" else tiny.checkpoint(name)  # whose own heads two ranks do not divide


def two_ranks(name):
    return load_model(checkpoint(name), open_backend("cuda", checkpoint(name), TWO))


@pytest.fixture(scope="module", params=FAMILIES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name):
    return two_ranks(name)


def read(model, logits):
    """Logits on the host; those of all ranks are equal to the bit."""
    out = model.ops.read(logits)
    if isinstance(model.ops, TensorParallelOps):
        for gpu, part in zip(model.ops.gpus, logits.parts, strict=True):
            with gpu.device:
                assert np.array_equal(gpu.ops.read(part), out), f"GPU {gpu.index}"
    return out


def story(model, ids):
    """The logits of a prompt, of single rows, of trees of which a branch is kept, and after a restored snapshot."""
    state, out = model.new_state(160), []

    def step(step, path):
        out.append(read(model, model.forward(state, step)))
        state.commit(path)

    def chain(start, n):
        step(Step.chain(ids[start : start + n], state.length), range(n))

    chain(0, 5)
    counts = [model.ops.launches]
    for at in range(5, 8):  # as it comes, captured, replayed
        chain(at, 1)
        counts.append(model.ops.launches)
    assert len(set(np.diff(counts))) == 1, counts
    for _ in range(2):
        step(Step.tree(ids[70:78], TREE, state.length), [0, 1, 3])
    saved = state.snapshot()
    chain(80, 3)
    state.restore(saved)
    chain(80, 3)
    assert np.array_equal(*out[-2:])
    arrays, length = state.save(), state.length
    chain(40, 2)
    assert not state.saving[0]
    other = model.new_state(160)
    other.load(arrays, length)
    assert np.array_equal(read(model, model.forward(other, Step.chain(ids[40:42], length))), out[-1])
    return np.concatenate(out)


def test_logits(name, model):
    ids = tiny.golden(name)["ids"].astype(np.int32)
    found = tiny.errors(story(model, ids), story(load_model(checkpoint(name), CudaOps()), ids))
    assert found.logit < LOGIT
    assert found.top1 == 1
    assert found.kl < KL


def test_rows_of_sequences_are_alone(name, model):
    """Rows of several sequences in one step, a chain and a tree, have the bits of each sequence by itself."""
    ids, lengths = tiny.golden(name)["ids"].astype(np.int32), (3, 20)
    pool = model.new_pool(3, 64)
    pooled, alone = [pool.new_state() for _ in lengths], [model.new_state(64) for _ in lengths]
    for states in (pooled, alone):
        for state, n in zip(states, lengths, strict=True):
            model.forward(state, Step.chain(ids[:n], 0))
            state.commit(range(n))
    for _ in range(3):
        steps = [Step.chain(ids[50:52], pooled[0].length), Step.tree(ids[70:78], TREE, pooled[1].length)]
        joined = JoinedStep.of(steps, ids[np.r_[50:52, 70:78]], [state.slot for state in pooled])
        both = read(model, model.forward(pool, joined))
        for rows, step, state in zip((both[:2], both[2:]), steps, alone, strict=True):
            assert np.array_equal(rows, read(model, model.forward(state, step)))
        for states in (pooled, alone):
            states[0].commit([0, 1])
            states[1].commit([0, 1, 3])
    for state, other in zip(pooled, alone, strict=True):
        saved, expected = state.save(), other.save()
        assert all(np.array_equal(saved[key], expected[key]) for key in expected)


def test_greedy_tokens(name, model):
    """Tokens chosen from the parts of each rank are those of the whole logits, and a next step takes them."""
    ids, pool = tiny.golden(name)["ids"].astype(np.int32), model.new_pool(3, 64)
    states = [pool.new_state() for _ in range(2)]
    for state, n in zip(states, (3, 20), strict=True):
        model.forward(state, Step.chain(ids[:n], 0))
        state.commit(range(n))
    slots = [state.slot for state in states]
    for rows in (1, 3, 1, 1, 3, 3):  # as it comes, captured, replayed
        parts = [Step.chain(ids[40 : 40 + rows], state.length) for state in states]
        step = JoinedStep.of(parts, np.tile(ids[40 : 40 + rows], 2), slots)
        want = read(model, model.forward(pool, step)).argmax(-1)
        tokens = model.greedy_tokens(pool, step)
        assert read(model, tokens).tolist() == want.tolist()
        if rows == 1:
            pool.commit_rows(states, [1, 1])
            positions = np.array([state.length for state in states], np.int32)
            given = read(model, model.greedy_tokens(pool, JoinedStep.of_single_rows(want, positions, slots)))
            ahead = model.greedy_tokens(pool, JoinedStep.of_single_rows(tokens, positions, slots))
            assert read(model, ahead).tolist() == given.tolist()
            assert read(model, tokens).tolist() == want.tolist()


@pytest.mark.parametrize("columns", [40, 41])
def test_greedy_tokens_of_hard_logits(columns):
    """Of logits with NaN, infinities and ties; of each rank's part, or where it cannot be divided, of all columns."""
    model, T = two_ranks("llama"), 3
    ops, whole = model.ops, np.random.default_rng(2).normal(size=(T, columns)).astype(np.float32)
    whole[0, :20], whole[0, 24] = -np.inf, -0.0
    whole[1, 5] = np.nan
    whole[2, [7, 23]] = 50  # a tie, which the lower token wins
    parts, tables = np.split(whole, 2, axis=1) if columns % 8 == 0 else [whole, whole], []
    for gpu, part in zip(ops.gpus, map(np.ascontiguousarray, parts), strict=True):
        with gpu.device:
            tables.append(gpu.ops.weight(Tensor("x", "F32", part.shape, part.view(np.uint8))))

    def fn(state, step):
        return ops.all_gather(ops.embed(PerRank(ops.gpus, tables), step.tokens), columns)

    state, step = model.new_state(64), Step.chain(np.arange(T, dtype=np.int32), 0)
    for _ in range(3):  # as it comes, captured, replayed
        tokens = ops.run_greedy(fn, state, step)
        assert ops.read(tokens[:1]).tolist() == [whole[0].argmax()]
        assert ops.read(tokens[2:]).tolist() == [7]
        with pytest.raises(NotFiniteError):
            ops.read(tokens)


def test_prefill(name, model):
    """A long step of rows, whose sums take more than one exchange."""
    ids = np.resize(tiny.golden(name)["ids"], 150).astype(np.int32)
    whole = model.ops.exchange.numbers
    outputs = []
    for numbers in (whole, 2000):
        model.ops.exchange.numbers = numbers
        model.ops.exchange.renew()  # whose buffers are of other parts now
        outputs.append(read(model, model.forward(model.new_state(160), Step.chain(ids, 0))))
    model.ops.exchange.numbers = whole
    model.ops.exchange.renew()
    assert np.array_equal(*outputs)
    for rows in (slice(0, 0), slice(149, 150)):  # of a piece of a prompt, and of its end
        few = read(model, model.forward(model.new_state(160), Step.chain(ids, 0), rows))
        assert few.shape == (rows.stop - rows.start, outputs[0].shape[1])
    one = load_model(checkpoint(name), CudaOps())
    found = tiny.errors(outputs[0], read(one, one.forward(one.new_state(160), Step.chain(ids, 0))))
    assert found.top1 > 0.98
    assert found.kl < 1e-3


def test_draws():
    """Every rank draws the same tokens with the same numbers, and a next step takes them where they lie."""
    model, ids = two_ranks("llama"), tiny.golden("llama")["ids"].astype(np.int32)
    state, ops = model.new_state(64), model.ops
    logits = model.forward(state, Step.chain(ids[:9], 0))
    one, greedy = Sampling(temperature=0.9, top_k=20, seed=3), Sampling()
    each = [Samplers([(Sampler(one), 4), (Sampler(greedy), 2), (Sampler(one), 3)]) for _ in range(2)]
    assert ops.read(ops.sample(logits, each[0])).tolist() == each[1].pick(ops.read(logits)).tolist()
    for sampling in (one, greedy):
        tokens, sampler = ops.sample(logits, Sampler(sampling)), Sampler(sampling)
        for gpu, part in zip(ops.gpus, tokens.parts, strict=True):
            with gpu.device:
                assert np.array_equal(gpu.ops.read(part), ops.read(tokens))
        if not sampler.is_argmax:
            assert np.array_equal(ops.read(tokens), [sampler.pick(row) for row in ops.read(logits)])
    state.commit(range(9))
    given = ops.read(tokens[8:9])
    ahead = read(model, model.forward(state, Step.chain(tokens[8:9], 9)))
    assert np.array_equal(ahead, read(model, model.forward(state, Step.chain(given, 9))))
    assert ops.read(ops.top_k(logits, 3)[0])[8, 0] == given[0]


@pytest.mark.parametrize("target", ["qwen35", "laguna"])
def test_drafts(target, tmp_path):
    """A draft runs on every GPU, and greedy speculative decoding gives the tokens of plain decoding."""
    model, ids = two_ranks(target), tiny.golden(target)["ids"].astype(np.int32)
    layers, hidden, vocab = len(model.layout.layers), model.config.hidden, model.config.vocab
    taps = (0, layers - 1) if target == "qwen35" else (1, 2)
    folder = tiny_draft.write(tmp_path / "draft", hidden, vocab, layers, taps, laguna=target == "laguna")
    eagle = tiny_eagle.write(tmp_path / "eagle", hidden, vocab, [0, 1, layers - 1])
    others = "mtp-qwen35", "dspark", "dflash2"
    drafts = [folder, eagle, *([tiny.FOLDER / name for name in others] if target == "qwen35" else [])]

    def tokens(model, how):
        state = model.new_state(96)
        logits = model.forward(state, Step.chain(ids[:12], 0), slice(11, 12))
        state.commit(range(12))
        run = run_alone(DecoderRun(model, state, logits, Sampler(Sampling()), ids[:12].tolist(), how))
        return [token for token, _ in (next(run) for _ in range(8))]

    plain = tokens(model, Speculation("off"))
    for draft in drafts:
        pair = load_pair(draft, model)
        for kind in ("chain", "tree") if draft is folder else ("chain",):
            assert tokens(pair, Speculation(kind, 3)) == plain
        if pair.shares_passes:
            pool_drafts.assert_alike(pair, ids)


def test_a_lost_gpu_ends_in_a_sentence(monkeypatch):
    model, ids = two_ranks("llama"), tiny.golden("llama")["ids"].astype(np.int32)
    state, step = model.new_state(64), Step.chain(ids[:3], 0)
    expected = read(model, model.forward(state, step))
    monkeypatch.setattr(model.ops.exchange, "seconds", 0.2)
    kernel = exchange.kernel

    def of_the_first(stem, name, defines):
        launch = kernel(stem, name, defines)
        return launch if cupy.cuda.runtime.getDevice() == 0 else lambda *_, **__: None

    with monkeypatch.context() as patch:
        patch.setattr(exchange, "kernel", of_the_first)
        logits = model.forward(state, Step.chain(ids[:1], 0))  # of its own size, launched for the first time
        with pytest.raises(BimetalError, match=r"GPU 0 waited 0\.2 s for another one of GPUs 0,1"):
            model.ops.read(logits)
    assert np.array_equal(read(model, model.forward(state, step)), expected)


def test_a_step_that_fails_is_forgotten():
    """What one GPU has launched of a step before an error does not count as its part of the next."""
    model, ids = two_ranks("llama"), tiny.golden("llama")["ids"].astype(np.int32)
    state, step = model.new_state(64), Step.chain(ids[:3], 0)
    expected = read(model, model.forward(state, step))

    def fails(state, step):
        x = model.ops.all_reduce(model.ops.embed(model.weights.embed, step.tokens))
        raise BimetalError(f"no more of {x.shape}")

    with pytest.raises(BimetalError, match="no more of"):
        model.ops.run(fails, state, step)
    assert np.array_equal(read(model, model.forward(state, step)), expected)


@pytest.mark.parametrize("name", WIDE)
def test_real_widths(name, monkeypatch):
    """Matrices of random blocks, as `bench` measures them: steps by products, and a prompt."""
    narrow(name, monkeypatch)
    shape = (
        f"{name}:{'q4_k_m' if name in ('wedlm-8b', 'qwen2.5-7b') else 'q8_0'}"  # whose blocks two ranks do not divide
    )
    model = synthetic(shape, open_backend("cuda", synthetic_checkpoint(shape), TWO, random=True))
    state, ids = model.new_state(160), np.random.default_rng(1).integers(0, 512, 146).astype(np.int32)
    for n in (140, 1, 4):  # as they come, captured, where norms take the sums over GPUs, and replayed
        step, outs, counts = Step.chain(ids[:n], state.length), [], [model.ops.launches]
        for _ in range(1 if n == 140 else 3):
            outs.append(read(model, model.forward(state, step)))
            counts.append(model.ops.launches)
        assert np.isfinite(outs[0]).all()
        assert all(np.array_equal(out, outs[0]) for out in outs[1:])
        launches = np.diff(counts)
        saved = (
            0 if name == "gpt-oss-20b" else 2 * len(model.weights.layers)
        )  # on two GPUs; rows of 128 k columns alone
        assert n > 1 or launches[1] == launches[2] <= launches[0] - saved
        state.commit(range(n))


def test_every_op_is_forwarded():
    own = {name for name in vars(CudaOps) if hasattr(Ops, name) and not name.startswith("_")}
    own -= {"loading_layer", "expert_weight"}  # of the ranks' own loading
    classes = TensorParallelOps.__mro__
    assert own <= {name for c in classes[: classes.index(Ops)] for name in vars(c)}


def test_gpus_that_do_not_reach_each_other(monkeypatch):
    monkeypatch.setattr(cupy.cuda.runtime, "deviceCanAccessPeer", lambda a, b: False)
    monkeypatch.setattr(transports, "find_nccl", lambda: None)
    with pytest.raises(BimetalError, match="GPUs 0 and 1 cannot reach each other's memory, which tensor_parallel"):
        two_ranks("llama")


def test_logits_by_nccl(name, model, monkeypatch):
    """NCCL, which is for GPUs that do not reach each other's memory, brings the bits that peers' memory brings."""
    if transports.find_nccl() is None:
        pytest.skip("NCCL is not installed")
    monkeypatch.setattr(cupy.cuda.runtime, "deviceCanAccessPeer", lambda a, b: False)
    other, ids = two_ranks(name), tiny.golden(name)["ids"].astype(np.int32)
    assert isinstance(other.ops.exchange, NcclExchange)
    assert np.array_equal(story(other, ids), story(model, ids))


def test_a_tied_head_is_divided_by_rows():
    """Each GPU multiplies half of the embedding's rows, has the whole embedding for look-ups, and has whole logits."""
    model = two_ranks("llama")
    vocab = model.config.vocab
    assert [part.rows for part in model.weights.head.parts] == [vocab // 2] * 2
    assert [part.rows for part in model.weights.embed.parts] == [vocab] * 2
    assert model.forward(model.new_state(16), Step.chain(np.arange(3, dtype=np.int32), 0)).shape == (3, vocab)


def test_gpus_of_two_kinds(monkeypatch):
    """What every rank computes whole, such as routers, must have the same bits on all."""
    card = tensor_parallel.card_of(0)
    monkeypatch.setattr(tensor_parallel, "card_of", lambda index: replace(card, sms=card.sms - index))
    with pytest.raises(BimetalError, match=f"GPU 1 .* with {card.sms - 1}; tensor_parallel needs GPUs of one kind"):
        two_ranks("llama")


def test_too_little_memory_names_the_gpu(monkeypatch):
    monkeypatch.setattr(tensor_parallel, "free", lambda gpu: 10**9 if gpu.index == 0 else 10)
    with pytest.raises(BimetalError, match=r"GPU 1 \(.*\) has 0.0 GB free, and its part of every layer takes 0.0 GB"):
        two_ranks("llama")


@pytest.mark.parametrize(
    ("placement", "refused"),
    [
        (((0, COUNT),), f"GPU {COUNT} does not exist; this machine has GPUs 0 to {COUNT - 1}"),
        (((1, 1),), "devices 1,1 name a GPU twice"),
        ((tuple(range(9)),), "GPU .* does not exist"),
    ],
)
def test_refused(placement, refused):
    with pytest.raises(UsageError, match=refused):
        open_backend("cuda", checkpoint("llama"), Placement(*placement, tensor_parallel=len(placement[0])))


def test_heads_that_ranks_do_not_divide():
    glm = tiny.checkpoint("glm")
    with pytest.raises(BimetalError, match="heads cannot be divided among 2 ranks"):
        open_backend("cuda", glm, TWO)


def test_each_holds_its_part():
    """Half of each divided weight and of the state lies on each GPU, as predictions of one rank have it."""
    model, one = two_ranks("qwen3"), load_model(checkpoint("qwen3"), CudaOps())
    for held, alone in (
        (model.weights.layers[0].qkv, one.weights.layers[0].qkv),
        (model.weights.head, one.weights.head),
    ):
        for gpu, part in zip(model.ops.gpus, held.parts, strict=True):
            assert gpu.ops.weight_bytes(part) == one.ops.weight_bytes(alone) / 2
    state, spec = model.new_state(64), model.state_spec
    assert [part.nbytes for part in state.shares.values()] == [model.ops.held_state_bytes(spec, 64, 8)] * 2
    assert state.nbytes == one.new_state(64).nbytes
    assert [own for _, own in model.ops.free_by_device(len(spec))] == [range(len(spec))] * 2


def test_saved_prefixes_are_of_as_many_ranks():
    models = two_ranks("llama"), load_model(checkpoint("llama"), CudaOps())
    names = {fingerprint(model, [checkpoint("llama")], []) for model in models}
    assert len(names) == 2


def test_through_the_api(tmp_path):
    """Replies side by side, with a cache that states were saved in by another number of GPUs."""
    folder, replies = tiny_chat.write(tmp_path / "model"), []
    for how in ({}, {"devices": (0, 1), "tensor_parallel": 2}):
        with generate.load(str(folder), backend="cuda", cache_dir=tmp_path / "prefixes", **how) as llm:
            replies.append(llm.generate(["one two", "three"], max_tokens=5))
    assert [reply.tokens for reply in replies[0]] == [reply.tokens for reply in replies[1]]
