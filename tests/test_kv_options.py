"""The choice of a cache's formats: by flag, by option and by memory; what is counted, refused and kept lossless."""

import json
from dataclasses import replace

import numpy as np
import pytest
import tiny

import generate
from common.checkpoint import open_checkpoint
from common.demo import demo_path
from common.engine import Engine
from common.errors import UsageError
from common.fit import predict_weights
from common.kv_cache import LADDER, SHORTHANDS, CacheOptions, described, options_of, packed
from common.kv_formats import FORMATS
from common.models import load_model
from common.models.drafts import load_pair
from common.options import CACHE_SHORTHANDS, CACHE_TYPES, CacheChoice, GenerationOptions
from common.reference import NumpyOps
from common.storage import NATIVE, KVSpec, all_specs
from common.tokenizer import load_tokenizer
from generate import inspect
from generate.__main__ import main
from generate.caches import named, with_cache

CODE = "def parse(lines):\n    result = {}\n    for line in lines:\n"


@pytest.fixture(scope="module")
def demo():
    return load_model(demo_path(), NumpyOps())


def test_names_are_the_formats():
    assert set(CACHE_TYPES) == set(FORMATS)
    assert set(CACHE_SHORTHANDS) == {*SHORTHANDS, "auto"}


def test_an_axis_overrides_the_shorthand():
    assert options_of(CacheChoice(kv="tq3", cache_type_k="Q8_0")) == CacheOptions("q8_0", "tq3_0")
    assert options_of(CacheChoice(cache_type_v="lm4")) == CacheOptions(NATIVE, "lm4")
    assert options_of(CacheChoice()) == CacheOptions()
    assert options_of(CacheChoice(kv="q4", kv_sinks=0, kv_boundary=2)) == CacheOptions(
        "lm4", "lm4", sinks=0, boundary=2
    )


def test_a_choice_in_words():
    assert named(CacheChoice(kv="q4", kv_sinks=0)) == "kv q4, kv_sinks 0"
    assert named(CacheChoice()) == ""


def test_auto_takes_the_widest_that_fits(demo, monkeypatch, capsys):
    """With ever less memory: every rung of the ladder, in order, then the last."""
    chosen = []
    sizes = np.geomspace(1e9, 1e5, 60)
    for size in sizes:
        monkeypatch.setattr(demo.ops, "free_bytes", lambda size=size: (int(size), "given here"))
        chosen.append(with_cache(demo, CacheChoice(kv="auto"), 4096).cache)
    pairs = list(dict.fromkeys((cache.keys, cache.values) for cache in chosen))
    assert pairs[0] == (NATIVE, NATIVE)
    assert pairs[-1] == LADDER[-1]
    assert [pair for pair in LADDER if pair in pairs] == pairs
    err = capsys.readouterr().err
    assert "kv auto: keys tq3_0, values tq3_0, for 4096 tokens in 0.0 GB (given here); the first that fits" in err
    assert ", else the last, of native/native, q8_0/q8_0, q8_0/lm4, lm4/lm4, tq3_0/tq3_0\n" in err


@pytest.mark.long
def test_fit_and_inspect_choose_as_loading_does(demo, monkeypatch, capsys):
    """`--kv auto` was refused."""
    weights = predict_weights(open_checkpoint(demo_path()), demo.layout, demo.ops)
    monkeypatch.setattr(inspect, "open_backend", lambda *_: NumpyOps())
    chosen = []
    for size in np.geomspace(1e9, 1e5, 20):
        monkeypatch.setattr(NumpyOps, "free_bytes", lambda self, size=size: (int(size), "given here"))
        loaded = with_cache(demo, CacheChoice(kv="auto"), 4096).cache
        argv = ["demo", "--kv", "auto", "--backend", "numpy", "--memory", str(int(size) + weights)]
        capsys.readouterr()
        assert main(["fit", *argv]) == 0
        _, head, row, *_ = capsys.readouterr().out.splitlines()
        assert "--kv auto" in head
        assert f" {loaded.pair} " in row
        main(["fit", *argv, "--json"])
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        assert row["formats"] == loaded.pair
        chosen.append(row["kv"])
        monkeypatch.setattr(NumpyOps, "free_bytes", lambda self, size=size: (int(size) + weights, "given here"))
        assert main(["inspect", "demo", "--kv", "auto"]) == 0
        out = capsys.readouterr().out
        assert f"kv auto: {loaded}, for 4096 tokens in {int(size) / 1e9:.1f} GB (given here); the first that" in out
        assert f"layers 3, 7: {described(replace(demo, cache=loaded).state_spec)[0].partition(': ')[2]}" in out
    assert chosen[0] == 2048 * 4096 > chosen[-1]
    main(["fit", "demo", "--backend", "numpy"])
    assert "--kv auto" not in capsys.readouterr().out
    assert main(["fit", "demo", "--kv", "auto", "-ctk", "q8_0"]) == 2
    assert "kv auto chooses both formats" in capsys.readouterr().err


def test_refusals(demo, capsys):
    with pytest.raises(UsageError, match="kv auto chooses both formats"):
        with_cache(demo, CacheChoice(kv="auto", cache_type_k="q8_0"), 100)
    with pytest.raises(UsageError, match="kv q8 stands for both formats, and cache_type_k lm4 and cache_type_v lm3"):
        with_cache(demo, CacheChoice(kv="q8", cache_type_k="lm4", cache_type_v="lm3"), 100)
    assert with_cache(demo, CacheChoice(kv="q8", cache_type_v="lm4"), 100).cache == CacheOptions("q8_0", "lm4")
    with pytest.raises(UsageError, match="run by mlx-lm is in its own float type"):
        with_cache(object(), CacheChoice(kv="q8"), 100)
    assert main(["fit", str(tiny.FOLDER / "qwen3"), "--kv", "q4", "--backend", "numpy"]) == 1
    assert "lm4 stores heads whose size is a multiple of 32, not 16" in capsys.readouterr().err
    assert main(["-p", "x", "-ctk", "q9"]) == 2
    for name, value in (("kv_recent", 5), ("kv_boundary", 1), ("kv_rotate_k", False)):
        with pytest.raises(UsageError, match=f"{name} goes with kv, cache_type_k or cache_type_v, none of which is"):
            CacheChoice(**{name: value})
    with pytest.raises(UsageError, match="kv_calibration is 10; it must be 0 or a whole number of at least 64"):
        CacheChoice(kv="q4", kv_calibration=10)


def test_small_groups_are_named():
    """Heads of 96 are rotated in groups of 32; of 128 and 64 whole."""
    lines = [described(packed([{"kv": KVSpec(1, D, D)}], CacheOptions("lm4", "q8_0"))) for D in (96, 128, 64)]
    assert [" rotated in groups of 32" in line for (line,) in lines] == [True, False, False]
    assert all(" rotated" in line for (line,) in lines)


def test_a_backend_without_kernels_refuses(demo):
    class Bare(NumpyOps):
        name, cache_pairs = "bare", frozenset({("q8_0", "q8_0"), ("q4_0", "q4_0")})

    model = load_model(demo_path(), Bare())
    assert with_cache(model, CacheChoice(kv="q8"), 100).cache.keys == "q8_0"
    with pytest.raises(
        UsageError, match="bare backend has no cache of keys in lm4 and values in lm4; supported: q4_0 / q4_0; q8_0"
    ):
        with_cache(model, CacheChoice(kv="q4"), 100)
    assert with_cache(model, CacheChoice(cache_type_k="q4_0", cache_type_v="q4_0"), 100).cache.keys == "q4_0"


def test_fit_and_inspect_count_the_bytes(capsys):
    def kv(*flags):
        assert main(["fit", "demo", "--backend", "numpy", "--ctx", "4096", "--json", *flags]) == 0
        return json.loads(capsys.readouterr().out)["rows"][0]["kv"]

    layers, vectors = 2, 2  # that attend; KV heads, of 64 numbers
    assert kv() == layers * vectors * 2 * 64 * 4 * 4096
    assert kv("--kv", "q8") == layers * vectors * 2 * 68 * 4096
    exact, statistics = (512 + 128) * 3 * 64 * 4, 2 * 64 * 4  # keys, queries and values
    assert kv("--kv", "q4") == layers * vectors * (2 * 34 * 4096 + exact + statistics)
    assert main(["inspect", "demo", "-ctk", "q8_0", "-ctv", "lm4"]) == 0
    out = capsys.readouterr().out
    assert f" bytes, {layers * vectors * (68 + 34)} later" in out
    assert "keys q8_0, values lm4 rotated, first 4 and latest 128 tokens exact, keys as they are\n" in out
    assert main(["inspect", "demo", "--kv", "q4", "--kv-recent", "7"]) == 0
    line = "layers 3, 7: keys lm4 rotated, values lm4 rotated, first 512 and latest 7 tokens exact, keys equalised\n"
    assert line in capsys.readouterr().out
    assert "  lm4             272 bytes\n" in out


def test_load_and_generate(capsys):
    with generate.load("demo", backend="numpy", kv="q4", kv_calibration=64) as llm:
        reply = llm.generate(CODE, max_tokens=8)
        assert llm._engine.model.cache == CacheOptions("lm4", "lm4", calibration=64)
        specs = [s for s in all_specs(llm._engine.model.state_spec) if getattr(s, "is_packed", False)]
        assert reply.stats.state_bytes >= sum(s.row_bytes(4) for s in specs)
    assert len(reply.tokens) == 8


@pytest.mark.parametrize("pair", [("q8_0", "lm4"), ("tq3_0", "tq3_0")], ids="/".join)
@pytest.mark.few(1)
def test_speculation_is_lossless_with_the_same_cache(demo, pair):
    """Greedy tokens of trees, chains and lookup are those of plain decoding, past the tokens that calibrate."""
    checkpoint = open_checkpoint(demo_path())
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.config)
    model = replace(demo, cache=CacheOptions(*pair, calibration=24, recent=9))
    drafted = load_pair(demo_path("draft"), model)
    ids = tokenizer.encode(CODE)
    assert len(ids) < 24

    def tokens(of, kind):
        options = GenerationOptions(max_tokens=28, spec=kind, tree_budget=None if kind == "off" else 12)
        return [t for piece in Engine(of, tokenizer, 200).stream(ids, options) for t in piece.tokens]

    plain = tokens(model, "off")
    assert len(plain) == 28
    for kind in ("lookup", "chain", "tree"):
        assert tokens(drafted, kind) == plain, kind


@pytest.mark.long
def test_perplexity_against_the_same_model(tmp_path, capsys):
    text = tmp_path / "text.py"
    text.write_text(CODE * 12)
    flags = ["--text", str(text), "--ctx-window", "128", "--backend", "numpy", "--json"]
    assert main(["perplexity", "demo", *flags, "-ctk", "lm4", "-ctv", "lm4", "--kv-calibration", "64"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["cache"] == "keys lm4, values lm4"
    assert main(["perplexity", "demo", *flags, "--kv", "q8", "--reference", "demo"]) == 0
    out, said = capsys.readouterr()
    measured = json.loads(out)["agreement"]
    assert 0 < measured["kl"]["value"] < 1e-3
    assert "exactly" not in said


@pytest.mark.parametrize(("calibration", "window", "is_exact"), [(64, 192, True), (64, 224, False), (0, 132, True)])
@pytest.mark.few(1)
def test_perplexity_of_windows_that_are_read_exactly(tmp_path, capsys, calibration, window, is_exact):
    """Keys of 4 bits keep the first tokens and the latest 128 exact: in such a window nothing is read from codes."""
    text = tmp_path / "text.py"
    text.write_text(CODE * 24)
    flags = ["--kv", "q4", "--kv-calibration", str(calibration), "--ctx-window", str(window), "--backend", "numpy"]
    assert main(["perplexity", "demo", "--text", str(text), *flags, "--json", "--reference", "demo"]) == 0
    out, said = capsys.readouterr()
    assert (json.loads(out)["agreement"]["kl"]["value"] == 0) == is_exact
    assert (f"reads windows of up to {window} tokens exactly" in said) == is_exact
