"""The workspace that `fit` predicts for a prompt on a GPU against what launchers take; nothing is launched."""

import itertools
import sys
from dataclasses import replace

import numpy as np
import pytest

import generate
from common.demo import demo_path
from common.errors import BimetalError
from common.fit import LEAST_CONTEXT, layer_size, predict_need
from common.kv_cache import CacheOptions
from common.step import Step
from generate.__main__ import main
from generate.synthetic import METADATA, synthetic

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_backend import gemm, limit_memory, memory, occupancy  # noqa: E402
from cuda_backend import ops as cuda_ops  # noqa: E402
from cuda_backend.ops import CudaOps  # noqa: E402
from cuda_backend.products import EXPAND  # noqa: E402
from cuda_backend.random_weights import RandomOps  # noqa: E402
from cuda_backend.sizes import snapshot_bytes, work_bytes  # noqa: E402
from cuda_backend.weights import UPLOAD, Weight  # noqa: E402

pytestmark = pytest.mark.gpu

# before 9.0 a recurrent layer's mixer writes what its norm reads: layers take memory in another order
CARDS = [next(p.card for p in occupancy.CARDS if p.card.name == name) for name in ("RTX 4090", "H200")]


class Bytes:
    """Memory that is only counted."""

    end = 1 << 40

    def __init__(self, nbytes: int, stream: object = None):
        self.nbytes, self.address = nbytes, Bytes.end
        Bytes.end += -(-nbytes // 512) * 512


@pytest.fixture(params=CARDS, ids=lambda card: card.name)
def ops(monkeypatch, request):
    def nothing(*_, **__):
        return None

    for module in [module for name, module in sys.modules.items() if name.startswith("cuda_backend.")]:
        for name, value in (("Memory", Bytes), ("kernel", lambda *_, **__: nothing)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    for name in ("gemmEx", "gemmStridedBatchedEx"):
        monkeypatch.setattr(gemm.cublas, name, nothing)
    for name in ("memcpyAsync", "memsetAsync"):
        monkeypatch.setattr(cupy.cuda.runtime, name, nothing)
    monkeypatch.setattr(RandomOps, "_random_rows", lambda *_: 1 << 30)
    monkeypatch.setattr(cuda_ops, "available", lambda: request.param)
    ops = RandomOps()
    monkeypatch.setattr(ops, "check_weights", nothing)
    return ops


@pytest.mark.parametrize(("rows", "cache"), [(1024, ""), (8192, ""), (8192, "q8_0"), (1024, "lm4")])
@pytest.mark.parametrize("name", METADATA)
def test_work(name, rows, cache, ops):
    model = synthetic(f"{name}:q4_k_m", ops)
    model = replace(model, cache=CacheOptions(cache, cache)) if cache else model
    model.forward(model.new_state(rows), Step.chain(np.zeros(rows, np.int32), 0), slice(rows - 1, rows))
    predicted, taken = work_bytes(layer_sizes(model), rows, rows), ops.context.arena.nbytes + UPLOAD
    print(f"{name}, {rows} rows, {ops.context.card.name}: {predicted / 1e9:.2f} GB, taken {taken / 1e9:.2f}")
    # layers of small models have smaller matrices to expand than the head, which one row does not expand
    assert taken <= predicted <= max(1.4 * taken, taken + 4 * EXPAND)


@pytest.mark.parametrize("cache", ["", "lm4"])
def test_a_past_of_latents_is_expanded_in_stretches(cache, ops):
    """The end of 64K tokens takes no more than the end of 8K, but for what rows carry from stretch to stretch."""
    model = synthetic("glm-4.7-flash:q4_k_m", ops)
    model, rows, taken = replace(model, cache=CacheOptions(cache, cache)) if cache else model, 1024, []
    for tokens in (8192, 65536):
        state = model.new_state(tokens)
        state.length = tokens - rows
        model.forward(state, Step.chain(np.zeros(rows, np.int32), state.length), slice(rows - 1, rows))
        taken.append(ops.context.arena.nbytes + UPLOAD)
        assert taken[-1] <= work_bytes(layer_sizes(model), tokens, rows) <= 1.4 * taken[-1]
    assert taken[1] <= 1.1 * taken[0]


def test_256k_tokens_in_24_gb(ops):
    """Qwen3.6-27B: weights, a cache in tq3_0 and steps at the end of 256K tokens, as `fit` predicts them."""
    model = synthetic("qwen3.6-27b:q4_k_m", ops)
    model, tokens = replace(model, cache=CacheOptions("tq3_0", "tq3_0")), 1 << 18
    held = [vars(table).values() for table in (model.weights, *model.weights.layers)]
    weights = sum(handle.nbytes for handle in itertools.chain(*held) if isinstance(handle, Weight))
    need = predict_need(ops, model.blueprint, tokens, weights, 24 * 10**9)
    state = model.new_state(tokens)
    for rows in (need.rows, 8):
        state.length = tokens - rows
        model.forward(state, Step.chain(np.zeros(rows, np.int32), state.length), slice(rows - 1, rows))
    kept = snapshot_bytes(model.state_spec, tokens)
    taken = weights + state.nbytes + ops.context.arena.nbytes + UPLOAD + kept
    print(f"{ops.context.card.name}: {need.total / 1e9:.2f} GB in steps of {need.rows} rows, taken {taken / 1e9:.2f}")
    assert need.rows >= 512
    assert taken <= need.total <= 23.0e9
    assert need.total <= 1.03 * taken


def layer_sizes(model):
    return [layer_size(t, s, model.config) for t, s in zip(model.layout.layers, model.state_spec, strict=True)]


def test_a_limit_of_memory():
    """The pool refuses what exceeds the limit, which is what a model then finds free."""
    memory.give_back()
    pool, size = cupy.get_default_memory_pool(), 64 << 20
    limit_memory(pool.total_bytes() + size + 100)
    try:
        assert memory.free_and_total()[0] == size + 100
        held = memory.Memory(size)
        with pytest.raises(BimetalError, match=r"the limit of .* on GPU 0 leaves 0\.0 GB and 0\.1 GB more"):
            memory.Memory(size)
        del held
        memory.Memory(size)
    finally:
        limit_memory(0)


def test_arena(monkeypatch):
    """A layer of another order finds room before the large chunk, and a second run takes the same memory."""
    monkeypatch.setattr(memory, "Memory", Bytes)
    arena, mib = memory.Arena(), 1 << 20

    def step() -> list[int]:
        arena.reset()
        taken = []
        for layer in ((64, 40, 200, 8), (), (200, 64, 40, 8), (), (8, 8, 32, 200)):
            arena.turn()
            taken += [arena.take(n * mib) for n in layer]
        return taken

    first = step()
    arena.frozen = True
    assert step() == first
    assert arena.nbytes == (64 + 40 + 200 + 32) * mib


def test_fit(capsys):
    assert main(["fit", "demo", "--backend", "cuda", "--memory", "1GB"]) == 0
    out = capsys.readouterr().out
    assert "demo on cuda: 953.7 MiB, given by --memory" in out
    assert "best: Q8_0" in out
    assert main(["fit", "demo", "--backend", "cuda", "--ctx", "2000000000"]) == 1
    assert capsys.readouterr().err == (
        "error: a context of 2000000000 tokens is more than the CUDA kernels take, about a million\n"
    )


def test_context(monkeypatch, capfd):
    """The context is the trained one, what fits, or refused; a requested context is taken as it is."""

    def context(free: int, **options) -> int:
        monkeypatch.setattr(CudaOps, "free_bytes", lambda _: (free, "free memory of a card"))
        with generate.load(str(demo_path()), backend="cuda", **options) as llm:
            return llm.context

    assert context(10**12) == 4096
    assert capfd.readouterr().err == ""
    limited = context(347_000_000)
    assert LEAST_CONTEXT < limited < 4096
    told = f"the context is {limited} of 4096 tokens: no more fit into the free memory of a card"
    assert told in capfd.readouterr().err
    assert context(347_000_000, ctx=4000) == 4000
    assert context(397_000_000) == 4096  # in prefill steps of fewer rows
    with pytest.raises(
        BimetalError, match=r"the weights leave 0\.1 GB of free memory of a card, too little for a context of 512"
    ):
        context(10**8)
