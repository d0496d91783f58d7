"""Mixtures whose experts are read while they run give the bits of the loaded model, or one sentence."""

import errno
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny
import tiny_draft

from common.checkpoint import open_checkpoint
from common.decode.alone import run_alone
from common.decode.run import DecoderRun
from common.decoders import Speculation
from common.errors import BimetalError
from common.expert_files import checkpoint_source
from common.expert_profile import Profile, least_bytes
from common.expert_stream import open_stream, sizes_of
from common.models import load_model
from common.models.drafts import load_pair
from common.sampling import Sampler, Sampling
from common.step import Step
from common.tensors import stored_at

sys.path.append(str(Path(__file__).parent / "models"))
MIXTURES = ("qwen35moe", "qwen3next", "qwen3moe", "laguna", "glm", "glm4moe", "deepseek2", "deepseek3", "granitemoe")


def streamed(checkpoint, ops, layers_held=1.0, **options):
    """The model with room for the experts of `layers_held` layers of each kind."""

    def open_experts(checkpoint, layout, config):
        source, layers = checkpoint_source(checkpoint, layout), len(layout.layers)
        sizes, kinds = sizes_of(source.forms, ops, layers)
        budget = int(layers_held * least_bytes(sizes, config.experts.count, kinds))
        return open_stream(source, ops, layers, config.experts.top_k, budget, **options)

    return load_model(checkpoint, ops, open_experts=open_experts)


@pytest.fixture(params=["bf16", "F16", "Q8_0", "Q4_0", "mlx"])
def stored(request, tmp_path):
    """A function from a mixture's name to its checkpoint, in safetensors, GGUF or MLX's groups."""

    def open_as(name):
        if request.param == "bf16":
            return tiny.checkpoint(name)
        if request.param == "mlx":
            from generate.__main__ import main

            assert main(["quantize", str(tiny.FOLDER / name), str(tmp_path / "q"), "--group-size", "32"]) == 0
            return open_checkpoint(tmp_path / "q")
        gguf_files = pytest.importorskip("gguf_files")
        return open_checkpoint(gguf_files.write_gguf(tiny.FOLDER / name, tmp_path / f"{name}.gguf", request.param))

    return open_as


@pytest.mark.parametrize("name", [*MIXTURES, "gptoss"])
@pytest.mark.few(5)
def test_logits_have_the_bits_of_the_loaded_model(name, stored, ops):
    """Prefill of many rows, single rows, and rows in between, with room for one layer and for two and a half."""
    checkpoint = stored(name)
    if name == "gptoss" and checkpoint is tiny.checkpoint(name):  # whose matrices are transposed
        with pytest.raises(BimetalError, match="gate_up_proj is converted when it is loaded, so it cannot be streamed"):
            streamed(checkpoint, ops)
        return
    ids, whole = tiny.golden(name)["ids"][:120], load_model(checkpoint, ops)
    pieces = (64, 1, 1, 1, 7, 1, 20)
    expected = tiny.logits_of(whole, ids, pieces)
    for held in (1, 2.5):
        model = streamed(checkpoint, ops, held)
        np.testing.assert_array_equal(tiny.logits_of(model, ids, pieces), expected)
        stats = model.expert_stream.stats()
        assert stats.misses > 0
        assert stats.hits > 0 or held == 1
        assert stats.tokens == 120
        assert stats.peak <= stats.budget
        assert stats.bytes_read >= stats.misses * min(form.nbytes for form in model.expert_stream.source.forms.values())
        assert model.step_bytes == whole.step_bytes or ops.name == "numpy"  # which decodes resident weights once
        model.expert_stream.close()


def rows_in_a_tree(model, ids):
    """Logits of a tree after a prompt, of which a path is kept, and of a row after it."""
    state = model.new_state(tiny.CAPACITY)
    tiny.run(model, state, ids[:10])
    parents = [-1, 0, 0, 1, 2, 2]
    out = [model.ops.read(model.forward(state, Step.tree(ids[10:16].astype(np.int32), parents, state.length)))]
    state.commit([0, 2, 5])
    out.append(model.ops.read(model.forward(state, Step.chain(ids[16:17].astype(np.int32), state.length))))
    return np.concatenate(out)


@pytest.mark.parametrize("name", MIXTURES)
def test_trees_have_the_bits_of_the_loaded_model(name, ops):
    ids = tiny.golden(name)["ids"]
    checkpoint = tiny.checkpoint(name)
    expected = rows_in_a_tree(load_model(checkpoint, ops), ids)
    np.testing.assert_array_equal(rows_in_a_tree(streamed(checkpoint, ops), ids), expected)


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.few(1)
def test_a_draft_accepts_as_on_the_loaded_model(name, ops, tmp_path):
    """Hidden states that a draft taps keep their bits although slots are read into before the draft runs."""
    checkpoint, replies = tiny.checkpoint(name), []
    whole = load_model(checkpoint, ops)
    c, layers = whole.config, len(whole.layout.layers)
    folder = tiny_draft.write(tmp_path / "draft", c.hidden, c.vocab, layers, [0, layers - 1], laguna=name == "laguna")
    prompt = tiny.golden(name)["ids"][:20].tolist()
    for model in (whole, streamed(checkpoint, ops, 1.5)):
        pair = load_pair(folder, model)
        state = pair.new_state(tiny.CAPACITY)
        logits = pair.forward(state, Step.chain(np.array(prompt, np.int32), 0))
        state.commit(np.arange(len(prompt)))
        run = DecoderRun(pair, state, logits[-1:], Sampler(Sampling(), prompt), list(prompt), Speculation("tree", 6))
        rows = [(token, ops.read(row)) for (token, row), _ in zip(run_alone(run), range(40), strict=False)]
        replies.append(rows)
    assert [token for token, _ in replies[0]] == [token for token, _ in replies[1]]
    for (_, row), (_, other) in zip(*replies, strict=True):
        np.testing.assert_array_equal(row, other)


def test_the_most_used_experts_of_a_profile_are_read_first(ops):
    checkpoint = tiny.checkpoint("laguna")
    counts = np.zeros((6, 8), np.int64)
    counts[1:, :3] = 5
    model = streamed(checkpoint, ops, 2, profile=Profile(counts, 2))
    assert all(set(model.expert_stream.residency.resident(layer)) >= {0, 1, 2} for layer in range(1, 6))
    before = model.expert_stream.stats()
    tiny.logits_of(model, tiny.golden("laguna")["ids"][:5])
    assert model.expert_stream.stats(before).hits > 0
    assert model.expert_stream.residency.counts.sum() == 5 * 5 * model.config.experts.top_k


class Disk:
    """`os.preadv` that fails, or reads less than it was asked for, when its turn comes."""

    def __init__(self, monkeypatch, failing=lambda call: None, most=None, delay=0.0):
        self.calls, self._real, self._failing, self._most, self._delay = 0, os.preadv, failing, most, delay
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, fd, views, offset):
        self.calls += 1
        time.sleep(self._delay)
        if (error := self._failing(self.calls)) is not None:
            raise error
        if self._most is None:
            return self._real(fd, views, offset)
        return self._real(fd, [views[0][: self._most]], offset)


@pytest.mark.few(1)
def test_short_and_slow_reads_change_nothing(monkeypatch, ops):
    checkpoint, ids = tiny.checkpoint("laguna"), tiny.golden("laguna")["ids"][:20]
    expected = tiny.logits_of(load_model(checkpoint, ops), ids, [10] + 10 * [1])
    disk = Disk(monkeypatch, most=333, delay=0.001)
    model = streamed(checkpoint, ops)
    np.testing.assert_array_equal(tiny.logits_of(model, ids, [10] + 10 * [1]), expected)
    assert disk.calls > 5 * model.expert_stream.stats().misses
    assert model.expert_stream.stats().read_p95 > 0.01


def test_a_disk_that_fails_is_one_sentence_and_no_wrong_token(monkeypatch, ops):
    """The step that needed the read fails; once the disk answers, the same step gives the right bits."""
    checkpoint, ids = tiny.checkpoint("laguna"), tiny.golden("laguna")["ids"][:20]
    expected = tiny.logits_of(load_model(checkpoint, ops), ids, [10] + 10 * [1])
    broken = [False]
    Disk(monkeypatch, failing=lambda call: OSError(errno.EIO, "Input/output error") if broken[0] else None)
    model = streamed(checkpoint, ops)
    state = model.new_state(tiny.CAPACITY)
    got = [tiny.run(model, state, ids[:10])]
    broken[0] = True
    with pytest.raises(BimetalError, match=r"model.safetensors cannot be read at byte \d+: Input/output error EIO$"):
        tiny.run(model, state, ids[10:11])
    broken[0] = False
    got.append(tiny.run(model, state, ids[10:], 10 * [1]))
    np.testing.assert_array_equal(np.concatenate(got), expected)


@pytest.mark.parametrize("change", ["touch", "cut", "replace"])
def test_a_file_that_changes_is_one_sentence(change, ops, tmp_path):
    """A file in whose place another one is put is still open, and goes on giving the right bits."""
    shutil.copytree(tiny.FOLDER / "laguna", tmp_path / "model")
    file, ids = tmp_path / "model/model.safetensors", tiny.golden("laguna")["ids"][:20]
    checkpoint = open_checkpoint(tmp_path / "model")
    model = streamed(checkpoint, ops)
    state = model.new_state(tiny.CAPACITY)
    got = [tiny.run(model, state, ids[:10])]
    if change == "replace":
        other = tmp_path / "other"
        other.write_bytes(bytes(file.stat().st_size))
        other.replace(file)
        got.append(tiny.run(model, state, ids[10:]))
        np.testing.assert_array_equal(
            np.concatenate(got), tiny.logits_of(load_model(tiny.checkpoint("laguna"), ops), ids, [10])
        )
        return
    if change == "touch":
        os.utime(file, ns=(1, 1))
    else:
        os.truncate(file, 40000)
    with pytest.raises(
        BimetalError, match=r"has changed since the model was loaded|ends at byte 40000, before an expert"
    ):
        tiny.run(model, state, ids[10:])


def test_damaged_scales_are_found_when_an_expert_is_read(ops, tmp_path):
    gguf_files = pytest.importorskip("gguf_files")
    path = gguf_files.write_gguf(tiny.FOLDER / "laguna", tmp_path / "m.gguf", "Q8_0")
    tensor = open_checkpoint(path).tensors["blk.2.ffn_up_exps.weight"]
    _, offset = stored_at(tensor.data)
    with path.open("r+b") as file:
        file.seek(offset + tensor.data[:4].nbytes)
        file.write(b"\xff\xff")  # expert 4's first scale is NaN
    model = streamed(open_checkpoint(path), ops)
    with pytest.raises(BimetalError, match=r"tensor 'blk.2.ffn_up_exps.weight' \(Q8_0\) is not finite at block 0"):
        tiny.logits_of(model, tiny.golden("laguna")["ids"][:100])


def test_what_cannot_be_streamed_is_one_sentence(ops):
    with pytest.raises(BimetalError, match=r"llama has no experts to stream"):
        streamed(tiny.checkpoint("llama"), ops)
    with pytest.raises(BimetalError, match=r"the least is .* which one layer's 8 experts take"):
        streamed(tiny.checkpoint("glm"), ops, 0.99)


def test_reads_bypass_the_cache_where_files_are_much_larger_than_memory(monkeypatch, ops):
    checkpoint = tiny.checkpoint("glm")
    model = streamed(checkpoint, ops)
    source = model.expert_stream.source
    assert not source.bypass_cache(source.file_bytes)
    assert source.bypass_cache(source.file_bytes // 5)
    dropped = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, at, count, what: dropped.append(count), raising=False)
    tiny.logits_of(model, tiny.golden("glm")["ids"][:5])
    assert sum(dropped) == model.expert_stream.stats().bytes_read
