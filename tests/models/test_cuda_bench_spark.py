"""Benchmarks of mixtures whose routing is replayed, with all experts on the GPU and with some."""

import csv
import re

import numpy as np
import pytest
from test_synthetic import SMALL

from common.expert_profile import Profile
from common.fit import predict_stacks
from common.hot_experts import HotExperts, hot_sizes
from common.models import architecture
from common.routing_trace import Skew, synthetic_trace, write_trace
from common.step import Step
from generate import bench_synthetic
from generate import synthetic as synthetic_module
from generate.__main__ import main
from generate.synthetic import METADATA, synthetic, synthetic_checkpoint

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_backend import experts  # noqa: E402
from cuda_backend.random_weights import RandomOps  # noqa: E402

pytestmark = pytest.mark.gpu

NAME, LAYERS, EXPERTS, USED = "laguna-xs.2", 3, 8, 2


@pytest.fixture
def small(monkeypatch):
    metadata = dict(METADATA[NAME]) | {f"laguna.{key}": value for key, value in SMALL[NAME].items()}
    monkeypatch.setitem(synthetic_module.METADATA, NAME, metadata)


@pytest.fixture
def trace():
    return synthetic_trace(LAYERS, EXPERTS, USED, 64, Skew())


def test_steps_follow_the_trace(small, trace):
    """Rows choose the experts of the trace's tokens, whatever the rows of the steps; prefill asks the router."""
    checkpoint = synthetic_checkpoint(f"{NAME}:q4_k_m")
    definition = architecture(checkpoint)[1]
    stacks = predict_stacks(checkpoint, definition.layout(definition.read_config(checkpoint), checkpoint), RandomOps())
    budget = hot_sizes(stacks, EXPERTS).budget_of(0.9)
    uniform = Profile(np.ones((LAYERS + 1, EXPERTS), np.int64), USED)
    ops = RandomOps(HotExperts(budget, USED, uniform), trace, 60)
    model = synthetic(f"{NAME}:q4_k_m", ops)
    state, store = model.new_state(64), ops.context.experts
    for n in (1, 1, 1, 5, 5, 5, 1):
        model.forward(state, Step.chain(np.arange(n, dtype=np.int32), state.length))
    store.stats()
    tokens = np.arange(60, 60 + 19) % 64
    expected = [np.bincount(trace.ids[tokens, i].ravel(), minlength=EXPERTS) for i in range(LAYERS)]
    assert np.array_equal(store.residency.counts[store.layers], expected)
    assert store.memory.keys() == {n for n in store.residency.sizes if n}


def test_bench(small, trace, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_synthetic, "REPEATS", 2)
    monkeypatch.setattr(bench_synthetic, "WARM_RUNS", 1)
    monkeypatch.setattr(experts, "LINK_BYTES", 1 << 20)
    monkeypatch.setattr(RandomOps, "copy_bandwidth", lambda self: 1e9)
    file, table = tmp_path / "t.npz", tmp_path / "rows.tsv"
    write_trace(file, trace)
    argv = ["bench", "--backend", "cuda", "--synthetic", f"{NAME}:q4_k_m", "--contexts", "3", "--rows", "1,4"]
    argv += ["--prefill", "8", "--runs", "1", "--routing", str(file), "--log", str(table)]
    assert main(argv) == 0
    assert "slots" not in capsys.readouterr().out
    assert main([*argv, "--spark", "--expert-vram", "90%"]) == 0
    out = capsys.readouterr().out
    moved = r"\d+ slots, \d+\.\d+% hits, \d+\.\d MB per row; \d+ experts moved to slots; the link's \d+\.\d GB/s allow"
    assert re.search(moved + r" \d+ rows/s", out)
    notes = [row["note"] for row in csv.DictReader(table.open(), delimiter="\t")]
    assert sum("hits" in note for note in notes) == 2


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        (NAME, ["--spark", "--expert-vram", "1%"], "the least for this model is"),
        (NAME, ["--spark", "--expert-vram", "20GB"], "so spark has no effect"),
        (NAME, ["--spark", "--expert-vram", "120%"], "a share is above 0% and below 100%"),
        ("wedlm-8b", ["--spark", "--expert-vram", "70%"], "wedlm-8b:q4_k_m has no experts"),
        ("qwen3.6-27b", [], "qwen3.6-27b:q4_k_m has no experts"),
    ],
)
def test_refusals(name, flags, message, small, trace, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(experts, "LINK_BYTES", 1 << 20)
    monkeypatch.setattr(RandomOps, "copy_bandwidth", lambda self: 1e9)
    write_trace(tmp_path / "t.npz", trace)
    for other in ("wedlm-8b", "glm-4.7-flash"):
        architecture = METADATA[other]["general.architecture"]
        keys = {f"{architecture}.{key}": value for key, value in SMALL[other].items()}
        monkeypatch.setitem(synthetic_module.METADATA, other, dict(METADATA[other]) | keys)
    argv = ["bench", "--backend", "cuda", "--synthetic", f"{name}:q4_k_m", "--contexts", "3", "--rows", "1"]
    assert main([*argv, "--prefill", "8", "--routing", str(tmp_path / "t.npz"), *flags]) in (1, 2)
    assert message in capsys.readouterr().err
