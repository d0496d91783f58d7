"""The throughput model against published rates, within 25 %, and the command that prints it."""

import json
import re

import numpy as np
import pytest
import tiny

from common.expert_plan import MACHINES, MIXTURES, Machine, budgets, plan, rate_at, zipf
from common.expert_profile import Profile, write_profile
from common.routing_trace import Trace, write_trace
from generate.__main__ import main

LARGE, SMALL = MIXTURES["qwen3.5-397b-a17b"], MIXTURES["qwen3.6-35b-a3b"]
READ = LARGE.used * LARGE.expert_bytes
# flash-moe published the times of a layer: 1.22 + 0.55 ms on the GPU and 0.1 ms on the CPU, four reads in 1.0 ms from
# the system's cache and in 5.8 ms from the disk
M3_MAX = Machine("m3-max-48gb", 48e9, 1e18, READ / 5.8e-3, READ / 1.0e-3, 1.87e-3)
PUBLISHED = {  # mixture, machine, share in memory, share from the system's cache, tokens per second
    "flash-moe, 71 % from the cache": (LARGE, M3_MAX, 0, 0.71, 3.9),
    "Spark, all on the GPU": (MIXTURES["laguna-xs.2"], MACHINES["rtx3090-24gb"], 1, 0, 119),
    "Spark, 60 % calibrated": (MIXTURES["laguna-xs.2"], MACHINES["rtx3090-24gb"], 0.934, 0, 81),
    "Spark, 60 % uniform": (MIXTURES["laguna-xs.2"], MACHINES["rtx3090-24gb"], 0.64, 0, 66),
    "Spark, cache and one graph": (MIXTURES["laguna-xs.2"], MACHINES["rtx3090-24gb"], 1, 0, 100),
    "SwiftLM, 90 % from the cache": (MIXTURES["qwen3.5-122b-a10b"], MACHINES["m1-ultra-64gb"], 0, 0.9, 4.95),
    "turboquant-mlx, 2 GB": (SMALL, MACHINES["m4-16gb"], 0.6, 0, 3.0),
    "turboquant-mlx, 8 GB": (SMALL, MACHINES["m4-16gb"], 0.91, 0, 4.5),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_rates_are_met_within_a_quarter(name):
    mixture, machine, hits, cached, expected = PUBLISHED[name]
    rate = rate_at(mixture, machine, 0, hits, cached).tokens_per_second
    print(f"{name}: {rate:.2f}, published {expected} ({rate / expected - 1:+.0%})")
    assert abs(rate / expected - 1) < 0.25


def test_published_hit_rates_follow_from_one_skew():
    """Of 12.5 % and 50 % of the experts, of 16 % and of 17 %: to a tenth of all choices."""
    for experts, share, expected in ((256, 0.125, 0.60), (256, 0.5, 0.91), (256, 0.16, 0.54), (512, 0.17, 0.71)):
        assert abs(zipf(experts, 0.9)(share) - expected) < 0.1


def test_uniform_use_hits_as_much_as_is_in_memory():
    assert [round(zipf(256, 0.0)(share), 9) for share in (0, 0.25, 1)] == [0, 0.25, 1]


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_more_memory_for_experts_is_never_slower(machine):
    """In this model, whose reads from the system's cache cost no more than from slots that are as large."""
    mixture = MIXTURES["laguna-xs.2"]
    rates = [plan(mixture, machine, size, zipf(256, 0.9)).tokens_per_second for size in budgets(mixture, machine)]
    assert rates == sorted(rates)


def test_a_large_mixture_on_64_gb_is_limited_by_launches():
    """Qwen3.5-122B-A10B, by the launch times that were published there."""
    mixture, machine = MIXTURES["qwen3.5-122b-a10b"], MACHINES["m1-ultra-64gb"]
    rate = plan(mixture, machine, 16 * 10**9, zipf(256, 0.9))
    assert 4.5 < rate.tokens_per_second < 6
    assert rate.limit == "GPU and launches"


def test_the_command_prints_a_table(capsys, tmp_path):
    assert main(["plan", "qwen3.5-122b-a10b", "--machine", "m1-ultra-64gb"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"best: [\d.]+ GB, 5\.\d+ tok/s, limited by GPU and launches", out)
    assert main(["plan", str(tiny.FOLDER / "laguna"), "--machine", "m4-16gb", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows["mixture"]["layers"] == 5
    assert rows["mixture"]["expert_bytes"] == 3 * 16 * 32 * 2
    write_profile(tmp_path / "p.csv", Profile(np.eye(6, 8, dtype=np.int64), 3))
    (tmp_path / "mine.json").write_text(
        json.dumps({"memory": 16e9, "bandwidth": 1e11, "disk": 2e9, "cached": 1e10, "layer": 1e-3})
    )
    more = "--expert-profile", str(tmp_path / "p.csv"), "--machine", str(tmp_path / "mine.json")
    assert main(["plan", str(tiny.FOLDER / "glm"), *more]) == 1
    assert "is the profile of another model: it counts 6 layers of 8" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["1TB", "1MB"])
def test_memory_for_experts_that_a_machine_does_not_have(size, capsys):
    """What was asked for was cut to the size of all experts before it was compared and named."""
    assert main(["plan", "qwen3.5-122b-a10b", "--machine", "m1-ultra-64gb", "--expert-cache", size]) == 2
    shown = {"1TB": "1000.00 GB", "1MB": "1.0 MB"}[size]
    assert f"--expert-cache is {shown}; on m1-ultra-64gb it must be from " in capsys.readouterr().err


def test_a_trace_gives_the_hits_of_its_own_locality(capsys, tmp_path):
    """Traffic that repeats its experts needs no reads once they are in memory; a trace of another model is refused."""
    ids = np.tile(np.arange(3, dtype=np.int32), (40, 5, 1))
    write_trace(tmp_path / "t.npz", Trace(ids, 8))
    ask = "plan", str(tiny.FOLDER / "laguna"), "--machine", "m4-16gb", "--json", "--trace", str(tmp_path / "t.npz")
    assert main([*ask]) == 0
    hits = [row["hits"] for row in json.loads(capsys.readouterr().out)["rates"]]
    assert hits[0] == 0  # LRU over one slot per layer
    assert hits[-1] == 1
    assert main(["plan", "laguna-xs.2", *ask[2:]]) == 1
    assert "the trace is of another model" in capsys.readouterr().err
    assert main([*ask, "--skew", "1"]) == 2
    assert "--trace and --skew exclude each other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--machine", "m9"), "machine 'm9' is neither a file nor one of m1-ultra-64gb"),
        (("--machine", "{tmp}/a.json"), "a.json lacks 'bandwidth'; a machine has name, memory"),
        (("--machine", "{tmp}/b.json"), "b.json has 'speed'; a machine has name, memory"),
        (("--machine", "{tmp}/c.json"), "c.json: disk is -1; it must be a number above 0"),
        (("--machine", "m4-16gb", "--expert-cache", "15GB"), "--expert-cache is 15.00 GB; on m4-16gb it must be from"),
        (("--machine", "m4-16gb", "--skew", "9"), "--skew is 9.0; it must be from 0"),
        ((), "--machine"),
    ],
)
def test_bad_input_is_one_sentence(argv, message, capsys, tmp_path):
    rates = {"memory": 16e9, "bandwidth": 1e11, "disk": 2e9, "cached": 1e10, "layer": 1e-3}
    (tmp_path / "a.json").write_text(json.dumps({"memory": 16e9}))
    (tmp_path / "b.json").write_text(json.dumps(rates | {"speed": 1}))
    (tmp_path / "c.json").write_text(json.dumps(rates | {"disk": -1}))
    assert main(["plan", "qwen3.6-35b-a3b", *(part.format(tmp=tmp_path) for part in argv)]) == 2
    assert message in capsys.readouterr().err


def test_what_does_not_fit_is_one_sentence(capsys, tmp_path):
    rates = {"memory": 8e9, "bandwidth": 1e11, "disk": 2e9, "cached": 1e10, "layer": 1e-3}
    (tmp_path / "small.json").write_text(json.dumps(rates))
    assert main(["plan", "qwen3.5-397b-a17b", "--machine", str(tmp_path / "small.json")]) == 1
    expected = "does not run on small: 8 GB leave 0.0 GB for experts, and one layer's take 3.6 GB"
    assert expected in capsys.readouterr().err
    assert main(["plan", str(tiny.FOLDER / "llama"), "--machine", "m4-16gb"]) == 1
    assert "has no experts to stream" in capsys.readouterr().err
