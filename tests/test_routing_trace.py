"""Traces of routing: what a synthetic one is like, its files, and what is refused."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from common.errors import BimetalError
from common.routing_trace import Skew, Trace, read_trace, synthetic_trace, write_trace

ROOT = Path(__file__).parents[1]


def test_each_token_chooses_different_experts():
    ids = synthetic_trace(3, 16, 4, 200, Skew()).ids
    assert ids.shape == (200, 3, 4)
    assert all(len(set(row)) == 4 for row in ids.reshape(-1, 4).tolist())


def test_skew_and_locality():
    """Hits of an LRU cache are near those that are published for real traffic: 60 % with 12.5 %, 91 % with half."""
    trace = synthetic_trace(2, 256, 8, 4096, Skew())
    assert 0.55 < trace.lru_hits(0.125) < 0.70
    assert 0.88 < trace.lru_hits(0.5) < 0.97
    flat = synthetic_trace(2, 256, 8, 1024, Skew(0, 0, 512, 0))
    assert flat.lru_hits(0.5) == pytest.approx(0.5, abs=0.03)
    again = [np.isin(b, a).mean() for a, b in zip(flat.ids[:, 0], flat.ids[1:, 0], strict=False)]
    assert np.mean(again) == pytest.approx(8 / 256, abs=0.02)
    kept = synthetic_trace(2, 256, 8, 512, Skew(0, 0, 512, 0.5))
    again = [np.isin(b, a).mean() for a, b in zip(kept.ids[:, 0], kept.ids[1:, 0], strict=False)]
    assert np.mean(again) == pytest.approx(0.5, abs=0.05)


def test_a_trace_over_more_layers():
    trace = synthetic_trace(2, 8, 2, 10, Skew())
    ids = trace.over(5, 8, 2).ids
    assert ids.shape == (10, 5, 2)
    assert np.array_equal(ids[:, :2], trace.ids)
    assert np.array_equal(ids[:, 2], np.roll(trace.ids[:, 0], -3, axis=0))
    assert np.array_equal(trace.over(1, 8, 2).ids, trace.ids[:, :1])
    with pytest.raises(BimetalError, match="its tokens take 2 of 8 experts, and this model's 4 of 8"):
        trace.over(2, 8, 4)


def test_the_recorded_trace():
    trace = read_trace(ROOT / "examples" / "benchmarks" / "demo-moe.routing.npz")
    assert trace.experts == 64
    assert 0.35 < trace.over(1, 64, 4).lru_hits(0.3) < 1


def test_lru_by_hand():
    """Two experts of four fit: of the second half's 0, 1, 2, 0 only the 1 is still held."""
    ids = np.array([0, 1, 0, 1, 0, 1, 2, 0], np.int32).reshape(-1, 1, 1)
    assert Trace(ids, 4).lru_hits(0.5) == 0.5


@pytest.mark.parametrize("suffix", [".npz", ".csv"])
def test_a_trace_comes_back_as_written(suffix, tmp_path):
    trace, path = synthetic_trace(3, 16, 4, 20, Skew()), tmp_path / f"t{suffix}"
    write_trace(path, trace)
    found = read_trace(path)
    assert found.experts == 16
    assert np.array_equal(found.ids, trace.ids)
    profile = found.profile(10, [0, 2, 4])
    assert profile.counts.sum(axis=1).tolist() == [40, 0, 40, 0, 40]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "1,2,3\n", "its first line is not '# routing trace: n_layer="),
        ("t.csv", "# routing trace: n_layer=2 n_expert=8 n_expert_used=2\n0,0,1,2\n", "a token has 2 lines"),
        ("t.csv", "# routing trace: n_layer=1 n_expert=8 n_expert_used=2\n0,0,1,8\n", "below 8"),
        ("t.csv", "# routing trace: n_layer=1 n_expert=8 n_expert_used=2\n0,0,1,x\n", "is not a trace of routing"),
        ("t.npz", "PK", "is not a trace of routing"),
        (None, "", "cannot be read"),
    ],
)
def test_damaged_traces_are_one_sentence(name, text, message, tmp_path):
    path = tmp_path / (name or "none.csv")
    if name:
        path.write_text(text)
    with pytest.raises(BimetalError, match=re.escape(message)) as refused:
        read_trace(path)
    assert "\n" not in str(refused.value)


def test_the_example_writes_a_trace(tmp_path, capsys):
    main = runpy.run_path(str(ROOT / "examples" / "routing_trace.py"))["main"]
    main([str(tmp_path / "t.npz"), "--layers", "2", "--experts", "32", "--used", "4", "--tokens", "64"])
    assert "64 tokens; hits of an LRU cache" in capsys.readouterr().out
    assert read_trace(tmp_path / "t.npz").ids.shape == (64, 2, 4)
