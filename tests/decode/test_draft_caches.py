"""The caches of a draft in the formats of the target's: the text of plain decoding, and refusals."""

from dataclasses import replace

import numpy as np
import pytest
import tiny
import tiny_draft
import tiny_eagle
from test_plain import prefilled
from test_speculative import PROMPT, assert_same, decode

from common.checkpoint import open_checkpoint
from common.decode.run import DecodeStats
from common.decoders import Speculation
from common.demo import demo_path
from common.errors import UsageError
from common.kv_cache import CacheOptions
from common.models import load_model
from common.models.drafts import load_pair
from common.reference import NumpyOps
from common.tokenizer import load_tokenizer

NEW = 14


SEEDED = {"temperature": 0.8, "seed": 3}


@pytest.mark.parametrize(
    ("formats", "sampling"), [(("q8_0", "q8_0"), SEEDED), (("q8_0", "lm4"), {}), (("lm4", "lm4"), SEEDED)]
)
def test_text_with_compressed_caches_of_a_draft(formats, sampling, ops, tmp_path):
    """Beyond a window of 8, with caches of the draft alone compressed; its logits stay close to those without."""
    target = tiny.load("qwen35", ops)
    pair = tiny_draft.packed_pair(tmp_path / "draft", target, CacheOptions(*formats, boundary=1))
    specs = [layer["kv"] for layer in pair.sequence_spec[len(target.layout.layers) :]]
    assert [spec.value_format for spec in specs] == [formats[1]] * 2  # a boundary is one of the target's layers
    prompt, proposed = tiny.golden("qwen35")["ids"][:PROMPT].tolist(), []
    for each in (pair, replace(pair, cache=CacheOptions())):
        state, _ = prefilled(each, prompt, 64)
        proposed.append(each.ops.read(each.propose(state, 5)))
        again = each.ops.read(each.propose(state, 5))
        assert np.array_equal(proposed[-1], again)
    assert 0 < np.abs(proposed[0] - proposed[1]).mean() < 0.2
    expected, margins, _ = decode(target, prompt, 7, **sampling)
    kind = "tree" if sampling else "chain"
    assert_same(decode(pair, prompt, 7, Speculation(kind, 7), **sampling)[0], expected, margins, ops)


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
def test_text_with_a_compressed_cache_of_an_eagle_draft(sampling, ops, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_eagle, "HEAD_DIM", 64)
    target, prompt = tiny.load("llama", ops), tiny.golden("llama")["ids"][:PROMPT].tolist()
    plain = load_pair(tiny_eagle.write(tmp_path / "draft", 32, 96, [0, 1, 1]), target)
    pair = tiny_draft.packed(plain, CacheOptions("q8_0", "lm4", recent=4))
    assert [layer["kv"].value_format for layer in pair.sequence_spec[-1:]] == ["lm4"]
    proposed = [each.ops.read(each.propose(prefilled(each, prompt, 64)[0], [5, 6])) for each in (pair, plain)]
    assert 0 < np.abs(proposed[0] - proposed[1]).mean() < 0.2
    expected, margins, _ = decode(target, prompt, 7, **sampling)
    assert_same(decode(pair, prompt, 7, Speculation("chain", 3), **sampling)[0], expected, margins, ops)


@pytest.mark.slow
@pytest.mark.parametrize("formats", [("q8_0", "q8_0"), ("lm4", "lm4")], ids="-".join)
def test_caches_of_a_draft_are_compressed_as_the_targets(formats):
    """The demo's text in those formats, by chain and by tree, and most of the draft tokens that it accepts without."""
    ops, lengths = NumpyOps(), []
    target = load_model(demo_path(), ops)
    prompt = load_tokenizer(demo_path(), open_checkpoint(demo_path()).config).encode("def add(a, b):\n    return")
    for cache in (CacheOptions(*formats, boundary=1), CacheOptions()):
        model = replace(target, cache=cache)
        pair = load_pair(demo_path("draft"), model)
        specs = [layer["kv"] for layer in pair.sequence_spec[len(target.layout.layers) :]]
        assert {spec.is_packed for spec in specs} == {cache.compresses}
        assert not cache.compresses or {spec.value_format for spec in specs} == {formats[1]}
        for sampling in ({}, SEEDED):
            expected, _, _ = decode(model, prompt, NEW, capacity=64, **sampling)
            for kind in ("chain", "tree"):
                accepted = DecodeStats()
                assert decode(pair, prompt, NEW, Speculation(kind, 7), 64, accepted, **sampling)[0] == expected
                lengths.append(accepted.length)
    assert np.mean(lengths[:4]) > 0.7 * np.mean(lengths[4:]) > 1


def test_heads_that_a_format_cannot_store_are_refused():
    pair = replace(
        load_pair(tiny.FOLDER / "dspark", tiny.load("qwen35", NumpyOps())), cache=CacheOptions("q8_0", "q8_0")
    )
    vars(pair)["state_spec"] = []
    words = r"the draft's cache takes the formats of the model's \(keys q8_0, values q8_0\): "
    with pytest.raises(UsageError, match=words):
        _ = pair.sequence_spec
