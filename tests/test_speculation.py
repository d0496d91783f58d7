"""Speculative decoding for users: flags, options, chats, statistics, and refusals."""

import itertools
import json
import time
from dataclasses import replace

import numpy as np
import pytest
import tiny
import tiny_chat
import tiny_draft
import tiny_eagle
from safetensors.numpy import save_file

import generate
from common.checkpoint import open_checkpoint
from common.decode.lookup import Lookup
from common.decode.run import PHASES
from common.decoders import DECODERS
from common.demo import demo_path
from common.draft_stretches import DraftStretches
from common.engine import Engine
from common.errors import BimetalError, UsageError
from common.models import ARCHITECTURES, load_model
from common.models.drafts import load_pair
from common.models.window import bounded, windowed
from common.options import GenerationOptions
from common.reference import NumpyOps
from common.row_runner import RowRunner
from common.step import MAX_DECODE_ROWS, Step
from common.tokenizer import load_tokenizer
from generate.__main__ import main

SPECULATIVE = [row.name for row in DECODERS.values() if row.family == "speculative"]
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_chat.write(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="module")
def draft(folder):
    config = json.loads((folder / "config.json").read_text())
    sizes = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    return tiny_draft.write(folder.parent / "draft", *sizes, taps=[0, 1])


@pytest.fixture(scope="module")
def llm(folder, draft):
    with generate.load(str(folder), backend="numpy", draft=str(draft)) as llm:
        yield llm


@pytest.mark.parametrize("spec", SPECULATIVE)
def test_the_reply_is_the_same(llm, spec):
    plain = llm.generate("hello", max_tokens=40, spec="off", logprobs=2, stop=["zz"])
    reply = llm.generate("hello", max_tokens=40, spec=spec, logprobs=2, stop=["zz"])
    assert (reply.text, reply.tokens, reply.finish_reason) == (plain.text, plain.tokens, plain.finish_reason)
    assert [p.token for p in reply.logprobs] == [p.token for p in plain.logprobs]
    assert np.allclose([p.logprob for p in reply.logprobs], [p.logprob for p in plain.logprobs], atol=1e-4)
    assert plain.stats.accepted is None
    assert reply.stats.accepted.steps > 0


def test_seconds_of_a_step_are_shared_by_its_phases(llm, monkeypatch):
    """By a clock that moves at each reading, and by whole seconds: phases do not overlap, nor go beyond the reply."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    stats = llm.generate("hello", max_tokens=20, spec="tree", tree_budget=4).stats
    seconds, steps = stats.accepted.seconds, stats.accepted.steps
    assert steps > 0
    assert seconds["plain"] == 0
    assert all(seconds[phase] >= steps for phase in PHASES if phase != "plain")
    assert sum(seconds.values()) <= stats.decode_seconds


@pytest.fixture
def right(llm, monkeypatch):
    """right(reply): from here on, draft and lookup propose the tokens of `reply` to "hello", four at a time."""
    prompt = llm.tokenizer.encode("hello")

    def know(reply):
        def ahead(at):
            return [*prompt, *reply.tokens, *[0] * 5][at : at + 4]

        def drafted(runner, requests):
            ((state, request),) = requests
            k = request.k
            ids = np.array(ahead(state.length + 1), np.int32)
            return [(ids[:, None] + np.arange(k), np.tile(-1.0 - np.arange(k), (len(ids), 1)))]

        monkeypatch.setattr(RowRunner, "drafted", drafted)
        monkeypatch.setattr(DraftStretches, "_chain_tokens", lambda each: 0)  # none is drafted by the model
        monkeypatch.setattr(Lookup, "find", lambda self, count: (ahead(len(self.tokens))[:count], 4))

    return know


@pytest.mark.parametrize("spec", SPECULATIVE)
def test_ends_within_a_block(llm, spec, right, monkeypatch):
    """Stop strings, end tokens and max_tokens cut a block where they cut plain text."""
    whole = llm.generate("hello", max_tokens=40, spec="off")
    right(whole)
    assert llm.generate("hello", max_tokens=40, spec=spec, tree_budget=6).stats.accepted.length > 3
    for stop in (whole.text[3:5], whole.text[9:11]):
        cut = llm.generate("hello", max_tokens=40, spec=spec, tree_budget=6, stop=[stop])
        plain = llm.generate("hello", max_tokens=40, spec="off", stop=[stop])
        assert (cut.text, cut.tokens, cut.finish_reason) == (plain.text, plain.tokens, "stop")
    for n in range(1, 9):
        assert llm.generate("hello", max_tokens=n, spec=spec, tree_budget=6).tokens == whole.tokens[:n]
    for end in dict.fromkeys(whole.tokens[:9]):
        monkeypatch.setattr(llm.tokenizer, "end_ids", {end})
        cut = llm.generate("hello", max_tokens=40, spec=spec, tree_budget=6)
        assert (cut.tokens, cut.finish_reason) == (whole.tokens[: whole.tokens.index(end)], "stop")


@pytest.mark.parametrize("spec", SPECULATIVE)
@pytest.mark.parametrize("penalty", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
@pytest.mark.few(5)
def test_penalties_within_a_block(llm, spec, penalty, right):
    """They count each token of a block before the next is chosen."""
    options = {"max_tokens": 40, penalty: 1.5}
    plain = llm.generate("hello", spec="off", **options)
    assert plain.tokens != llm.generate("hello", spec="off", max_tokens=40).tokens
    right(plain)
    reply = llm.generate("hello", spec=spec, tree_budget=6, **options)
    assert reply.tokens == plain.tokens
    assert reply.stats.accepted.length > 3


def test_chats_go_on_from_the_state_and_regenerate(llm):
    history, other = list(MESSAGES), list(MESSAGES)
    for text in ("more", "and more"):
        one = llm.chat(history, max_tokens=20)
        two = llm.chat(other, max_tokens=20, spec="off")
        assert one.text == two.text
        again = llm.chat(history, max_tokens=20)  # the same turn: back to its snapshot
        assert again.text == one.text
        assert again.stats.cached_tokens == again.stats.prompt_tokens
        history += [one.message, {"role": "user", "content": text}]
        other += [two.message, {"role": "user", "content": text}]
    follow = llm.chat(history, max_tokens=4)
    assert follow.stats.cached_tokens > 0


def test_a_seed_gives_the_same_text(llm):
    options = {"max_tokens": 30, "temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 7}
    assert (
        llm.generate("hello", spec="lookup+tree", **options).tokens
        == llm.generate("hello", spec="off", **options).tokens
    )


def test_a_stream_that_is_dropped_leaves_a_good_state(llm):
    with llm.stream("hello", max_tokens=40, spec="tree") as stream:
        for _, _piece in zip(range(3), stream, strict=False):
            pass
    assert llm.generate("hello", max_tokens=12).tokens == llm.generate("hello", max_tokens=12, spec="off").tokens


def test_lookup_needs_no_draft(folder):
    with generate.load(str(folder), backend="numpy") as llm:
        reply = llm.generate("abcabcabc", max_tokens=20, spec="lookup")
        assert reply.tokens == llm.generate("abcabcabc", max_tokens=20).tokens
        with pytest.raises(UsageError, match="spec tree needs a draft model"):
            llm.generate("hello", spec="tree").text  # noqa: B018
        with pytest.raises(UsageError, match="spec is 'trees'"):
            llm.generate("hello", spec="trees")
        for budget in (0, MAX_DECODE_ROWS):
            with pytest.raises(UsageError, match=f"tree_budget is {budget}"):
                llm.generate("hello", spec="lookup", tree_budget=budget)


def test_a_draft_of_another_model_is_refused(folder):
    with pytest.raises(BimetalError, match="draft for another model"):
        generate.load(str(folder), backend="numpy", draft=str(tiny.FOLDER / "dflash"))


def test_the_command_line(folder, draft, capsys):
    base = ["--model", str(folder), "--backend", "numpy", "--prompt", "hi", "-n", "16"]
    assert main(base) == 0
    plain = capsys.readouterr().out
    for flags in (
        [],
        ["--spec", "tree", "--tree-budget", "6", "--tree-topk", "3", "--chain-seed"],
        ["--spec", "lookup"],
    ):
        assert main([*base, "--draft", str(draft), *flags, "--stats"]) == 0
        out, err = capsys.readouterr()
        assert out == plain
        assert "tokens per step of" in err
        assert "ms per step: plain" in err
    assert main([*base, "--spec", "tree"]) == 2
    assert "needs a draft model" in capsys.readouterr().err
    assert main([*base, "--tree-budget", "many"]) == 2
    assert "'many' is neither auto nor a whole number from 1 to 135" in capsys.readouterr().err
    assert main([*base, "--attention-window", "0"]) == main([*base, "--fa-window", "0"]) == 2
    assert "'0' is not a whole number of at least 1" in capsys.readouterr().err


def test_snapshots_carry_the_draft(folder, draft):
    """Back at a snapshot, the same proposals come out, through windows that have moved on since."""
    pair = load_pair(draft, load_model(folder, NumpyOps()))
    state, ids = pair.new_state(200), np.arange(10, 40).astype(np.int32)
    pair.forward(state, Step.chain(ids, 0))
    state.commit(range(30))
    saved, before = state.snapshot(), pair.propose(state, 7)
    for start in (30, 60):
        pair.forward(state, Step.chain(ids, start))
        state.commit(range(30))
    state.restore(saved)
    assert np.array_equal(pair.propose(state, 7), before)


@pytest.mark.parametrize("name", ["qwen3", "qwen35", "laguna"])
@pytest.mark.few(2)
def test_the_lossy_window_hides_what_lies_before_it(name, ops):
    """A window as long as the text changes nothing; the prompt is read whole either way."""
    model, ids = tiny.load(name, ops), tiny.golden(name)["ids"].astype(np.int32)[:40]
    logits = {None: tiny.run(model, model.new_state(64), ids, [1] * 40)}
    for window in (40, 3):
        logits[window] = tiny.run(windowed(model, window), model.new_state(64), ids, [1] * 40)
    assert np.array_equal(logits[40], logits[None])
    assert np.array_equal(logits[3][:3], logits[None][:3])
    assert np.abs(logits[3][20:] - logits[None][20:]).max() > 0.05


def test_the_window_reaches_the_decoder_and_not_the_prompt(folder):
    model, tokenizer = load_model(folder, NumpyOps()), load_tokenizer(folder, {})
    session = Engine(model, tokenizer, 128, attention_window=4)
    prompt = list(range(40, 70))
    options, other = GenerationOptions(max_tokens=20), Engine(model, tokenizer, 128)
    one = GenerationOptions(max_tokens=1, logprobs=3)
    first, whole = (next(engine.stream(prompt, one)).logprobs for engine in (session, other))
    assert first == whole
    tokens = [t for p in session.stream(prompt, replace(options, spec="lookup")) for t in p.tokens]
    assert tokens == [t for p in session.stream(prompt, options) for t in p.tokens]
    whole = [t for p in other.stream(prompt, options) for t in p.tokens]
    assert tokens != whole


@pytest.mark.parametrize("name", ["qwen3", "qwen35", "laguna"])
@pytest.mark.few(2)
def test_a_bounded_cache_sees_its_first_rows_and_its_last(name, ops):
    """Room for the whole text changes nothing; else memory stops growing, and the first rows are still seen."""
    model, ids = tiny.load(name, ops), tiny.golden(name)["ids"].astype(np.int32)[:60]
    logits = {None: tiny.run(model, model.new_state(64), ids, [1] * 60)}
    for size in (60, 10):
        small = bounded(model, size)
        state = small.new_state(64)
        logits[size] = tiny.run(small, state, ids[:30], [1] * 30)
        held = state.nbytes
        logits[size] = np.concatenate([logits[size], tiny.run(small, state, ids[30:], [1] * 30)])
        assert size == 60 or state.nbytes == held
    assert np.abs(logits[60] - logits[None]).max() < 1e-5
    assert np.abs(logits[10][:10] - logits[None][:10]).max() < 1e-5
    assert np.abs(logits[10][20:] - logits[None][20:]).max() > 0.05
    without_first = tiny.run(windowed(model, 6), model.new_state(64), ids, [1] * 60)
    assert np.abs(logits[10][20:] - without_first[20:]).max() > 0.05


@pytest.mark.parametrize("option", [{"tree_budget": 5}, {"chain_seed": True}, {"tree_topk": 4}])
def test_options_of_speculation_without_it(folder, option):
    refusal = pytest.raises(UsageError, match=f"{next(iter(option))} is for speculative decoding, which is off")
    with generate.load(str(folder), backend="numpy") as llm, refusal:
        llm.generate("hello", **option)


@pytest.mark.parametrize("option", [{"chain_seed": True}, {"tree_topk": 4}])
def test_options_of_trees_without_trees(folder, option):
    refusal = pytest.raises(UsageError, match=f"{next(iter(option))} is for spec tree, lookup.tree, and spec is lookup")
    with generate.load(str(folder), backend="numpy") as llm, refusal:
        llm.generate("hello", spec="lookup", **option)


def test_windows_that_cannot_be(folder):
    with pytest.raises(UsageError, match="max_kv_size is 7; it must be a whole number of at least 8"):
        generate.load(str(folder), backend="numpy", max_kv_size=7)
    with pytest.raises(UsageError, match="attention_window is 0"):
        generate.load(str(folder), backend="numpy", attention_window=0)
    with pytest.raises(UsageError, match="latent attention of glm4_moe_lite has no window"):
        windowed(tiny.load("glm", NumpyOps()), 8)


def test_an_eagle_draft(folder, tmp_path):
    """The text of plain decoding, by steps that verify chains."""
    config = json.loads((folder / "config.json").read_text())
    draft = tiny_eagle.write(tmp_path / "draft", config["hidden_size"], config["vocab_size"], [0, 1, 1])
    with generate.load(str(folder), backend="numpy", draft=str(draft)) as llm:
        plain = llm.generate("hello", max_tokens=20, temperature=0.8, seed=4, spec="off")
        reply = llm.generate("hello", max_tokens=20, temperature=0.8, seed=4, tree_budget=3)
        assert llm.default_spec == "chain"
    assert (reply.text, reply.tokens) == (plain.text, plain.tokens)
    assert set(reply.stats.accepted.budgets) == {3}


def test_a_multi_token_prediction_block(tmp_path):
    """A random block for the demo, in a file of its own: the text of plain decoding, by steps that verify chains."""
    shapes = block_shapes(ARCHITECTURES["qwen35"].read_config(open_checkpoint(demo_path())))
    draws = np.random.default_rng(0)
    tensors = {name: (0.1 * draws.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    folder = tmp_path / "block"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5_text"}))
    save_file(tensors, folder / "model.safetensors")
    with generate.load("demo", backend="numpy", draft=str(folder)) as llm:
        plain = llm.generate("def f(", max_tokens=8, temperature=0, spec="off")
        reply = llm.generate("def f(", max_tokens=8, temperature=0, tree_budget=3)
        assert llm.default_spec == "chain"
    assert reply.tokens == plain.tokens
    assert set(reply.stats.accepted.budgets) == {3}


def block_shapes(c):
    at, H, K, D = "mtp.layers.0.", c.heads, c.kv_heads, c.head_dim
    norms = ("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", f"{at}input_layernorm")
    shapes = {f"{name}.weight": (c.hidden,) for name in (*norms, f"{at}post_attention_layernorm")}
    shapes |= {f"{at}self_attn.{name}_norm.weight": (D,) for name in "qk"}
    rows = {"q": 2 * H * D, "k": K * D, "v": K * D}
    shapes |= {f"{at}self_attn.{name}_proj.weight": (n, c.hidden) for name, n in rows.items()}
    shapes |= {f"{at}mlp.{name}_proj.weight": (c.ffn, c.hidden) for name in ("gate", "up")}
    shapes |= {f"{at}self_attn.o_proj.weight": (c.hidden, H * D), f"{at}mlp.down_proj.weight": (c.hidden, c.ffn)}
    return shapes | {"mtp.fc.weight": (c.hidden, 2 * c.hidden)}


def test_a_model_without_a_multi_token_prediction_block(tmp_path, monkeypatch):
    """It is refused before weights are loaded, in a sentence."""
    monkeypatch.setattr("generate.loading.open_model", None)
    (tmp_path / "alone.gguf").symlink_to(demo_path())
    with pytest.raises(BimetalError, match=r"alone.gguf has no multi-token-prediction block$"):
        generate.load(tmp_path / "alone.gguf", backend="numpy", draft="mtp")
