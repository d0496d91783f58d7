"""Prompt compression: what is kept, by which attention, and which requests are left alone."""

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from asgi import call
from conftest import client_of
from scripted import Scripted
from tiny import MODELS, load
from tiny_chat import write as write_model

import generate
from common import block_sparse
from common.attention_scores import _shares, attention_to
from common.compression import CHUNK, HEAD, QUERY, SINKS, TAIL, kept_spans, scored
from common.errors import BimetalError, UsageError
from common.ops import Ops
from common.reference import NumpyOps
from common.scores import completed
from common.shards import Ranks
from generate import values
from generate.__main__ import main

COMPRESS = ["--prefill-compression", "auto", "--prefill-drafter", "demo"]
USER = {"role": "user", "content": "What is it?"}


def chunks(spans, count):
    """The numbers of the chunks that spans cover."""
    return [at for at in range(count) if any(first <= at * CHUNK < end for first, end in spans)]


def distinct(count):
    return np.arange(count * CHUNK)


def test_both_ends_and_the_best_chunks_are_kept_in_order():
    scores = np.zeros(1000 * CHUNK, np.float32)
    for at, score in ((500, 3), (300, 2), (700, 1)):
        scores[at * CHUNK + 8 : at * CHUNK + 24] = score
    spans = kept_spans(distinct(1000), scores, 0.05)
    assert [*spans] == sorted(spans)
    kept = chunks(spans, 1000)
    assert len(kept) == 50
    assert kept[:6] == [*range(6)]
    assert kept[-18:] == [*range(982, 1000)]
    assert {300, 500, 700} <= set(kept)
    more = chunks(kept_spans(distinct(1000), scores, 0.5), 1000)
    assert len(more) == 500
    assert {*range(HEAD), *range(1000 - TAIL, 1000)} <= set(more)


def test_a_short_prompt_keeps_its_end():
    assert kept_spans(range(40), np.zeros(40, np.float32), 0.05) == [(32, 40)]
    assert kept_spans(range(7), np.zeros(7, np.float32), 1.0) == [(0, 7)]


def test_words_of_the_question_keep_their_places():
    ids = distinct(1000)
    ids[400 * CHUNK + 5 : 400 * CHUNK + 9] = ids[-20:-16]
    kept = chunks(kept_spans(ids, np.zeros(len(ids), np.float32), 0.05), 1000)
    assert {398, 399, 400, 401, 402} <= set(kept)


def test_a_long_prompt_is_scored_in_pieces():
    tokens, room, read = list(range(1000)), 300, []

    def attention(ids):
        read.append(ids)
        return np.array(ids, np.float32)

    assert scored(tokens, attention, room).tolist() == tokens
    assert max(map(len, read)) <= room
    assert all(ids[:SINKS] == tokens[:SINKS] and ids[-QUERY:] == tokens[-QUERY:] for ids in read)
    assert scored(tokens, attention, 1000).tolist() == tokens
    assert read[-1] == tokens


def test_shares_are_softmax_over_what_each_query_sees():
    rng = np.random.default_rng(1)
    q, keys = rng.normal(size=(2, 4, 8)).astype(np.float32), rng.normal(size=(5, 2, 8)).astype(np.float32)
    found = _shares(q, keys, 0.5)
    for row in range(2):
        seen = 5 - 1 + row
        best = np.zeros(5)
        for h in range(4):
            e = np.exp([0.5 * float(q[row, h] @ keys[t, h // 2]) for t in range(seen)])
            best[:seen] = np.maximum(best[:seen], e / e.sum())
        assert np.allclose(found[row], best, atol=1e-5)


def dense(q, keys, values, scale):
    """The definition, over all keys: (T, H, Dv)."""
    (T, H, D), (n, K, _) = q.shape, keys.shape
    scores = scale * np.einsum("tkgd,nkd->tkgn", q.reshape(T, K, H // K, D), keys)
    hidden = np.arange(n) > np.arange(n - T, n)[:, None]
    scores = np.where(hidden[:, None, None], -np.inf, scores)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("tkgn,nkv->tkgv", shares / shares.sum(axis=-1, keepdims=True), values).reshape(T, H, -1)


@pytest.mark.parametrize(("n", "T"), [(5, 5), (128, 1), (900, 900), (1500, 300), (3001, 77)])
def test_block_sparse_attention_of_all_blocks_is_attention(n, T, monkeypatch):
    monkeypatch.setattr(block_sparse, "MASS", 2.0)
    monkeypatch.setattr(block_sparse, "MOST", n)
    rng = np.random.default_rng(n)
    q, keys, values = (
        rng.normal(size=(rows, heads, 16)).astype(np.float32) for rows, heads in ((T, 6), (n, 2), (n, 2))
    )
    assert np.allclose(block_sparse.attend(q, keys, values, 0.25), dense(q, keys, values, 0.25), atol=1e-5)


def test_block_sparse_attention_finds_what_its_queries_attend_to(monkeypatch):
    """Of 60 blocks one far back holds what all queries of the last one look for; the cost has a bound."""
    rng, block = np.random.default_rng(7), block_sparse.BLOCK
    n, seen = 60 * block, []
    q, keys, values = (rng.normal(size=(rows, 2, 16)).astype(np.float32) for rows in (block, n, n))
    q += 4
    keys[20 * block : 21 * block] += 2
    chosen = block_sparse._chosen
    monkeypatch.setattr(block_sparse, "_chosen", lambda *of: seen.append(chosen(*of)) or seen[-1])
    found, whole = block_sparse.attend(q, keys, values, 0.25), dense(q, keys, values, 0.25)
    assert np.abs(found - whole).mean() < 0.02 < 0.5 * np.abs(whole).mean()
    most = block_sparse.SINKS + block_sparse.LATEST + block_sparse.MOST
    for blocks in seen:
        assert {0, 1, 20, 56, 57, 58, 59} <= set(blocks.tolist())
        assert len(blocks) <= most
    keys[20 * block : 21 * block] = rng.normal(size=(block, 2, 16))  # and now all blocks are alike
    seen.clear()
    block_sparse.attend(q, keys, values, 0.25)
    assert [len(blocks) for blocks in seen] == [most, most]


@pytest.mark.parametrize(("n", "T", "size"), [(40, 40, 128), (900, 300, 16), (777, 1, 8), (650, 77, 16)])
def test_block_sparse_attention_is_the_same_on_mlx(n, T, size, monkeypatch):
    """Blocks are chosen by heads, some of them below the most, as in NumPy's definition."""
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    from mlx_backend.block_sparse import attend

    monkeypatch.setattr(block_sparse, "BLOCK", size)
    rng = np.random.default_rng(n)
    q, keys, values = (
        rng.normal(size=(rows, heads, 16)).astype(np.float32) for rows, heads in ((T, 6), (n, 2), (n, 2))
    )
    q[:, :3] += 1  # the means of one key head's queries predict well, so that fewer blocks hold MASS
    for at in range(0, n - size, 3 * size):
        keys[at : at + size, 0] += 2
    expected = block_sparse.attend(q, keys, values, 0.25)
    if n > 600:
        assert np.abs(expected - dense(q, keys, values, 0.25)).max() > 0.01  # something is left out
    by_heads = [mx.array(x).swapaxes(0, 1)[None] for x in (keys, values)]
    assert np.allclose(attend(mx.array(q), *by_heads, 0.25), expected, atol=1e-5)


def test_scores_of_a_long_text_are_the_same_on_mlx(drafter, monkeypatch):
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    from mlx_backend import block_sparse as composed

    seen = []
    attend = composed.attend
    monkeypatch.setattr(composed, "attend", lambda *of: seen.append(len(of[0])) or attend(*of))
    monkeypatch.setattr(block_sparse, "BLOCK", 4)
    monkeypatch.setattr("common.attention_scores.FULL", 64)
    tokens = [random.Random(4).randrange(2, 258) for _ in range(214)]
    found = drafter.attention_to(tokens, 8)
    with generate.load(drafter.path, backend="mlx", parallel=1) as other:
        assert np.allclose(other.attention_to(tokens, 8), found, atol=1e-3)
    assert sum(seen) == 150 * len(drafter._engine.model.layout.layers)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("drafter") / "tiny")
    with generate.load(folder, backend="numpy", parallel=1) as llm:
        yield llm


def test_attention_does_not_depend_on_steps_or_backend(drafter, monkeypatch):
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    tokens = [random.Random(2).randrange(2, 258) for _ in range(150)]
    found = drafter.attention_to(tokens, 8)
    assert found.shape == (150,)
    assert 1 <= found.sum() < 150
    monkeypatch.setattr(type(drafter._engine.model.ops), "prefill_rows", 17)
    assert np.allclose(drafter.attention_to(tokens, 8), found, atol=1e-3)
    with generate.load(drafter.path, backend="mlx", parallel=1) as other:
        assert np.allclose(other.attention_to(tokens, 8), found, atol=1e-2)


def test_only_the_last_rows_attend_to_all(drafter, monkeypatch):
    steps, ops = [], drafter._engine.model.ops
    sparse = type(ops).block_sparse_attention

    def noted(self, q, *of):
        steps.append(len(q))
        return sparse(self, q, *of)

    monkeypatch.setattr(type(ops), "block_sparse_attention", noted)
    monkeypatch.setattr("common.attention_scores.FULL", 64)
    tokens = [random.Random(4).randrange(2, 258) for _ in range(214)]
    found = drafter.attention_to(tokens, 8)
    layers = len(drafter._engine.model.layout.layers)
    assert sum(steps) == 150 * layers
    monkeypatch.setattr(type(ops), "block_sparse_attention", Ops.block_sparse_attention)
    assert np.allclose(drafter.attention_to(tokens, 8), found, atol=1e-3)  # 3 blocks: none is left out


@pytest.mark.parametrize("name", MODELS)
def test_attention_of_each_architecture(name):
    model, ids = load(name, NumpyOps()), [at % 50 for at in range(40)]
    if name in ("glm", "deepseek2", "deepseek3", "mistral", "phi3", "gptoss"):  # latents, windows, sink logits
        with pytest.raises(UsageError, match="no layers whose attention"):
            completed(attention_to(model, ids, 4, 64))
        return
    found = completed(attention_to(model, ids, 4, 64))
    assert found.shape == (40,)
    assert found.sum() > 0.99
    assert np.isfinite(found).all()


def test_a_rank_without_all_heads_gives_no_scores():
    model = load("qwen3", NumpyOps())
    model.ops.ranks = Ranks(0, 2)
    with pytest.raises(UsageError, match="2 ranks share each layer"):
        completed(attention_to(model, list(range(40)), 4, 64))


def test_a_drafter_is_refused_when_it_is_loaded(drafter, tmp_path):
    pytest.importorskip("uvicorn", reason="the server extra is not installed")
    from generate.server.compression import Compression, compressor_for

    made = compressor_for("numpy", Compression(str(drafter.path), ((1, 0.1),), 0))
    points = [{"tokens": 1, "keep_ratio": 0.1}]
    assert made.shown() == {"drafter": str(drafter.path), "backend": "numpy", "curve": points, "threshold": 0}
    assert made.drafter.context == drafter.trained_context
    made.drafter.close()
    folder = write_model(tmp_path / "short")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 128}))
    with pytest.raises(UsageError, match="context of 128 tokens"):
        compressor_for("numpy", Compression(str(folder), ((1, 0.1),), 0))


def test_the_share_that_is_kept_follows_the_length():
    pytest.importorskip("uvicorn", reason="the server extra is not installed")
    from generate.server.compression import Compression

    made = Compression("tiny", values.curve("8000:0.3,64000:0.1"), 0)
    lengths = 1, 8000, 36_000, 64_000, 10**6
    assert [round(made.keep_ratio(tokens), 3) for tokens in lengths] == [0.3, 0.3, 0.2, 0.1, 0.1]


def test_attention_can_be_cancelled(drafter):
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(BimetalError, match="attention_to was cancelled after it read 0 of 50 tokens"):
        drafter.attention_to([5] * 50, 8, cancel)


@pytest.fixture
def compressing(tmp_path, drafter):
    """A client of a scripted model whose prompts from 300 bytes on are shortened to a fifth."""
    from generate.server.compression import Compression, Compressor

    client = client_of(Scripted(tmp_path / "model", context=1 << 16), "scripted")
    client.service.compressor = Compressor(drafter, Compression("tiny", ((1, 0.2),), 300))
    return client


def words(count):
    rng = random.Random(3)
    return " ".join("".join(rng.choices("abcdefghijklmnop", k=4)) for _ in range(count))


def test_a_long_conversation_is_shortened(compressing):
    text = words(400)
    first = [{"role": "system", "content": "Be brief. " * 40}, {"role": "user", "content": text}]
    messages = [*first, {"role": "assistant", "content": "Yes."}, USER]
    body = compressing.post("/v1/chat/completions", json={"messages": messages}).json()
    assert body["choices"][0]["message"]["content"] == "Hello"
    prompt = compressing.llm.prompts[-1]
    assert prompt.count("<|im_start|>") == 5
    assert "Be brief. " * 40 in prompt
    assert prompt.endswith("<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n")
    [kept] = [part for part in prompt.split("<|im_start|>") if part.startswith("user")][:1]
    parts = [part.strip() for part in kept.removeprefix("user\n").removesuffix("<|im_end|>\n").split("…")]
    assert all(part in text for part in parts)
    assert 0.1 * len(text) < sum(map(len, parts)) < 0.25 * len(text)
    assert "bimetal:prefill_compression_dropped_tokens_total" in compressing.service.metrics_text()
    assert compressing.service.metrics.counters["prefill_compression_dropped_tokens"] > 0.7 * len(text)
    assert compressing.get("/props").json()["prefill_compression"]["curve"][0]["keep_ratio"] == 0.2


def test_a_long_text_is_shortened(compressing):
    text = "é" * 600  # two bytes, and here two tokens, each
    usage = compressing.post("/v1/completions", json={"prompt": text, "max_tokens": 1}).json()["usage"]
    assert 200 < usage["prompt_tokens"] < 340


STREAMS = [
    ("/v1/chat/completions", {"messages": "M"}, ": waiting"),
    ("/v1/completions", {"prompt": "P"}, ": waiting"),
    ("/v1/responses", {"input": "P"}, ": waiting"),
    ("/v1/messages", {"messages": "M", "max_tokens": 9}, "event: ping"),
    ("/api/chat", {"messages": "M"}, '"content":""'),
    ("/api/generate", {"prompt": "P"}, '"response":""'),
]


@pytest.mark.parametrize(("path", "body", "ping"), STREAMS)
@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.few(4)
def test_signs_of_life_while_a_prompt_is_compressed(compressing, monkeypatch, path, body, ping, fits):
    """A prompt that turns out too long then is refused in the stream, and no longer by a status."""
    monkeypatch.setattr("generate.server.sending.HEARTBEAT", 0.02)
    shorten = compressing.service.compressor.shorten

    def slow(*of):
        time.sleep(0.15)
        return shorten(*of)

    monkeypatch.setattr(compressing.service.compressor, "shorten", slow)
    text = words(80 if fits else 20)
    values = {"M": [{"role": "user", "content": text}], "P": text}
    given = {key: values.get(value, value) if isinstance(value, str) else value for key, value in body.items()}
    if not fits:
        compressing.llm.context = 60
    answer = compressing.post(path, json={**given, "stream": True})
    assert answer.status_code == 200
    assert ping in answer.text.splitlines()[0]
    assert ("context" in answer.text and "error" in answer.text) != fits
    if fits:
        assert "lo" in answer.text
    monkeypatch.undo()
    quick = compressing.post(path, json={**given, "stream": True})
    assert quick.status_code == (200 if fits else 400)
    assert ping not in quick.text.splitlines()[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_a_compression_within_a_step(compressing, drafter, monkeypatch, stream):
    ops, steps, left = drafter._engine.model.ops, [], asyncio.Event()
    monkeypatch.setattr(type(ops), "prefill_rows", 8)
    monkeypatch.setattr("generate.server.sending.HEARTBEAT", 0.02)
    run = type(ops).run

    def counted(self, *of):
        steps.append(of)
        time.sleep(0.01)
        return run(self, *of)

    monkeypatch.setattr(type(ops), "run", counted)

    async def leave():
        body = json.dumps({"prompt": words(80), "stream": stream}).encode()
        answer = await call(compressing.app, "POST", "/v1/completions", body, left=left)
        while len(steps) < 5:
            await asyncio.sleep(0.002)
        left.set()
        await answer.task
        return len(steps)

    at = asyncio.run(leave())
    assert compressing.service.running == 0
    drafter._owner.submit(lambda: None).result()
    assert at <= len(steps) <= at + 1 < 30
    assert "status=499" in compressing.log.getvalue()


def test_what_is_left_alone(compressing):
    text, tool = words(200), {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    chat, long = "/v1/chat/completions", {"messages": [{"role": "user", "content": words(200)}]}
    for path, body, cached, whole in (
        (chat, long, 0.0, False),
        (chat, long | {"tools": [tool]}, 0.0, True),
        (chat, long, 0.6, True),
        (chat, {"messages": [USER]}, 0.0, True),
        ("/v1/completions", {"prompt": text, "max_tokens": 1}, 0.0, False),
        ("/v1/completions", {"prompt": text, "max_tokens": 1, "echo": True}, 0.0, True),
        ("/v1/completions", {"prompt": [5] * 999, "max_tokens": 1}, 0.0, True),
    ):
        compressing.llm.cached = cached
        before = compressing.service.metrics.counters["prefill_compression_dropped_tokens"]
        assert compressing.post(path, json=body).status_code == 200
        after = compressing.service.metrics.counters["prefill_compression_dropped_tokens"]
        assert (after == before) == whole, (path, body.keys(), cached)


def test_matched_tokens_of_a_prompt(demo):
    prompt = demo.tokenizer.encode("def held(x):\n    return x  # nobody else asks this\n")
    assert demo.matched_tokens(prompt) < len(prompt)
    demo.generate(prompt, max_tokens=4, temperature=0)
    assert demo.matched_tokens(prompt) == len(prompt)
    assert demo.matched_tokens([*prompt[:9], prompt[9] + 1, *prompt[10:]]) == 9
    long = demo.tokenizer.encode("".join(f"def held_{at}(x):\n    return {at}\n" for at in range(60)))
    demo.generate(long, max_tokens=1, temperature=0)
    for at in range(demo.parallel):  # the slots hold other texts now, the prefix cache what it kept of this one
        demo.generate(f"# {at}", max_tokens=1)
    assert 256 <= demo.matched_tokens(long) <= len(long)


def test_flags(capsys):
    pytest.importorskip("uvicorn", reason="the server extra is not installed")
    for flags, said in (
        (["--prefill-compression", "auto"], "needs --prefill-drafter"),
        (["--prefill-drafter", "demo"], "off goes without --prefill-drafter"),
        (["--prefill-keep-ratio", "0"], "not a share above 0"),
        (["--prefill-keep-ratio", "0.1"], "--prefill-keep-ratio needs --prefill-compression auto or always"),
        (["--prefill-curve", "9:0.2"], "--prefill-curve needs --prefill-compression"),
        (["--prefill-threshold", "9"], "--prefill-threshold needs --prefill-compression"),
        (["--prefill-compression", "always", *COMPRESS[2:], "--prefill-threshold", "9"], "auto, not with always"),
        (["--prefill-compression", "some"], "invalid choice"),
        (["--prefill-curve", "8000"], "'' is not a number"),
        (["--prefill-curve", "9:0.2,9:0.1"], "do not rise"),
        ([*COMPRESS, "--prefill-keep-ratio", "0.1", "--prefill-curve", "9:0.2"], "goes without --prefill-keep-ratio"),
    ):
        assert main(["serve", "--port", "0", *flags]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_needles_are_kept():
    """Of facts that a question asks for, more than a random choice of chunks or the end alone keep."""
    root = Path(__file__).parents[2]
    how = ["--lengths", "1000", "--texts", "3", "--keep", "0.25", "--backend", "numpy"]
    env = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, root / "examples" / "needles.py", *how]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stdout)
    tokens, rules, _, drawn, end, left, _ = (float(word.strip("%")) for word in done.stdout.splitlines()[-1].split())
    assert rules >= 90 > 50 > max(drawn, end)
    assert left <= 0.25 * tokens + CHUNK
